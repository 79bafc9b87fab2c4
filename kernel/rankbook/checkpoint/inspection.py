"""Inspect checkpoints offline: describe them as text, and compare every byte with its checksum.

Nothing is changed and no value is unpickled. `rankbook checkpoint ls`, `show` and `verify` print what is found.

Descriptions (`describe_folder`, `describe`) read only manifests, no tensor data.

`verify` reports damage with file, key and rank. In a checkpoint of Rankbook every byte of every file is covered by a
checksum. In a checkpoint of another program only the members of zip files are. The report counts the other bytes as
`unchecked`, and also those of other files in the folder. It compares the manifest with the files and builds a list of
`Check`s, that is, byte spans with their expected CRC-32. `run_checks` groups neighboring checks into windows of at most
`WINDOW` bytes, and reads the windows in a few threads.
"""

from __future__ import annotations

import json
import os
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from rankbook.checkpoint.format.dcp_metadata import manifest_from_dcp, rank_of, read_manifest
from rankbook.checkpoint.format.manifest import (
    COMMON,
    MANIFEST,
    METADATA,
    Chunk,
    Manifest,
    StoredObject,
    StoredTensor,
    as_bytes,
    crc32,
    decode,
    find_problems,
    known_ranks,
    piece_bytes,
)
from rankbook.checkpoint.format.torch_zip import open_zip, without_checksums
from rankbook.checkpoint.load_plan import find_coverage_errors
from rankbook.checkpoint.storage import ASIDE, Buffer, Storage, read_all, steps
from rankbook.checkpoint.storage.backends import Folder, storage_of
from rankbook.errors import CheckpointError
from rankbook.formatting import escape_unprintable, format_bytes, plural
from rankbook.ranks import format_ranks, name_ranks

MAX_KEYS = 5  # keys of a missing file that a message lists


@dataclass(frozen=True, slots=True)
class Damage:
    """Defect of a checkpoint.

    `key` is the tensor or object, "" if there is none; `ranks` wrote the damaged data; `what` describes the defect.
    """

    file: str
    key: str
    ranks: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        wrote = f" (written by {name_ranks(self.ranks)})" if self.ranks else ""
        return escape_unprintable(f"{self.file}{f': {self.key}' if self.key else ''}{wrote}: {self.what}")


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `verify` for the checkpoint `where`.

    `files` and `nbytes` count the files and their total bytes; `unchecked` counts the bytes without a checksum. `print`
    shows a summary with one line per damage.

    Example::

        report = verify("checkpoints")
        report.ok  # True
    """

    where: str
    damages: tuple[Damage, ...]
    files: int
    nbytes: int
    unchecked: int = 0

    @property
    def ok(self) -> bool:
        """Return True if no damage was found."""
        return not self.damages

    def __str__(self) -> str:
        size = f"{self.files} files, {self.nbytes:,} bytes"
        rest = f", of which {self.unchecked:,} have no checksum" if self.unchecked else ""
        if self.ok:
            return f"{self.where}: intact ({size}{rest})"
        return "\n  ".join([f"{self.where}: damaged ({size}{rest})", *map(str, self.damages)])


def verify(folder: Folder, step: int | None = None) -> Report:
    """Read a checkpoint, by default the latest, and compare every byte with its checksum.

    `folder` is a folder of steps, or the folder of a checkpoint, also one of another program. Damage is returned in the
    report. Raises `CheckpointError` only if there is no checkpoint.

    Example::

        report = verify("checkpoints", step=100)
        assert report.ok, report
    """
    storage = storage_of(folder)
    damages: list[Damage] = []
    path = _find(storage, steps.requested_step(step), damages)
    prefix = f"{path}/" if path else ""
    # Listed once: a checkpoint does not change after its commit, and a request to an object store takes a round trip.
    names = storage.list(path)
    if MANIFEST not in names:
        if path or METADATA not in names or any(name.startswith("__RANK_") for name in names):
            damages.append(
                Damage(prefix + MANIFEST, "", (), f"is missing: {path or storage} is not a finished checkpoint")
            )
            return _report(storage, path, damages, names, 0)
        # A checkpoint of torch or Megatron-Core: verified as far as its zips go.
        manifest = _read_foreign_manifest(storage, path, damages)
        damaged = {damage.key for damage in damages}  # their missing chunks must not be reported again as gaps
        keys = [key for key in manifest.tensors if key not in damaged]
        damages += [Damage(prefix + METADATA, key, (), reason) for key, reason in find_coverage_errors(manifest, keys)]
        checked = _Verified(storage, path, manifest)
        damages += checked.foreign_damages()
        return _report(storage, path, damages, names, checked.nbytes)
    try:
        manifest = decode(read_all(storage, prefix + MANIFEST), f"{prefix}{MANIFEST}")
    except (CheckpointError, OSError) as error:
        reason = str(error).removeprefix(f"{prefix}{MANIFEST}: ")
        return _report(storage, path, [*damages, Damage(prefix + MANIFEST, "", (), reason)], names, 0)
    # A folder that was renamed by hand, or copied over another one, is noticed by its step. A checkpoint that was saved
    # under a name has no step, also if the name is that of a step, as with `accelerator.save_state("run/step-20")`.
    expected = steps.parse_step(path.removesuffix(ASIDE))
    if path and manifest.step not in {expected, None}:
        reason = f"the manifest is of step {manifest.step}, but the folder is of step {expected}"
        damages.append(Damage(prefix + MANIFEST, "", (), reason))
    wrong = list(find_problems(manifest))
    damages += [Damage(prefix + MANIFEST, problem.key, known_ranks([problem.rank]), problem.what) for problem in wrong]
    if any(not problem.key for problem in wrong):  # defects in the list of files, to which all other entries refer
        return _report(storage, path, damages, names, names[MANIFEST] or 0)
    # Entries that break a rule are reported and then left out: their positions may lead anywhere.
    for problem in wrong:
        manifest.tensors.pop(problem.key, None)
        manifest.objects.pop(problem.key, None)
    damages += [
        Damage(prefix + MANIFEST, key, (), reason) for key, reason in find_coverage_errors(manifest, manifest.tensors)
    ]
    checked = _Verified(storage, path, manifest)
    damages += checked.damages(complete=not wrong)
    return _report(storage, path, damages, names, checked.nbytes + (names[MANIFEST] or 0))


def check_pieces(chunk: Chunk, first: int, last: int, buffer: Buffer) -> tuple[int, ...]:
    """Return the numbers of the damaged pieces of a chunk, from `first` to `last` - 1.

    `buffer` holds the bytes of these pieces. A chunk without checksums has no damaged pieces.
    """
    piece = piece_bytes(chunk)
    flat = as_bytes(buffer)
    crcs = {
        number: crc32(flat[(number - first) * piece : (number - first + 1) * piece])
        for number in range(first, min(last, len(chunk.pieces)))
    }
    return tuple(number for number, crc in crcs.items() if crc != chunk.pieces[number])


def damaged_pieces(manifest: Manifest, key: str, chunk: Chunk, numbers: Iterable[int], folder: str = "") -> Damage:
    """Return the `Damage` for a chunk whose pieces `numbers` do not match their checksums."""
    piece = piece_bytes(chunk)
    # Positions in the file, as `dd` and hex editors count them. The last piece may be shorter.
    spans = [(chunk.data + n * piece, chunk.data + min((n + 1) * piece, chunk.nbytes)) for n in sorted(numbers)]
    file = manifest.files[chunk.file].name
    reason = f"{_chunk(chunk)}: {_spans(spans)} do not match their checksum"
    return Damage(f"{folder}/{file}" if folder else file, key, known_ranks([chunk.rank]), reason)


def _find(storage: Storage, step: int | None, damages: list[Damage]) -> str:
    """Return the folder of the checkpoint to verify, and add damage of `latest` to `damages`.

    A step without a manifest counts as a checkpoint here; the missing manifest is its damage.
    """
    names = storage.list()
    if step is None:
        if steps.is_checkpoint(names):
            return ""
        try:
            step = steps.read_latest_file(storage)
        except CheckpointError as error:
            damages.append(Damage(steps.LATEST, "", (), str(error).removeprefix(f"{storage}/{steps.LATEST}: ")))
        # A step that has a folder but no manifest stays selected: the report then says that the manifest is missing.
        if step is not None and step not in steps.finished_steps(storage) and steps.step_name(step) not in names:
            damages.append(Damage(steps.LATEST, "", (), f"names step {step}, which does not exist"))
            step = None
        elif step is None and not damages:
            finished = steps.finished_steps(storage)
            if finished and not _is_named(storage, finished[-1]):
                damages.append(
                    Damage(steps.LATEST, "", (), f"is missing; the highest finished step is used, {finished[-1]}")
                )
        if step is None:
            step = max(steps.finished_steps(storage), default=None)
        if step is None:
            return steps.locate(storage)  # raises CheckpointError with the list of steps
    if step not in steps.finished_steps(storage) and steps.step_name(step) in names:
        return steps.step_name(step)
    return steps.folder_of(storage, step)


def _is_named(storage: Storage, step: int) -> bool:
    """Return True for a step that was saved by its name, as by `save_state("run/step-20")`, which makes no `latest`."""
    try:
        return read_manifest(storage, steps.folder_of(storage, step)).step is None
    except (CheckpointError, OSError):  # reported by `verify`
        return False


def _read_foreign_manifest(storage: Storage, path: str, damages: list[Damage]) -> Manifest:
    prefix = f"{path}/" if path else ""
    reports: list[Damage] = []
    manifest: Manifest | None = None
    try:
        manifest = manifest_from_dcp(
            storage, path, lambda file, key, rank, what: reports.append(_damage(prefix + file, key, rank, what))
        )
    except (CheckpointError, OSError) as error:
        reports.append(Damage(prefix + METADATA, "", (), str(error).removeprefix(f"{storage}/{prefix}{METADATA}: ")))
    damages += reports
    return manifest or Manifest(format=0, step=None, world_size=0, tensors={}, objects={}, files=())


def _report(
    storage: Storage, path: str, damages: Sequence[Damage], names: dict[str, int | None], checked: int
) -> Report:
    sizes = [size for size in names.values() if size is not None]
    where = f"{storage}/{path}" if path else str(storage)
    return Report(where, tuple(damages), len(sizes), sum(sizes), max(0, sum(sizes) - checked))


class _Verified:
    """Run one pass over the files of a checkpoint.

    `nbytes` counts the bytes that were compared with a checksum.
    """

    def __init__(self, storage: Storage, path: str, manifest: Manifest) -> None:
        self._storage, self._path, self._manifest = storage, path, manifest
        self._prefix = f"{path}/" if path else ""
        self._names = storage.list(path)
        # Blobs by file, for messages ("it holds ...") and for the search for gaps between them.
        self._by_file: dict[str, list[Blob]] = {}
        for blob in self._blobs():
            self._by_file.setdefault(blob.file, []).append(blob)
        self.nbytes = 0

    def damages(self, *, complete: bool = True) -> list[Damage]:
        """Return all damage. Without `complete`, invalid entries were removed from the manifest: ignore gaps."""
        file_damages = list(self._files(complete=complete))
        checks = [check for check in self._checks() if self._present(check.blob.file)]
        return file_damages + self._run(checks)

    def foreign_damages(self) -> list[Damage]:
        damages: list[Damage] = []
        checks: list[Check] = []
        for blob in self._foreign_blobs():
            try:
                _, members = open_zip(self._storage, self._prefix + blob.file, blob.start, blob.length)
            except (zipfile.BadZipFile, OSError) as error:
                damages.append(
                    self._damage_of(
                        blob, f"the blob at byte {blob.start} is not an intact zip file of torch.save: {error}"
                    )
                )
                continue
            # With `torch.serialization.set_crc32_options(False)` torch writes a zip without checksums. Then its
            # structure is all that can be checked.
            if not without_checksums(members):
                checks += [
                    Check(blob, name, ((member.data, member.nbytes),), member.crc) for name, member in members.items()
                ]
        # It has no checksum. That it parses is all that can be checked.
        for name in ("metadata.json",):
            if name in self._names:
                try:
                    json.loads(read_all(self._storage, self._prefix + name))
                except (ValueError, RecursionError, OSError) as error:
                    damages.append(Damage(self._prefix + name, "", (), f"is not valid JSON: {error}"))
        return damages + self._run(checks)

    def _files(self, *, complete: bool) -> Iterator[Damage]:
        # Folders have no size.
        present = {name for name, size in self._names.items() if size is not None}
        for number, file in enumerate(self._manifest.files):
            blobs = self._by_file.get(file.name, [])
            keys = sorted({blob.key for blob in blobs})
            ranks = known_ranks([blob.rank for blob in blobs] or [file.rank])
            if file.name not in present:
                more = f", and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
                holds = f"; it holds {', '.join(keys[:MAX_KEYS])}{more}" if keys else ""
                yield Damage(self._prefix + file.name, "", ranks, f"the file is missing{holds}")
            elif (size := self._names[file.name]) != file.size:
                yield Damage(self._prefix + file.name, "", ranks, f"has {size} bytes, expected {file.size}")
            # A file with a checksum of its own is small and has no blobs.
            if file.crc is None and complete:
                yield from self._tiling(number)
        for name in sorted(self._names.keys() - {file.name for file in self._manifest.files} - {MANIFEST}):
            # Files with other names are of the user or of a hook of `save_state`, which keeps them.
            if rank_of(name) < 0 and name not in {METADATA, COMMON, "metadata.json"}:
                continue
            yield Damage(self._prefix + name, "", (), "is not part of this checkpoint: the manifest does not list it")

    def _tiling(self, number: int) -> Iterator[Damage]:
        """Report gaps and overlaps between blobs: bytes outside of blobs have no checksum."""
        # `at` is where the next blob has to begin: 0, and then the end of the blob before.
        file, at = self._manifest.files[number], 0
        for blob in sorted(self._by_file.get(file.name, []), key=lambda blob: blob.start):
            if blob.start != at:
                reason = f"the manifest places it at byte {blob.start}, but the preceding blob ends at byte {at}"
                yield self._damage_of(blob, reason)
            at = blob.start + blob.length
        if at != file.size:
            reason = f"the manifest gives it {file.size} bytes, but the last blob ends at byte {at}"
            yield Damage(self._prefix + file.name, "", known_ranks([file.rank]), reason)

    def _blobs(self) -> Iterator[Blob]:
        for key, tensor in self._manifest.tensors.items():
            yield from (self._blob(key, chunk) for chunk in tensor.chunks)
        yield from (self._blob(key, stored) for key, stored in self._manifest.objects.items())

    def _blob(self, key: str, stored: Chunk | StoredObject) -> Blob:
        name = self._manifest.files[stored.file].name
        label = _chunk(stored) if isinstance(stored, Chunk) else "the object"
        return Blob(name, key, stored.rank, stored.start, stored.length, label)

    def _foreign_blobs(self) -> Iterator[Blob]:
        yield from self._blobs()
        if size := self._names.get(COMMON):
            yield Blob(COMMON, "", -1, 0, size, "the common part")

    def _present(self, file: str) -> bool:
        return self._names.get(file) is not None

    def _checks(self) -> Iterator[Check]:
        for file in self._manifest.files:
            if file.crc is not None:
                blob = Blob(file.name, "", file.rank, 0, file.size, "")
                yield Check(blob, "", ((0, file.size),), file.crc)
        for key, tensor in self._manifest.tensors.items():
            for chunk in tensor.chunks:
                yield from _chunk_checks(self._blob(key, chunk), chunk)
        for key, stored in self._manifest.objects.items():
            if stored.crc is not None:
                yield Check(self._blob(key, stored), "", ((stored.start, stored.length),), stored.crc)

    def _run(self, checks: Sequence[Check]) -> list[Damage]:
        """Run the checks, and return one damage per blob, even if several of its checks fail."""
        # A chunk of a gigabyte has a thousand checks. The user wants to know which tensor is damaged, and where.
        failed: dict[Blob, list[tuple[Check, str]]] = {}
        for check, reason in run_checks(self._storage, self._prefix, checks):
            failed.setdefault(check.blob, []).append((check, reason))
        self.nbytes = sum(length for check in checks for _, length in check.spans)
        return [self._damage_of(blob, _failed(blob, failures)) for blob, failures in failed.items()]

    def _damage_of(self, blob: Blob, what: str) -> Damage:
        return _damage(self._prefix + blob.file, blob.key, blob.rank, what)


def _chunk_checks(blob: Blob, chunk: Chunk) -> Iterator[Check]:
    piece = piece_bytes(chunk)
    for number, crc in enumerate(chunk.pieces):
        start = chunk.data + number * piece
        yield Check(blob, "", ((start, min(piece, chunk.nbytes - number * piece)),), crc)
    if chunk.envelope is not None:
        end = chunk.data + chunk.nbytes
        # Two spans under one checksum: the bytes before the data, and those after it.
        spans = ((chunk.start, chunk.data - chunk.start), (end, chunk.start + chunk.length - end))
        yield Check(blob, "the envelope of torch.save", spans, chunk.envelope)


def _failed(blob: Blob, failures: Iterable[tuple[Check, str]]) -> str:
    """Describe the failed checks of a blob, grouped by reason: truncated file, read error, changed bytes."""
    reasons: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for check, reason in failures:
        reasons.setdefault((check.part, reason), []).extend((at, at + length) for at, length in check.spans if length)
    messages = [
        f"{f'{part}, ' if part else ''}{_spans(sorted(spans))} {reason}" for (part, reason), spans in reasons.items()
    ]
    return f"{blob.label}: {'; '.join(messages)}" if blob.label else "; ".join(messages)


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    # Neighbouring pieces become one range: [(0, 4), (4, 8), (12, 16)] reads "bytes 0 to 7, 12 to 15".
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return "bytes " + ", ".join(f"{start} to {stop - 1}" for start, stop in joined)


def _chunk(chunk: Chunk) -> str:
    return f"the chunk of shape {chunk.shape} at offset {chunk.offset}"


def _damage(file: str, key: str, rank: int, what: str) -> Damage:
    return Damage(file, key, known_ranks([rank if rank >= 0 else rank_of(file.rpartition("/")[2])]), what)


WINDOW = 16 * 1024 * 1024
"""Maximum bytes per read, and maximum size of every thread's buffer."""

CHANGED = "do not match their checksum"
MISSING = "are missing: the file is truncated"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes [`start`, `start` + `length`) of a file that hold one chunk or object.

    `label` is its description in messages, for example "the object".
    """

    file: str
    key: str
    rank: int
    start: int
    length: int
    label: str


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes whose CRC-32 is known.

    `spans` are (start, length) pairs, which are checksummed as one sequence. `part` names them within the blob.
    """

    blob: Blob
    part: str
    spans: tuple[tuple[int, int], ...]
    crc: int

    @property
    def begin(self) -> int:
        """Return the offset of the first byte."""
        return min(start for start, _ in self.spans)

    @property
    def end(self) -> int:
        """Return the offset after the last byte."""
        return max(start + length for start, length in self.spans)


def run_checks(
    storage: Storage, prefix: str, checks: Sequence[Check], threads: int | None = None
) -> list[tuple[Check, str]]:
    """Run all checks in threads, and return the failed ones with their reasons, in order of files and bytes.

    `prefix` is prepended to the file names.
    """
    # Threads, because `storage.read` and crc32 release the GIL. `pool.map` keeps the order of the windows, so the
    # report does not depend on which thread was faster.
    local = threading.local()

    def run(window: list[Check]) -> list[tuple[Check, str]]:
        if not hasattr(local, "buffer"):
            # One buffer per thread, allocated once, of the size of the largest window.
            local.buffer = bytearray(largest)
        path = prefix + window[0].blob.file
        try:
            with memoryview(local.buffer) as buffer:
                # A window with one large check, see `_windows`.
                if window[0].end - window[0].begin > WINDOW:
                    return [result for check in window for result in _in_steps(storage, path, check, buffer)]
                return list(_in_one_read(storage, path, window, buffer))
        except OSError as error:
            return [(check, f"cannot be read: {error.strerror or error}") for check in window]

    windows = list(_windows(checks))
    extents = (max(check.end for check in window) - window[0].begin for window in windows)
    largest = min(max(extents, default=0), WINDOW)
    with ThreadPoolExecutor(max_workers=threads or min(4, os.cpu_count() or 1)) as pool:
        return [result for results in pool.map(run, windows) for result in results]


def _windows(checks: Sequence[Check]) -> Iterator[list[Check]]:
    """Group neighboring checks that fit into one read. A check that is larger than a window gets its own group."""
    ordered = sorted(checks, key=lambda check: (check.blob.file, check.begin))
    for _, of_file in groupby(ordered, key=lambda check: check.blob.file):
        window: list[Check] = []
        furthest = 0
        for check in of_file:
            # Checks are sorted by their beginnings. An envelope check begins before its chunk's pieces and ends after
            # them, so the furthest end is not that of the last check.
            furthest = max(furthest, check.end)
            if window and furthest - window[0].begin > WINDOW:
                yield window
                window, furthest = [], check.end
            window.append(check)
        if window:
            yield window


def _in_one_read(storage: Storage, path: str, window: list[Check], buffer: memoryview) -> Iterator[tuple[Check, str]]:
    begin = window[0].begin
    count = storage.read(path, begin, buffer[: max(check.end for check in window) - begin])
    for check in window:
        # The file was shorter than expected. Checks that lie before its end are still compared.
        if check.end > begin + count:
            yield check, MISSING
            continue
        crc = 0
        for start, length in check.spans:
            crc = crc32(buffer[start - begin : start - begin + length], crc)
        if crc != check.crc:
            yield check, CHANGED


def _in_steps(storage: Storage, path: str, check: Check, buffer: memoryview) -> Iterator[tuple[Check, str]]:
    """Run a check that is larger than the buffer, in several reads."""
    crc = 0
    for start, length in check.spans:
        for at in range(start, start + length, len(buffer)):
            size = min(len(buffer), start + length - at)
            if storage.read(path, at, buffer[:size]) < size:
                yield check, MISSING
                return
            crc = crc32(buffer[:size], crc)
    if crc != check.crc:
        yield check, CHANGED


# Description ----------------------------------------------------------------------------------------------------------


def describe_folder(folder: Folder) -> str:
    """Return a table of the finished steps, and a list of unfinished saves with the processes that write them.

    If the folder is itself a checkpoint, describe that. Raises `CheckpointError` if there is no step at all.
    """
    storage = storage_of(folder)
    names = storage.list()
    if steps.is_checkpoint(names):
        return describe(storage)
    finished, partials = steps.finished_steps(storage), steps.list_partials(storage)
    if not finished and not partials:
        return steps.locate(storage)  # raises CheckpointError
    try:
        latest, trouble = steps.read_latest(storage), ""
    except CheckpointError as error:
        latest, trouble = None, f"\n{error}"
    # Example:
    #
    #        STEP  SIZE     TENSORS  RANKS  SAVED
    #        100   1.2 GiB  290      4      2025-01-31T12:00:00+00:00
    #     *  200   1.2 GiB  290      4      2025-01-31T12:30:00+00:00
    #
    # The star marks the step that `latest` names.
    rows = [("", "STEP", "SIZE", "TENSORS", "RANKS", "SAVED")]
    rows += [
        ("*" if step == latest else "", str(step), *columns)
        for step in finished
        if (columns := _columns(storage, step)) is not None
    ]
    rest = "".join(f"\n  {name}: {_state(storage, name)}" for name in partials)
    return _table(rows) + (f"\nnot finished:{rest}" if rest else "") + trouble


def describe(folder: Folder, step: int | None = None) -> str:
    """Describe one checkpoint, by default the latest: its metadata, tensors, objects and files.

    Raises `CheckpointError` if it does not exist, or if its manifest is damaged.
    """
    storage = storage_of(folder)
    path = steps.locate(storage, step)
    manifest = read_manifest(storage, path)
    writer = f"Rankbook {manifest.rankbook} with torch {manifest.torch}".replace("  ", " ").strip()
    lines = [f"{storage}/{path}" if path else str(storage)]
    if manifest.foreign:
        lines.append("written by another program, without a manifest")
    else:
        when = "" if manifest.step is None else f"step {manifest.step}, "
        lines.append(f"{when}saved {manifest.created} by {plural(manifest.world_size, 'rank')} ({writer})")
    # Texts of the checkpoint are escaped: names with control characters could rewrite the terminal.
    if manifest.metadata:
        lines += ["", *(escape_unprintable(f"{name}: {value}") for name, value in manifest.metadata.items())]
    rows = [("TENSOR", "DTYPE", "SHAPE", "CHUNKS", "SIZE", "RANKS")]
    rows += [(escape_unprintable(key), *_tensor(tensor)) for key, tensor in manifest.tensors.items()]
    lines += ["", _table(rows)]
    if manifest.objects:
        objects = [("OBJECT", "SIZE", "RANK")]
        objects += [
            (escape_unprintable(key), format_bytes(stored.length), _ranks([stored.rank]))
            for key, stored in manifest.objects.items()
        ]
        lines += ["", _table(objects)]
    files = [("FILE", "SIZE", "RANK")]
    files += [(escape_unprintable(file.name), format_bytes(file.size), _ranks([file.rank])) for file in manifest.files]
    return "\n".join([*lines, "", _table(files)])


def _columns(storage: Storage, step: int) -> tuple[str, str, str, str] | None:
    """Return the table columns of a step; None if another process has removed the step meanwhile."""
    try:
        manifest = read_manifest(storage, steps.folder_of(storage, step))
    except (CheckpointError, OSError) as error:
        # A damaged step is listed with its error, in place of its columns.
        return ("", "", "", str(error)) if step in steps.finished_steps(storage) else None
    return (format_bytes(manifest.nbytes), str(len(manifest.tensors)), str(manifest.world_size), manifest.created)


def _state(storage: Storage, name: str) -> str:
    if not name.endswith(steps.PARTIAL):
        return "leftover of a removed step; the next save removes it"
    owner = steps.writer_of(storage, name)
    return f"being saved by {owner}" if owner else "interrupted save; the next save removes it"


def _tensor(tensor: StoredTensor) -> tuple[str, str, str, str, str]:
    size = sum(chunk.nbytes for chunk in tensor.chunks)
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    return (tensor.dtype, shape, str(len(tensor.chunks)), format_bytes(size), _ranks([c.rank for c in tensor.chunks]))


def _ranks(ranks: Sequence[int]) -> str:
    valid_ranks = known_ranks(ranks)
    return format_ranks(valid_ranks) if valid_ranks else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
