"""Samplers that distribute batches and streams over ranks, and track which samples are real and which are repeated.

A *round* is what all ranks consume together: one batch per rank. Every rank runs the whole sampler and keeps its own
part. So the distribution is the same on all ranks, and every rank also knows the parts of the others without
communication. No data are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from rankbook.errors import BadRequest
from rankbook.runtime.data.rng import stream_seed

T = TypeVar("T")

WHOLE = -1
"""Value in a `RoundPadding` that stands for all rows of a rank's batch, however many there are."""


@dataclass(frozen=True, slots=True)
class RoundPadding:
    """The real (not repeated) samples of a round in which they are not the same number for all ranks.

    `real[r]` is the number of rows of rank r's batch that are not repetitions (`WHOLE`: all of them). `rows` is the
    number of rows of the largest batch of the round (`WHOLE`: unknown). `ranks` are those that have a batch.
    """

    real: tuple[int, ...]
    rows: int
    ranks: tuple[int, ...]


class Round(NamedTuple):
    """One round.

    `parts[r]` are rank r's items, None if it has no batch; `last[r]` is True if rank r's batch is its last.

    `share` is None if all ranks have the same number of samples, all of them real.
    """

    number: int
    parts: Sequence[Sequence[Any] | None]
    share: RoundPadding | None
    last: Sequence[bool]


Dealt = tuple[int, list[Sequence[Any] | None], RoundPadding | None]
"""Number, parts and padding of a round, before `mark_last` makes a `Round` of it."""


def per_rank_batch_size(batch_size: int, num_processes: int, split_batches: bool) -> int:
    """Return the rows of one rank's batch. Raises `BadRequest` (a ValueError) if a batch cannot be split evenly."""
    if not split_batches:
        return batch_size
    if batch_size % num_processes:
        raise BadRequest(
            f"split_batches cuts each batch into one part per rank: "
            f"batch size ({batch_size}) % ranks ({num_processes}) = {batch_size % num_processes}, not 0"
        )
    return batch_size // num_processes


def split_samples(  # the samples of one round
    chunk: Sequence[T], initial: Sequence[T], rows: int, num_processes: int, even: bool
) -> tuple[list[Sequence[T] | None], RoundPadding | None]:
    """Cut `chunk` into a part of `rows` samples per rank.

    If `even`, a short chunk is filled up from `initial`, repeated as often as needed; otherwise the last ranks get a
    shorter part or None.
    """
    missing = rows * num_processes - len(chunk)
    cuts = [slice(rank * rows, (rank + 1) * rows) for rank in range(num_processes)]
    if missing <= 0:
        return [chunk[cut] for cut in cuts], None
    real = tuple(min(rows, max(0, len(chunk) - rank * rows)) for rank in range(num_processes))
    if even:
        padded = [*chunk, *islice(cycle(initial), missing)]
        return [padded[cut] for cut in cuts], RoundPadding(real, rows, tuple(range(num_processes)))
    parts = [chunk[cut] or None for cut in cuts]
    return parts, RoundPadding(real, max(real), tuple(rank for rank, count in enumerate(real) if count))


def mark_last(rounds: Iterator[tuple[int, list[Sequence[T] | None], RoundPadding | None]]) -> Iterator[Round]:
    """Yield rounds with the last batch of every rank marked, by looking one round ahead."""
    current = next(rounds, None)
    while current is not None:
        following = next(rounds, None)
        if following is None:
            last = [True] * len(current[1])
        else:
            last = [part is None for part in following[1]] if following[2] else [False] * len(following[1])
        yield Round(*current, last)
        current = following


class BatchSamplerShard(BatchSampler):
    """Rank `process_index`'s part of `batch_sampler`.

    Batches are assigned in turn: batch k belongs to rank k % num_processes. With `split_batches` every batch is cut
    into one part per rank instead. With `even_batches` all ranks get the same number of batches of the same size; what
    is missing at the end is taken from the beginning. A sampler with `drop_last` drops an incomplete round. The lists
    of `batch_sampler` are never modified.

    Raises `BadRequest` (a ValueError) if a batch cannot be split evenly.
    """

    def __init__(
        self,
        batch_sampler: Any,  # noqa: ANN401 - any iterable of lists of indices
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if split_batches:
            if self.batch_size is None:
                raise BadRequest(
                    f"split_batches needs to know the size of a batch; {type(batch_sampler).__name__} has no batch_size"
                )
            per_rank_batch_size(self.batch_size, num_processes, split_batches)

    @property
    def sampler(self) -> Any:  # noqa: ANN401 - as in torch's BatchSampler
        """The sampler of `batch_sampler`, None if it has none."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # noqa: ANN401
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the underlying samplers."""
        set_epoch_recursive(self.batch_sampler, epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for round_ in self.rounds():
            part = round_.parts[self.process_index]
            if part is not None:
                yield part  # type: ignore[misc]

    def rounds(self, skip: int = 0) -> Iterator[Round]:
        """Yield the batches of all ranks, round by round, starting with round `skip`."""
        return mark_last(self._split_rounds(skip) if self.split_batches else self._dealt_rounds(skip))

    def _dealt_rounds(self, skip: int) -> Iterator[tuple[int, list[Any], RoundPadding | None]]:
        ranks, size = self.num_processes, self.batch_size
        batches, first, number = self._batches_from(skip * ranks, ranks)
        number //= ranks
        while batch_list := list(islice(batches, ranks)):
            first = first or batch_list
            lengths = [len(batch) for batch in batch_list]
            if len(batch_list) == ranks and lengths.count(lengths[0] if size is None else size) == ranks:
                yield number, batch_list, None
            elif len(batch_list) == ranks and self.drop_last:
                yield number, batch_list, RoundPadding(tuple(lengths), max(lengths), tuple(range(ranks)))
            elif not self.drop_last:
                yield number, *self._deal_incomplete(batch_list, lengths, first)
            number += 1

    def _deal_incomplete(
        self, batches: list[Any], lengths: list[int], first: list[Any]
    ) -> tuple[list[Any], RoundPadding]:
        ranks, size = self.num_processes, self.batch_size
        everybody = tuple(range(ranks))
        if not self.even_batches:
            absent = ranks - len(batches)
            share = RoundPadding((*lengths, *[0] * absent), max(lengths), everybody[: len(batches)])
            return [*batches, *[None] * absent], share
        if size is not None and all(length == size for length in lengths[:-1]) and lengths[-1] <= size:
            parts, share_ = split_samples(list(chain(*batches)), list(chain(*first)), size, ranks, True)
            return list(parts), share_ or RoundPadding((size,) * ranks, size, everybody)
        # Batch sizes differ, so there is no size to fill up to: repeat whole batches.
        repeated = list(islice(cycle(first), ranks - len(batches)))
        rows = max([*lengths, *map(len, repeated)])
        return [*batches, *repeated], RoundPadding((*lengths, *[0] * len(repeated)), rows, everybody)

    def _split_rounds(self, skip: int) -> Iterator[tuple[int, list[Any], RoundPadding | None]]:
        assert self.batch_size is not None
        rows = per_rank_batch_size(self.batch_size, self.num_processes, True)
        batches, first, number = self._batches_from(skip, 1)
        for batch in batches:
            first = first or [batch]
            whole = len(batch) == self.batch_size
            parts, share = split_samples(batch, first[0], rows, self.num_processes, self.even_batches)
            if whole or not self.drop_last:
                yield number, parts, share
            number += 1

    def _batches_from(self, skip: int, keep: int) -> tuple[Iterator[Any], list[Any], int]:
        """Return the batches from number `skip` on, the first `keep` batches of all, and the number.

        Nothing is kept if nothing is skipped.
        """
        below = self.batch_sampler
        if type(below) is BatchSampler:  # batches are runs of indices: skip these without building lists
            indices = iter(below.sampler)
            size = below.batch_size
            if not skip:
                return _runs(indices, size, below.drop_last), [], 0
            first = [run for _ in range(keep) if (run := list(islice(indices, size)))]
            next(islice(indices, (skip - keep) * size, (skip - keep) * size), None)
            return _runs(indices, size, below.drop_last), first, skip
        batches = iter(below)
        if not skip:
            return batches, [], 0
        first = list(islice(batches, keep))
        next(islice(batches, skip - keep, skip - keep), None)
        return batches, first, skip

    @property
    def total_length(self) -> int:
        """Number of batches of `batch_sampler`."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Return the number of this rank's batches. Raises TypeError if `batch_sampler` has no length."""
        batches = len(self.batch_sampler)
        if self.split_batches:
            short = self._last_batch_length(batches)
            rows = per_rank_batch_size(self.batch_size or 0, self.num_processes, True)
            if short == self.batch_size or not batches:
                return batches
            if self.drop_last:
                return batches - 1
            return batches if self.even_batches or short > self.process_index * rows else batches - 1
        whole, more = divmod(batches, self.num_processes)
        if not more or self.drop_last:
            return whole
        return whole + 1 if self.even_batches else whole + (self.process_index < more)

    def _last_batch_length(self, batches: int) -> int:
        """Return the length of the sampler's last batch; a full one if it is unknown without a run of the sampler."""
        size = self.batch_size or 0
        if isinstance(self.batch_sampler, Sequence) and batches:
            return len(self.batch_sampler[-1])
        if type(self.batch_sampler) is BatchSampler and isinstance(self.sampler, Sized) and not self.drop_last:
            return (len(self.sampler) - 1) % size + 1 if batches else 0
        return size


def _runs(indices: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while run := list(islice(indices, size)):
        if len(run) == size or not drop_last:
            yield run


def set_epoch_recursive(sampler: Any, epoch: int) -> None:  # noqa: ANN401 - any sampler
    """Call `set_epoch` on a sampler and on the samplers that it wraps, if they have one."""
    for layer in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
        if callable(set_epoch := getattr(layer, "set_epoch", None)):
            set_epoch(epoch)


class SkipBatchSampler(BatchSampler):
    """`batch_sampler` without its first `skip_batches` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:  # noqa: ANN401 - any batch sampler
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batch_sampler, self.skip_batches, None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the underlying samplers."""
        set_epoch_recursive(self.batch_sampler, epoch)

    @property
    def total_length(self) -> int:
        """Number of batches including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SeedableRandomSampler(Sampler[int]):
    """Random permutation that depends on (seed, epoch) alone: the same on all ranks, in every run, and after a resume.

    `set_epoch` selects the epoch; without it every pass has the epoch after the previous one. The default of
    `data_seed` is torch's initial seed, and in a prepared loader the loader's seed.
    """

    def __init__(self, data_source: Sized, data_seed: int | None = None, epoch: int = 0) -> None:
        self.data_source = data_source
        self.seed_given = data_seed is not None
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(stream_seed(self.initial_seed, self.epoch, "shuffle") >> 193)
        self.epoch += 1
        return iter(torch.randperm(len(self.data_source), generator=generator).tolist())

    def __len__(self) -> int:
        return len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


class IterableDatasetShard(IterableDataset[Any]):
    """Rank `process_index`'s samples of an iterable dataset; in a DataLoader worker, that worker's part of them.

    The stream is assigned in runs of `batch_size` samples, one per rank; with `split_batches`, `batch_size` is the
    total of all ranks. What is missing in the last round is taken from the beginning, unless `drop_last` is set or
    `even_batches` is False. Workers take rounds in turn, in the order in which torch asks them for batches, so that the
    order of samples does not depend on the number of workers.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.rows = per_rank_batch_size(batch_size, num_processes, split_batches)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it has a `set_epoch`."""
        set_epoch_recursive(self.dataset, epoch)

    def rounds(self, stream: Iterator[Any]) -> Iterator[Round]:
        """Yield the samples of all ranks from `stream`, round by round."""
        return mark_last(self.dealt(stream))

    def dealt(self, stream: Iterator[Any], first: int = 0, initial: Sequence[Any] = ()) -> Iterator[Dealt]:
        """Yield rounds without looking ahead.

        `stream` starts with round `first`; `initial` are the samples of round 0, used to fill up the last round.
        """
        total = self.rows * self.num_processes
        samples = map(next, repeat(stream))  # `islice` would call `iter` again on a stream that is its own dataset
        for number in count(first):
            chunk = list(islice(samples, total))
            if not chunk:
                return
            initial = initial or chunk
            if len(chunk) == total or not self.drop_last:
                yield number, *split_samples(chunk, initial, self.rows, self.num_processes, self.even_batches)

    def first_samples(self, stream: Iterator[Any]) -> list[Any]:
        """Return the samples of the first round, for the argument `initial` of `dealt`."""
        return list(islice(map(next, repeat(stream)), self.rows * self.num_processes))

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for round_ in self.rounds(iter(self.dataset)):
            if round_.number % workers == turn:
                yield from round_.parts[self.process_index] or ()

    def __len__(self) -> int:
        """Return the number of this rank's samples. Raises TypeError if the dataset has no length."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        whole, more = divmod(samples, self.rows * self.num_processes)
        if not more or self.drop_last:
            return whole * self.rows
        if self.even_batches:
            return (whole + 1) * self.rows
        return whole * self.rows + min(self.rows, max(0, more - self.process_index * self.rows))
