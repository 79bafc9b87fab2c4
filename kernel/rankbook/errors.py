"""Exceptions that Rankbook raises on purpose, all derived from `RankbookError`.

The class says what is at fault: the request, the ranks, a peer's message, user code or Rankbook itself. A message says
what happened, on which rank, and what the user can do next, in one line where possible. Of the package this module
imports only types, so that every module can import it.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankbook.protocol.messages import ErrorReport


# Who is at fault decides the class:
#
#     the caller             InvalidArgument, UnknownKeyword, NoClusterError, InvalidStateDict
#     user code on a rank    CellError, CellTimeout
#     a rank or its process  StartError, RankLostError, CollectiveAborted, PeerFailedError
#     data                   TransferError, CheckpointError, NumericalError
#     Rankbook itself        ProtocolError, UnreadableMessage, IllegalTransition
class RankbookError(Exception):
    """Base class of the exceptions that Rankbook raises on purpose."""


class InvalidArgument(RankbookError, ValueError):
    """Invalid request: an unknown rank, option or name, or an empty cell."""


class UnknownKeyword(InvalidArgument, TypeError):
    """A keyword argument that a class or function does not have."""


class UnsupportedType(InvalidArgument, TypeError):
    """A value of a type that a function cannot handle."""


class NoClusterError(RankbookError):
    """No ranks are running."""


class StartError(RankbookError):
    """The ranks could not be started."""


class ClusterStopped(RankbookError):
    """The cluster was stopped while a call was still waiting for it."""


class RankLostError(RankbookError):
    """A rank's process has ended or does not exist. `ranks` has the lost ranks."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CellTimeout(RankbookError, TimeoutError):
    """A cell exceeded its timeout."""


class CollectiveAborted(RankbookError, RuntimeError):
    """A collective that could not complete was aborted. The message says what happened to the missing rank.

    Raised on a rank, in the call that waited. The process group is re-formed before the next cell; its Python objects
    stay the same.
    """


class PeerFailedError(RankbookError, RuntimeError):
    """Another rank failed while this one waited for it. `rank` is the failed rank, and its error the cause."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(RankbookError):
    """A peer sent a message that violates the protocol."""


class UnreadableMessage(ProtocolError):
    """A message could not be decoded.

    `sender` is the sender's rank and incarnation, or None if these cannot be read either.
    """

    def __init__(self, message: str, sender: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.sender = sender


class NumericalError(RankbookError, ArithmeticError):
    """A number that is watched turned NaN or infinite, or the gradient norm exceeded its limit: see `watch_numbers`.

    All ranks raise it with the same message, before the optimizer uses the value.
    """


class TransferError(RankbookError):
    """A value could not be sent: it cannot be pickled, or there is not enough memory for it."""


class CheckpointError(RankbookError):
    """A checkpoint cannot be saved or loaded as requested. The message names key, file and ranks."""


class InvalidStateDict(CheckpointError, ValueError):
    """The arguments of a checkpoint function do not fit each other. Megatron-Core raises ValueError here."""


class IllegalTransition(RankbookError):
    """The coordinator's state machine received an event that its state does not allow: a bug in Rankbook."""


class CellError(RankbookError):
    """User code raised an exception on one or more ranks.

    `errors` maps every failed rank to its `ErrorReport`. The raised object is also an instance of the built-in
    exception that the first failed rank raised (`ValueError`, ...), so that `except ValueError` works.
    """

    def __init__(self, message: str, errors: Mapping[int, ErrorReport]) -> None:
        # Not `super()`: the next class in the order may be a built-in exception with arguments of its own.
        Exception.__init__(self, message)
        self.message = message
        self.errors = dict(errors)
        if SyntaxError in type(self).__mro__:
            self.msg = message  # printed by Python in place of str()

    def __str__(self) -> str:
        return self.message


BadRequest = InvalidArgument
NoCluster = NoClusterError
LostRank = RankLostError
PeerFailed = PeerFailedError
CheckpointingException = CheckpointError
"""Earlier names of five exceptions. The last one is also Megatron-Core's."""


def is_consequence(error: ErrorReport | None) -> bool:
    """Return True if the error only reports that another rank's failure ended a wait.

    Such errors are listed after the error of the rank that caused them.
    """
    return error is not None and error.name in (CollectiveAborted.__name__, PeerFailedError.__name__)


def cell_error(message: str, errors: Mapping[int, ErrorReport]) -> CellError:
    """Return a `CellError` that is also an instance of the first failed rank's exception type.

    This applies to built-in exception types and Rankbook's own. Ranks that merely waited for a failed rank come last in
    this order.
    """
    # False sorts before True, so real errors come before consequences, and lower ranks before higher ones.
    first = errors[min(errors, key=lambda rank: (is_consequence(errors[rank]), rank))].name
    return _cell_error_type(first)(message, errors)


@cache
def _cell_error_type(name: str) -> type[CellError]:
    base = globals().get(name) or getattr(builtins, name, None)
    # StopIteration would end a loop silently. Names that are no exceptions, or are classes of a cell, get a plain
    # `CellError`.
    if not (isinstance(base, type) and issubclass(base, Exception)) or issubclass(base, StopIteration):
        return CellError
    try:
        # A class made from both, because a user's `except ValueError` has to catch it, and `except CellError` as well.
        mixed = type(name, (CellError, base), {"__module__": "rankbook.errors", "__doc__": CellError.__doc__})
        mixed("probe", {})
    except TypeError:  # a built-in that requires other arguments, such as UnicodeDecodeError
        return CellError
    return mixed
