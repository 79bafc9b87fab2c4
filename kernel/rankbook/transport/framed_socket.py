"""Length-prefixed messages over a connected stream socket, and requests of ranks to their agent.

`MessageStream` connects the notebook process and the forkserver. Reading never blocks, so one poll can serve the
socket. Sending blocks only until there is room to write; one of the two ends must read meanwhile, or two full buffers
would stop both. A message is its length, as a 32-bit little-endian integer, and its encoded bytes. `RequestListener`
has such a stream for every process that asks it, and `request` is the other end.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from rankbook.protocol.messages import Message, encode

_T = TypeVar("_T")
_HEADER = struct.Struct("<I")


class MessageStream(Generic[_T]):
    """A connected stream socket that carries messages. `closed` is True once the peer has disconnected.

    `decode` decodes the bytes of one message. With `reads_while_sending`, for an end that one thread uses, a send that
    waits for room receives what the peer sends. `has_unread` is then True until the next `read`: no poll announces it.
    """

    def __init__(
        self, connection: socket.socket, decode: Callable[[bytes], _T], *, reads_while_sending: bool = False
    ) -> None:
        self._connection = connection
        self._decode = decode
        self._reads_while_sending = reads_while_sending
        self.has_unread = False
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
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message, as `send` does."""
        try:
            # The length and the message in one call: a message that fits into the socket's buffer is then one write.
            # `sendall` waits if the peer does not read.
            with self._sending:
                framed = _HEADER.pack(len(data)) + data
                if self._reads_while_sending:
                    self._send_and_receive(memoryview(framed))
                else:
                    self._connection.sendall(framed)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def _send_and_receive(self, data: memoryview) -> None:
        while data and not self.closed:
            try:
                data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._connection, select.POLLIN | select.POLLOUT)
                poll.poll()
                self._receive()
                self.has_unread = bool(self._pending)

    def read(self) -> Iterator[_T]:
        """Yield the messages that have arrived completely. Raises `ProtocolError`."""
        self.has_unread = False
        self._receive()
        # Also after the end: the last messages of a peer may be complete.
        while len(self._pending) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._pending)[0]
            if len(self._pending) < end:
                break
            message = bytes(self._pending[_HEADER.size : end])
            del self._pending[:end]
            yield self._decode(message)

    def _receive(self) -> None:
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

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._connection.close()

    def end(self) -> None:
        """Close this end, and end the connection also where a forked child of this process has a copy of it."""
        with contextlib.suppress(OSError):  # the peer has disconnected
            self._connection.shutdown(socket.SHUT_RDWR)
        self.close()


def wait_readable(files: Iterable[int], timeout: float) -> set[int]:
    """Wait up to `timeout` seconds until one of the descriptors is readable, and return all that are."""
    # `select.select` does not take descriptors above 1023.
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {file for file, _ in poll.poll(1000 * timeout)}


_SEND_TIMEOUT = struct.pack("ll", 1, 0)
"""One second, as `struct timeval`: replies are small, so that a peer that does not read them has stopped."""


class RequestListener:
    """A Unix socket at `path`, in a private folder, to which processes of this host connect and send requests.

    A request and its reply are bytes.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._listener = self._listen()
        self._streams: dict[int, MessageStream[bytes]] = {}
        self._next = 1

    def renew(self) -> None:
        """Listen again if the socket's file was removed. Connections survive the removal. Raises `OSError`."""
        if not Path(self.address).exists():
            before, self._listener = self._listener, self._listen()
            before.close()

    def filenos(self) -> list[int]:
        """Return the descriptors to poll."""
        return [self._listener.fileno(), *(stream.fileno() for stream in self._streams.values())]

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the requests that have arrived, with the numbers of their connections."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                # Sending waits for room, but not for long: one process that does not read must not hold up the replies
                # to others.
                connection.setblocking(True)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
                self._streams[self._next] = MessageStream(connection, bytes)
                self._next += 1
        requests = []
        for number, stream in tuple(self._streams.items()):
            requests += [(number, request) for request in stream.read()]
            if stream.closed:
                self._drop(number)
        return requests

    def reply(self, number: int, result: bytes) -> None:
        """Send the result to the process that has asked, unless it has disconnected."""
        if (stream := self._streams.get(number)) is not None:
            try:
                stream.send_bytes(result)
            except OSError:  # it does not read
                stream.closed = True
            if stream.closed:
                self._drop(number)

    def close(self) -> None:
        """Close all connections."""
        for number in tuple(self._streams):
            self._drop(number)
        self._listener.close()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.address)
            listener.listen(128)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def _drop(self, number: int) -> None:
        self._streams.pop(number).close()


def request(address: str, data: bytes, *, timeout: float) -> bytes:
    """Send one request to the `RequestListener` at `address` and return the reply, over a connection of its own.

    Raises `OSError`, also after `timeout` seconds without progress.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(address)
        connection.sendall(_HEADER.pack(len(data)) + data)
        # A reply may arrive in parts. Nothing follows it on this connection, so no byte is left over.
        received = bytearray()
        while len(received) < _HEADER.size or len(received) < _HEADER.size + _HEADER.unpack_from(received)[0]:
            if not (part := connection.recv(1 << 16)):
                raise ConnectionResetError("the agent of this host has ended")
            received += part
        return bytes(received[_HEADER.size :])


def modules_folder(address: str) -> Path:
    """Return the folder of the modules for which processes ask at the socket `address`."""
    return Path(f"{address}.d")
