"""`start --keep`: the kernel goes, the ranks stay, and the next kernel attaches to them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Gate, Notebook, check_nothing_left, leftovers, marked_processes, stop_process, wait_until
from tests.magics.test_comm_bridge import move, sliders

pytestmark = pytest.mark.slow

Open = Callable[..., Notebook]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Provide a folder for this test's clusters alone. The test itself ends what it keeps."""
    folder = Path(tempfile.mkdtemp(prefix="rb-", dir="/tmp"))  # pytest's are too long for a socket
    try:
        yield folder
        wait_until(lambda: not list(folder.glob("rankbook-*")), timeout=10, what=f"nothing left in {folder}")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def open_notebook(runtime_dir) -> Iterator[Open]:
    """Start kernels with the extension loaded. Check after their end that they leave nothing behind."""
    before = leftovers()
    opened: list[Notebook] = []

    def make(session: str = "") -> Notebook:
        opened.append(Notebook(env={"RANKBOOK_RUNTIME_DIR": str(runtime_dir), "JPY_SESSION_NAME": session}))
        opened[-1].ok("%load_ext rankbook")
        return opened[-1]

    try:
        yield make
        for item in opened:
            item.close()
            check_nothing_left(item.mark, before)
    finally:
        for element in opened:
            with contextlib.suppress(RuntimeError):
                element.close()
            for pid in marked_processes(element.mark):  # a test that failed leaves nothing to the next one
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def notebook(open_notebook) -> Notebook:
    """Provide a notebook with two kept ranks."""
    started = open_notebook()
    started.ok("%distributed start -n 2 --keep 60")
    return started


def restart(notebook: Notebook) -> None:
    notebook.manager.restart_kernel(now=True)
    settle(notebook)


def settle(notebook: Notebook) -> None:
    notebook.client.wait_for_ready(timeout=60)
    notebook.ok("%load_ext rankbook")


def kill(notebook: Notebook) -> None:
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive(), timeout=10, what="the kernel's end")


def refusal(notebook: Notebook, code: str) -> str:
    """Return the error text of a cell that must fail. IPython shows a UsageError as one line on stderr."""
    outcome = notebook.run(code)
    assert outcome.status == "error"
    return outcome.traceback + outcome.text


def ranks_of(notebook: Notebook) -> list[int]:
    return [
        int(pid)
        for pid in notebook.ok(
            "import rankbook\nfor each in rankbook.current().status(): print(each.pid)"
        ).stdout.split()
    ]


@pytest.mark.full
def test_the_start_line_says_how_long_the_ranks_stay(open_notebook):
    notebook = open_notebook()
    assert "the ranks stay for 10 minutes; %distributed attach" in notebook.ok("%distributed start --keep").stdout
    notebook.ok("%distributed stop")
    assert (
        "the ranks stay for 45 s" in notebook.ok("import rankbook\nrankbook.start(keep=45)\n%distributed start").stdout
    )
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_kept_ranks_work_after_two_kernel_restarts(notebook):
    notebook.ok("%%distributed\nx = rank + 10")
    pids = ranks_of(notebook)
    for _ in range(2):
        restart(notebook)
        assert "%distributed attach connects to them" in notebook.ok("%distributed status").stdout
        assert "ranks 0-1 attached" in notebook.ok("%distributed attach").stdout
        assert ranks_of(notebook) == pids
        assert notebook.ok("%distributed status").text.count("idle") == 2
        outcome = notebook.ok("%%distributed\nt = torch.ones(1) * x\ndist.all_reduce(t)\nprint(x, t.item())")
        assert "[0] 10 21.0" in outcome.stdout
        assert "[1] 11 21.0" in outcome.stdout
    notebook.ok("import numpy; big = numpy.arange(1 << 20)\n%distributed push big")
    notebook.ok("%distributed pull big\nassert all((each == numpy.arange(1 << 20)).all() for each in big)")
    assert "all ranks are in one process group" in notebook.ok("%distributed restart 1").stdout
    outcome = notebook.ok("%%distributed\nprint('x' in globals()); dist.barrier()")
    assert "[0] True" in outcome.stdout
    assert "[1] False" in outcome.stdout
    assert "2 ranks stopped" in notebook.ok("%distributed stop").stdout
    wait_until(lambda: set(notebook.processes()) == {notebook.pid}, timeout=10, what="the end of the ranks")


def run_while_detached(
    notebook: Notebook, runtime_dir: Path, cell: str, *, until: Callable[[], bool] | None = None
) -> None:
    """Run `cell` with two files, kill the kernel, and continue the cell at `go()` while it is detached.

    `until` says when the next kernel may come.
    """
    gate, ended = Gate(runtime_dir / "gate"), runtime_dir / "ended"
    head = (
        "%%distributed --background\nimport os, pathlib, select\n"
        f"def go():\n    {gate.wait}\n"
        f"def tell():\n    pathlib.Path({str(ended)!r} + str(rank)).touch()\n"
    )
    notebook.ok(head + "tell()\n" + cell)
    wait_until(lambda: len(list(runtime_dir.glob("ended*"))) == 2, timeout=20, what="the cell's beginning")
    for path in runtime_dir.glob("ended*"):
        path.unlink()
    kill(notebook)
    gate.open()
    wait_until(until or (lambda: len(list(runtime_dir.glob("ended*"))) == 2), timeout=20, what="the cell's end")
    notebook.manager.restart_kernel(now=True)
    settle(notebook)


@pytest.mark.full
def test_output_of_a_detached_cell_is_shown_once_with_its_error(notebook, runtime_dir):
    run_while_detached(
        notebook,
        runtime_dir,
        "print('before')\ngo()\nprint('same on both')\nprint('mine', rank)\ntell()\nif rank == 1:\n    1 / 0",
    )
    outcome = notebook.ok("%distributed attach")
    number = 3  # load_ext and start came before
    assert f"cell [{number}] ended on ranks 0-1; its output:\n" in outcome.stdout
    for line in ("[0-1] before", "[0-1] same on both", "[0] mine 0", "[1] mine 1"):
        assert outcome.stdout.count(line) == 1
    assert "rank 1: ZeroDivisionError: division by zero" in outcome.stderr
    missed = notebook.ok("import rankbook\n(result,) = rankbook.current().missed\nprint(result)")
    assert "error on rank 1, ok on rank 0" in missed.stdout
    restart(notebook)
    assert "same on both" not in notebook.ok("%distributed attach").text, "it has been seen"
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_output_shown_before_the_restart_is_not_repeated(notebook):
    notebook.ok("%%distributed\nprint('seen')")
    restart(notebook)
    assert "seen" not in notebook.ok("%distributed attach").text
    notebook.ok("%distributed stop")


def test_a_cell_that_still_runs_goes_on_below_the_attach_and_can_be_interrupted(notebook, runtime_dir):
    second = Gate(runtime_dir / "second")
    wait = f"{second.wait}\n"
    cell = (
        f"print('first')\ngo()\nprint('meanwhile')\ntell()\n{wait}print('afterwards')\nselect.select([], [], [], 600)"
    )
    run_while_detached(notebook, runtime_dir, cell)
    message = notebook.send("%distributed attach")
    outcome = notebook.finish(message)
    assert "cell [3] still runs on ranks 0-1; its output so far, followed by new output:\n" in outcome.stdout
    notebook.follow(message, outcome, lambda progress: "[0-1] meanwhile" in progress.stdout)
    assert "[0-1] first" in outcome.stdout
    assert "cell [3] on ranks 0-1: running" in outcome.text
    status = notebook.ok("%distributed status").text
    assert status.count("running") == 2
    assert status.count("cell [3]") == 2
    second.open()
    notebook.follow(message, outcome, lambda progress: "[0-1] afterwards" in progress.stdout)
    assert "interrupted ranks 0-1" in notebook.ok("%distributed interrupt").stdout
    notebook.follow(message, outcome, lambda progress: "cell [3] on ranks 0-1: interrupted" in progress.text)
    assert "[0-1] ok" in notebook.ok("%%distributed\nprint('ok')").stdout
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_a_widget_that_a_cell_makes_after_the_attach_is_live(notebook, runtime_dir):
    second = Gate(runtime_dir / "second")
    cell = (
        "import ipywidgets\nfrom IPython.display import display\ngo()\ntell()\n"
        f"{second.wait}\nslider = ipywidgets.IntSlider(value=3 + rank, max=50)\ndisplay(slider)\n"
        "while slider.value != 41: select.select([], [], [], 0.01)\nprint('moved')"
    )
    run_while_detached(notebook, runtime_dir, cell)
    message = notebook.send("%distributed attach")
    outcome = notebook.finish(message)
    second.open()
    notebook.follow(message, outcome, lambda progress: len(sliders(progress)) == 2)
    for name in sliders(outcome):
        move(notebook, name, 41)
    notebook.follow(message, outcome, lambda progress: "[0-1] moved" in progress.stdout)
    notebook.ok("%distributed stop")


def begin_in_foreground(notebook: Notebook, runtime_dir: Path) -> str:
    """Begin a cell that says when it runs, and goes on once the file `gate` is there."""
    message = notebook.send(
        "%%distributed\nimport os, pathlib, select\n"
        f"pathlib.Path({str(runtime_dir / 'runs')!r} + str(rank)).touch()\n"
        f"{Gate(runtime_dir / 'gate').wait}\n"
        "print('went on')"
    )
    wait_until(lambda: len(list(runtime_dir.glob("runs*"))) == 2, timeout=20, what="the cell's beginning")
    return message


# Without `now`, as front ends restart, the interrupt always reaches the kernel; with it, the kernel may die first.
@pytest.mark.parametrize("now", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_foreground_cell_goes_on_through_a_restart_of_the_kernel(notebook, runtime_dir, now):
    begin_in_foreground(notebook, runtime_dir)
    notebook.manager.restart_kernel(now=now)
    settle(notebook)
    message = notebook.send("%distributed attach")
    outcome = notebook.finish(message)
    assert "still runs on ranks 0-1" in outcome.stdout
    assert "interrupted" not in outcome.text
    Gate(runtime_dir / "gate").open()
    notebook.follow(message, outcome, lambda progress: "[0-1] went on" in progress.stdout)
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_an_interrupt_of_a_cell_on_kept_ranks_takes_less_than_a_second(notebook, runtime_dir):
    message = begin_in_foreground(notebook, runtime_dir)
    start = time.monotonic()
    notebook.interrupt()
    assert notebook.finish(message).status == "error"
    assert time.monotonic() - start < 1
    assert "[0-1] fine" in notebook.ok("%%distributed\nprint('fine')").stdout
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_attach_says_that_a_cell_was_interrupted_just_before_the_kernel_ended(notebook, runtime_dir):
    notebook.ok(
        "from rankbook.coordinator import wait\nwait._is_ending = None"
    )  # as where the request to shut down comes late
    begin_in_foreground(notebook, runtime_dir)
    notebook.manager.restart_kernel(now=False)
    settle(notebook)
    reported = notebook.ok("%distributed attach").stderr
    assert "cell [4] was interrupted " in reported
    assert " s before the kernel ended, possibly by the restart of the kernel" in reported
    restart(notebook)
    assert "was interrupted" not in notebook.ok("%distributed attach").text, "it was said once"
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_a_plain_attach_takes_the_ranks_of_this_notebook(open_notebook):
    names = ("work/first.ipynb", "work/second.ipynb")
    notebooks = [open_notebook(name) for name in names]
    for number, notebook in enumerate(notebooks):
        notebook.ok("%distributed start -n 1 --keep 60")
        notebook.ok(f"%%distributed\nnumber = {number}")
    for notebook in notebooks:
        kill(notebook)
    third = open_notebook("work/third.ipynb")
    reported = refusal(third, "%distributed attach")
    assert "found 2 kept clusters, but none of this notebook; select one with %distributed attach KEY" in reported
    assert "(first.ipynb, " in reported and "(second.ipynb, " in reported and " s old): 1 rank on cpu, gloo" in reported
    again = open_notebook(names[1])
    assert "rank 0 attached" in again.ok("%distributed attach").stdout
    assert again.ok("%%distributed\nprint(number)").stdout == "[0] 1\n"
    again.ok("%distributed stop")
    last = open_notebook(names[0])
    last.ok("%distributed attach\n%distributed stop")


@pytest.mark.full
@pytest.mark.parametrize("cell", ["%distributed start -n 1", "%%distributed --ranks 0\nprint('hello')"])
def test_a_start_says_once_that_kept_ranks_wait(open_notebook, cell):
    notebook = open_notebook("work/train.ipynb")
    assert "kept ranks are available" not in notebook.ok("%distributed start -n 1 --keep 60").text
    kill(notebook)
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    reported = notebook.ok(cell).stdout
    assert reported.startswith("kept ranks are available: ")
    assert " (train.ipynb, " in reported
    assert "kept ranks are available" not in notebook.ok("%%distributed\nprint('again')").text
    notebook.ok("%distributed stop")
    assert "rank 0 attached" in notebook.ok("%distributed attach").stdout
    notebook.ok("%distributed stop")


def test_a_restarted_notebook_starts_no_further_kept_ranks_until_those_of_before_have_ended(open_notebook):
    notebook = open_notebook("work/train.ipynb")
    notebook.ok("%distributed start -n 1 --keep 60")
    key = notebook.ok("import rankbook\nprint(rankbook.current().key)").stdout.strip()
    kill(notebook)
    restart(notebook)
    reported = refusal(notebook, "%distributed start -n 1 --keep 60")
    commands = f"%distributed attach {key}, or end them with %distributed stop {key}:\n{key} (train.ipynb, "
    assert f"connect to them with {commands}" in reported
    assert f"the kept ranks of {key} stopped" in notebook.ok(f"%distributed stop {key}").stdout
    assert "no kept ranks found" in refusal(notebook, f"%distributed stop {key}")
    assert "1 rank is ready" in notebook.ok("%distributed start -n 1 --keep 60").stdout
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_unanswered_input_request_is_repeated_after_attach(notebook, runtime_dir):
    run_while_detached(notebook, runtime_dir, "go()\ntell()\nprint('got', input('name? ') if rank == 0 else '')")
    message = notebook.send("%distributed attach")
    outcome = notebook.finish(message)
    notebook.follow(message, outcome, lambda progress: "still runs on rank 0" in progress.text)
    code = (
        "import rankbook\nfrom rankbook.magics.output_panel import ask_for\ncluster = rankbook.current()\n"
        "(cell,) = cluster.cells()\ncluster.wait(cell, ask=ask_for(get_ipython()))"
    )
    assert notebook.run(code, answers=["Ada"]).status == "ok"
    notebook.follow(message, outcome, lambda progress: "[0] got Ada" in progress.stdout)
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_a_flood_without_a_notebook_neither_blocks_a_rank_nor_is_kept_whole(notebook, runtime_dir):
    run_while_detached(
        notebook,
        runtime_dir,
        "go()\nfor i in range(200_000):\n    print(i, 'x' * 100)\nprint('the end', flush=True)\ntell()",
    )
    outcome = notebook.ok("%distributed attach")
    assert "[0-1] 0 xxx" in outcome.stdout
    assert "the end" in outcome.stdout
    assert "the complete output is written to" in outcome.stderr
    assert len(outcome.text) < 20 << 20
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_many_displays_without_a_notebook_keep_the_newest(notebook, runtime_dir):
    show = "display({'text/plain': f'picture {i} ' + 'x' * 10_000}, raw=True)"
    cell = f"from IPython.display import display\ngo()\nfor i in range(3000):\n    {show}\ntell()"
    run_while_detached(notebook, runtime_dir, cell)
    outcome = notebook.ok("%distributed attach")
    assert "picture 2999 " in outcome.text
    assert "picture 0 " not in outcome.text
    assert "ranks 0-1: the oldest output was dropped" in outcome.stderr
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_a_rank_that_died_meanwhile_is_named_and_can_be_healed(notebook, runtime_dir):
    pids = ranks_of(notebook)
    notebook.ok("%%distributed\nx = 5")
    kill(notebook)
    os.kill(pids[1], signal.SIGKILL)
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    outcome = notebook.ok("%distributed attach")
    assert "rank 0 attached" in outcome.stdout
    assert "rank 1 was killed by SIGKILL (out of memory?): %distributed heal restores it" in outcome.stdout
    assert "dead" in notebook.ok("%distributed status").text
    assert "rank 1 was healed with the state of rank 0" in notebook.ok("%distributed heal").stdout
    assert "[0-1] 5" in notebook.ok("%%distributed\ndist.barrier()\nprint(x)").stdout
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_the_stack_of_a_kept_rank_that_crashes_is_shown_after_attach(notebook):
    restart(notebook)
    notebook.ok("%distributed attach")
    failed = notebook.run("%%distributed\nif rank == 1:\n    import ctypes; ctypes.string_at(0)")
    assert failed.status == "error" and "rank 1 was killed by SIGSEGV" in failed.traceback + failed.text
    assert "[1] Fatal Python error: Segmentation fault, innermost call first:" in failed.stderr
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_ranks_survive_a_kernel_shutdown_and_another_kernel_attaches(notebook, open_notebook):
    notebook.ok("%%distributed\nx = 5")
    notebook.manager.shutdown_kernel(now=False)
    other = open_notebook()
    other.ok("%distributed start -n 1\n%distributed stop")  # which sweeps what dead kernels have left
    other.ok("%distributed attach")
    assert "[0-1] 5" in other.ok("%%distributed\nprint(x)").stdout
    other.ok("%distributed stop")


@pytest.mark.full
def test_kept_ranks_end_after_the_stated_time_without_an_owner(open_notebook, runtime_dir):
    notebook = open_notebook()
    notebook.ok("%distributed start -n 2 --keep 5")
    notebook.ok(
        "%%distributed --background\nimport subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
    )
    # The forkserver, two ranks and what their cells have started.
    wait_until(lambda: len(notebook.processes()) >= 6, timeout=20, what="the processes of the cell")
    kept_pids, start = set(notebook.processes()) - {notebook.pid}, time.monotonic()
    kill(notebook)
    assert len(kept_pids & set(notebook.processes())) >= 4
    wait_until(lambda: not notebook.processes(), timeout=20, what="the end of the kept processes")
    assert time.monotonic() - start > 5
    assert not list(runtime_dir.iterdir())


@pytest.mark.full
def test_two_notebooks_never_own_one_cluster(notebook, open_notebook):
    other = open_notebook()
    assert f"are still attached to the kernel with pid {notebook.pid}" in refusal(other, "%distributed attach")
    assert "[0-1] fine" in notebook.ok("%%distributed\nprint('fine')").stdout
    assert "ranks are already running in this notebook" in refusal(notebook, "%distributed attach")
    notebook.ok("%distributed stop")
    assert "no kept ranks found" in refusal(other, "%distributed attach")


@pytest.mark.full
def test_key_selects_one_of_several_kept_clusters(notebook, open_notebook):
    second = open_notebook()
    second.ok("%distributed start -n 1 --keep 60")
    keys = [item.ok("import rankbook\nprint(rankbook.current().key)").stdout.strip() for item in (notebook, second)]
    kill(notebook)
    kill(second)
    third = open_notebook()
    reported = refusal(third, "%distributed attach")
    assert "found 2 kept clusters; select one with %distributed attach KEY" in reported
    assert all(key in reported for key in keys)
    assert "no kept cluster has the key 'nonsense'" in refusal(third, "%distributed attach nonsense")
    assert "rank 0 attached" in third.ok(f"%distributed attach {keys[1]}").stdout
    third.ok("%distributed stop")
    assert "ranks 0-1 attached" in third.ok("%distributed attach").stdout
    third.ok("%distributed stop")


@pytest.mark.full
def test_claim_without_the_token_is_refused(notebook, runtime_dir):
    (record,) = runtime_dir.glob("rankbook-*/kept.json")
    assert record.stat().st_mode & 0o777 == 0o600
    assert record.parent.stat().st_mode & 0o777 == 0o700
    kill(notebook)
    truth = record.read_text()
    record.write_text(json.dumps({**json.loads(truth), "token": "0" * 64}))
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    assert "rejected the claim: the token in their record is wrong" in refusal(notebook, "%distributed attach")
    record.write_text(truth)
    record.chmod(0o644)
    assert "accessible to other users (mode 0644)" in refusal(notebook, "%distributed attach")
    record.chmod(0o600)
    assert "ranks 0-1 attached" in notebook.ok("%distributed attach").stdout
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_a_record_of_ranks_that_have_ended_is_removed_and_said_so(notebook, runtime_dir):
    (record,) = runtime_dir.glob("rankbook-*/kept.json")
    holder = json.loads(record.read_text())["forkserver"]
    kill(notebook)
    os.kill(holder, signal.SIGKILL)
    wait_until(lambda: not notebook.processes(), timeout=10, what="the end of the ranks")
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    reported = refusal(notebook, "%distributed attach")
    assert "no kept ranks found" in reported
    assert "these ranks have exited; their files were removed" in reported
    assert not record.parent.exists()


@pytest.mark.full
def test_running_ranks_cannot_be_changed_to_survive_the_kernel(open_notebook):
    notebook = open_notebook()
    notebook.ok("%distributed start -n 2")
    reported = refusal(notebook, "%distributed start --keep")
    assert (
        "2 ranks are already running and end with the notebook; run %distributed stop, then %distributed start --keep"
        in reported
    )


@pytest.mark.full
def test_ranks_are_kept_as_soon_as_start_returns(open_notebook):
    notebook = open_notebook()
    notebook.send("import os, rankbook, signal\nrankbook.start(2, keep=60)\nos.kill(os.getpid(), signal.SIGKILL)")
    wait_until(lambda: not notebook.manager.is_alive(), timeout=30, what="the kernel's end")
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    assert "ranks 0-1 attached" in notebook.ok("%distributed attach").stdout
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_ranks_started_after_a_stop_end_with_the_kernel(notebook, runtime_dir):
    notebook.ok("%distributed stop")
    notebook.ok("%distributed start -n 2")
    kill(notebook)
    wait_until(lambda: not notebook.processes(), timeout=10, what="the end of everything")
    assert not list(runtime_dir.iterdir())


@pytest.mark.full
def test_a_restart_of_ranks_that_the_kernel_did_not_live_to_see_is_finished_by_the_next(notebook):
    pids = ranks_of(notebook)
    earlier_pids = set(notebook.processes())
    notebook.send("%distributed restart")
    wait_until(lambda: not earlier_pids.issuperset(notebook.processes()), timeout=10, what="the first fresh process")
    kill(notebook)
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    outcome = notebook.ok("%distributed attach")
    if "exited with code 0" in outcome.stdout:  # one was gone, and its successor had not been asked for
        notebook.ok("%distributed restart")
    assert "[0-1] fine" in notebook.ok("%%distributed\ndist.barrier()\nprint('fine')").stdout
    assert not set(pids) & set(ranks_of(notebook))
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_unclaimed_result_of_a_call_leaves_no_shared_memory(notebook, runtime_dir):
    gate = Gate(runtime_dir / "gate")
    code = (
        "import rankbook, threading\n"
        f"def late(ended={str(runtime_dir / 'ended')!r}):\n"
        "    import os, pathlib, select, torch.distributed\n"
        "    pathlib.Path(ended + os.environ['RANK']).touch()\n"
        f"    {gate.wait}\n"
        "    return torch.ones(1 << 20)\n"
        "threading.Thread(target=rankbook.current().apply, args=(late,), daemon=True).start()"
    )
    notebook.ok(code)
    wait_until(lambda: len(list(runtime_dir.glob("ended*"))) == 2, timeout=20, what="the call")
    kill(notebook)
    gate.open()
    wait_until(lambda: len(list(runtime_dir.glob("*/segment-*"))) == 2, timeout=20, what="its answers")
    notebook.manager.restart_kernel(now=True)
    settle(notebook)
    assert "a call ended on ranks 0-1" in notebook.ok("%distributed attach").stdout
    assert not list(runtime_dir.glob("*/*segment-*"))
    notebook.ok("%distributed stop")


@pytest.mark.full
def test_attach_names_a_rank_that_does_not_answer_and_can_be_repeated(notebook):
    notebook.ok("%%distributed\nx = 5")
    pids = ranks_of(notebook)
    restart(notebook)
    notebook.ok(
        "from rankbook.coordinator import reattach\nfrom rankbook.transport import zmq_link\n"
        "reattach._HANDSHAKE_TIMEOUT, zmq_link._FIRST_SEND_MS = 1.0, 300"
    )
    stop_process(pids[1])
    reported = refusal(notebook, "%distributed attach")
    assert f"rank 1 (pid {pids[1]}) did not reply within 1 s" in reported
    os.kill(pids[1], signal.SIGCONT)
    notebook.ok("reattach._HANDSHAKE_TIMEOUT, zmq_link._FIRST_SEND_MS = 10.0, 10_000")
    assert "ranks 0-1 attached" in notebook.ok("%distributed attach").stdout
    assert "[0-1] 5" in notebook.ok("%%distributed\nprint(x)").stdout
    key = notebook.ok("import rankbook\nprint(rankbook.current().key)").stdout.strip()
    restart(notebook)
    stop_process(pids[1])
    notebook.ok("from rankbook.coordinator import reattach\nreattach._HANDSHAKE_TIMEOUT = 1.0")
    notebook.ok(f"%distributed stop {key}")


@pytest.mark.full
def test_script_attaches_to_the_ranks_of_an_earlier_script(runtime_dir):
    def script(code: str) -> str:
        environment = {**os.environ, "RANKBOOK_RUNTIME_DIR": str(runtime_dir)}
        command = [sys.executable, "-W", "error", "-c", f"import rankbook\n{code}"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout

    script("cluster = rankbook.start(2, keep=30)\ncluster.push({'x': 7})")
    assert script("cluster = rankbook.attach()\nprint(cluster.pull('x'), cluster.missed)") == "[7, 7] ()\n"
    assert script("with rankbook.attach() as cluster: print(cluster.apply(lambda: 3), cluster.keep)") == "[3, 3] 30.0\n"


def kill_in(notebook: Notebook, method: str, command: str) -> None:
    """Kill the kernel where `command` calls this method of the cluster, and start the next kernel."""
    notebook.ok(
        "import os, signal\nfrom rankbook.coordinator.cluster import Cluster\n"
        f"Cluster.{method} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"
    )
    notebook.client.execute(command)
    wait_until(lambda: not notebook.manager.is_alive(), timeout=60, what="the kernel's end")
    restart(notebook)


@pytest.mark.full
def test_a_kernel_that_dies_during_a_resize_costs_no_variable(notebook):
    notebook.ok("%%distributed\nmine, data = rank + 1, torch.arange(3)")
    pids = ranks_of(notebook)
    kill_in(notebook, "_copy_state", "%distributed resize 3")
    notebook.ok("%distributed attach")
    assert "%distributed heal completes it" in refusal(notebook, "%%distributed\nmine")
    assert "from 2 to 3 ranks" in notebook.ok("%distributed heal").stdout
    assert ranks_of(notebook)[:2] == pids
    notebook.ok("%%distributed\ntotal = torch.tensor([mine])\ndist.all_reduce(total)")
    assert (
        "1 2 1 4" in notebook.ok("%distributed pull mine\n%distributed pull total\nprint(*mine, int(total[2]))").stdout
    )
    notebook.ok("%distributed stop")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_rank_that_was_being_healed_when_the_kernel_died_counts_as_dead(notebook):
    notebook.ok("%%distributed\nmine = torch.arange(3)")
    notebook.ok("%distributed watch nan")
    notebook.run("%%distributed --ranks 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    kill_in(notebook, "_try_restore", "%distributed heal")  # the new rank is in the group, and has no variables
    attached = notebook.ok("%distributed attach").stdout
    assert "rank 1 was not restored because the notebook's process ended during a heal" in attached
    assert "dead" in notebook.ok("%distributed status").text
    assert "rank 1 was healed with the state of rank 0: 1 variable" in notebook.ok("%distributed heal").stdout
    assert "[0-1] 3" in notebook.ok("%%distributed\ndist.barrier()\nprint(int(mine.sum()))").stdout
    assert "watch: nan" in notebook.ok("%distributed watch").stdout
    notebook.ok("%distributed stop")


PROTECTED = """%%distributed
import os, pathlib, select, signal
from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin, protection, set_seed

set_seed(5)
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
data = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

def train(count):
    losses = []
    for batch in loader:
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == count:
            return losses
"""


@pytest.fixture
def protected(notebook: Notebook) -> Notebook:
    """Provide two kept ranks with a protected training, and the losses of ten steps of it in `expected`."""
    notebook.ok(f"{PROTECTED}\nexpected = [None, None]\ndist.all_gather_object(expected, train(10))")
    notebook.ok(f"{PROTECTED}\naccelerator.protect()")
    return notebook


def stop_in(function: str, rank: int, folder: Path) -> str:
    """Return code that makes a rank wait in a function of the protection, and tell of it, until the gate opens."""
    owner, name = function.rsplit(".", 1)
    return (
        f"original = {function}\n"
        "def waiting(*args, **options):\n"
        f"    if rank == {rank} and optimizer.steps >= 3:\n"
        f"        pathlib.Path({str(folder / 'waits')!r}).touch()\n"
        f"        {Gate(folder / 'gate').wait}\n"
        "    return original(*args, **options)\n"
        f"{owner}.{name} = waiting\n"
    )


def kill_while_waiting(notebook: Notebook, folder: Path) -> None:
    """Kill the kernel once a rank waits, let the rank go on, and attach with the next kernel."""
    wait_until((folder / "waits").exists, timeout=40, what="the rank waits")
    kill(notebook)
    Gate(folder / "gate").open()
    notebook.manager.restart_kernel(now=True)
    settle(notebook)


def train_on(notebook: Notebook, step: int) -> None:
    """Compare the losses of the steps after `step` with those of the undisturbed training."""
    outcome = notebook.ok(f"%%distributed\nprint(train(3) == expected[rank][{step}:{step + 3}])")
    assert "[0-1] True" in outcome.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_kernel_that_dies_while_a_rank_takes_a_snapshot_costs_no_step(protected, runtime_dir):
    protected.ok(f"%%distributed\n{stop_in('protection._Area.write', 1, runtime_dir)}")
    protected.send("%%distributed\nlosses = train(5)")
    kill_while_waiting(protected, runtime_dir)
    protected.ok("%distributed attach")
    assert "[0-1] True" in protected.ok("%%distributed\nprint(losses == expected[rank][:5])").stdout
    assert "snapshot of step 5" in protected.ok("%distributed protect").stdout
    protected.run("%%distributed --ranks 1\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "back at step 5: no step to repeat" in protected.ok("%distributed heal").stdout
    train_on(protected, 5)
    protected.ok("%distributed stop")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_kernel_that_dies_during_a_heal_costs_no_step_more(protected, runtime_dir):
    protected.ok("%%distributed\nlosses = train(4)")
    protected.ok(f"%%distributed\n{stop_in('protection.restore_state', 0, runtime_dir)}")
    protected.run("%%distributed --ranks 1\nos.kill(os.getpid(), signal.SIGKILL)")
    protected.send("%distributed heal")
    kill_while_waiting(protected, runtime_dir)
    attached = protected.ok("%distributed attach").stdout
    assert "rank 1 was not restored because the notebook's process ended during a heal" in attached
    assert "back at step 4: no step to repeat" in protected.ok("%distributed heal").stdout
    train_on(protected, 4)
    protected.ok("%distributed stop")
