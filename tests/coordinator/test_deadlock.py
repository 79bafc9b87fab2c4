"""Test the detection of blocked ranks and of collectives that do not match."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from rankbook.coordinator.deadlock import (
    BlockedRank,
    CollectiveMismatch,
    CollectiveReport,
    InactiveRank,
    blocked_ranks,
    find_deadlock,
    find_mismatch,
    format_warning,
)
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members

NOW = 100.0


def launch(
    number: int,
    op: str = "all_reduce",
    *,
    data: str = "float32[4]",
    peer: int | None = None,
    seconds: float = 3.0,
) -> CollectiveLaunch:
    return CollectiveLaunch(number=number, op=op, data=data, peer=peer, seconds=seconds)


def group(
    ranks: tuple[int, ...],
    count: int,
    *pending: CollectiveLaunch,
    name: str = "0",
    recent: tuple[CollectiveLaunch, ...] = (),
) -> GroupReport:
    return GroupReport(
        name=name, members=encode_members(ranks), count=count, pending=pending, recent=(*recent, *pending)
    )


def report_of(*groups: GroupReport, at: float = NOW, line: int | None = 7) -> CollectiveReport:
    return CollectiveReport(Collectives(token=0, cell=1, line=line, groups=groups), at)


def failed(rank: int, since: float = NOW - 2) -> InactiveRank:
    return InactiveRank("failed", f"rank {rank} raised ValueError", since)


def dead(rank: int, since: float = NOW - 2) -> InactiveRank:
    return InactiveRank("dead", f"rank {rank} was killed by SIGKILL", since)


def finished(since: float = NOW - 2) -> InactiveRank:
    return InactiveRank("finished", "has finished this cell", since)


PAIR = (0, 1)
TRIO = (0, 1, 2)


def test_rank_waiting_for_a_failed_rank_is_blocked_with_peer_and_line():
    waits = launch(5)
    (verdict,) = blocked_ranks({0: report_of(group(PAIR, 5, waits)), 1: report_of(group(PAIR, 4))}, {1: failed(1)}, NOW)
    assert verdict == BlockedRank(0, "0", waits, 7, 1, "failed", "rank 1 raised ValueError", 2.0)


def test_rank_waiting_for_a_dead_rank_is_blocked():
    (verdict,) = blocked_ranks({0: report_of(group(PAIR, 5, launch(5)))}, {1: dead(1)}, NOW)
    assert (verdict.rank, verdict.missing, verdict.outcome) == (0, 1, "dead")


def test_rank_waiting_for_a_finished_rank_is_blocked():
    (verdict,) = blocked_ranks(
        {0: report_of(group(PAIR, 5, launch(5))), 1: report_of(group(PAIR, 4))}, {1: finished()}, NOW
    )
    assert verdict.outcome == "finished"


def test_rank_that_began_the_collective_is_not_missing_even_if_it_ended():
    slow = {0: report_of(group(PAIR, 5, launch(5, seconds=1000))), 1: report_of(group(PAIR, 5))}
    for out in (failed(1, 0), finished(0)):
        assert blocked_ranks(slow, {1: out}, NOW) == []


def test_rank_waiting_for_a_running_rank_is_never_blocked():
    far_behind = {0: report_of(group(PAIR, 5, launch(5, seconds=1e6))), 1: report_of(group(PAIR, 1))}
    assert blocked_ranks(far_behind, {}, NOW) == []
    assert blocked_ranks({0: report_of(group(PAIR, 5, launch(5, seconds=1e6)))}, {}, NOW) == [], (
        "and one that has not told either"
    )


def test_rank_without_a_pending_collective_is_not_blocked():
    assert blocked_ranks({0: report_of(group(PAIR, 5)), 1: report_of(group(PAIR, 4))}, {1: failed(1)}, NOW) == []


def test_all_ranks_of_a_wait_chain_report_the_failure_at_its_end():
    """Let rank 2 raise, while rank 1 waits for it in a group of their own, and rank 0 for rank 1 in another."""
    ranks = {
        0: report_of(group((0, 1), 3, launch(3, seconds=9), name="b")),
        1: report_of(group((0, 1), 2, name="b"), group((1, 2), 6, launch(6, seconds=4), name="a")),
        2: report_of(group((1, 2), 5, name="a")),
    }
    first, second = blocked_ranks(ranks, {2: failed(2)}, NOW)
    assert (first.rank, first.group, first.missing) == (0, "b", 1)
    assert (second.rank, second.group, second.missing) == (1, "a", 2)
    assert first.reason == second.reason == "rank 2 raised ValueError"
    assert first.outcome == "failed"


def test_cycle_of_waits_between_running_ranks_is_not_blocked():
    ranks = {
        0: report_of(group((0, 1), 3, launch(3), name="b")),
        1: report_of(group((0, 1), 2, name="b"), group((1, 2), 6, launch(6), name="a")),
        2: report_of(group((1, 2), 5, name="a"), group((0, 2), 1, launch(1), name="c")),
    }
    assert blocked_ranks(ranks, {}, NOW) == []


def test_only_members_of_a_sub_group_are_waited_for():
    ranks = {
        0: report_of(group(PAIR, 5, launch(5), name="sub")),
        1: report_of(group(PAIR, 4, name="sub")),
        2: report_of(),
    }
    assert blocked_ranks(ranks, {2: failed(2)}, NOW) == []
    (verdict,) = blocked_ranks(ranks, {1: failed(1)}, NOW)
    assert (verdict.rank, verdict.group) == (0, "sub")


def test_a_rank_without_the_group_has_begun_nothing_in_it():
    (verdict,) = blocked_ranks(
        {0: report_of(group(PAIR, 1, launch(1), name="sub")), 1: report_of()}, {1: failed(1)}, NOW
    )
    assert verdict.missing == 1


def test_a_send_or_receive_waits_for_its_peer_alone():
    receives = launch(0, "recv", peer=1)
    ranks = {0: report_of(group(TRIO, 5, receives)), 1: report_of(group(TRIO, 9)), 2: report_of(group(TRIO, 9))}
    assert blocked_ranks(ranks, {2: failed(2)}, NOW) == []
    (verdict,) = blocked_ranks(ranks, {1: failed(1)}, NOW)
    assert verdict.missing == 1, "however many collectives it has begun"


def test_receive_from_any_source_is_blocked_after_all_senders_have_ended():
    ranks = {
        0: report_of(group(TRIO, 5, launch(0, "recv"))),
        1: report_of(group(TRIO, 9)),
        2: report_of(group(TRIO, 9)),
    }
    assert blocked_ranks(ranks, {}, NOW) == []
    assert blocked_ranks(ranks, {1: failed(1)}, NOW) == []
    (verdict,) = blocked_ranks(ranks, {1: failed(1), 2: finished()}, NOW)
    assert (verdict.rank, verdict.missing, verdict.outcome) == (0, 1, "failed")


def test_failed_rank_is_reported_before_dead_and_finished_ranks():
    ranks = {0: report_of(group((0, 1, 2, 3), 5, launch(5)))}
    out = {1: finished(NOW - 9), 2: dead(2, NOW - 2), 3: failed(3, NOW - 4)}
    assert blocked_ranks(ranks, out, NOW)[0].missing == 3
    assert blocked_ranks(ranks, {1: finished(NOW - 9), 2: dead(2)}, NOW)[0].missing == 2


def test_blocked_seconds_start_when_the_wait_and_the_end_of_the_peer_overlap():
    def seconds(waited: float, since: float, at: float = NOW) -> float:
        ranks = {0: report_of(group(PAIR, 5, launch(5, seconds=waited)), at=at), 1: report_of(group(PAIR, 4))}
        return blocked_ranks(ranks, {1: failed(1, since)}, NOW)[0].seconds

    assert seconds(waited=30.0, since=NOW - 2) == 2.0
    assert seconds(waited=0.5, since=NOW - 2) == 0.5
    assert seconds(waited=0.5, since=NOW - 9, at=NOW - 1) == 1.5, "it has waited on since it told"


def test_oldest_blocked_wait_is_reported():
    slow, vain = launch(5, seconds=9), launch(6, "barrier", seconds=8)
    ranks = {0: report_of(group(PAIR, 6, slow, vain)), 1: report_of(group(PAIR, 5))}
    assert blocked_ranks(ranks, {1: failed(1)}, NOW)[0].launch == vain


# Mismatches


def code_of(text: str) -> int:
    return zlib.crc32(text.encode())


def calls(*texts: str, first: int = 1, seconds: float = 3.0, at: str = "line 3") -> tuple[CollectiveLaunch, ...]:
    """Return collectives in the order of a program: `all_reduce float32[4]`, or with a reduction `... max`.

    The rank's log begins with number `first`; what was before counts for the digest.
    """
    launches, digest = [], 0
    for number, text in enumerate(texts, 1):
        op, _, data = text.partition(" ")
        data, _, reduction = data.partition(" by ")
        digest = (digest * 1_000_003 + code_of(text)) % (1 << 32)
        new_launch = launch(number, op, data=data, seconds=seconds)
        launches.append(
            msgspec.structs.replace(new_launch, reduction=reduction, position=at, code=code_of(text), digest=digest)
        )
    return tuple(launches[first - 1 :])


def exchange(number: int, rank: int, sends: tuple[int, ...], expects: tuple[int, ...]) -> CollectiveLaunch:
    """Return an all_to_all, with the balance of one that is the first."""
    balance = sum(hash((number, rank, other, size)) for other, size in enumerate(sends))
    balance -= sum(hash((number, other, rank, size)) for other, size in enumerate(expects))
    new_launch = launch(number, "all_to_all_single", data="float32[4]")
    return msgspec.structs.replace(
        new_launch, sends=sends, expects=expects, position="line 3", balance=balance % (1 << 32)
    )


def finished_with(ranks: tuple[int, ...], *launches: CollectiveLaunch, count: int | None = None) -> GroupReport:
    return group(ranks, launches[-1].number if count is None else count, recent=launches)


def waiting_in(ranks: tuple[int, ...], *launches: CollectiveLaunch) -> GroupReport:
    return GroupReport(
        name="0", members=encode_members(ranks), count=launches[-1].number, pending=launches[-1:], recent=launches
    )


def mismatch(views: dict[int, GroupReport], **options: float) -> CollectiveMismatch:
    first_mismatch = find_mismatch(views, **options)
    assert first_mismatch is not None
    return first_mismatch


def test_different_sizes_are_named_with_the_rank_whose_result_is_wrong():
    reported = mismatch(
        {
            0: finished_with(PAIR, *calls("all_reduce float32[2]", at="line 1")),
            1: waiting_in(PAIR, *calls("all_reduce float32[3]", at="line 1")),
        }
    )
    assert reported.text == "all_reduce #1: rank 0 gave float32[2], rank 1 float32[3], at line 1"
    assert reported.describe() == f"{reported.text}; rank 0 has already completed it: its result is wrong"
    assert (reported.number, reported.waiting, reported.completed) == (1, (1,), (0,))


def test_different_operations_are_named_with_their_lines():
    reported = mismatch(
        {
            0: waiting_in(TRIO, *calls("barrier", "all_reduce float32[4]", at="line 3")),
            1: waiting_in(TRIO, *calls("barrier", "barrier", at="cell [2] line 8")),
            2: waiting_in(TRIO, *calls("barrier", "all_reduce float32[4]", at="line 3")),
        },
        named=True,
    )
    assert reported.describe() == (
        "collective #2 in the process group of ranks 0-2: ranks 0,2 began all_reduce float32[4] at line 3, "
        "rank 1 barrier at cell [2] line 8"
    )


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("all_reduce float32[2, 3]", "all_reduce float32[3, 2]", "rank 0 gave float32[2, 3], rank 1 float32[3, 2]"),
        ("all_reduce float32[4]", "all_reduce float64[4]", "rank 0 gave float32[4], rank 1 float64[4]"),
        ("all_reduce float32[4] by sum", "all_reduce float32[4] by max", "gave float32[4] sum, rank 1 float32[4] max"),
        ("broadcast float32[4] root 0", "broadcast float32[4] root 1", "gave float32[4] root 0, rank 1 float32[4] ro"),
    ],
)
def test_shapes_dtypes_reductions_and_roots_are_compared(one, other, words):
    assert words in mismatch({0: finished_with(PAIR, *calls(one)), 1: finished_with(PAIR, *calls(other))}).text


def test_rank_that_has_continued_is_compared_by_its_log():
    reported = mismatch(
        {
            0: waiting_in(PAIR, *calls("barrier", "all_reduce float32[4]")),
            1: waiting_in(PAIR, *calls("barrier", "broadcast float32[4] root 1", "barrier")),
        }
    )
    assert (reported.number, reported.completed, reported.waiting) == (2, (1,), (0, 1))
    assert reported.describe().endswith("; rank 1 has already completed it: its result is wrong")


def test_the_first_of_several_is_named_and_a_rank_that_has_not_begun_it():
    reported = mismatch(
        {
            0: finished_with(TRIO, *calls("barrier", "all_reduce float32[4]", "reduce float32[1]")),
            1: finished_with(TRIO, *calls("barrier", "all_reduce float32[5]", "reduce float32[2]")),
            2: finished_with(TRIO, *calls("barrier")),
        }
    )
    assert reported.number == 2
    assert reported.text == (
        "all_reduce #2: rank 0 gave float32[4], rank 1 float32[5], at line 3; rank 2 has not begun it"
    )


def test_ranks_that_match_or_have_not_come_yet_do_not_mismatch():
    program = calls("barrier", "all_reduce float32[4]", "barrier")
    assert find_mismatch({rank: finished_with(PAIR, *program) for rank in PAIR}) is None
    assert find_mismatch({0: waiting_in(PAIR, *program), 1: finished_with(PAIR, *program[:1])}) is None
    assert find_mismatch({0: waiting_in(PAIR, *program), 1: group(PAIR, 0)}) is None
    assert find_mismatch({0: waiting_in(PAIR, *program)}) is None
    assert find_mismatch({}) is None


def test_a_call_that_has_just_begun_may_still_be_refused_unless_connections_are_broken():
    views = {
        0: waiting_in(PAIR, *calls("all_reduce float32[4]", seconds=0.3)),
        1: waiting_in(PAIR, *calls("barrier", seconds=0.1)),
    }
    assert not mismatch(views, patience=0.2).settled
    assert mismatch(views, patience=0.05).settled
    views[1] = msgspec.structs.replace(views[1], broken=True)
    assert mismatch(views, patience=0.2).settled


def test_sends_and_receives_have_no_number_and_are_not_compared():
    views = {
        0: group(PAIR, 5, launch(0, "recv", peer=1)),
        1: group(PAIR, 5, launch(0, "send", peer=0, data="float32[9]")),
    }
    assert find_mismatch(views) is None


def test_mismatch_older_than_the_logs_is_detected_by_digests():
    before = ["all_reduce float32[4]"] * 40
    views = {
        0: finished_with(PAIR, *calls(*before, first=30)),
        1: finished_with(PAIR, *calls("all_reduce float32[5]", *before[1:], first=30)),
    }
    reported = mismatch(views)
    assert reported.text == (
        "the ranks gave different operations or tensors to a collective of ranks 0-1 before #30; "
        "the logs do not reach back so far, and all results since then may be wrong"
    )
    same = {rank: finished_with(PAIR, *calls(*before, first=30 + rank)) for rank in PAIR}
    assert find_mismatch(same) is None


def test_the_sizes_of_an_all_to_all_may_differ_but_what_is_sent_is_what_is_expected():
    good = {
        0: finished_with(PAIR, exchange(1, 0, (2, 5), (2, 1))),
        1: finished_with(PAIR, exchange(1, 1, (1, 4), (5, 4))),
    }
    assert find_mismatch(good) is None
    bad = {**good, 1: finished_with(PAIR, exchange(1, 1, (1, 4), (6, 4)))}
    assert mismatch(bad).text == ("all_to_all_single #1: rank 0 sends 5 elements to rank 1, which expects 6, at line 3")
    itself = {**good, 1: finished_with(PAIR, exchange(1, 1, (1, 3), (5, 4)))}
    assert "rank 1 sends 3 elements to itself, and expects 4" in mismatch(itself).text


def test_size_mismatch_older_than_the_logs_is_detected_by_the_balance():
    views = {0: finished_with(PAIR, *calls("barrier")), 1: finished_with(PAIR, *calls("barrier"))}
    (last,) = views[1].recent
    views[1] = msgspec.structs.replace(views[1], recent=(msgspec.structs.replace(last, balance=7),))
    assert "the logs do not reach back so far" in mismatch(views).text
    alone = {rank: finished_with(TRIO, msgspec.structs.replace(last, balance=7)) for rank in PAIR}
    assert find_mismatch(alone) is None, "the third one may make up for it"


def test_deadlock_warning_names_waiting_ranks_lines_peers_and_remedy():
    doom = BlockedRank(2, "0", launch(5), 7, 1, "finished", "has finished this cell", 6.0)
    assert format_warning(doom, [2]) == (
        "rank 2 waits in all_reduce #5 (float32[4]) at line 7 for rank 1, which has finished this cell; "
        "interrupt the cell (■, or %distributed interrupt) to end the wait\n"
    )
    bare = BlockedRank(2, "0", launch(0, "recv", data=""), None, 1, "finished", "has not started this cell", 6.0)
    assert format_warning(bare, [2]).startswith("rank 2 waits in recv for rank 1, which has not started this cell; ")
    assert format_warning(bare, [0, 2, 3]).startswith(
        "ranks 0,2-3 wait in recv for rank 1, which has not started this cell; "
    )


def test_ranks_that_wait_for_one_another_in_several_groups_are_all_named():
    reports = {
        0: report_of(group((0, 1), 1, launch(1), name="a"), line=3),
        1: report_of(group((0, 1), 0, name="a"), group((1, 2), 1, launch(1, "barrier", data=""), name="b"), line=5),
        2: report_of(group((1, 2), 0, name="b"), group(TRIO, 1, launch(1), name="0"), line=7),
    }
    text = find_deadlock(reports, patience=0.5)
    assert text is not None
    assert "rank 0: all_reduce #1 float32[4] in the process group of ranks 0-1, waiting at line 3" in text
    assert "rank 1: barrier #1 in the process group of ranks 1-2, waiting at line 5" in text
    assert "rank 2: all_reduce #1 float32[4] in the process group of ranks 0-2, waiting at line 7" in text
    assert "interrupt the cell" in text


def test_a_chain_that_ends_at_a_rank_that_computes_is_no_deadlock():
    reports = {
        0: report_of(group(PAIR, 1, launch(1), name="a")),
        1: report_of(group(PAIR, 0, name="a"), group((1, 2), 1, launch(1), name="b")),
        2: report_of(group((1, 2), 0, name="b")),
    }
    assert find_deadlock(reports, patience=0.5) is None


def test_a_collective_that_all_have_begun_is_slow_and_no_deadlock():
    reports = {rank: report_of(group(TRIO, 4, launch(4))) for rank in TRIO}
    assert find_deadlock(reports, patience=0.5) is None


def test_wait_that_has_just_begun_is_not_a_deadlock():
    reports = {
        0: report_of(group(PAIR, 1, launch(1, seconds=0.1), name="a")),
        1: report_of(group(PAIR, 0, name="a"), group(PAIR, 1, launch(1, seconds=0.1), name="b")),
    }
    assert find_deadlock(reports, patience=0.5) is None


def test_ranks_that_all_receive_from_their_neighbour_wait_for_one_another():
    reports = {rank: report_of(group(TRIO, 0, launch(0, "recv", peer=(rank + 1) % 3))) for rank in TRIO}
    assert "recv float32[4] in the process group" in (find_deadlock(reports, patience=0.5) or "")


def test_matching_send_and_receive_are_no_deadlock():
    reports = {
        0: report_of(group(PAIR, 0, launch(0, "send", peer=1))),
        1: report_of(group(PAIR, 0, launch(0, "recv", peer=0))),
    }
    assert find_deadlock(reports, patience=0.5) is None


def test_rank_with_broken_connections_cannot_complete_a_begun_collective():
    broken = GroupReport(name="0", members=encode_members(PAIR), count=5, pending=(), recent=(), broken=True)
    (verdict,) = blocked_ranks({0: report_of(group(PAIR, 5, launch(5))), 1: report_of(broken)}, {1: failed(1)}, NOW)
    assert (verdict.rank, verdict.missing) == (0, 1)
