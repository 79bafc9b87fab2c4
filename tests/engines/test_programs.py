"""Test the engines with the real programs: the suite for engines, and a session that trains, loses and heals.

They run in `.ci/full`, which installs the programs, and are skipped where one is missing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankbook.engines import AgentConnection, HostQueued, processes
from rankbook.engines.slurm import SlurmEngine
from rankbook.testing import check_engine
from tests.agent.namespaces import Network
from tests.conftest import wait_until
from tests.engines import programs

pytestmark = [pytest.mark.full, pytest.mark.engines, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
RAY = pytest.param("ray", marks=pytest.mark.alone)
SESSION = (sys.executable, "-m", "tests.engines.session")


class Place:
    """Where a session runs: its launcher with arguments, the address to listen at, and the prefix of its command."""

    def __init__(
        self, launcher: str, arguments: Sequence[str] = (), *, address: str = "127.0.0.1", prefix: Sequence[str] = ()
    ) -> None:
        self.launcher = launcher
        self.arguments = list(arguments)
        self.address = address
        self.prefix = list(prefix)

    def command(self, *options: str) -> list[str]:
        return [*self.prefix, *SESSION, *options, self.launcher, self.address, *self.arguments]


@contextlib.contextmanager
def place_of(launcher: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Run the servers that a launcher needs."""
    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(folder / "connect"))
    if launcher == "ssh":
        with programs.ssh_hosts(folder) as (network, options):
            prefix = ["ip", "netns", "exec", network.namespace("a")]
            yield Place("ssh", options, address=network.addresses["a"], prefix=prefix)
    elif launcher == "slurm":
        with programs.slurm_nodes(folder, monkeypatch):
            yield Place("slurm")
    elif launcher == "mpirun":
        with programs.mpi_hosts(folder) as (network, options):
            prefix = ["ip", "netns", "exec", network.namespace("a")]
            yield Place("mpirun", options, address=network.addresses["a"], prefix=prefix)
    elif launcher == "ray":
        with programs.ray_nodes(folder, monkeypatch):
            yield Place("ray")
    else:
        yield Place(launcher)


def run_session(place: Place, folder: Path) -> dict[str, Any]:
    """Run a session, and return what it tells. Lines that start an agent are run, as many times as there are nodes."""
    steps: dict[str, Any] = {}
    output = ""
    with (
        contextlib.ExitStack() as agents,
        (folder / "errors").open("w+") as errors,
        subprocess.Popen(place.command(), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as session,
    ):
        assert session.stdout is not None
        for line in session.stdout:  # pytest-timeout limits it
            output += line
            steps |= json.loads(line) if line.startswith("{") else {}
            if match := _ON_THE_NODE.fullmatch(line):
                for _ in range(1 if "losses" in steps else 2):
                    agents.enter_context(programs.running(folder / "agents", "bash", "-c", match[1]))
        assert session.wait(60) == 0, (steps, output[-3000:], Path(errors.name).read_text()[-3000:])
    return steps


_ON_THE_NODE = re.compile(r" +on the node +(.+)\n")


@functools.cache
def local_session() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_session(Place("local"), Path(folder))


@pytest.mark.parametrize("launcher", ["env", "ssh", "slurm", "mpirun", RAY])
def test_a_session_trains_as_locally_loses_heals_and_leaves_nothing(launcher, tmp_path, monkeypatch, short_path):
    with place_of(launcher, short_path, monkeypatch) as place:
        steps = run_session(place, short_path)
    print(launcher, steps)
    assert steps["losses"] == local_session()["losses"]
    assert steps["accuracy"] == local_session()["accuracy"]
    assert [ranks for _, ranks in steps["hosts"]] == [[0, 1], [2, 3]]
    assert "rank 3 was healed" in steps["healed"]
    assert 0 <= steps["reported"] < 20  # on an idle machine within 2 s
    assert "the agent on" in steps["loss"]
    assert steps["failed"] and steps["kept"] == [0, 1]
    if launcher == "mpirun":
        assert "the launcher mpirun has no other host" in steps["not replaced"]
    else:
        assert float(steps["sum"].strip("'")) == 4.0
    assert 0 <= steps["stopped"] < 30
    assert steps["file"] is False


@pytest.mark.parametrize("launcher", ["fake", "env", "ssh", "slurm", "mpirun", RAY])
def test_nothing_is_left_after_a_stop_a_restart_and_the_death_of_a_kernel(launcher, monkeypatch, short_path):
    with place_of(launcher, short_path, monkeypatch) as place:
        command = [*place.prefix, sys.executable, "-m", "tests.engines.kernel_ends"]
        done = subprocess.run(
            [*command, launcher, place.address, *place.arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=380,
        )
        steps: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            steps |= json.loads(line) if line.startswith("{") else {}
        print(launcher, steps)
        if done.returncode:  # an assertion would cut the text
            pytest.fail(f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        assert steps.keys() == {"stop", "restart", "kill"}
        assert not any(step["left"] for step in steps.values())
        for step in ("stop", "restart"):
            assert steps[step]["seconds"] < 20  # on an idle machine within 10 s


def check_on(network: Network, code: str) -> None:
    """Run the suite for engines on host `a`, for the class `Engine` and the `options` that `code` defines."""
    check = f"check_engine(lambda: Engine(options), address={network.addresses['a']!r})"
    code = f"{code}\nfrom rankbook.testing import check_engine\n{check}"
    command = ["ip", "netns", "exec", network.namespace("a"), sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr


def test_ssh_passes_the_suite(short_path):
    with programs.ssh_hosts(short_path) as (network, options):
        check_on(network, f"from rankbook.engines.processes import SshEngine as Engine\noptions = {options!r}")


def test_ssh_does_not_give_up_a_machine_that_cannot_be_reached_for_some_time(short_path):
    with programs.ssh_hosts(short_path) as (network, options):
        # Its default is three messages without an answer.
        passed = [*options[options.index("--") + 1 :], "-o", "ServerAliveInterval=1"]
        command = ["ssh", *passed, *processes._OPTIONS, network.addresses["b"], "cat"]
        with subprocess.Popen(
            ["ip", "netns", "exec", network.namespace("a"), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as connection:
            assert connection.stdin is not None and connection.stdout is not None
            for line in (b"before\n", b"after\n"):
                connection.stdin.write(line)
                connection.stdin.flush()
                assert connection.stdout.readline() == line
                if line == b"before\n":
                    network.cut("b")
                    with pytest.raises(subprocess.TimeoutExpired):
                        connection.wait(8)
                    network.mend("b")


def test_slurm_passes_the_suite_and_leaves_no_job(short_path, monkeypatch):
    with programs.slurm_nodes(short_path, monkeypatch):
        check_engine(lambda: SlurmEngine([]))
        wait_until(lambda: not _jobs(), timeout=30, what="no job is left")


def test_slurm_shows_its_queue_and_its_time_and_a_stop_cancels_the_job(short_path, monkeypatch):
    with programs.slurm_nodes(short_path, monkeypatch):
        connection = AgentConnection("text", short_path / "none", "127.0.0.1")
        with programs.running(short_path / "occupied", "srun", "-N2", "--exclusive", "-t", "5", "sleep", "300"):
            wait_until(lambda: "RUNNING" in "".join(_jobs()), timeout=30, what="the nodes are occupied")
            engine, events = SlurmEngine(["--", "-t", "5"]), []
            engine.start(2, 2, connection)
            wait_until(
                lambda: events.extend(engine.events()) or any(isinstance(event, HostQueued) for event in events),
                timeout=60,
                what="the queue is reported",
            )
            assert "PENDING" in "".join(_jobs())
            engine.stop()
            wait_until(lambda: "PENDING" not in "".join(_jobs()), timeout=30, what="the job is cancelled")
        wait_until(lambda: not _jobs(), timeout=30, what="the nodes are free")


_NOTEBOOK = {
    "cells": [
        {"cell_type": "code", "execution_count": None, "id": str(number), "metadata": {}, "outputs": [], "source": code}
        for number, code in enumerate(
            (
                "%load_ext rankbook",
                "%distributed start --launcher slurm -n 4 --address 127.0.0.1",
                "%distributed status",
                "%%distributed\nt = torch.ones(1); dist.all_reduce(t)\nprint('sum', t.item(), 'of', world_size)",
                "%%distributed\nimport os\nprint(os.environ['SLURM_GPUS_ON_NODE'], 'GPUs,', os.environ.get('CHOSEN'))",
            )
        )
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def test_a_notebook_runs_headless_on_the_nodes_of_a_batch_job(short_path, monkeypatch):
    with programs.slurm_nodes(short_path, monkeypatch):
        notebook, script = short_path / "notebook.ipynb", short_path / "job.sh"
        notebook.write_text(json.dumps(_NOTEBOOK))
        rankbook = Path(sys.executable).with_name("rankbook")
        # The step has neither the job's number of GPUs per task, nor its list of variables.
        asked = "#SBATCH -N2 -n4 --gpus-per-task=1 --export=PATH,HOME,SLURM_CONF"
        lines = (
            "#!/bin/bash",
            f"{asked} -t 30 -o {short_path}/job.out",
            "export CHOSEN=1",
            f"{rankbook} run {notebook}",
        )
        script.write_text("\n".join(lines) + "\n")
        subprocess.run(["sbatch", "--wait", str(script)], check=False, timeout=300, cwd=short_path)
        output = (short_path / "job.out").read_text()
        assert "sum 4.0 of 4" in output, output
        assert "the hosts end at" in output, output
        assert "2 GPUs, 1" in output, output
        wait_until(lambda: not _jobs(), timeout=60, what="the job ends")


def test_mpirun_passes_the_suite(short_path):
    with programs.mpi_hosts(short_path) as (network, options):
        check_on(network, f"from rankbook.engines.processes import MpirunEngine as Engine\noptions = {options!r}")


@pytest.mark.alone
def test_ray_passes_the_suite(short_path, monkeypatch):
    with programs.ray_nodes(short_path, monkeypatch):
        # In a process of its own: Ray's driver leaves threads, and warnings of other packages.
        code = (
            "from rankbook.testing import check_engine\nfrom rankbook.engines.ray import RayEngine\n"
            "check_engine(lambda: RayEngine([]))"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr


@pytest.mark.alone
def test_the_ranks_of_a_lost_ray_node_are_healed_when_ray_has_placed_their_bundle(short_path, monkeypatch):
    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(short_path / "connect"))
    steps: dict[str, Any] = {}
    command = [sys.executable, "-m", "tests.engines.ray_loss", "127.0.0.1"]
    with (
        programs.ray_nodes(short_path, monkeypatch) as send,
        (short_path / "errors").open("w") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as notebook,
    ):
        assert notebook.stdout is not None
        for line in notebook.stdout:
            step = json.loads(line) if line.startswith("{") else {}
            steps |= step
            if "up" in step:
                send("remove")
            if "lost" in step:
                send("add")
        assert notebook.wait(60) == 0, (steps, (short_path / "errors").read_text()[-3000:])
    print("ray", steps)
    # The notebook may notice it before Ray does.
    assert 0 <= steps["seconds"] < 60 and "the agent on" in steps["loss"]
    assert steps["lost"] in ([0, 1], [2, 3]) and steps["kept"] is True
    assert float(steps["sum"].strip("'")) == 4.0


def _jobs() -> list[str]:
    done = subprocess.run(["squeue", "-h", "-o", "%i %T"], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.splitlines()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
