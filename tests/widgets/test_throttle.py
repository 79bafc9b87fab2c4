"""Test the throttle: at most ten updates a second, and always the last one."""

from __future__ import annotations

import threading
import time

from rankbook.widgets.live_view import Throttle
from tests.conftest import wait_until

LAST = 1 << 60


def test_throttle_joins_fast_changes_and_sends_the_last():
    sent, output, enough = [], [0], threading.Event()

    def send() -> None:
        sent.append((time.monotonic(), output[0]))
        if output[0] == LAST:
            enough.set()

    throttle = Throttle(send, interval=0.05)
    start = time.monotonic()
    while len(sent) < 10 and time.monotonic() - start < 20:
        output[0] += 1
        throttle.schedule()
    output[0] = LAST
    throttle.schedule()
    assert enough.wait(10)
    assert 10 <= len(sent) <= (sent[-1][0] - start) / 0.05 + 3  # one that is late may come right before the next


def test_throttle_has_no_timer_when_idle_or_closed():
    sent = threading.Event()
    throttle = Throttle(sent.set)
    assert not [thread for thread in threading.enumerate() if thread.name == "rankbook-view"]
    throttle.schedule()
    assert sent.wait(10)
    sent.clear()
    throttle.schedule()
    throttle.close()
    throttle.schedule()
    assert not sent.wait(0.3)


def test_an_update_that_waits_for_the_one_before_it_is_not_sent_once_closed():
    sent, entered, gate = [], threading.Event(), threading.Event()

    def send() -> None:
        sent.append(None)
        entered.set()
        gate.wait(10)

    throttle = Throttle(send, interval=0.01)
    throttle.schedule()
    assert entered.wait(10)
    throttle.schedule()
    wait_until(lambda: throttle._timer is None, timeout=10, what="the second update waits for the first")
    throttle.close()
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "rankbook-view":
            thread.join(10)
    assert len(sent) == 1
