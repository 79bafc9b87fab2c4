"""`gather_for_metrics` gives each sample of the dataset once and in order, whatever the loader adds or leaves out."""

from __future__ import annotations

import pytest

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
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    from rankbook.runtime import Accelerator, DataLoaderConfiguration
    from rankbook.runtime.state import AcceleratorState

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
