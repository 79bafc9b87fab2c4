"""What a kept rank has sent and nobody has seen yet, so that a new owner can be told.

Owns: the copy of a cell's messages, its bounds, and whether anybody is there to send to. Refuses: to wait for an owner
that is gone: without one a rank runs on, and what it says lies here.

zmq's own queue does not do: it has room for a number of messages and not of bytes, a full one blocks, and what was on
its way when the notebook died is in no queue.
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
"""Bytes that are kept; the oldest output goes first. Text alone is bounded by capture.py."""
OFFER_SECONDS = 0.2
"""How long a full link may keep a rank waiting before it looks whether the owner is still there."""

Kept = Text | TextCut | Display | Clear | InputRequest | Done


class _Entry:
    __slots__ = ("message", "size", "when")

    def __init__(self, message: Kept, when: float) -> None:
        self.when = when
        self.message = message
        self.size = len(message.data) + 64 if isinstance(message, Text) else len(encode_from_rank(message)) + 64


class ReplayBuffer:
    """The messages of the cell that runs, or of the last one until it was seen. Knows no link and no clock."""

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
        """A task has come. Whoever sends one has seen the one before."""
        self.seen(self._cell)
        self._cell = task.cell
        self._number = task.number if isinstance(task, RunCell) else -1 if isinstance(task, Regroup) else 0
        self._label = _label(task)
        self._joins = task.generation if isinstance(task, Regroup) else 0
        self._running = True

    def add(self, message: Message, when: float) -> None:
        """A message is sent. Of those that say nothing about a cell no copy is kept."""
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
            oldest = next((each for each in self._entries if not isinstance(each.message, Done)), None)
            if oldest is None:
                break
            self._remove(oldest)
            self._dropped += 1

    def seen(self, cell: int) -> None:
        """The owner has all of `cell`, and of those before."""
        self._seen = max(self._seen, cell)
        self._entries = [each for each in self._entries if each.message.cell > self._seen]
        self._displays = {name: each for name, each in self._displays.items() if each.message.cell > self._seen}
        self._size = sum(each.size for each in self._entries)
        if not self._entries:
            self._dropped = 0

    def answered(self) -> None:
        """Nobody waits for a line any more."""
        for each in [each for each in self._entries if isinstance(each.message, InputRequest)]:
            self._remove(each)

    def recall(self, nonce: str, since: float) -> tuple[ReplayStart, list[Kept]]:
        """What a new owner is told: see `RequestReplay`."""
        kept = [each.message for each in self._entries if each.message.cell > self._seen or each.when >= since]
        here = ReplayStart(
            nonce=nonce,
            cell=self._cell,
            number=self._number,
            label=self._label,
            running=self._running,
            seen=self._cell <= self._seen,
            generation=self._generation,
            entries=len(kept),
            dropped=self._dropped,
        )
        return here, kept

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
        """Whether it only changes a display that is here: of a progress display the last state is enough."""
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
    """A rank's link that does not wait for ever."""

    def offer(self, message: Message, frames: Frames = ()) -> bool:
        """Send, if there is room within a moment; whether there was."""


class DetachableLink:
    """A rank's link that keeps a copy. `owned()` says whether there is a notebook to send to."""

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
        """See `RankLink`. What is about the copies is dealt with here."""
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
                if isinstance(message, Task):  # a look, a widget or a debugger may come in the midst of one
                    self._outbox.begin(message)
                return False
        return True

    def _recall(self, message: RequestReplay) -> None:
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            return
        here, kept = self._outbox.recall(message.nonce, message.since)
        for each in (here, *kept):
            self._pass_on(each, ())

    def _pass_on(self, message: Message, frames: Frames) -> None:
        while self._owned() and not self._link.offer(message, frames):
            pass  # the notebook is there and slow

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `RankLink`."""
        return self._link.wait(timeout, files)

    def wake(self) -> None:
        """See `RankLink`."""
        self._link.wake()

    def close(self) -> None:
        """See `RankLink`."""
        self._link.close()
