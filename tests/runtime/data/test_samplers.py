"""Test which rank gets which samples, in a table of cases and in random cases."""

from __future__ import annotations

import copy
import time
from collections import Counter
from itertools import accumulate, islice, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from rankbook.errors import InvalidArgument
from rankbook.runtime import prepare_data_loader
from rankbook.runtime.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    mark_last,
)

TABLE = [
    # P, n, b, split | keep the last, even | keep the last, uneven | drop the last
    (2, 1, 2, False, "00|00", "0|-", "-|-"),
    (2, 3, 2, False, "01|20", "01|2", "-|-"),
    (2, 5, 2, False, "01,40|23,12", "01,4|23", "01|23"),
    (2, 7, 2, False, "01,45|23,60", "01,45|23,6", "01|23"),
    (3, 2, 2, False, "01|01|01", "01|-|-", "-|-|-"),
    (3, 8, 2, False, "01,67|23,01|45,23", "01,67|23|45", "01|23|45"),
    (4, 5, 2, False, "01|23|40|12", "01|23|4|-", "-|-|-|-"),
    (2, 5, 2, True, "0,2,4|1,3,0", "0,2,4|1,3", "0,2|1,3"),
    (4, 7, 4, True, "0,4|1,5|2,6|3,0", "0,4|1,5|2,6|3", "0|1|2|3"),
]


def shards(batch_sampler, ranks, split=False, even=True):
    return [BatchSamplerShard(batch_sampler, ranks, rank, split, even) for rank in range(ranks)]


def written(batches_of_ranks):
    return "|".join(",".join("".join(map(str, batch)) for batch in batches) or "-" for batches in batches_of_ranks)


@pytest.mark.parametrize(("ranks", "n", "size", "split", "even", "uneven", "dropped"), TABLE)
def test_the_table(ranks, n, size, split, even, uneven, dropped):
    keep, drop = BatchSampler(range(n), size, False), BatchSampler(range(n), size, True)
    assert written(shards(keep, ranks, split, True)) == even
    assert written(shards(keep, ranks, split, False)) == uneven
    assert written(shards(drop, ranks, split, True)) == written(shards(drop, ranks, split, False)) == dropped


@pytest.mark.parametrize("n", range(7))
def test_a_batch_that_cannot_be_split_evenly_is_an_error_that_shows_the_arithmetic(n):
    with pytest.raises(ValueError, match=r"batch size \(2\) % ranks \(3\) = 2"):
        BatchSamplerShard(BatchSampler(range(n), 2, False), 3, 0, split_batches=True)


cases = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 4),
        "n": st.integers(0, 12),
        "rows": st.integers(1, 4),
        "drop": st.booleans(),
        "split": st.booleans(),
        "even": st.booleans(),
        "as_list": st.booleans(),
        "skip": st.integers(0, 4),
    }
)


def sampler_of(case):
    size = case["rows"] * case["ranks"] if case["split"] else case["rows"]
    sampler = BatchSampler(range(case["n"]), size, case["drop"])
    if not case["as_list"]:
        return sampler, size
    batches = type("Batches", (list,), {"batch_size": size, "drop_last": case["drop"]})(sampler)
    return batches, size


@given(case=cases)
def test_every_sample_comes_once_but_for_padding_and_len_is_right(case):
    sampler, size = sampler_of(case)
    before = copy.deepcopy(list(sampler))
    of_ranks = shards(sampler, case["ranks"], case["split"], case["even"])
    dealt = [list(shard) for shard in of_ranks]
    assert list(sampler) == before
    assert [len(shard) for shard in of_ranks] == [len(batches) for batches in dealt]
    if case["even"] or case["drop"]:
        assert len({len(batches) for batches in dealt}) == 1
        assert {len(batch) for batches in dealt for batch in batches} <= {case["rows"]}
    counts = Counter(index for batches in dealt for batch in batches for index in batch)
    total = size if case["split"] else size * case["ranks"]
    used_count = case["n"] // total * total if case["drop"] else case["n"]
    assert set(counts) == set(range(used_count))
    missing = -used_count % total if case["even"] and not case["drop"] and used_count else 0
    assert sum(counts.values()) == used_count + missing


class OwnBatches:
    """A batch sampler that a person wrote: its number of samples is not told."""

    def __init__(self, samples, batch_size, drop_last):
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(BatchSampler(self.samples, self.batch_size, self.drop_last))

    def __len__(self):
        return len(BatchSampler(self.samples, self.batch_size, self.drop_last))


class DerivedBatches(BatchSampler):
    pass


@pytest.mark.parametrize("kind", [BatchSampler, DerivedBatches, OwnBatches])
@pytest.mark.parametrize(("split", "even", "drop"), [*product([False, True], repeat=3)])
def test_len_equals_the_number_of_batches(kind, split, even, drop):
    for n, rows, ranks in product(range(13), range(1, 5), range(1, 5)):
        sampler = kind(range(n), rows * ranks if split else rows, drop)
        lengths = [(len(shard), sum(1 for _ in shard)) for shard in shards(sampler, ranks, split, even)]
        assert all(length == batch_count for length, batch_count in lengths), (n, rows, ranks, lengths)


def test_len_leaves_the_sampler_and_the_random_states_as_they_were():
    sampler = OwnBatches(RandomSampler(range(9)), 4, False)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert [len(shard) for shard in shards(sampler, 2, split=True, even=False)] == [3, 2]
    assert sampler.passes == 0 and torch.equal(torch.rand(1), expected)


def test_len_follows_an_attribute_that_is_changed_later():
    shard = BatchSamplerShard(OwnBatches(range(9), 4, False), 2, 1, split_batches=True)
    assert (len(shard), len(list(shard))) == (3, 3)
    shard.even_batches = False
    assert (len(shard), len(list(shard))) == (2, 2)


@given(case=cases)
def test_rounds_report_real_samples_in_data_order(case):
    sampler, size = sampler_of(case)
    shard = BatchSamplerShard(sampler, case["ranks"], 0, case["split"], case["even"])
    real = []
    rounds = list(shard.rounds())
    for current in rounds:
        for rank, part in enumerate(current.parts):
            assert (part is not None) == (current.share is None or rank in current.share.ranks)
            assert len(part or ()) <= (case["rows"] if current.share is None else current.share.rows)
            real += list(part or ())[: case["rows"] if current.share is None else current.share.real[rank]]
    total = size if case["split"] else size * case["ranks"]
    assert real == list(range(case["n"] // total * total if case["drop"] else case["n"]))
    for rank in range(case["ranks"]):
        lasts = [current.last[rank] for current in rounds if current.parts[rank] is not None]
        assert lasts == [False] * (len(lasts) - 1) + [True] * bool(lasts)
    assert list(shard.rounds(case["skip"])) == rounds[case["skip"] :]


@given(lengths=st.lists(st.integers(1, 4), max_size=9), ranks=st.integers(1, 4), even=st.booleans())
def test_batches_of_any_lengths_are_distributed_undivided(lengths, ranks, even):
    numbers = iter(range(100))
    batches = [[next(numbers) for _ in range(length)] for length in lengths]
    before = copy.deepcopy(batches)
    shard = BatchSamplerShard(batches, ranks, 0, even_batches=even)
    rounds = list(shard.rounds())
    assert (
        [part for current in rounds for part in current.parts if part is not None][: len(batches)] == before == batches
    )
    for current in rounds:
        for part, count in zip(current.parts, current.share.real if current.share else (), strict=False):
            assert count in {0, len(part or ())}
    assert all(len(part or ()) <= current.share.rows for current in rounds if current.share for part in current.parts)
    if even:
        assert all(None not in current.parts for current in rounds)


GROUPS = type("Groups", (list,), {"batch_size": 4, "drop_last": False})(
    [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18], [19], [20, 21, 22, 23], [24, 25, 26]]
)


def test_short_batches_of_a_sampler_that_groups_are_filled_up_in_the_last_round_only():
    """Samples of other groups may have other shapes, which cannot be collated."""
    rounds = list(BatchSamplerShard(GROUPS, 2, 0).rounds())
    assert [part for round_ in rounds[:3] for part in round_.parts] == GROUPS[:6]
    assert [round_.share.real if round_.share else None for round_ in rounds] == [(4, 3), None, (4, 1), (4, 3)]
    assert rounds[3].parts == [[20, 21, 22, 23], [24, 25, 26, 0]]
    for skip in range(1, 5):
        assert list(BatchSamplerShard(GROUPS, 2, 0).rounds(skip)) == rounds[skip:]

    rounds = list(BatchSamplerShard(GROUPS, 2, 0, split_batches=True).rounds())
    assert [rounds[number].parts for number in (1, 5, 7)] == [[[4], [5, 6]], [[19], [19]], [[24, 25], [26, 0]]]
    assert [rounds[number].share.real for number in (1, 5, 7)] == [(1, 2), (1, 0), (2, 1)]
    assert [len(BatchSamplerShard(GROUPS, 2, 0, split_batches=split)) for split in (False, True)] == [4, 8]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize(("split", "even", "drop"), list(product([True, False], repeat=3)))
@pytest.mark.parametrize("lengths", [[4, 4, 3], [4, 3, 4, 1], [2, 4, 2]])
def test_batches_may_be_arrays(kind, split, even, drop, lengths):
    ends = list(accumulate(lengths))
    batches = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    options = {"batch_size": 4, "drop_last": drop}
    lists = type("Batches", (list,), options)(batches)
    arrays = type("Batches", (list,), options)(map(kind, batches))
    dealt = [[list(map(int, batch)) for batch in shard] for shard in shards(arrays, 2, split, even)]
    assert dealt == [list(shard) for shard in shards(lists, 2, split, even)]


def test_rows_of_the_last_round_hold_the_longer_batch_that_is_repeated_in_it():
    *_, last = BatchSamplerShard([[0, 1, 2, 3], [4], [5]], 2, 0).rounds()
    assert last.parts == [[5], [0, 1, 2, 3]]
    assert (last.share.real, last.share.rows) == ((1, 0), 4)


@given(case=cases)
def test_a_stream_is_dealt_like_a_split_sampler_of_all_ranks_samples(case):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(case["n"]))

        def __len__(self):
            return case["n"]

    rows, ranks = case["rows"], case["ranks"]
    size = rows * ranks if case["split"] else rows
    streams = [
        IterableDatasetShard(Stream(), size, case["drop"], ranks, rank, case["split"], case["even"])
        for rank in range(ranks)
    ]
    sampler = BatchSampler(range(case["n"]), rows * ranks, case["drop"])
    expected = [[i for batch in shard for i in batch] for shard in shards(sampler, ranks, True, case["even"])]
    assert [list(stream) for stream in streams] == expected
    assert [len(stream) for stream in streams] == [len(samples) for samples in expected]


@pytest.mark.processes
def test_workers_of_a_plain_loader_share_a_stream_in_its_order():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(11))

    shard = IterableDatasetShard(Stream(), 2, False, 2, 0)
    batches = [batch.tolist() for batch in DataLoader(shard, batch_size=2, num_workers=2)]
    assert batches == [[0, 1], [4, 5], [8, 9]]


class FromTheStart(IterableDataset):
    """Is its own iterator, and each question for one begins anew."""

    def __iter__(self):
        self.numbers = iter(range(5))
        return self

    def __next__(self):
        return next(self.numbers)


def test_a_stream_that_is_its_own_iterator_is_asked_for_it_once():
    assert [list(IterableDatasetShard(FromTheStart(), 1, False, 2, rank)) for rank in range(2)] == [
        [0, 2, 4],
        [1, 3, 0],
    ]


class BeginsAnew(FromTheStart):
    """Is its own iterator, and can be read again after its end."""

    def __next__(self):
        try:
            return next(self.numbers)
        except StopIteration:
            iter(self)
            raise


@pytest.mark.parametrize(
    ("drop", "even", "expected"),
    [(False, True, [[0, 2, 4], [1, 3, 0]]), (False, False, [[0, 2, 4], [1, 3]]), (True, True, [[0, 2], [1, 3]])],
)
def test_a_stream_ends_with_its_first_short_round(drop, even, expected):
    streams = [IterableDatasetShard(BeginsAnew(), 1, drop, 2, rank, even_batches=even) for rank in range(2)]
    assert [list(islice(stream, 9)) for stream in streams] == expected
    assert list(islice((round_.number for round_ in streams[0].rounds(iter(BeginsAnew()))), 9)) == [0, 1, 2][: 3 - drop]
    rest = mark_last(streams[0].dealt(iter(BeginsAnew()), is_rest=True))
    assert len(list(islice(rest, 9))) == 3 - drop


@pytest.mark.parametrize("size", [None, 1])
def test_a_loader_ends_with_a_stream_that_can_be_read_again(size):
    loader = prepare_data_loader(DataLoader(BeginsAnew(), batch_size=size), num_processes=2, process_index=0)
    assert [int(batch) for batch in islice(loader, 9)] == [0, 2, 4]
    assert [int(batch) for batch in islice(loader, 9)] == [0, 2, 4]


class BatchesAnew(BeginsAnew):
    """A batch sampler that is its own iterator, and can be read again after its end."""

    batch_size = 1

    def __next__(self):
        return [super().__next__()]


def test_a_batch_sampler_ends_with_its_first_short_round():
    assert [list(islice(BatchSamplerShard(BatchesAnew(), 2, rank), 9)) for rank in range(2)] == [
        [[0], [2], [4]],
        [[1], [3], [0]],
    ]


def test_a_stream_whose_batch_cannot_be_split_evenly_is_an_error():
    with pytest.raises(InvalidArgument, match=r"batch size \(3\) % ranks \(2\)"):
        IterableDatasetShard(range(9), 3, num_processes=2, split_batches=True)


def test_a_seedable_shuffle_depends_on_seed_and_epoch_alone():
    first = SeedableRandomSampler(range(20), data_seed=3)
    torch.manual_seed(9)
    second = SeedableRandomSampler(range(20), data_seed=3)
    epochs = [list(first) for _ in range(3)]
    assert sorted(epochs[0]) == list(range(20)) and epochs[0] != epochs[1] != epochs[2]
    second.set_epoch(2)
    assert list(second) == epochs[2]
    assert list(SeedableRandomSampler(range(20), data_seed=4)) != epochs[0]


def test_a_seedable_shuffle_takes_the_arguments_of_torchs_sampler():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    sampler = SeedableRandomSampler(range(20), generator=generator)
    assert [list(sampler), list(sampler)] == [list(SeedableRandomSampler(range(20), 3, epoch)) for epoch in (0, 1)]
    assert sampler.generator is generator and torch.equal(generator.get_state(), state)
    drawn = SeedableRandomSampler(range(4), data_seed=1, replacement=True, num_samples=30)
    assert (len(drawn), drawn.num_samples, set(drawn)) == (30, 30, set(range(4)))
    with pytest.raises(ValueError, match="num_samples"):
        SeedableRandomSampler(range(4), num_samples=-1)


def test_skipped_batches_are_not_returned_and_are_counted():
    sampler = SkipBatchSampler(BatchSampler(range(7), 2, False), 2)
    assert list(sampler) == [[4, 5], [6]]
    assert (len(sampler), sampler.total_length) == (2, 4)
    assert (list(SkipBatchSampler([[1]], 3)), len(SkipBatchSampler([[1]], 3))) == ([], 0)


def test_skipping_a_million_samples_is_fast():
    shard = BatchSamplerShard(BatchSampler(RandomSampler(range(1_000_000)), 10, False), 2, 0)
    started = time.thread_time()
    assert next(shard.rounds(49_999)).number == 49_999
    assert time.thread_time() - started < 1
