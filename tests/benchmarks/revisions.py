"""Compare empty cells of two checkouts: `python tests/benchmarks/revisions.py BEFORE AFTER`.

BEFORE and AFTER are folders with a checkout of this repository each, for example made by `git worktree add`. Several
notebook processes of either have two local ranks. In every round, all processes run a stretch of cells, in shuffled
order. Several processes, because two of the same checkout can differ by ten percent for as long as they live. The exit
status is 1 if the median of the cells takes more than 3 % longer after than before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 1.03
STRETCH = 50
NOTEBOOK = """
import json, sys, time
from rankbook import Cluster
with Cluster(2) as cluster:
    for _ in range(300):
        cluster.run("pass")
    print("ready", flush=True)
    for line in sys.stdin:
        cpu, times = time.process_time(), []
        for _ in range(int(line)):
            start = time.perf_counter()
            cluster.run("pass")
            times.append(time.perf_counter() - start)
        print(json.dumps([times, time.process_time() - cpu]), flush=True)
"""


class Notebook:
    """A process with two local ranks, of the package in `checkout`."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "kernel")}
        command = [sys.executable, "-P", "-c", NOTEBOOK]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.times: list[float] = []
        self.cpu = 0.0
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the notebook's process has ended; its error is above")
        return line

    def run_stretch(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{STRETCH}\n")
        self._process.stdin.flush()
        times, cpu = json.loads(self._read())
        self.times += times
        self.cpu += cpu

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> int:
    """Print the medians and the CPU time of the notebook's processes, and return 1 if the limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="of either checkout; 3")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="60")
    options = parser.parse_args()
    checkouts = {"before": options.before, "after": options.after}
    notebooks = [(name, Notebook(checkouts[name])) for name in checkouts for _ in range(options.processes)]
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        for _, notebook in random.sample(notebooks, len(notebooks)):
            notebook.run_stretch()
    medians = {}
    for name in checkouts:
        chosen = [notebook for kind, notebook in notebooks if kind == name]
        notebook_medians = [statistics.median(notebook.times) for notebook in chosen]
        medians[name] = statistics.median(seconds for notebook in chosen for seconds in notebook.times)
        cells = sum(len(notebook.times) for notebook in chosen)
        print(
            f"{name:7} {1e3 * medians[name]:.3f} ms per cell ({1e3 * min(notebook_medians):.3f} to"
            f" {1e3 * max(notebook_medians):.3f} by process), {1e6 * sum(n.cpu for n in chosen) / cells:.0f} µs of CPU"
        )
    for _, notebook in notebooks:
        notebook.close()
    ratio = medians["after"] / medians["before"]
    print(f"after / before: {ratio:.3f} {'ok' if ratio <= LIMIT else 'BROKEN'}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
