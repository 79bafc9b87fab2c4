"""Shards view: which rank holds which part of a variable's tensors.

`ShardsModel` and `ShardsView` are the live view; `static_data` and `tensor_of` make the JSON for static/shards.js,
which requests the shards of one tensor at a time; `text`, `html` and `svg` draw the static versions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from html import escape
from threading import Lock, Thread
from typing import Any

import traitlets

from rankbook.errors import InvalidArgument, RankbookError
from rankbook.formatting import format_bytes, format_shape, plural
from rankbook.protocol.telemetry import Shard, ShardedTensorMap, ShardMap, Statistic
from rankbook.ranks import name_ranks
from rankbook.widgets.live_view import ClusterSource, LiveView, Message, ViewModel, script, start_thread, to_json
from rankbook.widgets.rendering import (
    BLUE,
    FAINT,
    PAPER,
    contrast_color,
    rank_color,
    rect,
    svg_document,
    table,
    text_element,
)

MAX_DRAWN = 4096  # chunks of one tensor; more are indistinguishable and slow to draw


# Live view ----------------------------------------------------------------------------------------------------------


class ShardsModel(ViewModel):
    """Model of the shards view of one variable.

    The ranks are queried when the view opens for the first time, or after a query that has found no tensor, and when
    the user asks for it.
    """

    name = "shards"

    def __init__(self, source: ClusterSource, variable: str = "", search: str = "") -> None:
        self._source, self._variable, self._search = source, variable, search
        # Guards the fields that a query sets together: variable, map, tensors, selection and JSON.
        self._lock = Lock()
        self._query_count = 0
        self._shard_map: ShardMap | None = None
        # Shown until the first query has ended: the input fields with the given values.
        self._static_json = to_json({"name": variable, "search": search})
        self._tensors: dict[str, ShardedTensorMap] = {}
        self._selected: ShardedTensorMap | None = None
        self._changed: Callable[[], None] | None = None

    def open(self, changed: Callable[[], None]) -> None:
        """See `ViewModel`."""
        self._changed = changed
        # In a thread: the ranks may take up to 2 s, and `open` is called under the view's lock.
        if self._variable and (self._shard_map is None or not self._shard_map.tensors):
            start_thread(Thread(target=self._run_first_query, name="rankbook-shard-query"))
        changed()

    def _run_first_query(self) -> None:
        self._query(self._variable)
        if self._changed is not None:
            self._changed()

    def close(self) -> None:
        """See `ViewModel`."""
        self._changed = None

    def ready(self) -> bool:
        """See `ViewModel`."""
        return self._shard_map is not None or not self._variable

    def load(self) -> None:
        """See `ViewModel`."""
        self._query(self._variable)

    def static_json(self) -> str:
        """See `ViewModel`."""
        return self._static_json

    def dynamic_json(self) -> str:
        """See `ViewModel`."""
        return "{}"

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """Answer `name` (a new variable), `tensor` (its chunks) or `statistic` (of one rank's values of it)."""
        if op == "name":
            trouble = self._query(str(message.get("name", "")).strip())
            if self._changed is not None:
                self._changed()
            return trouble
        with self._lock:
            variable, tensor = self._variable, self._tensors.get(str(message.get("key")))
        if tensor is None:
            raise InvalidArgument(f"{variable} no longer has a tensor {message.get('key')!r}; press Show again")
        # `svg` draws the tensor that the browser has shown last.
        self._selected = tensor
        if op == "tensor":
            return tensor_of(tensor)
        if op == "statistic":
            statistic = self._source.ask("statistic", name=variable, key=tensor.key, rank=message.get("rank"))
            assert isinstance(statistic, Statistic)
            return statistic_text(statistic)
        raise InvalidArgument(f"unknown operation {op!r}; choose from name, tensor, statistic")

    def _query(self, name: str) -> str:
        """Query the ranks for a variable, and return the error, if any.

        The result of the last of several overlapping queries is kept.
        """
        if not name:
            raise InvalidArgument("no variable was given; enter a name such as model")
        # Queries may overlap, for example if the user enters another name while the first one runs.
        with self._lock:
            self._query_count = query = self._query_count + 1
        try:
            shard_map = self._source.ask("shards", name=name)
        except RankbookError as error:
            # The error is shown in place of the tensors, and also returned to the browser.
            shard_map = ShardMap(name, "", (), str(error))
        assert isinstance(shard_map, ShardMap)
        with self._lock:
            if query == self._query_count:
                self._variable, self._shard_map = name, shard_map
                self._tensors = {tensor.key: tensor for tensor in shard_map.tensors}
                self._selected = None
                # `query` makes the value differ, so that the browser is notified even if only the shards have moved
                self._static_json = to_json({**static_data(shard_map), "search": self._search, "asked": query})
        return shard_map.trouble

    def summary(self) -> str:
        """See `ViewModel`."""
        return summary(self._shard_map, self._variable)

    def text(self) -> str:
        """See `ViewModel`."""
        return text(self._shard_map, self._variable, self._search)

    def html(self) -> str:
        """See `ViewModel`."""
        return html(self._shard_map, self._variable, self._search)

    def svg(self) -> str:
        """See `ViewModel`."""
        return svg(self._shard_map, self._variable, self._selected)


class ShardsView(LiveView):
    """Live view of the shards of a variable's tensors. `search` is the initial filter of the names."""

    _esm = script("shards", last='export default mount("shards", {shards: drawShards});')
    shards_fixed = traitlets.Unicode("{}").tag(sync=True)
    shards_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, source: ClusterSource, name: str, *, search: str = "") -> None:
        super().__init__([ShardsModel(source, name, search)])


# JSON for static/shards.js ------------------------------------------------------------------------------------------


def static_data(shard_map: ShardMap) -> dict[str, Any]:
    """Return the JSON list of all tensors with dtype and global shape, and the bytes per rank."""
    return {
        "name": shard_map.name,
        "kind": shard_map.kind,
        "trouble": shard_map.trouble,
        "tensors": [[tensor.key, tensor.dtype, list(tensor.shape)] for tensor in shard_map.tensors],
        "totals": list(totals(shard_map).items()),
    }


def tensor_of(tensor: ShardedTensorMap) -> dict[str, Any]:
    """Return the JSON data of one tensor's chunks: offset, shape, and the ranks that hold a replica."""
    chunks = chunks_of(_held(tensor))
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "left": max(0, len(chunks) - MAX_DRAWN),
        "chunks": [
            [
                list(holders[0].offset),
                list(holders[0].shape),
                [[shard.rank, shard.replica, shard.device, shard.bytes] for shard in holders],
            ]
            for holders in chunks[:MAX_DRAWN]
        ],
    }


def _held(tensor: ShardedTensorMap) -> Sequence[Shard]:
    """Return the shards that have elements: of a short dimension, some ranks hold nothing."""
    return [shard for shard in tensor.shards if 0 not in shard.shape] or tensor.shards


def chunks_of(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Group shards by chunk, in the order of the tensor; replicas are ordered by replica and rank."""
    # Shards of different ranks with the same offset and shape are copies of one chunk. Sorting the keys (offset, shape)
    # gives row-major order.
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Shard]] = defaultdict(list)
    for shard in shards:
        chunks[shard.offset, shard.shape].append(shard)
    return [sorted(chunks[chunk], key=lambda replica: (replica.replica, replica.rank)) for chunk in sorted(chunks)]


# Static versions ----------------------------------------------------------------------------------------------------


MAX_ROWS = 200  # tensors listed in static text and HTML
HEADINGS = ("tensor", "dtype", "global shape", "shards", "ranks")


def statistic_text(statistic: Statistic) -> str:
    """Describe a statistic in one line: "min -0.5, mean 0.25, max 1.5, 2 NaN"."""
    numbers = [("min", statistic.minimum), ("mean", statistic.mean), ("max", statistic.maximum)]
    parts = [f"{name} {number:.4g}" for name, number in numbers if number is not None]
    parts += [f"{statistic.nans} NaN", *([f"{statistic.infinities} infinite"] if statistic.infinities else [])]
    return ", ".join(parts)


def totals(shard_map: ShardMap) -> dict[int, int]:
    """Return the bytes per rank, replicas included."""
    amounts: Counter[int] = Counter()
    for tensor in shard_map.tensors:
        for shard in tensor.shards:
            amounts[shard.rank] += shard.bytes
    return dict(sorted(amounts.items()))


def imbalance(amounts: dict[int, int]) -> str:
    """Describe how evenly the bytes are distributed over the ranks."""
    if not amounts or not max(amounts.values()):
        return ""
    most, mean = max(amounts.values()), sum(amounts.values()) / len(amounts)
    # Half a percent is ignored, because not every tensor can be divided evenly.
    if most <= 1.005 * mean:
        return f"{format_bytes(mean)} per rank"
    rank = max(amounts, key=lambda holder: amounts[holder])
    above = 100 * most / mean - 100
    return f"rank {rank} holds {format_bytes(most)}, {above:.0f} % above the mean of {format_bytes(mean)}"


def summary(shard_map: ShardMap | None, name: str) -> str:
    """Summarize the shards in one line: "model (model): 6 tensors; 1.2 MB per rank"."""
    if shard_map is None:
        return f"shards of {name}: not queried yet" if name else "shards: no variable selected"
    if shard_map.trouble:
        return f"shards of {shard_map.name}: {shard_map.trouble}"
    counted = f"{shard_map.name} ({shard_map.kind}): {plural(len(shard_map.tensors), 'tensor')}"
    balance = imbalance(totals(shard_map))
    return f"{counted}; {balance}" if balance else counted


def _row(tensor: ShardedTensorMap) -> list[str]:
    held = _held(tensor)
    parts = {(shard.offset, shard.shape) for shard in held}
    # Replicas are numbered from 0.
    copies = max((shard.replica for shard in held), default=0) + 1
    ranks = sorted({shard.rank for shard in held})
    return [
        tensor.key,
        tensor.dtype,
        format_shape(tensor.shape),
        f"{len(parts)}{f' × {copies} replicas' if copies > 1 else ''}",
        name_ranks(ranks) if ranks else "",
    ]


def _rows(shard_map: ShardMap, search: str) -> tuple[list[list[str]], int]:
    """Return a row per tensor with all words of `search` in its name, and the number of further rows, not shown."""
    words = search.lower().split()
    matches = [tensor for tensor in shard_map.tensors if all(word in tensor.key.lower() for word in words)]
    return [_row(tensor) for tensor in matches[:MAX_ROWS]], max(0, len(matches) - MAX_ROWS)


def text(shard_map: ShardMap | None, name: str, search: str = "") -> str:
    """Return a line per tensor with `search` in its name, then the bytes per rank."""
    lines = [summary(shard_map, name)]
    if shard_map is not None and shard_map.tensors:
        rows, more = _rows(shard_map, search)
        lines.append(table(HEADINGS, rows)["text/plain"] if rows else f"no tensor name contains {search!r}")
        lines += [f"… and {more} more"] if more else []
        lines += [f"rank {rank}: {format_bytes(amount)}" for rank, amount in totals(shard_map).items()]
    return "\n".join(lines)


def html(shard_map: ShardMap | None, name: str, search: str = "") -> str:
    """Return a table of the tensors with `search` in their names, and a table of the bytes per rank."""
    markup = f"<p>{escape(summary(shard_map, name))}</p>"
    if shard_map is None or not shard_map.tensors:
        return markup
    matches, more = _rows(shard_map, search)
    markup += (
        table(HEADINGS, matches)["text/html"] if matches else f"<p>no tensor name contains {escape(repr(search))}</p>"
    )
    markup += f"<p>… and {more} more</p>" if more else ""
    rows = [[str(rank), format_bytes(amount)] for rank, amount in totals(shard_map).items()]
    return markup + table(("rank", "size"), rows)["text/html"]


def svg(shard_map: ShardMap | None, name: str, chosen: ShardedTensorMap | None) -> str:
    """Return the chosen tensor, or the largest one, as a grid of its parts, with the bytes per rank."""
    if shard_map is None or not shard_map.tensors:
        return svg_document(720, 40, "shards", [text_element(12, 25, summary(shard_map, name))])
    # The largest tensor is the one whose distribution matters most.
    tensor = chosen or max(shard_map.tensors, key=lambda candidate: sum(shard.bytes for shard in candidate.shards))
    shapes = [
        text_element(12, 22, summary(shard_map, name), size=14),
        text_element(12, 44, f"{tensor.key}  {format_shape(tensor.shape)}  {tensor.dtype}", fill=FAINT),
    ]
    shapes += _grid(tensor, 12, 56, 400, 280)
    amounts = totals(shard_map)
    most = max([*amounts.values(), 1])
    # All ranks have to fit into 280 pixels. Rows of less than 10 pixels get no text.
    row = min(22.0, 280 / max(1, len(amounts)))
    for index, (rank, amount) in enumerate(amounts.items()):
        y = 56 + index * row
        shapes.append(rect(480, y, 130 * amount / most, row - 2, BLUE, title=f"rank {rank}: {format_bytes(amount)}"))
        if row >= 10:
            shapes += [
                text_element(470, y + row - 6, str(rank), anchor="end", size=11),
                text_element(620, y + row - 6, format_bytes(amount)),
            ]
    return svg_document(720, 350, summary(shard_map, name), shapes)


def _grid(tensor: ShardedTensorMap, x: float, y: float, width: float, height: float) -> list[str]:
    """Draw the shards along the tensor's two largest dims, at index 0 of the other dims."""
    across, down = _two_dims(tensor.shape)
    shapes, drawn = [], set()
    for shard in sorted(tensor.shards, key=lambda replica: (replica.replica, replica.rank)):
        # Of a tensor with more than two dims, such as the weight of a convolution, only one plane can be drawn.
        in_plane = all(begin == 0 for dim, begin in enumerate(shard.offset) if dim not in (across, down))
        # Replicas are drawn once, in the colour of the first rank that holds one.
        if (shard.offset, shard.shape) in drawn or not in_plane:
            continue
        drawn.add((shard.offset, shard.shape))
        x_offset, wide = _extent(tensor, shard.offset, shard.shape, across, width)
        top, high = _extent(tensor, shard.offset, shard.shape, down, height)
        colour = rank_color(shard.rank)
        copies = [copy for copy in tensor.shards if (copy.offset, copy.shape) == (shard.offset, shard.shape)]
        title = f"rank {shard.rank}, offset {shard.offset}, shape {format_shape(shard.shape)}"
        shapes.append(rect(x + x_offset, y + top, wide, high, colour, title=title, extra=f" stroke='{PAPER}'"))
        label = f"{shard.rank}{f' ×{len(copies)}' if len(copies) > 1 else ''}"
        # Only where the label fits: about 8 pixels per character.
        if wide > 8 * len(label) and high > 14:
            shapes.append(text_element(x + x_offset + 4, y + top + 14, label, fill=contrast_color(colour)))
    return shapes


def _two_dims(shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Return the dims drawn across and down: the two largest, the first of them down."""
    # For the shape (64, 3, 7, 512) the two largest dims are 3 and 0: dim 0 goes down and dim 3 across. A vector goes
    # down.
    dims = sorted(sorted(range(len(shape)), key=lambda dim: -shape[dim])[:2])
    if len(dims) == 2:
        return dims[1], dims[0]
    return None, dims[0] if dims else None


def _extent(
    tensor: ShardedTensorMap, offset: tuple[int, ...], shape: tuple[int, ...], dim: int | None, pixels: float
) -> tuple[float, float]:
    if dim is None or not tensor.shape[dim]:
        return 0.0, pixels
    return pixels * offset[dim] / tensor.shape[dim], pixels * shape[dim] / tensor.shape[dim]
