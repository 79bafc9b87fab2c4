"""Comparison of recorded steps: which differences count, from summaries alone, and in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from rankbook.errors import InvalidArgument
from rankbook.numerics import compare
from rankbook.numerics.comparison import Difference, compare_summaries, first_batch
from rankbook.numerics.recording import BUFFER, CLIPPED, PARAMETER, STATE, Key, Summary
from rankbook.runtime import Accelerator, AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def summary(norm: float, *, change: float = 0.0, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Summary:
    return Summary(shape, dtype, norm, norm, digest=f"{norm} {change}", change=change)


def differences(reference: dict[Key, Summary], candidate: dict[Key, Summary]) -> list[Difference]:
    return compare_summaries([reference], [candidate], torch.float32)[1]


@pytest.mark.parametrize("other", ["w: step", "w: exp_avg"])
def test_a_large_state_hides_no_difference_in_one_of_another_name(other):
    large = {(STATE, other): summary(1e5)}
    found = differences(
        {**large, (STATE, "w: exp_avg_sq"): summary(1e-3)}, {**large, (STATE, "w: exp_avg_sq"): summary(2e-3)}
    )
    assert [(d.phase, d.name) for d in found] == [(STATE, "w: exp_avg_sq")]


def test_rounding_in_a_small_state_is_measured_against_the_states_of_the_same_name():
    large = {(STATE, "w: exp_avg"): summary(1.0)}
    noise = [{**large, (STATE, "b: exp_avg"): summary(norm)} for norm in (1e-6, 2e-6)]
    assert differences(*noise) == []


def test_a_counter_hides_no_difference_in_another_buffer():
    counter = {(BUFFER, "norm.num_batches_tracked"): summary(1e6, shape=(), dtype="int64")}
    found = differences(
        {**counter, (BUFFER, "norm.running_mean"): summary(1.0)},
        {**counter, (BUFFER, "norm.running_mean"): summary(1.1)},
    )
    assert [d.name for d in found] == ["norm.running_mean"]


def updates(*, expected: float, actual: float, gradient: float = 1.0, norm: float = 10.0) -> list[Difference]:
    """Return the differences of two steps that change a parameter by these norms."""
    gradients = {(CLIPPED, "norm.weight"): summary(gradient), (CLIPPED, "fc.weight"): summary(1.0)}
    sides = [{**gradients, (PARAMETER, "norm.weight"): summary(norm + c, change=c)} for c in (expected, actual)]
    return differences(*sides)


def test_a_parameter_that_one_layout_does_not_update_differs_also_by_less_than_the_tolerance():
    (found,) = updates(expected=1e-3, actual=0.0)
    assert (found.phase, found.name, found.size) == (PARAMETER, "norm.weight", pytest.approx(1e-4, rel=1e-3))
    assert found.size > found.tolerance
    assert len(updates(expected=0.0, actual=1e-3)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"expected": 1e-3, "actual": 9.95e-4},
        {"expected": 1e-6, "actual": 0.0},  # the rounding of a parameter of norm 10
        {"expected": 1e-3, "actual": 0.0, "gradient": 1e-8},  # Adam makes whole steps of rounding errors
        {"expected": 0.0, "actual": 0.0},
    ],
)
def test_an_update_that_rounding_explains_is_no_difference(options):
    assert updates(**options) == []


def test_a_missing_update_with_a_small_learning_rate_is_explained():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)

    def step(model, optimizer, batch):
        start = model[1].weight.detach().clone()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        if model is net:
            model[1].weight.data.copy_(start)

    compared = compare(step, net, optimizer, torch.randn(6, 4))
    assert compared.first is not None and (compared.first.phase, compared.first.name) == (PARAMETER, "1.weight")
    assert compared.relation is not None and compared.relation.kind == "unchanged"


@pytest.mark.parametrize("owner", ["loader", "sampler"])
def test_the_generators_of_a_loader_stay_where_they_are(owner):
    generator = torch.Generator().manual_seed(3)
    data = torch.arange(8.0)
    if owner == "loader":
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
    else:
        loader = DataLoader(data, batch_size=2, sampler=RandomSampler(data, generator=generator))
    before = generator.get_state()
    batch = first_batch(loader)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(next(iter(loader)), batch)


def test_a_loader_is_refused_inside_of_a_loop_over_it_and_the_loop_goes_on():
    net = nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(net, DataLoader(torch.randn(8, 1), batch_size=2))

    def loss(output):
        return output.square().mean()

    delivered = []
    for number, batch in enumerate(loader):
        if number == 1:
            with pytest.raises(InvalidArgument, match=r"pass batch=… inside of a loop"):
                compare(model=model, loader=loader, loss=loss)
            assert compare(model=model, batch=batch, loss=loss).equal
        delivered.append(loader.position.delivered)
    assert delivered == [1, 2, 3, 4] and loader.end_of_dataloader
    assert compare(model=model, loader=loader, loss=loss).equal
