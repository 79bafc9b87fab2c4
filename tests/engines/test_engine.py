"""Test the search for engines, the agent's command, and the texts that supervised programs leave."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rankbook.engines import AgentConnection, engine, slurm_tools, split_arguments, supervisor
from rankbook.engines.processes import describe_start
from rankbook.errors import InvalidArgument
from rankbook.launch.hosts import HostOptions
from rankbook.magics.arguments import complete, parse_line

THIRD_PARTY = Path(__file__).parent / "third_party"
CONNECTION = AgentConnection('{"key": "secret"}', Path("/home/me/c.json"), "10.0.0.1")


@pytest.fixture
def third_party(monkeypatch, tmp_path):
    """Install the engine `submit`, as a package with an entry point would."""
    metadata = tmp_path / "rankbook_submit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rankbook-submit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[rankbook.engines]\nsubmit = rankbook_submit:SubmitEngine\nbroken = rankbook_submit:NoSuchEngine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(THIRD_PARTY))
    yield
    sys.modules.pop("rankbook_submit", None)


def test_an_engine_of_another_package_is_found_by_its_entry_point(third_party):
    assert "submit" in engine.engine_names()
    assert type(engine.make_engine("submit", [])).__name__ == "SubmitEngine"
    HostOptions("submit")


def test_an_engine_that_cannot_be_made_names_itself_and_the_cause(third_party):
    with pytest.raises(InvalidArgument, match=r"the launcher broken cannot be used: AttributeError.*NoSuchEngine"):
        engine.make_engine("broken", [])
    with pytest.raises(InvalidArgument, match=r"submit has no options"):
        engine.make_engine("submit", ["--x"])


def test_an_unknown_engine_is_rejected_with_those_that_exist():
    with pytest.raises(InvalidArgument, match=r"invalid launcher 'sge': expected env"):
        engine.make_engine("sge", [])


def test_an_unknown_option_of_an_engine_is_rejected():
    with pytest.raises(InvalidArgument, match=r"--launcher env: unrecognized arguments: --hosts a; options .* none"):
        engine.make_engine("env", ["--hosts", "a"])


def test_the_command_of_an_agent_never_has_the_key():
    command = CONNECTION.command(1, 4, python="/opt/python")
    assert command == ["/opt/python", "-P", "-m", "rankbook.agent", "--connect", "-", "--slots", "4", "--node", "1"]
    assert CONNECTION.command(None, None, source="/f")[1:] == ["-P", "-m", "rankbook.agent", "--connect", "/f"]
    assert "secret" not in repr(CONNECTION)


def test_the_printed_lines_start_one_agent_per_node_on_all_of_its_cores(monkeypatch):
    monkeypatch.setattr(slurm_tools, "version", lambda: None)
    lines = {line[:25].strip(): line[25:] for line in describe_start(CONNECTION, 4, 2).splitlines()[2:]}
    agent = shlex.join(CONNECTION.command(None, 2, source="/home/me/c.json"))
    assert lines["on the node"] == agent
    nodes = "$SLURM_JOB_NUM_NODES"
    srun = f"srun -N {nodes} -n {nodes} --ntasks-per-node 1 --cpu-bind none --overlap --wait=0 --kill-on-bad-exit=0"
    assert lines["in a Slurm allocation"] == f"{srun} {agent}"
    mpirun = "mpirun --map-by ppr:1:node --bind-to none --mca orte_abort_on_non_zero_status 0"
    assert lines["by Open MPI"] == f"{mpirun} {agent}"
    assert lines["by ssh"] == f"ssh NODE {shlex.join(CONNECTION.command(None, 2))} < /home/me/c.json"


def test_the_printed_line_for_ssh_is_quoted_for_the_shell_on_the_node_too(monkeypatch):
    monkeypatch.setattr(slurm_tools, "version", lambda: None)
    monkeypatch.setattr(sys, "executable", "/my env/it's/python")
    line = next(line for line in describe_start(CONNECTION, 4).splitlines() if "by ssh" in line)
    *command, _, _ = shlex.split(line[25:])
    assert command[:2] == ["ssh", "NODE"]
    # ssh joins the words with spaces, and the shell on the node splits them.
    assert shlex.split(" ".join(command[2:])) == CONNECTION.command(None, None)


def test_arguments_behind_two_dashes_are_the_programs():
    assert split_arguments(["--a", "1", "--", "-p", "x", "--"]) == (["--a", "1"], ["-p", "x", "--"])
    assert split_arguments(["--a"]) == (["--a"], [])


def test_a_start_line_keeps_the_options_of_its_launcher():
    parsed = parse_line("start --launcher ssh -n 4 --hosts a,b --nodes 2 -- -p 2222 --timeout")
    assert (parsed.launcher, parsed.n, parsed.nodes, parsed.timeout) == ("ssh", 4, 2, None)
    assert parsed.launcher_args == ("--hosts", "a,b", "--", "-p", "2222", "--timeout")


@pytest.mark.parametrize("line", ["start --hosts a,b", "start -n 2 -- -p 2222"])
def test_options_of_a_launcher_need_a_launcher(line):
    with pytest.raises(InvalidArgument, match=r"%distributed start: unrecognized arguments"):
        parse_line(line)


def test_launchers_are_completed(third_party):
    def names() -> list[str]:
        return []

    completed = complete("start", ["--launcher"], "", world_size=0, notebook_names=names, rank_names=names)
    assert {"env", "submit"} <= {*completed}


@pytest.mark.parametrize("options", [{"nodes": 0}, {"nodes": -1}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(InvalidArgument, match="invalid number of nodes"):
        HostOptions(**options)


@pytest.mark.parametrize(
    ("line", "report"),
    [
        ("rankbook-host 12 ended: it was killed by SIGKILL\n", (12, "ended", "it was killed by SIGKILL")),
        ("rankbook-host 0 started: node1", (0, "started", "node1")),
        ("rankbook-host x ended: no", None),
        ("I print rankbook-host 0 ended: no", None),
        ("hello", None),
    ],
)
def test_reports_are_told_from_other_output(line, report):
    assert supervisor.read_report(line) == report


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exited with code 0"), (-9, "killed by SIGKILL"), (-250, "exited with code -250")]
)
def test_exit_codes_are_described(code, text):
    assert text in supervisor.describe_code(code)
