"""What every prepared loader does, whoever reads its data.

Owns: a pass over the data: its seed and epoch agreed by all ranks, which batch is the last, what of it is real, and the
position to resume from. Refuses: to deal the samples (`samplers.py`) or to read them (`fetch.py`).
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
    """What a prepared loader is made of.

    `source` is the person's loader, untouched. `inner` is a copy of it that reads `tickets` through `fetch`.
    `total_rows` are the samples of all ranks in a full round, 0 if not known. `length` gives this rank's batches.
    `custom_iter`: the class of `source` has an `__iter__` of its own, which may do anything with the batches.
    `stateful`: `inner` is torchdata's, and keeps a state of the dataset.
    `agree`: the ranks of the default group read together. `deal`: the `process_index` of each rank of that group, for
    the parts that a dead rank's successor is given by another rank; None where the caller chose it.
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
        """This rank among those that read different data, and how many they are."""
        return self.process_index, self.num_processes

    # On a rank that takes a lost one's place

    def __getstate__(self) -> dict[str, Any]:
        inner = copy.copy(self.inner)  # what reads now, workers too, belongs to this process
        inner.__dict__["_iterator"] = None
        inner.__dict__.pop("_get_iterator", None)
        here = _process()
        on_own = here is not None and self.device == here.device
        return {"fields": {**self.__dict__, "inner": inner}, "on_own_device": on_own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        here = _process()
        if here is None:
            return
        if state["on_own_device"]:
            self.device = here.device
        if self.deal is not None and len(self.deal) == here.num_processes:
            self.process_index = self.deal[here.process_index]
            self.tickets.move_to(self.process_index)


def _process() -> PartialState | None:
    """What this process is; None where nobody has asked yet, and the question would start a process group."""
    return PartialState() if PartialState._shared_state or dist.is_initialized() else None


def _position(name: str, reference: weakref.ref[PreparedLoader]) -> telemetry.Source:
    def source() -> telemetry.LoaderPosition | None:
        loader = reference()
        if loader is None:
            return None
        try:
            batches: int | None = len(loader)
        except TypeError:  # an iterable dataset: nobody knows
            batches = None
        at = loader.position
        return telemetry.LoaderPosition(name=name, epoch=at.epoch, delivered=at.delivered, batches=batches)

    return source


class PreparedLoader(DataLoader[Any]):
    """A loader that `prepare` made. What is not its own (`batch_size`, `collate_fn`, ...) is the person's loader's.

    `end_of_dataloader`: the batch in hand is this rank's last. `share`: what is real in the round in hand, None where
    all of it is; `trim` takes it. `remainder`: how many samples of the last round are real, 0 where all are, -1 before
    the end and where nobody knows.
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
        """Have telemetry know where a loop over it is, under `name`."""
        self.told_as = name
        telemetry.offer_source(name, _position(name, weakref.ref(self)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "told_as" in state:  # on a rank that takes a lost one's place
            self.tell(state["told_as"])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the person's loader's
        if name == "parts" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.parts.source, name)

    @property
    def base_dataloader(self) -> Any:  # noqa: ANN401 - a DataLoader
        """The loader that gives the batches, of the class of the person's own."""
        return self.parts.inner

    @property  # type: ignore[misc]  # torch's can be set
    def multiprocessing_context(self) -> Any:  # noqa: ANN401 - as torch's
        """How the workers are started; torch's."""
        return self.parts.source.multiprocessing_context

    @property
    def device(self) -> torch.device | None:
        """Where the batches are put; None: they stay where they are."""
        return self.parts.device

    @property
    def total_batch_size(self) -> int:
        """The samples of all ranks in one round, 0 if nobody knows."""
        return self.parts.total_rows

    @property
    def total_dataset_length(self) -> int:
        """The number of samples. Raises TypeError for a dataset without a length."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def iteration(self) -> int:
        """The epoch of the next pass."""
        return self.position.next_epoch()

    def __len__(self) -> int:
        """This rank's batches in a whole pass. Raises TypeError for a dataset without a length."""
        return max(0, self.parts.length() - self.skip_batches)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of `epoch`: its shuffle and its random numbers. Without it each pass is the next."""
        self.position.set_epoch(epoch)
        dataset = self.parts.source.dataset
        if callable(tell := getattr(dataset, "set_epoch", None)):
            tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """(seed, epoch, batches delivered), and what else a fresh process needs to continue with the next batch."""
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
        """Have the next pass continue where `state_dict` was taken, also with other workers or another world size.

        Raises `BadRequest` if the batches delivered there do not end where a round of this world size ends.
        """
        self.position.load_state_dict(state_dict, self.parts.num_processes, self.parts.total_rows, remembered_seed())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._begin()
        state, position, device = GradientState(), self.position, self.parts.device
        if device is not None and device.type == "cpu" and not torch.accelerator.is_available():
            device = None  # there is no other place that a batch could come from
        run, non_blocking = position.run, self.parts.non_blocking
        with state.iterating(self):
            for batch, share, last in self._arrivals():
                if device is not None:
                    batch = send_to_device(batch, device, non_blocking)  # noqa: PLW2901 - the same, elsewhere
                if position.run == run:  # no later pass has begun
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
        """Agree with the other ranks on what comes, and make the tickets for it."""
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
    """What rank 0 says."""
    told = torch.tensor([seed >> 32, seed & _LOW, epoch, skip], dtype=torch.int64, device=consistency.control_device())
    dist.broadcast(told, src=0)
    high, low, epoch, skip = told.tolist()
    return high << 32 | low, epoch, skip


def is_default_group(num_processes: int) -> bool:
    """Whether the loader's ranks are those of the default group."""
    return num_processes > 1 and PartialState().use_distributed and PartialState().num_processes == num_processes


def iterate_local(parts: LoaderParts) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
    """This process's batches, each with what is real in its round and whether it is the last."""
    if parts.custom_iter:
        yield from _read_custom(parts)
        return
    inner = parts.inner
    pinned = inner.pin_memory and torch.accelerator.is_available()
    here = type(inner) is DataLoader and not inner.num_workers and not pinned
    for each in _read_here(parts) if here else iter(inner):
        if type(each) is not FetchedBatch:
            yield each, None, False
            continue
        if each.absent and len(parts.tickets.ranks) == 1:
            return
        yield each if each.absent else each.batch, each.share, each.last


def _read_here(parts: LoaderParts) -> Iterator[Any]:
    """Without torch's iterator, whose bookkeeping takes longer than a small batch."""
    if parts.generator is not None:  # torch takes a number for its workers first; the shuffle is to be the same
        torch.empty((), dtype=torch.int64).random_(generator=parts.generator)
    return map(parts.fetch.__getitems__, parts.tickets)


class BatchUnwrapper:
    """What torch's iterator gives, with nothing but the batches in it; an `__iter__` of a person's own reads it."""

    def __init__(self, iterator: Any) -> None:  # noqa: ANN401 - torch's
        self._iterator = iterator
        self.count = 0
        self.arrived: FetchedBatch | None = None

    def __iter__(self) -> BatchUnwrapper:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - a batch
        each = next(self._iterator)
        self.arrived = each if type(each) is FetchedBatch else None
        if self.arrived is not None and self.arrived.absent:
            raise StopIteration
        self.count += 1
        return each if self.arrived is None else self.arrived.batch

    def _reset(self, loader: Any) -> None:  # noqa: ANN401 - called by torch for workers that stay
        self.count, self.arrived = 0, None
        self._iterator._reset(loader)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - torch's
        if name.startswith("__") or name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)


def _read_custom(parts: LoaderParts) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
    """The batches of an `__iter__` that may drop, change or add some: the last is known once there is no other."""
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
