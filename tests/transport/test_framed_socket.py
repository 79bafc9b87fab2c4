"""Test messages over a stream socket that arrive in pieces of any size."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from rankbook.protocol.messages import Interrupt, Text, encode
from rankbook.transport.framed_socket import MessageStream

ONE, OTHER = encode(Interrupt(cell=1)), encode(Interrupt(cell=2))


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


@pytest.fixture
def pair() -> Iterator[tuple[MessageStream[bytes], socket.socket]]:
    """Yield a stream that returns the bytes of every message, and the socket of its peer."""
    ours, peer = socket.socketpair()
    stream: MessageStream[bytes] = MessageStream(ours, bytes)
    yield stream, peer
    stream.close()
    peer.close()


def test_a_message_is_framed_by_its_length(pair):
    stream, peer = pair
    stream.send(Interrupt(cell=1))
    assert peer.recv(100) == framed(ONE)


def test_a_message_is_given_with_its_last_byte_and_not_before(pair):
    stream, peer = pair
    for byte in framed(ONE)[:-1]:
        peer.send(bytes([byte]))
        assert list(stream.read()) == []
    peer.send(framed(ONE)[-1:])
    assert list(stream.read()) == [ONE]
    assert list(stream.read()) == []


def test_messages_that_arrive_together_are_given_in_order_and_the_rest_is_kept(pair):
    stream, peer = pair
    peer.send(framed(ONE) + framed(OTHER) + framed(ONE)[:3])
    assert list(stream.read()) == [ONE, OTHER]
    peer.send(framed(ONE)[3:])
    assert list(stream.read()) == [ONE]


def test_messages_before_the_end_are_given_and_the_stream_is_closed(pair):
    stream, peer = pair
    peer.send(framed(ONE))
    peer.close()
    assert list(stream.read()) == [ONE]
    assert stream.closed


def test_messages_of_several_threads_stay_whole(pair):
    stream, peer_socket = pair
    messages = [Text(cell=number, stream="stdout", data=bytes([number]) * 1_000_000) for number in range(4)]
    senders = [threading.Thread(target=stream.send, args=(message,)) for message in messages]
    for sender in senders:
        sender.start()
    peer_stream: MessageStream[bytes] = MessageStream(peer_socket, bytes)
    received = []
    while len(received) < len(messages):
        select.select([peer_stream], [], [], 10)
        received += peer_stream.read()
    for sender in senders:
        sender.join()
    assert sorted(received) == sorted(encode(message) for message in messages)


def test_a_send_to_a_peer_that_is_gone_closes_the_stream(pair):
    stream, peer = pair
    peer.close()
    stream.send(Interrupt(cell=1))
    assert stream.closed


def test_two_ends_that_send_more_than_the_socket_holds_do_not_wait_for_each_other():
    """One end reads while it sends, as the forkserver does. The other is the notebook's driver."""
    ours, theirs = socket.socketpair()
    server: MessageStream[bytes] = MessageStream(ours, bytes, reads_while_sending=True)
    notebook: MessageStream[bytes] = MessageStream(theirs, bytes)
    requests = [Text(cell=number, stream="stdout", data=b"r" * 10_000) for number in range(30)]
    report = Text(cell=0, stream="stdout", data=b"x" * (1 << 20))
    received: dict[str, list[bytes]] = {"server": [], "notebook": []}

    def receive(name: str, stream: MessageStream[bytes], count: int) -> None:
        while len(received[name]) < count:
            if not stream.has_unread:
                select.select([stream], [], [], 5)
            received[name] += stream.read()

    def request() -> None:
        for message in requests:
            notebook.send(message)
        receive("notebook", notebook, 1)

    def serve() -> None:
        server.send(report)
        assert server.has_unread
        receive("server", server, len(requests))

    threads = [threading.Thread(target=run, daemon=True) for run in (request, serve)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert received == {"notebook": [encode(report)], "server": [encode(message) for message in requests]}
    assert not server.has_unread
    server.close()
    notebook.close()


def test_a_send_ends_if_the_peer_ends_while_it_waits_for_room():
    ours, peer = socket.socketpair()
    stream: MessageStream[bytes] = MessageStream(ours, bytes, reads_while_sending=True)
    sender = threading.Thread(target=stream.send, args=(Text(cell=0, stream="stdout", data=b"x" * (4 << 20)),))
    sender.start()
    peer.sendall(framed(ONE))
    assert peer.recv(1)
    peer.close()
    sender.join(5)
    assert not sender.is_alive() and stream.closed
    stream.close()
