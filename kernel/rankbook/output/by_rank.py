"""A cell's output kept apart by rank: pieces, each with the ranks that it is of.

Owns: which lines make one piece, which piece an update or a `clear_output` changes, how much is kept. Refuses: markup,
front ends, clocks; which items are the same (queues.py).

What is said of one change is said once, so the work is linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankbook.output.interleave import ClearItem, DisplayItem, Ranks, Rows, SingleItem, TextBatch
from rankbook.output.terminal import LiveDisplays, StreamName, TerminalRow

_LARGEST = 16 << 10
"""Characters after which lines go to a new piece."""
_MOST, _MOST_TEXT = 10_000, 8 << 20
"""Pieces, and characters of text, that are kept; then the oldest go."""
_MANY = 400
"""Pieces from which on lines of one flush join those of the one before, though other ranks' lines came between."""


@dataclass(frozen=True)
class OutputBlock:
    """Lines of one stream, rows that are still written on (`live`), or a display (`data`, `metadata`), of `ranks`."""

    key: int
    ranks: Ranks
    stream: StreamName = "stdout"
    text: str = ""
    data: Mapping[str, Any] | None = None
    live: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockAdded:
    """The piece is new, at the end; or it is what the one with its key has become."""

    piece: OutputBlock


@dataclass(frozen=True)
class TextAppended:
    """Text at the end of the piece `key`."""

    key: int
    text: str


@dataclass(frozen=True)
class BlockRemoved:
    """The piece is gone. `forgotten`: for want of room."""

    key: int
    forgotten: bool = False


@dataclass(frozen=True)
class OutputHeader:
    """What stands above the pieces, as a mime bundle."""

    bundle: Mapping[str, str]


Change = BlockAdded | TextAppended | BlockRemoved | OutputHeader


class ByRankOutput:
    """A page for `rankbook.output.merger.OutputMerger`: tells `told` what has changed, and emits nothing itself.

    `key` starts the names of its live regions.
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
        """Everything that is there, in order."""
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
            there, by_rank = self._rows.setdefault(name, {}), dict[int, list[str]]()
            for rank, text in live:
                by_rank.setdefault(rank, []).append(text)
            for rank in there.keys() - by_rank.keys():
                self._drop(there.pop(rank))
            for rank, texts in by_rank.items():
                there[rank] = self._put(
                    OutputBlock(there.get(rank, -1), (rank,), "stdout", "\n".join(texts), live=True)
                )
        for row in self.live.retire():
            if row.region is not None:
                self._rows.pop(row.region.display_id, None)

    def take(self) -> list[Any]:
        """See `OutputView`: the changes have been told."""
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
        """The new piece, its key -1, or what a piece has become; its key."""
        if piece.key not in self._pieces:
            self._close(piece.ranks)
            piece = replace(piece, key=self._new(piece))
        self._pieces[piece.key] = piece
        size = len(piece.text)
        if piece.data is not None:
            size = sum(len(each) for each in piece.data.values() if isinstance(each, (str, bytes))) // 16
        self._size += size - self._sizes[piece.key]
        self._sizes[piece.key] = size
        self._changes.append(BlockAdded(piece))
        return piece.key

    def _new(self, piece: OutputBlock) -> int:
        key, self._next = self._next, self._next + 1
        self._pieces[key], self._texts[key], self._sizes[key] = replace(piece, key=key), [], 0
        return key

    def _close(self, ranks: Ranks) -> None:
        """What comes now of `ranks` stands below what they have printed."""
        self._open = {group: key for group, key in self._open.items() if not set(group[1]) & set(ranks)}

    def _whole(self, key: int) -> OutputBlock:
        piece, texts = self._pieces[key], self._texts[key]
        return replace(piece, text="".join(texts)) if texts else piece

    def _drop(self, key: int, *, forgotten: bool = False) -> None:
        if self._pieces.pop(key, None) is None:
            return
        del self._texts[key]
        self._size -= self._sizes.pop(key)
        self._open = {group: each for group, each in self._open.items() if each != key}
        self._changes.append(BlockRemoved(key, forgotten))

    def _forget(self) -> None:
        while len(self._pieces) > _MOST or (self._size > _MOST_TEXT and len(self._pieces) > 1):
            self._drop(next(iter(self._pieces)), forgotten=True)

    def _clear_of(self, ranks: Sequence[int] | set[int]) -> None:
        """Clear what those of `ranks` that are to be cleared have shown."""
        cleared = self._clearing.intersection(ranks)
        if not cleared:
            return
        self._clearing -= cleared
        for there in self._rows.values():
            for key in there.values():
                self._drop(key)
        self._rows.clear()
        self.live.clear(cleared)
        for key in [key for key, piece in self._pieces.items() if not cleared.isdisjoint(piece.ranks)]:
            piece = self._whole(key)
            left = tuple(rank for rank in piece.ranks if rank not in cleared)
            self._open = {group: each for group, each in self._open.items() if each != key}
            if left:
                self._pieces[key] = replace(self._pieces[key], ranks=left)
                self._changes.append(BlockAdded(replace(piece, ranks=left)))
            else:
                self._drop(key)
