"""Test helpers for engines: `FakeEngine`, whose hosts are processes of this machine, and the suite `check_engine`.

Run as `python -m rankbook.testing`, this module is the agent of that suite: a process that says who it is and does what
the suite tells it. It starts no ranks and imports no torch, so that a check takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rankbook.engines.engine import (
    OWN_KEY,
    AgentConnection,
    Engine,
    EngineEvent,
    HostEnded,
    HostOutput,
    HostQueued,
    HostStarted,
    Limits,
    read_identity,
    slots_per_host,
)
from rankbook.engines.processes import Job, ProcessEngine

__all__ = ["FakeEngine", "check_engine"]

_END_SECONDS = 10.0
"""Seconds within which an engine must report the end of an agent, and end all agents at a stop."""


class FakeEngine(ProcessEngine):
    """Engine whose hosts are `hosts` agents on this machine, for tests of code that uses ranks on several hosts.

    `spare` hosts can replace lost ones. `walltime`: the hosts end so many seconds after the start, as under a
    scheduler. `queued`: a reason for which the hosts wait in a queue until `release` is called.

    Example::

        engine = FakeEngine(hosts=2, spare=1)
        cluster = rankbook.start(4, launcher=engine)
        engine.kill(1)  # as if the machine had been switched off
        cluster.heal()  # its ranks run on the third host now
    """

    name = "fake"

    def __init__(self, hosts: int = 2, *, spare: int = 0, walltime: float | None = None, queued: str = "") -> None:
        super().__init__()
        self.hosts = hosts
        self._spare = spare
        self._walltime = walltime
        self._queued = queued
        self._slots = 0
        self._next = 0
        self._ends_at: float | None = None

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """See `Engine`."""
        self.connection = connection
        self.hosts = hosts or self.hosts
        self._slots = slots_per_host(slots, self.hosts)
        if self._queued:
            self.pending.append(HostQueued(self._queued))
        else:
            self._start_all()

    def release(self) -> None:
        """Let hosts that are queued start, at the next call of `events`."""
        self._queued = ""

    def kill(self, host: int) -> None:
        """Kill the agent of a host, with SIGKILL."""
        self.jobs[host].kill()

    def events(self) -> list[EngineEvent]:
        """See `Engine`."""
        if self.connection is not None and not self._next and not self._queued:
            self._start_all()
        return list(super().events())

    def replace(self, host: int, *, wait: bool) -> int | None:  # noqa: ARG002
        """See `Engine`."""
        if not self._spare:
            return None
        self._spare -= 1
        return self._start_host()

    def limits(self) -> Limits:
        """See `Engine`."""
        return Limits(self._ends_at)

    def _start_all(self) -> None:
        if self._walltime is not None:
            self._ends_at = time.time() + self._walltime
        for _ in range(self.hosts):
            self._start_host()

    def _start_host(self) -> int:
        assert self.connection is not None
        number, self._next = self._next, self._next + 1
        self.jobs[number] = Job(self.connection.command(number, self._slots), self.connection.text)
        self.pending.append(HostStarted(number))
        return number


# The suite -----------------------------------------------------------------------------------------------------------


def check_engine(
    make: Callable[[], Engine], *, hosts: int = 2, slots: int = 2, address: str = "127.0.0.1", timeout: float = 60.0
) -> None:
    """Check that an engine does what `rankbook.engines.Engine` asks for.

    `make` returns a new engine, which is to start agents on `hosts` hosts for `slots` ranks. They must be able to reach
    this process at `address`. `timeout`: the seconds that a start may take. Raises `AssertionError`, which says what
    was expected. Nothing is left of the engine then, if its `stop` works.

    Example::

        check_engine(lambda: FakeEngine(hosts=2, spare=1), hosts=2, slots=2)
    """
    with _check(make(), address) as check:
        began = time.monotonic()
        check.engine.start(hosts, slots, check.connection)
        agents = check.wait_agents(range(hosts), timeout)
        took = time.monotonic() - began
        offered = sum(agent.slots for agent in agents.values())
        assert offered >= slots, f"expected at least {slots} slots, the agents offer {offered}"
        check.wait_events(HostStarted, range(hosts))
        check.check_keys()
        limits = check.engine.limits()
        assert isinstance(limits, Limits), f"expected limits() to return Limits, got {limits!r}"
        assert limits.ends_at is None or limits.ends_at > time.time(), f"the hosts have ended already: {limits}"
        for host, agent in agents.items():
            agent.tell("write")
            check.wait_output(f"output of host {host}")
        # The end of one agent is reported, and does not end the others.
        agents[0].tell("kill")
        check.wait_events(HostEnded, [0])
        for host in range(1, hosts):
            assert agents[host].is_connected(), f"the agent of host {host} ended with that of host 0"
        ended = {event.host for event in check.events if isinstance(event, HostEnded)}
        assert ended == {0}, f"expected the end of host 0 alone, the engine reported those of {ended}"
        # A replacement has a number of its own.
        number = check.engine.replace(0, wait=False)
        assert number is None or number >= hosts, (
            f"expected replace() to return a number that no host has, from {hosts} on, or None, got {number!r}"
        )
        if number is not None:
            agents |= check.wait_agents([number], timeout)
        check.stop()
        for host, agent in agents.items():
            assert agent.has_ended(_END_SECONDS), f"the agent of host {host} still runs after stop()"
        check.engine.stop()  # does nothing
        late = [event for event in check.engine.events() if isinstance(event, HostStarted)]
        assert not late, f"a stopped engine reported {late}"
    # An interrupt during the start, when the hosts may still be queued.
    with _check(make(), address) as check:
        check.engine.start(hosts, slots, check.connection)
        check.stop()
        # An agent that the stop has missed connects when it has started.
        deadline = time.monotonic() + 2 * took + 1.0
        while time.monotonic() < deadline:
            check.accept_all()
        deadline = time.monotonic() + _END_SECONDS
        for agent in check.agents:
            assert agent.has_ended(deadline - time.monotonic()), f"the agent of host {agent.host} runs after stop()"
    # An engine that was never started.
    make().stop()


@contextlib.contextmanager
def _check(engine: Engine, address: str) -> Iterator[_Check]:
    with tempfile.TemporaryDirectory(prefix="rankbook-") as folder, socket.create_server((address, 0)) as server:
        check = _Check(engine, server, Path(folder))
        try:
            yield check
        finally:
            if not check.stopped:
                engine.stop()
            for agent in check.agents:
                agent.socket.close()


class _Check:
    """One engine with the agents that have connected, and the events that it has reported."""

    def __init__(self, engine: Engine, server: socket.socket, folder: Path) -> None:
        self.engine = engine
        self.events: list[EngineEvent] = []
        self.agents: list[_Probe] = []
        self.stopped = False
        self._server = server
        server.settimeout(0.05)
        key = secrets.token_hex(16)
        address, port = server.getsockname()[:2]
        public = {"address": address, "port": port}
        text = json.dumps({**public, "key": key}) + "\n"
        self._keys = {key}
        file = folder / "connection.json"
        file.touch(mode=0o600)
        file.write_text(text)
        self.connection = AgentConnection(
            text, file, address, "rankbook.testing", json.dumps(public) + "\n", self._keys.add
        )

    def accept_all(self) -> list[_Probe]:
        """Accept the agents that have connected; return all that ever have."""
        with contextlib.suppress(TimeoutError):
            while True:
                connection = self._server.accept()[0]
                with contextlib.suppress(ConnectionError):  # its agent was ended meanwhile
                    self.agents.append(_Probe(connection, self._keys))
        return self.agents

    def wait_agents(self, hosts: Sequence[int] | range, timeout: float) -> dict[int, _Probe]:
        """Wait until an agent of every host has connected."""
        found: dict[int, _Probe] = {}

        def connected() -> bool:
            found.update({agent.host: agent for agent in self.accept_all()})
            assert len(found) == len(self.agents), f"two agents have the same number: {[a.host for a in self.agents]}"
            ended = [event for event in self.events if isinstance(event, HostEnded)]
            assert not any(event.host in (None, *hosts) for event in ended), f"an agent ended at the start: {ended}"
            return found.keys() >= {*hosts}

        self._wait(connected, timeout, f"an agent of every host in {[*hosts]} to connect")
        return found

    def wait_events(self, kind: type, hosts: Sequence[int] | range) -> None:
        """Wait until the engine has reported an event of this kind for all hosts."""

        def reported() -> bool:
            return {event.host for event in self.events if isinstance(event, kind)} >= {*hosts}  # type: ignore[union-attr]

        self._wait(reported, _END_SECONDS, f"{kind.__name__} of every host in {[*hosts]}")

    def wait_output(self, text: str) -> None:
        """Wait until the engine has reported what an agent has written."""

        def reported() -> bool:
            return text in "".join(event.text for event in self.events if isinstance(event, HostOutput))

        self._wait(reported, _END_SECONDS, f"HostOutput with {text!r}")

    def check_keys(self) -> None:
        """Check that the keys of this connection are in no environment and in no command line of this machine."""
        for agent in self.agents:
            assert not agent.key_in_environment, f"the connection's text is in the environment of host {agent.host}"
            assert not agent.key_in_arguments, f"the connection's text is in the arguments of host {agent.host}"
        keys = [key.encode() for key in self._keys]
        for folder in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    content = (folder / name).read_bytes()
                    found = any(key in content for key in keys)
                    assert not found, f"the connection's text is in {name} of process {folder.name}"

    def stop(self) -> None:
        """Stop the engine."""
        self.stopped = True
        self.engine.stop()

    def _wait(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        self.events += self.engine.events()
        while not condition():
            assert time.monotonic() < deadline, f"expected {what} within {timeout:.0f} s; events: {self.events}"
            time.sleep(0.05)
            self.events += self.engine.events()


class _Probe:
    """The suite's end of the connection to one of its agents."""

    def __init__(self, connection: socket.socket, keys: set[str]) -> None:
        self.socket = connection
        self.socket.settimeout(10.0)
        line = self.socket.makefile().readline()
        if not line:
            self.socket.close()
            raise ConnectionResetError("the agent has ended before it has said who it is")
        hello = json.loads(line)
        assert hello["key"] in keys, "an agent has another connection's text, or a key that was not allowed"
        assert hello["host"] is not None, "an agent has no number: neither --node nor a variable of its launcher"
        self.host = int(hello["host"])
        self.slots = int(hello["slots"])
        self.key_in_environment = bool(hello["key_in_environment"])
        self.key_in_arguments = bool(hello["key_in_arguments"])

    def tell(self, command: str) -> None:
        """Make the agent do something: write, or kill itself."""
        self.socket.sendall(f"{command}\n".encode())

    def is_connected(self) -> bool:
        """Return True if the agent runs."""
        return not self.has_ended(0.0)

    def has_ended(self, seconds: float) -> bool:
        """Wait for the end of the agent. Return False if it still runs."""
        readable, _, _ = select.select([self.socket], [], [], max(0.0, seconds))
        return bool(readable)  # it sends nothing more


def _run_agent(arguments: Sequence[str]) -> int:
    """Be an agent of the suite."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect", required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--node", type=int)
    options = parser.parse_args(arguments)
    text = sys.stdin.readline() if options.connect == "-" else Path(options.connect).read_text(encoding="utf-8")
    content = json.loads(text)
    if (key := content.get("key", "")) == "":
        key = secrets.token_hex(16)
        sys.stdout.write(f"{OWN_KEY}{key}\n")
        sys.stdout.flush()
        sys.stdin.readline()
    identity = read_identity(os.environ)
    number = next((n for n in (options.node, identity.node, identity.rank) if n is not None), None)
    parent = os.getppid()
    with socket.create_connection((content["address"], content["port"]), timeout=10.0) as connection:
        hello = {
            "key": key,
            "host": number,
            "slots": options.slots,
            "name": platform.node(),
            "key_in_environment": any(key in value for value in os.environ.values()),
            "key_in_arguments": any(key in value for value in sys.argv),
        }
        connection.sendall(json.dumps(hello).encode() + b"\n")
        while os.getppid() == parent:
            if not select.select([connection], [], [], 0.5)[0]:
                continue
            match connection.recv(64).split():
                case []:
                    break
                case [b"kill"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                case [b"write"]:
                    os.write(1, f"output of host {number}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(_run_agent(sys.argv[1:]))
