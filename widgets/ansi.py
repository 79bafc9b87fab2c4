"""What a terminal colours, as HTML.

Owns: the sixteen colours, bold, italic and underlined. Refuses: cursor movements, which rankbook.lines has resolved.
"""

from __future__ import annotations

import re
from html import escape

_ESCAPE = re.compile(r"\x1b(?:\[([\d;]*)m|\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
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

    for match in _ESCAPE.finditer(text):
        add(text[at : match.start()])
        at = match.end()
        if match[1] is not None:
            _change(classes, [int(each or 0) for each in match[1].split(";")])
    add(text[at:])
    return "".join(found)


def _change(classes: dict[str, str], codes: list[int]) -> None:
    """What one sequence does to the classes of what follows."""
    while codes:
        code = codes.pop(0)
        if code == 0:
            classes.clear()
        elif code in (38, 48):  # 256 colours, or three bytes: no class of ours
            del codes[: 2 if codes[:1] == [5] else 4]
        elif code in _STYLES:
            classes[_STYLES[code]] = _STYLES[code]
        elif code in _PLAIN:
            classes.pop(_PLAIN[code], None)
        elif code == 39:
            classes.pop("colour", None)
        elif code // 10 in (3, 9) and code % 10 < 8:
            classes["colour"] = f"rb-{_NAMES[code % 10]}"
