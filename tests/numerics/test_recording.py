"""Test in one process that `rankbook.compare` leaves training objects as they are, and what it steps in copies."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from collections import deque
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from rankbook.errors import InvalidArgument
from rankbook.numerics import compare, recording
from rankbook.numerics.recording import difference, summarize
from rankbook.runtime import Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, GradientState
from rankbook.runtime.optimizer import LayoutGradScaler
from rankbook.runtime.strategies.base import full_tensor, reduction_switches
from tests.rank_processes import run_ranks


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_step(accelerator: Accelerator, *, accumulates: bool):
    """Return a training step of a cell, which may accumulate gradients."""

    def backward_and_step(model, optimizer, batch):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def accumulate(model, optimizer, batch):
        with accelerator.accumulate():
            backward_and_step(model, optimizer, batch)

    return accumulate if accumulates else backward_and_step


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_step_is_compared_while_a_window_of_gradient_accumulation_is_open(accumulates):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch, step = torch.randn(4, 2), make_step(accelerator, accumulates=accumulates)
    train = make_step(accelerator, accumulates=True)
    before = model.weight.detach().clone()
    (expected,) = torch.autograd.grad(model(batch).square().mean(), [model.weight])
    for _ in range(3):  # one batch is missing
        train(model, optimizer, batch)
    compared = compare(step, model, optimizer, batch)
    assert compared.equal, compared
    assert GradientState().num_steps == 4
    assert not GradientState().sync_gradients
    assert torch.equal(model.weight, before)
    train(model, optimizer, batch)
    assert optimizer.steps == 1
    torch.testing.assert_close(before - model.weight.detach(), 0.1 * expected)


def compare_in_an_open_window() -> tuple[str, int, float]:
    """Compare under FSDP2 when one batch of a window is missing.

    Returns the first difference, the number of steps at the end of the window, and the error of the step's update.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weight = net[0].weight
    batches, before = torch.randn(4, 4, 2), weight.detach().full_tensor().clone()
    (sum(model(batch).square().mean() for batch in batches) / 4).backward()
    expected = before - 0.1 * weight.grad.full_tensor()
    optimizer.zero_grad()
    train = make_step(accelerator, accumulates=True)
    for batch in batches[:3]:
        train(model, optimizer, batch)
    compared = compare(make_step(accelerator, accumulates=False), model, optimizer, batches[3])
    train(model, optimizer, batches[3])
    error = (weight.detach().full_tensor() - expected).abs().max()
    return str(compared.first), optimizer.steps, float(error)


@pytest.mark.processes
def test_gradients_that_fsdp_has_not_reduced_are_kept():
    for difference_found, steps, error in run_ranks(compare_in_an_open_window, 2):
        assert (difference_found, steps) == ("None", 1)
        assert error < 1e-6


def compare_inside_of_accumulate(shards: bool) -> tuple[list[str], list[set[bool]], float]:
    """Compare in the first batch of a window, in which gradients are not reduced, and in the last one.

    Returns the answers, in both batches whether gradients are reduced afterwards, and the error of the step's update.
    """
    plugin = FullyShardedDataParallelPlugin() if shards else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.manual_seed(dist.get_rank())
    batches, before = torch.randn(2, 4, 2), full_tensor(net[0].weight.detach()).clone()
    (sum(model(batch).square().mean() for batch in batches) / 2).backward()
    expected = before - 0.1 * full_tensor(net[0].weight.grad)
    optimizer.zero_grad()
    answers, switches = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            for layouts in [("one rank", "current"), ("current", "ddp")]:
                compared = compare(step_once, model, optimizer, batch, layouts=layouts)
                answers.append(str(compared.first))
            names = ("require_backward_grad_sync", "reduce_grads")
            switches.append({switch for _, name, switch in reduction_switches(model) if name in names})
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return answers, switches, float((full_tensor(net[0].weight.detach()) - expected).abs().max())


@pytest.mark.processes
@pytest.mark.parametrize("shards", [False, True])
def test_gradients_are_reduced_in_a_comparison_inside_of_accumulate(shards):
    for answers, switches, error in run_ranks(compare_inside_of_accumulate, 2, shards):
        assert answers == ["None"] * 4
        assert switches == [{False}, {True}]
        assert error < 1e-6


@pytest.mark.parametrize("given", ["step", "clipping step", "two steps", "loss"])
def test_loss_scale_of_fp16_is_no_difference_and_stays(given):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    # Without a GPU, mixed_precision="fp16" is refused. Its loss scale alone is the same on the CPU.
    optimizer.scaler = LayoutGradScaler("cpu", growth_interval=3)
    scaler, batch = optimizer.scaler, torch.randn(4, 2)

    def step(model, optimizer, batch):
        for _ in range(2 if given == "two steps" else 1):
            accelerator.backward(model(batch).square().mean())
            if given == "clipping step":
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()

    step(model, optimizer, batch)
    before, state = [parameter.detach().clone() for parameter in net.parameters()], scaler.state_dict()
    assert state["scale"] == 2.0**16 and state["_growth_tracker"] == optimizer.steps
    if given == "loss":
        data = (batch, torch.zeros(4, 1))
        compared = compare(model=model, optimizer=optimizer, batch=data, loss=nn.functional.mse_loss)
    else:
        compared = compare(step, model, optimizer, batch)
    assert compared.equal, compared
    assert scaler.state_dict() == state
    assert all(map(torch.equal, before, net.parameters()))
    while optimizer.steps < 3:
        step(model, optimizer, batch)
    assert scaler.get_scale() == 2.0**17


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def step_with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


class FewSteps(torch.optim.LBFGS):
    """LBFGS that does not converge in its first step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, max_iter=2)


class Sharpness(torch.optim.Optimizer):
    """An optimizer that steps another one, whose groups it shares, at a point nearby."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups
        self.norms = []

    def step(self, closure):
        for group in self.param_groups:
            for parameter in group["params"]:
                offset = torch.full_like(parameter, group["rho"])
                self.state[parameter].setdefault("offsets", []).append(offset)
                parameter.data.add_(offset)
        with torch.enable_grad():
            closure()
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.param_groups[0]["params"]]))
        for parameter, state in self.state.items():
            parameter.data.sub_(state["offsets"][-1])
        self.inner.step()


def describe(value: object) -> object:
    """Return the content of a state without tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [describe(item) for item in value.values()]
    return [describe(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("layouts", [("one rank", "current"), ("current", "one rank"), ("one rank", "ddp")])
@pytest.mark.parametrize("kind", [FewSteps, Sharpness])
def test_an_optimizer_is_restored_with_its_lists_and_the_optimizer_that_it_steps(kind, layouts):
    model = make_net()
    optimizer = kind(model.parameters())
    batch = torch.randn(4, 2)
    for _ in range(2):
        step_with_closure(model, optimizer, batch)

    def state() -> object:
        inner = getattr(optimizer, "inner", optimizer)
        own = {name: value for name, value in vars(optimizer).items() if name == "norms"}
        return describe([dict(optimizer.state), dict(inner.state), own, list(model.parameters())])

    before = state()
    compared = compare(step_with_closure, model, optimizer, batch, layouts=layouts)
    assert compared.equal, compared
    assert {phase for phase, *_ in compared.phases} >= {"gradient", "parameter"}
    assert state() == before
    step_with_closure(model, optimizer, batch)
    assert state() != before


@pytest.mark.parametrize("kind", [FewSteps, Sharpness])
def test_the_copy_of_an_optimizer_steps_the_copied_parameters(kind):
    model, batch, moved = make_net(), torch.randn(4, 2), []
    optimizer = kind(model.parameters())
    step_with_closure(model, optimizer, batch)
    before = describe(list(model.parameters()))

    def step(copied, optimizer, batch):
        start = describe(list(copied.parameters()))
        step_with_closure(copied, optimizer, batch)
        moved.append(describe(list(copied.parameters())) != start)
        assert describe(list(model.parameters())) == before

    assert compare(step, model, optimizer, batch, layouts=("one rank", "ddp")).equal
    assert moved == [True, True]


def test_an_optimizer_that_cannot_be_copied_is_refused():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.lock = threading.Lock()
    with pytest.raises(InvalidArgument, match=r"SGD cannot be copied for another layout: TypeError: cannot pickle"):
        compare(step_with_closure, model, optimizer, torch.randn(4, 2))


@pytest.mark.parametrize("shape", [(4096, 64), (1000,), (3, 5, 7)])
def test_differences_with_a_pattern_are_seen_in_the_summaries(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    patterns = {
        "constant": torch.ones(shape),
        "columns": torch.randn(shape[-1:], generator=torch.Generator().manual_seed(1)).expand(shape),
        "alternating": (torch.arange(tensor.numel()) % 2 * 2 - 1).reshape(shape),
    }
    for name, pattern in patterns.items():
        changed = tensor + 1e-3 * pattern
        size = float((changed - tensor).double().norm())
        assert difference(summarize(tensor), summarize(changed)) > size / 20, name


def count_groups_after_a_restart() -> list[int]:
    """Return the numbers of process groups after three comparisons, between which rank 1 has lost its own group."""
    counts = []
    for _ in range(3):
        net = make_net()
        compare(model=net, batch=(torch.ones(4, 2), torch.zeros(4, 1)), loss=nn.functional.mse_loss)
        counts.append(distributed_c10d._world.group_count)
        if len(counts) == 1 and dist.get_rank() == 1:
            recording._Solo.of = recording._Solo.group = None  # as in a new process
    return counts


@pytest.mark.slow
def test_a_restarted_rank_makes_no_group_that_the_others_lack():
    first, second = run_ranks(count_groups_after_a_restart, 2)
    assert first == second
    assert first[1] == first[2]


class Masked(nn.Module):
    """A model with a mask of infinities, and a buffer that its forward pass assigns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (self.fc(x) + self.mask).softmax(-1)


def step_once(model, optimizer, batch):
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_infinities_in_a_buffer_are_no_difference_and_a_buffer_that_is_assigned_stays():
    torch.manual_seed(0)
    net = Masked()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mean = net.mean
    compared = compare(step_once, net, optimizer, torch.randn(3, 3), layouts=("one rank", "current"))
    assert compared.equal, compared
    assert net.mean is mean and not mean.any()


@dataclasses.dataclass
class Progress:
    """State that a module keeps in an object."""

    seen: int = 0


class FrozenConfig(dict):
    """A dict that refuses changes."""

    def update(self, content):
        raise TypeError(f"expected no change, got {content}")


class Counting(nn.Module):
    """A model whose forward pass depends on attributes, and changes all of them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls = 0
        self.progress, self.norms, self.names, self.recent = Progress(), {"x": []}, set(), deque(maxlen=3)
        self.mean, self.ones, self.counts = torch.zeros(3), torch.ones(1).expand(3), numpy.zeros(2)
        self.config = FrozenConfig(width=3)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator, self.old_numpy_generator = numpy.random.default_rng(1), numpy.random.RandomState(1)
        self.generator = random.Random(1)

    def forward(self, x):
        self.calls += 1
        self.progress.seen += 1
        self.norms["x"].append(float(x.norm()))
        self.names.add(f"call {self.calls}")
        self.recent.append(self.calls)
        self.counts += 1
        self.mean.lerp_(x.mean(0), 0.1)
        self.cache = [self.calls] if not hasattr(self, "cache") else [*self.cache, self.calls]
        noise = torch.rand(x.shape, generator=self.torch_generator) + self.ones + self.mean
        numbers = self.numpy_generator.random(), self.old_numpy_generator.rand(), self.generator.random()
        return self.fc(x + noise) * self.calls * self.progress.seen * sum(numbers)

    def state(self) -> dict[str, object]:
        """Return the attributes as values that can be compared."""
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        state["old_numpy_generator"] = self.old_numpy_generator.get_state()[2]  # its position
        state["numpy_generator"] = str(self.numpy_generator.bit_generator.state)
        state["torch_generator"] = self.torch_generator.get_state().tolist()
        state["generator"] = self.generator.getstate()
        state |= {name: state[name].tolist() for name in ("mean", "ones", "counts")}
        return copy.deepcopy(state)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("layouts", [("one rank", "current"), ("current", "one rank"), ("current", "current")])
def test_attributes_that_a_forward_pass_changes_are_restored_before_every_run_and_at_the_end(layouts, steps):
    torch.manual_seed(0)
    net = Counting()
    optimizer, batch = torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(4, 3)
    for _ in range(steps):
        step_once(net, optimizer, batch)
    before = net.state()
    compared = compare(step_once, net, optimizer, batch, layouts=layouts)
    assert compared.equal, compared
    assert net.state() == before
    step_once(net, optimizer, batch)
    changed = {name for name, value in net.state().items() if value != before.get(name)}
    assert changed == set(net.state()) - {"training", "ones", "config"}


def test_a_difference_beside_infinities_is_seen():
    reference, other = torch.randn(100), torch.randn(100)
    reference[3] = other[3] = -torch.inf
    assert 0 < difference(summarize(reference), summarize(other)) < torch.inf
    other[4] = torch.nan
    assert difference(summarize(reference), summarize(other)) == torch.inf


def test_sparse_gradients_are_compared():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compared = compare(step_once, net, optimizer, torch.tensor([1, 4]), layouts=("one rank", "current"))
    assert compared.equal, compared


def test_activations_that_are_computed_again_are_no_further_calls():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
    apply_activation_checkpointing(net, check_fn=lambda module: module is net[1])
    recorded = recording.record(
        step_once,
        recording.use_current(net, torch.optim.SGD(net.parameters(), lr=0.1)),
        torch.randn(2, 3),
        also={},
        wanted=None,
        reference=False,
    )
    assert not [name for phase, name in recorded.summaries if phase == recording.FORWARD and "call 2" in name]
