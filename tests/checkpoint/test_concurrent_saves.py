"""Several processes that save into one folder at the same moment: the same step, or each its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rankbook.checkpoint import load_plain, steps, verify
from rankbook.checkpoint.inspection import describe_folder
from rankbook.checkpoint.storage import steps as folders
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.errors import CheckpointError
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.slow


PROCESSES = 2


def meet(folder, name, process):
    """Wait, to continue at the same moment as the other processes."""
    Path(folder, f"{name}-{process}").touch()
    deadline = time.monotonic() + 60
    while not all(Path(folder, f"{name}-{number}").exists() for number in range(PROCESSES)):
        assert time.monotonic() < deadline, f"the other process did not come to {name}"
        os.sched_yield()


def save_same_steps(folder, count, via_url):
    """Save the steps in turn, each at the same moment as the other process; what became of each."""
    import torch

    from rankbook.checkpoint import save

    process, reported = int(os.environ["RANK"]), []
    run = f"file://{folder}/run" if via_url else f"{folder}/run"
    for step in range(count):
        state = {"w": torch.full((64, 64), float(process)), "n": torch.arange(1000) + process, "by": process}
        meet(folder, f"step-{step}", process)
        try:
            save(state, run, step=step)
            reported.append("")
        except CheckpointError as error:
            reported.append(str(error))
    return reported


def check_same_steps(tmp_path, count):
    folder = tmp_path / "place"
    folder.mkdir()
    reported = run_ranks(save_same_steps, PROCESSES, str(folder), count, False, group=False, timeout=400)
    run = folder / "run"
    assert steps(run) == list(range(count))
    refused = 0
    for step, item in enumerate(zip(*reported, strict=True)):
        savers = [process for process, output in enumerate(item) if not output]
        assert savers, f"step {step}: nobody saved it: {item}"
        assert all(f"step {step} is being saved by process" in output for output in item if output), item
        refused += len(item) - len(savers)
        assert verify(run, step).ok, str(verify(run, step))
        loaded = load_plain(run, step=step)
        assert loaded["by"] in savers
        assert (loaded["w"] == loaded["by"]).all()
        assert loaded["n"][0] == loaded["by"]
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith("step-")) == ["latest"]
    assert not folders.list_partials(storage_of(run))
    return refused


def test_same_step_saved_by_two_processes_is_complete_or_refused(tmp_path):
    assert check_same_steps(tmp_path, 20)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_200_steps_saved_by_two_processes_at_the_same_moment(tmp_path):
    assert check_same_steps(tmp_path, 200)


def test_second_saver_of_a_step_is_reported_on_every_rank(tmp_path):
    def attempt():
        import torch

        from rankbook.checkpoint import save

        reported = []
        for background in (False, True):
            try:
                handle = save({"w": torch.ones(4)}, tmp_path / "run", step=5, async_=background)
                handle.wait(20)
            except CheckpointError as error:
                reported.append(str(error))
        return reported

    folders.begin_step(storage_of(tmp_path / "run"), 5)
    try:
        one, other = run_ranks(attempt, 2)
        assert one == other
        assert len(one) == 2
        assert all(f"step 5 is being saved by process {os.getpid()}" in item for item in one)
    finally:
        folders.abandon_step(storage_of(tmp_path / "run"), 5)


def test_named_checkpoint_is_claimed_like_a_step(tmp_path):
    from rankbook.checkpoint.storage.steps import CheckpointLocation

    storage = storage_of(tmp_path)
    one, other = CheckpointLocation(storage, "f", name="best"), CheckpointLocation(storage, "f", name="best")
    one.begin()
    with pytest.raises(CheckpointError, match="best is being saved by process"):
        other.begin()
    other.abandon()
    storage.write("best.partial/manifest.json", [b"x"])
    one.commit()
    assert set(storage.list()) == {"best"}


def test_claims_are_exclusive_on_a_storage_without_locks(tmp_path, monkeypatch):
    from rankbook.checkpoint.storage import steps

    class Unlocked:
        """Storage like NFS: exclusive creation, and no lock."""

        def __init__(self):
            self.inner = storage_of(tmp_path)

        def __str__(self):
            return str(tmp_path)

        def __getattr__(self, name):
            if name == "locked":
                raise AttributeError(name)
            return getattr(self.inner, name)

    one, other = Unlocked(), Unlocked()
    claim = steps.claim_lock

    def late(storage, path):
        if not done:  # another saver comes between the look at the claim and the claim
            done.append(1)
            folders.begin_step(other, 5)
        return claim(storage, path)

    done = []
    monkeypatch.setattr(steps, "claim_lock", late)
    with pytest.raises(CheckpointError, match="step 5 is being saved by"):
        folders.begin_step(one, 5)


def save_own_steps(folder, count):
    """Save every second step, and keep few; the last process looks at the folder meanwhile."""
    import torch

    from rankbook.checkpoint import load_metadata, save
    from rankbook.cli import main as cli
    from rankbook.magics.views import CheckpointBrowser

    process = int(os.environ["RANK"])
    run = Path(folder, "run")
    if process < PROCESSES:
        meet(folder, "begin", process)
        try:
            for number in range(count):
                save({"w": torch.full((64,), float(number))}, run, step=number * PROCESSES + process, keep=2)
        finally:
            Path(folder, f"done-{process}").touch()
        return 0
    listing_count, checkpoint_browser = 0, CheckpointBrowser(run)
    while not all(Path(folder, f"done-{item}").exists() for item in range(PROCESSES)):
        if not (run / "latest").exists():
            os.sched_yield()
            continue
        assert describe_folder(run)
        assert not (listing := checkpoint_browser.list_checkpoints()).trouble, listing.trouble
        assert not [checkpoint for checkpoint in listing.checkpoints if checkpoint.checked == "damaged"]
        assert load_metadata(run).step is not None
        assert cli.main(["checkpoint", "ls", str(run)]) == 0
        listing_count += 1
    return listing_count


def test_latest_keep_and_listing_stand_concurrent_savers_of_other_steps(tmp_path):
    *_, listing_counts = run_ranks(save_own_steps, PROCESSES + 1, str(tmp_path), 25, group=False, timeout=200)
    assert listing_counts
    run, storage = tmp_path / "run", storage_of(tmp_path / "run")
    stored_steps = steps(run)
    assert folders.read_latest(storage) in stored_steps
    assert {48, 49} & set(stored_steps)
    assert all(verify(run, step).ok for step in stored_steps)
    assert folders.list_partials(storage) == []
    assert set(storage.list()) == {"latest", *(f"step-{step}" for step in stored_steps)}
