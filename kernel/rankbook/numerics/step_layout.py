"""Layouts that a training step can be compared in, and their names. Imports no torch: `Layout` is a public name."""

from __future__ import annotations

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
