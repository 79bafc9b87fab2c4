"""Record which process owns a file or folder, and detect that this process has ended.

A process is identified by machine, PID namespace, PID and start time. A folder is in use while any process holds a
`flock` on its owner file: the operating system releases the lock when the process ends, and the lock is visible in
every container that sees the file. If no process holds a lock, the identity in the file decides. A process of another
machine counts as ended after `PATIENCE` seconds.

`process_info` and `describe_process` tell what the operating system reports about an unresponsive process,
`package_version` which version of a package this one uses.
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

import psutil

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

    def is_alive(self, patience: float = PATIENCE) -> bool:
        """Return True if the process is alive.

        For a process on another machine, return True if it made its claim less than `patience` seconds ago.
        """
        # A process of another machine or container cannot be looked up here. Its claim expires.
        if self.machine != machine():
            return time.time() - self.since < patience
        return bool(self.started) and self.started == start_time_of(self.pid)


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of a process on this machine."""
    return ProcessIdentity(platform.node(), machine(), pid, start_time_of(pid), time.time())


def claim_folder(folder: Path, pid: int) -> int:
    """Record process `pid` as the folder's owner, and return a descriptor with a lock held by this process."""
    # The lock is taken before the identity is written. A sweep that comes in between reads no identity, and leaves the
    # folder alone.
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Shared, because the forkserver holds a lock too (`hold_folder`). The lock ends with the last process that has
        # this open file, however it ends.
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


def is_owner(folder: Path, pid: int) -> bool:
    """Return True if process `pid` is running and is the one that owns the folder, whatever the clock says."""
    try:
        owner = ProcessIdentity(**json.loads((folder / OWNER_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    return owner.pid == pid and owner.machine == machine() and owner.is_alive()


def is_abandoned(folder: Path) -> bool:
    """Return True if the folder belongs to this user and its owner has ended; False if this cannot be determined."""
    try:
        if not _belongs_to_user(folder.lstat(), stat.S_IFDIR):
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no owner file: made by another program, or not claimed yet
        return False
    try:
        # An exclusive lock is refused as long as any process holds a shared one.
        if not _belongs_to_user(os.fstat(descriptor), stat.S_IFREG) or not _lock(
            descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB
        ):
            return False
        # The file of a running cluster:
        #
        #     {"host": "gpu-1", "machine": "<boot id> pid:[4026531836]", "pid": 4711, "started": "812345",
        #      "since": 1700000000.0}
        owner = ProcessIdentity(**json.loads(os.read(descriptor, 1 << 16)))
        return not owner.is_alive()
    except (ValueError, TypeError):
        return False
    finally:
        os.close(descriptor)


@cache
def machine() -> str:
    """Identify the PID namespace, within which a PID is unique."""
    try:
        # The boot id differs after a restart of the machine, when PIDs begin anew. The namespace differs between
        # containers.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def start_time_of(pid: int) -> str:
    """Return a process's start time as the operating system reports it, or an empty string if it is not running."""
    if sys.platform.startswith("linux"):
        try:
            # The program's name is in parentheses and may contain spaces and parentheses itself, so the fields are
            # counted from the last one. Field 22 of the whole line is the start time in clock ticks since boot.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in {"Z", "X"} else fields[19]
    # macOS: `ps` reports the start time with a resolution of a second.
    # Two processes with one PID within a second are not told apart.
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


def _belongs_to_user(status: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.getuid()


@dataclass(frozen=True)
class ProcessInfo:
    """State of a living process at one moment.

    `status` is psutil's status (running, sleeping, disk-sleep), `cpu_seconds` the CPU time of all its threads so far.
    `stopped`: by a signal such as SIGSTOP or Ctrl-Z; `traced`: by a debugger. `host` names another host.
    """

    status: str
    cpu_seconds: float
    stopped: bool = False
    traced: bool = False
    host: str = ""


@cache
def package_version(name: str) -> str:
    """Return the version of the package `name` that this process uses; empty if it is not installed as a package.

    It is read once: every host that joins is compared with it, and torch's metadata take milliseconds.
    """
    import importlib.metadata  # takes milliseconds, and few processes ask

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # such as a copy of the source on PYTHONPATH
        return ""


def process_info(pid: int | None) -> ProcessInfo | None:
    """Return the state of the process `pid`; None if it has ended or is a zombie."""
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status, times = process.status(), process.cpu_times()
    except psutil.Error:  # it has just ended
        return None
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return None
    return ProcessInfo(
        status=status,
        cpu_seconds=times.user + times.system,
        stopped=status == psutil.STATUS_STOPPED,
        traced=status == psutil.STATUS_TRACING_STOP,
    )


def describe_process(info: ProcessInfo | None, pid: int | None) -> str:
    """Return a description of the process `pid`, such as `process sleeping, 3.1 s of CPU time`."""
    if info is None:
        return "process ending"
    on_host = f" on {info.host}" if info.host else ""
    if info.stopped:
        return f"process stopped{on_host}; kill -CONT {pid} resumes it"
    if info.traced:
        return f"process stopped by a debugger or tracer (pid {pid}{on_host})"
    return f"process{on_host} {info.status}, {info.cpu_seconds:.1f} s of CPU time"
