"""At most so many updates a second, and the last one always.

Owns: when to send. Refuses: what.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock, Timer

from rankbook.widgets.daemon_threads import start_thread

INTERVAL = 0.1  # seconds: past a thousand messages a second Jupyter drops the rest, and nobody reads faster


class Pacer:
    """Calls `send` after each `note`, on a thread of its own, at most once per `interval` seconds.

    Notes that come in between are one. Nothing runs while there is nothing to send.
    """

    def __init__(self, send: Callable[[], None], interval: float = INTERVAL) -> None:
        self._send, self._interval = send, interval
        self._lock, self._sending = Lock(), Lock()
        self._timer: Timer | None = None
        self._due = 0.0
        self._closed = False

    def note(self) -> None:
        """There is something new."""
        with self._lock:
            if self._timer is None and not self._closed:
                self._timer = Timer(max(0.0, self._due - time.monotonic()), self._fire)
                self._timer.name = "rankbook-view"
                self._closed = not start_thread(self._timer)

    def close(self) -> None:
        """Send nothing any more."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _fire(self) -> None:
        with self._lock:
            self._timer = None
            # A late one does not push the next one back, so that ten a second are ten, and never more than eleven.
            self._due = max(self._due + self._interval, time.monotonic() + self._interval / 2)
        with self._sending:
            if not self._closed:
                self._send()
