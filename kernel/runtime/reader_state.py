"""The state of a dataset that torchdata's StatefulDataLoader keeps, in each worker where there are some.

Owns: when it is taken, and whether it can be put back. Refuses: which batch comes next; that is the position's.

torchdata gives the state that a worker's dataset had after the batch that was delivered last, whatever was read ahead
since. It is one rank's, for as many workers and ranks. Where those differ the batches are right all the same, and a
warning says that the datasets' own state begins anew.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from rankbook.runtime.fetch import MapFetch
from rankbook.runtime.position import Position


class StatefulFetch(MapFetch):
    """Reads a map-style dataset that has a state. torchdata looks for both functions on the class."""

    def state_dict(self) -> Any:  # noqa: ANN401 - the dataset's
        """The dataset's."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401 - the dataset's
        """Put it back."""
        self.dataset.load_state_dict(state)


def has_state(dataset: Any) -> bool:  # noqa: ANN401 - any dataset
    """Whether a dataset can tell its state, and take it back."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def take(inner: Any, fetch: Any, position: Position, place: tuple[int, int], skip: int) -> dict[str, Any] | None:  # noqa: ANN401
    """What `put_back` needs; None where there is nothing: workers of a pass that is over have ended, with their state.

    `inner` is the StatefulDataLoader, `place` this rank and the number of ranks, `skip` the rounds that its pass left
    out at its start.
    """
    if position.reader is not None:
        return position.reader
    said = {"place": list(place), "workers": inner.num_workers}
    if not position.finished and position.wanted_epoch is None and inner._iterator is not None:
        state = copy.deepcopy(inner.state_dict())
        return {**said, "delivered": position.delivered, "skip": skip, "state": state}
    return None if inner.num_workers else {**said, "dataset": copy.deepcopy(fetch.state_dict())}


def put_back(inner: Any, fetch: Any, told: dict[str, Any], place: tuple[int, int], delivered: int) -> int:  # noqa: ANN401
    """Have the next pass of `inner` continue with what was taken; the rounds that are left out at its start."""
    now = {"place": list(place), "workers": inner.num_workers}
    then = {name: told[name] for name in now}
    if now != then or told.get("delivered", delivered) != delivered:
        (rank, ranks), (rank_now, ranks_now) = then["place"], now["place"]
        warnings.warn(
            f"the dataset's own state is not put back: it is that of rank {rank} of {ranks} with {then['workers']} "
            f"workers, and this is rank {rank_now} of {ranks_now} with {now['workers']}. The batches are right",
            stacklevel=4,
        )
        return delivered
    if "dataset" in told:
        fetch.load_state_dict(copy.deepcopy(told["dataset"]))
        return delivered
    inner.load_state_dict(copy.deepcopy(told["state"]))
    return int(told["skip"])
