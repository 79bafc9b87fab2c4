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
from typing import Protocol

import msgspec

from rankbook.protocol.messages import (
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
    RunCell,
    Task,
    Text,
    TextCut,
    ToRank,
    encode_from_rank,
)
from rankbook.protocol.reattach import Acknowledge, ReplayStart, RequestReplay
from rankbook.transport.link import Frames, RankLink

MOST = 16 << 20
"""Maximum size in bytes; the oldest output is dropped first. `io/output_capture.py` limits text on its own."""
OFFER_SECONDS = 0.2
"""Seconds to wait for a full link before checking if the owner still exists."""

Kept = Text | TextCut | Display | Clear | InputRequest | Done


class _Entry:
    __slots__ = ("message", "size", "when")

    def __init__(self, message: Kept, when: float) -> None:
        self.when = when
        self.message = message
        self.size = len(message.data) + 64 if isinstance(message, Text) else len(encode_from_rank(message)) + 64


class ReplayBuffer:
    """Store the messages of the running cell, or of the last one until it is acknowledged.

    `most` is the limit in bytes. Pure code: uses no link and no clock.
    """

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._cell = 0
        self._number = 0
        self._label = ""
        self._running = False
        self._generation = 0
        self._joins = 0
        self._seen = 0
        self._entries: list[_Entry] = []
        self._displays: dict[str, _Entry] = {}
        self._size = 0
        self._dropped = 0

    def begin(self, task: Task) -> None:
        """Start a new task; the sender of a task has seen all earlier ones."""
        self.seen(self._cell)
        self._cell = task.cell
        self._number = task.number if isinstance(task, RunCell) else -1 if isinstance(task, Regroup) else 0
        self._label = _label(task)
        self._joins = task.generation if isinstance(task, Regroup) else 0
        self._running = True

    def add(self, message: Message, when: float) -> None:
        """Store a message that is being sent, at time `when`.

        Ignores messages that are not part of a cell's output or result. Over the limit, drops the oldest messages, but
        no `Done`.
        """
        if not isinstance(message, Kept):
            return
        if isinstance(message, Done) and message.cell == self._cell:
            self._running = False
            if self._joins:
                self._generation = self._joins if message.status == "ok" else 0
            self.answered()
        if not (isinstance(message, Display) and self._updates(message)):
            self._append(_Entry(message, when))
        while self._size > self._most:
            oldest = next((entry for entry in self._entries if not isinstance(entry.message, Done)), None)
            if oldest is None:
                break
            self._remove(oldest)
            self._dropped += 1

    def seen(self, cell: int) -> None:
        """Drop the messages of `cell` and of earlier cells: the owner has received them."""
        self._seen = max(self._seen, cell)
        self._entries = [entry for entry in self._entries if entry.message.cell > self._seen]
        self._displays = {name: entry for name, entry in self._displays.items() if entry.message.cell > self._seen}
        self._size = sum(entry.size for entry in self._entries)
        if not self._entries:
            self._dropped = 0

    def answered(self) -> None:
        """Drop pending input requests."""
        for entry in [entry for entry in self._entries if isinstance(entry.message, InputRequest)]:
            self._remove(entry)

    def recall(self, nonce: str, since: float) -> tuple[ReplayStart, list[Kept]]:
        """Return the messages to replay to a new owner, with their header; see `RequestReplay`.

        Includes unacknowledged messages, and those sent at `since` or later.
        """
        messages = [entry.message for entry in self._entries if entry.message.cell > self._seen or entry.when >= since]
        header = ReplayStart(
            nonce=nonce,
            cell=self._cell,
            number=self._number,
            label=self._label,
            running=self._running,
            seen=self._cell <= self._seen,
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

    def _updates(self, message: Display) -> bool:
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
    """A rank's link with a replay buffer. `owned()` returns True while there is a notebook to send to."""

    def __init__(self, link: TimeoutLink, token: str, owned: Callable[[], bool]) -> None:
        self._link = link
        self._token = token
        self._owned = owned
        self._outbox = ReplayBuffer()
        self._lock = threading.Lock()

    def send(self, message: Message, frames: Frames = ()) -> None:
        """See `RankLink`."""
        with self._lock:
            self._outbox.add(message, time.monotonic())
            self._pass_on(message, frames)

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """See `RankLink`. Handles messages for the replay buffer itself."""
        while (parcel := self._link.receive()) is not None:
            with self._lock:
                if not self._deal_with(parcel[0]):
                    return parcel
        return None

    def _deal_with(self, message: ToRank) -> bool:
        match message:
            case Acknowledge():
                self._outbox.seen(message.cell)
            case RequestReplay():
                self._recall(message)
            case InputReply() | Interrupt():
                self._outbox.answered()
                return False
            case _:
                if isinstance(message, Task):  # a query, comm or debugger message may arrive during a task
                    self._outbox.begin(message)
                return False
        return True

    def _recall(self, message: RequestReplay) -> None:
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            return
        header, messages = self._outbox.recall(message.nonce, message.since)
        for replayed in (header, *messages):
            self._pass_on(replayed, ())

    def _pass_on(self, message: Message, frames: Frames) -> None:
        while self._owned() and not self._link.offer(message, frames):
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
