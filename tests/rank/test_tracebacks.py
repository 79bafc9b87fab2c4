"""Test the position of the main thread as another thread sees it."""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import pytest

from rankbook.rank import tracebacks

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
