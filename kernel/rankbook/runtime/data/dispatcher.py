"""Data loader that rank 0 reads and dispatches to all ranks.

Every rank receives the batches that it would have read itself with a `DataLoaderShard`. An error while rank 0 reads,
packs or cuts a batch is raised on all ranks.

Protocol. At the start of a pass every receiver sends a greeting of 32 bytes: a key of its host and the token of the
shared memory that it has open (slots.py). Rank 0 reads rounds (one batch per rank), packs those that are small into a
bundle, and sends every rank one `BatchFrame` per bundle (frames.py). While a bundle travels, rank 0 reads the next one.
The last bundle says that the pass has ended, or carries the error.

Parts: `DataLoaderDispatcher` is the loader. `_Reading` reads and bundles rounds on rank 0. `SendChannel` and
`RecvChannel` are the two ends of the point-to-point connection between rank 0 and another rank. `Collate` stacks
samples directly in the shared memory of the receiver, which saves one copy.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from rankbook.errors import PeerFailed
from rankbook.runtime.comm import consistency
from rankbook.runtime.comm.tree import concatenate, find_batch_size
from rankbook.runtime.data.batch_reader import NOTHING, FetchedBatch
from rankbook.runtime.data.frames import FIRST_CAPACITY, LARGE, BatchFrame, FrameReader, pack
from rankbook.runtime.data.loader_base import LoaderParts, PreparedLoader, iterate_local
from rankbook.runtime.data.samplers import WHOLE, BatchSamplerShard, RoundPadding
from rankbook.runtime.data.slots import MOST_BYTES, NO_OFFER, SlotRing, host_key

_MOST_ROUNDS = 32
_MOST_BYTES = 1 << 18
"""Maximum number of rounds in a bundle, and its approximate maximum size in bytes.

Larger rounds are sent one by one.
"""
_PATIENCE = 0.002
"""Seconds after which a bundle is sent incomplete, so that receivers do not wait for slow reading."""


class DataLoaderDispatcher(PreparedLoader):
    """Loader whose data rank 0 reads and sends to the other ranks; see `prepare_data_loader(dispatch_batches=True)`.

    Batches must be picklable. What rank 0 raises while it reads, packs or runs `slice_fn` is raised on every rank.
    `slice_fn(batch, slice, process_index=, num_processes=)` cuts the part of a rank out of the concatenated batches of
    all ranks.
    """

    @classmethod
    def of(cls, parts: LoaderParts, slice_fn: Callable[..., Any] | None = None) -> DataLoaderDispatcher:
        """Return a dispatcher made of `parts`, whose requests are those of all ranks."""
        made = cls.__new__(cls)
        made._setup(parts)
        made.slice_fn = slice_fn
        made._group, made._lanes, made._inbound = None, {}, None
        return made

    slice_fn: Callable[..., Any] | None
    _group: Any
    _lanes: dict[int, SendChannel]
    _inbound: RecvChannel | None

    def __getstate__(self) -> dict[str, Any]:  # for copies, and for a process that replaces a dead rank
        return {**self.__dict__, "_lanes": {}, "_inbound": None}

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """The `BatchSamplerShard`, None for an iterable dataset."""
        shard = self.parts.tickets.shard
        return shard if isinstance(shard, BatchSamplerShard) else None

    def _arrivals(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        if self._group is None and consistency.control_device().type != "cpu":
            self._group = dist.new_group(backend="gloo")
        rank, deal = self._deal()
        if rank:
            self._inbound = self._inbound or RecvChannel(self._group)
            return self._receive(self._inbound)
        self._lanes = self._lanes or {receiver: SendChannel(receiver, self._group) for receiver in range(1, len(deal))}
        return self._send(self._lanes, deal)

    def _deal(self) -> tuple[int, tuple[int, ...]]:
        """Return this rank, and the data-parallel part of every rank.

        Ranks of one tensor-parallel group have the same part.
        """
        if self.parts.deal is None:
            return self.parts.process_index, tuple(range(self.parts.num_processes))
        return dist.get_rank(), self.parts.deal

    def _receive(self, lane: RecvChannel) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        lane.begin()
        while True:
            arrived, failure, ended = lane.receive()
            for fetched in arrived:
                yield fetched.batch, fetched.share, fetched.last
            if failure is not None:
                failure.throw()
            if ended:
                return

    def _send(
        self, lanes: dict[int, SendChannel], deal: tuple[int, ...]
    ) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        # Pipeline: while the current bundle is being sent, the next one is read and its large buffers are copied to
        # shared memory. Rank 0 yields its own batches of a bundle only after all sends have completed, so that the
        # buffers of the bundle can be reused, and raises an error after all batches read before it.
        reading = _Reading(self.parts, self.slice_fn, deal, lanes)
        first = reading.next_bundle()
        for wait in [lane.begin() for lane in lanes.values()]:
            wait()
        for rank, lane in lanes.items():
            lane.load(first.parcels[rank])
        current: _Bundle | None = first
        while current is not None:
            posted = []
            for rank, lane in lanes.items():
                posted += lane.post(current.parcels[rank])
            following = None if current.ended else reading.next_bundle()  # read during the transfer
            if following is not None:
                for rank, lane in lanes.items():
                    lane.load(following.parcels[rank])
            for request in posted:
                request.wait()
            for fetched in current.own:
                yield fetched.batch, fetched.share, fetched.last
            if current.error is not None:
                raise current.error
            current = following


class _Failure:
    """An exception of rank 0, in a form that can be sent to the other ranks."""

    def __init__(self, error: Exception) -> None:
        self.text = f"{type(error).__name__}: {error}"
        try:
            self.pickled: bytes | None = pickle.dumps(error)
            pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - the error is sent as text then
            self.pickled = None

    def throw(self) -> None:
        """Raise the original exception, or a `PeerFailed` that describes it if it cannot be pickled."""
        cause = PeerFailed(f"rank 0 raised {self.text} while it read a batch for all ranks", 0)
        if self.pickled is None:
            raise cause
        error: Exception = pickle.loads(self.pickled)
        error.add_note("Raised on rank 0, while it read a batch for all ranks")
        raise error from cause


class _Bundle:
    """Some rounds, packed: rank 0's own batches, and one frame for every other rank.

    `deal` has the data-parallel part of every rank; ranks with the same part share the packed data. `ended` is True for
    the last bundle of a pass, and after an `error`.
    """

    def __init__(
        self, rounds: list[list[FetchedBatch]], deal: tuple[int, ...], error: Exception | None, ended: bool
    ) -> None:
        self.own = [round_[deal[0]] for round_ in rounds if not round_[deal[0]].absent]
        self.error = error
        self.ended = ended or error is not None
        failure = None if error is None else _Failure(error)
        self.parcels: dict[int, BatchFrame] = {}
        packed: dict[int, BatchFrame] = {}
        for rank, part in enumerate(deal[1:], 1):
            if part in packed:
                self.parcels[rank] = packed[part].again()
                continue
            batches = [round_[part] for round_ in rounds if not round_[part].absent]
            self.parcels[rank] = packed[part] = pack((batches, failure, self.ended))


class _Reading:
    """Read and bundle the rounds of a pass, on rank 0."""

    def __init__(
        self,
        parts: LoaderParts,
        slice_fn: Callable[..., Any] | None,
        deal: tuple[int, ...],
        lanes: dict[int, SendChannel],
    ) -> None:
        self._parts = parts
        self._deal = deal
        self._lanes = lanes
        in_process = type(parts.inner) is DataLoader and not parts.inner.num_workers and slice_fn is None
        self._collate = placing(parts.fetch) if in_process else None
        self._rooms = {deal[rank]: lane.room for rank, lane in lanes.items() if deal.count(deal[rank]) == 1}
        self._slice_fn = slice_fn
        self._batches = iterate_local(parts)
        self._first: list[FetchedBatch] = []
        self._ended = False
        self._rounds = 1

    def next_bundle(self) -> _Bundle:
        """Read the next bundle: one round, or several if they are small and quickly read, to save messages.

        The number of rounds adapts to the size of the previous bundle.
        """
        rounds: list[list[FetchedBatch]] = []
        error: Exception | None = None
        began = time.perf_counter()
        for lane in self._lanes.values():
            lane.begin_parcel()
        while not (self._ended or error):
            try:
                arrived = self._read()
                rounds.append(self._cut(arrived) if self._slice_fn else arrived)
            except Exception as raised:  # noqa: BLE001 - raised on every rank, including this one
                error = raised
            if len(rounds) >= self._rounds or time.perf_counter() - began > _PATIENCE:
                break
        bundle = self._packed(rounds, error)
        if rounds:
            size = max(parcel.nbytes for parcel in bundle.parcels.values())
            self._rounds = min(_MOST_ROUNDS, max(1, _MOST_BYTES * len(rounds) // size))
        return bundle

    def _packed(self, rounds: list[list[FetchedBatch]], error: Exception | None) -> _Bundle:
        """Pack `rounds` up to the first one with a batch that cannot be packed; that one's error ends the bundle."""
        try:
            return _Bundle(rounds, self._deal, error, self._ended)
        except Exception as raised:  # noqa: BLE001 - raised on every rank, including this one
            if len(rounds) < 2:
                return _Bundle([], self._deal, raised, True)
        good: list[list[FetchedBatch]] = []
        for round_ in rounds:
            alone = self._packed([round_], None)
            if alone.error is not None:
                return _Bundle(good, self._deal, alone.error, True)
            good.append(round_)
        return _Bundle(good, self._deal, error, self._ended)

    def _read(self) -> list[FetchedBatch]:
        ranks = self._parts.num_processes
        arrived: list[FetchedBatch] = []
        while len(arrived) < ranks and not self._ended:
            if self._collate is not None:
                self._collate.room = self._rooms.get(len(arrived))
            try:
                batch, share, last = next(self._batches)
            except StopIteration:
                self._ended = True
                break
            finally:
                if self._collate is not None:
                    self._collate.room = None
            arrived.append(batch if type(batch) is FetchedBatch else FetchedBatch(batch, share, last))
        if self._parts.custom_iter:
            return self._filled(arrived)
        arrived += [NOTHING] * (ranks - len(arrived))
        self._ended = self._ended or all(fetched.absent for fetched in arrived)
        return arrived

    def _filled(self, arrived: list[FetchedBatch]) -> list[FetchedBatch]:
        """Complete a round in which a user-defined `__iter__` has ended.

        Whole batches are repeated with `even_batches`; otherwise the last ranks have no batch.
        """
        ranks = self._parts.num_processes
        self._first = self._first or arrived
        if not arrived:
            return [NOTHING] * ranks
        missing = ranks - len(arrived)
        last = missing > 0 or arrived[-1].last
        if not missing:
            return [fetched._replace(last=last) for fetched in arrived]
        even = self._parts.tickets.shard.even_batches
        present = tuple(range(ranks if even else len(arrived)))
        share = RoundPadding((WHOLE,) * len(arrived) + (0,) * missing, WHOLE, present)
        fill = self._first if even else [NOTHING]
        repeated = [fill[number % len(fill)] for number in range(missing)]
        return [
            fetched if fetched.absent else fetched._replace(share=share, last=True) for fetched in (*arrived, *repeated)
        ]

    def _cut(self, arrived: list[FetchedBatch]) -> list[FetchedBatch]:
        """Replace the batches by what `slice_fn` cuts out of all of them, concatenated."""
        assert self._slice_fn is not None
        present = [fetched for fetched in arrived if not fetched.absent]
        if not present:
            return arrived
        whole, at, cut = concatenate([fetched.batch for fetched in present]), 0, []
        for rank, fetched in enumerate(present):
            end = at + find_batch_size(fetched.batch)
            batch = self._slice_fn(
                copy.copy(whole), slice(at, end), process_index=rank, num_processes=self._parts.num_processes
            )
            cut.append(fetched._replace(batch=batch))
            at = end
        return cut + arrived[len(present) :]


_TAG = 7411  # keeps these messages apart from others between the same ranks
_KEY = 16
_NOWHERE = bytes(_KEY)


class SendChannel:
    """Rank 0's end of the connection to one other rank."""

    def __init__(self, rank: int, group: Any) -> None:  # noqa: ANN401 - a process group
        self._rank, self._group = rank, group
        self._capacity = FIRST_CAPACITY
        self._slots: SlotRing | None = None
        self._shares_host = False

    def begin(self) -> Callable[[], None]:
        """Start a pass; return a function that waits until the receiver has started it too."""
        greeting = torch.empty(2 * _KEY, dtype=torch.uint8)
        work = dist.irecv(greeting, src=self._rank, group=self._group, tag=_TAG)
        self._capacity = FIRST_CAPACITY
        return partial(self._greeted, work, greeting)

    def _greeted(self, work: Any, told: torch.Tensor) -> None:  # noqa: ANN401 - c10d's
        work.wait()
        greeting = told.numpy().tobytes()
        key, token = greeting[:_KEY], greeting[_KEY:]
        self._shares_host = key == host_key() != _NOWHERE
        if self._slots is not None and self._slots.offer.token == token:
            self._slots.all_free()
        else:
            self._slots = None

    def begin_parcel(self) -> None:
        """Start a new frame: memory reserved with `room` so far is not part of it."""
        if self._slots is not None:
            self._slots.begin()

    def room(self, size: int) -> torch.Tensor | None:
        """Return shared memory for a large tensor that only this rank receives, None if there is none."""
        return None if self._slots is None else self._slots.room(size)

    def load(self, parcel: BatchFrame) -> None:
        """Copy the large buffers of `parcel` into shared memory if possible, so that they need not be kept.

        The first large frame creates the memory and offers it to the receiver. It is used once the receiver has opened
        it, and given up if the receiver does not open it within some frames (for example from another container).
        """
        needed = sum(buffer.numel() for buffer in parcel.large)
        if not needed or not self._shares_host or needed > MOST_BYTES:
            return
        if self._slots is None or needed > self._slots.capacity:
            try:
                self._slots = SlotRing(needed)
            except OSError:  # no memfd, or out of memory
                self._shares_host = False
                return
            parcel.say(None, self._slots.offer)
        elif self._slots.opened():
            slot = self._slots.fill(parcel.large)
            if slot is None:
                parcel.large = self._slots.outside(parcel.large)
            else:
                parcel.say(slot)
        elif self._slots.hopeless():
            self._shares_host, self._slots = False, None

    def post(self, parcel: BatchFrame) -> list[Any]:
        """Start to send a frame; return the requests to wait for."""
        send = partial(dist.isend, dst=self._rank, group=self._group, tag=_TAG)
        posted, self._capacity = parcel.post(send, self._capacity)
        return posted


class RecvChannel:
    """End of the connection to rank 0 on another rank."""

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - a process group
        self._group = group
        self._unpacking = FrameReader()
        self._capacity = FIRST_CAPACITY

    def begin(self) -> None:
        """Start a pass: send the greeting, and wait until rank 0 has started the pass too."""
        token = (self._unpacking.opened or NO_OFFER).token
        greeting = torch.frombuffer(bytearray(host_key() + token), dtype=torch.uint8)
        dist.send(greeting, dst=0, group=self._group, tag=_TAG)
        self._capacity = FIRST_CAPACITY

    def receive(self) -> Any:  # noqa: ANN401 - what was packed
        """Receive the next frame and return its content."""
        take = partial(dist.recv, src=0, group=self._group, tag=_TAG)
        content, self._capacity = self._unpacking.unpack(take, self._capacity)
        return content


Room = Callable[[int], torch.Tensor | None]
"""Function that returns memory of the given number of bytes, or None to let torch allocate."""


class Collate:
    """`default_collate`, with large tensors stacked in memory from `room` while that is set."""

    def __init__(self) -> None:
        self.room: Room | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"room": None}  # the memory belongs to this process

    def __call__(self, batch: Any) -> Any:  # noqa: ANN401 - any items
        """Collate a list of samples."""
        kinds = default_collate_fn_map
        if self.room is None or kinds.get(torch.Tensor) is not collate_tensor_fn or get_worker_info() is not None:
            return default_collate(batch)
        return collate(batch, collate_fn_map={**kinds, torch.Tensor: self._stack})

    def _stack(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:  # noqa: ANN401
        first = tensors[0]
        size = first.nbytes * len(tensors)
        if size >= LARGE and self.room is not None and all(_is_like(tensor, first) for tensor in tensors):
            memory = self.room(size)
            if memory is not None:
                out = memory.view(first.dtype).view(len(tensors), *first.shape)
                return torch.stack(list(tensors), 0, out=out)
        stacked: torch.Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return stacked


def _is_like(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Return True if both tensors are plain: dense, on the CPU, without gradients, and of the same dtype and shape."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.dtype is first.dtype
        and tensor.shape == first.shape
    )


def placing(fetch: Any) -> Collate | None:  # noqa: ANN401 - what reads a batch
    """Make `fetch` collate with `Collate` if it uses torch's `default_collate`; return it, or None."""
    if fetch._collate is default_collate:
        fetch._collate = Collate()
    return fetch._collate if type(fetch._collate) is Collate else None
