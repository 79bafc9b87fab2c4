"""Create, abort and re-form the process groups of a rank.

`GroupManager` implements generations of process groups; `recoverable_group.py` explains the order of events. It wraps
the one function with which torch creates every group (`_new_process_group_helper`), so that the default group, every
`new_group` and every DeviceMesh get a `RecoverableProcessGroup` with torch's own bookkeeping. `init_method="env://"`
leads to the cluster's store as well, since torch's own store would listen on a port that other users can reach.

`make_backend` creates the gloo and NCCL backends of a group. The last part, `install_fork_guards`, protects child
processes of a rank: DataLoader workers and other multiprocessing children.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.optim.optimizer import Optimizer

from rankbook import snapshot_files
from rankbook.errors import CollectiveAborted
from rankbook.lazy_imports import loaded_module
from rankbook.protocol.messages import Abort, RanksLost
from rankbook.protocol.telemetry import GroupReport
from rankbook.rank import model_reset
from rankbook.rank.process_groups import (
    gloo,
)
from rankbook.rank.process_groups.collective_log import CollectiveCall, CollectiveLog, CurrentCell, FutureWork, Op
from rankbook.rank.process_groups.device_calls import Cuda, DeviceInterface, DeviceQueue, DeviceWatcher
from rankbook.rank.process_groups.gloo import Opened, make_gloo, make_unconnected, track_new_sockets
from rankbook.rank.process_groups.recoverable_group import (
    ABORT_LIMIT,
    BackendGroup,
    RecoverableProcessGroup,
    describe_nccl_error,
)
from rankbook.rank.process_groups.store import generation_prefix, open_store
from rankbook.transport.serialization import number_cell_objects, reduce_for_child

JOIN_TIMEOUT = timedelta(seconds=60)
"""Maximum time that a rank waits for the others to join. For a new group of the program: at least that of the group."""
_FOREVER = timedelta(days=365)
"""Timeout of collectives while a rank may be paused in a debugger."""
_NAME = "rankbook"
_DEFAULT_GROUP = "0"
"""Name of the default group: torch names a group by the number of groups before it."""
_PROTECTION = "rankbook.runtime.protection"
_STRATEGIES = "rankbook.runtime.strategies.base"
_ACCUMULATION = "rankbook.runtime.gradient_state"
_MANAGED = {"gloo", "nccl"}
_ACCELERATORS: dict[str, Callable[[torch.device], DeviceInterface]] = {"nccl": Cuda}
"""The backends that queue collectives on a device, and how to ask that device."""
_DEVICE_PATIENCE = 10.0
"""Seconds without progress after which a device is not waited for any more, before a regroup."""
_MISMATCH_PATIENCE = 1.0
"""The same if the ranks have launched different collectives, so that some will never complete."""
_CHECK_INTERVAL = 0.25
"""Seconds between two looks at `_cancel` while a thread connects backends."""
_NEW_GROUP = Op("new_group", None, alike=False)
"""Logged like a collective, so that the notebook sees ranks waiting in it."""
_T = TypeVar("_T")


def _uses_accumulation() -> bool:
    """Return True if this process has the state of an `Accelerator`."""
    module = loaded_module(_ACCUMULATION)  # not imported: a rank need not use the runtime
    return module is not None and bool(module.GradientState._shared_state)


@dataclass
class _Member:
    """A group of this rank, and the arguments to create its connections again."""

    group: RecoverableProcessGroup
    backends: dict[str, str]
    timeout: timedelta
    rank: int
    options: Any = None
    """The user's `pg_options`, or None."""

    def describe(self) -> dict[str, Any]:
        """Return the arguments with which a fresh rank creates the group."""
        backend = str(c10d._world.pg_map[self.group][0])
        return {"ranks": self.group.log.ranks, "backend": backend, "timeout": self.timeout.total_seconds()}


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
        agent: str = "",
    ) -> None:
        self.current_line: Callable[[], int | str | None] = lambda: None
        self.on_break: Callable[[], None] = lambda: None
        """Called when a connection of a group has broken and the reason is not known."""
        self.on_cut: Callable[[CollectiveAborted], object] = lambda _error: None
        """Called before calls that a device has not finished are aborted, with the error to raise in the cell."""
        self.on_stuck: Callable[[str], None] = lambda _text: None
        """Called with a message for the user when the device does not let go of an aborted collective."""
        self.cell = CurrentCell()
        self.rank = rank
        self._world_size = world_size
        self._backend = backend
        self.device = device
        self._generation = 0
        self._has_joined = False
        self._members: dict[str, _Member] = {}
        # The ranks whose processes were new at a join of this rank. Not only at the last one: the groups may be formed
        # once more before a new rank has got its meshes.
        self._fresh: set[int] = set()
        # Groups that were destroyed in the last cell that used groups, see `report_used`.
        self._destroyed: set[str] = set()
        self._launched_in_forgotten = 0
        # Creating a group is a collective call too, so it has a log like those of the groups. Its name is empty, and
        # its ranks are all ranks.
        self._creation_log = CollectiveLog("", tuple(range(world_size)))
        # How often a group of this name was created in this generation.
        self._creation_counts: Counter[str] = Counter()
        self._watcher: DeviceWatcher | None = None
        self._steps = model_reset.StepTracker()
        # The report of the steps in groups of another number of ranks, until all ranks have compared them.
        self._earlier_steps: model_reset.StepReport | None = None
        self.restored_from: int | None = None
        """The rank whose weights have replaced those of a step on the results of aborted collectives."""
        self.untrusted: list[Optimizer] = []
        """The optimizers with such a step for which there was no other rank to copy from."""
        self.notes: list[str] = []
        """What else the user has to know about the copies."""
        self.untrusted_statistics: list[torch.nn.Module] = []
        """The models whose running statistics may have come from aborted collectives, on all ranks."""
        self._creating: tuple[str, dict[str, str]] | None = None  # name and backends, while torch calls `_create_group`
        self._cause: str | None = None
        self._cancel = threading.Event()
        self._timeouts_suspended = False
        self.master = _master_variables(os.environ)
        self.store = open_store(folder / "store", agent, self._cancel)  # never replaced: torch keeps a reference
        self._install()

    # Joining a generation

    def enter_place(self, variables: Mapping[str, str]) -> None:
        """Set `variables` of this process, which have changed because ranks have moved to another host."""
        has_own_master = _master_variables(os.environ) != self.master
        kept = _MASTER if has_own_master else ()  # user code has set another address
        os.environ.update({name: value for name, value in variables.items() if name not in kept})
        self.master = _master_variables(variables)

    def join(self, generation: int, world_size: int = 0, *, anew: bool = False) -> None:
        """Join a generation: create the default group the first time, later give every group fresh connections.

        With `anew`, destroy all groups first: there are `world_size` ranks from now on. Raises torch's errors when
        other ranks do not come, and `CollectiveAborted`.
        """
        if anew:
            self._enter_world(world_size)
        elif not self._has_joined and dist.is_initialized():
            # The first attempt of this process has failed in the middle. The groups that it has not made would be
            # missing on all ranks.
            self.leave()
        self.store.set_timeout(JOIN_TIMEOUT)
        # The reason of the last abort is over: every rank that joins has left its cell.
        self._cause = None
        self._cancel.clear()
        self._generation = generation
        if not dist.is_initialized():
            self._members.clear()
            c10d._world.group_count = 0  # a failed join has incremented it, and the ranks must agree
        if not _ACCELERATORS.keys().isdisjoint(backends_of(self._backend).values()):
            self._finish_device_calls()
        # First of all: while a kernel of an old collective waits for its peers, CUDA can connect nothing.
        # All at once: an abort frees device memory, for which CUDA waits until the kernels of other groups have ended.
        for member in self._foreground().values():
            member.group.abort_device_calls()
        for member in self._foreground().values():
            member.group.wait_device_calls()
        self._note_timeouts()
        groups, count, steps = self._agree_on_groups()
        # From here on every rank is in the new generation, so that no rank reads older keys any more.
        if self.rank == 0:
            self.store.forget_generations(generation)
        self._creation_counts.clear()
        # After a failed first attempt there is no default group: the rank begins from scratch, as a new process does.
        if dist.is_initialized():
            # In the order of `groups`, which all ranks have computed alike. Not in the order of creation: a rank that
            # has replaced a dead one has created its groups in another order, and two ranks would wait for each other.
            members = self._foreground()
            for name in groups:
                if (known := members.get(name)) is not None:
                    known.group.renew(self._connect(name, known.group.log.ranks, known), generation)
            for name, member in members.items():
                if name not in groups:
                    member.group.abort_with_cause(
                        f"group {name} was not formed on all of its ranks and must be created again"
                    )
                    member.group.shutdown()  # nothing will connect it again
            # After the groups work again, because models hold references to them.
            model_reset.reset_after_abort()
            self._mend_steps(steps)
            # Last: an attempt that fails before is followed by another one.
            for member in self._foreground().values():
                member.group.cut_since = None
        else:
            known_default = groups.get(_DEFAULT_GROUP)
            dist.init_process_group(
                self._backend,
                store=self.store,
                rank=self.rank,
                world_size=self._world_size,
                timeout=None if known_default is None else timedelta(seconds=known_default["timeout"]),
            )
            self._create_peer_groups(groups)
            self._mend_steps(steps)  # a collective of all ranks, although this one has made no step
        # torch names a group by the number of groups before it. A rank that failed while it created a group may have
        # counted fewer than the others.
        c10d._world.group_count = max(count, c10d._world.group_count)
        self._creation_log.restart()
        self.store.set_timeout(c10d.default_pg_timeout)  # for programs, as torchrun's
        self._has_joined = True

    def _finish_device_calls(self) -> None:
        """Let the devices execute the collectives that all members have launched. The wait is the same on all ranks.

        The host is ahead of its device. An error after a training loop must not cut short the steps that are still
        queued: every rank has launched them, so that they complete.
        """
        groups = {
            name: member.group
            for name, member in self._foreground().items()
            if not member.group.is_shut_down and member.group.cause is None
        }
        launched = {name: (group.log.count, group.log.checksums[0]) for name, group in groups.items()}
        reports = self._exchange("launched", launched)
        sides = {
            name: [tuple(reports[rank].get(name, (0, 0))) for rank in group.log.ranks] for name, group in groups.items()
        }
        complete = {name: min(count for count, _ in of_group) for name, of_group in sides.items()}
        match = all(len(set(of_group)) == 1 for of_group in sides.values())
        watcher, unfinished = self._watcher, -1
        patience = _DEVICE_PATIENCE if match else _MISMATCH_PATIENCE
        deadline = time.monotonic() + patience
        while watcher is not None and watcher.error is None and not self._cancel.is_set():
            calls = [(name, call) for name, group in groups.items() for call in group.unfinished()]
            # A send or recv has no number: whether its peer answers is not known, so it may take as long as the rest.
            if all(call.launched.number > complete[name] for name, call in calls):
                return
            if len(calls) != unfinished:
                unfinished, deadline = len(calls), time.monotonic() + patience
            if time.monotonic() > deadline:
                return
            watcher.wait(_CHECK_INTERVAL)

    def _agree_on_groups(self) -> tuple[dict[str, dict[str, Any]], int, list[model_reset.StepReport | None]]:
        """Exchange the groups of all ranks. Return the groups to keep, and the highest group count of a rank.

        Also return the steps of all ranks' optimizers, None for a fresh process.

        A group is kept if all of its members have it. A fresh process has none and counts as having all.
        """
        # All ranks have left their cells, so nobody waits in a destroyed group any more.
        self._forget(self._find_destroyed())
        self._destroyed = set()
        # `fresh` marks a process without a default group: at the start of the cluster, in place of a dead rank, or
        # after a change of the number of ranks.
        local_report = {
            "count": c10d._world.group_count,
            "fresh": not dist.is_initialized(),
            "lost": self.lost_device(),
            # None for a process without an earlier group, which has made no step.
            "steps": self._report_steps() if dist.is_initialized() else self._earlier_steps,
            "snapshot": protection.next_number() if (protection := loaded_module(_PROTECTION)) is not None else 0,
            "serial": snapshot_files.next_serial,
            # Also what a living rank has not compared yet: a new process does not know of it.
            "trains": snapshot_files.replicas_may_differ or _uses_accumulation(),
            "groups": {name: member.describe() for name, member in self._foreground().items()},
        }
        reports = self._exchange("agreement", local_report)
        for rank, report in enumerate(reports):
            if report["lost"]:
                raise RuntimeError(f"rank {rank} has lost its device ({report['lost']}); %distributed heal replaces it")
        groups: dict[str, dict[str, Any]] = {}
        for report in reports:
            for name, group in report["groups"].items():
                # A group that one member could not create would hang on the others.
                if all(reports[rank]["fresh"] or name in reports[rank]["groups"] for rank in group["ranks"]):
                    groups.setdefault(name, group)
        # A new process has prepared nothing, and a rank whose cell has failed maybe less than the others.
        snapshot_files.next_serial = max(report["serial"] for report in reports)
        snapshot_files.replicas_may_differ |= any(report["trains"] for report in reports)
        if protection is not None:
            protection.continue_numbers(max(report["snapshot"] for report in reports))
        if (strategies := loaded_module(_STRATEGIES)) is not None:
            strategies.doubt_meshes()
        self._fresh |= {rank for rank, report in enumerate(reports) if report["fresh"]}
        return groups, max(report["count"] for report in reports), [report["steps"] for report in reports]

    def _exchange(self, what: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks under this name, in the order of the ranks. Once in a generation.

        Every rank reads all of them, so that all compute the same result. There is no rank that decides.
        """
        store = self._store(what)
        store.set(str(self.rank), json.dumps(report))
        everyone = [str(rank) for rank in range(self._world_size)]
        self._wait_for_keys(store, everyone)
        names = [f"{self._prefix(what)}/{key}" for key in everyone]  # as `PrefixStore` joins them
        return [json.loads(value) for value in self.store.get_all(names)]

    def begin_cell(self) -> None:
        """Count the steps of optimizers for a new cell."""
        self._steps.begin_cell()

    def note_failed_cell(self) -> None:
        """Keep the steps of a cell that has failed, until all ranks compare them."""
        self._steps.has_failed = True

    def _report_steps(self) -> model_reset.StepReport:
        """Describe the optimizers' steps."""
        groups = [member.group for member in self._foreground().values()]
        since = min((group.cut_since for group in groups if group.cut_since is not None), default=None)
        return self._steps.report(since, self._world_size)

    def _mend_steps(self, reports: list[model_reset.StepReport | None]) -> None:
        """Take back the steps on the results of aborted collectives, or note that no rank can. A collective."""
        self._mend_statistics(reports)
        suspect = sorted({index for report in reports if report is not None for index in report["suspect"]})
        self._align_steps(reports, set(suspect))
        if not suspect:
            return
        optimizers = self._steps.optimizers()
        source = model_reset.choose_source(reports)
        if source is not None:
            replicated = model_reset.replicated_on_all(reports)
            copied = [optimizers[index] for index in suspect if index in replicated]
            failed, notes = model_reset.restore_stepped(copied, source, self.device)
            self.untrusted += [optimizers[index] for index in suspect if index not in replicated] + failed
            self.restored_from = source if len(failed) < len(copied) else None
            self.notes += notes
        else:
            own_report = reports[self.rank]
            self.untrusted += [optimizers[index] for index in (own_report["suspect"] if own_report is not None else ())]
        self._steps.forget()

    def _align_steps(self, reports: list[model_reset.StepReport | None], suspect_steps: set[int]) -> None:
        """Bring the optimizers to one step that the cell has left at different ones, or note it. A collective.

        The `suspect_steps` are left to `_mend_steps`.
        """
        optimizers = self._steps.optimizers()
        for difference in model_reset.compare_steps(reports):
            index = difference.indices[self.rank]
            if not suspect_steps.isdisjoint(difference.indices) or not difference.consequence:
                continue
            if difference.source is not None:
                own = optimizers[index] if index is not None else None
                failed, notes = model_reset.restore_stepped(
                    [own], difference.source, self.device, only_schedules=not difference.is_of_steps
                )
                self.notes += notes
                if failed:
                    continue
            if reports[self.rank] is None:  # a new process has made no steps, and says nothing about them
                continue
            name = "an optimizer" if index is None else type(optimizers[index]).__name__
            self.notes.append(f"{name}: {difference}: {difference.consequence}")
        self._earlier_steps = None
        self._steps.note_compared()  # another regroup may come before the next cell

    def _mend_statistics(self, reports: list[model_reset.StepReport | None]) -> None:
        """Take back running statistics from aborted collectives, or note that no rank can. A collective."""
        if not any(report is not None and report["was_cut"] for report in reports):
            return
        source, own_report = model_reset.choose_statistics_source(reports), reports[self.rank]
        if source is not None:
            model_reset.restore_statistics(source, self.device)
        if own_report is not None and own_report["was_cut"]:
            self.untrusted_statistics += [
                model
                for _, model in model_reset.models_with_statistics()
                if source is None or not model_reset.is_replicated(model, self._world_size)
            ]

    def _find_destroyed(self) -> set[str]:
        """Return the groups that the user has destroyed: they are not in torch's table any more."""
        return {name for name, member in self._members.copy().items() if member.group not in c10d._world.pg_map}

    def _forget(self, names: set[str]) -> None:
        for name in names:
            self._launched_in_forgotten += self._members.pop(name).group.log.total

    def _foreground(self) -> dict[str, _Member]:
        """Return the groups that cells use, by name."""
        return {name: member for name, member in self._members.copy().items() if not member.group.background}

    def _create_peer_groups(self, groups: dict[str, dict[str, Any]]) -> None:
        """Create the groups that the peers have with this rank, which has replaced a dead one."""
        for name, group in groups.items():
            # torch's own function, so that torch's tables know the group. It ends in `_create_group` like every other
            # creation.
            if name not in self._members and self.rank in group["ranks"]:
                self._create_known_group(name, group)

    def _create_known_group(self, name: str, group: dict[str, Any]) -> None:
        ranks = group["ranks"]
        process_group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(self.rank),
            ranks,
            dist.Backend(group["backend"]),
            c10d._world.pg_map[c10d._get_default_group()][1],
            c10d.GroupName(name),
            timeout=timedelta(seconds=group["timeout"]),
        )
        c10d._world.pg_group_ranks[process_group] = {rank: index for index, rank in enumerate(ranks)}

    def create_lost_group(self, ranks: list[int], ordinal: int) -> str | None:
        """Create a group of new ranks only, and return its name; None if one of `ranks` is not new.

        Their predecessors had the group, and no living rank knows it. A mesh has such groups along an axis on which all
        ranks were lost, as along every axis of size 1. All of `ranks` call this, in the same order. `ordinal` is the
        number of the group among those of the same ranks.
        """
        if not self._fresh.issuperset(ranks):
            return None
        name = f"renewed-{self._generation}-{'-'.join(map(str, ranks))}-{ordinal}"
        default = self._members[next(iter(self._members))]
        self._create_known_group(name, {**default.describe(), "ranks": tuple(ranks)})
        # The log of all ranks' creations, which is the same on all of them.
        self._creation_log.restart()
        return name

    def _enter_world(self, world_size: int) -> None:
        """Destroy all groups, which are those of another number of ranks."""
        # Not at the second attempt: the models still belong to the former groups.
        if dist.is_initialized() and self._earlier_steps is None:
            self._earlier_steps = self._report_steps()
        self._launched_in_forgotten += self._creation_log.total
        self._launched_in_forgotten += sum(member.group.log.total for member in self._foreground().values())
        self.leave()
        self._has_joined = False
        self._world_size = world_size
        self._destroyed.clear()
        self._fresh.clear()
        self._creation_log = CollectiveLog("", tuple(range(world_size)))

    def leave(self) -> None:
        """Destroy all process groups."""
        members = self._members.copy().values()
        for member in members:  # all at once, as in `join`
            member.group.abort_device_calls()
        for member in members:
            member.group.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._members.clear()

    # Abort and status

    def abort(self, message: Abort) -> None:
        """Abort the groups that `message` names, or only record the reason for a failure. Any thread.

        Groups in the background are left alone. With `shut`, the wait for other ranks while a group is being created
        ends as well. This rank creates no more groups, unless the message concerns only groups of other ranks.
        """
        groups = [
            member.group
            for name, member in self._foreground().items()
            if (not message.groups or name in message.groups)
            and not set(message.ranks).isdisjoint(member.group.log.ranks)
        ]
        ends_creation = not message.groups or self._creation_log.name in message.groups
        if groups or ends_creation:
            # The first reason stays: later ones are mostly consequences.
            self._cause = self._cause or message.cause
        for group in groups:
            if message.shut:
                group.abort_with_cause(message.cause, mismatch=message.mismatch)
            else:
                group.set_cause(message.cause, mismatch=message.mismatch)
        if message.shut and self._creating is not None and ends_creation:
            # Ends the waits for keys in the store and gloo's attempts to connect.
            self._cancel.set()

    def record_losses(self, message: RanksLost) -> None:
        """Record why ranks have exited, in all groups with one of them as a member. Any thread.

        This rank creates no more groups.
        """
        self._cause = self._cause or message.causes[0][1]
        # A copy, because the main thread may be creating a group. Groups in the background too: they break as well.
        for member in self._members.copy().values():
            ranks = set(member.group.log.ranks)
            cause = next((cause for rank, cause in message.causes if rank in ranks), None)
            if cause is not None:
                member.group.set_cause(cause)

    def rescue(self, thread: str) -> bool:
        """Handle a C++ thread that called std::terminate(). Return True if the process can continue without the thread.

        Called on that thread. A thread of torch that executes collectives may be lost if a future was completed twice,
        see `FutureWork.complete_early`. A thread of gloo, which reads the sockets, fails if tensors differ in size or
        type between ranks; then all groups with a pending collective are aborted. A thread without a name is one of
        gloo's if there are such groups.
        """
        if thread.startswith(gloo.TORCH):
            return FutureWork.any_completed_early
        members = self._members.copy().values()
        # Threads of idle groups have nothing to read.
        waiting = [member.group for member in members if next(member.group.log.pending(), None) is not None]
        for group in waiting:
            group.fail_transport()
        return bool(thread or waiting or FutureWork.any_completed_early)

    def report(self, line: int | str | None = None) -> tuple[GroupReport, ...]:
        """Return the collective logs of all groups in the foreground. Any thread.

        `line` is that of the running cell, for pending collectives whose line the logs do not know.
        """
        logs = [self._creation_log, *(member.group.log for member in self._foreground().values())]
        return tuple(log.report(line) for log in logs)

    def report_used(self) -> tuple[GroupReport, ...]:
        """Return the logs of the groups in the foreground that were used since the last call. Main thread."""
        # Only what has changed, because the report is part of every `Done`.
        used = [member.group.log for member in self._foreground().values()]
        used = [log for log in used if log.total != log.reported]
        for log in used:
            log.reported = log.total
        # The logs of destroyed groups outlive them until the next cell: another rank may still wait in a collective of
        # such a group, and the notebook finds out by comparing the logs.
        destroyed = self._find_destroyed()
        self._forget(destroyed & self._destroyed)
        self._destroyed = destroyed
        return tuple(log.report() for log in used)

    def oldest_pending(self) -> CollectiveCall | None:
        """Return the oldest collective that has not completed, or None. Any thread."""
        logs = [self._creation_log, *(member.group.log for member in self._foreground().values())]
        pending = [call for log in logs for call in log.pending()]
        return min(pending, key=lambda call: call.began, default=None)

    @property
    def launched(self) -> int:
        """Return the number of operations that this rank has launched so far."""
        logs = [self._creation_log, *(member.group.log for member in self._foreground().values())]
        return self._launched_in_forgotten + sum(log.total for log in logs)

    def translate(self, error: BaseException) -> BaseException:
        """Return `CollectiveAborted` for an error that C++ code raised because of an abort, as in DDP's backward pass.

        Any other error is returned unchanged.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveAborted):
            return error
        for member in self._foreground().values():
            launched = member.group.log.latest
            if launched is None or not member.group.may_have_raised(error):
                continue
            if (other := member.group.error_for(error, launched)) is not error:
                return other.with_traceback(error.__traceback__)
        return error

    def wait_for_device(self) -> None:
        """Wait until the device has finished the collectives on whose results the program relies. Main thread.

        An interrupt and an abort end the wait, by an exception that is raised in this thread.
        """
        watcher = self._watcher
        if watcher is None:
            return
        while watcher.error is None and any(entry.group.waits_for_device() for entry in self._foreground().values()):
            watcher.wait(_CHECK_INTERVAL)

    def wait_for_queue(self) -> bool:
        """Wait until the device has executed all that this thread has queued. Main thread.

        Returns False on the CPU, and if the device has failed. Ends as `wait_for_device` does.
        """
        watcher = self.device_watcher()
        if watcher is None or watcher.error is not None:
            return False
        executed = threading.Event()
        watcher.run_when_done(executed.set)
        while not executed.is_set():
            watcher.wait(_CHECK_INTERVAL)
        return watcher.error is None

    def device_watcher(self) -> DeviceWatcher | None:
        """Return the watcher of the rank's device; None if the rank computes on the CPU. Any thread."""
        if self._watcher is None and self.device.type == "cuda" and torch.cuda.is_initialized():
            self._watcher = DeviceWatcher(Cuda(self.device), self._on_device_lost)
        return self._watcher

    def lost_device(self) -> str:
        """Return the error of a device that has failed for good and executes nothing any more, or an empty string."""
        watcher = self.device_watcher()
        error = None if watcher is None else watcher.probe()
        return "" if error is None else next(iter(str(error).splitlines()), type(error).__name__)

    def _on_device_lost(self, error: Exception) -> None:
        cause = f"the device of rank {self.rank} has failed ({next(iter(str(error).splitlines()), '')})"
        for member in self._members.copy().values():
            member.group.mark_lost(cause)

    def suspend_timeouts(self, suspended: bool) -> None:
        """Suspend the timeouts of collectives launched from now on, or restore them. Any thread.

        The debugger calls it, because a paused rank keeps the others waiting without limit.
        """
        self._note_timeouts()
        self._timeouts_suspended = suspended
        for member in self._foreground().values():
            if member.group.is_shut_down:
                continue
            for device in member.backends:
                member.group._get_backend(torch.device(device))._set_default_timeout(self._timeout_of(member))

    def _note_timeouts(self) -> None:
        """Note the timeouts that the user has set since the groups were created: torch sets them in the backends."""
        for member in self._foreground().values():
            if member.group.is_shut_down:
                continue
            backend = member.group._get_backend(torch.device(next(iter(member.backends))))
            timeout = backend.options._timeout
            if timeout != _FOREVER:
                member.timeout = timeout

    def _timeout_of(self, member: _Member) -> timedelta:
        return _FOREVER if self._timeouts_suspended else member.timeout

    # Creating groups

    def _install(self) -> None:
        """Make torch create its groups through this manager."""
        # Once per process: torch's tables and functions belong to the module.
        if _NAME.upper() not in dist.Backend._plugins:
            install_fork_guards()
            dist.Backend.register_backend(_NAME, _create_backend, extended_api=True, devices=["cpu", "cuda"])
            c10d._new_process_group_helper = _wrap_new_group(c10d._new_process_group_helper)
            c10d.batch_isend_irecv = dist.batch_isend_irecv = _wrap_batch(c10d.batch_isend_irecv)
            model_reset.track_models()
            _rendezvous_handlers["env"] = functools.partial(_env_rendezvous, _rendezvous_handlers["env"])
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
        # torch creates one backend, ours, for all device types. `_create_group` finds the requested ones in
        # `_creating`.
        bound.arguments.update(backend=_NAME, device_id=None)
        is_default = not bound.arguments["global_ranks_in_group"]
        # The other ranks may not come to create the group: after an abort, they are not in the same place of the cell.
        if self._cause is not None and not is_default:
            raise CollectiveAborted(f"{self._cause}, so this rank cannot begin new_group")
        key, launched = self._creation_log.launch(_NEW_GROUP, ())
        self._creating = (str(bound.arguments["group_name"]), backends)
        try:
            group, store = original(*bound.args, **bound.kwargs)
        except RuntimeError:
            if self._cause is None:
                raise
            raise CollectiveAborted(f"{self._cause} while this rank waited in {launched}") from None
        finally:
            self._creating = None
            self._creation_log.end(key)
        # torch has noted the name of our backend. Its tables must show what the user has asked for.
        if isinstance(group, RecoverableProcessGroup):  # a rank outside the group gets NON_GROUP_MEMBER
            c10d._world.pg_map[group] = (backend, store)
            c10d._world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))
        return group, store

    def _create_group(self, options: Any, backend_options: object) -> RecoverableProcessGroup:  # noqa: ANN401 - torch's
        assert self._creating is not None
        name, backends = self._creating
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        member = _Member(None, backends, options.timeout, options.group_rank, backend_options)  # type: ignore[arg-type]
        inner = self._connect(name, ranks, member, max(JOIN_TIMEOUT, options.timeout))
        log = CollectiveLog(name, ranks, rank=options.group_rank, cell=self.cell)
        # A group that the user has destroyed and made anew is another one, whose numbers have nothing to do with those
        # before.
        log.generation = self._generation + ((self._creation_counts[name] - 1) << 32)
        member.group = RecoverableProcessGroup(options.store, options.group_rank, ranks, inner, log, self._line)
        member.group.on_break = self._on_break
        member.group.on_cut = functools.partial(self._on_cut, member)
        # A DeviceMesh asks the outer group for its backends. For gloo a dummy is registered, since torch cannot replace
        # a registered backend later.
        for device, backend in backends.items():
            kind = dist.Backend.backend_type_map[backend]
            member.group._set_default_backend(kind)
            registered = make_unconnected() if backend == "gloo" else inner.group._get_backend(torch.device(device))
            member.group._register_backend(torch.device(device), kind, registered)
        self._forget({name} & self._members.keys())  # the one that the user has destroyed
        self._members[name] = member
        return member.group

    def _on_break(self) -> None:
        self.on_break()

    def _on_cut(self, member: _Member, error: CollectiveAborted) -> None:
        # A thread of the program that aborts a group itself goes on, and so does a save beside the cells.
        if not member.group.background and threading.current_thread() is not threading.main_thread():
            self.on_cut(error)

    def _on_stuck(self) -> None:
        self.on_stuck(
            f"The abort of a collective on {self.device} has not returned within {ABORT_LIMIT:g} s: the device does "
            f"not respond. %distributed restart {self.rank} starts a new process for this rank.\n"
        )

    def _line(self) -> int | str | None:
        return self.current_line()

    def _connect(
        self, name: str, ranks: tuple[int, ...], member: _Member, timeout: timedelta = JOIN_TIMEOUT
    ) -> BackendGroup:
        """Meet the other members in the store and connect the backends.

        An interrupt ends the wait, as `abort` does. The members meet before gloo begins to connect, so that its short
        timeout counts from when all of them are present.
        """
        self._creation_counts[name] += 1  # user code may destroy a group and create it again, which needs fresh keys
        store = self._store(f"group-{name}.{self._creation_counts[name]}")
        # The value does not matter: the key says that this member is present.
        store.set(f"here-{member.rank}", "")
        self._wait_for_keys(store, [f"here-{rank}" for rank in range(len(ranks))], timeout)
        sockets: Opened = {}
        create = functools.partial(self._create_connected_group, sockets, store, name, ranks, member)
        group = self._run_interruptibly(create)
        backends = self._device_backends(group, member)
        if not backends:
            return BackendGroup(group, sockets, [])
        queued_types = frozenset(device for device, backend in member.backends.items() if backend in _ACCELERATORS)
        queue = DeviceQueue(self._watch_device(member))
        inner = BackendGroup(group, sockets, [backend.abort for backend in backends], queued_types, queue)
        inner.on_stuck = self._on_stuck
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend that looks for no errors
            _error_of(backends)
            inner.finds_errors, queue.get_error = True, functools.partial(_error_of, backends)
        return inner

    @staticmethod
    def _device_backends(group: dist.ProcessGroup, member: _Member) -> list[Any]:
        """Return the backends that queue collectives on a device. One may serve several device types."""
        devices = [torch.device(device) for device, backend in member.backends.items() if backend in _ACCELERATORS]
        return list({id(backend): backend for backend in map(group._get_backend, devices)}.values())

    def _watch_device(self, member: _Member) -> DeviceWatcher:
        """Return the watcher of the rank's device."""
        if self._watcher is None:
            make = next(_ACCELERATORS[backend] for backend in member.backends.values() if backend in _ACCELERATORS)
            self._watcher = DeviceWatcher(make(self.device), self._on_device_lost)
        return self._watcher

    def _create_connected_group(
        self, sockets: Opened, store: dist.Store, name: str, ranks: tuple[int, ...], member: _Member
    ) -> dist.ProcessGroup:
        """Create the inner group. Connect NCCL, which would do so in the first collective.

        There, a rank would wait for the others where neither an abort nor an interrupt reaches it, and those that come
        later than the store's timeout would find it gone. Here, all members have just met. `sockets` gets those of
        gloo; NCCL has an abort of its own, and would report an error if its connections ended before.
        """
        with track_new_sockets() as opened:
            group = self._create_inner_group(store, name, ranks, member)
        sockets.update(opened)
        for backend in self._device_backends(group, member):
            try:
                backend.eager_connect_single_device(self.device)
            except RuntimeError as error:
                raise describe_nccl_error(error) from None
        return group

    def _create_inner_group(
        self, store: dist.Store, name: str, ranks: tuple[int, ...], member: _Member
    ) -> dist.ProcessGroup:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device belongs to the thread
        group = dist.ProcessGroup(store, member.rank, len(ranks))
        created: dict[str, Any] = {}
        for device, backend in member.backends.items():
            kind = dist.Backend.backend_type_map[backend]
            if backend not in created:
                timeout, backend_store = self._timeout_of(member), dist.PrefixStore(backend, store)
                wait, given_up = self._wait_for_keys, self._cancel
                created[backend] = make_backend(
                    backend, backend_store, name, ranks, member.rank, timeout, wait, given_up, member.options
                )
                group._set_default_backend(kind)
            group._register_backend(torch.device(device), kind, created[backend])
        group._set_group_name(c10d.GroupName(name))
        group._set_group_desc("inner")
        return group

    def _store(self, what: str) -> dist.Store:
        return dist.PrefixStore(self._prefix(what), self.store)

    def _prefix(self, what: str) -> str:
        return f"{generation_prefix(self._generation)}/{what}"

    def _wait_for_keys(self, store: dist.Store, keys: list[str], timeout: timedelta = JOIN_TIMEOUT) -> None:
        """Wait until all `keys` are set. torch's own wait ignores signals and `abort`."""
        # Short pauses first, because the others are usually there at once.
        pause, deadline = 0.0005, time.monotonic() + timeout.total_seconds()
        while not store.check(keys):
            if self._cancel.wait(pause):
                raise CollectiveAborted("the other ranks will not join the process group")
            if time.monotonic() > deadline and not self._timeouts_suspended:
                missing = [key for key in keys if not store.check([key])]
                seconds = timeout.total_seconds()
                raise RuntimeError(f"timeout after {seconds:.0f} s, waiting for the other ranks: {', '.join(missing)}")
            pause = min(2 * pause, 0.02)

    def _run_interruptibly(self, wait: Callable[[], _T]) -> _T:
        """Call `wait` on another thread, because it blocks in C++. An interrupt ends it through `_cancel`."""
        result: list[_T] = []
        failed: list[BaseException] = []
        ended = threading.Event()

        def run() -> None:
            try:
                result.append(wait())
            except BaseException as error:  # noqa: BLE001 - raised again, on the thread that waits for it
                failed.append(error)
            finally:
                ended.set()

        # A daemon thread: in the worst case it stays in C++ forever.
        threading.Thread(target=run, name="rankbook-join", daemon=True).start()
        try:
            # Waits for the store and for gloo end soon after `_cancel`. NCCL knows no way out of a connection attempt.
            while not ended.wait(_CHECK_INTERVAL) and not self._cancel.is_set():
                pass
            if not ended.wait(ABORT_LIMIT):
                failed.append(CollectiveAborted("the other ranks will not join the process group"))
        # Mostly KeyboardInterrupt. The thread is told to give up and then waited for, because it uses the store and the
        # sockets.
        except BaseException:
            self._cancel.set()
            ended.wait(ABORT_LIMIT)
            if self._cause is None:  # else `abort` has set it, and it stays set until the next join
                self._cancel.clear()
            raise
        if failed:
            raise failed[0]
        return result[0]


_installed: GroupManager | None = None


def _manager() -> GroupManager:
    assert _installed is not None
    return _installed


def create_lost_group(ranks: list[int], ordinal: int) -> str | None:
    """See `GroupManager.create_lost_group`."""
    return _manager().create_lost_group(ranks, ordinal)


def _create_backend(options: object, backend_options: object) -> RecoverableProcessGroup:
    return _manager()._create_group(options, backend_options)


_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def _master_variables(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(map(environment.get, _MASTER))


def _env_rendezvous(original: Callable[..., Any], url: str, **options: Any) -> Iterator[Any]:  # noqa: ANN401
    """Redirect `init_method="env://"` to the cluster's store, unless the user has set another address."""
    manager = _manager()
    # User code that has set another address wants torch's own rendezvous.
    if _master_variables(os.environ) != manager.master:
        yield from original(url, **options)
        return
    query = dict(parse_qsl(urlsplit(url).query))
    # As torch's own handler does: from the URL, else from the environment.
    rank, world_size = (int(query.get(name.lower(), os.environ[name])) for name in ("RANK", "WORLD_SIZE"))
    yield dist.PrefixStore("env", manager.store), rank, world_size


def _wrap_new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
        return _manager().new_group(original, signature.bind(*args, **kwargs))

    return new_process_group


def _wrap_batch(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `batch_isend_irecv` for our groups as well: torch makes one batch only for its own class of groups.

    Without a batch, NCCL executes the sends and receives in the order of the list: a ring, or two ranks that send more
    than NCCL's buffers hold, never end.
    """

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group, device = p2p_op_list[0].group or dist.group.WORLD, p2p_op_list[0].tensor.device
        if not isinstance(group, RecoverableProcessGroup) or not group._get_backend(device).supports_coalescing:
            return original(p2p_op_list)
        try:
            with c10d._coalescing_manager(group, device, async_ops=True) as batch:
                for operation in p2p_op_list:
                    peer = "group_dst" if operation.op is dist.isend else "group_src"
                    operation.op(
                        operation.tensor, group=operation.group, tag=operation.tag, **{peer: operation.group_peer}
                    )
        except BaseException:
            # Here torch neither ends the batch nor forgets it: it would append later collectives to it and not launch
            # them.
            c10d._world.pg_coalesce_state.pop(group, None)
            with contextlib.suppress(RuntimeError):
                group._end_coalescing(device)
            raise
        return list(batch.works)

    return batch_isend_irecv


def backends_of(backend: str) -> dict[str, str]:
    """Return the backend of every device type."""
    if backend == "undefined":
        # torch's default, when no backend is named.
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
    given_up: threading.Event,
    requested: Any = None,  # noqa: ANN401 - torch's options
) -> Any:  # noqa: ANN401 - torch has no type for it
    """Return a gloo or NCCL backend for the group `name` of the global `ranks`, in which this rank is number `rank`.

    `wait` waits for keys of a store. `given_up` ends gloo's attempt to connect. `requested` is the user's `pg_options`.
    """
    if backend == "gloo":
        process_group: Any = make_gloo(store, rank, len(ranks), timeout, wait, given_up)
        process_group.options.global_ranks_in_group = list(ranks)
        process_group.options.group_name = c10d.GroupName(name)
    else:
        options = dist.ProcessGroupNCCL.Options()
        if isinstance(requested, dist.ProcessGroupNCCL.Options):
            # Copied, because one object may be given to several groups.
            options.is_high_priority_stream, options.config = requested.is_high_priority_stream, requested.config
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = c10d.GroupName(name)
        process_group = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    process_group._set_sequence_number_for_group()
    return process_group


def _error_of(backends: list[Any]) -> str:
    """Return the name of the first error that NCCL's watchdog has found, or an empty string."""
    names = (str(backend.get_error().name) for backend in backends)
    return next((name for name in names if name != "SUCCESS"), "")


_TASKS = Path("/proc/self/task")
_MAX_FORK_WAIT = 0.1
"""Seconds that a fork waits for these threads; one of them may be at work for long."""


def install_fork_guards() -> None:
    """Protect all child processes that this process creates after the call.

    A fork waits briefly until torch's gloo threads sleep: CPython's child takes the lock of the list of thread states,
    which such a thread may hold at that moment, and then never starts. A forked child excludes inherited objects from
    garbage collection (`gc.freeze`), because the finalizers of old gloo connections hang on threads that the child
    lacks, and remove descriptors from an epoll set that it shares with the rank. Functions and classes of cells reach
    forked children by reference, and spawned children by value, see `reduce_for_child`.
    """
    if sys.platform == "linux":
        # Linux only: the states of threads are read from /proc.
        os.register_at_fork(before=wait_for_gloo_threads)
    os.register_at_fork(after_in_child=gc.freeze)
    os.register_at_fork(before=number_cell_objects)
    ForkingPickler.reducer_override = reduce_for_child  # type: ignore[method-assign]  # multiprocessing has no other hook


def wait_for_gloo_threads() -> None:
    """Wait briefly until torch's gloo threads sleep."""
    deadline = time.monotonic() + _MAX_FORK_WAIT
    while any(map(_is_running, _TASKS.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.0005)  # releases the GIL, which those threads may need


def _is_running(task: Path) -> bool:
    """Return True if the task is one of torch's gloo threads and not asleep."""
    try:
        identity = (task / "stat").read_text()
    except OSError:  # the thread has ended
        return False
    name, _, rest = identity.partition("(")[2].rpartition(")")
    # `S` is interruptible sleep in proc(5): the thread waits for work.
    return name.startswith(gloo.TORCH) and rest.split()[0] != "S"
