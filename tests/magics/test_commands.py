"""Test `%distributed start|status|interrupt|restart|stop|stacks|push|pull|auto` in a kernel."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Gate

pytestmark = pytest.mark.processes

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def value(notebook, expression: str) -> str:
    """Evaluate an expression in the notebook and return its text."""
    return notebook.ok(expression).displays[-1]["text/plain"]


def refused(notebook, code: str) -> str:
    """The one line that a mistake is answered with."""
    outcome = notebook.run(code)
    assert outcome.status == "error"
    reported = outcome.stderr or ANSI.sub("", outcome.traceback) + "\n"
    assert reported.count("\n") == 1, reported
    return reported


# Help ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["%distributed?", "%%distributed?", "?%distributed"])
def test_a_question_mark_shows_the_options_and_the_commands(notebook, question):
    (page,) = notebook.ok(question).payload
    text = page["data"]["text/plain"]
    for word in ("--ranks", "--background", "--out", "--timeout", "--quiet"):
        assert word in text
    for command in ("start", "status", "interrupt", "restart", "stop", "stacks", "push", "pull", "auto"):
        assert f"%distributed {command}" in text
    assert re.search(r"^ +interrupt +interrupt the cells", text, re.MULTILINE)


@pytest.mark.parametrize("line", ["", "bogus", "statsu", "--ranks 0"])
def test_a_command_that_is_none_is_one_line_that_names_all(notebook, line):
    reported = refused(notebook, f"%distributed {line}")
    for command in ("start", "status", "interrupt", "restart", "stop", "stacks", "push", "pull", "auto"):
        assert command in reported


@pytest.mark.parametrize(("line", "valid"), [("stacks --foo", "none"), ("auto maybe", "on|off")])
def test_a_wrong_option_is_one_line_that_names_the_valid_ones(notebook, line, valid):
    assert refused(notebook, f"%distributed {line}").rstrip().endswith(f"valid arguments: {valid}")


def test_magic_in_the_wrong_place_is_a_one_line_error_with_the_remedy(notebook):
    for cell in ("# a note\n%%distributed --ranks 0\nx = 1", "%%distributed\nx = 1\n%%distributed --ranks 0\nx = 2"):
        reported = refused(notebook, cell)
        assert "%%distributed must be the first line of its cell" in reported and "not found" not in reported
    assert "%%local must be the first line" in refused(notebook, "x = 1\n%%local\ny = 1")
    assert "must be in a separate cell" in refused(notebook, "%%distributed\nx = 1\n%distributed pull x")


# Start, status, stop -------------------------------------------------------------------------------------------------


def test_start_reports_the_ranks_and_a_second_start_that_they_run(notebook):
    notebook.ok("%distributed stop")
    assert re.fullmatch(
        r"2 ranks are ready: .*gloo, \d+ threads? per rank\n", notebook.ok("%distributed start -n 2").stdout
    )
    notebook.ok("%%distributed\nkept = 1")
    assert "2 ranks are already running" in notebook.ok("%distributed start").stdout
    assert "2 ranks are already running" in notebook.ok("%distributed start -n 2").stdout
    assert "2 ranks are already running" in notebook.ok("%distributed start --device cpu").stdout
    reported = refused(notebook, "%distributed start --device cuda")
    assert "2 ranks are already running on the CPU; stop them first with %distributed stop" in reported
    assert notebook.ok("%%distributed\nprint(kept)").stdout == "[0-1] 1\n"


def test_a_start_on_the_cpu_hides_the_devices_from_the_ranks(notebook):
    notebook.ok("%distributed stop")
    assert notebook.ok("%distributed start -n 2 --device cpu").stdout.startswith("2 ranks are ready: cpu, gloo, ")
    hidden = "import os\nprint(repr(os.environ.get('CUDA_VISIBLE_DEVICES')), device)"
    assert notebook.ok(f"%%distributed\n{hidden}").stdout == "[0-1] '' cpu\n"


def test_start_with_another_number_or_backend_says_what_runs_and_how_to_end_it(notebook):
    for options in ("-n 3", "--backend nccl"):
        reported = refused(notebook, f"%distributed start {options}")
        assert "2 ranks" in reported and "%distributed stop" in reported


def test_numbers_that_make_no_sense_are_one_line(notebook):
    notebook.ok("%distributed stop")
    for number in ("0", "-3", "100000"):
        assert f"invalid number of ranks: {number}; expected 1 to" in refused(
            notebook, f"%distributed start -n {number}"
        )
    notebook.ok("%distributed start -n 2")


def test_one_rank_is_enough(notebook):
    notebook.ok("%distributed stop")
    assert "1 rank" in notebook.ok("%distributed start -n 1").stdout
    outcome = notebook.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(rank, world_size, t.item())")
    assert outcome.stdout == "[0] 0 1 1.0\n"
    notebook.ok("%distributed stop")
    notebook.ok("%distributed start -n 2")


def test_first_cell_starts_the_ranks_with_a_message(notebook):
    notebook.ok("%distributed stop")
    notebook.ok("import os\nos.environ['RANKBOOK_RANKS'] = '2'")
    outcome = notebook.ok("%%distributed\nprint('first')")
    assert outcome.stdout.startswith("2 ranks are ready")
    assert outcome.stdout.endswith("[0-1] first\n")


def test_stop_ends_the_ranks_and_a_second_time_says_that_none_run(notebook):
    pids = set(re.findall(r"\d+", value(notebook, "[each.pid for each in __import__('rankbook').current().status()]")))
    assert notebook.ok("%distributed stop").stdout == "2 ranks stopped\n"
    assert not pids & {str(pid) for pid in notebook.processes()}
    assert notebook.ok("%distributed stop").stdout == "no ranks are running\n"
    assert "no ranks are running" in notebook.ok("%distributed status").stdout
    for command in ("stacks", "interrupt", "restart", "pull x"):
        assert "no ranks are running" in refused(notebook, f"%distributed {command}")
    notebook.ok("%distributed start -n 2")
    assert notebook.run("%%distributed\nkept").ename == "NameError", "new ranks know nothing of the old"


def test_stop_waits_for_a_start_in_the_background(notebook):
    notebook.ok("%distributed stop")
    outcome = notebook.ok(
        "from rankbook.coordinator import default_cluster\n"
        "default_cluster.prestart_ranks()\n"
        "get_ipython().run_line_magic('distributed', 'stop')"
    )
    assert re.fullmatch(r"\d+ ranks? stopped\n", outcome.stdout), outcome.stdout
    notebook.ok("%distributed start -n 2")


def test_status_shows_every_rank_as_text_and_as_a_table(notebook):
    bundle = notebook.ok("%distributed status").displays[-1]
    lines = bundle["text/plain"].splitlines()
    assert lines[0].split() == ["rank", "state", "device", "pid"], "and no column with nothing in it"
    assert [line.split()[:3] for line in lines[1:]] == [["0", "idle", "cpu"], ["1", "idle", "cpu"]]
    assert bundle["text/html"].count("<tr>") == 3


def test_status_shows_what_a_rank_runs(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    started = notebook.ok(f"%%distributed --background --ranks 1\nimport os, time\n{gate.wait}")
    notebook.ok("handle = _")
    lines = notebook.ok("%distributed status").displays[-1]["text/plain"].splitlines()
    assert lines[1].split()[1] == "idle"
    assert lines[2].split()[1] == "running" and f"cell [{started.count}]" in lines[2]
    gate.open()
    notebook.ok("handle.wait()")


# Stacks, interrupt, restart ------------------------------------------------------------------------------------------


def test_stacks_shows_where_every_rank_is(notebook, tmp_path):
    assert notebook.ok("%distributed stacks").stdout == "ranks 0-1: idle\n"
    gate = Gate(tmp_path / "gate")
    started = notebook.ok(
        f"%%distributed --background --ranks 1\nimport os, time\ndef waiting():\n    {gate.wait}\nwaiting()"
    )
    notebook.ok("handle = _")
    stacks = notebook.ok("%distributed stacks").stdout
    assert "rank 0: idle" in stacks
    assert "rank 1: running" in stacks
    assert f"Cell In[{started.count}]:5 in <module>" in stacks
    assert re.search(rf"Cell In\[{started.count}\]:4 in waiting", stacks)
    gate.open()
    notebook.ok("handle.wait()")


def test_interrupt_command_reports_the_interrupted_ranks(notebook):
    notebook.ok("%%distributed --background --ranks 1\nimport time\ntime.sleep(60)")
    notebook.ok("handle = _")
    assert "no cell is running on these ranks" in notebook.ok("%distributed interrupt 0").stdout
    assert notebook.ok("%distributed interrupt").stdout == "interrupted rank 1\n"
    assert notebook.run("handle.wait()").ename == "KeyboardInterrupt"
    assert "no cell is running on these ranks" in notebook.ok("%distributed interrupt").stdout


def test_interrupt_command_names_the_cells_that_it_removes_from_the_queue(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    notebook.ok(f"%%distributed --background --ranks 0\n{gate.wait}")
    queued = notebook.ok("%%distributed --background\n1")
    removed = f"removed cell [{queued.count}] from the queue\n"
    assert notebook.ok("%distributed interrupt 1").stdout == removed
    gate.open()
    notebook.ok("%%distributed\n1")


@pytest.mark.parametrize("command", ["interrupt", "restart"])
def test_ranks_that_are_not_there_are_one_line(notebook, command):
    assert "valid ranks are 0-1" in refused(notebook, f"%distributed {command} 7")


def test_restart_gives_one_rank_a_fresh_process_and_leaves_the_others(notebook):
    notebook.ok("%%distributed\nimport os\nkept = rank + 1\nold = os.getpid()")
    reported = notebook.ok("%distributed restart 1").stdout
    assert "rank 1 restarted" in reported and "all ranks are in one process group" in reported
    assert notebook.ok("%%distributed --ranks 0\nprint(kept, os.getpid() == old)").stdout == "[0] 1 True\n"
    assert notebook.run("%%distributed --ranks 1\nkept").ename == "NameError"
    outcome = notebook.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(rank, t.item())")
    assert outcome.stdout == "[0] 0 2.0\n[1] 1 2.0\n", "they are in one group again"


def test_restart_of_all_is_a_new_beginning(notebook):
    notebook.ok("%%distributed\nkept = 1")
    assert "ranks 0-1 restarted" in notebook.ok("%distributed restart").stdout
    assert notebook.run("%%distributed\nkept").ename == "NameError"
    assert notebook.ok("%%distributed\ndist.barrier()\nprint('together')").stdout == "[0-1] together\n"


def test_restart_ends_what_the_rank_runs(notebook):
    notebook.ok("%%distributed --background --ranks 1\nimport time\ntime.sleep(60)")
    notebook.ok("handle = _")
    notebook.ok("%distributed restart 1", timeout=20)
    failed = notebook.run("handle.wait()")
    assert (failed.status, failed.ename) == ("error", "RankLostError")
    assert "rank 1 was restarted while running cell [" in failed.traceback, "and not that its memory ran out"


# Push and pull -------------------------------------------------------------------------------------------------------


def test_push_and_pull_copy_variables(notebook):
    notebook.ok("numbers = [1, 2]\nword = 'text'")
    assert notebook.ok("%distributed push numbers word").text == "numbers, word: copied to ranks 0-1\n"
    assert notebook.ok("%%distributed\nprint(numbers, word)\nmine = {'rank': rank}").stdout == "[0-1] [1, 2] text\n"
    assert "mine" in notebook.ok("%distributed pull mine").stdout
    assert value(notebook, "mine") == "[{'rank': 0}, {'rank': 1}]"


def test_push_and_pull_take_ranks_and_another_name(notebook):
    notebook.ok("%%distributed\nx = rank\nclass Holder: pass\nholder = Holder()\nholder.deep = rank + 10")
    notebook.ok("y = 5")
    notebook.ok("%distributed push y --ranks 1")
    assert notebook.ok("%%distributed\nprint('y' in globals())").stdout == "[0] False\n[1] True\n"
    notebook.ok("%distributed pull x --ranks 1 --as only")
    assert value(notebook, "only") == "[1]"
    notebook.ok("%distributed pull holder.deep --as deep")
    assert value(notebook, "deep") == "[10, 11]"


def test_a_pull_in_an_assignment_is_its_value(notebook):
    notebook.ok("%%distributed\nloss = rank + 0.5\nclass Holder: pass\nholder = Holder()\nholder.deep = rank + 10")
    notebook.ok("loss = 'of the notebook'")
    assert notebook.ok("losses = %distributed pull loss").text == ""
    assert value(notebook, "losses, loss") == "([0.5, 1.5], 'of the notebook')"
    notebook.ok("for chosen in [1, 0]:\n    last, = %distributed pull holder.deep --ranks {chosen}")
    assert value(notebook, "last") == "10"
    notebook.ok("def both():\n    values = %distributed pull loss --as stored\n    return values")
    assert value(notebook, "both(), stored") == "([0.5, 1.5], [0.5, 1.5])"
    notebook.ok("loss = %distributed pull loss")
    assert value(notebook, "loss") == "[0.5, 1.5]"


@pytest.mark.parametrize("code", ["%time got = %distributed pull unstored", "%%time\ngot = %distributed pull unstored"])
def test_a_pull_in_a_timed_assignment_is_its_value(notebook, code):
    notebook.ok("%%distributed\nunstored = rank")
    notebook.ok("got = None")
    notebook.ok(code)
    assert value(notebook, "got, 'unstored' in globals()") == "([0, 1], False)"


def test_a_pull_in_a_timed_assignment_of_several_names_or_of_a_part_is_its_value(notebook):
    notebook.ok("%%distributed\nunstored = rank")
    notebook.ok("kept = {}")
    notebook.ok("%%time\nfirst, second = %distributed pull unstored\nkept['a'] = %distributed pull unstored")
    assert value(notebook, "first, second, kept, 'unstored' in globals()") == "(0, 1, {'a': [0, 1]}, False)"


def test_a_pull_outside_an_assignment_has_no_value(notebook):
    notebook.ok("%%distributed\nx = rank")
    for code in ("%distributed pull x", "distributed pull x", "if True:\n    %distributed pull x"):
        outcome = notebook.ok(code)
        assert (outcome.displays, outcome.stdout) == ([], "x: a list with the values of ranks 0-1, in this order\n")
    notebook.ok("%time %distributed pull x --as timed")
    notebook.ok("%time %distributed pull x")
    assert value(notebook, "x, timed") == "([0, 1], [0, 1])"


def test_push_of_a_variable_that_the_ranks_have_succeeds_with_a_message(notebook):
    notebook.ok("%%distributed\non_ranks, too = [rank], 5\nif rank: partly = 1")
    notebook.ok("mine = 1")
    assert notebook.ok("%distributed push on_ranks mine too").stdout == (
        "mine: copied to ranks 0-1\non_ranks, too: nothing to copy, are not in the notebook but already on ranks 0-1\n"
    )
    assert notebook.ok("%%distributed\nprint(on_ranks, mine)").stdout == "[0] [0] 1\n[1] [1] 1\n", "as they were"
    reported = "partly: nothing to copy, is not in the notebook but already on rank 1\n"
    assert notebook.ok("%distributed push partly --ranks 1").stdout == reported
    notebook.ok("class Holder: value = 1\nholder = Holder()")
    assert "push the whole variable" in refused(notebook, "%distributed push holder.value")
    reported = refused(notebook, "%distributed push mine partly")
    assert "variable 'partly' is defined neither in the notebook nor on ranks 0-1" in reported


def test_tensors_and_arrays_travel(notebook):
    notebook.ok("import numpy\nhere = numpy.arange(6).reshape(2, 3)")
    notebook.ok("%distributed push here")
    notebook.ok("%%distributed\nsums = torch.from_numpy(here).sum(0) + rank")
    notebook.ok("%distributed pull sums")
    assert value(notebook, "[each.tolist() for each in sums]") == "[[3, 5, 7], [4, 6, 8]]"


def test_names_that_are_not_there_are_one_line_with_near_matches(notebook):
    notebook.ok("learning_rate = 0.1")
    assert "did you mean: learning_rate?" in refused(notebook, "%distributed push learning_rat")
    notebook.ok("%%distributed\nlosses = []")
    reported = refused(notebook, "%distributed pull losse")
    assert "'losse'" in reported and "did you mean: losses" in reported
    assert reported.startswith("UsageError: ranks 0-1: variable 'losse' is not defined")
    reported = refused(notebook, "%distributed pull losses.appendd")
    assert "append" in reported


MODELS = """%%distributed
from torch.distributed.fsdp import fully_shard
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
    def forward(self, x):
        return self.inner(x)
torch.manual_seed(rank)
replicated = torch.nn.parallel.DistributedDataParallel(Net())
replicated(torch.ones(4, 2)).sum().backward()
weight = replicated.module.inner.weight.detach().clone()
sharded = fully_shard(torch.nn.Linear(4, 2))"""


def test_a_replicated_model_arrives_as_the_plain_module_with_its_weights(notebook):
    notebook.ok(MODELS)
    notebook.ok("%distributed pull replicated --as models\n%distributed pull weight")
    reported = value(
        notebook, "[type(model).__name__ for model in models], models[1](models[0].inner.weight[:, :2]).shape"
    )
    assert reported == "(['Net', 'Net'], torch.Size([3, 3]))"
    assert value(notebook, "all((model.inner.weight == weight[0]).all() for model in models)") == "True"


def test_a_sharded_model_names_the_expression_that_copies_its_weights(notebook):
    notebook.ok(MODELS)
    reported = refused(notebook, "%distributed pull sharded --ranks 0")
    assert reported.startswith("UsageError: rank 0: 'sharded' is a model whose weights are divided among the ranks")
    notebook.ok("%%distributed\n" + re.search("with (.*) on all ranks", reported)[1])
    notebook.ok("%distributed pull weights --ranks 0")
    assert value(notebook, "{name: tuple(part.shape) for name, part in weights[0].items()}") == (
        "{'weight': (2, 4), 'bias': (2,)}"
    )


def test_a_pull_needs_a_name_that_a_variable_can_have(notebook):
    notebook.ok("%%distributed\nd = {'a': 1}")
    assert "--as NAME" in refused(notebook, "%distributed pull d.items")


def test_protect_without_an_interval_keeps_the_one_that_there_is(notebook):
    try:
        assert "every 5 steps" in notebook.ok("%distributed protect on --every 5").stdout
        assert "every 5 steps" in notebook.ok("%distributed protect on").stdout
    finally:
        notebook.ok("%distributed protect off")
