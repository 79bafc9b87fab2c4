"""Measure the coordinator's time per rank with up to 1,024 ranks: `python tests/benchmarks/scale.py`.

The driver, state machine, output merger and results are the real ones; the ranks are simulated on the link in memory,
and only the coordinator's part is timed (CPU time of its thread). There are no sockets, processes or other threads, so
the figures leave out what the link and the ranks cost. "Together": all ranks' messages have arrived when the driver
looks. "One by one": the driver looks after every message, as it does when they trickle in. The exit status is 1 if a
limit is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rankbook.coordinator import events as ev
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.running_cell import RunningCell
from rankbook.coordinator.state_machine import ClusterState
from rankbook.protocol.forkserver import ForkRank, RankExited
from rankbook.protocol.messages import Collectives, Done, Message, RankReady, RunCell, Text, encode
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members
from tests.coordinator.fork_requests import request
from tests.transport.memory_link import MemoryHub

US, MS, KB = 1e6, 1e3, 1e-3


@dataclass(frozen=True)
class Measure:
    """Row of the table. `limit` applies to the largest cluster; `growth` to its ratio to the smallest."""

    name: str
    unit: str
    scale: float
    limit: float | None = None
    growth: float | None = None


MEASURES = {
    "join": Measure("join and group, per rank", "µs", US),
    "pass": Measure("`pass`, replies together, per rank", "µs", US, 30, 1.5),
    "pass-single": Measure("`pass`, replies one by one, per rank", "µs", US, 30, 1.5),
    "equal": Measure("one equal line each, together, per rank", "µs", US, 60, 1.5),
    "equal-single": Measure("one equal line each, one by one, per rank", "µs", US, None, 1.5),
    "own": Measure("one different line each, together, per rank", "µs", US, None, 1.5),
    "own-single": Measure("one different line each, one by one, per rank", "µs", US, None, 1.5),
    "interrupt": Measure("interrupt, and its replies, per rank", "µs", US, None, 1.5),
    "deaths": Measure("10 % of the ranks die, in all", "ms", MS, 100),
    "look": Measure("one look of the monitor, all in one all-reduce", "ms", MS, 50),
    "look-halves": Measure("one look, half of the ranks in another collective", "ms", MS, 50),
    "reports": Measure("reading the ranks' reports, per rank", "µs", US, None, 1.5),
    "report-bytes": Measure("encoded size of one report", "kB", KB),
    "memory": Measure("memory, per rank", "kB", KB, 100),
}


class QuietLauncher:
    """A launcher that forks nothing; `exits` are reported by the next `read`."""

    alive = True

    def __init__(self) -> None:
        self.forked: list[ForkRank] = []
        self.exits: list[RankExited] = []

    def fileno(self) -> int:
        return -1

    def fork(self, request: ForkRank) -> None:
        self.forked.append(request)

    def kill(self, rank: int, incarnation: int) -> None:
        pass

    def read(self) -> Iterator[RankExited]:
        exits, self.exits = self.exits, []
        yield from exits

    def close(self) -> None:
        pass


class DiscardingSink:
    """A sink that counts the characters that it is given."""

    def __init__(self) -> None:
        self.characters = 0

    def emit(self, items) -> None:
        self.characters += sum(len(getattr(item, "text", "")) for item in items)


class SimulatedCluster:
    """A driver without its thread, and `world_size` ranks that say what they are told to. `spent`: CPU seconds."""

    def __init__(self, world_size: int) -> None:
        self.ranks = tuple(range(world_size))
        self.hub = MemoryHub()
        self.launcher = QuietLauncher()
        self.state = ClusterState(world_size)
        self.driver = Driver(self.state, self.hub, self.launcher, request)
        self.sink = DiscardingSink()
        self.spent = 0.0

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        gc.collect()
        gc.disable()
        start = time.thread_time()
        yield
        self.spent += time.thread_time() - start
        gc.enable()

    def start(self) -> None:
        with self.clock():
            self.driver.post(ev.LaunchRanks(self.ranks))
        self.ends = {fork.rank: self.hub.rank_end(fork.downlink) for fork in self.launcher.forked}
        self.say(lambda rank: RankReady(rank=rank, pid=rank, incarnation=1, device="cpu", backend="gloo", threads=1))
        (group,) = self.state.cells
        self.say(lambda _: Done(cell=group, status="ok", seconds=0.1))

    def say(self, make: Callable[[int], Message], *, single: bool = False, ranks: tuple[int, ...] = ()) -> None:
        """Let ranks send a message, and the driver handle all of them: `single`, one after another."""
        messages = [(rank, make(rank)) for rank in ranks or self.ranks]
        if not single:
            for rank, message in messages:
                self.ends[rank].send(message)
            with self.clock():
                self._step()
            return
        # Encoding belongs to the ranks, so the messages are taken from the link and put there again one at a time.
        for rank, message in messages:
            self.ends[rank].send(message)
        waiting = list(self.hub._up)
        self.hub._up.clear()
        with self.clock():
            for message in waiting:
                self.hub._up.append(message)
                self._step()

    def _step(self, files: set[int] | None = None) -> None:
        """Do what the driver thread does in one round."""
        self.driver._handle(self.hub.wait(0, ())[0], files or set())
        self.driver._seconds_to_deadline()

    def submit(self) -> RunningCell:
        with self.clock():
            number = self.state.new_cell()
            message = RunCell(cell=number, source="pass", number=7)
            tasks = dict.fromkeys(self.ranks, (message, ()))
            cell = RunningCell(number, 7, tasks, cluster_key="", sink=self.sink)
            self.driver.submit(cell)
        return cell

    def run_cell(self, line: Callable[[int], bytes] | None = None, *, single: bool = False) -> None:
        cell = self.submit()
        if line is not None:
            self.say(lambda rank: Text(cell=cell.cell, stream="stdout", data=line(rank)), single=single)
        self.say(lambda _: Done(cell=cell.cell, status="ok", seconds=0.1), single=single)
        assert cell.ended
        assert cell.result.ok
        self.drop_messages()

    def drop_messages(self) -> None:
        for _, queue in self.hub._down.values():
            queue.clear()

    def interrupt(self) -> None:
        cell = self.submit()
        with self.clock():
            self.driver.post(ev.InterruptCell(cell.cell))
        self.say(lambda _: Done(cell=cell.cell, status="interrupted", seconds=0.1))
        assert cell.ended
        self.drop_messages()

    def kill(self, ranks: tuple[int, ...]) -> None:
        self.launcher.exits = [
            RankExited(rank=rank, incarnation=1, pid=rank, code=-9, memory_kills=0, stdout=b"", stderr=b"")
            for rank in ranks
        ]
        with self.clock():
            self._step({-1})
        # The exits are handled when the last messages have had their time to arrive.
        time.sleep(0.03)
        with self.clock():
            self._step()

    def report(self, number: int, op: str, count: int) -> Collectives:
        """Return what a rank says that has begun `begun` collectives and waits in the last one."""
        recent = tuple(
            CollectiveLaunch(
                number=index,
                op="all_reduce",
                data="float32[1024, 1024]",
                peer=None,
                seconds=3.0,
                reduction="sum",
                position="line 3",
                code=index,
                digest=index,
            )
            for index in range(max(1, count - 15), count)
        )
        last = CollectiveLaunch(
            number=count,
            op=op,
            data="float32[4]",
            peer=None,
            seconds=3.0,
            position="line 3",
            code=len(op),
            digest=len(op),
        )
        group = GroupReport(
            name="0", members=encode_members(self.ranks), count=count, pending=(last,), recent=(*recent, last)
        )
        return Collectives(token=0, cell=number, line=3, groups=(group,))

    def look(self) -> None:
        with self.clock():
            self.driver.post(ev.CheckCollectives(time.monotonic()))


def measure_cells(world_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every measure on living ranks, per rank."""
    cluster = SimulatedCluster(world_size)
    samples: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[], object], divisor: int = world_size) -> None:
        cluster.spent = 0.0
        work()
        samples.setdefault(name, []).append(cluster.spent / divisor)

    take("join", cluster.start)
    cells: dict[str, Callable[[int], bytes] | None] = {
        "pass": None,
        "equal": lambda _: b"the same line on all ranks\n",
        "own": lambda rank: f"the line of rank {rank}\n".encode(),
    }
    for _ in range(rounds):
        for name, line in cells.items():
            take(name, lambda line=line: cluster.run_cell(line))
            take(f"{name}-single", lambda line=line: cluster.run_cell(line, single=True))
        take("interrupt", cluster.interrupt)
        cluster.drop_messages()
    cell = cluster.submit()
    for _ in range(rounds):
        take("reports", lambda: cluster.say(lambda _: cluster.report(cell.cell, "all_reduce", 40)))
        take("look", cluster.look, 1)
        cluster.drop_messages()
    samples["report-bytes"] = [float(len(encode(cluster.report(cell.cell, "all_reduce", 40))))]
    # A mismatch: the monitor describes what all ranks gave, and aborts their waits.
    half = world_size // 2
    cluster.say(lambda rank: cluster.report(cell.cell, "all_reduce" if rank < half else "barrier", 40))
    cluster.drop_messages()
    for _ in range(rounds):
        take("look-halves", cluster.look, 1)
        cluster.drop_messages()
    return samples


def measure_deaths(world_size: int) -> float:
    cluster = SimulatedCluster(world_size)
    cluster.start()
    cell = cluster.submit()
    cluster.say(lambda _: cluster.report(cell.cell, "all_reduce", 40))
    cluster.spent = 0.0
    cluster.kill(cluster.ranks[:: world_size // round(world_size / 10)][: round(world_size / 10)])
    return cluster.spent


def measure_memory(world_size: int) -> float:
    """Return the bytes of a cluster that has run a cell with a line from every rank, per rank."""
    gc.collect()
    tracemalloc.start()
    cluster = SimulatedCluster(world_size)
    cluster.start()
    cluster.run_cell(lambda rank: f"the line of rank {rank}\n".encode())
    cell = cluster.submit()
    cluster.say(lambda _: cluster.report(cell.cell, "all_reduce", 40))
    cluster.drop_messages()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / world_size


def measure(world_size: int, rounds: int) -> dict[str, float]:
    samples = measure_cells(world_size, rounds)
    samples["deaths"] = [measure_deaths(world_size) for _ in range(min(rounds, 3))]
    samples["memory"] = [measure_memory(world_size)]
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> int:
    options = _options()
    sizes = sorted(options.ranks)
    results = {size: measure(size, options.rounds) for size in sizes}
    print("| measure | " + " | ".join(f"{size:,}" for size in sizes) + " | limit |")
    print("|---|" + "---|" * (len(sizes) + 1))
    within_limits = True
    for name, row in MEASURES.items():
        values = [results[size][name] * row.scale for size in sizes]
        broken = row.limit is not None and values[-1] > row.limit
        broken = broken or (row.growth is not None and values[-1] > row.growth * values[0])
        within_limits = within_limits and not broken
        limits = [f"{row.limit:g} {row.unit}"] if row.limit is not None else []
        limits += [f"{row.growth:g} × the first"] if row.growth is not None else []
        verdict = ", ".join(limits) + (" BROKEN" if broken else "")
        print(f"| {row.name} | " + " | ".join(f"{value:.3g} {row.unit}" for value in values) + f" | {verdict} |")
    return 0 if within_limits else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], metavar="N", help="64 256 1024")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of every measure; 5")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
