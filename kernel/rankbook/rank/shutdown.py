"""What a rank still has to do before it leaves: saves in the background, exit functions, open files.

Owns: the time for it, and the words where that was not enough. Refuses: to import what the person has not.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import stat
import sys
import weakref
from collections.abc import Callable


def clear_atexit() -> None:
    """Drop what was registered in the forkserver, for its own end. To be called as a rank begins."""
    atexit._clear()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # of temporary folders, for one
        each.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # which registers itself but once


def run_atexit(patience: float, ask: Callable[[float], None]) -> None:
    """Do what an interpreter does that ends: call what cells registered with `atexit`, write what open files hold.

    Experiment trackers send their last steps so. `ask(seconds)` is called first where there is something to call.
    """
    if atexit._ncallbacks() > 1 or any(each.atexit for each in list(weakref.finalize._registry)):  # type: ignore[attr-defined]
        ask(patience)
    atexit._run_exitfuncs()  # prints what one of them raises, and goes on
    _write_files()


def _write_files() -> None:
    """Write what Python still holds of files that nobody has closed."""
    layers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # the outer ones first
    found = [each for each in gc.get_objects() if type(each) in layers]
    for each in sorted(found, key=lambda each: layers.index(type(each))):
        with contextlib.suppress(OSError, ValueError):  # a full disk; closed, or no file of the system's
            if stat.S_ISREG(os.fstat(each.fileno()).st_mode):  # a pipe's reader may be gone
                each.flush()


def report_lost_saves() -> None:
    """Print, into the output of the cell that runs, what became of a save in the background that failed."""
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    if saving is not None and (words := saving.lost_saves()):
        with contextlib.suppress(Exception):  # the cell may have put its own stream there
            print(words, file=sys.stderr, flush=True)  # noqa: T201 - the cell's output


def wait_for_saves(patience: float, ask: Callable[[float], None]) -> str:
    """Wait until nothing is being saved, for `patience` seconds: what has to be said of it, "" for nothing.

    `ask(seconds)` is called first where there is something to wait for.
    """
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    handle = None if saving is None else saving.current_save()
    if handle is None:
        return ""
    if not handle.done:
        ask(patience)
        saving.wait_for_saves(patience)  # type: ignore[union-attr]  # as of the handle
    if not handle.done:
        return f"{handle!r} was not done {patience:g} s after the rank was to leave, and is lost"
    if handle.error is None or handle.heard:
        return ""
    handle.heard = True
    return f"{handle!r} in the background"
