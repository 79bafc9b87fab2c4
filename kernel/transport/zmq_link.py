"""The link over ZeroMQ: the only module that imports zmq.

Owns: sockets, their lifetime and their thread rules. Refuses: to know what a message means.

Up: every rank PUSHes to the notebook's one PULL. Down: one PUSH per incarnation of a rank, bound by the notebook, so
that ranks dial home and a message to a rank that is not connected yet waits for it (a ROUTER would drop it).
Addresses are `ipc://` in a folder that only the user can enter.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Collection
from pathlib import Path

import zmq

from rankbook.errors import StartError, UnreadableMessage
from rankbook.messages import FromRank, Message, ToRank, decode_to_rank, encode, encode_from_rank
from rankbook.transport.link import Frames, Sender, read_from_rank
from rankbook.transport.private_folder import ensure_private_folder
from rankbook.transport.watch import Watch

_SENDER = struct.Struct("<II")
_LINGER_MS = 200
_FIRST_SEND_MS = 5_000


class _Inbox:
    """A PULL socket, a wake pipe and whatever files the caller watches, for a home thread and one that takes over.

    Each of the two waits on a set of descriptors of its own. The socket's and the pipe's are in a third set, which is
    one descriptor for the others (epoll and kqueue are): taking over takes it out of the home thread's set, behind its
    back and without waking it. The socket itself, which knows no threads, is only touched under the lock.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._taken_by: int | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hasattr(os, "pipe2") else _pipe()
        self._mail = Watch(int(socket.getsockopt(zmq.FD)), self._wake_read)
        self._home = Watch(self._mail.fileno())
        self._here = Watch(self._mail.fileno())
        self._home_files: Collection[int] = ()
        self._here_files: Collection[int] = ()

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        if self._home_files != files:
            self._home.change(self._home_files, files)
            self._home_files = tuple(files)
        return self._sort(self._home.wait(0.0 if self._has_message() else timeout))

    def wait_here(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        if self._here_files != files:
            self._here.change(self._here_files, files)
            self._here_files = tuple(files)
        return self._sort(self._here.wait(0.0 if self._has_message() else timeout))

    def _sort(self, ready: set[int]) -> tuple[bool, set[int]]:
        if self._mail.fileno() not in ready:
            return self._has_message(), ready
        ready.discard(self._mail.fileno())
        with contextlib.suppress(BlockingIOError):  # a message, then, and no wake
            os.read(self._wake_read, 4096)
        return self._has_message(), ready

    def _has_message(self) -> bool:
        """Whether there is one for this thread. The socket's descriptor alone does not tell: it is edge-triggered."""
        with self._lock:
            mine = self._taken_by in (None, threading.get_ident())
            return mine and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def take_over(self) -> None:
        with self._lock:
            self._taken_by = threading.get_ident()
        self._home.remove(self._mail.fileno())

    def give_back(self) -> None:
        self._home.add(self._mail.fileno())
        with self._lock:
            self._taken_by = None
            left = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if left:  # it came between the last look and now, and the descriptor has told us already
            self.wake()

    def receive(self) -> tuple[memoryview, list[memoryview]] | None:
        with self._lock:
            if self._taken_by not in (None, threading.get_ident()):
                return None
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # an exception would cost ten times as much
                return None
            head = memoryview(self._socket.recv(zmq.NOBLOCK))
            frames: list[memoryview] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(copy=False).buffer)  # may be large
            return head, frames

    def bind(self, address: str) -> None:
        """Listen at another address too."""
        with self._lock:
            self._socket.bind(address)
        self.wake()  # to bind may have taken what the socket's descriptor would have told

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        for each in (self._home, self._here, self._mail):
            each.close()
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
    """The notebook's end, in the folder `folder` (0700, made by the caller). Raises `StartError` if it cannot bind."""

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
                    old.file.unlink(missing_ok=True)  # zmq leaves it
        return address

    def _renew_folder(self) -> None:
        """Listen where ranks dial, if somebody has removed the folder; the connections that there are outlive it."""
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
                flags = zmq.NOBLOCK if down.used else 0
                _send(down.socket, encode(message), frames, flags)
            except zmq.Again:
                return False
            down.used = True
            return True

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `HubLink`."""
        return self._inbox.wait(timeout, files)

    def take_over(self) -> None:
        """See `HubLink`."""
        self._inbox.take_over()

    def wait_here(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `HubLink`."""
        return self._inbox.wait_here(timeout, files)

    def give_back(self) -> None:
        """See `HubLink`."""
        self._inbox.give_back()

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
    """A rank's end. `uplink` and `downlink` are the addresses the notebook gave it.

    `patience`: the seconds that `offer` waits for room; without it everything waits as long as it takes.
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
        """See `rank.outbox.PatientLink`."""
        try:
            self.send(message, frames)
        except zmq.Again:
            return False
        return True

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `RankLink`."""
        return self._inbox.wait(timeout, files)

    def take_over(self) -> None:
        """See `RankLink`."""
        self._inbox.take_over()

    def wait_here(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `RankLink`."""
        return self._inbox.wait_here(timeout, files)

    def give_back(self) -> None:
        """See `RankLink`."""
        self._inbox.give_back()

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
