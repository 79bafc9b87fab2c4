"""Test ranks that live and do not answer: stopped by a signal, or in C code that holds the GIL."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import Kernel, Notebook, Outcome, stop_process, wait_until
from tests.faults.test_death import REDUCE, full_text, pids, status

pytestmark = pytest.mark.slow

HOLD = """import ctypes, os, sys
print('begun')
print('holds', file=sys.stderr)  # before a change of streams, the main thread itself sends what was printed
ctypes.PyDLL(None).read(os.open({!r}, os.O_RDWR), ctypes.create_string_buffer(1), 1)"""


# A rank that does not answer costs this time in each question.
ANSWER_SOON = """from rankbook.coordinator.cluster import Cluster as _cluster
_questions = _cluster.status, _cluster.stacks
_before = [dict(each.__kwdefaults__) for each in _questions]
for _each in _questions: _each.__kwdefaults__["timeout"] = 2.0"""
ANSWER_AS_BEFORE = "for _each, _was in zip(_questions, _before): _each.__kwdefaults__.update(_was)"


@pytest.fixture(scope="module")
def two_ranks(kernel: Kernel) -> Iterator[Notebook]:
    notebook = kernel(ranks=2)
    notebook.ok(ANSWER_SOON)
    yield notebook
    notebook.ok(ANSWER_AS_BEFORE)


@pytest.fixture
def two(two_ranks: Notebook) -> Iterator[Notebook]:
    """Provide two ranks with a variable; check afterwards that both are alive and in one group."""
    two_ranks.ok("%%distributed\nremembered = rank * 10")
    yield two_ranks
    for pid in pids(two_ranks).values():
        os.kill(pid, signal.SIGCONT)
    assert "[0-1] sum 1" in two_ranks.ok(REDUCE, timeout=20).stdout


def begin(notebook: Notebook, body: str, *, ranks: str = "1") -> Outcome:
    """Begin a background cell and wait until it says so; `handle` is its handle."""
    message = notebook.send(f"%%distributed --background --ranks {ranks}\n{body}")
    outcome = notebook.finish(message)
    assert outcome.status == "ok", outcome.traceback
    notebook.follow(message, outcome, lambda progress: "begun" in progress.stdout)
    notebook.ok("handle = _")
    return outcome


def test_stopped_rank_is_reported_and_continues_after_sigcont(two):
    pid = pids(two)[1]
    message = two.send(
        "%%distributed --background\nimport time\nprint('begun')\n"
        "for step in range(20): time.sleep(0.05)\nprint('to the end')"
    )
    outcome = two.finish(message)
    two.ok("handle = _")
    two.follow(message, outcome, lambda progress: "begun" in progress.stdout)
    stop_process(pid)
    rows = status(two)
    assert re.search(rf"1 +unresponsive.*process stopped; kill -CONT {pid} resumes it", rows[1])
    assert "dead" not in rows[1]
    assert "unresponsive" not in rows[0]
    api = two.ok("%%local\nimport rankbook\nrankbook.current().status()[1].state").displays[-1]["text/plain"]
    assert "unresponsive" in api and "process stopped" in api
    assert "process stopped" in two.ok("%distributed stacks").stdout

    os.kill(pid, signal.SIGCONT)
    assert two.ok("handle.wait().ok", timeout=20).displays[-1]["text/plain"] == "True"
    two.follow(
        message, outcome, lambda progress: "[1] to the end" in progress.stdout or "[0-1] to the end" in progress.stdout
    )
    wait_until(lambda: "unresponsive" not in status(two)[1], timeout=20, what="rank 1 answers again")
    assert "[1] 10" in two.ok("%%distributed\nprint(remembered)").stdout


def test_an_idle_rank_that_is_stopped_is_reported_and_the_other_goes_on(two):
    pid = pids(two)[1]
    stop_process(pid)
    status_output = two.ok("%distributed status")
    assert "process stopped" in status_output.text and status_output.seconds < 10
    assert "[0] 0" in two.ok("%%distributed --ranks 0\nprint(remembered)", timeout=20).stdout
    os.kill(pid, signal.SIGCONT)


@pytest.mark.full
def test_the_cell_that_waits_for_a_stopped_rank_says_so_and_is_interrupted(two):
    pid = pids(two)[1]
    pressed = []
    message = two.send("%%distributed\nimport time\nprint('begun')\nif rank == 1: time.sleep(60)")

    def follow(outcome: Outcome) -> None:
        if "[0-1] begun" in outcome.stdout and not pressed:
            stop_process(pid)
            pressed.append("stopped")
        if "process stopped" in outcome.stderr and len(pressed) == 1:
            pressed.append(two.interrupt())

    failed = two.finish(message, timeout=40, seen=follow)
    assert re.search(rf"^rank 1: unresponsive.*kill -CONT {pid}", failed.stderr, re.MULTILINE)
    assert failed.stderr.count("unresponsive") == 1
    assert f"rank 1 is stopped (process stopped; kill -CONT {pid} resumes it)" in full_text(failed)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "idle" in status(two)[1], timeout=20, what="the interrupt is heard once it goes on")


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_stopped_rank_can_be_restarted(two, busy):
    if busy:
        begin(two, "import time\nprint('begun')\ntime.sleep(60)")
    pid = pids(two)[1]
    stop_process(pid)
    assert "rank 1 restarted" in two.ok("%distributed restart 1", timeout=20).stdout
    assert not psutil.pid_exists(pid)
    assert "[0] 0" in two.ok("%%distributed --ranks 0\nprint(remembered)").stdout


def test_a_rank_whose_c_code_holds_the_interpreter_is_reported_with_its_cpu_time(two, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ours = os.open(gate, os.O_RDWR)
    begin(two, HOLD.format(str(gate)))
    rows: dict[int, str] = {}

    def is_reported() -> bool:
        rows.update(status(two))
        return "running" not in rows[1]

    wait_until(is_reported, timeout=20, what="it holds the interpreter")
    assert re.search(r"1 +unresponsive.*process sleeping, \d+\.\d s of CPU time", rows[1])
    assert "[0] 0" in two.ok("%%distributed --ranks 0\nprint(remembered)", timeout=20).stdout
    assert "process sleeping" in two.ok("%distributed stacks").stdout
    os.write(ours, b"x")
    os.close(ours)
    assert two.ok("handle.wait().ok", timeout=20).displays[-1]["text/plain"] == "True"
    assert "idle" in status(two)[1]


@pytest.mark.full
def test_a_rank_whose_c_code_holds_the_interpreter_can_be_interrupted_and_restarted(two, tmp_path):
    pressed = []
    marker = tmp_path / "held"
    begun = "import ctypes, sys\nprint('begun')\nprint('holds', file=sys.stderr)"
    hold = f"open({str(marker)!r}, 'w').close()\nctypes.PyDLL(None).sleep(600)"
    message = two.send(f"%%distributed --ranks 1\n{begun}\n{hold}")

    def press(outcome: Outcome) -> None:
        if "begun" in outcome.stdout and not pressed:
            wait_until(marker.exists, timeout=20, what="it holds the interpreter")
            pressed.append(two.interrupt())

    failed = two.finish(message, timeout=40, seen=press)
    assert re.search(r"rank 1 still runs, unresponsive for \d+ s, process sleeping", full_text(failed))
    advised = lambda: "%distributed restart 1" in two.ok("%distributed status").text  # noqa: E731 - used once
    wait_until(advised, timeout=30, what="ten seconds of silence")
    assert "rank 1 restarted" in two.ok("%distributed restart 1", timeout=20).stdout


@pytest.mark.parametrize(
    ("busy", "end"),
    [
        pytest.param(True, "stop", id="stop-busy"),
        pytest.param(False, "stop", id="stop-idle", marks=pytest.mark.full),
        pytest.param(True, "shutdown", id="shutdown-busy", marks=pytest.mark.full),
        pytest.param(False, "shutdown", id="shutdown-idle", marks=pytest.mark.full),
    ],
)
def test_a_stopped_rank_does_not_outlive_the_others(fresh_notebook, busy, end):
    fresh_notebook.ok("%distributed start -n 2")
    if busy:
        begin(fresh_notebook, "import time\nprint('begun')\ntime.sleep(60)")
    ranks = pids(fresh_notebook)
    stop_process(ranks[1])
    if end == "stop":
        stopped = fresh_notebook.ok("%distributed stop", timeout=30)
        assert "2 ranks stopped" in stopped.stdout
        assert stopped.seconds < 4.5, "and not after all the time that others may take"
    else:
        fresh_notebook.close()
    wait_until(lambda: not any(map(psutil.pid_exists, ranks.values())), timeout=10, what="the ranks are gone")
