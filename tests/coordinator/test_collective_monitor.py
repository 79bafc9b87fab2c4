"""When a wait is broken off, when the person is told, and when nobody looks at all."""

from __future__ import annotations

import pytest

from rankbook.coordinator import actions as act
from rankbook.coordinator.deadlock import LOOK_EVERY, CollectiveMonitor, CollectiveReport
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.states import CellEntry, CellState, RankEntry, RankState
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport

CELL = 8
PERIODS = GracePeriods()
RAISED = PERIODS.raised


class Scene:
    """`busy` ranks run cell 8, the other ranks of it have answered; time goes by `look`."""

    def __init__(self, *busy: int, failed: dict[int, str] | None = None, finished: tuple[int, ...] = ()) -> None:
        self.supervisor = CollectiveMonitor(PERIODS)
        answers = {**(failed or {}), **dict.fromkeys(finished, "")}
        self.ranks = {rank: RankEntry(rank, RankState.BUSY, 1, CELL) for rank in busy}
        self.ranks |= {rank: RankEntry(rank, RankState.IDLE, 1) for rank in answers}
        cell = CellEntry(CELL, tuple(sorted(self.ranks)), state=CellState.RUNNING, running=set(busy), answers=answers)
        self.cells = {CELL: cell}
        self.now = 50.0

    @property
    def cell(self) -> CellEntry:
        return self.cells[CELL]

    def waits(
        self, rank: int, number: int, op: str = "all_reduce", *, name: str = "0", cell: int | None = None
    ) -> None:
        """It tells that it began this collective at time 50, of all ranks there are."""
        waiting = CollectiveLaunch(number=number, op=op, data="", alike=True, peer=None, seconds=self.now - 50.0)
        self.tells(rank, number, waiting, name=name, cell=cell)

    def tells(
        self, rank: int, count: int, *pending: CollectiveLaunch, name: str = "0", cell: int | None = None
    ) -> None:
        members = tuple(sorted(self.ranks))
        report = GroupReport(name=name, ranks=members, count=count, pending=pending, recent=pending)
        self.supervisor.hear(
            rank,
            CollectiveReport(
                Collectives(token=0, cell=cell or self.ranks[rank].cell, line=2, groups=(report,)), self.now
            ),
        )

    def look(self, after: float = 0.0) -> list[act.Action]:
        self.now += after
        return self.supervisor.look(self.now, self.ranks, self.cells)


def of(kind: type, actions: list[act.Action]) -> list[act.Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_wait_for_a_rank_that_raised_is_broken_off_after_the_grace_and_not_before():
    scene = Scene(0, failed={1: "raised ValueError"})
    scene.waits(0, 5)
    scene.tells(1, 4)
    assert of(act.SendAbort, scene.look()) == []
    assert of(act.SendAbort, scene.look(RAISED - 0.1)) == []
    assert not scene.cell.aborted
    assert of(act.SendAbort, scene.look(0.1)) == [act.SendAbort((0,), ("0",), "rank 1 raised ValueError")]
    assert scene.cell.aborted


def test_ranks_that_wait_for_the_same_one_are_broken_off_together_with_all_their_groups():
    scene = Scene(0, 2, failed={1: "raised ValueError"})
    scene.waits(0, 5)
    scene.waits(2, 3, name="a")
    scene.look()
    assert of(act.SendAbort, scene.look(RAISED)) == [act.SendAbort((0, 2), ("0", "a"), "rank 1 raised ValueError")]


def test_each_culprit_has_an_abort_of_its_own():
    scene = Scene(0, 2, failed={1: "raised ValueError", 3: "raised KeyError"})
    scene.waits(0, 5)
    scene.waits(2, 3, name="a")
    scene.tells(1, 9, name="a")
    scene.tells(3, 9)
    # rank 1 has not begun #5 of "0", rank 3 has; in "a" it is the other way round
    aborts = of(act.SendAbort, [*scene.look(), *scene.look(RAISED)])
    assert {(each.ranks, each.groups, each.cause) for each in aborts} == {
        ((0,), ("0",), "rank 1 raised ValueError"),
        ((2,), ("a",), "rank 3 raised KeyError"),
    }


def test_a_dead_rank_ends_waits_as_one_that_raised_does():
    scene = Scene(0, 1)
    scene.ranks[1] = RankEntry(1, RankState.DEAD, 1, loss="was killed by signal 9")
    scene.cell.running.discard(1)
    scene.waits(0, 5)
    scene.look()
    assert of(act.SendAbort, scene.look(RAISED)) == [act.SendAbort((0,), ("0",), "rank 1 was killed by signal 9")]


def test_who_merely_finished_ends_no_wait_but_the_person_is_told_once():
    scene = Scene(0, finished=(1,))
    scene.waits(0, 5)
    scene.tells(1, 4)
    assert of(act.NotifyUser, scene.look()) == []
    assert of(act.NotifyUser, scene.look(PERIODS.finished - 0.1)) == []
    (told,) = of(act.NotifyUser, scene.look(0.2))
    assert told.cell == CELL
    assert "rank 0 waits in all_reduce #5 at line 2 for rank 1, which has finished this cell" in told.text
    for _ in range(3):
        assert of(act.NotifyUser, scene.look(PERIODS.finished)) == []
    assert not scene.cell.aborted
    assert of(act.SendAbort, scene.look(1000)) == []


def test_ranks_that_wait_for_the_same_one_in_the_same_place_are_told_of_in_one_line():
    scene = Scene(0, 2, 3, finished=(1,))
    for rank in (0, 2):
        scene.waits(rank, 5)
    scene.waits(3, 5, "barrier")
    scene.tells(1, 4)
    scene.look()
    told = [each.text for each in of(act.NotifyUser, scene.look(PERIODS.finished)) if "finished" in each.text]
    assert [text.partition(" for rank 1")[0] for text in told] == [
        "ranks 0,2 wait in all_reduce #5 at line 2",
        "rank 3 waits in barrier #5 at line 2",
    ]


def test_ranks_that_disagree_are_told_of_once():
    scene = Scene(0, 1)
    scene.now = 51.0
    scene.waits(0, 5)
    scene.waits(1, 5, "barrier")
    assert ["disagree" in each.text for each in of(act.NotifyUser, scene.look())] == [True]
    assert of(act.NotifyUser, scene.look(1)) == []
    scene.waits(0, 6)
    scene.waits(1, 6, "barrier")
    assert len(of(act.NotifyUser, scene.look(1))) == 1, "another collective is another matter"


def test_what_a_rank_told_of_an_earlier_cell_does_not_count():
    scene = Scene(0, failed={1: "raised ValueError"})
    scene.waits(0, 5, cell=CELL - 1)
    scene.look()
    assert of(act.SendAbort, scene.look(RAISED)) == []


def test_a_rank_that_runs_another_cell_is_not_out():
    scene = Scene(0, finished=(1,))
    scene.ranks[1] = RankEntry(1, RankState.BUSY, 1, CELL + 1)
    scene.cells[CELL + 1] = CellEntry(CELL + 1, (1,), state=CellState.RUNNING, running={1})
    scene.waits(0, 5)
    scene.look()
    assert of(act.NotifyUser, scene.look(PERIODS.finished)) == []


def test_the_time_since_an_end_begins_anew_with_the_next_cell():
    scene = Scene(0, finished=(1,))
    scene.look()
    scene.cells.clear()
    scene.look(100)
    scene.cells[CELL + 1] = CellEntry(CELL + 1, (0, 1), state=CellState.RUNNING, running={0}, answers={1: ""})
    scene.ranks[0].cell = CELL + 1
    scene.waits(0, 5)
    assert of(act.NotifyUser, scene.look()) == []
    assert of(act.NotifyUser, scene.look(PERIODS.finished)) != []


def test_while_something_runs_all_living_ranks_are_asked_and_the_next_look_is_set():
    scene = Scene(0, 1)
    scene.ranks[2] = RankEntry(2, RankState.DEAD, 1, loss="died")
    assert scene.look() == [act.RequestCollectives((0, 1)), act.ScheduleCheck(LOOK_EVERY)]


def test_it_looks_more_often_once_some_ranks_have_ended():
    (soon,) = of(act.ScheduleCheck, Scene(0, finished=(1,)).look())
    assert soon.seconds < LOOK_EVERY


@pytest.mark.parametrize("what", ["no cell", "an internal one", "one that waits"])
def test_while_nothing_runs_nobody_is_asked_and_nobody_looks(what):
    scene = Scene(0, 1)
    if what == "no cell":
        scene.cells.clear()
    elif what == "an internal one":
        scene.cell.internal = True
    else:
        scene.cell.state, scene.cell.running = CellState.QUEUED, set()
    assert scene.look() == []


def test_who_waits_with_a_lost_rank_is_known_by_the_groups_that_both_are_in():
    scene = Scene(0, 1, 2)
    scene.waits(0, 5)
    scene.tells(1, 5)
    assert scene.supervisor.waiting_for({2}) == {0}
    assert scene.supervisor.waiting_for({7}) == set()
    scene.supervisor.forget(0)
    assert scene.supervisor.waiting_for({2}) == set()
