"""An epoch that was begun with some ranks and is ended with others: all of its samples come, each of them once."""

from __future__ import annotations

import copy
import random
import warnings
from importlib.util import find_spec

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from rankbook.runtime import GradientState, prepare_data_loader
from rankbook.runtime.data import loaders, rng
from rankbook.runtime.data.loaders import DataLoaderDispatcher
from rankbook.runtime.gradient_state import AccumulationWindow

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, random.getrandbits(40)])


class Buckets(Sampler):
    """Batches of different sizes, of neighbours that are shuffled late, bucket by bucket."""

    def __init__(self, n, size):
        self.n, self.size = n, size

    def __iter__(self):
        for start in range(0, self.n, 3 * self.size):
            bucket = list(range(start, min(start + 3 * self.size, self.n)))
            random.shuffle(bucket)
            while bucket:
                batch = bucket[: 1 + len(bucket) % self.size]
                bucket = bucket[len(batch) :]
                yield batch

    def __len__(self):
        return sum(1 for _ in copy.copy(self))


class Shuffled(Sampler):
    """Draws late, as a sampler of indices."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for start in range(0, self.n, 5):
            order = list(range(start, min(start + 5, self.n)))
            random.shuffle(order)
            yield from order

    def __len__(self):
        return self.n


class Stream(IterableDataset):
    """A stream with a shuffle buffer and a state."""

    def __init__(self, n):
        self.n, self.at, self.buffer = n, 0, []

    def __iter__(self):
        self.at, self.buffer = (0, []) if self.at >= self.n and not self.buffer else (self.at, self.buffer)
        while self.at < self.n or self.buffer:
            while self.at < self.n and len(self.buffer) < 4:
                self.buffer.append(self.at)
                self.at += 1
            yield torch.tensor([self.buffer.pop(random.randrange(len(self.buffer))), random.getrandbits(40)])

    def __len__(self):
        return self.n

    def state_dict(self):
        return {"at": self.at, "buffer": list(self.buffer)}

    def load_state_dict(self, state):
        self.at, self.buffer = state["at"], list(state["buffer"])


class Stateless(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([index, index]) for index in range(22)])


def source_of(kind, n, size, ranks, rank):
    """The user's loader, and the options it is prepared with."""
    if kind == "sequential":
        return DataLoader(Numbers(n), size), {}
    if kind == "generator":
        sampler = RandomSampler(range(n), generator=torch.Generator().manual_seed(8))
        return DataLoader(Numbers(n), size, sampler=sampler), {}
    if kind == "sampler":
        return DataLoader(Numbers(n), size, sampler=Shuffled(n)), {}
    if kind == "batch sampler":
        return DataLoader(Numbers(n), batch_sampler=Buckets(n, size)), {}
    if kind == "split_batches":
        return DataLoader(Numbers(n), 12 * size, shuffle=True), {"split_batches": True}
    if kind == "dispatch_batches":
        return DataLoader(Numbers(n), size, shuffle=True), {"dispatch_batches": True}
    if kind == "dispatched stream":
        return DataLoader(Stream(n), size), {"dispatch_batches": True}
    if kind == "distributed sampler":
        return DataLoader(Numbers(n), size, sampler=DistributedSampler(Numbers(n), ranks, rank)), {}
    if kind == "stream":
        return DataLoader(Stream(n), size), {"use_stateful_dataloader": bool(find_spec("torchdata"))}
    shuffled = DataLoader(Numbers(n), size, shuffle=True)
    return shuffled, {"use_stateful_dataloader": kind == "StatefulDataLoader" and bool(find_spec("torchdata"))}


KINDS = [
    "shuffled",
    "sequential",
    "generator",
    "sampler",
    "batch sampler",
    "split_batches",
    "dispatch_batches",
    "StatefulDataLoader",
    "stream",
    "dispatched stream",
    "distributed sampler",
]


class Ranks:
    """The loaders of all ranks, read in step on this process."""

    def __init__(self, kind, n, size, ranks, even=True, epoch=0):
        rng._last_seed = None
        self.loaders, self.sent = [], {}
        for rank in range(ranks):
            source, options = source_of(kind, n, size, ranks, rank)
            loader = prepare_data_loader(
                source, num_processes=ranks, process_index=rank, data_seed=3, even_batches=even, **options
            )
            self.loaders.append(loader)
        self.ranks = ranks
        if isinstance(self.loaders[0], DataLoaderDispatcher):  # rank 0 reads, and the others get what it sends
            self.loaders[0]._group = object()
            del self.loaders[1:]
        for loader in self.loaders:
            loader.position.epoch = epoch - 1

    def load(self, state):
        for loader in self.loaders:
            loader.load_state_dict(copy.deepcopy(state))

    def read(self, stop=None):
        """Return the real rows of all ranks in order, the numbers that came, and the batches of every rank."""
        rows, numbers, batches, ends = [], [], [0] * self.ranks, []
        iterators = [iter(loader) for loader in self.loaders]
        while stop is None or max(batches) < stop:
            round_ = []
            for rank, iterator in enumerate(iterators):
                if (batch := next(iterator, None)) is not None:
                    round_.append((rank, batch, self.loaders[rank].share))
                    ends.append((rank, self.loaders[rank].end_of_dataloader))
            if not round_:
                break
            for rank, content in sorted(self.sent.items()):
                if not content.absent:
                    round_.append((rank, content.batch, content.share))
            for rank, batch, share in round_:
                batches[rank] += 1
                assert len(batch), "an empty batch"
                numbers += batch[:, 0].tolist()
                rows += batch.tolist() if share is None else batch.tolist()[: share.real[rank]]
        self.state = self.loaders[0].state_dict()
        for rank in range(len(self.loaders)):
            lasts = [last for number, last in ends if number == rank]
            assert not any(lasts[:-1]) and (stop is not None or not lasts or lasts[-1])
        return rows, numbers, batches


@pytest.fixture(autouse=True)
def wire(monkeypatch):
    """Send messages of the dispatcher to the `Ranks` that reads now."""
    current = []

    def send(message, rank, _group):
        tensors = list(message)
        content = loaders.unpack(lambda into: into.copy_(tensors.pop(0)))
        if content is not None:
            current[-1].sent[rank] = content
        return []

    monkeypatch.setattr(loaders, "send", send)
    read = Ranks.read
    monkeypatch.setattr(Ranks, "read", lambda self, stop=None: current.append(self) or read(self, stop))


def check_epoch(kind, n, size, even, worlds, stops):
    """Read an epoch with one number of ranks after another, each up to a number of rounds."""
    rows, state = [], None
    for ranks, stop in zip(worlds, [*stops, None], strict=True):
        group = Ranks(kind, n, size, ranks, even)
        if state is not None:
            group.load(state)
        pending = [len(loader) - loader.position.resume for loader in group.loaders]
        continued = bool(group.loaders[0].position.resume_after)
        real, numbers, batches = group.read(stop)
        rows += real
        state = group.state
        if state["finished"] and rows:
            break
    assert sorted(row[0] for row in rows) == list(range(n)), "each sample once"
    draws = [row[1] for row in rows]
    assert len(set(draws)) == n, "no two draw the same"
    if not continued:
        return rows
    if kind != "batch sampler":  # whose batches have sizes that nobody knows before
        assert pending == batches[: len(pending)]
    if even:
        assert len(set(batches)) == 1
        # Streams are not read ahead, and there is nothing to cut in batches of one sample.
        if len(real) >= ranks and size > 1 and kind not in {"stream", "dispatched stream", "batch sampler"}:
            assert len(numbers) == len(real), "no sample is repeated"
    else:
        assert len(numbers) == len(real)
    following = group.read()[0]
    assert [len(loader) for loader in group.loaders] == [
        len(loader) for loader in Ranks(kind, n, size, ranks, even).loaders
    ]
    if kind != "generator":
        assert following == Ranks(kind, n, size, ranks, even, epoch=1).read()[0], "the next epoch is as always"
    return rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 3),
    even=st.booleans(),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    stops=st.lists(st.integers(0, 5), min_size=2, max_size=2),
)
@example(n=37, size=2, even=True, worlds=[4, 3, 1], stops=[2, 1])
@example(n=37, size=2, even=True, worlds=[2, 4], stops=[8, 0])
@example(n=23, size=3, even=True, worlds=[1, 4, 3], stops=[1, 1])
def test_every_sample_comes_once_over_all_runs(kind, n, size, even, worlds, stops):
    if kind == "distributed sampler" and not even:
        even = True  # the sampler's own rule
    check_epoch(kind, n, size, even, worlds, stops[: len(worlds) - 1])


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_ranks_follows_each_other_after_any_number_of_batches(kind, before):
    n, size = 13, 2
    for stop in range(-(-n // (size * before)) + 1):
        for after in range(1, 5):
            check_epoch(kind, n, size, True, [before, after], [stop])


def test_a_run_that_is_resumed_twice_gives_what_one_that_is_resumed_once_gives():
    for kind in KINDS:
        first = Ranks(kind, 61, 2, 4)
        first.read(1)
        resumed_once = Ranks(kind, 61, 2, 3)
        resumed_once.load(first.state)
        expected = resumed_once.read()[0]
        parts = Ranks(kind, 61, 2, 3)
        parts.load(first.state)
        first_batches = parts.read(1)[0]
        again = Ranks(kind, 61, 2, 3)
        again.load(parts.state)
        assert again.loaders[0].state_dict()["samples"] == first.state["samples"] + len(first_batches)
        assert first_batches + again.read()[0] == expected, kind


def test_the_last_batches_are_smaller_and_no_rank_is_without_one():
    group = Ranks("sequential", 21, 4, 1)
    group.read(1)
    other_group = Ranks("sequential", 21, 4, 4)
    other_group.load(group.state)
    assert [len(loader) for loader in other_group.loaders] == [
        2
    ] * 4  # 17 samples: a round of 16 would leave 1 to 4 ranks
    sizes = [[len(batch) for batch in loader] for loader in other_group.loaders]
    assert sum(map(sum, sizes)) == 17 and {len(rank) for rank in sizes} == {2}
    assert {size for rank in sizes for size in rank} == {2, 3}


def test_fewer_samples_than_ranks_are_repeated_and_the_repetitions_are_known():
    group = Ranks("sequential", 9, 4, 1)
    group.read(2)
    other_group = Ranks("sequential", 9, 4, 3)
    other_group.load(group.state)
    real, numbers, batches = other_group.read()
    assert ([row[0] for row in real], numbers, batches) == ([8], [8, 8, 8], [1, 1, 1])
    assert other_group.loaders[0].remainder == 1


def test_what_drop_last_drops_is_an_incomplete_round():
    def dropping(ranks, rank):
        return prepare_data_loader(DataLoader(range(23), 2, drop_last=True), num_processes=ranks, process_index=rank)

    first = dropping(1, 0)
    for _, _ in zip(range(3), first, strict=False):
        state = first.state_dict()
    state["batches"], state["samples"] = 3, 6
    other_group = [dropping(4, rank) for rank in range(4)]
    rest = []
    for loader in other_group:
        loader.load_state_dict(state)
        assert len(loader) == 2
        rest.append([batch.tolist() for batch in loader])
    assert rest == [[[6 + 2 * rank, 7 + 2 * rank], [14 + 2 * rank, 15 + 2 * rank]] for rank in range(4)]


def test_another_batch_size_continues_after_the_same_samples():
    group = Ranks("shuffled", 40, 3, 2)
    samples = group.read(2)[0]
    other_group = Ranks("shuffled", 40, 5, 2)
    other_group.load(group.state)
    assert sorted(row[0] for row in samples + other_group.read()[0]) == list(range(40))


def test_an_older_checkpoint_loads_too():
    for kind in KINDS[:6]:
        group = Ranks(kind, 40, 2, 4)
        samples = group.read(1)[0]
        older = {name: value for name, value in group.state.items() if name not in {"samples", "earlier"}}
        other_group = Ranks(kind, 40, 2, 3)
        other_group.load(older)
        assert sorted(row[0] for row in samples + other_group.read()[0]) == list(range(40)), kind


def test_a_stream_without_a_state_starts_the_epoch_anew_with_a_warning():
    def loader(ranks):
        return prepare_data_loader(DataLoader(Stateless(), 2), num_processes=ranks, process_index=0, data_seed=3)

    first = loader(2)
    list(first)
    next(iter(first))
    state = first.state_dict()
    other = loader(1)
    with pytest.warns(
        UserWarning, match=r"starts epoch 1 anew: it was saved with 2 ranks .* cannot continue there with 1"
    ):
        other.load_state_dict(state)
    assert len(list(other)) == 11 and other.position.epoch == 1
    same = loader(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(state)
    assert len(list(same)) == 5


def test_batches_that_the_user_has_dealt_start_the_epoch_anew_with_a_warning():
    class Own(DistributedSampler):
        pass

    def loader(ranks):
        sampler = Own(range(24), ranks, 0, shuffle=False)
        return prepare_data_loader(DataLoader(range(24), 2, sampler=sampler), num_processes=ranks, process_index=0)

    first = loader(2)
    next(iter(first))
    other = loader(3)
    with pytest.warns(UserWarning, match="starts epoch 0 anew.* gives only the samples of one rank"):
        other.load_state_dict(first.state_dict())
    assert len(list(other)) == len(other) == 4


def test_a_left_loop_and_another_epoch_have_the_length_of_a_whole_pass():
    group = Ranks("shuffled", 40, 2, 4)
    group.read(2)
    loader = Ranks("shuffled", 40, 2, 1).loaders[0]
    loader.load_state_dict(group.state)
    assert len(loader) == 12
    for _ in loader:
        assert len(loader) == 12
        break
    assert len(loader) == 20
    loader.load_state_dict(group.state)
    loader.set_epoch(3)
    assert len(loader) == len(list(loader)) == 20


def test_a_window_of_accumulated_gradients_ends_with_the_rest_of_the_epoch():
    GradientState._reset_state()
    state = GradientState()
    state.plugin_kwargs = {"num_steps": 3}
    group = Ranks("shuffled", 40, 2, 4)
    group.read(1)
    loader = Ranks("shuffled", 40, 2, 2).loaders[0]
    loader.load_state_dict(group.state)
    window, steps = AccumulationWindow(), []
    for _ in loader:
        steps += [(window.begin_batch(state), window.divisor)]
    assert steps == [(False, 3), (False, 3), (True, 3), (False, 3), (False, 3), (True, 3), (False, 2), (True, 2)]
    GradientState._reset_state()
