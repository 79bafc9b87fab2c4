"""Widgets that are made on ranks: the front end hears of them, moves them, and loses them with their rank."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

WIDGET = "application/vnd.jupyter.widget-view+json"
WAIT = """%%distributed{options}
import time
until = time.monotonic() + 20
while not ({condition}) and time.monotonic() < until: time.sleep(0.01)
{then}"""
SLIDER = "%%distributed\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=3 + rank, max=50)\nslider"


def said(outcome, kind):
    return [each for each in outcome.messages if each["msg_type"] == f"comm_{kind}"]


def sliders(outcome):
    """The comm of each rank's slider, in rank order."""
    models = [(each["content"]["data"]["state"], each["content"]["comm_id"]) for each in said(outcome, "open")]
    found = {state["value"] - 3: name for state, name in models if state["_model_name"] == "IntSliderModel"}
    return [found[rank] for rank in sorted(found)]


def move(notebook, name, value):
    """What a front end sends when a person moves it."""
    content = {"comm_id": name, "data": {"method": "update", "state": {"value": value}, "buffer_paths": []}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", content))


def test_a_widget_of_each_rank_is_shown_behind_its_label_and_moves_its_own_rank(notebook):
    outcome = notebook.ok(SLIDER)
    names = sliders(outcome)
    assert len(names) == 2
    shown = [each[WIDGET]["model_id"] for each in outcome.displays if WIDGET in each]
    assert shown == names
    labels = [each["text/plain"] for each in outcome.displays if WIDGET not in each]
    assert labels == ["[0]", "[1]"]
    assert all(each["target_name"] == "jupyter.widget" for each in (one["content"] for one in said(outcome, "open")))
    move(notebook, names[1], 41)
    told = notebook.ok(WAIT.format(options="", condition="rank == 0 or slider.value == 41", then="slider.value"))
    assert told.text.splitlines() == ["[0] 3", "[1] 41"]


def test_what_a_rank_sets_reaches_the_front_end(notebook):
    names = sliders(notebook.ok(SLIDER))
    outcome = notebook.ok("%%distributed --ranks 0\nslider.value = 17")
    updates = [(each["content"]["comm_id"], each["content"]["data"]["state"]) for each in said(outcome, "msg")]
    assert (names[0], {"value": 17}) in updates


def test_what_listens_hears_and_its_error_ends_no_cell(notebook):
    names = sliders(notebook.ok(SLIDER))
    notebook.ok("%%distributed\nseen = []\ndef hear(change):\n    seen.append(change.new)\n    1 / (change.new - 9)\n"
                "slider.observe(hear, 'value')")  # fmt: skip
    heard = WAIT.format(options=" --ranks 0", condition="len(seen) == 2", then="print(seen)")
    move(notebook, names[0], 9)
    move(notebook, names[0], 10)
    assert notebook.ok(heard).stdout == "[0] [9, 10]\n"


def test_bytes_go_both_ways(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport ipywidgets\nimage = ipywidgets.Image(value=bytes(range(256)))"
    )
    (opened,) = [
        each for each in said(outcome, "open") if each["content"]["data"]["state"]["_model_name"] == "ImageModel"
    ]
    assert bytes(opened["buffers"][0]) == bytes(range(256))
    state = {"method": "update", "state": {}, "buffer_paths": [["value"]]}
    content = {"comm_id": opened["content"]["comm_id"], "data": state}
    notebook.client.session.send(notebook.client.shell_channel.socket, "comm_msg", content, buffers=[b"\x00\xff"])
    wait = WAIT.format(options=" --ranks 0", condition="len(image.value) == 2", then="bytes(image.value)")
    assert notebook.ok(wait).text == "[0] b'\\x00\\xff'\n"


def test_a_subprocess_says_nothing_and_garbage_neither(notebook):
    names = sliders(notebook.ok(SLIDER))
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport comm, gc, multiprocessing\ndef child(): slider.value = 40\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\nprocess.start(); process.join()\n"
        "lone = comm.create_comm(target_name='nobody')\ncomm.get_comm_manager().unregister_comm(lone)\n"
        "del lone\ngc.collect(); process.exitcode"
    )
    assert outcome.text.splitlines()[-1] == "[0] 0"
    assert not [each for each in said(outcome, "msg") if each["content"]["comm_id"] in names]
    assert not said(outcome, "close")


def ask(notebook, name, target, method, data=None):
    """What a reloaded page asks on this comm, and what comes back, with the answer to it."""
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
    (image,) = {each["content"]["comm_id"] for each in said(outcome, "open") if each["buffers"]}
    move(notebook, names[1], 41)
    told = ask(notebook, "page", "jupyter.widget.control", "request_states")
    data, buffers = told["content"]["data"], told["buffers"]
    assert data["method"] == "update_states"
    values = {name: each["state"].get("value") for name, each in data["states"].items()}
    assert (values[names[0]], values[names[1]]) == (17, 41)
    assert "own" in values.values()
    found = {tuple(path): bytes(buffer) for path, buffer in zip(data["buffer_paths"], buffers, strict=True)}
    assert found[image, "state", "value"] == bytes(range(256))
    assert data["states"][names[0]]["model_name"] == "IntSliderModel"
    parts = data["states"][names[0]]["state"]
    assert parts["layout"].removeprefix("IPY_MODEL_") in data["states"], "the parts of a widget are widgets too"

    notebook.client.comm_info("jupyter.widget")
    there = notebook.client.get_shell_msg(timeout=10)["content"]["comms"]
    assert {*names, image} <= set(there)
    alone = ask(notebook, names[0], None, "request_state")["content"]["data"]
    assert (alone["method"], alone["state"]["value"]) == ("update", 17), "as pages asked once, comm by comm"


def test_bars_of_tqdm_in_a_notebook(notebook):
    pytest.importorskip("tqdm")
    outcome = notebook.ok("%%distributed\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(5)): pass")
    values = {}
    for each in said(outcome, "msg"):
        state = each["content"]["data"].get("state", {})
        values.setdefault(each["content"]["comm_id"], {}).update(state)
    assert sum(state.get("value") == 5.0 for state in values.values()) == 2
    assert sum(WIDGET in each for each in outcome.displays) == 2


def test_the_front_end_may_close_it_and_a_rank_that_dies_does(fresh_notebook):
    notebook = fresh_notebook
    notebook.ok("%distributed start -n 2")
    names = sliders(notebook.ok(SLIDER))
    there = "import comm\n{!r} in comm.get_comm_manager().comms"
    assert "True" in notebook.ok(there.format(names[1])).text
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_close", {"comm_id": names[0], "data": {}}))
    gone = f"{names[0]!r} not in comm.get_comm_manager().comms"
    closed = notebook.ok(WAIT.format(options=" --ranks 0\nimport comm", condition=gone, then=gone))
    assert closed.text == "[0] True\n"
    outcome = notebook.run("%%distributed --ranks 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.status == "error"
    assert names[1] in [each["content"]["comm_id"] for each in said(outcome, "close")]
    assert "False" in notebook.ok(there.format(names[1])).text


def test_a_widget_is_text_where_there_is_no_front_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import rankbook\nwith rankbook.Cluster(1) as cluster:\n"
                      "    result = cluster.run('import ipywidgets\\nipywidgets.IntSlider(value=3)')\n"
                      "    print(result.outcomes[0].result['text/plain'])")  # fmt: skip
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert json.dumps(done.stdout) == json.dumps("IntSlider(value=3)\n"), done.stderr
