"""Test what a cell on the ranks can do: everything that a cell in the notebook can."""

from __future__ import annotations

import base64

import pytest

from rankbook.rank.shell import _CHANGES_PACKAGES
from tests.conftest import ASSIGNS_COMMANDS, Gate, needs_assigned_commands, wait_until

pytestmark = pytest.mark.processes

ASSIGNED = "lines = !" if ASSIGNS_COMMANDS else "lines = %sx "
"""How the output of a command is assigned: IPython 7 does not know `lines = !command` on Python 3.12."""
CONTRACT = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"


# Which ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "label"),
    [("0", "[0]"), ("1", "[1]"), ("0,1", "[0-1]"), ("0-1", "[0-1]"), ("0:2:2", "[0]"), ("1:", "[1]")],
)
def test_ranks_option_selects_the_ranks_that_run_the_cell(notebook, selection, label):
    assert notebook.ok(f"%%distributed --ranks {selection}\nprint('me')").stdout == f"{label} me\n"


def test_all_and_main_are_selections_too(notebook):
    assert notebook.ok("%%distributed --ranks all\nprint('me')").stdout == "[0-1] me\n"
    assert notebook.ok("%%distributed --ranks main\nprint('me')").stdout == "[0] me\n"


@pytest.mark.parametrize("selection", ["2", "0-7", "five", "1-0", "0:2:0", "9:"])
def test_ranks_that_are_not_there_are_one_line_that_names_those_that_are(notebook, selection):
    outcome = notebook.run(f"%%distributed --ranks {selection}\nprint('me')")
    assert (outcome.status, outcome.stdout) == ("error", "")
    assert outcome.stderr.count("\n") == 1
    assert "valid ranks are 0-1" in outcome.stderr or "valid forms are 0" in outcome.stderr


def test_an_unknown_option_is_one_line_that_names_the_valid_ones(notebook):
    outcome = notebook.run("%%distributed --rank 1\nprint('me')")
    assert (outcome.status, outcome.stdout) == ("error", "")
    assert outcome.stderr.count("\n") == 1
    for option in ("--ranks", "--background", "--out", "--timeout", "--quiet"):
        assert option in outcome.stderr


@pytest.mark.parametrize("body", ["", "\n", "\n   \n\n"])
def test_an_empty_cell_is_one_line(notebook, body):
    outcome = notebook.run("%%distributed" + body)
    assert outcome.status == "error"
    assert outcome.stderr.count("\n") == 1
    assert "empty" in outcome.stderr


# Options -------------------------------------------------------------------------------------------------------------


def test_out_keeps_the_result_under_its_name(notebook):
    notebook.ok("%%distributed --out kept\nprint('text'); rank * 10")
    reported = notebook.ok("kept.ok, kept.ranks, kept.stdout, [kept.text(r) for r in kept.ranks]").displays[-1]
    assert reported["text/plain"] == "(True, (0, 1), {0: 'text\\n', 1: 'text\\n'}, ['0', '10'])"


def test_out_keeps_the_result_of_a_cell_that_failed_too(notebook):
    assert notebook.run("%%distributed --out failed\nif rank: 1 / 0").status == "error"
    reported = notebook.ok("failed.status, failed[0].status, failed[1].error.name").displays[-1]
    assert reported["text/plain"] == "('error', 'ok', 'ZeroDivisionError')"


def test_out_wants_a_name(notebook):
    outcome = notebook.run("%%distributed --out 1st\nprint('me')")
    assert (outcome.status, outcome.stdout) == ("error", "")
    assert "invalid --out '1st': expected a Python identifier" in outcome.stderr


def test_quiet_option_shows_no_output(notebook):
    outcome = notebook.ok("%%distributed --quiet --out silent\nimport sys\nprint(1); print(2, file=sys.stderr); 3")
    assert outcome.outputs == []
    reported = notebook.ok("silent.stdout[1], silent.stderr[1], silent.text(1)").displays[-1]
    assert reported["text/plain"] == "('1\\n', '2\\n', '3')"


def test_quiet_shows_errors_all_the_same(notebook):
    outcome = notebook.run("%%distributed --quiet\nprint('hidden')\n1 / 0")
    assert (outcome.status, outcome.ename) == ("error", "ZeroDivisionError")
    assert "ranks 0-1: ZeroDivisionError" in outcome.traceback


def test_timeout_interrupts_the_cell_with_a_message(notebook):
    outcome = notebook.run("%%distributed --timeout 0.3\nimport time\ntime.sleep(60)")
    assert (outcome.status, outcome.ename) == ("error", "CellTimeout")
    assert "--timeout 0.3" in outcome.traceback
    assert 0.3 <= outcome.seconds < 10


def test_a_cell_that_is_in_time_is_none_of_the_timeouts_business(notebook):
    assert notebook.ok("%%distributed --timeout 30\nprint('in time')").stdout == "[0-1] in time\n"


# The namespace -------------------------------------------------------------------------------------------------------


def test_predefined_names_exist_on_the_ranks(notebook):
    outcome = notebook.ok(
        "%%distributed\n"
        "assert isinstance(rank, int) and rank == local_rank and world_size == 2\n"
        "assert isinstance(device, torch.device) and torch.__name__ == 'torch'\n"
        "assert dist is torch.distributed\n"
        "rank, device.type"
    )
    assert outcome.displays[0]["text/plain"] == "[0] (0, 'cpu')"
    assert outcome.displays[1]["text/plain"] == "[1] (1, 'cpu')"


def test_the_process_group_is_up(notebook):
    outcome = notebook.ok(
        "%%distributed\nt = torch.ones(2) * (rank + 1)\ndist.all_reduce(t)\nprint(t.tolist(), dist.get_world_size())"
    )
    assert outcome.stdout == "[0-1] [3.0, 3.0] 2\n"


def test_torchs_environment_contract_is_kept(notebook):
    outcome = notebook.ok(
        f"%%distributed\nimport os\nvalues = {{name: os.environ[name] for name in '{CONTRACT}'.split()}}\n"
        "assert (int(values['RANK']), int(values['LOCAL_RANK'])) == (rank, rank)\n"
        "print(values['WORLD_SIZE'], values['LOCAL_WORLD_SIZE'], values['GROUP_RANK'], values['MASTER_ADDR'])\n"
        "print(values['MASTER_PORT'].isdigit())"
    )
    assert outcome.stdout == "[0-1] 2 2 0 127.0.0.1\n[0-1] True\n"


def test_the_hosts_cores_are_shared_out_as_threads(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport os\n"
        "wanted = max(1, len(os.sched_getaffinity(0)) // world_size)\n"
        "print(torch.get_num_threads() == wanted, int(os.environ['OMP_NUM_THREADS']) == wanted)"
    )
    assert outcome.stdout == "[0-1] True True\n"


def test_variables_imports_and_functions_persist(notebook):
    notebook.ok("%%distributed\nimport math\nkept = rank + 1\ndef twice(x):\n    return 2 * x * kept")
    assert notebook.ok("%%distributed\nprint(twice(math.floor(3.5)))").stdout == "[0] 6\n[1] 12\n"


def test_classes_defined_in_a_cell_can_be_pickled(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport pickle\nclass Point:\n    def __init__(self, x): self.x = x\n"
        "print(pickle.loads(pickle.dumps(Point(3))).x)"
    )
    assert outcome.stdout == "[0-1] 3\n"


def test_namespace_of_the_notebook_is_separate(notebook):
    notebook.ok("%%distributed\nonly_there = 1")
    assert notebook.run("only_there").ename == "NameError"


# Rich output ---------------------------------------------------------------------------------------------------------


def test_the_last_expression_is_shown(notebook):
    assert notebook.ok("%%distributed\nx = 20\nx + 1").displays == [{"text/plain": "[0-1] 21"}]


def test_a_semicolon_or_an_assignment_shows_nothing(notebook):
    assert notebook.ok("%%distributed\nx = 20\nx + 1;").outputs == []
    assert notebook.ok("%%distributed\nx + 2;  # not now").outputs == []
    assert notebook.ok("%%distributed\nx = 20").outputs == []


def test_shell_escapes_keep_the_last_expression(notebook):
    outcome = notebook.ok("%%distributed\n!echo it\\'s; true\nx = 'a;'\nx")
    assert outcome.text == "[0-1] it's\n[0-1] 'a;'\n"


def test_a_figure_arrives_as_an_image(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 1\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.show()"
    )
    images = [base64.b64decode(data["image/png"]) for data in outcome.displays if "image/png" in data]
    assert len(images) == 1 and images[0].startswith(b"\x89PNG")
    assert any("[1]" in data["text/plain"] for data in outcome.displays)


def test_a_figure_is_shown_at_the_end_of_its_cell_without_being_asked_for(notebook):
    outcome = notebook.ok("%%distributed --ranks 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert sum("image/png" in data for data in outcome.displays) == 1
    assert notebook.ok("%%distributed --ranks 0\nprint('and is gone')").displays == []


def test_a_data_frame_arrives_as_html(notebook):
    notebook.ok("%%distributed\nimport pandas")  # which may take one rank longer than another
    outcome = notebook.ok("%%distributed\npandas.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
    (table,) = outcome.displays
    assert "<table" in table["text/html"]
    assert "[0-1]" in table["text/html"] and table["text/plain"].startswith("[0-1] ")


def test_a_widget_shows_its_view_and_its_text(notebook):
    outcome = notebook.ok("%%distributed --ranks 0\nimport ipywidgets\nipywidgets.IntSlider(value=3)")
    (display,) = outcome.displays
    assert display.keys() == {"text/plain", "application/vnd.jupyter.widget-view+json"}
    assert "IntSlider(value=3)" in display["text/plain"]


def test_display_shows_in_its_place_between_prints(notebook):
    outcome = notebook.ok("%%distributed --ranks 0\nprint('before'); display({'k': 1}); print('after')")
    assert outcome.text == "[0] before\n[0] {'k': 1}\n[0] after\n"


def test_html_and_svg_pass_as_they_are(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nfrom IPython.display import HTML, SVG\n"
        "display(HTML('<b>bold</b>'))\ndisplay(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>'))"
    )
    assert any("<b>bold</b>" in data.get("text/html", "") for data in outcome.displays)
    assert any("<svg" in data.get("image/svg+xml", "") for data in outcome.displays)


@pytest.mark.parametrize("options", ["", "--view tabs"])
def test_a_display_id_can_be_updated_from_a_later_cell(notebook, options):
    outcome = notebook.ok("%%distributed\nhandle = display(f'one {rank}', display_id=True)")
    ids = {output["data"]["text/plain"]: output["id"] for output in outcome.outputs}
    assert ids.keys() == {"[0] 'one 0'", "[1] 'one 1'"}
    assert len(set(ids.values())) == 2 and None not in ids.values()
    later = notebook.ok(f"%%distributed --ranks 1 {options}\nhandle.update('two')")
    (update,) = [message for message in later.messages if message["msg_type"] == "update_display_data"]
    assert update["content"]["transient"]["display_id"] == ids["[1] 'one 1'"]
    assert update["content"]["data"]["text/plain"] == "[1] 'two'"


def test_a_display_that_is_updated_within_its_cell_ends_in_its_last_state(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nh = display(0, display_id=True)\nfor i in range(1, 200): h.update(i)"
    )
    assert [data["text/plain"] for data in outcome.displays] == ["[0] 199"]


def test_clear_output_clears(notebook):
    outcome = notebook.ok(
        "%%distributed\nfrom IPython.display import clear_output\n"
        "for i in range(5):\n    clear_output(wait=True)\n    print('step', i)"
    )
    assert outcome.cleared
    assert outcome.text == "[0-1] step 4\n"


# IPython -------------------------------------------------------------------------------------------------------------


def test_await_works_at_the_top_of_a_cell(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport asyncio\nasync def soon(x):\n    await asyncio.sleep(0.01)\n    return x\n"
        "values = await asyncio.gather(soon(1), soon(rank))\nprint(values)\nawait soon('shown')"
    )
    assert outcome.stdout == "[0] [1, 0]\n[1] [1, 1]\n"
    assert outcome.displays[-1]["text/plain"].endswith("'shown'")


def test_timeit_and_time_work(notebook):
    outcome = notebook.ok("%%distributed --ranks 0\n%timeit -n 5 -r 2 sum(range(10))\n%time x = 1")
    assert "loops each" in outcome.stdout and "Wall time" in outcome.stdout
    outcome = notebook.ok("%%distributed --ranks 0\n%%time\ny = 2\nprint(y)")
    assert "[0] 2" in outcome.stdout and "Wall time" in outcome.stdout
    assert notebook.ok("%%distributed --ranks 0\nprint(x, y)").stdout == "[0] 1 2\n"


def test_matplotlib_inline_is_accepted(notebook):
    assert notebook.ok("%%distributed\n%matplotlib inline\nprint('fine')").stdout == "[0-1] fine\n"


def test_a_question_mark_shows_help(notebook):
    outcome = notebook.ok("%%distributed --ranks 0\ndef documented():\n    'Says what it does.'\n\n?documented")
    assert outcome.payload[0]["data"]["text/plain"].count("Says what it does.") == 1


def test_a_single_line_may_be_a_magic_without_its_percent_sign(notebook):
    assert "/" in notebook.ok("%%distributed --ranks 0\npwd").displays[0]["text/plain"]
    notebook.ok("%%distributed --ranks 0\npwd = 7")
    assert notebook.ok("%%distributed --ranks 0\npwd").displays == [{"text/plain": "[0] 7"}]
    notebook.ok("%%distributed --ranks 0\ndel pwd")


def test_who_omits_predefined_names(notebook):
    notebook.ok("%distributed restart 1")
    assert "empty" in notebook.ok("%%distributed --ranks 1\n%who").stdout


# ! -------------------------------------------------------------------------------------------------------------------


def test_a_command_keeps_its_place_between_prints(notebook):
    outcome = notebook.ok("%%distributed\nprint('before')\n!echo middle\nprint('after')")
    assert outcome.stdout == "[0-1] before\n[0-1] middle\n[0-1] after\n"


def test_commands_run_in_the_users_shell_as_in_the_notebook(notebook):
    code = f"![[ a == a ]] && echo yes\n{ASSIGNED}[[ a == a ]] && echo too\nprint(lines)"
    notebook.ok("%%distributed\nimport os\nbefore = os.environ.get('SHELL', '')\nos.environ['SHELL'] = '/bin/bash'")
    assert notebook.ok(f"%%distributed --ranks 0\n{code}").stdout == "[0] yes\n[0] ['too']\n"
    notebook.ok("%%distributed\nos.environ['SHELL'] = '/no/such/shell'")
    assert notebook.ok("%%distributed --ranks 0\n!echo of the system").stdout == "[0] of the system\n"
    notebook.ok("%%distributed\nos.environ['SHELL'] = before")


def test_a_failed_command_raises_if_ipython_is_told_so(notebook):
    setting = "%%distributed\n%config InteractiveShell.system_raise_on_error = "
    if "False" in notebook.ok("%%distributed\nprint(get_ipython().has_trait('system_raise_on_error'))").stdout:
        pytest.skip("this IPython does not have the setting")
    notebook.ok(setting + "True")
    try:
        for command in ("!false", "lines = !false"):
            outcome = notebook.run(f"%%distributed\n{command}\nprint('goes on')")
            assert (outcome.status, outcome.stdout) == ("error", "")
            assert "CalledProcessError" in outcome.traceback
    finally:
        notebook.ok(setting + "False")
    assert notebook.ok("%%distributed\n!false\nprint('goes on')").stdout == "[0-1] goes on\n"


def test_a_commands_exit_code_is_kept(notebook):
    assert notebook.ok("%%distributed\n!exit 3\nprint(_exit_code)").stdout == "[0-1] 3\n"
    assert notebook.ok("%%distributed\n!true\nprint(_exit_code)").stdout == "[0-1] 0\n"


def test_a_command_sees_the_cells_variables(notebook):
    assert notebook.ok("%%distributed\nword = f'rank {rank}'\n!echo {word} $word").stdout == (
        "[0] rank 0 rank 0\n[1] rank 1 rank 1\n"
    )


def test_a_command_that_installs_packages_runs_once_and_never_on_two_ranks_at_a_time(notebook, tmp_path):
    pip, runs, gate = tmp_path / "pip", tmp_path / "runs", Gate(tmp_path / "gate")
    pip.write_text(
        f"#!/bin/sh\nmkdir {tmp_path}/busy || echo both >> {runs}\necho $* >> {runs}\n"
        f"case $* in *slow*) touch {tmp_path}/slow; while [ ! -e {gate.path} ]; do sleep 0.02; done;; esac\n"
        f"sleep 0.1\nrmdir {tmp_path}/busy\nexit 3\n"
    )
    pip.chmod(0o700)

    def run(*lines):
        runs.unlink(missing_ok=True)
        shown = notebook.ok("\n".join(["%%distributed", *lines, "print(_exit_code)"])).stdout
        return shown, sorted(runs.read_text().splitlines())

    assert run(f"!{pip} install one") == ("[0-1] 3\n", ["install one"])
    assert run(f"!{pip} install one") == ("[0-1] 3\n", ["install one"]), "of another cell"
    assert run(f"{ASSIGNED}{pip} install three; echo done\nprint(lines)")[1] == ["install three"]
    assert run(f"{ASSIGNED}{pip} install four; echo done\nprint(lines)")[0].startswith("[0-1] ['done']\n[0-1] 0")
    assert (
        run(f"for _ in range(2): get_ipython().system('{pip} --quiet install two')")[1] == ["--quiet install two"] * 2
    )
    assert run(f"!{pip} install of{{rank}}")[1] == ["install of0", "install of1"]
    assert "[1]" in notebook.ok(f"%%distributed --ranks 1\n!{pip} install one\nprint(_exit_code)").stdout
    message = notebook.send(f"%%distributed\n!{pip} install slow")
    wait_until((tmp_path / "slow").exists, timeout=10, what="the command")
    notebook.interrupt()
    outcome = notebook.finish(message, timeout=20)
    assert outcome.ename == "KeyboardInterrupt" and "ranks 0-1" in outcome.traceback
    (tmp_path / "busy").rmdir()
    assert run(f"!{pip} install one") == ("[0-1] 3\n", ["install one"])


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("'/opt/my python' -m pip install -U torch", True),
        ("pip3.11 --quiet uninstall -y x", True),
        ("uv pip install x", True),
        ("cd /tmp && micromamba update x", True),
        ("pip list", False),
        ("pip show install-requires", False),
        ("echo pip; python train.py install", False),
        ("pip-compile install", False),
        ("pytest add", False),
    ],
)
def test_commands_that_change_packages_are_known(command, changes):
    assert (_CHANGES_PACKAGES.search(command) is not None) is changes


def test_a_command_is_shown_while_it_runs(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    message = notebook.send(
        f"%%distributed --ranks 0\n!echo started; while [ ! -e {gate.path} ]; do sleep 0.02; done; echo opened"
    )

    def open_gate(outcome):
        if outcome.stdout == "[0] started\n":
            gate.open()

    outcome = notebook.finish(message, seen=open_gate, timeout=20)
    assert gate.is_open
    assert outcome.stdout == "[0] started\n[0] opened\n"


def test_output_of_a_commands_children_is_shown(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 1\n!sh -c 'echo grandchild; echo its error >&2' | cat; echo backgrounded & wait"
    )
    assert "[1] grandchild\n" in outcome.stdout and "[1] backgrounded\n" in outcome.stdout
    assert outcome.stderr == "[1] its error\n"


@needs_assigned_commands
def test_a_commands_output_can_be_assigned(notebook):
    outcome = notebook.ok("%%distributed\nlines = !printf 'a\\nb\\n'; exit 4\nprint(lines, lines.n, _exit_code)")
    assert outcome.stdout == "[0-1] ['a', 'b'] a\n[0-1] b 4\n"


def test_a_bash_cell_runs_on_the_ranks(notebook):
    assert notebook.ok("%%distributed\n%%bash\necho $RANK").stdout == "[0] 0\n[1] 1\n"
