"""Data loaders that every rank reads by itself, and `prepare_data_loader`.

`prepare_data_loader` makes a prepared loader of any DataLoader. It never changes the user's loader, its sampler or
their lists, and never calls the constructor of a subclass again, since that may take other arguments. It makes a
shallow copy of the loader and gives the copy another batch sampler and another dataset; so the class, its `__iter__`
and its attributes are kept.

`skip_first_batches` returns a loader without its first batches.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rankbook.errors import InvalidArgument
from rankbook.runtime.config import require_stateful_dataloader
from rankbook.runtime.data.dispatcher import DataLoaderDispatcher
from rankbook.runtime.data.loader_base import (
    LoaderParts,
    PreparedLoader,
    build_loader_parts,
    is_default_group,
    iterate_local,
)
from rankbook.runtime.data.rng import check_rng_types
from rankbook.runtime.data.samplers import RoundPadding, SkipBatchSampler
from rankbook.runtime.data.splits import describe_split, split_warning
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
        # The samplers yield this rank's batches already, so the shard has one rank. The world is needed only to number
        # the batches of all ranks, for their seeds.
        numbering = (state.num_processes, state.process_index) if state.use_distributed else None
        parts = build_loader_parts(kind(dataset, **kwargs), 1, 0, numbering=numbering, stateful=use_stateful_dataloader)
        parts.device, parts.non_blocking, parts.rng_types = device, _non_blocking, check_rng_types(rng_types)
        parts.generator = synchronized_generator or parts.generator
        parts.synchronized = is_default_group(state.num_processes)
        parts.deal = tuple(range(state.num_processes)) if numbering else None
        self._setup(parts, skip_batches=skip_batches)

    @classmethod
    def of(cls, parts: LoaderParts) -> DataLoaderShard:
        """Return a loader made of `parts`."""
        loader = cls.__new__(cls)
        loader._setup(parts)
        return loader

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

    Raises `InvalidArgument` (a ValueError) if the argument is not a DataLoader, for a batch that cannot be split
    evenly, an unknown rng type, a `slice_fn_for_dispatch` without dispatched batches, and missing torchdata.

    Example::

        loader = prepare_data_loader(torch.utils.data.DataLoader(range(8), batch_size=2))
        gather_object([batch.tolist() for batch in loader])  # [[0, 1], [4, 5], [2, 3], [6, 7]]
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise InvalidArgument(f"prepare_data_loader takes a torch DataLoader, not a {type(dataloader).__name__}")
    state = PartialState()
    options = None
    if num_processes is None and process_index is None:
        options = {
            "split_batches": split_batches,
            "put_on_device": put_on_device,
            "device": None if device == state.device else device,
            "rng_types": rng_types,
            "dispatch_batches": dispatch_batches,
            "even_batches": even_batches,
            "slice_fn_for_dispatch": slice_fn_for_dispatch,
            "use_seedable_sampler": use_seedable_sampler,
            "data_seed": data_seed,
            "non_blocking": non_blocking,
            "use_stateful_dataloader": use_stateful_dataloader,
        }
    ranks = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    synchronized = is_default_group(ranks)
    # A process that replaces a dead rank takes over the share of that rank, which `deal` names.
    deal = tuple(range(ranks)) if synchronized and rank == state.process_index else None
    world_size = ranks
    if torch_device_mesh is not None:
        ranks, rank = data_parallel_rank(torch_device_mesh, world_size)
        deal = data_parallel_layout(torch_device_mesh) if synchronized else None
    # Reading a stream on every rank would read all of it as often as there are ranks. It is read once then, if its
    # batches have to be moved in any case. The same rule as in Accelerate.
    if dispatch_batches is None:
        dispatch_batches = isinstance(dataloader.dataset, IterableDataset) and put_on_device
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        raise InvalidArgument(
            "slice_fn_for_dispatch requires dispatch_batches=True: it slices the batches that rank 0 dispatches"
        )
    # The user's DistributedSampler has distributed the samples. Distributing them again would leave out most of them.
    dealt = ranks > 1 and isinstance(_sampler_below(dataloader), DistributedSampler)
    reason = describe_split(dataloader, ranks, rank, dealt=dealt) if ranks > 1 else ""
    if reason:
        warnings.warn(split_warning(reason), stacklevel=2)
    dispatches = dispatch_batches and world_size > 1 and not dealt
    parts = build_loader_parts(
        dataloader,
        1 if dealt else ranks,
        0 if dealt else rank,
        split_batches=split_batches and not dealt,
        even_batches=even_batches,
        every_rank=dispatches,
        numbering=(ranks, rank) if dealt else None,
        stateful=use_stateful_dataloader,
        seedable=use_seedable_sampler,
        data_seed=data_seed,
    )
    parts.synchronized, parts.deal, parts.split_reported = synchronized, deal, bool(reason)
    parts.device = (state.device if device is None else device) if put_on_device else None
    parts.non_blocking, parts.rng_types = non_blocking, check_rng_types(rng_types)
    parts.options = options
    if dispatches:
        return DataLoaderDispatcher.of(parts, slice_fn_for_dispatch)
    return DataLoaderShard.of(parts)


def prepare_again(loader: PreparedLoader, mesh: Any) -> None:  # noqa: ANN401 - a DeviceMesh or None
    """Make a prepared loader one for the number of ranks that there are now, in place.

    `mesh` is as in `prepare_data_loader`. The loader continues with the samples of the epoch that no rank has had, see
    `PreparedLoader.load_state_dict`. A loader whose ranks the caller has chosen stays as it is.
    """
    options, source = loader.parts.options, loader.parts.source
    if options is None:
        return
    state = loader.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has seen the warnings about the data
        prepared = prepare_data_loader(source, torch_device_mesh=mesh, **options)
    # In place: loaders that `skip_first_batches` has returned share the parts and the position.
    loader.__class__ = prepared.__class__
    vars(loader.parts).update(vars(prepared.parts))
    for name in ("slice_fn", "_group"):  # of a dispatcher
        if name in vars(prepared):
            vars(loader)[name] = vars(prepared)[name]
    loader.end_of_dataloader, loader.share, loader.remainder = False, None, -1
    loader.load_state_dict(state)


def data_parallel_rank(mesh: Any, world_size: int) -> tuple[int, int]:  # noqa: ANN401 - a DeviceMesh
    """Return how many ranks of `mesh` read different data, and the index of this one."""
    names = list(mesh.mesh_dim_names or ())
    ranks, rank = 1, 0
    for axis, name in enumerate(names):
        if name not in {"tp", "cp"}:
            # Row-major over the data-parallel axes: the coordinates of this rank are the digits of its index.
            ranks, rank = ranks * mesh.size(axis), rank * mesh.size(axis) + mesh.get_local_rank(axis)
    if mesh.size() != world_size:
        raise InvalidArgument(f"torch_device_mesh must have {world_size} ranks, got {mesh.size()} (axes {names})")
    return ranks, rank


def data_parallel_layout(mesh: Any) -> tuple[int, ...]:  # noqa: ANN401 - a DeviceMesh
    """Return the data-parallel part of every rank of `mesh`, by global rank."""
    # `mesh.mesh` holds the global rank at every coordinate. `parts` holds the data-parallel index there; sorting by
    # global rank gives the index of every rank.
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


class SkipDataLoader(DataLoader[Any]):
    """Plain loader that reads and discards its first `skip_batches` batches, for datasets that cannot be indexed.

    The constructor takes a dataset and the arguments of torch's DataLoader, or a loader in place of the dataset. With
    `use_stateful_dataloader` the loader is an instance of torchdata's StatefulDataLoader, and a pass that continues
    from a loaded state discards nothing.
    """

    _source: Any
    _resumed: bool
    skip_batches: int

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - as torch's, or a DataLoader
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,  # noqa: ANN401 - torch's
    ) -> None:
        kind = require_stateful_dataloader() if use_stateful_dataloader else DataLoader
        source = dataset if isinstance(dataset, DataLoader) else kind(dataset, **kwargs)
        if use_stateful_dataloader and not isinstance(self, kind):
            self.__class__ = _stateful_skip_class()
        # torch's `__setattr__` refuses to change these attributes, and its constructor would build the samplers again.
        self.__dict__.update(source.__dict__)
        self.__dict__.update(_source=source, _resumed=False, skip_batches=skip_batches)

    @property
    def base_dataloader(self) -> Any:  # noqa: ANN401 - a DataLoader
        """The loader that yields the batches."""
        return self._source

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A loaded state is that of the source, whose position already includes the skipped batches.
        skip = 0 if self._resumed else self.skip_batches
        self.__dict__["_resumed"] = False
        return islice(self._source, skip, None)

    def __len__(self) -> int:
        return max(0, len(self._source) - self.skip_batches)


@functools.cache
def _stateful_skip_class() -> type[SkipDataLoader]:
    """Return a class like SkipDataLoader that is also a subclass of torchdata's StatefulDataLoader."""

    def state_dict(loader: SkipDataLoader) -> dict[str, Any]:
        return dict(loader._source.state_dict())

    def load_state_dict(loader: SkipDataLoader, state_dict: dict[str, Any]) -> None:
        loader._source.load_state_dict(state_dict)
        loader.__dict__["_resumed"] = True

    members = {"__module__": __name__, "__doc__": SkipDataLoader.__doc__}
    return type(
        "SkipDataLoader",
        (SkipDataLoader, require_stateful_dataloader()),
        {**members, "state_dict": state_dict, "load_state_dict": load_state_dict},
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:  # noqa: ANN401 - a loader of the same kind
    """Return a loader whose every pass starts after `num_batches` of this rank's batches. `dataloader` is not changed.

    A prepared loader and the returned one share their position: a pass over either is the next epoch. Skipped samples
    are not read, except from iterable datasets. Raises `InvalidArgument` for a negative number.

    Example::

        loader = torch.utils.data.DataLoader(range(8), batch_size=2)
        [batch.tolist() for batch in skip_first_batches(loader, 3)]  # [[6, 7]]
    """
    if num_batches < 0:
        raise InvalidArgument(f"num_batches must be >= 0, got {num_batches}")
    if isinstance(dataloader, PreparedLoader):
        # A shallow copy shares `position`, and so the number of the epoch.
        skipping = copy.copy(dataloader)
        skipping.skip_batches = dataloader.skip_batches + num_batches
        return skipping
    # A plain loader without indices: an iterable dataset, or one whose items are read one by one.
    if getattr(dataloader, "batch_sampler", None) is None or isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(dataloader, num_batches)
    skipping = copy.copy(dataloader)
    skipping.__dict__.update(batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches), _iterator=None)
    return skipping
