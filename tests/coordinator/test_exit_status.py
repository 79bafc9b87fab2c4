"""Test the descriptions of how a rank ended."""

from __future__ import annotations

import pytest

from rankbook.coordinator.liveness import describe_crash, describe_failure
from rankbook.coordinator.running_cell import RunningCell
from rankbook.protocol.messages import Done, ErrorReport
from rankbook.transport import serialization


def done(status: str, name: str = "ValueError", line: int | None = 3) -> Done:
    error = ErrorReport(name=name, value="", traceback="", plain="", line=line) if status != "ok" else None
    return Done(cell=9, status=status, seconds=0.1, error=error)  # type: ignore[arg-type]


def numbered(number: int) -> RunningCell:
    return RunningCell(9, number, {0: (done("ok"), ())}, cluster_key="", sink=None)


@pytest.mark.parametrize(
    ("message", "cell", "words"),
    [
        (done("ok"), numbered(5), ""),
        (done("error"), numbered(5), "raised ValueError at cell [5] line 3"),
        (done("error", line=None), numbered(5), "raised ValueError at cell [5]"),
        (done("error"), numbered(0), "raised ValueError at line 3"),
        (done("error", line=None), numbered(0), "raised ValueError"),
        (done("error"), None, "raised ValueError at line 3"),
        (done("interrupted", "KeyboardInterrupt"), numbered(5), "was interrupted at cell [5] line 3"),
    ],
)
def test_describe_failure(message, cell, words):
    assert describe_failure(message, cell) == words


def test_an_error_of_a_call_names_the_cell_of_its_line():
    error = ErrorReport(name="ValueError", value="", traceback="", plain="", line=3, place="line 3 of cell 2")
    failed = Done(cell=9, status="error", seconds=0.1, error=error)
    assert describe_failure(failed, numbered(0)) == "raised ValueError at line 3 of cell 2"
    assert describe_failure(failed, numbered(5)) == "raised ValueError at cell [5] line 3"


@pytest.mark.parametrize(
    ("name", "words"),
    [("RuntimeError", "raised RuntimeError (out of memory)"), ("MemoryError", "raised MemoryError")],
)
def test_memory_that_ran_out_is_reported_as_such(name, words):
    error = ErrorReport(name=name, value="", traceback="", plain="", line=3, memory="memory of cpu: none is left")
    assert describe_failure(Done(cell=9, status="error", seconds=0.1, error=error), None) == f"{words} at line 3"


def test_an_error_without_a_report_is_still_an_error():
    assert describe_failure(Done(cell=9, status="error", seconds=0.1), None).startswith("raised")


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f4cb36936c0 (most recent call first):
  File "control.py", line 324 in _turn

Current thread 0x00007f4cd67efb80 (most recent call first):
  File "ctypes/__init__.py", line 519 in string_at
  File "<ipython-input-4-7403385f>", line 2 in deep
  File "<ipython-input-4-7403385f>", line 3 in <module>
  File "interactiveshell.py", line 3823 in run_code

Extension modules: numpy, torch._C (total: 2)
"""


def test_crash_is_reported_with_the_line_of_the_cell():
    assert describe_crash(CRASH).splitlines() == [
        "Fatal Python error: Segmentation fault, innermost call first:",
        '  File "ctypes/__init__.py", line 519 in string_at',
        '  File "<ipython-input-4-7403385f>", line 2 in deep',
        '  File "<ipython-input-4-7403385f>", line 3 in <module>',
    ]


def test_crash_is_reported_with_the_line_of_a_cell_that_a_debugger_compiled(monkeypatch):
    file = "/tmp/ipykernel_812/3634047808.py"
    reported = describe_crash(CRASH.replace("<ipython-input-4-7403385f>", file))
    assert reported.splitlines()[-1] == f'  File "{file}", line 3 in <module>', "of another notebook"
    monkeypatch.setattr(serialization, "_cell_numbers", {file: 4})
    reported = describe_crash(CRASH.replace("<ipython-input-4-7403385f>", file))
    assert reported.splitlines()[-2:] == ["  Cell In[4], line 2 in deep", "  Cell In[4], line 3 in <module>"]


def test_a_crash_of_another_thread_is_reported_with_all_of_them():
    text = describe_crash(
        CRASH.replace("Current thread", "Thread").replace("Thread 0x00007f4cb36936c0", "Current thread 0x1")
    )
    assert "control.py" in text
    assert "line 3823 in run_code" in text
    assert "Extension" not in text
    assert describe_crash("") == ""
