"""A look at a process that does not answer.

Owns: what the operating system says of it. Refuses: to ask the process itself, and to say what it means.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Look:
    """A living process at one moment: `doing` is psutil's word (running, sleeping, disk-sleep).

    `stopped`: by a signal, as SIGSTOP and Ctrl-Z are; `traced`: by a debugger. `cpu_seconds` is what it used so far, of
    all its threads.
    """

    doing: str
    cpu_seconds: float
    stopped: bool = False
    traced: bool = False


def look_at(pid: int | None) -> Look | None:
    """What the process `pid` does; None when it is gone, or about to be."""
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status, times = process.status(), process.cpu_times()
    except psutil.Error:  # gone meanwhile; who waits for its end hears of it
        return None
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return None
    return Look(
        doing=status,
        cpu_seconds=times.user + times.system,
        stopped=status == psutil.STATUS_STOPPED,
        traced=status == psutil.STATUS_TRACING_STOP,
    )
