"""Many ranks in one process: the real writer, load plan and fetch, called rank by rank in a save's order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rankbook.checkpoint.async_save import SaveProgress
from rankbook.checkpoint.format.manifest import as_bytes
from rankbook.checkpoint.loading import Loader, StrictHandling, find_checkpoint
from rankbook.checkpoint.local_state import LoadRequest, local_state_of
from rankbook.checkpoint.saving import PlanHistory, Writer
from rankbook.checkpoint.storage.steps import CheckpointLocation
from rankbook.control_collectives import RankGroup


class InMemory:
    """A storage that keeps files as bytes, and counts what is read of them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.read_bytes = 0

    def write(self, path: str, parts: Iterable[Any]) -> int:
        self.files[path] = b"".join(bytes(as_bytes(part)) for part in parts)
        return len(self.files[path])

    def read(self, path: str, start: int, into: memoryview) -> int:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file", path)
        part = self.files[path][start : start + len(into)]
        into[: len(part)] = part
        self.read_bytes += len(part)
        return len(part)

    def list(self, path: str = "") -> dict[str, int | None]:
        prefix = f"{path}/" if path else ""
        sizes: dict[str, int | None] = {}
        for name, data in self.files.items():
            if name.startswith(prefix):
                first, *more = name.removeprefix(prefix).split("/")
                sizes[first] = None if more else len(data)
        return sizes

    def move(self, source: str, target: str) -> None:
        self.remove(target)
        for name in [file for file in self.files if file == source or file.startswith(f"{source}/")]:
            self.files[target + name.removeprefix(source)] = self.files.pop(name)

    def remove(self, path: str) -> None:
        for name in [file for file in self.files if file == path or file.startswith(f"{path}/")]:
            del self.files[name]


def save_ranks(ranks: Sequence[Any], storage: Any, *, step: int = 0, fully_parallel: bool = False) -> None:
    """Save the state of every rank, as that many ranks would."""
    location = CheckpointLocation(storage, "memory", step)
    writers = [
        Writer(
            rank,
            local_state_of(state),
            location,
            SaveProgress("memory"),
            PlanHistory(),
            metadata={},
            fully_parallel=fully_parallel,
        )
        for rank, state in enumerate(ranks)
    ]
    try:
        tasks = writers[0].plan([writer.declare(full=True) for writer in writers])
        writers[0].commit([writer.write(task) for writer, task in zip(writers, tasks, strict=True)])
    except BaseException:
        location.abandon()
        raise


def load_ranks(ranks: Sequence[Any], storage: Any, *, verify: bool = True, cast: bool = False) -> list[Any]:
    """Load the request of every rank, as that many ranks would."""
    checkpoint = find_checkpoint(storage, "latest")
    loaders = [
        Loader(
            checkpoint,
            lambda state=state: LoadRequest(state, checkpoint.manifest),
            mode=StrictHandling.RAISE_ALL,
            verify=verify,
            cast=cast,
            ranks=RankGroup(alone=True),
        )
        for state in ranks
    ]
    loaders[0].decide([loader.plan() for loader in loaders])
    for loader in loaders:
        loader.verify()
        loader.read()
    return [loader.assemble() for loader in loaders]
