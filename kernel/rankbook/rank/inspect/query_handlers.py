"""Answer the notebook's status queries on background threads, while the main thread runs a cell.

`StatusHandler` answers queries for status, details and shards, and limits how often the namespace is searched.
`StatisticHandler` answers those for statistics: `compute_statistic` reads a tensor in pieces. `measure_memory`,
`GradientCounter` and `Utilisation` measure the device. No query initializes CUDA or runs user code, and none waits for
a device without a limit. The threads are in query_threads.py; this module is imported by the first query.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch.optim.optimizer import Optimizer

from rankbook import snapshot_files
from rankbook.errors import InvalidArgument, RankbookError
from rankbook.formatting import is_users
from rankbook.numerics import step_ends
from rankbook.protocol import telemetry
from rankbook.protocol.messages import Frame
from rankbook.protocol.queries import (
    Answer,
    DetailReply,
    GetDetail,
    GetShards,
    GetStatistic,
    GetStatus,
    Look,
    QueryFailed,
    RankSample,
    StatisticReply,
    StatusReply,
)
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankDetail, Statistic, Struct
from rankbook.rank.inspect import object_discovery, tensor_introspection
from rankbook.rank.inspect.object_discovery import GradientMeter, MeasuredObjects
from rankbook.rank.inspect.tensor_introspection import GilYield, list_variables
from rankbook.rank.process_groups.device_calls import DeviceWatcher
from rankbook.snapshot_files import SnapshotHeader

_MAX_LOAD = {True: 1 / 200, False: 1 / 50}
"""Maximum share of a processor for the search for objects, while a cell runs (True) and while none does (False)."""
_MIN_INTERVAL = 0.5
"""Minimum seconds between two measurements of the device's memory. Counters are read for every query."""
_SEARCH_PAUSES = 1.0, 4.0
"""Minimum and maximum seconds between two searches while a cell runs; the pause doubles while nothing changes."""
_COUNT_TIMEOUT = 0.02
"""Seconds that a search waits for the count of gradients; a later count appears in the next answer."""
_NORMS_TIMEOUT = 0.1
"""Seconds that a single query waits for the norms of gradients."""
_MEASURE_TIMEOUT = 0.1
"""Seconds that a query waits for the driver's numbers about a device."""
# Completed saves that are remembered until a view asks for them.
_LAST_SAVES = 16
_PROTECTION = "rankbook.runtime.protection"


class MainThreadStatus(Protocol):
    """Interface of the main thread's work, seen from other threads."""

    cell: int
    running: int | None

    def line(self) -> int | str | None:
        """Return the line of the cell that is executing."""

    def frames(self) -> tuple[Frame, ...]:
        """Return the stack."""

    def pending_collective(self) -> tuple[str, float]:
        """Return the oldest pending collective and its age in seconds; "" if there is none."""

    def namespace(self) -> dict[str, object]:
        """Return a copy of the variables."""

    def hidden(self) -> Collection[str]:
        """Return the names that were defined before any cell."""

    def run_when_idle(self, function: Callable[[], None]) -> None:
        """Call `function` on the main thread between two tasks: now, if no task runs."""

    def device_watcher(self) -> DeviceWatcher | None:
        """Return the watcher of the rank's device; None if the rank computes on the CPU."""


class StatusHandler:
    """Answers status queries for `rank`, which computes on `device`."""

    def __init__(self, main_thread: MainThreadStatus, rank: int, device: torch.device) -> None:
        self._main_thread = main_thread
        self._rank = rank
        self._device = device
        self._host = socket.gethostname()
        self._device_name = ""
        # What the last search and the last measurement have found. Between them, every reply repeats it.
        self._utilisation = Utilisation(device)
        self._last_utilisation: float | None = None
        self._measured: MeasuredObjects | None = None
        self._memory: MemoryUse | None = None
        self._gradients = GradientCounter(main_thread.run_when_idle)
        self._norms = GradientMeter(main_thread.run_when_idle, lambda: main_thread.cell)
        self._measuring: threading.Thread | None = None
        # All 0.0, so that the first query measures at once.
        self._due = self._last_search = self._search_cost = 0.0
        self._pause = _SEARCH_PAUSES[0]
        self._cell: int | None = None
        self._version = 0
        self._holdings: tuple[Holding, ...] = ()
        self._finished_saves: tuple[CheckpointSave, ...] = ()
        self._saves_lock = threading.Lock()
        self._listening = False

    def answer(self, question: Look) -> Answer:
        """Answer a query, or return `QueryFailed` with the reason."""
        try:
            match question:
                case GetStatus():
                    # Asked ten times a second while a view is open. The other queries come when a user clicks.
                    return self._status(question)
                case GetDetail(token):
                    return DetailReply(token, self._detail())
                case GetShards(token, name, others):
                    from rankbook.rank.inspect import shard_map

                    return shard_map.shard_reply(
                        token, self._main_thread.namespace(), name, self._rank, GilYield(), others=others
                    )
                case GetStatistic():
                    raise InvalidArgument("expected another query: a statistic has a thread of its own")
        except RankbookError as error:
            return QueryFailed(question.token, str(error))

    def cheap_answer(self, question: Look) -> Answer | None:
        """Answer a status query that needs no search and no measurement, or return None."""
        if not isinstance(question, GetStatus) or question.fresh:
            return None
        now = time.monotonic()
        if question.norms_every:
            self._norms.request(question.norms_every)
        if question.holdings and (now >= self._due or self._search_is_due(now)):
            return None
        return self._status_reply(question)

    # Status

    def _status(self, question: GetStatus) -> StatusReply:
        if question.holdings:
            now = time.monotonic()
            if question.fresh or self._search_is_due(now):
                self._search()
            if question.fresh or now >= self._due:
                self._measure()
            if question.norms_every:
                self._norms.request(question.norms_every)
                if question.fresh:
                    self._norms.wait(_NORMS_TIMEOUT)
        return self._status_reply(question)

    def _search_is_due(self, now: float) -> bool:
        # The pause between searches is the larger one of two: a fixed pause, which doubles while nothing changes, and
        # the pause that keeps the cost of the last search (CPU seconds) within its share of a processor.
        running = self._main_thread.running
        if running != self._cell:
            # Another cell is likely to make new objects, so the pause is short again.
            self._cell, self._pause = running, _MIN_INTERVAL
        pause = _MIN_INTERVAL if running is None else self._pause
        wait = max(pause, self._search_cost / _MAX_LOAD[running is not None])
        return self._measured is None or now >= self._last_search + wait

    def _status_reply(self, question: GetStatus) -> StatusReply:
        if question.saves:
            self._listen()
        changed = question.holdings and question.known != self._version
        version, latest = self._norms.version, self._norms.latest
        new_norms = question.norms_every > 0 and question.norms_known != version
        return StatusReply(
            question.token,
            # Counters and the current line are cheap and always fresh. Memory is at most `_MIN_INTERVAL` old.
            self._sample(memory=question.holdings),
            self._version,
            self._holdings if changed else None,
            self._saves() if question.saves else (),
            latest if new_norms else None,
            version,
            self._norms.seconds,
        )

    def _saves(self) -> tuple[CheckpointSave, ...]:
        """Return the running saves and the last completed ones; for a checkpoint saved twice, the later save."""
        running = [save for save in telemetry.snapshot("checkpoint ") if isinstance(save, CheckpointSave)]
        # A checkpoint that is being saved again is shown as running, not as done.
        again = {(save.folder, save.name) for save in running}
        return (*running, *(save for save in self._finished_saves if (save.folder, save.name) not in again))

    def _sample(self, *, memory: bool) -> RankSample:
        waits_for, waited = self._main_thread.pending_collective()
        return RankSample(
            host=self._host,
            device_name=self._device_name,
            cell=self._main_thread.running,
            line=self._main_thread.line(),
            waits_for=waits_for,
            waited=waited,
            memory=self._memory if memory else None,
            utilisation=self._last_utilisation if memory else None,
            steps=self._steps(),
            at=time.monotonic(),
            snapshots=_snapshots(),
        )

    def _steps(self) -> int | None:
        counted = [step.steps for step in telemetry.snapshot("training") if isinstance(step, telemetry.TrainingStep)]
        # The runtime counts optimizer steps itself. Otherwise an optimizer's own counter is read.
        if counted and counted[0]:
            return counted[0]
        optimizers = [] if self._measured is None else [reference() for reference in self._measured.counters]
        steps = [
            tensor_introspection.steps_of_optimizer(optimizer) for optimizer in optimizers if optimizer is not None
        ]
        return max((count for count in steps if count is not None), default=None)

    def _search(self) -> None:
        # CPU time of this thread: what the search costs the cell, without the pauses in which it gives back the GIL.
        start = time.thread_time()
        gil_yield = GilYield()
        if not self._device_name:
            self._device_name = device_name(self._device)
        objects = object_discovery.discover_objects(self._main_thread.namespace(), gil_yield)
        measured = object_discovery.measure_objects(objects, str(self._device), gil_yield)
        self._gradients.request(measured.trainable, timeout=_COUNT_TIMEOUT)
        if self._measured is None or measured.holdings != self._holdings:
            # The number lets the notebook name what it knows, and unchanged holdings are not sent again.
            self._version += 1
            self._holdings = measured.holdings
            self._pause = _SEARCH_PAUSES[0]
        else:
            self._pause = min(max(2 * self._pause, _SEARCH_PAUSES[0]), _SEARCH_PAUSES[1])
        self._norms.set_models(measured.models)
        self._measured = measured
        self._last_search, self._search_cost = time.monotonic(), time.thread_time() - start
        self._due = 0.0  # measure at once, with the new objects

    def _measure(self) -> None:
        """Measure the device's memory, for at most `_MEASURE_TIMEOUT` seconds: a later result is in the next answer."""
        if self._device.type != "cuda":
            self._measure_now()
            return
        # A call of the driver may hang while another thread waits for the device.
        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(target=self._measure_now, name="rankbook-measure", daemon=True)
            self._measuring.start()
        self._measuring.join(_MEASURE_TIMEOUT)

    def _measure_now(self) -> None:
        measured = self._measured
        assert measured is not None
        try:
            self._memory = measure_memory(self._device, measured.parameters, self._gradients.bytes, measured.optimizer)
            self._last_utilisation = self._utilisation.read()  # a call into the driver, which may be slow
        except RuntimeError:  # the device has failed for good: every call raises, and nothing is known of it any more
            self._memory = self._last_utilisation = None
        self._due = time.monotonic() + _MIN_INTERVAL

    def _listen(self) -> None:
        """Keep completed saves, which are in no telemetry snapshot any more."""
        if self._listening:
            return
        self._listening = True
        # A chain: other listeners still get the event.
        before: Callable[[Struct], Any] | None = telemetry.listener

        def listener(struct: Struct) -> None:
            if isinstance(struct, CheckpointSave) and struct.phase in {"done", "failed"}:
                # Several threads may report saves.
                with self._saves_lock:
                    saves = [
                        save
                        for save in self._finished_saves
                        if (save.folder, save.name) != (struct.folder, struct.name)
                    ]
                    self._finished_saves = tuple([*saves, struct][-_LAST_SAVES:])
            if before is not None:
                before(struct)

        telemetry.listener = listener

    # Details

    def _detail(self) -> RankDetail:
        frames = [
            frame for frame in self._main_thread.frames() if frame.file.startswith("Cell In[") or is_users(frame.file)
        ]
        stack = tuple(
            f"{frame.file}, line {frame.line}"
            + (f", in {frame.function}" if frame.function != "<module>" else "")
            + (f": {frame.source}" if frame.source else "")
            for frame in frames
        )
        variables = list_variables(self._main_thread.namespace(), self._main_thread.hidden(), GilYield())
        return RankDetail(self._rank, stack, (), variables)


STATISTIC_TIMEOUT = 1.5
"""Maximum seconds for a statistic."""
_PIECE = {"cpu": 30_000, "cuda": 1 << 22}
"""Elements per piece and device type. torch splits work between threads from 32768 elements on."""
_statistic_lock = threading.Lock()


class StatisticHandler:
    """Answers a query for the statistic of a tensor of `rank`, on a thread of its own."""

    def __init__(self, main_thread: MainThreadStatus, rank: int) -> None:
        self._main_thread = main_thread
        self._rank = rank

    def answer(self, question: GetStatistic) -> Answer:
        """Answer a query, or return `QueryFailed` with the reason."""
        from rankbook.rank.inspect import shard_map

        # One at a time: those that a device keeps waiting must not pile up.
        if not _statistic_lock.acquire(timeout=STATISTIC_TIMEOUT):
            return QueryFailed(question.token, "an earlier statistic of this rank still waits for its device")
        try:
            tensor = shard_map.find_tensor(self._main_thread.namespace(), question.name, question.key, GilYield())
            statistic = compute_statistic(self._rank, tensor, self._main_thread.device_watcher())
            return StatisticReply(question.token, statistic)
        except RankbookError as error:
            return QueryFailed(question.token, str(error))
        finally:
            _statistic_lock.release()


def _snapshots() -> tuple[SnapshotHeader, ...]:
    """Return the headers of this rank's snapshots; none, without a look at the files, if nothing was ever protected."""
    place = snapshot_files.this_place
    if place is None or _PROTECTION not in sys.modules:
        return ()
    return snapshot_files.read_own_headers(place)


def compute_statistic(rank: int, tensor: torch.Tensor, watcher: DeviceWatcher | None = None) -> Statistic:
    """Compute minimum, mean and maximum of the local elements. Values that change meanwhile may be old or new.

    `watcher` is that of the rank's device, if it has one. Raises `InvalidArgument` for data without an order, for more
    than can be read in `STATISTIC_TIMEOUT` seconds, and if the device does not come to it in that time.
    """
    if tensor.is_complex() or tensor.is_quantized or tensor.layout is not torch.strided:
        raise InvalidArgument(f"cannot compute the minimum and maximum of a tensor of {tensor.dtype}, {tensor.layout}")
    if tensor.device.type == "meta":
        raise InvalidArgument("the tensor is on the meta device and has no values")
    if watcher is not None and tensor.device.type == watcher.accelerator.type:
        _wait_for_device(watcher, tensor.device)
    # One pass: the mean is computed from the sum and the number of the finite values.
    start, read = time.monotonic(), 0
    low, high, total, finite, nans = float("inf"), float("-inf"), 0.0, 0, 0
    with torch.no_grad(), _side_stream(tensor.device):
        # In pieces, so that the time limit can be checked, and no copy of the whole tensor is made.
        for piece in _pieces(tensor.detach(), _PIECE.get(tensor.device.type, 1 << 20)):
            if time.monotonic() - start > STATISTIC_TIMEOUT:
                raise InvalidArgument(
                    f"the tensor is too large for statistics: reading {read:,} of its {tensor.numel():,} elements took "
                    f"{STATISTIC_TIMEOUT} s, the limit while the rank works"
                )
            values = piece.to(_wide_dtype(tensor.dtype, tensor.device.type))
            # NaN and infinity are counted on their own. Minimum, mean and maximum of the other values are still useful.
            is_finite = values.isfinite()
            # Read at once: on a device, every read waits.
            numbers = torch.stack(
                [
                    values.where(is_finite, torch.inf).min().double(),
                    values.where(is_finite, -torch.inf).max().double(),
                    values.where(is_finite, 0.0).sum(dtype=torch.float64),
                    is_finite.sum().double(),
                    values.isnan().sum().double(),
                ]
            ).tolist()
            low, high, total = min(low, numbers[0]), max(high, numbers[1]), total + numbers[2]
            finite, nans, read = finite + int(numbers[3]), nans + int(numbers[4]), read + piece.numel()
    infinities = read - finite - nans
    if not finite:
        return Statistic(rank, None, None, None, nans, infinities)
    return Statistic(rank, low, total / finite, high, nans, infinities)


def _wide_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the type in which values of `dtype` are compared and added.

    float64 has all integers up to 2**53, and float32 those up to 2**24. On CUDA float64 is slow.
    """
    needs_wide = dtype == torch.float64 or (not dtype.is_floating_point and dtype.itemsize >= 4)
    return torch.float64 if device_type == "cpu" or needs_wide else torch.float32


def _side_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels for `device` do not wait behind those that the program queues meanwhile."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def _wait_for_device(watcher: DeviceWatcher, device: torch.device) -> None:
    """Wait until the rank's device has executed what is queued now, because a read would wait without a limit.

    Raises `InvalidArgument` after `STATISTIC_TIMEOUT` seconds, and the error of a device that has failed.
    """
    watcher.accelerator.bind_thread()
    executed = threading.Event()
    watcher.run_when_done(executed.set)
    if not executed.wait(STATISTIC_TIMEOUT):
        raise InvalidArgument(
            f"{device} has not executed within {STATISTIC_TIMEOUT} s what is queued on it: it computes, or waits in a "
            "collective"
        )


def _pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield the tensor in pieces of at most `most` elements, without copying the whole."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), most):
            yield flat[start : start + most]
    else:
        # As many rows as fit into a piece. A single row that is still too large is split again, along the next axis.
        rows = max(1, most // (tensor.numel() // tensor.shape[0]))
        for start in range(0, tensor.shape[0], rows):
            block = tensor[start : start + rows]
            yield from _pieces(block if rows > 1 else block[0], most)


def measure_memory(device: torch.device, parameters: int, gradients: int, optimizer: int) -> MemoryUse | None:
    """Return the memory use in bytes, or None for a CUDA device that this rank has not initialized."""
    tensor_bytes = parameters + gradients + optimizer
    if device.type == "cuda":
        # Asking for the memory would initialize CUDA on a rank that may not use it.
        if not torch.cuda.is_initialized():
            return None
        free, total = torch.cuda.mem_get_info(device)
        # Not `total - free`: other ranks and programs may use the device as well.
        used, shared = torch.cuda.memory_reserved(device), 0
    else:
        # A CPU rank has no memory of its own: what it could use is what it has plus what the machine has free.
        resident = psutil.Process().memory_info()
        free, shared = psutil.virtual_memory().available, getattr(resident, "shared", 0)
        used = resident.rss
        total = free + max(used, tensor_bytes)  # pages that were never written occupy no memory yet
    return MemoryUse(
        total=total,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        other=max(0, used - tensor_bytes),
        free=free,
        shared=shared,
    )


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device; empty if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_initialized() else ""
    if sys.platform != "linux":
        return ""
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return match[1] if match else ""


class GradientCounter:
    """Counts the bytes of gradients, on the thread that writes them.

    A backward pass writes gradients without holding the interpreter lock, so another thread that reads `.grad` may find
    a tensor that is just being freed. A view therefore only requests a count. It is made by the thread that has called
    `optimizer.step()`, at the end of that step and for the parameters of that optimizer, and by the main thread between
    two cells for the rest, except for parameters that an optimizer on another thread steps.

    Without a view this costs nothing: the first request begins to listen to the ends of steps, and counts once per
    request.
    """

    def __init__(self, run_when_idle: Callable[[Callable[[], None]], None]) -> None:
        self._run_when_idle = run_when_idle
        self._pending: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._main = threading.main_thread().ident
        self._other_threads: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._counted = threading.Event()
        self._waits_for_idle = False
        self._listens = False

    @property
    def bytes(self) -> int:
        """Return the bytes of all gradients of the requested parameters, as of their last counts."""
        return sum(tuple(self._bytes.values()))

    def request(self, parameters: Iterable[weakref.ref[torch.Tensor]], *, timeout: float) -> None:
        """Request a count of the gradients of `parameters`, and wait up to `timeout` seconds for it."""
        if not self._listens:
            self._listens = True
            step_ends.listen(self._after_step)
        # By identity, because tensors compare by their elements. The weak references let parameters be freed meanwhile.
        pending = {id(tensor): parameter for parameter in parameters if (tensor := parameter()) is not None}
        self._bytes = {key: size for key, size in self._bytes.items() if key in pending}
        # Cleared before the parameters are set, because the count may come at once.
        self._counted.clear()
        self._pending, self._stepped = pending, set()
        if pending and not self._waits_for_idle:
            self._waits_for_idle = True
            self._run_when_idle(self._when_idle)
        if pending:
            self._counted.wait(timeout)

    def _after_step(self, optimizer: Optimizer) -> None:
        if (thread := threading.get_ident()) != self._main:
            self._other_threads[id(optimizer)] = weakref.ref(optimizer), thread
        else:
            self._other_threads.pop(id(optimizer), None)
        if self._pending and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            self._count(tensor_introspection.parameters_of_optimizer(optimizer))

    def _when_idle(self) -> None:
        self._waits_for_idle = False
        # A thread that has ended does not step any more. Its optimizers count as the main thread's again.
        alive = {thread.ident for thread in threading.enumerate()}
        stepped_elsewhere = {
            id(parameter)
            for reference, thread in tuple(self._other_threads.values())
            if thread in alive and (optimizer := reference()) is not None
            for parameter in tensor_introspection.parameters_of_optimizer(optimizer)
        }
        tensors = [parameter() for key, parameter in tuple(self._pending.items()) if key not in stepped_elsewhere]
        self._count([tensor for tensor in tensors if tensor is not None])

    def _count(self, parameters: Iterable[torch.Tensor]) -> None:
        pending, sizes = self._pending, self._bytes
        with torch._C.DisableTorchFunctionSubclass():  # no user code
            for parameter in parameters:
                if pending.pop(id(parameter), None) is not None:
                    # A non-leaf tensor has no gradient, and torch warns when it is asked for one.
                    gradient = parameter.grad if parameter.is_leaf else None
                    sizes[id(parameter)] = 0 if gradient is None else tensor_introspection.nbytes(gradient)
        if not pending:
            self._counted.set()


class Utilisation:
    """The share of time in which a CUDA device computed, if NVML is available."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unavailable = device.type != "cuda"

    def read(self) -> float | None:
        """Return a number from 0 to 1, or None."""
        if self._unavailable or not torch.cuda.is_initialized():
            return None
        try:
            return torch.cuda.utilization(self._device) / 100
        except Exception as error:
            # NVML is missing, or does not report this for the device (a MIG slice, for example), and never will. The
            # classes of NVML's errors are in a module that only torch imports.
            if not (isinstance(error, ImportError | RuntimeError | OSError) or type(error).__module__ == "pynvml"):
                raise
            self._unavailable = True
            return None
