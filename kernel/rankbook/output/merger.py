r"""Merge the output of all ranks of a cell into one live notebook output.

Theory of operation. The ranks of a cell print and display independently, but a notebook cell has a single output area,
which a front end can only append to, clear as a whole, or update by display id. `OutputMerger` turns the first into the
second: text that several ranks print is shown once, labelled `[0-3]`, and text that differs is shown per rank. It is
pure code. It reads no clock (every call takes `now`, in monotonic seconds), opens no socket and starts no thread. It
returns `Emit` items, and its caller sends them to the front end.

Parts:

    terminal.py    bytes of one stream -> lines and unfinished rows; live displays for the latter
    interleave.py  one queue of items per rank, and the order in which the queues are consumed
    merger.py      timing (`OutputMerger`), the notebook's single output area (`_MergedView`), and recently shown output
                   with its ranks, for replay after a partial clear (`OutputHistory`)
    by_rank.py     alternative to `_MergedView`: blocks of output grouped by rank, for the output panel

Sources. A rank sends `Text` (bytes of stdout or stderr), `Display` (a mime bundle: a new display, a result or an
update), `Clear` (`clear_output`), `TextCut` where it has omitted excessive output, and `OutputBarrier` at a place that
all ranks mark, which is not shown. All of them arrive through `add_output`. `finish` says that a rank is done with the
cell, so the others no longer wait for it.

Thread. The coordinator's driver thread makes every call, through `RunningCell`, so there are no locks. The driver feeds
messages as they arrive, sleeps until `deadline` at most, and then calls `flush`. If merging raises an error, the driver
reports it once and shows no more output of this cell, but the cell continues and its result is complete.

Queues. `add_output` decodes text to whole lines and appends these, displays and clears to the rank's queue. An
unfinished line stays in its `TerminalStream`. It is completed by a newline, by a display or another item of the same
rank (which must come after it), or by the end of the rank's part. The rank's other stream does not complete it. The
order of items within a rank is therefore always kept; only the order between ranks is chosen here.

Order between ranks. While all ranks that still run have queued output, there is no reason to wait, and everything that
is queued is shown. Otherwise an item waits up to `hold` seconds (0.1) for equal items of other ranks, so that ranks in
lockstep share a line although their messages arrive at different times. An item that no other rank can have (a display
with a display id) does not wait. A queue above 4 Mi characters or 20,000 items does not wait either. `interleave` then
groups equal items at the heads of the queues and shows one item for the group. If the item at the head of one queue
appears among the next 64 items of another queue, it waits until that queue has caught up; so an extra line on one rank
does not split the ranks for the rest of the cell.

Order of events in a flush. First the due items are taken out of the queues and shown in the order above. Then new
unfinished rows are added to live displays, and changed live displays are updated. At last the latest updates of other
displays are sent. `drain_rank` and `close` do the same without waiting: before a rank asks for input, after its process
has ended, and at the end of the cell.

Pace. New text alone causes a flush at most every 20 ms, because Jupyter drops output above about 1,000 messages per
second. The caller may flush less often.

Carriage returns. Progress bars rewrite a row with `\r`, `\b` and cursor movements. `TerminalStream` applies these as a
terminal would. A row that has been rewritten is shown at once, and a plain unfinished line (a prompt, or
`print(end="")`) after `live_after` seconds (0.3). Both go to a live display: one display with a row per bar and rank,
updated every 0.1 s at most. Intermediate states are dropped; only the latest state is sent. A
finished row remains in its live display, and is not printed again as a line. Rows are shown live only after everything
that their rank sent before them has been shown.

Display updates. The front end identifies a display by cluster, rank and display id, so ranks that use the same id do
not overwrite one another's displays, and an update works from a later cell. Updates are sent at the end of a flush, and
only the newest of every display, because their position does not matter.

Clearing. A front end can clear only the whole cell, but a rank clears only its own output. So `_MergedView` clears the
cell, and then shows again what the other ranks have there, from `OutputHistory`, in the same order. A live display has
a place in the history from when it is first shown. It is opened again in this place, and its rows become lines of the
history once they can no longer change. With `clear_output(wait=True)` this is delayed until the cell shows something
new, which avoids flicker. Ranks that clear in lockstep clear once. The history is bounded (256 Ki characters and 200
entries; a display counts a sixteenth of its size). If the cleared cell held older output of other ranks, a line on
stderr says that it was cleared along with the rest. The status header, which appears above the output of a long-running
cell, is placed by such a clear too, unless the cell shows something that is not in the history: an open question, an
answer, or a message of Rankbook. Then it is appended. In a terminal, which cannot be cleared (`can_clear` False), the
clears of ranks are ignored, so that no line is shown twice.

What is kept and what is dropped. Every line and every display is shown, except for the following. Intermediate states
of rewritten rows and of updated displays are dropped; only the latest state is sent. Of a live row, at most the last
1,000 characters are shown. Lines that a rank has omitted are replaced by a line that names the log file with the
complete output. Independently of what is shown, the `CellResult` keeps the output of every rank up to a limit,
including output that was cleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rankbook.output.interleave import (
    ClearItem,
    DisplayItem,
    RankQueue,
    Ranks,
    Rows,
    SingleItem,
    TextBatch,
    interleave,
    is_view_of,
)
from rankbook.output.terminal import LiveDisplay, LiveDisplays, TerminalRow
from rankbook.protocol import VIEW, StreamName
from rankbook.protocol.messages import Clear, Display, OutputBarrier, Text, TextCut
from rankbook.ranks import format_ranks, name_ranks

_MAX_TEXT, _MAX_ENTRIES = 256 << 10, 200
"""Limits of the record of a cell: characters and entries."""
_MAX_ENTRY_TEXT = 16 << 10
"""Characters after which lines go to a new entry. Entries are dropped as a whole, so small ones lose less at a time."""


@dataclass(eq=False)
class HistoryEntry:
    """Lines of one stream with the ranks that printed them, one display, or the place of one live display.

    `live_id` is the id of the live display. `LiveDisplays` has its rows until they are recorded as lines.
    """

    stream: StreamName | None
    ranks: set[int] = field(default_factory=set)
    size: int = 0
    rows: list[tuple[Ranks, str]] = field(default_factory=list)
    display: DisplayItem | None = None
    live_id: str | None = None


class OutputHistory:
    """Bounded record of the output shown in a cell, oldest first.

    `forgotten` are the ranks with output in the notebook that has been dropped from the record.
    """

    def __init__(self) -> None:
        self.entries: deque[HistoryEntry] = deque()
        self.forgotten: set[int] = set()
        self._size = 0

    def add_lines(self, stream: StreamName, rows: Rows) -> None:
        """Record lines that were shown. If they alone exceed the limit, their first half is dropped until they fit."""
        # Lines that exceed the record by themselves: keep the last ones, which are nearest to what follows.
        ranks = set().union(*{ranks for ranks, _ in rows})
        while (size := sum(len(line) + 1 for _, line in rows)) > _MAX_TEXT:
            rows = rows[(len(rows) + 1) // 2 :]
            self.forgotten |= ranks
        self._add(HistoryEntry(stream, ranks, size, list(rows)))

    def add_display(self, display: DisplayItem, ranks: Ranks) -> None:
        """Record a display that was shown.

        It counts a sixteenth of its size: figures are large, and should survive a clear by another rank.
        """
        self._add(HistoryEntry(None, set(ranks), display.size // 16, display=display))

    def add_live(self, display_id: str) -> None:
        """Record that a live display was shown."""
        self._add(HistoryEntry(None, live_id=display_id))

    def finish_live(self, display: LiveDisplay) -> None:
        """Record the rows of a live display that will not change any more, as lines in its place."""
        settled = []
        for row in display.rows:
            rank, line = row.terminal.rank, row.final
            settled.append(HistoryEntry(row.terminal.stream, {rank}, len(line) + 1, [((rank,), line)]))
        entries = list(self.entries)
        index = next((i for i, entry in enumerate(entries) if entry.live_id == display.display_id), None)
        if index is None:
            # Its entry was dropped, with everything before it, so the rows have no place in the record.
            self.forgotten.update(*(entry.ranks for entry in settled))
            return
        self.entries = deque(entries[:index])
        for entry in settled + entries[index + 1 :]:
            self._append(entry)
        self._size += sum(entry.size for entry in settled)
        self._drop_oldest()

    def update(self, rank: int, message: Display) -> None:
        """Apply an update to a recorded display of `rank`."""
        # The display with this id that was shown last is the one that the front end updates.
        for entry in reversed(self.entries):
            if entry.display and entry.ranks == {rank} and entry.display.message.display_id == message.display_id:
                entry.display = entry.display.updated(message)
                return

    def forget_widget(self, model_id: str) -> None:
        """Forget a widget whose model is closed: a front end could not show it again."""
        for entry in tuple(self.entries):
            if entry.display is not None and is_view_of(entry.display.message.data, model_id):
                self.entries.remove(entry)
                self._size -= entry.size

    def _add(self, entry: HistoryEntry) -> None:
        self._size += entry.size
        self._append(entry)
        self._drop_oldest()

    def _append(self, entry: HistoryEntry) -> None:
        last = self.entries[-1] if self.entries else None
        # Lines join the last entry, as long as it is small.
        if last is None or entry.stream is None or last.stream != entry.stream or last.size > _MAX_ENTRY_TEXT:
            self.entries.append(entry)
            return
        last.ranks |= entry.ranks
        last.rows += entry.rows
        last.size += entry.size

    def _drop_oldest(self) -> None:
        while self._size > _MAX_TEXT or len(self.entries) > _MAX_ENTRIES:
            old = self.entries.popleft()
            self._size -= old.size
            # What is dropped here can never be shown again. `set_header` and `_clear` ask for it.
            self.forgotten |= old.ranks


_MIN_FLUSH_INTERVAL = 0.02
"""Minimum seconds between two flushes for new text alone: Jupyter drops output above about 1,000 messages a second."""
_HOLD = 0.1
"""Seconds that an item waits for equal items of other ranks."""
_LABEL_STYLE = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
"""Style of the label above HTML output, the same as that of labels in text."""


@dataclass(frozen=True)
class Stream:
    """Text to append to the cell's output."""

    name: StreamName
    text: str


@dataclass(frozen=True)
class RichOutput:
    """A mime bundle to display, or (`update`) to replace the one displayed as `display_id`."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    update: bool = False


@dataclass(frozen=True)
class ClearOutput:
    """A request to clear the cell's output: at once, or with `wait` when the next output arrives."""

    wait: bool


Emit = Stream | RichOutput | ClearOutput


class OutputView(Protocol):
    """Protocol of the areas that merged output is shown in.

    A view records what it shows, and collects the items to send until `take` is called. The driver thread makes all
    calls. `text_size` is the number of characters of lines that it shows by other means than these items.
    """

    live: LiveDisplays
    text_size: int

    def set_header(self, bundle: Mapping[str, str], *, may_clear: bool = True) -> None:
        """Show `bundle` above all other output, or replace the bundle shown there.

        With `may_clear` False, do not clear the cell for this: it shows output that the view does not know.
        """

    def show(self, item: TextBatch | SingleItem) -> None:
        """Show the next batch of lines, display or clear."""

    def forget_widget(self, model_id: str) -> None:
        """Do not show the widget again: its model is closed."""

    def show_live(self, rows: Sequence[TerminalRow], now: float) -> None:
        """Add `rows` to the live displays, and update the live displays that have changed."""

    def take(self) -> list[Emit]:
        """Return the items to send now, and forget them."""


class OutputMerger:
    """Merge the output of `ranks`.

    `key` identifies the cell and is the prefix of its live displays' ids. `cluster_key` makes the display ids of a rank
    unique to the cluster and the same in all cells. `live_after` is the age, in seconds, at which an unfinished line is
    shown. `view` is the view to show output in, by default the cell's single output area; `can_clear` tells whether
    that can be cleared, and `shows_live` whether unfinished lines are shown in live displays. The merger has no timer:
    call `flush` at `deadline`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        key: str,
        cluster_key: str,
        live_after: float = 0.3,
        view: OutputView | None = None,
        can_clear: bool = True,
        shows_live: bool = True,
    ) -> None:
        self._shows_live = shows_live
        # Ranks that may still send output, and that the others therefore wait for.
        self._open = set(ranks)
        # The subset of `_open` without queued items: those that the queued items of the others wait for.
        self._silent = set(ranks)
        self._sources: dict[int, RankQueue] = {}
        # The subset of `_sources` with queued items. Most ranks have none at most times, and the loops visit only
        # these.
        self._queued: dict[int, RankQueue] = {}
        # Properties of the queues together, kept up to date so that `deadline`, which the caller reads after every
        # message, looks at no queue: the time of the oldest item, whether an item at a head need not wait for other
        # ranks, and whether a queue is above its limits.
        self._oldest = float("inf")
        self._has_unshared = self._has_full = False
        # Ranks with a row that is not a line yet. Only they can have rows to show live.
        self._unfinished: set[int] = set()
        self._last_emit = float("-inf")
        if view is None:
            live = LiveDisplays(f"{key}-live", after=live_after)
            view = _MergedView(len(ranks), cluster_key, f"{key}-head", live, can_clear=can_clear)
        self._view = view

    def add_output(self, rank: int, message: Text | TextCut | Display | Clear | OutputBarrier, now: float) -> None:
        """Queue what a rank has printed, displayed or cleared."""
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = RankQueue(rank)
        source.add_output(message, now)
        self._update_rank(source)

    def finish(self, rank: int, now: float) -> None:
        """Record that a rank's part of the cell has ended: end its unfinished rows, and stop waiting for its output."""
        # Before the queues are looked at: without this rank, the others may be complete.
        self._open.discard(rank)
        self._silent.discard(rank)
        self._end_rows(rank, now)

    def _end_rows(self, rank: int, now: float) -> None:
        source = self._sources.get(rank)
        if source is not None:
            source.end_rows(now)
            self._update_rank(source)

    def _update_rank(self, source: RankQueue) -> None:
        """Record what has changed after `source` was given output or has ended its rows."""
        rank = source.rank
        # Text without a newline may have stayed in the terminal.
        if source.items:
            if rank not in self._queued:
                self._queued[rank] = source
                self._silent.discard(rank)
                self._note_head(source)
            self._has_full = self._has_full or source.full
        if any(terminal.unfinished for terminal in source.terminals.values()):
            self._unfinished.add(rank)
        else:
            self._unfinished.discard(rank)

    def _note_head(self, source: RankQueue) -> None:
        self._oldest = min(self._oldest, source.items[0].time)
        self._has_unshared = self._has_unshared or source.unshared

    def _remove_empty_queues(self) -> None:
        """Update what is known of the queues after items were taken."""
        self._oldest, self._has_unshared, self._has_full = float("inf"), False, False
        for rank, source in tuple(self._queued.items()):
            if source.items:
                self._note_head(source)
                self._has_full = self._has_full or source.full
            else:
                del self._queued[rank]
                if rank in self._open:
                    self._silent.add(rank)

    def flush(self, now: float) -> list[Emit]:
        """Return what can be shown now."""
        # Lines first. A live row is shown only when everything that its rank sent before it has been shown.
        self._merge(now, None)
        return self._take(now, force=False)

    def drain_rank(self, rank: int, now: float) -> list[Emit]:
        """Return all output of `rank`, including an unfinished line, without waiting for other ranks.

        Used before the rank asks for input and after its process has ended.
        """
        self._end_rows(rank, now)
        self._merge(now, rank)
        return self._take(now, force=True)

    def forget_widget(self, model_id: str) -> None:
        """Do not show the widget again: its model is closed."""
        self._view.forget_widget(model_id)

    def close(self, now: float) -> list[Emit]:
        """Finish all ranks and return everything that is left."""
        # Also ranks that have sent nothing, and ranks that have finished already: for those it changes nothing.
        for rank in (*self._open, *self._sources):
            self.finish(rank, now)
        self._merge(now, None)
        return self._take(now, force=True)

    def set_header(self, bundle: Mapping[str, str], now: float, *, may_clear: bool = True) -> list[Emit]:
        """Show `bundle` above all output, or replace the bundle shown there, and return what can be shown now.

        `may_clear`: see `OutputView`.
        """
        self._view.set_header(bundle, may_clear=may_clear)
        return self.flush(now)

    @property
    def deadline(self) -> float | None:
        """Time at which `flush` has something to show if no more output arrives; None if nothing is waiting."""
        live = self._view.live
        # Three things may be due: hidden rows, changed live displays, and queued items.
        times = [max(live.visible_at(row), live.next_update) for row in self._hidden_rows()]
        if live.changed:
            times.append(live.next_update)
        if self._queued:
            # The oldest item is due after `hold`, or as soon as the pace allows if no rank is waited for. A queue above
            # its limits ignores the pace too.
            hold = 0.0 if not self._silent or self._has_unshared else _HOLD
            times.append(
                self._oldest if self._has_full else max(self._oldest + hold, self._last_emit + _MIN_FLUSH_INTERVAL)
            )
        return min(times, default=None)

    def _take(self, now: float, *, force: bool) -> list[Emit]:
        live = self._view.live
        if force or now >= live.next_update:
            # Without `force`, live displays keep their own pace. At the end of a part they must be up to date.
            self._view.show_live([row for row in self._hidden_rows() if live.visible_at(row) <= now], now)
        emits = self._view.take()
        if emits:
            self._last_emit = now
        return emits

    def _hidden_rows(self) -> list[TerminalRow]:
        """Return the unfinished rows that may be shown: all that their rank sent before them has been."""
        if not self._unfinished or not self._shows_live:
            return []
        return [
            row
            for rank, source in self._sources.items()
            if rank in self._unfinished and not source.items
            for terminal in source.terminals.values()
            for row in terminal.hidden_rows()
        ]

    # Move output from the queues to the view. `allowed_counts` is the number of items per queue that need not wait: all
    # items of the drained rank; all items of all queues if every rank that still runs has output; otherwise those that
    # have waited long enough. A drained item is still shown together with equal items of other ranks. `interleave` may
    # return early, when a queue is empty, so it is called until nothing more may be shown.

    # Example: with two ranks, rank 0 prints a line at 0.00 s. If rank 1 prints the same line at 0.03 s, both ranks have
    # output, and the line is shown once, as [0-1]. If rank 1 prints nothing, the line is shown at 0.10 s, as [0].
    def _merge(self, now: float, drained: int | None) -> None:
        # Every round takes at least one item, or returns.
        while self._queued:
            sources = [self._queued[rank] for rank in sorted(self._queued)]
            if drained is not None:
                allowed_counts = [source.count if source.rank == drained else 0 for source in sources]
            elif not self._silent:
                allowed_counts = [source.count for source in sources]
            else:
                allowed_counts = [source.due(now, _HOLD) for source in sources]
            if not any(allowed_counts):
                return
            for item in interleave(sources, allowed_counts):
                self._view.show(item)
            self._remove_empty_queues()


class _Labels(dict[Ranks, str]):
    def __missing__(self, ranks: Ranks) -> str:
        label = self[ranks] = f"[{format_ranks(ranks)}]"
        return label


class _MergedView:
    """The cell's single output area: its content, and the items to send next.

    `rank_count` is the number of ranks in the cell.
    """

    def __init__(
        self, rank_count: int, cluster_key: str, header_id: str, live: LiveDisplays, *, can_clear: bool = True
    ) -> None:
        self.live = live
        self.text_size = 0
        self._can_clear = can_clear
        self._rank_count = rank_count
        self._cluster_key = cluster_key
        self._header_id = header_id
        self._header: RichOutput | None = None
        self._labels = _Labels()
        self._history = OutputHistory()
        self._clearing: set[int] = set()
        self._emits: list[Emit] = []
        self._updates: dict[str, RichOutput] = {}
        self._stream: StreamName = "stdout"
        self._texts: list[str] = []

    def set_header(self, bundle: Mapping[str, str], *, may_clear: bool = True) -> None:
        """See `OutputView`.

        A display cannot be inserted above existing output, so that is cleared and shown again below the header. If part
        of it is not in the history, or a clear is pending, the header goes below it instead.
        """
        update = self._header is not None
        # The display id stays the same, so that later headers replace the first one in place.
        self._header = RichOutput(dict(bundle), {}, self._header_id)
        if update:
            self._updates[self._header_id] = RichOutput(dict(bundle), {}, self._header_id, update=True)
        elif self._history.entries or self.live.has_displays or self._emits or self._texts:
            # A replay must not lose output, and a pending clear will place the header itself.
            if not may_clear or self._history.forgotten or self._clearing:
                self._end_text()
                self._emits.append(self._header)
            else:
                self._clear(wait=True)
        else:
            self._emits.append(self._header)

    def show(self, item: TextBatch | SingleItem) -> None:
        match item:
            case TextBatch(stream, rows):
                self.add_lines(stream, rows)
            case SingleItem(DisplayItem() as display, ranks):
                self.add_display(display, ranks)
            case SingleItem(ClearItem(wait=wait), ranks) if self._can_clear:
                self._clearing.update(ranks)
                if not wait:
                    self._clear(wait=False)

    # Text is collected in `_texts`, and sent as one message when something else follows (`_end_text`).
    def add_lines(self, stream: StreamName, rows: Rows) -> None:
        """Append `rows` of `stream`, labelled with their ranks."""
        self._apply_pending_clear()
        if self._stream != stream:
            self._end_text()
            self._stream = stream
        labels = self._labels
        self._texts += [f"{labels[ranks]} {line}\n" if line else f"{labels[ranks]}\n" for ranks, line in rows]
        self._history.add_lines(stream, rows)
        self.live.mark_output_below()

    def forget_widget(self, model_id: str) -> None:
        """See `OutputView`."""
        self._history.forget_widget(model_id)

    def add_display(self, display: DisplayItem, ranks: Ranks) -> None:
        """Append a display, or update one."""
        message, label, name = display.message, self._labels[ranks], None
        if message.display_id is not None:
            # The rank is part of the id. A display with an id is never shared, so it has one rank.
            name = _display_id(self._cluster_key, ranks[0], message)
            # An update that has not been sent is older than the new display with this id.
            self._updates.pop(name, None)
        is_widget, several = VIEW in message.data, self._rank_count > 1
        in_html = not several or _shows_html(message.data)
        data = dict(message.data) if is_widget else _label_bundle(message.data, label, in_html=in_html)
        # An update changes a display in place, wherever it is, so it neither ends the text nor applies a pending clear.
        # One of an earlier panel, which has become static, is shown again in this cell, and has an id from then on.
        in_panel = (self._cluster_key, ranks[0], str(message.display_id))
        if name is not None and message.kind == "update" and in_panel not in shown_by_rank:
            self._updates[name] = RichOutput(data, message.metadata, name, update=True)
            self._history.update(ranks[0], message)
            return
        shown_by_rank.pop(in_panel, None)
        self._apply_pending_clear()
        self._end_text()
        # An image has no place for a label, so the label is shown as text above it.
        has_place = data.keys() == {"text/plain"} or ("text/html" in data and in_html)
        if several and not is_widget and not has_place:
            self._emits.append(RichOutput({"text/plain": label}, {}))
        self._emits.append(RichOutput(data, message.metadata, name))
        self._history.add_display(display, ranks)
        self.live.mark_output_below()

    def show_live(self, rows: Sequence[TerminalRow], now: float) -> None:
        if rows:
            self._apply_pending_clear()
        for row in rows:
            self.live.add_row(row)
        self._update_live(now)
        # From here on the rows are ordinary output.
        for display in self.live.remove_finished():
            self._history.finish_live(display)

    def _update_live(self, now: float) -> None:
        # The first state is appended to the output, later ones replace it.
        for name, live, update in self.live.updates(now):
            text = "\n".join(f"[{rank}] {row}" for rank, row in live)
            rich = RichOutput({"text/plain": text}, {}, name, update)
            if update:
                self._updates[name] = rich
            else:
                self._end_text()
                self._emits.append(rich)
                self._history.add_live(name)

    def take(self) -> list[Emit]:
        """Return the items to send now, with updates last and only the newest update of every display."""
        self._end_text()
        emits, self._emits = [*self._emits, *self._updates.values()], []
        self._updates.clear()
        return emits

    def _apply_pending_clear(self) -> None:
        if self._clearing:
            self._clear(wait=True)

    def _clear(self, *, wait: bool) -> None:
        """Clear the notebook's cell, then show again what the ranks that did not clear had there.

        A front end has no way to clear part of a cell.
        """
        # The new record is filled by the replay itself: what shows the output adds it.
        cleared, self._clearing = self._clearing, set()
        history, self._history = self._history, OutputHistory()
        # Text before the clear is sent before it. The front end then removes it with the rest.
        self._end_text()
        self._emits.append(ClearOutput(wait))
        if self._header is not None:
            self._updates.pop(self._header_id, None)
            # The header is the first display of the cleared cell.
            self._emits.append(self._header)
        self.live.clear(cleared)
        live_rows = self.live.take()
        lost_ranks = history.forgotten - cleared
        if lost_ranks:
            self._stream = "stderr"
            note = (
                f"earlier output of {name_ranks(lost_ranks)} was cleared together with that of {name_ranks(cleared)}\n"
            )
            self._texts.append(note)
        # A live display whose place was dropped from the record is older than all that is recorded.
        recorded = {entry.live_id for entry in history.entries}
        for name, live in live_rows.items():
            if name not in recorded:
                self._open_live(live)
        for entry in history.entries:
            if entry.live_id in live_rows:
                self._open_live(live_rows[entry.live_id])
            if entry.display is not None and not cleared.issuperset(entry.ranks):
                # A display of several ranks stays for those that have not cleared.
                self.add_display(entry.display, tuple(sorted(entry.ranks - cleared)))
            remaining = [(tuple(rank for rank in ranks if rank not in cleared), line) for ranks, line in entry.rows]
            rows = [(ranks, line) for ranks, line in remaining if ranks]
            if rows and entry.stream is not None:
                self.add_lines(entry.stream, rows)

    def _open_live(self, rows: list[TerminalRow]) -> None:
        self.live.open(rows)
        # The pace is for updates in place, so this one does not delay the next.
        self._update_live(float("-inf"))

    def _end_text(self) -> None:
        if self._texts:
            self._emits.append(Stream(self._stream, "".join(self._texts)))
            self._texts = []


def earlier_display_update(cluster_key: str, rank: int, message: Display) -> RichOutput:
    """Return the update of a display that `rank` has shown in the merged output of an earlier cell."""
    data = _label_bundle(message.data, f"[{rank}]", in_html=_shows_html(message.data))
    return RichOutput(data, message.metadata, _display_id(cluster_key, rank, message), update=True)


shown_by_rank: dict[tuple[str, int, str], None] = {}
"""Displays that were shown by rank in any cell: cluster key, rank and display id, oldest first.

The front end does not know these ids, because such a display is a part of its panel's HTML.
"""


def _display_id(cluster_key: str, rank: int, message: Display) -> str:
    """Return the id of a rank's display in the front end, which is the same in all cells."""
    return f"rankbook-{cluster_key}-{rank}-{message.display_id}"


def _shows_html(data: Mapping[str, Any]) -> bool:
    """Return True if a front end shows the HTML of a mime bundle that has some.

    It prefers a format such as that of a chart of plotly.
    """
    return not any(kind.startswith("application/") for kind in data)


def _label_bundle(data: Mapping[str, Any], label: str, *, in_html: bool) -> dict[str, Any]:
    """Return a copy of a mime bundle with the label in its plain text and, with `in_html`, above its HTML."""
    labelled = dict(data)
    text, html = data.get("text/plain"), data.get("text/html")
    if isinstance(text, str):
        labelled["text/plain"] = f"{label} " + text.replace("\n", "\n" + " " * (len(label) + 1))
    if isinstance(html, str) and in_html:
        labelled["text/html"] = f'<div style="{_LABEL_STYLE}">{label}</div>{html}'
    return labelled
