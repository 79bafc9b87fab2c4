"""Execute the tensor operations of a thread on the stand-in device, as those on CUDA tensors are.

`on_device(device)` is a mode of torch: while the device is idle, operations are executed at once. Behind anything that
is queued, an operation is queued as well: its outputs are allocated at once, with the shapes that torch's meta kernels
say, and filled later. Views are made at once. What reads values, as `.item()` does, waits for the queue.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nccl_stand_in.device import Device, current_device

_READS = ("cpu", "tolist", "numpy", "__array__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__")
"""Methods of a tensor that read its values without an operation that the mode sees."""
_HOST_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_CHANGES_STORAGE = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}
_INTEGERS = (torch.int32, torch.int64)
_replacing = threading.RLock()


@contextlib.contextmanager
def on_device(device: Device | None = None) -> Iterator[Device]:
    """Execute the tensor operations of this thread on `device` (default: `current_device()`) during the block.

    Methods of `torch.Tensor` are replaced meanwhile. So blocks of two threads may not overlap: the one that ends last
    would put the other one's methods back, for good.
    """
    device = device or current_device()
    if not _replacing.acquire(blocking=False):
        raise RuntimeError("on_device is in use on another thread")
    with contextlib.ExitStack() as stack:
        stack.callback(_replacing.release)
        stack.enter_context(_DeviceMode(device))
        for name in _READS:
            stack.enter_context(_replaced(torch.Tensor, name, _synchronized(device, getattr(torch.Tensor, name))))
        # What is queued may still use memory that FSDP2 frees as soon as it has queued it.
        resize = torch.UntypedStorage.resize_
        stack.enter_context(
            _replaced(torch.UntypedStorage, "resize_", lambda storage, size: resize(storage, size) if size else storage)
        )
        yield device


class _DeviceMode(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._device.is_idle or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor does operations of its own, on plain tensors
        if func.name() == "fsdp::all_gather_copy_in":  # its result is a view of its argument, which the schema conceals
            from torch.distributed.fsdp._fully_shard._fsdp_collectives import all_gather_copy_in_cuda

            with self:
                return all_gather_copy_in_cuda(*args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        if func.is_view or not any(isinstance(value, torch.Tensor) for value in flat):
            return func(*args, **kwargs)
        if not _waits(func):
            try:
                return self._queue(func, flat, spec)
            except _NotQueued:
                pass
        self._device.synchronize()
        return func(*args, **kwargs)

    def _queue(self, func: Any, flat: list[Any], spec: Any) -> Any:
        """Queue `func`, and return its outputs, to be filled. Raises `_NotQueued`."""
        metas = [_meta_of(value) for value in flat]
        meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
        try:
            shapes, result_spec = pytree.tree_flatten(func(*meta_args, **meta_kwargs))
        except Exception as error:  # without a meta kernel, or wrong arguments: the operation itself will tell
            raise _NotQueued from error
        arguments = {id(meta): value for meta, value in zip(metas, flat, strict=True) if isinstance(meta, torch.Tensor)}
        results: list[Any] = []
        to_fill: dict[int, torch.Tensor] = {}
        for index, shape in enumerate(shapes):
            if id(shape) in arguments:
                results.append(arguments[id(shape)])
            elif isinstance(shape, torch.Tensor):
                to_fill[index] = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
                results.append(to_fill[index])
            elif shape is None:
                results.append(None)
            else:
                raise _NotQueued
        args, kwargs = pytree.tree_unflatten(flat, spec)

        def run() -> None:
            values = pytree.tree_leaves(func(*args, **kwargs))
            for index, tensor in to_fill.items():
                assert tensor.dtype == values[index].dtype, f"expected {tensor.dtype}, got {values[index].dtype}"
                tensor.copy_(values[index])

        self._device.submit(func.name(), run)
        # DDP's C++ code copies integers into the host's memory, and reads them there.
        if func.name() == "aten::copy_" and flat[0].dtype in _INTEGERS and not (flat[2:] and flat[2]):
            self._device.synchronize()
        return pytree.tree_unflatten(results, result_spec)


class _NotQueued(Exception):
    """An operation cannot be queued: nobody knows the shapes of its results."""


@functools.cache
def _waits(func: Any) -> bool:
    """Return True for an operation that waits for the queue and is executed by the calling thread."""
    return (
        func.namespace not in {"aten", "fsdp"}
        or func.name().partition(".")[0] in _CHANGES_STORAGE
        or not _HOST_TAGS.isdisjoint(func.tags)
    )


def _meta_of(value: Any) -> Any:
    """Return a tensor without data for a tensor; other values as they are, but "meta" for a device."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and value.dtype in {torch.float64, torch.complex128}:
        return value  # a Python number, which must not change the type of the result
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _synchronized(device: Device, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a tensor that waits for the device first, on this thread; not on the device's own."""
    thread = threading.get_ident()

    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not device.is_idle:
            device.synchronize()
        return method(*args, **kwargs)

    return read


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # Not `setattr(owner, name, before)` at the end: a method that the class inherits is to be inherited again.
    inherited = name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
