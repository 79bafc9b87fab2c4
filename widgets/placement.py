"""What every rank holds and does.

Owns: the state for the browser, and what a click on a rank asks for. Refuses: to know where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traitlets

from rankbook.errors import BadRequest
from rankbook.formatting import format_bytes, format_shape
from rankbook.protocol.telemetry import Holding, MemoryUse, Placement, RankDetail, RankPlacement, Variable
from rankbook.widgets.live_view import LiveView, end_of, script
from rankbook.widgets.render import placement as picture
from rankbook.widgets.sources import Feed
from rankbook.widgets.view_model import Message, Part, compact


class PlacementPart(Part):
    """The ranks of a cluster, from the feed's "placement"."""

    name = "placement"

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._last: Placement | None = None
        self._end: Callable[[], None] | None = None

    def open(self, changed: Callable[[], None]) -> None:
        """See `Part`."""

        def arrived(state: object) -> None:
            if isinstance(state, Placement):
                self._last = state
                changed()

        self._end = self._feed.watch("placement", arrived)

    def close(self) -> None:
        """See `Part`."""
        end, self._end = self._end, None
        end_of(end)

    def ready(self) -> bool:
        """See `Part`."""
        return self._last is not None

    def fixed(self) -> str:
        """See `Part`."""
        return compact(fixed_of(self._last))

    def state(self) -> str:
        """See `Part`."""
        return compact(state_of(self._last))

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """`detail` of a rank, or `act` on it."""
        rank = message.get("rank")
        if rank is not None and not isinstance(rank, int):
            raise BadRequest(f"{rank!r} is no rank")
        if op == "detail":
            found = self._feed.ask("detail", rank=rank)
            assert isinstance(found, RankDetail)
            return detail_of(found)
        if op == "act" and message.get("kind") in {"interrupt", "restart"}:
            return self._feed.act(str(message["kind"]), rank)
        raise BadRequest(f"the placement view knows no {op!r}")

    def summary(self) -> str:
        """See `Part`."""
        return picture.summary(self._last)

    def text(self) -> str:
        """See `Part`."""
        return picture.text(self._last)

    def html(self) -> str:
        """See `Part`."""
        return picture.html(self._last)

    def svg(self) -> str:
        """See `Part`."""
        return picture.svg(self._last)


class PlacementView(LiveView):
    """Hosts, devices and ranks, live."""

    _esm = script("placement", last='export default mount("placement", {placement: drawPlacement});')
    placement_fixed = traitlets.Unicode("{}").tag(sync=True)
    placement_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, feed: Feed) -> None:
        super().__init__([PlacementPart(feed)])


def fixed_of(placement: Placement | None) -> dict[str, Any]:
    """What hardly ever changes: the ranks, their devices, what lives there."""
    if placement is None:
        return {}
    return {"cluster": placement.cluster, "ranks": [_fixed_rank(each) for each in placement.ranks]}


def _fixed_rank(each: RankPlacement) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "host": each.host,
        "pid": each.pid,
        "device": each.device,
        "model": each.device_name,
        "holdings": [_holding(holding) for holding in each.holdings],
    }


def _holding(holding: Holding) -> list[Any]:
    """The browser writes them as they stand; a loader's position moves, and goes with the state."""
    moves = holding.kind == "loader"
    return [holding.kind, holding.name, *picture.holding_words(holding, detail=not moves)]


def state_of(placement: Placement | None) -> dict[str, Any]:
    """What changes all the time, as short as can be: a list a rank, whose order static/placement.js knows."""
    if placement is None:
        return {}
    return {"at": round(placement.at, 1), "ranks": [_state_rank(each) for each in placement.ranks]}


def _state_rank(each: RankPlacement) -> list[Any]:
    return [
        each.rank,
        each.state,
        picture.state_words(each),
        int(each.lags),
        None if each.utilisation is None else round(100 * each.utilisation),
        each.steps,
        None if each.rate is None else float(f"{each.rate:.3g}"),
        None if each.memory is None else _memory(each.memory),
        [holding.detail for holding in each.holdings if holding.kind == "loader"],
    ]


def _memory(memory: MemoryUse) -> list[int]:
    return [
        memory.total,
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.other,
        memory.free,
        memory.shared,
    ]


def detail_of(detail: RankDetail) -> dict[str, Any]:
    """One rank from near."""
    return {
        "rank": detail.rank,
        "stack": list(detail.stack),
        "output": list(detail.output),
        "variables": [_variable(each) for each in detail.variables],
    }


def _variable(each: Variable) -> list[Any]:
    return [
        each.name,
        each.type,
        "" if each.shape is None else format_shape(each.shape),
        each.dtype,
        each.device,
        "" if each.bytes is None else format_bytes(each.bytes),
        each.preview,
    ]
