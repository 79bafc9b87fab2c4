"""gloo between ranks, while another user of the machine connects to the same ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankbook.rank.process_groups import gloo
from rankbook.rank.process_groups.store import RendezvousStore
from rankbook.transport.store_keys import KeyFolder
from tests.conftest import wait_until
from tests.rank_processes import run_code
from tests.stranger import OPERATIONS, PAIRS

STRANGER = Path(__file__).parents[2] / "stranger.py"
RANK = """
import json, os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from rankbook.rank.process_groups import gloo
from rankbook.rank.process_groups.gloo import tcp_sockets, duplicate
from rankbook.rank.process_groups.store import open_store

gloo.install_terminate_handler(lambda thread: True)  # as every rank
folder, rank, size, awaited = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = open_store(folder / "store", "", threading.Event())
make = gloo._Listeners.__init__
made = []

def make_and_tell(self):
    make(self)
    made.append(self)
    if len(made) <= awaited:  # the stranger comes first
        print(json.dumps(sorted(port for _, port in self._addresses)), flush=True)
        sys.stdin.readline()

gloo._Listeners.__init__ = make_and_tell

def wait(store, keys):
    while not store.check(keys):
        time.sleep(0.001)

store.set(f"here-{rank}", "")
wait(store, [f"here-{other}" for other in range(size)])
began = time.monotonic()
backend = gloo.make_gloo(store, rank, size, timedelta(seconds=30), wait, threading.Event())
seconds = time.monotonic() - began
tensor = torch.full((3,), rank + 1.0)
backend.allreduce([tensor]).wait()
gathered = [[torch.zeros(1) for _ in range(size)]]
backend.allgather(gathered, [torch.tensor([float(rank)])]).wait()
print(json.dumps({"sum": tensor.tolist(), "gathered": [t.item() for t in gathered[0]], "listeners": len(made),
                  "seconds": seconds}), flush=True)
sys.stdin.readline()
os._exit(0)
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
Process = subprocess.Popen[str]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, *command: str) -> Process:
    process = subprocess.Popen([sys.executable, *command], stdin=-1, stdout=-1, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def ranks(stack: ExitStack, folder: Path, size: int, *, awaited: int) -> list[Process]:
    """Run ranks that stop after they have created their first `awaited` listeners."""
    return [start(stack, "-c", RANK, str(folder), str(rank), str(size), str(awaited)) for rank in range(size)]


def stranger(stack: ExitStack, folder: Path, ports: list[int] | None = None) -> Process:
    words = ",".join(str(port) for port in ports or [])
    process = start(stack, str(STRANGER), str(os.getuid()), words, str(folder))
    assert json.loads(read(process)) == "ready"
    return process


def read(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: Process, words: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()


def results(group: list[Process]) -> list[dict[str, object]]:
    answers = [json.loads(read(process)) for process in group]
    for process in group:
        say(process)
    return answers


def test_a_backend_that_is_connected_after_its_attempt_was_given_up_is_destroyed_on_a_thread_of_its_own(monkeypatch):
    connected = threading.Event()
    destroyed_by: list[str] = []

    class Backend:
        def __del__(self):
            destroyed_by.append(threading.current_thread().name)

    def connect(*_arguments):
        connected.wait()
        return Backend()

    monkeypatch.setattr(gloo, "_connect", connect)
    attempt = gloo._Attempt(None)
    attempt.destroy({})
    connected.set()
    attempt.ended.wait()
    del attempt
    wait_until(lambda: destroyed_by, timeout=20, what="the backend is destroyed")
    assert destroyed_by == ["rankbook-end"]


def test_a_rank_that_connects_slowly_looks_seldom_whether_another_one_has_failed(monkeypatch, tmp_path):
    looks: list[object] = []

    class CountingStore(RendezvousStore):
        def check(self, keys):
            looks.append(keys)
            return super().check(keys)

    def connect(*_arguments):
        threading.Event().wait(2)
        return SimpleNamespace(_set_default_timeout=lambda _: None)

    monkeypatch.setattr(gloo, "_connect", connect)
    store = CountingStore(KeyFolder(tmp_path / "store"), threading.Event())
    began = time.monotonic()
    gloo.make_gloo(store, 0, 1, timedelta(seconds=30), lambda *_: None, threading.Event())
    assert 1 < len(looks) <= 2 + (time.monotonic() - began) / gloo._FAILED_INTERVAL


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_connect_without_interference(stack, tmp_path, size):
    for answer in results(ranks(stack, tmp_path, size, awaited=0)):
        assert answer["sum"] == [size * (size + 1) / 2] * 3
        assert answer["gathered"] == list(range(size))
        assert answer["listeners"] == 1


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_connection_of_another_process_is_refused_and_the_group_forms(stack, tmp_path, size):
    group = ranks(stack, tmp_path, size, awaited=1)
    ports = [port for process in group for port in json.loads(read(process))]
    other = stranger(stack, tmp_path, ports)
    say(other, "go")
    assert json.loads(read(other)) == "attacking"
    for port in ports:
        wait_until(
            lambda port=port: count_identified_connections(port) >= PAIRS,
            timeout=30,
            what="connections of the stranger",
        )
    for process in group:
        say(process)
    answers = results(group)
    say(other, "stop")
    report = json.loads(read(other))
    assert report["connected"] >= 4 * size
    assert report["received"] == ""
    for answer in answers:
        assert answer["sum"] == [size * (size + 1) / 2] * 3
        assert answer["gathered"] == list(range(size))
        assert answer["listeners"] == 2


def count_identified_connections(port: int) -> int:
    """Count the connections to the port that have sent a pair of ranks which the listening rank has read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    unread = [int(row[4].split(":")[1], 16) for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]
    return sum(0 < count <= len(OPERATIONS) for count in unread)


TERMINATED = """
import ctypes, sys, threading
from rankbook.rank.process_groups import gloo

parked = threading.Event()

def rescue(name):
    print(f"a thread named {name!r}", flush=True)
    parked.set()
    return True

gloo.install_terminate_handler(rescue)
libc, terminate = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]
kind, name = sys.argv[1:]
if kind == "Python":
    terminate()

def create():
    # A thread inherits the name of the one that creates it; that of the main thread stays.
    if name:
        libc.prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, terminate, None)

threading.Thread(target=create).start()
parked.wait(20)
print("the process lives on")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are told by their names on Linux only")
@pytest.mark.parametrize(
    ("kind", "name", "rescued"),
    [
        ("C++", "", "''"),
        ("C++", "gloo_tcp_loop", "'gloo_tcp_loop'"),
        ("C++", "pt_autograd_0", None),
        ("Python", "", None),
    ],
)
def test_failed_thread_of_a_backend_does_not_end_the_process(kind, name, rescued):
    done = run_code(TERMINATED, kind, name)
    if rescued is None:
        assert (done.returncode, done.stdout) == (-signal.SIGABRT, ""), done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, f"a thread named {rescued}\nthe process lives on\n"), done.stderr
