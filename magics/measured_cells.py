"""`%%distributed --time` and `--profile`: what is asked of the ranks, and what is shown in the end.

Owns: the table of times, and when something is shown. Refuses: to measure; the ranks do.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.running_cell import Cell, Sink
from rankbook.magics.profiling import Trace, check_file, profile_table
from rankbook.output.cell_result import CellResult
from rankbook.output.merger import Emit, Rich, Stream
from rankbook.protocol.profiling import Measure, Measured, Times
from rankbook.ranks import name_ranks
from rankbook.widgets.daemon_threads import start_thread
from rankbook.widgets.render.table import table

Keep = Callable[[CellResult], None]

_TELLING = 0.05
"""The part of the longest wall time that ranks must have waited for others before it is said."""


class Measuring:
    """What the options of cell `number` ask for. Raises `BadRequest` where the trace may not be written."""

    def __init__(self, chosen: argparse.Namespace, number: int) -> None:
        self._time: bool = chosen.time
        self._file: Path | None = None
        if chosen.profile is not None:
            self._file = check_file(Path(chosen.profile or f"rankbook-profile-{number}.json").expanduser().absolute())
        self.measure = Measure(profile=self._file is not None, epoch=time.time_ns())

    def prepare(self, cluster: Cluster, ranks: Sequence[int]) -> Cell | None:
        """Have the profiler run once, before the cell: its first start takes seconds, and not on all ranks as many.

        The cell begins only when that has ended on all, so that nobody seems to wait for who had more to load.
        """
        if self._file is None:
            return None
        return cluster.submit_code("", number=0, ranks=ranks, sink=None, measure=self.measure)

    def show_after(self, keep: Keep, cluster: Cluster, cell: Cell, sink: Sink, *, background: bool) -> Keep:
        """`keep`, and then what was measured. In the background it is shown from a thread of its own."""

        def show() -> None:
            sink.emit(self.describe(cluster.take_values(cell), cell))

        def keep_and_show(result: CellResult) -> None:
            keep(result)
            if background:
                start_thread(threading.Thread(target=show, name="rankbook-measured"))
            else:
                show()

        return keep_and_show

    def describe(self, told: Mapping[int, Measured], cell: Cell) -> list[Emit]:
        """What to show of what the ranks told."""
        items: list[Emit] = []
        if self._time and told:
            items.append(Rich(dict(times_table({rank: each.times for rank, each in told.items()})), {}))
        if self._file is not None:
            items += self._describe_profile(told, cell, self._file)
        for trouble in sorted({each.trouble for each in told.values()} - {""}):
            ranks = [rank for rank, each in told.items() if each.trouble == trouble]
            items.append(Stream("stderr", f"{name_ranks(ranks)}: {trouble}\n"))
        if silent := [rank for rank in cell.ranks if rank not in told]:
            items.append(Stream("stderr", f"{name_ranks(silent)} told nothing of what was measured\n"))
        return items

    def _describe_profile(self, told: Mapping[int, Measured], cell: Cell, file: Path) -> list[Emit]:
        profiles = {rank: each.profile for rank, each in told.items() if each.profile is not None}
        if not profiles:
            return []
        if not any(each.ops for each in profiles.values()):
            return [Stream("stdout", "nothing of torch ran, so there is no profile and no trace\n")]
        bundle, words = profile_table({rank: each.ops for rank, each in profiles.items()})
        try:
            Trace(cell.label, self.measure.epoch, {rank: each.events for rank, each in profiles.items()}).write(file)
        except OSError as error:
            return [Rich(dict(bundle), {}), Stream("stderr", f"the trace could not be written: {error}\n")]
        where = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        told_where = f"{words}\ntrace of all ranks, for https://ui.perfetto.dev: {where}\n"
        return [Rich(dict(bundle), {}), Stream("stdout", told_where)]


def times_table(times: Mapping[int, Times]) -> dict[str, str]:
    """One row per rank, as a mime bundle."""
    late = latecomers(times)
    rows = [
        (
            str(rank),
            seconds(each.wall),
            seconds(each.cpu),
            seconds(each.main_cpu),
            seconds(each.waited),
            str(each.collectives),
            "the others waited for it" if rank in late else "",
        )
        for rank, each in sorted(times.items())
    ]
    return table(("rank", "wall", "CPU", "CPU, main thread", "waited", "collectives", "note"), rows)


def latecomers(times: Mapping[int, Times]) -> set[int]:
    """The ranks that the others waited for: they waited much less, and what the others lost so is worth a word."""
    waited = {rank: each.waited for rank, each in times.items()}
    if len(waited) < 2:
        return set()
    least, most = min(waited.values()), max(waited.values())
    if most - least < _TELLING * max(each.wall for each in times.values()):
        return set()
    return {rank for rank, each in waited.items() if each < least + 0.25 * (most - least)}


def seconds(amount: float) -> str:
    """A short time in words: "1.24 s", "12.5 ms", "80 µs"."""
    if amount >= 1:
        return f"{amount:.2f} s"
    return f"{amount * 1e3:.1f} ms" if amount >= 1e-3 else f"{amount * 1e6:.0f} µs"
