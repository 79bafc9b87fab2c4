"""Saves in the background, on real processes: what the handle says, what is in them, that no rank waits for another.

The tests of two ranks run in the same two processes, one after the other.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace

import pytest

from tests import rank_processes
from tests.checkpoint import generations
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes

ROWS = 64


class Gate:
    """A storage whose files of data wait until they may be written."""

    def __init__(self, inner):
        self.inner, self.open, self.reached = inner, threading.Event(), threading.Event()

    def __str__(self):
        return str(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, path, parts):
        if path.endswith(".distcp"):
            self.reached.set()
            assert self.open.wait(20)
        return self.inner.write(path, parts)


BODIES = {}


def on_ranks(body):
    """Run the body of a test on two ranks."""
    BODIES[body.__name__] = body

    def test(reported):
        failure = reported.get(body.__name__, "it did not run: a test before it has failed")
        if failure:
            pytest.fail(failure)

    test.__name__ = body.__name__
    return test


def all_bodies(bodies, folder):
    """Return the errors of the bodies, up to the first failure."""
    reported = {}
    for name, body in bodies.items():
        try:
            body(f"{folder}/{name}")
            reported[name] = ""
        except BaseException:  # noqa: BLE001 - the test fails with it
            reported[name] = traceback.format_exc()
            break
    return reported


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The failures of all tests on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    one, other = run_ranks(all_bodies, 2, BODIES, str(folder), timeout=100)
    return {name: one.get(name, "") + other.get(name, "") for name in one.keys() & other.keys()}


def context(folder):
    import torch.distributed as dist

    from rankbook.checkpoint.storage.backends import storage_of

    return dist.get_rank(), dist.get_world_size(), Gate(storage_of(folder))


def latest(rank, world, folder, step="latest"):
    from rankbook.checkpoint import load

    return generations.generation_of(
        rank, world, load(generations.state(rank, world, 0, ROWS), folder, step=step), ROWS
    )


@on_ranks
def test_handle_reports_progress_and_training_does_not_change_the_saved_state(folder):
    import torch
    import torch.distributed as dist

    from rankbook.checkpoint import CheckpointError, save, steps

    rank, world, gate = context(folder)
    state = generations.state(rank, world, 1, ROWS)
    handle = save(state, gate, step=1, async_=True)
    generations.train(state)
    assert gate.reached.wait(20)
    assert (handle.done, handle.error) == (False, None)
    assert "writing, 0%" in repr(handle)
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.01 s"):
        handle.wait(0.01)
    for _ in range(20):  # training's collectives meet none of the save's
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0] == world
    with pytest.raises(CheckpointError, match="still running"):
        save(generations.state(rank, world, 2, ROWS), folder, step=2, busy="refuse")
    threading.Timer(0.1, gate.open.set).start()
    second = save(generations.state(rank, world, 2, ROWS), folder, step=2, async_=True)  # waits for the first
    assert handle.done
    assert handle.wait().step == 1
    assert second.wait().step == 2
    assert second.done
    assert second.progress.phase == "done"
    assert steps(folder) == [1, 2]
    assert latest(rank, world, folder, 1) == 1
    assert latest(rank, world, folder) == 2


@on_ranks
def test_buffers_are_reused_and_those_of_other_sizes_are_released(folder):
    from rankbook.checkpoint import async_save, save

    rank, world, _ = context(folder)
    places = []
    for rows in (ROWS, ROWS, 2 * ROWS, 2 * ROWS):
        save(generations.state(rank, world, 1, rows), folder, async_=True).wait()
        places.append({item.data_ptr(): item.numel() for item in async_save._process.pool})
    assert places[0] == places[1]
    assert places[2] == places[3]
    assert sum(places[2].values()) < 2.2 * sum(places[0].values())


@on_ranks
def test_save_in_progress_on_one_rank_refuses_a_save_on_all_ranks(folder):
    from rankbook.checkpoint import CheckpointError, save

    rank, world, _ = context(folder)
    hold, ended = threading.Event(), threading.Event()

    def reported(progress):
        if progress.phase == "done" and rank == 1:
            ended.set()
            assert hold.wait(20)

    handle = save(generations.state(rank, world, 1, ROWS), folder, async_=True, on_progress=reported)
    if rank == 1:
        assert ended.wait(20)
    else:
        handle.wait(20)
    with pytest.raises(CheckpointError, match="still running"):
        save(generations.state(rank, world, 2, ROWS), folder, busy="refuse")
    hold.set()
    handle.wait(20)
    save(generations.state(rank, world, 3, ROWS), folder, busy="refuse")
    assert latest(rank, world, folder) == 3


@on_ranks
def test_unobserved_failure_is_raised_by_the_next_save(folder):
    from rankbook.checkpoint import CheckpointError, save

    rank, world, gate = context(folder)

    def broken(path, parts):
        raise OSError(5, "Input/output error", path)

    if rank == 1:
        gate.write = broken
    gate.open.set()
    handle = save(generations.state(rank, world, 1, ROWS), gate, async_=True)
    with pytest.raises(
        CheckpointError, match=r"the previous asynchronous save failed.*rank 1: OSError.*Input/output error"
    ):
        save(generations.state(rank, world, 2, ROWS), folder)
    assert "Input/output error" in str(handle.error)
    assert "Input/output error" in repr(handle)
    save(generations.state(rank, world, 3, ROWS), folder)
    assert latest(rank, world, folder) == 3


@on_ranks
def test_failure_or_interrupt_during_the_copy_is_raised_on_all_ranks(folder):
    from rankbook.checkpoint import CheckpointError, async_save, save
    from rankbook.errors import CollectiveAborted

    rank, world, _ = context(folder)
    original = async_save._buffer
    for error in (MemoryError("no room"), KeyboardInterrupt(), CollectiveAborted("rank 0 raised ValueError")):
        ends_cell = not isinstance(error, MemoryError)

        def fails(_size, error=error):
            raise error

        async_save._buffer = fails if rank == 1 else original
        if rank == 1 and ends_cell:
            with pytest.raises(type(error)):
                save(generations.state(rank, world, 1, ROWS), folder, async_=True)
        else:
            handle = save(generations.state(rank, world, 1, ROWS), folder, async_=True)
            with pytest.raises(CheckpointError, match=f"rank 1: {type(error).__name__}"):
                handle.wait(20)
        async_save._buffer = original
        if ends_cell:
            with pytest.raises(CheckpointError, match="the previous asynchronous save failed"):
                save(generations.state(rank, world, 1, ROWS), folder)
        save(generations.state(rank, world, 2, ROWS), folder, async_=True).wait(20)
        assert latest(rank, world, folder) == 2


@on_ranks
def test_error_of_the_progress_callback_does_not_fail_the_async_save(folder):
    import logging

    from rankbook.checkpoint import save

    rank, world, _ = context(folder)
    reported = []
    logging.getLogger("rankbook.checkpoint.async_save").addFilter(lambda record: reported.append(record.getMessage()))

    def raises(progress):
        if rank == 1 and progress.phase == "writing":
            raise ValueError("of the listener")

    for background in (False, True):
        saved = save(generations.state(rank, world, 1, ROWS), folder, async_=background, on_progress=raises)
        if background:
            saved.wait(20)
    assert len(reported) == (2 if rank == 1 else 0)
    assert latest(rank, world, folder) == 1


@on_ranks
def test_loaders_workers_are_forked_while_it_writes(folder):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from rankbook.checkpoint import save

    rank, world, gate = context(folder)
    handle = save(generations.state(rank, world, 1, ROWS), gate, async_=True)
    assert gate.reached.wait(20)
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=8, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        assert sum(int(batch.sum()) for (batch,) in loader) == 2016
    gate.open.set()
    handle.wait(20)
    assert latest(rank, world, folder) == 1


@on_ranks
def test_save_group_is_recreated_with_the_default_group(folder):
    import torch.distributed as dist

    from rankbook.checkpoint import save

    rank, world, _ = context(folder)
    save(generations.state(rank, world, 1, ROWS), folder, async_=True).wait(20)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world)
    save(generations.state(rank, world, 2, ROWS), folder, async_=True).wait(20)
    assert latest(rank, world, folder) == 2


def deserted(folder):
    """The last rank dies while all write; the others' handles end."""
    from pathlib import Path

    def work(rank, say):
        import os

        from rankbook.checkpoint import save

        _, world, gate = context(f"{folder}/run")
        handle = save(generations.state(rank, world, 1, ROWS), gate, async_=True)
        assert gate.reached.wait(20)
        if rank == world - 1:
            os.kill(os.getpid(), 9)
        gate.open.set()
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            handle.wait(20)
        say((time.monotonic() - start, handle.done, handle.error.__notes__))
        Path(folder, f"heard-{rank}").touch()
        while len(list(Path(folder).glob("heard-*"))) < world - 1:  # to leave would end the others' wait too
            threading.Event().wait(0.05)
        os._exit(0)

    Path(folder).mkdir()
    ranks = rank_processes.ForkedRanks(5, Path(folder), work)  # of whom two have nothing to do with the last one
    assert ranks.end() == [0, 0, 0, 0, -9], ranks.messages
    return [messages[-1] for messages in ranks.messages[:4]]


def test_death_of_a_rank_ends_wait_on_all_ranks(tmp_path):
    for seconds, done, notes in run_ranks(deserted, 1, str(tmp_path / "ranks"), group=False)[0]:
        assert done
        assert seconds < 10
        assert "Existing checkpoints are unchanged" in notes[0]


SCRIPT = """
import sys, torch
from rankbook.checkpoint import save
handle = save({"w": torch.ones(2000, 2000), "n": 3}, sys.argv[1], async_=True)
print("the script has ended")
"""


@pytest.mark.full
@pytest.mark.slow  # two interpreters that import torch
def test_async_save_is_finished_or_reported_as_lost_at_exit(tmp_path):
    def run(folder):
        return subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False)

    from rankbook.checkpoint import load_plain

    run(tmp_path / "run")
    assert load_plain(tmp_path / "run")["n"] == 3
    (tmp_path / "no folder").write_text("")
    process = run(tmp_path / "no folder")
    assert "rankbook: <save of a checkpoint" in process.stderr
    assert "Not a directory" in process.stderr or "File exists" in process.stderr


def test_copies_from_every_device_are_waited_for(monkeypatch):
    import torch

    from rankbook.checkpoint import async_save
    from rankbook.checkpoint.local_state import LocalState, LocalTensor
    from rankbook.checkpoint.state_dict.sharded_tensor import ShardedTensor

    class OnDevice:
        """A tensor of another device, with memory of the CPU."""

        is_cuda, shape, dtype = True, (4,), torch.float32

        def __init__(self, number):
            self.device = torch.device("cuda", number)

        def detach(self):
            return torch.ones(4)

        def element_size(self):
            return 4

    waited = []
    monkeypatch.setattr(async_save, "_buffer", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    tensors = [LocalTensor.of(ShardedTensor.from_rank_offsets(f"w{n}", torch.zeros(4))) for n in range(4)]
    # The last one is on the CPU.
    tensors = [*(replace(tensor, data=OnDevice(n)) for tensor, n in zip(tensors, (1, 3, 1), strict=False)), tensors[3]]
    staged = async_save._stage(LocalState(tensors, []), copy_replicas=False, buffers=[])
    assert sorted(device.index for device in waited) == [1, 3]
    assert [tensor.data.tolist() for tensor in staged.tensors] == [[1.0] * 4] * 3 + [[0.0] * 4]
