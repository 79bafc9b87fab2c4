"""Test the debugger of a stock kernel with `%%distributed`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import ANSI, IPYTHON_7, Kernel, Notebook, shows_frame
from tests.debugger import FrontEnd, finish, said_by_both

pytestmark = pytest.mark.processes

CELL = """\
%%distributed
base = 10

# with the magic's line above, and one that is empty
value = base + rank
print('value', value)"""
LOCAL = "here = 1\nthere = here + 1"
OWN_CELL = "<cell line: 0>" if IPYTHON_7 else "<module>"
"""Name of the code of a cell in the notebook process."""


@pytest.fixture(scope="module")
def module_notebook(kernel: Kernel) -> Notebook:
    """Return a kernel of this module's own: a debugger's adapter stays as long as the kernel."""
    return kernel(ranks=2, separate=True)  # debugpy's adapter stays until the kernel ends


@pytest.fixture
def front_end(notebook: Notebook) -> Iterator[FrontEnd]:
    debugger = FrontEnd(notebook)
    debugger.start()
    yield debugger
    debugger.stop()
    notebook.ok("%distributed debug all")


@pytest.mark.slow
def test_lines_are_those_of_the_cell_as_it_is_written_and_errors_name_the_cell(notebook, front_end):
    assert front_end.breakpoints(CELL, 5) == [5]
    cell = notebook.send(CELL)
    front_end.wait_paused(2)
    frames = {frame["name"]: frame for frame in front_end.frames()}
    assert {name: item["line"] for name, item in frames.items()} == {"rank 0 · <module>": 5, "rank 1 · <module>": 5}
    path = front_end.body("dumpCell", code=CELL)["sourcePath"]
    assert all(element["source"]["path"] == path for element in frames.values()), (
        "or the front end finds no cell for it"
    )
    assert front_end.variables(frames["rank 1 · <module>"])["base"] == "10"
    front_end.move("continue")
    assert sorted(finish(front_end, cell).stdout.splitlines()) == ["[0] value 10", "[1] value 11"]
    notebook.ok("%reload_ext rankbook")
    cell = notebook.send(CELL)
    front_end.wait_paused(2)
    front_end.move("continue")
    assert sorted(finish(front_end, cell).stdout.splitlines()) == ["[0] value 10", "[1] value 11"]
    failed = notebook.run("%%distributed\n\n1 / 0")
    reported = ANSI.sub("", failed.traceback)
    assert shows_frame(reported, failed.count, 3), reported


def test_cells_of_the_notebook_are_debugged_as_before(notebook, front_end):
    front_end.breakpoints(LOCAL, 2)
    cell = notebook.send(LOCAL)
    front_end.wait_paused(1)
    assert front_end.stack()[0] == (OWN_CELL, 2)
    front_end.move("continue")
    assert finish(front_end, cell).status == "ok"
    assert notebook.ok("there").displays == [{"text/plain": "2"}]


@pytest.mark.full
def test_breakpoints_go_where_plain_cells_run(notebook, front_end):
    code = "first = 1\nsecond = 2"
    front_end.breakpoints(code, 2)
    notebook.ok("%distributed auto on")
    try:
        cell = notebook.send(code)
        front_end.wait_paused(2)
        assert sorted(front_end.stack()) == [("rank 0 · <module>", 2), ("rank 1 · <module>", 2)]
        front_end.move("continue")
        assert finish(front_end, cell).status == "ok"
    finally:
        notebook.ok("%distributed auto off")
    cell = notebook.send(code)
    front_end.wait_paused(1)
    assert front_end.stack()[0] == (OWN_CELL, 2)
    front_end.move("continue")
    assert finish(front_end, cell).status == "ok"


def test_step_of_the_chosen_rank_leaves_the_other_paused(notebook, front_end):
    assert "the rank whose frame is selected" in notebook.ok("%distributed debug chosen").stdout
    front_end.breakpoints(CELL, 5)
    cell = notebook.send(CELL)
    front_end.wait_paused(2)
    frames = {frame["name"]: frame for frame in front_end.frames()}
    front_end.variables(frames["rank 1 · <module>"])
    front_end.move("next")
    front_end.wait_paused(2)
    assert front_end.stack() == [("rank 1 · <module>", 6), ("rank 0 · <module>", 5)]
    front_end.move("continue")
    front_end.wait_paused(1)
    assert front_end.stack() == [("rank 0 · <module>", 5)]
    front_end.move("continue")
    assert finish(front_end, cell).status == "ok"


def test_a_step_into_a_library_stays_in_the_cell(notebook, front_end):
    code = "%%distributed\nones = torch.nn.Linear(2, 2)\ntotal = ones(torch.ones(2)).sum()"
    front_end.breakpoints(code, 2)
    cell = notebook.send(code)
    front_end.wait_paused(2)
    front_end.move("stepIn")
    front_end.wait_paused(2)
    assert sorted(front_end.stack()) == [("rank 0 · <module>", 3), ("rank 1 · <module>", 3)]
    front_end.move("stepIn")
    assert finish(front_end, cell).status == "ok"


def test_a_client_that_knows_threads_moves_one_rank_by_its_thread(notebook):
    client = FrontEnd(notebook)
    client.start("vscode")
    try:
        client.breakpoints(CELL, 5)
        cell = notebook.send(CELL)
        client.wait_paused(2)
        threads = {item["name"]: item["id"] for item in client.body("threads")["threads"]}
        for rank in (0, 1):
            (frame,) = client.body("stackTrace", threadId=threads[f"rank {rank}"])["stackFrames"]
            assert frame["name"] == f"rank {rank} · <module>"
        client.body("next", threadId=threads["rank 1"], singleThread=True)
        client.wait_paused(2)
        lines = [
            client.body("stackTrace", threadId=threads[f"rank {rank}"])["stackFrames"][0]["line"] for rank in (0, 1)
        ]
        assert lines == [5, 6]
        client.body("continue", threadId=threads["rank 0"])
        assert finish(client, cell).status == "ok"
    finally:
        client.stop()


def test_a_function_of_a_cell_that_ran_before_stops_too(notebook):
    code = "%%distributed\ndef double(value):\n    twice = 2 * value\n    return twice"
    long = code.replace("double", "triple").replace("2 *", "3 *") + "\n" + "'a cell of more than a few lines'\n" * 9
    count = "import ipykernel.compiler as c\nnames, make = [], c.get_file_name\n"
    notebook.ok(count + "c.get_file_name = lambda code: names.append(code) or make(code)")
    for item in (code, long, code):  # one that runs again keeps its name
        notebook.ok(item)
    counting = "c.get_file_name = make\nprint(sum(each[:2] == '%%' and 'triple' in each for each in names))"
    assert notebook.ok(counting).stdout == "1\n", (
        "IPython makes the name; of a long cell it takes its time, and is not made again"
    )
    client = FrontEnd(notebook)
    client.start()
    try:
        assert client.breakpoints(code, 4) == [4] and client.breakpoints(long, 4) == [4]
        for name, result in (("double", "8"), ("triple", "12")):
            cell = notebook.send(f"%%distributed\nprint({name}(4))")
            client.wait_paused(2)
            assert (f"rank 1 · {name}", 4) in client.stack()
            client.move("continue")
            assert said_by_both(finish(client, cell)) == result
    finally:
        client.stop()


def test_a_rank_may_raise_wait_at_breakpoint_and_be_paused_while_it_runs(notebook, front_end):
    front_end.ask("setExceptionBreakpoints", filters=["raised"])
    cell = notebook.send("%%distributed --ranks 1\nlist(map(int, '1x'))")
    (event,) = front_end.wait("stopped")
    assert event["reason"] == "exception" and event["description"] == "rank 1"
    assert "'x'" in front_end.body("exceptionInfo", threadId=event["threadId"])["description"]
    front_end.ask("setExceptionBreakpoints", filters=[])
    front_end.move("continue")
    assert finish(front_end, cell).ename == "ValueError"
    code = "%%distributed\nimport time\nrunning = True\nprint('go', rank)\nwhile running:\n    time.sleep(0.01)"
    cell = notebook.send(code)
    for rank in (0, 1):
        front_end.wait_text(f"[{rank}] go {rank}")
    front_end.move("pause")
    front_end.wait_paused(2)
    for frame in front_end.frames():
        front_end.body("evaluate", expression="globals().update(running=False)", frameId=frame["id"], context="repl")
    front_end.move("continue")
    assert finish(front_end, cell).status == "ok"


@pytest.mark.slow
def test_forked_process_is_not_debugged(notebook, front_end):
    code = """\
%%distributed --ranks 0
import multiprocessing
def work(queue):
    queue.put(sum(range(5)))
queue = multiprocessing.get_context('fork').SimpleQueue()
process = multiprocessing.get_context('fork').Process(target=work, args=(queue,))
process.start(); process.join(10)
queue.get(), process.exitcode"""
    front_end.breakpoints(code, 4)
    assert notebook.ok(code, timeout=20).text == "[0] (10, 0)\n"


@pytest.mark.full
def test_a_rank_that_dies_is_paused_no_more_and_its_successor_stops_too(notebook, front_end):
    front_end.breakpoints(CELL, 5)
    cell = notebook.send(CELL)
    front_end.wait_paused(2)
    frames = {frame["name"]: frame for frame in front_end.frames()}
    kill = "__import__('os').kill(__import__('os').getpid(), 9)"
    front_end.ask("evaluate", expression=kill, frameId=frames["rank 1 · <module>"]["id"], context="repl")
    front_end.wait("continued")
    outcome = finish(front_end, cell)
    assert outcome.status == "error" and "rank 1" in outcome.evalue
    notebook.ok("%distributed restart")
    cell = notebook.send(CELL)
    front_end.wait_paused(2)
    front_end.move("continue")
    assert sorted(finish(front_end, cell).stdout.splitlines()) == ["[0] value 10", "[1] value 11"]
