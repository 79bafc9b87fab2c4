"""Test which samples the ranks of a prepared loader have read, and the warnings for data that was split before."""

from __future__ import annotations

import math
import re
import warnings
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.sampler import Sampler, SubsetRandomSampler

import rankbook
from rankbook.runtime import Accelerator, AcceleratorState, GradientState
from rankbook.runtime.data.samplers import RoundPadding, SeedableRandomSampler
from rankbook.runtime.data.seen import (
    RankSamples,
    SampleLog,
    _scope,
    describe_split,
    fingerprint_dataset,
    fingerprint_sampler,
    merge_seen,
)
from tests.rank_processes import run_ranks

BAR_ROW = re.compile(r"<tr><th[^>]*>([^<]*)</th><td>(.*?)</td><td[^>]*>([^<]*)</td></tr>")


def part(ids, length=6, **options):
    values = {"batches": 2, "repeated": 0, "epoch": 0, "finished": True, "first_batch": 0, "exhaustive": True}
    return RankSamples(ids=numpy.array(ids), length=length, drop_last=False, **{**values, **options})


def test_every_sample_once_is_said():
    seen = merge_seen({0: part([0, 2, 4]), 1: part([1, 3, 5], repeated=1)})
    assert seen.ok and seen.lost == [] and seen.counts == {0: 3, 1: 3} and seen.repeated == {0: 0, 1: 1}
    assert "6 samples of 6 read by ranks 0-1\nevery sample once" in str(seen)


def test_duplicates_and_losses_are_named():
    seen = merge_seen({0: part([0, 2, 2]), 1: part([0, 3, 5])})
    assert not seen.ok and seen.duplicates == {0: (0, 1), 2: (0, 0)} and seen.lost == [1, 4]
    assert "2 samples read more than once: 0 on ranks 0-1, 2 on rank 0, 2 times" in str(seen)
    assert "2 samples lost: 1, 4" in str(seen) and "<table>" in seen.bundle()["text/html"]


def test_the_picture_has_a_bar_for_every_rank_and_for_what_was_lost():
    seen = merge_seen({0: part([0, 2, 2]), 1: part([0, 3, 5], repeated=1)})
    html = seen.bundle()["text/html"].rpartition("<caption>")[2]
    bars = {name: (widths, text) for name, widths, text in BAR_ROW.findall(html)}
    assert {name: text for name, (_, text) in bars.items()} == {
        "rank 0": "3 read more than once",
        "rank 1": "2 read once, 1 read more than once, 1 repeated to fill up",
        "no rank": "2 lost",
    }
    assert [row[4] for row in seen.rows()] == ["1", "1"]  # sample 2 was read by rank 0 alone, twice
    assert re.findall(r"width:([\d.]+)%", bars["rank 1"][0]) == ["50.00", "25.00", "25.00"]
    assert "<caption>" not in merge_seen({0: part(range(6))}).bundle()["text/html"]
    assert "<caption>" not in merge_seen({rank: part([rank]) for rank in range(64)}).bundle()["text/html"]
    assert "<caption>" in merge_seen({0: part([], length=0), 1: part([], length=0)}).bundle()["text/html"]


def test_nothing_is_lost_before_the_end_of_the_epoch_or_with_a_sampler_that_leaves_samples_out():
    assert merge_seen({0: part([0], finished=False), 1: part([1])}).lost is None
    seen = merge_seen({0: part([0, 0], exhaustive=False), 1: part([1, 1], exhaustive=False)})
    assert seen.lost is None and "repetitions may be meant" in str(seen)


def test_nothing_is_lost_before_the_first_pass_and_after_a_state_was_loaded():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
    try:
        seen = loader.seen()
        assert seen.lost is None and not seen.finished and seen.ok
        states = [loader.state_dict() for _ in loader]
        assert loader.seen().lost == []
        loader.load_state_dict(states[0])
        seen = loader.seen()
        assert seen.lost is None and not seen.finished and seen.counts == {0: 0}
        assert len(list(loader)) == 2 and loader.seen().counts == {0: 4}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize("options", [{"replacement": True}, {"num_samples": 3}])
def test_nothing_is_lost_by_a_sampler_that_draws_some_of_the_samples(options):
    data = range(6)
    for kind in (RandomSampler, SeedableRandomSampler):
        assert _scope(kind(data, **options), len(data))[0] is False
        assert _scope(kind(data), len(data))[0] is True


def test_parts_of_subsets_are_compared_in_the_dataset_below():
    universes = numpy.array([0, 2, 4]), numpy.array([1, 3, 5])
    seen = merge_seen({rank: part(universes[rank][:2], universe=universes[rank]) for rank in range(2)})
    assert seen.lost == [4, 5] and seen.size == 6


def test_datasets_that_differ_are_not_compared_by_index():
    seen = merge_seen({0: part([0, 1], fingerprint=5), 1: part([2, 3], fingerprint=6)})
    assert not seen.ok and not seen.duplicates and "8 samples of 12 were not read" in str(seen)


def test_log_keeps_repetitions_apart_and_stops_at_indices_that_are_no_integers():
    log = SampleLog()
    log.add([3, 1], None, 0)
    log.add([2**40, 5, 7], RoundPadding((1, 3), 3, (0, 1)), 0)
    assert list(log.indices) == [3, 1, 2**40, 5, 7] and list(log.ends) == [2, 5] and log.repeated == {1: 2}
    log.add(["a"], None, 0)
    log.add([1], None, 0)
    assert list(log.ends) == [2, 5] and "no integers" in log.incomplete


class RankDataset(IterableDataset):
    def __iter__(self):
        return iter(range(torch.distributed.get_rank(), 8, 2))


class EnvironmentDataset(IterableDataset):
    def __iter__(self):
        import os

        yield from range(int(os.environ["RANK"]), 8)


class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Files(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.files[index]


class Numbers:
    """A dataset of another library, which says nothing but its length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Wrapper(Dataset):
    """A dataset that adds tokens or images to the samples of another one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)


class Cells:
    """A column of an Arrow table, with the methods that pyarrow's has."""

    def __init__(self, values):
        self.values, self.nbytes = values, len(repr(values))

    def __getitem__(self, index):
        return Cells([self.values[index]])

    def as_py(self):
        return self.values[0]


class Table:
    """An Arrow table as `datasets` wraps it: rows are read by `fast_slice`."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def fast_slice(self, offset, length):
        return Table(**{name: values[offset : offset + length] for name, values in self.columns.items()})

    def column(self, name):
        return Cells(self.columns[self.column_names[name] if isinstance(name, int) else name])


class Rows:
    """A `datasets.Dataset`: `shard` takes a slice of the table, or every n-th of its rows."""

    def __init__(self, table, length, indices=None, fingerprint="5f"):
        self._data, self._indices, self._fingerprint, self.length = table, indices, fingerprint, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("this would run the transforms of the user")

    def shard(self, num_shards, index, contiguous=True):
        length = self.length // num_shards
        if contiguous:
            return Rows(self._data.fast_slice(index * length, length), length, fingerprint=f"{index}")
        return Rows(self._data, length, Table(indices=list(range(index, self.length, num_shards))), f"{index}")


class ReadableRows(Rows):
    @classmethod
    def of(cls, rows):
        return cls(rows._data, rows.length, rows._indices, rows._fingerprint)

    def __getitem__(self, index):
        return self._data.columns["tokens"][index][2]


class PartSampler(Sampler):
    def __init__(self, length, rank, num_replicas):
        self.length, self.rank, self.num_replicas = length, rank, num_replicas

    def __len__(self):
        return self.length // self.num_replicas

    def __iter__(self):
        return iter(range(self.rank, self.length, self.num_replicas))


DATA = TensorDataset(torch.arange(12))
# Tokens that begin and end alike, as those of a chat template with padding do.
ROWS = Rows(Table(tokens=[[1, 2, *range(n, n + 9), 0, 0] for n in range(12)], label=[0] * 12), 12)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Subset(DATA, range(1, 12, 2))), "Subset takes one of 2 samples, from sample 1 on"),
        (DataLoader(Subset(DATA, [1, 3, 5, 7])), "Subset takes one of 2 samples"),
        (DataLoader(DATA, sampler=PartSampler(12, 1, 2)), "PartSampler deals the samples to 2 ranks"),
        (DataLoader(RankDataset()), "__iter__ of its RankDataset uses get_rank"),
        (DataLoader(EnvironmentDataset()), "uses the variable RANK"),
        (DataLoader(DATA), ""),
        (DataLoader(DATA, shuffle=True, batch_size=4), ""),
        (DataLoader(Plain()), ""),
        (DataLoader(Subset(DATA, range(6))), ""),
        (DataLoader(Subset(DATA, [1, 4, 3, 8])), ""),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2, 5])), ""),
    ],
)
def test_split_is_seen_in_the_loader(loader, reason):
    found = describe_split(loader, 2, 1)
    assert reason in found and bool(found) is bool(reason)


def test_sampler_of_another_world_is_seen():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    assert describe_split(DataLoader(DATA, sampler=sampler), 2, 0, dealt=True) == ""
    assert "has rank 0 of 2, but this is rank 1 of 2" in describe_split(
        DataLoader(DATA, sampler=sampler), 2, 1, dealt=True
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TensorDataset(torch.arange(6)), TensorDataset(torch.arange(6) + 6)),
        (Files(["a", "b"]), Files(["c", "d"])),
        (Numbers(6), Numbers(5)),
        (Subset(DATA, [0, 1]), Subset(DATA, [2, 3])),
        (list(range(0, 8, 2)), list(range(1, 8, 2))),
        (numpy.zeros((3, 2)), numpy.ones((3, 2))),
        (SimpleNamespace(files=["a", "b"]), SimpleNamespace(files=["c", "d"])),
        (ROWS.shard(2, 0), ROWS.shard(2, 1)),
        (ROWS.shard(2, 0, contiguous=False), ROWS.shard(2, 1, contiguous=False)),
        (Wrapper(ROWS.shard(2, 0)), Wrapper(ROWS.shard(2, 1))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_datasets_with_other_samples_have_other_fingerprints(first, second):
    assert fingerprint_dataset(first) != fingerprint_dataset(second)
    assert fingerprint_dataset(first) == fingerprint_dataset(first) > 0


def test_equal_rows_have_equal_fingerprints_however_they_were_made():
    # `map` with a function that cannot be hashed makes a random fingerprint on every rank.
    mapped = [Rows(ROWS._data, 12, fingerprint=fingerprint) for fingerprint in "ab"]
    selected = Rows(ROWS._data, 12, Table(indices=list(range(12))))
    assert len({fingerprint_dataset(rows) for rows in [*mapped, selected, ROWS]}) == 1


def test_rows_that_cannot_be_read_are_no_error():
    assert fingerprint_dataset(Rows(Table(), 0)) == fingerprint_dataset(Rows(Table(), 0)) > 0
    broken = Rows(ROWS._data, 12, Table(indices=[]))
    assert fingerprint_dataset(broken) == fingerprint_dataset(broken) > 0


def test_the_datasets_library_is_read_as_the_imitation_of_these_tests():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict(ROWS._data.columns)
    rows.set_transform(math.sqrt)  # raises an error when a sample is read
    for split in (
        lambda rank: rows.shard(2, rank, contiguous=True),
        lambda rank: rows.shard(2, rank, contiguous=False),
        lambda rank: split_dataset_by_node(rows, rank, 2),
        lambda rank: rows.select(range(6 * rank, 6 * rank + 6)),
        lambda rank: rows.shuffle(seed=rank),
    ):
        assert fingerprint_dataset(split(0)) != fingerprint_dataset(split(1))
        assert fingerprint_dataset(split(0)) == fingerprint_dataset(split(0)) > 0
    mapped = [rows.with_format(None).map(lambda row: row, new_fingerprint=f"{rank}") for rank in range(2)]
    assert mapped[0]._fingerprint != mapped[1]._fingerprint
    assert fingerprint_dataset(mapped[0]) == fingerprint_dataset(mapped[1]) == fingerprint_dataset(rows)


def test_samplers_with_other_indices_have_other_fingerprints():
    loaders = [DataLoader(DATA, sampler=SubsetRandomSampler(range(start, 12, 2))) for start in (0, 1, 0)]
    first, second, third = map(fingerprint_sampler, loaders)
    assert first == third != second
    assert not fingerprint_sampler(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)))


def on_ranks():
    """Return what every case says on this rank: (counts, duplicates, lost, warnings)."""
    rank = torch.distributed.get_rank()
    whole = TensorDataset(torch.arange(10))
    loaders = {
        "plain": DataLoader(whole, batch_size=2),
        "shuffled with workers": DataLoader(whole, batch_size=3, shuffle=True, num_workers=1),
        "drop_last": DataLoader(whole, batch_size=3, drop_last=True),
        "DistributedSampler": DataLoader(whole, batch_size=2, sampler=DistributedSampler(whole)),
        "DistributedSampler of rank 0": DataLoader(
            whole, batch_size=2, sampler=DistributedSampler(whole, 2, 0, shuffle=False)
        ),
        "subset by rank": DataLoader(Subset(whole, range(rank, 10, 2)), batch_size=1),
        "slice by rank": DataLoader(TensorDataset(torch.arange(10)[rank::2]), batch_size=1),
        "rows by rank": DataLoader(ReadableRows.of(ROWS.shard(2, rank)), batch_size=1),
        "sampler by rank": DataLoader(whole, batch_size=1, sampler=SubsetRandomSampler(range(rank, 10, 2))),
        "stream": DataLoader(Plain(), batch_size=2),
    }
    results = {}
    for name, plain in loaders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = rankbook.prepare_data_loader(plain, dispatch_batches=False)
            for _ in loader:
                pass
            seen = loader.seen()
        told = [str(warning.message) for warning in caught if "split" in str(warning.message)]
        results[name] = seen.counts, seen.duplicates, seen.lost, told, seen.ok, str(seen)
    dispatched = rankbook.prepare_data_loader(loaders["plain"], dispatch_batches=True)
    iterator = iter(dispatched)
    next(iterator)
    results["dispatched"] = dispatched.seen().counts
    for _ in iterator:
        pass
    results["dispatched, whole"] = str(dispatched.seen())
    return results


@pytest.mark.slow
def test_ranks_say_what_they_have_read_and_warn_of_what_was_split_before():
    first, second = run_ranks(on_ranks)
    assert {name: result[:3] for name, result in first.items() if "dispatched" not in name} == {
        name: result[:3] for name, result in second.items() if "dispatched" not in name
    }
    for name in ("plain", "shuffled with workers", "DistributedSampler"):
        counts, duplicates, lost, told, ok, text = first[name]
        assert sum(counts.values()) == 10 and (duplicates, lost) == ({}, []), name
        assert ok and not told and not second[name][3] and "every sample once" in text, (name, text)
    assert first["drop_last"][2] and "drop_last=True" in first["drop_last"][5]
    counts, duplicates, lost, told, *_ = second["DistributedSampler of rank 0"]
    assert duplicates == dict.fromkeys(range(0, 10, 2), (0, 1)) and lost == [1, 3, 5, 7, 9]
    assert "has rank 0 of 2, but this is rank 1 of 2" in told[0]
    counts, _, lost, told, *_ = first["subset by rank"]
    assert sum(counts.values()) < 10 and lost and "Subset takes one of 2 samples, from sample 0 on" in told[0]
    (line,) = second["subset by rank"][3]
    assert "Subset takes one of 2 samples, from sample 1 on" in line
    assert "the datasets of the ranks differ" in first["slice by rank"][5] and not first["slice by rank"][4]
    assert "the dataset of rank 1 is not that of rank 0" in second["slice by rank"][3][0]
    (line,) = second["rows by rank"][3]
    assert "the dataset of rank 1 is not that of rank 0" in line and not first["rows by rank"][3]
    assert "the sampler of rank 1 is not that of rank 0" in second["sampler by rank"][3][0]
    assert not first["sampler by rank"][4] and first["stream"][0] == {0: 4, 1: 4}
    assert first["dispatched"] == second["dispatched"] == {0: 2, 1: 2}
    assert "every sample once" in first["dispatched, whole"]
