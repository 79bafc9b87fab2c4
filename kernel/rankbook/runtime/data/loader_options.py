"""What one may ask of prepared loaders.

Owns: `DataLoaderConfiguration`. Refuses: torch, and a combination that cannot be kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rankbook.errors import BadRequest


@dataclass
class DataLoaderConfiguration:
    """How `Accelerator.prepare` treats loaders.

    `split_batches`: a loader's batch is that of all ranks together, and is cut.
    `dispatch_batches`: rank 0 reads and sends; False: every rank reads its own part; None: as True for iterable
    datasets whose batches go to a device, as False for all others.
    `even_batches`: the last round is filled up, so that every rank has as many batches.
    `use_seedable_sampler`: a shuffle is drawn by a `SeedableRandomSampler`, which can be looked at; prepared loaders
    draw theirs from (seed, epoch) in any case.
    `data_seed`: the loaders' own seed, instead of that of `set_seed`.
    `non_blocking`: copies to the device do not wait, which needs pinned memory.
    `use_stateful_dataloader`: batches come from torchdata's StatefulDataLoader. A dataset with a `state_dict` and a
    `load_state_dict` is resumed with its own state, in each worker: a map-style one on as many ranks with as many
    workers; an iterable one, or its iterators, on any, within a pass, and no sample before is read again but a round's.
    What such a state leaves out is lost, a shuffle buffer for instance; without the option a stream is read again up to
    there, which takes longer and loses nothing. One that rank 0 reads for all is not resumed so. Raises `BadRequest`
    where torchdata is not installed.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            require_stateful_dataloader()

    def to_dict(self) -> dict[str, Any]:
        """The options by name."""
        return asdict(self)


def require_stateful_dataloader() -> type[Any]:
    """Torchdata's StatefulDataLoader. Raises `BadRequest` where torchdata is not installed."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise BadRequest(
            "use_stateful_dataloader needs torchdata's StatefulDataLoader, and torchdata is not installed: "
            "pip install torchdata, or leave the option out; prepared loaders resume exactly without it"
        ) from error
    found: type[Any] = StatefulDataLoader
    return found
