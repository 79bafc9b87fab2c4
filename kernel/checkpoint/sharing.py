"""Which of a chunk's replicas is stored, so that the ranks write about as much each.

Owns: finding the ranks that hold the same chunk, and the choice among them. Refuses: chunks that one rank alone holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from rankbook.checkpoint.catalog import Catalog
from rankbook.checkpoint.declared import Integers, Table


def share_out(
    tables: Sequence[Table],
    rows: Mapping[bytes, Integers],
    mains: Catalog,
    nbytes: Integers,
    shared: npt.NDArray[np.bool_],
) -> tuple[Integers, Integers]:
    """For each main replica the rank that stores it, and the chunk's position there.

    `rows` tells by a table's head the key of each of its chunks, `shared` by key whether it has replicas. `mains` fill
    their tensors exactly once. Chunks go by bytes, the largest first, to the candidate that stores least so far, the
    lowest of equals; those without replicas count beforehand.
    """
    rank, position = mains.rank.copy(), mains.position.copy()
    many = shared[mains.key] if len(mains.key) else np.zeros(0, np.bool_)
    loads = np.bincount(rank[~many], weights=nbytes[~many], minlength=len(tables)).astype(np.int64).tolist()
    alike: dict[bytes, list[int]] = {}  # ranks with the same chunks in the same order have the same candidates
    for number, table in enumerate(tables):
        alike.setdefault(table.layout, []).append(number)
    crews = list(alike.values())
    chunks = np.flatnonzero(many)
    group, crew, place = _replicas(tables, rows, mains, chunks, [ranks[0] for ranks in crews], shared)
    starts = np.searchsorted(group, np.arange(len(chunks) + 1)).tolist()
    crew_of, place_of = crew.tolist(), place.tolist()
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    sizes = nbytes[chunks]
    order = np.argsort(-sizes, kind="stable")
    new_rank, new_position = np.empty(len(chunks), np.int64), np.empty(len(chunks), np.int64)
    for chunk, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        start, stop = starts[chunk], starts[chunk + 1]
        members = tuple(crew_of[start:stop])
        heap = heaps.get(members)
        if heap is None:
            heap = heaps[members] = sorted(
                (loads[each], each, which) for which, number in enumerate(members) for each in crews[number]
            )
        load, chosen, which = heap[0]
        while load != loads[chosen]:  # it was given something as a candidate of another group
            heapreplace(heap, (loads[chosen], chosen, which))
            load, chosen, which = heap[0]
        loads[chosen] += size
        heapreplace(heap, (loads[chosen], chosen, which))
        new_rank[chunk], new_position[chunk] = chosen, place_of[start + which]
    rank[chunks], position[chunks] = new_rank, new_position
    return rank, position


def _replicas(
    tables: Sequence[Table],
    rows: Mapping[bytes, Integers],
    mains: Catalog,
    chunks: Integers,
    firsts: Sequence[int],
    shared: npt.NDArray[np.bool_],
) -> tuple[Integers, Integers, Integers]:
    """For each replica of a main chunk, ordered by chunk: the chunk, the crew of ranks, the position there.

    `chunks` are rows of `mains`, `firsts` the first rank of each crew.
    """
    width = mains.offset.shape[1]
    keys, offsets, shapes = [mains.key[chunks]], [mains.offset[chunks]], [mains.shape[chunks]]
    crews, places = [np.full(len(chunks), -1)], [chunks]
    for number, first in enumerate(firsts):
        table = tables[first]
        if not len(table):
            continue
        mine = np.flatnonzero(shared[rows[table.head]] & (table.shape > 0).all(axis=1))
        more = ((0, 0), (0, width - table.width))
        keys.append(rows[table.head][mine])
        offsets.append(np.pad(table.offset[mine], more))
        shapes.append(np.pad(table.shape[mine], more, constant_values=1))
        crews.append(np.full(len(mine), number))
        places.append(mine)
    key, offset, shape = np.concatenate(keys), np.concatenate(offsets), np.concatenate(shapes)
    crew, place = np.concatenate(crews), np.concatenate(places)
    at = np.zeros(len(key), np.int64)  # row-major place of the offset in the whole tensor
    for axis in range(width):
        at = at * mains.whole[key, axis] + offset[:, axis]
    order = np.lexsort((place, crew, at, key))  # a main chunk, of crew -1, comes before all replicas of it
    main = np.maximum.accumulate(np.where(crew[order] < 0, np.arange(len(order)), 0))
    head = order[main]
    same = (crew[order] >= 0) & (key[head] == key[order]) & (at[head] == at[order])
    same &= (shape[head] == shape[order]).all(axis=1)
    found, chunk = order[same], np.searchsorted(chunks, place[head[same]])
    by_chunk = np.argsort(chunk, kind="stable")
    return chunk[by_chunk], crew[found][by_chunk], place[found][by_chunk]
