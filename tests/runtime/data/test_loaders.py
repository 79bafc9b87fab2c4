"""A prepared loader on one process: ranks are told apart by number, so no process is started for them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from rankbook.errors import InvalidArgument
from rankbook.protocol import telemetry
from rankbook.runtime import (
    Accelerator,
    DataLoaderDispatcher,
    GradientState,
    SkipDataLoader,
    prepare_data_loader,
    set_seed,
    skip_first_batches,
)
from rankbook.runtime.collectives import trim
from rankbook.runtime.config import DataLoaderConfiguration
from rankbook.runtime.data import rng
from rankbook.runtime.data.loaders import DataLoaderShard, data_parallel_layout, data_parallel_rank
from rankbook.runtime.data.samplers import RoundPadding, SeedableRandomSampler


@pytest.fixture(autouse=True)
def no_seed():
    rng._last_seed = None
    rng._seeded.clear()


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = get_worker_info()  # as torch's documentation shows it
        numbers = range(self.n) if info is None else range(info.id, self.n, info.num_workers)
        return iter(numbers)


class SizedStream(Stream):
    def __len__(self):
        return self.n


def for_ranks(loader, ranks, **options):
    options = {"data_seed": 0, **options}
    return [prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options) for rank in range(ranks)]


def batches(loader):
    return [batch.tolist() for batch in loader]


def metrics(loaders):
    """Return the result of `gather_for_metrics`: the batches of every round, padded, joined, and trimmed."""
    samples = []
    iterators = [iter(loader) for loader in loaders]
    while True:
        present = [(loader, batch) for loader, it in zip(loaders, iterators, strict=True) for batch in islice(it, 1)]
        if not present:
            return samples
        share = present[0][0].share
        assert {loader.share for loader, _ in present} == {share}
        rows = max(len(batch) for _, batch in present)
        padded = [torch.nn.functional.pad(batch, (0, rows - len(batch)), value=-1) for _, batch in present]
        padded += [torch.full((rows,), -1)] * (len(loaders) - len(padded))
        samples += trim(torch.cat(padded), share).tolist()
        assert share is None or share.rows in {rows, -1}


SHAPES = [(n, size, ranks) for ranks in (1, 2, 3) for n in (0, 1, 2, 5, 7, 12) for size in (1, 2)]


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("split", [False, True], ids=["dealt", "split"])
@pytest.mark.parametrize("data", [Numbers, Stream, SizedStream])
def test_the_metrics_are_of_each_sample_once_in_order(data, split, even):
    for n, size, ranks in SHAPES:
        source = DataLoader(data(n), batch_size=size * ranks if split else size)
        loaders = for_ranks(source, ranks, split_batches=split, even_batches=even, dispatch_batches=False)
        assert metrics(loaders) == list(range(n)), (n, size, ranks)
        for loader in loaders:
            batch_count = len(list(loader))
            assert loader.end_of_dataloader and (data is Stream or len(loader) == batch_count)
            assert loader.remainder in {n % loader.total_batch_size, 0 if n else -1}


def test_last_batch_is_reported_with_its_number_of_real_samples():
    first, second = for_ranks(DataLoader(Numbers(7), batch_size=2), 2)
    states = [(batch.tolist(), first.end_of_dataloader, first.remainder, first.share) for batch in first]
    assert states == [([0, 1], False, -1, None), ([4, 5], True, 3, RoundPadding((2, 1), 2, (0, 1)))]
    assert batches(second) == [[2, 3], [6, 0]]


def test_abandoned_loop_is_inactive():
    loader = prepare_data_loader(DataLoader(Numbers(6), batch_size=2))
    state = GradientState()
    for _ in loader:
        assert state.active_dataloader is loader
        break
    assert not state.in_dataloader
    with pytest.raises(ZeroDivisionError):
        [1 / (batch[0] * 0).item() for batch in loader]
    assert not state.in_dataloader
    assert [state.end_of_dataloader for _ in loader] == [False, False, True]


def test_prepared_loader_is_not_distributed_twice():
    loader = prepare_data_loader(DataLoader(Numbers(6), batch_size=2), num_processes=2, process_index=0)
    assert prepare_data_loader(loader, num_processes=2, process_index=0) is loader
    assert isinstance(loader, DataLoader) and isinstance(loader, DataLoaderShard)
    for n in (9, 10, 11, 12):
        samplers = [DistributedSampler(range(n), 3, rank, shuffle=False) for rank in range(3)]
        loaders = [DataLoader(Numbers(n), 2, sampler=sampler) for sampler in samplers]
        dealt = [
            prepare_data_loader(source, num_processes=3, process_index=rank) for rank, source in enumerate(loaders)
        ]
        assert [batches(current) for current in dealt] == [batches(current) for current in loaders]
        assert [len(current) for current in dealt] == [len(current) for current in loaders]
        assert sorted(metrics(dealt)) == list(range(n))


def test_the_persons_loader_sampler_and_lists_stay_as_they_were():
    lists = [[3, 1], [0, 2, 4], [5]]
    before = copy.deepcopy(lists)
    sampler = RandomSampler(range(6))
    for source in (
        DataLoader(Numbers(6), batch_sampler=lists),
        DataLoader(Numbers(6), batch_sampler=BatchSampler(sampler, 4, False)),
    ):
        attributes = dict(vars(source))
        for loader in for_ranks(source, 2):
            assert {i for batch in batches(loader) for i in batch} <= set(range(6))
        assert vars(source) == attributes
    assert lists == before and sampler.generator is None


def test_a_subclass_keeps_its_iter_and_its_attributes():
    class Doubling(DataLoader):
        def __init__(self, factor, n):  # a signature that nobody could guess
            self.factor = factor
            super().__init__(Numbers(n), batch_size=2)

        def __iter__(self):
            for batch in super().__iter__():
                yield batch * self.factor

    for even in (True, False):
        loaders = for_ranks(Doubling(10, 7), 2, even_batches=even)
        assert metrics(loaders) == [0, 10, 20, 30, 40, 50, 60]
        assert loaders[0].factor == 10 and type(loaders[0].base_dataloader) is Doubling


def test_an_iter_that_drops_batches_still_has_an_end():
    class Choosy(DataLoader):
        def __iter__(self):
            yield from (batch for batch in super().__iter__() if batch[0] != 4)

    loader = prepare_data_loader(Choosy(Numbers(5), batch_size=2))
    assert [(batch.tolist(), loader.end_of_dataloader) for batch in loader] == [([0, 1], False), ([2, 3], True)]


def test_a_shuffle_is_the_same_on_all_ranks_and_new_in_each_epoch():
    for source in (
        DataLoader(Numbers(12), batch_size=2, shuffle=True),
        DataLoader(Numbers(12), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)),
        DataLoader(Numbers(12), batch_size=2, sampler=Careless(12)),
    ):
        torch.manual_seed(1)
        single = prepare_data_loader(source, data_seed=5)
        generator = source.sampler.generator if isinstance(source.sampler, RandomSampler) else None
        epochs = []
        for _ in range(2):
            state = generator.get_state() if generator else None
            epochs.append([i for batch in batches(single) for i in batch])
            single.position.epoch -= 1
            for ranks, seed in ((2, 2), (3, 3)):
                dealt = []
                for loader in for_ranks(source, ranks, data_seed=5):
                    loader.set_epoch(single.position.next_epoch())
                    torch.manual_seed(seed)
                    if generator:
                        generator.set_state(state)
                    dealt.append(batches(loader))
                rounds = zip(*dealt, strict=True)
                assert [i for batches_of_round in rounds for batch in batches_of_round for i in batch] == epochs[-1]
            single.position.epoch += 1
        assert sorted(epochs[0]) == list(range(12)) and epochs[0] != epochs[1]


class Careless(Sampler):
    """Draws from the global generator, as most samplers that people write."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())

    def __len__(self):
        return self.n


class Draws(Numbers):
    def __getitem__(self, index):
        return torch.rand(()).item()


def test_two_loaders_have_different_orders_and_draw_different_numbers():
    def read(make, count=2):
        set_seed(0)
        loaders = [prepare_data_loader(make()) for _ in range(count)]
        return [torch.cat(list(loader)).tolist() for loader in loaders]

    first, second = read(lambda: DataLoader(range(64), batch_size=8, shuffle=True))
    assert sorted(first) == sorted(second) == list(range(64)) and first != second
    assert not set.intersection(*map(set, read(lambda: DataLoader(Draws(64), batch_size=8))))
    assert read(lambda: DataLoader(range(64), batch_size=8, shuffle=True), 1) == [first]
    seeded = prepare_data_loader(DataLoader(range(64), batch_size=8, shuffle=True), data_seed=rng.run_seed())
    assert torch.cat(list(seeded)).tolist() == first


def test_a_cell_that_is_run_again_reads_its_loaders_in_the_same_orders():
    orders = []
    for _ in range(2):
        torch.manual_seed(7)
        first = prepare_data_loader(DataLoader(range(64), batch_size=8, shuffle=True))
        second = prepare_data_loader(DataLoader(range(64), batch_size=8, shuffle=True))
        orders.append([torch.cat(list(loader)).tolist() for loader in (first, second)])
    assert orders[0] == orders[1] and orders[0][0] != orders[0][1]


def test_a_loader_that_is_first_read_after_a_resume_has_a_seed_of_its_own():
    def read(loader):
        return torch.cat(list(loader)).tolist()

    def shuffled():
        return prepare_data_loader(DataLoader(range(64), batch_size=8, shuffle=True))

    set_seed(0)
    training, evaluation = shuffled(), shuffled()
    read(training)
    state, expected = training.state_dict(), read(evaluation)
    set_seed(0)
    training, evaluation = shuffled(), shuffled()
    training.load_state_dict(state)
    assert read(evaluation) == expected


def test_a_look_at_the_first_batch_keeps_the_seed_of_the_pass():
    set_seed(0)
    for _ in range(2):
        loader = prepare_data_loader(DataLoader(range(64), batch_size=8, shuffle=True))
        peeked = loader.peek()
        assert peeked.tolist() == loader.peek().tolist() == next(iter(loader)).tolist()


@pytest.mark.processes
def test_a_persons_own_generator_gives_the_order_that_torch_would():
    for workers in (0, 1):
        orders = []
        for prepared in (False, True):
            generator = torch.Generator().manual_seed(8)
            loader = DataLoader(Numbers(9), batch_size=3, shuffle=True, generator=generator, num_workers=workers)
            loader = prepare_data_loader(loader) if prepared else loader
            orders.append([batches(loader), batches(loader)])
        assert orders[0] == orders[1]


@pytest.mark.processes
def test_a_shared_generator_does_not_depend_on_workers_that_are_kept():
    def make(**options):
        generator = torch.Generator().manual_seed(8)
        return prepare_data_loader(DataLoader(Numbers(9), 3, shuffle=True, generator=generator, **options))

    kept, own = make(num_workers=1, persistent_workers=True), make()
    assert [batches(kept) for _ in range(3)] == [batches(own) for _ in range(3)]
    state, rest = own.state_dict(), [batches(own) for _ in range(2)]
    resumed = make(num_workers=1, persistent_workers=True)
    resumed.load_state_dict(state)
    assert [batches(resumed) for _ in range(2)] == rest


def orders_of(make, prepared):
    """The order of two passes of a new loader, and the state of the sampler's generator after them."""
    loader, generator = make()
    loader = prepare_data_loader(loader) if prepared else loader
    return [batches(loader), batches(loader)], generator.get_state().tolist()


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shared", ["no other", "another", "the same"])
def test_a_sampler_with_a_generator_gives_the_order_that_torch_would(workers, shared):
    def make():
        generator = torch.Generator().manual_seed(3)
        of_loader = {"no other": None, "another": torch.Generator().manual_seed(9), "the same": generator}[shared]
        sampler = RandomSampler(Numbers(10), generator=generator)
        loader = DataLoader(Numbers(10), 2, sampler=sampler, generator=of_loader, num_workers=workers)
        return loader, generator

    assert orders_of(make, prepared=True) == orders_of(make, prepared=False)


class DrawsFrom(Sampler):
    """A sampler whose `generator` is one of NumPy or `random`."""

    def __init__(self, n, generator):
        self.n, self.generator = n, generator

    def __len__(self):
        return self.n

    def __iter__(self):
        order = list(range(self.n))
        self.generator.shuffle(order)
        return iter(order)


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_sampler_may_keep_a_generator_of_another_library_under_the_name_generator(make):
    loaders = for_ranks(DataLoader(Numbers(20), batch_size=2, sampler=DrawsFrom(20, make(0))), 2)
    others = for_ranks(DataLoader(Numbers(20), batch_size=2, sampler=DrawsFrom(20, make(1))), 2)
    first = [batches(loader) for loader in loaders]
    assert sorted(i for part in first for batch in part for i in batch) == list(range(20))
    assert [batches(loader) for loader in others] == first, "drawn from the loader's seed, as on all ranks"
    state = loaders[0].state_dict()
    second = batches(loaders[0])
    assert second != first[0]
    others[0].load_state_dict(state)
    assert batches(others[0]) == second
    assert loaders[0].synchronized_generator is None


class TellsEpochs(Sampler):
    """A sampler, or a batch sampler over another one, that records the epochs that it is told."""

    def __init__(self, below, batched=False):
        self.sampler, self.epochs, self.batched = below, [], batched
        self.batch_size, self.drop_last = 2, False

    def __iter__(self):
        return iter(BatchSampler(self.sampler, 2, False) if self.batched else self.sampler)

    def __len__(self):
        return -(-len(self.sampler) // 2) if self.batched else len(self.sampler)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class TellsEpochsAndIsCopied(BatchSampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_the_epoch_reaches_the_persons_own_samplers_once():
    inner = TellsEpochs(range(8))
    outer = TellsEpochs(inner, batched=True)
    replaced = TellsEpochsAndIsCopied(RandomSampler(range(8)), 2, False)  # copied, for another generator
    seedable = SeedableRandomSampler(range(8))
    sources = [
        (DataLoader(Numbers(8), batch_sampler=outer), [outer, inner]),
        (DataLoader(Numbers(8), batch_size=2, sampler=inner), [inner]),
        (DataLoader(Numbers(8), batch_size=None, sampler=inner), [inner]),
        (DataLoader(Numbers(8), batch_sampler=replaced), [replaced]),
    ]
    for source, samplers in sources:
        for ranks, rank in ((1, 0), (2, 1)):
            for sampler in samplers:
                sampler.epochs = []
            loader = prepare_data_loader(source, num_processes=ranks, process_index=rank)
            loader.set_epoch(5)
            assert [sampler.epochs for sampler in samplers] == [[5]] * len(samplers)
            list(loader)
            assert [sampler.epochs for sampler in samplers] == [[5]] * len(samplers)
            list(loader)
            assert [sampler.epochs for sampler in samplers] == [[5, 6]] * len(samplers)
    prepare_data_loader(DataLoader(Numbers(8), sampler=seedable)).set_epoch(3)
    assert seedable.epoch == 3


class SeedsOfWorkers(Numbers):
    def __getitem__(self, index):
        return get_worker_info().seed


@pytest.mark.processes
def test_workers_have_a_seed_of_torch_for_every_rank_epoch_and_seed():
    def seeds(rank, data_seed, generator=None):
        loader = DataLoader(SeedsOfWorkers(8), batch_size=2, num_workers=2, generator=generator)
        loader = prepare_data_loader(loader, num_processes=2, process_index=rank, data_seed=data_seed)
        return [int(seed) for _ in range(2) for batch in loader for seed in batch[:1]]

    everything = [seeds(rank, data_seed) for data_seed in (3, 4) for rank in range(2)]
    assert len({seed for of_rank in everything for seed in of_rank}) == 16
    assert seeds(1, 4) == everything[-1]
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    assert seeds(0, 3, generators[0]) == seeds(1, 4, generators[1]), "from the person's own generator"


class CountsPasses(BatchSampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.passes, self.first = 1000, 0

    def __iter__(self):
        self.passes += 1
        return ([index + self.first + 100 * (self.passes - 1000) for index in batch] for batch in super().__iter__())


class Identity:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("seedable", [False, True])
def test_later_changes_of_the_persons_samplers_are_followed(seedable):
    weighted = WeightedRandomSampler([1.0, 0.0, 0.0, 0.0], 4)
    subset, shuffled, passes = SubsetRandomSampler([0, 1]), RandomSampler(range(4)), RandomSampler(range(1))
    by_passes = CountsPasses(passes, 1, False)
    samplers = [{"sampler": weighted}, {"sampler": subset}, {"sampler": shuffled}, {"batch_sampler": by_passes}]
    sources = [DataLoader(Identity(), **sampler) for sampler in samplers]
    loaders = [prepare_data_loader(source, use_seedable_sampler=seedable) for source in sources]

    def drawn():
        return [sorted(int(index) for batch in loader for index in batch) for loader in loaders]

    assert drawn() == [[0] * 4, [0, 1], [0, 1, 2, 3], [100]]
    weighted.weights, subset.indices = torch.tensor([0.0, 0.0, 1.0, 0.0]), [3, 2, 1]
    shuffled.data_source, by_passes.first = range(3), 7
    loaders = [pickle.loads(pickle.dumps(loader)) for loader in loaders]  # as for a rank that replaces a lost one
    assert drawn() == [[2] * 4, [1, 2, 3], [0, 1, 2], [207]]
    assert drawn()[3] == [307], "what the copied sampler has counted stays"
    assert by_passes.passes == 1000


def test_prepared_loader_does_not_change_draws_of_the_main_process():
    loader = prepare_data_loader(DataLoader(Numbers(6), batch_size=2, shuffle=True))
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    assert torch.equal(torch.cat([torch.rand(1), *[torch.rand(1) for _ in loader]]), expected)


@pytest.mark.parametrize("count", [5, 6])
@pytest.mark.parametrize("error", [TypeError, NotImplementedError])
def test_a_stream_whose_length_raises_an_error_is_read_to_its_end(error, count):
    class Endless(Stream):
        def __len__(self):
            raise error("no length")

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    loader = accelerator.prepare(DataLoader(Endless(count), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5][: count - 4]]
    syncs = []
    for batch in loader:
        with accelerator.accumulate(model):
            syncs.append((len(batch), accelerator.sync_gradients))
    assert syncs == [(2, False), (2, True), (count - 4, True)]


def test_loaders_that_do_not_batch_deal_what_the_dataset_gives():
    class Batches(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.arange(index * 2, index * 2 + 2)

    class BatchStream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6).split(2))

    for source in (DataLoader(Batches(), batch_size=None), DataLoader(BatchStream(), batch_size=None)):
        assert [batches(loader) for loader in for_ranks(source, 2)] == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
        assert metrics(for_ranks(source, 2)) == list(range(6))


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_is_split_over_ranks_and_workers(persistent):
    source = DataLoader(Stream(11), batch_size=2, num_workers=2, persistent_workers=persistent)
    plain = Counter(i for batch in batches(DataLoader(Unaware(11), batch_size=2, num_workers=2)) for i in batch)
    assert set(plain.values()) == {2}, "the duplicate that torch gives"
    for dataset in (source, DataLoader(Unaware(11), 2, num_workers=2, persistent_workers=persistent)):
        loaders = for_ranks(dataset, 2, even_batches=False)
        for _ in range(2):
            assert metrics(loaders) == list(range(11))


class Twice(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


@pytest.mark.processes
@pytest.mark.parametrize("kind", [DataLoader, Twice])
def test_persistent_workers_that_an_interrupt_has_ended_are_replaced(kind):
    loader = prepare_data_loader(kind(Numbers(4), batch_size=2, num_workers=2, persistent_workers=True))
    first = batches(loader)
    workers = loader.base_dataloader._iterator._workers
    assert batches(loader) == first
    assert loader.base_dataloader._iterator._workers is workers
    os.kill(workers[0].pid, signal.SIGINT)  # the other one has not ended yet
    workers[0].join()
    assert batches(loader) == batches(loader) == first


class Interrupting(Numbers):
    """Interrupts the first pass, and returns the number of the process that reads."""

    def __init__(self, n):
        super().__init__(n)
        self.first = torch.tensor(0).share_memory_()

    def __getitem__(self, index):
        if not self.first:
            self.first.fill_(os.getpid())
            os.kill(os.getppid(), signal.SIGINT)
        return os.getpid()


@pytest.mark.slow
def test_a_pass_after_an_interrupt_does_not_wait_for_workers_that_are_about_to_end():
    # Iterators of earlier tests wait for their workers when they are collected, and Python swallows an interrupt then.
    gc.collect()
    dataset = Interrupting(2)
    loader = prepare_data_loader(
        DataLoader(dataset, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    )
    with pytest.raises(KeyboardInterrupt):
        batches(loader)
    [[reader], [same]] = batches(loader)
    assert reader == same != dataset.first.item() != 0


class Unaware(Stream):
    def __iter__(self):
        return iter(range(self.n))


class SharedEpoch(Unaware):
    """Keeps its epoch in memory that its copies in workers share, as the datasets of Hugging Face do."""

    def __init__(self, n):
        super().__init__(n)
        self.epoch, self.late = torch.tensor(0).share_memory_(), 0

    def set_epoch(self, epoch):
        self.late += get_worker_info() is not None and self.epoch.item() != epoch
        self.epoch += epoch - self.epoch

    def __iter__(self):
        return iter([(100 * self.epoch.item() + i, self.late) for i in range(self.n)])


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_find_the_epoch_set_where_they_share_it(persistent):
    source = DataLoader(SharedEpoch(4), batch_size=2, num_workers=2, persistent_workers=persistent)
    loader = prepare_data_loader(source)
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        loader.parts.source.dataset.epoch.fill_(epoch and epoch - 1)  # as if nobody but the pass had said it
        rows = [[row.tolist() for row in batch] for batch in loader]
        assert rows == [[[100 * epoch + i, 100 * epoch + i + 1], [0, 0]] for i in (0, 2)]


@pytest.mark.processes
def test_a_worker_start_that_splits_the_stream_finds_the_dataset_and_one_worker():
    source = DataLoader(Cut(8), batch_size=2, num_workers=2, worker_init_fn=cut)
    assert metrics(for_ranks(source, 1)) == list(range(8))


class Cut(IterableDataset):
    def __init__(self, n):
        self.start, self.end = 0, n

    def __iter__(self):
        return iter(range(self.start, self.end))


def cut(_worker):  # from torch's documentation of IterableDataset
    info = get_worker_info()
    end = info.dataset.end
    per_worker = -(-end // info.num_workers)
    info.dataset.start = info.id * per_worker
    info.dataset.end = min(info.dataset.start + per_worker, end)


@pytest.mark.parametrize("n", [0, 1])
def test_less_data_than_ranks(n):
    for even in (True, False):
        batches_by_rank = [
            batches(loader) for loader in for_ranks(DataLoader(Numbers(n), batch_size=1), 3, even_batches=even)
        ]
        assert batches_by_rank == ([[[0]] * n] * 3 if even else [[[0]] * n, [], []])


def test_skipped_batches_are_not_read_and_the_position_is_shared():
    dataset = Numbers(12)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=2), num_processes=2, process_index=1)
    skipping = skip_first_batches(loader, 2)
    assert (batches(skipping), len(skipping), len(loader)) == ([[10, 11]], 1, 3)
    assert dataset.read == [10, 11] and loader.position.epoch == 0
    assert batches(loader) == [[2, 3], [6, 7], [10, 11]]
    assert batches(skip_first_batches(DataLoader(dataset, batch_size=5), 1)) == [[5, 6, 7, 8, 9], [10, 11]]
    plain = skip_first_batches(DataLoader(Stream(5), batch_size=2), 1)
    assert batches(plain) == [[2, 3], [4]]
    with pytest.raises(InvalidArgument, match="-1"):
        skip_first_batches(loader, -1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("stateful", [False, True])
def test_position_is_published_after_a_loader_that_skips_has_ended(stateful):
    if stateful and not find_spec("torchdata"):
        pytest.skip("torchdata is not installed")
    loader = prepare_data_loader(DataLoader(Numbers(12), batch_size=2), use_stateful_dataloader=stateful)
    loader.tell("loader that is skipped")
    assert type(skip_first_batches(loader, 2)) is type(loader)
    assert batches(skip_first_batches(loader, 2)) == [[4, 5], [6, 7], [8, 9], [10, 11]]
    gc.collect()
    (position,) = telemetry.snapshot("loader that is skipped")
    assert (position.delivered, position.batches) == (6, 6)


def test_bad_options_are_errors_that_say_what_to_do():
    loader = DataLoader(Numbers(6), batch_size=2)
    for options, words in [
        ({"rng_types": ["dice"]}, "unknown rng type 'dice'; choose from generator"),
        ({"rng_types": ["dice", "torch", "xpu"]}, "unknown rng types 'dice', 'xpu'; choose from generator"),
        ({"rng_types": "torch"}, r"got the string 'torch'; pass \['torch'\]"),
        ({"slice_fn_for_dispatch": len}, "requires dispatch_batches=True"),
        ({"num_processes": 3, "process_index": 0, "split_batches": True}, r"batch size \(2\) % ranks \(3\)"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            prepare_data_loader(loader, **options)
    with pytest.raises(InvalidArgument, match="not a list"):
        prepare_data_loader([1, 2])
    with pytest.raises(InvalidArgument, match="has no batch_size"):
        prepare_data_loader(
            DataLoader(Numbers(4), batch_sampler=[[0], [1]]), num_processes=2, process_index=0, split_batches=True
        )


def test_torchdata_that_is_asked_for_and_not_there_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(InvalidArgument, match="pip install torchdata"):
        DataLoaderConfiguration(use_stateful_dataloader=True)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
def test_torchdata_gives_the_batches_where_asked_for():
    if not find_spec("torchdata"):
        pytest.skip("torchdata is not installed")
    from torchdata.stateful_dataloader import StatefulDataLoader

    for source in (DataLoader(Numbers(7), batch_size=2), StatefulDataLoader(Numbers(7), batch_size=2)):
        loader = prepare_data_loader(source, use_stateful_dataloader=True)
        assert batches(loader) == [[0, 1], [2, 3], [4, 5], [6]]
        assert isinstance(loader.base_dataloader, StatefulDataLoader)
        next(iter(loader))
        again = prepare_data_loader(source, use_stateful_dataloader=True)
        again.load_state_dict(loader.state_dict())
        assert batches(again) == [[2, 3], [4, 5], [6]] and len(batches(again)) == 4


def test_loader_reports_its_preparation():
    generator = torch.Generator()
    source = DataLoader(Numbers(4), sampler=RandomSampler(Numbers(4), generator=generator))
    loader = prepare_data_loader(source, rng_types=["torch", "generator"])
    assert (loader.rng_types, loader.use_stateful_dataloader) == (["torch", "generator"], False)
    assert loader.synchronized_generator is generator and loader.gradient_state is not None
    for batch in loader:
        assert loader.gradient_state.active_dataloader is loader, batch
    assert prepare_data_loader(DataLoader(Numbers(4))).synchronized_generator is None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
def test_a_loader_is_one_of_torchdata_where_asked_for():
    if not find_spec("torchdata"):
        pytest.skip("torchdata is not installed")
    from torchdata.stateful_dataloader import StatefulDataLoader

    prepared = prepare_data_loader(DataLoader(Numbers(7), batch_size=2), use_stateful_dataloader=True)
    for loader in (prepared, DataLoaderShard(Numbers(7), batch_size=2, use_stateful_dataloader=True)):
        for one in (loader, pickle.loads(pickle.dumps(loader)), copy.copy(loader), skip_first_batches(loader, 0)):
            assert isinstance(one, StatefulDataLoader) and isinstance(one, DataLoaderShard)
            assert one.use_stateful_dataloader and type(one).__name__ == "DataLoaderShard"
            assert batches(one) == [[0, 1], [2, 3], [4, 5], [6]]
    plain = prepare_data_loader(DataLoader(Numbers(7)))
    assert type(plain) is type(pickle.loads(pickle.dumps(plain))) is DataLoaderShard


def test_batches_are_put_on_the_device_where_asked():
    dataset = TensorDataset(torch.arange(4), torch.arange(4))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=4), device=torch.device("meta"), put_on_device=True)
    assert [tensor.device.type for tensor in next(iter(loader))] == ["meta", "meta"]
    loader = prepare_data_loader(DataLoader(dataset, batch_size=4), device=torch.device("meta"))
    assert [tensor.device.type for tensor in next(iter(loader))] == ["cpu", "cpu"]


def test_a_loader_made_by_hand_gives_what_its_samplers_give():
    loader = DataLoaderShard(Numbers(5), batch_size=2, skip_batches=1)
    assert (batches(loader), len(loader), loader.remainder) == ([[2, 3], [4]], 2, 1)


def test_loader_options_are_reported_by_name():
    options = DataLoaderConfiguration(data_seed=4).to_dict()
    assert options["data_seed"] == 4 and options["even_batches"] and options["dispatch_batches"] is None
    assert pickle.loads(pickle.dumps(DataLoaderConfiguration())) == DataLoaderConfiguration()


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp"), ("dp", "cp", "fsdp")])
def test_ranks_that_differ_along_tp_and_cp_alone_have_one_part(names):
    layout = torch.arange(2 ** len(names)).reshape([2] * len(names))
    mesh = SimpleNamespace(
        mesh=layout, mesh_dim_names=names, size=lambda axis=None: 2 if axis is not None else layout.numel()
    )
    parts = data_parallel_layout(mesh)
    for rank, part in enumerate(parts):
        coordinates = (layout == rank).nonzero()[0].tolist()
        mesh.get_local_rank = coordinates.__getitem__
        assert data_parallel_rank(mesh, layout.numel())[1] == part


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_loader_is_made_of_a_dataset_and_the_arguments_of_torch(kind):
    loader = kind(range(16), batch_size=4, skip_batches=1)
    for _ in range(2):
        ends = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        assert ends == [([4, 5, 6, 7], False), ([8, 9, 10, 11], False), ([12, 13, 14, 15], True)]
    assert isinstance(loader, DataLoader) and len(loader) == 3
    sampler = SeedableRandomSampler(range(16))
    loader = kind(range(16), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    loader.set_epoch(1)
    skipping = skip_first_batches(loader, 2)
    assert skipping.iteration == 1
    assert len(list(skipping)) == 2
    assert sampler.epoch == 1


def test_a_loader_that_skips_is_made_of_a_dataset_or_of_another_loader():
    for loader in (
        SkipDataLoader(range(16), batch_size=4, skip_batches=2),
        SkipDataLoader(DataLoader(range(16), 4), 2),
    ):
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert len(loader) == 2 and type(loader.base_dataloader) is DataLoader


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.skipif(not find_spec("torchdata"), reason="torchdata is not installed")
def test_loaders_that_are_made_with_a_state_continue_from_it():
    from torchdata.stateful_dataloader import StatefulDataLoader

    for kind, options in ((SkipDataLoader, {"skip_batches": 1}), (DataLoaderDispatcher, {}), (DataLoaderShard, {})):
        loader = kind(range(16), batch_size=4, use_stateful_dataloader=True, **options)
        assert isinstance(loader, kind) and isinstance(loader, StatefulDataLoader)
        batches, state = [], None
        for number, batch in enumerate(loader):
            batches.append(batch.tolist())
            if number == 1:
                state = loader.state_dict()
        other = kind(range(16), batch_size=4, use_stateful_dataloader=True, **options)
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == batches[2:], kind
        assert len(batches) == 4 - options.get("skip_batches", 0)


class Staged(Dataset):
    """Tells with each item the epoch that it was told last."""

    epoch = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_dataset_is_told_the_epoch_of_every_pass(options):
    more = {"multiprocessing_context": "fork"} if options else {}
    dataset = Staged()
    loader = Accelerator().prepare(DataLoader(dataset, batch_size=2, **options, **more))
    assert [[batch.tolist() for batch in loader] for _ in range(3)] == [[[epoch] * 2] * 2 for epoch in range(3)]
    loader.set_epoch(7)
    assert [batch.tolist() for batch in loader] == [[7, 7]] * 2 and dataset.epoch == 7
