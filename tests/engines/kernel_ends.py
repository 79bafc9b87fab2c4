"""A front end on the hosts of an engine, and the ways in which ranks end: `python -m tests.engines.kernel_ends`.

A kernel starts ranks and stops them, starts some again and is restarted, and starts some once more and is killed. After
each, a line of JSON has the seconds until nothing was left of them, or what is left. The arguments are the launcher,
the address of this host, and the launcher's own arguments.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import Notebook, Outcome, cluster_folders
from tests.engines.programs import running
from tests.engines.session import tell

LONGEST = 75.0
"""Seconds after which something counts as left."""
ON_THE_NODE = re.compile(r" +on the node +(.+)\n")
FAKE = """
import rankbook
from rankbook.testing import FakeEngine
rankbook.start(4, launcher=FakeEngine(2), address={address!r})"""
LOOK = """
import json, psutil, rankbook
from tests.engines.session import agent_pids, processes_of
cluster = rankbook.current()
assert cluster.run("t = torch.ones(1); dist.all_reduce(t); t.item()").text(0) == "4.0"
agents = [*agent_pids(cluster).values()]
print("processes", json.dumps([agents, processes_of(agents)]))"""


class FrontEnd:
    """A kernel, and what the ranks that it has started consist of."""

    def __init__(self, launcher: str, address: str, arguments: list[str], folder: Path) -> None:
        self.launcher = launcher
        self._address = address
        self._arguments = arguments
        self._folder = folder
        self._by_hand = contextlib.ExitStack()
        self._agents: list[int] = []
        self._processes: list[int] = []
        self._file = Path()
        root = str(Path(__file__).parents[2])
        self.notebook = Notebook(env={"PYTHONPATH": root, "RANKBOOK_CONNECT_DIR": str(folder / "connect")})

    def start(self) -> None:
        """Start two ranks on each of two hosts."""
        line = f"%distributed start --launcher {self.launcher} -n 4 --address {self._address}"
        if not {"--hosts", "--hostfile"} & {*self._arguments}:
            line += " --nodes 2"
        code = (
            f"{line} {shlex.join(self._arguments)}" if self.launcher != "fake" else FAKE.format(address=self._address)
        )
        self.notebook.ok("%load_ext rankbook")
        outcome = self.notebook.finish(self.notebook.send(code), timeout=200, seen=self._run_lines)
        assert outcome.status == "ok", outcome.traceback or outcome.text
        output = self.notebook.ok(LOOK, timeout=120).stdout
        match = re.search(r"processes (.+)", output)
        assert match is not None, output
        self._agents, processes = json.loads(match[1])
        # The processes of an ssh server and of Ray that belong to an agent.
        parents = {psutil.Process(pid).ppid() for pid in self._agents} - {os.getpid(), self.notebook.pid}
        self._processes = sorted({*processes, *parents})
        assert len(self._agents) == 2 and len(self._processes) >= 2 + 2 + 4, (self._agents, self._processes)

    def _run_lines(self, outcome: Outcome) -> None:
        if len(matches := ON_THE_NODE.findall(outcome.stdout)) == 1 and not self._by_hand._exit_callbacks:  # type: ignore[attr-defined]
            for number in range(2):
                log = self._folder / f"agent-{number}"
                self._by_hand.enter_context(running(log, "bash", "-c", matches[0]))

    def left(self) -> list[str]:
        """Return what is left of the ranks that were started last."""
        names = [f"process {describe(pid)}" for pid in self._processes if runs(pid)]
        names += [f"folder {folder}" for pid in self._agents for folder in cluster_folders(pid)]
        names += [f"file {file}" for file in (self._folder / "connect").glob("*")]
        if self.launcher == "slurm":
            jobs = subprocess.run(
                ["squeue", "-h", "-o", "%i %T"], capture_output=True, text=True, check=True, timeout=30
            )
            names += [f"job {job}" for job in jobs.stdout.splitlines()]
        if self.launcher == "ray":
            table = importlib.import_module("ray.util").placement_group_table()
            names += [f"placement group {name}" for name, group in table.items() if group["state"] != "REMOVED"]
        return names

    def end(self, step: str, end: Callable[[], Any]) -> None:
        """End the ranks, and tell after how many seconds nothing was left."""
        self.start()
        before = set(cluster_folders(self.notebook.pid))
        began = time.monotonic()
        end()
        while (left := [*self.left(), *map(str, before & {*cluster_folders(self.notebook.pid)})]) and (
            time.monotonic() - began < LONGEST
        ):
            time.sleep(0.05)
        tell(step, {"seconds": round(time.monotonic() - began, 2), "left": left})
        self._by_hand.close()

    def restart(self) -> None:
        """Restart the kernel, as a person does."""
        self.notebook.manager.restart_kernel()

    def kill(self) -> None:
        """Kill the kernel's process."""
        self.notebook.manager.autorestart = False  # type: ignore[attr-defined]
        os.kill(self.notebook.pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Return True if the process exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe(pid: int) -> str:
    """Return a process's number and command line."""
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:160]}"
    except psutil.NoSuchProcess:
        return str(pid)


def main(arguments: list[str]) -> None:
    """End the kernel in the three ways."""
    launcher, address, *own = arguments
    if launcher == "ray":
        importlib.import_module("ray").init(address="auto", log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        front_end = FrontEnd(launcher, address, own, Path(folder))
        try:
            front_end.end("stop", lambda: front_end.notebook.ok("%distributed stop", timeout=120))
            front_end.end("restart", front_end.restart)
            front_end.notebook.client.wait_for_ready(timeout=60)
            front_end.end("kill", front_end.kill)
        finally:
            front_end.notebook.close()


if __name__ == "__main__":
    main(sys.argv[1:])
