"""Test what a running cell shows besides the output of its ranks: status header, questions, notes."""

from __future__ import annotations

import io
import re
import sys

import pytest

from rankbook.coordinator import running_cell
from rankbook.coordinator.running_cell import InputQuestion, RunningCell
from rankbook.magics.output_panel import TerminalSink
from rankbook.output.by_rank import ByRankOutput
from rankbook.output.merger import ClearOutput, RichOutput, Stream
from rankbook.protocol.messages import (
    MAX_CELL_OUTPUT,
    CallFunction,
    Clear,
    Done,
    InputRequest,
    Payload,
    RunCell,
    Text,
)


class Keeper:
    """A sink that keeps what it is given, and a status header that is always the same."""

    def __init__(self) -> None:
        self.items: list[object] = []

    def emit(self, items) -> None:
        self.items += items

    def current_bundle(self):
        return {"text/plain": "status"}


@pytest.fixture
def run_cell(monkeypatch):
    """Start a cell that has printed a line and whose status header is due at the next flush."""
    monkeypatch.setattr(running_cell, "HEADER_DELAY", 0.0)

    def run(**options):
        keeper = Keeper()
        tasks = {0: (RunCell(cell=1, source="", number=3), ())}
        cell = RunningCell(1, 3, tasks, cluster_key="c", sink=keeper, make_header=lambda _: keeper, **options)
        cell.add_output(0, Text(cell=1, stream="stdout", data=b"first\n"))
        cell.flush()
        cell.start()
        return cell, keeper

    return run


FIRST, HEADER = Stream("stdout", "[0] first\n"), RichOutput({"text/plain": "status"}, {}, "c-1-head")


def test_header_is_placed_above_the_output_of_the_ranks(run_cell):
    cell, keeper = run_cell()
    cell.flush()
    assert keeper.items == [FIRST, ClearOutput(wait=True), HEADER, FIRST]


def test_a_terminal_shows_a_line_once_although_another_rank_clears(capsys):
    tasks = {rank: (RunCell(cell=1, source="", number=3), ()) for rank in range(2)}
    cell = RunningCell(1, 3, tasks, cluster_key="c", sink=TerminalSink())
    cell.add_output(0, Text(cell=1, stream="stdout", data=b"first\n"))
    cell.rank_lost(0, "")
    cell.add_output(1, Clear(cell=1, wait=False))
    cell.end(())
    assert capsys.readouterr().out == "[0] first\n"


class Screen(io.StringIO):
    """A terminal, whose `lines` are what it shows in the end."""

    def isatty(self):
        return True

    @property
    def lines(self):
        lines = [""]
        for up, end, text in re.findall(r"\x1b\[(\d+)F\x1b\[J|(\n)|([^\x1b\n]+)", self.getvalue()):
            if up:
                lines[-int(up) - 1 :] = [""]
            elif end:
                lines.append("")
            else:
                lines[-1] += text
        return lines


def run_bar(sink):
    """Run a cell with a bar of two ranks and a line of text between, as its output is flushed every 0.1 s."""
    tasks = {rank: (RunCell(cell=1, source="", number=3), ()) for rank in range(2)}
    cell = RunningCell(1, 3, tasks, cluster_key="c", sink=sink)
    for percent in range(0, 101, 10):
        for rank in range(2):
            cell.add_output(rank, Text(cell=1, stream="stderr", data=f"\r{percent:3}%".encode()))
            if percent == 50:
                cell.add_output(rank, Text(cell=1, stream="stdout", data=b"halfway\n"))
        cell._merger._view.live.next_update = 0.0
        cell.flush()
    for rank in range(2):
        cell.rank_done(rank, Done(cell=1, status="ok", seconds=0.1), [])
    cell.end(())


def test_a_bar_is_written_once_to_a_file(capsys):
    run_bar(TerminalSink())
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[0-1] halfway\n", "[0-1] 100%\n")


def test_a_bar_is_rewritten_in_place_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    run_bar(TerminalSink())
    # What is above other output stays as it was.
    assert screen.lines == ["[0]  40%", "[1]  40%", "[0-1] halfway", "[0] 100%", "[1] 100%", ""]
    assert screen.getvalue().count("\x1b[2F\x1b[J") == 9


def test_rows_longer_than_the_terminal_are_erased_whole(monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    monkeypatch.setenv("COLUMNS", "10")
    sink = TerminalSink()
    for text in ("\x1b[31mten digits\x1b[0m\neleven more", "done"):
        sink.emit([RichOutput({"text/plain": text}, {}, "bar", update=True)])
    assert "\x1b[3F\x1b[J" in screen.getvalue()


def test_a_background_cell_moves_no_cursor_of_the_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    monkeypatch.setattr(sys, "stderr", screen)
    run_bar(TerminalSink(owns_cursor=False))
    assert screen.getvalue() == "[0-1] halfway\n[0-1] 100%\n"


def test_header_clears_no_open_question_and_no_answer(run_cell):
    cell, keeper = run_cell()
    cell.ask(0, InputRequest(cell=1, prompt="lr? ", password=False))
    assert isinstance(cell.inbox.get_nowait(), InputQuestion)
    cell.flush()
    assert keeper.items == [FIRST, HEADER]


def test_header_clears_no_note(run_cell):
    cell, keeper = run_cell()
    cell.note("a note\n")
    cell.flush()
    assert keeper.items == [FIRST, Stream("stderr", "a note\n"), HEADER]


def test_header_clears_no_report_of_output_that_cannot_be_shown(run_cell, monkeypatch):
    cell, keeper = run_cell()
    monkeypatch.setattr(running_cell.sys, "excepthook", lambda *_: None)
    cell._report_unshown(ValueError("x"))
    cell.flush()
    assert [type(item) for item in keeper.items] == [Stream, Stream, RichOutput]


def test_header_clears_nothing_that_the_notebook_showed_before(run_cell):
    cell, keeper = run_cell(has_other_output=True)
    cell.flush()
    assert keeper.items == [FIRST, HEADER]


def test_the_ranks_are_limited_together_in_a_view_by_rank_too():
    tasks = {rank: (RunCell(cell=1, source="", number=3), ()) for rank in range(2)}
    view = ByRankOutput(lambda _: None, key="k")
    cell = RunningCell(1, 3, tasks, cluster_key="c", sink=Keeper(), view=view)
    for number in range(4):
        assert cell.take_flood() == ()
        for rank in range(2):
            line = f"{rank} {number} ".encode() + b"." * (MAX_CELL_OUTPUT // 8) + b"\n"
            cell.add_output(rank, Text(cell=1, stream="stdout", data=line))
        cell.flush()
    assert cell.take_flood() == (0, 1)
    assert cell.take_flood() == ()


@pytest.mark.parametrize("is_users", [True, False])
def test_a_call_of_the_user_may_define_variables_and_one_of_the_number_watch_does_not(is_users):
    call = CallFunction(cell=1, payload=Payload(()), defines_variables=is_users)
    assert RunningCell(1, 0, {0: (call, ())}, cluster_key="c", sink=None).defines_variables is is_users
