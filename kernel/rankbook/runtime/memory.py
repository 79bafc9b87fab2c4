"""Release memory, and find the largest batch size that fits on all ranks.

Only out-of-memory errors are handled; any other error propagates.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch

from rankbook.errors import BadRequest, CollectiveAborted
from rankbook.runtime.comm import consistency
from rankbook.runtime.process_state import PartialState

_F = TypeVar("_F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return unused cached memory to the device.

    Args:
        garbage_collection: collect reference cycles first.
    """
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: object) -> list[None]:
    """Run garbage collection and empty the device's cache.

    Returns one None per object, to overwrite the caller's references: `a, b = release_memory(a, b)`.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True if `exception` is an out-of-memory error."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
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

    Raises other errors of `function`, then `PeerFailed` on the other ranks; `RuntimeError` if no batch size is left;
    and `BadRequest` if `reduce_batch_size_fn` returns a size that is not smaller. A call that passes a batch size
    raises `TypeError`.

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
    return _shrinking(function, starting_batch_size, reduce_batch_size_fn)


def _shrinking(function: _F, starting: int, shrink: Callable[[], int] | None) -> _F:
    size = starting  # the next call starts with the size that fitted last

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        nonlocal size
        _check_call(function, args, kwargs)
        state = PartialState()
        size = _smallest(state, size)
        while size > 0:
            clear_device_cache(garbage_collection=True)
            fits, result = _attempt(state, function, size, args, kwargs)
            if fits:
                return result
            smaller = _smallest(state, int(size * 0.9) if shrink is None else int(shrink()))
            if smaller >= size:
                raise BadRequest(f"reduce_batch_size_fn gave {smaller} after {size}; it has to give less each time")
            if state.is_main_process:
                _log.warning("Memory ran out with batch size %d; trying %d on all ranks.", size, smaller)
            size = smaller
        raise RuntimeError(f"No executable batch size found: {starting} and all smaller ones ran out of memory")

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
    # another error announces that instead, and the ranks in the collective raise PeerFailed. A rank whose collective
    # inside `function` was aborted takes no part: the other ranks were aborted too.
    ran_out, result = False, None
    try:
        result = function(size, *args, **kwargs)
    except CollectiveAborted:
        raise  # not announced: the collectives of the other ranks were aborted too
    except Exception as error:
        ran_out = should_reduce_batch_size(error)
        if not ran_out:
            if state.use_distributed:
                consistency.announce_failure(error)
            raise
    if state.use_distributed:
        try:
            ran_out = consistency.raise_if_any_failed(None, level=int(ran_out)) > 0
        except Exception as error:
            if ran_out:
                error.add_note(f"Before that, memory ran out on rank {state.process_index} with batch size {size}.")
            raise
    return not ran_out, None if ran_out else result


def _smallest(state: PartialState, size: int) -> int:
    return consistency.all_min(size) if state.use_distributed else size


def _check_call(function: Callable[..., Any], args: Any, kwargs: Any) -> None:  # noqa: ANN401 - the function's
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"{name} is called with a batch size first and then with what you give it, and that does not fit its "
            f"parameters ({error}); leave the batch size out of the call"
        ) from None
