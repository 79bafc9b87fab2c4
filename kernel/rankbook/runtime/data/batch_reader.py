"""Reading of single batches, in a DataLoader worker or in the rank's own process.

A prepared loader gives torch's DataLoader a sampler of `BatchRequest`s instead of lists of indices, and a reader
dataset that accepts them (`MapReader`, `IterableReader`). A request identifies the batch completely (seed, epoch,
round, rank), so the batch does not depend on which worker reads it, or on how long that worker has lived.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from rankbook.runtime.data.rng import BatchRng
from rankbook.runtime.data.samplers import (
    WHOLE,
    Dealt,
    EarlierDeal,
    IterableDatasetShard,
    Round,
    RoundPadding,
    mark_last,
)


class BatchRequest(NamedTuple):
    """A request to read one batch.

    `items` are the indices of its samples, None for an iterable dataset. `number` counts the batches of all ranks in
    the epoch. `earlier` are the deals of the epoch to other numbers of ranks, of an iterable dataset.
    """

    # `run` is the number of the pass in this process. A persistent worker tells a new pass from the current one by it.
    run: int
    seed: int
    epoch: int
    round: int
    rank: int
    number: int
    items: Any
    share: RoundPadding | None
    last: bool
    earlier: tuple[EarlierDeal, ...] = ()


class FetchedBatch(NamedTuple):
    """A batch with metadata. Batches without metadata are passed as they are, to save the overhead."""

    batch: Any
    share: RoundPadding | None
    last: bool
    # Both fields are needed: a rank may have no batch in this round although the stream goes on for others.
    absent: bool = False  # the stream has ended, or this rank has no batch in this round

    def pin_memory(self) -> FetchedBatch:
        """Pin the batch. Called by torch's pin-memory thread."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return self._replace(batch=pin_memory(self.batch))


NOTHING = FetchedBatch(None, None, True, True)


def identity(batch: Any) -> Any:  # noqa: ANN401 - any batch
    """Return `batch`: the collate function of a loader whose dataset returns whole batches."""
    return batch


class MapReader(Dataset[Any]):
    """Map-style dataset that reads and collates whole batches of `dataset` for `BatchRequest`s.

    Other attributes are those of `dataset`.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        collate: Callable[[Any], Any],
        single: bool = False,
        lists: bool = False,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._single = single
        self._lists = lists  # of indices, which the dataset takes as one index
        self._rng = BatchRng(dataset, collate)
        self._run = -1

    # `dataset` and `_rng` are not set yet while the object is unpickled in a worker. Looking them up here would
    # recurse.
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the dataset's
        if name.startswith("__") or name in {"dataset", "_rng"}:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a request from the loader, an index from other callers
        return self.__getitems__(index) if type(index) is BatchRequest else self.dataset[index]

    # torch's fetcher calls `__getitems__` with what the batch sampler yields, which is a request here instead of a
    # list.
    def __getitems__(self, request: BatchRequest) -> Any:  # noqa: ANN401 - a batch
        if request.items is None:
            return NOTHING
        # A persistent worker has its own copy of the dataset, which is told the epoch here.
        if request.run != self._run:
            self._run = request.run
            if get_worker_info() is not None and callable(tell := getattr(self.dataset, "set_epoch", None)):
                tell(request.epoch)
        # `number` counts the batches of all ranks. So it is the same batch, drawn with the same numbers, on any rank
        # and worker.
        batch = self._rng.read(self._read, request.items, request.seed, request.epoch, request.number)
        return FetchedBatch(batch, request.share, request.last) if request.last or request.share else batch

    def _read(self, items: Any) -> Any:  # noqa: ANN401
        dataset = self.dataset
        # A loader without batching: the request has one index, and the item is what the user's collate function
        # converts.
        if self._single:
            return self._collate(dataset[items if self._lists else items[0]])
        # The same preference as in torch's own fetcher.
        if getattr(dataset, "__getitems__", None):
            return self._collate(dataset.__getitems__(items))
        return self._collate([dataset[index] for index in items])


class IterableReader(Dataset[Any]):
    """Iterable dataset, wrapped as a map-style one that reads and collates whole batches for `BatchRequest`s.

    Every reading process iterates over the whole stream, with random generators seeded from (seed, epoch, round) alone,
    and keeps the part that it was asked for. So all processes see the same stream, and every sample is used once. To a
    dataset that calls `get_worker_info`, the worker appears as the only one.
    """

    def __init__(
        self, dataset: Iterable[Any], shard: IterableDatasetShard, collate: Callable[[Any], Any], single: bool = False
    ) -> None:
        self.dataset: Any = dataset
        self._shard = shard
        self._collate = collate
        self._single = single
        self._rng = BatchRng(dataset)
        self._collate_rng = BatchRng(collate)
        self._run = -1
        self._rounds: Iterator[Round] = iter(())
        self._current: Round | None = None
        self._round_number = -1

    def __getstate__(self) -> dict[str, Any]:
        # An iterator can be neither pickled nor shared. The receiving process opens the stream itself, in its first
        # request.
        return {**self.__dict__, "_run": -1, "_rounds": None, "_current": None, "_round_number": -1}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the dataset's
        if name.startswith("__") or name in {"dataset", "_rng"}:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, request: BatchRequest) -> Any:  # noqa: ANN401 - a batch
        return self.__getitems__(request)

    def __getitems__(self, request: BatchRequest) -> Any:  # noqa: ANN401 - a batch
        patch_worker_info()
        current = self._advance(request)
        # With the dispatcher, this process gets one request per rank for every round, and reads the round once.
        part = current.parts[request.rank] if current else None
        if current is None or part is None:
            return NOTHING
        # The samples were drawn by the stream; only the collate function draws per batch.
        with self._collate_rng.seeded(request.seed, request.epoch, "collate", request.number):
            batch = self._collate(part[0] if self._single else list(part))
        share = whole_batch_padding(current.share) if self._single else current.share
        last = current.last[request.rank]
        return FetchedBatch(batch, share, last) if last or share else batch

    def _advance(self, request: BatchRequest) -> Round | None:
        """Read up to the round of the request. Return None if the stream ends before."""
        # A new pass, or a request for an earlier round: the stream starts again.
        if request.run != self._run or request.round < self._round_number:
            self._run, self._round_number, self._current = request.run, -1, None
            if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(request.epoch)  # the copy in a persistent worker has no other way to learn it
            self._restart(request)
        # Rounds of other workers, and rounds that the pass skips, are read and dropped. A stream cannot be entered in
        # the middle.
        while self._round_number < request.round:
            self._current = next(self._rounds, None)
            self._round_number += 1
        return self._current

    def _restart(self, request: BatchRequest) -> None:
        self._rounds = mark_last(self._rounds_of(request, self._open(request)))

    def _rounds_of(self, request: BatchRequest, stream: Iterator[Any]) -> Iterator[Dealt]:
        """Yield the rounds of a stream that starts with the epoch, after those of the request's earlier deals.

        The earlier rounds are read as they were then, so that a stream that draws random numbers is the same.
        """
        done, samples = 0, map(next, repeat(stream))
        for deal in request.earlier:
            # Samples of one round of that deal. Only their number is of interest, so they are discarded as they come.
            rows = deal.samples // deal.rounds
            for number in range(done, done + deal.rounds):
                with self._rng.seeded(request.seed, request.epoch, "round", number):
                    next(islice(samples, rows, rows), None)
            done += deal.batches
        return self._seed_rounds(request, self._shard.dealt(stream, is_rest=bool(request.earlier)), done)

    def _seed_rounds(self, request: BatchRequest, rounds: Iterator[Dealt], first: int = 0) -> Iterator[Dealt]:
        """Yield `rounds`, reading every round with generators seeded for it; the seeds are numbered from `first`."""
        return self._rng.iterate(rounds, request.seed, request.epoch, "round", first=first)

    def _open(self, request: BatchRequest) -> Any:  # noqa: ANN401 - an iterator, possibly with other methods
        with self._rng.seeded(request.seed, request.epoch, "start"):
            return iter(self.dataset)


def whole_batch_padding(share: RoundPadding | None) -> RoundPadding | None:
    """Return the share of a round whose items are whole batches already, with unknown numbers of rows."""
    if share is None:
        return None
    return RoundPadding(tuple(WHOLE if count else 0 for count in share.real), WHOLE, share.ranks)


def patch_worker_info() -> None:
    """Make `get_worker_info` report a single worker in this worker process; do nothing outside a worker."""
    worker: Any = get_worker_info()
    # A dataset that shards itself by `get_worker_info` would yield only a part of the stream, and the rest would be
    # lost: all workers see the whole stream here.
    if worker is not None and worker.num_workers != 1:
        alone = copy.copy(worker)
        for name, value in (("id", 0), ("num_workers", 1)):
            object.__setattr__(alone, name, value)  # torch's `__setattr__` refuses changes
        torch.utils.data._utils.worker._worker_info = alone


class WorkerInit:
    """Initialization of a worker: calls the user's `worker_init_fn` with the original dataset in the worker info."""

    def __init__(self, dataset: Any, function: Callable[[int], None], iterable: bool) -> None:  # noqa: ANN401
        self._dataset, self._function, self._iterable = dataset, function, iterable

    def __call__(self, worker: int) -> None:
        """Run the user's function for worker number `worker`, and raise what it raises."""
        worker_info: Any = get_worker_info()
        # `worker_info.dataset` is the reader, because torch knows only that one. The user's function expects the user's
        # dataset.
        fetch = worker_info.dataset
        object.__setattr__(worker_info, "dataset", fetch.dataset)
        if self._iterable:
            patch_worker_info()
        self._function(worker)
