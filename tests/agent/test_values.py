"""Test large values between hosts: where they lie, and what happens where there is no room for them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankbook import CellError, CellTimeout, Cluster, RankLostError, TransferError
from rankbook.launch.hosts import Hosts
from rankbook.protocol.telemetry import Measure
from rankbook.transport import shared_memory
from tests.agent.agents import Agents, cluster_on_hosts
from tests.conftest import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Agents]]:
    """Return three ranks: 0 on this host, 1 and 2 on another one."""
    with (
        pytest.MonkeyPatch.context() as patch,
        cluster_on_hosts(tmp_path_factory.mktemp("hosts"), patch, 3, [2], home=1) as made,
    ):
        yield made


@pytest.fixture
def three(shared: tuple[Cluster, Agents]) -> Cluster:
    return shared[0]


def hosts_of(cluster: Cluster) -> Hosts:
    hosts = cluster._processes.hosts
    assert hosts is not None
    return hosts


def kill(cluster: Cluster, rank: int) -> None:
    pid = cluster.status()[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_state_of_a_healed_rank_stays_on_the_host_that_it_shares_with_the_donor(three, monkeypatch):
    three.run("value = torch.arange(1_000_000)")
    crossed: list[str] = []
    hosts = hosts_of(three)
    monkeypatch.setattr(hosts.segments, "write_part", lambda name, *_, **__: crossed.append(name))
    monkeypatch.setattr(hosts.segments, "read", crossed.append)
    kill(three, 2)
    healed = three.heal()
    assert healed is not None and healed.donor == 1, "not rank 0, which runs on another host"
    assert crossed == []
    monkeypatch.undo()
    assert three.run("value.sum().item()", ranks=[2]).text(2) == "499999500000"


@pytest.mark.slow
def test_the_state_of_a_healed_rank_crosses_to_a_host_without_a_donor(three):
    three.run("value = torch.arange(1_000_000)")
    kill(three, 0)
    healed = three.heal()
    assert healed is not None and healed.donor == 1
    assert three.run("value.sum().item()", ranks=[0]).text(0) == "499999500000"
    assert not any(host.segments for host in hosts_of(three)._hosts.values()), "no copy is left"


@pytest.mark.slow
def test_a_transfer_that_takes_more_than_a_second_shows_how_far_it_is(three, monkeypatch, capsys):
    hosts = hosts_of(three)
    (host,) = hosts._hosts.values()
    describe, next_part = hosts.describe_transfers, host.sender.next_part
    shown: list[str] = []

    def recorded() -> str:
        shown.append(describe())
        return shown[-1]

    monkeypatch.setattr(hosts, "describe_transfers", recorded)
    # The network stands still until it is seen to.
    monkeypatch.setattr(host.sender, "next_part", lambda: next_part() if any(shown) else None)
    three.push({"value": bytes(5_000_000)}, timeout=60)
    assert f"0 B of 5 MB to {host.name}" in capsys.readouterr().err
    shown.clear()
    three.push({"value": 1}, timeout=60)
    assert capsys.readouterr().err == "", "a short one shows nothing"


@pytest.mark.slow
def test_a_host_that_is_lost_in_the_middle_fails_only_its_transfer(tmp_path, monkeypatch):
    size = 40_000_000
    with cluster_on_hosts(tmp_path, monkeypatch, 3, [1, 1], home=1) as (cluster, agents):
        hosts = hosts_of(cluster)
        host = hosts._hosts[hosts.seats[2].host]
        (agent,) = (agent for agent in agents.processes if agent.pid == int(host.description.pid))
        # Until then, a silent host is known to be lost only after `lost_after`.
        wait_until(lambda: not hosts._tested, timeout=20, what="the agents' ports are tested")
        cluster.run(f"sent = bytes({size})")
        next_part = host.sender.next_part
        parts: list[object] = []

        def stop_after_some() -> object:
            if len(parts) == 3:
                agent.kill()
            if len(parts) < 3 and (part := next_part()) is not None:
                parts.append(part)
                return part
            return None

        monkeypatch.setattr(host.sender, "next_part", stop_after_some)
        with pytest.raises(RankLostError, match="rank 2 was lost"):
            cluster.push({"value": bytes(size)}, timeout=100)
        assert len(parts) == 3, "it was in the middle"
        wait_until(lambda: cluster.status()[0].state == "idle", timeout=30, what="the others are idle")
        result = cluster.run("len(value)", ranks=[0, 1])
        assert [result.text(rank) for rank in (0, 1)] == [str(size)] * 2
        assert cluster.pull("sent", ranks=[1], timeout=60) == [bytes(size)]
        assert cluster.run("del value", ranks=[0, 1])
        agents.start("--slots", "1")
        cluster.heal()
        assert cluster.pull("sent", ranks=[2], timeout=60) == [bytes(size)]


@pytest.mark.slow
def test_an_interrupted_pull_ends_the_transfer_and_leaves_no_shared_memory(three, monkeypatch):
    three.run("value = bytes(5_000_000)", ranks=[1])
    (host,) = hosts_of(three)._hosts.values()
    # The network stands still.
    monkeypatch.setattr(host.receiver, "receive", lambda *_: None)
    with pytest.raises(CellTimeout):
        three.pull("value", ranks=[1], timeout=1)
    monkeypatch.undo()
    wait_until(lambda: three.status()[1].state == "idle", timeout=20, what="the answer does not wait for its value")
    wait_until(lambda: not host.receiver._refused and not segments(), timeout=20, what="no shared memory is left")
    assert three.pull("value", ranks=[1], timeout=60) == [bytes(5_000_000)]
    assert three.hosts()[0].dropped == 0


NO_ROOM = r"5 MB does not fit into the shared memory of .*: 10 kB are free in .*; send it in smaller parts, or make"


@pytest.mark.slow
def test_a_value_without_room_in_this_hosts_memory_costs_only_its_transfer(three, monkeypatch):
    three.run("value = bytes(5_000_000)")
    monkeypatch.setattr(shared_memory, "_free_bytes", lambda _: 10_000)
    with pytest.raises(TransferError, match=NO_ROOM):
        three.pull("value", ranks=[1], timeout=60)
    monkeypatch.undo()
    assert three.pull("value", ranks=[1], timeout=60) == [bytes(5_000_000)]
    assert three.hosts()[0].dropped == 0
    wait_until(lambda: not segments(), timeout=20, what="no shared memory is left")


# An agent's own process decides, so it runs with less memory.
@pytest.mark.slow
def test_a_value_without_room_in_another_hosts_memory_costs_only_its_cell(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'rankbook.agent' in ' '.join(sys.orig_argv):\n"
        "    from rankbook.transport import shared_memory\n"
        "    shared_memory._free_bytes = lambda _: 10_000\n"
        "    import time\n"
        "    now, monotonic = time.time, time.monotonic\n"
        "    time.time, time.monotonic = lambda: now() + 300, lambda: monotonic() - 70\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"))
    with cluster_on_hosts(tmp_path, monkeypatch, 3, [2], home=1) as (cluster, _):
        check_clocks(cluster)
        cluster.run("kept = rank")
        with pytest.raises(CellError, match=f"ranks? 1.*TransferError: a value of {NO_ROOM}"):
            cluster.push({"value": bytes(5_000_000)}, timeout=60)
        assert cluster.pull("kept") == [0, 1, 2]
        assert cluster.run("len(value)", ranks=[0]).text(0) == "5000000"
        assert cluster.hosts()[0].dropped == 0
        # The forkserver is another process. Its ranks have all of the memory, and what they answer is read here.
        cluster.run("value = bytes(5_000_000)")
        assert cluster.pull("value", ranks=[2], timeout=60) == [bytes(5_000_000)]


def check_clocks(cluster: Cluster) -> None:
    """Check that times of the ranks get the axis of this host, by the clocks of their agent."""
    hosts = hosts_of(cluster)
    wait_until(lambda: hosts.clock_offset(1).wall != 0, timeout=20, what="a round trip is measured")
    assert hosts.clock_offset(1).wall == pytest.approx(300, abs=5)
    assert hosts.clock_offset(1).monotonic == pytest.approx(-70, abs=5)
    epoch = time.time_ns()
    cell = cluster.submit_code(
        "t = torch.ones(2); dist.all_reduce(t)", number=1, ranks=None, sink=None, measure=Measure(True, epoch)
    )
    cluster.wait(cell, timeout=60)
    starts = {}
    for rank, measured in cluster.take_values(cell).items():
        (span,) = measured.times.spans
        events = json.loads(b"[%s]" % measured.profile.events)
        starts[rank] = (span.launched - time.monotonic(), 1e-6 * min(event["ts"] for event in events if "ts" in event))
    # The clocks of the ranks themselves are right in this test, so that they seem to be as wrong as the agent's is.
    for rank, shift in ((0, (0, 0)), (1, (70, -300)), (2, (70, -300))):
        assert starts[rank] == pytest.approx(shift, abs=30)


def segments() -> list[str]:
    """Return the shared memory of all hosts of this test run."""
    return [path.name for path in Path(os.environ["RANKBOOK_RUNTIME_DIR"]).rglob("*segment-*")]
