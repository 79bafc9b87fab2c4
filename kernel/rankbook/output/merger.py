"""Merges what the ranks of one cell print and display into what the notebook shows, live.

Owns: labels, how long one rank waits for the others, and what `clear_output` of some ranks leaves to see. Refuses:
clocks, sockets, front ends; bytes and carriage returns (lines.py); which items are the same (queues.py).

What all ranks have to say next is shown once, for all; what differs is shown rank by rank. While a rank that still runs
has nothing to compare, the others wait a moment for it. The order within a rank is always kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rankbook.output.history import OutputHistory
from rankbook.output.interleave import (
    ClearItem,
    DisplayItem,
    RankQueue,
    Ranks,
    Rows,
    SingleItem,
    TextBatch,
    interleave,
)
from rankbook.output.terminal import LiveDisplays, StreamName, TerminalRow
from rankbook.protocol.messages import Clear, Display, Text, TextCut
from rankbook.ranks import format_ranks, name_ranks

_PACE = 0.02
"""Seconds between two flushes that nothing but new text asks for: Jupyter drops what comes by the thousand."""
_LABEL_STYLE = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
"""Of a label before HTML: that of the labels before text."""


@dataclass(frozen=True)
class Stream:
    """Append `text` to the cell's output."""

    name: StreamName
    text: str


@dataclass(frozen=True)
class RichOutput:
    """Display a mime bundle, or replace the one that was displayed as `display_id`."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    update: bool = False


@dataclass(frozen=True)
class ClearOutput:
    """Clear the cell's output: now, or (`wait`) when something comes in its place."""

    wait: bool


Emit = Stream | RichOutput | ClearOutput


class OutputView(Protocol):
    """What stands in the notebook, and what is to be sent next so that it stands there."""

    live: LiveDisplays

    def head(self, bundle: Mapping[str, str]) -> None:
        """Show this above everything else, or in place of what stands there."""

    def put(self, turn: TextBatch | SingleItem) -> None:
        """Show what is next."""

    def show_live(self, rows: Sequence[TerminalRow], now: float) -> None:
        """Show what has changed in the live regions, and `rows` in one of them from now on."""

    def take(self) -> list[Emit]:
        """What is to be sent now."""


class OutputMerger:
    """Merges the output of `ranks`. `key` is the cell's own and starts its live regions' display ids.

    `cluster_key` makes a rank's display ids its own, in all cells. `hold` is how many seconds a rank waits for the
    others, `live_after` how old a half line must be to be shown, `live_every` the seconds between two updates of what
    is live; `page` is what it is shown on, by default one stream. Nothing happens by itself: call `flush` at
    `deadline`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        key: str,
        cluster_key: str,
        hold: float = 0.1,
        live_after: float = 0.3,
        live_every: float = 0.1,
        page: OutputView | None = None,
    ) -> None:
        self._open = set(ranks)
        self._hold = hold
        self._sources: dict[int, RankQueue] = {}
        self._queued: dict[int, RankQueue] = {}
        self._last = float("-inf")
        if page is None:
            live = LiveDisplays(f"{key}-live", after=live_after, every=live_every)
            page = _MergedView(len(ranks), f"rankbook-{cluster_key}", f"{key}-head", live)
        self._page = page

    def feed(self, rank: int, message: Text | TextCut | Display | Clear, now: float) -> None:
        """A rank has printed, displayed or cleared something."""
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = RankQueue(rank)
        source.feed(message, now)
        if source.items:
            self._queued[rank] = source

    def finish(self, rank: int, now: float) -> None:
        """The rank's part of the cell has ended: what it has begun to print is a line, and nobody waits for it."""
        self._open.discard(rank)
        source = self._sources.get(rank)
        if source is not None:
            source.end_rows(now)
            if source.items:
                self._queued[rank] = source

    def flush(self, now: float) -> list[Emit]:
        """What may be shown now."""
        self._merge(now, None)
        return self._take(now, force=False)

    def drain_rank(self, rank: int, now: float) -> list[Emit]:
        """Everything of one rank, a half line too, whoever else is not there yet."""
        source = self._sources.get(rank)
        if source is not None:
            source.end_rows(now)
            if source.items:
                self._queued[rank] = source
            self._merge(now, rank)
        return self._take(now, force=True)

    def close(self, now: float) -> list[Emit]:
        """Everything that is left."""
        for rank in (*self._open, *self._sources):
            self.finish(rank, now)
        self._merge(now, None)
        return self._take(now, force=True)

    def head(self, bundle: Mapping[str, str], now: float) -> list[Emit]:
        """Show this above all output, or in place of what was shown so before; and what may be shown now."""
        self._page.head(bundle)
        return self.flush(now)

    @property
    def deadline(self) -> float | None:
        """When `flush` has something to show if nothing more comes; None: nothing waits."""
        live = self._page.live
        times = [max(live.when(row), live.turn) for row in self._hidden_rows()]
        if live.changed:
            times.append(live.turn)
        if self._queued:
            sources = self._queued.values()
            hold = 0.0 if self._open <= self._queued.keys() or any(each.alone for each in sources) else self._hold
            oldest = min(source.items[0].time for source in sources)
            times.append(oldest if any(each.full for each in sources) else max(oldest + hold, self._last + _PACE))
        return min(times, default=None)

    def _take(self, now: float, *, force: bool) -> list[Emit]:
        live = self._page.live
        if force or now >= live.turn:
            self._page.show_live([row for row in self._hidden_rows() if live.when(row) <= now], now)
        emits = self._page.take()
        if emits:
            self._last = now
        return emits

    def _hidden_rows(self) -> list[TerminalRow]:
        """Unfinished rows that may be shown: all that their rank sent before them is."""
        return [
            row
            for source in self._sources.values()
            if not source.items
            for screen in source.screens.values()
            for row in screen.hidden()
        ]

    def _merge(self, now: float, drained: int | None) -> None:
        while self._queued:
            sources = [self._queued[rank] for rank in sorted(self._queued)]
            if drained is not None:
                may = [source.count if source.rank == drained else 0 for source in sources]
            elif self._open <= self._queued.keys():
                may = [source.count for source in sources]
            else:
                may = [source.due(now, self._hold) for source in sources]
            if not any(may):
                return
            for turn in interleave(sources, may):
                self._page.put(turn)
            for source in sources:
                if not source.items:
                    del self._queued[source.rank]


class _Labels(dict[Ranks, str]):
    def __missing__(self, ranks: Ranks) -> str:
        label = self[ranks] = f"[{format_ranks(ranks)}]"
        return label


class _MergedView:
    """The cell's output: what is to be sent next, and what stands there. `width` is the number of the cell's ranks."""

    def __init__(self, width: int, prefix: str, head: str, live: LiveDisplays) -> None:
        self.live = live
        self._width = width
        self._prefix = prefix
        self._head_name = head
        self._head: RichOutput | None = None
        self._labels = _Labels()
        self._record = OutputHistory()
        self._clearing: set[int] = set()
        self._emits: list[Emit] = []
        self._updates: dict[str, RichOutput] = {}
        self._stream: StreamName = "stdout"
        self._texts: list[str] = []

    def head(self, bundle: Mapping[str, str]) -> None:
        """See `OutputView`. What stands there already is shown again below, unless part of it is forgotten."""
        update = self._head is not None
        self._head = RichOutput(dict(bundle), {}, self._head_name)
        if update:
            self._updates[self._head_name] = RichOutput(dict(bundle), {}, self._head_name, update=True)
        elif self._record.entries or self.live.shown or self._emits or self._texts:
            if self._record.forgotten or self._clearing:
                self._end_text()
                self._emits.append(self._head)
            else:
                self._clear(wait=True)
        else:
            self._emits.append(self._head)

    def put(self, turn: TextBatch | SingleItem) -> None:
        """Show what is next."""
        match turn:
            case TextBatch(stream, rows):
                self.lines(stream, rows)
            case SingleItem(DisplayItem() as shown, ranks):
                self.display(shown, ranks)
            case SingleItem(ClearItem(wait=wait), ranks):
                self._clearing.update(ranks)
                if not wait:
                    self._clear(wait=False)

    def lines(self, stream: StreamName, rows: Rows) -> None:
        """Show lines."""
        self._begin()
        if self._stream != stream:
            self._end_text()
            self._stream = stream
        labels = self._labels
        self._texts += [f"{labels[ranks]} {line}\n" if line else f"{labels[ranks]}\n" for ranks, line in rows]
        self._record.add_lines(stream, rows)
        self.live.bury()

    def display(self, shown: DisplayItem, ranks: Ranks) -> None:
        """Show a display, or update one."""
        message, label, name = shown.message, self._labels[ranks], None
        if message.display_id is not None:
            name = f"{self._prefix}-{ranks[0]}-{message.display_id}"
            self._updates.pop(name, None)
        data = _label_bundle(message.data, label)
        if name is not None and message.kind == "update":
            self._updates[name] = RichOutput(data, message.metadata, name, update=True)
            self._record.update(ranks[0], message)
            return
        self._begin()
        self._end_text()
        if self._width > 1 and "text/html" not in data and data.keys() != {"text/plain"}:
            self._emits.append(RichOutput({"text/plain": label}, {}))
        self._emits.append(RichOutput(data, message.metadata, name))
        self._record.add_display(shown, ranks)
        self.live.bury()

    def show_live(self, rows: Sequence[TerminalRow], now: float) -> None:
        """Show what has changed in the live regions, and `rows` in one of them from now on."""
        if rows:
            self._begin()
        for row in rows:
            self.live.place(row)
        for name, live, update in self.live.updates(now):
            text = "\n".join(f"[{rank}] {row}" for rank, row in live)
            rich = RichOutput({"text/plain": text}, {}, name, update)
            if update:
                self._updates[name] = rich
            else:
                self._end_text()
                self._emits.append(rich)
        for row in self.live.retire():
            self._record.add_lines(row.screen.stream, [((row.screen.rank,), row.final)])

    def take(self) -> list[Emit]:
        """What is to be sent now. Updates come last, and of each display only the newest: they have no place."""
        self._end_text()
        emits, self._emits = [*self._emits, *self._updates.values()], []
        self._updates.clear()
        return emits

    def _begin(self) -> None:
        if self._clearing:
            self._clear(wait=True)

    def _clear(self, *, wait: bool) -> None:
        """Clear the notebook's cell, which cannot be done in part, and show again what other ranks had there."""
        cleared, self._clearing = self._clearing, set()
        record, self._record = self._record, OutputHistory()
        self._end_text()
        self._emits.append(ClearOutput(wait))
        if self._head is not None:
            self._updates.pop(self._head_name, None)
            self._emits.append(self._head)
        self.live.clear(cleared)
        lost = record.forgotten - cleared
        if lost:
            self._stream = "stderr"
            words = f"earlier output of {name_ranks(lost)} was cleared together with that of {name_ranks(cleared)}\n"
            self._texts.append(words)
        for entry in record.entries:
            if entry.shown is not None and not cleared.issuperset(entry.ranks):
                self.display(entry.shown, tuple(sorted(entry.ranks - cleared)))
            left = [(tuple(rank for rank in ranks if rank not in cleared), line) for ranks, line in entry.rows]
            rows = [(ranks, line) for ranks, line in left if ranks]
            if rows and entry.stream is not None:
                self.lines(entry.stream, rows)

    def _end_text(self) -> None:
        if self._texts:
            self._emits.append(Stream(self._stream, "".join(self._texts)))
            self._texts = []


def _label_bundle(data: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A mime bundle with the label in its text and before its HTML."""
    labelled = dict(data)
    text, html = data.get("text/plain"), data.get("text/html")
    if isinstance(text, str):
        labelled["text/plain"] = f"{label} " + text.replace("\n", "\n" + " " * (len(label) + 1))
    if isinstance(html, str):
        labelled["text/html"] = f'<div style="{_LABEL_STYLE}">{label}</div>{html}'
    return labelled
