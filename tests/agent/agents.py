"""Agents of the tests: real processes on this machine, which stand for other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rankbook import Cluster
from rankbook.coordinator import cluster_processes
from rankbook.launch.connection import decode_connection
from rankbook.launch.hosts import HostOptions
from tests.transport.tcp_proxy import Proxy


class Agents:
    """Start agents with a connection file, and collect their errors and what the cluster reports."""

    def __init__(self, folder: Path, run_in: Path | None = None) -> None:
        self.folder = folder
        self.run_in = run_in
        self.file = Path()
        self.lines: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.proxy: Proxy | None = None

    def start(
        self, *options: str, file: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one agent, with `variables` of a launcher that ignores signals if there are any."""
        ignoring = () if variables is None else ("bash", "-c", "trap '' INT CHLD; exec \"$@\"", "bash")
        with (self.folder / f"agent-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*ignoring, sys.executable, "-m", "rankbook.agent", "--connect", str(file or self.file), *options],
                cwd=self.run_in,
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def log(self, number: int) -> str:
        """Return what an agent has written."""
        return (self.folder / f"agent-{number}.log").read_text()

    def end(self) -> None:
        """End the agents that are left."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            process.wait(20)
        if self.proxy is not None:
            self.proxy.close()


@contextmanager
def cluster_on_hosts(
    folder: Path,
    monkeypatch,
    ranks: int,
    slots: Sequence[int],
    *,
    home: int = 0,
    lost_after: float = 30.0,
    timeout: float = 60.0,
    through_proxy: bool = False,
    agents_in: Path | None = None,
    tasks: Sequence[Mapping[str, str]] = (),
    sync_code: bool = True,
) -> Iterator[tuple[Cluster, Agents]]:
    """Start a cluster whose agents offer `slots`, through a proxy if a test cuts the connection.

    `agents_in` is the folder in which the agents run, by default this process's. `tasks` has the variables of agents
    that a launcher has started, one per rank.
    """
    agents = Agents(folder, agents_in)

    def report(text: str) -> None:
        agents.lines.append(text)
        if match := re.search(r"--connect (\S+\.json)", text):
            agents.file = Path(match[1])
            if through_proxy and agents.proxy is None:
                connection = decode_connection(agents.file.read_text(), "file")
                agents.proxy = Proxy(connection.port)
                agents.file = folder / "through-proxy.json"
                agents.file.write_text(replace(connection, port=agents.proxy.port).encode())
            for node, count in enumerate(slots):
                agents.start("--slots", str(count), "--node", str(node))
            for variables in tasks:
                agents.start(variables=variables)

    monkeypatch.setenv("RANKBOOK_CONNECT_DIR", str(folder / "connect"))
    monkeypatch.setattr(cluster_processes, "_report", report)
    options = HostOptions(address="127.0.0.1", home=home, lost_after=lost_after, sync_code=sync_code)
    try:
        with Cluster(ranks, hosts=options, timeout=timeout) as cluster:
            yield cluster, agents
    finally:
        agents.end()
