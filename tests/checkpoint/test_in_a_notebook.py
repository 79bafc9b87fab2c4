"""Test saves on a notebook's ranks: they survive the cell and its errors, and healed ranks take part."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import Notebook, check_nothing_left, leftovers

CELLS = """%%distributed
import os, threading
from rankbook.checkpoint import load, save, steps
from rankbook.checkpoint.storage.backends import storage_of
from tests.checkpoint import generations
from tests.checkpoint.test_async_save import Gate
folder = {folder!r}

def begin(generation, step, **options):
    global gate
    gate = Gate(storage_of(folder))
    return save(generations.state(rank, world_size, generation, 64), gate, step=step, **options)

def loaded():
    return generations.generation_of(rank, world_size, load(generations.state(rank, world_size, 0, 64), folder), 64)
print('pid', os.getpid())"""

WAIT = """%%distributed
gate.open.set()
print('saved', handle.wait(20).step, 'loaded', loaded())"""


pytestmark = pytest.mark.slow  # a kernel with three ranks


@pytest.fixture(scope="module")
def kernel():
    """Provide a kernel with three ranks, which the module's tests share."""
    before = leftovers()
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]).lstrip(os.pathsep)
    notebook = Notebook(env={"PYTHONPATH": path})
    try:
        notebook.ok("%load_ext rankbook")
        notebook.ok("%distributed start -n 3")
        yield notebook
    finally:
        notebook.close()
    check_nothing_left(notebook.mark, before)


@pytest.fixture
def three(kernel, tmp_path):
    """Provide three ranks that can save, and a folder of the test's own with generation 2 saved as step 2."""
    kernel.folder = str(tmp_path / "run")
    prepare(kernel)
    kernel.ok("%%distributed\nsave(generations.state(rank, world_size, 2, 64), folder, step=2)")
    return kernel


def prepare(notebook):
    output = notebook.ok(CELLS.format(folder=notebook.folder)).stdout
    notebook.pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d+)\] pid (\d+)", output)}
    assert len(notebook.pids) == 3


BEGIN = """%%distributed
handle = begin({generation}, {step}, async_=True)
assert gate.reached.wait(20)
print(handle)"""


def test_save_continues_after_its_cell_and_an_error_in_another_cell(three):
    assert "writing, 0%" in three.ok(BEGIN.format(generation=1, step=3)).stdout
    assert "3.0" in three.ok("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())").stdout
    failed = three.run("%%distributed\nif rank == 0:\n    raise ValueError('mine')\ndist.all_reduce(torch.ones(1))")
    assert failed.status == "error"
    assert "[0-2] saved 3 loaded 1" in three.ok(WAIT).stdout


def test_interrupt_of_a_cell_does_not_stop_the_save(three):
    three.ok(BEGIN.format(generation=3, step=3))
    message, pressed = three.send("%%distributed\nimport time\nprint('go')\ntime.sleep(60)"), []

    def press(so_far):
        if "go" in so_far.stdout and not pressed:
            pressed.append(three.interrupt())

    outcome = three.finish(message, seen=press)
    assert outcome.status == "error"
    assert "[0-2] saved 3 loaded 3" in three.ok(WAIT).stdout


@pytest.mark.parametrize("victim", [1, 0])
def test_rank_that_dies_during_a_save_is_healed_and_saves_again(three, victim):
    three.ok(BEGIN.format(generation=7, step=5))
    os.kill(three.pids[victim], signal.SIGKILL)
    survivors = ",".join(str(rank) for rank in range(3) if rank != victim)
    failed = three.run(f"%%distributed --ranks {survivors}\ngate.open.set()\nhandle.wait(20)", timeout=30)
    assert failed.status == "error"
    assert f"rank {victim} was killed by SIGKILL" in failed.traceback + failed.text
    three.ok("%distributed heal", timeout=40)
    three.ok(f"%%distributed --ranks {victim}\nprint('here')")
    prepare(three)
    assert "[0-2] loaded 2" in three.ok("%%distributed\nprint('loaded', loaded())").stdout
    three.ok(BEGIN.format(generation=3, step=5))
    assert "[0-2] saved 5 loaded 3" in three.ok(WAIT).stdout


IN_THE_CELL = """%%distributed
print('go', flush=True)
if rank != 2:
    threading.Timer(0.5, lambda: gate.open.set()).start()
begin(7, 6)"""


def test_death_of_a_rank_during_a_synchronous_save_fails_the_cell(three):
    message = three.send(IN_THE_CELL)
    done = []

    def kill(so_far):
        if "go" in so_far.stdout and not done:
            done.append(os.kill(three.pids[2], signal.SIGKILL))

    failed = three.finish(message, timeout=30, seen=kill)
    assert failed.status == "error"
    assert "rank 2 was killed by SIGKILL" in failed.traceback + failed.text
    three.ok("%distributed heal", timeout=40)
    prepare(three)
    assert "[0-2] loaded 2" in three.ok("%%distributed\nprint('loaded', loaded())").stdout
    three.ok("%%distributed\nsave(generations.state(rank, world_size, 3, 64), folder, step=6)")
    assert "[0-2] loaded 3 [2, 6]" in three.ok("%%distributed\nprint('loaded', loaded(), steps(folder))").stdout
    assert not [path for path in Path(three.folder).iterdir() if "partial" in path.name]
