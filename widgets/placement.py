"""Placement view: hosts, devices and ranks with their state, memory use and training speed.

`PlacementModel` and `PlacementView` are the live view; `fixed_of`, `state_of` and `detail_of` make the JSON for
static/placement.js; `text`, `html` and `svg` draw the static versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape
from itertools import groupby
from typing import Any

import traitlets

from rankbook.errors import BadRequest
from rankbook.formatting import format_3g, format_bytes, format_count, format_shape, format_time, plural
from rankbook.protocol.telemetry import Holding, MemoryUse, Placement, RankDetail, RankPlacement, Variable
from rankbook.ranks import name_ranks
from rankbook.widgets.live_view import LiveView, call_if_set, script
from rankbook.widgets.rendering import (
    FAINT,
    LINE,
    MEMORY_COLOURS,
    STATE_MARKS,
    VERMILLION,
    bar,
    rect,
    svg_document,
    table,
    text_element,
)
from rankbook.widgets.view_model import ClusterSource, Message, ViewModel, to_json


class PlacementModel(ViewModel):
    """Model of the placement view, updated by the source's "placement" state."""

    name = "placement"

    def __init__(self, feed: ClusterSource) -> None:
        self._feed = feed
        self._last: Placement | None = None
        self._end: Callable[[], None] | None = None

    def open(self, changed: Callable[[], None]) -> None:
        """See `ViewModel`."""

        def arrived(state: object) -> None:
            if isinstance(state, Placement):
                self._last = state
                changed()

        self._end = self._feed.watch("placement", arrived)

    def close(self) -> None:
        """See `ViewModel`."""
        end, self._end = self._end, None
        call_if_set(end)

    def ready(self) -> bool:
        """See `ViewModel`."""
        return self._last is not None

    def fixed(self) -> str:
        """See `ViewModel`."""
        return to_json(fixed_of(self._last))

    def state(self) -> str:
        """See `ViewModel`."""
        return to_json(state_of(self._last))

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """Answer `detail` of a rank, or perform `act` on it."""
        rank = message.get("rank")
        if rank is not None and not isinstance(rank, int):
            raise BadRequest(f"{rank!r} is no rank")
        if op == "detail":
            detail = self._feed.ask("detail", rank=rank)
            assert isinstance(detail, RankDetail)
            return detail_of(detail)
        if op == "act" and message.get("kind") in {"interrupt", "restart"}:
            return self._feed.act(str(message["kind"]), rank)
        raise BadRequest(f"the placement view knows no {op!r}")

    def summary(self) -> str:
        """See `ViewModel`."""
        return summary(self._last)

    def text(self) -> str:
        """See `ViewModel`."""
        return text(self._last)

    def html(self) -> str:
        """See `ViewModel`."""
        return html(self._last)

    def svg(self) -> str:
        """See `ViewModel`."""
        return svg(self._last)


class PlacementView(LiveView):
    """Live view of hosts, devices and ranks."""

    _esm = script("placement", last='export default mount("placement", {placement: drawPlacement});')
    placement_fixed = traitlets.Unicode("{}").tag(sync=True)
    placement_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, feed: ClusterSource) -> None:
        super().__init__([PlacementModel(feed)])


def fixed_of(placement: Placement | None) -> dict[str, Any]:
    """Return the JSON data that rarely changes: the ranks, their devices and the objects on them."""
    if placement is None:
        return {}
    return {"cluster": placement.cluster, "ranks": [_fixed_rank(rank) for rank in placement.ranks]}


def _fixed_rank(each: RankPlacement) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "host": each.host,
        "pid": each.pid,
        "device": each.device,
        "model": each.device_name,
        "holdings": [_holding(holding) for holding in each.holdings],
    }


def _holding(holding: Holding) -> list[Any]:
    """Return a holding's texts for the browser; a loader's position changes often and is part of the state."""
    moves = holding.kind == "loader"
    return [holding.kind, holding.name, *holding_words(holding, detail=not moves)]


def state_of(placement: Placement | None) -> dict[str, Any]:
    """Return the JSON data that changes often: a list per rank, in the order that static/placement.js expects."""
    if placement is None:
        return {}
    return {"at": round(placement.at, 1), "ranks": [_state_rank(rank) for rank in placement.ranks]}


def _state_rank(each: RankPlacement) -> list[Any]:
    return [
        each.rank,
        each.state,
        state_words(each),
        int(each.lags),
        None if each.utilisation is None else round(100 * each.utilisation),
        each.steps,
        None if each.rate is None else float(f"{each.rate:.3g}"),
        None if each.memory is None else _memory(each.memory),
        [holding.detail for holding in each.holdings if holding.kind == "loader"],
    ]


def _memory(memory: MemoryUse) -> list[int]:
    return [
        memory.total,
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.other,
        memory.free,
        memory.shared,
    ]


def detail_of(detail: RankDetail) -> dict[str, Any]:
    """Return the JSON data of a rank's detail pane."""
    return {
        "rank": detail.rank,
        "stack": list(detail.stack),
        "output": list(detail.output),
        "variables": [_variable(variable) for variable in detail.variables],
    }


def _variable(each: Variable) -> list[Any]:
    return [
        each.name,
        each.type,
        "" if each.shape is None else format_shape(each.shape),
        each.dtype,
        each.device,
        "" if each.bytes is None else format_bytes(each.bytes),
        each.preview,
    ]


__all__ = ["holding_words", "html", "state_words", "summary", "svg", "text"]

MOST_BARS = 32  # ranks with a bar in the HTML: JupyterLab inspects every element, which may take 50 ms at most
NOTHING_YET = "no rank has answered yet"
HEADINGS = ("rank", "state", "device", "memory", "used for", "busy", "steps", "rate", "holds")


def state_words(each: RankPlacement) -> str:
    """Describe the state of a rank: "running cell [3] line 12", "waiting in all_reduce #41 (float32[4, 4])"."""
    words_ = each.state
    if each.state == "waiting" and each.waits_for:
        words_ = f"waiting in {each.waits_for}"
    if each.cell is not None and each.state in {"running", "waiting", "unresponsive"}:
        words_ += f"{'' if each.state == 'running' else ','} cell [{each.cell}]"
        if each.line is not None:
            words_ += f" line {each.line}"
    return words_


def holding_words(holding: Holding, *, detail: bool = True) -> tuple[str, str]:
    """Describe a holding by its class with wrapper, and its properties.

    For example ("DDP Net", "1.2 M parameters, 4.8 MB, float32").
    """
    facts = [
        f"{format_count(holding.parameters)} parameters" if holding.parameters else "",
        format_bytes(holding.bytes) if holding.bytes else "",
        "/".join(holding.dtypes),
        holding.device,
        holding.detail if detail else "",
    ]
    return f"{holding.wrapper} {holding.class_name}".strip(), ", ".join(filter(None, facts))


def used(memory: MemoryUse) -> int:
    """Return the used bytes of the device, including those of other processes."""
    return max(0, memory.total - memory.free)


def split(memory: MemoryUse) -> list[tuple[str, int, str]]:
    """Return the parts of the memory bar: label, bytes, colour."""
    amounts = (memory.parameters, memory.gradients, memory.optimizer, memory.other)
    return [(name, amount, colour) for (name, colour), amount in zip(MEMORY_COLOURS.items(), amounts, strict=True)]


def split_words(memory: MemoryUse) -> str:
    """Describe the parts of the memory bar, without empty ones."""
    parts = [(name if name != "other" else "activations and other", amount) for name, amount, _ in split(memory)]
    parts += [("free", memory.free), ("shared with others", memory.shared)]
    return ", ".join(f"{name} {format_bytes(amount)}" for name, amount in parts if amount)


def summary(placement: Placement | None) -> str:
    """Summarize the placement in one line: "4 ranks of main: 3 running, 1 waiting"."""
    if placement is None:
        return NOTHING_YET
    states = Counter(rank.state for rank in placement.ranks)
    lagging = [rank.rank for rank in placement.ranks if rank.lags]
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    late = f"; {name_ranks(lagging)} {'lags' if len(lagging) == 1 else 'lag'}" if lagging else ""
    name = f" of {placement.cluster}" if placement.cluster else ""
    return f"{plural(len(placement.ranks), 'rank')}{name}: {counts}{late}"


def _row(each: RankPlacement) -> list[str]:
    memory = each.memory
    return [
        str(each.rank),
        f"{STATE_MARKS.get(each.state, '')} {'▲ lags, ' if each.lags else ''}{state_words(each)}",
        f"{each.device} {each.device_name}".strip(),
        "" if memory is None else f"{format_bytes(used(memory))} of {format_bytes(memory.total)}",
        "" if memory is None else split_words(memory),
        "" if each.utilisation is None else f"{each.utilisation:.0%}",
        str(each.steps) if each.steps else "",
        "" if each.rate is None else f"{format_3g(each.rate)}/s",
        "; ".join(_holding_line(holding) for holding in each.holdings),
    ]


def _holding_line(holding: Holding) -> str:
    kind, facts = holding_words(holding)
    return f"{holding.name}: {kind} ({facts})" if facts else f"{holding.name}: {kind}"


def text(placement: Placement | None) -> str:
    """Return a table of the ranks per host as text."""
    if placement is None:
        return f"placement: {NOTHING_YET}"
    lines = [f"{summary(placement)}, {format_time(placement.at)}"]
    for host, ranks in groupby(placement.ranks, key=lambda rank: rank.host):
        lines += ["", host, table(HEADINGS, [_row(rank) for rank in ranks])["text/plain"]]
    return "\n".join(lines)


def html(placement: Placement | None) -> str:
    """Return a table of the ranks with their memory bars as HTML."""
    if placement is None:
        return f"<p>placement: {NOTHING_YET}</p>"
    rows = []
    for host, ranks in groupby(placement.ranks, key=lambda rank: rank.host):
        rows.append(f'<tr><th scope="rowgroup" colspan="{len(HEADINGS)}">{escape(host)}</th></tr>')
        rows += [_html_row(rank, bars=len(placement.ranks) <= MOST_BARS) for rank in ranks]
    head = "".join(f'<th scope="col" style="text-align:left">{heading}</th>' for heading in HEADINGS)
    return (
        f"<p>{escape(summary(placement))}, {format_time(placement.at)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{_legend()}"
    )


def _html_row(each: RankPlacement, *, bars: bool) -> str:
    cells = [escape(cell) for cell in _row(each)]
    if each.memory is not None and bars:
        cells[3] = f"{bar(split(each.memory), each.memory.total, width='8em')} {cells[3]}"
    style = ' style="font-weight:bold"' if each.lags else ""
    return f"<tr{style}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _legend() -> str:
    parts = "".join(
        f'<span style="color:{colour}" aria-hidden="true">&#9632;</span> {name} &nbsp;'
        for name, colour in MEMORY_COLOURS.items()
    )
    return f"<p>{parts}</p>"


def svg(placement: Placement | None) -> str:
    """Return the ranks with their memory bars as an SVG document."""
    width, row = 960, 26
    if placement is None:
        return svg_document(width, 40, "placement", [text_element(12, 25, NOTHING_YET)])
    shapes = [text_element(12, 24, f"{summary(placement)}, {format_time(placement.at)}", size=14)]
    y = 40.0
    for host, ranks in groupby(placement.ranks, key=lambda rank: rank.host):
        shapes.append(text_element(12, y + 14, host, fill=FAINT))
        y += 22
        for rank in ranks:
            shapes += _svg_row(rank, y)
            y += row
    x = 12.0
    for name, colour in MEMORY_COLOURS.items():
        shapes += [rect(x, y + 10, 12, 12, colour), text_element(x + 17, y + 20, name)]
        x += 120
    return svg_document(width, y + 34, f"placement: {summary(placement)}", shapes)


def _svg_row(each: RankPlacement, y: float) -> list[str]:
    shapes = [
        text_element(36, y + 16, str(each.rank), anchor="end"),
        text_element(
            48, y + 16, f"{STATE_MARKS.get(each.state, '')} {'▲ lags, ' if each.lags else ''}{state_words(each)}"
        ),
        text_element(370, y + 16, each.device, fill=FAINT),
    ]
    if each.lags:
        shapes.insert(0, rect(4, y + 1, 4, 22, VERMILLION))
    if each.memory is not None and each.memory.total:
        x, scale = 430.0, 240 / each.memory.total
        shapes.append(rect(x, y + 4, 240, 16, "none", extra=f" stroke='{LINE}'"))
        for name, amount, colour in split(each.memory):
            shapes.append(rect(x, y + 4, amount * scale, 16, colour, title=f"{name} {format_bytes(amount)}"))
            x += amount * scale
        shapes.append(
            text_element(680, y + 16, f"{format_bytes(used(each.memory))} of {format_bytes(each.memory.total)}")
        )
    if each.rate is not None:
        shapes.append(text_element(948, y + 16, f"{format_3g(each.rate)} steps/s", anchor="end"))
    return shapes
