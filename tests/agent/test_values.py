"""Test large values between hosts: where they lie, and what happens where there is no room for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rankbook import Cluster
from rankbook.launch.hosts import Hosts
from tests.agent.agents import Agents, cluster_on_hosts

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


def test_the_state_of_a_healed_rank_stays_on_the_host_that_it_shares_with_the_donor(three, monkeypatch):
    three.run("value = torch.arange(1_000_000)")
    crossed: list[str] = []
    hosts = hosts_of(three)
    monkeypatch.setattr(hosts.segments, "write_part", lambda name, *_: crossed.append(name) or True)
    monkeypatch.setattr(hosts.segments, "read", crossed.append)
    kill(three, 2)
    healed = three.heal()
    assert healed is not None and healed.donor == 1, "not rank 0, which runs on another host"
    assert crossed == []
    monkeypatch.undo()
    assert three.run("value.sum().item()", ranks=[2]).text(2) == "499999500000"


def test_the_state_of_a_healed_rank_crosses_to_a_host_without_a_donor(three):
    three.run("value = torch.arange(1_000_000)")
    kill(three, 0)
    healed = three.heal()
    assert healed is not None and healed.donor == 1
    assert three.run("value.sum().item()", ranks=[0]).text(0) == "499999500000"
    assert not any(host.segments for host in hosts_of(three)._hosts.values()), "no copy is left"
