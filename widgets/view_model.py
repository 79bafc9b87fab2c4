"""One picture of one kind of state, before anything draws it.

Owns: what each picture offers to whatever shows it. Refuses: comms, threads, Jupyter.

Where the views get what they show, and whom they tell what was clicked.
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
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class ViewModel(ABC):
    """A picture: what it watches, its state for the browser, what it answers, and itself in HTML, text and SVG.

    `fixed` is what hardly ever changes and `state` what may ten times a second, both JSON. `open` and `close` are
    called in turn, the first one as somebody begins to look; all others at any time, on any thread.
    """

    name: str

    @abstractmethod
    def open(self, changed: Callable[[], None]) -> None:
        """Somebody looks: keep the state up to date and call `changed` whenever there is a new one."""

    @abstractmethod
    def close(self) -> None:
        """Nobody looks any more."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether there is a state to show."""

    @abstractmethod
    def fixed(self) -> str:
        """What hardly ever changes, as JSON."""

    @abstractmethod
    def state(self) -> str:
        """What changes all the time, as JSON."""

    @abstractmethod
    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - whatever JSON the browser asked for
        """What was asked for by the browser, as JSON can hold it. Raises `RankbookError`."""

    @abstractmethod
    def summary(self) -> str:
        """The state as one line."""

    @abstractmethod
    def text(self) -> str:
        """The state as text for a terminal."""

    @abstractmethod
    def html(self) -> str:
        """The state as HTML that needs nothing installed."""

    @abstractmethod
    def svg(self) -> str:
        """The state as a picture for a paper."""


class ClusterSource(Protocol):
    """What the ranks tell. Every method may be called on any thread."""

    def watch(self, kind: str, callback: Callable[[Struct], None], **options: object) -> Callable[[], None]:
        """Have `callback` called with each state of `kind`, at most ten times a second, the last one always.

        "placement" gives `Placement`, "saves" gives `Saves`. The callback comes on any thread. What is returned
        ends it.
        """
        ...

    def ask(self, kind: str, **options: object) -> Struct:
        """Ask the ranks once; also while a cell runs, and up to 2 s long.

        "detail" with `rank` gives `RankDetail`, "shards" with `name` gives `ShardMap`, "statistic" with `name`, `key`
        and `rank` gives `Statistic`. Raises `RankbookError`.
        """
        ...

    def act(self, kind: str, rank: int | None) -> str:
        """Do "interrupt" or "restart" and say in a sentence what was done. Raises `RankbookError`."""
        ...


class CheckpointSource(Protocol):
    """A folder of checkpoints. Every method may be called on any thread, and raises `RankbookError`."""

    def look(self) -> CheckpointFolder:
        """What lies there now; reads no tensor's data."""
        ...

    def verify(self, name: str) -> str:
        """Check every byte of one checkpoint and say in a sentence how it is; `look` knows it from then on."""
        ...

    def load(self, name: str) -> str:
        """Load one checkpoint, or say in a sentence how to."""
        ...

    def delete(self, name: str) -> str:
        """Remove one checkpoint and say so."""
        ...
