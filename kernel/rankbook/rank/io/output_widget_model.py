"""What stands in an ipywidgets `Output`, as a notebook's list of outputs.

Owns: how text is joined and overwritten, what clearing leaves, how much text is kept. Refuses: widgets, threads and
clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_TEXT = 256 << 10
"""Characters of text that are kept in one widget: each change sends all of it."""
CUT = "(what was printed before is left out)\n"

Output = dict[str, Any]
"""One output, in the form of a notebook file."""


@dataclass(frozen=True)
class Cleared:
    """`clear_output`: at once, or (`wait`) when something comes in its place."""

    wait: bool


@dataclass(frozen=True)
class Updated:
    """What was displayed under this id is another bundle now."""

    display_id: str
    data: dict[str, Any]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Displayed:
    """A bundle, under an id or under none."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None


@dataclass(frozen=True)
class Printed:
    """Text on a stream."""

    name: str
    text: str


@dataclass(frozen=True)
class Failed:
    """An error that ended the capture."""

    name: str
    value: str
    traceback: str


Event = Printed | Displayed | Updated | Cleared | Failed


class Captured:
    """Turns events into the widget's next outputs. It remembers what a clear is waiting for, and display ids."""

    def __init__(self) -> None:
        self._clearing = False
        self._ids: dict[str, Output] = {}

    def knows(self, display_id: str | None) -> bool:
        """Whether something was displayed here under this id."""
        return display_id in self._ids

    def apply(self, outputs: Iterable[Output], events: Iterable[Event]) -> list[Output]:
        """What stands there after `events`, if `outputs` stood there before."""
        now = list(outputs)
        for event in events:
            match event:
                case Cleared(wait=True):
                    self._clearing = True
                    continue
                case Updated(display_id=name):
                    old, new = self._ids[name], _bundle(event)
                    now = [new if each is old else each for each in now]
                    self._ids[name] = new
                    continue
            if self._clearing or isinstance(event, Cleared):
                now, self._clearing = [], False
                self._ids.clear()
            self._append(now, event)
        return _within_bounds(now)

    def _append(self, now: list[Output], event: Event) -> None:
        match event:
            case Printed(name=name, text=text):
                last = now[-1] if now else {}
                joins = (last.get("output_type"), last.get("name")) == ("stream", name)
                whole = overwritten(last["text"] + text if joins else text)
                now[len(now) - joins :] = [{"output_type": "stream", "name": name, "text": whole}]
            case Displayed(display_id=display_id):
                now.append(_bundle(event))
                if display_id is not None:
                    self._ids[display_id] = now[-1]
            case Failed(name=name, value=value, traceback=traceback):
                lines = traceback.split("\n")
                now.append({"output_type": "error", "ename": name, "evalue": value, "traceback": lines})


def _bundle(event: Displayed | Updated) -> Output:
    return {"output_type": "display_data", "data": event.data, "metadata": event.metadata}


def overwritten(text: str) -> str:
    """The text as a terminal shows it: what stands behind a carriage return has taken the place of what was before."""
    if "\r" not in text:
        return text
    return "\n".join(map(_line, text.replace("\r\n", "\n").split("\n")))


def _line(line: str) -> str:
    shown, coloured = "", "\x1b" in line
    for part in line.split("\r"):
        shown = part + ("" if coloured else shown[len(part) :]) if part else shown
    return shown + ("\r" if line.endswith("\r") else "")


def _within_bounds(outputs: list[Output]) -> list[Output]:
    over = sum(len(each["text"]) for each in outputs if "text" in each) - MOST_TEXT
    if over <= 0:
        return outputs
    kept: list[Output] = []
    for each in outputs:
        if over > 0 and "text" in each:
            text = each["text"]
            over -= len(text)
            if over >= 0:
                continue
            text, over = text[len(text) + over :], 0
            kept.append({**each, "text": CUT + text[text.find("\n") + 1 :]})
        else:
            kept.append(each)
    return kept


def size_of(outputs: Iterable[Output]) -> int:
    """Characters that it takes to send them, about."""
    return sum(
        len(each.get("text", "")) + sum(len(value) for value in each.get("data", {}).values() if isinstance(value, str))
        for each in outputs
    )
