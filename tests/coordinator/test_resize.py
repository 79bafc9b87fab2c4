"""Test what a resize refuses, which variables it lists, and how it describes its result."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rankbook import Cluster, InvalidArgument, RankLostError, StartError
from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.recovery import Healed
from rankbook.coordinator.resize import (
    Resized,
    check_room,
    describe_failure,
    find_differing,
    forget_handovers,
    keep_devices,
    plan_resize,
    read_pending,
    shrunk_devices,
    store_pending,
)
from rankbook.coordinator.state_machine import ClusterState
from rankbook.coordinator.states import RankState
from rankbook.errors import IllegalTransition


def answer(**changes: Any) -> dict[str, Any]:
    check = {"problem": "", "size": 10, "digests": {}, "groups": [], "meshes": (), "every": 0, "steps": 3}
    return {**check, "random": b"r", "sharing": 1, **changes}


def test_variables_differ_that_another_rank_has_otherwise_or_not_at_all():
    digests = {0: {"a": "1", "b": "1", "c": "1"}, 1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "1", "d": "1"}}
    assert find_differing(digests) == {"b": (0, 1, 2), "c": (0,), "d": (2,)}


def test_a_problem_of_one_rank_refuses_the_resize():
    with pytest.raises(InvalidArgument, match="cannot resize to 3 ranks: 3 % 2 = 1; nothing has changed"):
        plan_resize({0: answer(), 1: answer(problem="3 % 2 = 1")}, 3)
    with pytest.raises(InvalidArgument, match="the ranks have prepared different models"):
        plan_resize({0: answer(), 1: answer(meshes=(("cpu", (("dp_shard", 3),)),))}, 3)


def test_the_plan_adds_up_the_bytes_and_compares_the_random_states():
    plan = plan_resize({0: answer(groups=["g"]), 1: answer(random=b"s", size=5, groups=["g", "mesh"])}, 3)
    assert (plan.former, plan.world_size, plan.size, plan.step) == (2, 3, 15, 3)
    assert plan.groups == ("g", "mesh")
    assert not plan.same_random


def test_the_plan_compares_variables_without_groups_and_protects_as_the_ranks_that_are_protected():
    ranks = {0: answer(groups=["group"]), 1: answer(every=5, digests={"group": "", "own": ""})}  # rank 0 was restarted
    plan = plan_resize(ranks, 3)
    assert (plan.every, plan.differing) == (5, {"own": (1,)})


@pytest.mark.parametrize(
    ("randoms", "sharing", "rank", "expected"),
    [
        ((b"r", b"r"), 1, 2, (b"r", None)),
        ((b"r", b"s"), 1, 2, (b"r", 2)),
        # Ranks that read the same batches drop the same activations.
        ((b"r", b"s"), 2, 2, (b"r", 1)),
        ((b"r", b"s"), 2, 3, (b"r", 1)),
    ],
)
def test_random_numbers_of_a_new_rank(randoms, sharing, rank, expected):
    checks = {number: answer(random=state, sharing=sharing) for number, state in enumerate(randoms)}
    plan = plan_resize(checks, 4)
    message = plan.make_enter(rank, 1, is_new=True)(7)
    assert (message.random, message.seeded) == expected
    assert plan.make_enter(0, 1, is_new=False)(7).random == b""


def test_too_little_shared_memory_is_refused_with_the_arithmetic(tmp_path):
    with pytest.raises(InvalidArgument, match=r"a resize needs .* of shared memory .* free, .* nothing has changed"):
        check_room(tmp_path, 1 << 60)
    check_room(tmp_path, 0)


def test_shards_of_a_resize_that_has_not_begun_are_removed_and_the_plan_is_not(tmp_path):
    (tmp_path / "resize-7-1" / "state").mkdir(parents=True)
    (tmp_path / "resize-pending").touch()
    forget_handovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["resize-pending"]


@pytest.mark.parametrize(
    ("dead", "expected"), [([0], ("3", "1", "2")), ([3], ("0", "1", "2")), ([0, 3], ("2", "1")), ([1, 2], ("0", "3"))]
)
def test_the_highest_ranks_give_their_devices_to_the_numbers_of_dead_ones(dead, expected):
    assert shrunk_devices(("0", "1", "2", "3"), dead) == expected


@pytest.mark.parametrize(
    ("assigned", "current", "staying", "expected"),
    [
        (("0", "1", "2"), ("0", "1"), (0, 1), ("0", "1", "2")),
        (("0", "1", "2", "3"), ("0", "3", "2"), (0, 1, 2), ("0", "3", "2", "1")),  # after `heal --shrink`
        (("0", "1"), ("0", "3", "2"), (0, 1), ("0", "3")),
        (("0", "1", "2"), ("0", "1"), (0,), ("0", "1", "2")),  # rank 1 has died meanwhile
        (("0", "1", "0", "1"), ("0", "1", "0"), (0, 1, 2), ("0", "1", "0", "1")),
    ],
)
def test_ranks_that_stay_keep_their_devices(assigned, current, staying, expected):
    assert keep_devices(assigned, current, staying) == expected


def test_description_of_a_resize():
    healed = Healed((2,), 0, variables=3, imports=1, missing={"lock": "cannot be pickled"})
    grown = Resized(
        2, 3, step=5, healed=healed, differing={"mine": (0, 1), "lock": (0,)}, groups=("mesh",), replaced=(1,)
    )
    assert str(grown).splitlines() == [
        "from 2 to 3 ranks at step 5",
        "rank 2 is new, with the state of rank 0: 3 variables, 1 import",
        "rank 1 died meanwhile and was replaced",
        "variables that differ by rank:",
        "  mine: kept on ranks 0-1, as on rank 0 on rank 2",
        "  lock: kept on rank 0, missing on rank 2",
        "of 2 ranks, to be made again: mesh",
        "not copied:",
        "  lock: cannot be pickled",
    ]
    assert str(Resized(3, 1, differing={"mine": (0, 1, 2)})).splitlines() == [
        "from 3 to 1 rank",
        "ranks 1-2 have left",
        "variables that differ by rank:",
        "  mine: kept on rank 0, gone with ranks 1-2",
    ]
    assert str(Resized(1, 2, notes=("the loader starts epoch 1 anew",))).splitlines() == [
        "from 1 to 2 ranks",
        "the loader starts epoch 1 anew",
    ]
    assert str(Resized(2, 2)) == "there are 2 ranks already"
    assert str(Resized(3, 2, unprotected="protection needs 2 GB")).splitlines()[-1] == (
        "the training state is not protected any more: protection needs 2 GB"
    )


def test_a_resize_that_has_not_ended_is_completed_by_heal_unless_no_rank_is_left_that_stays():
    pending = replace(plan_resize({0: answer(), 1: answer()}, 1), staying=(0,))
    error = RankLostError("rank 0 was killed", (0,))
    assert "%distributed heal completes it: nothing is lost" in describe_failure(pending, error, (0,))
    failure = describe_failure(pending, error, ())
    assert "no rank with variables to copy is left: stop the ranks with %distributed stop" in failure
    assert "nothing is lost" not in failure


@pytest.mark.parametrize(("restarted", "staying"), [((1,), (0,)), ((0, 1, 2), (0, 1)), ((2,), (0, 1))])
def test_a_rank_that_was_restarted_before_a_resize_is_completed_has_not_stayed(tmp_path, restarted, staying):
    def launch(ranks: tuple[int, ...], *, timeout: float) -> None:
        assert timeout
        state.handle(ev.LaunchRanks(ranks))
        raise StartError("rank 2 is dead")

    state = started(3)
    cluster = object.__new__(Cluster)
    vars(cluster).update(_state=state, _all_ranks=(0, 1, 2), _processes=SimpleNamespace(launch=launch))
    pending = replace(plan_resize({0: answer(), 1: answer()}, 3), staying=(0, 1))
    store_pending(tmp_path, pending)
    vars(cluster).update(_pending=pending, _segments=SimpleNamespace(folder=tmp_path))
    with pytest.raises(StartError):
        cluster.restart(restarted)
    assert cluster._pending.staying == read_pending(tmp_path).staying == staying


# The state machine ------------------------------------------------------------------------------------------------


def started(count: int) -> ClusterState:
    state = ClusterState(count)
    state.handle(ev.LaunchRanks(tuple(range(count))))
    for rank in range(count):
        state.handle(ev.RankConnected(rank, 1))
    end_regroup(state)
    return state


def end_regroup(state: ClusterState) -> None:
    [cell] = [cell for cell in state.cells.values() if cell.internal]
    for rank in cell.ranks:
        state.handle(ev.CellDone(rank, state.ranks[rank].incarnation, cell.cell))


def test_ranks_leave_and_the_others_form_new_groups():
    state = started(3)
    actions = state.handle(ev.RemoveRanks((2,)))
    assert act.Kill(2, 1, idle=True) in actions
    with pytest.raises(IllegalTransition):
        state.handle(ev.ResizeWorld(2))
    state.handle(ev.RankGone(2, 1, "exited"))
    actions = state.handle(ev.ResizeWorld(2))
    assert list(state.ranks) == [0, 1]
    assert actions[0] == act.ReplaceRanks()
    assert [action.anew for action in actions if isinstance(action, act.FormGroup)] == [True]
    end_regroup(state)
    assert state.grouped
    # A later regroup keeps the groups.
    state.handle(ev.RankGone(1, 1, "was killed"))
    state.handle(ev.LaunchRanks((1,)))
    actions = state.handle(ev.RankConnected(1, 2))
    assert [action.anew for action in actions if isinstance(action, act.FormGroup)] == [False]


def test_a_new_rank_does_not_reuse_the_incarnation_of_a_former_one():
    state = started(2)
    state.handle(ev.RemoveRanks((1,)))
    state.handle(ev.RankGone(1, 1, "exited"))
    state.handle(ev.ResizeWorld(1))
    end_regroup(state)
    state.handle(ev.ResizeWorld(3))
    assert [rank.state for rank in state.ranks.values()] == [RankState.IDLE, RankState.ABSENT, RankState.ABSENT]
    actions = state.handle(ev.LaunchRanks((1, 2)))
    assert actions == [act.Fork(1, 2), act.Fork(2, 1)]
    state.handle(ev.RankConnected(1, 2))
    actions = state.handle(ev.RankConnected(2, 1))
    assert [action.anew for action in actions if isinstance(action, act.FormGroup)] == [True]


def test_groups_are_left_again_if_forming_them_has_failed():
    state = started(2)
    actions = state.handle(ev.ResizeWorld(2))
    [regroup] = [action for action in actions if isinstance(action, act.FormGroup)]
    state.handle(ev.CellDone(0, 1, regroup.cell, failed=True, reason="a rank died"))
    state.handle(ev.RankGone(1, 1, "was killed"))
    state.handle(ev.LaunchRanks((1,)))
    actions = state.handle(ev.RankConnected(1, 2))
    assert [action.anew for action in actions if isinstance(action, act.FormGroup)] == [True]
