"""Plan a save as data: validate all ranks' shards against one another and assign chunks to ranks.

The planner is pure: no torch, files or communication. Its result depends on the local plans alone, so all ranks that
plan from the same local plans get the same save plan, or the same error.

`plan_save` is the entry point, `balance_replicas` spreads replicated chunks over the ranks, `ChunkIndex` is the catalog
of the chunks to be stored with the ranks that store them, and `PlanCache` keeps the plan for the next save.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankbook.checkpoint.local_plan import (
    ChunkBoxes,
    ChunkTable,
    Integers,
    LocalPlan,
    LocalShard,
    chunk_volumes,
    coverage_errors,
    covers_exactly_once,
    itemsize,
)
from rankbook.errors import CheckpointError
from rankbook.ranks import abbreviate_ranks, group_ranks

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

MAX_KEYS_LISTED = 8
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
            f"{key}/shard_{'.'.join(map(str, chunk.offset))}_{'.'.join(map(str, grid.shape))}": chunk.rank
            for key, grid in self.all_objects.chunks()
            for chunk in grid.chunks
        }


class PlanCache:
    """Cache of the previous save's plan, valid as long as all ranks declare the same shards.

    Ranks first exchange `LocalPlan.signature()`; if `get` returns a plan, they need not exchange their local plans.
    """

    def __init__(self) -> None:
        self._signatures: tuple[list[str], bool] | None = None
        self._plan: SavePlan | None = None

    def get(self, signatures: Sequence[tuple[str, str]], *, fully_parallel: bool = False) -> SavePlan | None:
        """Return the cached plan if it was made for these signatures and all common parts agree, else None."""
        # The common part may have changed since the last save, as long as it has changed alike on all ranks. If it
        # differs, the ranks must declare in full, so that the message can name the differing paths.
        same_common = len({common for _, common in signatures}) <= 1
        inputs = ([digest for digest, _ in signatures], fully_parallel)
        return self._plan if same_common and inputs == self._signatures else None

    def put(self, plan: SavePlan, signatures: Sequence[tuple[str, str]], *, fully_parallel: bool = False) -> None:
        """Replace the cached plan."""
        self._signatures, self._plan = ([digest for digest, _ in signatures], fully_parallel), plan


def plan_save(declared: Sequence[LocalPlan], *, fully_parallel: bool = False) -> SavePlan:
    """Plan a save from the local plans of all ranks, in rank order.

    The rank that holds a main replica stores it. With `fully_parallel`, any rank that holds a replica may: chunks that
    several ranks hold are distributed by size, the largest first, always to the rank with the fewest bytes so far.

    Raises `CheckpointError` if ranks disagree about a tensor's dtype or global shape, if main replicas do not
    cover a tensor or a grid of objects exactly once, or if common parts differ; the message names key, ranks and
    offsets.
    """
    if not declared:
        raise CheckpointError("nothing to save: no rank has declared a local plan")
    common = _differing_common([plan.common for plan in declared], [plan.common_digest() for plan in declared])
    tensors, wrong_tensors = _plan_kind("tensor", [plan.tensors for plan in declared], fully_parallel)
    objects, wrong_objects = _plan_kind("object", [plan.objects for plan in declared], fully_parallel=False)
    if wrong := [*wrong_tensors, *wrong_objects, *common]:
        more = f"\n  and {len(wrong) - MAX_KEYS_LISTED} more keys" if len(wrong) > MAX_KEYS_LISTED else ""
        raise CheckpointError(
            f"the shards of {abbreviate_ranks(range(len(declared)))} do not form a complete checkpoint; nothing was "
            "written:\n  " + "\n  ".join(message() for message in wrong[:MAX_KEYS_LISTED]) + more
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
    chunks = keys.main_chunks()
    # A conflicting key is reported as such; its coverage would be checked against one of several shapes.
    covered = covers_exactly_once(chunks.key, chunks.offset, chunks.shape, keys.global_shape) | keys.conflicting
    wrong = [_deferred(keys.describe_conflict, kind, row) for row in np.flatnonzero(keys.conflicting).tolist()]
    wrong += [_deferred(keys.describe_coverage, kind, row, chunks) for row in np.flatnonzero(~covered).tolist()]
    # Replicas are assigned only if the main ones are right, since every replica is found by its main one.
    if fully_parallel and not wrong:
        shared = keys.replicated(chunks.key)
        if not shared.any():
            return chunks, wrong
        rank, position = balance_replicas(tables, keys.rows, chunks, chunks.nbytes(), shared)
        # `of_rank` requires the rows ordered by rank, and by position within it.
        order = np.lexsort((position, rank))
        chunks = ChunkIndex(
            chunks.keys,
            chunks.dtypes,
            chunks.axes,
            chunks.global_shape,
            *(column[order] for column in (chunks.key, chunks.offset, chunks.shape, rank, position)),
        )
    return chunks, wrong


def _deferred(describe: Callable[..., str], *arguments: object) -> Callable[[], str]:
    return lambda: describe(*arguments)


# The planner works on arrays with a row per key or per chunk, because a job may have a million chunks. An example
# with two ranks and the tensors "w" of shape (4, 2), cut in two, and "b" of shape (2,), held by both:
#
#     rank 0: w (0, 0) (2, 2) main     b (0,) (2,) main
#     rank 1: w (2, 0) (2, 2) main     b (0,) (2,) replica
#
# _Keys:       names ["w", "b"], global_shape [[4, 2], [2, 1]], axes [2, 1]: "b" is padded to two axes with extent 1
# main_chunks: key [0, 1, 0], rank [0, 0, 1], position [0, 1, 0], offset [[0, 0], [0, 0], [2, 0]]
# replicated:  [False, True]: "b" has two chunks, and only one of them is a main one
#
# Without `fully_parallel` rank 0 stores w[0:2] and b, rank 1 stores w[2:4]. With it, rank 1 still stores w[2:4] only:
# its load is equal to that of rank 0 when "b" is assigned, and the lower rank wins.
class _Keys:
    """The keys of all ranks: global shape, number of axes and dtype by row, and the keys that ranks disagree about.

    `conflicting` marks rows whose dtype or global shape differs between ranks. Ranks often hold the same keys, so
    tables with equal `key_digest` digests are processed once.
    """

    def __init__(self, tables: Sequence[ChunkTable]) -> None:
        self.tables = tables
        # Numbers in order of first occurrence: looking up a new key gives it the next number.
        number: defaultdict[str, int] = defaultdict(count().__next__)
        code: defaultdict[str, int] = defaultdict(count().__next__)
        self.rows: dict[bytes, Integers] = {}  # by key digest: the key's row, per chunk
        # With data parallelism all ranks declare the same keys, whose names are then decoded once.
        tables_by_digest: dict[bytes, ChunkTable] = {}
        for table in tables:
            if table.key_digest not in tables_by_digest:
                tables_by_digest[table.key_digest] = table
                self.rows[table.key_digest] = np.fromiter(map(number.__getitem__, table.keys()), np.int64, len(table))
        self.names = list(number)
        self.width = max(table.width for table in tables)
        self.global_shape = np.ones((len(number), self.width), np.int64)
        self.axes = np.zeros(len(number), np.int64)
        dtype = np.zeros(len(number), np.int64)
        dtypes = {
            key_digest: np.asarray([code[name] for name in table.dtypes], np.int64)
            for key_digest, table in tables_by_digest.items()
        }
        for key_digest, table in tables_by_digest.items():
            rows = self.rows[key_digest]
            self.global_shape[rows] = padded(table.global_shape, self.width, 1)
            self.axes[rows], dtype[rows] = table.axes, dtypes[key_digest][table.dtype] if len(table) else 0
        # The first loop has written one table's values per key. A table that differs from these conflicts with another
        # one.
        self.conflicting = np.zeros(len(number), np.bool_)
        for key_digest, table in tables_by_digest.items():
            rows = self.rows[key_digest]
            global_shape = padded(table.global_shape, self.width, 1)
            self.conflicting[rows[(self.global_shape[rows] != global_shape).any(axis=1)]] = True
            self.conflicting[rows[self.axes[rows] != table.axes]] = True
            if len(table):
                self.conflicting[rows[dtype[rows] != dtypes[key_digest][table.dtype]]] = True
        dtype_names = list(code)
        self.dtypes = [dtype_names[index] for index in dtype.tolist()]

    def main_chunks(self) -> ChunkIndex:
        """Return all non-empty main replicas."""
        parts: list[tuple[Integers, Integers, Integers, Integers, Integers]] = []
        # Chunks without elements are not stored.
        full: dict[bytes, npt.NDArray[np.bool_]] = {}
        for rank, table in enumerate(self.tables):
            if table.layout not in full:
                full[table.layout] = np.asarray((table.shape > 0).all(axis=1), np.bool_)
            # Rows are appended rank by rank, so the result is ordered by rank and position, as `ChunkIndex` promises.
            positions = np.flatnonzero(table.main & full[table.layout])
            offset, shape = (
                padded(table.offset[positions], self.width, 0),
                padded(table.shape[positions], self.width, 1),
            )
            parts.append(
                (self.rows[table.key_digest][positions], offset, shape, np.full(len(positions), rank), positions)
            )
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ChunkIndex(self.names, self.dtypes, self.axes, self.global_shape, *columns)

    def replicated(self, main_chunks: Integers) -> npt.NDArray[np.bool_]:
        """Return by key whether it has more non-empty chunks than main ones, whose keys are `main_chunks`."""
        chunks = np.zeros(len(self.names), np.int64)
        times: dict[bytes, int] = {}
        for table in self.tables:
            # Ranks with the same layout hold the same chunks, so one of them is counted as often as there are such
            # ranks.
            times[table.layout] = times.get(table.layout, 0) + 1
        for table in {table.layout: table for table in self.tables}.values():
            np.add.at(chunks, self.rows[table.key_digest][(table.shape > 0).all(axis=1)], times[table.layout])
        return np.asarray(chunks > np.bincount(main_chunks, minlength=len(self.names)), np.bool_)

    def _chunks(self, row: int) -> Iterator[tuple[int, ChunkTable, int]]:
        """Yield the chunks of a key as (rank, table, position in the table)."""
        for rank, table in enumerate(self.tables):
            for position in np.flatnonzero(self.rows[table.key_digest] == row).tolist():
                yield rank, table, position

    def describe_conflict(self, kind: str, row: int) -> str:
        """Describe the differing dtypes and global shapes of a key, with the ranks that declare them."""
        # The declared dtype and shape, as text, with the ranks that declared it: more than one entry is the conflict.
        sides: dict[str, set[int]] = {}
        for rank, table, at in self._chunks(row):
            shape = tuple(table.global_shape[at, : table.axes[at]].tolist())
            dtype = f"{table.dtypes[table.dtype[at]]}, " if kind == "tensor" else ""
            sides.setdefault(f"{dtype}global shape {shape}", set()).add(rank)
        differences = "; ".join(f"{side} on {abbreviate_ranks(ranks)}" for side, ranks in sides.items())
        return f"{kind} {self.names[row]!r} is not the same on all ranks: {differences}"

    def describe_coverage(self, kind: str, row: int, row_chunks: ChunkIndex) -> str:
        """Describe the coverage errors of a key's main replicas."""
        axes = int(self.axes[row])
        global_shape = tuple(self.global_shape[row, :axes].tolist())
        # Replicas that are not main ones help to explain a hole: usually two ranks disagree about which of them is
        # main.
        selected = row_chunks.key == row
        main_chunks = ChunkBoxes(
            row_chunks.offset[selected, :axes], row_chunks.shape[selected, :axes], row_chunks.rank[selected]
        )
        rest = [
            (table.offset[at, :axes], table.shape[at, :axes], rank)
            for rank, table, at in self._chunks(row)
            if not table.main[at] and (table.shape[at] > 0).all()
        ]
        other_chunks = ChunkBoxes(
            np.asarray([offset for offset, _, _ in rest], np.int64).reshape(len(rest), axes),
            np.asarray([shape for _, shape, _ in rest], np.int64).reshape(len(rest), axes),
            np.asarray([rank for _, _, rank in rest], np.int64),
        )
        subject = f"tensor {self.names[row]!r} ({self.dtypes[row]}, global shape {global_shape})"
        if kind == "object":
            subject = f"object {self.names[row]!r} (global shape {global_shape})"
        return f"{subject}: {'; '.join(coverage_errors(global_shape, main_chunks, other_chunks))}"


def _differing_common(common_parts: Sequence[Mapping[str, str]], digests: Sequence[str]) -> list[Callable[[], str]]:
    """Return a function per path of the common part that differs between ranks, describing the difference."""
    if len(set(digests)) == 1:
        return []
    wrong = []
    # A dict in place of a set keeps the order of the state dict, in which a user looks for the first difference.
    for path in {path: None for common in common_parts for path in common}:
        sides = group_ranks((rank, common.get(path)) for rank, common in enumerate(common_parts))
        if len(sides) > 1:
            wrong.append(_deferred(_describe_common, path, sides))
    return wrong


_OF_LBFGS = re.compile(r"(^|\.)state\..+\.prev_loss$")
"""Path of the loss that torch's LBFGS has seen last, by which it decides when to stop."""


def _describe_common(path: str, sides: Mapping[str | None, Sequence[int]]) -> str:
    holders = [abbreviate_ranks(ranks) for value, ranks in sides.items() if value is not None]
    subject = f"common value {path!r}" if path else "the common part"
    absent = f"missing on {abbreviate_ranks(sides[None])}" if None in sides else ""
    if len(holders) == 1:
        return f"{subject} exists on {holders[0]}, but is {absent}"
    values = f"one value on {', another on '.join(holders)}{f', {absent}' if absent else ''}"
    advice = "make it equal, or wrap it in a ShardedObject"
    if _OF_LBFGS.search(path):
        advice += "; if it is of LBFGS, let its closure return the same loss on all ranks, such as their mean"
    return f"{subject} differs between ranks ({values}): {advice}"


def balance_replicas(
    tables: Sequence[ChunkTable],
    rows: Mapping[bytes, Integers],
    main_chunks: ChunkIndex,
    nbytes: Integers,
    shared: npt.NDArray[np.bool_],
) -> tuple[Integers, Integers]:
    """Assign every main chunk to one of the ranks that hold a replica of it, balancing bytes per rank.

    `rows` maps a table's key digest to the key of every chunk, `shared` marks the keys that have replicas.
    `main_chunks` must fill their tensors exactly once. Chunks are assigned greedily, the largest first, to the
    candidate that stores the fewest bytes so far, the lowest rank on ties; chunks without replicas are counted first
    and stay where they are.

    Returns two arrays by main chunk: the rank that stores it, and the chunk's position in that rank's table.
    """
    rank, position = main_chunks.rank.copy(), main_chunks.position.copy()
    many = shared[main_chunks.key] if len(main_chunks.key) else np.zeros(0, np.bool_)
    loads = np.bincount(rank[~many], weights=nbytes[~many], minlength=len(tables)).astype(np.int64).tolist()
    alike: dict[bytes, list[int]] = {}  # ranks with the same chunks in the same order have the same candidates
    for number, table in enumerate(tables):
        alike.setdefault(table.layout, []).append(number)
    rank_sets = list(alike.values())
    chunks = np.flatnonzero(many)
    group, rank_set, replica_position = _find_replicas(
        tables, rows, main_chunks, chunks, [ranks[0] for ranks in rank_sets], shared
    )
    starts = np.searchsorted(group, np.arange(len(chunks) + 1)).tolist()
    set_of, position_of = rank_set.tolist(), replica_position.tolist()
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
        new_rank[chunk], new_position[chunk] = chosen, position_of[start + which]
    rank[chunks], position[chunks] = new_rank, new_position
    return rank, position


def _find_replicas(
    tables: Sequence[ChunkTable],
    rows: Mapping[bytes, Integers],
    main_chunks: ChunkIndex,
    chunks: Integers,
    firsts: Sequence[int],
    shared: npt.NDArray[np.bool_],
) -> tuple[Integers, Integers, Integers]:
    """Return the replicas of the main chunks as three arrays, ordered by chunk.

    The arrays are: index into `chunks`, number of the rank set, and position in that set's table. `chunks` are rows of
    `main_chunks`; a rank set is the ranks with one `layout`, and `firsts` has the first rank of every set.
    """
    # Main chunks and all candidates become rows of the same four columns. Sorting then brings every candidate next to
    # its main chunk, in O(n log n) where comparing pairs would take O(n^2).
    width = main_chunks.offset.shape[1]
    keys, offsets, shapes = [main_chunks.key[chunks]], [main_chunks.offset[chunks]], [main_chunks.shape[chunks]]
    rank_sets, replica_positions = [np.full(len(chunks), -1)], [chunks]
    for number, first in enumerate(firsts):
        table = tables[first]
        if not len(table):
            continue
        candidates = np.flatnonzero(shared[rows[table.key_digest]] & (table.shape > 0).all(axis=1))
        more = ((0, 0), (0, width - table.width))
        keys.append(rows[table.key_digest][candidates])
        offsets.append(np.pad(table.offset[candidates], more))
        shapes.append(np.pad(table.shape[candidates], more, constant_values=1))
        rank_sets.append(np.full(len(candidates), number))
        replica_positions.append(candidates)
    key, offset, shape = np.concatenate(keys), np.concatenate(offsets), np.concatenate(shapes)
    rank_set, replica_position = np.concatenate(rank_sets), np.concatenate(replica_positions)
    at = np.zeros(len(key), np.int64)  # row-major index of the offset in the whole tensor
    for axis in range(width):
        at = at * main_chunks.global_shape[key, axis] + offset[:, axis]
    # Sort main chunks and candidates together by key and offset. A candidate follows the main chunk with its key and
    # offset, so it is a replica if those and the shape equal the last main chunk's.
    order = np.lexsort((replica_position, rank_set, at, key))  # a main chunk, of rank set -1, precedes its replicas
    # For every row the index of the last main chunk at or before it: where a row is a main chunk its own index, else 0,
    # and then the running maximum.
    main = np.maximum.accumulate(np.where(rank_set[order] < 0, np.arange(len(order)), 0))
    last_main = order[main]
    same = (rank_set[order] >= 0) & (key[last_main] == key[order]) & (at[last_main] == at[order])
    same &= (shape[last_main] == shape[order]).all(axis=1)
    replicas, chunk = order[same], np.searchsorted(chunks, replica_position[last_main[same]])
    by_chunk = np.argsort(chunk, kind="stable")
    return chunk[by_chunk], rank_set[replicas][by_chunk], replica_position[replicas][by_chunk]


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

    `global_shape` (keys, axes) are the global shapes; `key` (chunks,) is the row of a chunk's key; `offset` and `shape`
    are (chunks, axes); `position` is the chunk's place in the local plan of its rank.
    """

    keys: list[str]
    dtypes: list[str]
    axes: Integers
    global_shape: Integers
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
        # `lexsort` sorts by its last argument first: by key, then by the offset along axis 0, 1 and so on.
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
                    tuple(self.global_shape[row, :axes].tolist()),
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
