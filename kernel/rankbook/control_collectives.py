"""Small collectives over the default process group, for control data: Python objects, numbers and equality checks.

Numbers and digests are reduced on the CPU if the group has a backend for it, so that no rank waits for an accelerator.
Without a process group, `this_rank`, `world_size`, `gather_objects`, `all_min` and `all_ranks_equal` treat this process
as the only rank.

The checks let the ranks agree on errors, arguments and small numbers before a larger collective. A rank with invalid
arguments, or whose block has raised, must not leave the others waiting there: it takes part in a small collective that
reports the failure, and all ranks raise.

A checkpoint is saved and loaded in several steps of this kind, and no rank raises between two of them. `RankGroup`
catches the exception of a rank's work, sends it in place of the result, and raises after every rank has received it.
`check_same_arguments` compares a digest of the arguments with one small all-reduce, and gathers the arguments
themselves only if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from rankbook.errors import CheckpointError, InvalidArgument, PeerFailedError
from rankbook.ranks import abbreviate_ranks, group_ranks


def this_rank() -> int:
    """Return the rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the size of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def control_device() -> torch.device:
    """Return the device for small control tensors: the CPU if the default group has a backend for it."""
    group = dist.group.WORLD
    assert group is not None
    # A group may have one backend per device type. A collective of CPU tensors does not wait for kernels that are
    # queued on the accelerator.
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


def gather_objects(value: Any) -> list[Any]:  # noqa: ANN401 - anything that pickles
    """Gather a picklable value from all ranks of the default process group, in rank order. Collective."""
    # A list of the right length is what torch fills. With one rank it is the result already.
    values: list[Any] = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def all_min(*numbers: int) -> list[int]:
    """Return, for every number, the smallest that a rank passes. Collective; all ranks pass equally many numbers."""
    if world_size() == 1:
        return list(numbers)
    # 64-bit integers are exact on every backend. Floats would round hashes.
    smallest = torch.tensor(numbers, dtype=torch.int64, device=control_device())
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return [int(number) for number in smallest.tolist()]


def all_ranks_equal(text: str) -> bool:
    """Return True, on every rank, if all ranks pass the same text. Collective.

    Only a 56-bit hash is compared, in one MIN reduction of [hash, -hash]: the hashes are equal if the minimum equals
    the maximum.
    """
    # 7 bytes, because 8 would not fit into a signed 64-bit integer.
    number = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
    least, negated_most = all_min(number, -number)
    return least == -negated_most


# The number that `raise_if_any_failed` reduces, for 4 ranks:
#
#     0 to 15     no failure; the level
#     16 to 19    rank 3, 2, 1 or 0 has failed
#
# The maximum is the failure of the lowest rank if there is any, else the highest level.
_LEVELS = 16


def is_cheap() -> bool:
    """Return True if a check does not have to wait for an accelerator."""
    return control_device().type == "cpu"


def raise_if_any_failed(failure: str | None, level: int = 0) -> int:
    """Wait for all ranks, and return the highest `level` (0 to 15) if no rank reports a failure. A collective.

    Raises `PeerFailedError` on every rank otherwise, with the failure of the lowest failed rank. One MAX reduction
    carries both: failures are encoded as numbers above all levels, larger for lower ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The level and the failure are one number, so that the case without a failure costs one reduction.
    flag = torch.tensor([level if failure is None else _LEVELS + world_size - 1 - rank], device=control_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    combined = int(flag.item())
    if combined < _LEVELS:
        return combined
    # All ranks know the failed rank now. Only it has the message.
    failed_rank = world_size - 1 - (combined - _LEVELS)
    message: list[Any] = [failure]
    dist.broadcast_object_list(message, src=failed_rank, device=control_device())
    raise PeerFailedError(f"rank {failed_rank} {message[0]}", failed_rank)


def announce_failure(error: Exception) -> None:
    """Make `raise_if_any_failed` raise on the other ranks; called on the rank where `error` was raised.

    Returns normally, so that the caller can raise `error` itself.
    """
    try:
        raise_if_any_failed(f"raised {type(error).__name__} while this rank was waiting for it: {error}")
    except PeerFailedError:
        pass  # expected: this rank raises its own error
    except Exception as failed:  # noqa: BLE001 - the first error is the one to see; this one is added as a note
        error.add_note(f"Could not report this error to the other ranks: {type(failed).__name__}: {failed}")


def check_same(what: str, description: str, failure: str | None = None) -> None:
    """Return if all ranks pass the same `what` and `description`, and no `failure`. A collective.

    Raises `InvalidArgument` on every rank otherwise, with the arguments of all ranks. `what` is the name of the
    operation for the message. The descriptions are exchanged only if their hashes differ.
    """
    call = (what, description, failure)
    # The failure is part of the text that is compared, so that ranks with and without one take the same way, and nobody
    # waits in a collective that others do not join.
    if all_ranks_equal(repr(call)) and failure is None:
        return
    # On every rank or on none: `all_ranks_equal` has given all of them the same answer, and a failure on all ranks
    # alike leads here as well.
    rows = gather_objects(call)
    # A failure is reported in place of differing arguments, which may be its consequence.
    failed = [f"rank {rank}: {row[2]}" for rank, row in enumerate(rows) if row[2] is not None]
    if failed:
        failed_call = next(row[0] for row in rows if row[2] is not None)
        raise InvalidArgument(f"{failed_call}: {'; '.join(failed)}")
    if len({row[0] for row in rows}) > 1:
        raise InvalidArgument(
            "the ranks call different operations: "
            + "; ".join(f"rank {rank}: {row[0]}" for rank, row in enumerate(rows))
        )
    lines = "".join(f"\n  rank {rank}: {row[1]}" for rank, row in enumerate(rows))
    raise InvalidArgument(f"{what}: arguments differ between ranks:{lines}")


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
