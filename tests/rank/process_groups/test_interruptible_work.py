"""Waits that a thread does in the stead of the one that was asked."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from rankbook.errors import CollectiveAborted
from rankbook.rank.process_groups import interruptible_work
from rankbook.rank.process_groups.collective_log import OPS, CollectiveCall, CollectiveLog


class Work:
    """A receive that ends at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self) -> bool:
        if self._error is not None:
            raise self._error
        return True


class Group:
    """One that is whole."""

    waits_in_steps = True
    transport_failed = False
    seconds_since_abort = 0.0
    cause: str | None = None

    def __init__(self, told: Exception | None = None) -> None:
        self.log = CollectiveLog("0", (0, 1))
        self._told = told

    def leak(self) -> None:
        """Nothing is left behind."""

    def error_for(self, error: BaseException, launched: CollectiveCall) -> BaseException:  # noqa: ARG002 - see `waits.Group`
        return self._told or error

    def abort_error(self, launched: CollectiveCall) -> BaseException:
        return CollectiveAborted(f"{self.cause} while this rank waited in {launched}")

    def receive(self, work: Work) -> bool:
        return interruptible_work.InterruptibleWork(work, self, *self.log.launch(OPS["recv_anysource"], ([],))).wait()


class Held:
    """What a function of the person's has at hand as it waits."""


@pytest.fixture(autouse=True)
def idle(monkeypatch) -> Iterator[list[interruptible_work._Waiter]]:
    idle: list[interruptible_work._Waiter] = []
    monkeypatch.setattr(interruptible_work, "_idle", idle)
    yield idle
    for waiter in idle:
        waiter.stop()


@pytest.mark.parametrize("told", [None, CollectiveAborted("rank 1 raised")], ids=["as it is", "in words of ours"])
def test_a_wait_that_failed_keeps_nothing_of_whoever_waited(idle, told):
    def wait(held: Held) -> None:
        Group(told).receive(Work(RuntimeError("refused")))
        assert held

    held = Held()
    there = weakref.ref(held)
    with contextlib.suppress(RuntimeError, CollectiveAborted):
        wait(held)
    del held
    if told is not None:
        told.__traceback__ = told.__context__ = None  # of the two errors only the waiter's is in question
    gc.collect()
    assert len(idle) == 1
    assert there() is None


def test_each_thread_gets_what_its_own_wait_gave(monkeypatch):
    class Taken(list[interruptible_work._Waiter]):
        """The idle ones, one of which another thread takes as soon as it is there."""

        def append(self, waiter: interruptible_work._Waiter) -> None:
            waiter.begin(Work())
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
