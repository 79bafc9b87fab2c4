"""Tab, Shift-Tab and `x?` through a real kernel, as front ends ask."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time

import ipykernel
import psutil
import pytest

from tests.conftest import stop_process, wait_until

pytestmark = pytest.mark.processes

ANSI = re.compile(r"\x1b\[[0-9;]*m")
SETUP = """%%distributed
class Net(torch.nn.Module):
    "A small one."
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
        self.only_here = [None] * rank
model = Net()
def helper():
    return model
if rank == 1:
    second_alone = {"learning_rate": 1.0}
"""


@pytest.fixture(scope="module", autouse=True)
def models(module_notebook):
    module_notebook.ok(SETUP)
    module_notebook.ok("notebooks_own = 1")


@pytest.fixture
def ask(notebook):
    """The replies of the kernel to what a front end asks, with the seconds that they took."""

    def ask(kind, code, cursor=None, **options):
        client = notebook.client
        message = getattr(client, kind)(code, len(code) if cursor is None else cursor, **options)
        start = time.monotonic()
        while True:
            reply = client.get_shell_msg(timeout=20)
            if reply["parent_header"]["msg_id"] == message:
                return reply["content"], time.monotonic() - start

    return ask


@pytest.fixture
def names(ask):
    def names(code, cursor=None):
        return ask("complete", code, cursor)[0]["matches"]

    return names


def test_completion_is_from_the_ranks_live_objects(ask, names):
    assert names("%%distributed\nmod") == ["model"]
    assert "weight" in names("%%distributed\nmodel.layers[0].we")
    reply, _ = ask("complete", "%%distributed --ranks 1\nx = second_al + 1", 37)
    assert (reply["matches"], reply["cursor_start"], reply["cursor_end"]) == (["second_alone"], 28, 37)
    kinds = reply["metadata"]["_jupyter_types_experimental"]
    assert [(kind["text"], kind["type"], kind["start"], kind["end"]) for kind in kinds] == [
        ("second_alone", "instance", 28, 37)
    ]
    assert names("%%distributed --ranks 1\nsecond_alone['lea") == ["learning_rate"]
    assert names("%%distributed\nsecond_al") == [], "the first rank has none, and the notebook's names do not count"
    assert names("%%distributed\nnotebooks_o") == []
    assert "notebooks_own" in names("notebooks_o"), "a plain cell is the notebook's own"


def test_the_magics_lines_know_their_options_ranks_and_variables(notebook, names):
    assert names("%distributed sta") == ["stacks", "start", "status"]
    assert names("%%distributed --ran") == ["--ranks"]
    assert names("%%distributed --ranks ") == ["all", "main", "0", "1"]
    assert "notebooks_own" in names("%distributed push note")
    assert names("%distributed pull mod") == ["model"]
    assert names("%distributed peek model.lay") == ["model.layers"]
    assert "torch" not in names("%distributed pull "), "it is no cell's variable"
    assert "%%distributed" in names("%%distr")


def test_shift_tab_reports_the_ranks_objects(ask):
    reply, _ = ask("inspect", "%%distributed\nmodel.layers[0]")
    assert reply["found"] and "Linear" in reply["data"]["text/plain"] and "Rank:" in reply["data"]["text/plain"]
    assert "class Net" in ask("inspect", "%%distributed\nmodel", detail_level=1)[0]["data"]["text/plain"]
    text = ask("inspect", "%%distributed\nhelper", detail_level=1)[0]["data"]["text/plain"]
    assert "return model" in text and "File" not in text, "a cell is no file, whatever a debugger calls it"
    assert ask("inspect", "%%distributed\nnotebooks_own")[0] == {
        "status": "ok",
        "found": False,
        "data": {},
        "metadata": {},
    }
    assert ask("inspect", "notebooks_own")[0]["found"]


def test_a_question_mark_opens_the_pager(notebook):
    paged = notebook.ok("%%distributed\nmodel?")
    assert paged.payload[0]["source"] == "page" and "A small one." in paged.payload[0]["data"]["text/plain"]
    assert paged.outputs == []
    assert "class Net" in notebook.ok("%%distributed\nmodel??").payload[0]["data"]["text/plain"]
    assert "not found" in notebook.ok("%%distributed\nno_such_name?").stdout


def test_a_question_below_code_knows_what_only_running_code_can_tell(notebook):
    shown = notebook.ok("%%distributed\nimport rankbook\nrankbook.start?").stdout
    assert "rankbook.start(" in ANSI.sub("", shown)
    assert "not found" in notebook.ok("%%distributed\nimport rankbook\nrankbook.no_such_name?").stdout


def test_auto_mode_has_the_same(notebook, names):
    notebook.ok("%distributed auto on")
    try:
        assert names("mod") == ["model"] and names("notebooks_o") == []
        assert names("%time mod") == ["model"]
        assert "notebooks_own" in names("%%local\nnotebooks_o")
        assert "A small one." in notebook.ok("model?").payload[0]["data"]["text/plain"]
    finally:
        notebook.ok("%distributed auto off")


def test_completion_is_answered_while_a_cell_runs(notebook, ask, names):
    notebook.ok("%%distributed --background --out busy\nimport time\nfor step in range(10**9):\n    pass")
    try:
        wait_until(lambda: names("%%distributed\nste") == ["step"], timeout=20, what="the loop's variable is there")
        assert "weight" in names("%%distributed\nmodel.layers[0].we")
        # The cell never ends by itself, so every answer is given beside it; benchmarks/hints.py takes the times.
        answers = [ask("inspect", "%%distributed\nmodel") for _ in range(5)]
        assert all(reply["found"] for reply, _ in answers)
    finally:
        notebook.ok("%distributed interrupt")


@pytest.mark.skipif(int(ipykernel.__version__.split(".")[0]) < 7, reason="subshells came with ipykernel 7")
def test_a_subshell_answers_while_the_kernel_itself_waits_for_a_cell(notebook):
    client = notebook.client
    control = client.control_channel
    control.send(client.session.msg("create_subshell_request", {}))
    subshell = control.get_msg(timeout=10)["content"]["subshell_id"]
    cell = notebook.send("%%distributed\nimport time\nsleeps_now = True\ntime.sleep(60)")
    try:
        code = "%%distributed\nsleeps_n"
        matches = []

        def ask():
            request = client.session.msg("complete_request", {"code": code, "cursor_pos": len(code)})
            request["header"]["subshell_id"] = subshell
            client.shell_channel.send(request)
            reply = client.get_shell_msg(timeout=10)
            assert reply["msg_type"] == "complete_reply", "it came before the cell's own"
            matches.extend(reply["content"]["matches"])
            return bool(matches)

        wait_until(ask, timeout=10, what="the cell runs on the rank, which says so")
        assert matches == ["sleeps_now"]
    finally:
        notebook.interrupt()
        assert notebook.finish(cell, timeout=20).status == "error"
        control.send(client.session.msg("delete_subshell_request", {"subshell_id": subshell}))
        control.get_msg(timeout=10)


@pytest.fixture
def in_time(notebook):
    """The ranks have as long to answer as elsewhere than in tests."""
    change = "import rankbook.coordinator.cluster as _module\n_class = _module.ClusterQueries\n"
    change += "_asks = _class.complete, _class.inspect\n"
    change += "_before = [dict(each.__kwdefaults__) for each in _asks]\n"
    notebook.ok(change + "for _each in _asks: _each.__kwdefaults__['timeout'] = _module.COMPLETION_TIMEOUT")
    yield
    notebook.ok("for _each, _was in zip(_asks, _before): _each.__kwdefaults__.update(_was)")


def test_completion_is_empty_and_timely_if_a_rank_does_not_answer(notebook, ask, in_time):
    displays = notebook.ok("%%distributed --ranks 0\nimport os\nos.getpid()").displays
    first = int(displays[0]["text/plain"].split()[-1])
    stop_process(first)
    try:
        for kind in ("complete", "inspect"):
            answers = [ask(kind, "%%distributed --ranks 0\nmodel.layers") for _ in range(3)]
            for reply, _ in answers:
                assert not reply.get("matches") and not reply.get("data") and reply["status"] == "ok"
            took = statistics.median(seconds for _, seconds in answers)
            assert took < 2, "a tenth of a second, and what a busy machine adds; without a limit there is no answer"
    finally:
        os.kill(first, signal.SIGCONT)
    assert psutil.Process(first).status() != psutil.STATUS_STOPPED


def test_unloading_restores_the_completion_of_the_kernel(fresh_notebook):
    fresh_notebook.ok("kernel = get_ipython().kernel\nours = kernel.do_complete.__self__ is not kernel")
    fresh_notebook.ok("%load_ext rankbook\n%reload_ext rankbook\n%unload_ext rankbook")
    outcome = fresh_notebook.ok("ours, kernel.do_complete.__self__ is kernel, kernel.do_inspect.__self__ is kernel")
    assert outcome.displays[0]["text/plain"] == "(True, True, True)"
