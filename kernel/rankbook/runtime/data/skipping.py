"""A loader without its first batches.

Owns: `skip_first_batches`. Refuses: to read data that is skipped, where the dataset can be indexed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from rankbook.errors import BadRequest
from rankbook.runtime.data.loader_base import PreparedLoader
from rankbook.runtime.data.samplers import SkipBatchSampler


class SkipDataLoader(DataLoader[Any]):
    """A plain loader whose first `skip_batches` batches are read and left out: its dataset cannot be indexed."""

    _source: Any
    skip_batches: int

    def __init__(self, dataloader: Any, skip_batches: int = 0) -> None:  # noqa: ANN401 - a DataLoader
        self.__dict__.update(dataloader.__dict__)
        self.__dict__.update(_source=dataloader, skip_batches=skip_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(self._source, self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._source) - self.skip_batches)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:  # noqa: ANN401 - a loader of the same kind
    """A loader whose every pass begins after `num_batches` of this rank's batches. The given one is not changed.

    With a prepared loader the two share their position: a pass over either is the next epoch. The samples that are
    skipped are not read, except from iterable datasets. Raises `BadRequest` for a negative number.
    """
    if num_batches < 0:
        raise BadRequest(f"cannot skip {num_batches} batches; give 0 or more")
    if isinstance(dataloader, PreparedLoader):
        made = copy.copy(dataloader)
        made.skip_batches = dataloader.skip_batches + num_batches
        return made
    if getattr(dataloader, "batch_sampler", None) is None or _is_iterable(dataloader):
        return SkipDataLoader(dataloader, num_batches)
    skipping = copy.copy(dataloader)
    skipping.__dict__.update(batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches), _iterator=None)
    return skipping


def _is_iterable(dataloader: Any) -> bool:  # noqa: ANN401
    from torch.utils.data import IterableDataset

    return isinstance(dataloader.dataset, IterableDataset)
