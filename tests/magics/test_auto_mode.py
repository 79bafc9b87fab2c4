"""Test which plain cells run on the ranks in auto mode."""

from __future__ import annotations

import nbformat
import pytest

from rankbook.magics.auto_mode import run_locally, runs_locally
from tests.conftest import ANSI, needs_assigned_commands, shows_frame

pytestmark = pytest.mark.processes

# Which cells, without a kernel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "\n\n",
        "# a comment\n",
        "%distributed status",
        "# see\n%distributed status\n",
        "%load_ext rankbook",
        "%load_ext tensorboard\n%autoreload 2",
        "%config Completer.use_jedi = False",
        "%config",
        "exit",
        "quit()",
        "# leave\nexit",
        "%history",
        "%pip install x",
        "%%distributed --ranks 0\nx",
        "%%local\nx = 1",
        "%%local",
        "%%capture log\n%%distributed --ranks 0\nx",
        "%%time\n%%local\nx = 1",
        "%%",
        "%%writefile notes.txt\nx = 1",
        "%%html\n<b>x</b>",
        "%%javascript\n1",
        "losses = %distributed pull loss",
        "stime = %distributed pull t",
        "# both\n%distributed status\nlosses=%distributed pull loss",
        "first, second = %distributed pull loss",
        "runs['a'].loss = %distributed pull loss",
        "%distributed start --launcher slurm -n 16 \\\n    --timeout 60 \\\n    -- --gpus-per-node=8",
    ],
)
def test_auto_mode_keeps_cells_for_the_notebook(cell):
    assert runs_locally(cell)


@pytest.mark.parametrize(
    "cell",
    [
        "x = 1",
        "# a comment\nx = 1",
        "!ls",
        "%sx ls",
        "!!ls",
        "%%sx\nls",
        "%rerun 3",
        "%load_ext autoreload\n%autoreload 2",
        "%load_ext autoreload",
        "%reload_ext autoreload\n%autoreload 2\n%aimport net",
        "exit_code = 1",
        "exit = 2\nexit",
        "%time x = 1",
        "%timeit f()",
        "%matplotlib inline",
        "%matplotlib inline\nimport matplotlib.pyplot as plt",
        "%matplotlib inline\n%config InlineBackend.figure_format = 'svg'",
        "%autoreload 2\n%set_env MODE=test\n%xdel x",
        "%psource f",
        "%%debug\nf(1)",
        "%%time\nx = 1",
        "%%time\n%%capture\nx = 1",
        "%%time\nx = 1\n%%local\n",
        "%%bash\nls",
        "%%bash\t--out text\nls",
        "%who",
        "x?",
        "await f()",
        "loss = 1\nlosses = %distributed pull loss",
        "loss = '%distributed'",
        "same = loss == '%distributed'",
        "%time f(1, \\\n  2)",
        "# see a\\b\\\nx = 1",
    ],
)
def test_auto_mode_sends_cells_to_the_ranks(cell):
    assert not runs_locally(cell)


def test_local_becomes_a_comment_so_that_line_numbers_stay():
    assert run_locally(["%%local\n", "x = 1\n"]) == ["# %%local\n", "x = 1\n"]
    assert run_locally(["%%local\n", "%%time\n", "x = 1\n"]) == ["%%time\n", "x = 1\n"]
    assert run_locally(["%%local now\n", "x = 1\n"]) == ["%%local now\n", "x = 1\n"]
    assert run_locally(["x = 1\n"]) == ["x = 1\n"]
    assert run_locally([]) == []


# In a notebook -------------------------------------------------------------------------------------------------------


@pytest.fixture
def auto(notebook):
    """The notebook, with auto mode on."""
    notebook.ok("%distributed auto on")
    yield notebook
    notebook.ok("%distributed auto off")


def test_on_and_off_say_so(notebook):
    assert "%%local" in notebook.ok("%distributed auto on").stdout
    assert "in the notebook" in notebook.ok("%distributed auto off").stdout
    assert notebook.ok("print('here')").stdout == "here\n"


def test_plain_cells_run_on_the_ranks(auto):
    outcome = auto.ok("value = rank * 2\nprint('on', rank)\nvalue")
    assert outcome.stdout == "[0] on 0\n[1] on 1\n"
    assert [data["text/plain"] for data in outcome.displays] == ["[0] 0", "[1] 2"]
    assert auto.run("%%local\nvalue").ename == "NameError"


def test_line_numbers_are_the_editors(auto):
    outcome = auto.run("x = 1\n\n1 / 0")
    assert outcome.ename == "ZeroDivisionError"
    assert shows_frame(ANSI.sub("", outcome.traceback), outcome.count, 3)


def test_await_and_commands_and_magics_for_code_run_on_the_ranks(auto):
    outcome = auto.ok("import asyncio\nawait asyncio.sleep(0)\n!echo shell of $RANK\n%time y = 1")
    assert "[0] shell of 0\n" in outcome.stdout and "[1] shell of 1\n" in outcome.stdout
    assert "Wall time" in outcome.stdout
    assert "[0] " in auto.ok("%%timeit -n 1 -r 1\nsum(range(10))").stdout.replace("[0-1] ", "[0] ")
    assert auto.ok("%%bash\necho $RANK").stdout == "[0] 0\n[1] 1\n"


def test_assignments_to_names_of_magics_are_assignments(auto):
    assert auto.ok("cd = 5\ncd").text == auto.ok("cd").text == "[0-1] 5\n", "a variable, and not the magic"
    assert auto.ok("cd = 7").text == "" and auto.ok("cd").text == "[0-1] 7\n"
    auto.ok("where = %pwd")
    assert auto.ok("isinstance(where, str)").text == "[0-1] True\n"
    assert "SyntaxError" in auto.run("x = = 1").traceback
    auto.ok("del cd")


@needs_assigned_commands
def test_the_output_of_a_command_can_be_assigned_in_auto_mode(auto):
    auto.ok("words = !echo one two")
    assert auto.ok("words[0]").text == "[0-1] 'one two'\n"


def test_local_keeps_a_cell_in_the_notebook(auto):
    outcome = auto.ok("%%local\nhere = 1\nprint('rank' in globals())\nhere + 1")
    assert outcome.stdout == "False\n"
    assert outcome.displays == [{"text/plain": "2"}]
    assert auto.ok("%%local\nhere").displays == [{"text/plain": "1"}]
    assert auto.run("here").ename == "NameError", "the ranks do not have it"


def test_local_is_a_plain_cell_in_every_respect(auto):
    assert auto.ok("%%local\nimport asyncio\nawait asyncio.sleep(0)\nprint('awaited')").stdout == "awaited\n"
    failed = auto.run("%%local\nx = 1\n1 / 0")
    assert failed.ename == "ZeroDivisionError"
    assert "line" in failed.traceback and "rankbook" not in failed.traceback
    assert "[0-1]" not in failed.traceback
    outcome = auto.ok("%%local\n%%time\nthere = 5")
    assert "Wall time" in outcome.stdout and "[0" not in outcome.stdout
    assert auto.ok("%%local\nthere").displays == [{"text/plain": "5"}], "also what a cell magic runs in turn"
    auto.ok("%%local\n%%capture caught\nprint('caught here')")
    assert auto.ok("%%local\ncaught.stdout").displays == [{"text/plain": "'caught here\\n'"}]
    auto.ok("%%capture caught\n%%distributed --ranks 1\nprint('of', rank)")
    assert auto.ok("%%local\ncaught.stdout").displays == [{"text/plain": "'[1] of 1\\n'"}]
    assert auto.ok("print(rank)").stdout == "[0] 0\n[1] 1\n", "and the next cell is distributed again"


def test_local_works_without_auto_mode_too(notebook):
    assert notebook.ok("%%local\nprint('here')\n3").text == "here\n3\n"


def test_local_takes_no_options(auto):
    outcome = auto.run("%%local --ranks 0\nprint('here')")
    assert (outcome.status, outcome.stdout) == ("error", "")
    assert outcome.stderr.count("\n") == 1


def test_magics_of_the_notebook_keep_working(auto, tmp_path):
    assert "rank" in auto.ok("%distributed status").text
    auto.ok("%%local\nmine = 3")
    auto.ok("%distributed push mine")
    assert auto.ok("print(mine)").stdout == "[0-1] 3\n"
    auto.ok("theirs = rank")
    auto.ok("%distributed pull theirs")
    assert auto.ok("%%local\ntheirs").displays == [{"text/plain": "[0, 1]"}]
    note = tmp_path / "note.txt"
    auto.ok(f"%%writefile {note}\nwritten once")
    assert note.read_text() == "written once\n"
    assert "[0" not in auto.ok("%lsmagic").text[:20]


def test_distributed_cells_may_still_be_written_out(auto):
    assert auto.ok("%%distributed --ranks 1\nprint('only')").stdout == "[1] only\n"


def test_comments_and_empty_cells_run_nothing(auto):
    assert auto.ok("# only a comment").outputs == []
    assert auto.ok("").outputs == []


def test_failed_cell_does_not_turn_auto_mode_off(auto):
    assert auto.run("1 / 0").ename == "ZeroDivisionError"
    assert auto.run("%%local\n1 / 0").ename == "ZeroDivisionError"
    assert auto.run("1 +").ename == "SyntaxError"
    assert auto.ok("print('still on', rank)").stdout == "[0] still on 0\n[1] still on 1\n"


def test_a_callback_that_fails_does_not_turn_auto_mode_off(auto):
    auto.ok(
        "%%local\nfrom ipykernel.comm import Comm\n"
        "def fail(message):\n    called.append(message)\n    raise ValueError\n"
        "called, end = [], Comm(target_name='nobody', comm_id='end')\nend.on_msg(fail)"
    )
    content = {"comm_id": "end", "data": {}}
    auto.client.shell_channel.send(auto.client.session.msg("comm_msg", content))
    assert auto.ok("print('still on', rank)").stdout == "[0] still on 0\n[1] still on 1\n"
    assert auto.ok("%%local\nprint(len(called))").stdout == "1\n"


def test_a_notebook_that_local_runs_stays_in_the_notebook_also_after_an_empty_cell(auto, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in ("a = 1", " ", "b = 2")])
    nbformat.write(notebook, tmp_path / "other.ipynb")
    auto.ok(f"%%local\n%run {tmp_path / 'other.ipynb'}")
    assert auto.ok("%%local\nprint(a, b)").stdout == "1 2\n"
    assert auto.run("b").ename == "NameError", "it is no variable of the ranks"


def test_twice_on_is_on_once(auto):
    auto.ok("%distributed auto on")
    assert auto.ok("print('once')").stdout == "[0-1] once\n"
    auto.ok("%distributed auto off")
    assert auto.ok("print('off')").stdout == "off\n"


def test_the_first_plain_cell_starts_the_ranks(notebook):
    notebook.ok("%distributed stop")
    notebook.ok("import os\nos.environ['RANKBOOK_RANKS'] = '2'")
    notebook.ok("%distributed auto on")
    outcome = notebook.ok("print('started for', world_size)")
    assert "2 ranks are ready" in outcome.stdout
    assert outcome.stdout.endswith("[0-1] started for 2\n")
    notebook.ok("%distributed auto off")


def test_unloading_the_extension_leaves_plain_cells(fresh_notebook):
    fresh_notebook.ok("%distributed auto on")
    fresh_notebook.ok("%unload_ext rankbook")
    assert fresh_notebook.ok("print('plain')").stdout == "plain\n"
    assert "not found" in fresh_notebook.run("%%local\nx = 1").stderr
    assert "not found" in fresh_notebook.run("%distributed status").stderr
    fresh_notebook.ok("%load_ext rankbook")
    assert "no ranks" in fresh_notebook.ok("%distributed status").stdout


def test_a_question_below_code_shows_one_answer_in_the_pager(auto):
    outcome = auto.ok("def documented():\n    'Say so.'\n\n'no value'\ndocumented?")
    assert outcome.text == "" and len(outcome.payload) == 1
    assert outcome.payload[0]["data"]["text/plain"].count("Say so.") == 1
    assert auto.ok("y = 1\nno_such_name?").stdout == "Object `no_such_name` not found.\n"
    assert auto.run("1 / 0\ndocumented?").payload == []


def test_pip_reports_that_other_ranks_are_needed_if_there_are_some(auto):
    for cell in ("%pip --version", "%%distributed\n%pip --version"):
        outcome = auto.ok(cell)
        assert "Note: the ranks use updated packages after %distributed stop" in outcome.stdout
        assert "Traceback" not in outcome.text
    auto.ok("%distributed stop")
    assert "Note: the ranks" not in auto.ok("%pip --version").stdout
    auto.ok("%distributed start -n 2")
