"""Test the folders of sockets, shared memory and logs."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankbook.errors import StartError
from rankbook.launch import registry
from rankbook.launch.registry import make_folders
from rankbook.process_identity import OWNER_FILE, PATIENCE, claim_folder, hold_folder


def test_folders_are_private_and_removed():
    folders = make_folders()
    for folder in (folders.sockets, folders.segments):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folders.remove()
    assert not folders.sockets.exists()
    assert not folders.segments.exists()


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    run = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


def make_claimed(path: Path, pid: int, **fields: str) -> Path:
    """Create a folder whose owner file names the process `pid`, and whose lock nobody holds."""
    path.mkdir()
    os.close(claim_folder(path, pid))
    file = path / OWNER_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


@pytest.mark.processes
def test_folders_of_dead_processes_only_are_swept(short_path, monkeypatch, dead):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    stale = make_claimed(short_path / f"rankbook-{os.getuid()}-{dead}-abc", dead)
    alive = make_claimed(short_path / f"rankbook-{os.getuid()}-{os.getpid()}-abc", os.getpid())
    other = make_claimed(short_path / f"rankbook-{os.getuid() + 1}-{dead}-abc", dead)
    folders = make_folders()
    assert not stale.exists()
    assert alive.exists()
    assert other.exists()
    assert folders.sockets.parent == folders.segments.parent == short_path


@pytest.mark.parametrize("pid", ["²", "4294967296", "99999999999999999999", "-1", "", "x", "1\n"])
def test_a_folder_whose_name_is_not_understood_is_kept(short_path, monkeypatch, pid):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    monkeypatch.setenv("RANKBOOK_LOG_DIR", str(short_path))
    foreign = short_path / f"rankbook-{os.getuid()}-{pid}-x"
    foreign.mkdir()
    make_folders().remove()
    assert foreign.exists()


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_kept_whatever_it_holds(short_path, monkeypatch, dead):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    foreign = make_claimed(short_path / f"rankbook-{os.getuid()}-{dead}-x", dead)
    os.chown(foreign, 65534, 65534)
    pipe = short_path / f"rankbook-{os.getuid()}-{dead}-y"
    pipe.mkdir()
    os.mkfifo(pipe / OWNER_FILE)
    link = short_path / f"rankbook-{os.getuid()}-{dead}-z"
    link.symlink_to(foreign)
    make_folders().remove()
    assert foreign.exists()
    assert pipe.exists()
    assert link.is_symlink()


@pytest.mark.processes
def test_a_cluster_of_another_pid_namespace_is_kept_for_a_day(short_path, monkeypatch, dead):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    folder = make_claimed(short_path / f"rankbook-{os.getuid()}-{dead}-x", dead, machine="another pid namespace")
    make_folders().remove()
    assert folder.exists()
    make_claimed(short_path / f"rankbook-{os.getuid()}-{dead}-y", dead)
    file = folder / OWNER_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"since": time.time() - 2 * PATIENCE}))
    make_folders().remove()
    assert not folder.exists()


@pytest.mark.processes
def test_a_held_lock_keeps_the_folder_of_a_process_that_cannot_be_found(short_path, monkeypatch, dead):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    folder = make_claimed(short_path / f"rankbook-{os.getuid()}-{dead}-x", dead)
    lock = hold_folder(folder)
    assert lock is not None
    make_folders().remove()
    assert folder.exists()
    os.close(lock)
    make_folders().remove()
    assert not folder.exists()


def test_a_later_process_with_the_same_pid_is_not_taken_for_the_owner(short_path, monkeypatch):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    folder = make_claimed(short_path / f"rankbook-{os.getuid()}-{os.getpid()}-x", os.getpid(), started="1")
    make_folders().remove()
    assert not folder.exists()


def test_logs_of_earlier_versions_are_closed_to_other_users(short_path, monkeypatch):
    monkeypatch.setenv("RANKBOOK_LOG_DIR", str(short_path))
    short_path.chmod(0o755)
    folder = short_path / f"rankbook-{os.getuid()}-7-abc"
    folder.mkdir(mode=0o755)
    log = folder / "cell-1-rank-0.log"
    log.touch(0o644)
    (folder / "link.log").symlink_to("/dev/null")
    make_folders().remove()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, log)] == [0o700, 0o600]
    assert stat.S_IMODE(short_path.stat().st_mode) == 0o755  # may be shared


def test_a_folder_that_is_missing_or_a_file_names_it_and_the_variable(short_path, monkeypatch):
    for bad in (short_path / "nowhere", short_path / "file"):
        (short_path / "file").touch()
        monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(bad))
        with pytest.raises(StartError, match=f"{bad}.*RANKBOOK_RUNTIME_DIR"):
            make_folders()


def test_a_full_folder_is_reported_as_full(short_path, monkeypatch):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(registry.tempfile, "mkdtemp", full)
    with pytest.raises(StartError, match="No space left on device"):
        make_folders()


@pytest.mark.parametrize(("path", "size"), [("/" + "x" * 100, 101), ("/" + "é" * 40, 81)], ids=["ascii", "utf-8"])
def test_a_path_too_long_for_a_socket_is_refused(path, size, monkeypatch):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", path)
    with pytest.raises(StartError, match=rf"too long for a socket path: expected at most \d+ bytes, got {size}"):
        make_folders()


def test_the_longest_path_that_is_accepted_has_room_for_every_socket(short_path, monkeypatch):
    for length in range(50, 100):
        base = short_path / ("x" * (length - len(str(short_path)) - 1))
        base.mkdir()
        monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(base))
        try:
            folders = make_folders(owner=4_194_304)  # the highest process id of Linux
        except StartError as error:
            assert f"expected at most {length - 1} bytes, got {length}" in str(error)  # noqa: PT017 - in a loop
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folders.sockets / "down-1000.1000"))
        folders.remove()
    pytest.fail("no path is too long")


def test_the_folder_of_a_login_session_is_not_used_in_a_job_of_slurm(short_path, monkeypatch):
    monkeypatch.delenv("RANKBOOK_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    assert registry.socket_base() == short_path
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert registry.socket_base() == Path(registry.tempfile.gettempdir())


def test_a_folder_for_temporary_files_that_is_too_long_is_not_used(short_path, monkeypatch):
    folder = short_path / ("x" * (65 - len(str(short_path))))
    folder.mkdir()
    monkeypatch.delenv("RANKBOOK_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(registry.tempfile, "gettempdir", lambda: str(folder))
    assert registry.socket_base() == Path("/tmp")
