"""Messages and results of checks of numbers: hashes of tensors, differences between ranks, norms of gradients.

`HashState`, `MeasureDifferences` and `MeasureGradients` are tasks of a rank's main thread. Their results travel as the
values of the tasks.
"""

from __future__ import annotations

import msgspec

from rankbook.protocol.base import Message


class HashState(Message, frozen=True):
    """Answer with `StateHashes` of the variables `names`; without names, of all that the ranks' layout keeps equal."""

    cell: int
    names: tuple[str, ...] = ()


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of a tensor that differ between the rank `source` and `ranks`. `nbytes` are the tensor's on `source`."""

    key: str
    source: int
    ranks: tuple[int, ...]
    blocks: tuple[int, ...]
    nbytes: int


class MeasureDifferences(Message, frozen=True):
    """Answer with a list of `PieceDifference`, one per piece that this rank compares. A collective of all ranks.

    `names` are those of the `HashState` whose result named the pieces.
    """

    cell: int
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]


class MeasureGradients(Message, frozen=True):
    """Answer with the `LocalGradients` of the model `name`. A collective if gradients are still to be reduced."""

    cell: int
    name: str


class StateEntry(msgspec.Struct, frozen=True):
    """A tensor, or a small value, on one rank.

    `key` names it on all ranks: "model.fc.weight". `place` is the coordinate of a shard, empty for whole tensors; only
    entries of one place are compared. `ranks` are those that hold replicas, () for all. `digest` has 8 bytes per block;
    `value` is the value in words, in place of a digest. `first` is the key of the first name of the same tensor, which
    differs from `key` for tied weights. `due` says when the layout makes the replicas equal again, if it does.
    """

    key: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    place: str = ""
    ranks: tuple[int, ...] = ()
    digest: bytes = b""
    value: str = ""
    nbytes: int = 0
    trainable: bool | None = None
    first: str = ""
    due: str = ""


class StateHashes(msgspec.Struct, frozen=True):
    """Entries of one rank. `steps` is the number of optimizer steps taken, None if unknown.

    `missing` are requested names that are not defined here or cannot be compared, with the reasons. `skipped` are
    objects that are not meant to be equal, with the reasons. `unreadable` are tensors whose values cannot be read.
    """

    entries: tuple[StateEntry, ...]
    steps: int | None = None
    missing: dict[str, str] = {}
    skipped: dict[str, str] = {}
    unreadable: dict[str, str] = {}


class PieceDifference(msgspec.Struct, frozen=True):
    """Difference of one piece on one rank to its source.

    `largest` is the largest absolute difference, `differing` of `compared` elements differ. `nonfinite` of the
    differing elements are NaN or infinite on one of the two ranks only.
    """

    key: str
    rank: int
    largest: float
    differing: int
    compared: int
    nonfinite: int = 0


class GradientEntry(msgspec.Struct, frozen=True):
    """Gradient of one parameter on one rank. `norm` is the 2-norm of the local shard, None without a gradient."""

    key: str
    place: str
    norm: float | None
    parameter_norm: float
    elements: int
    nonfinite: int = 0


class LocalGradients(msgspec.Struct, frozen=True):
    """Gradients of a model on one rank.

    `reduced` is False while the ranks accumulate gradients on their own. `scale` is the fp16 loss scale that the
    gradients still have and the norms have not.
    """

    entries: tuple[GradientEntry, ...]
    reduced: bool = True
    scale: float = 1.0
