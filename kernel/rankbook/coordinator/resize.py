"""Change of the number of ranks: the decisions and the report. `Cluster.resize` performs it.

The order of events, in which nothing changes before the third step:

1. Every rank describes its state (`CheckResize`), and `plan_resize` refuses what does not fit.
2. If models are sharded, all ranks save their shards in a folder of the cluster's shared memory (`HandOver`). It
   outlives every rank. The folder is a checkpoint, so any number of ranks can load it.
3. Ranks that leave are asked to exit, new ones are started, and all form the process group anew.
4. The ranks adapt to the new number (`EnterWorld`), new ones get the variables of another rank as in a heal, and all
   load their shards (`TakeOver`).

If a rank dies from the third step on, the last two steps are repeated with a new process in its place: its shards are
in the folder, and its variables on other ranks. `PendingResize` has what that needs.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankbook.coordinator.recovery import Healed, read_record, remove_record, write_record
from rankbook.errors import InvalidArgument
from rankbook.formatting import format_bytes, plural
from rankbook.protocol.messages import EnterWorld
from rankbook.ranks import name_ranks
from rankbook.snapshot_files import free_memory

_PENDING = "resize-pending"
_ROOM = 1.02
"""Size of the files of a resize, as a multiple of the bytes in them."""
RESERVE = 64 << 20
"""Bytes of shared memory that stay free for messages, DataLoader workers and NCCL."""


MeshSizes = tuple[str, tuple[tuple[str, int], ...]]
"""Type of the devices of a mesh, and the names and sizes of its axes."""


@dataclass(frozen=True)
class PendingResize:
    """A resize that has been checked. `folder` has the shards of all models, and is empty if there are none.

    `former` is the number of ranks before. `differing` are the variables that differ by rank, with the ranks that have
    them, `groups` those that belong to the former number of ranks. `every` is the interval of the protection. `random`
    is the state of rank 0's random generators, and `same_random` says if that of all ranks is equal. `sharing` is the
    number of ranks that read the same batches. `devices` are those of the ranks, if some have died with theirs.
    `staying` are the ranks that keep their processes.
    """

    former: int
    world_size: int
    size: int
    meshes: tuple[MeshSizes, ...]
    every: int
    step: int
    differing: Mapping[str, tuple[int, ...]]
    groups: tuple[str, ...]
    random: bytes
    same_random: bool
    sharing: int
    folder: str = ""
    devices: tuple[str, ...] = ()
    staying: tuple[int, ...] = ()

    def make_enter(self, rank: int, threads: int, *, is_new: bool) -> Callable[[int], EnterWorld]:
        """Return a function that makes the message `EnterWorld` for `rank`.

        If all ranks have had the same random numbers, as after one `set_seed` on all of them, a new rank has them too.
        Otherwise it gets others: the same ones as ranks that read the same batches, since these drop the same
        activations.
        """
        seeded = None if self.same_random else rank // self.sharing
        state = self.random if is_new else b""
        return lambda cell: EnterWorld(cell, self.world_size, threads, self.meshes, state, seeded)


@dataclass(frozen=True)
class Resized:
    """Result of a resize from `former` to `world_size` ranks.

    `healed` is the report of the new ranks, None if there are none. `differing` maps the variables that differ by rank
    to the ranks that had them, and `groups` are the variables that have to be made again. `step` is the number of
    optimizer steps, 0 without a prepared optimizer. `replaced` are ranks that died meanwhile and were replaced. `died`
    are the ranks without which `heal` goes on, and `restored` says to which step it has returned. `unprotected` is the
    reason why the protection of before has ended; empty otherwise. `notes` are about loaders that begin an epoch anew.

    Example::

        with Cluster(2) as cluster:
            print(cluster.resize(3))  # from 2 to 3 ranks ...
    """

    former: int
    world_size: int
    step: int = 0
    healed: Healed | None = None
    differing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()
    died: tuple[int, ...] = ()
    restored: str = ""
    unprotected: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.former == self.world_size and self.healed is None:
            return f"there are {plural(self.world_size, 'rank')} already"
        at = f" at step {self.step}" if self.step else ""
        lines = [f"from {self.former} to {plural(self.world_size, 'rank')}{at}"]
        if self.restored:
            lines.append(self.restored)
        if self.died:
            lines.append(f"{name_ranks(self.died)} died")
        if self.healed is not None:
            verb = "is" if len(self.healed.ranks) == 1 else "are"
            lines.append(
                f"{name_ranks(self.healed.ranks)} {verb} new, with the state of rank {self.healed.donor}: "
                f"{self.healed.describe_copied()}"
            )
        gone = range(self.world_size, self.former)
        if gone:
            lines.append(f"{name_ranks(tuple(gone))} {'has' if len(gone) == 1 else 'have'} left")
        if self.replaced:
            lines.append(f"{name_ranks(self.replaced)} died meanwhile and {_was(self.replaced)} replaced")
        if self.unprotected:
            lines.append(f"the training state is not protected any more: {self.unprotected}")
        lines += [*self.notes, *self._describe_differing()]
        if self.groups:
            lines.append(f"of {plural(self.former, 'rank')}, to be made again: {', '.join(self.groups)}")
        if self.healed is not None and self.healed.missing:
            lines.append("not copied:")
            lines += [f"  {name}: {reason}" for name, reason in self.healed.missing.items()]
        return "\n".join(lines)

    def _describe_differing(self) -> list[str]:
        if not self.differing:
            return []
        lines = ["variables that differ by rank:"]
        new = self.healed.ranks if self.healed is not None else ()
        for name, ranks in self.differing.items():
            stayed = tuple(rank for rank in ranks if rank < self.world_size and rank not in new)
            left = tuple(rank for rank in ranks if rank >= self.world_size)
            parts = [f"kept on {name_ranks(stayed)}"] if stayed else []
            if new and self.healed is not None and self.healed.donor in stayed:
                how = "missing" if name in (self.healed.missing or ()) else f"as on rank {self.healed.donor}"
                parts.append(f"{how} on {name_ranks(new)}")
            parts += [f"gone with {name_ranks(left)}"] if left else []
            lines.append(f"  {name}: {', '.join(parts)}")
        return lines


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def plan_resize(checks: Mapping[int, Mapping[str, Any]], world_size: int) -> PendingResize:
    """Return the plan from the answers of all ranks (`ResizeCheck`). Raises `InvalidArgument` for what does not fit."""
    if problem := next((check["problem"] for check in checks.values() if check["problem"]), ""):
        raise InvalidArgument(f"cannot resize to {plural(world_size, 'rank')}: {problem}; nothing has changed")
    first = next(iter(checks.values()))
    if any(check["meshes"] != first["meshes"] for check in checks.values()):
        raise InvalidArgument(
            f"cannot resize to {plural(world_size, 'rank')}: the ranks have prepared different models; run the cell "
            "that prepares them on all ranks; nothing has changed"
        )
    groups = dict.fromkeys(name for check in checks.values() for name in check["groups"])
    return PendingResize(
        former=len(checks),
        world_size=world_size,
        size=sum(check["size"] for check in checks.values()),
        meshes=tuple((device, tuple(map(tuple, sizes))) for device, sizes in first["meshes"]),
        every=max(check["every"] for check in checks.values()),  # 0 on a rank that was restarted since
        step=first["steps"],
        differing=find_differing(
            {
                rank: {name: digest for name, digest in check["digests"].items() if name not in groups}
                for rank, check in checks.items()
            }
        ),
        groups=tuple(groups),
        random=first["random"],
        same_random=len({check["random"] for check in checks.values()}) == 1,
        sharing=first["sharing"],
    )


def find_differing(digests: Mapping[int, Mapping[str, str]]) -> dict[str, tuple[int, ...]]:
    """Return the variables whose digests are not the same on all ranks, with the ranks that have them.

    Example::

        find_differing({0: {"x": "a", "y": "b"}, 1: {"x": "a", "y": "c"}})  # {'y': (0, 1)}
    """
    # Digests and not values are compared, so that no variable travels. A variable that some ranks do not have is listed
    # as well, since a new rank gets the donor's.
    ranks_with: defaultdict[str, list[int]] = defaultdict(list)
    values: defaultdict[str, set[str]] = defaultdict(set)
    for rank, of_rank in digests.items():
        for name, digest in of_rank.items():
            ranks_with[name].append(rank)
            values[name].add(digest)
    return {
        name: tuple(ranks)
        for name, ranks in sorted(ranks_with.items())
        if len(values[name]) > 1 or len(ranks) < len(digests)
    }


def check_room(folder: Path, size: int) -> None:
    """Raise `InvalidArgument` with the arithmetic if shared memory has no room for `size` bytes."""
    needed = int(size * _ROOM)
    free, place = free_memory(folder)
    if needed > free - RESERVE:
        raise InvalidArgument(
            f"a resize needs {format_bytes(needed)} of shared memory for the shards of all ranks, but {place} has "
            f"{format_bytes(free)} free, of which {format_bytes(RESERVE)} are kept for messages; enlarge it, or save "
            "a checkpoint and start again; nothing has changed"
        )


def shrunk_devices(devices: Sequence[str], dead: Sequence[int]) -> tuple[str, ...]:
    """Return the devices of the ranks that go on: the highest ranks give theirs to the numbers of dead ones.

    Example::

        shrunk_devices(["cuda:0", "cuda:1", "cuda:2"], [0])  # ('cuda:2', 'cuda:1')
    """
    # Ranks are numbered without gaps, but a device that is gone cannot be given to another number. So the ranks with
    # the highest numbers end, and their devices go to new processes that take the numbers of the dead ones.
    count = len(devices) - len(dead)
    free = iter([device for rank, device in enumerate(devices) if rank >= count and rank not in dead])
    return tuple(next(free) if rank in dead else devices[rank] for rank in range(count))


def keep_devices(assigned: Sequence[str], current: Sequence[str], staying: Collection[int]) -> tuple[str, ...]:
    """Return the devices after a resize: ranks that stay keep theirs, and new ones get what is left of `assigned`.

    Example::

        keep_devices(["cuda:0", "cuda:1", "cuda:2"], ["cuda:0", "cuda:2"], [0, 1])  # ('cuda:0', 'cuda:2', 'cuda:1')
    """
    # A rank that stays has its tensors on its device and cannot change it. `assigned` is the assignment of a fresh
    # start, as a list of devices with repetitions where ranks share one: what the ranks that stay use is taken out of
    # it, and the rest goes to new ranks in order.
    free = list(assigned)
    for rank in staying:
        if current[rank] in free:
            free.remove(current[rank])
    return tuple(current[rank] if rank in staying else free.pop(0) for rank in range(len(assigned)))


def handover_folder(folder: Path, number: int) -> Path:
    """Return the folder of the shards of one resize, in the cluster's shared memory."""
    return folder / f"resize-{os.getpid()}-{number}"


def forget_handovers(folder: Path) -> None:
    """Remove the shards of all resizes, also of one that has ended with the notebook's process before it began."""
    for path in list(folder.glob("resize-*")):
        if path.is_dir():  # not the record of the plan
            shutil.rmtree(path, ignore_errors=True)


def describe_failure(pending: PendingResize, error: BaseException, live: Collection[int]) -> str:
    """Return the error of a resize that has not ended, with what to do. `live` are the ranks whose processes live."""
    if set(pending.staying).isdisjoint(live):
        advice = (
            "no rank with variables to copy is left: stop the ranks with %distributed stop, start again, and load a "
            "checkpoint"
        )
    else:
        advice = "%distributed heal completes it: nothing is lost"
    return (
        f"the resize to {plural(pending.world_size, 'rank')} has not ended ({type(error).__name__}: {error}); {advice}"
    )


def store_pending(folder: Path, pending: PendingResize) -> None:
    """Keep the plan in the cluster's folder, for another notebook process that attaches to the ranks."""
    write_record(folder, _PENDING, pending)


def read_pending(folder: Path) -> PendingResize | None:
    """Return the plan of a resize that the previous notebook process has not completed, None if there is none."""
    return read_record(folder, _PENDING, PendingResize)


def forget_pending(folder: Path, pending: PendingResize) -> None:
    """Remove the plan, and the shards of the ranks before."""
    remove_record(folder, _PENDING)
    if pending.folder:
        shutil.rmtree(pending.folder, ignore_errors=True)


def with_folder(pending: PendingResize, folder: Path) -> PendingResize:
    """Return the plan with the folder into which the ranks write their shards."""
    return replace(pending, folder=str(folder))
