"""A notebook's process on the hosts of an engine, and what it goes through: `python -m tests.engines.session`.

It trains the quickstart, loses a rank and an agent, heals, and stops. Every step is a line of JSON. The arguments are
the launcher (`local` for none), the address of this host, and the launcher's own arguments. With `--wait` first, it
starts the ranks, tells the ids of all their processes, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from rankbook import Cluster, RankLostError, StartError
from rankbook.launch.hosts import HostOptions

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
RANKS = 4


def tell(step: str, value: object) -> None:
    """Write a line for the test."""
    sys.stdout.write(json.dumps({step: value}) + "\n")
    sys.stdout.flush()


def train(cluster: Cluster) -> None:
    """Run the cells of the quickstart that train and test the model."""
    digits = load_digits()
    names = ("train_images", "test_images", "train_labels", "test_labels")
    parts = train_test_split(digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    cluster.push(dict(zip(names, parts, strict=True)))
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    for cell in cells:
        head, _, code = cell.partition("\n")
        if head == "%%distributed" and any(word in code for word in ("as_tensors", "Distributed", "epoch")):
            cluster.run(code, timeout=300)
    tell("losses", cluster.pull("losses")[0])
    tell("accuracy", cluster.pull("accuracy")[0])


def wait_for(condition: Any, seconds: float) -> float:
    """Return after how many seconds the condition was true."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return -1.0
        time.sleep(0.02)
    return round(time.monotonic() - began, 2)


def agent_pids(cluster: Cluster) -> dict[str, int]:
    """Return the process of every agent, by the id of its host."""
    hosts = cluster._processes.hosts
    assert hosts is not None
    return {host.id: int(host.description.pid) for host in hosts._hosts.values() if not host.lost}


def processes_of(pids: list[int]) -> list[int]:
    """Return the agents, the engine's programs, and what both have started; not this host's forkserver."""
    programs = [child for child in psutil.Process().children() if any("supervisor" in word for word in child.cmdline())]
    roots = [*map(psutil.Process, pids), *programs]
    return sorted({process.pid for root in roots for process in (root, *root.children(recursive=True))})


def lose_rank(cluster: Cluster) -> None:
    """Kill a rank on the second host, and heal it."""
    pid = cluster.status()[3].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: cluster.status()[3].state == "dead", 30)
    tell("healed", str(cluster.heal()))


def lose_agent(cluster: Cluster) -> None:
    """Kill the agent of the last rank's host, and heal if the engine can."""
    cluster.run("kept = rank")
    hosts = cluster._processes.hosts
    assert hosts is not None
    agent = agent_pids(cluster)[hosts.seats[3].host]
    cell = cluster.submit_code("import time\nfor _ in range(10_000): time.sleep(0.01)", number=1, ranks=None, sink=None)
    wait_for(lambda: cell.started is not None, 30)
    os.kill(agent, signal.SIGKILL)
    tell("reported", wait_for(lambda: cell.result is not None, 60))
    try:
        cluster.wait(cell)
    except RankLostError:
        pass
    wait_for(lambda: cluster.status()[0].state == "idle", 30)
    result = cell.result
    tell("loss", str(cluster.status()[3].loss))
    tell("failed", result is not None and not result.ok)
    tell("kept", cluster.pull("kept", ranks=[0, 1]))
    began = time.monotonic()
    try:
        cluster.heal()
        tell("replaced", round(time.monotonic() - began, 2))
        tell("sum", cluster.run("t = torch.ones(1); dist.all_reduce(t); t.item()").text(0))
    except StartError as error:
        tell("not replaced", str(error))


def main(arguments: list[str]) -> None:
    """Run all steps of the session."""
    wait = arguments[0] == "--wait"
    launcher, address, *own = arguments[wait:]
    began = time.monotonic()
    options = None
    if launcher != "local":
        nodes = None if "--hosts" in own or "--hostfile" in own else 2
        options = HostOptions(launcher, address, nodes=nodes, arguments=tuple(own))
    with Cluster(RANKS, hosts=options, timeout=150) as cluster:
        cluster.run("pass")
        tell("start", round(time.monotonic() - began, 2))
        if wait:
            tell("processes", processes_of([*agent_pids(cluster).values()]))
            time.sleep(600)
        train(cluster)
        if options is None:
            return
        tell("hosts", [(host.name, host.ranks) for host in cluster.hosts()])
        lose_rank(cluster)
        lose_agent(cluster)
        file = cluster._processes._connection_file
        processes = processes_of([*agent_pids(cluster).values()])
        began = time.monotonic()
        cluster.stop()
        seconds = wait_for(lambda: not any(map(_runs, processes)), 30)
        tell("stopped", round(time.monotonic() - began, 2) if seconds >= 0 else -1.0)
        tell("file", file is not None and file.exists())


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
