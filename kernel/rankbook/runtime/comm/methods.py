"""Communication methods of the `Accelerator`: collectives, metrics over uneven batches, code for selected ranks.

`gather_for_metrics` removes repeated samples. The collectives themselves are in collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankbook.errors import InvalidArgument
from rankbook.runtime.comm import collectives
from rankbook.runtime.comm.collectives import trim
from rankbook.runtime.comm.tree import concatenate, leaves, map_leaves, send_to_device
from rankbook.runtime.data.samplers import WHOLE, RoundPadding
from rankbook.runtime.settings import AcceleratorSettings
from rankbook.runtime.strategies.base import mesh_for

_T = TypeVar("_T")


class CollectiveMethods(AcceleratorSettings):
    """See `Accelerator`."""

    def gather(self, tensor: _T) -> _T:
        """Concatenate the tensors of all ranks along their first dimension, in rank order. A collective.

        A tensor without dimensions counts as one row. Raises `InvalidArgument` on every rank if shapes differ (see
        `pad_across_processes`), or for a leaf that is not a tensor (see `rankbook.gather_object`).
        """
        return collectives.gather(tensor)

    def reduce(self, tensor: _T, reduction: str = "sum", scale: float = 1.0) -> _T:
        """Reduce every tensor over the ranks to the "mean", "sum", "min" or "max", times `scale`. A collective.

        Returns new tensors. Raises `InvalidArgument` on every rank for another reduction, different shapes, and leaves
        that are not tensors.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: _T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> _T:
        """Pad every tensor along `dim` to the largest size on any rank. A collective.

        `pad_first` puts the padding, with the value `pad_index`, before the data. Raises `InvalidArgument` on every
        rank if the numbers of dimensions differ, and for leaves that are not tensors.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: ANN401 - nested
        """Gather tensors without the samples that were repeated to make batches even. A collective.

        Every sample of the dataset appears once, in order. With uneven batches, ranks without a batch in the last round
        have left the loop; only the other ranks get its samples. Data that are not tensors are gathered as objects;
        `use_gather_object` sends tensors this way too. Raises as `gather`; and `InvalidArgument` if the number of rows
        is not the same for every rank.
        """
        values = [leaf for _, leaf in leaves(input_data)]
        as_objects = use_gather_object or not values or not all(isinstance(leaf, torch.Tensor) for leaf in values)
        # All ranks decide alike if their data have the same structure.
        if as_objects:
            return self._for_metrics_as_objects(input_data)
        return self._for_metrics(input_data)

    def _for_metrics(self, data: Any) -> Any:  # noqa: ANN401 - nested
        # `share` describes the current round of the innermost loop. It is None for all rounds but incomplete ones.
        share = getattr(self.gradient_state.active_dataloader, "share", None) if self.use_distributed else None
        if share is None:
            return self._drop_replicas(collectives.gather(data))
        # As `gather` does: a loss without dimensions is one row.
        data = map_leaves(lambda leaf: leaf if leaf.ndim else leaf[None], data)
        if len(share.ranks) < len(share.real):
            return self._gather_from_ranks_with_batch(data, share)
        # The ranks' parts of this batch may differ in length, so pad before gathering and trim afterwards.
        return trim(self._drop_replicas(collectives.gather(collectives.pad_across_processes(data))), share)

    def _for_metrics_as_objects(self, data: Any) -> Any:  # noqa: ANN401 - nested
        share = getattr(self.gradient_state.active_dataloader, "share", None) if self.use_distributed else None
        if share is None or not isinstance(data, list):
            return self._drop_replicas(collectives.gather_object(data))
        if len(share.ranks) < len(share.real):
            return self._gather_from_ranks_with_batch(data, share)
        # One list per rank. The lists may differ in length, and `trim` expects the same number of rows from every rank:
        # fill up with None, which is trimmed again.
        everyone = collectives.gather_object([data])
        longest = max(map(len, everyone))
        rows = [row for objects in everyone for row in (*objects, *[None] * (longest - len(objects)))]
        return trim(self._drop_replicas(rows), share)

    def _gather_from_ranks_with_batch(self, data: Any, share: RoundPadding) -> Any:  # noqa: ANN401 - nested
        """Gather the last round of uneven batches among the ranks that have a batch in it.

        The other ranks have left the loop and cannot take part in a collective, so point-to-point messages are used:
        every rank sends to its peers in turn.
        """
        # Ranks of one tensor-parallel group have the same batch. Rank k of such a group talks to the ranks k of the
        # other groups, so that every rank gets all rows without duplicates. Example: with 6 ranks and `tp_size=2`, the
        # groups are (0, 1), (2, 3) and (4, 5). If the last group has no batch, ranks 0 and 2 exchange theirs, and so do
        # ranks 1 and 3.
        replicas = self.num_processes // self.setup.data_parallel_size
        replica = self.process_index % replicas
        peers = {part: part * replicas + replica for part in share.ranks}
        parts = []
        # In rank order, one sender at a time. All ranks involved go through the senders in the same order, so no two
        # ranks wait for each other.
        for part, rank in peers.items():
            message = [map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, data)]
            if rank == self.process_index:
                for peer in peers.values():
                    if peer != rank:
                        dist.send_object_list(message, dst=peer)
            else:
                dist.recv_object_list(message, src=rank)
            rows = share.real[part]
            parts.append(message[0] if rows == WHOLE else _first_rows(message[0], rows))
        if isinstance(data, list) and not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(data)):
            return [row for part in parts for row in part]
        return send_to_device(concatenate(parts), self.device)

    def _drop_replicas(self, gathered: Any) -> Any:  # noqa: ANN401 - nested
        """Keep the rows of one rank of every group that shares batches, such as a tensor-parallel group."""
        ranks, parts = self.num_processes, self.setup.data_parallel_size
        if ranks == parts:
            return gathered
        if isinstance(gathered, list):
            # Ranks are numbered with `tp` as the innermost axis, so the members of a group are neighbours.
            rows = len(gathered) // ranks
            return [row for part in range(parts) for row in gathered[part * (ranks // parts) * rows :][:rows]]
        return map_leaves(lambda tensor: tensor.unflatten(0, (parts, ranks // parts, -1))[:, 0].flatten(0, 1), gathered)

    # Execution on selected ranks

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have reached this call."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block rank 0 executes before the other ranks. A collective.

        If the block raises on rank 0, the other ranks do not execute it and raise `PeerFailedError`.
        """
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block the first rank of every machine executes before its other ranks."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: _T, apply_padding: bool = False) -> AbstractContextManager[_T]:
        """Return a context manager that gives this rank's share of `inputs`.

        See `PartialState.split_between_processes`. Raises `InvalidArgument` for a dict whose values have different
        lengths.
        """
        return self.state.split_between_processes(inputs, apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run on rank 0 only."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run only on the first rank of every machine."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run on the last rank only."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run on rank `process_index` only."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:  # noqa: ANN401 - a decorator
        """Decorate a function to run only on rank `local_process_index` of every machine."""
        return self.state.on_local_process(function, local_process_index)

    # Position in the device mesh

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Device mesh of `parallelism_config` with all its axes, None without one. The first access is a collective."""
        parallelism = self.parallelism_config
        return None if parallelism is None else mesh_for(self.device.type, parallelism.sizes)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica of this rank. Raises `InvalidArgument` without `parallelism_config`."""
        return self._mesh_coordinate("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank's shard within its replica. Raises `InvalidArgument` without a `parallelism_config`."""
        return self._mesh_coordinate("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank in its tensor-parallel group. Raises `InvalidArgument` without `parallelism_config`."""
        return self._mesh_coordinate("tp")

    def _mesh_coordinate(self, axis: str) -> int:
        if self.parallelism_config is None:
            raise InvalidArgument(f"mesh axis {axis!r} is not defined: pass parallelism_config to Accelerator()")
        return self.parallelism_config.place_of(self.process_index)[axis]

    def print(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as the builtin
        """Print on the first rank of every machine."""
        self.state.print(*values, **options)


def _first_rows(data: Any, rows: int) -> Any:  # noqa: ANN401 - nested, or a list of objects
    if isinstance(data, list) and not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(data)):
        return data[:rows]
    return map_leaves(lambda leaf: leaf[:rows] if isinstance(leaf, torch.Tensor) else leaf, data)
