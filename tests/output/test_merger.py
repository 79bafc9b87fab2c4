"""Test how the output of several ranks becomes the output of one notebook cell."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.output.merger import ClearOutput, Emit, OutputMerger, RichOutput, Stream
from rankbook.protocol import WIDGET_VIEW
from rankbook.protocol.messages import Clear, Display, OutputBarrier, Text, TextCut

HOLD, AFTER, EVERY = 0.1, 0.3, 0.1


def merger(ranks: int = 2, **options: Any) -> OutputMerger:
    return OutputMerger(range(ranks), key="cell", cluster_key="c", **options)


def text(data: str | bytes, stream: str = "stdout") -> Text:
    return Text(cell=1, stream=stream, data=data.encode() if isinstance(data, str) else data)


def display(data: dict[str, Any], kind: str = "display", display_id: str | None = None, **metadata: Any) -> Display:
    return Display(cell=1, kind=kind, data=data, metadata=metadata, display_id=display_id)


def printed(emits: Iterable[Emit], name: str = "stdout") -> str:
    return "".join(emit.text for emit in emits if isinstance(emit, Stream) and emit.name == name)


def feed_all(output: OutputMerger, *texts: str, now: float = 0.0) -> None:
    for rank, item in enumerate(texts):
        output.add_output(rank, text(item), now)


class Notebook:
    """A cell's output area, as a front end keeps it."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.clear_next = False
        self.emitted = 0

    def show(self, emits: Sequence[Emit]) -> None:
        for emit in emits:
            match emit:
                case Stream(name, text):
                    assert text.endswith("\n")
                    self.emitted += len(text)
                    self._make_room()
                    if self.items and isinstance(self.items[-1], list) and self.items[-1][0] == name:
                        self.items[-1][1] += text
                    else:
                        self.items.append([name, text])
                case RichOutput(data, _, display_id, update=True):
                    self.emitted += len(json.dumps(data))
                    displays = [item for item in self.items if isinstance(item, dict) and item["id"] == display_id]
                    for item in displays:
                        item["data"] = data
                case RichOutput(data, _, display_id):
                    self.emitted += len(json.dumps(data))
                    self._make_room()
                    self.items.append({"id": display_id, "data": data})
                case ClearOutput(wait):
                    self.clear_next = wait
                    if not wait:
                        self.items = []

    def _make_room(self) -> None:
        if self.clear_next:
            self.items, self.clear_next = [], False

    @property
    def lines(self) -> list[str]:
        texts = [
            item[1].removesuffix("\n") if isinstance(item, list) else item["data"].get("text/plain", "")
            for item in self.items
        ]
        return "\n".join(texts).split("\n") if texts else []


def of_ranks(lines: Iterable[str]) -> dict[int, list[str]]:
    """Return the lines of every rank, by their labels."""
    lines_by_rank: dict[int, list[str]] = {}
    for line in lines:
        label, content = re.fullmatch(r"\[([\d,-]+)\](?: (.+))?", line, re.DOTALL).groups()
        for span in label.split(","):
            first, _, last = span.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                lines_by_rank.setdefault(rank, []).append(content or "")
    return lines_by_rank


# Lines ----------------------------------------------------------------------------------------------------------------


def test_a_line_of_all_ranks_shows_once():
    output = merger(4)
    feed_all(output, *["hello\n\nworld\n"] * 4)
    assert output.flush(0.0) == [Stream("stdout", "[0-3] hello\n[0-3]\n[0-3] world\n")]
    assert output.deadline is None


def test_lines_that_differ_show_rank_by_rank_in_turns():
    output = merger(2)
    feed_all(output, "loss 1\nloss 2\n", "loss 3\nloss 4\n")
    assert printed(output.flush(0.0)) == "[0] loss 1\n[1] loss 3\n[0] loss 2\n[1] loss 4\n"


def test_subsets_of_the_ranks_are_grouped():
    output = merger(4)
    feed_all(output, "x\n", "y\n", "x\n", "y\n")
    assert printed(output.flush(0.0)) == "[0,2] x\n[1,3] y\n"


def test_a_single_rank_is_labelled_too():
    output = OutputMerger([3], key="k", cluster_key="c")
    output.add_output(3, text("a\n\n"), 0.0)
    assert printed(output.flush(0.0)) == "[3] a\n[3]\n"


def test_an_extra_line_of_one_rank_does_not_set_the_rest_apart():
    output = merger(3)
    feed_all(output, "a\nrank 0 only\nb\nc\n", "a\nb\nc\n", "a\nb\nc\n")
    assert printed(output.flush(0.0)) == "[0-2] a\n[0] rank 0 only\n[0-2] b\n[0-2] c\n"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_whose_lines_begin_earlier_meets_the_others(late):
    texts = ["b\nc\nd\ne\n", "b\nc\nd\ne\n"]
    texts[1 - late] = "a\n" + texts[1 - late]
    texts[late] += "a\n"
    output = merger(2)
    feed_all(output, *texts)
    text = printed(output.close(0.0))
    assert text == f"[{1 - late}] a\n[0-1] b\n[0-1] c\n[0-1] d\n[0-1] e\n[{late}] a\n"


@pytest.mark.parametrize("more", [0, 1000])
def test_item_beyond_the_look_ahead_is_not_waited_for(more):
    output = merger(2)
    feed_all(output, "done\n" + "own\n" * more, "".join(f"{i}\n" for i in range(500)) + "done\n" + "x\n" * more)
    lines = printed(output.flush(0.0)).split("\n")
    assert lines[:2] == ["[0] done", "[1] 0"]


@pytest.mark.parametrize("before", [1000, 1022, 1023, 1024, 1086, 1087, 1088])
def test_long_stretches_that_differ_end_where_a_common_line_comes(before):
    output = merger(2)
    outputs = ["".join(f"{i} of {rank}\n" for i in range(before + 3 * rank)) for rank in range(2)]
    feed_all(output, outputs[0] + "common\nend\n" * 40, outputs[1] + "common\nend\n" * 40)
    lines = printed(output.flush(0.0)).split("\n")
    assert lines.count("[0-1] common") == 40
    assert len(lines) == 2 * before + 3 + 80 + 1


def test_streams_are_not_mixed_up():
    output = merger(2)
    output.add_output(0, text("x\n"), 0.0)
    output.add_output(1, text("x\n", "stderr"), 0.0)
    assert output.flush(0.0) == [Stream("stdout", "[0] x\n"), Stream("stderr", "[1] x\n")]


def test_one_flush_joins_neighbouring_text():
    output = merger(2)
    for rank in range(2):
        for part in ("a\n", f"own {rank}\n", "b\n"):
            output.add_output(rank, text(part), 0.0)
        output.add_output(rank, text("warn\n", "stderr"), 0.0)
        output.add_output(rank, text("c\n"), 0.0)
    assert output.flush(0.0) == [
        Stream("stdout", "[0-1] a\n[0] own 0\n[1] own 1\n[0-1] b\n"),
        Stream("stderr", "[0-1] warn\n"),
        Stream("stdout", "[0-1] c\n"),
    ]


def test_text_that_differs_on_stderr_takes_turns_as_well():
    output = merger(2)
    for rank in range(2):
        output.add_output(rank, text(f"w{rank}1\nw{rank}2\n", "stderr"), 0.0)
    assert output.flush(0.0) == [Stream("stderr", "[0] w01\n[1] w11\n[0] w02\n[1] w12\n")]


def test_lines_are_whole_wherever_the_chunks_end():
    output = merger(1)
    for byte in "gr\u00fc\u00dfe \U0001f600\n".encode():
        output.add_output(0, text(bytes([byte])), 0.0)
    output.add_output(0, text(b"\xff\xfe\n"), 0.0)
    assert printed(output.flush(0.0)) == "[0] gr\u00fc\u00dfe \U0001f600\n[0] \ufffd\ufffd\n"


def test_carriage_returns_in_what_was_never_live_leave_the_final_text():
    output = merger(2)
    feed_all(output, *[" 10%\r 50%\r100%\ndone\r\n"] * 2)
    assert printed(output.flush(0.0)) == "[0-1] 100%\n[0-1] done\n"


def test_a_cut_is_reported_in_its_place():
    output = merger(2)
    output.add_output(0, text("before"), 0.0)
    output.add_output(0, TextCut(cell=1, lines=9_900_000, size=188_000_000, log="/logs/cell-1.log"), 0.0)
    output.add_output(0, text("after\n"), 0.0)
    output.add_output(1, TextCut(cell=1, lines=1, size=12, log="(no log)"), 0.0)
    assert output.close(0.0) == [
        Stream("stdout", "[0] before\n"),
        Stream(
            "stderr",
            "[1] … 1 line (12 B) left out here; the whole output: (no log)\n"
            "[0] … 9,900,000 lines (188 MB) left out here; the whole output: /logs/cell-1.log\n",
        ),
        Stream("stdout", "[0] after\n"),
    ]


# Waiting --------------------------------------------------------------------------------------------------------------


def test_a_rank_waits_for_the_others_and_merges_with_them():
    output = merger(2)
    output.add_output(0, text("x\n"), 5.0)
    assert output.deadline == pytest.approx(5.0 + HOLD)
    assert output.flush(5.05) == []
    output.add_output(1, text("x\n"), 5.06)
    assert output.deadline <= 5.06
    assert printed(output.flush(5.06)) == "[0-1] x\n"


def test_a_rank_does_not_wait_for_ever():
    output = merger(2)
    output.add_output(0, text("x\n"), 5.0)
    assert printed(output.flush(output.deadline)) == "[0] x\n"
    assert output.deadline is None


def test_only_output_that_has_waited_is_shown():
    output = merger(2)
    output.add_output(0, text("old\n"), 5.0)
    output.add_output(0, text("new\n"), 5.08)
    assert printed(output.flush(5.11)) == "[0] old\n"
    assert output.deadline == pytest.approx(5.18)
    output.add_output(1, text("new\n"), 5.12)
    assert printed(output.flush(5.12)) == "[0-1] new\n"


def test_ranks_with_output_are_merged_without_a_missing_one():
    output = merger(3)
    output.add_output(0, text("x\nonly 0\n"), 5.0)
    output.add_output(1, text("x\n"), 5.09)
    assert printed(output.flush(5.1)) == "[0-1] x\n[0] only 0\n"


def test_lines_before_a_common_line_are_shown_first():
    output = merger(3)
    output.add_output(0, text("x\n"), 5.0)
    output.add_output(1, text("y\nx\n"), 5.09)
    assert printed(output.flush(5.1)) == "[1] y\n[0-1] x\n"


def test_finished_rank_is_not_waited_for():
    output = merger(2)
    output.finish(1, 5.0)
    output.add_output(0, text("x\n"), 5.0)
    assert output.deadline <= 5.0
    assert printed(output.flush(5.0)) == "[0] x\n"


def test_output_of_a_finished_rank_is_merged():
    output = merger(2)
    output.add_output(1, text("x\nhalf"), 5.0)
    output.finish(1, 5.01)
    assert output.flush(5.02) == []
    output.add_output(0, text("x\n"), 5.03)
    assert printed(output.flush(5.03)) == "[0-1] x\n"
    assert printed(output.flush(5.03 + HOLD)) == "[1] half\n"


def test_late_text_of_a_finished_rank_is_shown():
    output = merger(1)
    output.finish(0, 5.0)
    assert output.close(5.0) == []
    output.add_output(0, text("late\nhalf"), 6.0)
    assert printed(output.flush(output.deadline)) == "[0] late\n"
    (rich,) = output.flush(output.deadline)
    assert rich.data == {"text/plain": "[0] half"}


def test_a_rank_far_ahead_is_not_kept_in_memory():
    output = merger(2)
    output.add_output(0, text(b"x" * 99 + b"\n"), 5.0)
    assert output.flush(5.01) == []
    output.add_output(0, text((b"y" * 99 + b"\n") * 50_000), 5.0)
    assert output.deadline <= 5.01
    assert printed(output.flush(5.01)).count("\n") == 50_001
    assert output.deadline is None
    output.add_output(0, text("x\n"), 6.0)
    assert output.deadline == pytest.approx(6.0 + HOLD)


def test_many_small_displays_of_one_rank_are_not_kept_either():
    output, count = merger(2), 0
    for number in range(50_000):
        output.add_output(0, display({"text/plain": str(number)}), 5.0)
        if output.deadline <= 5.0:
            count += len(output.flush(5.0))
    assert count >= 30_000


def test_a_flood_asks_for_few_flushes():
    output = merger(1)
    now, flushes = 5.0, 0
    for number in range(1000):
        now += 0.001
        output.add_output(0, text(f"{number}\n"), now)
        if output.deadline <= now:
            output.flush(now)
            flushes += 1
    assert flushes <= 1.0 / 0.02 + 1
    assert printed(output.close(now)).endswith("[0] 999\n")


def test_draining_a_rank_shows_all_of_it_and_leaves_the_others():
    output = merger(3)
    feed_all(output, "x\nName: ", "x\ny\n", "z\n")
    emits = output.drain_rank(0, 0.0)
    assert printed(emits) == "[0-1] x\n[0] Name: \n"
    output.add_output(0, text("y\n"), 0.01)
    assert printed(output.close(0.02)) == "[0-1] y\n[2] z\n"


def test_close_shows_half_lines():
    output = merger(2)
    feed_all(output, "a\nhalf", "a\nhalf")
    output.add_output(0, text(b"\xe2\x82"), 0.0)
    assert printed(output.close(0.0)) == "[0-1] a\n[0] half\ufffd\n[1] half\n"
    assert output.deadline is None
    assert output.close(0.0) == []


def test_a_cell_without_output_shows_nothing():
    output = merger(2)
    assert output.deadline is None
    assert output.flush(0.0) == []
    output.finish(0, 0.0)
    assert output.drain_rank(1, 0.0) == []
    assert output.close(0.0) == []


# Live lines -----------------------------------------------------------------------------------------------------------


def live(emits: Sequence[Emit]) -> list[tuple[str | None, str, bool]]:
    return [(emit.display_id, emit.data["text/plain"], emit.update) for emit in emits if isinstance(emit, RichOutput)]


def test_progress_bars_are_shown_at_once_and_updated_in_place():
    output = merger(2)
    output.add_output(1, text("\r 40%|###", "stderr"), 5.0)
    assert output.deadline <= 5.0
    assert live(output.flush(5.0)) == [("cell-live-0", "[1]  40%|###", False)]
    output.add_output(0, text("\r 42%|####", "stderr"), 5.01)
    assert output.flush(5.01) == []
    assert output.deadline == pytest.approx(5.0 + EVERY)
    output.add_output(0, text("\r 43%|####", "stderr"), 5.02)
    assert live(output.flush(output.deadline)) == [("cell-live-0", "[0]  43%|####\n[1]  40%|###", True)]
    assert output.deadline is None
    output.add_output(0, text("\r 44%|####", "stderr"), 5.15)
    assert output.deadline == pytest.approx(5.0 + 2 * EVERY)
    assert output.flush(5.15) == []
    assert live(output.flush(output.deadline)) == [("cell-live-0", "[0]  44%|####\n[1]  40%|###", True)]


def test_the_last_state_is_always_sent_and_frozen_not_printed():
    output = merger(1)
    output.add_output(0, text("\r50%"), 5.0)
    output.flush(5.0)
    output.add_output(0, text("\r100%\n"), 5.01)
    assert output.flush(5.01) == []
    assert output.close(5.02) == [RichOutput({"text/plain": "[0] 100%"}, {}, "cell-live-0", update=True)]


def test_a_half_line_gets_time_to_be_completed():
    output = merger(1)
    output.add_output(0, text("loading"), 5.0)
    assert output.flush(5.0) == []
    assert output.deadline == pytest.approx(5.0 + AFTER)
    assert live(output.flush(5.0 + AFTER)) == [("cell-live-0", "[0] loading", False)]
    output.add_output(0, text(" … done\nnext\n"), 5.5)
    emits = output.flush(5.5)
    assert printed(emits) == "[0] next\n"
    assert live(emits) == [("cell-live-0", "[0] loading … done", True)]


def test_a_half_line_completed_in_time_merges_as_any_line():
    output = merger(2)
    feed_all(output, "load", "load", now=5.0)
    output.flush(5.1)
    feed_all(output, "ed\n", "ed\n", now=5.2)
    assert printed(output.flush(5.2)) == "[0-1] loaded\n"


def test_a_line_that_is_returned_at_its_end_is_live():
    output = merger(1)
    output.add_output(0, text("1 of 3\r"), 5.0)
    assert live(output.flush(5.0)) == [("cell-live-0", "[0] 1 of 3", False)]
    output.add_output(0, text("2 of 3\r"), 5.2)
    assert live(output.flush(5.2)) == [("cell-live-0", "[0] 2 of 3", True)]


def test_bar_that_clears_itself_is_removed():
    output = merger(2)
    for rank in range(2):
        output.add_output(rank, text("\r10%"), 5.0)
    output.flush(5.0)
    output.add_output(0, text("\r   \r"), 5.2)
    assert live(output.flush(5.2)) == [("cell-live-0", "[1] 10%", True)]
    output.add_output(0, text("done\n"), 5.3)
    assert printed(output.flush(5.5)) == "[0] done\n"


def test_a_bar_that_is_drawn_again_below_a_message_stays_where_it_is():
    output = merger(1)
    output.add_output(0, text("\r10%", "stderr"), 5.0)
    output.flush(5.0)
    output.add_output(0, text("\r   \r", "stderr"), 5.2)  # as tqdm.write does
    output.add_output(0, text("message\n"), 5.2)
    output.add_output(0, text("\r11%", "stderr"), 5.2)
    assert output.flush(5.2) == [
        Stream("stdout", "[0] message\n"),
        RichOutput({"text/plain": "[0] 11%"}, {}, "cell-live-0", update=True),
    ]


def test_a_new_bar_below_printed_text_opens_a_new_region():
    output = merger(1)
    book = Notebook()
    for epoch in range(2):
        output.add_output(0, text(f"\repoch {epoch}: 10%"), 5.0 + epoch)
        book.show(output.flush(5.0 + epoch))
        output.add_output(0, text(f"\repoch {epoch}: 99%\nloss {epoch}\n"), 5.2 + epoch)
        book.show(output.flush(5.2 + epoch))
    assert book.lines == ["[0] epoch 0: 99%", "[0] loss 0", "[0] epoch 1: 99%", "[0] loss 1"]
    assert [item["id"] for item in book.items if isinstance(item, dict)] == ["cell-live-0", "cell-live-1"]


def test_a_second_bar_joins_the_region_while_another_rank_is_at_its_first():
    output = merger(2)
    book = Notebook()
    for rank in range(2):
        output.add_output(rank, text(f"\ra{rank} 10%"), 5.0)
    book.show(output.flush(5.0))
    output.add_output(0, text("\ra0 99%\nprinted\n"), 5.1)
    book.show(output.flush(5.3))
    output.add_output(0, text("\rb0 10%"), 5.4)
    book.show(output.flush(5.4))
    assert book.lines == ["[0] a0 99%", "[1] a1 10%", "[0] b0 10%", "[0] printed"]


def test_live_region_continues_if_nothing_is_printed_below():
    output = merger(1)
    output.add_output(0, text("\ra 10%"), 5.0)
    output.flush(5.0)
    output.add_output(0, text("\ra 99%\n\rb 10%"), 5.2)
    assert live(output.flush(5.2)) == [("cell-live-0", "[0] a 99%\n[0] b 10%", True)]


def test_a_live_line_comes_after_what_its_rank_printed_before():
    output = merger(2)
    output.add_output(0, text("first\n\r10%"), 5.0)
    assert output.flush(5.0) == []
    emits = output.flush(output.deadline)
    assert [type(emit) for emit in emits] == [Stream, RichOutput]


def test_the_end_of_a_colour_is_no_live_line():
    output = merger(1)
    output.add_output(0, text("\x1b[31mred\n\x1b[0m"), 5.0)
    output.flush(5.0)
    assert output.deadline is None
    assert output.close(6.0) == []


def test_two_streams_of_a_rank_have_a_row_each():
    output = merger(1)
    output.add_output(0, text("\rout"), 5.0)
    output.add_output(0, text("\rerr", "stderr"), 5.0)
    assert live(output.flush(5.0)) == [("cell-live-0", "[0] out\n[0] err", False)]


def test_draining_freezes_a_live_line():
    output = merger(1)
    output.add_output(0, text("\r10%"), 5.0)
    output.flush(5.0)
    output.add_output(0, text("\r20%"), 5.01)
    assert live(output.drain_rank(0, 5.02)) == [("cell-live-0", "[0] 20%", True)]
    output.add_output(0, text("asked\n"), 5.03)
    assert printed(output.flush(5.03)) == "[0] asked\n"


def test_updates_that_change_nothing_are_not_sent():
    output = merger(1)
    output.add_output(0, text("\r10%"), 5.0)
    output.flush(5.0)
    output.add_output(0, text("\r10%"), 5.5)
    assert output.flush(5.5) == []
    assert output.deadline is None


# Displays -------------------------------------------------------------------------------------------------------------


def test_equal_displays_of_all_ranks_show_once():
    output = merger(3)
    for rank in range(3):
        output.add_output(rank, display({"text/plain": "tensor(1)\ntensor(2)"}, "result", a=1), 0.0)
    assert output.flush(0.0) == [RichOutput({"text/plain": "[0-2] tensor(1)\n      tensor(2)"}, {"a": 1})]


def test_displays_that_differ_show_rank_by_rank():
    output = merger(2)
    output.add_output(0, display({"text/plain": "1"}), 0.0)
    output.add_output(1, display({"text/plain": "1"}, other=True), 0.0)
    assert [emit.data["text/plain"] for emit in output.flush(0.0)] == ["[0] 1", "[1] 1"]


def test_html_gets_a_label_before_it():
    output = merger(2)
    for rank in range(2):
        output.add_output(rank, display({"text/html": "<table/>", "text/plain": "a\nb"}), 0.0)
    (emit,) = output.flush(0.0)
    assert isinstance(emit, RichOutput)
    assert emit.data["text/plain"] == "[0-1] a\n      b"
    assert re.fullmatch(r'<div style="font-family:[^"]*monospace[^"]*">\[0-1\]</div><table/>', emit.data["text/html"])


def test_an_image_gets_a_label_of_its_own_where_there_are_several_ranks():
    data = {"image/png": "iVBOR", "text/plain": "<Figure>"}
    for ranks in (1, 2):
        output = merger(ranks)
        for rank in range(ranks):
            output.add_output(rank, display(data), 0.0)
        *label, image = output.flush(0.0)
        assert label == ([RichOutput({"text/plain": "[0-1]"}, {})] if ranks == 2 else [])
        rank_label = "[0-1]" if ranks == 2 else "[0]"
        assert image == RichOutput({"image/png": "iVBOR", "text/plain": f"{rank_label} <Figure>"}, {})


def test_a_chart_that_front_ends_prefer_to_its_html_gets_a_label_of_its_own():
    data = {"application/vnd.plotly.v1+json": {"data": []}, "text/html": "<div/>", "text/plain": "Figure"}
    for ranks in (1, 2):
        output = merger(ranks)
        for rank in range(ranks):
            output.add_output(rank, display(data), 0.0)
        *label, chart = output.flush(0.0)
        assert label == ([RichOutput({"text/plain": "[0-1]"}, {})] if ranks == 2 else [])
        assert isinstance(chart, RichOutput) and (chart.data["text/html"] == "<div/>") == (ranks == 2)


def test_a_display_id_is_the_ranks_own_in_all_cells():
    for key in ("one", "two"):
        output = OutputMerger([0, 2], key=key, cluster_key="77-1")
        for rank in (0, 2):
            output.add_output(rank, display({"text/plain": "x"}, display_id="abc"), 0.0)
        ids = [emit.display_id for emit in output.flush(0.0)]
        assert ids == ["rankbook-77-1-0-abc", "rankbook-77-1-2-abc"]


def test_display_updates_are_neither_merged_nor_labelled_nor_delayed():
    output = merger(2)
    output.add_output(0, display({"image/png": "b"}, "update", "abc"), 5.0)
    assert output.deadline <= 5.0
    assert output.flush(5.0) == [RichOutput({"image/png": "b"}, {}, "rankbook-c-0-abc", update=True)]


def test_only_the_last_update_of_a_flush_is_sent():
    output = merger(1)
    output.add_output(0, display({"text/plain": "0"}, display_id="abc"), 5.0)
    for number in range(1, 100):
        output.add_output(0, display({"text/plain": str(number)}, "update", "abc"), 5.0)
        output.add_output(0, text(f"{number}\n"), 5.0)
    rich, stream, update = output.flush(5.0)
    assert (rich.update, update.update) == (False, True)
    assert update.data == {"text/plain": "[0] 99"}
    assert stream.text.count("\n") == 99


def test_an_update_does_not_outlive_the_display_that_was_shown_again():
    output = merger(1)
    output.add_output(0, display({"text/plain": "old"}, "update", "abc"), 5.0)
    output.add_output(0, display({"text/plain": "new"}, display_id="abc"), 5.0)
    assert output.flush(5.0) == [RichOutput({"text/plain": "[0] new"}, {}, "rankbook-c-0-abc")]


def test_a_half_line_before_a_display_is_a_line():
    output = merger(1)
    output.add_output(0, text("x:"), 5.0)
    output.add_output(0, display({"text/plain": "1"}), 5.0)
    output.add_output(0, text("y\n"), 5.0)
    emits = output.flush(5.0)
    assert [getattr(emit, "text", None) for emit in emits] == ["[0] x:\n", None, "[0] y\n"]


def test_displays_keep_their_place_among_the_lines_of_every_rank():
    output = merger(2)
    for rank in range(2):
        output.add_output(rank, text("before\n"), 0.0)
        output.add_output(rank, display({"text/plain": str(rank)}), 0.0)
        output.add_output(rank, text("after\n"), 0.0)
    book = Notebook()
    book.show(output.flush(0.0))
    assert book.lines == ["[0-1] before", "[0] 0", "[1] 1", "[0-1] after"]


# Clearing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [False, True])
def test_when_all_ranks_clear_the_cell_is_cleared(wait):
    output = merger(2)
    for rank in range(2):
        output.add_output(rank, text(f"{rank}\n"), 0.0)
        output.add_output(rank, Clear(cell=1, wait=wait), 0.0)
        output.add_output(rank, text("new\n"), 0.0)
    assert output.flush(0.0) == [
        Stream("stdout", "[0] 0\n[1] 1\n"),
        ClearOutput(wait),
        Stream("stdout", "[0-1] new\n"),
    ]


@pytest.mark.parametrize("wait", [False, True])
def test_when_one_rank_clears_the_others_output_stays(wait):
    output = merger(3)
    book = Notebook()
    for rank in range(3):
        output.add_output(rank, text("shared\n"), 0.0)
        output.add_output(rank, text(f"own {rank}\n"), 0.0)
        output.add_output(rank, text("warning\n", "stderr"), 0.0)
        output.add_output(rank, display({"image/png": "x"}), 0.0)
    book.show(output.flush(0.0))
    output.add_output(1, Clear(cell=1, wait=wait), 1.0)
    output.add_output(1, text("new\n"), 1.0)
    book.show(output.flush(1.0 + HOLD))
    assert book.lines == [
        "[0,2] shared",
        "[0] own 0",
        "[2] own 2",
        "[0,2] warning",
        "[0,2]",
        "",
        "[1] new",
    ]
    output.add_output(0, Clear(cell=1, wait=wait), 2.0)
    output.add_output(0, text("newer\n"), 2.0)
    book.show(output.flush(2.0 + HOLD))
    assert book.lines == ["[2] shared", "[2] own 2", "[2] warning", "[2]", "", "[1] new", "[0] newer"]


@pytest.mark.parametrize("wait", [False, True])
def test_a_terminal_that_cannot_clear_shows_every_line_once(wait):
    output = merger(can_clear=False)
    output.add_output(1, text("stays\n"), 0.0)
    emits = output.flush(HOLD)
    for step in range(3):
        output.add_output(0, Clear(cell=1, wait=wait), step)
        output.add_output(0, text(f"step {step}\n"), step)
        emits += output.flush(step + HOLD)
    emits += output.close(9.0)
    assert printed(emits).splitlines() == ["[1] stays", "[0] step 0", "[0] step 1", "[0] step 2"]
    assert not any(isinstance(emit, ClearOutput) for emit in emits)


def test_an_animation_of_one_rank_clears_only_when_the_next_picture_is_there():
    output = merger(2)
    book = Notebook()
    output.add_output(1, text("stays\n"), 0.0)
    output.add_output(0, display({"text/plain": "frame 0"}), 0.0)
    book.show(output.flush(0.0))
    for number in range(1, 4):
        output.add_output(0, Clear(cell=1, wait=True), number)
        book.show(output.flush(number + HOLD))
        assert f"[0] frame {number - 1}" in book.lines
        output.add_output(0, display({"text/plain": f"frame {number}"}), number + 0.5)
        book.show(output.flush(number + 0.5 + HOLD))
        assert book.lines == ["[1] stays", f"[0] frame {number}"]


def test_replay_shows_the_last_state_of_a_display():
    output = merger(2)
    book = Notebook()
    output.add_output(1, display({"text/plain": "old"}, display_id="d"), 0.0)
    book.show(output.flush(0.0))
    output.add_output(1, display({"text/plain": "new"}, "update", "d"), 0.0)
    book.show(output.flush(0.0))
    output.add_output(0, Clear(cell=1, wait=False), 1.0)
    book.show(output.flush(2.0))
    assert book.items == [{"id": "rankbook-c-1-d", "data": {"text/plain": "[1] new"}}]
    output.add_output(1, display({"text/plain": "newer"}, "update", "d"), 3.0)
    book.show(output.flush(3.0))
    assert book.lines == ["[1] newer"]


def test_a_widget_whose_model_is_closed_is_not_replayed():
    output = merger(2)
    book = Notebook()
    for model in ("closed", "open"):
        output.add_output(1, display({WIDGET_VIEW: {"model_id": model}, "text/plain": model}), 0.0)
    output.add_output(0, Text(cell=1, stream="stdout", data=b"line\n"), 0.0)
    book.show(output.flush(HOLD + 0.1))
    output.forget_widget("closed")
    output.add_output(0, Clear(cell=1, wait=False), 1.0)
    book.show(output.flush(2.0))
    assert [item["data"][WIDGET_VIEW]["model_id"] for item in book.items if WIDGET_VIEW in item["data"]] == ["open"]


@pytest.mark.parametrize("kind", ["text", "text, line by line", "displays"])
def test_output_that_cannot_be_replayed_is_mentioned(kind):
    output = merger(3)
    book = Notebook()
    for number in range(300):
        output.add_output(
            1, display({"text/plain": str(number)}) if kind == "displays" else text("x" * 2000 + "\n"), 0.0
        )
        if kind == "text, line by line":
            book.show(output.flush(HOLD))
    book.show(output.flush(HOLD))
    output.add_output(2, text("kept\n"), 0.5)
    book.show(output.flush(1.0))
    output.add_output(0, Clear(cell=1, wait=False), 1.0)
    book.show(output.flush(2.0))
    assert book.items[0] == ["stderr", "earlier output of rank 1 was cleared together with that of rank 0\n"]
    assert book.lines[-1] == "[2] kept"
    assert {"text": 70, "text, line by line": 120, "displays": 198}[kind] < len(book.lines) < 203
    output.add_output(0, Clear(cell=1, wait=False), 3.0)
    book.show(output.flush(4.0))
    assert "earlier output" not in "".join(book.lines)


def test_output_that_a_rank_cleared_itself_is_not_mentioned():
    output = merger(2)
    book = Notebook()
    output.add_output(0, text("x" * 2000 + "\n"), 0.0)
    for _ in range(300):
        output.add_output(1, text("x" * 2000 + "\n"), 0.0)
    book.show(output.flush(HOLD))
    output.add_output(1, Clear(cell=1, wait=False), 1.0)
    book.show(output.flush(2.0))
    assert book.lines == ["[0] " + "x" * 2000]


def test_many_lines_that_come_one_by_one_are_replayed():
    output = merger(2)
    book = Notebook()
    for number in range(1000):
        output.add_output(0, text(f"a{number}\n"), number)
        output.add_output(1, text(f"b{number}\n"), number)
        book.show(output.flush(number))
    output.add_output(0, Clear(cell=1, wait=False), 2000.0)
    book.show(output.flush(2001.0))
    assert book.lines == [f"[1] b{number}" for number in range(1000)]


def test_live_lines_are_shown_afresh_below_what_is_replayed():
    output = merger(2)
    book = Notebook()
    output.add_output(1, text("printed\n\ra 10%", "stderr"), 0.0)
    output.add_output(0, text("\rmine 10%"), 0.0)
    book.show(output.flush(HOLD))
    output.add_output(1, text("\ra 99%\n\rb 10%", "stderr"), 0.5)
    book.show(output.flush(0.5))
    assert book.lines == ["[1] printed", "[0] mine 10%", "[1] a 99%", "[1] b 10%"]
    output.add_output(0, Clear(cell=1, wait=False), 1.0)
    output.add_output(0, text("\rmine 50%"), 1.0)
    book.show(output.flush(1.0 + HOLD))
    book.show(output.flush(1.0 + HOLD + EVERY))
    assert book.lines == ["[1] printed", "[0] mine 50%", "[1] a 99%", "[1] b 10%"]
    assert {item["id"] for item in book.items if isinstance(item, dict)} == {"cell-live-1"}
    output.add_output(1, text("\rb 20%", "stderr"), 2.0)
    book.show(output.flush(2.0))
    assert book.lines[-1] == "[1] b 20%"


def clear_around(output: OutputMerger, by: str, now: float) -> list[Emit]:
    """Clear the cell and show it again, for the status header or for a clear of rank 1, which has no output."""
    if by == "header":
        return output.set_header({"text/plain": "running"}, now)
    output.add_output(1, Clear(cell=1, wait=False), now)
    return output.flush(now + HOLD)


@pytest.mark.parametrize("by", ["header", "another rank"])
def test_a_half_line_keeps_its_place_when_the_cell_is_cleared(by):
    output = merger(2)
    book = Notebook()
    for start, piece in enumerate(["Loading... ", "done\n", "next line\n"]):
        output.add_output(0, text(piece), 0.3 * start)
        book.show(output.flush(0.3 * start + AFTER))
    before = book.lines
    assert before == ["[0] Loading... done", "[0] next line"]
    book.show(clear_around(output, by, 1.0))
    book.show(output.close(2.0))
    assert book.lines == (["running", *before] if by == "header" else before)


@pytest.mark.parametrize("by", ["header", "another rank"])
def test_finished_bars_keep_their_places_among_the_lines(by):
    output = merger(2)
    book = Notebook()
    for epoch in range(3):
        for piece in (f"\rbar {epoch}  50%", f"\rbar {epoch} 100%\n"):
            output.add_output(0, text(piece, "stderr"), 0.2 * epoch)
            book.show(output.flush(0.2 * epoch))
        output.add_output(0, text(f"loss {epoch}\n"), 0.2 * epoch)
        book.show(output.flush(0.2 * epoch + HOLD))
    before = [line for epoch in range(3) for line in (f"[0] bar {epoch} 100%", f"[0] loss {epoch}")]
    assert book.lines == before
    for now in (1.0, 2.0):  # what was shown again keeps its place the next time too
        book.show(clear_around(output, by, now))
    book.show(output.close(3.0))
    assert book.lines == (["running", *before] if by == "header" else before)


def test_a_bar_that_is_shown_again_goes_on_in_its_place():
    output = merger(2)
    book = Notebook()
    for piece in ("\router 0%", "\n\rinner 0%"):
        output.add_output(0, text(piece, "stderr"), 0.0)
        book.show(output.flush(output.deadline))
    output.add_output(0, text("printed\n"), 0.5)
    book.show(output.flush(0.5 + HOLD))
    book.show(clear_around(output, "header", 1.0))
    output.add_output(0, text("\x1b[A\router 50%\n", "stderr"), 1.2)
    book.show(output.flush(1.2))
    assert book.lines == ["running", "[0] outer 50%", "[0] inner 0%", "[0] printed"]
    output.add_output(0, text("\rinner 100%\n", "stderr"), 1.4)
    book.show(output.close(1.4))
    assert book.lines == ["running", "[0] outer 50%", "[0] inner 100%", "[0] printed"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_bar_above_more_than_the_record_holds(ends):
    output = merger(3)
    book = Notebook()
    output.add_output(0, text("\rbar 10%", "stderr"), 0.0)
    book.show(output.flush(0.0))
    for number in range(300):
        output.add_output(2, display({"text/plain": str(number)}), 0.0)
    book.show(output.flush(HOLD))
    if ends:
        for piece in ("\n", "line\n", "\rnext"):
            output.add_output(0, text(piece, "stderr"), 0.5)
            book.show(output.flush(0.5 + HOLD))
    book.show(clear_around(output, "another rank", 1.0))
    note, first, *_, last = book.lines
    cleared = "ranks 0,2" if ends else "rank 2"
    assert note == f"earlier output of {cleared} was cleared together with that of rank 1"
    assert "[0] bar 10%" not in book.lines[2:]
    if ends:
        assert last == "[0] next"
    else:
        assert (first, last) == ("[0] bar 10%", "[2] 299")


@pytest.mark.parametrize(
    ("stream", "width", "fewest", "most"), [("stdout", 0, 600, 600), ("stderr", 0, 190, 200), ("stdout", 900, 450, 583)]
)
def test_many_bars_between_lines_are_replayed_up_to_the_limits(stream, width, fewest, most):
    output = merger(2)
    book = Notebook()
    expected = []
    for number in range(300):
        for piece in (f"\rbar {number:<{width}}.", "\n"):
            output.add_output(0, text(piece, stream), number)
            book.show(output.flush(number + 0.5))
        output.add_output(0, text(f"line {number}\n"), number + 0.5)
        book.show(output.flush(number + 0.5 + HOLD))
        expected += [f"[0] bar {number:<{width}}.", f"[0] line {number}"]
    assert book.lines == expected
    book.show(clear_around(output, "another rank", 400.0))
    replayed = [line for line in book.lines if line.startswith("[0]")]
    assert fewest <= len(replayed) <= most
    assert replayed == expected[-len(replayed) :]


def test_rows_of_regions_long_past_survive_another_ranks_clearing():
    output = merger(2)
    book = Notebook()
    for number in range(50):
        output.add_output(1, text(f"\rbar {number}", "stderr"), number)
        book.show(output.flush(number))
        output.add_output(1, text("\n", "stderr"), number + 0.5)
        book.show(output.flush(number + 0.5))
    output.add_output(0, Clear(cell=1, wait=False), 60.0)
    book.show(output.flush(61.0))
    assert book.lines == [f"[1] bar {number}" for number in range(50)]


def test_a_live_line_is_something_new_that_a_waiting_clear_makes_room_for():
    output = merger(1)
    book = Notebook()
    output.add_output(0, text("old\n"), 0.0)
    output.add_output(0, Clear(cell=1, wait=True), 0.0)
    book.show(output.flush(0.0))
    assert book.lines == ["[0] old"]
    output.add_output(0, text("\r10%"), 1.0)
    book.show(output.flush(1.0))
    assert book.lines == ["[0] 10%"]


def test_unfinished_row_is_cleared_with_the_rest():
    output = merger(1)
    book = Notebook()
    output.add_output(0, text("half"), 0.0)
    output.add_output(0, Clear(cell=1, wait=False), 0.1)
    output.add_output(0, text(" a line\n"), 0.1)
    book.show(output.flush(0.1))
    assert book.lines == ["[0]  a line"]


# Whatever happens -----------------------------------------------------------------------------------------------------

LINE = st.sampled_from(["", " ", "a", "a", "b", "step 1", "[0] x", "grüße 😀", "x" * 50])
RANK = st.lists(st.tuples(st.sampled_from(["stdout", "stdout", "stderr"]), LINE), max_size=30)


def run(ranks, seed, *, returns: bool = False, **options):
    """Feed the ranks' lines in random chunks in random order; return the notebook's text and what was printed."""
    dice = random.Random(seed)
    output, book, now = merger(len(ranks), **options), Notebook(), 0.0
    waiting = {}
    for rank, lines in enumerate(ranks):
        waiting[rank] = []
        for stream, line in lines:
            data = (f"\r{line}\r{line}\n" if returns and dice.random() < 0.5 else f"{line}\n").encode()
            while data:
                size = dice.choice([1, 3, len(data)])
                waiting[rank].append((stream, data[:size]))
                data = data[size:]
    while waiting:
        rank = dice.choice(list(waiting))
        for _ in range(dice.randrange(20)):
            if waiting[rank]:
                stream, data = waiting[rank].pop(0)
                output.add_output(rank, text(data, stream), now)
        if not waiting[rank]:
            del waiting[rank]
            if dice.random() < 0.5:
                output.finish(rank, now)
        now += dice.choice([0.0, 0.001, 0.03, 0.2])
        if not returns and dice.random() < 0.1:
            book.show(output.drain_rank(rank, now))
        if output.deadline is not None and output.deadline <= now:
            book.show(output.flush(now))
            assert output.deadline is None or output.deadline > now
    while output.deadline is not None:  # nothing more comes: the deadlines alone bring out what is left
        now = max(now, output.deadline)
        book.show(output.flush(now))
        assert output.deadline is None or output.deadline > now
    return output, book, now


def test_what_comes_before_a_barrier_is_shown_before_what_comes_after_it():
    output = merger(3)

    def mark(rank, name, now=0.0):
        output.add_output(rank, OutputBarrier(cell=1, name=name), now)

    feed_all(output, "a\n", "one\ntwo\nthree\nb\n")
    for name in ("0", "1"):
        for rank in (2, 0, 1):
            mark(rank, name)
    feed_all(output, "", "", "c\n")
    assert printed(output.flush(HOLD)) == "[0] a\n[1] one\n[1] two\n[1] three\n[1] b\n[2] c\n"
    mark(0, "2", 1.0)  # which no other rank has
    output.add_output(0, text("d\n"), 1.0)
    assert printed(output.flush(1.0)) == ""
    assert output.deadline == 1.0 + HOLD
    assert printed(output.flush(1.0 + HOLD)) == "[0] d\n"
    mark(1, "3", 2.0)
    assert output.close(2.0) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(RANK, min_size=1, max_size=4), st.integers(0, 2**32))
def test_every_line_of_every_rank_is_shown_once_and_in_order(ranks, seed):
    ranks = [[(stream, line.encode("ascii", "ignore").decode()) for stream, line in lines] for lines in ranks]
    output, book, now = run(ranks, seed, live_after=1e9)
    lines_by_rank = of_ranks(book.lines)
    # a rank that is drained in the midst of a line has two lines of it: compare the text
    assert {rank: "".join(lines) for rank, lines in lines_by_rank.items() if any(lines)} == {
        rank: "".join(line for _, line in lines) for rank, lines in enumerate(ranks) if any(line for _, line in lines)
    }
    assert output.close(now) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(RANK, min_size=1, max_size=4), st.integers(0, 2**32))
def test_lines_recovered_from_the_labels_are_exactly_the_lines(ranks, seed):
    ranks = [[("stdout", line) for _, line in lines] for lines in ranks]
    dice = random.Random(seed)
    output, book, now = merger(len(ranks), live_after=1e9), Notebook(), 0.0
    data = ["".join(f"{line}\n" for _, line in lines).encode() for lines in ranks]
    while any(data):
        rank = dice.choice([rank for rank, remaining in enumerate(data) if remaining])
        size = dice.choice([1, 5, 40, len(data[rank])])
        output.add_output(rank, text(data[rank][:size]), now)
        data[rank] = data[rank][size:]
        now += dice.choice([0.0, 0.05])
        if dice.random() < 0.5:
            book.show(output.flush(now))
    book.show(output.close(now))
    assert of_ranks(book.lines) == {rank: [line for _, line in lines] for rank, lines in enumerate(ranks) if lines}


@settings(max_examples=300, deadline=None)
@given(st.lists(RANK, min_size=1, max_size=3), st.integers(0, 2**32))
def test_lines_between_live_rows_are_kept(ranks, seed):
    ranks = [[(stream, line.strip() or "q") for stream, line in lines] for lines in ranks]
    output, book, now = run(ranks, seed, returns=True, live_after=0.02)
    book.show(output.close(now))
    lines_by_rank = {rank: sorted("".join(lines)) for rank, lines in of_ranks(book.lines).items()}
    assert lines_by_rank == {
        rank: sorted("".join(line for _, line in lines)) for rank, lines in enumerate(ranks) if lines
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(LINE, max_size=20), min_size=2, max_size=3), st.integers(0, 2**32))
def test_clearing_leaves_exactly_what_every_rank_printed_since(ranks, seed):
    dice = random.Random(seed)
    output, book, now = merger(len(ranks), live_after=1e9), Notebook(), 0.0
    expected = {rank: [] for rank in range(len(ranks))}
    for _ in range(40):
        rank = dice.randrange(len(ranks))
        if dice.random() < 0.15:
            output.add_output(rank, Clear(cell=1, wait=dice.random() < 0.5), now)
            expected[rank] = []
        elif ranks[rank]:
            line = ranks[rank].pop()
            output.add_output(rank, text(f"{line}\n"), now)
            expected[rank].append(line)
        now += dice.choice([0.0, 0.05])
        book.show(output.flush(now))
    for rank, lines in expected.items():
        output.add_output(rank, text("end\n"), now)  # for whoever cleared with `wait` and has printed nothing since
        lines.append("end")
    book.show(output.close(now))
    assert of_ranks(book.lines) == {rank: lines for rank, lines in expected.items() if lines}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**32))
def test_rows_shown_live_stay_in_order_whatever_clears_the_cell(count, seed):
    dice = random.Random(seed)
    output, book, now = merger(2), Notebook(), 0.0
    lines = [f"line {number}" for number in range(count)]
    for line in lines:
        # In one piece, as a half line, or as a bar that is rewritten.
        for piece in dice.choice([[f"{line}\n"], [line[:3], f"{line[3:]}\n"], ["\rbar", f"\r{line}", "\n"]]):
            output.add_output(0, text(piece), now)
            if dice.random() < 0.2:
                output.add_output(1, text("other\n"), now)
            if dice.random() < 0.2:
                output.add_output(1, Clear(cell=1, wait=dice.random() < 0.5), now)
            if dice.random() < 0.2:
                book.show(output.set_header({"text/plain": "[2] running"}, now))
            now += dice.choice([0.0, 0.05, 0.15, 0.4])
            book.show(output.flush(now))
    book.show(output.close(now))
    assert of_ranks(book.lines)[0] == lines


def lines_around_clears(seed: int, *, clears: bool) -> list[str]:
    """Return what two ranks show of random output, with or without clears that remove nothing of theirs."""
    dice, clear_dice = random.Random(seed), random.Random(seed + 1)
    output, book, now = merger(3), Notebook(), 0.0
    for number in range(dice.randrange(60)):
        rank, stream = dice.randrange(2), dice.choice(["stdout", "stderr"])
        pieces = [f"line {number}\n", f"half {number}", "\n", f"\rbar {number}", f"\rbar {number}\n", "\x1b[A\rup"]
        piece = dice.choice([*pieces, None])
        message = display({"text/plain": f"display {number}"}) if piece is None else text(piece, stream)
        output.add_output(rank, message, now)
        now += dice.choice([0.11, 0.2, 0.45])
        book.show(output.flush(now))
        if clears and clear_dice.random() < 0.3:
            book.show(output.set_header({"text/plain": "[2] running"}, now))
        if clears and clear_dice.random() < 0.2:
            output.add_output(2, Clear(cell=1, wait=False), now)
        now += HOLD
        book.show(output.flush(now))
    book.show(output.close(now))
    return [line for line in book.lines if line not in ("", "[2] running")]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_shown_again_is_in_the_order_that_it_had(seed):
    assert lines_around_clears(seed, clears=True) == lines_around_clears(seed, clears=False)


@pytest.mark.parametrize("kind", ["equal", "apart", "mixed"])
def test_messages_are_hardly_larger_than_the_output(kind):
    book, output, now, size = Notebook(), merger(4), 0.0, 0
    for number in range(4000):
        for rank in range(4):
            is_distinct = kind == "apart" or (kind == "mixed" and number % 3 == 0)
            line = f"step {number:06} loss 0.123456789" + (f" on {rank}" if is_distinct else " everywhere") + "\n"
            output.add_output(rank, text(line), now)
            size += len(line)
        now += 0.001
        if output.deadline <= now:
            book.show(output.flush(now))
    book.show(output.close(now))
    assert len(of_ranks(book.lines)[3]) == 4000
    assert book.emitted <= 1.5 * size


def test_many_bars_one_after_the_other_send_little_more_than_they_print():
    book, output, now, size = Notebook(), merger(2), 0.0, 0
    for epoch in range(50):
        for percent in range(0, 101, 10):
            for rank in range(2):
                bar = f"\repoch {epoch}: {percent:3}%|{'#' * (percent // 2):50}|" + "\n" * (percent == 100)
                output.add_output(rank, text(bar, "stderr"), now)
                size += len(bar)
            now += EVERY
            book.show(output.flush(now))
    book.show(output.close(now))
    assert [len(lines) for lines in of_ranks(book.lines).values()] == [50, 50]
    assert book.emitted <= 4 * size
