"""From what all ranks gathered to the dataset's own samples.

Owns: which rows are repetitions. Refuses: collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from rankbook.errors import BadRequest
from rankbook.runtime.comm.tree import children, is_container, leaves, rebuild
from rankbook.runtime.data.samplers import WHOLE, Share


def trim(gathered: Any, share: Share | None) -> Any:  # noqa: ANN401 - of the type of `gathered`
    """`gathered` without the rows that only fill up the round.

    `gathered` holds tensors of `len(share.real) * rows` rows, those of rank 0 first, each rank's padded to the same
    number of rows; or it is a list of as many objects. `share` is the loader's (`loader.share`) of the batch that the
    rows were computed from; None: all are real. Raises `BadRequest` if the rows cannot be divided among the ranks.
    """
    if share is None:
        return gathered
    if isinstance(gathered, list) and not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(gathered)):
        return [gathered[row] for row in _rows(len(gathered), share)]
    if isinstance(gathered, torch.Tensor):
        wanted = _rows(gathered.shape[0], share)
        if wanted == list(range(len(wanted))):
            return gathered[: len(wanted)]
        return gathered[torch.tensor(wanted, dtype=torch.long, device=gathered.device)]
    if is_container(gathered):
        return rebuild(gathered, {key: trim(each, share) for key, each in children(gathered)})
    return gathered


def _rows(total: int, share: Share) -> list[int]:
    rows, rest = divmod(total, len(share.real))
    if rest:
        raise BadRequest(f"{total} gathered rows are not the same number for each of {len(share.real)} ranks")
    counts = [rows if count == WHOLE else min(count, rows) for count in share.real]
    return [rank * rows + row for rank, count in enumerate(counts) for row in range(count)]
