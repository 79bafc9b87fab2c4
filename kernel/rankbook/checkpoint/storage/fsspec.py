"""Store checkpoints in file systems of fsspec: object stores, memory, remote hosts.

These have no atomic move or removal of a folder. Both are done file by file, in an order that can be interrupted at any
point: a new folder gets its seals (`CHECKPOINT_FILES`) last, and an old one loses them first.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rankbook.checkpoint.format.manifest import Buffer, as_bytes
from rankbook.checkpoint.storage.base import ASIDE, CHECKPOINT_FILES, add_filename, check_path


class RemoteStorage:
    """Storage at a URL that fsspec can open."""

    remote = True
    """A second read of the same bytes costs as much as the first."""

    def __init__(self, url: str, filesystem: Any = None) -> None:  # noqa: ANN401 - fsspec has no types
        self.url = url.rstrip("/")
        if filesystem is None:
            from fsspec.core import url_to_fs

            filesystem, root = url_to_fs(self.url)
        else:
            root = filesystem._strip_protocol(self.url)
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def write(self, path: str, parts: Iterable[Buffer]) -> int:
        """See `Storage`. The file is durable when the service has accepted it."""
        target = self._full_path(path)
        written = 0
        with self._translate_errors(path):
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                with self._filesystem.open(target, "wb") as file:
                    for part in parts:
                        view = memoryview(part)
                        file.write(view)
                        written += view.nbytes
            except BaseException:
                # Closing the file in `with` may have uploaded the part that was written.
                self._discard(target)
                raise
        return written

    def create(self, path: str, parts: Iterable[Buffer]) -> None:
        """Write a whole file. Raises FileExistsError if it exists.

        Of two concurrent calls one succeeds, if the service supports conditional creation (S3, Google Cloud Storage,
        memory).
        """
        target, content = self._full_path(path), b"".join(bytes(part) for part in parts)
        with self._translate_errors(path):
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                self._filesystem.pipe_file(target, content, mode="create")
            except (NotImplementedError, TypeError, ValueError):  # the service, or this version of fsspec, lacks it
                # fsspec caches listings; another process may have created the file since.
                self._filesystem.invalidate_cache(target)
                if self._filesystem.exists(target):
                    raise FileExistsError(errno.EEXIST, "File exists", f"{self.url}/{path}") from None
                self._filesystem.pipe_file(target, content)

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`. Uses one ranged request and one copy."""
        target = self._full_path(path)
        flat = as_bytes(into)
        with self._translate_errors(path):
            data = self._filesystem.cat_file(target, start=start, end=start + len(flat))
            flat[: len(data)] = data
        return len(data)

    def list(self, path: str = "") -> dict[str, int | None]:
        """See `Storage`."""
        folder = self._full_path(path)
        with self._translate_errors(path):
            try:
                # Other processes write into the folder.
                self._filesystem.invalidate_cache(folder)
                entries = self._filesystem.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        names = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries if entry["name"] != folder}
        return {name: None if entry["type"] == "directory" else entry["size"] for name, entry in names.items()}

    def move(self, source: str, target: str) -> None:
        """See `Storage`. Copies, then removes the source; an existing target is kept under `ASIDE` meanwhile.

        At any point of the sequence either the old or the new folder is complete with its seals, under its name or
        the old one.
        """
        existing = self.list(target)
        # A single file: object stores replace an object atomically.
        if not self._is_folder(source):
            with self._translate_errors(source):
                self._filesystem.copy(self._full_path(source), self._full_path(target))
            self.remove(source)
            return
        old_path = check_path(target) + ASIDE
        # The target is a complete checkpoint. It is copied to `old_path` before it loses its files, so that a reader
        # always finds one.
        if existing.keys() & set(CHECKPOINT_FILES):
            self.remove(old_path)
            self._copy_folder(target, old_path)
        self.remove(target)  # without a seal: an incomplete folder, whose complete copy may be at `old_path`
        # A crash in here leaves a target without a manifest. Readers then use the copy at `old_path`, if there was an
        # old checkpoint.
        self._copy_folder(source, target)
        self.remove(source)
        self.remove(old_path)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        if self._is_folder(path):
            # First the files that make the folder a checkpoint. An interrupted removal then leaves a folder that no
            # reader accepts.
            for name in CHECKPOINT_FILES:
                self._discard(f"{self._full_path(path)}/{name}")
        with self._translate_errors(path):
            try:
                self._filesystem.rm(self._full_path(path), recursive=True)
            except FileNotFoundError:
                return

    def _copy_folder(self, source: str, target: str) -> None:
        entries = self.list(source)
        # seals last, and `manifest.json` last of all
        for name in sorted(entries, key=lambda name: (name in CHECKPOINT_FILES, name == CHECKPOINT_FILES[0], name)):
            if entries[name] is None:
                self._copy_folder(f"{source}/{name}", f"{target}/{name}")
                continue
            with self._translate_errors(f"{source}/{name}"):
                self._filesystem.makedirs(self._full_path(target), exist_ok=True)
                self._filesystem.copy(self._full_path(f"{source}/{name}"), self._full_path(f"{target}/{name}"))

    def _is_folder(self, path: str) -> bool:
        with self._translate_errors(path):
            return bool(self._filesystem.isdir(self._full_path(path)))

    def _discard(self, target: str) -> None:
        try:
            self._filesystem.rm_file(target)
        except FileNotFoundError:
            pass  # it was never created

    def _full_path(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}".rstrip("/")

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        """Convert an exception of the service's client to an OSError that names the path."""
        try:
            with add_filename(f"{self.url}/{path}"):
                yield
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", f"{self.url}/{path}") from error
