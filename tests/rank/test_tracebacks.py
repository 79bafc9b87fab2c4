"""Where the main thread is, seen from another one, also where the interpreter knows no line."""

from __future__ import annotations

import sys
import threading
import types

from rankbook.rank import tracebacks

CELL = """
def loop():
    for number in range(3):
        if number == 5:
            told.clear()
"""


def test_a_frame_without_a_line_of_its_own_is_where_the_line_before_it_is(monkeypatch):
    space: dict[str, types.FunctionType] = {}
    exec(compile(CELL, "<cell>", "exec"), space)
    code = space["loop"].__code__
    last = max(start for start, _, _ in code.co_lines())  # where 3.11 has the jump back, which bears no line
    frame = types.SimpleNamespace(f_code=code, f_back=None, f_lineno=None, f_lasti=last)
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.main_thread().ident: frame})
    assert tracebacks.main_thread_line({"<cell>": 5}) in (3, 5)
    [found] = tracebacks.main_thread_frames({"<cell>": 5})
    assert (found.file, found.function) == ("Cell In[5]", "loop")
    assert found.line in (3, 5)
