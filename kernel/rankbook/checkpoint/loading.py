"""Load a checkpoint on any number of ranks: find it, plan the reads, verify checksums, fill the tensors.

`load` is a collective, and the number of ranks may differ from the number that saved. Every rank passes a sharded state
dict that describes what it wants. A load has four phases, and no rank raises alone between their collectives
(`control_collectives.RankGroup`):

1. Find: rank 0 chooses the checkpoint, reads its manifest and broadcasts it (`find_checkpoint`).

2. Plan: every rank plans its reads (`load_plan.py`), and rank 0 decides about keys that do not match
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
import platform
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

from rankbook.checkpoint.format import dcp_metadata, tensor_io
from rankbook.checkpoint.format.manifest import (
    COMMON,
    MANIFEST,
    PIECE,
    Manifest,
    StoredObject,
    crc32,
    decode_valid,
    sizes_match,
)
from rankbook.checkpoint.format.tensor_io import ChunkDamage, data_matches, envelope_matches, read_into, verify_chunk
from rankbook.checkpoint.format.torch_zip import is_plain, zip_is_intact
from rankbook.checkpoint.load_plan import CAST_HINT, ChunkRead, ReadPlan, plan_read
from rankbook.checkpoint.local_state import LoadRequest, LocalTensor, request_everything
from rankbook.checkpoint.storage import ASIDE, SHARED_FOLDER, Storage, read_all, read_range, sees_file, steps
from rankbook.checkpoint.storage.backends import Folder, storage_of
from rankbook.control_collectives import RankGroup, RanksFailed, check_same_arguments, folder_key
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.formatting import truncate_list
from rankbook.ranks import abbreviate_ranks, group_ranks

MAX_LISTED = 8
"""Maximum number of keys, or of damaged parts, that an error message lists."""


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
        """Return the mode with this name; return a mode unchanged. Raises `InvalidArgument` for an unknown name."""
        if isinstance(mode, str) and mode.lower() in cls._value2member_map_:
            return cls(mode.lower())
        if not isinstance(mode, cls):
            raise InvalidArgument(f"unknown strict {mode!r}; choose from {', '.join(member.value for member in cls)}")
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
    requested: Sequence[Collection[str]], stored: Collection[str], mode: StrictHandling, where: str
) -> Decision:
    """Decide about the keys that do not match between the ranks' requests and the checkpoint.

    `requested` holds the keys that the ranks request, in order of ranks, `stored` the keys of the checkpoint, and
    `where` its name for messages.
    """
    # Only rank 0 runs this, with the keys of all ranks, and sends the decision to all.
    stored_keys = set(stored)
    # Example: rank 0 requests "a" and "b", rank 1 requests "b" and "c", and "b" and "d" are stored. Unexpected are
    # {"a": [0], "c": [1]}, with the ranks that request them, and missing is ["d"], which no rank requests.
    ranks = group_ranks((rank, key) for rank, keys in enumerate(requested) for key in set(keys) - stored_keys)
    unexpected = dict(sorted(ranks.items()))
    missing = sorted(stored_keys.difference(*requested)) if mode.asks_all_ranks else []
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
            return decision._replace(warning=f"{_describe_keys(unexpected, missing, where)}. All other keys are loaded")
    # What remains are the modes that raise. The advice is the mode that logs the same keys.
    more = "log_all" if missing else "log_unexpected"
    error = f"{_describe_keys(unexpected, missing, where)}. Pass strict={more!r} to load all other keys"
    return decision._replace(error=error, skipped=none)


def _describe_keys(unexpected: dict[str, list[int]], missing: Sequence[str], where: str) -> str:
    parts = []
    if unexpected:
        keys = [f"{key!r} ({abbreviate_ranks(ranks)})" for key, ranks in unexpected.items()]
        text = ", ".join(truncate_list(keys, MAX_LISTED))
        parts.append(f"unexpected keys (requested, but not in the checkpoint): {text}")
    if missing:
        text = ", ".join(truncate_list([repr(key) for key in missing], MAX_LISTED))
        parts.append(f"missing keys (in the checkpoint, but not requested by any rank): {text}")
    return f"{where}: {'; '.join(parts)}"


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

    Raises `InvalidArgument` if arguments are invalid or differ between ranks. Raises `CheckpointError`, the same on
    every rank, if the checkpoint does not exist, if keys, shapes or dtypes do not match, or if a part of it is damaged;
    the message names the file, the key and the rank that wrote it.

    All requested data is verified on all ranks before the first tensor of the state dict is written, so a damaged
    checkpoint leaves all tensors unchanged. The exceptions are loads that read the bytes only once: without `verify`,
    with more bytes than the machine's memory can hold until the second read, or with many bytes from remote storage. If
    such a load fails, the error names the tensors that are partly overwritten.

    Example::

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
    dtype_hint: str = CAST_HINT,
) -> Loader:
    """Perform all phases of `load` before the first write to a tensor, and return the loader.

    `Loader.fill` does the rest. `dtype_hint` says what to do about another dtype than the stored one.
    """
    # `allow` and the state dict itself are not compared. The first may hold classes, whose texts need not be equal, and
    # the second differs by design.
    mode, storage, _, allowed = check_same_arguments(
        "load",
        lambda: (
            StrictHandling.of(strict),
            storage_of(folder),
            steps.requested_step(step),
            [_resolve_allowed(entry) for entry in allow],  # a name may be importable on some ranks only
        ),
        folder=folder_key(folder),
        step=step,
        strict=str(getattr(strict, "value", strict)).lower(),
        verify=verify,
        cast=cast,
    )
    checkpoint = find_checkpoint(storage, step)
    loader = Loader(
        checkpoint,
        # Not called here: the request is made inside of the first exchange, so that its errors reach all ranks.
        lambda: LoadRequest(sharded_state_dict, checkpoint.manifest),
        mode=mode,
        verify=verify,
        cast=cast,
        allow=allowed,
        dtype_hint=dtype_hint,
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
        checkpoint: CheckpointRef,
        make_request: Callable[[], LoadRequest],
        *,
        mode: StrictHandling,
        verify: bool,
        cast: bool = False,
        allow: Sequence[type | str] = (),
        dtype_hint: str = CAST_HINT,
        ranks: RankGroup,
    ) -> None:
        self.mode = mode
        self.decision = Decision("", "", frozenset(), frozenset(), frozenset())
        self.common: Any = {}
        self._checkpoint = checkpoint
        self._make_request = make_request
        self._cast = cast
        self._dtype_hint = dtype_hint
        self._reader = CheckpointRead(checkpoint, verify=verify, allow=allow)
        self._ranks = ranks

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the checkpoint that is loaded."""
        return self._checkpoint.manifest

    def prepare(self) -> Self:
        """Plan and verify on all ranks, without writing to a tensor. A collective; raises as `load`."""
        try:
            # Phases 2 and 3 of the module's docstring. `exchange` and `run` are the only collectives of a load after
            # the manifest was broadcast.
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
        if not sees_file(self._checkpoint.storage, self._checkpoint.path(0) if self._checkpoint.manifest.files else ""):
            raise CheckpointError(
                f"rank {self._ranks.rank} on {platform.node()} does not see {self._checkpoint}: {SHARED_FOLDER}"
            )
        self._request = self._make_request()
        stored = self._checkpoint.manifest
        self._read_plan = plan_read(
            [tensor.read_request() for tensor in self._request.tensors],
            stored,
            cast=self._cast,
            dtype_hint=self._dtype_hint,
        )
        keys = {tensor.key for tensor in self._request.tensors} | {entry.unique_key for entry in self._request.objects}
        if not self.mode.asks_all_ranks:
            # Most modes need only the unexpected keys, so the others are not sent: a model has thousands of keys, and a
            # job may have thousands of ranks.
            keys = {key for key in keys if key not in stored.tensors and key not in stored.objects}
        return Request(keys, [mismatch.what for mismatch in self._read_plan.mismatches])

    def decide(self, requests: list[Request]) -> list[Decision]:
        """Decide on rank 0 about mismatches and unmatched keys, and return the same decision for every rank.

        Raises `CheckpointError` for mismatched shapes or dtypes, and for keys if the mode says so.
        """
        mismatches = group_ranks(
            (rank, mismatch) for rank, request in enumerate(requests) for mismatch in request.mismatches
        )
        if mismatches:
            lines = [f"{mismatch} ({abbreviate_ranks(ranks)})" for mismatch, ranks in mismatches.items()]
            raise CheckpointError(
                f"the checkpoint {self._checkpoint} does not match the request:\n  "
                + "\n  ".join(truncate_list(lines, MAX_LISTED))
            )
        manifest = self._checkpoint.manifest
        # Values that another program has stored as objects belong to the common part, and are not missing.
        sharded = [*manifest.tensors, *(key for key in manifest.objects if key not in manifest.values)]
        decision = decide_keys([request.keys for request in requests], sharded, self.mode, str(self._checkpoint))
        if decision.error:
            raise CheckpointError(decision.error)
        return [decision] * len(requests)

    def verify(self) -> None:
        """Read the objects and the common part, and compare the tensors' bytes with their checksums."""
        reader = self._reader
        self._objects = reader.read_objects([entry.unique_key for entry in self._request.objects])
        # Every rank reads the common part itself. It is small, and sending it would be one more collective.
        self.common = reader.read_common(self._request)
        # Small files are read by other programs only, so one rank verifies them for all.
        if self._ranks.rank == 0:
            reader.verify_small_files()
        reader.verify(self._read_plan, self._request.fresh, ranks=1 if self._ranks.alone else _ranks_of_this_machine())
        reader.raise_damage()

    def read(self) -> None:
        """Read the stored data into the tensors."""
        self._reader.read_tensors(self._read_plan, self._request.tensors, self._request.fresh)
        self._reader.raise_damage()

    def assemble(self) -> Any:  # noqa: ANN401 - nested as the given one
        """Return the state dict, with loaded values in place of the sharded entries."""
        return self._request.assemble(self._objects, self.common, self.decision.skipped)


def _ranks_of_this_machine() -> int:
    """Return the number of ranks on this machine, which load at the same time."""
    # All ranks, if the number is unknown: memory and cores are then shared among too many, which is the safe side.
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() and int(count) else dist.get_world_size()


def load_plain(
    folder: Folder, *, step: Step | None = "latest", verify: bool = True, allow: Sequence[type | str] = ()
) -> Any:  # noqa: ANN401 - nested dicts and lists
    """Load a whole checkpoint in this process alone: full tensors and objects by key, and the common part.

    No sharded state dict and no process group are needed. `step`, `verify` and `allow` are those of `load`. Raises
    `CheckpointError` as `load` does, and if a name stands for a tensor or an object and for a plain value.

    Example::

        state = load_plain("checkpoints", step=100)
        state["bias"].shape  # torch.Size([1])
    """
    checkpoint = find_checkpoint(storage_of(folder), step, collective=False)
    checkpoint.check_sizes()  # before memory is allocated according to the manifest
    manifest = checkpoint.manifest
    loader = Loader(
        checkpoint,
        lambda: LoadRequest(request_everything(manifest), manifest, all_values=True),
        mode=StrictHandling.RAISE_ALL,
        verify=verify,
        allow=allow,
        ranks=RankGroup(alone=True),
    ).prepare()
    # The key of a tensor is not its path in the state dict that was saved, so a plain value may have the same name.
    keys = {*manifest.tensors, *(manifest.objects.keys() - manifest.values.keys())}
    if isinstance(loader.common, dict) and (both := sorted(keys & loader.common.keys())):
        raise CheckpointError(
            f"{checkpoint}: both a tensor or object and a plain value are stored as "
            f"{', '.join(truncate_list(list(map(repr, both)), MAX_LISTED))}: load them with a state dict, by load()"
        )
    return loader.fill()


def load_metadata(folder: Folder, *, step: Step | None = "latest") -> Manifest:
    """Read the manifest of a checkpoint: step, time, world size, user metadata, and the chunks of every tensor.

    Raises `CheckpointError` if there is no checkpoint, or if its manifest is damaged.

    Example::

        sorted(load_metadata("checkpoints", step=100).tensors)[:2]  # ['bias', 'optimizer.state.bias.exp_avg']
    """
    return find_checkpoint(storage_of(folder), step, collective=False).manifest


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
        """Raise `CheckpointError` if a file is smaller than the manifest says."""
        sizes_match(self.manifest, self.storage.list(self.folder), str(self))

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}" if self.folder else str(self.storage)


def find_checkpoint(storage: Storage, step: Step | None, *, collective: bool = True) -> CheckpointRef:
    """Return the checkpoint that `step` selects in `storage`.

    With `collective` this is a collective: rank 0 chooses and broadcasts. Raises `CheckpointError`, the same on
    every rank, if there is no checkpoint or if its manifest is damaged.
    """
    if not (collective and dist.is_initialized()):
        try:
            return _find_step(storage, step)
        except OSError as error:
            raise CheckpointError(f"{storage} cannot be read: {type(error).__name__}: {error}") from error
    # What rank 0 sends: (folder, manifest, error text). One of the last two is None. An exception object is not sent,
    # because not every exception can be unpickled.
    payload: list[Any] = [None]
    # The other ranks get folder and manifest from rank 0. On a network file system they might see another `latest`.
    checkpoint: CheckpointRef | None = None
    if dist.get_rank() == 0:
        try:
            checkpoint = _find_step(storage, step)
            payload = [(checkpoint.folder, checkpoint.manifest, None)]
        except CheckpointError as error:
            payload = [("", None, f"{error}")]
        except Exception as error:  # noqa: BLE001 - raised below on every rank: the others wait in the broadcast
            payload = [("", None, f"{storage} cannot be read: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(payload, src=0)
    folder, manifest, problem = payload[0]
    if problem is not None:
        raise CheckpointError(problem)
    return checkpoint or CheckpointRef(storage, folder, manifest)


def _find_step(storage: Storage, step: Step | None) -> CheckpointRef:
    while True:
        folder = steps.locate(storage, step)
        try:
            return _read(storage, folder)
        except (CheckpointError, FileNotFoundError):
            if steps.requested_step(step) is not None or steps.locate(storage, step) == folder:
                raise
            # `latest` has changed: another process has saved the next step and removed this one, so try again


def _read(storage: Storage, folder: str) -> CheckpointRef:
    prefix = f"{folder}/" if folder else ""
    if MANIFEST in storage.list(folder):
        where = f"{storage}/{prefix}{MANIFEST}"
        manifest = decode_valid(read_all(storage, f"{prefix}{MANIFEST}"), where)
        step = steps.parse_step(folder.removesuffix(ASIDE))
        # The root of a storage may have any name, a step's folder may not. An `Accelerator` saves without a step.
        if folder and manifest.step not in {step, None}:
            raise CheckpointError(f"{where}: the manifest is of step {manifest.step}, but the folder is of step {step}")
        return CheckpointRef(storage, folder, manifest)
    return CheckpointRef(storage, folder, dcp_metadata.manifest_from_dcp(storage, folder))


_SMALL_READ = 64 * PIECE
"""Limit in bytes up to which data is read twice even from remote storage."""
_SCRATCH_BYTES = 2 * PIECE
"""Bytes that a thread verifies at a time: few enough to stay in the CPU cache between read and checksum."""


class UnsafePickle(ChunkDamage):
    """Intact bytes that are not unpickled, because they may run code."""


def _resolve_allowed(allowed: Any) -> Any:  # noqa: ANN401 - a class or a function, or its name
    if not isinstance(allowed, str):
        return allowed
    try:
        return pkgutil.resolve_name(allowed)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f'invalid allow=[{allowed!r}]: expected "package.module.Name" of an importable class'
        ) from error


class CheckpointRead:
    """Read the tensors, objects and common part of one checkpoint on one rank, and collect the damage.

    `allow` lists classes, or their names, that objects may have in addition to those that torch considers safe.
    """

    def __init__(self, checkpoint: CheckpointRef, *, verify: bool, allow: Sequence[Any] = ()) -> None:
        self._checkpoint = checkpoint
        self._verify = verify
        # torch's allow-list takes classes only, so names are imported. That runs the module's code, with the user's
        # consent.
        self._allow = [_resolve_allowed(entry) for entry in allow]
        if np.dtype in self._allow:  # a dtype object is an instance of a subclass such as `Float64DType`
            self._allow += [dtype_class for dtype_class in vars(np.dtypes).values() if isinstance(dtype_class, type)]
        self.damages: list[str] = []
        self._refused_count = self._other_count = 0
        self._overwritten: dict[str, None] = {}

    def verify(self, plan: ReadPlan, fresh: Collection[int], *, ranks: int = 1) -> None:
        """Compare the bytes of all targets except the `fresh` ones with their checksums, without writing.

        `ranks` is the number of processes on this machine that verify at the same time.
        """
        # A chunk that is read only into fresh memory is not read twice: its checksum is compared during the read.
        chunks = [chunk for chunk in plan.chunks if not all(part.wanted in fresh for part in chunk.reads)]
        # The bytes from the first to the last wanted one of every box, gaps included, since that is what is read.
        nbytes = sum(last - first for chunk in chunks for first, last in map(chunk.span, chunk.reads))
        if not self._verify or not _may_be_read_twice(self._checkpoint, nbytes * ranks):
            return
        # At least 16 pieces per thread; below that, starting a thread costs more than it saves.
        threads = max(1, min(4, (os.cpu_count() or 1) // ranks, nbytes // (16 * PIECE)))
        if threads == 1:
            self._verify_chunks(chunks)
            return
        # Reading and CRC-32 release the GIL. `list.append` in `_collect_damage` is atomic.
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._verify_chunks, [chunks[number::threads] for number in range(threads)]))

    def _verify_chunks(self, chunks: Sequence[ChunkRead]) -> None:
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        for chunk in chunks:
            with self._collect_damage(_chunk_location(chunk)):
                verify_chunk(chunk, self._reader(chunk), scratch)

    def _reader(self, chunk: ChunkRead) -> Any:  # noqa: ANN401 - a tensor_io.ReadRange
        return partial(self._checkpoint.storage.read, self._checkpoint.path(chunk.file))

    def read_tensors(self, plan: ReadPlan, targets: Sequence[LocalTensor], fresh: Collection[int] = ()) -> None:
        """Read stored data into the targets.

        If that fails, the memory of `fresh` targets is discarded; other targets are reported as partly overwritten.
        """
        # With prepended axes of extent 1. A view, so reading fills the caller's memory.
        views = [target.data.detach().view(target.local_shape) for target in targets]
        # Targets with `allow_shape_mismatch` that extend beyond the stored tensor: zero where nothing is stored.
        for number in plan.zeros:
            # Some dtypes of one byte, such as float8, may have no fill operation in torch.
            views[number].zero_() if views[number].element_size() > 1 else views[number].view(torch.uint8).zero_()
        for chunk in plan.chunks:
            # Damage is collected and not raised, so that one report names all damaged chunks. `fill` raises at the end.
            before = len(self.damages)
            with self._collect_damage(_chunk_location(chunk)):
                self._chunk(chunk, views)
            if len(self.damages) > before and not all(part.wanted in fresh for part in chunk.reads):
                self._overwritten[chunk.key] = None

    def _chunk(self, chunk: ChunkRead, views: Sequence[torch.Tensor]) -> None:
        read = self._reader(chunk)
        check, stored = self._verify, chunk.chunk
        if check and not envelope_matches(stored, read):
            raise ChunkDamage("the bytes around its data do not match their checksum")
        # One checksum for all of the data: verified once, and not for every box.
        if check and len(stored.pieces) == 1 and stored.nbytes > PIECE:  # of another program: one checksum
            if not data_matches(stored, read):
                raise ChunkDamage("its data does not match its checksum")
            check = False
        for part in chunk.reads:
            target = views[part.wanted]
            # `narrow` makes views: what is read into the last one lands in the caller's tensor.
            for axis, (at, size) in enumerate(zip(part.target, part.shape, strict=True)):
                target = target.narrow(axis, at, size)
            read_into(target, chunk, part, read, check)

    def read_objects(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the objects with these unique keys, as far as the checkpoint has them."""
        # every object is stored in a list of one element, as Megatron-Core does
        values = self._read_objects(keys)
        return {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in values.items()
        }

    def _read_objects(self, keys: Collection[str]) -> dict[str, Any]:
        loaded: dict[str, Any] = {}
        for key in keys:
            stored = self._checkpoint.manifest.objects.get(key)
            if stored is None:
                continue
            name = self._checkpoint.manifest.files[stored.file].name
            with self._collect_damage(f"{name}: object {key!r}, written by rank {stored.rank}"):
                loaded[key] = self._read_object(stored)
        return loaded

    def _read_object(self, stored: StoredObject) -> Any:  # noqa: ANN401 - whatever was saved
        blob = read_range(self._checkpoint.storage, self._checkpoint.path(stored.file), stored.start, stored.length)
        if len(blob) != stored.length:
            raise ChunkDamage("is truncated")
        if self._verify and stored.crc is not None and crc32(blob) != stored.crc:
            raise ChunkDamage("does not match its checksum")
        # Another program's checkpoint: the zip has checksums of its own.
        if self._verify and stored.crc is None and not zip_is_intact(bytes(blob)):
            raise ChunkDamage("does not match its checksum")
        return self._unpickle(blob)

    def read_common(self, request: LoadRequest) -> Any:  # noqa: ANN401 - nested dicts and lists
        """Return the common part, {} if there is none.

        If every value of it is stored as an object of its own, return those that `request` asks for.
        """
        files = {file.name: file for file in self._checkpoint.manifest.files}
        stored = files.get(COMMON)
        if stored is None:
            paths = request.values(self._checkpoint.manifest.values)
            # Checkpoints of torch have no common part. Plain values are objects of their own, with paths in the state
            # dict.
            values = self._read_objects(paths)
            return request.nest((path, values[key]) for key, path in paths.items() if key in values)
        with self._collect_damage(f"{COMMON}: the common part, written by rank {stored.rank}"):
            data = read_all(self._checkpoint.storage, self._checkpoint.path(COMMON))
            if self._verify and stored.crc is not None and (crc32(data), len(data)) != (stored.crc, stored.size):
                raise ChunkDamage("does not match its checksum")
            if self._verify and stored.crc is None and not zip_is_intact(data):
                raise ChunkDamage("does not match its checksum")
            return self._unpickle(data)
        return {}

    def verify_small_files(self) -> None:
        """Verify the files that only other programs read, and the sizes of all files."""
        for file in self._checkpoint.manifest.files:
            if self._verify and file.crc is not None and file.name != COMMON:
                with self._collect_damage(f"{file.name}, written by rank {file.rank}"):
                    data = read_all(self._checkpoint.storage, self._checkpoint.path(file.name))
                    if (crc32(data), len(data)) != (file.crc, file.size):
                        raise ChunkDamage("does not match its checksum")
        sizes = self._checkpoint.storage.list(self._checkpoint.folder)
        for file in self._checkpoint.manifest.files:
            # A missing file is reported where it is read. Files without blobs that are missing do no harm to a load.
            if self._verify and sizes.get(file.name, file.size) != file.size:
                self.damages.append(
                    f"{file.name}, written by rank {file.rank}: has {sizes[file.name]} bytes, expected {file.size}"
                )

    def _unpickle(self, data: Any) -> Any:  # noqa: ANN401 - whatever was saved
        if not is_plain(data):
            raise ChunkDamage("is not an uncompressed zip file of torch.save")
        with torch.serialization.safe_globals(self._allow):
            try:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:
                # The difference matters for the message: intact bytes that may run code are the user's decision,
                # damaged ones are not.
                kind = UnsafePickle if self._verify else ChunkDamage  # verified bytes are intact
                # torch names the first unsafe global; `unsafe_globals` finds all of them
                if (named := re.search(r"GLOBAL (\S+)", str(error))) is None:
                    short = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))  # omit torch's page of advice
                    raise kind(f"cannot be read: {short[1] if short else error}") from error
                names = tensor_io.unsafe_globals(data) or [named[1]]
                raise kind(
                    f"contains {', '.join(names)}, which may execute code when loaded; if you trust the checkpoint, "
                    f"pass allow={names}"
                ) from error

    @contextmanager
    def _collect_damage(self, where: str) -> Iterator[None]:
        try:
            yield
        except ChunkDamage as damage:
            self.damages.append(f"{where}: {damage.what}")
            self._refused_count += isinstance(damage, UnsafePickle)
        except OSError as error:
            self.damages.append(f"{where}: {error.strerror or error}")
            self._other_count += not isinstance(error, FileNotFoundError)
        except KeyboardInterrupt as error:
            error.add_note(
                f"The load of {self._checkpoint} was interrupted at {where}. Tensors loaded so far have new values."
            )
            raise
        except Exception as error:  # noqa: BLE001 - listed with damage: out of device memory, a read-only tensor
            self.damages.append(f"{where}: {type(error).__name__}: {error}")
            self._other_count += 1

    def raise_damage(self) -> None:
        """Raise `CheckpointError` if damage was found, or something could not be loaded."""
        if self.damages:
            text = "\n  ".join(truncate_list(self.damages, MAX_LISTED))
            verdict = "is damaged"
            if self._refused_count == len(self.damages):
                verdict = "is intact, but some of its objects are not loaded without allow="
            elif self._was_replaced():
                verdict = "was removed or replaced by another save while it was loaded; load again"
            elif self._other_count == len(self.damages):
                verdict = "could not be loaded"
            raise CheckpointError(f"the checkpoint {self._checkpoint} {verdict}:\n  {text}{self._state()}")

    def _was_replaced(self) -> bool:
        """Return True if the folder has no manifest any more, or another one."""
        checkpoint = self._checkpoint
        if checkpoint.manifest.foreign:
            return False
        try:
            if MANIFEST not in checkpoint.storage.list(checkpoint.folder):
                return True
            data = read_all(checkpoint.storage, checkpoint.path(MANIFEST))
            return decode_valid(data, str(checkpoint)) != checkpoint.manifest
        except (CheckpointError, OSError):
            return False

    def _state(self) -> str:
        """Return a sentence about the tensors that were overwritten only in part, or ""."""
        if not self._overwritten:
            return ""
        keys = [repr(key) for key in self._overwritten]
        more = f" and {len(keys) - MAX_LISTED} more" if len(keys) > MAX_LISTED else ""
        return (
            f"\n  partly overwritten: {', '.join(keys[:MAX_LISTED])}{more}; all other tensors have the stored values; "
            "load again before you use any of them"
        )


def _chunk_location(chunk: ChunkRead) -> str:
    return f"{chunk.file}: key {chunk.key!r}, the chunk at {chunk.chunk.offset} written by rank {chunk.chunk.rank}"


def _may_be_read_twice(checkpoint: CheckpointRef, nbytes: int) -> bool:
    """Return True if reading these bytes a second time is cheap.

    The second read of a local file comes from the page cache, if memory has room for it; a remote one uses the network.
    """
    # A local file is in the page cache after the first read.
    if getattr(checkpoint.storage, "remote", False):
        return nbytes <= _SMALL_READ
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:  # not Linux
        match = None
    available = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return nbytes <= max(_SMALL_READ, available // 2)
