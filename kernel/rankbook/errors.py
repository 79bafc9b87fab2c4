"""One tree of errors; the class names the culprit.

Owns: every exception Rankbook raises on purpose. Refuses: imports of anything else of the package but the structs it
carries. A message says what happened, on which rank, and what the person can do next, in one line where it can.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankbook.protocol.messages import ErrorReport


class RankbookError(Exception):
    """Anything Rankbook raises on purpose."""


class BadRequest(RankbookError, ValueError):
    """What was asked for makes no sense here: an unknown rank, option or name, an empty cell."""


class NoCluster(RankbookError):
    """There are no ranks to ask."""


class StartError(RankbookError):
    """The ranks could not be started."""


class ClusterStopped(RankbookError):
    """The ranks were stopped while something still waited for them."""


class LostRank(RankbookError):
    """A rank's process ended, or is not there. `ranks` are the ranks that are gone."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CellTimeout(RankbookError, TimeoutError):
    """A cell did not end in the time it was given."""


class CollectiveAborted(RankbookError, RuntimeError):
    """A collective that could not end any more was broken off: the message says what became of the rank it waited for.

    Raised on a rank, where it waited. The process group is formed anew before the next cell, under the same objects.
    """


class PeerFailed(RankbookError, RuntimeError):
    """Another rank failed where this one had to wait for it. `rank` is that other one, and its error the cause."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(RankbookError):
    """A peer sent what is not in the vocabulary."""


class UnreadableMessage(ProtocolError):
    """A message that cannot be decoded. `sender` is the rank and its incarnation, None where that cannot be read."""

    def __init__(self, message: str, sender: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.sender = sender


class TransferError(RankbookError):
    """A value could not be sent: it cannot be pickled, or there is no room for it."""


class CheckpointingException(RankbookError):
    """A checkpoint cannot be saved or loaded as asked: the message names key, file and ranks."""


class IllegalTransition(RankbookError):
    """The coordinator's state machine was given an event it has no answer to: a bug in Rankbook."""


class CellError(RankbookError):
    """User code raised on one or more ranks.

    `errors` maps each failed rank to its `ErrorReport`. The object that is raised also is an instance of the built-in
    exception that the first failed rank raised (`ValueError`, ...), so that `except ValueError` works.
    """

    def __init__(self, message: str, errors: Mapping[int, ErrorReport]) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.errors = dict(errors)
        if SyntaxError in type(self).__mro__:
            self.msg = message  # what Python prints of one

    def __str__(self) -> str:
        return self.message


def is_consequence(error: ErrorReport | None) -> bool:
    """Whether it only tells that another rank's failure ended a wait: what that rank raised is told before it."""
    return error is not None and error.name in (CollectiveAborted.__name__, PeerFailed.__name__)


def cell_error(message: str, errors: Mapping[int, ErrorReport]) -> CellError:
    """A `CellError` that is also of the first failed rank's exception type, where that is built in or Rankbook's.

    A rank that merely waited for one that failed comes after it.
    """
    first = errors[min(errors, key=lambda rank: (is_consequence(errors[rank]), rank))].name
    return _cell_error_type(first)(message, errors)


@cache
def _cell_error_type(name: str) -> type[CellError]:
    base = globals().get(name) or getattr(builtins, name, None)
    if not (isinstance(base, type) and issubclass(base, Exception)) or issubclass(base, StopIteration):
        return CellError
    try:
        mixed = type(name, (CellError, base), {"__module__": "rankbook.errors", "__doc__": CellError.__doc__})
        mixed("probe", {})
    except TypeError:  # a built-in that insists on arguments of its own
        return CellError
    return mixed
