"""Loader state for checkpoints: the position in the data, and the dataset state kept by torchdata's StatefulDataLoader.

`ReadPosition` is (seed, epoch, batches delivered). It determines the next batch, for any number of workers.

Another number of ranks. All ranks together have had the first samples of the epoch, in the order that (seed, epoch)
determines for any number of ranks. The new ranks make that order again, leave out these samples, and share the others:
`EarlierDeal` says how many there were. This may happen several times in an epoch. The state of a loader lists all
earlier deals, and its `batches` are counted since the last of them.

Dataset state. torchdata returns the state that the dataset had, in every worker, after the last delivered batch,
regardless of how far workers have read ahead. The state of a map-style dataset belongs to one rank and its workers. If
the number of ranks or workers has changed, the batches are still right, but the dataset's own state starts afresh, and
a warning says so. An iterable dataset is one stream, which all workers of all ranks run completely. So the state of the
worker that delivered the last batch is restored in all of them, for any number of workers and ranks.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rankbook.errors import InvalidArgument
from rankbook.runtime.data.batch_reader import BatchRequest, IterableReader, MapReader
from rankbook.runtime.data.samplers import Dealt, EarlierDeal, mark_last

_ROUND = "stream_round"


class StatefulReader(MapReader):
    """Reader of a map-style dataset that has a state.

    torchdata looks for `state_dict` and `load_state_dict` on the class.
    """

    def state_dict(self) -> Any:  # noqa: ANN401 - the dataset's
        """Return the dataset's state."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401 - the dataset's
        """Restore the dataset's state."""
        self.dataset.load_state_dict(state)


class StatefulIterable(IterableReader):
    """Reader of an iterable dataset that may have a state, itself or in its iterators.

    A round is read before its request arrives, so that the last round is known to be the last. Therefore
    `_round_states` keeps the states after the last two rounds, and `state_dict` returns the one of the latest request.
    `resume` is the state that one run starts from.
    """

    _stream: Any = None
    _round_states: tuple[tuple[int, dict[str, Any]], ...] = ()
    _initial_state: dict[str, Any] | None = None  # state of the dataset before this process has read from it
    _pass_start_state: dict[str, Any] | None = None  # state of the dataset at the start of the pass
    _reapplies_loaded_state: bool | None = None
    resume: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stream": None, "_round_states": ()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the round of the latest request."""
        # torchdata asks after every batch, when `mark_last` has already read one round further. The state after that
        # round would skip a round on resume.
        state = next((recorded for number, recorded in self._round_states if number == self._round_number), None)
        return (
            {_ROUND: -1}
            if state is None
            else {_ROUND: self._round_number, "state": state, "start": self._pass_start_state}
        )

    def load_state_dict(self, state: object) -> None:
        """Do nothing: a pass starts from `resume`."""

    def _restart(self, request: BatchRequest) -> None:
        self._round_states = ()
        # Only in the first pass of this process: later the dataset may continue from where the previous pass ended.
        if self._initial_state is None:
            self._initial_state = self._state_before()
        resume, shard = self.resume, self._shard
        # `resume` is for one pass. The following ones start like any other.
        if resume is None or resume["run"] != request.run:
            self._pass_start_state = self._new_pass_state(self._initial_state)
            self._stream = self._open(request)
            self._rounds = mark_last(self._rounds_of(request, self._stream))
            return
        self._pass_start_state, first = resume["start"], resume["first"]
        # In these cases the last round needs the samples of round 0, see `split_samples`.
        filled_up = shard.even_batches and not shard.drop_last and not request.earlier
        initial = self._read_first_samples(request, resume["start"]) if filled_up else []
        # The state was taken after the round `first` - 1, so the stream continues with `first`.
        self._stream = self._open_with_state(request, resume["state"])
        self._round_number = first - 1
        rounds = shard.dealt(self._stream, first, initial, is_rest=bool(request.earlier))
        done = sum(deal.batches for deal in request.earlier)
        self._rounds = mark_last(self._seed_rounds(request, rounds, done + first))

    def _seed_rounds(self, request: BatchRequest, rounds: Iterator[Dealt], first: int = 0) -> Iterator[Dealt]:
        for dealt in super()._seed_rounds(request, rounds, first):
            # Copies of the state after the last two rounds: the one just read, and the one before, which is delivered
            # now.
            self._round_states = (*self._round_states[-1:], (dealt.number, self._state()))
            yield dealt

    def _new_pass_state(self, initial_state: dict[str, Any]) -> dict[str, Any]:
        """Return the state at the start of a pass for which no state was loaded.

        Some datasets apply a loaded state only when they are read, and start every later pass from it too, or from that
        of a new one. These are reset to their initial state. All others continue from their current state.
        `_reapplies_loaded_state` records which kind the dataset is, once known.
        """
        now = self._state_before()
        # Nothing to do: the dataset has no state, or is as it was at the beginning.
        if not now or (self._reapplies_loaded_state is None and _same(now, initial_state)):
            return now
        if self._reapplies_loaded_state is not False:
            self._load(initial_state)
        if self._reapplies_loaded_state:
            return initial_state
        # Find out which kind the dataset is: load the initial state, and see whether it shows at once. If not, the
        # dataset applies it when it is read. Either way the dataset is left in the state for the new pass.
        if self._reapplies_loaded_state is None:
            self._reapplies_loaded_state = not _same(self._dataset_state(), initial_state)
            self._load({} if self._reapplies_loaded_state else now)
        return initial_state if self._reapplies_loaded_state else now

    def _read_first_samples(self, request: BatchRequest, start: dict[str, Any]) -> list[Any]:
        """Read the samples of the first round again, which fill up the last round: a checkpoint contains no samples."""
        stream = self._open_with_state(request, start)
        with self._rng.seeded(request.seed, request.epoch, "round", 0):
            try:
                return self._shard.first_samples(stream)
            finally:
                if callable(close := getattr(stream, "close", None)):
                    close()

    def _open_with_state(self, request: BatchRequest, state: dict[str, Any]) -> Any:  # noqa: ANN401 - an iterator
        before = self._state_before()
        self._load(state)
        # The loaded state differs from the current one. If the dataset still reports the current one, it applies the
        # loaded state later.
        if "dataset" in state and not _same(before, {"dataset": state["dataset"]}):
            self._reapplies_loaded_state = _same(before, self._dataset_state())
        # Loading a state may have created generators.
        self._rng.search_again()
        stream = self._open(request)
        if "iterator" in state:
            stream.load_state_dict(copy.deepcopy(state["iterator"]))
        return stream

    def _load(self, state: dict[str, Any]) -> None:
        if "dataset" in state:
            self.dataset.load_state_dict(copy.deepcopy(state["dataset"]))

    def _dataset_state(self) -> dict[str, Any]:
        return {"dataset": copy.deepcopy(self.dataset.state_dict())} if is_stateful(self.dataset) else {}

    def _state_before(self) -> dict[str, Any]:
        try:
            return self._dataset_state()
        except AttributeError:  # some datasets create their state in `__iter__`
            return {}

    def _state(self) -> dict[str, Any]:
        # A dataset that is its own iterator has one state, which is read below.
        state = {} if self._stream is self.dataset else self._dataset_state()
        if is_stateful(self._stream):
            state["iterator"] = copy.deepcopy(self._stream.state_dict())
        return state


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401 - any state
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays compare elementwise
        return pickle.dumps(one) == pickle.dumps(other)


def is_stateful(dataset: Any) -> bool:  # noqa: ANN401 - any dataset
    """Return True if a dataset has `state_dict` and `load_state_dict`."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def dataset_length(loader: Any) -> int | None:  # noqa: ANN401 - any loader
    """Return the number of samples in the dataset of a loader, None if it has no length."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def capture_state(
    inner: Any,  # noqa: ANN401 - torch's iterator
    fetch: Any,  # noqa: ANN401 - torch's fetcher
    position: ReadPosition,
    rank_and_count: tuple[int, int],
    skip: int,
) -> dict[str, Any] | None:
    """Return the state for `restore_state`, None if there is none, since workers of a finished pass have ended.

    `inner` is the StatefulDataLoader, `rank_and_count` this rank and the number of ranks, and `skip` the number of
    rounds that its pass left out at the start. The state of an iterable dataset belongs to one pass; every pass starts
    afresh.
    """
    # A loaded state that no pass has used yet is passed on unchanged.
    if position.reader is not None:
        return position.reader
    in_pass = not (position.finished or position.is_over)
    reading = in_pass and position.requested_epoch is None and inner._iterator is not None
    if isinstance(fetch, StatefulIterable):
        # One state per worker; the one of the worker that delivered the last batch belongs to round `delivered` - 1.
        states = _stream_states(inner.state_dict()) if reading else []
        matches = [entry for entry in states if entry[_ROUND] == position.delivered - 1 and entry["state"]]
        return copy.deepcopy(matches[0]) if matches else None
    # A map-style dataset: its state belongs to this rank and its workers, so these are recorded for the comparison.
    header = {"place": list(rank_and_count), "workers": inner.num_workers}
    if reading:
        state = copy.deepcopy(inner.state_dict())
        return {**header, "delivered": position.delivered, "skip": skip, "state": state}
    return None if inner.num_workers else {**header, "dataset": copy.deepcopy(fetch.state_dict())}


def _stream_states(state: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - torchdata's, of any version
    """Return the states of the `StatefulIterable` of every worker, wherever torchdata has nested them."""
    if not isinstance(state, dict):
        return []
    if _ROUND in state:
        return [state] if "state" in state else []
    return [stream_state for child in state.values() for stream_state in _stream_states(child)]


def restore_state(inner: Any, fetch: Any, rank_and_count: tuple[int, int], position: ReadPosition, skip: int) -> int:  # noqa: ANN401
    """Make the next pass of `inner` continue from a captured state; return the number of rounds to skip.

    `skip` is the number of rounds that all ranks leave out at the start, as rank 0 determined. The result is smaller if
    the restored state accounts for some of these rounds.
    """
    saved, stream = position.reader or {}, isinstance(fetch, StatefulIterable)
    if stream != (_ROUND in saved):
        _warn("it was saved for another kind of dataset", stream)
        return skip
    if stream:
        if skip != position.resume:
            _warn(f"it was saved after {position.resume} rounds, but rank 0 continues after {skip}", stream)
            return skip
        fetch.resume = {**saved, "first": skip, "run": position.run + 1}
        inner.__dict__["_iterator"] = None  # persistent workers do not have this state
        return skip
    now = {"place": list(rank_and_count), "workers": inner.num_workers}
    then = {name: saved[name] for name in now}
    if now != then:
        (rank, ranks), (rank_now, ranks_now) = then["place"], now["place"]
        _warn(
            f"it was saved on rank {rank} of {ranks} with {then['workers']} workers, but this is rank {rank_now} of "
            f"{ranks_now} with {now['workers']} workers",
            stream,
        )
        return skip
    if saved.get("delivered", skip) != skip:
        _warn(f"it was saved after {saved['delivered']} batches, but this rank continues after {skip}", stream)
        return skip
    if "dataset" in saved:
        fetch.load_state_dict(copy.deepcopy(saved["dataset"]))
        return skip
    # torchdata skips the delivered batches by itself, so only the rounds that its pass had left out remain to be
    # skipped.
    inner.load_state_dict(copy.deepcopy(saved["state"]))
    return int(saved["skip"])


def _warn(reason: str, stream: bool) -> None:
    result = "The stream is read from its beginning" if stream else "The batches are correct"
    warnings.warn(f"the state of the dataset is not restored: {reason}. {result}", stacklevel=5)


@dataclass
class ReadPosition:
    """Position of a loader in its data.

    `epoch` is the one started last, -1 before the first; `delivered` is the number of batches delivered in it, after
    its `earlier` deals to other numbers of ranks. After `load_state_dict` the next pass starts at the round `resume`
    after the deals `resume_after`, that is after `resume_samples` samples (-1: unknown). `restore` says that it has to
    restore `generator`, the state of the user's own generator at the start of the pass. `reader` is the loaded state of
    torchdata's loader, until the next pass. `seeded_by` is the seed given to `set_seed` when `seed` was fixed; a later
    `set_seed` causes a new seed. `start` is the round at which the pass has started. `left_untrained` is True if its
    loop was left early and has trained nothing. `partner_ended` is the number of batches that were delivered when the
    pass of a loader that is read in turn with this one ended; `is_over` is True if the loop was left then.
    `replaced` is the position before `load_state_dict`, until the next pass begins.
    """

    seed: int | None = None
    seeded_by: int | None = None
    epoch: int = -1
    delivered: int = 0
    finished: bool = True
    run: int = 0
    generator: torch.Tensor | None = None
    requested_epoch: int | None = None
    earlier: tuple[EarlierDeal, ...] = ()
    resume: int = 0
    resume_after: tuple[EarlierDeal, ...] = ()
    resume_samples: int = -1
    restore: bool = False
    reader: dict[str, Any] | None = None
    start: int = 0
    left_untrained: bool = False
    partner_ended: int = -1
    is_over: bool = False
    replaced: ReadPosition | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. A pending resume is kept if it is of the same epoch."""
        # `set_epoch` of another epoch discards the resume: its rounds belong to the epoch of the checkpoint.
        if self.resumes and epoch != self.next_epoch():
            self.start_anew()
            self.restore = False
        self.requested_epoch = epoch

    @property
    def resumes(self) -> bool:
        """True if the next pass does not start at the beginning of its epoch."""
        return bool(self.resume or self.resume_after)

    def start_anew(self) -> None:
        """Make the next pass start at the beginning of its epoch."""
        self.resume, self.resume_after, self.resume_samples, self.reader = 0, (), -1, None

    def next_epoch(self) -> int:
        """Return the epoch of the next pass."""
        return self.epoch + 1 if self.requested_epoch is None else self.requested_epoch

    def begin(self, seed: int, epoch: int, skip: int, earlier: tuple[EarlierDeal, ...] = ()) -> None:
        """Start a pass, `skip` batches after the `earlier` deals of its epoch."""
        # `delivered` starts at `skip`, so that it is always the number of the next round.
        self.seed, self.epoch, self.delivered, self.earlier = seed, epoch, skip, earlier
        self.finished, self.requested_epoch, self.restore = False, None, False
        self.start, self.left_untrained = skip, False
        self.partner_ended, self.is_over, self.replaced = -1, False, None
        self.start_anew()
        self.run += 1

    def state_dict(self, world_size: int, total_rows: int, samples: int | None = None) -> dict[str, Any]:
        """Return the state for `load_state_dict`.

        `total_rows` is the number of samples in a round, 0 if unknown. `samples` is the number of samples of the epoch
        that all ranks have had, None if it follows from the others.
        """
        # A state is asked for before the pass that it describes has begun, such as right after a load.
        pending = self.resumes or self.requested_epoch is not None
        batches = self.resume if pending else self.delivered
        earlier = self.resume_after if pending else self.earlier
        if pending:
            samples = self.resume_samples if self.resumes else 0
        elif samples is None:
            samples = sum(deal.samples for deal in earlier) + batches * total_rows if total_rows or not batches else -1
        return {
            "seed": self.seed,
            "epoch": self.next_epoch() if pending else self.epoch,
            "batches": batches,
            "finished": False if pending else self.finished or self.is_over,
            "world_size": world_size,
            "total_batch_size": total_rows,
            "samples": samples,
            "earlier": [list(deal) for deal in earlier],
            "generator": self.generator,
        }

    def load_state_dict(self, state: dict[str, Any], world_size: int, total_rows: int, seeded_by: int | None) -> None:
        """Make the next pass continue where `state` was taken.

        With other ranks or batches it starts after all samples delivered there. Raises `InvalidArgument` for what is
        not a state of a loader.
        """
        unknown = {"seed", "epoch", "batches", "finished", "world_size", "total_batch_size"} - set(state)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise InvalidArgument(f"invalid loader state: missing {names}; pass a state that state_dict() returned")
        self.replaced = self.replaced or replace(self)
        self.start_anew()
        self.seed, self.seeded_by = state["seed"], seeded_by
        # `next_epoch` adds one: a finished epoch is followed by the next one, an unfinished one is continued.
        self.epoch = state["epoch"] if state["finished"] else state["epoch"] - 1
        self.delivered, self.finished, self.left_untrained = 0, True, False
        self.partner_ended, self.is_over = -1, False
        self.requested_epoch = None
        if not state["finished"]:
            self._resume(state, world_size, total_rows)
        self.generator = state.get("generator")
        self.restore = self.generator is not None and not state["finished"]
        self.reader = state.get("reader")

    def _resume(self, state: dict[str, Any], world_size: int, total_rows: int) -> None:
        batches, ranks, rows = state["batches"], state["world_size"], state["total_batch_size"]
        earlier = tuple(EarlierDeal(*deal) for deal in state.get("earlier", ()))
        samples = state.get("samples", batches * rows if rows else -1)  # older checkpoints do not contain it
        # The same deal: continue at the round. Otherwise what was delivered becomes one more earlier deal.
        if (ranks, rows) == (world_size, total_rows):
            self.resume = batches
        elif batches:
            before = sum(deal.samples for deal in earlier)
            earlier += (EarlierDeal(ranks, rows, batches, samples - before if samples >= 0 else -1),)
        self.resume_after, self.resume_samples = earlier, samples
