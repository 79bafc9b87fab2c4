"""Create, abort and re-form the process groups of a rank.

`GroupManager` implements generations of process groups; `recoverable_group.py` explains the order of events. It wraps
the one function with which torch creates every group (`_new_process_group_helper`), so that the default group, every
`new_group` and every DeviceMesh get a `RecoverableProcessGroup` with torch's own bookkeeping. `init_method="env://"`
leads to the cluster's store as well, since torch's own store would listen on a port that other users can reach.

`make_backend` creates the gloo and NCCL backends of a group. The last part, `install_fork_guards`, protects child
processes of a rank: DataLoader workers and other multiprocessing children.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from rankbook.errors import CollectiveAborted
from rankbook.protocol.messages import Abort
from rankbook.protocol.telemetry import GroupReport
from rankbook.rank import model_reset
from rankbook.rank.process_groups import (
    gloo,
)
from rankbook.rank.process_groups.collective_log import CollectiveCall, CollectiveLog, FutureWork, Op
from rankbook.rank.process_groups.gloo import make_gloo, make_unconnected, track_new_sockets
from rankbook.rank.process_groups.recoverable_group import BackendGroup, RecoverableProcessGroup
from rankbook.rank.process_groups.store import FolderStore, generation_prefix

JOIN_TIMEOUT = timedelta(seconds=60)
"""Maximum time that a rank waits for the others to join."""
_FOREVER = timedelta(days=365)
"""Timeout of collectives while a rank may be paused in a debugger."""
_NAME = "rankbook"
_MANAGED = {"gloo", "nccl"}
_FORMING = Op("new_group", None, alike=False)  # logged like a collective, so that the notebook sees ranks waiting in it
_T = TypeVar("_T")


@dataclass
class _Member:
    """A group of this rank, and the arguments to create its connections again."""

    group: RecoverableProcessGroup
    backends: dict[str, str]
    timeout: timedelta
    rank: int

    def describe(self) -> dict[str, Any]:
        """Return the arguments with which a fresh rank creates the group."""
        backend = str(c10d._world.pg_map[self.group][0])
        return {"ranks": self.group.ledger.ranks, "backend": backend, "timeout": self.timeout.total_seconds()}


class GroupManager:
    """The process groups of this rank. All generations share one store, under different prefixes."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        backend: str,
        device: torch.device,
        folder: Path,
    ) -> None:
        self.where: Callable[[], int | None] = lambda: None
        self.rank = rank
        self._world_size = world_size
        self._backend = backend
        self.device = device
        self._generation = 0
        self._members: dict[str, _Member] = {}
        self._forming = CollectiveLog("", tuple(range(world_size)))
        self._made: Counter[str] = Counter()
        self._being_made: tuple[str, dict[str, str]] | None = None  # name and backends, while torch calls `_make`
        self._cause: str | None = None
        self._give_up = threading.Event()
        self._patient = False
        self.master_port = os.environ.get("MASTER_PORT")
        self.store = FolderStore(folder / "store", self._give_up)  # never replaced: torch keeps a reference
        self.store.set_timeout(JOIN_TIMEOUT)
        self._install()

    # Joining a generation

    def join(self, generation: int) -> None:
        """Join a generation: create the default group the first time, later give every group fresh connections.

        Raises torch's errors when other ranks do not come, and `CollectiveAborted`.
        """
        self._cause = None
        self._give_up.clear()
        self._generation = generation
        if not dist.is_initialized():
            self._members.clear()
            c10d._world.group_count = 0  # a failed join has incremented it, and the ranks must agree
        groups, count = self._agree()
        # From here on every rank is in the new generation, so that no rank reads older keys any more.
        if self.rank == 0:
            self.store.forget_generations(generation)
        self._made.clear()
        if dist.is_initialized():
            # In the order of creation, which all ranks share, since creating a group is a collective call.
            for name, member in self._foreground().items():
                if name in groups:
                    member.group.renew(self._connect(name, member.group.ledger.ranks, member))
                else:
                    member.group.break_off(f"this group was not formed on each of its ranks, make it again: {name}")
            model_reset.reset_after_abort()
        else:
            dist.init_process_group(
                self._backend,
                store=self.store,
                rank=self.rank,
                world_size=self._world_size,
            )
            self._make_as_peers(groups)
        # torch names a group by the number of groups before it. A rank that failed while it created a group may have
        # counted fewer than the others.
        c10d._world.group_count = max(count, c10d._world.group_count)
        self._forming.restart()

    def _agree(self) -> tuple[dict[str, dict[str, Any]], int]:
        """Exchange the groups of all ranks. Return the groups to keep and the highest group count of a rank.

        A group is kept if all of its members have it. A fresh process has none and counts as having all.
        """
        for name in [name for name, member in self._members.items() if member.group not in c10d._world.pg_map]:
            del self._members[name]
        # `fresh` marks a process without a default group: at the start of the cluster, or in place of a dead rank.
        own_report = {
            "count": c10d._world.group_count,
            "fresh": not dist.is_initialized(),
            "groups": {name: member.describe() for name, member in self._foreground().items()},
        }
        store = self._store("agreement")
        store.set(str(self.rank), json.dumps(own_report))
        everyone = [str(rank) for rank in range(self._world_size)]
        self._await(store, everyone)
        reports = [json.loads(store.get(key)) for key in everyone]
        groups: dict[str, dict[str, Any]] = {}
        for report in reports:
            for name, group in report["groups"].items():
                if all(reports[rank]["fresh"] or name in reports[rank]["groups"] for rank in group["ranks"]):
                    groups.setdefault(name, group)
        return groups, max(report["count"] for report in reports)

    def _foreground(self) -> dict[str, _Member]:
        """Return the groups that cells use, by name."""
        return {name: member for name, member in self._members.copy().items() if not member.group.background}

    def _make_as_peers(self, groups: dict[str, dict[str, Any]]) -> None:
        """Create the groups that the peers have with this rank, which has replaced a dead one."""
        for name, group in groups.items():
            ranks = group["ranks"]
            if name not in self._members and self.rank in ranks:
                made, _ = c10d._new_process_group_helper(
                    len(ranks),
                    ranks.index(self.rank),
                    ranks,
                    dist.Backend(group["backend"]),
                    c10d._world.pg_map[c10d._get_default_group()][1],
                    c10d.GroupName(name),
                    timeout=timedelta(seconds=group["timeout"]),
                )
                c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}

    def leave(self) -> None:
        """Destroy all process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._members.clear()

    # Abort and status

    def abort(self, message: Abort) -> None:
        """Abort the groups that `message` names, or only record the reason for a failure. Any thread.

        Without `lost`, groups in the background are left alone. With it, the processes of `message.ranks` are gone, and
        all groups with one of them as a member are concerned. With `shut`, the wait for other ranks while a group is
        being created ends as well.
        """
        self._cause = self._cause or message.cause
        for name, member in (self._members.copy() if message.lost else self._foreground()).items():
            named = not message.groups or name in message.groups
            if named and not set(message.ranks).isdisjoint(member.group.ledger.ranks):
                if message.shut:
                    member.group.break_off(message.cause)
                else:
                    member.group.explain(message.cause)
        if (
            message.shut
            and self._being_made is not None
            and (not message.groups or self._forming.name in message.groups)
        ):
            self._give_up.set()

    def rescue(self, thread: str) -> bool:
        """Handle a C++ thread that called std::terminate(). Return True if the process can continue without the thread.

        Called on that thread. A thread of torch that executes collectives may be lost if a future was completed twice,
        see `FutureWork.forsake`. A thread of gloo, which reads the sockets, fails if tensors differ in size or type
        between ranks; then all groups with a pending collective are aborted. With NCCL among the backends the process
        ends.
        """
        if not thread.startswith(gloo.GLOO):  # a thread of torch, which executes collectives
            return FutureWork.any_forsaken
        members = self._members.copy().values()
        if not all(member.group.waits_in_steps for member in members):
            return False
        for member in members:
            if next(member.group.ledger.pending(), None) is not None:  # threads of idle groups have nothing to read
                member.group.sink(
                    "the tensors that the ranks gave to a collective differ in size or type; it was broken off"
                )
        return True

    def report(self) -> tuple[GroupReport, ...]:
        """Return the collective logs of all groups in the foreground. Any thread."""
        ledgers = [self._forming, *(member.group.ledger for member in self._foreground().values())]
        return tuple(ledger.report() for ledger in ledgers)

    def waits_for(self) -> CollectiveCall | None:
        """Return the oldest collective that has not completed, or None. Any thread."""
        ledgers = [self._forming, *(member.group.ledger for member in self._foreground().values())]
        pending = [call for ledger in ledgers for call in ledger.pending()]
        return min(pending, key=lambda call: call.began, default=None)

    @property
    def launched(self) -> int:
        """Return the number of operations that this rank has launched so far."""
        return self._forming.total + sum(member.group.ledger.total for member in self._foreground().values())

    def translate(self, error: BaseException) -> BaseException:
        """Return `CollectiveAborted` for an error that C++ code raised because of an abort, as in DDP's backward pass.

        Any other error is returned unchanged.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveAborted):
            return error
        for member in self._foreground().values():
            launched = member.group.ledger.latest
            if launched is not None and (other := member.group.error_for(error, launched)) is not error:
                return other.with_traceback(error.__traceback__)
        return error

    def be_patient(self, patient: bool) -> None:
        """Suspend the timeouts of collectives launched from now on, or restore them. Any thread.

        The debugger calls it, because a paused rank keeps the others waiting without limit.
        """
        self._patient = patient
        for member in self._foreground().values():
            for device in member.backends:
                member.group._get_backend(torch.device(device))._set_default_timeout(self._timeout_of(member))

    def _timeout_of(self, member: _Member) -> timedelta:
        return _FOREVER if self._patient else member.timeout

    # Creating groups

    def _install(self) -> None:
        """Make torch create its groups through this manager."""
        if _NAME.upper() not in dist.Backend._plugins:
            install_fork_guards()
            dist.Backend.register_backend(_NAME, _make_here, extended_api=True, devices=["cpu", "cuda"])
            c10d._new_process_group_helper = _through_us(c10d._new_process_group_helper)
            model_reset.remember_models()
            _rendezvous_handlers["env"] = functools.partial(_meet_by_environment, _rendezvous_handlers["env"])
        global _installed
        _installed = self

    def new_group(self, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:  # noqa: ANN401 - torch's
        """Create a group as torch's `_new_process_group_helper` does, with a `RecoverableProcessGroup`.

        Groups with other backends than gloo and NCCL are left to torch.
        """
        backend = str(bound.arguments["backend"])
        backends = backends_of(backend)
        if not set(backends.values()) <= _MANAGED:
            return original(*bound.args, **bound.kwargs)
        bound.arguments.update(backend=_NAME, device_id=None)
        is_default = not bound.arguments["global_ranks_in_group"]
        if self._cause is not None and not is_default:
            raise CollectiveAborted(f"{self._cause}, so this rank cannot begin new_group")
        key, launched = self._forming.launch(_FORMING, ())
        self._being_made = (str(bound.arguments["group_name"]), backends)
        try:
            group, store = original(*bound.args, **bound.kwargs)
        except RuntimeError:
            if self._cause is None:
                raise
            raise CollectiveAborted(f"{self._cause} while this rank waited in {launched}") from None
        finally:
            self._being_made = None
            self._forming.end(key)
        if isinstance(group, RecoverableProcessGroup):  # a rank outside the group gets NON_GROUP_MEMBER
            c10d._world.pg_map[group] = (backend, store)
            c10d._world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))
        return group, store

    def _make(self, options: Any, _backend_options: object) -> RecoverableProcessGroup:  # noqa: ANN401 - torch's
        assert self._being_made is not None
        name, backends = self._being_made
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        member = _Member(None, backends, options.timeout, options.group_rank)  # type: ignore[arg-type]
        inner = self._connect(name, ranks, member)
        ledger = CollectiveLog(name, ranks)
        member.group = RecoverableProcessGroup(options.store, options.group_rank, ranks, inner, ledger, self._line)
        # A DeviceMesh asks the outer group for its backends. For gloo a dummy is registered, since torch cannot replace
        # a registered backend later.
        for device, backend in backends.items():
            kind = dist.Backend.backend_type_map[backend]
            member.group._set_default_backend(kind)
            registered = make_unconnected() if backend == "gloo" else inner.group._get_backend(torch.device(device))
            member.group._register_backend(torch.device(device), kind, registered)
        self._members[name] = member
        return member.group

    def _line(self) -> int | None:
        return self.where()

    def _connect(self, name: str, ranks: tuple[int, ...], member: _Member) -> BackendGroup:
        """Meet the other members in the store and connect the backends.

        An interrupt ends the wait, as `abort` does. The members meet before gloo begins to connect, so that its short
        timeout counts from when all of them are present.
        """
        self._made[name] += 1  # user code may destroy a group and create it again, which needs fresh keys
        store = self._store(f"group-{name}.{self._made[name]}")
        store.set(f"here-{member.rank}", "")
        self._await(store, [f"here-{rank}" for rank in range(len(ranks))])
        with track_new_sockets() as sockets:
            group = self._patiently(functools.partial(self._make_inner, store, name, ranks, member))
        backends = {id(backend): backend for backend in (group._get_backend(torch.device(d)) for d in member.backends)}
        aborts = [backend.abort for backend in backends.values() if backend.name() == "nccl"]
        return BackendGroup(group, sockets, aborts)

    def _make_inner(self, store: dist.Store, name: str, ranks: tuple[int, ...], member: _Member) -> dist.ProcessGroup:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device belongs to the thread
        group = dist.ProcessGroup(store, member.rank, len(ranks))
        made: dict[str, Any] = {}
        for device, backend in member.backends.items():
            kind = dist.Backend.backend_type_map[backend]
            if backend not in made:
                timeout, beside = self._timeout_of(member), dist.PrefixStore(backend, store)
                made[backend] = make_backend(backend, beside, name, ranks, member.rank, timeout, self._await)
                group._set_default_backend(kind)
            group._register_backend(torch.device(device), kind, made[backend])
        group._set_group_name(c10d.GroupName(name))
        group._set_group_desc("inner")
        return group

    def _store(self, what: str) -> dist.Store:
        return dist.PrefixStore(f"{generation_prefix(self._generation)}/{what}", self.store)

    def _await(self, store: dist.Store, keys: list[str]) -> None:
        """Wait until all `keys` are set. torch's own wait ignores signals and `abort`."""
        pause, deadline = 0.0005, time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while not store.check(keys):
            if self._give_up.wait(pause):
                raise CollectiveAborted("the other ranks do not come")
            if time.monotonic() > deadline and not self._patient:
                missing = [key for key in keys if not store.check([key])]
                raise RuntimeError(f"not there within {JOIN_TIMEOUT.total_seconds():.0f} s: {', '.join(missing)}")
            pause = min(2 * pause, 0.02)

    def _patiently(self, wait: Callable[[], _T]) -> _T:
        """Call `wait` on another thread, because it blocks in C++. An interrupt ends it through `_give_up`."""
        result: list[_T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                result.append(wait())
            except BaseException as error:  # noqa: BLE001 - raised again, on the thread that waits for it
                failed.append(error)

        thread = threading.Thread(target=run, name="rankbook-join", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self._give_up.set()
            thread.join()
            if self._cause is None:  # else `abort` has set it, and it stays set until the next join
                self._give_up.clear()
            raise
        if failed:
            raise failed[0]
        return result[0]


_installed: GroupManager | None = None


def _member() -> GroupManager:
    assert _installed is not None
    return _installed


def _make_here(options: object, backend_options: object) -> RecoverableProcessGroup:
    return _member()._make(options, backend_options)


def _meet_by_environment(original: Callable[..., Any], url: str, **options: Any) -> Iterator[Any]:  # noqa: ANN401
    """Redirect `init_method="env://"` to the cluster's store, unless the user has set another address."""
    member = _member()
    if (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != ("127.0.0.1", member.master_port):
        yield from original(url, **options)
        return
    query = dict(parse_qsl(urlsplit(url).query))
    rank, world_size = (int(query.get(name.lower(), os.environ[name])) for name in ("RANK", "WORLD_SIZE"))
    yield dist.PrefixStore("env", member.store), rank, world_size


def _through_us(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        return _member().new_group(original, signature.bind(*args, **kwargs))

    return new_process_group


def backends_of(backend: str) -> dict[str, str]:
    """Return the backend of every device type."""
    if backend == "undefined":
        return {"cpu": "gloo", **({"cuda": "nccl"} if torch.cuda.is_available() else {})}
    return dict(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def make_backend(
    backend: str,
    store: dist.Store,
    name: str,
    ranks: tuple[int, ...],
    rank: int,
    timeout: timedelta,
    wait: Callable[[dist.Store, list[str]], None],
) -> Any:  # noqa: ANN401 - torch has no type for it
    """Return a gloo or NCCL backend for the group `name` of the global `ranks`, in which this rank is number `rank`.

    `wait` waits for keys of a store.
    """
    if backend == "gloo":
        made: Any = make_gloo(store, rank, len(ranks), timeout, wait)
        made.options.global_ranks_in_group = list(ranks)
        made.options.group_name = c10d.GroupName(name)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = c10d.GroupName(name)
        made = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    made._set_sequence_number_for_group()
    return made


_TASKS = Path("/proc/self/task")
_TORCH = "pt_gloo"
"""Prefix of the names of torch's threads that execute gloo collectives."""
_AT_MOST = 0.1
"""Seconds that a fork waits for these threads; one of them may be at work for long."""


def install_fork_guards() -> None:
    """Protect all child processes that this process creates after the call.

    A fork waits briefly until torch's gloo threads sleep: CPython's child takes the lock of the list of thread states,
    which such a thread may hold at that moment, and then never starts. A forked child excludes inherited objects from
    garbage collection (`gc.freeze`), because the finalizers of old gloo connections hang on threads that the child
    lacks, and remove descriptors from an epoll set that it shares with the rank. Functions and classes of cells are
    pickled by value for spawned children.
    """
    if sys.platform == "linux":
        os.register_at_fork(before=_wait_for_rest)
    os.register_at_fork(after_in_child=gc.freeze)
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]  # multiprocessing has no other hook


def _by_value(_pickler: object, value: object) -> Any:  # noqa: ANN401 - see pickle.Pickler.reducer_override
    """Pickle functions and classes of `__main__` by value: a spawned child has another, empty `__main__`."""
    if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(value),)
    return NotImplemented


def _wait_for_rest() -> None:
    deadline = time.monotonic() + _AT_MOST
    while any(map(_runs, _TASKS.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.0005)  # releases the GIL, which those threads may need


def _runs(task: Path) -> bool:
    """Return True if the task is one of torch's gloo threads and not asleep."""
    try:
        identity = (task / "stat").read_text()
    except OSError:  # the thread has ended
        return False
    name, _, rest = identity.partition("(")[2].rpartition(")")
    return name.startswith(_TORCH) and rest.split()[0] != "S"
