"""Summarize samples in a table with ratios, and compare them with the limits. Starts no process."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from measures import Sample

Samples = Mapping[str, Mapping[str, list[Sample]]]
"""Samples of every round, by metric and tool."""

BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"


@dataclass(frozen=True, slots=True)
class Row:
    """Description of a metric. `limits` apply to the median and, with `tail`, to the 95th percentile."""

    metric: str
    title: str
    unit: str
    digits: int
    limits: tuple[float, ...] = ()
    tail: bool = False


ROWS = (
    Row("cell-2", "`x = 1` on 2 ranks, added to a plain cell: median / p95", "ms", 1, (1.5, 4.0), tail=True),
    Row("cell-4", "the same on 4 ranks", "ms", 1, tail=True),
    Row("plain-2", "the plain `x = 1` beside it: median / p95", "ms", 1, tail=True),
    Row("warm-2", "start to first result of torch, tool loaded: 2 ranks", "s", 2, (0.5,)),
    Row("warm-4", "4 ranks", "s", 2),
    Row("warm-8", "8 ranks", "s", 2, (1.2,)),
    Row("cold-2", "the same from a fresh kernel: 2 ranks", "s", 2),
    Row("cold-4", "4 ranks", "s", 2),
    Row("cold-8", "8 ranks", "s", 2),
    Row("import", 'one `python -c "import torch, IPython"` beside it', "s", 2),
    Row("lines-differ", "100,000 lines on each of 2 ranks: until all have arrived", "s", 2, (1.0,)),
    Row("bytes-differ", "bytes sent / bytes printed", "×", 2, (1.5,)),
    Row("lines-equal", "the same, both ranks printing the same lines", "s", 2, (1.0,)),
    Row("bytes-equal", "bytes sent / bytes printed", "×", 2, (1.5,)),
    Row("lines-short", "the same, `print(rank, i)`", "s", 2, (1.0,)),
    Row("bytes-short", "bytes sent / bytes printed", "×", 2, (1.5,)),
    Row("memory", "memory per additional idle rank (PSS, torch imported)", "MB", 0, (60.0,)),
    Row("push", "200 MB tensor to both ranks", "s", 2),
    Row("push-memory", "kernel's peak memory over before", "MB", 0),
    Row("pull", "200 MB tensor from rank 0", "s", 2),
    Row("pull-memory", "kernel's peak memory over before", "MB", 0),
    Row("interrupt", "■ in a sleep on 2 ranks: control back", "s", 2, (0.3,)),
    Row("death", "a rank is killed: control back", "s", 2, (1.0,)),
)


def table(samples: Samples, versions: Mapping[str, str]) -> str:
    """Return a Markdown table: a row per metric, a column per tool, the ratio to the first tool in brackets."""
    tools = list(versions)
    lines = [
        "| | " + " | ".join(f"{tool} {versions[tool]}" for tool in tools) + " |",
        "|---" * (len(tools) + 1) + "|",
    ]
    for row in ROWS:
        of = samples.get(row.metric, {})
        if of:
            texts = [_text(row, of.get(tool, []), of.get(tools[0], []) if tool != tools[0] else []) for tool in tools]
            lines.append(f"| {row.title} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _text(row: Row, tool_samples: list[Sample], reference_samples: list[Sample]) -> str:
    values, base = _summary(row, tool_samples), _summary(row, reference_samples)
    notes = _notes(tool_samples)
    if not values:
        return notes or "not measured"
    text = " / ".join(f"{value:.{row.digits}f}" for value in values)
    text += row.unit if row.unit == "×" else f" {row.unit}"
    too_small_to_tell = base and base[0] < 2 * 10**-row.digits
    if base and row.unit != "×" and not too_small_to_tell:
        ratio = values[0] / base[0]
        text += f" ({ratio:.{1 if ratio < 10 else 0}f}×)"
    return f"{text}; {notes}" if notes else text


def _summary(row: Row, samples: Iterable[Sample]) -> tuple[float, ...]:
    values = sorted(sample.value for sample in samples if sample.value is not None)
    if not values:
        return ()
    median = statistics.median(values)
    return (median, values[min(len(values) - 1, round(0.95 * len(values)))]) if row.tail else (median,)


def _notes(samples: Iterable[Sample]) -> str:
    notes = [sample.note for sample in samples]
    return "; ".join(
        f"{note} ({notes.count(note)} of {len(notes)})" if notes.count(note) < len(notes) else note
        for note in dict.fromkeys(filter(None, notes))
    )


def verdicts(samples: Samples, tool: str) -> list[tuple[bool, str]]:
    """The limits that the issue sets for `tool`, each with the measured value."""
    results = []
    medians = {}
    for row in ROWS:
        tool_samples = samples.get(row.metric, {}).get(tool, [])
        values = _summary(row, tool_samples)
        medians[row.metric] = values[0] if values else None
        for value, limit, word in zip(values, row.limits, ("median", "p95"), strict=False):
            results.append((value <= limit, f"{row.metric} {word}: {value:.3g} {row.unit} <= {limit:g} {row.unit}"))
        if row.limits and tool_samples and (notes := _notes(tool_samples)):
            results.append((False, f"{row.metric}: {notes}"))
    imported = medians["import"]
    for metric, warm in (("cold-2", 0.5), ("cold-8", 1.2)):
        cold = medians.get(metric)
        if cold is not None and imported is not None:
            limit = 1.5 * imported + warm
            arithmetic = f"1.5 * import({imported:.2f}) + {warm} = {limit:.2f} s"
            results.append((cold <= limit, f"{metric}: {cold:.2f} s <= {arithmetic}"))
    return results


def write_table(page: Path, text: str) -> None:
    """Put the table between the markers of the page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the table: {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
