"""Test how bytes become lines, and rows what a terminal shows."""

from __future__ import annotations

import codecs
import io
import re
import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tqdm import tqdm

from rankbook.output.terminal import MAX_LIVE_WIDTH, LiveDisplays, TerminalStream


def terminal(text: str) -> list[str]:
    """Return the rows of a terminal of unlimited width: a grid, written one character at a time."""
    rows: list[list[str]] = [[]]
    y = x = 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|.", text, re.DOTALL):
        if token == "\n":
            y, x = y + 1, 0
            if y == len(rows):
                rows.append([])
        elif token == "\r":
            x = 0
        elif token == "\b":
            x = max(0, x - 1)
        elif token == "\x1b[A":
            y, x = max(0, y - 1), 0
        elif token == "\x1b[K":
            del rows[y][x:]
        elif token == "\x1b[2K":
            rows[y].clear()
        elif token.startswith("\x1b"):
            continue
        else:
            rows[y] += [" "] * (x - len(rows[y]))
            rows[y][x : x + 1] = [token]
            x += 1
    return ["".join(row).rstrip() for row in rows]


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def lines_of(screen: TerminalStream, chunks: list[bytes]) -> list[str]:
    blocks = [screen.process(chunk, 0.0) for chunk in chunks] + [screen.end(0.0)]
    return [line for block in blocks if block is not None for line in block.split("\n")]


def plain(lines: list[str]) -> list[str]:
    """Return the text without colours, and without blanks and empty rows at the end."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in lines]
    while rows and not rows[-1]:
        rows.pop()
    return rows


@given(st.lists(st.text(st.characters(exclude_characters="\n\r\b\x1b"))), st.lists(st.integers(0, 10_000)))
def test_plain_lines_come_out_as_they_went_in_wherever_the_chunks_end(lines, cuts):
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    screen = TerminalStream(0, "stdout")
    expected = [line.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for line in lines]
    assert lines_of(screen, chunked(data, cuts)) == expected


@given(st.binary(), st.lists(st.integers(0, 10_000)))
def test_any_bytes_in_any_chunks_give_the_same_text(data, cuts):
    data = re.sub(rb"[\x1b\r\b]", b"?", data)
    expected = data.decode("utf-8", "replace").split("\n")
    assert lines_of(TerminalStream(0, "stdout"), chunked(data, cuts)) == expected[: None if expected[-1] else -1]


@given(
    st.lists(
        st.sampled_from(
            ["\r", "\n", "\b", "\x1b[K", "\r\x1b[2K", "\x1b[31m", "\x1b[m", " ", "   ", "a", "bc", "défg", "█" * 9]
        )
    ),
    st.lists(st.integers(0, 10_000)),
)
@example(["\r\x1b[2K", "a", "\r\x1b[2K", "bc"], [])
def test_rows_that_are_overwritten_show_what_a_terminal_shows(tokens, cuts):
    text = "".join(tokens)
    result = lines_of(TerminalStream(0, "stdout"), chunked(text.encode(), cuts))
    assert plain(result) == plain(terminal(text))


@given(st.lists(st.sampled_from(["\r", "\n", "\n", "\x1b[A", "\x1b[K", "\x1b[32m", "a", "bcd", "  ", "efghij"])))
def test_the_cursor_goes_up_as_in_a_terminal(tokens):
    text = "".join(tokens)
    assert plain(lines_of(TerminalStream(0, "stdout"), [text.encode()])) == plain(terminal(text))


@pytest.mark.parametrize("position", [1, 2, 5])
def test_a_bar_that_stands_some_rows_below_the_cursor_is_one_row(position):
    # As tqdm(position=...) draws it: each part in a chunk of its own.
    stream, lines = TerminalStream(0, "stderr"), []
    for number in range(20):
        for part in ("\n" * position, "\r", f"bar {number}", "\x1b[A" * position):
            block = stream.process(part.encode(), float(number))
            lines += [] if block is None else block.split("\n")
    assert lines == [""] * position  # the first time, nobody can know that the cursor comes back
    assert [row.text for row in stream.hidden_rows()] == ["bar 19"]
    assert lines_of(stream, [b"done\n"]) == ["done", "bar 19"]


def test_rows_between_which_the_cursor_moves_are_printed_once_when_other_text_follows():
    stream, lines = TerminalStream(0, "stdout"), []
    for number in range(3):  # as rich draws two bars
        lines += [
            stream.process(part.encode(), 0.0) for part in (f"one {number}\ntwo {number}", "\r\x1b[2K\x1b[A\x1b[2K")
        ]
    lines += [stream.process(part.encode(), 0.0) for part in ("one 3\n", "two 3\n", "three\n")]
    assert [line for line in lines if line is not None] == ["one 0", "one 3\ntwo 3\nthree"]
    assert not stream.hidden_rows() and stream.end(0.0) is None


def test_rows_that_the_cursor_has_left_come_before_other_output():
    stream = TerminalStream(0, "stdout")
    assert [stream.process(part, 0.0) for part in (b"start\n", b"\x1b[A\x1b[2Kdone\n")] == ["start", None]
    assert stream.end_plain_line() == "done"
    assert lines_of(stream, [b"after\n"]) == ["after"]
    for part in (b"\n\n", b"\rbar", b"\x1b[A\x1b[A"):
        stream.process(part, 0.0)
    assert stream.end_plain_line() is None and [row.text for row in stream.hidden_rows()] == ["bar"]


def test_a_line_that_other_output_ends_takes_the_kept_rows_above_it_along():
    stream = TerminalStream(0, "stdout")
    for part in ("a\nb", "\x1b[A", "c\n", "\n", "plain"):
        last = stream.process(part.encode(), 0.0)
    assert last is None and stream.end_plain_line() == "c\nb\nplain"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\r\n", ["a", "b"]),
        (" 10%|#  \r 20%|## \r", [" 20%|##"]),
        ("longer text\rshort", ["shortr text"]),
        ("abc\r   \r", []),
        ("abc\r   \rdef\n", ["def"]),
        ("abc  \n", ["abc  "]),
        ("  ", ["  "]),
        ("\x1b[31mred\n\x1b[0m", ["\x1b[31mred"]),
        ("abc  \r\n", ["abc  "]),
        ("one\rtwo\nthree", ["two", "three"]),
        ("\x1b[31mred bar 10\x1b[0m\r\x1b[32mgreen bar!\x1b[0m\n", ["\x1b[32mgreen bar!\x1b[0m"]),
        ("12%\b\b\b13%\n", ["13%"]),
        ("old text\x1b[2K\rnew\n", ["new"]),
        ("\x1b[1;31m\x1b[Kmatch\x1b[m\x1b[K rest\n", ["\x1b[1;31mmatch\x1b[m rest"]),
    ],
)
def test_carriage_returns_and_their_like(text, expected):
    assert lines_of(TerminalStream(0, "stdout"), [text.encode()]) == expected


def test_a_chunk_may_end_inside_an_escape_sequence_or_a_line_end():
    screen = TerminalStream(0, "stdout")
    assert lines_of(screen, [b"one\r", b"\ntwo \x1b", b"[3", b"1mred\x1b[0m\nab\x1b[", b"K\rc", b"\n"]) == [
        "one",
        "two \x1b[31mred\x1b[0m",
        "cb",
    ]


def test_repeated_colours_do_not_pile_up_in_a_row():
    screen = TerminalStream(0, "stdout")
    for number in range(1000):
        screen.process(b"\r\x1b[31m%3d\x1b[0m \x1b[32mtail\x1b[0m" % number, 0.0)
        screen.process(b"\r\x1b[33mxy\x1b[0m\b\x1b[34mz\x1b[0m", 0.0)
    (row,) = screen.hidden_rows()
    assert len(row.final) < 100


def test_very_long_row_is_not_overwritten():
    wide = "x" * (MAX_LIVE_WIDTH + 1)
    assert lines_of(TerminalStream(0, "stdout"), [f"{wide}\rshort\n".encode()]) == [wide, "short"]
    assert lines_of(TerminalStream(0, "stdout"), [f"{wide}\r".encode(), b"\nshort\n"]) == [wide, "short"]


def test_a_half_line_is_ended_only_where_something_else_comes():
    screen = TerminalStream(0, "stdout")
    screen.process(b"half", 0.0)
    assert screen.end_plain_line() == "half"
    assert screen.end_plain_line() is None
    screen.process(b"\r50%", 0.0)
    assert screen.end_plain_line() is None  # a progress bar goes on below a display


class Bars(io.StringIO):
    """A file for tqdm that feeds a screen, and shows it live at once."""

    def __init__(self, screen: TerminalStream, regions: LiveDisplays) -> None:
        super().__init__()
        self.screen, self.regions, self.lines, self.shown = screen, regions, [], {}
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        block = self.screen.process(text.encode(), 0.0)
        self.lines += [] if block is None else block.split("\n")
        self.show()
        return len(text)

    def show(self) -> None:
        for row in self.screen.hidden_rows():
            self.regions.add_row(row)
        for name, rows, update in self.regions.updates(0.0):
            assert update == (name in self.shown)
            self.shown[name] = "\n".join(f"[{rank}] {text}" for rank, text in rows)

    def finish(self) -> list[str]:
        block = self.screen.end(0.0)
        self.lines += [] if block is None else block.split("\n")
        self.show()
        rows = "\n".join(self.shown.values()).split("\n")
        return [row.removeprefix("[0] ") for row in rows if row]


def bars() -> Bars:
    return Bars(TerminalStream(0, "stderr"), LiveDisplays("k", after=0.3))


def test_nested_bars_of_tqdm_keep_a_row_each():
    file = bars()
    for _ in tqdm(range(2), desc="outer", file=file, mininterval=0, ascii=True):
        for _ in tqdm(range(5), desc="inner", file=file, mininterval=0, ascii=True, leave=False):
            assert max(text.count("\n") for text in file.shown.values()) <= 1
    rows = file.finish()
    assert file.lines == []
    assert [row.split(":")[0] for row in rows] == ["outer"]
    assert "2/2" in rows[0]


def test_nested_bars_that_stay_end_as_in_a_terminal():
    file = bars()
    for _ in tqdm(range(2), desc="outer", file=file, mininterval=0, ascii=True):
        for _ in tqdm(range(3), desc="inner", file=file, mininterval=0, ascii=True, leave=True):
            pass
    assert file.finish() == [row for row in terminal(file.written) if row]
    assert file.lines == []


def test_transient_bar_is_removed_at_its_end():
    file = bars()
    for _ in tqdm(range(3), file=file, mininterval=0, leave=False):
        assert file.shown["k-0"].startswith("[0]")
    assert file.finish() == []


def test_bars_one_after_the_other_do_not_make_a_region_grow_for_ever():
    file = bars()
    for epoch in range(20):
        for _ in tqdm(range(2), desc=f"epoch {epoch}", file=file, mininterval=0, ascii=True):
            pass
    assert max(text.count("\n") for text in file.shown.values()) < 4
    assert [row.split(":")[0] for row in file.finish()] == [f"epoch {epoch}" for epoch in range(20)]


def test_a_frozen_row_is_out_of_reach_once_a_line_was_printed_below_it():
    file = bars()
    file.write("\r50%")
    file.write("\nplain\n")
    file.write("\x1b[A\rnew")
    assert file.finish() == ["50%", "new"]
    assert file.lines == ["plain"]


def test_a_bar_that_the_cursor_comes_back_to_goes_on_in_its_region():
    file = bars()
    file.write("\router 0%")
    file.regions.mark_output_below()
    for piece in ("\n", "\rinner 0%", "\x1b[A", "\router 50%"):  # chunks may end between them
        file.write(piece)
        file.regions.remove_finished()
    assert file.shown == {"k-0": "[0] outer 50%", "k-1": "[0] inner 0%"}


def test_a_live_row_that_grew_too_wide_is_printed_whole():
    file = bars()
    long = "".join(chr(ord("a") + i % 26) for i in range(3 * MAX_LIVE_WIDTH))
    file.write(f"\r{long}")
    assert file.shown["k-0"] == "[0] …" + long[1 - MAX_LIVE_WIDTH :]
    file.write("\n")
    assert file.lines == [long]
    assert file.shown["k-0"] == ""


def test_decoding_is_that_of_the_codec():
    data = "é€😀".encode()
    screen = TerminalStream(0, "stdout")
    assert lines_of(screen, [data[i : i + 1] for i in range(len(data))]) == [codecs.decode(data)]


@pytest.mark.parametrize("digits", [5_000, 1_000_000])
def test_a_cursor_movement_with_thousands_of_digits_goes_to_the_first_row(digits):
    screen, start = TerminalStream(0, "stdout"), time.perf_counter()
    assert lines_of(screen, [b"\rold\nsecond\x1b[" + b"9" * digits + b"Anew\n\n"]) == ["new", "second"]
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("middle", ["1;", "9", ";", " ", "\x1b[", "\x1b]"])
@pytest.mark.parametrize("end", ["", "m", "K", "A"])
def test_a_very_long_escape_sequence_costs_linear_time(middle, end):
    screen, start = TerminalStream(0, "stdout"), time.perf_counter()
    text = f"\rbefore\x1b[{middle * 1_000_000}{end}after\n".encode()
    lines = lines_of(screen, [text[at : at + 65_536] for at in range(0, len(text), 65_536)])
    assert "after" in "".join(lines)
    assert time.perf_counter() - start < 10
