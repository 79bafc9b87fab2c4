"""The steps of training.

Owns: backward, accumulation, clipping, autocast, uneven inputs, triggers and profiles, as methods of the `Accelerator`.
Refuses: to know how a model is spread; its strategy does.

Gradients brought within bounds, over shards too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from rankbook.runtime.comm.collectives import reduce
from rankbook.runtime.config import AutocastKwargs, ProfileKwargs
from rankbook.runtime.gradient_state import AccumulateContext, window
from rankbook.runtime.precision import autocast
from rankbook.runtime.prepare import wrapper_of
from rankbook.runtime.prepared import strategy_of
from rankbook.runtime.settings import AcceleratorSettings
from rankbook.runtime.strategies.base import full_tensor


class TrainingMethods(AcceleratorSettings):
    """See `Accelerator`."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        """`loss.backward()`, with the loss divided by its window's length and scaled for fp16. `kwargs` go to torch."""
        divisor = window.divisor if window.inside else self.gradient_state.num_steps
        if divisor != 1:
            loss = loss / divisor
        if window.scaler is not None:
            window.scaler.scale(loss).backward(**kwargs)
        else:
            loss.backward(**kwargs)

    def accumulate(self, *models: nn.Module) -> AccumulateContext:
        """The block of one batch. Its gradients gather up until the window is full, or its loader ends.

        `models` are those that train in it; without any, all that were prepared. A window that an error or a `break`
        left open is dropped: the next block begins a new one, on every rank.
        """
        chosen = models or tuple(self._models)

        def set_sync(sync: bool) -> None:
            for each in chosen:
                strategy = strategy_of(each)
                if strategy is not None:
                    strategy.set_sync(each, sync)

        return AccumulateContext(self.gradient_state, set_sync)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A block in which backward gathers gradients on this rank and reduces nothing."""
        strategy = strategy_of(model)
        if strategy is None:
            yield
            return
        strategy.set_sync(model, False)
        try:
            yield
        finally:
            strategy.set_sync(model, True)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """A block whose backward reduces gradients, although the forward ran under `no_sync`."""
        strategy = strategy_of(model)
        if strategy is None or not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync
        strategy.set_sync(model, True)
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            strategy.set_sync(model, before)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The context in which a prepared model's forward runs, for code of one's own: a loss, for instance."""
        return autocast(self.mixed_precision, self.device, autocast_handler or self.handlers.autocast)

    # Gradients

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Take fp16's scale off the gradients of `optimizer`, or of all that were prepared. Twice is once."""
        if window.scaler is None:
            return
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else (optimizer or self._optimizers)
        for each in given:
            wrapper = wrapper_of(each)
            if wrapper is not None and wrapper.scaler is not None:
                wrapper.unscale()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters, and shards, is at most `max_norm`.

        Returns the norm before, of the whole gradients, on every rank. While gradients gather up nothing is clipped,
        and the norm is that of this rank's so far.
        """
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.gradient_state.sync_gradients:
            return clip_norm(chosen, float("inf"), norm_type, self.device)
        window.settle()
        self.unscale_gradients()
        return clip_norm(chosen, max_norm, norm_type, self.device)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Bring each element of the gradients between `-clip_value` and `clip_value`. Nothing while they gather up."""
        if self.gradient_state.sync_gradients:
            window.settle()
            self.unscale_gradients()
            clip_values([parameters] if isinstance(parameters, torch.Tensor) else list(parameters), clip_value)

    # Around the loop

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A block in which ranks may have different numbers of batches: one without any joins in the others' steps.

        It takes models under DDP. `even_batches` holds for the prepared loaders within the block.
        """
        before = []
        if even_batches is not None:
            for loader in self._dataloaders:
                shard = loader.parts.tickets.shard
                before.append((shard, shard.even_batches))
                shard.even_batches = even_batches
        able = [each for each in joinables if isinstance(each, Joinable)]
        if len(able) < len(joinables) and self.use_distributed:
            names = ", ".join(type(each).__name__ for each in joinables if not isinstance(each, Joinable))
            for sampler, value in before:
                sampler.even_batches = value
            raise TypeError(
                f"join_uneven_inputs takes models under DDP, and {names} cannot join: use even_batches instead"
            )
        joined: AbstractContextManager[Any] = Join(able) if able and self.use_distributed else nullcontext()
        try:
            with joined:
                yield
        finally:
            for sampler, value in before:
                sampler.even_batches = value

    def set_trigger(self) -> None:
        """Raise this rank's flag, which `check_trigger` sees on every rank."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether a rank has raised its flag since the last check. A collective."""
        flag = torch.tensor(int(self._triggered), device=self.device)
        raised = bool(reduce(flag, "max").item())
        if raised:
            self._triggered = False
        return raised

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Torch's profiler around a block; each rank writes its trace to the handler's `output_trace_dir`."""
        handler = profile_handler or self.handlers.profile
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
        self.state.wait_for_everyone()


def clip_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scale the gradients of `parameters` to a norm of at most `max_norm`. Returns the norm before, whole on each rank.

    torch's own refuses shards and whole tensors together, as a tensor-parallel model has them, and returns a share of
    the norm for shards.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            layout = (each.grad.device_mesh, each.grad.placements) if isinstance(each.grad, DTensor) else None
            groups.setdefault(layout, []).append(each)
    if not groups:
        return torch.zeros((), device=device)
    norms = [
        full_tensor(get_total_norm([each.grad for each in group if each.grad is not None], norm_type))
        for group in groups.values()
    ]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm != float("inf"):
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_values(parameters: Sequence[torch.Tensor], bound: float) -> None:
    """Bring each element of the gradients between `-bound` and `bound`."""
    whole = [each for each in parameters if each.grad is not None and not isinstance(each.grad, DTensor)]
    if whole:  # torch's raises for none
        clip_grad_value_(whole, bound)
    clip_local = [each.grad.to_local() for each in parameters if isinstance(each.grad, DTensor)]
    for each in clip_local:
        each.clamp_(-bound, bound)
