"""Saves and checkpoints, as HTML, text and SVG.

Owns: pure functions from `Saves` and `CheckpointFolder`; one save of many ranks as one. Refuses: to read a folder.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape

from rankbook.formatting import format_bytes, format_duration, format_time, plural
from rankbook.protocol.telemetry import CheckpointFolder, RankSave, Saves, StoredCheckpoint
from rankbook.widgets.render.svg import BLUE, FAINT, GREEN, LINE, VERMILLION, bar, picture, rect, words
from rankbook.widgets.render.table import table

HEADINGS = ("", "checkpoint", "step", "saved", "size", "ranks", "state")
PHASES = ("failed", "planning", "staging", "writing", "committing", "done")  # the first that any rank is in counts
CHECKED_MARKS = {"verified": "✓ verified", "damaged": "✕ damaged", "": "not verified"}


@dataclass(frozen=True)
class WholeSave:
    """One save, all ranks together."""

    title: str
    ranks: tuple[RankSave, ...]

    @property
    def phase(self) -> str:
        """The phase of the rank that is least far; failed if any has."""
        phases = {each.save.phase for each in self.ranks}
        return next((phase for phase in PHASES if phase in phases), "planning")

    @property
    def written(self) -> int:
        """Bytes, of all ranks."""
        return sum(each.save.written for each in self.ranks)

    @property
    def total(self) -> int:
        """Bytes that there will be, of all ranks."""
        return sum(each.save.total for each in self.ranks)

    @property
    def rate(self) -> float:
        """Bytes per second, of all ranks that write."""
        return sum(each.save.rate or 0.0 for each in self.ranks)

    @property
    def error(self) -> str:
        """What went wrong, and where."""
        return "; ".join(f"rank {each.rank}: {each.save.error}" for each in self.ranks if each.save.error)

    def left(self) -> float | None:
        """Seconds until the slowest rank has written its part, at its rate."""
        waits = [
            (each.save.total - each.save.written) / each.save.rate
            for each in self.ranks
            if each.save.rate and each.save.phase == "writing"
        ]
        return max(waits, default=None)

    def words(self) -> str:
        """How far it is: "writing, 1.2 GB of 4 GB, 400 MB/s, 7 s left"."""
        seconds = max(each.save.seconds for each in self.ranks)
        left = self.left()
        said = [self.phase]
        if self.total:
            said.append(f"{format_bytes(self.written)} of {format_bytes(self.total)}")
        if self.rate:
            said.append(f"{format_bytes(self.rate)}/s")
        if left is not None and self.phase == "writing":
            said.append(f"{format_duration(left)} left")
        return ", ".join(
            [*said, f"for {format_duration(seconds)}" if self.phase not in {"done", "failed"} else ""]
        ).strip(", ")


def together(saves: Saves | None) -> list[WholeSave]:
    """The ranks' saves, joined where they are of the same checkpoint, in the order in which they came."""
    found: dict[tuple[str, str], list[RankSave]] = defaultdict(list)
    for each in saves.saves if saves is not None else ():
        found[each.save.folder, each.save.name].append(each)
    return [
        WholeSave(
            f"{name or 'a checkpoint'} in {folder}{' (in the background)' if ranks[0].save.background else ''}",
            tuple(sorted(ranks, key=lambda each: each.rank)),
        )
        for (folder, name), ranks in found.items()
    ]


def row(each: StoredCheckpoint) -> list[str]:
    """One checkpoint, in words."""
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
    """One line: "3 checkpoints in /ckpt, latest step-30; saving step-40: writing"."""
    said = []
    if folder is not None:
        latest = next((f", latest {each.name}" for each in folder.checkpoints if each.latest), "")
        count = len(folder.checkpoints)
        many = plural(count, "checkpoint") if count else "no checkpoints"
        said.append(folder.trouble or f"{many} in {folder.folder}{latest}")
    said += [f"{whole.title}: {whole.words()}" for whole in together(saves)]
    return "; ".join(said) or "no save under way"


def text(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """The saves, then a line for each checkpoint."""
    lines = ["checkpoints: " + summary(saves, folder)]
    for whole in together(saves):
        lines += [
            f"  rank {each.rank}: {format_bytes(each.save.written)} of {format_bytes(each.save.total)}"
            for each in whole.ranks
        ]
        lines += [f"  {whole.error}"] if whole.error else []
    if folder is not None and folder.checkpoints:
        lines.append(table(HEADINGS, [_row(each) for each in folder.checkpoints])["text/plain"])
    return "\n".join(lines)


def html(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """The saves with their bars, and a table of the checkpoints."""
    said = [f"<p>checkpoints: {escape(summary(saves, folder))}</p>"]
    for whole in together(saves):
        progress = bar([("written", whole.written, BLUE)], whole.total, width="16em")
        said.append(f"<p>{progress} {escape(whole.title)}: {escape(whole.words())} {escape(whole.error)}</p>")
    if folder is not None and folder.checkpoints:
        said.append(table(HEADINGS, [_row(each) for each in folder.checkpoints])["text/html"])
    return "".join(said)


def svg(saves: Saves | None, folder: CheckpointFolder | None) -> str:
    """The saves with a bar for each rank, and the checkpoints, as a picture."""
    title = summary(saves, folder)
    shapes, y = [words(12, 24, title, size=14)], 40.0
    for whole in together(saves):
        colour = {"failed": VERMILLION, "done": GREEN}.get(whole.phase, BLUE)
        shapes.append(words(12, y + 14, f"{whole.title}: {whole.words()}"))
        y += 22
        for each in whole.ranks:
            share = each.save.written / each.save.total if each.save.total else 0
            shapes += [
                words(36, y + 11, str(each.rank), anchor="end", size=11),
                rect(44, y, 300, 12, "none", extra=f" stroke='{LINE}'"),
                rect(44, y, 300 * share, 12, colour, title=f"rank {each.rank}"),
                words(352, y + 11, f"{format_bytes(each.save.written)} of {format_bytes(each.save.total)}", size=11),
            ]
            y += 16
        y += 8
    for each_stored in folder.checkpoints if folder is not None else ():
        for x, cell in zip((12, 64, 190, 240, 400, 480, 530), _row(each_stored), strict=True):
            shapes.append(words(x, y + 14, cell, fill=FAINT if x == 12 else "#1f2328"))
        y += 22
    return picture(900, y + 12, title, shapes)
