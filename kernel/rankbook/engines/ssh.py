"""Engine `ssh`: one agent per machine, over one ssh connection each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from rankbook.engines.engine import AgentConnection, HostStarted, slots_per_host, split_arguments
from rankbook.engines.processes import OptionParser, ProcessEngine
from rankbook.errors import InvalidArgument

# The first value of an option counts for ssh, so that what the user passes goes before. No question can be answered,
# and a machine that does not answer is given up. Nothing is written to a terminal.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=10")


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
        """See `Engine`. An unused machine, or the same one again: it may be that only the agent has ended."""
        unused = [machine for machine in self._machines if machine not in self._machine_of.values()]
        machine = unused[0] if unused else self._machine_of.get(host)
        return None if machine is None else self._connect(machine)

    def _connect(self, machine: str) -> int:
        assert self.connection is not None
        number = len(self._machine_of)
        self._machine_of[number] = machine
        # `exec`: the agent is then a child of the ssh server's process, and ends when the connection does.
        command = f"exec {shlex.join(self.connection.command(number, self._slots, python=self._python))}"
        if self._folder is not None:
            command = f"cd {shlex.quote(self._folder)} && {command}"
        self.start_job(number, ["ssh", *self._passed, *_OPTIONS, machine, command])
        self.pending.append(HostStarted(number, machine))
        return number
