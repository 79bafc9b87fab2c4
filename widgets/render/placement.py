"""What every rank holds and does, as HTML, text and SVG.

Owns: pure functions from `Placement`. Refuses: to change with time by itself.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from itertools import groupby

from rankbook.formatting import format_3g, format_bytes, format_count, format_time, plural
from rankbook.protocol.telemetry import Holding, MemoryUse, Placement, RankPlacement
from rankbook.ranks import name_ranks
from rankbook.widgets.render.svg import FAINT, LINE, MEMORY_COLOURS, STATE_MARKS, VERMILLION, bar, picture, rect, words
from rankbook.widgets.render.table import table

__all__ = ["holding_words", "html", "state_words", "summary", "svg", "text"]

MOST_BARS = 32  # ranks: JupyterLab looks at every element, and 50 ms is what it may take
NOTHING_YET = "no rank has answered yet"
HEADINGS = ("rank", "state", "device", "memory", "used for", "busy", "steps", "rate", "holds")


def state_words(each: RankPlacement) -> str:
    """What a rank does: "running cell [3] line 12", "waiting in all_reduce #41 (float32[4, 4])"."""
    words_ = each.state
    if each.state == "waiting" and each.waits_for:
        words_ = f"waiting in {each.waits_for}"
    if each.cell is not None and each.state in {"running", "waiting", "unresponsive"}:
        words_ += f"{'' if each.state == 'running' else ','} cell [{each.cell}]"
        if each.line is not None:
            words_ += f" line {each.line}"
    return words_


def holding_words(holding: Holding, *, detail: bool = True) -> tuple[str, str]:
    """A holding's class with its wrapper, and its facts: ("DDP Net", "1.2 M parameters, 4.8 MB, float32")."""
    facts = [
        f"{format_count(holding.parameters)} parameters" if holding.parameters else "",
        format_bytes(holding.bytes) if holding.bytes else "",
        "/".join(holding.dtypes),
        holding.device,
        holding.detail if detail else "",
    ]
    return f"{holding.wrapper} {holding.class_name}".strip(), ", ".join(filter(None, facts))


def used(memory: MemoryUse) -> int:
    """What is taken of the device, whoever took it."""
    return max(0, memory.total - memory.free)


def split(memory: MemoryUse) -> list[tuple[str, int, str]]:
    """The parts of the memory bar: label, bytes, colour."""
    amounts = (memory.parameters, memory.gradients, memory.optimizer, memory.other)
    return [(name, amount, colour) for (name, colour), amount in zip(MEMORY_COLOURS.items(), amounts, strict=True)]


def split_words(memory: MemoryUse) -> str:
    """The parts of the memory bar in words, without those that are nothing."""
    parts = [(name if name != "other" else "activations and other", amount) for name, amount, _ in split(memory)]
    parts += [("free", memory.free), ("shared with others", memory.shared)]
    return ", ".join(f"{name} {format_bytes(amount)}" for name, amount in parts if amount)


def summary(placement: Placement | None) -> str:
    """One line: "4 ranks of main: 3 running, 1 waiting"."""
    if placement is None:
        return NOTHING_YET
    states = Counter(each.state for each in placement.ranks)
    lagging = [each.rank for each in placement.ranks if each.lags]
    told = ", ".join(f"{number} {state}" for state, number in states.items())
    late = f"; {name_ranks(lagging)} {'lags' if len(lagging) == 1 else 'lag'}" if lagging else ""
    name = f" of {placement.cluster}" if placement.cluster else ""
    return f"{plural(len(placement.ranks), 'rank')}{name}: {told}{late}"


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
    what, facts = holding_words(holding)
    return f"{holding.name}: {what} ({facts})" if facts else f"{holding.name}: {what}"


def text(placement: Placement | None) -> str:
    """A line for each rank below its host."""
    if placement is None:
        return f"placement: {NOTHING_YET}"
    lines = [f"{summary(placement)}, {format_time(placement.at)}"]
    for host, ranks in groupby(placement.ranks, key=lambda each: each.host):
        lines += ["", host, table(HEADINGS, [_row(each) for each in ranks])["text/plain"]]
    return "\n".join(lines)


def html(placement: Placement | None) -> str:
    """A table of the ranks with their memory bars."""
    if placement is None:
        return f"<p>placement: {NOTHING_YET}</p>"
    rows = []
    for host, ranks in groupby(placement.ranks, key=lambda each: each.host):
        rows.append(f'<tr><th scope="rowgroup" colspan="{len(HEADINGS)}">{escape(host)}</th></tr>')
        rows += [_html_row(each, bars=len(placement.ranks) <= MOST_BARS) for each in ranks]
    head = "".join(f'<th scope="col" style="text-align:left">{each}</th>' for each in HEADINGS)
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
    """The ranks with their memory bars, as a picture."""
    width, row = 960, 26
    if placement is None:
        return picture(width, 40, "placement", [words(12, 25, NOTHING_YET)])
    shapes = [words(12, 24, f"{summary(placement)}, {format_time(placement.at)}", size=14)]
    y = 40.0
    for host, ranks in groupby(placement.ranks, key=lambda each: each.host):
        shapes.append(words(12, y + 14, host, fill=FAINT))
        y += 22
        for each in ranks:
            shapes += _svg_row(each, y)
            y += row
    x = 12.0
    for name, colour in MEMORY_COLOURS.items():
        shapes += [rect(x, y + 10, 12, 12, colour), words(x + 17, y + 20, name)]
        x += 120
    return picture(width, y + 34, f"placement: {summary(placement)}", shapes)


def _svg_row(each: RankPlacement, y: float) -> list[str]:
    shapes = [
        words(36, y + 16, str(each.rank), anchor="end"),
        words(48, y + 16, f"{STATE_MARKS.get(each.state, '')} {'▲ lags, ' if each.lags else ''}{state_words(each)}"),
        words(370, y + 16, each.device, fill=FAINT),
    ]
    if each.lags:
        shapes.insert(0, rect(4, y + 1, 4, 22, VERMILLION))
    if each.memory is not None and each.memory.total:
        x, scale = 430.0, 240 / each.memory.total
        shapes.append(rect(x, y + 4, 240, 16, "none", extra=f" stroke='{LINE}'"))
        for name, amount, colour in split(each.memory):
            shapes.append(rect(x, y + 4, amount * scale, 16, colour, title=f"{name} {format_bytes(amount)}"))
            x += amount * scale
        shapes.append(words(680, y + 16, f"{format_bytes(used(each.memory))} of {format_bytes(each.memory.total)}"))
    if each.rate is not None:
        shapes.append(words(948, y + 16, f"{format_3g(each.rate)} steps/s", anchor="end"))
    return shapes
