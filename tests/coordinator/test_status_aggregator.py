"""The picture of all ranks, folded without a process."""

from __future__ import annotations

from rankbook.coordinator.monitor import RankView, StatusAggregator, stragglers_of
from rankbook.coordinator.states import RankState
from rankbook.protocol.queries import RankSample, StatusReply
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankPlacement

HOLDING = Holding("model", "model", "Net", parameters=3, bytes=12)
MEMORY = MemoryUse(total=100, parameters=12, gradients=0, optimizer=0, other=8, free=80, shared=1)


def view(rank, state=RankState.BUSY, *, incarnation=1, cell=3, task=7, **more):
    idle = state is not RankState.BUSY
    return RankView(rank, incarnation, state, 100 + rank, "cpu", None if idle else cell, None if idle else task, **more)


def looked(*, cell=7, waits_for="", waited=0.0, steps=None, at=0.0, version=1, holdings=(HOLDING,), saves=()):
    sample = RankSample("here", "a device", cell, 2, waits_for, waited, MEMORY, None, steps, at)
    return StatusReply(1, sample, version, holdings, saves)


def fold(board, views, now=1.0):
    return board.placement(views, now=now, wall=50.0).ranks


def told(board, views, answers, now=0.0):
    board.to_ask(views)
    for rank, answer in answers.items():
        board.asked(rank, now)
        board.told(rank, answer)


def test_a_rank_is_asked_once_until_it_answers_and_only_if_it_can():
    board = StatusAggregator("key")
    states = (RankState.IDLE, RankState.BUSY, RankState.STARTING, RankState.DEAD, RankState.LEAVING, RankState.ABSENT)
    views = [view(rank, state) for rank, state in enumerate(states)]
    assert board.to_ask(views) == {0: -1, 1: -1}
    board.asked(0, 0.0)
    board.asked(1, 0.0)
    assert board.owed()
    assert board.to_ask(views) == {} and not board.owed(), "it is about those that were to be asked last"
    board.told(0, looked(version=4))
    assert board.to_ask(views) == {0: 4}
    board.refused(1)
    assert not board.owed()


def test_what_a_rank_said_is_in_the_picture():
    board, views = StatusAggregator("key"), [view(0)]
    told(board, views, {0: looked()})
    picture = board.placement(views, now=1.0, wall=50.0)
    assert (picture.at, picture.cluster) == (50.0, "key")
    assert picture.ranks == (
        RankPlacement(
            rank=0,
            host="here",
            pid=100,
            device="cpu",
            device_name="a device",
            state="running",
            cell=3,
            line=2,
            memory=MEMORY,
            holdings=(HOLDING,),
        ),
    )


def test_holdings_stay_until_others_are_told():
    board, views = StatusAggregator("key"), [view(0)]
    told(board, views, {0: looked()})
    told(board, views, {0: looked(holdings=None)})
    assert fold(board, views)[0].holdings == (HOLDING,)
    told(board, views, {0: looked(holdings=(), version=2)})
    assert fold(board, views)[0].holdings == ()


def test_the_states_of_a_rank():
    board = StatusAggregator("key")
    views = [
        view(0, RankState.STARTING),
        view(1, RankState.IDLE),
        view(2),
        view(3),
        view(4),
        view(5, RankState.DEAD),
        view(6, RankState.ABSENT),
        view(7, RankState.LEAVING, returns=True),
        view(8, RankState.LEAVING),
    ]
    told(
        board,
        views,
        {
            1: looked(cell=None),
            2: looked(waits_for="all_reduce #41", waited=0.1),
            3: looked(waits_for="all_reduce #41", waited=0.3),
        },
    )
    board.asked(4, 0.0)
    assert [each.state for each in fold(board, views, now=1.4)][4] == "running"
    expected = ["starting", "idle", "running", "waiting", "unresponsive", "dead", "dead", "starting", "dead"]
    assert [each.state for each in fold(board, views, now=1.6)] == expected
    assert fold(board, views)[3].waits_for == "all_reduce #41"


def test_an_answer_about_an_earlier_cell_says_nothing_of_this_one():
    board, views = StatusAggregator("key"), [view(0)]
    told(board, views, {0: looked(cell=6, waits_for="barrier #2", waited=9.0)})
    assert [(each.state, each.line, each.waits_for) for each in fold(board, views)] == [("running", None, "")]


def test_a_dead_rank_holds_nothing_and_a_new_process_is_known_by_nothing():
    board, views = StatusAggregator("key"), [view(0)]
    told(board, views, {0: looked(steps=5)})
    dead = fold(board, [view(0, RankState.DEAD)])[0]
    assert (dead.state, dead.memory, dead.holdings, dead.cell) == ("dead", None, (), None)
    healed = [view(0, RankState.IDLE, incarnation=2)]
    assert board.to_ask(healed) == {0: -1}
    fresh = fold(board, healed)[0]
    assert (fresh.state, fresh.memory, fresh.steps, fresh.holdings) == ("idle", None, 0, ())


def test_the_rate_is_of_the_last_seconds_and_starts_anew_with_the_count():
    board, views = StatusAggregator("key"), [view(0)]
    for second in range(20):
        told(board, views, {0: looked(steps=second * 10 if second < 10 else 100 + second, at=float(second))})
    assert fold(board, views)[0].rate == 1.0
    told(board, views, {0: looked(steps=0, at=20.0)})
    assert fold(board, views)[0].rate is None


def row(rank, state="running", steps=0, rate=None, cell=3):
    return RankPlacement(rank, "h", 1, "cpu", "", state, cell=cell, steps=steps, rate=rate)


def test_the_one_that_all_others_wait_for_lags():
    assert stragglers_of([row(0, "waiting"), row(1, "waiting"), row(2)]) == {2}
    assert stragglers_of([row(0, "waiting"), row(1, "unresponsive")]) == {1}
    assert stragglers_of([row(0, "waiting"), row(1), row(2)]) == set()
    assert stragglers_of([row(0, "waiting"), row(1, "waiting")]) == set()
    assert stragglers_of([row(0), row(1, "dead", cell=None), row(2, "idle", cell=None)]) == set()
    assert stragglers_of([row(0, "waiting", cell=3), row(1, cell=4)]) == set()


def test_fewer_steps_lag_where_no_sampling_explains_them():
    assert stragglers_of([row(0, steps=100, rate=10.0), row(1, steps=100, rate=10.0), row(2, steps=90, rate=9.0)]) == {
        2
    }
    assert (
        stragglers_of([row(0, steps=100, rate=10.0), row(1, steps=100, rate=10.0), row(2, steps=97, rate=9.0)]) == set()
    )
    assert stragglers_of([row(0, steps=3, rate=0.1), row(1, steps=1, rate=0.1)]) == set()


def test_saves_are_told_by_rank():
    save = CheckpointSave("f", "step-1", 1, "writing", 1, 2, 0.5, None, True, "")
    board, views = StatusAggregator("key"), [view(0), view(1)]
    told(board, views, {1: looked(saves=(save,))})
    assert [(each.rank, each.save) for each in board.saves(views, wall=1.0).saves] == [(1, save)]
