"""Saves as they happen, and what lies in a folder of checkpoints.

Owns: the state for the browser, what is read again and when. Refuses: to read or change a folder itself.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

import traitlets

from rankbook.errors import BadRequest, RankbookError
from rankbook.protocol.telemetry import CheckpointFolder, Saves, StoredCheckpoint
from rankbook.widgets.daemon_threads import start_thread
from rankbook.widgets.live_view import LiveView, end_of, script
from rankbook.widgets.render import checkpoints as picture
from rankbook.widgets.sources import Feed, Shelf
from rankbook.widgets.view_model import Message, Part, compact

LOOK_AGAIN = 3.0  # seconds: other processes save and delete there, too
ENDS = {"done", "failed"}
_DONE = {"verify": "verified", "load": "loaded", "delete": "deleted"}


class CheckpointsPart(Part):
    """The feed's "saves", and a shelf that is looked at every few seconds for as long as somebody looks."""

    name = "checkpoints"

    def __init__(self, feed: Feed, shelf: Shelf | None) -> None:
        self._feed, self._shelf = feed, shelf
        self._lock = Lock()
        self._saves: Saves | None = None
        self._folder: CheckpointFolder | None = None
        self._end: Callable[[], None] | None = None
        self._changed: Callable[[], None] | None = None
        self._again, self._stop = Event(), Event()
        self._acting = Lock()
        self._doing: set[tuple[str, str]] = set()  # checkpoints, each with what is done to it now

    def open(self, changed: Callable[[], None]) -> None:
        """See `Part`."""
        self._changed = changed

        def arrived(state: object) -> None:
            if isinstance(state, Saves):
                ended = _ended(state) - _ended(self._saves)
                self._saves = state
                changed()
                if ended:
                    self._again.set()

        self._end = self._feed.watch("saves", arrived)
        self._stop, self._again = Event(), Event()
        if self._shelf is not None:
            start_thread(Thread(target=self._look, args=(self._stop, self._again), name="rankbook-shelf"))
        changed()

    def close(self) -> None:
        """See `Part`."""
        end, self._end = self._end, None
        end_of(end)
        self._stop.set()
        self._again.set()

    def ready(self) -> bool:
        """See `Part`."""
        return self._folder is not None or self._shelf is None

    def fixed(self) -> str:
        """See `Part`."""
        return compact(folder_of(self._folder))

    def state(self) -> str:
        """See `Part`."""
        return compact(saves_of(self._saves))

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """`verify`, `load` or `delete` a checkpoint by its `name`; `look` again.

        None is deleted while it is read, and nothing is done twice at once: these may take minutes.
        """
        if self._shelf is None:
            raise BadRequest("no folder was given: rankbook.checkpoints(folder)")
        name = str(message.get("name", ""))
        doing = {"verify": self._shelf.verify, "load": self._shelf.load, "delete": self._shelf.delete}
        if op != "look" and op not in doing:
            raise BadRequest(f"the checkpoints view knows no {op!r}")
        if op == "look":
            self._read()
            return ""
        with self._acting:
            for other, does in self._doing:
                if other == name and (does == op or "delete" in {does, op}):
                    raise BadRequest(f"{name} is being {_DONE[does]}: wait until that is over")
            self._doing.add((name, op))
        try:
            return doing[op](name)
        finally:
            with self._acting:
                self._doing.discard((name, op))
            self._read()

    def _look(self, stop: Event, again: Event) -> None:
        while not stop.is_set():
            again.clear()
            self._read()
            again.wait(LOOK_AGAIN)

    def _read(self) -> None:
        assert self._shelf is not None
        with self._lock:
            try:
                found = self._shelf.look()
            except (RankbookError, OSError) as error:
                found = CheckpointFolder("", (), str(error))
            changed, self._folder = found != self._folder, found
        if changed and self._changed is not None:
            self._changed()

    def summary(self) -> str:
        """See `Part`."""
        return picture.summary(self._saves, self._folder)

    def text(self) -> str:
        """See `Part`."""
        return picture.text(self._saves, self._folder)

    def html(self) -> str:
        """See `Part`."""
        return picture.html(self._saves, self._folder)

    def svg(self) -> str:
        """See `Part`."""
        return picture.svg(self._saves, self._folder)


class CheckpointsView(LiveView):
    """Saves as they happen and what lies in a folder, live."""

    _esm = script("checkpoints", last='export default mount("checkpoints", {checkpoints: drawCheckpoints});')
    checkpoints_fixed = traitlets.Unicode("{}").tag(sync=True)
    checkpoints_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, feed: Feed, shelf: Shelf | None) -> None:
        super().__init__([CheckpointsPart(feed, shelf)])


def _ended(saves: Saves | None) -> set[tuple[int, str, str]]:
    if saves is None:
        return set()
    return {(each.rank, each.save.folder, each.save.name) for each in saves.saves if each.save.phase in ENDS}


def folder_of(folder: CheckpointFolder | None) -> dict[str, Any]:
    """What lies in the folder; numbers in words, for they change only with it."""
    if folder is None:
        return {}
    return {
        "folder": folder.folder,
        "trouble": folder.trouble,
        "checkpoints": [[each.name, *picture.row(each), _can(each)] for each in folder.checkpoints],
    }


def _can(each: StoredCheckpoint) -> list[str]:
    """What can be done with it."""
    return ["delete"] if each.state == "partial" else ["load", "verify", "delete"]


def saves_of(saves: Saves | None) -> dict[str, Any]:
    """Each save with what all ranks have done of it, and each rank's bytes."""
    if saves is None:
        return {}
    return {
        "saves": [
            {
                "what": whole.title,
                "phase": whole.phase,
                "written": whole.written,
                "total": whole.total,
                "words": whole.words(),
                "error": whole.error,
                "ranks": [[each.rank, each.save.phase, each.save.written, each.save.total] for each in whole.ranks],
            }
            for whole in picture.together(saves)
        ]
    }
