"""Base class of all prepared data loaders: seeds and epochs, the position in the data, and the end of a pass.

`PreparedLoader.__iter__` runs one pass. At its start all ranks agree on seed, epoch and position (`_begin`); then it
counts the batches, so that a checkpoint can resume after the last one. Which samples a rank gets is decided in
samplers.py, and reading them is the task of the subclasses (loaders.py, loaders.py). `iterate_local` reads in this
process or in torch's workers. `build_loader_parts` makes the parts of a prepared loader of the user's loader.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, _DatasetKind

from rankbook.control_collectives import control_device
from rankbook.errors import InvalidArgument
from rankbook.protocol import telemetry
from rankbook.runtime.config import require_stateful_dataloader
from rankbook.runtime.data import stateful as reader_state
from rankbook.runtime.data.batch_reader import FetchedBatch, IterableReader, MapReader, WorkerInit, identity
from rankbook.runtime.data.batch_requests import (
    EpochState,
    IterableBatchSampler,
    MapBatchSampler,
    Shuffle,
    SingleItemSampler,
    UnbatchedSampler,
)
from rankbook.runtime.data.rng import (
    check_rng_types,
    last_seed,
    loader_seed,
    note_loader_seed,
    run_seed,
    stream_seed,
    synchronize_rng_states,
)
from rankbook.runtime.data.samplers import (
    WHOLE,
    BatchSamplerShard,
    EarlierDeal,
    IterableDatasetShard,
    RoundPadding,
)
from rankbook.runtime.data.seen import (
    SeenSamples,
    difference_warning,
    fingerprint_dataset,
    fingerprint_sampler,
    gather_seen,
    parts_of,
)
from rankbook.runtime.data.stateful import ReadPosition, StatefulIterable, StatefulReader, is_stateful
from rankbook.runtime.gradient_state import GradientState, window
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.tree import find_batch_size, send_to_device

# Seeds are unsigned 64-bit numbers. They travel as two halves in an int64 tensor, see `_broadcast_from_first`.
_LOW = (1 << 32) - 1


@dataclass
class LoaderParts:
    """Parts of a prepared loader.

    `source` is the user's loader, unchanged. `inner` is a copy of it that reads `tickets` through `fetch`. `total_rows`
    is the number of samples of all ranks in a full round, 0 if unknown. `length` returns the number of this rank's
    batches. `custom_iter` is True if the class of `source` overrides `__iter__`, which may do anything with the
    batches. `use_stateful_dataloader` is the option; `stateful` is True if `inner` is torchdata's StatefulDataLoader
    and keeps a state of the dataset.
    `synchronized` is True if the ranks of the default group read together. `deal` is the `process_index` of every rank
    of that group, for a process that replaces a dead rank and takes over its part; None if the caller chose the index.
    `split_reported`: the user was warned that the data were split before. `options` are the arguments with which
    `prepare_data_loader` makes the loader again for another number of ranks; None if the caller chose the ranks.
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
    use_stateful_dataloader: bool = False
    synchronized: bool = False
    deal: tuple[int, ...] | None = None
    device: torch.device | None = None
    non_blocking: bool = False
    data_seed: int | None = None
    rng_types: list[str] = field(default_factory=list)
    split_reported: bool = False
    generator: torch.Generator | None = None
    options: dict[str, Any] | None = None

    @property
    def rank_and_count(self) -> tuple[int, int]:
        """Index of this rank among the ranks that read different data, and their number."""
        return self.process_index, self.num_processes

    # Pickling: for a process that replaces a dead rank

    def __getstate__(self) -> dict[str, Any]:
        inner = copy.copy(self.inner)  # the iterator and its workers belong to this process
        inner.__dict__["_iterator"] = None
        inner.__dict__.pop("_get_iterator", None)
        process = _process()
        on_process_device = process is not None and self.device == process.device
        return {"fields": {**self.__dict__, "inner": inner}, "on_own_device": on_process_device}

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


def _position_source(name: str, reference: weakref.ref[PreparedLoader]) -> telemetry.Source:
    def source() -> telemetry.LoaderPosition | None:
        # The telemetry registry must not keep a loader alive.
        loader = reference()
        if loader is None:
            return None
        try:
            batches: int | None = len(loader)
        except (TypeError, NotImplementedError):  # an iterable dataset without a length
            batches = None
        at = loader.position
        return telemetry.LoaderPosition(name=name, epoch=at.epoch, delivered=at.delivered, batches=batches)

    return source


_PASS_ATTRIBUTES = ("end_of_dataloader", "share", "remainder", "_rest_after")
"""Attributes that every pass sets."""


class PreparedLoader(DataLoader[Any]):
    """A loader made by `prepare`. Attributes that it lacks (`batch_size`, `collate_fn`, ...) are the user's loader's.

    `end_of_dataloader` is True while the current batch is this rank's last. `share` says what is real in the current
    round, None if all of it is; it is the argument of `trim`. `remainder` is the number of real samples in the last
    round: 0 if all are and, with one process, the batch is not shorter than the others; -1 before the end and if
    unknown.
    """

    end_of_dataloader: bool
    share: RoundPadding | None
    remainder: int
    skip_batches: int
    position: ReadPosition
    _rest_after: tuple[EarlierDeal, ...] = ()
    # The epoch that `set_epoch` has told a map-style dataset of already.
    _told_epoch: int | None = None
    # What `load_state_dict` has replaced: the attributes of `tickets`, and the state of the generator.
    _before_load: tuple[dict[str, Any], torch.Tensor | None] | None = None

    def _setup(self, parts: LoaderParts, position: ReadPosition | None = None, skip_batches: int = 0) -> None:
        self.parts = parts
        self.position = position or ReadPosition()
        self.skip_batches = skip_batches
        self.end_of_dataloader, self.share, self.remainder = False, None, -1
        parts.rng_types = check_rng_types(parts.rng_types)
        self._become_stateful()

    def _become_stateful(self) -> None:
        if self.parts.use_stateful_dataloader:  # torchdata is optional, so the class is not defined at import
            self.__class__ = _stateful_class(type(self))

    def tell(self, name: str) -> None:
        """Publish the position of loops over this loader to telemetry under `name`."""
        self.telemetry_name = name
        telemetry.offer_source(name, _position_source(name, weakref.ref(self)))

    def __copy__(self) -> PreparedLoader:
        # Not by `__setstate__`: the copy would publish its position in place of this loader, also after its end.
        copied = _new_loader(getattr(type(self), "_plain_class", type(self)))
        copied.__dict__.update(self.__dict__)
        copied._become_stateful()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_loader, (getattr(type(self), "_plain_class", type(self)),), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._become_stateful()
        if "telemetry_name" in state:  # in a process that replaces a dead rank
            self.tell(state["telemetry_name"])

    # The constructor of torch's DataLoader is not called, so its attributes are those of the user's loader.
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the user's loader
        if name == "parts" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.parts.source, name)

    @property
    def base_dataloader(self) -> Any:  # noqa: ANN401 - a DataLoader
        """The loader that yields the batches, of the class of the user's loader."""
        return self.parts.inner

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """The `BatchSamplerShard`, None for an iterable dataset."""
        shard = self.parts.tickets.shard
        return shard if isinstance(shard, BatchSamplerShard) else None

    @property  # type: ignore[misc]  # torch's can be set
    def multiprocessing_context(self) -> Any:  # noqa: ANN401 - as torch's
        """Multiprocessing context of the workers, as in torch."""
        return self.parts.source.multiprocessing_context

    @property
    def device(self) -> torch.device | None:
        """Device that batches are moved to, None if they are not moved."""
        return self.parts.device

    @property
    def rng_types(self) -> list[str]:
        """Generators that get rank 0's state at the start of a pass."""
        return self.parts.rng_types

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator of the user's sampler, None if it has none."""
        return self.parts.generator

    @property
    def gradient_state(self) -> GradientState:
        """The shared state of gradient accumulation."""
        return GradientState()

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if the loader was prepared with this option, and so is an instance of torchdata's StatefulDataLoader."""
        return self.parts.use_stateful_dataloader

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
        """Return the number of this rank's batches in a whole pass. Raises TypeError for a dataset without a length.

        In an epoch that was begun with another number of ranks it is the number of batches in the rest.
        """
        if earlier := self.position.resume_after or self._rest_after:
            return self.parts.tickets.remaining(earlier)
        return max(0, self.parts.length() - self.skip_batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines its shuffle and random numbers.

        The user's batch sampler, its samplers and the dataset get the same call, if they have a `set_epoch`. Without a
        call, every pass has the epoch after the previous one.
        """
        self.position.set_epoch(epoch)
        self.parts.tickets.set_epoch(epoch)
        dataset = self.parts.source.dataset
        if callable(tell := getattr(dataset, "set_epoch", None)):
            tell(epoch)
            self._told_epoch = epoch

    def seen(self) -> SeenSamples:
        """Return which ranks have read which samples in the current epoch, or in the last one. A collective.

        The result counts the samples of every rank, names samples that were read more than once, and after the end of
        an epoch those that no rank has read. Samples that are repeated to fill up the last round are counted apart. For
        a `Subset`, samples are numbered as in the dataset below it. For an iterable dataset, the numbers are positions
        in the stream.

        Example::

            loader = accelerator.prepare(loader)
            for batch in loader:
                ...
            loader.seen()  # shown as a table by the last line of a cell
        """
        return gather_seen(parts_of(self))

    def peek(self) -> Any:  # noqa: ANN401 - a batch
        """Return the first batch of the next pass, and stay where the loader is. A collective, as a pass is.

        Also the generator of the sampler keeps its state. Raises `InvalidArgument` if this rank gets no batch, and
        inside of a loop over this loader, which another pass would end.
        """
        active = GradientState().dataloader_references[1:]
        if any(getattr(loader, "position", None) is self.position for loader in active):
            raise InvalidArgument("expected no loop over this loader: pass batch=… inside of a loop")
        generator = self.parts.generator
        state = None if generator is None else generator.get_state()
        owners = (self.position, self.parts.tickets, *_sharing_generator(self))
        kept = [(owner, dict(vars(owner))) for owner in owners]
        own = {name: self.__dict__[name] for name in _PASS_ATTRIBUTES if name in self.__dict__}
        batches = iter(self)
        try:
            for batch in batches:
                return batch
        finally:
            batches.close()  # type: ignore[attr-defined]
            run, seed, seeded_by = self.position.run, self.position.seed, self.position.seeded_by
            for owner, attributes in kept:
                vars(owner).clear()
                vars(owner).update(attributes)
            self.position.seed, self.position.seeded_by = seed, seeded_by  # the pass draws the same
            self.position.run = run  # an iterator of this pass must not go on with the restored position
            self.__dict__.update(own)
            if generator is not None:
                assert state is not None
                generator.set_state(state)
        raise InvalidArgument("the loader has no batch on this rank")

    def state_dict(self) -> dict[str, Any]:
        """Return the position (seed, epoch, batches delivered) and other state that a resumed run continues from.

        If this process trains, but not in the last loop over this loader, such as an evaluation that was left with
        `break`, the position is that before this loop: the next evaluation shall not begin in the middle.
        """
        # Without a backward pass or a step in this process nothing tells which loops train.
        at_start = self.position.left_untrained and not self.position.is_over and window.updates > 0
        position = replace(self.position, delivered=self.position.start) if at_start else self.position
        samples = self.parts.tickets.samples_before(position.delivered)
        state = position.state_dict(self.parts.num_processes, self.parts.total_rows, samples)
        state["dataset_length"] = reader_state.dataset_length(self)
        if state["finished"] and not self.position.restore and self.parts.generator is not None:
            state["generator"] = self.parts.generator.get_state()
        if self.parts.stateful and not at_start:
            skip = self.parts.tickets.current.skip
            state["reader"] = reader_state.capture_state(
                self.parts.inner, self.parts.fetch, self.position, self.parts.rank_and_count, skip
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue where `state_dict` was taken, also with other numbers of workers or ranks.

        With another number of ranks, the rest of the epoch consists of the samples that no rank has had, each once. Its
        last batches may be smaller. If the loader cannot find these samples, it starts the epoch anew and warns. Raises
        `InvalidArgument` for what is not a state of a loader.

        Leave a loop over this loader with `break` before or after the call. A loop that goes on keeps its position, and
        warns.
        """
        parts, position = self.parts, self.position
        is_first_load = position.replaced is None
        position.load_state_dict(state_dict, parts.num_processes, parts.total_rows, last_seed())
        generator = parts.generator
        if is_first_load:
            self._before_load = dict(vars(parts.tickets)), None if generator is None else generator.get_state()
        # After a finished pass, the generator is restored at once: the user may seed it before the next pass.
        if generator is not None and position.generator is not None and not position.restore:
            generator.set_state(position.generator)
        parts.tickets.forget_pass()
        _loaded.add(self)
        self._note_seed()
        earlier = position.resume_after
        has_stream = parts.stateful and isinstance(parts.fetch, StatefulIterable) and position.reader is not None
        if not earlier or has_stream or parts.tickets.can_deal_rest(earlier):
            return
        position.start_anew()
        if isinstance(parts.source.dataset, IterableDataset):
            reason = "an iterable dataset needs the methods state_dict and load_state_dict for that"
        else:
            reason = f"its {type(parts.source.batch_sampler).__name__} gives only the samples of one rank"
        warnings.warn(
            f"the loader starts epoch {position.next_epoch()} anew: it was saved with {state_dict['world_size']} ranks "
            f"in the middle of the epoch, and cannot continue there with {parts.num_processes}; {reason}",
            stacklevel=2,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # The body of this generator runs at the first `next`, so the collectives of `_begin` run when the loop begins
        # and not in `iter(loader)`.
        self._begin()
        self._rest_after = self.position.earlier
        state, position, device = GradientState(), self.position, self.parts.device
        if device is not None and device.type == "cpu" and not torch.accelerator.is_available():
            device = None  # without an accelerator, all batches are on the CPU
        run, non_blocking, updates = position.run, self.parts.non_blocking, window.updates
        others = _note_beginning(state.dataloader_references)
        try:
            with state.iterating(self):
                for batch, share, last in self._arrivals():
                    if device is not None:
                        batch = send_to_device(batch, device, non_blocking)  # noqa: PLW2901 - the same, elsewhere
                    # Another loop over this loader, or over one from `skip_first_batches`, may have started while this
                    # one is suspended. Then the position belongs to that one.
                    if position.run == run:  # no later pass has started
                        self.share = share
                        # Counted before the batch is yielded: a state that is saved in the loop's body continues after
                        # this batch.
                        position.delivered += 1
                        # The position and `end_of_dataloader` change before the last batch is yielded, since
                        # `accumulate` asks for them in the body of the loop.
                        if last:
                            self._end(share, batch)
                    yield batch
                    # After its last batch the loop ends, and the next one begins at the loaded position.
                    replaced = position.replaced
                    if replaced is not None and position.run == run and not replaced.finished:
                        self._keep_running_pass(replaced)
                if position.run == run and not position.finished:  # this rank had no batch at all
                    self._end(None)
                if state.initialized:  # it may have been reset while this generator was alive
                    _note_end(state.dataloader_references, others)
        finally:
            if position.run == run:
                self._rest_after = ()
                position.left_untrained = not position.finished and window.updates == updates
                if not position.finished and position.partner_ended == position.delivered:
                    position.is_over = True
                    if window.after_partner_ended is not None:
                        window.after_partner_ended(position)

    def _keep_running_pass(self, replaced: ReadPosition) -> None:
        """Discard the loaded position, since the loop that was running at the load goes on. Warns."""
        parts, position = self.parts, self.position
        vars(position).update(vars(replaced))
        if self._before_load is not None:  # None if a loader from `skip_first_batches` has loaded the state
            attributes, generator_state = self._before_load
            vars(parts.tickets).update(attributes)
            if parts.generator is not None and generator_state is not None:
                parts.generator.set_state(generator_state)
        self._note_seed()
        warnings.warn(
            "the position of the loader is not restored: the loop that was running at the load goes on, after batch "
            f"{position.delivered} of epoch {position.epoch}; to continue at the loaded position, leave the loop with "
            "break and begin another one",
            stacklevel=3,
        )

    def _note_seed(self) -> None:
        """Note the seed of the position, so that no other loader gets it."""
        parts, position = self.parts, self.position
        if position.seed is not None and parts.options is not None and parts.data_seed is None:
            note_loader_seed(position, position.seed)

    def _end(self, share: RoundPadding | None, batch: object = None) -> None:
        self.end_of_dataloader = self.position.finished = True
        # All samples of the last round are real.
        if share is None:
            self.remainder = self._rows_of_short_batch(batch)
        else:
            self.remainder = -1 if WHOLE in share.real else sum(share.real)

    def _rows_of_short_batch(self, batch: object) -> int:
        """Return the samples of a last batch that is shorter than the others; 0 for another one, and if unknown."""
        length = reader_state.dataset_length(self)
        if self.parts.num_processes > 1 or not self.parts.total_rows or length is None:
            return 0
        rest = length % self.parts.total_rows
        try:
            return rest if find_batch_size(batch) == rest else 0
        except InvalidArgument:
            return 0

    def _begin(self) -> None:
        """Agree with the other ranks on seed, epoch, position and random states of the pass, and start its requests.

        The seed is the first of: `data_seed`, the seed of the earlier passes (unless `set_seed` was called since, which
        counts from the next epoch on if the pass is continued in the middle), and one from the seed of this run that no
        other loader has, see `loader_seed`. With `synchronized`, rank 0's values are used on all ranks.
        """
        parts, position = self.parts, self.position
        self._before_load = None
        # Which seed. A loader keeps the seed of its first pass, so that epochs differ by their number alone and a
        # checkpoint needs one seed. A later `set_seed` is an explicit wish for another one.
        if parts.data_seed is not None:
            seed = parts.data_seed
        elif position.seed is not None and (position.resumes or last_seed() in {None, position.seeded_by}):
            seed = position.seed
        else:
            # Loaders whose ranks the caller has chosen are the parts of one loader.
            seed = run_seed() if parts.options is None else loader_seed(position)
            position.seeded_by = last_seed()
        skip, earlier = position.resume if position.resumes else self.skip_batches, position.resume_after
        epoch = position.next_epoch()
        generator = parts.generator
        # A resumed pass shuffles with the user's generator in the state that it had when the pass began.
        if generator is not None and position.restore and position.generator is not None:
            _restore_late(self, generator, position.generator)
        # Ranks may have loaded different checkpoints, or have drawn different seeds. From here on all of them use rank
        # 0's values, so that their shares fit together.
        if parts.synchronized:
            seed, epoch, skip, earlier = _broadcast_from_first(seed, epoch, skip, earlier, self._fingerprints())
            others = [name for name in parts.rng_types if name != "generator"]
            if others or generator is not None:
                synchronize_rng_states([*others, *(["generator"] if generator is not None else [])], generator)
        if parts.options is not None and parts.data_seed is None:
            note_loader_seed(position, seed)
        # The state before the sampler draws from it, for a resume in the middle of the pass.
        position.generator = None if generator is None else generator.get_state()
        first = skip
        # Iterable datasets, and samplers, are told where they are read. Workers have copies of this dataset, see
        # `MapReader`.
        is_read_by_index = not isinstance(parts.source.dataset, IterableDataset)
        tell = getattr(parts.source.dataset, "set_epoch", None)
        if is_read_by_index and self._told_epoch != epoch and callable(tell):
            tell(epoch)
        self._told_epoch = None
        if parts.stateful and position.reader is not None:
            first = reader_state.restore_state(parts.inner, parts.fetch, parts.rank_and_count, position, skip)
        position.begin(seed, epoch, skip, earlier)
        self.end_of_dataloader, self.share, self.remainder = False, None, -1
        parts.tickets.begin(EpochState(position.run, seed, epoch, first, earlier))
        # torch's iterator draws the base seed of its workers from this generator, or from the global one if there is
        # none. One of its own keeps the global one unchanged by loaders. The seed itself has no effect on the batches,
        # but a `worker_init_fn` may use it.
        source = parts.source.generator
        if source is None:
            workers = torch.Generator()
            workers.manual_seed(stream_seed(seed, epoch, "workers", parts.process_index) >> 193)
        else:
            # The sampler may draw from the same one. It is advanced here by that one number in every pass: torch draws
            # it only where it makes an iterator, which persistent workers keep, and a rank that has resumed has not.
            workers = torch.Generator(source.device)
            workers.set_state(source.get_state())
            torch.empty((), dtype=torch.int64, device=source.device).random_(generator=source)
        parts.inner.generator = workers

    def _fingerprints(self) -> tuple[int, int]:
        """Return fingerprints of dataset and sampler for the first pass; later, and for a rank's own part, 0."""
        parts = self.parts
        if self.position.run or parts.split_reported or len(parts.tickets.ranks) > 1 or parts.deal is None:
            return 0, 0
        return fingerprint_dataset(parts.source.dataset), fingerprint_sampler(parts.source)

    def _arrivals(self) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
        raise NotImplementedError


_loaded: weakref.WeakSet[PreparedLoader] = weakref.WeakSet()
"""The loaders that have loaded a state."""


def _sharing_generator(loader: PreparedLoader) -> list[ReadPosition]:
    """Return the positions of other loaders that have loaded a state and draw from the generator of `loader`."""
    generator = loader.parts.generator
    if generator is None:
        return []
    loaders = [other for other in tuple(_loaded) if other.parts.generator is generator]
    return [other.position for other in loaders if other.position is not loader.position]


def _restore_late(loader: PreparedLoader, generator: torch.Generator, state: torch.Tensor) -> None:
    """Put the generator of `loader` into `state`, at the start of a pass.

    This overwrites the state that loaders after a finished pass have restored at their load, so these restore it again.
    The first of their passes does, and the following ones draw from what that leaves, as in a run without an
    interruption.
    """
    generator.set_state(state)
    for other in _sharing_generator(loader):
        # `replaced` is None if it has begun a pass since the load.
        if other.resumes or other.generator is None or other.replaced is None:
            continue
        if loader.position.resumes:
            other.restore = True
        elif torch.equal(other.generator, state):
            other.restore = False


# Two loaders that are read in turn, as in `zip(labelled, unlabelled)`. The loop is over when the shorter one has ended.
# The longer one is left in the middle of its pass then, and shall begin its next epoch, also in a run that is resumed.
# A loop within another one is told from that by the batches of the outer loader: it delivers none during the inner one.


def _note_beginning(loaders: Iterable[Any]) -> dict[int, tuple[int, int]]:
    """Note that the loop over the active `loaders` goes on with another pass, and return how far they are.

    That is the number of the pass and of the batches delivered, by the identity of the loader's position.
    """
    positions = [loader.position for loader in loaders if isinstance(loader, PreparedLoader)]
    for position in positions:
        position.partner_ended = -1
    return {id(position): (position.run, position.delivered) for position in positions}


def _note_end(loaders: Iterable[Any], before: Mapping[int, tuple[int, int]]) -> None:
    """Note the end of a pass in the active `loaders` that have delivered during it, by their progress `before` it."""
    for loader in loaders:
        if isinstance(loader, PreparedLoader):
            position = loader.position
            if before.get(id(position)) != (position.run, position.delivered):
                position.partner_ended = position.delivered


_stateful_classes: dict[type[PreparedLoader], type[PreparedLoader]] = {}


def _stateful_class(kind: type[PreparedLoader]) -> type[PreparedLoader]:
    """Return a class like `kind` that is also a subclass of torchdata's StatefulDataLoader."""
    if kind not in _stateful_classes:
        members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain_class": kind}
        _stateful_classes[kind] = type(kind.__name__, (kind, require_stateful_dataloader()), members)
    return _stateful_classes[kind]


def _new_loader(kind: type[PreparedLoader]) -> PreparedLoader:
    return kind.__new__(kind)


def _broadcast_from_first(
    seed: int, epoch: int, skip: int, earlier: tuple[EarlierDeal, ...], fingerprints: tuple[int, int]
) -> tuple[int, int, int, tuple[EarlierDeal, ...]]:
    """Return rank 0's values. A collective. Warns if this rank's fingerprints are not those of rank 0."""
    # The earlier deals have no fixed length, so their sums are sent. These are all that the next pass needs.
    sums = [sum(deal.batches for deal in earlier), sum(deal.samples for deal in earlier)]
    numbers = [seed >> 32, seed & _LOW, epoch, skip, *sums, *fingerprints]
    values = torch.tensor(numbers, dtype=torch.int64, device=control_device())
    dist.broadcast(values, src=0)
    high, low, epoch, skip, batches, samples, *first_fingerprints = values.tolist()
    for what, mine, first in zip(("dataset", "sampler"), fingerprints, first_fingerprints, strict=True):
        if mine and first and mine != first:
            warnings.warn(difference_warning(what, dist.get_rank()), stacklevel=4)
            break
    if [batches, samples] != sums:  # this rank has loaded another state
        earlier = (EarlierDeal(1, 0, batches, samples),) if batches else ()
    return high << 32 | low, epoch, skip, earlier


def is_default_group(num_processes: int) -> bool:
    """Return True if the loader's ranks are those of the default process group."""
    return num_processes > 1 and PartialState().use_distributed and PartialState().num_processes == num_processes


def build_loader_parts(
    source: Any,  # noqa: ANN401 - a DataLoader
    ranks: int,
    rank: int,
    *,
    split_batches: bool = False,
    even_batches: bool = True,
    every_rank: bool = False,
    numbering: tuple[int, int] | None = None,
    stateful: bool = False,
    seedable: bool = False,
    data_seed: int | None = None,
) -> LoaderParts:
    """Return the parts of the prepared loader for `source`. With `every_rank`, this process reads for all ranks."""
    served_ranks = tuple(range(ranks)) if every_rank else (rank,)
    even_batches = even_batches and ranks > 1  # even_batches has no effect on a single rank
    # `batch_size=None`: the dataset's items are batches already.
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
        # The dispatcher reads for all ranks; torchdata's state is one of a rank and its workers.
        keeps_state = stateful and not every_rank
        fetch = (StatefulIterable if keeps_state else IterableReader)(source.dataset, stream, source.collate_fn, single)
    else:
        # A BatchSampler in place of the sampler gives lists of indices, which the dataset takes as they are.
        lists = single and isinstance(source.sampler, BatchSampler)
        below = source.sampler if lists else SingleItemSampler(source.sampler) if single else source.batch_sampler
        shuffle = Shuffle(below, seedable)
        generator = shuffle.user_generator
        is_split = split_batches and (lists or not single)
        shard = BatchSamplerShard(shuffle.batch_sampler, ranks, rank, is_split, even_batches)
        kind = UnbatchedSampler if single and not lists else MapBatchSampler
        tickets = kind(shard, shuffle, served_ranks, numbering)
        rows = 0 if single and not lists else (shard.batch_size or 0) // (ranks if shard.split_batches else 1)
        keeps_state = stateful and not every_rank and is_stateful(source.dataset)
        fetch = (StatefulReader if keeps_state else MapReader)(source.dataset, source.collate_fn, single, lists)
    stateful_kind = require_stateful_dataloader() if stateful else None
    inner = _copy(source, tickets, fetch, stateful_kind)
    # A subclass with an `__iter__` of its own may drop or add batches, so the metadata cannot be trusted, see
    # `_read_custom`.
    custom_iter = type(inner).__iter__ not in {DataLoader.__iter__, getattr(stateful_kind, "__iter__", None)}
    world_size = ranks if numbering is None else numbering[0]
    return LoaderParts(
        source=source,
        inner=inner,
        tickets=tickets,
        fetch=fetch,
        num_processes=world_size,
        process_index=rank if numbering is None else numbering[1],
        total_rows=rows * world_size,
        length=tickets.__len__,
        custom_iter=custom_iter,
        stateful=isinstance(fetch, StatefulReader | StatefulIterable) and not custom_iter,
        use_stateful_dataloader=stateful,
        data_seed=data_seed,
        generator=generator,
    )


def _copy(source: Any, tickets: Any, fetch: Any, stateful: type[Any] | None) -> Any:  # noqa: ANN401 - a DataLoader
    """Return a loader like `source` that reads `tickets` through `fetch`, of torchdata's class if `stateful`."""
    start = source.worker_init_fn
    if start is not None:
        start = WorkerInit(source.dataset, start, isinstance(source.dataset, IterableDataset))
    if stateful is not None and not isinstance(source, stateful):
        # A plain DataLoader cannot be turned into torchdata's class by copying; this is the one case where a
        # constructor is called, with torchdata's own class.
        inner = stateful(
            fetch,
            batch_sampler=tickets,
            collate_fn=identity,
            worker_init_fn=start,
            **{name: getattr(source, name) for name in _COPIED_OPTIONS},
        )
    else:
        inner = copy.copy(source)
    inner.__dict__.update(  # torch's `__setattr__` refuses most of these
        dataset=fetch,
        batch_sampler=tickets,
        collate_fn=identity,
        worker_init_fn=start,
        # An iterable dataset is read through a map-style reader, too: requests carry the order.
        _dataset_kind=_DatasetKind.Map,
        _iterator=None,
        in_order=True,  # the position counts batches in order
    )
    return inner


_COPIED_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def iterate_local(parts: LoaderParts) -> Iterator[tuple[Any, RoundPadding | None, bool]]:
    """Yield this process's batches as (batch, what is real in its round, True for the last)."""
    inner = parts.inner
    # An interrupt reaches the workers too, also idle ones, and torch's workers end without an error. torch keeps an
    # iterator of persistent workers only, except for torchdata's loader.
    workers = getattr(inner._iterator, "_workers", ())
    if not all(worker.is_alive() for worker in workers):
        inner.__dict__["_iterator"] = None  # the next one starts new workers
    try:
        if parts.custom_iter:
            yield from _read_custom(parts)
            return
        pinned = inner.pin_memory and torch.accelerator.is_available()
        # Any subclass may have overridden what its iterator does.
        in_process = type(inner) is DataLoader and not inner.num_workers and not pinned
        for fetched in _read_in_process(parts) if in_process else iter(inner):
            if type(fetched) is not FetchedBatch:
                yield fetched, None, False
                continue
            # This rank reads for itself and has no further batch. The dispatcher needs the entry to complete the round.
            if fetched.absent and len(parts.tickets.ranks) == 1:
                return
            yield fetched if fetched.absent else fetched.batch, fetched.share, fetched.last
    except KeyboardInterrupt:
        # The workers end once they have read the current sample. torchdata's iterator has the state for a checkpoint.
        if not parts.use_stateful_dataloader:
            inner.__dict__["_iterator"] = None
        raise


def _read_in_process(parts: LoaderParts) -> Iterator[Any]:
    """Read in this process without torch's iterator, whose overhead exceeds the time to read a small batch."""
    return map(parts.fetch.__getitems__, parts.tickets)


class BatchUnwrapper:
    """torch's iterator without the metadata of batches; a user-defined `__iter__` reads from it.

    `count` is the number of batches read, and `fetched` the metadata of the last one.
    """

    def __init__(self, iterator: Any) -> None:  # noqa: ANN401 - torch's
        self._iterator = iterator
        self.count = 0
        self.fetched: FetchedBatch | None = None

    def __iter__(self) -> BatchUnwrapper:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - a batch
        fetched = next(self._iterator)
        self.fetched = fetched if type(fetched) is FetchedBatch else None
        if self.fetched is not None and self.fetched.absent:
            raise StopIteration
        self.count += 1
        return fetched if self.fetched is None else self.fetched.batch

    def _reset(self, loader: Any) -> None:  # noqa: ANN401 - called by torch for persistent workers
        self.count, self.fetched = 0, None
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
    inner, unwrappers = parts.inner, []
    # torch's `__iter__` calls `self._get_iterator()`. Replaced in the instance, it gives the user's `__iter__` an
    # iterator that hides the metadata and counts the batches.
    make = type(inner)._get_iterator

    def get_iterator() -> BatchUnwrapper:
        unwrappers.append(BatchUnwrapper(make(inner)))
        return unwrappers[-1]

    inner.__dict__["_get_iterator"] = get_iterator
    # Persistent workers: torch keeps the iterator of the first pass and resets it.
    if isinstance(inner._iterator, BatchUnwrapper):
        unwrappers.append(inner._iterator)
    batches = iter(inner)
    count, nothing = 0, object()
    batch = next(batches, nothing)
    while batch is not nothing:
        fetched = unwrappers[-1].fetched if unwrappers else None
        following = next(batches, nothing)
        count += 1
        last = following is nothing
        # With one batch read ahead, the counter is one further than the yielded batches, except at the end.
        one_to_one = bool(unwrappers) and unwrappers[-1].count == count + (0 if last else 1)
        yield batch, fetched.share if fetched and one_to_one else None, last
        batch = following
