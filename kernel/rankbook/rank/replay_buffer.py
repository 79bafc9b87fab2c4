"""Replay buffer of a detached rank: messages that no owner has acknowledged, kept for the next owner.

`ReplayBuffer` stores copies of a cell's messages within a memory limit. `DetachableLink` is the rank's link: it copies
what it sends, answers `RequestReplay`, and never waits for an owner that is gone, so that the rank runs on without one.

ZeroMQ's own queue does not serve this purpose: its limit counts messages and not bytes, it blocks when it is full, and
messages that were in transit when the notebook died are in no queue.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import msgspec

from rankbook.protocol.messages import (
    Acknowledge,
    Assign,
    Clear,
    Display,
    Done,
    FetchValue,
    InputReply,
    InputRequest,
    Interrupt,
    Message,
    Regroup,
    ReplayStart,
    RequestReplay,
    RunCell,
    Task,
    Text,
    TextCut,
    ToRank,
    encode_from_rank,
)
from rankbook.transport import Frames, RankLink, sending

MAX_BYTES = 16 << 20
"""Maximum size in bytes; the oldest output is dropped first. `rank/output_capture.py` limits text on its own."""
OFFER_SECONDS = 0.2
"""Seconds to wait for a full link before checking if the owner still exists."""

Replayable = Text | TextCut | Display | Clear | InputRequest | Done


class _Entry:
    __slots__ = ("message", "size", "when")

    def __init__(self, message: Replayable, when: float) -> None:
        self.when = when
        self.message = message
        # 64 bytes stand for the objects around the data.
        self.size = len(message.data) + 64 if isinstance(message, Text) else len(encode_from_rank(message)) + 64


class ReplayBuffer:
    """Store the messages of the running cell, or of the last one until it is acknowledged.

    `limit` is the limit in bytes. Pure code: uses no link and no clock.
    """

    def __init__(self, *, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._cell = 0
        self._number = 0
        self._label = ""
        self._running = False
        self._generation = 0
        self._joining_generation = 0
        self._acknowledged = 0
        self._entries: list[_Entry] = []
        self._displays: dict[str, _Entry] = {}
        self._size = 0
        self._dropped = 0

    def begin(self, task: Task) -> None:
        """Start a new task; the sender of a task has seen all earlier ones."""
        # Only the owner sends tasks, and it has handled everything that came before.
        self.acknowledge(self._cell)
        # A task that forms the groups anew overtakes queued cells, whose numbers are lower.
        self._acknowledged = min(self._acknowledged, task.cell - 1)
        self._cell = task.cell
        self._number = task.number if isinstance(task, RunCell) else -1 if isinstance(task, Regroup) else 0
        self._label = _label(task)
        self._joining_generation = task.generation if isinstance(task, Regroup) else 0
        self._running = True

    def add(self, message: Message, when: float) -> None:
        """Store a message that is being sent, at time `when`.

        Ignores messages that are not part of a cell's output or result. Over the limit, drops the oldest messages, but
        no `Done`.
        """
        # Replies to queries, comms and debugger messages are of no use to another owner.
        if not isinstance(message, Replayable):
            return
        # From here on the task counts as ended, even if its owner has not seen it.
        if isinstance(message, Done) and message.cell == self._cell:
            self._running = False
            if self._joining_generation:
                # A rank that has failed to join is in no group.
                self._generation = self._joining_generation if message.status == "ok" else 0
            self.drop_input_requests()
        if not (isinstance(message, Display) and self._update_display(message)):
            self._append(_Entry(message, when))
        # A result is kept at any size: without it, the new owner could never tell how the cell ended.
        while self._size > self._limit:
            oldest = next((entry for entry in self._entries if not isinstance(entry.message, Done)), None)
            if oldest is None:
                break
            self._remove(oldest)
            self._dropped += 1

    def acknowledge(self, cell: int) -> None:
        """Drop the messages of `cell` and of earlier cells: the owner has received them."""
        # A task that forms the groups anew has overtaken the cell that runs now. `begin` has dropped its messages.
        if cell > self._cell:
            cell = self._cell - 1
        # Stored as a number as well: output of a background thread of that cell may come later.
        self._acknowledged = max(self._acknowledged, cell)
        self._entries = [entry for entry in self._entries if entry.message.cell > self._acknowledged]
        self._displays = {
            name: entry for name, entry in self._displays.items() if entry.message.cell > self._acknowledged
        }
        self._size = sum(entry.size for entry in self._entries)
        if not self._entries:
            self._dropped = 0

    def drop_input_requests(self) -> None:
        """Drop pending input requests."""
        for entry in [entry for entry in self._entries if isinstance(entry.message, InputRequest)]:
            self._remove(entry)

    def replay(self, nonce: str, since: float) -> tuple[ReplayStart, list[Replayable]]:
        """Return the messages to replay to a new owner, with their header; see `RequestReplay`.

        Includes unacknowledged messages, and those sent at `since` or later.
        """
        # Acknowledged messages that were sent after the owner was lost are included: the acknowledgement was for what
        # came before.
        messages = [
            entry.message for entry in self._entries if entry.message.cell > self._acknowledged or entry.when >= since
        ]
        # The nonce tells the answers to this owner's request from those to an earlier owner's, which may still be on
        # the way.
        header = ReplayStart(
            nonce=nonce,
            cell=self._cell,
            number=self._number,
            label=self._label,
            running=self._running,
            seen=self._cell <= self._acknowledged,
            generation=self._generation,
            entries=len(messages),
            dropped=self._dropped,
        )
        return header, messages

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._size += entry.size
        if isinstance(entry.message, Display) and entry.message.display_id is not None:
            self._displays[entry.message.display_id] = entry

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._size -= entry.size
        name = entry.message.display_id if isinstance(entry.message, Display) else None
        if name is not None and self._displays.get(name) is entry:
            del self._displays[name]

    def _update_display(self, message: Display) -> bool:
        """Apply an update to a stored display; return False if there is none.

        A progress display then takes the space of one message.
        """
        entry = self._displays.get(message.display_id or "") if message.kind == "update" else None
        if entry is None or not isinstance(entry.message, Display):
            return False
        self._size -= entry.size
        entry.message = msgspec.structs.replace(entry.message, data=message.data, metadata=message.metadata)
        entry.size = len(encode_from_rank(entry.message)) + 64
        self._size += entry.size
        return True


def _label(task: Task) -> str:
    match task:
        case RunCell(number=number) if number:
            return f"cell [{number}]"
        case RunCell():
            return "a cell"
        case Assign():
            return "a push"
        case FetchValue(name=name):
            return f"a pull of {name}"
        case Regroup():
            return "forming the group"
        case _:
            return "a call"


class TimeoutLink(RankLink, Protocol):
    """A rank's link whose sends time out."""

    def offer(self, message: Message, frames: Frames = ()) -> bool:
        """Send the message if there is room in time; return True if it was sent."""


class DetachableLink:
    """A rank's link with a replay buffer. `is_owned()` returns True while there is a notebook to send to."""

    def __init__(self, link: TimeoutLink, token: str, is_owned: Callable[[], bool]) -> None:
        self._link = link
        self._token = token
        self._is_owned = is_owned
        self._buffer = ReplayBuffer()
        self._lock = threading.Lock()

    def send(self, message: Message, frames: Frames = ()) -> None:
        """See `RankLink`."""
        if sending.active:
            sending.postpone(partial(self.send, message, frames))
            return
        # Stored and sent under one lock, so that a replay has every message exactly once, and in order.
        with sending, self._lock:
            self._buffer.add(message, time.monotonic())
            self._forward(message, frames)

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """See `RankLink`. Handles messages for the replay buffer itself."""
        while (received := self._link.receive()) is not None:
            with sending, self._lock:  # `_handle` may send
                if not self._handle(received[0]):
                    return received
        return None

    def _handle(self, message: ToRank) -> bool:
        match message:
            case Acknowledge():
                self._buffer.acknowledge(message.cell)
            case RequestReplay():
                self._replay(message)
            # The question has been answered, or its call interrupted. A new owner must not ask it again.
            case InputReply() | Interrupt():
                self._buffer.drop_input_requests()
                return False
            case _:
                if isinstance(message, Task):  # a query, comm or debugger message may arrive during a task
                    self._buffer.begin(message)
                return False
        return True

    def _replay(self, message: RequestReplay) -> None:
        # In constant time, and without an answer: whoever lacks the cluster's token learns nothing from it.
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            return
        header, messages = self._buffer.replay(message.nonce, message.since)
        for replayed in (header, *messages):
            # The lock is held by `receive`, so no new message comes between the repeated ones.
            self._forward(replayed, ())

    def _forward(self, message: Message, frames: Frames) -> None:
        # Every failed attempt has taken `OFFER_SECONDS`. Without an owner, the message stays in the buffer only.
        while self._is_owned() and not self._link.offer(message, frames):
            pass  # the notebook exists but is slow

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `RankLink`."""
        return self._link.wait(timeout, files)

    def wake(self) -> None:
        """See `RankLink`."""
        self._link.wake()

    def close(self) -> None:
        """See `RankLink`."""
        self._link.close()
