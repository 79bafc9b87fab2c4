"""Tell the user's files from those of libraries and of this package, for tracebacks, stacks and debuggers."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

_PACKAGE = Path(__file__).parent
# A traceback has the path by which a module was imported. Breakpoints and editors use the real path. Both have to be
# recognized.
_REAL_FOLDERS = {folder.resolve() for folder in (_PACKAGE, _PACKAGE / "magics", _PACKAGE / "widgets")}

PACKAGE_FOLDERS = tuple(sorted(f"{folder}{os.sep}" for folder in {_PACKAGE, *_REAL_FOLDERS}))
"""The package's folder as imported and the real folders behind symbolic links, all with a trailing separator.

In a clone `magics` and `widgets` are links to folders outside the package; in an installation they lie inside it.
"""

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({*(_PATHS[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen"})


def is_users(file: str) -> bool:
    """Return True if a file is the user's: a cell or module of theirs, not part of a library."""
    return not file.startswith((*_LIBRARIES, *PACKAGE_FOLDERS)) and "site-packages" not in file


def shorten_library_path(file: str) -> str:
    """Return the path of a library's file below the folder that it is imported from: `torch/nn/modules/module.py`."""
    if "site-packages" + os.sep in file:
        return file.rpartition("site-packages" + os.sep)[2]
    folders = (*(f"{_PATHS[key]}{os.sep}" for key in ("stdlib", "platstdlib")), f"{_PACKAGE.parent}{os.sep}")
    return next((file.removeprefix(folder) for folder in folders if file.startswith(folder)), file)
