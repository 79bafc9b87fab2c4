"""Test what Slurm does to the ranks of a notebook: the queue, the end of the time, and the loss of a node.

They run in `.ci/full`, which installs Slurm, and are skipped where it is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from rankbook import Cluster, StartError
from rankbook.launch.hosts import HostOptions
from tests.conftest import Outcome, cluster_folders, running_kernel, wait_until
from tests.engines import programs

pytestmark = [pytest.mark.full, pytest.mark.engines, pytest.mark.timeout(400)]

START = "%distributed start --launcher slurm -n 4 --nodes 2 --address 127.0.0.1"
RESOURCES = """import os
print(os.environ["SLURM_CPUS_ON_NODE"], "cores,", os.environ["SLURM_GPUS_ON_NODE"], "GPUs")"""
SAVES_WHEN_INTERRUPTED = """%%distributed
import time
try:
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    open({path!r} + str(rank), "w").close()
    time.sleep(1)
    print("saved")"""


def jobs() -> str:
    return subprocess.check_output(["squeue", "-h", "-o", "%i %T"], text=True, timeout=30)


def test_the_interrupt_button_cancels_a_job_that_is_queued(short_path, monkeypatch):
    with programs.slurm_nodes(short_path, monkeypatch), running_kernel(timeout=30) as notebook:
        with programs.running(short_path / "occupied", "srun", "-N2", "--exclusive", "-t", "5", "sleep", "300"):
            wait_until(lambda: "RUNNING" in jobs(), timeout=60, what="the nodes are occupied")
            interrupted: list[str] = []

            def press(outcome: Outcome) -> None:
                if "waiting in the queue" in outcome.stdout and not interrupted:
                    interrupted.append(jobs())
                    notebook.interrupt()

            outcome = notebook.finish(notebook.send(START), timeout=120, seen=press)
            assert outcome.ename == "KeyboardInterrupt", outcome.text
            assert re.search(
                r"slurm: waiting in the queue \(job \d+, (Resources|Priority).*interrupt to cancel", outcome.stdout
            )
            assert "PENDING" in interrupted[0]
            wait_until(lambda: "PENDING" not in jobs(), timeout=30, what="the job is cancelled")
        wait_until(lambda: not jobs(), timeout=60, what="the nodes are free")
        # The kernel is as before.
        notebook.ok(START, timeout=120)
        assert "sum 4" in notebook.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t)\nprint('sum', int(t))").text


def test_the_end_of_the_time_is_announced_and_ranks_save_before_it(short_path, monkeypatch):
    with programs.slurm_nodes(short_path, monkeypatch), running_kernel(timeout=30) as notebook:
        notebook.ok(f"{START} -- --time=00:02:00 --gpus=4", timeout=120)
        assert notebook.ok(f"%%distributed\n{RESOURCES}").stdout.count("4 cores, 2 GPUs") == 1, "all of each node"
        status = notebook.ok("%distributed status").text
        assert re.search(r"launcher slurm: the hosts end at .*, in (2 minutes|1\d\d seconds|\d\d seconds)", status), (
            status
        )
        page = (Path(__file__).parents[2] / "docs" / "howto" / "slurm.md").read_text()
        function = page.partition("import os, subprocess, time")[2].partition("\nlast =")[0]
        left = "job_ends_at() - time.time()"
        code = f"%%distributed\nimport os, subprocess, time{function}\nprint('seconds', 60 < {left} < 121)"
        assert notebook.ok(code).stdout == "[0-3] seconds True\n", "as the page computes it"
        outcome = notebook.run(SAVES_WHEN_INTERRUPTED.format(path=f"{short_path}/saved-"), timeout=200)
        assert re.search(r"slurm: the hosts end at .*, in (60|5\d) seconds; save what you need", outcome.text), (
            outcome.text
        )
        assert "cells are interrupted, and the ranks stop when they have saved" in outcome.text
        assert "saved" in outcome.stdout
        assert sorted(path.name for path in short_path.glob("saved-*")) == [f"saved-{rank}" for rank in range(4)]
        # Before Slurm ends it.
        wait_until(lambda: not jobs(), timeout=30, what="the job ends")


def lose_node(cluster: Cluster, name: str, daemon: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node: its daemon, the daemon of the step, the agent, and the ranks."""
    hosts = cluster._processes.hosts
    assert hosts is not None
    (pid,) = (int(host.description.pid) for host in hosts._hosts.values() if host.name == name and not host.lost)
    agent = psutil.Process(pid)
    (step,) = (process for process in agent.parents() if process.name().startswith("slurmstepd"))
    daemon.kill()
    for process in (step, *step.children(recursive=True)):
        process.kill()
    psutil.wait_procs([agent], timeout=20)
    # A node that is gone has no folders; this one's are those of the machine.
    for folder in cluster_folders(pid):
        shutil.rmtree(folder, ignore_errors=True)


def test_the_launchers_own_job_stays_for_replacements_when_its_first_agents_have_ended(short_path, monkeypatch):
    def end_agent(rank: int) -> None:
        hosts = cluster._processes.hosts
        psutil.Process(int(hosts._hosts[hosts.seats[rank].host].description.pid)).kill()
        wait_until(lambda: cluster.status()[rank].state == "dead", timeout=60, what="the host is lost")

    with programs.slurm_nodes(short_path, monkeypatch):
        with Cluster(2, hosts=HostOptions("slurm", "127.0.0.1", nodes=2, lost_after=300.0)) as cluster:
            cluster.run("kept = rank")
            job = jobs()
            end_agent(1)
            cluster.heal()
            end_agent(0)  # the last one of the first step
            cluster.run("kept = 7", ranks=[1])
            cluster.heal()
            assert cluster.pull("kept") == [7, 7] and jobs() == job
            for rank in (0, 1):
                end_agent(rank)
            cluster.heal(empty=True)
            assert cluster.run("t = torch.ones(1); dist.all_reduce(t); t.item()").text(0) == "2.0"
            assert jobs() == job
        wait_until(lambda: not jobs(), timeout=60, what="the job ends")


def test_the_ranks_of_a_lost_node_go_to_a_free_node_of_the_allocation(short_path, monkeypatch):
    with programs.slurm_nodes(short_path, monkeypatch, nodes=3) as daemons:
        granted = subprocess.run(
            # Its number of GPUs is that of three nodes, and a step has two, and then one.
            ["salloc", "--no-shell", "--no-kill", "-N3", "--exclusive", "--gpus=6"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        job = re.search(r"job allocation (\d+)", granted.stderr)
        assert job is not None, granted.stderr
        monkeypatch.setenv("SLURM_JOB_ID", job[1])
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
        with Cluster(4, hosts=HostOptions("slurm", "127.0.0.1", nodes=2, lost_after=300.0)) as cluster:
            cluster.run("kept = rank")
            lose_node(cluster, "node2", daemons["node2"])
            wait_until(lambda: cluster.status()[3].state == "dead", timeout=120, what="the node is lost")
            assert "node2" in str(cluster.status()[3].loss)
            assert cluster.pull("kept", ranks=[0, 1]) == [0, 1]
            cluster.heal()
            assert [(host.name, host.ranks) for host in cluster.hosts()] == [("node1", (0, 1)), ("node3", (2, 3))]
            assert "4.0" in cluster.run("t = torch.ones(1); dist.all_reduce(t); t.item()").text(3)
            gpus = cluster.run("import os\nos.environ['SLURM_GPUS_ON_NODE']")
            assert [gpus.text(rank) for rank in range(4)] == ["'2'"] * 4
            # The last node: there is none left.
            lose_node(cluster, "node3", daemons["node3"])
            wait_until(lambda: cluster.status()[3].state == "dead", timeout=120, what="the node is lost")
            with pytest.raises(StartError, match="the launcher slurm has no other host"):
                cluster.heal()
            assert cluster.pull("kept", ranks=[0, 1]) == [0, 1]
        subprocess.run(["scancel", job[1]], check=True, timeout=30)
        wait_until(lambda: not jobs(), timeout=60, what="the allocation ends")
