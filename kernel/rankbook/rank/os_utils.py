"""Operating-system helpers of the forkserver and the ranks, for Linux and macOS.

Parent-death signals, pipes, sockets, and finding and killing the processes that a rank has started.

`record_originals` and `restore_originals` keep the builtins, and the functions of `os` and `time`, that a cell may
replace. They are restored only when the rank's own code has failed: a cell may replace these functions as long as the
rank still works.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PIPE_SIZE = 1 << 20
DETACHED = "RANKBOOK_DETACHED"
"""Environment variable of a process that may outlive its rank; it must also lead its own session."""


def die_with_parent() -> None:
    """Request SIGKILL for this process when the parent thread that forked it ends (Linux).

    Elsewhere the liveness pipe has this effect.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of a dead rank's descendants, so that they can be found and killed (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # Python has no function for it.
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def malloc_trim() -> None:
    """Return the allocator's free memory to the system (glibc only). Takes some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def output_pipe() -> tuple[int, int]:
    """Return a pipe with a non-blocking read end and the largest buffer that the system allows."""
    read, write = os.pipe()
    # Only the read end: the writer has to wait when the pipe is full, so that no output is lost.
    os.set_blocking(read, False)
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # pipe quota exhausted: keep the default size
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    return read, write


def read_available(descriptor: int, most: int = 64 << 20) -> bytes:
    """Read without waiting, at most `most` bytes."""
    chunks: list[bytes] = []
    size = 0
    while size < most:
        try:
            # At most the largest pipe at a time, which allocates no more memory than can be there.
            chunk = os.read(descriptor, min(_PIPE_SIZE, most - size))
        except BlockingIOError:
            break
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def is_hung_up(connection: int) -> bool:
    """Return True if the peer has closed the socket, even with unread data."""
    # No events are asked for, because POLLHUP is always reported. A socket is also readable when data has arrived,
    # which says nothing about its end.
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def peer_credentials(connection: socket.socket) -> tuple[int | None, int | None]:
    """Return the process id and user id of a Unix socket's peer; None where the system has no such call."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def exit_watcher(pid: int) -> Callable[[], bool]:
    """Return a function that returns True once the process has ended.

    The process is the one that has the id `pid` now; a later process with this id is not taken for it.
    """
    # psutil remembers the start time, by which `is_running` recognizes a later process with the same PID.
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return lambda: True

    def ended() -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return ended


def kill_session(leader: int) -> None:
    """Send SIGKILL to all processes of a session, including those that lost their parents."""
    # First the leader's own group at once, then every other group of the session. A process that has left the session
    # is not found here, see `kill_leftovers`.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader:
                os.kill(process.pid, signal.SIGKILL)


def kill_leftovers(belongs: Callable[[psutil.Process], bool]) -> None:
    """Send SIGKILL to the processes that `belongs` accepts, in any session, unless they are marked as detached.

    On Linux it looks at descendants only, because `adopt_orphans` makes all leftovers descendants. A process may start
    another one meanwhile, so this repeats until none is found, for a tenth of a second at most.
    """
    for _ in range(20):
        # macOS has no subreapers: orphans become children of launchd, so all processes are searched.
        candidates = psutil.Process().children(recursive=True) if sys.platform == "linux" else psutil.process_iter()
        leftovers = [
            process
            for process in candidates
            if _is_alive(process) and belongs(process) and not _is_marked_detached(process)
        ]
        if not leftovers:
            return
        for process in leftovers:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that the process was started with; empty if it cannot be read."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def holds_pipe(process: psutil.Process, inode: int) -> bool:
    """Return True if the process has an end of this pipe open (Linux)."""
    # /proc exists on Linux only. Elsewhere nothing is found, and the mark in the environment decides.
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()) == f"pipe:[{inode}]":
                    return True
    return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_marked_detached(process: psutil.Process) -> bool:
    return environment_of(process).get(DETACHED, "0") != "0"


def started_processes() -> list[int]:
    """Return the pids of the other processes of our process group, which cells have started.

    The list is empty unless this process leads the group.
    """
    # Only the leader of a group knows that the group consists of itself and of what it has started.
    own_pid = os.getpid()
    if os.getpgrp() != own_pid:
        return []
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != own_pid and os.getpgid(pid) == own_pid:
                members.append(pid)
    return members


def interrupt_processes(pids: Iterable[int]) -> None:
    """Send SIGINT to processes, as far as they still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGINT)


_DEBUGGERS = ("exec", "fork", "posix_spawn", "spawn")
"""Prefixes of functions that a debugger replaces and needs."""

_originals: list[tuple[ModuleType, str, object]] = []


def record_originals() -> None:
    """Record the current functions as the originals, before the first cell."""
    _originals[:] = [
        (module, name, value)
        for module in (builtins, os, time)
        for name, value in module.__dict__.items()
        if callable(value) and not name.startswith(_DEBUGGERS)
    ]


def restore_originals() -> list[str]:
    """Restore the originals; return the names that had been replaced. Calls no builtin function."""
    replaced = []
    # Only attributes and methods of built-in types: `getattr`, `setattr` and the like may be what a cell has replaced.
    for module, name, value in _originals:
        if module.__dict__.get(name) is not value:
            module.__dict__[name] = value
            replaced.append(f"{module.__name__}.{name}")
    return replaced


def describe_restored(replaced: list[str]) -> str:
    """Return a message that lists the restored names."""
    return f"restored {', '.join(replaced)}: replaced by a cell, but the rank needs the original\n"
