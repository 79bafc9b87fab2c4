"""Checkpoints view: running saves, and the checkpoints in a folder with buttons to verify, load and delete them.

`CheckpointsModel` and `CheckpointsView` are the live view; `folder_data` and `saves_data` make the JSON for
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

from rankbook.errors import InvalidArgument, RankbookError
from rankbook.formatting import format_bytes, format_duration, format_time, plural
from rankbook.protocol.telemetry import CheckpointFolder, RankSave, Saves, StoredCheckpoint
from rankbook.widgets.live_view import (
    CheckpointSource,
    ClusterSource,
    LiveView,
    Message,
    ViewModel,
    call_if_set,
    script,
    start_thread,
    to_json,
)
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

READ_INTERVAL = 3.0  # seconds: other processes may save to the folder and delete from it
END_PHASES = {"done", "failed"}
# The participles in the messages about a running operation.
_DONE = {"verify": "verified", "load": "loaded", "delete": "deleted"}


_SAVES_TIMEOUT = 2.0
"""Seconds to wait for the ranks' first report of their saves."""


# Live view ----------------------------------------------------------------------------------------------------------


class CheckpointsModel(ViewModel):
    """Model of the checkpoints view.

    Updated by the source's "saves" state. While the view is open, a thread reads the folder every `READ_INTERVAL`
    seconds, and at once when a save ends.
    """

    name = "checkpoints"

    def __init__(self, source: ClusterSource, checkpoint_source: CheckpointSource | None) -> None:
        self._source, self._checkpoint_source = source, checkpoint_source
        self._lock = Lock()
        self._saves: Saves | None = None
        self._folder: CheckpointFolder | None = None
        self._end: Callable[[], None] | None = None
        self._changed: Callable[[], None] | None = None
        self._read_now, self._stop = Event(), Event()
        self._operations_lock = Lock()
        self._running_operations: set[tuple[str, str]] = set()  # (checkpoint, running operation)

    def open(self, changed: Callable[[], None]) -> None:
        """See `ViewModel`."""
        self._changed = changed

        def arrived(state: object) -> None:
            if isinstance(state, Saves):
                # A save has ended since the last state: the folder has a new checkpoint, which is read at once.
                ended = _ended(state) - _ended(self._saves)
                self._saves = state
                changed()
                if ended:
                    self._read_now.set()

        self._end = self._source.watch("saves", arrived)
        # New events for every opening: the thread of an earlier one may still be about to end.
        self._stop, self._read_now = Event(), Event()
        if self._checkpoint_source is not None:
            start_thread(
                Thread(target=self._poll_folder, args=(self._stop, self._read_now), name="rankbook-checkpoints")
            )
        changed()

    def close(self) -> None:
        """See `ViewModel`."""
        # Taken out first, so that a second call of `close` does not end the subscription twice.
        end, self._end = self._end, None
        call_if_set(end)
        # `_read_now` wakes the thread, which then finds `_stop` set.
        self._stop.set()
        self._read_now.set()

    def ready(self) -> bool:
        """See `ViewModel`."""
        return self._folder is not None or self._checkpoint_source is None

    def load(self) -> None:
        """See `ViewModel`."""
        received = Event()

        def arrived(state: object) -> None:
            if isinstance(state, Saves):
                self._saves = state
                received.set()

        # The view may never have been open, so this subscription is only for the first report. Saves have no query of
        # their own.
        end = self._source.watch("saves", arrived)
        if self._checkpoint_source is not None:
            self._read_folder()
        # The folder is read while the ranks answer.
        received.wait(_SAVES_TIMEOUT)
        end()

    def static_json(self) -> str:
        """See `ViewModel`."""
        return to_json(folder_data(self._folder))

    def dynamic_json(self) -> str:
        """See `ViewModel`."""
        return to_json(saves_data(self._saves))

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """Perform `verify`, `load` or `delete` on the checkpoint `name`, or `look` to read the folder again.

        These may take minutes and run in parallel: a checkpoint is not deleted while another operation uses it, and no
        operation runs twice at once.
        """
        if self._checkpoint_source is None:
            raise InvalidArgument("no folder was given; open the view with rankbook.checkpoints(folder)")
        name = str(message.get("name", ""))
        operations = {
            "verify": self._checkpoint_source.verify,
            "load": self._checkpoint_source.load,
            "delete": self._checkpoint_source.delete,
        }
        # The names come from a browser, so they are checked before anything is called.
        if op != "look" and op not in operations:
            raise InvalidArgument(f"unknown operation {op!r}; choose from look, verify, load, delete")
        if op == "look":
            self._read_folder()
            return ""
        with self._operations_lock:
            # Loading and verifying at the same time is allowed, since both only read.
            for other, running in self._running_operations:
                if other == name and (running == op or "delete" in {running, op}):
                    raise InvalidArgument(f"{name} is being {_DONE[running]}; wait until this has finished")
            self._running_operations.add((name, op))
        try:
            return operations[op](name)
        finally:
            with self._operations_lock:
                self._running_operations.discard((name, op))
            self._read_folder()

    def _poll_folder(self, stop: Event, read_now: Event) -> None:
        while not stop.is_set():
            # Cleared before reading: a save that ends while the folder is being read causes another reading.
            read_now.clear()
            self._read_folder()
            read_now.wait(READ_INTERVAL)

    def _read_folder(self) -> None:
        assert self._checkpoint_source is not None
        # The poll, a click and the first load may read at the same time. The lock keeps an older list from replacing a
        # newer one.
        with self._lock:
            try:
                folder = self._checkpoint_source.list_checkpoints()
            except (RankbookError, OSError) as error:
                # Shown in place of the list. The next reading may succeed again, so the thread continues.
                folder = CheckpointFolder("", (), str(error))
            changed, self._folder = folder != self._folder, folder
        # Outside of the lock: this may start a thread that sends the state.
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

    def __init__(self, source: ClusterSource, checkpoint_source: CheckpointSource | None) -> None:
        super().__init__([CheckpointsModel(source, checkpoint_source)])


def _ended(saves: Saves | None) -> set[tuple[int, str, str]]:
    if saves is None:
        return set()
    return {
        (rank_save.rank, rank_save.save.folder, rank_save.save.name)
        for rank_save in saves.saves
        if rank_save.save.phase in END_PHASES
    }


# JSON for static/checkpoints.js -------------------------------------------------------------------------------------


def folder_data(folder: CheckpointFolder | None) -> dict[str, Any]:
    """Return the JSON data of the folder; numbers are formatted, since they change only with the folder."""
    if folder is None:
        return {}
    return {
        "folder": folder.folder,
        "trouble": folder.trouble,
        "checkpoints": [
            [checkpoint.name, *row(checkpoint), _operations(checkpoint)] for checkpoint in newest_first(folder)
        ],
    }


def _operations(checkpoint: StoredCheckpoint) -> list[str]:
    """Return the operations that are possible on a checkpoint."""
    # A checkpoint that was not completed can be neither loaded nor verified.
    return ["delete"] if checkpoint.state == "partial" else ["load", "verify", "delete"]


def saves_data(saves: Saves | None) -> dict[str, Any]:
    """Return the JSON data of the saves: progress of all ranks together, and bytes per rank."""
    if saves is None:
        return {}
    return {
        "saves": [
            {
                "what": save.title,
                "phase": save.phase,
                "written": save.written,
                "total": save.total,
                "words": save.progress_text(),
                "error": save.error,
                "ranks": [
                    [rank_save.rank, rank_save.save.phase, rank_save.save.written, rank_save.save.total]
                    for rank_save in save.ranks
                ],
            }
            for save in combine_saves(saves)
        ]
    }


# Static versions ----------------------------------------------------------------------------------------------------


HEADINGS = ("", "checkpoint", "step", "saved", "size", "ranks", "state")
PHASES = ("failed", "planning", "staging", "writing", "committing", "done")  # the first one of any rank counts
CHECKED_MARKS = {"verified": "✓ verified", "damaged": "✕ damaged", "": "not verified"}


@dataclass(frozen=True)
class CombinedSave:
    """One save, all ranks together."""

    title: str
    ranks: tuple[RankSave, ...]

    @property
    def phase(self) -> str:
        """Return the phase of the slowest rank, or `failed` if any rank has failed."""
        # The ranks of one save are in different phases; PHASES is ordered by what is worth showing.
        phases = {rank_save.save.phase for rank_save in self.ranks}
        # Without any known phase, as before the first report of a rank, the save is being planned.
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
        """Return the bytes per second of all ranks that are writing, or the average of a finished save."""
        phase = "done" if self.phase == "done" else "writing"
        return sum(rank_save.save.rate or 0.0 for rank_save in self.ranks if rank_save.save.phase == phase)

    @property
    def error(self) -> str:
        """Return the errors with their ranks, or an empty string."""
        return "; ".join(
            f"rank {rank_save.rank}: {rank_save.save.error}" for rank_save in self.ranks if rank_save.save.error
        )

    def seconds_left(self) -> float | None:
        """Return the seconds until the slowest rank has written its part at its current rate; None if unknown."""
        # The save ends when the slowest rank has ended, so the ranks' times are not added: two ranks with 100 MB left
        # at 50 and 20 MB/s take 5 s.
        waits = [
            (rank_save.save.total - rank_save.save.written) / rank_save.save.rate
            for rank_save in self.ranks
            if rank_save.save.rate and rank_save.save.phase == "writing"
        ]
        return max(waits, default=None)

    def progress_text(self) -> str:
        """Describe the progress: "writing, 1.2 GB of 4 GB, 400 MB/s, 7 s left"."""
        # The ranks may have started at slightly different times.
        seconds = max(rank_save.save.seconds for rank_save in self.ranks)
        remaining = self.seconds_left()
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


def combine_saves(saves: Saves | None) -> list[CombinedSave]:
    """Group the ranks' saves by checkpoint: running ones first, and of these the last one that started."""
    # Ranks that save to the same folder under the same name take part in one save. The name is empty until it is
    # chosen.
    groups: dict[tuple[str, str], list[RankSave]] = defaultdict(list)
    for rank_save in saves.saves if saves is not None else ():
        groups[rank_save.save.folder, rank_save.save.name].append(rank_save)
    combined = [
        CombinedSave(
            f"{name or 'a checkpoint'} in {folder}{' (in the background)' if ranks[0].save.background else ''}",
            tuple(sorted(ranks, key=lambda rank_save: rank_save.rank)),
        )
        for (folder, name), ranks in reversed(groups.items())
    ]
    return sorted(combined, key=lambda save: save.phase in END_PHASES)


def newest_first(folder: CheckpointFolder) -> list[StoredCheckpoint]:
    """Return the checkpoints of a folder, unfinished ones on top, then the newest step first."""

    def age(checkpoint: StoredCheckpoint) -> tuple[bool, bool, float, float]:
        # Folders that are not named as steps may have no step. They are ordered by time, below the steps.
        step, created = checkpoint.step, checkpoint.created
        return checkpoint.state != "partial", step is None, -(step or 0), -(created or 0.0)

    return sorted(folder.checkpoints, key=age)


def row(checkpoint: StoredCheckpoint) -> list[str]:
    """Return the texts of a checkpoint's row, without its name."""
    state = (
        CHECKED_MARKS.get(checkpoint.checked, checkpoint.checked)
        if checkpoint.state == "finished"
        else checkpoint.state
    )
    if checkpoint.state == "foreign":
        state = f"written by another program, {CHECKED_MARKS.get(checkpoint.checked, checkpoint.checked)}"
    return [
        "latest" if checkpoint.latest else "",
        "" if checkpoint.step is None else str(checkpoint.step),
        "" if checkpoint.created is None else format_time(checkpoint.created),
        format_bytes(checkpoint.bytes),
        "" if checkpoint.world_size is None else str(checkpoint.world_size),
        f"{state}: {checkpoint.detail}" if checkpoint.detail else state,
    ]


def _row(checkpoint: StoredCheckpoint) -> list[str]:
    latest, *rest = row(checkpoint)
    return [latest, checkpoint.name, *rest]


def summary(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Summarize the view in one line: "3 checkpoints in /ckpt, latest step-30; saving step-40: writing"."""
    parts = []
    if folder is not None:
        latest = next((f", latest {checkpoint.name}" for checkpoint in folder.checkpoints if checkpoint.latest), "")
        count = len(folder.checkpoints)
        many = plural(count, "checkpoint") if count else "no checkpoints"
        parts.append(folder.trouble or f"{many} in {folder.folder}{latest}")
    parts += [f"{save.title}: {save.progress_text()}" for save in combine_saves(saves)]
    return "; ".join(parts) or "no save in progress"


def _caption(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the summary without the saves, which have lines of their own."""
    return "saves of all cells" if folder is None and combine_saves(saves) else summary(None, folder)


def text(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the saves, then a line per checkpoint, as text."""
    lines = ["checkpoints: " + summary(saves, folder)]
    for save in combine_saves(saves):
        lines += [
            f"  rank {rank_save.rank}: {format_bytes(rank_save.save.written)} of {format_bytes(rank_save.save.total)}"
            for rank_save in save.ranks
        ]
        lines += [f"  {save.error}"] if save.error else []
    if folder is not None and folder.checkpoints:
        lines.append(table(HEADINGS, [_row(checkpoint) for checkpoint in newest_first(folder)])["text/plain"])
    return "\n".join(lines)


def html(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the saves with their progress bars, and a table of the checkpoints, as HTML."""
    parts = [f"<p>checkpoints: {escape(_caption(saves, folder))}</p>"]
    for save in combine_saves(saves):
        progress = bar([("written", save.written, BLUE)], save.total, width="16em")
        parts.append(f"<p>{progress} {escape(save.title)}: {escape(save.progress_text())} {escape(save.error)}</p>")
    if folder is not None and folder.checkpoints:
        parts.append(table(HEADINGS, [_row(checkpoint) for checkpoint in newest_first(folder)])["text/html"])
    return "".join(parts)


def svg(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """Return the saves with a bar per rank, and the checkpoints, as an SVG document."""
    title = summary(saves, folder)
    # Rows from top to bottom; `y` is the upper edge of the next one, in pixels. A text's own y is its baseline, hence
    # the offsets.
    shapes, y = [text_element(12, 24, _caption(saves, folder), size=14)], 40.0
    for save in combine_saves(saves):
        colour = {"failed": VERMILLION, "done": GREEN}.get(save.phase, BLUE)
        shapes.append(text_element(12, y + 14, f"{save.title}: {save.progress_text()}"))
        y += 22
        for rank_save in save.ranks:
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
    for checkpoint in newest_first(folder) if folder is not None else ():
        for x, cell in zip((12, 64, 190, 240, 400, 480, 530), _row(checkpoint), strict=True):
            shapes.append(text_element(x, y + 14, cell, fill=FAINT if x == 12 else "#1f2328"))
        y += 22
    return svg_document(900, y + 12, title, shapes)
