"""Test what the processes of a cluster decide before any process is started."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rankbook.coordinator import actions as act
from rankbook.coordinator import cluster_processes
from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.engine_monitor import EngineState
from rankbook.coordinator.states import RankState
from rankbook.engines import HostOutput, HostQueued
from rankbook.errors import StartError
from rankbook.launch.placement import DeviceAssignment
from rankbook.protocol.forkserver import KillRank
from rankbook.protocol.messages import Shutdown
from tests.coordinator.test_driver import SOON, DriverHarness


@pytest.fixture
def processes(monkeypatch) -> ClusterProcesses:
    """Return the processes of two ranks on this host, which has eight cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cluster_processes, "usable_cores", lambda: 8)
    made = object.__new__(ClusterProcesses)
    made.assignment = DeviceAssignment(("cpu", "cpu"), "gloo", 4)
    made.key, made.device = "test", None
    made.state = SimpleNamespace(ranks={0: None, 1: None})  # type: ignore[assignment]
    made._token, made._port, made._cuda_devices, made._hosts = "", 1, 0, None
    made._hub = SimpleNamespace(uplink="up")  # type: ignore[assignment]
    made._folders = SimpleNamespace(segments="/segments", logs="/logs")  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(("value", "threads"), [(None, (4, 2)), ("3", (3, 3)), ("none", (4, 2))])
def test_the_users_number_of_threads_is_that_of_a_start_and_of_a_resize(processes, monkeypatch, value, threads):
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert processes._fork_request(1, 1, "down").threads == threads[0]
    assert (processes.assign(2).threads, processes.assign(4).threads) == threads


class Engine:
    """An engine that starts a host in place of each that is lost. Those of `fails` end at once with these reasons."""

    def __init__(self, fails: dict[int, str]) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.fails = fails
        self.state = EngineState("slurm", 40.0, started={11: "node2"}, start_succeeded=True)

    def replace(self, node: int, *, wait: bool) -> Future[int | None]:
        self.asked.append((node, wait))
        if node in self.fails:
            self.state.ended[10 + node] = self.fails[node]
        future: Future[int | None] = Future()
        future.set_result(10 + node)
        return future


@pytest.fixture
def lost(processes) -> SimpleNamespace:
    """Return the table of hosts whose ranks 0 and 1 were on the nodes 0 and 1, which are lost."""
    processes._notes = []
    joined: set[int] = set()

    def move_lost(ranks, _replacements):
        return [rank for rank in ranks if 10 + rank not in joined]

    return SimpleNamespace(
        seats={},
        joined=joined,
        node_of=lambda rank: rank,
        has_node=joined.__contains__,
        move_lost=move_lost,
        report=lambda _: None,
    )


def move(
    processes: ClusterProcesses, lost: SimpleNamespace, engine: Engine, *, rounds: int = 100, timeout: float = 300.0
) -> None:
    """Move the ranks, or wait until an interrupt after `rounds` looks."""
    looks = itertools.count(1)
    processes._engine = engine  # type: ignore[assignment]
    driver = SimpleNamespace(changed=threading.Condition())
    processes._move_lost(lost, driver, (0, 1), {}, time.monotonic() + timeout, lambda: next(looks) > rounds)  # type: ignore[arg-type]


def test_a_host_is_requested_for_every_lost_node_and_the_reasons_end_the_wait(processes, lost):
    engine = Engine({0: "Invalid account", 1: "slurm: it exited with code 1"})
    with pytest.raises(StartError) as raised:
        move(processes, lost, engine)
    assert engine.asked == [(0, True), (1, True)]
    assert str(raised.value) == (
        "no host has a free slot for ranks 0-1: the agent on host 10 ended because Invalid account\n"
        "the agent on node2 ended because slurm: it exited with code 1"
    )


def test_a_host_that_has_joined_does_not_keep_the_wait_for_one_that_has_ended(processes, lost):
    lost.joined.add(10)
    with pytest.raises(StartError, match="no host has a free slot for rank 1: the agent on node2 ended because down"):
        move(processes, lost, Engine({1: "down"}))


def test_a_requested_host_that_has_not_ended_is_waited_for(processes, lost):
    with pytest.raises(KeyboardInterrupt):
        move(processes, lost, Engine({0: "down"}), rounds=3)


LONGER = "; wait longer with %distributed heal --timeout SECONDS"


@pytest.mark.parametrize(
    ("name", "queued", "advice"),
    [
        ("env", None, "; start an agent, then try again"),
        ("ssh", None, LONGER),
        (
            "slurm",
            HostQueued("job 9, Priority"),
            f": waiting in the queue (job 9, Priority); %distributed stop cancels it{LONGER}",
        ),
    ],
)
def test_the_end_of_the_timeout_names_the_queue_and_what_to_do(processes, lost, name, queued, advice):
    engine = Engine({})
    engine.state.name, engine.state.queued = name, queued
    with pytest.raises(StartError) as raised:
        move(processes, lost, engine, timeout=0.1)
    assert str(raised.value) == f"no host has a free slot for ranks 0-1{advice}"


def test_the_reason_of_a_replacement_that_has_failed_is_shown(processes, lost, capsys):
    processes._engine = Engine({1: "slurm: exit code 2"})  # type: ignore[assignment]
    processes._engine.state.handle(HostOutput(11, "execve(): No such file\n"))
    lost.is_lost, lost.has_free_slot = (lambda rank: rank == 1), (lambda _: False)
    replacements = processes._replace_hosts(lost, (0, 1), time.monotonic() + 300.0, lambda: False)  # type: ignore[arg-type]
    assert replacements == {1: 11} and processes._engine.asked == [(1, False)]
    assert capsys.readouterr().out == "the agent on node2 ended because slurm: exit code 2\nexecve(): No such file\n"


@pytest.fixture
def interrupted(monkeypatch) -> Iterator[tuple[ClusterProcesses, DriverHarness]]:
    """Return three ranks that are played by the test, and raise SIGINT before the first of them ends."""
    harness = DriverHarness(world_size=3)
    made = object.__new__(ClusterProcesses)
    made.state, made._driver, made._launcher = harness.state, harness.driver, harness.launcher  # type: ignore[assignment]
    made._stopped, made.assignment = threading.Event(), DeviceAssignment(("cpu",) * 3, "gloo", 1)
    harness.launch()
    perform, signals = harness.driver._perform, [signal.SIGINT]

    def perform_interrupted(action: act.Action) -> None:
        if isinstance(action, act.Kill | act.NotifyRankLost) and signals:
            signal.raise_signal(signals.pop())
        perform(action)

    monkeypatch.setattr(harness.driver, "_perform", perform_interrupted)
    yield made, harness
    harness.close()


def test_an_interrupt_of_a_resize_is_raised_when_all_ranks_that_leave_were_asked_to(interrupted):
    processes, harness = interrupted
    with pytest.raises(KeyboardInterrupt):
        processes.resize(DeviceAssignment(("cpu",), "gloo", 1), (), timeout=SOON)
    harness.wait_states(RankState.IDLE, RankState.LEAVING, RankState.LEAVING)
    assert isinstance(harness.next_task(1), Shutdown) and isinstance(harness.next_task(2), Shutdown)


def test_an_interrupt_is_raised_when_all_discarded_ranks_are_killed(interrupted):
    processes, harness = interrupted
    with pytest.raises(KeyboardInterrupt):
        processes.discard((1, 2), "was discarded")
    harness.wait_states(RankState.IDLE, RankState.DEAD, RankState.DEAD)
    assert harness.launcher.killed == [KillRank(rank=rank, incarnation=1) for rank in (1, 2)]


def test_a_front_end_gives_the_ranks_their_whole_time_to_end_and_leaves_those_that_are_kept(monkeypatch):
    stopped = []

    class Processes:
        def __init__(self, keep: float | None) -> None:
            self.keep = keep

        def stop(self, **options: float) -> dict[int, str]:
            stopped.append((self.keep, options))
            return {0: "exited with code 1", 1: "exited with code 1", 2: "exited with code 3"}

    clusters = [Processes(None), Processes(60.0)]
    monkeypatch.setattr(cluster_processes, "_clusters", clusters)
    assert cluster_processes.stop_all_clusters() == "ranks 0-1 exited with code 1; rank 2 exited with code 3"
    assert stopped == [(None, {})]
