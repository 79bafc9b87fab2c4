"""What a link between the notebook process and its ranks is.

Owns: the two Protocols. Refuses: to say how bytes travel.

Both ends may *send* from any thread. One thread owns *receiving*, its home thread, until another that has nothing else
to do takes it over for a while: the one that waits for a cell in the notebook, a rank's main thread between two cells.
Together that saves two thread switches on each side of a cell, which is a third of what a cell costs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from rankbook.errors import ProtocolError, UnreadableMessage
from rankbook.messages import FromRank, Message, ToRank, decode_from_rank

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
        """Wait, at most `timeout` seconds, for a message, a readable file descriptor, or `wake`. The home thread.

        While another thread has taken over, messages come to that one, and only `files` and the time end this.
        """

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """The next message and who sent it, or None. The thread that messages come to.

        Raises `UnreadableMessage`; the next call goes on with the next message.
        """

    def take_over(self) -> None:
        """Messages and `wake` are this thread's from now on. Does not wake the home thread."""

    def wait_here(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """As `wait`, for the thread that has taken over."""

    def give_back(self) -> None:
        """They are the home thread's again."""

    def wake(self) -> None:
        """Make the `wait` return that messages come to. Any thread."""

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

    def take_over(self) -> None:
        """As on the other end."""

    def wait_here(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """As on the other end."""

    def give_back(self) -> None:
        """As on the other end."""

    def wake(self) -> None:
        """As on the other end."""

    def close(self) -> None:
        """As on the other end."""
