"""Norms of gradients by module, for the views: measured at the end of optimizer steps and between cells.

The norm of a sharded gradient is known only if all ranks have measured their shards at the same step. They do so
without asking one another, at the steps whose number is a multiple of `every`, which the notebook chooses from the
speed of the training. It adds the squares of the shards.

Measuring is one pass over the gradients. It happens on the thread that has stepped; a view only requests it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.optim.optimizer import Optimizer

from rankbook.numerics import step_ends
from rankbook.numerics.hashing import place_of
from rankbook.protocol.queries import GradientEntry, LocalGradients, ModelGradients
from rankbook.rank.inspect import tensor_introspection

_WATCHED_SECONDS = 5.0
"""Seconds after the last request for which gradients are measured."""

_UNCOUNTED_PAUSE = 2.0
"""Seconds between two measurements for an optimizer that does not count its steps."""

Parameters = Sequence[tuple[str, weakref.ref[torch.Tensor]]]
"""Parameters of a model by name."""


class GradientMeter:
    """Measures the gradients of the models that a view shows, while it is open."""

    def __init__(self, run_when_idle: Callable[[Callable[[], None]], None], cell: Callable[[], int]) -> None:
        self._run_when_idle, self._cell = run_when_idle, cell
        self._main = threading.main_thread().ident
        self._models: Mapping[str, Parameters] = {}
        self._every, self._until = 0, 0.0
        self._listens = self._waits_for_idle = False
        self._measured_after: int | None = None
        self._next_uncounted = 0.0
        self._latest: dict[str, ModelGradients] = {}
        self._changed = threading.Event()
        self.version = 0
        self.seconds = 0.0

    @property
    def latest(self) -> tuple[ModelGradients, ...]:
        """Return the last measurements of all models."""
        return tuple(self._latest.copy().values())

    def request(self, every: int) -> None:
        """Measure at the ends of steps whose number is a multiple of `every`, in the next seconds. Any thread."""
        self._every, self._until = every, time.monotonic() + _WATCHED_SECONDS
        if not self._listens:
            self._listens = True
            step_ends.listen(self._after_step)
        if not self._waits_for_idle and self._measured_after != self._cell():
            self._waits_for_idle = True
            self._run_when_idle(self._when_idle)

    def set_models(self, models: Mapping[str, Parameters]) -> None:
        """Measure these models from now on. Any thread."""
        # A variable may have got another model, whose gradients are not known yet.
        known = {name: [id(reference()) for _, reference in parameters] for name, parameters in self._models.items()}
        same = {
            name
            for name, parameters in models.items()
            if known.get(name) == [id(reference()) for _, reference in parameters]
        }
        if same != models.keys():
            self._measured_after = None
        self._models = models
        latest = {name: norms for name, norms in self._latest.items() if name in same}
        if latest.keys() != self._latest.keys():
            self._latest = latest
            self.version += 1

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a new measurement."""
        self._changed.clear()
        if self._models and (self._waits_for_idle or not self._latest):
            self._changed.wait(timeout)

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._every or time.monotonic() > self._until or threading.get_ident() != self._main:
            return
        step = step_ends.step_of(optimizer)
        if step is not None and step % self._every:
            return
        if step is None:  # a step that nobody counts: the first one after a pause, on every rank
            if time.monotonic() < self._next_uncounted:
                return
            self._next_uncounted = time.monotonic() + max(_UNCOUNTED_PAUSE, 50 * self.seconds)
        stepped = set(map(id, tensor_introspection.parameters_of_optimizer(optimizer)))
        self._measure(lambda parameters: any(id(parameter) in stepped for _, parameter in parameters), step or 0)

    def _when_idle(self) -> None:
        self._waits_for_idle = False
        self._measured_after = self._cell()
        # After a training all gradients may be cleared. The last norms are of more use than none.
        self._measure(lambda parameters: any(parameter.grad is not None for _, parameter in parameters), None)

    def _measure(self, wanted: Callable[[list[tuple[str, torch.Tensor]]], bool], step: int | None) -> None:
        start = time.perf_counter()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # no user code
            for name, references in self._models.items():
                parameters = [(key, tensor) for key, reference in references if (tensor := reference()) is not None]
                parameters = [(key, tensor) for key, tensor in parameters if tensor.is_leaf and tensor.requires_grad]
                if parameters and wanted(parameters):
                    self._latest[name] = ModelGradients(name, step, measure(parameters))
                    self.version += 1
        self.seconds = time.perf_counter() - start
        self._changed.set()


def measure(parameters: Sequence[tuple[str, torch.Tensor]]) -> LocalGradients:
    """Return the norms of the gradients by module and place. No collective.

    A gradient that the ranks have yet to sum up has no norm of its own: it is left out, and `reduced` is False.
    """
    norms: list[tuple[tuple[str, str], torch.Tensor]] = []
    elements: dict[tuple[str, str], int] = {}
    reduced = True
    for key, parameter in parameters:
        gradient = parameter.grad
        sharded, place = parameter if gradient is None else gradient, ""
        if tensor_introspection.is_dtensor(sharded):
            spec = tensor_introspection.spec_of(sharded)
            if any(placement.is_partial() for placement in spec.placements):
                reduced, gradient = False, None
            else:
                place = place_of(spec.mesh, spec.placements)
        entry = (key.rpartition(".")[0], place)
        elements[entry] = elements.get(entry, 0) + tensor_introspection.local_shard(parameter).numel()
        if gradient is not None:
            norms.append((entry, _norm(tensor_introspection.local_shard(gradient))))
    squares: dict[tuple[str, str], list[float]] = {}
    for (entry, _), value in zip(norms, _read([norm for _, norm in norms]), strict=True):
        squares.setdefault(entry, []).append(value * value)
    scale = _loss_scale([parameter for _, parameter in parameters])
    return LocalGradients(
        tuple(
            GradientEntry(*entry, _root(squares[entry]) / scale if entry in squares else None, 0.0, count)
            for entry, count in elements.items()
        ),
        reduced,
        scale,
    )


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    # Half precision would overflow.
    wide = torch.float32 if gradient.dtype.itemsize < 4 else None
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    return norm.float()


def _read(norms: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of the norms, with one wait for a device."""
    if len({norm.device for norm in norms}) == 1:
        return [float(value) for value in torch.stack(list(norms)).tolist()]
    return [norm.item() for norm in norms]


def _root(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _loss_scale(parameters: Sequence[torch.Tensor]) -> float:
    if "rankbook.runtime.prepare" not in sys.modules:  # no optimizer was prepared, so there is no scaler
        return 1.0
    from rankbook.numerics.gradients import loss_scale

    return loss_scale(parameters)
