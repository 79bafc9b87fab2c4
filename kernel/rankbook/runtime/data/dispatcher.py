"""Data loader that rank 0 reads and dispatches to all ranks.

Every rank receives the batches that it would have read itself with a `DataLoaderShard`. An error while rank 0 reads,
packs or cuts a batch is raised on all ranks.

Protocol. Rank 0 reads a round (one batch per rank) and sends every other rank one message: its
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
import io
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rankbook import control_collectives
from rankbook.errors import PeerFailedError
from rankbook.runtime.comm.tree import concatenate, find_batch_size
from rankbook.runtime.config import require_stateful_dataloader
from rankbook.runtime.data.batch_reader import NOTHING, FetchedBatch
from rankbook.runtime.data.loader_base import (
    LoaderParts,
    PreparedLoader,
    build_loader_parts,
    is_default_group,
    iterate_local,
)
from rankbook.runtime.data.samplers import WHOLE, RoundPadding
from rankbook.runtime.process_state import PartialState

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
    frame = torch.empty(FIRST_BYTES, dtype=torch.uint8)
    fill(frame)
    # The first tensor has arrived. It tells how much more there is.
    length, count = _HEADER.unpack_from(frame.numpy().data)
    if length > FIRST_BYTES:
        first, frame = frame, torch.empty(length, dtype=torch.uint8)
        frame[:FIRST_BYTES] = first
        fill(frame[FIRST_BYTES:])
    memory = frame.numpy().data
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", memory, _HEADER.size):
        large = torch.empty(size, dtype=torch.uint8)
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
    memory = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return _restore_tensor, (pickle.PickleBuffer(memory), tensor.dtype, tuple(tensor.shape))


def _restore_tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 - a buffer
    # `torch.frombuffer` refuses an empty buffer.
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
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
        if self.parts.num_processes == 1:
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
