"""Comparison of one training step in two layouts: where they differ first, by how much, and what explains it.

`compare_layouts` runs the step twice in each layout. The first pass records summaries of all tensors on all ranks
(`recording.py`), from which `first_difference` finds the first tensor that differs; the second pass records this tensor
alone, and `relations.classify` explains the difference. Everything happens on copies, or is restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from torch import nn

from rankbook.control_collectives import gather_objects, this_rank, world_size
from rankbook.errors import InvalidArgument
from rankbook.numerics import recording
from rankbook.numerics.recording import (
    Key,
    Record,
    Summary,
    build,
    difference,
    precision_of,
    raw_model,
    record,
    use_current,
)
from rankbook.numerics.relations import Relation, classify
from rankbook.numerics.settings import Layout, parse_layout
from rankbook.ranks import name_ranks
from rankbook.runtime.data.loader_base import PreparedLoader
from rankbook.runtime.optimizer import AcceleratedOptimizer
from rankbook.runtime.tree import concatenate, find_batch_size, slice_tensors
from rankbook.widgets.rendering import ORANGE, VERMILLION, colour_grid, table

_STEPS = {
    # Rounding errors that a phase accumulates, in units of the precision's eps: for fp32, and for half precision.
    recording.START: (0.0, 0.0),
    recording.FORWARD: (64.0, 8.0),
    recording.LOSS: (64.0, 8.0),
    recording.GRADIENT: (1024.0, 32.0),
    recording.CLIPPED: (1024.0, 32.0),
    recording.STATE: (2048.0, 64.0),
    recording.PARAMETER: (1024.0, 32.0),
    recording.BUFFER: (256.0, 16.0),
}
_FLOOR = 0.05
"""Share of the largest norm in a phase below which rounding errors of that size are expected in any tensor."""
_UPDATE = 0.1
"""Share of a parameter's change that may differ: Adam turns rounding errors of tiny gradients into whole steps."""
_ROUNDING = 8.0
"""Rounding errors of an update, in units of eps of the parameter's data type."""


_MAX_MODULES = 40
"""Modules in the picture."""

_LABELS = {
    recording.START: "`{}`",
    recording.FORWARD: "output of `{}`",
    recording.LOSS: "loss",
    recording.GRADIENT: "gradient of `{}`",
    recording.CLIPPED: "clipped gradient of `{}`",
    recording.STATE: "optimizer state `{}`",
    recording.PARAMETER: "new value of `{}`",
    recording.BUFFER: "new value of the buffer `{}`",
}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs. `size` is relative to the norm of the reference."""

    phase: str
    name: str
    rank: int
    size: float
    tolerance: float
    text: str = ""

    @property
    def module(self) -> str:
        """Return the path of the module."""
        return module_of(self.phase, self.name)


def module_of(phase: str, name: str) -> str:
    """Return the path of the module that a tensor of a phase belongs to."""
    name = name.split(":", maxsplit=1)[0].split(" ", maxsplit=1)[0] if name != "the model" else name
    if phase in (recording.FORWARD, recording.LOSS):
        return name
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`: the first difference and its explanation, or the agreement of two layouts.

    `equal` is True if no phase differs by more than its tolerance. `first` is the first `Difference`, `ranks` are the
    ranks where it is seen, and `relation` explains it. `phases` has a row per phase: its name, the number of tensors
    that were compared, the largest relative difference, the tolerance, and the number of tensors above it. `modules`
    has the same for every module and phase: the module, the phase, the numbers of tensors compared and above it.
    """

    layouts: tuple[str, str]
    world_size: int
    phases: tuple[tuple[str, int, float, float, int], ...]
    first: Difference | None = None
    ranks: tuple[int, ...] = ()
    relation: Relation | None = None
    precision: str = "float32"
    modules: tuple[tuple[str, str, int, int], ...] = ()

    @property
    def equal(self) -> bool:
        """Return True if the layouts agree."""
        return self.first is None

    def __str__(self) -> str:
        a, b = self.layouts
        if self.first is None:
            return (
                f"{a} and {b} agree: no tensor differs by more than rounding in {self.precision} explains "
                "(largest differences and tolerances below)"
            )
        first = self.first
        where = f" on {name_ranks(self.ranks)}" if self.world_size > 1 else ""
        before = " before the step" if first.phase == recording.START else ""
        label = _LABELS[first.phase].format(first.name)
        size = "" if not math.isfinite(first.size) else f" by {first.size:.2g} (tolerance {first.tolerance:.2g})"
        explained = first.text or (self.relation.text if self.relation is not None else "")
        reason = f": {explained}" if explained else ""
        return f"{a} and {b} differ{before}, first at the {label}{where}{size}{reason}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        del include, exclude
        heads = ("phase", "tensors", "largest difference", "tolerance", "above it")
        rows = [
            (phase, str(count), _number(size), _number(tolerance), str(above) if above else "")
            for phase, count, size, tolerance, above in self.phases
        ]
        bundle = table(heads, rows)
        return {
            "text/plain": f"{self}\n{bundle['text/plain']}",
            "text/html": f"<p>{escape(str(self))}</p>{bundle['text/html']}{self._picture()}",
        }

    def _picture(self) -> str:
        """Return a grid of modules and phases as HTML, with the first difference marked; "" without one."""
        if self.first is None or not self.modules:
            return ""
        counts = {(module, phase): (count, above) for module, phase, count, above in self.modules}
        modules = list(dict.fromkeys(module for module, *_ in self.modules))
        first = (self.first.module, self.first.phase)
        rows = []
        for module in modules[:_MAX_MODULES]:
            cells = []
            for phase, *_ in self.phases:
                count, above = counts.get((module, phase), (0, 0))
                label, colour = (
                    ("", "none") if not count else ("=", "none") if not above else (f"{above}/{count}", ORANGE)
                )
                if (module, phase) == first:
                    label, colour = f"▶ {label or 'first'}", VERMILLION
                cells.append((label, colour))
            rows.append((module or "(root)", cells))
        more = len(modules) - len(rows)
        caption = "tensors above the tolerance, by module and phase; ▶ is where the layouts differ first"
        caption += f"; {more:,} more modules are not shown" if more > 0 else ""
        return colour_grid("module", [phase for phase, *_ in self.phases], rows, caption)

    def __repr__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]


def _number(value: float) -> str:
    return "0" if value == 0 else "shape" if math.isinf(value) else f"{value:.1e}"


# Comparison of records: pure ------------------------------------------------------------------------------------------


def tolerance_of(phase: str, precision: torch.dtype) -> float:
    """Return the relative difference that rounding explains in `phase`, for tensors computed in `precision`."""
    eps = torch.finfo(precision).eps
    full, half = _STEPS[phase]
    return float(eps * (half if eps > 1e-4 else full))


def scales_of(records: Sequence[Mapping[Key, Summary]]) -> dict[tuple[str, str], float]:
    """Return the largest norm of every kind of tensor, see `_kind_of`; of buffers, without those of integers."""
    scales: dict[tuple[str, str], float] = {}
    for summaries in records:
        for (phase, name), summary in summaries.items():
            # Counters of batches and tables of positions are exact, and may be large.
            is_exact = phase == recording.BUFFER and summary.dtype.startswith(("int", "uint", "bool"))
            if math.isfinite(summary.norm) and not is_exact:
                kind = _kind_of(phase, name)
                scales[kind] = max(scales.get(kind, 0.0), summary.norm)
    return scales


def _kind_of(phase: str, name: str) -> tuple[str, str]:
    """Return the phase, and of an optimizer state also its name.

    The squares of gradients in Adam's `exp_avg_sq` are small beside `exp_avg`, and both beside `step`.
    """
    return phase, name.rpartition(": ")[2] if phase == recording.STATE else ""


def compare_summaries(
    reference: Sequence[Mapping[Key, Summary]],
    candidate: Sequence[Mapping[Key, Summary]],
    precision: torch.dtype,
    *,
    forward: bool = True,
) -> tuple[list[tuple[str, int, float, float, int]], list[Difference]]:
    """Return the rows of all phases, and the differences above their tolerance in the order of the step.

    `reference` and `candidate` have the summaries of all ranks. `forward` False: the layouts divide the batch
    differently, so that outputs cannot be compared.
    """
    rows, differences = [], []
    scales = scales_of(reference)
    # The order in which the reference has met the tensors; gradients come in the opposite order.
    keys = dict.fromkeys(key for summaries in (*reference, *candidate) for key in summaries)
    backward = {name: index for index, name in enumerate(reversed([n for p, n in keys if p == recording.GRADIENT]))}
    for phase in recording.PHASES:
        names = [name for p, name in keys if p == phase]
        if phase in (recording.FORWARD, recording.LOSS) and not forward:
            continue
        if phase == recording.GRADIENT and not all(
            any((phase, name) in summaries for summaries in side for name in names) for side in (reference, candidate)
        ):
            continue  # the user's code reduces them, so the optimizer's gradients are the first to compare
        if phase in (recording.GRADIENT, recording.CLIPPED):
            names.sort(key=lambda name: backward.get(name, -1))
        tolerance, worst, above, count = tolerance_of(phase, precision), 0.0, 0, 0
        for name in names:
            hits = []
            for rank, (a_all, b_all) in enumerate(zip(reference, candidate, strict=True)):
                a, b = a_all.get((phase, name)), b_all.get((phase, name))
                found = _compare_one(phase, name, rank, a, b, tolerance, scales.get(_kind_of(phase, name), 0.0))
                if phase == recording.PARAMETER and found is not None and found[1] is None:
                    clipped = a_all.get((recording.CLIPPED, name))
                    least = tolerance * _FLOOR * scales.get((recording.CLIPPED, ""), 0.0)
                    found = found[0], _missing_update(name, rank, a, b, clipped is None or clipped.norm > least)
                if found is None:
                    continue
                count += rank == 0
                size, difference_found = found
                if math.isfinite(size):
                    worst = max(worst, size)
                if difference_found is not None:
                    hits.append(difference_found)
            above += bool(hits)
            differences += hits
        if count:
            rows.append((phase, count, worst, tolerance, above))
    return rows, differences


def count_by_module(
    reference: Sequence[Mapping[Key, Summary]], differences: Sequence[Difference]
) -> tuple[tuple[str, str, int, int], ...]:
    """Return module, phase, and the numbers of tensors compared and above the tolerance, in the order of the step."""
    above = {(difference.phase, difference.name) for difference in differences}
    counts: dict[tuple[str, str], list[int]] = {}
    keys = dict.fromkeys([*(key for summaries in reference for key in summaries), *above])
    for phase, name in sorted(keys, key=lambda key: recording.PHASES.index(key[0])):
        entry = counts.setdefault((module_of(phase, name), phase), [0, 0])
        entry[0] += 1
        entry[1] += (phase, name) in above
    return tuple((module, phase, count, different) for (module, phase), (count, different) in counts.items())


def _compare_one(
    phase: str, name: str, rank: int, a: Summary | None, b: Summary | None, tolerance: float, scale: float
) -> tuple[float, Difference | None] | None:
    if a is None and b is None:
        return None
    if a is None or b is None:
        text = "it is missing there" if b is None else "it is not there in the reference"
        return math.inf, Difference(phase, name, rank, math.inf, tolerance, text)
    if phase == recording.START and a.note != b.note:
        return math.inf, Difference(phase, name, rank, math.inf, tolerance, f"{b.note}, expected {a.note}")
    if phase == recording.START and a.dtype != b.dtype:
        return math.inf, Difference(phase, name, rank, math.inf, tolerance, f"it is {b.dtype}, expected {a.dtype}")
    if a.shape != b.shape:
        # The output of a layer that tensor parallelism divides is a part of the whole one.
        if phase == recording.FORWARD and math.prod(b.shape) != math.prod(a.shape):
            return None
        return math.inf, Difference(phase, name, rank, math.inf, tolerance, f"shape {b.shape}, expected {a.shape}")
    distance = difference(a, b)
    floor = 0.0 if phase == recording.START else _FLOOR * scale
    allowed = tolerance * max(a.norm, floor)
    if phase == recording.PARAMETER:
        allowed += _UPDATE * a.change
    size = distance / a.norm if a.norm else (math.inf if distance else 0.0)
    if distance <= allowed:
        # Relative to what it was compared with, so that a gradient of almost zero does not look large.
        return distance / max(a.norm, floor, 1e-300) if a.norm or floor else 0.0, None
    return size, Difference(phase, name, rank, size, tolerance)


def _missing_update(
    name: str, rank: int, a: Summary | None, b: Summary | None, has_gradient: bool
) -> Difference | None:
    """Return a difference if one layout has changed a parameter and the other one has left it as it was.

    The tolerance of parameters is larger than an update with a small learning rate. `has_gradient` False: the gradient
    of the parameter may be the rounding errors of zero, which Adam turns into whole steps, and be zero in one layout.
    """
    if a is None or b is None or not has_gradient or (a.change == 0.0) == (b.change == 0.0):
        return None
    kind: torch.dtype = getattr(torch, a.dtype)
    rounding = _ROUNDING * torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0
    change = max(a.change, b.change)
    if change <= rounding * a.norm:
        return None
    return Difference(recording.PARAMETER, name, rank, change / a.norm if a.norm else math.inf, rounding)


# Running --------------------------------------------------------------------------------------------------------------


def compare_layouts(
    step: Callable[[nn.Module, Any, Any], object],
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401 - an optimizer or its wrapper
    batch: Any,  # noqa: ANN401 - the user's
    layouts: Sequence[str | Layout],
    also: Mapping[str, nn.Module],
) -> Comparison:
    """Compare one step in two layouts. A collective; see `rankbook.compare`."""
    if len(layouts) != 2:
        raise InvalidArgument(f"expected two layouts, got {len(layouts)}")
    first, second = (parse_layout(layout) for layout in layouts)
    names = (str(first), str(second))
    raw = raw_model(model)
    structure = _different_structure(raw, optimizer)
    if structure is not None:
        return Comparison(names, world_size(), (), structure, (structure.rank,))
    recording.prepare_solo_group()
    with recording.preserved([model, *also.values()], optimizer) as restore:
        random_states = recording.random_states()
        runner = _Runner(step, model, optimizer, batch, also, restore, random_states)
        other = runner.division(second if first.kind == "one rank" else first)
        records = [runner.run(layout, other, None) for layout in (first, second)]
        summaries = [gather_objects(r.summaries) for r in records]
        precision = _lowest(runner.precisions)
        forward = first.kind == "one rank" or second.kind == "one rank" or len(set(runner.divisions)) == 1
        if any(gather_objects(recording.is_compiled(model))):  # compiled code calls no hooks of the modules in it
            common = set.intersection(*(set(own) for every in summaries for own in every))
            summaries = [
                [{k: v for k, v in own.items() if k[0] != recording.FORWARD or k in common} for own in every]
                for every in summaries
            ]
        if (replicated := recording.data_parallel_of(model)) is not None and replicated.broadcast_buffers:
            # They differ between two steps, and those of rank 0 are broadcast by the next forward pass.
            buffers = {(recording.START, name) for name, _ in raw.named_buffers()}
            summaries = [[{k: v for k, v in s.items() if k not in buffers} for s in every] for every in summaries]
        if runner.broadcasts_buffers:
            # Also between two forward passes of the step, so that the statistics of other ranks than 0 go on from its.
            summaries = [
                [{k: v for k, v in s.items() if rank == 0 or k[0] != recording.BUFFER} for rank, s in enumerate(every)]
                for every in summaries
            ]
        if first.kind == "one rank":  # all ranks must be as rank 0: the reference is its model
            summaries[0] = [{**own, **_at_start(summaries[0][0])} for own in summaries[0]]
        rows, differences = compare_summaries(summaries[0], summaries[1], precision, forward=forward)
        name = str(precision).removeprefix("torch.")
        if not differences:
            return Comparison(names, world_size(), tuple(rows), precision=name)
        chosen = differences[0]
        same = tuple(d.rank for d in differences if (d.phase, d.name) == (chosen.phase, chosen.name))
        relation = None
        if not chosen.text:
            relation = runner.explain((first, second), other, chosen, precision)
            if relation is not None:
                chosen = replace(chosen, size=relation.relative)  # that of the first pass is an estimate
        chosen = replace(chosen, text=chosen.text or _explain_start(chosen, relation, raw))
        modules = count_by_module(summaries[0], differences)
        if recording.GRADIENT not in {row[0] for row in rows}:
            # Only the cell's own code has reduced them, so nothing tells clipping from the rest.
            renamed = {recording.CLIPPED: recording.GRADIENT}
            chosen = replace(chosen, phase=renamed.get(chosen.phase, chosen.phase))
            rows = [(renamed.get(row[0], row[0]), *row[1:]) for row in rows]
            modules = tuple((name, renamed.get(phase, phase), count, above) for name, phase, count, above in modules)
        return Comparison(names, world_size(), tuple(rows), chosen, same, relation, name, modules)


def _at_start(summaries: Mapping[Key, Summary]) -> dict[Key, Summary]:
    return {key: summary for key, summary in summaries.items() if key[0] == recording.START}


def _explain_start(found: Difference, relation: Relation | None, raw: nn.Module) -> str:
    """Return what a difference between the ranks before the step means, unless its relation is a simple one."""
    if found.phase != recording.START or (relation is not None and relation.kind != "other"):
        return ""
    if ": " in found.name:
        return "the optimizers of the ranks have come apart"
    if found.name in dict(raw.named_buffers()):
        return "a buffer that is not the same on all ranks, and is not broadcast"
    return "the replicas of the parameter have come apart"


class _Runner:
    """Runs the step in layouts, from the same state, random numbers and batch."""

    def __init__(
        self,
        step: Callable[[nn.Module, Any, Any], object],
        model: nn.Module,
        optimizer: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        also: Mapping[str, nn.Module],
        restore: Callable[[], None],
        random_states: dict[str, Any],
    ) -> None:
        self.step, self.model, self.optimizer, self.also = step, model, optimizer, also
        self.restore, self.random_states = restore, random_states
        self.precisions: list[torch.dtype] = []
        self.divisions: list[int] = []
        self.broadcasts_buffers = False
        self._has_unused: bool | None = None
        current = use_current(model, optimizer)
        self._current = (current.data_parallel_size, current.data_parallel_rank)
        self._own = batch
        self._shares: list[Any] | None = None

    def division(self, layout: Layout) -> tuple[int, int]:
        """Return the number of different batches of a layout, and the index of this rank's."""
        if layout.kind == "current":
            return self._current
        world, rank = world_size(), this_rank()
        width = 1
        if layout.kind == "tp":
            width = world if layout.parallelism is None else layout.parallelism.non_data_parallel_size
        return world // width, rank // width

    def _batch_for(self, division: tuple[int, int]) -> Any:  # noqa: ANN401
        if division == self._current:
            return self._own
        if self._shares is None:
            size, index = self._current
            gathered = gather_objects((index, self._own))
            by_index = dict(reversed(gathered))  # the first rank of every group
            self._shares = [by_index[i] for i in range(size)]
        count, index = division
        whole = self._shares[0] if len(self._shares) == 1 else concatenate(self._shares)
        rows = find_batch_size(whole)
        if rows % count:
            raise InvalidArgument(f"the batch has {rows} rows, which cannot be divided among {count} ranks")
        part = rows // count
        return slice_tensors(whole, slice(index * part, (index + 1) * part))

    def run(self, layout: Layout, other: tuple[int, int], wanted: Key | None) -> Record:
        """Run the step once in `layout`."""
        has_options = recording.data_parallel_of(self.model) is not None
        if layout.kind == "ddp" and world_size() > 1 and self._has_unused is None and not has_options:
            # DDP must be told at its creation whether it has to look for unused parameters. It cannot always do so, for
            # example not with reentrant activation checkpointing.
            self.run(replace(layout, kind="one rank"), self.division(layout), None)
        self.restore()
        reference = layout.kind == "one rank"
        division = other if reference else self.division(layout)
        batch = self._batch_for(division)
        if layout.kind == "current":
            built = use_current(self.model, self.optimizer)
            for parameter in built.inner.parameters():
                parameter.grad = None  # as in the copies; it is put back
        else:
            built = build(layout, self.model, self.optimizer, has_unused=bool(self._has_unused))
        try:
            if wanted is None:
                self.precisions.append(precision_of(built.inner))
                self.divisions.append(division[0])
                replicated = recording.data_parallel_of(built.model)
                self.broadcasts_buffers |= replicated is not None and replicated.broadcast_buffers
            # Ranks that share a batch have to draw the same random numbers.
            states = self.random_states
            if layout.kind != "current" and division[0] < world_size():
                leaders = gather_objects((division[1], states))
                states = dict(reversed(leaders))[division[1]]
            recording.set_random_states(states)
            recorded = record(self.step, built, batch, also=self.also, wanted=wanted, reference=reference)
        finally:
            built.release()
        if reference:
            self._has_unused = any(gather_objects(recorded.has_unused))
        return recorded

    def explain(
        self, layouts: tuple[Layout, Layout], other: tuple[int, int], found: Difference, precision: torch.dtype
    ) -> Relation | None:
        """Run both layouts again, keep the tensor that differs, and classify the difference."""
        key = (found.phase, found.name)
        a, b = (self.run(layout, other, key) for layout in layouts)
        parts = gather_objects(a.parts.get(key))
        # Before the step, every rank is compared with rank 0 if the reference is one rank.
        is_start_of_rank_0 = found.phase == recording.START and layouts[0].kind == "one rank"
        references = gather_objects(a.tensors.get(key) if is_start_of_rank_0 else None)
        relation = None
        if this_rank() == found.rank:
            reference = references[0] if is_start_of_rank_0 else a.tensors.get(key)
            candidate = b.tensors.get(key)
            if reference is not None and candidate is not None:
                relation = classify(
                    reference,
                    candidate,
                    tolerance=max(tolerance_of(found.phase, precision), 1e-7),
                    world_size=world_size(),
                    parts=[part for part in parts if part is not None],
                    start=b.tensors.get((recording.START, found.name)) if found.phase in recording.AFTER else None,
                    reference_dtype=a.dtypes[key],
                    candidate_dtype=b.dtypes[key],
                )
        return next((r for r in gather_objects(relation) if r is not None), None)


def _lowest(precisions: Sequence[torch.dtype]) -> torch.dtype:
    # The finer one of two: layouts of different precision differ, and this is to be seen.
    return min(precisions, key=lambda dtype: torch.finfo(dtype).eps)


def _different_structure(raw: nn.Module, optimizer: Any) -> Difference | None:  # noqa: ANN401
    """Return the first parameter or buffer that is not the same kind of tensor on all ranks, compared with rank 0."""
    del optimizer
    seen: dict[int, str] = {}
    own: dict[str, str] = {}
    for name, tensor in (*raw.named_parameters(remove_duplicate=False), *raw.named_buffers()):
        tied = seen.setdefault(id(tensor), name)
        shared = f", shared with {tied}" if tied != name else ""
        own[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{shared}"
    described = gather_objects(own)
    for rank, others in enumerate(described):
        for name in dict.fromkeys((*described[0], *others)):
            a, b = described[0].get(name, "missing"), others.get(name, "missing")
            if a != b:
                return Difference(recording.START, name, rank, math.inf, 0.0, f"{b}, but {a} on rank 0")
    return None


def step_with_loss(loss: Callable[..., Any] | None) -> Callable[[Any, Any, Any], None]:
    """Return a step that computes `loss`, its gradients, and the optimizer's update. See `compare`."""

    def step(model: torch.nn.Module, optimizer: Any, batch: Any) -> None:  # noqa: ANN401 - an optimizer or its wrapper
        value = _loss_of(model, batch, loss)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InvalidArgument(f"expected a loss of one element with a gradient, got {_describe(value)}")
        scaler = optimizer.scaler if isinstance(optimizer, AcceleratedOptimizer) else None
        (value if scaler is None else scaler.scale(value)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _loss_of(model: torch.nn.Module, batch: Any, loss: Callable[..., Any] | None) -> Any:  # noqa: ANN401
    rest: tuple[Any, ...] = ()
    if isinstance(batch, Mapping):
        output, rest = model(**batch), (batch,)
    elif isinstance(batch, (tuple, list)):
        inputs = list(batch)
        if loss is not None:
            rest = (inputs.pop(),)
        output = model(*inputs)
    else:
        output = model(batch)
    if loss is not None:
        return loss(output, *rest)
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without one")


def first_batch(loader: Iterable[Any]) -> Any:  # noqa: ANN401 - a batch
    """Return the first batch of a loader's next pass. Its position and the random states stay. A collective.

    Raises `InvalidArgument` for a loader without a batch, and inside of a loop over a prepared loader.
    """
    states = recording.random_states()
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    kept = [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]
    try:
        if isinstance(loader, PreparedLoader):
            return loader.peek()
        for batch in loader:
            return batch
    finally:
        recording.set_random_states(states)
        for generator, state in kept:
            generator.set_state(state)
    raise InvalidArgument("the loader has no batch on this rank")
