"""Where sockets, shared memory and logs lie."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from rankbook.errors import StartError
from rankbook.launch import folders
from rankbook.launch.folders import make_folders


def test_they_can_be_entered_by_their_owner_only_and_are_gone_after_remove():
    made = make_folders()
    for folder in (made.sockets, made.segments):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made.remove()
    assert not made.sockets.exists()
    assert not made.segments.exists()


@pytest.mark.processes
def test_what_a_dead_process_left_is_swept_and_what_a_living_one_has_is_not(short_path, monkeypatch):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    left = short_path / f"rankbook-{os.getuid()}-{dead.stdout.strip()}-abc"
    alive = short_path / f"rankbook-{os.getuid()}-{os.getpid()}-abc"
    other = short_path / f"rankbook-{os.getuid() + 1}-{dead.stdout.strip()}-abc"
    for folder in (left, alive, other):
        folder.mkdir()
    made = make_folders()
    assert not left.exists()
    assert alive.exists()
    assert other.exists()
    assert made.sockets.parent == made.segments.parent == short_path


def test_a_folder_that_is_missing_or_a_file_names_it_and_the_variable(short_path, monkeypatch):
    for bad in (short_path / "nowhere", short_path / "file"):
        (short_path / "file").touch()
        monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(bad))
        with pytest.raises(StartError, match=f"{bad}.*RANKBOOK_RUNTIME_DIR"):
            make_folders()


def test_a_full_folder_is_said_to_be_full(short_path, monkeypatch):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", str(short_path))

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.tempfile, "mkdtemp", full)
    with pytest.raises(StartError, match="No space left on device"):
        make_folders()


def test_a_path_too_long_for_a_socket_is_refused(monkeypatch):
    monkeypatch.setenv("RANKBOOK_RUNTIME_DIR", "/" + "x" * 100)
    with pytest.raises(StartError, match="too long"):
        make_folders()
