"""Which rank gets which samples: samplers cut into one part per rank.

Owns: the deal of batches and of streams, the padding, what was real in the last round. Refuses: reading any data,
processes, devices.

A *round* is what all ranks consume together: one batch each. A deal is the same on every rank, because every rank
runs the whole sampler and keeps its own part; so each rank also knows what the others have, without asking them.
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
"""In a `RoundPadding`: all rows of that rank's batch, however many they are."""


@dataclass(frozen=True, slots=True)
class RoundPadding:
    """What is real in a round that is not the same for all ranks.

    `real[r]` is how many rows of rank r's batch are samples of the dataset, not repetitions (`WHOLE`: all of them).
    `rows` is the number of rows of the largest batch of the round (`WHOLE`: not known). `ranks` have a batch at all.
    """

    real: tuple[int, ...]
    rows: int
    ranks: tuple[int, ...]


class Round(NamedTuple):
    """One round: `parts[r]` are rank r's items, None where it has no batch; `last[r]`: none follows for rank r.

    `share` is None where every rank has the same number of samples, all of them real.
    """

    number: int
    parts: Sequence[Sequence[Any] | None]
    share: RoundPadding | None
    last: Sequence[bool]


Dealt = tuple[int, list[Sequence[Any] | None], RoundPadding | None]
"""A round's number, its parts, and what is real in it where that is not all: what `with_last` makes a `Round` of."""


def per_rank_batch_size(batch_size: int, num_processes: int, split_batches: bool) -> int:
    """The rows of one rank's batch. Raises `BadRequest`, a ValueError, where a batch cannot be split evenly."""
    if not split_batches:
        return batch_size
    if batch_size % num_processes:
        raise BadRequest(
            f"split_batches cuts each batch into one part per rank: "
            f"batch size ({batch_size}) % ranks ({num_processes}) = {batch_size % num_processes}, not 0"
        )
    return batch_size // num_processes


def split_samples(  # one chunk of samples into the parts of one round
    chunk: Sequence[T], initial: Sequence[T], rows: int, num_processes: int, even: bool
) -> tuple[list[Sequence[T] | None], RoundPadding | None]:
    """Cut `chunk` into a part of `rows` samples for each rank.

    A chunk that is too short is filled up from `initial`, as often as it takes, if `even`; if not, the last ranks
    get a shorter part or None.
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
    """Look one round ahead, so that each rank's last batch is known as such when it is dealt."""
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

    Batches are dealt in turn: batch k belongs to rank k % num_processes. With `split_batches` each batch is cut into
    one part per rank instead. With `even_batches` every rank gets the same number of batches of the same size: what is
    missing at the end is taken from the beginning. A sampler whose `drop_last` is set drops an incomplete round.
    The lists of `batch_sampler` are never written to.

    Raises `BadRequest` (a ValueError) if a batch cannot be split evenly.
    """

    def __init__(
        self,
        batch_sampler: Any,  # noqa: ANN401 - whatever iterates over lists of indices
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
    def sampler(self) -> Any:  # noqa: ANN401 - as torch's BatchSampler has it
        """The sampler below the batches, None where there is none."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # noqa: ANN401
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler below which epoch comes next."""
        set_epoch_recursive(self.batch_sampler, epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for each in self.rounds():
            part = each.parts[self.process_index]
            if part is not None:
                yield part  # type: ignore[misc]

    def rounds(self, skip: int = 0) -> Iterator[Round]:
        """All ranks' batches, round by round, from round `skip` on."""
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
        # Batches of many sizes: a whole batch is repeated, for there is no size to fill them up to.
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
        """The batches from number `skip` on, the first `keep` of all (empty if nothing is skipped), and the number."""
        below = self.batch_sampler
        if type(below) is BatchSampler:  # its batches are runs of indices: those are skipped without being built
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
        """The number of the sampler's own batches."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """The number of batches of this rank, as `__iter__` yields them. Raises TypeError if there is no telling."""
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
        """The length of the sampler's last batch; a full one where there is no telling without running it."""
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
    """Call `set_epoch` of a sampler and of the samplers below it, where they have one."""
    for each in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
        if callable(set_epoch := getattr(each, "set_epoch", None)):
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
        """Tell the sampler below which epoch comes next."""
        set_epoch_recursive(self.batch_sampler, epoch)

    @property
    def total_length(self) -> int:
        """The number of batches with those that are skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SeedableRandomSampler(Sampler[int]):
    """A shuffle that depends on (seed, epoch) alone: the same on every rank, on every run, and after a resume.

    `set_epoch` chooses the epoch; without it each pass is the epoch after the one before. Without a `data_seed` it is
    torch's seed, and in a prepared loader the loader's.
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
        """The epoch of the next pass."""
        self.epoch = epoch


class IterableDatasetShard(IterableDataset[Any]):
    """Rank `process_index`'s samples of an iterable dataset, and inside a loader's worker that worker's.

    The stream is dealt in runs of `batch_size` samples, one per rank; `split_batches` makes `batch_size` that of all
    ranks together. What is missing in the last round is taken from the beginning, unless `drop_last`, or unless
    `even_batches` is False. The loader's workers take rounds in turn, as torch asks them for batches in turn, so that
    the samples come in the same order with any number of workers.
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
        """Tell the dataset which epoch comes next, if it has a `set_epoch`."""
        set_epoch_recursive(self.dataset, epoch)

    def rounds(self, stream: Iterator[Any]) -> Iterator[Round]:
        """All ranks' samples of `stream`, round by round."""
        return mark_last(self.dealt(stream))

    def dealt(self, stream: Iterator[Any], first: int = 0, initial: Sequence[Any] = ()) -> Iterator[Dealt]:
        """As `rounds`, with no look ahead. `stream` begins with round `first`; `initial` are the samples of round 0."""
        total = self.rows * self.num_processes
        each = map(next, repeat(stream))  # `islice` would ask a stream that is its own dataset for an iterator again
        for number in count(first):
            chunk = list(islice(each, total))
            if not chunk:
                return
            initial = initial or chunk
            if len(chunk) == total or not self.drop_last:
                yield number, *split_samples(chunk, initial, self.rows, self.num_processes, self.even_batches)

    def first_samples(self, stream: Iterator[Any]) -> list[Any]:
        """What `dealt` takes as `initial`."""
        return list(islice(map(next, repeat(stream)), self.rows * self.num_processes))

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for each in self.rounds(iter(self.dataset)):
            if each.number % workers == turn:
                yield from each.parts[self.process_index] or ()

    def __len__(self) -> int:
        """The number of this rank's samples. Raises TypeError if the dataset has no length."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        whole, more = divmod(samples, self.rows * self.num_processes)
        if not more or self.drop_last:
            return whole * self.rows
        if self.even_batches:
            return (whole + 1) * self.rows
        return whole * self.rows + min(self.rows, max(0, more - self.process_index * self.rows))
