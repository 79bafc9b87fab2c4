"""Numbers that plain torch draws twice, and a prepared loader does not: one row of the table per case.

Each case shows the duplicate first, over "ranks" that are told apart by number and by how they seed, as scripts do.
"""

# ruff: noqa: NPY002 - numpy's global state is one of the streams
from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankbook.runtime import prepare_data_loader, set_seed
from rankbook.runtime.data import rng

pytestmark = pytest.mark.processes

WORKERS = [
    pytest.param({"num_workers": 0}, id="no-workers"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}, id="fork-stay"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.full),
    pytest.param(
        {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
        id="spawn-stay",
        marks=pytest.mark.full,
    ),
]
EPOCHS = 2
SAMPLES = 16


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let a spawned worker find this module by its name, on the path that it is given."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def no_seed():
    rng._last_seed = None


class Draws(Dataset):
    """Dataset of one number per global stream. Equal numbers are almost certainly no coincidence."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor(
            [random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()], dtype=torch.float64
        )


class HeldDraws(Draws):
    """The same of generators that the dataset holds."""

    def __init__(self):
        self.numpy, self.python, self.torch = np.random.default_rng(0), random.Random(0), torch.Generator()

    def __getstate__(self):  # torch 2.13 cannot send a generator to a worker that is spawned
        return {"numpy": self.numpy, "python": self.python}

    def __setstate__(self, state):
        self.__dict__.update(state, torch=torch.Generator())

    def __getitem__(self, index):
        drawn = torch.rand((), dtype=torch.float64, generator=self.torch).item()
        return torch.tensor([self.python.random(), self.numpy.random(), drawn], dtype=torch.float64)


class DrawStream(IterableDataset):
    """Indices with a number each; every worker of a plain loader gives all of them."""

    def __iter__(self):
        return iter([torch.tensor([index, np.random.rand()], dtype=torch.float64) for index in range(SAMPLES)])


def numbers(loader):
    """Return the numbers drawn in one epoch, by stream."""
    return torch.cat(list(loader)).T.tolist()


def duplicated(*epochs):
    """Return the share of numbers that were drawn more than once: the maximum over the streams."""
    shares = []
    for draws in zip(*epochs, strict=True):
        counts = Counter(value for drawn in draws for value in drawn).values()
        shares.append(sum(count for count in counts if count > 1) / sum(counts))
    return max(shares)


def plain_and_prepared(make, options, seed_rank, *, every_epoch=False, prepare=True):
    """Return all epochs of two ranks, with plain loaders and with prepared loaders."""
    kinds = []
    for prepared in (False, True):
        epochs = []
        for rank in range(2):
            torch.manual_seed(0)
            seed_rank(rank)
            loader = make(rank, options)
            if prepared:
                loader = prepare_data_loader(loader, num_processes=2, process_index=rank, data_seed=prepare or None)
            for _ in range(EPOCHS):
                if every_epoch:
                    seed_rank(rank)
                epochs.append(numbers(loader))
        kinds.append(epochs)
    return kinds


def half_for_rank(dataset, options, **more):
    return DataLoader(dataset, batch_size=2, **options, **more)


@pytest.mark.parametrize("options", WORKERS)
def test_the_same_seed_on_every_rank(options):
    plain, prepared = plain_and_prepared(lambda _, o: half_for_rank(Draws(), o), options, lambda _: set_seed(3))
    assert duplicated(plain[0], plain[EPOCHS]) == 1
    assert duplicated(*prepared) == 0


@pytest.mark.parametrize("options", WORKERS)
def test_a_seed_for_each_rank_and_a_generator_that_all_share(options):
    def make(rank, o):
        return half_for_rank(Draws(), o, shuffle=True, generator=torch.Generator().manual_seed(5))

    def seed_rank(rank):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)

    plain, prepared = plain_and_prepared(make, options, seed_rank)
    if options["num_workers"]:  # the workers are seeded from the generator
        assert duplicated(plain[0], plain[EPOCHS]) == 1
    assert duplicated(*prepared) == 0


@pytest.mark.parametrize("options", WORKERS)
def test_generators_that_the_dataset_holds(options):
    plain, prepared = plain_and_prepared(lambda _, o: half_for_rank(HeldDraws(), o), options, lambda _: set_seed(3))
    assert duplicated(plain[0], plain[EPOCHS]) == 1, "across ranks"
    if options["num_workers"]:
        assert duplicated(plain[0]) == 1, "each number by both workers"
        if not options.get("persistent_workers"):
            assert plain[0] == plain[1], "across epochs"
    assert duplicated(*prepared) == 0


GENERATORS = {"numpy": np.random.default_rng(0)}
MANY = [random.Random(0) for _ in range(300)]


def draw_python(index):
    return MANY[index].random()


class ReachedDraws(Draws):
    """The same of generators in a global dict and in a long list, and of one that is made with the first sample."""

    lazy = None

    def __getitem__(self, index):
        if self.lazy is None:
            self.lazy = np.random.default_rng(5)
        drawn = [draw_python(index % 2), GENERATORS["numpy"].random(), self.lazy.random()]
        return torch.tensor(drawn, dtype=torch.float64)


@pytest.mark.parametrize("options", WORKERS)
def test_generators_that_only_the_code_of_the_dataset_names(options):
    _, prepared = plain_and_prepared(lambda _, o: half_for_rank(ReachedDraws(), o), options, lambda _: set_seed(3))
    assert duplicated(*prepared) == 0


@pytest.mark.parametrize("options", WORKERS)
def test_a_cell_that_seeds_and_is_run_again_each_epoch(options):
    plain, prepared = plain_and_prepared(
        lambda _, o: half_for_rank(Draws(), o), options, lambda _: set_seed(3), every_epoch=True, prepare=False
    )
    if not options.get("persistent_workers"):  # those are seeded once
        assert duplicated(*plain[:EPOCHS]) == 1
    assert duplicated(*prepared) == 0


@pytest.mark.parametrize("options", WORKERS)
def test_a_stream_is_not_read_once_per_worker(options):
    plain, prepared = plain_and_prepared(lambda _, o: half_for_rank(DrawStream(), o), options, lambda _: set_seed(3))
    indices = [Counter(epoch[0]) for epoch in plain]
    assert set(indices[0].values()) == {options["num_workers"] or 1}
    assert sorted(prepared[0][0] + prepared[EPOCHS][0]) == sorted(prepared[1][0] + prepared[EPOCHS + 1][0])
    assert sorted(prepared[0][0] + prepared[EPOCHS][0]) == list(range(SAMPLES))
    assert duplicated(*[epoch[1:] for epoch in prepared]) == 0


def test_what_is_drawn_does_not_depend_on_workers_and_the_same_seed_gives_the_same_run():
    runs = []
    for options in ({"num_workers": 0}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}):
        random.seed()
        np.random.seed()
        torch.seed()
        set_seed(9)
        loader = prepare_data_loader(
            half_for_rank(HeldDraws(), options, shuffle=True), num_processes=2, process_index=1
        )
        runs.append([numbers(loader), numbers(loader)])
    assert runs[0] == runs[1] == runs[2]
    set_seed(10)
    assert duplicated(numbers(loader), *runs[0]) == 0
    other = prepare_data_loader(half_for_rank(HeldDraws(), {}, shuffle=True), num_processes=2, process_index=1)
    set_seed(9)
    assert numbers(other) == runs[0][0]


def test_the_same_batch_draws_the_same_on_any_number_of_ranks():
    def rounds(ranks):
        loaders = [
            prepare_data_loader(half_for_rank(Draws(), {}), num_processes=ranks, process_index=rank, data_seed=1)
            for rank in range(ranks)
        ]
        return [batch.tolist() for batches in zip(*loaders, strict=True) for batch in batches]

    assert rounds(1) == rounds(2) == rounds(4)


def test_loader_without_workers_does_not_change_the_random_state_of_the_process():
    def main_draws(data):
        set_seed(4)
        return [(random.random(), np.random.randn(), torch.rand(1).item()) for _ in data]

    loader = prepare_data_loader(half_for_rank(HeldDraws(), {}, collate_fn=noisy))
    assert main_draws(loader) == main_draws(range(len(loader)))


def noisy(batch):
    return torch.stack(batch) + torch.rand(()) + random.random() + np.random.randn()
