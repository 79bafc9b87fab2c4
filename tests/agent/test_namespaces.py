"""Test ranks on hosts that share nothing but files: three namespaces of this machine, connected by a bridge."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.namespaces import Network, three_hosts
from tests.conftest import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
TRAINING = """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for step in range(20):
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    optimizer.zero_grad()
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


class RemoteNotebook:
    """A notebook's process on host `a`, and the agents on the others."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.lines: list[str] = []
        self.replies: list[dict[str, str]] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        # Every host has a /dev/shm of its own.
        self._environment = {
            **os.environ,
            "RANKBOOK_CONNECT_DIR": str(folder / "connect"),
            "RANKBOOK_RUNTIME_DIR": "/dev/shm",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
        }
        self._process = subprocess.Popen(
            network.command("a", sys.executable, "-u", "-m", "tests.agent.remote_notebook"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.replies.append(json.loads(line))
            else:
                self.lines.append(line)

    def post(self, code: str) -> int:
        """Send code, and return the number of its reply."""
        assert self._process.stdin is not None
        number = len(self.replies)
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        return number

    def wait(self, number: int, *, timeout: float = 90) -> Any:
        """Wait for a reply, and return its value. An error of the code fails the test."""
        wait_until(lambda: len(self.replies) > number, timeout=timeout, what="the notebook's reply")
        reply = self.replies[number]
        assert "error" not in reply, reply["traceback"]
        return ast.literal_eval(reply["result"])

    def run(self, code: str, *, timeout: float = 90) -> Any:
        """Run code in the notebook's process and return the value that it assigns to `result`."""
        return self.wait(self.post(code), timeout=timeout)

    def start(self, ranks: int, slots: dict[str, int], *, home: int = 0, lost_after: float = 30) -> None:
        """Start a cluster with agents on the hosts of `slots`."""
        number = self.post(
            "from rankbook import Cluster\nfrom rankbook.launch.hosts import HostOptions\n"
            f"options = HostOptions(address={self.network.addresses['a']!r}, home={home}, lost_after={lost_after})\n"
            f"cluster = Cluster({ranks}, hosts=options, timeout=90)"
        )
        wait_until(lambda: any("--connect" in line for line in self.lines), timeout=60, what="the agents' command")
        for host, count in slots.items():
            self.start_agent(host, count)
        self.wait(number)

    def start_agent(self, host: str, slots: int) -> None:
        """Start an agent on a host."""
        file = re.search(r"--connect (\S+\.json)", "".join(self.lines))
        assert file is not None
        command = (sys.executable, "-m", "rankbook.agent", "--connect", file[1], "--slots", str(slots))
        self.agents[host] = subprocess.Popen(
            self.network.command(host, *command), stdin=subprocess.DEVNULL, cwd=ROOT, env=self._environment
        )

    def close(self) -> None:
        """Stop the cluster, and end all processes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps("'cluster' in globals() and cluster.stop()") + "\n")
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for agent in self.agents.values():
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        self._reader.join()
        self._process.stdout.close()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[RemoteNotebook]:
    with three_hosts() as network:
        made = RemoteNotebook(network, tmp_path)
        try:
            yield made
        finally:
            made.close()


def test_a_training_on_two_hosts_has_the_losses_of_one_host(notebook):
    notebook.run("from rankbook import Cluster\ncluster = Cluster(4)")
    notebook.run(f"cluster.run({TRAINING!r}, timeout=80)")
    local = notebook.run("result = cluster.pull('losses')")
    notebook.run("cluster.stop()")
    notebook.start(4, {"b": 2, "c": 2})
    notebook.run(f"cluster.run({TRAINING!r}, timeout=80)")
    assert notebook.run("result = cluster.pull('losses')") == local
    names = notebook.run("cluster.run('import socket; name = socket.gethostname()')\nresult = cluster.pull('name')")
    assert names == ["host-b", "host-b", "host-c", "host-c"]
    notebook.run("cluster.run('import os; interface = os.environ[\"GLOO_SOCKET_IFNAME\"]')")
    assert notebook.run("result = cluster.pull('interface')") == ["eth7"] * 4


def test_a_host_that_is_killed_is_replaced_by_the_third_one(notebook):
    notebook.start(2, {"b": 1, "c": 1}, home=1, lost_after=2)
    notebook.run("cluster.run('kept = 7')")
    lost = notebook.run("result = cluster.status()[1].host")
    host = lost.removeprefix("host-")
    notebook.agents[host].kill()  # and with it all of its processes
    error = notebook.run(
        "try:\n    cluster.run('import time\\nfor _ in range(3000): time.sleep(0.02)', timeout=60)\n"
        "except Exception as error:\n    result = f'{type(error).__name__}: {error}'"
    )
    assert error.startswith("RankLostError: rank 1 was lost: host-") and "was not reachable for" in error
    notebook.run("cluster.heal()")
    assert notebook.run("result = cluster.status()[1].host") != lost
    assert notebook.run("result = cluster.pull('kept')") == [7, 7]
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"


def test_a_host_that_is_unplugged_for_five_seconds_goes_on_and_no_output_is_missing(notebook):
    notebook.start(2, {"b": 1}, home=1)
    number = notebook.post(
        "done = cluster.run('import time\\nfor number in range(500): print(rank, number); time.sleep(0.02)')\n"
        "result = [done[rank].stdout for rank in range(2)]"
    )
    notebook.network.cut("b")
    threading.Event().wait(5)
    notebook.network.mend("b")
    assert notebook.wait(number) == ["".join(f"{rank} {n}\n" for n in range(500)) for rank in range(2)]
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"


@pytest.mark.full
def test_a_slow_network_that_loses_packets_changes_no_result(notebook):
    notebook.start(2, {"b": 1, "c": 1})
    try:
        notebook.network.impair("b", delay="100ms", loss="1%")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine has no netem: {error.stderr}")
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"
    notebook.run("cluster.push({'value': bytes(range(256)) * 4096})")
    assert notebook.run("result = [value == bytes(range(256)) * 4096 for value in cluster.pull('value')]") == [True] * 2
