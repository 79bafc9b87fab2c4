"""Small messages that pass pyzmq by."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import zmq

from rankbook.transport import quick_send
from rankbook.transport.quick_send import SMALL, send_quickly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libzmq is found in /proc")


@pytest.fixture
def ends():
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pull.rcvtimeo = 5_000
    push.bind("inproc://ends")
    yield push, pull
    push.close(linger=0)
    pull.close(linger=0)
    context.term()


def test_a_small_message_arrives_as_pyzmq_would_have_sent_it(ends):
    push, pull = ends
    pull.connect("inproc://ends")
    assert send_quickly(push.underlying, b"nothing\0is lost")
    push.send(b"after it")
    assert [pull.recv(), pull.recv()] == [b"nothing\0is lost", b"after it"]
    assert not pull.getsockopt(zmq.RCVMORE)


def test_what_nobody_can_take_at_once_is_not_sent(ends):
    push, _ = ends
    assert not send_quickly(push.underlying, b"nobody is connected")


def test_what_is_large_is_not_sent(ends):
    push, pull = ends
    pull.connect("inproc://ends")
    assert send_quickly(push.underlying, bytes(SMALL))
    assert not send_quickly(push.underlying, bytes(SMALL + 1))


def test_a_closed_socket_is_no_harm(ends):
    push, _ = ends
    address = push.underlying
    push.close()
    assert not send_quickly(address, b"too late")


def test_where_the_library_is_not_found_nothing_is_sent(ends, monkeypatch, tmp_path):
    push, pull = ends
    pull.connect("inproc://ends")
    monkeypatch.setattr(quick_send, "_MAPS", tmp_path / "there-is-none")
    quick_send._zmq_send.cache_clear()
    assert not send_quickly(push.underlying, b"small")
    quick_send._zmq_send.cache_clear()


def test_no_other_thread_gets_the_interpreter_in_between(ends):
    push, pull = ends
    pull.connect("inproc://ends")
    turns, over = [], threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            turns.append(1)
            time.sleep(0)  # gives the interpreter up

    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # so that it changes hands only where it is given up
    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        assert send_quickly(push.underlying, b"the library is looked for once, in a file")
        seen = len(turns)
        for _ in range(100):
            send_quickly(push.underlying, b"small")
        assert len(turns) == seen
        for _ in range(100_000):
            push.send(b"small")
            pull.recv()
            if len(turns) > seen:
                break
        assert len(turns) > seen  # as pyzmq sends, it does
    finally:
        over.set()
        sys.setswitchinterval(before)
        thread.join()
