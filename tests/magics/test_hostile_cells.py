"""Test cells that give the rank's own code odd values: at most the cell fails, never the rank."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.processes


PIDS = "%%distributed\nimport os\nprint(os.getpid())"


@pytest.fixture
def ranks(notebook):
    """The kernel, with the check that both ranks are the processes that they were."""
    before = notebook.ok(PIDS).stdout
    yield notebook
    after = notebook.run(PIDS)
    assert after.status == "ok", after.traceback or after.text
    assert sorted(after.stdout.splitlines()) == sorted(before.splitlines())


@pytest.mark.parametrize(
    ("code", "expected_text"),
    [
        ("display('x', display_id=7)", "'x'"),
        ("display({5: 'x', 'text/plain': 'hello'}, raw=True)", "hello"),
        ("display({'text/plain': 'hello'}, raw=True, metadata={5: 1})", "hello"),
        ("display({'text/plain': 'hello', 'application/json': {'n': 2**70, (): 1}}, raw=True)", "cannot display"),
        ("display({'text/plain': 'hello', 'application/json': {'n': 2**70}}, raw=True)", "hello"),
        ("display({'text/plain': 'hello', 'application/json': float('nan')}, raw=True)", "hello"),
        (
            "deep = []\nfor _ in range(940): deep = [deep]\ndisplay({'application/json': deep}, raw=True)",
            "levels of nesting",
        ),
        (
            """import datetime as d, numpy as np, IPython.display
display(IPython.display.JSON({'n': np.int64(3), 'x': np.float32(1), 'on': d.date(2026, 1, 2)}))""",
            "IPython.core.display.JSON object",
        ),
        ("class S(str): pass\ndisplay({S('text/plain'): S('hello')}, raw=True)", "hello"),
        ("from IPython.display import clear_output\nprint('gone')\nclear_output('x')\nprint('stays')", "stays"),
        ("import comm\ncomm.create_comm(target_name=5)\nprint('made')", "made"),
        ("import comm\ncomm.create_comm(target_name='x', data=[1], comm_id=5)\nprint('made')", "made"),
        (
            """import comm, numpy as np
comm.create_comm(target_name='x', data={'n': np.int64(3)}, buffers=[np.zeros((0, 3)), np.ones((2, 3)).T])
print('made')""",
            "made",
        ),
        ("import comm\ncomm.create_comm(target_name='x').publish_msg('odd')", "invalid msg_type='odd'"),
        ("print('\\x1b[' + '9' * 5000 + 'A' + 'up')", "up"),
        ("print('\\x1b[' + '9' * 5000 + 'm' + 'red')", "red"),
        ("print('caf\\udce9')", "caf"),
        ("globals()[5] = 1\nprint('set')", "set"),
    ],
)
def test_an_odd_value_is_converted_or_an_error_of_its_cell(ranks, code, expected_text):
    outcome = ranks.run(f"%%distributed\nfrom IPython.display import display\n{code}")
    assert expected_text in outcome.text + outcome.traceback
    assert "coordinator failed" not in outcome.traceback


def test_a_cell_magic_runs_within_another_one_that_captures_it(ranks):
    ranks.ok("%%distributed\n%%capture out\n%%time\nprint('caught')")
    assert ranks.ok("%%distributed\nprint(out.stdout[:6])").stdout == "[0-1] caught\n"


def test_shell_commands_print_into_a_stream_that_captures(ranks):
    shown = ranks.ok("%%distributed\n%%capture caught\n!echo hidden; echo wrong >&2\nprint('too')")
    assert shown.text == ""
    assert ranks.ok("%%distributed\nprint(caught.stdout.split())").stdout == "[0-1] ['hidden', 'wrong', 'too']\n"
    code = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as text:\n    !echo grün; exit 3"
    shown = ranks.ok(f"%%distributed\n{code}\nprint(text.getvalue().strip(), _exit_code)").stdout
    assert shown == "[0-1] grün 3\n"


def test_exit_is_an_error_of_its_cell_after_a_reset_too(ranks):
    ranks.ok("%%distributed\n%reset -f")
    assert "ranks 0-1: SystemExit" in ranks.run("%%distributed\nexit()").traceback


def test_a_prompt_that_is_no_text_is_asked(ranks):
    code = "%%distributed -r 1\nimport getpass\nprint(len(getpass.getpass(5)))"
    assert "[1] 5" in ranks.run(code, answers=["typed"]).stdout


EXCEPTIONS = {
    "surrogate": ("raise ValueError('caf\\udce9.txt')", "ValueError: caf\\udce9.txt"),
    "class name that is no text": (
        "class M(type):\n    __name__ = 5\nclass E(Exception, metaclass=M): pass\nraise E('x')",
        "E: x",
    ),
    "syntax error with odd fields": ("raise SyntaxError('odd', (5, 'y', 'z', 4))", "SyntaxError: odd"),
    "syntax error without text": ("raise SyntaxError([1])", "SyntaxError: [1]"),
    "words of a str subclass": (
        "class S(str): __str__ = None\nclass E(Exception):\n    def __str__(self): return S('sub')\nraise E",
        "E: sub",
    ),
    "words that exit": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(3)\nraise E",
        "E: <SystemExit while formatting this E>",
    ),
    "words that interrupt": (
        "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E",
        "E: <KeyboardInterrupt while formatting this E>",
    ),
    "interrupt while words are made": (
        "import signal\nclass E(Exception):\n    def __str__(self): signal.raise_signal(2); return 'all'\nraise E",
        "E: all",
    ),
    "traceback that is none": ("class E(Exception):\n    __traceback__ = 5\nraise E('x')", "E: x"),
    "cause that is none": ("class E(Exception):\n    __cause__ = __context__ = 5\nraise E('x')", "E: x"),
    "class that exits": (
        "class E(Exception):\n    @property\n    def __class__(self): raise SystemExit(4)\nraise E('x')",
        "E",
    ),
    "class that is another": ("class E(Exception):\n    __class__ = int\nraise E('x')", "E: x"),
    "truth that exits": (
        "class E(Exception):\n    def __bool__(self, *_): raise SystemExit(5)\n    __eq__ = __bool__\nraise E('x')",
        "E: x",
    ),
    "group of odd ones": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(6)\nraise ExceptionGroup('g', [E()])",
        "ExceptionGroup",
    ),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_unusual_exception_is_reported_and_kills_no_rank(ranks, name):
    code, reported = EXCEPTIONS[name]
    outcome = ranks.run(f"%%distributed -r 1\n{code}")
    assert outcome.status == "error"
    assert f"rank 1: {reported}" in re.sub(r"\x1b\[[\d;]*m", "", outcome.traceback or outcome.text)


@pytest.mark.parametrize(
    "code",
    [
        "class E(Exception):\n    def __str__(self): print('asleep'); time.sleep(600)\nraise E",
        "class F:\n    def flush(self): os.write(1, b'asleep\\n'); time.sleep(600)\nsys.stdout = F()",
    ],
)
def test_user_code_at_the_end_of_a_cell_can_be_interrupted(ranks, code):
    message = ranks.send(f"%%distributed -r 1\nimport os, sys, time\nkept = sys.stdout\n{code}")
    interrupted: list[bool] = []

    def interrupt_once(progress) -> None:
        if "asleep" in progress.text and not interrupted:
            interrupted.append(True)
            ranks.interrupt()

    outcome = ranks.finish(message, timeout=30, seen=interrupt_once)
    ranks.ok("%%distributed -r 1\nsys.stdout = kept")
    assert interrupted
    assert outcome.status == "error"
    assert outcome.seconds < 20


SILENT = """\
import sys
kept = sys.stdout
class Silent:
    def write(self, _): pass
    def flush(self): raise SystemExit(5)
sys.stdout = Silent()
"""
ALARM = """\
import signal, time
def late(*_): raise ValueError('late')
kept = signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.2)
"""


@pytest.mark.parametrize(
    ("patch", "undo"),
    [
        ("import time\nkept = time.perf_counter\ntime.perf_counter = lambda: 'x'", "time.perf_counter = kept"),
        ("import os\nkept = os.getpid\nos.getpid = lambda: 'x'", "os.getpid = kept"),
        ("import time\nkept = time.monotonic\ntime.monotonic = lambda: 'x'", "time.monotonic = kept"),
        ("import builtins\nkept = len\nbuiltins.len = lambda _: 1 / 0", "builtins.len = kept"),
        ("import builtins\nkept = isinstance\nbuiltins.isinstance = None", "builtins.isinstance = kept"),
        ("import sys\nkept = sys.stderr\nsys.stderr = None", "sys.stderr = kept"),
        (SILENT, "sys.stdout = kept"),
        (ALARM, "time.sleep(0.5)\nsignal.signal(signal.SIGALRM, kept)"),
    ],
)
def test_leftovers_of_a_cell_do_not_end_a_rank(ranks, patch, undo):
    ranks.run(f"%%distributed -r 1\n{patch}")
    ranks.run("%%distributed -r 1\nprint('between')\n1 / 0")
    for _ in range(2):  # the first one may be told what was put back
        ranks.run(f"%%distributed -r 1\n{undo}")
    assert "[1] as before" in ranks.ok("%%distributed -r 1\nprint('as before')").stdout


def test_an_error_of_300_megabytes_is_cut_before_it_travels(ranks):
    outcome = ranks.run("%%distributed -r 1\nraise ValueError('begin' + 300_000_000 * 'x' + 'end')", timeout=120)
    assert outcome.status == "error"
    reported = outcome.traceback or outcome.text
    assert len(reported) < 2_000_000
    assert "begin" in reported and "characters left out here" in reported and "xend" in reported


@pytest.mark.parametrize(
    "cut",
    [
        "head",
        *(
            pytest.param(cut, marks=pytest.mark.full)
            for cut in ("b''", "b'abc'", "head + b'\\xc1'", "head + 100_000 * b'\\x91'")
        ),
    ],
)
def test_invalid_frame_of_a_rank_kills_at_most_that_rank(fresh_notebook, cut):
    fresh_notebook.ok("%distributed start -n 2")
    code = "from rankbook.rank import comms\nlink = comms._registry.link\nhead = link._sender\n"
    outcome = fresh_notebook.run(f"%%distributed -r 1\n{code}link._up.send({cut})\nimport time; time.sleep(1)")
    if "head" in cut:
        assert outcome.status == "error"
        assert "rank 1 was killed because it sent a message that cannot be decoded" in outcome.traceback
    assert "[0] here" in fresh_notebook.ok("%%distributed -r 0\nprint('here')").stdout
    fresh_notebook.ok("%distributed heal")
    reported = fresh_notebook.ok("%%distributed\nprint('healed')").stdout
    assert "[0-1] healed" in reported
