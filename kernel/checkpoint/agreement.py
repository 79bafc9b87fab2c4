"""What all ranks must have given alike, before any of them waits for another.

Owns: that a rank whose arguments are wrong, or other than the others', is everybody's error. Refuses: what a state dict
holds; that is the plan's to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankbook.checkpoint.coverage import said
from rankbook.checkpoint.replicas import control_device, gather_objects
from rankbook.errors import BadRequest, CheckpointingException

T = TypeVar("T")


def agreed(what: str, check: Callable[[], T], **given: object) -> T:
    """What `check()` returns, once all ranks have `given` the same and no rank's check has raised. A collective.

    `what` is the call, for the message. Where all is well it costs one small all-reduce. Raises, the same on every
    rank, `BadRequest` where a rank's check did or where the ranks differ, `CheckpointingException` for any other error
    of a check.
    """
    error: Exception | None = None
    made: list[T] = []
    try:
        made = [check()]
    except Exception as raised:  # noqa: BLE001 - raised below, on every rank
        error = raised
    own = {name: repr(value) for name, value in given.items()}
    complaint = "" if error is None else f"{type(error).__name__}: {error}"
    if not _all_alike(repr((complaint, sorted(own.items())))):
        _raise(what, gather_objects((complaint, isinstance(error, BadRequest), own)), error)
    if error is not None:  # the same one everywhere
        raise error
    return made[0]


def _all_alike(text: str) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    number = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
    told = torch.tensor([number, -number], dtype=torch.int64, device=control_device())
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    least, most = told.tolist()
    return bool(least == -most)


def _raise(what: str, told: list[tuple[str, bool, Mapping[str, str]]], error: Exception | None) -> None:
    failed: dict[str, list[int]] = {}
    for rank, (complaint, _, _) in enumerate(told):
        if complaint:
            failed.setdefault(complaint, []).append(rank)
    if failed:
        words = "; ".join(f"{said(ranks)}: {complaint}" for complaint, ranks in failed.items())
        asked = all(bad for complaint, bad, _ in told if complaint)
        raise (BadRequest if asked else CheckpointingException)(f"the {what} has not begun: {words}") from error
    differing = []
    for name in told[0][2]:
        sides: dict[str, list[int]] = {}
        for rank, (_, _, own) in enumerate(told):
            sides.setdefault(own[name], []).append(rank)
        if len(sides) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {said(ranks)}" for value, ranks in sides.items()))
    raise BadRequest(f"the {what} has not begun, for the ranks do not ask for the same: {'; '.join(differing)}")


def spelt(folder: Any) -> str:  # noqa: ANN401 - a path or a storage
    """A folder for `agreed`: its path; of a storage, whose text may be of this process alone, its type."""
    return str(folder) if isinstance(folder, str) or hasattr(folder, "__fspath__") else type(folder).__qualname__
