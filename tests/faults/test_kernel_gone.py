"""Test that no process of the ranks is left after the kernel has ended in any way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import (
    Notebook,
    Outcome,
    check_nothing_left,
    cluster_folders,
    leftovers,
    marked_processes,
    wait_until,
)
from tests.rank.test_forkserver import alive

pytestmark = pytest.mark.slow

GONE_WITHIN = 10.0  # seconds after the kernel's end; what would be left stays for minutes

# Everything a rank may have around it: a subprocess that ignores every polite request, DataLoader workers, a thread
# that writes, a process that left the rank's process group, and a value in shared memory.
BUSY = """%%distributed --background
import subprocess, threading, time
import torch.utils.data

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)

loader = iter(torch.utils.data.DataLoader(Endless(), num_workers=1, persistent_workers=True))
next(loader)
stubborn = subprocess.Popen(["sh", "-c", "trap '' INT TERM HUP; while true; do sleep 600; done"])
elsewhere = subprocess.Popen(["sleep", "600"], process_group=0)
threading.Thread(target=lambda: [print("ticking", flush=True) or time.sleep(0.05) for _ in range(10_000)]).start()
print("busy", flush=True)
if rank == 0:
    !sleep 600
time.sleep(600)"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """Provide a kernel with the extension loaded. The test ends it; nothing of it may be left then."""
    before = leftovers()
    notebook = Notebook()
    ended = False
    try:
        notebook.ok("%load_ext rankbook")
        yield notebook
        wait_until(lambda: not notebook.manager.is_alive(), timeout=10, what="the kernel's end")
        ended = True
        check_nothing_left(notebook.mark, before, timeout=GONE_WITHIN)
    finally:
        if not ended:
            notebook.close()
        notebook.client.stop_channels()
        notebook.manager.cleanup_resources()
        for pid in marked_processes(notebook.mark):  # a test that failed leaves nothing to the next one
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def make_busy(notebook: Notebook) -> set[int]:
    """Start two ranks with all helper processes; return the process ids, without the kernel's."""
    notebook.ok("%distributed start -n 2")
    notebook.ok("import numpy; big = numpy.ones(1 << 22)\n%distributed push big")
    notebook.ok(BUSY)
    wait_until(lambda: count(notebook, "sleep 600") >= 5, timeout=20, what="five sleeps")
    wait_until(lambda: len(notebook.processes()) >= 13, timeout=20, what="two ranks with their workers and commands")
    return set(notebook.processes()) - {notebook.pid}


def count(notebook: Notebook, words: str) -> int:
    return sum(words in command for command in notebook.processes().values())


def have_exited(pids: set[int]) -> Callable[[], bool]:
    return lambda: not any(map(alive, pids))


def test_a_kernel_that_is_killed_while_its_ranks_are_busy_leaves_nothing(notebook):
    make_busy(notebook)
    os.kill(notebook.pid, signal.SIGKILL)


@pytest.mark.full
def test_a_kernel_that_is_shut_down_while_its_ranks_are_busy_leaves_nothing(notebook):
    make_busy(notebook)
    notebook.manager.shutdown_kernel(now=False)


@pytest.mark.full
def test_a_kernel_that_is_shut_down_at_once_leaves_nothing(notebook):
    notebook.ok("%distributed start -n 2")
    notebook.send("%%distributed\nimport time\ntime.sleep(600)")
    notebook.manager.shutdown_kernel(now=True)


def test_a_kernel_that_is_asked_to_terminate_while_it_waits_for_a_cell_leaves_nothing(notebook):
    notebook.ok("%distributed start -n 2")
    message = notebook.send("%%distributed\nimport time\nprint('begun')\ntime.sleep(600)")
    with contextlib.suppress(StopIteration):
        notebook.finish(message, seen=lambda outcome: stop_at("begun", outcome))
    os.kill(notebook.pid, signal.SIGTERM)


def stop_at(words: str, outcome: Outcome) -> None:
    if words in outcome.text:
        raise StopIteration


@pytest.mark.parametrize("now", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_kernel_that_is_restarted_starts_clean(notebook, now):
    notebook.ok("%distributed start -n 2")
    notebook.ok("%%distributed --background\nimport time\nx = 1\ntime.sleep(600)")
    old = set(notebook.processes())
    notebook.manager.restart_kernel(now=now)
    notebook.client.wait_for_ready(timeout=60)
    wait_until(have_exited(old), timeout=GONE_WITHIN, what="the end of the old kernel's processes")
    notebook.ok("%load_ext rankbook")
    assert "no ranks are running" in notebook.ok("%distributed status").stdout
    notebook.ok("%distributed start -n 2")
    assert "[0-1] False" in notebook.ok("%%distributed\nprint('x' in globals())").stdout
    notebook.close()


@pytest.mark.full
def test_a_cell_that_quits_the_kernel_leaves_nothing(notebook):
    notebook.ok("%distributed start -n 2")
    notebook.send("%%distributed --background\nimport time\ntime.sleep(600)")
    notebook.send("quit()")
    wait_until(lambda: not notebook.manager.is_alive(), timeout=10, what="the kernel's end")


@pytest.mark.full
def test_a_kernel_that_is_killed_while_ranks_start_leaves_nothing(notebook):
    earlier_pids = set(notebook.processes())
    notebook.send("%distributed start -n 8")
    wait_until(lambda: len(set(notebook.processes()) - earlier_pids) >= 3, timeout=20, what="the first ranks")
    os.kill(notebook.pid, signal.SIGKILL)


def test_a_kernel_that_is_killed_while_torch_is_imported_leaves_nothing(notebook, tmp_path):
    import_started = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(f"open({str(import_started)!r}, 'w').close()\nimport time\ntime.sleep(600)")
    notebook.ok("%unload_ext rankbook")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    notebook.ok(f"%env PYTHONPATH={path}\n%load_ext rankbook")
    wait_until(import_started.exists, timeout=20, what="the import of torch")
    notebook.send("%distributed start -n 2")
    wait_until(lambda: len(sockets(notebook.pid)) == 1, timeout=20, what="the cluster's first socket")
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until(lambda: not sockets(notebook.pid), timeout=GONE_WITHIN, what="the end of the socket")


def sockets(pid: int) -> list[Path]:
    paths: list[Path] = []
    for folder in cluster_folders(pid):
        with contextlib.suppress(FileNotFoundError):  # a folder that goes while one looks has nothing in it any more
            paths += [file for file in folder.iterdir() if file.is_socket()]
    return paths


@pytest.mark.full
def test_a_child_that_the_kernel_forked_does_not_keep_its_ranks_alive(notebook):
    notebook.ok("%distributed start -n 2")
    ours = set(notebook.processes()) - {notebook.pid}
    code = "import os, time\nchild = os.fork()\nif child == 0:\n    time.sleep(600)\n    os._exit(0)\nprint(child)"
    child = int(notebook.ok(code).stdout)
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until(have_exited(ours), timeout=GONE_WITHIN, what="the end of the ranks")
    os.kill(child, signal.SIGKILL)
