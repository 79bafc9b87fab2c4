"""What a rank has planned to read, read: tensors in place, objects, the common part.

Owns: that everything that is damaged is found and named, not only the first. Refuses: the plan, and the other ranks.

Tensors are read twice. `verify` compares all that is wanted with its checksums and writes nothing, so that a damaged
checkpoint leaves a model as it was; `tensors` reads into the model's memory, and checks once more, for a disk may give
other bytes the second time. The second read comes from the system's file cache. Where that cannot hold it, and from a
remote storage, there is no first pass: then the error names the tensors that are neither old nor new.
"""

from __future__ import annotations

import io
import os
import pkgutil
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankbook.checkpoint.format import torch_blobs
from rankbook.checkpoint.format.checksums import crc32
from rankbook.checkpoint.format.manifest import PIECE, StoredObject
from rankbook.checkpoint.format.tensor_io import Damage, data_holds, envelope_holds, fill, verify
from rankbook.checkpoint.format.torch_zip import is_plain, zip_holds
from rankbook.checkpoint.local_state import HeldTensor, Wishes
from rankbook.checkpoint.planning.load_plan import ChunkRead, ReadPlan
from rankbook.checkpoint.storage.base import read_all, read_range
from rankbook.errors import BadRequest, CheckpointingException

if TYPE_CHECKING:
    from rankbook.checkpoint.loading import Found

COMMON = "common.pt"
MOST_SAID = 8
_LITTLE = 64 * PIECE
"""Bytes that are read twice also from afar."""
_SCRATCH = 2 * PIECE
"""Bytes that a thread verifies at a time: they stay in the processor's cache from the read to the checksum."""


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
        self._torn: dict[str, None] = {}

    def verify(self, plan: ReadPlan, fresh: Collection[int], *, ranks: int = 1) -> None:
        """Compare the bytes for all targets but the `fresh` ones with their checksums, and write nothing.

        `ranks`: how many processes of this machine do so at the same time.
        """
        chunks = [chunk for chunk in plan.chunks if not all(part.wanted in fresh for part in chunk.reads)]
        nbytes = sum(last - first for chunk in chunks for first, last in map(chunk.span, chunk.reads))
        if not self._verify or not _may_be_read_twice(self._found, nbytes * ranks):
            return
        threads = max(1, min(4, (os.cpu_count() or 1) // ranks, nbytes // (16 * PIECE)))
        if threads == 1:
            self._verify_chunks(chunks)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._verify_chunks, [chunks[number::threads] for number in range(threads)]))

    def _verify_chunks(self, chunks: Sequence[ChunkRead]) -> None:
        scratch = memoryview(bytearray(_SCRATCH))
        for chunk in chunks:
            with self._naming(_where(chunk)):
                verify(chunk, self._reader(chunk), scratch)

    def _reader(self, chunk: ChunkRead) -> Any:  # noqa: ANN401 - a transfer.ReadRange
        return partial(self._found.storage.read, self._found.path(chunk.file))

    def tensors(self, plan: ReadPlan, targets: Sequence[HeldTensor], fresh: Collection[int] = ()) -> None:
        """Fill the targets' data. The memory of the `fresh` ones is of no use to anybody if that fails."""
        views = [each.data.detach().view(each.local_shape) for each in targets]
        for number in plan.zeros:
            views[number].zero_() if views[number].element_size() > 1 else views[number].view(torch.uint8).zero_()
        for chunk in plan.chunks:
            before = len(self.damages)
            with self._naming(_where(chunk)):
                self._chunk(chunk, views)
            if len(self.damages) > before and not all(part.wanted in fresh for part in chunk.reads):
                self._torn[chunk.key] = None

    def _chunk(self, chunk: ChunkRead, views: Sequence[torch.Tensor]) -> None:
        read = self._reader(chunk)
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
        blob = read_range(self._found.storage, self._found.path(stored.file), stored.start, stored.length)
        if len(blob) != stored.length:
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
        if not is_plain(data):
            raise Damage("is no plain zip of torch.save")
        with torch.serialization.safe_globals(self._allow):
            try:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:
                kind = Refused if self._verify else Damage  # verified bytes are those that were written
                if (named := re.search(r"GLOBAL (\S+)", str(error))) is None:
                    short = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))  # within half a page of advice
                    raise kind(f"cannot be read: {short[1] if short else error}") from error
                names = torch_blobs.unsafe(data) or [named[1]]
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
        except KeyboardInterrupt as error:
            error.add_note(
                f"The load of {self._found} was broken off at {where}: what it has loaded so far is changed."
            )
            raise
        except Exception as error:  # noqa: BLE001 - told like a damage: a device without room, a tensor that cannot be written
            self.damages.append(f"{where}: {type(error).__name__}: {error}")

    def conclude(self) -> None:
        """Raises `CheckpointingException` where something was damaged."""
        if self.damages:
            more = len(self.damages) - MOST_SAID
            said = "\n  ".join([*self.damages[:MOST_SAID], *([f"and {more} more"] if more > 0 else [])])
            whole = "is whole, and not all of it is loaded unasked"
            what = whole if self._refused == len(self.damages) else "is damaged"
            raise CheckpointingException(f"the checkpoint {self._found} {what}:\n  {said}{self._state()}")

    def _state(self) -> str:
        """Say which tensors of the state dict have been written to, and not to their end."""
        if not self._torn:
            return ""
        keys = [repr(key) for key in self._torn]
        more = f" and {len(keys) - MOST_SAID} more" if len(keys) > MOST_SAID else ""
        return (
            f"\n  neither old nor new are now {', '.join(keys[:MOST_SAID])}{more}, and all other tensors are as "
            "stored: load again before any of them is used"
        )


def _where(chunk: ChunkRead) -> str:
    return f"{chunk.file}: key {chunk.key!r}, the chunk at {chunk.chunk.offset} written by rank {chunk.chunk.rank}"


def _may_be_read_twice(found: Found, nbytes: int) -> bool:
    """Whether a second read of so many bytes costs little: it comes from memory, and not from a disk or a network."""
    if getattr(found.storage, "remote", False):
        return nbytes <= _LITTLE
    try:
        known = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:  # not Linux
        known = None
    available = int(known[1]) * 1024 if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return nbytes <= max(_LITTLE, available // 2)
