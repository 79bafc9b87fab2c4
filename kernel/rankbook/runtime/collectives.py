"""Collectives over nested containers of tensors (gather, reduce, broadcast, pad) and over Python objects.

With a single process every function returns what it would with more: gathering a 0-d tensor gives one dimension.

Consistency check. Before anything is sent, the ranks compare the structure, shapes and dtypes of their arguments
(`check_same`), if the group has a CPU backend or `debug` is set. If a rank has different shapes, or a leaf
that is not a tensor, all ranks raise an error that shows the arguments of all. This costs one collective of 16 bytes;
`RANKBOOK_DEBUG=0` disables it.

Packing. Small tensors are sent together: one collective for all leaves of a container of one kind, up to
`MAX_BUCKET_BYTES`, instead of one per leaf (`make_buckets`, `as_bytes`, `rows_from_bytes`, `split_like`).

`trim` removes samples that were repeated to make batches even, for `Accelerator.gather_for_metrics`.

`CollectiveMethods` has the communication methods of the `Accelerator`: collectives, metrics over uneven batches, code
for selected ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankbook import control_collectives
from rankbook.control_collectives import control_device
from rankbook.errors import InvalidArgument, TransferError
from rankbook.runtime.data.samplers import WHOLE, RoundPadding
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.settings import AcceleratorSettings
from rankbook.runtime.strategies.base import mesh_for
from rankbook.runtime.tree import (
    children,
    concatenate,
    describe,
    is_container,
    leaves,
    map_leaves,
    rebuild,
)

_T = TypeVar("_T")
REDUCTIONS = ("mean", "sum", "min", "max")
# torch 2.13 has renamed this function and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # type: ignore[deprecated,unused-ignore]
_SUPPORTED_DTYPES = frozenset(  # supported by gloo and nccl; others are sent as bytes, or reduced in a wider type
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def gather(tensor: _T) -> _T:
    """Concatenate the tensors of all ranks along their first dimension, in rank order, on every rank.

    A 0-d tensor counts as one row. Shapes must be equal on all ranks; see `pad_across_processes`. Raises
    `InvalidArgument` on every rank for different shapes, and for leaves that are not tensors (use `gather_object`).

    Example::

        gather(torch.tensor([rank, rank]))  # tensor([0, 0, 1, 1])
    """
    state = PartialState()
    _prepare(state, "gather", tensor, describe)
    if not state.use_distributed:
        return _map(lambda leaf: leaf if leaf.ndim else leaf[None], tensor)
    # The order of the leaves is the same on all ranks (checked above), and so are the buckets and the order of
    # collectives.
    tensors = [leaf for _, leaf in leaves(tensor)]
    sent = [_on_supported_device(leaf.detach() if leaf.ndim else leaf.detach()[None]).contiguous() for leaf in tensors]
    gathered: dict[int, torch.Tensor] = {}
    for bucket in make_buckets(sent, [leaf.device for leaf in sent]):
        together = [sent[index] for index in bucket]
        gathered.update(zip(bucket, _gather(state, together), strict=True))
    results = iter([gathered[index].to(leaf.device) for index, leaf in enumerate(tensors)])
    return _map(lambda _: next(results), tensor)


def _gather(state: PartialState, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gather all `tensors` of all ranks in one collective."""
    first = tensors[0]
    # A single tensor is sent as it is. Several tensors are sent as bytes, so that they may have different dtypes.
    sent = _as_supported_dtype(first) if len(tensors) == 1 else as_bytes(tensors)
    # Rank r's rows are at [r * rows, (r + 1) * rows) of the first dimension.
    gathered = sent.new_empty((state.num_processes * sent.shape[0], *sent.shape[1:]))
    _all_gather(gathered, sent)
    if len(tensors) == 1:
        return [gathered.view(first.dtype)]
    return rows_from_bytes(gathered.view(state.num_processes, -1), tensors)


def reduce(tensor: _T, reduction: str = "mean", scale: float = 1.0) -> _T:
    """Reduce every tensor over all ranks to the "mean", "sum", "min" or "max", times `scale`; return new tensors.

    The mean of integers is a floating point number. Raises `InvalidArgument` on every rank for an unknown reduction,
    different shapes, and leaves that are not tensors; nothing is sent then.

    Example::

        reduce({"loss": torch.tensor(1.0 + rank)}, "mean")  # {'loss': tensor(1.5000)}
    """
    state = PartialState()
    unknown = reduction not in REDUCTIONS
    # Not raised here: other ranks may have valid arguments, and all of them learn of it in `_prepare`.
    failure = f"unknown reduction {reduction!r}; choose from {', '.join(REDUCTIONS)}" if unknown else None
    _prepare(state, f"reduce({reduction!r})", tensor, describe, failure)
    tensors = [leaf for _, leaf in leaves(tensor)]
    summed = [_as_summed(leaf, reduction) for leaf in tensors]
    if state.use_distributed:
        for bucket in make_buckets(summed, [(leaf.device, leaf.dtype) for leaf in summed]):
            if len(bucket) == 1:
                dist.all_reduce(summed[bucket[0]], op=_OPS[reduction])
                continue
            # A reduction needs one dtype, unlike `gather`, so the buckets are per device and dtype.
            flat = torch.cat([summed[index].view(-1) for index in bucket])
            dist.all_reduce(flat, op=_OPS[reduction])
            together = [summed[index] for index in bucket]
            for index, piece in zip(bucket, split_like(flat, together), strict=True):
                summed[index] = piece
    results = iter([_finish(state, *pair, reduction, scale) for pair in zip(tensors, summed, strict=True)])
    return _map(lambda _: next(results), tensor)


def _as_summed(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return a contiguous copy of a type and on a device that the backend can reduce."""
    # Collectives work in place, and the user's tensor must not change.
    copied = _on_supported_device(tensor.detach()).clone(memory_format=torch.contiguous_format)
    # A mean of small integers is in their range, but the sum that it is computed from may not be.
    if reduction == "mean" and not copied.is_floating_point() and not copied.is_complex():
        return copied.to(torch.int64)
    if copied.dtype in _SUPPORTED_DTYPES and copied.dtype != torch.bool:
        return copied
    # Floats that the backends do not support, such as float8, are reduced in float32; bools and unsupported integers,
    # such as int16, in int64.
    return copied.to(torch.float32 if copied.is_floating_point() else torch.int64)


def _finish(
    state: PartialState, original: torch.Tensor, reduced: torch.Tensor, reduction: str, scale: float
) -> torch.Tensor:
    if reduction == "mean":
        reduced = reduced / state.num_processes
    if scale != 1.0:
        reduced = reduced * scale
    # The mean of integers stays a float, and the sum of bools is a count.
    keeps_type = original.dtype != torch.bool and original.is_floating_point() == reduced.is_floating_point()
    return reduced.to(original.device, original.dtype if keeps_type else reduced.dtype)


def broadcast(tensor: _T, from_process: int = 0) -> _T:
    """Copy the tensors of rank `from_process` into those of the other ranks, in place, and return them.

    Raises `InvalidArgument` on every rank for an invalid rank, different shapes and leaves that are not tensors.

    Example::

        broadcast(torch.tensor(5 + rank))  # tensor(5)
    """
    state = PartialState()
    _prepare(state, f"broadcast(from {from_process})", tensor, describe, _check_rank(state, from_process))
    if state.use_distributed:
        _map(lambda leaf: _broadcast(leaf, from_process), tensor)
    return tensor


def _broadcast(tensor: torch.Tensor, source: int) -> torch.Tensor:
    detached = tensor.detach()
    # `detached[None]` is a view: the broadcast writes into the user's tensor.
    rows = detached if detached.ndim else detached[None]
    sent = _on_supported_device(rows).contiguous()
    dist.broadcast(_as_supported_dtype(sent), src=source)
    if sent.data_ptr() != rows.data_ptr():  # `sent` is a copy: not contiguous, or on another device
        rows.copy_(sent)
    return tensor


def pad_across_processes(tensor: _T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> _T:
    """Pad every tensor along `dim` with `pad_index`, up to the largest size on any rank.

    A tensor without that dimension is unchanged. `pad_first` puts the padding before the data. Raises `InvalidArgument`
    on every rank for different structures or numbers of dimensions, and for leaves that are not tensors.

    Example::

        gather(pad_across_processes(torch.ones(1 + rank)))  # tensor([1., 0., 1., 1.])
    """
    state = PartialState()
    _prepare(state, f"pad_across_processes(dim={dim})", tensor, _describe_kinds)
    # One MAX reduction for the sizes of all leaves.
    padded = [leaf for _, leaf in leaves(tensor) if -leaf.ndim <= dim < leaf.ndim]
    if not state.use_distributed or not padded:
        return tensor
    sizes = torch.tensor([leaf.shape[dim] for leaf in padded], device=control_device())
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    longest = iter(sizes.tolist())
    return _map(
        lambda leaf: _pad(leaf, dim, next(longest), pad_index, pad_first) if -leaf.ndim <= dim < leaf.ndim else leaf,
        tensor,
    )


def _describe_kinds(data: object) -> str:
    # Not by the text of the container: a class of the user's may have a `repr` of its own, or one with an address.
    return ", ".join(f"{path}: {_kind(leaf)}" if path else _kind(leaf) for path, leaf in leaves(data))


def _kind(leaf: object) -> str:
    return f"{leaf.ndim}-d" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _pad(tensor: torch.Tensor, dim: int, size: int, value: float, first: bool) -> torch.Tensor:
    length = tensor.shape[dim]
    if length == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size - length
    padding = tensor.new_full(shape, value)
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)


def gather_object(object: Any) -> Any:  # noqa: A002, ANN401 - the established name
    """Concatenate the lists of all ranks to one list, in rank order, on every rank.

    With one process the object is returned unchanged. Raises `TransferError` on every rank if an object of any rank
    cannot be pickled, and `InvalidArgument` if a rank passes something that is not a list, such as a text or a dict.

    Example::

        gather_object([f"from {rank}"])  # ['from 0', 'from 1']
    """
    state = PartialState()
    if not state.use_distributed:
        return object
    items: list[Any] = []
    # Every rank sees all objects, so all ranks raise the same error.
    for rank, objects in enumerate(_exchange(state, object)):
        # Of these, characters and keys would be joined.
        if isinstance(objects, str | bytes | Mapping) or not hasattr(objects, "__iter__"):
            raise InvalidArgument(
                f"gather_object: expected a list on every rank, got {type(objects).__name__} on rank {rank}; "
                "pass [object]"
            )
        items.extend(objects)
    return items


def _exchange(state: PartialState, value: object) -> list[Any]:
    rows: list[Any] = [None] * state.num_processes
    # The value is pickled here and not by torch: an error in `all_gather_object` would leave the other ranks waiting.
    dist.all_gather_object(rows, _try_pickle(value))
    failed = [f"rank {rank}: {row}" for rank, row in enumerate(rows) if isinstance(row, str)]
    if failed:
        raise TransferError(f"gather_object: {'; '.join(failed)}")
    return [pickle.loads(row) for row in rows]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of every rank's list by those of rank `from_process`, and return the list.

    Raises `TransferError` on every rank if an object cannot be pickled, `InvalidArgument` for an invalid rank.

    Example::

        broadcast_object_list([f"run-{rank}"])  # ['run-0']
    """
    state = PartialState()
    failure = _check_rank(state, from_process)
    if failure is not None:
        raise InvalidArgument(f"broadcast_object_list: {failure}")
    if not state.use_distributed:
        return object_list
    message: list[Any] = [_try_pickle(object_list) if state.process_index == from_process else None]
    dist.broadcast_object_list(message, src=from_process)
    if isinstance(message[0], str):
        raise TransferError(f"broadcast_object_list: rank {from_process}: {message[0]}")
    # In place, as torch's function: callers use their own variable, and not the return value.
    if state.process_index != from_process:
        object_list[:] = pickle.loads(message[0])
    return object_list


def _try_pickle(value: object) -> bytes | str:
    """Return the pickle, or an error message: the other ranks wait for an answer in either case."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - raised on every rank, as a TransferError
        return f"cannot be pickled: {type(error).__name__}: {error}"


def _prepare(state: PartialState, what: str, data: Any, describe_data: Any, failure: str | None = None) -> None:  # noqa: ANN401 - anything
    """Check the arguments of a collective, and raise an error on every rank if they are invalid or differ."""
    if failure is None:
        wrong = [
            f"{path or 'the argument'} is a {type(leaf).__name__}"
            for path, leaf in leaves(data)
            if not _is_tensor(leaf)
        ]
        if wrong:
            failure = f"expected tensors in lists, tuples, mappings and dataclasses, but {', '.join(wrong[:3])}"
    if _compares(state):
        control_collectives.check_same(what, describe_data(data), failure)
    elif failure is not None:
        raise InvalidArgument(f"{what}: {failure}")


def _compares(state: PartialState) -> bool:
    """Return True if the ranks compare the arguments of a collective."""
    # Comparing costs a collective on the CPU. If the group has only nccl, it would wait for the GPU's queue in every
    # call.
    return state.use_distributed and (state.debug or (state.checks and control_collectives.is_cheap()))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_container(value)


def _check_rank(state: PartialState, rank: int) -> str | None:
    if 0 <= rank < state.num_processes:
        return None
    return f"from_process must be a rank from 0 to {state.num_processes - 1}, got {rank}"


def _map(function: Any, data: _T) -> _T:  # noqa: ANN401 - tensor to tensor
    result: _T = map_leaves(function, data)
    return result


def _as_supported_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of its bytes if the backends do not support its dtype."""
    return tensor if tensor.dtype in _SUPPORTED_DTYPES else tensor.view(torch.uint8)


def _on_supported_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a device for which the group has a backend."""
    group = dist.group.WORLD
    if (
        group is None
        or not group._device_types
        or tensor.device.type in {device.type for device in group._device_types}
    ):
        return tensor
    return tensor.to(control_device())


MAX_BUCKET_BYTES = 1 << 20
"""Maximum bytes per packed collective. Copying a larger tensor costs more than the latency of its own collective."""


def make_buckets(tensors: Sequence[torch.Tensor], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Group tensors of the same kind in order, up to `MAX_BUCKET_BYTES` per group; return the indices of the groups."""
    # Example: float32 tensors of 0.6, 0.3, 2 and 0.2 MB in this order. The buckets are {0, 1}, {2} alone, and {3},
    # which no longer fits into the first one.
    # A new bucket is opened when the current one of the kind is full. Tensors are not sorted by size, because all ranks
    # must find the same buckets; they do so from the shapes alone.
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for index, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        size = tensor.nbytes
        # A bucket of its own.
        if size > MAX_BUCKET_BYTES:
            closed.append([index])
            continue
        indices, filled = open_buckets.get(kind, ([], 0))
        if filled + size > MAX_BUCKET_BYTES:
            closed.append(indices)
            indices, filled = [], 0
        open_buckets[kind] = ([*indices, index], filled + size)
    return closed + [indices for indices, _ in open_buckets.values()]


def as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of contiguous tensors, concatenated: uint8[sum of their bytes]."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def rows_from_bytes(gathered: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split the gathered `as_bytes(like)` of all ranks, uint8[ranks, bytes], into tensors.

    Every tensor has the rows of all ranks in rank order.
    """
    pieces, start = [], 0
    for tensor in like:
        piece = gathered[:, start : start + tensor.nbytes].flatten().clone()  # the copy is aligned for its dtype
        pieces.append(piece.view(tensor.dtype).view(gathered.shape[0] * tensor.shape[0], *tensor.shape[1:]))
        start += tensor.nbytes
    return pieces


def split_like(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split a 1-d tensor into copies with the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.clone().view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def trim(gathered: Any, share: RoundPadding | None) -> Any:  # noqa: ANN401 - of the type of `gathered`
    """Return `gathered` without the rows that were added to complete the round.

    `gathered` holds tensors of `len(share.real) * rows` rows, those of rank 0 first, the same number for every rank
    after padding; or it is a list of as many objects. There may be several rows per sample, the same number for all.
    `share` is the loader's (`loader.share`) for the batch that the rows were computed from, None if all rows are real.
    Raises `InvalidArgument` if the rows cannot be divided among the ranks, or among the samples of a rank.

    Example::

        loader = prepare_data_loader(torch.utils.data.DataLoader(range(3), batch_size=1))
        [trim(gather(batch), loader.share).tolist() for batch in loader]  # [[0, 1], [2]]
    """
    if share is None:
        return gathered
    if isinstance(gathered, list) and not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(gathered)):
        return [gathered[row] for row in _rows(len(gathered), share)]
    if isinstance(gathered, torch.Tensor):
        rows = _rows(gathered.shape[0], share)
        if rows == list(range(len(rows))):
            return gathered[: len(rows)]
        return gathered[torch.tensor(rows, dtype=torch.long, device=gathered.device)]
    if is_container(gathered):
        return rebuild(gathered, {key: trim(child, share) for key, child in children(gathered)})
    return gathered


def _rows(total: int, share: RoundPadding) -> list[int]:
    # A metric may have several rows per sample, such as one per token, or one row per batch, so the rows are counted
    # from `gathered` itself.
    rows, rest = divmod(total, len(share.real))
    if rest:
        raise InvalidArgument(
            f"the number of gathered rows ({total}) is not divisible by the number of ranks ({len(share.real)})"
        )
    per_sample, rest = divmod(rows, share.rows) if 0 < share.rows < rows else (1, 0)
    if rest:
        raise InvalidArgument(
            f"{rows} rows per rank were gathered from batches of {share.rows} samples, some of which are repeated: "
            "expected the same number of rows for every sample"
        )
    counts = [rows if count == WHOLE else min(count * per_sample, rows) for count in share.real]
    return [rank * rows + row for rank, count in enumerate(counts) for row in range(count)]


def _has_columns(data: object) -> bool:
    """Return True if `data`, which are not tensors alone, are columns of samples and not a list of samples."""
    if isinstance(data, tuple):
        return any(is_container(item) or hasattr(item, "shape") for item in data)
    return is_container(data) and not isinstance(data, list)


class CollectiveMethods(AcceleratorSettings):
    """See `Accelerator`."""

    def gather(self, tensor: _T) -> _T:
        """Concatenate the tensors of all ranks along their first dimension, in rank order. A collective.

        A tensor without dimensions counts as one row. Raises `InvalidArgument` on every rank if shapes differ (see
        `pad_across_processes`), or for a leaf that is not a tensor (see `rankbook.gather_object`).

        Example::

            accelerator.gather(torch.tensor([accelerator.process_index]))  # tensor([0, 1])
            accelerator.gather(loss)  # tensor([0.5000, 0.5000])
        """
        return gather(tensor)

    def reduce(self, tensor: _T, reduction: str = "sum", scale: float = 1.0) -> _T:
        """Reduce every tensor over the ranks to the "mean", "sum", "min" or "max", times `scale`. A collective.

        Returns new tensors. Raises `InvalidArgument` on every rank for another reduction, different shapes, and leaves
        that are not tensors.

        Example::

            accelerator.reduce(torch.tensor(1.0 + rank))  # tensor(3.)
            accelerator.reduce(torch.tensor(1.0 + rank), "mean")  # tensor(1.5000)
        """
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: _T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> _T:
        """Pad every tensor along `dim` to the largest size on any rank. A collective.

        `pad_first` puts the padding, with the value `pad_index`, before the data. Raises `InvalidArgument` on every
        rank if the numbers of dimensions differ, and for leaves that are not tensors.

        Example::

            tokens = torch.ones(1 + rank, dtype=torch.long)  # more of them on rank 1
            accelerator.gather(accelerator.pad_across_processes(tokens))  # tensor([1, 0, 1, 1])
        """
        return pad_across_processes(tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: ANN401 - nested
        """Gather tensors without the samples that were repeated to make batches even. A collective.

        Every sample of the dataset appears once, in order. There may be several rows per sample, such as one per token,
        if their number is the same for all samples. With uneven batches, ranks without a batch in the last round have
        left the loop; only the other ranks get its samples. A list with data that are not tensors is one of samples,
        and gathered as objects; `use_gather_object` sends tensors this way too. The values of a mapping or dataclass,
        and those of a tuple with a container or an array in it, are gathered one by one. Raises as `gather` and
        `rankbook.gather_object`; and `InvalidArgument` if the number of rows is not the same for every rank, or not for
        every sample of a round with repeated samples.

        Example::

            loader = accelerator.prepare(torch.utils.data.DataLoader(range(5), batch_size=2))
            samples = [accelerator.gather_for_metrics(batch) for batch in loader]
            torch.cat(samples).tolist()  # [0, 1, 2, 3, 4]
        """
        values = [leaf for _, leaf in leaves(input_data)]
        as_objects = use_gather_object or not values or not all(isinstance(leaf, torch.Tensor) for leaf in values)
        # All ranks decide alike if their data have the same structure.
        if not as_objects:
            return self._for_metrics(input_data)
        if not _has_columns(input_data):
            return self._for_metrics_as_objects(input_data)
        columns = children(input_data)
        share = self._current_share()
        # In another order, or with another number of them, the ranks would mix up the columns. Ranks that have left the
        # loop cannot take part.
        if _compares(PartialState()) and (share is None or len(share.ranks) == len(share.real)):
            control_collectives.check_same("gather_for_metrics", repr([key for key, _ in columns]))
        return rebuild(input_data, {key: self.gather_for_metrics(child, use_gather_object) for key, child in columns})

    def _current_share(self) -> RoundPadding | None:
        """Return what is real in the current round of the innermost loop, None if all of it is."""
        return getattr(self.gradient_state.active_dataloader, "share", None) if self.use_distributed else None

    def _for_metrics(self, data: Any) -> Any:  # noqa: ANN401 - nested
        share = self._current_share()
        if share is None:
            return self._cut_repeated(self._drop_replicas(gather(data)))
        # As `gather` does: a loss without dimensions is one row.
        data = map_leaves(lambda leaf: leaf if leaf.ndim else leaf[None], data)
        if len(share.ranks) < len(share.real):
            return self._gather_from_ranks_with_batch(data, share)
        if WHOLE in share.real:
            return self._gather_whole(data, share)
        # The ranks' parts of this batch may differ in length, so pad before gathering and trim afterwards.
        return trim(self._drop_replicas(gather(pad_across_processes(data))), share)

    def _gather_whole(self, data: Any, share: RoundPadding) -> Any:  # noqa: ANN401 - nested
        """Gather batches of unknown numbers of rows, without those that are repeated: their lengths may differ."""
        sent = map_leaves(lambda leaf: leaf.detach().cpu(), data)
        parts = self._drop_replicas(gather_object([sent]))
        joined = concatenate([part for part, real in zip(parts, share.real, strict=True) if real])
        devices = iter([leaf.device for _, leaf in leaves(data)])
        return map_leaves(lambda leaf: leaf.to(next(devices)), joined)

    def _cut_repeated(self, data: Any) -> Any:  # noqa: ANN401 - nested
        """Cut a mean that was repeated by the batch size to the samples of a shorter last batch. For one process.

        Example scripts of Transformers do so: `gather_for_metrics(loss.repeat(batch_size))`.
        """
        rows = self.gradient_state.remainder
        if self.use_distributed or rows <= 0:
            return data
        expected = getattr(self.gradient_state.active_dataloader, "total_batch_size", 0)

        def is_repeated(leaf: torch.Tensor) -> bool:
            # Otherwise it has several rows per sample, or the batch has as many.
            return bool(leaf.ndim) and len(leaf) == expected and bool(expected % rows or (leaf == leaf[:1]).all())

        return map_leaves(lambda leaf: leaf[:rows] if is_repeated(leaf) else leaf, data)

    def _for_metrics_as_objects(self, data: Any) -> Any:  # noqa: ANN401 - nested
        share = self._current_share()
        # A collate function that unpacks samples gives tuples. The rows of a tensor or an array are samples, too.
        if isinstance(data, tuple) or getattr(data, "ndim", 0) > 0:
            data = list(data)
        if share is None or not isinstance(data, list):
            return self._drop_replicas(gather_object(data))
        if len(share.ranks) < len(share.real):
            return self._gather_from_ranks_with_batch(data, share, as_objects=True)
        # One list per rank. The lists may differ in length, and `_rows` expects as many rows from every rank: fill up
        # with None, which is left out again.
        everyone = gather_object([data])
        if WHOLE in share.real:
            parts = self._drop_replicas(everyone)
            return [row for part, real in zip(parts, share.real, strict=True) if real for row in part]
        longest = max(map(len, everyone))
        rows = [row for objects in everyone for row in (*objects, *[None] * (longest - len(objects)))]
        rows = self._drop_replicas(rows)
        return [rows[row] for row in _rows(len(rows), share)]

    def _gather_from_ranks_with_batch(
        self,
        data: Any,  # noqa: ANN401 - nested
        share: RoundPadding,
        *,
        as_objects: bool = False,
    ) -> Any:  # noqa: ANN401 - nested
        """Gather the last round of uneven batches among the ranks that have a batch in it.

        The other ranks have left the loop and cannot take part in a collective, so point-to-point messages are used:
        every rank sends to its peers in turn.
        """
        # Ranks of one tensor-parallel group have the same batch. Rank k of such a group talks to the ranks k of the
        # other groups, so that every rank gets all rows without duplicates. Example: with 6 ranks and `tp_size=2`, the
        # groups are (0, 1), (2, 3) and (4, 5). If the last group has no batch, ranks 0 and 2 exchange theirs, and so do
        # ranks 1 and 3.
        replicas = self.num_processes // self.setup.data_parallel_size
        replica = self.process_index % replicas
        peers = [part * replicas + replica for part in share.ranks]
        parts = []
        # In rank order, one sender at a time. All ranks involved go through the senders in the same order, so no two
        # ranks wait for each other.
        for rank in peers:
            message = [map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, data)]
            if rank == self.process_index:
                for peer in peers:
                    if peer != rank:
                        dist.send_object_list(message, dst=peer)
            else:
                dist.recv_object_list(message, src=rank)
            parts.append(message[0])  # where ranks have no batch, no sample is repeated
        if as_objects:
            return [row for part in parts for row in part]
        # As after `gather`: on the devices of the arguments.
        devices = iter([leaf.device for _, leaf in leaves(data)])
        return map_leaves(lambda leaf: leaf.to(next(devices)), concatenate(parts))

    def _drop_replicas(self, gathered: Any) -> Any:  # noqa: ANN401 - nested
        """Keep the rows of one rank of every group that shares batches, such as a tensor-parallel group."""
        ranks, parts = self.num_processes, self.setup.data_parallel_size
        if ranks == parts:
            return gathered
        if isinstance(gathered, list):
            # Ranks are numbered with `tp` as the innermost axis, so the members of a group are neighbours.
            rows = len(gathered) // ranks
            return [row for part in range(parts) for row in gathered[part * (ranks // parts) * rows :][:rows]]
        return map_leaves(lambda tensor: tensor.unflatten(0, (parts, ranks // parts, -1))[:, 0].flatten(0, 1), gathered)

    # Execution on selected ranks

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have reached this call.

        Example::

            if accelerator.is_main_process:
                torch.save(model.state_dict(), "weights.pt")
            accelerator.wait_for_everyone()
            weights = torch.load("weights.pt")  # complete, on every rank
        """
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block rank 0 executes before the other ranks. A collective.

        If the block raises on rank 0, the other ranks do not execute it and raise `PeerFailedError`.

        Example::

            with accelerator.main_process_first():
                dataset = download_and_cache()  # the other ranks read what rank 0 has cached
        """
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block the first rank of every machine executes before its other ranks."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: _T, apply_padding: bool = False) -> AbstractContextManager[_T]:
        """Return a context manager that gives this rank's share of `inputs`.

        See `PartialState.split_between_processes`. Raises `InvalidArgument` for a dict whose values have different
        lengths.

        Example::

            with accelerator.split_between_processes(["a", "b", "c"]) as share:
                results = [generate(prompt) for prompt in share]
            gather_object(results)  # ['A', 'B', 'C']
        """
        return self.state.split_between_processes(inputs, apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run on rank 0 only.

        Example::

            @accelerator.on_main_process
            def report(accuracy):
                print(f"accuracy {accuracy:.1%}")


            report(0.98)
        """
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run only on the first rank of every machine."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run on the last rank only."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run on rank `process_index` only."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run only on rank `local_process_index` of every machine."""
        return self.state.on_local_process(function, local_process_index)

    # Position in the device mesh

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Device mesh of `parallelism_config` with all its axes, None without one.

        The first access is a collective, also after an abort of collectives or the replacement of a rank.
        """
        parallelism = self.parallelism_config
        return None if parallelism is None else mesh_for(self.device.type, parallelism.sizes)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica of this rank. Raises `InvalidArgument` without `parallelism_config`."""
        return self._mesh_coordinate("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank's shard within its replica. Raises `InvalidArgument` without a `parallelism_config`."""
        return self._mesh_coordinate("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank in its tensor-parallel group. Raises `InvalidArgument` without `parallelism_config`."""
        return self._mesh_coordinate("tp")

    def _mesh_coordinate(self, axis: str) -> int:
        if self.parallelism_config is None:
            raise InvalidArgument(f"mesh axis {axis!r} is not defined: pass parallelism_config to Accelerator()")
        return self.parallelism_config.place_of(self.process_index)[axis]

    def print(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as the builtin
        """Print on the first rank of every machine.

        Example::

            accelerator.print(f"loss {loss.item():.3f}")
        """
        self.state.print(*values, **options)
