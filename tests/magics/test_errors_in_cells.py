"""Test what a user sees when a cell fails on the ranks, and that nothing is left of the cell."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ANSI, IPYTHON_7, Gate, shows_frame

pytestmark = pytest.mark.processes


def failed(notebook, code: str, **options):
    """The outcome of a cell that must fail, and its traceback without colours."""
    outcome = notebook.run(code, **options)
    assert outcome.status == "error", outcome.text
    return outcome, ANSI.sub("", outcome.traceback)


def pids(notebook) -> str:
    """The ranks' process ids."""
    return notebook.ok("[each.pid for each in __import__('rankbook').current().status()]").displays[-1]["text/plain"]


# Grouping ------------------------------------------------------------------------------------------------------------


def test_an_error_of_all_ranks_is_reported_once(notebook):
    outcome, text = failed(notebook, "%%distributed\nraise ValueError('of all')")
    assert outcome.ename == "ValueError"
    assert text.splitlines()[0] == "ranks 0-1: ValueError: of all"
    assert text.count("Traceback") == 1
    assert text.count("raise ValueError('of all')") == 1


def test_errors_that_differ_are_reported_rank_by_rank(notebook):
    outcome, text = failed(notebook, "%%distributed\n{}['zero'] if rank == 0 else int('one')")
    assert outcome.ename == "KeyError", "the first rank's"
    assert "rank 0: KeyError: 'zero'" in text
    assert "rank 1: ValueError: invalid literal" in text
    assert text.count("Traceback") == 2


def test_errors_that_differ_in_addresses_only_are_one(notebook):
    _, text = failed(notebook, "%%distributed\nif rank: spare = [object() for _ in range(1000)]\nfloat(object)")
    assert text.splitlines()[0].startswith("ranks 0-1: TypeError")
    _, text = failed(notebook, "%%distributed\nclass Thing: pass\nraise ValueError(f'{object()} {rank * 0}')")
    assert text.splitlines()[0].startswith("ranks 0-1: ValueError: <object object at 0x")


def test_a_rank_that_was_fine_is_named(notebook):
    _, text = failed(notebook, "%%distributed\nif rank == 1: raise RuntimeError('only here')")
    assert text.splitlines()[0] == "rank 1: RuntimeError: only here"
    assert text.splitlines()[-1] == "rank 0 finished without an error"


def test_a_function_brings_the_cell_that_it_was_defined_in(notebook):
    notebook.ok("def halve(x):\n    return twice(x) // 0")
    number = notebook.ok("twice = lambda x: 2 * x\nrun = lambda: halve(1)").count
    notebook.ok("%distributed push run")
    _, text = failed(notebook, "%%distributed\nrun()")
    assert shows_frame(text, number, 2) and "run = lambda: halve(1)" in text
    assert shows_frame(text, number - 1, 2) and "return twice(x) // 0" in text


def test_the_line_that_is_reported_is_one_of_the_cell_that_is_reported(notebook):
    notebook.ok("%%distributed\n\n\n\ndef fails():\n    raise ValueError")
    outcome, text = failed(notebook, "%%distributed\nif rank == 0:\n    fails()\ndist.barrier()")
    assert f"rank 0 raised ValueError at cell [{outcome.count}] line 3 while this rank waited" in text


def test_the_same_error_from_different_lines_is_two_errors(notebook):
    _, text = failed(notebook, "%%distributed\nif rank == 0:\n    1 / 0\nelse:\n    1 / 0")
    assert "rank 0: ZeroDivisionError" in text and "rank 1: ZeroDivisionError" in text


def test_a_name_that_only_the_notebook_has_is_reported_with_the_way_to_the_ranks(notebook):
    notebook.ok("alone, too = [1], 2")
    _, text = failed(notebook, "%%distributed\nalone if rank else too")
    reported = "alone, too are variables of the notebook: %distributed push alone too copies them to the ranks"
    assert text.splitlines()[-1] == reported
    assert "of the notebook" not in failed(notebook, "%%distributed\nnobodys")[1]
    notebook.ok("%distributed push alone too")
    assert notebook.ok("%%distributed\nalone, too").text == "[0-1] ([1], 2)\n"


def test_output_before_the_error_is_shown(notebook):
    outcome, _ = failed(notebook, "%%distributed\nprint('before', end='')\n1 / 0")
    assert outcome.stdout == "[0-1] before\n"


def test_run_all_stops(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    first = notebook.send(f"%%distributed\n{gate.wait}\n1 / 0")
    second = notebook.send("print('not reached')")
    notebook.wait_for_arrival()
    gate.open()
    assert notebook.finish(first).status == "error"
    following = notebook.finish(second)
    assert (following.status, following.text) == ("aborted", "")


# Tracebacks ----------------------------------------------------------------------------------------------------------


def test_a_traceback_has_the_cells_number_its_lines_and_the_editors_line_numbers(notebook):
    outcome, text = failed(
        notebook,
        "%%distributed\n"  # line 1
        "def inner(x):\n"
        "    y = x + 1\n"
        "    return y / 0\n"
        "\n"
        "inner(3)  # from here",
    )
    assert shows_frame(text, outcome.count, 6)
    assert shows_frame(text, outcome.count, 4, "inner(x)")
    assert re.search(r"-+> 4 +return y / 0", text)
    assert re.search(r"-+> 6 +inner\(3\)  # from here", text)
    assert re.search(r"\b3 +y = x \+ 1", text), "the lines around it"


def test_first_line_of_the_cell_is_the_magic(notebook):
    outcome, text = failed(notebook, "%%distributed --ranks 0\n1 / 0")
    assert "1 # %%distributed --ranks 0" in text
    assert shows_frame(text, outcome.count, 2)


def test_blank_lines_at_the_top_count(notebook):
    outcome, text = failed(notebook, "%%distributed\n\n\n1 / 0")
    assert shows_frame(text, outcome.count, 4)


def test_a_function_of_an_earlier_cell_names_that_cell(notebook):
    earlier = notebook.ok("%%distributed\ndef divide(a, b):\n    return a / b")
    outcome, text = failed(notebook, "%%distributed\ndivide(1, 0)")
    assert shows_frame(text, outcome.count, 2)
    assert shows_frame(text, earlier.count, 3, "divide(a, b)")
    assert "return a / b" in text


def test_library_frames_are_left_out_and_counted(notebook):
    _, text = failed(
        notebook,
        "%%distributed\nimport json\nclass Bad:\n    def __iter__(self): raise OSError('in mine')\n"
        "json.dumps({1: sorted(Bad(), key=str)}, default=list)\njson.loads('{')",
    )
    assert "OSError: in mine" in text
    _, text = failed(notebook, "%%distributed\nimport torch\ntorch.nn.Linear(2, 2)(torch.ones(3))")
    assert "torch.nn.Linear(2, 2)" in text
    assert re.search(r"\(\d+ frames of libraries are left out\)", text)
    assert text.count("site-packages") <= 1, "only where it was raised"
    assert "/rankbook/" not in text and "/IPython/" not in text


def test_frames_of_the_users_own_modules_are_shown(notebook, tmp_path):
    (tmp_path / "users_module.py").write_text("def broken():\n    return undefined_name\n")
    _, text = failed(
        notebook,
        f"%%distributed\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport users_module\nusers_module.broken()",
    )
    assert (
        "users_module.py in broken()" if IPYTHON_7 else "users_module.py:2"
    ) in text and "return undefined_name" in text
    notebook.ok("%%distributed\nsys.path.pop(0);")


def test_a_chain_of_exceptions_is_reported(notebook):
    _, text = failed(
        notebook,
        "%%distributed\ntry:\n    {}['a']\nexcept KeyError as error:\n    raise RuntimeError('wrapped') from error",
    )
    assert "KeyError: 'a'" in text and "direct cause" in text and "RuntimeError: wrapped" in text


def test_endless_recursion_is_a_short_error(notebook):
    outcome, text = failed(notebook, "%%distributed\ndef deep(): return deep()\ndeep()")
    assert outcome.ename == "RecursionError"
    assert len(text.splitlines()) < 120
    assert re.search(r"\(\d+ of your frames are left out\)", text)


def test_the_members_of_an_exception_group_are_shown_and_keep_ranks_apart(notebook):
    code = (
        "%%distributed\nimport asyncio\nasync def work():\n    raise ValueError(f'of rank {rank}')\n"
        "async with asyncio.TaskGroup() as group:\n    group.create_task(work())"
    )
    outcome, text = failed(notebook, code)
    assert "rank 0: ExceptionGroup: unhandled errors" in text and "rank 1: ExceptionGroup: unhandled errors" in text
    assert "ValueError: of rank 0" in text and "ValueError: of rank 1" in text
    assert f"Cell In[{outcome.count}], line 4, in work" in text
    code = (
        "try:\n    raise ExceptionGroup('several', [KeyError('a')])\nexcept* KeyError as e:\n    raise OSError from e"
    )
    _, text = failed(notebook, f"%%distributed\n{code}")
    assert "ranks 0-1: OSError" in text and "KeyError: 'a'" in text and "direct cause" in text


def test_a_syntax_error_of_code_that_a_cell_runs_shows_the_lines_of_the_cell(notebook):
    code = "import ast\ndef parse(text):\n    return ast.literal_eval(text)\nvalues = [parse('1'), parse('2 +')]"
    outcome, text = failed(notebook, f"%%distributed\n{code}")
    cell = f"Cell In[{outcome.count}]"
    lines = [line.strip() for line in text.splitlines() if cell in line]
    assert [re.sub(r"\D*(\d+)\D*$", r" \1", line.replace(cell, "")) for line in lines] == [" 5", " 4"]
    assert (
        "values = [parse('1'), parse('2 +')]" in text
        and text.splitlines()[0] == "ranks 0-1: SyntaxError: invalid syntax"
    )


@pytest.mark.parametrize(
    ("code", "line"),
    [("1 +", "1 +"), ("def f(:\n    pass", "def f(:"), ("if True:\nx = 1", "x = 1"), ("print('open", "print('open")],
)
def test_a_syntax_error_shows_the_line_and_none_of_our_own(notebook, code, line):
    outcome, text = failed(notebook, f"%%distributed\n{code}")
    assert outcome.ename in ("SyntaxError", "IndentationError")
    assert re.match(r"ranks 0-1: (Syntax|Indentation)Error: [\w ,'()-]+$", text.splitlines()[0])
    assert (f'File "Cell In[{outcome.count}]", line' if IPYTHON_7 else f"Cell In[{outcome.count}], line") in text
    assert line in text
    assert "magic.py" not in text and "rankbook" not in text and "frames of libraries" not in text


def test_a_cell_that_is_indented_as_a_whole_runs_and_its_error_names_the_line(notebook):
    assert notebook.ok("%%distributed --ranks 0\n\n    x = 1\n    print(x)").stdout == "[0] 1\n"
    outcome, text = failed(notebook, "%%distributed\n    x = 1\n    x / 0")
    assert outcome.ename == "ZeroDivisionError"
    assert shows_frame(text, outcome.count, 3)


def test_an_error_in_await_names_its_line(notebook):
    outcome, text = failed(
        notebook,
        "%%distributed\nimport asyncio\nasync def bad():\n    await asyncio.sleep(0)\n"
        "    raise LookupError('async')\nawait bad()",
    )
    assert outcome.ename == "LookupError"
    assert shows_frame(text, outcome.count, 5, "bad()")


def test_a_magic_that_does_not_exist_is_one_line(notebook):
    _, text = failed(notebook, "%%distributed\n%nosuchmagic")
    assert text.splitlines() == ["ranks 0-1: UsageError: Line magic function `%nosuchmagic` not found."]


def test_an_error_in_a_script_that_was_run_is_an_error_of_the_cell(notebook, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('started')\nraise KeyError('in the script')\n")
    outcome, text = failed(notebook, f"%%distributed\n%run {script}")
    assert outcome.stdout == "[0-1] started\n"
    assert "KeyError: 'in the script'" in text and ("script.py in <module>" if IPYTHON_7 else "script.py:2") in text


def test_an_error_in_a_thread_is_shown(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport threading\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join()"
    )
    assert "Exception in thread worker" in outcome.stderr and "ZeroDivisionError" in outcome.stderr


def test_a_type_of_the_users_own_is_reported_by_its_name(notebook):
    outcome, text = failed(notebook, "%%distributed\nclass Mine(Exception): pass\nraise Mine('own')")
    assert outcome.ename == "CellError"
    assert text.splitlines()[0] == "ranks 0-1: Mine: own"


def test_an_error_can_be_debugged_afterwards(notebook):
    failed(notebook, "%%distributed\ndef inner(secret):\n    raise ValueError('stop')\ninner(rank + 41)")
    outcome = notebook.run("%%distributed\n%debug", answers=lambda prompt: "p secret" if next(turns[prompt]) else "q")
    assert sorted(re.findall(r"\[(\d)\] (\d+)$", ANSI.sub("", outcome.stdout), re.MULTILINE)) == [
        ("0", "41"),
        ("1", "42"),
    ]


turns = {f"[{rank}] ipdb> ": iter([True, False]) for rank in (0, 1)}


# What it costs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("exit()", "SystemExit"),
        ("quit(1)", "SystemExit: 1"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("class Odd(BaseException): pass\nraise Odd('base')", "Odd: base"),
        ("raise StopIteration", "StopIteration"),
        ("raise ExceptionGroup('several', [ValueError(1), KeyError(2)])", "ExceptionGroup: several"),
    ],
)
def test_no_exception_ends_a_rank(notebook, code, reported):
    before = pids(notebook)
    notebook.ok("%%distributed\nkept = rank")
    outcome, text = failed(notebook, f"%%distributed\n{code}")
    assert f"ranks 0-1: {reported}" in text.splitlines()[0]
    assert "To exit" not in outcome.stderr
    assert pids(notebook) == before
    assert notebook.ok("%%distributed\nprint(kept)").stdout == "[0] 0\n[1] 1\n"


def test_an_object_that_cannot_be_shown_is_an_error_of_its_cell_only(notebook):
    outcome, text = failed(
        notebook,
        "%%distributed\nclass Shy:\n    def __repr__(self): raise RuntimeError('will not be shown')\n"
        "display(Shy())\nprint('the cell goes on')",
    )
    assert outcome.stdout == "[0-1] the cell goes on\n"
    assert "ranks 0-1: RuntimeError: will not be shown" in text
    assert "def __repr__(self): raise" in text
    failed(notebook, "%%distributed\nShy()")
    assert notebook.ok("%%distributed\ntype(Shy()).__name__").displays[0]["text/plain"] == "[0-1] 'Shy'"


def test_error_whose_str_fails_is_reported(notebook):
    _, text = failed(
        notebook,
        "%%distributed\nclass Mute(Exception):\n    def __str__(self): raise ValueError('no words')\nraise Mute",
    )
    assert "Mute" in text.splitlines()[0]


def test_a_value_that_a_cell_has_shown_is_not_kept_through_the_next_one(notebook):
    notebook.ok(
        "%%distributed --ranks 0\nimport gc, weakref, torch\nshown = torch.ones(3)\n"
        "reference = weakref.ref(shown)\nshown"
    )
    assert notebook.ok("%%distributed --ranks 0\ndel shown\nprint(reference())").stdout == "[0] None\n"


def test_the_traceback_of_no_error_is_no_error(fresh_notebook):
    outcome = fresh_notebook.ok("%%distributed --ranks 0\n%tb")
    assert "[0] No traceback available to show." in outcome.stderr.splitlines()


def test_a_mime_bundle_that_is_no_data_is_an_error_of_its_cell(notebook):
    _, text = failed(
        notebook,
        "%%distributed\nclass Odd:\n    def _repr_mimebundle_(self, **_):\n"
        "        return {'text/plain': 'x', 'application/json': {1, 2}}\nOdd()",
    )
    assert "TransferError" in text and "application/json" in text


def test_unpicklable_value_fails_only_its_pull(notebook):
    notebook.ok("%%distributed\nimport threading\nlock = threading.Lock()\nfine = rank")
    outcome, text = failed(notebook, "%distributed pull lock")
    assert "pickle" in (text + outcome.stderr)
    assert "lock" in (text + outcome.stderr)
    notebook.ok("%distributed pull fine")
    assert notebook.ok("fine").displays[-1]["text/plain"] == "[0, 1]"


def test_unpicklable_value_fails_only_its_push(notebook):
    notebook.ok("import threading\nhere = threading.Lock()\nnumber = 5")
    failed(notebook, "%distributed push here")
    notebook.ok("%distributed push number")
    assert notebook.ok("%%distributed\nprint(number)").stdout == "[0-1] 5\n"


def test_a_child_that_user_code_forked_does_not_become_a_second_rank(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport os, time\npid = os.fork()\nif pid:\n    _, status = os.waitpid(pid, 0)\n"
        "    print('ended', os.waitstatus_to_exitcode(status))"
    )
    assert outcome.stdout == "[0-1] ended 1\n"


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('gone')", 1, "gone"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_forked_child_ends_as_a_process_of_python_does_and_shows_its_error(notebook, end, code, error):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport os, sys, warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')  # of Python 3.12: the process has several threads\n"
        f"    pid = os.fork()\nif not pid:\n    {end}\n"
        "print('ended', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert outcome.stdout == f"[0] ended {code}\n"
    assert error in outcome.stderr and bool(error) == bool(outcome.stderr)


def test_tasks_that_stop_with_their_cell_are_named_and_go_on_in_the_next_one_that_awaits(notebook):
    start = "event = asyncio.Event()\nwaiting = asyncio.create_task(event.wait())\nawait asyncio.sleep(0)"
    outcome = notebook.ok(f"%%distributed\nimport asyncio\n{start}")
    assert "rankbook: 1 asyncio task paused: on a rank, tasks run only while a cell awaits" in outcome.stderr
    outcome = notebook.ok("%%distributed\nevent.set()\nprint(await waiting)")
    assert outcome.stdout == "[0-1] True\n" and not outcome.stderr
