"""The link between the notebook process and its ranks: the Protocols of its two ends.

Any thread may send. One thread receives: the driver thread in the notebook process, the control thread of a rank. What
arrives for another thread is handed to it in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from rankbook.errors import ProtocolError, UnreadableMessage
from rankbook.protocol.messages import FromRank, Message, ToRank, decode_from_rank

Frames = Sequence[bytes | memoryview]


class Sender(NamedTuple):
    """Which process a message came from: the rank, and which of its incarnations."""

    rank: int
    incarnation: int


def read_from_rank(sender: Sender, data: bytes | memoryview) -> FromRank:
    """Decode what `sender` sent. Raises `UnreadableMessage`, which names the sender."""
    try:
        return decode_from_rank(data)
    except ProtocolError as error:
        raise UnreadableMessage(str(error), sender) from error


class HubLink(Protocol):
    """The notebook's end: one for all ranks."""

    uplink: str

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """Make the way to one incarnation of a rank and return its address; an older one of that rank is closed."""

    def send(self, rank: int, message: Message, frames: Frames = ()) -> bool:
        """Send to the newest incarnation of `rank`. False when it is gone. Any thread."""

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """Wait, at most `timeout` seconds, for a message, a readable file descriptor, or `wake`. The receiving thread.

        Return whether there is a message, and which of `files` are readable.
        """

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """Return the next message and its sender, or None. The receiving thread.

        Raises `UnreadableMessage`; the next call goes on with the next message.
        """

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
