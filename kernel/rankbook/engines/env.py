"""Engine `env`: print the lines that start agents, for the user to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rankbook.engines.engine import AgentConnection, EngineEvent, Limits, Notice
from rankbook.engines.processes import OptionParser
from rankbook.formatting import plural


class EnvEngine:
    """The agents are started by hand. Their ends are known from their connections alone."""

    def __init__(self, arguments: Sequence[str]) -> None:
        OptionParser("env").parse_args(list(arguments))
        self._connection: AgentConnection | None = None
        self._events: list[EngineEvent] = []
        self._next = 1 << 20  # numbers that no agent has

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:  # noqa: ARG002
        """See `Engine`."""
        self._connection = connection
        self._events.append(Notice(describe_start(connection, slots)))

    def events(self) -> Iterable[EngineEvent]:
        """See `Engine`."""
        events, self._events = self._events, []
        return events

    def replace(self, host: int, *, wait: bool) -> int | None:  # noqa: ARG002
        """See `Engine`. Someone has to start the agent, so that it has to be waited for."""
        if not wait or self._connection is None:
            return None
        self._events.append(Notice(describe_start(self._connection, 1)))
        self._next += 1
        return self._next

    def limits(self) -> Limits:
        """See `Engine`."""
        return Limits()

    def stop(self) -> None:
        """See `Engine`. The agents end because the notebook tells them to."""


def describe_start(connection: AgentConnection, missing: int) -> str:
    """Return the lines that start agents for `missing` ranks."""
    name = shlex.quote(str(connection.file))
    from_file = shlex.join(connection.command(None, None, source=str(connection.file)))
    from_input = shlex.join(connection.command(None, None))
    return "\n".join(
        (
            f"waiting for {plural(missing, 'slot')}: start one agent per node, in one of these ways",
            "(--slots N offers N ranks; the default is one per CUDA device)",
            f"  on the node            {from_file}",
            f"  by ssh                 ssh NODE {from_input} < {name}",
            f"  in a Slurm allocation  srun --ntasks-per-node 1 {from_file}",
            f"  by torchrun            torchrun --nnodes N --nproc-per-node 1 -m {connection.module} --connect {name}",
            f"  by Open MPI            mpirun --map-by ppr:1:node {from_file}",
        )
    )
