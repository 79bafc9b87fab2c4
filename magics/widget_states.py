"""What the ranks' widgets look like now, for a page that is reloaded and asks.

Owns: the last state of each, from what was said about it at either end. Refuses: to ask the ranks, who may be busy, and
to know a kernel.

A state is JSON with its bytes apart: `buffer_paths` says where each buffer belongs, as in the widgets' own messages.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

_UPDATES = frozenset({"update", "echo_update"})
Path = tuple[str | int, ...]


class State(NamedTuple):
    """One widget's: `buffers` stand at their paths."""

    plain: dict[str, Any]
    buffers: dict[Path, bytes]

    def then(self, data: dict[str, Any], frames: Sequence[bytes | memoryview]) -> State:
        """After a message has named some of its parts."""
        paths = [tuple(path) for path in data.get("buffer_paths", ())]
        named = {*data.get("state", {}), *(path[0] for path in paths)}
        plain = {key: value for key, value in self.plain.items() if key not in named}
        kept = {path: value for path, value in self.buffers.items() if path[0] not in named}
        new = {path: bytes(frame) for path, frame in zip(paths, frames, strict=False)}
        return State({**plain, **data.get("state", {})}, {**kept, **new})


class Everything(NamedTuple):
    """All widgets' states by their comms' ids; the buffers stand at `paths`, which begin with an id."""

    states: dict[str, dict[str, Any]]
    paths: list[list[str | int]]
    buffers: list[bytes]


class WidgetStates:
    """Of all widgets that live on ranks. Any thread."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._changing = threading.Lock()

    def open(self, comm: str, data: dict[str, Any], frames: Sequence[bytes | memoryview]) -> None:
        """A widget was made."""
        with self._changing:
            self._states[comm] = State({}, {}).then(data, frames)

    def change(self, comm: str, data: dict[str, Any], frames: Sequence[bytes | memoryview]) -> None:
        """One end has said something of it."""
        with self._changing:
            state = self._states.get(comm)
            if state is not None and data.get("method") in _UPDATES:
                self._states[comm] = state.then(data, frames)

    def close(self, comm: str) -> None:
        """It is gone."""
        with self._changing:
            self._states.pop(comm, None)

    def update_of(self, comm: str) -> tuple[dict[str, Any], list[bytes]] | None:
        """The answer to `request_state`, with its buffers; None for what is no widget."""
        state = self._states.get(comm)
        if state is None:
            return None
        paths = [list(path) for path in state.buffers]
        return {"method": "update", "state": state.plain, "buffer_paths": paths}, list(state.buffers.values())

    def everything(self) -> Everything:
        """What stands in the answer to `request_states`."""
        found = Everything({}, [], [])
        for comm, state in list(self._states.items()):
            found.states[comm] = {
                "model_name": state.plain.get("_model_name"),
                "model_module": state.plain.get("_model_module"),
                "model_module_version": state.plain.get("_model_module_version"),
                "state": state.plain,
            }
            for path, buffer in state.buffers.items():
                found.paths.append([comm, "state", *path])
                found.buffers.append(buffer)
        return found
