"""The status line above a running cell; in a kernel it is tested with the panel."""

from __future__ import annotations

from rankbook.magics.cell_handle import describe_running
from rankbook.protocol.telemetry import RankPlacement
from rankbook.widgets.status_line import line


def row(rank, state="running", **more):
    return RankPlacement(rank=rank, host="h", pid=1, device="cpu", device_name="", state=state, **more)


def describe(seconds, rows, paused=()):
    return describe_running(3, (0, 1), seconds, rows, dict(paused))


def test_the_line_says_who_does_what():
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
