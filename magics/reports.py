"""Text and tables that the commands of `%distributed` show: stacks, variables, peeks, kept and attached ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.queries import Peeked
from rankbook.errors import InvalidArgument
from rankbook.formatting import format_bytes, is_users, plural, shorten_library_path, suggest
from rankbook.launch.hosts import HostStatus
from rankbook.launch.registry import find_detached
from rankbook.protocol.messages import Frame, Stack
from rankbook.protocol.telemetry import Variable
from rankbook.ranks import format_ranks, group_ranks, name_ranks

VARIABLE_HEADINGS = ("name", "ranks", "type", "shape", "dtype", "device", "size", "value", "differs in")
_MAX_VALUES = 4
_VARIABLE_FIELDS = (("type", "type"), ("shape", "shape"), ("dtype", "dtype"), ("device", "device"), ("size", "bytes"))
# As in `<object at 0x7f3c2a1b4d90>`. Other hexadecimal numbers are values, such as a checksum.
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,}")


def describe_stacks(stacks: Mapping[int, Stack | None], states: Mapping[int, str]) -> str:
    """Return every distinct stack once, after its ranks, with the outermost user frame first.

    `states` describes the ranks that have no stack, because they are dead or do not respond.
    """
    texts = {rank: states[rank] if stack is None else _describe_stack(stack) for rank, stack in stacks.items()}
    return "\n".join(f"{name_ranks(ranks)}: {text}" for text, ranks in group_ranks(texts.items()).items())


def _describe_stack(stack: Stack) -> str:
    if stack.cell is None:
        return "idle"
    waits = f", waiting in {stack.waits_for}" if stack.waits_for else ""
    does = "paused in the debugger" if stack.paused else "running"
    if not stack.frames:
        return f"{does}, outside of user code{waits}"
    lines = []
    for users, group in groupby(stack.frames, key=lambda frame: is_users(frame.file)):
        frames = list(group)
        if users:
            lines += [
                f"  {frame.file}:{frame.line} in {frame.function}\n    {frame.source}".rstrip() for frame in frames
            ]
        else:
            lines.append(_fold(frames, innermost=frames[-1] is stack.frames[-1]))
    return f"{does}{waits}\n" + "\n".join(lines)


def _fold(frames: Sequence[Frame], *, innermost: bool) -> str:
    """Return one line for consecutive frames of libraries. The innermost ones name the line that runs."""
    folded = f"  … {plural(len(frames), 'frame')} of libraries"
    last = frames[-1]
    return f"{folded}, at {shorten_library_path(last.file)}:{last.line} in {last.function}" if innermost else folded


def describe_peeks(peeks: Sequence[Peeked]) -> tuple[str, str]:
    """Return every distinct answer once, after its ranks, and every distinct error. Both end in a newline."""
    answers = _prefix_ranks({peek.rank: peek.text for peek in peeks if not peek.trouble})
    errors = _prefix_ranks({peek.rank: peek.trouble for peek in peeks if peek.trouble})
    # A running cell changes values, so these may differ only because the ranks were read one after another.
    moving = [peek for peek in peeks if peek.cell and not peek.trouble]
    if moving:
        cells = " and ".join(sorted({peek.cell for peek in moving}))
        ranks = name_ranks([peek.rank for peek in moving])
        predicate = "is" if len({peek.cell for peek in moving}) == 1 else "are"
        answers += f"({cells} {predicate} running on {ranks}; the values were read at different times)\n"
    return answers, errors


def _prefix_ranks(texts: Mapping[int, str]) -> str:
    """Return the lines of all distinct texts with their ranks; texts that differ only in addresses are merged."""
    # Default representations contain addresses, which differ between ranks for equal objects.
    groups = group_ranks((rank, _ADDRESS.sub("0x", text)) for rank, text in texts.items())
    return "".join(
        f"[{format_ranks(ranks)}] {line}\n" for ranks in groups.values() for line in texts[ranks[0]].split("\n")
    )


def variable_rows(variables: Mapping[int, Sequence[Variable]], names: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the rows below `VARIABLE_HEADINGS`: one row per variable and set of ranks where it is alike.

    Alike means the same type, shape, dtype, device and size; the contents of tensors and objects are not compared.
    `names` selects variables, also by patterns such as `loss*`. Raises `InvalidArgument` for a name that no rank has.
    """
    by_name: dict[str, dict[int, Variable]] = {}
    # A dict keeps its order, so variables are listed in the order of the first rank that has them.
    for rank, of_rank in variables.items():
        for variable in of_rank:
            by_name.setdefault(variable.name, {})[rank] = variable
    for name in names:
        # A pattern without a match is an error as well, since a misspelt name would otherwise show nothing.
        if not any(fnmatchcase(candidate, name) for candidate in by_name):
            ranks = name_ranks(tuple(variables))
            raise InvalidArgument(f"no variable matches {name!r} on {ranks}{suggest(name, by_name)}")
    selected = [candidate for candidate in by_name if not names or any(fnmatchcase(candidate, name) for name in names)]
    return [row for name in selected for row in _rows_of_variable(name, by_name[name], tuple(variables))]


def _rows_of_variable(name: str, by_rank: Mapping[int, Variable], ranks: tuple[int, ...]) -> Iterable[tuple[str, ...]]:
    groups: dict[tuple[object, ...], dict[int, Variable]] = {}
    for rank in ranks:
        if rank in by_rank:
            # Variables are grouped by what their row shows besides the value.
            key = tuple(getattr(by_rank[rank], field) for _, field in _VARIABLE_FIELDS)
            groups.setdefault(key, {})[rank] = by_rank[rank]
    # Ranks of one group are equal in all these fields, so only the groups are compared.
    differs = [title for number, (title, _) in enumerate(_VARIABLE_FIELDS) if len({key[number] for key in groups}) > 1]
    if len({variable.preview for variable in by_rank.values()}) > 1:
        differs.append("value")
    missing = tuple(rank for rank in ranks if rank not in by_rank)
    if missing:
        differs.append(f"not on {name_ranks(missing)}")
    for group in groups.values():
        first = next(iter(group.values()))
        yield (
            name,
            "all" if len(group) == len(ranks) else format_ranks(tuple(group)),
            first.type,
            "" if first.shape is None else str(list(first.shape)),
            first.dtype,
            first.device,
            "" if first.bytes is None else format_bytes(first.bytes),
            _describe_values({rank: variable.preview for rank, variable in group.items()}),
            ", ".join(differs),
        )
        differs = []  # only in the first row of the variable


def _describe_values(values: Mapping[int, str]) -> str:
    """Return the value if all ranks have the same, else the first few values with their ranks."""
    groups = group_ranks(values.items())
    if len(groups) == 1:
        return next(iter(groups))
    descriptions = [f"[{format_ranks(ranks)}] {value}" for value, ranks in list(groups.items())[:_MAX_VALUES]]
    return " · ".join([*descriptions, "…"] if len(groups) > _MAX_VALUES else descriptions)


def describe_keeping(cluster: Cluster) -> str:
    """Return the line shown after starting ranks that outlive the kernel; empty for other ranks."""
    if cluster.keep is None:
        return ""
    minutes, rest = divmod(cluster.keep, 60)
    period = f"{minutes:g} minute{'' if minutes == 1 else 's'}" if minutes and not rest else f"{cluster.keep:g} s"
    return f"\nif the kernel ends, the ranks stay for {period}; %distributed attach connects to them again"


def describe_host(host: HostStatus) -> str:
    """Return the line of a host: slots, ranks, round trip, dropped messages, and since when it is not reachable."""
    if host.lost:
        state = f"lost ({host.lost.removeprefix('was lost: ')})"
    elif host.unreachable is not None:
        state = f"not reachable for {host.unreachable:.0f} s"
    else:
        state = "reachable" if host.round_trip is None else f"round trip {1e3 * host.round_trip:.1f} ms"
    ranks = name_ranks(host.ranks) if host.ranks else "no rank"
    dropped = f", {plural(host.dropped, 'message')} dropped" if host.dropped else ""
    repeated = f", {plural(host.repeated, 'repeated packet')} dropped" if host.repeated else ""
    return f"host {host.name}: {plural(host.slots, 'slot')}, {ranks}, {state}{dropped}{repeated}"


def describe_attached(cluster: Cluster) -> str:
    """Return the attached ranks, and a line with a remedy per lost rank."""
    status = cluster.status()
    alive = [rank.rank for rank in status if not rank.loss]
    remedy = "%distributed heal restores it" if alive else "%distributed heal --empty starts it with an empty namespace"
    first = f"{name_ranks(alive)} attached: {cluster.describe()}" if alive else "no rank is alive"
    return "\n".join([first, *(f"rank {rank.rank} {rank.loss}: {remedy}" for rank in status if rank.loss)])


def describe_available() -> str:
    """Return a line per set of kept ranks whose notebook has ended; empty if there are none."""
    # `owned`: the notebook of these ranks still runs.
    records = [record for record in find_detached().records if not record.owned]
    how = "%distributed stop, then %distributed attach"
    return "\n".join(
        f"kept ranks are available: {record.describe()}; {how} {record.key} connects to them; "
        f"%distributed stop {record.key} ends them"
        for record in records
    )


def describe_kept() -> str:
    """Return a line per set of kept ranks, and the notes about unreadable records; empty if there are none."""
    detached = find_detached()
    lines = [
        f"kept ranks: {record.describe()}, from kernel {record.notebook}; %distributed attach connects to them, "
        f"%distributed stop {record.key} ends them"
        for record in detached.records
    ]
    return "\n".join([*lines, *detached.notes])
