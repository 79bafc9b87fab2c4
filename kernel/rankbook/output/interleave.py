"""What the ranks have sent and nobody has seen: a queue for each, and the order in which they take turns.

Owns: which items of several ranks are the same, whose turn it is, and how much may wait. Refuses: clocks; to show
anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import lt
from typing import cast

from rankbook.formatting import format_bytes, plural
from rankbook.output.terminal import StreamName, TerminalStream
from rankbook.protocol.messages import Clear, Display, Text, TextCut

Ranks = tuple[int, ...]
Rows = Sequence[tuple[Ranks, str]]
"""Lines, each with the ranks that have it."""

LOOK_AHEAD = 64
"""How many items ahead one rank's next item is looked for in the other queues."""
_BATCH = 1024
"""Items of each rank that are compared at a time."""
_MOST_WAITING, _MOST_ITEMS = 4 << 20, 20_000
"""Characters, and runs or displays, that may wait in a queue for other ranks."""
_TOGETHER = 0.01
"""Seconds within which lines make one run."""


class TextRun:
    """Lines that came together, of one stream. Those before `at` have been shown."""

    __slots__ = ("_blocks", "_lines", "at", "size", "stream", "time")
    alone = False

    def __init__(self, stream: StreamName, block: str, time: float) -> None:
        self.stream = stream
        self.time = time
        self.at = 0
        self.size = len(block)
        self._blocks = [block]
        self._lines: list[str] | None = None

    @property
    def lines(self) -> list[str]:
        """All of them. They are cut apart when they are needed: a block is smaller."""
        if self._lines is None:
            self._lines = "\n".join(self._blocks).split("\n")
            self._blocks.clear()
        return self._lines

    def extend(self, stream: StreamName, block: str, time: float) -> bool:
        """Take in a block that came soon after; False if it has to be a run of its own."""
        if self._lines is not None or self.stream != stream or time > self.time + _TOGETHER:
            return False
        self._blocks.append(block)
        self.size += len(block)
        return True

    def next(self, count: int) -> list[str]:
        """Up to `count` lines that have not been shown."""
        return self.lines[self.at : self.at + count]


class DisplayItem:
    """A display. Equal ones of several ranks are shown once, but for those that can be updated."""

    __slots__ = ("alone", "message", "size", "time")

    def __init__(self, message: Display, time: float) -> None:
        self.message = message
        self.time = time
        self.alone = message.display_id is not None
        self.size = sum(len(value) for value in message.data.values() if isinstance(value, (str, bytes)))

    def updated(self, update: Display) -> DisplayItem:
        """The display as it is after `update`."""
        was = self.message
        now = Display(was.cell, was.kind, update.data, update.metadata, was.display_id)
        return DisplayItem(now, self.time)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, DisplayItem) or self.alone or other.alone:
            return self is other
        return self.message.data == other.message.data and self.message.metadata == other.message.metadata

    def __hash__(self) -> int:
        text = self.message.data.get("text/plain")
        return hash((self.size, text if isinstance(text, str) else None))


class ClearItem:
    """A rank's `clear_output`. Two are the same whatever they say about waiting."""

    __slots__ = ("time", "wait")
    __match_args__ = ("wait",)
    alone = False
    size = 0

    def __init__(self, wait: bool, time: float) -> None:
        self.wait = wait
        self.time = time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClearItem)

    def __hash__(self) -> int:
        return 0


Key = str | tuple[str] | DisplayItem | ClearItem
"""What two queues are compared by: a line of stdout, one of stderr, or something else."""
Turn = tuple[Key, tuple[int, ...]]
"""What is next, and the indices of the queues that have it at their head."""


class RankQueue:
    """What one rank has sent and nobody has seen."""

    __slots__ = ("count", "items", "rank", "screens", "size")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.items: deque[TextRun | DisplayItem | ClearItem] = deque()
        self.count = 0
        self.size = 0
        self.screens: dict[StreamName, TerminalStream] = {}

    @property
    def alone(self) -> bool:
        """Whether the next item is one that no other rank can have."""
        return self.items[0].alone

    @property
    def full(self) -> bool:
        """Whether too much waits."""
        return self.size > _MOST_WAITING or len(self.items) > _MOST_ITEMS

    def feed(self, message: Text | TextCut | Display | Clear, now: float) -> None:
        """Take in what the rank has sent."""
        match message:
            case Text(stream=stream, data=data):
                screen = self.screens.get(stream)
                if screen is None:
                    screen = self.screens[stream] = TerminalStream(self.rank, stream)
                self._add_lines(stream, screen.feed(data, now), now)
            case Clear():
                self.end_rows(now)
                self._add(ClearItem(message.wait, now))
            case _:
                for stream, screen in self.screens.items():
                    self._add_lines(stream, screen.end_half(), now)
                if isinstance(message, TextCut):
                    self._add_lines("stderr", _describe_cut(message), now)
                else:
                    self._add(DisplayItem(message, now))

    def end_rows(self, now: float) -> None:
        """Make lines of what has been begun."""
        for stream, screen in self.screens.items():
            self._add_lines(stream, screen.end(now), now)

    def _add_lines(self, stream: StreamName, block: str | None, now: float) -> None:
        if block is None:
            return
        self.count += block.count("\n") + 1
        self.size += len(block)
        last = self.items[-1] if self.items else None
        if not (isinstance(last, TextRun) and last.extend(stream, block, now)):
            self.items.append(TextRun(stream, block, now))

    def _add(self, item: DisplayItem | ClearItem) -> None:
        self.count += 1
        self.size += item.size
        self.items.append(item)

    def peek(self, limit: int) -> list[Key]:
        """The first items."""
        keys: list[Key] = []
        for item in self.items:
            if not isinstance(item, TextRun):
                keys.append(item)
            elif item.stream == "stdout":
                keys += item.next(limit - len(keys))
            else:
                keys += [(line,) for line in item.next(limit - len(keys))]
            if len(keys) >= limit:
                break
        return keys

    def due(self, now: float, hold: float) -> int:
        """How many items have waited for other ranks long enough; of many, as far as a glance shows."""
        if self.full:
            return self.count
        due = 0
        for item in islice(self.items, LOOK_AHEAD):
            if item.time + hold > now and not item.alone:
                break
            due += len(item.lines) - item.at if isinstance(item, TextRun) else 1
        return due

    def take(self, count: int) -> None:
        """Forget the first items: they have been shown."""
        self.count -= count
        while count:
            item = self.items[0]
            if isinstance(item, TextRun):
                taken = min(count, len(item.lines) - item.at)
                item.at += taken
                count -= taken
                if item.at < len(item.lines):
                    return
            else:
                count -= 1
            self.items.popleft()
            self.size -= item.size


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Lines to show, of one stream."""

    stream: StreamName
    rows: Rows


@dataclass(frozen=True, slots=True)
class SingleItem:
    """A display or a clearing, and the ranks that have it."""

    item: DisplayItem | ClearItem
    ranks: Ranks


def interleave(sources: Sequence[RankQueue], may: list[int]) -> Iterator[TextBatch | SingleItem]:
    """Take what is next out of the queues of `sources`, one item at least.

    Only the first `may` items of each are to be shown now; others just together with the same of another rank.
    """
    runs = [source.items[0] for source in sources if isinstance(source.items[0], TextRun)]
    if len(runs) == len(sources) and all(run.stream == runs[0].stream for run in runs):
        alone = len(runs) == 1
        common = min(may[0], len(runs[0].lines) - runs[0].at) if alone else _count_common(runs)
        if common:
            who = tuple(source.rank for source in sources)
            yield TextBatch(runs[0].stream, [(who, line) for line in runs[0].next(common)])
            for source in sources:
                source.take(common)
            return
    limit = min(_BATCH, *(source.count for source in sources)) + LOOK_AHEAD
    ahead = [source.peek(limit) for source in sources]
    stops = [
        len(each) if len(each) == source.count else limit - LOOK_AHEAD
        for each, source in zip(ahead, sources, strict=True)
    ]
    at = [0] * len(sources)
    ranks = [source.rank for source in sources]
    apart = _lines_apart(ahead, ranks, list(map(min, stops, may)), at)
    if apart is not None:
        yield apart
    else:
        yield from _gather(_take_turns(ahead, stops, may, at), ranks)
    for source, taken in zip(sources, at, strict=True):
        source.take(taken)


def _gather(turns: Iterable[Turn], ranks: Sequence[int]) -> Iterator[TextBatch | SingleItem]:
    """Neighbouring lines of one stream together, and ranks for indices."""
    rows: list[tuple[Ranks, str]] = []
    stream: StreamName = "stdout"
    groups: dict[tuple[int, ...], Ranks] = {}
    for key, group in turns:
        who = groups.get(group) or groups.setdefault(group, tuple(ranks[index] for index in group))
        if isinstance(key, str | tuple):
            here: StreamName = "stdout" if isinstance(key, str) else "stderr"
            if here != stream and rows:
                yield TextBatch(stream, rows)
                rows = []
            stream = here
            rows.append((who, key if isinstance(key, str) else key[0]))
        else:
            if rows:
                yield TextBatch(stream, rows)
                rows = []
            yield SingleItem(key, who)
    if rows:
        yield TextBatch(stream, rows)


def _lines_apart(
    queues: Sequence[Sequence[Key]], ranks: Sequence[int], most: Sequence[int], at: list[int]
) -> TextBatch | None:
    """As `_take_turns`, faster, for lines none of which two ranks have, as far as one can see; None for others."""
    kinds = set(map(type, chain(*queues)))
    together: set[Key] = set()
    for queue in queues:
        if kinds not in ({str}, {tuple}) or not together.isdisjoint(queue):
            return None
        together.update(queue)
    count = min(filter(None, most))
    at[:] = [min(count, each) for each in most]
    columns = []
    for index, taken in enumerate(at):
        who = (ranks[index],)
        if taken and kinds == {str}:
            columns.append([(who, line) for line in cast("Sequence[str]", queues[index][:taken])])
        elif taken:
            columns.append([(who, line) for (line,) in cast("Sequence[tuple[str]]", queues[index][:taken])])
    return TextBatch("stdout" if kinds == {str} else "stderr", list(chain.from_iterable(zip(*columns, strict=True))))


def _take_turns(queues: Sequence[Sequence[Key]], stops: Sequence[int], may: list[int], at: list[int]) -> Iterator[Turn]:
    """In which order queues are shown.

    `at` counts what was taken of each queue; it ends where one reaches its stop. Only the first `may` of a queue are
    to be shown now, others just together with the same in another queue. What is at one head and soon comes up in
    another queue waits for it, so that a line of one rank alone does not set apart the ranks for the rest.
    """
    members = [set(queue) for queue in queues]

    def distance(key: Key, heads: list[int]) -> dict[int, int]:
        found = {}
        for index, queue in enumerate(queues):
            if index not in heads and key in members[index]:
                soon = queue[at[index] : at[index] + LOOK_AHEAD]
                if key in soon:
                    found[index] = soon.index(key)
        return found

    while all(map(lt, at, stops)):
        heads: dict[Key, list[int]] = {}
        for index, queue in enumerate(queues):
            heads.setdefault(queue[at[index]], []).append(index)
        allowed = [(key, group) for key, group in heads.items() if any(at[index] < may[index] for index in group)]
        if not allowed:
            return
        ahead = [distance(key, group) for key, group in allowed]
        ready = [turn for turn, far in zip(allowed, ahead, strict=True) if not far]
        if not ready:
            blockers = min(ahead, key=lambda far: min(far.values()))
            blocked = {index: at[index] + far for index, far in blockers.items() if may[index] < at[index] + far}
            for index, enough in blocked.items():
                may[index] = enough
            if blocked:
                continue
            ready = [max(zip(allowed, ahead, strict=True), key=lambda pair: min(pair[1].values()))[0]]
        for key, group in ready:
            for index in group:
                at[index] += 1
            yield key, tuple(group)


def _count_common(runs: Sequence[TextRun]) -> int:
    """How many lines, from where they stand, all runs have in common. Doubles its steps, then halves them."""
    first, *others = runs
    most = min(len(run.lines) - run.at for run in runs)
    done, step, growing = 0, 1, True
    while step and done < most:
        here = first.lines[first.at + done : first.at + min(done + step, most)]
        same = all(run.lines[run.at + done : run.at + min(done + step, most)] == here for run in others)
        done += len(here) if same else 0
        growing = growing and same
        step = step * 2 if growing else step // 2
    return done


def _describe_cut(cut: TextCut) -> str:
    return f"… {plural(cut.lines, 'line')} ({format_bytes(cut.size)}) left out here; the whole output: {cut.log}"
