"""Waiting for descriptors to become readable, in a set that another thread may change meanwhile.

Owns: epoll (Linux) and kqueue (macOS). Refuses: to read, and everything but readability. The `selectors` module would
do, were it not for its bookkeeping, which is most of what a change costs: each cell makes four.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Collection


class Watch:
    """A set of descriptors, and itself one that is readable when one of them is. Any thread may change it."""

    def __init__(self, *files: int) -> None:
        if sys.platform == "darwin":
            self._set = select.kqueue()
        else:
            self._set = select.epoll()
        for file in files:
            self.add(file)

    def fileno(self) -> int:
        """The set's own descriptor."""
        return self._set.fileno()

    def add(self, file: int) -> None:
        """Watch `file` too."""
        if sys.platform == "darwin":
            self._set.control([select.kevent(file, select.KQ_FILTER_READ, select.KQ_EV_ADD)], 0)
        else:
            self._set.register(file, select.EPOLLIN)

    def remove(self, file: int) -> None:
        """Watch `file` no more."""
        if sys.platform == "darwin":
            self._set.control([select.kevent(file, select.KQ_FILTER_READ, select.KQ_EV_DELETE)], 0)
        else:
            self._set.unregister(file)

    def change(self, old: Collection[int], new: Collection[int]) -> None:
        """Watch `new` instead of `old`."""
        for file in set(old).difference(new):
            self.remove(file)
        for file in set(new).difference(old):
            self.add(file)

    def wait(self, timeout: float | None) -> set[int]:
        """The descriptors that are readable, after at most `timeout` seconds; None for as long as it takes."""
        if sys.platform == "darwin":
            return {event.ident for event in self._set.control(None, 16, timeout)}
        return {file for file, _ in self._set.poll(timeout)}

    def close(self) -> None:
        """Give up the set's own descriptor."""
        self._set.close()
