"""What a link between the notebook process and its ranks is.

Owns: the two Protocols. Refuses: to say how bytes travel.

Both ends may *send* from any thread; one thread owns *receiving*. That saves a thread switch on each side of a cell,
which is a third of what a cell costs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from rankbook.messages import FromRank, Message, ToRank

Frames = Sequence[bytes | memoryview]


class Sender(NamedTuple):
    """Which process a message came from: the rank, and which of its incarnations."""

    rank: int
    incarnation: int


class HubLink(Protocol):
    """The notebook's end: one for all ranks."""

    uplink: str

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """Make the way to one incarnation of a rank and return its address; an older one of that rank is closed."""

    def send(self, rank: int, message: Message, frames: Frames = ()) -> bool:
        """Send to the newest incarnation of `rank`. False when it is gone. Any thread."""

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """Wait, at most `timeout` seconds, for a message, a readable file descriptor, or `wake`. One thread."""

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """The next message and who sent it, or None. The same thread as `wait`. Raises `ProtocolError`."""

    def wake(self) -> None:
        """Make `wait` return. Any thread."""

    def close(self) -> None:
        """Close everything; what was sent leaves first, for a moment."""


class RankLink(Protocol):
    """A rank's end."""

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Send to the notebook. Any thread."""

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """As on the other end."""

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """As on the other end."""

    def wake(self) -> None:
        """As on the other end."""

    def close(self) -> None:
        """As on the other end."""
