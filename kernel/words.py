"""Numbers as people read them.

Owns: sizes, rates, durations and shapes in words. Refuses: rounding that hides a zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

_NEXT = 0.9995
"""Of a unit: from there on three digits are those of the unit."""


def digits(value: float) -> str:
    """Three digits and no exponent: "31.4", "1230"."""
    return f"{float(f'{value:.3g}'):.15g}"


def size(count: float) -> str:
    """Bytes with their unit, in thousands: "1.07 GB"."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000 * _NEXT:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} B" if unit == "B" else f"{digits(amount)} {unit}"


def count(number: float) -> str:
    """A count with its unit, in thousands: "7.24 M"."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale * _NEXT:
            return f"{digits(number / scale)} {unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds in words: "0.4 s", "12 s", "3 min 5 s", "2 h 4 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def shape_words(shape: Sequence[int]) -> str:
    """A shape, a tensor without dims being a scalar: "512 × 128"."""
    return " × ".join(map(str, shape)) or "scalar"


def moment(at: float) -> str:
    """Seconds since the epoch as date and time, where the notebook runs."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def printable(text: str) -> str:
    """Return a name out of a file with its control characters escaped: a terminal or a reader would obey them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
