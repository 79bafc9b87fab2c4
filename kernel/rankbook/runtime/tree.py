"""Operations on nested containers of tensors: map, flatten, move to a device, concatenate, describe.

Containers are mappings, lists, tuples (also named ones) and dataclasses; everything else is a leaf. A container is
rebuilt with its own type. Nothing here communicates with other ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rankbook.errors import InvalidArgument, UnsupportedType

_T = TypeVar("_T")


def is_tensor(value: object) -> bool:
    """Return True if `value` is a tensor."""
    return isinstance(value, torch.Tensor)


def honor_type(like: Any, values: Iterable[Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """Return a sequence of the type of `like` with these values; a named tuple takes them by position.

    Example::

        honor_type((1, 2), [3, 4])  # (3, 4)
    """
    # The constructor of a named tuple takes its fields as separate arguments, that of a tuple takes an iterable.
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*values)
    return type(like)(values)


def _mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """Return a mapping of the type of `like`, with its other state (a defaultdict's factory, custom attributes)."""
    # The common case; the constructor of other types may do anything.
    if type(like) is dict:
        return items
    # Its constructor takes the factory first, and would take the items for one.
    if isinstance(like, defaultdict):
        return type(like)(like.default_factory, items)
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:  # a user-defined type whose constructor takes other arguments
        mapping: Any = copy.copy(like)
        for key, value in items.items():
            mapping[key] = value
        return mapping


def _dataclass_like(like: Any, values: dict[str, Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """Return a copy with other field values.

    The constructor is not called: it may take other arguments or recompute fields.
    """
    # Past the `__setattr__` of a frozen dataclass, and of one that checks or converts its fields.
    instance = copy.copy(like)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def is_container(value: object) -> bool:
    """Return True if `value` is a mapping, list, tuple or dataclass instance."""
    return isinstance(value, list | tuple | Mapping) or _is_dataclass(value)


def _is_dataclass(value: object) -> bool:
    # A tensor subclass or a module may be a dataclass, too, and is a leaf nevertheless.
    return dataclasses.is_dataclass(value) and not isinstance(value, type | torch.Tensor | torch.nn.Module)


def children(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - any container
    """Return (key, value) pairs of a container: keys, indices or field names. Unset dataclass fields are skipped."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]


def rebuild(like: Any, values: dict[Any, Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """Return a container like this one with other children; `values` has the keys of `children(like)`."""
    if isinstance(like, Mapping):
        return _mapping_like(like, values)
    if isinstance(like, list | tuple):
        return honor_type(like, list(values.values()))
    return _dataclass_like(like, values)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:  # noqa: ANN401 - of the type of `data`
    """Return the same containers with `function` applied to all leaves."""
    if not is_container(data):
        return function(data)
    return rebuild(data, {key: map_leaves(function, child) for key, child in children(data)})


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - anything
    """Yield (path, leaf) pairs in order; a path looks like `['x'][0]`."""
    if not is_container(data):
        yield path, data
        return
    for key, child in children(data):
        step = f"[{key!r}]" if isinstance(data, Mapping | list | tuple) else f".{key}"
        yield from leaves(child, path + step)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,  # noqa: ANN401 - anything
    *args: Any,  # noqa: ANN401 - the function's
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,  # noqa: ANN401 - the function's
) -> Any:  # noqa: ANN401 - of the type of `data`
    """Return the same containers, with `func(leaf, *args, **kwargs)` for every leaf that `test_type` accepts.

    Other leaves are unchanged, or raise `TypeError` with `error_on_other_type`.

    Example::

        recursively_apply(torch.neg, {"x": torch.ones(2), "name": "a"})  # {'x': tensor([-1., -1.]), 'name': 'a'}
    """

    def apply(leaf: Any) -> Any:  # noqa: ANN401 - the function's
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)}: expected tensors in lists, tuples, mappings and dataclasses, "
                f"got {type(leaf).__name__}"
            )
        return leaf

    return map_leaves(apply, data)


def send_to_device(
    tensor: Any,  # noqa: ANN401 - anything
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:  # noqa: ANN401 - of the type of `tensor`
    """Return the same containers, with every tensor, and any other leaf with a `.to` method, on `device`.

    A container type with its own `.to` (such as a tokenizer's batch) is moved by that. `skip_keys` are keys of
    mappings, at any depth, whose values are not moved. `non_blocking` is as in torch; it is omitted for a `.to` that
    does not accept it.

    Example::

        batch = send_to_device({"image": torch.ones(2, 3), "names": ["a", "b"]}, device)
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, torch.device(device) if isinstance(device, str) else device, non_blocking, skipped)


def _send(data: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:  # noqa: ANN401 - anything
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    kind = type(data)
    if kind is dict:  # most batches are dicts, and a loader calls this for every batch: test for them first
        return {
            key: child if key in skipped else _send(child, device, non_blocking, skipped) for key, child in data.items()
        }
    if kind is list or kind is tuple:
        return kind([_send(child, device, non_blocking, skipped) for child in data])
    # `skip_keys` applies inside of containers, and a container's own `.to` knows nothing of it.
    has_to = callable(getattr(data, "to", None)) and not isinstance(data, type)
    if has_to and not (skipped and isinstance(data, Mapping)):
        return _call_to(data, device, non_blocking)
    if not is_container(data):
        return data
    by_name = isinstance(data, Mapping)
    return rebuild(
        data,
        {
            key: child if by_name and key in skipped else _send(child, device, non_blocking, skipped)
            for key, child in children(data)
        },
    )


def _call_to(data: Any, device: Any, non_blocking: bool) -> Any:  # noqa: ANN401 - anything with a `.to`
    try:
        moved = data.to(device, non_blocking=non_blocking)
    except TypeError as error:
        # Any other TypeError is one of the method itself.
        if "non_blocking" not in str(error):
            raise
        moved = data.to(device)
    return data if moved is None else moved  # this `.to` works in place


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:  # noqa: ANN401 - of the type of the elements
    """Concatenate tensors of equally structured containers along `dim`; a single element is returned as it is.

    Raises `UnsupportedType` (an `InvalidArgument` and a TypeError) for several leaves of another type.

    Example::

        concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(2)}])  # {'x': tensor([1., 0., 0.])}
    """
    first = data[0]
    # There is nothing to join, so it may be anything, such as the texts of a batch.
    if len(data) == 1 and not isinstance(first, torch.Tensor) and not is_container(first):
        return first
    if is_container(first):
        return rebuild(
            first, {key: concatenate([_child(part, key) for part in data], dim) for key, _ in children(first)}
        )
    if not isinstance(first, torch.Tensor):
        raise UnsupportedType(f"only tensors can be concatenated, not {type(first).__name__}")
    return torch.cat(list(data), dim=dim)


def _child(container: Any, key: Any) -> Any:  # noqa: ANN401 - any container
    return container[key] if isinstance(container, Mapping | list | tuple) else getattr(container, key)


def find_batch_size(data: Any) -> int:  # noqa: ANN401 - anything
    """Return the first dimension of the first tensor that has one. Raises `InvalidArgument` if there is none.

    Example::

        find_batch_size({"image": torch.zeros(8, 3)})  # 8
    """
    for _, leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    raise InvalidArgument(
        f"cannot determine the batch size of a {type(data).__name__} without a tensor of at least one dimension"
    )


def slice_tensors(
    data: _T,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - see below
    num_processes: int | None = None,  # noqa: ARG001
) -> _T:
    """Return the same containers with `tensor[tensor_slice]` for every tensor; other leaves are unchanged.

    Rank and world size are the arguments of a `slice_fn_for_dispatch`, which this function can be used as.

    Example::

        slice_tensors({"x": torch.arange(4), "name": "a"}, slice(1, 3))  # {'x': tensor([1, 2]), 'name': 'a'}
    """
    result: _T = recursively_apply(lambda tensor: tensor[tensor_slice], data)
    return result


def convert_to_fp32(tensor: _T) -> _T:
    """Return the same containers with half precision tensors converted to float32.

    Example::

        convert_to_fp32({"x": torch.ones(2).half()})["x"].dtype  # torch.float32
    """
    # Other dtypes stay: indices must remain integers, and float64 must not lose digits.
    half_dtypes = (torch.float16, torch.bfloat16)
    result: _T = recursively_apply(
        lambda leaf: leaf.float(), tensor, test_type=lambda leaf: is_tensor(leaf) and leaf.dtype in half_dtypes
    )
    return result


def describe(data: Any) -> str:  # noqa: ANN401 - anything
    """Return the structure, dtypes and shapes as text: `{'x': float32[4, 2], 'y': [int64[4]]}`."""
    # The same text on all ranks for equal data, since the ranks compare it: no addresses, and nothing of the values.
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if not is_container(data):
        return type(data).__name__
    if isinstance(data, list):
        return f"[{', '.join(describe(child) for child in data)}]"
    if isinstance(data, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe(child)}' for key, child in data.items())}}}"
    name = "" if type(data) is tuple else type(data).__name__
    return f"{name}({', '.join(describe(child) for _, child in children(data))})"
