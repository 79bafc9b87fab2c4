"""What a fork of a rank waits for."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time

import pytest

from rankbook.rank import forks

PR_SET_NAME = 15


def busy(name: bytes, seconds: float) -> threading.Thread:
    """A thread of that name that computes, without the interpreter, for so long."""
    begun = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        begun.set()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    return thread


@pytest.mark.skipif(not forks._TASKS.exists(), reason="threads are told by their names on Linux only")
@pytest.mark.parametrize(("name", "waits"), [(b"pt_gloo_runloop", True), (b"another", False)])
def test_a_fork_waits_until_the_threads_that_carry_out_collectives_sleep(name, waits, monkeypatch):
    monkeypatch.setattr(forks, "_AT_MOST", 10.0)
    thread = busy(name, 0.3)
    forks._wait_for_rest()
    assert thread.is_alive() != waits
    thread.join()


@pytest.mark.skipif(not forks._TASKS.exists(), reason="as above")
def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(forks, "_AT_MOST", 0.02)
    thread = busy(b"pt_gloo_runloop", 0.5)
    forks._wait_for_rest()
    assert thread.is_alive()
    thread.join()
