"""Compare ranks of another host with ranks of this one: `python tests/benchmarks/hosts.py`.

Two ranks of this host and two of a second one, whose agent is a process of this machine and reached over the loopback
interface: what is measured is the way through the agent, not a network. Both clusters live at once, and every round
takes each measure once of either, in shuffled order.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rankbook import Cluster
from rankbook.coordinator import cluster_processes
from rankbook.launch.hosts import HostOptions

LIMITS = {"pass": 1.0, "heal": 1.3}
"""Milliseconds that a cell may take longer on the other host, and the ratio of the times of `heal`."""


@contextmanager
def remote_cluster(folder: Path, *, home: int = 0, slots: int = 2, lost_after: float = 60.0) -> Iterator[Cluster]:
    """Return a cluster of `home` ranks of this host and `slots` behind an agent."""
    agents: list[subprocess.Popen[bytes]] = []

    def report(text: str) -> None:
        if match := re.search(r"--connect (\S+\.json)", text):
            command = [sys.executable, "-m", "rankbook.agent", "--connect", match[1], "--slots", str(slots)]
            agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    os.environ["RANKBOOK_CONNECT_DIR"] = str(folder)
    cluster_processes._report = report
    options = HostOptions(address="127.0.0.1", home=home, lost_after=lost_after)
    with Cluster(home + slots, hosts=options) as cluster:
        yield cluster
    for agent in agents:
        agent.wait(20)


def seconds(work: Callable[[], object]) -> float:
    """Return the time that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def heal(cluster: Cluster) -> float:
    """Return the time in which a killed rank is replaced."""
    cluster.run("value = torch.ones(1_000)")
    pid = cluster.status()[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return seconds(cluster.heal)


def main() -> int:
    """Print the medians of both clusters, and return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=400, metavar="N", help="cells of each cluster; 400")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of the other measures; 5")
    parser.add_argument("--megabytes", type=int, default=256, metavar="N", help="size of the value; 256")
    options = parser.parse_args()
    value = bytes(options.megabytes << 20)
    samples: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = {"this host": stack.enter_context(Cluster(2))}
        clusters["other host"] = stack.enter_context(remote_cluster(folder))
        measures: dict[str, tuple[int, Callable[[Cluster], float]]] = {
            "pass": (options.cells, lambda cluster: seconds(lambda: cluster.run("pass"))),
            "push": (options.rounds, lambda cluster: seconds(lambda: cluster.push({"value": value}))),
            "pull": (options.rounds, lambda cluster: seconds(lambda: cluster.pull("value", ranks=[0]))),
            "heal": (options.rounds, heal),
        }
        for name, (count, measure) in measures.items():
            for round_number in range(count + max(1, count // 10)):
                for where in random.sample(sorted(clusters), 2):
                    sample = measure(clusters[where])
                    if round_number >= max(1, count // 10):  # the first ones warm up
                        samples.setdefault(name, {}).setdefault(where, []).append(sample)
    failed = False
    for name, times in samples.items():
        local, remote = (1e3 * statistics.median(times[where]) for where in ("this host", "other host"))
        excess = remote - local if name == "pass" else remote / local
        verdict = "" if name not in LIMITS else "ok" if excess <= LIMITS[name] else "BROKEN"
        failed |= verdict == "BROKEN"
        figure = f"{excess:+.2f} ms" if name == "pass" else f"{excess:.2f} x"
        print(f"{name:5} this host {local:9.2f} ms   other host {remote:9.2f} ms   {figure:>10} {verdict}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
