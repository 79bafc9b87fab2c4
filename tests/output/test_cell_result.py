"""Test the result of a cell and the text of its errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rankbook.errors import CellError, CollectiveAborted, InvalidArgument, RankLostError
from rankbook.output.cell_result import CellResult, RankOutcome, ResultBuilder, describe_errors
from rankbook.protocol.messages import Display, Done, ErrorReport, Text, TextCut

VALUE = ErrorReport(
    name="ValueError", value="bad", traceback="\x1b[31mTrace\x1b[0m of bad\n", plain="Trace of bad\n", line=2
)
KEY = ErrorReport(name="KeyError", value="'x'", traceback="Trace of x", plain="Trace of x")


def interrupt(line: int | None) -> ErrorReport:
    return ErrorReport(name="KeyboardInterrupt", value="", traceback="long", plain="long", line=line)


def text(data: bytes, stream: Any = "stdout") -> Text:
    return Text(cell=1, stream=stream, data=data)


def display(data: dict[str, Any], kind: Any = "display", display_id: str | None = None) -> Display:
    return Display(cell=1, kind=kind, data=data, metadata={}, display_id=display_id)


def done(status: Any = "ok", error: ErrorReport | None = None, seconds: float = 0.01) -> Done:
    return Done(cell=1, status=status, seconds=seconds, error=error)


def result(*ends: Done | str | None, number: int = 5) -> CellResult:
    """Return a result in which every rank ended as given: with a message, with a text for its loss, or not at all."""
    builder = ResultBuilder(1, number, range(len(ends)))
    for rank, end in enumerate(ends):
        if isinstance(end, Done):
            builder.rank_done(rank, end)
        elif end is not None:
            builder.rank_lost(rank, end)
    return builder.build(0.02)


def plain(cell_result: CellResult) -> str:
    return describe_errors(cell_result.outcomes, plain=True)


# What is kept ---------------------------------------------------------------------------------------------------------


def test_output_is_kept_by_rank_and_stream():
    builder = ResultBuilder(1, 5, [2, 0])
    for part in (b"a\xc3", b"\xa4\n"):
        builder.add_output(0, text(part))
    builder.add_output(2, text(b"\xff", "stderr"))
    for rank in (2, 0):
        builder.rank_done(rank, done(seconds=rank))
    cell_result = builder.build(0.5)
    assert cell_result.ranks == (0, 2)
    assert cell_result.stdout == {0: "aä\n", 2: ""}
    assert cell_result.stderr == {0: "", 2: "\ufffd"}
    assert cell_result[2] == RankOutcome(2, "ok", 2.0, stderr="\ufffd")
    assert (cell_result.cell, cell_result.number, cell_result.seconds, cell_result.ok, cell_result.status) == (
        1,
        5,
        0.5,
        True,
        "ok",
    )


def test_excessive_output_is_truncated_and_marked():
    builder = ResultBuilder(1, 5, [0, 1], keep=10)
    for _ in range(1000):
        builder.add_output(0, text("äöü".encode()))
    builder.add_output(0, text(b"all", "stderr"))
    builder.add_output(1, text(b"0123456789"))
    for rank in range(2):
        builder.rank_done(rank, done())
    cell_result = builder.build(0.0)
    assert cell_result[0].stdout == "äöüäö"
    assert cell_result[0].stderr == "all"
    assert cell_result[0].truncated
    assert cell_result[1].stdout == "0123456789"
    assert not cell_result[1].truncated


def test_a_character_that_the_cut_divides_is_left_out():
    builder = ResultBuilder(1, 5, [0], keep=3)
    builder.add_output(0, text("ää".encode()))
    builder.rank_done(0, done())
    assert builder.build(0.0)[0].stdout == "ä"


def test_a_cut_on_the_rank_is_reported():
    builder = ResultBuilder(1, 5, [0])
    builder.add_output(0, TextCut(cell=1, lines=3, size=9, log="x"))
    builder.rank_done(0, done())
    assert builder.build(0.0)[0].truncated


def test_displays_come_in_order_in_their_last_state_with_the_result_apart():
    builder = ResultBuilder(1, 5, [0])
    builder.add_output(0, display({"text/plain": "a"}))
    builder.add_output(0, display({"text/plain": "b"}, display_id="d"))
    builder.add_output(0, display({"text/plain": "42"}, "result"))
    builder.add_output(0, display({"text/plain": "c"}, "update", "d"))
    builder.add_output(0, display({"text/plain": "unknown"}, "update", "e"))
    builder.rank_done(0, done())
    cell_result = builder.build(0.0)
    assert cell_result[0].displays == ({"text/plain": "a"}, {"text/plain": "c"})
    assert cell_result[0].result == {"text/plain": "42"}
    assert cell_result.text(0) == "42"
    assert not cell_result[0].truncated


def test_a_result_that_is_updated_is_the_updated_one():
    builder = ResultBuilder(1, 5, [0])
    builder.add_output(0, display({"text/plain": "old"}, "result", "d"))
    builder.add_output(0, display({"text/plain": "new"}, "update", "d"))
    builder.rank_done(0, done())
    assert builder.build(0.0).text(0) == "new"


def test_a_hundred_displays_are_kept():
    builder = ResultBuilder(1, 5, [0])
    for number in range(101):
        builder.add_output(0, display({"text/plain": str(number)}))
    builder.rank_done(0, done())
    (outcome,) = builder.build(0.0)
    assert len(outcome.displays) == 100
    assert outcome.truncated


def test_a_rank_without_a_last_expression_has_no_text():
    assert result(done()).text(0) is None
    builder = ResultBuilder(1, 5, [0])
    builder.add_output(0, display({"image/png": "x"}, "result"))
    assert builder.build(0.0).text(0) is None


def test_output_after_the_end_does_not_change_the_result():
    builder = ResultBuilder(1, 5, [0])
    builder.rank_done(0, done())
    cell_result = builder.build(0.0)
    builder.add_output(0, text(b"late"))
    builder.add_output(0, display({"text/plain": "late"}))
    assert cell_result[0].stdout == ""
    assert builder._messages == {}


# The result -----------------------------------------------------------------------------------------------------------


def test_a_result_is_a_sequence_of_its_ranks():
    cell_result = result(done(), done())
    assert len(cell_result) == 2
    assert [outcome.rank for outcome in cell_result] == [0, 1]
    with pytest.raises(InvalidArgument, match="rank 2 is not in this result; valid ranks are 0-1"):
        cell_result[2]
    with pytest.raises(InvalidArgument):
        cell_result.text(-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cell_result.cell = 2


@pytest.mark.parametrize(
    ("cell_result", "summary"),
    [
        (result(done(), done()), "CellResult [5]: ok on ranks 0-1 in 0.02 s"),
        (result(done(), number=0), "CellResult: ok on rank 0 in 0.02 s"),
        (
            result(done(), done("error", VALUE), "gone", done("interrupted", interrupt(1)), done()),
            "CellResult [5]: lost on rank 2, error on rank 1, interrupted on rank 3, ok on ranks 0,4 in 0.02 s",
        ),
    ],
)
def test_result_is_summarized_in_one_line(cell_result, summary):
    assert repr(cell_result) == summary


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ((done(), done()), "ok"),
        ((done(), done("error", VALUE)), "error"),
        ((done("interrupted"), done("error", VALUE)), "error"),
        ((done("interrupted"), "rank 1 exited"), "error"),
        ((done("interrupted"), done()), "interrupted"),
        ((None, done()), "interrupted"),
    ],
)
def test_the_worst_rank_decides(ends, status):
    cell_result = result(*ends)
    assert cell_result.status == status
    assert cell_result.ok == (status == "ok")


def test_a_rank_that_has_answered_is_not_lost():
    builder = ResultBuilder(1, 5, [0])
    builder.rank_done(0, done())
    builder.rank_lost(0, "rank 0 exited")
    assert builder.build(0.0)[0] == RankOutcome(0, "ok", 0.01)


def test_lost_rank_has_a_description_and_the_time_of_the_cell():
    assert result("rank 0 exited")[0] == RankOutcome(0, "lost", 0.02, loss="rank 0 exited")
    builder = ResultBuilder(1, 5, [0])
    builder.rank_lost(0, "first")
    builder.rank_lost(0, "second")
    assert builder.build(0.0)[0].loss == "first"


def test_successful_cell_raises_nothing():
    result(done(), done()).raise_for_status()


def test_error_is_raised_with_its_original_type():
    cell_result = result(done(), done("error", VALUE), done("error", KEY))
    with pytest.raises(ValueError, match="bad") as caught:
        cell_result.raise_for_status()
    assert isinstance(caught.value, CellError)
    assert caught.value.errors == cell_result.errors == {1: VALUE, 2: KEY}
    assert str(caught.value) == plain(cell_result)


def test_a_lost_rank_comes_before_the_errors_that_it_may_have_caused():
    with pytest.raises(RankLostError, match="rank 1 was killed") as caught:
        result(done("error", VALUE), "rank 1 was killed", "rank 2 was killed").raise_for_status()
    assert caught.value.ranks == (1, 2)
    assert "ValueError: bad" in str(caught.value)


def test_errors_precede_their_consequences_on_other_ranks():
    aborted = ErrorReport(name="CollectiveAborted", value="rank 1 raised", traceback="Trace", plain="Trace")
    cell_result = result(done("error", aborted), done("error", VALUE))
    assert plain(cell_result).splitlines()[::2] == [
        "rank 1: ValueError: bad",
        "rank 0: CollectiveAborted: rank 1 raised",
    ]
    with pytest.raises(ValueError, match="bad"):
        cell_result.raise_for_status()
    with pytest.raises(CollectiveAborted):
        result(done("error", aborted), done("error", aborted)).raise_for_status()


def test_an_interrupt_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt, match="rank 0: KeyboardInterrupt at line 3"):
        result(done("interrupted", interrupt(3)), done()).raise_for_status()


# The story ------------------------------------------------------------------------------------------------------------


def test_successful_cell_has_no_error_text():
    assert plain(result(done(), done())) == ""


def test_every_distinct_error_is_reported_once_with_its_ranks():
    ends = [done("error", VALUE)] * 7 + [done("error", KEY)]
    assert plain(result(*ends)).splitlines() == [
        "ranks 0-6: ValueError: bad",
        "Trace of bad",
        "rank 7: KeyError: 'x'",
        "Trace of x",
    ]


def test_ranks_that_were_fine_are_named_last():
    assert plain(result(done("error", KEY), done(), done())).splitlines()[-1] == ("ranks 1-2 finished without an error")


def test_interrupts_take_a_line_for_every_place():
    ends = [done("interrupted", interrupt(3)), done("interrupted", interrupt(3)), done("interrupted", interrupt(7))]
    assert plain(result(*ends, done("interrupted", interrupt(None)), None)).splitlines() == [
        "ranks 0-1: KeyboardInterrupt at line 3",
        "rank 2: KeyboardInterrupt at line 7",
        "rank 3: KeyboardInterrupt",
        "rank 4: interrupted",
    ]


def test_an_interrupt_names_the_innermost_line_of_the_users_code():
    deep = ErrorReport("KeyboardInterrupt", "", "long", "long", line=3, place="line 12 of cell 5")
    assert plain(result(done("interrupted", deep))).splitlines() == ["rank 0: KeyboardInterrupt at line 12 of cell 5"]


def test_losses_come_first_and_equal_ones_once():
    ends = ["rank 0 was killed", done("error", KEY), "the coordinator failed", "the coordinator failed"]
    assert plain(result(*ends)).splitlines() == [
        "rank 0 was killed",
        "the coordinator failed",
        "rank 1: KeyError: 'x'",
        "Trace of x",
    ]


def test_an_error_without_a_traceback_is_reported_once():
    report = ErrorReport(
        name="InvalidArgument", value="no 'x'", traceback="InvalidArgument: no 'x'", plain="InvalidArgument: no 'x'"
    )
    assert plain(result(done("error", report))) == "rank 0: InvalidArgument: no 'x'"


def test_the_head_of_an_error_is_one_line():
    report = ErrorReport(name="RuntimeError", value="one\ntwo", traceback="t", plain="t")
    empty = ErrorReport(name="StopIteration", value="", traceback="u", plain="u")
    assert plain(result(done("error", report), done("error", empty))).splitlines() == [
        "rank 0: RuntimeError: one",
        "t",
        "rank 1: StopIteration",
        "u",
    ]


def test_equal_memory_tables_are_shown_once():
    reports = [
        ErrorReport(name="MemoryError", value="", traceback="Trace", plain="Trace", memory=memory)
        for memory in ("memory of cpu: full", "memory of cpu: full", "memory of cpu: half")
    ]
    assert plain(result(*(done("error", report) for report in reports))).splitlines() == [
        "ranks 0-2: MemoryError",
        "Trace",
        "ranks 0-1, memory of cpu: full",
        "rank 2, memory of cpu: half",
    ]


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        ("<L object at 0x7f00a{}bb0> is closed", 1),
        ("frame #0: c10::Error::Error(std::string) + 0x98 (0x7f00a{}bb0 in /lib/libc10.so)", 1),
        ("wrong checksum 0x7f00a{}bb0", 2),
    ],
)
def test_errors_are_equal_if_only_addresses_differ(message, texts):
    values = [message.format(rank) for rank in range(2)]
    reports = [ErrorReport(name="OSError", value=value, traceback=value, plain=value) for value in values]
    text = plain(result(*(done("error", report) for report in reports)))
    assert text.count("OSError: ") == texts


def test_an_error_without_a_report_is_reported_all_the_same():
    cell_result = result(done("error"))
    assert plain(cell_result) == "rank 0 failed without reporting an error"
    with pytest.raises(CellError, match="failed without reporting an error"):
        cell_result.raise_for_status()


def test_error_text_is_coloured():
    cell_result = result(done("error", VALUE), done("interrupted", interrupt(1)), "rank 2 exited")
    text = describe_errors(cell_result.outcomes)
    assert "\x1b[31mTrace\x1b[0m of bad" in text
    assert "\x1b[1;31mrank 0: ValueError: bad\x1b[0m" in text
    assert text.count("\x1b[1;31m") == 3


def test_the_rank_that_died_is_named_before_those_that_still_run_because_of_it():
    builder = ResultBuilder(1, 1, (0, 1, 2))
    builder.rank_lost(1, "rank 1 exited with code 1")
    builder.rank_lost(0, "rank 0 still runs", still_running=True)
    builder.rank_done(2, Done(cell=1, status="ok", seconds=0.1))
    cell_result = builder.build(1.0)
    assert describe_errors(cell_result.outcomes, plain=True).splitlines() == [
        "rank 1 exited with code 1",
        "rank 0 still runs",
        "rank 2 finished without an error",
    ]
    assert [outcome.still_running for outcome in cell_result] == [True, False, False]


def test_wrong_results_turn_the_success_of_all_ranks_into_an_error():
    builder = ResultBuilder(1, 1, (0, 1))
    for rank in (0, 1):
        builder.rank_done(rank, Done(cell=1, status="ok", seconds=0.1))
    builder.fail("all_reduce #1: rank 0 gave float32[2], rank 1 float32[3]")
    cell_result = builder.build(1.0)
    assert cell_result.status == "error"
    with pytest.raises(RuntimeError, match=r"^ranks 0-1: RuntimeError: all_reduce #1: rank 0 gave") as caught:
        cell_result.raise_for_status()
    assert isinstance(caught.value, CellError)
