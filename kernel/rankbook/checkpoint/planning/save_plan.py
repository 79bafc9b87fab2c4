"""Plan a save as data: validate all ranks' shards against one another and assign chunks to ranks.

The planner is pure: no torch, files or communication. Its result depends on the local plans alone, so all ranks that
plan from the same local plans get the same save plan, or the same error.

`plan_save` is the entry point, `balance_replicas` spreads replicated chunks over the ranks, `ChunkIndex` is the catalog
of the chunks to be stored with the ranks that store them, and `PlanCache` keeps the plan for the next save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankbook.checkpoint.planning.local_plan import ChunkTable, Integers, LocalPlan, LocalShard, itemsize
from rankbook.checkpoint.planning.validation import (
    ChunkBoxes,
    chunk_volumes,
    coverage_errors,
    covers_exactly_once,
    said,
)
from rankbook.errors import CheckpointingException
from rankbook.ranks import group_ranks

__all__ = [
    "Assignment",
    "LocalPlan",
    "LocalShard",
    "PlanCache",
    "PlannedChunk",
    "PlannedTensor",
    "SavePlan",
    "plan_save",
]

MOST_KEYS_SAID = 8
"""Maximum number of keys whose problems an error message describes."""


class Assignment(NamedTuple):
    """The positions of the tensors and objects that one rank stores, in the order of its local plan."""

    tensors: Integers
    objects: Integers


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The ranks that store all chunks and objects. `bytes_per_rank` counts tensor data only."""

    world_size: int
    bytes_per_rank: tuple[int, ...]
    all_tensors: ChunkIndex
    all_objects: ChunkIndex

    def of_rank(self, rank: int) -> Assignment:
        """Return the tensors and objects that a rank stores."""
        return Assignment(self.all_tensors.of_rank(rank), self.all_objects.of_rank(rank))

    def tensors(self) -> dict[str, PlannedTensor]:
        """Return the catalog of tensors by key, in the order in which the ranks name them."""
        return dict(self.all_tensors.chunks())

    def objects(self) -> dict[str, int]:
        """Return the storing rank of every object, by the object's unique key."""
        return {
            f"{key}/shard_{'.'.join(map(str, chunk.offset))}_{'.'.join(map(str, whole.shape))}": chunk.rank
            for key, whole in self.all_objects.chunks()
            for chunk in whole.chunks
        }


class PlanCache:
    """Cache of the previous save's plan, valid as long as all ranks declare the same shards.

    Ranks first exchange `LocalPlan.signature()`; if `recall` returns a plan, they need not exchange their local plans.
    """

    def __init__(self) -> None:
        self._known: tuple[list[str], bool] | None = None
        self._plan: SavePlan | None = None

    def recall(self, signatures: Sequence[tuple[str, str]], *, fully_parallel: bool = False) -> SavePlan | None:
        """Return the cached plan if it was made for these signatures and all common parts agree, else None."""
        same_common = len({common for _, common in signatures}) <= 1
        inputs = ([digest for digest, _ in signatures], fully_parallel)
        return self._plan if same_common and inputs == self._known else None

    def keep(self, plan: SavePlan, signatures: Sequence[tuple[str, str]], *, fully_parallel: bool = False) -> None:
        """Replace the cached plan."""
        self._known, self._plan = ([digest for digest, _ in signatures], fully_parallel), plan


def plan_save(declared: Sequence[LocalPlan], *, fully_parallel: bool = False) -> SavePlan:
    """Plan a save from the local plans of all ranks, in rank order.

    The rank that holds a main replica stores it. With `fully_parallel`, any rank that holds a replica may: chunks that
    several ranks hold are distributed by size, the largest first, always to the rank with the fewest bytes so far.

    Raises `CheckpointingException` if ranks disagree about a tensor's dtype or global shape, if main replicas do not
    cover a tensor or a grid of objects exactly once, or if common parts differ; the message names key, ranks and
    offsets.
    """
    if not declared:
        raise CheckpointingException("no rank declared anything: there is nothing to save")
    common = _differing_common([plan.common for plan in declared], [plan.common_digest() for plan in declared])
    tensors, wrong_tensors = _plan_kind("tensor", [plan.tensors for plan in declared], fully_parallel)
    objects, wrong_objects = _plan_kind("object", [plan.objects for plan in declared], fully_parallel=False)
    if wrong := [*wrong_tensors, *wrong_objects, *common]:
        more = f"\n  and {len(wrong) - MOST_KEYS_SAID} keys more" if len(wrong) > MOST_KEYS_SAID else ""
        raise CheckpointingException(
            f"what {said(range(len(declared)))} hold is no whole checkpoint, and nothing was written:\n  "
            + "\n  ".join(message() for message in wrong[:MOST_KEYS_SAID])
            + more
        )
    loads = np.bincount(tensors.rank, weights=tensors.nbytes(), minlength=len(declared))
    return SavePlan(len(declared), tuple(int(load) for load in loads), tensors, objects)


def _plan_kind(
    kind: str, tables: Sequence[ChunkTable], fully_parallel: bool
) -> tuple[ChunkIndex, list[Callable[[], str]]]:
    """Return the catalog of the chunks to store, and a function per faulty key that describes the fault.

    Descriptions are costly, and an error shows the first few only, so they are computed on demand.
    """
    keys = _Keys(tables)
    chunks = keys.mains()
    sound = covers_exactly_once(chunks.key, chunks.offset, chunks.shape, keys.whole) | keys.disputed
    wrong = [_later(keys.dispute, kind, row) for row in np.flatnonzero(keys.disputed).tolist()]
    wrong += [_later(keys.faults, kind, row, chunks) for row in np.flatnonzero(~sound).tolist()]
    if fully_parallel and not wrong:
        shared = keys.held_more_than_once(chunks.key)
        if not shared.any():
            return chunks, wrong
        rank, position = balance_replicas(tables, keys.rows, chunks, chunks.nbytes(), shared)
        order = np.lexsort((position, rank))
        chunks = ChunkIndex(
            chunks.keys,
            chunks.dtypes,
            chunks.axes,
            chunks.whole,
            *(column[order] for column in (chunks.key, chunks.offset, chunks.shape, rank, position)),
        )
    return chunks, wrong


def _later(say: Callable[..., str], *arguments: object) -> Callable[[], str]:
    return lambda: say(*arguments)


class _Keys:
    """The keys of all ranks: global shape, number of axes and dtype by row, and the keys that ranks disagree about.

    `disputed` marks rows whose dtype or global shape differs between ranks. Ranks often hold the same keys, so tables
    with equal `head` digests are processed once.
    """

    def __init__(self, tables: Sequence[ChunkTable]) -> None:
        self.tables = tables
        number: defaultdict[str, int] = defaultdict(count().__next__)
        code: defaultdict[str, int] = defaultdict(count().__next__)
        self.rows: dict[bytes, Integers] = {}  # by head: the key's row, per chunk
        heads: dict[bytes, ChunkTable] = {}
        for table in tables:
            if table.head not in heads:
                heads[table.head] = table
                self.rows[table.head] = np.fromiter(map(number.__getitem__, table.keys()), np.int64, len(table))
        self.names = list(number)
        self.width = max(table.width for table in tables)
        self.whole = np.ones((len(number), self.width), np.int64)
        self.axes = np.zeros(len(number), np.int64)
        dtype = np.zeros(len(number), np.int64)
        dtypes = {head: np.asarray([code[name] for name in table.dtypes], np.int64) for head, table in heads.items()}
        for head, table in heads.items():
            rows = self.rows[head]
            self.whole[rows] = padded(table.global_shape, self.width, 1)
            self.axes[rows], dtype[rows] = table.axes, dtypes[head][table.dtype] if len(table) else 0
        self.disputed = np.zeros(len(number), np.bool_)
        for head, table in heads.items():
            rows = self.rows[head]
            global_shape = padded(table.global_shape, self.width, 1)
            self.disputed[rows[(self.whole[rows] != global_shape).any(axis=1)]] = True
            self.disputed[rows[self.axes[rows] != table.axes]] = True
            if len(table):
                self.disputed[rows[dtype[rows] != dtypes[head][table.dtype]]] = True
        dtype_names = list(code)
        self.dtypes = [dtype_names[index] for index in dtype.tolist()]

    def mains(self) -> ChunkIndex:
        """Return all non-empty main replicas."""
        parts: list[tuple[Integers, Integers, Integers, Integers, Integers]] = []
        full: dict[bytes, npt.NDArray[np.bool_]] = {}
        for rank, table in enumerate(self.tables):
            if table.layout not in full:
                full[table.layout] = np.asarray((table.shape > 0).all(axis=1), np.bool_)
            positions = np.flatnonzero(table.main & full[table.layout])
            offset, shape = (
                padded(table.offset[positions], self.width, 0),
                padded(table.shape[positions], self.width, 1),
            )
            parts.append((self.rows[table.head][positions], offset, shape, np.full(len(positions), rank), positions))
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ChunkIndex(self.names, self.dtypes, self.axes, self.whole, *columns)

    def held_more_than_once(self, mains: Integers) -> npt.NDArray[np.bool_]:
        """Return by key whether it has more non-empty chunks than main ones, whose keys are `mains`."""
        chunks = np.zeros(len(self.names), np.int64)
        times: dict[bytes, int] = {}
        for table in self.tables:
            times[table.layout] = times.get(table.layout, 0) + 1
        for table in {table.layout: table for table in self.tables}.values():
            np.add.at(chunks, self.rows[table.head][(table.shape > 0).all(axis=1)], times[table.layout])
        return np.asarray(chunks > np.bincount(mains, minlength=len(self.names)), np.bool_)

    def _chunks(self, row: int) -> Iterator[tuple[int, ChunkTable, int]]:
        """Yield the chunks of a key as (rank, table, position in the table)."""
        for rank, table in enumerate(self.tables):
            for position in np.flatnonzero(self.rows[table.head] == row).tolist():
                yield rank, table, position

    def dispute(self, kind: str, row: int) -> str:
        """Describe the differing dtypes and global shapes of a key, with the ranks that declare them."""
        sides: dict[str, set[int]] = {}
        for rank, table, at in self._chunks(row):
            shape = tuple(table.global_shape[at, : table.axes[at]].tolist())
            dtype = f"{table.dtypes[table.dtype[at]]}, " if kind == "tensor" else ""
            sides.setdefault(f"{dtype}global shape {shape}", set()).add(rank)
        differences = "; ".join(f"{side} on {said(ranks)}" for side, ranks in sides.items())
        return f"{kind} {self.names[row]!r} is not the same on all ranks: {differences}"

    def faults(self, kind: str, row: int, held: ChunkIndex) -> str:
        """Describe the coverage errors of a key's main replicas."""
        axes = int(self.axes[row])
        whole = tuple(self.whole[row, :axes].tolist())
        selected = held.key == row
        mains = ChunkBoxes(held.offset[selected, :axes], held.shape[selected, :axes], held.rank[selected])
        rest = [
            (table.offset[at, :axes], table.shape[at, :axes], rank)
            for rank, table, at in self._chunks(row)
            if not table.main[at] and (table.shape[at] > 0).all()
        ]
        others = ChunkBoxes(
            np.asarray([offset for offset, _, _ in rest], np.int64).reshape(len(rest), axes),
            np.asarray([shape for _, shape, _ in rest], np.int64).reshape(len(rest), axes),
            np.asarray([rank for _, _, rank in rest], np.int64),
        )
        subject = f"tensor {self.names[row]!r} ({self.dtypes[row]}, global shape {whole})"
        if kind == "object":
            subject = f"object {self.names[row]!r} (global shape {whole})"
        return f"{subject}: {'; '.join(coverage_errors(whole, mains, others))}"


def _differing_common(commons: Sequence[Mapping[str, str]], digests: Sequence[str]) -> list[Callable[[], str]]:
    """Return a function per path of the common part that differs between ranks, describing the difference."""
    if len(set(digests)) == 1:
        return []
    wrong = []
    for path in {path: None for common in commons for path in common}:
        sides = group_ranks((rank, common.get(path)) for rank, common in enumerate(commons))
        if len(sides) > 1:
            wrong.append(_later(_say_common, path, sides))
    return wrong


def _say_common(path: str, sides: Mapping[str | None, Sequence[int]]) -> str:
    holders = [said(ranks) for value, ranks in sides.items() if value is not None]
    subject = f"common value {path!r}" if path else "the common part"
    absent = f"not on {said(sides[None])}" if None in sides else ""
    if len(holders) == 1:
        return f"{subject} is on {holders[0]}, {absent}"
    differs = " differs from that on ".join([f"{subject}: that on {holders[0]}", *holders[1:]])
    return f"{differs}{f'; it is {absent}' if absent else ''}. Make it the same, or a ShardedObject"


def balance_replicas(
    tables: Sequence[ChunkTable],
    rows: Mapping[bytes, Integers],
    mains: ChunkIndex,
    nbytes: Integers,
    shared: npt.NDArray[np.bool_],
) -> tuple[Integers, Integers]:
    """Assign every main chunk to one of the ranks that hold a replica of it, balancing bytes per rank.

    `rows` maps a table's head to the key of every chunk, `shared` marks the keys that have replicas. `mains` must fill
    their tensors exactly once. Chunks are assigned greedily, the largest first, to the candidate that stores the fewest
    bytes so far, the lowest rank on ties; chunks without replicas are counted first and stay where they are.

    Returns two arrays by main chunk: the rank that stores it, and the chunk's position in that rank's table.
    """
    rank, position = mains.rank.copy(), mains.position.copy()
    many = shared[mains.key] if len(mains.key) else np.zeros(0, np.bool_)
    loads = np.bincount(rank[~many], weights=nbytes[~many], minlength=len(tables)).astype(np.int64).tolist()
    alike: dict[bytes, list[int]] = {}  # ranks with the same chunks in the same order have the same candidates
    for number, table in enumerate(tables):
        alike.setdefault(table.layout, []).append(number)
    rank_sets = list(alike.values())
    chunks = np.flatnonzero(many)
    group, rank_set, place = _find_replicas(tables, rows, mains, chunks, [ranks[0] for ranks in rank_sets], shared)
    starts = np.searchsorted(group, np.arange(len(chunks) + 1)).tolist()
    set_of, place_of = rank_set.tolist(), place.tolist()
    # Chunks with the same rank sets share a heap of (load, rank, index of the rank set). A rank can be in several
    # heaps; its entries in the other heaps become outdated and are corrected when they reach the top. Loads only grow,
    # so an up-to-date top entry is the minimum.
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    sizes = nbytes[chunks]
    order = np.argsort(-sizes, kind="stable")
    new_rank, new_position = np.empty(len(chunks), np.int64), np.empty(len(chunks), np.int64)
    for chunk, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        start, stop = starts[chunk], starts[chunk + 1]
        members = tuple(set_of[start:stop])
        heap = heaps.get(members)
        if heap is None:
            heap = heaps[members] = sorted(
                (loads[candidate], candidate, which)
                for which, number in enumerate(members)
                for candidate in rank_sets[number]
            )
        load, chosen, which = heap[0]
        while load != loads[chosen]:  # outdated: another group of chunks has increased the rank's load
            heapreplace(heap, (loads[chosen], chosen, which))
            load, chosen, which = heap[0]
        loads[chosen] += size
        heapreplace(heap, (loads[chosen], chosen, which))
        new_rank[chunk], new_position[chunk] = chosen, place_of[start + which]
    rank[chunks], position[chunks] = new_rank, new_position
    return rank, position


def _find_replicas(
    tables: Sequence[ChunkTable],
    rows: Mapping[bytes, Integers],
    mains: ChunkIndex,
    chunks: Integers,
    firsts: Sequence[int],
    shared: npt.NDArray[np.bool_],
) -> tuple[Integers, Integers, Integers]:
    """Return the replicas of the main chunks as three arrays, ordered by chunk.

    The arrays are: index into `chunks`, number of the rank set, and position in that set's table. `chunks` are rows of
    `mains`; a rank set is the ranks with one `layout`, and `firsts` has the first rank of every set.
    """
    width = mains.offset.shape[1]
    keys, offsets, shapes = [mains.key[chunks]], [mains.offset[chunks]], [mains.shape[chunks]]
    rank_sets, places = [np.full(len(chunks), -1)], [chunks]
    for number, first in enumerate(firsts):
        table = tables[first]
        if not len(table):
            continue
        candidates = np.flatnonzero(shared[rows[table.head]] & (table.shape > 0).all(axis=1))
        more = ((0, 0), (0, width - table.width))
        keys.append(rows[table.head][candidates])
        offsets.append(np.pad(table.offset[candidates], more))
        shapes.append(np.pad(table.shape[candidates], more, constant_values=1))
        rank_sets.append(np.full(len(candidates), number))
        places.append(candidates)
    key, offset, shape = np.concatenate(keys), np.concatenate(offsets), np.concatenate(shapes)
    rank_set, place = np.concatenate(rank_sets), np.concatenate(places)
    at = np.zeros(len(key), np.int64)  # row-major index of the offset in the whole tensor
    for axis in range(width):
        at = at * mains.whole[key, axis] + offset[:, axis]
    # Sort main chunks and candidates together by key and offset. A candidate follows the main chunk with its key and
    # offset, so it is a replica if those and the shape equal the last main chunk's.
    order = np.lexsort((place, rank_set, at, key))  # a main chunk, of rank set -1, precedes its replicas
    main = np.maximum.accumulate(np.where(rank_set[order] < 0, np.arange(len(order)), 0))
    head = order[main]
    same = (rank_set[order] >= 0) & (key[head] == key[order]) & (at[head] == at[order])
    same &= (shape[head] == shape[order]).all(axis=1)
    replicas, chunk = order[same], np.searchsorted(chunks, place[head[same]])
    by_chunk = np.argsort(chunk, kind="stable")
    return chunk[by_chunk], rank_set[replicas][by_chunk], place[replicas][by_chunk]


class PlannedChunk(NamedTuple):
    """A chunk of a tensor, in elements, and the rank that stores it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int


class PlannedTensor(NamedTuple):
    """A tensor as it will be stored; empty chunks are left out, so a tensor without elements has none."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[PlannedChunk, ...]


@dataclass(frozen=True, eq=False)
class ChunkIndex:
    """The chunks to be stored, as arrays: one row per chunk, ordered by rank and position.

    `whole` (keys, axes) are the global shapes; `key` (chunks,) is the row of a chunk's key; `offset` and `shape` are
    (chunks, axes); `position` is the chunk's place in the local plan of its rank.
    """

    keys: list[str]
    dtypes: list[str]
    axes: Integers
    whole: Integers
    key: Integers
    offset: Integers
    shape: Integers
    rank: Integers
    position: Integers

    def of_rank(self, rank: int) -> Integers:
        """Return the positions of the chunks that a rank stores."""
        start, stop = np.searchsorted(self.rank, (rank, rank + 1))
        return self.position[start:stop]

    @cached_property
    def _order(self) -> tuple[Integers, Integers]:
        """Return the rows ordered by key and offset, and the start of every key's rows in that order."""
        order = np.lexsort((*self.offset.T[::-1], self.key))
        return order, np.searchsorted(self.key[order], np.arange(len(self.keys) + 1))

    def chunks(self) -> Iterator[tuple[str, PlannedTensor]]:
        """Yield every key with its planned tensor, chunks ordered by offset."""
        order, starts = self._order
        for row, key in enumerate(self.keys):
            axes, members = int(self.axes[row]), order[starts[row] : starts[row + 1]]
            offsets, shapes = self.offset[members, :axes].tolist(), self.shape[members, :axes].tolist()
            rows = zip(map(tuple, offsets), map(tuple, shapes), self.rank[members].tolist(), strict=True)
            yield (
                key,
                PlannedTensor(
                    self.dtypes[row],
                    tuple(self.whole[row, :axes].tolist()),
                    tuple(PlannedChunk(*fields) for fields in rows),
                ),
            )

    def nbytes(self) -> Integers:
        """Return the size of every chunk's data, in bytes."""
        sizes = np.asarray([itemsize(dtype) for dtype in self.dtypes], np.int64)
        return chunk_volumes(self.shape) * sizes[self.key] if len(self.key) else np.zeros(0, np.int64)


def padded(extents: Integers, width: int, fill: int) -> Integers:
    """Pad rows of extents (rows, axes) with `fill` to `width` axes."""
    more = width - extents.shape[1]
    return np.pad(extents, ((0, 0), (0, more)), constant_values=fill) if more else extents
