"""Out-of-memory errors: describe the tensors that hold memory, and free the frames of the failed cell.

`is_out_of_memory` recognizes the errors. `report_and_free` adds a table of the largest tensors to the error report and
releases the frames of the error, so that the next cell has memory again. Variables of the user are never deleted, and
other errors keep their frames for a debugger. `find_holdings` searches the variables for storages.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import psutil
import torch
from IPython.core.interactiveshell import InteractiveShell

from rankbook.errors import CollectiveAborted
from rankbook.formatting import format_bytes, is_users
from rankbook.lazy_imports import loaded_module
from rankbook.protocol.messages import ErrorReport
from rankbook.rank.inspect.tensor_introspection import instance_dict, items
from rankbook.rank.tracebacks import cause_of, members_of, referenced_errors, traceback_of, value_of

# torch raises a plain RuntimeError for these. Only the text tells them apart.
_ON_CPU = re.compile("DefaultCPUAllocator: (can't|not enough)")
_ON_CUDA = re.compile("CUDA error: out of memory|Failed to CUDA calloc|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED")
# The cause of an aborted collective, as the coordinator words it.
_PEER_OOM = re.compile(r"rank \d+ raised (OutOfMemoryError\b|MemoryError\b|\w+ \(out of memory\))")
_DEVICE = re.compile(r"GPU (\d+)")
_MAX_ROWS = 8
_MAX_VARIABLES = 5
_SMALL = 1_000_000
"""Bytes below which a storage gets no row."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out in this error, its causes or the members of its group."""
    for cause in _causes(error):
        if issubclass(type(cause), (torch.OutOfMemoryError, MemoryError)):
            return True
        if issubclass(type(cause), RuntimeError):
            message = value_of(cause)
            if _ON_CPU.search(message) or _ON_CUDA.search(message):
                return True
    return False


def is_peer_oom(error: BaseException) -> bool:
    """Return True if a collective was aborted because another rank ran out of memory: this one may be short as well."""
    return issubclass(type(error), CollectiveAborted) and _PEER_OOM.match(value_of(error)) is not None


def report_and_free(shell: InteractiveShell, error: BaseException, report: ErrorReport) -> ErrorReport:
    """Return `report` with a description of the memory, after releasing the frames of the failed cell."""
    try:
        # Before the frames are released: their local variables are part of the description.
        memory = _describe(shell, error)
    except Exception as failure:  # noqa: BLE001 - reported instead; user objects and a failed device may do anything
        memory = f"memory: cannot list the tensors that hold it ({type(failure).__name__}: {failure})"
    free_memory(shell, error)
    return ErrorReport(
        name=report.name,
        value=report.value,
        traceback=report.traceback,
        plain=report.plain,
        line=report.line,
        place=report.place,
        memory=memory,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its `__cause__` chain, and the members of exception groups."""
    # A list, because errors are compared by identity: a user's class may define `__hash__` and `__eq__`.
    causes: list[BaseException] = []
    waiting = [error]
    while waiting:
        exception = waiting.pop()
        if all(exception is not other for other in causes):
            causes.append(exception)
            yield exception
            cause = cause_of(exception)
            waiting += [] if cause is None else [cause]
            waiting += members_of(exception)


# Description --------------------------------------------------------------------------------------------------------


def _describe(shell: InteractiveShell, error: BaseException) -> str:
    device = _device_of(error)
    report = find_holdings(_names(shell, error), device=device)
    header = _describe_cpu() if device == "cpu" else _describe_cuda(torch.device(device), report)
    return "\n".join([header, *describe_holdings(report)])


def _device_of(error: BaseException) -> str:
    """Return the device that is out of memory; torch names the GPU in its message."""
    on_cuda = [
        cause for cause in _causes(error) if isinstance(cause, torch.OutOfMemoryError) or _ON_CUDA.search(str(cause))
    ]
    if not on_cuda or not torch.cuda.is_initialized():
        return "cpu"
    named = _DEVICE.search(str(on_cuda[0]))
    return f"cuda:{named[1] if named else torch.cuda.current_device()}"


def _names(shell: InteractiveShell, error: BaseException) -> Mapping[str, object]:
    """Return the user's variables, followed by the local variables of user functions in the traceback."""
    hidden = shell.user_ns_hidden
    # A name that a cell has bound to another value is the user's, even if it was predefined.
    names = {name: value for name, value in shell.user_ns.items() if hidden.get(name, hidden) is not value}
    for cause in _causes(error):
        for frame, _ in traceback.walk_tb(traceback_of(cause)):
            code = frame.f_code
            if frame.f_locals is not shell.user_ns and code.co_name != "<module>" and is_users(code.co_filename):
                names |= {f"{code.co_name}(): {name}": value for name, value in frame.f_locals.items()}
    return names


def _describe_cpu() -> str:
    machine = psutil.virtual_memory()
    resident, free, total = map(format_bytes, (psutil.Process().memory_info().rss, machine.available, machine.total))
    return f"memory of cpu: this process uses {resident}; {free} of {total} are free"


def _describe_cuda(device: torch.device, report: MemoryReport) -> str:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    text = (
        f"memory of {device}: {format_bytes(free)} of {format_bytes(total)} are free; "
        f"this rank's tensors use {format_bytes(allocated)}, "
        f"{format_bytes(reserved - allocated)} are reserved but unused, "
        f"{format_bytes(max(0, total - free - reserved))} are used by other processes or the CUDA context"
    )
    # A small difference is normal: the allocator rounds sizes up.
    unattributed = allocated - report.size
    if unattributed > max(_SMALL, allocated // 100):
        text += f"\n{format_bytes(unattributed)} belong to no variable: tensors saved for backward(), temporary results"
    return text


def describe_holdings(report: MemoryReport) -> list[str]:
    """Return the lines of a table of the largest storages, and the total per variable."""
    large = [holding for holding in report.holdings if holding.size >= _SMALL]
    rows = [_row(holding) for holding in large[:_MAX_ROWS]]
    if not rows:
        return ["  no variable holds a tensor of 1 MB or more"]
    rest = report.holdings[_MAX_ROWS:]
    if rest:
        rows.append((format_bytes(sum(holding.size for holding in rest)), f"in {len(rest)} more", "", "", ""))
    # Example of the table:
    #
    #       4.29 GB  model.layers[0].weight               (32000, 4096)  float32  cuda:0
    #       4.29 GB  optimizer.state[model.…]['exp_avg']  (32000, 4096)  float32  cuda:0
    #       by variable: model 8.6 GB, optimizer 17.2 GB
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  " + "  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]).rstrip() for row in rows]
    totals: dict[str, int] = {}
    for holding in report.holdings:
        totals[holding.variable] = totals.get(holding.variable, 0) + holding.size
    order = sorted(totals, key=lambda name: -totals[name])[:_MAX_VARIABLES]
    if len(report.holdings) > len(totals):
        lines.append(f"  by variable: {', '.join(f'{name} {format_bytes(totals[name])}' for name in order)}")
    if not report.complete:
        lines.append("  (incomplete: the search reached its limit on the number of objects or on their depth)")
    return lines


def _row(holding: MemoryHolding) -> tuple[str, str, str, str, str]:
    return format_bytes(holding.size), holding.name, str(holding.shape), holding.dtype, holding.device


# Release ------------------------------------------------------------------------------------------------------------


def free_memory(shell: InteractiveShell, error: BaseException) -> None:
    """Release the frames of the error and all that they hold. A debugger finds nothing afterwards."""
    # `clear_frames` drops the local variables of every frame. Without the traceback, the frames themselves are freed.
    for exception in referenced_errors(error):
        traceback.clear_frames(traceback_of(exception))
        BaseException.with_traceback(exception, None)
    # The interpreter and IPython keep the last error for a debugger.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    result = shell.last_execution_result
    if result is not None:
        result.error_in_exec = result.error_before_exec = None
    shell.InteractiveTB.tb = shell.InteractiveTB.pdb = None  # the debugger of an earlier error keeps its frames
    if (watch := loaded_module("rankbook.numerics.watch")) is not None:
        watch.release_inputs()
    # Frames and errors refer to one another, so that reference counts alone do not free them.
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # the device has failed for good; its next use raises
            torch.cuda.empty_cache()


MAX_DEPTH = 12
"""Maximum steps from a variable to a tensor: `model.layers[0].attention.query.weight` takes seven."""
MAX_OBJECTS = 100_000
"""Maximum number of objects to visit; that takes 0.2 s."""
_MAX_ITEMS = 10_000
_VARIABLE = re.compile(r"(?:[^.[{]*\(\): )?\w+")
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, FunctionType)
_OPAQUE = (*_PLAIN, BuiltinFunctionType)


@dataclass(frozen=True)
class MemoryHolding:
    """A storage with memory, under the shortest name that leads to it, with the shape of its tensor."""

    name: str
    size: int
    shape: tuple[int, ...]
    dtype: str
    device: str

    @property
    def variable(self) -> str:
        """Return the variable at the beginning of the name, preceded by the function for a local variable."""
        match = _VARIABLE.match(self.name)
        return match[0] if match else self.name


@dataclass
class MemoryReport:
    """The storages that were found, largest first. `complete` is False if a limit ended the search."""

    holdings: list[MemoryHolding] = field(default_factory=list)
    complete: bool = True

    @property
    def size(self) -> int:
        """Return the bytes of all storages."""
        return sum(holding.size for holding in self.holdings)


def find_holdings(
    namespace: Mapping[str, object], *, device: str | None = None, most_objects: int = MAX_OBJECTS
) -> MemoryReport:
    """Find the storages that the variables lead to, without duplicates.

    `device` (`cpu`, `cuda:0`) selects one device.
    """
    return _Search(most_objects).run(namespace, device)


class _Search:
    """Breadth-first search, which finds the shortest name of a tensor first."""

    def __init__(self, most_objects: int) -> None:
        self._remaining = most_objects
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
        self._storages: dict[tuple[str, int], MemoryHolding] = {}  # by device and data pointer: views count once
        self._names: dict[int, str] = {}
        self._queue: deque[tuple[str, object, int]] = deque()
        self._optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._complete = True

    def run(self, namespace: Mapping[str, object], device: str | None) -> MemoryReport:
        # A copy, because cells' threads may define variables meanwhile.
        self._enqueue(dict(namespace).items(), 0)
        self._visit_queue()
        for name, optimizer in self._optimizers:  # last: by then its parameters have names, which label its states
            self._enqueue(self._optimizer_children(name, optimizer), 1)
            self._visit_queue()
        holdings = [holding for holding in self._storages.values() if device in (None, holding.device)]
        return MemoryReport(sorted(holdings, key=lambda holding: -holding.size), self._complete)

    def _enqueue(self, children: Any, depth: int) -> None:  # noqa: ANN401 - pairs of a name and anything
        # Counted when they are queued, and not when they are visited, which bounds the memory of the queue too.
        for name, value in children:
            self._remaining -= 1
            if self._remaining < 0:
                self._complete = False
                return
            if not issubclass(type(value), _OPAQUE) and id(value) not in self._seen:
                # Deeper objects are not visited, but the report says that something was left out.
                if depth > MAX_DEPTH:
                    self._complete = False
                    continue
                self._seen[id(value)] = value
                self._queue.append((name, value, depth))

    def _visit_queue(self) -> None:
        while self._queue:
            name, value, depth = self._queue.popleft()
            kind = type(value)  # isinstance would run a proxy's __class__
            if issubclass(kind, torch.optim.Optimizer):
                self._optimizers.append((name, value))  # type: ignore[arg-type]
            else:
                self._enqueue(self._children(name, value, kind), depth + 1)

    def _children(self, name: str, value: Any, kind: type) -> Iterator[tuple[str, object]]:  # noqa: ANN401 - anything
        if issubclass(kind, torch.Tensor):
            yield from self._tensor_children(name, value)
        elif issubclass(kind, numpy.ndarray):
            self._add_array(name, value)
        elif issubclass(kind, dict):
            yield from ((f"{name}[{_key(key)}]", item) for key, item in self._first_items(dict.items(value)))
        elif issubclass(kind, (list, tuple, deque)):
            yield from _with_index(name, self._first_items(_iterator(kind)(value)))
        elif issubclass(kind, (set, frozenset)):
            yield from ((f"{name}{{…}}", item) for item in self._first_items(_iterator(kind)(value)))
        if issubclass(kind, torch.nn.Module):
            yield from _module_children(name, value)
        yield from ((f"{name}.{attribute}", item) for attribute, item in _attributes(value))

    def _first_items(self, elements: Iterable[Any]) -> list[Any]:
        first = list(islice(elements, _MAX_ITEMS + 1))  # in one step: another thread may change the container
        if len(first) > _MAX_ITEMS:
            self._complete = False
        return first[:_MAX_ITEMS]

    def _tensor_children(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
        self._names[id(tensor)] = name
        flatten = getattr(type(tensor), "__tensor_flatten__", None)
        # The wrapper itself has no memory of its own.
        if flatten is not None:  # a DTensor or another wrapper of the tensors that own the memory
            for attribute in flatten(tensor)[0]:
                yield name if attribute == "_local_tensor" else f"{name}.{attribute}", getattr(tensor, attribute)
        elif tensor.layout is torch.strided:
            self._add_tensor(name, tensor)
        else:
            yield from ((f"{name}.{part}", piece) for part, piece in _sparse_components(tensor))
        if tensor.is_leaf and tensor.grad is not None:
            yield f"{name}.grad", tensor.grad

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
        except RuntimeError:  # a tensor without storage: fake, functional, in a transform
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._add(name, pointer, storage.nbytes(), tuple(tensor.shape), dtype, str(tensor.device))

    def _add_array(self, name: str, array: numpy.ndarray[Any, Any]) -> None:
        # A view has no memory of its own.
        while issubclass(type(array.base), numpy.ndarray):
            array = array.base  # type: ignore[assignment]
        # The address of the memory, by which views of one array count once.
        pointer = array.__array_interface__["data"][0]
        self._add(name, pointer, array.nbytes, tuple(array.shape), str(array.dtype), "cpu")

    def _add(self, name: str, pointer: int, size: int, shape: tuple[int, ...], dtype: str, device: str) -> None:
        if size and pointer and device != "meta":
            # The first name is the shortest, because the search is breadth-first.
            self._storages.setdefault((device, pointer), MemoryHolding(name, size, shape, dtype, device))

    def _optimizer_children(self, name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
        """Yield the states, named by their parameters: `optimizer.state[model.weight]['exp_avg']`."""
        for number, (parameter, state) in enumerate(dict.items(optimizer.state)):
            yield f"{name}.state[{self._names.get(id(parameter), number)}]", state
        yield f"{name}.param_groups", optimizer.param_groups
        yield from ((f"{name}.{attribute}", item) for attribute, item in _attributes(optimizer) if attribute != "state")


def _iterator(kind: type) -> Any:  # noqa: ANN401 - a method of a container
    """Return the builtin container's own `__iter__`, so that no override of a subclass runs."""
    return next(base for base in (list, tuple, deque, set, frozenset) if issubclass(kind, base)).__iter__


def _with_index(name: str, elements: Iterable[Any]) -> Iterator[tuple[str, object]]:
    return ((f"{name}[{index}]", item) for index, item in enumerate(elements))


def _key(key: object) -> str:
    if isinstance(key, (str, int, float, bool)):
        text = repr(key)
        return text if len(text) <= 40 else f"{text[:37]}…"
    return "…"


def _module_children(name: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for kind in ("_parameters", "_buffers"):
        yield from ((f"{name}.{key}", item) for key, item in items(instance_dict(module).get(kind)))
    # The name is one that works in a cell: `model.blocks[0].fc`, `model.heads['value']`.
    numbered = issubclass(type(module), (torch.nn.Sequential, torch.nn.ModuleList))
    keyed = issubclass(type(module), torch.nn.ModuleDict)
    for key, item in items(instance_dict(module).get("_modules")):
        yield f"{name}[{key}]" if numbered else f"{name}[{key!r}]" if keyed else f"{name}.{key}", item


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes in the instance's dict and slots. `_module_children` yields the parts of a module."""
    yield from ((str(key), item) for key, item in items(instance_dict(value)) if key not in _MODULE_DICTS)
    # Slots are descriptors of the class, which are read without a property being called.
    for kind in type(value).__mro__:
        for slot, descriptor in list(vars(kind).items()):
            if type(descriptor) is _MEMBER:
                try:
                    yield slot, descriptor.__get__(value)
                except AttributeError:  # not set
                    continue


def _sparse_components(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.layout is torch.sparse_coo:
        yield "values()", tensor._values()
        yield "indices()", tensor._indices()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield "values()", tensor.values()
        yield "crow_indices()", tensor.crow_indices()
        yield "col_indices()", tensor.col_indices()


# Python has no name for the type of a slot's descriptor, so it is taken from a class with a slot.
class _Slotted:
    __slots__ = ("slot",)


_MEMBER = type(vars(_Slotted)["slot"])
_MODULE_DICTS = frozenset(("_parameters", "_buffers", "_modules"))
