"""Small collectives over the default process group, for control data: Python objects, numbers and equality checks.

Numbers and digests are reduced on the CPU if the group has a backend for it, so that no rank waits for an accelerator.
Without a process group, `this_rank`, `world_size`, `gather_objects`, `all_min` and `all_ranks_equal` treat this process
as the only rank.

The checks let the ranks agree on errors, arguments and small numbers before a larger collective. A rank with invalid
arguments, or whose block has raised, must not leave the others waiting there: it takes part in a small collective that
reports the failure, and all ranks raise.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from rankbook.errors import InvalidArgument, PeerFailedError


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
