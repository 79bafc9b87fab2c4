"""Length-prefixed messages over a connected stream socket, between the notebook process and the forkserver.

Reading never blocks, so one poll can serve the socket. Sending blocks only until there is room to write. A message is
its length, as a 32-bit little-endian integer, and its encoded bytes.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rankbook.protocol.messages import Message, encode

_T = TypeVar("_T")
_HEADER = struct.Struct("<I")


class MessageStream(Generic[_T]):
    """A connected stream socket that carries messages. `closed` is True once the peer has disconnected.

    `decode` decodes the bytes of one message.
    """

    def __init__(self, connection: socket.socket, decode: Callable[[bytes], _T]) -> None:
        self._connection = connection
        self._decode = decode
        self._pending = bytearray()
        # Several threads send, and the parts of two messages must not alternate if the socket's buffer is full.
        self._sending = threading.Lock()
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send one message completely. A disconnected peer sets `closed` and raises no error.

        The launcher reports the exit of a peer by other means.
        """
        data = encode(message)
        try:
            # The length and the message in one call: a message that fits into the socket's buffer is then one write.
            # `sendall` waits if the peer does not read.
            with self._sending:
                self._connection.sendall(_HEADER.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def read(self) -> Iterator[_T]:
        """Yield the messages that have arrived completely. Raises `ProtocolError`."""
        # Everything that is there, until the socket would block or has ended. A peer that has been killed resets the
        # connection, which counts as its end.
        while not self.closed:
            try:
                data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
            self._pending += data
        # Also after the end: the last messages of a peer may be complete.
        while len(self._pending) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._pending)[0]
            if len(self._pending) < end:
                break
            message = bytes(self._pending[_HEADER.size : end])
            del self._pending[:end]
            yield self._decode(message)

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._connection.close()
