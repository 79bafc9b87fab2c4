"""Pickle torch tensors out of band: their memory is sent beside the pickle, once and without a copy.

This is the only module of the transport that imports torch; it is imported once a tensor exists. The receiver gets the
result of `torch.save` and `torch.load(map_location="cpu")`: tensors of one storage alias one another again;
`requires_grad`, strides, attributes and the type Parameter are kept; `.grad` and hooks are not sent; and all tensors
arrive on the CPU. Three things differ: of a storage, only the parts that the tensors of the value use are sent, so that
`data[:32]` costs 32 rows; a conjugated or negated view arrives as its values; and a tensor in shared memory cannot be
resized in place, as if it came from `torch.from_numpy` (its `.clone()` can).

This module reduces dense tensors and Parameters. Other kinds (sparse, quantized, nested, meta, DTensor, any subclass)
use torch's own reduction, which leads to dense tensors and storages that are reduced by this module in turn.

Trimming a storage takes two passes, because its use is known only after the whole value was pickled. `Storages` first
records the byte ranges that tensors use. If `trimmed` finds that at least 1 MiB can be saved, the value is pickled once
more with the slices to send.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, cast

import torch

_ALIGNMENT = 64  # slices of a storage begin at a multiple, so that views of every dtype stay aligned
_WORTH_TRIMMING = 1 << 20  # bytes to save, below which a value is not pickled a second time
_SPARSE_USE = 4  # a view that uses less than 1/4 of the bytes it spans, such as one column of many, is copied first

Reduction = tuple[Any, ...]

_WRITABLE = 0x200  # PyBUF_WRITE
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


@dataclass(frozen=True)
class StorageUse:
    """The byte range `low` to `high` that one tensor spans in its storage; `size` is the bytes of its elements."""

    low: int
    high: int
    size: int
    view: tuple[object, ...]


@dataclass(frozen=True)
class StorageSlice:
    """Bytes `low` to `high` of a storage. `one_view`: only one sparse view uses them; a contiguous copy is sent."""

    low: int
    high: int
    one_view: bool


class Storages:
    """The storages of the tensors in one pickle. It must outlive the buffers that it returned."""

    def __init__(self) -> None:
        self._parts: dict[int, list[StorageSlice]] = {}  # slices to send; a storage without an entry is sent whole
        self._uses: dict[int, list[StorageUse]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._sent: dict[tuple[int, int, int], _Sent] = {}
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}
        self._elsewhere: dict[int, _Sent] = {}

    def reduce(self, value: object) -> Any:  # noqa: ANN401 - a reduction, or the constant NotImplemented
        """Return the pickle reduction of `value`, or NotImplemented for other types."""
        kind = type(value)  # the exact type: a subclass has its own reduction
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._reduce_tensor(cast("torch.Tensor", value))
        if kind is torch.UntypedStorage:
            return self._reduce_storage(cast("torch.UntypedStorage", value))
        if kind is torch.storage.TypedStorage:
            typed = cast("torch.storage.TypedStorage", value)
            return restore_typed_storage, (typed._untyped_storage, typed.dtype)  # the public attribute warns
        return NotImplemented

    def is_elsewhere(self, buffer: PickleBuffer) -> bool:
        """Return True if the buffer is an empty placeholder for memory of another device, which `fetch` copies."""
        return id(buffer) in self._elsewhere

    def fetch(self, buffer: PickleBuffer) -> memoryview:
        """Return the bytes of a placeholder, copied to the CPU."""
        return self._elsewhere[id(buffer)].fetch()

    def trimmed(self) -> Storages | None:
        """Return the storages for a second pass that sends less, or None if that would save little.

        Tensors that overlap or touch stay in one slice, because they may alias one another.
        """
        better, saved = Storages(), 0
        for key, uses in self._uses.items():
            whole = self._storages[key].nbytes()
            parts, size = _needed(uses)
            if size < whole:
                better._parts[key] = parts
                better._storages[key] = self._storages[key]
                saved += whole - size
        return better if saved >= _WORTH_TRIMMING else None

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - as `reduce`
        if not _is_dense(tensor):
            return NotImplemented
        if tensor.is_conj() or tensor.is_neg():
            return self._copied(tensor, lambda: tensor.detach().resolve_conj().resolve_neg())
        storage, use = tensor.untyped_storage(), _use_of(tensor)
        if use.high > storage.nbytes():
            raise ValueError("its memory was released, as FSDP does with parameters between two uses")
        part = self._part_of(storage, use)
        if part is None:
            self._uses.setdefault(self._key(storage), []).append(use)
            return _reduction(tensor, tensor, self._send(storage))
        if part.one_view:
            return self._copied(tensor, lambda: tensor.detach().clone(memory_format=torch.contiguous_format))
        return _reduction(tensor, tensor, self._send(storage, part.low, part.high), part.low)

    def _part_of(self, storage: torch.UntypedStorage, use: StorageUse) -> StorageSlice | None:
        # The slices are sorted and disjoint, so the last one that begins before the tensor is the only candidate.
        parts = self._parts.get(self._key(storage), [])
        index = bisect_right(parts, use.low, key=lambda part: part.low) - 1
        return parts[index] if index >= 0 and use.high <= parts[index].high else None

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:  # noqa: ANN401 - as `reduce`
        if storage.device.type == "meta":
            return NotImplemented
        self._uses.setdefault(self._key(storage), []).append(StorageUse(0, storage.nbytes(), storage.nbytes(), ()))
        return _same, (self._send(storage),)

    def _copied(self, tensor: torch.Tensor, copy: Callable[[], torch.Tensor]) -> Reduction:
        """Return the reduction with the memory of a copy, which all tensors with the same view share."""
        key = (self._key(tensor.untyped_storage()), *_use_of(tensor).view, tensor.is_conj(), tensor.is_neg())
        if key not in self._copies:
            self._copies[key] = copy()
        return _reduction(tensor, self._copies[key], self._send(self._copies[key].untyped_storage()))

    def _send(self, storage: torch.UntypedStorage, low: int = 0, high: int | None = None) -> _Sent:
        high = storage.nbytes() if high is None else high
        key = (self._key(storage), low, high)
        if key not in self._sent:
            self._sent[key] = sent = _Sent(storage, low, high)
            if not _is_here(storage):
                self._elsewhere[id(sent.buffer)] = sent
        return self._sent[key]

    def _key(self, storage: torch.UntypedStorage) -> int:
        key: int = storage._cdata  # the identity; data_ptr is not, because all empty storages share one
        self._storages[key] = storage  # kept alive, so that no other storage gets this key
        return key


class _Sent:
    """A slice of a storage. pickle's memo makes it a single storage on the receiver."""

    def __init__(self, storage: torch.UntypedStorage, low: int, high: int) -> None:
        self._storage = storage
        self._low = low
        self._size = high - low
        self._fetched: torch.Tensor | None = None
        self.buffer = PickleBuffer(_memory(storage.data_ptr() + low, self._size) if _is_here(storage) else bytearray())

    def __reduce_ex__(self, protocol: object) -> Reduction:
        return restore_storage, (self.buffer,)

    def fetch(self) -> memoryview:
        alias = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        self._fetched = alias.set_(self._storage, self._low, (self._size,), (1,)).cpu()
        return _memory(self._fetched.data_ptr(), self._size)


def _reduction(tensor: torch.Tensor, laid: torch.Tensor, sent: _Sent, low: int = 0) -> Reduction:
    """Return the reduction with the type and attributes of `tensor` and the memory of `laid`.

    The storage of `laid` is sent from byte `low` on.
    """
    arguments = (
        sent,
        laid.dtype,
        laid.storage_offset() - low // laid.element_size(),
        tuple(laid.size()),
        laid.stride(),
        tensor.requires_grad,
        type(tensor) is torch.nn.Parameter,
    )
    if not tensor.__dict__:
        return restore_tensor, arguments
    return restore_tensor, arguments, dict(tensor.__dict__), None, None, restore_attributes


def restore_storage(buffer: bytearray | memoryview) -> torch.UntypedStorage:
    """Return a storage that rests on `buffer`, without a copy."""
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def restore_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """Return a TypedStorage, as torch's own reductions expect it."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def restore_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Return the tensor as a leaf without a graph."""
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def restore_attributes(tensor: torch.Tensor, attributes: dict[str, object]) -> None:
    """Set the attributes that the user or a library had added to a tensor."""
    tensor.__dict__.update(attributes)


def _same(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return False
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a device without storages (XLA), a tensor inside torch.func
        return False
    return True


def _use_of(tensor: torch.Tensor) -> StorageUse:
    size, stride, offset = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
    view, item = (tensor.dtype, offset, size, stride), tensor.element_size()
    if not tensor.numel():
        return StorageUse(0, 0, 0, view)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return StorageUse(offset * item, (last + 1) * item, tensor.numel() * item, view)


def _needed(uses: Sequence[StorageUse]) -> tuple[list[StorageSlice], int]:
    """Return the disjoint slices of a storage that hold all `uses`, and the number of bytes to send."""
    parts, total = [], 0
    for low, high, members in _clusters(uses):
        size = members[0].size
        one_view = size < (high - low) // _SPARSE_USE and len({member.view for member in members}) == 1
        parts.append(StorageSlice(low, high, one_view))
        total += size if one_view else high - low
    return parts, total


def _clusters(uses: Sequence[StorageUse]) -> Iterator[tuple[int, int, list[StorageUse]]]:
    # Merge the byte ranges, sorted by their start, as long as they overlap or touch.
    low, high, members = 0, 0, list[StorageUse]()
    for use in sorted(uses, key=lambda use: use.low):
        start = use.low // _ALIGNMENT * _ALIGNMENT
        if members and start > high:
            yield low, high, members
            members = []
        if not members:
            low, high = start, use.high
        high = max(high, use.high)
        members.append(use)
    if members:
        yield low, high, members


def _is_here(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _memory(address: int, size: int) -> memoryview:
    """Return the bytes at an address of a storage, valid as long as the storage lives.

    numpy is not used: a tensor whose `.numpy()` was taken can never be resized again.
    """
    return _memory_at(address, size, _WRITABLE) if size else memoryview(bytearray())
