"""Profile and time a cell on all ranks: `%%distributed --profile` and `--time`.

`Measuring` requests the measurement and shows its result. The profiles of the ranks are merged into one table
(`profile_table`) and one Chrome trace (`Trace`); a file that is not a trace of Rankbook's is never overwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.running_cell import RunningCell, Sink
from rankbook.errors import InvalidArgument
from rankbook.output.cell_result import CellResult
from rankbook.output.merger import Emit, RichOutput, Stream
from rankbook.protocol.telemetry import CollectiveSpan, Measure, Measured, OpTime, Times
from rankbook.ranks import name_ranks
from rankbook.widgets.live_view import start_thread
from rankbook.widgets.rendering import table

_MARK = b'{"rankbook": '
"""First bytes of a trace file written by Rankbook."""
_MAX_ROWS = 20
_MAX_COLUMNS = 8
"""Ranks that have a column of their own; for more ranks the columns are least, mean and most."""
_MAX_NAME_LENGTH = 60

Ops = Mapping[int, Sequence[OpTime]]


# Table --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergedOp:
    """One op on all ranks: its calls and seconds by rank."""

    name: str
    where: str
    calls: Mapping[int, int]
    seconds: Mapping[int, float]

    @property
    def total(self) -> float:
        """Return the seconds of all ranks together."""
        return sum(self.seconds.values())

    @property
    def imbalance(self) -> float:
        """Return the longest time of a rank divided by the mean of all ranks: 1 if all took equally long."""
        mean = self.total / len(self.seconds)
        # Ranks with 1, 1, 1 and 5 ms have a mean of 2 ms, and an imbalance of 2.5.
        return max(self.seconds.values()) / mean if mean > 0 else 1.0


def merge_ops(ops: Ops) -> list[MergedOp]:
    """Merge the ranks' ops, the largest total first.

    A rank without an op has 0 calls of it. Kernels of all devices of one type are merged.
    """
    # "cuda:0" and "cuda:1" are one type: every rank uses another device for the same work.
    kinds = dict.fromkeys((op.name, _kind(op.where)) for rank_ops in ops.values() for op in rank_ops)
    calls = {kind: dict.fromkeys(ops, 0) for kind in kinds}
    times = {kind: dict.fromkeys(ops, 0.0) for kind in kinds}
    for rank, rank_ops in ops.items():
        for op in rank_ops:
            calls[op.name, _kind(op.where)][rank] += op.calls
            times[op.name, _kind(op.where)][rank] += op.seconds
    merged = [MergedOp(name, where, calls[name, where], times[name, where]) for name, where in kinds]
    return sorted(merged, key=lambda op: op.total, reverse=True)


def _kind(where: str) -> str:
    return where.partition(":")[0]


def profile_table(ops: Ops) -> tuple[dict[str, str], str]:
    """Return the table as a mime bundle, and the explanation to show below it."""
    merged = merge_ops(ops)
    visible = merged[:_MAX_ROWS]
    ranks = sorted(ops)
    on_devices = any(op.where != "cpu" for op in merged)
    wide = len(ranks) > _MAX_COLUMNS
    times = ("least", "mean", "most") if wide else tuple(f"rank {rank}" for rank in ranks)
    rows = [
        (
            op.name if len(op.name) <= _MAX_NAME_LENGTH else op.name[: _MAX_NAME_LENGTH - 1] + "…",
            op.where if on_devices else "",
            _span(op.calls),
            *_times(op, ranks, wide=wide),
            _imbalance(op) if len(ranks) > 1 else "",
        )
        for op in visible
    ]
    note = "times exclude the ops that an op calls; imbalance is the longest time divided by the mean"
    if len(merged) > len(visible):
        note = f"{len(visible)} of {len(merged)} ops, largest total first; {note}"
    return table(("op", "device", "calls", *times, "imbalance"), rows), note


def _times(op: MergedOp, ranks: Sequence[int], *, wide: bool) -> tuple[str, ...]:
    times = [op.seconds[rank] for rank in ranks]
    return tuple(map(_milliseconds, (min(times), op.total / len(times), max(times)) if wide else times))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds else "–"


def _span(calls: Mapping[int, int]) -> str:
    least, most = min(calls.values()), max(calls.values())
    return str(most) if least == most else f"{least}–{most}"


def _imbalance(op: MergedOp) -> str:
    longest = max(op.seconds, key=lambda rank: op.seconds[rank])
    return f"{op.imbalance:.2f}× (rank {longest})" if op.imbalance >= 1.1 else f"{op.imbalance:.2f}×"


# Chrome trace -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """One Chrome trace.

    `events[rank]` has JSON objects separated by commas; `epoch` is their time 0, in nanoseconds of the Unix epoch.
    """

    title: str
    epoch: int
    events: Mapping[int, bytes]

    def encode(self) -> bytes:
        """Return the contents of the file."""
        # A Chrome trace is one JSON object. The events are JSON already, so the object is joined from bytes; encoding
        # it as a whole would parse all events again. Viewers ignore Rankbook's own key.
        title, ranks = json.dumps(f"profile of {self.title}"), sorted(self.events)
        head = b"%s%s" % (_MARK, title.encode())
        head += b', "displayTimeUnit": "ms", "baseTimeNanoseconds": %d, "traceEvents": [\n' % self.epoch
        return head + b",\n".join(self.events[rank] for rank in ranks if self.events[rank]) + b"\n]}\n"

    def write(self, file: Path) -> None:
        """Write the file atomically. Raises OSError, also if another program's file has appeared there."""
        if not may_write(file):
            raise FileExistsError(f"{file} exists and is not a trace of Rankbook")
        # A temporary name in the same folder, since a rename is atomic only within a file system.
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(self.encode())
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


def may_write(file: Path) -> bool:
    """Return True if `file` does not exist or is an earlier trace of Rankbook's."""
    if not file.exists():
        # `exists` follows links. A link whose target is missing is not replaced either.
        return not file.is_symlink()
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(_MARK)) == _MARK


def check_file(file: Path) -> Path:
    """Return `file` if a trace can be written there, before the cell runs. Raises `InvalidArgument` otherwise."""
    if not file.parent.is_dir():
        raise InvalidArgument(f"%%distributed --profile: folder {file.parent} does not exist")
    try:
        free = may_write(file)
    except OSError as error:
        raise InvalidArgument(f"%%distributed --profile: cannot write {file}: {error}") from error
    if not free:
        raise InvalidArgument(
            f"%%distributed --profile: {file} exists and is not a trace of Rankbook; "
            "choose another file with --profile=FILE.json"
        )
    # The folder's permission counts, because the file is replaced by a rename.
    if not os.access(file.parent, os.W_OK):
        raise InvalidArgument(
            f"%%distributed --profile: folder {file.parent} is not writable; "
            "choose another file with --profile=FILE.json"
        )
    return file


ResultCallback = Callable[[CellResult], None]

_LATE_THRESHOLD = 0.05
"""Waiting time, as a fraction of the longest wall time, from which on late ranks are reported."""


# Measurement --------------------------------------------------------------------------------------------------------


class Measuring:
    """The measurement of cell `number`. Raises `InvalidArgument` if the trace file may not be written."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self._time: bool = options.time
        self._file: Path | None = None
        if options.profile is not None:
            self._file = check_file(Path(options.profile or f"rankbook-profile-{number}.json").expanduser().absolute())
        # One zero of time for all ranks, so that their traces have a common axis.
        self.measure = Measure(profile=self._file is not None, epoch=time.time_ns())

    def prepare(self, cluster: Cluster, ranks: Sequence[int]) -> RunningCell | None:
        """Run the profiler once before the cell, because its first start takes seconds.

        The cell starts when this has ended on all ranks, so that differences in the start-up time do not appear as
        waiting.
        """
        if self._file is None:
            return None
        return cluster.submit_code("", number=0, ranks=ranks, sink=None, measure=self.measure)

    def show_after(
        self, on_result: ResultCallback, cluster: Cluster, cell: RunningCell, sink: Sink, *, background: bool
    ) -> ResultCallback:
        """Return a callback that calls `on_result` and shows the measurement; for background cells in a thread."""

        def show() -> None:
            sink.emit(self.describe(cluster.take_values(cell), cell))

        def store_and_show(result: CellResult) -> None:
            on_result(result)
            # A background cell ends on the driver thread, which must neither unpack traces nor write files.
            if background:
                start_thread(threading.Thread(target=show, name="rankbook-measurement"))
            else:
                show()

        return store_and_show

    def describe(self, replies: Mapping[int, Measured], cell: RunningCell) -> list[Emit]:
        """Return the output items for the ranks' measurements."""
        items: list[Emit] = []
        if self._time and replies:
            items.append(
                RichOutput(dict(times_table({rank: measured.times for rank, measured in replies.items()})), {})
            )
        if self._file is not None:
            items += self._describe_profile(replies, cell, self._file)
        for trouble in sorted({measured.trouble for measured in replies.values()} - {""}):
            ranks = [rank for rank, measured in replies.items() if measured.trouble == trouble]
            items.append(Stream("stderr", f"{name_ranks(ranks)}: {trouble}\n"))
        if silent := [rank for rank in cell.ranks if rank not in replies]:
            items.append(Stream("stderr", f"{name_ranks(silent)} reported no measurements\n"))
        return items

    def _describe_profile(self, replies: Mapping[int, Measured], cell: RunningCell, file: Path) -> list[Emit]:
        profiles = {rank: measured.profile for rank, measured in replies.items() if measured.profile is not None}
        if not profiles:
            return []
        if not any(profile.ops for profile in profiles.values()):
            return [Stream("stdout", "no torch op ran, so no profile and no trace were made\n")]
        bundle, note = profile_table({rank: profile.ops for rank, profile in profiles.items()})
        try:
            Trace(cell.label, self.measure.epoch, {rank: trace.events for rank, trace in profiles.items()}).write(file)
        except OSError as error:
            return [RichOutput(dict(bundle), {}), Stream("stderr", f"cannot write the trace: {error}\n")]
        relative_path = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        message = f"{note}\ntrace of all ranks, for https://ui.perfetto.dev: {relative_path}\n"
        return [RichOutput(dict(bundle), {}), Stream("stdout", message)]


# Late ranks ---------------------------------------------------------------------------------------------------------


def times_table(times: Mapping[int, Times]) -> dict[str, str]:
    """Return a table with one row per rank as a mime bundle."""
    late = late_ranks(times)
    on_device = any(rank_times.device is not None for rank_times in times.values())
    rows = [
        (
            str(rank),
            seconds(rank_times.wall),
            *([] if not on_device else ["" if rank_times.device is None else seconds(rank_times.device)]),
            seconds(rank_times.cpu),
            seconds(rank_times.main_cpu),
            seconds(rank_times.waited),
            str(rank_times.collectives),
            "the others waited for it" if rank in late else "",
        )
        for rank, rank_times in sorted(times.items())
    ]
    device = ["device done"] if on_device else []
    return table(("rank", "wall", *device, "CPU", "CPU, main thread", "waited", "collectives", "note"), rows)


def late_ranks(times: Mapping[int, Times]) -> set[int]:
    """Return the ranks that others waited for.

    A rank that was always late waited much less than the others. Ranks that were late in turn waited equally long; the
    times of the collectives tell for which of them others waited. Less than `_LATE_THRESHOLD` does not count.
    """
    waited = {rank: rank_times.waited for rank, rank_times in times.items()}
    if len(waited) < 2:
        return set()
    # In a cell of 10 s, waits of less than 0.5 s are ignored.
    threshold = _LATE_THRESHOLD * max(rank_times.wall for rank_times in times.values())
    late = {rank for rank, amount in caused_waits(times).items() if amount >= threshold}
    least, most = min(waited.values()), max(waited.values())
    if most - least < threshold:
        return late
    # Waits of 0.1, 4.0, 4.1 and 4.2 s give a limit of 0.1 + 0.25 * 4.1 = 1.1 s, so the first rank was late.
    # For a rank without collectives nobody can have waited.
    took_part = {rank for rank, rank_times in times.items() if rank_times.collectives}
    return late | {rank for rank in took_part if waited[rank] < least + 0.25 * (most - least)}


def caused_waits(times: Mapping[int, Times]) -> dict[int, float]:
    """Return for how many seconds at least one other rank waited for a rank to launch its collectives, by rank.

    A wait that overlaps with computation is not part of `Times.waited`, which limits the result.
    """
    # The spans of one collective on all ranks: a collective is identified by its group and its number in the group.
    collectives: dict[tuple[str, int], dict[int, CollectiveSpan]] = {}
    for rank, rank_times in times.items():
        for span in rank_times.spans:
            collectives.setdefault((span.group, span.number), {})[rank] = span
    caused = dict.fromkeys(times, 0.0)
    # Rank 0 waits from 1.0 to 3.0 and rank 1 from 2.0 to 3.0; rank 2 launches at 3.0 and does not wait. Rank 2 has
    # caused 3.0 - 1.0 = 2.0 s, and rank 1, launched at 2.0, 1.0 s. Rank 0 has caused none.
    for spans in collectives.values():
        # Ranks that waited, the first one first. A rank has caused waiting from the moment when the first other rank
        # began to wait until it launched the collective itself, at most until that wait ended.
        waits = sorted((span.waits, span.ends, rank) for rank, span in spans.items() if span.waits)
        for rank, span in spans.items():
            first = next((wait for wait in waits if wait[2] != rank), None)
            if first is not None:
                start, end, _ = first
                caused[rank] += max(0.0, min(span.launched, end) - start)
    total = sum(rank_times.waited for rank_times in times.values())
    return {rank: min(amount, total - times[rank].waited) for rank, amount in caused.items()}


def seconds(amount: float) -> str:
    """Format a short time: "1.24 s", "12.5 ms", "80 µs"."""
    if amount >= 1:
        return f"{amount:.2f} s"
    return f"{amount * 1e3:.1f} ms" if amount >= 1e-3 else f"{amount * 1e6:.0f} µs"
