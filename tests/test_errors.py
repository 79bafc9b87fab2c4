"""Test the exception classes."""

from __future__ import annotations

import pytest

from rankbook.errors import CellError, InvalidArgument, cell_error
from rankbook.protocol.messages import ErrorReport


def report(name):
    return ErrorReport(name=name, value="v", traceback="t", plain="p")


@pytest.mark.parametrize("kind", [ValueError, ZeroDivisionError, OSError, KeyError, RuntimeError, ImportError])
def test_a_cell_error_is_caught_as_what_the_rank_raised(kind):
    with pytest.raises(kind) as caught:
        raise cell_error("rank 0: it went wrong", {0: report(kind.__name__)})
    assert isinstance(caught.value, CellError)
    assert str(caught.value) == "rank 0: it went wrong"
    assert list(caught.value.errors) == [0]
    assert type(caught.value).__name__ == kind.__name__


@pytest.mark.parametrize("name", ["StopIteration", "KeyboardInterrupt", "NoSuchError", "print"])
def test_exception_types_that_cannot_be_combined_give_a_plain_cell_error(name):
    assert type(cell_error("text", {1: report(name)})) is CellError


def test_rankbooks_own_errors_keep_their_class():
    assert isinstance(cell_error("text", {0: report("InvalidArgument")}), InvalidArgument)


def test_the_first_failed_rank_decides():
    assert isinstance(cell_error("text", {3: report("ValueError"), 1: report("KeyError")}), KeyError)
