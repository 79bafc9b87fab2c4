"""Python's stdout and stderr in a rank, and a `print` that writes once.

Owns: that the two streams keep their order. Refuses: pipes and messages, which are capture.py's.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankbook.rank.io.output_capture import Capture

_DRAIN_PACE = 0.005
"""Seconds in which a flood on stderr is sent once: no child starts and prints sooner."""


class TurnTakingStream(io.TextIOWrapper):
    """Python's stdout or stderr in a rank: line-buffered, and in order with the other one."""

    _last: TurnTakingStream | None = None

    def __init__(self, descriptor: int, capture: Capture) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._capture = capture
        self._drains = descriptor == 2
        self._due = 0.0

    def write(self, text: str, /) -> int:
        """Write `text`; the other stream's text that came before is sent before."""
        if self._capture.elsewhere and (places := self._capture.elsewhere.get(threading.get_ident())):
            places[-1].write("stderr" if self._drains else "stdout", text.encode(errors="backslashreplace"))
            return len(text)
        last = TurnTakingStream._last
        if last is not self:
            TurnTakingStream._last = self
            if last is not None:
                with contextlib.suppress(ValueError):
                    last.flush()
                self._capture.drain()
        written = super().write(text)
        if "\n" not in text and "\r" not in text:
            self.flush()  # half a line shows at once too, and is not lost when the process dies of the next statement
        if self._drains and time.monotonic() > self._due:  # else a child's stdout, which is read first, overtakes it
            self._capture.drain_if_room()
            self._due = time.monotonic() + _DRAIN_PACE
        return written


_print = print


@functools.wraps(_print)
def print_in_one_write(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,  # noqa: ANN401 - whatever has a write
    flush: bool = False,
) -> None:
    """As `print`: its text is one write and not one per value, for each write is a system call."""
    stream = sys.stdout if file is None else file
    if type(stream) is not TurnTakingStream:
        _print(*values, sep=sep, end=end, file=file, flush=flush)
    else:
        stream.write((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))
