"""Measure the time of a checkpoint: `python tests/benchmarks/checkpoint.py`.

Two ranks hold half a gigabyte each, as eight tensors. In each round every tool does its job once, in an order that both
ranks draw from the same seed; the time is that of the slower rank, and every ratio is to a plain write and fsync of the
same bytes in the same round. Rankbook is compared with torch.distributed.checkpoint, which writes neither checksums nor
a commit. `checkpoint_plan.py` measures the planning with many ranks.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.rank_processes import run_ranks

LIMITS = {
    "save": 1.3,
    "load, verified": 0.45,
    "load": 0.25,
    "async: training blocked": 0.08,
}
"""The median of the ratios to a plain write and fsync, Rankbook's."""

MATMUL = 0.75
"""Minimum share of its rate that a loop of matrix products keeps during an asynchronous save."""

SLICE = 0.1
"""A slice of 64 MiB out of 1 GiB, as a share of the time that torch.distributed.checkpoint takes for it."""


def measure(folder, rounds, seed, megabytes):  # noqa: C901 - every job in one place
    """Return the seconds of every job on one rank, round by round."""
    import os
    import time

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from rankbook.checkpoint import ShardedTensor, load, save

    rank, world = dist.get_rank(), dist.get_world_size()
    rows = megabytes * 1024 * 1024 // 8 // 4 // 1024 // world
    tensors = [torch.randn(rows, 1024) for _ in range(8)]
    others = [torch.zeros(rows, 1024) for _ in range(8)]
    root = Path(folder)

    def state(data):
        return {
            f"t{number}": ShardedTensor.from_rank_offsets(f"t{number}", item, (0, rank, world))
            for number, item in enumerate(data)
        }

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))

    def of_torch(data):
        return {f"t{number}": DTensor.from_local(item, mesh, [Shard(0)]) for number, item in enumerate(data)}

    def raw(number):
        with (root / f"raw-{number}-{rank}").open("wb", buffering=0) as file:
            for tensor in tensors:
                data = tensor.numpy().reshape(-1).view("uint8").data
                while data:
                    data = data[file.write(data) :]
            os.fsync(file.fileno())

    def saved(number):
        save(state(tensors), root / "ours", step=number, keep=2)

    def beside(number):
        handle = save(state(tensors), root / "async", step=number, keep=2, async_=True)
        blocked.append(time.perf_counter() - start)
        handle.wait()

    def saved_by_torch(number):
        dcp.save(of_torch(tensors), checkpoint_id=str(root / f"torch-{number}"))

    def loaded(_number, verify=True):
        load(state(others), root / "ours", verify=verify)

    def loaded_by_torch(number):
        dcp.load(of_torch(others), checkpoint_id=str(root / f"torch-{number}"))

    chance = random.Random(seed)
    seconds = {}
    blocked = []
    writes = {"raw": raw, "save": saved, "torch's save": saved_by_torch, "async": beside}
    reads = {
        "load, verified": loaded,
        "load": lambda number: loaded(number, verify=False),
        "torch's load": loaded_by_torch,
    }
    for number in range(rounds + 1):  # the first one warms up
        for jobs in (writes, reads):
            for name in chance.sample(sorted(jobs), len(jobs)):
                if rank == 0:
                    os.sync()
                dist.barrier()
                start = time.perf_counter()
                jobs[name](number)
                elapsed = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
                if number:
                    seconds.setdefault(name, []).append(elapsed.item())
                if name == "async":
                    stalled = torch.tensor(blocked.pop())
                    dist.all_reduce(stalled, op=dist.ReduceOp.MAX)
                    if number:
                        seconds.setdefault("async: training blocked", []).append(stalled.item())
        assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))
        dist.barrier()
        if rank == 0:
            for path in root.glob("torch-*"):
                shutil.rmtree(path)
            for element in root.glob("raw-*"):
                element.unlink()
        dist.barrier()
    return seconds


def beside_training(folder, rounds, megabytes):
    """Return the rate of matrix products on one rank during our and torch's asynchronous save, relative to no save."""
    import time

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from rankbook.checkpoint import ShardedTensor, save

    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(megabytes * 1024 // 4 // world, 1024)
    a, b = torch.randn(256, 256), torch.randn(256, 256)

    def rate(until):
        count, start = 0, time.perf_counter()
        while not until(time.perf_counter() - start):
            for _ in range(10):
                a @ b
            count += 10
        return count / (time.perf_counter() - start)

    rates = {"ours": [], "torch's": []}
    for number in range(rounds):
        alone = rate(lambda passed: passed > 1.0)
        shard = ShardedTensor.from_rank_offsets("t", data, (0, rank, world))
        handle = save({"t": shard}, folder + "/ours", step=number, keep=1, async_=True)
        rates["ours"].append(rate(lambda _, handle=handle: handle.done) / alone)
        dist.barrier()
        alone = rate(lambda passed: passed > 1.0)
        future = dcp.async_save({f"t{rank}": data}, checkpoint_id=f"{folder}/torch-{number}", process_group=None)
        rates["torch's"].append(rate(lambda _, future=future: future.done()) / alone)
        future.result()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{folder}/torch-{number}")
        dist.barrier()
    return rates


def slices(folder, rounds):
    """Return the seconds to read 64 MiB of a tensor of 1 GiB, by our loader and by torch's."""
    import time

    import torch
    import torch.distributed.checkpoint as dcp

    from rankbook.checkpoint import ShardedTensor, load, save

    tensor = torch.randn(262144, 1024)
    save({"t": ShardedTensor.from_rank_offsets("t", tensor)}, folder)
    part = torch.zeros(16384, 1024)
    seconds = {"ours": [], "torch's": []}

    for _ in range(rounds):
        start = time.perf_counter()
        request = ShardedTensor("t", part, torch.float32, (16384, 1024), (262144, 1024), (16384, 0), None)
        load({"t": request}, folder)
        seconds["ours"].append(time.perf_counter() - start)
        assert torch.equal(part, tensor[16384:32768])
        start = time.perf_counter()
        dcp.load({"t": torch.empty_like(tensor)}, checkpoint_id=f"{folder}/step-0")
        seconds["torch's"].append(time.perf_counter() - start)
    return seconds


def main() -> int:
    options = _options()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    within_limits = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = run_ranks(measure, 2, folder, options.rounds, seed, options.megabytes, timeout=1800)[0]
        plain = seconds["raw"]
        print(f"raw write and fsync: {statistics.median(plain):.2f} s for {options.megabytes} MB, {len(plain)} rounds")
        for name, seconds_of_job in seconds.items():
            if name == "raw":
                continue
            ratios = [one / other for one, other in zip(seconds_of_job, plain, strict=True)]
            within_limits = _say(f"{name} / raw", statistics.median(ratios), LIMITS.get(name), ratios) and within_limits
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = run_ranks(beside_training, 2, folder, options.rounds, options.megabytes, timeout=1800)[0]
        for name, rates in results.items():
            limit = MATMUL if name == "ours" else None
            within_limits = (
                _say(f"matrix products beside a save, {name}", statistics.median(rates), limit, rates, least=True)
                and within_limits
            )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds_of_job = run_ranks(slices, 1, folder, options.rounds, timeout=1800)[0]
        ratios = [one / other for one, other in zip(seconds_of_job["ours"], seconds_of_job["torch's"], strict=True)]
        within_limits = _say("a slice of 64 MiB / torch's", statistics.median(ratios), SLICE, ratios) and within_limits
    print(f"seed {seed}")
    return 0 if within_limits else 1


def _say(name, middle, limit, all_of_them, least=False):
    fine = limit is None or (middle >= limit if least else middle <= limit)
    verdict = "      " if limit is None else "held  " if fine else "BROKEN"
    output = "" if limit is None else f" {'>=' if least else '<='} {limit:g}"
    print(f"{verdict} {name}: {middle:.3f}{output} ({min(all_of_them):.3f} to {max(all_of_them):.3f})", flush=True)
    return fine


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each contender; 5")
    parser.add_argument("--megabytes", type=int, default=1024, metavar="N", help="of all ranks; 1024")
    parser.add_argument("--folder", metavar="PATH", help="on the disk that is to be written; the temporary folder")
    parser.add_argument("--seed", type=int, help="of the order; a random one, printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
