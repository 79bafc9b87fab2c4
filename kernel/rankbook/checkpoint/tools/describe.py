"""Describe checkpoints as text: one checkpoint in detail, or a table of the steps in a folder.

`rankbook checkpoint ls` and `rankbook checkpoint show` print this text. Only manifests are read, no tensor data.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankbook.checkpoint.format.dcp_metadata import read_manifest
from rankbook.checkpoint.format.manifest import StoredTensor, known_ranks
from rankbook.checkpoint.storage import Storage, steps
from rankbook.checkpoint.storage.backends import Folder, storage_of
from rankbook.errors import CheckpointError
from rankbook.formatting import escape_unprintable, format_bytes, plural
from rankbook.ranks import format_ranks


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
