from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
import types
import warnings
import zlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from rankbook.checkpoint.format.dcp_metadata import manifest_from_dcp, rank_of, read_metadata
from rankbook.checkpoint.format.manifest import ITEM_BYTES
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.errors import CheckpointError

STATE = {
    "model": {
        "w": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "bf16": torch.randn(3).bfloat16(),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "slice": torch.arange(100.0)[10:20],
        "bool": torch.tensor([True, False]),
        "u16": torch.tensor([1, 2], dtype=torch.uint16),
        "complex": torch.randn(2, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    },
    "step": 4,
    "rng": [1, "x"],
    "list": [torch.ones(2), {"k": 3}],
}


def save(state, folder):
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    save(STATE, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def flat():
    tensors = {f"model.{name}": value.detach() for name, value in STATE["model"].items()}
    return {**tensors, "list.0": STATE["list"][0]}


def read_tensor(folder, manifest, key):
    stored = manifest.tensors[key]
    (chunk,) = stored.chunks
    data = (folder / manifest.files[chunk.file].name).read_bytes()[chunk.data : chunk.data + chunk.nbytes]
    if chunk.pieces:
        assert chunk.pieces == (zlib.crc32(data),)
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, stored.dtype)) if data else torch.empty(0)
    return flat.reshape(chunk.shape) if chunk.strides is None else flat.as_strided(chunk.shape, chunk.strides)


def test_plain_dcp_is_read_by_range(saved):
    manifest = manifest_from_dcp(storage_of(saved))
    assert manifest.foreign
    assert manifest.tensors.keys() == flat().keys()
    assert manifest.objects.keys() == {"step", "rng", "list.1.k"}
    for key, value in flat().items():
        assert manifest.tensors[key].dtype == str(value.dtype).removeprefix("torch.")
        assert manifest.tensors[key].shape == value.shape
        loaded = read_tensor(saved, manifest, key)
        assert loaded.float().equal(value.float()) if value.dtype == torch.float8_e4m3fn else loaded.equal(value)
    assert manifest.tensors["model.transposed"].chunks[0].strides == (1, 4)
    assert manifest.tensors["model.w"].chunks[0].strides is None
    assert {file.name for file in manifest.files} == {".metadata", "__0_0.distcp"}


def test_objects_are_blobs_that_torch_loads(saved):
    manifest = manifest_from_dcp(storage_of(saved))
    stored = manifest.objects["rng"]
    data = (saved / manifest.files[stored.file].name).read_bytes()[stored.start : stored.start + stored.length]
    assert torch.load(io.BytesIO(data), weights_only=True) == [1, "x"]


def test_nested_paths_are_read_from_dcp_metadata(saved):
    metadata = read_metadata((saved / ".metadata").read_bytes(), "x")
    assert metadata.paths["list.1.k"] == ("list", 1, "k")
    assert metadata.paths["model.w"] == ("model", "w")


def test_chunks_written_without_checksums_have_none(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save({"w": torch.arange(5.0)}, tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    manifest = manifest_from_dcp(storage_of(tmp_path))
    assert manifest.tensors["w"].chunks[0].pieces == ()
    assert read_tensor(tmp_path, manifest, "w").tolist() == [0, 1, 2, 3, 4]


class Evil:
    def __reduce__(self):
        return (print, ("it ran",))


@pytest.mark.parametrize(
    ("instance", "named"),
    [
        (Evil(), r"builtins\.print"),
        (np.float32(1), r"numpy\S*\.scalar"),
        (torch.ones(1), r"torch\._utils\._rebuild_tensor_v2"),
        (pickle.Pickler, r"_pickle\.Pickler"),
    ],
)
def test_a_class_that_dcp_does_not_write_is_named_and_not_run(folder, instance, named, capsys):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"x": instance}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata: it names {named}, .*no code was executed"):
        manifest_from_dcp(storage_of(folder))
    assert capsys.readouterr().out == ""


def test_invalid_metadata_bytes_raise_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"/\.metadata is missing: .* is not a checkpoint"):
        manifest_from_dcp(storage_of(tmp_path))
    for data in (b"", b"hello", pickle.dumps({"a": 1}), pickle.dumps(MetadataIndex("x"))):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"\.metadata: "):
            manifest_from_dcp(storage_of(tmp_path))


def test_damaged_metadata_raises_only_checkpoint_error(saved):
    data = (saved / ".metadata").read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        with contextlib.suppress(CheckpointError):  # a flipped number may go unseen: pickles have no checksum
            read_metadata(bytes(damaged), "m")
    for length in range(0, len(data) - 1, 7):
        with pytest.raises(CheckpointError, match="m: "):
            read_metadata(data[:length], "m")


def test_transformed_chunks_are_refused_with_a_way_out(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data[MetadataIndex("step")].transform_descriptors = ["zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"step was stored with the extensions zstd, which only torch"):
        manifest_from_dcp(storage_of(folder))


def test_invalid_tensor_blob_is_reported_with_file_key_and_rank(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = metadata.storage_data
    places[MetadataIndex("model.w", [0, 0])] = places[MetadataIndex("rng")]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError,
        match=r"__0_0\.distcp: model\.w, written by rank 0: .*it holds a list, expected a tensor",
    ):
        manifest_from_dcp(storage_of(folder))
    places[MetadataIndex("model.w", [0, 0])] = places[MetadataIndex("model.bf16", [0])]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"holds bfloat16 of shape \(3,\), but \.metadata says float32"):
        manifest_from_dcp(storage_of(folder))


def test_missing_and_short_files_are_reported(folder):
    contents = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(contents[:-300])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: .*the blob ends at byte \d+, but the file at \d+"):
        manifest_from_dcp(storage_of(folder))
    (folder / "__0_0.distcp").unlink()
    reported = []
    manifest_from_dcp(storage_of(folder), on_damage=lambda *damage: reported.append(damage))
    assert {key for _, key, _, _ in reported} == {*flat(), "step", "rng", "list.1.k"}
    assert {(file, rank, what) for file, _, rank, what in reported} == {("__0_0.distcp", 0, "the file is missing")}


def test_megatrons_own_metadata_class_is_known_without_megatron(folder, monkeypatch):
    name = "megatron.core.dist_checkpointing.strategies.torch"
    megatron = types.ModuleType(name)
    megatron.MCoreMetadata = type("MCoreMetadata", (Metadata,), {"__module__": name})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.__class__ = megatron.MCoreMetadata
    item = WriteItem(MetadataIndex("x"), WriteItemType.SHARD, tensor_data=None)
    metadata.mcore_data = {"model.w": {}}
    metadata.all_local_plans = [SavePlan([item], storage_data=_StoragePrefix("__0_"))]
    with monkeypatch.context() as patch:
        for part in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
            patch.setitem(sys.modules, f"{part}", types.ModuleType(part))
        patch.setitem(sys.modules, "megatron.core.dist_checkpointing.strategies", types.ModuleType("strategies"))
        patch.setitem(sys.modules, name, megatron)
        data = pickle.dumps(metadata)
    assert b"MCoreMetadata" in data
    assert read_metadata(data, "m").tensors.keys() == flat().keys()


def test_ranks_are_read_from_names():
    names = ["__3_0.distcp", "__RANK_12.distcp", "common.pt", "__x_0.distcp"]
    assert [rank_of(name) for name in names] == [3, 12, -1, -1]


def test_the_sizes_of_elements_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES
