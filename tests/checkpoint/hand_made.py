"""A checkpoint written by hand: two ranks, chunks, an object, the small files."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path

import torch

from rankbook.checkpoint.format.manifest import (
    Chunk,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
    encode,
    now,
    pieces,
)
from rankbook.checkpoint.format.torch_zip import locate_tensor
from rankbook.checkpoint.storage import Storage, steps
from rankbook.checkpoint.storage.backends import storage_of


def saved_bytes(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Writer:
    """Writes the file of one rank."""

    def __init__(self, storage: Storage, folder: str, rank: int, number: int) -> None:
        self.storage, self.folder, self.rank, self.number = storage, folder, rank, number
        self.name = f"__RANK_{rank}.distcp"
        self.parts = bytearray()
        self.views = []

    def tensor(self, value: torch.Tensor, offset: tuple[int, ...]) -> Chunk:
        blob = saved_bytes(value.clone())
        self.storage.write("scratch", [blob])
        view = locate_tensor(self.storage, "scratch", 0, len(blob))
        self.storage.remove("scratch")
        start = len(self.parts)
        self.parts += blob
        data, end = view.data, view.data + view.nbytes
        return Chunk(
            offset=offset,
            shape=tuple(value.shape),
            file=self.number,
            start=start,
            length=len(blob),
            data=start + data,
            nbytes=view.nbytes,
            pieces=pieces(blob[data:end]),
            envelope=zlib.crc32(blob[end:], zlib.crc32(blob[:data])),
            rank=self.rank,
        )

    def object(self, value) -> StoredObject:
        blob = saved_bytes([value])
        start = len(self.parts)
        self.parts += blob
        return StoredObject(self.number, start, len(blob), zlib.crc32(blob), self.rank)

    def close(self) -> StoredFile:
        self.storage.write(f"{self.folder}/{self.name}", [self.parts])
        return StoredFile(self.name, len(self.parts), None, self.rank)


def write_checkpoint(
    where: Path | str | Storage, step: int, *, seed: int = 0, tensors: int = 4, rows: int = 8
) -> Manifest:
    storage = storage_of(where)
    generator = torch.Generator().manual_seed(seed)
    folder = steps.begin_step(storage, step)
    writers = [Writer(storage, folder, rank, rank) for rank in range(2)]
    stored = {}
    for number in range(tensors):
        tensor = torch.randn(2 * rows, 6, generator=generator)
        chunks = [writer.tensor(tensor[writer.rank * rows :][:rows], (writer.rank * rows, 0)) for writer in writers]
        stored[f"model.{number}.w"] = StoredTensor("float32", (2 * rows, 6), tuple(chunks))
    stored["scale"] = StoredTensor("bfloat16", (), (writers[0].tensor(torch.tensor(seed).bfloat16(), ()),))
    objects = {f"rng/shard_{writer.rank}_2": writer.object({"seed": seed, "rank": writer.rank}) for writer in writers}
    files = [writer.close() for writer in writers]
    small = {
        ".metadata": b"a stand-in, " * 9 + str(seed).encode(),
        "common.pt": saved_bytes({"iteration": step, "seed": seed}),
        "metadata.json": json.dumps({"sharded_backend": "torch_dist", "n": seed}).encode(),
    }
    for name, data in small.items():
        storage.write(f"{folder}/{name}", [data])
        files.append(StoredFile(name, len(data), zlib.crc32(data), 0))
    manifest = Manifest(
        step=step,
        world_size=2,
        tensors=stored,
        objects=objects,
        files=tuple(files),
        created=now(),
        metadata={"loss": 0.5},
    )
    storage.write(f"{folder}/manifest.json", [encode(manifest)])
    steps.commit_step(storage, step)
    return manifest
