"""`gather_for_metrics` gives each sample of the dataset once and in order, whatever the loader adds or leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from rankbook.errors import InvalidArgument
from rankbook.runtime import Accelerator, DataLoaderConfiguration
from rankbook.runtime.state import AcceleratorState
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes

CASES = [
    # samples, batch size, loader options
    *[(0, 2, options) for options in ({}, {"dispatch_batches": True}, {"even_batches": False}, {"iterable": True})],
    *[(n, b, {}) for n in (1, 5, 8, 9, 13) for b in (2, 4)],
    *[(n, b, {"even_batches": False}) for n in (1, 2, 5, 9, 13) for b in (2, 4)],
    *[(n, 6, {"split_batches": True}) for n in (5, 13, 14)],
    *[(n, 6, {"split_batches": True, "even_batches": False}) for n in (13, 14)],
    *[(n, 2, {"dispatch_batches": True}) for n in (5, 9)],
    *[(n, 2, {"iterable": True}) for n in (5, 9)],
    *[(n, 2, {"iterable": True, "dispatch_batches": False}) for n in (5, 9)],
]


def gather_all(cases):
    class Stream(IterableDataset):
        def __init__(self, length):
            self.length = length

        def __iter__(self):
            yield from range(self.length)

    results = []
    for samples, size, extra_options in cases:
        options = dict(extra_options)
        data = Stream(samples) if options.pop("iterable", False) else list(range(samples))
        AcceleratorState._reset_state()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        loader = accelerator.prepare(DataLoader(data, batch_size=size))
        samples_seen, objects = [], []
        for batch in loader:
            gathered = accelerator.gather_for_metrics({"rows": (batch, batch * 2)})
            assert gathered["rows"][1].tolist() == [2 * value for value in gathered["rows"][0].tolist()]
            samples_seen += gathered["rows"][0].tolist()
            objects += accelerator.gather_for_metrics([str(number) for number in batch.tolist()])
            tokens = accelerator.gather_for_metrics((batch[:, None] * 3 + torch.arange(3)).flatten())
            first_tokens = (3 * value for value in gathered["rows"][0].tolist())
            assert tokens.tolist() == [first + number for first in first_tokens for number in range(3)]
        for _ in loader:
            break
        rank = accelerator.process_index  # a loop that was left has no part in what comes after it
        assert accelerator.gather_for_metrics(torch.tensor([rank])).tolist() == list(range(accelerator.num_processes))
        results.append((samples_seen, objects))
    return results


def check(ranks):
    for rank, results in enumerate(run_ranks(gather_all, ranks, CASES)):
        for case, (gathered, objects) in zip(CASES, results, strict=True):
            samples, size, options = case
            expected = list(range(samples))
            if options.get("even_batches") is False and rank > 0:  # without a last batch it does not hear of that round
                expected = expected[: len(gathered)]
                assert len(gathered) >= samples // (size * ranks) * size * (1 if "split_batches" in options else ranks)
            assert gathered == expected, case
            assert objects == [str(number) for number in expected], case


def test_each_sample_comes_once_and_in_order_on_two_ranks():
    check(2)


def test_each_sample_comes_once_and_in_order_on_three_ranks():
    check(3)


def gather_objects(size, even):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
    loader = accelerator.prepare(DataLoader(list(range(7)), batch_size=size))
    found = {"tensors": [], "flagged": [], "dicts": [], "tuple": [], "rows": []}
    for batch in loader:
        words = [f"{number}" for number in batch.tolist()]
        boxes = [torch.full((number % 3 + 4,), float(number)) for number in batch.tolist()]
        found["flagged"] += accelerator.gather_for_metrics(boxes, use_gather_object=True)
        found["dicts"] += accelerator.gather_for_metrics(
            [{"id": w, "box": b} for w, b in zip(words, boxes, strict=True)]
        )
        found["tuple"] += accelerator.gather_for_metrics(tuple(words))
        found["rows"] += accelerator.gather_for_metrics(batch, use_gather_object=True)
    return found


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_objects_with_tensors_and_tuples_are_samples_too(size, even):
    first, second = run_ranks(gather_objects, 2, size, even)
    for found in (first, second) if even else (first,):  # without a last batch the other does not hear of that round
        assert [(len(box), box[0]) for box in found["flagged"]] == [(n % 3 + 4, n) for n in range(7)]
        assert [(each["id"], len(each["box"])) for each in found["dicts"]] == [(str(n), n % 3 + 4) for n in range(7)]
        assert found["tuple"] == [str(n) for n in range(7)] and [int(row) for row in found["rows"]] == list(range(7))


@dataclass
class Output:
    scores: np.ndarray
    names: tuple


def gather_columns(size, even):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
    if accelerator.use_distributed:
        columns = ["text", "mask"][:: -1 if accelerator.process_index else 1]
        with pytest.raises(InvalidArgument, match=r"arguments differ between ranks:\n  rank 0: \['text', 'mask'\]"):
            accelerator.gather_for_metrics({name: ["a"] for name in columns})
        with pytest.raises(InvalidArgument, match="expected a list on every rank, got float on rank 0; pass"):
            accelerator.gather_for_metrics({"loss": 0.5, "text": ["a"]})
    found = []
    for batch in accelerator.prepare(DataLoader(list(range(7)), batch_size=size)):
        words = [str(number) for number in batch.tolist()]
        mapping = accelerator.gather_for_metrics({"pred": batch, "text": words, "nested": {"text": tuple(words)}})
        names, rows = accelerator.gather_for_metrics((words, batch))
        output = accelerator.gather_for_metrics(Output(batch.numpy(), tuple(words)))
        assert isinstance(output, Output) and isinstance(rows, torch.Tensor)
        sent = accelerator.gather_for_metrics({"pred": batch}, use_gather_object=True)["pred"]
        columns = [mapping["text"], mapping["nested"]["text"], names, output.names, rows, output.scores, sent]
        found += zip(mapping["pred"].tolist(), *columns, strict=True)
    return [(first, {int(value) for value in others}) for first, *others in found]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_columns_that_are_not_all_tensors_are_gathered_one_by_one(size, even):
    expected = [(number, {number}) for number in range(7)]
    first, second = run_ranks(gather_columns, 2, size, even)
    assert first == expected
    # Without a last batch the other rank does not hear of that round.
    assert second == (expected[:6] if size == 1 and not even else expected)


def test_columns_of_one_process_are_gathered_one_by_one():
    assert gather_columns(2, True) == [(number, {number}) for number in range(7)]


@pytest.mark.parametrize("samples", [11, 12, 16])
def test_a_repeated_mean_counts_the_samples_of_a_short_last_batch(samples):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(float(samples)), batch_size=8))
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(8)) for batch in loader]
    assert torch.cat(losses).mean() == torch.arange(float(samples)).mean()
    # Two rows per sample stay, also where they are as many as a whole batch has samples.
    tokens = [accelerator.gather_for_metrics((batch[:, None] * 2 + torch.arange(2)).flatten()) for batch in loader]
    assert torch.cat(tokens).tolist() == list(range(2 * samples))
    dropping = accelerator.prepare(DataLoader(torch.arange(float(samples)), batch_size=8, drop_last=True))
    assert [len(accelerator.gather_for_metrics(batch)) for batch in dropping] == [8] * (samples // 8)


def gather_ready_batches(samples):
    accelerator = Accelerator()
    data = torch.arange(samples) * 10
    sampler = BatchSampler(RandomSampler(data), 4, drop_last=False)
    loader = accelerator.prepare(DataLoader(data, batch_size=None, sampler=sampler))
    return [
        accelerator.gather_for_metrics({"rows": batch, "names": [str(value) for value in batch.tolist()]})
        for batch in loader
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("samples", [10, 14])
def test_batches_of_a_batch_sampler_in_place_of_the_sampler_have_each_sample_once(samples, ranks):
    for rounds in run_ranks(gather_ready_batches, ranks, samples):
        rows = [value for gathered in rounds for value in gathered["rows"].tolist()]
        assert sorted(rows) == [10 * number for number in range(samples)]
        assert [name for gathered in rounds for name in gathered["names"]] == [str(value) for value in rows]


class ReadyBatches(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).split(4))


def gather_stream_of_batches():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(ReadyBatches(), batch_size=None))
    found = {"rows": [], "pair": [], "names": [], "sent": []}
    for batch in loader:
        found["rows"] += accelerator.gather_for_metrics(batch).tolist()
        found["pair"] += accelerator.gather_for_metrics((batch, {"twice": batch * 2}))[1]["twice"].tolist()
        found["names"] += accelerator.gather_for_metrics([str(int(value)) for value in batch])
        found["sent"] += accelerator.gather_for_metrics(batch, use_gather_object=True)
    return found


def test_ready_batches_of_different_sizes_have_each_sample_once():
    for found in run_ranks(gather_stream_of_batches, 2):
        assert found["rows"] == [float(value) for value in found["sent"]] == list(range(10))
        assert found["pair"] == [2 * number for number in range(10)]
        assert found["names"] == [str(number) for number in range(10)]
