"""Run collectives that propagate errors, and check that all ranks were called with the same arguments.

If a rank raised an exception while the others wait in a collective, they would wait forever. Therefore no rank raises
between two collectives. `RankGroup` catches the exception of a rank's work, sends it in place of the result, and raises
after every rank has received it. `check_same_arguments` compares a digest of the arguments with one small all-reduce,
and gathers the arguments themselves only if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from rankbook.control_collectives import all_ranks_equal, gather_objects
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.ranks import abbreviate_ranks, group_ranks

T = TypeVar("T")
R = TypeVar("R")


class Failure(NamedTuple):
    """Error of a rank, in the form in which the other ranks receive it.

    It is sent as text, because an exception may not support pickling or unpickling.
    """

    text: str
    expected: bool  # True for CheckpointError, whose message is shown without the type name

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Convert an exception."""
        # An interrupt becomes a Failure as well. Its own rank raises it again in `reraise`.
        expected = isinstance(error, CheckpointError)
        return cls(str(error) if expected else f"{type(error).__name__}: {error}", expected)


class RanksFailed(Exception):
    """Raised on every rank if at least one rank has failed.

    `failures` maps the failed ranks to their errors; `local_error` is this rank's exception, if it failed.
    """

    def __init__(self, failures: Mapping[int, Failure], local_error: BaseException | None) -> None:
        super().__init__(failures)
        self.failures = failures
        self.local_error = local_error

    def message(self, operation: str) -> str:
        """Return a message that names all failed ranks with their reasons; it is the same on every rank."""
        ranks = group_ranks((rank, failure.text) for rank, failure in sorted(self.failures.items()))
        # All failed ranks say the same, and it is written for the user.
        if len(ranks) == 1 and all(failure.expected for failure in self.failures.values()):
            return next(iter(ranks))
        unchanged = " (existing checkpoints are unchanged)" if operation == "save" else ""
        reasons = "; ".join(f"{abbreviate_ranks(which)}: {text}" for text, which in ranks.items())
        return f"the {operation} failed{unchanged}: {reasons}"

    def reraise(self, operation: str) -> NoReturn:
        """Raise `CheckpointError` with the message, chained to this rank's own exception.

        If this rank was interrupted, raise its KeyboardInterrupt instead.
        """
        message = self.message(operation)
        # The user has interrupted this rank's cell. A CheckpointError instead would look like a failure of the save.
        if isinstance(self.local_error, KeyboardInterrupt):
            if len(self.failures) > 1:
                self.local_error.add_note(message)
            raise self.local_error from None
        raise CheckpointError(message) from (
            None if isinstance(self.local_error, CheckpointError) else self.local_error
        )


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
        # Also catches KeyboardInterrupt: an interrupt must not keep this rank from the collective.
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
                # Every rank gets all failures, so that all ranks raise the same message.
                replies = [(failures, None)] * self._size
        # Example of two ranks, of which rank 1 fails in `work`:
        #
        #     gather      rank 0 receives [result 0, Failure("OSError: disk full")]
        #     combine     is not called
        #     scatter     both ranks receive ({1: Failure(...)}, None)
        #     raise       both ranks raise RanksFailed with the same message; that of rank 1 has its OSError as cause
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
            # Nobody combines anything here, so one collective does what `exchange` needs two for.
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


def check_same_arguments(what: str, check: Callable[[], T], **values: object) -> T:
    """Return the result of `check()`, after all ranks have passed the same `values`.

    `what` names the call in messages. A collective; one small all-reduce if all ranks agree. Raises `InvalidArgument`,
    the same on every rank, if the check raised it on a rank or if the arguments differ, and `CheckpointError` for any
    other error of a check.
    """
    error: Exception | None = None
    results: list[T] = []
    try:
        results = [check()]
    except Exception as raised:  # noqa: BLE001 - raised below, on every rank
        error = raised
    # `repr`, because values are compared as text: they need not be picklable or hashable.
    arguments = {name: repr(value) for name, value in values.items()}
    problem = "" if error is None else f"{type(error).__name__}: {error}"
    # The problem is part of the digest: ranks with the same error raise without a second collective.
    if not all_ranks_equal(repr((problem, sorted(arguments.items())))):
        _raise(what, gather_objects((problem, isinstance(error, InvalidArgument), arguments)), error)
    if error is not None:  # the same error on every rank
        raise error
    return results[0]


def _raise(what: str, reports: list[tuple[str, bool, Mapping[str, str]]], error: Exception | None) -> None:
    failed = group_ranks((rank, problem) for rank, (problem, _, _) in enumerate(reports) if problem)
    if failed:
        reasons = "; ".join(f"{abbreviate_ranks(ranks)}: {problem}" for problem, ranks in failed.items())
        # A mistake in the call on every failed rank is InvalidArgument; any other error among them makes it
        # CheckpointError.
        all_invalid = all(bad for problem, bad, _ in reports if problem)
        raise (InvalidArgument if all_invalid else CheckpointError)(f"{what}() did not start: {reasons}") from error
    differing = []
    for name in reports[0][2]:
        sides = group_ranks((rank, arguments[name]) for rank, (_, _, arguments) in enumerate(reports))
        if len(sides) > 1:
            differing.append(
                f"{name} is " + ", ".join(f"{value} on {abbreviate_ranks(ranks)}" for value, ranks in sides.items())
            )
    raise InvalidArgument(f"{what}(): arguments differ between ranks: {'; '.join(differing)}")


def folder_key(folder: Any) -> str:  # noqa: ANN401 - a path or a storage
    """Return the text by which the ranks compare their folders: the path, or the type name of a storage.

    The text of a storage object may differ between processes.
    """
    return str(folder) if isinstance(folder, str) or hasattr(folder, "__fspath__") else type(folder).__qualname__
