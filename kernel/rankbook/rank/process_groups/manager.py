"""A rank's process groups: made, aborted and formed anew, under the same objects.

Owns: the rendezvous store, the connections behind every group of this rank, and which generation they are of. Refuses:
to decide when; the notebook does, for all ranks at once.

torch makes each group through one function of its own. Here that is wrapped, so that the default group, every
`new_group` and every mesh get a `RecoverableProcessGroup`, and everything else about them is torch's.

The ranks meet in a store that lies in a folder (`store.py`): torch's own listens on a port and answers every user of
the machine. `init_method="env://"` leads there too.

torch's backends for a group.

Children of a rank: loaders' workers, and whatever else a cell starts with multiprocessing.
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
"""How long a rank waits for the others to join."""
_FOREVER = timedelta(days=365)
"""How long a collective may take while a rank may be paused in a debugger."""
_NAME = "rankbook"
_MANAGED = {"gloo", "nccl"}
_FORMING = Op("new_group", None, alike=False)
_T = TypeVar("_T")


@dataclass
class _Member:
    """One group of this rank, and what it takes to make its connections again."""

    group: RecoverableProcessGroup
    backends: dict[str, str]
    timeout: timedelta
    rank: int

    def describe(self) -> dict[str, Any]:
        """What a rank needs to make it too."""
        backend = str(c10d._world.pg_map[self.group][0])
        return {"ranks": self.group.ledger.ranks, "backend": backend, "timeout": self.timeout.total_seconds()}


class GroupManager:
    """This rank's membership. The generations of its groups share one store under different prefixes."""

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
        self._being_made: tuple[str, dict[str, str]] | None = None
        self._cause: str | None = None
        self._give_up = threading.Event()
        self._patient = False
        self.master_port = os.environ.get("MASTER_PORT")
        self.store = FolderStore(folder / "store", self._give_up)  # for life: torch may use it as long
        self.store.set_timeout(JOIN_TIMEOUT)
        self._install()

    # Joining

    def join(self, generation: int) -> None:
        """Join this generation: the first time make the default group, later give every group fresh connections.

        Raises torch's errors when others do not come, and `CollectiveAborted`.
        """
        self._cause = None
        self._give_up.clear()
        self._generation = generation
        if not dist.is_initialized():
            self._members.clear()
            c10d._world.group_count = 0  # a join that failed has counted too, and the ranks must agree
        groups, count = self._agree()
        if self.rank == 0:
            self.store.forget_generations(generation)
        self._made.clear()
        if dist.is_initialized():
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
        # A rank that failed in the middle of making a group has counted fewer than the others, and torch names groups
        # by that count.
        c10d._world.group_count = max(count, c10d._world.group_count)
        self._forming.restart()

    def _agree(self) -> tuple[dict[str, dict[str, Any]], int]:
        """Tell the other ranks which groups are here; those that all their members have, but for ranks that are new.

        And how many groups the one has made that has made the most.
        """
        for name in [name for name, each in self._members.items() if each.group not in c10d._world.pg_map]:
            del self._members[name]
        own = {
            "count": c10d._world.group_count,
            "fresh": not dist.is_initialized(),
            "groups": {name: each.describe() for name, each in self._foreground().items()},
        }
        store = self._store("agreement")
        store.set(str(self.rank), json.dumps(own))
        everyone = [str(rank) for rank in range(self._world_size)]
        self._await(store, everyone)
        told = [json.loads(store.get(each)) for each in everyone]
        found: dict[str, dict[str, Any]] = {}
        for each in told:
            for name, group in each["groups"].items():
                if all(told[rank]["fresh"] or name in told[rank]["groups"] for rank in group["ranks"]):
                    found.setdefault(name, group)
        return found, max(each["count"] for each in told)

    def _foreground(self) -> dict[str, _Member]:
        """Return the groups that cells use, by name."""
        return {name: each for name, each in self._members.copy().items() if not each.group.background}

    def _make_as_peers(self, groups: dict[str, dict[str, Any]]) -> None:
        """Make, on a rank that has replaced another, the groups that its peers have with it."""
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
                c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}

    def leave(self) -> None:
        """Leave all groups, if in one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._members.clear()

    # Aborting and telling

    def abort(self, message: Abort) -> None:
        """Break off what cannot end any more, or only tell why it may break. Any thread."""
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
        """A thread of torch's has given up. Whether this rank can go on without it."""
        if not thread.startswith(gloo.GLOO):  # one that carries out collectives
            return FutureWork.any_forsaken
        members = self._members.copy().values()
        if not all(each.group.waits_in_steps for each in members):
            return False
        for each in members:
            if next(each.group.ledger.pending(), None) is not None:  # no other group's thread had anything to read
                each.group.sink(
                    "the tensors that the ranks gave to a collective differ in size or type; it was broken off"
                )
        return True

    def report(self) -> tuple[GroupReport, ...]:
        """Where this rank is in each of its groups. Any thread."""
        ledgers = [self._forming, *(each.group.ledger for each in self._foreground().values())]
        return tuple(ledger.report() for ledger in ledgers)

    def waits_for(self) -> CollectiveCall | None:
        """The oldest collective that has not ended. Any thread."""
        ledgers = [self._forming, *(each.group.ledger for each in self._foreground().values())]
        pending = [each for ledger in ledgers for each in ledger.pending()]
        return min(pending, key=lambda each: each.began, default=None)

    @property
    def launched(self) -> int:
        """How many collectives this rank has begun so far."""
        return self._forming.total + sum(each.group.ledger.total for each in self._foreground().values())

    def translate(self, error: BaseException) -> BaseException:
        """`CollectiveAborted` for what C++ made of an abort, in DDP's backward for one; any other error as it is."""
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveAborted):
            return error
        for member in self._foreground().values():
            launched = member.group.ledger.latest
            if launched is not None and (other := member.group.error_for(error, launched)) is not error:
                return other.with_traceback(error.__traceback__)
        return error

    def be_patient(self, patient: bool) -> None:
        """Whether what begins from here on may take for as long as it takes: some rank may be paused. Any thread."""
        self._patient = patient
        for member in self._foreground().values():
            for device in member.backends:
                member.group._get_backend(torch.device(device))._set_default_timeout(self._timeout_of(member))

    def _timeout_of(self, member: _Member) -> timedelta:
        return _FOREVER if self._patient else member.timeout

    # Making

    def _install(self) -> None:
        """Have torch make its groups here."""
        if _NAME.upper() not in dist.Backend._plugins:
            install_fork_guards()
            dist.Backend.register_backend(_NAME, _make_here, extended_api=True, devices=["cpu", "cuda"])
            c10d._new_process_group_helper = _through_us(c10d._new_process_group_helper)
            model_reset.remember_models()
            _rendezvous_handlers["env"] = functools.partial(_meet_by_environment, _rendezvous_handlers["env"])
        global _installed
        _installed = self

    def new_group(self, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:  # noqa: ANN401 - torch's
        """As torch's `_new_process_group_helper`, with a group of ours."""
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
        if isinstance(group, RecoverableProcessGroup):  # and not for a rank that is no member
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
        for device, backend in backends.items():  # a mesh asks the outer one for what it has
            kind = dist.Backend.backend_type_map[backend]
            member.group._set_default_backend(kind)
            registered = make_unconnected() if backend == "gloo" else inner.group._get_backend(torch.device(device))
            member.group._register_backend(torch.device(device), kind, registered)
        self._members[name] = member
        return member.group

    def _line(self) -> int | None:
        return self.where()

    def _connect(self, name: str, ranks: tuple[int, ...], member: _Member) -> BackendGroup:
        """Meet the other members, in the store. An interrupt ends the wait for them, as `abort` does."""
        self._made[name] += 1  # user code may destroy a group and make it once more
        store = self._store(f"group-{name}.{self._made[name]}")
        store.set(f"here-{member.rank}", "")
        self._await(store, [f"here-{rank}" for rank in range(len(ranks))])
        with track_new_sockets() as sockets:
            group = self._patiently(functools.partial(self._make_inner, store, name, ranks, member))
        backends = {id(each): each for each in (group._get_backend(torch.device(d)) for d in member.backends)}
        aborts = [each.abort for each in backends.values() if each.name() == "nccl"]
        return BackendGroup(group, sockets, aborts)

    def _make_inner(self, store: dist.Store, name: str, ranks: tuple[int, ...], member: _Member) -> dist.ProcessGroup:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own
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
        """Wait until all `keys` are there. torch's own wait would be deaf to signals, and to `abort`."""
        pause, deadline = 0.0005, time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while not store.check(keys):
            if self._give_up.wait(pause):
                raise CollectiveAborted("the other ranks do not come")
            if time.monotonic() > deadline and not self._patient:
                missing = [key for key in keys if not store.check([key])]
                raise RuntimeError(f"not there within {JOIN_TIMEOUT.total_seconds():.0f} s: {', '.join(missing)}")
            pause = min(2 * pause, 0.02)

    def _patiently(self, wait: Callable[[], _T]) -> _T:
        """What `wait()` gives, on a thread of its own: in C++ it is deaf to signals. An interrupt ends it."""
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
            if self._cause is None:  # nobody else has set it
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
    """Lead `init_method="env://"` to the cluster's store, unless the user has set another address."""
    member = _member()
    if (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != ("127.0.0.1", member.master_port):
        yield from original(url, **options)
        return
    told = dict(parse_qsl(urlsplit(url).query))
    rank, world_size = (int(told.get(name.lower(), os.environ[name])) for name in ("RANK", "WORLD_SIZE"))
    yield dist.PrefixStore("env", member.store), rank, world_size


def _through_us(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        return _member().new_group(original, signature.bind(*args, **kwargs))

    return new_process_group


def backends_of(backend: str) -> dict[str, str]:
    """The backend of each kind of device."""
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
    """Return a gloo or nccl backend for the group `name` of the world's `ranks`, in which this one is number `rank`.

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
"""How the names of torch's threads begin that carry out collectives."""
_AT_MOST = 0.1
"""Seconds that a fork waits for them; one of them may be at work for long."""


def install_fork_guards() -> None:
    """Do so for every child of this process from here on."""
    if sys.platform == "linux":
        os.register_at_fork(before=_wait_for_rest)
    os.register_at_fork(after_in_child=gc.freeze)
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]  # multiprocessing knows no other way in


def _by_value(_pickler: object, value: object) -> Any:  # noqa: ANN401 - see pickle.Pickler.reducer_override
    """What cells have defined goes to a spawned child by value: its `__main__` is another one, and empty."""
    if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(value),)
    return NotImplemented


def _wait_for_rest() -> None:
    deadline = time.monotonic() + _AT_MOST
    while any(map(_runs, _TASKS.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.0005)  # they need the interpreter


def _runs(task: Path) -> bool:
    """Whether it is one of torch's threads, and not asleep."""
    try:
        identity = (task / "stat").read_text()
    except OSError:  # it has ended
        return False
    name, _, rest = identity.partition("(")[2].rpartition(")")
    return name.startswith(_TORCH) and rest.split()[0] != "S"
