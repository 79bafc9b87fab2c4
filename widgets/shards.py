"""Shards view: which rank holds which part of a variable's tensors.

`ShardsModel` and `ShardsView` are the live view; `fixed_of` and `tensor_of` make the JSON for static/shards.js, which
requests the shards of one tensor at a time; `text`, `html` and `svg` draw the static versions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from html import escape
from threading import Lock, Thread
from typing import Any

import traitlets

from rankbook.errors import BadRequest, RankbookError
from rankbook.formatting import format_bytes, format_shape, plural
from rankbook.protocol.telemetry import Shard, ShardedTensorMap, ShardMap, Statistic
from rankbook.ranks import name_ranks
from rankbook.widgets.live_view import LiveView, script, start_thread
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
from rankbook.widgets.view_model import ClusterSource, Message, ViewModel, to_json

MOST_DRAWN = 4096  # chunks of one tensor; more are indistinguishable and slow to draw


class ShardsModel(ViewModel):
    """Model of the shards view of one variable.

    The ranks are queried when the view opens, and again when the user asks for it.
    """

    name = "shards"

    def __init__(self, feed: ClusterSource, variable: str = "", search: str = "") -> None:
        self._feed, self._variable, self._search = feed, variable, search
        self._lock = Lock()
        self._asked = 0
        self._found: ShardMap | None = None
        self._fixed = to_json({"name": variable, "search": search})
        self._tensors: dict[str, ShardedTensorMap] = {}
        self._chosen: ShardedTensorMap | None = None
        self._changed: Callable[[], None] | None = None

    def open(self, changed: Callable[[], None]) -> None:
        """See `ViewModel`."""
        self._changed = changed
        if self._found is None and self._variable:
            start_thread(Thread(target=self._begin, name="rankbook-shards"))
        changed()

    def _begin(self) -> None:
        self._ask(self._variable)
        if self._changed is not None:
            self._changed()

    def close(self) -> None:
        """See `ViewModel`."""
        self._changed = None

    def ready(self) -> bool:
        """See `ViewModel`."""
        return self._found is not None or not self._variable

    def fixed(self) -> str:
        """See `ViewModel`."""
        return self._fixed

    def state(self) -> str:
        """See `ViewModel`."""
        return "{}"

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """Answer `name` (a new variable), `tensor` (its chunks) or `statistic` (of one rank's values of it)."""
        if op == "name":
            trouble = self._ask(str(message.get("name", "")).strip())
            if self._changed is not None:
                self._changed()
            return trouble
        with self._lock:
            variable, tensor = self._variable, self._tensors.get(str(message.get("key")))
        if tensor is None:
            raise BadRequest(f"{variable} has no tensor {message.get('key')!r} any more: press Show again")
        self._chosen = tensor
        if op == "tensor":
            return tensor_of(tensor)
        if op == "statistic":
            statistic = self._feed.ask("statistic", name=variable, key=tensor.key, rank=message.get("rank"))
            assert isinstance(statistic, Statistic)
            return statistic_words(statistic)
        raise BadRequest(f"the shards view knows no {op!r}")

    def _ask(self, name: str) -> str:
        """Query the ranks for a variable, and return the error, if any.

        The result of the last of several overlapping queries is kept.
        """
        if not name:
            raise BadRequest("which variable? Write its name, such as model")
        with self._lock:
            self._asked = query = self._asked + 1
        try:
            shard_map = self._feed.ask("shards", name=name)
        except RankbookError as error:
            shard_map = ShardMap(name, "", (), str(error))
        assert isinstance(shard_map, ShardMap)
        with self._lock:
            if query == self._asked:
                self._variable, self._found = name, shard_map
                self._tensors = {tensor.key: tensor for tensor in shard_map.tensors}
                self._chosen = None
                # `query` makes the value differ, so that the browser is notified even if only the shards have moved
                self._fixed = to_json({**fixed_of(shard_map), "search": self._search, "asked": query})
        return shard_map.trouble

    def summary(self) -> str:
        """See `ViewModel`."""
        return summary(self._found, self._variable)

    def text(self) -> str:
        """See `ViewModel`."""
        return text(self._found, self._variable, self._search)

    def html(self) -> str:
        """See `ViewModel`."""
        return html(self._found, self._variable, self._search)

    def svg(self) -> str:
        """See `ViewModel`."""
        return svg(self._found, self._variable, self._chosen)


class ShardsView(LiveView):
    """Live view of the shards of a variable's tensors. `search` is the initial filter of the names."""

    _esm = script("shards", last='export default mount("shards", {shards: drawShards});')
    shards_fixed = traitlets.Unicode("{}").tag(sync=True)
    shards_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, feed: ClusterSource, name: str, *, search: str = "") -> None:
        super().__init__([ShardsModel(feed, name, search)])


def fixed_of(found: ShardMap) -> dict[str, Any]:
    """Return the JSON list of all tensors with dtype and global shape, and the bytes per rank."""
    return {
        "name": found.name,
        "kind": found.kind,
        "trouble": found.trouble,
        "tensors": [[tensor.key, tensor.dtype, list(tensor.shape)] for tensor in found.tensors],
        "totals": list(totals(found).items()),
    }


def tensor_of(tensor: ShardedTensorMap) -> dict[str, Any]:
    """Return the JSON data of one tensor's chunks: offset, shape, and the ranks that hold a replica."""
    chunks = chunks_of(tensor.shards)
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "left": max(0, len(chunks) - MOST_DRAWN),
        "chunks": [
            [
                list(holders[0].offset),
                list(holders[0].shape),
                [[shard.rank, shard.replica, shard.device, shard.bytes] for shard in holders],
            ]
            for holders in chunks[:MOST_DRAWN]
        ],
    }


def chunks_of(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Group shards by chunk, in the order of the tensor; replicas are ordered by replica and rank."""
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Shard]] = defaultdict(list)
    for shard in shards:
        chunks[shard.offset, shard.shape].append(shard)
    return [sorted(chunks[chunk], key=lambda replica: (replica.replica, replica.rank)) for chunk in sorted(chunks)]


MOST_ROWS = 200  # tensors listed in static text and HTML
HEADINGS = ("tensor", "dtype", "global shape", "parts", "on")


def statistic_words(found: Statistic) -> str:
    """Describe a statistic in one line: "min -0.5, mean 0.25, max 1.5, 2 NaN"."""
    numbers = [("min", found.minimum), ("mean", found.mean), ("max", found.maximum)]
    parts = [f"{name} {number:.4g}" for name, number in numbers if number is not None]
    parts += [f"{found.nans} NaN", *([f"{found.infinities} infinite"] if found.infinities else [])]
    return ", ".join(parts)


def totals(found: ShardMap) -> dict[int, int]:
    """Return the bytes per rank, replicas included."""
    amounts: Counter[int] = Counter()
    for tensor in found.tensors:
        for shard in tensor.shards:
            amounts[shard.rank] += shard.bytes
    return dict(sorted(amounts.items()))


def imbalance(amounts: dict[int, int]) -> str:
    """Describe how evenly the bytes are distributed over the ranks."""
    if not amounts or not max(amounts.values()):
        return ""
    most, mean = max(amounts.values()), sum(amounts.values()) / len(amounts)
    if most <= 1.005 * mean:
        return f"{format_bytes(mean)} on each rank"
    rank = max(amounts, key=lambda holder: amounts[holder])
    above = 100 * most / mean - 100
    return f"rank {rank} holds {format_bytes(most)}, {above:.0f} % above the mean of {format_bytes(mean)}"


def summary(found: ShardMap | None, name: str) -> str:
    """Summarize the shards in one line: "model (model): 6 tensors; 1.2 MB on each rank"."""
    if found is None:
        return f"shards of {name}: not asked yet" if name else "shards: no variable chosen"
    if found.trouble:
        return f"shards of {found.name}: {found.trouble}"
    balance = imbalance(totals(found))
    return f"{found.name} ({found.kind}): {plural(len(found.tensors), 'tensor')}{f'; {balance}' if balance else ''}"


def _row(tensor: ShardedTensorMap) -> list[str]:
    parts = {(shard.offset, shard.shape) for shard in tensor.shards}
    copies = max((shard.replica for shard in tensor.shards), default=0) + 1
    ranks = sorted({shard.rank for shard in tensor.shards})
    return [
        tensor.key,
        tensor.dtype,
        format_shape(tensor.shape),
        f"{len(parts)}{f' × {copies} replicas' if copies > 1 else ''}",
        name_ranks(ranks) if ranks else "",
    ]


def _rows(found: ShardMap, search: str) -> tuple[list[list[str]], int]:
    """Return a row per tensor with `search` in its name, and the number of further rows that are not shown."""
    matches = [tensor for tensor in found.tensors if search.lower() in tensor.key.lower()]
    return [_row(tensor) for tensor in matches[:MOST_ROWS]], max(0, len(matches) - MOST_ROWS)


def text(found: ShardMap | None, name: str, search: str = "") -> str:
    """Return a line per tensor with `search` in its name, then the bytes per rank."""
    lines = [summary(found, name)]
    if found is not None and found.tensors:
        rows, more = _rows(found, search)
        lines.append(table(HEADINGS, rows)["text/plain"] if rows else f"no tensor has {search!r} in its name")
        lines += [f"… and {more} more"] if more else []
        lines += [f"rank {rank}: {format_bytes(amount)}" for rank, amount in totals(found).items()]
    return "\n".join(lines)


def html(found: ShardMap | None, name: str, search: str = "") -> str:
    """Return a table of the tensors with `search` in their names, and a table of the bytes per rank."""
    markup = f"<p>{escape(summary(found, name))}</p>"
    if found is None or not found.tensors:
        return markup
    shown, more = _rows(found, search)
    markup += (
        table(HEADINGS, shown)["text/html"] if shown else f"<p>no tensor has {escape(repr(search))} in its name</p>"
    )
    markup += f"<p>… and {more} more</p>" if more else ""
    rows = [[str(rank), format_bytes(amount)] for rank, amount in totals(found).items()]
    return markup + table(("rank", "holds"), rows)["text/html"]


def svg(found: ShardMap | None, name: str, chosen: ShardedTensorMap | None) -> str:
    """Return the chosen tensor, or the largest one, as a grid of its parts, with the bytes per rank."""
    if found is None or not found.tensors:
        return svg_document(720, 40, "shards", [text_element(12, 25, summary(found, name))])
    tensor = chosen or max(found.tensors, key=lambda candidate: sum(shard.bytes for shard in candidate.shards))
    shapes = [
        text_element(12, 22, summary(found, name), size=14),
        text_element(12, 44, f"{tensor.key}  {format_shape(tensor.shape)}  {tensor.dtype}", fill=FAINT),
    ]
    shapes += _grid(tensor, 12, 56, 400, 280)
    amounts = totals(found)
    most = max([*amounts.values(), 1])
    row = min(22.0, 280 / max(1, len(amounts)))
    for index, (rank, amount) in enumerate(amounts.items()):
        y = 56 + index * row
        shapes.append(rect(480, y, 130 * amount / most, row - 2, BLUE, title=f"rank {rank}: {format_bytes(amount)}"))
        if row >= 10:
            shapes += [
                text_element(470, y + row - 6, str(rank), anchor="end", size=11),
                text_element(620, y + row - 6, format_bytes(amount)),
            ]
    return svg_document(720, 350, summary(found, name), shapes)


def _grid(tensor: ShardedTensorMap, x: float, y: float, width: float, height: float) -> list[str]:
    """Draw the shards along the tensor's two largest dims, at index 0 of the other dims."""
    across, down = _two_dims(tensor.shape)
    shapes, drawn = [], set()
    for shard in sorted(tensor.shards, key=lambda replica: (replica.replica, replica.rank)):
        in_plane = all(begin == 0 for dim, begin in enumerate(shard.offset) if dim not in (across, down))
        if (shard.offset, shard.shape) in drawn or not in_plane:
            continue
        drawn.add((shard.offset, shard.shape))
        left, wide = _extent(tensor, shard.offset, shard.shape, across, width)
        top, high = _extent(tensor, shard.offset, shard.shape, down, height)
        colour = rank_color(shard.rank)
        copies = [copy for copy in tensor.shards if (copy.offset, copy.shape) == (shard.offset, shard.shape)]
        title = f"rank {shard.rank}, offset {shard.offset}, shape {format_shape(shard.shape)}"
        shapes.append(rect(x + left, y + top, wide, high, colour, title=title, extra=f" stroke='{PAPER}'"))
        label = f"{shard.rank}{f' ×{len(copies)}' if len(copies) > 1 else ''}"
        if wide > 8 * len(label) and high > 14:
            shapes.append(text_element(x + left + 4, y + top + 14, label, fill=contrast_color(colour)))
    return shapes


def _two_dims(shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Return the dims drawn across and down: the two largest, the first of them down."""
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
