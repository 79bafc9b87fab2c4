"""All ranks learn that one of them cannot go on, so that none waits for it.

Owns: the small collectives that go before the large ones. Refuses: to send tensors that the person gave.

A rank that finds its arguments bad, or whose block raised, does not leave the others in the next collective: it takes
part in the agreement and says so, and each rank raises. What is agreed upon travels over the CPU where the group has a
backend for it, so that no accelerator is waited for.
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
    """Where small tensors go that only the agreement reads: the CPU, if the default group can send from there."""
    group = dist.group.WORLD
    assert group is not None
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


def is_cheap() -> bool:
    """Whether an agreement costs no wait for an accelerator."""
    return control_device().type == "cpu"


def raise_if_any_failed(failure: str | None, level: int = 0) -> int:
    """The highest `level` (0 to 15) of all ranks, once all have come here and none brings a failure.

    Raises `PeerFailed` on every rank when one does; it names the first of them.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flag = torch.tensor([level if failure is None else _LEVELS + world_size - 1 - rank], device=control_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    worst = int(flag.item())
    if worst < _LEVELS:
        return worst
    culprit = world_size - 1 - (worst - _LEVELS)
    told: list[Any] = [failure]
    dist.broadcast_object_list(told, src=culprit, device=control_device())
    raise PeerFailed(f"rank {culprit} {told[0]}", culprit)


def all_min(number: int) -> int:
    """The smallest number that any rank brings."""
    found = torch.tensor([number], device=control_device())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found.item())


def announce_failure(error: Exception) -> None:
    """On the rank where `error` was raised: the others' `agree` raises. Returns, for `error` is to be raised again."""
    try:
        raise_if_any_failed(f"raised {type(error).__name__}, and this rank waited for it: {error}")
    except PeerFailed:
        pass  # as meant: this rank raises its own error
    except Exception as failed:  # noqa: BLE001 - the first error is the one to see; this one is told along with it
        error.add_note(f"The other ranks could not be told: {type(failed).__name__}: {failed}")


def check_same(what: str, description: str, failure: str | None = None) -> None:
    """Return if each rank brings the same `description` and no `failure`. Every rank calls this.

    Raises `BadRequest` on every rank otherwise, with what each one has. `what` is the operation, for the message.
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
    failed = [f"rank {rank}: {each[2]}" for rank, each in enumerate(rows) if each[2] is not None]
    if failed:
        culprits_call = next(each[0] for each in rows if each[2] is not None)
        raise BadRequest(f"{culprits_call}: {'; '.join(failed)}")
    if len({each[0] for each in rows}) > 1:
        raise BadRequest(
            "the ranks call different operations: " + "; ".join(f"rank {r}: {e[0]}" for r, e in enumerate(rows))
        )
    lines = "".join(f"\n  rank {rank}: {each[1]}" for rank, each in enumerate(rows))
    raise BadRequest(f"{what}: the ranks bring different data:{lines}")
