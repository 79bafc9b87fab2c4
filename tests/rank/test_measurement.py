"""Test what counts as waiting, with fake clocks."""

from __future__ import annotations

import threading
import time

import pytest

from rankbook.protocol.telemetry import CollectiveSpan
from rankbook.rank.measurement import SpanRecorder, WaitClock, cpu_clock_of


class Future:
    def __init__(self):
        self.callbacks = []

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def end(self):
        for callback in self.callbacks:
            callback(self)


@pytest.fixture
def hands():
    return {"wall": 0.0, "cpu": 0.0}


@pytest.fixture
def clock(hands):
    return WaitClock(cpu=lambda: hands["cpu"], wall=lambda: hands["wall"])


def passes(hands, wall, cpu=0.0):
    hands["wall"] += wall
    hands["cpu"] += cpu


def test_wait_times_are_summed_without_the_time_between(clock, hands):
    passes(hands, 5)
    for _ in range(2):
        with clock.waiting("all_reduce"):
            passes(hands, 1.5, cpu=0.5)
        passes(hands, 7, cpu=7)
    assert clock.stop() == 2.0


def test_computing_beside_a_collective_does_not_count_as_waiting(clock, hands):
    future = Future()
    clock.waiting_for_future(future)
    passes(hands, 3, cpu=3)
    passes(hands, 1)
    future.end()
    passes(hands, 1)
    assert clock.stop() == 1.0


def test_overlapping_waits_count_once(clock, hands):
    first, second = Future(), Future()
    clock.waiting_for_future(first)
    clock.waiting_for_future(second)
    with clock.waiting("barrier"):
        passes(hands, 1)
        first.end()
        passes(hands, 1)
    passes(hands, 1)
    second.end()
    assert clock.stop() == 3.0


def interrupt_in_a_wait(clock, hands):
    with clock.waiting("barrier"):
        passes(hands, 1)
        raise KeyboardInterrupt


def test_a_wait_that_was_interrupted_and_one_that_goes_on_count_up_to_the_end(clock, hands):
    with pytest.raises(KeyboardInterrupt):
        interrupt_in_a_wait(clock, hands)
    late = Future()
    clock.waiting_for_future(late)
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


def test_the_times_of_a_collective_are_its_launch_and_its_whole_wait(hands):
    spans = SpanRecorder(clock=lambda: hands["wall"])
    for number in range(4):
        passes(hands, 1)
        spans.launch("0", number)
    passes(hands, 1)
    for _ in range(2):
        spans.begin_wait("0", 1)
        passes(hands, 1)
        spans.end_wait("0", 1)
    spans.begin_wait("0", 2)
    passes(hands, 3)
    expected = (CollectiveSpan("0", 1, 2, 5, 7), CollectiveSpan("0", 2, 3, 7, 10), CollectiveSpan("0", 3, 4))
    assert spans.stop() == expected, "a send has no number"
