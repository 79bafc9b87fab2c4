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
from collections.abc import Callable, Mapping


def clear_atexit() -> None:
    """Drop the exit functions that the forkserver registered for itself. Called when a rank starts."""
    # They were registered for the forkserver's own exit, and the child has inherited them.
    atexit._clear()
    # `weakref.finalize` has a registry of its own. Its entries would remove, for example, temporary folders that the
    # forkserver still uses.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # for example of temporary folders
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # weakref registers it only once


def run_atexit(patience: float, request_delay: Callable[[float], None]) -> None:
    """Call the exit functions that cells registered with `atexit`, and flush open files, as Python does at exit.

    Experiment trackers upload their last steps this way. Calls `request_delay(seconds)` first if there are functions to
    call, to ask the notebook for that time.
    """
    # One function, weakref's, is always registered.
    if atexit._ncallbacks() > 1 or any(finalizer.atexit for finalizer in list(weakref.finalize._registry)):  # type: ignore[attr-defined]
        request_delay(patience)
    atexit._run_exitfuncs()  # prints exceptions and continues
    # The process ends by `os._exit`, which flushes no Python buffers.
    _write_files()


def _write_files() -> None:
    """Flush regular files that are still open."""
    # A text layer writes into the buffer below it, so it is flushed first.
    layers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # outer layers first
    files = [file for file in gc.get_objects() if type(file) in layers]
    for file in sorted(files, key=lambda file: layers.index(type(file))):
        with contextlib.suppress(OSError, ValueError):  # full disk, closed file, or no file descriptor
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # flushing a pipe could block
                file.flush()


def report_lost_saves(cells: Mapping[str, int]) -> None:
    """Print the error of a failed background save to the running cell's stderr."""
    if message := lost_saves(cells):
        with contextlib.suppress(Exception):  # the cell may have replaced sys.stderr
            print(f"rankbook: {message}", file=sys.stderr, flush=True)  # noqa: T201 - the cell's output


def lost_saves(cells: Mapping[str, int]) -> str:
    """Return a message about a background save that failed, once; `cells` has the numbers of the cells by file."""
    # Only a cell that saves in the background has imported the module.
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    return "" if saving is None else str(saving.lost_saves(cells))


def wait_for_saves(patience: float, request_delay: Callable[[float], None]) -> str:
    """Wait at most `patience` seconds for a background save; return a message if it failed or did not finish.

    Returns an empty string otherwise. Calls `request_delay(seconds)` first if there is a save to wait for.
    """
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    handle = None if saving is None else saving.current_save()
    if handle is None:
        return ""
    if not handle.done:
        request_delay(patience)
        saving.wait_for_saves(patience)  # type: ignore[union-attr]  # loaded: there is a handle
    # The save goes on until the process ends, but nobody may wait for it any longer.
    if not handle.done:
        return f"{handle!r} did not finish within {patience:g} s of the shutdown and is lost"
    if handle.error is None or handle.error_retrieved:
        return ""
    handle.error_retrieved = True
    return f"{handle!r} in the background"
