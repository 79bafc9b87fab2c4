"""Transfer of shared memory segments between two hosts, in parts.

`SegmentSender` cuts the segments for one peer into parts, and `SegmentReceiver` puts those of one peer together. Both
ends of a link have both, and neither sends anything itself: the caller takes the next part whenever the link has sent
most of what it was given. So a transfer can be given up in the middle, several advance at the same time, and both ends
know how far they are.

A transfer can fail at either end: the sender's segment was removed (`SegmentFailed`), or the receiver has no room for
it (`SegmentRefused`, upon which the sender stops). Either way the receiver stores the reason in place of the segment.
A message that refers to the segment is delivered, and who reads the value gets the reason as an error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rankbook.errors import ProtocolError, TransferError
from rankbook.protocol.agents import SegmentFailed, SegmentPart, SegmentRefused
from rankbook.transport.shared_memory import Bytes, SegmentStore

PART_SIZE = 1 << 20
"""Bytes of a segment in one `SegmentPart`."""
AHEAD = 8 << 20
"""Bytes that the link should have been given at any time: more than its window, so that it never waits for a part."""


@dataclass
class Transfer:
    """A segment on the way, of which `done` of `size` bytes were sent or received. `began` is a monotonic time."""

    size: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)


class SegmentSender:
    """Segments of `store` on the way to one peer.

    Their parts are taken in turn, so that no segment waits for a larger one.
    """

    def __init__(self, store: SegmentStore) -> None:
        self.transfers: dict[str, Transfer] = {}
        self._store = store
        self._contents: dict[str, memoryview] = {}
        self._turns: deque[str] = deque()

    def add(self, name: str, *, unlink: bool = False) -> SegmentFailed | None:
        """Begin to send a segment; `unlink` removes its file. Return the message for the peer if that is impossible."""
        try:
            content = self._store.read(name, unlink=unlink)
        except (TransferError, ProtocolError) as error:
            return SegmentFailed(name, str(error))
        self._contents[name] = content
        self.transfers[name] = Transfer(len(content))
        self._turns.append(name)
        return None

    def next_part(self) -> tuple[SegmentPart, memoryview] | None:
        """Return the next part with its bytes, which are not copied; None if nothing is left."""
        if not self._turns:
            return None
        name = self._turns.popleft()
        transfer, offset = self.transfers[name], self.transfers[name].done
        data = self._contents[name][offset : offset + PART_SIZE]
        transfer.done += len(data)
        if transfer.done < transfer.size:
            self._turns.append(name)
        else:
            self.cancel(name)
        return SegmentPart(name, offset, transfer.size), data

    def cancel(self, name: str) -> None:
        """Send no more of a segment."""
        if self._contents.pop(name, None) is not None:
            del self.transfers[name]
        if name in self._turns:
            self._turns.remove(name)


class SegmentReceiver:
    """Segments that one peer sends, and that are put together in `store`.

    `settled` holds the names of those that have arrived or failed, until they are dropped.
    """

    def __init__(self, store: SegmentStore) -> None:
        self.settled: set[str] = set()
        self.transfers: dict[str, Transfer] = {}
        self._store = store
        # The sender answers a refusal, so that it is known when no more parts can come.
        self._refused: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Return the names of all segments that have arrived, in part at least."""
        return self.settled | self.transfers.keys()

    def receive(self, part: SegmentPart, data: Bytes) -> SegmentRefused | None:
        """Store a part. Return the message for the peer if there is no room for the segment.

        Raises `ProtocolError` for a part that is not the next one of its segment.
        """
        name, offset, size = part.name, part.offset, part.size
        if name in self._refused:
            return None
        transfer = self.transfers.get(name, Transfer(size))
        if (offset, size) != (transfer.done, transfer.size) or name in self.settled:
            raise ProtocolError(f"invalid part of {name}: bytes from {offset} of {size}")
        others = sum(other.size - other.done for other in self.transfers.values() if other is not transfer)
        try:
            self._store.write_part(name, offset, size, data, reserved=others)
        except TransferError as error:
            self._refused.add(name)
            self._settle(name)
            self._store.write_failure(name, str(error))
            return SegmentRefused(name)
        transfer.done += len(data)
        self.transfers[name] = transfer
        if transfer.done == size:
            self._settle(name)
        return None

    def fail(self, name: str, reason: str) -> None:
        """Handle the end of a segment of which no more will come: whoever reads it gets `reason` as an error."""
        if name in self._refused:
            self._refused.remove(name)
        else:
            if name in self.transfers:
                self._store.discard(name)
            self._settle(name)
            self._store.write_failure(name, reason)

    def drop(self, names: Iterable[str]) -> None:
        """Remove segments, whether they have arrived or not. The sender sends no more of them."""
        for name in names:
            self._store.discard(name)
            self.transfers.pop(name, None)
            self.settled.discard(name)
            self._refused.discard(name)

    def close(self) -> None:
        """Remove what has arrived in part: the rest will not come."""
        self.drop(tuple(self.transfers))

    def _settle(self, name: str) -> None:
        self.transfers.pop(name, None)
        self.settled.add(name)
