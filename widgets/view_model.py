"""Models of views, and the protocols of their data sources.

`ViewModel` is one view's state, independent of Jupyter, comms and threads. `ClusterSource` and `CheckpointSource` are
the interfaces through which views read data and perform the actions that a user clicks.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from rankbook.protocol.telemetry import CheckpointFolder

Message = Mapping[str, Any]


def to_json(value: object) -> str:
    """Encode `value` as JSON without spaces."""
    # JavaScript's JSON parser refuses NaN, so it is an error here rather than in the browser.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# A model has no lock of the view and knows no browser. `LiveView` decides when it is open, which thread asks it and
# when its state is sent, so that a test needs neither a kernel nor a widget.
class ViewModel(ABC):
    """Model of a view: the sources it watches, its state, its answers to the browser, and HTML, text and SVG versions.

    `static_json` is the part of the state that rarely changes, `dynamic_json` the part that may change ten times a
    second; both are JSON. `open` and `close` are called alternately, `open` first, when a browser starts to show the
    view. All other methods may be called at any time, on any thread.
    """

    # Also the prefix of the two traits of `LiveView` that carry the state.
    name: str

    @abstractmethod
    def open(self, changed: Callable[[], None]) -> None:
        """Start to update the state, and call `changed` after every change."""

    @abstractmethod
    def close(self) -> None:
        """Stop updating: no browser shows the view."""

    @abstractmethod
    def ready(self) -> bool:
        """Return True if there is a state to show."""

    @abstractmethod
    def load(self) -> None:
        """Ask the sources once for a state to show. Takes up to 2 s. Raises `RankbookError`."""

    @abstractmethod
    def static_json(self) -> str:
        """Return the part of the state that rarely changes, as JSON."""

    @abstractmethod
    def dynamic_json(self) -> str:
        """Return the part of the state that changes often, as JSON."""

    @abstractmethod
    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - any JSON value
        """Perform request `op` of the browser and return a JSON-serializable answer. Raises `RankbookError`."""

    @abstractmethod
    def summary(self) -> str:
        """Return the state as one line."""

    @abstractmethod
    def text(self) -> str:
        """Return the state as text for a terminal."""

    @abstractmethod
    def html(self) -> str:
        """Return the state as HTML that needs no JavaScript or kernel."""

    @abstractmethod
    def svg(self) -> str:
        """Return the state as an SVG document, for example for a paper."""


# Protocols, since the widgets must not import the coordinator. magics/views.py implements both for a cluster and a
# folder; tests have their own implementations.
class ClusterSource(Protocol):
    """Data source for the state of the ranks. All methods are thread-safe."""

    def watch(self, kind: str, callback: Callable[[Struct], None], **options: object) -> Callable[[], None]:
        """Call `callback` with every state of `kind`, at most ten times a second; the last state is never dropped.

        "placement" gives `Placement`, "saves" gives `Saves`. The callback may run on any thread. Returns a function
        that ends the subscription.
        """
        ...

    def ask(self, kind: str, **options: object) -> Struct:
        """Query the ranks once, also while a cell runs. Takes up to 2 s.

        "placement" gives `Placement`, "detail" with `rank` gives `RankDetail`, "shards" with `name` gives `ShardMap`,
        "statistic" with `name`, `key` and `rank` gives `Statistic`. Raises `RankbookError`.
        """
        ...

    def act(self, kind: str, rank: int | None) -> str:
        """Perform "interrupt" or "restart" and return a sentence about the result. Raises `RankbookError`."""
        ...


class CheckpointSource(Protocol):
    """A folder of checkpoints. All methods are thread-safe and may raise `RankbookError`."""

    def list_checkpoints(self) -> CheckpointFolder:
        """Return the checkpoints in the folder, without reading tensor data."""
        ...

    def verify(self, name: str) -> str:
        """Verify the checksums of a checkpoint and return a sentence; `list_checkpoints` then includes the result."""
        ...

    def load(self, name: str) -> str:
        """Load a checkpoint and return a sentence, or return instructions for loading it."""
        ...

    def delete(self, name: str) -> str:
        """Delete a checkpoint and return a sentence."""
        ...
