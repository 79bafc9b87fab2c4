"""Test the places of checkpoints: steps, named checkpoints, and the leftovers of failed saves."""

from __future__ import annotations

import pytest

from rankbook.checkpoint.storage import steps
from rankbook.checkpoint.storage.steps import CheckpointLocation, RetentionPolicy
from rankbook.errors import CheckpointError, InvalidArgument
from tests.checkpoint.simulated import InMemory


def completed(location):
    partial = location.begin()
    location.storage.write(f"{partial}/manifest.json", [b"x"])
    location.commit()
    return partial


def test_the_next_step_is_one_above_the_highest():
    storage = InMemory()
    first, second = CheckpointLocation(storage, "f"), CheckpointLocation(storage, "f")
    assert first.display_name == ""
    assert [completed(first), completed(second)] == ["step-0.partial", "step-1.partial"]
    assert second.display_name == "step-1"
    completed(CheckpointLocation(storage, "f", 40))
    third = CheckpointLocation(storage, "f")
    third.begin()
    assert third.step == 41
    third.abandon()
    assert steps.finished_steps(storage) == [0, 1, 40]


def test_the_next_step_has_a_name_that_no_other_program_uses():
    storage = InMemory()
    storage.write("step-1/model.pt", [b"x"])
    assert [completed(CheckpointLocation(storage, "f")) for _ in range(2)] == ["step-0.partial", "step-2.partial"]
    assert storage.files["step-1/model.pt"] == b"x"


def test_leftovers_of_a_killed_save_are_swept_by_the_next_one():
    storage = InMemory()
    storage.write("step-3.partial/__0_0.distcp", [b"half"])
    completed(CheckpointLocation(storage, "f", 4))
    assert not any(name.startswith("step-3") for name in storage.files)


def test_step_that_is_being_saved_is_refused_until_it_is_abandoned():
    storage = InMemory()
    one, other = CheckpointLocation(storage, "f", 5), CheckpointLocation(storage, "f", 5)
    one.begin()
    with pytest.raises(CheckpointError, match="step 5 is being saved by process"):
        other.begin()
    other.abandon()  # it never began, and must not take the other's away
    assert "step-5.partial.owner" in storage.files
    one.abandon()
    assert storage.files == {}
    assert completed(other) == "step-5.partial"


def test_old_steps_are_removed_after_the_commit():
    storage = InMemory()
    for step in range(6):
        completed(CheckpointLocation(storage, "f", step, retention=RetentionPolicy(keep=2, keep_every=3)))
    assert steps.finished_steps(storage) == [0, 3, 4, 5]


def test_step_is_committed_if_old_steps_cannot_be_removed():
    class Stuck(InMemory):
        stuck = False

        def remove(self, path):
            if self.stuck and path == "step-0":
                raise OSError(13, "Permission denied", path)
            super().remove(path)

    storage = Stuck()
    completed(CheckpointLocation(storage, "f", 0))
    storage.stuck = True
    completed(CheckpointLocation(storage, "f", 1, retention=RetentionPolicy(keep=1)))
    assert steps.read_latest(storage) == 1
    assert steps.finished_steps(storage) == [0, 1]


def test_named_checkpoint_is_replaced_atomically():
    storage = InMemory()
    location = CheckpointLocation(storage, "f", name="best")
    assert (completed(location), location.display_name) == ("best.partial", "best")
    again = CheckpointLocation(storage, "f", name="best")
    again.begin()
    storage.write("best.partial/manifest.json", [b"other"])
    again.abandon()
    assert storage.files == {"best/manifest.json": b"x"}


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": -3}, {"keep_every": 0}])
def test_retention_counts_from_one(wrong):
    with pytest.raises(InvalidArgument, match="must be an integer >= 1"):
        RetentionPolicy(**wrong)
