"""Test the output grouped by rank, as a panel sees it that receives only the changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.output import by_rank
from rankbook.output.by_rank import (
    BlockAdded,
    BlockRemoved,
    ByRankOutput,
    Change,
    OutputBlock,
    OutputHeader,
    TextAppended,
)
from rankbook.output.merger import OutputMerger, RichOutput
from rankbook.protocol.messages import Clear, Display, Text


class Reader:
    """Rebuilds the output from the reported changes."""

    def __init__(self, ranks: int = 2) -> None:
        self.blocks: dict[int, OutputBlock] = {}
        self.reported = 0
        self.head = ""
        self.page = ByRankOutput(self.tell, key="k", cluster_key="c")
        self.merger = OutputMerger(range(ranks), key="k", cluster_key="c", view=self.page)

    def tell(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case BlockAdded(piece):
                    self.blocks[piece.key] = piece
                    self.reported += len(piece.text)
                case TextAppended(key, text):
                    self.blocks[key] = replace(self.blocks[key], text=self.blocks[key].text + text)
                    self.reported += len(text)
                case BlockRemoved(key):
                    del self.blocks[key]
                case OutputHeader(bundle):
                    self.head = bundle["text/plain"]

    def add_output(self, rank: int, text: str, now: float = 0.0) -> None:
        self.merger.add_output(rank, Text(cell=1, stream="stdout", data=text.encode()), now)

    def show(self, rank: int, data: dict[str, str], kind: str = "display", name: str | None = None) -> None:
        self.merger.add_output(rank, Display(cell=1, kind=kind, data=data, metadata={}, display_id=name), 0.0)

    def close(self) -> list[tuple[tuple[int, ...], str]]:
        assert self.merger.close(9.0) == []  # nothing is left for the cell's stream
        assert list(self.blocks.values()) == self.page.blocks
        return [(piece.ranks, piece.text) for piece in self.blocks.values()]

    def of(self, rank: int) -> str:
        return "".join(piece.text for piece in self.blocks.values() if rank in piece.ranks and piece.data is None)


def test_equal_output_is_one_block_and_different_output_one_per_rank():
    reader = Reader()
    for rank in (0, 1):
        reader.add_output(rank, "same\n" + "".join(f"{rank}: {line}\n" for line in range(50)) + "again\n")
    assert reader.close() == [
        ((0, 1), "same\n"),
        ((0,), "".join(f"0: {line}\n" for line in range(50))),
        ((1,), "".join(f"1: {line}\n" for line in range(50))),
        ((0, 1), "again\n"),
    ]


LINES = st.lists(st.sampled_from(["same", "one", "two", "three"]), max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LINES, LINES, LINES), max_size=6))
def test_output_of_every_rank_is_complete_and_in_order(turns):
    reader, expected = Reader(3), ["", "", ""]
    for now, turn in enumerate(turns):
        for rank, lines in enumerate(turn):
            text = "".join(f"{line}\n" for line in lines)
            expected[rank] += text
            if text:
                reader.add_output(rank, text, now)
        reader.merger.flush(now + 0.5)
    reader.close()
    assert [reader.of(rank) for rank in range(3)] == expected
    assert reader.reported <= sum(map(len, expected))


def test_text_is_reported_once_per_change():
    reader = Reader(1)
    for turn in range(200):
        reader.add_output(0, f"line {turn}\n", turn)
        reader.merger.flush(turn + 0.5)
    assert reader.close() == [((0,), "".join(f"line {turn}\n" for turn in range(200)))]
    assert reader.reported == sum(len(f"line {turn}\n") for turn in range(200))


def test_display_is_replaced_in_place():
    reader = Reader()
    reader.show(0, {"text/plain": "a"}, name="x")
    reader.show(1, {"text/plain": "b"}, name="x")
    for rank in (0, 1):
        reader.add_output(rank, "below\n")
    reader.show(1, {"text/plain": "c"}, "update", name="x")
    reader.close()
    assert [(piece.ranks, piece.data or piece.text) for piece in reader.blocks.values()] == [
        ((0,), {"text/plain": "a"}),
        ((1,), {"text/plain": "c"}),
        ((0, 1), "below\n"),
    ]


def test_an_update_changes_every_display_of_its_id():
    reader = Reader()
    for rank in (0, 1):
        for text in ("one", "one again"):
            reader.show(rank, {"text/plain": text}, name="twice")
    reader.show(1, {"text/plain": "new"}, "update", name="twice")
    reader.close()
    texts = [(block.ranks[0], block.data["text/plain"]) for block in reader.blocks.values()]
    assert sorted(texts) == [(0, "one"), (0, "one again"), (1, "new"), (1, "new")]


def test_an_update_does_not_carry_out_a_clear():
    reader = Reader()
    reader.show(0, {"text/plain": "start"}, name="steps")
    for step in range(3):
        reader.merger.add_output(0, Clear(cell=1, wait=True), step)
        reader.show(0, {"text/plain": f"step {step}"}, "update", name="steps")
        reader.merger.flush(step + 0.5)
        assert [block.data for block in reader.blocks.values()] == [{"text/plain": f"step {step}"}]
    reader.add_output(0, "new\n", 4.0)
    reader.show(0, {"text/plain": "gone"}, "update", name="steps")
    assert reader.close() == [((0,), "new\n")]


def test_a_display_that_is_shown_again_carries_out_a_clear():
    reader = Reader()
    reader.show(0, {"text/plain": "start"}, name="again")
    reader.merger.add_output(0, Clear(cell=1, wait=True), 0.0)
    reader.show(0, {"text/plain": "anew"}, name="again")
    reader.show(0, {"text/plain": "new"}, "update", name="again")
    reader.close()
    assert [block.data for block in reader.blocks.values()] == [{"text/plain": "new"}]


def test_an_update_of_an_earlier_cells_display_goes_to_that_display():
    earlier, reader = OutputMerger([0, 1], key="earlier", cluster_key="c"), Reader()
    earlier.add_output(1, Display(cell=1, kind="display", data={}, metadata={}, display_id="bar"), 0.0)
    (shown,) = [item for item in earlier.close(9.0) if item.display_id is not None]
    reader.show(1, {"text/plain": "40 %"}, "update", name="bar")
    reader.show(1, {"text/plain": "50 %"}, "update", name="bar")
    updates = reader.merger.flush(1.0)
    assert updates == [RichOutput({"text/plain": "[1] 50 %"}, {}, shown.display_id, update=True)]
    assert reader.close() == []


def test_an_update_of_a_display_that_an_earlier_cells_panel_has_shown_is_shown_again():
    earlier, reader = Reader(), Reader()
    earlier.show(1, {"text/plain": "start"}, name="figure")
    earlier.close()
    reader.show(1, {"text/plain": "40 %"}, "update", name="figure")
    assert reader.merger.flush(1.0) == []
    reader.show(1, {"text/plain": "50 %"}, "update", name="figure")
    reader.show(0, {"text/plain": "of a rank that has not shown it"}, "update", name="figure")
    (unknown,) = reader.merger.flush(2.0)
    assert unknown.update
    reader.close()
    assert [(block.ranks, block.data) for block in reader.blocks.values()] == [((1,), {"text/plain": "50 %"})]


def test_merged_output_shows_a_display_of_an_earlier_cells_panel_again_and_then_updates_it():
    reader = Reader()
    reader.show(1, {"text/plain": "0 %"}, name="merged later")
    reader.merger.flush(1.0)
    reader.close()
    merged = OutputMerger(range(2), key="k", cluster_key="c")
    for is_known in (False, True):
        for rank in (0, 1):
            message = Display(cell=2, kind="update", data={"text/plain": "x"}, metadata={}, display_id="merged later")
            merged.add_output(rank, message, 2.0)
        names = {"rankbook-c-0-merged later": True, "rankbook-c-1-merged later": is_known}
        assert {emit.display_id: emit.update for emit in merged.flush(3.0)} == names


def test_displays_of_earlier_cells_are_forgotten_over_the_limit(monkeypatch):
    monkeypatch.setattr(by_rank, "shown_by_rank", {})
    monkeypatch.setattr(by_rank, "_MAX_DISPLAY_IDS", 10)
    reader = Reader()
    for number in range(25):
        reader.show(0, {}, name=str(number))
    reader.merger.flush(1.0)
    assert len(by_rank.shown_by_rank) <= 10 and ("c", 0, "24") in by_rank.shown_by_rank


def test_progress_bar_is_one_block_until_it_ends():
    reader = Reader()
    for step in range(5):
        for rank in (0, 1):
            reader.add_output(rank, f"\r{rank} at {step}", step)
        reader.merger.flush(step + 0.5)
        assert [(piece.ranks, piece.text, piece.live) for piece in reader.blocks.values()] == [
            ((0,), f"0 at {step}", True),
            ((1,), f"1 at {step}", True),
        ]


@pytest.mark.parametrize("wait", [True, False])
def test_clear_of_one_rank_keeps_the_blocks_of_the_others(wait):
    reader = Reader()
    for rank in (0, 1):
        reader.add_output(rank, f"same\nof {rank}\n")
    reader.merger.flush(1.0)
    reader.merger.add_output(0, Clear(cell=1, wait=wait), 1.0)
    reader.merger.flush(2.0)
    assert reader.of(0) == ("same\nof 0\n" if wait else "")
    reader.add_output(0, "new\n", 2.0)
    reader.close()
    assert (reader.of(0), reader.of(1)) == ("new\n", "same\nof 1\n")


def test_a_bar_of_another_rank_survives_a_clearing_once():
    reader = Reader()
    reader.add_output(0, "\r0 at 1", 0.0)
    reader.add_output(1, "\r1 at 1", 0.0)
    reader.merger.flush(1.0)
    reader.merger.add_output(0, Clear(cell=1, wait=False), 1.0)
    reader.merger.flush(2.0)
    reader.merger.flush(3.0)
    assert [(piece.ranks, piece.text) for piece in reader.blocks.values()] == [((1,), "1 at 1")]


def test_a_bar_of_another_rank_keeps_its_place_at_a_clearing():
    reader = Reader()
    reader.add_output(0, "\r0 at 1", 0.0)
    reader.add_output(1, "\r1 at 1", 0.0)
    reader.merger.flush(1.0)
    reader.add_output(1, "\r1 at 2\nbelow\n", 1.0)
    reader.merger.flush(2.0)
    reader.merger.add_output(0, Clear(cell=1, wait=False), 2.0)
    reader.merger.flush(3.0)
    reader.add_output(0, "\r0 anew", 3.0)
    reader.merger.flush(4.0)
    assert reader.close() == [((1,), "1 at 2"), ((1,), "below\n"), ((0,), "0 anew")]


def test_oldest_output_is_dropped_over_the_limit(monkeypatch):
    monkeypatch.setattr(by_rank, "_MAX_TEXT", 100)
    monkeypatch.setattr(by_rank, "_MAX_BLOCK_TEXT", 30)
    reader = Reader(1)
    for turn in range(20):
        reader.add_output(0, f"{turn:09}\n", turn)
        reader.merger.flush(turn + 0.5)
    reader.close()
    assert reader.of(0).endswith(f"{19:09}\n")
    assert 50 < len(reader.of(0)) <= 100


def test_the_head_is_reported_as_it_changes():
    reader = Reader()
    assert reader.merger.set_header({"text/plain": "one"}, 0.0) == []
    assert reader.head == "one"
