"""Placement view: hosts, devices and ranks with their state, memory use and training speed.

`PlacementModel` and `PlacementView` are the live view; `static_data`, `dynamic_data` and `detail_of` make the JSON for
static/placement.js; `text`, `html` and `svg` draw the static versions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import traitlets

from rankbook.errors import InvalidArgument
from rankbook.formatting import format_3g, format_bytes, format_count, format_shape, format_time, plural
from rankbook.protocol.telemetry import (
    GradientNorms,
    Holding,
    MemoryUse,
    Placement,
    RankDetail,
    RankPlacement,
    Variable,
)
from rankbook.ranks import name_ranks
from rankbook.widgets.live_view import ClusterSource, LiveView, Message, ViewModel, call_if_set, script, to_json
from rankbook.widgets.rendering import (
    CELL,
    FAINT,
    LINE,
    MEMORY_COLOURS,
    STATE_MARKS,
    VERMILLION,
    WRAPPING,
    bar,
    polyline,
    rect,
    sparkline,
    svg_document,
    table,
    text_element,
)

# Course -------------------------------------------------------------------------------------------------------------


SAMPLE_INTERVAL = 2.0  # seconds
MAX_SAMPLES = 90  # three minutes; static/placement.js has the same two numbers


class Sample(NamedTuple):
    """Used memory in bytes and steps per second of a rank at the time `at`."""

    at: float
    used: int
    rate: float


History = Mapping[int, Sequence[Sample]]
"""The samples of every rank, oldest first."""


Norms = Mapping[str, Sequence[tuple[int | None, float]]]
"""Step and gradient norm of every model, oldest first."""


class PlacementHistory:
    """The course of every rank's memory and speed over the last minutes, and that of the gradient norms."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[Sample, ...]] = {}
        self._norms: dict[str, tuple[tuple[int | None, float], ...]] = {}
        self._last = float("-inf")

    def add(self, placement: Placement) -> None:
        """Take new gradient norms, and a sample of every rank if the last one is older than `SAMPLE_INTERVAL`.

        If the clock was set back, samples of a later time are dropped.
        """
        norms = {}
        for model in placement.gradients:
            known = self._norms.get(model.model, ())
            if known and model.step is not None and (known[-1][0] or 0) > model.step:
                known = ()  # another training
            new = (model.step, model.norm)
            norms[model.model] = known if known and known[-1] == new else (*known, new)[-MAX_SAMPLES:]
        self._norms = norms
        if 0 <= placement.at - self._last < SAMPLE_INTERVAL:
            return
        self._last = placement.at
        samples = {}
        for rank in placement.ranks:
            used = used_bytes(rank.memory) if rank.memory is not None else 0
            before = [sample for sample in self._samples.get(rank.rank, ()) if sample.at < placement.at]
            samples[rank.rank] = (*before, Sample(placement.at, used, rank.rate or 0.0))[-MAX_SAMPLES:]
        # Replaced and not changed, because another thread may be drawing it.
        self._samples = samples

    def samples(self) -> History:
        """Return the samples of the ranks of the last state."""
        return self._samples

    def norms(self) -> Norms:
        """Return the gradient norms of the models of the last state."""
        return self._norms


# Live view ----------------------------------------------------------------------------------------------------------


class PlacementModel(ViewModel):
    """Model of the placement view, updated by the source's "placement" state."""

    name = "placement"

    def __init__(self, source: ClusterSource) -> None:
        self._source = source
        # The whole state, which is replaced and never changed. So any thread may draw it without a lock.
        self._last: Placement | None = None
        self._history = PlacementHistory()
        self._end: Callable[[], None] | None = None

    def open(self, changed: Callable[[], None]) -> None:
        """See `ViewModel`."""

        def arrived(state: object) -> None:
            if isinstance(state, Placement):
                self._last = state
                self._history.add(state)
                changed()

        self._end = self._source.watch("placement", arrived)

    def close(self) -> None:
        """See `ViewModel`."""
        # Taken out first, so that a second call of `close` does not end the subscription twice.
        end, self._end = self._end, None
        call_if_set(end)

    def ready(self) -> bool:
        """See `ViewModel`."""
        return self._last is not None

    def load(self) -> None:
        """See `ViewModel`."""
        # One query instead of a subscription: the view may never have been open, as in `rankbook.placement().to_svg()`.
        placement = self._source.ask("placement")
        assert isinstance(placement, Placement)
        self._last = placement

    def static_json(self) -> str:
        """See `ViewModel`."""
        return to_json(static_data(self._last))

    def dynamic_json(self) -> str:
        """See `ViewModel`."""
        return to_json(dynamic_data(self._last))

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """Answer `detail` of a rank or the `history` of all, or perform `act` on a rank."""
        rank = message.get("rank")
        # From a browser. None means all ranks.
        if rank is not None and not isinstance(rank, int):
            raise InvalidArgument(f"rank must be an integer, got {rank!r}")
        if op == "history":
            return {str(number): samples for number, samples in history_data(self._history.samples()).items()}
        if op == "detail":
            detail = self._source.ask("detail", rank=rank)
            assert isinstance(detail, RankDetail)
            return detail_of(detail)
        if op == "act" and message.get("kind") in {"interrupt", "restart"}:
            return self._source.act(str(message["kind"]), rank)
        raise InvalidArgument(f"unknown operation {op!r}; choose from detail, history, act (interrupt or restart)")

    def summary(self) -> str:
        """See `ViewModel`."""
        return summary(self._last)

    def text(self) -> str:
        """See `ViewModel`."""
        return text(self._last)

    def html(self) -> str:
        """See `ViewModel`."""
        return html(self._last, self._history.samples(), self._history.norms())

    def svg(self) -> str:
        """See `ViewModel`."""
        return svg(self._last, self._history.samples(), self._history.norms())


class PlacementView(LiveView):
    """Live view of hosts, devices and ranks."""

    _esm = script("placement", last='export default mount("placement", {placement: drawPlacement});')
    placement_fixed = traitlets.Unicode("{}").tag(sync=True)
    placement_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, source: ClusterSource) -> None:
        super().__init__([PlacementModel(source)])


# JSON for static/placement.js ---------------------------------------------------------------------------------------


def static_data(placement: Placement | None) -> dict[str, Any]:
    """Return the JSON data that rarely changes: the ranks, their devices and the objects on them."""
    if placement is None:
        return {}
    ranks = [_fixed_rank(rank) for _, ranks in by_host(placement.ranks) for rank in ranks]
    return {"cluster": placement.cluster, "ranks": ranks}


def by_host(ranks: Iterable[RankPlacement]) -> list[tuple[str, list[RankPlacement]]]:
    """Return the ranks of every host, in the order of the hosts' first ranks.

    A rank that was replaced on another host is not the neighbour of the other ranks there.
    """
    hosts: dict[str, list[RankPlacement]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return list(hosts.items())


def _fixed_rank(rank: RankPlacement) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "pid": rank.pid,
        "device": rank.device,
        "model": rank.device_name,
        "holdings": [_holding(holding) for holding in rank.holdings],
    }


def _holding(holding: Holding) -> list[Any]:
    """Return a holding's texts for the browser; a loader's position changes often and is part of the state."""
    # The browser draws the fixed part anew when it changes, which must not happen with every batch.
    moves = holding.kind == "loader"
    return [holding.kind, holding.name, *holding_text(holding, detail=not moves)]


def dynamic_data(placement: Placement | None) -> dict[str, Any]:
    """Return the JSON data that changes often: a list per rank, in the order that static/placement.js expects."""
    if placement is None:
        return {}
    # Lists instead of objects: this is sent up to ten times a second, and names would be repeated for every rank.
    ranks = [_state_rank(rank) for rank in placement.ranks]
    return {
        "at": round(placement.at, 1),
        "ranks": ranks,
        "protection": placement.protection,
        "gradients": [_gradients(norms) for norms in placement.gradients],
    }


def _gradients(norms: GradientNorms) -> list[Any]:
    """Return model, step, norm in words and as a number, note, rows of the largest modules, and how many are left out.

    A row has the module, its norm in words, and the share of all gradients in percent.
    """
    rows = module_rows(norms)
    # JSON has no NaN.
    number = norms.norm if math.isfinite(norms.norm) else None
    return [norms.model, norms.step, format_norm(norms.norm), number, norms.note, rows, len(norms.modules) - len(rows)]


def _state_rank(rank: RankPlacement) -> list[Any]:
    return [
        rank.rank,
        rank.state,
        state_text(rank),
        int(rank.lags),
        None if rank.utilisation is None else round(100 * rank.utilisation),
        rank.steps,
        # Rounded, so that noise in the measurement is not sent as a change.
        None if rank.rate is None else float(f"{rank.rate:.3g}"),
        None if rank.memory is None else _memory(rank.memory),
        [holding.detail for holding in rank.holdings if holding.kind == "loader"],
    ]


def _memory(memory: MemoryUse) -> list[int]:
    return [
        # The order is that of static/placement.js.
        memory.total,
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.other,
        memory.free,
        memory.shared,
    ]


def history_data(history: History) -> dict[int, list[list[float]]]:
    """Return the JSON data of the samples: lists of time, used bytes and steps per second."""
    return {rank: [[round(at, 1), used, float(f"{rate:.3g}")] for at, used, rate in of] for rank, of in history.items()}


def detail_of(detail: RankDetail) -> dict[str, Any]:
    """Return the JSON data of a rank's detail pane."""
    return {
        "rank": detail.rank,
        "stack": list(detail.stack),
        "output": list(detail.output),
        "variables": [_variable(variable) for variable in detail.variables],
    }


def _variable(variable: Variable) -> list[Any]:
    return [
        variable.name,
        variable.type,
        "" if variable.shape is None else format_shape(variable.shape),
        variable.dtype,
        variable.device,
        "" if variable.bytes is None else format_bytes(variable.bytes),
        variable.preview,
    ]


__all__ = ["holding_text", "html", "state_text", "summary", "svg", "text"]

# Static versions ----------------------------------------------------------------------------------------------------


MAX_BLOCKS = 12  # of a course in the HTML
CPU_SCALE = "The bars of CPU ranks are scaled to the largest rank; the thin bars show the part of the machine's memory."
MAX_MODULES = 20
"""Modules whose gradients are shown."""
MAX_BARS = 32  # ranks with a bar in the HTML: JupyterLab inspects every element, which may take 50 ms at most
NOTHING_YET = "no rank has replied yet"
HEADINGS = ("rank", "state", "device", "memory", "memory use", "busy", "steps", "rate", "objects")


def format_norm(norm: float | None) -> str:
    """Return a norm in four digits; "none" for a module without gradients."""
    return "none" if norm is None else f"{norm:.4g}"


def module_rows(norms: GradientNorms) -> list[tuple[str, str, str]]:
    """Return module, norm and share of the square of the whole norm, of the modules with the largest gradients.

    They are in the order of the model. A NaN comes before all numbers.
    """
    largest = sorted(norms.modules, key=lambda entry: _size_of(entry[1]), reverse=True)[:MAX_MODULES]
    chosen = set(largest)
    return [
        (module or "(root)", format_norm(norm), _share(norm, norms.norm))
        for module, norm in norms.modules
        if (module, norm) in chosen
    ]


def _size_of(norm: float | None) -> float:
    return -1.0 if norm is None else math.inf if math.isnan(norm) else norm


def _share(norm: float | None, whole: float) -> str:
    known = norm is not None and whole and math.isfinite(whole) and math.isfinite(norm)
    return f"{format_3g(100 * (norm / whole) ** 2)} %" if known and norm is not None else ""


def norms_text(norms: GradientNorms) -> str:
    """Describe the norms of a model in a line: "gradients of model at step 120: norm 0.534"."""
    step = f" at step {norms.step}" if norms.step is not None else ""
    note = f"; {norms.note}" if norms.note else ""
    return f"gradients of {norms.model}{step}: norm {format_norm(norms.norm)}{note}"


def _norms_table(norms: GradientNorms) -> dict[str, str]:
    rows = module_rows(norms)
    bundle = table(("module", "gradient", "of all"), rows)
    if more := len(norms.modules) - len(rows):
        text = f"and {plural(more, 'module')} with smaller gradients"
        return {"text/plain": f"{bundle['text/plain']}\n{text}", "text/html": f"{bundle['text/html']}<p>{text}</p>"}
    return bundle


def state_text(rank: RankPlacement) -> str:
    """Describe the state of a rank: "running cell [3] line 12", "waiting in all_reduce #41 (float32[4, 4])"."""
    # An unresponsive rank may still be running its cell, so the cell is named as well.
    description = rank.state
    if rank.state == "waiting" and rank.waits_for:
        description = f"waiting in {rank.waits_for}"
    if rank.cell is not None and rank.state in {"running", "waiting", "unresponsive"}:
        description += f"{'' if rank.state == 'running' else ','} cell [{rank.cell}]"
        if rank.line is not None:
            description += f" line {rank.line}"
    return description


def holding_text(holding: Holding, *, detail: bool = True) -> tuple[str, str]:
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


def used_bytes(memory: MemoryUse) -> int:
    """Return the used bytes of the device, including those of other processes."""
    return max(0, memory.total - memory.free)


def memory_parts(memory: MemoryUse) -> list[tuple[str, int, str]]:
    """Return the parts of the memory bar: label, bytes, colour."""
    # In the order of MEMORY_COLOURS. `shared` is no part of the bar, because the other parts contain it.
    amounts = (memory.parameters, memory.gradients, memory.optimizer, memory.other)
    return [(name, amount, colour) for (name, colour), amount in zip(MEMORY_COLOURS.items(), amounts, strict=True)]


def bar_scales(ranks: Sequence[RankPlacement]) -> dict[int, int]:
    """Return the bytes that the whole width of every rank's memory bar stands for.

    On a GPU this is the device's memory. Ranks on the CPU use a small part of the machine's memory, in which their
    parameters could not be seen: their bars are scaled to the largest rank of their host.
    """
    most: dict[str, int] = {}
    for rank in ranks:
        if rank.memory is not None and is_on_cpu(rank):
            most[rank.host] = max(most.get(rank.host, 1), used_bytes(rank.memory))
    return {
        rank.rank: most[rank.host] if is_on_cpu(rank) else rank.memory.total
        for rank in ranks
        if rank.memory is not None
    }


def is_on_cpu(rank: RankPlacement) -> bool:
    """Return True if the rank's memory is the machine's."""
    return rank.device.partition(":")[0] == "cpu"


def machine_parts(memory: MemoryUse) -> list[tuple[str, int, str]]:
    """Return the thin bar of a rank on the CPU: its part of the machine's memory."""
    return [("used by the rank, of the machine's memory", used_bytes(memory), FAINT)]


def memory_text(memory: MemoryUse) -> str:
    """Describe the parts of the memory bar, without empty ones."""
    parts = [(name if name != "other" else "activations and other", amount) for name, amount, _ in memory_parts(memory)]
    parts += [("free", memory.free), ("shared with others", memory.shared)]
    return ", ".join(f"{name} {format_bytes(amount)}" for name, amount in parts if amount)


def summary(placement: Placement | None) -> str:
    """Summarize the placement in one line: "4 ranks of main: 3 running, 1 waiting"."""
    if placement is None:
        return NOTHING_YET
    # Counted in the order in which the states first occur, by rank.
    states = Counter(rank.state for rank in placement.ranks)
    lagging = [rank.rank for rank in placement.ranks if rank.lags]
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    late = f"; {name_ranks(lagging)} {'lags' if len(lagging) == 1 else 'lag'}" if lagging else ""
    name = f" of {placement.cluster}" if placement.cluster else ""
    return f"{plural(len(placement.ranks), 'rank')}{name}: {counts}{late}"


def _row(rank: RankPlacement) -> list[str]:
    memory = rank.memory
    return [
        str(rank.rank),
        f"{STATE_MARKS.get(rank.state, '')} {'▲ lags, ' if rank.lags else ''}{state_text(rank)}",
        f"{rank.device} {rank.device_name}".strip(),
        "" if memory is None else f"{format_bytes(used_bytes(memory))} of {format_bytes(memory.total)}",
        "" if memory is None else memory_text(memory),
        "" if rank.utilisation is None else f"{rank.utilisation:.0%}",
        str(rank.steps) if rank.steps else "",
        "" if rank.rate is None else f"{format_3g(rank.rate)}/s",
        "; ".join(_holding_line(holding) for holding in rank.holdings),
    ]


def _holding_line(holding: Holding) -> str:
    kind, facts = holding_text(holding)
    return f"{holding.name}: {kind} ({facts})" if facts else f"{holding.name}: {kind}"


def text(placement: Placement | None) -> str:
    """Return a table of the ranks per host as text."""
    if placement is None:
        return f"placement: {NOTHING_YET}"
    lines = [f"{summary(placement)}, {format_time(placement.at)}"]
    if placement.protection:
        lines.append(placement.protection)
    for host, ranks in by_host(placement.ranks):
        lines += ["", host, table(HEADINGS, [_row(rank) for rank in ranks])["text/plain"]]
    for norms in placement.gradients:
        lines += ["", norms_text(norms), _norms_table(norms)["text/plain"]]
    return "\n".join(lines)


def html(placement: Placement | None, history: History | None = None, norms: Norms | None = None) -> str:
    """Return a table of the ranks with their memory bars, and their course if there is a history, as HTML.

    Then the gradient norms of the models, by module.
    """
    if placement is None:
        return f"<p>placement: {NOTHING_YET}</p>"
    rows = []
    scales = bar_scales(placement.ranks) if len(placement.ranks) <= MAX_BARS else {}
    for host, ranks in by_host(placement.ranks):
        # One row with the host above the rows of its ranks.
        rows.append(f'<tr><th scope="rowgroup" colspan="{len(HEADINGS)}" style="{CELL}">{escape(host)}</th></tr>')
        rows += [_html_row(rank, scales.get(rank.rank), (history or {}).get(rank.rank, ())) for rank in ranks]
    head = "".join(f'<th scope="col" style="text-align:left">{heading}</th>' for heading in HEADINGS)
    protection = f"<p>{escape(placement.protection)}</p>" if placement.protection else ""
    return (
        f"<p>{escape(summary(placement))}, {format_time(placement.at)}</p>{protection}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{_legend(placement)}"
        f"{''.join(_html_norms(model, (norms or {}).get(model.model, ())) for model in placement.gradients)}"
    )


def _html_norms(norms: GradientNorms, samples: Sequence[tuple[int | None, float]]) -> str:
    course = _html_course([norm for _, norm in samples if math.isfinite(norm)])
    title = f"{escape(norms_text(norms))} {course}".rstrip()
    return f"<details open><summary>{title}</summary>{_norms_table(norms)['text/html']}</details>"


def _html_row(rank: RankPlacement, scale: int | None, samples: Sequence[Sample]) -> str:
    cells = [escape(cell) for cell in _row(rank)]
    if rank.memory is not None and scale is not None:
        bars = [bar(memory_parts(rank.memory), scale, width="8em")]
        if is_on_cpu(rank):
            bars.append(bar(machine_parts(rank.memory), rank.memory.total, width="8em", height="0.2em"))
        bars.append(_html_course([sample.used for sample in samples], scale))
        cells[3] = "".join(f'<div style="line-height:1">{markup}</div>' for markup in bars if markup) + cells[3]
    if any(sample.rate for sample in samples):
        cells[7] = f"{_html_course([sample.rate for sample in samples])}<br>{cells[7]}"
    # Inline, because a saved notebook has no style sheet of this view.
    style = ' style="font-weight:bold"' if rank.lags else ""
    # Descriptions may wrap; numbers with their units and bars may not.
    wraps = {HEADINGS.index(name) for name in ("state", "memory use", "objects")}
    columns = (f'<td style="{WRAPPING if column in wraps else CELL}">{cell}</td>' for column, cell in enumerate(cells))
    return f"<tr{style}>{''.join(columns)}</tr>"


def _html_course(values: Sequence[float], most: float = 0.0) -> str:
    """Return the course as a few blocks; empty with fewer than two values."""
    # Every block is the largest value of its part of the time, so that a peak is not lost.
    size = -(-len(values) // MAX_BLOCKS)
    blocks = [max(values[start : start + size]) for start in range(0, len(values), size or 1)]
    style = "font-size:0.6em;opacity:0.6"
    return f'<span aria-hidden="true" style="{style}">{sparkline(blocks, most=most)}</span>' if len(values) > 1 else ""


def _legend(placement: Placement) -> str:
    parts = "".join(
        f'<span style="color:{colour}" aria-hidden="true">&#9632;</span> {name} &nbsp;'
        for name, colour in MEMORY_COLOURS.items()
    )
    scale = f" {CPU_SCALE}" if any(map(is_on_cpu, placement.ranks)) else ""
    return f"<p>{parts}{scale}</p>"


def svg(placement: Placement | None, history: History | None = None, norms: Norms | None = None) -> str:
    """Return the ranks with their memory bars, and their course if there is a history, as an SVG document.

    Then a line of every model's gradient norm.
    """
    # In pixels, also the numbers below: 12 is the left margin.
    width, row = 960, 26
    if placement is None:
        return svg_document(width, 40, "placement", [text_element(12, 25, NOTHING_YET)])
    shapes = [text_element(12, 24, f"{summary(placement)}, {format_time(placement.at)}", size=14)]
    y = 40.0
    scales = bar_scales(placement.ranks)
    for host, ranks in by_host(placement.ranks):
        shapes.append(text_element(12, y + 14, host, fill=FAINT))
        y += 22
        for rank in ranks:
            shapes += _svg_row(rank, y, scales.get(rank.rank, 0), (history or {}).get(rank.rank, ()))
            y += row
    x = 12.0
    for name, colour in MEMORY_COLOURS.items():
        shapes += [rect(x, y + 10, 12, 12, colour), text_element(x + 17, y + 20, name)]
        x += 120
    if any(map(is_on_cpu, placement.ranks)):
        y += 20
        shapes.append(text_element(12, y + 20, CPU_SCALE, fill=FAINT))
    for model in placement.gradients:
        y += row
        shapes.append(text_element(12, y + 20, norms_text(model)))
        course = [norm for _, norm in (norms or {}).get(model.model, ()) if math.isfinite(norm)]
        if len(course) > 1:
            shapes.append(polyline(course, 806, y + 5, 142, 18, title=f"gradient norm of {model.model}"))
    return svg_document(width, y + 34, f"placement: {summary(placement)}", shapes)


def _svg_row(rank: RankPlacement, y: float, bar_scale: int, samples: Sequence[Sample]) -> list[str]:
    shapes = [
        text_element(36, y + 16, str(rank.rank), anchor="end"),
        text_element(
            48, y + 16, f"{STATE_MARKS.get(rank.state, '')} {'▲ lags, ' if rank.lags else ''}{state_text(rank)}"
        ),
        text_element(370, y + 16, rank.device, fill=FAINT),
    ]
    if rank.lags:
        shapes.insert(0, rect(4, y + 1, 4, 22, VERMILLION))
    if rank.memory is not None and rank.memory.total:
        # 180 pixels stand for `bar_scale` bytes, and the thin bar's 180 pixels for the machine's memory.
        x, scale, height = 430.0, 180 / (bar_scale or 1), 12 if is_on_cpu(rank) else 16
        shapes.append(rect(x, y + 4, 180, height, "none", extra=f" stroke='{LINE}'"))
        for name, amount, colour in memory_parts(rank.memory):
            shapes.append(rect(x, y + 4, amount * scale, height, colour, title=f"{name} {format_bytes(amount)}"))
            x += amount * scale
        if is_on_cpu(rank):
            ((title, amount, colour),) = machine_parts(rank.memory)
            shapes.append(rect(430, y + 18, 180, 3, "none", extra=f" stroke='{LINE}'"))
            shapes.append(rect(430, y + 18, 180 * amount / rank.memory.total, 3, colour, title=title))
        shapes.append(
            text_element(680, y + 16, f"{format_bytes(used_bytes(rank.memory))} of {format_bytes(rank.memory.total)}")
        )
    if len(samples) > 1:
        shapes.append(polyline([sample.used for sample in samples], 618, y + 5, 52, 15, title="memory"))
        if any(sample.rate for sample in samples):
            shapes.append(polyline([sample.rate for sample in samples], 806, y + 5, 52, 15, title="steps per second"))
    if rank.rate is not None:
        shapes.append(text_element(948, y + 16, f"{format_3g(rank.rate)} steps/s", anchor="end"))
    return shapes
