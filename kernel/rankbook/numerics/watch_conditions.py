"""Conditions of the number watch (watch.py), which the notebook and the ranks parse with the same code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankbook.errors import InvalidArgument

_NORM = re.compile(r"norm\s*>\s*(\S+)")
_USAGE = 'expected nan, inf, "norm > X" or off'


@dataclass(frozen=True)
class Conditions:
    """Conditions that end a step: NaN, infinities in the output of a module, or a gradient norm above `norm`."""

    nan: bool = False
    inf: bool = False
    norm: float | None = None

    def __bool__(self) -> bool:
        return self.nan or self.inf or self.norm is not None

    def __str__(self) -> str:
        parts = ["nan"] * self.nan + ["inf"] * self.inf
        if self.norm is not None:
            parts.append(f"norm > {self.norm:g}")
        return ", ".join(parts) or "off"


def parse_conditions(*conditions: str) -> Conditions:
    """Return the conditions in `conditions`, such as `"nan", "norm > 100"`; "off" means none.

    Raises `InvalidArgument` for anything else, and for "off" together with a condition.
    """
    # `%distributed watch norm > 100` arrives as three words.
    text = re.sub(r"\s*>\s*", ">", " ".join(conditions).replace(",", " "))
    nan = inf = off = False
    norm: float | None = None
    for word in text.split():
        if word == "nan":
            nan = True
        elif word == "inf":
            inf = True
        elif word == "off":
            off = True
        elif (match := _NORM.fullmatch(word)) is not None:
            norm = _positive(match[1])
        else:
            raise InvalidArgument(f"unknown condition {word!r}: {_USAGE}")
    if off and (nan or inf or norm is not None):
        raise InvalidArgument(f"'off' switches the watch off and takes no condition: {_USAGE}")
    if not (off or nan or inf or norm is not None):
        raise InvalidArgument(f"no condition is given: {_USAGE}")
    return Conditions(nan, inf, norm)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidArgument(f"invalid norm {text!r}: expected a positive number, as in 'norm > 100'")
    return value
