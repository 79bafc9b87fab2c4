"""Test waiting for a cell on the main thread while the driver thread handles everything else."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from rankbook.coordinator import wait
from rankbook.coordinator import wait as deferred_interrupts_module
from rankbook.coordinator.wait import deferred_interrupts, wait_for_cell
from rankbook.protocol.messages import InputReply, InputRequest, Interrupt, RunCell, Text
from tests.conftest import wait_until
from tests.coordinator.test_driver import SOON, DriverHarness, Keeper


@pytest.fixture
def harness():
    harness = DriverHarness()
    harness.launch()
    yield harness
    harness.close()


def wait_here(harness, cell, *, ask=lambda *_: pytest.fail("nothing was asked"), patience=SOON):
    with deferred_interrupts() as interrupts:
        wait_for_cell(harness.driver, cell, interrupts, patience=patience, ask=ask)


def on_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_wait_returns_after_all_output_of_the_cell(harness):
    cell, order = harness.submit(0), []

    def show_slowly():
        if cell.result is not None:
            threading.Event().wait(4 * wait._INTERRUPT_CHECK_INTERVAL)
            order.append("shown")

    cell.on_change.append(show_slowly)
    harness.done(0, cell.cell)
    wait_here(harness, cell)
    order.append("returned")
    assert order == ["shown", "returned"]


def test_the_driver_thread_shows_output_meanwhile(harness):
    sink = Keeper()
    cell, threads = harness.submit(0, sink=sink), []
    emit = sink.emit
    sink.emit = lambda items: (threads.append(threading.current_thread().name), emit(items))
    harness.say(0, *[Text(cell=cell.cell, stream="stdout", data=words) for words in (b"one\n", b"two\n")])
    harness.done(0, cell.cell)
    wait_here(harness, cell)
    assert sink.text == "[0] one\n[0] two\n"
    assert set(threads) == {"rankbook-driver"}


def test_an_interrupt_reaches_the_ranks_at_once(harness, monkeypatch):
    monkeypatch.setattr(wait, "_INTERRUPT_CHECK_INTERVAL", 3 * SOON)
    cell = harness.submit(0)
    assert isinstance(harness.next_task(0), RunCell)

    def press_and_answer():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert harness.next_task(0) == Interrupt(cell=cell.cell)
        harness.done(0, cell.cell)

    pressing = threading.Timer(0.05, press_and_answer)
    pressing.start()
    wait_here(harness, cell)
    pressing.join()
    assert cell.result is not None


def test_a_question_is_asked_on_the_main_thread_and_answered(harness):
    cell, questions = harness.submit(1), []
    assert isinstance(harness.next_task(1), RunCell)
    harness.say(1, InputRequest(cell=cell.cell, prompt="name? ", password=False))

    def ask(prompt, password):
        questions.append((prompt, password, threading.current_thread() is threading.main_thread()))
        return "Ada"

    def answer():
        assert harness.next_task(1) == InputReply(cell=cell.cell, text="Ada")
        harness.done(1, cell.cell)

    answering = on_a_thread(answer)
    wait_here(harness, cell, ask=ask)
    answering.join()
    assert questions == [("[1] name? ", False, True)]


@pytest.mark.parametrize(
    ("patience", "note"), [(0.0, "cell [7] on rank 0: queued, waiting for rank 0, see peek\n"), (SOON, "")]
)
def test_a_call_that_stays_in_the_queue_is_reported_once(harness, monkeypatch, capsys, patience, note):
    monkeypatch.setattr(wait, "_QUEUE_PATIENCE", patience)
    first, second = harness.submit(0), harness.submit(0)
    second.queue_hint = ", see peek"
    for seconds in (0.1, 0.1):
        wait_here(harness, second, patience=seconds)
    harness.done(0, first.cell)
    harness.done(0, second.cell)
    wait_here(harness, second)
    assert capsys.readouterr().err == note


def test_wait_ends_after_its_timeout_and_the_cell_continues(harness):
    cell = harness.submit(0)
    wait_here(harness, cell, patience=0.1)
    assert cell.result is None
    harness.done(0, cell.cell)
    wait_here(harness, cell)
    assert cell.result is not None


def test_a_question_that_was_not_asked_in_time_is_asked_by_the_next_wait(harness):
    cell, asked, now = harness.submit(0, 1), [], [0.0]
    for rank in range(2):
        cell.ask(rank, InputRequest(cell=cell.cell, prompt="name? ", password=False))

    def ask(prompt, password):
        asked.append(prompt)
        now[0] += SOON  # the answer took so long that the time is up
        return "Ada"

    def read_clock():
        now[0] += 0.1
        return now[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wait, "time", SimpleNamespace(monotonic=read_clock))
        wait_here(harness, cell, ask=ask)
        wait_here(harness, cell, ask=ask)
    assert asked == ["[0] name? ", "[1] name? "]


def test_two_threads_that_wait_for_one_cell_both_return(harness):
    cell = harness.submit(0)
    waiting = [on_a_thread(lambda: wait_here(harness, cell)) for _ in range(2)]
    harness.done(0, cell.cell)
    for thread in waiting:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in waiting)


def test_a_failure_of_the_driver_ends_the_wait(harness, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    cell = harness.submit(0)
    monkeypatch.setattr(harness.driver._receiver, "receive", lambda: 1 // 0)
    harness.done(0, cell.cell)
    wait_here(harness, cell)
    assert "rank 0 was lost because the coordinator failed" in str(cell.result.outcomes)
    wait_until(lambda: reported, timeout=SOON, what="the error itself")


@pytest.fixture
def own_handler():
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def press_twice(monkeypatch, window):
    """Interrupt a wait, and press once more after it; `window` seconds are for repeats."""
    monkeypatch.setattr(deferred_interrupts_module, "REPEAT_WINDOW", window)
    with deferred_interrupts() as interrupts:
        interrupts.ignore_repeats = True
        signal.raise_signal(signal.SIGINT)
        interrupts.take()
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("own_handler")
def test_repeated_interrupts_are_ignored_shortly_after_an_interrupted_cell(monkeypatch):
    press_twice(monkeypatch, 60.0)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("own_handler")
def test_interrupt_after_the_ignored_interval_is_delivered(monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        press_twice(monkeypatch, 0.0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("own_handler")
@pytest.mark.parametrize(("ignore", "press"), [(True, False), (False, True)])
def test_the_handler_stays_where_nothing_was_interrupted_or_nothing_is_ignored(ignore, press):
    with deferred_interrupts() as interrupts:
        interrupts.ignore_repeats = ignore
        if press:
            signal.raise_signal(signal.SIGINT)
        interrupts.take()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
