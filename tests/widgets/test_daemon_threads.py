"""Test a view during the interpreter's shutdown: from Python 3.12 on no thread can start then."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from rankbook.widgets.live_view import Throttle, start_thread

SHUTDOWN = (
    "import atexit\nfrom rankbook.widgets.live_view import Throttle\natexit.register(Throttle(lambda: None).schedule)\n"
)


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.processes
def test_an_update_of_a_view_at_interpreter_shutdown_prints_nothing():
    run = subprocess.run([sys.executable, "-c", SHUTDOWN], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_pacer_whose_thread_cannot_start_sends_nothing_and_raises_nothing(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", refuse)
    sent = []
    throttle = Throttle(lambda: sent.append(1))
    throttle.schedule()
    throttle.schedule()
    assert not sent


def test_a_machine_without_room_for_a_thread_is_an_error(monkeypatch):
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(threading.Thread())
