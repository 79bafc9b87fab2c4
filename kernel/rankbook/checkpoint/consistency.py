"""Run collectives that propagate errors, and check that all ranks were called with the same arguments.

If a rank raised an exception while the others wait in a collective, they would wait forever. Therefore no rank raises
between two collectives. `RankGroup` catches the exception of a rank's work, sends it in place of the result, and raises
after every rank has received it. `check_same_arguments` compares a digest of the arguments with one small all-reduce,
and gathers the arguments themselves only if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from rankbook.checkpoint.planning.validation import said
from rankbook.checkpoint.state_dict.replicas import control_device, gather_objects
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.ranks import group_ranks

T = TypeVar("T")
R = TypeVar("R")


class Failure(NamedTuple):
    """Error of a rank, in the form in which the other ranks receive it.

    It is sent as text, because an exception may not support pickling or unpickling.
    """

    text: str
    expected: bool  # True for CheckpointingException, whose message is shown without the type name

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Convert an exception."""
        expected = isinstance(error, CheckpointingException)
        return cls(str(error) if expected else f"{type(error).__name__}: {error}", expected)


class RanksFailed(Exception):
    """Raised on every rank if at least one rank has failed.

    `failures` maps the failed ranks to their errors; `own` is this rank's exception, if it failed.
    """

    def __init__(self, failures: Mapping[int, Failure], own: BaseException | None) -> None:
        super().__init__(failures)
        self.failures = failures
        self.own = own

    def message(self, operation: str) -> str:
        """Return a message that names all failed ranks with their reasons; it is the same on every rank."""
        ranks = group_ranks((rank, failure.text) for rank, failure in sorted(self.failures.items()))
        if len(ranks) == 1 and all(failure.expected for failure in self.failures.values()):
            return next(iter(ranks))
        unchanged = ", and nothing was changed" if operation == "save" else ""
        reasons = "; ".join(f"{said(which)}: {text}" for text, which in ranks.items())
        return f"the {operation} failed{unchanged}: {reasons}"

    def reraise(self, operation: str) -> NoReturn:
        """Raise `CheckpointingException` with the message, chained to this rank's own exception.

        If this rank was interrupted, raise its KeyboardInterrupt instead.
        """
        message = self.message(operation)
        if isinstance(self.own, KeyboardInterrupt):
            if len(self.failures) > 1:
                self.own.add_note(message)
            raise self.own from None
        raise CheckpointingException(message) from (None if isinstance(self.own, CheckpointingException) else self.own)


class RankGroup:
    """Run work on all ranks of a process group and propagate errors.

    With `alone`, or if torch.distributed is not initialized, the group consists of this process. `group` must contain
    all ranks; None is the default group.
    """

    def __init__(self, group: Any = None, *, alone: bool = False) -> None:  # noqa: ANN401 - a process group
        self._group = group
        self.alone = alone or not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self._size = 1 if self.alone else dist.get_world_size(group)

    def exchange(self, work: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `work` on every rank, pass all results to `combine` on rank 0, and return this rank's reply.

        `combine` gets the results in order of ranks and returns one reply per rank. A collective (gather, then
        scatter). Raises `RanksFailed` on every rank if `work` raised on any rank, or `combine` on rank 0.
        """
        # Rank 0 gets the failures from the gather, all other ranks from the scatter. `combine` runs only if no rank has
        # failed, and its own exception is scattered in the same way.
        result, error = _attempt(work)
        results = self._gather(result if error is None else Failure.of(error))
        replies: list[tuple[dict[int, Failure], Any]] = []
        if self.rank == 0:
            failures = _failures(results)
            if not failures:
                combined, error = _attempt(lambda: combine(results))
                failures = {} if error is None else {0: Failure.of(error)}
                replies = [({}, reply) for reply in combined or ()]
            if failures:
                replies = [(failures, None)] * self._size
        failures, reply = self._scatter(replies)
        if failures:
            raise RanksFailed(failures, error)
        return reply  # type: ignore[no-any-return]

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on every rank.

        A collective. Raises `RanksFailed` on every rank if `work` raised on any rank.
        """
        _, error = _attempt(work)
        results: list[Any] = [None if error is None else Failure.of(error)] * self._size
        if not self.alone:
            dist.all_gather_object(results, results[0], group=self._group)
        if failures := _failures(results):
            raise RanksFailed(failures, error)

    def _gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - anything that pickles
        if self.alone:
            return [value]
        values = [None] * self._size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def _scatter(self, values: list[Any]) -> Any:  # noqa: ANN401 - an element of it
        if self.alone:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values if self.rank == 0 else None, src=0, group=self._group)
        return received[0]


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - raised on all ranks after the exchange
        return None, error


def _failures(results: Sequence[object]) -> dict[int, Failure]:
    return {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}


def check_same_arguments(what: str, check: Callable[[], T], **given: object) -> T:
    """Return the result of `check()`, after all ranks have passed the same `given` arguments.

    `what` names the call in messages. A collective; one small all-reduce if all ranks agree. Raises `BadRequest`, the
    same on every rank, if the check raised it on a rank or if the arguments differ, and `CheckpointingException` for
    any other error of a check.
    """
    error: Exception | None = None
    made: list[T] = []
    try:
        made = [check()]
    except Exception as raised:  # noqa: BLE001 - raised below, on every rank
        error = raised
    arguments = {name: repr(value) for name, value in given.items()}
    complaint = "" if error is None else f"{type(error).__name__}: {error}"
    if not _all_alike(repr((complaint, sorted(arguments.items())))):
        _raise(what, gather_objects((complaint, isinstance(error, BadRequest), arguments)), error)
    if error is not None:  # the same error on every rank
        raise error
    return made[0]


def _all_alike(text: str) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    number = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
    # One reduction gives the minimum of `number` and, negated, its maximum: equal if all ranks have the same digest.
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=control_device())
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
    least, most = bounds.tolist()
    return bool(least == -most)


def _raise(what: str, told: list[tuple[str, bool, Mapping[str, str]]], error: Exception | None) -> None:
    failed = group_ranks((rank, complaint) for rank, (complaint, _, _) in enumerate(told) if complaint)
    if failed:
        reasons = "; ".join(f"{said(ranks)}: {complaint}" for complaint, ranks in failed.items())
        misuse = all(bad for complaint, bad, _ in told if complaint)
        raise (BadRequest if misuse else CheckpointingException)(f"the {what} has not begun: {reasons}") from error
    differing = []
    for name in told[0][2]:
        sides = group_ranks((rank, arguments[name]) for rank, (_, _, arguments) in enumerate(told))
        if len(sides) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {said(ranks)}" for value, ranks in sides.items()))
    raise BadRequest(f"the {what} has not begun, for the ranks do not ask for the same: {'; '.join(differing)}")


def folder_key(folder: Any) -> str:  # noqa: ANN401 - a path or a storage
    """Return the text by which the ranks compare their folders: the path, or the type name of a storage.

    The text of a storage object may differ between processes.
    """
    return str(folder) if isinstance(folder, str) or hasattr(folder, "__fspath__") else type(folder).__qualname__
