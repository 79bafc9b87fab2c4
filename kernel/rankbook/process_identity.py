"""Which process owns a file or folder, and whether that process still lives.

Owns: process identity (machine, pid namespace, pid, start time), and the lock that a living owner holds on its folder.
Refuses: to judge processes of other machines by anything but the time that has passed.

A folder is in use while any process holds a lock on its owner file: the kernel drops a lock with the process, and
shows it to every container that sees the file. Only where nobody holds one, the identity in the file decides.
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
"""Seconds after which an owner on another machine is taken for dead: nobody here can ask whether its process lives."""
OWNER_FILE = "owner.json"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process. `started` tells it from a later process with the same pid; `since` is in seconds of the Unix epoch.

    `machine` differs between containers that number their processes apart, also on one host.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: float

    def lives(self, patience: float = PATIENCE) -> bool:
        """Return whether the process lives. On other machines: whether it claimed less than `patience` s ago."""
        if self.machine != machine():
            return time.time() - self.since < patience
        return bool(self.started) and self.started == started(self.pid)


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of a process of this machine."""
    return ProcessIdentity(platform.node(), machine(), pid, started(pid), time.time())


def claim_folder(folder: Path, pid: int) -> int:
    """Name process `pid` as the folder's owner, and return a descriptor that holds a lock for this process."""
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        os.write(descriptor, json.dumps(asdict(identify(pid))).encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hold_folder(folder: Path) -> int | None:
    """Return a descriptor that holds one more lock on a claimed folder; None where it has no owner file."""
    try:
        descriptor = os.open(folder / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    _lock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_abandoned(folder: Path) -> bool:
    """Return whether the folder is this user's and its owner is gone. False where that cannot be told."""
    try:
        if not _is_own(folder.lstat(), stat.S_IFDIR):
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no owner file: not made here, or only just now
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
    """Return the name of the space in which a pid means one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def started(pid: int) -> str:
    """Return when a process began, in the system's own words; empty where there is none."""
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
    except OSError:  # a file system without locks: the identity alone decides
        return True
    return True


def _is_own(status: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.getuid()
