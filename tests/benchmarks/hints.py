"""Measure the latency of Tab and Shift-Tab, and the cost of auto mode per cell: `python tests/benchmarks/hints.py`.

Rankbook's own kernel is asked for completions and inspections over Jupyter's channels, first idle and then while every
rank trains a model in a background cell; an empty answer counts as late. The first request of each kind, with what it
imports, does not count. In the same kernel `x = 1` runs as a plain cell and below `%%distributed`, in pairs of shuffled
order.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from frontend import Frontend

LIMIT = 0.1
"""Seconds, of the 95th percentile."""
COST = 1.02
"""The median of the pairs' ratios: a plain cell's time over the same below `%%distributed`."""

SETUP = """
from torch.nn.parallel import DistributedDataParallel
layers = [make() for _ in range(12) for make in (lambda: torch.nn.Linear(512, 512), torch.nn.ReLU)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
inputs = torch.randn(8, 512)
config = {"learning_rate": 1e-4, "width": 512}
"""
TRAIN = """%%distributed --background
while True:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""
REQUESTS = [
    ("complete", "mod"),
    ("complete", "model.module[0].wei"),
    ("complete", "torch."),
    ("complete", "torch.nn.functional."),
    ("complete", "config['lea"),
    ("complete", "torch.optim.Adam(model.parameters(), l"),
    ("complete", "%distributed pull mod"),
    ("inspect", "model"),
    ("inspect", "torch.nn.Linear"),
    ("inspect", "torch.optim.Adam("),
]


def main() -> int:
    """Measure, print, and return whether the limits are met."""
    options = _options()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    chance = random.Random(seed)
    arguments = ("-m", "rankbook.jupyter", "-f", "{connection_file}")
    within_limits = True
    with Frontend(sys.executable, arguments=arguments, environment={"RANKBOOK_RANKS": str(options.ranks)}) as kernel:
        kernel.start(timeout=120)
        kernel.check(SETUP, timeout=120)
        within_limits &= _tell_cells(kernel, options.cells, chance)
        for when in ("idle", "while all ranks train"):
            for request in REQUESTS:
                _ask(kernel, *request)
            requests = REQUESTS * options.rounds
            chance.shuffle(requests)
            within_limits &= _tell(when, [_ask(kernel, *request) for request in requests])
            if when == "idle":
                kernel.check(TRAIN, timeout=60)
    print(f"{options.ranks} ranks, seed {seed}")
    return 0 if within_limits else 1


def _ask(kernel: Frontend, kind: str, code: str) -> tuple[float, bool]:
    """The seconds to the answer, and whether there was something in it."""
    start = time.perf_counter()
    message = getattr(kernel.client, kind)(code, len(code))
    while True:
        reply = kernel.client.get_shell_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == message:
            content = reply["content"]
            return time.perf_counter() - start, bool(content.get("matches") or content.get("data"))


def _tell(when: str, answers: list[tuple[float, bool]]) -> bool:
    empty = sum(not answered for _, answered in answers)
    times = sorted(seconds if answered else max(seconds, LIMIT + 1e-3) for seconds, answered in answers)
    median, late = statistics.median(times), times[int(0.95 * len(times))]
    ok = late <= LIMIT
    print(
        f"{'held  ' if ok else 'BROKEN'} Tab and Shift-Tab, {when}: p95 {1e3 * late:.1f} ms <= {1e3 * LIMIT:.0f} ms; "
        f"median {1e3 * median:.1f} ms, slowest {1e3 * times[-1]:.1f} ms, {empty} of {len(times)} empty"
    )
    return ok


def _tell_cells(kernel: Frontend, pairs: int, chance: random.Random) -> bool:
    plain, magic = "x = 1", "%%distributed\nx = 1"
    seconds_by_cell: dict[str, list[float]] = {plain: [], magic: []}
    for number in range(pairs + 10):
        for code in chance.sample([plain, magic], 2):
            seconds = kernel.check(code, timeout=20).seconds
            if number >= 10:
                seconds_by_cell[code].append(seconds)
    ratio = statistics.median(a / b for a, b in zip(seconds_by_cell[plain], seconds_by_cell[magic], strict=True))
    medians = [1e3 * statistics.median(seconds_by_cell[item]) for item in (plain, magic)]
    ok = ratio <= COST
    print(
        f"{'held  ' if ok else 'BROKEN'} `x = 1`, plain in auto mode / below %%distributed: {ratio:.3f} <= {COST:g}; "
        f"medians {medians[0]:.2f} and {medians[1]:.2f} ms, {pairs} pairs"
    )
    return ok


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of the kernel; 2")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="of ten requests, idle and in training; 40")
    parser.add_argument("--cells", type=int, default=300, metavar="N", help="pairs of cells; 300")
    parser.add_argument("--seed", type=int, help="of the order; a random one, printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
