"""Test the session layer without sockets: any loss, repetition and reordering of packets."""

from __future__ import annotations

import random
import struct

import pytest

from rankbook.errors import ProtocolError, TransferError
from rankbook.transport import session
from rankbook.transport.session import CHUNK, Session

MESSAGES, VALUES = 0, 1


def pieces_of(packet: list) -> list[bytes]:
    """Return what a packet carries of its message."""
    return [bytes(piece) for piece in (packet[1:] or (session._split(packet) if packet[0][0] == 1 else []))]


class Network:
    """Two sessions and the packets between them. A lost connection loses what is on the way."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0, repeat: float = 0.0, reorder: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.loss, self.repeat, self.reorder = loss, repeat, reorder
        self.ends = (Session(), Session())
        self.received: tuple[list, list] = ([], [])
        self.now = 0.0

    def step(self) -> int:
        """Let both ends send once. Return the number of packets."""
        self.now += 0.01
        count = 0
        for side, end in enumerate(self.ends):
            peer = 1 - side
            sent = end.packets(self.now)
            count += len(sent)
            packets = [packet for packet in sent if self.random.random() >= self.loss]
            packets += [packet for packet in packets if self.random.random() < self.repeat]
            if self.random.random() < self.reorder:
                self.random.shuffle(packets)
            for packet in packets:
                for stream, frames in self.ends[peer].receive(packet, self.now):
                    self.received[peer].append((stream, [bytes(frame) for frame in frames]))
        return count

    def cut(self) -> None:
        for end in self.ends:
            end.packets(self.now)  # lost
            end.reconnected(self.now)

    def run(self, *, most: int = 100_000) -> None:
        for _ in range(most):
            deadlines = [due for end in self.ends if (due := end.deadline()) is not None]
            # Nothing happens before the next deadline if nothing is on the way.
            if not self.step() and deadlines:
                self.now = max(self.now, min(deadlines))
            if not any(end.pending(stream) for end in self.ends for stream in (MESSAGES, VALUES)):
                return
        raise AssertionError("packets are left")


def random_messages(generator: random.Random, count: int) -> list[tuple[int, list[bytes]]]:
    sizes = (0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)
    return [
        (
            generator.choice((MESSAGES, VALUES)),
            [generator.randbytes(generator.choice(sizes)) for _ in range(generator.randint(1, 4))],
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "faults",
    [{}, {"loss": 0.2}, {"repeat": 0.3}, {"reorder": 0.5}, {"loss": 0.1, "repeat": 0.1, "reorder": 0.2}],
    ids=lambda faults: "-".join(faults) or "none",
)
def test_every_message_arrives_once_and_in_order(faults):
    for seed in range(5):
        network = Network(seed, **faults)
        sent: tuple[list, list] = (random_messages(network.random, 60), random_messages(network.random, 60))
        for side in (0, 1):
            for number, (stream, frames) in enumerate(sent[side]):
                network.ends[side].send(stream, frames)
                if number % 7 == 0:
                    network.step()
                if number % 20 == 0:
                    network.cut()
        network.run()
        for side in (0, 1):
            for stream in (MESSAGES, VALUES):
                expected = [message for message in sent[side] if message[0] == stream]
                assert [message for message in network.received[1 - side] if message[0] == stream] == expected


def test_random_frames_raise_only_protocol_errors_and_disturb_nothing():
    generator = random.Random(1)
    network = Network()
    network.ends[0].send(MESSAGES, [b"before"])
    network.step()
    victim = network.ends[1]
    rejected = 0
    for number in range(100_000):
        # A header of the right length every third time, and otherwise valid fields of it every sixth.
        size = 28 if number % 3 == 0 else generator.randint(0, 60)
        head = generator.randbytes(size)
        if number % 6 == 0:
            head = bytes([1, generator.randint(0, 1), generator.randint(0, 7), 0]) + generator.randbytes(8) + bytes(16)
        pieces = [generator.randbytes(3)] * generator.randint(0, 3)
        # Every second one of these has its pieces in the same frame, with their number and sizes, or nearly so.
        if number % 12 == 0:
            sizes = [generator.choice((3, 3, 3, 2, 1 << 31)) for _ in pieces]
            head += struct.pack(f"<H{len(sizes)}I", generator.choice((len(sizes), 1, 60_000)), *sizes)
            head, pieces = head + b"".join(pieces), []
        try:
            assert victim.receive([head, *pieces], network.now) == []
        except ProtocolError:
            rejected += 1
    assert rejected > 50_000
    network.ends[0].send(MESSAGES, [b"after"])
    network.run()
    assert [frames for _, frames in network.received[1]] == [[b"before"], [b"after"]]


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"one", b"", b"two"], [b""] * 1000, [b"x" * (16 << 10)]])
def test_a_small_message_is_one_frame_on_the_wire(frames):
    one, other = Session(), Session()
    one.send(MESSAGES, frames)
    (packet,) = one.packets(0.0)
    assert len(packet) == 1
    assert other.receive(packet, 0.0) == [(MESSAGES, frames)]


def test_the_frames_of_a_large_message_are_not_copied_into_one():
    one, other = Session(), Session()
    frames = [b"x" * (16 << 10), b"y"]
    one.send(MESSAGES, frames)
    (packet,) = one.packets(0.0)
    assert len(packet) == 3
    assert other.receive(packet, 0.0) == [(MESSAGES, frames)]


@pytest.mark.parametrize("rest", [b"", b"\x01", b"\x00\x00", b"\x01\x00", b"\x01\x00\x05\x00\x00\x00four", b"\xff\xff"])
def test_a_small_packet_with_wrong_sizes_is_rejected_and_not_acknowledged(rest):
    one, other = Session(), Session()
    one.send(MESSAGES, [b"four"])
    (packet,) = one.packets(0.0)
    with pytest.raises(ProtocolError, match="invalid packet"):
        other.receive([packet[0][:28] + rest], 0.0)
    with pytest.raises(ProtocolError, match="invalid packet"):
        other.receive([*packet, b"another frame"], 0.0)
    assert other.receive(packet, 0.0) == [(MESSAGES, [b"four"])]


def test_a_message_leaves_before_values_that_wait_and_the_window_bounds_what_is_on_the_wire():
    end = Session(window=4 << 20)
    value = memoryview(bytes(64 << 20))
    for start in range(0, len(value), 1 << 20):
        end.send(VALUES, [value[start : start + (1 << 20)]])
    on_the_wire = end.packets(0.0)
    assert sum(len(piece) for packet in on_the_wire for piece in packet[1:]) <= (4 << 20) + CHUNK
    assert max(sum(map(len, packet[1:])) for packet in on_the_wire) <= CHUNK
    end.send(MESSAGES, [b"interrupt"])
    (packet,) = end.packets(0.0)
    assert pieces_of(packet) == [b"interrupt"]
    assert end.pending(VALUES) == 64 << 20


@pytest.mark.parametrize("rate", [10e6, 12.5e6, 100e6, 1e9])
def test_a_message_waits_at_most_50_ms_behind_values_on_a_network_from_100_mbit_on(rate):
    """Simulate a network that delivers `rate` bytes per second, in order, after 1 ms."""
    one, other = Session(), Session()
    for _ in range(64):
        one.send(VALUES, [bytes(1 << 20)])
    now, free_at, delays = 0.0, 0.0, []
    wire: list[tuple[float, Session, list, float | None]] = []
    for step in range(4_000):
        now += 0.001
        if step > 10 and step % 50 == 0:
            one.send(MESSAGES, [b"interrupt"])
        for packet in one.packets(now):
            free_at = max(free_at, now) + sum(map(len, packet)) / rate
            is_message = pieces_of(packet) == [b"interrupt"]
            wire.append((free_at + 0.001, other, packet, now if is_message else None))
        wire += [(now + 0.001, one, packet, None) for packet in other.packets(now)]
        while wire and wire[0][0] <= now:
            _, end, packet, sent_at = wire.pop(0)
            end.receive(packet, now)
            if sent_at is not None:
                delays.append(now - sent_at)
        wire.sort(key=lambda entry: entry[0])
        if one.pending(VALUES) < 8 << 20:
            one.send(VALUES, [bytes(1 << 20)] * 8)
    # 100 Mbit/s, or what the least window takes.
    assert delays and max(delays) <= (0.05 if rate >= 12.5e6 else 0.065)
    assert one.acknowledged(VALUES) >= 0.8 * min(rate, 200e6) * 4


def test_bytes_are_acknowledged_as_they_arrive():
    network = Network()
    network.ends[0].send(VALUES, [bytes(10 << 20)])
    network.run()
    assert network.ends[0].acknowledged(VALUES) == 10 << 20
    assert network.ends[0].deadline() is None


def test_received_data_is_acknowledged_without_outgoing_data():
    one, other = Session(), Session()
    one.send(MESSAGES, [b"x"])
    (packet,) = one.packets(0.0)
    assert other.receive(packet, 0.0) == [(MESSAGES, [b"x"])]
    assert other.packets(0.0) == [], "an answer may come in the next milliseconds and acknowledge as well"
    due = other.deadline()
    assert due is not None
    (acknowledgement,) = other.packets(due)
    one.receive(acknowledgement, due)
    assert one.pending(MESSAGES) == 0


def test_packets_that_were_lost_without_a_reconnect_are_sent_again():
    one, other = Session(), Session()
    one.send(MESSAGES, [b"x"])
    one.packets(0.0)  # lost
    due = one.deadline()
    assert due is not None and one.packets(due - 0.01) == []
    (again,) = one.packets(due)
    assert other.receive(again, due) == [(MESSAGES, [b"x"])]


def test_duplicate_packet_is_counted_and_dropped():
    one, other = Session(), Session()
    one.send(MESSAGES, [b"x"])
    (packet,) = one.packets(0.0)
    assert len(other.receive(packet, 0.0)) == 1
    assert other.receive(packet, 0.0) == []
    assert other.repeated == 1


def test_too_large_messages_and_packets_are_rejected(monkeypatch):
    monkeypatch.setattr(session, "_MAX_MESSAGE", 1 << 20)
    one, other = Session(), Session()
    with pytest.raises(TransferError, match="cannot send a message of 1048577 bytes"):
        one.send(MESSAGES, [bytes((1 << 20) + 1)])
    header = session._HEADER.pack(1, 0, 0, 0, 0, 0)
    with pytest.raises(ProtocolError):
        other.receive([header, bytes(CHUNK + 1)], 0.0)
    for number in range(4):
        other.receive([session._HEADER.pack(1, 0, 0, number, 0, 0), bytes(CHUNK)], 0.0)
    with pytest.raises(ProtocolError):
        other.receive([session._HEADER.pack(1, 0, 0, 4, 0, 0), b"x"], 0.0)
