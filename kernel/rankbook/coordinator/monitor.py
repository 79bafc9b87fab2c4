"""Status monitoring of the ranks: periodic queries while a view is open, and single queries on demand.

Three parts. `StatusMonitor` queries the ranks at most ten times a second while it has subscriptions; every
`Subscription` calls its callback on a thread of its own, so a slow view does not delay the others or the driver.
`NonBlockingMonitor` does the same for the driver thread, which must not wait. `StatusAggregator` turns the replies into
`Placement` and `Saves`; it does no I/O and is given the time. `merge_shards` does the same for the map of a variable's
shards.
"""

from __future__ import annotations

import math
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rankbook.coordinator.channels import QueryClient
from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.recovery import describe_protection
from rankbook.coordinator.states import RankState
from rankbook.errors import InvalidArgument, RankbookError, RankLostError
from rankbook.formatting import strip_ansi, truncate_list
from rankbook.numerics.norms import merge_gradients
from rankbook.protocol.queries import (
    Answer,
    Box,
    DetailReply,
    GetDetail,
    GetShards,
    GetStatistic,
    GetStatus,
    LocalGradients,
    ModelGradients,
    QueryFailed,
    Question,
    RankSample,
    RankTensor,
    ShardsReply,
    StatisticReply,
    StatusReply,
)
from rankbook.protocol.telemetry import (
    GradientNorms,
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
from rankbook.ranks import format_ranks, group_ranks, name_ranks
from rankbook.snapshot_files import SnapshotHeader, read_headers

QUERY_INTERVAL = 0.1
"""Seconds between two rounds of queries."""
REPLY_WAIT = 0.05
"""Seconds that a round waits for replies. A later reply is used in the next round."""
ANSWER_TIMEOUT = 2.0
"""Seconds that a single query waits for a reply."""
KINDS = ("placement", "saves", "status")
_OUTPUT_LINES = 20

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

    def publish(self, state: Placement | Saves) -> None:
        """Queue `state` for the callback, unless it differs from the last one only in its time."""
        with self._changed:
            # `at` differs in every state. With it in the comparison, views would be drawn ten times a second although
            # nothing has changed.
            same = self._last is not None and msgspec.structs.replace(state, at=0.0) == self._last
            if not same and not self._ended:
                self._last = msgspec.structs.replace(state, at=0.0)
                self._next = state
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
                state, self._next = self._next, None
            if state is None:
                return
            # Without the lock: `publish` must never wait for a callback.
            try:
                self._callback(state)
            except Exception as error:  # noqa: BLE001 - shown in full; other subscriptions are unaffected
                self._ended = True
                sys.excepthook(type(error), error, error.__traceback__)
                return


class StatusMonitor:
    """Query the status of a cluster's ranks. Any thread but the driver's.

    The monitor thread (`_run`) exists only while there are subscriptions. In every round it queries the ranks that have
    replied to their last query, waits at most `REPLY_WAIT` seconds for replies, and offers the result to the
    subscriptions. The driver thread delivers the replies (`_deliver_to`) under the lock `_changed`.
    """

    def __init__(self, processes: ClusterProcesses) -> None:
        self._processes = processes
        # Two locks. `_lock` protects the list of subscriptions and the thread. `_changed` protects the aggregator, to
        # which the driver thread writes (`_deliver_to`) and which the monitor thread reads.
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    # Watching

    def watch(self, kind: str, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every new state of the ranks, until the returned function is called.

        `kind` is "placement" for `Placement`, "status" for `Placement` without models, optimizers and loaders, or
        "saves" for `Saves`. The callback runs on a thread of its own, at most ten times a second, and always gets the
        last state. Raises `InvalidArgument`.
        """
        if kind not in KINDS:
            raise InvalidArgument(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
        subscription = Subscription(kind, callback)
        # `_active_subscriptions` decides under the same lock that the thread ends. So a new subscription is either seen
        # by the old thread or starts another one.
        with self._lock:
            self._subscriptions.append(subscription)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankbook-monitor", daemon=True)
                self._thread.start()

        def end() -> None:
            subscription.end()
            with self._changed:
                self._changed.notify_all()

        return end

    def _run(self) -> None:
        try:
            self._publish_until_unwatched()
        finally:
            # After an unexpected error, which `threading.excepthook` shows, the next subscription starts a new thread
            # for all of them.
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _publish_until_unwatched(self) -> None:
        aggregator = StatusAggregator(_name_of(self._processes))
        queries: QueryClient | None = None
        token = 0
        while (subscriptions := self._active_subscriptions()) is not None:
            start = time.monotonic()
            driver = self._driver
            if driver is not None:
                # One token for all rounds. A reply that is too late for its round still reaches the aggregator.
                if queries is None:
                    queries = driver.liveness.queries
                    token = queries.open(self._deliver_to(aggregator))
                self._query_ranks(driver, aggregator, token, {subscription.kind for subscription in subscriptions})
            stopped = self._driver is None  # before the states are published, so that the last one is the end
            self._publish_states(aggregator, subscriptions)
            if stopped:
                for subscription in subscriptions:
                    subscription.end(at_once=False)
            # Until the next round is due. The end of a subscription ends the wait, so that the thread does not outlive
            # the last view by a whole interval.
            with self._changed:
                self._changed.wait_for(
                    lambda current=subscriptions: any(subscription.ended for subscription in current),  # type: ignore[misc]
                    max(0.0, start + QUERY_INTERVAL - time.monotonic()),
                )
        if queries is not None:
            queries.close(token)

    def _active_subscriptions(self) -> list[Subscription] | None:
        with self._lock:
            self._subscriptions = [subscription for subscription in self._subscriptions if not subscription.ended]
            if not self._subscriptions:
                self._thread = None
                return None
            return list(self._subscriptions)

    def _deliver_to(self, aggregator: StatusAggregator) -> Callable[[int, Answer], None]:
        def deliver(rank: int, answer: Answer) -> None:
            with self._changed:
                if isinstance(answer, StatusReply):
                    aggregator.handle_reply(rank, answer)
                elif isinstance(answer, QueryFailed):
                    aggregator.mark_failed(rank)
                if (
                    not aggregator.awaits_reply()
                ):  # one wake-up per round: every wake-up takes time from the training ranks
                    self._changed.notify_all()

        return deliver

    @property
    def _driver(self) -> Driver | None:
        """Return the driver; None once the ranks are stopped or the driver has failed."""
        try:
            return self._processes.driver
        except RankbookError:
            return None

    def _query_ranks(
        self,
        driver: Driver,
        aggregator: StatusAggregator,
        token: int,
        kinds: set[str],
        *,
        fresh: bool = False,
        timeout: float = REPLY_WAIT,
    ) -> None:
        """Query the ranks that owe no reply, and wait up to `timeout` seconds for replies."""
        queries = driver.liveness.queries
        # The lock is not held while queries are sent: the driver thread needs it to deliver replies, and `ask` waits
        # for the link.
        with self._changed:
            due = aggregator.ranks_to_query(self._views())
        for rank, version in due.items():
            with self._changed:
                # Before the query is sent, because the reply may arrive before the next statement.
                aggregator.mark_requested(rank, time.monotonic())
                every, known = aggregator.norms_to_request(rank) if "placement" in kinds else (0, 0)
            question = GetStatus(token, "placement" in kinds, version, fresh, "saves" in kinds, every, known)
            if not queries.ask(rank, question):
                with self._changed:
                    aggregator.mark_failed(rank)
        with self._changed:
            self._changed.wait_for(lambda: not aggregator.awaits_reply(), timeout)

    def _publish_states(self, aggregator: StatusAggregator, subscriptions: list[Subscription]) -> None:
        with self._changed:
            views = self._views()
            placement = aggregator.placement(
                views,
                now=time.monotonic(),
                wall=time.time(),
                protection=_protection_of(self._processes, aggregator),
            )
            saves = aggregator.saves(views, wall=time.time())
        for subscription in subscriptions:
            subscription.publish(saves if subscription.kind == "saves" else placement)

    def _views(self) -> list[RankView]:
        return rank_views(self._processes, self._driver)

    def non_blocking(self) -> NonBlockingMonitor:
        """Return a non-blocking monitor for the driver thread."""
        return NonBlockingMonitor(self._processes)

    # Asking

    def placement(self, *, timeout: float = ANSWER_TIMEOUT) -> Placement:
        """Query all ranks and return the result. A rank that does not reply in time is unresponsive."""
        # An aggregator of its own: the rounds of `_run` may be waiting for replies of the same ranks, to other queries.
        aggregator = StatusAggregator(_name_of(self._processes))
        driver = self._driver
        if driver is not None:
            queries = driver.liveness.queries
            token = queries.open(self._deliver_to(aggregator))
            try:
                self._query_ranks(driver, aggregator, token, {"placement"}, fresh=True, timeout=timeout)
            finally:
                queries.close(token)
        with self._changed:
            return aggregator.placement(
                self._views(),
                now=time.monotonic(),
                wall=time.time(),
                protection=_protection_of(self._processes, aggregator),
            )

    def snapshots(self, *, timeout: float = ANSWER_TIMEOUT) -> dict[int, list[SnapshotHeader]]:
        """Return the headers of the snapshots of all ranks on several hosts that reply in time."""
        driver = self._processes.driver
        answers = driver.liveness.queries.wait_answers(
            driver.live_ranks(),
            lambda token, _: GetStatus(token, False, -1, False, False),
            timeout=timeout,
            live_ranks=driver.live_ranks,
        )
        replies = {rank: answers.get(rank) for rank in self._processes.state.ranks}
        return {
            rank: list(reply.sample.snapshots) if isinstance(reply, StatusReply) else []
            for rank, reply in replies.items()
        }

    def detail(self, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> RankDetail:
        """Return stack, output and variables of the rank; only the output if it is dead.

        Raises `InvalidArgument` if there is no such rank, and `RankLostError` if it does not reply.
        """
        self._check_exists(rank)
        # The output is known here, so that a dead rank has a detail view too.
        output = self._last_lines(rank)
        if rank not in self._processes.driver.live_ranks():
            return RankDetail(rank, (), output, ())
        answer = self._query_rank(rank, GetDetail, timeout)
        assert isinstance(answer, DetailReply)
        return msgspec.structs.replace(answer.detail, output=output)

    def variables(self, ranks: tuple[int, ...], *, timeout: float) -> dict[int, tuple[Variable, ...]]:
        """See `Cluster.variables`."""
        driver = self._processes.driver
        live_ranks = [rank for rank in ranks if rank in driver.live_ranks()]
        answers = driver.liveness.queries.wait_answers(
            live_ranks, lambda token, _: GetDetail(token), timeout=timeout, live_ranks=driver.live_ranks
        )
        replies = {rank: answers[rank] for rank in ranks if rank in answers}
        return {rank: reply.detail.variables for rank, reply in replies.items() if isinstance(reply, DetailReply)}

    def shards(self, name: str, *, timeout: float = ANSWER_TIMEOUT) -> ShardMap:
        """Return the layout of the tensors in the variable `name`. Raises `InvalidArgument` if no rank has one.

        The first rank also computes the regions that the other ranks hold, for ranks that do not reply. If the first
        rank itself does not reply, another one is asked to do so.
        """
        driver = self._processes.driver
        devices = dict(enumerate(self._processes.assignment.devices))
        ranks = driver.live_ranks()
        # A rank computes the regions of the other ranks from the placements. That is work, so only one rank is asked
        # for it.
        first = ranks[:1]
        answers = driver.liveness.queries.wait_answers(
            ranks,
            lambda token, rank: GetShards(token, name, others=rank in first),
            timeout=timeout,
            live_ranks=driver.live_ranks,
        )
        missing = set(devices) - answers.keys()
        if missing and (rest := [rank for rank in answers if rank not in first]) and not set(first) & answers.keys():
            answers |= driver.liveness.queries.wait_answers(
                rest[:1],
                lambda token, _: GetShards(token, name, others=True),
                timeout=timeout,
                live_ranks=driver.live_ranks,
            )
        refusals = {answer.trouble for answer in answers.values() if isinstance(answer, QueryFailed)}
        # If at least one rank has the variable, the map shows it, and the refusals of the others become its message.
        if answers and all(isinstance(answer, QueryFailed) for answer in answers.values()):
            raise InvalidArgument("; ".join(sorted(refusals)))
        return merge_shards(name, answers, tuple(devices), devices)

    def statistic(self, name: str, key: str, rank: int, *, timeout: float = ANSWER_TIMEOUT) -> Statistic:
        """Return statistics of `rank`'s part of the tensor `key`. Raises `InvalidArgument`, `RankLostError`."""
        answer = self._query_rank(rank, lambda token: GetStatistic(token, name, key), timeout)
        assert isinstance(answer, StatisticReply)
        return answer.statistic

    def _check_exists(self, rank: int) -> None:
        if rank not in self._processes.state.ranks:
            raise InvalidArgument(
                f"rank {rank} does not exist; valid ranks are {format_ranks(self._processes.state.ranks)}"
            )

    def _query_rank(self, rank: int, make: Callable[[int], Question], timeout: float) -> Answer:
        driver = self._processes.driver
        self._check_exists(rank)
        answers = driver.liveness.queries.wait_answers(
            (rank,), lambda token, _: make(token), timeout=timeout, live_ranks=driver.live_ranks
        )
        if rank not in answers:
            raise RankLostError(f"rank {rank} did not reply within {timeout:g} s; see %distributed status", (rank,))
        answer = answers[rank]
        if isinstance(answer, QueryFailed):
            raise InvalidArgument(f"rank {rank}: {answer.trouble}")
        return answer

    def _last_lines(self, rank: int) -> tuple[str, ...]:
        lines: list[str] = []
        # From the newest cell backwards, until there are enough lines.
        for cell in reversed(self._processes.driver.cells()):
            if not (tail := cell.tail(rank)):
                continue
            text = strip_ansi(tail.decode(errors="replace"))
            # Text after a carriage return overwrites the line, as a progress bar does. Only its last state is shown.
            lines[:0] = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")]
            if len(lines) >= _OUTPUT_LINES:
                break
        return tuple(lines[-_OUTPUT_LINES:])


class NonBlockingMonitor:
    """Monitor the ranks without blocking, for the driver thread.

    A call returns the replies that have arrived since the last one, and sends new queries.
    """

    def __init__(self, processes: ClusterProcesses) -> None:
        self._processes, self._driver = processes, processes.driver
        self._aggregator = StatusAggregator(_name_of(processes))
        self._token = self._driver.liveness.queries.open(self._deliver)

    def placement(self) -> Placement:
        """Return all ranks without models, optimizers and loaders, as of the previous call.

        Ranks that owe no reply are queried for the next call.
        """
        driver, now = self._driver, time.monotonic()
        # The order makes it non-blocking: first use what has arrived, then ask for the next call.
        views = rank_views(self._processes, driver)
        state = self._aggregator.placement(views, now=now, wall=time.time())
        for rank, version in self._aggregator.ranks_to_query(views).items():
            self._aggregator.mark_requested(rank, now)
            if not driver.liveness.queries.ask(rank, GetStatus(self._token, False, version, False, False)):
                self._aggregator.mark_failed(rank)
        return state

    def close(self) -> None:
        """Stop monitoring."""
        self._driver.liveness.queries.close(self._token)

    def _deliver(self, rank: int, answer: Answer) -> None:
        if isinstance(answer, StatusReply):
            self._aggregator.handle_reply(rank, answer)
        elif isinstance(answer, QueryFailed):
            self._aggregator.mark_failed(rank)


def rank_views(processes: ClusterProcesses, driver: Driver | None) -> list[RankView]:
    """Return the ranks as the cluster's state knows them. `driver` None: they are stopped, or the driver has failed."""
    # After `stop` and after a failure of the driver, the state machine's entries stay as they were, and would show idle
    # or busy ranks.
    without_driver = RankState.ABSENT if processes.stopped else RankState.DEAD
    hostname = socket.gethostname()
    return [
        RankView(
            rank=rank,
            incarnation=entry.incarnation,
            state=without_driver if driver is None else entry.state,
            pid=0 if driver is None else driver.rank_processes[rank].pid or 0,
            device=processes.assignment.devices[rank],
            cell=None if driver is None else _number_of(driver, rank),
            task=entry.cell,
            restarting=entry.refork and driver is not None,
            last_received=0.0 if driver is None else driver.liveness.last_received(rank),
            host=hostname if processes.hosts is None else processes.hosts.name_of(rank),
        )
        for rank, entry in processes.state.ranks.items()
    ]


def _name_of(processes: ClusterProcesses) -> str:
    """Return the key by which a detached cluster is attached; other clusters need no name."""
    return "" if processes.keep is None else processes.key


def _protection_of(processes: ClusterProcesses, aggregator: StatusAggregator) -> str:
    """Describe the snapshots of the training state; "" without protection."""
    if processes.hosts is not None:
        status = describe_protection(
            aggregator.snapshots(), time.time(), copies=processes.snapshot_copies, clock_offset=processes.clock_offset
        )
        return "" if status is None else str(status)
    folder, ranks = processes.segments.folder, tuple(processes.state.ranks)
    # The frequent case, for which two files are looked for, whatever the number of ranks.
    if not any(read_headers(folder, ranks[:1]).values()):
        return ""
    status = describe_protection(read_headers(folder, ranks), time.time())
    return "" if status is None else str(status)


def _number_of(driver: Driver, rank: int) -> int | None:
    """Return the execution count of the rank's cell: 0 for a call, None if idle or for an internal task."""
    cell = driver.cell_of(rank)
    return None if cell is None or cell.number < 0 else cell.number


UNRESPONSIVE_AFTER = 1.5
"""Seconds without a reply or other message after which a rank counts as unresponsive."""
WAITING_AFTER = 0.25
"""Seconds in a collective after which a rank counts as waiting: in training, ranks are always in some collective."""
NORMS_INTERVAL = 2.0
"""Minimum seconds between two measurements of the gradients."""
_NORMS_COST = 100
"""Ratio of this time to that of a measurement, at least."""
_NORMS_STEPS = 8
"""Steps whose measurements are kept, until all ranks have sent theirs."""
_RATE_WINDOW = 5.0
"""Seconds over which the rate of steps is averaged."""
_BEHIND_STEPS = 2
_BEHIND_SECONDS = 0.5
"""Tolerance in seconds, at the other ranks' rate: the ranks are not queried at the same moment."""


@dataclass(frozen=True)
class RankView:
    """A rank as the cluster's state knows it.

    `cell` is the notebook's execution count, `task` the cluster's own number of the task. `restarting`: the rank is
    being restarted. `last_received` is the time of its last message of any kind, on the monotonic clock. `host` is the
    name of its host; with several hosts, only that of a rank that an agent runs.
    """

    rank: int
    incarnation: int
    state: RankState
    pid: int
    device: str
    cell: int | None = None
    task: int | None = None
    restarting: bool = False
    last_received: float = 0.0
    host: str = ""


@dataclass
class _RankRecord:
    """State of one process of a rank, from its replies so far."""

    incarnation: int
    requested_at: float | None = None
    reply: StatusReply | None = None
    holdings: tuple[Holding, ...] = ()
    version: int = -1
    host: str = ""
    device_name: str = ""
    steps: deque[tuple[float, int]] = field(default_factory=deque)
    norms_version: int = 0
    norms_seconds: float = 0.0


class NormsMerger:
    """Merge the ranks' gradients of the same step into norms over all ranks, by model."""

    def __init__(self) -> None:
        # Of every model: by step, what the ranks have sent.
        self._parts: dict[str, dict[int | None, dict[int, LocalGradients]]] = {}
        self._merged: dict[str, GradientNorms] = {}

    def add(self, rank: int, models: Iterable[ModelGradients], owners: Mapping[str, Collection[int]]) -> None:
        """Take all that a rank has measured. `owners` are the ranks that have a model, by its name."""
        models = tuple(models)
        for name in self._merged.keys() - {measured.model for measured in models}:
            if rank in owners.get(name, ()):  # the rank has another model under this name
                del self._merged[name], self._parts[name]
        for measured in models:
            steps = self._parts.setdefault(measured.model, {})
            parts = steps.setdefault(measured.step, {})
            if parts.get(rank, measured.gradients) != measured.gradients:
                parts = steps[measured.step] = {}  # those of the other ranks are of the measurement before
            parts[rank] = measured.gradients
            if parts.keys() >= set(owners.get(measured.model, (rank,))):
                self._merged[measured.model] = _merge_norms(measured.model, measured.step, parts)
            while len(steps) > _NORMS_STEPS:
                del steps[next(iter(steps))]

    def norms(self, owners: Mapping[str, Collection[int]]) -> tuple[GradientNorms, ...]:
        """Return the last complete norms of the models that exist, and forget those of the others."""
        # A new process may have another model under the name, and sends nothing until it has measured that.
        for name in self._parts.keys() - owners.keys():
            self._merged.pop(name, None)
            del self._parts[name]
        return tuple(self._merged.values())


def _merge_norms(model: str, step: int | None, parts: Mapping[int, LocalGradients]) -> GradientNorms:
    table = merge_gradients(dict(sorted(parts.items())))
    notes = dict.fromkeys(
        f"{module or '(root)'}: {gradient.note}" for module, gradient in table.parameters.items() if gradient.note
    )
    if step == 0:  # so that a difference between replicas says nothing
        notes = {"the optimizer does not count its steps: the ranks may be at different ones": None}
    if not table.reduced:
        notes["the ranks have not reduced all gradients yet"] = None
    modules = tuple((module, gradient.norm) for module, gradient in table.parameters.items())
    return GradientNorms(model, step or None, table.norm, modules, "; ".join(truncate_list(list(notes), 3)))


class StatusAggregator:
    """Combine the ranks' replies into one state of the cluster `name`.

    It tracks which ranks owe a reply, and forgets what it knows of a rank when its incarnation changes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._records: dict[int, _RankRecord] = {}
        self._queried: tuple[int, ...] = ()
        self._norms = NormsMerger()

    def ranks_to_query(self, views: Iterable[RankView]) -> dict[int, int]:
        """Return the ranks that can reply and owe no reply, with the known version of their holdings."""
        versions = {}
        views = list(views)
        # Ranks that have left after a resize have no part in the norms of gradients any more.
        present = {view.rank for view in views}
        self._records = {rank: record for rank, record in self._records.items() if rank in present}
        for view in views:
            record = self._record_of(view)
            # A rank that owes a reply is not asked again: queries would pile up in front of a rank that does not
            # respond.
            if view.state in (RankState.IDLE, RankState.BUSY) and record.requested_at is None:
                versions[view.rank] = record.version
        self._queried = tuple(versions)
        return versions

    def norms_to_request(self, rank: int) -> tuple[int, int]:
        """Return between how many steps the rank shall measure its gradients, and the version that is known."""
        rates = [rate for record in self._records.values() if (rate := _rate_of(record.steps)) is not None]
        slowest = max((record.norms_seconds for record in self._records.values()), default=0.0)
        steps = max(rates, default=0.0) * max(NORMS_INTERVAL, _NORMS_COST * slowest)
        # Powers of two, so that ranks which hear of a new number at different steps still have steps in common.
        return 1 << max(0, math.ceil(math.log2(max(1.0, steps)))), self._records[rank].norms_version

    def _owners(self) -> dict[str, list[int]]:
        """Return the ranks that have a model, by its name."""
        owners: dict[str, list[int]] = {}
        for rank, record in self._records.items():
            for holding in record.holdings:
                if holding.kind == "model":
                    owners.setdefault(holding.name, []).append(rank)
        return owners

    def mark_requested(self, rank: int, now: float) -> None:
        """Record that the rank was sent a query."""
        self._records[rank].requested_at = now

    def handle_reply(self, rank: int, reply: StatusReply) -> None:
        """Record the rank's reply."""
        record = self._records.get(rank)
        if record is None:
            return
        record.requested_at = None
        record.reply = reply
        # None if they are unchanged since `version`, which the query has named.
        if reply.holdings is not None:
            record.holdings, record.version = reply.holdings, reply.version
        if reply.norms is not None:
            record.norms_version = reply.norms_version
            self._norms.add(rank, reply.norms, self._owners())
        record.norms_seconds = reply.norms_seconds
        record.host = reply.sample.host or record.host
        record.device_name = reply.sample.device_name or record.device_name
        _note_steps(record.steps, reply.sample)

    def mark_failed(self, rank: int) -> None:
        """Record that the query failed, or could not be sent."""
        # No reply is owed any more, so the rank is asked again in the next round.
        record = self._records.get(rank)
        if record is not None:
            record.requested_at = None

    def awaits_reply(self) -> bool:
        """Return True if one of the ranks queried last has not replied yet."""
        return any(self._records[rank].requested_at is not None for rank in self._queried)

    def placement(self, views: Iterable[RankView], *, now: float, wall: float, protection: str = "") -> Placement:
        """Return the state of all ranks, at `now` on the monotonic and `wall` on the wall clock."""
        rows = [self._row(view, now) for view in views]
        lagging = stragglers_of(rows)
        ranks = tuple(msgspec.structs.replace(row, lags=True) if row.rank in lagging else row for row in rows)
        return Placement(ranks, wall, self._name, protection, self._norms.norms(self._owners()))

    def saves(self, views: Iterable[RankView], *, wall: float) -> Saves:
        """Return the checkpoint saves of all ranks; of ranks that have ended, those that had ended before."""
        ended = (RankState.ABSENT, RankState.DEAD)
        entries = [
            RankSave(view.rank, save)
            for view in views
            if (reply := self._record_of(view).reply) is not None
            for save in reply.saves
            if view.state not in ended or save.phase in ("done", "failed")
        ]
        return Saves(tuple(entries), wall)

    def snapshots(self) -> dict[int, list[SnapshotHeader]]:
        """Return the headers of the snapshots that the ranks have reported."""
        replies = {rank: record.reply for rank, record in self._records.items()}
        return {rank: list(reply.sample.snapshots) if reply is not None else [] for rank, reply in replies.items()}

    def _record_of(self, view: RankView) -> _RankRecord:
        record = self._records.get(view.rank)
        # A new process has other variables, and its predecessor's unanswered query will never be answered.
        if record is None or record.incarnation != view.incarnation:
            record = self._records[view.rank] = _RankRecord(view.incarnation)
        return record

    def _row(self, view: RankView, now: float) -> RankPlacement:
        record = self._record_of(view)
        sample = record.reply.sample if record.reply is not None else None
        state = _state_of(view, record, now)
        alive = state not in ("dead", "stopped")
        # A sample may be older than the running task. Its line and its collective are then those of an earlier cell.
        fresh = sample if sample is not None and sample.cell == view.task else None
        return RankPlacement(
            rank=view.rank,
            host=view.host or record.host,
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


def _state_of(view: RankView, record: _RankRecord, now: float) -> str:
    if view.state is RankState.STARTING or view.restarting:
        return "starting"
    if view.state not in (RankState.IDLE, RankState.BUSY):
        return "dead" if view.state is RankState.DEAD else "stopped"
    # The time counts from the later of the request and the last message: a rank that sends output is alive, even if its
    # reply is late.
    if record.requested_at is not None and now - max(record.requested_at, view.last_received) > UNRESPONSIVE_AFTER:
        return "unresponsive"
    if view.state is RankState.IDLE:
        return "idle"
    sample = record.reply.sample if record.reply is not None else None
    # A wait in an earlier task does not count, see `fresh` in `_row`.
    waits = sample is not None and sample.cell == view.task and sample.waits_for and sample.waited >= WAITING_AFTER
    return "waiting" if waits else "running"


def _note_steps(history: deque[tuple[float, int]], sample: RankSample) -> None:
    if sample.steps is None:
        return
    if history and sample.steps < history[-1][1]:  # another optimizer, or a checkpoint was loaded
        history.clear()
    history.append((sample.at, sample.steps))
    # One sample from before the window stays, as the start of the interval over which the rate is computed.
    while len(history) > 2 and history[1][0] < sample.at - _RATE_WINDOW:
        history.popleft()


def _rate_of(history: deque[tuple[float, int]]) -> float | None:
    if len(history) < 2:
        return None
    (start, first), (end, last) = history[0], history[-1]
    return (last - first) / (end - start) if end > start else None


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
        # Ranks of one cell wait for one another. If all but one wait in a collective, they wait for that one.
        late = [row for row in group if row.state != "waiting"]
        if len(late) == 1 and len(group) > 1:
            stragglers.add(late[0].rank)
        for row in group:
            peers = [peer for peer in group if peer is not row]
            if peers and _is_behind(row, peers):
                stragglers.add(row.rank)
    return stragglers


def _is_behind(row: RankPlacement, peers: list[RankPlacement]) -> bool:
    # The median of the others, so that a single rank that is ahead does not make all others stragglers.
    steps = statistics.median(other.steps for other in peers)
    rates = [other.rate for other in peers if other.rate is not None]
    # Two limits, of which the larger counts: some steps, for slow training, and the steps of half a second, for fast
    # training, because the ranks are not sampled at the same moment.
    return steps - row.steps > max(_BEHIND_STEPS, _BEHIND_SECONDS * statistics.median(rates or [0.0]))


def merge_shards(
    name: str, answers: Mapping[int, Answer], all_ranks: Collection[int], devices: Mapping[int, str]
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
    for rank, keys in _differing_tensors(replies).items():
        first, *others = keys
        more = f" and {len(others)} more" if others else ""
        troubles.setdefault(f"another shape or dtype, which is not shown: {first}{more}", []).append(rank)
        different = set(keys)  # no shards of the same tensors
        alike = tuple(tensor for tensor in replies[rank].tensors if tensor.key not in different)
        replies[rank] = msgspec.structs.replace(replies[rank], tensors=alike)
    tensors = tuple(_tensors(replies, devices))
    shown = {shard.rank for tensor in tensors for shard in tensor.shards}
    for rank in all_ranks:
        if rank not in answers:
            computed = "; its shards are shown as computed by the other ranks" if rank in shown else ""
            troubles.setdefault(f"no reply{computed}", []).append(rank)
    # In reverse, so that the lowest rank with a kind remains.
    kinds = {reply.kind: rank for rank, reply in reversed(replies.items())}
    if len(kinds) > 1:
        troubles.setdefault(f"the type differs between ranks: {', '.join(sorted(kinds))}", []).extend(replies)
    message = "; ".join(f"{name_ranks(ranks)}: {trouble}" for trouble, ranks in troubles.items())
    kind = next((reply.kind for reply in replies.values()), "")
    return ShardMap(name, kind, tensors, message)


def _differing_tensors(replies: Mapping[int, ShardsReply]) -> dict[int, list[str]]:
    """Return by rank the tensors whose shape or dtype is not that of the first rank that has them."""
    first: dict[str, RankTensor] = {}
    differing: dict[int, list[str]] = {}
    for rank, reply in replies.items():
        for tensor in reply.tensors:
            known = first.setdefault(tensor.key, tensor)
            if (tensor.shape, tensor.dtype) != (known.shape, known.dtype):
                differing.setdefault(rank, []).append(tensor.key)
    return differing


def _tensors(replies: Mapping[int, ShardsReply], devices: Mapping[int, str]) -> list[ShardedTensorMap]:
    tensors: dict[str, RankTensor] = {}
    boxes: dict[str, dict[tuple[int, Box | None], tuple[Box, RankTensor]]] = {}
    reported: set[tuple[str, int]] = set()
    # First the regions that ranks report of themselves, then, for ranks that have not replied, the regions that others
    # computed for them. Several ranks may have computed the same one: the key None keeps one per rank and tensor.
    for rank, reply in replies.items():
        for tensor in reply.tensors:
            tensors.setdefault(tensor.key, tensor)
            local = [box for box in reply.grids[tensor.grid] if box.rank == rank]
            reported.update((tensor.key, rank) for _ in local)
            for box in local:
                boxes.setdefault(tensor.key, {})[rank, box] = (box, tensor)
    for rank, reply in replies.items():
        for tensor in reply.tensors:
            for box in reply.grids[tensor.grid]:
                if box.rank != rank and (tensor.key, box.rank) not in reported and box.rank not in replies:
                    boxes.setdefault(tensor.key, {}).setdefault((box.rank, None), (box, tensor))
    maps = []
    for key, tensor in tensors.items():
        regions = sorted(boxes.get(key, {}).values(), key=lambda pair: (pair[0].rank, pair[0].offset))
        maps.append(ShardedTensorMap(key, tensor.dtype, tensor.shape, _shards(regions, replies, devices)))
    return maps


def _shards(
    regions: list[tuple[Box, RankTensor]], replies: Mapping[int, ShardsReply], devices: Mapping[int, str]
) -> tuple[Shard, ...]:
    # Replicas that are not numbered yet (-1) get the lowest free index among the copies of the same region.
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for box, _ in regions:
        if box.replica >= 0:
            copies.setdefault((box.offset, box.shape), set()).add(box.replica)
    shards = []
    for box, tensor in regions:
        used_replicas = copies.setdefault((box.offset, box.shape), set())
        replica = box.replica
        if replica < 0:
            replica = next(index for index in range(len(used_replicas) + 1) if index not in used_replicas)
            used_replicas.add(replica)
        own = box.rank in replies
        device = tensor.device if own else devices.get(box.rank, "")
        size = tensor.bytes if own and tensor.bytes is not None else math.prod(box.shape) * tensor.itemsize
        shards.append(Shard(box.rank, box.offset, box.shape, replica, device, size))
    return tuple(shards)
