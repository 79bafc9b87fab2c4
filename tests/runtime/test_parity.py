"""A model trained on several ranks is the model that one process trains, sample by sample and step by step."""

from __future__ import annotations

import pytest
import torch

from tests.rank_processes import run_ranks

pytestmark = pytest.mark.full

STEPS = 50
BATCH = 12  # of all ranks together; 1, 2, 3 and 4 divide it

VARIANTS = {"plain": {}, "accumulation": {"accumulate": 3}, "clipping": {"clip": 0.5}, "bf16": {"precision": "bf16"}}


def train(strategy: str, accumulate: int = 1, clip: float | None = None, precision: str = "no"):
    """Run 50 optimizer steps on the digits. Return the whole parameters and the samples of all ranks, in order."""
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from rankbook.runtime import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed

    torch.set_num_threads(1)
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(7)
    digits = load_digits()
    rows = torch.arange(len(digits.target))
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target), rows)
    model = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if accumulate > 1 else 3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, BATCH, shuffle=True, drop_last=True), scheduler
    )
    batches = []
    while optimizer.steps < STEPS:
        for inputs, targets, which in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            batches.append(which)
            if optimizer.steps == STEPS:
                break
    samples = [accelerator.gather(samples_of_batch) for samples_of_batch in batches]
    parameters = accelerator.get_state_dict(model)
    return (
        {name: parameter.detach().numpy() for name, parameter in parameters.items()},
        torch.stack(samples).numpy(),
        scheduler.get_last_lr(),
    )


def train_all(strategy: str, variants: dict):
    import torch.distributed as dist

    from rankbook.runtime.state import AcceleratorState, GradientState

    results = {}
    for name, options in variants.items():
        AcceleratorState._reset_state()
        GradientState._reset_state()
        results[name] = train(strategy, **options)
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def alone():
    return run_ranks(train_all, 1, "ddp", VARIANTS, timeout=100)[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_several_ranks_follow_the_single_process(alone, strategy, ranks):
    for results in run_ranks(train_all, ranks, strategy, VARIANTS, timeout=110):
        for name in VARIANTS:
            parameters, samples, rate = results[name]
            expected, expected_samples, expected_rate = alone[name]
            assert (samples == expected_samples).all(), f"{name}: other samples, or in another order"
            assert rate == pytest.approx(expected_rate)
            for key, value in expected.items():
                off = abs(parameters[key] - value).max()
                assert off <= (2e-2 if name == "bf16" else 1e-5), f"{name}: {key} is off by {off}"


def test_the_ways_differ_from_one_another(alone):
    """Check that the comparison above compares different results."""
    plain = alone["plain"][0]["0.weight"]
    assert all(abs(alone[name][0]["0.weight"] - plain).max() > 1e-4 for name in VARIANTS if name != "plain")
