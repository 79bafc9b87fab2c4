"""Release memory, and find the largest batch size that fits on all ranks.

Only out-of-memory errors are handled; any other error propagates.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch

from rankbook import control_collectives
from rankbook.control_collectives import all_min
from rankbook.errors import CollectiveAborted, InvalidArgument
from rankbook.lazy_imports import loaded_module
from rankbook.runtime.process_state import PartialState

_F = TypeVar("_F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
# Texts of torch's allocators that raise a plain RuntimeError. cuDNN reports a workspace that does not fit as not
# supported.
_OUT_OF_MEMORY = (
    "CPU out of memory",
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return unused cached memory to the device.

    Args:
        garbage_collection: collect reference cycles first.

    Example::

        clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        if (watch := loaded_module("rankbook.numerics.watch")) is not None:
            watch.release_inputs()
        gc.collect()
    # Do not initialize CUDA for this: a context takes some hundred MB of device memory.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def collect_left_over() -> None:
    """Free what cells that were run again have left: objects that only the last error or a reference cycle holds."""
    # The last error may keep an object on the rank that has failed only.
    error, cleared = getattr(sys, "last_value", None), set[int]()
    while error is not None and id(error) not in cleared:
        cleared.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def release_memory(*objects: object) -> list[None]:
    """Run garbage collection and empty the device's cache.

    Returns one None per object, to overwrite the caller's references: `a, b = release_memory(a, b)`.

    Example::

        model, optimizer = release_memory(model, optimizer)
    """
    count = len(objects)
    # This frame's own references, which would keep the objects alive during the collection.
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True if `exception` is an out-of-memory error."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    # Errors of other allocators are plain RuntimeErrors, recognized by their text.
    return isinstance(exception, RuntimeError) and any(message in str(exception) for message in _OUT_OF_MEMORY)


@overload
def find_executable_batch_size(
    function: Callable[..., Any],
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[..., Any]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call `function(batch_size, ...)` with the largest batch size that fits on all ranks.

    Args:
        function: function whose first parameter is the batch size; callers leave it out. Without it, return a
            decorator.
        starting_batch_size: first batch size to try, in samples.
        reduce_batch_size_fn: returns the next batch size; by default 0.9 times the current one.

    If any rank runs out of memory, all ranks call the function again with the same smaller size. The ranks agree at the
    end of every attempt, so all ranks must call the decorated function. If a rank runs out of memory while others wait
    in a collective, they cannot agree: the cell fails with the error of the collective, to which a note about memory is
    added.

    Raises other errors of `function`, then `PeerFailedError` on the other ranks; `RuntimeError` if no batch size is
    left; and `InvalidArgument` if `reduce_batch_size_fn` returns a size that is not smaller. A call that passes a batch
    size raises `TypeError`.

    Example::

        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size): ...


        train()
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    return _retry_smaller(function, starting_batch_size, reduce_batch_size_fn)


def _retry_smaller(function: _F, start_size: int, shrink: Callable[[], int] | None) -> _F:
    size = start_size  # the next call starts with the size that fitted last

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        nonlocal size
        _check_call(function, args, kwargs)
        state = PartialState()
        # All ranks must use one size. They may have different ones if the decorated function was made anew on one of
        # them.
        size = _common_size(state, size)
        while size > 0:
            # The failed attempt's model and activations are often in reference cycles with its traceback.
            clear_device_cache(garbage_collection=True)
            fits, result = _attempt(state, function, size, args, kwargs)
            if fits:
                return result
            # `reduce_batch_size_fn` runs on every rank and may depend on the rank's free memory.
            smaller = _common_size(state, int(size * 0.9) if shrink is None else int(shrink()))
            if smaller >= size:
                raise InvalidArgument(
                    f"reduce_batch_size_fn must return a batch size smaller than {size}, got {smaller}"
                )
            if state.is_main_process:
                _log.warning("Memory ran out with batch size %d; trying %d on all ranks.", size, smaller)
            size = smaller
        raise RuntimeError(f"No executable batch size found: {start_size} and all smaller ones ran out of memory")

    return cast("_F", run)


def _attempt(
    state: PartialState,
    function: Callable[..., Any],
    size: int,
    args: Any,  # noqa: ANN401 - the function's
    kwargs: Any,  # noqa: ANN401 - the function's
) -> tuple[bool, Any]:
    """Return True if the attempt fitted on all ranks, and this rank's result."""
    # Every rank ends an attempt with one collective, in which it reports an out-of-memory error as level 1. A rank with
    # another error announces that instead, and the ranks in the collective raise PeerFailedError. A rank whose
    # collective inside `function` was aborted takes no part: the other ranks were aborted too.
    ran_out, result = False, None
    try:
        result = function(size, *args, **kwargs)
    except CollectiveAborted:
        raise  # not announced: the collectives of the other ranks were aborted too
    except Exception as error:
        ran_out = should_reduce_batch_size(error)
        if not ran_out:
            if state.use_distributed:
                control_collectives.announce_failure(error)
            raise
    if state.use_distributed:
        try:
            ran_out = control_collectives.raise_if_any_failed(None, level=int(ran_out)) > 0
        except Exception as error:
            if ran_out:
                error.add_note(f"Before that, memory ran out on rank {state.process_index} with batch size {size}.")
            raise
    return not ran_out, None if ran_out else result


def _common_size(state: PartialState, size: int) -> int:
    return all_min(size)[0] if state.use_distributed else size


def _check_call(function: Callable[..., Any], args: Any, kwargs: Any) -> None:  # noqa: ANN401 - the function's
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"{name} is called with the batch size followed by your arguments, and these do not match its parameters "
            f"({error}); omit the batch size from the call"
        ) from None
