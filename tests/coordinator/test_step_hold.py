"""Test the choice of the step at whose end all ranks pause: pure code."""

from __future__ import annotations

from rankbook.coordinator.queries import Target, choose
from rankbook.protocol.queries import HoldReply


def training(steps: int | None, *, holds: bool = False, collectives: int | None = None, ends: int = 1) -> HoldReply:
    return HoldReply(1, holds, False, steps, collectives, ends)


def idle() -> HoldReply:
    return HoldReply(1, True, True, None, None, 0)


def test_idle_ranks_pause_where_they_are():
    assert choose({0: idle(), 1: idle()}, Target(), [0, 1]) is None


def test_a_step_is_named_that_no_rank_has_reached():
    assert choose({0: training(7), 1: training(8)}, Target(), []) == Target("steps", 9, 2)


def test_no_step_is_named_before_all_ranks_have_ended_one():
    assert choose({0: training(7), 1: training(None, ends=0)}, Target(), []) == Target()


def test_ranks_that_pause_at_one_step_are_accepted():
    target = Target("steps", 9, 2)
    assert choose({0: training(9, holds=True), 1: training(8)}, target, []) == target
    assert choose({0: training(9, holds=True), 1: training(9, holds=True)}, target, []) is None


def test_a_later_step_is_named_if_a_rank_has_passed_the_first_one():
    replies = {0: training(9, holds=True), 1: training(10)}
    assert choose(replies, Target("steps", 9, 2), []) == Target("steps", 12, 4)


def test_ranks_that_pause_at_different_steps_go_on():
    replies = {0: training(9, holds=True), 1: training(11, holds=True)}
    assert choose(replies, Target("steps", 9, 1), []) == Target("steps", 12, 2)


def test_the_margin_grows_to_a_limit():
    target = Target("steps", 1, 1)
    for _ in range(20):
        target = choose({0: training(target.position)}, target, [])
    assert target.margin == 64


def test_a_rank_that_has_ended_its_cell_is_not_mixed_with_one_that_trains():
    replies = {0: idle(), 1: training(9, holds=True)}
    assert choose(replies, Target("steps", 9, 2), []) == Target("steps", 11, 4)
    assert choose({0: idle(), 1: idle()}, Target("steps", 11, 4), []) is None
    assert choose(replies, Target("steps", 9, 2), [0]) is None  # it ran no cell from the beginning


def test_collectives_are_the_clock_of_an_optimizer_that_does_not_count():
    replies = {0: training(None, collectives=20, ends=2), 1: training(None, collectives=22, ends=3)}
    assert choose(replies, Target(), []) == Target("collectives", 23, 2)
    assert choose({0: training(None, ends=1)}, Target(), []) == Target()


def test_ranks_that_train_on_their_own_pause_at_any_step():
    replies = {0: training(None, ends=2), 1: training(None, ends=5)}
    target = choose(replies, Target(), [])
    assert target == Target("any")
    assert choose({0: training(None, holds=True), 1: training(None, holds=True)}, target, []) is None
