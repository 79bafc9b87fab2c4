"""What a rank does about a save in the background before it leaves."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rankbook.rank.shutdown import wait_for_saves

MODULE = "rankbook.checkpoint.async_save"


class Handle:
    """A save that ends when it is waited for, if it `ends`."""

    def __init__(self, *, done=False, ends=True, error=None, heard=False):
        self.done, self.ends, self.error, self.heard = done, ends, error, heard

    def __repr__(self):
        return "<save>"

    def finish(self, timeout):  # noqa: ARG002 - as the real one is called
        self.done = self.done or self.ends
        return self.done


def told(monkeypatch, handle):
    asked: list[float] = []
    finish = handle.finish if handle is not None else None
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(current_save=lambda: handle, wait_for_saves=finish))
    return wait_for_saves(7.0, asked.append), asked


def test_who_has_not_imported_the_package_has_nothing_to_wait_for(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert wait_for_saves(7.0, pytest.fail) == ""
    assert MODULE not in sys.modules


def test_time_is_asked_for_only_where_something_is_being_saved(monkeypatch):
    assert told(monkeypatch, None) == ("", [])
    assert told(monkeypatch, Handle()) == ("", [7.0])
    assert told(monkeypatch, Handle(done=True, error=OSError("full"))) == ("<save> in the background", [])
    assert told(monkeypatch, Handle(done=True, error=OSError("full"), heard=True)) == ("", [])


def test_what_is_not_done_in_time_is_said_to_be_lost(monkeypatch):
    words, asked = told(monkeypatch, Handle(ends=False))
    assert (words, asked) == ("<save> was not done 7 s after the rank was to leave, and is lost", [7.0])
