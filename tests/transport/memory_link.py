"""A link in memory, with both ends in one process. Messages are encoded and decoded as on the real link."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from rankbook.protocol.messages import FromRank, Message, ToRank, decode_to_rank, encode, encode_from_rank
from rankbook.transport import Frames, Sender, read_from_rank

_Item = tuple[bytes, list[memoryview]]


class MemoryHub:
    """The notebook's end. `rank_end(address)` gives the other."""

    def __init__(self) -> None:
        self.uplink = "memory:up"
        self._up: deque[tuple[Sender, _Item]] = deque()
        self._down: dict[int, tuple[str, deque[_Item]]] = {}

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """See `HubLink`."""
        address = f"memory:{rank}.{incarnation}"
        self._down[rank] = (address, deque())
        return address

    def rank_end(self, address: str) -> MemoryRank:
        """The rank's end of one downlink."""
        queue = next(queue for name, queue in self._down.values() if name == address)
        rank, incarnation = (int(part) for part in address.removeprefix("memory:").split("."))
        return MemoryRank(Sender(rank, incarnation), self._up, queue)

    def send(self, rank: int, message: Message, frames: Frames = ()) -> bool:
        """See `HubLink`."""
        if rank not in self._down:
            return False
        self._down[rank][1].append((encode(message), [memoryview(frame) for frame in frames]))
        return True

    def send_many(self, ranks: Iterable[int], message: Message, frames: Frames = ()) -> None:
        """See `HubLink`."""
        item = (encode(message), [memoryview(frame) for frame in frames])
        for rank in ranks:
            if rank in self._down:
                self._down[rank][1].append(item)

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:  # noqa: ARG002 - never waits
        """See `HubLink`; never waits."""
        return bool(self._up), set()

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """See `HubLink`."""
        if not self._up:
            return None
        sender, (data, frames) = self._up.popleft()
        return sender, read_from_rank(sender, data), frames

    def wake(self) -> None:
        """See `HubLink`."""

    def close(self) -> None:
        """See `HubLink`."""
        self._up.clear()
        self._down.clear()


class MemoryRank:
    """A rank's end."""

    def __init__(self, sender: Sender, up: deque[tuple[Sender, _Item]], down: deque[_Item]) -> None:
        self._sender = sender
        self._up = up
        self._down = down

    def send(self, message: Message, frames: Frames = ()) -> None:
        """See `RankLink`."""
        self._up.append((self._sender, (encode_from_rank(message), [memoryview(frame) for frame in frames])))

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:  # noqa: ARG002 - never waits
        """See `RankLink`; never waits."""
        return bool(self._down), set()

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """See `RankLink`."""
        if not self._down:
            return None
        data, frames = self._down.popleft()
        return decode_to_rank(data), frames

    def wake(self) -> None:
        """See `RankLink`."""

    def close(self) -> None:
        """See `RankLink`."""
