"""Test the state machine without a process, a socket or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.deadlock import CHECK_AFTER_DONE, CHECK_INTERVAL, CollectiveReport
from rankbook.coordinator.state_machine import (
    CELL_TABLE,
    RANK_TABLE,
    CellState,
    CellStep,
    ClusterState,
    RankState,
    RankStep,
)
from rankbook.coordinator.states import choose_donor
from rankbook.errors import IllegalTransition
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members
from rankbook.snapshot_files import TrainingPlace


def only(actions: list[act.Action], kind: type) -> list[act.Action]:
    return [action for action in actions if isinstance(action, kind)]


def decided(actions: list[act.Action]) -> list[act.Action]:
    """Return the actions without those that only query ranks."""
    return [action for action in actions if not isinstance(action, (act.ScheduleCheck, act.RequestCollectives))]


def started(world_size: int) -> ClusterState:
    """Return a cluster whose ranks are idle and in one group."""
    state = ClusterState(world_size)
    state.handle(ev.LaunchRanks(tuple(range(world_size))))
    actions: list[act.Action] = []
    for rank in range(world_size):
        actions = state.handle(ev.RankConnected(rank, 1))
    (regroup,) = only(actions, act.FormGroup)
    for rank in range(world_size):
        state.handle(ev.CellDone(rank, 1, regroup.cell))
    assert all(rank.state is RankState.IDLE for rank in state.ranks.values())
    return state


def submit(state: ClusterState, *ranks: int) -> tuple[int, list[act.Action]]:
    cell = state.new_cell()
    return cell, state.handle(ev.Submit(cell, ranks))


def test_ranks_are_forked_then_grouped_once_all_said_ready():
    state = ClusterState(2)
    assert decided(state.handle(ev.LaunchRanks((0, 1)))) == [act.Fork(0, 1), act.Fork(1, 1)]
    assert decided(state.handle(ev.RankConnected(0, 1))) == []
    regroup, task = state.handle(ev.RankConnected(1, 1))
    assert regroup == act.FormGroup(cell=1, generation=1)
    assert task == act.SendTask(1, (0, 1))


def test_a_cell_submitted_while_ranks_start_runs_after_the_group_is_formed():
    state = ClusterState(1)
    state.handle(ev.LaunchRanks((0,)))
    cell, actions = submit(state, 0)
    assert decided(actions) == [act.NotifyQueued(cell, (0,))]
    regroup, task = state.handle(ev.RankConnected(0, 1))
    assert task == act.SendTask(regroup.cell, (0,))
    assert decided(state.handle(ev.CellDone(0, 1, regroup.cell)))[-1] == act.SendTask(cell, (0,))


def test_a_cell_ends_when_its_last_rank_is_done():
    state = started(2)
    cell, actions = submit(state, 0, 1)
    assert decided(actions) == [act.SendTask(cell, (0, 1))]
    assert decided(state.handle(ev.CellDone(1, 1, cell))) == []
    assert decided(state.handle(ev.CellDone(0, 1, cell))) == [act.EndCell(cell, (), interrupted=False)]


def test_cells_for_busy_ranks_wait_in_order_and_others_pass():
    state = started(3)
    first, _ = submit(state, 0)
    second, actions = submit(state, 0, 1)
    assert decided(actions) == [act.NotifyQueued(second, (0,))]
    third, actions = submit(state, 1)
    assert decided(actions) == [act.NotifyQueued(third, ())], "rank 1 is idle, but a cell before this wants it"
    fourth, actions = submit(state, 2)
    assert decided(actions) == [act.SendTask(fourth, (2,))]
    assert decided(state.handle(ev.CellDone(0, 1, first)))[-1] == act.SendTask(second, (0, 1))
    state.handle(ev.CellDone(0, 1, second))
    assert decided(state.handle(ev.CellDone(1, 1, second)))[-1] == act.SendTask(third, (1,))


def test_death_fails_the_cell_interrupts_the_others_and_releases_the_notebook():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    actions = state.handle(ev.RankGone(2, 1, "was killed by SIGKILL"))
    assert actions[0] == act.NotifyRankLost(2, "was killed by SIGKILL", cell, expected=False)
    assert [action.step for action in only(actions, act.StartTimer)] == ["interrupt", "abort", "release"]
    assert decided(state.handle(ev.TimerFired(cell, "interrupt"))) == [act.SendInterrupt(cell, (0, 1))]
    state.handle(ev.CellDone(0, 1, cell))
    assert decided(state.handle(ev.TimerFired(cell, "release"))) == [act.EndCell(cell, (1,), interrupted=False)]
    assert state.ranks[0].state is RankState.IDLE
    assert state.ranks[1].state is RankState.BUSY
    assert decided(state.handle(ev.CellDone(1, 1, cell))) == []
    assert state.ranks[1].state is RankState.IDLE


def test_a_dead_rank_is_unavailable_and_comes_back_in_a_new_group():
    state = started(2)
    state.handle(ev.RankGone(1, 1, "exited with code 3"))
    assert set(state.unavailable((0, 1))) == {1}
    assert not state.grouped
    assert decided(state.handle(ev.LaunchRanks((1,)))) == [act.Fork(1, 2)]
    actions = state.handle(ev.RankConnected(1, 2))
    assert only(actions, act.FormGroup)[0].generation == 2
    assert state.unavailable((0, 1)) == {}


def test_messages_of_an_earlier_incarnation_change_nothing():
    state = started(1)
    state.handle(ev.RankGone(0, 1, "died"))
    state.handle(ev.LaunchRanks((0,)))
    assert decided(state.handle(ev.RankGone(0, 1, "died"))) == []
    assert decided(state.handle(ev.RankConnected(0, 1))) == []
    assert state.ranks[0].state is RankState.STARTING


def test_restarting_a_busy_rank_kills_it_fails_its_cell_and_forks_again():
    state = started(2)
    cell, _ = submit(state, 1)
    assert decided(state.handle(ev.LaunchRanks((1,)))) == [act.Kill(1, 1, idle=False)]
    actions = state.handle(ev.RankGone(1, 1, "was killed by SIGKILL"))
    assert actions[0] == act.NotifyRankLost(1, "was restarted", cell, expected=True)
    assert only(actions, act.EndCell) == [act.EndCell(cell, (), interrupted=False)]
    assert actions[-1] == act.Fork(1, 2)


def test_rank_waiting_for_a_restarted_rank_is_aborted_with_the_reason():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    state.handle(waits(0, cell, (0, 1)))
    state.handle(ev.LaunchRanks((1,)))
    state.handle(ev.RankGone(1, 1, "was killed by SIGKILL"))
    nudged = state.handle(ev.TimerFired(cell, "interrupt"))
    assert only(nudged, act.SendAbort) == [act.SendAbort((0,), (), "rank 1 was restarted")]
    assert only(nudged, act.SendInterrupt) == [act.SendInterrupt(cell, (2,))]
    (aborted,) = only(state.handle(ev.TimerFired(cell, "abort")), act.SendAbort)
    assert (aborted.ranks, aborted.cause) == ((0, 2), "rank 1 was restarted")


def test_a_queued_cell_survives_the_restart_of_its_rank():
    state = started(1)
    first, _ = submit(state, 0)
    second, _ = submit(state, 0)
    state.handle(ev.LaunchRanks((0,)))
    state.handle(ev.RankGone(0, 1, "restarted"))
    actions = state.handle(ev.RankConnected(0, 2))
    regroup = only(actions, act.FormGroup)[0].cell
    assert decided(state.handle(ev.CellDone(0, 2, regroup)))[-1] == act.SendTask(second, (0,))
    assert first not in state.cells


def test_a_queued_cell_fails_when_its_rank_dies():
    state = started(1)
    submit(state, 0)
    second, _ = submit(state, 0)
    actions = state.handle(ev.RankGone(0, 1, "died"))
    assert act.EndCell(second, (), interrupted=False) in actions


def test_an_answer_for_a_cell_that_the_rank_does_not_run_changes_nothing():
    state = started(1)
    first, _ = submit(state, 0)
    state.handle(ev.CellDone(0, 1, first))
    assert state.handle(ev.CellDone(0, 1, first)) == []
    second, _ = submit(state, 0)
    assert state.handle(ev.CellDone(0, 1, first)) == []
    assert (state.ranks[0].state, state.ranks[0].cell) == (RankState.BUSY, second)


def test_interrupt_reaches_the_ranks_that_still_run():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    state.handle(ev.CellDone(1, 1, cell))
    actions = state.handle(ev.InterruptCell(cell))
    assert actions[0] == act.SendInterrupt(cell, (0, 2))
    assert actions[-1].step == "release"


def test_a_second_interrupt_gives_control_back_at_once():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.InterruptCell(cell))
    actions = state.handle(ev.InterruptCell(cell))
    assert act.EndCell(cell, (0, 1), interrupted=True) in actions
    assert decided(state.handle(ev.InterruptCell(cell))) == [act.SendInterrupt(cell, (0, 1))], (
        "stragglers are told again"
    )


def test_interrupting_a_queued_cell_drops_it():
    state = started(1)
    submit(state, 0)
    second, _ = submit(state, 0)
    assert decided(state.handle(ev.InterruptCell(second))) == [act.EndCell(second, (), interrupted=True)]


def test_release_timer_does_not_end_a_slow_cell():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    assert decided(state.handle(ev.TimerFired(cell, "release"))) == []


def test_stop_ends_every_cell_and_kills_every_rank():
    state = started(2)
    first, _ = submit(state, 0)
    second, _ = submit(state, 0)
    actions = state.handle(ev.Stop())
    assert {action.cell for action in only(actions, act.EndCell)} == {first, second}
    assert only(actions, act.Kill) == [act.Kill(0, 1, idle=False), act.Kill(1, 1, idle=True)]
    state.handle(ev.RankGone(0, 1, "killed"))
    state.handle(ev.RankGone(1, 1, "killed"))
    assert all(rank.state is RankState.ABSENT for rank in state.ranks.values())
    assert decided(state.handle(ev.Stop())) == []


def test_illegal_transition_reports_the_event_history():
    state = started(1)
    history = r"rank 0 is IDLE and does not accept HELLO\n(.|\n)*RankConnected\(rank=0, incarnation=1\)"
    with pytest.raises(IllegalTransition, match=history):
        state.handle(ev.RankConnected(0, 1))


def test_every_state_is_in_its_table_and_every_target_is_a_state():
    assert set(RANK_TABLE) == set(RankState)
    assert set(CELL_TABLE) == set(CellState)
    assert {step for row in RANK_TABLE.values() for step in row} == set(RankStep)
    assert {step for row in CELL_TABLE.values() for step in row} == set(CellStep)


class Model:
    """Answers the machine's actions as ranks would, in whatever order the test draws, and watches its promises."""

    def __init__(self, world_size: int) -> None:
        self.state = ClusterState(world_size)
        self.tasks: dict[int, tuple[int, int]] = {}
        self.graces: list[tuple[int, bool]] = []
        self.alive: dict[int, int] = {}
        self.killed: set[int] = set()
        self.open: set[int] = set()
        self.perform(self.state.handle(ev.LaunchRanks(tuple(range(world_size)))))

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Fork(rank, incarnation):
                    assert rank not in self.alive
                    self.alive[rank] = incarnation
                    self.tasks[rank] = (0, incarnation)
                case act.Kill(rank, incarnation, _):
                    assert self.alive[rank] == incarnation
                    self.killed.add(rank)
                case act.SendTask(cell, ranks):
                    for rank in ranks:
                        assert rank not in self.tasks, "a rank runs one task at a time"
                        self.tasks[rank] = (cell, self.alive[rank])
                case act.StartTimer(cell, _, release):
                    self.graces.append((cell, release))
                case act.EndCell(cell):
                    assert cell in self.open or cell not in self.state.cells
                    self.open.discard(cell)
                case _:
                    pass

    def step(self, draw: st.DataObject) -> None:
        state = self.state
        choices = ["submit", "interrupt", "die", "restart"]
        choices += ["answer"] * 6 if self.tasks else []
        choices += ["grace"] if self.graces else []
        ranks = sorted(state.ranks)
        match draw.draw(st.sampled_from(choices)):
            case "submit":
                chosen = draw.draw(st.sets(st.sampled_from(ranks), min_size=1))
                if not state.unavailable(chosen):
                    cell = state.new_cell()
                    self.open.add(cell)
                    self.perform(state.handle(ev.Submit(cell, tuple(sorted(chosen)))))
            case "interrupt" if self.open:
                self.perform(state.handle(ev.InterruptCell(draw.draw(st.sampled_from(sorted(self.open))))))
            case "die" if self.alive:
                self.die(draw.draw(st.sampled_from(sorted(self.alive))))
            case "restart":
                self.perform(state.handle(ev.LaunchRanks((draw.draw(st.sampled_from(ranks)),))))
            case "answer":
                self.answer(draw.draw(st.sampled_from(sorted(self.tasks))))
            case "grace":
                self.perform(state.handle(ev.TimerFired(*self.graces.pop(0))))
            case _:
                pass

    def answer(self, rank: int) -> None:
        cell, incarnation = self.tasks.pop(rank)
        event = ev.RankConnected(rank, incarnation) if cell == 0 else ev.CellDone(rank, incarnation, cell)
        self.perform(self.state.handle(event))

    def die(self, rank: int) -> None:
        self.tasks.pop(rank, None)
        self.killed.discard(rank)
        self.perform(self.state.handle(ev.RankGone(rank, self.alive.pop(rank), "died")))

    def settle(self) -> None:
        for rank in sorted(self.killed):
            self.die(rank)
        for _ in range(1000):
            if self.killed:
                self.die(min(self.killed))
            elif self.tasks:
                self.answer(min(self.tasks))
            elif self.graces:
                self.perform(self.state.handle(ev.TimerFired(*self.graces.pop(0))))
            else:
                return
        pytest.fail("the machine never comes to rest")


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 60), st.data())
def test_random_events_end_every_cell_and_keep_rank_states_consistent(world_size, steps, data):
    model = Model(world_size)
    for _ in range(steps):
        model.step(data)
    model.settle()
    assert not model.open, "every cell has ended"
    for rank in model.state.ranks.values():
        expected = RankState.IDLE if rank.rank in model.alive else RankState.DEAD
        assert rank.state is expected
        assert rank.cell is None


# Collectives that are broken off, and the group that is formed anew


def grouping(state: ClusterState) -> list[int]:
    """The internal cells that wait or run."""
    return [cell.cell for cell in state.cells.values() if cell.internal]


def test_a_group_that_could_not_be_formed_is_formed_by_the_next_cell():
    state = started(2)
    state.handle(ev.RankGone(1, 1, "died"))
    state.handle(ev.LaunchRanks((1,)))
    (regroup,) = only(state.handle(ev.RankConnected(1, 2)), act.FormGroup)
    state.handle(ev.CellDone(0, 1, regroup.cell, failed=True, reason="timed out"))
    state.handle(ev.CellDone(1, 2, regroup.cell, failed=True, reason="timed out"))
    assert not state.grouped
    _, actions = submit(state, 0)
    (again,) = only(actions, act.FormGroup)
    assert again.generation == regroup.generation + 1
    assert only(actions, act.SendTask) == [act.SendTask(again.cell, (0, 1))], "the cell waits for its group"


def waits(rank: int, cell: int, ranks: tuple[int, ...], *, number: int = 1, at: float = 0.0) -> ev.CollectivesReceived:
    """The rank tells that it has begun a collective of these ranks, and that it has not ended."""
    pending = (CollectiveLaunch(number=number, op="all_reduce", data="", peer=None, seconds=0.0),) if number else ()
    report = GroupReport(name="0", members=encode_members(ranks), count=number, pending=pending, recent=pending)
    return ev.CollectivesReceived(
        rank, 1, CollectiveReport(Collectives(token=0, cell=cell, line=3, groups=(report,)), at)
    )


def test_only_the_first_reply_after_a_check_or_a_start_schedules_an_early_check():
    state = started(4)
    cell, _ = submit(state, 0, 1, 2)
    replies = [act.ScheduleCheck(CHECK_AFTER_DONE)], []
    for rank, expected in zip((2, 1), replies, strict=True):
        assert only(state.handle(ev.CellDone(rank, 1, cell)), act.ScheduleCheck) == expected
    # The start of a cell replaces a check that is due, so the next reply schedules one again.
    other, actions = submit(state, 1, 2, 3)
    assert only(actions, act.ScheduleCheck) == [act.ScheduleCheck(CHECK_INTERVAL)]
    assert only(state.handle(ev.CellDone(3, 1, other)), act.ScheduleCheck) == [act.ScheduleCheck(CHECK_AFTER_DONE)]
    state.handle(ev.CheckCollectives(1.0))
    assert only(state.handle(ev.CellDone(2, 1, other)), act.ScheduleCheck) == [act.ScheduleCheck(CHECK_AFTER_DONE)]


def test_a_wait_for_a_rank_that_raised_is_aborted_and_the_group_formed_again_before_the_next_cell():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    actions = state.handle(ev.CellDone(1, 1, cell, failed=True, reason="raised ValueError"))
    assert decided(actions) == []
    assert only(actions, act.ScheduleCheck), "somebody looks after those that still run"
    assert not only(actions, act.RequestCollectives), (
        "most are about to end too, and a cell shall not pay for a question"
    )
    actions = state.handle(ev.CheckCollectives(1.0))
    assert only(actions, act.RequestCollectives) == [act.RequestCollectives((0, 1))]
    state.handle(waits(0, cell, (0, 1)))
    assert decided(state.handle(ev.CheckCollectives(1.2))) == []
    assert decided(state.handle(ev.CheckCollectives(2.5))) == [act.SendAbort((0,), ("0",), "rank 1 raised ValueError")]
    actions = state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised CollectiveAborted", collectives=1))
    reported, ended, regroup, task = actions
    assert isinstance(reported, act.NotifyUser)
    assert ended == act.EndCell(cell, (), interrupted=False)
    assert regroup.generation == 2
    assert task == act.SendTask(regroup.cell, (0, 1))
    following, actions = submit(state, 0, 1)
    assert decided(actions) == [act.NotifyQueued(following, ())], "forming the group is nothing a person waits for"
    state.handle(ev.CellDone(0, 1, regroup.cell))
    assert act.SendTask(following, (0, 1)) in state.handle(ev.CellDone(1, 1, regroup.cell))


def test_successful_cell_does_not_regroup():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, collectives=5))
    assert decided(state.handle(ev.CellDone(1, 1, cell, collectives=5))) == [act.EndCell(cell, (), interrupted=False)]


def test_error_in_a_cell_without_collectives_does_not_regroup():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised ValueError"))
    state.handle(ev.CellDone(1, 1, cell))
    assert grouping(state) == []


def test_error_in_a_cell_with_collectives_regroups():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised ValueError", collectives=3))
    actions = state.handle(ev.CellDone(1, 1, cell, collectives=4))
    assert only(actions, act.FormGroup)


def test_the_group_is_formed_again_only_once_all_ranks_are_idle_and_a_straggler_holds_up_no_cell():
    state = started(3)
    other, _ = submit(state, 2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised ValueError", collectives=1))
    assert only(state.handle(ev.CellDone(1, 1, cell, collectives=1)), act.FormGroup) == []
    following, actions = submit(state, 0, 1)
    assert decided(actions) == [act.SendTask(following, (0, 1))]
    state.handle(ev.CellDone(0, 1, following))
    state.handle(ev.CellDone(1, 1, following))
    assert grouping(state) == []
    (regroup,) = only(state.handle(ev.CellDone(2, 1, other)), act.FormGroup)
    assert grouping(state) == [regroup.cell]


def test_collectives_of_a_straggler_after_its_cell_cause_a_regroup():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.InterruptCell(cell))
    state.handle(ev.CellDone(0, 1, cell))
    state.handle(ev.TimerFired(cell, "release"))
    assert grouping(state) == []
    assert only(
        state.handle(ev.CellDone(1, 1, cell, failed=True, reason="was interrupted", collectives=1)), act.FormGroup
    )


def test_the_group_is_formed_again_once():
    state = started(2)
    cell, _ = submit(state, 0)
    (regroup,) = only(state.handle(ev.CellDone(0, 1, cell, failed=True, reason="x", collectives=1)), act.FormGroup)
    for rank in (0, 1):
        state.handle(ev.CellDone(rank, 1, regroup.cell, collectives=7))
    assert (grouping(state), state.grouped) == ([], True)
    cell, _ = submit(state, 0)
    assert only(state.handle(ev.CellDone(0, 1, cell, collectives=1)), act.FormGroup) == []


def test_interrupt_aborts_collectives_that_are_pending_after_half_a_second():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    actions = state.handle(ev.InterruptCell(cell))
    assert actions == [
        act.SendInterrupt(cell, (0, 1, 2)),
        act.RequestCollectives((0, 1, 2)),
        act.StartTimer(cell, 0.5, "abort"),
        act.StartTimer(cell, 5.0, "release"),
    ]
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="was interrupted"))
    assert decided(state.handle(ev.TimerFired(cell, "abort"))) == [
        act.SendAbort((1, 2), (), "the cell was interrupted")
    ]
    state.handle(ev.CellDone(1, 1, cell, failed=True, reason="was interrupted", collectives=1))
    actions = state.handle(ev.CellDone(2, 1, cell, failed=True, reason="was interrupted", collectives=1))
    assert only(actions, act.FormGroup)
    assert decided(state.handle(ev.TimerFired(cell, "release"))) == [], "it has ended"


def queued(count: int) -> tuple[GroupReport, ...]:
    """Return the group of ranks 0 and 1 after `count` collectives of a rank, of which its device has executed none."""
    launch = CollectiveLaunch(1, "all_reduce", "float32[2]", None, 0.1, on_device=True)
    pending = (launch,) if count else ()
    return (GroupReport(name="0", members=encode_members((0, 1)), count=count, pending=pending, recent=()),)


def interrupted_with(*counts: int) -> tuple[ClusterState, int]:
    """Return a cluster of two ranks, and its cell that was interrupted after so many collectives were queued."""
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.InterruptCell(cell))
    for rank, count in enumerate(counts):
        report = CollectiveReport(Collectives(1, cell, None, queued(count)), 0.1)
        state.handle(ev.CollectivesReceived(rank, 1, report))
    return state, cell


def test_an_interrupt_cuts_short_no_collectives_that_devices_will_execute():
    state, cell = interrupted_with(1, 1)
    actions = state.handle(ev.TimerFired(cell, "abort"))
    assert not only(actions, act.SendAbort)
    assert [action.text[:16] for action in only(actions, act.NotifyUser)] == ["ranks 0-1 wait u"]
    assert only(actions, act.StartTimer) == [act.StartTimer(cell, 0.5, "abort")]
    actions = state.handle(ev.TimerFired(cell, "abort"))
    assert not only(actions, act.NotifyUser), "once"
    # The device does not get on: the second interrupt, or one after the release, ends the wait.
    again = state.handle(ev.InterruptCell(cell))
    assert only(again, act.SendAbort) == [act.SendAbort((0, 1), (), "the cell was interrupted")]


def test_an_interrupt_after_the_release_ends_the_wait_for_devices():
    state, cell = interrupted_with(1, 1)
    state.handle(ev.TimerFired(cell, "abort"))
    state.handle(ev.TimerFired(cell, "release"))
    abort = act.SendAbort((0, 1), (), "the cell was interrupted")
    assert only(state.handle(ev.InterruptCell(cell)), act.SendAbort) == [abort]
    assert not only(state.handle(ev.InterruptCell(cell)), act.SendAbort)
    for rank in (0, 1):
        state.handle(ev.CellDone(rank, 1, cell, failed=True, reason="was interrupted"))
    assert grouping(state)


def test_an_interrupt_aborts_the_wait_for_a_collective_that_a_member_has_not_launched():
    state, cell = interrupted_with(1, 0)
    assert only(state.handle(ev.TimerFired(cell, "abort")), act.SendAbort) == [
        act.SendAbort((0, 1), (), "the cell was interrupted")
    ]


def test_aborted_collectives_cause_a_regroup_and_a_notice():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.InterruptCell(cell))
    state.handle(ev.TimerFired(cell, "abort"))
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="was interrupted"))
    reported, ended, regroup, _ = state.handle(ev.CellDone(1, 1, cell, failed=True, reason="was interrupted"))
    assert "re-formed" in reported.text
    assert ended == act.EndCell(cell, (), interrupted=True)
    assert isinstance(regroup, act.FormGroup)


def test_interrupt_that_all_ranks_handle_aborts_no_collectives():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.InterruptCell(cell))
    for rank in (0, 1):
        actions = state.handle(ev.CellDone(rank, 1, cell, failed=True, reason="was interrupted"))
    assert decided(actions) == [act.EndCell(cell, (), interrupted=True)]
    assert decided(state.handle(ev.TimerFired(cell, "abort"))) == []
    assert grouping(state) == []


def reduced(size: int, *, generation: int = 1) -> tuple[GroupReport, ...]:
    """Return the group of ranks 0 and 1 after one all_reduce of `size` elements."""
    launch = CollectiveLaunch(
        number=1, op="all_reduce", data=f"float32[{size}]", peer=None, seconds=1.0, code=size, digest=size
    )
    return (
        GroupReport(
            name="0", members=encode_members((0, 1)), count=1, pending=(), recent=(launch,), generation=generation
        ),
    )


def test_a_cell_whose_collectives_did_not_match_fails_although_no_rank_raised():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, collectives=1, groups=reduced(2)))
    reported, ended, regroup, _ = state.handle(ev.CellDone(1, 1, cell, collectives=1, groups=reduced(3)))
    assert reported.text.startswith("collectives did not match: the process group is re-formed")
    assert ended.mismatch == (
        "all_reduce #1: rank 0 gave float32[2], rank 1 float32[3]; "
        "ranks 0-1 have already completed it: their results are wrong"
    )
    for rank in (0, 1):
        state.handle(ev.CellDone(rank, 1, regroup.cell))
    cell, _ = submit(state, 0, 1)
    for rank in (0, 1):
        actions = state.handle(ev.CellDone(rank, 1, cell, collectives=1, groups=reduced(2, generation=2)))
    assert actions == [act.EndCell(cell, (), interrupted=False)]


def test_a_cell_that_fails_anyway_names_the_collective_that_did_not_match():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, collectives=1, groups=reduced(2)))
    actions = state.handle(
        ev.CellDone(1, 1, cell, failed=True, reason="raised AssertionError", collectives=1, groups=reduced(3))
    )
    (reported,) = only(actions, act.NotifyUser)
    assert "all_reduce #1: rank 0 gave float32[2], rank 1 float32[3]" in reported.text
    assert only(actions, act.EndCell) == [act.EndCell(cell, (), interrupted=False)]


@pytest.mark.parametrize(("collectives", "regroups"), [(1, 1), (0, 0)])
def test_an_interrupted_cell_with_collectives_regroups_even_if_no_rank_failed(collectives, regroups):
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.InterruptCell(cell))
    state.handle(ev.CellDone(0, 1, cell, collectives=collectives))
    actions = state.handle(ev.CellDone(1, 1, cell))
    assert len(only(actions, act.FormGroup)) == regroups


def test_death_is_reported_to_live_ranks_and_requests_their_collectives():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    actions = state.handle(ev.RankGone(2, 1, "was killed by SIGKILL"))
    assert only(actions, act.ScheduleLossReport)
    assert state.handle(ev.LossReportDue(1.0)) == [
        act.SendLosses((0, 1), ((2, "rank 2 was killed by SIGKILL"),)),
        act.RequestCollectives((0, 1)),
    ]
    assert [(item.cell, item.step) for item in only(actions, act.StartTimer)] == [
        (cell, "interrupt"),
        (cell, "abort"),
        (cell, "release"),
    ]


def test_deaths_that_were_received_together_are_reported_together():
    state = started(5)
    submit(state, 0, 1, 2, 3, 4)
    state.handle(ev.RankGone(2, 1, "was killed by SIGKILL"))
    state.handle(ev.RankGone(4, 1, "exited with code 1"))
    causes = ((2, "rank 2 was killed by SIGKILL"), (4, "rank 4 exited with code 1"))
    assert only(state.handle(ev.LossReportDue(1.0)), act.SendLosses) == [act.SendLosses((0, 1, 3), causes)]
    assert state.handle(ev.LossReportDue(1.01)) == []


def test_the_reports_of_collectives_that_follow_from_deaths_are_not_requested_without_a_pause():
    state = started(4)
    submit(state, 0, 1, 2, 3)
    state.handle(ev.RankGone(2, 1, "died"))
    assert only(state.handle(ev.LossReportDue(1.0)), act.RequestCollectives) == [act.RequestCollectives((0, 1, 3))]
    state.handle(ev.RankGone(3, 1, "died"))
    actions = state.handle(ev.LossReportDue(1.01))
    assert only(actions, act.SendLosses) == [act.SendLosses((0, 1), ((3, "rank 3 died"),))]
    assert only(actions, act.RequestCollectives) == []
    (check,) = only(actions, act.ScheduleCheck)
    assert 0 < check.seconds < state.grace.death_interrupt / 2
    now = 1.01 + check.seconds
    assert only(state.handle(ev.CheckCollectives(now)), act.RequestCollectives) == [act.RequestCollectives((0, 1))]
    state.handle(ev.RankGone(1, 1, "died"))
    actions = state.handle(ev.LossReportDue(now + 0.01))
    assert only(actions, act.SendLosses) and not only(actions, act.RequestCollectives), "the check has requested them"


def test_death_aborts_ranks_that_wait_for_the_dead_and_interrupts_the_others():
    state = started(4)
    cell, _ = submit(state, 0, 1, 2, 3)
    state.handle(ev.RankGone(3, 1, "died"))
    state.handle(waits(0, cell, (0, 3)))
    state.handle(waits(1, cell, (0, 1)))
    assert decided(state.handle(ev.TimerFired(cell, "interrupt"))) == [
        act.SendAbort((0,), (), "rank 3 died"),
        act.SendInterrupt(cell, (1, 2)),
    ]
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised CollectiveAborted", collectives=1))
    assert decided(state.handle(ev.TimerFired(cell, "abort"))) == [act.SendAbort((1, 2), (), "rank 3 died")]
    state.handle(ev.CellDone(1, 1, cell, failed=True, reason="was interrupted", collectives=1))
    assert decided(state.handle(ev.TimerFired(cell, "release"))) == [act.EndCell(cell, (2,), interrupted=False)]


def test_after_a_death_a_rank_with_no_pending_collective_is_interrupted_and_not_aborted():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    state.handle(ev.RankGone(2, 1, "died"))
    state.handle(waits(0, cell, (0, 2)))
    state.handle(waits(1, cell, (1, 2), number=0))
    assert decided(state.handle(ev.TimerFired(cell, "interrupt"))) == [
        act.SendAbort((0,), (), "rank 2 died"),
        act.SendInterrupt(cell, (1,)),
    ]


def test_death_causes_a_regroup_only_after_the_rank_has_restarted():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.RankGone(1, 1, "died"))
    state.handle(waits(0, cell, (0, 1)))
    state.handle(ev.TimerFired(cell, "interrupt"))
    actions = state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised CollectiveAborted", collectives=1))
    assert decided(actions) == [act.EndCell(cell, (), interrupted=False)]
    state.handle(ev.LaunchRanks((1,)))
    (regroup,) = only(state.handle(ev.RankConnected(1, 2)), act.FormGroup)
    for rank, incarnation in ((0, 1), (1, 2)):
        state.handle(ev.CellDone(rank, incarnation, regroup.cell))
    assert (grouping(state), state.grouped) == ([], True)


def test_the_end_of_an_attempt_does_not_undo_the_next_one():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(0, 1, cell, failed=True, reason="raised ValueError", collectives=1))
    (first,) = only(state.handle(ev.CellDone(1, 1, cell, collectives=1)), act.FormGroup)
    state.handle(ev.RankGone(1, 1, "died"))
    state.handle(ev.LaunchRanks((1,)))
    (second,) = only(state.handle(ev.RankConnected(1, 2)), act.FormGroup)
    state.handle(ev.CellDone(0, 1, first.cell, failed=True, reason="was interrupted"))
    for rank, incarnation in ((0, 1), (1, 2)):
        state.handle(ev.CellDone(rank, incarnation, second.cell))
    assert (grouping(state), state.grouped) == ([], True)


def test_ranks_that_wait_for_one_that_cannot_form_the_group_are_interrupted():
    state = started(3)
    state.handle(ev.RankGone(2, 1, "died"))
    state.handle(ev.LaunchRanks((2,)))
    (regroup,) = only(state.handle(ev.RankConnected(2, 2)), act.FormGroup)
    actions = state.handle(ev.CellDone(0, 1, regroup.cell, failed=True, reason="raised StartError"))
    assert [timer.step for timer in only(actions, act.StartTimer)] == ["interrupt", "abort", "release"]
    assert decided(state.handle(ev.TimerFired(regroup.cell, "interrupt"))) == [act.SendInterrupt(regroup.cell, (1, 2))]
    aborted = act.SendAbort((1, 2), (), "rank 0 raised StartError")
    assert decided(state.handle(ev.TimerFired(regroup.cell, "abort"))) == [aborted]
    state.handle(ev.CellDone(1, 1, regroup.cell, failed=True, reason="was interrupted"))
    actions = state.handle(ev.CellDone(2, 2, regroup.cell, failed=True, reason="was interrupted"))
    assert decided(actions) == [act.EndCell(regroup.cell, (), interrupted=False)]
    assert not state.grouped


def test_a_rank_that_dies_idle_ends_the_waits_of_the_others():
    state = started(3)
    cell, _ = submit(state, 0)
    state.handle(ev.RankGone(2, 1, "died"))
    state.handle(waits(0, cell, (0, 1, 2)))
    state.handle(ev.CheckCollectives(10.0))
    assert decided(state.handle(ev.CheckCollectives(11.5))) == [act.SendAbort((0,), ("0",), "rank 2 died")]


def test_messages_of_collectives_from_an_earlier_incarnation_change_nothing():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    state.handle(ev.CellDone(1, 1, cell, failed=True, reason="raised ValueError"))
    reported = waits(0, cell, (0, 1))
    state.handle(ev.CollectivesReceived(0, 0, reported.report))
    state.handle(ev.CheckCollectives(1.0))
    assert decided(state.handle(ev.CheckCollectives(3.0))) == []


def test_checks_end_with_the_last_cell():
    state = started(2)
    cell, actions = submit(state, 0)
    assert only(actions, act.ScheduleCheck)
    assert only(state.handle(ev.CheckCollectives(1.0)), act.ScheduleCheck)
    state.handle(ev.CellDone(0, 1, cell))
    assert state.handle(ev.CheckCollectives(2.0)) == []


def test_a_rank_that_was_launched_alone_is_empty_until_a_cell_succeeds_or_heal_restores_it():
    state = started(3)
    first = state.ranks[0].since
    for rank in (1, 2):
        state.handle(ev.RankGone(rank, 1, "died"))
    state.handle(ev.LaunchRanks((1, 2)))
    for rank in (1, 2):
        actions = state.handle(ev.RankConnected(rank, 2))
    (regroup,) = only(actions, act.FormGroup)
    for rank, incarnation in ((0, 1), (1, 2), (2, 2)):
        state.handle(ev.CellDone(rank, incarnation, regroup.cell))
    assert [rank.empty for rank in state.ranks.values()] == [False, True, True]
    pull = state.new_cell()
    state.handle(ev.Submit(pull, (1,), defines_variables=False))
    state.handle(ev.CellDone(1, 2, pull))
    failed, _ = submit(state, 1)
    state.handle(ev.CellDone(1, 2, failed, failed=True, reason="raised"))
    assert state.ranks[1].empty
    cell, _ = submit(state, 1)
    state.handle(ev.CellDone(1, 2, cell))
    assert not state.ranks[1].empty
    assert state.ranks[1].since > first
    state.handle(ev.StateRestored((2,), 0))
    assert not state.ranks[2].empty
    assert state.ranks[2].since == first


def test_a_failed_cell_that_has_left_the_ranks_at_different_steps_says_so():
    def fail(*places: TrainingPlace | None) -> list[str]:
        state = started(len(places))
        cell, _ = submit(state, *range(len(places)))
        actions: list[act.Action] = []
        for rank, place in enumerate(places):
            done = ev.CellDone(rank, 1, cell, failed=rank == 0, reason="raised ValueError", place=place)
            actions = state.handle(done)
        return [action.text for action in only(actions, act.NotifyUser)]

    ahead, behind = (TrainingPlace(step, {0: step}, 0, False, False, ()) for step in (5, 4))
    (text,) = fail(ahead, behind)
    assert "rank 0 is at step 5, rank 1 is at step 4" in text
    assert fail(ahead, ahead) == fail(ahead, None) == fail(None, None) == []


def test_a_rank_that_has_lost_its_device_is_no_donor_and_keeps_the_group_from_being_formed():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    failed = ev.CellDone(0, 1, cell, failed=True, reason="raised AcceleratorError", collectives=1, lost_device="assert")
    state.handle(failed)
    actions = state.handle(ev.CellDone(1, 1, cell, failed=True, reason="raised CollectiveAborted", collectives=1))
    assert not only(actions, act.FormGroup)
    assert not any("re-formed" in action.text for action in only(actions, act.NotifyUser))
    assert choose_donor(state.ranks.values()) == 1
    alone, actions = submit(state, 1)
    assert act.SendTask(alone, (1,)) in actions
    state.handle(ev.CellDone(1, 1, alone))
    state.handle(ev.LaunchRanks((0,)))
    state.handle(ev.RankGone(0, 1, "exited"))
    assert only(state.handle(ev.RankConnected(0, 2)), act.FormGroup)
    assert not state.ranks[0].lost_device
