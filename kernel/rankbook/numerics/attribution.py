"""Attribution of a non-finite value: on which rank, in which module and phase it was born. Pure code.

Every rank reports what it has seen in the step (`RankReport`): its first non-finite value, the collectives that it has
launched and whether its own data was finite in them. `attribute` compares the reports of all ranks. A value spreads
only through collectives. So a rank *received* it if another rank brought a non-finite value into a collective that this
rank had launched before its own first one; otherwise the value was *born* on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankbook.ranks import name_ranks

FORWARD, BACKWARD, DATA, LOSS, OPTIMIZER = "forward", "backward", "data", "loss", "optimizer"
PARAMETER, COLLECTIVE, GRADIENT, NORM = "parameter", "collective", "gradient", "norm"
"""Phases of a step. "gradient" is between the backward pass and the optimizer's step."""


@dataclass(frozen=True)
class Event:
    """First non-finite value of a rank in a step.

    `kind` is "NaN" or "inf". `module` is the path of the module in its model, and `detail` names what else is known
    (`parameter head.weight`). `line` is the line of the cell, empty if unknown. `positions` has the number of
    collectives that the rank had launched before, by group.
    """

    phase: str
    module: str
    kind: str = "NaN"
    line: str = ""
    detail: str = ""
    positions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """A collective of the step on one rank. `label` is its description; the flags are about this rank's tensors.

    `output_finite` is None if the result is not known any more.
    """

    group: str
    number: int
    label: str
    dtype: str = ""
    input_finite: bool = True
    output_finite: bool | None = None


@dataclass(frozen=True)
class RankReport:
    """Non-finite values that one rank has seen in the step that is being checked.

    `gradients` are the names of parameters whose gradients are not finite, in the order of the model, and `dtype` is
    the data type of the first one. `norm` is the total gradient norm, if it is not within the limit. `has_inputs`: this
    rank has kept the inputs of the module. `statistics` are the names of running statistics that are not finite.
    """

    rank: int
    step: int
    event: Event | None = None
    launches: tuple[Launch, ...] = ()
    gradients: tuple[str, ...] = ()
    dtype: str = ""
    kind: str = "NaN"
    norm: float | None = None
    limit: float | None = None
    norm_module: str = ""
    line: str = ""
    has_inputs: bool = False
    statistics: tuple[str, ...] = ()


@dataclass(frozen=True)
class NonFiniteOrigin:
    """Origin and spread of a non-finite value. `ranks` are the ranks that computed it first."""

    kind: str
    phase: str
    module: str
    step: int
    ranks: tuple[int, ...]
    world_size: int = 1
    line: str = ""
    detail: str = ""
    received: tuple[int, ...] = ()
    through: str = ""
    norm: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        line = f", {self.line}" if self.line else ""
        of_ranks = f" on {name_ranks(self.ranks)}" if self.ranks and self.world_size > 1 else ""
        at = f", at step {self.step}{line}"
        if self.phase == NORM:
            largest = f"; `{self.module}` has the largest gradient" if self.module else ""
            assert self.norm is not None and self.limit is not None
            if math.isnan(self.norm):
                return f"the gradient norm is not a number (limit {self.limit:.6g}){at}{largest}"
            return f"the gradient norm {self.norm:.6g} is above the limit of {self.limit:.6g}{at}{largest}"
        detail = f" ({self.detail})" if self.detail else ""
        text = f"{self.kind} born{of_ranks}, {_place(self.phase, self.module)}{detail}{at}"
        if self.received:
            through = f" in {self.through}" if self.through else ""
            text += f"; {name_ranks(self.received)} received it{through}"
        return text


def _place(phase: str, module: str) -> str:
    name = f"`{module}`"
    match phase:
        case "data":
            return f"in the data: the input of {name}"
        case "loss":
            return "in the loss"
        case "optimizer":
            return f"in the optimizer's step, in {name}"
        case "parameter":
            return f"in a parameter of {name}, before the step"
        case "collective":
            return f"in a collective, in the gradient of {name}"
        case "gradient":
            return f"in the gradient of {name}, between the backward pass and the optimizer's step"
    return f"in {name} {phase}"


def attribute(reports: Sequence[RankReport]) -> NonFiniteOrigin:
    """Return where the value was born, from the reports of all ranks of the step, in rank order."""
    step = max(report.step for report in reports)
    spread = _spread(reports)
    born = [report for report in reports if report.event is not None and not _received(report, spread)]
    if born:
        # Several ranks may be at fault in different ways; the earliest in the order of phases is the first.
        first = min(born, key=lambda report: _PHASES.index(report.event.phase))  # type: ignore[union-attr]
        event = first.event
        assert event is not None
        alike = tuple(
            report.rank
            for report in born
            if report.event is not None and (report.event.phase, report.event.module) == (event.phase, event.module)
        )
        origin = NonFiniteOrigin(
            event.kind, event.phase, event.module, step, alike, line=event.line, detail=event.detail
        )
        return _add_receivers(origin, reports, spread)
    affected = [report for report in reports if report.gradients]
    # If only the norm is at fault, what a collective has carried is no part of the step, such as a best loss of inf.
    if spread and (affected or any(report.event is not None for report in reports)):
        return _from_collective_input(reports, spread, step)
    if affected:
        return _from_gradients(reports, affected, step)
    above = next(report for report in reports if report.norm is not None)
    return NonFiniteOrigin(
        "norm", NORM, above.norm_module, step, (), len(reports), line=above.line, norm=above.norm, limit=above.limit
    )


_PHASES = (DATA, PARAMETER, FORWARD, LOSS, BACKWARD, COLLECTIVE, GRADIENT, OPTIMIZER, NORM)


def _spread(reports: Sequence[RankReport]) -> dict[tuple[str, int], list[int]]:
    """Return the ranks that brought a non-finite value into a collective, by group and number, earliest first.

    Collectives whose result is finite on all members are left out: the smallest of several numbers, for example.
    """
    senders: dict[tuple[str, int], list[int]] = {}
    harmful: set[tuple[str, int]] = set()
    for report in reports:
        for launch in report.launches:
            key = (launch.group, launch.number)
            if not launch.input_finite:
                senders.setdefault(key, []).append(report.rank)
            if not launch.output_finite:
                harmful.add(key)
    return {key: ranks for key, ranks in sorted(senders.items()) if key in harmful}


def _received(report: RankReport, spread: Mapping[tuple[str, int], Sequence[int]]) -> bool:
    assert report.event is not None
    launched = {(launch.group, launch.number) for launch in report.launches}
    for key, senders in spread.items():
        before = key[1] <= report.event.positions.get(key[0], 0)
        if before and key in launched and report.rank not in senders:
            return True
    return False


def _add_receivers(
    origin: NonFiniteOrigin, reports: Sequence[RankReport], spread: Mapping[tuple[str, int], Sequence[int]]
) -> NonFiniteOrigin:
    """Add the ranks that got the value, and the first collective in which they did."""
    affected = {report.rank for report in reports if report.event is not None or report.gradients}
    for key, senders in spread.items():
        members = [report for report in reports if any((e.group, e.number) == key for e in report.launches)]
        received = [report.rank for report in members if report.rank not in (*origin.ranks, *senders)]
        if received and set(senders) & set(origin.ranks):
            label = next(e.label for report in members for e in report.launches if (e.group, e.number) == key)
            return replace(origin, received=tuple(received), through=label, world_size=len(reports))
    others = tuple(sorted(affected - set(origin.ranks)))
    return replace(origin, received=others, world_size=len(reports))


def _from_collective_input(
    reports: Sequence[RankReport], spread: Mapping[tuple[str, int], Sequence[int]], step: int
) -> NonFiniteOrigin:
    """Attribute a value that no module's output or input gradient has shown: the first sign is a collective's input.

    It is the gradient of a weight, which no other module uses; or the collective's input is a compressed copy.
    """
    key, senders = next(iter(spread.items()))
    sender = next(report for report in reports if report.rank == senders[0])
    launch = next(e for e in sender.launches if (e.group, e.number) == key)
    # The backward pass computes the gradients of later parameters first. A rank with other shards may have them.
    gradients = sender.gradients or next((report.gradients for report in reports if report.gradients), ())
    name = gradients[-1] if gradients else ""
    compressed = bool(sender.dtype and launch.dtype and launch.dtype != sender.dtype)
    phase = COLLECTIVE if compressed else BACKWARD
    detail = f"gradient of {name}" if name else launch.label
    if compressed:
        detail = f"{launch.label} carries {launch.dtype}, the gradients are {sender.dtype}"
    module = name.rpartition(".")[0] or name
    origin = NonFiniteOrigin(sender.kind, phase, module, step, tuple(senders), line=sender.line, detail=detail)
    return _add_receivers(origin, reports, spread)


def _from_gradients(reports: Sequence[RankReport], affected: Sequence[RankReport], step: int) -> NonFiniteOrigin:
    """Attribute non-finite gradients that no collective's input has shown."""
    first = affected[0]
    name = first.gradients[-1]
    module = name.rpartition(".")[0] or name
    ranks = tuple(report.rank for report in affected)
    produced = [launch for report in reports for launch in report.launches if launch.output_finite is False]
    if produced:
        earliest = min(produced, key=lambda launch: (launch.number, launch.group))
        detail = f"{earliest.label}: its inputs are finite on all ranks, and its result is not"
        return NonFiniteOrigin(first.kind, COLLECTIVE, module, step, ranks, len(reports), first.line, detail)
    reduced = any(report.launches for report in reports)
    phase = GRADIENT if reduced else BACKWARD
    return NonFiniteOrigin(first.kind, phase, module, step, ranks, len(reports), first.line, f"gradient of {name}")
