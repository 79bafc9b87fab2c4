from __future__ import annotations

import random
import shutil
import uuid
import warnings
import zlib
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rankbook.checkpoint import inspection as module
from rankbook.checkpoint.format.manifest import PIECE, Chunk, decode, encode, pieces
from rankbook.checkpoint.inspection import check_pieces, damaged_pieces, verify
from rankbook.checkpoint.storage.backends import LocalStorage, storage_of
from rankbook.errors import CheckpointError
from tests.checkpoint.hand_made import write_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_checkpoint(folder, 30, seed=1)
    write_checkpoint(folder, 40, seed=2)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def files_of(run, step=40):
    return [*sorted((run / f"step-{step}").iterdir()), run / "latest"]


def blob_at(run, path, position):
    """The key and the rank that the bytes at a position belong to, by the manifest."""
    if path.suffix != ".distcp":
        return "", None
    manifest = decode((run / "step-40/manifest.json").read_bytes(), "m")
    number = [file.name for file in manifest.files].index(path.name)
    stored = [(key, chunk) for key, tensor in manifest.tensors.items() for chunk in tensor.chunks]
    for key, item in [*stored, *manifest.objects.items()]:
        if item.file == number and item.start <= position < item.start + item.length:
            return key, item.rank
    raise AssertionError(position)


def test_complete_checkpoint_is_ok_and_every_byte_is_checked(run):
    report = verify(run)
    assert report.ok
    assert report.unchecked == 0
    assert report.files == 6
    assert report.nbytes == sum(path.stat().st_size for path in (run / "step-40").iterdir())
    assert str(report) == f"{run}/step-40: intact (6 files, {report.nbytes:,} bytes)"
    assert verify(run, 30).ok
    assert verify(run / "step-40").ok


def test_300_flipped_bits_are_reported_with_file_key_and_rank(run):
    generator = random.Random(0)
    counts = Counter()
    for number in range(300):
        path = generator.choice(files_of(run))
        content = path.read_bytes()
        damaged = bytearray(content)
        position = generator.randrange(len(content))
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        report = verify(run)
        path.write_bytes(content)
        key, rank = blob_at(run, path, position)
        assert [damage.file for damage in report.damages] == [str(path.relative_to(run))], (number, str(report))
        assert report.damages[0].key == key
        assert rank is None or report.damages[0].ranks == (rank,)
        assert report.damages[0].file in str(report) and key in str(report)
        counts[path.name] += 1
    assert len(counts) == 7
    assert verify(run).ok


def test_100_truncations_are_reported_with_file_and_truncated_keys(run):
    generator = random.Random(1)
    for _ in range(100):
        path = generator.choice(files_of(run))
        content = path.read_bytes()
        length = generator.randrange(len(content))
        path.write_bytes(content[:length])
        report = verify(run)
        path.write_bytes(content)
        assert {damage.file for damage in report.damages} == {str(path.relative_to(run))}
        if path.suffix == ".distcp":
            assert f"has {length} bytes, expected {len(content)}" in str(report)
            cut = {blob_at(run, path, position)[0] for position in range(length, len(content), 40)}
            assert {item.key for item in report.damages} == {"", *cut}
    assert verify(run).ok


def test_bytes_appended_to_a_file_are_reported(run):
    path = run / "step-40/__RANK_0.distcp"
    length = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more")
    (damage,) = verify(run).damages
    assert (damage.file, damage.ranks) == ("step-40/__RANK_0.distcp", (0,))
    assert damage.what == f"has {length + 4} bytes, expected {length}"


def test_25_missing_and_25_swapped_files_are_reported_by_name(run):
    generator = random.Random(2)
    for number in range(50):
        path = generator.choice(files_of(run)[: -1 if number % 2 else None])  # a missing `latest` is no damage
        content = path.read_bytes()
        if number % 2:
            path.unlink()
        else:
            candidates = [other for step in (30, 40) for other in files_of(run, step) if other.read_bytes() != content]
            path.write_bytes(generator.choice(candidates).read_bytes())
        report = verify(run)
        path.write_bytes(content)
        assert str(path.relative_to(run)) in {damage.file for damage in report.damages}, (number, path, str(report))
        if number % 2 and path.name != "manifest.json":
            assert "the file is missing" in str(report)
    assert verify(run).ok


def test_the_files_of_two_ranks_swapped_are_both_named(run):
    one, other = run / "step-40/__RANK_0.distcp", run / "step-40/__RANK_1.distcp"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second), other.write_bytes(first)
    report = verify(run)
    assert {damage.file for damage in report.damages} == {"step-40/__RANK_0.distcp", "step-40/__RANK_1.distcp"}
    assert {item.ranks for item in report.damages} == {(0,), (1,)}


def test_two_blobs_of_one_file_swapped_are_both_named(run):
    path = run / "step-40/__RANK_1.distcp"
    manifest = decode((run / "step-40/manifest.json").read_bytes(), "m")
    one, other = (manifest.tensors[key].chunks[1] for key in ("model.0.w", "model.1.w"))
    assert one.length == other.length
    content = path.read_bytes()
    data = bytearray(content)
    data[one.start : one.start + one.length] = content[other.start : other.start + other.length]
    data[other.start : other.start + other.length] = content[one.start : one.start + one.length]
    path.write_bytes(data)
    assert [(damage.key, damage.ranks) for damage in verify(run).damages] == [("model.0.w", (1,)), ("model.1.w", (1,))]


def test_missing_file_is_reported_with_its_keys_and_the_rank_that_wrote_it(run):
    (run / "step-40/__RANK_1.distcp").unlink()
    (damage,) = verify(run).damages
    assert damage.ranks == (1,)
    assert str(damage) == (
        "step-40/__RANK_1.distcp (written by rank 1): the file is missing; it holds model.0.w, model.1.w, model.2.w, "
        "model.3.w, rng/shard_1_2"
    )


def test_surplus_files_with_names_of_the_format_are_named(run):
    names = ("__RANK_7.distcp", "__9_0.distcp")
    for name in names:
        (run / "step-40" / name).write_bytes(b"x")
    assert {damage.file for damage in verify(run).damages} == {f"step-40/{name}" for name in names}


def test_files_of_the_user_beside_a_checkpoint_are_no_damage(run):
    (run / "step-40/note.txt").write_bytes(b"x")
    (run / "step-40/more").mkdir()
    report = verify(run)
    assert report.ok, report
    assert (report.files, report.unchecked) == (7, 1)
    assert "of which 1 have no checksum" in str(report)


def test_a_manifest_of_another_step_is_reported(run):
    shutil.rmtree(run / "step-40")
    shutil.copytree(run / "step-30", run / "step-40")
    (damage,) = verify(run).damages
    assert damage.file == "step-40/manifest.json"
    assert "the manifest is of step 30, but the folder is of step 40" in damage.what


def test_a_missing_manifest_is_reported_and_the_folder_is_not_taken_for_another_programs(run):
    (run / "step-40/manifest.json").unlink()
    for where in (verify(run), verify(run, 40), verify(run / "step-40")):
        (damage,) = where.damages
        assert damage.file.endswith("manifest.json")
        assert "is missing" in damage.what


def test_a_damaged_latest_is_reported_beside_what_the_highest_step_has(run):
    (run / "latest").write_bytes(b"step-4")
    (run / "step-40/common.pt").unlink()
    assert [damage.file for damage in verify(run).damages] == ["latest", "step-40/common.pt"]
    (run / "latest").unlink()
    assert [item.file for item in verify(run).damages] == ["latest", "step-40/common.pt"]


def test_latest_that_names_a_missing_step_is_reported(run):
    shutil.rmtree(run / "step-40")
    report = verify(run)
    assert [(damage.file, damage.what) for damage in report.damages] == [
        ("latest", "names step 40, which does not exist")
    ]
    assert report.where.endswith("step-30")


def test_verify_raises_without_a_checkpoint(run, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no finished step 41; finished steps: 30, 40"):
        verify(run, 41)


def test_inconsistent_manifest_is_reported(run):
    path = run / "step-40/manifest.json"
    manifest = decode(path.read_bytes(), "m")
    text = encode(manifest).replace(b'"dtype":"bfloat16"', b'"dtype":"float64"')
    body = text[:-21]
    path.write_bytes(body + b'"crc32":"%08x"}\n' % zlib.crc32(body))
    assert [(damage.file, damage.key) for damage in verify(run).damages] == [("step-40/manifest.json", "scale")]


def test_bytes_without_an_entry_in_the_manifest_are_reported(run):
    path = run / "step-40/manifest.json"
    manifest = decode(path.read_bytes(), "m")
    last = manifest.objects.pop("rng/shard_1_2")
    del manifest.tensors["model.1.w"]
    path.write_bytes(encode(manifest))
    report = verify(run)
    assert [(damage.file, damage.key) for damage in report.damages] == [
        ("step-40/__RANK_0.distcp", "model.2.w"),
        ("step-40/__RANK_1.distcp", "model.2.w"),
        ("step-40/__RANK_1.distcp", ""),
    ]
    assert report.damages[-1].what.endswith(f"the last blob ends at byte {last.start}")


def test_read_error_of_the_disk_is_reported_with_the_keys(run, monkeypatch):
    real = LocalStorage.read

    def read(self, path, start, into):
        if "RANK_1" in path:
            raise OSError(5, "Input/output error", path)
        return real(self, path, start, into)

    monkeypatch.setattr(LocalStorage, "read", read)
    report = verify(run)
    assert len(report.damages) == 5
    assert {damage.ranks for damage in report.damages} == {(1,)}
    assert "cannot be read: Input/output error" in str(report)


def test_large_chunks_are_read_in_windows_and_reported_by_their_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 4096)
    write_checkpoint(tmp_path, 1, tensors=2, rows=4000)
    write_checkpoint(tmp_path, 2, tensors=40, rows=2)
    assert verify(tmp_path, 1).ok and verify(tmp_path, 2).ok
    path = tmp_path / "step-1/__RANK_0.distcp"
    for position in (50, 70_000, 97_000):
        data = bytearray(path.read_bytes())
        data[position] ^= 4
        path.write_bytes(data)
        (damage,) = verify(tmp_path, 1).damages
        assert (damage.key, damage.ranks) == ("model.0.w", (0,))
        data[position] ^= 4
        path.write_bytes(data)
    path.write_bytes(path.read_bytes()[:50_000])
    assert "are missing: the file is truncated" in str(verify(tmp_path, 1))


def test_other_storages_are_verified_the_same_way():
    storage = storage_of(f"memory://{uuid.uuid4().hex}/run")
    write_checkpoint(storage, 5)
    assert verify(storage).ok
    storage.write("step-5/common.pt", [b"x"])
    assert [damage.file for damage in verify(storage).damages] == ["step-5/common.pt"] * 2


def dcp_saved(folder):
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save({"a": {"w": torch.randn(30, 40), "b": torch.randn(7)}, "n": 3}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_of_dcp_is_verified_as_far_as_its_zips_go(tmp_path):
    report = verify(dcp_saved(tmp_path))
    assert report.ok
    assert 0 < report.unchecked < report.nbytes
    assert "have no checksum" in str(report)
    path = tmp_path / "__0_0.distcp"
    content = path.read_bytes()
    position = content.index(b"data/0") + 600
    for at in (position, position + 3000):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        (damage,) = verify(tmp_path).damages
        assert (damage.file, damage.key, damage.ranks) == ("__0_0.distcp", "a.w", (0,))
    path.write_bytes(content[:-100])
    assert {item.file for item in verify(tmp_path).damages} == {"__0_0.distcp"}
    path.unlink()
    assert {element.key for element in verify(tmp_path).damages} == {"a.w", "a.b", "n"}
    (tmp_path / ".metadata").write_bytes(b"x")
    assert [entry.file for entry in verify(tmp_path).damages] == [".metadata"]


def chunk_of(data):
    return Chunk((0,), (len(data),), 0, 0, len(data) + 20, 10, len(data), pieces(data), None, 3)


def test_a_slice_is_checked_while_it_is_loaded(run):
    data = bytearray(random.Random(0).randbytes(PIECE * 2 + 100))
    chunk = chunk_of(data)
    assert check_pieces(chunk, 1, 3, memoryview(data)[PIECE:]) == ()
    data[2 * PIECE + 1] ^= 1
    assert check_pieces(chunk, 1, 3, memoryview(data)[PIECE:]) == (2,)
    assert check_pieces(chunk, 0, 3, data) == (2,)
    assert check_pieces(chunk, 0, 3, data[:-1] + b"x") == (2,)
    assert check_pieces(chunk, 0, 3, data[:PIECE]) == (1, 2)
    assert check_pieces(chunk_of(b""), 0, 0, b"") == ()
    manifest = decode((run / "step-40/manifest.json").read_bytes(), "m")
    assert str(damaged_pieces(manifest, "w", chunk, (2,), "step-40")) == (
        f"step-40/__RANK_0.distcp: w (written by rank 3): the chunk of shape ({2 * PIECE + 100},) at offset (0,): "
        f"bytes {2 * PIECE + 10} to {2 * PIECE + 109} do not match their checksum"
    )
    assert module.piece_bytes(chunk) == PIECE


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((0, 1), f"bytes 10 to {2 * PIECE + 9} do not"),
        ((0, 2), f"bytes 10 to {PIECE + 9}, {2 * PIECE + 10} to {2 * PIECE + 109} do not"),
        ((2, 1, 0), f"bytes 10 to {2 * PIECE + 109} do not"),
    ],
)
def test_adjacent_damaged_pieces_are_named_as_one_range(run, numbers, named):
    manifest = decode((run / "step-40/manifest.json").read_bytes(), "m")
    chunk = chunk_of(bytes(2 * PIECE + 100))
    assert named in str(damaged_pieces(manifest, "w", chunk, numbers))
