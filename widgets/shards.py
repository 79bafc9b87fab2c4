"""Where the parts of every tensor of a variable are.

Owns: the list for the browser, one tensor's chunks when it is asked for. Refuses: to know where they come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

import traitlets

from rankbook.errors import BadRequest, RankbookError
from rankbook.protocol.telemetry import Shard, ShardedTensorMap, ShardMap, Statistic
from rankbook.widgets.daemon_threads import start_thread
from rankbook.widgets.live_view import LiveView, script
from rankbook.widgets.render import shards as picture
from rankbook.widgets.sources import Feed
from rankbook.widgets.view_model import Message, Part, compact

MOST_DRAWN = 4096  # chunks of one tensor; more are not told apart by eye, nor drawn in time


class ShardsPart(Part):
    """The tensors of one variable, asked for once as it is opened, and again when the reader wants so."""

    name = "shards"

    def __init__(self, feed: Feed, variable: str = "", search: str = "") -> None:
        self._feed, self._variable, self._search = feed, variable, search
        self._lock = Lock()
        self._asked = 0
        self._found: ShardMap | None = None
        self._fixed = compact({"name": variable, "search": search})
        self._tensors: dict[str, ShardedTensorMap] = {}
        self._chosen: ShardedTensorMap | None = None
        self._changed: Callable[[], None] | None = None

    def open(self, changed: Callable[[], None]) -> None:
        """See `Part`."""
        self._changed = changed
        if self._found is None and self._variable:
            start_thread(Thread(target=self._begin, name="rankbook-shards"))
        changed()

    def _begin(self) -> None:
        self._ask(self._variable)
        if self._changed is not None:
            self._changed()

    def close(self) -> None:
        """See `Part`."""
        self._changed = None

    def ready(self) -> bool:
        """See `Part`."""
        return self._found is not None or not self._variable

    def fixed(self) -> str:
        """See `Part`."""
        return self._fixed

    def state(self) -> str:
        """See `Part`."""
        return "{}"

    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - JSON
        """`name` asks for a variable, `tensor` for one of its tensors, `statistic` for one rank's values of it."""
        if op == "name":
            trouble = self._ask(str(message.get("name", "")).strip())
            if self._changed is not None:
                self._changed()
            return trouble
        with self._lock:
            variable, tensor = self._variable, self._tensors.get(str(message.get("key")))
        if tensor is None:
            raise BadRequest(f"{variable} has no tensor {message.get('key')!r} any more: press Show again")
        self._chosen = tensor
        if op == "tensor":
            return tensor_of(tensor)
        if op == "statistic":
            found = self._feed.ask("statistic", name=variable, key=tensor.key, rank=message.get("rank"))
            assert isinstance(found, Statistic)
            return picture.statistic_words(found)
        raise BadRequest(f"the shards view knows no {op!r}")

    def _ask(self, name: str) -> str:
        """What is wrong with the variable, if anything. Of questions that overlap the last one counts."""
        if not name:
            raise BadRequest("which variable? Write its name, such as model")
        with self._lock:
            self._asked = asked = self._asked + 1
        try:
            found = self._feed.ask("shards", name=name)
        except RankbookError as error:
            found = ShardMap(name, "", (), str(error))
        assert isinstance(found, ShardMap)
        with self._lock:
            if asked == self._asked:
                self._variable, self._found = name, found
                self._tensors = {tensor.key: tensor for tensor in found.tensors}
                self._chosen = None
                # the number, so that the browser hears of parts that have moved between the same tensors, too
                self._fixed = compact({**fixed_of(found), "search": self._search, "asked": asked})
        return found.trouble

    def summary(self) -> str:
        """See `Part`."""
        return picture.summary(self._found, self._variable)

    def text(self) -> str:
        """See `Part`."""
        return picture.text(self._found, self._variable, self._search)

    def html(self) -> str:
        """See `Part`."""
        return picture.html(self._found, self._variable, self._search)

    def svg(self) -> str:
        """See `Part`."""
        return picture.svg(self._found, self._variable, self._chosen)


class ShardsView(LiveView):
    """The parts of a variable's tensors. `search` is what the list of names is filtered by at first."""

    _esm = script("shards", last='export default mount("shards", {shards: drawShards});')
    shards_fixed = traitlets.Unicode("{}").tag(sync=True)
    shards_state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, feed: Feed, name: str, *, search: str = "") -> None:
        super().__init__([ShardsPart(feed, name, search)])


def fixed_of(found: ShardMap) -> dict[str, Any]:
    """The names, dtypes and global shapes of all tensors, and what each rank holds of them."""
    return {
        "name": found.name,
        "kind": found.kind,
        "trouble": found.trouble,
        "tensors": [[tensor.key, tensor.dtype, list(tensor.shape)] for tensor in found.tensors],
        "totals": list(picture.totals(found).items()),
    }


def tensor_of(tensor: ShardedTensorMap) -> dict[str, Any]:
    """One tensor's chunks, replicas of the same one together: offset, shape, and who has it."""
    chunks = chunks_of(tensor.shards)
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "left": max(0, len(chunks) - MOST_DRAWN),
        "chunks": [
            [
                list(holders[0].offset),
                list(holders[0].shape),
                [[each.rank, each.replica, each.device, each.bytes] for each in holders],
            ]
            for holders in chunks[:MOST_DRAWN]
        ],
    }


def chunks_of(shards: Sequence[Shard]) -> list[list[Shard]]:
    """The shards by the part of the tensor that they are, in the tensor's order; replicas in theirs."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Shard]] = defaultdict(list)
    for shard in shards:
        found[shard.offset, shard.shape].append(shard)
    return [sorted(found[place], key=lambda each: (each.replica, each.rank)) for place in sorted(found)]
