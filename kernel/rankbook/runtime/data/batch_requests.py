"""Batch samplers of prepared loaders: which batches a pass over the data reads, as `BatchRequest`s.

They assign every batch its number in the epoch, seed the shuffle, and skip rounds at the start of a pass. They read no
data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from rankbook.runtime.data.batch_reader import BatchRequest, keep_share
from rankbook.runtime.data.rng import BatchRng, stream_seed
from rankbook.runtime.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    Round,
    RoundPadding,
    SeedableRandomSampler,
    set_epoch_recursive,
)

_GIVEN_A_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAW_NOTHING_ELSE = (SequentialSampler, SeedableRandomSampler, DistributedSampler, *_GIVEN_A_GENERATOR)


@dataclass
class EpochState:
    """One pass over the data. `run` counts the passes; `skip` is the number of rounds left out at its start."""

    run: int = 0
    seed: int = 0
    epoch: int = 0
    skip: int = 0


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


class Shuffle:
    """Seed a batch sampler from (seed, epoch), so that all ranks shuffle alike.

    `batch_sampler` is a copy of the user's, as deep as needed: torch's samplers are given a generator, and the user's
    objects stay unchanged. A torch generator that the user gave is used as it is, and available as `own`.
    """

    def __init__(self, batch_sampler: Any, seedable: bool = False) -> None:  # noqa: ANN401 - any batch sampler
        sampler: Any = getattr(batch_sampler, "sampler", None)
        self.own: torch.Generator | None = getattr(sampler, "generator", None)
        self._generator: torch.Generator | None = None
        self._seedable: SeedableRandomSampler | None = None
        self.batch_sampler = batch_sampler
        if seedable and self.own is None and _is_plain_shuffle(sampler):
            sampler = self._replace(SeedableRandomSampler(sampler.data_source))
        if self.own is None and type(sampler) in _GIVEN_A_GENERATOR:
            self._generator = torch.Generator()
            self._replace(copy.copy(sampler)).generator = self._generator
        if type(sampler) is SeedableRandomSampler and not sampler.seed_given:
            self._seedable = self._replace(copy.copy(sampler))
        known = type(batch_sampler) in {BatchSampler, SingleItemSampler} and type(sampler) in _DRAW_NOTHING_ELSE
        roots = () if known else (batch_sampler,)
        self._rng = BatchRng(*roots, skip=(self.own,) if self.own else ())

    def _replace(self, sampler: Any) -> Any:  # noqa: ANN401 - any sampler
        self.batch_sampler = copy.copy(self.batch_sampler)
        self.batch_sampler.sampler = sampler
        return sampler

    def begin(self, a_pass: EpochState) -> None:
        """Seed the sampler for a new pass."""
        if self._seedable is not None:
            self._seedable.initial_seed = a_pass.seed
        if self._generator is not None:
            self._generator.manual_seed(stream_seed(a_pass.seed, a_pass.epoch, "shuffle") >> 193)

    def draw(self, rounds: Iterator[Round], a_pass: EpochState) -> Iterator[Round]:
        """Yield `rounds`, drawn with generators seeded for the pass if the sampler may use generators of its own."""
        return self._rng.iterate(rounds, a_pass.seed, a_pass.epoch, "shuffle")


def _is_plain_shuffle(sampler: Any) -> bool:  # noqa: ANN401 - any sampler
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


class MapBatchSampler:
    """Batch requests of a map-style dataset for `ranks`, round by round, without requests for ranks that have no batch.

    `numbered` is (world size, rank), used to number the batches if the user's own sampler has distributed the samples
    already; otherwise the shard's are used.
    """

    def __init__(
        self,
        shard: BatchSamplerShard,
        shuffle: Shuffle,
        ranks: tuple[int, ...],
        numbered: tuple[int, int] | None = None,
    ) -> None:
        self.shard = shard
        self.shuffle = shuffle
        self.ranks = ranks
        self.current = EpochState()
        self._numbered = numbered
        self.batch_size = shard.batch_size
        self.drop_last = shard.drop_last

    def begin(self, a_pass: EpochState) -> None:
        """Set the pass that the next `__iter__` yields requests for."""
        self.current = a_pass
        set_epoch_recursive(self.shard.batch_sampler, a_pass.epoch)
        self.shuffle.begin(a_pass)

    def __iter__(self) -> Iterator[BatchRequest]:
        run, seed, epoch = self.current.run, self.current.seed, self.current.epoch
        world_size, offset = self._numbered or (self.shard.num_processes, 0)
        alone = len(self.ranks) == 1
        for round_ in self.shuffle.draw(self.shard.rounds(self.current.skip), self.current):
            for rank in self.ranks:
                items = round_.parts[rank]
                if items is None and alone:
                    return
                share, last = round_.share, round_.last[rank]
                if self._numbered:
                    assert items is not None  # samples were distributed already: exactly one rank reads here
                    share = share_of_dealt(self.shard.sampler, len(items)) if last else None
                number = round_.number * world_size + rank + offset
                yield BatchRequest(run, seed, epoch, round_.number, rank, number, items, share, last)

    def __len__(self) -> int:
        return len(self.shard)

    def move_to(self, rank: int) -> None:
        """Continue as `rank`, on the process that replaces a dead rank."""
        if self._numbered is None:
            self.shard.process_index = rank
            self.ranks = self.ranks if len(self.ranks) > 1 else (rank,)
            return
        place, self._numbered = self._numbered, (self._numbered[0], rank)
        below: Any = self.shard.batch_sampler
        while below is not None:  # the user's own samplers, which have distributed the samples already
            if isinstance(below, DistributedSampler) and (below.num_replicas, below.rank) == place:
                below.rank = rank
            if isinstance(below, BatchSamplerShard) and (below.num_processes, below.process_index) == place:
                below.process_index = rank
            following = getattr(below, "batch_sampler", None)
            below = getattr(below, "sampler", None) if following is None else following


def share_of_dealt(sampler: Any, rows: int) -> RoundPadding | None:  # noqa: ANN401 - any sampler
    """Return what is real in the last round, of `rows` per rank, if a DistributedSampler has distributed the samples.

    It repeats samples until all ranks have the same number, so the last sample of a rank may be a repetition. Returns
    None for other samplers, about which this is unknown.
    """
    if not isinstance(sampler, DistributedSampler):
        return None
    more = len(sampler.dataset) % sampler.num_replicas  # type: ignore[arg-type]
    ranks = tuple(range(sampler.num_replicas))
    if sampler.drop_last or not more:
        return None
    return RoundPadding(tuple(rows - (rank >= more) for rank in ranks), rows, ranks)


class UnbatchedSampler(MapBatchSampler):
    """`MapBatchSampler` for datasets whose items are batches already, with unknown numbers of rows."""

    def __iter__(self) -> Iterator[BatchRequest]:
        for ticket in super().__iter__():
            yield ticket._replace(share=keep_share(ticket.share))


class IterableBatchSampler:
    """Endless batch requests of an iterable dataset for `ranks`; the reader detects the end of the stream."""

    def __init__(self, shard: IterableDatasetShard, ranks: tuple[int, ...]) -> None:
        self.shard = shard
        self.ranks = ranks
        self.current = EpochState()
        self.batch_size = shard.batch_size
        self.drop_last = shard.drop_last

    def begin(self, a_pass: EpochState) -> None:
        """Set the pass that the next `__iter__` yields requests for."""
        self.current = a_pass
        # Set the epoch here too, before the workers do: a dataset may keep its epoch in memory shared by all workers,
        # and concurrent changes by all of them would race.
        self.shard.set_epoch(a_pass.epoch)

    def __iter__(self) -> Iterator[BatchRequest]:
        run, seed, epoch = self.current.run, self.current.seed, self.current.epoch
        for number in count(self.current.skip):
            for rank in self.ranks:
                whole = number * self.shard.num_processes + rank
                yield BatchRequest(run, seed, epoch, number, rank, whole, None, None, False)

    def move_to(self, rank: int) -> None:
        """Continue as `rank`, on the process that replaces a dead rank."""
        self.shard.process_index = rank
        self.ranks = self.ranks if len(self.ranks) > 1 else (rank,)

    def __len__(self) -> int:
        whole, more = divmod(len(self.shard), self.shard.rows)
        return whole + bool(more)
