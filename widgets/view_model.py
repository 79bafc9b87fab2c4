"""One picture of one kind of state, before anything draws it.

Owns: what each picture offers to whatever shows it. Refuses: comms, threads, Jupyter.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]


def compact(value: object) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Part(ABC):
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
