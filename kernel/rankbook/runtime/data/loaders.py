"""Data loaders that every rank reads by itself, and `prepare_data_loader`.

`prepare_data_loader` makes a prepared loader of any DataLoader. It never changes the user's loader, its sampler or
their lists, and never calls the constructor of a subclass again, since that may take other arguments. It makes a
shallow copy of the loader and gives the copy another batch sampler and another dataset; so the class, its `__iter__`
and its attributes are kept.

`skip_first_batches` returns a loader without its first batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, _DatasetKind

from rankbook.errors import BadRequest
from rankbook.runtime.config import require_stateful_dataloader
from rankbook.runtime.data.batch_reader import IterableReader, MapReader, WorkerInit, identity
from rankbook.runtime.data.batch_requests import (
    IterableBatchSampler,
    MapBatchSampler,
    Shuffle,
    SingleItemSampler,
    UnbatchedSampler,
)
from rankbook.runtime.data.dispatcher import DataLoaderDispatcher
from rankbook.runtime.data.loader_base import LoaderParts, PreparedLoader, is_default_group, iterate_local
from rankbook.runtime.data.samplers import BatchSamplerShard, IterableDatasetShard, RoundPadding, SkipBatchSampler
from rankbook.runtime.data.stateful import StatefulIterable, StatefulReader, is_stateful
from rankbook.runtime.process_state import PartialState


class DataLoaderShard(PreparedLoader):
    """A rank's own part of a loader; batches are on the device when they are yielded.

    `prepare_data_loader` makes one of any loader. The constructor takes the arguments of torch's DataLoader, whose
    samplers must yield this rank's batches already, and the `device` to move them to.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - as torch's
        device: torch.device | None = None,
        rng_types: list[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _non_blocking: bool = False,
        **kwargs: Any,  # noqa: ANN401 - torch's
    ) -> None:
        kind = require_stateful_dataloader() if use_stateful_dataloader else DataLoader
        state = PartialState()
        numbered = (state.num_processes, state.process_index) if state.use_distributed else None
        parts = build_loader_parts(kind(dataset, **kwargs), 1, 0, numbered=numbered)
        parts.device, parts.non_blocking, parts.rng_types = device, _non_blocking, list(rng_types or ())
        parts.generator = synchronized_generator or parts.generator
        parts.agree = is_default_group(state.num_processes)
        parts.deal = tuple(range(state.num_processes)) if numbered else None
        self._setup(parts, skip_batches=skip_batches)

    @classmethod
    def of(cls, parts: LoaderParts) -> DataLoaderShard:
        """Return a loader made of `parts`."""
        made = cls.__new__(cls)
        made._setup(parts)
        return made

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """The `BatchSamplerShard`, None for an iterable dataset."""
        shard = self.parts.tickets.shard
        return shard if isinstance(shard, BatchSamplerShard) else None

    def _arrivals(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        return iterate_local(self.parts)


def prepare_data_loader(
    dataloader: Any,  # noqa: ANN401 - a DataLoader, or a subclass of it
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,  # noqa: ANN401 - a DeviceMesh
) -> Any:  # noqa: ANN401 - a DataLoaderShard or a DataLoaderDispatcher
    """Return a loader of the part of `dataloader` for rank `process_index` of `num_processes` (default: this process).

    The options are those of `DataLoaderConfiguration`. `put_on_device` moves batches to `device` (default: this
    process's). `rng_types` are further generators that get rank 0's state at the start of a pass. `torch_device_mesh`:
    ranks that differ only along the axes "tp" and "cp" get the same batches. A prepared loader is returned unchanged.
    The user's loader is not modified.

    Raises `BadRequest` (a ValueError) if the argument is not a DataLoader, for a batch that cannot be split evenly, an
    unknown rng type, a `slice_fn_for_dispatch` without dispatched batches, and missing torchdata.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise BadRequest(f"prepare_data_loader takes a torch DataLoader, not a {type(dataloader).__name__}")
    state = PartialState()
    ranks = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    agree = is_default_group(ranks)
    deal = tuple(range(ranks)) if agree and rank == state.process_index else None
    world_size = ranks
    if torch_device_mesh is not None:
        ranks, rank = data_parallel_rank(torch_device_mesh, world_size)
        deal = data_parallel_layout(torch_device_mesh) if agree else None
    if dispatch_batches is None:
        dispatch_batches = isinstance(dataloader.dataset, IterableDataset) and put_on_device
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        raise BadRequest("slice_fn_for_dispatch cuts what rank 0 dispatches: it needs dispatch_batches=True")
    dealt = ranks > 1 and isinstance(_sampler_below(dataloader), DistributedSampler)
    dispatches = dispatch_batches and world_size > 1 and not dealt
    parts = build_loader_parts(
        dataloader,
        1 if dealt else ranks,
        0 if dealt else rank,
        split_batches=split_batches and not dealt,
        even_batches=even_batches,
        every_rank=dispatches,
        numbered=(ranks, rank) if dealt else None,
        stateful=use_stateful_dataloader,
        seedable=use_seedable_sampler,
        data_seed=data_seed,
    )
    parts.agree, parts.deal = agree, deal
    parts.device = (state.device if device is None else device) if put_on_device else None
    parts.non_blocking, parts.rng_types = non_blocking, list(rng_types or ())
    if dispatches:
        return DataLoaderDispatcher.of(parts, slice_fn_for_dispatch)
    return DataLoaderShard.of(parts)


def data_parallel_rank(mesh: Any, world_size: int) -> tuple[int, int]:  # noqa: ANN401 - a DeviceMesh
    """Return how many ranks of `mesh` read different data, and the index of this one."""
    names = list(mesh.mesh_dim_names or ())
    ranks, rank = 1, 0
    for axis, name in enumerate(names):
        if name not in {"tp", "cp"}:
            ranks, rank = ranks * mesh.size(axis), rank * mesh.size(axis) + mesh.get_local_rank(axis)
    if mesh.size() != world_size:
        raise BadRequest(f"the mesh has {mesh.size()} ranks ({names}), and the loader is for {world_size}")
    return ranks, rank


def data_parallel_layout(mesh: Any) -> tuple[int, ...]:  # noqa: ANN401 - a DeviceMesh
    """Return the data-parallel part of every rank of `mesh`, by global rank."""
    layout = mesh.mesh
    parts = torch.zeros_like(layout)
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in {"tp", "cp"}:
            shape = [-1 if dimension == axis else 1 for dimension in range(layout.dim())]
            parts = parts * mesh.size(axis) + torch.arange(mesh.size(axis)).view(shape)
    return tuple(parts.flatten()[layout.flatten().argsort()].tolist())


def _sampler_below(loader: Any) -> Any:  # noqa: ANN401
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return loader.sampler if sampler is None else sampler


def build_loader_parts(
    source: Any,  # noqa: ANN401 - a DataLoader
    ranks: int,
    rank: int,
    *,
    split_batches: bool = False,
    even_batches: bool = True,
    every_rank: bool = False,
    numbered: tuple[int, int] | None = None,
    stateful: bool = False,
    seedable: bool = False,
    data_seed: int | None = None,
) -> LoaderParts:
    """Return the parts of the prepared loader for `source`. With `every_rank`, this process reads for all ranks."""
    served_ranks = tuple(range(ranks)) if every_rank else (rank,)
    even_batches = even_batches and ranks > 1  # even_batches has no effect on a single rank
    single = source.batch_sampler is None
    tickets: MapBatchSampler | IterableBatchSampler
    fetch: Any
    generator = None
    if isinstance(source.dataset, IterableDataset):
        size = 1 if single else source.batch_size
        stream = IterableDatasetShard(
            source.dataset, size, bool(source.drop_last), ranks, rank, split_batches and not single, even_batches
        )
        tickets, rows = IterableBatchSampler(stream, served_ranks), 0 if single else stream.rows
        keeps_state = stateful and not every_rank
        fetch = (StatefulIterable if keeps_state else IterableReader)(source.dataset, stream, source.collate_fn, single)
    else:
        shuffle = Shuffle(SingleItemSampler(source.sampler) if single else source.batch_sampler, seedable)
        generator = shuffle.own
        shard = BatchSamplerShard(shuffle.batch_sampler, ranks, rank, split_batches and not single, even_batches)
        tickets = (UnbatchedSampler if single else MapBatchSampler)(shard, shuffle, served_ranks, numbered)
        rows = 0 if single else (shard.batch_size or 0) // (ranks if shard.split_batches else 1)
        keeps_state = stateful and not every_rank and is_stateful(source.dataset)
        fetch = (StatefulReader if keeps_state else MapReader)(source.dataset, source.collate_fn, single)
    stateful_kind = require_stateful_dataloader() if stateful else None
    inner = _copy(source, tickets, fetch, stateful_kind)
    custom_iter = type(inner).__iter__ not in {DataLoader.__iter__, getattr(stateful_kind, "__iter__", None)}
    world_size = ranks if numbered is None else numbered[0]
    return LoaderParts(
        source=source,
        inner=inner,
        tickets=tickets,
        fetch=fetch,
        num_processes=world_size,
        process_index=rank if numbered is None else numbered[1],
        total_rows=rows * world_size,
        length=tickets.__len__,
        custom_iter=custom_iter,
        stateful=isinstance(fetch, StatefulReader | StatefulIterable) and not custom_iter,
        data_seed=data_seed,
        generator=generator,
    )


def _copy(source: Any, tickets: Any, fetch: Any, stateful: type[Any] | None) -> Any:  # noqa: ANN401 - a DataLoader
    """Return a loader like `source` that reads `tickets` through `fetch`, of torchdata's class if `stateful`."""
    start = source.worker_init_fn
    if start is not None:
        start = WorkerInit(source.dataset, start, isinstance(source.dataset, IterableDataset))
    if stateful is not None and not isinstance(source, stateful):
        inner = stateful(
            fetch,
            batch_sampler=tickets,
            collate_fn=identity,
            worker_init_fn=start,
            **{name: getattr(source, name) for name in _COPIED},
        )
    else:
        inner = copy.copy(source)
    inner.__dict__.update(  # torch's `__setattr__` refuses most of these
        dataset=fetch,
        batch_sampler=tickets,
        collate_fn=identity,
        worker_init_fn=start,
        _dataset_kind=_DatasetKind.Map,
        _iterator=None,
        in_order=True,  # the position counts batches in order
    )
    return inner


_COPIED = (
    "num_workers",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class SkipDataLoader(DataLoader[Any]):
    """Plain loader that reads and discards its first `skip_batches` batches, for datasets that cannot be indexed."""

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
    """Return a loader whose every pass starts after `num_batches` of this rank's batches. `dataloader` is not changed.

    A prepared loader and the returned one share their position: a pass over either is the next epoch. Skipped samples
    are not read, except from iterable datasets. Raises `BadRequest` for a negative number.
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
