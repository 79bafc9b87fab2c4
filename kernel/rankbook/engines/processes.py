"""Programs that an engine runs on the notebook's host, and the engines `ssh`, `mpirun` and `env`.

A `Job` is one program, under a supervisor that ends it together with the notebook. `ProcessEngine` is the part that
engines with one job per host, or one for all hosts, have in common. `SshEngine` starts one agent per machine, over one
ssh connection each, and `MpirunEngine` one per node of Open MPI. `EnvEngine` prints the lines for the user to run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from rankbook.debugger_patch import without_debugger
from rankbook.engines import slurm_tools, supervisor
from rankbook.engines.engine import (
    AgentConnection,
    EngineEvent,
    HostEnded,
    HostOutput,
    HostStarted,
    Limits,
    Notice,
    slots_per_host,
    split_arguments,
)
from rankbook.errors import InvalidArgument, StartError
from rankbook.formatting import join_lines, plural

_MAX_READ = 1 << 16
_LAST_OUTPUT = 600
"""Characters of a job's last output that its end quotes."""
_STOP_SECONDS = 14.0
"""Seconds for a job to end; its supervisor needs twelve at most."""
_KILL_SECONDS = 0.5
"""Seconds for a job to end that was killed. The whole stop may take 15 s."""


class OptionParser(argparse.ArgumentParser):
    """Parser of an engine's options, whose errors are `InvalidArgument`."""

    def __init__(self, name: str) -> None:
        super().__init__(prog=f"--launcher {name}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidArgument` with the options that exist."""
        names = ", ".join(action.option_strings[0] for action in self._actions if action.option_strings)
        raise InvalidArgument(f"{self.prog}: {message}; options of this launcher: {names or 'none'}")


class Job:
    """A program that reads `text` from its standard input, and that ends when this process does.

    `end_signal` is the first signal that it gets then, before SIGTERM and SIGKILL. Raises `StartError` if it cannot be
    run.
    """

    def __init__(
        self,
        command: Sequence[str],
        text: str = "",
        *,
        env: Mapping[str, str] | None = None,
        end_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        if shutil.which(command[0]) is None:
            raise StartError(f"{command[0]} is not installed on this host, or not on the PATH")
        read, self._alive = os.pipe()
        os.set_inheritable(read, True)
        try:
            with without_debugger():
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", supervisor.__file__, "--alive", f"{read},{end_signal:d}", *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read,),
                    start_new_session=True,
                    env=env,
                )
        except OSError as error:
            os.close(self._alive)
            raise StartError(f"cannot run {command[0]}: {error}") from error
        finally:
            os.close(read)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its exit code says why
            self._process.stdin.write(text.encode())  # less than a pipe holds
            self._process.stdin.close()
        self._last = ""

    def read(self) -> str:
        """Return what the program has written since the last call."""
        if self._output.closed:
            return ""
        try:
            data = os.read(self._output.fileno(), _MAX_READ)
        except BlockingIOError:
            return ""
        text = data.decode(errors="replace")
        self._last = (self._last + text)[-_LAST_OUTPUT:]
        return text

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        return self._process.poll()

    @property
    def last_output(self) -> str:
        """Return the last lines that the program has written, as one line."""
        text = join_lines(supervisor.without_step_end(self._last))
        return f"… {text}" if len(self._last) == _LAST_OUTPUT else text

    def describe_end(self) -> str:
        """Describe how the program has ended, with the last lines that it has written."""
        code = self._process.poll() or 0
        # As in a shell, the supervisor exits with 128 and the number of the signal; ssh has 255 for its own errors.
        text = supervisor.describe_code(128 - code if 128 < code <= 128 + signal.NSIG else code)
        return f"{text}: {self.last_output}" if self.last_output else text

    def end(self) -> None:
        """Begin to end the program."""
        if self._alive >= 0:
            # A process that this one has forked may have a copy of this end, so that closing it would not be noticed.
            with contextlib.suppress(BrokenPipeError):  # the supervisor has ended
                os.write(self._alive, b"\0")
            os.close(self._alive)
            self._alive = -1

    def kill(self) -> None:
        """Kill the program's first process, not what it has started."""
        # The supervisor has one child, which may have ended.
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                child.kill()

    def kill_all(self) -> None:
        """Kill the program's first process and its supervisor, where `end` has not ended them."""
        self.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait for the end. Return False if the program has not ended after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._output.close()
        return True


class ProcessEngine:
    """Engine of command line programs: `jobs` has one per host, or one for all hosts (None)."""

    name = ""
    _end_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.jobs: dict[int | None, Job] = {}
        self.pending: list[EngineEvent] = []
        self.connection: AgentConnection | None = None

    def events(self) -> Iterable[EngineEvent]:
        """See `Engine`."""
        events, self.pending = self.pending, []
        for host, job in list(self.jobs.items()):
            code = job.poll()
            # Read after the poll: nothing can be written behind the end.
            while text := job.read():
                events += self.read_output(host, text)
            if code is not None:
                del self.jobs[host]
                job.wait(0)
                events.append(HostEnded(host, self.describe_end(host, job)))
        return events

    def read_output(self, host: int | None, text: str) -> list[EngineEvent]:
        """Return the events that a piece of a job's output stands for."""
        return [HostOutput(host, text)]

    def describe_end(self, _host: int | None, job: Job) -> str:
        """Return why a job has ended."""
        return f"{self.name}: {job.describe_end()}"

    def limits(self) -> Limits:
        """See `Engine`."""
        return Limits()

    def start_job(self, host: int | None, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Run a program that passes its standard input to the agents, with this process's environment or `env`."""
        assert self.connection is not None
        self.jobs[host] = Job(command, self.connection.text, env=env, end_signal=self._end_signal)

    def stop(self) -> None:
        """See `Engine`. Raises `StartError` if a program had to be killed."""
        for job in self.jobs.values():
            job.end()
        deadline = time.monotonic() + _STOP_SECONDS
        left = [job for job in self.jobs.values() if not job.wait(max(0.0, deadline - time.monotonic()))]
        self.jobs.clear()
        for job in left:
            job.kill_all()
        for job in left:
            job.wait(_KILL_SECONDS)
        if left:
            raise StartError(f"{self.name} did not end within {_STOP_SECONDS:.0f} s and was killed")


class StepEngine(ProcessEngine):
    """Engine of programs that start one process on each of several hosts: srun and mpirun.

    The processes are supervisors of the agents, whose reports are part of the program's output. `hosts_of` has the
    hosts of every job.
    """

    _report_option = "--report"

    def __init__(self) -> None:
        super().__init__()
        self.hosts_of: dict[int | None, set[int]] = {}
        self.names: dict[int, str] = {}
        self._unfinished: dict[int | None, str] = {}

    def supervised(self, number: str, host: int | None, slots: int, python: str) -> list[str]:
        """Return the command that runs and reports the agent; `number` is the host's number, or its variable."""
        assert self.connection is not None
        reporter = [python, "-P", "-m", supervisor.__name__, self._report_option, number]
        return [*reporter, *self.connection.command(host, slots, python=python)]

    def events(self) -> Iterable[EngineEvent]:
        """See `Engine`."""
        events: list[EngineEvent] = []
        for event in super().events():
            match event:
                # Those of its hosts that are left, perhaps none. Before the first of them has started, the end of the
                # program is that of the start.
                case HostEnded(job, reason) if job in self.hosts_of:
                    events += [HostEnded(host, reason) for host in sorted(self.hosts_of.pop(job))]
                case _:
                    events.append(event)
        return events

    def read_output(self, host: int | None, text: str) -> list[EngineEvent]:
        """Return the starts and ends that a job reports, and its other output."""
        *lines, rest = (self._unfinished.pop(host, "") + text).split("\n")
        self._unfinished[host] = rest[-_MAX_READ:]
        events: list[EngineEvent] = []
        for line in lines:
            match supervisor.read_report(line):
                case (number, "started", name):
                    self.names[number] = name
                    self.hosts_of.setdefault(host, set()).add(number)
                    events.append(HostStarted(number, name))
                case (number, "ended", reason):
                    self.hosts_of.get(host, set()).discard(number)
                    events.append(HostEnded(number, f"{self.name}: {reason}"))
                case _:
                    events += self.read_line(host, line)
        return events

    def read_line(self, host: int | None, line: str) -> list[EngineEvent]:
        """Return the events that a line of other output stands for."""
        return [HostOutput(host, f"{line}\n")]


def choose_replacement(
    machines: Sequence[str], lost: str | None, in_use: Collection[str], used: Collection[str], tried: Sequence[str]
) -> str | None:
    """Return the machine for an agent in place of one on `lost`: one that others do not use, perhaps the same one.

    It may be that only the agent has ended. Machines that were `tried` for it least often come first, then those that
    were never used. None if agents of other hosts run on all of them.

    Example::

        choose_replacement(["a", "b", "c"], "a", in_use=["b"], used=["a", "b"], tried=[])  # 'c'
    """
    free = [machine for machine in machines if machine not in in_use]
    same = None if lost in in_use else lost  # a machine that is in no list
    return min(free, key=lambda name: (tried.count(name), name == lost, name in used), default=same)


# The first value of an option counts for ssh, so that what the user passes goes before. No question can be answered,
# and a machine that does not answer is given up. Nothing is written to a terminal. A message every ten seconds keeps a
# firewall from forgetting the connection. Its answer may be missing for a day: when a host is lost is decided by
# `lost_after`, and the default of three messages would decide it after half a minute. A connection that the user has
# open is shared if the user's configuration says so, but this one never: terminals of the user would end with it.
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=8640"),
)


def quote_remote_path(path: str) -> str:
    """Quote a path for the shell of another host, which puts the home folder there in place of a leading `~`.

    Example::

        quote_remote_path("~/my env/bin/python")  # "~/'my env/bin/python'"
    """
    home, slash, rest = path.partition("/")
    if home != "~":
        return shlex.quote(path)
    return f"~{slash}{shlex.quote(rest)}" if rest else path


class SshEngine(ProcessEngine):
    """`--launcher ssh --hosts a,b,c`. With `--nodes 2`, the third machine replaces a lost one.

    The connection goes over the standard input of ssh. The agent ends with its ssh connection, because the process that
    has started it on its host does.
    """

    name = "ssh"

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        own, self._passed = split_arguments(arguments)
        parser = OptionParser(self.name)
        parser.add_argument("--hosts", required=True)
        parser.add_argument("--python", default=sys.executable)
        parser.add_argument("--folder")
        options = parser.parse_args(own)
        self._machines = [machine for machine in options.hosts.split(",") if machine]
        self._python: str = options.python
        self._folder: str | None = options.folder
        if not self._machines or any(machine.startswith("-") for machine in self._machines):
            raise InvalidArgument(f"invalid --hosts {options.hosts!r}: expected names such as node1,me@node2")
        self._machine_of: dict[int, str] = {}
        self._tried: dict[int, list[str]] = {}
        self._slots = 0

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """See `Engine`."""
        self.connection = connection
        count = hosts or len(self._machines)
        if count > len(self._machines):
            raise InvalidArgument(f"{count} nodes need as many machines, but --hosts has {len(self._machines)}")
        self._slots = slots_per_host(slots, count)
        for machine in self._machines[:count]:
            self._connect(machine)

    def replace(self, host: int, *, wait: bool) -> int | None:  # noqa: ARG002
        """See `Engine`. A machine that is not in use, or the same one again."""
        in_use = {self._machine_of[number] for number in self.jobs if number is not None and number != host}
        tried = self._tried.setdefault(host, [])
        machine = choose_replacement(
            self._machines, self._machine_of.get(host), in_use, self._machine_of.values(), tried
        )
        if machine is None:
            return None
        tried.append(machine)
        return self._connect(machine)

    def _connect(self, machine: str) -> int:
        assert self.connection is not None
        number = len(self._machine_of)
        self._machine_of[number] = machine
        # `exec`: the agent is then a child of the ssh server's process, and ends when the connection does.
        _, *arguments = self.connection.command(number, self._slots)
        command = f"exec {quote_remote_path(self._python)} {shlex.join(arguments)}"
        if self._folder is not None:
            command = f"cd {quote_remote_path(self._folder)} && {command}"
        self.start_job(number, ["ssh", *self._passed, *_OPTIONS, machine, command])
        self.pending.append(HostStarted(number, machine))
        return number


class MpirunEngine(StepEngine):
    """`--launcher mpirun --hostfile FILE`, or `--nodes N` where mpirun knows the nodes from a scheduler.

    The connection goes over the standard input, which mpirun copies to all processes. An agent cannot be replaced: an
    MPI job has a fixed number of processes. Open MPI 4 ends all of them when it has lost the connection to a node.
    """

    name = "mpirun"

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        own, self._passed = split_arguments(arguments)
        parser = OptionParser(self.name)
        parser.add_argument("--hostfile", type=os.path.expanduser)
        parser.add_argument("--python", type=os.path.expanduser, default=sys.executable)
        options = parser.parse_args(own)
        self._hostfile: str | None = options.hostfile
        self._python: str = options.python

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """See `Engine`."""
        self.connection = connection
        count = hosts or self._count_hosts()
        command = [
            *("mpirun", "-np", str(count), "--map-by", "ppr:1:node", "--bind-to", "none", "--stdin", "all"),
            # The supervisors exit with 0, but one of them may be killed.
            *("--mca", "orte_abort_on_non_zero_status", "0"),
            *(() if self._hostfile is None else ("--hostfile", self._hostfile)),
            *self._passed,
        ]
        agent = self.supervised("OMPI_COMM_WORLD_RANK", None, slots_per_host(slots, count), self._python)
        self.start_job(None, [*command, *agent])

    def replace(self, host: int, *, wait: bool) -> int | None:  # noqa: ARG002
        """See `Engine`."""
        return None

    def _count_hosts(self) -> int:
        if self._hostfile is None:
            raise InvalidArgument(
                "--launcher mpirun needs --hostfile FILE, or --nodes N where a scheduler has the nodes"
            )
        try:
            text = Path(self._hostfile).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"cannot read --hostfile {self._hostfile}: {error}") from error
        names = {line.split("#")[0].split()[0] for line in text.splitlines() if line.split("#")[0].strip()}
        if not names:
            raise InvalidArgument(f"--hostfile {self._hostfile} has no host")
        return len(names)


class EnvEngine:
    """The agents are started by hand. Their ends are known from their connections alone."""

    def __init__(self, arguments: Sequence[str]) -> None:
        OptionParser("env").parse_args(list(arguments))
        self._connection: AgentConnection | None = None
        self._events: list[EngineEvent] = []
        self._next = 1 << 20  # numbers that no agent has
        self._per_host: int | None = None

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """See `Engine`."""
        self._connection = connection
        self._per_host = None if hosts is None else slots_per_host(slots, hosts)
        self._events.append(Notice(describe_start(connection, slots, self._per_host)))

    def events(self) -> Iterable[EngineEvent]:
        """See `Engine`."""
        events, self._events = self._events, []
        return events

    def replace(self, host: int, *, wait: bool) -> int | None:  # noqa: ARG002
        """See `Engine`. Someone has to start the agent, so that it has to be waited for."""
        if not wait or self._connection is None:
            return None
        notice = Notice(describe_start(self._connection, None, self._per_host))
        if notice not in self._events:  # several hosts were lost at once
            self._events.append(notice)
        self._next += 1
        return self._next

    def limits(self) -> Limits:
        """See `Engine`."""
        return Limits()

    def stop(self) -> None:
        """See `Engine`. The agents end because the notebook tells them to."""


def describe_start(connection: AgentConnection, missing: int | None, per_host: int | None = None) -> str:
    """Return the lines that start agents for `missing` ranks (None: not known), of which a host takes `per_host`."""
    waiting = "" if missing is None else f"waiting for {plural(missing, 'slot')}: "
    name = shlex.quote(str(connection.file))
    from_file = shlex.join(connection.command(None, per_host, source=str(connection.file)))
    # The shell on the node splits it once more.
    by_ssh = shlex.join(map(shlex.quote, connection.command(None, per_host)))
    by_torchrun = f"-m {connection.module} --connect {name}" + ("" if per_host is None else f" --slots {per_host}")
    # Without it, every node takes itself for the first one.
    meeting = "--rdzv-backend c10d --rdzv-endpoint NODE:29500"
    # One task per node, whatever the allocation has, beside a step in which the notebook may run, and on all cores.
    size = "-N $SLURM_JOB_NUM_NODES -n $SLURM_JOB_NUM_NODES --ntasks-per-node 1"
    # The end of one agent leaves the others.
    srun = " ".join(["srun", size, "--cpu-bind none", *slurm_tools.overlap(), "--wait=0 --kill-on-bad-exit=0"])
    mpirun = "mpirun --map-by ppr:1:node --bind-to none --mca orte_abort_on_non_zero_status 0"
    return "\n".join(
        (
            f"{waiting}start one agent per node, in one of these ways",
            "(--slots N offers N ranks; the default is one per CUDA device)",
            f"  on the node            {from_file}",
            f"  by ssh                 ssh NODE {by_ssh} < {name}",
            f"  in a Slurm allocation  {srun} {from_file}",
            f"  by torchrun            torchrun --nnodes N --nproc-per-node 1 {meeting} {by_torchrun}",
            f"  by Open MPI            {mpirun} {from_file}",
        )
    )
