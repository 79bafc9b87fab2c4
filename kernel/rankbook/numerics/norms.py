"""Norms of gradients over all ranks, by parameter and by module. Pure: the ranks' norms go in, a table comes out.

The square of a norm is a sum over elements. So the squares of the shards' norms add up, whatever the mesh, and a
replica of a shard that was counted already is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rankbook.errors import InvalidArgument
from rankbook.formatting import format_3g, format_count, plural, suggest
from rankbook.protocol.queries import GradientEntry, LocalGradients
from rankbook.ranks import name_ranks
from rankbook.widgets.rendering import TableResult

_TOLERANCE = 1e-4
"""Relative difference of the norms of two replicas from which on they count as different."""


@dataclass(frozen=True)
class ParameterGradient:
    """Gradient of one parameter over all ranks.

    `norm` is the 2-norm over all shards, None without a gradient. `weight_norm` is that of the parameter, `elements`
    its number of elements, `nonfinite` the number of NaNs and infinities in the gradient. `note` says where replicas
    differ.
    """

    norm: float | None
    weight_norm: float
    elements: int
    nonfinite: int = 0
    note: str = ""


class GradientTable(TableResult):
    """Norms of a model's gradients, which show themselves as a table by module.

    `parameters` maps the names of the parameters to `ParameterGradient`s. `norm` is the 2-norm of all gradients, and
    `table["blocks.0"]` that of a module or a parameter. `reduced` is False if the ranks have not reduced the gradients
    yet.
    """

    HEADINGS = ("module", "gradient", "of all", "weights", "gradient / weights", "elements", "note")

    def __init__(
        self, parameters: Mapping[str, ParameterGradient], *, reduced: bool = True, scale: float = 1.0
    ) -> None:
        self.parameters = dict(parameters)
        self.reduced = reduced
        self.scale = scale

    @property
    def norm(self) -> float:
        """Return the 2-norm of all gradients; 0 if there are none."""
        return _norm(self.parameters.values())

    def __getitem__(self, name: str) -> float:
        """Return the 2-norm of the gradients of a module, or of a parameter. Raises `InvalidArgument`."""
        chosen = {
            key: gradient for key, gradient in self.parameters.items() if key == name or key.startswith(f"{name}.")
        }
        if not chosen:
            names = {*self.parameters, *map(_module_of, self.parameters)}
            raise InvalidArgument(f"the model has no module or parameter {name!r}{suggest(name, names)}")
        return _norm(chosen.values())

    def modules(self) -> dict[str, float]:
        """Return the norm of every module that has parameters of its own, in the order of the model."""
        return {name: _norm(parameters.values()) for name, parameters in self._by_module().items()}

    def _by_module(self) -> dict[str, dict[str, ParameterGradient]]:
        modules: dict[str, dict[str, ParameterGradient]] = {}
        for name, gradient in self.parameters.items():
            modules.setdefault(_module_of(name), {})[name] = gradient
        return modules

    def summary(self) -> str:
        """Return the norm of all gradients in a sentence, and what to know about it."""
        without = sum(gradient.norm is None for gradient in self.parameters.values())
        lines = [f"gradient norm {self.norm:.6g} over {plural(len(self.parameters), 'parameter')}"]
        if without == len(self.parameters):
            lines = ["no parameter has a gradient"]
        elif without:
            lines[0] += f", {without} without a gradient"
        if not self.reduced:
            lines.append("the ranks accumulate gradients that are not reduced yet: these are the norms of single ranks")
        if self.scale != 1.0:
            lines.append(f"the gradients still have the loss scale {self.scale:g}, the norms do not")
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, one per module."""
        total = self.norm
        rows: list[tuple[str, ...]] = []
        for name, parameters in self._by_module().items():
            gradients = list(parameters.values())
            norm = _norm(gradients)
            weights = math.sqrt(sum(gradient.weight_norm**2 for gradient in gradients))
            missing = sum(gradient.norm is None for gradient in gradients)
            nonfinite = sum(gradient.nonfinite for gradient in gradients)
            notes = [
                *([f"{plural(missing, 'parameter')} without a gradient"] if missing else []),
                *([f"{nonfinite:,} NaN or infinite"] if nonfinite else []),
                *dict.fromkeys(gradient.note for gradient in gradients if gradient.note),
            ]
            share = f"{format_3g(100 * norm**2 / total**2)} %" if total and math.isfinite(norm / total) else ""
            rows.append(
                (
                    *(name or "(root)", f"{norm:.4g}", share, f"{weights:.4g}"),
                    f"{norm / weights:.2e}" if weights else "",
                    format_count(sum(gradient.elements for gradient in gradients)),
                    "; ".join(notes),
                )
            )
        return rows

    def __repr__(self) -> str:
        return f"<GradientTable: {self.summary().splitlines()[0]}>"


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _norm(gradients: object) -> float:
    squares = [gradient.norm**2 for gradient in gradients if gradient.norm is not None]  # type: ignore[attr-defined]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def merge_gradients(replies: Mapping[int, LocalGradients]) -> GradientTable:
    """Return the table of all ranks, with every shard counted once."""
    entries: dict[str, dict[str, dict[int, GradientEntry]]] = {}
    for rank, reply in replies.items():
        for entry in reply.entries:
            entries.setdefault(entry.key, {}).setdefault(entry.place, {})[rank] = entry
    return GradientTable(
        {key: _merge_places(places) for key, places in entries.items()},
        reduced=all(reply.reduced for reply in replies.values()),
        scale=max((reply.scale for reply in replies.values()), default=1.0),
    )


def _merge_places(places: Mapping[str, Mapping[int, GradientEntry]]) -> ParameterGradient:
    squares: list[float] = []
    weights, elements, nonfinite, notes, missing = 0.0, 0, 0, list[str](), False
    for replicas in places.values():
        norms = {rank: entry.norm for rank, entry in replicas.items()}
        first = next(iter(replicas.values()))
        known = [norm for norm in norms.values() if norm is not None]
        if known and len(known) < len(norms):
            without = [rank for rank, norm in norms.items() if norm is None]
            notes.append(f"no gradient on {name_ranks(without)}")
        elif known and max(known) - min(known) > _TOLERANCE * max(known):
            values = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in list(norms.items())[:4])
            notes.append(f"differs between replicas: {values}")
        missing |= not known
        squares += [known[0] ** 2] if known else []
        weights += first.parameter_norm**2
        elements += first.elements
        nonfinite += max(entry.nonfinite for entry in replicas.values())
    norm = None
    if squares:
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        if missing:
            notes.append("some shards have no gradient")
    return ParameterGradient(norm, math.sqrt(weights), elements, nonfinite, "; ".join(notes))
