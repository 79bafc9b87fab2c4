"""A look at a process that does not answer.

Owns: what the operating system says of it, also in words. Refuses: to ask the process itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class ProcessInfo:
    """A living process at one moment: `doing` is psutil's word (running, sleeping, disk-sleep).

    `stopped`: by a signal, as SIGSTOP and Ctrl-Z are; `traced`: by a debugger. `cpu_seconds` is what it used so far, of
    all its threads.
    """

    doing: str
    cpu_seconds: float
    stopped: bool = False
    traced: bool = False


def process_info(pid: int | None) -> ProcessInfo | None:
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
    return ProcessInfo(
        doing=status,
        cpu_seconds=times.user + times.system,
        stopped=status == psutil.STATUS_STOPPED,
        traced=status == psutil.STATUS_TRACING_STOP,
    )


def describe_process(look: ProcessInfo | None, pid: int | None) -> str:
    """Return what the process `pid` does, in words: `process sleeping, 3.1 s of CPU time`."""
    if look is None:
        return "process ending"
    if look.stopped:
        return f"process stopped: kill -CONT {pid} lets it go on"
    if look.traced:
        return f"process stopped by a debugger or tracer (pid {pid})"
    return f"process {look.doing}, {look.cpu_seconds:.1f} s of CPU time"
