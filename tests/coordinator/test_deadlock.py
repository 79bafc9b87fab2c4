"""The verdicts on ranks that wait: who waits in vain, for whom, since when, and who merely is slow."""

from __future__ import annotations

from rankbook.coordinator.deadlock import (
    BlockedRank,
    CollectiveMismatch,
    CollectiveReport,
    InactiveRank,
    blocked_ranks,
    find_deadlock,
    find_mismatches,
    format_warning,
)
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport

NOW = 100.0


def launch(
    number: int,
    op: str = "all_reduce",
    *,
    data: str = "float32[4]",
    peer: int | None = None,
    seconds: float = 3.0,
    alike: bool = True,
) -> CollectiveLaunch:
    return CollectiveLaunch(number=number, op=op, data=data, alike=alike, peer=peer, seconds=seconds)


def group(
    ranks: tuple[int, ...],
    count: int,
    *pending: CollectiveLaunch,
    name: str = "0",
    recent: tuple[CollectiveLaunch, ...] = (),
) -> GroupReport:
    return GroupReport(name=name, ranks=ranks, count=count, pending=pending, recent=(*recent, *pending))


def told(*groups: GroupReport, at: float = NOW, line: int | None = 7) -> CollectiveReport:
    return CollectiveReport(Collectives(token=0, cell=1, line=line, groups=groups), at)


def failed(rank: int, since: float = NOW - 2) -> InactiveRank:
    return InactiveRank("failed", f"rank {rank} raised ValueError", since)


def dead(rank: int, since: float = NOW - 2) -> InactiveRank:
    return InactiveRank("dead", f"rank {rank} was killed by signal 9", since)


def finished(since: float = NOW - 2) -> InactiveRank:
    return InactiveRank("finished", "has finished this cell", since)


PAIR = (0, 1)
TRIO = (0, 1, 2)


def test_a_rank_that_waits_for_one_that_failed_waits_in_vain_and_says_for_whom_and_where():
    waits = launch(5)
    (verdict,) = blocked_ranks({0: told(group(PAIR, 5, waits)), 1: told(group(PAIR, 4))}, {1: failed(1)}, NOW)
    assert verdict == BlockedRank(0, "0", waits, 7, 1, "failed", "rank 1 raised ValueError", 2.0)


def test_so_does_one_that_waits_for_the_dead_which_tell_nothing():
    (verdict,) = blocked_ranks({0: told(group(PAIR, 5, launch(5)))}, {1: dead(1)}, NOW)
    assert (verdict.rank, verdict.missing, verdict.how) == (0, 1, "dead")


def test_and_one_that_waits_for_a_rank_that_has_finished():
    (verdict,) = blocked_ranks({0: told(group(PAIR, 5, launch(5))), 1: told(group(PAIR, 4))}, {1: finished()}, NOW)
    assert verdict.how == "finished"


def test_a_rank_that_has_begun_the_collective_is_not_missing_whatever_became_of_it():
    slow = {0: told(group(PAIR, 5, launch(5, seconds=1000))), 1: told(group(PAIR, 5))}
    for out in (failed(1, 0), finished(0)):
        assert blocked_ranks(slow, {1: out}, NOW) == []


def test_who_waits_for_a_rank_that_still_runs_is_never_condemned_however_long_it_takes():
    far_behind = {0: told(group(PAIR, 5, launch(5, seconds=1e6))), 1: told(group(PAIR, 1))}
    assert blocked_ranks(far_behind, {}, NOW) == []
    assert blocked_ranks({0: told(group(PAIR, 5, launch(5, seconds=1e6)))}, {}, NOW) == [], (
        "and one that has not told either"
    )


def test_who_waits_for_nothing_is_not_condemned():
    assert blocked_ranks({0: told(group(PAIR, 5)), 1: told(group(PAIR, 4))}, {1: failed(1)}, NOW) == []


def test_a_chain_of_waits_ends_at_the_one_that_failed_and_all_of_it_bears_its_words():
    """Rank 2 raised, 1 waits for it in a group of their own, and 0 for 1 in another."""
    ranks = {
        0: told(group((0, 1), 3, launch(3, seconds=9), name="b")),
        1: told(group((0, 1), 2, name="b"), group((1, 2), 6, launch(6, seconds=4), name="a")),
        2: told(group((1, 2), 5, name="a")),
    }
    first, second = blocked_ranks(ranks, {2: failed(2)}, NOW)
    assert (first.rank, first.group, first.missing) == (0, "b", 1)
    assert (second.rank, second.group, second.missing) == (1, "a", 2)
    assert first.words == second.words == "rank 2 raised ValueError"
    assert first.how == "failed"


def test_a_circle_of_waits_without_an_end_is_left_to_the_person():
    ranks = {
        0: told(group((0, 1), 3, launch(3), name="b")),
        1: told(group((0, 1), 2, name="b"), group((1, 2), 6, launch(6), name="a")),
        2: told(group((1, 2), 5, name="a"), group((0, 2), 1, launch(1), name="c")),
    }
    assert blocked_ranks(ranks, {}, NOW) == []


def test_in_a_sub_group_only_its_members_are_waited_for():
    ranks = {0: told(group(PAIR, 5, launch(5), name="sub")), 1: told(group(PAIR, 4, name="sub")), 2: told()}
    assert blocked_ranks(ranks, {2: failed(2)}, NOW) == []
    (verdict,) = blocked_ranks(ranks, {1: failed(1)}, NOW)
    assert (verdict.rank, verdict.group) == (0, "sub")


def test_a_rank_without_the_group_has_begun_nothing_in_it():
    (verdict,) = blocked_ranks({0: told(group(PAIR, 1, launch(1), name="sub")), 1: told()}, {1: failed(1)}, NOW)
    assert verdict.missing == 1


def test_a_send_or_receive_waits_for_its_peer_alone():
    receives = launch(0, "recv", peer=1)
    ranks = {0: told(group(TRIO, 5, receives)), 1: told(group(TRIO, 9)), 2: told(group(TRIO, 9))}
    assert blocked_ranks(ranks, {2: failed(2)}, NOW) == []
    (verdict,) = blocked_ranks(ranks, {1: failed(1)}, NOW)
    assert verdict.missing == 1, "however many collectives it has begun"


def test_a_receive_from_anybody_is_in_vain_once_nobody_is_left_who_may_send():
    ranks = {0: told(group(TRIO, 5, launch(0, "recv"))), 1: told(group(TRIO, 9)), 2: told(group(TRIO, 9))}
    assert blocked_ranks(ranks, {}, NOW) == []
    assert blocked_ranks(ranks, {1: failed(1)}, NOW) == []
    (verdict,) = blocked_ranks(ranks, {1: failed(1), 2: finished()}, NOW)
    assert (verdict.rank, verdict.missing, verdict.how) == (0, 1, "failed")


def test_a_failure_is_named_before_a_death_after_it_and_both_before_a_rank_that_merely_finished():
    ranks = {0: told(group((0, 1, 2, 3), 5, launch(5)))}
    out = {1: finished(NOW - 9), 2: dead(2, NOW - 2), 3: failed(3, NOW - 4)}
    assert blocked_ranks(ranks, out, NOW)[0].missing == 3
    assert blocked_ranks(ranks, {1: finished(NOW - 9), 2: dead(2)}, NOW)[0].missing == 2


def test_seconds_count_only_while_both_are_true_the_wait_and_the_end_of_the_other():
    def seconds(waited: float, since: float, at: float = NOW) -> float:
        ranks = {0: told(group(PAIR, 5, launch(5, seconds=waited)), at=at), 1: told(group(PAIR, 4))}
        return blocked_ranks(ranks, {1: failed(1, since)}, NOW)[0].seconds

    assert seconds(waited=30.0, since=NOW - 2) == 2.0
    assert seconds(waited=0.5, since=NOW - 2) == 0.5
    assert seconds(waited=0.5, since=NOW - 9, at=NOW - 1) == 1.5, "it has waited on since it told"


def test_the_oldest_wait_that_is_in_vain_is_the_one_that_is_told():
    slow, vain = launch(5, seconds=9), launch(6, "barrier", seconds=8)
    ranks = {0: told(group(PAIR, 6, slow, vain)), 1: told(group(PAIR, 5))}
    assert blocked_ranks(ranks, {1: failed(1)}, NOW)[0].launch == vain


# Disagreements


def test_ranks_in_different_collectives_disagree_and_each_is_told_with_its_line():
    ranks = {
        0: told(group(TRIO, 5, launch(5)), line=3),
        1: told(group(TRIO, 5, launch(5, "barrier", data="")), line=8),
        2: told(group(TRIO, 5, launch(5)), line=3),
    }
    (found,) = find_mismatches(ranks, patience=0.5)
    assert found == CollectiveMismatch(
        "0",
        5,
        "the ranks disagree at collective #5 of the group of ranks 0-2, and none of them can go on:\n"
        "  ranks 0,2: all_reduce float32[4], waiting at line 3\n"
        "  rank 1: barrier, waiting at line 8\n"
        "interrupt the cell (■, or %distributed interrupt) to end the wait\n",
    )


def test_so_do_ranks_with_different_shapes_or_types_where_these_have_to_be_alike():
    def found(alike: bool) -> int:
        ranks = {rank: told(group(PAIR, 1, launch(1, data=f"float32[{rank}]", alike=alike, op="any"))) for rank in PAIR}
        return len([*find_mismatches(ranks, patience=0.5)])

    assert found(alike=True) == 1
    assert found(alike=False) == 0


def test_one_that_has_gone_on_is_compared_by_what_it_remembers():
    ranks = {
        0: told(group(PAIR, 5, launch(5)), line=3),
        1: told(group(PAIR, 6, recent=(launch(5, "broadcast", data="float32[4] root 1"), launch(6, "barrier")))),
    }
    (found,) = find_mismatches(ranks, patience=0.5)
    assert "rank 1: broadcast float32[4] root 1, and has gone on" in found.text


def test_ranks_that_agree_or_have_not_come_yet_or_have_just_come_do_not():
    same = {rank: told(group(PAIR, 5, launch(5))) for rank in PAIR}
    alone = {0: told(group(PAIR, 5, launch(5))), 1: told(group(PAIR, 4, recent=(launch(4, "barrier"),)))}
    unheard = {0: told(group(PAIR, 5, launch(5)))}
    for ranks in (same, alone, unheard):
        assert [*find_mismatches(ranks, patience=0.5)] == []
    soon = {
        0: told(group(PAIR, 5, launch(5, seconds=0.2))),
        1: told(group(PAIR, 5, launch(5, "barrier", seconds=0.3))),
    }
    assert [*find_mismatches(soon, patience=0.5)] == []


def test_sends_and_receives_have_no_number_to_disagree_at():
    ranks = {
        0: told(group(PAIR, 5, launch(0, "recv", peer=1))),
        1: told(group(PAIR, 5, launch(0, "send", peer=0))),
    }
    assert [*find_mismatches(ranks, patience=0.5)] == []


def test_each_disagreement_is_found_once_and_other_groups_have_their_own():
    ranks = {
        rank: told(
            group(PAIR, 5, launch(5, f"op{rank}")),
            group(PAIR, 2, launch(2, f"other{rank}"), name="1"),
        )
        for rank in PAIR
    }
    assert [(each.group, each.number) for each in find_mismatches(ranks, patience=0.5)] == [("0", 5), ("1", 2)]


def test_the_warning_says_who_waits_where_for_whom_and_what_to_do():
    doom = BlockedRank(2, "0", launch(5), 7, 1, "finished", "has finished this cell", 6.0)
    assert format_warning(doom, [2]) == (
        "rank 2 waits in all_reduce #5 (float32[4]) at line 7 for rank 1, which has finished this cell; "
        "interrupt the cell (■, or %distributed interrupt) to end the wait\n"
    )
    bare = BlockedRank(2, "0", launch(0, "recv", data=""), None, 1, "finished", "has not begun this cell", 6.0)
    assert format_warning(bare, [2]).startswith("rank 2 waits in recv for rank 1, which has not begun this cell; ")
    assert format_warning(bare, [0, 2, 3]).startswith(
        "ranks 0,2-3 wait in recv for rank 1, which has not begun this cell; "
    )


def test_ranks_that_wait_for_one_another_in_several_groups_are_all_named():
    told_by = {
        0: told(group((0, 1), 1, launch(1), name="a"), line=3),
        1: told(group((0, 1), 0, name="a"), group((1, 2), 1, launch(1, "barrier", data=""), name="b"), line=5),
        2: told(group((1, 2), 0, name="b"), group(TRIO, 1, launch(1), name="0"), line=7),
    }
    text = find_deadlock(told_by, patience=0.5)
    assert text is not None
    assert "rank 0: all_reduce #1 float32[4] of the group of ranks 0-1, waiting at line 3" in text
    assert "rank 1: barrier #1 of the group of ranks 1-2, waiting at line 5" in text
    assert "rank 2: all_reduce #1 float32[4] of the group of ranks 0-2, waiting at line 7" in text
    assert "interrupt the cell" in text


def test_a_chain_that_ends_at_a_rank_that_computes_is_no_deadlock():
    told_by = {
        0: told(group(PAIR, 1, launch(1), name="a")),
        1: told(group(PAIR, 0, name="a"), group((1, 2), 1, launch(1), name="b")),
        2: told(group((1, 2), 0, name="b")),
    }
    assert find_deadlock(told_by, patience=0.5) is None


def test_a_collective_that_all_have_begun_is_slow_and_no_deadlock():
    told_by = {rank: told(group(TRIO, 4, launch(4))) for rank in TRIO}
    assert find_deadlock(told_by, patience=0.5) is None


def test_a_wait_that_has_just_begun_is_none_yet():
    told_by = {
        0: told(group(PAIR, 1, launch(1, seconds=0.1), name="a")),
        1: told(group(PAIR, 0, name="a"), group(PAIR, 1, launch(1, seconds=0.1), name="b")),
    }
    assert find_deadlock(told_by, patience=0.5) is None


def test_ranks_that_all_receive_from_their_neighbour_wait_for_one_another():
    told_by = {rank: told(group(TRIO, 0, launch(0, "recv", peer=(rank + 1) % 3, alike=False))) for rank in TRIO}
    assert "recv float32[4] of the group" in (find_deadlock(told_by, patience=0.5) or "")


def test_a_send_and_its_receive_are_on_their_way():
    told_by = {
        0: told(group(PAIR, 0, launch(0, "send", peer=1, alike=False))),
        1: told(group(PAIR, 0, launch(0, "recv", peer=0, alike=False))),
    }
    assert find_deadlock(told_by, patience=0.5) is None


def test_one_whose_connections_broke_cannot_end_its_part_of_what_it_has_begun():
    broken = GroupReport(name="0", ranks=PAIR, count=5, pending=(), recent=(), broken=True)
    (verdict,) = blocked_ranks({0: told(group(PAIR, 5, launch(5))), 1: told(broken)}, {1: failed(1)}, NOW)
    assert (verdict.rank, verdict.missing) == (0, 1)
