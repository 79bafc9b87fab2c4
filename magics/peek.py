"""`%distributed peek`: the line, and what is said of the answers.

Owns: where on the line the expression ends and options begin. Refuses: to ask the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rankbook.coordinator.peek import Peeked
from rankbook.ranks import format_ranks, name_ranks

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def describe_peeks(peeks: Sequence[Peeked]) -> tuple[str, str]:
    """Each distinct answer once, behind its ranks, and each distinct trouble. Every line ends."""
    texts = _group({each.rank: each.text for each in peeks if not each.trouble})
    troubles = _group({each.rank: each.trouble for each in peeks if each.trouble})
    moving = [each for each in peeks if each.cell and not each.trouble]
    if moving:
        cells = " and ".join(sorted({each.cell for each in moving}))
        ranks = name_ranks([each.rank for each in moving])
        texts += f"(a moving target: {cells} runs on {ranks}, and each was read at a moment of its own)\n"
    return texts, troubles


def _group(texts: dict[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(_ADDRESS.sub("0x", text), []).append(rank)
    lines = [f"[{format_ranks(ranks)}] {line}\n" for ranks in groups.values() for line in texts[ranks[0]].split("\n")]
    return "".join(lines)
