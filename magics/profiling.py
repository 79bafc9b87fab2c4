"""The profile of all ranks: one table, one Chrome trace.

Owns: what is merged, and the file. Refuses: to overwrite a file that is no trace of ours.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankbook.errors import BadRequest
from rankbook.protocol.profiling import OpTime
from rankbook.widgets.render.table import table

_MARK = b'{"rankbook": '
"""How a file of ours begins."""
_MOST_ROWS = 20
_MOST_COLUMNS = 8
"""Ranks that have a column each; of more there are the least, the mean and the most."""
_LONGEST_NAME = 60

Ops = Mapping[int, Sequence[OpTime]]


@dataclass(frozen=True)
class MergedOp:
    """One op on all ranks: its calls and seconds there, by rank."""

    name: str
    where: str
    calls: Mapping[int, int]
    seconds: Mapping[int, float]

    @property
    def total(self) -> float:
        """Seconds of all ranks together."""
        return sum(self.seconds.values())

    @property
    def imbalance(self) -> float:
        """The longest time of a rank over the mean of all: 1 where all took as long."""
        mean = self.total / len(self.seconds)
        return max(self.seconds.values()) / mean if mean > 0 else 1.0


def merge_ops(ops: Ops) -> list[MergedOp]:
    """One for each op, the largest total first; a rank without it has 0 calls. Kernels of all devices count as one."""
    kinds = dict.fromkeys((each.name, _kind(each.where)) for told in ops.values() for each in told)
    calls = {kind: dict.fromkeys(ops, 0) for kind in kinds}
    times = {kind: dict.fromkeys(ops, 0.0) for kind in kinds}
    for rank, told in ops.items():
        for each in told:
            calls[each.name, _kind(each.where)][rank] += each.calls
            times[each.name, _kind(each.where)][rank] += each.seconds
    merged = [MergedOp(name, where, calls[name, where], times[name, where]) for name, where in kinds]
    return sorted(merged, key=lambda each: each.total, reverse=True)


def _kind(where: str) -> str:
    return where.partition(":")[0]


def profile_table(ops: Ops) -> tuple[dict[str, str], str]:
    """The table as a mime bundle, and the words that belong below it."""
    merged = merge_ops(ops)
    shown = merged[:_MOST_ROWS]
    ranks = sorted(ops)
    on_devices = any(each.where != "cpu" for each in merged)
    wide = len(ranks) > _MOST_COLUMNS
    times = ("least", "mean", "most") if wide else tuple(f"rank {rank}" for rank in ranks)
    rows = [
        (
            each.name if len(each.name) <= _LONGEST_NAME else each.name[: _LONGEST_NAME - 1] + "…",
            each.where if on_devices else "",
            _span(each.calls),
            *_times(each, ranks, wide=wide),
            _imbalance(each) if len(ranks) > 1 else "",
        )
        for each in shown
    ]
    words = "times are without what an op called in turn; imbalance is the longest time over the mean"
    if len(merged) > len(shown):
        words = f"{len(shown)} of {len(merged)} ops, largest total first; {words}"
    return table(("op", "on", "calls", *times, "imbalance"), rows), words


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


@dataclass(frozen=True)
class Trace:
    """One Chrome trace. `events[rank]` are JSON objects with commas between them; `epoch` their zero, unix ns."""

    title: str
    epoch: int
    events: Mapping[int, bytes]

    def encode(self) -> bytes:
        """The file's content."""
        title, ranks = json.dumps(f"profile of {self.title}"), sorted(self.events)
        head = b"%s%s" % (_MARK, title.encode())
        head += b', "displayTimeUnit": "ms", "baseTimeNanoseconds": %d, "traceEvents": [\n' % self.epoch
        return head + b",\n".join(self.events[rank] for rank in ranks if self.events[rank]) + b"\n]}\n"

    def write(self, file: Path) -> None:
        """Put it there in one piece. Raises OSError, also where somebody else's file has come to lie there."""
        if not may_write(file):
            raise FileExistsError(f"{file} is no trace of Rankbook's")
        beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            beside.write_bytes(self.encode())
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)


def may_write(file: Path) -> bool:
    """Whether nothing lies there but an earlier trace of ours."""
    if not file.exists():
        return not file.is_symlink()
    if not file.is_file():
        return False
    with file.open("rb") as there:
        return there.read(len(_MARK)) == _MARK


def check_file(file: Path) -> Path:
    """`file`, before anything runs. Raises `BadRequest` where a trace cannot be put."""
    if not file.parent.is_dir():
        raise BadRequest(f"%%distributed --profile: there is no folder {file.parent}")
    try:
        free = may_write(file)
    except OSError as error:
        raise BadRequest(f"%%distributed --profile: {file} cannot be written: {error}") from error
    if not free:
        raise BadRequest(
            f"%%distributed --profile: {file} is there and no trace of Rankbook's; --profile=FILE.json names another"
        )
    if not os.access(file.parent, os.W_OK):
        raise BadRequest(f"%%distributed --profile: {file.parent} cannot be written; --profile=FILE.json names another")
    return file
