"""Waiting for a cell on the main thread while the driver thread handles everything else."""

from __future__ import annotations

import signal
import threading

import pytest

from rankbook.coordinator import wait
from rankbook.coordinator.deferred_interrupts import deferred_interrupts
from rankbook.coordinator.wait import wait_for_cell
from rankbook.protocol.messages import InputReply, InputRequest, Interrupt, RunCell, Text
from tests.conftest import wait_until
from tests.coordinator.test_driver import SOON, Keeper, Stage


@pytest.fixture
def stage():
    stage = Stage()
    stage.launch()
    yield stage
    stage.close()


def wait_here(stage, cell, *, ask=lambda *_: pytest.fail("nothing was asked"), patience=SOON):
    with deferred_interrupts() as held:
        wait_for_cell(stage.driver, cell, held, patience=patience, ask=ask)


def on_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_it_returns_once_everything_of_the_cell_has_been_shown(stage):
    cell, order = stage.submit(0), []

    def show_slowly():
        if cell.result is not None:
            threading.Event().wait(4 * wait._STEP)
            order.append("shown")

    cell.on_change.append(show_slowly)
    stage.done(0, cell.cell)
    wait_here(stage, cell)
    order.append("returned")
    assert order == ["shown", "returned"]


def test_the_driver_thread_shows_output_meanwhile(stage):
    sink = Keeper()
    cell, threads = stage.submit(0, sink=sink), []
    emit = sink.emit
    sink.emit = lambda items: (threads.append(threading.current_thread().name), emit(items))
    stage.say(0, *[Text(cell=cell.cell, stream="stdout", data=words) for words in (b"one\n", b"two\n")])
    stage.done(0, cell.cell)
    wait_here(stage, cell)
    assert sink.text == "[0] one\n[0] two\n"
    assert set(threads) == {"rankbook-driver"}


def test_an_interrupt_reaches_the_ranks_at_once(stage, monkeypatch):
    monkeypatch.setattr(wait, "_STEP", 3 * SOON)
    cell = stage.submit(0)
    assert isinstance(stage.next_task(0), RunCell)

    def press_and_answer():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert stage.next_task(0) == Interrupt(cell=cell.cell)
        stage.done(0, cell.cell)

    pressing = threading.Timer(0.05, press_and_answer)
    pressing.start()
    wait_here(stage, cell)
    pressing.join()
    assert cell.result is not None


def test_a_question_is_asked_on_the_main_thread_and_answered(stage):
    cell, asked = stage.submit(1), []
    assert isinstance(stage.next_task(1), RunCell)
    stage.say(1, InputRequest(cell=cell.cell, prompt="name? ", password=False))

    def ask(prompt, password):
        asked.append((prompt, password, threading.current_thread() is threading.main_thread()))
        return "Ada"

    def answer():
        assert stage.next_task(1) == InputReply(cell=cell.cell, text="Ada")
        stage.done(1, cell.cell)

    answering = on_a_thread(answer)
    wait_here(stage, cell, ask=ask)
    answering.join()
    assert asked == [("[1] name? ", False, True)]


def test_it_gives_up_after_its_patience_and_the_cell_goes_on(stage):
    cell = stage.submit(0)
    wait_here(stage, cell, patience=0.1)
    assert cell.result is None
    stage.done(0, cell.cell)
    wait_here(stage, cell)
    assert cell.result is not None


def test_two_threads_that_wait_for_one_cell_both_return(stage):
    cell = stage.submit(0)
    waiting = [on_a_thread(lambda: wait_here(stage, cell)) for _ in range(2)]
    stage.done(0, cell.cell)
    for thread in waiting:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in waiting)


def test_a_failure_of_the_driver_ends_the_wait(stage, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    cell = stage.submit(0)
    monkeypatch.setattr(stage.driver._inbox, "receive", lambda: 1 // 0)
    stage.done(0, cell.cell)
    wait_here(stage, cell)
    assert "rank 0 cannot be followed any more" in str(cell.result.outcomes)
    wait_until(lambda: reported, timeout=SOON, what="the error itself")
