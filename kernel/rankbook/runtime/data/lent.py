"""Memory for what arrives, lent again once nobody has it any more.

Owns: which memory is free. Refuses: to take back what is still looked at, whoever holds it and however long.

A batch of megabytes in memory that is new to the process costs a page fault for each page of it, which takes longer
than the copy.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

_MOST_KEPT = 16
_ROUNDED = 1 << 16


class Lent:
    """Lends memory, and keeps some of what comes back."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self, size: int) -> Any:  # noqa: ANN401 - a numpy array, uint8[size]
        """Memory of `size` bytes; it is free once no tensor, array or view of it is left."""
        fitting = [(each.nbytes, at) for at, each in enumerate(self._free) if size <= each.nbytes <= 2 * size]
        if fitting:
            piece = self._free.pop(min(fitting)[1])
        else:
            if len(self._free) >= _MOST_KEPT:  # of sizes that are not asked for any more
                self._free.clear()
            piece = np.empty(max(1, -(-size // _ROUNDED)) * _ROUNDED, dtype=np.uint8)
        lease = np.frombuffer(piece.data, dtype=np.uint8)  # each view, however far, holds this one and not the piece
        weakref.finalize(lease, _take_back, self._free, piece).atexit = False
        return lease[:size]


def _take_back(free: list[Any], piece: Any) -> None:  # noqa: ANN401 - a numpy array
    """In whichever thread the last view ended: the list only grows here, and at its end."""
    if len(free) < _MOST_KEPT:
        free.append(piece)
