"""Ranks that do not answer: what is said of them, and who is asked when."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest

from rankbook.coordinator.liveness import LivenessTracker, UnresponsiveRank, describe_straggler, describe_unresponsive
from rankbook.launch.process_info import ProcessInfo, process_info
from rankbook.protocol.messages import GetStack, Stack
from tests.conftest import wait_until

RUNNING = ProcessInfo("running", 3.14)
STOPPED = ProcessInfo("stopped", 3.14, stopped=True)


def silence(look: ProcessInfo | None, *, seconds: float = 12.0, heard: float = 30.0) -> UnresponsiveRank:
    return UnresponsiveRank(rank=1, pid=4711, seconds=seconds, heard=heard, look=look)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (silence(RUNNING), "unresponsive for 12 s, process running, 3.1 s of CPU time"),
        (silence(ProcessInfo("sleeping", 0)), "unresponsive for 12 s, process sleeping, 0.0 s of CPU time"),
        (silence(STOPPED), "unresponsive for 12 s, process stopped: kill -CONT 4711 lets it go on"),
        (
            silence(ProcessInfo("tracing-stop", 1, traced=True)),
            "unresponsive for 12 s, process stopped by a debugger or tracer (pid 4711)",
        ),
        (silence(None), "unresponsive for 12 s, process ending"),
        (silence(RUNNING, seconds=0.3), "unresponsive, last heard from 30 s ago, process running, 3.1 s of CPU time"),
    ],
)
def test_a_silence_is_told_with_what_the_process_does_and_never_as_a_death(told, words):
    assert describe_unresponsive(told) == words
    assert "dead" not in words


def test_a_straggler_says_why_and_what_to_do():
    assert describe_straggler(1, None) == "rank 1 still runs; %distributed stacks shows where"
    stopped = describe_straggler(1, silence(STOPPED))
    assert stopped.startswith("rank 1 is stopped") and "kill -CONT 4711" in stopped
    held = describe_straggler(1, silence(RUNNING))
    assert held.startswith("rank 1 still runs, unresponsive for 12 s, process running")
    assert all("%distributed restart 1" in text for text in (stopped, held))


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


@pytest.mark.processes
def test_a_look_tells_a_stopped_process_from_a_living_and_a_dead_one(sleeper):
    wait_until(lambda: process_info(sleeper.pid).doing == "sleeping", timeout=20, what="it sleeps")
    assert not process_info(sleeper.pid).stopped
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: process_info(sleeper.pid).stopped, timeout=20, what="it is stopped")
    os.kill(sleeper.pid, signal.SIGKILL)
    wait_until(lambda: process_info(sleeper.pid) is None, timeout=20, what="it is gone, if not reaped")
    assert process_info(None) is None


class Ranks:
    """Ranks 0 and 1: those in `quick` answer at once, others when told to."""

    def __init__(self, *quick: int) -> None:
        self.quick = set(quick)
        self.asked: list[tuple[int, int]] = []
        self.presence = LivenessTracker(threading.Condition(threading.RLock()), self._send, lambda _: os.getpid())

    def _send(self, rank: int, message: GetStack) -> bool:
        if rank == 2:
            return False
        self.asked.append((rank, message.token))
        if rank in self.quick:
            self.answer(rank, message.token)
        return True

    def answer(self, rank: int, token: int) -> None:
        self.presence.hear(rank)
        self.presence.answer(rank, Stack(token=token, cell=None, frames=()))


def test_who_answers_is_not_silent_and_whom_nobody_can_ask_neither():
    ranks = Ranks(0, 1)
    assert ranks.presence.wait_silent((0, 1, 2), timeout=60) == {}
    assert set(ranks.presence.wait_stacks((0, 1, 2), timeout=60)) == {0, 1}


def test_who_owes_an_answer_is_not_asked_again_until_anything_comes_from_it():
    ranks = Ranks(0)
    (silent,) = ranks.presence.wait_silent((0, 1), timeout=0.05).values()
    assert silent.rank == 1 and silent.pid == os.getpid() and silent.look is not None
    ranks.presence.ask((1,))
    assert [rank for rank, _ in ranks.asked] == [0, 1]
    assert set(ranks.presence.wait_silent((0, 1), timeout=0)) == {1}, "without time nobody is asked"
    ranks.presence.hear(1)
    assert ranks.presence.silent((1,)) == {}
    ranks.presence.ask((1,))
    assert [rank for rank, _ in ranks.asked] == [0, 1, 1]


def test_a_new_process_owes_nothing():
    ranks = Ranks()
    ranks.presence.ask((1,))
    ranks.presence.forget(1)
    assert ranks.presence.silent((1,)) == {}


def test_an_answer_that_comes_too_late_is_dropped():
    ranks = Ranks()
    assert ranks.presence.wait_stacks((0,), timeout=0.01) == {}
    ranks.answer(*ranks.asked[0])
    assert ranks.presence._stacks == {}


@pytest.mark.processes
def test_a_message_from_before_its_end_does_not_make_a_rank_alive(sleeper):
    sent: list[int] = []

    def send(rank: int, _: GetStack) -> bool:
        sent.append(rank)
        presence.hear(rank)  # it was on its way already
        return True

    presence = LivenessTracker(threading.Condition(threading.RLock()), send, lambda _: sleeper.pid)
    assert presence.wait_ended((1,), timeout=0.2) == set(), "who is only slow has not ended"
    os.kill(sleeper.pid, signal.SIGKILL)
    assert presence.wait_ended((1,), timeout=20) == {1}
    assert sent == [1, 1]
    ranks = Ranks(0, 1)
    assert ranks.presence.wait_ended((0, 1, 2), timeout=60) == set()


@pytest.mark.processes
def test_of_a_straggler_that_was_not_asked_only_a_stop_is_told(sleeper):
    presence = LivenessTracker(threading.Condition(threading.RLock()), lambda *_: True, lambda _: sleeper.pid)
    assert presence.straggler(0) is None
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: presence.straggler(0) is not None, timeout=20, what="it is stopped")
    os.kill(sleeper.pid, signal.SIGCONT)
