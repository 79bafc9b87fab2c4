"""Restore a dead rank's shards from the replicas of hybrid sharding, without a snapshot.

Hybrid sharding (HSDP) has several replicas of a model, each of which is sharded over the ranks of one row of the mesh.
If a rank dies, another row has its shards. All ranks take over the state of one whole row whose ranks have made the
same steps (`choose_row`), so that they continue at one step: models, optimizers, schedulers and registered objects.
Random states and positions of loaders stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rankbook.control_collectives import gather_objects
from rankbook.runtime import prepared, protection
from rankbook.runtime.protection import RestoredSnapshot
from rankbook.runtime.strategies.base import Strategy, existing_mesh
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel

_AXIS = "dp_replicate"


def replicated_models(replaced: Collection[int]) -> set[int]:
    """Return the serial numbers of the sharded models of which a replica without any of the `replaced` ranks exists."""
    return {
        serial
        for serial, (strategy, _) in prepared.current_models().items()
        if any(set(row).isdisjoint(replaced) for row in rows_of(strategy))
    }


def rows_of(strategy: Strategy) -> list[list[int]]:
    """Return the ranks of every replica, each of which has all shards; nothing without replicas."""
    if not isinstance(strategy, FullyShardedDataParallel) or strategy.axes.get(_AXIS, 1) == 1:
        return []
    mesh = existing_mesh(strategy.setup.device.type, strategy.axes).mesh
    # The axis of the replicas is the outermost.
    return [row.flatten().tolist() for row in mesh]


def choose_row(rows: Sequence[Sequence[int]], steps: Mapping[int, tuple[int, ...] | None]) -> Sequence[int] | None:
    """Return the row to copy from: of those whose ranks have made the same steps, the one that has made the most.

    `steps` are those of a rank's optimizers, None for a new rank. None if there is no such row.
    """
    whole = [row for row in rows if steps[row[0]] is not None and len({steps[rank] for rank in row}) == 1]
    return max(whole, key=lambda row: steps[row[0]] or (), default=None)


def restore(replaced: Collection[int]) -> RestoredSnapshot:
    """Take over the state of one replica, on all ranks or on none. A collective."""
    rank = dist.get_rank()
    strategies = [strategy for strategy, _ in prepared.current_models().values() if rows_of(strategy)]
    rows = rows_of(strategies[0]) if strategies else []
    # Of all optimizers, not only the number to show: a rank may have died between the steps of two.
    steps_here = {serial: wrapper.steps for serial, wrapper in prepared.registered("optimizer").items()}
    made = protection.steps_made()
    answers = gather_objects((None if rank in replaced else steps_here, rows, made))
    known = [set(answer[0]) for answer in answers if answer[0] is not None]
    # A rank may still have an optimizer that nothing refers to.
    common = sorted(set.intersection(*known)) if known else []
    steps = {
        number: None if answer[0] is None else tuple(answer[0][serial] for serial in common)
        for number, answer in enumerate(answers)
    }
    row = choose_row(rows, steps) if all(answer[1] == rows for answer in answers) else None
    if row is None:
        return RestoredSnapshot(step=0, lost=0, refused="no replica has all shards of one step")
    # The ranks with the same shards: one of every row, at the same place.
    place = next(each.index(rank) for each in rows if rank in each)
    source = row[place]
    strategy = strategies[0]
    assert isinstance(strategy, FullyShardedDataParallel)
    mesh = existing_mesh(strategy.setup.device.type, strategy.axes)
    sent: list[Any] = [None]
    if rank == source:
        sent = [protection.pack_state()]
    dist.broadcast_object_list(sent, source, group=mesh.get_group(_AXIS))
    if rank not in row:
        protection.restore_packed(sent[0])
    else:
        protection.end_step()
    step = answers[row[0]][2]
    # One step more was begun, in which the rank has died.
    return RestoredSnapshot(step=step, lost=max(0, made - step) + 1, refused="")
