"""Where a loader is: (seed, epoch, batches delivered).

Owns: which epoch comes next, and the state that a fresh process continues from. Refuses: data, other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rankbook.errors import BadRequest


@dataclass
class Position:
    """`epoch` is the one that was begun last, -1 before the first; `delivered` are the batches it has given so far.

    `resume` is where the next pass starts after `load_state_dict`, and `restore` says that `generator`, the state of
    the person's own generator as a pass begins, is to be put back then.
    `reader`, until the next pass, is what torchdata's loader had to say in a state that was loaded.
    `seeded_by` is what `set_seed` had been given when `seed` was fixed; another `set_seed` later gives another seed.
    """

    seed: int | None = None
    seeded_by: int | None = None
    epoch: int = -1
    delivered: int = 0
    finished: bool = True
    run: int = 0
    generator: torch.Tensor | None = None
    wanted_epoch: int | None = None
    resume: int = 0
    restore: bool = False
    reader: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of `epoch`. A pass that was to be resumed still is, if it is the same epoch's."""
        if self.resume and epoch != self.next_epoch():
            self.resume, self.restore, self.reader = 0, False, None
        self.wanted_epoch = epoch

    def next_epoch(self) -> int:
        """The epoch of the next pass."""
        return self.epoch + 1 if self.wanted_epoch is None else self.wanted_epoch

    def begin(self, seed: int, epoch: int, skip: int) -> None:
        """A pass begins, `skip` batches after its start."""
        self.seed, self.epoch, self.delivered = seed, epoch, skip
        self.finished, self.wanted_epoch, self.resume, self.restore = False, None, 0, False
        self.reader = None
        self.run += 1

    def state_dict(self, world_size: int, total_rows: int) -> dict[str, Any]:
        """What `load_state_dict` continues from. `total_rows` are all ranks' samples of a round, 0 if not known."""
        pending = self.resume or self.wanted_epoch is not None
        return {
            "seed": self.seed,
            "epoch": self.next_epoch() if pending else self.epoch,
            "batches": self.resume if pending else self.delivered,
            "finished": False if pending else self.finished,
            "world_size": world_size,
            "total_batch_size": total_rows,
            "generator": self.generator,
        }

    def load_state_dict(self, state: dict[str, Any], world_size: int, total_rows: int, seeded_by: int | None) -> None:
        """Have the next pass continue where `state` was taken.

        Raises `BadRequest` if the batches delivered there do not end where a round of this world size ends.
        """
        unknown = {"seed", "epoch", "batches", "finished", "world_size", "total_batch_size"} - set(state)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise BadRequest(f"this is no loader's state, for it has no {names}; take one by state_dict()")
        skip = 0 if state["finished"] else rounds_here(state, world_size, total_rows)
        self.seed, self.seeded_by = state["seed"], seeded_by
        self.epoch = state["epoch"] if state["finished"] else state["epoch"] - 1
        self.delivered, self.finished = 0, True
        self.resume, self.wanted_epoch = skip, None
        self.generator = state.get("generator")
        self.restore = self.generator is not None
        self.reader = state.get("reader")


def rounds_here(state: dict[str, Any], world_size: int, total_rows: int) -> int:
    """How many rounds of this world size make up the batches that `state` has delivered."""
    batches, then, rows = state["batches"], state["world_size"], state["total_batch_size"]
    unit, before, now = ("samples", rows, total_rows) if rows and total_rows else ("batches", then, world_size)
    if before == now:
        return int(batches)
    whole, rest = divmod(batches * before, now)
    if rest:
        raise BadRequest(
            f"the loader cannot continue there with {world_size} ranks: {batches} batches * {before} {unit} each = "
            f"{batches * before} {unit}, no multiple of the {now} per round here; "
            f"resume with {then} ranks, or save where it is one"
        )
    return int(whole)
