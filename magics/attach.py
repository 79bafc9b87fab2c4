"""What is said about ranks that outlive the notebook.

Owns: the lines of `start --keep`, `attach` and `status` about them, and the handles of the cells that still run.
Refuses: to take anything over (coordinator/).
"""

from __future__ import annotations

from collections.abc import Callable

from rankbook.coordinator.cluster import Cluster
from rankbook.launch.records import find_records
from rankbook.ranks import name_ranks


def describe_keeping(cluster: Cluster) -> str:
    """What stands behind the start line."""
    if cluster.keep is None:
        return ""
    return f"\nif the kernel goes they stay for {_duration(cluster.keep)}: %distributed attach takes them over"


def describe_attached(cluster: Cluster) -> str:
    """Who is there again, and who is not."""
    status = cluster.status()
    there = [each.rank for each in status if not each.loss]
    remedy = "%distributed heal brings it back" if there else "%distributed heal --empty starts it without variables"
    lost = [f"rank {each.rank} {each.loss}: {remedy}" for each in status if each.loss]
    line = f"{name_ranks(there)} attached: {cluster.describe()}" if there else "no rank is left"
    return "\n".join([line, *lost])


def describe_waiting() -> str:
    """Return a line for each set of kept ranks whose notebook is gone; empty if there is none."""
    records = [record for record in find_records().records if not record.owned]
    how = "%distributed stop, then %distributed attach"
    return "\n".join(f"kept ranks wait: {record.describe()}; {how} {record.key} takes them over" for record in records)


def describe_kept(say: Callable[[str], None]) -> None:
    """Say which ranks are kept, where none run here."""
    found = find_records()
    for record in found.records:
        say(f"kept: {record.describe()}, from kernel {record.notebook}; %distributed attach takes them over")
    for note in found.notes:
        say(note)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:g} minute{'' if minutes == 1 else 's'}" if minutes and not rest else f"{seconds:g} s"
