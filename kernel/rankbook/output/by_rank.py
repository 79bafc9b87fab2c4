"""Output of a cell grouped by rank, as a list of blocks that changes over time.

`ByRankOutput` is an `OutputView` (see merger.py) that emits no notebook output. It reports additions, appended text and
removals to a callback, for a panel that can filter output by rank. A block has the ranks that produced it, so text
shared by several ranks is stored once. A change is reported once and incrementally, so the work is linear in the amount
of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankbook.output.interleave import ClearItem, DisplayItem, Ranks, Rows, SingleItem, TextBatch
from rankbook.output.terminal import LiveDisplays, StreamName, TerminalRow

_LARGEST = 16 << 10
"""Characters after which lines go to a new block."""
_MOST, _MOST_TEXT = 10_000, 8 << 20
"""Limits: blocks, and characters of text. The oldest blocks are dropped above them."""
_MANY = 400
"""Number of blocks from which lines join a block of an earlier flush, even if lines of other ranks came between."""


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

    piece: OutputBlock


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
    """Output view that reports changes of blocks to the callback `told`, and emits no notebook output.

    `key` is the prefix of the ids of its live displays. `live_after` and `live_every` are in seconds, as in
    `OutputMerger`. The driver thread calls it, and so the callback.
    """

    def __init__(
        self, told: Callable[[Sequence[Change]], None], *, key: str, live_after: float = 0.3, live_every: float = 0.1
    ) -> None:
        self.live = LiveDisplays(f"{key}-live", after=live_after, every=live_every)
        self._told = told
        self._pieces: dict[int, OutputBlock] = {}
        self._texts: dict[int, list[str]] = {}
        self._sizes: dict[int, int] = {}
        self._size = 0
        self._next = 0
        self._open: dict[tuple[StreamName, Ranks], int] = {}
        self._displays: dict[tuple[int, str], int] = {}
        self._rows: dict[str, dict[int, int]] = {}
        self._clearing: set[int] = set()
        self._changes: list[Change] = []

    @property
    def pieces(self) -> list[OutputBlock]:
        """Blocks in order, with their full text."""
        return [self._whole(key) for key in self._pieces]

    def head(self, bundle: Mapping[str, str]) -> None:
        """See `OutputView`."""
        self._changes.append(OutputHeader(bundle))

    def put(self, turn: TextBatch | SingleItem) -> None:
        """See `OutputView`."""
        match turn:
            case TextBatch(stream, rows):
                self._clear_of(set().union(*{ranks for ranks, _ in rows}))
                self._lines(stream, rows)
            case SingleItem(DisplayItem() as shown, ranks):
                self._clear_of(ranks)
                self._display(shown, ranks)
            case SingleItem(ClearItem(wait=wait), ranks):
                self._clearing.update(ranks)
                if not wait:
                    self._clear_of(ranks)

    def show_live(self, rows: Sequence[TerminalRow], now: float) -> None:
        """See `OutputView`."""
        for row in rows:
            self._clear_of((row.screen.rank,))
            self.live.place(row)
        for name, live, _ in self.live.updates(now):
            blocks, by_rank = self._rows.setdefault(name, {}), dict[int, list[str]]()
            for rank, text in live:
                by_rank.setdefault(rank, []).append(text)
            for rank in blocks.keys() - by_rank.keys():
                self._drop(blocks.pop(rank))
            for rank, texts in by_rank.items():
                blocks[rank] = self._put(
                    OutputBlock(blocks.get(rank, -1), (rank,), "stdout", "\n".join(texts), live=True)
                )
        for row in self.live.retire():
            if row.region is not None:
                self._rows.pop(row.region.display_id, None)

    def take(self) -> list[Any]:
        """Report the changes to the callback. See `OutputView`."""
        changes, self._changes = self._changes, []
        if len(self._pieces) < _MANY:
            last = next(reversed(self._pieces), None)
            self._open = {group: key for group, key in self._open.items() if key == last}
        if changes:
            self._told(changes)
        return []

    def _lines(self, stream: StreamName, rows: Rows) -> None:
        grown: dict[int, list[str]] = {}
        for ranks, line in rows:
            group = (stream, ranks)
            key = self._open.get(group)
            if key is None or self._sizes[key] > _LARGEST:
                self._close(ranks)
                key = self._open[group] = self._new(OutputBlock(-1, ranks, stream))
                grown[key] = []
            grown.setdefault(key, []).append(line)
            self._sizes[key] += len(line) + 1
            self._size += len(line) + 1
        for key, lines in grown.items():
            text, first = "\n".join(lines) + "\n", not self._texts[key]
            self._texts[key].append(text)
            self._changes.append(
                BlockAdded(replace(self._pieces[key], text=text)) if first else TextAppended(key, text)
            )
        self.live.bury()
        self._forget()

    def _display(self, shown: DisplayItem, ranks: Ranks) -> None:
        message = shown.message
        name = None if message.display_id is None else (ranks[0], message.display_id)
        if message.kind == "update":
            if name is not None and (key := self._displays.get(name)) in self._pieces:
                self._put(OutputBlock(key, ranks, data=message.data, metadata=message.metadata))
            return
        key = self._put(OutputBlock(-1, ranks, data=message.data, metadata=message.metadata))
        if name is not None:
            self._displays[name] = key
        self.live.bury()
        self._forget()

    def _put(self, piece: OutputBlock) -> int:
        """Add a block (key -1) or replace the one with its key, and return the key."""
        if piece.key not in self._pieces:
            self._close(piece.ranks)
            piece = replace(piece, key=self._new(piece))
        self._pieces[piece.key] = piece
        size = len(piece.text)
        if piece.data is not None:
            size = sum(len(value) for value in piece.data.values() if isinstance(value, (str, bytes))) // 16
        self._size += size - self._sizes[piece.key]
        self._sizes[piece.key] = size
        self._changes.append(BlockAdded(piece))
        return piece.key

    def _new(self, piece: OutputBlock) -> int:
        key, self._next = self._next, self._next + 1
        self._pieces[key], self._texts[key], self._sizes[key] = replace(piece, key=key), [], 0
        return key

    def _close(self, ranks: Ranks) -> None:
        """Stop appending to the blocks of `ranks`, so that their next output is placed below the current end."""
        self._open = {group: key for group, key in self._open.items() if not set(group[1]) & set(ranks)}

    def _whole(self, key: int) -> OutputBlock:
        piece, texts = self._pieces[key], self._texts[key]
        return replace(piece, text="".join(texts)) if texts else piece

    def _drop(self, key: int, *, forgotten: bool = False) -> None:
        if self._pieces.pop(key, None) is None:
            return
        del self._texts[key]
        self._size -= self._sizes.pop(key)
        self._open = {group: block for group, block in self._open.items() if block != key}
        self._changes.append(BlockRemoved(key, forgotten))

    def _forget(self) -> None:
        while len(self._pieces) > _MOST or (self._size > _MOST_TEXT and len(self._pieces) > 1):
            self._drop(next(iter(self._pieces)), forgotten=True)

    def _clear_of(self, ranks: Sequence[int] | set[int]) -> None:
        """Clear the output of those of `ranks` that have a clear pending.

        Blocks shared with other ranks keep these ranks.
        """
        cleared = self._clearing.intersection(ranks)
        if not cleared:
            return
        self._clearing -= cleared
        for blocks in self._rows.values():
            for key in blocks.values():
                self._drop(key)
        self._rows.clear()
        self.live.clear(cleared)
        for key in [key for key, piece in self._pieces.items() if not cleared.isdisjoint(piece.ranks)]:
            piece = self._whole(key)
            remaining = tuple(rank for rank in piece.ranks if rank not in cleared)
            self._open = {group: block for group, block in self._open.items() if block != key}
            if remaining:
                self._pieces[key] = replace(self._pieces[key], ranks=remaining)
                self._changes.append(BlockAdded(replace(piece, ranks=remaining)))
            else:
                self._drop(key)
