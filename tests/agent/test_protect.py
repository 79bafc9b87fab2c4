"""Test the protection of ranks on several hosts: a killed rank, a lost host, and both copies lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankbook import Cluster, RankbookError
from rankbook.launch import local
from tests.agent.agents import Agents, cluster_on_hosts
from tests.conftest import wait_until
from tests.faults.protected import Training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

RANKS = 4
HOME = 1


@contextlib.contextmanager
def three_hosts(folder: Path) -> Iterator[tuple[Cluster, Agents]]:
    """Start rank 0 on this host, and the others on two of three others, on which two ranks have room."""
    with pytest.MonkeyPatch.context() as patch:
        # Once in every forkserver, instead of on every rank.
        patch.setenv("RANKBOOK_PRELOAD", "start")
        local.shutdown_prestarted()
        with cluster_on_hosts(folder, patch, RANKS, [2, 2, 2], home=HOME) as made:
            yield made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Agents]]:
    with three_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def agent_of(cluster: Cluster, agents: Agents, rank: int) -> int:
    """Return the number of the agent that runs `rank`."""
    pid = cluster.status()[rank].pid
    return next(
        number
        for number, agent in enumerate(agents.processes)
        if agent.poll() is None and pid in {child.pid for child in psutil.Process(agent.pid).children(recursive=True)}
    )


def snapshot_files(cluster: Cluster) -> list[list[str]]:
    """Return the names of the snapshots' data files in the shared memory of every rank's host."""
    cluster.run(
        "from rankbook import snapshot_files\n"
        "files = sorted(path.name for path in snapshot_files.this_place.folder.glob('snapshot-*.data'))"
    )
    return cluster.pull("files")


@pytest.mark.full
def test_a_killed_rank_is_healed_on_its_own_host(hosts):
    cluster, _ = hosts
    training = Training(cluster, "fsdp", steps=30)
    host = cluster.status()[2].host
    status = cluster.protection()
    assert status is not None and status.copies == 4
    assert "protected every step: snapshot of step 0" in str(status)
    training.kill(2, "backward", after=3)
    assert "back at step 3" in str(training.heal())
    assert cluster.status()[2].host == host
    training.check(10)
    assert f"snapshot of step {training.at}" in cluster.placement().protection
    assert f"snapshot of step {training.at}" in str(cluster.protection())


@pytest.mark.slow
def test_every_snapshot_has_a_copy_on_the_next_host_and_all_memory_is_given_back(hosts):
    cluster, _ = hosts
    Training(cluster, "ddp", steps=5)
    cluster.run("train(3)")
    names = lambda *ranks: [f"snapshot-{rank}-{generation}.data" for rank in ranks for generation in (0, 1)]  # noqa: E731
    assert snapshot_files(cluster) == [names(0, 3), names(0, 1, 2), names(0, 1, 2), names(1, 2, 3)]
    cluster.protect(0)
    assert snapshot_files(cluster) == [[]] * RANKS
    assert cluster.protection() is None
    assert cluster.placement().protection == ""


@pytest.mark.full
def test_a_rank_that_dies_during_the_copy_to_the_next_host_costs_at_most_two_steps(hosts):
    cluster, _ = hosts
    training = Training(cluster, "fsdp", steps=30)
    cluster.run(
        "from rankbook.runtime import snapshot_copies\n"
        "sending = snapshot_copies.transfer\n"
        "def transfer(sent, received):\n"
        "    if rank == 1 and optimizer.steps == 4 and sent and len(sent[0][1]) > 100: victim.die()\n"
        "    sending(sent, received)\n"
        "snapshot_copies.transfer = transfer"
    )
    with contextlib.suppress(RankbookError):
        cluster.run("train(1000)")
    cluster.run("snapshot_copies.transfer = sending", ranks="0,2-3")
    assert "back at step 3" in str(training.heal())
    training.check(10)


@pytest.mark.slow
def test_the_ranks_of_a_lost_host_are_healed_on_another_one_until_both_copies_are_lost(tmp_path):
    one_thread = "torch.set_num_threads(1)"  # another host gives a rank another number, and sums another order
    with three_hosts(tmp_path) as (cluster, agents):
        cluster.run(one_thread)
        training = Training(cluster, "fsdp", steps=40)
        cluster.run("losses = train(3)")
        lost = cluster.status()[3].host
        agents.processes[agent_of(cluster, agents, 3)].terminate()
        wait_until(lambda: cluster.status()[3].state == "dead", timeout=30, what="the host is lost")
        assert "back at step 3: no step to repeat" in str(training.heal())
        assert cluster.status()[3].host not in ("", lost)
        cluster.run(one_thread)
        training.check(10)
        # The copies are made anew: also this host may be lost.
        cluster.run("losses = train(2)")
        agents.processes[agent_of(cluster, agents, 3)].terminate()
        agents.start("--slots", "2")
        wait_until(lambda: cluster.status()[3].state == "dead", timeout=30, what="the host is lost")
        assert "back at step 15: no step to repeat" in str(training.heal())
        cluster.run(one_thread)
        training.check(10)
        # Both hosts at once.
        cluster.run(
            "from rankbook import snapshot_files\n"
            "for path in snapshot_files.this_place.folder.glob('snapshot-3-*'): path.unlink(missing_ok=True)"
        )
        os.kill(cluster.status()[3].pid or 0, signal.SIGKILL)
        wait_until(lambda: cluster.status()[3].state == "dead", timeout=30, what="the rank is dead")
        healed = str(cluster.heal())
        assert "not restored: there is no snapshot of one step that all ranks have" in healed
        assert "no snapshot of rank 3 is left" in healed
