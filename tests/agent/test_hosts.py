"""Test ranks behind agents: the same cells, interrupts, heal and values as on one host."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rankbook import (
    CellError,
    CellTimeout,
    Cluster,
    InvalidArgument,
    RankLostError,
    StartError,
    current,
    notebook_launcher,
    stop,
)
from rankbook.coordinator import cluster_processes
from rankbook.launch import connection, hosts
from rankbook.launch.hosts import HostOptions
from rankbook.transport.agent_link import AgentLink, make_keys
from tests.agent.agents import Agents, cluster_on_hosts
from tests.conftest import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

REDUCE = "t = torch.full((2,), rank + 1.0); dist.all_reduce(t); t.tolist()"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Agents]]:
    """Return three ranks: 0 on this host, 1 and 2 on two others."""
    with (
        pytest.MonkeyPatch.context() as patch,
        cluster_on_hosts(tmp_path_factory.mktemp("hosts"), patch, 3, [1, 1], home=1) as made,
    ):
        yield made


@pytest.fixture
def three(shared: tuple[Cluster, Agents]) -> Cluster:
    return shared[0]


def pid_of(cluster: Cluster, rank: int) -> int:
    pid = cluster.status()[rank].pid
    assert pid is not None
    return pid


def test_ranks_of_three_hosts_form_one_group_and_know_their_place(three):
    assert three.run(REDUCE).text(0) == "[6.0, 6.0]"
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    three.run(f"import os; place = tuple(os.environ[name] for name in {names}) + (local_rank,)")
    assert three.pull("place") == [(str(rank), "0", "1", str(rank), "3", "127.0.0.1", 0) for rank in range(3)]
    status = three.status()
    assert status[0].host == "" and status[1].host and status[2].host and status[1].host != status[2].host


def test_no_rank_sees_the_keys(three, shared):
    secret = connection.decode_connection(shared[1].file.read_text(), "file").keys.client_secret.decode()
    three.run("import os; variables = list(os.environ.values())")
    assert not any(secret in value for values in three.pull("variables") for value in values)
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert commands and not any(secret in command for command in commands)
    assert shared[1].file.stat().st_mode & 0o777 == 0o600
    assert secret not in repr(three) + repr(three.hosts())


def test_large_values_cross_in_both_directions_and_leave_nothing(three):
    three.push({"value": bytes(range(256)) * 40_000})
    assert [len(value) for value in three.pull("value")] == [10_240_000] * 3
    assert three.pull("value", ranks=[2]) == [bytes(range(256)) * 40_000]
    three.scatter("part", [[rank] * 100_000 for rank in range(3)])
    assert three.gather("part") == [rank for rank in range(3) for _ in range(100_000)]
    three.run("del value, part")
    wait_until(lambda: not segments(), timeout=20, what="no shared memory is left")


def test_an_interrupted_push_leaves_no_shared_memory(three):
    cell = three.submit_code("import time; time.sleep(60)", number=0, ranks=[1], sink=None)
    with pytest.raises(CellTimeout):
        three.push({"value": bytes(50_000_000)}, ranks=[1, 2], timeout=0.3)
    three.interrupt_cell(cell)
    three.wait(cell, timeout=30)
    wait_until(lambda: not segments(), timeout=30, what="no shared memory is left")
    assert three.run(REDUCE).text(0) == "[6.0, 6.0]"


def test_an_error_and_an_interrupt_end_a_cell_on_all_hosts(three):
    with pytest.raises(CellError, match="rank 2: ValueError: only here"):
        three.run("if rank == 2: raise ValueError('only here')\ndist.barrier()")
    cell = three.submit_code("import time\ntime.sleep(60)", number=0, ranks=None, sink=None)
    wait_until(lambda: cell.started is not None, timeout=20, what="the cell starts")
    start = time.monotonic()
    three.interrupt_cell(cell)
    three.wait(cell, timeout=30)
    assert cell.result is not None and time.monotonic() - start < 20
    three.run(REDUCE)


def test_a_rank_that_is_killed_on_another_host_is_healed_there(three):
    three.run("kept = 7")
    host = three.status()[1].host
    os.kill(pid_of(three, 1), signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"rank 1 was killed by SIGKILL"):
        three.run("import time\nfor _ in range(1000): time.sleep(0.02)")
    assert three.heal() is not None
    assert three.pull("kept") == [7, 7, 7]
    assert three.status()[1].host == host
    assert three.run(REDUCE).text(0) == "[6.0, 6.0]"


def test_the_last_output_of_a_rank_that_is_killed_arrives(three):
    cell = three.submit_code(
        "import os\nif rank == 2:\n    print('last words', flush=True)\n    os.kill(os.getpid(), 9)",
        number=0,
        ranks=None,
        sink=None,
    )
    three.wait(cell, timeout=60)
    assert cell.result is not None and "last words" in cell.result[2].stdout
    assert three.heal() is not None


def test_the_stacks_of_a_rank_that_crashes_on_another_host_arrive(three):
    cell = three.submit_code("import ctypes\nif rank == 2: ctypes.string_at(0)", number=0, ranks=None, sink=None)
    three.wait(cell, timeout=60)
    assert cell.result is not None and "Segmentation fault" in cell.result[2].stderr
    assert three.heal() is not None


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_looked_at_by_its_own_host(three):
    pid = pid_of(three, 2)
    os.kill(pid, signal.SIGSTOP)
    try:
        host = three.status()[2].host
        text = f"process stopped on {host}; kill -CONT {pid} resumes it"
        wait_until(lambda: text in three.status()[2].state, timeout=30, what="the status says that it is stopped")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: three.status()[2].state == "idle", timeout=30, what="it answers again")


def test_every_host_has_a_line_in_the_status(three):
    first, second = three.hosts()
    assert (first.ranks, second.ranks) == ((1,), (2,))
    wait_until(lambda: three.hosts()[0].round_trip is not None, timeout=20, what="a round trip is measured")
    assert first.dropped == 0 and first.unreachable is None


def test_the_placement_has_the_names_of_the_hosts(three):
    placed = three.placement(timeout=20)
    assert [rank.host for rank in placed.ranks][1:] == [status.host for status in three.status()][1:]
    assert len({rank.host for rank in placed.ranks[1:]}) == 2, "although both have the host name of this machine"


def test_a_connection_without_the_key_is_refused_and_counted(three, shared):
    assert three.describe_refusals() == ""
    right = connection.decode_connection(shared[1].file.read_text(), "file")
    fresh, _ = make_keys()
    wrong = replace(right.keys, client_public=fresh.client_public, client_secret=fresh.client_secret)
    link = AgentLink(right.address, right.port, wrong, "stranger", b"")
    try:
        wait_until(lambda: "without the key refused" in three.describe_refusals(), timeout=20, what="it is counted")
    finally:
        link.close(0)
    assert three.run(REDUCE).text(0) == "[6.0, 6.0]"


@pytest.mark.slow
def test_a_checkpoint_in_a_folder_that_hosts_do_not_share_is_refused_and_named(three, tmp_path):
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    # One path that is another folder for every rank, as a local disk is.
    three.run(f"import os; os.chdir({str(tmp_path)!r} + f'/{{rank}}')\nfrom rankbook.checkpoint import load, save")
    folder = "/proc/self/cwd/checkpoints"
    state = "state = {'w': torch.ones(8)}"
    with pytest.raises(CellError, match=r"rank 1 on .* does not see .*, which rank 0 on .* has created: all hosts"):
        three.run(f"{state}\nsave(state, {folder!r}, step=1)", timeout=60)
    assert [path.name for path in (tmp_path / "1").rglob("*.distcp")] == []
    three.run("os.chdir('..')")
    three.run(f"save(state, {folder!r}, step=1)", timeout=60)
    three.run(f"loaded = load(state, {folder!r})", timeout=60)
    three.run(
        "os.chdir(str(rank))\n"
        "if rank == 0: os.rename('checkpoints', 'old'); os.symlink('../checkpoints', 'checkpoints')"
    )
    with pytest.raises(CellError, match=r"rank 1 on .* does not see"):
        three.run(f"load(state, {folder!r})", timeout=60)


@pytest.mark.slow
def test_a_host_that_is_lost_costs_its_ranks_and_is_replaced_by_another_one(tmp_path, monkeypatch):
    with cluster_on_hosts(tmp_path, monkeypatch, 3, [1, 1, 1], home=1) as (cluster, agents):
        cluster.run("kept = rank")
        lost = cluster.status()[2].host
        number = next(
            index for index, agent in enumerate(agents.processes) if pid_of(cluster, 2) in pids_below(agent.pid)
        )
        here = [tmp_path / f"here-{rank}" for rank in range(3)]
        cell = cluster.submit_code(
            f"import time; open({str(tmp_path)!r} + f'/here-{{rank}}', 'w')\n"
            "if rank == 2: time.sleep(60)\ndist.all_reduce(torch.ones(2))",
            number=0,
            ranks=None,
            sink=None,
        )
        wait_until(lambda: all(path.exists() for path in here), timeout=20, what="two ranks wait for the third one")
        agents.processes[number].terminate()  # its end is known at once
        cluster.wait(cell, timeout=30)
        assert cell.result is not None
        with pytest.raises(RankLostError, match=r"rank 2 was lost: the agent on .* ended because it received SIGTERM"):
            cell.result.raise_for_status()
        # The cell ends in the notebook after the grace period `death_release`, also if a rank still leaves it.
        states = ["idle", "idle", "dead"]
        wait_until(lambda: [state.state for state in cluster.status()] == states, timeout=20, what="two ranks are idle")
        assert cluster.heal() is not None
        assert cluster.status()[2].host not in ("", lost)
        assert cluster.pull("kept") == [0, 1, 0]
        assert cluster.run(REDUCE).text(0) == "[6.0, 6.0]"
        assert agents.processes[number].wait(20) == 1


@pytest.mark.full
def test_a_rank_learns_that_another_one_has_moved_to_its_host(tmp_path, monkeypatch):
    with cluster_on_hosts(tmp_path, monkeypatch, 2, [1, 1]) as (cluster, agents):
        agents.start("--slots", "2", "--node", "2")
        wait_until(lambda: sum(host.slots for host in cluster.hosts()) == 4, timeout=60, what="a third host is there")
        names = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")
        cluster.run(f"import os; names = {names}; port = os.environ['MASTER_PORT']")
        first_port = cluster.pull("port")[0]
        for rank, numbers in ((0, [("1", "0", "2"), ("1", "1", "2")]), (1, [("2", "0", "1"), ("2", "0", "1")])):
            agents.processes[rank].terminate()
            wait_until(lambda rank=rank: cluster.status()[rank].state == "dead", timeout=30, what="the host is lost")
            assert cluster.heal() is not None
            cluster.run("import os; *place, port = map(os.environ.get, names)")
            assert list(map(tuple, cluster.pull("place"))) == numbers
            # That of the host where rank 0 runs now.
            assert len(set(cluster.pull("port"))) == 1 and cluster.pull("port")[0] != first_port
            # Groups that are made by these variables use the store of the cluster.
            cluster.run("dist.destroy_process_group(); dist.init_process_group('gloo')")
            assert cluster.run(REDUCE).text(0) == "[3.0, 3.0]"


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_with_it_and_its_host_is_lost_at_once(tmp_path, monkeypatch):
    with cluster_on_hosts(tmp_path, monkeypatch, 2, [1], home=1, lost_after=300.0) as (cluster, agents):
        (agent,) = agents.processes
        below = pids_below(agent.pid)
        wait_until(lambda: not cluster._processes.hosts._tested, timeout=20, what="the agent's port is tested")
        agent.kill()
        agent.wait()
        with pytest.raises(RankLostError, match=r"rank 1 was lost: the agent on .* has ended, perhaps killed"):
            cluster.run("import time\nfor _ in range(3000): time.sleep(0.02)", timeout=40)
        wait_until(lambda: not any(map(psutil.pid_exists, below)), timeout=20, what="its processes end")
        agents.start("--slots", "1")
        assert cluster.heal() is not None
        assert cluster.run(REDUCE).text(0) == "[3.0, 3.0]"


@pytest.mark.full
def test_agents_that_a_launcher_has_started_per_rank_keep_their_numbers_and_end_on_signals(tmp_path, monkeypatch):
    torchrun = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    tasks = [{**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (1, 0)]
    with cluster_on_hosts(tmp_path, monkeypatch, 2, [], tasks=tasks) as (cluster, agents):
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        cluster.run(f"import os, signal; place = [os.environ[name] for name in {names}]")
        assert cluster.pull("place") == [[str(rank), str(rank), "2", "0", "1"] for rank in range(2)]
        assert [pid_of(cluster, rank) in pids_below(agents.processes[1 - rank].pid) for rank in range(2)] == [True] * 2
        # The launcher has ignored these signals, which a new program inherits.
        assert cluster.run("signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL").text(0) == "True"
        below = {pid for agent in agents.processes for pid in pids_below(agent.pid)}
        for agent, number in zip(agents.processes, (signal.SIGINT, signal.SIGHUP), strict=True):
            agent.send_signal(number)
            assert agent.wait(20) == 1
        assert "ends because it received SIGINT" in agents.log(0)
        assert "ends because it received SIGHUP" in agents.log(1)
        wait_until(lambda: not any(map(psutil.pid_exists, below)), timeout=20, what="its processes end")


@pytest.mark.slow
def test_a_cut_of_the_connection_loses_and_repeats_nothing(tmp_path, monkeypatch):
    with cluster_on_hosts(tmp_path, monkeypatch, 4, [2], home=2, through_proxy=True) as (cluster, agents):
        assert agents.proxy is not None
        cluster.run("value = bytes(range(256)) * (1 << 20)")  # 256 MiB
        pulled: list[object] = []
        cell = cluster.submit_code(
            "import time\nfor number in range(400): print(rank, number); time.sleep(0.02)",
            number=0,
            ranks=[0, 1, 3],
            sink=None,
        )

        def pull() -> None:
            try:
                (value,) = cluster.pull("value", ranks=[2], timeout=100)
                pulled.append(value == bytes(range(256)) * (1 << 20))
            except BaseException as error:  # noqa: BLE001 - compared below
                pulled.append(error)

        puller = threading.Thread(target=pull)
        puller.start()
        wait_until(lambda: cell.started is not None, timeout=20, what="the cell runs")
        agents.proxy.cut()
        wait_until(lambda: cluster.hosts()[0].unreachable is not None, timeout=20, what="the host is not reachable")
        assert "not reachable for" in cluster.status(timeout=1)[3].state
        agents.proxy.accepting = True
        cluster.wait(cell, timeout=100)
        puller.join(100)
        assert pulled == [True]
        assert cell.result is not None
        for rank in (0, 1, 3):
            assert cell.result[rank].stdout == "".join(f"{rank} {number}\n" for number in range(400))
        assert cluster.run(REDUCE).text(0) == "[10.0, 10.0]"


@pytest.mark.slow
def test_a_stop_ends_the_agents_and_removes_everything(tmp_path, monkeypatch):
    with cluster_on_hosts(tmp_path, monkeypatch, 2, [2]) as (cluster, agents):
        below = {pid for agent in agents.processes for pid in pids_below(agent.pid)}
        file = agents.file
        cluster.stop()
        assert [agent.wait(20) for agent in agents.processes] == [0]
        assert not file.exists()
        wait_until(lambda: not any(map(psutil.pid_exists, below)), timeout=10, what="all processes end")


@pytest.mark.slow
def test_the_launcher_starts_ranks_on_other_nodes_and_uses_them_again(tmp_path, monkeypatch):
    agents = Agents(tmp_path)

    def report(text: str) -> None:
        agents.lines.append(text)
        if match := re.search(r"--connect (\S+\.json)", text):
            assert "--slots 2" in text
            listening.append(json.loads(Path(match[1]).read_text())["port"])
            agents.start("--slots", "2", file=Path(match[1]))

    def choose_address(wanted: str | None) -> str:
        addresses.append(wanted)
        return "127.0.0.1"

    listening: list[int] = []
    addresses: list[str | None] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(tmp_path / "connect"))
    monkeypatch.setattr(cluster_processes, "_report", report)
    monkeypatch.setattr(hosts, "choose_address", choose_address)

    def place() -> tuple[str, ...]:
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        return tuple(os.environ[name] for name in names)

    try:
        first = notebook_launcher(place, num_processes=2, num_nodes=2, master_addr="10.1.2.3", use_port=str(port))
        assert (addresses, listening) == (["10.1.2.3"], [port])
        assert first == [
            ("0", "0", "0", "2", "2"),
            ("1", "1", "0", "2", "2"),
            ("2", "0", "1", "2", "2"),
            ("3", "1", "1", "2", "2"),
        ]
        pids = notebook_launcher(os.getpid, num_processes=2, num_nodes=2)
        assert notebook_launcher(os.getpid) == pids, "the ranks that are running"
        current().run("kept = 1")
        with pytest.raises(InvalidArgument, match="num_nodes=3 with num_processes=2 are 6 ranks, but 4 ranks are run"):
            notebook_launcher(place, num_processes=2, num_nodes=3)
    finally:
        stop()
        agents.end()


@pytest.mark.slow
def test_the_key_may_come_by_standard_input_or_by_the_environment_and_an_agent_ends_with_its_parent(
    tmp_path, monkeypatch
):
    agents = Agents(tmp_path)
    command = [sys.executable, "-m", "rankbook.agent", "--slots", "1"]

    def start(command: list[str], text: str, **options: object) -> None:
        with (tmp_path / "agents.log").open("ab") as log:
            agent = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, **options)
        assert agent.stdin is not None
        agent.stdin.write(text.encode())
        agent.stdin.close()
        agents.processes.append(agent)

    def report(text: str) -> None:
        if match := re.search(r"--connect (\S+\.json)", text):
            agents.file = Path(match[1])
            key = agents.file.read_text()
            start([*command, "--connect", "-"], key)
            start(command, "", env={**os.environ, connection.CONNECT: key})
        elif text == "waiting for 1 more slot":
            # It waits for its child, so that the agent is not the command of this process.
            parent = f"import subprocess, sys; subprocess.run({[*command, '--connect', '-']!r}, stdin=sys.stdin)"
            start([sys.executable, "-c", parent], agents.file.read_text())

    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(tmp_path / "connect"))
    monkeypatch.setattr(cluster_processes, "_report", report)
    try:
        with Cluster(3, hosts=HostOptions(address="127.0.0.1"), timeout=90) as cluster:
            assert cluster.run(REDUCE).text(0) == "[6.0, 6.0]"
            cluster.run("import os; names = sorted(os.environ)")
            assert not any(connection.CONNECT in names for names in cluster.pull("names"))
            below = pids_below(agents.processes[2].pid)
            (rank,) = [rank for rank in range(3) if pid_of(cluster, rank) in below]
            agents.processes[2].kill()
            wait_until(lambda: cluster.status()[rank].state == "dead", timeout=30, what="the host is lost")
            assert "its parent process has ended" in (cluster.status()[rank].loss or "")
            wait_until(lambda: not any(map(psutil.pid_exists, below)), timeout=20, what="its processes end")
    finally:
        agents.end()


def test_a_signal_that_slurm_sends_before_the_end_of_a_job_does_not_keep_an_agent_busy(shared):
    cluster, agents = shared
    agent = psutil.Process(agents.processes[0].pid)
    agent.send_signal(signal.SIGUSR1)
    before = agent.cpu_times()
    cluster.run("import time\ntime.sleep(1)")
    after = agent.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.25


def test_an_agent_imports_torch_while_it_waits_for_its_key_to_be_allowed():
    link = connection.Connection("test", "127.0.0.1", 9, 60.0, make_keys()[0])
    command = [sys.executable, "-m", "rankbook.agent", "--connect", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(link.encode(with_key=False))
        agent.stdin.flush()
        assert agent.stdout.readline().startswith("rankbook-agent-key ")
        [forkserver] = below = pids_below(agent.pid)
        # A process that was started a moment ago may not have its own command line yet.
        wait_until(
            lambda: "rankbook.rank.forkserver" in psutil.Process(forkserver).cmdline(),
            timeout=20,
            what="the forkserver runs",
        )
        agent.stdin.close()  # nobody allows it
        assert agent.wait(20) == 2
    assert not any(map(psutil.pid_exists, below))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost_after", "reason"),
    [
        pytest.param(2.0, "the notebook was not reached", marks=pytest.mark.full),
        (300.0, "the notebook's process has ended"),
    ],
)
def test_agents_end_when_the_notebook_is_killed(tmp_path, monkeypatch, lost_after, reason):
    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(tmp_path / "connect"))
    code = (
        "import rankbook, time\n"
        f"rankbook.start(1, launcher='env', address='127.0.0.1', lost_after={lost_after})\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    agents = Agents(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as notebook:
        wait_until(lambda: bool([*tmp_path.glob("connect/*.json")]), timeout=60, what="the connection file")
        # A child of this process: the agent is to end for the loss of the notebook, not for that of its parent.
        agent = agents.start("--slots", "1", file=next(tmp_path.glob("connect/*.json")))
        assert notebook.stdout is not None
        assert any(line == "ready\n" for line in notebook.stdout)
        below = pids_below(agent.pid)
        notebook.kill()
    assert agent.wait(40) == 1
    assert f"ends because {reason}" in agents.log(0)
    wait_until(lambda: not any(map(psutil.pid_exists, below)), timeout=20, what="agent and ranks end")
    wait_until(lambda: not [*tmp_path.glob("connect/*.json")], timeout=20, what="the connection file is removed")


@pytest.mark.full
def test_an_agent_of_another_version_is_refused_with_the_reason_on_both_sides(tmp_path, monkeypatch):
    started = threading.Event()
    versions = hosts.local_versions()
    monkeypatch.setattr(hosts, "local_versions", lambda: {**versions, "rankbook": "99.0"})
    with (
        pytest.raises(StartError, match="1 of 1 slots are missing"),
        cluster_on_hosts(tmp_path, monkeypatch, 1, [1], timeout=20.0),
    ):
        started.set()
    assert not started.is_set()
    assert "instead of 99.0" in (tmp_path / "agent-0.log").read_text()


@pytest.mark.full
def test_a_start_without_agents_ends_and_leaves_nothing(tmp_path, monkeypatch):
    with (
        pytest.raises(StartError, match="2 of 2 slots are missing after 1 s"),
        cluster_on_hosts(tmp_path, monkeypatch, 2, [], timeout=1.0),
    ):
        raise AssertionError("it started")
    assert list((tmp_path / "connect").iterdir()) == []


def test_a_start_that_waits_for_hosts_sleeps_although_the_forkserver_has_answered(tmp_path, monkeypatch):
    waits = []
    wait = hosts.HostsLink.wait
    monkeypatch.setattr(hosts.HostsLink, "wait", lambda *arguments: waits.append(1) or wait(*arguments))
    with Cluster(1):
        pass  # its forkserver is kept, and answers the next start at once
    with (
        pytest.raises(StartError, match="are missing after 1 s"),
        cluster_on_hosts(tmp_path, monkeypatch, 2, [], timeout=1.0),
    ):
        raise AssertionError("it started")
    assert 2 <= len(waits) < 50, "one in 0.1 s"


def test_an_interrupt_of_a_start_leaves_nothing(tmp_path, monkeypatch):
    before = threading.active_count()
    lines: list[str] = []

    def report(text: str) -> None:
        lines.append(text)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(tmp_path / "connect"))
    monkeypatch.setattr(cluster_processes, "_report", report)
    with pytest.raises(KeyboardInterrupt), Cluster(2, hosts=HostOptions(address="127.0.0.1"), timeout=60):
        raise AssertionError("it started")
    assert "waiting for 2 slots" in lines[0]
    assert list((tmp_path / "connect").iterdir()) == []
    wait_until(lambda: threading.active_count() <= before, timeout=20, what="no thread is left")


def test_ranks_on_other_hosts_cannot_be_kept():
    with pytest.raises(InvalidArgument, match="keep is not available with ranks on other hosts: they end with the"):
        Cluster(1, hosts=HostOptions(address="127.0.0.1"), keep=60)


def test_the_cores_of_this_host_limit_its_own_ranks_only(monkeypatch):
    monkeypatch.setattr(cluster_processes, "usable_cores", lambda: 1)
    with pytest.raises(InvalidArgument, match="invalid number of ranks: 100; expected 1 to 64 on 1 cores"):
        Cluster(200, hosts=HostOptions(address="127.0.0.1", home=100))
    with pytest.raises(StartError, match="128"):
        Cluster(128, hosts=HostOptions(address="127.0.0.1"), timeout=0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"launcher": "magic"}, "invalid launcher 'magic'"),
        ({"port": 70_000}, "invalid port 70000"),
        ({"home": -1}, "invalid number of ranks on this host: -1"),
        ({"lost_after": 0.1}, "invalid lost_after=0.1"),
    ],
)
def test_invalid_options_are_rejected(options, text):
    with pytest.raises(InvalidArgument, match=text):
        HostOptions(**options)


def test_an_address_that_this_host_does_not_have_is_rejected_with_those_it_has():
    with pytest.raises(InvalidArgument, match=r"invalid address '192\.0\.2\.7'.*127\.0\.0\.1"):
        connection.choose_address("192.0.2.7")
    assert connection.choose_address("127.0.0.1") == "127.0.0.1"


def test_without_a_network_the_start_lists_the_interfaces(monkeypatch):
    monkeypatch.setattr(connection, "interface_addresses", lambda: {"127.0.0.1": "lo"})
    monkeypatch.setattr(connection, "_default_route", lambda: None)
    with pytest.raises(StartError, match=r"no address that other hosts can reach \(lo 127\.0\.0\.1\)"):
        connection.choose_address(None)


def test_a_label_of_an_interface_has_an_address_too_and_ipv6_alone_is_named(monkeypatch):
    up = {"eth0": SimpleNamespace(isup=True), "eth1": SimpleNamespace(isup=False)}
    monkeypatch.setattr(connection.psutil, "net_if_stats", lambda: up)
    given = {"eth0": "10.0.0.1", "eth0:1": "10.0.0.2", "eth1": "10.0.0.3"}
    entries = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in given.items()}
    monkeypatch.setattr(connection.psutil, "net_if_addrs", lambda: entries)
    assert connection.interface_addresses() == {"10.0.0.1": "eth0", "10.0.0.2": "eth0:1"}
    entries = {"eth0": [SimpleNamespace(family=socket.AF_INET6, address="fe80::1")]}
    monkeypatch.setattr(connection, "_default_route", lambda: None)
    with pytest.raises(StartError, match="no interface with an IPv4 address is up, and IPv6 alone is not supported"):
        connection.choose_address(None)


def segments() -> list[Path]:
    """Return the shared memory of all hosts of this test run."""
    return list(Path(os.environ["RANKBOOK_RUNTIME_DIR"]).rglob("*segment-*"))


def pids_below(pid: int) -> set[int]:
    return {process.pid for process in psutil.Process(pid).children(recursive=True)}
