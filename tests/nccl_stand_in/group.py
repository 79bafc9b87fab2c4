"""The process group of the stand-in, in the place of ProcessGroupNCCL, and its registration as a torch backend.

A collective is one operation of the device. When its turn comes, the rank publishes its inputs in the group's store,
waits until all members have, and computes the outputs. The names are those of ProcessGroupNCCL where there are any.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, WorkResult

from tests.nccl_stand_in.device import Device, Event, current_device, poll, wait_as_in_c

BACKEND = "stand_in"
PARTIAL = 77
"""Value that an abort leaves in the first half of every output of an unfinished collective."""
BUFFER_BYTES = 1 << 16
"""A send of more bytes is not finished before its recv has begun, as with NCCL's buffers."""

WATCHDOG_PATIENCE = 60.0
"""Seconds after which the watchdog aborts a communicator in which it has found an error."""

_RESULTS = {
    ErrorType.TIMEOUT: int(WorkResult.TIMEOUT),
    ErrorType.COMM_ERROR: int(WorkResult.COMM_ERROR),
    ErrorType.REMOTE_ERROR: int(WorkResult.COMM_ERROR),
}
_ABORTED = "NCCL communicator was aborted on rank {}."
_ALL = "all"

Tensors = list[torch.Tensor]
Compute = Callable[[list[Tensors]], None]


class _Mismatch(Exception):
    """The ranks have given tensors of different sizes."""


class _Communicator:
    """The connection of some members of a group: the keys through which they exchange tensors."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.aborted = threading.Event()
        self.broken = False
        self.begun = 0
        self.messages: Counter[tuple[int, int]] = Counter()
        self._old: str | None = None

    def publish(self, key: str, signature: tuple[Any, ...], tensors: Tensors) -> None:
        """Make this rank's tensors available to the others."""
        data = [(tensor.dtype, tuple(tensor.shape), _bytes_of(tensor)) for tensor in tensors]
        self.store.set(f"{key}/{self.rank}", pickle.dumps((signature, data)))

    def collect(self, key: str, signature: tuple[Any, ...]) -> list[Tensors] | None:
        """Return the tensors of all members, or None after an abort. Does not end if their signatures differ."""
        keys = [f"{key}/{rank}" for rank in self.ranks]
        if not self._wait(lambda: self.store.check(keys)):
            return None
        published = [pickle.loads(self.store.get(item)) for item in keys]
        # Whoever has published this one has read all of the one before.
        if self._old is not None:
            self.store.delete_key(self._old)
        self._old = f"{key}/{self.rank}"
        if any(other_signature != signature for other_signature, _ in published):
            self.hang()
            return None
        return [[_tensor_of(*item) for item in data] for _, data in published]

    def take(self, key: str, sender: int) -> torch.Tensor | None:
        """Return the tensor of a message, and delete it; None after an abort."""
        key = f"{key}/{sender}"
        if not self._wait(lambda: self.store.check([key])):
            return None
        _, data = pickle.loads(self.store.get(key))
        self.store.delete_key(key)
        return _tensor_of(*data[0])

    def wait_for_receiver(self, key: str) -> None:
        """Wait until a message that this rank has sent is taken."""
        self._wait(lambda: not self.store.check([f"{key}/{self.rank}"]))

    def hang(self) -> None:
        """Wait for the abort."""
        self._wait(lambda: False)

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until `is_over()`. Return False if the communicator was aborted before."""
        over = False

        def check() -> bool:
            nonlocal over
            over = not (self.aborted.is_set() or self.broken) and is_over()
            return over or self.aborted.is_set()

        poll(check)
        return over


class _Call:
    """Collective or message: the device calls `publish` at its beginning, and `complete` at its end."""

    def __init__(
        self, name: str, communicator: _Communicator, publish: Callable[[], None], complete: Callable[[], bool]
    ) -> None:
        self.name = name
        self.outputs: Tensors = []
        self.communicator = communicator
        self._publish = publish
        self._complete = complete

    def publish(self) -> None:
        if not self.communicator.aborted.is_set():
            self._publish()

    def complete(self) -> None:
        try:
            if not self.communicator.aborted.is_set() and self._complete():
                return
        except _Mismatch:
            self.communicator.hang()
        for output in self.outputs:
            leading = output.view(-1)[: (output.numel() + 1) // 2] if output.is_contiguous() else output
            leading.fill_(PARTIAL)


class StandInWork(dist._Work):
    """The work of an asynchronous collective: `wait` orders, and returns at once."""

    def __init__(self, group: StandInGroup, event: Event | None, outputs: Tensors, source: int | None = None) -> None:
        super().__init__()
        self._group = group
        self._event = event  # None in a batch, whose work has it
        self._outputs = outputs
        self._source = source

    def wait(self, _timeout: timedelta | None = None) -> bool:
        """Let what is queued later wait for the collective."""
        return True

    def synchronize(self) -> None:
        """Do what `wait` does, as the work of NCCL."""

    def is_completed(self) -> bool:
        """Return True if the device has executed the collective, or an abort has ended it, or its group has an error.

        In the last case, the device still executes it.
        """
        return self._event is None or self._event.query() or self._group.has_error

    is_success = is_completed

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a future of the result, a `WorkResult`. It has no value before the watchdog knows it."""
        future: torch.futures.Future[int] = torch.futures.Future()
        if self._event is None or self._event.query():
            future.set_result(int(WorkResult.SUCCESS))
        elif self._group.has_error:
            future.set_result(_RESULTS[self._group.get_error()])
        return future

    def exception(self) -> None:
        """Return None: there is no exception, not even of an abort."""

    def result(self) -> Tensors:
        """Return the outputs, to be filled."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender of a message."""
        assert self._source is not None
        return self._source

    def get_future(self) -> torch.futures.Future[Tensors]:
        """Return a future that has its value: whoever uses the value is ordered behind the collective."""
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class StandInGroup(dist.ProcessGroup):
    """A process group that behaves as ProcessGroupNCCL does, on a stand-in device.

    `store` is the group's own; `timeout` is that of its creation. The device is the process's by default.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None, device: Device | None = None
    ) -> None:
        super().__init__(rank, size)
        self.device = device or current_device()
        self.bound_device_id = None
        self._store = store
        self._rank, self._size = rank, size
        self._timeout = timeout or timedelta(minutes=10)
        self._communicators: dict[str, _Communicator] = {}
        self._aborted = False
        self._error = ErrorType.SUCCESS
        self._calls: deque[tuple[float, Event]] = deque()
        self._watchdog: threading.Thread | None = None
        self._group_name = self._group_desc = ""
        self._batch: list[_Call] | None = None

    # Communicators

    def eager_connect_single_device(self, _device: torch.device | None = None) -> None:
        """Build the communicator now. All members must call it."""
        self._communicator()

    @property
    def is_connected(self) -> bool:
        """Return True if the communicator of all members has been built."""
        return _ALL in self._communicators

    def _communicator(self, name: str = _ALL, ranks: Sequence[int] | None = None) -> _Communicator:
        """Return a communicator, which the first call builds.

        The first member sets an id; the others wait for it as long as the store's timeout. Then all wait for one
        another without a limit, where neither an abort nor an exception reaches them.
        """
        if self._aborted:
            raise dist.DistBackendError(_ABORTED.format(self._rank))
        communicator = self._communicators.get(name)
        if communicator is None:
            self._refuse()
            ranks = list(range(self._size)) if ranks is None else ranks
            store = dist.PrefixStore(f"communicator-{name}", self._store)
            if self._rank == ranks[0]:
                store.set("id", "")
            else:
                self._wait_for_id(store)
            store.set(f"joined/{self._rank}", "")
            keys = [f"joined/{rank}" for rank in ranks]
            wait_as_in_c(lambda: store.check(keys))
            communicator = self._communicators[name] = _Communicator(store, self._rank, ranks)
        return communicator

    def _wait_for_id(self, store: dist.Store) -> None:
        seconds = self._store.timeout.total_seconds()
        deadline = time.monotonic() + seconds
        wait_as_in_c(lambda: store.check(["id"]) or time.monotonic() > deadline)
        if not store.check(["id"]):
            raise dist.DistBackendError(
                f"[{self._rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
                f"key-value store by key 'id', but store->get('id') got error: wait timeout after "
                f"{seconds * 1000:.0f}ms, keys: id"
            )

    def abort(self) -> None:
        """End all collectives with partial data. Communicators that are being built go on waiting."""
        wait_as_in_c(lambda: not self.device.aborts_hang)
        self._aborted = True
        for communicator in self._communicators.copy().values():
            communicator.aborted.set()

    # Errors that the group finds itself

    def get_error(self) -> ErrorType:
        """Return the error that the watchdog has found, or SUCCESS."""
        return self._error

    @property
    def has_error(self) -> bool:
        """Return True if the watchdog has found an error, and nobody has aborted the group yet."""
        return self._error != ErrorType.SUCCESS and not self._aborted

    def break_connection(self) -> None:
        """Lose the connection to the peers: collectives hang, and the watchdog reports an error."""
        for communicator in self._communicators.copy().values():
            communicator.broken = True
        self._error = ErrorType.COMM_ERROR

    def _follow(self, event: Event) -> None:
        """Let the watchdog follow a call. It does not follow what is recorded in a graph."""
        if self.device.is_capturing:
            return
        self._calls.append((time.monotonic(), event))
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._watch, name="stand-in-nccl-watchdog", daemon=True)
            self._watchdog.start()

    def _watch(self) -> None:
        """Find collectives that take longer than the timeout, and abort the communicators, but only much later."""
        self.device.relax_thread()
        found = math.inf
        while not self._aborted and self.device.error is None:
            while self._calls and self._calls[0][1].is_done:
                self._calls.popleft()
            now, timeout = time.monotonic(), self._timeout.total_seconds()
            if self._calls and now - self._calls[0][0] > timeout and self._error == ErrorType.SUCCESS:
                self._error = ErrorType.TIMEOUT
            if self._error != ErrorType.SUCCESS:
                found = min(found, now)
            if now - found > WATCHDOG_PATIENCE:
                self.abort()
            time.sleep(min(0.1, timeout / 10))

    def _refuse(self) -> None:
        if self.device.refusal:
            raise dist.DistBackendError(self.device.refusal)

    def shutdown(self) -> None:
        """Abort the group, where ProcessGroupNCCL would wait for all ranks."""
        self.abort()

    # Launching

    def _launch(self, call: _Call, outputs: Tensors, *, is_async: bool, source: int | None = None) -> Any:
        self._refuse()
        call.outputs = outputs
        if self._batch is not None:
            self._batch.append(call)
            return StandInWork(self, None, outputs, source)
        event = self._submit(call.name, [call])
        return StandInWork(self, event, outputs, source) if is_async else None

    def _submit(self, name: str, calls: list[_Call]) -> Event:
        def run() -> None:
            for call in calls:
                call.publish()
            for call in sorted(calls, key=lambda call: call.name == "send"):  # these wait for what the others receive
                call.complete()

        event = self.device.submit(name, run)
        self._follow(event)
        return event

    def _collective(
        self, name: str, opts: Any, inputs: Tensors, outputs: Tensors, compute: Compute, *alike: Any
    ) -> Any:
        """Launch a collective. `alike` is what NCCL needs to be equal on all ranks."""
        self.device.raise_error()
        communicator = self._communicator()
        signature = (name, *alike)
        key = ""

        # At the execution, of which a graph may have many.
        def publish() -> None:
            nonlocal key
            communicator.begun += 1
            key = str(communicator.begun)
            communicator.publish(key, signature, inputs)

        def complete() -> bool:
            tensors = communicator.collect(key, signature)
            if tensors is not None:
                compute(tensors)
            return tensors is not None

        call = _Call(name, communicator, publish, complete)
        return self._launch(call, outputs, is_async=opts is None or opts.asyncOp)

    def _start_coalescing(self, _device: object) -> None:
        self._batch = []

    def _end_coalescing(self, _device: object) -> StandInWork | None:
        batch, self._batch = self._batch, None
        if not batch:
            return None
        outputs = [output for call in batch for output in call.outputs]
        return StandInWork(self, self._submit("coalesced", batch), outputs)

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.all_reduce."""
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.all_reduce_coalesced."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> Any:
        operation = _operation_of(opts)

        def compute(inputs_by_rank: list[Tensors]) -> None:
            for index, tensor in enumerate(tensors):
                _fill(tensor, _reduced([rank_tensors[index] for rank_tensors in inputs_by_rank], operation))

        return self._collective(name, opts, tensors, tensors, compute, _sizes(tensors), str(operation))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.broadcast."""
        root = 0 if opts is None else opts.rootRank
        is_root = root == self._rank
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("Tensors must be contiguous")

        def compute(inputs_by_rank: list[Tensors]) -> None:
            if not is_root:
                for tensor, value in zip(tensors, inputs_by_rank[root], strict=True):
                    _fill(tensor, value)

        inputs, outputs = (tensors, []) if is_root else ([], tensors)
        return self._collective("broadcast", opts, inputs, outputs, compute, _sizes(tensors), root)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.reduce."""
        operation, root = _operation_of(opts), 0 if opts is None else opts.rootRank

        def compute(inputs_by_rank: list[Tensors]) -> None:
            if root == self._rank:
                _fill(tensors[0], _reduced([rank_tensors[0] for rank_tensors in inputs_by_rank], operation))

        outputs = tensors if root == self._rank else []
        return self._collective("reduce", opts, tensors, outputs, compute, _sizes(tensors), str(operation), root)

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.all_gather."""

        def compute(inputs_by_rank: list[Tensors]) -> None:
            for output, rank_tensors in zip(output_lists[0], inputs_by_rank, strict=True):
                _fill(output, rank_tensors[0])

        return self._collective("all_gather", opts, inputs, output_lists[0], compute)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """See torch.distributed.all_gather_into_tensor."""
        return self._all_gather_single("all_gather_into_tensor", [output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Gather several tensors into one output each."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        def compute(inputs_by_rank: list[Tensors]) -> None:
            for index, output in enumerate(outputs):
                _fill(output, torch.cat([rank_tensors[index].reshape(-1) for rank_tensors in inputs_by_rank]))

        return self._collective(name, opts, inputs, outputs, compute, _sizes(inputs))

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.gather."""
        root = 0 if opts is None else opts.rootRank
        outputs = output_lists[0] if root == self._rank else []

        def compute(inputs_by_rank: list[Tensors]) -> None:
            for output, rank_tensors in zip(outputs, inputs_by_rank, strict=False):
                _fill(output, rank_tensors[0])

        return self._collective("gather", opts, inputs, outputs, compute, root)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None) -> Any:
        """See torch.distributed.scatter."""
        root = 0 if opts is None else opts.rootRank

        def compute(inputs_by_rank: list[Tensors]) -> None:
            _fill(outputs[0], inputs_by_rank[root][self._rank])

        inputs = input_lists[0] if root == self._rank else []
        return self._collective("scatter", opts, inputs, outputs, compute, root)

    def reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None) -> Any:
        """See torch.distributed.reduce_scatter."""
        operation = _operation_of(opts)

        def compute(inputs_by_rank: list[Tensors]) -> None:
            _fill(outputs[0], _reduced([rank_tensors[self._rank] for rank_tensors in inputs_by_rank], operation))

        inputs = input_lists[0]
        return self._collective("reduce_scatter", opts, inputs, outputs, compute, _sizes(inputs), str(operation))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """See torch.distributed.reduce_scatter_tensor."""
        return self._reduce_scatter_single("reduce_scatter_tensor", [output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Reduce and scatter several tensors."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        operation = _operation_of(opts)

        def compute(inputs_by_rank: list[Tensors]) -> None:
            for index, output in enumerate(outputs):
                parts = [rank_tensors[index].reshape(self._size, -1)[self._rank] for rank_tensors in inputs_by_rank]
                _fill(output, _reduced(parts, operation))

        return self._collective(name, opts, inputs, outputs, compute, _sizes(inputs), str(operation))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """See torch.distributed.all_to_all."""

        def compute(inputs_by_rank: list[Tensors]) -> None:
            for output, rank_tensors in zip(outputs, inputs_by_rank, strict=True):
                _fill(output, rank_tensors[self._rank])

        return self._collective("all_to_all", opts, inputs, outputs, compute)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        """See torch.distributed.all_to_all_single."""
        inputs = list(tensor.split(input_sizes) if input_sizes else tensor.chunk(self._size))
        outputs = list(output.split(output_sizes) if output_sizes else output.chunk(self._size))

        def compute(inputs_by_rank: list[Tensors]) -> None:
            for part, rank_tensors in zip(outputs, inputs_by_rank, strict=True):
                _fill(part, rank_tensors[self._rank])

        return self._collective("all_to_all_single", opts, inputs, outputs, compute)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for the device, if synchronous: this returns normally after an abort."""
        work = self._collective("barrier", opts, [], [], lambda _given: None)
        if work is None:
            self.device.synchronize()
        return work

    def send(self, tensors: Tensors, destination: int, _tag: int = 0) -> Any:
        """See torch.distributed.send. There are no tags."""
        communicator, key = self._message(self._rank, destination)

        def complete() -> bool:
            if tensors[0].nbytes > BUFFER_BYTES:
                communicator.wait_for_receiver(key)
            return True

        call = _Call("send", communicator, lambda: communicator.publish(key, (), tensors), complete)
        return self._launch(call, [], is_async=True)

    def recv(self, tensors: Tensors, source: int, _tag: int = 0) -> Any:
        """See torch.distributed.recv. There are no tags."""
        communicator, key = self._message(source, self._rank)

        def complete() -> bool:
            value = communicator.take(key, source)
            if value is not None:
                _fill(tensors[0], value)
            return value is not None

        return self._launch(_Call("recv", communicator, lambda: None, complete), tensors, is_async=True, source=source)

    def recv_anysource(self, _tensors: Tensors, _tag: int = 0) -> Any:
        """Raise the error of NCCL, which has no such operation."""
        raise RuntimeError("Backend nccl does not support recvAnysource")

    def _message(self, source: int, destination: int) -> tuple[_Communicator, str]:
        """Return the communicator of a message, and its key.

        Two ranks have one of their own, unless all members are connected, or the message belongs to a batch.
        """
        self.device.raise_error()
        if self._batch is not None or self.is_connected:
            communicator = self._communicator()
        else:
            pair = sorted((source, destination))
            communicator = self._communicator(f"{pair[0]}:{pair[1]}", pair)
        communicator.messages[source, destination] += 1
        return communicator, f"message-{source}-{destination}-{communicator.messages[source, destination]}"

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What torch asks of a group

    def name(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    getBackendName = name

    @property
    def group_name(self) -> str:
        """Return the name that torch has given the group."""
        return self._group_name

    def getGroupName(self) -> str:
        """Return the name that torch has given the group, to C++."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        """Return the description that torch has given the group."""
        return self._group_desc

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self._rank

    def get_group_store(self) -> dist.Store:
        """Return the group's store."""
        return self._store

    def _get_backend(self, _device: object) -> StandInGroup:
        return self

    def supports_tensor_alloc(self, _device: object) -> bool:
        """Return False: tensors are allocated as any others are."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, of which the watchdog makes use."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def options(self) -> Any:
        """Return the options that Rankbook reads."""
        return SimpleNamespace(_timeout=self._timeout)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor_of(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _sizes(tensors: Tensors) -> tuple[Any, ...]:
    return tuple((str(tensor.dtype), tensor.numel()) for tensor in tensors)


def _fill(output: torch.Tensor, value: torch.Tensor) -> None:
    if output.numel() != value.numel():
        raise _Mismatch
    output.detach().copy_(value.reshape(output.shape))


def _operation_of(opts: Any) -> tuple[Any, float]:
    """Return the kind of a reduction and its factor."""
    if opts is None:
        return dist.ReduceOp.SUM, 1.0
    kind = opts.reduceOp
    if kind == dist.ReduceOp.PREMUL_SUM:
        return dist.ReduceOp.SUM, float(kind.factor)
    for operation in (
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
        dist.ReduceOp.PRODUCT,
    ):
        if kind == operation:
            return operation, 1.0
    raise ValueError(f"Cannot use ReduceOp.{kind} with NCCL")


def _reduced(tensors: Tensors, operation: tuple[Any, float]) -> torch.Tensor:
    kind, factor = operation
    result = tensors[0] * factor if factor != 1 else tensors[0].clone()
    for tensor in tensors[1:]:
        if kind in {dist.ReduceOp.SUM, dist.ReduceOp.AVG}:
            result += tensor * factor if factor != 1 else tensor
        elif kind == dist.ReduceOp.MIN:
            result = torch.minimum(result, tensor)
        elif kind == dist.ReduceOp.MAX:
            result = torch.maximum(result, tensor)
        else:
            result *= tensor
    return result / len(tensors) if kind == dist.ReduceOp.AVG else result


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StandInGroup:
    return StandInGroup(store, rank, size, timeout)


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
