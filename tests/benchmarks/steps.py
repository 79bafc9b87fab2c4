"""Measure the time of a prepared training step: `python tests/benchmarks/steps.py`.

On two ranks a step of a prepared model is compared with one of bare DDP, and on one rank with a bare loop; where
Accelerate is installed (`--peer PYTHON` names an interpreter that has it and torch), its step is measured in the same
processes. Steps come in rounds of one of each, in an order that all ranks draw from the same seed. The model is small:
in a large step no cost could be seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LIMITS = {1: 1.10, 2: 1.03}
"""Limit by number of ranks, for the median of the ratios of all pairs."""


def network(width: int, layers: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(make() for _ in range(layers) for make in (lambda: nn.Linear(width, width), nn.ReLU)))


def contestants(ranks: int, width: int, layers: int, batch: int, precision: str):
    """Return the functions that take one step, by name."""
    inputs = torch.randn(batch, width)
    steps = {}

    def bare():
        model = network(width, layers)
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                output = model(inputs)
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def prepared(kind):
        accelerator = kind(mixed_precision=precision, cpu=True)
        raw = network(width, layers)
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), 1e-3))

        def step():
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        return step

    from rankbook.runtime import Accelerator as Own

    makers = {"bare": bare, "rankbook": lambda: prepared(Own)}
    try:
        from accelerate import Accelerator as Peer

        makers["accelerate"] = lambda: prepared(Peer)
    except ImportError:
        pass
    names = list(makers)
    random.shuffle(names)
    for name in names:
        steps[name] = makers[name]()
    return steps


def measure(rank: int, ranks: int, options: argparse.Namespace, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    random.seed(seed)
    environment = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": 29517,
    }
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    steps = contestants(ranks, options.width, options.layers, options.batch, options.precision)
    for _ in range(30):
        for step in steps.values():
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = sorted(steps)
    gc.collect()
    gc.disable()
    for _ in range(options.pairs):
        for name in random.sample(names, len(names)):
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    gc.enable()
    if rank == 0:
        Path(folder, "seconds").write_text(json.dumps(seconds))
    if ranks > 1:
        dist.destroy_process_group()


def run(ranks: int, options: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """The seconds of each contestant's steps, on rank 0, over all rounds."""
    context = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            started = [
                context.Process(target=measure, args=(rank, ranks, options, seed + number, folder))
                for rank in range(ranks)
            ]
            for item in started:
                item.start()
            for element in started:
                element.join(600)
            measured = json.loads(Path(folder, "seconds").read_text())
        for name, samples in measured.items():
            seconds.setdefault(name, []).extend(samples)
        print(f"{ranks} ranks, round {number + 1}", file=sys.stderr, flush=True)
    return seconds


def main() -> int:
    options = _options()
    if options.peer and "STEPS_PEER" not in os.environ:
        os.environ["STEPS_PEER"] = "1"
        os.execv(options.peer, [options.peer, __file__, *sys.argv[1:]])
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    within_limits = True
    for ranks in (1, 2):
        seconds = run(ranks, options, seed)
        for name, samples in sorted(seconds.items()):
            low, middle, high = (1e3 * quantile for quantile in statistics.quantiles(samples, n=4))
            print(f"{ranks} ranks, {name}: median {middle:.3f} ms, middle half {low:.3f} to {high:.3f} ms")
        for name in sorted(set(seconds) - {"bare"}):
            ratio = statistics.median(ours / bare for ours, bare in zip(seconds[name], seconds["bare"], strict=True))
            limit = LIMITS[ranks]
            good = ratio <= limit
            within_limits = within_limits and (good or name != "rankbook")
            word = ("held  " if good else "BROKEN") if name == "rankbook" else "beside"
            text = f"{ratio:.4f} <= {limit:g}" if name == "rankbook" else f"{ratio:.4f}"
            print(f"{word} {ranks} ranks, a step, {name} / bare: {text} ({len(seconds[name])} pairs, seed {seed})")
    return 0 if within_limits else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="with fresh processes each; 4")
    parser.add_argument("--pairs", type=int, default=400, metavar="N", help="of steps, in a round; 400")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="of the network; 6")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="of each layer; 128")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="rows; 16")
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--seed", type=int, help="of the order of steps; a random one, printed")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has torch, Rankbook and Accelerate")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
