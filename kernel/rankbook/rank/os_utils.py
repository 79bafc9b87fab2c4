"""What a rank and the forkserver ask of the operating system.

Owns: sessions, parent-death signals, descriptor set-up, on Linux and macOS. Refuses: policy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PIPE_SIZE = 1 << 20
DETACHED = "RANKBOOK_DETACHED"
"""In the environment of a process that is to outlive its rank; it must lead a session of its own as well."""


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent's thread that forked us ends (Linux; elsewhere the liveness pipe does it)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of what a dead rank leaves behind, so that it can be found and killed (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def malloc_trim() -> None:
    """Have the allocator return what it keeps for nobody (glibc; others have no such call). It takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def output_pipe() -> tuple[int, int]:
    """A pipe with a non-blocking read end and as much room as the system gives."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # the user's pipe quota is used up: the default size does
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    return read, write


def read_available(descriptor: int, most: int = 64 << 20) -> bytes:
    """What can be read without waiting."""
    chunks: list[bytes] = []
    size = 0
    while size < most:
        try:
            chunk = os.read(descriptor, min(_PIPE_SIZE, most - size))
        except BlockingIOError:
            break
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def is_hung_up(connection: int) -> bool:
    """Whether the other end of a socket is closed, whatever there still is to read."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def peer_credentials(connection: socket.socket) -> tuple[int | None, int | None]:
    """The process and the user at the other end of a unix socket; None where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", told)
    return pid, user


def exit_watcher(pid: int) -> Callable[[], bool]:
    """Tells whether the process that has the id `pid` now has ended."""
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
    """SIGKILL every process of the session that `leader` led, whatever became of its parents."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader:
                os.kill(process.pid, signal.SIGKILL)


def kill_leftovers(belongs: Callable[[psutil.Process], bool]) -> None:
    """SIGKILL the processes that `belongs` accepts, in whatever session, but for those that were asked to stay.

    On Linux only descendants are looked at: `adopt_orphans` has made them of all that is left. A process may start
    another one meanwhile, so this is repeated until none is found, for a tenth of a second at most.
    """
    for _ in range(20):
        candidates = psutil.Process().children(recursive=True) if sys.platform == "linux" else psutil.process_iter()
        found = [process for process in candidates if _lives(process) and belongs(process) and not _stays(process)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment that the process was started with; empty where it cannot be read."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def holds_pipe(process: psutil.Process, inode: int) -> bool:
    """Whether the process has an end of this pipe open (Linux)."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()) == f"pipe:[{inode}]":
                    return True
    return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _stays(process: psutil.Process) -> bool:
    return environment_of(process).get(DETACHED, "0") != "0"


def interrupt_group() -> None:
    """SIGINT for every other process of our process group, if we lead it: for what a rank has started."""
    own = os.getpid()
    if os.getpgrp() != own:
        return
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != own and os.getpgid(pid) == own:
                os.kill(pid, signal.SIGINT)
