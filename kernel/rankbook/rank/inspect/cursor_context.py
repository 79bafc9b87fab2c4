"""The code before a cursor: what stands there, and what is being written.

Owns: pure text. Refuses: names and their values; it knows no namespace.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from dataclasses import dataclass

MOST_TEXT = 50_000
"""Characters before the cursor that are read."""

_CLOSES = {")": "(", "]": "[", "}": "{"}
_IMPORT = re.compile(r"^\s*import\s+(?:.*,\s*)?([\w.]*)\Z")
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+import\s+\(?(?:.*,\s*)?(\w*)\Z")
_FROM_WHERE = re.compile(r"^\s*from\s+([\w.]*)\Z")
_MADE = re.compile(
    r"\b(?:def|class|as|for|import)\s+([^\W\d]\w*)|^[ \t]*([^\W\d]\w*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE
)
BUILTINS = tuple(sorted(name for name in vars(builtins) if not name.startswith("_")))
KEYWORDS = tuple(sorted(keyword.kwlist))


@dataclass(frozen=True)
class Place:
    """What is before the cursor: the text of an open string from `quote` on, open brackets, or a comment."""

    quote: int | None
    brackets: tuple[int, ...]
    comment: bool


def place_of(text: str) -> Place:
    """Where the end of `text` is."""
    brackets: list[int] = []
    at, end = 0, len(text)
    while at < end:
        char = text[at]
        if char == "#":
            newline = text.find("\n", at)
            if newline < 0:
                return Place(None, tuple(brackets), comment=True)
            at = newline
        elif char in "'\"":
            closed = _end_of_string(text, at)
            if closed is None:
                return Place(at, tuple(brackets), comment=False)
            at = closed
            continue
        elif char in "([{":
            brackets.append(at)
        elif char in _CLOSES and brackets and text[brackets[-1]] == _CLOSES[char]:
            brackets.pop()
        at += 1
    return Place(None, tuple(brackets), comment=False)


def _end_of_string(text: str, start: int) -> int | None:
    """Where the string that begins at `start` has ended. One without its quote ends with the line before the last."""
    quote = text[start] * 3 if text.startswith(text[start] * 3, start) else text[start]
    at = start + len(quote)
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        elif text[at] == "\n" and len(quote) == 1:
            return at
        else:
            at += 1
    return None


def word_before(text: str) -> str:
    """The name that `text` ends with, as far as it is written."""
    at = len(text)
    while at and (text[at - 1].isalnum() or text[at - 1] == "_"):
        at -= 1
    return "" if text[at : at + 1].isdigit() else text[at:]


def expression_before(text: str) -> str:
    """The longest chain of names, attributes, items and calls that `text` ends with; "" if there is none."""
    at = end = len(text.rstrip())
    while at:
        if text[at - 1] in ")]":
            opened = _opening(text, at - 1)
            if opened is None:
                return ""
            at = opened
            continue
        if text[at - 1] in "'\"" and at == end:
            return ""
        word = word_before(text[:at])
        if not word or (word in KEYWORDS and at != end):
            break
        at -= len(word)
        before = text[:at].rstrip()
        if not before.endswith("."):
            break
        at = len(before) - 1
    return text[at:end].strip()


def _opening(text: str, closing: int) -> int | None:
    """Where the bracket opens that closes at `closing`."""
    depth = 0
    for at in range(closing, max(-1, closing - 1000), -1):
        if text[at] in ")]}":
            depth += 1
        elif text[at] in "([{":
            depth -= 1
            if not depth:
                return at
    return None


def parse(expression: str) -> ast.expr | None:
    """Its tree; None where it is no expression."""
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def import_before(text: str) -> tuple[str, str | None, str] | None:
    """Of an import that is being written: the module, the name in it (None: the module's), and what is written of it.

    `from torch.nn import Li` gives ("torch.nn", "", "Li"), `import torch.o` gives ("torch", None, "o").
    """
    line = text.rsplit("\n", 1)[-1]
    if found := _FROM.match(line):
        return found[1], "", found[2]
    if found := (_IMPORT.match(line) or _FROM_WHERE.match(line)):
        package, _, begun = found[1].rpartition(".")
        return package, None, begun
    return None


def names_made(text: str) -> set[str]:
    """Names that the cell gives values to, whether it has run or not."""
    return {found[1] or found[2] for found in _MADE.finditer(text)} - set(KEYWORDS)


def name_at(text: str, cursor: int) -> str:
    """The expression under the cursor, or else what is called there: `f(1, |` asks about f."""
    end = cursor
    while end < len(text) and (text[end].isalnum() or text[end] == "_"):
        end += 1
    before = text[max(0, end - MOST_TEXT) : end]
    place = place_of(before)
    if place.quote is None and not place.comment and (word_before(before) or before.endswith("]")):
        return expression_before(before)
    for opened in reversed(place.brackets):
        if before[opened] == "(" and (called := expression_before(before[:opened])):
            return called
    return ""
