"""Record of a training step in a layout: outputs of modules, gradients, optimizer state, as logical tensors.

`build` makes the copies of a model and its optimizer in a layout: it copies rank 0's whole weights to all ranks and
spreads them. `use_current` takes the user's model itself.

`record` runs one step of the user's function in a layout. The first pass keeps a summary of every tensor, which does
not depend on how it is sharded: its norm, and its product with a fixed pseudo-random vector, which also changes when
elements change places. The second pass keeps one tensor itself.

The layout "one rank" is computed by all ranks together, each with its own part of the batch: the step runs with the
whole model, in a process group that has only this rank, so that no collective of the user's takes part; after every
backward pass the gradients are averaged over all ranks here, in float64. So the random numbers and the batch statistics
of every rank are those of the layout that it is compared with.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from rankbook.control_collectives import all_min, world_size
from rankbook.errors import InvalidArgument
from rankbook.numerics.naming import tensors_in
from rankbook.numerics.relations import wide
from rankbook.numerics.settings import Layout
from rankbook.runtime import optimizer as optimizers
from rankbook.runtime.config import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    Handlers,
    ParallelismConfig,
)
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.settings import MixedForward, check_precision, install_forward
from rankbook.runtime.strategies.base import (
    FSDP_ATTRIBUTES,
    FSDP_STATE_KEYS,
    DataParallel,
    Strategy,
    StrategySetup,
    drop_unreduced,
    full_tensor,
    plain_class,
    reduction_switches,
    reshard,
    set_unreduced,
    unreduced_gradients,
    update_one_by_one_where_mixed,
)
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel, TensorParallel


@dataclass
class Built:
    """A model in a layout.

    `inner` is the model without a wrapper. `data_parallel_size` ranks have different batches. `reduces`: the backward
    pass leaves the mean of the gradients of all ranks.
    """

    model: nn.Module
    inner: nn.Module
    optimizer: Any
    data_parallel_size: int
    data_parallel_rank: int
    reduces: bool
    strategy: Strategy | None = None

    def release(self) -> None:
        """Remove what the layout has added to the model."""
        if self.strategy is not None:
            self.strategy.release(self.inner, self.model)


def raw_model(model: nn.Module) -> nn.Module:
    """Return the model inside of its wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def data_parallel_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper of a model under DDP, also of a compiled one; None for other models."""
    while isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
        model = inner
    return model if isinstance(model, DistributedDataParallel) else None


def is_compiled(model: nn.Module) -> bool:
    """Return True if a part of the model is compiled."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def raw_optimizer(optimizer: Any) -> Any:  # noqa: ANN401 - an optimizer or its wrapper
    """Return torch's optimizer inside of a prepared one."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def use_current(model: nn.Module, optimizer: Any) -> Built:  # noqa: ANN401 - an optimizer or its wrapper
    """Return the user's own model as a layout."""
    inner = raw_model(model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Ranks of one tensor-parallel group have the same batch.
    tensors = [parameter for parameter in inner.parameters() if isinstance(parameter, DTensor)]
    names = {name for tensor in tensors for name in tensor.device_mesh.mesh_dim_names or ()}
    width = 1
    if "tp" in names:
        mesh = next(t.device_mesh for t in tensors if "tp" in (t.device_mesh.mesh_dim_names or ()))
        width = mesh["tp"].size()
    reduces = world == 1 or data_parallel_of(model) is not None or bool(tensors)
    return Built(model, inner, optimizer, world // width, rank // width, reduces)


def build(
    layout: Layout,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401 - an optimizer or its wrapper
    *,
    has_unused: bool = False,
) -> Built:
    """Copy rank 0's model and optimizer, and spread the copy. A collective.

    `has_unused`: a backward pass of the step leaves out some parameters.
    """
    raw = raw_model(model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    copied = plain_copy(raw)
    device = next((parameter.device for parameter in copied.parameters()), torch.device("cpu"))
    stepping = [] if optimizer is None else _optimizers_in(raw_optimizer(optimizer))
    states = [_whole_states(raw, each) for each in stepping]
    for tensor in (*copied.parameters(), *copied.buffers()):
        _broadcast(tensor)
    if layout.precision is not None:
        check_precision(layout.precision, device)
        install_forward(copied, layout.precision, device, AutocastKwargs())
    parallelism = layout.parallelism
    if layout.kind == "tp" and parallelism is None:
        parallelism = ParallelismConfig(tp_size=world)
    setup = StrategySetup(device, world, rank, layout.fsdp, parallelism)
    if parallelism is not None:
        parallelism.check(world)
    strategy: Strategy | None = None
    if layout.kind == "ddp":
        setup.handlers = Handlers(ddp=_ddp_options(model, has_unused=has_unused))
        strategy = DataParallel(setup)
    elif layout.kind == "fsdp2":
        setup.fsdp = layout.fsdp or FullyShardedDataParallelPlugin()
        strategy = FullyShardedDataParallel(setup)
    elif layout.kind == "tp":
        strategy = TensorParallel(setup)
    wrapped = copied if strategy is None or world == 1 else strategy.wrap(copied)
    moved = None if optimizer is None else _copy_optimizers(stepping, states, raw, copied)
    return Built(
        wrapped,
        copied,
        moved,
        setup.data_parallel_size,
        setup.data_parallel_rank,
        True,
        strategy if world > 1 else None,
    )


def _ddp_options(model: nn.Module, *, has_unused: bool) -> DistributedDataParallelKwargs:
    """Return the options of the model's DDP; without one, those that the step needs."""
    current = data_parallel_of(model)
    if current is None:
        return DistributedDataParallelKwargs(find_unused_parameters=has_unused)
    names = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    return DistributedDataParallelKwargs(**{name: getattr(current, name) for name in names})


# Copies ---------------------------------------------------------------------------------------------------------------


def plain_copy(raw: nn.Module) -> nn.Module:
    """Return a copy with whole, plain parameters of a model that may be sharded. A collective if it is.

    The gradients are not copied. `raw` stays as it is.
    """
    memo: dict[int, Any] = {}
    for parameter in raw.parameters():
        whole = full_tensor(parameter.detach()).clone()
        memo[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    with _without_sharding(raw):
        copied: nn.Module = copy.deepcopy(raw, memo)
    return copied


_DIVIDED = "_distribute_module_applied"
"""Attribute of a module that torch has divided. torch refuses to divide it again."""


@contextlib.contextmanager
def _without_sharding(raw: nn.Module) -> Iterator[None]:
    """Hide what `fully_shard` and tensor parallelism have added to the modules, which cannot be copied."""
    hidden: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
    added = {(id(hooks), key) for hooks, key in raw.__dict__.get("_rankbook_tp_hooks", ())}
    keys = ("_rankbook_tp_hooks", _DIVIDED, *FSDP_STATE_KEYS)
    tables = ("_forward_hooks", "_forward_pre_hooks")
    of_state_dict = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    try:
        for module in raw.modules():
            kept = dict(module.__dict__)
            hidden.append((module, type(module), kept))
            for name in tables:
                table = kept[name]
                module.__dict__[name] = type(table)(
                    (key, hook)
                    for key, hook in table.items()
                    if (id(table), key) not in added and "torch.distributed" not in _origin(hook)
                )
            if isinstance(module, FSDPModule):
                for name in of_state_dict:
                    if name in kept:
                        module.__dict__[name] = type(kept[name])()
                module.__class__ = plain_class(module)  # type: ignore[assignment]
            for key in keys:
                module.__dict__.pop(key, None)
        yield
    finally:
        for module, kind, kept in hidden:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(kept)


def _origin(hook: Any) -> str:  # noqa: ANN401 - any callable
    while hasattr(hook, "func"):
        hook = hook.func
    hook = getattr(hook, "__wrapped__", hook)
    return str(getattr(hook, "__module__", ""))


def _broadcast(tensor: torch.Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor.detach(), 0)


def _optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer, and those that it steps itself: attributes of it."""
    found = [optimizer]
    for each in found:
        for value in vars(each).values():
            items = value if isinstance(value, (list, tuple)) else (value,)
            found += [item for item in items if isinstance(item, torch.optim.Optimizer) and item not in found]
    return found


def _whole_states(raw: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return rank 0's optimizer state by the names of parameters, with whole tensors. A collective."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return full_tensor(tensor).detach().clone()

    states: dict[str, dict[str, Any]] = {}
    names = {id(parameter): name for name, parameter in raw.named_parameters()}
    for parameter, state in optimizer.state.items():
        if id(parameter) in names:
            states[names[id(parameter)]] = {
                key: whole(value)
                if isinstance(value, torch.Tensor)
                else _deep_copy(tree_map_only(torch.Tensor, whole, value), {}, optimizer)
                for key, value in state.items()
            }
    if dist.is_initialized() and dist.get_world_size() > 1:
        # Ranks may hold different entries: those of rank 0 count.
        received: list[Any] = [states]
        dist.broadcast_object_list(received, 0)
        states = received[0]
    return states


def _copy_optimizers(
    originals: Sequence[torch.optim.Optimizer],
    states: Sequence[Mapping[str, Mapping[str, Any]]],
    raw: nn.Module,
    copied: nn.Module,
) -> torch.optim.Optimizer:
    """Return a copy of the first optimizer that steps the parameters of `copied`, with the others that it steps.

    `states` are those of the optimizers. Raises `InvalidArgument` if an attribute cannot be copied.
    """
    parameters, modules = dict(copied.named_parameters()), dict(copied.named_modules())
    memo: dict[int, Any] = {id(module): modules[name] for name, module in raw.named_modules() if name in modules}
    memo |= {id(parameter): parameters[name] for name, parameter in raw.named_parameters()}
    copies = [object.__new__(type(optimizer)) for optimizer in originals]
    for optimizer, moved, state in zip(originals, copies, states, strict=True):
        memo[id(optimizer)] = moved
        if "state" in vars(optimizer):
            memo[id(optimizer.state)] = defaultdict(dict, _spread_states(state, parameters))
        for group in optimizer.param_groups:
            # Those of other models stay, until they are left out below.
            memo |= {id(parameter): parameter for parameter in group["params"] if id(parameter) not in memo}
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks") or isinstance(value, (dist.ProcessGroup, DeviceMesh)):
                memo[id(value)] = value
    for optimizer, moved in zip(originals, copies, strict=True):
        # Not by its constructor: its arguments are those of the class, and `defaults` may have others. Not by its
        # `__getstate__`, which leaves out the attributes of a derived class. Schedulers put a `step` of their own into
        # the instance.
        vars(moved).update(
            {name: _deep_copy(value, memo, optimizer) for name, value in vars(optimizer).items() if name != "step"}
        )
    kept = set(map(id, parameters.values()))
    for moved in copies:
        for group in moved.param_groups:
            # In place: LBFGS has a second reference to the list.
            group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in kept]
        update_one_by_one_where_mixed(moved)
    return copies[0]


def _deep_copy(value: Any, memo: dict[int, Any], optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401 - any attribute
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        kind = type(optimizer).__name__
        raise InvalidArgument(
            f"{kind} cannot be copied for another layout: {type(error).__name__}: {error}; expected an optimizer "
            "whose attributes copy.deepcopy() can copy"
        ) from error


def _spread_states(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return whole states as those of parameters, in their layout. A collective."""
    return {
        parameters[name]: tree_map_only(torch.Tensor, functools.partial(_spread, parameters[name]), dict(state))
        for name, state in states.items()
        if name in parameters
    }


def _spread(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a state tensor of the parameter's shape in the parameter's layout. A collective."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and value.dim():
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value


def precision_of(model: nn.Module) -> torch.dtype:
    """Return the data type in which the model computes."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, MixedForward):
        return forward.kind
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits) if dtypes else torch.float32


START, FORWARD, LOSS, GRADIENT = "start", "forward", "loss", "gradient"
CLIPPED, STATE, PARAMETER, BUFFER = "clipped gradient", "optimizer state", "parameter", "buffer"
PHASES = (START, FORWARD, LOSS, GRADIENT, CLIPPED, STATE, PARAMETER, BUFFER)
AFTER = (STATE, PARAMETER, BUFFER)
Key = tuple[str, str]
"""Phase and name of a tensor."""


@dataclass(frozen=True)
class Summary:
    """Summary of a tensor in the first pass. `change` is the norm of its change in the step, 0.0 if it has none.

    Norm, projection and change are of the finite elements; `nonfinite` is a digest of where NaN, inf and -inf are,
    empty if there are none.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    projection: float
    digest: str
    note: str = ""
    change: float = 0.0
    nonfinite: str = ""


@dataclass
class Record:
    """One step of one rank. `tensors` has the tensor that was asked for, `parts` this rank's share of a gradient.

    `has_unused`: a backward pass of the reference has left out a parameter on this rank.
    """

    summaries: dict[Key, Summary] = field(default_factory=dict)
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    parts: dict[Key, torch.Tensor] = field(default_factory=dict)
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    has_unused: bool = False


_SIGNS: dict[int, torch.Tensor] = {}
"""Random vectors of 1 and -1, of the sizes of recent tensors, while a comparison runs."""


def summarize(tensor: torch.Tensor, note: str = "", change: float = 0.0) -> Summary:
    """Return the summary of a whole tensor. Two of them are compared by `difference`."""
    values = tensor.detach().resolve_conj().resolve_neg()
    flat = wide(values).reshape(-1)  # booleans and integers are numbers, too
    size = flat.numel()
    signs = _SIGNS.get(size)
    if signs is None or signs.device != flat.device:
        if len(_SIGNS) > 64:
            _SIGNS.clear()
        # The same ones for all ranks and layouts. A constant or periodic difference must not cancel on them.
        generator = torch.Generator().manual_seed(size)
        drawn = torch.randint(0, 2, (size,), dtype=torch.int8, generator=generator, device="cpu")
        signs = _SIGNS[size] = drawn.to(flat.device).double() * 2 - 1
    nonfinite, finite = "", flat.isfinite()
    if not bool(finite.all()):
        kinds = torch.stack([flat.isnan(), flat == math.inf, flat == -math.inf]).cpu().numpy().tobytes()
        nonfinite, flat = hashlib.blake2b(kinds, digest_size=8).hexdigest(), flat.masked_fill(~finite, 0.0)
    contents = values.contiguous().cpu()
    raw = contents.reshape(-1).view(torch.uint8).numpy().tobytes() if size else b""
    return Summary(
        tuple(values.shape),
        str(values.dtype).removeprefix("torch."),
        float(flat.norm()),
        float(flat @ signs),
        hashlib.blake2b(raw, digest_size=8).hexdigest(),
        note,
        change,
        nonfinite,
    )


def difference(a: Summary, b: Summary) -> float:
    """Return an estimate of the norm of the difference of two tensors from their summaries; inf for other shapes."""
    if a.shape != b.shape:
        return math.inf
    if a.digest == b.digest and a.dtype == b.dtype:
        return 0.0
    if a.nonfinite != b.nonfinite:
        return math.inf
    worst = max(abs(a.norm - b.norm), abs(a.projection - b.projection))
    return worst if math.isfinite(worst) else math.inf


class Recorder:
    """Collects the summaries of one step; with `wanted`, also that tensor."""

    def __init__(self, built: Built, also: Mapping[str, nn.Module], wanted: Key | None, *, reference: bool) -> None:
        self.built, self.also, self.wanted, self.reference = built, also, wanted, reference
        self.record = Record()
        self._calls: Counter[str] = Counter()
        self._starts: dict[str, torch.Tensor] = {}
        self._names = dict(built.inner.named_parameters())
        self._steps = 0
        self.in_backward = False
        self._aside: dict[nn.Parameter, torch.Tensor | None] = {}  # gradients of before the backward pass

    def keep(self, key: Key, tensor: torch.Tensor, note: str = "", change: float = 0.0) -> None:
        """Keep a tensor's summary. A collective for a sharded tensor."""
        whole = full_tensor(tensor.detach())
        if whole.layout is torch.sparse_coo:
            whole = whole.to_dense()
        self.record.summaries[key] = summarize(whole, note, change)
        wanted = self.wanted
        # With a value after the step also the one before it.
        if wanted is not None and (key == wanted or (key == (START, wanted[1]) and wanted[0] in AFTER)):
            self.record.tensors[key] = whole.detach().clone().cpu()
            self.record.dtypes[key] = whole.dtype

    def start(self) -> None:
        """Record the weights, buffers and optimizer state before the step."""
        optimizer = raw_optimizer(self.built.optimizer)
        options: dict[int, str] = {}
        if optimizer is not None:
            for group in optimizer.param_groups:
                listed = {
                    option: value
                    for option, value in group.items()
                    # Those choose kernels, not what is computed, and may depend on the layout.
                    if option not in ("params", "foreach", "fused") and isinstance(value, (int, float, bool, tuple))
                }
                options.update({id(p): f"optimizer {listed}" for p in group["params"]})
        for name, parameter in self._names.items():
            note = f"requires_grad {parameter.requires_grad}"
            if optimizer is not None:
                note += f", {options.get(id(parameter), 'in no optimizer')}"
            self.keep((START, name), parameter, note)
            self._starts[name] = full_tensor(parameter.detach()).clone()
        for name, buffer in self.built.inner.named_buffers():
            self.keep((START, name), buffer)
        self._keep_states(START)
        for prefix, module in self.also.items():
            self._keep_all(START, module, prefix)

    def end(self) -> None:
        """Record them after the step."""
        self._keep_states(STATE)
        for name, parameter in self._names.items():
            whole = full_tensor(parameter.detach())
            moved = float((wide(whole) - wide(self._starts[name])).nan_to_num(0.0, 0.0, 0.0).norm())
            self.keep((PARAMETER, name), whole, change=moved)
        for name, buffer in self.built.inner.named_buffers():
            self.keep((BUFFER, name), buffer)
        for prefix, module in self.also.items():
            self._keep_all(PARAMETER, module, prefix)

    def _keep_all(self, phase: str, module: nn.Module, prefix: str) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.keep((phase, f"{prefix}.{name}"), tensor)

    def _keep_states(self, phase: str) -> None:
        optimizer = raw_optimizer(self.built.optimizer)
        if optimizer is None:
            return
        for name, parameter in self._names.items():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    self.keep((phase, f"{name}: {key}"), value)

    # Hooks

    def after_forward(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401 - torch's
        """Record the output of a module."""
        if self.in_backward:  # activation checkpointing computes it once more
            return
        numbers = (tensor for tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex())
        for index, tensor in enumerate(numbers):
            label = name or "the model"
            call = self._calls[f"{name}/{index}"]
            self._calls[f"{name}/{index}"] += 1
            suffix = (f" output {index}" if index else "") + (f" call {call + 1}" if call else "")
            # A DTensor is divided over ranks of a tensor-parallel group, which all run this hook.
            self.keep((FORWARD, label + suffix), tensor)

    def before_backward(self, losses: Iterable[torch.Tensor]) -> None:
        """Record the loss or losses, and put the gradients so far aside in the reference."""
        if self.reference:
            self._aside = {parameter: parameter.grad for parameter in self._names.values()}
            for parameter in self._names.values():
                parameter.grad = None
        for loss in losses:
            call = self._calls["loss"]
            self._calls["loss"] += 1
            self.keep((LOSS, f"call {call + 1}" if call else "loss"), loss)
        self.in_backward = True

    def leave_backward(self) -> None:
        """End a backward pass that has failed: put the gradients of before it back, with what it has computed."""
        self.in_backward = False
        for parameter in self._names.values():
            self._take_back(parameter)
        self._aside.clear()

    def _take_back(self, parameter: nn.Parameter) -> None:
        """Add the gradient that was put aside."""
        aside = self._aside.get(parameter)
        if aside is not None:
            parameter.grad = aside if parameter.grad is None else parameter.grad + aside

    def after_backward(self) -> None:
        """Average the gradients of the reference over all ranks, and record them."""
        self.in_backward = False
        for name, parameter in self._names.items():
            key = (GRADIENT, name)
            if self.reference:
                own = parameter.grad
                self.record.has_unused |= own is None and parameter.requires_grad
                if self.wanted is not None and self.wanted in (key, (CLIPPED, name)):
                    part = torch.zeros_like(parameter) if own is None else own.detach().clone()
                    self.record.parts[self.wanted] = (part.to_dense() if part.is_sparse else part).cpu()
                parameter.grad = _averaged(own, parameter)
                self._take_back(parameter)
            if self.built.reduces and parameter.grad is not None:
                self.keep(key, parameter.grad)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients that the optimizer gets."""
        if optimizer is not raw_optimizer(self.built.optimizer):
            return
        suffix = f" step {self._steps + 1}" if self._steps else ""
        self._steps += 1
        for name, parameter in self._names.items():
            if parameter.grad is not None:
                self.keep((CLIPPED, name + suffix), parameter.grad)


def _averaged(own: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the mean of a gradient over all ranks of the real process group; None if no rank has one."""
    world = _Solo.real
    if world is None:
        return own
    kind = torch.complex128 if parameter.is_complex() else torch.float64
    is_sparse = own is not None and own.is_sparse
    total: torch.Tensor
    if own is None:
        total = torch.zeros_like(parameter, dtype=kind)
    else:
        # A copy, which the sum over the ranks overwrites. Another rank may have no gradient, or a dense one.
        total = (own.detach().to_dense() if is_sparse else own.detach()).to(kind, copy=True)
    present = torch.tensor([own is not None, is_sparse], dtype=torch.float64, device=total.device)
    dist.all_reduce(total, group=world)
    dist.all_reduce(present, group=world)
    if not present[0].item():
        return None
    total = (total / world.size()).to(parameter.dtype)
    if present[1].item():
        total = total.to_sparse(1)
    return total


# Running a step -------------------------------------------------------------------------------------------------------


def record(
    step: Callable[[nn.Module, Any, Any], object],
    built: Built,
    batch: Any,  # noqa: ANN401 - the user's
    *,
    also: Mapping[str, nn.Module],
    wanted: Key | None,
    reference: bool,
) -> Record:
    """Run `step(model, optimizer, batch)` once in a layout and return what happened on this rank. A collective."""
    recorder = Recorder(built, also, wanted, reference=reference)
    recorder.start()
    handles: list[Any] = [
        module.register_forward_hook(functools.partial(recorder.after_forward, name))
        for name, module in built.inner.named_modules()
    ]
    handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.before_step(optimizer)))
    original = torch.autograd.backward

    # Every `Tensor.backward` calls it.
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        if recorder.in_backward:  # activation checkpointing runs a backward pass inside of the one
            original(tensors, *args, **kwargs)
            return
        losses: list[Any] = [tensors] if isinstance(tensors, (torch.Tensor, GradientEdge)) else list(tensors)
        recorder.before_backward(loss for loss in losses if isinstance(loss, torch.Tensor))
        try:
            original(losses, *args, **kwargs)
        except BaseException:  # the step may catch it, and go on
            recorder.leave_backward()
            raise
        recorder.after_backward()

    torch.autograd.backward = backward
    try:
        with _solo_group(step) if reference else contextlib.nullcontext():
            step(built.model, built.optimizer, batch)
    finally:
        torch.autograd.backward = original
        for handle in handles:
            handle.remove()
    reshard(built.inner)
    recorder.end()
    return recorder.record


class _Solo:
    """The process group of this rank alone, and the real default group while it takes its place."""

    group: Any = None
    of: Any = None
    real: Any = None


def prepare_solo_group() -> None:
    """Create the group of this rank alone, unless all ranks have theirs. A collective."""
    # A rank that was restarted has none, and torch numbers the groups on every rank.
    if world_size() > 1 and not all_min(_Solo.of is dist.group.WORLD)[0]:
        _Solo.group, _ = dist.new_subgroups(group_size=1)
        _Solo.of = dist.group.WORLD


@contextlib.contextmanager
def _solo_group(step: Callable[..., object]) -> Iterator[None]:
    """Make this rank the only one of the default process group, for code that asks torch or the cell's variables."""
    if _Solo.group is None or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    world = distributed_c10d._world
    _Solo.real, before = dist.group.WORLD, world.default_pg
    variables = getattr(step, "__globals__", {})
    # A cell's `rank` and `world_size`.
    changed = {
        name: variables[name]
        for name, value in (("rank", dist.get_rank()), ("world_size", dist.get_world_size()))
        if variables.get(name) == value and type(variables.get(name)) is int
    }
    world.default_pg = _Solo.group
    try:
        variables.update({name: {"rank": 0, "world_size": 1}[name] for name in changed})
        yield
    finally:
        world.default_pg = before
        variables.update(changed)
        _Solo.real = None


# State of the user's objects ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def preserved(models: list[nn.Module], optimizer: Any) -> Iterator[Callable[[], None]]:  # noqa: ANN401 - an optimizer
    """Restore the models, gradients, optimizer and random states at the end, and when the result is called.

    Of the models: weights, buffers, and the other attributes of their modules.

    The steps in between are not those of the training: they take no snapshot, accumulate no gradients, and have a loss
    scale of 1. Only a prepared optimizer divides gradients by the scale of fp16, and those of the copies are plain.
    They reduce gradients over the ranks, also if a window of the training has switched this off.
    """
    saved = _save(models, optimizer)

    def restore() -> None:
        _restore(saved, models, optimizer)
        for owner, name, _ in saved["syncs"]:
            setattr(owner, name, True)
        if saved["scaler"]:  # empty if it is disabled
            optimizer.scaler.load_state_dict({**saved["scaler"], "scale": 1.0, "_growth_tracker": 0})

    with _unprotected(), window.set_aside(GradientState()):
        try:
            yield restore
        finally:
            _SIGNS.clear()  # as large as the parameters
            _restore(saved, models, optimizer)
            set_unreduced(saved["unreduced"])


@contextlib.contextmanager
def _unprotected() -> Iterator[None]:
    """Run the block without the functions that protect the training state."""
    kept = optimizers.after_step, optimizers.after_scheduler
    optimizers.after_step = optimizers.after_scheduler = None
    try:
        yield
    finally:
        optimizers.after_step, optimizers.after_scheduler = kept


_COUNTERS = ("steps", "is_stepping", "_was_skipped")
"""Attributes of a prepared optimizer that its steps change."""


_NOT_OF_THE_USER = frozenset((*vars(nn.Module()), "_rankbook_tp_hooks", _DIVIDED, *FSDP_STATE_KEYS, *FSDP_ATTRIBUTES))
"""Attributes of modules that belong to torch or to Rankbook."""

_DATA = (
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, deque),
    *(torch.Tensor, torch.Generator, numpy.ndarray, numpy.generic),
)
"""Types of attributes that are removed from a module if a step has added them."""


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the user's code has given to the module, such as a counter of its calls."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_OF_THE_USER}


def _save(models: list[nn.Module], optimizer: Any) -> dict[str, Any]:  # noqa: ANN401
    raw = raw_optimizer(optimizer)
    for model in models:
        reshard(model)  # an evaluation may have left whole parameters, whose memory the first step frees
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    modules = [m for model in models for m in raw_model(model).modules() if not isinstance(m, DistributedDataParallel)]
    attributes = [(vars(module), _attributes(module)) for module in modules]
    owners = [value for _, content in attributes for value in content.values()]
    return {
        "tensors": [(tensor, tensor.detach().clone()) for tensor in tensors],
        "grads": [(tensor, None if tensor.grad is None else tensor.grad.detach().clone()) for tensor in tensors],
        # A forward pass may assign another tensor to the name of a buffer.
        "buffers": [(module._buffers, dict(module._buffers)) for model in models for module in model.modules()],
        "grad objects": [tensor.grad for tensor in tensors],
        # Those of an open window, which the next backward pass would reduce together with its own.
        "unreduced": [entry for model in models for entry in unreduced_gradients(model)],
        "training": [(module, module.training) for model in models for module in model.modules()],
        "syncs": [entry for model in models for entry in reduction_switches(model)],
        "attributes": attributes,
        "contents": _contents([*owners, raw], set(map(id, tensors))),
        "wrapper": {k: v for k, v in vars(optimizer).items() if k in _COUNTERS} if raw else {},
        "stepped after": getattr(optimizer, "_stepped_after", None),
        "scaler": scaler.state_dict() if (scaler := getattr(optimizer, "scaler", None)) is not None else None,
        "rng": random_states(),
    }


def _contents(owners: list[Any], seen: set[int]) -> list[tuple[Any, Any]]:
    """Return the tensors, containers and generators that belong to `owners`, with their contents.

    `owners` are the optimizer and attributes of modules. What they refer to is included, also by dataclasses and by
    optimizers that an optimizer steps itself. Objects whose ids are in `seen` are left out. Other objects may belong to
    the whole process, such as process groups.
    """
    contents: list[tuple[Any, Any]] = []
    pending = list(owners)
    while pending:
        value = pending.pop()
        is_owner = isinstance(value, torch.optim.Optimizer) or dataclasses.is_dataclass(value)
        if is_owner and not isinstance(value, type) and hasattr(value, "__dict__"):
            value = vars(value)
        if id(value) in seen:
            continue
        if isinstance(value, (dict, list, deque, set, tuple)):
            pending += value.values() if isinstance(value, dict) else value
        content = _content_of(value)
        if content is not None:
            contents.append((value, content))
            seen.add(id(value))
    return contents


def _content_of(value: Any) -> Any:  # noqa: ANN401 - any attribute, and what `_put_back` needs
    """Return a copy of what can change in the object; None for other objects."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque, set)):
        return list(value)
    if isinstance(value, (torch.Generator, numpy.random.RandomState)):
        return value.get_state()
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.ndarray) and value.flags.writeable:
        return value.copy()
    return None


def _put_back(value: Any, content: Any) -> None:  # noqa: ANN401 - what `_content_of` accepts
    """Restore what `_contents` has returned, in place: the owner may have several references to it."""
    if isinstance(value, torch.Tensor):
        # Some tensors cannot be written to, such as expanded ones. They have not changed.
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
        if not (is_plain and torch.equal(value, content)):
            value.detach().copy_(content)
    elif isinstance(value, (torch.Generator, numpy.random.RandomState)):
        value.set_state(content)
    elif isinstance(value, numpy.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, numpy.ndarray):
        value[...] = content
    elif not _holds(value, content):  # some containers cannot be written to
        value.clear()
        if isinstance(value, (dict, set)):
            value.update(content)
        else:
            value.extend(content)


def _holds(value: Any, content: Any) -> bool:  # noqa: ANN401 - containers of one kind
    """Return True if the container has the objects in `content`, in this order."""
    if len(value) != len(content):
        return False
    pairs = list(zip(value, content, strict=True))
    if isinstance(value, dict):
        pairs += zip(value.values(), content.values(), strict=True)
    return all(actual is expected for actual, expected in pairs)


@torch.no_grad()
def _restore(saved: dict[str, Any], models: list[nn.Module], optimizer: Any) -> None:  # noqa: ANN401
    raw = raw_optimizer(optimizer)
    for model in models:
        reshard(model)
        drop_unreduced(model)
    for buffers, content in saved["buffers"]:
        _put_back(buffers, content)
    for tensor, value in saved["tensors"]:
        tensor.detach().copy_(value)
    for (tensor, value), gradient in zip(saved["grads"], saved["grad objects"], strict=True):
        tensor.grad = gradient
        if gradient is not None:
            gradient.detach().copy_(value)
    _restore_attributes(saved)
    if raw is not None:
        if isinstance(optimizer, AcceleratedOptimizer):
            vars(optimizer).update(saved["wrapper"])
            if optimizer._stepped_after is not None and saved["stepped after"] is None:
                optimizer._stepped_after = -1  # no backward pass of the training: those of the steps here do not count
        if saved["scaler"] is not None:
            optimizer.scaler.load_state_dict(saved["scaler"])
    set_random_states(saved["rng"])


def _restore_attributes(saved: dict[str, Any]) -> None:
    """Restore the attributes of the modules, and the contents of these and of the optimizer."""
    for module, training in saved["training"]:
        module.training = training
    for owner, name, switch in saved["syncs"]:
        setattr(owner, name, switch)
    for attributes, content in saved["attributes"]:
        for name in [name for name, value in attributes.items() if isinstance(value, _DATA)]:
            if name not in content and name not in _NOT_OF_THE_USER:
                del attributes[name]
        attributes.update(content)
    for value, content in saved["contents"]:
        _put_back(value, content)


def random_states() -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's global generators."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(),  # noqa: NPY002 - the global state that user code may use
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_states(state: dict[str, Any]) -> None:
    """Set the random states of this process to those of `random_states`."""
    torch.set_rng_state(state["torch"])
    numpy.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["random"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
