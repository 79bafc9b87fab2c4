"""Test a cluster on the hosts of an engine: loss, replacement, queue, limited time, and engines that misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import site
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from rankbook import Cluster, RankLostError, StartError
from rankbook.coordinator import cluster_processes
from rankbook.coordinator.engine_monitor import LoseHost
from rankbook.coordinator.states import GracePeriods
from rankbook.engines import HostEnded, HostOutput
from rankbook.launch.connection import decode_connection
from rankbook.launch.hosts import HostOptions
from rankbook.launch.local import LocalLauncher
from rankbook.testing import FakeEngine
from tests.conftest import cluster_folders, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

REDUCE = "t = torch.full((2,), rank + 1.0); dist.all_reduce(t); t.tolist()"
LOOP = "import time\nfor _ in range(3000): time.sleep(0.02)"


@contextlib.contextmanager
def on(engine: FakeEngine, ranks: int = 2, *, timeout: float = 90.0, grace=None, nodes=None) -> Iterator[Cluster]:
    options = HostOptions(engine, address="127.0.0.1", nodes=nodes)
    with Cluster(ranks, hosts=options, timeout=timeout, grace=grace) as cluster:
        yield cluster


@pytest.fixture
def reported(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(cluster_processes, "_report", lines.append)
    return lines


class RecordingSink:
    def __init__(self) -> None:
        self.items: list[object] = []

    def emit(self, items) -> None:
        self.items += items


def agents() -> set[int]:
    """Return the agents that this process has started, and their supervisors."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if any("rankbook.agent" in word for word in process.cmdline())
    }


@pytest.mark.slow
def test_a_killed_agent_is_replaced_as_long_as_the_engine_has_hosts():
    engine = FakeEngine(2, spare=1)
    with on(engine) as cluster:
        cluster.run("kept = rank")
        began = time.monotonic()
        engine.kill(1)
        with pytest.raises(RankLostError, match=r"rank 1 was lost: the agent on host 1 ended because .* SIGKILL"):
            cluster.run(LOOP, timeout=60)
        assert time.monotonic() - began < 30  # not the 60 s of a host that is only not reachable
        wait_until(lambda: cluster.status()[0].state == "idle", timeout=30, what="the other rank is idle")
        assert cluster.heal() is not None
        assert cluster._processes.hosts.node_of(1) == 2
        assert cluster.run(REDUCE).text(0) == "[3.0, 3.0]"
        assert cluster.pull("kept") == [0, 0]
        engine.kill(2)
        wait_until(lambda: cluster.status()[1].state == "dead", timeout=30, what="the host is lost")
        with pytest.raises(StartError, match="the launcher fake has no other host"):
            cluster.heal()
        assert cluster.run("rank", ranks=[0]).text(0) == "0"
    assert agents() == set()


@pytest.mark.slow
def test_a_queue_is_shown_and_the_end_of_the_timeout_cancels_it(reported):
    engine = FakeEngine(1, queued="Resources")
    outcome: list[BaseException] = []

    def start() -> None:
        try:
            with on(engine, timeout=5):
                pass
        except BaseException as error:  # noqa: BLE001 - compared below
            outcome.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: reported, timeout=20, what="the queue is shown")
    thread.join(60)
    assert reported[0] == "fake: waiting in the queue (Resources); interrupt to cancel"
    assert isinstance(outcome[0], StartError) and "2 of 2 slots are missing" in str(outcome[0])
    assert agents() == set()


@pytest.mark.slow
def test_ranks_save_and_stop_before_their_hosts_end(reported):
    engine, sink = FakeEngine(1, walltime=3600), RecordingSink()
    with on(engine, 1, grace=GracePeriods(save=5.0)) as cluster:
        assert "in 60 minutes" in cluster.describe_launcher()
        cell = cluster.submit_code(
            "import time\ntry:\n    print('inside')\n    time.sleep(600)\n"
            "except KeyboardInterrupt:\n    print('saved')",
            number=0,
            ranks=None,
            sink=sink,
        )
        wait_until(lambda: "inside" in str(sink.items), timeout=20, what="the cell can catch the interrupt")
        engine._ends_at = time.time() + 13.0
        cluster._processes._engine._limits_due = 0.0
        cluster.wait(cell, timeout=30)
        assert cell.result is not None and "saved" in cell.result[0].stdout
        assert any("the hosts end in" in str(item) for item in sink.items)
        wait_until(lambda: cluster.stopped, timeout=30, what="the ranks stop before the end")
        assert cluster.ended_because == "the time of their hosts has ended"
    assert agents() == set()


@pytest.mark.slow
def test_packages_of_a_host_are_those_of_its_own_python(tmp_path, monkeypatch):
    for where in ("notebook", "agent", "user"):
        (tmp_path / where).mkdir()
        (tmp_path / where / "probe_pkg.py").write_text(f"WHERE = {where!r}\n")
    (tmp_path / "user" / "probe_pkg.py").rename(tmp_path / "user" / "users_module.py")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "notebook")])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "notebook"), str(tmp_path / "user"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "agent"))  # of the agent's process
    with on(FakeEngine(1), 1) as cluster:
        result = cluster.run("import probe_pkg, users_module\nprobe_pkg.WHERE, users_module.WHERE")
    assert result.text(0) == "('agent', 'user')"


@pytest.mark.full
def test_a_removed_runtime_folder_of_a_host_is_made_again():
    with on(FakeEngine(1), 2) as cluster:
        (host,) = cluster._processes.hosts._hosts.values()
        folders = cluster_folders(int(host.description.pid))
        assert folders
        for folder in folders:
            shutil.rmtree(folder)
        cluster.run("kept = rank + 1.0")
        with pytest.raises(RankLostError):
            cluster.run("import os\nif rank == 1: os._exit(3)")
        assert cluster.heal() is not None
        assert cluster.run(REDUCE).text(0) == "[3.0, 3.0]"
        assert cluster.pull("kept") == [1.0, 1.0]
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert agents() == set() and not any(folder.exists() for folder in folders)


class MakesKeys(FakeEngine):
    """Gives no key to its agents, as an engine whose program does not encrypt what it passes on."""

    def start(self, hosts, slots, connection):
        self._text = connection.text
        super().start(hosts, slots, dataclasses.replace(connection, text=f"{connection.public_text}\n"))

    def events(self):
        events = list(super().events())
        for event in events:
            if isinstance(event, HostOutput) and event.text.startswith("rankbook-agent-key "):
                assert decode_connection(self._text, "").keys.client_secret.decode() not in self.connection.text
                self.connection.allow(event.text.split()[1])
        return events


@pytest.mark.slow
def test_agents_without_a_key_make_one_and_are_accepted_when_it_is_allowed():
    with on(MakesKeys(2), 2) as cluster:
        assert cluster.run(REDUCE).text(0) == "[3.0, 3.0]"
    assert agents() == set()


class RaisesInStart(FakeEngine):
    def start(self, hosts, slots, connection):
        raise ZeroDivisionError("a bug")


class EndsAtOnce(FakeEngine):
    def start(self, hosts, slots, connection):
        self.pending.append(HostEnded(None, "the partition does not exist"))


class BlocksInStart(FakeEngine):
    released = threading.Event()

    def start(self, hosts, slots, connection):
        self.released.wait(60)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (RaisesInStart, "the launcher fake failed in start.*ZeroDivisionError: a bug"),
        (EndsAtOnce, "the agent ended because the partition does not exist"),
        (BlocksInStart, "2 of 2 slots are missing after 2 s"),
    ],
)
def test_a_start_that_an_engine_spoils_fails_with_the_cause(make, text, reported, monkeypatch):
    monkeypatch.setattr("rankbook.coordinator.engine_monitor._STOP_SECONDS", 1.0)
    # The engine is asked first: this host and the others import torch at the same time.
    monkeypatch.setattr(LocalLauncher, "wait_opened", lambda *_, **__: pytest.fail("it waited for the forkserver"))
    began = time.monotonic()
    with pytest.raises(StartError, match=text), on(make(2), timeout=60.0 if make is not BlocksInStart else 2.0):
        pass
    assert time.monotonic() - began < 50
    BlocksInStart.released.set()


class Misbehaves(FakeEngine):
    """Raises, lies and blocks once it has started."""

    def events(self):
        super().events()
        yield "nonsense"
        yield HostEnded(77, "of a lie")
        raise ZeroDivisionError("a bug")

    def replace(self, host, *, wait):
        raise RuntimeError("replace is not written yet")

    def limits(self):
        raise OSError("no limits")

    def stop(self):
        super().stop()
        raise RuntimeError("stop is not written yet")


@pytest.mark.slow
def test_an_engine_that_misbehaves_costs_nothing_but_its_hosts(reported):
    engine = Misbehaves(2)
    with on(engine, 2) as cluster:
        assert cluster.run(REDUCE).text(0) == "[3.0, 3.0]"
        engine.kill(1)
        wait_until(lambda: cluster.hosts()[1].unreachable is not None, timeout=30, what="the host is not reachable")
        cluster._processes._perform(LoseHost(1, "was lost: test"))
        wait_until(lambda: cluster.status()[1].state == "dead", timeout=30, what="the rank is lost")
        with pytest.raises(StartError, match="the launcher fake has no other host"):
            cluster.heal()
        assert cluster.run("rank", ranks=[0]).text(0) == "0"
        assert "failed in" in cluster.describe_launcher()
    shown = "\n".join(reported)
    assert "_queue.Empty" not in shown
    assert "'nonsense', which is no event" in shown and "stop is not written yet" in shown
    assert agents() == set()
