"""Test every field of the plugins and handlers on real ranks. Training equals that of a plain model."""

from __future__ import annotations

import logging
import math
from datetime import timedelta

import pytest

from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes


def parts():
    """Return a model with blocks, a plain copy of it, an optimizer for each, and a step of both that compares them."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.ran = nn.Linear(6, 8), nn.Linear(8, 6), []

        def forward(self, inputs):
            self.ran.append(self.up.weight.dtype)
            return inputs + self.down(self.up(inputs).tanh())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 2)

        def forward(self, inputs):
            return self.head(self.second(self.first(inputs)))

    torch.manual_seed(5)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    return model, twin


def train(accelerator, raw, twin, tolerance=1e-5, draw=None):
    """Train both alike, with what `draw(ranks)` returns for every rank; rows of numbers by default."""
    import torch

    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(2):
        ranks = accelerator.num_processes
        data = torch.randn(ranks, 4, 6) if draw is None else draw(ranks)
        accelerator.backward(model(data[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        twin(data.flatten(0, 1)).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.allclose(value, twin.state_dict()[name], atol=tolerance), name
    return model


def shards():
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from rankbook.errors import InvalidArgument
    from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)

    def units(tolerance=1e-5, ran=0, **options):
        raw, twin = parts()
        for model_copy in (raw, twin) if "ignored_modules" in options else ():
            model_copy.head.requires_grad_(False)  # its gradients would be each rank's own
        plugin_options = {
            name: value(raw) if getattr(value, "__name__", "") == "<lambda>" else value
            for name, value in options.items()
        }
        model = train(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin_options)), raw, twin, tolerance)
        unsharded = [name for name, child in model.named_parameters() if not isinstance(child, DTensor)]
        assert len(raw.first.ran) == 2 + ran, options
        kinds = {str(kind).removeprefix("torch.") for kind in raw.first.ran}
        return [name for name, child in model.named_modules() if isinstance(child, FSDPModule)], unsharded, kinds

    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    results = {
        "plain": units(),
        "none": units(auto_wrap_policy="no_wrap"),
        "named": units(**blocks),
        "sized": units(auto_wrap_policy="size_based_wrap", min_num_params=50),
        "chosen": units(auto_wrap_policy=is_head),
        "kept": units(reshard_after_forward=False, **blocks),
        "ignored": units(ignored_modules=lambda model: iter([model.head])),
        "ignored by name": units(ignored_modules="head"),
        "half": units(3e-2, mixed_precision_policy="bf16"),
        "half, as a dict": units(3e-2, mixed_precision_policy={"param_dtype": torch.bfloat16}),
        "offloaded": units(cpu_offload=True),
        "again": units(ran=2, activation_checkpointing=True, **blocks),
    }
    # Prepared again, and released: the units recompute their activations once, and then not at all.
    raw, twin = parts()
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, **blocks)
    accelerator = Accelerator(fsdp_plugin=plugin)
    train(accelerator, raw, twin)
    raw.head.requires_grad_(False)
    twin.head.requires_grad_(False)
    raw.first.ran.clear()
    train(accelerator, raw, twin)
    assert len(raw.first.ran) == 4
    accelerator.free_memory()
    raw.first.ran.clear()
    raw(torch.ones(2, 6)).sum().backward()
    assert len(raw.first.ran) == 1
    for words, options in (
        ("requires an auto_wrap_policy", {"activation_checkpointing": True}),
        ("unknown mixed_precision_policy 'fp4'", {"mixed_precision_policy": "fp4"}),
    ):
        with pytest.raises(InvalidArgument, match=words):
            units(**options)
    return results


def is_head(module):
    return module.__class__.__name__ == "Linear" and module.out_features == 2


@pytest.mark.slow
def test_fsdp_options_select_units_ignored_modules_and_dtypes():
    blocks, head = ["", "first", "second"], ["head.weight", "head.bias"]
    all_modules = ["", "first", "first.up", "first.down", "second", "second.up", "second.down"]
    for results in run_ranks(shards, 2, timeout=110):
        assert results == {
            "plain": ([""], [], {"float32"}),
            "none": ([""], [], {"float32"}),
            "named": (blocks, [], {"float32"}),
            "sized": (all_modules, [], {"float32"}),
            "chosen": (["", "head"], [], {"float32"}),
            "kept": (blocks, [], {"float32"}),
            "ignored": ([""], head, {"float32"}),
            "ignored by name": ([""], head, {"float32"}),
            "half": ([""], [], {"bfloat16"}),
            "half, as a dict": ([""], [], {"bfloat16"}),
            "offloaded": ([""], [], {"float32"}),
            "again": (blocks, [], {"float32"}),
        }


def tied():
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from rankbook.errors import InvalidArgument
    from rankbook.runtime import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchTensorParallelConfig,
    )
    from tests.runtime.test_prepare_on_ranks import start_over

    torch.set_num_threads(1)

    def language_model():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 8, bias=False))
        model[3].weight = model[0].weight
        return model

    options = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
    raw, accelerator = language_model(), Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    model = train(accelerator, raw, language_model(), 1e-6, lambda ranks: torch.randint(8, (ranks, 4)))
    assert raw[0].weight is raw[3].weight
    units = [name for name, child in model.named_modules() if isinstance(child, FSDPModule)]
    start_over()
    handler = TorchTensorParallelConfig(plan={"3": "colwise"})
    with pytest.raises(InvalidArgument, match=r"3\.weight is also a parameter of 0 \(tied weights\)"):
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler)).prepare(language_model())
    return units


def test_tied_weights_stay_tied_under_fsdp_units_and_tensor_parallelism_names_them():
    assert run_ranks(tied, 2, timeout=110) == [["", "1"]] * 2


def copies():
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from rankbook.errors import InvalidArgument
    from rankbook.runtime import (
        Accelerator,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ParallelismConfig,
    )

    torch.set_num_threads(1)
    rank, results = torch.distributed.get_rank(), {}

    def prepared_model(**options):
        raw, twin = parts()
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        return train(accelerator, raw, twin, 1e-2 if options.get("comm_hook") else 1e-5)

    model = prepared_model(find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1)
    results["options"] = (
        model.find_unused_parameters,
        model.gradient_as_bucket_view,
        model.bucket_bytes_cap,
    )
    model(torch.ones(1, 6)).sum().mul(0).backward()
    results["static"] = prepared_model(static_graph=True).static_graph
    with pytest.raises(InvalidArgument, match="'bf16' requires a CUDA device"):
        prepared_model(comm_hook="bf16")
    model = prepared_model(comm_hook="fp16")
    model(torch.full((1, 6), 0.37 + rank)).sum().backward()
    grads = [weight.grad for weight in model.parameters()]
    results["hook"] = all(torch.equal(grad, grad.half().float()) for grad in grads)

    options = {"start_powerSGD_iter": 3, "matrix_approximation_rank": 1}
    model = prepared_model(comm_hook=DDPCommunicationHookType.POWER_SGD, comm_wrapper="fp16", comm_state_option=options)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = None
        model(torch.full((1, 6), 0.37 + rank)).sum().backward()
    up = model.module.first.up.weight.grad
    rows = Accelerator().gather(up[None])
    results["low rank"] = (int(torch.linalg.matrix_rank(up)), torch.equal(rows[0], rows[1]))

    raw, _ = parts()
    accelerator = Accelerator(kwargs_handlers=[])
    evaluated = accelerator.prepare_model(raw, evaluation_mode=True)
    results["evaluation"] = (evaluated is raw, isinstance(evaluated, DistributedDataParallel))

    def gradients(model, block):
        """Return the gradients of this rank after one batch in `block`, and the mean of all ranks."""
        for weight in model.parameters():
            weight.grad = None
        with block:
            accelerator.backward(model(torch.full((1, 6), 0.5 + rank)).sum())
        return [getattr(weight.grad, "full_tensor", lambda g=weight.grad: g)() for weight in model.parameters()]

    def same_everywhere(values):
        flat = torch.cat([value.flatten() for value in values])
        rows = accelerator.gather(flat[None])
        return torch.equal(rows[0], rows[1])

    model = accelerator.prepare(raw)
    results["no_sync"] = (
        same_everywhere(gradients(model, accelerator.no_sync(model))),
        same_everywhere(gradients(model, accelerator.no_sync(raw))),
        model.require_backward_grad_sync,
    )
    with accelerator.no_sync(model):
        loss = model(torch.full((1, 6), 0.5 + rank)).sum()
    for parameter in model.parameters():
        parameter.grad = None
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    results["triggered"] = same_everywhere([weight.grad for weight in model.parameters()])

    for each_batch in (False, True):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(raw)
        first = same_everywhere(gradients(model, accelerator.accumulate(model)))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 6), 0.5 + rank)).sum())
        results[f"each batch: {each_batch}"] = (first, same_everywhere([weight.grad for weight in model.parameters()]))

    accelerator = Accelerator(gradient_accumulation_steps=1, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(raw)
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.full((1, 6), 0.5 + rank)).sum())
    results["shards, no_sync"] = [weight.grad is None for weight in model.parameters()]
    accelerator.backward(model(torch.full((1, 6), 0.5 + rank)).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    results["clipped"] = (
        max(weight.grad.full_tensor().abs().max().item() for weight in model.parameters()) <= 0.1 + 1e-7
    )

    if rank == 1:
        accelerator.set_trigger()
    results["trigger"] = (accelerator.check_trigger(), accelerator.check_trigger())
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
    mesh = accelerator.torch_device_mesh
    places = accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank
    results["place"] = (mesh.mesh_dim_names, tuple(mesh.get_coordinate()) == places == (0, rank, 0))
    return results


def test_gradients_are_synchronized_as_configured():
    for results in run_ranks(copies, 2, timeout=110):
        assert results == {
            "options": (True, True, 1 << 20),
            "static": True,
            "hook": True,
            "low rank": (1, True),
            "evaluation": (True, False),
            "no_sync": (False, True, True),
            "triggered": True,
            "each batch: False": (False, True),
            "each batch: True": (True, True),
            "shards, no_sync": [True] * 10,
            "clipped": True,
            "trigger": (True, False),
            "place": (("dp_replicate", "dp_shard", "tp"), True),
        }


def started():
    import torch
    import torch.distributed as dist

    from rankbook.runtime import Accelerator, InitProcessGroupKwargs

    options = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=77))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return accelerator.state.backend, backend.options._timeout, accelerator.gather(torch.tensor([1])).tolist()


def test_a_group_that_is_started_has_the_options_that_were_given():
    assert run_ranks(started, 2, group=False) == [("gloo", timedelta(seconds=77), [1, 1])] * 2


def given_late(backend):
    import torch
    import torch.distributed as dist

    from rankbook.runtime import Accelerator, InitProcessGroupKwargs, PartialState

    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("rankbook").addHandler(handler)
    timeouts = []
    for seconds in (77, 78):  # the state that the first one makes is there at the second one
        options = InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=seconds))
        Accelerator(cpu=True, kwargs_handlers=[options])
        timeouts.append(group.options._timeout.total_seconds())
    PartialState(timeout=79)
    return [*timeouts, group.options._timeout.total_seconds()], records


def test_a_group_that_exists_gets_the_timeout_and_other_options_are_named():
    assert run_ranks(given_late, 2, "gloo") == [([77, 78, 79], [])] * 2
    (timeouts, first), (_, second) = run_ranks(given_late, 2, "mpi")
    assert timeouts == [77, 78, 79]
    assert first == ["the process group exists already, so that backend has no effect"] * 2 and not second


def written(folder):
    import torch

    from rankbook.runtime import Accelerator, ProjectConfiguration

    for each_node in (False, True):
        accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=each_node))
        accelerator.save({"a": torch.ones(1)}, f"{folder}/{each_node}-{accelerator.process_index}")
        accelerator.wait_for_everyone()
    return accelerator.local_process_index


def test_save_on_each_node_writes_one_file_per_node(tmp_path):
    alone = {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert run_ranks(written, 2, str(tmp_path), environment=alone) == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["False-0", "True-0", "True-1"]


def clip_with_sequence_parallelism():
    """Return norm and clamped gradients of a model under sequence parallelism, and those of one process."""
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from rankbook.runtime.training import clip_norm, clip_values

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(2, 4, 4)
    single = copy.deepcopy(model)
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    model(x.chunk(2, 1)[dist.get_rank()]).square().sum().backward()
    single(x).square().sum().backward()
    assert any(placement.is_partial() for placement in model[0].weight.grad.placements)
    norm = float(clip_norm(list(model.parameters()), math.inf, 2, torch.device("cpu")))
    expected = float(nn.utils.clip_grad_norm_(single.parameters(), math.inf))
    clip_values(list(model.parameters()), 0.1)
    nn.utils.clip_grad_value_(single.parameters(), 0.1)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return (
        norm,
        expected,
        max(float((gradient - p.grad).abs().max()) for gradient, p in zip(gradients, single.parameters(), strict=True)),
    )


def test_gradients_that_are_still_summands_are_clipped_like_their_sum():
    for norm, expected, difference in run_ranks(clip_with_sequence_parallelism):
        assert norm == pytest.approx(expected, rel=1e-4) and difference < 1e-5


def largest_gradients():
    """Return the largest gradient under FSDP2, that of one process, and the norm with a NaN on one rank."""
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn

    from rankbook import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    raw, batch = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(2, 4)
    single = copy.deepcopy(raw)
    single(batch).square().sum().backward()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(raw)
    accelerator.backward(model(batch).square().sum())
    largest = float(accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type=math.inf))
    clipped = float(accelerator.clip_grad_norm_(model.parameters(), 1e9, norm_type=math.inf))
    if dist.get_rank() == 1:
        raw[0].weight.grad.to_local()[0, 0] = math.nan
    unknown = float(accelerator.clip_grad_norm_(model.parameters(), math.inf, norm_type=math.inf))
    return largest, float(nn.utils.clip_grad_norm_(single.parameters(), math.inf, math.inf)), clipped, unknown


def test_the_largest_gradient_is_found_where_a_rank_has_no_part_of_a_parameter():
    for largest, expected, clipped, unknown in run_ranks(largest_gradients):
        assert largest == pytest.approx(expected)
        assert clipped == pytest.approx(1e-3, rel=1e-2)
        assert math.isnan(unknown)


def norms_while_accumulating():
    """Return the norms in the first batch of a window under FSDP2, and those of one process."""
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from rankbook import Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, GradientState
    from rankbook.runtime.gradient_state import window

    norms = []
    # With another type of the reduction, FSDP keeps the gradients in another place.
    for policy in (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        torch.manual_seed(0)
        raw, batch = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(2, 4) + dist.get_rank()
        single = copy.deepcopy(raw)
        (single(batch).square().sum() / 2).backward()
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
        model = accelerator.prepare(raw)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().sum())
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e-3))
        norms.append((norm, float(nn.utils.clip_grad_norm_(single.parameters(), math.inf))))
        window.abort(GradientState())
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return norms


def test_the_norm_is_that_of_the_gradients_that_fsdp_has_not_reduced():
    for norms in run_ranks(norms_while_accumulating):
        for (norm, expected), tolerance in zip(norms, (1e-5, 0.05), strict=True):
            assert norm == pytest.approx(expected, rel=tolerance)
