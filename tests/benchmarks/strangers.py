"""Measure cells while strangers attack the cluster's port: `python tests/benchmarks/strangers.py`.

Two ranks, one of this host and one behind an agent. In every round, a stretch of empty cells is run in peace and beside
every attack of `tests/agent/strangers.py`, in shuffled order. An attack is a process of its own that does not pause, so
on two cores it also takes the time of a process from the cells. For comparison, every attack is followed by a stretch
beside a process without any connection that uses as much CPU time as the attack did.

With `--frames 1000000` the attacks of random frames, before and after the handshake, end after so many frames; cells
run until then, and the memory of the notebook's process is compared with that after a twentieth of the frames.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from rankbook import Cluster
from tests.agent.strangers import ATTACKS
from tests.benchmarks.hosts import remote_cluster

LIMIT = 2.0
"""The time of a cell beside an attack, as a multiple of the time in peace."""
MEMORY_LIMIT = 1.1
"""The notebook's memory after random frames, as a multiple of that before."""
RANDOM_FRAMES = ("random_bytes", "random_packets_of_a_member")
# Uses the share of one core that its argument says.
BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    until = time.process_time() + 0.01 * share
    while time.process_time() < until:
        pass
    time.sleep(0.01 * (1 - share))
"""


def attack(file: Path, name: str, count: int, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    """Start an attack of `count` frames or connections, repeated for `seconds`."""
    command = [sys.executable, "-m", "tests.agent.strangers", str(file), name, str(count), str(seconds)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def run_cells(cluster: Cluster, count: int, beside: subprocess.Popen[bytes] | None) -> tuple[list[float], float]:
    """Run empty cells beside a process, which is then killed. Return their times, and the share of a core it used."""
    if beside is None:
        return [run_cell(cluster) for _ in range(count)], 0.0
    try:
        time.sleep(1)  # it has begun; nothing tells
        process = psutil.Process(beside.pid)
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        times = [run_cell(cluster) for _ in range(count)]
        return times, (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    finally:
        beside.kill()
        beside.wait()


def run_cell(cluster: Cluster) -> float:
    start = time.perf_counter()
    cluster.run("pass")
    return time.perf_counter() - start


def measure_attacks(cluster: Cluster, file: Path, rounds: int, cells: int) -> bool:
    """Print the medians of cells beside all attacks. Return True if the limit is kept."""
    times: dict[str, list[float]] = {}
    beside_busy: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in random.sample(["peace", *ATTACKS], 1 + len(ATTACKS)):
            process = None if name == "peace" else attack(file, name, 1000, 1000)
            samples, share = run_cells(cluster, cells, process)
            times.setdefault(name, []).extend(samples)
            if process is not None:
                shares.setdefault(name, []).append(share)
                busy = subprocess.Popen([sys.executable, "-c", BUSY, str(min(share, 1.0))])
                beside_busy.setdefault(name, []).extend(run_cells(cluster, cells, busy)[0])
    peace = statistics.median(times.pop("peace"))
    print(f"in peace {1e3 * peace:.2f} ms per cell")
    kept = True
    for name, samples in sorted(times.items()):
        ratio, busy_ratio = (statistics.median(values) / peace for values in (samples, beside_busy[name]))
        kept &= ratio <= LIMIT
        print(
            f"{name:28} {ratio:5.2f} x {'ok' if ratio <= LIMIT else 'BROKEN'}   a process that uses the same"
            f" {statistics.mean(shares[name]):.0%} of a core: {busy_ratio:.2f} x"
        )
    return kept


def measure_random_frames(cluster: Cluster, file: Path, frames: int) -> bool:
    """Print the time of cells beside `frames` random frames, and the memory. Return True if the limits are kept."""
    peace = statistics.median(run_cells(cluster, 500, None)[0])
    kept = True
    for name in RANDOM_FRAMES:
        attack(file, name, frames // 20).wait()
        gc.collect()
        before = psutil.Process().memory_info().rss
        began = time.perf_counter()
        process = attack(file, name, frames)
        times: deque[float] = deque(maxlen=5_000)  # all of them would take memory
        count = 0
        while process.poll() is None:
            times.append(run_cell(cluster))
            count += 1
        elapsed = time.perf_counter() - began
        run_cells(cluster, 20, None)
        gc.collect()
        after = psutil.Process().memory_info().rss
        ratio = statistics.median(times) / peace
        within = ratio <= LIMIT and after <= MEMORY_LIMIT * before and process.returncode == 0
        kept &= within
        print(
            f"{name:28} {frames:,} in {elapsed:.0f} s; {count:,} cells, {ratio:.2f} x; memory"
            f" {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after {'ok' if within else 'BROKEN'}"
        )
    return kept


def main() -> int:
    """Print the figures, and return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="5")
    parser.add_argument("--cells", type=int, default=200, metavar="N", help="in a stretch; 200")
    parser.add_argument("--frames", type=int, metavar="N", help="send so many random frames instead")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(remote_cluster(folder, home=1, slots=1))
        cluster.run("kept = rank")
        (file,) = folder.glob("*.json")
        if options.frames is not None:
            kept = measure_random_frames(cluster, file, options.frames)
        else:
            kept = measure_attacks(cluster, file, options.rounds, options.cells)
        values_kept = cluster.pull("kept") == [0, 1]
        hub = cluster._processes.hosts.hub  # type: ignore[union-attr]
        print(f"refused connections: {hub.refusals}; dropped packets: {hub.dropped}; ranks kept: {values_kept}")
    return 0 if kept and values_kept else 1


if __name__ == "__main__":
    sys.exit(main())
