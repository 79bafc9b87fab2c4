"""Recovery of a dead rank: hand over the variables of a healthy rank to its replacement.

The exported payloads are passed on as they are, never unpickled here. `states.choose_donor` chooses the donor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankbook.errors import TransferError
from rankbook.formatting import plural
from rankbook.protocol.messages import Payload
from rankbook.ranks import name_ranks


@dataclass(frozen=True)
class Healed:
    """Result of a heal: the replaced ranks, and the numbers of variables, functions and imports they received.

    `missing` maps the names that could not be copied to the reasons. `donor` is None if the ranks start empty.
    """

    ranks: tuple[int, ...]
    donor: int | None
    variables: int = 0
    functions: int = 0
    imports: int = 0
    missing: Mapping[str, str] | None = None

    def __str__(self) -> str:
        verb = "is" if len(self.ranks) == 1 else "are"
        subject = f"{name_ranks(self.ranks)} {verb} back"
        if self.donor is None:
            return f"{subject} with an empty namespace"
        counted = [
            (self.variables, "variable", "variables"),
            (self.functions, "function or class", "functions and classes"),
            (self.imports, "import", "imports"),
        ]
        state = ", ".join(plural(*item) for item in counted if item[0])
        lines = [f"{subject} with the state of rank {self.donor}: {state or 'it has none'}"]
        if self.missing:
            lines.append("not brought back:")
            lines += [f"  {name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(lines)


def summarize_recovery(
    ranks: tuple[int, ...], donor: int, adopted: Mapping[str, Any], missing: Mapping[str, str]
) -> Healed:
    """Return the result of a heal from a new rank's reply `adopted` and the names `missing` before."""
    missing = {**missing, **adopted["missing"]}
    return Healed(ranks, donor, adopted["variables"], adopted["functions"], adopted["imports"], missing)


def hand_over(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    """Copy the variables `names` together, except those that cannot be copied; return their reasons, by name.

    `attempt(names)` tries to copy and returns the reason of a failure, or an empty string. Variables are copied
    together to preserve shared references. If that fails, both halves are tried, recursively, until every variable at
    fault is known. Raises `TransferError` if variables fail together that succeed in parts.
    """
    if not attempt(names):
        return {}
    refused = _find_refused(names, attempt)
    if problem := attempt([name for name in names if name not in refused]):
        raise TransferError(f"the variables that can be handed over in parts cannot be at once: {problem}")
    return refused


def _find_refused(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    refused: dict[str, str] = {}
    middle = len(names) // 2
    for part in (names[:middle], names[middle:]):
        if part and (problem := attempt(part)):
            refused |= {part[0]: problem} if len(part) == 1 else _find_refused(part, attempt)
    return refused


def payload_segments(payload: Payload) -> list[str]:
    """Return the shared memory segments of a payload, without duplicates."""
    return list(dict.fromkeys(buffer.segment for buffer in payload.buffers if buffer.segment is not None))
