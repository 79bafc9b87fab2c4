"""Training methods of the `Accelerator`, and gradient clipping over shards.

The methods cover backward, gradient accumulation, clipping, autocast, uneven inputs, triggers and profiling. How a
model is distributed is left to its strategy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from rankbook.runtime.collectives import reduce
from rankbook.runtime.config import AutocastKwargs, ProfileKwargs
from rankbook.runtime.gradient_state import AccumulateContext, window
from rankbook.runtime.optimizer import check_added_gradients
from rankbook.runtime.prepare import wrapper_of
from rankbook.runtime.prepared import current_models, registered, replacement_of, strategy_of
from rankbook.runtime.settings import AcceleratorSettings, autocast
from rankbook.runtime.strategies.base import full_tensor, group_by_layout, hold_unreduced, without_summands


class TrainingMethods(AcceleratorSettings):
    """Training methods of the `Accelerator`."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
        """Call `loss.backward()` with the loss divided by the length of its window, and scaled for fp16.

        `kwargs` are passed to `torch.Tensor.backward`. Raises `InvalidArgument` if gradients that were unscaled for
        fp16 got scaled ones added.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
        """
        # Inside `accumulate` the window knows how many batches it will have. Outside, the user counts the batches,
        # and Accelerate's rule applies: divide by `num_steps`.
        divisor = window.divisor if window.in_batch else self.gradient_state.num_steps
        if not window.in_batch:
            window.end_rescaling()
        if divisor != 1:
            loss = loss / divisor
        window.backwards += 1
        if window.before_backward is not None:
            window.before_backward()
        # Of the optimizers that were prepared here: another `Accelerator` may have prepared others since, with another
        # precision. A cell that was run again has made a new `Accelerator`, with the optimizers of the one before.
        optimizers = self._optimizers
        scaler = optimizers[-1].scaler if optimizers else window.scaler
        if scaler is not None:
            with check_added_gradients(scaler):
                scaler.scale(loss).backward(**kwargs)
        else:
            loss.backward(**kwargs)

    def accumulate(self, *models: nn.Module) -> AccumulateContext:
        """Accumulate the gradients of one batch: a context manager for the forward, backward and step.

        The window ends when `gradient_accumulation_steps` batches have run, or at the end of the loader. Only then are
        gradients reduced, and only then do prepared optimizers step.

        Args:
            models: models that are trained in the block; by default all prepared models, of whichever `Accelerator`.

        A window that was left open by a `break`, or by a cell that failed, is dropped; the next block starts a new one,
        on all ranks. After an error that is caught inside of the loop, the window goes on with the next batch.

        Example::

            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        """
        # All models that are alive, so that a model that is not named does not reduce its gradients in every batch.
        chosen = models or tuple(registered("model").values())

        def set_sync(sync: bool) -> None:
            for model in chosen:
                strategy = strategy_of(model)
                if strategy is not None:
                    strategy.set_sync(model, sync)

        return AccumulateContext(self.gradient_state, set_sync)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of `model` locally, without reducing them, within the block.

        Example::

            model, optimizer = accelerator.prepare(model, optimizer)
            first, second = torch.ones(4, 8, device=device), torch.zeros(4, 8, device=device)
            with accelerator.no_sync(model):
                accelerator.backward(model(first).mean())
            accelerator.backward(model(second).mean())  # reduces the sum of both
            optimizer.step()
        """
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
        """Reduce gradients in the backward of the block, although the forward ran under `no_sync`.

        Has an effect only for models under DDP.
        """
        strategy = strategy_of(model)
        if strategy is None or not isinstance(model, DistributedDataParallel):
            yield
            return
        # The forward pass has been executed already; only its backward pass runs in the block. DDP prepares its reducer
        # in a forward pass, but not under `no_sync`. It is prepared here; the empty list means that no parameters are
        # searched for that the output does not depend on.
        before = model.require_backward_grad_sync
        strategy.set_sync(model, True)
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            strategy.set_sync(model, before)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of prepared models, for other code such as a loss function.

        Example::

            accelerator = Accelerator(mixed_precision="bf16")
            features = torch.ones(4, 8, device=device)
            with accelerator.autocast():
                scores = features @ features.T
            scores.dtype  # torch.bfloat16
        """
        return autocast(self.mixed_precision, self.device, autocast_handler or self.handlers.autocast)

    # Gradients

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Unscale the fp16 gradients of `optimizer`, by default of all prepared optimizers.

        Does nothing while gradients accumulate. Repeated calls before a step have no effect.

        Example::

            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(model(torch.ones(4, 8, device=device)).mean())
            accelerator.unscale_gradients()  # before the gradients are read or changed
            largest = max(parameter.grad.abs().max() for parameter in model.parameters())
            optimizer.step()
        """
        # The next batches of the window add scaled gradients.
        if not self.gradient_state.sync_gradients:
            return
        if optimizer is None:
            optimizer = _current_optimizers()
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        for target in optimizers:
            wrapper = wrapper_of(target)
            if wrapper is not None and wrapper.scaler is not None:
                wrapper.unscale()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters and shards is at most `max_norm`.

        Args:
            parameters: a parameter, or an iterable of parameters. They may be those that `prepare` has replaced.
            max_norm: maximum norm.
            norm_type: order p of the p-norm.

        Returns the total norm before clipping, on every rank. While gradients accumulate, nothing is clipped, and the
        norm is that of the gradients accumulated on this rank so far. Under fp16 the gradients are unscaled first. They
        may be sparse. A collective if gradients are sharded.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                accelerator.backward(model(batch).mean())
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        """
        chosen = _current_parameters(parameters)
        # The gradients of this rank are not reduced yet, so their norm has no meaning for the step. Nothing is scaled:
        # the factor would differ between ranks.
        if not self.gradient_state.sync_gradients:
            ids = set(map(id, chosen))
            unreduced = [held for _, raw in current_models().values() for held in hold_unreduced(raw, ids)]
            return clip_norm([*chosen, *unreduced], float("inf"), norm_type, self.device)
        # The order matters: first the factor of a short window, then the fp16 scale. Only then the norm is that of the
        # gradients that the optimizer will use.
        window.rescale_gradients(chosen)
        self._unscale_gradients_of(chosen)
        return clip_norm(chosen, max_norm, norm_type, self.device)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp all elements of the gradients to [-`clip_value`, `clip_value`].

        Does nothing while gradients accumulate.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                accelerator.backward(model(batch).mean())
                accelerator.clip_grad_value_(model.parameters(), clip_value=0.5)
                optimizer.step()
                optimizer.zero_grad()
        """
        chosen = _current_parameters(parameters)
        if self.gradient_state.sync_gradients:
            window.rescale_gradients(chosen)
            self._unscale_gradients_of(chosen)
            clip_values(chosen, clip_value)

    def _unscale_gradients_of(self, parameters: Sequence[torch.Tensor]) -> None:
        # Only for the optimizers of these parameters. Others may get their gradients from a later backward pass, and
        # can unscale them only once per round of the scaler.
        if all(wrapper.scaler is None for wrapper in registered("optimizer").values()):
            return
        chosen = set(map(id, parameters))
        for optimizer in _current_optimizers():
            if not chosen.isdisjoint(_parameter_ids(optimizer)):
                self.unscale_gradients(optimizer)

    # Around the loop

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Allow ranks to have different numbers of batches within the block.

        A rank without further batches shadows the collectives of the others (`torch.distributed.algorithms.Join`). At
        the end of the block, all ranks take the weights, the optimizer states and the schedules of the rank with the
        most steps.

        Args:
            joinables: models under DDP. Raises `TypeError` for other models.
            even_batches: setting of the prepared loaders within the block; by default unchanged.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for batch in loader:
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        """
        able = [model for model in joinables if isinstance(model, Joinable)]
        if len(able) < len(joinables) and self.use_distributed:
            names = ", ".join(type(model).__name__ for model in joinables if not isinstance(model, Joinable))
            raise TypeError(f"join_uneven_inputs() expects models under DDP, got {names}; use even_batches instead")
        before = []
        if even_batches is not None:
            for loader in self._dataloaders:
                # The setting is read when a pass starts, so it has to be set before the user's loop.
                shard = loader.parts.tickets.shard
                before.append((shard, shard.even_batches))
                # As in `build_loader_parts`: a single part has nothing to be made even with.
                shard.even_batches = even_batches and shard.num_processes > 1
        # `Join` lets a rank that has left its loop repeat the collectives of DDP with zeros, until all ranks have left
        # theirs.
        joined: AbstractContextManager[Any] = Join(able) if able and self.use_distributed else nullcontext()
        try:
            with joined:
                yield
            # `Join` copies the models only. Ranks that are in none of their groups are not here.
            if (
                able
                and self.use_distributed
                and all(dist.get_world_size(joinable.join_process_group) == dist.get_world_size() for joinable in able)
            ):
                window.synchronize_replicas(to_most_steps=True)
        finally:
            for sampler, value in before:
                sampler.even_batches = value

    def set_trigger(self) -> None:
        """Set this rank's flag, which makes `check_trigger` return True on all ranks.

        Example::

            if accelerator.is_last_process and loss < threshold:
                accelerator.set_trigger()
            accelerator.check_trigger()  # True
        """
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return True if any rank has set its flag since the last check, and clear the flags. A collective.

        Example::

            for batch in loader:
                loss = model(batch).mean()
                if loss < threshold:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    break
        """
        # All ranks have to call this in the same place, since the maximum over all flags is computed by a collective.
        flag = torch.tensor(int(self._triggered), device=self.device)
        raised = bool(reduce(flag, "max").item())
        if raised:
            self._triggered = False
        return raised

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Run the block under torch's profiler, then wait for all ranks.

        Every rank writes its trace to the handler's `output_trace_dir`, if set, as `profile_<rank>.json`. Raises
        `InvalidArgument` for an activity that the machine cannot profile.

        Example::

            options = ProfileKwargs(activities=["cpu"], output_trace_dir="traces")
            with accelerator.profile(options) as profiler:
                model(torch.ones(4, 8))
            accelerator.print(profiler.key_averages().table(row_limit=5))
        """
        handler = profile_handler or self.handlers.profile
        with handler.build() as profiler:
            yield profiler
        # After the profiler has ended; before that its trace is not complete.
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
        self.state.wait_for_everyone()


def _current_optimizers() -> list[torch.optim.Optimizer]:
    """Return the prepared optimizers of the process, without those whose parameters a later one has.

    A variable may still refer to an optimizer of an earlier run of a cell. It must not unscale the same gradients once
    more.
    """
    current: list[torch.optim.Optimizer] = []
    taken: set[int] = set()
    for optimizer in reversed(registered("optimizer").values()):
        owned = _parameter_ids(optimizer)
        if taken.isdisjoint(owned):
            current.append(optimizer)
        taken |= owned
    return current


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _current_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `parameters` as a list, with the shards in place of full parameters that were listed before `prepare`."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    # A parameter that was replaced gets no gradient any more. One that has a gradient is not looked up.
    current = [replacement_of(parameter) if parameter.grad is None else parameter for parameter in listed]
    if all(map(operator.is_, listed, current)):
        return listed
    # A tied parameter, or one that is listed before and after it was replaced, counts once in the norm.
    return list({id(parameter): parameter for parameter in current}.values())


def clip_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scale the gradients of `parameters` to a norm of at most `max_norm`. A collective for sharded gradients.

    Returns the total norm before, on every rank. torch's `clip_grad_norm_` rejects sparse gradients, and a mix of
    DTensors and plain tensors, as tensor-parallel models have. It returns only a partial norm for shards.
    """
    norm_type = float(norm_type)  # torch takes the text "inf", too
    # The p-norm of all gradients is the p-norm of the norms of the groups.
    groups = group_by_layout(parameters)
    if not groups:
        return torch.zeros((), device=device)
    # `get_total_norm` of DTensors returns a DTensor that is still to be reduced; `full_tensor` does so on all ranks.
    # The groups are in the order of the parameters, which is the same on all ranks.
    norms = [
        _norm_of([_values(tensor.grad) for tensor in group if tensor.grad is not None], norm_type) for group in groups
    ]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    # The scale factor is computed from the norm over all groups, so every rank applies the same one.
    if max_norm != float("inf"):
        for group in groups:
            clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm_of(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of gradients of one layout. A collective for shards."""
    shards = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if norm_type != float("inf") or not shards:
        return full_tensor(get_total_norm(gradients, norm_type))
    # torch refuses this norm of an empty tensor, as the shards of a small parameter are on some ranks.
    local = [without_summands(gradient).to_local() for gradient in shards]
    dtype = torch.float64 if any(values.dtype == torch.float64 for values in local) else torch.float32
    largest = [values.abs().max().to(dtype) for values in local if values.numel()]
    norm = torch.stack(largest).max() if largest else torch.zeros((), dtype=dtype, device=local[0].device)
    # A backend need not keep NaN in a maximum.
    largest_and_nan = torch.stack([norm.nan_to_num(float("inf"), float("inf")), norm.isnan().to(dtype)])
    for axis in range(shards[0].device_mesh.ndim):
        dist.all_reduce(largest_and_nan, dist.ReduceOp.MAX, group=shards[0].device_mesh.get_group(axis))
    return torch.where(largest_and_nan[1] > 0, float("nan"), largest_and_nan[0])


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse gradient, whose norm torch does not compute; a dense one as it is."""
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def clip_values(parameters: Sequence[torch.Tensor], bound: float) -> None:
    """Clamp all elements of the gradients to [-`bound`, `bound`]."""
    plain = [tensor for tensor in parameters if tensor.grad is not None and not isinstance(tensor.grad, DTensor)]
    if plain:  # torch's function raises for an empty list
        clip_grad_value_(plain, bound)
    for tensor in parameters:
        gradient = tensor.grad
        if not isinstance(gradient, DTensor):
            continue
        # The clamped summands do not add up to the clamped sum.
        tensor.grad = gradient = without_summands(gradient)
        # Elements are independent, so every rank clamps its own shard.
        gradient.to_local().clamp_(-bound, bound)
