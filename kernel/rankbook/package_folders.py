"""List the folders that hold the package's files, for tracebacks and debuggers."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent
_REAL_FOLDERS = {folder.resolve() for folder in (_PACKAGE, _PACKAGE / "magics", _PACKAGE / "widgets")}

PACKAGE_FOLDERS = tuple(sorted(f"{folder}{os.sep}" for folder in {_PACKAGE, *_REAL_FOLDERS}))
"""The package's folder as imported and the real folders behind symbolic links, all with a trailing separator.

In a clone `magics` and `widgets` are links to folders outside the package; in an installation they lie inside it.
"""
