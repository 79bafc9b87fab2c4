"""The status line above a running cell; in a kernel it is tested with the panel."""

from __future__ import annotations

from types import SimpleNamespace

from rankbook.magics.cell_handle import StatusLine, describe_running
from rankbook.magics.debugger import describe_pause
from rankbook.protocol.telemetry import RankPlacement
from rankbook.widgets.rendering import line


def row(rank, state="running", **more):
    return RankPlacement(rank=rank, host="h", pid=1, device="cpu", device_name="", state=state, **more)


def describe(seconds, rows, paused=()):
    return describe_running(3, (0, 1), seconds, rows, dict(paused))


def test_status_line_names_the_activity_of_every_rank():
    rows = [row(0, line=7, rate=30.0), row(1, line=7, rate=32.0), row(2, "dead")]
    assert describe(12.0, rows) == "cell [3] on ranks 0-1 · 12 s · at line 7 · 31 steps/s"
    rows = [row(0, "waiting", waits_for="all_reduce #41"), row(1, lags=True, line=2)]
    assert describe(1.25, rows) == (
        "cell [3] on ranks 0-1 · 1.2 s · rank 0 waiting in all_reduce #41 · rank 1 at line 2, the others wait for it"
    )
    assert describe(2.0, [row(0), row(1, line=2)], {0: "paused at line 4"}) == (
        "cell [3] on ranks 0-1 · 2.0 s · rank 0 paused at line 4 · rank 1 at line 2"
    )
    waiting = describe(1.0, [row(0, "waiting", waits_for="<")])
    assert "&lt;" in line(waiting, "running")["text/html"]


def test_the_line_of_a_running_cell_says_when_nothing_more_comes_and_the_last_one_does_not():
    status_line = object.__new__(StatusLine)
    vars(status_line).update(
        _cell=SimpleNamespace(number=3, ranks=(0, 1), started=None),
        _paused={},
        _monitor=SimpleNamespace(placement=lambda: SimpleNamespace(ranks=()), close=lambda: None),
    )
    running = status_line.current_bundle()
    assert "not updated any more" in running["text/html"]
    assert "not updated" not in running["text/plain"]
    ended = status_line.final_bundle(SimpleNamespace(status="ok", seconds=2.0))
    assert "not updated" not in ended["text/html"]


def test_the_place_of_a_pause_names_its_cell():
    assert describe_pause("", 10, 3) == "paused at line 10 of cell [3]"
    assert describe_pause("", 10, None) == "paused at line 10"
    assert describe_pause("train.py", 10, None) == "paused at train.py:10"
    assert describe_pause("", -1, None) == "paused"
