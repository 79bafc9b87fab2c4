"""Measure the time to plan a save at scale: `python tests/benchmarks/checkpoint_plan.py`.

The simulated jobs have 1,024 ranks with 5,000 tensors each, and no data: 8-way tensor parallel with 128 replicas, fully
sharded over all ranks, and sharded over 128 with 8 replicas. Measured are the plan made from all ranks' declarations,
and the second save of the same plan: a new declaration of one rank (all ranks make theirs at the same time), its
digests, and the comparison of all ranks' digests with the stored ones. The exchange between the ranks depends on the
network and is not measured; the size of one declaration is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pickle
import statistics
import sys
import time

import numpy as np

from rankbook.checkpoint.local_plan import ChunkTable, LocalPlan, LocalShard
from rankbook.checkpoint.save_plan import PlanCache, plan_save

LIMITS = {"plan": 3.0, "again": 0.3}
"""Seconds."""

JOBS = {
    # name: shards, whether the plan shares replicas out
    "tensor parallel, 8 x 128 replicas": (8, False),
    "tensor parallel, 8 x 128 replicas, shared out": (8, True),
    "fully sharded over 1,024": (1024, False),
    "fully sharded over 1,024, shared out": (1024, True),
    "sharded over 128, 8 replicas, shared out": (128, True),
}


def shards(rank, shard_count, tensors):
    """Return a rank's shards: three matrices of four cut along rows or columns, and a vector."""
    part, main = rank % shard_count, rank < shard_count
    return [
        LocalShard(f"model.layers.{n // 12}.block.{n % 12}.weight", *_cut(n, part, shard_count), "bfloat16", main)
        for n in range(tensors)
    ]


def _cut(number, part, shard_count):
    if number % 4 == 3:
        return (8192,), (8192 // shard_count * part,), (8192 // shard_count,)
    if number % 2:
        return (2048, 8192), (0, 8192 // shard_count * part), (2048, 8192 // shard_count)
    return (8192, 2048 + number), (8192 // shard_count * part, 0), (8192 // shard_count, 2048 + number)


def declare_all(ranks, shard_count, tensors):
    """Return the plans of all ranks. Those after the first `shard_count` are replicas of the first ones."""
    first = [
        LocalPlan.of(shards(rank, shard_count, tensors), (), "the same") for rank in range(min(shard_count, ranks))
    ]
    declared = list(first)
    for rank in range(shard_count, ranks):
        table = first[rank % shard_count].tensors
        copy = dataclasses.replace(table, main=np.zeros_like(table.main), head=b"", layout=b"")
        declared.append(LocalPlan(copy, ChunkTable.of([]), {"": "the same"}))
    return declared


def timed(work, *arguments, **options):
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    result = work(*arguments, **options)
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds, result


def declare(shards_of_rank):
    return LocalPlan.of(shards_of_rank, (), "the same").signature()


def again(cache, signatures, shards_of_rank, fully_parallel):
    return cache.get([*signatures[:-1], declare(shards_of_rank)], fully_parallel=fully_parallel)


def main() -> int:
    options = _options()
    within_limits = True
    for name, (ways, fully_parallel) in JOBS.items():
        if options.only not in name:
            continue
        ranks, tensors = options.ranks, options.tensors
        declared = declare_all(ranks, ways, tensors)
        shards_of_rank = shards(ranks - 1, ways, tensors)
        assert declare(shards_of_rank) == declared[-1].signature()
        seconds = {"plan": [], "again": [], "own": []}
        for _ in range(options.rounds):
            seconds_taken, plan = timed(plan_save, declared, fully_parallel=fully_parallel)
            seconds["plan"].append(seconds_taken)
            cache = PlanCache()
            signatures = pickle.loads(pickle.dumps([member.signature() for member in declared]))
            cache.put(plan, [element.signature() for element in declared], fully_parallel=fully_parallel)
            seconds_taken, reused = timed(again, cache, signatures, shards_of_rank, fully_parallel)
            assert reused is plan
            seconds["again"].append(seconds_taken)
            seconds["own"].append(timed(declare, shards_of_rank)[0])
        loads = plan.bytes_per_rank
        print(f"{name}: {len(plan.all_tensors.key):,} chunks, {ranks:,} ranks x {tensors:,} tensors")
        for kind, label in (("plan", "the plan"), ("again", "the same plan again")):
            middle = statistics.median(seconds[kind])
            within_limits = within_limits and middle <= LIMITS[kind]
            verdict = "held  " if middle <= LIMITS[kind] else "BROKEN"
            print(f"  {verdict} {label}: {middle:.3f} s <= {LIMITS[kind]:g} (worst {max(seconds[kind]):.3f})")
        packed = [item.pack() for item in declared]
        unpacking, _ = timed(lambda packed=packed: [LocalPlan.unpack(entry) for entry in packed])
        declaring, size = statistics.median(seconds["own"]), sum(map(len, packed)) / ranks / 1e3
        print(f"         a rank's own declaration: {declaring:.3f} s, {size:.0f} kB; all unpacked in {unpacking:.2f} s")
        print(f"         bytes per rank: {min(loads):,} to {max(loads):,}", flush=True)
    return 0 if within_limits else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="plans of each job; 5")
    parser.add_argument("--ranks", type=int, default=1024, metavar="N", help="1024, a multiple of every job's shards")
    parser.add_argument("--tensors", type=int, default=5000, metavar="N", help="of each rank; 5000")
    parser.add_argument("--only", default="", metavar="TEXT", help="the jobs with this in their name")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
