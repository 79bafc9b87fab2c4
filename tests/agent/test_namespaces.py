"""Test ranks on hosts that share nothing but files: three namespaces of this machine, connected by a bridge."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
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
        self.environment = {
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
            env=self.environment,
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
        number = self.post_start(ranks, home=home, lost_after=lost_after)
        for host, count in slots.items():
            self.start_agent(host, count)
        self.wait(number)

    def post_start(self, ranks: int, *, home: int = 0, lost_after: float = 30) -> int:
        """Start a cluster, which waits for agents, and return the number of the reply."""
        return self.post(
            "from rankbook import Cluster\nfrom rankbook.launch.hosts import HostOptions\n"
            f"options = HostOptions(address={self.network.addresses['a']!r}, home={home}, lost_after={lost_after})\n"
            f"cluster = Cluster({ranks}, hosts=options, timeout=90)"
        )

    def start_agent(self, host: str, slots: int) -> None:
        """Start an agent on a host."""
        self.run_on(host, sys.executable, "-m", "rankbook.agent", *self.connect(), "--slots", str(slots))

    def connect(self) -> tuple[str, str]:
        """Return the options of an agent that name the connection file, once it exists."""
        folder = self.folder / "connect"
        wait_until(lambda: any(folder.glob("*.json")), timeout=60, what="the connection file")
        (file,) = folder.glob("*.json")
        return "--connect", str(file)

    def run_on(self, host: str, *command: str) -> None:
        """Start an agent on a host with this command."""
        self.agents[host] = subprocess.Popen(
            self.network.command(host, *command), stdin=subprocess.DEVNULL, cwd=ROOT, env=self.environment
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
    notebook.run(
        "import signal\nfrom rankbook.errors import RankLostError\n"
        "try:\n    cluster.run('import os, signal; rank == 3 and os.kill(os.getpid(), signal.SIGKILL)', timeout=60)\n"
        "except RankLostError:\n    cluster.heal()"
    )
    healed = notebook.run("result = cluster.pull('losses')")
    assert healed[:3] == local[:3] and healed[3] in local, "the new rank has the variables of another one"
    assert notebook.run("result = cluster.status()[3].host") == "host-c"
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "4.0"


@pytest.mark.full
def test_a_host_that_is_killed_is_replaced_by_the_third_one(notebook):
    notebook.start(2, {"b": 1, "c": 1}, home=1, lost_after=300)
    notebook.run("cluster.run('kept = 7')")
    notebook.run("cluster.run('import time; time.sleep(2)')")  # the ports of the agents have been tested
    lost = notebook.run("result = cluster.status()[1].host")
    host = lost.removeprefix("host-")
    notebook.agents[host].kill()  # and with it all of its processes
    error = notebook.run(
        "try:\n    cluster.run('import time\\nfor _ in range(3000): time.sleep(0.02)', timeout=60)\n"
        "except Exception as error:\n    result = f'{type(error).__name__}: {error}'"
    )
    assert error.startswith(f"RankLostError: rank 1 was lost: the agent on {lost} has ended, perhaps killed")
    notebook.run("cluster.heal()")
    assert notebook.run("result = cluster.status()[1].host") != lost
    assert notebook.run("result = cluster.pull('kept')") == [7, 7]
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"


@pytest.mark.full
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
def test_a_host_that_is_unplugged_for_longer_ends_its_ranks_when_it_returns_and_offers_its_slots_again(notebook):
    notebook.start(2, {"b": 1}, home=1, lost_after=4)
    notebook.run("cluster.run('kept = rank + 7')")
    pid = notebook.run("result = cluster.status()[1].pid")
    number = notebook.post(
        "try:\n    cluster.run('import time\\nfor _ in range(3000): time.sleep(0.02)', timeout=60)\n"
        "except Exception as error:\n    result = f'{type(error).__name__}: {error}'"
    )
    notebook.network.cut("b")
    error = notebook.wait(number)
    assert error.startswith("RankLostError: rank 1 was lost: host-b was not reachable for"), error
    notebook.network.mend("b")
    # Without another agent: this one gives its old rank up, and offers its slot again.
    notebook.run("cluster.heal(timeout=60)")
    assert notebook.run("result = cluster.status()[1].host") == "host-b"
    assert notebook.run("result = cluster.status()[1].pid") != pid
    assert notebook.run("result = cluster.pull('kept')") == [7, 7]
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"


@pytest.mark.full
def test_torchrun_on_two_nodes_starts_the_agents(notebook):
    number = notebook.post_start(2)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.2:29500")
    for host in "bc":
        torchrun = (sys.executable, "-m", "torch.distributed.run", *options, "-m", "rankbook.agent")
        notebook.run_on(host, *torchrun, *notebook.connect(), "--slots", "1")
    notebook.wait(number)
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
    notebook.run(f"cluster.run('import os; place = [os.environ[name] for name in \"{names}\".split()]')")
    assert notebook.run("result = cluster.pull('place')") == [[str(n), "0", "1", str(n), "2"] for n in range(2)]
    notebook.run("cluster.stop()")
    assert [agent.wait(60) for agent in notebook.agents.values()] == [0, 0]


@pytest.mark.full
def test_the_quickstart_runs_on_two_hosts_and_differs_only_in_its_start_line(notebook, tmp_path):
    def losses(start: str, executed: Path, *hosts: str) -> str:
        book = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
        book.cells.insert(1, nbformat.v4.new_code_cell(start))
        book.cells.append(nbformat.v4.new_code_cell("print(rankbook.current().pull('losses'))"))
        nbformat.write(book, tmp_path / "source.ipynb")
        command = ("-m", "rankbook.cli", "run", str(tmp_path / "source.ipynb"), "--output", str(executed))
        process = subprocess.Popen(
            notebook.network.command("a", sys.executable, *command),
            stdout=subprocess.PIPE,
            text=True,
            env=notebook.environment,
        )
        for host in hosts:
            notebook.start_agent(host, 2)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return nbformat.read(executed, as_version=4).cells[-1].outputs[0].text

    # Two ranks per host: then a rank has the same number of threads as with four on one host. Sums of floating-point
    # numbers depend on it.
    start = "%load_ext rankbook\n%distributed start -n 4"
    local = losses(start, tmp_path / "local.ipynb")
    remote = losses(f"{start} --launcher env --address 10.77.0.1", tmp_path / "remote.ipynb", "b", "c")
    assert remote == local
    assert [len(values) for values in ast.literal_eval(local)] == [12] * 4


@pytest.mark.full
def test_a_cut_of_five_seconds_costs_no_line_and_no_byte_of_a_large_value(notebook):
    notebook.start(5, {"b": 3, "c": 2})
    fill = "numpy.random.default_rng(7).integers(0, 256, 1 << 30, numpy.uint8)"
    notebook.run(f"cluster.run('import numpy; value = {fill}', ranks=[0])")
    number = notebook.post(
        "lines = 'import time\\nfor number in range(800): print(rank, number); time.sleep(0.02)'\n"
        "cell = cluster.submit_code(lines, number=0, ranks=[1, 2, 3, 4], sink=None)\n"
        "import sys, numpy\nprint('# pulling')\nsys.stdout.flush()\n"
        "(value,) = cluster.pull('value', ranks=[0], timeout=200)\n"
        "cluster.wait(cell, timeout=200)\n"
        f"result = [bool((value == {fill}).all()), *(cell.result[rank].stdout for rank in range(1, 5))]"
    )
    wait_until(lambda: "# pulling\n" in notebook.lines, timeout=60, what="the pull begins")
    notebook.network.cut("b")
    threading.Event().wait(5)
    notebook.network.mend("b")
    equal, *lines = notebook.wait(number, timeout=200)
    assert equal
    assert lines == ["".join(f"{rank} {n}\n" for n in range(800)) for rank in range(1, 5)]


@pytest.mark.full
def test_a_slow_network_that_loses_packets_changes_no_result(notebook):
    notebook.network.impair("b", delay=0.1, loss=0.01)
    notebook.start(2, {"b": 1, "c": 1})
    assert notebook.run("result = cluster.hosts()[0].round_trip") >= 0.1
    assert notebook.run("result = cluster.run('t = torch.ones(1); dist.all_reduce(t); t.item()').text(0)") == "2.0"
    notebook.run("cluster.push({'value': bytes(range(256)) * 4096})")
    assert notebook.run("result = [value == bytes(range(256)) * 4096 for value in cluster.pull('value')]") == [True] * 2
