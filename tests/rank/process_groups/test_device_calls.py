"""Calls that a device has not finished stay in the log of their group, and only one thread asks the device."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankbook.errors import CollectiveAborted
from rankbook.rank.process_groups import device_calls, recoverable_group
from rankbook.rank.process_groups.collective_log import OPS, CollectiveLog
from rankbook.rank.process_groups.device_calls import Cuda, DeviceQueue, DeviceWatcher
from rankbook.rank.process_groups.recoverable_group import BackendGroup, RecoverableProcessGroup
from tests.conftest import wait_until
from tests.nccl_stand_in import Device, DeviceError, StandInGroup

TENSOR = torch.ones(4)


class OnDevice:
    """The device of a test, as Rankbook asks it. `threads` are those that have asked."""

    type = "cpu"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.capturing = False
        self.threads: set[str] = set()

    def bind_thread(self) -> None:
        pass

    def record(self) -> Callable[[], bool]:
        self.device.raise_error()
        event = self.device.record()

        def query() -> bool:
            self.threads.add(threading.current_thread().name)
            return event.query()

        return query

    def is_capturing(self) -> bool:
        return self.capturing


class Setting:
    """A group of one rank on a held device, and what it has reported."""

    def __init__(self) -> None:
        self.device = Device()
        self.device.held = True
        self.accelerator = OnDevice(self.device)
        self.lost: list[Exception] = []
        self.watcher = DeviceWatcher(self.accelerator, self.lost.append)
        self.inner = StandInGroup(dist.HashStore(), 0, 1, device=self.device)
        self.inner.eager_connect_single_device()
        self.log = CollectiveLog("", (0,))
        self.backends = self.make_backends({"cpu"})
        self.group = RecoverableProcessGroup(dist.HashStore(), 0, (0,), self.backends, self.log, lambda: 3)
        self.cut: list[CollectiveAborted] = []
        self.group.on_cut = self.cut.append

    def make_backends(self, queued_types: set[str]) -> BackendGroup:
        queue = DeviceQueue(self.watcher)
        return BackendGroup(self.inner, {}, [self.inner.abort], frozenset(queued_types), queue)

    def reduce(self, *, is_async: bool = False) -> Any:
        options = dist.AllreduceOptions()
        options.asyncOp = is_async
        return self.group.allreduce([TENSOR.clone()], options)

    def pending(self) -> list[str]:
        return [str(call) for call in self.log.pending()]


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting()
    yield setting
    setting.device.aborts_hang = setting.device.queries_hang = setting.device.held = False
    setting.device.end()


def until(is_so: Callable[[], bool]) -> None:
    wait_until(is_so, timeout=30, what="the device")


def test_a_synchronous_call_is_pending_until_the_device_has_finished_it(setting):
    assert setting.reduce() is None
    assert setting.pending() == ["all_reduce #1 (float32[4])"]
    assert setting.group.waits_for_device()
    setting.device.held = False
    until(lambda: not setting.pending())
    assert not setting.group.waits_for_device()


def test_the_wait_for_an_asynchronous_call_does_not_end_it_in_the_log(setting):
    work = setting.reduce(is_async=True)
    assert not setting.group.waits_for_device()
    assert work.wait()
    assert setting.group.waits_for_device()
    del work
    assert setting.pending() == ["all_reduce #1 (float32[4])"]


def test_the_future_of_a_call_does_not_end_it_in_the_log(setting):
    work = setting.reduce(is_async=True)
    assert work.get_future().done()
    assert setting.group.waits_for_device()
    assert setting.pending()


def test_only_the_thread_of_the_watcher_asks_the_device(setting):
    setting.reduce()
    until(lambda: bool(setting.accelerator.threads))
    assert setting.pending()
    assert setting.log.report().pending
    assert setting.accelerator.threads == {"rankbook-device"}


def test_the_log_answers_while_a_query_hangs(setting):
    setting.device.queries_hang = True
    setting.reduce()
    setting.reduce(is_async=True)
    assert len(setting.log.report().pending) == 2


def test_many_calls_end_in_order(setting):
    for _ in range(100):
        setting.reduce()
    assert len(setting.pending()) == 100
    setting.device.delay = 1.0
    setting.device.held = False
    until(lambda: len(setting.pending()) < 100)
    pending = [call.number for call in setting.log.pending()]
    assert pending
    assert pending == list(range(101 - len(pending), 101))
    setting.device.delay = 0.0
    until(lambda: not setting.pending())


def test_a_report_has_the_oldest_of_many_calls(setting):
    for _ in range(200):
        setting.reduce()
    report = setting.log.report()
    assert report.pending[0].number == 1
    assert len(report.pending) == 128
    assert report.count == 200


def test_an_abort_of_unfinished_calls_is_told_before_the_device_goes_on(setting):
    setting.reduce()
    states: list[int] = []
    setting.group.on_cut = lambda error: states.append(len(setting.device.pending)) or setting.cut.append(error)
    setting.group.abort_with_cause("rank 1 raised ValueError")
    assert states == [1]
    assert str(setting.cut[0]) == (
        "rank 1 raised ValueError while this rank waited in all_reduce #1 (float32[4]) at line 3"
    )
    assert setting.group.cut_since is not None


def test_an_abort_without_unfinished_calls_raises_nowhere(setting):
    setting.device.held = False
    setting.reduce()
    until(lambda: not setting.pending())
    setting.group.abort_with_cause("rank 1 raised ValueError")
    assert not setting.cut
    assert setting.group.cut_since is None


def test_waits_raise_after_an_abort(setting):
    works = [setting.reduce(is_async=True) for _ in range(2)]
    setting.group.abort_with_cause("rank 1 raised ValueError")
    for wait in (works[0].wait, works[1].synchronize):
        with pytest.raises(CollectiveAborted, match="rank 1 raised ValueError while this rank waited in all_reduce"):
            wait()


def test_a_barrier_that_an_abort_has_ended_raises(setting):
    raised: list[BaseException] = []

    def meet() -> None:
        try:
            setting.group.barrier(options())
        except CollectiveAborted as error:
            raised.append(error)

    def options() -> Any:
        barrier_options = dist.BarrierOptions()
        barrier_options.asyncOp, barrier_options.device = False, torch.device("cpu")
        return barrier_options

    thread = threading.Thread(target=meet)
    thread.start()
    until(lambda: setting.device.pending == ["barrier"])
    setting.group.abort_with_cause("rank 1 raised ValueError")
    setting.device.held = False
    thread.join(30)
    assert "while this rank waited in barrier #1" in str(raised[0])


def test_blocked_abort_does_not_block_the_rank_and_is_reported(setting, monkeypatch):
    monkeypatch.setattr(recoverable_group, "ABORT_LIMIT", 0.05)
    stuck = threading.Event()
    setting.backends.on_stuck = stuck.set
    setting.device.aborts_hang = True
    setting.reduce()
    setting.group.abort_with_cause("rank 1 raised ValueError")
    assert stuck.wait(30)
    assert setting.backends in recoverable_group._leaked
    recoverable_group._leaked.remove(setting.backends)


def test_failed_device_breaks_the_log_with_the_reason(setting):
    setting.reduce()
    setting.device.poison()
    until(lambda: bool(setting.lost))
    assert "device-side assert" in str(setting.watcher.error)
    setting.group.mark_lost("the device of rank 0 has failed")
    assert setting.log.report().broken
    with pytest.raises(CollectiveAborted, match="the device of rank 0 has failed, so this rank cannot begin"):
        setting.reduce()


def test_a_probe_finds_a_failed_device_and_does_not_wait_for_a_busy_one(setting):
    setting.reduce()
    assert setting.watcher.probe() is None
    setting.device.poison()
    assert setting.watcher.probe() is setting.lost[0]


def test_a_function_is_called_once_the_device_has_executed_what_was_queued_before(setting, capsys):
    called: list[str] = []
    setting.device.submit("something", lambda: called.append("executed"))
    setting.watcher.run_when_done(lambda: called.append(threading.current_thread().name))
    setting.watcher.run_when_done(lambda: called.append(1 / 0))
    setting.watcher.wait(0.05)
    assert called == []
    setting.device.held = False
    until(lambda: called == ["executed", "rankbook-device"])
    setting.watcher.run_when_done(lambda: called.append("later"))
    until(lambda: called[-1] == "later")
    assert setting.lost == [], "an error of a function is none of the device"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_functions_that_wait_for_a_device_that_fails_are_called(setting):
    called: list[bool] = []
    setting.device.submit("something", lambda: None)
    setting.watcher.run_when_done(lambda: called.append(True))
    setting.device.poison()
    until(lambda: called == [True])
    with pytest.raises(DeviceError):
        setting.watcher.run_when_done(lambda: called.append(False))


def test_calls_captured_by_a_graph_are_not_tracked(setting):
    setting.accelerator.capturing = True
    setting.reduce()
    assert not setting.pending()


def test_a_batch_ends_as_a_whole(setting):
    setting.group._start_coalescing(torch.device("cpu"))
    for _ in range(2):
        setting.reduce(is_async=True)
    assert len(setting.pending()) == 2
    work = setting.group._end_coalescing(torch.device("cpu"))
    assert work.wait()
    assert len(setting.pending()) == 2
    setting.device.held = False
    until(lambda: not setting.pending())


def test_a_batch_that_is_not_launched_takes_no_numbers(setting, monkeypatch):
    def refuse(_device):
        raise RuntimeError("NCCL error in: x\nLast error:\nFailed to CUDA calloc 4 bytes")

    setting.reduce()
    before = setting.log.count, setting.log.total, setting.log.checksums
    monkeypatch.setattr(setting.inner, "_end_coalescing", refuse)
    setting.group._start_coalescing(torch.device("cpu"))
    for _ in range(2):
        setting.reduce(is_async=True)
    with pytest.raises(RuntimeError, match=r"^Failed to CUDA calloc"):
        setting.group._end_coalescing(torch.device("cpu"))
    assert (setting.log.count, setting.log.total, setting.log.checksums) == before
    assert len(setting.pending()) == 1


@pytest.mark.parametrize(
    ("queued", "name", "args", "expected"),
    [
        ({"cuda"}, "allreduce", ([TENSOR],), False),
        ({"cpu"}, "allreduce", ([TENSOR],), True),
        ({"cuda"}, "allgather", ([[TENSOR]], [TENSOR]), False),
        ({"cuda"}, "gather", ([], [TENSOR]), False),
        ({"cuda"}, "barrier", (dist.BarrierOptions(),), True),
        ({"cuda"}, "allreduce", ([],), True),
    ],
)
def test_whether_a_device_executes_a_call_follows_from_its_tensors(setting, queued, name, args, expected):
    """Check that a group with gloo and NCCL waits for CPU tensors as one with gloo alone."""
    assert setting.make_backends(queued).runs_on_device(OPS[name], args, {}) is expected


def test_a_barrier_on_the_cpu_is_gloos(setting):
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    backends = setting.make_backends({"cuda"})
    assert not backends.runs_on_device(OPS["barrier"], (options,), {})
    assert not backends.runs_on_device(OPS["barrier"], (), {"opts": options})


def test_a_thread_that_queries_events_does_not_disturb_the_capture_of_a_graph(monkeypatch):
    """In the default mode, a query of any thread makes a capture that is under way invalid."""
    devices: list[torch.device] = []
    modes: list[int] = []

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        return 0

    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(device_calls, "_driver_function", device_calls._driver_function.__wrapped__)
    monkeypatch.setattr(
        device_calls.ctypes, "CDLL", lambda _name: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    )
    Cuda(torch.device("cuda", 1)).bind_thread()
    assert devices == [torch.device("cuda", 1)]
    assert modes == [1]  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def test_a_thread_is_bound_to_its_device_without_the_driver_of_cuda(monkeypatch):
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(device_calls, "_driver_function", device_calls._driver_function.__wrapped__)
    monkeypatch.setattr(device_calls.ctypes, "CDLL", missing)
    Cuda(torch.device("cuda", 0)).bind_thread()


@pytest.mark.parametrize(
    ("code", "expected"), [(0, True), (600, False), (700, "illegal memory access")], ids=["done", "not ready", "failed"]
)
def test_an_event_is_asked_by_the_driver_which_does_not_keep_the_gil(monkeypatch, code, expected):
    """torch's own query keeps it, and waits for another thread that frees memory. It only has to raise an error."""

    class Event:
        cuda_event = 1 << 40

        def record(self) -> None:
            pass

        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    asked: list[int] = []

    def query(handle: ctypes.c_void_p) -> int:
        asked.append(handle.value)
        return code

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(device_calls, "_driver_function", lambda name: {"cuEventQuery": query}[name])
    is_done = Cuda(torch.device("cuda", 0)).record()
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            is_done()
    else:
        assert is_done() is expected
    assert asked == [1 << 40]


def test_the_output_of_a_call_is_released_once_it_was_waited_for(setting):
    """As under torch alone, whose allocator uses the memory again in the order of the stream."""
    work = setting.reduce(is_async=True)
    (call,) = setting.backends.unfinished()
    assert call.keeps_tensors
    work.wait()
    assert not call.keeps_tensors
    kept = weakref.ref(work._work)
    del work
    assert kept() is None
    assert setting.pending() == ["all_reduce #1 (float32[4])"]
    setting.device.held = False
    until(lambda: not setting.pending())


def test_a_work_is_not_queried_while_its_communicator_is_aborted(setting):
    """Its query waits, with the GIL, for the lock that NCCL's abort holds."""
    work = setting.reduce(is_async=True)
    until(lambda: bool(work._launched.work))
    setting.device.aborts_hang = True
    setting.group.abort_with_cause("rank 1 raised ValueError")
    until(lambda: setting.backends.queue.is_paused)
    call = work._launched.work
    assert call._query is not None
    queries: list[int] = []
    call._query = lambda: queries.append(1) or True
    setting.watcher.wait(0.05)
    setting.backends.queue.update()
    assert not queries
    setting.device.aborts_hang = False
    until(lambda: not setting.pending())


class FailedWork:
    """Work of NCCL after an error: it counts as completed, although the device still executes it."""

    def __init__(self, result: int | None) -> None:
        self._result = result

    def is_completed(self) -> bool:
        return True

    def get_future_result(self) -> Any:
        return SimpleNamespace(done=lambda: self._result is not None, value=lambda: self._result)


@pytest.mark.parametrize(("result", "expected"), [(None, True), (0, True), (1, False), (2, False)])
def test_a_work_with_an_error_has_not_ended_before_the_abort(setting, result, expected):
    query = recoverable_group._WorkQuery(FailedWork(result), setting.backends)
    assert query() is True  # a backend that finds no errors
    setting.backends.finds_errors = True
    assert query() is expected
    setting.group.abort_with_cause("rank 1 raised ValueError")
    assert query() is True


def test_an_error_that_the_backend_finds_breaks_the_calls_off(setting, monkeypatch):
    """NCCL's watchdog would abort the communicator later, without an error in the cell."""
    monkeypatch.setattr(recoverable_group, "_CAUSE_TIMEOUT", 0.01)
    breaks: list[int] = []
    errors: list[str] = []
    setting.group.on_break = lambda: breaks.append(1)
    setting.backends.queue.get_error = lambda: errors[0] if errors else ""
    setting.reduce()
    assert not setting.cut
    errors.append("TIMEOUT")
    until(lambda: bool(setting.cut))
    assert str(setting.cut[0]) == (
        "a collective has taken longer than the timeout of its process group while this rank waited in "
        "all_reduce #1 (float32[4]) at line 3"
    )
    assert breaks == [1]
    assert setting.group.cut_since is not None
    assert setting.log.report().broken


def test_an_error_that_the_backend_finds_has_the_reason_of_the_notebook(setting):
    setting.group.on_break = lambda: setting.group.set_cause("rank 1 was killed by SIGKILL")
    setting.reduce()
    setting.backends.queue.get_error = lambda: "COMM_ERROR"
    until(lambda: bool(setting.cut))
    assert str(setting.cut[0]).startswith("rank 1 was killed by SIGKILL while this rank waited in all_reduce")


def test_an_error_that_the_backend_finds_in_an_idle_group_aborts_nothing(setting):
    setting.device.held = False
    setting.reduce()
    until(lambda: not setting.pending())
    setting.backends.queue.get_error = lambda: "COMM_ERROR"
    setting.backends.queue.report_error()
    assert not setting.backends.is_aborted


def test_the_abort_of_a_group_does_not_wait_for_the_device(setting):
    """The kernels of one group may hold up the abort of another one, so that all of them begin first."""
    setting.device.aborts_hang = True
    setting.reduce()
    setting.group.abort_device_calls()
    assert setting.backends.is_aborted
    assert setting.pending()
    assert len(setting.cut) == 1
    setting.device.aborts_hang = setting.device.held = False
    setting.group.wait_device_calls()
    assert not setting.pending()
