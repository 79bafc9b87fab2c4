"""Measure cells while strangers attack the cluster's port: `python tests/benchmarks/strangers.py`.

Two ranks, one of this host and one behind an agent. In every round, a stretch of empty cells is run in peace and beside
every attack of `tests/agent/strangers.py`, in shuffled order. An attack is a process of its own that does not pause. So
on two cores it also takes the time of a process; `busy` is a loop without any connection, for comparison.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.agent.strangers import ATTACKS
from tests.benchmarks.hosts import remote_cluster

LIMIT = 2.0
"""The time of a cell beside an attack, as a multiple of the time in peace."""


def main() -> int:
    """Print the medians, and return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="5")
    parser.add_argument("--cells", type=int, default=200, metavar="N", help="in a stretch; 200")
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(remote_cluster(folder, home=1, slots=1))
        cluster.run("kept = rank")
        (file,) = folder.glob("*.json")
        for _ in range(options.rounds):
            for name in random.sample(["peace", "busy", *ATTACKS], 2 + len(ATTACKS)):
                command = [sys.executable, "-m", "tests.agent.strangers", str(file), name, "1000", "1000"]
                if name == "busy":
                    command = [sys.executable, "-c", "while True: pass"]
                attack = None
                if name != "peace":
                    attack = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=os.environ)
                    time.sleep(1)  # it has begun; nothing tells
                try:
                    for _ in range(options.cells):
                        start = time.perf_counter()
                        cluster.run("pass")
                        times.setdefault(name, []).append(time.perf_counter() - start)
                finally:
                    if attack is not None:
                        attack.kill()
                        attack.wait()
        all_kept = cluster.pull("kept") == [0, 1]
        hub = cluster._processes.hosts.hub  # type: ignore[union-attr]
        print(f"refused connections: {hub.refusals}; dropped packets: {hub.dropped}; ranks kept: {all_kept}")
    broken = not all_kept
    peace = statistics.median(times["peace"])
    for name, samples in sorted(times.items()):
        ratio = statistics.median(samples) / peace
        verdict = "" if name in ("peace", "busy") else "ok" if ratio <= LIMIT else "BROKEN"
        broken |= verdict == "BROKEN"
        print(f"{name:28} {1e3 * statistics.median(samples):8.2f} ms {ratio:6.2f} x {verdict}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
