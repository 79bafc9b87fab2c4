"""The state machine, without a process, a socket or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.state import (
    CELL_TABLE,
    RANK_TABLE,
    CellState,
    CellStep,
    ClusterState,
    RankState,
    RankStep,
)
from rankbook.errors import IllegalTransition


def only(actions: list[act.Action], kind: type) -> list[act.Action]:
    return [action for action in actions if isinstance(action, kind)]


def decided(actions: list[act.Action]) -> list[act.Action]:
    """Without those that only look and ask."""
    return [action for action in actions if not isinstance(action, (act.LookSoon, act.AskCollectives))]


def started(world_size: int) -> ClusterState:
    """A cluster whose ranks are idle and in one group."""
    state = ClusterState(world_size)
    state.handle(ev.Launch(tuple(range(world_size))))
    actions: list[act.Action] = []
    for rank in range(world_size):
        actions = state.handle(ev.SaidHello(rank, 1))
    (regroup,) = only(actions, act.Regroup)
    for rank in range(world_size):
        state.handle(ev.CellDone(rank, 1, regroup.cell))
    assert all(rank.state is RankState.IDLE for rank in state.ranks.values())
    return state


def submit(state: ClusterState, *ranks: int) -> tuple[int, list[act.Action]]:
    cell = state.new_cell()
    return cell, state.handle(ev.Submit(cell, ranks))


def test_ranks_are_forked_then_grouped_once_all_said_hello():
    state = ClusterState(2)
    assert decided(state.handle(ev.Launch((0, 1)))) == [act.Fork(0, 1), act.Fork(1, 1)]
    assert decided(state.handle(ev.SaidHello(0, 1))) == []
    regroup, task = state.handle(ev.SaidHello(1, 1))
    assert regroup == act.Regroup(cell=1, generation=1)
    assert task == act.SendTask(1, (0, 1))


def test_a_cell_submitted_while_ranks_start_runs_after_the_group_is_formed():
    state = ClusterState(1)
    state.handle(ev.Launch((0,)))
    cell, actions = submit(state, 0)
    assert decided(actions) == [act.TellQueued(cell, (0,))]
    regroup, task = state.handle(ev.SaidHello(0, 1))
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
    assert decided(actions) == [act.TellQueued(second, (0,))]
    third, actions = submit(state, 1)
    assert decided(actions) == [act.TellQueued(third, ())], "rank 1 is idle, but a cell before this wants it"
    fourth, actions = submit(state, 2)
    assert decided(actions) == [act.SendTask(fourth, (2,))]
    assert decided(state.handle(ev.CellDone(0, 1, first)))[-1] == act.SendTask(second, (0, 1))
    state.handle(ev.CellDone(0, 1, second))
    assert decided(state.handle(ev.CellDone(1, 1, second)))[-1] == act.SendTask(third, (1,))


def test_a_death_fails_the_cell_nudges_the_others_and_releases_the_notebook():
    state = started(3)
    cell, _ = submit(state, 0, 1, 2)
    actions = state.handle(ev.RankGone(2, 1, "was killed by signal 9"))
    assert actions[0] == act.TellLoss(2, "was killed by signal 9", cell, expected=False)
    assert [action.step for action in only(actions, act.SetGrace)] == ["nudge", "abort", "release"]
    assert decided(state.handle(ev.GraceOver(cell, "nudge"))) == [act.SendInterrupt(cell, (0, 1))]
    state.handle(ev.CellDone(0, 1, cell))
    assert decided(state.handle(ev.GraceOver(cell, "release"))) == [act.EndCell(cell, (1,), interrupted=False)]
    assert state.ranks[0].state is RankState.IDLE
    assert state.ranks[1].state is RankState.BUSY
    assert decided(state.handle(ev.CellDone(1, 1, cell))) == []
    assert state.ranks[1].state is RankState.IDLE


def test_a_dead_rank_is_unavailable_and_comes_back_in_a_new_group():
    state = started(2)
    state.handle(ev.RankGone(1, 1, "exited with code 3"))
    assert set(state.unavailable((0, 1))) == {1}
    assert not state.grouped
    assert decided(state.handle(ev.Launch((1,)))) == [act.Fork(1, 2)]
    actions = state.handle(ev.SaidHello(1, 2))
    assert only(actions, act.Regroup)[0].generation == 2
    assert state.unavailable((0, 1)) == {}


def test_news_of_an_earlier_incarnation_change_nothing():
    state = started(1)
    state.handle(ev.RankGone(0, 1, "died"))
    state.handle(ev.Launch((0,)))
    assert decided(state.handle(ev.RankGone(0, 1, "died"))) == []
    assert decided(state.handle(ev.SaidHello(0, 1))) == []
    assert state.ranks[0].state is RankState.STARTING


def test_restarting_a_busy_rank_kills_it_fails_its_cell_and_forks_again():
    state = started(2)
    cell, _ = submit(state, 1)
    assert decided(state.handle(ev.Launch((1,)))) == [act.Kill(1, 1, idle=False)]
    actions = state.handle(ev.RankGone(1, 1, "was killed by signal 9"))
    assert only(actions, act.EndCell) == [act.EndCell(cell, (), interrupted=False)]
    assert actions[-1] == act.Fork(1, 2)


def test_a_queued_cell_survives_the_restart_of_its_rank():
    state = started(1)
    first, _ = submit(state, 0)
    second, _ = submit(state, 0)
    state.handle(ev.Launch((0,)))
    state.handle(ev.RankGone(0, 1, "restarted"))
    actions = state.handle(ev.SaidHello(0, 2))
    regroup = only(actions, act.Regroup)[0].cell
    assert decided(state.handle(ev.CellDone(0, 2, regroup)))[-1] == act.SendTask(second, (0,))
    assert first not in state.cells


def test_a_queued_cell_fails_when_its_rank_dies():
    state = started(1)
    submit(state, 0)
    second, _ = submit(state, 0)
    actions = state.handle(ev.RankGone(0, 1, "died"))
    assert act.EndCell(second, (), interrupted=False) in actions


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


def test_a_slow_cell_is_left_alone():
    state = started(2)
    cell, _ = submit(state, 0, 1)
    assert decided(state.handle(ev.GraceOver(cell, "release"))) == []


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


def test_an_illegal_transition_tells_the_story():
    state = started(1)
    with pytest.raises(IllegalTransition, match=r"rank 0 is IDLE: no HELLO\n(.|\n)*SaidHello\(rank=0, incarnation=1\)"):
        state.handle(ev.SaidHello(0, 1))


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
        self.perform(self.state.handle(ev.Launch(tuple(range(world_size)))))

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
                case act.SetGrace(cell, _, release):
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
                self.perform(state.handle(ev.Launch((draw.draw(st.sampled_from(ranks)),))))
            case "answer":
                self.answer(draw.draw(st.sampled_from(sorted(self.tasks))))
            case "grace":
                self.perform(state.handle(ev.GraceOver(*self.graces.pop(0))))
            case _:
                pass

    def answer(self, rank: int) -> None:
        cell, incarnation = self.tasks.pop(rank)
        event = ev.SaidHello(rank, incarnation) if cell == 0 else ev.CellDone(rank, incarnation, cell)
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
                self.perform(self.state.handle(ev.GraceOver(*self.graces.pop(0))))
            else:
                return
        pytest.fail("the machine never comes to rest")


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 60), st.data())
def test_whatever_happens_every_cell_ends_and_no_rank_is_lost_track_of(world_size, steps, data):
    model = Model(world_size)
    for _ in range(steps):
        model.step(data)
    model.settle()
    assert not model.open, "every cell has ended"
    for rank in model.state.ranks.values():
        expected = RankState.IDLE if rank.rank in model.alive else RankState.DEAD
        assert rank.state is expected
        assert rank.cell is None
