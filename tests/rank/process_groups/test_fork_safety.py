"""Test which operations a fork of a rank waits for."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Iterator

import pytest

from rankbook.rank.process_groups import manager
from tests.conftest import wait_until

PR_SET_NAME = 15


@contextlib.contextmanager
def busy(name: bytes, *, ends: bool) -> Iterator[threading.Event]:
    """Compute without the interpreter in a thread of that name; yield the event of its end.

    With `ends`, in one call: between two calls the thread may sleep, waiting for the GIL.
    """
    over, computed = threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000 if ends else 20_000)
            if ends:
                break
        computed.set()

    thread = threading.Thread(target=run)
    thread.start()
    task = manager._TASKS / str(thread.native_id)
    wait_until(lambda: f"({name.decode()}) R" in (task / "stat").read_text(), timeout=20, what="the computation")
    try:
        yield computed
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(not manager._TASKS.exists(), reason="threads are told by their names on Linux only")
@pytest.mark.parametrize(("name", "waits"), [(b"pt_gloo_runloop", True), (b"another", False)])
def test_a_fork_waits_until_the_threads_that_carry_out_collectives_sleep(name, waits, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_FORK_WAIT", 10.0)
    with busy(name, ends=waits) as computed:
        manager.wait_for_gloo_threads()
        assert computed.is_set() == waits


@pytest.mark.skipif(not manager._TASKS.exists(), reason="as above")
def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(manager, "_MAX_FORK_WAIT", 0.02)
    with busy(b"pt_gloo_runloop", ends=False) as computed:
        manager.wait_for_gloo_threads()
        assert not computed.is_set()
