"""State of an unresponsive process, as reported by the operating system, and its description."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class ProcessInfo:
    """State of a living process at one moment.

    `doing` is psutil's status (running, sleeping, disk-sleep), `cpu_seconds` the CPU time of all its threads so far.
    `stopped`: by a signal such as SIGSTOP or Ctrl-Z; `traced`: by a debugger.
    """

    doing: str
    cpu_seconds: float
    stopped: bool = False
    traced: bool = False


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
        doing=status,
        cpu_seconds=times.user + times.system,
        stopped=status == psutil.STATUS_STOPPED,
        traced=status == psutil.STATUS_TRACING_STOP,
    )


def describe_process(look: ProcessInfo | None, pid: int | None) -> str:
    """Return a description of the process `pid`, such as `process sleeping, 3.1 s of CPU time`."""
    if look is None:
        return "process ending"
    if look.stopped:
        return f"process stopped: kill -CONT {pid} lets it go on"
    if look.traced:
        return f"process stopped by a debugger or tracer (pid {pid})"
    return f"process {look.doing}, {look.cpu_seconds:.1f} s of CPU time"
