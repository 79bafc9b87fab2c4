"""Test which checkpoint a step or a folder selects."""

from __future__ import annotations

import pytest
import torch

import rankbook.checkpoint as rc
from rankbook.checkpoint.loading import find_checkpoint
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.errors import CheckpointError


def test_latest_a_number_and_the_folder_itself_are_found_alike(tmp_path):
    for step in (1, 5):
        rc.save({"w": torch.full((1,), float(step))}, tmp_path, step=step)
    storage = storage_of(tmp_path)
    assert find_checkpoint(storage, "latest").folder == find_checkpoint(storage, None).folder == "step-5"
    assert find_checkpoint(storage, 1).manifest.step == 1
    checkpoint = find_checkpoint(storage_of(tmp_path / "step-1"), "latest")
    assert (checkpoint.folder, checkpoint.manifest.step) == ("", 1)
    assert (checkpoint.path("x"), find_checkpoint(storage, 1).path(0)) == ("x", "step-1/__0_0.distcp")
    assert str(find_checkpoint(storage, 1)) == f"{storage}/step-1"
    assert str(checkpoint) == str(checkpoint.storage)


def test_damaged_checkpoint_is_not_replaced_by_another_step(tmp_path):
    rc.save({"w": torch.zeros(1)}, tmp_path, step=1)
    rc.save({"w": torch.zeros(1)}, tmp_path, step=2)
    manifest = tmp_path / "step-2/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"step-2/manifest\.json: the last line"):
        find_checkpoint(storage_of(tmp_path), "latest")
    (tmp_path / "latest").write_bytes(b"step-9 crc32=00000000\n")
    with pytest.raises(CheckpointError, match="latest: the file is damaged"):
        find_checkpoint(storage_of(tmp_path), "latest")
    assert find_checkpoint(storage_of(tmp_path), 1).manifest.step == 1
