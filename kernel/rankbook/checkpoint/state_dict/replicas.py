"""Choose which replica of an entry is stored, by assigning replica ids collectively.

Used for entries without replica ids: the first rank's copy is stored, or entries are distributed over the ranks by
bytes. Replica ids that a user has set in a map are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor
from rankbook.errors import CheckpointingException

Holders: TypeAlias = tuple[int, ...]
Gather: TypeAlias = Callable[[Any], list[Any]]


@dataclass
class ReplicatedEntry:
    """An entry that other ranks may hold copies of.

    holders: the ranks that together hold whole copies of the global tensor: those of a mesh, or this rank alone. index,
    count: which of the `count` copies within the holders this entry belongs to. nbytes: size of the global tensor in
    bytes. together: entries with the same name are stored by one rank, and the names are distributed over the ranks;
    None: the first rank stores the entry.
    """

    entry: ShardedTensor | ShardedObject
    holders: Holders
    index: int = 0
    count: int = 1
    nbytes: int = 0
    together: str | None = None


def this_rank() -> int:
    """Return the rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the size of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def control_device() -> str:
    """Return the device on which the default process group reduces small tensors: the CPU if it has gloo."""
    return "cpu" if "gloo" in str(dist.get_backend()) else f"cuda:{torch.cuda.current_device()}"


def gather_objects(value: Any) -> list[Any]:  # noqa: ANN401 - anything that pickles
    """Gather a picklable value from all ranks of the default process group, in rank order. Collective."""
    values: list[Any] = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def assign_replica_ids(
    copies: Sequence[ReplicatedEntry], gather: Gather = gather_objects, *, error: Exception | None = None
) -> None:
    """Set the replica id of every entry: 0 on the rank that stores it. Collective; all ranks must call it.

    Ranks may hold different keys; one of the ranks that hold a key stores it. `error` is the exception that this rank
    raised while it prepared its entries, if any; then all ranks raise `CheckpointingException` with its message.
    """
    places = _places([copy for copy in copies if len(copy.holders) < world_size()], gather, error)
    placed = [(copy, places.get(copy.entry.key, [copy.holders])) for copy in copies]
    owners = _owners(placed)
    for copy, meshes in placed:
        total = len(meshes) * copy.count
        # Number the copies of all meshes in order, then rotate, so that the owner's copy gets replica id 0.
        index = meshes.index(copy.holders) * copy.count + copy.index
        copy.entry.replica_id = (index - owners.get(_group(copy, meshes), 0)) % total


def _places(copies: Iterable[ReplicatedEntry], gather: Gather, error: Exception | None) -> dict[str, list[Holders]]:
    """Return the meshes that hold every key, sorted.

    All ranks first exchange a digest of what they hold. If it is the same everywhere and no key is on a mesh, every
    rank holds every key, and the keys themselves need not be exchanged.
    """
    rank, world = this_rank(), world_size()
    # () stands for "this rank alone", so that ranks that hold the same keys send the same digest.
    entries = sorted({(copy.entry.key, () if copy.holders == (rank,) else copy.holders) for copy in copies})
    message = "" if error is None else str(error)
    if error is not None and not isinstance(error, CheckpointingException):
        message = f"{type(error).__name__}: {error}"
    reports = gather((message, hashlib.sha256(repr(entries).encode()).digest()))
    if errors := [f"rank {peer}: {complaint}" for peer, (complaint, _) in enumerate(reports) if complaint]:
        raise CheckpointingException("the state dict cannot be stored: " + "; ".join(errors)) from error
    if len({digest for _, digest in reports}) == 1 and not any(holders for _, holders in entries):
        return {key: [(peer,) for peer in range(world)] for key, _ in entries}
    places: dict[str, set[Holders]] = {}
    for other, keys in enumerate(gather(entries)):
        for key, holders in keys:
            places.setdefault(key, set()).add(holders or (other,))
    return {key: sorted(places[key]) for key, _ in entries}


def _group(copy: ReplicatedEntry, meshes: Sequence[Holders]) -> tuple[str | None, tuple[Holders, ...], int]:
    return copy.together, tuple(meshes), copy.count


def _owners(
    placed: Sequence[tuple[ReplicatedEntry, list[Holders]]],
) -> dict[tuple[str | None, tuple[Holders, ...], int], int]:
    """Return the copy to store for every group of entries.

    Assigns greedily: the largest group first, to the copy with the fewest bytes so far among equal meshes. The result
    is deterministic, so the ranks of a mesh agree without communication.
    """
    groups: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    for copy, meshes in placed:
        if copy.together is not None:
            group = _group(copy, meshes)
            groups[group] = groups.get(group, 0) + copy.nbytes
    loads: dict[tuple[tuple[Holders, ...], int], list[int]] = {}
    owners: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    for group, nbytes in sorted(groups.items(), key=lambda item: (-item[1], str(item[0][0]))):
        _, among, count = group
        load = loads.setdefault((among, count), [0] * (len(among) * count))
        owners[group] = load.index(min(load))
        load[owners[group]] += nbytes
    return owners
