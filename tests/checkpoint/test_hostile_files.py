"""Test malformed checkpoints: damage is named, nothing blocks, and memory is bounded by the file sizes."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from rankbook.checkpoint import CheckpointError, ShardedObject, ShardedTensor, load, load_plain, save, verify
from rankbook.checkpoint.format import manifest as manifests
from rankbook.checkpoint.format.dcp_metadata import read_metadata
from rankbook.checkpoint.format.torch_zip import check_opcodes
from rankbook.checkpoint.storage.backends import LocalStorage, storage_of
from rankbook.cli import main as cli
from tests.checkpoint.hand_made import write_checkpoint


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "run", 3)
    return tmp_path / "run"


def forge(folder, change):
    """Change the manifest, and give it a right checksum."""
    path = folder / "step-3/manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["crc32"]
    change(fields)
    body = json.dumps(fields, separators=(",", ":")).encode()[:-1] + b",\n"
    path.write_bytes(body + b'"crc32":"%08x"}\n' % zlib.crc32(body))


KEY = "model.1.w"


def chunk_of(fields):
    return fields["tensors"][KEY]["chunks"][0]


FORGERIES = {
    "an index of a file that is not there": lambda f: chunk_of(f).update(file=99),
    "a negative index": lambda f: chunk_of(f).update(file=-1),
    "an index of more than 64 bits": lambda f: chunk_of(f).update(file=2**200),
    "an offset outside": lambda f: chunk_of(f).update(offset=[99, 0]),
    "a negative offset": lambda f: chunk_of(f).update(offset=[-1, 0]),
    "an offset of another rank": lambda f: chunk_of(f).update(offset=[0]),
    "a shape of too many axes": lambda f: chunk_of(f).update(shape=[8, 6, 1]),
    "a start before the file": lambda f: chunk_of(f).update(start=-5),
    "a start behind the file": lambda f: chunk_of(f).update(start=2**40),
    "a start of more than 64 bits": lambda f: chunk_of(f).update(start=2**70),
    "a length of a terabyte": lambda f: chunk_of(f).update(length=2**40),
    "data before its blob": lambda f: chunk_of(f).update(data=0, start=4),
    "data of a terabyte": lambda f: chunk_of(f).update(nbytes=2**40),
    "too few checksums": lambda f: chunk_of(f).update(pieces=[]),
    "strides of 0": lambda f: chunk_of(f).update(strides=[0, 0]),
    "strides that overlap": lambda f: chunk_of(f).update(strides=[1, 1]),
    "strides of too few axes": lambda f: chunk_of(f).update(strides=[0]),
    "negative strides": lambda f: chunk_of(f).update(strides=[-6, 1]),
    "a rank of more than 64 bits": lambda f: chunk_of(f).update(rank=2**80),
    "a tensor of an exabyte": lambda f: f["tensors"][KEY].update(shape=[2**50, 2**50]),
    "a tensor that is larger than its chunks": lambda f: f["tensors"][KEY].update(shape=[99, 6]),
    "chunks that overlap": lambda f: f["tensors"][KEY]["chunks"][1].update(offset=[0, 0]),
    "an unknown dtype": lambda f: f["tensors"][KEY].update(dtype="\x1b[2Jfloat31"),
    "an object in a file that is not there": lambda f: f["objects"]["rng/shard_0_2"].update(file=7),
    "an object of a terabyte": lambda f: f["objects"]["rng/shard_0_2"].update(length=2**40),
    "an object before the file": lambda f: f["objects"]["rng/shard_0_2"].update(start=-1),
    "a file out of the folder": lambda f: f["files"][0].update(name="../../etc/passwd"),
    "a file without a name": lambda f: f["files"][0].update(name=""),
    "a file of negative size": lambda f: f["files"][0].update(size=-1),
    "a file of an exabyte": lambda f: f["files"][0].update(size=2**60),
    "a value that is no object": lambda f: f.update(values={"nothing": ["a"]}),
    "a value without a path": lambda f: f.update(values={"rng/shard_0_2": []}),
    "a step without end": lambda f: f.update(step=10**40),
    "a negative world": lambda f: f.update(world_size=-1),
}


def run_cli(capsys, *arguments):
    code = cli.main(["checkpoint", *map(str, arguments)])
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    assert "\x1b" not in output.out + output.err
    return code, output.out + output.err


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_manifest_with_a_right_checksum_is_refused_and_named(folder, capsys, what):
    forge(folder, FORGERIES[what])
    report = verify(folder)
    assert not report.ok
    assert "manifest" in str(report)
    if "model.1.w" in str(FORGERIES[what]) or "chunk" in what:
        assert KEY in str(report)
    with pytest.raises(CheckpointError):
        load_plain(folder)
    live = {KEY: ShardedTensor.from_rank_offsets(KEY, torch.full((16, 6), 7.0))}
    with pytest.raises(CheckpointError):
        load(live, folder, strict="raise_unexpected")
    assert (live[KEY].data == 7.0).all()
    assert run_cli(capsys, "verify", folder)[0] == 1
    for action in ("ls", "show"):
        assert run_cli(capsys, action, folder)[0] in {0, 2}
    assert run_cli(capsys, "convert", folder, folder.parent / "out")[0] == 2


def test_file_that_is_shorter_than_the_manifest_says_takes_no_memory(folder):
    """Load a manifest that says that a file of some hundred bytes holds a tensor of 64 GiB."""

    def grow(fields):
        chunk = chunk_of(fields)
        rows = 2**28
        fields["tensors"][KEY]["shape"] = [rows, 64]
        fields["tensors"][KEY]["chunks"] = [chunk]
        nbytes = rows * 64 * 4
        chunk.update(
            offset=[0, 0], shape=[rows, 64], nbytes=nbytes, length=nbytes + 1000, pieces=[1], start=0, data=500
        )
        fields["files"][0]["size"] = 2**40

    forge(folder, grow)
    with pytest.raises(CheckpointError, match="expected 1099511627776"):
        load_plain(folder)
    assert not verify(folder).ok


def growth(code, *arguments):
    """Return the megabytes that a process needs more for the code than once everything is imported."""
    script = (
        "import resource, sys\n"
        "import rankbook.checkpoint.loading\n"
        "from rankbook.checkpoint import verify\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        f"before = peak()\n{code}\nprint(peak() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False
    )
    assert not run.returncode, run.stderr
    return float(run.stdout.split()[-1])


BOMB = b"\x80\x02N" + b"r" + struct.pack("<I", 2**27) + b"."


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_nine_bytes_of_metadata_take_no_memory(tmp_path):
    assert len(BOMB) == 9
    (tmp_path / ".metadata").write_bytes(BOMB)
    assert growth("assert not verify(sys.argv[1]).ok", tmp_path) < 100


NESTED = b"\x80\x02)" + b"\x85" * 200_000 + b"}\x86."
DOUBLED = b"\x80\x04)" + b"2\x86" * 60 + b"\x85."


@pytest.mark.parametrize(
    "data",
    [
        BOMB,
        b"\x80\x02N" + b"p99999999\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
        NESTED,
        DOUBLED,
        b"\x80\x02h\x07.",
        b"\x80\x02t.",
        b"\x80\x02R.",
        b"\x80\x02" + b"(" * 100,
        b"",
        b"\xff",
        b"\x82\x01.",
    ],
)
def test_pickle_that_would_take_more_than_its_length_is_refused(data):
    with pytest.raises(CheckpointError):
        check_opcodes(data)
    with pytest.raises(CheckpointError, match="where"):
        read_metadata(data, "where")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_real_pickles_pass(tmp_path):
    import torch.distributed.checkpoint as dcp

    save({f"t{number}": torch.ones(3) for number in range(20)}, tmp_path / "ours", step=0)
    check_opcodes((tmp_path / "ours/step-0/.metadata").read_bytes())
    dcp.save({"a": {"b": [torch.ones(2), 3]}, "c": "x"}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    check_opcodes((tmp_path / "theirs/.metadata").read_bytes())
    value = {"a": [(1, 2.5, None, True), {"k": b"bytes", 2**70: "é" * 300}, {1, 2}, frozenset({3})], "b": bytearray(9)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        check_opcodes(pickle.dumps(value, protocol))


SPECIAL = ["manifest.json", ".metadata", "common.pt", "__RANK_0.distcp", "latest"]


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_pipe_or_device_is_refused_and_not_waited_for(folder, capsys, name, kind):
    path = folder / name if name == "latest" else folder / "step-3" / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert not verify(folder).ok
    with pytest.raises(CheckpointError):
        load_plain(folder)
    assert run_cli(capsys, "verify", folder)[0] in {1, 2}
    run_cli(capsys, "ls", folder)
    with pytest.raises(OSError, match="not a regular file"):
        LocalStorage(path.parent).read(path.name, 0, memoryview(bytearray(9)))


@pytest.mark.parametrize("link", ["step-3", "step-9"])
def test_step_that_is_a_symbolic_link_is_refused_before_a_byte_is_written(folder, tmp_path, link):
    other = tmp_path / "other"
    write_checkpoint(other, 3)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    step = int(link.split("-")[1])
    if link == "step-3":
        (folder / "step-3").rename(folder / "step-2")
    (folder / link).symlink_to(other / "step-3")
    with pytest.raises(CheckpointError, match=f"{link} is a symbolic link; remove it first \\(nothing was written\\)"):
        save({"w": torch.ones(4)}, folder, step=step)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert (folder / link).is_symlink()
    assert not list(folder.glob("*.owner"))


@pytest.mark.parametrize("link", ["step-3.partial", "step-3.replaced"])
def test_rest_of_a_step_that_is_a_symbolic_link_is_removed_and_not_followed(folder, tmp_path, link):
    other = tmp_path / "other"
    write_checkpoint(other, 3)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    (folder / link).symlink_to(other / "step-3")
    save({"w": torch.ones(4)}, folder, step=3)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert not (folder / link).is_symlink()
    assert verify(folder, 3).ok


def test_compressed_object_is_not_inflated(tmp_path):
    import io
    import zipfile

    save({"o": ShardedObject("o", {"a": torch.zeros(2_000_000)}, (1,), (0,)), "n": 1}, tmp_path, step=3)
    manifest = manifests.decode((tmp_path / "step-3/manifest.json").read_bytes(), "")
    common, packed = tmp_path / "step-3/common.pt", io.BytesIO()
    with zipfile.ZipFile(common) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info), compress_type=zipfile.ZIP_DEFLATED)
    common.write_bytes(packed.getvalue())
    number = [file.name for file in manifest.files].index("common.pt")

    def change(fields):
        fields["files"][number].update(size=len(packed.getvalue()), crc=zlib.crc32(packed.getvalue()))

    forge(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"common\.pt.*is not an uncompressed zip file of torch\.save"):
        load_plain(tmp_path)


def random_value(chance, value):
    """Return a value of another type, size or sign."""
    choices = [None, -1, 0, 2**31, 2**63, 2**64, 10**30, 1.5, "x", "", [], {}, [0], [-1], True, [[1]], "../x"]
    if isinstance(value, int):
        choices += [value + 1, value - 1, -value, value * 2**40]
    return chance.choice(choices)


def places(value, path=()):
    """Yield the path of every value in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def test_300_random_changes_of_a_manifest_raise_readable_errors(folder, capsys):
    chance = random.Random(7)
    path = folder / "step-3/manifest.json"
    content, original = path.read_bytes(), load_plain(folder)
    for number in range(300):
        path.write_bytes(content)

        def change(fields):
            key_path = chance.choice([item for item in places(fields) if item])
            owner = fields
            for key in key_path[:-1]:
                owner = owner[key]
            owner[key_path[-1]] = random_value(chance, owner[key_path[-1]])

        forge(folder, change)
        report = verify(folder)
        try:
            loaded = load_plain(folder)
        except CheckpointError:
            loaded = {}
        tensors = {key: item for key, item in loaded.items() if isinstance(item, torch.Tensor) and key in original}
        same = all(torch.equal(element, original[key]) for key, element in tensors.items())
        assert same or not report.ok, (number, str(report))
        if number % 10 == 0:
            for action in ("verify", "ls", "show"):
                run_cli(capsys, action, folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_200_random_changes_of_a_dcp_metadata_raise_readable_errors(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(40, 3), "b": [torch.zeros(2), 3]}, checkpoint_id=tmp_path / "run", no_dist=True)
    chance = random.Random(11)
    files = [tmp_path / "run/.metadata", next((tmp_path / "run").glob("*.distcp"))]
    for number in range(200):
        file = files[number % 2]
        content = file.read_bytes()
        data = bytearray(content)
        for _ in range(chance.choice([1, 1, 4])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        file.write_bytes(data)
        str(verify(tmp_path / "run"))
        try:
            load_plain(tmp_path / "run")
        except CheckpointError:
            pass
        run_cli(capsys, "verify", tmp_path / "run")
        file.write_bytes(content)


def test_latest_without_end_is_damaged_and_not_read(folder):
    line = b"step-" + b"9" * 5000
    (folder / "latest").write_bytes(line + b" crc32=%08x\n" % zlib.crc32(line))
    assert not verify(folder).ok
    with pytest.raises(CheckpointError, match="the file is damaged"):
        load_plain(folder)
    assert (Path(folder) / "step-3").is_dir()
    assert storage_of(folder).list()["latest"] > 5000
