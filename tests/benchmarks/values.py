"""Compare large values with a plain copy of their memory: `python tests/benchmarks/values.py`.

An array is pushed to one rank and to four, and pulled from one, and numpy copies it into fresh memory, once each in
every round and in shuffled order. A ratio compares two times of one round. The ranks hold the value of the round
before, so what it costs to release that counts too. After the last round, the values are compared on both sides.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from rankbook import Cluster

LEAST = 0.45
"""Share of the speed of the copy, for a push to one rank and a pull from one."""
FOUR_RANKS = 1.3
"""The most that a push to four ranks may take, as a multiple of the push to one."""


def seconds(work: Callable[[], object]) -> float:
    """Return the time that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Print the medians, and return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="after one to warm up; 9")
    parser.add_argument("--megabytes", type=int, default=1024, metavar="N", help="size of the array; 1024")
    options = parser.parse_args()
    value = np.random.default_rng(1).integers(0, 256, options.megabytes << 20, np.uint8)

    def copy() -> None:
        np.empty_like(value)[:] = value

    samples: dict[str, list[float]] = {}
    with Cluster(1) as one, Cluster(4) as four:
        one.push({"value": value})
        measures: dict[str, Callable[[], object]] = {
            "copy": copy,
            "push to 1": lambda: one.push({"value": value}),
            "push to 4": lambda: four.push({"value": value}),
            "pull from 1": lambda: one.pull("value"),
        }
        for round_number in range(options.rounds + 1):
            for name in random.sample(sorted(measures), len(measures)):
                sample = seconds(measures[name])
                if round_number:
                    samples.setdefault(name, []).append(sample)
        equal = [np.array_equal(value, pulled) for pulled in (*one.pull("value"), *four.pull("value"))]
    for name in measures:
        print(f"{name:12} {1e3 * statistics.median(samples[name]):8.0f} ms")
    checks = [
        ("push to 1, of the copy's speed", _ratio(samples, "copy", "push to 1"), LEAST, True),
        ("push to 4, of the push to 1", _ratio(samples, "push to 4", "push to 1"), FOUR_RANKS, False),
        ("pull from 1, of the copy's speed", _ratio(samples, "copy", "pull from 1"), LEAST, True),
    ]
    all_passed = all(equal)
    print(f"all values equal: {all_passed}")
    for name, ratio, limit, at_least in checks:
        within_limit = ratio >= limit if at_least else ratio <= limit
        all_passed &= within_limit
        print(f"{'held  ' if within_limit else 'BROKEN'} {name}: {ratio:.2f} {'>=' if at_least else '<='} {limit:g}")
    return 0 if all_passed else 1


def _ratio(samples: dict[str, list[float]], above: str, below: str) -> float:
    return statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))


if __name__ == "__main__":
    sys.exit(main())
