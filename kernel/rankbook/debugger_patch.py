"""What JupyterLab's debugger does to the new processes of its notebook, and how to start processes without it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable


def without_debugger() -> contextlib.AbstractContextManager[None]:
    """Return a context in which a debugger of this process does not attach itself to new processes.

    While JupyterLab's debugger is on, debugpy rewrites the command line of every new Python process so that its engine
    (pydevd) runs the program. In a process of ours that engine would wait for a front end that never comes.
    """
    engine = sys.modules.get("pydevd")
    skip: Callable[[], contextlib.AbstractContextManager[None]] | None
    skip = getattr(engine, "skip_subprocess_arg_patch", None)
    return contextlib.nullcontext() if skip is None else skip()
