"""Measure the cost of the number watch: `python tests/benchmarks/watch.py`.

Steps of a small transformer, on one process and on two that train it with DDP. Every round takes one step of each
variant, in an order that all ranks draw from the same seed; the result is the median of the ratios within the rounds.

    bare        without the watch
    off         the same once more: nothing is registered, so the ratio shows the noise of the measurement
    on          `watch nan`

"cpu" are the ratios of the process's CPU time, which other programs on a busy machine change less than "wall", the
elapsed time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

LIMITS = {"on": 1.05, "off": 1.005}


def measure(width: int, layers: int, batch: int, length: int, rounds: int, conditions: tuple[str, ...]):
    """Return the seconds of all steps by variant, on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
            self.norm2 = nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            normed = self.norm(x)
            x = x + self.attn(normed, normed, normed, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(layers)), nn.Linear(width, 8))
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(batch, length, width)

    def step() -> tuple[float, float]:
        if dist.is_initialized():
            dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - cpu

    for _ in range(3):
        step()
    from rankbook.numerics import watch_numbers

    seconds: dict[str, list[tuple[float, float]]] = {"bare": [], "off": [], "on": []}
    order = random.Random(1)
    for _ in range(rounds):
        variants = list(seconds)
        order.shuffle(variants)
        for variant in variants:
            watch_numbers(*(conditions if variant == "on" else ("off",)))
            seconds[variant].append(step())
    return seconds


def main() -> int:
    """Print the ratios; return 1 if one is above its limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--conditions", nargs="+", default=["nan"])
    chosen = parser.parse_args()
    from tests.rank_processes import run_ranks

    failed = False
    for ranks in chosen.ranks:
        sizes = (chosen.width, chosen.layers, chosen.batch, chosen.length, chosen.rounds, tuple(chosen.conditions))
        seconds = run_ranks(measure, ranks, *sizes, timeout=1200)[0]
        bare = seconds["bare"]
        report: dict[str, object] = {"ranks": ranks}
        for index, clock in enumerate(("wall", "cpu")):
            report[f"{clock}_ms"] = round(1e3 * statistics.median(step[index] for step in bare), 2)
            for name, limit in LIMITS.items():
                pairs = zip(seconds[name], bare, strict=True)
                ratio = statistics.median(step[index] / base[index] for step, base in pairs)
                report[f"{clock}_{name}"] = round(ratio, 4)
                failed = failed or (clock == "wall" and ratio > limit)
        print(json.dumps(report))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
