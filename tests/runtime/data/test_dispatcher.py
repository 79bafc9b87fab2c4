"""Rank 0 reads for all: the same batches as if each had read its own, and its errors everywhere."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankbook.errors import PeerFailedError
from rankbook.runtime import GradientState, gather_object, prepare_data_loader, skip_first_batches
from rankbook.runtime.data.loaders import FIRST_BYTES, LARGE, pack, unpack
from tests.rank_processes import run_ranks


class Point(NamedTuple):
    x: torch.Tensor
    y: object


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor


def there_and_back(content):
    """Pack and unpack `content`, through a wire that is a list."""
    wire = pack(content)

    def fill(into):
        sent = wire.pop(0)
        assert sent.numel() == into.numel()
        into.numpy()[:] = sent.numpy()

    back = unpack(fill)
    assert not wire
    return back


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_any_picklable_leaf_passes_and_tensors_keep_shape_and_type():
    shapes = [(), (0, 3), (3,), (2, 5), (LARGE, 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        for shape in shapes:
            tensor = torch.randint(0, 2, shape).to(dtype)
            back = there_and_back(tensor)
            assert back.dtype == dtype and torch.equal(back, tensor)
            back.add_(1) if dtype != torch.bool else back.logical_not_()
    read_only, tagged = np.arange(LARGE), torch.ones(LARGE)
    read_only.flags.writeable = False
    tagged.source = "a file"
    batch = {
        "strings": ["a", "b" * 9000],
        "point": Point(torch.arange(3), None),
        "array": np.arange(6.0).reshape(2, 3),
        "strided": torch.arange(12).reshape(3, 4).t()[::2],
        "record": Record("r", torch.ones(2, requires_grad=True)),
        "bytes": b"x" * (LARGE + 1),
        "sparse": torch.eye(2).to_sparse(),
        "read-only": read_only,
        "tagged": tagged,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    back = there_and_back(batch)
    assert back["strings"] == batch["strings"] and type(back["point"]).__name__ == "Point"
    assert torch.equal(back["point"].x, batch["point"].x) and np.array_equal(back["array"], batch["array"])
    assert torch.equal(back["strided"], batch["strided"]) and back["bytes"] == batch["bytes"]
    assert back["record"].name == "r" and torch.equal(back["record"].values, batch["record"].values)
    assert torch.equal(back["sparse"].to_dense(), torch.eye(2)) and np.array_equal(back["read-only"], read_only)
    assert torch.equal(back["tagged"], tagged) and back["tagged"].source == "a file"
    assert back["conjugate"].item() == 1 - 2j and [len(row) for row in back["nested"].unbind()] == [2, 3]


def test_messages_of_any_length_arrive():
    for size in (0, FIRST_BYTES // 2, *range(FIRST_BYTES - 200, FIRST_BYTES + 10), 5 * FIRST_BYTES):
        assert there_and_back("x" * size) == "x" * size
    many = [torch.ones(LARGE // 8, dtype=torch.float64)] * (FIRST_BYTES // 8)  # their sizes alone fill the first tensor
    assert all(map(torch.equal, there_and_back([ones.view(-1) for ones in many]), many))


def test_a_small_batch_is_one_tensor_and_large_buffers_are_not_copied():
    small, large = {"x": torch.ones(32, 16), "y": [1, 2]}, torch.ones(LARGE)
    assert [tensor.numel() for tensor in pack(small)] == [FIRST_BYTES]
    assert [tensor.data_ptr() for tensor in pack([small, large])][1:] == [large.data_ptr()]


class Words(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"id": index, "word": f"w{index}", "draw": torch.rand(1), "large": torch.full((20_000,), index)}


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter({"id": i, "word": f"w{i}"} for i in range(self.n))


class Tenfold(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            batch["id"] = batch["id"] * 10
            yield batch


class Bad(Words):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError("record 5 is broken")
        return super().__getitem__(index)


class Unsendable(Words):
    def __getitem__(self, index):
        return {"id": index, "what": (lambda: index) if index == 6 else None}


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class OddlyBad(Words):
    def __getitem__(self, index):
        raise Unpicklable(1, 2)


def keep(batch):
    return batch


def read_batches(loader):
    """Return every batch of a rank: ids, words, draws, and the state of the loader; then its remainder."""
    batches = []
    for batch in loader:
        draws = batch.get("draw", torch.zeros(0)).flatten().tolist()
        batches.append((batch["id"].tolist(), batch["word"], draws, loader.end_of_dataloader, loader.share))
    return batches, loader.remainder, GradientState().in_dataloader


def same_as_read_by_each():
    results = []
    for options in (
        {"split_batches": False},
        {"split_batches": True},
        {"even_batches": False},
        {"even_batches": False, "split_batches": True},
    ):
        for source in (
            DataLoader(Words(7), batch_size=2, shuffle=True),
            DataLoader(Words(7), batch_size=2, num_workers=1, multiprocessing_context="fork"),
            DataLoader(Stream(7), batch_size=2),
            DataLoader(Words(1), batch_size=2),
            DataLoader(Words(0), batch_size=2),
            DataLoader(Stream(0), batch_size=2),
            Tenfold(Words(8), batch_size=2),
        ):
            loaders = [
                prepare_data_loader(source, data_seed=1, dispatch_batches=dispatch, **options)
                for dispatch in (True, False)
            ]
            assert [type(loader).__name__ for loader in loaders] == ["DataLoaderDispatcher", "DataLoaderShard"]
            for _ in range(2):
                dispatched, read_directly = (read_batches(loader) for loader in loaders)
                assert dispatched == read_directly, (options, source, dispatched, read_directly)
            if not isinstance(source, Tenfold) and isinstance(source.dataset, Words):
                assert [len(loader) for loader in loaders] == [len(read_directly[0])] * 2, (options, source)
            results.append(read_directly)
    skipping = skip_first_batches(prepare_data_loader(DataLoader(Words(8), 2), dispatch_batches=True), 1)
    results.append([batch["id"].tolist() for batch in skipping])
    for _ in skipping:
        break  # on every rank; the next loop is whole
    results.append([batch["id"].tolist() for batch in skipping])
    return results


@pytest.mark.processes
def test_dispatched_batches_equal_those_that_a_rank_reads_itself():
    first, second = run_ranks(same_as_read_by_each)
    assert first[0][0][0][0] != second[0][0][0][0]
    assert [first[-1], second[-1], first[-2]] == [[[4, 5]], [[6, 7]], [[4, 5]]]


def resumed():
    """Check that a loader continues after the state of every batch, while rank 0 reads ahead."""
    lengths = []
    for source in (
        DataLoader(Words(20), batch_size=2, shuffle=True),
        DataLoader(Words(20), batch_size=2, num_workers=1, multiprocessing_context="fork"),
        DataLoader(Stream(20), batch_size=2),
    ):
        first, states, batches = prepare_data_loader(source, data_seed=1, dispatch_batches=True), [], []
        for batch in first:
            batches.append((batch["id"].tolist(), batch.get("draw", torch.zeros(0)).tolist()))
            states.append(first.state_dict())
        following = read_batches(first)[0]
        for at in (1, 3):
            again = prepare_data_loader(source, data_seed=1, dispatch_batches=True)
            again.load_state_dict(states[at - 1])
            rest = [(batch["id"].tolist(), batch.get("draw", torch.zeros(0)).tolist()) for batch in again]
            assert rest == batches[at:] and read_batches(again)[0] == following, (source, at)
        lengths.append(len(batches))
    return lengths


@pytest.mark.processes
def test_the_next_batch_is_the_next_batch_however_far_rank_0_has_read():
    assert run_ranks(resumed) == [[5, 5, 5]] * 2


def bad_records():
    results = []
    for data in (Bad(8), Unsendable(8), OddlyBad(4)):
        loader = prepare_data_loader(DataLoader(data, 2, collate_fn=collate_plain), dispatch_batches=True)
        batch_ids, error = [], None
        try:
            for batch in loader:
                batch_ids.append(batch["id"])  # noqa: PERF401 - what came before the error counts
        except Exception as raised:  # noqa: BLE001 - which one it is, is what is asked
            error = raised
        results.append((batch_ids, type(error).__name__, str(error), getattr(error, "__notes__", [])))
        assert not GradientState().in_dataloader
        assert gather_object([dist.get_rank()]) == [0, 1]  # nobody waits for anybody
    return results


def collate_plain(records):
    return {name: [record[name] for record in records] for name in records[0]}


@pytest.mark.processes
def test_invalid_record_raises_on_every_rank():
    first, second = run_ranks(bad_records)
    assert first[0][:3] == ([[0, 1]], "LookupError", "record 5 is broken")
    assert second[0][1:3] == first[0][1:3] and "rank 0" in second[0][3][0]
    assert (first[1][1] == second[1][1] != "NoneType") and first[1][0] == [[0, 1]] and second[1][0] == [[2, 3]]
    assert first[2][1] == "Unpicklable" and second[2][1] == PeerFailedError.__name__
    assert "Unpicklable: 1 2" in second[2][2]


def own_slices():
    calls = []

    def cut(batch, part, process_index, num_processes):
        calls.append((part, process_index, num_processes))
        return {"id": batch["id"][part] + 100 * process_index}

    source = DataLoader([{"id": i} for i in range(6)], batch_size=2)
    loader = prepare_data_loader(source, dispatch_batches=True, slice_fn_for_dispatch=cut)
    return [batch["id"].tolist() for batch in loader], calls


@pytest.mark.processes
def test_a_slice_function_cuts_all_ranks_batches():
    first, second = run_ranks(own_slices)
    assert (first[0], second[0]) == ([[0, 1], [4, 5]], [[102, 103], [100, 101]])
    assert first[1][:2] == [(slice(0, 2), 0, 2), (slice(2, 4), 1, 2)] and second[1] == []


def test_streams_for_a_device_are_dispatched_unless_told_otherwise():
    options = {"num_processes": 2, "process_index": 1, "put_on_device": True}
    kinds = [
        type(prepare_data_loader(DataLoader(data), dispatch_batches=dispatch, **options)).__name__
        for data, dispatch in ((Stream(3), None), (Stream(3), False), (Words(3), None))
    ]
    assert kinds == ["DataLoaderDispatcher", "DataLoaderShard", "DataLoaderShard"]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [3])
def test_uneven_data_ends_for_each_rank_where_its_own_ends(world_size):
    def read():
        loader = prepare_data_loader(DataLoader(Words(5), 1), dispatch_batches=True, even_batches=False)
        return [(batch["id"].tolist(), loader.end_of_dataloader) for batch in loader]

    assert run_ranks(read, world_size) == [
        [([0], False), ([3], True)],
        [([1], False), ([4], True)],
        [([2], True)],
    ]


class Heavy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"id": index, "large": torch.full((60_000 + 70_000 * (index > 15),), float(index))}


def heavy_passes():
    """Keep all batches of several passes. One pass is interrupted."""
    loader = prepare_data_loader(DataLoader(Heavy(), batch_size=2), dispatch_batches=True)
    batches = []
    for turn in range(4):
        batches += list(loader)
        if turn == 2:
            for batch in loader:
                batches.append(batch)
                break
    wrong = [batch["id"] for batch in batches if not (batch["large"] == batch["id"][:, None]).all()]
    shapes = {tuple(batch["large"].shape) for batch in batches}
    ids = [batch["id"].tolist() for batch in batches]
    return wrong, ids, shapes, gather_object([dist.get_rank()])


@pytest.mark.processes
def test_large_tensors_arrive_and_later_batches_do_not_overwrite_them():
    first, second = run_ranks(heavy_passes)
    assert first[0] == second[0] == []
    assert second[1][:3] == [[2, 3], [6, 7], [10, 11]] and len(second[1]) == len(first[1]) == 25
    assert second[2] == {(2, 60_000), (2, 130_000)}
    assert first[3] == [0, 1]


class OfRank(IterableDataset):
    """A stream that is another one on every rank, as one from a queue is."""

    def __iter__(self):
        yield from [dist.get_rank()] * 8


def over_a_mesh(sizes):
    """Return the batches of a rank, dispatched and read directly, on a mesh with these axes; then an invalid record."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    results = []
    for source in (
        DataLoader(Words(7), batch_size=2, shuffle=True),
        DataLoader(Words(7), batch_size=2, num_workers=1, multiprocessing_context="fork"),
        DataLoader(Stream(7), batch_size=2),
        Tenfold(Words(8), batch_size=2),
        DataLoader(Words(0), batch_size=2),
    ):
        for options in ({}, {"even_batches": False}):
            loaders = [
                prepare_data_loader(source, data_seed=1, dispatch_batches=dispatch, torch_device_mesh=mesh, **options)
                for dispatch in (True, False)
            ]
            assert [type(loader).__name__ for loader in loaders] == ["DataLoaderDispatcher", "DataLoaderShard"]
            for _ in range(2):
                dispatched, read_directly = (read_batches(loader) for loader in loaders)
                assert dispatched == read_directly, (options, source, dispatched, read_directly)
            results.append(read_directly)
    own = prepare_data_loader(DataLoader(OfRank(), batch_size=2), dispatch_batches=True, torch_device_mesh=mesh)
    assert {batch.item() for batches in own for batch in batches} == {0}, "rank 0 reads for all"
    heavy = prepare_data_loader(DataLoader(Heavy(), batch_size=2), dispatch_batches=True, torch_device_mesh=mesh)
    for _ in range(2):
        for batch in heavy:
            batch["large"] += 1  # a rank's own: another one that got the same does not see it
            assert (batch["large"] == batch["id"][:, None] + 1).all()
    with pytest.raises(LookupError, match="record 5 is broken"):
        list(prepare_data_loader(DataLoader(Bad(8), 2), dispatch_batches=True, torch_device_mesh=mesh))
    assert gather_object([dist.get_rank()]) == list(range(dist.get_world_size()))
    return results


@pytest.mark.processes
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"dp_replicate": 2, "tp": 2}, marks=pytest.mark.slow),
        {"tp": 2, "dp_shard": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_one_tensor_parallel_group_are_sent_the_same(sizes):
    ranks = run_ranks(over_a_mesh, 2 ** len(sizes), sizes)
    if len(sizes) == 1:
        assert ranks[0] == ranks[1]
        return
    pairs = [(0, 1), (2, 3)] if [*sizes][1] == "tp" else [(0, 2), (1, 3)]
    assert all(ranks[one] == ranks[other] for one, other in pairs)
    assert ranks[0] != ranks[pairs[1][0]]
