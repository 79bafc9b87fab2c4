"""Test what a running cell shows besides the output of its ranks: status header, questions, notes."""

from __future__ import annotations

import pytest

from rankbook.coordinator import running_cell
from rankbook.coordinator.running_cell import InputQuestion, RunningCell
from rankbook.magics.output_panel import TerminalSink
from rankbook.output.merger import ClearOutput, RichOutput, Stream
from rankbook.protocol.messages import Clear, InputRequest, RunCell, Text


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
