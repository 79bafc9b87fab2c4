"""Samplers that distribute batches and streams over ranks, and track which samples are real and which are repeated.

A *round* is what all ranks consume together: one batch per rank. Every rank runs the whole sampler and keeps its own
part. So the distribution is the same on all ranks, and every rank also knows the parts of the others without
communication. No data are read here.

A pass that is resumed with another number of ranks continues after the samples that all ranks have had together, which
are the first ones in the order of the epoch. What is left is dealt in new rounds. Its last rounds have smaller batches
instead of repeated samples; a sample is repeated only if fewer samples than ranks are left.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, pairwise, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from rankbook.errors import InvalidArgument
from rankbook.runtime.data.rng import BatchRng, stream_seed

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

    `share` is None if all ranks have the same number of samples, all of them real. `samples` are the places of the
    round's real samples in the order of the epoch.
    """

    number: int
    parts: Sequence[Sequence[Any] | None]
    share: RoundPadding | None
    last: Sequence[bool]
    samples: range


class Dealt(NamedTuple):
    """A round before `mark_last` makes a `Round` of it."""

    number: int
    parts: list[Sequence[Any] | None]
    share: RoundPadding | None
    samples: range


# Example: 20 samples in batches of 2. Three ranks have read 2 rounds, samples 0 to 11, and the run continues on two
# ranks. EarlierDeal(3, 6, 2, 12) is the past, and the new rounds are 12-13|14-15 and 16-17|18-19. If the second run is
# saved after one of them and continues on three ranks, EarlierDeal(2, 4, 1, 4) is added, and 16-19 are dealt as
# 16|17|18-19.
class EarlierDeal(NamedTuple):
    """Rounds of the current epoch that a run with another number of ranks has had, before the pass was resumed.

    `total_rows` is the number of samples in a full round, 0 if unknown. `samples` is the number of all its samples, -1
    if unknown.
    """

    world_size: int
    total_rows: int
    rounds: int
    samples: int

    @property
    def batches(self) -> int:
        """Number of batches of all ranks."""
        return self.world_size * self.rounds


def per_rank_batch_size(batch_size: int, num_processes: int, split_batches: bool) -> int:
    """Return the rows of one rank's batch. Raises `InvalidArgument` (a ValueError) if they cannot be equal."""
    if not split_batches:
        return batch_size
    if batch_size % num_processes:
        raise InvalidArgument(
            "split_batches requires a batch size that is a round multiple of the number of ranks: "
            f"batch size ({batch_size}) % ranks ({num_processes}) = {batch_size % num_processes}, expected 0"
        )
    return batch_size // num_processes


def split_samples(  # the samples of one round
    chunk: Sequence[T], initial: Sequence[T], rows: int, num_processes: int, even: bool
) -> tuple[list[Sequence[T] | None], RoundPadding | None]:
    """Cut `chunk` into a part of `rows` samples per rank.

    If `even`, a short chunk is filled up from `initial`, repeated as often as needed; otherwise the last ranks get a
    shorter part or None.
    """
    # Rank r has the rows [r * rows, (r + 1) * rows) of the chunk.
    missing = rows * num_processes - len(chunk)
    cuts = [slice(rank * rows, (rank + 1) * rows) for rank in range(num_processes)]
    if missing <= 0:
        return [chunk[cut] for cut in cuts], None  # the usual case, without anything to be trimmed later
    real = tuple(min(rows, max(0, len(chunk) - rank * rows)) for rank in range(num_processes))
    if even:
        # As in Accelerate: the last round is filled up with the first samples of the epoch.
        padded = [*chunk, *islice(cycle(initial), missing)]
        return [padded[cut] for cut in cuts], RoundPadding(real, rows, tuple(range(num_processes)))
    parts = [chunk[cut] if count else None for cut, count in zip(cuts, real, strict=True)]
    return parts, RoundPadding(real, max(real), tuple(rank for rank, count in enumerate(real) if count))


def divide_samples(samples: Sequence[T], ranks: int) -> tuple[list[Sequence[T] | None], RoundPadding]:
    """Cut `samples` into one part per rank, as equal as possible; repeat some only if there are fewer than ranks."""
    return _share_parts(_cut_equally(samples, ranks), ranks)


def _cut_equally(samples: Sequence[T], count: int) -> list[Sequence[T]]:
    # Cuts at the multiples of len / count, rounded down: lengths differ by at most one. Empty parts are left out.
    bounds = [number * len(samples) // count for number in range(count + 1)]
    return [samples[start:end] for start, end in pairwise(bounds) if end > start]


def _halve_parts(parts: Sequence[Sequence[T]], count: int) -> list[Sequence[T]]:
    """Cut the longest of `parts` in half until there are `count`, or nothing is left to be cut."""
    halves = list(parts)
    # Few batches and few ranks, so that the search for the longest one costs nothing.
    while len(halves) < count:
        longest = max(range(len(halves)), key=lambda number: len(halves[number]))
        part = halves[longest]
        if len(part) < 2:
            break
        middle = (len(part) + 1) // 2
        halves[longest : longest + 1] = [part[:middle], part[middle:]]
    return halves


def _share_parts(parts: Sequence[Sequence[T]], ranks: int) -> tuple[list[Sequence[T] | None], RoundPadding]:
    """Complete a round to one part per rank, by repeating parts, and return it with what is real in it."""
    lengths = [len(part) for part in parts]
    missing = ranks - len(parts)
    padding = RoundPadding((*lengths, *[0] * missing), max(lengths), tuple(range(ranks)))
    return [*parts, *islice(cycle(parts), missing)], padding


def mark_last(rounds: Iterator[Dealt]) -> Iterator[Round]:
    """Yield rounds with the last batch of every rank marked, by looking one round ahead."""
    current = next(rounds, None)
    while current is not None:
        following = next(rounds, None)
        # A rank's batch is its last if it has none in the following round. Only an incomplete round lacks batches, so
        # full rounds are not looked at.
        if following is None:
            last = [True] * len(current.parts)
        else:
            last = [part is None for part in following.parts] if following.share else [False] * len(following.parts)
        yield Round(current.number, current.parts, current.share, last, current.samples)
        current = following


class BatchSamplerShard(BatchSampler):
    """Rank `process_index`'s part of `batch_sampler`.

    Batches are assigned in turn: batch k belongs to rank k % num_processes. With `split_batches` every batch is cut
    into one part per rank instead. With `even_batches` all ranks get the same number of batches of the same size; what
    is missing at the end is taken from the beginning. A short batch before the last round stays as it is. A sampler
    with `drop_last` drops an incomplete round. The lists of `batch_sampler` are never modified.

    Raises `InvalidArgument` (a ValueError) if a batch cannot be split evenly.
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
                raise InvalidArgument(
                    f"split_batches requires the size of a batch, but {type(batch_sampler).__name__} has no batch_size"
                )
            per_rank_batch_size(self.batch_size, num_processes, split_batches)
        self._last_length: int | None = None
        # In this one case the length of a rank's pass depends on the length of the last batch, see `__len__`.
        if split_batches and not even_batches and not self.drop_last and self._known_last_length() is None:
            self._last_length = _run_for_last_length(batch_sampler)

    @property
    def sampler(self) -> Any:  # noqa: ANN401 - as in torch's BatchSampler
        """The sampler of `batch_sampler`, None if it has none."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # noqa: ANN401
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the underlying samplers."""
        set_epoch_recursive(epoch, self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for round_ in self.rounds():
            part = round_.parts[self.process_index]
            if part is not None:
                yield part  # type: ignore[misc]

    def rounds(self, skip: int = 0, earlier: Sequence[EarlierDeal] = ()) -> Iterator[Round]:
        """Yield the batches of all ranks, round by round, starting with round `skip`.

        `earlier` are the deals of the epoch before this one: rounds are made of the samples after theirs.
        """
        # The rest of an epoch is not filled up with repeated samples: its batches get smaller instead.
        if earlier and self.even_batches and not self.drop_last:
            return islice(mark_last(self._rest_rounds(earlier)), skip, None)
        return mark_last((self._split_rounds if self.split_batches else self._dealt_rounds)(skip, earlier))

    def _dealt_rounds(self, skip: int, earlier: Sequence[EarlierDeal]) -> Iterator[Dealt]:
        ranks, size = self.num_processes, self.batch_size
        batches, first, start = self._batches_from(skip * ranks, ranks, earlier)
        number = skip
        following: list[list[Any]] = []
        while batch_list := [*following, *islice(batches, ranks - len(following))]:
            following = []
            # Batches of the first round, which fill up the last one.
            first = first or batch_list
            lengths = [len(batch) for batch in batch_list]
            samples = range(start, start := start + sum(lengths))
            # The usual round: every rank has a full batch.
            if len(batch_list) == ranks and lengths.count(lengths[0] if size is None else size) == ranks:
                yield Dealt(number, batch_list, None, samples)
            # The user's sampler yields batches of different sizes, such as one that groups samples of similar lengths:
            # samples of other groups must not fill up a batch. The round has one for every rank, so it is not dropped.
            # Only the last round of an epoch is filled up.
            elif len(batch_list) == ranks and (self.drop_last or (following := list(islice(batches, 1)))):
                share = RoundPadding(tuple(lengths), max(lengths), tuple(range(ranks)))
                yield Dealt(number, batch_list, share, samples)
            elif not self.drop_last:
                yield Dealt(number, *self._deal_incomplete(batch_list, lengths, first), samples)
            number += 1

    def _deal_incomplete(
        self, batches: list[Any], lengths: list[int], first: list[Any]
    ) -> tuple[list[Any], RoundPadding]:
        ranks, size = self.num_processes, self.batch_size
        everybody = tuple(range(ranks))
        # The last ranks get no batch.
        if not self.even_batches:
            absent = ranks - len(batches)
            share = RoundPadding((*lengths, *[0] * absent), max(lengths), everybody[: len(batches)])
            return [*batches, *[None] * absent], share
        # Only the last batch is short: its round is filled up sample by sample.
        if size is not None and all(length == size for length in lengths[:-1]) and lengths[-1] <= size:
            parts, share_ = split_samples(list(chain(*batches)), list(chain(*first)), size, ranks, True)
            return list(parts), share_ or RoundPadding((size,) * ranks, size, everybody)
        # Batch sizes differ, so there is no size to fill up to: repeat whole batches.
        repeated = list(islice(cycle(first), ranks - len(batches)))
        rows = max([*lengths, *map(len, repeated)])
        return [*batches, *repeated], RoundPadding((*lengths, *[0] * len(repeated)), rows, everybody)

    def _split_rounds(self, skip: int, earlier: Sequence[EarlierDeal]) -> Iterator[Dealt]:
        assert self.batch_size is not None
        rows = per_rank_batch_size(self.batch_size, self.num_processes, True)
        batches, first, start = self._batches_from(skip, 1, earlier)
        number, batch, length = skip, next(batches, None), None
        while batch is not None:
            first, following, length = first or [batch], None, len(batch)
            is_full = length == self.batch_size
            samples = range(start, start := start + length)
            share: RoundPadding | None
            # As in `_dealt_rounds`, a short batch is filled up only at the end.
            # By its length: the truth value of a NumPy array with several elements is an error.
            if length and not is_full and self.even_batches and (following := next(batches, None)) is not None:
                parts, share = divide_samples(batch, self.num_processes)
            else:
                parts, share = split_samples(batch, first[0], rows, self.num_processes, self.even_batches)
            if is_full or not self.drop_last:
                yield Dealt(number, parts, share, samples)
            number, batch = number + 1, next(batches, None) if following is None else following
        # Known after the first pass, for the next `__len__`.
        if length is not None:
            self._last_length = length

    def _rest_rounds(self, earlier: Sequence[EarlierDeal]) -> Iterator[Dealt]:
        """Deal the samples after those of `earlier` so that all ranks have a batch in every round.

        The last rounds have smaller batches. If the last one had fewer samples than ranks, the one before it shares its
        samples with it.
        """
        ranks = self.num_processes
        batches, _, start = self._batches_from(0, 0, earlier)
        groups = self._split_groups(batches) if self.split_batches else _groups(batches, ranks)
        parts = next(groups, None)
        for number in count():
            if parts is None:
                return
            # One round ahead: a last round with fewer samples than ranks would have to repeat some. The two last rounds
            # share their samples then, if they have at least two per rank.
            following = next(groups, None)
            if following is not None and sum(map(len, following)) < ranks:
                smaller = self._smaller_parts([*parts, *following], 2 * ranks)
                if len(smaller) == 2 * ranks:
                    parts, following = smaller[:ranks], smaller[ranks:]
            lengths = [len(part) for part in parts]
            samples = range(start, start := start + sum(lengths))
            if len(parts) == ranks and lengths.count(self._rows or lengths[0]) == ranks:
                yield Dealt(number, parts, None, samples)
            else:
                yield Dealt(number, *_share_parts(self._smaller_parts(parts, ranks), ranks), samples)
            parts = following

    @property
    def _rows(self) -> int:
        """Number of rows of this rank's batch, 0 if unknown."""
        return per_rank_batch_size(self.batch_size or 0, self.num_processes, self.split_batches)

    def _split_groups(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        for batch in batches:
            rows = max(self._rows, -(-len(batch) // self.num_processes))
            yield [batch[start : start + rows] for start in range(0, len(batch), rows)]

    def _smaller_parts(self, parts: list[Any], count: int) -> list[Any]:
        """Cut `parts` smaller until there are `count`, or as many as there are samples."""
        # Parts of one size are joined and cut anew. Batches whose sizes a sampler has chosen are only halved.
        lengths = {len(part) for part in parts[:-1]} | {self._rows}
        if self._rows and len(lengths) == 1 and len(parts[-1]) <= self._rows:
            return _cut_equally(list(chain(*parts)), count) if len(parts) < count else parts
        return _halve_parts(parts, count)  # batches of different sizes are not mixed

    def _batches_from(
        self, skip: int, keep: int, earlier: Sequence[EarlierDeal]
    ) -> tuple[Iterator[Any], list[Any], int]:
        """Return the batches from number `skip` on, the first `keep` of all, and the number of samples before.

        The batches are those after the `earlier` deals. None are kept if none are skipped.
        """
        # `start` is the number of samples of the epoch before the returned batches. A deal with an unknown number of
        # samples is counted below, by running its batches.
        below, start = self.batch_sampler, sum(max(0, deal.samples) for deal in earlier)
        first: list[Any] = []
        # Not for subclasses, which may form their batches in another way.
        if type(below) is BatchSampler:  # batches are runs of indices: skip these without building lists
            size = below.batch_size
            indices = iter(below.sampler)
            next(islice(indices, start, start), None)
            if skip:
                # The batches that fill up the last round are at the beginning of the epoch, so they are read although
                # they are skipped.
                first = [run for _ in range(keep) if (run := list(islice(indices, size)))]
                next(islice(indices, (skip - keep) * size, (skip - keep) * size), None)
            return _runs(indices, size, below.drop_last), first, start + skip * size
        # A generator stays at its end. The user's iterator may begin anew when it is read after its end.
        batches: Iterator[Any] = (batch for batch in below)
        for deal in earlier:
            if deal.samples >= 0:
                batches = _without_samples(batches, deal.samples)
            else:
                done = deal.rounds if self.split_batches else deal.batches
                start += sum(map(len, islice(batches, done)))
        if skip:
            first = list(islice(batches, keep))
            start += sum(map(len, chain(first, islice(batches, skip - keep))))
        return batches, first, start

    def remaining(self, earlier: Sequence[EarlierDeal]) -> int:
        """Return the number of this rank's batches after the `earlier` deals of an epoch.

        Raises TypeError if `batch_sampler` has no length.
        """
        below, rest = self.batch_sampler, copy.copy(self)
        if type(below) is BatchSampler and isinstance(below.sampler, Sized):
            # The lengths of the rest are those of a sampler with as many samples as are left.
            samples = len(below.sampler) - sum(max(0, deal.samples) for deal in earlier)
            rest.batch_sampler = BatchSampler(range(max(0, samples)), below.batch_size, below.drop_last)
        else:
            done = sum(deal.rounds if self.split_batches else deal.batches for deal in earlier)
            rest.batch_sampler = SkipBatchSampler(below, done)
        return len(rest)

    @property
    def total_length(self) -> int:
        """Number of batches of `batch_sampler`."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Return the number of this rank's batches. Raises TypeError if `batch_sampler` has no length."""
        batches = len(self.batch_sampler)
        if self.split_batches:
            # Unknown before the first pass: the last batch is assumed to be full.
            known = self._known_last_length() or self._last_length
            short = self.batch_size or 0 if known is None else known
            rows = per_rank_batch_size(self.batch_size or 0, self.num_processes, True)
            if short == self.batch_size or not batches:
                return batches
            if self.drop_last:
                return batches - 1
            # A short last batch is cut from the first rank on, so the last ranks may get nothing.
            return batches if self.even_batches or short > self.process_index * rows else batches - 1
        # One batch per round. In the last, incomplete round either all ranks have one, or only the first `more`.
        rounds, more = divmod(batches, self.num_processes)
        if not more or self.drop_last:
            return rounds
        return rounds + 1 if self.even_batches else rounds + (self.process_index < more)

    def _known_last_length(self) -> int | None:
        """Return the length of the sampler's last batch, None if it is unknown without a run of the sampler."""
        if not isinstance(self.batch_sampler, Sized):
            return None
        batches, size = len(self.batch_sampler), self.batch_size or 0
        if not batches:
            return 0
        if isinstance(self.batch_sampler, Sequence):
            return len(self.batch_sampler[-1])
        if type(self.batch_sampler) is not BatchSampler or not isinstance(self.sampler, Sized):
            return None
        return size if self.drop_last else (len(self.sampler) - 1) % size + 1


def _run_for_last_length(batch_sampler: Any) -> int | None:  # noqa: ANN401 - any batch sampler
    """Return the length of the last batch of a sampler, None if it has no length and may be endless.

    A copy is run, and the states of random generators are restored.
    """
    if not isinstance(batch_sampler, Sized):
        return None
    copied: Any = copy.copy(batch_sampler)
    # The sampler is copied, too: running it would advance an epoch counter in it.
    with contextlib.suppress(AttributeError):
        copied.sampler = copy.copy(copied.sampler)
    with BatchRng(copied).seeded("last batch"):
        return max((len(batch) for batch in deque(copied, maxlen=1)), default=0)


def _runs(indices: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while run := list(islice(indices, size)):
        if len(run) == size or not drop_last:
            yield run


def _groups(batches: Iterator[Any], count: int) -> Iterator[list[Any]]:
    while group := list(islice(batches, count)):
        yield group


def _without_samples(batches: Iterator[Any], samples: int) -> Iterator[Any]:
    """Return the batches after the first `samples` samples; the one that these end in without its beginning."""
    # With another batch size, the samples that were read may end in the middle of a batch.
    for batch in batches:
        if len(batch) > samples:
            return chain([batch[samples:]] if samples else [batch], batches)
        samples -= len(batch)
    return iter(())


def set_epoch_recursive(epoch: int, *samplers: Any) -> None:  # noqa: ANN401 - any samplers
    """Call `set_epoch` once on every sampler that has one, and on the samplers that they wrap."""
    # A stack: a sampler is told before those that it wraps.
    seen: set[int] = set()
    waiting = list(samplers)[::-1]
    while waiting:
        sampler = waiting.pop()
        if sampler is None or id(sampler) in seen:
            continue
        seen.add(id(sampler))
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        # A user's sampler may forward the call or not; `seen` prevents a second call only of samplers found here.
        if not isinstance(sampler, BatchSamplerShard | SkipBatchSampler):  # these have told the samplers below
            waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]


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
        set_epoch_recursive(epoch, self.batch_sampler)

    @property
    def total_length(self) -> int:
        """Number of batches including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SeedableRandomSampler(Sampler[int]):
    """Random permutation that depends on (seed, epoch) alone: the same on all ranks, in every run, and after a resume.

    `set_epoch` selects the epoch; without it every pass has the epoch after the previous one. The default of
    `data_seed` is the seed that `generator` was given, which has to be the same on all ranks. Without a `generator` it
    is torch's initial seed, and in a prepared loader the loader's seed. The generator itself is not drawn from.
    `replacement` and `num_samples` are those of torch's `RandomSampler`, and so are the errors about them.

    Example::

        sampler = SeedableRandomSampler(range(4), data_seed=0)
        list(sampler) == list(SeedableRandomSampler(range(4), data_seed=0))  # True
    """

    def __init__(
        self,
        data_source: Sized,
        data_seed: int | None = None,
        epoch: int = 0,
        *,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        RandomSampler(data_source, replacement, num_samples)  # validates the arguments
        self.data_source = data_source
        self.replacement = replacement
        self.generator = generator
        self.seed_given = data_seed is not None or generator is not None
        # Both have `initial_seed()`.
        default = torch if generator is None else generator
        self.initial_seed = default.initial_seed() if data_seed is None else data_seed
        self.epoch = epoch
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        # Seeded anew for every pass: the order must not depend on the passes before, which a resumed run has not made.
        # `manual_seed` takes 63 of the 256 bits.
        generator = torch.Generator()
        generator.manual_seed(stream_seed(self.initial_seed, self.epoch, "shuffle") >> 193)
        # Before the first index is drawn: a pass that is left early still counts as one.
        self.epoch += 1
        return iter(RandomSampler(self.data_source, self.replacement, self._num_samples, generator))

    @property
    def num_samples(self) -> int:
        """Number of samples in a pass, by default that of `data_source`."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

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
        set_epoch_recursive(epoch, self.dataset)

    def rounds(self, stream: Iterator[Any]) -> Iterator[Round]:
        """Yield the samples of all ranks from `stream`, round by round."""
        return mark_last(self.dealt(stream))

    def dealt(
        self, stream: Iterator[Any], first: int = 0, initial: Sequence[Any] = (), *, is_rest: bool = False
    ) -> Iterator[Dealt]:
        """Yield rounds without looking ahead.

        `stream` starts with round `first`; `initial` are the samples of round 0, used to fill up the last round. The
        last round is not filled up but has smaller batches if this `is_rest`, the rest of a pass that was begun with
        another number of ranks.
        """
        total = self.rows * self.num_processes
        samples = map(next, repeat(stream))  # `islice` would call `iter` again on a stream that is its own dataset
        for number in count(first):
            chunk = list(islice(samples, total))
            if not chunk:
                return
            initial = initial or chunk
            places = range(number * total, number * total + len(chunk))
            ended = len(chunk) < total
            if ended and self.drop_last:
                return
            if ended and is_rest and self.even_batches:
                yield Dealt(number, *divide_samples(chunk, self.num_processes), places)
            else:
                parts, share = split_samples(chunk, initial, self.rows, self.num_processes, self.even_batches)
                yield Dealt(number, parts, share, places)
            # A stream may begin anew when it is read after its end.
            if ended:
                return

    def first_samples(self, stream: Iterator[Any]) -> list[Any]:
        """Return the samples of the first round, for the argument `initial` of `dealt`."""
        return list(islice(map(next, repeat(stream)), self.rows * self.num_processes))

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for round_ in self.rounds(iter(self.dataset)):
            # torch asks worker k for the batches k, k + workers, and so on.
            if round_.number % workers == turn:
                yield from round_.parts[self.process_index] or ()

    def __len__(self) -> int:
        """Return the number of this rank's samples. Raises TypeError if the dataset has no length."""
        return self.remaining(())

    def remaining(self, earlier: Sequence[EarlierDeal]) -> int:
        """Return the number of this rank's samples after the `earlier` deals of an epoch.

        Raises TypeError if the dataset has no length.
        """
        samples = max(0, len(self.dataset) - sum(deal.samples for deal in earlier))  # type: ignore[arg-type]
        rounds, more = divmod(samples, self.rows * self.num_processes)
        if not more or self.drop_last:
            return rounds * self.rows
        # The last round is cut from the first rank on: the ranks before the cut have all rows, those after it none.
        if self.even_batches:
            return (rounds + 1) * self.rows
        return rounds * self.rows + min(self.rows, max(0, more - self.process_index * self.rows))
