"""What a rank has planned to read, read: tensors in place, objects, the common part.

Owns: that everything that is damaged is found and named, not only the first. Refuses: the plan, and the other ranks.
"""

from __future__ import annotations

import io
import pkgutil
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from rankbook.checkpoint import blobs
from rankbook.checkpoint.checksums import crc32
from rankbook.checkpoint.contents import HeldTensor, Wishes
from rankbook.checkpoint.found import Found
from rankbook.checkpoint.manifest import PIECE, StoredObject
from rankbook.checkpoint.reading import ChunkRead, ReadPlan
from rankbook.checkpoint.stores import read_all
from rankbook.checkpoint.transfer import Damage, data_holds, envelope_holds, fill
from rankbook.checkpoint.zips import zip_holds
from rankbook.errors import BadRequest, CheckpointingException

COMMON = "common.pt"
MOST_SAID = 8


class Refused(Damage):
    """Bytes that are those that were written, and that may name code."""


def _named(allowed: Any) -> Any:  # noqa: ANN401 - a class or a function, or its name
    if not isinstance(allowed, str):
        return allowed
    try:
        return pkgutil.resolve_name(allowed)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(f'allow=[{allowed!r}]: "package.module.Name" of a class that can be imported here') from error


class Fetch:
    """One rank's reading of one checkpoint.

    `allow` are classes, or their names, that its objects may have, beside those that torch takes for safe.
    """

    def __init__(self, found: Found, *, verify: bool, allow: Sequence[Any] = ()) -> None:
        self._found = found
        self._verify = verify
        self._allow = [_named(each) for each in allow]
        if np.dtype in self._allow:  # each of its values is of a class of its own
            self._allow += [each for each in vars(np.dtypes).values() if isinstance(each, type)]
        self.damages: list[str] = []
        self._refused = 0

    def tensors(self, plan: ReadPlan, targets: Sequence[HeldTensor]) -> None:
        """Fill the targets' data."""
        views = [each.data.detach().view(each.local_shape) for each in targets]
        for number in plan.zeros:
            views[number].zero_() if views[number].element_size() > 1 else views[number].view(torch.uint8).zero_()
        for chunk in plan.chunks:
            where = (
                f"{chunk.file}: key {chunk.key!r}, the chunk at {chunk.chunk.offset} written by rank {chunk.chunk.rank}"
            )
            with self._naming(where):
                self._chunk(chunk, views)

    def _chunk(self, chunk: ChunkRead, views: Sequence[torch.Tensor]) -> None:
        read = partial(self._found.storage.read, self._found.path(chunk.file))
        check, stored = self._verify, chunk.chunk
        if check and not envelope_holds(stored, read):
            raise Damage("has other bytes around its data than were written")
        if check and len(stored.pieces) == 1 and stored.nbytes > PIECE:  # another program's
            if not data_holds(stored, read):
                raise Damage("has other data than was written")
            check = False
        for part in chunk.reads:
            target = views[part.wanted]
            for axis, (at, size) in enumerate(zip(part.target, part.shape, strict=True)):
                target = target.narrow(axis, at, size)
            fill(target, chunk, part, read, check)

    def objects(self, keys: Collection[str]) -> dict[str, Any]:
        """The objects of these unique keys that the checkpoint has."""
        found = self._objects(keys)
        return {key: each[0] if isinstance(each, list) and len(each) == 1 else each for key, each in found.items()}

    def _objects(self, keys: Collection[str]) -> dict[str, Any]:
        """Their blobs, unpickled."""
        loaded: dict[str, Any] = {}
        for key in keys:
            stored = self._found.manifest.objects.get(key)
            if stored is None:
                continue
            name = self._found.manifest.files[stored.file].name
            with self._naming(f"{name}: object {key!r}, written by rank {stored.rank}"):
                loaded[key] = self._object(stored)
        return loaded

    def _object(self, stored: StoredObject) -> Any:  # noqa: ANN401 - whatever was saved
        blob = bytearray(stored.length)
        if self._found.storage.read(self._found.path(stored.file), stored.start, memoryview(blob)) != len(blob):
            raise Damage("ends too early")
        if self._verify and stored.crc is not None and crc32(blob) != stored.crc:
            raise Damage("has other bytes than were written")
        if self._verify and stored.crc is None and not zip_holds(bytes(blob)):
            raise Damage("has other bytes than were written")
        return self._unpickled(blob)

    def common(self, wishes: Wishes) -> Any:  # noqa: ANN401 - nested dicts and lists
        """The common part, {} where there is none; where each of its values is an object of its own, those wished."""
        known = {each.name: each for each in self._found.manifest.files}
        stored = known.get(COMMON)
        if stored is None:
            wanted = wishes.values(self._found.manifest.values)
            values = self._objects(wanted)
            return wishes.nested((path, values[key]) for key, path in wanted.items() if key in values)
        with self._naming(f"{COMMON}: the common part, written by rank {stored.rank}"):
            data = read_all(self._found.storage, self._found.path(COMMON))
            if self._verify and stored.crc is not None and (crc32(data), len(data)) != (stored.crc, stored.size):
                raise Damage("has other bytes than were written")
            if self._verify and stored.crc is None and not zip_holds(data):
                raise Damage("has other bytes than were written")
            return self._unpickled(data)
        return {}

    def small_files(self) -> None:
        """Check the files that nothing is loaded from, but that other programs read."""
        for each in self._found.manifest.files:
            if self._verify and each.crc is not None and each.name != COMMON:
                with self._naming(f"{each.name}, written by rank {each.rank}"):
                    data = read_all(self._found.storage, self._found.path(each.name))
                    if (crc32(data), len(data)) != (each.crc, each.size):
                        raise Damage("has other bytes than were written")
        sizes = self._found.storage.list(self._found.folder)
        for each in self._found.manifest.files:
            if self._verify and sizes.get(each.name, each.size) != each.size:
                self.damages.append(
                    f"{each.name}, written by rank {each.rank}: has {sizes[each.name]} bytes, not {each.size}"
                )

    def _unpickled(self, data: Any) -> Any:  # noqa: ANN401 - whatever was saved
        with torch.serialization.safe_globals(self._allow):
            try:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:
                kind = Refused if self._verify else Damage  # verified bytes are those that were written
                if (named := re.search(r"GLOBAL (\S+)", str(error))) is None:
                    short = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))  # within half a page of advice
                    raise kind(f"cannot be read: {short[1] if short else error}") from error
                names = blobs.unsafe(data) or [named[1]]
                raise kind(
                    f"holds {', '.join(names)}, which may run code when it is loaded: if you trust it, give that to "
                    f"allow={names}"
                ) from error

    @contextmanager
    def _naming(self, where: str) -> Iterator[None]:
        try:
            yield
        except Damage as damage:
            self.damages.append(f"{where}: {damage.what}")
            self._refused += isinstance(damage, Refused)
        except OSError as error:
            self.damages.append(f"{where}: {error.strerror or error}")

    def conclude(self) -> None:
        """Raises `CheckpointingException` where something was damaged."""
        if self.damages:
            more = len(self.damages) - MOST_SAID
            said = "\n  ".join([*self.damages[:MOST_SAID], *([f"and {more} more"] if more > 0 else [])])
            whole = "is whole, and not all of it is loaded unasked"
            what = whole if self._refused == len(self.damages) else "is damaged"
            raise CheckpointingException(f"the checkpoint {self._found} {what}:\n  {said}")
