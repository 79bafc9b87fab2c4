"""Test background cells: the live handle, free ranks, and the queue."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest

from rankbook.coordinator.running_cell import RunningCell
from rankbook.coordinator.wait import ask_in_terminal
from rankbook.errors import CellTimeout
from rankbook.magics import cell_handle
from rankbook.magics.cell_handle import CellHandle
from rankbook.magics.output_panel import JupyterSink
from rankbook.output.merger import RichOutput, Stream
from rankbook.protocol.messages import Clear, Done, ErrorReport, InputRequest, RunCell, Text
from tests.conftest import Gate, Notebook, Outcome

pytestmark = pytest.mark.processes


@pytest.fixture
def gate(tmp_path):
    """Return what a background cell waits for."""
    return Gate(tmp_path / "gate")


@pytest.fixture
def background():
    """Return a cell without ranks, its handle, and the items that the handle shows."""
    items: list[object] = []
    task = (RunCell(cell=1, source="x", number=3), ())
    sink = SimpleNamespace(emit=items.extend)
    cell = RunningCell(1, 3, {0: task, 1: task}, cluster_key="c", sink=sink)
    handle = CellHandle(SimpleNamespace(key="c", stopped=False), cell, sink, ask_in_terminal, lambda _: None)
    handle.follow()
    return cell, handle, items


def start(notebook: Notebook, code: str, name: str, *, options: str = "") -> tuple[str, Outcome]:
    """Start a background cell and keep its handle as `name`: its message, and its outcome so far."""
    message = notebook.send(f"%%distributed --background {options}\n{code}")
    outcome = notebook.finish(message)
    assert outcome.status == "ok", outcome.traceback
    notebook.ok(f"{name} = _")
    return message, outcome


def state(outcome: Outcome) -> str:
    """The last state that the handle's display showed."""
    (text,) = [data["text/plain"] for data in outcome.displays if data["text/plain"].startswith("cell [")]
    return text


def value(notebook: Notebook, expression: str) -> str:
    """Evaluate an expression in the notebook and return its text."""
    return notebook.ok(expression).displays[-1]["text/plain"]


def test_background_cell_returns_at_once_and_updates_its_display(notebook, gate):
    message, outcome = start(notebook, f"{gate.wait}\nprint('let go')", "handle")
    assert state(outcome) == f"cell [{outcome.count}] on ranks 0-1: running"
    assert len(outcome.displays) == 1, "one display, not a second one that stands still"
    assert "text/html" in outcome.displays[0]
    gate.open()
    notebook.follow(message, outcome, lambda o: "ok after" in state(o))
    assert outcome.stdout == "[0-1] let go\n", "what it prints comes into its own cell"


def test_output_flows_into_its_cell_while_other_cells_run(notebook, gate):
    message, outcome = start(
        notebook, "print('early')\n" + f"{gate.wait}\nprint('late')", "handle", options="--ranks 0"
    )
    notebook.follow(message, outcome, lambda o: "[0] early" in o.stdout)
    between = notebook.ok("%%distributed --ranks 1\nprint('other rank')")
    assert between.text == "[1] other rank\n"
    gate.open()
    notebook.follow(message, outcome, lambda o: "ok after" in state(o))
    assert outcome.stdout == "[0] early\n[0] late\n"


def test_every_display_of_the_handle_is_live(notebook, gate):
    start(notebook, gate.wait, "handle")
    message = notebook.send("handle")
    again = notebook.finish(message)
    assert "running" in state(again)
    gate.open()
    notebook.ok("handle.wait()")
    assert "ok after" in state(notebook.ok("handle"))


def test_wait_returns_the_result(notebook, gate):
    start(notebook, f"{gate.wait}\nprint('text'); rank * 2", "handle")
    assert value(notebook, "handle.result is None, handle.state") == "(True, 'running')"
    gate.open()
    assert value(notebook, "r = handle.wait()\nr.ok, r.stdout, r.text(1)") == (
        "(True, {0: 'text\\n', 1: 'text\\n'}, '2')"
    )
    assert value(notebook, "handle.result is r, handle.state") == "(True, 'ok')"
    assert value(notebook, "handle.wait() is r") == "True", "also a second time"


def test_out_variable_gets_the_result_at_the_end(notebook):
    start(notebook, "rank + 5", "handle", options="--out later")
    notebook.ok("handle.wait()")
    assert value(notebook, "later.text(0), later is handle.result") == "('5', True)"


def test_wait_has_patience(notebook, gate):
    start(notebook, gate.wait, "handle")
    outcome = notebook.run("handle.wait(0.2)")
    assert (outcome.status, outcome.ename) == ("error", "TimeoutError")
    assert "continues to run" in outcome.evalue
    gate.open()
    notebook.ok("handle.wait(20)")


def test_an_error_is_shown_in_its_cell_and_raised_by_wait(notebook):
    message, outcome = start(notebook, "def f(): return 1 / 0\nf()", "handle", options="--ranks 1")
    notebook.follow(message, outcome, lambda o: "rank 1: ZeroDivisionError" in o.stderr and "error after" in state(o))
    assert f"In[{outcome.count}]" in re.sub(r"\x1b\[[0-9;]*m", "", outcome.stderr)
    waited = notebook.run("handle.wait()")
    assert (waited.status, waited.ename) == ("error", "ZeroDivisionError")
    assert "rank 1: ZeroDivisionError" in waited.traceback
    assert "handle.py" not in waited.traceback, "the ranks' frames, not ours"
    assert value(notebook, "handle.state") == "'error'"


def test_interrupt_ends_a_background_cell(notebook):
    message, outcome = start(notebook, "import time\ntime.sleep(60)", "handle")
    notebook.ok("handle.interrupt()")
    notebook.follow(message, outcome, lambda o: "interrupted after" in state(o), timeout=20)
    waited = notebook.run("handle.wait()")
    assert (waited.status, waited.ename) == ("error", "KeyboardInterrupt")


def test_the_stop_button_during_wait_interrupts_it(notebook):
    start(notebook, "print('begun')\nimport time\ntime.sleep(60)", "handle")
    message = notebook.send(
        "import threading\nthreading.Timer(0.3, print, ['waiting']).start()\nhandle.wait()"
    )  # pressed any earlier, it may come before the wait
    pressed = []

    def press(outcome):
        if "waiting" in outcome.stdout and not pressed:
            pressed.append(notebook.interrupt())

    outcome = notebook.finish(message, seen=press, timeout=20)
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
    assert value(notebook, "handle.state") == "'interrupted'"


def test_timeout_holds_in_the_background(notebook):
    message, outcome = start(notebook, "import time\ntime.sleep(60)", "handle", options="--timeout 0.3")
    notebook.follow(message, outcome, lambda o: "interrupted after" in state(o), timeout=20)
    assert notebook.run("handle.wait()").ename == "CellTimeout"


@pytest.mark.parametrize(
    ("started", "text"),
    [
        (1.0, "cell [3] was interrupted after --timeout 5 s\n\x1b[1;31mranks 0-1: interrupted\x1b[0m"),
        (None, "cell [3] did not start within 5 s (waiting for rank 1) and was removed from the queue"),
    ],
)
def test_the_time_limit_is_named_as_the_cause_in_the_background_and_by_wait(background, started, text):
    cell, handle, items = background
    cell.started, cell.waiting_behind, cell.timed_out = started, (1,), 5.0
    cell.end(())
    assert items == [Stream("stderr", f"{text}\n")]
    with pytest.raises(CellTimeout) as caught:
        handle.wait()
    assert caught.value._render_traceback_() == text.splitlines()


def test_a_question_that_nobody_answers_is_reported_until_the_handle_waits(background):
    cell, handle, items = background
    cell.started = 1.0
    note = Stream("stderr", "rank 1 waits for input: call .wait() of the cell's handle\n")

    def answer(*_, **__):
        cell.asking.clear()
        cell.ask(0, InputRequest(cell=1, prompt="during the wait? ", password=False))
        cell.asking.clear()

    handle._cluster.wait = answer
    cell.ask(1, InputRequest(cell=1, prompt="lr? ", password=False))
    cell.ask(1, InputRequest(cell=1, prompt="again? ", password=False))
    assert items == [note]
    with pytest.raises(TimeoutError):
        handle.wait(0)
    assert items == [note]
    cell.ask(1, InputRequest(cell=1, prompt="later? ", password=False))
    assert items == [note, note]


def test_the_handle_is_displayed_again_after_a_clear_and_then_followed():
    sent = []
    session = SimpleNamespace(send=lambda _, kind, content, **__: sent.append((kind, content)))
    sink = JupyterSink(SimpleNamespace(session=session, iopub_socket=None, get_parent=lambda _: {}))
    cell = RunningCell(1, 3, {0: (RunCell(cell=1, source="x", number=3), ())}, cluster_key="c", sink=sink)
    handle = CellHandle(SimpleNamespace(key="c", stopped=False), cell, sink, ask_in_terminal, lambda _: None)
    handle.follow()
    cell.start()
    handle._ipython_display_()
    cell.add_output(0, Clear(cell=1, wait=True))
    cell.add_output(0, Text(cell=1, stream="stdout", data=b"step 1\n"))
    cell.rank_done(0, Done(cell=1, status="ok", seconds=0.1), [])
    cell.end(())
    assert [kind for kind, _ in sent] == ["clear_output", "display_data", "stream", "update_display_data"]
    displays = [content for _, content in sent if "data" in content]
    assert displays[0]["data"]["text/plain"] == "cell [3] on rank 0: running"
    assert displays[0]["transient"] == displays[1]["transient"]


def test_in_an_output_widget_the_ended_handle_is_shown_below(notebook, gate):
    notebook.ok("import ipywidgets\nfrom IPython.display import display\nout = ipywidgets.Output()")
    code = f"{gate.wait}\nprint(1)"
    run = f"handle = get_ipython().run_cell_magic('distributed', '--background', {code!r})"
    outcome = notebook.ok(f"with out:\n    {run}\n    display(handle)")
    assert state(outcome).endswith("running")
    gate.open()
    notebook.ok("handle.wait()")
    shown = "[output.get('text') or output['data']['text/plain'] for output in out.outputs]"
    notebook.ok("import time\nfor attempt in range(500): len(out.outputs) < 2 and time.sleep(0.01)")
    printed, end = eval(value(notebook, shown))
    assert (printed, " ok after " in end) == ("[0-1] 1\n", True)


@pytest.mark.parametrize(
    ("status", "stopped", "states"),
    [
        ("ok", False, ["active", "ended"]),
        ("error", False, ["active", "failed", "ended"]),  # `wait` has raised the error
        ("error", True, ["active", "ended"]),
        ("interrupted", False, ["active", "ended"]),
    ],
)
def test_the_display_tells_rankbook_run_of_an_error_until_wait_has_raised_it(
    background, monkeypatch, status, stopped, states
):
    cell, handle, items = background
    shown = []
    monkeypatch.setattr(cell_handle, "display", lambda _, *, metadata, **__: shown.append(metadata))
    handle._ipython_display_()
    error = ErrorReport("ValueError", "no", "", "ValueError: no") if status == "error" else None
    for rank in (0, 1):
        cell.rank_done(rank, Done(cell=1, status=status, seconds=0.1, error=error), [])
    handle._cluster.stopped = stopped
    cell.end(())
    handle._cluster.stopped = True  # later
    for _ in range(2):
        with contextlib.suppress(Exception, KeyboardInterrupt):
            handle.wait()
    shown += [item.metadata for item in items if isinstance(item, RichOutput)]
    assert [metadata["rankbook_handle"] for metadata in shown] == states


def test_a_second_cell_for_a_busy_rank_is_queued_visibly_and_in_order(notebook, gate):
    first, one = start(notebook, f"{gate.wait}\norder = ['one']\nprint('one')", "one")
    second, two = start(notebook, "order.append('two')\nprint('two')", "two", options="--ranks 1")
    third, three = start(notebook, "order.append('three')\nprint('three')", "three", options="--ranks 1")
    assert state(two) == f"cell [{two.count}] on rank 1: queued, waiting for rank 1"
    assert "queued" in state(three)
    status = notebook.ok("%distributed status").text
    assert f"cell [{two.count}] on rank 1: queued" in status and f"cell [{three.count}] on rank 1: queued" in status
    assert f"cell [{one.count}]" in status
    message = notebook.send("%%distributed --ranks 1\nprint(order)")
    last = notebook.finish(
        message, seen=lambda outcome: gate.open() if "queued, waiting for" in outcome.stderr else None
    )
    assert last.stdout == "[1] ['one', 'two', 'three']\n"
    assert f"cell [{last.count}] on rank 1: queued, waiting for rank 1" in last.stderr
    for message, outcome, word in ((first, one, "one"), (second, two, "two"), (third, three, "three")):
        notebook.follow(message, outcome, lambda o: "ok after" in state(o))
        assert word in outcome.stdout


def test_a_pull_behind_a_background_cell_says_that_it_waits_and_what_does_not(notebook, gate):
    start(notebook, f"loss = 0.5\n{gate.wait}", "training")
    message = notebook.send("%distributed pull loss --as losses")
    pulled = notebook.finish(
        message, timeout=30, seen=lambda outcome: gate.open() if "queued" in outcome.stderr else None
    )
    assert pulled.stderr == (
        "a pull of loss on ranks 0-1: queued, waiting for ranks 0-1; "
        "%distributed peek loss reads it while a cell runs\n"
    )
    assert value(notebook, "losses") == "[0.5, 0.5]"


def test_a_free_rank_does_not_overtake_for_a_cell_that_wants_both(notebook, gate):
    start(notebook, f"{gate.wait}\nseen = ['first']", "first", options="--ranks 0")
    notebook.ok("%%distributed --ranks 1\nseen = []")
    start(notebook, "seen.append('both')", "both")
    start(notebook, "seen.append('after')", "after", options="--ranks 1")
    assert value(notebook, "both.state, after.state") == "('queued', 'queued')"
    gate.open()
    assert notebook.ok("%%distributed\nprint(seen)").stdout == "[0] ['first', 'both']\n[1] ['both', 'after']\n"


def test_a_queued_cell_can_be_taken_back(notebook, gate):
    start(notebook, gate.wait, "running")
    message, outcome = start(notebook, "print('never')", "waiting")
    notebook.ok("waiting.interrupt()")
    notebook.follow(message, outcome, lambda o: "interrupted after" in state(o), timeout=20)
    assert value(notebook, "running.state") == "'running'"
    gate.open()
    notebook.ok("running.wait()")
    assert "never" not in outcome.text


def test_input_requests_are_answered_during_wait(notebook):
    start(notebook, "name = input('who? ')\nprint('hello', name)", "handle", options="--ranks 1 --out told")
    outcome = notebook.run("handle.wait()", answers=["you"])
    assert outcome.status == "ok"
    assert [o["prompts"] for o in outcome.outputs if o["type"] == "prompts"] == [["[1] who? "]]
    assert value(notebook, "told.stdout[1]") == "'hello you\\n'"


def test_quiet_shows_the_handle_only(notebook):
    message, outcome = start(notebook, "print('hidden')", "handle", options="--quiet")
    notebook.follow(message, outcome, lambda o: "ok after" in state(o))
    assert outcome.stdout == ""


def test_distributed_interrupt_reaches_a_background_cell(notebook):
    message, outcome = start(notebook, "import time\ntime.sleep(60)", "handle", options="--ranks 1")
    assert "interrupted rank 1" in notebook.ok("%distributed interrupt 1").stdout
    notebook.follow(message, outcome, lambda o: "interrupted after" in state(o), timeout=20)


def test_stop_ends_a_background_cell_and_keeps_finished_results(notebook):
    start(notebook, "rank", "done")
    notebook.ok("done.wait()")
    message, outcome = start(notebook, "import time\ntime.sleep(60)", "handle")
    notebook.ok("%distributed stop")
    notebook.follow(message, outcome, lambda o: "interrupted after" in state(o), timeout=20)
    assert "still runs" not in outcome.text
    assert notebook.run("handle.wait()").ename == "KeyboardInterrupt"
    assert value(notebook, "done.wait().text(1)") == "'1'"
