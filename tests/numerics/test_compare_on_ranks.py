"""`rankbook.compare` on real ranks: planted bugs are located, clean layouts agree, and the user's objects stay."""

from __future__ import annotations

import pytest

from tests.rank_processes import run_ranks


def model_and_data(rank, *, dropout=0.0, norm=False, seed=0):
    """Return a small model, its optimizer with some state, and this rank's batch."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 16), middle, nn.Linear(16, 4))
    net.tp_plan = {"0": "colwise", "3": "rowwise"}
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=True)  # torch's default on CUDA
    for _ in range(2):  # moments that are not zero
        net(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(100 + rank)
    return net, optimizer, (torch.randn(4, 8), torch.randn(4, 4))


def plain_step(model, optimizer, batch):
    import torch.nn.functional as F

    x, y = batch
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def planted_bugs():  # noqa: C901 - one set of processes for all
    """Return what `compare` says of each planted bug, on 3 ranks."""
    import copy

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from rankbook import AcceleratorState
    from rankbook.numerics import compare

    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}

    def check(name, step, model, optimizer, batch, **options):
        result = compare(step, model, optimizer, batch, **options)
        first = result.first
        found[name] = (
            None
            if first is None
            else (first.phase, first.module, result.ranks, result.relation and result.relation.kind),
            str(result),
        )

    def reduced_by_hand(change):
        def step(model, optimizer, batch):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            for name, parameter in model.named_parameters():
                change(name, parameter)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def missing(name, parameter):
        if name != "3.weight":
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    net, optimizer, batch = model_and_data(rank)
    check("missing all-reduce", reduced_by_hand(missing), net, optimizer, batch)
    check("sum for mean", reduced_by_hand(lambda _, p: dist.all_reduce(p.grad)), net, optimizer, batch)

    def without_one(name, parameter):
        if name == "0.weight" and dist.get_rank() == 2:
            parameter.grad.zero_()
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    check("one rank missing", reduced_by_hand(without_one), net, optimizer, batch)

    # Ranks of one tensor-parallel group that draw other random numbers.
    from rankbook.runtime.config import Handlers, ParallelismConfig
    from rankbook.runtime.strategies.base import StrategySetup
    from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel, TensorParallel

    net, _, batch = model_and_data(0, dropout=0.5)
    net.tp_plan = {"3": "colwise", "5": "rowwise"}
    setup = StrategySetup(torch.device("cpu"), world, rank, None, ParallelismConfig(tp_size=world), Handlers())
    net[3], net[4], net[5] = torch.nn.Linear(16, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4)
    net = TensorParallel(setup).wrap(net)
    torch.manual_seed(rank)
    check("unsynchronised dropout", plain_step, net, torch.optim.SGD(net.parameters(), 0.1), batch)

    net, optimizer, batch = model_and_data(rank, norm=True)
    if rank == 1:
        net[4].running_mean += 0.1
    model = DistributedDataParallel(net, broadcast_buffers=False, init_sync=False)
    check("unsynchronised buffer", plain_step, model, optimizer, batch)

    def half_on_one(model, optimizer, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1):
            output = model(batch[0])
        F.mse_loss(output.float(), batch[1]).backward()
        optimizer.step()

    net, optimizer, batch = model_and_data(rank)
    check("one rank in bf16", half_on_one, DistributedDataParallel(net), optimizer, batch)

    net, optimizer, batch = model_and_data(rank)
    average = copy.deepcopy(net)

    def stale_average(model, optimizer, batch):
        plain_step(model, optimizer, batch)
        if dist.get_rank() == 0:
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)

    check("stale EMA", stale_average, DistributedDataParallel(net), optimizer, batch, also={"ema": average})

    net, optimizer, batch = model_and_data(rank)
    net.append(torch.nn.Linear(8, 16))
    net[6].weight, net[6].bias = net[0].weight, net[0].bias
    net.forward = lambda x: net[5](net[4](net[3](net[6](x)))) + net[5](net[0](x))
    if rank == 2:
        net[6].weight = torch.nn.Parameter(net[6].weight.detach().clone())
    check("tied weight that came apart", plain_step, net, optimizer, batch)

    net, _, batch = model_and_data(rank)
    net = FullyShardedDataParallel(StrategySetup(torch.device("cpu"), world, rank)).wrap(net)

    def clip_a_shard(model, optimizer, batch):
        x, y = batch
        (100 * F.mse_loss(model(x), y)).backward()
        local = [g.to_local() if isinstance(g := p.grad, DTensor) else g for p in model.parameters()]
        norm = sum(g.square().sum() for g in local).sqrt()
        for gradient in local:
            gradient.mul_(1.0 / norm)
        optimizer.step()

    check("clipping over a shard", clip_a_shard, net, torch.optim.SGD(net.parameters(), 0.1), batch)

    net, optimizer, batch = model_and_data(rank)
    if rank == 1:
        del optimizer.param_groups[0]["params"][-1]
    check("frozen parameter in one optimizer", plain_step, DistributedDataParallel(net), optimizer, batch)

    net, optimizer, batch = model_and_data(rank)
    if rank == 2:
        optimizer.state[net[3].weight]["exp_avg"] *= 1.5
    check("optimizer state that differs", plain_step, DistributedDataParallel(net), optimizer, batch)

    def scaled_twice(model, optimizer, batch):
        x, y = batch
        (F.mse_loss(model(x), y) / dist.get_world_size()).backward()
        optimizer.step()

    net, optimizer, batch = model_and_data(rank)
    check("wrong loss scale", scaled_twice, DistributedDataParallel(net), optimizer, batch)
    AcceleratorState._reset_state()
    return found


EXPECTED = {
    "missing all-reduce": ("gradient", "3", (0, 1, 2), "not reduced"),
    "sum for mean": ("gradient", "5", (0, 1, 2), "×N"),
    "one rank missing": ("gradient", "0", (0, 1, 2), "rank missing"),
    "unsynchronised dropout": ("forward", "2", (1, 2), "mask"),
    "unsynchronised buffer": ("start", "4", (1,), "other"),
    "one rank in bf16": ("forward", "0", (1,), "precision"),
    "stale EMA": ("parameter", "ema.0", (1, 2), "unchanged"),
    "tied weight that came apart": ("start", "6", (2,), None),
    "clipping over a shard": ("clipped gradient", "5", (0, 1, 2), "shards scaled"),
    "frozen parameter in one optimizer": ("start", "5", (1,), None),
    "optimizer state that differs": ("start", "3", (2,), "factor"),
    "wrong loss scale": ("loss", "loss", (0, 1, 2), "÷N"),
}


def complex_parameters():
    """Return what `compare` and `gradients` say of a model with complex parameters and outputs, on 2 ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from rankbook.numerics import compare
    from rankbook.numerics.gradients import local_gradients

    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1.0, 2.0j, 1.0 - 1.0j]))

        def forward(self, x):
            return (torch.fft.rfft(x) * self.factor).conj()

    torch.manual_seed(dist.get_rank())
    net, batch = nn.Sequential(Spectrum()), torch.randn(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)

    def step_with(divisor):
        def step(model, optimizer, batch):
            model(batch).abs().square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size() if divisor else 1
            optimizer.step()

        return step

    clean, summed = (compare(step_with(divisor), net, optimizer, batch) for divisor in (True, False))
    net[0].factor.grad = torch.full((3,), 3.0 + 4.0j)
    norm = local_gradients(net, "net").entries[0].norm
    return clean.equal, summed.first.phase, summed.relation.kind, norm


@pytest.mark.processes
def test_complex_parameters_are_compared():
    for equal, phase, relation, norm in run_ranks(complex_parameters):
        assert (equal, phase, relation) == (True, "gradient", "×N")
        assert norm == pytest.approx(75**0.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_planted_bugs_are_located_and_explained():
    results = run_ranks(planted_bugs, 3, timeout=240)
    assert results[0] == results[1] == results[2]  # the same verdict on all ranks
    wrong = {name: results[0][name] for name, expected in EXPECTED.items() if results[0][name][0] != expected}
    assert wrong == {}


def clean_layouts():
    """Return what `compare` says of layouts that compute the same, on 4 ranks."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from rankbook.numerics import compare
    from rankbook.numerics.recording import Layout
    from rankbook.runtime.config import ParallelismConfig
    from rankbook.runtime.training import clip_norm

    rank = dist.get_rank()
    results = {}

    def clipped(model, optimizer, batch):
        x, y = batch
        (100 * F.mse_loss(model(x), y)).backward()
        clip_norm(list(model.parameters()), 0.5, 2, torch.device("cpu"))
        optimizer.step()

    def by_hand(model, optimizer, batch):
        x, y = batch
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()

    def accumulated(model, optimizer, batch):
        x, y = batch
        for half in (slice(0, 2), slice(2, 4)):
            (F.mse_loss(model(x[half]), y[half]) / 2).backward()
        optimizer.step()

    mesh = Layout("tp", parallelism=ParallelismConfig(dp_shard_size=2, tp_size=2))
    cases = {
        "ddp": (("one rank", "ddp"), plain_step, {}),
        "ddp, dropout": (("one rank", "ddp"), plain_step, {"dropout": 0.3}),
        "ddp, batch norm": (("one rank", "ddp"), plain_step, {"norm": True}),
        "ddp, accumulation": (("one rank", "ddp"), accumulated, {}),
        "ddp, accumulation, batch norm": (("one rank", "ddp"), accumulated, {"norm": True}),
        "fsdp2": (("one rank", "fsdp2"), plain_step, {}),
        "fsdp2, clipping": (("one rank", "fsdp2"), clipped, {}),
        "tp": (("one rank", "tp"), plain_step, {}),
        "tp, clipping": (("one rank", "tp"), clipped, {}),
        "mesh": (("one rank", mesh), plain_step, {}),
        "mesh, clipping": (("one rank", mesh), clipped, {}),
        "ddp and fsdp2": (("ddp", "fsdp2"), clipped, {"dropout": 0.3}),
        "fsdp2 and mesh": (("fsdp2", mesh), plain_step, {}),
        "reduced by hand": (("current", "one rank"), by_hand, {}),
        "bf16, ddp": (("one rank bf16", "ddp bf16"), clipped, {}),
        "bf16, fsdp2": (("one rank bf16", "fsdp2 bf16"), plain_step, {"dropout": 0.3}),
        "bf16, tp": (("one rank bf16", "tp bf16"), plain_step, {}),
    }
    for name, (layouts, step, options) in cases.items():
        net, optimizer, batch = model_and_data(rank, **options)
        result = compare(step, net, optimizer, batch, layouts=layouts)
        results[name] = (result.equal, repr(result))
    net, optimizer, batch = model_and_data(rank, dropout=0.3)
    model = DistributedDataParallel(net)
    for _ in range(2):  # before and after a step of training
        result = compare(plain_step, model, optimizer, batch)
        results[f"current, step {_}"] = (result.equal, repr(result))
        plain_step(model, optimizer, batch)
    # Models that are prepared already, and stay so.
    from rankbook import Accelerator, AcceleratorState, FullyShardedDataParallelPlugin

    parallelism = ParallelismConfig(dp_shard_size=2, tp_size=2)
    for options in ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, {"parallelism_config": parallelism}):
        AcceleratorState._reset_state()
        torch.manual_seed(rank // 2)  # ranks of a tensor-parallel group draw the same
        net, optimizer, _ = model_and_data(0)
        model, optimizer = Accelerator(**options).prepare(net, optimizer)
        torch.manual_seed(rank // 2)
        batch = (torch.randn(4, 8), torch.randn(4, 4))
        for layouts in (("one rank", "current"), ("current", "fsdp2")):
            result = compare(clipped, model, optimizer, batch, layouts=layouts)
            results[f"prepared {list(options)}, {layouts}"] = (result.equal, repr(result))
        plain_step(model, optimizer, batch)
    return results


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clean_layouts_agree():
    results = run_ranks(clean_layouts, 4, timeout=240)[0]
    assert {name: text for name, (equal, text) in results.items() if not equal} == {}
    assert len(results) >= 10


def compare_copies():
    """Return the answers that are wrong for copies of models that need special care, and the number of all answers."""
    import contextlib

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    from rankbook import Accelerator, AcceleratorState
    from rankbook.numerics import compare
    from rankbook.runtime.config import ParallelismConfig

    answers = {}
    net, _, batch = model_and_data(0)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=dist.get_world_size()))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for layouts in (("one rank", "tp"), ("tp", "current")):
        answers[f"prepared with tensor parallelism, {layouts}"] = compare(
            plain_step, model, optimizer, batch, layouts=layouts
        )
    AcceleratorState._reset_state()

    class Experts(nn.Module):
        """A layer that no rank uses, and one of which every rank uses another part."""

        def __init__(self):
            super().__init__()
            self.unused, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.experts[int(x[0, 0] > 0)](x))

    torch.manual_seed(dist.get_rank())
    batch = (torch.randn(4, 8), torch.randn(4, 4))
    batch[0][0, 0] = 1 - 2 * dist.get_rank()
    torch.manual_seed(0)
    net = Experts()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for layouts in (("one rank", "ddp"), ("ddp", "one rank")):
        answers[f"unused layers, {layouts}"] = compare(plain_step, net, optimizer, batch, layouts=layouts)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    for layouts in (("one rank", "ddp"), ("current", "ddp")):
        answers[f"unused layers, DDP, {layouts}"] = compare(plain_step, model, optimizer, batch, layouts=layouts)

    class Recomputed(nn.Module):
        """A model whose DDP must not look for unused parameters."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=True))

    net = Recomputed()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    answers["recomputed"] = compare(plain_step, net, optimizer, batch, layouts=("ddp", "fsdp2"))

    def step_of_two_losses(model, optimizer, batch):
        inputs, targets = batch
        outputs = model(inputs)
        with contextlib.suppress(RuntimeError):  # which is caught, as a retry after too little memory does
            torch.autograd.backward(outputs)
        torch.autograd.backward([(outputs - targets).square().mean(), outputs.abs().mean()])
        optimizer.step()
        optimizer.zero_grad()

    for layouts in (("one rank", "ddp"), ("ddp", "fsdp2")):
        answers[f"two losses, {layouts}"] = compare(step_of_two_losses, net, optimizer, batch, layouts=layouts)
    return {name: str(answer) for name, answer in answers.items() if not answer.equal}, len(answers)


@pytest.mark.processes
def test_copies_of_tensor_parallel_models_and_of_models_with_unused_layers_agree():
    assert run_ranks(compare_copies, 2) == [({}, 9)] * 2


def options_of_the_copy():
    """Return the options of DDP in the layout "ddp" of a model under DDP, with and without them."""
    from torch.nn.parallel import DistributedDataParallel

    from rankbook.numerics import recording
    from rankbook.numerics.settings import Layout

    options = {"static_graph": True, "broadcast_buffers": False, "gradient_as_bucket_view": True}
    copies = []
    for given in (options, {}):
        model = DistributedDataParallel(model_and_data(0)[0], **given)
        built = recording.build(Layout("ddp"), model, None)
        copies.append([getattr(built.model, name) for name in (*options, "find_unused_parameters")])
        built.release()
    return copies


@pytest.mark.processes
def test_the_layout_ddp_has_the_options_of_the_current_ddp():
    assert run_ranks(options_of_the_copy, 2) == [[[True, False, True, False], [False, True, False, False]]] * 2


def weight_that_came_apart():
    """Return the answers for a weight of rank 1 that differs, with "current" as one of the layouts."""
    import torch
    import torch.distributed as dist

    from rankbook.numerics import compare

    net, optimizer, batch = model_and_data(dist.get_rank())
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[0].weight[3] += 0.5
    layouts = [("one rank", "current"), ("current", "ddp"), ("current", "one rank")]
    return [compare(plain_step, net, optimizer, batch, layouts=pair) for pair in layouts]


@pytest.mark.processes
def test_replicas_that_came_apart_are_found_and_measured_with_each_reference():
    for answers in run_ranks(weight_that_came_apart, 2):
        for answer in answers:
            first = answer.first
            assert (first.phase, first.name, answer.ranks) == ("start", "0.weight", (1,))
            assert first.size > 0.1
            assert str(answer).endswith("the replicas of the parameter have come apart")


def check_preserved():
    """Compare in the current layout, and return what has changed of the user's objects."""
    import random

    import numpy
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from rankbook.numerics import compare

    net, optimizer, batch = model_and_data(dist.get_rank(), dropout=0.5, norm=True)
    model = DistributedDataParallel(net)
    model(batch[0]).mean().backward()
    gradients = [parameter.grad for parameter in net.parameters()]

    def state():
        return {
            **{f"parameter {k}": v.clone() for k, v in net.state_dict().items()},
            **{f"gradient {k}": v.grad.clone() for k, v in net.named_parameters()},
            **{
                f"state {index} {key}": value.clone()
                for index, entry in enumerate(optimizer.state.values())
                for key, value in entry.items()
            },
            "torch": torch.get_rng_state(),
            "numpy": torch.tensor(numpy.random.get_state()[1].astype("int64")),  # noqa: NPY002
            "random": torch.tensor(random.getstate()[1]),
        }

    before = state()
    net.eval()
    result = compare(plain_step, model, optimizer, batch)
    after = state()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    same = all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), gradients, strict=True))
    hooks = sum(len(module._forward_hooks) for module in net.modules())
    return changed, same, net.training, hooks, torch.Tensor.backward.__module__, result.equal, dist.get_world_size()


@pytest.mark.processes
def test_nothing_of_the_user_is_changed():
    assert run_ranks(check_preserved, 2) == [([], True, False, 0, "torch._tensor", True, 2)] * 2


def prepared_objects():
    """Return what `compare` says of a prepared model, loader and loss, and whether the loader has stayed."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from rankbook import Accelerator, InvalidArgument
    from rankbook.numerics import compare

    rank = torch.distributed.get_rank()
    accelerator = Accelerator()
    net, optimizer, _ = model_and_data(rank)
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), torch.arange(24.0) % 4)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))

    def loss(output, target):
        return F.cross_entropy(output, target.long())

    def passes(*, compared):
        torch.manual_seed(5)
        loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
        rows, verdicts = [], []
        for epoch in range(2):
            if compared:
                verdicts.append(compare(model=model, optimizer=optimizer, loader=loader, loss=loss))
            for number, (_, target) in enumerate(loader):
                rows.append(target.tolist())
                if epoch == 1 and number == 1:
                    break
        return rows, verdicts, loader.seen().counts, float(torch.rand(()))

    plain, compared = passes(compared=False), passes(compared=True)
    wrong = []
    for options in (
        {"model": model},
        {"batch": 1},
        {"step": model, "model": model, "batch": 1},
        {"model": model, "batch": 1, "loader": [1]},
        {"model": model, "loader": []},
        {"model": model, "step": print, "loss": print, "batch": 1},
        {"model": model, "batch": torch.randn(4, 8)},
    ):
        try:
            compare(**options)
        except InvalidArgument as error:
            wrong.append(str(error))

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 4)

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.fc(x), labels)}

    torch.manual_seed(0)
    own = WithLoss()
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4)}
    of_model = compare(model=own, batch=batch, layouts=("one rank", "ddp"))
    return (
        [str(verdict) for verdict in compared[1]],
        [len(verdict.phases) for verdict in compared[1]],
        plain[0] == compared[0],
        plain[2] == compared[2],
        plain[3] == compared[3],
        wrong,
        of_model.equal,
    )


@pytest.mark.processes
def test_prepared_model_loader_and_loss_are_compared_and_the_loader_stays():
    for verdicts, phases, same_rows, same_samples, same_random, wrong, of_model in run_ranks(prepared_objects, 2):
        assert all(verdict.startswith("one rank and current agree") for verdict in verdicts), verdicts
        assert phases == [7, 7] and same_rows and same_samples and same_random and of_model
        assert [text.split(":")[0].split(",")[0] for text in wrong] == [
            "expected either a batch or a loader",
            "expected a model",
            "the first argument is a model",
            "expected either a batch or a loader",
            "the loader has no batch on this rank",
            "expected either a step",
            "expected a loss of one element with a gradient",
        ]
