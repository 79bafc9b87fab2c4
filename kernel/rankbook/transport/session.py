"""Session layer of the link between two hosts: messages that arrive once and in order, also over several connections.

ZeroMQ over TCP loses what is on the way when a connection breaks, without an error. A `Session` is one end of a
conversation that survives this: it cuts messages into packets, numbers them, keeps them until the peer has acknowledged
them, and sends them again over the next connection. It opens no socket and reads no clock, so that any loss, repetition
and reordering can be tested: packets go in and out, and `now` is an argument.

Streams. A message belongs to one of two streams, which have numbers and acknowledgements of their own. Packets of
stream 0 (messages) go before those of stream 1 (values). A packet has at most `CHUNK` bytes, and no more than a window
of bytes of a stream is unacknowledged, so that a message never waits behind more than a window of values on the wire.
The window of stream 1 follows the delay of its acknowledgements, as in LEDBAT (RFC 6817): it grows while they come
quickly, and shrinks when they come `_MOST_DELAY` seconds later than the quickest one. On a slow network a fixed window
would lie in the buffers of ZeroMQ and TCP in front of the next message, and hold up an interrupt for seconds. With a
small window the packets are small too, so that several of them are on the way and are acknowledged one by one.

A packet is a list of frames: a header (`_HEADER`) and the pieces of one message. Every piece but the last one ends a
frame of the message; flags say whether the last one does, and whether it ends the message. The header acknowledges as
well. A packet without pieces only acknowledges; it is sent when nothing else was for `_ACKNOWLEDGE_AFTER` seconds, or
after `_ACKNOWLEDGE_BYTES` bytes, and for values at once: their window follows the time that this takes.

Small packets. libzmq encrypts every frame by itself, which takes longer than to copy some kilobytes. The pieces of a
packet of up to `_JOINED_BYTES` bytes are therefore in the frame of the header, behind their number and their sizes.

A packet that is not the next one of its stream is dropped: an earlier one has been acknowledged already, and a later
one will be sent again with those between, after a reconnect or after `_RESEND_AFTER` seconds without progress.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from rankbook.errors import ProtocolError, TransferError

Bytes = bytes | bytearray | memoryview
Packet = list[Bytes]

STREAMS = 2
CHUNK = 256 << 10
"""Bytes in one packet, at most."""
_LEAST_CHUNK = 64 << 10
_CHUNKS_ON_THE_WAY = 8
_WINDOW = 4 << 20
_LEAST_WINDOW = _CHUNKS_ON_THE_WAY * _LEAST_CHUNK
_MOST_DELAY = 0.01
_MAX_PIECES = 1000
_MAX_MESSAGE = 1 << 30
"""Bytes of one message: larger values travel in parts."""
_MAX_FRAMES = 1 << 20
_JOINED_BYTES = 16 << 10
_ACKNOWLEDGE_AFTER = 0.02
_ACKNOWLEDGE_BYTES = CHUNK
_RESEND_AFTER = 10.0

# Kind, stream, flags, unused; the packet's number; the next expected numbers of both streams.
_HEADER = struct.Struct("<BBBxQQQ")
_DATA, _ACKNOWLEDGE = 1, 2
_ENDS_FRAME, _ENDS_MESSAGE, _JOINED = 1, 2, 4
_COUNT = struct.Struct("<H")


@dataclass
class _SentPacket:
    """A packet that is not acknowledged. `sent_at` is None if it was sent again, so that its delay tells nothing."""

    number: int
    flags: int
    pieces: list[memoryview]
    size: int
    sent_at: float | None


@dataclass
class _Outgoing:
    """Sending side of a stream. `messages` are to be cut into packets, from `piece` of `offset` on."""

    messages: deque[list[memoryview]] = field(default_factory=deque)
    frame: int = 0
    offset: int = 0
    next_number: int = 0
    queued_bytes: int = 0
    # Packets that are not acknowledged, oldest first, and how many of them were sent over this connection.
    packets: deque[_SentPacket] = field(default_factory=deque)
    packet_bytes: int = 0
    sent: int = 0
    window: int = _WINDOW
    shrink_at: float = 0.0
    acknowledged_bytes: int = 0


@dataclass
class _Incoming:
    """Receiving side of a stream: the next expected number, and the message that has arrived in part."""

    expected: int = 0
    frames: list[Bytes] = field(default_factory=list)
    pieces: list[Bytes] = field(default_factory=list)
    size: int = 0


class Session:
    """One end of a conversation. `window` is the largest number of unacknowledged bytes per stream.

    Example::

        session = Session()
        session.send(0, [b"hello"])
        session.packets(now=0.0)  # one packet
    """

    def __init__(self, *, window: int = _WINDOW) -> None:
        self.repeated = 0
        self.out_of_order = 0
        self._window = window
        self._out = [_Outgoing(window=window) for _ in range(STREAMS)]
        self._out[-1].window = min(window, _LEAST_WINDOW)
        self._least_delay = math.inf
        self._in = [_Incoming() for _ in range(STREAMS)]
        self._acknowledge_at: float | None = None
        self._unacknowledged_bytes = 0
        self._progress_at = 0.0

    # Sending

    def send(self, stream: int, frames: Sequence[Bytes]) -> None:
        """Queue a message. The memory of the frames must not change until they are acknowledged.

        Raises `TransferError` for a message that is too large for the peer.
        """
        views = [memoryview(frame) for frame in frames]
        size = sum(map(len, views))
        if size > _MAX_MESSAGE or len(views) > _MAX_FRAMES:
            raise TransferError(f"cannot send a message of {size} bytes in {len(views)} frames to another host")
        out = self._out[stream]
        out.messages.append(views)
        out.queued_bytes += size

    def pending(self, stream: int) -> int:
        """Return the number of bytes that are queued or not acknowledged yet."""
        return self._out[stream].queued_bytes + self._out[stream].packet_bytes

    def acknowledged(self, stream: int) -> int:
        """Return the number of bytes that the peer has acknowledged since the beginning."""
        return self._out[stream].acknowledged_bytes

    def packets(self, now: float) -> list[Packet]:
        """Return the packets to send now."""
        if self._resend_due(now):
            self.reconnected(now)
        packets: list[Packet] = []
        for stream, out in enumerate(self._out):
            # Those of an earlier connection first. The peer drops what it has already: it is cheaper to send a packet
            # twice than to ask which ones have arrived. A packet that is sent again has no send time, because its
            # acknowledgement may be that of the first copy, and its delay would then be wrong (Karn's algorithm, RFC
            # 6298).
            while out.sent < len(out.packets):
                out.packets[out.sent].sent_at = None
                packets.append(self._packet(stream, out.packets[out.sent]))
                out.sent += 1
            # The streams are visited in order, so the messages of stream 0 are cut before the values of stream 1. A
            # packet of values that was cut earlier is not overtaken, which is why the window of stream 1 is small: it
            # is the most that a message waits for.
            while out.messages and out.packet_bytes < out.window:
                number, flags, pieces = self._cut(out)
                # Nothing was on the way, so the time without progress counts from now.
                if not out.packets:
                    self._progress_at = now
                packet = _SentPacket(number, flags, pieces, sum(map(len, pieces)), now)
                out.packets.append(packet)
                out.packet_bytes += packet.size
                out.sent += 1
                packets.append(self._packet(stream, packet))
        # Every packet carries the acknowledgement of both streams. One of its own is needed only if there is nothing
        # else to send.
        if packets:
            self._clear_acknowledgement()
        elif self._acknowledge_at is not None and now >= self._acknowledge_at:
            self._clear_acknowledgement()
            packets.append([_HEADER.pack(_ACKNOWLEDGE, 0, 0, 0, *self._expected())])
        return packets

    def reconnected(self, now: float) -> None:
        """Send everything again that was not acknowledged: the connection is a new one."""
        self._progress_at = now
        for out in self._out:
            out.sent = 0
        # The new connection may take another way through the network, so neither the window nor the shortest delay of
        # the old one says anything about it. The acknowledgement tells the peer what it need not send again.
        self._out[-1].window = min(self._window, _LEAST_WINDOW)
        self._least_delay = math.inf
        self._acknowledge_at = now

    def deadline(self) -> float | None:
        """Return the time at which `packets` has something to send without any event; None without one."""
        times = [] if self._acknowledge_at is None else [self._acknowledge_at]
        if any(out.packets for out in self._out):
            times.append(self._progress_at + _RESEND_AFTER)
        return min(times, default=None)

    def _cut(self, out: _Outgoing) -> tuple[int, int, list[memoryview]]:
        """Cut the next packet from the first message: its number, its flags and its pieces."""
        message = out.messages[0]
        pieces: list[memoryview] = []
        size = flags = 0
        chunk = min(CHUNK, max(_LEAST_CHUNK, out.window // _CHUNKS_ON_THE_WAY))
        while out.frame < len(message) and size < chunk and len(pieces) < _MAX_PIECES:
            # A slice of the view, not a copy: the bytes are copied once, by ZeroMQ or by the kernel. An empty frame is
            # a piece of no bytes, which ends its frame like any other one.
            view = message[out.frame]
            piece = view[out.offset : out.offset + chunk - size]
            pieces.append(piece)
            size += len(piece)
            out.offset += len(piece)
            flags = 0
            if out.offset == len(view):
                flags = _ENDS_FRAME
                out.frame, out.offset = out.frame + 1, 0
        if out.frame == len(message):
            flags = _ENDS_FRAME | _ENDS_MESSAGE
            out.messages.popleft()
            out.frame = 0
        out.queued_bytes -= size
        number = out.next_number
        out.next_number += 1
        return number, flags, pieces

    def _packet(self, stream: int, packet: _SentPacket) -> Packet:
        if packet.size > _JOINED_BYTES:
            return [_HEADER.pack(_DATA, stream, packet.flags, packet.number, *self._expected()), *packet.pieces]
        header = _HEADER.pack(_DATA, stream, packet.flags | _JOINED, packet.number, *self._expected())
        count = len(packet.pieces)
        return [b"".join((header, struct.pack(f"<H{count}I", count, *map(len, packet.pieces)), *packet.pieces))]

    def _expected(self) -> list[int]:
        return [incoming.expected for incoming in self._in]

    def _resend_due(self, now: float) -> bool:
        return any(out.packets for out in self._out) and now >= self._progress_at + _RESEND_AFTER

    def _clear_acknowledgement(self) -> None:
        self._acknowledge_at = None
        self._unacknowledged_bytes = 0

    # Receiving

    def receive(self, packet: Sequence[Bytes], now: float) -> list[tuple[int, list[Bytes]]]:
        """Handle a packet; return the messages that it completes, with their streams. Raises `ProtocolError`."""
        if not packet or len(packet[0]) < _HEADER.size:
            raise ProtocolError("invalid packet: it has no header")
        kind, stream, flags, number, *acknowledged = _HEADER.unpack_from(packet[0])
        if kind not in (_DATA, _ACKNOWLEDGE) or stream >= STREAMS or flags > (_ENDS_FRAME | _ENDS_MESSAGE | _JOINED):
            raise ProtocolError(f"invalid packet: kind {kind}, stream {stream}, flags {flags}")
        if flags & _JOINED:
            pieces: Sequence[Bytes] = _split(packet)
        elif len(packet[0]) == _HEADER.size:
            pieces = packet[1:]
        else:
            raise ProtocolError(f"invalid packet: a header of {len(packet[0])} bytes")
        # Before anything changes: an acknowledgement of packets that were never sent must not remove any.
        if any(count > out.next_number for count, out in zip(acknowledged, self._out, strict=True)):
            raise ProtocolError("invalid packet: it acknowledges what was not sent")
        for count, out in zip(acknowledged, self._out, strict=True):
            before = out.acknowledged_bytes
            delay = self._acknowledged(out, count, now)
            if out is self._out[-1] and delay is not None:
                self._follow_delay(out, delay, out.acknowledged_bytes - before, now)
        if kind == _ACKNOWLEDGE:
            return []
        return self._take(stream, flags, number, pieces, now)

    def _acknowledged(self, out: _Outgoing, count: int, now: float) -> float | None:
        """Remove the packets below `count`. Return the delay of the newest one, or None if it is not known."""
        delay = None
        # Acknowledgements are cumulative: `count` is the next number that the peer expects. A lost one is made up for
        # by any later one, and an old one that arrives late removes nothing.
        while out.packets and out.packets[0].number < count:
            packet = out.packets.popleft()
            out.packet_bytes -= packet.size
            out.acknowledged_bytes += packet.size
            out.sent = max(0, out.sent - 1)
            self._progress_at = now
            delay = None if packet.sent_at is None else now - packet.sent_at
        return delay

    def _follow_delay(self, out: _Outgoing, delay: float, size: int, now: float) -> None:
        # The shortest delay is that of the empty path. What exceeds it is time in queues, most of which this stream has
        # filled itself. The window grows slowly (by a quarter in a round trip) and shrinks by a quarter,
        # as TCP's congestion control does, so that two sessions on one line find a balance.
        self._least_delay = min(self._least_delay, delay)
        if delay <= self._least_delay + _MOST_DELAY:
            out.window = min(out.window + size // 2, self._window)  # by half in a round trip
        elif now >= out.shrink_at:
            # Once per round trip: the packets on the way were sent with the larger window.
            out.window = max(out.window * 3 // 4, _LEAST_WINDOW)
            out.shrink_at = now + delay

    def _take(
        self, stream: int, flags: int, number: int, pieces: Sequence[Bytes], now: float
    ) -> list[tuple[int, list[Bytes]]]:
        incoming = self._in[stream]
        size = sum(map(len, pieces))
        self._unacknowledged_bytes += size
        at_once = stream == STREAMS - 1 or self._unacknowledged_bytes >= _ACKNOWLEDGE_BYTES
        late = 0.0 if at_once else _ACKNOWLEDGE_AFTER
        self._acknowledge_at = min(self._acknowledge_at or now + late, now + late)
        if number != incoming.expected:
            # The peer has not received an acknowledgement, or one of its packets was lost.
            if number < incoming.expected:
                self.repeated += 1
            else:
                self.out_of_order += 1
            return []
        if not pieces or size > CHUNK or incoming.size + size > _MAX_MESSAGE or len(incoming.frames) > _MAX_FRAMES:
            raise ProtocolError(f"invalid packet: {size} bytes in {len(pieces)} pieces")
        # From here on the packet counts as received. All checks come before, since a packet that is refused must not be
        # acknowledged.
        incoming.expected += 1
        incoming.size += size
        for position, piece in enumerate(pieces):
            incoming.pieces.append(piece)
            if position < len(pieces) - 1 or flags & _ENDS_FRAME:
                # Most frames have one piece, which is passed on without a copy.
                whole = incoming.pieces[0] if len(incoming.pieces) == 1 else b"".join(incoming.pieces)
                incoming.frames.append(whole)
                incoming.pieces = []
        if not flags & _ENDS_MESSAGE:
            return []
        frames, incoming.frames, incoming.pieces, incoming.size = incoming.frames, [], [], 0
        return [(stream, frames)]


def _split(packet: Sequence[Bytes]) -> list[Bytes]:
    """Return the pieces of a packet of one frame. Raises `ProtocolError` if their sizes are not those of the frame."""
    frame = memoryview(packet[0])
    start = _HEADER.size + _COUNT.size
    count = _COUNT.unpack_from(frame, _HEADER.size)[0] if len(frame) >= start else -1
    if len(packet) != 1 or not 0 < count <= _MAX_PIECES or len(frame) < start + 4 * count:
        raise ProtocolError(f"invalid packet: {count} pieces in {len(packet)} frames, the first of {len(frame)} bytes")
    sizes = struct.unpack_from(f"<{count}I", frame, start)
    start += 4 * count
    if start + sum(sizes) != len(frame):
        raise ProtocolError(f"invalid packet: pieces of {sum(sizes)} bytes in a frame of {len(frame)}")
    ends = list(accumulate(sizes, initial=start))
    return [frame[begin:end] for begin, end in pairwise(ends)]
