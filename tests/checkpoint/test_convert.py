from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import uuid
import warnings
import weakref

import pytest
import safetensors.torch as theirs
import torch
import torch.distributed.checkpoint as dcp

import rankbook.checkpoint as rc
from rankbook.checkpoint import conversion
from rankbook.checkpoint.conversion import from_safetensors, read_tensor, to_safetensors
from rankbook.checkpoint.format import safetensors, tensor_io
from rankbook.checkpoint.format.manifest import StoredTensor
from rankbook.checkpoint.inspection import verify
from rankbook.checkpoint.storage import backends, steps
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.errors import CheckpointError, InvalidArgument
from tests.checkpoint.hand_made import write_checkpoint

MODEL = {
    "w": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "bf16": torch.randn(3, 5).bfloat16(),
    "f8": torch.randn(4).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3),
    "bool": torch.tensor([True, False, True]),
    "int": torch.arange(7, dtype=torch.int16),
}


def dcp_saved(folder, state):
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    return one.float().equal(other.float())


def test_a_folder_with_two_indexes_is_refused(tmp_path):
    for name in ("model", "other"):
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"one index .*model\.safetensors.*other\.safetensors"):
        safetensors.read_tensors(storage_of(tmp_path), "")


def test_a_checkpoint_goes_to_safetensors_and_back_bit_for_bit(tmp_path):
    done = to_safetensors(dcp_saved(tmp_path / "dcp", MODEL), tmp_path / "hf", most_bytes=60)
    assert done.tensors == len(MODEL)
    index = json.loads((tmp_path / "hf" / safetensors.INDEX).read_bytes())
    assert index["metadata"]["total_size"] == done.nbytes == sum(item.nbytes for item in MODEL.values())
    assert index["weight_map"].keys() == MODEL.keys()
    assert len(set(index["weight_map"].values())) == len(done.files) - 1 == 3
    assert min(index["weight_map"].values()) == "model-00001-of-00003.safetensors"

    assert from_safetensors(tmp_path / "hf", tmp_path / "run", step=7).tensors == len(MODEL)
    assert verify(tmp_path / "run").ok
    assert verify(tmp_path / "run").unchecked == 0
    loaded = {key: torch.empty_like(value).contiguous() for key, value in MODEL.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(loaded, checkpoint_id=tmp_path / "run/step-7", no_dist=True)
    assert all(same(loaded[key], value) for key, value in MODEL.items())


@pytest.mark.parametrize("sizes", [(60, 10**6), (10**6, 60), (30, 60)])
def test_files_of_an_earlier_conversion_are_removed(tmp_path, sizes):
    (tmp_path / "hf").mkdir()
    others = {"config.json", "model-best.safetensors", "model.safetensors.bak", "adapter_model.safetensors"}
    for name in others:
        (tmp_path / "hf" / name).write_bytes(b"x")
    for number, size in enumerate(sizes):
        tensors = {key: value + number for key, value in MODEL.items() if value.dtype == torch.float32}
        done = to_safetensors(dcp_saved(tmp_path / f"dcp-{number}", tensors), tmp_path / "hf", most_bytes=size)
        assert {path.name for path in (tmp_path / "hf").iterdir()} == {*done.files, *others}
    loaded = {}
    for name in set(done.files) - {safetensors.INDEX}:
        loaded |= theirs.load_file(tmp_path / "hf" / name)
    assert all(same(loaded[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("cause", ["damage", "dtype", "full disk"])
def test_a_failed_conversion_leaves_an_earlier_one_as_it_is(tmp_path, monkeypatch, cause):
    hf = tmp_path / "hf"
    to_safetensors(dcp_saved(tmp_path / "dcp", MODEL), hf, most_bytes=60)
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    manifest = write_checkpoint(tmp_path / "run", 3)
    folder = tmp_path / "run"
    if cause == "damage":
        path = folder / "step-3/__RANK_1.distcp"
        data = bytearray(path.read_bytes())
        data[manifest.tensors["model.3.w"].chunks[1].data] ^= 1
        path.write_bytes(data)
    elif cause == "dtype":
        folder = dcp_saved(tmp_path / "complex", {"a": torch.ones(9), "c": torch.ones(2, dtype=torch.complex128)})
    else:
        real, calls = conversion.read_tensor, []

        def read(*args):
            calls.append(args)
            if len(calls) == 4:
                raise OSError(28, "No space left on device")
            return real(*args)

        monkeypatch.setattr(conversion, "read_tensor", read)
    with pytest.raises((CheckpointError, OSError), match=r"model\.3\.w|complex128|No space"):
        to_safetensors(folder, hf, most_bytes=60)
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before


def test_files_of_others_and_steps_are_not_replaced(tmp_path):
    hf, source = tmp_path / "hf", dcp_saved(tmp_path / "dcp", MODEL)
    hf.mkdir()
    theirs.save_file({"x": torch.ones(3)}, hf / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors was not written by a conversion"):
        to_safetensors(source, hf)
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before
    from_safetensors(hf, tmp_path / "run", step=7)
    with pytest.raises(CheckpointError, match="has a step 7 already"):
        from_safetensors(hf, tmp_path / "run", step=7)
    assert from_safetensors(hf, tmp_path / "run", step=8).tensors == 1


def test_partial_files_of_a_killed_conversion_are_removed(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model-00001-of-00009.safetensors.partial").write_bytes(b"x")
    done = to_safetensors(dcp_saved(tmp_path / "dcp", MODEL), tmp_path / "hf", most_bytes=60)
    assert {path.name for path in (tmp_path / "hf").iterdir()} == set(done.files)


def test_safetensors_reads_our_files_and_we_read_its_files(tmp_path):
    to_safetensors(dcp_saved(tmp_path / "dcp", MODEL), tmp_path / "hf")
    loaded = theirs.load_file(tmp_path / "hf/model.safetensors")
    assert loaded.keys() == MODEL.keys()
    assert all(same(loaded[key], value) for key, value in MODEL.items())

    theirs.save_file({key: value.contiguous() for key, value in MODEL.items()}, tmp_path / "their.safetensors")
    from_safetensors(tmp_path / "their.safetensors", tmp_path / "run")
    assert verify(tmp_path / "run").ok
    to_safetensors(tmp_path / "run", tmp_path / "again")
    loaded = theirs.load_file(tmp_path / "again/model.safetensors")
    assert all(same(loaded[key], value) for key, value in MODEL.items())


def test_chunks_of_many_ranks_become_one_tensor(tmp_path):
    write_checkpoint(tmp_path / "run", 3, seed=5)
    done = to_safetensors(tmp_path / "run", tmp_path / "hf")
    assert done.left_out == ("rng/shard_0_2", "rng/shard_1_2", "common.pt")
    (tensor, *_) = safetensors.read_tensors(storage_of(tmp_path / "hf"), "model.safetensors").values()
    assert torch.equal(tensor, torch.randn(16, 6, generator=torch.Generator().manual_seed(5)))


def test_a_damaged_chunk_stops_the_conversion_with_its_name(tmp_path):
    manifest = write_checkpoint(tmp_path / "run", 3)
    path = tmp_path / "run/step-3/__RANK_1.distcp"
    data = bytearray(path.read_bytes())
    data[manifest.tensors["model.2.w"].chunks[1].data] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__RANK_1\.distcp: model\.2\.w \(written by rank 1\): .*bytes"):
        to_safetensors(tmp_path / "run", tmp_path / "hf")
    assert list((tmp_path / "hf").iterdir()) == []


def test_a_tensor_with_a_hole_is_not_written(tmp_path):
    manifest = write_checkpoint(tmp_path / "run", 3)
    key = "model.0.w"
    manifest.tensors[key] = StoredTensor("float32", (16, 6), manifest.tensors[key].chunks[:1])
    with pytest.raises(CheckpointError, match=r"model\.0\.w .* has 96 elements, but its 1 chunks have 48"):
        read_tensor(storage_of(tmp_path / "run"), "step-3", manifest, key)


@pytest.mark.slow
def test_conversion_holds_one_tensor_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "_MAX_BYTES", 1000)
    write_checkpoint(tmp_path / "run", 3, tensors=9, rows=100)
    alive, most = [], []
    real = conversion.read_tensor

    def read(*args):
        gc.collect()
        most.append(sum(item() is not None for item in alive))
        tensor = real(*args)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(conversion, "read_tensor", read)
    to_safetensors(tmp_path / "run", tmp_path / "hf")
    assert max(most) <= 1


def test_types_that_the_format_lacks_are_named(tmp_path):
    folder = dcp_saved(tmp_path / "dcp", {"c": torch.randn(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="c has the dtype complex128, which safetensors files do not support"):
        to_safetensors(folder, tmp_path / "hf")


def test_a_failed_import_leaves_no_step(tmp_path, monkeypatch):
    to_safetensors(dcp_saved(tmp_path / "dcp", MODEL), tmp_path / "hf")
    monkeypatch.setattr(tensor_io, "raw_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        from_safetensors(tmp_path / "hf", tmp_path / "run", step=1)
    assert list((tmp_path / "run").iterdir()) == []
    assert steps.finished_steps(storage_of(tmp_path / "run")) == []


def raw(fields, data=b"", length=None):
    text = json.dumps(fields).encode() if not isinstance(fields, bytes) else fields
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def field(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "header too small"),
        (raw({}, length=1 << 40), "header too large"),
        (raw(b"{not json"), "invalid JSON in header"),
        (raw({"a": 3}), "invalid JSON in header"),
        (raw(b'{"a":' * 100_000), "recursion limit"),
        (raw({"a": field(0, 3, "X9")}, b"abc"), "unknown variant `X9`"),
        (raw({"a": field(0, 3, shape=[4])}, b"abc"), "invalid shape, data type, or offset"),
        (raw({"a": field(0, 0, shape=[1 << 63, 0])}), "reshape"),
        (
            raw({"a": field(0, 4, "F4", [8])}, b"abcd"),
            "a has the dtype float4_e2m1fn_x2, which a checkpoint does not support",
        ),
        (raw({"a": field(0, 3)}, b"ab"), "file not fully covered"),
        (raw({"a": field(0, 3)}, b"abcd"), "file not fully covered"),
        (raw({"a": field(0, 2), "b": field(1, 3)}, b"abc"), "invalid offset for tensor `b`"),
        (raw({"a": field(1, 3)}, b"abc"), "invalid offset for tensor `a`"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: .*{message}"):
        from_safetensors(tmp_path / "x.safetensors", tmp_path / "run")


def test_an_index_that_does_not_fit_its_files_is_reported(tmp_path):
    def write_index(weight_map):
        (tmp_path / safetensors.INDEX).write_bytes(json.dumps({"weight_map": weight_map}).encode())

    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(raw({name: field(0, 3), "both": field(3, 4)}, b"abcd"))
    storage = storage_of(tmp_path)
    write_index({"one": "gone.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json names missing files: gone\.safetensors"):
        safetensors.read_tensors(storage, "")
    write_index({"three": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"one\.safetensors: three is missing"):
        safetensors.read_tensors(storage, "")
    (tmp_path / safetensors.INDEX).unlink()
    with pytest.raises(CheckpointError, match="duplicate tensors: both"):
        safetensors.read_tensors(storage, "")
    (tmp_path / "two.safetensors").unlink()
    tensors = safetensors.read_tensors(storage, "")
    assert {key: bytes(tensor.tolist()) for key, tensor in tensors.items()} == {"one": b"abc", "both": b"d"}


def test_files_of_a_remote_storage_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "_BUFFER", 100)
    url = f"memory://{uuid.uuid4().hex}"
    to_safetensors(dcp_saved(tmp_path / "dcp", MODEL), url, most_bytes=60)
    from_safetensors(url, tmp_path / "run")
    assert all(same(value, MODEL[key]) for key, value in rc.load_plain(tmp_path / "run").items())


def test_files_of_a_pipe_or_of_no_name_are_refused(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    for name in ("x", "y"):
        with pytest.raises(CheckpointError, match=rf"{name}\.safetensors: no such file"):
            from_safetensors(tmp_path / f"{name}.safetensors", tmp_path / "run")


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(raw({}))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InvalidArgument, match=r'pip install "safetensors>=0\.5"'):
        from_safetensors(tmp_path / "x.safetensors", tmp_path / "run")


def test_any_damage_of_a_header_raises_a_readable_error(tmp_path):
    encoded = raw({"a": field(0, 6, "F16", [3]), "b": field(6, 10, "F32", [1])}, bytes(10))
    chance = random.Random(3)
    for _ in range(200):
        damaged = bytearray(encoded)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(encoded) - 10)] = chance.randrange(256)
        (tmp_path / "x.safetensors").write_bytes(
            damaged[: chance.choice([len(encoded), chance.randrange(len(encoded))])]
        )
        with contextlib.suppress(CheckpointError):
            safetensors.read_tensors(storage_of(tmp_path), "")
