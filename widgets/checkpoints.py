"""Checkpoints view: running saves, and the checkpoints in a folder with buttons to verify, load and delete them.

`CheckpointsModel` and `CheckpointsView` are the live view; `folder_of` and `saves_of` make the JSON for
static/checkpoints.js; `text`, `html` and `svg` draw the static versions. The folder itself is read and changed through
`CheckpointSource`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from threading import Event, Lock, Thread
from typing import Any

import traitlets

from rankbook.errors import BadRequest, RankbookError
from rankbook.formatting import format_bytes, format_duration, format_time, plural
from rankbook.protocol.telemetry import CheckpointFolder, RankSave, Saves, StoredCheckpoint
from rankbook.widgets.live_view import LiveView, call_if_set, script, start_thread
from rankbook.widgets.rendering import (
    BLUE,
    FAINT,
    GREEN,
    LINE,
    VERMILLION,
    bar,
    rect,
    svg_document,
    table,
    text_element,
)
from rankbook.widgets.view_model import CheckpointSource, ClusterSource, Message, ViewModel, to_json

LOOK_AGAIN = 3.0  # seconds: other processes may save to the folder and delete from it
ENDS = {"done", "failed"}
_DONE = {"verify": "verified", "load": "loaded", "delete": "deleted"}


class CheckpointsModel(ViewModel):
    """Model of the checkpoints view.

    Updated by the source's "saves" state. While the view is open, a thread reads the folder every `LOOK_AGAIN` seconds,
    and at once when a save ends.
    """

    name = "checkpoints"

    def __init__(self, feed: ClusterSource, shelf: CheckpointSource | None) -> None:
        self._feed, self._shelf = feed, shelf
        self._lock = Lock()
        self._saves: Saves | None = None
        self._folder: CheckpointFolder | None = None
        self._end: Callable[[], None] | None = None
        self._changed: Callable[[], None] | None = None
        self._again, self._stop = Event(), Event()
        self._acting = Lock()
        self._doing: set[tuple[str, str]] = set()  # (checkpoint, running operation)

    def open(self, changed: Callable[[], None]) -> None:
        """See `ViewModel`."""
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
        """See `ViewModel`."""
        end, self._end = self._end, None
        call_if_set(end)
        self._stop.set()
        self._again.set()

    def ready(self) -> bool:
        """See `ViewModel`."""
        return self._folder is not None or self._shelf is None

    def fixed(self) -> str:
        """See `ViewModel`."""
        return to_json(folder_of(self._folder))

    def state(self) -> str:
        """See `ViewModel`."""
        return to_json(saves_of(self._saves))

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """Perform `verify`, `load` or `delete` on the checkpoint `name`, or `look` to read the folder again.

        These may take minutes and run in parallel: a checkpoint is not deleted while another operation uses it, and no
        operation runs twice at once.
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
                folder = self._shelf.look()
            except (RankbookError, OSError) as error:
                folder = CheckpointFolder("", (), str(error))
            changed, self._folder = folder != self._folder, folder
        if changed and self._changed is not None:
            self._changed()

    def summary(self) -> str:
        """See `ViewModel`."""
        return summary(self._saves, self._folder)

    def text(self) -> str:
        """See `ViewModel`."""
        return text(self._saves, self._folder)

    def html(self) -> str:
        """See `ViewModel`."""
        return html(self._saves, self._folder)

    def svg(self) -> str:
        """See `ViewModel`."""
        return svg(self._saves, self._folder)


class CheckpointsView(LiveView):
    """Live view of running saves and the checkpoints in a folder."""

    _esm = script("checkpoints", last='export default mount("checkpoints", {checkpoints: drawCheckpoints});')
    checkpoints_fixed = traitlets.Unicode("{}").tag(sync=True)
    checkpoints_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, feed: ClusterSource, shelf: CheckpointSource | None) -> None:
        super().__init__([CheckpointsModel(feed, shelf)])


def _ended(saves: Saves | None) -> set[tuple[int, str, str]]:
    if saves is None:
        return set()
    return {
        (rank_save.rank, rank_save.save.folder, rank_save.save.name)
        for rank_save in saves.saves
        if rank_save.save.phase in ENDS
    }


def folder_of(folder: CheckpointFolder | None) -> dict[str, Any]:
    """Return the JSON data of the folder; numbers are formatted, since they change only with the folder."""
    if folder is None:
        return {}
    return {
        "folder": folder.folder,
        "trouble": folder.trouble,
        "checkpoints": [[checkpoint.name, *row(checkpoint), _can(checkpoint)] for checkpoint in folder.checkpoints],
    }


def _can(each: StoredCheckpoint) -> list[str]:
    """Return the operations that are possible on a checkpoint."""
    return ["delete"] if each.state == "partial" else ["load", "verify", "delete"]


def saves_of(saves: Saves | None) -> dict[str, Any]:
    """Return the JSON data of the saves: progress of all ranks together, and bytes per rank."""
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
                "ranks": [
                    [rank_save.rank, rank_save.save.phase, rank_save.save.written, rank_save.save.total]
                    for rank_save in whole.ranks
                ],
            }
            for whole in together(saves)
        ]
    }


HEADINGS = ("", "checkpoint", "step", "saved", "size", "ranks", "state")
PHASES = ("failed", "planning", "staging", "writing", "committing", "done")  # the first one of any rank counts
CHECKED_MARKS = {"verified": "✓ verified", "damaged": "✕ damaged", "": "not verified"}


@dataclass(frozen=True)
class WholeSave:
    """One save, all ranks together."""

    title: str
    ranks: tuple[RankSave, ...]

    @property
    def phase(self) -> str:
        """Return the phase of the slowest rank, or `failed` if any rank has failed."""
        phases = {rank_save.save.phase for rank_save in self.ranks}
        return next((phase for phase in PHASES if phase in phases), "planning")

    @property
    def written(self) -> int:
        """Return the bytes written by all ranks."""
        return sum(rank_save.save.written for rank_save in self.ranks)

    @property
    def total(self) -> int:
        """Return the bytes that all ranks will write."""
        return sum(rank_save.save.total for rank_save in self.ranks)

    @property
    def rate(self) -> float:
        """Return the bytes per second of all ranks that are writing."""
        return sum(rank_save.save.rate or 0.0 for rank_save in self.ranks)

    @property
    def error(self) -> str:
        """Return the errors with their ranks, or an empty string."""
        return "; ".join(
            f"rank {rank_save.rank}: {rank_save.save.error}" for rank_save in self.ranks if rank_save.save.error
        )

    def left(self) -> float | None:
        """Return the seconds until the slowest rank has written its part at its current rate; None if unknown."""
        waits = [
            (rank_save.save.total - rank_save.save.written) / rank_save.save.rate
            for rank_save in self.ranks
            if rank_save.save.rate and rank_save.save.phase == "writing"
        ]
        return max(waits, default=None)

    def words(self) -> str:
        """Describe the progress: "writing, 1.2 GB of 4 GB, 400 MB/s, 7 s left"."""
        seconds = max(rank_save.save.seconds for rank_save in self.ranks)
        remaining = self.left()
        parts = [self.phase]
        if self.total:
            parts.append(f"{format_bytes(self.written)} of {format_bytes(self.total)}")
        if self.rate:
            parts.append(f"{format_bytes(self.rate)}/s")
        if remaining is not None and self.phase == "writing":
            parts.append(f"{format_duration(remaining)} left")
        return ", ".join(
            [*parts, f"for {format_duration(seconds)}" if self.phase not in {"done", "failed"} else ""]
        ).strip(", ")


def together(saves: Saves | None) -> list[WholeSave]:
    """Group the ranks' saves by checkpoint, in the order in which they started."""
    groups: dict[tuple[str, str], list[RankSave]] = defaultdict(list)
    for rank_save in saves.saves if saves is not None else ():
        groups[rank_save.save.folder, rank_save.save.name].append(rank_save)
    return [
        WholeSave(
            f"{name or 'a checkpoint'} in {folder}{' (in the background)' if ranks[0].save.background else ''}",
            tuple(sorted(ranks, key=lambda rank_save: rank_save.rank)),
        )
        for (folder, name), ranks in groups.items()
    ]


def row(each: StoredCheckpoint) -> list[str]:
    """Return the texts of a checkpoint's row, without its name."""
    state = CHECKED_MARKS.get(each.checked, each.checked) if each.state == "finished" else each.state
    if each.state == "foreign":
        state = f"written by another program, {CHECKED_MARKS.get(each.checked, each.checked)}"
    return [
        "latest" if each.latest else "",
        "" if each.step is None else str(each.step),
        "" if each.created is None else format_time(each.created),
        format_bytes(each.bytes),
        "" if each.world_size is None else str(each.world_size),
        f"{state}: {each.detail}" if each.detail else state,
    ]


def _row(each: StoredCheckpoint) -> list[str]:
    latest, *rest = row(each)
    return [latest, each.name, *rest]


def summary(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Summarize the view in one line: "3 checkpoints in /ckpt, latest step-30; saving step-40: writing"."""
    parts = []
    if folder is not None:
        latest = next((f", latest {checkpoint.name}" for checkpoint in folder.checkpoints if checkpoint.latest), "")
        count = len(folder.checkpoints)
        many = plural(count, "checkpoint") if count else "no checkpoints"
        parts.append(folder.trouble or f"{many} in {folder.folder}{latest}")
    parts += [f"{whole.title}: {whole.words()}" for whole in together(saves)]
    return "; ".join(parts) or "no save under way"


def text(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the saves, then a line per checkpoint, as text."""
    lines = ["checkpoints: " + summary(saves, folder)]
    for whole in together(saves):
        lines += [
            f"  rank {rank_save.rank}: {format_bytes(rank_save.save.written)} of {format_bytes(rank_save.save.total)}"
            for rank_save in whole.ranks
        ]
        lines += [f"  {whole.error}"] if whole.error else []
    if folder is not None and folder.checkpoints:
        lines.append(table(HEADINGS, [_row(checkpoint) for checkpoint in folder.checkpoints])["text/plain"])
    return "\n".join(lines)


def html(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the saves with their progress bars, and a table of the checkpoints, as HTML."""
    parts = [f"<p>checkpoints: {escape(summary(saves, folder))}</p>"]
    for whole in together(saves):
        progress = bar([("written", whole.written, BLUE)], whole.total, width="16em")
        parts.append(f"<p>{progress} {escape(whole.title)}: {escape(whole.words())} {escape(whole.error)}</p>")
    if folder is not None and folder.checkpoints:
        parts.append(table(HEADINGS, [_row(checkpoint) for checkpoint in folder.checkpoints])["text/html"])
    return "".join(parts)


def svg(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the saves with a bar per rank, and the checkpoints, as an SVG document."""
    title = summary(saves, folder)
    shapes, y = [text_element(12, 24, title, size=14)], 40.0
    for whole in together(saves):
        colour = {"failed": VERMILLION, "done": GREEN}.get(whole.phase, BLUE)
        shapes.append(text_element(12, y + 14, f"{whole.title}: {whole.words()}"))
        y += 22
        for rank_save in whole.ranks:
            share = rank_save.save.written / rank_save.save.total if rank_save.save.total else 0
            shapes += [
                text_element(36, y + 11, str(rank_save.rank), anchor="end", size=11),
                rect(44, y, 300, 12, "none", extra=f" stroke='{LINE}'"),
                rect(44, y, 300 * share, 12, colour, title=f"rank {rank_save.rank}"),
                text_element(
                    352,
                    y + 11,
                    f"{format_bytes(rank_save.save.written)} of {format_bytes(rank_save.save.total)}",
                    size=11,
                ),
            ]
            y += 16
        y += 8
    for each_stored in folder.checkpoints if folder is not None else ():
        for x, cell in zip((12, 64, 190, 240, 400, 480, 530), _row(each_stored), strict=True):
            shapes.append(text_element(x, y + 14, cell, fill=FAINT if x == 12 else "#1f2328"))
        y += 22
    return svg_document(900, y + 12, title, shapes)
