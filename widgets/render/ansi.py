"""What a terminal colours, as HTML.

Owns: the sixteen colours, bold, italic and underlined. Refuses: cursor movements, which
rankbook.output.terminal has resolved.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import islice

from rankbook.formatting import ANSI_ESCAPE

_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_STYLES = {1: "rb-bold", 3: "rb-italic", 4: "rb-under"}
_PLAIN = {22: "rb-bold", 23: "rb-italic", 24: "rb-under"}


def to_html(text: str) -> str:
    """`text` as HTML; its colours are classes (`rb-red`), sequences that are none go."""
    if "\x1b" not in text:
        return escape(text, quote=False)
    found, classes, at = [], dict[str, str](), 0

    def add(part: str) -> None:
        if part and classes:
            found.append(f'<span class="{" ".join(classes.values())}">{escape(part, quote=False)}</span>')
        elif part:
            found.append(escape(part, quote=False))

    for match in ANSI_ESCAPE.finditer(text):
        add(text[at : match.start()])
        at = match.end()
        if match[1] is not None:
            _change(classes, map(_code, match[1].split(";")))
    add(text[at:])
    return "".join(found)


def _code(digits: str) -> int:
    """Return the code that a part of a sequence means: 0 without a number, -1 for a number that is no code."""
    return int(digits or 0) if len(digits) < 5 else -1


def _change(classes: dict[str, str], codes: Iterator[int]) -> None:
    """What one sequence does to the classes of what follows."""
    for code in codes:
        if code == 0:
            classes.clear()
        elif code in (38, 48):  # 256 colours (5, number), or three bytes (2, red, green, blue): no class of ours
            rest = 1 if next(codes, None) == 5 else 3
            for _ in islice(codes, rest):
                pass
        elif code in _STYLES:
            classes[_STYLES[code]] = _STYLES[code]
        elif code in _PLAIN:
            classes.pop(_PLAIN[code], None)
        elif code == 39:
            classes.pop("colour", None)
        elif code // 10 in (3, 9) and code % 10 < 8:
            classes["colour"] = f"rb-{_NAMES[code % 10]}"
