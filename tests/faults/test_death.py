"""Test ranks that die, through a real kernel."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Gate, Kernel, Notebook, Outcome, cluster_folders, stop_process, wait_until

pytestmark = pytest.mark.processes

WORLD = 4
TOLD_WITHIN = 10.0  # seconds; the promise is 1, which the benchmarks measure on a quiet machine

REMEMBER = "%%distributed\nremembered = rank * 10"
REDUCE = """%%distributed
total = torch.tensor(rank)
dist.all_reduce(total)
print('sum', total.item())"""


@pytest.fixture(scope="module")
def four_ranks(kernel: Kernel) -> Notebook:
    return kernel(
        ranks=WORLD, separate=True
    )  # the shared one, which has imported more, starts ranks too fast to be hit


@pytest.fixture
def four(four_ranks: Notebook) -> Iterator[Notebook]:
    """Provide four ranks with a variable. A test brings back what it kills; collectives must work again."""
    four_ranks.ok(REMEMBER)
    yield four_ranks
    dead = [rank for rank, row in status(four_ranks).items() if "dead" in row]
    if dead:
        four_ranks.ok(f"%distributed restart {','.join(map(str, dead))}", timeout=20)
    assert "[0-3] sum 6" in four_ranks.ok(REDUCE, timeout=20).stdout


def status(notebook: Notebook) -> dict[int, str]:
    """The rows of `%distributed status`, by rank."""
    lines = notebook.ok("%distributed status").text.splitlines()
    return {int(line.split()[0]): line for line in lines if line and line.split()[0].isdigit()}


def pids(notebook: Notebook) -> dict[int, int]:
    return {rank: int(row.split()[3]) for rank, row in status(notebook).items()}


def full_text(outcome: Outcome) -> str:
    """Return the complete text of the failed cell."""
    assert outcome.status == "error", outcome.text
    return f"{outcome.text}\n{outcome.evalue}\n{outcome.traceback}"


def one_line_error(outcome: Outcome) -> str:
    assert outcome.status == "error", outcome.text
    assert "\n" not in outcome.evalue
    assert outcome.traceback.count("\n") == 0, outcome.traceback
    return outcome.traceback


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os._exit(3)", "rank 2 exited with code 3"),
        ("os._exit(0)", "rank 2 exited with code 0"),
        ("os.kill(os.getpid(), 9)", "rank 2 was killed by SIGKILL (out of memory?)"),
        ("import ctypes; ctypes.string_at(0)", "rank 2 was killed by SIGSEGV (segmentation fault)"),
        ("os.abort()", "rank 2 was killed by SIGABRT"),
    ],
)
def test_a_death_is_an_ordinary_error_of_its_cell(four, death, words):
    failed = four.run(
        f"%%distributed\nimport os\nif rank == 2:\n    print('last words', end='')\n    {death}\nprint('done')"
    )
    number = failed_number(four)
    assert failed.seconds < TOLD_WITHIN
    assert f"{words} while running cell [{number}]" in full_text(failed)
    assert "last words" in failed.stdout
    if "string_at" in death:
        assert "[2] Fatal Python error: Segmentation fault, innermost call first:" in failed.stderr
        assert f"Cell In[{number}], line 5 in <module>" in failed.stderr
        assert "IPython/core" not in failed.stderr
    assert "done" in failed.stdout, "the other ranks had ended by themselves"

    rows = status(four)
    assert "dead" in rows[2]
    assert words.removeprefix("rank 2 ") in rows[2]
    assert all("idle" in rows[rank] for rank in (0, 1, 3))

    refused = one_line_error(four.run("%%distributed\nprint('never')"))
    assert words in refused
    assert "%distributed restart 2" in refused
    assert "--ranks 0-1,3" in refused
    assert sorted(four.ok("%%distributed --ranks 0-1,3\nprint(remembered)").stdout.split("\n")) == [
        "",
        "[0] 0",
        "[1] 10",
        "[3] 30",
    ]

    assert "rank 2 restarted" in four.ok("%distributed restart 2", timeout=20).stdout
    assert "[0-3] sum 6" in four.ok(REDUCE, timeout=20).stdout
    output = four.ok("%%distributed\nprint('remembered' in globals())").stdout
    assert "[0-1,3] True" in output
    assert "[2] False" in output


def failed_number(notebook: Notebook) -> int:
    """The number of the cell that ran last, as the front end counts it."""
    return int(notebook.ok("len(In) - 2").displays[0]["text/plain"])


def test_memory_that_runs_out_in_python_is_an_error_and_no_death(four):
    failed = four.run("%%distributed\nif rank == 2:\n    bytearray(1 << 62)")
    assert failed.ename == "MemoryError"
    assert "idle" in status(four)[2]
    assert "[2] 20" in four.ok("%%distributed\nprint(remembered)").stdout


def test_output_before_the_death_is_complete(four):
    lines = 5000
    failed = four.run(
        f"%%distributed --ranks 1\nfor n in range({lines}):\n    print('line', n)\nimport os; os._exit(1)"
    )
    assert [line for line in failed.stdout.splitlines() if "line" in line] == [f"[1] line {n}" for n in range(lines)]


def test_output_of_c_code_and_subprocesses_before_the_death_is_shown(four):
    failed = four.run(
        "%%distributed --ranks 1\nimport os, ctypes\nos.system('echo from a child')\n"
        "ctypes.CDLL(None).write(1, b'from C', 6)\nos.write(2, b'an error')\nos.kill(os.getpid(), 9)"
    )
    assert "from a child" in failed.stdout
    assert "from C" in failed.stdout
    assert "an error" in failed.stderr


def test_a_death_while_idle_is_reported_by_status_and_by_the_next_cell(four):
    os.kill(pids(four)[3], signal.SIGKILL)
    wait_until(lambda: "dead" in status(four)[3], timeout=TOLD_WITHIN, what="status says that rank 3 is dead")
    assert "killed by SIGKILL" in status(four)[3]
    refused = one_line_error(four.run("%%distributed --ranks 2-3\nprint('never')"))
    assert "rank 3 was killed by SIGKILL" in refused
    assert "%distributed restart 3" in refused


def test_several_deaths_in_one_cell_are_all_reported(four):
    failed = four.run("%%distributed\nimport os\nif rank in (1, 3):\n    os._exit(rank)\nprint('done')")
    assert failed.seconds < TOLD_WITHIN
    assert "rank 1 exited with code 1" in full_text(failed)
    assert "rank 3 exited with code 3" in full_text(failed)
    refused = one_line_error(four.run("%%distributed\nprint('never')"))
    assert "%distributed restart 1,3" in refused
    assert "--ranks 0,2" in refused
    output = four.ok("%distributed restart 3", timeout=20).stdout
    assert "%distributed restart 1" in output, "the group still waits for rank 1, and says so"
    assert "[3] back" in four.ok("%%distributed --ranks 3\nprint('back')").stdout


def test_all_ranks_can_be_restarted_after_all_have_died(four):
    failed = four.run("%%distributed\nimport os\nos.kill(os.getpid(), 9)")
    assert failed.seconds < TOLD_WITHIN
    assert "killed by SIGKILL" in full_text(failed)
    refused = one_line_error(four.run("%%distributed\nprint('never')"))
    assert "%distributed restart 0-3" in refused
    assert "--ranks" not in refused, "there is nobody to do it with"
    assert "ranks 0-3 restarted" in four.ok("%distributed restart", timeout=20).stdout
    assert "[0-3] sum 6" in four.ok(REDUCE, timeout=20).stdout


def test_death_during_a_collective_releases_waiting_and_sleeping_ranks(four):
    failed = four.run(
        "%%distributed\nimport os, time\nif rank == 2:\n    time.sleep(0.2)\n    os._exit(5)\n"
        "if rank == 0:\n    time.sleep(600)\ndist.barrier()",
        timeout=30,
    )
    assert failed.seconds < TOLD_WITHIN
    assert "rank 2 exited with code 5" in full_text(failed)
    assert "KeyboardInterrupt" not in failed.stdout + failed.stderr
    assert "[0] 0" in four.ok("%%distributed --ranks 0\nprint(remembered)", timeout=10).stdout


def test_an_interrupt_that_comes_while_a_rank_describes_its_broken_wait_does_not_hide_the_cause(four):
    slow = """%%distributed
import linecache, os, time
if rank == 2:
    time.sleep(0.2)
    os._exit(5)
kept, delays = linecache.getlines, [0.4]
def getlines(*arguments):
    time.sleep(delays.pop() if delays else 0)
    return kept(*arguments)
linecache.getlines = getlines
dist.all_reduce(torch.ones(2))"""
    failed = four.run(slow, timeout=30)
    four.ok("%%distributed --ranks 0-1,3\nlinecache.getlines = kept")
    words = full_text(failed)
    assert "KeyboardInterrupt" not in words
    assert "CollectiveAborted: rank 2 exited with code 5 while this rank waited in all_reduce" in words


def test_rank_that_ignores_the_interrupt_does_not_block_the_notebook(four):
    failed = four.run(
        "%%distributed --ranks 0,2\nimport os, time\nif rank == 2:\n    os._exit(5)\n"
        "end = time.monotonic() + 60\nwhile time.monotonic() < end:\n"
        "    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        pass",
        timeout=30,
    )
    assert failed.seconds < TOLD_WITHIN
    assert "rank 2 exited with code 5" in full_text(failed)
    assert "rank 0 still runs" in full_text(failed)
    assert "[1] 10" in four.ok("%%distributed --ranks 1\nprint(remembered)").stdout
    assert "rank 0 restarted" in four.ok("%distributed restart 0", timeout=20).stdout


def test_a_background_cell_that_loses_a_rank_ends_with_an_error_and_says_so(four):
    code = "%%distributed --background --ranks 2\nimport os, time; time.sleep(0.3); os._exit(9)"
    four.ok(code.replace("%%distributed", "%%distributed --out kept"))
    failed = four.run("try:\n    _.wait(10)\nexcept Exception as error:\n    print(type(error).__name__, error)\n_")
    assert "RankLostError" in failed.stdout
    assert "rank 2 exited with code 9 while running cell" in failed.stdout


def test_a_queued_cell_whose_rank_dies_says_that_it_never_ran(four, tmp_path):
    gate = Gate(tmp_path / "gate")
    wait = f"import os, time\n{gate.wait}\nos._exit(9)"
    four.ok(f"%%distributed --background --ranks 2\n{wait}")
    message = four.send("%%distributed --ranks 2-3\nprint('never')")
    failed = four.finish(message, seen=lambda outcome: gate.open() if "queued, waiting for" in outcome.stderr else None)
    assert "rank 2 exited with code 9 before cell" in full_text(failed)
    assert "never" not in failed.stdout
    assert "[3] 30" in four.ok("%%distributed --ranks 3\nprint(remembered)").stdout


def test_a_busy_rank_can_be_restarted_also_inside_a_collective(four):
    four.ok("%%distributed --background --ranks 1-2\nimport time\nif rank == 1:\n    dist.barrier()\ntime.sleep(600)")
    before = pids(four)
    assert "ranks 1-2 restarted" in four.ok("%distributed restart 1-2", timeout=20).stdout
    after = pids(four)
    assert {rank for rank in before if before[rank] != after[rank]} == {1, 2}
    assert not psutil.pid_exists(before[1])
    assert "[0-3] sum 6" in four.ok(REDUCE, timeout=20).stdout
    assert "[3] 30" in four.ok("%%distributed --ranks 3\nprint(remembered)").stdout


def test_restart_without_ranks_gives_all_of_them_fresh_processes(four):
    before = pids(four)
    four.ok("%distributed restart", timeout=20)
    assert not set(before.values()) & set(pids(four).values())
    assert "[0-3] False" in four.ok("%%distributed\nprint('remembered' in globals())").stdout


def new_rank(notebook: Notebook, earlier: dict[int, str]) -> int:
    """Wait for a process of the kernel's that was not known before; its id."""
    fresh: list[int] = []

    def look() -> bool:
        fresh[:] = [pid for pid in notebook.processes() if pid not in earlier]
        return bool(fresh)

    wait_until(look, timeout=30, what="a new rank's process")
    return fresh[0]


def test_a_death_while_a_rank_is_restarted_is_a_clear_error_and_another_restart_works(four):
    waiting, earlier = pids(four)[2], four.processes()
    stop_process(waiting)  # the restart cannot end before the new process was killed
    try:
        message = four.send("%distributed restart 1")
        os.kill(new_rank(four, earlier), signal.SIGKILL)
    finally:
        os.kill(waiting, signal.SIGCONT)
    failed = four.finish(message, timeout=20)
    assert "rank 1 was killed by SIGKILL" in full_text(failed)
    assert "dead" in status(four)[1]
    assert "[3] 30" in four.ok("%%distributed --ranks 3\nprint(remembered)", timeout=30).stdout
    four.ok("%distributed restart 1", timeout=20)
    assert "[0-3] sum 6" in four.ok(REDUCE, timeout=20).stdout


def test_death_during_group_formation_does_not_block_other_ranks(four):
    before = pids(four)
    earlier_processes = four.processes()

    def joined() -> set[Path]:
        return {
            key for folder in cluster_folders(four.pid) for key in folder.glob("store/key-generation-*%2Fagreement%2F1")
        }

    earlier = joined()
    stop_process(before[0])  # rank 0 will not join, so the others wait for it
    try:
        message = four.send("%distributed restart 1")
        fresh = new_rank(four, earlier_processes)
        wait_until(lambda: bool(joined() - earlier), timeout=30, what="rank 1 in the store")
        os.kill(fresh, signal.SIGKILL)
    finally:
        os.kill(before[0], signal.SIGCONT)
    failed = four.finish(message, timeout=20)
    assert "rank 1 was killed by SIGKILL" in full_text(failed)
    assert "[3] 30" in four.ok("%%distributed --ranks 3\nprint(remembered)", timeout=30).stdout
    four.ok("%distributed restart 1", timeout=20)
    assert "[0-3] sum 6" in four.ok(REDUCE, timeout=20).stdout


@pytest.mark.timeout(300)
def test_twenty_deaths_and_restarts_leave_nothing_behind(four):
    kernel = psutil.Process(four.pid)
    code = """%%local
import rankbook
for _ in range({}):
    try:
        rankbook.current().run('import os; os._exit(1)', ranks=2)
    except rankbook.RankLostError:
        rankbook.current().restart(2)"""
    four.ok(code.format(2))

    def resource_counts() -> tuple[int, ...]:
        folders = cluster_folders(four.pid)
        files = sum(len(list(folder.iterdir())) for folder in folders)
        return kernel.num_fds(), kernel.num_threads(), len(four.processes()), files, len(folders)

    before = resource_counts()  # what a moment later will have ended may be counted too
    four.ok(code.format(20), timeout=240)
    after: list[tuple[int, ...]] = []

    def settled() -> bool:
        after[:] = [resource_counts()]
        return all(now <= then for now, then in zip(after[0], before, strict=True))

    with contextlib.suppress(pytest.fail.Exception):
        wait_until(settled, timeout=30, what="no more than before")
    assert settled(), f"(descriptors, threads, processes, files, folders): {before} before, {after[0]} after"


@pytest.mark.full
def test_the_end_of_the_forkserver_is_reported_and_a_new_start_works(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 2")
    (forkserver,) = psutil.Process(fresh_notebook.pid).children()
    message = fresh_notebook.send("%%distributed\nimport time\nprint('begun')\ntime.sleep(600)")

    def kill(outcome: Outcome) -> None:
        if "begun" in outcome.stdout and forkserver.is_running():
            forkserver.kill()

    failed = fresh_notebook.finish(message, timeout=20, seen=kill)
    assert "forkserver" in full_text(failed)
    refused = one_line_error(fresh_notebook.run("%distributed restart", timeout=20))
    assert "%distributed stop" in refused
    fresh_notebook.ok("%distributed stop")
    fresh_notebook.ok("%distributed start -n 2")
    assert "[0-1] sum 1" in fresh_notebook.ok(REDUCE).stdout


LOOPS = """%%distributed
import time
end, odd = time.monotonic() + 2.5, 0
while time.monotonic() < end:
    for number in range(100_000):
        if number % 2:
            odd += 1
print('looped')"""


def live_threads(pid: int) -> list[str]:
    try:
        tasks = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it, or one of them, has just ended
        return [] if not psutil.pid_exists(pid) else ["?"]
    return [task for task in tasks if task.rpartition(")")[2].split()[0] not in "ZX"]


def test_a_loaders_worker_that_is_killed_between_two_cells_is_reported_and_its_rank_goes_on(four):
    output = four.ok(
        "%%distributed --ranks 1\nimport os\nfrom torch.utils.data import DataLoader\n"
        "batches = iter(DataLoader(list(range(100)), num_workers=1, persistent_workers=True))\n"
        "next(batches); print('worker', batches._workers[0].pid, 'of', os.getpid())"
    ).stdout
    worker, rank = map(int, re.search(r"worker (\d+) of (\d+)", output).groups())
    os.kill(worker, signal.SIGKILL)
    # Its threads may take a moment to end. Only then the rank gets SIGCHLD, which is not to come within the next cell.
    wait_until(lambda: not live_threads(worker), timeout=20, what="the worker ends")
    stderr = ""

    def full_text():
        nonlocal stderr
        outcome = four.ok("%%distributed --ranks 1\nprint('still', os.getpid())")
        assert f"still {rank}" in outcome.stdout
        stderr += outcome.stderr
        return f"DataLoader worker (pid {worker}) is killed" in stderr

    wait_until(full_text, timeout=10, what="the next cell that tells of it")
    failed = four.run("%%distributed --ranks 1\nfor batch in batches: pass")
    assert "worker" in failed.evalue + failed.traceback
    four.ok("%%distributed --ranks 1\ndel batches")  # here, and not in the midst of what comes next
    assert "idle" in status(four)[1]


def test_ranks_that_are_in_a_loop_of_python_answer_where_they_are(four):
    """The jump back in it has no line of its own, and is where another thread gets its turn."""
    outcome = four.ok(LOOPS)
    assert "[0-3] looped" in outcome.stdout
    assert not outcome.stderr


BREAKS = """%%distributed --ranks 2
import threading, time
control = next(each for each in threading.enumerate() if each.name == 'rankbook-control')
wait, fails, mended = control._link.wait, [TIMES], threading.Event()
def breaks(*args):
    if fails[0]:
        fails[0] -= 1
        raise OSError('the link is broken')
    mended.set()
    return wait(*args)
control._link.wait = breaks
control._link.wake()
assert mended.wait(60)
print('went on')"""


def test_errors_on_the_control_thread_are_reported_and_it_continues(four):
    outcome = four.ok(BREAKS.replace("TIMES", "1"))
    assert "[2] went on" in outcome.stdout
    assert "Error in Rankbook's control thread, which continues" in outcome.stderr
    assert "the link is broken" in outcome.stderr
    assert "[0-3] sum 6" in four.ok(REDUCE).stdout


def test_rank_whose_control_thread_fails_dies_with_the_reason(four):
    failed = four.run(BREAKS.replace("TIMES", "1_000_000"))
    assert failed.seconds < TOLD_WITHIN
    assert "rank 2 exited with code 1" in full_text(failed)
    assert "control thread cannot continue" in failed.stderr
    assert "the link is broken" in failed.stderr


def test_control_thread_that_cannot_report_its_error_ends_its_rank(four):
    deaf = "control._capture._send = None\ncontrol._link.wake()"
    failed = four.run(BREAKS.replace("TIMES", "1").replace("control._link.wake()", deaf))
    assert "rank 2 exited with code 1" in full_text(failed)
    assert "'NoneType' object is not callable" in failed.stderr
    assert "the link is broken" in failed.stderr
