"""Puts back builtins, and functions of `os` and `time`, that a cell has replaced and the rank cannot do without.

Owns: what they were before the first cell. Refuses: to look after them as long as the rank's own code works: a cell may
replace what it likes.
"""

from __future__ import annotations

import builtins
import os
import time
from types import ModuleType

_DEBUGGERS = ("exec", "fork", "posix_spawn", "spawn")
"""How those names begin that a debugger replaces, and needs."""

_originals: list[tuple[ModuleType, str, object]] = []


def remember_originals() -> None:
    """Take what is there now for the originals."""
    _originals[:] = [
        (module, name, value)
        for module in (builtins, os, time)
        for name, value in module.__dict__.items()
        if callable(value) and not name.startswith(_DEBUGGERS)
    ]


def restore_originals() -> list[str]:
    """Put the originals back; return the names of those that had been replaced. No builtin is called here."""
    replaced = []
    for module, name, value in _originals:
        if module.__dict__.get(name) is not value:
            module.__dict__[name] = value
            replaced.append(f"{module.__name__}.{name}")
    return replaced


def describe_restored(replaced: list[str]) -> str:
    """Return the line that tells a person what `restore` has put back."""
    return f"{', '.join(replaced)}: a cell had replaced this, and the rank cannot work so; it was put back\n"
