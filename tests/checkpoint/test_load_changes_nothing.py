"""Test that a damaged checkpoint leaves the target tensors unchanged, or that the error names the changed ones."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from rankbook.checkpoint import CheckpointError, ShardedObject, ShardedTensor, load, load_metadata, save
from rankbook.checkpoint.storage.backends import LocalStorage
from tests.rank_processes import run_ranks

KEYS = [f"t{number}" for number in range(4)]


def entries(value, rows=700):
    return {key: ShardedTensor.from_rank_offsets(key, torch.full((rows, 1024), value)) for key in KEYS}


def flip(folder, key, at=100):
    """Change one byte of a tensor's data, the same length."""
    manifest = load_metadata(folder)
    chunk = manifest.tensors[key].chunks[-1]
    file = Path(folder) / "step-0" / manifest.files[chunk.file].name
    with file.open("r+b") as opened:
        opened.seek(chunk.data + chunk.nbytes - at)
        byte = opened.read(1)
        opened.seek(chunk.data + chunk.nbytes - at)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("key", KEYS)
def test_damaged_tensor_leaves_all_live_tensors_as_they_were(tmp_path, key):
    save(entries(1.0), tmp_path, step=0)
    flip(tmp_path, key)
    live = entries(2.0)
    with pytest.raises(CheckpointError, match=f"key '{key}'.*do not match their checksum") as caught:
        load(live, tmp_path)
    assert all((item.data == 2.0).all() for item in live.values())
    assert "partly overwritten" not in str(caught.value)


def test_damaged_or_refused_object_and_common_part_leave_tensors_as_they_were(tmp_path):
    state = entries(1.0) | {"o": ShardedObject("o", Fraction(1, 2), (1,), (0,)), "epoch": 3}
    save(state, tmp_path, step=0)
    live = entries(2.0) | {"o": ShardedObject("o", None, (1,), (0,)), "epoch": 0}
    with pytest.raises(CheckpointError, match="may execute code when loaded"):
        load(live, tmp_path)
    data = bytearray((tmp_path / "step-0/common.pt").read_bytes())
    data[-100] ^= 1
    (tmp_path / "step-0/common.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        load(live, tmp_path, allow=["pathlib.PosixPath"])
    assert all((live[key].data == 2.0).all() for key in KEYS)


def on_ranks(folder):
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()

    def shards(value):
        rows = torch.full((700, 1024), value)
        return {key: ShardedTensor.from_rank_offsets(key, rows.clone(), (0, rank, world)) for key in KEYS}

    save(shards(1.0), folder, step=0)
    if rank == 0:
        flip(folder, KEYS[1])  # the last chunk, which rank 1 alone reads
    dist.barrier()
    live = shards(2.0)
    with pytest.raises(CheckpointError) as caught:
        load(live, folder)
    assert all((item.data == 2.0).all() for item in live.values())
    return str(caught.value)


@pytest.mark.processes
def test_damage_that_one_rank_reads_leaves_the_tensors_of_all_ranks_as_they_were(tmp_path):
    one, other = run_ranks(on_ranks, 2, str(tmp_path / "run"))
    assert one == other
    assert "written by rank 1: bytes " in one and "do not match their checksum" in one


class SecondReadFails(LocalStorage):
    """A disk that gives other bytes of a tensor when they are read again."""

    def __init__(self, root, chunk, remote=False):
        super().__init__(root)
        self.chunk, self.times, self.remote = chunk, 0, remote

    def read(self, path, start, into):
        count = super().read(path, start, into)
        if path.endswith(".distcp") and start <= self.chunk.data + self.chunk.nbytes - 1 < start + count:
            self.times += 1
            if self.times == 2 or self.remote:
                into[self.chunk.data + self.chunk.nbytes - 1 - start] ^= 1
        return count


def test_error_names_tensors_that_are_neither_old_nor_new(tmp_path):
    save(entries(1.0), tmp_path, step=0)
    storage = SecondReadFails(tmp_path, load_metadata(tmp_path).tensors["t2"].chunks[0])
    live = entries(2.0)
    with pytest.raises(CheckpointError, match="partly overwritten: 't2'; all other") as caught:
        load(live, storage)
    assert "'t1'" not in str(caught.value)
    assert all((live[key].data == 1.0).all() for key in KEYS if key != "t2")


def test_remote_storage_is_read_once_and_the_error_names_what_was_changed(tmp_path):
    rows = 20_000  # of four tensors more than what is read twice from afar
    save(entries(1.0, rows), tmp_path, step=0)
    storage = SecondReadFails(tmp_path, load_metadata(tmp_path).tensors["t3"].chunks[0], remote=True)
    live = entries(2.0, rows)
    with pytest.raises(CheckpointError, match="partly overwritten: 't3'"):
        load(live, storage)
    assert storage.times == 1
    assert (live["t0"].data == 1.0).all()


def test_new_memory_is_read_once(tmp_path):
    save(entries(1.0), tmp_path, step=0)
    chunk = load_metadata(tmp_path).tensors["t2"].chunks[0]
    storage = SecondReadFails(tmp_path, chunk)
    request = {"t2": ShardedTensor("t2", None, torch.float32, (700, 1024), (700, 1024), (0, 0), None)}
    assert (load(request, storage)["t2"] == 1.0).all()
    assert storage.times == 1


@pytest.mark.processes
def test_load_state_changes_nothing_that_was_prepared(tmp_path):
    def train():
        from torch.utils.data import DataLoader, TensorDataset

        from rankbook.runtime import Accelerator, ProjectConfiguration  # noqa: F401

        accelerator = Accelerator()
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for (batch,) in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(tmp_path / "state")
        manifest = load_metadata(tmp_path / "state")
        chunk = manifest.tensors["model.weight"].chunks[0]
        file = tmp_path / "state" / manifest.files[chunk.file].name
        data = bytearray(file.read_bytes())
        data[chunk.data + 5] ^= 1
        file.write_bytes(data)
        iterator = iter(loader)
        next(iterator)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
        for value in model.parameters():
            value.data.add_(1)
        position = repr(loader.state_dict()) if hasattr(loader, "state_dict") else ""
        with pytest.raises(CheckpointError, match=r"model\.weight"):
            accelerator.load_state(tmp_path / "state")
        after = model.state_dict()
        assert all(torch.equal(after[name], before[name] + 1) for name in before)
        assert all(
            torch.equal(one, value["exp_avg"]) for one, value in zip(moments, optimizer.state.values(), strict=True)
        )
        assert (repr(loader.state_dict()) if hasattr(loader, "state_dict") else "") == position
        return os.getpid()

    run_ranks(train, 1, group=False)
