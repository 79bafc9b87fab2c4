"""Test which ranks count as unresponsive, how they are described, and when they are asked."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from rankbook.coordinator import liveness
from rankbook.coordinator.liveness import LivenessTracker, UnresponsiveRank, describe_straggler, describe_unresponsive
from rankbook.process_identity import ProcessInfo, process_info
from rankbook.protocol.messages import GetStack, Stack
from tests.conftest import wait_until

RUNNING = ProcessInfo("running", 3.14)
STOPPED = ProcessInfo("stopped", 3.14, stopped=True)


def silence(look: ProcessInfo | None, *, seconds: float = 12.0, message_age: float = 30.0) -> UnresponsiveRank:
    return UnresponsiveRank(rank=1, pid=4711, seconds=seconds, message_age=message_age, process=look)


@pytest.mark.parametrize(
    ("unresponsive", "words"),
    [
        (silence(RUNNING), "unresponsive for 12 s, process running, 3.1 s of CPU time"),
        (silence(ProcessInfo("sleeping", 0)), "unresponsive for 12 s, process sleeping, 0.0 s of CPU time"),
        (silence(STOPPED), "unresponsive for 12 s, process stopped; kill -CONT 4711 resumes it"),
        (
            silence(ProcessInfo("tracing-stop", 1, traced=True)),
            "unresponsive for 12 s, process stopped by a debugger or tracer (pid 4711)",
        ),
        (silence(None), "unresponsive for 12 s, process ending"),
        (silence(RUNNING, seconds=0.3), "unresponsive, last heard from 30 s ago, process running, 3.1 s of CPU time"),
    ],
)
def test_unresponsive_rank_is_reported_with_its_process_state_and_never_as_dead(unresponsive, words):
    assert describe_unresponsive(unresponsive) == words
    assert "dead" not in words


def test_description_of_a_straggler_names_cause_and_remedy():
    assert describe_straggler(1, None) == "rank 1 still runs; %distributed stacks shows where"
    stopped = describe_straggler(1, silence(STOPPED))
    assert stopped.startswith("rank 1 is stopped") and "kill -CONT 4711" in stopped
    running = describe_straggler(1, silence(RUNNING))
    assert running.startswith("rank 1 still runs, unresponsive for 12 s, process running")
    assert all("%distributed restart 1" in text for text in (stopped, running))


@pytest.mark.parametrize(
    "unresponsive_rank",
    [silence(RUNNING, seconds=9.9, message_age=3600.0), silence(STOPPED, seconds=0.2, message_age=9.0)],
    ids=["running", "stopped"],
)
def test_restart_is_advised_only_after_ten_seconds_without_a_reply(unresponsive_rank):
    text = describe_straggler(1, unresponsive_rank)
    assert text.startswith("rank 1 ")
    assert "restart" not in text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_rank_that_sent_a_message_recently_is_not_unresponsive(clock):
    ranks = Ranks()
    ranks.liveness.record_message(1)
    for _ in range(8):  # the interrupt button is pressed again and again; a reply waits behind the output
        clock.now += 0.05
        ranks.liveness.ask((1,))
        clock.now += 0.05
        assert ranks.liveness.unresponsive((1,)) == {}
        assert "unresponsive" not in describe_straggler(1, ranks.liveness.straggler(1))
        ranks.liveness.record_message(1)


def test_straggler_is_unresponsive_only_after_one_second_without_a_reply(clock):
    ranks = Ranks()
    ranks.liveness.record_message(1)
    clock.now += 3600.0
    ranks.liveness.ask((1,))
    clock.now += 0.5
    assert ranks.liveness.straggler(1) is None
    clock.now += 0.6
    assert "unresponsive for 1 s" in describe_straggler(1, ranks.liveness.straggler(1))


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


@pytest.mark.processes
def test_process_check_distinguishes_stopped_live_and_dead_processes(sleeper):
    wait_until(lambda: process_info(sleeper.pid).status == "sleeping", timeout=20, what="it sleeps")
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
        self.liveness = LivenessTracker(threading.Condition(threading.RLock()), self._send, lambda _: os.getpid())

    def _send(self, rank: int, message: GetStack) -> bool:
        if rank == 2:
            return False
        self.asked.append((rank, message.token))
        if rank in self.quick:
            self.answer(rank, message.token)
        return True

    def answer(self, rank: int, token: int) -> None:
        self.liveness.record_message(rank)
        self.liveness.dispatch(rank, Stack(token=token, cell=None, frames=()))


def test_ranks_that_answer_or_cannot_be_asked_are_not_unresponsive():
    ranks = Ranks(0, 1)
    assert ranks.liveness.wait_unresponsive((0, 1, 2), timeout=60) == {}
    assert set(ranks.liveness.wait_stacks((0, 1, 2), timeout=60)) == {0, 1}


def test_rank_with_an_open_request_is_not_asked_again():
    ranks = Ranks(0)
    (silent,) = ranks.liveness.wait_unresponsive((0, 1), timeout=0.05).values()
    assert silent.rank == 1 and silent.pid == os.getpid() and silent.process is not None
    ranks.liveness.ask((1,))
    assert [rank for rank, _ in ranks.asked] == [0, 1]
    assert set(ranks.liveness.wait_unresponsive((0, 1), timeout=0)) == {1}, "without time nobody is asked"
    ranks.liveness.record_message(1)
    assert ranks.liveness.unresponsive((1,)) == {}
    ranks.liveness.ask((1,))
    assert [rank for rank, _ in ranks.asked] == [0, 1, 1]


def test_new_process_has_no_open_request():
    ranks = Ranks()
    ranks.liveness.ask((1,))
    ranks.liveness.forget(1)
    assert ranks.liveness.unresponsive((1,)) == {}


def test_an_answer_that_comes_too_late_is_dropped():
    ranks = Ranks()
    assert ranks.liveness.wait_stacks((0,), timeout=0.01) == {}
    ranks.answer(*ranks.asked[0])
    assert ranks.liveness._stacks == {}


def test_an_interrupted_wait_for_stacks_collects_no_more_replies(monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr(ranks.liveness._changed, "wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ranks.liveness.wait_stacks((0,), timeout=60)
    ranks.answer(*ranks.asked[0])
    assert ranks.liveness._stacks == {}


@pytest.mark.processes
def test_message_sent_before_the_exit_does_not_revive_a_rank(sleeper):
    sent: list[int] = []

    def send(rank: int, _: GetStack) -> bool:
        sent.append(rank)
        liveness.record_message(rank)  # it was on its way already
        return True

    liveness = LivenessTracker(threading.Condition(threading.RLock()), send, lambda _: sleeper.pid)
    assert liveness.wait_exited((1,), timeout=0.2) == set(), "who is only slow has not ended"
    os.kill(sleeper.pid, signal.SIGKILL)
    assert liveness.wait_exited((1,), timeout=20) == {1}
    assert sent == [1, 1]
    ranks = Ranks(0, 1)
    assert ranks.liveness.wait_exited((0, 1), timeout=60) == set()
    assert ranks.liveness.wait_exited((0, 1, 2), timeout=0.2) == set(), "its link is closed, but its process is alive"


@pytest.mark.processes
def test_a_rank_whose_link_is_closed_already_has_ended_if_its_process_has(sleeper):
    liveness = LivenessTracker(threading.Condition(threading.RLock()), lambda *_: False, lambda _: sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    sleeper.wait()
    assert liveness.wait_exited((1,), timeout=20) == {1}


@pytest.mark.processes
def test_straggler_that_was_not_asked_is_reported_only_if_stopped(sleeper):
    liveness = LivenessTracker(threading.Condition(threading.RLock()), lambda *_: True, lambda _: sleeper.pid)
    assert liveness.straggler(0) is None
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: liveness.straggler(0) is not None, timeout=20, what="it is stopped")
    os.kill(sleeper.pid, signal.SIGCONT)
