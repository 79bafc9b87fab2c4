"""What sync-check and the record of samples cost: `python tests/benchmarks/sync_check.py`.

Two ranks hold 1 GB each. Every round checks them while they are equal and while one element differs, in a shuffled
order, and reads the same bytes for a CRC-32 on every rank; results are the medians of the seconds, and of the ratios to
the CRC-32 of the round. The extra memory is the growth of the peak of a rank's resident memory in the first checks.

A second part reads a loader with and without the record of its samples, and prints the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

LIMIT_SECONDS, LIMIT_BYTES = 0.5, 64e6

SETUP = """
import time, zlib

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident("VmRSS")

def checksum():
    for tensor in weights.values():
        zlib.crc32(memoryview(tensor.numpy()).cast("B"))

torch.manual_seed(0)
weights = {f"layer {number}": torch.randn(tensor_elements) for number in range(tensors)}
"""
CHANGE = {
    "equal": "weights['layer 0'][5] = 1",
    "one element differs": "weights['layer 0'][5] = 1 + rank",
}


def check_ranks(size: float, tensors: int, rounds: int) -> dict[str, Any]:
    """Return the seconds, ratios and bytes of checks of `size` bytes on two ranks."""
    import rankbook

    with rankbook.start(2) as cluster:
        cluster.push({"tensors": tensors, "tensor_elements": int(size / 4 / tensors)})
        cluster.run(SETUP).raise_for_status()
        cluster.sync_check("tensors")  # imports
        cluster.run("before = reset_peak()").raise_for_status()
        assert cluster.sync_check("weights").ok
        cluster.run(CHANGE["one element differs"] + "\nbegan = time.process_time()").raise_for_status()
        assert len(cluster.sync_check("weights").findings) == 1
        cluster.run("extra = resident('VmHWM') - before; cpu = time.process_time() - began").raise_for_status()
        seconds: dict[str, list[float]] = {"equal": [], "one element differs": [], "crc32": []}
        order = random.Random(1)
        for _ in range(rounds):
            variants = list(seconds)
            order.shuffle(variants)
            for variant in variants:
                cluster.run(CHANGE.get(variant, "")).raise_for_status()
                began = time.perf_counter()
                if variant == "crc32":
                    cluster.run("checksum()").raise_for_status()
                else:
                    report = cluster.sync_check("weights")
                    assert report.ok is (variant == "equal"), report
                seconds[variant].append(time.perf_counter() - began)
        extra, cpu = max(cluster.pull("extra")), max(cluster.pull("cpu"))
    return {
        "bytes": size,
        "extra_bytes": extra,
        "cpu_seconds_of_a_rank": round(cpu, 3),
        "seconds": {name: round(statistics.median(times), 3) for name, times in seconds.items()},
        "least_seconds": {name: round(min(times), 3) for name, times in seconds.items()},
        "ratios_to_crc32": {
            name: round(statistics.median(a / b for a, b in zip(times, seconds["crc32"], strict=True)), 3)
            for name, times in seconds.items()
        },
    }


class NoLog:
    """Stand in for `SampleLog`, and record nothing."""

    def add(self, *_: object) -> None:
        """Do nothing."""


def read_loader(batch_size: int, rounds: int) -> dict[str, Any]:
    """Return the ratio of the time of passes with and without the record of samples."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from rankbook.runtime import prepare_data_loader
    from rankbook.runtime.data import batch_requests
    from rankbook.runtime.data.seen import SampleLog

    kinds: dict[str, Callable[[], Any]] = {"with": SampleLog, "without": NoLog}
    data = TensorDataset(torch.arange(100_000))
    loader = prepare_data_loader(DataLoader(data, batch_size=batch_size), num_processes=2, process_index=0)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    order = random.Random(1)
    for _ in range(rounds):
        variants = list(kinds)
        order.shuffle(variants)
        for variant in variants:
            batch_requests.SampleLog = kinds[variant]  # type: ignore[assignment, misc]
            began = time.process_time()
            for _batch in loader:
                pass
            seconds[variant].append(time.process_time() - began)
    batch_requests.SampleLog = SampleLog  # type: ignore[misc]
    pairs = zip(seconds["with"], seconds["without"], strict=True)
    return {"batch_size": batch_size, "ratio": round(statistics.median(a / b for a, b in pairs), 3)}


def main() -> int:
    """Print the results; return 1 if a check takes more time or memory than it may."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    result = check_ranks(chosen.bytes, chosen.tensors, chosen.rounds)
    print(json.dumps(result))
    for batch_size in (8, 32, 256):
        print(json.dumps(read_loader(batch_size, 3 * chosen.rounds)))
    return int(result["seconds"]["equal"] > LIMIT_SECONDS or result["extra_bytes"] > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
