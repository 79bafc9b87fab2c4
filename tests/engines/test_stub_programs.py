"""Test the engines of command line programs with stand-ins for these: command lines, events, the suite for engines."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankbook.coordinator.engine_monitor import EngineState
from rankbook.engines import (
    AgentConnection,
    HostEnded,
    HostOutput,
    HostQueued,
    HostStarted,
    Limits,
    Notice,
    slurm,
    slurm_tools,
    supervisor,
)
from rankbook.engines.engine import make_engine
from rankbook.engines.processes import (
    MpirunEngine,
    SshEngine,
    StepEngine,
    choose_replacement,
    describe_start,
    quote_remote_path,
)
from rankbook.engines.ray import _RayHost, agent_environment
from rankbook.engines.slurm import NodeResources, SlurmEngine, options_per_host, read_queue, read_resources
from rankbook.errors import InvalidArgument, StartError
from rankbook.testing import check_engine
from tests.conftest import wait_until
from tests.engines import stub_ray

STUB = Path(__file__).parent / "stubs" / "launch.py"
TIME = "2026-01-02T10:00:00"


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """Put stand-ins on the PATH. Returns their folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ssh", "srun", "mpirun"):
        (folder / name).write_text(f"#!{sys.executable}\n{STUB.read_text()}")
        (folder / name).chmod(0o755)
    for name in ("squeue", "scontrol", "scancel"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/asked\ncat {folder}/{name}.txt\n')
        (folder / name).chmod(0o755)
        (folder / f"{name}.txt").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_LOG", str(folder / "log"))
    return folder


def commands(programs: Path) -> list[list[str]]:
    return [json.loads(line) for line in (programs / "log").read_text().splitlines()]


@pytest.mark.processes
def test_ssh_passes_the_suite(programs):
    check_engine(lambda: SshEngine(["--hosts", "me@a,b", "--folder", "/", "--", "-p", "2222"]))
    first, second, again, *_ = commands(programs)
    assert first[:3] == second[:3] == ["ssh", "-p", "2222"]
    assert {first[-2], second[-2]} == {"me@a", "b"} and again[-2] == "me@a"
    assert "BatchMode=yes" in first and "ControlMaster=no" in first, "terminals of the user do not end with it"
    settings = dict(option.split("=") for option in first if option.startswith("ServerAlive"))
    seconds = int(settings["ServerAliveInterval"]) * int(settings["ServerAliveCountMax"])
    assert seconds >= 86_400, "the most that `lost_after` may be"
    assert first[-1].startswith(f"cd / && exec {sys.executable} -P -m rankbook.testing --connect - --slots 1 --node ")


@pytest.mark.processes
def test_slurm_passes_the_suite(programs):
    check_engine(lambda: SlurmEngine(["--", "--partition=gpu", "--gpus=4", "-w", "a,b"], environment={}))
    hold, first, *_ = commands(programs)
    assert hold[: hold.index("--exclusive")] == first[: first.index("--overlap")]
    # All of a node's cores: a step of srun's own job has one per task.
    assert "--exclusive" in hold and "--exclusive" not in first
    assert "-w" in hold and "-w" not in first, "the step has all nodes of the job"
    for option in (
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--wait=0",
        "--kill-on-bad-exit=0",
        "--mpi=none",
        "--no-kill",
        "--export=ALL",
        "--partition=gpu",
        "--gpus-per-node=2",
    ):
        assert option in hold and option in first
    assert first.index("--partition=gpu") < first.index(sys.executable)
    assert "scancel --name=rankbook-" in (programs / "asked").read_text()


@pytest.mark.processes
def test_slurm_uses_the_nodes_of_its_allocation_and_replaces_one_by_a_free_one(programs):
    (programs / "scontrol.txt").write_text("node1\nnode2\nnode3\n")
    (programs / "squeue.txt").write_text(f"7|RUNNING|None|{TIME}|2096-01-02T11:00:00|1:00:00\n")
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
    check_engine(lambda: SlurmEngine([], environment=environment))
    first, again, *_ = commands(programs)
    assert "--nodelist=node1,node2" in first and "--overlap" in first and "--exclusive" not in first
    assert "--nodelist=node3" in again and "--jobid=7" in again and "--node" in again
    assert "scontrol show hostnames node[1-3]" in (programs / "asked").read_text()
    assert "squeue --noheader --jobs=7" in (programs / "asked").read_text()
    assert "scancel" not in (programs / "asked").read_text()


@pytest.mark.processes
def test_a_further_job_has_the_gpus_of_one_node_and_may_have_any_node(programs):
    engine = SlurmEngine(["--", "-G", "a100:16", "--nodelist", "a,b", "--exclusive=user"], environment={})
    started = []
    engine.start_job = lambda _, command, **__: started.append(command)  # type: ignore[method-assign]
    engine.start(2, 16, AgentConnection("text", Path("/f"), "127.0.0.1"))
    engine.replace(0, wait=True)
    for command in started:
        assert command.count("--gpus-per-node=a100:8") == 2
    assert "--nodelist" in started[0] and "--nodelist" not in started[1]


def test_a_further_job_that_is_still_queued_is_waited_for_again(monkeypatch):
    monkeypatch.setattr(slurm_tools, "version", lambda: (22, 5))
    engine, started = SlurmEngine([], environment={}), []

    def start_job(job, *_, **__):
        started.append(job)
        engine.jobs[job] = None

    monkeypatch.setattr(engine, "start_job", start_job)
    engine.start(2, 2, AgentConnection("text", Path("/f"), "127.0.0.1"))
    assert engine.replace(0, wait=True) == engine.replace(0, wait=True) == 2
    assert engine.replace(1, wait=True) == engine.replace(1, wait=True) == 3
    assert started == [None, 2, 3]
    monkeypatch.setattr("rankbook.engines.processes.ProcessEngine.events", lambda _: [])
    monkeypatch.setattr(slurm_tools, "run", lambda *_: "")
    del engine.jobs[2]  # cancelled
    engine.read_output(3, "rankbook-host 3 started: node3\n")
    engine.events()
    assert engine.replace(0, wait=True) == 4, "another one was cancelled"
    assert engine.replace(1, wait=True) == 5, "another one has started, and its slots are taken"


@pytest.mark.parametrize(
    ("lost", "in_use", "used", "tried", "chosen"),
    [
        ("a", "b", "ab", "", "c"),  # it was never used
        ("c", "b", "abc", "", "a"),  # its agent has ended before
        ("c", "ab", "abc", "", "c"),  # the same one again
        ("a", "b", "ab", "c", "a"),
        ("a", "ab", "ab", "c", "c"),  # it is in use again, by the replacement of another one
        ("a", "abc", "abc", "", None),
        ("c", "b", "abc", "a", "c"),  # a failed one does not keep the lost one from being tried
        ("c", "b", "abc", "ac", "a"),
        ("c", "b", "abc", "aca", "c"),
        ("b", "", "ab", "", "c"),
    ],
)
def test_a_machine_that_is_not_in_use_replaces_a_lost_one_and_after_it_the_same_one(lost, in_use, used, tried, chosen):
    assert choose_replacement(["a", "b", "c"], lost, in_use, used, [*tried]) == chosen
    assert choose_replacement([], lost, in_use, used, [*tried]) == (None if lost in in_use else lost)
    assert choose_replacement(["a"], None, ["a"], ["a"], []) is None


def test_ssh_goes_back_to_a_machine_that_was_replaced(monkeypatch):
    engine = SshEngine(["--hosts", "a,b,c"])
    monkeypatch.setattr(engine, "start_job", lambda number, _: engine.jobs.update({number: None}))
    engine.start(2, 2, AgentConnection("text", Path("/f"), "127.0.0.1"))
    for lost, machine in ((0, "c"), (2, "a"), (3, "c")):
        del engine.jobs[lost]
        number = engine.replace(lost, wait=False)
        assert engine._machine_of[number] == machine


def test_slurm_goes_back_to_a_node_that_was_replaced(monkeypatch):
    monkeypatch.setattr(slurm_tools, "run", lambda *_: "node1\nnode2\nnode3\n")
    monkeypatch.setattr(slurm_tools, "version", lambda: (22, 5))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
    engine, nodes = SlurmEngine([], environment=environment), []

    def start_job(_, command, **__):
        nodes.append(next(word.partition("=")[2] for word in command if word.startswith("--nodelist=")))

    monkeypatch.setattr(engine, "start_job", start_job)
    monkeypatch.setattr("rankbook.engines.processes.ProcessEngine.events", lambda _: [])
    engine.start(2, 2, AgentConnection("text", Path("/f"), "127.0.0.1"))
    engine.read_output(None, "rankbook-host 0 started: node1\nrankbook-host 1 started: node2\n")
    for job, lost in ((None, 0), (2, 2), (3, 3)):
        engine.read_output(job, f"rankbook-host {lost} ended: x\n")
        number = engine.replace(lost, wait=False)
        engine.read_output(number, f"rankbook-host {number} started: {engine.names[number]}\n")
        engine.events()
    assert nodes == ["node1,node2", "node3", "node1", "node3"]


@pytest.mark.processes
def test_steps_that_cannot_share_gpus_are_not_started_beside_one_that_has_them(programs, monkeypatch):
    monkeypatch.setenv("STUB_VERSION", "21.08.5")
    check_engine(lambda: SlurmEngine([], environment={}))
    first = commands(programs)[0]
    assert "--exclusive" in first and "rankbook.testing" in first


@pytest.mark.parametrize(
    ("options", "of_any", "of_all"),
    [
        (["-p", "gpu", "--gpus=16", "-w", "a,b"], ["-p", "gpu", "--gpus-per-node=8"], ["-w", "a,b"]),
        (["-G16", "-wa,b", "--time=1"], ["--gpus-per-node=8", "--time=1"], ["-wa,b"]),
        (["--gpus", "v100:4", "--exclusive"], ["--gpus-per-node=v100:2"], ["--exclusive"]),
        (["--nodefile", "/f", "--gpus=3"], [], ["--nodefile", "/f", "--gpus=3"]),
        (["--gpus=v100:2,a100:2"], [], ["--gpus=v100:2,a100:2"]),
        (["--gpus-per-node=8", "--gres", "gpu:8"], ["--gpus-per-node=8", "--gres", "gpu:8"], []),
    ],
)
def test_options_of_a_whole_job_are_told_from_those_of_a_host(options, of_any, of_all):
    assert options_per_host(options, 2) == (of_any, of_all)


NODES = """   TresPer{}
   JOB_GRES=gpu:8
     Nodes=node[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3),nic:1(CNT:1)
     Nodes=node3 CPU_IDs=0-7 Mem=0 GRES=gpu:3090:2(IDX:0-1)
     Nodes=node4 CPU_IDs=0-7 Mem=0 GRES=
"""
RESOURCES = [
    NodeResources("node[1-2]", {"gpu:a100": 4, "nic": 1}),
    NodeResources("node3", {"gpu:3090": 2}),
    NodeResources("node4", {}),
]


@pytest.mark.parametrize(
    ("asked", "resources"),
    [
        ("Task=gres:gpu:1", RESOURCES),
        ("Task=cpu=4,gres/gpu=1", RESOURCES),
        ("Job=gres:gpu:8", RESOURCES),
        ("Job=gres:gpu:8\n TresPerNode=gres:gpu:4", RESOURCES),
        ("Node=gres:gpu:4", []),
        ("Node=gres/gpu:4\n TresPerTask=cpu=2", []),
        ("", RESOURCES),
    ],
)
def test_a_step_asks_for_gpus_that_the_job_was_not_asked_for_per_node(asked, resources):
    assert read_resources(NODES.format(asked)) == resources


@pytest.mark.parametrize(
    ("options", "nodes", "gres"),
    [
        ([], ["node1", "node2"], ["--gres=gpu:4,nic:1"]),
        ([], ["node1", "node3"], ["--gres=gpu:2"]),  # as many as there are on all nodes
        ([], ["node4"], []),
        (["--gpus-per-node=1"], ["node1"], []),
        (["-G1"], ["node1"], []),
        (["--gres-flags=x"], ["node3"], ["--gres=gpu:2"]),
    ],
)
def test_gpus_are_those_of_the_nodes_of_the_step(monkeypatch, options, nodes, gres):
    text = NODES.format("Task=gres:gpu:1").replace(":a100", "").replace(":3090", "")
    names = {"node[1-2]": "node1\nnode2"}
    monkeypatch.setattr(slurm_tools, "run", lambda *words: text if words[2] == "job" else names.get(words[3], words[3]))
    engine = SlurmEngine(["--", *options], environment={"SLURM_JOB_ID": "7"})
    assert engine._resources(nodes) == gres


def test_slurm_is_asked_ever_more_seldom_while_a_job_waits(monkeypatch):
    looks: list[int] = []
    monkeypatch.setattr(slurm_tools, "version", lambda: (22, 5))
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: float(second)))
    monkeypatch.setattr(slurm_tools, "run", lambda *_: looks.append(second) or "")
    monkeypatch.setattr(StepEngine, "events", lambda _: [])
    engine = SlurmEngine([], environment={})
    monkeypatch.setattr(engine, "start_job", lambda job, _, **__: engine.jobs.update({job: None}))
    second = 0
    engine.start(1, 1, AgentConnection("text", Path("/f"), "127.0.0.1"))
    for second in range(3600):  # noqa: B007 - the clock reads it
        engine.events()
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert pauses[0] == 5 and pauses == sorted(pauses) and max(pauses) == 60


@pytest.mark.processes
def test_mpirun_passes_the_suite(programs, tmp_path):
    (tmp_path / "hosts").write_text("# nodes\na slots=8\nb slots=8\na\n")
    check_engine(lambda: MpirunEngine(["--hostfile", str(tmp_path / "hosts"), "--", "--mca", "x", "1"]))
    first = commands(programs)[0]
    assert first[first.index("-np") + 1] == "2" and first[first.index("--map-by") + 1] == "ppr:1:node"
    assert first[first.index("--stdin") + 1] == "all" and first[first.index("x") + 1] == "1"


@pytest.mark.processes
@pytest.mark.parametrize("failure", ["ORTE does not know how to route a message", "no slots"])
def test_mpirun_that_fails_is_run_once_and_its_end_has_the_reason(programs, monkeypatch, failure):
    monkeypatch.setenv("STUB_FAILURE", failure)
    engine = MpirunEngine([])
    engine.start(1, 1, AgentConnection("text", Path("/f"), "127.0.0.1"))
    events = []
    wait_until(
        lambda: events.extend(engine.events()) or any(isinstance(event, HostEnded) for event in events),
        timeout=20,
        what="the end of mpirun",
    )
    assert len(commands(programs)) == 1
    assert events[-1].host is None and failure in events[-1].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm", "mpirun"])
def test_hosts_have_their_own_numbers_if_torchrun_has_started_the_notebook(programs, monkeypatch, name):
    for variable in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(variable, "0")
    check_engine(lambda: SlurmEngine([], environment={}) if name == "slurm" else MpirunEngine([]))


@pytest.mark.slow
def test_ray_passes_the_suite_and_gets_no_key(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", stub_ray.make_module())
    stub_ray.arguments.clear()
    check_engine(lambda: make_engine("ray", []))
    assert "rankbook.testing" in str(stub_ray.arguments) and "fake-key-" not in str(stub_ray.arguments)


@pytest.mark.parametrize(("cpus", "removed"), [(4.0, True), (4.5, True), (2.0, False), (0.5, False)])
def test_the_number_of_threads_that_ray_sets_is_not_taken_for_the_users(cpus, removed):
    environment = {"OMP_NUM_THREADS": "4", "PATH": "/bin"}
    expected = {"PATH": "/bin"} if removed else environment
    assert agent_environment(environment, cpus) == expected
    assert agent_environment({"OMP_NUM_THREADS": "1"}, 0.5) == {}


def test_a_ray_actor_that_does_not_answer_is_killed_so_that_its_bundle_is_free(monkeypatch):
    ray, killed = stub_ray.make_module(), []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray, "kill", killed.append)
    engine = make_engine("ray", [])

    def read() -> str:
        raise stub_ray.RayError("no answer within a second")

    actor = SimpleNamespace(read=SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda _: read())))
    host = _RayHost(0, actor, None, None)
    engine._hosts[0] = host
    assert engine._end(0, host, "the agent ended") == [HostEnded(0, "the agent ended")]
    assert killed == [actor]


def test_a_host_that_ray_has_not_lost_yet_is_replaced(monkeypatch):
    ray, killed = stub_ray.make_module(), []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr("rankbook.engines.ray.AgentRunner.start", lambda *_: ("node1", "node", ""))
    runs = threading.Event()
    monkeypatch.setattr("rankbook.engines.ray.AgentRunner.wait", lambda _: runs.wait(60))
    engine, events = make_engine("ray", []), []
    engine.start(2, 2, AgentConnection("text", Path("/f"), "127.0.0.1"))
    wait_until(
        lambda: events.extend(engine.events()) or {HostStarted(0, "node1"), HostStarted(1, "node1")} <= {*events},
        timeout=20,
        what="both have started",
    )
    actors = [engine._hosts[number].actor for number in (0, 1)]
    try:
        assert engine.replace(0, wait=True) == engine.replace(0, wait=False) == 2
        assert killed == actors[:1] and engine._hosts[2].bundle == 0
        assert HostEnded(0, "ray: it was lost") in engine.events() and engine.replace(5, wait=True) is None
    finally:
        runs.set()


def test_a_ray_actor_that_cannot_start_the_agent_ends_the_start_with_the_cause(monkeypatch):
    ray = stub_ray.make_module()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray, "kill", lambda _: None)

    def start(*_: object) -> None:
        raise stub_ray.RayError("ray::AgentRunner.start()\n  File ...\nModuleNotFoundError: No module named 'rankbook'")

    monkeypatch.setattr("rankbook.engines.ray.AgentRunner.start", start)
    engine, state = make_engine("ray", []), EngineState("ray", grace=40.0)
    engine.start(1, 1, AgentConnection("text", Path("/f"), "127.0.0.1"))
    wait_until(
        lambda: [state.handle(event) for event in engine.events()] and state.ended, timeout=20, what="the end is told"
    )
    assert state.start_problem() == (
        "the agent on host 0 ended because ray: the actor ended (RayError: ray::AgentRunner.start() / "
        "ModuleNotFoundError: No module named 'rankbook')"
    )


@pytest.mark.processes
def test_a_queued_job_is_reported_and_a_failed_one_too(programs, monkeypatch):
    (programs / "squeue.txt").write_text(f"9|PENDING|Priority|{TIME}|N/A|1:00:00\n")
    engine = SlurmEngine([], environment={})
    connection = AgentConnection("text", Path("/f"), "127.0.0.1")
    monkeypatch.setenv("STUB_FAILURE", "Unable to allocate resources: Invalid account")
    engine.start(1, 2, connection)
    events = []
    try:
        wait_until(
            lambda: events.extend(engine.events()) or any(isinstance(event, HostEnded) for event in events),
            timeout=30,
            what="the end is reported",
        )
    finally:
        engine.stop()
    assert HostQueued("job 9, Priority", datetime.fromisoformat(TIME).timestamp()) in events
    (end,) = [event for event in events if isinstance(event, HostEnded)]
    assert end.host is None
    assert end.reason == "slurm: it exited with code 1: srun: error: Unable to allocate resources: Invalid account"


def test_lines_of_the_queue_are_read():
    entry = read_queue(f"7|RUNNING|None|{TIME}|2026-01-02T11:00:00|1:00:00\n")
    assert entry is not None
    assert entry.ends_at == datetime(2026, 1, 2, 11).astimezone().timestamp()
    unlimited = read_queue(f"7|RUNNING|None|{TIME}|2027-01-02T11:00:00|UNLIMITED")
    assert unlimited is not None and unlimited.ends_at is None
    pending = read_queue("7|PENDING|Resources|N/A|N/A|1:00:00")
    assert pending is not None and (pending.reason, pending.starts_at) == ("Resources", None)
    assert read_queue("slurm_load_jobs error: Unable to contact slurm controller") is None


@pytest.mark.processes
def test_the_end_of_the_time_is_that_of_running_jobs_and_of_this_task_of_a_job_array(programs, monkeypatch):
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    checks = '[ "$SLURM_TIME_FORMAT" = standard ] && [ "${3#--format=%A}" != "$3" ]'
    (programs / "squeue").write_text(f"#!/bin/sh\n{checks} && cat {programs}/squeue.txt")
    lines = (
        "7|RUNNING|None|2096-01-02T10:00:00|2096-01-02T11:00:00|1:00:00",
        "8|RUNNING|None|2096-01-02T09:30:00|2096-01-02T10:30:00|1:00:00",
        f"9|COMPLETING|None|{TIME}|{TIME}|1:00:00",
        "6|PENDING|Priority|N/A|N/A|1:00:00",
    )
    (programs / "squeue.txt").write_text("\n".join(lines))
    task = SlurmEngine([], environment={"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6"})
    assert task.limits() == Limits(datetime(2096, 1, 2, 11).astimezone().timestamp())
    task._waiting = {1}
    task.jobs[1] = None  # type: ignore[assignment]
    monkeypatch.setattr("rankbook.engines.processes.ProcessEngine.events", lambda _: [])
    assert task.events() == [], "other tasks wait in the queue"
    # Jobs of the engine's own have one name: one that is ending, and the one that replaces it.
    assert SlurmEngine([], environment={}).limits() == Limits(datetime(2096, 1, 2, 10, 30).astimezone().timestamp())


@pytest.mark.processes
@pytest.mark.parametrize("end", [TIME, "N/A", "NONE", "Unknown", None])
def test_the_function_on_the_page_about_slurm_returns_the_end_of_this_job(programs, monkeypatch, end):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "slurm.md").read_text()
    function = page.partition("import os, subprocess, time")[2].partition("\nlast =")[0]
    checks = '[ "$SLURM_TIME_FORMAT" = standard ] && [ "$3" = 7 ] && [ "$5" = "%A|%e" ]'
    (programs / "squeue").write_text(f"#!/bin/sh\n{checks} && cat {programs}/squeue.txt")
    this = "" if end is None else f"7|{end}\n"
    (programs / "squeue.txt").write_text(f"6|2027-01-02T10:00:00\n{this}")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    names: dict[str, Any] = {}
    exec(f"import os, subprocess, time{function}", names)
    expected = datetime.fromisoformat(TIME).timestamp() if end == TIME else float("inf")
    assert names["job_ends_at"]() == expected


def test_lines_that_arrive_in_pieces_are_put_together_and_a_failed_node_is_found():
    engine = SlurmEngine([], environment={})
    assert engine.read_output(None, "rankbook-host 1 sta") == []
    assert engine.read_output(None, "rted: node2\nhel") == [HostStarted(1, "node2")]
    assert engine.read_output(None, "lo\n") == [HostOutput(None, "hello\n")]
    text = "srun: error: Node failure on node2"
    assert engine.read_output(None, f"{text}\n") == [
        HostOutput(None, f"{text}\n"),
        HostEnded(1, "the node node2 has failed"),
    ]
    assert engine.read_output(None, f"{text}\n") == [HostOutput(None, f"{text}\n")]


def test_a_step_that_waits_for_what_another_step_has_is_shown():
    line = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
    (_, notice) = SlurmEngine([], environment={}).read_output(None, line)
    text = "Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    assert notice == Notice(f"slurm: {text}; interrupt to cancel")


def test_the_end_is_asked_for_when_slurm_sends_sigterm_and_agents_end_if_it_is_now(monkeypatch):
    engine, ended = SlurmEngine([], environment={"SLURM_JOB_ID": "7"}), []
    monkeypatch.setattr(slurm_tools, "run", lambda *_: line)
    for job, hosts in {None: (0, 1), 2: (2,)}.items():
        engine.jobs[job] = SimpleNamespace(end=functools.partial(ended.append, job))  # type: ignore[assignment]
        engine.read_output(job, "".join(f"rankbook-host {host} started: node{host}\n" for host in hosts))
    # Preempted: the job has some minutes.
    line = "7|RUNNING|None|2096-01-02T09:30:00|2096-01-02T10:30:00|1:00:00"
    assert engine.read_output(None, "rankbook-host 1 ending: node1\n") == [HostStarted(1, "node1")]
    assert engine.limits() == Limits(datetime(2096, 1, 2, 10, 30).astimezone().timestamp()) and not ended
    line = line.replace("RUNNING", "COMPLETING")
    assert engine.limits() == Limits() and not ended
    engine.read_output(None, "rankbook-host 0 ending: node0\n")
    assert engine.limits() == Limits() and ended == [None]


def test_a_task_that_ends_before_its_agent_has_started_ends_the_start():
    engine, state = SlurmEngine([], environment={}), EngineState("slurm", grace=40.0)
    exited = "srun: error: node2: task 1: Exited with exit code 1\n"
    for event in engine.read_output(None, f"rankbook-host 0 started: node1\nNo module named rankbook\n{exited}"):
        state.handle(event)
    assert state.ended == {1: "srun reported: Exited with exit code 1"}
    problem = state.start_problem()
    assert problem.startswith("the agent on node2 ended because srun reported: Exited with exit code 1\nNo module")
    # A further job has one task.
    assert HostEnded(5, "srun reported: Exited with exit code 1") in engine.read_output(5, exited)
    for end in ("Killed", "Segmentation fault (core dumped)", "Out Of Memory"):
        assert HostEnded(2, f"srun reported: {end}") in engine.read_output(None, f"srun: error: n2: task 2: {end}\n")


def test_the_end_of_an_engine_shows_all_of_its_output_of_which_it_quotes_the_end():
    state = EngineState("mpirun", grace=40.0)
    lines = ["There are not enough slots available", *(f"line {number} of the help" for number in range(60))]
    state.handle(HostOutput(None, "\n".join(lines) + "\n"))
    state.handle(HostEnded(None, f"mpirun: exit code 1: … {' / '.join(lines[-5:])}"))
    assert "There are not enough slots available\nline 0" in state.start_problem()
    state = EngineState("mpirun", grace=40.0)
    state.handle(HostOutput(None, "not found\n"))
    state.handle(HostEnded(None, "mpirun: exit code 1: not found"))
    assert state.start_problem() == "the agent ended because mpirun: exit code 1: not found"


def test_ray_is_not_started_again_after_the_notebook_has_ended_it(monkeypatch):
    ray = stub_ray.make_module()
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = make_engine("ray", [])
    engine.start(1, 1, AgentConnection("text", Path("/f"), "127.0.0.1"))
    for name in ("wait", "get", "kill", "nodes"):
        monkeypatch.setattr(ray, name, lambda *_, **__: pytest.fail("Ray would be started"), raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert engine.events() == [HostEnded(None, "ray: the notebook has called ray.shutdown()")]
    assert engine.events() == [] and engine.replace(0, wait=True) is None
    engine.stop()


@pytest.mark.parametrize(
    ("reports", "ends"),
    [
        ([], [None]),  # that of the start
        (["0 started: node1", "1 started: node2", "0 ended: x"], [1]),
        (["0 started: node1", "1 started: node2", "0 ended: x", "1 ended: x"], []),
    ],
)
def test_the_end_of_a_step_ends_those_of_its_hosts_that_are_left_and_none_of_a_later_step(reports, ends):
    engine = SlurmEngine([], environment={})
    engine.read_output(None, "".join(f"rankbook-host {report}\n" for report in reports))
    engine.read_output(2, "rankbook-host 2 started: node1\n")
    engine.jobs[None] = SimpleNamespace(
        poll=lambda: 0, read=lambda: "", wait=lambda _: True, describe_end=lambda: "it exited with code 0"
    )  # type: ignore[assignment]
    assert [*engine.events()] == [HostEnded(host, "slurm: it exited with code 0") for host in ends]


@pytest.mark.parametrize(
    ("job", "reports", "ends", "kept"),
    [
        (None, [], [None], False),  # the start has failed
        (None, ["0 started: node1", "1 started: node2", "0 ended: x"], [1], True),
        (None, ["0 started: node1", "0 ended: x"], [], True),
        (5, [], [5], False),
        (5, ["5 started: node1"], [5], False),  # no replacement is a step of a further job
    ],
)
@pytest.mark.parametrize("others", [True, False])
def test_the_first_job_is_kept_for_replacements_when_its_agents_have_ended(
    monkeypatch, job, reports, ends, kept, others
):
    monkeypatch.setattr(slurm_tools, "run", lambda *_: "")
    engine, ended = SlurmEngine([], environment={}), []
    output = ["half a line\nrankbook-step ended: 1\n"]
    engine.jobs[job] = SimpleNamespace(
        end=lambda: ended.append(job),
        poll=lambda: 0 if ended and not output else None,
        read=lambda: output.pop() if output else "",
        wait=lambda _: True,
        describe_end=lambda: "it exited with code 1",
    )  # type: ignore[assignment]
    engine.read_output(job, "".join(f"rankbook-host {report}\n" for report in reports))
    if others:
        engine.read_output(2, "rankbook-host 2 started: node1\n")
    events = [*engine.events(), *engine.events()]
    is_unused = kept and not others
    assert events == [
        HostOutput(job, "half a line\n"),
        *(HostEnded(host, "slurm: it exited with code 1") for host in ends),
        *([Notice("slurm: no agent runs any more; the job is kept for heal, until %distributed stop")] * is_unused),
    ]
    assert (ended, job in engine.jobs) == (([], True) if kept else ([job], False))
    assert engine.hosts_of.get(2) == ({2} if others else None)


def test_the_end_of_a_job_is_described_without_the_line_about_its_step():
    text = "srun: error: no\n\nrankbook-step ended: 1\n"
    assert supervisor.without_step_end(text) == "srun: error: no\n\n"


def test_limits_of_a_job_without_a_controller_are_unknown(monkeypatch):
    monkeypatch.setattr(slurm_tools, "run", lambda *_: None)
    assert SlurmEngine([], environment={"SLURM_JOB_ID": "7"}).limits() == Limits()
    line = f"7|RUNNING|None|{TIME}|2096-01-02T11:00:00|1:00:00"
    monkeypatch.setattr(slurm_tools, "run", lambda *_: line)
    ends_at = SlurmEngine([], environment={"SLURM_JOB_ID": "7"}).limits().ends_at
    assert ends_at is not None and ends_at > time.time()


def test_the_known_end_of_a_job_holds_until_then_while_the_controller_does_not_answer(monkeypatch):
    answers: list[str | None] = []
    monkeypatch.setattr(slurm_tools, "run", lambda *_: answers.pop())
    end = datetime(2096, 1, 2, 11).astimezone().timestamp()
    now = end - 1.0
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: now))
    engine = SlurmEngine([], environment={"SLURM_JOB_ID": "7"})
    line = f"7|RUNNING|None|{TIME}|2096-01-02T11:00:00|1:00:00"
    answers += [None, line]
    assert [engine.limits(), engine.limits()] == [Limits(end)] * 2
    answers.append("")  # it does not know the job any more
    assert engine.limits() == Limits()
    answers += [None, line]
    assert engine.limits() == Limits(end)
    now = end
    assert engine.limits() == Limits()


def test_the_name_of_the_launchers_own_job_is_not_the_users(monkeypatch):
    engine = SlurmEngine(["--", "--job-name=mine"], environment={})
    (command, _), _ = srun_of(engine, monkeypatch)
    names = [word for word in command if word.startswith("--job-name=")]
    assert names == ["--job-name=mine", f"--job-name={engine._job_name}"] * 2
    assert "--mem=0" not in command, "a job has what its user has asked for"
    assert command.index(names[1]) < command.index("sh")


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ([], ["--mem=0"]),
        (["--mem-per-cpu=4G"], ["--mem-per-cpu=4G"]),
        (["--mem", "4G"], ["--mem"]),
        (["--mem-bind=local"], ["--mem=0", "--mem-bind=local"]),
    ],
)
def test_a_step_in_an_allocation_does_not_take_over_what_the_allocation_was_asked_for(monkeypatch, options, memory):
    asked = {"SLURM_GPUS": "3", "SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "4", "SLURM_GPUS_PER_TASK": "1"}
    asked |= {"SLURM_TRES_PER_TASK": "gres/gpu:1", "SLURM_NTASKS_PER_GPU": "1"}
    asked |= {"SLURM_MEM_PER_NODE": "8G", "SLURM_MEM_PER_CPU": "2G", "SLURM_MEM_PER_GPU": "4G"}
    asked |= {"SLURM_THREADS_PER_CORE": "1", "SLURM_CPUS_PER_GPU": "8", "SLURM_EXACT": "1"}
    asked |= {"SLURM_TRES_BIND": "gres/gpu:per_task:1", "SLURM_GPU_BIND": "per_task:1"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", "/slurm.conf")
    monkeypatch.setattr(slurm_tools, "run", lambda *_: "node1\nnode2\n")
    engine = SlurmEngine(["--", *options], environment={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"})
    for command, env in srun_of(engine, monkeypatch):
        assert [word for word in command if word.startswith("--mem")] == memory
        assert not any(word.startswith("--job-name=") for word in command)
        assert env["SLURM_CONF"] == "/slurm.conf" and not asked.keys() & env.keys()


@pytest.mark.parametrize(("version", "has_it"), [(None, True), ((20, 2), False), ((20, 11), True), ((23, 2), True)])
def test_overlap_is_not_an_option_of_slurm_before_20_11(monkeypatch, version, has_it):
    monkeypatch.setattr(slurm_tools, "run", lambda *_: "node1\n")
    engine = SlurmEngine([], environment={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"})
    assert ["--overlap" in command for command, _ in srun_of(engine, monkeypatch, version)] == [has_it] * 2
    line = describe_start(AgentConnection("text", Path("/f"), "127.0.0.1"), 1)
    assert ("--overlap --wait=0" in line) == ("--overlap" in line) == has_it and "none --" in line


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}])
def test_the_users_options_for_sruns_streams_do_not_reach_those_of_the_agents(monkeypatch, environment):
    streams = {"SLURM_LABELIO": "1", "SLURM_STDINMODE": "none", "SLURM_STDOUTMODE": "0", "SLURM_STDERRMODE": "0"}
    for name, value in {**streams, "SLURM_PARTITION": "gpu"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm_tools, "run", lambda *_: "node1\n")
    for _, env in srun_of(SlurmEngine([], environment=environment), monkeypatch):
        assert env["SLURM_PARTITION"] == "gpu" and not streams.keys() & env.keys()


def srun_of(
    engine: SlurmEngine, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None = (22, 5)
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of a start on one host and of its replacement, and their environments."""
    started = []
    monkeypatch.setattr(slurm_tools, "version", lambda: version)
    monkeypatch.setattr(engine, "start_job", lambda _, command, *, env: started.append((command, env)))
    engine.start(1, 1, AgentConnection("text", Path("/f"), "127.0.0.1"))
    assert engine.replace(0, wait=engine._is_own_job) == 1
    return started


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SshEngine([]), r"--launcher ssh: the following arguments are required: --hosts"),
        (lambda: SshEngine(["--hosts", "a,-oProxyCommand=x"]), r"invalid --hosts"),
        (lambda: SshEngine(["--hosts", ","]), r"invalid --hosts"),
        (lambda: SlurmEngine(["--partition", "gpu"]), r"--launcher slurm: unrecognized arguments.*options of this"),
        (lambda: MpirunEngine([]).start(None, 2, None), r"needs --hostfile FILE, or --nodes N"),  # type: ignore[arg-type]
        (lambda: MpirunEngine(["--hostfile", "/no/such"]).start(None, 2, None), r"cannot read --hostfile"),  # type: ignore[arg-type]
        (lambda: SshEngine(["--hosts", "a"]).start(2, 2, None), r"2 nodes need as many machines"),  # type: ignore[arg-type]
    ],
)
def test_invalid_options_are_rejected(make, text):
    with pytest.raises(InvalidArgument, match=text):
        make()


def test_a_leading_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("a\n")
    monkeypatch.setattr(slurm_tools, "version", lambda: (22, 5))
    connection, started = AgentConnection("text", Path("/f"), "127.0.0.1"), []
    for cls in (SlurmEngine, MpirunEngine, SshEngine):
        monkeypatch.setattr(cls, "start_job", lambda _, __, command, **___: started.append(command))
    SlurmEngine(["--python", "~/env/python"], environment={}).start(1, 1, connection)
    MpirunEngine(["--python", "~/env/python", "--hostfile", "~/hosts"]).start(None, 1, connection)
    ssh = ["--hosts", "a", "--python", "~/my env/python", "--folder", "~/a;b"]
    SshEngine(ssh).start(None, 1, connection)
    by_slurm, by_mpirun, by_ssh = started
    python = str(tmp_path / "env/python")
    assert python in by_slurm and python in by_mpirun and str(tmp_path / "hosts") in by_mpirun
    # The shell on the machine replaces it.
    assert by_ssh[-1].startswith("cd ~/'a;b' && exec ~/'my env/python' -P -m rankbook.agent --connect - ")


@pytest.mark.parametrize(
    ("path", "quoted"),
    [("~", "~"), ("~/", "~/"), ("~/a", "~/a"), ("/a b", "'/a b'"), ("~me/a", "'~me/a'"), ("a/~/b", "'a/~/b'")],
)
def test_paths_of_other_hosts_are_quoted_except_for_their_home_folder(path, quoted):
    assert quote_remote_path(path) == quoted


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionError("none"), r"no Ray cluster: run ray.init\(\) in the notebook, or set RAY_ADDRESS \(none\)"),
        (
            RuntimeError("No node"),
            r"the Ray cluster: No node; the notebook must run on one of its nodes \(in Kubernetes",
        ),
    ],
)
def test_a_ray_cluster_that_cannot_be_used_is_an_error_with_advice(monkeypatch, error, text):
    ray = stub_ray.make_module()
    vars(ray).update(is_initialized=lambda: False, init=lambda **_: (_ for _ in ()).throw(error))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(StartError, match=text):
        make_engine("ray", []).start(1, 1, AgentConnection("text", Path("/f"), "127.0.0.1"))


def test_ray_that_is_not_installed_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match=r"Ray is not installed: pip install 'ray>=2\.40'"):
        make_engine("ray", [])
    with pytest.raises(InvalidArgument, match=r"--launcher ray runs no program that could take -v"):
        make_engine("ray", ["--", "-v"])
    with pytest.raises(InvalidArgument, match=r"--strategy: invalid choice: 'scatter'"):
        make_engine("ray", ["--strategy", "scatter"])
