"""Test how long a rank may take to exit."""

from __future__ import annotations

import time

from rankbook.coordinator.driver import ShutdownManager
from rankbook.coordinator.states import GracePeriods

GRACE = GracePeriods(leave=0.25)


class Harness:
    """A hub, a launcher and a clock of callbacks."""

    def __init__(self, reachable=True):
        self.reachable, self.sent, self.killed, self.due = reachable, [], [], []
        self.shutdown_manager = ShutdownManager(self, self, lambda *due: self.due.append(due), GRACE)

    def send(self, rank, message):
        self.sent.append((rank, message.patience))
        return self.reachable

    def kill(self, rank, incarnation):
        self.killed.append((rank, incarnation))


def test_rank_that_cannot_receive_a_shutdown_request_is_killed_at_once():
    unreachable = Harness(reachable=False)
    unreachable.shutdown_manager.shut_down(0, 1, graceful=True)
    unreachable.shutdown_manager.shut_down(1, 1, graceful=False)
    assert unreachable.killed == [(0, 1), (1, 1)]


def test_rank_that_saves_gets_the_requested_time_up_to_the_limit(monkeypatch):
    harness, now = Harness(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    harness.shutdown_manager.patience = 5.0
    for rank in range(3):
        harness.shutdown_manager.shut_down(rank, 1, graceful=True)
    assert harness.sent == [(0, 5.0), (1, 5.0), (2, 5.0)]
    harness.shutdown_manager.extend_deadline(1, 1, 3.0)
    harness.shutdown_manager.extend_deadline(2, 1, 60.0)
    harness.shutdown_manager.extend_deadline(2, 9, 60.0)  # of another incarnation
    assert harness.shutdown_manager.deadline == 105.0 + GRACE.leave
    for _ in range(3):
        now[0] += 3.0
        due, harness.due = harness.due, []
        for _, callback in due:
            callback()
        if now[0] == 103.0:
            assert harness.killed == [(0, 1)]
            assert [seconds for seconds, _ in harness.due] == [GRACE.leave, 2.0 + GRACE.leave]
    assert harness.killed == [(0, 1), (1, 1), (2, 1)]
    assert harness.shutdown_manager.deadline == 0.0


def test_a_request_for_time_counts_even_if_it_arrives_before_the_shutdown_request_has_returned(monkeypatch):
    harness, now = Harness(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def answer_at_once(rank, message):
        harness.shutdown_manager.extend_deadline(rank, 1, 3.0)
        return True

    monkeypatch.setattr(harness, "send", answer_at_once)
    harness.shutdown_manager.shut_down(0, 1, graceful=True)
    assert harness.shutdown_manager.deadline == 103.0 + GRACE.leave
    now[0] += GRACE.leave
    [(_, callback)] = harness.due
    callback()
    assert harness.killed == []
