"""Saves in the background beside cells that fail: they go on through aborts and regroups, and one that is lost is told.

A real kernel with two ranks, which each test leaves to the next.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from rankbook.checkpoint import steps, verify
from tests.conftest import Notebook, check_nothing_left, leftovers, wait_until

pytestmark = pytest.mark.slow


PREPARE = """%%distributed
import os
from rankbook.checkpoint import ShardedTensor, save
from rankbook.checkpoint.storage.backends import storage_of
from tests.checkpoint.test_async_save import Gate
folder = {folder!r}

def begin(step, gate=None):
    rows = torch.full((300, 300), float(step))
    held = {{"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size)), "step": step}}
    return save(held, gate or folder, step=step, async_=True)
print('pid', os.getpid())"""

OUTCOME = """%%distributed
try:
    print('saved', handle.wait(30).step)
except Exception as error:
    print('told', type(error).__name__, error)"""

RAISED = "%%distributed\nhandle = begin({step})\nif rank == {culprit}:\n    raise ValueError('mine')\nx = 1"
RAISED_WITH_COLLECTIVE = (
    "%%distributed\nhandle = begin({step})\nif rank == {culprit}:\n    raise ValueError('mine')\n"
    "dist.all_reduce(torch.ones(1))"
)
IN_NEXT = "%%distributed\nif rank == {culprit}:\n    raise ValueError('mine')\ndist.all_reduce(torch.ones(1))"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Provide a kernel with two ranks that can save."""
    before = leftovers()
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]).lstrip(os.pathsep)
    notebook = Notebook(env={"PYTHONPATH": path})
    try:
        notebook.ok("%load_ext rankbook")
        notebook.ok("%distributed start -n 2")
        notebook.folder = tmp_path_factory.mktemp("notebook") / "run"
        prepare(notebook)
        yield notebook
    finally:
        notebook.close()
    check_nothing_left(notebook.mark, before)


def prepare(notebook):
    output = notebook.ok(PREPARE.format(folder=str(notebook.folder))).stdout
    notebook.pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d+)\] pid (\d+)", output)}
    assert len(notebook.pids) == 2


def check_saves(notebook, numbers):
    """Save each step in the background, every second time with an error in a cell; all are whole."""
    for step in numbers:
        culprit = step // 2 % 2
        if step % 2:
            cell = (RAISED, RAISED_WITH_COLLECTIVE, None)[step // 4 % 3]
            if cell is None:
                notebook.ok(f"%%distributed\nhandle = begin({step})")
                cell = IN_NEXT
            failed = notebook.run(cell.format(step=step, culprit=culprit))
            assert failed.status == "error"
            assert "mine" in failed.traceback + failed.text
        else:
            notebook.ok(f"%%distributed\nhandle = begin({step})")
        assert f"saved {step}" in notebook.ok(OUTCOME).stdout, step
        assert step in steps(notebook.folder)
        assert verify(notebook.folder, step).ok


def test_save_continues_during_errors_in_cells(two):
    check_saves(two, range(12))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_100_saves_with_an_error_in_every_second_cell(two):
    check_saves(two, range(100, 200))


def test_save_continues_through_abort_and_regroup(two):
    two.ok("%%distributed\ngate = Gate(storage_of(folder))\nhandle = begin(50, gate)\nassert gate.reached.wait(20)")
    for culprit in (0, 1):
        assert two.run(IN_NEXT.format(culprit=culprit)).status == "error"
        assert "2.0" in two.ok("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())").stdout
    two.ok("%%distributed\ngate.open.set()")
    assert "[0-1] saved 50" in two.ok(OUTCOME).stdout
    assert verify(two.folder, 50).ok


LOSE = """%%distributed
class Broken(Gate):
    def write(self, path, parts):
        if rank == 1 and path.endswith('.distcp'):
            self.reached.set()
            self.open.wait(20)
            raise OSError(5, 'Input/output error', path)
        return self.inner.write(path, parts)
gate = Broken(storage_of(folder))
handle = begin(60, gate)"""


def test_lost_save_is_reported_in_the_next_output_and_in_the_view(two):
    two.ok(LOSE)
    output = two.ok("%%distributed\ngate.open.set()\nassert handle._ended.wait(20)").stderr
    assert "save of step-60" in output
    assert "rank 1: OSError: [Errno 5] Input/output error" in output
    assert "Existing checkpoints are unchanged" in output
    view = two.ok(
        "%%distributed\nfrom rankbook.protocol import telemetry\nprint(telemetry.snapshot('checkpoint ')[0].phase)"
    )
    assert "[0-1] failed" in view.stdout
    assert not view.stderr
    received = two.run("%%distributed\nhandle.wait(1)")
    assert received.status == "error"
    assert "Input/output error" in received.traceback
    assert "()" in two.ok("%%distributed\nprint(telemetry.snapshot('checkpoint '))").stdout


ONE_CANNOT = """%%distributed
from rankbook.checkpoint import async_save
whole = async_save._stage
def fails(*given):
    raise Custom('one', 'two')
class Custom(Exception):
    def __init__(self, one, two):
        super().__init__(one)
if rank == 1:
    async_save._stage = fails
handle = begin(70)
async_save._stage = whole"""


def test_wait_of_one_rank_ends_when_another_has_failed(two):
    """Raise an error that cannot be pickled, so that the ranks cannot exchange it."""
    two.ok(ONE_CANNOT)
    outcome = two.ok(OUTCOME, timeout=20)
    assert "told" in outcome.stdout
    assert "saved" not in outcome.stdout
    two.ok("%%distributed\nhandle = begin(71)")
    assert "[0-1] saved 71" in two.ok(OUTCOME).stdout


KILLED_WHILE_SAVING = """%%distributed
gate = Gate(storage_of(folder))
if rank == 0:
    gate.open.set()
handle = begin({step}, gate)
assert gate.reached.wait(20)"""


@pytest.mark.parametrize(("step", "victim"), [(82, 1), (84, 0)])
def test_loss_of_a_save_is_reported_once_by_heal_and_the_next_save_works(two, step, victim):
    cell = KILLED_WHILE_SAVING.replace("rank == 0", f"rank != {victim}").format(step=step)
    two.ok(cell)
    os.kill(two.pids[victim], signal.SIGKILL)
    survivor = 1 - victim
    peek = f"%distributed peek --ranks {survivor} handle.done"
    wait_until(lambda: "True" in two.run(peek).stdout, timeout=60, what="the save ends")
    healed = two.ok("%distributed heal", timeout=60)
    line = 1 + next(n for n, text in enumerate(PREPARE.splitlines()[1:]) if "return save" in text)
    output = healed.stdout + healed.stderr
    assert f"the save of step-{step} to {two.folder}, begun at line {line + 1} of Cell In[" in output
    assert f"was lost: rank {victim} was killed by SIGKILL" in output
    assert "Existing checkpoints are unchanged" in output
    assert output.count("was lost") == 1
    prepare(two)
    again = two.ok(f"%%distributed\nhandle = begin({step + 1})")
    assert f"[0-1] saved {step + 1}" in two.ok(OUTCOME).stdout
    assert "lost" not in again.stderr + again.stdout
    assert step not in steps(two.folder) and verify(two.folder, step + 1).ok


def test_loss_of_a_save_is_reported_once_in_the_next_cell_where_nothing_is_healed(two):
    two.ok(KILLED_WHILE_SAVING.format(step=86))
    os.kill(two.pids[1], signal.SIGKILL)
    peek = "%distributed peek --ranks 0 handle.done"
    wait_until(lambda: "True" in two.run(peek).stdout, timeout=60, what="the save ends")
    two.ok("%distributed restart 1", timeout=60)
    output = two.ok(PREPARE.format(folder=str(two.folder)))
    assert output.stderr.count("the save of step-86") == 1
    two.pids.update({int(rank): int(pid) for rank, pid in re.findall(r"\[(\d+)\] pid (\d+)", output.stdout)})
    assert not two.ok("%%distributed\nhandle = begin(87)").stderr
    assert "[0-1] saved 87" in two.ok(OUTCOME).stdout


def test_save_is_reported_as_lost_when_a_rank_died_and_the_next_one_works(two):
    two.ok("%%distributed\ngate = Gate(storage_of(folder))\nhandle = begin(80, gate)\nassert gate.reached.wait(20)")
    os.kill(two.pids[1], signal.SIGKILL)
    failed = two.run("%%distributed --ranks 0\ngate.open.set()\nhandle.wait(20)", timeout=30)
    assert failed.status == "error"
    assert "rank 1 was killed by SIGKILL" in failed.traceback + failed.text
    two.ok("%distributed heal", timeout=40)
    prepare(two)
    two.ok("%%distributed\nhandle = begin(81)")
    assert "[0-1] saved 81" in two.ok(OUTCOME).stdout
    assert 80 not in steps(two.folder)
