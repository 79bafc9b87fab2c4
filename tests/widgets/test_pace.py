"""At most ten a second, and the last one always."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

from rankbook.widgets.pace import Pacer


def test_what_comes_faster_is_one_and_the_last_is_always_sent():
    sent, said, enough = [], [0], threading.Event()

    def send() -> None:
        sent.append((time.monotonic(), said[0]))
        if said[0] == 3000:
            enough.set()

    pacer = Pacer(send, interval=0.05)
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        said[0] += 1
        pacer.note()
    said[0] = 3000
    pacer.note()
    assert enough.wait(2)
    assert 5 <= len(sent) <= 13
    assert min(after[0] - before[0] for before, after in pairwise(sent)) > 0.02


def test_nothing_runs_while_there_is_nothing_to_send_and_nothing_is_sent_once_closed():
    sent = threading.Event()
    pacer = Pacer(sent.set)
    assert not [thread for thread in threading.enumerate() if thread.name == "rankbook-view"]
    pacer.note()
    assert sent.wait(2)
    sent.clear()
    pacer.note()
    pacer.close()
    pacer.note()
    assert not sent.wait(0.3)
