"""What is said beside a cell that runs long: the clock is made up, and so are the ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rankbook.coordinator import wait
from rankbook.coordinator.liveness import UnresponsiveRank
from rankbook.launch.process_info import ProcessInfo

STOPPED = ProcessInfo("stopped", 1.0, stopped=True)
RUNNING = ProcessInfo("running", 1.0)


class Stage:
    """One cell on ranks 0 and 1; those in `looks` have not answered since they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.looks: dict[int, ProcessInfo] = {}
        self.heard: set[int] = set()
        self.asked: dict[int, float] = {}
        self.notes: list[str] = []
        monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=lambda: self.now))
        cell = SimpleNamespace(ranks=(0, 1), note=self.notes.append)
        presence = SimpleNamespace(ask=self._ask, silent=self._silent, heard_within=lambda rank, _: rank in self.heard)
        driver = SimpleNamespace(presence=presence, cell_of=lambda _: cell, after=lambda _, callback: callback())
        self.vigil = wait.LivenessWarning(driver, cell)

    def _ask(self, ranks) -> None:
        for rank in ranks:
            self.asked.setdefault(rank, self.now)

    def _silent(self, ranks) -> dict[int, UnresponsiveRank]:
        owing = [rank for rank in ranks if rank in self.asked and rank in self.looks]
        return {
            rank: UnresponsiveRank(rank, 40 + rank, self.now - self.asked[rank], 50.0, self.looks[rank])
            for rank in owing
        }

    def watch(self, seconds: float) -> None:
        """Look as often as whoever waits for a cell does."""
        for _ in range(int(seconds / 0.05)):
            self.now += 0.05
            self.vigil.look()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_in_the_first_seconds_nobody_is_asked(stage):
    stage.watch(2.5)
    assert not stage.asked


def test_who_is_heard_is_not_asked(stage):
    stage.heard = {0}
    stage.watch(10)
    assert set(stage.asked) == {1}
    assert not stage.notes


def test_a_stopped_rank_is_told_at_the_next_look_and_once(stage):
    stage.looks = {1: STOPPED}
    stage.watch(6.5)
    assert stage.notes == ["rank 1: unresponsive for 3 s, process stopped: kill -CONT 41 lets it go on\n"]
    stage.watch(60)
    assert len(stage.notes) == 1


def test_a_rank_that_may_only_be_in_a_long_call_is_told_later(stage):
    stage.looks = {0: RUNNING}
    stage.watch(8)
    assert not stage.notes
    stage.watch(8)
    assert stage.notes == ["rank 0: unresponsive for 9 s, process running, 1.0 s of CPU time\n"]


def test_an_interrupt_asks_at_once(stage):
    stage.vigil.ask()
    assert set(stage.asked) == {0, 1}
