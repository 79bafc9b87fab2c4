"""Layouts that a step is compared in, and conditions of the number watch: what the user asks for.

Imports no torch: `Layout` is a public name, and the notebook and the ranks parse conditions with the same code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankbook.errors import InvalidArgument

if TYPE_CHECKING:
    from rankbook.runtime.config import FullyShardedDataParallelPlugin, ParallelismConfig

PRECISIONS = ("no", "bf16", "fp16")
KINDS = ("one rank", "current", "ddp", "fsdp2", "tp")


@dataclass(frozen=True)
class Layout:
    """Layout of a model over the ranks in a comparison.

    Args:
        kind: `"one rank"`, `"current"` (the model as it is), `"ddp"`, `"fsdp2"`, or `"tp"`.
        precision: `"no"`, `"bf16"` or `"fp16"`; None is that of the model.
        parallelism: sizes of the mesh and the tensor-parallel plan, as for `Accelerator`. With `kind="tp"` the default
            is one group of all ranks with the plan that the model names.
        fsdp: options of `fully_shard`.

    Example::

        Layout("fsdp2", precision="bf16", parallelism=ParallelismConfig(dp_shard_size=2))
    """

    kind: str
    precision: str | None = None
    parallelism: ParallelismConfig | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None

    def __str__(self) -> str:
        return self.kind + (f" {self.precision}" if self.precision not in (None, "no") else "")


def parse_layout(value: str | Layout) -> Layout:
    """Return the layout of a name such as "fsdp2" or "ddp bf16". Raises `InvalidArgument`."""
    if isinstance(value, Layout):
        layout = value
    else:
        kind, _, precision = value.strip().rpartition(" ")
        if precision not in PRECISIONS:
            kind, precision = value.strip(), ""
        layout = Layout(kind.lower(), precision or None)
    if layout.kind not in KINDS:
        raise InvalidArgument(f"unknown layout {layout.kind!r}: expected one of {', '.join(KINDS)}")
    if layout.precision is not None and layout.precision not in PRECISIONS:
        raise InvalidArgument(f"unknown precision {layout.precision!r}: expected one of {', '.join(PRECISIONS)}")
    if layout.kind == "current" and layout.precision is not None:
        raise InvalidArgument("the layout 'current' has the precision of the model: give none")
    return layout


_NORM = re.compile(r"norm\s*>\s*(\S+)")
_USAGE = 'expected nan, inf, "norm > X" or off'


@dataclass(frozen=True)
class Conditions:
    """Conditions that end a step: NaN, infinities in the output of a module, or a gradient norm above `norm`."""

    nan: bool = False
    inf: bool = False
    norm: float | None = None

    def __bool__(self) -> bool:
        return self.nan or self.inf or self.norm is not None

    def __str__(self) -> str:
        parts = ["nan"] * self.nan + ["inf"] * self.inf
        if self.norm is not None:
            parts.append(f"norm > {str(self.norm).removesuffix('.0')}")  # all digits: a new rank gets its watch as text
        return ", ".join(parts) or "off"


def parse_conditions(*conditions: str) -> Conditions:
    """Return the conditions in `conditions`, such as `"nan", "norm > 100"`; "off" means none.

    Raises `InvalidArgument` for anything else, and for "off" together with a condition.
    """
    # `%distributed watch norm > 100` arrives as three words.
    text = re.sub(r"\s*>\s*", ">", " ".join(conditions).replace(",", " "))
    nan = inf = off = False
    norm: float | None = None
    for word in text.split():
        if word == "nan":
            nan = True
        elif word == "inf":
            inf = True
        elif word == "off":
            off = True
        elif (match := _NORM.fullmatch(word)) is not None:
            norm = _positive(match[1])
        else:
            raise InvalidArgument(f"unknown condition {word!r}: {_USAGE}")
    if off and (nan or inf or norm is not None):
        raise InvalidArgument(f"'off' switches the watch off and takes no condition: {_USAGE}")
    if not (off or nan or inf or norm is not None):
        raise InvalidArgument(f"no condition is given: {_USAGE}")
    return Conditions(nan, inf, norm)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidArgument(f"invalid norm {text!r}: expected a positive number, as in 'norm > 100'")
    return value
