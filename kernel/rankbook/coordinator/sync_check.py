"""Comparison of the ranks' state: which tensors and values differ, on which ranks, by how much.

`compare_hashes` takes what every rank has listed (`StateHashes`) and returns the findings, and the pieces of tensors
that are to be looked at more closely. `add_differences` adds what that has shown. Both are pure; `Cluster.sync_check`
asks the ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankbook.formatting import format_3g, format_bytes, format_count, format_duration, plural, truncate_list
from rankbook.protocol.queries import Piece, PieceDifference, StateEntry, StateHashes
from rankbook.ranks import format_ranks, group_ranks, name_ranks
from rankbook.widgets.rendering import MAX_ROWS, TableResult

MAX_BLOCKS = 4096
"""Blocks that are compared in all, which are 4 GiB. If more differ, some of every tensor are compared."""
_LEAST_BLOCKS = 4
_MAX_RANKS = 32
"""Ranks in the picture."""


@dataclass(frozen=True)
class Finding:
    """One difference between ranks.

    `name` is the tensor or value, such as "model.fc.weight", and `kind` its kind: parameter, buffer, optimizer state,
    random state, and others. `ranks` differ from the ranks `reference`, which are the largest group of equal ones.
    `problem` is the difference in words. For tensors, `largest` is the largest absolute difference and `share` the
    share of the elements that differ, 0 to 1 (a lower bound if `sampled`); both are None if they were not measured.
    `since` says when the ranks were last known to be equal. `due` says when the layout makes them equal again: such a
    difference is no error. `place` names the shard, if the tensor is sharded; `elements` is the number of elements that
    `share` refers to. `is_value`: the values differ, rather than the layout.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    reference: tuple[int, ...]
    problem: str
    largest: float | None = None
    share: float | None = None
    sampled: bool = False
    since: str = ""
    due: str = ""
    place: str = ""
    elements: int = 0
    is_value: bool = False


@dataclass(frozen=True)
class LastEqual:
    """The last check in which a tensor was equal on all ranks: its time, and the optimizer steps taken until then."""

    at: float
    steps: int | None


class SyncReport(TableResult):
    """Result of `Cluster.sync_check`, which shows itself as a table.

    `findings` are the differences, and `expected` those that the layout removes by itself. `compared` is the number of
    tensors and values that were compared, and `nbytes` the bytes of a rank's tensors. `unanswered` maps ranks that did
    not answer to the reasons, `skipped` the objects that are not meant to be equal, and `unreadable` the tensors
    without values that can be read, such as sparse ones. `place` says at the end of which step the ranks were asked, if
    they ran a cell. `ok` is True if all ranks have answered and nothing differs.
    """

    HEADINGS = ("name", "kind", "ranks", "difference", "largest", "elements", "since")

    def __init__(
        self,
        ranks: tuple[int, ...],
        findings: Sequence[Finding],
        *,
        compared: int,
        nbytes: int,
        seconds: float = 0.0,
        unanswered: Mapping[int, str] | None = None,
        skipped: Mapping[str, str] | None = None,
        note: str = "",
        place: str = "",
        unreadable: Mapping[str, str] | None = None,
    ) -> None:
        self.ranks = ranks
        self.findings = tuple(finding for finding in findings if not finding.due)
        self.expected = tuple(finding for finding in findings if finding.due)
        self.compared = compared
        self.nbytes = nbytes
        self.seconds = seconds
        self.unanswered = dict(unanswered or {})
        self.skipped = dict(skipped or {})
        self.note = note
        self.place = place
        self.unreadable = dict(unreadable or {})

    @property
    def ok(self) -> bool:
        """Return True if all ranks have answered and nothing differs."""
        return not self.findings and not self.unanswered

    def summary(self) -> str:
        """Return the result in a sentence, then what was left out."""
        what = f"{plural(self.compared, 'entry', 'entries')} ({format_bytes(self.nbytes)} per rank)"
        took = f"in {format_duration(self.seconds)}"
        if self.place:
            took = f"{self.place}, {took}"
        if not self.ranks:
            lines = ["no rank has answered"]
        elif not self.compared and not self.findings and self.unreadable:
            lines = ["nothing to compare"]
        elif not self.compared and not self.findings:
            lines = [
                "nothing to compare: no model is wrapped by DDP, FSDP2 or DTensors; name variables to compare them"
            ]
        elif len(self.ranks) == 1:
            lines = [f"only {name_ranks(self.ranks)} was asked: nothing to compare"]
        elif self.findings:
            lines = [f"{plural(len(self.findings), 'difference')} in {what} on {name_ranks(self.ranks)}, {took}"]
        else:
            lines = [f"{what} equal on {name_ranks(self.ranks)}, {took}"]
        for due, count in Counter(finding.due for finding in self.expected).items():
            lines.append(f"{plural(count, 'entry', 'entries')} will be equal again: {due}")
        lines += [f"rank {rank} did not answer: {reason}" for rank, reason in self.unanswered.items()]
        if self.skipped:
            left_out = truncate_list([f"{name} ({reason})" for name, reason in self.skipped.items()], 5)
            lines.append(f"not compared: {', '.join(left_out)}; name it to compare it")
        if self.unreadable:
            listed = truncate_list([f"{name}: {reason}" for name, reason in self.unreadable.items()], 5)
            lines.append(f"cannot be compared: {'; '.join(listed)}")
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, one per difference."""
        return [_row(finding) for finding in self.findings]

    def bundle(self) -> dict[str, str]:
        """See `TableResult`. The HTML also has a grid of the differences and the ranks."""
        bundle = super().bundle()
        bundle["text/html"] += self._picture()
        return bundle

    def _picture(self) -> str:
        """Return which ranks differ in which tensor, as HTML; "" without differences and for many ranks."""
        from rankbook.widgets.rendering import SKY, VERMILLION, colour_grid  # only where a result is shown

        ranks = sorted({rank for finding in self.findings for rank in (*finding.ranks, *finding.reference)})
        if not self.findings or len(ranks) > _MAX_RANKS:
            return ""
        rows = []
        for finding in self.findings[:MAX_ROWS]:
            name = f"{finding.name} [{finding.place}]" if finding.place else finding.name
            cells = [
                ("differs", VERMILLION)
                if rank in finding.ranks
                else ("=", SKY)
                if rank in finding.reference
                else ("", "none")
                for rank in ranks
            ]
            rows.append((name, cells))
        caption = "ranks that differ, and the ranks that they were compared with (=)"
        return colour_grid("name", [f"rank {rank}" for rank in ranks], rows, caption)

    def __repr__(self) -> str:
        return f"<SyncReport: {self.summary().splitlines()[0]}>"


def _row(finding: Finding) -> tuple[str, ...]:
    share = "" if finding.share is None else _percent(finding.share)
    of = f" of {format_count(finding.elements)}" if share and finding.elements else ""
    largest = "" if finding.largest is None or math.isnan(finding.largest) else f"{finding.largest:.3g}"
    name = f"{finding.name} [{finding.place}]" if finding.place else finding.name
    at_least = "≥ " if finding.sampled and share else ""
    return (
        *(name, finding.kind, format_ranks(finding.ranks), finding.problem, f"{at_least if largest else ''}{largest}"),
        *(f"{at_least}{share}{of}", finding.since),
    )


def _percent(share: float) -> str:
    return "< 0.01 %" if 0 < share < 1e-4 else f"{format_3g(100 * share)} %"


# Comparison of hashes ----------------------------------------------------------------------------------------------


@dataclass
class HashComparison:
    """Findings so far, and the pieces that are to be compared; `tensors` maps a piece to its finding's number."""

    findings: list[Finding] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    sampled: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    equal: list[tuple[str, str]] = field(default_factory=list)
    compared: int = 0
    nbytes: int = 0


def compare_hashes(replies: Mapping[int, StateHashes]) -> HashComparison:
    """Compare the entries of all ranks.

    Entries of one key and one place have to be equal: a whole tensor on all ranks that have it, a shard on the ranks
    that hold replicas of it. The reference is the largest group of equal ranks, the one with the lowest rank among
    groups of equal size.
    """
    result = HashComparison()
    _compare_names(replies, result)
    _compare_steps(replies, result)
    entries: dict[str, dict[int, StateEntry]] = {}
    for rank, reply in replies.items():
        for entry in reply.entries:
            entries.setdefault(entry.key, {})[rank] = entry
    result.nbytes = max((sum(entry.nbytes for entry in reply.entries) for reply in replies.values()), default=0)
    result.compared = len(entries)
    _compare_presence(entries, replies, result)
    for by_rank in entries.values():
        _compare_layout(by_rank, result)
        groups: dict[tuple[str, tuple[int, ...]], dict[int, StateEntry]] = {}
        for rank, entry in by_rank.items():
            groups.setdefault((entry.place, entry.ranks), {})[rank] = entry
        for replicas in groups.values():
            _compare_replicas(replicas, result)
    _limit_blocks(result)
    return result


def _compare_names(replies: Mapping[int, StateHashes], result: HashComparison) -> None:
    for name in dict.fromkeys(name for reply in replies.values() for name in reply.missing):
        without = {rank: reply.missing[name] for rank, reply in replies.items() if name in reply.missing}
        having = tuple(rank for rank in replies if rank not in without)
        result.findings.append(Finding(name, "variable", tuple(without), having, next(iter(without.values()))))


def _compare_steps(replies: Mapping[int, StateHashes], result: HashComparison) -> None:
    groups = group_ranks((rank, reply.steps) for rank, reply in replies.items() if reply.steps is not None)
    if len(groups) > 1:
        reference, others = _split(groups)
        result.findings.append(Finding("optimizer steps", "progress", others, reference, _list_values(groups)))


def _compare_presence(
    entries: Mapping[str, Mapping[int, StateEntry]], replies: Mapping[int, StateHashes], result: HashComparison
) -> None:
    """Find entries that some ranks lack, one finding for all entries of a kind that the same ranks lack."""
    lacking: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    optional = {rank: {entry.optional for entry in reply.entries} for rank, reply in replies.items()}
    for key, by_rank in entries.items():
        first = next(iter(by_rank.values()))
        expected = first.ranks or tuple(replies)
        without = tuple(rank for rank in expected if rank in replies and rank not in by_rank)
        # A name that a rank lacks as a whole has been found already.
        without = tuple(rank for rank in without if not _is_missing(key, replies[rank]))
        if first.optional:
            without = tuple(rank for rank in without if first.optional in optional[rank])
        unread = tuple(rank for rank in without if key in replies[rank].unreadable)
        if unread:
            problem = f"cannot be read on {name_ranks(unread)}: {replies[unread[0]].unreadable[key]}"
            result.findings.append(Finding(key, first.kind, unread, tuple(by_rank), problem))
            without = tuple(rank for rank in without if rank not in unread)
        if without:
            lacking.setdefault((first.kind, tuple(by_rank), without), []).append(key)
    for (kind, having, without), keys in lacking.items():
        where = f"on {name_ranks(having)} only"
        problem = f"is in the optimizer {where}" if kind == "optimized" else f"exists {where}"
        # The smaller group is the odd one.
        odd, others = (having, without) if len(having) <= len(without) else (without, having)
        if len(keys) > 4:
            name = f"{keys[0]} and {len(keys) - 1} more"
            result.findings.append(Finding(name, kind, odd, others, problem))
        else:
            result.findings += [Finding(key, kind, odd, others, problem) for key in keys]


def _is_missing(key: str, reply: StateHashes) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in reply.missing)


def _compare_layout(by_rank: Mapping[int, StateEntry], result: HashComparison) -> None:
    """Find differences that are none of the values: dtype, shape, ties, and what is trained."""
    first = next(iter(by_rank.values()))
    facts: list[tuple[str, dict[int, object]]] = [
        ("dtype", {rank: entry.dtype for rank, entry in by_rank.items()}),
        ("shape", {rank: list(entry.shape) for rank, entry in by_rank.items()}),
        ("requires_grad", {rank: entry.trainable for rank, entry in by_rank.items()}),
    ]
    if first.kind != "optimizer state":  # which may be a plain number for a shard of a single element
        # A rank outside of the mesh has no coordinates, and no shard.
        places = {rank: entry.place for rank, entry in by_rank.items() if entry.place != "outside of the mesh"}
        facts.append(("placement", {rank: _placement(place) for rank, place in places.items()}))
    for fact, values in facts:
        groups = group_ranks((rank, str(value)) for rank, value in values.items())
        if len(groups) > 1:
            reference, others = _split(groups)
            problem = f"{fact}: {_list_values(groups)}"
            result.findings.append(Finding(first.key, first.kind, others, reference, problem, place=first.place))
    ties = group_ranks((rank, entry.first if entry.first != entry.key else "") for rank, entry in by_rank.items())
    if len(ties) > 1:
        reference, others = _split(ties)
        tied = "; ".join(
            f"tied to {name} on {name_ranks(ranks)}" if name else f"not tied on {name_ranks(ranks)}"
            for name, ranks in ties.items()
        )
        result.findings.append(Finding(first.key, first.kind, others, reference, tied))


def _placement(place: str) -> str:
    """Return the placements and axes of a shard's place without its coordinates; "whole" for a whole tensor."""
    return re.sub(r" \d+(?=,|$)", "", place) or "whole"


def _compare_replicas(replicas: Mapping[int, StateEntry], result: HashComparison) -> None:
    """Compare the values of one tensor, or of the replicas of one shard."""
    first = next(iter(replicas.values()))
    if len({(entry.dtype, entry.shape, len(entry.digest)) for entry in replicas.values()}) > 1:
        return  # found by `_compare_layout`
    values = group_ranks((rank, entry.value) for rank, entry in replicas.items())
    if len(values) > 1:
        reference, others = _split(values)
        problem = "differs" if first.kind == "random state" else _list_values(values)
        result.findings.append(Finding(first.key, first.kind, others, reference, problem, is_value=True))
        return
    digests = group_ranks((rank, entry.digest) for rank, entry in replicas.items())
    if len(digests) == 1:
        if len(replicas) > 1:
            result.equal.append((first.key, first.place))
        return
    reference, others = _split(digests)
    source = replicas[reference[0]]
    differing = {
        number
        for digest in digests
        for number in range(len(digest) // 8)
        if digest[8 * number : 8 * number + 8] != source.digest[8 * number : 8 * number + 8]
    }
    result.findings.append(
        Finding(
            first.key,
            first.kind,
            others,
            reference,
            f"differs from {name_ranks(reference)}",
            due=first.due,
            place=first.place,
            elements=math.prod(first.shape),
            is_value=True,
        )
    )
    if first.kind != "random state":  # bytes, whose differences say nothing
        result.pieces.append(Piece(first.key, reference[0], others, tuple(sorted(differing)), source.nbytes))


def _split(groups: Mapping[Any, list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the largest group, and all others."""
    largest = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return tuple(largest), tuple(sorted(rank for ranks in groups.values() if ranks is not largest for rank in ranks))


def _list_values(groups: Mapping[Any, list[int]]) -> str:
    return "; ".join(truncate_list([f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items()], 4))


def _limit_blocks(result: HashComparison) -> None:
    """Reduce the blocks of large pieces if there are too many in all, to blocks that are spread over the tensor."""
    if sum(len(piece.blocks) for piece in result.pieces) <= MAX_BLOCKS:
        return
    most = max(_LEAST_BLOCKS, MAX_BLOCKS // len(result.pieces))
    for number, piece in enumerate(result.pieces):
        count = len(piece.blocks)
        if count > most:
            chosen = tuple(piece.blocks[index * count // most] for index in range(most))
            result.pieces[number] = Piece(piece.key, piece.source, piece.ranks, chosen, piece.nbytes)
            result.sampled.add((piece.key, piece.ranks))


def add_differences(comparison: HashComparison, differences: Iterable[PieceDifference]) -> list[Finding]:
    """Return the findings with the measured differences.

    A tensor whose bits differ and whose values are equal (0.0 and -0.0, other bits of a NaN) is left out.
    """
    measured: dict[tuple[str, int], PieceDifference] = {(found.key, found.rank): found for found in differences}
    findings = []
    for finding in comparison.findings:
        of_ranks = [measured[finding.name, rank] for rank in finding.ranks if (finding.name, rank) in measured]
        if not of_ranks or not finding.is_value:
            findings.append(finding)
            continue
        if len(of_ranks) == len(finding.ranks) and not any(found.differing for found in of_ranks):
            continue
        odd = tuple(found.rank for found in of_ranks if found.differing)
        worst = max(of_ranks, key=lambda found: found.differing)
        finite = [found.largest for found in of_ranks if not math.isnan(found.largest)]
        nonfinite = max(found.nonfinite for found in of_ranks)
        problem = finding.problem
        if nonfinite:
            problem += f", {plural(nonfinite, 'element is', 'elements are')} NaN or infinite on one side"
        # A shard has fewer elements than its tensor: the elements that were compared are all that are known to be here.
        elements = max(worst.compared, finding.elements if not finding.place else 0)
        findings.append(
            replace(
                finding,
                ranks=odd or finding.ranks,
                problem=problem,
                largest=max(finite, default=None),
                share=worst.differing / elements if elements else None,
                sampled=(finding.name, finding.ranks) in comparison.sampled,
                elements=elements,
            )
        )
    return findings


class EqualHistory:
    """Remember when tensors were last equal on all ranks, so that a later check can say since when they differ."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], LastEqual] = {}

    def update(
        self, comparison: HashComparison, findings: Sequence[Finding], now: float, steps: int | None
    ) -> list[Finding]:
        """Return the findings with `since`, and remember what is equal now."""
        for key in comparison.equal:
            self._last[key] = LastEqual(now, steps)
        return [
            replace(finding, since=_describe_since(self._last[finding.name, finding.place], now, steps))
            if finding.is_value and self._is_earlier(finding, steps)
            else finding
            for finding in findings
        ]

    def _is_earlier(self, finding: Finding, steps: int | None) -> bool:
        last = self._last.get((finding.name, finding.place))
        # With fewer steps than then, this is another training under the same names.
        return last is not None and (last.steps is None or steps is None or steps >= last.steps)


def _describe_since(last: LastEqual, now: float, steps: int | None) -> str:
    ago = f"{format_duration(now - last.at)} ago"
    if last.steps is None:
        return f"equal {ago}"
    if steps is None or steps == last.steps:
        return f"equal at step {last.steps}, {ago}"
    return f"after step {last.steps}, equal {ago}"
