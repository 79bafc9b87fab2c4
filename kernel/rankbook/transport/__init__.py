"""Move messages and large values between the notebook process, the forkserver and the ranks.

The transport does not interpret messages. This module has the protocols of the two ends of the link between the
notebook process and its ranks. Any thread may send. One thread receives: the driver thread in the notebook process, the
control thread in a rank. They hand messages for other threads on in memory.

zmq_link.py         the link over ZeroMQ; the only module that imports zmq
framed_socket.py    length-prefixed messages over a socket pair, for the forkserver
serialization.py    values to buffers and back, with the sources of cells; errors for values that cannot be pickled
tensors.py          torch tensors out of band
shared_memory.py    shared memory files, their transfer to other hosts, and the private folder of a cluster
output_journal.py   crash-safe copy of a rank's latest output, in files that outlive the process
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from rankbook.errors import ProtocolError, UnreadableMessage
from rankbook.protocol.messages import FromRank, Message, ToRank, decode_from_rank

Frames = Sequence[bytes | memoryview]


class Sender(NamedTuple):
    """The process that sent a message: a rank and its incarnation."""

    rank: int
    incarnation: int


def read_from_rank(sender: Sender, data: bytes | memoryview) -> FromRank:
    """Decode a message of `sender`. Raises `UnreadableMessage`, which names the sender."""
    try:
        return decode_from_rank(data)
    except ProtocolError as error:
        raise UnreadableMessage(str(error), sender) from error


class _Sending(threading.local):
    """The send that this thread is in, between `__enter__` and `__exit__`.

    The garbage collector and signal handlers run Python code in the middle of a send, on its thread: the finalizer of a
    progress bar prints, or that of a widget sends a message. The locks of a send are not reentrant, nor is a socket
    with half of a message. So what is printed stays in its pipe meanwhile, and messages are postponed.
    """

    def __init__(self) -> None:
        self.active = False
        self._postponed: list[Callable[[], None]] = []

    def postpone(self, send: Callable[[], None]) -> None:
        """Call `send` after the send of this thread."""
        self._postponed.append(send)

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_error: object) -> None:
        self.active = False
        if self._postponed:
            postponed, self._postponed = self._postponed, []
            for send in postponed:
                send()


sending = _Sending()


class HubLink(Protocol):
    """The notebook's end, shared by all ranks."""

    uplink: str

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """Open the channel to an incarnation of a rank and return its address. Closes the channel to an older one."""

    def send(self, rank: int, message: Message, frames: Frames = ()) -> bool:
        """Send to the newest incarnation of `rank`. Return False if it is gone. Any thread."""

    def send_many(self, ranks: Iterable[int], message: Message, frames: Frames = ()) -> None:
        """Send one message to several ranks, in this order, as `send` does; it is encoded once. Any thread."""

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """Wait up to `timeout` seconds for a message, a readable descriptor, or `wake`. Receiving thread only.

        Return whether a message has arrived, and the readable descriptors among `files`.
        """

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """Return the next message and its sender, or None. Receiving thread only.

        Raises `UnreadableMessage`; the next call continues with the next message.
        """

    def wake(self) -> None:
        """Make `wait` return. Any thread."""

    def close(self) -> None:
        """Close the link. Messages that were sent get a short time to leave."""


class RankLink(Protocol):
    """A rank's end."""

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Send to the notebook. Any thread."""

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """Wait as `HubLink.wait` does."""

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """Return the next message and its frames, or None. Receiving thread only."""

    def wake(self) -> None:
        """Make `wait` return. Any thread."""

    def close(self) -> None:
        """Close the link. Messages that were sent get a short time to leave."""
