"""The link over ZeroMQ; the only module that imports zmq.

Uplink: every rank PUSHes to the notebook's single PULL socket. Downlink: one PUSH socket per incarnation of a rank,
bound by the notebook, so that ranks connect to known addresses, and a message to a rank that is not connected yet waits
for it (a ROUTER would drop it). Addresses are `ipc://` in a folder that only the user can enter.

A message is one zmq multipart message: the encoded message, preceded on the uplink by the rank and its incarnation as
two 32-bit integers, followed by its frames.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import struct
import threading
from collections.abc import Collection
from pathlib import Path

import zmq

from rankbook.errors import StartError, UnreadableMessage
from rankbook.protocol.messages import FromRank, Message, ToRank, decode_to_rank, encode, encode_from_rank
from rankbook.transport.link import Frames, Sender, read_from_rank
from rankbook.transport.shared_memory import ensure_private_folder

_SENDER = struct.Struct("<II")
_LINGER_MS = 200  # time for sent messages to leave when a socket is closed
_FIRST_SEND_MS = 5_000  # time for a rank to connect, in which the first message to it waits


class _Inbox:
    """A PULL socket that one thread receives from, and a pipe through which other threads wake that thread.

    Other threads call `bind`, and a zmq socket must not be used by two threads at once: hence the lock. It is never
    held during a wait, because the wait is not zmq's: the socket's descriptor is polled together with the pipe and the
    caller's files. That descriptor is edge-triggered. It announces a change of the socket's state once, and any call on
    the socket may consume the announcement, so the state itself (EVENTS) is read before and after every wait.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hasattr(os, "pipe2") else _pipe()
        self._selector = selectors.DefaultSelector()
        for file in (int(socket.getsockopt(zmq.FD)), self._wake_read):
            self._selector.register(file, selectors.EVENT_READ)
        self._files: frozenset[int] = frozenset()

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        if self._files != (wanted := frozenset(files)):
            for file in self._files - wanted:
                self._selector.unregister(file)
            for file in wanted - self._files:
                self._selector.register(file, selectors.EVENT_READ)
            self._files = wanted
        ready = {key.fd for key, _ in self._selector.select(0.0 if self._has_message() else timeout)}
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        return self._has_message(), ready & wanted

    def _has_message(self) -> bool:
        with self._lock:
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> tuple[memoryview, list[memoryview]] | None:
        with self._lock:
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # zmq.Again would cost ten times as much
                return None
            head = memoryview(self._socket.recv(zmq.NOBLOCK))
            frames: list[memoryview] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(copy=False).buffer)  # may be large
            return head, frames

    def bind(self, address: str) -> None:
        """Listen at another address as well."""
        with self._lock:
            self._socket.bind(address)
        self.wake()  # binding may have consumed what the socket's descriptor announced

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        self._selector.close()
        self._socket.close(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)


def _send(socket: zmq.Socket[bytes], head: bytes, frames: Frames, flags: int = 0) -> None:
    if frames:
        socket.send_multipart([head, *frames], flags, copy=False)
    else:
        socket.send(head, flags)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


class ZmqHub:
    """The notebook's end, in `folder` (mode 0700, created by the caller). Raises `StartError` if it cannot bind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._down: dict[int, _Downlink] = {}
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        self.uplink = f"ipc://{folder}/up"
        try:
            socket.bind(self.uplink)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.term()
            raise StartError(
                f"cannot listen in {folder}: {error}; set RANKBOOK_RUNTIME_DIR to a folder of yours"
            ) from error
        self._inbox = _Inbox(socket)

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """See `HubLink`."""
        file = self._folder / f"down-{rank}.{incarnation}"
        address = f"ipc://{file}"
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.SNDTIMEO, _FIRST_SEND_MS)
        try:
            self._renew_folder()
            socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            socket.close(linger=0)
            raise StartError(f"cannot listen at {address}: {error}") from error
        with self._lock:
            old, self._down[rank] = self._down.get(rank), _Downlink(socket, file)
            if old is not None:
                old.socket.close(linger=0)
                if old.file != file:
                    old.file.unlink(missing_ok=True)  # zmq does not remove it
        return address

    def _renew_folder(self) -> None:
        """Create a removed folder and the uplink's address again. Existing connections survive the removal."""
        if not Path(self.uplink.removeprefix("ipc://")).exists():
            ensure_private_folder(self._folder)
            self._inbox.bind(self.uplink)

    def send(self, rank: int, message: Message, frames: Frames = ()) -> bool:
        """See `HubLink`."""
        with self._lock:
            down = self._down.get(rank)
            if down is None:
                return False
            try:
                # Only the first message waits for the rank to connect. The queue has no limit, so a later one fails
                # (zmq.Again) only if the rank has disconnected.
                flags = zmq.NOBLOCK if down.used else 0
                _send(down.socket, encode(message), frames, flags)
            except zmq.Again:
                return False
            down.used = True
            return True

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `HubLink`."""
        return self._inbox.wait(timeout, files)

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """See `HubLink`."""
        parcel = self._inbox.receive()
        if parcel is None:
            return None
        head, frames = parcel
        if len(head) < _SENDER.size:
            raise UnreadableMessage(f"expected a message that begins with its sender, got {len(head)} bytes")
        sender = Sender(*_SENDER.unpack_from(head))
        return sender, read_from_rank(sender, head[_SENDER.size :]), frames

    def wake(self) -> None:
        """See `HubLink`."""
        self._inbox.wake()

    def close(self) -> None:
        """See `HubLink`."""
        with self._lock:
            for down in self._down.values():
                down.socket.close(linger=_LINGER_MS)
            self._down.clear()
        self._inbox.close()
        self._context.term()


class _Downlink:
    __slots__ = ("file", "socket", "used")

    def __init__(self, socket: zmq.Socket[bytes], file: Path) -> None:
        self.socket = socket
        self.file = file
        self.used = False


class ZmqRank:
    """A rank's end. `uplink` and `downlink` are the addresses that it got from the notebook.

    `patience` is the number of seconds that `offer` waits for room; without it, sending blocks without limit.
    """

    def __init__(self, sender: Sender, uplink: str, downlink: str, *, patience: float | None = None) -> None:
        self._sender = _SENDER.pack(*sender)
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._up = self._context.socket(zmq.PUSH)
        if patience is not None:
            self._up.setsockopt(zmq.SNDTIMEO, int(1_000 * patience))
        self._up.connect(uplink)
        down = self._context.socket(zmq.PULL)
        down.setsockopt(zmq.RCVHWM, 0)
        down.connect(downlink)
        self._inbox = _Inbox(down)

    def send(self, message: Message, frames: Frames = ()) -> None:
        """See `RankLink`."""
        head = self._sender + encode_from_rank(message)
        with self._lock:
            _send(self._up, head, frames)

    def offer(self, message: Message, frames: Frames = ()) -> bool:
        """See `rank.replay_buffer.TimeoutLink`."""
        try:
            self.send(message, frames)
        except zmq.Again:
            return False
        return True

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `RankLink`."""
        return self._inbox.wait(timeout, files)

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """See `RankLink`."""
        parcel = self._inbox.receive()
        return None if parcel is None else (decode_to_rank(parcel[0]), parcel[1])

    def wake(self) -> None:
        """See `RankLink`."""
        self._inbox.wake()

    def close(self) -> None:
        """See `RankLink`."""
        with self._lock:
            self._up.close(linger=_LINGER_MS)
        self._inbox.close()
        self._context.term()
