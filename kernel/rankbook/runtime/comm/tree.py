"""Nested containers of tensors: apply a function, move to a device, concatenate, describe.

Owns: what counts as a container, and how one is made again with other leaves. Refuses: to talk to other processes.

Containers are mappings, lists, tuples (named ones too) and dataclasses; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rankbook.errors import BadRequest

_T = TypeVar("_T")


def is_tensor(value: object) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, torch.Tensor)


def honor_type(like: Any, values: Iterable[Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """A sequence of the type of `like` with these values; a named tuple gets them by position."""
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*values)
    return type(like)(values)


def _mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """A mapping of the type of `like`, with what else that type carries (a defaultdict's factory, own attributes)."""
    if type(like) is dict:
        return items
    if isinstance(like, defaultdict):
        return type(like)(like.default_factory, items)
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:  # a type of the person's own, whose constructor takes something else
        made: Any = copy.copy(like)
        for key, value in items.items():
            made[key] = value
        return made


def _dataclass_like(like: Any, values: dict[str, Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """A copy with other values in its fields; no constructor runs, which might ask for more or compute anew."""
    made = copy.copy(like)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def is_container(value: object) -> bool:
    """Whether it is looked into."""
    return isinstance(value, list | tuple | Mapping) or _is_dataclass(value)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | torch.Tensor | torch.nn.Module)


def children(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - any container
    """The keys, indices or field names of a container, with what is there. A dataclass's unset fields are left out."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]


def rebuild(like: Any, values: dict[Any, Any]) -> Any:  # noqa: ANN401 - of the type of `like`
    """A container like this one with other children; `values` has the keys of `children(like)`."""
    if isinstance(like, Mapping):
        return _mapping_like(like, values)
    if isinstance(like, list | tuple):
        return honor_type(like, list(values.values()))
    return _dataclass_like(like, values)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:  # noqa: ANN401 - of the type of `data`
    """The same containers, with `function` of each leaf."""
    if not is_container(data):
        return function(data)
    return rebuild(data, {key: map_leaves(function, each) for key, each in children(data)})


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - anything
    """Each leaf with the path to it, `['x'][0]`, in order."""
    if not is_container(data):
        yield path, data
        return
    for key, each in children(data):
        step = f"[{key!r}]" if isinstance(data, Mapping | list | tuple) else f".{key}"
        yield from leaves(each, path + step)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,  # noqa: ANN401 - anything
    *args: Any,  # noqa: ANN401 - the function's
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,  # noqa: ANN401 - the function's
) -> Any:  # noqa: ANN401 - of the type of `data`
    """The same containers, with `func(leaf, *args, **kwargs)` for each leaf that `test_type` accepts.

    Other leaves stay as they are. Raises `TypeError` for others if `error_on_other_type`.
    """

    def apply(leaf: Any) -> Any:  # noqa: ANN401 - the function's
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)} takes tensors in lists, tuples, mappings and "
                f"dataclasses; there is a {type(leaf).__name__} among them"
            )
        return leaf

    return map_leaves(apply, data)


def send_to_device(
    tensor: Any,  # noqa: ANN401 - anything
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:  # noqa: ANN401 - of the type of `tensor`
    """The same containers with every tensor, and every other leaf that has a `.to`, on `device`.

    Where a container's own type has a `.to` (a batch of a tokenizer), that is called. `skip_keys`: the keys of
    mappings, at any depth, whose values stay where they are. `non_blocking` as in torch; a `.to` that does not know it
    is called without.
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, torch.device(device) if isinstance(device, str) else device, non_blocking, skipped)


def _send(data: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:  # noqa: ANN401 - anything
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    kind = type(data)
    if kind is dict:  # what nearly all batches are made of goes first: a loader does this for each of them
        return {
            key: each if key in skipped else _send(each, device, non_blocking, skipped) for key, each in data.items()
        }
    if kind is list or kind is tuple:
        return kind([_send(each, device, non_blocking, skipped) for each in data])
    has_to = callable(getattr(data, "to", None)) and not isinstance(data, type)
    if has_to and not (skipped and isinstance(data, Mapping)):
        return _call_to(data, device, non_blocking)
    if not is_container(data):
        return data
    by_name = isinstance(data, Mapping)
    return rebuild(
        data,
        {
            key: each if by_name and key in skipped else _send(each, device, non_blocking, skipped)
            for key, each in children(data)
        },
    )


def _call_to(data: Any, device: Any, non_blocking: bool) -> Any:  # noqa: ANN401 - anything with a `.to`
    try:
        moved = data.to(device, non_blocking=non_blocking)
    except TypeError as error:
        if "non_blocking" not in str(error):
            raise
        moved = data.to(device)
    return data if moved is None else moved  # a `.to` that works in place


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:  # noqa: ANN401 - of the type of each
    """One container like each of `data`, its tensors joined along `dim`. Raises `BadRequest` for other leaves."""
    first = data[0]
    if is_container(first):
        return rebuild(
            first, {key: concatenate([_child(each, key) for each in data], dim) for key, _ in children(first)}
        )
    if not isinstance(first, torch.Tensor):
        raise BadRequest(f"only tensors can be concatenated, not {type(first).__name__}")
    return torch.cat(list(data), dim=dim)


def _child(container: Any, key: Any) -> Any:  # noqa: ANN401 - any container
    return container[key] if isinstance(container, Mapping | list | tuple) else getattr(container, key)


def find_batch_size(data: Any) -> int:  # noqa: ANN401 - anything
    """The first dimension of the first tensor that has one. Raises `BadRequest` where there is none."""
    for _, leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    raise BadRequest(f"no batch size can be told from a {type(data).__name__} without a tensor that has a dimension")


def slice_tensors(
    data: _T,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - see below
    num_processes: int | None = None,  # noqa: ARG001
) -> _T:
    """The same containers with `tensor[tensor_slice]` for each tensor; other leaves as they are.

    The rank and the world size are what a `slice_fn_for_dispatch` is told; it may be this function.
    """
    result: _T = recursively_apply(lambda tensor: tensor[tensor_slice], data)
    return result


def convert_to_fp32(tensor: _T) -> _T:
    """The same containers with half precision tensors in float32."""
    half = (torch.float16, torch.bfloat16)
    result: _T = recursively_apply(
        lambda each: each.float(), tensor, test_type=lambda each: is_tensor(each) and each.dtype in half
    )
    return result


def describe(data: Any) -> str:  # noqa: ANN401 - anything
    """Shapes and types in words: `{'x': float32[4, 2], 'y': [int64[4]]}`."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if not is_container(data):
        return type(data).__name__
    if isinstance(data, list):
        return f"[{', '.join(describe(each) for each in data)}]"
    if isinstance(data, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe(each)}' for key, each in data.items())}}}"
    name = "" if type(data) is tuple else type(data).__name__
    return f"{name}({', '.join(describe(each) for _, each in children(data))})"
