"""Processes that cells start in a session of their own end with their rank, unless they were asked to stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

import rankbook
from rankbook import Cluster
from rankbook.launch import local
from tests.conftest import wait_until

pytestmark = pytest.mark.processes


START = """
import os, signal, subprocess, sys
command = [sys.executable, "-c", "import threading; threading.Event().wait(120)"]
def start(**options):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **silent, **options)
def fork_twice():
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        second = os.fork()
        if second:
            os.write(write, str(second).encode())
            os._exit(0)
        signal.pause()
    os.wait()
    return int(os.read(read, 20))
pids = {
    "in a session of its own": start().pid,
    "orphaned": int(subprocess.check_output(
        "setsid sh -c 'sleep 120 >/dev/null 2>&1 & echo $!'", shell=True)),
    "forked twice without exec": fork_twice(),
}
kept = start(env={**os.environ, "RANKBOOK_DETACHED": "1"}).pid
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with rankbook.start(2) as cluster:
        cluster.run(START)
        yield cluster
    local.shutdown_prestarted()


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: dict[str, int]) -> None:
    wait_until(
        lambda: not any(map(lives, pids.values())),
        timeout=10,
        what=f"gone: {[name for name, pid in pids.items() if lives(pid)]}",
    )


def test_subprocesses_end_with_their_own_rank_only(cluster):
    pids, subprocess_pids = cluster.pull("pids"), cluster.pull("kept")
    assert all(lives(pid) for rank in (0, 1) for pid in pids[rank].values())
    cluster.restart([1])
    wait_gone(pids[1])
    assert all(map(lives, pids[0].values()))
    os.kill(cluster.status()[0].pid or 0, signal.SIGKILL)
    wait_gone(pids[0])
    assert all(map(lives, subprocess_pids))
    end(subprocess_pids)


def test_subprocesses_end_when_the_cluster_stops(cluster):
    pids, subprocess_pids = cluster.pull("pids"), cluster.pull("kept")
    cluster.stop()
    for pid in pids:
        wait_gone(pid)
    assert all(map(lives, subprocess_pids))
    end(subprocess_pids)


SCRIPT = f"""
import rankbook, sys, threading
cluster = rankbook.start(2)
cluster.run({START!r})
print(*[pid for pids in cluster.pull("pids") for pid in pids.values()], flush=True)
print(*cluster.pull("kept"), flush=True)
threading.Event().wait()
"""


def test_subprocesses_end_when_the_notebook_process_is_killed():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout is not None
        pids = {pid: int(pid) for pid in notebook.stdout.readline().split()}
        subprocess_pids = [int(pid) for pid in notebook.stdout.readline().split()]
        assert len(pids) == 6
        assert all(map(lives, [*pids.values(), *subprocess_pids]))
        notebook.kill()
    wait_gone(pids)
    assert all(map(lives, subprocess_pids))
    end(subprocess_pids)
