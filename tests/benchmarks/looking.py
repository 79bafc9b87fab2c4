"""Measure what a watched placement costs a training step: `python tests/benchmarks/looking.py`.

In the same two ranks the same DDP model trains in stretches of some tenths of a second, which come in pairs: one while
a placement is watched, ten times a second, and one without, in random order, so that whatever else the machine does
affects both alike. Queries are rarer than steps, so the mean step of a stretch is compared. The first query, with all
that it imports, counts, except for that of the warm-up.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys

import rankbook

LIMIT = 1.01
"""The median of the ratios of all pairs."""

SETUP = """
import time
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(3)
layers = [make() for _ in range(LAYERS) for make in (lambda: torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
inputs = torch.randn(BATCH, WIDTH)

def stretch(steps):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps

stretch(20)
"""


def main() -> int:
    """Measure, print, and return whether the limit is met."""
    options = _options()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    chance = random.Random(seed)
    ratios: list[float] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    pictures: list[object] = []
    for number in range(options.rounds):
        with rankbook.Cluster(2) as cluster:
            code = SETUP.replace("LAYERS", str(options.layers)).replace("WIDTH", str(options.width))
            cluster.run(code.replace("BATCH", str(options.batch)))
            cluster.placement()
            round_ratios = []
            for _ in range(options.pairs):
                step_seconds = {}
                for looked_at in chance.sample([False, True], 2):
                    end = cluster.watch("placement", pictures.append) if looked_at else lambda: None
                    cluster.run(f"taken = stretch({options.steps})")
                    end()
                    step_seconds[looked_at] = max(cluster.pull("taken"))
                    seconds[looked_at].append(step_seconds[looked_at])
                round_ratios.append(step_seconds[True] / step_seconds[False])
        ratios += round_ratios
        print(f"round {number + 1}: {statistics.median(round_ratios):.4f}", file=sys.stderr, flush=True)
    for looked_at, name in ((False, "nobody looks"), (True, "somebody looks")):
        print(f"{name}: median {1e3 * statistics.median(seconds[looked_at]):.2f} ms a step")
    rate = len(pictures) / (sum(seconds[True]) * options.steps)
    ratio = statistics.median(ratios)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(1000))
    spread = f"95 % interval {medians[25]:.4f} to {medians[974]:.4f}, {len(ratios)} pairs, seed {seed}"
    within_limit = ratio <= LIMIT
    print(f"pictures: {rate:.1f} in a second of training")
    print(f"{'held  ' if within_limit else 'BROKEN'} a DDP step, looked at / not: {ratio:.4f} <= {LIMIT:g} ({spread})")
    return 0 if within_limit else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="with fresh ranks each; 3")
    parser.add_argument("--pairs", type=int, default=60, metavar="N", help="of stretches, in a round; 60")
    parser.add_argument("--steps", type=int, default=25, metavar="N", help="in a stretch; 25")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="of the network; 12")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="of each layer; 512")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="few, so that Python matters; 8")
    parser.add_argument("--seed", type=int, help="of the order; a random one, printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
