"""Choose which replica of an entry is stored, by assigning replica ids collectively.

Used for entries without replica ids: the first rank's copy is stored, or entries are distributed over the ranks by
bytes. Replica ids that a user has set in a map are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor
from rankbook.control_collectives import gather_objects, this_rank, world_size
from rankbook.errors import CheckpointError

Holders: TypeAlias = tuple[int, ...]
Gather: TypeAlias = Callable[[Any], list[Any]]


@dataclass
class ReplicatedEntry:
    """An entry that other ranks may hold copies of.

    holders: the ranks that together hold whole copies of the global tensor: those of a mesh, or this rank alone. index,
    count: which of the `count` copies within the holders this entry belongs to. nbytes: size of the global tensor in
    bytes. storage_group: entries with the same name are stored by one rank, and the names are distributed over the
    ranks; None: the first rank stores the entry.
    """

    entry: ShardedTensor | ShardedObject
    holders: Holders
    # Example: a DTensor is sharded over the ranks 0 and 1, and again over 2 and 3. Each pair holds one whole copy.
    # `holders` is (0, 1) on the ranks 0 and 1 and (2, 3) on the others, `index` is 0 and `count` 1. If the first pair
    # is chosen to store it, the ranks 0 and 1 get replica id 0, the ranks 2 and 3 get replica id 1.
    index: int = 0
    count: int = 1
    nbytes: int = 0
    storage_group: str | None = None


def assign_replica_ids(
    copies: Sequence[ReplicatedEntry], gather: Gather = gather_objects, *, error: Exception | None = None
) -> None:
    """Set the replica id of every entry: 0 on the rank that stores it. Collective; all ranks must call it.

    Ranks may hold different keys; one of the ranks that hold a key stores it. `error` is the exception that this rank
    raised while it prepared its entries, if any; then all ranks raise `CheckpointError` with its message.
    """
    # Entries whose mesh has all ranks are held by all of them; nothing has to be exchanged for these.
    meshes_by_key = _meshes_by_key([copy for copy in copies if len(copy.holders) < world_size()], gather, error)
    placed = [(copy, meshes_by_key.get(copy.entry.key, [copy.holders])) for copy in copies]
    owners = _assign_owners(placed)
    for copy, meshes in placed:
        # All copies in the job: those of every mesh that holds the key.
        total = len(meshes) * copy.count
        # Number the copies of all meshes in order, then rotate, so that the owner's copy gets replica id 0.
        index = meshes.index(copy.holders) * copy.count + copy.index
        copy.entry.replica_id = (index - owners.get(_group_key(copy, meshes), 0)) % total


def _meshes_by_key(
    copies: Iterable[ReplicatedEntry], gather: Gather, error: Exception | None
) -> dict[str, list[Holders]]:
    """Return the meshes that hold every key, sorted.

    All ranks first exchange a digest of what they hold. If it is the same everywhere and no key is on a mesh, every
    rank holds every key, and the keys themselves need not be exchanged.
    """
    rank, world = this_rank(), world_size()
    # () stands for "this rank alone", so that ranks that hold the same keys send the same digest.
    entries = sorted({(copy.entry.key, () if copy.holders == (rank,) else copy.holders) for copy in copies})
    message = "" if error is None else str(error)
    if error is not None and not isinstance(error, CheckpointError):
        message = f"{type(error).__name__}: {error}"
    # One collective in the usual case: 32 bytes per rank instead of all keys.
    reports = gather((message, hashlib.sha256(repr(entries).encode()).digest()))
    if errors := [f"rank {peer}: {problem}" for peer, (problem, _) in enumerate(reports) if problem]:
        raise CheckpointError("the state dict cannot be stored: " + "; ".join(errors)) from error
    if len({digest for _, digest in reports}) == 1 and not any(holders for _, holders in entries):
        return {key: [(peer,) for peer in range(world)] for key, _ in entries}
    meshes_by_key: dict[str, set[Holders]] = {}
    # The second collective. All ranks come here or none, because they compare the same digests.
    for other, keys in enumerate(gather(entries)):
        for key, holders in keys:
            meshes_by_key.setdefault(key, set()).add(holders or (other,))
    return {key: sorted(meshes_by_key[key]) for key, _ in entries}


def _group_key(copy: ReplicatedEntry, meshes: Sequence[Holders]) -> tuple[str | None, tuple[Holders, ...], int]:
    return copy.storage_group, tuple(meshes), copy.count


def _assign_owners(
    placed: Sequence[tuple[ReplicatedEntry, list[Holders]]],
) -> dict[tuple[str | None, tuple[Holders, ...], int], int]:
    """Return the copy to store for every group of entries.

    Assigns greedily: the largest group first, to the copy with the fewest bytes so far among equal meshes. The result
    is deterministic, so the ranks of a mesh agree without communication.
    """
    groups: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    for copy, meshes in placed:
        if copy.storage_group is not None:
            # A parameter and its optimizer state have the same group, so they are stored by one rank and read together.
            group = _group_key(copy, meshes)
            groups[group] = groups.get(group, 0) + copy.nbytes
    loads: dict[tuple[tuple[Holders, ...], int], list[int]] = {}
    owners: dict[tuple[str | None, tuple[Holders, ...], int], int] = {}
    # The name breaks ties, so that the order does not depend on that of a dict.
    for group, nbytes in sorted(groups.items(), key=lambda item: (-item[1], str(item[0][0]))):
        _, among, count = group
        load = loads.setdefault((among, count), [0] * (len(among) * count))
        owners[group] = load.index(min(load))
        load[owners[group]] += nbytes
    return owners
