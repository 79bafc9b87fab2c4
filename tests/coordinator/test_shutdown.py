"""How long a rank may take to leave."""

from __future__ import annotations

import time

from rankbook.coordinator.driver import ShutdownManager
from rankbook.coordinator.grace import GracePeriods

GRACE = GracePeriods(leave=0.25)


class Stage:
    """A hub, a launcher and a clock of callbacks."""

    def __init__(self, hears=True):
        self.hears, self.sent, self.killed, self.due = hears, [], [], []
        self.farewells = ShutdownManager(self, self, lambda *due: self.due.append(due), GRACE)

    def send(self, rank, message):
        self.sent.append((rank, message.patience))
        return self.hears

    def kill(self, rank, incarnation):
        self.killed.append((rank, incarnation))


def test_a_rank_that_cannot_listen_is_killed_at_once():
    deaf = Stage(hears=False)
    deaf.farewells.part(0, 1, politely=True)
    deaf.farewells.part(1, 1, politely=False)
    assert deaf.killed == [(0, 1), (1, 1)]


def test_a_rank_that_saves_gets_the_time_that_it_asks_for_and_no_more_than_there_is(monkeypatch):
    stage, now = Stage(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage.farewells.patience = 5.0
    for rank in range(3):
        stage.farewells.part(rank, 1, politely=True)
    assert stage.sent == [(0, 5.0), (1, 5.0), (2, 5.0)]
    stage.farewells.linger(1, 1, 3.0)
    stage.farewells.linger(2, 1, 60.0)
    stage.farewells.linger(2, 9, 60.0)  # of another incarnation
    assert stage.farewells.deadline == 105.0 + GRACE.leave
    for _ in range(3):
        now[0] += 3.0
        due, stage.due = stage.due, []
        for _, callback in due:
            callback()
        if now[0] == 103.0:
            assert stage.killed == [(0, 1)]
            assert [seconds for seconds, _ in stage.due] == [GRACE.leave, 2.0 + GRACE.leave]
    assert stage.killed == [(0, 1), (1, 1), (2, 1)]
    assert stage.farewells.deadline == 0.0
