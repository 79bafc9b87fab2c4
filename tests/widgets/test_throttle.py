"""At most ten a second, and the last one always."""

from __future__ import annotations

import threading
import time

from rankbook.widgets.live_view import Throttle
from tests.conftest import wait_until

LAST = 1 << 60


def test_what_comes_faster_is_one_and_the_last_is_always_sent():
    sent, said, enough = [], [0], threading.Event()

    def send() -> None:
        sent.append((time.monotonic(), said[0]))
        if said[0] == LAST:
            enough.set()

    pacer = Throttle(send, interval=0.05)
    began = time.monotonic()
    while len(sent) < 10 and time.monotonic() - began < 20:
        said[0] += 1
        pacer.note()
    said[0] = LAST
    pacer.note()
    assert enough.wait(10)
    assert 10 <= len(sent) <= (sent[-1][0] - began) / 0.05 + 3  # one that is late may come right before the next


def test_nothing_runs_while_there_is_nothing_to_send_and_nothing_is_sent_once_closed():
    sent = threading.Event()
    pacer = Throttle(sent.set)
    assert not [thread for thread in threading.enumerate() if thread.name == "rankbook-view"]
    pacer.note()
    assert sent.wait(10)
    sent.clear()
    pacer.note()
    pacer.close()
    pacer.note()
    assert not sent.wait(0.3)


def test_an_update_that_waits_for_the_one_before_it_is_not_sent_once_closed():
    sent, entered, gate = [], threading.Event(), threading.Event()

    def send() -> None:
        sent.append(None)
        entered.set()
        gate.wait(10)

    pacer = Throttle(send, interval=0.01)
    pacer.note()
    assert entered.wait(10)
    pacer.note()
    wait_until(lambda: pacer._timer is None, timeout=10, what="the second update waits for the first")
    pacer.close()
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "rankbook-view":
            thread.join(10)
    assert len(sent) == 1
