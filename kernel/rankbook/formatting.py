"""Format numbers, names and terminal text for display, and texts that both notebook and ranks show.

Also tells the user's files from those of libraries and of this package, for tracebacks, stacks and debuggers.
"""

from __future__ import annotations

import keyword
import os
import re
import signal
import sysconfig
import time
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

# The alternatives, from left to right (ECMA-48):
#
#     ESC [ 1;31 m        colours and styles, whose parameters are group 1
#     ESC [ ... letter    any other control sequence, such as moving the cursor
#     ESC ] ... BEL       operating system command, such as a hyperlink or the window's title; ends with BEL or ESC \
#     ESC letter          two-character sequences
ANSI_ESCAPE = re.compile(r"\x1b(?:\[([\d;]*)m|\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Matches a terminal escape sequence. Group 1 has the parameters of a colour and style sequence (SGR)."""

PACKAGE_MAGICS = ("pip", "conda", "mamba", "micromamba", "uv")
PACKAGE_NOTE = "Note: the ranks use updated packages after %distributed stop, which ends them with their variables."
"""Text below the note of these magics that names a restart of the kernel."""

# 999.6 has to become "1 k" and not "1000".
_ROUNDS_UP = 0.9995  # fraction of a unit from which three significant digits round up to 1


def format_3g(value: float) -> str:
    """Format with three significant digits and no exponent: "31.4", "1230"."""
    # `g` alone would write 1230 as 1.23e+03.
    return f"{float(f'{value:.3g}'):.15g}"


def format_bytes(count: float) -> str:
    """Format bytes in decimal units: "1.07 GB" is 1.07 × 10⁹ bytes."""
    amount, unit = float(count), "B"
    # Decimal units, as vendors of memory and disks use them for bandwidth and capacity; torch's own texts have GiB.
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000 * _ROUNDS_UP:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} B" if unit == "B" else f"{format_3g(amount)} {unit}"


def format_count(number: float) -> str:
    """Format a count in decimal units: "7.24 M"."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale * _ROUNDS_UP:
            return f"{format_3g(number / scale)} {unit}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """Format seconds: "0.4 s", "12 s", "3 min 5 s", "2 h 4 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    # Rounded before it is split, so that 119.7 s is "2 min 0 s" and not "1 min 60 s".
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def format_time(seconds: float) -> str:
    """Format seconds since the epoch as date and time in the notebook's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_shape(shape: Sequence[int]) -> str:
    """Format a tensor's shape: "512 × 128", or "scalar"."""
    return " × ".join(map(str, shape)) or "scalar"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Format a count with its noun: "1 rank", "2 ranks", "12,000 lines". `nouns` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def signal_name(number: int) -> str:
    """Return the name of a signal: "SIGKILL", or "signal 40" for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def truncate_list(items: Sequence[str], limit: int) -> list[str]:
    """Return the first `limit` items, followed by the number of the remaining ones: ["a", "b", "and 3 more"]."""
    # Used in error texts about thousands of keys or ranks, of which a reader needs the first few.
    more = len(items) - limit
    return [*items[:limit], f"and {more} more"] if more > 0 else list(items)


def suggest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean: loss, losses?" with the public `names` that resemble `name`, or an empty string."""
    matches = get_close_matches(name, [candidate for candidate in names if not candidate.startswith("_")], n=3)
    return f"; did you mean: {', '.join(matches)}?" if matches else ""


def strip_ansi(text: str) -> str:
    """Remove terminal escape sequences."""
    return text if "\x1b" not in text else ANSI_ESCAPE.sub("", text)


def escape_unprintable(text: str) -> str:
    """Escape control characters in a name read from a file, which a terminal or a reader would interpret."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_PACKAGE = Path(__file__).parent
# A traceback has the path by which a module was imported. Breakpoints and editors use the real path. Both have to be
# recognized.
_REAL_FOLDERS = {folder.resolve() for folder in (_PACKAGE, _PACKAGE / "magics", _PACKAGE / "widgets")}

PACKAGE_FOLDERS = tuple(sorted(f"{folder}{os.sep}" for folder in {_PACKAGE, *_REAL_FOLDERS}))
"""The package's folder as imported and the real folders behind symbolic links, all with a trailing separator.

In a clone `magics` and `widgets` are links to folders outside the package; in an installation they lie inside it.
"""


# Not when the module is imported: every process imports it, and few of them ask.
@cache
def _library_folders(*keys: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(paths[key] for key in keys))


def is_users(file: str) -> bool:
    """Return True if a file is the user's: a cell or module of theirs, not part of a library."""
    folders = _library_folders("stdlib", "platstdlib", "purelib", "platlib")
    return not file.startswith((*folders, "<frozen", *PACKAGE_FOLDERS)) and "site-packages" not in file


def join_lines(text: str) -> str:
    """Return the lines of a text that are not empty as one line."""
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())


def python_name(name: str) -> str:
    """Return a name as Python stores it: the micro sign of a keyboard becomes the Greek letter."""
    return name if name.isascii() else unicodedata.normalize("NFKC", name)


def is_variable_name(name: str) -> bool:
    """Return True if Python takes this name for a variable."""
    return name.isidentifier() and not keyword.iskeyword(name)


def shorten_library_path(file: str) -> str:
    """Return the path of a library's file below the folder that it is imported from: `torch/nn/modules/module.py`."""
    if "site-packages" + os.sep in file:
        return file.rpartition("site-packages" + os.sep)[2]
    folders = [f"{folder}{os.sep}" for folder in (*_library_folders("stdlib", "platstdlib"), _PACKAGE.parent)]
    return next((file.removeprefix(folder) for folder in folders if file.startswith(folder)), file)
