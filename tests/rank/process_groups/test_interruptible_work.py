"""Waits that a thread does in the stead of the one that was asked."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from rankbook.errors import CollectiveAborted
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.process_groups.collective_log import OPS, CollectiveCall, CollectiveLog


class Work:
    """A receive that ends at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, _timeout: timedelta) -> bool:
        if self._error is not None:
            raise self._error
        return True


class Group:
    """Process group without errors."""

    waits_in_steps = True
    timeout = timedelta(minutes=30)
    transport_failed = False
    seconds_since_abort = 0.0
    cause: str | None = None

    def __init__(self, error: Exception | None = None) -> None:
        self.log = CollectiveLog("0", (0, 1))
        self._told = error

    def leak(self) -> None:
        """Do nothing."""

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:  # noqa: ARG002 - see `waits.Group`
        return self._told or error

    def abort_error(self, launched: CollectiveCall) -> BaseException:
        return CollectiveAborted(f"{self.cause} while this rank waited in {launched}")

    def receive(self, work: Work) -> bool:
        return interruptible_work.InterruptibleWork(work, self, *self.log.launch(OPS["recv_anysource"], ([],))).wait()


class LocalObject:
    """Local variable of the user's function that waits."""


@pytest.fixture(autouse=True)
def idle(monkeypatch) -> Iterator[list[interruptible_work._Waiter]]:
    idle: list[interruptible_work._Waiter] = []
    monkeypatch.setattr(interruptible_work, "_idle", idle)
    yield idle
    for waiter in idle:
        waiter.stop()


@pytest.mark.parametrize("error", [None, CollectiveAborted("rank 1 raised")], ids=["as it is", "in words of ours"])
def test_failed_wait_keeps_no_reference_to_local_variables_of_its_caller(idle, error):
    def wait(local_object: LocalObject) -> None:
        Group(error).receive(Work(RuntimeError("refused")))
        assert local_object

    local_object = LocalObject()
    reference = weakref.ref(local_object)
    with contextlib.suppress(RuntimeError, CollectiveAborted):
        wait(local_object)
    del local_object
    if error is not None:
        error.__traceback__ = error.__context__ = None  # of the two errors only the waiter's is in question
    gc.collect()
    assert len(idle) == 1
    assert reference() is None


def test_wait_returns_its_result_to_its_own_thread(monkeypatch):
    class Taken(list[interruptible_work._Waiter]):
        """The idle ones, one of which another thread takes as soon as it is there."""

        def append(self, waiter: interruptible_work._Waiter) -> None:
            waiter.begin(Work(), timedelta(minutes=30))
            assert waiter.ended.wait(5)
            super().append(waiter)

    idle = Taken()
    monkeypatch.setattr(interruptible_work, "_idle", idle)
    with pytest.raises(RuntimeError, match="refused"):
        Group().receive(Work(RuntimeError("refused")))
    idle.pop().stop()


class InterruptedWork:
    """A collective in whose wait the interrupt arrives."""

    def is_completed(self) -> bool:
        return False

    def wait(self, _timeout: object = None) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_in_a_group_that_is_being_aborted_gives_the_cause():
    group = Group()

    def wait() -> None:
        launched = group.log.launch(OPS["barrier"], (None,))
        interruptible_work.InterruptibleWork(InterruptedWork(), group, *launched).wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    group.cause = "rank 1 exited with code 1"
    with pytest.raises(CollectiveAborted, match="rank 1 exited with code 1 while this rank waited in barrier #2"):
        wait()
    assert [*group.log.pending()] == []


class SlowWork:
    """A collective that completes after the caller's timeout."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: timedelta) -> bool:
        if not self.completed:
            raise RuntimeError(f"timed out after {timeout.total_seconds()} s")
        return True


def test_a_wait_takes_its_timeout_by_name_and_stays_pending_when_it_has_expired():
    group, work = Group(), SlowWork()
    waited = interruptible_work.InterruptibleWork(work, group, *group.log.launch(OPS["barrier"], (None,)))
    with pytest.raises(RuntimeError, match="timed out after 30"):
        waited.wait(timeout=timedelta(seconds=30))
    assert [call.op for call in group.log.pending()] == ["barrier"]
    work.completed = True
    assert waited.wait(timedelta(seconds=30))
    assert [*group.log.pending()] == []


def test_the_waiting_thread_uses_the_device_and_the_stream_of_its_caller(monkeypatch):
    """gloo orders the result of a CUDA tensor on the current stream of the thread that waits."""
    streams = iter(["a side stream", "the default stream"])
    used: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: next(streams))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda name: used.append((threading.current_thread().name, name)))
    for _ in range(2):
        assert Group().receive(Work())
    assert used == [("rankbook-wait", "a side stream"), ("rankbook-wait", "the default stream")]
