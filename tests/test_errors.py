"""The error tree."""

from __future__ import annotations

import pytest

from rankbook.errors import BadRequest, CellError, cell_error
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
def test_what_cannot_be_mixed_in_is_a_plain_cell_error(name):
    assert type(cell_error("text", {1: report(name)})) is CellError


def test_rankbooks_own_errors_keep_their_class():
    assert isinstance(cell_error("text", {0: report("BadRequest")}), BadRequest)


def test_the_first_failed_rank_decides():
    assert isinstance(cell_error("text", {3: report("ValueError"), 1: report("KeyError")}), KeyError)
