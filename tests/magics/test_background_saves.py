"""Test checkpoints that are written in the background after their cell has ended."""

from __future__ import annotations

import pytest

from rankbook.checkpoint import steps, verify
from tests.conftest import running_kernel

pytestmark = pytest.mark.slow

SAVE = """%%distributed
import threading
from rankbook.checkpoint import save
from rankbook.checkpoint.storage.backends import LocalStorage

# Once: a rank may run this cell again.
plainly = LocalStorage.plainly = getattr(LocalStorage, "plainly", LocalStorage.write)
gate = threading.Event()

def slowly(storage, path, parts):
    # Long at one of the files only, of which a save writes seven.
    gate.wait({seconds} if str(path).endswith("manifest.json") else min({seconds}, 0.3))
    return plainly(storage, path, parts)

LocalStorage.write = slowly
handle = save({{"weights": torch.arange(4.0)}}, {folder!r}, step={step}, async_=True)
print("done" if handle.done else "under way")
"""


@pytest.fixture
def ranks(module_notebook):
    module_notebook.run("%distributed start -n 2")
    yield module_notebook
    module_notebook.ok("%distributed stop")


def test_background_save_is_finished_before_the_ranks_end(ranks, tmp_path):
    assert ranks.ok(SAVE.format(folder=str(tmp_path), seconds=2, step=1)).stdout == "[0-1] under way\n"
    ended = ranks.ok("%distributed stop")
    assert (ended.stderr, steps(tmp_path)) == ("", [1]), (ended.stderr, ended.text, ended.seconds)
    assert verify(tmp_path).ok
    assert ended.seconds < 20
    ranks.ok("%distributed start -n 2")
    ranks.ok(SAVE.format(folder=str(tmp_path), seconds=2, step=2))
    again = ranks.ok("%distributed restart")
    assert steps(tmp_path) == [1, 2], (again.text, again.stderr, again.seconds, sorted(map(str, tmp_path.rglob("*"))))


def test_save_that_takes_too_long_is_reported_as_lost(ranks, tmp_path):
    ranks.ok(SAVE.format(folder=str(tmp_path), seconds=0, step=1))
    ranks.ok("%%distributed\nhandle.wait()")
    message = ranks.send(SAVE.format(folder=str(tmp_path), seconds=60, step=2))
    outcome = ranks.finish(message)
    ended = ranks.ok("import rankbook\nrankbook.current()._processes.stop(patience=0.7)")
    assert ended.seconds < 20
    ranks.follow(message, outcome, lambda o: "is lost" in o.stderr)
    assert "did not finish within 0.7 s of the shutdown and is lost" in outcome.stderr
    assert steps(tmp_path) == [1]


def test_a_failure_that_nobody_was_reported_is_reported_by_the_handle_the_next_save_and_the_end(ranks, tmp_path):
    fails = (
        "%%distributed\nfrom rankbook.checkpoint import async_save, save\n"
        "from rankbook.checkpoint.storage.backends import LocalStorage\n"
        "def full(*_):\n    raise OSError('the disk is full')\n"
        f"LocalStorage.write = full\nhandle = save({{'x': torch.ones(2)}}, {str(tmp_path)!r}, async_=True)\n"
    )
    ranks.ok(fails)
    reported = ranks.ok(
        "%%distributed\nasync_save.wait_for_saves(20)\nprint('the disk is full' in str(handle.error), handle.done)"
    )
    # One line of both ranks or, where one of them was late, a line per rank.
    assert set(reported.stdout.splitlines()) in ({"[0-1] True True"}, {"[0] True True", "[1] True True"})
    again = ranks.run(f"%%distributed\nsave({{'x': torch.ones(2)}}, {str(tmp_path)!r})")
    assert again.ename == "CheckpointError"
    assert "the previous asynchronous save failed" in again.evalue
    ranks.ok(fails)
    message = ranks.send("%%distributed\nassert async_save.wait_for_saves(20)")
    outcome = ranks.finish(message)
    ranks.send("%distributed stop")
    ranks.follow(message, outcome, lambda o: "the disk is full" in o.stderr)
    assert steps(tmp_path) == []


@pytest.mark.full
def test_background_save_is_finished_when_the_kernel_ends(tmp_path):
    with running_kernel(ranks=2) as notebook:
        notebook.manager.shutdown_wait_time = 30.0  # half of it until the kernel is ended by a signal
        notebook.ok(
            "import dataclasses, rankbook\nprocesses = rankbook.current()._processes\n"
            "processes.grace = dataclasses.replace(processes.grace, last_save=10.0)  # for a slow machine"
        )
        notebook.ok(SAVE.format(folder=str(tmp_path), seconds=0.1, step=1))
    assert steps(tmp_path) == [1]
