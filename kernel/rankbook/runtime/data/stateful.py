"""Loader state for checkpoints: the position in the data, and the dataset state kept by torchdata's StatefulDataLoader.

`ReadPosition` is (seed, epoch, batches delivered). It determines the next batch, for any number of workers and ranks.

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
from dataclasses import dataclass
from typing import Any

import torch

from rankbook.errors import BadRequest
from rankbook.runtime.data.batch_reader import BatchRequest, IterableReader, MapReader
from rankbook.runtime.data.samplers import Dealt, mark_last

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

    A round is read before its request arrives, so that the last round is known to be the last. Therefore `_states`
    keeps the states after the last two rounds, and `state_dict` returns the one of the latest request. `resume` is the
    state that one run starts from.
    """

    _stream: Any = None
    _states: tuple[tuple[int, dict[str, Any]], ...] = ()
    _fresh: dict[str, Any] | None = None  # state of the dataset before this process has read from it
    _start: dict[str, Any] | None = None  # state of the dataset at the start of the pass
    _sticks: bool | None = None
    resume: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stream": None, "_states": ()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the round of the latest request."""
        state = next((recorded for number, recorded in self._states if number == self._at), None)
        return {_ROUND: -1} if state is None else {_ROUND: self._at, "state": state, "start": self._start}

    def load_state_dict(self, state: object) -> None:
        """Do nothing: a pass starts from `resume`."""

    def _restart(self, ticket: BatchRequest) -> None:
        self._states = ()
        if self._fresh is None:
            self._fresh = self._state_before()
        resume, shard = self.resume, self._shard
        if resume is None or resume["run"] != ticket.run:
            self._start = self._begin_anew(self._fresh)
            self._stream = self._open(ticket)
            self._rounds = mark_last(self._each(ticket, shard.dealt(self._stream)))
            return
        self._start, first = resume["start"], resume["first"]
        filled_up = shard.even_batches and not shard.drop_last
        initial = self._first_samples(ticket, resume["start"]) if filled_up else []
        self._stream = self._open_at(ticket, resume["state"])
        self._at = first - 1
        self._rounds = mark_last(self._each(ticket, shard.dealt(self._stream, first, initial), first))

    def _each(self, ticket: BatchRequest, rounds: Iterator[Dealt], first: int = 0) -> Iterator[Dealt]:
        for dealt in super()._each(ticket, rounds, first):
            self._states = (*self._states[-1:], (dealt[0], self._state()))
            yield dealt

    def _begin_anew(self, fresh: dict[str, Any]) -> dict[str, Any]:
        """Return the state at the start of a pass for which no state was loaded.

        Some datasets apply a loaded state only when they are read, and start every later pass from it too, or from that
        of a new one. These are reset to their initial state. All others continue from their current state. `_sticks`
        records which kind the dataset is, once known.
        """
        now = self._state_before()
        if not now or (self._sticks is None and _same(now, fresh)):
            return now
        if self._sticks is not False:
            self._load(fresh)
        if self._sticks:
            return fresh
        if self._sticks is None:
            self._sticks = not _same(self._dataset_state(), fresh)
            self._load({} if self._sticks else now)
        return fresh if self._sticks else now

    def _first_samples(self, ticket: BatchRequest, start: dict[str, Any]) -> list[Any]:
        """Read the samples of the first round again, which fill up the last round: a checkpoint contains no samples."""
        stream = self._open_at(ticket, start)
        with self._rng.seeded(ticket.seed, ticket.epoch, "round", 0):
            try:
                return self._shard.first_samples(stream)
            finally:
                if callable(close := getattr(stream, "close", None)):
                    close()

    def _open_at(self, ticket: BatchRequest, state: dict[str, Any]) -> Any:  # noqa: ANN401 - an iterator
        before = self._state_before()
        self._load(state)
        if "dataset" in state and not _same(before, {"dataset": state["dataset"]}):
            self._sticks = _same(before, self._dataset_state())
        self._rng.search_again()
        stream = self._open(ticket)
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


def capture_state(
    inner: Any,  # noqa: ANN401 - torch's iterator
    fetch: Any,  # noqa: ANN401 - torch's fetcher
    position: ReadPosition,
    place: tuple[int, int],
    skip: int,
) -> dict[str, Any] | None:
    """Return the state for `restore_state`, None if there is none, since workers of a finished pass have ended.

    `inner` is the StatefulDataLoader, `place` this rank and the number of ranks, and `skip` the number of rounds that
    its pass left out at the start. The state of an iterable dataset belongs to one pass; every pass starts afresh.
    """
    if position.reader is not None:
        return position.reader
    reading = not position.finished and position.wanted_epoch is None and inner._iterator is not None
    if isinstance(fetch, StatefulIterable):
        states = _told_by_streams(inner.state_dict()) if reading else []
        matches = [entry for entry in states if entry[_ROUND] == position.delivered - 1 and entry["state"]]
        return copy.deepcopy(matches[0]) if matches else None
    header = {"place": list(place), "workers": inner.num_workers}
    if reading:
        state = copy.deepcopy(inner.state_dict())
        return {**header, "delivered": position.delivered, "skip": skip, "state": state}
    return None if inner.num_workers else {**header, "dataset": copy.deepcopy(fetch.state_dict())}


def _told_by_streams(state: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - torchdata's, of any version
    """Return the states of the `StatefulIterable` of every worker, wherever torchdata has nested them."""
    if not isinstance(state, dict):
        return []
    if _ROUND in state:
        return [state] if "state" in state else []
    return [stream_state for child in state.values() for stream_state in _told_by_streams(child)]


def restore_state(inner: Any, fetch: Any, place: tuple[int, int], position: ReadPosition, skip: int) -> int:  # noqa: ANN401
    """Make the next pass of `inner` continue from a captured state; return the number of rounds to skip.

    `skip` is the number of rounds that all ranks leave out at the start, as rank 0 determined. The result is smaller if
    the restored state accounts for some of these rounds.
    """
    saved, stream = position.reader or {}, isinstance(fetch, StatefulIterable)
    if stream != (_ROUND in saved):
        _warn("it is that of another kind of dataset", stream)
        return skip
    if stream:
        if skip != position.resume:
            _warn(f"it is that after {position.resume} rounds, and rank 0 continues after {skip}", stream)
            return skip
        fetch.resume = {**saved, "first": skip, "run": position.run + 1}
        inner.__dict__["_iterator"] = None  # persistent workers do not have this state
        return skip
    now = {"place": list(place), "workers": inner.num_workers}
    then = {name: saved[name] for name in now}
    if now != then or saved.get("delivered", skip) != skip:
        (rank, ranks), (rank_now, ranks_now) = then["place"], now["place"]
        _warn(
            f"it is that of rank {rank} of {ranks} with {then['workers']} workers, and this is rank {rank_now} of "
            f"{ranks_now} with {now['workers']}",
            stream,
        )
        return skip
    if "dataset" in saved:
        fetch.load_state_dict(copy.deepcopy(saved["dataset"]))
        return skip
    inner.load_state_dict(copy.deepcopy(saved["state"]))
    return int(saved["skip"])


def _warn(why: str, stream: bool) -> None:
    so = "The stream is read from its beginning" if stream else "The batches are right"
    warnings.warn(f"the dataset's own state is not put back: {why}. {so}", stacklevel=5)


@dataclass
class ReadPosition:
    """Position of a loader in its data.

    `epoch` is the one started last, -1 before the first; `delivered` is the number of batches delivered in it. `resume`
    is the round at which the next pass starts after `load_state_dict`, and `restore` says that it has to restore
    `generator`, the state of the user's own generator at the start of the pass. `reader` is the loaded state of
    torchdata's loader, until the next pass. `seeded_by` is the seed given to `set_seed` when `seed` was fixed; a later
    `set_seed` causes a new seed.
    """

    seed: int | None = None
    seeded_by: int | None = None
    epoch: int = -1
    delivered: int = 0
    finished: bool = True
    run: int = 0
    generator: torch.Tensor | None = None
    wanted_epoch: int | None = None
    resume: int = 0
    restore: bool = False
    reader: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. A pending resume is kept if it is of the same epoch."""
        if self.resume and epoch != self.next_epoch():
            self.resume, self.restore, self.reader = 0, False, None
        self.wanted_epoch = epoch

    def next_epoch(self) -> int:
        """Return the epoch of the next pass."""
        return self.epoch + 1 if self.wanted_epoch is None else self.wanted_epoch

    def begin(self, seed: int, epoch: int, skip: int) -> None:
        """Start a pass, `skip` batches after its beginning."""
        self.seed, self.epoch, self.delivered = seed, epoch, skip
        self.finished, self.wanted_epoch, self.resume, self.restore = False, None, 0, False
        self.reader = None
        self.run += 1

    def state_dict(self, world_size: int, total_rows: int) -> dict[str, Any]:
        """Return the state for `load_state_dict`. `total_rows` is the number of samples in a round, 0 if unknown."""
        pending = self.resume or self.wanted_epoch is not None
        return {
            "seed": self.seed,
            "epoch": self.next_epoch() if pending else self.epoch,
            "batches": self.resume if pending else self.delivered,
            "finished": False if pending else self.finished,
            "world_size": world_size,
            "total_batch_size": total_rows,
            "generator": self.generator,
        }

    def load_state_dict(self, state: dict[str, Any], world_size: int, total_rows: int, seeded_by: int | None) -> None:
        """Make the next pass continue where `state` was taken.

        Raises `BadRequest` if the batches delivered there do not end at the end of a round of this world size.
        """
        unknown = {"seed", "epoch", "batches", "finished", "world_size", "total_batch_size"} - set(state)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise BadRequest(f"this is no loader's state, for it has no {names}; take one by state_dict()")
        skip = 0 if state["finished"] else rounds_here(state, world_size, total_rows)
        self.seed, self.seeded_by = state["seed"], seeded_by
        self.epoch = state["epoch"] if state["finished"] else state["epoch"] - 1
        self.delivered, self.finished = 0, True
        self.resume, self.wanted_epoch = skip, None
        self.generator = state.get("generator")
        self.restore = self.generator is not None
        self.reader = state.get("reader")


def rounds_here(state: dict[str, Any], world_size: int, total_rows: int) -> int:
    """Return the number of rounds of this world size that equal the batches delivered in `state`."""
    batches, then, rows = state["batches"], state["world_size"], state["total_batch_size"]
    unit, before, now = ("samples", rows, total_rows) if rows and total_rows else ("batches", then, world_size)
    if before == now:
        return int(batches)
    whole, rest = divmod(batches * before, now)
    if rest:
        raise BadRequest(
            f"the loader cannot continue there with {world_size} ranks: {batches} batches * {before} {unit} each = "
            f"{batches * before} {unit}, no multiple of the {now} per round here; "
            f"resume with {then} ranks, or save where it is one"
        )
    return int(whole)
