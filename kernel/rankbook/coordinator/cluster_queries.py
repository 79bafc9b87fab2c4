"""What can be asked of the ranks whatever they run.

Owns: the part of the public `Cluster` that looks and changes nothing. Refuses: to wait longer than it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankbook.coordinator import completion
from rankbook.coordinator.cluster_tasks import RankSelection, Workplace
from rankbook.coordinator.comm_channels import Comms
from rankbook.coordinator.dap_channels import Debugs
from rankbook.coordinator.evaluate import Peeked, peek
from rankbook.coordinator.monitor import ANSWER_TIMEOUT, Glance
from rankbook.protocol.messages import Stack
from rankbook.protocol.queries import Completion
from rankbook.protocol.telemetry import Placement, RankDetail, ShardMap, Statistic, Variable

STACK_TIMEOUT = 1.0
"""Seconds for the ranks' second threads to answer, which takes them a millisecond."""


class Sight(Workplace):
    """Looks at the ranks of a cluster."""

    def watch(self, kind: str, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call back with each new picture of the ranks until what this returns is called; the last one always comes.

        `kind`: "placement" gives `Placement`, "status" the same without what lives on the ranks, "saves" gives `Saves`.
        At most ten times a second, on a thread of its own. Raises `BadRequest`.
        """
        return self._lookout.watch(kind, callback)

    def placement(self, *, timeout: float = ANSWER_TIMEOUT) -> Placement:
        """What every rank does and holds now, also while it runs; who does not answer in time is unresponsive."""
        return self._lookout.placement(timeout=timeout)

    @property
    def comms(self) -> Comms:
        """Those of widgets that live on the ranks, for whoever passes them on to a front end."""
        return self._crew.driver.presence.comms

    @property
    def debugs(self) -> Debugs:
        """Those of the ranks, for whoever passes them on to a front end."""
        return self._crew.driver.presence.debugs

    def glance(self) -> Glance:
        """For a cell's `head`: looks at the ranks without waiting for them."""
        return self._lookout.glance()

    def detail(self, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> RankDetail:
        """The stack, the last output and the variables of `rank`, also while it runs. Raises `LostRank`."""
        return self._lookout.detail(rank, timeout=timeout)

    def variables(
        self, ranks: RankSelection = None, *, timeout: float = ANSWER_TIMEOUT
    ) -> dict[int, tuple[Variable, ...]]:
        """What is stored of each variable of `ranks`, also while they run; without those that do not answer in time."""
        return self._lookout.variables(self.select(ranks), timeout=timeout)

    def shards(self, name: str, *, timeout: float = ANSWER_TIMEOUT) -> ShardMap:
        """Which part of which tensor of the variable `name` lies on which rank, also while they run.

        `name` is that of a model, optimizer, state dict, DTensor or `ShardedTensor`. Raises `BadRequest`.
        """
        return self._lookout.shards(name, timeout=timeout)

    def statistic(self, name: str, key: str, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> Statistic:
        """Of what `rank` holds of the tensor `key` of `name`: minimum, mean, maximum, NaNs. Raises `BadRequest`."""
        return self._lookout.statistic(name, key, rank, timeout=timeout)

    def complete(
        self,
        text: str,
        cursor: int,
        *,
        ranks: RankSelection = None,
        variables: bool = False,
        timeout: float = completion.SOON,
    ) -> tuple[int, tuple[Completion, ...]]:
        """What may take the place of `text[start:cursor]` on the first of `ranks` that answers, and that `start`.

        From its live objects, also while it runs; no user code is run for it. `variables`: the cells' variables alone.
        Nothing, where there is no answer within `timeout` seconds.
        """
        return self._hints.complete(text, cursor, self.select(ranks), variables=variables, timeout=timeout)

    def inspect(
        self,
        text: str,
        cursor: int | None = None,
        *,
        ranks: RankSelection = None,
        source: bool = False,
        timeout: float = completion.SOON,
    ) -> str:
        """What the name under the cursor is on the first of `ranks` that answers, for people; "" if nobody knows."""
        at = len(text) if cursor is None else cursor
        return self._hints.inspect(text, at, self.select(ranks), source=source, timeout=timeout)

    def peek(self, expression: str, *, ranks: RankSelection = None, timeout: float = ANSWER_TIMEOUT) -> list[Peeked]:
        """What a Python expression gives on each of `ranks`, in rank order, also while they run.

        Evaluated beside the cell, within `timeout` seconds; local variables of the functions that run count too. What
        goes wrong on a rank is in its `Peeked`. It may call functions, and what these change is changed, but it cannot
        begin a collective. C code that keeps the interpreter keeps it from the cell too. Raises `BadRequest` for what
        is no expression.
        """
        return peek(self._crew.driver, self.select(ranks), expression, timeout=timeout)

    def stacks(self, *, timeout: float = STACK_TIMEOUT) -> dict[int, Stack | None]:
        """Where each rank's main thread is; None for a rank that did not answer within `timeout` seconds."""
        answers = self._crew.driver.wait_stacks(timeout=timeout)
        return {rank: answers.get(rank) for rank in self._state.ranks}
