"""Test how the replies of all ranks are folded into one state, without a process."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import msgspec
import pytest

from rankbook.coordinator.monitor import NormsMerger, RankView, StatusAggregator, rank_views, stragglers_of
from rankbook.coordinator.states import RankState
from rankbook.protocol.queries import GradientEntry, LocalGradients, ModelGradients, RankSample, StatusReply
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankPlacement

HOLDING = Holding("model", "model", "Net", parameters=3, bytes=12)
MEMORY = MemoryUse(total=100, parameters=12, gradients=0, optimizer=0, other=8, free=80, shared=1)


def view(rank, state=RankState.BUSY, *, incarnation=1, cell=3, task=7, **more):
    idle = state is not RankState.BUSY
    return RankView(rank, incarnation, state, 100 + rank, "cpu", None if idle else cell, None if idle else task, **more)


def status_reply(*, cell=7, waits_for="", waited=0.0, steps=None, at=0.0, version=1, holdings=(HOLDING,), saves=()):
    sample = RankSample("here", "a device", cell, 2, waits_for, waited, MEMORY, None, steps, at)
    return StatusReply(1, sample, version, holdings, saves)


def fold(aggregator, views, now=1.0):
    return aggregator.placement(views, now=now, wall=50.0).ranks


def handle_replies(aggregator, views, answers, now=0.0):
    aggregator.ranks_to_query(views)
    for rank, answer in answers.items():
        aggregator.mark_requested(rank, now)
        aggregator.handle_reply(rank, answer)


def test_a_rank_is_asked_once_until_it_answers_and_only_if_it_can():
    aggregator = StatusAggregator("key")
    states = (RankState.IDLE, RankState.BUSY, RankState.STARTING, RankState.DEAD, RankState.LEAVING, RankState.ABSENT)
    views = [view(rank, state) for rank, state in enumerate(states)]
    assert aggregator.ranks_to_query(views) == {0: -1, 1: -1}
    aggregator.mark_requested(0, 0.0)
    aggregator.mark_requested(1, 0.0)
    assert aggregator.awaits_reply()
    assert aggregator.ranks_to_query(views) == {} and not aggregator.awaits_reply(), (
        "it is about those that were to be asked last"
    )
    aggregator.handle_reply(0, status_reply(version=4))
    assert aggregator.ranks_to_query(views) == {0: 4}
    aggregator.mark_failed(1)
    assert not aggregator.awaits_reply()


def test_ranks_that_have_left_own_no_models_any_more():
    aggregator = StatusAggregator("key")
    handle_replies(aggregator, [view(0), view(1)], {rank: status_reply() for rank in (0, 1)})
    before = aggregator._owners()
    handle_replies(aggregator, [view(0)], {0: status_reply(version=2)})
    assert {name: [rank for rank in ranks if rank == 0] for name, ranks in before.items()} == aggregator._owners() != {}
    assert not aggregator.awaits_reply()


def test_replies_of_a_rank_appear_in_the_placement():
    aggregator, views = StatusAggregator("key"), [view(0)]
    handle_replies(aggregator, views, {0: status_reply()})
    picture = aggregator.placement(views, now=1.0, wall=50.0)
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


def test_holdings_stay_until_others_are_reported():
    aggregator, views = StatusAggregator("key"), [view(0)]
    handle_replies(aggregator, views, {0: status_reply()})
    handle_replies(aggregator, views, {0: status_reply(holdings=None)})
    assert fold(aggregator, views)[0].holdings == (HOLDING,)
    handle_replies(aggregator, views, {0: status_reply(holdings=(), version=2)})
    assert fold(aggregator, views)[0].holdings == ()


def test_a_rank_without_a_process_is_on_the_host_of_the_notebook():
    entry = SimpleNamespace(incarnation=1, state=RankState.DEAD, cell=None, refork=False)
    processes = SimpleNamespace(
        stopped=False,
        hosts=None,
        state=SimpleNamespace(ranks={0: entry}),
        assignment=SimpleNamespace(devices=("cpu",)),
    )
    assert fold(StatusAggregator("key"), rank_views(processes, None))[0].host == socket.gethostname()


def test_rank_states_are_reported_in_the_placement():
    aggregator = StatusAggregator("key")
    views = [
        view(0, RankState.STARTING),
        view(1, RankState.IDLE),
        view(2),
        view(3),
        view(4),
        view(5, RankState.DEAD),
        view(6, RankState.ABSENT),
        view(7, RankState.LEAVING, restarting=True),
        view(8, RankState.LEAVING),
    ]
    handle_replies(
        aggregator,
        views,
        {
            1: status_reply(cell=None),
            2: status_reply(waits_for="all_reduce #41", waited=0.1),
            3: status_reply(waits_for="all_reduce #41", waited=0.3),
        },
    )
    aggregator.mark_requested(4, 0.0)
    assert [element.state for element in fold(aggregator, views, now=1.4)][4] == "running"
    expected = ["starting", "idle", "running", "waiting", "unresponsive", "dead", "stopped", "starting", "stopped"]
    assert [item.state for item in fold(aggregator, views, now=1.6)] == expected
    assert fold(aggregator, views)[3].waits_for == "all_reduce #41"


def test_a_rank_that_prints_is_not_unresponsive_while_its_reply_takes_long():
    aggregator, views = StatusAggregator("key"), [view(0, last_received=9.5)]
    handle_replies(aggregator, views, {0: status_reply()})
    aggregator.mark_requested(0, 1.0)
    assert fold(aggregator, views, now=10.0)[0].state == "running"
    assert fold(aggregator, views, now=11.5)[0].state == "unresponsive"


def test_reply_about_an_earlier_cell_is_ignored():
    aggregator, views = StatusAggregator("key"), [view(0)]
    handle_replies(aggregator, views, {0: status_reply(cell=6, waits_for="barrier #2", waited=9.0)})
    assert [(item.state, item.line, item.waits_for) for item in fold(aggregator, views)] == [("running", None, "")]


def test_holdings_of_a_dead_rank_are_discarded():
    aggregator, views = StatusAggregator("key"), [view(0)]
    handle_replies(aggregator, views, {0: status_reply(steps=5)})
    dead = fold(aggregator, [view(0, RankState.DEAD)])[0]
    assert (dead.state, dead.memory, dead.holdings, dead.cell) == ("dead", None, (), None)
    healed = [view(0, RankState.IDLE, incarnation=2)]
    assert aggregator.ranks_to_query(healed) == {0: -1}
    fresh = fold(aggregator, healed)[0]
    assert (fresh.state, fresh.memory, fresh.steps, fresh.holdings) == ("idle", None, 0, ())


def test_the_rate_is_of_the_last_seconds_and_starts_again_with_the_count():
    aggregator, views = StatusAggregator("key"), [view(0)]
    for second in range(20):
        handle_replies(
            aggregator, views, {0: status_reply(steps=second * 10 if second < 10 else 100 + second, at=float(second))}
        )
    assert fold(aggregator, views)[0].rate == 1.0
    handle_replies(aggregator, views, {0: status_reply(steps=0, at=20.0)})
    assert fold(aggregator, views)[0].rate is None


def row(rank, state="running", steps=0, rate=None, cell=3):
    return RankPlacement(rank, "h", 1, "cpu", "", state, cell=cell, steps=steps, rate=rate)


def test_rank_that_all_others_wait_for_lags():
    assert stragglers_of([row(0, "waiting"), row(1, "waiting"), row(2)]) == {2}
    assert stragglers_of([row(0, "waiting"), row(1, "unresponsive")]) == {1}
    assert stragglers_of([row(0, "waiting"), row(1), row(2)]) == set()
    assert stragglers_of([row(0, "waiting"), row(1, "waiting")]) == set()
    assert stragglers_of([row(0), row(1, "dead", cell=None), row(2, "idle", cell=None)]) == set()
    assert stragglers_of([row(0, "waiting", cell=3), row(1, cell=4)]) == set()


def test_rank_with_fewer_steps_lags_unless_sampling_explains_it():
    assert stragglers_of([row(0, steps=100, rate=10.0), row(1, steps=100, rate=10.0), row(2, steps=90, rate=9.0)]) == {
        2
    }
    assert (
        stragglers_of([row(0, steps=100, rate=10.0), row(1, steps=100, rate=10.0), row(2, steps=97, rate=9.0)]) == set()
    )
    assert stragglers_of([row(0, steps=3, rate=0.1), row(1, steps=1, rate=0.1)]) == set()


def test_saves_are_reported_by_rank():
    save = CheckpointSave("f", "step-1", 1, "writing", 1, 2, 0.5, None, True, "")
    aggregator, views = StatusAggregator("key"), [view(0), view(1)]
    handle_replies(aggregator, views, {1: status_reply(saves=(save,))})
    assert [(item.rank, item.save) for item in aggregator.saves(views, wall=1.0).saves] == [(1, save)]


@pytest.mark.parametrize("state", [RankState.DEAD, RankState.ABSENT])
def test_a_rank_that_has_ended_writes_no_save_any_more(state):
    phases = ("planning", "staging", "writing", "committing", "done", "failed")
    saves = [CheckpointSave("f", phase, 1, phase, 1, 2, 0.5, 9.0, True, "") for phase in phases]
    aggregator = StatusAggregator("key")
    handle_replies(aggregator, [view(0)], {0: status_reply(saves=saves)})

    def names(state):
        return tuple(item.save.name for item in aggregator.saves([view(0, state)], wall=1.0).saves)

    assert names(RankState.LEAVING) == phases, "it may finish them before it exits"
    assert names(state) == ("done", "failed")


def local_norms(step, norm, place="", module="fc", missing=()):
    entries = (
        GradientEntry(module, place, norm, 0.0, 4),
        *(GradientEntry(name, place, None, 0.0, 4) for name in missing),
    )
    return ModelGradients("model", step, LocalGradients(entries))


def test_gradients_of_one_step_are_merged_when_all_ranks_have_sent_them():
    merger, owners = NormsMerger(), {"model": [0, 1]}
    merger.add(0, [local_norms(8, 3.0, "Shard(0) 0")], owners)
    merger.add(1, [local_norms(4, 9.0, "Shard(0) 1")], owners)
    assert merger.norms(owners) == ()
    merger.add(1, [local_norms(8, 4.0, "Shard(0) 1", missing=["head"])], owners)
    (norms,) = merger.norms(owners)
    assert (norms.step, norms.norm, norms.note) == (8, 5.0, "")
    assert norms.modules == (("fc", 5.0), ("head", None))
    assert merger.norms({"other": [0]}) == ()


def test_replicas_count_once_and_a_difference_is_noted():
    merger, owners = NormsMerger(), {"model": [0, 1]}
    merger.add(0, [local_norms(2, 3.0)], owners)
    merger.add(1, [local_norms(2, 3.5)], owners)
    (norms,) = merger.norms(owners)
    assert norms.norm == 3.0 and norms.note.startswith("fc: differs between replicas: 3 on rank 0, 3.5 on rank 1")


def test_steps_that_are_not_counted_are_not_compared():
    merger, owners = NormsMerger(), {"model": [0, 1]}
    merger.add(0, [local_norms(0, 3.0)], owners)
    merger.add(1, [local_norms(0, 3.5)], owners)
    (norms,) = merger.norms(owners)
    assert norms.step is None and norms.note.startswith("the optimizer does not count its steps")


def test_the_norms_of_a_model_that_is_replaced_are_forgotten():
    merger, owners = NormsMerger(), {"model": [0]}
    merger.add(0, [local_norms(2, 3.0)], owners)
    assert merger.norms(owners)
    merger.add(0, [], owners)
    assert merger.norms(owners) == ()


def test_the_norms_of_a_model_that_no_rank_has_any_more_are_forgotten():
    merger, owners = NormsMerger(), {"model": [0]}
    merger.add(0, [local_norms(2, 3.0)], owners)
    assert merger.norms(owners)
    assert merger.norms({}) == ()
    assert merger.norms(owners) == (), "a new process has a model of this name"
    merger.add(0, [local_norms(1, 4.0)], owners)
    (norms,) = merger.norms(owners)
    assert (norms.step, norms.norm) == (1, 4.0)


def test_gradients_of_two_measurements_are_not_merged():
    merger, owners = NormsMerger(), {"model": [0, 1]}
    for rank in owners["model"]:
        merger.add(rank, [local_norms(None, 3.0)], owners)
    merger.add(1, [local_norms(None, 5.0)], owners)
    (norms,) = merger.norms(owners)
    assert (norms.norm, norms.note) == (3.0, ""), "rank 0 has not sent its part of the second one yet"
    merger.add(0, [local_norms(None, 5.0)], owners)
    (norms,) = merger.norms(owners)
    assert (norms.norm, norms.note) == (5.0, "")


def test_gradients_are_measured_at_a_power_of_two_of_steps_that_takes_some_seconds():
    aggregator, views = StatusAggregator("key"), [view(0)]
    handle_replies(aggregator, views, {0: status_reply(steps=0, at=0.0)})
    assert aggregator.norms_to_request(0) == (1, 0)
    handle_replies(aggregator, views, {0: status_reply(steps=50, at=1.0)})
    assert aggregator.norms_to_request(0) == (128, 0)  # 50 steps per second, and two seconds
    slow = msgspec.structs.replace(status_reply(steps=100, at=2.0), norms=(), norms_version=7, norms_seconds=0.1)
    handle_replies(aggregator, views, {0: slow})
    assert aggregator.norms_to_request(0) == (512, 7)  # a measurement takes 1 % of the time at most
