"""Where a cluster's sockets, shared memory and logs lie.

Owns: the folders' places, names, permissions and the sweep of what a crash left. Refuses: anything inside them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import psutil

from rankbook.errors import StartError

_LONGEST_SOCKET_PATH = 90
_LOG_DAYS = 7


@dataclass(frozen=True)
class Folders:
    """The folders of one cluster. `sockets` and `segments` are 0700 and die with it; `logs` stay for a week."""

    sockets: Path
    segments: Path
    logs: Path

    def remove(self) -> None:
        """Remove what dies with the cluster."""
        for folder in {self.sockets, self.segments}:
            shutil.rmtree(folder, ignore_errors=True)


def make_folders(owner: int | None = None) -> Folders:
    """Fresh folders for a cluster. Raises `StartError` that names the folder and what to set.

    They are the process `owner`'s, or this one's: whoever comes later removes them if it is gone.
    `RANKBOOK_RUNTIME_DIR` overrides where sockets and segments go, `RANKBOOK_LOG_DIR` where logs go.
    """
    base = socket_base()
    owner = os.getpid() if owner is None else owner
    shared = base if os.environ.get("RANKBOOK_RUNTIME_DIR") else _segment_base(base)
    for each in {base, shared}:
        _sweep(each)
    sockets = _make(base, owner)
    segments = sockets if shared == base else _make(shared, owner)
    logs = Path(os.environ.get("RANKBOOK_LOG_DIR") or platformdirs.user_log_path("rankbook"))
    _sweep_logs(logs)
    return Folders(sockets, segments, logs / sockets.name)


def socket_base() -> Path:
    """The folder that the clusters' folders are made in. Raises `StartError`."""
    chosen = os.environ.get("RANKBOOK_RUNTIME_DIR")
    if chosen:
        if len(chosen) > _LONGEST_SOCKET_PATH - 20:
            raise StartError(f"RANKBOOK_RUNTIME_DIR={chosen} is too long for a socket; the most is 70 characters")
        return Path(chosen)
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - 0700 inside
        if candidate and len(candidate) < _LONGEST_SOCKET_PATH - 20 and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise StartError("no folder for sockets can be written; set RANKBOOK_RUNTIME_DIR to one of yours")


def _segment_base(sockets: Path) -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - memory, and 0700 inside
    return shared if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else sockets


def _make(base: Path, owner: int) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"rankbook-{os.getuid()}-{owner}-", dir=base))
    except OSError as error:
        raise StartError(
            f"cannot make a folder in {base}: {error.strerror}; set RANKBOOK_RUNTIME_DIR to a folder of yours with room"
        ) from error
    return folder


def _sweep(base: Path) -> None:
    """Remove folders of our own user whose process is gone."""
    for folder in base.glob(f"rankbook-{os.getuid()}-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _sweep_logs(logs: Path) -> None:
    oldest = time.time() - _LOG_DAYS * 86_400
    with contextlib.suppress(OSError):  # a log folder that cannot be read has nothing to sweep
        for folder in logs.glob("rankbook-*"):
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
