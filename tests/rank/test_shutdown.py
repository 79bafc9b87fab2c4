"""Test how a rank waits for background saves before it exits."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from rankbook.rank.main import wait_for_saves

MODULE = "rankbook.checkpoint.async_save"


class Handle:
    """A save that ends when it is waited for, if it `ends`."""

    def __init__(self, *, done=False, ends=True, error=None, error_retrieved=False):
        self.done, self.ends, self.error, self.error_retrieved = done, ends, error, error_retrieved

    def __repr__(self):
        return "<save>"

    def finish(self, timeout):  # noqa: ARG002 - as the real one is called
        self.done = self.done or self.ends
        return self.done


def reported(monkeypatch, handle):
    requested_seconds: list[float] = []
    finish = handle.finish if handle is not None else None
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(current_save=lambda: handle, wait_for_saves=finish))
    return wait_for_saves(7.0, requested_seconds.append), requested_seconds


def test_shutdown_without_the_checkpoint_package_waits_for_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert wait_for_saves(7.0, pytest.fail) == ""
    assert MODULE not in sys.modules


def test_time_is_asked_for_only_where_something_is_being_saved(monkeypatch):
    assert reported(monkeypatch, None) == ("", [])
    assert reported(monkeypatch, Handle()) == ("", [7.0])
    assert reported(monkeypatch, Handle(done=True, error=OSError("full"))) == ("<save> in the background", [])
    assert reported(monkeypatch, Handle(done=True, error=OSError("full"), error_retrieved=True)) == ("", [])


def test_save_that_is_not_done_in_time_is_reported_as_lost(monkeypatch):
    words, requested_seconds = reported(monkeypatch, Handle(ends=False))
    assert (words, requested_seconds) == ("<save> did not finish within 7 s of the shutdown and is lost", [7.0])


@pytest.mark.slow
@pytest.mark.parametrize("registers", [False, True])
def test_time_is_asked_for_only_if_exit_functions_were_registered(registers):
    code = (
        "import atexit, tempfile\nfrom rankbook.rank import main\nmain._clear_atexit()\n"
        f"if {registers}:\n    atexit.register(int)\n"
        "asked = []\nmain._run_atexit(7.0, asked.append)\nprint(asked)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("[7.0]\n" if registers else "[]\n")
