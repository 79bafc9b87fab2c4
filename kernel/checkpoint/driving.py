"""One call of `torch.distributed.checkpoint`, and the one error that all ranks raise.

Owns: `perform`, which is a whole save on the calling thread, and what is said of failures. Refuses: the bytes
(`writing.py`), the place (`place.py`), threads (`async_save.py`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rankbook.checkpoint.contents import Contents
from rankbook.checkpoint.place import Place
from rankbook.checkpoint.telling import Telling
from rankbook.checkpoint.writing import PlanAgain, Planner, Plans, Writer
from rankbook.errors import CheckpointingException

_plans = Plans()


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its `step` and `name` in the `folder`, this rank's bytes, the seconds that it took."""

    folder: str
    name: str
    step: int | None
    bytes: int
    seconds: float


_latest: list[Saved] = []


def perform(
    contents: Contents,
    place: Place,
    telling: Telling,
    *,
    metadata: dict[str, Any],
    fully_parallel: bool = False,
    group: Any = None,  # noqa: ANN401 - a process group
) -> Saved:
    """The whole of a save, on every rank of `group`. Raises `CheckpointingException`, the same on every rank."""
    began = time.monotonic()
    alone = not dist.is_initialized()
    for whole in (False, True):
        planner = Planner(contents, _plans, fully_parallel=fully_parallel, whole=whole)
        writer = Writer(place, contents, planner, telling, metadata)
        try:
            with quiet(alone):
                dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as failure:
            if not whole and all(isinstance(error, PlanAgain) for error, _ in failure.failures.values()):
                continue
            _plans.forget()
            if writer.is_coordinator:
                place.abandon()
            telling.failed(said := words(failure, "save"))
            raise_own(failure, writer.rank, said)
        except BaseException as error:  # the ranks have lost each other
            _plans.forget()
            if writer.is_coordinator:
                place.abandon()
            telling.failed(f"{type(error).__name__}: {error}")
            error.add_note(f"The save to {place.folder} was broken off; what was saved before is untouched.")
            raise
        break
    saved = Saved(place.folder, telling.name, telling.step, telling.written, time.monotonic() - began)
    _latest[:] = [saved]
    telling.enter("done")
    telling.check()  # the checkpoint is there; what the listener raised is told all the same
    return saved


def last_saved() -> Saved | None:
    """The last checkpoint that this process has saved with the others; None if there is none."""
    return _latest[0] if _latest else None


def raise_own(failure: CheckpointException, rank: int, said: str) -> NoReturn:
    """Raise what this rank is to see: the person's interrupt if it hit here, else the words for all."""
    own = failure.failures.get(rank, (None, None))[0]
    if isinstance(own, KeyboardInterrupt):
        raise own from None
    raise CheckpointingException(said) from (None if isinstance(own, CheckpointingException) else own)


@contextmanager
def quiet(alone: bool) -> Iterator[None]:
    """Torch warns of a process without a process group, for which this is what was meant."""
    if alone:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    yield


def words(failure: CheckpointException, what: str) -> str:
    """What has happened on which rank, the same words on every rank."""
    by_text: dict[str, list[int]] = {}
    for rank, (error, _) in sorted(failure.failures.items()):
        known = isinstance(error, CheckpointingException)
        by_text.setdefault(str(error) if known else f"{type(error).__name__}: {error}", []).append(rank)
    if len(by_text) == 1 and all(isinstance(error, CheckpointingException) for error, _ in failure.failures.values()):
        return next(iter(by_text))
    told = "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in by_text.items())
    return f"the {what} failed, and nothing was changed: {told}" if what == "save" else f"the {what} failed: {told}"
