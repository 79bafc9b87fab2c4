"""Both links keep the same promises."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rankbook.errors import StartError
from rankbook.messages import Clear, Hello, Interrupt, Leave
from rankbook.transport.link import Sender
from rankbook.transport.memory_link import MemoryHub
from rankbook.transport.zmq_link import ZmqHub, ZmqRank

HELLO = Hello(rank=1, pid=7, incarnation=2, device="cpu", backend="gloo", threads=1)


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


def test_what_is_sent_before_the_rank_reads_waits_for_it(pair):
    rank = pair.dial(0, 1)
    for cell in range(100):
        assert pair.hub.send(0, Interrupt(cell=cell))
    assert [next_of(rank)[0].cell for _ in range(100)] == list(range(100))


def test_a_new_incarnation_gets_nothing_that_was_meant_for_the_old_one(pair):
    old = pair.dial(0, 1)
    assert pair.hub.send(0, Leave())
    next_of(old)
    new = pair.dial(0, 2)
    assert pair.hub.send(0, Interrupt(cell=9))
    assert next_of(new)[0] == Interrupt(cell=9)


def test_sending_to_a_rank_that_was_never_there_says_so(pair):
    assert not pair.hub.send(3, Leave())


def test_wake_ends_a_wait_from_another_thread(tmp_path_factory):
    pair = RealPair(tmp_path_factory.mktemp("s"))
    threading.Timer(0.05, pair.hub.wake).start()
    assert pair.hub.wait(10.0, ()) == (False, set())
    pair.close()


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


@pytest.fixture
def real(tmp_path_factory):
    pair = RealPair(tmp_path_factory.mktemp("s"))
    yield pair
    pair.close()


def test_what_comes_while_another_thread_has_taken_over_comes_to_that_one(real):
    rank = real.dial(1, 2)
    at_home: list[object] = []
    home = threading.Thread(target=lambda: at_home.append(until_message(real.hub.wait) and real.hub.receive()))
    home.start()
    real.hub.take_over()
    rank.send(HELLO)
    until_message(real.hub.wait_here)
    assert real.hub.receive() == (Sender(1, 2), HELLO, [])
    real.hub.wake()
    assert real.hub.wait_here(5.0, ()) == (False, set())
    assert home.is_alive(), "the home thread was woken"
    real.hub.give_back()
    rank.send(HELLO)
    home.join(5.0)
    assert at_home == [(Sender(1, 2), HELLO, [])]


def test_what_the_one_who_took_over_has_left_is_the_home_threads(real):
    rank = real.dial(1, 2)
    real.hub.take_over()
    rank.send(HELLO)
    rank.send(Clear(cell=1, wait=False))
    until_message(real.hub.wait_here)
    assert real.hub.receive() is not None
    real.hub.give_back()
    until_message(real.hub.wait)
    assert real.hub.receive()[1] == Clear(cell=1, wait=False)


def test_the_home_thread_receives_nothing_behind_the_back_of_who_took_over(real):
    rank = real.dial(1, 2)
    found: list[object] = []
    real.hub.take_over()
    rank.send(HELLO)
    until_message(real.hub.wait_here)
    home = threading.Thread(target=lambda: found.append((real.hub.wait(0.0, ()), real.hub.receive())))
    home.start()
    home.join()
    assert found == [((False, set()), None)]
    assert real.hub.receive() is not None
    real.hub.give_back()
