"""Status monitoring of the ranks: periodic queries while a view is open, and single queries on demand.

Three parts. `StatusMonitor` queries the ranks at most ten times a second while it has subscriptions; every
`Subscription` calls its callback on a thread of its own, so a slow view does not delay the others or the driver.
`NonBlockingMonitor` does the same for the driver thread, which must not wait. `StatusAggregator` turns the replies into
`Placement` and `Saves`; it does no I/O and is given the time. `merge_shards` does the same for the map of a variable's
shards.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.queries import QueryClient
from rankbook.coordinator.states import RankState
from rankbook.errors import BadRequest, LostRank, RankbookError
from rankbook.formatting import strip_ansi
from rankbook.protocol.queries import (
    Answer,
    Box,
    DetailReply,
    GetDetail,
    GetShards,
    GetStatistic,
    GetStatus,
    QueryFailed,
    Question,
    RankSample,
    RankTensor,
    ShardsReply,
    StatisticReply,
    StatusReply,
)
from rankbook.protocol.telemetry import (
    Holding,
    Placement,
    RankDetail,
    RankPlacement,
    RankSave,
    Saves,
    Shard,
    ShardedTensorMap,
    ShardMap,
    Statistic,
    Struct,
    Variable,
)
from rankbook.ranks import group_ranks, name_ranks

EVERY = 0.1
"""Seconds between two rounds of queries."""
GATHER = 0.05
"""Seconds that a round waits for replies. A later reply is used in the next round."""
ANSWER_TIMEOUT = 2.0
"""Seconds that a single query waits for a reply."""
KINDS = ("placement", "saves", "status")
_LINES = 20

Callback = Callable[[Struct], None]


class Subscription:
    """Call `callback` on a thread of its own with the latest state. A slow callback misses intermediate states."""

    def __init__(self, kind: str, callback: Callback) -> None:
        self.kind = kind
        self._callback = callback
        self._changed = threading.Condition()
        self._next: Struct | None = None
        self._last: Struct | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"rankbook-{kind}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Return True if `end` was called or the callback raised."""
        return self._ended

    def offer(self, picture: Placement | Saves) -> None:
        """Queue `picture` for the callback, unless it differs from the last one only in its time."""
        with self._changed:
            same = self._last is not None and msgspec.structs.replace(picture, at=0.0) == self._last
            if not same and not self._ended:
                self._last = msgspec.structs.replace(picture, at=0.0)
                self._next = picture
                self._changed.notify_all()

    def end(self, *, at_once: bool = True) -> None:
        """Stop calling back. Unless `at_once`, a state that is already queued is still delivered."""
        with self._changed:
            self._ended = True
            self._next = None if at_once else self._next
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._next is None and not self._ended:
                    self._changed.wait()
                picture, self._next = self._next, None
            if picture is None:
                return
            try:
                self._callback(picture)
            except Exception as error:  # noqa: BLE001 - shown in full; other subscriptions are unaffected
                self._ended = True
                sys.excepthook(type(error), error, error.__traceback__)
                return


class StatusMonitor:
    """Query the status of a cluster's ranks. Any thread but the driver's.

    The monitor thread (`_run`) exists only while there are subscriptions. In every round it queries the ranks that have
    replied to their last query, waits at most `GATHER` seconds for replies, and offers the result to the subscriptions.
    The driver thread delivers the replies (`_deliver_to`) under the lock `_changed`.
    """

    def __init__(self, crew: ClusterProcesses) -> None:
        self._crew = crew
        self._lock = threading.Lock()
        self._watchers: list[Subscription] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    # Watching

    def watch(self, kind: str, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every new state of the ranks, until the returned function is called.

        `kind` is "placement" for `Placement`, "status" for `Placement` without models, optimizers and loaders, or
        "saves" for `Saves`. The callback runs on a thread of its own, at most ten times a second, and always gets the
        last state. Raises `BadRequest`.
        """
        if kind not in KINDS:
            raise BadRequest(f"{kind!r} cannot be watched; there are {', '.join(KINDS)}")
        watcher = Subscription(kind, callback)
        with self._lock:
            self._watchers.append(watcher)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankbook-lookout", daemon=True)
                self._thread.start()

        def end() -> None:
            watcher.end()
            with self._changed:
                self._changed.notify_all()

        return end

    def _run(self) -> None:
        board = StatusAggregator(_name_of(self._crew))
        questions: QueryClient | None = None
        token = 0
        while (watchers := self._still_watching()) is not None:
            began = time.monotonic()
            driver = self._driver
            if driver is not None:
                if questions is None:
                    questions = driver.presence.questions
                    token = questions.open(self._deliver_to(board))
                self._round(driver, board, token, {watcher.kind for watcher in watchers})
            self._show(board, watchers)
            if self._driver is None:
                for watcher in watchers:
                    watcher.end(at_once=False)
            with self._changed:
                self._changed.wait_for(
                    lambda current=watchers: any(subscription.ended for subscription in current),  # type: ignore[misc]
                    max(0.0, began + EVERY - time.monotonic()),
                )
        if questions is not None:
            questions.close(token)

    def _still_watching(self) -> list[Subscription] | None:
        with self._lock:
            self._watchers = [watcher for watcher in self._watchers if not watcher.ended]
            if not self._watchers:
                self._thread = None
                return None
            return list(self._watchers)

    def _deliver_to(self, board: StatusAggregator) -> Callable[[int, Answer], None]:
        def deliver(rank: int, answer: Answer) -> None:
            with self._changed:
                if isinstance(answer, StatusReply):
                    board.told(rank, answer)
                elif isinstance(answer, QueryFailed):
                    board.refused(rank)
                if not board.owed():  # one wake-up per round: every wake-up takes time from the training ranks
                    self._changed.notify_all()

        return deliver

    @property
    def _driver(self) -> Driver | None:
        """Return the driver; None once the ranks are stopped or the driver has failed."""
        try:
            return self._crew.driver
        except RankbookError:
            return None

    def _round(
        self,
        driver: Driver,
        board: StatusAggregator,
        token: int,
        kinds: set[str],
        *,
        fresh: bool = False,
        timeout: float = GATHER,
    ) -> None:
        """Query the ranks that owe no reply, and wait up to `timeout` seconds for replies."""
        questions = driver.presence.questions
        with self._changed:
            due = board.to_ask(self._views())
        for rank, version in due.items():
            with self._changed:
                board.asked(rank, time.monotonic())
            question = GetStatus(token, "placement" in kinds, version, fresh, "saves" in kinds)
            if not questions.ask(rank, question):
                with self._changed:
                    board.refused(rank)
        with self._changed:
            self._changed.wait_for(lambda: not board.owed(), timeout)

    def _show(self, board: StatusAggregator, watchers: list[Subscription]) -> None:
        with self._changed:
            views = self._views()
            placement = board.placement(views, now=time.monotonic(), wall=time.time())
            saves = board.saves(views, wall=time.time())
        for watcher in watchers:
            watcher.offer(saves if watcher.kind == "saves" else placement)

    def _views(self) -> list[RankView]:
        return rank_views(self._crew, self._driver)

    def glance(self) -> NonBlockingMonitor:
        """Return a non-blocking monitor for the driver thread."""
        return NonBlockingMonitor(self._crew)

    # Asking

    def placement(self, *, timeout: float = ANSWER_TIMEOUT) -> Placement:
        """Query all ranks and return the result. A rank that does not reply in time is unresponsive."""
        board = StatusAggregator(_name_of(self._crew))
        driver = self._driver
        if driver is not None:
            questions = driver.presence.questions
            token = questions.open(self._deliver_to(board))
            try:
                self._round(driver, board, token, {"placement"}, fresh=True, timeout=timeout)
            finally:
                questions.close(token)
        with self._changed:
            return board.placement(self._views(), now=time.monotonic(), wall=time.time())

    def detail(self, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> RankDetail:
        """Return stack, output and variables of the rank; only the output if it is dead.

        Raises `LostRank` if the rank does not reply.
        """
        output = self._last_lines(rank)
        if rank not in self._crew.driver.answering():
            return RankDetail(rank, (), output, ())
        answer = self._ask_one(rank, GetDetail, timeout)
        assert isinstance(answer, DetailReply)
        return msgspec.structs.replace(answer.detail, output=output)

    def variables(self, ranks: tuple[int, ...], *, timeout: float) -> dict[int, tuple[Variable, ...]]:
        """See `Cluster.variables`."""
        driver = self._crew.driver
        answering = [rank for rank in ranks if rank in driver.answering()]
        answers = driver.presence.questions.wait_answers(
            answering, lambda token, _: GetDetail(token), timeout=timeout, there=driver.answering
        )
        replies = {rank: answers[rank] for rank in ranks if rank in answers}
        return {rank: reply.detail.variables for rank, reply in replies.items() if isinstance(reply, DetailReply)}

    def shards(self, name: str, *, timeout: float = ANSWER_TIMEOUT) -> ShardMap:
        """Return the layout of the tensors in the variable `name`. Raises `BadRequest` if no rank has such a variable.

        The first rank also computes the regions that the other ranks hold, for ranks that do not reply. If the first
        rank itself does not reply, another one is asked to do so.
        """
        driver = self._crew.driver
        devices = dict(enumerate(self._crew.placement.devices))
        ranks = driver.answering()
        first = ranks[:1]
        answers = driver.presence.questions.wait_answers(
            ranks,
            lambda token, rank: GetShards(token, name, others=rank in first),
            timeout=timeout,
            there=driver.answering,
        )
        missing = set(devices) - answers.keys()
        if missing and (rest := [rank for rank in answers if rank not in first]) and not set(first) & answers.keys():
            answers |= driver.presence.questions.wait_answers(
                rest[:1],
                lambda token, _: GetShards(token, name, others=True),
                timeout=timeout,
                there=driver.answering,
            )
        refusals = {answer.trouble for answer in answers.values() if isinstance(answer, QueryFailed)}
        if answers and all(isinstance(answer, QueryFailed) for answer in answers.values()):
            raise BadRequest("; ".join(sorted(refusals)))
        return merge_shards(name, answers, tuple(devices), devices)

    def statistic(self, name: str, key: str, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> Statistic:
        """Return statistics of `rank`'s part of the tensor `key`. Raises `BadRequest`, `LostRank`."""
        answer = self._ask_one(rank, lambda token: GetStatistic(token, name, key), timeout)
        assert isinstance(answer, StatisticReply)
        return answer.statistic

    def _ask_one(self, rank: int, make: Callable[[int], Question], timeout: float) -> Answer:
        driver = self._crew.driver
        if rank not in self._crew.state.ranks:
            raise BadRequest(f"there is no rank {rank}; there are {len(self._crew.state.ranks)}")
        answers = driver.presence.questions.wait_answers(
            (rank,), lambda token, _: make(token), timeout=timeout, there=driver.answering
        )
        if rank not in answers:
            raise LostRank(
                f"rank {rank} has not answered within {timeout:g} s; %distributed status tells how it is", (rank,)
            )
        answer = answers[rank]
        if isinstance(answer, QueryFailed):
            raise BadRequest(f"rank {rank}: {answer.trouble}")
        return answer

    def _last_lines(self, rank: int) -> tuple[str, ...]:
        lines: list[str] = []
        for cell in reversed(self._crew.driver.cells()):
            if not (tail := cell.tail(rank)):
                continue
            text = strip_ansi(tail.decode(errors="replace"))
            lines[:0] = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")]
            if len(lines) >= _LINES:
                break
        return tuple(lines[-_LINES:])


class NonBlockingMonitor:
    """Monitor the ranks without blocking, for the driver thread.

    A call returns the replies that have arrived since the last one, and sends new queries.
    """

    def __init__(self, crew: ClusterProcesses) -> None:
        self._crew, self._driver = crew, crew.driver
        self._board = StatusAggregator(_name_of(crew))
        self._token = self._driver.presence.questions.open(self._deliver)

    def placement(self) -> Placement:
        """Return all ranks without models, optimizers and loaders, as of the previous call.

        Ranks that owe no reply are queried for the next call.
        """
        driver, now = self._driver, time.monotonic()
        views = rank_views(self._crew, driver)
        picture = self._board.placement(views, now=now, wall=time.time())
        for rank, version in self._board.to_ask(views).items():
            self._board.asked(rank, now)
            if not driver.presence.questions.ask(rank, GetStatus(self._token, False, version, False, False)):
                self._board.refused(rank)
        return picture

    def close(self) -> None:
        """Stop monitoring."""
        self._driver.presence.questions.close(self._token)

    def _deliver(self, rank: int, answer: Answer) -> None:
        if isinstance(answer, StatusReply):
            self._board.told(rank, answer)
        elif isinstance(answer, QueryFailed):
            self._board.refused(rank)


def rank_views(crew: ClusterProcesses, driver: Driver | None) -> list[RankView]:
    """Return the ranks as the cluster's state knows them. `driver` None: they are stopped."""
    return [
        RankView(
            rank=rank,
            incarnation=entry.incarnation,
            state=RankState.DEAD if driver is None else entry.state,
            pid=0 if driver is None else driver.infos[rank].pid or 0,
            device=crew.placement.devices[rank],
            cell=None if driver is None else _number_of(driver, rank),
            task=entry.cell,
            returns=entry.refork and driver is not None,
        )
        for rank, entry in crew.state.ranks.items()
    ]


def _name_of(crew: ClusterProcesses) -> str:
    """Return the key by which a detached cluster is attached; other clusters need no name."""
    return "" if crew.keep is None else crew.key


def _number_of(driver: Driver, rank: int) -> int | None:
    """Return the execution count of the rank's cell: 0 for a call, None if idle or for an internal task."""
    cell = driver.cell_of(rank)
    return None if cell is None or cell.number < 0 else cell.number


UNRESPONSIVE_AFTER = 1.5
"""Seconds without a reply after which a rank counts as unresponsive."""
WAITING_AFTER = 0.25
"""Seconds in a collective after which a rank counts as waiting: in training, ranks are always in some collective."""
_RATE_OVER = 5.0
"""Seconds over which the rate of steps is averaged."""
_BEHIND = 2
_BEHIND_SECONDS = 0.5
"""Tolerance in seconds, at the other ranks' rate: the ranks are not queried at the same moment."""


@dataclass(frozen=True)
class RankView:
    """A rank as the cluster's state knows it.

    `cell` is the notebook's execution count, `task` the cluster's own number of the task. `returns`: the rank is being
    restarted.
    """

    rank: int
    incarnation: int
    state: RankState
    pid: int
    device: str
    cell: int | None = None
    task: int | None = None
    returns: bool = False


@dataclass
class _Known:
    """State of one process of a rank, from its replies so far."""

    incarnation: int
    asked: float | None = None
    looked: StatusReply | None = None
    holdings: tuple[Holding, ...] = ()
    version: int = -1
    host: str = ""
    device_name: str = ""
    steps: deque[tuple[float, int]] = field(default_factory=deque)


class StatusAggregator:
    """Combine the ranks' replies into one state of the cluster `name`.

    It tracks which ranks owe a reply, and forgets what it knows of a rank when its incarnation changes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[int, _Known] = {}
        self._due: tuple[int, ...] = ()

    def to_ask(self, views: Iterable[RankView]) -> dict[int, int]:
        """Return the ranks that can reply and owe no reply, with the known version of their holdings."""
        versions = {}
        for view in views:
            record = self._of(view)
            if view.state in (RankState.IDLE, RankState.BUSY) and record.asked is None:
                versions[view.rank] = record.version
        self._due = tuple(versions)
        return versions

    def asked(self, rank: int, now: float) -> None:
        """Record that the rank was sent a query."""
        self._known[rank].asked = now

    def told(self, rank: int, looked: StatusReply) -> None:
        """Record the rank's reply."""
        record = self._known.get(rank)
        if record is None:
            return
        record.asked = None
        record.looked = looked
        if looked.holdings is not None:
            record.holdings, record.version = looked.holdings, looked.version
        record.host = looked.sample.host or record.host
        record.device_name = looked.sample.device_name or record.device_name
        _note_steps(record.steps, looked.sample)

    def refused(self, rank: int) -> None:
        """Record that the query failed, or could not be sent."""
        record = self._known.get(rank)
        if record is not None:
            record.asked = None

    def owed(self) -> bool:
        """Return True if one of the ranks queried last has not replied yet."""
        return any(self._known[rank].asked is not None for rank in self._due)

    def placement(self, views: Iterable[RankView], *, now: float, wall: float) -> Placement:
        """Return the state of all ranks, at `now` on the monotonic and `wall` on the wall clock."""
        rows = [self._row(view, now) for view in views]
        behind = stragglers_of(rows)
        ranks = tuple(msgspec.structs.replace(row, lags=True) if row.rank in behind else row for row in rows)
        return Placement(ranks, wall, self._name)

    def saves(self, views: Iterable[RankView], *, wall: float) -> Saves:
        """Return the checkpoint saves of all ranks."""
        entries = [
            RankSave(view.rank, save)
            for view in views
            if (reply := self._of(view).looked) is not None
            for save in reply.saves
        ]
        return Saves(tuple(entries), wall)

    def _of(self, view: RankView) -> _Known:
        record = self._known.get(view.rank)
        if record is None or record.incarnation != view.incarnation:
            record = self._known[view.rank] = _Known(view.incarnation)
        return record

    def _row(self, view: RankView, now: float) -> RankPlacement:
        record = self._of(view)
        sample = record.looked.sample if record.looked is not None else None
        state = _state_of(view, record, now)
        alive = state != "dead"
        fresh = sample if sample is not None and sample.cell == view.task else None
        return RankPlacement(
            rank=view.rank,
            host=record.host,
            pid=view.pid,
            device=view.device,
            device_name=record.device_name,
            state=state,
            cell=view.cell if alive else None,
            line=fresh.line if fresh is not None and alive else None,
            waits_for=fresh.waits_for if fresh is not None and alive else "",
            memory=sample.memory if sample is not None and alive else None,
            utilisation=sample.utilisation if sample is not None and alive else None,
            steps=sample.steps or 0 if sample is not None else 0,
            rate=_rate_of(record.steps) if alive else None,
            holdings=record.holdings if alive else (),
        )


def _state_of(view: RankView, known: _Known, now: float) -> str:
    if view.state is RankState.STARTING or view.returns:
        return "starting"
    if view.state not in (RankState.IDLE, RankState.BUSY):
        return "dead"
    if known.asked is not None and now - known.asked > UNRESPONSIVE_AFTER:
        return "unresponsive"
    if view.state is RankState.IDLE:
        return "idle"
    sample = known.looked.sample if known.looked is not None else None
    waits = sample is not None and sample.cell == view.task and sample.waits_for and sample.waited >= WAITING_AFTER
    return "waiting" if waits else "running"


def _note_steps(history: deque[tuple[float, int]], sample: RankSample) -> None:
    if sample.steps is None:
        return
    if history and sample.steps < history[-1][1]:  # another optimizer, or a checkpoint was loaded
        history.clear()
    history.append((sample.at, sample.steps))
    while len(history) > 2 and history[1][0] < sample.at - _RATE_OVER:
        history.popleft()


def _rate_of(history: deque[tuple[float, int]]) -> float | None:
    if len(history) < 2:
        return None
    (began, first), (ended, last) = history[0], history[-1]
    return (last - first) / (ended - began) if ended > began else None


def stragglers_of(rows: Iterable[RankPlacement]) -> set[int]:
    """Return the ranks that hold up the others of their cell.

    A rank does so if it is the only one that does not wait in a collective, or if it has taken clearly fewer steps.
    """
    groups: dict[int, list[RankPlacement]] = {}
    for row in rows:
        if row.cell is not None and row.state in {"running", "waiting", "unresponsive"}:
            groups.setdefault(row.cell, []).append(row)
    stragglers: set[int] = set()
    for group in groups.values():
        late = [row for row in group if row.state != "waiting"]
        if len(late) == 1 and len(group) > 1:
            stragglers.add(late[0].rank)
        for row in group:
            others = [peer for peer in group if peer is not row]
            if others and _is_behind(row, others):
                stragglers.add(row.rank)
    return stragglers


def _is_behind(row: RankPlacement, others: list[RankPlacement]) -> bool:
    steps = statistics.median(other.steps for other in others)
    rates = [other.rate for other in others if other.rate is not None]
    return steps - row.steps > max(_BEHIND, _BEHIND_SECONDS * statistics.median(rates or [0.0]))


def merge_shards(
    name: str, answers: Mapping[int, Answer], everyone: Collection[int], devices: Mapping[int, str]
) -> ShardMap:
    """Merge the ranks' replies into one map of shards.

    A rank's own description of its shards takes precedence; the regions computed by other ranks stand in for a rank
    that did not reply.
    """
    replies = {rank: reply for rank, reply in sorted(answers.items()) if isinstance(reply, ShardsReply)}
    troubles = group_ranks(
        (rank, answer.trouble)
        for rank, answer in sorted(answers.items())
        if isinstance(answer, QueryFailed | ShardsReply) and answer.trouble
    )
    for rank in everyone:
        if rank not in answers:
            troubles.setdefault("no answer; its parts are as the others computed them", []).append(rank)
    kinds = {reply.kind: rank for rank, reply in reversed(replies.items())}
    if len(kinds) > 1:
        troubles.setdefault(f"it is not the same kind of thing everywhere: {', '.join(sorted(kinds))}", []).extend(
            replies
        )
    message = "; ".join(f"{name_ranks(ranks)}: {trouble}" for trouble, ranks in troubles.items())
    kind = next((reply.kind for reply in replies.values()), "")
    return ShardMap(name, kind, tuple(_tensors(replies, devices)), message)


def _tensors(told: Mapping[int, ShardsReply], devices: Mapping[int, str]) -> list[ShardedTensorMap]:
    tensors: dict[str, RankTensor] = {}
    boxes: dict[str, dict[tuple[int, Box | None], tuple[Box, RankTensor]]] = {}
    spoken: set[tuple[str, int]] = set()
    # First the regions that ranks report of themselves, then, for ranks that have not replied, the regions that others
    # computed for them. Several ranks may have computed the same one: the key None keeps one per rank and tensor.
    for rank, reply in told.items():
        for tensor in reply.tensors:
            tensors.setdefault(tensor.key, tensor)
            local = [box for box in reply.grids[tensor.grid] if box.rank == rank]
            spoken.update((tensor.key, rank) for _ in local)
            for box in local:
                boxes.setdefault(tensor.key, {})[rank, box] = (box, tensor)
    for rank, reply in told.items():
        for tensor in reply.tensors:
            for box in reply.grids[tensor.grid]:
                if box.rank != rank and (tensor.key, box.rank) not in spoken and box.rank not in told:
                    boxes.setdefault(tensor.key, {}).setdefault((box.rank, None), (box, tensor))
    maps = []
    for key, tensor in tensors.items():
        regions = sorted(boxes.get(key, {}).values(), key=lambda pair: (pair[0].rank, pair[0].offset))
        maps.append(ShardedTensorMap(key, tensor.dtype, tensor.shape, _shards(regions, told, devices)))
    return maps


def _shards(
    kept: list[tuple[Box, RankTensor]], told: Mapping[int, ShardsReply], devices: Mapping[int, str]
) -> tuple[Shard, ...]:
    # Replicas that are not numbered yet (-1) get the lowest free index among the copies of the same region.
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for box, _ in kept:
        if box.replica >= 0:
            copies.setdefault((box.offset, box.shape), set()).add(box.replica)
    shards = []
    for box, tensor in kept:
        taken = copies.setdefault((box.offset, box.shape), set())
        replica = box.replica
        if replica < 0:
            replica = next(index for index in range(len(taken) + 1) if index not in taken)
            taken.add(replica)
        device = tensor.device if box.rank in told else devices.get(box.rank, "")
        shards.append(Shard(box.rank, box.offset, box.shape, replica, device, math.prod(box.shape) * tensor.itemsize))
    return tuple(shards)
