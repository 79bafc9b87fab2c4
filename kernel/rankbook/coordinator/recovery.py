"""Puts a new rank in the place of a dead one.

Owns: who gives the new one its state, and what is said of it. Refuses: pickles; what a rank exports is passed on as it
came.
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
    """Who came back, and with what: the numbers are of the peer's names that travelled.

    `missing` maps what could not be brought back to the reason; `donor` is None where nobody was asked for a state.
    """

    ranks: tuple[int, ...]
    donor: int | None
    variables: int = 0
    functions: int = 0
    imports: int = 0
    missing: Mapping[str, str] | None = None

    def __str__(self) -> str:
        verb = "is" if len(self.ranks) == 1 else "are"
        who = f"{name_ranks(self.ranks)} {verb} back"
        if self.donor is None:
            return f"{who} with an empty namespace"
        counted = [
            (self.variables, "variable", "variables"),
            (self.functions, "function or class", "functions and classes"),
            (self.imports, "import", "imports"),
        ]
        state = ", ".join(plural(*each) for each in counted if each[0])
        lines = [f"{who} with the state of rank {self.donor}: {state or 'it has none'}"]
        if self.missing:
            lines.append("not brought back:")
            lines += [f"  {name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(lines)


def summarize_recovery(
    ranks: tuple[int, ...], donor: int, adopted: Mapping[str, Any], missing: Mapping[str, str]
) -> Healed:
    """Return the result of a heal from what a new rank has `adopted`, and what was `missing` before."""
    missing = {**missing, **adopted["missing"]}
    return Healed(ranks, donor, adopted["variables"], adopted["functions"], adopted["imports"], missing)


def hand_over(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    """Hand over the variables `names` at once, without those that cannot be; return the reasons for these, by name.

    `attempt(names)` tries, and returns why that failed, or an empty string. Together the variables keep what they
    share. Where they fail, halves are tried, then halves of those, until each one to blame is known. Raises
    `TransferError` where variables fail together that do not fail in parts.
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
    """The shared memory that a payload rests on."""
    return list(dict.fromkeys(buffer.segment for buffer in payload.buffers if buffer.segment is not None))
