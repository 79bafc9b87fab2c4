"""Loaders: each rank gets its share.

Owns: what `prepare_data_loader` is told of this rank and of the options. Refuses: sharding and randomness; the loaders'
own modules do that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from rankbook.runtime.data.loaders import prepare_data_loader
from rankbook.runtime.prepare.context import Context
from rankbook.runtime.prepare.reports import report_loader
from rankbook.runtime.strategies.mesh import mesh_for

_loader_numbers = itertools.count()


def prepare_loader(
    loader: Any,  # noqa: ANN401 - a DataLoader
    context: Context,
    *,
    place: bool | None = None,
    slice_fn: Callable[..., Any] | None = None,
) -> Any:  # noqa: ANN401 - a loader
    """The loader that gives this rank its share. Ranks of one tensor-parallel group get the same."""
    options, setup = context.loader_options, context.setup
    mesh = None
    if setup.parallelism is not None and setup.data_parallel_size < setup.num_processes:
        mesh = mesh_for(setup.device.type, setup.parallelism.sizes)
    prepared = prepare_data_loader(
        loader,
        setup.device,
        split_batches=options.split_batches,
        put_on_device=context.place_batches if place is None else place,
        rng_types=list(context.rng_types) if context.rng_types is not None else None,
        dispatch_batches=options.dispatch_batches,
        even_batches=options.even_batches,
        slice_fn_for_dispatch=slice_fn,
        use_seedable_sampler=options.use_seedable_sampler,
        data_seed=options.data_seed,
        non_blocking=options.non_blocking,
        use_stateful_dataloader=options.use_stateful_dataloader,
        torch_device_mesh=mesh,
    )
    if prepared is not loader:
        name = f"loader {next(_loader_numbers)}"
        prepared.tell(name)
        report_loader(name, prepared)
    return prepared
