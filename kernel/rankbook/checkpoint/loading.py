"""Load a checkpoint on any number of ranks: find it, plan the reads, verify checksums, fill the tensors.

`load` is a collective, and the number of ranks may differ from the number that saved. Every rank passes a sharded state
dict that describes what it wants. A load has four phases, and no rank raises alone between their collectives
(`consistency.RankGroup`):

1. Find: rank 0 chooses the checkpoint, reads its manifest and broadcasts it (`find_checkpoint`).

2. Plan: every rank plans its reads (`planning/load_plan.py`), and rank 0 decides about keys that do not match
   (`decide_keys`).

3. Verify: every rank reads its objects and the common part, and compares the bytes of its tensors with their checksums.
   It writes to no tensor, so a damaged checkpoint leaves the model as it was.

4. Fill: every rank reads into its tensors, in place (`format/tensor_io.py`).

`Loader` is one rank's part in a load, `CheckpointRead` does its reads, and `CheckpointRef` is a checkpoint with its
manifest. `load_plain` and `load_metadata` read a checkpoint in one process, without collectives.
"""

from __future__ import annotations

import io
import logging
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from rankbook.checkpoint.consistency import RankGroup, RanksFailed, check_same_arguments, folder_key
from rankbook.checkpoint.format import dcp_metadata, torch_blobs
from rankbook.checkpoint.format.checksums import crc32
from rankbook.checkpoint.format.manifest import MANIFEST, PIECE, Manifest, StoredObject
from rankbook.checkpoint.format.structure import decode, sizes_match
from rankbook.checkpoint.format.tensor_io import ChunkDamage, data_matches, envelope_matches, read_into, verify_chunk
from rankbook.checkpoint.format.torch_zip import is_plain, zip_is_intact
from rankbook.checkpoint.local_state import LoadRequest, LocalTensor, request_everything
from rankbook.checkpoint.planning.load_plan import ChunkRead, ReadPlan, plan_read
from rankbook.checkpoint.planning.validation import said
from rankbook.checkpoint.saving import Folder
from rankbook.checkpoint.storage import steps
from rankbook.checkpoint.storage.base import ASIDE, Storage, read_all, read_range
from rankbook.checkpoint.storage.local import storage_of
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.ranks import group_ranks

MOST_KEYS_SAID = 8
"""Maximum number of keys of one kind that an error message lists."""


class StrictHandling(Enum):
    """Modes for unexpected keys (requested, not stored) and missing keys (stored, requested by no rank).

    Keys that a mode does not raise an error about keep the values that they have.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Default. Missing keys are not looked for; an unexpected key is an error when it is to be read."""
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    """`load` returns (state dict, missing keys, unexpected keys); the set of missing keys is empty."""
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @classmethod
    def of(cls, mode: str | StrictHandling) -> StrictHandling:
        """Return the mode with this name; return a mode unchanged. Raises `BadRequest` for an unknown name."""
        if isinstance(mode, str) and mode.lower() in cls._value2member_map_:
            return cls(mode.lower())
        if not isinstance(mode, cls):
            raise BadRequest(f"strict={mode!r} is no mode: one of {', '.join(member.value for member in cls)}")
        return mode

    @property
    def asks_all_ranks(self) -> bool:
        """Return True if the mode depends on the keys that the other ranks request."""
        return self in {StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL}

    @property
    def returns_keys(self) -> bool:
        """Return True if `load` returns the mismatched keys beside the state dict."""
        return self in {StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL}


class Decision(NamedTuple):
    """Result of comparing requested keys with stored keys; the same on every rank.

    `error` and `warning` are sentences, "" for none. `skipped` holds the requested keys that are not to be read.
    `missing` and `unexpected` are what `load` returns in a mode with `returns_keys`, and empty in the other modes.
    """

    error: str
    warning: str
    skipped: frozenset[str]
    missing: frozenset[str]
    unexpected: frozenset[str]


def decide_keys(
    asked: Sequence[Collection[str]], stored: Collection[str], mode: StrictHandling, where: str
) -> Decision:
    """Decide about the keys that do not match between the ranks' requests and the checkpoint.

    `asked` holds the keys that the ranks request, in order of ranks, `stored` the keys of the checkpoint, and `where`
    its name for messages.
    """
    stored_keys = set(stored)
    ranks = group_ranks((rank, key) for rank, keys in enumerate(asked) for key in set(keys) - stored_keys)
    unexpected = dict(sorted(ranks.items()))
    missing = sorted(stored_keys.difference(*asked)) if mode.asks_all_ranks else []
    none: frozenset[str] = frozenset()
    decision = Decision("", "", frozenset(unexpected), none, none)
    if not unexpected and not missing:
        return decision
    match mode:
        case StrictHandling.IGNORE_ALL:
            return decision
        case StrictHandling.RETURN_UNEXPECTED | StrictHandling.RETURN_ALL:
            return decision._replace(missing=frozenset(missing), unexpected=frozenset(unexpected))
        case StrictHandling.LOG_UNEXPECTED | StrictHandling.LOG_ALL:
            return decision._replace(warning=f"{_say(unexpected, missing, where)}. The rest is loaded")
    more = "log_all" if missing else "log_unexpected"
    return decision._replace(error=f"{_say(unexpected, missing, where)}. strict={more!r} loads the rest", skipped=none)


def _say(unexpected: dict[str, list[int]], missing: Sequence[str], where: str) -> str:
    parts = []
    if unexpected:
        keys = [f"{key!r} ({said(ranks)})" for key, ranks in unexpected.items()]
        parts.append(f"unexpected keys, asked for and not in the checkpoint: {_some(keys)}")
    if missing:
        keys = [repr(key) for key in missing]
        parts.append(f"missing keys, in the checkpoint and asked for by no rank: {_some(keys)}")
    return f"{where}: {'; '.join(parts)}"


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - MOST_KEYS_SAID
    return ", ".join([*keys[:MOST_KEYS_SAID], f"and {more} more"] if more > 0 else keys)


Step = int | Literal["latest"]

logger = logging.getLogger(__name__)


def load(
    sharded_state_dict: Any,  # noqa: ANN401 - nested dicts and lists
    folder: Folder,
    *,
    step: Step | None = "latest",
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify: bool = True,
    cast: bool = False,
    allow: Sequence[type | str] = (),
) -> Any:  # noqa: ANN401 - nested as the given one
    """Load this rank's part of a checkpoint. A collective: every rank calls it.

    `folder` is a folder of steps, from which `step` is loaded, or the folder of a checkpoint itself. The state dict
    says what is wanted, as for `save`, in any layout. Tensors are read in place, into the memory of its entries; a
    ShardedTensor without data gets new memory on the CPU. Returns a state dict with the same nesting, with plain values
    in place of sharded entries, and the stored common part. In a strict mode that returns keys, returns (state dict,
    missing keys, unexpected keys).

    With `verify`, checksums are compared. A dtype that differs from the stored one is an error unless `cast` is set.
    `allow` lists classes, or their names, that stored objects may have in addition to those that torch considers safe.

    Raises `BadRequest` if arguments are invalid or differ between ranks. Raises `CheckpointingException`, the same on
    every rank, if the checkpoint does not exist, if keys, shapes or dtypes do not match, or if a part of it is damaged;
    the message names the file, the key and the rank that wrote it.

    All requested data is verified on all ranks before the first tensor of the state dict is written, so a damaged
    checkpoint leaves all tensors unchanged. The exceptions are loads that read the bytes only once: without `verify`,
    with more bytes than the machine's memory can hold until the second read, or with many bytes from remote storage. If
    such a load fails, the error names the tensors that are partly overwritten.

        state = load(sharded_state_dict(model, optimizer), "checkpoints", step=100)
    """
    prepared = prepare_load(sharded_state_dict, folder, step=step, strict=strict, verify=verify, cast=cast, allow=allow)
    state, decision = prepared.fill(), prepared.decision
    if prepared.mode.returns_keys:
        return state, set(decision.missing), set(decision.unexpected)
    return state


def prepare_load(
    sharded_state_dict: Any,  # noqa: ANN401 - nested dicts and lists
    folder: Folder,
    *,
    step: Step | None = "latest",
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify: bool = True,
    cast: bool = False,
    allow: Sequence[type | str] = (),
) -> Loader:
    """Perform all phases of `load` before the first write to a tensor, and return the loader.

    `Loader.fill` does the rest.
    """
    mode, storage, _ = check_same_arguments(
        "load",
        lambda: (StrictHandling.of(strict), storage_of(folder), steps.requested_step(step)),
        folder=folder_key(folder),
        step=step,
        strict=str(getattr(strict, "value", strict)).lower(),
        verify=verify,
        cast=cast,
    )
    checkpoint = find_checkpoint(storage, step)
    loader = Loader(
        checkpoint,
        lambda: LoadRequest(sharded_state_dict, checkpoint.manifest),
        mode=mode,
        verify=verify,
        cast=cast,
        allow=allow,
        ranks=RankGroup(),
    )
    return loader.prepare()


class Request(NamedTuple):
    """Summary of a rank's read plan for rank 0.

    `keys` holds all keys that the rank requests if the mode `asks_all_ranks`, otherwise only those that are not stored.
    """

    keys: set[str]
    mismatches: list[str]


class Loader:
    """Load one rank's part of a checkpoint.

    The methods are called in this order: `plan`, `decide` on rank 0, `verify`, `read`, `assemble`.
    """

    def __init__(
        self,
        found: CheckpointRef,
        wishes: Callable[[], LoadRequest],
        *,
        mode: StrictHandling,
        verify: bool,
        cast: bool = False,
        allow: Sequence[type | str] = (),
        ranks: RankGroup,
    ) -> None:
        self.mode = mode
        self.decision = Decision("", "", frozenset(), frozenset(), frozenset())
        self._found = found
        self._make_wishes = wishes
        self._cast = cast
        self._fetch = CheckpointRead(found, verify=verify, allow=allow)
        self._ranks = ranks

    def prepare(self) -> Self:
        """Plan and verify on all ranks, without writing to a tensor. A collective; raises as `load`."""
        try:
            self.decision = self._ranks.exchange(self.plan, self.decide)
            self._ranks.run(self.verify)
        except RanksFailed as failure:
            failure.reraise("load")
        if self.decision.warning and self._ranks.rank == 0:
            logger.warning(self.decision.warning)
        return self

    def fill(self) -> Any:  # noqa: ANN401 - nested as the given one
        """Read the tensors and return the assembled state dict. A collective; raises as `load`."""
        try:
            self._ranks.run(self.read)
        except RanksFailed as failure:
            failure.reraise("load")
        return self.assemble()

    def plan(self) -> Request:
        """Plan this rank's reads and return the summary for rank 0."""
        self._wishes = self._make_wishes()
        stored = self._found.manifest
        self._read_plan = plan_read([tensor.wanted() for tensor in self._wishes.tensors], stored, cast=self._cast)
        keys = {tensor.key for tensor in self._wishes.tensors} | {entry.unique_key for entry in self._wishes.objects}
        if not self.mode.asks_all_ranks:
            keys = {key for key in keys if key not in stored.tensors and key not in stored.objects}
        return Request(keys, [mismatch.what for mismatch in self._read_plan.mismatches])

    def decide(self, requests: list[Request]) -> list[Decision]:
        """Decide on rank 0 about mismatches and unmatched keys, and return the same decision for every rank.

        Raises `CheckpointingException` for mismatched shapes or dtypes, and for keys if the mode says so.
        """
        mismatches = group_ranks(
            (rank, mismatch) for rank, request in enumerate(requests) for mismatch in request.mismatches
        )
        if mismatches:
            lines = [f"{mismatch} ({said(ranks)})" for mismatch, ranks in mismatches.items()]
            more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
            raise CheckpointingException(
                f"the checkpoint {self._found} does not have what was asked for:\n  " + "\n  ".join([*lines[:8], *more])
            )
        manifest = self._found.manifest
        sharded = [*manifest.tensors, *(key for key in manifest.objects if key not in manifest.values)]
        decision = decide_keys([request.keys for request in requests], sharded, self.mode, str(self._found))
        if decision.error:
            raise CheckpointingException(decision.error)
        return [decision] * len(requests)

    def verify(self) -> None:
        """Read the objects and the common part, and compare the tensors' bytes with their checksums."""
        fetch = self._fetch
        self._objects = fetch.objects([entry.unique_key for entry in self._wishes.objects])
        self._common = fetch.common(self._wishes)
        if self._ranks.rank == 0:
            fetch.small_files()
        fetch.verify(self._read_plan, self._wishes.fresh, ranks=1 if self._ranks.alone else _ranks_of_this_machine())
        fetch.conclude()

    def read(self) -> None:
        """Read the stored data into the tensors."""
        self._fetch.tensors(self._read_plan, self._wishes.tensors, self._wishes.fresh)
        self._fetch.conclude()

    def assemble(self) -> Any:  # noqa: ANN401 - nested as the given one
        """Return the state dict, with loaded values in place of the sharded entries."""
        return self._wishes.assembled(self._objects, self._common, self.decision.skipped)


def _ranks_of_this_machine() -> int:
    """Return the number of ranks on this machine, which load at the same time."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() and int(count) else dist.get_world_size()


def load_plain(
    folder: Folder, *, step: Step | None = "latest", verify: bool = True, allow: Sequence[type | str] = ()
) -> Any:  # noqa: ANN401 - nested dicts and lists
    """Load a whole checkpoint in this process alone: full tensors and objects by key, and the common part.

    No sharded state dict and no process group are needed. Raises `CheckpointingException` as `load` does.

        state = load_plain("checkpoints", step=100)
    """
    checkpoint = find_checkpoint(storage_of(folder), step, together=False)
    checkpoint.check_sizes()  # before memory is allocated according to the manifest
    loader = Loader(
        checkpoint,
        lambda: LoadRequest(request_everything(checkpoint.manifest), checkpoint.manifest, all_values=True),
        mode=StrictHandling.RAISE_ALL,
        verify=verify,
        allow=allow,
        ranks=RankGroup(alone=True),
    )
    return loader.prepare().fill()


def load_metadata(folder: Folder, *, step: Step | None = "latest") -> Manifest:
    """Read the manifest of a checkpoint: step, time, world size, user metadata, and the chunks of every tensor.

    Raises `CheckpointingException` if there is no checkpoint, or if its manifest is damaged.
    """
    return find_checkpoint(storage_of(folder), step, together=False).manifest


@dataclass(frozen=True)
class CheckpointRef:
    """Readable checkpoint: its folder within a storage, and its manifest.

    `folder` is "" if the root of the storage is itself the checkpoint.
    """

    storage: Storage
    folder: str
    manifest: Manifest

    def path(self, file: int | str) -> str:
        """Return the path within the storage of a file, given by its number in the manifest or its name."""
        name = self.manifest.files[file].name if isinstance(file, int) else file
        return f"{self.folder}/{name}" if self.folder else name

    def check_sizes(self) -> None:
        """Raise `CheckpointingException` if a file is smaller than the manifest says."""
        sizes_match(self.manifest, self.storage.list(self.folder), str(self))

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}" if self.folder else str(self.storage)


def find_checkpoint(storage: Storage, step: Step | None, *, together: bool = True) -> CheckpointRef:
    """Return the checkpoint that `step` selects in `storage`.

    With `together` this is a collective: rank 0 chooses and broadcasts. Raises `CheckpointingException`, the same on
    every rank, if there is no checkpoint or if its manifest is damaged.
    """
    if not (together and dist.is_initialized()):
        try:
            return _choose(storage, step)
        except OSError as error:
            raise CheckpointingException(f"{storage} cannot be read: {type(error).__name__}: {error}") from error
    payload: list[Any] = [None]
    checkpoint: CheckpointRef | None = None
    if dist.get_rank() == 0:
        try:
            checkpoint = _choose(storage, step)
            payload = [(checkpoint.folder, checkpoint.manifest, None)]
        except CheckpointingException as error:
            payload = [("", None, f"{error}")]
        except Exception as error:  # noqa: BLE001 - raised below on every rank: the others wait in the broadcast
            payload = [("", None, f"{storage} cannot be read: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(payload, src=0)
    folder, manifest, complaint = payload[0]
    if complaint is not None:
        raise CheckpointingException(complaint)
    return checkpoint or CheckpointRef(storage, folder, manifest)


def _choose(storage: Storage, step: Step | None) -> CheckpointRef:
    while True:
        folder = steps.locate(storage, step)
        try:
            return _read(storage, folder)
        except (CheckpointingException, FileNotFoundError):
            if steps.requested_step(step) is not None or steps.locate(storage, step) == folder:
                raise
            # `latest` has changed: another process has saved the next step and removed this one, so try again


def _read(storage: Storage, folder: str) -> CheckpointRef:
    prefix = f"{folder}/" if folder else ""
    if MANIFEST in storage.list(folder):
        where = f"{storage}/{prefix}{MANIFEST}"
        manifest = decode(read_all(storage, f"{prefix}{MANIFEST}"), where)
        step = steps.parse_step(folder.removesuffix(ASIDE))
        if folder and manifest.step != step:
            raise CheckpointingException(
                f"{where}: it is of step {manifest.step}, and lies in the folder of step {step}"
            )
        return CheckpointRef(storage, folder, manifest)
    return CheckpointRef(storage, folder, dcp_metadata.manifest_from_dcp(storage, folder))


COMMON = "common.pt"
MOST_SAID = 8
_LITTLE = 64 * PIECE
"""Limit in bytes up to which data is read twice even from remote storage."""
_SCRATCH = 2 * PIECE
"""Bytes that a thread verifies at a time: few enough to stay in the CPU cache between read and checksum."""


class Refused(ChunkDamage):
    """Intact bytes that are not unpickled, because they may run code."""


def _named(allowed: Any) -> Any:  # noqa: ANN401 - a class or a function, or its name
    if not isinstance(allowed, str):
        return allowed
    try:
        return pkgutil.resolve_name(allowed)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(f'allow=[{allowed!r}]: "package.module.Name" of a class that can be imported here') from error


class CheckpointRead:
    """Read the tensors, objects and common part of one checkpoint on one rank, and collect the damage.

    `allow` lists classes, or their names, that objects may have in addition to those that torch considers safe.
    """

    def __init__(self, found: CheckpointRef, *, verify: bool, allow: Sequence[Any] = ()) -> None:
        self._found = found
        self._verify = verify
        self._allow = [_named(entry) for entry in allow]
        if np.dtype in self._allow:  # a dtype object is an instance of a subclass such as `Float64DType`
            self._allow += [dtype_class for dtype_class in vars(np.dtypes).values() if isinstance(dtype_class, type)]
        self.damages: list[str] = []
        self._refused = 0
        self._torn: dict[str, None] = {}

    def verify(self, plan: ReadPlan, fresh: Collection[int], *, ranks: int = 1) -> None:
        """Compare the bytes of all targets except the `fresh` ones with their checksums, without writing.

        `ranks` is the number of processes on this machine that verify at the same time.
        """
        # A chunk that is read only into fresh memory is not read twice: its checksum is compared during the read.
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
                verify_chunk(chunk, self._reader(chunk), scratch)

    def _reader(self, chunk: ChunkRead) -> Any:  # noqa: ANN401 - a tensor_io.ReadRange
        return partial(self._found.storage.read, self._found.path(chunk.file))

    def tensors(self, plan: ReadPlan, targets: Sequence[LocalTensor], fresh: Collection[int] = ()) -> None:
        """Read stored data into the targets.

        If that fails, the memory of `fresh` targets is discarded; other targets are reported as partly overwritten.
        """
        views = [target.data.detach().view(target.local_shape) for target in targets]
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
        if check and not envelope_matches(stored, read):
            raise ChunkDamage("has other bytes around its data than were written")
        if check and len(stored.pieces) == 1 and stored.nbytes > PIECE:  # of another program: one checksum
            if not data_matches(stored, read):
                raise ChunkDamage("has other data than was written")
            check = False
        for part in chunk.reads:
            target = views[part.wanted]
            for axis, (at, size) in enumerate(zip(part.target, part.shape, strict=True)):
                target = target.narrow(axis, at, size)
            read_into(target, chunk, part, read, check)

    def objects(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the objects with these unique keys, as far as the checkpoint has them."""
        # every object is stored in a list of one element, as Megatron-Core does
        values = self._objects(keys)
        return {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in values.items()
        }

    def _objects(self, keys: Collection[str]) -> dict[str, Any]:
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
            raise ChunkDamage("ends too early")
        if self._verify and stored.crc is not None and crc32(blob) != stored.crc:
            raise ChunkDamage("has other bytes than were written")
        if self._verify and stored.crc is None and not zip_is_intact(bytes(blob)):
            raise ChunkDamage("has other bytes than were written")
        return self._unpickled(blob)

    def common(self, wishes: LoadRequest) -> Any:  # noqa: ANN401 - nested dicts and lists
        """Return the common part, {} if there is none.

        If every value of it is stored as an object of its own, return those that `wishes` asks for.
        """
        files = {file.name: file for file in self._found.manifest.files}
        stored = files.get(COMMON)
        if stored is None:
            paths = wishes.values(self._found.manifest.values)
            values = self._objects(paths)
            return wishes.nested((path, values[key]) for key, path in paths.items() if key in values)
        with self._naming(f"{COMMON}: the common part, written by rank {stored.rank}"):
            data = read_all(self._found.storage, self._found.path(COMMON))
            if self._verify and stored.crc is not None and (crc32(data), len(data)) != (stored.crc, stored.size):
                raise ChunkDamage("has other bytes than were written")
            if self._verify and stored.crc is None and not zip_is_intact(data):
                raise ChunkDamage("has other bytes than were written")
            return self._unpickled(data)
        return {}

    def small_files(self) -> None:
        """Verify the files that only other programs read, and the sizes of all files."""
        for file in self._found.manifest.files:
            if self._verify and file.crc is not None and file.name != COMMON:
                with self._naming(f"{file.name}, written by rank {file.rank}"):
                    data = read_all(self._found.storage, self._found.path(file.name))
                    if (crc32(data), len(data)) != (file.crc, file.size):
                        raise ChunkDamage("has other bytes than were written")
        sizes = self._found.storage.list(self._found.folder)
        for file in self._found.manifest.files:
            if self._verify and sizes.get(file.name, file.size) != file.size:
                self.damages.append(
                    f"{file.name}, written by rank {file.rank}: has {sizes[file.name]} bytes, not {file.size}"
                )

    def _unpickled(self, data: Any) -> Any:  # noqa: ANN401 - whatever was saved
        if not is_plain(data):
            raise ChunkDamage("is no plain zip of torch.save")
        with torch.serialization.safe_globals(self._allow):
            try:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:
                kind = Refused if self._verify else ChunkDamage  # verified bytes are intact
                # torch names the first unsafe global; `unsafe_globals` finds all of them
                if (named := re.search(r"GLOBAL (\S+)", str(error))) is None:
                    short = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))  # omit torch's page of advice
                    raise kind(f"cannot be read: {short[1] if short else error}") from error
                names = torch_blobs.unsafe_globals(data) or [named[1]]
                raise kind(
                    f"holds {', '.join(names)}, which may run code when it is loaded: if you trust it, give that to "
                    f"allow={names}"
                ) from error

    @contextmanager
    def _naming(self, where: str) -> Iterator[None]:
        try:
            yield
        except ChunkDamage as damage:
            self.damages.append(f"{where}: {damage.what}")
            self._refused += isinstance(damage, Refused)
        except OSError as error:
            self.damages.append(f"{where}: {error.strerror or error}")
        except KeyboardInterrupt as error:
            error.add_note(
                f"The load of {self._found} was broken off at {where}: what it has loaded so far is changed."
            )
            raise
        except Exception as error:  # noqa: BLE001 - reported like damage: out of device memory, a read-only tensor
            self.damages.append(f"{where}: {type(error).__name__}: {error}")

    def conclude(self) -> None:
        """Raise `CheckpointingException` if damage was found."""
        if self.damages:
            more = len(self.damages) - MOST_SAID
            text = "\n  ".join([*self.damages[:MOST_SAID], *([f"and {more} more"] if more > 0 else [])])
            whole = "is whole, and not all of it is loaded unasked"
            verdict = whole if self._refused == len(self.damages) else "is damaged"
            raise CheckpointingException(f"the checkpoint {self._found} {verdict}:\n  {text}{self._state()}")

    def _state(self) -> str:
        """Return a sentence about the tensors that were overwritten only in part, or ""."""
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


def _may_be_read_twice(found: CheckpointRef, nbytes: int) -> bool:
    """Return True if reading these bytes a second time is cheap.

    The second read of a local file comes from the page cache, if memory has room for it; a remote one uses the network.
    """
    if getattr(found.storage, "remote", False):
        return nbytes <= _LITTLE
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:  # not Linux
        match = None
    available = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return nbytes <= max(_LITTLE, available // 2)
