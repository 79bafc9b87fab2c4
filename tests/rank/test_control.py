"""Where an interrupt may hit the main thread, and where it has to wait a moment."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from rankbook.rank import control
from rankbook.rank.control import Interrupts


@pytest.fixture
def interrupts(monkeypatch):
    monkeypatch.setattr(control.host, "interrupt_group", lambda: None)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
    made = Interrupts()
    made.arm(1)
    yield made
    made.disarm()
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGCHLD, before[1])


def go_on_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Gate:
    """As `threading.Condition`: an interrupt between the lock's being taken and the block would leave it taken."""

    def __init__(self, *, hit_as_it):
        self.lock, self._hit = threading.Lock(), hit_as_it

    def __enter__(self):
        self.lock.acquire()
        if self._hit == "opens":
            signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_):
        if self._hit == "closes":
            signal.raise_signal(signal.SIGINT)
        self.lock.release()


def test_a_lock_that_is_being_taken_is_given_back(interrupts):
    gate = Gate(hit_as_it="opens")
    with pytest.raises(KeyboardInterrupt), gate:
        go_on_for(5)
    assert gate.lock.acquire(blocking=False)


def test_a_lock_that_is_being_given_back_is(interrupts):
    gate = Gate(hit_as_it="closes")

    def pass_through():
        with gate:
            pass
        go_on_for(5)

    with pytest.raises(KeyboardInterrupt):
        pass_through()
    assert gate.lock.acquire(blocking=False)


def test_who_waits_for_a_lock_is_interrupted_all_the_same(interrupts):
    class Slow:
        def __enter__(self):
            timer.start()
            go_on_for(20)

        def __exit__(self, *_):
            pass

    timer = threading.Timer(0.05, interrupts.request, (1,))
    with pytest.raises(KeyboardInterrupt), Slow():
        pass
    timer.join()
