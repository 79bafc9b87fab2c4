from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from rankbook.checkpoint.storage import ASIDE, Storage, backends, read_all
from rankbook.checkpoint.storage.backends import LocalStorage, RemoteStorage, storage_of


@pytest.fixture(params=["local", "local without exchange", "memory"])
def storage(request, tmp_path, monkeypatch) -> Storage:
    if request.param == "memory":
        return storage_of(f"memory://{uuid.uuid4().hex}/run")
    if request.param == "local without exchange":
        monkeypatch.setattr(backends, "_exchange", lambda *_: False)
    return storage_of(tmp_path / "run")


def read(storage, path, start, length):
    buffer = bytearray(length)
    return bytes(buffer[: storage.read(path, start, memoryview(buffer))])


def test_written_bytes_can_be_read_by_range(storage):
    parts = [b"abc", bytearray(b"def"), memoryview(b"ghi"), memoryview(np.arange(4, dtype=np.uint8).reshape(2, 2)), b""]
    assert storage.write("a/b/file", parts) == 13
    assert read(storage, "a/b/file", 0, 13) == b"abcdefghi\0\1\2\3"
    assert read(storage, "a/b/file", 2, 3) == b"cde"
    assert read(storage, "a/b/file", 11, 9) == b"\2\3"
    assert read(storage, "a/b/file", 20, 9) == b""
    assert read_all(storage, "a/b/file") == b"abcdefghi\0\1\2\3"


def test_a_range_lands_in_memory_that_is_there(storage):
    storage.write("file", [memoryview(np.arange(10, dtype=np.float32))])
    target = np.zeros((2, 3), dtype=np.float32)
    assert storage.read("file", 8, memoryview(target)) == 24
    assert target.tolist() == [[2, 3, 4], [5, 6, 7]]


def test_many_parts_and_a_generator_of_them(storage):
    assert storage.write("file", (b"%04d" % n for n in range(3000))) == 12000
    assert read(storage, "file", 4 * 2999, 10) == b"2999"


def test_a_folder_lists_names_sizes_and_folders(storage):
    storage.write("a/one", [b"1"])
    storage.write("a/b/two", [b"22"])
    assert storage.list("a") == {"one": 1, "b": None}
    assert storage.list() == {"a": None}
    assert storage.list("nowhere") == {}


def test_a_link_to_itself_is_listed_as_a_file(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    storage = LocalStorage(tmp_path)
    storage.write("folder/file", [b"x"])
    assert storage.list() == {"loop": len("loop"), "folder": None}


def test_a_write_replaces_the_file(storage):
    storage.write("file", [b"a long one"])
    storage.write("file", [b"short"])
    assert read_all(storage, "file") == b"short"


def test_remove_takes_files_and_folders_and_what_is_not_there(storage):
    storage.write("a/one", [b"1"])
    storage.write("a/b/two", [b"2"])
    storage.remove("a/one")
    assert storage.list("a") == {"b": None}
    storage.remove("a")
    assert storage.list() == {}
    storage.remove("a")


def test_a_folder_and_a_file_move(storage):
    storage.write("a/one", [b"1"])
    storage.write("a/b/two", [b"2"])
    storage.move("a", "c")
    storage.move("c/one", "c/three")
    assert storage.list() == {"c": None}
    assert storage.list("c") == {"three": 1, "b": None}
    assert read_all(storage, "c/b/two") == b"2"


def test_move_replaces_the_target(storage):
    for folder in ("old", "new"):
        storage.write(f"{folder}/manifest.json", [folder.encode()])
        storage.write(f"{folder}/only {folder}", [b"1"])
        storage.write(f"{folder} file", [folder.encode()])
    storage.move("new", "old")
    storage.move("new file", "old file")
    assert storage.list() == {"old": None, "old file": 3}
    assert storage.list("old") == {"manifest.json": 3, "only new": 1}
    assert read_all(storage, "old/manifest.json") == read_all(storage, "old file") == b"new"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_move_replaces_no_local_folder_by_a_file(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(backends, "_exchange", lambda *_: False)
    storage = LocalStorage(tmp_path)
    storage.write("folder/file", [b"valuable"])
    storage.write("new", [b"x"])
    with pytest.raises(IsADirectoryError, match="folder"):
        storage.move("new", "folder")
    assert read_all(storage, "folder/file") == b"valuable"
    (tmp_path / "link").symlink_to("folder")
    storage.move("new", "link")
    assert storage.list() == {"folder": None, "link": 1}


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../b", "a\0b"])
def test_paths_outside_the_storage_are_refused(storage, path):
    with pytest.raises(OSError, match="not a path inside"):
        storage.write(path, [b"x"])
    with pytest.raises(OSError, match="not a path inside"):
        read(storage, path, 0, 1)


def test_a_missing_file_is_named(storage):
    with pytest.raises(FileNotFoundError, match="no/such"):
        read(storage, "no/such", 0, 1)
    with pytest.raises(FileNotFoundError, match="no/such"):
        storage.move("no/such", "b")


def test_a_write_that_fails_leaves_nothing(storage):
    def parts():
        yield b"abc" * 1000
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device.*a/file"):
        storage.write("a/file", parts())
    assert storage.list("a") == {}


def test_a_disk_that_fails_is_named_with_its_file(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    real = os.fsync

    def fail(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_file():
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error.*a/file") as caught:
        storage.write("a/file", [b"x"])
    assert caught.value.errno == errno.EIO
    assert storage.list("a") == {}


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: real(descriptor, [bytes(parts[0][:7])]))
    storage = LocalStorage(tmp_path)
    parts = [bytes([n]) * 10 for n in range(20)]
    assert storage.write("file", parts) == 200
    assert read_all(storage, "file") == b"".join(parts)


def test_the_file_and_every_new_folder_are_made_durable(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), real(fd)))
    LocalStorage(tmp_path).write("a/b/file", [b"x"])
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a/b/file", tmp_path / "a/b"]


def test_two_folders_are_exchanged_atomically(tmp_path, monkeypatch):
    """The moment before the old one is removed: the new one has its name."""
    storage = LocalStorage(tmp_path)
    storage.write("old/manifest.json", [b"old"])
    storage.write("new/manifest.json", [b"new"])
    monkeypatch.setattr(backends, "_remove_folder", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        storage.move("new", "old")
    assert read_all(storage, "old/manifest.json") == b"new"
    assert read_all(storage, "new/manifest.json") == b"old"


@pytest.mark.parametrize("broken_off", range(1, 3))
def test_move_without_exchange_keeps_one_folder_readable_at_all_times(tmp_path, monkeypatch, broken_off):
    storage = LocalStorage(tmp_path)
    storage.write("old/manifest.json", [b"old"])
    storage.write("new/manifest.json", [b"new"])
    calls = []
    real = backends.Path.rename

    def rename(self, target):
        calls.append(target)
        if len(calls) == broken_off:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(backends, "_exchange", lambda *_: False)
    monkeypatch.setattr(backends.Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        storage.move("new", "old")
    where = "old" if broken_off == 1 else "old" + ASIDE
    assert read_all(storage, f"{where}/manifest.json") == b"old"


def test_remove_deletes_the_manifest_first(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    for name in ("manifest.json", ".metadata", "data"):
        storage.write(f"step/{name}", [b"x"])
    monkeypatch.setattr(backends.shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        storage.remove("step")
    assert storage.list("step") == {"data": 1}


def test_remote_move_copies_the_manifest_last(monkeypatch):
    storage = RemoteStorage(f"memory://{uuid.uuid4().hex}")
    for name in ("manifest.json", ".metadata", "zzz", "a/b"):
        storage.write(f"new/{name}", [b"x"])
    copied = []
    real = storage._filesystem.cp_file
    monkeypatch.setattr(
        storage._filesystem, "cp_file", lambda one, two: (copied.append(one.rpartition("/new/")[2]), real(one, two))
    )
    storage.move("new", "old")
    assert copied == ["a/b", "zzz", ".metadata", "manifest.json"]


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?"])
def test_signs_of_patterns_in_a_url_mean_themselves(name):
    base = f"memory://{uuid.uuid4().hex}"
    other, storage = storage_of(f"{base}/run1"), storage_of(f"{base}/{name}")
    for folder in ("new", "old"):
        other.write(f"{folder}/manifest.json", [b"other"])
        storage.write(f"{folder}/manifest.json", [folder.encode()])
        storage.write(f"{folder}/[a]/b*", [b"x"])
    storage.move("new", "old")
    assert read_all(storage, "old/manifest.json") == b"new"
    assert storage.list("old") == {"manifest.json": 3, "[a]": None}
    storage.move("old/manifest.json", "old/[a]/c?")
    assert storage.list("old/[a]") == {"b*": 1, "c?": 3}
    storage.remove("old/[a]/b*")
    storage.remove("old")
    assert storage.list() == {}
    assert other.list("new") == other.list("old") == {"manifest.json": 5}


def test_errors_of_a_remote_client_become_oserror_with_the_path(monkeypatch):
    storage = RemoteStorage("memory://bucket/run")
    monkeypatch.setattr(storage._filesystem, "cat_file", lambda *_, **__: (_ for _ in ()).throw(ValueError("403")))
    with pytest.raises(OSError, match=r"ValueError: 403.*memory://bucket/run/a/file"):
        read(storage, "a/file", 0, 1)


def test_a_relative_folder_is_not_changed_by_a_later_chdir(tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    storage = storage_of("run")
    monkeypatch.chdir(tmp_path / "other")
    storage.write("step/data", [b"x"])
    storage.move("step", "moved")
    assert (tmp_path / "one/run/moved/data").read_bytes() == b"x"
    assert (list(storage.list()), list((tmp_path / "other").iterdir()), str(storage)) == (["moved"], [], "run")


def test_a_storage_is_reported_by_how_it_is_named(tmp_path):
    assert isinstance(storage_of("memory://x"), RemoteStorage)
    assert str(storage_of(f"file://{tmp_path}")) == str(storage_of(tmp_path)) == str(tmp_path)
    assert isinstance(storage_of(f"local://{tmp_path}"), LocalStorage)  # fsspec's other name of the same
    storage = LocalStorage(tmp_path)
    assert storage_of(storage) is storage
