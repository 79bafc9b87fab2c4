"""Where the ranks are, in words.

Owns: grouping equal stacks. Refuses: to fetch them.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankbook.messages import Stack
from rankbook.ranks import name_ranks


def describe_stacks(stacks: Mapping[int, Stack | None], states: Mapping[int, str]) -> str:
    """Each distinct stack once, headed by its ranks, the user's frames outermost first.

    Of a rank without one, which is dead or does not answer, `states` tells what it is.
    """
    groups: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        groups.setdefault(_describe(stack) if stack is not None else states[rank], []).append(rank)
    return "\n".join(f"{name_ranks(ranks)}: {text}" for text, ranks in groups.items())


def _describe(stack: Stack) -> str:
    if stack.cell is None:
        return "idle"
    waits = f", waits in {stack.waits_for}" if stack.waits_for else ""
    does = "paused in the debugger" if stack.paused else "running"
    if not stack.frames:
        return f"{does}, outside of the user's code{waits}"
    lines = [f"  {frame.file}:{frame.line} in {frame.function}\n    {frame.source}".rstrip() for frame in stack.frames]
    return f"{does}{waits}\n" + "\n".join(lines)
