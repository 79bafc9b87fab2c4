"""Test widgets that are created on ranks: state in both directions, and the end of their rank."""

from __future__ import annotations

import json
import subprocess
import sys

import ipywidgets
import pytest

from tests.conftest import Gate

pytestmark = pytest.mark.processes

WIDGET = "application/vnd.jupyter.widget-view+json"
WAIT = """%%distributed{options}
import time
until = time.monotonic() + 20
while not ({condition}) and time.monotonic() < until: time.sleep(0.01)
{then}"""
SLIDER = "%%distributed\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=3 + rank, max=50)\nslider"


def comm_messages(outcome, kind):
    return [message for message in outcome.messages if message["msg_type"] == f"comm_{kind}"]


def sliders(outcome):
    """The comm of each rank's slider, in rank order."""
    models = [(item["content"]["data"]["state"], item["content"]["comm_id"]) for item in comm_messages(outcome, "open")]
    names_by_rank = {state["value"] - 3: name for state, name in models if state["_model_name"] == "IntSliderModel"}
    return [names_by_rank[rank] for rank in sorted(names_by_rank)]


def move(notebook, name, value):
    """Send the message of a front end whose user moves the slider."""
    content = {"comm_id": name, "data": {"method": "update", "state": {"value": value}, "buffer_paths": []}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", content))


def test_a_widget_of_every_rank_is_shown_behind_its_label_and_moves_its_own_rank(notebook):
    outcome = notebook.ok(SLIDER)
    names = sliders(outcome)
    assert len(names) == 2
    model_ids = [display[WIDGET]["model_id"] for display in outcome.displays if WIDGET in display]
    assert model_ids == names
    labels = [item["text/plain"] for item in outcome.displays if WIDGET not in item]
    assert labels == ["[0]", "[1]"]
    assert all(
        element["target_name"] == "jupyter.widget"
        for element in (one["content"] for one in comm_messages(outcome, "open"))
    )
    move(notebook, names[1], 41)
    reported = notebook.ok(WAIT.format(options="", condition="rank == 0 or slider.value == 41", then="slider.value"))
    assert reported.text.splitlines() == ["[0] 3", "[1] 41"]


def test_state_set_on_a_rank_reaches_the_front_end(notebook):
    names = sliders(notebook.ok(SLIDER))
    outcome = notebook.ok("%%distributed --ranks 0\nslider.value = 17")
    updates = [(item["content"]["comm_id"], item["content"]["data"]["state"]) for item in comm_messages(outcome, "msg")]
    assert (names[0], {"value": 17}) in updates


def test_observers_are_called_and_their_errors_end_no_cell(notebook):
    names = sliders(notebook.ok(SLIDER))
    notebook.ok("%%distributed\nseen = []\ndef hear(change):\n    seen.append(change.new)\n    1 / (change.new - 9)\n"
                "slider.observe(hear, 'value')")  # fmt: skip
    wait_for_two = WAIT.format(options=" --ranks 0", condition="len(seen) == 2", then="print(seen)")
    move(notebook, names[0], 9)
    move(notebook, names[0], 10)
    assert notebook.ok(wait_for_two).stdout == "[0] [9, 10]\n"


def test_bytes_go_both_ways(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport ipywidgets\nimage = ipywidgets.Image(value=bytes(range(256)))"
    )
    (opened,) = [
        item
        for item in comm_messages(outcome, "open")
        if item["content"]["data"]["state"]["_model_name"] == "ImageModel"
    ]
    assert bytes(opened["buffers"][0]) == bytes(range(256))
    state = {"method": "update", "state": {}, "buffer_paths": [["value"]]}
    content = {"comm_id": opened["content"]["comm_id"], "data": state}
    notebook.client.session.send(notebook.client.shell_channel.socket, "comm_msg", content, buffers=[b"\x00\xff"])
    wait = WAIT.format(options=" --ranks 0", condition="len(image.value) == 2", then="bytes(image.value)")
    assert notebook.ok(wait).text == "[0] b'\\x00\\xff'\n"


def test_data_of_a_comm_may_be_any_json_value(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport comm\nvalues = []\nlink = comm.create_comm(target_name='any')\n"
        "link.on_msg(lambda message: values.append(message['content']['data']))"
    )
    (opened,) = comm_messages(outcome, "open")
    for value in (["a", 1], "text", None, {"method": "custom"}):
        content = {"comm_id": opened["content"]["comm_id"], "data": value}
        notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", content))
    wait = WAIT.format(options=" --ranks 0", condition="len(values) == 4", then="print(values)")
    assert notebook.ok(wait).stdout == "[0] [['a', 1], 'text', None, {'method': 'custom'}]\n"
    sent = notebook.ok("%%distributed --ranks 0\nfor value in ([], 0, 'text', None): link.send(value)")
    assert [item["content"]["data"] for item in comm_messages(sent, "msg")] == [[], 0, "text", {}]


def test_subprocess_and_garbage_collection_send_no_comm_messages(notebook):
    names = sliders(notebook.ok(SLIDER))
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport comm, gc, multiprocessing\ndef child(): slider.value = 40\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\nprocess.start(); process.join()\n"
        "lone = comm.create_comm(target_name='nobody')\ncomm.get_comm_manager().unregister_comm(lone)\n"
        "del lone\ngc.collect(); process.exitcode"
    )
    assert outcome.text.splitlines()[-1] == "[0] 0"
    assert not [item for item in comm_messages(outcome, "msg") if item["content"]["comm_id"] in names]
    assert not comm_messages(outcome, "close")


def ask(notebook, name, target, method, data=None):
    """Send the request of a reloaded page on this comm. Return the answer and the messages of the comm."""
    client, sent = notebook.client, None
    if target:
        opening = {"comm_id": name, "target_name": target, "data": {}}
        client.shell_channel.send(client.session.msg("comm_open", opening, metadata={"version": "1.0.0"}))
    content = {"comm_id": name, "data": {"method": method, **(data or {})}}
    sent = client.session.msg("comm_msg", content)
    client.shell_channel.send(sent)
    while True:
        received = client.get_iopub_msg(timeout=10)
        if received["msg_type"] == "comm_msg" and received["parent_header"].get("msg_id") == sent["header"]["msg_id"]:
            return received


def test_a_page_that_is_reloaded_finds_the_widgets_of_the_ranks_beside_the_notebooks_own(notebook):
    notebook.ok("import ipywidgets\nown = ipywidgets.Text(value='own')")
    names = sliders(notebook.ok(SLIDER))
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimage = ipywidgets.Image(value=bytes(range(256)))\nslider.value = 17"
    )
    (image,) = {item["content"]["comm_id"] for item in comm_messages(outcome, "open") if item["buffers"]}
    move(notebook, names[1], 41)
    reported = ask(notebook, "page", "jupyter.widget.control", "request_states")
    data, buffers = reported["content"]["data"], reported["buffers"]
    assert data["method"] == "update_states"
    values = {name: element["state"].get("value") for name, element in data["states"].items()}
    assert (values[names[0]], values[names[1]]) == (17, 41)
    assert "own" in values.values()
    buffers_by_path = {tuple(path): bytes(buffer) for path, buffer in zip(data["buffer_paths"], buffers, strict=True)}
    assert buffers_by_path[image, "state", "value"] == bytes(range(256))
    assert data["states"][names[0]]["model_name"] == "IntSliderModel"
    parts = data["states"][names[0]]["state"]
    assert parts["layout"].removeprefix("IPY_MODEL_") in data["states"], "the parts of a widget are widgets too"

    notebook.client.comm_info("jupyter.widget")
    comms = notebook.client.get_shell_msg(timeout=10)["content"]["comms"]
    assert {*names, image} <= set(comms)
    alone = ask(notebook, names[0], None, "request_state")["content"]["data"]
    assert (alone["method"], alone["state"]["value"]) == ("update", 17), "as pages asked once, comm by comm"


def test_bars_of_tqdm_in_a_notebook(notebook):
    pytest.importorskip("tqdm")
    outcome = notebook.ok("%%distributed\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(5)): pass")
    values = {}
    for item in comm_messages(outcome, "msg"):
        state = item["content"]["data"].get("state", {})
        values.setdefault(item["content"]["comm_id"], {}).update(state)
    assert sum(state.get("value") == 5.0 for state in values.values()) == 2
    assert sum(WIDGET in display for display in outcome.displays) == 2


def test_a_widget_that_is_closed_at_once_is_closed_after_its_display_and_not_shown_again(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport ipywidgets, threading, time\n"
        "for _ in range(3):\n    box = ipywidgets.IntText()\n    display(box)\n    box.close()\n"
        "threading.Event().wait(1.6)\nprint('end')"  # the header is shown after a second, above the output again
    )
    contents = [(message["msg_type"], message["content"]) for message in outcome.messages]
    displayed = {
        content["data"][WIDGET]["model_id"]: place
        for place, (_, content) in enumerate(contents)
        if WIDGET in content.get("data", {})
    }
    closed = {content["comm_id"]: place for place, (kind, content) in enumerate(contents) if kind == "comm_close"}
    assert len(displayed) == 6
    assert all(displayed[name] < closed[name] for name in displayed), "the last display, also if it was shown again"


def test_front_end_may_close_a_widget_and_a_widget_of_a_dead_rank_stays(fresh_notebook):
    notebook = fresh_notebook
    notebook.ok("%distributed start -n 2")
    names = sliders(notebook.ok(SLIDER))
    is_registered = (
        "{!r} in get_ipython().kernel.comm_manager.comms"  # before ipykernel 6.18 not that of the package comm
    )
    assert "True" in notebook.ok(is_registered.format(names[1])).text
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_close", {"comm_id": names[0], "data": {}}))
    is_closed = f"{names[0]!r} not in comm.get_comm_manager().comms"
    closed = notebook.ok(WAIT.format(options=" --ranks 0\nimport comm", condition=is_closed, then=is_closed))
    assert closed.text == "[0] True\n"
    outcome = notebook.run("%%distributed --ranks 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.status == "error"
    assert names[1] not in [item["content"]["comm_id"] for item in comm_messages(outcome, "close")]
    assert "True" in notebook.ok(is_registered.format(names[1])).text
    notebook.ok("%distributed restart 1", timeout=30)
    state = ask(notebook, names[1], None, "request_state")["content"]["data"]["state"]
    assert state["value"] == 4, "a page that is reloaded shows its last state"
    notebook.ok("%distributed stop")
    move(notebook, names[1], 9)
    assert not notebook.ok("print('fine')").stderr


@pytest.mark.slow
def test_a_widget_is_copied_neither_to_a_new_rank_nor_to_the_notebook(fresh_notebook):
    notebook = fresh_notebook
    names = sliders(notebook.ok(SLIDER))
    notebook.run("%%distributed --ranks 1\nimport os\nos._exit(3)")
    assert "a widget belongs to the process that has made it" in notebook.ok("%distributed heal").text
    assert "a widget belongs to the process" in notebook.run("%distributed pull slider --ranks 0").evalue
    move(notebook, names[0], 11)
    moved = WAIT.format(options=" --ranks 0", condition="slider.value == 11", then="slider.value")
    assert notebook.ok(moved).text == "[0] 11\n"


@pytest.mark.slow
def test_the_widgets_of_a_rank_that_is_restarted_stay_as_they_were(fresh_notebook):
    notebook = fresh_notebook
    notebook.ok("%distributed start -n 2")
    names = sliders(notebook.ok(SLIDER))
    move(notebook, names[1], 41)
    moved = WAIT.format(options="", condition="rank == 0 or slider.value == 41", then="slider.value")
    assert notebook.ok(moved).text == "[0] 3\n[1] 41\n"
    restart = notebook.ok("%distributed restart 1", timeout=30)
    assert names[1] not in [item["content"]["comm_id"] for item in comm_messages(restart, "close")]
    assert ask(notebook, names[1], None, "request_state")["content"]["data"]["state"]["value"] == 41
    move(notebook, names[1], 12)  # the new process does not know the widget
    move(notebook, names[0], 13)
    moved = WAIT.format(options=" --ranks 0", condition="slider.value == 13", then="slider.value")
    outcome = notebook.ok(moved)
    assert (outcome.text, outcome.stderr) == ("[0] 13\n", "")
    states = ask(notebook, "page", "jupyter.widget.control", "request_states")["content"]["data"]["states"]
    assert [states[name]["state"]["value"] for name in names] == [13, 12]
    again = notebook.ok(SLIDER.replace("%%distributed", "%%distributed --ranks 1"))
    (new,) = {display[WIDGET]["model_id"] for display in again.displays if WIDGET in display}
    move(notebook, new, 20)
    moved = WAIT.format(options=" --ranks 1", condition="slider.value == 20", then="slider.value")
    outcome = notebook.ok(moved)
    assert (outcome.text, outcome.stderr) == ("[1] 20\n", "")


def test_a_message_of_the_page_that_comes_while_the_widget_is_constructed_is_handled_afterwards(notebook, tmp_path):
    """Test a message that answers the opening of the comm, as with ipympl, before its handler is constructed."""
    gate = Gate(tmp_path / "gate")
    code = f"""%%distributed --ranks 0 --background
import ipywidgets, os, time
class Figure(ipywidgets.DOMWidget):
    manager = handled = None
    def __init__(self):
        super().__init__()
        self.on_msg(self.hear)
    def hear(self, widget, content, buffers):
        Figure.handled = self.manager.number
figure = Figure()
print("begun", flush=True)
{gate.wait}
figure.manager = type("Manager", (), {{"number": 7}})"""
    message = notebook.send(code)
    outcome = notebook.finish(message)
    notebook.follow(message, outcome, lambda so_far: "begun" in so_far.text)
    figure = comm_messages(outcome, "open")[-1]["content"]["comm_id"]
    ready = {"comm_id": figure, "data": {"method": "custom", "content": {"type": "ready"}}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", ready))
    assert "running" in notebook.ok("%distributed stacks").text, "the rank has received what was sent before"
    gate.open()
    handled = "Figure.handled is not None"
    late = notebook.ok(WAIT.format(options=" --ranks 0", condition=handled, then="Figure.handled"))
    assert late.text.endswith("[0] 7\n")
    notebook.follow(message, outcome, lambda so_far: "ok" in so_far.text)
    assert "AttributeError" not in outcome.text + outcome.stderr + late.stderr


def test_widget_is_shown_as_text_without_a_front_end(tmp_path):
    # ipywidgets 7 displays the last expression itself, and later versions return its mime bundle
    attribute = "result" if int(ipywidgets.__version__.split(".")[0]) >= 8 else "displays[-1]"
    script = tmp_path / "script.py"
    script.write_text("import rankbook\nwith rankbook.Cluster(1) as cluster:\n"
                      "    result = cluster.run('import ipywidgets\\nipywidgets.IntSlider(value=3)')\n"
                      f"    print(result.outcomes[0].{attribute}['text/plain'])")  # fmt: skip
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert json.dumps(done.stdout) == json.dumps("IntSlider(value=3)\n"), done.stderr
