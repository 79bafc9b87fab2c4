"""Test JupyterLab's debugger on the ranks: the messages and their order."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Notebook, wait_until
from tests.debugger import FrontEnd, finish, said_by_both
from tests.jupyter.conftest import spec_folder
from tests.jupyter.test_kernel import started

pytestmark = pytest.mark.slow

CELL = """\
base = 10

def train(step):
    loss = base + step * (rank + 1)
    return loss

for step in range(2):
    loss = train(step)
print('loss', loss)"""


@pytest.fixture(scope="module")
def kernel(install) -> Iterator[Notebook]:
    assert install("-n", "2", "--name", "rankbook-debug").returncode == 0
    with started("rankbook-debug") as notebook:
        notebook.ok("print(rank)")
        yield notebook


@pytest.fixture
def front_end(kernel) -> Iterator[FrontEnd]:
    debugger = FrontEnd(kernel)
    debugger.start()
    yield debugger
    debugger.stop()
    assert said_by_both(kernel.ok("import sys\nprint(sys.gettrace())")) == "None", "and nobody is slowed down"


def test_breakpoint_stops_every_rank_with_its_own_variables(kernel, front_end):
    assert front_end.breakpoints(CELL, 5) == [5]
    cell = kernel.send(CELL)
    front_end.wait_paused(2)
    assert sorted(front_end.stack()) == [
        ("rank 0 · <module>", 8), ("rank 0 · train", 5), ("rank 1 · <module>", 8), ("rank 1 · train", 5),
    ]  # fmt: skip
    frames = {item["name"]: item for item in front_end.frames()}
    assert front_end.variables(frames["rank 0 · train"]) == {"step": "0", "loss": "10"}
    front_end.move("continue")
    front_end.wait_paused(2)
    frames = {element["name"]: element for element in front_end.frames()}
    assert front_end.variables(frames["rank 0 · train"])["loss"] == "11"
    assert front_end.variables(frames["rank 1 · train"])["loss"] == "12"
    frame = frames["rank 1 · train"]["id"]
    evaluated = front_end.body("evaluate", expression="loss * 100", frameId=frame, context="repl")
    assert evaluated["result"] == "1200"
    assert front_end.stack()[0] == ("rank 0 · train", 5)
    front_end.move("next")
    front_end.wait_paused(2)
    stack = [name for name, line in front_end.stack()]
    assert stack == ["rank 1 · <module>", "rank 0 · <module>"], "the rank that was looked at is shown first"
    stack = [name for name, line in front_end.stack()]
    assert stack == ["rank 0 · <module>", "rank 1 · <module>"], "and after that they stand in their order"
    front_end.move("continue")
    outcome = finish(front_end, cell)
    assert outcome.status == "ok" and sorted(outcome.stdout.splitlines()) == ["[0] loss 11", "[1] loss 12"]


def test_steps_go_on_to_the_cells_last_line_and_the_next_cell_runs_freely(kernel, front_end):
    front_end.breakpoints("first = 1\nsecond = 2", 1)
    cell = kernel.send("first = 1\nsecond = 2")
    front_end.wait_paused(2)
    front_end.move("next")
    front_end.wait_paused(2)
    assert sorted(front_end.stack()) == [("rank 0 · <module>", 2), ("rank 1 · <module>", 2)]
    front_end.move("next")
    assert finish(front_end, cell).status == "ok"
    assert said_by_both(kernel.ok("print(first + second)")) == "3"


@pytest.mark.full
def test_ranks_wait_in_a_collective_for_one_that_is_paused_for_as_long_as_it_takes(kernel, front_end):
    kernel.ok("from datetime import timedelta\ngroup = dist.new_group(timeout=timedelta(seconds=2))")
    code = "if rank == 1:\n    seen = 5\ntotal = torch.ones(1)\ndist.all_reduce(total, group=group)\ntotal.item()"
    front_end.breakpoints(code, 2)
    cell = kernel.send(code)
    front_end.wait_paused(1)
    start = time.monotonic()
    assert front_end.stack() == [("rank 1 · <module>", 2)]
    wait_until(lambda: time.monotonic() - start > 10, timeout=20, what="a pause that is longer than every patience")
    front_end.move("continue")
    outcome = finish(front_end, cell)
    assert outcome.status == "ok" and outcome.text.endswith("\n[0-1] 2.0\n"), outcome.text
    assert not outcome.stderr, "nobody was told that the wait is vain"


def test_status_and_stacks_report_the_pause_and_an_interrupt_ends_it(kernel, front_end):
    code = "%%distributed --background\nimport time\nif rank == 0:\n    here = 1\nelse:\n    time.sleep(60)"
    assert front_end.breakpoints(code, 4) == [4]
    cell = kernel.send(code)
    assert finish(front_end, cell).status == "ok"
    front_end.wait_paused(1)
    assert front_end.stack() == [("rank 0 · <module>", 4)], "as the person counts, with the magic's line"
    reported = kernel.ok("%distributed status").text
    assert re.search(r"paused at line 4 of cell \[\d+\]", reported) and "running" in reported
    assert "rank 0: paused in the debugger\n  Cell In[" in kernel.ok("%distributed stacks").text
    kernel.ok("%distributed interrupt")
    front_end.wait("continued")
    assert "paused" not in kernel.ok("%distributed status").text


@pytest.mark.full
def test_timeout_excludes_the_pause_and_variables_are_those_of_the_rank(kernel, front_end):
    code = "%%distributed --timeout 1.5\nhere = torch.ones(2)\nname = 'seen'\nimport time; time.sleep(1)"
    front_end.breakpoints(code, 3)
    cell = kernel.send(code)
    front_end.wait_paused(2)
    start = time.monotonic()
    wait_until(lambda: time.monotonic() - start > 3, timeout=20, what="a pause that is longer than the timeout")
    front_end.move("continue")
    assert finish(front_end, cell).status == "ok"
    variables = {item["name"]: item for item in front_end.body("inspectVariables")["variables"]}
    assert variables["name"]["value"] == "'seen'" and "float32" in variables["here"]["value"]
    assert "world_size" not in variables
    assert front_end.body("richInspectVariables", variableName="name")["data"] == {"text/plain": "'seen'"}


def test_an_interrupt_ends_a_pause_and_the_next_cell_is_not_paused(kernel, front_end):
    code = "import time\nif rank == 0:\n    here = 1\nelse:\n    time.sleep(60)"
    front_end.breakpoints(code, 3)
    cell = kernel.send(code)
    front_end.wait_paused(1)
    kernel.interrupt()
    outcome = finish(front_end, cell)
    assert outcome.ename == "KeyboardInterrupt", outcome
    assert "pydevd" not in outcome.text + outcome.traceback and "threading.py" not in outcome.text + outcome.traceback
    assert front_end.ask("debugInfo")["body"]["stoppedThreads"] == []
    assert kernel.ok("print(here := rank)").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.full
def test_a_kernel_that_ends_while_its_ranks_are_paused_leaves_nothing(kernel):
    with started("rankbook-debug") as other:
        debugger = FrontEnd(other)
        other.ok("x = rank")
        debugger.start()
        debugger.breakpoints("x = 1\ny = 2", 2)
        other.send("x = 1\ny = 2")
        debugger.wait_paused(2)


@pytest.mark.full
def test_kept_ranks_that_a_kernel_left_paused_go_on_for_the_next_one(kernel):
    folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")  # pytest's are too long for a socket
    code = "%%distributed --background\nbefore = 1\nafter = 2\nprint('after the pause')"
    try:
        with started("rankbook-debug", RANKBOOK_RUNTIME_DIR=folder) as other:
            other.ok("%distributed start --keep 60")
            debugger = FrontEnd(other)
            debugger.start()
            debugger.breakpoints(code, 3)
            finish(debugger, other.send(code))
            debugger.wait_paused(2)
            other.manager.restart_kernel(now=True)
            other.client.wait_for_ready(timeout=60)
            other.ok("%distributed attach")
            assert said_by_both(other.ok("print(after)")) == "2"
            other.ok("%distributed stop")
    finally:
        shutil.rmtree(folder)


def test_the_kernelspec_reports_front_ends_that_there_is_a_debugger(kernel):
    spec = json.loads((spec_folder("rankbook-debug") / "kernel.json").read_text())
    assert spec["metadata"] == {"debugger": True}
