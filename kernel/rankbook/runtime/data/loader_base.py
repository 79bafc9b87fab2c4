"""Base class of all prepared data loaders: seeds and epochs, the position in the data, and the end of a pass.

`PreparedLoader.__iter__` runs one pass. At its start all ranks agree on seed, epoch and position (`_begin`); then it
counts the batches, so that a checkpoint can resume after the last one. Which samples a rank gets is decided in
samplers.py, and reading them is the task of the subclasses (loaders.py, dispatcher.py). `iterate_local` reads in this
process or in torch's workers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rankbook.protocol import telemetry
from rankbook.runtime.comm import consistency
from rankbook.runtime.comm.tree import send_to_device
from rankbook.runtime.data import stateful as reader_state
from rankbook.runtime.data.batch_reader import FetchedBatch
from rankbook.runtime.data.batch_requests import EpochState, IterableBatchSampler, MapBatchSampler
from rankbook.runtime.data.rng import check_rng_types, remembered_seed, run_seed, synchronize_rng_states
from rankbook.runtime.data.samplers import WHOLE, RoundPadding
from rankbook.runtime.data.stateful import ReadPosition
from rankbook.runtime.gradient_state import GradientState
from rankbook.runtime.process_state import PartialState

_LOW = (1 << 32) - 1


@dataclass
class LoaderParts:
    """Parts of a prepared loader.

    `source` is the user's loader, unchanged. `inner` is a copy of it that reads `tickets` through `fetch`. `total_rows`
    is the number of samples of all ranks in a full round, 0 if unknown. `length` returns the number of this rank's
    batches. `custom_iter` is True if the class of `source` overrides `__iter__`, which may do anything with the
    batches. `stateful` is True if `inner` is torchdata's StatefulDataLoader and keeps a state of the dataset. `agree`
    is True if the ranks of the default group read together. `deal` is the `process_index` of every rank of that group,
    for a process that replaces a dead rank and takes over its part; None if the caller chose the index.
    """

    source: Any
    inner: Any
    tickets: MapBatchSampler | IterableBatchSampler
    fetch: Any
    num_processes: int
    process_index: int
    total_rows: int
    length: Callable[[], int]
    custom_iter: bool = False
    stateful: bool = False
    agree: bool = False
    deal: tuple[int, ...] | None = None
    device: torch.device | None = None
    non_blocking: bool = False
    data_seed: int | None = None
    rng_types: list[str] = field(default_factory=list)
    generator: torch.Generator | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Index of this rank among the ranks that read different data, and their number."""
        return self.process_index, self.num_processes

    # Pickling: for a process that replaces a dead rank

    def __getstate__(self) -> dict[str, Any]:
        inner = copy.copy(self.inner)  # the iterator and its workers belong to this process
        inner.__dict__["_iterator"] = None
        inner.__dict__.pop("_get_iterator", None)
        process = _process()
        on_own = process is not None and self.device == process.device
        return {"fields": {**self.__dict__, "inner": inner}, "on_own_device": on_own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        process = _process()
        if process is None:
            return
        if state["on_own_device"]:
            self.device = process.device
        if self.deal is not None and len(self.deal) == process.num_processes:
            self.process_index = self.deal[process.process_index]
            self.tickets.move_to(self.process_index)


def _process() -> PartialState | None:
    """Return the state of this process, or None if asking for it would start a process group."""
    return PartialState() if PartialState._shared_state or dist.is_initialized() else None


def _position(name: str, reference: weakref.ref[PreparedLoader]) -> telemetry.Source:
    def source() -> telemetry.LoaderPosition | None:
        loader = reference()
        if loader is None:
            return None
        try:
            batches: int | None = len(loader)
        except TypeError:  # an iterable dataset without a length
            batches = None
        at = loader.position
        return telemetry.LoaderPosition(name=name, epoch=at.epoch, delivered=at.delivered, batches=batches)

    return source


class PreparedLoader(DataLoader[Any]):
    """A loader made by `prepare`. Attributes that it lacks (`batch_size`, `collate_fn`, ...) are the user's loader's.

    `end_of_dataloader` is True while the current batch is this rank's last. `share` says what is real in the current
    round, None if all of it is; it is the argument of `trim`. `remainder` is the number of real samples in the last
    round: 0 if all are, -1 before the end and if unknown.
    """

    end_of_dataloader: bool
    share: RoundPadding | None
    remainder: int
    skip_batches: int
    position: ReadPosition

    def _setup(self, parts: LoaderParts, position: ReadPosition | None = None, skip_batches: int = 0) -> None:
        self.parts = parts
        self.position = position or ReadPosition()
        self.skip_batches = skip_batches
        self.end_of_dataloader, self.share, self.remainder = False, None, -1
        parts.rng_types = check_rng_types(parts.rng_types)

    def tell(self, name: str) -> None:
        """Publish the position of loops over this loader to telemetry under `name`."""
        self.told_as = name
        telemetry.offer_source(name, _position(name, weakref.ref(self)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "told_as" in state:  # in a process that replaces a dead rank
            self.tell(state["told_as"])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the user's loader
        if name == "parts" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.parts.source, name)

    @property
    def base_dataloader(self) -> Any:  # noqa: ANN401 - a DataLoader
        """The loader that yields the batches, of the class of the user's loader."""
        return self.parts.inner

    @property  # type: ignore[misc]  # torch's can be set
    def multiprocessing_context(self) -> Any:  # noqa: ANN401 - as torch's
        """Multiprocessing context of the workers, as in torch."""
        return self.parts.source.multiprocessing_context

    @property
    def device(self) -> torch.device | None:
        """Device that batches are moved to, None if they are not moved."""
        return self.parts.device

    @property
    def total_batch_size(self) -> int:
        """Number of samples of all ranks in one round, 0 if unknown."""
        return self.parts.total_rows

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset. Raises TypeError for a dataset without a length."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def iteration(self) -> int:
        """Epoch of the next pass."""
        return self.position.next_epoch()

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole pass. Raises TypeError for a dataset without a length."""
        return max(0, self.parts.length() - self.skip_batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines its shuffle and random numbers.

        Without a call, every pass has the epoch after the previous one.
        """
        self.position.set_epoch(epoch)
        dataset = self.parts.source.dataset
        if callable(tell := getattr(dataset, "set_epoch", None)):
            tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position (seed, epoch, batches delivered) and other state that a resumed run continues from."""
        state = self.position.state_dict(self.parts.num_processes, self.parts.total_rows)
        if state["finished"] and not self.position.restore and self.parts.generator is not None:
            state["generator"] = self.parts.generator.get_state()
        if self.parts.stateful:
            skip = self.parts.tickets.current.skip
            state["reader"] = reader_state.capture_state(
                self.parts.inner, self.parts.fetch, self.position, self.parts.place, skip
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue where `state_dict` was taken, also with other numbers of workers or ranks.

        Raises `BadRequest` if the batches delivered there do not end at the end of a round of this world size.
        """
        self.position.load_state_dict(state_dict, self.parts.num_processes, self.parts.total_rows, remembered_seed())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._begin()
        state, position, device = GradientState(), self.position, self.parts.device
        if device is not None and device.type == "cpu" and not torch.accelerator.is_available():
            device = None  # without an accelerator, all batches are on the CPU
        run, non_blocking = position.run, self.parts.non_blocking
        with state.iterating(self):
            for batch, share, last in self._arrivals():
                if device is not None:
                    batch = send_to_device(batch, device, non_blocking)  # noqa: PLW2901 - the same, elsewhere
                if position.run == run:  # no later pass has started
                    self.share = share
                    position.delivered += 1
                    if last:
                        self._end(share)
                yield batch
            if position.run == run and not position.finished:  # this rank had no batch at all
                self._end(None)

    def _end(self, share: RoundPadding | None) -> None:
        self.end_of_dataloader = self.position.finished = True
        if share is None:
            self.remainder = 0
        else:
            self.remainder = -1 if WHOLE in share.real else sum(share.real)

    def _begin(self) -> None:
        """Agree with the other ranks on seed, epoch, position and random states of the pass, and start its requests.

        The seed is the first of: `data_seed`, the seed of the earlier passes (unless `set_seed` was called since), and
        the seed of this run. With `agree`, rank 0's values are used on all ranks.
        """
        parts, position = self.parts, self.position
        if parts.data_seed is not None:
            seed = parts.data_seed
        elif position.seed is not None and remembered_seed() in {None, position.seeded_by}:
            seed = position.seed
        else:
            seed, position.seeded_by = run_seed(), remembered_seed()
        skip = position.resume or self.skip_batches
        epoch = position.next_epoch()
        generator = parts.generator
        if generator is not None and position.restore and position.generator is not None:
            generator.set_state(position.generator)
        if parts.agree:
            seed, epoch, skip = _agreed(seed, epoch, skip)
            others = [name for name in parts.rng_types if name != "generator"]
            if others or generator is not None:
                synchronize_rng_states([*others, *(["generator"] if generator is not None else [])], generator)
        position.generator = None if generator is None else generator.get_state()
        first = skip
        if parts.stateful and position.reader is not None:
            first = reader_state.restore_state(parts.inner, parts.fetch, parts.place, position, skip)
        position.begin(seed, epoch, skip)
        self.end_of_dataloader, self.share, self.remainder = False, None, -1
        parts.tickets.begin(EpochState(position.run, seed, epoch, first))
        parts.inner.generator = generator if generator is not None else torch.Generator()

    def _arrivals(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        raise NotImplementedError


def _agreed(seed: int, epoch: int, skip: int) -> tuple[int, int, int]:
    """Return rank 0's values. A collective."""
    agreed = torch.tensor(
        [seed >> 32, seed & _LOW, epoch, skip], dtype=torch.int64, device=consistency.control_device()
    )
    dist.broadcast(agreed, src=0)
    high, low, epoch, skip = agreed.tolist()
    return high << 32 | low, epoch, skip


def is_default_group(num_processes: int) -> bool:
    """Return True if the loader's ranks are those of the default process group."""
    return num_processes > 1 and PartialState().use_distributed and PartialState().num_processes == num_processes


def iterate_local(parts: LoaderParts) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
    """Yield this process's batches as (batch, what is real in its round, True for the last)."""
    if parts.custom_iter:
        yield from _read_custom(parts)
        return
    inner = parts.inner
    pinned = inner.pin_memory and torch.accelerator.is_available()
    in_process = type(inner) is DataLoader and not inner.num_workers and not pinned
    for fetched in _read_here(parts) if in_process else iter(inner):
        if type(fetched) is not FetchedBatch:
            yield fetched, None, False
            continue
        if fetched.absent and len(parts.tickets.ranks) == 1:
            return
        yield fetched if fetched.absent else fetched.batch, fetched.share, fetched.last


def _read_here(parts: LoaderParts) -> Iterator[Any]:
    """Read in this process without torch's iterator, whose overhead exceeds the time to read a small batch."""
    if parts.generator is not None:  # torch draws a seed for its workers first; draw it for the same shuffle
        torch.empty((), dtype=torch.int64).random_(generator=parts.generator)
    return map(parts.fetch.__getitems__, parts.tickets)


class BatchUnwrapper:
    """torch's iterator without the metadata of batches; a user-defined `__iter__` reads from it.

    `count` is the number of batches read, and `arrived` the metadata of the last one.
    """

    def __init__(self, iterator: Any) -> None:  # noqa: ANN401 - torch's
        self._iterator = iterator
        self.count = 0
        self.arrived: FetchedBatch | None = None

    def __iter__(self) -> BatchUnwrapper:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - a batch
        fetched = next(self._iterator)
        self.arrived = fetched if type(fetched) is FetchedBatch else None
        if self.arrived is not None and self.arrived.absent:
            raise StopIteration
        self.count += 1
        return fetched if self.arrived is None else self.arrived.batch

    def _reset(self, loader: Any) -> None:  # noqa: ANN401 - called by torch for persistent workers
        self.count, self.arrived = 0, None
        self._iterator._reset(loader)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - torch's
        if name.startswith("__") or name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)


def _read_custom(parts: LoaderParts) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
    """Yield the batches of a user-defined `__iter__`, which may drop, change or add batches.

    The last batch is known only after the next read fails, so one batch is read ahead. A batch has the metadata of the
    batch it was made from only as long as both were counted one to one.
    """
    inner, made = parts.inner, []
    make = type(inner)._get_iterator

    def get_iterator() -> BatchUnwrapper:
        made.append(BatchUnwrapper(make(inner)))
        return made[-1]

    inner.__dict__["_get_iterator"] = get_iterator
    if isinstance(inner._iterator, BatchUnwrapper):
        made.append(inner._iterator)
    batches = iter(inner)
    count, nothing = 0, object()
    batch = next(batches, nothing)
    while batch is not nothing:
        arrived = made[-1].arrived if made else None
        following = next(batches, nothing)
        count += 1
        last = following is nothing
        one_to_one = bool(made) and made[-1].count == count + (0 if last else 1)
        yield batch, arrived.share if arrived and one_to_one else None, last
        batch = following
