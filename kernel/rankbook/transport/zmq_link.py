"""The link over ZeroMQ between a process and the ranks of its host; `agent_link` is the one between hosts.

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
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import zmq

from rankbook.errors import StartError, UnreadableMessage
from rankbook.protocol.messages import FromRank, Message, ToRank, decode_to_rank, encode, encode_from_rank
from rankbook.transport import Frames, Sender, read_from_rank, sending
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
        # Non-blocking at both ends: a thread that wakes must not wait for a full pipe, and reading must not wait for an
        # empty one. macOS has no `pipe2`.
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hasattr(os, "pipe2") else _pipe()
        # Not epoll, which drops a descriptor that is closed: a file that is opened with its number before the next wait
        # would never be reported.
        self._selector = selectors.PollSelector()
        for file in (int(socket.getsockopt(zmq.FD)), self._wake_read):
            self._selector.register(file, selectors.EVENT_READ)
        self._files: frozenset[int] = frozenset()

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        # The caller's files change rarely, so that the selector is kept from call to call.
        if self._files != (wanted := frozenset(files)):
            for file in self._files - wanted:
                self._selector.unregister(file)
            for file in wanted - self._files:
                self._selector.register(file, selectors.EVENT_READ)
            self._files = wanted
        # If a message is waiting, the files are looked at without a wait: the descriptor announces nothing for it any
        # more.
        ready = {key.fd for key, _ in self._selector.select(0.0 if self._has_message() else timeout)}
        # All wake-ups so far are one: the caller looks at everything after each return.
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        # Asked again, because the message may have arrived during the wait.
        return self._has_message(), ready & wanted

    def _has_message(self) -> bool:
        with self._lock:
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> tuple[memoryview, list[memoryview]] | None:
        with self._lock:
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # zmq.Again would cost ten times as much
                return None
            header = memoryview(self._socket.recv(zmq.NOBLOCK))
            frames: list[memoryview] = []
            # A multipart message arrives as a whole, so its other parts are there.
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(copy=False).buffer)  # may be large
            return header, frames

    def bind(self, address: str) -> None:
        """Listen at another address as well."""
        with self._lock:
            self._socket.bind(address)
        # Binding may have consumed what the socket's descriptor announced.
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        # The selector first: it must not poll descriptors that are closed and perhaps used again.
        self._selector.close()
        self._socket.close(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)


def _send(socket: zmq.Socket[bytes], header: bytes, frames: Frames, flags: int = 0) -> None:
    # Frames are handed over without a copy: zmq's own thread reads their memory later, so they must not change. `pack`
    # gives copies. A header alone is small, and zmq copies it faster than it counts references.
    if frames:
        socket.send_multipart([header, *frames], flags, copy=False)
    else:
        socket.send(header, flags)


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
        # Protects the downlinks: any thread may send, and the driver's thread opens them.
        self._lock = threading.Lock()
        self._down: dict[int, _Downlink] = {}
        socket = self._context.socket(zmq.PULL)
        # No limit: a limit would block the ranks' sends while the notebook is busy, and with them the control threads
        # that answer queries. The ranks limit their output themselves.
        socket.setsockopt(zmq.RCVHWM, 0)
        self.uplink = f"ipc://{folder}/up"
        try:
            socket.bind(self.uplink)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.term()
            raise StartError(
                f"cannot listen in {folder}: {error}; set RANKBOOK_RUNTIME_DIR to a folder that you can write to"
            ) from error
        self._inbox = _Inbox(socket)

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """See `HubLink`."""
        file = self._folder / f"down-{rank}.{incarnation}"
        address = f"ipc://{file}"
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._context.socket(zmq.PUSH)
            # No limit, so that a send never waits for a busy rank. `SNDTIMEO` then matters only while no peer is
            # connected. What a stopped rank leaves unread is bounded by the senders: one task at a time, and queries,
            # of which most wait for the answer. `GetCollectives` does not: it comes every 0.7 s while a cell runs, some
            # 10 MB a day.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.SNDTIMEO, _FIRST_SEND_MS)
            # A cleaner of temporary files may have removed the folder since the last fork.
            self._renew_folder()
            socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            if socket is not None:
                socket.close(linger=0)
            raise StartError(f"cannot listen at {address}: {error}") from error
        # Replaced under the lock: a message goes either to the old process or to the new one. What the old one has not
        # read is dropped (linger 0), because it has ended.
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
        return self.send_encoded(rank, encode(message), frames)

    def send_many(self, ranks: Iterable[int], message: Message, frames: Frames = ()) -> None:
        """See `HubLink`."""
        self.send_many_encoded(ranks, encode(message), frames)

    def send_many_encoded(self, ranks: Iterable[int], message: bytes, frames: Frames = ()) -> None:
        """Send a message that is encoded already, as `send_many` does."""
        for rank in ranks:
            self.send_encoded(rank, message, frames)

    # The lock is taken per rank: a rank that has not connected may be waited for, and the others' senders must not wait
    # longer than for that one.
    def send_encoded(self, rank: int, message: bytes, frames: Frames = ()) -> bool:
        """Send a message that is encoded already, as `send` does."""
        with self._lock:
            down = self._down.get(rank)
            if down is None:
                return False
            try:
                # Only the first message waits for the rank to connect. The queue has no limit, so a later one fails
                # (zmq.Again) only if the rank has disconnected.
                flags = zmq.NOBLOCK if down.used else 0
                _send(down.socket, message, frames, flags)
            except zmq.Again:
                return False
            down.used = True
            return True

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `HubLink`."""
        return self._inbox.wait(timeout, files)

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """See `HubLink`."""
        received = self.receive_encoded()
        if received is None:
            return None
        sender, message, frames = received
        return sender, read_from_rank(sender, message), frames

    def receive_encoded(self) -> tuple[Sender, memoryview, list[memoryview]] | None:
        """Return the next message without decoding it, as `receive` does."""
        received = self._inbox.receive()
        if received is None:
            return None
        header, frames = received
        if len(header) < _SENDER.size:
            raise UnreadableMessage(f"expected a message that begins with its sender, got {len(header)} bytes")
        return Sender(*_SENDER.unpack_from(header)), header[_SENDER.size :], frames

    def wake(self) -> None:
        """See `HubLink`."""
        self._inbox.wake()

    def close(self) -> None:
        """See `HubLink`."""
        # Senders find no downlink after this and return False, so that no socket is used after its end.
        with self._lock:
            for down in self._down.values():
                down.socket.close(linger=_LINGER_MS)
            self._down.clear()
        self._inbox.close()
        # Waits until the sockets' messages have left, at most `_LINGER_MS`.
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
        # A rank of a kept cluster must not wait without limit for a notebook that is gone. Other ranks die with it.
        if patience is not None:
            self._up.setsockopt(zmq.SNDTIMEO, int(1_000 * patience))
        # ZeroMQ connects in the background and reconnects when a new notebook binds the same address.
        self._up.connect(uplink)
        down = self._context.socket(zmq.PULL)
        down.setsockopt(zmq.RCVHWM, 0)
        down.connect(downlink)
        self._inbox = _Inbox(down)

    def send(self, message: Message, frames: Frames = ()) -> None:
        """See `RankLink`."""
        if sending.active:
            sending.postpone(partial(self.send, message, frames))
            return
        with sending:
            self._send_now(message, frames)

    def _send_now(self, message: Message, frames: Frames) -> None:
        header = self._sender + encode_from_rank(message)
        # The main thread, the control thread and background threads send. Encoding needs no lock.
        with self._lock:
            _send(self._up, header, frames)

    def offer(self, message: Message, frames: Frames = ()) -> bool:
        """See `rank.replay_buffer.TimeoutLink`, which is in `sending` already."""
        try:
            self._send_now(message, frames)
        except zmq.Again:
            return False
        return True

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `RankLink`."""
        return self._inbox.wait(timeout, files)

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        """See `RankLink`."""
        received = self._inbox.receive()
        return None if received is None else (decode_to_rank(received[0]), received[1])

    def wake(self) -> None:
        """See `RankLink`."""
        self._inbox.wake()

    def close(self) -> None:
        """See `RankLink`."""
        with self._lock:
            self._up.close(linger=_LINGER_MS)
        self._inbox.close()
        self._context.term()
