"""Queues of unshown output, one per rank, and the order in which they are consumed.

`RankQueue` holds the lines, displays and clears of a rank that have not been shown. `interleave` compares the heads of
all queues, and yields what to show next: items that are equal on several ranks once, for all of these ranks. It has
three paths, fastest first: a common prefix of lines on all ranks (`_count_common`), lines that no two ranks share
(`_take_distinct_lines`), and the general case (`_round_robin`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import lt
from typing import ClassVar, cast

from rankbook.formatting import format_bytes, plural
from rankbook.output.terminal import TerminalStream
from rankbook.protocol import WIDGET_VIEW, StreamName
from rankbook.protocol.messages import Clear, Display, OutputBarrier, Text, TextCut

Ranks = tuple[int, ...]
Rows = Sequence[tuple[Ranks, str]]
"""Lines, with the ranks that printed them."""

LOOK_AHEAD = 64
"""Number of items of another queue that are searched for the item at the head of a queue."""
_BATCH = 1024
"""Number of items of every rank that are compared at a time."""
_MAX_QUEUED_TEXT, _MAX_QUEUED_ITEMS = 4 << 20, 20_000
"""Limits of a queue: characters, and items (runs of lines, displays).

A queue above a limit no longer waits for other ranks.
"""
_RUN_SECONDS = 0.01
"""Seconds within which blocks of lines are joined to one run."""


class TextRun:
    """Lines of one stream that arrived at about the same time. The first `position` lines have been shown."""

    __slots__ = ("_blocks", "_lines", "position", "size", "stream", "time")
    # Other ranks may print the same lines.
    unshared = False

    def __init__(self, stream: StreamName, block: str, time: float) -> None:
        self.stream = stream
        self.time = time
        self.position = 0
        self.size = len(block)
        self._blocks = [block]
        self._lines: list[str] | None = None

    @property
    def lines(self) -> list[str]:
        """Lines of the run. They are split on first use only, since a joined block takes less memory."""
        if self._lines is None:
            self._lines = "\n".join(self._blocks).split("\n")
            self._blocks.clear()
        return self._lines

    def extend(self, stream: StreamName, block: str, time: float) -> bool:
        """Append a block of lines; return False if it has to start a new run."""
        # A run that has been split is being consumed. New lines start another one.
        if self._lines is not None or self.stream != stream or time > self.time + _RUN_SECONDS:
            return False
        self._blocks.append(block)
        self.size += len(block)
        return True

    def next(self, count: int) -> list[str]:
        """Return up to `count` lines that have not been shown."""
        return self.lines[self.position : self.position + count]


class DisplayItem:
    """A display.

    Equal displays of several ranks are shown once, except displays with a display id, which can be updated.
    """

    __slots__ = ("message", "size", "time", "unshared")

    def __init__(self, message: Display, time: float) -> None:
        self.message = message
        self.time = time
        self.unshared = message.display_id is not None
        self.size = sum(len(value) for value in message.data.values() if isinstance(value, (str, bytes)))

    def updated(self, update: Display) -> DisplayItem:
        """Return the display in its state after `update`."""
        # The kind of the original stays: a replay shows the display anew, in its last state.
        old = self.message
        now = Display(old.cell, old.kind, update.data, update.metadata, old.display_id)
        return DisplayItem(now, self.time)

    def __eq__(self, other: object) -> bool:
        # Displays with an id are equal to nothing else: an update of one rank must not change what another rank shows.
        if self is other or not isinstance(other, DisplayItem) or self.unshared or other.unshared:
            return self is other
        return self.message.data == other.message.data and self.message.metadata == other.message.metadata

    def __hash__(self) -> int:
        # Equal displays have equal text and size. The data itself is a dict, which has no hash.
        text = self.message.data.get("text/plain")
        return hash((self.size, text if isinstance(text, str) else None))


def is_view_of(data: Mapping[str, object] | None, model_id: str) -> bool:
    """Return True if a display's data show the widget with this model."""
    view = None if data is None else data.get(WIDGET_VIEW)
    return isinstance(view, dict) and view.get("model_id") == model_id


class ClearItem:
    """A `clear_output` call of a rank.

    All are equal, whatever their `wait`, so that ranks in lockstep clear together.
    """

    __slots__ = ("time", "wait")
    __match_args__ = ("wait",)
    unshared = False
    size = 0

    def __init__(self, wait: bool, time: float) -> None:
        self.wait = wait
        self.time = time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClearItem)

    def __hash__(self) -> int:
        return 0


@dataclass(slots=True)
class BarrierItem:
    """A place that all ranks mark by the same name. It is not shown.

    Items with an equal one in another queue wait until that queue has caught up, so the items before a barrier are
    shown before those after it.
    """

    name: str
    time: float = field(compare=False)
    unshared: ClassVar[bool] = False
    size: ClassVar[int] = 0

    def __hash__(self) -> int:
        return hash(self.name)


Key = str | tuple[str] | DisplayItem | ClearItem | BarrierItem
"""Element that queues are compared by: a str for a line of stdout, a 1-tuple for one of stderr, or the item itself."""
Turn = tuple[Key, tuple[int, ...]]
"""The next item, and the indices of the queues that have it at their head."""


class RankQueue:
    """Output of one rank that has not been shown, oldest first.

    `count` is in lines, displays and clears; `size` in characters.
    """

    __slots__ = ("count", "items", "rank", "size", "terminals")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.items: deque[TextRun | DisplayItem | ClearItem | BarrierItem] = deque()
        self.count = 0
        self.size = 0
        self.terminals: dict[StreamName, TerminalStream] = {}

    @property
    def unshared(self) -> bool:
        """True if no other rank can have an item equal to the first one."""
        return self.items[0].unshared

    @property
    def full(self) -> bool:
        """True if the queue is above its limits and must not wait for other ranks."""
        return self.size > _MAX_QUEUED_TEXT or len(self.items) > _MAX_QUEUED_ITEMS

    def add_output(self, message: Text | TextCut | Display | Clear | OutputBarrier, now: float) -> None:
        """Append what the rank has sent.

        Text becomes lines; an incomplete line stays in `terminals`. A display or a `TextCut` ends an incomplete plain
        line, and a clear ends all unfinished rows, so that the order of the rank's output is kept.
        """
        match message:
            case Text(stream=stream, data=data):
                terminal = self.terminals.get(stream)
                if terminal is None:
                    terminal = self.terminals[stream] = TerminalStream(self.rank, stream)
                self._add_lines(stream, terminal.process(data, now), now)
            case Clear():
                self.end_rows(now)
                self._add(ClearItem(message.wait, now))
            case OutputBarrier(name=name):
                self._add(BarrierItem(name, now))
            case _:
                # The front end shows a display below the text so far, so an incomplete line must come first.
                for stream, terminal in self.terminals.items():
                    self._add_lines(stream, terminal.end_plain_line(), now)
                if isinstance(message, TextCut):
                    self._add_lines("stderr", _describe_cut(message), now)
                else:
                    self._add(DisplayItem(message, now))

    def end_rows(self, now: float) -> None:
        """Turn unfinished rows into lines."""
        for stream, terminal in self.terminals.items():
            self._add_lines(stream, terminal.end(now), now)

    def _add_lines(self, stream: StreamName, block: str | None, now: float) -> None:
        if block is None:
            return
        # Counted without splitting the block.
        self.count += block.count("\n") + 1
        self.size += len(block)
        last = self.items[-1] if self.items else None
        if not (isinstance(last, TextRun) and last.extend(stream, block, now)):
            self.items.append(TextRun(stream, block, now))

    def _add(self, item: DisplayItem | ClearItem | BarrierItem) -> None:
        self.count += 1
        self.size += item.size
        self.items.append(item)

    def peek(self, limit: int) -> list[Key]:
        """Return the keys of about the first `limit` items, or of all items if there are fewer."""
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
        """Return how many leading items have waited `hold` seconds for other ranks.

        Only the first `LOOK_AHEAD` runs and displays are checked.
        """
        if self.full:
            return self.count
        due = 0
        # A bound on the time for a queue that grows while another rank is slow.
        for item in islice(self.items, LOOK_AHEAD):
            if item.time + hold > now and not item.unshared:
                break
            due += len(item.lines) - item.position if isinstance(item, TextRun) else 1
        return due

    def take(self, count: int) -> None:
        """Remove the first `count` items, which have been shown."""
        self.count -= count
        while count:
            # The size of a run is subtracted when all of it has been shown.
            item = self.items[0]
            if isinstance(item, TextRun):
                consumed = min(count, len(item.lines) - item.position)
                item.position += consumed
                count -= consumed
                if item.position < len(item.lines):
                    return
            else:
                count -= 1
            self.items.popleft()
            self.size -= item.size


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Lines of one stream to show."""

    stream: StreamName
    rows: Rows


@dataclass(frozen=True, slots=True)
class SingleItem:
    """A display, a clear or a barrier, and the ranks that have it."""

    item: DisplayItem | ClearItem | BarrierItem
    ranks: Ranks


def interleave(sources: Sequence[RankQueue], allowed_counts: list[int]) -> Iterator[TextBatch | SingleItem]:
    """Take the next items out of the queues of `sources`, at least one, and yield what to show.

    `allowed_counts[i]` is the number of leading items of queue i that can be shown now. Items behind these are shown
    only together with an equal item of another rank, or to let their queue catch up with a shared item.
    """
    # Ranks in lockstep: all queues start with a run of one stream, so their common prefix is shown as one batch. A run
    # spans at most `_RUN_SECONDS` seconds, so lines behind `allowed_counts` are shown at most that much too early.
    runs = [source.items[0] for source in sources if isinstance(source.items[0], TextRun)]
    if len(runs) == len(sources) and all(run.stream == runs[0].stream for run in runs):
        single = len(runs) == 1
        common = min(allowed_counts[0], len(runs[0].lines) - runs[0].position) if single else _count_common(runs)
        if common:
            group = tuple(source.rank for source in sources)
            yield TextBatch(runs[0].stream, [(group, line) for line in runs[0].next(common)])
            for source in sources:
                source.take(common)
            return
    # Otherwise compare a window at the head of every queue. A queue that is longer than its window stops `LOOK_AHEAD`
    # items before the window's end, so the look-ahead sees the same items wherever the window happens to end. The
    # function returns when the first queue is at its stop, and the caller calls it again for the rest.
    limit = min(_BATCH, *(source.count for source in sources)) + LOOK_AHEAD
    ahead = [source.peek(limit) for source in sources]
    stops = [
        len(window) if len(window) == source.count else limit - LOOK_AHEAD
        for window, source in zip(ahead, sources, strict=True)
    ]
    positions = [0] * len(sources)
    ranks = [source.rank for source in sources]
    batch = _take_distinct_lines(ahead, ranks, list(map(min, stops, allowed_counts)), positions)
    if batch is not None:
        yield batch
    else:
        yield from _gather(_round_robin(ahead, stops, allowed_counts, positions), ranks)
    for source, position in zip(sources, positions, strict=True):
        source.take(position)


def _gather(turns: Iterable[Turn], ranks: Sequence[int]) -> Iterator[TextBatch | SingleItem]:
    """Join neighbouring lines of one stream into batches, and replace queue indices by ranks."""
    rows: list[tuple[Ranks, str]] = []
    stream: StreamName = "stdout"
    groups: dict[tuple[int, ...], Ranks] = {}
    for key, group in turns:
        # The same few groups occur again and again, so their tuples are made once.
        members = groups.get(group) or groups.setdefault(group, tuple(ranks[index] for index in group))
        if isinstance(key, str | tuple):
            kind: StreamName = "stdout" if isinstance(key, str) else "stderr"
            if kind != stream and rows:
                yield TextBatch(stream, rows)
                rows = []
            stream = kind
            rows.append((members, key if isinstance(key, str) else key[0]))
        else:
            if rows:
                yield TextBatch(stream, rows)
                rows = []
            yield SingleItem(key, members)
    if rows:
        yield TextBatch(stream, rows)


def _take_distinct_lines(
    queues: Sequence[Sequence[Key]], ranks: Sequence[int], limits: Sequence[int], positions: list[int]
) -> TextBatch | None:
    """Take lines that no two ranks share, in round-robin order; return None for other items or equal lines.

    Gives the result of `_round_robin` for this frequent case in a fraction of the time. Sets `positions` to the number
    of lines taken.
    """
    # Lines of both streams, displays and clears need the general case, because the order between them matters.
    kinds = set(map(type, chain(*queues)))
    together: set[Key] = set()
    for queue in queues:
        # Any equal line in two queues needs the general case, which would show it once.
        if kinds not in ({str}, {tuple}) or not together.isdisjoint(queue):
            return None
        together.update(queue)
    # As many lines per rank as the shortest queue that may be shown has. Queues without permission (0) take no part.
    count = min(filter(None, limits))
    positions[:] = [min(count, limit) for limit in limits]
    columns = []
    for index, position in enumerate(positions):
        group = (ranks[index],)
        if position and kinds == {str}:
            columns.append([(group, line) for line in cast("Sequence[str]", queues[index][:position])])
        elif position:
            columns.append([(group, line) for (line,) in cast("Sequence[tuple[str]]", queues[index][:position])])
    return TextBatch("stdout" if kinds == {str} else "stderr", list(chain.from_iterable(zip(*columns, strict=True))))


# Example: rank 0 has printed `a`, `extra`, `b`, and rank 1 `a`, `b`. Both heads are `a`, which is shown for both. Then
# the heads are `extra` and `b`. `extra` is in no other queue and is shown. `b` is further down in the queue of rank 0,
# so it waits. Now both heads are `b`, which is shown for both.
# Example of a circle: rank 0 has printed `x`, `y`, and rank 1 `y`, `x`. Each head is further down in the other queue.
# Once everything may be shown, one head breaks the circle, and the result is `x` of rank 0, `y` of both, `x` of rank 1.
def _round_robin(
    queues: Sequence[Sequence[Key]], stops: Sequence[int], allowed_counts: list[int], positions: list[int]
) -> Iterator[Turn]:
    """Yield the items of `queues` in display order, and advance `positions`, the number of items taken per queue.

    It ends when a queue reaches its stop, or when no queue has an item left that can be shown now (see `allowed_counts`
    of `interleave`).

    The queues are aligned like the sides of a diff. In every round, equal heads form a group. A group is ready if its
    item does not also appear among the next `LOOK_AHEAD` items of a queue outside the group. Ready groups are shown. If
    no group is ready, the group with the shortest distance to its other occurrence decides: the items of the other
    queue before that occurrence are released, even if they have not waited their time. If they are released already,
    the groups wait for one another in a circle (A's head is further down in B, and B's head further down in A). The
    group with the longest distance is shown then, which breaks the circle.
    """
    # Sets of all keys in the windows: most lines occur in one queue only, and need no search.
    members = [set(queue) for queue in queues]

    def distance(key: Key, heads: list[int]) -> dict[int, int]:
        distances = {}
        for index, queue in enumerate(queues):
            if index not in heads and key in members[index]:
                soon = queue[positions[index] : positions[index] + LOOK_AHEAD]
                if key in soon:
                    distances[index] = soon.index(key)
        return distances

    # The windows are fixed while this loop runs. Their ends are chosen so that the look-ahead never reaches over them.
    while all(map(lt, positions, stops)):
        heads: dict[Key, list[int]] = {}
        # Groups of equal heads, in the order of the first rank that has them.
        for index, queue in enumerate(queues):
            heads.setdefault(queue[positions[index]], []).append(index)
        # A group may be shown if at least one of its items may. The other ones then come earlier than they would alone.
        allowed = [
            (key, group)
            for key, group in heads.items()
            if any(positions[index] < allowed_counts[index] for index in group)
        ]
        if not allowed:
            return
        ahead = [distance(key, group) for key, group in allowed]
        ready = [turn for turn, steps in zip(allowed, ahead, strict=True) if not steps]
        if not ready:
            # Every head waits for a queue to catch up. Release the items in the way of the nearest equal item; if
            # nothing is left to release, the queues wait for one another, and the farthest one is shown separately.
            blockers = min(ahead, key=lambda steps: min(steps.values()))
            blocked = {
                index: positions[index] + steps
                for index, steps in blockers.items()
                if allowed_counts[index] < positions[index] + steps
            }
            for index, enough in blocked.items():
                allowed_counts[index] = enough
            if blocked:
                continue
            ready = [max(zip(allowed, ahead, strict=True), key=lambda pair: min(pair[1].values()))[0]]
        for key, group in ready:
            for index in group:
                positions[index] += 1
            yield key, tuple(group)


# Comparing slices runs in C. For ranks in lockstep, all lines are equal, and doubling the slices leaves a logarithmic
# number of comparisons.
def _count_common(runs: Sequence[TextRun]) -> int:
    """Return how many lines all runs have in common from their current positions.

    Compares blocks of lines, doubling the block size while they are equal and halving it after the first difference.
    """
    first, *other_runs = runs
    shortest = min(len(run.lines) - run.position for run in runs)
    done, step, growing = 0, 1, True
    while step and done < shortest:
        expected = first.lines[first.position + done : first.position + min(done + step, shortest)]
        same = all(
            run.lines[run.position + done : run.position + min(done + step, shortest)] == expected for run in other_runs
        )
        done += len(expected) if same else 0
        growing = growing and same
        step = step * 2 if growing else step // 2
    return done


def _describe_cut(cut: TextCut) -> str:
    return f"… {plural(cut.lines, 'line')} ({format_bytes(cut.size)}) left out here; the whole output: {cut.log}"
