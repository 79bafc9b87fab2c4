"""Test that the link in memory and the ZeroMQ link behave alike."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import zmq

from rankbook.errors import StartError
from rankbook.protocol.messages import Clear, Interrupt, RankReady, Shutdown
from rankbook.transport import Sender
from rankbook.transport.zmq_link import ZmqHub, ZmqRank
from tests.transport.memory_link import MemoryHub

HELLO = RankReady(rank=1, pid=7, incarnation=2, device="cpu", backend="gloo", threads=1)


class RealPair:
    """A hub and the ranks that dialled it, over ipc."""

    def __init__(self, folder: Path) -> None:
        self.hub = ZmqHub(folder)
        self.ranks: list[ZmqRank] = []

    def dial(self, rank, incarnation):
        end = ZmqRank(Sender(rank, incarnation), self.hub.uplink, self.hub.open_downlink(rank, incarnation))
        self.ranks.append(end)
        return end

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.hub.close()


class MemoryPair:
    """The same in memory."""

    def __init__(self) -> None:
        self.hub = MemoryHub()

    def dial(self, rank, incarnation):
        return self.hub.rank_end(self.hub.open_downlink(rank, incarnation))

    def close(self):
        self.hub.close()


@pytest.fixture(params=["zmq", "memory"])
def pair(request, tmp_path_factory):
    pair = RealPair(tmp_path_factory.mktemp("s")) if request.param == "zmq" else MemoryPair()
    yield pair
    pair.close()


def next_of(end):
    until_message(end.wait)
    return end.receive()


def test_messages_and_frames_arrive_with_their_sender_and_in_order(pair):
    rank = pair.dial(1, 2)
    rank.send(HELLO)
    rank.send(Clear(cell=4, wait=True), [b"frame", memoryview(b"view")])
    assert next_of(pair.hub) == (Sender(1, 2), HELLO, [])
    sender, message, frames = next_of(pair.hub)
    assert (sender, message) == (Sender(1, 2), Clear(cell=4, wait=True))
    assert [bytes(frame) for frame in frames] == [b"frame", b"view"]
    assert pair.hub.receive() is None


class Interrupting(list):
    """Frames in whose send other code runs, as the garbage collector or a signal handler runs it."""

    def __init__(self, run):
        super().__init__([b"frame"])
        self.run = run

    def __iter__(self):
        self.run()
        return super().__iter__()


def test_a_message_that_begins_in_the_middle_of_another_follows_it(tmp_path_factory):
    pair = RealPair(tmp_path_factory.mktemp("s"))
    rank = pair.dial(1, 2)

    def send_more():
        for cell in (5, 6):
            rank.send(Clear(cell=cell, wait=True))

    # A daemon: it would wait for its own lock.
    sender = threading.Thread(target=rank.send, args=(Clear(cell=4, wait=True), Interrupting(send_more)), daemon=True)
    sender.start()
    sender.join(10.0)
    assert not sender.is_alive()
    assert [next_of(pair.hub)[1].cell for _ in range(3)] == [4, 5, 6]
    pair.close()


def test_messages_wait_for_a_rank_that_does_not_read_yet(pair):
    rank = pair.dial(0, 1)
    for cell in range(100):
        assert pair.hub.send(0, Interrupt(cell=cell))
    assert [next_of(rank)[0].cell for _ in range(100)] == list(range(100))


def test_new_incarnation_receives_no_messages_for_the_old_one(pair):
    old = pair.dial(0, 1)
    assert pair.hub.send(0, Shutdown())
    next_of(old)
    new = pair.dial(0, 2)
    assert pair.hub.send(0, Interrupt(cell=9))
    assert next_of(new)[0] == Interrupt(cell=9)


def test_sending_to_an_unknown_rank_returns_false(pair):
    assert not pair.hub.send(3, Shutdown())


def test_wake_ends_a_wait_from_another_thread(tmp_path_factory):
    pair = RealPair(tmp_path_factory.mktemp("s"))
    threading.Timer(0.05, pair.hub.wake).start()
    assert pair.hub.wait(10.0, ()) == (False, set())
    pair.close()


def test_a_wait_ends_for_a_file_of_the_caller_and_no_longer_for_one_that_it_gave_up(tmp_path_factory):
    pair = RealPair(tmp_path_factory.mktemp("s"))
    (read, write), (other, _) = pipes = os.pipe(), os.pipe()
    os.write(write, b"x")
    assert pair.hub.wait(10.0, (read, other)) == (False, {read})
    assert pair.hub.wait(0.0, (other,)) == (False, set())
    assert pair.hub.wait(10.0, (read,)) == (False, {read})
    pair.close()
    for end in (end for pipe in pipes for end in pipe):
        os.close(end)


def test_a_file_with_the_number_of_a_closed_one_ends_a_wait(tmp_path_factory):
    hub = ZmqHub(tmp_path_factory.mktemp("hub"))
    read, write = os.pipe()
    assert hub.wait(0.0, {read}) == (False, set())
    other_read, other_write = os.pipe()
    os.dup2(other_read, read)  # closes the first one
    os.write(other_write, b"x")
    assert hub.wait(5.0, {read}) == (False, {read})
    hub.close()
    for end in (read, write, other_read, other_write):
        os.close(end)


def test_a_folder_that_is_taken_is_a_start_error(tmp_path):
    (tmp_path / "up").mkdir()
    with pytest.raises(StartError, match="cannot listen"):
        ZmqHub(tmp_path)


def until_message(wait):
    """Wait until there is one: a link that is being made ends a wait as well."""
    deadline = time.monotonic() + 5
    while not wait(5.0, ())[0]:
        assert time.monotonic() < deadline
    return True


@pytest.mark.parametrize("step", ["made", "set up"])
def test_a_downlink_without_a_free_descriptor_is_a_start_error_and_leaves_no_socket(tmp_path, monkeypatch, step):
    hub = ZmqHub(tmp_path)
    make, made = hub._context.socket, []

    class Refusing(zmq.Socket):
        def setsockopt(self, *_: object) -> None:
            raise zmq.ZMQError(errno.EMFILE)

    def make_socket(_: object, kind: int) -> object:
        if step == "made":
            raise zmq.ZMQError(errno.EMFILE)
        made.append(make(kind, socket_class=Refusing))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(type(hub._context), "socket", make_socket)
        with pytest.raises(StartError, match=r"cannot listen at ipc://.*down-0\.1: Too many open files"):
            hub.open_downlink(0, 1)
    assert all(socket.closed for socket in made)
    hub.close()


def test_a_message_for_many_ranks_keeps_its_place_in_the_order_of_every_rank(pair):
    ranks = [pair.dial(rank, 1) for rank in range(3)]
    assert pair.hub.send(1, Interrupt(cell=0))
    pair.hub.send_many((0, 1, 7), Interrupt(cell=1), [b"frame"])
    for rank in (0, 1, 2):
        assert pair.hub.send(rank, Interrupt(cell=2))
    received = {}
    for rank, end in enumerate(ranks):
        while not received.get(rank) or received[rank][-1] != (2, []):
            message, frames = next_of(end)
            received.setdefault(rank, []).append((message.cell, [bytes(frame) for frame in frames]))
    assert received == {0: [(1, [b"frame"]), (2, [])], 1: [(0, []), (1, [b"frame"]), (2, [])], 2: [(2, [])]}
