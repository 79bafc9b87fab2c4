"""Test the records of detached clusters: which are trusted, and which are removed."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankbook.errors import StartError
from rankbook.launch import registry
from rankbook.launch.registry import (
    RECORD,
    ClusterRecord,
    DetachedRank,
    find_detached,
    process_start_time,
    write_record,
)
from rankbook.process_identity import OWNER_FILE, claim_folder, hold_folder


@pytest.fixture
def base(short_path, monkeypatch) -> Path:
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    return short_path


def make(base: Path, *, holder: int | None = None, name: str = "abc") -> ClusterRecord:
    """Return a record of a cluster that is held by the process `holder`, by default this one."""
    pid = holder or os.getpid()
    folder = base / f"rankbook-{os.getuid()}-{pid}-{name}"
    folder.mkdir(mode=0o700)
    os.close(claim_folder(folder, pid))
    record = ClusterRecord(
        key=f"7-{name}",
        token="secret",
        seconds=600.0,
        notebook=7,
        forkserver=pid,
        started=process_start_time(pid) or 0.0,
        address=str(folder / "owner"),
        uplink=f"ipc://{folder}/up",
        sockets=str(folder),
        segments=str(folder),
        logs=str(folder),
        master_port=1,
        backend="gloo",
        threads=1,
        ranks=(DetachedRank(0, 1, 11, "cpu"), DetachedRank(1, 2, None, "cpu")),
    )
    write_record(record)
    return record


def change_owner(record: ClusterRecord, **fields: str) -> None:
    file = Path(record.sockets, OWNER_FILE)
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_record_is_found_as_it_was_written_and_only_its_user_can_read_it(base):
    record = make(base)
    other = make(base, name="other")
    assert stat.S_IMODE(Path(record.sockets, RECORD).stat().st_mode) == 0o600
    detached = find_detached()
    assert (set(detached.records), detached.notes) == ({record, other}, ())
    assert record.describe() == "7-abc: 2 ranks on cpu, gloo"
    write_record(dataclasses.replace(record, notebook=8))
    assert {item.notebook for item in find_detached().records} == {7, 8}


def test_a_record_is_found_from_a_process_with_other_folders(short_path, monkeypatch):
    monkeypatch.delenv("RANKBOOK_RUNTIME_DIR", raising=False)
    session, temporary, link = short_path / "session", short_path / "tmp", short_path / "link"
    session.mkdir()
    temporary.mkdir()
    link.symlink_to(temporary)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    # Another name of the folder; the record has the name with which it was made.
    monkeypatch.setattr(registry.tempfile, "gettempdir", lambda: str(link))
    record = make(temporary)
    assert registry.socket_base() == session
    assert [found for found in find_detached().records if found.key == record.key] == [record]
    Path(record.sockets).chmod(0o755)
    detached = find_detached()
    assert record not in detached.records
    assert any("folder is accessible to other users" in note for note in detached.notes)
    Path(record.sockets).chmod(0o700)
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(session))
    assert find_detached().records == ()


def test_record_that_others_could_have_written_is_ignored(base):
    record = make(base)
    folder, file = Path(record.sockets), Path(record.sockets, RECORD)
    for path, mode, words in (
        (file, 0o644, "file is accessible to other users (mode 0644)"),
        (file, 0o640, "file is accessible to other users (mode 0640)"),
        (folder, 0o755, "folder is accessible to other users"),
        (folder, 0o710, "folder is accessible to other users"),
    ):
        was = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        detached = find_detached()
        assert detached.records == ()
        assert words in detached.notes[0]
        path.chmod(was)
    elsewhere = base / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert "it is not a regular file" in find_detached().notes[0]


def test_another_users_record_is_not_believed(base, monkeypatch):
    folder = Path(make(base).sockets)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    folder.rename(base / f"rankbook-{os.getuid()}-1-abc")
    assert "the folder belongs to another user" in find_detached().notes[0]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"ranks": []}', '{"ranks": 3}'])
def test_unreadable_record_is_reported_and_kept(base, text):
    file = Path(make(base).sockets, RECORD)
    file.write_text(text)
    detached = find_detached()
    assert detached.records == ()
    assert "cannot be read" in detached.notes[0]
    assert file.exists()


def test_record_without_the_newer_fields_is_read(base):
    record = make(base)
    file = Path(record.sockets, RECORD)
    fields = json.loads(file.read_text())
    del fields["cuda_devices"]
    for rank in fields["ranks"]:
        del rank["since"], rank["empty"]
    file.write_text(json.dumps(fields))
    assert find_detached().records == (record,)


@pytest.mark.parametrize("version", [None, 1, 99])
def test_ranks_of_another_protocol_version_are_named_and_kept(base, version):
    record = make(base)
    file = Path(record.sockets, RECORD)
    fields = json.loads(file.read_text())
    del fields["protocol"]
    file.write_text(json.dumps(fields if version is None else fields | {"protocol": version, "a field": "of tomorrow"}))
    detached = find_detached()
    assert detached.records == ()
    (note,) = detached.notes
    assert "another version of Rankbook" in note
    assert f"protocol {version or 1}" in note
    assert f"kill {record.forkserver}" in note
    assert file.exists()


def test_ended_ranks_of_another_protocol_version_are_removed(base):
    record = make(base)
    change_owner(record, started="1")
    file = Path(record.sockets, RECORD)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"protocol": 1}))
    detached = find_detached()
    assert (detached.records, detached.notes) == ((), ())
    assert not Path(record.sockets).exists()


def test_record_of_another_folder_is_ignored(base):
    record = make(base)
    file = Path(record.sockets, RECORD)
    file.write_text(file.read_text().replace(record.sockets, "/somewhere"))
    assert "another folder" in find_detached().notes[0]


@pytest.mark.processes
def test_record_of_an_ended_process_is_removed_and_reported(base):
    run = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    record = make(base, holder=int(run.stdout))
    detached = find_detached()
    assert detached.records == ()
    assert detached.notes == ("7-abc: 2 ranks on cpu, gloo: these ranks have exited; their files were removed",)
    assert not Path(record.sockets).exists()
    assert find_detached().notes == ()


@pytest.mark.parametrize(
    ("name", "removed"), [("rankbook-{uid}-1-abc", True), ("rankbook-{other}-1-abc", False), ("data", False)]
)
def test_only_a_segment_folder_with_a_name_of_ours_is_removed_with_its_ended_cluster(base, name, removed):
    record = make(base)
    segments = base / "shm" / name.format(uid=os.getuid(), other=os.getuid() + 1)
    segments.mkdir(parents=True)
    (segments / "file").touch()
    write_record(dataclasses.replace(record, started=record.started - 3600, segments=str(segments)))
    change_owner(record, started="1")
    assert "have exited" in find_detached().notes[0]
    assert not Path(record.sockets).exists()
    assert (segments / "file").exists() is not removed


def test_reused_process_id_is_not_taken_for_the_ended_process(base):
    record = make(base)
    write_record(dataclasses.replace(record, started=record.started - 3600))
    change_owner(record, started="1")
    assert "have exited" in find_detached().notes[0]


def test_a_cluster_is_found_after_the_clock_was_set(base):
    record = make(base)
    write_record(moved := dataclasses.replace(record, started=record.started - 60))
    assert find_detached().records == (moved,)


def test_a_cluster_of_another_pid_namespace_is_reported_and_kept(base):
    record = make(base)
    write_record(dataclasses.replace(record, forkserver=(1 << 22) + 1))
    change_owner(record, machine="another pid namespace")
    detached = find_detached()
    assert detached.records == ()
    assert "is not visible here (another container?)" in detached.notes[0]
    assert Path(record.sockets).exists()


def test_a_lock_that_is_held_keeps_a_cluster_whose_process_cannot_be_found(base):
    record = make(base, holder=(1 << 22) + 1)
    lock = hold_folder(Path(record.sockets))
    assert lock is not None
    assert "is not visible here (another container?)" in find_detached().notes[0]
    os.close(lock)
    assert "have exited" in find_detached().notes[0]


def test_a_folder_that_is_gone_or_full_is_reported(base):
    record = make(base)
    with pytest.raises(StartError, match=r"nowhere/kept\.json"):
        write_record(dataclasses.replace(record, sockets=str(base / "nowhere")))


@pytest.mark.parametrize(
    ("seconds", "words"), [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400, "1 d"), (864_000, "10 d")]
)
def test_a_record_names_its_notebook_and_its_age(base, seconds, words):
    record = dataclasses.replace(make(base), session="work/train.ipynb", created=time.time() - seconds)
    assert record.describe() == f"7-abc (train.ipynb, {words} old): 2 ranks on cpu, gloo"


def test_a_record_is_owned_while_the_process_that_wrote_it_lives(base):
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    record = dataclasses.replace(make(base), notebook=os.getpid(), notebook_started=start_time)
    assert record.owned
    assert not dataclasses.replace(record, notebook_started=start_time - 3600).owned, (
        "another process has the id by now"
    )
