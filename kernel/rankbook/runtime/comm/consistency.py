"""Consistency checks between ranks: agree on errors, arguments and small numbers before a collective.

A rank with invalid arguments, or whose block has raised, must not leave the others waiting in the next collective. It
takes part in a small collective that reports the failure, and all ranks raise. These collectives use the CPU if the
group has a backend for it, so that no rank waits for an accelerator.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from rankbook.errors import BadRequest, PeerFailed

_FAILED = -1
_LEVELS = 16


def control_device() -> torch.device:
    """Return the device for small control tensors: the CPU if the default group has a backend for it."""
    group = dist.group.WORLD
    assert group is not None
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


def is_cheap() -> bool:
    """Return True if a check does not have to wait for an accelerator."""
    return control_device().type == "cpu"


def raise_if_any_failed(failure: str | None, level: int = 0) -> int:
    """Wait for all ranks, and return the highest `level` (0 to 15) if no rank reports a failure. A collective.

    Raises `PeerFailed` on every rank otherwise, with the failure of the lowest failed rank. One MAX reduction carries
    both: failures are encoded as numbers above all levels, larger for lower ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flag = torch.tensor([level if failure is None else _LEVELS + world_size - 1 - rank], device=control_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    worst = int(flag.item())
    if worst < _LEVELS:
        return worst
    culprit = world_size - 1 - (worst - _LEVELS)
    message: list[Any] = [failure]
    dist.broadcast_object_list(message, src=culprit, device=control_device())
    raise PeerFailed(f"rank {culprit} {message[0]}", culprit)


def all_min(number: int) -> int:
    """Return the smallest `number` of all ranks. A collective."""
    smallest = torch.tensor([number], device=control_device())
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest.item())


def announce_failure(error: Exception) -> None:
    """Make `raise_if_any_failed` raise on the other ranks; called on the rank where `error` was raised.

    Returns normally, so that the caller can raise `error` itself.
    """
    try:
        raise_if_any_failed(f"raised {type(error).__name__}, and this rank waited for it: {error}")
    except PeerFailed:
        pass  # expected: this rank raises its own error
    except Exception as failed:  # noqa: BLE001 - the first error is the one to see; this one is added as a note
        error.add_note(f"The other ranks could not be told: {type(failed).__name__}: {failed}")


def check_same(what: str, description: str, failure: str | None = None) -> None:
    """Return if all ranks pass the same `what` and `description`, and no `failure`. A collective.

    Raises `BadRequest` on every rank otherwise, with the arguments of all ranks. `what` is the name of the operation
    for the message. Only a 56-bit hash is compared, in one MAX reduction of [hash, -hash]: the hashes are equal if the
    maximum equals the minimum. The descriptions are exchanged only if they differ.
    """
    digest = hashlib.blake2b(f"{what}\n{description}".encode(), digest_size=7).digest()
    mark = int.from_bytes(digest, "big") if failure is None else _FAILED
    ends = torch.tensor([mark, -mark], device=control_device())
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    largest, smallest = ends.tolist()
    if largest == -smallest != _FAILED:
        return
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (what, description, failure))
    failed = [f"rank {rank}: {row[2]}" for rank, row in enumerate(rows) if row[2] is not None]
    if failed:
        culprits_call = next(row[0] for row in rows if row[2] is not None)
        raise BadRequest(f"{culprits_call}: {'; '.join(failed)}")
    if len({row[0] for row in rows}) > 1:
        raise BadRequest(
            "the ranks call different operations: " + "; ".join(f"rank {r}: {e[0]}" for r, e in enumerate(rows))
        )
    lines = "".join(f"\n  rank {rank}: {row[1]}" for rank, row in enumerate(rows))
    raise BadRequest(f"{what}: the ranks bring different data:{lines}")
