"""Measure the memory of the processes of a kernel, and check that none remains.

All processes that descend from a kernel are found, also those that left its tree, whatever tool the kernel runs. They
are recognized by a marker in their environment, which children inherit; no process of another program is ever counted
or killed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARKER = "RANKBOOK_BENCHMARK"

# Polling goes through an event that nobody sets: it is `wait`, with a limit, not a sleep that hopes to be long enough.
_never = threading.Event()


def pause(seconds: float) -> None:
    """Let others run between two looks at a condition."""
    _never.wait(seconds)


def marked(value: str) -> Iterator[psutil.Process]:
    """Yield every live process whose environment has this marker value."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == value and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def proportional_megabytes(processes: list[psutil.Process]) -> float:
    """The processes' proportional set size together: a page that n of them share counts 1/n in each (Linux only)."""
    kilobytes = 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kilobytes += _kilobytes(rollup, "Pss")
    return kilobytes * 1024 / 1e6


def resident_megabytes(pid: int) -> tuple[float, float]:
    """Return a process's resident memory now and at its highest since `forget_peak` (Linux only)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return _kilobytes(status, "VmRSS") * 1024 / 1e6, _kilobytes(status, "VmHWM") * 1024 / 1e6


def _kilobytes(text: str, name: str) -> int:
    return int(re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)[0])


def forget_peak(pid: int) -> None:
    """Let `resident_megabytes` count its peak from now (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def wait_quiet(value: str, *, timeout: float) -> None:
    """Wait until the marked processes have used nearly no processor time for two looks in a row.

    What a kernel does after its last reply (history, an import elsewhere) would else count as the next measure's.
    """
    limit = time.monotonic() + timeout
    quiet = 0
    before = _processor_seconds(value)
    while quiet < 2:
        if time.monotonic() > limit:
            raise TimeoutError(f"the kernel's processes are still busy after {timeout:.0f} s")
        pause(0.3)
        after = _processor_seconds(value)
        # 10 % of one core: several tools poll for ever
        quiet = quiet + 1 if after - before < 0.03 else 0
        before = after


def _processor_seconds(value: str) -> float:
    total = 0.0
    for process in marked(value):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def end(value: str) -> int:
    """Kill what is left of one kernel's processes, and say how many they were."""
    killed = 0
    limit = time.monotonic() + 20
    while remaining := list(marked(value)):
        if time.monotonic() > limit:
            raise TimeoutError(f"processes {[process.pid for process in remaining]} survive SIGKILL")
        for process in remaining:
            try:
                process.kill()
                killed += 1
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=2)
    return killed
