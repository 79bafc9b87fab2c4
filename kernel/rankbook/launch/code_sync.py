"""Modules of the notebook's folder for the ranks of other hosts, which cannot see it.

A rank that imports a module asks for it by name (`rank.main`), through its agent. `ModuleFolder` finds the file
in the notebook's folder, and nothing outside of it. What was sent is remembered per host, with the version of the file,
so that it is sent once, and again before the next cell if it has changed.

A file is named by its path relative to the folder, with slashes. A name that ends with a slash is a folder without
`__init__.py`, that is a namespace package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rankbook.formatting import format_bytes

MOST_FILE = 1 << 20
"""Bytes of one module that is sent."""
MOST_HOST = 32 << 20
"""Bytes of all modules that are sent to one host."""

Version = tuple[int, int]
"""Modification time and size of a file: another one means that it has changed."""
_GONE: Version = (-1, -1)


@dataclass
class SentModules:
    """The files that a host has, with their versions, and the sizes of those that were sent, in bytes.

    `same` are those that it had before, in a folder that it may share with the notebook's host. `removed` are those
    that do not exist any more, and that it still has.
    """

    versions: dict[str, Version] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)


class ModuleFolder:
    """The modules in `folder`. `report` shows a line to the user, once per version of a file.

    Example::

        ModuleFolder(Path.cwd(), print).find("model.layers", SentModules(), {})  # {'model/layers.py': b'...'}
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder = folder.resolve()
        self.report = report
        self._reported: set[tuple[str, Version]] = set()

    def find(self, module: str, sent: SentModules, known: Mapping[str, str], *, host: str = "") -> dict[str, bytes]:
        """Return the files that `host` needs to import `module`, with their contents; nothing for what it has already.

        `known` maps files that the host has in its own folder to their digests.
        """
        parts = module.split(".")
        if not all(part.isidentifier() for part in parts):
            return {}
        path = "/".join(parts)
        # As Python's own search: a package before a module of the same name.
        for name in (f"{path}/__init__.py", f"{path}.py", f"{path}/"):
            if (version := self._version(name)) is not None:
                return {} if sent.versions.get(name) == version else self._read(name, version, sent, known, host)
        return {}

    def changed(self, sent: SentModules, *, host: str = "") -> dict[str, bytes]:
        """Return the files that have changed since they were sent. What was removed is in `sent.removed` then."""
        files: dict[str, bytes] = {}
        for name, before in tuple(sent.versions.items()):
            version = self._version(name)
            if version is None:
                if before != _GONE:
                    # Python would prefer a package that has become a module, and find a module that is gone.
                    sent.versions[name] = _GONE  # it is sent again if it comes back
                    sent.sizes.pop(name, None)
                    sent.same.discard(name)
                    sent.removed.append(name)
            elif version != before:
                files |= self._read(name, version, sent, {}, host)
        return files

    def _version(self, name: str) -> Version | None:
        path = self._folder / name
        try:
            # Links may lead out of the folder.
            if not path.resolve().is_relative_to(self._folder):
                return None
            status = path.stat()
        except (OSError, RuntimeError):  # RuntimeError: a link that leads to itself, up to Python 3.12
            return None
        if name.endswith("/"):
            return (0, 0) if path.is_dir() else None
        return (status.st_mtime_ns, status.st_size) if path.is_file() else None

    def _read(
        self, name: str, version: Version, sent: SentModules, known: Mapping[str, str], host: str
    ) -> dict[str, bytes]:
        if name.endswith("/"):
            sent.versions[name] = version
            return {name: b""}
        size = version[1]
        # A new version takes the place of the one before.
        others = sum(sent.sizes.values()) - sent.sizes.get(name, 0)
        is_too_large = size > MOST_FILE or others + size > MOST_HOST
        limit = f"{format_bytes(MOST_FILE)} is the limit" if size > MOST_FILE else f"{host} has the most it may get"
        refusal = f"{name} ({format_bytes(size)}) was not sent: {limit}; install it on the hosts"
        if is_too_large and name not in known:
            self._say(name, version, refusal)
            return {}
        try:
            content = (self._folder / name).read_bytes()
        except OSError as error:
            self._say(name, version, f"{name} was not sent: {error.strerror or error}")
            return {}
        if known.get(name) == digest(content):  # of any size
            sent.versions[name] = version
            sent.same.add(name)
            return {}
        if is_too_large:
            self._say(name, version, refusal)
            return {}
        # The version of before the read: a change meanwhile is seen the next time.
        sent.versions[name] = version
        sent.sizes[name] = len(content)
        # The host decides whether it shares the folder, and then has the change already.
        if name in sent.same:
            return {name: content}
        self._say(name, version, f"sent {name} ({format_bytes(len(content))}) to {host} and other hosts that import it")
        return {name: content}

    def _say(self, name: str, version: Version, text: str) -> None:
        if (name, version) not in self._reported:
            self._reported.add((name, version))
            self.report(text)


def digest(content: bytes) -> str:
    """Return the digest by which two copies of a file are compared."""
    return hashlib.sha256(content).hexdigest()
