"""Which of several copies is the one that is stored.

Owns: replica ids of entries that nobody has given any: rank 0's copy, or spread over the ranks by bytes. Refuses:
entries of a map that a person wrote; those ids are the person's.
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
    """An entry of which other ranks may hold copies.

    holders: the ranks that together hold whole copies of the global tensor: a mesh's, or this rank alone. index, count:
    which of the copies within the holders it is, of how many. nbytes: of the whole global tensor. together: entries of
    one name are stored by one rank, and spread over the ranks; None: the first rank stores it.
    """

    entry: ShardedTensor | ShardedObject
    holders: Holders
    index: int = 0
    count: int = 1
    nbytes: int = 0
    together: str | None = None


def this_rank() -> int:
    """Its number in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """That of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def control_device() -> str:
    """Where the default process group can reduce a few numbers: the CPU, where it has gloo."""
    return "cpu" if "gloo" in str(dist.get_backend()) else f"cuda:{torch.cuda.current_device()}"


def gather_objects(value: Any) -> list[Any]:  # noqa: ANN401 - anything that pickles
    """What each rank of the default process group gives, by rank. A collective."""
    found: list[Any] = [value] * world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def assign_replica_ids(
    copies: Sequence[ReplicatedEntry], gather: Gather = gather_objects, *, error: Exception | None = None
) -> None:
    """Set the replica id of every entry: 0 on the rank that stores it. A collective: each rank calls it.

    A rank need not hold what others hold: of the ranks that hold a key, one stores it. `error`: what this rank raised
    instead of having copies to offer; then all ranks raise `CheckpointingException` with what it says.
    """
    places = _places([each for each in copies if len(each.holders) < world_size()], gather, error)
    placed = [(each, places.get(each.entry.key, [each.holders])) for each in copies]
    owners = _owners(placed)
    for each, meshes in placed:
        total = len(meshes) * each.count
        index = meshes.index(each.holders) * each.count + each.index
        each.entry.replica_id = (index - owners.get(_group(each, meshes), 0)) % total


def _places(copies: Iterable[ReplicatedEntry], gather: Gather, error: Exception | None) -> dict[str, list[Holders]]:
    """For each key all meshes that hold it, in order. Where all ranks hold the same it takes one short exchange."""
    rank, world = this_rank(), world_size()
    held = sorted({(each.entry.key, () if each.holders == (rank,) else each.holders) for each in copies})
    own = "" if error is None else str(error)
    if error is not None and not isinstance(error, CheckpointingException):
        own = f"{type(error).__name__}: {error}"
    told = gather((own, hashlib.sha256(repr(held).encode()).digest()))
    if errors := [f"rank {each}: {said}" for each, (said, _) in enumerate(told) if said]:
        raise CheckpointingException("the state dict cannot be stored: " + "; ".join(errors)) from error
    if len({digest for _, digest in told}) == 1 and not any(holders for _, holders in held):
        return {key: [(each,) for each in range(world)] for key, _ in held}
    places: dict[str, set[Holders]] = {}
    for other, keys in enumerate(gather(held)):
        for key, holders in keys:
            places.setdefault(key, set()).add(holders or (other,))
    return {key: sorted(places[key]) for key, _ in held}


def _group(copy: ReplicatedEntry, meshes: Sequence[Holders]) -> tuple[str | None, tuple[Holders, ...], int]:
    return copy.together, tuple(meshes), copy.count


def _owners(
    placed: Sequence[tuple[ReplicatedEntry, list[Holders]]],
) -> dict[tuple[str | None, tuple[Holders, ...], int], int]:
    """Which copy of each group is stored: the largest group first, each to who has least of its like so far."""
    groups: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    for each, meshes in placed:
        if each.together is not None:
            group = _group(each, meshes)
            groups[group] = groups.get(group, 0) + each.nbytes
    loads: dict[tuple[tuple[Holders, ...], int], list[int]] = {}
    owners: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    for group, nbytes in sorted(groups.items(), key=lambda item: (-item[1], str(item[0][0]))):
        _, among, count = group
        load = loads.setdefault((among, count), [0] * (len(among) * count))
        owners[group] = load.index(min(load))
        load[owners[group]] += nbytes
    return owners
