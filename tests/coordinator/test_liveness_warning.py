"""Test the warnings about unresponsive ranks, with a fake clock and fake ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rankbook.coordinator import wait
from rankbook.coordinator.liveness import UnresponsiveRank
from rankbook.process_identity import ProcessInfo

STOPPED = ProcessInfo("stopped", 1.0, stopped=True)
RUNNING = ProcessInfo("running", 1.0)


class Harness:
    """Simulates one cell on ranks 0 and 1; the ranks in `silent` have not answered since they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.silent: dict[int, ProcessInfo] = {}
        self.replied: set[int] = set()
        self.asked: dict[int, float] = {}
        self.notes: list[str] = []
        monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=lambda: self.now))
        cell = SimpleNamespace(ranks=(0, 1), note=self.notes.append)
        liveness = SimpleNamespace(
            ask=self._ask, unresponsive=self._silent, received_within=lambda rank, _: rank in self.replied
        )
        driver = SimpleNamespace(liveness=liveness, cell_of=lambda _: cell, after=lambda _, callback: callback())
        self.liveness_warning = wait.LivenessWarning(driver, cell)

    def _ask(self, ranks) -> None:
        for rank in ranks:
            self.asked.setdefault(rank, self.now)

    def _silent(self, ranks) -> dict[int, UnresponsiveRank]:
        owing = [rank for rank in ranks if rank in self.asked and rank in self.silent]
        return {
            rank: UnresponsiveRank(rank, 40 + rank, self.now - self.asked[rank], 50.0, self.silent[rank])
            for rank in owing
        }

    def watch(self, seconds: float) -> None:
        """Look at the ranks as often as a waiting cell does."""
        for _ in range(int(seconds / 0.05)):
            self.now += 0.05
            self.liveness_warning.check()


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(monkeypatch)


def test_no_rank_is_queried_in_the_first_seconds(harness):
    harness.watch(2.5)
    assert not harness.asked


def test_rank_that_sends_messages_is_not_queried(harness):
    harness.replied = {0}
    harness.watch(10)
    assert set(harness.asked) == {1}
    assert not harness.notes


def test_stopped_rank_is_reported_once_at_the_next_check(harness):
    harness.silent = {1: STOPPED}
    harness.watch(6.5)
    assert harness.notes == ["rank 1: unresponsive for 3 s, process stopped; kill -CONT 41 resumes it\n"]
    harness.watch(60)
    assert len(harness.notes) == 1


def test_a_rank_that_may_only_be_in_a_long_call_is_reported_later(harness):
    harness.silent = {0: RUNNING}
    harness.watch(8)
    assert not harness.notes
    harness.watch(8)
    assert harness.notes == ["rank 0: unresponsive for 9 s, process running, 1.0 s of CPU time\n"]


def test_an_interrupt_asks_at_once(harness):
    harness.liveness_warning.ask()
    assert set(harness.asked) == {0, 1}
