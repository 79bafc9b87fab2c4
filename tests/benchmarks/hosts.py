"""Compare ranks of another host with ranks of this one: `python tests/benchmarks/hosts.py`.

Two ranks of this host and two of a second one, whose agent is a process of this machine and reached over the loopback
interface: what is measured is the way through the agent, not a network. Both clusters live at once, and every round
takes each measure once of either, in shuffled order. The figures are medians; the ratio is the median of the rounds'
ratios, because the load of the machine changes more between rounds than in one.

The last lines say how long output, interrupts and heartbeats wait behind a large value: on the other host, rank 0 gets
one value after the other, and rank 1 runs cells. The same cells run without a value on the way, in rounds of shuffled
order.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

from rankbook import Cluster
from rankbook.coordinator import cluster_processes
from rankbook.launch.hosts import HostOptions

LIMITS = {"pass": 1.0, "heal": 1.3}
"""Milliseconds that a cell may take longer on the other host, and the ratio of the times of `heal`."""
MOST_DELAY = 50.0
"""Milliseconds that output, an interrupt or a heartbeat may wait behind a large value, in 95 of 100 cases."""


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


class ValuesOnTheWay:
    """Push one value after the other to rank 0, in a thread."""

    def __init__(self, cluster: Cluster, value: bytes) -> None:
        self._cluster = cluster
        self._value = value
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._push)

    def _push(self) -> None:
        while not self._ended.is_set():
            self._cluster.push({"value": self._value}, ranks=[0])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def time_output(cluster: Cluster) -> float:
    """Return the time of a cell that prints a line."""
    return seconds(lambda: cluster.run("print('a line')", ranks=[1]))


def time_interrupt(cluster: Cluster) -> float:
    """Return the time from an interrupt to the end of the cell."""
    # The line says that the cell runs.
    lines: queue.Queue[object] = queue.Queue()
    sink = SimpleNamespace(emit=lines.put)
    code = "import time; print('begun', flush=True); time.sleep(60)"
    cell = cluster.submit_code(code, number=0, ranks=[1], sink=sink)
    lines.get(timeout=60)

    def interrupt() -> None:
        cluster.interrupt_cell(cell)
        cluster.wait(cell, timeout=60)

    return seconds(interrupt)


def time_heartbeat(cluster: Cluster) -> float:
    """Return the round trip of the next heartbeat of the agent."""
    hub = cluster._processes.hosts.hub  # type: ignore[union-attr]
    (peer,) = hub._peers.values()
    before = peer.offsets[-1]
    deadline = time.monotonic() + 60
    while peer.offsets[-1] is before and time.monotonic() < deadline:  # one comes every second
        time.sleep(0.05)
    return peer.offsets[-1][0]


def measure_delays(here: Cluster, other: Cluster, value: bytes, rounds: int) -> bool:
    """Print the times behind values on the way, and without them. Return True if the limit is kept.

    Values that stay on this host do not use the link: what they cost is the share of the cores and of the memory.
    """
    measures = {"output": (time_output, 20), "interrupt": (time_interrupt, 3), "heartbeat": (time_heartbeat, 1)}
    samples: dict[tuple[str, str], list[float]] = {}
    contexts: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "alone": nullcontext,
        "beside": lambda: ValuesOnTheWay(here, value),
        "behind": lambda: ValuesOnTheWay(other, value),
    }
    for _ in range(rounds):
        for condition in random.sample(list(contexts), len(contexts)):
            with contexts[condition]():
                for name, (measure, count) in measures.items():
                    samples.setdefault((name, condition), []).extend(measure(other) for _ in range(count))
    kept = True
    for name in measures:
        alone = 1e3 * statistics.median(samples[name, "alone"])
        beside, behind = (
            [1e3 * sample - alone for sample in sorted(samples[name, condition])] for condition in ("beside", "behind")
        )
        delay = behind[int(0.95 * len(behind))]
        kept &= delay <= MOST_DELAY
        print(
            f"{name:9} alone {alone:6.2f} ms   behind a value: median {statistics.median(behind):+.1f} ms, 95 of 100"
            f" {delay:+.1f} ms {'ok' if delay <= MOST_DELAY else 'BROKEN'}, longest {behind[-1]:+.1f} ms   beside one"
            f" of this host: {statistics.median(beside):+.1f}, {beside[int(0.95 * len(beside))]:+.1f},"
            f" {beside[-1]:+.1f} ms"
        )
    return kept


def main() -> int:
    """Print the medians of both clusters, and return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=400, metavar="N", help="cells of each cluster; 400")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of the other measures; 5")
    parser.add_argument("--heals", type=int, default=15, metavar="N", help="rounds of heal; 15")
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
            "heal": (options.heals, heal),
        }
        for name, (count, measure) in measures.items():
            for round_number in range(count + max(1, count // 10)):
                for where in random.sample(sorted(clusters), 2):
                    sample = measure(clusters[where])
                    if round_number >= max(1, count // 10):  # the first ones warm up
                        samples.setdefault(name, {}).setdefault(where, []).append(sample)
        delays_kept = measure_delays(clusters["this host"], clusters["other host"], value, options.rounds)
    failed = not delays_kept
    for name, times in samples.items():
        local, remote = (1e3 * statistics.median(times[where]) for where in ("this host", "other host"))
        ratios = [other / this for this, other in zip(times["this host"], times["other host"], strict=True)]
        excess = remote - local if name == "pass" else statistics.median(ratios)
        verdict = "" if name not in LIMITS else "ok" if excess <= LIMITS[name] else "BROKEN"
        failed |= verdict == "BROKEN"
        figure = f"{excess:+.2f} ms" if name == "pass" else f"{excess:.2f} x"
        print(f"{name:5} this host {local:9.2f} ms   other host {remote:9.2f} ms   {figure:>10} {verdict}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
