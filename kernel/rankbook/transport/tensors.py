"""Pickle torch tensors out of band: their memory is sent beside the pickle, once and without a copy.

This is the only module of the transport that imports torch; it is imported once a tensor exists. The receiver gets the
result of `torch.save` and `torch.load(map_location="cpu")`: tensors of one storage alias one another again;
`requires_grad`, strides, attributes and the type Parameter are kept; `.grad` and hooks are not sent; and all tensors
arrive on the CPU. Three things differ: of a storage, only the parts that the tensors of the value use are sent, so that
`data[:32]` costs 32 rows; a conjugated or negated view arrives as its values; and a tensor in shared memory cannot be
resized in place, as if it came from `torch.from_numpy` (its `.clone()` can).

With `keep_devices`, tensors of an accelerator arrive on the receiver's current one, and leaves with their hooks. Memory
of an accelerator is copied to the host when it is written, and in parts, so that the host never has the whole value
twice.

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
from functools import partial
from pickle import PickleBuffer
from typing import Any, cast

import torch

from rankbook.transport.shared_memory import DeferredBytes

_ALIGNMENT = 64  # slices of a storage begin at a multiple, so that views of every dtype stay aligned
_WORTH_TRIMMING = 1 << 20  # bytes to save, below which a value is not pickled a second time
_SPARSE_USE = 4  # a view that uses less than 1/4 of the bytes it spans, such as one column of many, is copied first

_FETCHED_AT_ONCE = 64 << 20  # bytes of an accelerator's memory that are in the host's memory beside the segment

Reduction = tuple[Any, ...]

# torch's storages do not have the buffer protocol, which pickle needs to take memory without a copy.


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

    def __init__(self, *, keep_devices: bool = False) -> None:
        self._keep_devices = keep_devices
        self._slices: dict[int, list[StorageSlice]] = {}  # slices to send; a storage without an entry is sent whole
        self._uses: dict[int, list[StorageUse]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._sent: dict[tuple[int, int, int], _SentSlice] = {}
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}
        self._placeholders: dict[int, _SentSlice] = {}

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

    def is_placeholder(self, buffer: PickleBuffer) -> bool:
        """Return True if the buffer is an empty placeholder for memory of another device, see `pieces`."""
        return id(buffer) in self._placeholders

    def pieces(self, buffer: PickleBuffer) -> list[DeferredBytes]:
        """Return the bytes of a placeholder, which are copied to the CPU when they are needed."""
        return self._placeholders[id(buffer)].pieces()

    def trimmed(self) -> Storages | None:
        """Return the storages for a second pass that sends less, or None if that would save little.

        Tensors that overlap or touch stay in one slice, because they may alias one another.
        """
        # Only storages of which a part is unused get an entry. The others are sent whole, as in the first pass.
        trimmed_storages, saved = Storages(keep_devices=self._keep_devices), 0
        for key, uses in self._uses.items():
            total = self._storages[key].nbytes()
            slices, size = _required_slices(uses)
            if size < total:
                trimmed_storages._slices[key] = slices
                trimmed_storages._storages[key] = self._storages[key]
                saved += total - size
        # The second pass costs as much as the first one. It pays only if it saves more copying than that.
        return trimmed_storages if saved >= _WORTH_TRIMMING else None

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - as `reduce`
        if not _is_dense(tensor):
            return NotImplemented
        # The bit says that the values in memory are not those of the tensor. The receiver would lose it, so the real
        # values are sent.
        if tensor.is_conj() or tensor.is_neg():
            return self._reduce_copy(tensor, lambda: tensor.detach().resolve_conj().resolve_neg())
        storage, use = tensor.untyped_storage(), _use_of(tensor)
        # Reading beyond the storage would crash.
        if use.high > storage.nbytes():
            raise ValueError("its storage was freed, as FSDP does with parameters between two uses")
        storage_slice = self._find_slice(storage, use)
        # The first pass, or a storage that is sent whole: remember which bytes are used.
        if storage_slice is None:
            self._uses.setdefault(self._key(storage), []).append(use)
            return self._reduction(tensor, tensor, self._slice_to_send(storage))
        # One column of a large matrix, for example: its span is nearly the whole storage, but its elements are few.
        if storage_slice.one_view:
            return self._reduce_copy(tensor, lambda: tensor.detach().clone(memory_format=torch.contiguous_format))
        return self._reduction(
            tensor, tensor, self._slice_to_send(storage, storage_slice.low, storage_slice.high), storage_slice.low
        )

    def _find_slice(self, storage: torch.UntypedStorage, use: StorageUse) -> StorageSlice | None:
        # The slices are sorted and disjoint, so the last one that begins before the tensor is the only candidate.
        slices = self._slices.get(self._key(storage), [])
        index = bisect_right(slices, use.low, key=lambda candidate: candidate.low) - 1
        return slices[index] if index >= 0 and use.high <= slices[index].high else None

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:  # noqa: ANN401 - as `reduce`
        if storage.device.type == "meta":
            return NotImplemented
        self._uses.setdefault(self._key(storage), []).append(StorageUse(0, storage.nbytes(), storage.nbytes(), ()))
        return _same, (self._slice_to_send(storage),)

    def _reduce_copy(self, tensor: torch.Tensor, copy: Callable[[], torch.Tensor]) -> Reduction:
        """Return the reduction with the memory of a copy, which all tensors with the same view share."""
        # Tensors with equal keys are the same view, and share one copy, so that they alias one another again on the
        # receiver.
        key = (self._key(tensor.untyped_storage()), *_use_of(tensor).view, tensor.is_conj(), tensor.is_neg())
        if key not in self._copies:
            self._copies[key] = copy()
        return self._reduction(tensor, self._copies[key], self._slice_to_send(self._copies[key].untyped_storage()))

    def _reduction(self, tensor: torch.Tensor, source: torch.Tensor, sent: _SentSlice, low: int = 0) -> Reduction:
        hooks = hooks_of(tensor) if self._keep_devices else ()
        return _reduction(tensor, source, sent, low, hooks=hooks if any(hooks) else ())

    def _slice_to_send(self, storage: torch.UntypedStorage, low: int = 0, high: int | None = None) -> _SentSlice:
        high = storage.nbytes() if high is None else high
        key = (self._key(storage), low, high)
        # One object per slice. pickle's memo recognizes the object, and refers to the first one when it comes again.
        if key not in self._sent:
            self._sent[key] = sent = _SentSlice(storage, low, high, keep_device=self._keep_devices)
            if not _is_on_cpu(storage):
                self._placeholders[id(sent.buffer)] = sent
        return self._sent[key]

    def _key(self, storage: torch.UntypedStorage) -> int:
        key: int = storage._cdata  # the identity; data_ptr is not, because all empty storages share one
        self._storages[key] = storage  # kept alive, so that no other storage gets this key
        return key


class _SentSlice:
    """A slice of a storage. pickle's memo makes it a single storage on the receiver."""

    def __init__(self, storage: torch.UntypedStorage, low: int, high: int, *, keep_device: bool) -> None:
        self._storage = storage
        self._low = low
        self._size = high - low
        self._device = _device_type(storage) if keep_device else "cpu"
        self.buffer = PickleBuffer(
            _memory(storage.data_ptr() + low, self._size) if _is_on_cpu(storage) else bytearray()
        )

    def __reduce_ex__(self, protocol: object) -> Reduction:
        return restore_storage, (self.buffer,) if self._device == "cpu" else (self.buffer, self._device)

    def pieces(self) -> list[DeferredBytes]:
        """Return the bytes in parts, so that the host's memory holds one of them and not the whole value twice."""
        starts = range(0, self._size, _FETCHED_AT_ONCE)
        sizes = [min(_FETCHED_AT_ONCE, self._size - start) for start in starts]
        return [
            DeferredBytes(size, partial(self._fetch, self._low + start, size))
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _fetch(self, low: int, size: int) -> memoryview:
        alias = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        # As bytes: `cpu` of the original dtype would not copy the gaps between strided elements. The array keeps the
        # memory for as long as the view.
        view: memoryview = alias.set_(self._storage, low, (size,), (1,)).cpu().numpy().data
        return view


def hooks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the hooks on the gradient of a leaf, such as a parameter, and those after its accumulation."""
    # A tensor with a graph arrives as a leaf, whose gradient is another one.
    return (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if tensor.is_leaf else ()


def _reduction(
    tensor: torch.Tensor, source: torch.Tensor, sent: _SentSlice, low: int, *, hooks: tuple[Any, ...]
) -> Reduction:
    """Return the reduction with the type, attributes and `hooks` of `tensor` and the memory of `source`.

    The storage of `source` is sent from byte `low` on.
    """
    arguments = (
        sent,
        source.dtype,
        # The offset counts elements from the start of the slice.
        source.storage_offset() - low // source.element_size(),
        tuple(source.size()),
        source.stride(),
        tensor.requires_grad,
        type(tensor) is torch.nn.Parameter,
    )
    if hooks:
        return restore_tensor, arguments, (dict(tensor.__dict__), *hooks), None, None, restore_hooks
    if not tensor.__dict__:
        return restore_tensor, arguments
    # The sixth element of a reduction sets the state. Without it, pickle would call `Tensor.__setstate__`, which
    # expects another state.
    return restore_tensor, arguments, dict(tensor.__dict__), None, None, restore_attributes


def restore_storage(buffer: bytearray | memoryview, device: str = "cpu") -> torch.UntypedStorage:
    """Return a storage that rests on `buffer`, without a copy; with a copy on another type of device.

    That is the current one of this type: in a rank, the rank's own.
    """
    if not len(buffer):
        return torch.UntypedStorage(0, device=device)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    return (data if device == "cpu" else data.to(device)).untyped_storage()


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
    # `set_` gives the tensor the received storage, without a copy and without a graph.
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def restore_attributes(tensor: torch.Tensor, attributes: dict[str, object]) -> None:
    """Set the attributes that the user or a library had added to a tensor."""
    tensor.__dict__.update(attributes)


def restore_hooks(tensor: torch.Tensor, state: tuple[dict[str, object], Any, Any]) -> None:
    """Set the attributes of a tensor, and its hooks."""
    attributes, tensor._backward_hooks, tensor._post_accumulate_grad_hooks = state
    restore_attributes(tensor, attributes)


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
    # Strides of a tensor are not negative in torch, so the last element has the highest address.
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return StorageUse(offset * item, (last + 1) * item, tensor.numel() * item, view)


def _required_slices(uses: Sequence[StorageUse]) -> tuple[list[StorageSlice], int]:
    """Return the disjoint slices of a storage that hold all `uses`, and the number of bytes to send."""
    slices, total = [], 0
    for low, high, members in _clusters(uses):
        size = members[0].size
        one_view = size < (high - low) // _SPARSE_USE and len({member.view for member in members}) == 1
        slices.append(StorageSlice(low, high, one_view))
        total += size if one_view else high - low
    return slices, total


# Example: tensors use the bytes 0-100, 80-200 and 300-400 of a storage. The first two overlap, so they stay in one
# slice, 0-200. The third one begins a slice at 256, the multiple of 64 below 300.
def _clusters(uses: Sequence[StorageUse]) -> Iterator[tuple[int, int, list[StorageUse]]]:
    # Merge the byte ranges, sorted by their start, as long as they overlap or touch.
    low, high, members = 0, 0, list[StorageUse]()
    for use in sorted(uses, key=lambda use: use.low):
        # Rounded down, so that offsets in the slice keep the alignment that the elements had in the storage.
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


def _is_on_cpu(storage: torch.UntypedStorage) -> bool:
    return _device_type(storage) == "cpu"


def _device_type(storage: torch.UntypedStorage) -> str:
    return storage.device.type


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte] | bytearray:
    """Return the bytes at an address of a storage, valid as long as the storage lives.

    numpy is not used: a tensor whose `.numpy()` was taken can never be resized again. Nor is a memoryview: CPython
    crashes when it collects a cycle with a `PickleBuffer` of one and a view of that, as in the traceback of an
    interrupt.
    """
    return (ctypes.c_ubyte * size).from_address(address) if size else bytearray()
