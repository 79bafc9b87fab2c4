"""The `Engine` protocol: what the notebook asks of a program that starts agents on other hosts, and its events.

An engine starts one process per host, the agent, and reports which of them have ended. All its methods are called by
one thread of the notebook, one at a time, so that it needs neither threads nor locks. An engine that raises, blocks or
reports nonsense costs at most its own hosts, never the session.

A package offers an engine under the entry point group `rankbook.engines`. The name of the entry point is that of
`--launcher`, and its object is called with the arguments of the start line that `start` itself does not know.

An agent learns the number of its node and task from the environment that its launcher sets (`read_identity`). The
variables are those of torchrun, Slurm, Open MPI, MVAPICH and the PMI of other MPI implementations:

- https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
- https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
- https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
- https://mvapich.cse.ohio-state.edu/userguide/userguide_spawn/
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from rankbook.errors import InvalidArgument, RankbookError

OWN_KEY = "rankbook-agent-key "
"""What an agent that makes its own key writes before its public key, on a line of its standard output."""
GROUP = "rankbook.engines"
"""Entry point group of engines."""
_BUILT_IN = {
    "env": "rankbook.engines.processes:EnvEngine",
    "mpirun": "rankbook.engines.processes:MpirunEngine",
    "ray": "rankbook.engines.ray:RayEngine",
    "slurm": "rankbook.engines.slurm:SlurmEngine",
    "ssh": "rankbook.engines.processes:SshEngine",
}


def _allow_none(public_key: str) -> None:
    raise RankbookError(f"this connection allows no other key than its own, got {public_key}")


@dataclass(frozen=True)
class AgentConnection:
    """Address and key with which an agent reaches the notebook. A process that has them can become one of its hosts.

    `text` is the key. Write it to the standard input of `command()`, and never into an argument or an environment. On
    hosts that see the notebook's files, `command(..., source=str(connection.file))` reads the key from `file`, which
    has mode 0600. `address` is where the notebook listens.

    For programs that do not encrypt what they pass on, `public_text` has no key. An agent that gets it on its standard
    input makes a key pair, writes `rankbook-agent-key` and the public key on a line of its standard output, and
    connects when it has read another line. Call `allow` with the public key before.
    """

    text: str = field(repr=False)
    file: Path
    address: str = ""
    module: str = "rankbook.agent"
    public_text: str = ""
    allow: Callable[[str], None] = field(default=_allow_none, repr=False)

    def command(
        self, host: int | None, slots: int | None, *, python: str | None = None, source: str = "-"
    ) -> list[str]:
        """Return the command that runs the agent of `host`, which takes `slots` ranks (None: one per CUDA device).

        With `host=None` the agent takes its number from the environment: the node's number of Slurm and torchrun, the
        task's number of MPI. `python` is the interpreter on the host, by default this process's; `source` is `-` for
        standard input, or the path of the connection file.

        Example::

            command = connection.command(1, 4)
            command[2:]  # ['-m', 'rankbook.agent', '--connect', '-', '--slots', '4', '--node', '1']
        """
        # `-P`: files of the user called `logging.py` or `types.py` in the working folder must not be imported.
        words = [python or sys.executable, "-P", "-m", self.module, "--connect", source]
        if slots is not None:
            words += ["--slots", str(slots)]
        if host is not None:
            words += ["--node", str(host)]
        return words


@dataclass(frozen=True)
class HostStarted:
    """The agent of a host was started. `name` is the host's name, if the engine knows it."""

    host: int
    name: str = ""


@dataclass(frozen=True)
class HostQueued:
    """Hosts wait in the queue of a scheduler. `starts_at` is the expected start (Unix time, in seconds)."""

    reason: str
    starts_at: float | None = None


@dataclass(frozen=True)
class HostEnded:
    """The agent of a host has ended, or those of all hosts (`host=None`). `reason` follows the words "because"."""

    host: int | None
    reason: str


@dataclass(frozen=True)
class HostOutput:
    """An agent has written `text`, or the engine's program has (`host=None`)."""

    host: int | None
    text: str


@dataclass(frozen=True)
class Notice:
    """A line for the user."""

    text: str


EngineEvent: TypeAlias = HostStarted | HostQueued | HostEnded | HostOutput | Notice


@dataclass(frozen=True)
class Limits:
    """Limits of the hosts. `ends_at`: when the scheduler ends them (Unix time, in seconds); None if it does not."""

    ends_at: float | None = None


class Engine(Protocol):
    """Start, watch, replace and stop the agents of hosts.

    One thread calls all methods, one at a time. `start` comes first and once, `stop` last. An exception in any of them
    is shown to the user with the name of the engine.

    The page *Engines* of the documentation has a complete engine. `rankbook.testing.check_engine` tests one.
    """

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """Start one agent per host, which together offer at least `slots` slots; do not wait for them.

        `hosts` is the number of hosts, or None if the engine is to choose. The agents connect to the notebook by
        themselves. Hosts have the numbers 0, 1, 2 and so on; those of ranks follow them.
        """

    def events(self) -> Iterable[EngineEvent]:
        """Return what has happened since the last call. Called about five times a second; must not wait."""

    def replace(self, host: int, *, wait: bool) -> int | None:
        """Start an agent in place of `host`, which was lost. Return the number of the new host, or None.

        With `wait=False`, only if a host is free now. With `wait=True`, also if it has to be queued for. A number is
        never used twice.
        """

    def limits(self) -> Limits:
        """Return the limits that are known now. Called after each start of a host, and twice a minute."""

    def stop(self) -> None:
        """End all agents and everything that `start` has made, also while it is queued. A second call does nothing."""


def engine_names() -> list[str]:
    """Return the names of all engines that are installed."""
    return sorted({*_BUILT_IN, *(entry.name for entry in importlib.metadata.entry_points(group=GROUP))})


def check_engine_name(name: str) -> None:
    """Raise `InvalidArgument` if there is no engine of this name."""
    if name not in _BUILT_IN and name not in (names := engine_names()):
        raise InvalidArgument(f"invalid launcher {name!r}: expected {', '.join(names)}")


def make_engine(name: str, arguments: Sequence[str]) -> Engine:
    """Make the engine of this name with its part of the start line. Raises `InvalidArgument`.

    Example::

        make_engine("ssh", ["--hosts", "node1,node2"])
    """
    check_engine_name(name)
    try:
        if name in _BUILT_IN:
            module, _, attribute = _BUILT_IN[name].partition(":")
            factory = getattr(importlib.import_module(module), attribute)
        else:
            (entry, *_) = importlib.metadata.entry_points(group=GROUP, name=name)
            factory = entry.load()
        return cast("Callable[[Sequence[str]], Engine]", factory)(arguments)
    except RankbookError:
        raise
    # Code of a third party, or a package that is not installed. The cause stays in the traceback.
    except Exception as error:
        raise InvalidArgument(f"the launcher {name} cannot be used: {type(error).__name__}: {error}") from error


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the engine's own arguments, and those behind `--`, which it passes to the program that it runs.

    Example::

        split_arguments(["--hosts", "a", "--", "-p", "2222"])  # (['--hosts', 'a'], ['-p', '2222'])
    """
    words = list(arguments)
    if "--" not in words:
        return words, []
    position = words.index("--")
    return words[:position], words[position + 1 :]


def slots_per_host(slots: int, hosts: int) -> int:
    """Return how many slots every host offers, so that all together have at least `slots`."""
    return -(-slots // hosts)


@dataclass(frozen=True)
class TaskIdentity:
    """Numbers of the process that a launcher has started; None for those that it has not set.

    `rank` and `local_rank` are the number of the task and its number within its node; `local_size` is the number of
    tasks of the node.
    """

    node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    world_size: int | None = None


# torchrun and mpirun before Slurm: within a job their processes also have its variables, which are those of the step or
# the script that runs the launcher, and the same for several of them.
_VARIABLES = (
    # node, rank, local rank, tasks of the node, all tasks
    ("GROUP_RANK", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),  # torchrun
    (
        "",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_SIZE",
    ),
    ("", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "", "SLURM_STEP_NUM_TASKS"),
)
# Before Slurm if mpirun of MPICH or Intel MPI has set the numbers of the node. `srun --mpi=pmi2` sets PMI_RANK alone.
_PMI = ("", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE")


def read_identity(environment: Mapping[str, str]) -> TaskIdentity:
    """Return the numbers of the first launcher of which `environment` has the rank's variable.

    Example::

        read_identity({"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}).node  # 1
    """
    *others, slurm = _VARIABLES
    last = (_PMI, slurm) if "MPI_LOCALNRANKS" in environment else (slurm, _PMI)
    for names in (*others, *last):
        node, rank, local_rank, local_size, world_size = (_number(environment, name) for name in names)
        if rank is None:
            continue
        if local_size is None:
            local_size = _slurm_local_size(environment, node)
        return TaskIdentity(node, rank, local_rank, local_size, world_size)
    return TaskIdentity()


def _slurm_local_size(environment: Mapping[str, str], node: int | None) -> int | None:
    """Return the number of tasks of this node. `2(x3),1` means three nodes with two tasks and one with one."""
    sizes: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        size, _, times = part.partition("(x")
        if size.isdecimal():
            # A node's number is below the count of nodes, so a larger number of repetitions is an error.
            sizes += [int(size)] * min(int(times.rstrip(")")) if times.rstrip(")").isdecimal() else 1, 1 << 16)
    return sizes[node] if node is not None and node < len(sizes) else None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else None
