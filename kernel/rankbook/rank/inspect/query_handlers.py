"""Answers the notebook's questions while the main thread works.

Owns: what is looked at how often, and what is remembered between two looks. Refuses: the main thread; it is called on
a thread of its own, and only while somebody looks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from rankbook.errors import RankbookError
from rankbook.protocol import telemetry
from rankbook.protocol.messages import Frame
from rankbook.protocol.queries import (
    Answer,
    AskDetail,
    AskLook,
    AskShards,
    AskStatistic,
    DetailTold,
    Look,
    Looked,
    NothingTold,
    Sample,
    StatisticTold,
)
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankDetail, Struct
from rankbook.rank.inspect import object_discovery, tensor_introspection
from rankbook.rank.inspect.device_memory import GradientCounter, Utilisation, device_name, memory_use
from rankbook.rank.inspect.object_discovery import Inventory
from rankbook.rank.inspect.tensor_introspection import Breath
from rankbook.rank.inspect.tensor_stats import statistic
from rankbook.rank.inspect.variables import list_variables
from rankbook.rank.tracebacks import is_users

_AT_MOST = {True: 1 / 200, False: 1 / 50}
"""The share of a processor that the search for what lives here may take while a cell runs, and while none does."""
_SOONEST = 0.5
"""Seconds until the device's memory is read again. What only counts is read at each look."""
_PAUSES = 1.0, 4.0
"""Seconds between two searches while a cell runs: the fewest, and the most, after some that found nothing new."""
_COUNT_TIMEOUT = 0.02
"""Seconds that a search waits for the count of gradients; a later one is in the next picture."""
_LAST_SAVES = 16


class Work(Protocol):
    """What the main thread does, seen from outside. Any thread."""

    running: int | None

    def line(self) -> int | None:
        """Where in its cell it is."""

    def frames(self) -> tuple[Frame, ...]:
        """Its stack."""

    def waits(self) -> tuple[str, float]:
        """Its oldest collective that has not ended, and for how many seconds; "" if there is none."""

    def namespace(self) -> dict[str, object]:
        """A copy of the variables."""

    def hidden(self) -> Collection[str]:
        """The names that were there before any cell."""

    def run_when_idle(self, function: Callable[[], None]) -> None:
        """Call `function` on the main thread between two tasks: now, if no task runs."""


class Lookout:
    """Answers for `rank`, which computes on `device`."""

    def __init__(self, work: Work, rank: int, device: torch.device) -> None:
        self._work = work
        self._rank = rank
        self._device = device
        self._host = socket.gethostname()
        self._device_name = ""
        self._utilisation = Utilisation(device)
        self._utilised: float | None = None
        self._inventory: Inventory | None = None
        self._memory: MemoryUse | None = None
        self._gradients = GradientCounter(work.run_when_idle)
        self._due = self._searched = self._cost = 0.0
        self._pause = _PAUSES[0]
        self._cell: int | None = None
        self._version = 0
        self._holdings: tuple[Holding, ...] = ()
        self._ended: tuple[CheckpointSave, ...] = ()
        self._ending = threading.Lock()
        self._listens = False

    def answer(self, question: Look) -> Answer:
        """The answer, or why there is none."""
        try:
            match question:
                case AskLook():
                    return self._look(question)
                case AskDetail(token):
                    return DetailTold(token, self._detail())
                case AskShards(token, name, others):
                    from rankbook.rank.inspect import shard_map

                    return shard_map.tell_shards(
                        token, self._work.namespace(), name, self._rank, Breath(), others=others
                    )
                case AskStatistic(token, name, key):
                    from rankbook.rank.inspect import shard_map

                    tensor = shard_map.find_tensor(self._work.namespace(), name, key, Breath())
                    return StatisticTold(token, statistic(self._rank, tensor))
        except RankbookError as error:
            return NothingTold(question.token, str(error))

    def at_once(self, question: Look) -> Answer | None:
        """A look for which nothing has to be searched or measured: it counts and tells."""
        if not isinstance(question, AskLook) or question.fresh:
            return None
        now = time.monotonic()
        if question.holdings and (now >= self._due or self._search_is_due(now)):
            return None
        return self._told(question)

    # A look

    def _look(self, question: AskLook) -> Looked:
        if question.holdings:
            now = time.monotonic()
            if question.fresh or self._search_is_due(now):
                self._search()
            if question.fresh or now >= self._due:
                self._measure()
        return self._told(question)

    def _search_is_due(self, now: float) -> bool:
        running = self._work.running
        if running != self._cell:
            self._cell, self._pause = running, _SOONEST
        pause = _SOONEST if running is None else self._pause
        wait = max(pause, self._cost / _AT_MOST[running is not None])
        return self._inventory is None or now >= self._searched + wait

    def _told(self, question: AskLook) -> Looked:
        if question.saves:
            self._listen()
        changed = question.holdings and question.known != self._version
        return Looked(
            question.token,
            self._sample(memory=question.holdings),
            self._version,
            self._holdings if changed else None,
            self._saves() if question.saves else (),
        )

    def _saves(self) -> tuple[CheckpointSave, ...]:
        """Those under way, and the last ones that have ended; of one checkpoint that was saved twice the later save."""
        running = [each for each in telemetry.snapshot("checkpoint ") if isinstance(each, CheckpointSave)]
        again = {(each.folder, each.name) for each in running}
        return (*running, *(each for each in self._ended if (each.folder, each.name) not in again))

    def _sample(self, *, memory: bool) -> Sample:
        waits_for, waited = self._work.waits()
        return Sample(
            host=self._host,
            device_name=self._device_name,
            cell=self._work.running,
            line=self._work.line(),
            waits_for=waits_for,
            waited=waited,
            memory=self._memory if memory else None,
            utilisation=self._utilised if memory else None,
            steps=self._steps(),
            at=time.monotonic(),
        )

    def _steps(self) -> int | None:
        counted = [each.steps for each in telemetry.snapshot("training") if isinstance(each, telemetry.TrainingStep)]
        if counted and counted[0]:
            return counted[0]
        found = [] if self._inventory is None else [each() for each in self._inventory.counters]
        steps = [tensor_introspection.steps_of_optimizer(each) for each in found if each is not None]
        return max((each for each in steps if each is not None), default=None)

    def _search(self) -> None:
        began = time.thread_time()
        breath = Breath()
        if not self._device_name:
            self._device_name = device_name(self._device)
        found = object_discovery.find(self._work.namespace(), breath)
        inventory = object_discovery.take_inventory(found, str(self._device), breath)
        self._gradients.request(inventory.trainable, timeout=_COUNT_TIMEOUT)
        if self._inventory is None or inventory.holdings != self._holdings:
            self._version += 1
            self._holdings = inventory.holdings
            self._pause = _PAUSES[0]
        else:
            self._pause = min(max(2 * self._pause, _PAUSES[0]), _PAUSES[1])
        self._inventory = inventory
        self._searched, self._cost = time.monotonic(), time.thread_time() - began
        self._due = 0.0

    def _measure(self) -> None:
        found = self._inventory
        assert found is not None
        self._memory = memory_use(self._device, found.parameters, self._gradients.bytes, found.optimizer)
        self._utilised = self._utilisation.now()  # a call into the driver, which may take its time
        self._due = time.monotonic() + _SOONEST

    def _listen(self) -> None:
        """A save that has ended is in no snapshot any more."""
        if self._listens:
            return
        self._listens = True
        before: Callable[[Struct], Any] | None = telemetry.listener

        def listener(struct: Struct) -> None:
            if isinstance(struct, CheckpointSave) and struct.phase in {"done", "failed"}:
                with self._ending:
                    others = [each for each in self._ended if (each.folder, each.name) != (struct.folder, struct.name)]
                    self._ended = tuple([*others, struct][-_LAST_SAVES:])
            if before is not None:
                before(struct)

        telemetry.listener = listener

    # More of it

    def _detail(self) -> RankDetail:
        frames = [each for each in self._work.frames() if each.file.startswith("Cell In[") or is_users(each.file)]
        stack = tuple(
            f"{each.file}, line {each.line}"
            + (f", in {each.function}" if each.function != "<module>" else "")
            + (f": {each.source}" if each.source else "")
            for each in frames
        )
        variables = list_variables(self._work.namespace(), self._work.hidden(), Breath())
        return RankDetail(self._rank, stack, (), variables)
