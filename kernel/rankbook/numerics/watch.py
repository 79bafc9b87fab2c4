"""Number watch of a rank: find the first NaN or infinity of a training step, before the optimizer uses it.

Theory of operation. While the watch is on, torch's *global* hooks observe every module, every optimizer and every
collective of this process; while it is off, none of them is registered and a step runs torch's own code alone.

    module's output     `register_module_forward_hook`, one reduction per output
    gradient of it      a tensor hook on the output, one reduction per gradient
    loss                `torch.Tensor.backward`, which is replaced while the watch is on
    collective          `telemetry.collective_observer`, one reduction of this rank's data
    gradients           before the step of an optimizer: one reduction of each
    parameters          after it: one reduction of each

A reduction is a sum, or a norm of all gradients or parameters in one call. It is not finite if an element is not; if it
has only overflowed, an exact check follows. On the CPU the result is read at once. On an accelerator, reading would
wait for the device at every module, so the norms (`inf`, which cannot overflow) stay there, and are read together
before the optimizer's step, and before the next forward pass if the step has several.

The *first* value is kept as an `Event`, with the module, the line and the number of collectives so far. The module
whose output is the first one that is not finite need not be the culprit: its inputs may have been bad already, when
code between two modules made them. Then the innermost enclosing module with finite inputs is named. In the backward
pass, the gradient of a module's *output* shows that the modules which used it are at fault: they are known from the
forward pass.

Before an optimizer steps, all ranks that train together exchange one flag. If it is set on any of them, they exchange
their reports, and all raise the same `NumericalError` (see `attribution.py`).

An optimizer may run the passes itself, by a closure. Then the gradients exist when the closure has returned, and are
checked there: the closure is wrapped for this call of `step`. LBFGS calls it several times and updates the parameters
in between. So from the second call on, the parameters are looked at too, if the passes have shown something.

A step may have several optimizers, which step one after another. What was seen in the step is kept for all of them, and
forgotten when the next forward or backward pass begins.

fp16. A `GradScaler` multiplies the loss so that infinite gradients are expected now and then; it then skips the step.
So no check runs in its skipped steps, and `GradScaler.update` forgets what the backward pass has shown. A value that
was non-finite in the forward pass, or in the loss before it is scaled, is an alarm nevertheless: no scale can mend it.
When a step was skipped, the ranks ask one another in `update` whether a forward pass is at fault. The error is raised
after the update.
"""

from __future__ import annotations

import cmath
import dataclasses
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from rankbook import control_collectives
from rankbook.errors import NumericalError
from rankbook.lazy_imports import loaded_module
from rankbook.numerics import attribution as at
from rankbook.numerics import step_ends
from rankbook.numerics.naming import ModuleNames, cell_line, executed_lines, namespace, tensors_in
from rankbook.numerics.settings import Conditions
from rankbook.protocol import telemetry

Lines = Sequence[tuple[str, int]]
INPUTS_NAME = "nonfinite_inputs"
"""Variable in which the inputs of the culprit are kept."""
_MAX_LAUNCHES = 4096
"""Number of collectives per step whose inputs are remembered."""
_MAX_CALLS = 4096
"""Number of calls of modules whose inputs are kept."""
cell = 0
"""Number of cells that this process has begun since the watch was loaded. A rank counts them; a script has none."""
_MAX_NAMES = 3
"""Number of running statistics to name in a message."""
_CALL = "_rankbook_call"
"""Attribute of a tensor: the call that has produced it, and the tensor's version then."""


class _Call:
    """One call of a module in the forward pass.

    `consumers` are the calls that used its output, innermost first. `enclosing` are the modules around it that have
    returned its output as their own.
    """

    __slots__ = ("__weakref__", "consumers", "enclosing", "finite", "inputs", "module", "norm")

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.module = module
        self.norm: torch.Tensor | None = None  # of its output on an accelerator
        self.inputs: tuple[Any, ...] | None = inputs
        # Tuples, because most stay empty and need no object for the garbage collector.
        self.consumers: tuple[_Call, ...] = ()
        self.enclosing: tuple[nn.Module, ...] = ()
        self.finite = False  # whether the gradient of its output was

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        # It is an attribute of a tensor, and belongs to this process and step: a copy of the tensor has none. An empty
        # set takes its place, which torch.load(weights_only=True) takes too, other than None.
        return set, ()


class _First:
    """The first non-finite value of the step, before it is attributed to a module."""

    __slots__ = (
        "call", "finite_grads", "in_pass", "inputs_kind", "kind", "later", "line", "phase", "positions",
    )  # fmt: skip

    def __init__(self, phase: str, kind: str, call: _Call | None, line: str, positions: dict[str, int]) -> None:
        self.phase, self.kind, self.call, self.line, self.positions = phase, kind, call, line, positions
        self.inputs_kind: str | None = None
        self.finite_grads: frozenset[int] = frozenset()
        # Calls that ended after it in the forward pass, and whether their inputs were finite: the enclosing modules are
        # among them.
        self.in_pass = True
        self.later: list[tuple[_Call, bool]] = []


class NumberWatch:
    """The watch of this process; `install` registers its hooks, `remove` removes all of them."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self._removers: list[Callable[[], None]] = []
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        # Models under DDP, and the ids of their parameters.
        self._replicated: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        self._busy = self._shared = False
        self._checked = True  # whether a check has run before the update
        # The calls of the step that may have inputs. A backward pass forgets the inputs, and not every pass has one.
        self._calls: deque[weakref.ref[_Call]] = deque()
        self._reset()

    def _forget_inputs(self, kept: int = 0) -> None:
        """Forget the inputs of all calls but the last `kept`.

        An input refers by a hook in its graph to the call that has produced it, and that to its consumers. This cycle
        passes through C++, so that the garbage collector does not free it.
        """
        while len(self._calls) > kept:
            call = self._calls.popleft()()
            if call is not None:
                call.inputs = None

    def release_inputs(self) -> None:
        """See the function of this name. What the passes of the step have computed is read before."""
        try:
            self._read_deferred()
        except RuntimeError:  # the device has failed for good, or is out of memory
            self._deferred.clear()
            self._deferred_launches.clear()
        self._forget_inputs()

    def _reset(self) -> None:
        self._forget_inputs()
        self._line = ""
        # After the step of an optimizer: the number of launches, and the positions until then.
        self._ended: tuple[int, dict[str, int]] | None = None
        self._first: _First | None = None
        # The cell of the last forward pass, whether a backward pass has run in this step, and whether the first value
        # is one of the passes in an earlier cell than the last.
        self._pass_cell, self._has_backward, self._is_earlier = cell, False, False
        self._finite_grads: set[int] = set()
        # By id. Weak: a pass that ran out of memory must not keep the model.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._positions: dict[str, int] = {}
        self._launches: list[tuple[str, int, Callable[[], str], str, bool, list[TensorWeakRef]]] = []
        self._wrapped = self._joined = self._scaled = False
        # On an accelerator: (phase, call, norm, lines), read at the check, or when the forward pass after a backward
        # pass begins: then the activations are freed. Without an optimizer, there is no check.
        self._is_unread = False
        self._deferred: list[tuple[str, _Call | None, torch.Tensor, Lines]] = []
        self._deferred_launches: list[tuple[int, torch.Tensor]] = []

    def _end_step(self) -> None:
        """Forget the passes of the step, but not the collectives, for another optimizer of the same step."""
        self._first = None
        self._has_backward = self._is_earlier = False
        self._finite_grads = set()
        self._scaled = False
        self._deferred, self._deferred_launches = [], []
        if len(self._launches) >= _MAX_LAUNCHES:  # no pass has begun for many steps
            self._launches = []
        self._ended = len(self._launches), dict(self._positions)

    def _begin_step(self) -> None:
        """Forget the step that has ended, if one has.

        Collectives after it are those of the next one, such as an all-gather.
        """
        if self._ended is None:
            return
        count, positions = self._ended
        launches, deferred = self._launches[count:], [(index - count, norm) for index, norm in self._deferred_launches]
        new = {group: number for group, number in self._positions.items() if number != positions.get(group)}
        self._reset()
        self._launches, self._deferred_launches, self._positions = launches, deferred, new

    def _begin_cell(self) -> None:
        """Forget the forward passes of an earlier cell that no backward pass has followed: they are part of no step."""
        self._pass_cell = cell
        if self._has_backward:  # its gradients may be part of this step, or the user has cleared them
            self._read_deferred()
            self._is_earlier = self._first is not None
        else:
            self._first, self._deferred = None, []
            self._forget_inputs()

    # Hooks

    def install(self) -> None:
        """Register the hooks."""
        step_ends.install()  # before those below, which run long
        handles: list[Any] = [
            register_optimizer_step_pre_hook(_before_step),
            register_optimizer_step_post_hook(_after_step),
        ]
        if self.conditions.nan or self.conditions.inf:
            handles.append(register_module_forward_hook(self._after_forward, with_kwargs=True))
            self._replace(torch.Tensor, "backward", self._before_backward)
            self._replace(torch.amp.GradScaler, "scale", self._before_scale)
            self._replace(torch.amp.GradScaler, "update", self._before_update)
            telemetry.collective_observer = self._on_launch
        self._removers += [handle.remove for handle in handles]

    def _replace(self, owner: Any, name: str, before: Callable[..., Exception | None]) -> None:  # noqa: ANN401 - a class
        # There is no hook for these methods. The replacement calls `before` first, and raises the error that it returns
        # last.
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(instance: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
            error = before(instance, *args)
            result = original(instance, *args, **kwargs)
            if error is not None:
                raise error
            return result

        setattr(owner, name, method)
        self._removers.append(functools.partial(setattr, owner, name, original))

    def remove(self) -> None:
        """Remove the hooks, and forget the step that is in progress."""
        for remove in reversed(self._removers):
            remove()
        self._removers.clear()
        step_ends.remove_unused()
        telemetry.collective_observer = None
        self._reset()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        # A pass without gradients is no part of a step: what it computes reaches the step through a later module, or
        # the loss. Code that is being compiled has no values, nor has a function inside of `torch.func.vmap`.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        self._begin_step()
        if self._pass_cell != cell:
            self._begin_cell()
        elif self._is_unread or len(self._deferred) > _MAX_CALLS:
            self._read_deferred()
        self._forget_inputs(_MAX_CALLS)
        self._modules[id(module)] = weakref.ref(module)
        # Of a model that some of the ranks train, the others take no step: each of its ranks decides alone.
        if isinstance(module, DistributedDataParallel) and module.process_group.size() == dist.get_world_size():
            self._wrapped = True
            if module not in self._replicated:
                self._replicated[module] = frozenset(map(id, module.parameters()))
            self._joined = self._joined or bool(module._join_config.enable)
        call = _Call(module, (*args, *kwargs.values()) if kwargs else args)
        self._calls.append(weakref.ref(call))
        if self._first is not None:
            if self._first.in_pass and len(self._first.later) < _MAX_CALLS:
                self._first.later.append((call, _kind_of_all(call.inputs) is None))
            return
        for tensor in tensors_in(call.inputs):
            if tensor.requires_grad and not tensor.is_leaf:
                producer = self._producer(tensor)
                if producer is None:  # computed between two modules
                    producer = self._follow(tensor, _Call(module, ()))
                producer.consumers += (call,)
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            producer = self._producer(tensor) if tensor.requires_grad else None
            if producer is not None:  # a container returns the output of its last module
                producer.enclosing += (module,)
                if producer.norm is not None:  # it may turn out to be the first module with finite inputs
                    self._deferred.append((at.FORWARD, call, producer.norm, ()))
            elif self._check(tensor, at.FORWARD, call) and tensor.requires_grad and not tensor.is_leaf:
                self._follow(tensor, call)

    @staticmethod
    def _producer(tensor: torch.Tensor) -> _Call | None:
        """Return the call that has produced `tensor`, unless it was changed in place since."""
        entry = tensor.__dict__.get(_CALL)
        return entry[0] if entry is not None and entry[0] and entry[1] == tensor._version else None

    def _follow(self, tensor: torch.Tensor, call: _Call) -> _Call:
        """Check the gradient of `tensor` in the backward pass."""
        tensor.__dict__[_CALL] = (call, tensor._version)
        # torch warns of other hooks when the tensor is saved.
        tensor.register_hook(unserializable_hook(functools.partial(self._on_gradient, call)))
        return call

    def _on_gradient(self, call: _Call, gradient: torch.Tensor) -> None:
        self._has_backward = True
        if self._first is not None or not self._check(gradient, at.BACKWARD, call) or not is_on_host(gradient):
            return
        self._mark_finite(call)

    def _mark_finite(self, call: _Call) -> None:
        """Note that the gradient of the output of `call` was finite, before anything else in the step was not."""
        # The backward pass of its consumers is over, so their inputs are not wanted any more. They also refer to the
        # output of `call`, which refers to `call`: a cycle that keeps them until Python's garbage collector runs.
        for consumer in call.consumers:
            consumer.inputs = None
        call.finite = True
        self._finite_grads.add(id(call.module))
        for module in call.enclosing:
            self._finite_grads.add(id(module))

    def _before_backward(self, loss: torch.Tensor, *_: object) -> None:
        self._begin_step()
        self._has_backward = self._is_unread = True
        self._line = cell_line()
        if self._first is not None:
            self._first.in_pass = False
        elif not self._scaled:
            self._check(loss, at.LOSS, None)

    def _before_scale(self, _scaler: torch.amp.GradScaler, losses: object = (), *_: object) -> None:
        self._begin_step()
        # The scaled loss may overflow without harm.
        self._scaled = True
        for loss in tensors_in(losses):
            if self._first is None:
                self._check(loss, at.LOSS, None)

    def _before_update(self, scaler: torch.amp.GradScaler, new_scale: object = None) -> NumericalError | None:
        """End a round of the fp16 scaler, which skips a step with infinite gradients.

        Return the error that is to be raised after the update: without it, the scaler would refuse all later steps.
        """
        self._read_deferred()
        first, error = self._first, None
        # The scaler skips the step, and would do so for ever if the forward pass is to blame. The ranks' scalers have
        # the same gradients, so that all ranks ask one another, also those whose own forward pass was finite. A scale
        # that is given restarts the scaler, perhaps on some of the ranks only.
        if new_scale is None and any(float(found) > 0 for found in _found_infinities(scaler)):
            if first is not None and (first.phase not in (at.FORWARD, at.LOSS) or self._is_earlier):
                self._first = None  # infinite gradients are in order
            parameters = [p for module in self._live_modules() for p in module.parameters(recurse=False)]
            self._shared = self._is_shared(parameters)
            try:
                self._agree(lambda: max(self._steps.values(), default=0) + 1, (), parameters, 0.0)
            except NumericalError as raised:
                error = raised
        self._reset()
        return error

    def _on_launch(
        self, group: str, number: int, describe: Callable[[], str], tensors: object, outputs: object
    ) -> None:
        if self._busy or number == 0:
            return
        self._positions[group] = number
        if len(self._launches) >= _MAX_LAUNCHES:
            return
        finite, dtype = True, ""
        references = [TensorWeakRef(tensor) for tensor in tensors_in(outputs)]
        with torch.no_grad():
            for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors_in(tensors):
                if not tensor.is_floating_point() or tensor.layout is not torch.strided:
                    continue
                dtype = str(tensor.dtype).removeprefix("torch.")
                if is_on_host(tensor):
                    finite = finite and kind_of(tensor) is None
                elif tensor.numel():
                    self._deferred_launches.append((len(self._launches), _largest(tensor)))
        self._launches.append((group, number, describe, dtype, finite, references))

    # Checks

    def _check(self, tensor: torch.Tensor, phase: str, call: _Call | None) -> bool:
        """Return False, and keep the first event, if `tensor` is not finite."""
        local = _local(tensor)
        if not _is_float(local) or local.layout is not torch.strided:
            return True
        if not is_on_host(local):
            if local.numel() and not local.is_meta:
                # Detached: a graph would keep the output until the norm is read.
                norm = _largest(local.detach())
                self._deferred.append((phase, call, norm, () if phase == at.BACKWARD else executed_lines()))
                if phase == at.FORWARD and call is not None:
                    call.norm = norm
            return True
        kind = kind_of(local)
        # -inf in an output is in order for many modules, such as masks and logarithms of probabilities.
        if kind is None or (kind == "inf" and phase == at.FORWARD and not self.conditions.inf):
            return True
        self._keep_first(phase, kind, call)
        return False

    def _keep_first(self, phase: str, kind: str, call: _Call | None) -> None:
        line = (self._line if phase == at.BACKWARD else "") or cell_line()
        self._first = first = _First(phase, kind, call, line, dict(self._positions))
        first.finite_grads = frozenset(self._finite_grads)
        if phase == at.FORWARD and call is not None:
            first.inputs_kind = _kind_of_all(call.inputs)

    def _read_deferred(self) -> None:
        """Read the norms that an accelerator has computed since the last call; keep the first that is not finite."""
        self._is_unread = False
        launches, self._deferred_launches = self._deferred_launches, []
        if launches:
            values = torch.stack([norm.float() for _, norm in launches]).tolist()
            for (index, _), value in zip(launches, values, strict=True):
                if not math.isfinite(value):
                    group, number, describe, dtype, _, references = self._launches[index]
                    self._launches[index] = (group, number, describe, dtype, False, references)
        deferred, self._deferred = self._deferred, []
        if not deferred:
            return
        values = torch.stack([norm.float() for _, _, norm, _ in deferred]).tolist()
        for (phase, call, _, lines), value in zip(deferred, values, strict=True):
            kind = "NaN" if math.isnan(value) else "inf" if math.isinf(value) else None
            if kind is None:
                if phase == at.BACKWARD and call is not None and self._first is None:
                    self._mark_finite(call)
            elif self._first is not None:
                if phase == at.FORWARD and call is not None:
                    self._first.later.append((call, _kind_of_all(call.inputs) is None))
            elif not (kind == "inf" and phase == at.FORWARD and not self.conditions.inf):
                self._keep_first(phase, kind, call)
                assert self._first is not None
                self._first.line = (cell_line(lines) if lines else "") or self._line or cell_line()
                self._first.in_pass = not self._has_backward  # otherwise the next forward pass is another one

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check what the passes have shown, or have a closure checked: then return the new arguments of the step."""
        # A fused optimizer is called although the scaler has found infinities, and skips the step by itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return None
        step_ends.refused.discard(optimizer)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        # torch passes the optimizer itself as the first argument.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        counted = self._steps[optimizer]
        if closure is None:
            self._check_before_update(optimizer, lambda: step_of(optimizer, counted))
            return None
        self._checked = False
        checking = self._checking(closure, optimizer, step_of(optimizer, counted))
        if len(args) > 1:
            return (args[0], checking, *args[2:]), kwargs
        return args, {**kwargs, "closure": checking}

    def _checking(self, closure: Callable[..., Any], optimizer: torch.optim.Optimizer, step: int) -> Callable[..., Any]:
        """Return a closure that also checks the gradients that `closure` has computed."""

        @functools.wraps(closure)
        def checking(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the user's
            result = closure(*args, **kwargs)
            self._check_before_update(optimizer, lambda: step, updated=self._checked)
            return result

        return checking

    def _check_before_update(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], int], *, updated: bool = False
    ) -> None:
        """Raise `NumericalError` on all ranks if one of them has gradients that the optimizer must not use.

        `step` returns the number of the step, which only an error needs: it takes a look at every parameter's state.
        `updated`: the optimizer has updated the parameters in this step already, before the last passes.
        """
        self._checked = True
        self._read_deferred()
        parameters = _parameters(optimizer)
        gradients: tuple[torch.Tensor, ...] = ()
        if self.conditions.nan or self.conditions.inf:
            tensors = [_gradient(p) for p in parameters]
            if not _all_finite(tensors):
                gradients = tuple(p for p, g in zip(parameters, tensors, strict=True) if kind_of(g) is not None)
        norm = self._norm_of(parameters) if self.conditions.norm is not None else 0.0
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor) and norm:  # of fp16: a fused optimizer divides the gradients in its kernel
            norm /= float(scale)
        self._shared = self._is_shared(parameters)
        first = self._first
        if first is not None and (self._is_earlier or (self._scaled and first.phase == at.BACKWARD)) and not gradients:
            # In an earlier cell, whose gradients were cleared; or in the graph of another optimizer, whose step the
            # scaler will skip.
            self._first = None
        spoilt = self._spoilt(parameters) if updated and (self._first is not None or gradients) else None
        try:
            self._agree(step, gradients, parameters, norm, spoilt)
        except NumericalError:
            if not updated:  # all parameters are those of the step before
                step_ends.refused.add(optimizer)
                if (wrapper := step_ends.wrapper_of(optimizer)) is not None:
                    wrapper.is_stepping = False
            raise
        self._end_step()

    def _spoilt(self, parameters: Sequence[torch.Tensor]) -> at.Event | None:
        """Return the event of an optimizer that has made one of the parameters non-finite, None if it has not."""
        # A state that is not finite makes the parameter so, in the same step: only parameters are checked.
        if _all_finite([_local(parameter.detach()) for parameter in parameters]):
            return None
        for parameter in parameters:
            kind = kind_of(_local(parameter))
            if kind is not None:
                name = self._names().parameter(parameter)
                return at.Event(at.OPTIMIZER, _module_of(name), kind, cell_line(), f"parameter {name}")
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the parameters that the step has changed."""
        if not (self.conditions.nan or self.conditions.inf):
            return
        touched = _parameters(optimizer)
        if not self._checked:  # an optimizer that does not call its closure
            self._checked, self._shared = True, self._is_shared(touched)
            self._end_step()
        event = self._spoilt(touched)
        if self._any_rank(event is not None):
            step = step_of(optimizer, self._steps.get(optimizer, 0), done=True)
            self._raise(at.RankReport(control_collectives.this_rank(), step, event), None)
        self._modules = {}

    # Agreement of the ranks

    def _is_shared(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return True if all ranks of the default group take this step together."""
        if not dist.is_initialized() or dist.get_world_size() == 1 or self._joined:
            return False
        meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
        if any(mesh.size() == dist.get_world_size() for mesh in meshes):
            return True
        earlier: dict[str, int] = {}
        if self._ended is None:
            if self._wrapped:
                return True
        else:
            # Another optimizer of the step. Rank 0 alone may have one, for a model of its own.
            earlier = self._ended[1]
            chosen = set(map(id, parameters))
            if any(not chosen.isdisjoint(replicated) for replicated in self._replicated.values()):
                return True
        # Gradients that the user's own code reduces.
        name = _default_group_name()
        return self._positions.get(name) != earlier.get(name)

    def _any_rank(self, flag: bool) -> bool:
        """Return True if a rank has set its flag. A collective if the step is shared."""
        if not self._shared:
            return flag
        self._busy = True
        try:
            return control_collectives.all_min(0 if flag else 1)[0] == 0
        finally:
            self._busy = False

    def _agree(
        self,
        step: Callable[[], int],
        gradients: tuple[torch.Tensor, ...],
        parameters: Sequence[torch.Tensor],
        norm: float,
        spoilt: at.Event | None = None,
    ) -> None:
        """Raise `NumericalError` on all ranks if one of them has seen a value that is watched.

        `spoilt` takes the place of what the passes have shown: the optimizer has made their parameters non-finite.
        """
        limit = self.conditions.norm
        above = limit is not None and not norm <= limit  # also if it is NaN
        if not self._any_rank(self._first is not None or bool(gradients) or above):
            return
        event, inputs = (spoilt, None) if spoilt is not None else self._attribute_locally()
        largest = ""
        # All ranks take part in the norms of sharded gradients, also if only the plain ones of others are above it.
        if limit is not None and self._any_rank(above):
            norms = [
                self._norm_of([parameter]) if self._shared else float(torch.linalg.vector_norm(_gradient(parameter)))
                for parameter in parameters
            ]
            # NaN is neither larger nor smaller than another one. This rank may have no gradient.
            by_norm = max(
                range(len(norms)), key=lambda i: norms[i] if math.isfinite(norms[i]) else math.inf, default=None
            )
            largest = "" if by_norm is None else _module_of(self._names().parameter(parameters[by_norm]))
        report = at.RankReport(
            control_collectives.this_rank(),
            step(),
            event,
            # The other ranks' launches tell where a value comes from. Without theirs, the own ones would mislead.
            tuple(self._describe_launches()) if self._shared or self._ended is None else (),
            tuple(self._names().parameter(parameter) for parameter in gradients),
            str(_gradient(gradients[0]).dtype).removeprefix("torch.") if gradients else "",
            kind_of(_gradient(gradients[0])) or "NaN" if gradients else "NaN",
            norm if above else None,
            limit,
            largest,
            self._line or cell_line(),
            inputs is not None,
        )
        self._raise(report, inputs)

    def _discard_gradients(self) -> None:
        """Discard the gradients of the step, of all optimizers.

        They would be added to those of the next backward pass, and be found there once more.
        """
        prepared = loaded_module("rankbook.runtime.prepared")
        others = [*self._steps, *(prepared.registered("optimizer").values() if prepared is not None else ())]
        held = [p for optimizer in others for group in optimizer.param_groups for p in group["params"]]
        passed = [p for module in self._live_modules() for p in module.parameters(recurse=False)]
        for parameter in (*held, *passed):
            parameter.grad = None

    def _raise(self, report: at.RankReport, inputs: tuple[Any, ...] | None) -> NoReturn:
        report = dataclasses.replace(report, statistics=self._spoilt_statistics())
        self._discard_gradients()
        self._busy = True
        try:
            reports = control_collectives.gather_objects(report) if self._shared else [report]
        finally:
            self._busy = False
            self._reset()
        origin = at.attribute(reports)
        text = str(origin)
        if any(other.rank in origin.ranks and other.has_inputs for other in reports):
            text += f"; the inputs of the module are in {INPUTS_NAME} there"
            if report.rank in origin.ranks and inputs is not None:
                namespace()[INPUTS_NAME] = inputs
        if statistics := list(dict.fromkeys(name for other in reports for name in other.statistics)):
            more = f" and {len(statistics) - _MAX_NAMES} more" if len(statistics) > _MAX_NAMES else ""
            text += (
                f"; running statistics are not finite: {', '.join(statistics[:_MAX_NAMES])}{more} "
                "(reset_running_stats(), or load a checkpoint)"
            )
        raise NumericalError(text)

    def _spoilt_statistics(self) -> tuple[str, ...]:
        """Return the names of running statistics that the passes have made non-finite, as those of a batch norm."""
        found = [
            (module, name)
            for module in self._live_modules()
            if hasattr(module, "reset_running_stats")
            for name, buffer in module.named_buffers(recurse=False)
            if kind_of(_local(buffer)) is not None
        ]
        names = self._names() if found else None
        return tuple(_join(names.module(module), name) for module, name in found) if names is not None else ()

    def _norm_of(self, parameters: list[torch.Tensor]) -> float:
        from rankbook.runtime.training import clip_norm

        if not parameters:
            return 0.0
        self._busy = True
        try:
            return float(clip_norm(parameters, math.inf, 2, parameters[0].device))
        finally:
            self._busy = False

    def _describe_launches(self) -> Iterator[at.Launch]:
        for group, number, describe, dtype, finite, references in self._launches:
            tensors = [reference() for reference in references]
            output_finite: bool | None = all(tensor is None or kind_of(tensor) is None for tensor in tensors)
            if output_finite and (not tensors or any(tensor is None for tensor in tensors)):
                output_finite = None
            yield at.Launch(group, number, describe(), dtype, finite, output_finite)

    # Attribution on this rank

    def _attribute_locally(self) -> tuple[at.Event | None, tuple[Any, ...] | None]:
        """Return the event of this rank with the name of its module, and the inputs of that module."""
        first = self._first
        if first is None:
            return None, None
        names = self._names()

        def event(phase: str, module: str, detail: str = "") -> at.Event:
            return at.Event(phase, module, first.kind, first.line, detail, first.positions)

        if first.phase == at.LOSS or first.call is None:
            detail = "" if self._live_modules() else "or before it, where no module is watched, as in a compiled model"
            return event(at.LOSS, "loss", detail), None
        name = names.module(first.call.module)
        if first.phase == at.FORWARD:
            if first.inputs_kind is None:
                bad = next((n for n, p in first.call.module.named_parameters() if kind_of(_local(p)) is not None), None)
                if bad is not None:
                    return event(at.PARAMETER, _join(name, _module_of(bad, "")), f"parameter {_join(name, bad)}"), None
                return event(at.FORWARD, name), first.call.inputs
            # Its inputs were bad already. The modules around it end later; the first one whose inputs were finite has
            # computed the value itself.
            last = first.call
            for call, finite in first.later:
                if names.encloses(call.module, last.module):
                    last = call
                    if finite:
                        between = f"before `{name}`"
                        return event(at.FORWARD, names.module(call.module), between), call.inputs
            return event(at.DATA, names.module(last.module)), last.inputs
        # The gradient of the output is the work of the modules that used it. Inner ones come before outer ones.
        finite_modules = first.finite_grads
        suspects = [c for c in first.call.consumers if c.finite or id(c.module) in finite_modules]
        if suspects:
            module = names.module(suspects[0].module)
            # The gradient is the sum of theirs. Modules around a suspect only contain it.
            inner = [c.module for c in suspects if not any(names.encloses(c.module, s.module) for s in suspects)]
            others = dict.fromkeys(f"`{name}`" for m in inner if (name := names.module(m)) != module)
            detail = f"or in {', '.join(others)}, with the same input" if others else ""
            return event(at.BACKWARD, module, detail), suspects[0].inputs
        # No module used it: code of the innermost enclosing module did, or the loss.
        for parent in names.parents(first.call.module):
            if id(parent) in finite_modules and parent not in first.call.enclosing:
                return event(at.BACKWARD, names.module(parent), f"after `{name}`"), None
        return event(at.LOSS, "loss", "its gradient"), None

    def _names(self) -> ModuleNames:
        return ModuleNames(namespace(), [*self._live_modules(), *self._replicated])

    def _live_modules(self) -> list[nn.Module]:
        """Return the modules that the forward passes of this step have called."""
        return [module for reference in self._modules.values() if (module := reference()) is not None]


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return True if reading a value of `tensor` does not wait for a device."""
    return tensor.is_cpu


def kind_of(tensor: torch.Tensor) -> str | None:
    """Return "NaN" or "inf" if an element of `tensor` is not finite, otherwise None."""
    if not _is_float(tensor):
        return None
    values = _reducible(tensor.detach() if tensor.requires_grad else tensor)
    # In half precision a sum overflows early.
    total = values.sum(dtype=torch.float32) if values.dtype.itemsize < 4 else values.sum()
    if cmath.isfinite(total.item()):
        return None
    if bool(torch.isnan(values).any()):
        return "NaN"
    return "inf" if bool(torch.isinf(values).any()) else None


def _found_infinities(scaler: torch.amp.GradScaler) -> Iterator[torch.Tensor]:
    """Yield what the scaler has found in the gradients of its optimizers: more than 0 if one is not finite."""
    if not scaler.is_enabled():  # it has no states
        return
    for state in scaler._per_optimizer_states.values():
        yield from state.get("found_inf_per_device", {}).values()


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, or NaN if there is one, without reading it."""
    norm: torch.Tensor = torch.linalg.vector_norm(_reducible(values), math.inf)
    return norm


def _reducible(values: torch.Tensor) -> torch.Tensor:
    """Return float8 values as bfloat16, which has all of them: torch does not reduce float8."""
    return values.to(torch.bfloat16) if values.dtype.itemsize == 1 and values.is_floating_point() else values


def _kind_of_all(value: object) -> str | None:
    kinds = {kind_of(_local(tensor)) for tensor in tensors_in(value) if tensor.layout is torch.strided} - {None}
    return "NaN" if "NaN" in kinds else "inf" if kinds else None


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return False if an element of `tensors` may not be finite, so that they have to be looked at one by one."""
    if all(map(is_on_host, tensors)):
        # One call for all of them, which reads the memory at its full speed.
        return not tensors or all(math.isfinite(norm.item()) for norm in torch._foreach_norm(list(tensors)))
    # One read for all: reading waits for the device.
    return math.isfinite(torch.nn.utils.get_total_norm(list(tensors), 2.0).item())


def _is_float(tensor: torch.Tensor) -> bool:
    """Return True if the elements may be NaN."""
    return tensor.is_floating_point() or tensor.is_complex()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None  # only parameters with gradients are checked
    gradient = _local(gradient)
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def _default_group_name() -> str:
    group = dist.group.WORLD
    return str(getattr(getattr(group, "log", None), "name", ""))


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module and name else module or name


def _module_of(parameter: str, default: str | None = None) -> str:
    return parameter.rpartition(".")[0] or (parameter if default is None else default)


def step_of(optimizer: torch.optim.Optimizer, counted: int, *, done: bool = False) -> int:
    """Return the number of the step that the optimizer is about to take, or has just taken; the first is 1.

    A prepared optimizer counts its steps, and most of torch's optimizers count them in their state. For others, the
    steps are counted since the watch was switched on.
    """
    wrapper = step_ends.wrapper_of(optimizer)
    if wrapper is not None:  # counts a step when it has ended
        return int(wrapper.steps) + 1
    counters = [state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state]
    if counters and isinstance(counters[0], torch.Tensor) and counters[0].device.type != "cpu":
        counters = counters[:1]  # to read one waits for the device
    if counters:
        return max(map(int, counters)) + (not done)
    adaptive = "betas" in optimizer.defaults
    return 1 if adaptive and not done else counted


_active: NumberWatch | None = None


# Functions of this module, because an optimizer class of a cell is pickled with all of torch's hooks.


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    return None if _active is None else _active.before_step(optimizer, args, kwargs)


def _after_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    if _active is not None:
        _active.after_step(optimizer)


def release_inputs() -> None:
    """Forget the inputs of the modules of a step that has failed: they keep its graph in memory."""
    if _active is not None:
        _active.release_inputs()


def active_conditions() -> Conditions | None:
    """Return the conditions of the watch of this process, None if it is off."""
    return None if _active is None else _active.conditions


def set_conditions(conditions: Conditions) -> None:
    """Replace the watch of this process by one with `conditions`; none if they are empty."""
    global _active
    if _active is not None:
        _active.remove()
        _active = None
    if conditions:
        _active = NumberWatch(conditions)
        _active.install()
