"""What counts as waiting, with clocks that the test turns."""

from __future__ import annotations

import threading
import time

import pytest

from rankbook.rank.measurement import WaitClock, cpu_clock_of


class Future:
    def __init__(self):
        self.callbacks = []

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def end(self):
        for each in self.callbacks:
            each(self)


@pytest.fixture
def hands():
    return {"wall": 0.0, "cpu": 0.0}


@pytest.fixture
def clock(hands):
    return WaitClock(cpu=lambda: hands["cpu"], wall=lambda: hands["wall"])


def passes(hands, wall, cpu=0.0):
    hands["wall"] += wall
    hands["cpu"] += cpu


def test_waits_add_up_and_what_lies_between_does_not_count(clock, hands):
    passes(hands, 5)
    for _ in range(2):
        with clock.during("all_reduce"):
            passes(hands, 1.5, cpu=0.5)
        passes(hands, 7, cpu=7)
    assert clock.stop() == 2.0


def test_what_the_main_thread_computes_beside_a_promised_collective_is_no_waiting(clock, hands):
    future = Future()
    clock.promised(future)
    passes(hands, 3, cpu=3)
    passes(hands, 1)
    future.end()
    passes(hands, 1)
    assert clock.stop() == 1.0


def test_what_overlaps_counts_once(clock, hands):
    first, second = Future(), Future()
    clock.promised(first)
    clock.promised(second)
    with clock.during("barrier"):
        passes(hands, 1)
        first.end()
        passes(hands, 1)
    passes(hands, 1)
    second.end()
    assert clock.stop() == 3.0


def interrupt_in_a_wait(clock, hands):
    with clock.during("barrier"):
        passes(hands, 1)
        raise KeyboardInterrupt


def test_a_wait_that_was_interrupted_and_one_that_goes_on_count_up_to_the_end(clock, hands):
    with pytest.raises(KeyboardInterrupt):
        interrupt_in_a_wait(clock, hands)
    late = Future()
    clock.promised(late)
    passes(hands, 2)
    assert clock.stop() == 3.0
    passes(hands, 4)
    late.end()
    assert clock.stop() == 3.0


def test_a_threads_processor_time_is_read_from_another():
    clock, turned = cpu_clock_of(threading.get_ident()), []
    before = clock()
    busy_until = time.thread_time() + 0.05
    while time.thread_time() < busy_until:
        pass
    thread = threading.Thread(target=lambda: turned.append(clock() - before))
    thread.start()
    thread.join()
    assert turned[0] >= 0.05
