"""Test the comparison of the ranks' hashes: pure code."""

from __future__ import annotations

import math

import pytest

from rankbook.coordinator import sync_check
from rankbook.coordinator.sync_check import EqualHistory, Finding, SyncReport, add_differences, compare_hashes
from rankbook.protocol.queries import PieceDifference, StateEntry, StateHashes


def entry(key="w", digest=1, *, blocks=1, **options):
    digests = b"".join(number.to_bytes(8, "little") for number in [digest, *range(100, 99 + blocks)])
    options = {"kind": "parameter", "dtype": "float32", "shape": (10,), "nbytes": 40, "first": key, **options}
    return StateEntry(key, digest=digests, **options)


def replies(*entries, **options):
    return {
        rank: StateHashes(tuple(of_rank) if isinstance(of_rank, list) else (of_rank,), **options)
        for rank, of_rank in enumerate(entries)
    }


def test_the_largest_group_of_equal_ranks_is_the_reference():
    comparison = compare_hashes(replies(entry(digest=2), entry(), entry(), entry(digest=3)))
    (finding,) = comparison.findings
    assert (finding.ranks, finding.reference) == ((0, 3), (1, 2))
    (piece,) = comparison.pieces
    assert (piece.source, piece.ranks, piece.blocks) == (1, (0, 3), (0,))
    assert compare_hashes(replies(entry(digest=2), entry())).pieces[0].source == 0


def test_only_blocks_with_different_hashes_are_looked_at():
    comparison = compare_hashes(replies(entry(digest=1, blocks=4), entry(digest=2, blocks=4)))
    assert comparison.pieces[0].blocks == (0,)


def test_shards_of_other_places_are_not_compared():
    shards = replies(
        entry(place="S(0) dp 0"),
        entry(digest=2, place="S(0) dp 1"),
        entry(place="S(0) dp 0"),
        entry(digest=3, place="S(0) dp 1"),
    )
    (finding,) = compare_hashes(shards).findings
    assert (finding.ranks, finding.reference, finding.place) == ((3,), (1,), "S(0) dp 1")


def test_ranks_outside_of_a_group_may_have_other_values_and_lack_it():
    assert not compare_hashes(replies(entry(ranks=(0, 1)), entry(ranks=(0, 1)), [], [])).findings
    apart = replies(
        entry(ranks=(0, 1)), entry(ranks=(0, 1)), entry(digest=5, ranks=(2, 3)), entry(digest=5, ranks=(2, 3))
    )
    assert not compare_hashes(apart).findings


def test_missing_entries_of_one_kind_are_one_finding():
    many = [entry(f"w{number}") for number in range(9)]
    (finding,) = compare_hashes(replies(many, many, [])).findings
    assert (finding.name, finding.ranks, finding.problem) == ("w0 and 8 more", (2,), "exists on ranks 0-1 only")
    (finding,) = compare_hashes(replies([], [], many[:1])).findings
    assert (finding.ranks, finding.reference) == ((2,), (0, 1))


def test_an_average_that_other_ranks_have_not_is_no_finding():
    average = [entry("ema.w", optional="ema"), entry("ema.b", optional="ema")]
    assert not compare_hashes(replies([entry(), *average], [entry()], [entry()])).findings
    (finding,) = compare_hashes(replies([entry(), *average], [entry(), average[0]], [entry()])).findings
    assert (finding.name, finding.ranks, finding.reference) == ("ema.b", (0,), (1,))


def test_a_tensor_that_is_not_sharded_on_one_rank_is_a_finding():
    places = ["_S(0, 2) dp 0, S(1) tp 0", "_S(0, 2) dp 0, S(1) tp 1", "", "_S(0, 2) dp 1, S(1) tp 1"]
    shards = replies(*(entry(digest=number, place=place) for number, place in enumerate(places)))
    (finding,) = compare_hashes(shards).findings
    assert (finding.ranks, finding.reference) == ((2,), (0, 1, 3))
    assert finding.problem == "placement: _S(0, 2) dp, S(1) tp on ranks 0-1,3; whole on rank 2"
    outside = replies(entry(place="S(0) dp 0"), entry(place="outside of the mesh"))
    assert not compare_hashes(outside).findings


def test_a_tensor_that_one_rank_cannot_read_is_a_finding():
    answers = replies(entry(), entry(), []) | {2: StateHashes((), unreadable={"w": "it is on the meta device"})}
    (finding,) = compare_hashes(answers).findings
    assert (finding.name, finding.ranks, finding.reference) == ("w", (2,), (0, 1))
    assert finding.problem == "cannot be read on rank 2: it is on the meta device"


def test_another_dtype_or_shape_is_not_compared_further():
    comparison = compare_hashes(replies(entry(), entry(digest=2, dtype="bfloat16", nbytes=20)))
    assert [finding.problem for finding in comparison.findings] == ["dtype: float32 on rank 0; bfloat16 on rank 1"]
    assert not comparison.pieces


def test_ranks_at_other_steps_are_named():
    many = {0: StateHashes((entry(),), steps=7), 1: StateHashes((entry(),), steps=6)}
    (finding,) = compare_hashes(many).findings
    assert (finding.name, finding.problem) == ("optimizer steps", "7 on rank 0; 6 on rank 1")


def test_values_that_differ_in_bits_only_are_no_finding():
    comparison = compare_hashes(replies(entry(digest=2), entry()))
    assert not add_differences(comparison, [PieceDifference("w", 1, 0.0, 0, 10)])
    (finding,) = add_differences(comparison, [PieceDifference("w", 1, 0.5, 4, 10, 1)])
    assert (finding.largest, finding.share, finding.elements) == (0.5, 0.4, 10)
    assert "1 element is NaN or infinite on one side" in finding.problem
    (finding,) = add_differences(comparison, [PieceDifference("w", 1, math.nan, 4, 10, 4)])
    assert finding.largest is None
    assert add_differences(comparison, []) == comparison.findings


def test_blocks_are_sampled_if_too_many_differ(monkeypatch):
    monkeypatch.setattr(sync_check, "MAX_BLOCKS", 8)
    first, second = (
        b"".join(number.to_bytes(8, "little") for number in range(start, start + 100)) for start in (0, 500)
    )
    kinds = {"kind": "parameter", "dtype": "float32", "shape": (1000,), "nbytes": 100 << 20}
    comparison = compare_hashes(
        replies(StateEntry("w", digest=first, **kinds), StateEntry("w", digest=second, **kinds))
    )
    assert len(comparison.pieces[0].blocks) == 8 and comparison.pieces[0].blocks[-1] > 80
    (finding,) = add_differences(comparison, [PieceDifference("w", 1, 0.5, 500, 800)])
    assert finding.sampled and "≥ 50 %" in str(SyncReport((0, 1), [finding], compared=1, nbytes=0))


def test_history_says_since_when():
    history = EqualHistory()
    history.update(compare_hashes(replies(entry(), entry())), [], 100.0, 5)
    comparison = compare_hashes(replies(entry(), entry(digest=2)))
    layout = Finding("w", "parameter", (1,), (0,), "dtype")
    value, other = history.update(comparison, [*comparison.findings, layout], 160.0, 9)
    assert value.since == "after step 5, equal 1 min 0 s ago" and not other.since
    (value,) = history.update(comparison, comparison.findings, 170.0, 2)  # another training
    assert not value.since
    (value,) = history.update(comparison, comparison.findings, 101.0, None)
    assert value.since == "equal at step 5, 1.0 s ago"


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (SyncReport((0, 1), [], compared=3, nbytes=12), "3 entries (12 B per rank) equal on ranks 0-1"),
        (
            SyncReport((), [], compared=0, nbytes=0, unanswered={0: "busy"}),
            "no rank has answered\nrank 0 did not answer: busy",
        ),
        (SyncReport((0, 1), [], compared=0, nbytes=0), "nothing to compare: no model is wrapped"),
        (SyncReport((0,), [], compared=3, nbytes=0), "only rank 0 was asked"),
    ],
)
def test_report_says_what_was_compared(report, text):
    assert text in str(report)
    assert report.ok is not bool(report.unanswered)


def test_report_escapes_html():
    bundle = SyncReport((0, 1), [Finding("<b>", "x", (1,), (0,), "a < b")], compared=1, nbytes=0).bundle()
    assert "&lt;b&gt;" in bundle["text/html"] and "<b>" not in bundle["text/html"]
