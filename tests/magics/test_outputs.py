"""Test ipywidgets' `Output` on a rank: what is captured, and what is not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.magics.test_comm_bridge import comm_messages, move

pytestmark = pytest.mark.processes

SETUP = "%%distributed\nimport ipywidgets, sys, time\nfrom IPython.display import HTML, clear_output, display\n"


def states(messages):
    """Return the state of every widget after these messages, by comm id."""
    states_by_comm = {}
    for message in messages:
        if message["msg_type"] in ("comm_open", "comm_msg") and "state" in message["content"]["data"]:
            states_by_comm.setdefault(message["content"]["comm_id"], {}).update(message["content"]["data"]["state"])
    return states_by_comm


def outputs_of(outcome, *, rank=0):
    """Return the outputs of the rank's Output widget `out`, which this cell created."""
    models = [state for state in states(outcome.messages).values() if state.get("_model_name") == "OutputModel"]
    return models[rank]["outputs"]


def texts(outputs):
    return [output.get("text") or output.get("data", {}).get("text/plain") or output.get("ename") for output in outputs]


def test_output_within_the_block_appears_only_in_the_widget(notebook):
    outcome = notebook.ok(
        SETUP + "out = ipywidgets.Output()\nprint('before')\nwith out:\n    print('rank', rank)\n"
        "    print('wrong', file=sys.stderr)\n    display(HTML('<b>bold</b>'))\n    !echo from a shell\n"
        "    import ctypes; ctypes.CDLL(None).puts(b'from C'); ctypes.CDLL(None).fflush(None)\nprint('after')\n"
    )
    assert outcome.stdout == "[0-1] before\n[0-1] after\n" and outcome.stderr == ""
    assert not outcome.displays, "but for text"
    for rank in (0, 1):
        first, second, third, last = outputs_of(outcome, rank=rank)
        assert first == {"output_type": "stream", "name": "stdout", "text": f"rank {first['text'][-2]}\n"}
        assert second == {"output_type": "stream", "name": "stderr", "text": "wrong\n"}
        assert third["data"]["text/html"] == "<b>bold</b>" and third["output_type"] == "display_data"
        assert last["text"] == "from a shell\nfrom C\n"
    assert {outputs_of(outcome, rank=rank)[0]["text"] for rank in (0, 1)} == {"rank 0\n", "rank 1\n"}


def test_decorated_functions_appended_text_clearing_and_one_widget_in_another(notebook):
    outcome = notebook.ok(
        SETUP + "if rank == 0:\n    out, inner = ipywidgets.Output(), ipywidgets.Output()\n"
        "    @out.capture(clear_output=True)\n    def work(n): print('work', n); return n\n"
        "    print(work(1) + work(2))\n    out.append_stdout('more\\n'); out.append_display_data(HTML('<i>i</i>'))\n"
        "    with out:\n        print('outer')\n        with inner: print('gone'); clear_output(); print('inner')\n"
        "        handle = display('one', display_id=True); handle.update('two')\n"
    )
    assert outcome.stdout == "[0] 3\n"
    first, second, html, *rest = outputs_of(outcome)
    assert texts([first, second]) == ["work 2\n", "more\n"] and html["data"]["text/html"] == "<i>i</i>"
    assert texts(rest) == ["outer\n", "'two'"]
    assert texts(outputs_of(outcome, rank=1)) == ["inner\n"]


def test_an_error_stands_in_the_widget_and_an_interrupt_ends_the_cell(notebook):
    outcome = notebook.ok(
        SETUP + "out = ipywidgets.Output()\nwith out:\n    print('so far')\n    1 / 0\nprint('goes on')"
    )
    reported = outputs_of(outcome)
    assert texts(reported) == ["so far\n", "ZeroDivisionError"] and outcome.stdout == "[0-1] goes on\n"
    assert any("1 / 0" in re.sub(r"\x1b\[[0-9;]*m", "", line) for line in reported[1]["traceback"])

    message = notebook.send("%%distributed\nwith out:\n    print('again')\n    time.sleep(60)")
    pressed = []

    def press(outcome):
        if not pressed and any("again" in str(state) for state in states(outcome.messages).values()):
            pressed.append(notebook.interrupt())

    stopped = notebook.finish(message, seen=press, timeout=20)
    assert (stopped.status, stopped.ename) == ("error", "KeyboardInterrupt")
    assert notebook.ok("%%distributed\nprint('shown')").stdout == "[0-1] shown\n", "nothing is captured any more"


def test_a_callback_captures_its_own_while_a_cell_prints(notebook):
    setup = notebook.ok(
        SETUP.replace("distributed", "distributed --ranks 0")
        + "slider, out, ran = ipywidgets.IntSlider(value=3), ipywidgets.Output(), []\n"
        "def hear(change):\n    with out:\n        print('moved to', change.new); display(change.new)\n"
        "    ran.append(change.new)\nslider.observe(hear, 'value')"
    )
    (slider,) = [name for name, state in states(setup.messages).items() if state.get("value") == 3]
    notebook.ok(
        "%%distributed --ranks 0 --background\nuntil = time.monotonic() + 10\n"
        "while not ran and time.monotonic() < until: print('tick'); time.sleep(0.01)\nprint('done', ran)"
    )
    move(notebook, slider, 41)
    outcome = notebook.ok("%%distributed --ranks 0\nran")
    assert outcome.text.endswith("[0] [41]\n")
    reported = states(setup.messages + notebook.late + outcome.messages).values()
    (outputs,) = [state["outputs"] for state in reported if state.get("_model_name") == "OutputModel"]
    assert texts(outputs) == ["moved to 41\n", "41"], "and no tick"


def test_interact_shows_what_the_function_prints_and_returns(notebook):
    code = "made = ipywidgets.interact(double, n=(0, 50)) if rank == 0 else None"
    outcome = notebook.ok(SETUP + f"def double(n):\n    print('n is', n)\n    return 2 * n\n{code}")
    assert outcome.stdout == ""
    assert texts(outputs_of(outcome)) == ["n is 25\n", "50"]


def test_a_flood_sends_a_few_states_and_keeps_its_end(notebook):
    outcome = notebook.ok(
        SETUP + "if rank == 0:\n    out = ipywidgets.Output()\n"
        "    with out:\n        for n in range(30_000): print('line', n)\n"
        "    with out:\n        for n in range(100): print(f'\\r{n}%', end='')"
    )
    last = outputs_of(outcome)
    assert texts(last)[0].startswith("(earlier output is left out)\n") and texts(last)[0].endswith("\n99%")
    updates = [item for item in comm_messages(outcome, "msg") if "outputs" in item["content"]["data"].get("state", {})]
    sent = sum(len(str(update["content"])) for update in updates)
    assert sent < 4_000_000, "each state is sent whole, so they come at a pace"


def test_a_subprocess_prints_into_the_widget_and_has_none_of_its_own(notebook):
    outcome = notebook.ok(
        SETUP + "import multiprocessing\nif rank == 0:\n    out = ipywidgets.Output()\n"
        "    def child():\n        with ipywidgets.Output(): print('of the child')\n"
        "    with out:\n        process = multiprocessing.get_context('fork').Process(target=child)\n"
        "        process.start(); process.join()\n    print(process.exitcode)"
    )
    assert outcome.stdout == "[0] 0\n" and texts(outputs_of(outcome)) == ["of the child\n"]
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport threading\ndef run():\n    with out:\n"
        "        process = multiprocessing.get_context('fork').Process(target=print, args=('of its child',))\n"
        "        process.start(); process.join()\nthread = threading.Thread(target=run)\nthread.start(); thread.join()"
    )
    assert outcome.stdout == "[0] of its child\n", "which writes where the process writes"


def test_output_without_a_front_end_is_printed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import rankbook\nwith rankbook.Cluster(1) as cluster:\n"
                      "    cell = 'import ipywidgets\\nout = ipywidgets.Output()\\nwith out: print(1)'\n"
                      "    print(cluster.run(cell).outcomes[0].stdout)")  # fmt: skip
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1\n\n", done.stderr
