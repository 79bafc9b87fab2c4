"""Messages over a stream socket: each is given once it is complete, whatever pieces it arrives in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from rankbook.protocol.messages import Interrupt, encode
from rankbook.transport.framed_socket import MessageStream

ONE, OTHER = encode(Interrupt(cell=1)), encode(Interrupt(cell=2))


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


@pytest.fixture
def pair() -> Iterator[tuple[MessageStream[bytes], socket.socket]]:
    """One end of a stream that gives each message's bytes, and the other end's socket."""
    ours, theirs = socket.socketpair()
    stream: MessageStream[bytes] = MessageStream(ours, bytes)
    yield stream, theirs
    stream.close()
    theirs.close()


def test_a_message_is_framed_by_its_length(pair):
    stream, theirs = pair
    stream.send(Interrupt(cell=1))
    assert theirs.recv(100) == framed(ONE)


def test_a_message_is_given_with_its_last_byte_and_not_before(pair):
    stream, theirs = pair
    for byte in framed(ONE)[:-1]:
        theirs.send(bytes([byte]))
        assert list(stream.read()) == []
    theirs.send(framed(ONE)[-1:])
    assert list(stream.read()) == [ONE]
    assert list(stream.read()) == []


def test_messages_that_arrive_together_are_given_in_order_and_the_rest_is_kept(pair):
    stream, theirs = pair
    theirs.send(framed(ONE) + framed(OTHER) + framed(ONE)[:3])
    assert list(stream.read()) == [ONE, OTHER]
    theirs.send(framed(ONE)[3:])
    assert list(stream.read()) == [ONE]


def test_messages_before_the_end_are_given_and_the_stream_is_closed(pair):
    stream, theirs = pair
    theirs.send(framed(ONE))
    theirs.close()
    assert list(stream.read()) == [ONE]
    assert stream.closed


def test_a_send_to_a_peer_that_is_gone_closes_the_stream(pair):
    stream, theirs = pair
    theirs.close()
    stream.send(Interrupt(cell=1))
    assert stream.closed
