"""Another user of the machine, who attacks while ranks start, work, form their group anew and are healed.

The victim and the stranger have a network of their own, so that nobody else on the machine is attacked.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


STRANGER = Path(__file__).parent.parent / "stranger.py"
RANKS = 3
ROUNDS = 3
LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
"""
VICTIM = """
import json, sys, time
import rankbook
from rankbook.errors import RankbookError

SUM = "t = torch.full((4,), rank + 1.0); dist.all_reduce(t); print(t.tolist())"
OBJECTS = (
    "told = [None] * world_size; dist.all_gather_object(told, {'rank': rank}); print(told);"
    "g = dist.new_group(list(range(world_size))); dist.all_reduce(t, group=g)"
)


def measure(seconds, name, call):
    began = time.monotonic()
    result = call()
    seconds.setdefault(name, []).append(time.monotonic() - began)
    return result


def fail(cluster, code):
    try:
        cluster.run(code)
    except RankbookError:
        return
    raise AssertionError("the cell has not failed")


def live(ranks, rounds):
    seconds, printed = {}, []
    for _ in range(rounds):
        cluster = measure(seconds, "start", lambda: rankbook.start(ranks))
        printed.append(measure(seconds, "cell", lambda: cluster.run(SUM)).stdout)
        printed.append(measure(seconds, "objects", lambda: cluster.run(OBJECTS)).stdout)
        fail(cluster, "if rank == 1: raise ValueError\\ndist.all_reduce(t)")
        printed.append(measure(seconds, "regroup", lambda: cluster.run(SUM)).stdout)
        fail(cluster, "import os; rank == 1 and os._exit(1)")
        measure(seconds, "heal", cluster.heal)
        printed.append(measure(seconds, "cell", lambda: cluster.run(SUM)).stdout)
        printed.append({status.rank: status.state for status in cluster.status()})
        cluster.stop()
    print(json.dumps({"seconds": seconds, "printed": printed}), flush=True)


rankbook.start(1).stop()  # torch is imported
print(json.dumps("ready"), flush=True)
while line := sys.stdin.readline():
    live(*map(int, line.split()))
"""


Process = subprocess.Popen[str]


def read(process: Process) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def ask(process: Process, words: str) -> Any:
    assert process.stdin is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()
    return read(process)


def can_isolate() -> bool:
    """Return True if this user may create namespaces of networks and processes."""
    if os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Provide a folder into which everybody can write, as /tmp."""
    with tempfile.TemporaryDirectory(prefix="rb-") as name:
        Path(name).chmod(0o1777)
        Path(name, "logs").mkdir()
        yield Path(name)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def start(*command: str, **environment: str) -> Process:
            process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=os.environ | environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.skipif(not can_isolate(), reason="only root can make a network, and a process of another user in it")
@pytest.mark.timeout(300)
def test_another_user_cannot_read_change_run_or_delay_anything(folder, start):
    places = {"RANKBOOK_RUNTIME_DIR": str(folder), "RANKBOOK_LOG_DIR": str(folder / "logs")}
    victim = start("unshare", "--net", sys.executable, "-c", LOOPBACK_UP + VICTIM, **places)
    assert read(victim) == "ready"
    stranger = start(
        "nsenter", f"--net=/proc/{victim.pid}/ns/net", sys.executable, str(STRANGER), str(os.getuid()), "", str(folder)
    )
    assert read(stranger) == "ready"
    quiet = ask(victim, f"{RANKS} {ROUNDS}")
    assert ask(stranger, "go") == "attacking"
    attacked = ask(victim, f"{RANKS} {ROUNDS}")
    report = ask(stranger, "stop")
    assert report["connected"] >= ROUNDS * RANKS, "or nothing was attacked"
    assert report["received"] == ""
    assert report["readable"] == []
    assert attacked["printed"] == quiet["printed"]
    total = sum(range(1, RANKS + 1))
    assert quiet["printed"][0] == {str(rank): f"{[float(total)] * 4}\n" for rank in range(RANKS)}
    # The attack takes time of the processor; what it must not do is to let anything run into a timeout (20 s and more).
    for name, seconds in quiet["seconds"].items():
        assert statistics.median(attacked["seconds"][name]) < statistics.median(seconds) + 10, name
