"""Prepared data loaders: those that every rank reads by itself, and those that rank 0 reads for all ranks.

`prepare_data_loader` makes a prepared loader of any DataLoader. It never changes the user's loader, its sampler or
their lists, and never calls the constructor of a subclass again, since that may take other arguments. It makes a
shallow copy of the loader and gives the copy another batch sampler and another dataset; so the class, its `__iter__`
and its attributes are kept. `skip_first_batches` returns a loader without its first batches.

`DataLoaderDispatcher` reads on rank 0. Every rank receives the batches that it would have read itself with a
`DataLoaderShard`. An error while rank 0 reads, packs or cuts a batch is raised on all ranks.

Protocol of the dispatcher. Rank 0 reads a round (one batch per rank) and sends every other rank one message: its
`FetchedBatch`, or a `_Failure`, or None at the end of the pass. While a round travels, rank 0 reads and packs the next
one. It yields its own batch of a round only after all sends of the round have completed. So nothing is under way while
a batch is in use, and a loop that is left with `break` on all ranks leaves no message behind.

Layout of a message: a pickled object, with large tensors and arrays beside the pickle. A receiver must know the length
of a tensor before it arrives. So the first tensor of a message always has `FIRST_BYTES` bytes, and a small batch is
this one tensor. It is the beginning of the frame: header, sizes of the large buffers (uint64), pickle. The remainder
of a longer frame follows in a second tensor, and then every large buffer in its own one, without a copy. Buffers below
`LARGE` bytes are copied into the pickle, which takes less time than one more tensor.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import io
import pickle
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rankbook import control_collectives
from rankbook.errors import InvalidArgument, PeerFailedError
from rankbook.runtime.config import require_stateful_dataloader
from rankbook.runtime.data.batch_reader import NOTHING, FetchedBatch
from rankbook.runtime.data.loader_base import (
    LoaderParts,
    PreparedLoader,
    build_loader_parts,
    is_default_group,
    iterate_local,
)
from rankbook.runtime.data.rng import check_rng_types
from rankbook.runtime.data.samplers import WHOLE, RoundPadding, SkipBatchSampler
from rankbook.runtime.data.seen import describe_split, split_warning
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.tree import concatenate, find_batch_size

FIRST_BYTES = 1 << 13
LARGE = 1 << 16

_TAG = 7411  # keeps these messages apart from others between the same ranks
_HEADER = struct.Struct("<2Q")  # bytes of the frame, number of large buffers


def send(message: Sequence[torch.Tensor], rank: int, group: Any) -> list[Any]:  # noqa: ANN401 - a process group
    """Start to send a packed message; return the works to wait for."""
    return [dist.isend(tensor, dst=rank, group=group, tag=_TAG) for tensor in message]


def receive(rank: int, group: Any) -> Any:  # noqa: ANN401 - what was packed
    """Wait for the next message from `rank`, and return its content."""
    return unpack(partial(dist.recv, src=rank, group=group, tag=_TAG))


def pack(content: object) -> list[torch.Tensor]:
    """Return the message with `content`, as uint8 tensors. Raises what pickling raises."""
    large: list[memoryview] = []

    # Pickle protocol 5: a callback that returns False takes a buffer out of the pickle, True leaves it in.
    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= LARGE:
            large.append(memory)
        return memory.nbytes < LARGE

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=keep_in_pickle)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
    pickler.dump(content)
    sizes = struct.pack(f"<{len(large)}Q", *(memory.nbytes for memory in large))
    length = _HEADER.size + len(sizes) + stream.tell()
    # A bytearray, because `torch.frombuffer` needs writable memory; the tensors below are views of it.
    frame = bytearray().join((_HEADER.pack(length, len(large)), sizes, stream.getbuffer()))
    # A short frame is filled up, as the receiver always waits for FIRST_BYTES bytes.
    first = torch.frombuffer(frame.ljust(FIRST_BYTES, b"\0"), dtype=torch.uint8)
    message = [first[:FIRST_BYTES], first[FIRST_BYTES:]] if length > FIRST_BYTES else [first]
    # torch refuses read-only memory, so that of a read-only array is copied
    return message + [
        torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8) for memory in large
    ]


def unpack(fill: Callable[[torch.Tensor], object]) -> Any:  # noqa: ANN401 - what was packed
    """Return the content of a message. `fill` receives the next tensor of it into the given one."""
    frame = torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")
    fill(frame)
    # The first tensor has arrived. It tells how much more there is.
    length, count = _HEADER.unpack_from(frame.numpy().data)
    if length > FIRST_BYTES:
        first, frame = frame, torch.empty(length, dtype=torch.uint8, device="cpu")
        frame[:FIRST_BYTES] = first
        fill(frame[FIRST_BYTES:])
    memory = frame.numpy().data
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", memory, _HEADER.size):
        large = torch.empty(size, dtype=torch.uint8, device="cpu")
        fill(large)
        buffers.append(large.numpy().data)
    return pickle.loads(memory[_HEADER.size + 8 * count : length], buffers=buffers)


def _reduce_tensor(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - as `__reduce_ex__`
    """Reduce a plain dense tensor to a buffer, which may leave the pickle, and any other tensor as torch does."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    # Only tensors that are completely described by dtype, shape and bytes. A lazily conjugated or negated tensor has
    # other bytes than values; attributes and gradients would be lost.
    if not is_dense or tensor.is_meta or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad or tensor.__dict__:
        return tensor.__reduce_ex__(5)
    # `cpu()` and `contiguous()` return the tensor itself where possible, so most batches are not copied.
    # Of the array and not of its `data`: CPython crashes when it collects a cycle with the buffer of a memoryview.
    memory = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    buffer = pickle.PickleBuffer(memory)  # type: ignore[arg-type, unused-ignore]  # unknown before Python 3.12
    return _restore_tensor, (buffer, tensor.dtype, tuple(tensor.shape))


def _restore_tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 - a buffer
    # `torch.frombuffer` refuses an empty buffer.
    if not len(memory):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class DataLoaderDispatcher(PreparedLoader):
    """Loader whose data rank 0 reads and sends to the other ranks; see `prepare_data_loader(dispatch_batches=True)`.

    Batches must be picklable. What rank 0 raises while it reads, packs or runs `slice_fn` is raised on every rank.
    `slice_fn(batch, slice, process_index=, num_processes=)` cuts the part of a rank out of the concatenated batches of
    all ranks. The constructor takes the arguments of torch's DataLoader for the data of all ranks.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - as torch's
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 - torch's
    ) -> None:
        kind = require_stateful_dataloader() if use_stateful_dataloader else DataLoader
        state = PartialState()
        parts = build_loader_parts(
            kind(dataset, **kwargs),
            state.num_processes,
            state.process_index,
            split_batches=split_batches,
            every_rank=state.num_processes > 1,
            stateful=use_stateful_dataloader,
        )
        parts.device, parts.non_blocking = state.device, _non_blocking
        parts.synchronized = is_default_group(state.num_processes)
        parts.deal = tuple(range(state.num_processes)) if parts.synchronized else None
        self._setup(parts, skip_batches=skip_batches)
        self.slice_fn, self._group = slice_fn, None

    @classmethod
    def of(cls, parts: LoaderParts, slice_fn: Callable[..., Any] | None = None) -> DataLoaderDispatcher:
        """Return a dispatcher made of `parts`, whose requests are those of all ranks."""
        dispatcher = cls.__new__(cls)
        dispatcher._setup(parts)
        dispatcher.slice_fn = slice_fn
        dispatcher._group = None
        return dispatcher

    slice_fn: Callable[..., Any] | None
    _group: Any

    def _arrivals(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        # With tensor parallelism alone, several ranks have one share, and must not read different batches for it.
        if self.parts.num_processes == 1 and len(self.parts.deal or (0,)) == 1:
            return iterate_local(self.parts)
        # nccl cannot send tensors in host memory, so a group without a CPU backend needs a gloo group beside it.
        # Creating it is a collective; all ranks begin their first pass over this loader together.
        if self._group is None and control_collectives.control_device().type != "cpu":
            self._group = dist.new_group(backend="gloo")
        if self.parts.deal is None:
            # The caller chose the process index, and every rank reads different data.
            rank, indices = self.parts.process_index, tuple(range(self.parts.num_processes))
        else:  # ranks of one tensor-parallel group have the same index, and get the same batches
            rank, indices = dist.get_rank(), self.parts.deal
        return self._receive() if rank else self._send(indices)

    def _receive(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        # The receiving ranks ask for nothing: rank 0 sends rounds as fast as its own loop takes them.
        while (content := receive(0, self._group)) is not None:
            if isinstance(content, _Failure):
                content.throw()
            if not content.absent:
                yield content.batch, content.share, content.last

    def _send(self, indices: tuple[int, ...]) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        """Read on rank 0, send to all others, and yield rank 0's batches. `indices`: the process index of every rank.

        An error is raised after all batches read before it.
        """
        rounds = _rounds(self.parts, self.slice_fn)
        current = _pack_next(rounds, indices)
        while True:
            # `isend` returns at once. The messages in `current` must live until `wait`, because gloo reads from their
            # memory.
            works = []
            for rank, index in enumerate(indices[1:], 1):
                works += send(current.messages[index], rank, self._group)
            # Reading overlaps with the transfer.
            following = None if current.ended else _pack_next(rounds, indices)
            for work in works:
                work.wait()
            # Rank 0 raises after all others have received the error, so that none of them waits.
            if current.error is not None:
                raise current.error
            if following is None:
                return
            fetched = current.fetched
            if not fetched.absent:
                yield fetched.batch, fetched.share, fetched.last
            current = following


class _Failure:
    """An exception of rank 0, in a form that can be sent to the other ranks."""

    def __init__(self, error: Exception) -> None:
        self.text = f"{type(error).__name__}: {error}"
        try:
            self.pickled: bytes | None = pickle.dumps(error)
            # Some exceptions can be pickled, but not restored, if their constructor takes other arguments.
            pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - the error is sent as text then
            self.pickled = None

    def throw(self) -> None:
        """Raise the original exception, or a `PeerFailedError` that describes it if it cannot be pickled."""
        cause = PeerFailedError(f"rank 0 raised {self.text} while it read a batch for all ranks", 0)
        if self.pickled is None:
            raise cause
        error: Exception = pickle.loads(self.pickled)
        error.add_note("Raised on rank 0, while it read a batch for all ranks")
        raise error from cause


class _PackedRound(NamedTuple):
    """A round that is ready to send: rank 0's own batch, and the messages by process index.

    `ended` is True for the message after the last round, and for that of an `error`.
    """

    fetched: FetchedBatch
    messages: dict[int, list[torch.Tensor]]
    error: Exception | None = None
    ended: bool = False


def _pack_next(rounds: Iterator[list[FetchedBatch]], indices: tuple[int, ...]) -> _PackedRound:
    """Read and pack the next round, or the end of the pass, or the error."""
    # Ranks of one tensor-parallel group have the same index; their batch is packed once.
    receivers = set(indices[1:])
    try:
        fetched = next(rounds, None)
        if fetched is None:
            return _PackedRound(NOTHING, dict.fromkeys(receivers, pack(None)), ended=True)
        return _PackedRound(fetched[indices[0]], {index: pack(fetched[index]) for index in receivers})
    except Exception as error:  # noqa: BLE001 - raised on every rank, including this one
        failure = pack(_Failure(error))
        return _PackedRound(NOTHING, dict.fromkeys(receivers, failure), error, ended=True)


def _rounds(parts: LoaderParts, slice_fn: Callable[..., Any] | None) -> Iterator[list[FetchedBatch]]:
    """Yield the batches of all ranks, round by round, as this process reads them."""
    batches = (
        batch if type(batch) is FetchedBatch else FetchedBatch(batch, share, last)
        for batch, share, last in iterate_local(parts)
    )
    ranks = parts.num_processes
    first: list[FetchedBatch] = []
    # Requests come round by round, one for every rank, so `ranks` batches in turn are one round.
    while fetched := list(islice(batches, ranks)):
        first = first or fetched
        if parts.custom_iter:
            fetched = _filled(fetched, first, parts)
        # In the last round of uneven batches the last ranks have none.
        fetched += [NOTHING] * (ranks - len(fetched))
        if all(batch.absent for batch in fetched):
            return
        yield fetched if slice_fn is None else _cut(fetched, slice_fn)


def _filled(fetched: list[FetchedBatch], first: list[FetchedBatch], parts: LoaderParts) -> list[FetchedBatch]:
    """Complete a round in which a user-defined `__iter__` has ended.

    Whole batches of the first round are repeated with `even_batches`; otherwise the last ranks have no batch.
    """
    ranks = parts.num_processes
    missing = ranks - len(fetched)
    if not missing:
        return [batch._replace(last=fetched[-1].last) for batch in fetched]
    even = parts.tickets.shard.even_batches
    present = tuple(range(ranks if even else len(fetched)))
    share = RoundPadding((WHOLE,) * len(fetched) + (0,) * missing, WHOLE, present)
    repeated = [first[number % len(first)] for number in range(missing)] if even else []
    return [batch._replace(share=share, last=True) for batch in (*fetched, *repeated)]


def _cut(fetched: list[FetchedBatch], slice_fn: Callable[..., Any]) -> list[FetchedBatch]:
    """Replace the batches by what `slice_fn` cuts out of all of them, concatenated."""
    present = [batch for batch in fetched if not batch.absent]
    joined, start, cut = concatenate([batch.batch for batch in present]), 0, []
    for rank, batch in enumerate(present):
        # Every rank's slice has the size of its own batch; `slice_fn` decides which rows these are.
        end = start + find_batch_size(batch.batch)
        part = slice_fn(copy.copy(joined), slice(start, end), process_index=rank, num_processes=len(fetched))
        cut.append(batch._replace(batch=part))
        start = end
    # Absent batches are at the end, since the last ranks are the first to have none.
    return cut + fetched[len(present) :]


class DataLoaderShard(PreparedLoader):
    """A rank's own part of a loader; batches are on the device when they are yielded.

    `prepare_data_loader` makes one of any loader. The constructor takes the arguments of torch's DataLoader, whose
    samplers must yield this rank's batches already, and the `device` to move them to.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - as torch's
        device: torch.device | None = None,
        rng_types: list[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _non_blocking: bool = False,
        **kwargs: Any,  # noqa: ANN401 - torch's
    ) -> None:
        kind = require_stateful_dataloader() if use_stateful_dataloader else DataLoader
        state = PartialState()
        # The samplers yield this rank's batches already, so the shard has one rank. The world is needed only to number
        # the batches of all ranks, for their seeds.
        numbering = (state.num_processes, state.process_index) if state.use_distributed else None
        parts = build_loader_parts(kind(dataset, **kwargs), 1, 0, numbering=numbering, stateful=use_stateful_dataloader)
        parts.device, parts.non_blocking, parts.rng_types = device, _non_blocking, check_rng_types(rng_types)
        parts.generator = synchronized_generator or parts.generator
        parts.synchronized = is_default_group(state.num_processes)
        parts.deal = tuple(range(state.num_processes)) if numbering else None
        self._setup(parts, skip_batches=skip_batches)

    @classmethod
    def of(cls, parts: LoaderParts) -> DataLoaderShard:
        """Return a loader made of `parts`."""
        loader = cls.__new__(cls)
        loader._setup(parts)
        return loader

    def _arrivals(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        return iterate_local(self.parts)


def prepare_data_loader(
    dataloader: Any,  # noqa: ANN401 - a DataLoader, or a subclass of it
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,  # noqa: ANN401 - a DeviceMesh
) -> Any:  # noqa: ANN401 - a DataLoaderShard or a DataLoaderDispatcher
    """Return a loader of the part of `dataloader` for rank `process_index` of `num_processes` (default: this process).

    The options are those of `DataLoaderConfiguration`. `put_on_device` moves batches to `device` (default: this
    process's). `rng_types` are further generators that get rank 0's state at the start of a pass. `torch_device_mesh`:
    ranks that differ only along the axes "tp" and "cp" get the same batches. A prepared loader is returned unchanged.
    The user's loader is not modified.

    Raises `InvalidArgument` (a ValueError) if the argument is not a DataLoader, for a batch that cannot be split
    evenly, an unknown rng type, a `slice_fn_for_dispatch` without dispatched batches, and missing torchdata.

    Example::

        loader = prepare_data_loader(torch.utils.data.DataLoader(range(8), batch_size=2))
        gather_object([batch.tolist() for batch in loader])  # [[0, 1], [4, 5], [2, 3], [6, 7]]
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise InvalidArgument(f"prepare_data_loader takes a torch DataLoader, not a {type(dataloader).__name__}")
    state = PartialState()
    options = None
    if num_processes is None and process_index is None:
        options = {
            "split_batches": split_batches,
            "put_on_device": put_on_device,
            "device": None if device == state.device else device,
            "rng_types": rng_types,
            "dispatch_batches": dispatch_batches,
            "even_batches": even_batches,
            "slice_fn_for_dispatch": slice_fn_for_dispatch,
            "use_seedable_sampler": use_seedable_sampler,
            "data_seed": data_seed,
            "non_blocking": non_blocking,
            "use_stateful_dataloader": use_stateful_dataloader,
        }
    ranks = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    synchronized = is_default_group(ranks)
    # A process that replaces a dead rank takes over the share of that rank, which `deal` names.
    deal = tuple(range(ranks)) if synchronized and rank == state.process_index else None
    world_size = ranks
    if torch_device_mesh is not None:
        ranks, rank = data_parallel_rank(torch_device_mesh, world_size)
        deal = data_parallel_layout(torch_device_mesh) if synchronized else None
    # Reading a stream on every rank would read all of it as often as there are ranks. It is read once then, if its
    # batches have to be moved in any case. The same rule as in Accelerate.
    if dispatch_batches is None:
        dispatch_batches = isinstance(dataloader.dataset, IterableDataset) and put_on_device
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        raise InvalidArgument(
            "slice_fn_for_dispatch requires dispatch_batches=True: it slices the batches that rank 0 dispatches"
        )
    # The user's DistributedSampler has distributed the samples. Distributing them again would leave out most of them.
    dealt = ranks > 1 and isinstance(_sampler_below(dataloader), DistributedSampler)
    reason = describe_split(dataloader, ranks, rank, dealt=dealt) if ranks > 1 else ""
    if reason:
        warnings.warn(split_warning(reason), stacklevel=2)
    dispatches = dispatch_batches and world_size > 1 and not dealt
    parts = build_loader_parts(
        dataloader,
        1 if dealt else ranks,
        0 if dealt else rank,
        split_batches=split_batches and not dealt,
        even_batches=even_batches,
        every_rank=dispatches,
        numbering=(ranks, rank) if dealt else None,
        stateful=use_stateful_dataloader,
        seedable=use_seedable_sampler,
        data_seed=data_seed,
    )
    parts.synchronized, parts.deal, parts.split_reported = synchronized, deal, bool(reason)
    parts.device = (state.device if device is None else device) if put_on_device else None
    parts.non_blocking, parts.rng_types = non_blocking, check_rng_types(rng_types)
    parts.options = options
    if dispatches:
        return DataLoaderDispatcher.of(parts, slice_fn_for_dispatch)
    return DataLoaderShard.of(parts)


def prepare_again(loader: PreparedLoader, mesh: Any) -> None:  # noqa: ANN401 - a DeviceMesh or None
    """Make a prepared loader one for the number of ranks that there are now, in place.

    `mesh` is as in `prepare_data_loader`. The loader continues with the samples of the epoch that no rank has had, see
    `PreparedLoader.load_state_dict`. A loader whose ranks the caller has chosen stays as it is.
    """
    options, source = loader.parts.options, loader.parts.source
    if options is None:
        return
    state = loader.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has seen the warnings about the data
        prepared = prepare_data_loader(source, torch_device_mesh=mesh, **options)
    # In place: loaders that `skip_first_batches` has returned share the parts and the position.
    loader.__class__ = prepared.__class__
    vars(loader.parts).update(vars(prepared.parts))
    for name in ("slice_fn", "_group"):  # of a dispatcher
        if name in vars(prepared):
            vars(loader)[name] = vars(prepared)[name]
    loader.end_of_dataloader, loader.share, loader.remainder = False, None, -1
    loader.load_state_dict(state)


def data_parallel_rank(mesh: Any, world_size: int) -> tuple[int, int]:  # noqa: ANN401 - a DeviceMesh
    """Return how many ranks of `mesh` read different data, and the index of this one."""
    names = list(mesh.mesh_dim_names or ())
    ranks, rank = 1, 0
    for axis, name in enumerate(names):
        if name not in {"tp", "cp"}:
            # Row-major over the data-parallel axes: the coordinates of this rank are the digits of its index.
            ranks, rank = ranks * mesh.size(axis), rank * mesh.size(axis) + mesh.get_local_rank(axis)
    if mesh.size() != world_size:
        raise InvalidArgument(f"torch_device_mesh must have {world_size} ranks, got {mesh.size()} (axes {names})")
    return ranks, rank


def data_parallel_layout(mesh: Any) -> tuple[int, ...]:  # noqa: ANN401 - a DeviceMesh
    """Return the data-parallel part of every rank of `mesh`, by global rank."""
    # `mesh.mesh` holds the global rank at every coordinate. `parts` holds the data-parallel index there; sorting by
    # global rank gives the index of every rank.
    layout = mesh.mesh
    parts = torch.zeros_like(layout)
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in {"tp", "cp"}:
            shape = [-1 if dimension == axis else 1 for dimension in range(layout.dim())]
            parts = parts * mesh.size(axis) + torch.arange(mesh.size(axis), device=layout.device).view(shape)
    return tuple(parts.flatten()[layout.flatten().argsort()].tolist())


def _sampler_below(loader: Any) -> Any:  # noqa: ANN401
    # Without batching, a BatchSampler may be in the place of the sampler.
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    return loader.sampler if sampler is None else sampler


class SkipDataLoader(DataLoader[Any]):
    """Plain loader that reads and discards its first `skip_batches` batches, for datasets that cannot be indexed.

    The constructor takes a dataset and the arguments of torch's DataLoader, or a loader in place of the dataset. With
    `use_stateful_dataloader` the loader is an instance of torchdata's StatefulDataLoader, and a pass that continues
    from a loaded state discards nothing.
    """

    _source: Any
    _resumed: bool
    skip_batches: int

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - as torch's, or a DataLoader
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,  # noqa: ANN401 - torch's
    ) -> None:
        kind = require_stateful_dataloader() if use_stateful_dataloader else DataLoader
        source = dataset if isinstance(dataset, DataLoader) else kind(dataset, **kwargs)
        if use_stateful_dataloader and not isinstance(self, kind):
            self.__class__ = _stateful_skip_class()
        # torch's `__setattr__` refuses to change these attributes, and its constructor would build the samplers again.
        self.__dict__.update(source.__dict__)
        self.__dict__.update(_source=source, _resumed=False, skip_batches=skip_batches)

    @property
    def base_dataloader(self) -> Any:  # noqa: ANN401 - a DataLoader
        """The loader that yields the batches."""
        return self._source

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A loaded state is that of the source, whose position already includes the skipped batches.
        skip = 0 if self._resumed else self.skip_batches
        self.__dict__["_resumed"] = False
        return islice(self._source, skip, None)

    def __len__(self) -> int:
        return max(0, len(self._source) - self.skip_batches)


@functools.cache
def _stateful_skip_class() -> type[SkipDataLoader]:
    """Return a class like SkipDataLoader that is also a subclass of torchdata's StatefulDataLoader."""

    def state_dict(loader: SkipDataLoader) -> dict[str, Any]:
        return dict(loader._source.state_dict())

    def load_state_dict(loader: SkipDataLoader, state_dict: dict[str, Any]) -> None:
        loader._source.load_state_dict(state_dict)
        loader.__dict__["_resumed"] = True

    members = {"__module__": __name__, "__doc__": SkipDataLoader.__doc__}
    return type(
        "SkipDataLoader",
        (SkipDataLoader, require_stateful_dataloader()),
        {**members, "state_dict": state_dict, "load_state_dict": load_state_dict},
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:  # noqa: ANN401 - a loader of the same kind
    """Return a loader whose every pass starts after `num_batches` of this rank's batches. `dataloader` is not changed.

    A prepared loader and the returned one share their position: a pass over either is the next epoch. Skipped samples
    are not read, except from iterable datasets. Raises `InvalidArgument` for a negative number.

    Example::

        loader = torch.utils.data.DataLoader(range(8), batch_size=2)
        [batch.tolist() for batch in skip_first_batches(loader, 3)]  # [[6, 7]]
    """
    if num_batches < 0:
        raise InvalidArgument(f"num_batches must be >= 0, got {num_batches}")
    if isinstance(dataloader, PreparedLoader):
        # A shallow copy shares `position`, and so the number of the epoch.
        skipping = copy.copy(dataloader)
        skipping.skip_batches = dataloader.skip_batches + num_batches
        return skipping
    # A plain loader without indices: an iterable dataset, or one whose items are read one by one.
    if getattr(dataloader, "batch_sampler", None) is None or isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(dataloader, num_batches)
    skipping = copy.copy(dataloader)
    skipping.__dict__.update(batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches), _iterator=None)
    return skipping
