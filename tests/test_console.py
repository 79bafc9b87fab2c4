"""Test the console's output in a terminal and in a log, without a kernel."""

from __future__ import annotations

import io

import pytest

from rankbook.cli.console import LOG_INTERVAL, TERMINAL_INTERVAL, Console, count_rows, last_state, title


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class SameTerminal(Terminal):
    """The stderr of a command whose stdout is `screen`: another stream, the same place."""

    def __init__(self, screen: Terminal) -> None:
        super().__init__()
        self.screen = screen

    def write(self, text: str) -> int:
        return self.screen.write(text)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def log() -> tuple[Console, io.StringIO, io.StringIO, Clock]:
    out, err, clock = io.StringIO(), io.StringIO(), Clock()
    return Console(out, err, clock=clock), out, err, clock


def test_a_dumb_terminal_gets_no_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Terminal()
    Console(screen, SameTerminal(screen), clock=Clock()).header(1, "x")
    assert screen.getvalue() and "\x1b" not in screen.getvalue()


def test_a_half_line_is_ended_before_someone_else_writes() -> None:
    console, out, err, _ = log()
    console.header(1, "x")
    console.text(1, "half")
    console.text(1, " and half")
    console.text(1, "elsewhere\n", error=True)
    console.text(1, " and more")
    console.display(1, "result")
    assert out.getvalue() == "[1] x\nhalf and half and more\nresult\n"
    assert err.getvalue() == "elsewhere\n"


def test_a_terminal_never_mixes_stderr_into_a_half_line_of_stdout() -> None:
    screen = Terminal()
    console = Console(screen, SameTerminal(screen), clock=Clock())
    console.header(1, "x")
    console.text(1, "half")
    console.text(1, "elsewhere\n", error=True)
    assert screen.getvalue().endswith("\nhalf\nelsewhere\n")


def test_background_cells_write_whole_lines_behind_their_number() -> None:
    console, out, _, _ = log()
    console.header(1, "x")
    console.header(2, "y")
    console.text(1, "[0-1] st")
    console.text(2, "mine\n")
    console.text(1, "ep 1\n[0-1] 10 %\r[0-1] 20 %\n")
    console.text(1, "no newline")
    console.finish()
    assert out.getvalue() == (
        "[1] x\n[2] y\nmine\ncell [1]: [0-1] step 1\ncell [1]: [0-1] 20 %\ncell [1]: no newline\n"
    )


def test_colours_are_for_terminals() -> None:
    console, out, _, _ = log()
    console.header(1, "x")
    console.text(1, "\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\n")
    assert out.getvalue() == "[1] x\nred link\n"
    screen = Terminal()
    console = Console(screen, io.StringIO(), clock=Clock())
    console.header(1, "x")
    console.text(1, "\x1b[31mred\x1b[0m\n")
    assert screen.getvalue() == "\x1b[1;34m[1] x\x1b[0m\n\x1b[31mred\x1b[0m\n"


def test_a_log_shows_a_display_at_its_own_pace_and_its_last_state_always() -> None:
    console, out, _, clock = log()
    console.header(1, "x")
    console.display(1, "0 %", key="bar")
    assert console.due() is None
    for percent in range(1, 30):
        console.update("bar", f"{percent} %")
    console.tick()
    assert out.getvalue() == "[1] x\n0 %\n"
    assert console.due() == LOG_INTERVAL
    clock.now += LOG_INTERVAL
    console.tick()
    assert out.getvalue() == "[1] x\n0 %\n29 %\n"
    assert console.due() is None
    console.update("bar", "29 %")  # a repetition
    assert console.due() is None
    console.update("bar", "100 %")
    console.finish(1)
    assert out.getvalue() == "[1] x\n0 %\n29 %\n100 %\n"


def test_an_update_of_a_display_that_nobody_showed_shows_nothing() -> None:
    console, out, _, _ = log()
    console.header(1, "x")
    console.update("unknown", "text")
    console.finish()
    assert out.getvalue() == "[1] x\n"


def test_a_log_keeps_one_frame_of_many_that_were_cleared() -> None:
    console, out, err, clock = log()
    console.header(1, "x")
    console.text(1, "before\n")
    for frame in range(10):
        console.clear(1)
        console.text(1, f"frame {frame}\n")
        console.text(1, "warning\n", error=True)
        clock.now += LOG_INTERVAL / 4
    console.finish(1)
    assert out.getvalue() == "[1] x\nbefore\nframe 0\nframe 4\nframe 8\nframe 9\n"
    assert err.getvalue() == "warning\n" * 4


def test_text_after_the_last_clear_flows_again_once_its_turn_has_come() -> None:
    console, out, _, clock = log()
    console.header(1, "x")
    console.clear(1)
    console.text(1, "a\n")
    console.clear(1)
    console.text(1, "b\n")
    clock.now += LOG_INTERVAL
    console.tick()
    console.text(1, "c\n")
    assert out.getvalue() == "[1] x\na\nb\nc\n"


def test_a_terminal_rewrites_a_display_in_place() -> None:
    screen, clock = Terminal(), Clock()
    console = Console(screen, io.StringIO(), clock=clock)
    console.header(1, "x")
    console.display(1, "rank 0\nrank 1", key="bars")
    clock.now += TERMINAL_INTERVAL
    console.update("bars", "rank 0 done\nrank 1 done")
    assert screen.getvalue().endswith("rank 0\nrank 1\n\x1b[2F\x1b[Jrank 0 done\nrank 1 done\n")


def test_terminal_does_not_rewrite_rows_above_other_text() -> None:
    screen, clock = Terminal(), Clock()
    console = Console(screen, io.StringIO(), clock=clock)
    console.header(1, "x")
    console.display(1, "bar", key="bar")
    console.text(1, "in between\n")
    clock.now += TERMINAL_INTERVAL
    console.update("bar", "bar done")
    assert screen.getvalue().endswith("bar\nin between\nbar done\n")


def test_a_header_names_the_cell_in_one_line() -> None:
    assert title("x = 1") == "x = 1"
    assert title("\n  x = 1\ny = 2") == "x = 1 …"
    assert title("%%distributed --ranks 0\n# why\nx = 1") == "%%distributed --ranks 0 · x = 1"
    assert title("%%distributed\nx = 1\ny = 2") == "%%distributed · x = 1 …"
    assert title("%%distributed\n# nothing else") == "%%distributed …"
    assert len(title("x" * 300)) <= 100
    assert title("") == ""


def test_rows_are_counted_as_a_terminal_folds_them() -> None:
    assert count_rows("a\n", 10) == 1
    assert count_rows("a\n\nb", 10) == 3
    assert count_rows("\x1b[31m" + "a" * 10 + "\x1b[0m\n", 10) == 1
    assert count_rows("a" * 11, 10) == 2
    assert count_rows("訓" * 6, 10) == 2
    assert count_rows("a" * 50 + "\rb", 10) == 1


def test_carriage_returns_leave_the_last_state() -> None:
    assert last_state("10 %\r20 %") == "20 %"
    assert last_state("line\r") == "line"
    assert last_state("plain") == "plain"
