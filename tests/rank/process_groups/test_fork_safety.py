"""Test which operations a fork of a rank waits for."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
from collections.abc import Iterator

import pytest

from rankbook.rank.process_groups import manager

PR_SET_NAME = 15


@contextlib.contextmanager
def busy(name: bytes, seconds: float) -> Iterator[threading.Event]:
    """Compute without the interpreter for `seconds` in a thread of that name; yield the event of its end."""
    started, over, computed = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        started.set()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)
        computed.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield computed
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(not manager._TASKS.exists(), reason="threads are told by their names on Linux only")
@pytest.mark.parametrize(("name", "waits"), [(b"pt_gloo_runloop", True), (b"another", False)])
def test_a_fork_waits_until_the_threads_that_carry_out_collectives_sleep(name, waits, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_FORK_WAIT", 10.0)
    with busy(name, 0.3 if waits else 60.0) as computed:
        manager._wait_for_gloo_threads()
        assert computed.is_set() == waits


@pytest.mark.skipif(not manager._TASKS.exists(), reason="as above")
def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(manager, "_MAX_FORK_WAIT", 0.02)
    with busy(b"pt_gloo_runloop", 60.0) as computed:
        manager._wait_for_gloo_threads()
        assert not computed.is_set()
