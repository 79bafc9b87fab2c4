"""Measure the coordinator with up to 1,024 ranks behind 128 agents: `python tests/benchmarks/scale_hosts.py`.

The driver, state machine, output merger, results, table of hosts, session layer and encrypted link are the real ones.
The agents are real ends of the link in four other processes; their ranks are light: they hold no torch, and reply to
every task at once, by its source. Eight of them are behind an agent.

Two times are given. CPU time is that of the coordinator's whole process, with ZeroMQ's thread, which encrypts. Elapsed
time includes the agents' processes, which share the cores of this machine. `--chart FILE` draws the CPU time of cells
against the number of ranks. The exit status is 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from rankbook.coordinator import events as ev
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.running_cell import RunningCell
from rankbook.coordinator.state_machine import ClusterState
from rankbook.coordinator.states import RankState
from rankbook.launch.connection import Connection, decode_connection
from rankbook.launch.hosts import Hosts, HostsLauncher, HostsLink, MirroredSegments, local_versions
from rankbook.launch.placement import place_ranks
from rankbook.protocol.forkserver import (
    MESSAGES,
    CloseHost,
    ForkRank,
    FromRank,
    FromRanks,
    HostDescription,
    HostReady,
    RankExited,
    RankForked,
    ToRanks,
    decode_to_agent,
    encode_description,
)
from rankbook.protocol.messages import (
    Abort,
    Collectives,
    Done,
    GetCollectives,
    Interrupt,
    Message,
    RankReady,
    Regroup,
    RunCell,
    Text,
    decode_to_rank,
    encode,
)
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members
from rankbook.transport.agent_link import AgentHub, AgentLink, LinkMessage, make_keys
from rankbook.transport.framed_socket import wait_readable
from rankbook.transport.store_keys import KeyFolder
from rankbook.transport.zmq_link import ZmqHub
from tests.benchmarks.scale import DiscardingSink, Measure, QuietLauncher
from tests.coordinator.fork_requests import request

RANKS_PER_AGENT = 8
PROCESSES = 4
TIMEOUT = 120.0
US, MS = 1e6, 1e3


MEASURES = {
    "join": Measure("all agents join and all ranks start, elapsed", "s", 1.0, 5),
    "pass": Measure("`pass`, CPU time per rank", "µs", US, 30, 1.5),
    "equal": Measure("one equal line each, CPU time per rank", "µs", US, 60, 1.5),
    "own": Measure("one different line each, CPU time per rank", "µs", US, None, 1.5),
    "interrupt": Measure("a cell that is interrupted, CPU time per rank", "µs", US, None, 1.5),
    "deaths": Measure("10 % of the ranks die, CPU time in all", "ms", MS, 100),
    "end": Measure("the same, until their cell has ended", "ms", MS),
    "elapsed": Measure("`pass`, elapsed", "ms", MS),
    "memory": Measure("memory of the coordinator per rank", "kB", 1e-3, 100),
}


# The agents' processes ----------------------------------------------------------------------------------------------


@dataclass
class LightAgent:
    """An agent with ranks that reply at once."""

    link: AgentLink
    running: dict[int, int] = field(default_factory=dict)  # the cell of every rank that has not replied
    joined: bool = False

    def step(self) -> bool:
        """Handle what has arrived. Return False when the cluster was closed."""
        replies: list[tuple[int, Message]] = []
        for event in self.link.receive():
            if not isinstance(event, LinkMessage):
                if not self.joined:
                    self.joined = True
                    self.link.send(MESSAGES, [encode(HostReady(RANKS_PER_AGENT, 0, 8, 1))])
                continue
            match decode_to_agent(bytes(event.frames[0])):
                case ForkRank(rank, incarnation):
                    self.link.send(MESSAGES, [encode(RankForked(rank, incarnation, 100_000 + rank))])
                    ready = RankReady(rank, 100_000 + rank, incarnation, "cpu", "gloo", 1)
                    replies.append((rank, ready))
                case ToRanks(ranks):
                    message = decode_to_rank(bytes(event.frames[1]))
                    for rank in ranks:
                        replies += ((rank, reply) for reply in self._replies(rank, message))
                case CloseHost():
                    return False
                case _:
                    pass
        if replies:
            senders = tuple(FromRank(rank, 1, 1) for rank, _ in replies)
            self.link.send(MESSAGES, [encode(FromRanks(senders)), *(encode(reply) for _, reply in replies)])
        self.link.run_timers(time.monotonic())
        return True

    def _replies(self, rank: int, message: Message) -> list[Message]:
        match message:
            case RunCell(cell, source):
                if source == "die" and rank % 10 == 0:
                    exited = RankExited(rank, 1, 100_000 + rank, -9, 0, b"", b"", ordered=True)
                    self.link.send(MESSAGES, [encode(exited)])
                    return []
                if source in ("wait", "die"):
                    self.running[rank] = cell
                    return []
                lines = {"equal": b"the same line on all ranks\n", "own": b"the line of rank %d\n" % rank}
                text = [Text(cell, "stdout", lines[source])] if source in lines else []
                return [*text, Done(cell, "ok", 0.1)]
            case Regroup(cell):
                return [Done(cell, "ok", 0.1)]
            case Interrupt() | Abort(shut=True):
                return [Done(self.running.pop(rank), "interrupted", 0.1)] if rank in self.running else []
            case GetCollectives(token):
                return [Collectives(token, self.running.get(rank), 3, (self._group(),))]
            case _:
                return []

    @staticmethod
    def _group() -> GroupReport:
        launches = tuple(
            CollectiveLaunch(
                number, "all_reduce", "float32[1024, 1024]", None, 3.0, position="line 3", code=1, digest=1
            )
            for number in range(25, 41)
        )
        world_size = int(os.environ["SCALE_RANKS"])
        return GroupReport(
            name="0", members=encode_members(tuple(range(world_size))), count=40, pending=launches[-1:], recent=launches
        )


def serve(text: str, first: int, count: int) -> None:
    """Run the agents `first` to `first + count` until the cluster is closed."""
    connection = decode_connection(text, "standard input")
    agents = []
    for node in range(first, first + count):
        description = HostDescription(
            name=f"node{node}", pid=str(os.getpid()), address="127.0.0.1", node=str(node), **local_versions()
        )
        hello = encode_description(description)
        link = AgentLink(connection.address, connection.port, connection.keys, f"agent-{node}", hello)
        agents.append(LightAgent(link))
    coordinator = int(os.environ["SCALE_COORDINATOR"])
    while agents and os.getppid() == coordinator:
        if not any(agent.link.has_message() for agent in agents):
            wait_readable([file for agent in agents for file in agent.link.filenos()], 0.2)
        for agent in list(agents):
            if not agent.step():
                agents.remove(agent)
                agent.link.close(0.1)


# The coordinator ----------------------------------------------------------------------------------------------------


class HomeLauncher(QuietLauncher):
    """The launcher of the notebook's host, which has no ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ends[0]

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class ScaledCluster:
    """A driver with its thread, and `world_size` light ranks behind agents."""

    def __init__(self, world_size: int, stack: ExitStack) -> None:
        self.world_size = world_size
        self.ranks = tuple(range(world_size))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys, secret = make_keys()
        hub = AgentHub("127.0.0.1", 0, keys, secret)
        store = KeyFolder(folder / "store")
        self.hosts = Hosts(hub, MirroredSegments(folder), store, lost_after=60.0, report=lambda _: None)
        home = ZmqHub(folder)
        launcher = HostsLauncher(HomeLauncher(), self.hosts)  # type: ignore[arg-type] # no rank of this host
        link = HostsLink(home, self.hosts, launcher)
        self.state = ClusterState(world_size)
        self.driver = Driver(self.state, link, launcher, request)
        self.sink = DiscardingSink()
        text = Connection("scale", "127.0.0.1", hub.port, 60.0, keys).encode()
        agents = world_size // RANKS_PER_AGENT
        processes = min(PROCESSES, agents)
        self._agents = []
        began = time.perf_counter()
        for number in range(processes):
            first = number * agents // processes
            count = (number + 1) * agents // processes - first
            process = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(first), str(count)],
                stdin=subprocess.PIPE,
                env={**os.environ, "SCALE_RANKS": str(world_size), "SCALE_COORDINATOR": str(os.getpid())},
            )
            assert process.stdin is not None
            process.stdin.write(text.encode())
            process.stdin.close()
            self._agents.append(process)
        # As `ClusterProcesses` does while it waits for slots. The time of the agents' own start does not count.
        while len(self.hosts.slots) < agents:
            if not hub.has_message():
                wait_readable(self.hosts.filenos(), 0.1)
            self.hosts.poll()
            if len(self.hosts.slots) == 0:
                began = time.perf_counter()
            if time.perf_counter() - began > TIMEOUT:
                raise TimeoutError(f"{len(self.hosts.slots)} of {agents} agents have joined")
        self.hosts.seats = {seat.rank: seat for seat in place_ranks(world_size, self.hosts.slots)}
        self.driver.start()
        self.driver.post(ev.LaunchRanks(self.ranks))
        self.wait(lambda: self.state.grouped)
        self.joined = time.perf_counter() - began
        stack.callback(self._close, home)

    def _close(self, home: ZmqHub) -> None:
        self.driver.close()
        # First, because they may still be sending thousands of reports.
        for process in self._agents:
            process.kill()
            process.wait()
        self.hosts.hub.close(0.0)
        home.close()

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        with self.driver.changed:
            while not condition():
                if self.driver.failure is not None:
                    raise self.driver.failure
                if time.monotonic() > deadline:
                    raise TimeoutError("the ranks have not replied")
                self.driver.changed.wait(1.0)

    def submit(self, source: str) -> RunningCell:
        with self.driver.changed:
            number = self.state.new_cell()
            message = RunCell(cell=number, source=source, number=7)
            cell = RunningCell(number, 7, dict.fromkeys(self.ranks, (message, ())), cluster_key="", sink=self.sink)
            self.driver.submit(cell)
        return cell

    def run(self, source: str) -> None:
        cell = self.submit(source)
        self.wait(lambda: cell.ended)

    def interrupt(self) -> None:
        cell = self.submit("wait")
        self.driver.post(ev.InterruptCell(cell.cell))
        self.wait(lambda: cell.ended)


def measure(world_size: int, rounds: int) -> dict[str, float]:
    """Return the medians of a cluster, in seconds and bytes."""
    samples: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[], object], divisor: int = world_size, elapsed: str = "") -> None:
        gc.collect()
        gc.disable()
        began, clock = time.process_time(), time.perf_counter()
        work()
        samples.setdefault(name, []).append((time.process_time() - began) / divisor)
        if elapsed:
            samples.setdefault(elapsed, []).append(time.perf_counter() - clock)
        gc.enable()

    with ExitStack() as stack:
        gc.collect()
        memory = psutil.Process().memory_info().rss
        cluster = ScaledCluster(world_size, stack)
        samples["join"] = [cluster.joined]
        cluster.run("own")
        samples["memory"] = [(psutil.Process().memory_info().rss - memory) / world_size]
        for _ in range(rounds):
            take("pass", lambda: cluster.run("pass"), elapsed="elapsed")
            for source in ("equal", "own"):
                take(source, lambda source=source: cluster.run(source))
            take("interrupt", cluster.interrupt)
        take("deaths", lambda: die(cluster), 1)
        take("end", lambda: cluster.wait(lambda: not cluster.driver.active_cells()), 1)
        samples["end"][0] += samples["deaths"][0]
    return {name: statistics.median(values) for name, values in samples.items()}


def die(cluster: ScaledCluster) -> None:
    """Let every tenth rank exit, and wait until all are known to be dead."""
    cluster.submit("die")
    dying = [cluster.state.ranks[rank] for rank in cluster.ranks[::10]]
    # Asked after every event, in the process that is measured. The first one that lives ends the look.
    cluster.wait(lambda: all(rank.state is RankState.DEAD for rank in dying))


def main() -> int:
    """Print the table, and return 1 if a limit is broken."""
    options = _options()
    if options.serve:
        serve(sys.stdin.read(), *options.serve)
        return 0
    sizes = sorted(options.ranks)
    results = {size: measure(size, options.rounds) for size in sizes}
    print("| measure | " + " | ".join(f"{size:,}" for size in sizes) + " | limit |")
    print("|---|" + "---|" * (len(sizes) + 1))
    kept = True
    for name, row in MEASURES.items():
        values = [results[size][name] * row.scale for size in sizes]
        broken = row.limit is not None and values[-1] > row.limit
        broken |= row.growth is not None and values[-1] > row.growth * values[0]
        kept &= not broken
        limits = [f"{row.limit:g} {row.unit}"] if row.limit is not None else []
        limits += [f"{row.growth:g} × the first"] if row.growth is not None else []
        verdict = ", ".join(limits) + (" BROKEN" if broken else "")
        print(f"| {row.name} | " + " | ".join(f"{value:.3g} {row.unit}" for value in values) + f" | {verdict} |")
    if options.chart is not None:
        draw(options.chart, results)
    return 0 if kept else 1


def draw(file: Path, results: dict[int, dict[str, float]]) -> None:
    """Draw the CPU time of cells against the number of ranks."""
    from matplotlib.figure import Figure  # only a chart needs it

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    for name, label in (("pass", "no output"), ("equal", "one equal line each"), ("own", "one different line each")):
        axes.plot(list(results), [MS * size * values[name] for size, values in results.items()], "o-", label=label)
    axes.set(xlabel="ranks, 8 per host", ylabel="CPU time of the coordinator (ms)", xlim=0, ylim=0)
    axes.set_title("One cell on ranks of other hosts")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], metavar="N", help="64 256 1024")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of every measure; 5")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw a chart, as SVG")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
