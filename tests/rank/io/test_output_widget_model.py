"""What stands in an Output after this and that."""

from __future__ import annotations

import pytest

from rankbook.rank.io.output_widget import (
    CUT,
    MOST_TEXT,
    Cleared,
    Displayed,
    Failed,
    OutputWidgetModel,
    Printed,
    Updated,
    overwritten,
)


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def bundle(text, **metadata):
    return {"output_type": "display_data", "data": {"text/plain": text}, "metadata": metadata}


def shown(*events, before=()):
    return OutputWidgetModel().apply(before, events)


def test_text_of_one_stream_is_joined_and_the_order_is_kept():
    events = [Printed("stdout", "a"), Printed("stdout", "b\n"), Printed("stderr", "c"), Printed("stdout", "d")]
    assert shown(*events) == [stream("ab\n"), stream("c", "stderr"), stream("d")]
    assert shown(Printed("stdout", "b"), before=[stream("a")]) == [stream("ab")], "what a person appended is text too"


def test_displays_and_errors_stand_between():
    events = [Displayed({"text/plain": "x"}, {"a": 1}), Printed("stdout", "y"), Failed("ValueError", "no", "one\ntwo")]
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["one", "two"]}
    assert shown(*events) == [bundle("x", a=1), stream("y"), error]


def test_a_display_is_updated_where_it_stands_and_no_longer_once_it_is_gone():
    captured = OutputWidgetModel()
    before = captured.apply([], [Displayed({"text/plain": "1"}, {}, "id"), Printed("stdout", "y")])
    assert captured.knows("id") and not captured.knows("other") and not captured.knows(None)
    assert captured.apply(before, [Updated("id", {"text/plain": "2"}, {})]) == [bundle("2"), stream("y")]
    assert captured.apply([stream("z")], [Updated("id", {"text/plain": "3"}, {})]) == [stream("z")]
    captured.apply([], [Cleared(wait=False)])
    assert not captured.knows("id")


def test_clearing_waits_for_what_comes_in_its_place():
    captured = OutputWidgetModel()
    before = [stream("old")]
    assert captured.apply(before, [Cleared(wait=True)]) == before
    assert captured.apply(before, [Printed("stdout", "new")]) == [stream("new")]
    assert captured.apply(before, [Printed("stdout", "er")]) == [stream("older")], "once"
    assert captured.apply(before, [Cleared(wait=False)]) == []


@pytest.mark.parametrize(
    ("text", "seen"),
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
def test_a_carriage_return_overwrites(text, seen):
    assert overwritten(text) == seen


def test_a_bar_is_one_line_however_its_text_is_cut():
    captured, outputs = OutputWidgetModel(), []
    for part in ("\r 1%", "\r 2%\r", " 3%", "\n"):
        outputs = captured.apply(outputs, [Printed("stderr", part)])
    assert outputs == [stream(" 3%\n", "stderr")]


def test_a_flood_keeps_its_end_in_whole_lines():
    lines = [f"{number:07}\n" for number in range(MOST_TEXT // 4)]
    (kept,) = shown(Printed("stdout", "".join(lines)))
    assert kept["text"].startswith(CUT) and kept["text"].endswith(lines[-1])
    assert MOST_TEXT - 8 <= len(kept["text"]) - len(CUT) <= MOST_TEXT
    assert kept["text"].removeprefix(CUT).split("\n")[0] in "".join(lines).split("\n")
    several = [stream("x" * MOST_TEXT), bundle("stays"), stream("y" * 10, "stderr")]
    assert [each.get("name") for each in shown(Printed("stdout", "z\n" * 9), before=several)] == [
        "stdout", None, "stderr", "stdout"
    ]  # fmt: skip
