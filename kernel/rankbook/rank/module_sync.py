"""Import of modules of the notebook's folder, on a rank of another host.

`ModuleSync` stands before Python's own search for files. It asks this host's agent for every module that may lie in the
notebook's folder, and the agent puts the file into a folder of this host that is the first one of `sys.path`. Then
Python's own search finds it. A file that was sent is replaced when it changes, before the next cell, so that
`%autoreload` sees the change.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from rankbook.transport.framed_socket import request

TIMEOUT = 60.0
"""Seconds that an import waits for the notebook's host. After that, only what lies on this host can be imported."""


class ModuleSync(MetaPathFinder):
    """Ask the agent at the socket `agent` for modules, which it puts into `folder`.

    `working_directory` is the rank's. Packages there may lack a module, or have an old one.
    """

    def __init__(self, folder: Path, agent: str, working_directory: Path) -> None:
        self._folder = folder
        self._agent = agent
        self._working_directory = working_directory

    def install(self) -> None:
        """Put this finder before Python's search for files, and the folder first on `sys.path`."""
        position = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(position, self)
        sys.path.insert(0, str(self._folder))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:  # noqa: ARG002
        """See `importlib.abc.MetaPathFinder`. Finds nothing itself."""
        folder = str(self._folder)
        if path is None:
            # The state of a rank of another host has its `sys.path`.
            if folder not in sys.path:
                sys.path.insert(0, folder)
            if name in sys.stdlib_module_names or name == "rankbook":
                return
        elif not any(
            Path(entry).is_relative_to(root) for entry in path for root in (self._folder, self._working_directory)
        ):
            return
        # The threads of the rank itself must not wait for the network.
        if threading.current_thread().name.startswith("rankbook-"):
            return
        # Without an agent, in a process that has outlived it: what lies here can be imported.
        with contextlib.suppress(OSError):
            if request(self._agent, name.encode(), timeout=TIMEOUT):
                importlib.invalidate_caches()
        if isinstance(path, list) and name.count("."):
            package = str(self._folder / name.rpartition(".")[0].replace(".", "/"))
            if package not in path and Path(package).is_dir():
                path.insert(0, package)
