"""Engine `slurm`: one agent per node of an allocation, or of a job that srun asks for."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rankbook.engines import slurm_tools, supervisor
from rankbook.engines.engine import (
    AgentConnection,
    EngineEvent,
    HostEnded,
    HostOutput,
    HostQueued,
    HostStarted,
    Limits,
    Notice,
    slots_per_host,
    split_arguments,
)
from rankbook.engines.processes import OptionParser, StepEngine, choose_replacement
from rankbook.errors import InvalidArgument, StartError

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""Seconds between two looks at the queue, each half as long again as the one before.

Every look is a request to the controller of the whole cluster, and a job may wait for hours.
"""
# One node's end leaves the others: do not wait for the rest of the step, and do not end it for a bad exit or for a node
# that has failed. PMI is not used. The agent takes all CPUs of its node, and the notebook's environment: the steps of a
# batch job would inherit its `--export`.
_STEP = (
    *("--wait=0", "--kill-on-bad-exit=0", "--no-kill"),
    *("--mpi=none", "--ntasks-per-node=1", "--cpu-bind=none", "--unbuffered", "--export=ALL"),
)
# Options of srun for its streams, over which the connection and the reports go.
_OF_STREAMS = frozenset({"SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"})
# What the allocation was asked for. srun would take it for options of the step, which has one task per node and all
# that the job has there.
_OF_ALLOCATION = frozenset(
    {
        *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"),
        *("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND", "SLURM_TRES_BIND"),
        *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"),
        # With one of these srun assumes --exact: the step would have one core per node.
        *("SLURM_THREADS_PER_CORE", "SLURM_CPUS_PER_GPU", "SLURM_EXACT"),
        # srun ends if it has two of these, also if one of them is an option.
        *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    }
)
_FOR_GPUS = re.compile(r"(--gpus(-per-\w+)?|--gres|--tres-per-task)(=|$)|-G")
"""An option that says which GPUs a step gets."""
_FOR_MEMORY = re.compile(r"--mem(-per-\w+)?(=|$)")
"""An option that says how much memory a step gets."""
_SHARES_GPUS = (22, 5)
"""First version of Slurm in which steps with `--overlap` share GPUs and memory, not only CPUs."""
_NODE_FAILURE = re.compile(r"error: Node failure on (\S+)")
# The reporters exit with 0. This one has not run, as where Rankbook is not installed, or it was killed with its agent:
# then the name of the signal follows, or "Out Of Memory".
_TASK_EXIT = re.compile(r"srun: error: (\S+): task (\d+): (.+)")
_STEP_WAITS = re.compile(r"srun: (Job \d+ step creation temporarily disabled, .+)")


@dataclass(frozen=True)
class QueueEntry:
    """One line of `squeue`: the job's state, the reason why it waits, and its expected start or its end (Unix time)."""

    job: str
    state: str
    reason: str
    starts_at: float | None
    ends_at: float | None


# %A and not %i: the number of the task of a job array, as in SLURM_JOB_ID.
QUEUE_FORMAT = "%A|%T|%r|%S|%e|%l"


def read_queue(line: str) -> QueueEntry | None:
    """Return the entry of a line in `QUEUE_FORMAT`; None if it has another form.

    Example::

        read_queue("7|PENDING|Resources|2026-01-02T10:00:00|N/A|1:00:00").reason  # 'Resources'
    """
    parts = line.strip().split("|")
    if len(parts) != 6:
        return None
    job, state, reason, start, end, limit = parts
    # An unlimited job has an end in a year.
    return QueueEntry(job, state, reason, _time(start), None if limit == "UNLIMITED" else _time(end))


def _time(text: str) -> float | None:
    with contextlib.suppress(ValueError):  # N/A, Unknown, NONE
        return datetime.fromisoformat(text).timestamp()  # of this host's time zone, as Slurm's tools print it
    return None


def options_per_host(options: Sequence[str], hosts: int) -> tuple[list[str], list[str]]:
    """Return the options that hold for any part of the hosts, and those that are about all of them together.

    A total of GPUs becomes a number per host if it can be divided by `hosts`.

    Example::

        options_per_host(["-p", "x", "-w", "a,b", "--gpus=16"], 2)  # (['-p', 'x', '--gpus-per-node=8'], ['-w', 'a,b'])
    """
    of_any: list[str] = []
    of_all: list[str] = []
    words = iter(options)
    for word in words:
        name, has_value, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if name not in {"--gpus", "-G", "--nodelist", "-w", "--nodefile", "-F"}:
            (of_all if name == "--exclusive" else of_any).append(word)
            continue
        parts = [word]
        if not has_value:
            value = next(words, "")
            parts.append(value)
        kind, _, count = value.rpartition(":")
        if name in {"--gpus", "-G"} and count.isdecimal() and int(count) % hosts == 0 and "," not in kind:
            of_any.append(f"--gpus-per-node={kind}{':' if kind else ''}{int(count) // hosts}")
        else:
            of_all += parts
    return of_any, of_all


@dataclass(frozen=True)
class NodeResources:
    """Nodes of a job (`node[1-2]`), and the generic resources that the job has on each, such as `{"gpu:a100": 4}`."""

    nodes: str
    count_of: Mapping[str, int]


def read_resources(text: str) -> list[NodeResources]:
    r"""Return the generic resources of a job's nodes that a step has to ask for, from `scontrol show job --details`.

    An empty list if a step gets what the job has there without asking, because the job was asked for them per node. In
    a job that was asked for a number per task, a step has those of one task per node; in one that was asked for a
    number in all, it needs all of them, also on some of the nodes; and in one that has them only because its nodes are
    whole (`--exclusive`), it has none.

    Example::

        text = "TresPerTask=gres:gpu:1\n Nodes=node[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:4(IDX:0-3)"
        read_resources(text)  # [NodeResources(nodes='node[1-2]', count_of={'gpu': 4})]
    """
    asked = {per: "gres" in value for per, value in re.findall(r"TresPer(\w+)=(\S+)", text)}
    if (asked.get("Node") or asked.get("Socket")) and not (asked.get("Task") or asked.get("Job")):
        return []
    return [
        NodeResources(
            nodes,
            # `gpu:a100:4(IDX:0-3),nic:1(CNT:1)`
            {kind: int(count) for kind, count in re.findall(r"([^,]+):(\d+)(?:,|$)", re.sub(r"\(.*?\)", "", gres))},
        )
        for nodes, gres in re.findall(r"^ *Nodes=(\S+) .*GRES=(\S*)", text, re.MULTILINE)
    ]


class SlurmEngine(StepEngine):
    """`--launcher slurm`: a step over the nodes of this allocation, or a job of its own.

    The connection goes over the standard input of srun, which copies it to all tasks. If srun ends, also by SIGKILL,
    its step ends, and its job if it keeps one.

    A job of its own is kept by a first srun, and the agents are a second step of it: srun asks for whole nodes with
    `--exclusive`, but that also gives its own step one core per task (`--exact`). The first job is kept until the stop:
    replacements are further steps of it. Another one, and one in which no agent has started, ends with its step.
    """

    name = "slurm"
    # After SIGTERM, srun kills its tasks with SIGKILL, and nobody removes the folders of the agents. This signal it
    # passes on to all processes of the tasks' groups. While srun waits in the queue, it ends with either.
    _end_signal = signal.SIGUSR2
    # Slurm sends SIGTERM when it ends the job: at once, or in some time if the job is preempted or the user has asked
    # for it. srun never sends it.
    _report_option = "--report-sigterm"

    def __init__(self, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        own, self._options = split_arguments(arguments)
        parser = OptionParser(self.name)
        parser.add_argument("--python", type=os.path.expanduser, default=sys.executable)
        self._python: str = parser.parse_args(own).python
        self._environment = os.environ if environment is None else environment
        self._job: str | None = self._environment.get("SLURM_JOB_ID")
        self._is_own_job = self._job is None
        self._job_name = f"rankbook-{secrets.token_hex(4)}"
        self._nodes: list[str] = []
        self._slots = 0
        self._next = 0
        self._waiting: set[int | None] = set()
        self._look_at = 0.0
        self._pause = _FIRST_PAUSE
        self._ends_at: float | None = None
        self._ending: set[int] = set()
        self._asked: dict[int, int] = {}
        self._tried: dict[int, list[str]] = {}

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """See `Engine`."""
        self.connection = connection
        if self._is_own_job:
            count = hosts or 1
            nodes = None
        else:
            self._nodes = self._allocated_nodes()
            count = hosts or len(self._nodes)
            if count > len(self._nodes):
                raise InvalidArgument(f"{count} nodes, but the allocation has {len(self._nodes)}: {self._nodes}")
            nodes = self._nodes[:count]
        self._slots, self._next = slots_per_host(slots, count), count
        self._options, of_all = options_per_host(self._options, count)
        self._run_step(None, count, nodes, "SLURM_NODEID", of_all)

    def events(self) -> Iterable[EngineEvent]:
        """See `Engine`."""
        events = list(super().events())
        self._waiting -= {job for job in self._waiting if self.hosts_of.get(job) or job not in self.jobs}
        if self._waiting and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._pause
            self._pause = min(1.5 * self._pause, _LONGEST_PAUSE)
            events += [
                HostQueued(f"job {entry.job}, {entry.reason}", entry.starts_at)
                for entry in self._queue() or ()
                if entry.state == "PENDING"
            ]
        return events

    def replace(self, host: int, *, wait: bool) -> int | None:
        """See `Engine`. A node of the allocation that is not in use, or the same one; with `wait`, a further job."""
        number = self._next
        running = self._waiting.union(*self.hosts_of.values())
        in_use = {name for other, name in self.names.items() if other in running and other != host}
        tried = self._tried.setdefault(host, [])
        node = choose_replacement(self._nodes, self.names.get(host), in_use, [*self.names.values()], tried)
        if not wait and self._job is not None and node is not None:
            # If the node itself has failed, srun ends and says so.
            self._run_step(number, 1, [node], str(number), ["--immediate=20"])
            self.names[number] = node
            tried.append(node)
        elif wait and self._is_own_job:
            # An earlier wait for it was given up, and it is still queued.
            if (further := self._asked.get(host)) is not None and further in self._waiting:
                return further
            self._run_step(number, 1, None, str(number))
            self._asked[host] = number
        else:
            return None
        self._next += 1
        return number

    def limits(self) -> Limits:
        """See `Engine`."""
        entries = self._queue()
        if entries is not None:
            # The end of a job that is COMPLETING is in the past; the hosts of a further job go on.
            running = [entry for entry in entries if entry.state == "RUNNING"]
            if self._job is None and running:
                self._job = running[0].job
            if not running:
                # Slurm sends SIGKILL in some seconds: until then the agents can remove their files.
                for number in [job for job in self.jobs if self._ending & self.hosts_of.get(job, set())]:
                    self.jobs[number].end()
            self._ending.clear()
            self._ends_at = min((entry.ends_at for entry in running if entry.ends_at is not None), default=None)
        # The controller does not answer: the end that it has told holds as long as it is not there.
        elif self._ends_at is not None and self._ends_at <= time.time():
            self._ends_at = None
        return Limits(self._ends_at)

    def stop(self) -> None:
        """See `Engine`. A job that is still queued is cancelled."""
        running = bool(self.jobs)
        try:
            super().stop()
        finally:
            if running and self._is_own_job:
                slurm_tools.run("scancel", f"--name={self._job_name}")

    def read_line(self, host: int | None, line: str) -> list[EngineEvent]:
        """Return the end of a node or of its task that srun reports, and the line."""
        if (code := supervisor.read_step_end(line)) is not None:
            return self._end_step(host, code)
        events: list[EngineEvent] = [HostOutput(host, f"{line}\n")]
        if (report := supervisor.read_report(line)) is not None:  # Slurm has sent SIGTERM
            self._ending.add(report[0])
            return [HostStarted(report[0], report[2])]  # after it, the limits are asked for
        if waits := _STEP_WAITS.search(line):
            events.append(Notice(f"slurm: {waits[1]}; interrupt to cancel"))
        if exited := _TASK_EXIT.search(line):
            number = int(exited[2]) if host is None else host  # one task per node, or one in all
            self.hosts_of.get(host, set()).discard(number)
            events += [HostStarted(number, exited[1]), HostEnded(number, f"srun reported: {exited[3]}")]
        if failure := _NODE_FAILURE.search(line):
            for number, name in self.names.items():
                if name == failure[1] and number in self.hosts_of.get(host, ()):
                    self.hosts_of[host].discard(number)
                    events.append(HostEnded(number, f"the node {name} has failed"))
        return events

    def _end_step(self, job: int | None, code: int) -> list[EngineEvent]:
        """Return the ends of the hosts that the first step of a job has left, or end the job, which tells them."""
        hosts = self.hosts_of.get(job)
        if job is not None or hosts is None:  # no replacement is a step of it
            self.jobs[job].end()
            return []
        self.hosts_of[job] = set()
        self._waiting.discard(job)
        events: list[EngineEvent] = [
            HostEnded(host, f"{self.name}: {supervisor.describe_code(code)}") for host in sorted(hosts)
        ]
        if not any(self.hosts_of.values()):
            events.append(Notice("slurm: no agent runs any more; the job is kept for heal, until %distributed stop"))
        return events

    def _run_step(
        self, job: int | None, count: int, nodes: Sequence[str] | None, number: str, further: Sequence[str] = ()
    ) -> None:
        """Start agents on nodes of the job, or (None) in a job that is asked for.

        `number` is the variable with the number of a host, or the number.
        """
        host = int(number) if number.isdecimal() else None
        size = [f"--nodes={count}", f"--ntasks={count}"]
        agent = self.supervised(number, host, self._slots, self._python)
        # Behind the user's options: squeue and scancel find the job by this name.
        named = [f"--job-name={self._job_name}"] if self._is_own_job else []
        # The notebook, or the first srun, may run in a step of the same job.
        step = ["srun", *size, *_STEP, *slurm_tools.overlap()]
        unused = _OF_STREAMS if self._is_own_job else _OF_STREAMS | _OF_ALLOCATION
        env = {name: value for name, value in os.environ.items() if name not in unused}
        if nodes is not None:
            where = [f"--jobid={self._job}", f"--nodelist={','.join(nodes)}", *self._resources(nodes, further)]
            if not self._is_own_job and not any(_FOR_MEMORY.match(option) for option in self._options):
                where.append("--mem=0")  # all that the job has on the node
            command = [*step, *where, *self._options, *further, *named, *agent]
        else:
            command = ["srun", *size, *_STEP, "--exclusive", *self._options, *further, *named]
            if (slurm_tools.version() or (0, 0)) < _SHARES_GPUS:
                command += agent
            else:
                hold = [*command, *supervisor.HOLD]
                in_job = [sys.executable, "-I", "-S", supervisor.__file__, "--in-job", str(len(hold))]
                command = [*in_job, *hold, *step, *self._options, *named, *agent]
        self._waiting.add(job)
        self._look_at, self._pause = 0.0, _FIRST_PAUSE
        self.start_job(job, command, env=env)

    def _resources(self, nodes: Sequence[str], further: Sequence[str] = ()) -> list[str]:
        """Return the option for the GPUs that the allocation has on all of these nodes, if a step needs one."""
        if self._is_own_job or any(_FOR_GPUS.match(option) for option in (*self._options, *further)):
            return []
        counts = []
        for part in read_resources(slurm_tools.run("scontrol", "show", "job", "--details", str(self._job)) or ""):
            names = (slurm_tools.run("scontrol", "show", "hostnames", part.nodes) or "").split()
            counts += [part.count_of for name in names if name in nodes]
        kinds = set.intersection(*map(set, counts)) if counts else set()
        gres = [f"{kind}:{min(count_of[kind] for count_of in counts)}" for kind in sorted(kinds)]
        return [f"--gres={','.join(gres)}"] if gres else []

    def _queue(self) -> list[QueueEntry] | None:
        """Return the entries of this engine's jobs; None if the controller does not answer."""
        which = f"--name={self._job_name}" if self._is_own_job else f"--jobs={self._job}"
        output = slurm_tools.run("squeue", "--noheader", which, f"--format={QUEUE_FORMAT}")
        if output is None:
            return None
        entries = [entry for line in output.splitlines() if (entry := read_queue(line)) is not None]
        # For one task of a job array, squeue may list all of them.
        return [entry for entry in entries if self._is_own_job or entry.job == self._job]

    def _allocated_nodes(self) -> list[str]:
        names = self._environment.get("SLURM_JOB_NODELIST", "")
        nodes = (slurm_tools.run("scontrol", "show", "hostnames", names) or "").split()
        if not nodes:
            raise StartError(f"scontrol does not know the nodes of this allocation: SLURM_JOB_NODELIST={names!r}")
        return nodes
