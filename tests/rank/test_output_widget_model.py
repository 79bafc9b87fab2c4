"""Test the outputs of an Output widget after a sequence of events."""

from __future__ import annotations

import pytest

from rankbook.output.merger import ClearOutput, RichOutput, Stream
from rankbook.rank.comms import CUT, MAX_TEXT, Error, OutputWidgetModel, apply_carriage_returns


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def bundle(text, **metadata):
    return {"output_type": "display_data", "data": {"text/plain": text}, "metadata": metadata}


def outputs_after(*events, before=()):
    return OutputWidgetModel().apply(before, events)


def test_text_of_one_stream_is_joined_and_the_order_is_kept():
    events = [Stream("stdout", "a"), Stream("stdout", "b\n"), Stream("stderr", "c"), Stream("stdout", "d")]
    assert outputs_after(*events) == [stream("ab\n"), stream("c", "stderr"), stream("d")]
    assert outputs_after(Stream("stdout", "b"), before=[stream("a")]) == [stream("ab")], (
        "what a person appended is text too"
    )


def test_displays_and_errors_stand_between():
    events = [RichOutput({"text/plain": "x"}, {"a": 1}), Stream("stdout", "y"), Error("ValueError", "no", "one\ntwo")]
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["one", "two"]}
    assert outputs_after(*events) == [bundle("x", a=1), stream("y"), error]


def test_display_is_updated_in_place_until_it_is_cleared():
    captured = OutputWidgetModel()
    before = captured.apply([], [RichOutput({"text/plain": "1"}, {}, "id"), Stream("stdout", "y")])
    assert captured.has_display("id") and not captured.has_display("other") and not captured.has_display(None)
    assert captured.apply(before, [RichOutput({"text/plain": "2"}, {}, "id", update=True)]) == [
        bundle("2"),
        stream("y"),
    ]
    assert captured.apply([stream("z")], [RichOutput({"text/plain": "3"}, {}, "id", update=True)]) == [stream("z")]
    captured.apply([], [ClearOutput(wait=False)])
    assert not captured.has_display("id")


def test_clearing_waits_for_what_comes_in_its_place():
    captured = OutputWidgetModel()
    before = [stream("old")]
    assert captured.apply(before, [ClearOutput(wait=True)]) == before
    assert captured.apply(before, [Stream("stdout", "new")]) == [stream("new")]
    assert captured.apply(before, [Stream("stdout", "er")]) == [stream("older")], "once"
    assert captured.apply(before, [ClearOutput(wait=False)]) == []


@pytest.mark.parametrize(
    ("text", "visible_text"),
    [
        ("no return\n", "no return\n"),
        ("10%\r20%", "20%"),
        ("long one\rshort", "shortone"),
        ("10%\r", "10%\r"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("1\r2\n3\r4", "2\n4"),
        ("\x1b[1mlong\x1b[0m\rx\x1b[0m", "x\x1b[0m"),
    ],
)
def test_a_carriage_return_overwrites(text, visible_text):
    assert apply_carriage_returns(text) == visible_text


def test_a_bar_is_one_line_however_its_text_is_cut():
    captured, outputs = OutputWidgetModel(), []
    for part in ("\r 1%", "\r 2%\r", " 3%", "\n"):
        outputs = captured.apply(outputs, [Stream("stderr", part)])
    assert outputs == [stream(" 3%\n", "stderr")]


def test_a_flood_keeps_its_end_in_whole_lines():
    lines = [f"{number:07}\n" for number in range(MAX_TEXT // 4)]
    (output,) = outputs_after(Stream("stdout", "".join(lines)))
    assert output["text"].startswith(CUT) and output["text"].endswith(lines[-1])
    assert MAX_TEXT - 8 <= len(output["text"]) - len(CUT) <= MAX_TEXT
    assert output["text"].removeprefix(CUT).split("\n")[0] in "".join(lines).split("\n")
    several = [stream("x" * MAX_TEXT), bundle("stays"), stream("y" * 10, "stderr")]
    assert [item.get("name") for item in outputs_after(Stream("stdout", "z\n" * 9), before=several)] == [
        "stdout", None, "stderr", "stdout"
    ]  # fmt: skip
