"""Length-prefixed messages over a connected stream socket: how notebook and forkserver speak.

Owns: framing. Refuses: waiting for anything but room to write. Reading never blocks, so one poll can serve it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rankbook.protocol.messages import Message, encode

_T = TypeVar("_T")
_HEADER = struct.Struct("<I")


class MessageStream(Generic[_T]):
    """One end. `decode` turns a message's bytes into it. `closed` is True once the other end is gone."""

    def __init__(self, connection: socket.socket, decode: Callable[[bytes], _T]) -> None:
        self._connection = connection
        self._decode = decode
        self._pending = bytearray()
        self.closed = False

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send all of one message. A peer that is gone sets `closed` and is no error: its exit is told otherwise."""
        data = encode(message)
        try:
            self._connection.sendall(_HEADER.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def read(self) -> Iterator[_T]:
        """Every message that is complete by now. Raises `ProtocolError`."""
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
