"""What a rank still has to do before it leaves: what is being saved in the background.

Owns: the time for it, and the words where that was not enough. Refuses: to import what the person has not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def finish_saves(patience: float, ask: Callable[[float], None]) -> str:
    """Wait until nothing is being saved, for `patience` seconds: what has to be said of it, "" for nothing.

    `ask(seconds)` is called first where there is something to wait for.
    """
    saving = sys.modules.get("rankbook.checkpoint.async_save")
    handle = None if saving is None else saving.latest()
    if handle is None:
        return ""
    if not handle.done:
        ask(patience)
        saving.finish(patience)  # type: ignore[union-attr]  # as of the handle
    if not handle.done:
        return f"{handle!r} was not done {patience:g} s after the rank was to leave, and is lost"
    return f"{handle!r} in the background" if handle.error is not None and not handle.heard else ""
