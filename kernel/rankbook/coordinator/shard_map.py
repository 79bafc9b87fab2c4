"""One map of a variable's shards, of what each rank has told.

Owns: which of two ranks' words counts, the numbers of replicas, and what is missing. Refuses: links and torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from rankbook.protocol.queries import Answer, Box, HeldTensor, NothingTold, ShardsTold
from rankbook.protocol.telemetry import Shard, ShardedTensorMap, ShardMap
from rankbook.ranks import group_ranks, name_ranks


def fold_shards(
    name: str, answers: Mapping[int, Answer], everyone: Collection[int], devices: Mapping[int, str]
) -> ShardMap:
    """The map. What a rank says of its own part counts; what others have computed stands for ranks that are silent."""
    told = {rank: each for rank, each in sorted(answers.items()) if isinstance(each, ShardsTold)}
    troubles = group_ranks(
        (rank, answer.trouble)
        for rank, answer in sorted(answers.items())
        if isinstance(answer, NothingTold | ShardsTold) and answer.trouble
    )
    for rank in everyone:
        if rank not in answers:
            troubles.setdefault("no answer; its parts are as the others computed them", []).append(rank)
    kinds = {each.kind: rank for rank, each in reversed(told.items())}
    if len(kinds) > 1:
        troubles.setdefault(f"it is not the same kind of thing everywhere: {', '.join(sorted(kinds))}", []).extend(told)
    words = "; ".join(f"{name_ranks(ranks)}: {trouble}" for trouble, ranks in troubles.items())
    kind = next((each.kind for each in told.values()), "")
    return ShardMap(name, kind, tuple(_tensors(told, devices)), words)


def _tensors(told: Mapping[int, ShardsTold], devices: Mapping[int, str]) -> list[ShardedTensorMap]:
    tensors: dict[str, HeldTensor] = {}
    boxes: dict[str, dict[tuple[int, Box | None], tuple[Box, HeldTensor]]] = {}
    spoken: set[tuple[str, int]] = set()
    for rank, each in told.items():
        for tensor in each.tensors:
            tensors.setdefault(tensor.key, tensor)
            mine = [box for box in each.grids[tensor.grid] if box.rank == rank]
            spoken.update((tensor.key, rank) for _ in mine)
            for box in mine:
                boxes.setdefault(tensor.key, {})[rank, box] = (box, tensor)
    for rank, each in told.items():
        for tensor in each.tensors:
            for box in each.grids[tensor.grid]:
                if box.rank != rank and (tensor.key, box.rank) not in spoken and box.rank not in told:
                    boxes.setdefault(tensor.key, {}).setdefault((box.rank, None), (box, tensor))
    found = []
    for key, tensor in tensors.items():
        kept = sorted(boxes.get(key, {}).values(), key=lambda each: (each[0].rank, each[0].offset))
        found.append(ShardedTensorMap(key, tensor.dtype, tensor.shape, _shards(kept, told, devices)))
    return found


def _shards(
    kept: list[tuple[Box, HeldTensor]], told: Mapping[int, ShardsTold], devices: Mapping[int, str]
) -> tuple[Shard, ...]:
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for box, _ in kept:
        if box.replica >= 0:
            copies.setdefault((box.offset, box.shape), set()).add(box.replica)
    shards = []
    for box, tensor in kept:
        taken = copies.setdefault((box.offset, box.shape), set())
        replica = box.replica
        if replica < 0:
            replica = next(each for each in range(len(taken) + 1) if each not in taken)
            taken.add(replica)
        device = tensor.device if box.rank in told else devices.get(box.rank, "")
        shards.append(Shard(box.rank, box.offset, box.shape, replica, device, math.prod(box.shape) * tensor.itemsize))
    return tuple(shards)
