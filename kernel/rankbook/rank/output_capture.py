"""Capture stdout and stderr of a rank: of Python, C++ code, subprocesses and DataLoader workers.

File descriptors 1 and 2 are pipes, so the output of a subprocess keeps its place between the rank's own. Before
anything else is sent (a display, the end of a cell), the pipes are drained under the same lock. Python's two streams
drain the pipes whenever output switches between them, so that stdout and stderr stay in order as well
(`TurnTakingStream`).

A rank may send `MAX_CELL_OUTPUT` bytes per cell, or less if all ranks together reach that (`LimitOutput`); the rest
goes to a log file (`_Quota`). `RateLimit` slows the reading
of the pipes, and so the program that prints, to what the front end accepts. `print_in_one_write` replaces `print`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rankbook.protocol import StreamName
from rankbook.protocol.messages import MAX_CELL_OUTPUT, Text, TextCut
from rankbook.rank import os_utils
from rankbook.transport import sending
from rankbook.transport.output_journal import OutputJournal

RATE_LIMIT_STEP = 0.05
"""Seconds between two checks whether the rate limit allows more output."""
_WINDOW = 3.2
"""Seconds over which Jupyter's server measures the rate, with a margin."""

_PRIVATE = partial(os.open, mode=0o600)
TAIL_BYTES = 8 << 10
"""Bytes at the end of a flood that are shown in any case."""


class Redirect(Protocol):
    """Interface of a target that receives text instead of the cell, such as an Output widget."""

    def write(self, name: StreamName, data: bytes) -> None:
        """Write bytes of the stream `name`."""


class OutputCapture:
    """Reads the pipes of stdout and stderr, and sends the text.

    `outputs` are the read and write ends of the pipes (stdout read, stdout write, stderr read, stderr write). `send`
    sends a message to the notebook, and `shield` holds interrupts back meanwhile. `logs` is the folder for log files,
    `rate_limit` the rate limit, and `journal` the path of the `OutputJournal`. `host` is the name of a
    host that is not the notebook's, for the paths of log files.
    """

    def __init__(
        self,
        outputs: tuple[int, int, int, int],
        send: Callable[[Text | TextCut], None],
        shield: Callable[[], contextlib.AbstractContextManager[None]],
        logs: Path,
        rank: int,
        rate_limit: RateLimit | None = None,
        journal: Path | None = None,
        host: str = "",
    ) -> None:
        out_read, out_write, err_read, err_write = outputs
        # Descriptors 1 and 2 are what C++ code, subprocesses and `os.write` use, whatever Python's `sys.stdout` is.
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        os.close(out_write)
        os.close(err_write)
        self.files = (out_read, err_read)
        # `poll`, since `select` fails for descriptors above 1023, which a rank with many workers may reach.
        self._poll = select.poll()
        for descriptor in self.files:
            self._poll.register(descriptor, select.POLLIN)
        self._names: tuple[StreamName, StreamName] = ("stdout", "stderr")
        self._send = send
        self._shield = shield
        self._logs = logs
        self._rank = rank
        self._host = host
        self._rate_limit = rate_limit or RateLimit(rate=None, burst=0)
        self._journal = OutputJournal(journal)
        self._never = threading.Event()
        # Reentrant: `_send_in_order` of the executor holds it while it calls `drain`.
        self.lock = threading.RLock()
        # Of Python's buffers, which have locks of their own: a child that is forked while another thread prints would
        # wait for it in its first `print`. No other lock is taken while it is held.
        self.stream_lock = threading.RLock()
        self._draining = False
        self._quota = _Quota(0, logs, f"before-the-first-cell-rank-{rank}.log", host)
        self.forked = False
        self._main = threading.get_ident()
        self._redirects: list[Redirect] = []
        self.thread_redirects: dict[int, list[Redirect]] = {}
        self._streams = (TurnTakingStream(1, self), TurnTakingStream(2, self))
        sys.stdout, sys.stderr = self._streams
        # Programs that have replaced the streams restore these.
        sys.__stdout__, sys.__stderr__ = self._streams  # type: ignore[misc]
        builtins.print = print_in_one_write
        os.register_at_fork(
            before=self.stream_lock.acquire, after_in_parent=self._end_fork, after_in_child=self._become_child
        )

    def _end_fork(self) -> None:
        with contextlib.suppress(RuntimeError):  # an interrupt has ended the wait for it
            self.stream_lock.release()

    def _become_child(self) -> None:
        """Stop capturing in a forked child, such as a DataLoader worker: the rank reads the pipes."""
        self._end_fork()
        self.forked = True
        self.thread_redirects.clear()  # the capturing widgets belong to the rank

    def begin(self, cell: int) -> None:
        """Attribute the output from now on to `cell`."""
        # Python's buffers first, then the pipes, then the new quota: what was printed before belongs to the old cell.
        self._flush_streams()
        with self.lock:
            self.drain()
            for message in self._quota.close():  # output of a thread after the end of its cell
                self._send(message)
            self._quota = _Quota(cell, self._logs, f"cell-{cell}-rank-{self._rank}.log", self._host)

    def limit(self, cell: int) -> None:
        """Send no more text of `cell`, unless it has ended. The rest goes to the log, as after a flood."""
        with self.lock:
            if self._quota.cell == cell:
                self._quota.exhaust()

    def redirect(self, target: Redirect) -> None:
        """Redirect this thread's output to `target`; on the main thread, all output of the process."""
        # Descriptors 1 and 2 exist once per process, so only the main thread can redirect the pipes. Other threads
        # redirect what they write by Python's streams.
        if threading.get_ident() != self._main:
            self.thread_redirects.setdefault(threading.get_ident(), []).append(target)
            return
        self.flush()
        with self.lock:
            self.drain()
            self._redirects.append(target)

    def current_redirect(self) -> Redirect | None:
        """Return the current redirect of this thread, or None."""
        redirects = (
            self._redirects if threading.get_ident() == self._main else self.thread_redirects.get(threading.get_ident())
        )
        return redirects[-1] if redirects and not self.forked else None

    def end_redirect(self) -> None:
        """End the innermost redirect of this thread."""
        if threading.get_ident() != self._main:
            redirects = self.thread_redirects[threading.get_ident()]
            redirects.pop()
            if not redirects:
                del self.thread_redirects[threading.get_ident()]
            return
        self.flush()
        with self.lock:
            self.drain()
            self._redirects.pop()

    def flush(self) -> None:
        """Flush Python's buffers into the pipes, also of streams that user code has put in place of sys.stdout.

        The same holds for sys.stderr. Their `flush` is user code, so only the main thread calls this, while a cell
        runs. Raises KeyboardInterrupt.
        """
        # The two streams of this class are flushed below, without calling code that a user may have attached.
        for stream in (sys.stdout, sys.stderr):
            if stream is not self._streams[0] and stream is not self._streams[1]:
                with contextlib.suppress(Exception, SystemExit):  # without flush, closed, or one that raises
                    stream.flush()
        self._flush_streams()

    def _flush_streams(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(Exception):  # user code has closed it
                TurnTakingStream.flush(stream)

    def drain(self) -> None:
        """Send the content of the pipes. Any thread.

        In the middle of a send, as in a finalizer, it stays there: the control thread reads it a moment later.
        """
        if self.forked or sending.active:
            return
        # The shield first: an interrupt between the two would leave the lock held, or a message half sent.
        with self._shield(), self.lock:
            self._send_pipes(MAX_CELL_OUTPUT)

    def drain_if_room(self) -> None:
        """Send the content of the pipes as `drain` does, unless the rate limit is exhausted. Any thread."""
        if self.forked or sending.active:
            return
        with self._shield(), self.lock:
            if self._rate_limit.room() != 0:
                self._send_pipes(MAX_CELL_OUTPUT)

    def send_stderr(self, text: str) -> None:
        """Send `text` as if it came from stderr, without the pipe. Any thread."""
        with self._shield(), self.lock:
            for message in self._quota.admit("stderr", text.encode(errors="replace")):
                self._send(message)

    def _send_pipes(self, most: int) -> bool:
        """Send up to `most` bytes of every pipe. Return True if there may be more."""
        # A finalizer that prints here must not send what comes after the bytes that were just read.
        if self._draining:
            return False
        self._draining = True
        try:
            return self._read_and_send(most)
        finally:
            self._draining = False

    def _read_and_send(self, most: int) -> bool:
        ready = {file for file, _ in self._poll.poll(0)}  # one system call instead of two reads of empty pipes
        more = False
        for descriptor, name in zip(self.files, self._names, strict=True):
            data = self._read(descriptor, name, most) if descriptor in ready else b""
            more = more or len(data) >= most
            if data and self._redirects:
                self._redirects[-1].write(name, data)
            elif data:
                # Redirected text does not count: it reaches the page as a widget's state.
                self._rate_limit.spend(len(data))
                for message in self._quota.admit(name, data):
                    self._send(message)
                # What goes to the log file only must not be recovered from the journal after a crash.
                if not self._quota.open:
                    self._journal.end()
        return more

    def _read(self, descriptor: int, name: StreamName, most: int) -> bytes:
        data = self._journal.transfer(descriptor, name, self._quota.cell, most) if self._quota.open and most else None
        return os_utils.read_available(descriptor, most=most) if data is None else data

    def drain_within_limit(self) -> float:
        """Send as much as the rate limit allows. Return the seconds to wait for more, or 0 if the pipes are empty."""
        with self.lock:
            # With the quota used up, the text goes to a file, which is not limited.
            room = self._rate_limit.room() if self._quota.open else None
            if room is not None:
                return RATE_LIMIT_STEP if self._send_pipes(room) else 0.0
        self.drain()
        return 0.0

    def end(self) -> None:
        """Send the remaining output of the cell, and the notice about output that was cut."""
        self._flush_streams()
        # The end of the cell waits until its output has left at the allowed rate, because the front end would drop the
        # excess.
        while self._rate_limit.rate is not None and self.drain_within_limit():
            self._never.wait(RATE_LIMIT_STEP)
        with self.lock:
            self.drain()
            self._redirects.clear()  # a redirect ends with its cell
            for message in self._quota.close():
                self._send(message)


class RateLimit:
    """Limits the rate of text to a front end that drops excess messages. `rate` is in bytes/s; None means no limit.

    Jupyter's server drops messages beyond 1,000,000 bytes/s over 3 s (`iopub_data_rate_limit`). Not reading the pipe
    makes the printing program wait instead, which loses nothing. A burst and the output after it share those 3 s:
    `window` is the number of bytes allowed in that time.
    """

    def __init__(self, *, rate: float | None, burst: int, window: int | None = None) -> None:
        self.rate = rate
        self._burst = burst
        self._window = burst if window is None else window
        # Time and size of what was sent within the window, and their sum, so that `room` need not add them up.
        self._sends: deque[tuple[float, int]] = deque()
        self._recent = 0
        self._room = float(burst)
        self._last = time.monotonic()

    def room(self) -> int | None:
        """Return the bytes that may be sent now; None for no limit."""
        if self.rate is None:
            return None
        # A token bucket, filled with `rate` bytes/s up to `burst`, and a sliding window over `_WINDOW` seconds.
        now = time.monotonic()
        self._room = min(self._burst, self._room + (now - self._last) * self.rate)
        self._last = now
        if not self._sends:
            self._recent = 0
        while self._sends and now - self._sends[0][0] > _WINDOW:
            self._recent -= self._sends.popleft()[1]
        return max(0, min(int(self._room), self._window - self._recent))

    def spend(self, size: int) -> None:
        """Record that `size` bytes were sent. An excess is subtracted from future room."""
        self._room -= size
        if self.rate is not None:
            self._sends.append((time.monotonic(), size))
            self._recent += size


class _Quota:
    """The number of bytes that a cell may still send, and the log file that takes the rest."""

    def __init__(self, cell: int, logs: Path, name: str, host: str = "") -> None:
        self.cell = cell
        self._logs = logs
        self._host = host
        self._name = name
        self._path: Path | None = None
        self._sent: list[bytes] | None = []
        self._room = MAX_CELL_OUTPUT
        # The pieces of `_sent` without the states of bars that others overwrite, and the last state behind them.
        self._discounted, self._state = 0, b""
        self._can_regain = True
        self._log: io.FileIO | None = None
        self._cut_bytes = 0
        self._cut_lines = 0
        # A flood of 100 MB on stdout shows: the first 4 MiB, a line that names the log file, and at the end of the cell
        # a line with what was cut (`TextCut`) and the last 8 KiB. The log file has all of it.
        self._tail: deque[tuple[StreamName, bytes]] = deque()
        self._tail_size = 0

    @property
    def open(self) -> bool:
        """Return True while text is still sent to the notebook."""
        return self._sent is not None

    def exhaust(self) -> None:
        self._room = 0
        self._can_regain = False

    def admit(self, name: StreamName, data: bytes) -> list[Text | TextCut]:
        if self._sent is not None:
            # Within the quota, send the text and keep a copy for the log. The piece that exceeds the quota is cut at
            # the end of a line; from then on everything goes to the log, and the last `TAIL_BYTES` bytes are kept in
            # memory.
            if len(data) <= self._room or self._regain_room(len(data)):
                self._room -= len(data)
                self._sent.append(data)
                return [Text(cell=self.cell, stream=name, data=data)]
            end = data.rfind(b"\n", 0, self._room) + 1
            sent, data = data[:end], data[end:]
            self._sent.append(sent)
            note = self._open_log()
            return [
                *([Text(cell=self.cell, stream=name, data=sent)] if sent else []),
                Text(cell=self.cell, stream="stderr", data=note.encode()),
                *self.admit(name, data),
            ]
        self._write(data)
        self._cut_bytes += len(data)
        self._cut_lines += data.count(b"\n")
        self._tail.append((name, data[-TAIL_BYTES:]))
        self._tail_size += len(self._tail[-1][1])
        # Whole pieces are dropped, as long as the rest has `TAIL_BYTES` bytes.
        while self._tail_size - len(self._tail[0][1]) >= TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft()[1])
        return []

    def _regain_room(self, size: int) -> bool:
        """Discount the rows that were rewritten in place, and return True if there is room for `size` bytes then.

        Only now, when the room is used up: ordinary text, which is sent at a high rate, needs no look at its content.
        """
        if not self._can_regain or self._sent is None:
            return False
        regained, kept, state = 0, self._sent[: self._discounted], self._state
        for data in self._sent[self._discounted :]:
            if state and data.startswith(b"\n"):  # it was the last one of its row
                kept.append(state)
            count, rest, state = _without_redraws(data) if b"\r" in data else (len(data), data, b"")
            regained += len(data) - count
            if rest:
                kept.append(rest)
        self._sent, self._discounted, self._state = kept, len(kept), state
        self._room += regained
        # With little to regain, the next attempt would come soon, and take as long. What is kept has a limit.
        self._can_regain = regained >= MAX_CELL_OUTPUT // 16 and sum(map(len, kept)) <= _MAX_KEPT
        return size <= self._room

    def close(self) -> list[Text | TextCut]:
        if self._sent is not None or not self._cut_bytes:
            return []
        last: list[Text] = []
        tail_size = 0
        # From the end backwards, until enough bytes are together.
        for name, data in reversed(self._tail):
            piece = data[-(TAIL_BYTES - tail_size) :] if tail_size < TAIL_BYTES else b""
            tail_size += len(piece)
            last.insert(0, Text(cell=self.cell, stream=name, data=piece))
        # The first line is incomplete, and is left out.
        if self._cut_bytes > tail_size and last:
            first = last[0]
            last[0] = Text(cell=first.cell, stream=first.stream, data=first.data[first.data.find(b"\n") + 1 :])
        sent_size = sum(len(text.data) for text in last)
        lines = self._cut_lines - sum(text.data.count(b"\n") for text in last)
        cut = TextCut(cell=self.cell, lines=lines, size=self._cut_bytes - sent_size, log=self._describe_log())
        # A thread may print more after this, which then gets a notice of its own.
        self._cut_bytes = self._cut_lines = self._tail_size = 0
        self._tail.clear()
        if self._log is not None:
            self._log.close()
        return [cut, *last]

    def _open_log(self) -> str:
        assert self._sent is not None
        self._path = self._logs / self._name
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log = io.FileIO(self._path, "w", opener=_PRIVATE)
        except OSError as error:
            self._path = None
            note = f"too much output to show; the rest is discarded, because no log file can be written: {error}\n"
        else:
            before, behind = self._sent[: self._discounted], self._sent[self._discounted :]
            for data in (*before, self._state, *behind):
                self._write(data)
            note = f"too much output to show; the complete output is written to {self._describe_log()}\n"
        self._sent = None
        return note

    def _write(self, data: bytes) -> None:
        if self._log is None or self._log.closed:
            if self._path is None or self._log is None:
                return
            # The log was closed at the end of the cell, and a thread prints again.
            self._log = io.FileIO(self._path, "a", opener=_PRIVATE)
        view = memoryview(data)
        try:
            while view:
                view = view[self._log.write(view) or 0 :]
        except OSError:  # the disk is full: the log stays, and `_describe_log` reports that it is incomplete
            self._log.close()
            self._log = None

    def _describe_log(self) -> str:
        if self._path is None:
            return "(no log could be written)"
        path = f"{self._path} on {self._host}" if self._host else str(self._path)
        return path if self._log is not None else f"{path} (truncated: the disk is full)"


_REDRAW_RATIO = 64
"""Bytes of rows that are rewritten in place which count as one byte of the quota."""


_MAX_KEPT = 4 * MAX_CELL_OUTPUT
"""Bytes of the text that was sent, and is kept for the log, above which rewritten rows are counted in full."""


def _without_redraws(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the number of bytes that `data` counts, the part to keep for the log, and the state of its last row.

    The notebook shows only the latest state of a row that is rewritten with carriage returns, such as a progress bar.
    So the states of a bar count little, and those that others overwrite are not kept. Where the cursor moves up, as
    for bars below each other, all of these rows are rewritten.
    """
    text = data.replace(b"\r\n", b"\n")
    if b"\r" not in text:
        return len(data), data, b""
    rows = text.split(b"\n")
    moves_up = b"\x1b[A" in text
    kept = [b"" if moves_up and b"\r" in row else row.rpartition(b"\r")[2] for row in rows]
    state = b""
    if b"\r" in rows[-1]:
        # Its end may be half of a line break.
        kept[-1], state = b"", rows[-1].rstrip(b"\r").rpartition(b"\r")[2]
    rewritten = sum(len(row) for row in rows if b"\r" in row)
    return max(1, len(data) - rewritten + rewritten // _REDRAW_RATIO), b"\n".join(kept), state


_DRAIN_INTERVAL = 0.005
"""Seconds between two drains during a flood on stderr: no child process starts and prints sooner."""


class TurnTakingStream(io.TextIOWrapper):
    """Python's stdout or stderr in a rank: line-buffered, and in order with the other one.

    The two pipes have no common order. When output switches streams, the other stream is flushed and both pipes are
    drained before the new text is written.
    """

    _last: TurnTakingStream | None = None

    def __init__(self, descriptor: int, capture: OutputCapture) -> None:
        # `closefd=False`: closing `sys.stdout`, as some programs do, must not close the descriptor.
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._capture = capture
        self._drains = descriptor == 2
        self._due = 0.0

    def write(self, text: str, /) -> int:
        """Write `text`, after sending the earlier text of the other stream."""
        if self._capture.thread_redirects and (redirects := self._capture.thread_redirects.get(threading.get_ident())):
            redirects[-1].write("stderr" if self._drains else "stdout", text.encode(errors="backslashreplace"))
            return len(text)
        # A class attribute: there is one order for both streams.
        last = TurnTakingStream._last
        if last is not self:
            TurnTakingStream._last = self
            if last is not None:
                with contextlib.suppress(ValueError):
                    last.flush()
                self._capture.drain()
        with self._capture.stream_lock:
            written = super().write(text)
            if "\n" not in text and "\r" not in text:
                self.flush()  # shows a partial line at once, and keeps it if the next statement kills the process
        if self._drains and time.monotonic() > self._due:  # else a child's stdout, which is read first, overtakes it
            self._capture.drain_if_room()
            self._due = time.monotonic() + _DRAIN_INTERVAL
        return written

    def flush(self) -> None:
        """Write what is buffered."""
        with self._capture.stream_lock:
            super().flush()


_print = print


@functools.wraps(_print)
def print_in_one_write(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,  # noqa: ANN401 - any object with a write method
    flush: bool = False,
) -> None:
    """Print as the builtin does, with one write for the whole text: every write is a system call."""
    stream = sys.stdout if file is None else file
    # Exactly this type, since a subclass or another object may define `write` in its own way.
    if type(stream) is not TurnTakingStream:
        _print(*values, sep=sep, end=end, file=file, flush=flush)
    else:
        stream.write((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))
