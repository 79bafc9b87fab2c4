"""torchdata's loader in a prepared one: a dataset's own state goes on where it was, in each worker and on each rank."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankbook.runtime import Accelerator, DataLoaderConfiguration, prepare_data_loader
from rankbook.runtime.data.stateful import ReadPosition, restore_state
from tests.rank_processes import run_ranks

pytest.importorskip("torchdata", reason="it is the person's to install")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13


class Counting(Dataset):
    """Tells with each item how many this copy of it has read before."""

    def __init__(self, n=24):
        self.n, self.read = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read += 1
        return index, self.read

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def prepared(workers=0, dataset=None, **options):
    more = {"multiprocessing_context": "fork"} if workers else {}
    source = DataLoader(dataset or Counting(), batch_size=2, shuffle=True, num_workers=workers, **more)
    return prepare_data_loader(source, data_seed=3, use_stateful_dataloader=True, **options)


def as_lists(batches):
    return [[tensor.tolist() for tensor in batch] for batch in batches]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fresh_loader_goes_on_with_the_state_that_each_worker_s_dataset_had(workers):
    first = prepared(workers)
    all_batches, states = [], []
    for batch in first:
        all_batches += as_lists([batch])
        states.append(first.state_dict())
    assert all_batches[-1][1] == ([11, 12] if workers else [23, 24])
    for at in (1, 4, 7):
        again = prepared(workers)
        again.load_state_dict(states[at - 1])
        assert again.state_dict()["reader"] == states[at - 1]["reader"]  # not begun: what was loaded is told
        rest, second = [], None
        for batch in again:
            rest += as_lists([batch])
            second = second or again.state_dict()
        assert rest == all_batches[at:]
        third = prepared(workers)  # a pass that was resumed once is resumed again
        third.load_state_dict(second)
        assert as_lists(third) == all_batches[at + 1 :]


@pytest.mark.processes
def test_the_next_epoch_goes_on_with_it_too_where_no_worker_has_taken_it_along():
    first = prepared()
    list(first)
    state = first.state_dict()
    following = as_lists(first)
    again = prepared()
    again.load_state_dict(state)
    assert as_lists(again) == following and following[0][1] == [25, 26]
    assert list(prepared(2)) and prepared(2).state_dict()["reader"] is None


def test_another_epoch_leaves_what_was_loaded():
    first = prepared()
    next(iter(first))
    again = prepared()
    again.load_state_dict(first.state_dict())
    again.set_epoch(9)
    assert as_lists(again)[0][1] == [1, 2]


@pytest.mark.processes
def test_other_workers_get_the_batches_that_follow_and_a_warning():
    first = prepared(2)
    all_batches = [batch[0] for batch in as_lists(first)]
    stopped = prepared(2)
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    again = prepared(0)
    again.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match="rank 0 of 1 with 2 workers, but this is rank 0 of 1 with 0"):
        rest = as_lists(again)
    assert [batch[0] for batch in rest] == all_batches[3:] and rest[0][1] == [1, 2]


def test_dataset_without_a_state_is_saved_without_one():
    loader = prepared(dataset=range(8))
    next(iter(loader))
    assert "reader" not in loader.state_dict()


def over_a_checkpoint(folder, workers):
    def train(read):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(data_seed=3, use_stateful_dataloader=True))
        more = {"multiprocessing_context": "fork"} if workers else {}
        dataset = Counting()
        dataset.read = read * accelerator.process_index
        return accelerator, accelerator.prepare(
            DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers, **more)
        )

    accelerator, loader = train(100)
    all_batches = []
    for number, batch in enumerate(loader):
        all_batches += as_lists([batch])
        if number == 2:
            accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator, loader = train(0)
    accelerator.load_state(folder)
    return all_batches[3:], as_lists(loader)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_each_rank_s_own_state_is_in_a_checkpoint(tmp_path, workers):
    for rank, (remaining, rest) in enumerate(run_ranks(over_a_checkpoint, 2, str(tmp_path / "state"), workers)):
        assert rest == remaining and remaining[0][1] == [100 * rank + 7, 100 * rank + 8]


class Stream(IterableDataset):
    """Is where it is: a loop that is left goes on there. Draws with each sample; `read` counts what is made here."""

    def __init__(self, n=22):
        self.n, self.at, self.read, self.rng = n, 0, 0, np.random.default_rng()

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            self.read += 1
            yield self.at - 1, random.random(), self.rng.random()
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.rng = state["at"], np.random.default_rng()
        self.rng.bit_generator.state = state["rng"]


class StartingPoint(Stream):
    """Dataset like those of Hugging Face: it shows the loaded state once it is read, and begins every pass there."""

    loaded = None

    def __iter__(self):
        self.at = self.loaded or 0
        yield from super().__iter__()
        self.at = self.n

    def load_state_dict(self, state):
        self.loaded = state["at"]


class Iterated(IterableDataset):
    """The state is that of its iterators."""

    read = 0

    def __iter__(self):
        return Iterator(self, 22)


class Iterator(Stream):
    def __init__(self, dataset, n):
        super().__init__(n)
        self.dataset = dataset

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        self.dataset.read += 1
        return self.at - 1, random.random(), 0.0


class Itself(Iterator):
    """Dataset that is its own iterator and restarts."""

    def __init__(self):
        super().__init__(self, 22)

    def __iter__(self):
        self.at = 0
        return self


class Late(Itself):
    """Has a state once it is read, and not before."""

    def __init__(self):
        super().__init__()
        del self.at


class Stateless(IterableDataset):
    read = 0

    def __iter__(self):
        for index in range(22):
            self.read += 1
            yield index, random.random(), 0.0


def streaming(kind=Stream, workers=0, ranks=2, rank=1, **options):
    more = {"multiprocessing_context": "fork", "num_workers": workers, **options} if workers else {}
    return prepare_data_loader(
        DataLoader(kind(), batch_size=2, **more),
        num_processes=ranks,
        process_index=rank,
        data_seed=3,
        use_stateful_dataloader=True,
    )


def with_states(loader):
    batches, states = [], []
    for batch in loader:
        batches += as_lists([batch])
        states.append(loader.state_dict())
    return batches, states


KINDS = [Stream, StartingPoint, Iterated, Itself, Late, Stateless]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *[(dataset_kind, 0) for dataset_kind in KINDS],
        (Stream, 2),
        *[pytest.param(dataset_kind, 2, marks=pytest.mark.full) for dataset_kind in KINDS[1:]],
    ],
)
def test_stream_resumes_at_its_position(kind, workers):
    first = streaming(kind, workers)
    for epoch in range(2):
        all_batches, states = with_states(first)
        following = as_lists(first)
        assert [batch[0] for batch in all_batches] == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19], [0, 1]]
        for at in (1, 2, 5):
            again = streaming(kind, workers)
            again.load_state_dict(states[at - 1])
            rest, later = with_states(again)
            assert rest == all_batches[at:] and as_lists(again) == following, (epoch, at)
            if not workers:  # the first round fills up the last; one pass follows
                read = again.dataset.read - 22
                assert read == (22 if kind is Stateless else 22 - 4 * at + 4)
            if at == 2:  # resumed again, over a resumed pass
                third = streaming(kind, workers)
                third.load_state_dict(later[1])
                assert as_lists(third) == all_batches[4:] and as_lists(third) == following
        first.set_epoch(7 + epoch)
        list(first)


@pytest.mark.processes
@pytest.mark.parametrize("then", [0, 1, 2])
def test_a_stream_goes_on_with_any_number_of_workers(then):
    first = streaming(workers=2, prefetch_factor=4)
    all_batches, states = with_states(first)
    assert states[2]["reader"]["state"]["dataset"]["at"] == 12  # and not what was read ahead
    for now in {0, 1, 2} - {then}:
        again = streaming(workers=now, **({"persistent_workers": True} if now else {}))
        as_lists(again)
        following = as_lists(again)
        for at in (3, 4):
            again.load_state_dict(states[at - 1])
            assert as_lists(again) == all_batches[at:]
        again.set_epoch(1)
        assert as_lists(again) == following
        elsewhere = copy.deepcopy(states[2])  # it is the state that counts, and not the number of batches
        elsewhere["reader"]["state"]["dataset"]["at"] = 0
        again.load_state_dict(elsewhere)
        assert as_lists(again)[0][0] == [2, 3]


def test_a_stream_goes_on_at_another_world_size():
    _, states = with_states(streaming())
    for ranks in (1, 3, 4, 6):
        loaders = [streaming(ranks=ranks, rank=rank) for rank in range(ranks)]
        rest = []
        for other in loaders:
            other.load_state_dict(states[2])
            rest.append([batch[0] for batch in as_lists(other)])
            assert other.dataset.read == 10 and other.position.delivered == len(rest[-1])
        dealt = [index for batches in zip(*rest, strict=True) for batch in batches for index in batch]
        assert dealt[:10] == list(range(12, 22))
        assert dealt[10:] == ([20, 21] if ranks == 4 else [])  # two samples are left for four ranks


def test_a_state_that_does_not_fit_the_dataset_is_left_with_a_warning():
    stream, items = streaming(), prepared(num_processes=2, process_index=1)
    next(iter(stream))
    next(iter(items))
    for loader, other in ((streaming(), items), (prepared(num_processes=2, process_index=1), stream)):
        loader.load_state_dict(other.state_dict())
        with pytest.warns(UserWarning, match="another kind of dataset"):
            as_lists(loader)
    position = ReadPosition(resume=2, reader=stream.state_dict()["reader"])
    with pytest.warns(UserWarning, match="after 2 rounds, but rank 0 continues after 3"):
        assert restore_state(stream.parts.inner, stream.parts.fetch, (1, 2), position, 3) == 3


def a_stream_over_a_checkpoint(folder, workers, save):
    options = DataLoaderConfiguration(data_seed=3, use_stateful_dataloader=True, dispatch_batches=False)
    more = {"multiprocessing_context": "fork"} if workers else {}
    accelerator = Accelerator(dataloader_config=options)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2, num_workers=workers, **more))
    if not save:
        accelerator.load_state(folder)
        return as_lists(loader), loader.dataset.read
    all_batches = []
    for number, batch in enumerate(loader):
        all_batches += as_lists([batch])
        if number == 2:
            accelerator.save_state(folder)
    return all_batches


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_has_the_stream_s_state_for_as_many_ranks_and_for_others(tmp_path, workers):
    folder = str(tmp_path / "state")
    first = run_ranks(a_stream_over_a_checkpoint, 2, folder, workers, True)
    again = run_ranks(a_stream_over_a_checkpoint, 2, folder, workers, False)
    read = 0 if workers else 14
    assert again == [(all_batches[3:], read) for all_batches in first] and len(first[0]) == 6
    [(alone, read)] = run_ranks(a_stream_over_a_checkpoint, 1, folder, workers, False)
    assert [batch[0] for batch in alone] == [[at, at + 1] for at in range(12, 22, 2)] and read in {0, 10}
