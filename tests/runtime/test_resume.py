"""A fresh loader continues with exactly the next batch; and on real ranks all agree on what comes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from rankbook.errors import InvalidArgument
from rankbook.runtime import (
    Accelerator,
    DataLoaderConfiguration,
    ParallelismConfig,
    PartialState,
    prepare_data_loader,
    set_seed,
    skip_first_batches,
    synchronize_rng_states,
)
from rankbook.runtime.data import rng
from rankbook.runtime.data.stateful import ReadPosition
from tests.rank_processes import run_ranks


@pytest.fixture(autouse=True)
def no_seed():
    rng._last_seed = None


class Augmented(Dataset):
    def __init__(self, n=24):
        self.n = n
        self.rng = np.random.default_rng()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), self.rng.random()], dtype=torch.float64)


class AugmentedStream(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([index, random.random()], dtype=torch.float64) for index in range(24)])


def fresh(data, ranks, rank, size=2, own_generator=False, **options):
    """Return a loader as a new process creates it, without a seed."""
    rng._last_seed = None
    torch.seed()
    shuffle = {} if isinstance(data, IterableDataset) else {"shuffle": True}
    if own_generator:
        shuffle["generator"] = torch.Generator().manual_seed(int(torch.randint(1000, ())))
    return prepare_data_loader(DataLoader(data, size, **shuffle, **options), num_processes=ranks, process_index=rank)


def take_batches(loader, batches):
    """The first so many batches of a loop that is left then."""
    read = []
    for _, batch in zip(range(batches), loader, strict=False):
        read.append(batch.tolist())
        if len(read) == batches:
            break
    return read


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True], ids=["ours", "own-generator"])
def test_the_next_batch_is_the_next_batch(workers, own_generator):
    options = {"num_workers": workers}
    for done in (0, 1, 3):
        first = fresh(Augmented(), 2, 1, own_generator=own_generator, **options)
        list(first)
        if done:
            take_batches(first, done)
        state = first.state_dict()
        assert (state["epoch"], state["batches"], state["finished"]) == ((1, done, False) if done else (0, 6, True))
        again = fresh(Augmented(), 2, 1, own_generator=own_generator, num_workers=2 - workers)
        again.load_state_dict(state)
        assert again.state_dict()["batches"] == (done or 0)
        rest = [batch.tolist() for batch in again]
        full_loader = fresh(Augmented(), 2, 1, own_generator=own_generator, **options)
        full_loader.load_state_dict({**state, "batches": 0, "finished": not done})
        expected = [batch.tolist() for batch in full_loader]
        assert rest == expected[done:] and len(expected) == 6
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in full_loader], "the epoch after it"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_resumed_in_the_middle(workers):
    first = fresh(AugmentedStream(), 2, 0)
    first_batches = take_batches(first, 2)
    again = fresh(AugmentedStream(), 2, 0, num_workers=workers)
    again.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in again]
    assert [row[0] for batch in first_batches + rest for row in batch] == [i for i in range(24) if i % 4 < 2]
    full_loader = fresh(AugmentedStream(), 2, 0)
    full_loader.load_state_dict({**first.state_dict(), "batches": 0})
    assert [batch.tolist() for batch in full_loader] == first_batches + rest


def test_a_resumed_run_may_have_another_world_size():
    loaders = [fresh(Augmented(), 2, rank) for rank in range(2)]
    loaders[1].load_state_dict({**loaders[0].state_dict(), "seed": 5})
    loaders[0].load_state_dict(loaders[1].state_dict())
    samples = [
        row[0] for pair in zip(*[take_batches(loader, 3) for loader in loaders], strict=True) for b in pair for row in b
    ]
    state = loaders[0].state_dict()
    for ranks in (1, 3, 4, 6):
        other_loaders = [fresh(Augmented(), ranks, rank) for rank in range(ranks)]
        for other in other_loaders:
            other.load_state_dict(state)
        rest = [row[0] for batches in zip(*other_loaders, strict=True) for batch in batches for row in batch.tolist()]
        assert sorted(samples + rest) == list(range(24)), ranks
    assert len(list(fresh(Augmented(), 4, 0))) == 3


@pytest.mark.parametrize("is_longer_first", [False, True])
def test_the_longer_of_two_loaders_that_are_read_in_turn_begins_its_next_epoch(is_longer_first):
    def epoch(short, long):
        pairs = zip(*((long, short) if is_longer_first else (short, long)), strict=False)
        return [[batch.tolist() for batch in pair] for pair in pairs]

    first = [fresh(Augmented(n), 2, 1) for n in (12, 24)]
    assert len(epoch(*first)) == 3
    assert first[1].seen().epoch == 0 and not first[1].position.finished, "it has samples that nobody has read"
    states = [loader.state_dict() for loader in first]
    assert [(state["epoch"], state["finished"]) for state in states] == [(0, True)] * 2
    again = [fresh(Augmented(n), 2, 1) for n in (12, 24)]
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert epoch(*again) == epoch(*first)


def test_an_outer_loop_and_an_iterator_that_is_kept_go_on_in_the_middle():
    loaders = [fresh(Augmented(n), 1, 0) for n in (24, 4)]
    outer, inner = loaders
    for number, _batch in enumerate(outer):
        assert len(list(inner)) == 2
        if number == 3:
            break
    assert (outer.state_dict()["batches"], outer.state_dict()["finished"]) == (4, False)
    kept = iter(outer)
    for _batch in inner:
        next(kept)
    assert outer.state_dict()["batches"] == 2
    for _batch in inner:
        next(kept)
    next(kept)
    kept.close()
    assert (outer.state_dict()["batches"], outer.state_dict()["finished"]) == (5, False)


def test_a_loop_that_another_loader_goes_on_in_is_continued_in_the_middle():
    long, short = [fresh(Augmented(n), 1, 0) for n in (24, 4)]
    inner = iter(short)
    for number, _batch in enumerate(long):
        if next(inner, None) is None:
            inner = iter(short)
            next(inner)
        if number == 2:  # the first pass of the short one has ended in this batch, and its second one has begun
            break
    assert (long.state_dict()["batches"], long.state_dict()["finished"]) == (3, False)


def test_loaders_that_share_a_generator_continue_in_the_order_of_a_run_that_goes_on():
    def make():
        generator = torch.Generator().manual_seed(8)
        rng._last_seed = None
        return [prepare_data_loader(DataLoader(Augmented(), 4, shuffle=True, generator=generator)) for _ in range(3)]

    def orders(loaders):
        return [[row[0] for batch in loader for row in batch.tolist()] for loader in loaders]

    first = make()
    orders(first)
    states = [loader.state_dict() for loader in first]
    again = make()
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    # Of the same state, which it leaves as it is.
    assert again[1].peek()[:, 0].tolist() == again[0].peek()[:, 0].tolist()
    assert [orders(again) for _ in range(2)] == [orders(first) for _ in range(2)]


def test_another_epoch_is_begun_at_its_start():
    loader = fresh(Augmented(), 1, 0)
    take_batches(loader, 3)
    for epoch, batches in ((0, 9), (4, 12)):
        again = fresh(Augmented(), 1, 0)
        again.load_state_dict(loader.state_dict())
        again.set_epoch(epoch)
        assert (len(list(again)), again.position.epoch) == (batches, epoch)


def test_a_resumed_loader_does_not_skip_the_same_batches_again():
    first = fresh(Augmented(), 2, 1)
    first_batches = take_batches(first, 4)
    again = fresh(Augmented(), 2, 1)
    again.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in skip_first_batches(again, 4)]
    assert len(rest) == 2
    full_loader = fresh(Augmented(), 2, 1)
    full_loader.load_state_dict({**first.state_dict(), "batches": 0})
    assert [batch.tolist() for batch in full_loader] == first_batches + rest
    assert len(list(again)) == 6, "the epoch after it"


def test_incomplete_loader_state_is_refused():
    with pytest.raises(InvalidArgument, match="missing batches, epoch, finished"):
        fresh(Augmented(), 1, 0).load_state_dict({"seed": 1})
    state = ReadPosition().state_dict(1, 2)
    assert (state["epoch"], state["batches"], state["finished"]) == (-1, 0, True)
    other = ReadPosition()
    other.load_state_dict(state, 1, 2, None)
    assert other.next_epoch() == 0


def ranks_agree():
    rank = dist.get_rank()
    set_seed(rank, device_specific=True)
    torch.manual_seed(100 + rank)
    loader = prepare_data_loader(DataLoader(Augmented(), 2, shuffle=True), rng_types=["generator", "torch"])
    epochs = [[batch[:, 0].tolist() for batch in loader] for _ in range(2)]
    drawn = torch.rand(1).item()
    generator = torch.Generator().manual_seed(rank)
    prepared_loader = prepare_data_loader(DataLoader(Augmented(), 2, shuffle=True, generator=generator))
    epochs.append([batch[:, 0].tolist() for batch in prepared_loader])
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the global state is what is made the same
    synchronize_rng_states(["python", "numpy", "generator"], generator)
    same = [random.random(), np.random.rand(), torch.rand(1, generator=generator).item()]  # noqa: NPY002
    try:
        synchronize_rng_states(["dice"])
    except InvalidArgument as error:
        return epochs, loader.state_dict()["seed"], drawn, same, str(error)
    return None


@pytest.mark.processes
def test_ranks_that_were_seeded_apart_agree_on_shuffle_and_epoch():
    first, second = run_ranks(ranks_agree)
    for one, other in zip(first[0], second[0], strict=True):
        assert sorted(i for batch in one + other for i in batch) == list(range(24))
    assert first[0][0] != first[0][1]
    assert first[1] == second[1] == 0
    assert first[2:] == second[2:] and "unknown rng type 'dice'" in first[4]


def test_set_seed_seeds_everything_and_each_rank_apart_where_asked():
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    set_seed(5)
    same = draws()
    set_seed(5)
    assert draws() == same and rng.run_seed() == 5
    set_seed(5, device_specific=True)
    first = draws()
    PartialState().process_index = 1
    set_seed(5, device_specific=True)
    assert len({same, first, draws()}) == 3 and rng.run_seed() == 5
    set_seed(5, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    with pytest.raises(InvalidArgument, match="requires a generator"):
        synchronize_rng_states(["generator"])


def test_ranks_of_a_tensor_parallel_group_are_seeded_alike():
    """They compute on the same batch: with other dropout masks, parameters outside of the plan would drift apart."""
    Accelerator().state.parallelism_config = ParallelismConfig(dp_replicate_size=2, tp_size=2)
    drawn = []
    for rank in range(4):
        PartialState().process_index = rank
        set_seed(5, device_specific=True)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def train_from(folder, kind, stop):
    """The samples that the ranks read together, from the checkpoint that is there on, until `stop` batches."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatch_batches"))
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    sampler = None
    if kind == "generator":
        sampler = RandomSampler(range(37), generator=torch.Generator().manual_seed(5))
    data = TensorDataset(torch.arange(37.0).view(-1, 1))
    loader = DataLoader(data, 2, shuffle=sampler is None, sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if stop is None:
        accelerator.load_state(folder)
    loaded = next(iter(model.parameters())).item(), optimizer.param_groups[0]["lr"]
    samples, ended = [], []
    for (rows,) in loader:
        accelerator.backward(model(rows).mean())
        optimizer.step()
        optimizer.zero_grad()
        samples += accelerator.gather_for_metrics(rows).flatten().int().tolist()
        ended.append(accelerator.gradient_state.end_of_dataloader)
        if len(ended) == stop:
            for group in optimizer.param_groups:
                group["lr"] = 0.25
            accelerator.save_state(folder)
            return samples, (next(iter(model.parameters())).item(), 0.25)
    assert ended == [False] * (len(ended) - 1) + [True]
    following = [row for (rows,) in loader for row in accelerator.gather_for_metrics(rows).flatten().int().tolist()]
    return samples, loaded, following


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "stop", "others"),
    [
        ("shuffled", 3, 2, (1, 2)),
        ("shuffled", 2, 5, (3,)),
        ("generator", 2, 5, (3,)),
        ("dispatch_batches", 3, 2, (2,)),
    ],
)
def test_another_number_of_ranks_loads_in_the_middle_of_an_epoch(tmp_path, kind, before, stop, others):
    folder = str(tmp_path / "state")
    first, saved = run_ranks(train_from, before, folder, kind, stop, timeout=240)[0]
    for after in others:
        for samples, loaded, following in run_ranks(train_from, after, folder, kind, None, timeout=240):
            assert sorted(first + samples) == list(range(37))
            assert loaded == saved and sorted(following) == list(range(37))


def samples_of(batches):
    return [row[0] for batch in batches for row in batch.tolist()]


def test_a_generator_that_is_seeded_in_every_epoch_gives_the_order_of_a_run_that_goes_on():
    def epoch(loader, generator, number):
        generator.manual_seed(1000 + number)
        return samples_of(loader)

    def make():
        generator = torch.Generator()
        return prepare_data_loader(DataLoader(Augmented(), 4, shuffle=True, generator=generator)), generator

    first = make()
    epoch(*first, 0)
    state = first[0].state_dict()
    again = make()
    again[0].load_state_dict(state)
    assert torch.equal(again[1].get_state(), state["generator"]), "restored at once"
    assert [epoch(*again, number) for number in (1, 2)] == [epoch(*first, number) for number in (1, 2)]


def test_a_resumed_pass_leaves_a_shared_generator_to_a_loader_that_was_saved_after_its_pass():
    def make():
        generator = torch.Generator().manual_seed(8)
        rng._last_seed = None
        return [prepare_data_loader(DataLoader(Augmented(), 4, shuffle=True, generator=generator)) for _ in range(2)]

    first, again = make(), make()
    running = iter(first[0])
    next(running)
    samples_of(first[1])
    for loader, state in zip(again, [loader.state_dict() for loader in first], strict=True):
        loader.load_state_dict(state)
    resumed = iter(again[0])
    assert next(resumed).tolist() == next(running).tolist()
    assert samples_of(again[1]) == samples_of(first[1])


@pytest.mark.parametrize("before", [None, 0])
def test_a_seed_that_is_set_after_a_load_counts_from_the_next_epoch_on(before):
    def make():
        rng._last_seed = None
        if before is not None:
            set_seed(before)
        return prepare_data_loader(DataLoader(Augmented(), 2, shuffle=True))

    first = make()
    begun = [row[0] for batch in take_batches(first, 4) for row in batch]
    again = make()
    again.load_state_dict(first.state_dict())
    set_seed(1)
    assert sorted(begun + samples_of(again)) == list(range(24))
    following = samples_of(again)
    other = prepare_data_loader(DataLoader(Augmented(), 2, shuffle=True))
    other.set_epoch(1)
    del again, first
    set_seed(1)
    assert following == samples_of(other)


@pytest.mark.parametrize("data", [Augmented, AugmentedStream])
@pytest.mark.parametrize("own_generator", [False, True], ids=["ours", "own-generator"])
def test_a_loop_that_goes_on_after_a_load_keeps_its_position(data, own_generator):
    own_generator = own_generator and data is Augmented
    loader = fresh(data(), 2, 1, own_generator=own_generator)
    finished, epoch = loader.state_dict(), []
    with pytest.warns(UserWarning, match="at the load goes on, after batch 4 of epoch 0"):  # noqa: PT031
        for number, batch in enumerate(loader, 1):
            epoch.append(batch.tolist())
            if number == 2:
                saved = loader.state_dict()
            if number == 4:
                loader.load_state_dict(finished)
                loader.load_state_dict(saved)
            if number == 5:
                later = loader.state_dict()
    assert loader.parts.tickets.current.run == loader.position.run, "`seen` and the number of samples are of this pass"
    assert (len(epoch), later["batches"], later["samples"], loader.iteration) == (6, 5, 20, 1)
    again = fresh(data(), 2, 1, own_generator=own_generator)
    again.load_state_dict(later)
    assert [row[0] for row in next(iter(again)).tolist()] == [row[0] for row in epoch[5]]
    assert len(list(loader)) == 6


@pytest.mark.parametrize("at", [4, 6])
def test_a_loop_that_ends_after_a_load_is_followed_by_the_loaded_position(at):
    loader, epoch = fresh(Augmented(), 2, 1), []
    for number, batch in enumerate(loader, 1):
        epoch.append(batch.tolist())
        if number == 2:
            saved = loader.state_dict()
        if number == at:
            loader.load_state_dict(saved)
            if at == 4:
                break
    rest = [batch.tolist() for batch in loader]
    assert len(rest) == 4 and rest[: at - 2] == epoch[2:]
