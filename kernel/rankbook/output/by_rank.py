"""Output of a cell grouped by rank, as a list of blocks that changes over time.

`ByRankOutput` is an `OutputView` (see merger.py) that emits no notebook output, except for updates of displays that an
earlier cell has shown. It reports additions, appended text and removals to a callback, for a panel that can filter
output by rank. A block has the ranks that produced it, so text shared by several ranks is stored once. A change is
reported once and incrementally, so the work is linear in the amount of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankbook.output.interleave import ClearItem, DisplayItem, Ranks, Rows, SingleItem, TextBatch, is_view_of
from rankbook.output.merger import Emit, RichOutput, earlier_display_update, shown_by_rank
from rankbook.output.terminal import LiveDisplays, TerminalRow
from rankbook.protocol import StreamName

_MAX_BLOCK_TEXT = 16 << 10
"""Characters after which lines go to a new block."""
_MAX_BLOCKS, _MAX_TEXT = 10_000, 8 << 20
"""Limits: blocks, and characters of text. The oldest blocks are dropped above them."""
_KEEP_OPEN_ABOVE = 400
"""Number of blocks from which lines join a block of an earlier flush, even if lines of other ranks came between."""
_MAX_DISPLAY_IDS = 10_000
"""Number of displays of earlier cells that are remembered."""


@dataclass(frozen=True)
class OutputBlock:
    """Lines of one stream, unfinished rows (`live`), or a display (`data` and `metadata`), of `ranks`."""

    key: int
    ranks: Ranks
    stream: StreamName = "stdout"
    text: str = ""
    data: Mapping[str, Any] | None = None
    live: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockAdded:
    """A new block at the end, or the new content of the existing block with this key."""

    block: OutputBlock


@dataclass(frozen=True)
class TextAppended:
    """Text appended to the block `key`."""

    key: int
    text: str


@dataclass(frozen=True)
class BlockRemoved:
    """A removed block. `forgotten` is True if it was dropped because of the limits."""

    key: int
    forgotten: bool = False


@dataclass(frozen=True)
class OutputHeader:
    """Mime bundle to show above the blocks."""

    bundle: Mapping[str, str]


Change = BlockAdded | TextAppended | BlockRemoved | OutputHeader


class ByRankOutput:
    """Output view that reports changes of blocks to the callback `on_change`.

    `key` is the prefix of the ids of its live displays. `cluster_key` and `live_after`, in seconds, are as in
    `OutputMerger`. The driver thread calls it, and so the callback.
    """

    def __init__(
        self,
        on_change: Callable[[Sequence[Change]], None],
        *,
        key: str,
        cluster_key: str = "",
        live_after: float = 0.3,
    ) -> None:
        self.live = LiveDisplays(f"{key}-live", after=live_after)
        self.text_size = 0
        self._on_change = on_change
        self._cluster_key = cluster_key
        self._blocks: dict[int, OutputBlock] = {}
        self._texts: dict[int, list[str]] = {}
        self._sizes: dict[int, int] = {}
        self._size = 0
        # Keys are never used again, so that a late change cannot meet another block.
        self._next = 0
        # The block of a stream and its ranks that further lines are appended to.
        self._open: dict[tuple[StreamName, Ranks], int] = {}
        # The blocks of a rank's display id, which may be shown several times.
        self._displays: dict[tuple[int, str], list[int]] = {}
        self._rows: dict[str, dict[int, int]] = {}
        self._clearing: set[int] = set()
        self._changes: list[Change] = []
        # Updates of displays of earlier cells, by the front end's display id.
        self._updates: dict[str | None, RichOutput] = {}

    @property
    def blocks(self) -> list[OutputBlock]:
        """Blocks in order, with their full text."""
        return [self._full_block(key) for key in self._blocks]

    def set_header(self, bundle: Mapping[str, str], *, may_clear: bool = True) -> None:  # noqa: ARG002 - the header has its own place
        """See `OutputView`."""
        self._changes.append(OutputHeader(bundle))

    def show(self, item: TextBatch | SingleItem) -> None:
        """See `OutputView`."""
        match item:
            case TextBatch(stream, rows):
                # A clear with `wait` is carried out when its rank shows something new.
                self._clear_ranks(set().union(*{ranks for ranks, _ in rows}))
                self._add_lines(stream, rows)
            case SingleItem(DisplayItem() as display, ranks):
                self._add_display(display, ranks)
            case SingleItem(ClearItem(wait=wait), ranks):
                self._clearing.update(ranks)
                if not wait:
                    self._clear_ranks(ranks)

    def forget_widget(self, model_id: str) -> None:
        """See `OutputView`."""
        for key, block in tuple(self._blocks.items()):
            if is_view_of(block.data, model_id):
                self._drop_block(key)

    def show_live(self, rows: Sequence[TerminalRow], now: float) -> None:
        """See `OutputView`."""
        for row in rows:
            self._clear_ranks((row.terminal.rank,))
            self.live.add_row(row)
        for name, live, _ in self.live.updates(now):
            blocks, by_rank = self._rows.setdefault(name, {}), dict[int, list[str]]()
            for rank, text in live:
                by_rank.setdefault(rank, []).append(text)
            # A rank whose rows have become blank.
            for rank in blocks.keys() - by_rank.keys():
                self._drop_block(blocks.pop(rank))
            for rank, texts in by_rank.items():
                blocks[rank] = self._put_block(
                    OutputBlock(blocks.get(rank, -1), (rank,), "stdout", "\n".join(texts), live=True)
                )
        for display in self.live.remove_finished():
            self._rows.pop(display.display_id, None)

    def take(self) -> list[Emit]:
        """Report the changes to the callback, and return the updates of earlier cells' displays. See `OutputView`."""
        changes, self._changes = self._changes, []
        updates, self._updates = list[Emit](self._updates.values()), {}
        # In a short output the order between ranks matters to the reader: lines join a block only if nothing has come
        # between them. Long output of many ranks would become very many blocks this way, so from then on the order is
        # kept within a rank only.
        if len(self._blocks) < _KEEP_OPEN_ABOVE:
            last = next(reversed(self._blocks), None)
            self._open = {group: key for group, key in self._open.items() if key == last}
        if changes:
            self._on_change(changes)
        return updates

    def _add_lines(self, stream: StreamName, rows: Rows) -> None:
        grown: dict[int, list[str]] = {}
        for ranks, line in rows:
            group = (stream, ranks)
            key = self._open.get(group)
            # A large block is left. Above the limits blocks are dropped as a whole, so that small ones lose less at a
            # time.
            if key is None or self._sizes[key] > _MAX_BLOCK_TEXT:
                self._close(ranks)
                key = self._open[group] = self._new_block(OutputBlock(-1, ranks, stream))
                grown[key] = []
            grown.setdefault(key, []).append(line)
            self._sizes[key] += len(line) + 1
            self._size += len(line) + 1
            self.text_size += len(line) + 1
        for key, lines in grown.items():
            text, first = "\n".join(lines) + "\n", not self._texts[key]
            self._texts[key].append(text)
            # A new block is reported with its first text. Later text is reported as an addition, so that the panel does
            # not draw the block again.
            self._changes.append(
                BlockAdded(replace(self._blocks[key], text=text)) if first else TextAppended(key, text)
            )
        self.live.mark_output_below()
        self._drop_oldest()

    def _add_display(self, display: DisplayItem, ranks: Ranks) -> None:
        message = display.message
        name = None if message.display_id is None else (ranks[0], message.display_id)
        shown = [] if name is None else [key for key in self._displays.get(name, ()) if key in self._blocks]
        is_update = message.kind == "update"
        # An update changes a display in place, wherever it is, so it does not carry out a pending clear.
        if is_update and (name is None or name in self._displays):
            # A display that was dropped because of the limits is not created anew by an update.
            for key in shown:
                self._put_block(OutputBlock(key, ranks, data=message.data, metadata=message.metadata))
            return
        if is_update and name is not None and (self._cluster_key, *name) not in shown_by_rank:
            update = earlier_display_update(self._cluster_key, ranks[0], message)
            self._updates[update.display_id] = update
            return
        # A new display, or one of an earlier cell's panel, which has become static: it is shown again in this cell.
        self._clear_ranks(ranks)
        key = self._put_block(OutputBlock(-1, ranks, data=message.data, metadata=message.metadata))
        if name is not None:
            self._displays[name] = [*shown, key]
            _remember_display(self._cluster_key, *name)
        self.live.mark_output_below()
        self._drop_oldest()

    def _put_block(self, block: OutputBlock) -> int:
        """Add a block (key -1) or replace the one with its key, and return the key."""
        if block.key not in self._blocks:
            self._close(block.ranks)
            block = replace(block, key=self._new_block(block))
        self._blocks[block.key] = block
        size = len(block.text)
        if block.data is not None:
            # See `OutputHistory.add_display`.
            size = sum(len(value) for value in block.data.values() if isinstance(value, (str, bytes))) // 16
        # The block may have replaced one of another size.
        self._size += size - self._sizes[block.key]
        self._sizes[block.key] = size
        self._changes.append(BlockAdded(block))
        return block.key

    def _new_block(self, block: OutputBlock) -> int:
        key, self._next = self._next, self._next + 1
        self._blocks[key], self._texts[key], self._sizes[key] = replace(block, key=key), [], 0
        return key

    def _close(self, ranks: Ranks) -> None:
        """Stop appending to the blocks of `ranks`, so that their next output is placed below the current end."""
        self._open = {group: key for group, key in self._open.items() if not set(group[1]) & set(ranks)}

    def _full_block(self, key: int) -> OutputBlock:
        # The text of a block is kept in pieces and joined on demand: joining at every append would take quadratic time.
        block, texts = self._blocks[key], self._texts[key]
        return replace(block, text="".join(texts)) if texts else block

    def _drop_block(self, key: int, *, forgotten: bool = False) -> None:
        if self._blocks.pop(key, None) is None:
            return
        del self._texts[key]
        self._size -= self._sizes.pop(key)
        self._open = {group: block for group, block in self._open.items() if block != key}
        self._changes.append(BlockRemoved(key, forgotten))

    def _drop_oldest(self) -> None:
        while len(self._blocks) > _MAX_BLOCKS or (self._size > _MAX_TEXT and len(self._blocks) > 1):
            self._drop_block(next(iter(self._blocks)), forgotten=True)

    def _clear_ranks(self, ranks: Sequence[int] | set[int]) -> None:
        """Clear the output of those of `ranks` that have a clear pending.

        Blocks shared with other ranks keep these ranks.
        """
        # Only ranks that asked for it: new output of a rank carries out its own clear, and nobody else's.
        cleared = self._clearing.intersection(ranks)
        if not cleared:
            return
        self._clearing -= cleared
        self.live.clear(cleared)
        for key in [key for key, block in self._blocks.items() if not cleared.isdisjoint(block.ranks)]:
            block = self._full_block(key)
            remaining = tuple(rank for rank in block.ranks if rank not in cleared)
            # The block does not belong to the same ranks any more, so that nothing is appended to it.
            self._open = {group: block for group, block in self._open.items() if block != key}
            if remaining:
                self._blocks[key] = replace(self._blocks[key], ranks=remaining)
                self._changes.append(BlockAdded(replace(block, ranks=remaining)))
            else:
                self._drop_block(key)


def _remember_display(cluster_key: str, rank: int, display_id: str) -> None:
    """Record that a display was shown by rank."""
    shown_by_rank[cluster_key, rank, display_id] = None
    if len(shown_by_rank) > _MAX_DISPLAY_IDS:
        # A copy, because the driver thread of another cluster may add to it meanwhile.
        for oldest in list(shown_by_rank)[: _MAX_DISPLAY_IDS // 2]:
            shown_by_rank.pop(oldest, None)
