"""Test when collectives are aborted, when the user is warned, and when no rank is asked."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from rankbook.coordinator import actions as act
from rankbook.coordinator.deadlock import CHECK_INTERVAL, CollectiveMonitor, CollectiveReport
from rankbook.coordinator.states import CellEntry, CellState, GracePeriods, RankEntry, RankState
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members

CELL = 8
PERIODS = GracePeriods()
RAISED = PERIODS.raised


class Simulation:
    """`busy` ranks run cell 8, the other ranks of it have answered; `check` advances the time."""

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

    def report_wait(
        self, rank: int, number: int, op: str = "all_reduce", *, name: str = "0", cell: int | None = None
    ) -> None:
        """Report that the rank began this collective of all ranks at time 50."""
        code = zlib.crc32(op.encode())
        waiting = CollectiveLaunch(
            number=number, op=op, data="", peer=None, seconds=self.now - 50.0, position="line 2", code=code, digest=code
        )
        self.report(rank, number, waiting, name=name, cell=cell)

    def report(
        self, rank: int, count: int, *pending: CollectiveLaunch, name: str = "0", cell: int | None = None
    ) -> None:
        members = tuple(sorted(self.ranks))
        report = GroupReport(name=name, members=encode_members(members), count=count, pending=pending, recent=pending)
        self.supervisor.record_report(
            rank,
            CollectiveReport(
                Collectives(token=0, cell=cell or self.ranks[rank].cell, line=2, groups=(report,)), self.now
            ),
        )

    def check(self, after: float = 0.0) -> list[act.Action]:
        self.now += after
        return self.supervisor.check(self.now, self.ranks, self.cells)


def of(kind: type, actions: list[act.Action]) -> list[act.Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_wait_for_a_rank_that_raised_is_aborted_after_the_grace_period():
    simulation = Simulation(0, failed={1: "raised ValueError"})
    simulation.report_wait(0, 5)
    simulation.report(1, 4)
    assert of(act.SendAbort, simulation.check()) == []
    assert of(act.SendAbort, simulation.check(RAISED - 0.1)) == []
    assert not simulation.cell.aborted
    assert of(act.SendAbort, simulation.check(0.1)) == [act.SendAbort((0,), ("0",), "rank 1 raised ValueError")]
    assert simulation.cell.aborted


def test_ranks_that_wait_for_the_same_one_are_aborted_together_with_all_their_groups():
    simulation = Simulation(0, 2, failed={1: "raised ValueError"})
    simulation.report_wait(0, 5)
    simulation.report_wait(2, 3, name="a")
    simulation.check()
    assert of(act.SendAbort, simulation.check(RAISED)) == [
        act.SendAbort((0, 2), ("0", "a"), "rank 1 raised ValueError")
    ]


def test_every_failed_rank_causes_an_abort_of_its_own():
    simulation = Simulation(0, 2, failed={1: "raised ValueError", 3: "raised KeyError"})
    simulation.report_wait(0, 5)
    simulation.report_wait(2, 3, name="a")
    simulation.report(1, 9, name="a")
    simulation.report(3, 9)
    # rank 1 has not begun #5 of "0", rank 3 has; in "a" it is the other way round
    aborts = of(act.SendAbort, [*simulation.check(), *simulation.check(RAISED)])
    assert {(abort.ranks, abort.groups, abort.cause) for abort in aborts} == {
        ((0,), ("0",), "rank 1 raised ValueError"),
        ((2,), ("a",), "rank 3 raised KeyError"),
    }


def test_a_dead_rank_ends_waits_as_one_that_raised_does():
    simulation = Simulation(0, 1)
    simulation.ranks[1] = RankEntry(1, RankState.DEAD, 1, loss="was killed by SIGKILL")
    simulation.cell.running.discard(1)
    simulation.report_wait(0, 5)
    simulation.check()
    assert of(act.SendAbort, simulation.check(RAISED)) == [act.SendAbort((0,), ("0",), "rank 1 was killed by SIGKILL")]


def test_finished_rank_causes_one_warning_and_no_abort():
    simulation = Simulation(0, finished=(1,))
    simulation.report_wait(0, 5)
    simulation.report(1, 4)
    assert of(act.NotifyUser, simulation.check()) == []
    assert of(act.NotifyUser, simulation.check(PERIODS.finished - 0.1)) == []
    (reported,) = of(act.NotifyUser, simulation.check(0.2))
    assert reported.cell == CELL
    assert "rank 0 waits in all_reduce #5 at line 2 for rank 1, which has finished this cell" in reported.text
    for _ in range(3):
        assert of(act.NotifyUser, simulation.check(PERIODS.finished)) == []
    assert not simulation.cell.aborted
    assert of(act.SendAbort, simulation.check(1000)) == []


def test_ranks_that_wait_for_the_same_one_in_the_same_place_are_reported_in_one_line():
    simulation = Simulation(0, 2, 3, finished=(1,))
    for rank in (0, 2):
        simulation.report_wait(rank, 5)
    simulation.report_wait(3, 5, "barrier")
    simulation.report(1, 4)
    simulation.check()
    reported = [item.text for item in of(act.NotifyUser, simulation.check(PERIODS.finished)) if "finished" in item.text]
    assert [text.partition(" for rank 1")[0] for text in reported] == [
        "ranks 0,2 wait in all_reduce #5 at line 2",
        "rank 3 waits in barrier #5 at line 2",
    ]


MISMATCH = "collective #5: rank 0 began all_reduce, rank 1 barrier, at line 2"


def test_waits_in_a_collective_that_does_not_match_are_aborted():
    simulation = Simulation(0, 1)
    simulation.report_wait(0, 5)
    simulation.report_wait(1, 5, "barrier")
    assert of(act.SendAbort, simulation.check()) == [], "torch may still refuse one of the calls"
    simulation.now += 1
    simulation.report_wait(0, 5)
    simulation.report_wait(1, 5, "barrier")
    assert of(act.SendAbort, simulation.check()) == [act.SendAbort((0, 1), ("0",), MISMATCH, mismatch=True)]
    assert simulation.cell.aborted


def test_mismatch_is_reported_at_the_last_reply_before_the_next_check():
    simulation = Simulation(0, 1)
    simulation.check()
    simulation.now += 1
    simulation.report_wait(0, 5)
    assert simulation.supervisor.react(0, simulation.ranks, simulation.cells) == []
    simulation.report_wait(1, 5, "barrier")
    assert of(act.SendAbort, simulation.supervisor.react(1, simulation.ranks, simulation.cells)) != []


def test_broken_connection_causes_a_request_to_all_ranks_and_immediate_mismatches():
    simulation = Simulation(0, 1)
    simulation.report_wait(0, 5)
    simulation.report_wait(1, 5, "barrier")
    report = simulation.supervisor._reports[1].report
    simulation.supervisor.record_groups(1, [msgspec.structs.replace(report.groups[0], broken=True)])
    assert simulation.supervisor.react(1, simulation.ranks, simulation.cells) == [act.RequestCollectives((0, 1))]
    assert simulation.supervisor.react(1, simulation.ranks, simulation.cells) == []
    assert of(act.SendAbort, simulation.supervisor.react(0, simulation.ranks, simulation.cells)) != []


def test_a_rank_that_has_finished_its_cell_is_compared_too():
    simulation = Simulation(1, finished=(0,))
    simulation.now += 1
    simulation.report_wait(0, 5)
    report = simulation.supervisor._reports[0].report.groups[0]
    simulation.supervisor.record_groups(0, [msgspec.structs.replace(report, pending=())])
    simulation.report_wait(1, 5, "barrier")
    (abort,) = of(act.SendAbort, simulation.check())
    assert abort.ranks == (1,)
    assert abort.cause == f"{MISMATCH}; rank 0 has already completed it: its result is wrong"


def test_mismatch_without_a_waiting_rank_is_reported_once_at_the_end_of_the_cell():
    simulation = Simulation(0, 1)
    simulation.now += 1
    for rank, op in enumerate(("all_reduce", "barrier")):
        simulation.report_wait(rank, 5, op)
        report = simulation.supervisor._reports[rank].report.groups[0]
        simulation.supervisor.record_groups(rank, [msgspec.structs.replace(report, pending=())])
    (reported,) = of(act.NotifyUser, simulation.check())
    assert reported.text == f"{MISMATCH}; ranks 0-1 have already completed it: their results are wrong\n"
    assert of(act.NotifyUser, simulation.check(1)) == []
    mismatch = simulation.supervisor.finished_mismatch(simulation.cell, 2)
    assert mismatch.text == MISMATCH
    assert simulation.supervisor.was_reported(mismatch)
    assert simulation.supervisor.finished_mismatch(simulation.cell, 2) is None, "an error of one cell only"


def test_numbers_of_a_group_that_was_formed_again_are_not_compared_with_those_before():
    simulation = Simulation(0, 1)
    simulation.now += 1
    simulation.report_wait(0, 5)
    simulation.report_wait(1, 5, "barrier")
    report = simulation.supervisor._reports[1].report.groups[0]
    simulation.supervisor.record_groups(1, [msgspec.structs.replace(report, generation=2)])
    assert of(act.SendAbort, simulation.check()) == []
    assert simulation.supervisor.finished_mismatch(simulation.cell, 2) is None


@pytest.mark.parametrize("found", ["while it ran", "at its end"])
def test_a_mismatch_of_an_earlier_cell_costs_the_next_one_nothing(found):
    simulation = Simulation(0, 1)
    simulation.now += 1
    simulation.report_wait(0, 5)
    simulation.report_wait(1, 5, "barrier")
    if found == "while it ran":
        assert of(act.SendAbort, simulation.check()) != []
    simulation.supervisor.finished_mismatch(simulation.cell, 2)
    # The operations are still queued on the devices: the ranks' last reports have them as pending.
    following = CellEntry(CELL + 1, (0, 1), state=CellState.RUNNING, running={0, 1})
    simulation.cells = {CELL + 1: following}
    for rank in simulation.ranks.values():
        rank.cell = CELL + 1
    actions = simulation.check()
    assert of(act.SendAbort, actions) == of(act.NotifyUser, actions) == []
    assert not following.aborted


def test_a_rank_that_was_not_selected_is_named_as_such():
    simulation = Simulation(0, 1)
    simulation.ranks[2] = RankEntry(2, RankState.IDLE, 1)
    simulation.report_wait(0, 5)
    simulation.report_wait(1, 5)
    simulation.check()
    (reported,) = of(act.NotifyUser, simulation.check(PERIODS.finished))
    assert "for rank 2, which was not selected for this cell (`%%distributed --ranks 0-1`)" in reported.text


def test_reports_of_an_earlier_cell_are_ignored():
    simulation = Simulation(0, failed={1: "raised ValueError"})
    simulation.report_wait(0, 5, cell=CELL - 1)
    simulation.check()
    assert of(act.SendAbort, simulation.check(RAISED)) == []


def test_rank_that_runs_another_cell_is_not_finished():
    simulation = Simulation(0, finished=(1,))
    simulation.ranks[1] = RankEntry(1, RankState.BUSY, 1, CELL + 1)
    simulation.cells[CELL + 1] = CellEntry(CELL + 1, (1,), state=CellState.RUNNING, running={1})
    simulation.report_wait(0, 5)
    simulation.check()
    assert of(act.NotifyUser, simulation.check(PERIODS.finished)) == []


def test_the_time_since_an_end_begins_again_with_the_next_cell():
    simulation = Simulation(0, finished=(1,))
    simulation.check()
    simulation.cells.clear()
    simulation.check(100)
    simulation.cells[CELL + 1] = CellEntry(CELL + 1, (0, 1), state=CellState.RUNNING, running={0}, answers={1: ""})
    simulation.ranks[0].cell = CELL + 1
    simulation.report_wait(0, 5)
    assert of(act.NotifyUser, simulation.check()) == []
    assert of(act.NotifyUser, simulation.check(PERIODS.finished)) != []


def test_running_cell_causes_requests_to_live_ranks_and_the_next_check():
    simulation = Simulation(0, 1)
    simulation.ranks[2] = RankEntry(2, RankState.DEAD, 1, loss="died")
    assert simulation.check() == [act.RequestCollectives((0, 1)), act.ScheduleCheck(CHECK_INTERVAL)]


def test_checks_are_more_frequent_once_some_ranks_have_ended():
    (next_check,) = of(act.ScheduleCheck, Simulation(0, finished=(1,)).check())
    assert next_check.seconds < CHECK_INTERVAL


@pytest.mark.parametrize("what", ["no cell", "an internal one", "one that waits"])
def test_idle_cluster_causes_no_requests_and_no_checks(what):
    simulation = Simulation(0, 1)
    if what == "no cell":
        simulation.cells.clear()
    elif what == "an internal one":
        simulation.cell.internal = True
    else:
        simulation.cell.state, simulation.cell.running = CellState.QUEUED, set()
    assert simulation.check() == []


def test_ranks_waiting_for_a_lost_rank_are_found_by_common_groups():
    simulation = Simulation(0, 1, 2)
    simulation.report_wait(0, 5)
    simulation.report(1, 5)
    assert simulation.supervisor.waiting_for({2}) == {0}
    assert simulation.supervisor.waiting_for({7}) == set()
    simulation.supervisor.forget(0)
    assert simulation.supervisor.waiting_for({2}) == set()


def test_a_receive_in_the_report_of_a_rank_that_does_not_answer_any_more_is_no_deadlock():
    simulation = Simulation(0, 1)

    def receive(rank: int) -> None:
        peer = 1 - rank
        simulation.report(
            rank, 0, CollectiveLaunch(number=0, op="recv", data="", peer=peer, seconds=simulation.now - 50.0)
        )

    # Rank 0 gets what it waits for and computes, in code that does not let it answer.
    simulation.now += 2.1
    receive(0)
    simulation.report(1, 0)
    assert of(act.NotifyUser, simulation.check()) == []
    for _ in range(6):
        simulation.now += CHECK_INTERVAL
        receive(1)
    assert of(act.NotifyUser, simulation.check()) == []
    receive(0)
    (warning,) = of(act.NotifyUser, simulation.check())
    assert "wait for one another" in warning.text
