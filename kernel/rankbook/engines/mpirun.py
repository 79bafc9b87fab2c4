"""Engine `mpirun`: one agent per node of Open MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rankbook.engines.engine import AgentConnection, slots_per_host, split_arguments
from rankbook.engines.processes import OptionParser, StepEngine
from rankbook.errors import InvalidArgument


class MpirunEngine(StepEngine):
    """`--launcher mpirun --hostfile FILE`, or `--nodes N` where mpirun knows the nodes from a scheduler.

    The connection goes over the standard input, which mpirun copies to all processes. A lost node cannot be replaced:
    an MPI job has a fixed number of processes.
    """

    name = "mpirun"

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        own, self._passed = split_arguments(arguments)
        parser = OptionParser(self.name)
        parser.add_argument("--hostfile")
        parser.add_argument("--python", default=sys.executable)
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
