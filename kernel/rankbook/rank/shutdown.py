"""Graceful shutdown of a rank: background saves, `atexit` functions, and unflushed files.

Imports nothing that the user's code has not imported.
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
    """Drop the exit functions that the forkserver registered for itself. Called when a rank starts."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # for example of temporary folders
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # weakref registers it only once


def run_atexit(patience: float, ask: Callable[[float], None]) -> None:
    """Call the exit functions that cells registered with `atexit`, and flush open files, as Python does at exit.

    Experiment trackers upload their last steps this way. Calls `ask(seconds)` first if there are functions to call, to
    ask the notebook for that time.
    """
    if atexit._ncallbacks() > 1 or any(finalizer.atexit for finalizer in list(weakref.finalize._registry)):  # type: ignore[attr-defined]
        ask(patience)
    atexit._run_exitfuncs()  # prints exceptions and continues
    _write_files()


def _write_files() -> None:
    """Flush regular files that are still open."""
    layers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # outer layers first
    files = [file for file in gc.get_objects() if type(file) in layers]
    for file in sorted(files, key=lambda file: layers.index(type(file))):
        with contextlib.suppress(OSError, ValueError):  # full disk, closed file, or no file descriptor
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # flushing a pipe could block
                file.flush()


def report_lost_saves() -> None:
    """Print the error of a failed background save to the running cell's stderr."""
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    if saving is not None and (message := saving.lost_saves()):
        with contextlib.suppress(Exception):  # the cell may have replaced sys.stderr
            print(message, file=sys.stderr, flush=True)  # noqa: T201 - the cell's output


def wait_for_saves(patience: float, ask: Callable[[float], None]) -> str:
    """Wait at most `patience` seconds for a background save; return a message if it failed or did not finish.

    Returns an empty string otherwise. Calls `ask(seconds)` first if there is a save to wait for.
    """
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    handle = None if saving is None else saving.current_save()
    if handle is None:
        return ""
    if not handle.done:
        ask(patience)
        saving.wait_for_saves(patience)  # type: ignore[union-attr]  # loaded: there is a handle
    if not handle.done:
        return f"{handle!r} was not done {patience:g} s after the rank was to leave, and is lost"
    if handle.error is None or handle.heard:
        return ""
    handle.heard = True
    return f"{handle!r} in the background"
