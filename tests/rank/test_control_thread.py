"""Test where an interrupt may be raised in the main thread, and where it is delayed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from rankbook.protocol.messages import GetStack, Shutdown
from rankbook.rank import control_thread
from rankbook.rank.control_thread import ControlThread, Interrupts


@pytest.fixture
def interrupts(monkeypatch):
    monkeypatch.setattr(control_thread.os_utils, "started_processes", list)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
    armed = Interrupts()
    armed.arm(1)
    yield armed
    armed.disarm()
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGCHLD, before[1])


def go_on_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def request_and_go_on(interrupts, cell):
    interrupts.request(cell)
    go_on_for(5)


def test_nothing_is_answered_after_the_message_to_shut_down():
    messages = [(Shutdown(patience=1.0), []), (GetStack(token=1), [])]
    link = SimpleNamespace(receive=lambda: messages.pop(0) if messages else None, send=pytest.fail)
    control = ControlThread(link, None, None, None, -1)
    control._receive()
    assert control._shutting_down and len(messages) == 1
    assert control.tasks.get_nowait() is None


def test_a_postponed_interrupt_is_dropped_if_the_cell_ends(interrupts):
    with interrupts.postponed(600):
        interrupts.request(1)
        signal.raise_signal(signal.SIGINT)
    assert not interrupts.delivered
    interrupts.disarm()


@pytest.mark.parametrize("has_own_handler", [True, False])
def test_an_interrupt_is_not_repeated_for_a_handler_of_the_users_code(interrupts, monkeypatch, has_own_handler):
    sent: list[int] = []
    monkeypatch.setattr(control_thread.signal, "pthread_kill", lambda _thread, number: sent.append(number))
    if has_own_handler:
        signal.signal(signal.SIGINT, lambda *_: None)
    interrupts.request(1)
    interrupts._next_repeat = 0.0
    interrupts.repeat_signal()
    assert len(sent) == (1 if has_own_handler else 2)
    interrupts._target_cell = None


def test_an_interrupt_is_postponed_by_a_bounded_time(interrupts):
    with pytest.raises(KeyboardInterrupt), interrupts.postponed(0.05):
        request_and_go_on(interrupts, 1)


def test_an_interrupt_in_an_optimizer_step_is_raised_at_its_end(interrupts):
    step, inner = object(), object()
    interrupts.defer(step)
    interrupts.request(1)
    signal.raise_signal(signal.SIGINT)
    interrupts.defer(inner)
    interrupts.deliver(inner)
    with pytest.raises(KeyboardInterrupt):
        interrupts.deliver(step)
    go_on_for(0.02)  # a repeated signal raises nothing more
    interrupts.deliver(step)


def test_an_interrupt_waits_for_an_optimizer_step_for_a_bounded_time(interrupts, monkeypatch):
    monkeypatch.setattr(control_thread.step_interrupts, "LIMIT", 0.05)
    step = object()
    interrupts.defer(step)
    interrupts.request(1)
    signal.raise_signal(signal.SIGINT)
    go_on_for(0.1)
    with pytest.raises(KeyboardInterrupt):
        interrupts.defer(step)  # the next one begins
    interrupts.defer(step)
    go_on_for(0.1)
    with pytest.raises(KeyboardInterrupt):
        request_and_go_on(interrupts, 1)


def test_an_optimizer_step_of_another_thread_defers_nothing(interrupts):
    thread = threading.Thread(target=interrupts.defer, args=(object(),))
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        request_and_go_on(interrupts, 1)


def test_the_error_of_another_thread_does_not_wait_for_an_optimizer_step(interrupts):
    interrupts.defer(object())
    with pytest.raises(ValueError, match="was aborted"):
        raise_and_go_on(interrupts, 5)


@pytest.mark.parametrize("ended", [True, False])
def test_a_late_signal_leaves_the_interrupt_of_the_next_cell(interrupts, ended):
    if ended:
        interrupts.disarm()
    interrupts.request(2)
    signal.raise_signal(signal.SIGINT)  # repeats the interrupt of an earlier cell
    interrupts.disarm()
    with pytest.raises(KeyboardInterrupt):
        interrupts.arm(2)


def test_an_interrupt_that_came_after_its_cell_leaves_the_next_cell_interruptible(interrupts):
    interrupts.disarm()
    interrupts.request(1)
    interrupts.arm(2)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


class Gate:
    """Lock like `threading.Condition`: an interrupt between the acquisition and the block would leave it locked."""

    def __init__(self, *, hit_as_it):
        self.lock, self._hit = threading.Lock(), hit_as_it

    def __enter__(self):
        self.lock.acquire()
        if self._hit == "opens":
            signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_):
        if self._hit == "closes":
            signal.raise_signal(signal.SIGINT)
        self.lock.release()


def test_a_lock_that_is_being_taken_is_given_back(interrupts):
    gate = Gate(hit_as_it="opens")
    with pytest.raises(KeyboardInterrupt), gate:
        go_on_for(5)
    assert gate.lock.acquire(blocking=False)


def test_a_lock_that_is_being_given_back_is(interrupts):
    gate = Gate(hit_as_it="closes")

    def pass_through():
        with gate:
            pass
        go_on_for(5)

    with pytest.raises(KeyboardInterrupt):
        pass_through()
    assert gate.lock.acquire(blocking=False)


def test_thread_waiting_in_enter_is_interrupted(interrupts):
    class Slow:
        def __enter__(self):
            timer.start()
            go_on_for(20)

        def __exit__(self, *_):
            pass

    timer = threading.Timer(0.05, interrupts.request, (1,))
    with pytest.raises(KeyboardInterrupt), Slow():
        pass
    timer.join()


def test_a_fork_whose_first_hook_was_interrupted_keeps_no_interrupt_back(interrupts):
    interrupts._after_fork()  # without the one before it, which an interrupt has ended before its first line
    with pytest.raises(KeyboardInterrupt):
        request_and_go_on(interrupts, 1)
    interrupts.arm(2)
    interrupts._before_fork()
    interrupts._before_fork()
    interrupts._after_fork()
    with pytest.raises(KeyboardInterrupt):
        request_and_go_on(interrupts, 2)


def test_an_interrupt_in_a_function_whose_exceptions_torch_replaces_is_raised_after_it(interrupts):
    extract_tensors = pytest.importorskip("torch._jit_internal")._extract_tensors
    calls = []

    class Slow:
        def __reduce__(self):
            interrupts.request(1)
            go_on_for(0.02)
            calls.append(True)
            return int, ()

    def extract_and_go_on():
        extract_tensors(Slow())
        go_on_for(5)

    with pytest.raises(KeyboardInterrupt):
        extract_and_go_on()
    assert calls == [True]


@pytest.mark.parametrize("shielded", [False, True])
def test_an_interrupt_while_a_warning_is_shown_is_raised_after_it(interrupts, shielded):
    # The C code that shows a warning may discard the exception, as `os.fork` of Python 3.12 does.
    calls = []

    def show(*_args, **_options):
        with interrupts.shield() if shielded else contextlib.nullcontext():  # as the streams of a rank write
            interrupts.request(1)
            go_on_for(0.02)
        calls.append(True)

    def warn_and_go_on():
        warnings.warn("text", stacklevel=1)
        go_on_for(5)

    with warnings.catch_warnings(action="always"):
        warnings.showwarning = show  # only now: `catch_warnings` has put the original back
        with pytest.raises(KeyboardInterrupt):
            warn_and_go_on()
    assert calls == [True]


FORKS_IN_STEP = """
import ctypes, os, threading, time
from rankbook.rank import control_thread
control_thread.os_utils.started_processes = list
interrupts = control_thread.Interrupts()
holding_the_gil = ctypes.PyDLL(None)
os.register_at_fork(before=lambda: holding_the_gil.usleep(6000))  # a rank's fork takes so long
interrupts.install_hooks()
os.register_at_fork(after_in_parent=lambda: time.sleep(0.005))
for turn in range(1, 6):
    interrupts.arm(turn)
    threading.Timer(0.05, interrupts.request, (turn,)).start()
    end = time.monotonic() + 20  # of a machine that may be busy
    try:
        while time.monotonic() < end:
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        print("lost")
    except KeyboardInterrupt:
        print("raised")
    finally:
        interrupts.disarm()
"""


@pytest.mark.processes
def test_an_interrupt_is_delivered_to_a_loop_of_slow_forks():
    done = subprocess.run(
        [sys.executable, "-c", FORKS_IN_STEP], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.split() == ["raised"] * 5, done.stderr


# Subprocesses of a cell -----------------------------------------------------------------------------------------------


def raise_for_child(_number, _frame):
    raise RuntimeError("a worker was killed")


def test_error_of_a_child_handler_is_raised_in_a_cell(interrupts):
    signal.signal(signal.SIGCHLD, raise_for_child)
    with pytest.raises(RuntimeError, match="a worker was killed"):
        signal.raise_signal(signal.SIGCHLD)


def test_error_of_a_child_handler_does_not_replace_an_interrupt(interrupts):
    signal.signal(signal.SIGCHLD, raise_for_child)
    with pytest.raises(KeyboardInterrupt):
        request_and_go_on(interrupts, 1)
    signal.raise_signal(signal.SIGCHLD)
    interrupts.disarm()
    interrupts.arm(2)
    assert signal.getsignal(signal.SIGCHLD) is raise_for_child, "the next cell has the handler of the user"
    with pytest.raises(RuntimeError, match="a worker was killed"):
        signal.raise_signal(signal.SIGCHLD)


@pytest.mark.processes
def test_error_about_an_interrupted_subprocess_is_not_raised_in_a_later_cell(interrupts, monkeypatch, capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as interrupted:

        def report(_number, _frame):
            raise RuntimeError(f"DataLoader worker (pid {pid}) exited unexpectedly with exit code 1.")

        signal.signal(signal.SIGCHLD, report)
        monkeypatch.setattr(control_thread.os_utils, "started_processes", lambda: [interrupted.pid])
        monkeypatch.setattr(control_thread.os_utils, "interrupt_processes", lambda _pids: None)
        requesting = threading.Timer(0.05, interrupts.request, args=(1,))  # on another thread, as in a rank
        requesting.start()
        with pytest.raises(KeyboardInterrupt):
            go_on_for(5)
        requesting.join()
        pid = interrupted.pid
        interrupts.disarm()
        signal.raise_signal(signal.SIGCHLD)
        interrupts.arm(2)
        signal.raise_signal(signal.SIGCHLD)
        assert capsys.readouterr().err == ""
        pid = os.getpid()
        with pytest.raises(RuntimeError, match=str(pid)):
            signal.raise_signal(signal.SIGCHLD)
        interrupts.disarm()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        interrupted.communicate(b"\n")
    signal.signal(signal.SIGCHLD, report)
    interrupts.arm(3)
    assert signal.getsignal(signal.SIGCHLD) is report, "the subprocess has ended"


def test_error_of_a_child_handler_between_cells_is_printed_by_the_next_one(interrupts, capsys):
    signal.signal(signal.SIGCHLD, raise_for_child)
    interrupts.disarm()
    signal.raise_signal(signal.SIGCHLD)
    interrupts.arm(2)
    assert capsys.readouterr().err == "Between two cells: a worker was killed\n"


def raise_and_go_on(interrupts, seconds):
    interrupts.raise_error(ValueError("a collective was aborted"))
    go_on_for(seconds)


def test_an_error_of_another_thread_is_raised_in_the_cell(interrupts):
    with pytest.raises(ValueError, match="a collective was aborted"):
        raise_and_go_on(interrupts, 5)
    assert not interrupts.delivered


def test_an_interrupt_takes_precedence_over_the_error_of_another_thread(interrupts):
    def both():
        with interrupts.shield():
            interrupts.raise_error(ValueError("a collective was aborted"))
            interrupts.request(1)

    with pytest.raises(KeyboardInterrupt):
        both()
    assert interrupts.delivered


def test_a_shield_delays_the_error_of_another_thread(interrupts):
    reached = []

    def shielded():
        with interrupts.shield():
            raise_and_go_on(interrupts, 0.05)
            reached.append(True)

    with pytest.raises(ValueError, match="a collective was aborted"):
        shielded()
    assert reached


def test_the_error_of_another_thread_does_not_hit_the_report_of_an_error(interrupts):
    with interrupts.postponed(600):
        raise_and_go_on(interrupts, 0.05)
    interrupts.disarm()


def test_between_cells_the_error_of_another_thread_is_dropped(interrupts):
    interrupts.disarm()
    interrupts.raise_error(ValueError("a collective was aborted"))
    interrupts.arm(2)
    go_on_for(0.05)
