"""Asking the ranks where they are: who answers in time is heard, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rankbook.coordinator.stacks import StackDesk
from rankbook.messages import AskStack, Message, Stack


def desk(send: Callable[[int, Message], bool]) -> tuple[StackDesk, threading.Condition]:
    changed = threading.Condition(threading.RLock())
    return StackDesk(changed, send), changed


def answer(message: Message) -> Stack:
    assert isinstance(message, AskStack)
    return Stack(token=message.token, cell=None, frames=())


def test_it_gives_the_answers_of_all_as_soon_as_they_are_there():
    def send(rank: int, message: Message) -> bool:
        threading.Timer(0.1, lambda: at.hear(rank, answer(message))).start()
        return True

    at, _ = desk(send)
    began = time.monotonic()
    assert set(at.ask((0, 1, 2), timeout=30)) == {0, 1, 2}
    assert time.monotonic() - began < 10


def test_a_rank_that_is_not_there_is_not_waited_for():
    def send(rank: int, message: Message) -> bool:
        if rank == 0:
            at.hear(0, answer(message))
        return rank == 0

    at, _ = desk(send)
    began = time.monotonic()
    assert set(at.ask((0, 1), timeout=30)) == {0}
    assert time.monotonic() - began < 10


def test_a_rank_that_does_not_answer_is_left_out_after_the_time():
    def send(rank: int, message: Message) -> bool:
        if rank == 0:
            at.hear(0, answer(message))
        return True

    at, _ = desk(send)
    began = time.monotonic()
    assert set(at.ask((0, 1), timeout=0.2)) == {0}
    assert time.monotonic() - began >= 0.2


def test_an_answer_that_comes_late_is_not_taken_for_one_to_the_next_question():
    asked: list[Message] = []

    def send(_rank: int, message: Message) -> bool:
        asked.append(message)
        return True

    at, _ = desk(send)
    assert at.ask((0,), timeout=0.01) == {}
    at.hear(0, answer(asked[0]))
    assert at.ask((0,), timeout=0.01) == {}
    at.hear(0, answer(asked[0]))
    assert len({message.token for message in asked}) == 2


@pytest.mark.parametrize("askers", [5])
def test_those_who_ask_at_once_get_their_own_answers(askers):
    asked: list[tuple[int, Message]] = []
    together = threading.Barrier(askers + 1)

    def send(rank: int, message: Message) -> bool:
        asked.append((rank, message))
        together.wait(5)
        return True

    at, _ = desk(send)
    got: dict[int, set[int]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: got.update({rank: set(at.ask((rank,), timeout=5))}))
        for rank in range(askers)
    ]
    for thread in threads:
        thread.start()
    together.wait(5)
    for rank, message in asked:
        at.hear(rank, answer(message))
    for thread in threads:
        thread.join(10)
    assert got == {rank: {rank} for rank in range(askers)}
