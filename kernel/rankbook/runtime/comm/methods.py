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

from rankbook.errors import BadRequest
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
        """Concatenate the tensors of all ranks along their first dimension, in rank order. A collective."""
        return collectives.gather(tensor)

    def reduce(self, tensor: _T, reduction: str = "sum", scale: float = 1.0) -> _T:
        """Reduce every tensor over the ranks to the "mean", "sum", "min" or "max", times `scale`. A collective."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: _T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> _T:
        """Pad every tensor along `dim` to the largest size on any rank. A collective."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: ANN401 - nested
        """Gather tensors without the samples that were repeated to make batches even. A collective.

        Every sample of the dataset appears once, in order. With uneven batches, ranks without a batch in the last round
        have left the loop; only the other ranks get its samples. Data that are not tensors are gathered as objects;
        `use_gather_object` sends tensors this way too.
        """
        values = [leaf for _, leaf in leaves(input_data)]
        as_objects = use_gather_object or not values or not all(isinstance(leaf, torch.Tensor) for leaf in values)
        if as_objects:
            return self._for_metrics_as_objects(input_data)
        return self._for_metrics(input_data)

    def _for_metrics(self, data: Any) -> Any:  # noqa: ANN401 - nested
        share = getattr(self.gradient_state.active_dataloader, "share", None) if self.use_distributed else None
        if share is None:
            return self._without_replicas(collectives.gather(data))
        data = map_leaves(lambda leaf: leaf if leaf.ndim else leaf[None], data)
        if len(share.ranks) < len(share.real):
            return self._from_those_with_a_batch(data, share)
        # The ranks' parts of this batch may differ in length, so pad before gathering and trim afterwards.
        return trim(self._without_replicas(collectives.gather(collectives.pad_across_processes(data))), share)

    def _for_metrics_as_objects(self, data: Any) -> Any:  # noqa: ANN401 - nested
        share = getattr(self.gradient_state.active_dataloader, "share", None) if self.use_distributed else None
        if share is None or not isinstance(data, list):
            return self._without_replicas(collectives.gather_object(data))
        if len(share.ranks) < len(share.real):
            return self._from_those_with_a_batch(data, share)
        everyone = collectives.gather_object([data])
        longest = max(map(len, everyone))
        rows = [row for objects in everyone for row in (*objects, *[None] * (longest - len(objects)))]
        return trim(self._without_replicas(rows), share)

    def _from_those_with_a_batch(self, data: Any, share: RoundPadding) -> Any:  # noqa: ANN401 - nested
        """Gather the last round of uneven batches among the ranks that have a batch in it.

        The other ranks have left the loop and cannot take part in a collective, so point-to-point messages are used:
        every rank sends to its peers in turn.
        """
        replicas = self.num_processes // self.setup.data_parallel_size
        replica = self.process_index % replicas
        peers = {part: part * replicas + replica for part in share.ranks}
        parts = []
        for part, rank in peers.items():
            box = [map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, data)]
            if rank == self.process_index:
                for peer in peers.values():
                    if peer != rank:
                        dist.send_object_list(box, dst=peer)
            else:
                dist.recv_object_list(box, src=rank)
            rows = share.real[part]
            parts.append(box[0] if rows == WHOLE else _first_rows(box[0], rows))
        if isinstance(data, list) and not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(data)):
            return [row for part in parts for row in part]
        return send_to_device(concatenate(parts), self.device)

    def _without_replicas(self, gathered: Any) -> Any:  # noqa: ANN401 - nested
        """Keep the rows of one rank of every group that shares batches, such as a tensor-parallel group."""
        ranks, parts = self.num_processes, self.setup.data_parallel_size
        if ranks == parts:
            return gathered
        if isinstance(gathered, list):
            rows = len(gathered) // ranks
            return [row for part in range(parts) for row in gathered[part * (ranks // parts) * rows :][:rows]]
        return map_leaves(lambda tensor: tensor.unflatten(0, (parts, ranks // parts, -1))[:, 0].flatten(0, 1), gathered)

    # Execution on selected ranks

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have reached this call."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block rank 0 executes before the other ranks."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block the first rank of every machine executes before its other ranks."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: _T, apply_padding: bool = False) -> AbstractContextManager[_T]:
        """Return a context manager that gives this rank's share of `inputs`."""
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
        """Index of the model replica that this rank belongs to. Raises `BadRequest` without a `parallelism_config`."""
        return self._place("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank's shard within its replica. Raises `BadRequest` without a `parallelism_config`."""
        return self._place("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank within its tensor-parallel group. Raises `BadRequest` without a `parallelism_config`."""
        return self._place("tp")

    def _place(self, axis: str) -> int:
        if self.parallelism_config is None:
            raise BadRequest(f"there is no mesh with an axis {axis}: give the Accelerator a parallelism_config")
        return self.parallelism_config.place_of(self.process_index)[axis]

    def print(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as the builtin
        """Print on the first rank of every machine."""
        self.state.print(*values, **options)


def _first_rows(data: Any, rows: int) -> Any:  # noqa: ANN401 - nested, or a list of objects
    if isinstance(data, list) and not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(data)):
        return data[:rows]
    return map_leaves(lambda leaf: leaf[:rows] if isinstance(leaf, torch.Tensor) else leaf, data)
