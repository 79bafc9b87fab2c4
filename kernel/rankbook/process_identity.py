"""Record which process owns a file or folder, and detect that this process has ended.

A process is identified by machine, PID namespace, PID and start time. A folder is in use while any process holds a
`flock` on its owner file: the operating system releases the lock when the process ends, and the lock is visible in
every container that sees the file. If no process holds a lock, the identity in the file decides. A process of another
machine counts as ended after `PATIENCE` seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import stat
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

PATIENCE = 24 * 3600.0
"""Seconds after which an owner on another machine counts as dead, since its process cannot be checked from here."""
OWNER_FILE = "owner.json"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process.

    `started` distinguishes it from a later process with the same PID; `since` is in seconds of the Unix epoch.
    `machine` differs between containers that have PID namespaces of their own, also on one host.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: float

    def lives(self, patience: float = PATIENCE) -> bool:
        """Return True if the process is alive.

        For a process on another machine, return True if it made its claim less than `patience` seconds ago.
        """
        if self.machine != machine():
            return time.time() - self.since < patience
        return bool(self.started) and self.started == started(self.pid)


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of a process on this machine."""
    return ProcessIdentity(platform.node(), machine(), pid, started(pid), time.time())


def claim_folder(folder: Path, pid: int) -> int:
    """Record process `pid` as the folder's owner, and return a descriptor with a lock held by this process."""
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        os.write(descriptor, json.dumps(asdict(identify(pid))).encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hold_folder(folder: Path) -> int | None:
    """Return a descriptor with one more lock on a claimed folder, or None if the folder has no owner file."""
    try:
        descriptor = os.open(folder / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    _lock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_abandoned(folder: Path) -> bool:
    """Return True if the folder belongs to this user and its owner has ended; False if this cannot be determined."""
    try:
        if not _is_own(folder.lstat(), stat.S_IFDIR):
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no owner file: made by another program, or not claimed yet
        return False
    try:
        if not _is_own(os.fstat(descriptor), stat.S_IFREG) or not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        owner = ProcessIdentity(**json.loads(os.read(descriptor, 1 << 16)))
        return not owner.lives()
    except (ValueError, TypeError):
        return False
    finally:
        os.close(descriptor)


@cache
def machine() -> str:
    """Identify the PID namespace, within which a PID is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def started(pid: int) -> str:
    """Return a process's start time as the operating system reports it, or an empty string if it is not running."""
    if sys.platform.startswith("linux"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in {"Z", "X"} else fields[19]
    run = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks: the identity alone decides
        return True
    return True


def _is_own(status: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.getuid()
