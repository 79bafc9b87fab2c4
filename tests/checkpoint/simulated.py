"""Many ranks in one process: the real planner, writer, read plan and fetch, driven rank by rank as torch would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from rankbook.checkpoint.checksums import as_bytes
from rankbook.checkpoint.contents import Contents, Wishes, contents_of
from rankbook.checkpoint.driving import Plans
from rankbook.checkpoint.fetch import Fetch
from rankbook.checkpoint.found import find
from rankbook.checkpoint.loading import Planner as LoadPlanner
from rankbook.checkpoint.place import Place
from rankbook.checkpoint.strictness import StrictHandling
from rankbook.checkpoint.telling import Telling
from rankbook.checkpoint.writing import Planner, Writer


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
        found: dict[str, int | None] = {}
        for name, data in self.files.items():
            if name.startswith(prefix):
                first, *more = name.removeprefix(prefix).split("/")
                found[first] = None if more else len(data)
        return found

    def move(self, source: str, target: str) -> None:
        self.remove(target)
        for name in [each for each in self.files if each == source or each.startswith(f"{source}/")]:
            self.files[target + name.removeprefix(source)] = self.files.pop(name)

    def remove(self, path: str) -> None:
        for name in [each for each in self.files if each == path or each.startswith(f"{path}/")]:
            del self.files[name]


def save_ranks(ranks: Sequence[Any], storage: Any, *, step: int = 0, fully_parallel: bool = False) -> None:
    """What each rank holds, saved as these many ranks would."""
    contents: list[Contents] = [contents_of(each) for each in ranks]
    place, plans = Place(storage, "memory", step), Plans()
    writers, local = [], []
    for rank, each in enumerate(contents):
        planner = Planner(each, plans if rank == 0 else Plans(), fully_parallel=fully_parallel, whole=True)
        writer = Writer(place, each, planner, Telling("memory"), {})
        planner.set_up_planner({}, None, rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
        writers.append((planner, writer))
    first_planner, first_writer = writers[0]
    try:
        whole, _ = first_planner.create_global_plan(local)
        whole = first_writer.prepare_global_plan(whole)
        results = [
            writer.write_data(planner.finish_plan(plan), planner).wait()
            for (planner, writer), plan in zip(writers, whole, strict=True)
        ]
        first_writer.finish(Metadata({}), results)
    except BaseException:
        place.abandon()
        raise


def load_ranks(ranks: Sequence[Any], storage: Any, *, verify: bool = True, cast: bool = False) -> list[Any]:
    """What each rank asks for, loaded as these many ranks would."""
    found = find(storage, "latest")
    planners = [
        LoadPlanner(found, lambda asked=each: Wishes(asked, found.manifest), StrictHandling.RAISE_ALL, cast=cast)
        for each in ranks
    ]
    plans = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    loaded = []
    for planner, plan in zip(planners, plans, strict=True):
        planner.finish_plan(plan)
        fetch, wishes = Fetch(found, verify=verify), planner.wishes
        fetch.tensors(planner.plan, wishes.tensors)
        objects = fetch.objects([each.unique_key for each in wishes.objects])
        common = fetch.common(wishes)
        fetch.conclude()
        loaded.append(wishes.assembled(objects, common, planner.decision.skipped))
    return loaded
