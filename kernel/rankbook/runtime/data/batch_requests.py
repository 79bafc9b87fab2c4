"""Batch samplers of prepared loaders: which batches a pass over the data reads, as `BatchRequest`s.

They assign every batch its number in the epoch, seed the shuffle, and skip rounds at the start of a pass. They read no
data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from rankbook.runtime.data.batch_reader import BatchRequest, whole_batch_padding
from rankbook.runtime.data.rng import BatchRng, stream_seed
from rankbook.runtime.data.samplers import (
    BatchSamplerShard,
    EarlierDeal,
    IterableDatasetShard,
    Round,
    RoundPadding,
    SeedableRandomSampler,
    set_epoch_recursive,
)
from rankbook.runtime.data.seen import SampleLog
from rankbook.runtime.data.stateful import is_stateful

_GENERATOR_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN_SAMPLERS = (SequentialSampler, SeedableRandomSampler, DistributedSampler, *_GENERATOR_SAMPLERS)


@dataclass
class EpochState:
    """One pass over the data.

    `run` counts the passes, and `earlier` are the deals of its epoch to other numbers of ranks. `skip` is the number of
    rounds left out at its start, after these deals.
    """

    run: int = 0
    seed: int = 0
    epoch: int = 0
    skip: int = 0
    earlier: tuple[EarlierDeal, ...] = ()

    @property
    def first_batch(self) -> int:
        """Number of batches in the `earlier` deals, which is the number of the first batch after them."""
        return sum(deal.batches for deal in self.earlier)


class SingleItemSampler:
    """Batch sampler that returns every index as a batch of its own, for a loader without batching."""

    def __init__(self, sampler: Any) -> None:  # noqa: ANN401 - any iterable of indices
        self.sampler = sampler
        self.batch_size = 1
        self.drop_last = False

    def __iter__(self) -> Iterator[list[Any]]:
        return ([index] for index in self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class _CopiedSampler:
    """A copy of a user's sampler, which takes over what the user changes in `original` later.

    Attributes named in `own` stay those of the copy, and so do others that only the copy has changed, such as a number
    of passes.
    """

    def __init__(self, copied: Any, original: Any, own: tuple[str, ...]) -> None:  # noqa: ANN401 - any sampler
        self._copied, self._original, self._own = copied, original, own
        self._seen = self._attributes()

    def _attributes(self) -> dict[str, Any]:
        attributes = getattr(self._original, "__dict__", {})  # a class with slots has none
        return {name: value for name, value in attributes.items() if name not in self._own}

    def refresh(self) -> None:
        """Take over the attributes of the original that have changed since the last call."""
        seen, self._seen = self._seen, self._attributes()
        for name, value in self._seen.items():
            # By identity, because tensors compare elementwise. A pickle keeps the identity of all values but numbers.
            earlier = seen.get(name, seen)
            if value is not earlier and not (isinstance(value, int | float) and value == earlier):
                vars(self._copied)[name] = value


class Shuffle:
    """Seed a batch sampler from (seed, epoch), so that all ranks shuffle alike.

    `batch_sampler` is a copy of the user's, as deep as needed: torch's samplers are given a generator, and the user's
    objects (`original`) stay unchanged. What the user changes in these later is followed from the next pass on. A torch
    generator that the user gave is used as it is, and available as `user_generator`.
    """

    def __init__(self, batch_sampler: Any, seedable: bool = False) -> None:  # noqa: ANN401 - any batch sampler
        # Three cases below. A generator of the user is left alone. torch's own random samplers get a generator of ours,
        # which `begin` seeds. Any other sampler may draw from generators that only a search can find (`BatchRng`).
        sampler: Any = getattr(batch_sampler, "sampler", None)
        drawn_from = None if isinstance(sampler, SeedableRandomSampler) else sampler
        generator = getattr(drawn_from, "generator", None)
        # A sampler of the user may call a generator of NumPy or `random` so. `BatchRng` finds and seeds these.
        self.user_generator = generator if isinstance(generator, torch.Generator) else None
        self._generator: torch.Generator | None = None
        self._seedable: SeedableRandomSampler | None = None
        self.original = self.batch_sampler = batch_sampler
        if seedable and generator is None and _is_plain_shuffle(sampler):
            sampler = self._replace(SeedableRandomSampler(sampler.data_source))
        if generator is None and type(sampler) in _GENERATOR_SAMPLERS:
            self._generator = torch.Generator()
            self._replace(copy.copy(sampler)).generator = self._generator
        # Without a seed of its own it follows the loader's. Subclasses are not touched, as they may define the order
        # differently.
        if type(sampler) is SeedableRandomSampler and not sampler.seed_given:
            self._seedable = self._replace(copy.copy(sampler))
        self._copies: list[_CopiedSampler] = []
        if self.batch_sampler is not batch_sampler:
            own = ("generator", "initial_seed", "epoch")
            self._copies.append(_CopiedSampler(self.batch_sampler, batch_sampler, ("sampler",)))
            self._copies.append(_CopiedSampler(self.batch_sampler.sampler, batch_sampler.sampler, own))
        draws_nothing_else = (
            type(batch_sampler) in {BatchSampler, SingleItemSampler} and type(sampler) in _KNOWN_SAMPLERS
        )
        roots = () if draws_nothing_else else (batch_sampler,)
        self._rng = BatchRng(*roots, skip=(self.user_generator,) if self.user_generator else ())

    def _replace(self, sampler: Any) -> Any:  # noqa: ANN401 - any sampler
        # A shallow copy: the data source is shared with the user's sampler, and attributes are replaced in the copy
        # only.
        self.batch_sampler = copy.copy(self.batch_sampler)
        self.batch_sampler.sampler = sampler
        return sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's samplers; a copied batch sampler takes over what that has changed."""
        set_epoch_recursive(epoch, self.original)
        if self.batch_sampler is not self.original:
            if callable(getattr(self.original, "set_epoch", None)):
                changed = {name: value for name, value in vars(self.original).items() if name != "sampler"}
                vars(self.batch_sampler).update(changed)
            set_epoch_recursive(epoch, self.batch_sampler.sampler)

    def begin(self, epoch_state: EpochState) -> None:
        """Seed the sampler for a new pass, and take over what the user has changed in the originals."""
        for copied in self._copies:
            copied.refresh()
        if self._seedable is not None:
            self._seedable.initial_seed = epoch_state.seed
        if self._generator is not None:
            # `manual_seed` takes a signed 64-bit number: 63 of the 256 bits are used.
            self._generator.manual_seed(stream_seed(epoch_state.seed, epoch_state.epoch, "shuffle") >> 193)

    def draw(self, rounds: Iterator[Round], epoch_state: EpochState) -> Iterator[Round]:
        """Yield `rounds`, drawn with generators seeded for the pass if the sampler may use generators of its own.

        All draws of the pass continue one stream. So a sampler that draws with every batch gives the same batches to
        any number of ranks.
        """
        return self._rng.iterate_as_one(rounds, epoch_state.seed, epoch_state.epoch, "shuffle", 0)


def _is_plain_shuffle(sampler: Any) -> bool:  # noqa: ANN401 - any sampler
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


class MapBatchSampler:
    """Batch requests of a map-style dataset for `ranks`, round by round, without requests for ranks that have no batch.

    `numbering` is (world size, rank), used to number the batches if the user's own sampler has distributed the samples
    already; otherwise the shard's are used.
    """

    def __init__(
        self,
        shard: BatchSamplerShard,
        shuffle: Shuffle,
        ranks: tuple[int, ...],
        numbering: tuple[int, int] | None = None,
    ) -> None:
        self.shard = shard
        self.shuffle = shuffle
        self.ranks = ranks
        self.current = EpochState()
        self._numbering = numbering
        # Epoch that the user has set for the next pass already; calling `set_epoch` of his samplers twice may not be
        # harmless.
        self._samplers_epoch: int | None = None
        self._samples: list[int] = []
        self.logs: dict[int, SampleLog] = {}
        self.batch_size = shard.batch_size
        self.drop_last = shard.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's samplers, and of the copies that are read in their place."""
        self.shuffle.set_epoch(epoch)
        self._samplers_epoch = epoch

    def begin(self, epoch_state: EpochState) -> None:
        """Set the pass that the next `__iter__` yields requests for."""
        self.current = epoch_state
        if self._samplers_epoch != epoch_state.epoch:
            self.set_epoch(epoch_state.epoch)
        self._samplers_epoch = None
        self.shuffle.begin(epoch_state)

    def forget_pass(self) -> None:
        """Forget the last pass, after the loader has got the position of another one."""
        self.current, self.logs, self._samples = EpochState(), {}, []

    def __iter__(self) -> Iterator[BatchRequest]:
        current = self.current
        run, seed, epoch = current.run, current.seed, current.epoch
        shard, ranks, numbering = self.shard, self.ranks, self._numbering
        # The user's DistributedSampler has dealt the samples to the current number of ranks. A rest of an epoch that
        # began with another number must be dealt from all samples.
        if numbering and current.earlier:
            shard, ranks, numbering = self._rest_shard(*numbering), (numbering[1],), None
        # A batch's number in the epoch: the round times the number of ranks, plus the rank, plus the batches of earlier
        # deals.
        world_size, offset = numbering or (shard.num_processes, 0)
        offset += current.first_batch
        alone = len(ranks) == 1
        # Samples of the epoch before every round, for `samples_before`. Filled while the requests are made, which
        # torch's workers run ahead of.
        self._samples = []
        # What every rank is asked to read, for `PreparedLoader.seen`.
        logs = self.logs = {rank: SampleLog() for rank in ((numbering[1],) if numbering else ranks)}
        for round_ in self.shuffle.draw(shard.rounds(current.skip, current.earlier), current):
            if not self._samples:
                self._samples.append(round_.samples.start * (numbering or (1,))[0])
            self._samples.append(round_.samples.stop * (numbering or (1,))[0])
            for rank in ranks:
                items = round_.parts[rank]
                # A rank with no batch in a round has none in later rounds either.
                if items is None and alone:
                    return
                share, last = round_.share, round_.last[rank]
                if numbering:
                    assert items is not None  # samples were distributed already: exactly one rank reads here
                    share = distributed_sampler_padding(shard.sampler, len(items)) if last else None
                if items is not None:
                    part = numbering[1] if numbering else rank
                    logs[part].add(items, share, part)
                number = round_.number * world_size + rank + offset
                yield BatchRequest(run, seed, epoch, round_.number, rank, number, items, share, last)

    def __len__(self) -> int:
        return len(self.shard)

    def remaining(self, earlier: Sequence[EarlierDeal]) -> int:
        """Return the number of this rank's batches after the `earlier` deals of an epoch."""
        return (self._rest_shard(*self._numbering) if self._numbering else self.shard).remaining(earlier)

    def samples_before(self, round_: int) -> int | None:
        """Return the number of samples of the epoch that come before a round of the current pass; None if unknown."""
        # Entry 0 is the number of samples before the first round of this pass.
        index = round_ - self.current.skip
        return self._samples[index] if 0 <= index < len(self._samples) else None

    def can_deal_rest(self, earlier: Sequence[EarlierDeal]) -> bool:  # noqa: ARG002 - as for an iterable dataset
        """Return True if what is left after `earlier` deals can be dealt to this number of ranks."""
        sampler = self.shard.sampler
        return self._numbering is None or (
            type(self.shard.batch_sampler) in {BatchSampler, SingleItemSampler}
            and type(sampler) is DistributedSampler
            and (sampler.num_replicas, sampler.rank) == self._numbering
        )

    def _rest_shard(self, world_size: int, rank: int) -> BatchSamplerShard:
        """Return the shard of the rest of an epoch, where the user's DistributedSampler has distributed its samples.

        Its rank's samples are not the rest of another number of ranks' samples, so all of them are dealt again.
        """
        batch_sampler, sampler = copy.copy(self.shard.batch_sampler), copy.copy(self.shard.sampler)
        samples = len(sampler.dataset)
        sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size = 1, 0, samples, samples
        batch_sampler.sampler = sampler
        return BatchSamplerShard(batch_sampler, world_size, rank)

    def move_to(self, rank: int) -> None:
        """Continue as `rank`, on the process that replaces a dead rank."""
        self.logs = {}
        if self._numbering is None:
            self.shard.process_index = rank
            # More than one rank: this process reads for all (the dispatcher), so it keeps all requests.
            self.ranks = self.ranks if len(self.ranks) > 1 else (rank,)
            return
        previous, self._numbering = self._numbering, (self._numbering[0], rank)
        sampler: Any = self.shard.batch_sampler
        while sampler is not None:  # the user's own samplers, which have distributed the samples already
            if isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank) == previous:
                sampler.rank = rank
            if isinstance(sampler, BatchSamplerShard) and (sampler.num_processes, sampler.process_index) == previous:
                sampler.process_index = rank
            following = getattr(sampler, "batch_sampler", None)
            sampler = getattr(sampler, "sampler", None) if following is None else following


def distributed_sampler_padding(sampler: Any, rows: int) -> RoundPadding | None:  # noqa: ANN401 - any sampler
    """Return what is real in the last round, of `rows` per rank, if a DistributedSampler has distributed the samples.

    It repeats samples until all ranks have the same number, so the last sample of a rank may be a repetition. Returns
    None for other samplers, about which this is unknown.
    """
    if not isinstance(sampler, DistributedSampler):
        return None
    # DistributedSampler deals sample k to rank k % n, so the first `more` ranks have a real last sample, and the others
    # a repeated one.
    more = len(sampler.dataset) % sampler.num_replicas  # type: ignore[arg-type]
    ranks = tuple(range(sampler.num_replicas))
    if sampler.drop_last or not more:
        return None
    return RoundPadding(tuple(rows - (rank >= more) for rank in ranks), rows, ranks)


class UnbatchedSampler(MapBatchSampler):
    """`MapBatchSampler` for datasets whose items are batches already, with unknown numbers of rows."""

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in super().__iter__():
            yield request._replace(share=whole_batch_padding(request.share))


class IterableBatchSampler:
    """Endless batch requests of an iterable dataset for `ranks`; the reader detects the end of the stream."""

    def __init__(self, shard: IterableDatasetShard, ranks: tuple[int, ...]) -> None:
        self.shard = shard
        self.ranks = ranks
        self.current = EpochState()
        self.batch_size = shard.batch_size
        self.drop_last = shard.drop_last

    def begin(self, epoch_state: EpochState) -> None:
        """Set the pass that the next `__iter__` yields requests for."""
        self.current = epoch_state
        # Set the epoch here too, before the workers do: a dataset may keep its epoch in memory shared by all workers,
        # and concurrent changes by all of them would race.
        self.shard.set_epoch(epoch_state.epoch)

    def forget_pass(self) -> None:
        """See `MapBatchSampler`."""
        self.current = EpochState()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: a stream has no sampler, and its dataset learns the epoch from the loader."""

    def __iter__(self) -> Iterator[BatchRequest]:
        run, seed, epoch = self.current.run, self.current.seed, self.current.epoch
        first, earlier = self.current.first_batch, self.current.earlier
        for number in count(self.current.skip):
            for rank in self.ranks:
                index = number * self.shard.num_processes + rank + first
                yield BatchRequest(run, seed, epoch, number, rank, index, None, None, False, earlier)

    def move_to(self, rank: int) -> None:
        """Continue as `rank`, on the process that replaces a dead rank."""
        self.shard.process_index = rank
        self.ranks = self.ranks if len(self.ranks) > 1 else (rank,)

    def __len__(self) -> int:
        return self.remaining(())

    def remaining(self, earlier: Sequence[EarlierDeal]) -> int:
        """Return the number of this rank's batches after the `earlier` deals of an epoch."""
        batches, more = divmod(self.shard.remaining(earlier), self.shard.rows)
        return batches + bool(more)

    def samples_before(self, round_: int) -> int | None:
        """Return the number of samples of the epoch that come before a round of the current pass; None if unknown."""
        dealt = sum(deal.samples for deal in self.current.earlier)
        return dealt + round_ * self.shard.rows * self.shard.num_processes

    def can_deal_rest(self, earlier: Sequence[EarlierDeal]) -> bool:
        """Return True if what is left after `earlier` deals can be dealt to this number of ranks.

        The dataset must have a state. Any other stream may be another one when it is read again.
        """
        return is_stateful(self.shard.dataset) and all(deal.samples >= 0 for deal in earlier)
