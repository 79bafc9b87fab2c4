"""Planted non-finite values in training on three ranks: rank, module, phase, step and line of each are reported.

All cases share one cluster; each builds a small model of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import rankbook
from rankbook import Cluster, NumericalError
from rankbook.numerics import active_words

SETUP = '''
import math
import torch, torch.nn as nn, torch.nn.functional as F
import rankbook
from torch.optim import optimizer as optimizer_hooks
from rankbook import Accelerator, AcceleratorState, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

class PoisonGradient(torch.autograd.Function):
    """Return the input, and a gradient of NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")

class Gate(nn.Module):
    """The identity, until its `forward` is replaced."""

    change = staticmethod(lambda x: x * 1.0)

    def forward(self, x):
        return self.change(x)

class Attention(nn.Module):
    change = staticmethod(lambda x: x)

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.change(torch.softmax(q @ k.transpose(-1, -2), -1))
        return self.out(weights @ v)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn, self.gate = nn.LayerNorm(width), Attention(width), Gate()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.gate(x))

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(3)), nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def train(
    plant, at, kind="ddp", optimizer_class=torch.optim.AdamW, before_step=None, loss_of=None, batch=None, **options
):
    """Take `at` steps, with `plant(net, optimizer)` before the last one."""
    global nonfinite_inputs
    nonfinite_inputs = None
    torch.manual_seed(5)
    net = Net()
    optimizer = optimizer_class(net.parameters(), **{"lr": 1e-3, **options})
    handlers = [DistributedDataParallelKwargs(comm_hook="fp16")] if kind == "fp16 hook" else []
    plugin = FullyShardedDataParallelPlugin() if kind == "fsdp" else None
    model = net
    if kind not in ("plain", "alone"):
        AcceleratorState._reset_state()  # of the case before
        model, optimizer = Accelerator(kwargs_handlers=handlers, fsdp_plugin=plugin).prepare(net, optimizer)
    for step in range(1, at + 1):
        x, y = torch.randn(4, 5, 8), torch.zeros(4, 5, 4)
        if step == at:
            plant(net, optimizer)
            x, y = batch(x, y) if batch else (x, y)
        output = model(x)
        loss = loss_of(output) if loss_of and step == at else F.mse_loss(output, y)
        loss.backward()
        if kind == "plain":
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        if before_step and step == at:
            before_step(net)
        optimizer.step()
        optimizer.zero_grad()

def train_in_two_groups(plant, at):
    """Take `at` steps of DDP with an optimizer for the blocks and another one for the head."""
    torch.manual_seed(5)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (net.blocks, net.head)]
    for step in range(1, at + 1):
        model(torch.randn(4, 5, 8)).square().mean().backward()
        if step == at:
            plant(net, optimizers[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

def train_with_closure(plant, at, optimizer_class=torch.optim.AdamW, scale=1.0, **options):
    """Take `at` steps in which a prepared optimizer runs the passes itself, and keep the weights before the last."""
    global net, weights_before
    AcceleratorState._reset_state()  # of the case before
    torch.manual_seed(5)
    net = Net()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(net, optimizer_class(net.parameters(), lr=1e-3, **options))
    for step in range(1, at + 1):
        x = torch.randn(4, 5, 8)
        if step == at:
            plant(net, optimizer)
            weights_before = [parameter.detach().clone() for parameter in net.parameters()]

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean() * (scale if step == at else 1.0)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure=closure)

def poison(*ranks):
    return lambda x: PoisonGradient.apply(x) if rank in ranks else x * 1.0

def spoil(*ranks):
    return lambda x: x * float("nan") if rank in ranks else x * 1.0

def nothing(net, optimizer):
    pass

def change(path, function):
    def plant(net, optimizer):
        net.get_submodule(path).change = function
    return plant
'''

# Name: the cell's code, the conditions, and the parts of the message.
CASES = {
    "forward, code of a module, one rank": (
        "train(change('blocks.1.attn', spoil(1)), 3)",
        "nan",
        [
            "NaN born on rank 1, in `blocks.1.attn` forward",
            # The cell calls the functions of another one.
            "at step 3, line 1 (cell [0] line 37)",
            "ranks 0,2 received it in all_reduce #",
        ],
    ),
    "forward, a module, all ranks": (
        "\ntrain(change('blocks.2.gate', spoil(0, 1, 2)), 2)",
        "nan",
        ["NaN born on ranks 0-2, in `blocks.2.gate` forward, at step 2, line 2"],
    ),
    "forward, two ranks": (
        "train(change('blocks.0.gate', spoil(0, 2)), 1)",
        "nan",
        ["NaN born on ranks 0,2, in `blocks.0.gate` forward, at step 1", "rank 1 received it in all_reduce #"],
    ),
    "forward, infinity": (
        "train(change('blocks.0.gate', lambda x: (x * 1e30).exp() if rank == 2 else x), 2)",
        "inf",
        ["inf born on rank 2, in `blocks.0.gate` forward, at step 2"],
    ),
    "forward, sharded": (
        "train(change('blocks.1.gate', spoil(2)), 2, 'fsdp')",
        "nan",
        ["NaN born on rank 2, in `blocks.1.gate` forward, at step 2", "ranks 0-1 received it in reduce_scatter"],
    ),
    "forward, gradients reduced by the cell": (
        "train(change('blocks.1.gate', spoil(0)), 2, 'plain')",
        "nan",
        ["NaN born on rank 0, in `blocks.1.gate` forward, at step 2", "ranks 1-2 received it in all_reduce #"],
    ),
    "backward, code of a module, one rank": (
        "train(change('blocks.2.attn', poison(0)), 4)",
        "nan",
        ["NaN born on rank 0, in `blocks.2.attn` backward", "at step 4", "ranks 1-2 received it in all_reduce #"],
    ),
    "backward, a module, one rank": (
        "train(change('blocks.1.gate', poison(2)), 2)",
        "nan",
        ["NaN born on rank 2, in `blocks.1.gate` backward, at step 2", "ranks 0-1 received it in all_reduce #"],
    ),
    "backward, a module, all ranks": (
        "train(change('blocks.0.gate', poison(0, 1, 2)), 2)",
        "nan",
        ["NaN born on ranks 0-2, in `blocks.0.gate` backward, at step 2"],
    ),
    "backward, derivative of a root": (
        "train(change('blocks.1.gate', lambda x: x + (x - x.detach()).square().sum().sqrt() if rank == 1 else x), 2)",
        "nan",
        ["NaN born on rank 1, in `blocks.1.gate` backward, at step 2"],
    ),
    "backward, a weight alone": (
        (
            "nan = math.nan if rank == 1 else 1.0; weight = lambda net: net.blocks[1].mlp[2].weight\n"
            "train(lambda net, o: weight(net).register_hook(lambda g: g * nan), 2)"
        ),
        "nan",
        ["NaN born on rank 1, in `blocks.1.mlp.2` backward (gradient of blocks.1.mlp.2.weight), at step 2"],
    ),
    "backward, sharded": (
        "train(change('blocks.1.gate', poison(1)), 2, 'fsdp')",
        "nan",
        ["NaN born on rank 1, in `blocks.1.gate` backward, at step 2", "ranks 0,2 received it in reduce_scatter"],
    ),
    "data, one rank": (
        "train(nothing, 3, batch=lambda x, y: (x * float('nan') if rank == 1 else x, y))",
        "nan",
        ["NaN born on rank 1, in the data: the input of `Net`", "at step 3", "ranks 0,2 received it in all_reduce #"],
    ),
    "data, labels": (
        "train(nothing, 2, batch=lambda x, y: (x, y * float('nan') if rank == 0 else y))",
        "nan",
        ["NaN born on rank 0, in the loss", "at step 2"],
    ),
    "loss": (
        "train(nothing, 2, loss_of=lambda out: out.mean() + (torch.log(out.sum() * 0) if rank == 2 else 0))",
        "nan",
        ["inf born on rank 2, in the loss, at step 2"],
    ),
    "loss, its gradient": (
        (
            "root = lambda out: (out - out.detach()).square().sum().sqrt()\n"
            "train(nothing, 2, loss_of=lambda out: root(out) if rank == 1 else out.mean())"
        ),
        "nan",
        ["NaN born on rank 1, in the loss (its gradient), at step 2"],
    ),
    "parameter, one rank": (
        "train(lambda net, o: net.blocks[1].attn.out.weight.data.mul_(float('nan') if rank == 1 else 1.0), 2)",
        "nan",
        ["NaN born on rank 1, in a parameter of `blocks.1.attn.out`, before the step", "at step 2"],
    ),
    "optimizer, its state on one rank": (
        "train(lambda net, o: o.state[net.head.bias]['exp_avg'].mul_(float('nan') if rank == 1 else 1.0), 3)",
        "nan",
        ["NaN born on rank 1, in the optimizer's step, in `head` (parameter head.bias), at step 3"],
    ),
    "optimizer, learning rate": (
        "train(lambda net, o: o.param_groups[0].update(lr=math.inf), 2, optimizer_class=torch.optim.SGD)",
        "nan",
        ["born on ranks 0-2, in the optimizer's step, in `blocks.0.norm`", "at step 2"],
    ),
    "collective, a sum that overflows": (
        "train(lambda net, o: net.head.bias.register_hook(lambda g: g * 0 + 2e38), 2, 'plain')",
        "nan",
        ["inf born on ranks 0-2, in a collective", "its inputs are finite on all ranks", "all_reduce #", "at step 2"],
    ),
    "collective, compression": (
        "train(nothing, 2, 'fp16 hook', loss_of=lambda out: out[0, 0, 0] * (1e7 if rank == 1 else 1))",
        "nan",
        ["inf born on rank 1, in a collective", "carries float16, the gradients are float32", "at step 2"],
    ),
    "gradient, changed by the cell": (
        "train(nothing, 2, before_step=lambda net: net.head.weight.grad.mul_(float('nan')))",
        "nan",
        ["NaN born on ranks 0-2, in the gradient of `head`, between the backward pass and the optimizer's step"],
    ),
    "norm": (
        "train(nothing, 2, loss_of=lambda out: out.sum() * 1e6)",
        "norm > 1000",
        ["the gradient norm", "is above the limit of 1000, at step 2"],
    ),
    "norm, of which another rank has the largest shard": (
        (
            "def enlarge(net):\n"
            "    net.head.weight.grad.to_local().fill_(1e4 if rank == 1 else 0.0)\n"
            "    net.blocks[0].mlp[0].bias.grad.to_local().fill_(100.0)\n"
            "train(nothing, 2, 'fsdp', before_step=enlarge)"
        ),
        "norm > 1000",
        ["the gradient norm", "is above the limit of 1000, at step 2", "`head` has the largest gradient"],
    ),
    "norm, in a closure": (
        "train_with_closure(nothing, 2, scale=1e6)",
        "norm > 1000",
        ["the gradient norm", "is above the limit of 1000, at step 2"],
    ),
    "backward, in a closure, one rank": (
        "train_with_closure(change('blocks.1.gate', poison(2)), 3)",
        "nan",
        ["NaN born on rank 2, in `blocks.1.gate` backward, at step 3", "ranks 0-1 received it in all_reduce #"],
    ),
    "forward, in a closure that is called several times, one rank": (
        "train_with_closure(change('blocks.1.gate', spoil(1)), 2, torch.optim.LBFGS, max_iter=3)",
        "nan",
        ["NaN born on rank 1, in `blocks.1.gate` forward, at step 2", "ranks 0,2 received it in all_reduce #"],
    ),
    "optimizer, in a closure that is called several times, one rank": (
        (
            "def plant(net, o):\n    o.param_groups[0]['lr'] = math.nan if rank == 1 else 0.1\n"
            "train_with_closure(plant, 1, torch.optim.LBFGS, max_iter=3)"
        ),
        "nan",
        ["NaN born on rank 1, in the optimizer's step, in `blocks.0.norm`", "at step 1"],
    ),
    "optimizer, the second one": (
        (
            "train_in_two_groups(\n"
            "    lambda net, o: o.state[net.head.bias]['exp_avg'].mul_(math.nan if rank == 1 else 1.0), 2)"
        ),
        "nan",
        ["NaN born on rank 1, in the optimizer's step, in `head` (parameter head.bias), at step 2"],
    ),
    "optimizer, bad gradients of the second one": (
        "train_in_two_groups(lambda net, o: net.head.weight.grad.mul_(math.nan if rank == 2 else 1.0), 2)",
        "nan",
        ["NaN born on rank 2, in the gradient of `head`, between the backward pass and the optimizer's step"],
    ),
    "one rank alone": (
        "if rank == 1:\n    train(change('blocks.1.gate', spoil(1)), 2, 'alone')",
        "nan",
        ["NaN born, in `blocks.1.gate` forward, at step 2, line 2"],
    ),
}
STANDARD = (
    *("forward, code of a module, one rank", "backward, a module, one rank", "optimizer, its state on one rank"),
    *("optimizer, the second one", "norm, in a closure", "backward, in a closure, one rank"),
)
DEVICE = (
    *("forward, code of a module, one rank", "backward, a module, one rank", "norm, in a closure"),
    *("backward, in a closure, one rank", "collective, compression"),
)
PERMUTATIONS = (
    *("forward, a module, all ranks", "forward, two ranks", "forward, gradients reduced by the cell"),
    *("backward, code of a module, one rank", "backward, a module, all ranks", "backward, derivative of a root"),
    *("backward, sharded", "data, labels", "loss", "optimizer, learning rate", "norm"),
    "optimizer, bad gradients of the second one",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with rankbook.start(3) as started:
        started.run(SETUP)
        yield started


def evaluate(cluster: Cluster, expression: str) -> list[object]:
    """Return the value of `expression` on all ranks."""
    cluster.run(f"value = {expression}")
    return cluster.pull("value")


@pytest.fixture
def as_on_an_accelerator(cluster: Cluster) -> Iterator[None]:
    """Let the watch read numbers as those of a device: all together, before the step of the optimizer."""
    cluster.run("from rankbook.numerics import watch\nhost, watch.is_on_host = watch.is_on_host, lambda _: False")
    yield
    cluster.run("watch.is_on_host = host")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in DEVICE else pytest.mark.full) for name in CASES]
)
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_planted_value_is_attributed_where_reading_waits_for_a_device(cluster, name):
    test_planted_value_is_attributed(cluster, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.processes
            if name in STANDARD
            else pytest.mark.full
            if name in PERMUTATIONS
            else pytest.mark.slow,
        )
        for name in CASES
    ],
)
def test_planted_value_is_attributed(cluster, name):
    code, condition, expected = CASES[name]
    cluster.watch_numbers(condition)
    with pytest.raises(NumericalError) as caught:
        cluster.run(code)
    text = str(caught.value)
    assert [part for part in expected if part not in text] == [], text
    # All ranks end with the same error, and can go on.
    assert len({error.value for error in caught.value.errors.values()}) == 1
    cluster.run("dist.barrier()")


@pytest.mark.processes
def test_inputs_of_the_culprit_are_kept_where_it_was(cluster):
    cluster.watch_numbers("nan")
    with pytest.raises(NumericalError, match="the inputs of the module are in nonfinite_inputs there"):
        cluster.run("train(change('blocks.1.gate', spoil(1)), 2)")
    assert evaluate(cluster, "None if nonfinite_inputs is None else tuple(nonfinite_inputs[0].shape)") == [
        None,
        (4, 5, 8),
        None,
    ]


@pytest.mark.processes
def test_step_with_bad_numbers_leaves_the_parameters_as_they_were(cluster):
    cluster.watch_numbers("nan")
    cluster.run("kept = []\ndef keep(net, optimizer):\n    kept[:] = [net, net.head.weight.detach().clone()]")
    with pytest.raises(NumericalError):
        cluster.run("train(keep, 2, loss_of=lambda out: out.mean() * (float('nan') if rank == 1 else 1.0))")
    assert evaluate(cluster, "torch.equal(kept[0].head.weight, kept[1])") == [True, True, True]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("condition", "arguments"),
    [("nan", "change('blocks.1.gate', poison(1)), 2"), ("norm > 1000", "nothing, 2, scale=1e6")],
)
def test_closure_with_bad_gradients_leaves_the_parameters_as_they_were(cluster, condition, arguments):
    cluster.watch_numbers(condition)
    with pytest.raises(NumericalError):
        cluster.run(f"train_with_closure({arguments})")
    assert evaluate(cluster, "all(map(torch.equal, net.parameters(), weights_before))") == [True] * 3


@pytest.mark.processes
def test_watch_that_is_off_leaves_no_hook(cluster):
    hook_counts = (
        "(len(torch.nn.modules.module._global_forward_hooks), len(optimizer_hooks._global_optimizer_pre_hooks),"
        " len(optimizer_hooks._global_optimizer_post_hooks), torch.Tensor.backward.__module__)"
    )
    cluster.watch_numbers("off")  # the test before may have left it on
    before = evaluate(cluster, hook_counts)  # a rank has hooks of its own
    assert before[0][3] == "torch._tensor"
    cluster.watch_numbers("nan", "norm > 5")
    assert cluster.watched_numbers == "nan, norm > 5"
    assert evaluate(cluster, hook_counts) != before
    cluster.watch_numbers("off")
    assert cluster.watched_numbers == "off"
    assert evaluate(cluster, hook_counts) == before
    cluster.run("train(change('blocks.1.gate', spoil(1)), 2)")


@pytest.mark.slow
def test_optimizer_of_one_rank_may_step_after_that_of_all_ranks(cluster):
    cluster.watch_numbers("nan", "norm > 1e9")
    cluster.run(
        "probe = nn.Linear(8, 1); sgd = torch.optim.SGD(probe.parameters(), lr=0.1)\n"
        "net = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))\n"
        "adam = torch.optim.AdamW(net.parameters())\n"
        "for _ in range(2):\n"
        "    net(torch.randn(4, 8)).square().mean().backward()\n"
        "    if rank == 0: probe(torch.randn(4, 8)).mean().backward()\n"
        "    adam.step()\n"
        "    if rank == 0: sgd.step()\n"
        "dist.barrier()",
        timeout=60,
    )


@pytest.mark.processes
def test_training_of_some_ranks_waits_for_no_other(cluster):
    cluster.watch_numbers("nan")
    cluster.run("pair = dist.new_group([0, 1])")
    cluster.run(
        "net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1), process_group=pair)\n"
        "sgd = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net(torch.ones(2, 4)).mean().backward(); sgd.step()",
        ranks=[0, 1],
        timeout=30,
    )
    with pytest.raises(NumericalError, match="in the data: the input of `net`"):
        cluster.run("net(torch.full((2, 4), float('nan'))).mean().backward(); sgd.step()", ranks=[0, 1], timeout=30)


@pytest.mark.slow
def test_inputs_can_be_used_in_a_cell_of_their_own(cluster):
    cluster.watch_numbers("nan")
    with pytest.raises(NumericalError, match="born on rank 1"):
        cluster.run("train(change('blocks.1.gate', spoil(1)), 2)")
    cluster.run("if rank == 1: nn.Linear(8, 8)(nonfinite_inputs[0] * float('nan'))")
    cluster.run("train(nothing, 2)")


@pytest.mark.slow
def test_norm_is_named_although_a_collective_has_carried_an_infinity(cluster):
    cluster.watch_numbers("nan", "norm > 1e-9")
    with pytest.raises(NumericalError, match=r"the gradient norm .* is above the limit of 1e-09"):
        cluster.run("dist.all_reduce(torch.tensor(math.inf), dist.ReduceOp.MIN)\ntrain(nothing, 1)")


@pytest.mark.slow
def test_restarted_rank_watches_too(cluster):
    cluster.watch_numbers("nan")
    cluster.restart(2)
    cluster.run(SETUP)
    with pytest.raises(NumericalError, match="born on rank 2"):
        cluster.run("train(change('blocks.1.gate', spoil(2)), 2)")


@pytest.mark.slow
def test_healed_rank_watches_if_a_cell_has_switched_the_watch_on(cluster):
    cluster.watch_numbers("off")
    cluster.run("rankbook.watch_numbers('nan', 'norm > 123456.789')")
    os.kill(cluster.status()[2].pid or 0, signal.SIGKILL)
    cluster.heal()
    with pytest.raises(NumericalError, match="born on rank 2"):
        cluster.run("train(change('blocks.1.gate', spoil(2)), 2)")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "cell"), [("nan", "off"), ("off", "norm > 123456.789")])
def test_restarted_rank_watches_what_a_cell_has_changed_the_watch_to(cluster, command, cell):
    cluster.watch_numbers(command)
    cluster.run(f"rankbook.watch_numbers({cell!r})")
    cluster.restart(1)
    cluster.run(SETUP)
    assert cluster.apply(active_words) == [() if cell == "off" else (cell,)] * 3
    cluster.run("train(nothing, 2)")  # the ranks exchange equally many flags


@pytest.mark.slow
def test_scaler_that_skips_steps_is_no_alarm(cluster):
    cluster.watch_numbers("nan", "inf")
    cluster.run(
        "net = nn.Linear(4, 1); sgd = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**127)\n"
        "for _ in range(8):\n"
        "    scaler.scale((net(torch.ones(2, 4)) * 4).mean()).backward()\n"
        "    scaler.step(sgd); scaler.update(); sgd.zero_grad()\n"
    )
    assert all(scale < 2.0**127 for scale in evaluate(cluster, "scaler.get_scale()"))
    with pytest.raises(NumericalError, match="in the data: the input of `net`"):
        cluster.run(
            "scaler.scale(net(torch.full((2, 4), float('nan'))).mean()).backward(); scaler.step(sgd); scaler.update()"
        )


@pytest.mark.slow
def test_a_forward_pass_of_one_rank_that_spoils_the_gradients_of_a_scaler_is_reported_on_all_ranks(cluster):
    cluster.watch_numbers("nan")
    cluster.run(
        "net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1)); sgd = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "def take(bad=False):\n"
        "    scaler.scale(net(torch.full((2, 4), float('nan') if bad else 1.0)).mean()).backward()\n"
        "    scaler.step(sgd); scaler.update(); sgd.zero_grad()\n"
        "take()"
    )
    with pytest.raises(NumericalError, match=r"rank 1.* in the data: the input of `net`"):
        cluster.run("take(rank == 1)")
    cluster.run("take()")
