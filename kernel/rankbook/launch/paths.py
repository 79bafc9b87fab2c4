"""Folders of a cluster: sockets, shared memory segments and logs.

Chooses their location, names and permissions, and removes what crashed clusters have left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from rankbook.errors import StartError
from rankbook.process_identity import claim_folder, is_abandoned

# `sun_path` has 108 bytes on Linux and 104 on macOS, with the final zero. The folder's name and the longest file name
# have to fit in.
_MAX_SOCKET_PATH = 90
_LOG_DAYS = 7


@dataclass(frozen=True)
class ClusterPaths:
    """The folders of one cluster.

    `sockets` and `segments` have mode 0700 and are removed with the cluster; `logs` are kept for a week. `locks` are
    file descriptors that keep other processes from removing the folders while this process lives.
    """

    sockets: Path
    segments: Path
    logs: Path
    locks: list[int] = field(default_factory=list, compare=False)

    def remove(self) -> None:
        """Remove the folders of sockets and segments, and release the locks."""
        for folder in {self.sockets, self.segments}:
            shutil.rmtree(folder, ignore_errors=True)
        while self.locks:
            os.close(self.locks.pop())


def make_folders(owner: int | None = None) -> ClusterPaths:
    """Create the folders of a new cluster, after removing abandoned ones.

    They belong to the process `owner`, by default this one; once it is gone, a later start removes them.
    `RANKBOOK_RUNTIME_DIR` overrides the location of sockets and segments, `RANKBOOK_LOG_DIR` that of logs. Raises
    `StartError`, which names the folder and the variable to set.
    """
    base = socket_base()
    owner = os.getpid() if owner is None else owner
    # Segments belong into memory. If the user has chosen a folder, everything goes there.
    shared = base if os.environ.get("RANKBOOK_RUNTIME_DIR") else _segment_base(base)
    # Before the new folders are made, which need the space that crashed clusters may hold.
    for folder in {base, shared}:
        _sweep(folder)
    locks: list[int] = []
    # The lock file is in every folder, because both are swept independently.
    sockets = _make(base, owner, locks)
    try:
        segments = sockets if shared == base else _make(shared, owner, locks)
    except StartError:
        ClusterPaths(sockets, sockets, sockets, locks).remove()
        raise
    logs = Path(os.environ.get("RANKBOOK_LOG_DIR") or platformdirs.user_log_path("rankbook"))
    # Logs outlive their clusters for some days: a cell names the file of the output that was cut.
    _sweep_logs(logs)
    return ClusterPaths(sockets, segments, logs / sockets.name, locks)


def socket_base() -> Path:
    """Return the folder in which the clusters' folders are created. Raises `StartError`."""
    chosen = os.environ.get("RANKBOOK_RUNTIME_DIR")
    if chosen:
        if len(chosen) > _MAX_SOCKET_PATH - 20:
            raise StartError(
                f"RANKBOOK_RUNTIME_DIR={chosen!r} is too long for a socket path: expected at most 70 characters"
            )
        return Path(chosen)
    # The first one that is writable and short enough. On macOS, `gettempdir` is a long path below /var/folders.
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - 0700 inside
        if candidate and len(candidate) < _MAX_SOCKET_PATH - 20 and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise StartError("no writable folder for sockets found; set RANKBOOK_RUNTIME_DIR to a folder that you can write to")


def _segment_base(sockets: Path) -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - memory, and subfolders are 0700
    return shared if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else sockets


def _make(base: Path, owner: int, locks: list[int]) -> Path:
    folder = None
    try:
        # `mkdtemp` creates it with mode 0700, and fails if the name exists.
        folder = Path(tempfile.mkdtemp(prefix=f"rankbook-{os.getuid()}-{owner}-", dir=base))
        locks.append(claim_folder(folder, owner))
    except OSError as error:
        # The folder was created, but its owner could not be recorded.
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise StartError(
            f"cannot create a folder in {base}: {error.strerror};"
            " set RANKBOOK_RUNTIME_DIR to a writable folder with free space"
        ) from error
    return folder


def _sweep(base: Path) -> None:
    """Remove the abandoned folders of this user's clusters. Folders that may be in use are kept."""
    for folder in _user_folders(base):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _sweep_logs(logs: Path) -> None:
    """Remove old logs, and set permissions that earlier versions left open to other users."""
    # By the folder's time, which changes whenever a log is created in it.
    oldest = time.time() - _LOG_DAYS * 86_400
    for folder in _user_folders(logs):
        with contextlib.suppress(OSError):  # another process may remove it
            if folder.lstat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
            elif stat.S_IMODE(folder.lstat().st_mode) & 0o077:
                folder.chmod(0o700)
                for file in folder.glob("*.log"):
                    if not file.is_symlink():
                        file.chmod(0o600)


def _user_folders(base: Path) -> Iterator[Path]:
    """Yield the folders in `base` that this user created for clusters.

    Other users may have created anything beside them.
    """
    # The names that `_make` gives: user, owner's PID, and the random part of `mkdtemp`.
    name = re.compile(rf"rankbook-{os.getuid()}-[0-9]+-\w+", re.ASCII)
    with contextlib.suppress(OSError):  # unreadable folder
        for folder in base.glob("rankbook-*"):
            with contextlib.suppress(OSError):
                status = folder.lstat()
                if name.fullmatch(folder.name) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    yield folder
