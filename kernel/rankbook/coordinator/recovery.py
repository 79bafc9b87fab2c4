"""Recovery of a dead rank: hand over the variables of a healthy rank to its replacement.

The exported payloads are passed on as they are, never unpickled here. `states.choose_donor` chooses the donor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankbook.errors import TransferError
from rankbook.formatting import plural
from rankbook.ranks import name_ranks


@dataclass(frozen=True)
class Healed:
    """Result of a heal: the replaced ranks, and the numbers of variables, functions and imports they received.

    `missing` maps the names that could not be copied to the reasons. `donor` is None if the ranks start empty.
    `lost_save` describes a background save that was lost with a dead rank, if that was not said before.
    """

    ranks: tuple[int, ...]
    donor: int | None
    variables: int = 0
    functions: int = 0
    imports: int = 0
    missing: Mapping[str, str] | None = None
    lost_save: str = ""

    def __str__(self) -> str:
        verb = "was" if len(self.ranks) == 1 else "were"
        subject = f"{name_ranks(self.ranks)} {verb} healed"
        if self.donor is None:
            return f"{subject} with an empty namespace"
        counted = [
            (self.variables, "variable", "variables"),
            (self.functions, "function or class", "functions and classes"),
            (self.imports, "import", "imports"),
        ]
        state = ", ".join(plural(*item) for item in counted if item[0])
        lines = [f"{subject} with the state of rank {self.donor}: {state or 'nothing to copy'}"]
        if self.missing:
            lines.append("not copied:")
            lines += [f"  {name}: {reason}" for name, reason in self.missing.items()]
        if self.lost_save:
            lines.append(self.lost_save)
        return "\n".join(lines)


def summarize_recovery(
    ranks: tuple[int, ...], donor: int, adopted: Mapping[str, Any], missing: Mapping[str, str], lost_save: str
) -> Healed:
    """Return the result of a heal from a new rank's reply `adopted`, the names `missing` before, and the lost save."""
    missing = {**missing, **adopted["missing"]}
    return Healed(ranks, donor, adopted["variables"], adopted["functions"], adopted["imports"], missing, lost_save)


def copy_variables(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    """Copy the variables `names` together, except those that cannot be copied; return their reasons, by name.

    `attempt(names)` tries to copy and returns the reason of a failure, or an empty string. Variables are copied
    together to preserve shared references. If that fails, both halves are tried, recursively, until every variable at
    fault is known. Raises `TransferError` if variables fail together that succeed in parts.
    """
    # The frequent case needs one attempt. Only if it fails, the search begins, with at most two attempts per level and
    # failing variable.
    if not attempt(names):
        return {}
    refused = _find_uncopyable(names, attempt)
    # The search has copied the variables in parts, which has lost the references between them. So all that can be
    # copied is copied once more, together.
    if problem := attempt([name for name in names if name not in refused]):
        raise TransferError(f"the variables can be copied separately but not together: {problem}")
    return refused


# Example: one of eight variables cannot be copied. The attempts are: all eight, two halves of four, two of two, two
# single variables, and at last the seven that are left, together. That makes eight attempts.
def _find_uncopyable(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    refused: dict[str, str] = {}
    middle = len(names) // 2
    for half in (names[:middle], names[middle:]):
        if half and (problem := attempt(half)):
            refused |= {half[0]: problem} if len(half) == 1 else _find_uncopyable(half, attempt)
    return refused
