"""How a cell went wrong on a rank, in words that stand behind "rank 2"."""

from __future__ import annotations

import pytest

from rankbook.coordinator.cell import Cell
from rankbook.coordinator.exits import describe_failure
from rankbook.messages import Done, ErrorReport


def done(status: str, name: str = "ValueError", line: int | None = 3) -> Done:
    error = ErrorReport(name=name, value="", traceback="", plain="", line=line) if status != "ok" else None
    return Done(cell=9, status=status, seconds=0.1, error=error)  # type: ignore[arg-type]


def numbered(number: int) -> Cell:
    return Cell(9, number, {0: (done("ok"), ())}, cluster_key="", sink=None)


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
def test_words(message, cell, words):
    assert describe_failure(message, cell) == words


def test_an_error_without_a_report_is_still_an_error():
    assert describe_failure(Done(cell=9, status="error", seconds=0.1), None).startswith("raised")
