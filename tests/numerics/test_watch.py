"""Test the number watch in one process: optimizers with a closure, several optimizers, complex numbers."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rankbook.errors import NumericalError
from rankbook.numerics import watch
from rankbook.numerics.settings import Conditions
from rankbook.runtime.optimizer import AcceleratedOptimizer, LayoutGradScaler
from rankbook.transport.serialization import pack, unpack


@pytest.fixture(autouse=True)
def _watch() -> Iterator[None]:
    torch.manual_seed(0)
    watch.set_conditions(Conditions(nan=True))
    try:
        yield
    finally:
        watch.set_conditions(Conditions())
        watch.namespace().pop(watch.INPUTS_NAME, None)


class PoisonGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * math.nan


class Poison(nn.Module):
    """The identity, with a gradient of NaN if `active`."""

    active = False

    def forward(self, x):
        return PoisonGradient.apply(x) if self.active else x * 1.0


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(2, 2), Poison(), Poison()

    def forward(self, x):
        x = self.stem(x)
        return self.left(x) + self.right(x)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.factor, n=4)


def test_complex_parameters_and_outputs_are_watched():
    net = Spectral()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    net(torch.ones(2, 4)).square().sum().backward()
    net.factor.grad[1] = complex(0.0, math.nan)
    with pytest.raises(NumericalError, match=r"NaN born, in `factor` backward \(gradient of factor\), at step 2"):
        optimizer.step()
    assert watch.kind_of(torch.tensor([complex(math.inf, 0.0)])) == "inf"
    assert watch.kind_of(torch.ones(2, dtype=torch.complex64).conj()) is None


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_collectives_of_float8_are_watched_on_a_device(monkeypatch, dtype):
    monkeypatch.setattr(watch, "is_on_host", lambda _: False)  # as on an accelerator
    active = watch._active
    assert active is not None
    for number, value in enumerate([1.0, math.nan], 1):
        data = torch.full((2,), value).to(dtype)
        active._on_launch("0", number, lambda: "all_reduce", [data], [data])
    active._read_deferred()
    assert [finite for _, _, _, _, finite, _ in active._launches] == [True, False]
    assert (watch.kind_of(torch.ones(2).to(dtype)), watch.kind_of(data)) == (None, "NaN")


def test_outputs_in_float8_are_watched_on_a_device(monkeypatch):
    monkeypatch.setattr(watch, "is_on_host", lambda _: False)

    class Quantized(nn.Module):
        def forward(self, x):
            return x.to(torch.float8_e5m2)

    net = nn.Sequential(nn.Linear(2, 2), Quantized())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).float().sum().backward()
    optimizer.step()
    net(torch.full((1, 2), math.nan)).float().sum().backward()
    with pytest.raises(NumericalError, match="NaN"):
        optimizer.step()


def test_gradients_of_single_samples_by_torch_func_are_no_obstacle():
    net = nn.Linear(2, 1)

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, x).square().sum()

    parameters = dict(net.named_parameters())
    of_samples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 2))
    assert of_samples["weight"].shape == (3, 1, 2)


def test_sparse_gradients_are_watched():
    net = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (net(torch.tensor([1, 3])) * torch.tensor([[1.0], [math.nan]])).sum().backward()
    net.weight.grad = torch.sparse_coo_tensor([[1, 3]], [[1.0, 1.0], [math.nan, 1.0]], (4, 2))
    watch._active._reset()  # only the gradient shows it
    with pytest.raises(NumericalError, match="gradient of"):
        optimizer.step()


def test_norm_of_sparse_gradients_is_watched():
    watch.set_conditions(Conditions(norm=2.0))
    net = nn.Sequential(nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1, bias=False))
    sparse, dense = torch.optim.SparseAdam(net[0].parameters()), torch.optim.SGD(net[1].parameters(), lr=0.0)
    with torch.no_grad():
        net[1].weight.fill_(1.0)

    def backward(*rows: int) -> None:
        net.zero_grad()
        net(torch.tensor(rows)).sum().backward()

    backward(1, 2, 3)  # sqrt(3)
    sparse.step()
    dense.step()
    backward(1, 1, 1)  # 3 times the same row
    with pytest.raises(NumericalError, match=r"norm 3 .* 2"):
        sparse.step()


def test_norm_that_is_no_number_is_above_every_limit():
    watch.set_conditions(Conditions(norm=100.0))
    net = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (net["first"](torch.ones(1, 2)).sum() * 9 + (net["second"](torch.ones(1, 2)) * math.nan).sum()).backward()
    watch.namespace()["net"] = net
    try:
        with pytest.raises(
            NumericalError, match=r"is not a number \(limit 100\), at step 1.*; `second` has the largest"
        ):
            optimizer.step()
    finally:
        del watch.namespace()["net"]


def test_running_statistics_that_are_not_finite_are_named():
    net = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(2)))
    net.register_buffer("mask", torch.tensor([0.0, -math.inf]))  # as it should be
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.tensor([[1.0, 2.0], [3.0, math.nan]])).sum().backward()
    with pytest.raises(NumericalError) as caught:
        optimizer.step()
    assert str(caught.value).endswith(
        "; running statistics are not finite: 0.running_mean, 0.running_var, 1.running_mean and 1 more "
        "(reset_running_stats(), or load a checkpoint)"
    )


def test_closure_of_an_optimizer_is_attributed_to_the_pass_that_it_has_run():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    data = torch.ones(3, 2)

    def closure():
        optimizer.zero_grad()
        loss = net(data).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    data[0, 0] = math.nan
    with pytest.raises(NumericalError, match="NaN born, in the data: the input of `Sequential`"):
        optimizer.step(closure)


def test_closure_whose_optimizer_spoils_the_parameters_is_not_at_fault():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=math.inf, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(NumericalError, match="born, in the optimizer's step, in "):
        optimizer.step(closure)


class Passes:
    """A model, and the closure of its passes, which counts its calls and may multiply the gradient by a factor."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(2, 2), Poison())
        self.calls, self.factor = 0, {}

    def __call__(self):
        self.calls += 1
        self.net.zero_grad()
        loss = self.net(torch.ones(3, 2)).square().sum() * self.factor.get(self.calls, 1.0)
        loss.backward()
        return loss

    def weights(self):
        return [parameter.detach().clone() for parameter in self.net.parameters()]


def step_with(optimizer, closure, how):
    return optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)


@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("condition", [Conditions(nan=True), Conditions(norm=1e6)], ids=str)
def test_gradients_of_a_closure_are_checked_before_the_update(condition, how):
    watch.set_conditions(condition)
    passes = Passes()
    optimizer = torch.optim.AdamW(passes.net.parameters(), lr=0.1)
    for calls in (1, 2):
        result = step_with(optimizer, passes, how)
        assert passes.calls == calls and isinstance(result, torch.Tensor) and result.requires_grad
    before, state = passes.weights(), optimizer.state[passes.net[0].weight]["exp_avg"].clone()
    passes.net[1].active = condition.nan
    passes.factor[3] = 1.0 if condition.nan else 1e8
    message = (
        r"the gradient norm .* limit of 1e\+06, at step 3" if condition.norm else "born, in `1` backward, at step 3"
    )
    with pytest.raises(NumericalError, match=message):
        step_with(optimizer, passes, how)
    assert passes.calls == 3
    assert all(map(torch.equal, before, passes.weights()))
    assert torch.equal(state, optimizer.state[passes.net[0].weight]["exp_avg"])
    assert all(parameter.grad is None for parameter in passes.net.parameters())
    passes.net[1].active = False
    step_with(optimizer, passes, how)
    assert not any(map(torch.equal, before, passes.weights()))


def test_parameter_that_is_bad_before_the_closure_is_no_fault_of_the_optimizer():
    passes = Passes()
    optimizer = torch.optim.AdamW(passes.net.parameters())
    with torch.no_grad():
        passes.net[0].weight[0, 0] = math.nan
    with pytest.raises(NumericalError, match="born, in a parameter of `0`, before the step"):
        optimizer.step(passes)


@pytest.mark.parametrize("condition", [Conditions(nan=True), Conditions(norm=1e6)], ids=str)
def test_every_closure_call_of_lbfgs_is_checked(condition):
    watch.set_conditions(condition)
    passes = Passes()
    optimizer = torch.optim.LBFGS(passes.net.parameters(), lr=1e-3, max_iter=4, tolerance_grad=0, tolerance_change=0)
    optimizer.step(passes)
    assert passes.calls == 4
    passes.factor[7] = math.nan if condition.nan else 1e8
    message = "born, in the loss, at step 2" if condition.nan else r"the gradient norm .*, at step 2"
    with pytest.raises(NumericalError, match=message):
        optimizer.step(passes)
    assert passes.calls == 7
    assert all(parameter.isfinite().all() for parameter in passes.net.parameters())


def test_step_of_an_optimizer_that_does_not_call_its_closure_ends_too():
    class Idle(torch.optim.SGD):
        def step(self, closure=None):
            del closure

    passes = Passes()
    passes.factor[1] = math.nan
    passes()
    Idle(passes.net.parameters(), lr=0.1).step(passes)
    passes()
    torch.optim.SGD(passes.net.parameters(), lr=0.1).step()  # what the other has left unused is forgotten
    assert passes.calls == 2


def test_watch_that_is_off_passes_the_closure_itself_on():
    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            self.closure = closure
            return closure()

    passes = Passes()
    optimizer = Keeping(passes.net.parameters(), lr=0.1)
    optimizer.step(passes)
    assert optimizer.closure is not passes
    watch.set_conditions(Conditions())
    passes.net[1].active = True
    optimizer.step(passes)
    assert optimizer.closure is passes


def test_optimizers_that_do_not_count_their_steps_are_counted_one_by_one():
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(1, 4):
        x = torch.full((1, 2), math.nan if step == 3 else 1.0)
        (nets[0](x).sum() + nets[1](torch.ones(1, 2)).sum()).backward()
        if step == 3:
            with pytest.raises(NumericalError, match="at step 3"):
                optimizers[0].step()
        else:
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_state_under_a_name_is_no_counter_of_steps(kind):
    net = nn.Linear(2, 2)
    optimizer = kind(net.parameters(), lr=0.1)
    optimizer.state["calls"] = 7
    optimizer.state["options"] = {"warm": True}
    for value in (1.0, math.nan):
        net(torch.full((1, 2), value)).sum().backward()
        if math.isnan(value):
            with pytest.raises(NumericalError, match="at step 2"):
                optimizer.step()
        else:
            optimizer.step()


def test_all_modules_that_share_a_bad_gradient_are_named():
    net = Branches()
    net.right.active = True
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NumericalError, match=r"in `left` backward \(or in `right`, with the same input\), at step 1"):
        optimizer.step()


def test_the_norm_of_scaled_gradients_is_the_one_without_the_scale():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)  # divides them by the scale in its kernel
    scaler = torch.amp.GradScaler("cpu")
    watch.set_conditions(Conditions(norm=10.0))
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    watch.set_conditions(Conditions(norm=1.0))
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(NumericalError, match=r"the gradient norm 1\.73205 is above the limit of 1,"):
        scaler.step(optimizer)


def test_a_scaler_that_is_switched_off_is_no_obstacle():
    net = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_prepared_optimizer_steps_again_after_an_alarm_under_a_loss_scale():
    net = nn.Linear(2, 1)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), scaler=LayoutGradScaler("cpu"))

    def take(value):
        optimizer.scaler.scale(net(torch.full((1, 2), value)).sum()).backward()
        optimizer.step()

    take(1.0)
    optimizer.zero_grad()
    with pytest.raises(NumericalError, match="in the data"):
        take(math.nan)
    optimizer.zero_grad()
    take(1.0)
    assert optimizer.steps == 2


@dataclass
class Encoded:
    state: torch.Tensor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return Encoded(self.inner(x) * math.nan)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, encoded):
        return self.inner(encoded.state)


def test_outputs_in_a_dataclass_are_watched():
    net = nn.Sequential(Encoder(), Decoder())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NumericalError, match="in `0` forward"):
        optimizer.step()


class Paired(nn.Module):
    def forward(self, pair):
        return PoisonGradient.apply(pair[0] + pair[1])


def test_modules_whose_inputs_are_in_a_tuple_are_named():
    first, second = nn.Linear(2, 2), Paired()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    x = first(torch.ones(1, 2))
    second((x, x)).sum().backward()
    with pytest.raises(NumericalError, match="in `Paired` backward"):
        optimizer.step()


def test_a_pass_that_has_failed_keeps_neither_its_inputs_nor_its_model():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inputs = []
    net[1].register_forward_hook(lambda _, args, __: inputs.append(weakref.ref(args[0])))
    with torch.enable_grad():
        net(torch.ones(1, 2))
    model = weakref.ref(net)
    watch.release_inputs()
    del net
    gc.collect()
    assert inputs[0]() is None and model() is None


def test_passes_without_an_optimizer_keep_no_inputs():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    for _ in range(5):
        net(torch.full((1, 2), math.nan)).sum().backward()
    active = watch._active
    assert active is not None and active._first is not None and len(active._first.later) == 2


@pytest.mark.parametrize("waits", [True, False])
def test_activations_of_a_step_are_freed_without_the_garbage_collector(monkeypatch, waits):
    if waits:
        monkeypatch.setattr(watch, "is_on_host", lambda _: False)  # as on an accelerator
    activations = []
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
    unused = nn.Linear(3, 1)

    def use(_module, _inputs, output):
        unused(output)  # the backward pass does not come here

    net[1].register_forward_hook(use)
    for module in net.modules():
        module.register_forward_hook(lambda *event: activations.append(weakref.ref(event[-1])))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gc.disable()
    try:
        for _ in range(2):
            net(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            assert len(activations) == 7
            assert not any(reference() is not None for reference in activations)
            activations.clear()
        for _ in range(4):  # batches of one window of gradient accumulation
            net(torch.ones(4, 2)).sum().backward()
        assert not any(reference() is not None for reference in activations[:-7])
        activations.clear()
        optimizer.step()
        monkeypatch.setattr(watch, "_MAX_CALLS", 20)
        for _ in range(8):  # an evaluation that computes gradients for nothing
            net(torch.ones(4, 2))
        assert sum(reference() is not None for reference in activations) < 5 * 7
        watch.cell += 1
        net(torch.ones(4, 2))
        assert not any(reference() is not None for reference in activations[:-7])
    finally:
        gc.enable()


def test_backward_pass_of_autograd_has_its_own_line():
    net = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    net.left.active = True
    loss = net(torch.ones(1, 2)).sum()
    line = inspect.currentframe().f_lineno + 1
    torch.autograd.backward(loss)
    with pytest.raises(NumericalError, match=rf"at step 2, test_watch.py line {line}"):
        optimizer.step()


def fail_in_a_cell(net, how):
    """Run a forward pass with a NaN that no step follows, as a cell does that replays the inputs of an alarm."""
    watch.cell += 1
    loss = net(torch.full((1, 2), math.nan)).sum()
    if how == "backward":
        loss.backward()
        net.zero_grad()


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("waits", [True, False])
def test_passes_of_another_cell_are_no_part_of_a_step(monkeypatch, waits, how):
    if waits:
        monkeypatch.setattr(watch, "is_on_host", lambda _: False)  # as on an accelerator
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fail_in_a_cell(net, how)
    watch.cell += 1
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("waits", [True, False])
def test_forward_pass_is_attributed_if_the_backward_pass_and_the_step_are_in_later_cells(monkeypatch, waits):
    if waits:
        monkeypatch.setattr(watch, "is_on_host", lambda _: False)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    line = inspect.currentframe().f_lineno + 1
    loss = net(torch.full((1, 2), math.nan)).sum()
    watch.cell += 1
    loss.backward()
    watch.cell += 1
    net(torch.ones(1, 2)).sum().backward()  # the gradients are a sum with those of the bad batch
    with pytest.raises(NumericalError, match=rf"in the data: .* line {line}"):
        optimizer.step()


@pytest.mark.parametrize("how", ["pack", "copy", "save"])
def test_output_of_a_watched_module_is_copied_without_its_model(tmp_path, how):
    output = nn.Linear(100, 100)(torch.ones(1, 100))
    assert watch._CALL in vars(output)
    if how == "pack":
        packed = pack(output, store=None)
        assert sum(buffer.size for buffer in packed.payload.buffers) < 2000
        copied = unpack(packed.payload, packed.frames, unlink=True, folder=tmp_path)
    elif how == "copy":
        copied = copy.copy(output)
    else:
        torch.save(output, tmp_path / "output.pt")
        assert (tmp_path / "output.pt").stat().st_size < 4000
        copied = torch.load(tmp_path / "output.pt", weights_only=True)
    assert torch.equal(copied, output)
    nn.Linear(100, 1)(copied).sum().backward()  # as the input of a module that is watched
    assert copied.grad is not None


def test_optimizer_class_of_a_cell_can_be_sent_to_another_rank(tmp_path):
    own = type("Own", (torch.optim.SGD,), {"__module__": "__main__", "step": lambda self: super(own, self).step()})
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    own([parameter], 0.1).step()  # torch has wrapped the method of the class, with its hooks
    packed = pack(own, store=None)
    assert unpack(packed.payload, packed.frames, unlink=True, folder=tmp_path).__name__ == "Own"


def test_an_alarm_discards_the_gradients_of_all_optimizers():
    nets = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for factor in (1.0, math.nan):
        sum(net(torch.ones(1, 2) * factor).sum() for net in nets).backward()
        if factor == 1.0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with pytest.raises(NumericalError):
        optimizers[0].step()
    assert all(parameter.grad is None for net in nets for parameter in net.parameters())
