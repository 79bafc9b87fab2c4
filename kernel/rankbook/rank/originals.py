"""Restore builtins, and functions of `os` and `time`, that a cell has replaced.

Called only when the rank's own code has failed: a cell may replace these functions as long as the rank still works.
"""

from __future__ import annotations

import builtins
import os
import time
from types import ModuleType

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
