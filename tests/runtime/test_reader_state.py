"""torchdata's loader in a prepared one: a dataset's own state goes on where it was, in each worker and on each rank."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, Dataset

from rankbook.runtime import Accelerator, DataLoaderConfiguration, prepare_data_loader
from tests.runtime.ranks import run_ranks

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


def told(batches):
    return [[each.tolist() for each in batch] for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fresh_loader_goes_on_with_the_state_that_each_worker_s_dataset_had(workers):
    first = prepared(workers)
    whole, states = [], []
    for batch in first:
        whole += told([batch])
        states.append(first.state_dict())
    assert whole[-1][1] == ([11, 12] if workers else [23, 24])
    for at in (1, 4, 7):
        again = prepared(workers)
        again.load_state_dict(states[at - 1])
        assert again.state_dict()["reader"] == states[at - 1]["reader"]  # not begun: what was loaded is told
        rest, second = [], None
        for batch in again:
            rest += told([batch])
            second = second or again.state_dict()
        assert rest == whole[at:]
        third = prepared(workers)  # a pass that was resumed once is resumed again
        third.load_state_dict(second)
        assert told(third) == whole[at + 1 :]


def test_the_next_epoch_goes_on_with_it_too_where_no_worker_has_taken_it_along():
    first = prepared()
    list(first)
    state = first.state_dict()
    following = told(first)
    again = prepared()
    again.load_state_dict(state)
    assert told(again) == following and following[0][1] == [25, 26]
    assert list(prepared(2)) and prepared(2).state_dict()["reader"] is None


def test_another_epoch_leaves_what_was_loaded():
    first = prepared()
    next(iter(first))
    again = prepared()
    again.load_state_dict(first.state_dict())
    again.set_epoch(9)
    assert told(again)[0][1] == [1, 2]


def test_other_workers_get_the_batches_that_follow_and_a_warning():
    first = prepared(2)
    whole = [batch[0] for batch in told(first)]
    stopped = prepared(2)
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    again = prepared(0)
    again.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match="rank 0 of 1 with 2 workers, and this is rank 0 of 1 with 0"):
        rest = told(again)
    assert [batch[0] for batch in rest] == whole[3:] and rest[0][1] == [1, 2]


def test_a_dataset_without_a_state_has_none_told():
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
    whole = []
    for number, batch in enumerate(loader):
        whole += told([batch])
        if number == 2:
            accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator, loader = train(0)
    accelerator.load_state(folder)
    return whole[3:], told(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_rank_s_own_state_is_in_a_checkpoint(tmp_path, workers):
    for rank, (whole, rest) in enumerate(run_ranks(over_a_checkpoint, 2, str(tmp_path / "state"), workers)):
        assert rest == whole and whole[0][1] == [100 * rank + 7, 100 * rank + 8]
