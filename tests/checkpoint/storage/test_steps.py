from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from itertools import count

import numpy as np
import pytest

from rankbook import process_identity
from rankbook.checkpoint.storage import NewFiles, backends, read_all, steps
from rankbook.checkpoint.storage.backends import RemoteStorage, storage_of
from rankbook.errors import CheckpointError, InvalidArgument


@pytest.fixture(params=["local", "local without exchange", "memory"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "memory":
        return storage_of(f"memory://{uuid.uuid4().hex}/run")
    if request.param == "local without exchange":
        monkeypatch.setattr(backends, "_exchange", lambda *_: False)
    return storage_of(tmp_path / "run")


def write_step(storage, step, content=b"x"):
    folder = steps.begin_step(storage, step)
    storage.write(f"{folder}/__RANK_0.distcp", [content])
    storage.write(f"{folder}/manifest.json", [content])
    return folder


def save(storage, step, content=b"x"):
    write_step(storage, step, content)
    steps.commit_step(storage, step)


class WithoutCreate:
    """A storage that has only the methods of the protocol."""

    def __init__(self, storage):
        self.list, self.write = storage.list, storage.write


def test_a_new_file_is_written_once_and_its_bytes_are_counted(storage):
    for name, below in (("a", storage), ("b", WithoutCreate(storage))):
        parts = (part for part in (b"four", np.ones(3, np.float32)))
        assert NewFiles(below).write(f"folder/{name}", parts) == 16
        assert read_all(storage, f"folder/{name}")[:4] == b"four"
        with pytest.raises(FileExistsError):
            NewFiles(below).write(f"folder/{name}", [b"other"])


def test_a_saved_step_is_finished_and_the_latest(storage):
    save(storage, 40)
    save(storage, 50)
    assert steps.finished_steps(storage) == [40, 50]
    assert steps.read_latest(storage) == 50
    assert steps.locate(storage) == "step-50"
    assert steps.locate(storage, 40) == "step-40"
    assert steps.list_partials(storage) == []
    assert set(storage.list()) == {"latest", "step-40", "step-50"}
    assert read_all(storage, "latest") == b"step-50 crc32=5ecf2517\n"


def test_steps_are_ordered_by_number(storage):
    for step in (9, 10, 100, 0):
        save(storage, step)
    assert steps.finished_steps(storage) == [0, 9, 10, 100]
    assert steps.read_latest(storage) == 0


def test_an_empty_folder_has_no_step(storage):
    assert steps.finished_steps(storage) == []
    assert steps.read_latest(storage) is None
    with pytest.raises(CheckpointError, match="no checkpoint found; finished steps: none"):
        steps.locate(storage)


def test_highest_step_is_used_without_latest(storage):
    save(storage, 50)
    save(storage, 40)
    storage.remove("latest")
    assert steps.read_latest(storage) == 50


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"step-40",
        b"step-40 crc32=00000000\n",
        b"step-41 crc32=9a2fb6db\n",
        b"\xff\xfe\n",
        b"step-40 crc32=zzzzzzzz\n",
    ],
)
def test_damaged_latest_is_reported_with_the_existing_steps(storage, line):
    save(storage, 40)
    storage.write("latest", [line])
    with pytest.raises(CheckpointError, match=r"/latest: the file is damaged: .*; finished steps: 40; load a step by"):
        steps.locate(storage)
    assert steps.locate(storage, 40) == "step-40"


def test_every_flipped_bit_of_latest_is_found(storage):
    save(storage, 40)
    line = read_all(storage, "latest")
    for bit in range(8 * len(line)):
        damaged = bytearray(line)
        damaged[bit // 8] ^= 1 << bit % 8
        storage.write("latest", [damaged])
        with pytest.raises(CheckpointError, match="damaged"):
            steps.read_latest(storage)


def test_latest_that_names_a_removed_step_is_an_error(storage):
    save(storage, 30)
    save(storage, 40)
    storage.remove("step-40")
    with pytest.raises(
        CheckpointError, match="latest names step 40, which is missing or not finished; finished steps: 30"
    ):
        steps.locate(storage)


def test_the_latest_step_is_found_while_another_process_saves_the_next_one_and_removes_it(storage, monkeypatch):
    save(storage, 10)
    read_latest = steps.read_latest

    def read_before_the_next_save(of):
        monkeypatch.setattr(steps, "read_latest", read_latest)
        latest = read_latest(of)
        save(storage, 20)
        steps.retain(storage, keep=1)
        return latest

    monkeypatch.setattr(steps, "read_latest", read_before_the_next_save)
    assert steps.locate(storage) == "step-20"


def test_a_folder_without_manifest_is_no_finished_step(storage):
    save(storage, 40)
    storage.write("step-60/.metadata", [b"x"])
    write_step(storage, 50)
    assert steps.finished_steps(storage) == [40]
    assert steps.list_partials(storage) == ["step-50.partial"]
    with pytest.raises(
        CheckpointError,
        match=r"no finished step 60; finished steps: 40; not finished: step-50\.partial; step-60/.* is missing",
    ):
        steps.folder_of(storage, 60)


@pytest.mark.parametrize(
    "path",
    [
        "step-100/.metadata",  # of torch.distributed.checkpoint
        "step-100/model.pt",
        "step-100/__0_0.distcp",  # a step that is being copied, whose manifest has not arrived
        "step-100.old/manifest.json",  # a copy that the user has made
        "step-100.old/model.pt",
        "step-100.latest/model.pt",
    ],
)
def test_what_rankbook_has_not_written_stays_when_it_saves_removes_and_sweeps(storage, path):
    storage.write(path, [b"valuable"])
    for step in (5, 100) if path.startswith("step-100.old") else (5, 6):
        save(storage, step)
        save(storage, step)
    (swept,) = [steps.sweep(storage)]
    steps.remove(storage, step)
    assert (swept, steps.sweep(storage), steps.list_partials(storage)) == ([], [], [])
    assert steps.finished_steps(storage) == [5]
    assert read_all(storage, path) == b"valuable"


@pytest.mark.parametrize("path", ["step-100/.metadata", "step-100/__0_0.distcp", "step-100"])
def test_a_save_does_not_replace_a_step_that_another_program_has_written(storage, path):
    storage.write(path, [b"valuable"])
    with pytest.raises(CheckpointError, match=r"step-100 is not a finished step of Rankbook, it has no manifest\.json"):
        steps.begin_step(storage, 100)
    assert list(storage.list()) == ["step-100"]
    storage.remove("step-100")
    write_step(storage, 100)
    storage.write(path, [b"valuable"])  # while the save is running
    with pytest.raises(CheckpointError, match="move or remove it, or save another step"):
        steps.commit_step(storage, 100)
    steps.abandon_step(storage, 100)
    assert list(storage.list()) == ["step-100"]
    assert read_all(storage, path) == b"valuable"


def test_a_save_does_not_replace_a_folder_named_latest(storage):
    storage.write("latest/model.pt", [b"valuable"])
    with pytest.raises(CheckpointError, match=r"latest is a folder, .*: move the folder, or save into another"):
        steps.begin_step(storage, 1)
    assert storage.list() == {"latest": None}
    storage.remove("latest")
    write_step(storage, 1)
    storage.write("latest/model.pt", [b"valuable"])  # while the save is running
    with pytest.raises(CheckpointError, match=r"latest is a folder"):
        steps.commit_step(storage, 1)
    steps.abandon_step(storage, 1)
    assert storage.list() == {"latest": None}
    assert read_all(storage, "latest/model.pt") == b"valuable"


def test_a_step_that_could_only_be_half_moved_is_removed_when_its_save_ends(storage, monkeypatch):
    write_step(storage, 50)

    def move(source, target):
        storage.write("step-50/__RANK_0.distcp", [b"half"])
        raise OSError(errno.EIO, "gone", source)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "move", move)
        with pytest.raises(OSError, match="gone"):
            steps.commit_step(storage, 50)
    steps.abandon_step(storage, 50)
    assert storage.list() == {}


def test_a_step_is_removed_although_the_disk_is_full(storage, monkeypatch):
    def write(path, parts):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    for step in (40, 50):
        save(storage, step)
    monkeypatch.setattr(storage, "write", write)
    steps.remove(storage, 40)
    assert set(storage.list()) == {"latest", "step-50"}


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_a_folder_that_is_a_checkpoint_itself_is_one(storage, name):
    storage.write(name, [b"x"])
    assert steps.locate(storage) == ""
    with pytest.raises(CheckpointError, match="no finished step 40"):
        steps.locate(storage, 40)


def test_a_step_without_its_manifest_is_not_committed(storage):
    folder = steps.begin_step(storage, 40)
    storage.write(f"{folder}/__RANK_0.distcp", [b"x"])
    with pytest.raises(CheckpointError, match=r"step-40\.partial has no manifest.json"):
        steps.commit_step(storage, 40)
    steps.abandon_step(storage, 40)
    assert storage.list() == {}


class Killed(BaseException):
    pass


def broken_off_after(storage, monkeypatch, operations):
    """Interrupt the storage after `operations` operations, counting single system calls."""
    numbers = count()

    def limited(real):
        def call(*args, **kwargs):
            if next(numbers) >= operations:
                raise Killed
            return real(*args, **kwargs)

        return call

    if isinstance(storage, RemoteStorage):
        for name in ("open", "cp_file", "rm_file", "rmdir"):
            monkeypatch.setattr(storage._filesystem, name, limited(getattr(storage._filesystem, name)))
        return
    for name in ("rename", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(backends.Path, name, limited(getattr(backends.Path, name)))
    monkeypatch.setattr(backends, "_exchange", limited(backends._exchange))
    monkeypatch.setattr(backends, "_write_all", limited(backends._write_all))
    monkeypatch.setattr(backends.shutil, "rmtree", limited(backends.shutil.rmtree))


def read_complete_step(storage, folder):
    """The content that all files of a step have in common."""
    assert set(storage.list(folder)) == {"__RANK_0.distcp", "manifest.json"}
    contents = {read_all(storage, f"{folder}/{name}") for name in storage.list(folder)}
    assert len(contents) == 1
    return contents.pop()


@pytest.mark.parametrize("step", [40, 50], ids=["the same step again", "another step"])
def test_kill_at_any_moment_of_a_save_leaves_a_complete_step(storage, monkeypatch, step):
    for operations in count():
        storage.remove("")
        save(storage, 40, b"old")
        with monkeypatch.context() as patch:
            broken_off_after(storage, patch, operations)
            try:
                save(storage, step, b"new")
            except Killed:
                done = False
            else:
                done = True
        steps._active_claims.clear()  # the process is gone
        latest = steps.read_latest(storage)
        content = read_complete_step(storage, steps.locate(storage))
        assert (latest, content) in {(40, b"old"), (step, b"new")}
        assert not done or (latest, content) == (step, b"new")

        steps.sweep(storage)
        assert steps.list_partials(storage) == []
        assert (steps.read_latest(storage), read_complete_step(storage, steps.locate(storage))) == (latest, content)
        assert set(storage.list()) <= {"latest", "step-40", "step-50"}
        save(storage, step, b"third")
        assert read_complete_step(storage, steps.locate(storage)) == b"third"
        if done:
            break
    assert operations >= 6


def test_kill_at_any_moment_of_a_removal_leaves_the_other_steps_complete(storage, monkeypatch):
    for operations in count():
        storage.remove("")
        for step in (30, 40):
            save(storage, step, b"%d" % step)
        with monkeypatch.context() as patch:
            broken_off_after(storage, patch, operations)
            try:
                steps.remove(storage, 40)
            except Killed:
                done = False
            else:
                done = True
        latest = steps.read_latest(storage)
        assert read_complete_step(storage, steps.locate(storage)) == b"%d" % latest
        steps.sweep(storage)
        assert steps.list_partials(storage) == []
        for step in steps.finished_steps(storage):
            assert read_complete_step(storage, steps.folder_of(storage, step)) == b"%d" % step
        if done:
            break
    assert steps.finished_steps(storage) == [30]
    assert operations >= 3


def test_step_that_was_moved_aside_is_loaded_and_restored(storage):
    save(storage, 40, b"old")
    storage.move("step-40", "step-40.replaced")
    storage.write("step-40/__RANK_0.distcp", [b"half"])
    assert steps.finished_steps(storage) == [40]
    assert read_complete_step(storage, steps.locate(storage)) == b"old"
    assert steps.sweep(storage) == []
    assert set(storage.list()) == {"latest", "step-40"}
    assert read_complete_step(storage, "step-40") == b"old"


def test_a_save_of_this_process_is_not_swept_until_it_ends(storage):
    save(storage, 40)
    write_step(storage, 50)
    assert steps.sweep(storage) == []
    with pytest.raises(CheckpointError, match=rf"step 50 is being saved by process {os.getpid()} on "):
        steps.begin_step(storage, 50)
    steps.abandon_step(storage, 50)
    assert set(storage.list()) == {"latest", "step-40"}
    write_step(storage, 50)
    steps.commit_step(storage, 50)


@pytest.mark.processes
def test_partial_save_is_removed_only_if_its_process_is_dead(storage):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        write_step(storage, 50)
        own_identity = steps.lock_owner(storage, "step-50.partial.owner")
        other_identity = steps.WriterIdentity(
            **asdict(own_identity) | {"pid": other.pid, "started": process_identity.start_time_of(other.pid)}
        )
        storage.write("step-50.partial.owner", [json.dumps(asdict(other_identity)).encode()])
        assert steps.sweep(storage) == []
        assert steps.writer_of(storage, "step-50.partial") == other_identity
        other.communicate(b"\n")
    assert steps.writer_of(storage, "step-50.partial") is None
    assert steps.sweep(storage) == ["step-50.partial", "step-50.partial.owner"]
    assert storage.list() == {}


def test_a_step_that_is_being_moved_to_its_name_is_not_swept(storage):
    save(storage, 40)
    write_step(storage, 50)
    storage.write("step-50/__RANK_0.distcp", [b"half"])
    storage.write("step-50.replaced/manifest.json", [b"x"])
    assert steps.sweep(storage) == []
    assert {"step-50", "step-50.replaced", "step-50.partial"} <= storage.list().keys()
    storage.remove("step-50.partial.owner")
    assert steps.sweep(storage) == ["step-50.partial"]
    assert steps.finished_steps(storage) == [40, 50]


def test_reused_process_id_is_not_taken_for_the_writer(storage):
    write_step(storage, 50)
    identity = steps.lock_owner(storage, "step-50.partial.owner")
    assert identity.is_alive()
    assert not steps.WriterIdentity(**asdict(identity) | {"pid": 1}).is_alive()


def test_partial_save_of_another_machine_is_kept_for_a_day(storage):
    write_step(storage, 50)
    identity = steps.lock_owner(storage, "step-50.partial.owner")
    remote_fields = asdict(identity) | {"machine": "another"}
    assert steps.WriterIdentity(**remote_fields).is_alive()
    assert not steps.WriterIdentity(**remote_fields | {"since": time.time() - 2 * steps.PATIENCE}).is_alive()
    assert not steps.WriterIdentity(**remote_fields | {"since": time.time() - 60}).is_alive(patience=30)


def test_aborted_save_is_removed_unless_keep_is_requested(storage):
    write_step(storage, 50)
    storage.remove("step-50.partial.owner")
    storage.write("step-60.partial/x", [b"x"])
    storage.write("step-60.partial.owner", [b"{cut o"])
    storage.write("notes.partial/mine", [b"x"])
    storage.write("step-7x/mine", [b"x"])
    assert steps.sweep(storage, keep=[50]) == ["step-60.partial", "step-60.partial.owner"]
    assert steps.sweep(storage) == ["step-50.partial"]
    assert set(storage.list()) == {"notes.partial", "step-7x"}


def test_retention_keeps_the_newest_steps_and_multiples(storage):
    for step in range(500, 5001, 500):
        save(storage, step)
    assert steps.retain(storage, keep=3, keep_every=1000) == [500, 1500, 2500, 3500]
    assert steps.finished_steps(storage) == [1000, 2000, 3000, 4000, 4500, 5000]
    assert steps.retain(storage, keep=3, keep_every=1000) == []
    assert steps.retain(storage, keep=None) == []
    assert steps.retain(storage, keep=1) == [1000, 2000, 3000, 4000, 4500]


def test_retention_keeps_steps_above_the_latest(storage):
    for step in (10, 20, 30, 40, 25, 27):
        save(storage, step)
    assert steps.retain(storage, keep=2) == [10, 20]
    assert steps.finished_steps(storage) == [25, 27, 30, 40]
    assert steps.read_latest(storage) == 27


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": 2, "keep_every": 0}])
def test_keep_of_zero_is_refused(storage, wrong):
    with pytest.raises(InvalidArgument, match="must be None or an integer >= 1, got 0"):
        steps.retain(storage, **wrong)
    with pytest.raises(InvalidArgument, match="-1"):
        steps.step_name(-1)


def test_removing_the_latest_step_updates_latest(storage):
    for step in (10, 20, 30):
        save(storage, step)
    steps.remove(storage, 30)
    assert steps.read_latest(storage) == 20
    steps.remove(storage, 10)
    assert steps.read_latest(storage) == 20
    steps.remove(storage, 20)
    assert storage.list() == {}
    with pytest.raises(CheckpointError, match="no finished step 20"):
        steps.remove(storage, 20)
