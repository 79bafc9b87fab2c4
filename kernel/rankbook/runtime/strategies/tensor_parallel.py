"""Tensor parallel strategy: layers split over ranks by a plan, and sharded over the data-parallel ranks.

The plan maps module names to styles, given by name or as torch's `ParallelStyle`. A plan that matches no module of the
model raises an error.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rankbook.errors import InvalidArgument
from rankbook.runtime.strategies.base import StrategySetup, mesh_for
from rankbook.runtime.strategies.fsdp2 import FullyShardedDataParallel, copy_from_first, shard

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class TensorParallel(FullyShardedDataParallel):
    """Strategy with torch's `parallelize_module` on the mesh axis `tp`, and `fully_shard` on the data-parallel axes."""

    name = "TP"
    wrapper = "parallelize_module"

    @classmethod
    def fits(cls, setup: StrategySetup) -> bool:
        """Return True if the mesh has a `tp` axis of more than one rank."""
        return setup.parallelism is not None and setup.parallelism.sizes["tp"] > 1

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes, all three."""
        assert self.setup.parallelism is not None
        return self.setup.parallelism.sizes

    @property
    def signature(self) -> tuple[Any, ...]:
        """See `Strategy`."""
        assert self.setup.parallelism is not None
        return (*super().signature, repr(self.setup.parallelism.tp_handler))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split and shard `model` in place.

        The hooks added to its layers are recorded, for `release` to remove them.
        """
        self._plan_for(model)  # raises before anything changes
        mesh = mesh_for(self.setup.device.type, self.axes)
        # `parallelize_module` scatters the weights of the first rank of every `tp` group, and does not touch parameters
        # outside the plan. So all ranks must have the same weights before it.
        copy_from_first(model)
        self.divide_layers(model, mesh)
        # Tensor parallelism first, then sharding: `fully_shard` accepts parameters that are DTensors on the `tp` axis
        # and shards them on the other axes of the same mesh.
        self.shard_layout(model, mesh)
        return model

    def divide_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the layers of the plan over the `tp` axis. No collective for parameters that are divided already."""
        plan = self._plan_for(model)
        # `parallelize_module` adds forward hooks that redistribute inputs and outputs, and returns no handles for them.
        # They are found by comparing the hook tables before and after.
        hooks = _hooks_of(model)
        parallelize_module(model, mesh["tp"], plan)
        model.__dict__["_rankbook_tp_hooks"] = _new_hooks(model, hooks)

    def _plan_for(self, model: nn.Module) -> dict[str, ParallelStyle]:
        assert self.setup.parallelism is not None
        handler = self.setup.parallelism.tp_handler
        return read_plan(model, handler.plan if handler is not None else None)

    def shard_layout(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """See `FullyShardedDataParallel`."""
        if self.setup.data_parallel_size > 1:
            shard(model, mesh["dp_replicate", "dp_shard"], self.plugin)

    def release(self, model: nn.Module, wrapped: nn.Module | None) -> None:
        """Gather all parameters on every rank, and remove the hooks. A collective."""
        super().release(model, wrapped)
        remove_layer_hooks(model)


def remove_layer_hooks(model: nn.Module) -> None:
    """Remove the hooks that `TensorParallel.divide_layers` has added."""
    for hooks, key in model.__dict__.pop("_rankbook_tp_hooks", ()):
        hooks.pop(key, None)
    for module in model.modules():
        module.__dict__.pop("_distribute_module_applied", None)  # torch divides a module once


def read_plan(model: nn.Module, plan_option: dict[str, Any] | None) -> dict[str, ParallelStyle]:
    """Return torch's style for every module of `model` in the plan.

    Raises `InvalidArgument` for missing or unknown entries.
    """
    chosen = plan_option or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = type(model).__name__
    if not chosen:
        raise InvalidArgument(
            f"{kind} has no tensor-parallel plan: pass ParallelismConfig(tp_handler=TorchTensorParallelConfig("
            'plan={"layer.up": "colwise", "layer.down": "rowwise"})), or set the attribute tp_plan of the model'
        )
    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in chosen.items():
        if not isinstance(style, ParallelStyle) and style not in _STYLES:
            raise InvalidArgument(
                f"unknown style {style!r} for {pattern!r} in the tensor-parallel plan; choose from "
                f"{', '.join(sorted(_STYLES))}"
            )
        # `*` also matches dots, so that "layers.*.up" selects the layer of every block.
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise InvalidArgument(f"{pattern!r} in the tensor-parallel plan matches no module of {kind}")
        plan |= {name: style if isinstance(style, ParallelStyle) else _STYLES[style]() for name in matches}
    return plan


def _hooks_of(model: nn.Module) -> set[tuple[int, int]]:
    return {(id(hooks), key) for hooks in _hook_tables(model) for key in hooks}


def _new_hooks(model: nn.Module, old: set[tuple[int, int]]) -> list[tuple[dict[int, Any], int]]:
    return [(hooks, key) for hooks in _hook_tables(model) for key in hooks if (id(hooks), key) not in old]


def _hook_tables(model: nn.Module) -> list[dict[int, Any]]:
    return [table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)]
