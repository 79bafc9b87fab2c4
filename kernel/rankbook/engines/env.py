"""Engine `env`: print the lines that start agents, for the user to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rankbook.engines.engine import AgentConnection, EngineEvent, Limits, Notice, slots_per_host
from rankbook.engines.processes import OptionParser
from rankbook.formatting import plural


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
        self._events.append(Notice(describe_start(self._connection, 1, self._per_host)))
        self._next += 1
        return self._next

    def limits(self) -> Limits:
        """See `Engine`."""
        return Limits()

    def stop(self) -> None:
        """See `Engine`. The agents end because the notebook tells them to."""


def describe_start(connection: AgentConnection, missing: int, per_host: int | None = None) -> str:
    """Return the lines that start agents for `missing` ranks, of which a host takes `per_host`."""
    name = shlex.quote(str(connection.file))
    from_file = shlex.join(connection.command(None, per_host, source=str(connection.file)))
    from_input = shlex.join(connection.command(None, per_host))
    by_torchrun = f"-m {connection.module} --connect {name}" + ("" if per_host is None else f" --slots {per_host}")
    return "\n".join(
        (
            f"waiting for {plural(missing, 'slot')}: start one agent per node, in one of these ways",
            "(--slots N offers N ranks; the default is one per CUDA device)",
            f"  on the node            {from_file}",
            f"  by ssh                 ssh NODE {from_input} < {name}",
            f"  in a Slurm allocation  srun --ntasks-per-node 1 {from_file}",
            f"  by torchrun            torchrun --nnodes N --nproc-per-node 1 {by_torchrun}",
            f"  by Open MPI            mpirun --map-by ppr:1:node {from_file}",
        )
    )
