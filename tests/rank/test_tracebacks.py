"""Test what error reports show of libraries, and the position of the main thread as another thread sees it."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from IPython.core.ultratb import AutoFormattedTB

from rankbook.protocol.messages import ErrorReport
from rankbook.rank import tracebacks
from tests.conftest import IPYTHON_7

CELL = """
def loop():
    for number in range(3):
        if number == 5:
            told.clear()
"""


def test_frame_without_a_line_is_located_at_the_preceding_line(monkeypatch):
    space: dict[str, types.FunctionType] = {}
    exec(compile(CELL, "<cell>", "exec"), space)
    code = space["loop"].__code__
    last = max(start for start, _, _ in code.co_lines())  # where 3.11 has the jump back, which bears no line
    frame = types.SimpleNamespace(f_code=code, f_back=None, f_lineno=None, f_lasti=last)
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.main_thread().ident: frame})
    assert tracebacks.main_thread_line({"<cell>": 5}) in (3, 5)
    [innermost_frame] = tracebacks.main_thread_frames({"<cell>": 5})
    assert (innermost_frame.file, innermost_frame.function) == ("Cell In[5]", "loop")
    assert innermost_frame.line in (3, 5)


FUNCTION = """
def outer(inner=None):
    return inner() if inner else 1 / 0
"""


def test_innermost_line_of_user_code_names_its_cell_or_file(tmp_path):
    cells = {"<cell 2>": 2, "<cell 5>": 5}
    module = tmp_path / "train.py"
    spaces = [{} for _ in range(3)]
    for name, space in zip(("<cell 2>", "<cell 5>", str(module)), spaces, strict=True):
        exec(compile(FUNCTION, name, "exec"), space)
    two, five, file = (space["outer"] for space in spaces)

    def location(call, number):
        with pytest.raises(ZeroDivisionError) as raised:
            call()
        return tracebacks.brief_report(raised.value, None, cells, number).place

    assert location(lambda: five(two), 5) == "line 3 of cell 2"
    assert location(lambda: two(five), 5) == "line 3"
    assert location(lambda: five(file), 5) == "line 3 of train.py"
    assert five(lambda: two(lambda: tracebacks.main_thread_line(cells, 5))) == 3
    assert two(lambda: tracebacks.main_thread_line(cells, 0)) == "3 of cell 2"


READ_WHILE_GARBAGE_IS_COLLECTED = """
import gc, sys, threading, time
from rankbook.rank import tracebacks
from rankbook.rank.inspect.query_threads import read_locals

class ReleasesTheGil:
    def __init__(self): self.cycle = self
    def __del__(self): time.sleep(0)

def read():
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for _ in range(3): ReleasesTheGil()
        tracebacks.main_thread_line({})
        tracebacks.main_thread_frames({})
        read_locals({"depth"})

def recurse(depth):
    return recurse(depth - 1) + 1 if depth else 0

gc.set_threshold(5)
sys.setswitchinterval(1e-5)
reader = threading.Thread(target=read)
reader.start()
while reader.is_alive():
    recurse(40)
assert gc.isenabled()
print("survived")
"""


@pytest.mark.slow
def test_stack_of_the_main_thread_is_read_while_garbage_is_collected():
    run = subprocess.run(
        [sys.executable, "-c", READ_WHILE_GARBAGE_IS_COLLECTED],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (0, "survived\n"), run.stderr


LIBRARY = """
import functools

def passes(call):
    @functools.wraps(call)
    def wrapper(*args):
        # the outer part
        return call(*args)
    return wrapper

class Outer:
    class Inner:
        @passes
        def method(self, number):
            self.__hidden = (
                number
            ); return nested_in(
                self.__hidden,
            )

        later = 1

def nested_in(number):
    def divide():
        before = 1

        return (
            number / 0
        )
    after = divide()
    return after

    def never(): pass

def by_a_lambda(): return (lambda: nested_in(2))()
def by_an_expression(): return list(
    nested_in(number) for number in range(2))
def in_a_class():
    class Fails:
        value = nested_in(3)
nested_in(ZERO)
"""


def load_library(folder: Path) -> types.ModuleType:
    """Import `LIBRARY`, up to its last line, from a folder that is taken for a library's."""
    file = folder / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    module = types.ModuleType("library")
    with contextlib.suppress(NameError):
        exec(compile(LIBRARY, file, "exec"), vars(module))
    return module


def reports_of(call: Callable[[], object]) -> list[ErrorReport]:
    """Return the report of the error of `call()`, and of one that it has caused: its traceback is not shortened."""
    shell: Any = types.SimpleNamespace(InteractiveTB=AutoFormattedTB(mode="Context"))
    with pytest.raises(ArithmeticError) as raised:
        call()
    with pytest.raises(LookupError) as chained:
        raise LookupError("the consequence") from raised.value
    return [tracebacks.error_report(shell, error, {}) for error in (raised.value, chained.value)]


def parsed_libraries() -> list[str]:
    """Return the files of libraries that IPython's formatter has parsed and keeps."""
    from stack_data.core import Source

    gc.collect()
    sources = [each for each in gc.get_objects() if issubclass(type(each), Source)]
    return [source.filename for source in sources if "site-packages" in source.filename]


@pytest.mark.skipif(IPYTHON_7, reason="its formatter parses no files")
@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("Outer.Inner().method(1)", "in Outer.Inner.method(self, number)"),
        ("nested_in(1)", "in nested_in(number)"),
        ("by_a_lambda()", "in by_a_lambda.<locals>.<lambda>()"),
        ("by_an_expression()", "in by_an_expression.<locals>.<genexpr>(.0)"),
        ("in_a_class()", "in in_a_class.<locals>.Fails()"),
        ("exec(MODULE, {'ZERO': 0})", "nested_in(ZERO)"),
    ],
)
def test_no_syntax_tree_of_a_librarys_file_is_kept(tmp_path, monkeypatch, call, shown):
    from stack_data.core import Source

    library = load_library(tmp_path)
    values = {"MODULE": compile(LIBRARY, library.nested_in.__code__.co_filename, "exec")}

    def run():
        eval(call, vars(library), values)

    before = parsed_libraries()
    reports = reports_of(run)
    assert parsed_libraries() == before
    line = LIBRARY.splitlines().index("            number / 0") + 1
    for report in reports:
        assert f"library.py:{line}, in nested_in.<locals>.divide()" in report.plain
        assert re.search(rf"-> {line} +number / 0\n", report.plain)
    assert shown in reports[1].plain and "direct cause" in reports[1].plain
    if shown in ("in Outer.Inner.method(self, number)", "in nested_in(number)"):
        # Functions look as IPython shows them by itself.
        monkeypatch.delattr(Source, "executing")
        assert [report.traceback for report in reports_of(run)] == [report.traceback for report in reports]


def test_a_librarys_file_that_has_changed_is_shown_all_the_same(tmp_path):
    library = load_library(tmp_path)
    (tmp_path / "site-packages" / "library.py").write_text(LIBRARY.replace("before = 1", "before = ("))
    reports = reports_of(functools.partial(library.nested_in, 1))
    for report in reports:
        assert "library.py" in report.plain and "most recent call last" in report.plain
        assert "ZeroDivisionError: division by zero" in report.plain
