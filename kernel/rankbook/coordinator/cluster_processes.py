"""Processes and resources of one cluster: folders, sockets, launcher and driver, from start to stop.

`ClusterProcesses` acquires the forkserver, makes the folders and the hub link, starts the driver thread and launches
the ranks; `stop` undoes all of it. A kept cluster (`keep`) survives this process: its forkserver listens at a socket
where a new owner can claim it, and a record on disk describes it. At interpreter exit, clusters are stopped, or
detached if they are kept.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import os
import platform
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rankbook.coordinator import events as ev
from rankbook.coordinator.driver import STOPPED, Driver, ReattachedDriver
from rankbook.coordinator.engine_monitor import Action, EngineMonitor, LoseHost, SaveAndStop, Show
from rankbook.coordinator.liveness import describe_unresponsive
from rankbook.coordinator.state_machine import ClusterState
from rankbook.coordinator.states import GracePeriods, RankState
from rankbook.coordinator.wait import deferred_interrupts, describe_interrupt
from rankbook.engines.engine import AgentConnection, make_engine
from rankbook.errors import ClusterStopped, InvalidArgument, RankLostError, StartError
from rankbook.formatting import plural
from rankbook.launch import local
from rankbook.launch.connection import connection_path, decode_connection, interface_addresses
from rankbook.launch.hosts import HostOptions, Hosts, HostsLauncher, HostsLink, listen
from rankbook.launch.placement import (
    HOME,
    PLACE_OF_OTHERS,
    DeviceAssignment,
    HostSlots,
    RankSeat,
    abort_grace,
    assign_devices,
    choose_backend,
    choose_device,
    describe_no_device,
    home_seat,
    inherited_variables,
    path_to_send,
    place_ranks,
    place_variables,
    rank_environment,
    threads_per_rank,
    usable_cores,
)
from rankbook.launch.registry import (
    ClusterPaths,
    ClusterRecord,
    DetachedRank,
    make_folders,
    process_start_time,
    session_id,
    write_record,
)
from rankbook.protocol.forkserver import ClusterOpened, ForkRank
from rankbook.ranks import group_ranks, name_ranks
from rankbook.transport.shared_memory import SegmentStore
from rankbook.transport.zmq_link import ZmqHub

_SAVE_MARGIN = 10.0
"""Seconds before the end of hosts with a limited time, beside the grace period `save`, at which their ranks stop."""
_STOP_TIMEOUT = 5.0
_ANSWER_TIMEOUT = 1.0
_REPORT_TIMEOUT = 10.0
"""Seconds for the forkserver to report a process that has ended, which takes some milliseconds."""

_MAX_RANKS = 4096
_numbers = itertools.count(1)


class ClusterProcesses:
    """Start `n` ranks (see `launch.placement.assign_devices`) and wait until they form one process group.

    `device`: "cpu", "cuda", or None for CUDA devices if torch can use some.
    `keep`: the seconds that the ranks survive this process, for another one to attach to them (reattach.py).
    `environment` is that of this process at the start, or at the attachment. Raises `StartError`, `InvalidArgument`;
    then all processes and files have been removed.
    """

    assignment: DeviceAssignment
    state: ClusterState
    segments: SegmentStore
    _launcher: local.LocalLauncher | HostsLauncher
    _folders: ClusterPaths
    _port: int
    grace = GracePeriods()
    _driver: Driver | None
    _hub: ZmqHub | HostsLink | None
    _hosts: Hosts | None
    _cuda_devices: int
    device: str | None
    _connection_file: Path | None = None
    _engine: EngineMonitor | None = None

    def __init__(
        self,
        n: int | None,
        *,
        backend: str | None,
        timeout: float,
        device: str | None = None,
        keep: float | None = None,
        grace: GracePeriods | None = None,
        hosts: HostOptions | None = None,
    ) -> None:
        # An instance attribute shadows the class's default only where the constructor runs. `ReattachedProcesses` does
        # not call it.
        if hosts is not None and keep is not None:
            raise InvalidArgument("keep is not available with ranks on other hosts: they end with the notebook")
        self.grace = grace or GracePeriods(raised=abort_grace())
        self.device = choose_device(device, os.environ)
        self._init_state(f"{os.getpid()}-{next(_numbers)}", keep, secrets.token_hex(32) if keep is not None else "")
        # From the first process to the last: an interrupt in between would leave processes and folders that nobody
        # removes. `open` and `launch` look for interrupts themselves, because they may take minutes.
        with deferred_interrupts() as interrupts:
            # Reject invalid values early. Of ranks on other hosts, the number is checked when the hosts are known.
            here = n if hosts is None else hosts.home or None
            if here is not None:
                on_cpu = self.device == "cpu" and hosts is None
                assign_devices(here, 0, backend=backend if on_cpu else None, cores=usable_cores())
            self._launcher = forkserver = local.acquire_forkserver()
            try:
                self._folders = make_folders(None if keep is None else self._launcher.pid)
            # Before `register_for_exit` nothing else would close the launcher.
            except BaseException:
                self._launcher.close()
                raise
            # From here on `stop` can undo every step, in whichever state the constructor is.
            register_for_exit(self)
            try:
                # First of all, because from here on the forkserver removes the folders and files if this process dies.
                files = () if hosts is None else (connection_path(self.key),)
                folders = (self._folders.sockets, self._folders.segments)
                forkserver.request_open(folders, files, device=self.device or "")
                self._hub = ZmqHub(self._folders.sockets)
                if hosts is not None:
                    self._listen(hosts, forkserver, self._hub)
                    # Before the wait for the forkserver: other hosts import torch at the same time.
                    self._wait_for_slots(n, timeout=timeout, interrupted=interrupts.take)
                opened = forkserver.wait_opened(timeout=timeout, interrupted=interrupts.take)
                self._port, self._cuda_devices = opened.master_port, opened.devices
                if hosts is None or hosts.home:
                    self._check_devices(opened)
                if hosts is None:
                    self.assignment = self._assign(n, backend)
                else:
                    home = HostSlots(HOME, platform.node(), hosts.home, opened.devices, usable_cores())
                    self.assignment = self._place(n, home, backend)
                self.state = ClusterState(len(self.assignment.devices), grace=self.grace)
                self.segments = SegmentStore(self._folders.segments) if self._hosts is None else self._hosts.segments
                make_driver = Driver if keep is None else ReattachedDriver
                self._driver = make_driver(self.state, self._hub, self._launcher, self._fork_request)
                self._driver.on_filled = self._record_filled
                if self._hosts is not None:
                    self._hosts.report = self._note
                    if self._hosts.modules is not None:
                        # Modules are sent before a task, when its cell has not started yet: `_note` would be too early.
                        self._hosts.modules.report = self._show
                self._driver.start()
                self._show_notes()
                self.launch(tuple(self.state.ranks), timeout=timeout)
                # Only when the ranks are ready: if the start fails, they must end with this process.
                if keep is not None:
                    forkserver.detach(self._address, token=self._token, seconds=keep)
                    self._wait_kept(self._driver, timeout=timeout)
                # Raised behind this `try`, it would leave ranks that the caller does not know.
                interrupts.check()
            except BaseException:
                self.stop()
                raise

    def _check_devices(self, opened: ClusterOpened) -> None:
        """Say why ranks of this host cannot use its CUDA devices. Raises `StartError` if they are to use some."""
        if self.device == "cuda" and not opened.devices:
            raise StartError(describe_no_device(opened.problem))
        if opened.unexpected:
            where = "" if opened.devices else "the ranks of this host use the CPU: "
            self._notes.append(f"{where}{opened.problem}")

    def _init_state(self, key: str, keep: float | None, token: str) -> None:
        self.key = key
        self.keep = keep
        self._token = token
        self._created = time.time()
        self.environment = dict(os.environ)
        # An event, so that any thread may read it, and a lock, so that `stop` and `detach` run once even if the
        # interpreter's exit calls them while a user's thread does.
        self._stopped = threading.Event()
        self._stop_lock = threading.Lock()
        self._record_lock = threading.Lock()
        self._interrupted = ""
        self._driver, self._hub, self._hosts = None, None, None
        self._notes: deque[str] = deque(maxlen=100)
        self.ended_because = ""
        """Why the ranks were stopped although nobody has asked for it; empty otherwise."""

    @property
    def stopped(self) -> bool:
        """Return True if `stop` was called."""
        return self._stopped.is_set()

    @property
    def driver(self) -> Driver:
        """Return the driver. Raises `ClusterStopped`, and `RankbookError` if the driver itself has failed."""
        if self.stopped or self._driver is None:
            raise ClusterStopped(STOPPED)
        self._driver.check_running()
        return self._driver

    @property
    def snapshot_copies(self) -> int:
        """Return how many snapshots of a protected rank are in memory: two, with several hosts on two hosts each."""
        hosts = {seat.host for seat in self._hosts.seats.values()} if self._hosts is not None else set()
        return 4 if len(hosts) > 1 else 2

    def clock_offset(self, rank: int) -> float:
        """Return the seconds by which the clock of a rank's host is ahead of this host's."""
        return 0.0 if self._hosts is None else self._hosts.clock_offset(rank).wall

    # Start

    def launch(self, ranks: tuple[int, ...], *, timeout: float, world_size: int | None = None) -> None:
        """Start new processes for `ranks`; wait until they are ready and the process group is formed.

        With `world_size`, that many ranks form it, and leave all groups that they have. Raises `StartError`, and
        KeyboardInterrupt if SIGINT arrives meanwhile.
        """
        driver = self.driver
        if not self._launcher.alive:
            raise StartError(
                "the forkserver has exited; start a new one with %distributed stop, then %distributed start"
            )
        # The ranks start in the notebook's working directory. Checked here, because an error in the middle of a fork
        # request is harder to explain.
        try:
            Path.cwd()
        except OSError as error:
            raise StartError(
                "the notebook's working directory does not exist any more; change to an existing one with os.chdir()"
            ) from error
        driver.start_errors.clear()
        # KeyboardInterrupt must not be raised while `post` performs its actions, which would leave some ranks forked
        # and others not.
        with deferred_interrupts() as interrupts:
            deadline = time.monotonic() + timeout
            if self._hosts is not None:
                replacements = self._replace_hosts(self._hosts, ranks, deadline, interrupts.take)
                self._move_lost(self._hosts, driver, ranks, replacements, deadline, interrupts.take)
            if world_size is not None:
                driver.post(ev.ResizeWorld(world_size))
            driver.post(ev.LaunchRanks(ranks))
            with driver.changed:
                while not self._launched(driver, ranks):
                    if interrupts.take():
                        raise KeyboardInterrupt
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise StartError(
                            f"{name_ranks(ranks)} not ready within {timeout:.0f} s: {self._states(driver)}"
                        )
                    # In short steps: `wait` does not return for a signal whose handler only counts.
                    driver.changed.wait(min(remaining, 0.05))
        errors = driver.start_errors
        # Ranks that were dead before and are not to be started count only if they have an error now.
        dead = [rank for rank in self._dead(tuple(self.state.ranks)) if rank in errors or rank in ranks]
        failures = [errors.get(rank, f"rank {rank} {self.state.ranks[rank].loss}") for rank in dead]
        # Errors of live ranks are consequences of the deaths, or of an earlier attempt that this call has met.
        if failures or (errors and not self.state.grouped):
            raise StartError("\n".join(failures or dict.fromkeys(errors.values())))
        self._record()

    def assign(self, world_size: int) -> DeviceAssignment:
        """Return the devices of another number of ranks. Raises `InvalidArgument` if they do not suffice."""
        return self._assign(world_size, self.assignment.backend)

    def _assign(self, n: int | None, backend: str | None) -> DeviceAssignment:
        assignment = assign_devices(n, self._cuda_devices, backend=backend, cores=usable_cores())
        return replace(assignment, threads=threads_per_rank(os.environ, assignment.threads))

    def resize(self, assignment: DeviceAssignment, new: tuple[int, ...], *, timeout: float) -> None:
        """Let the ranks beyond those of `assignment` exit, and start the ranks `new`.

        All ranks leave their process groups and form new ones. Raises as `launch`, and `RankLostError` if a rank that
        is not `new` has died: the caller would not give it any state.
        """
        driver, world_size = self.driver, len(assignment.devices)
        leaving = tuple(rank for rank in self.state.ranks if rank >= world_size)
        # As in `launch`: an interrupt in the middle of the actions would leave some ranks that were not asked to exit.
        with deferred_interrupts() as interrupts:
            with driver.changed:
                driver.post(ev.RemoveRanks(leaving))
                ended = (RankState.ABSENT, RankState.DEAD)
                deadline = time.monotonic() + timeout
                while any(self.state.ranks[rank].state not in ended for rank in leaving):
                    interrupts.check()
                    if time.monotonic() > max(deadline, driver.shutdown_manager.deadline + 1.0):
                        raise StartError(f"{name_ranks(leaving)} did not exit within {timeout:.0f} s")
                    driver.changed.wait(0.05)
                dead = [rank for rank in self._dead(tuple(self.state.ranks)) if rank < world_size and rank not in new]
                if dead:
                    raise RankLostError(f"{name_ranks(dead)} died while other ranks left", dead)
                # The devices of a former rank may be asked for until it is gone. New ranks start on those of
                # `assignment`.
                self.assignment = replace(assignment, devices=assignment.devices + self.assignment.devices[world_size:])
            try:
                self.launch(new, timeout=timeout, world_size=world_size)
            finally:
                if len(self.state.ranks) == world_size:
                    self.assignment = assignment
            self._record()

    def discard(self, ranks: tuple[int, ...], reason: str) -> None:
        """Kill those of `ranks` that live, and treat them as dead at once. `reason` says why."""
        driver = self.driver
        # Kill and report in one step, so that the exit that the forkserver reports later finds the ranks dead already
        # and is ignored. An interrupt waits for the last rank.
        with deferred_interrupts(), driver.changed:
            for rank in (self.state.ranks[number] for number in ranks):
                if rank.state in (RankState.STARTING, RankState.IDLE, RankState.BUSY):
                    self._launcher.kill(rank.rank, rank.incarnation)
                    driver.post(ev.RankGone(rank.rank, rank.incarnation, reason))

    def wait_exits(self, *, timeout: float = _ANSWER_TIMEOUT) -> None:
        """Wait until the state machine knows of every rank that has exited by now.

        The forkserver reports an exit some milliseconds later.
        """
        driver = self.driver
        deadline = time.monotonic() + timeout
        # The system's view first; then wait until the forkserver's reports have reached the state machine.
        exited = driver.liveness.wait_exited(driver.live_ranks(), timeout=timeout)
        with driver.changed:
            while not exited.isdisjoint(driver.live_ranks()) and time.monotonic() < deadline + _REPORT_TIMEOUT:
                driver.changed.wait(0.05)

    def _launched(self, driver: Driver, ranks: tuple[int, ...]) -> bool:
        if driver.failure is not None:
            return True
        # Settled: no regroup cell is queued or running, all `ranks` have connected or died, and either the group is
        # formed or an error explains why it never will be. `launch` tells which.
        settled = (RankState.IDLE, RankState.BUSY, RankState.DEAD)
        forming = any(cell.internal for cell in self.state.cells.values())
        if forming or any(self.state.ranks[rank].state not in settled for rank in ranks):
            return False
        return bool(driver.start_errors or self._dead(tuple(self.state.ranks))) or self.state.grouped

    def _dead(self, ranks: tuple[int, ...]) -> list[int]:
        return [rank for rank in ranks if self.state.ranks[rank].state is RankState.DEAD]

    def _states(self, driver: Driver) -> str:
        unresponsive = driver.liveness.wait_unresponsive(driver.live_ranks(), timeout=_ANSWER_TIMEOUT)
        states = {rank: entry.state.name.lower() for rank, entry in self.state.ranks.items()}
        states |= {rank: describe_unresponsive(unresponsive_rank) for rank, unresponsive_rank in unresponsive.items()}
        return "; ".join(f"rank {rank} is {state}" for rank, state in states.items())

    def _fork_request(self, rank: int, incarnation: int, downlink: str) -> ForkRank:
        assert self._hub is not None
        # Called by the driver, with its lock held, for every fork: the environment and the working directory are those
        # of that moment.
        world_size, threads = len(self.state.ranks), self.assignment.threads
        if self._hosts is None:
            seat = home_seat(rank, self.assignment.devices[:world_size], threads)  # see `resize`
        else:
            seat = self._hosts.seats[rank]
        variables = self._place_variables(seat)
        if self._hosts is None:
            environment = rank_environment(os.environ, variables, threads=threads)
        else:
            environment = self._environment_on(self._hosts, seat, variables)
        path = tuple(_encode_paths(sys.path))
        return ForkRank(
            rank=rank,
            incarnation=incarnation,
            world_size=world_size,
            local_rank=seat.local_rank,
            backend=self.assignment.backend,
            device=seat.device,
            threads=threads_per_rank(environment, seat.threads),
            env={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            cwd=os.fsencode(Path.cwd()),
            path=path if seat.host == HOME else path_to_send(path),
            uplink=self._hub.uplink,
            downlink=downlink,
            # On another host the agent fills it in, and reads what a dead rank has left: see `read_remains`.
            segments=str(self._folders.segments) if seat.host == HOME else "",
            logs=str(self._folders.logs),
            cluster=self.key,
            modules="on" if self._hosts is not None and self._hosts.modules is not None and seat.host != HOME else "",
            keep=self._token,
            widgets="ipykernel.kernelapp" in sys.modules,  # imported in the process of every kernel
        )

    def _place_variables(self, seat: RankSeat) -> dict[str, str]:
        address, port = "127.0.0.1", self._port
        if self._hosts is not None:
            address, port = self._hosts.address_of(0), self._hosts.port_of(0, self._port)
        return place_variables(
            seat, world_size=len(self.state.ranks), address=address, port=port, run=self.key, device=self.device
        )

    # Other hosts

    @property
    def hosts(self) -> Hosts | None:
        """Return the table of the other hosts; None if all ranks run on this one."""
        return self._hosts

    @property
    def launcher(self) -> str:
        """Return the name of the engine that has started the other hosts; empty if all ranks run on this one."""
        return "" if self._engine is None else self._engine.state.name

    @property
    def engine_status(self) -> str:
        """Return a line about the engine that has started the other hosts; empty if there is nothing to say."""
        return "" if self._engine is None else self._engine.state.describe(time.time())

    def take_notes(self) -> list[str]:
        """Return what the hosts and their engine have reported while no cell was running, once."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def inherited(self, variables: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return those of `variables` that ranks on other hosts inherit."""
        names = inherited_variables(dict.fromkeys(variables, ""), self._host_options.env)
        return {name: variables[name] for name in names}

    def _listen(self, options: HostOptions, forkserver: local.LocalLauncher, hub: ZmqHub) -> None:
        self._host_options = options
        if isinstance(options.launcher, str):
            name, engine = options.launcher, make_engine(options.launcher, options.arguments)
        else:
            engine = options.launcher
            name = str(getattr(engine, "name", "") or type(engine).__name__)
        self._hosts, self._connection_file = listen(options, self.key, self._folders.segments, report=_report)
        self._hosts.device = self.device
        launcher = HostsLauncher(forkserver, self._hosts)
        self._hub, self._launcher = HostsLink(hub, self._hosts, launcher), launcher
        self._engine = EngineMonitor(engine, name, grace=self.grace.save + _SAVE_MARGIN, perform=self._perform)

    def _wait_for_slots(self, n: int | None, *, timeout: float, interrupted: Callable[[], bool]) -> None:
        """Start the engine, and wait until the other hosts have slots for those of `n` ranks that do not run here."""
        hosts, link, engine, file = self._hosts, self._hub, self._engine, self._connection_file
        assert hosts is not None and link is not None and engine is not None and file is not None
        home = self._host_options.home
        if n is None or n <= home or n > _MAX_RANKS:
            raise InvalidArgument(
                f"invalid number of ranks: {n}; with a launcher, expected more than the {home} on this host,"
                f" and at most {_MAX_RANKS}"
            )
        # The key is in no local variable, which a traceback could show.
        public_text = decode_connection(file.read_text(encoding="utf-8"), str(file)).encode(with_key=False)
        connection = AgentConnection(
            file.read_text(encoding="utf-8"),
            file,
            hosts.hub.address,
            public_text=public_text,
            allow=hosts.hub.allow,
        )
        engine.start(self._host_options.nodes, n - home, connection)
        deadline = time.monotonic() + timeout
        missing_before = n - home
        while (missing := n - home - sum(host.slots for host in hosts.slots)) > 0:
            if missing < missing_before:
                hosts.report(f"waiting for {plural(missing, 'more slot')}")
            missing_before = missing
            self._show_notes()
            if interrupted():
                raise KeyboardInterrupt
            if hosts.lacks_device:
                raise StartError(hosts.lacks_device)
            if problem := engine.state.start_problem():
                raise StartError(f"{plural(missing, 'slot')} cannot be had: {problem}")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                written = engine.state.describe_output()
                raise StartError(f"{missing} of {n - home} slots are missing after {timeout:.0f} s{written}")
            link.wait(min(0.1, remaining), ())
        engine.state.start_succeeded = True

    def _place(self, n: int | None, home: HostSlots, backend: str | None) -> DeviceAssignment:
        """Place the ranks on this host and the others."""
        hosts = self._hosts
        assert hosts is not None and n is not None
        seats = place_ranks(n, [home, *hosts.slots])
        hosts.seats.update({seat.rank: seat for seat in seats})
        threads = threads_per_rank(os.environ, min(seat.threads for seat in seats))  # all ranks inherit the variable
        backend = choose_backend(seats, backend)
        hosts.own_devices = "nccl" in backend
        return DeviceAssignment(tuple(seat.device for seat in seats), backend, threads)

    def _replace_hosts(
        self, hosts: Hosts, ranks: tuple[int, ...], deadline: float, interrupted: Callable[[], bool]
    ) -> dict[int, int]:
        """Ask the engine for hosts in place of those that are lost, and wait for them, if it has some that are free.

        Returns their numbers.
        """
        assert self._engine is not None
        replacements = {}
        lost_nodes = {hosts.node_of(rank) for rank in ranks if hosts.is_lost(rank)}
        for node in sorted(node for node in lost_nodes if node is not None):
            # An agent that was only not reached for some time has returned, and offers its slots again. The engine,
            # which has seen no end of it, would start a second one on the same devices.
            if hosts.has_free_slot(node):
                replacements[node] = node
                continue
            replacement = self._ask_engine(node, deadline, interrupted, wait=False)
            while replacement is not None and not hosts.has_node(replacement):
                self._show_notes()
                if interrupted():
                    raise KeyboardInterrupt
                # Free slots of other hosts are left, see `_move_lost`.
                if self._has_ended(replacement):
                    _report(self._describe_ended(replacement))
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            if replacement is not None:
                replacements[node] = replacement
        return replacements

    def _ask_engine(self, node: int, deadline: float, interrupted: Callable[[], bool], *, wait: bool) -> int | None:
        """Return the number of the host that the engine starts in place of `node`, or None."""
        assert self._engine is not None
        answer = self._engine.replace(node, wait=wait)
        while not answer.done():
            self._show_notes()
            if interrupted():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise StartError(
                    f"the launcher {self._engine.state.name} has not answered; "
                    "stop the ranks with %distributed stop and start again"
                )
            concurrent.futures.wait([answer], 0.05)
        # The monitor has shown the exception.
        return None if answer.exception() is not None else answer.result()

    def _move_lost(
        self,
        hosts: Hosts,
        driver: Driver,
        ranks: tuple[int, ...],
        replacements: dict[int, int],
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> None:
        """Give the ranks of lost hosts a place on another one; wait for a new host if there is no free slot."""
        requested: list[int] = []
        while True:
            # Asked before the look for free slots: those of a host that has joined are then used.
            waiting = [number for number in requested if not self._has_ended(number) and not hosts.has_node(number)]
            with driver.changed:
                missing = hosts.move_lost(ranks, replacements)
            self._show_notes()
            if not missing:
                break
            if not requested:
                requested = self._ask_for_hosts(hosts, missing, deadline, interrupted)
            elif not waiting and (ended := [number for number in requested if self._has_ended(number)]):
                reasons = "\n".join(map(self._describe_ended, ended))
                raise StartError(f"no host has a free slot for {name_ranks(missing)}: {reasons}")
            if interrupted():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise StartError(f"no host has a free slot for {name_ranks(missing)}{self._describe_wait()}")
            time.sleep(0.05)
        seats = [seat for _, seat in sorted(hosts.seats.items())]
        self.assignment = replace(self.assignment, devices=tuple(seat.device for seat in seats))
        places = map(self._place_variables, seats)
        driver.places = tuple({name: variables[name] for name in PLACE_OF_OTHERS} for variables in places)

    def _ask_for_hosts(
        self, hosts: Hosts, missing: list[int], deadline: float, interrupted: Callable[[], bool]
    ) -> list[int]:
        """Ask the engine for hosts in place of those of the ranks `missing`. Return the numbers of the new hosts."""
        assert self._engine is not None
        nodes = sorted({hosts.node_of(rank) or 0 for rank in missing})
        answers = [self._ask_engine(node, deadline, interrupted, wait=True) for node in nodes]
        requested = [number for number in answers if number is not None]
        if not requested:
            raise StartError(
                f"no host has a free slot for {name_ranks(missing)}, and the launcher {self._engine.state.name} has no"
                " other host; the other ranks go on, or stop and start again"
            )
        _report(f"waiting for {plural(len(missing), 'slot')} on another host, for {name_ranks(missing)}")
        return requested

    def _describe_wait(self) -> str:
        """Describe what further hosts wait for, to follow the ranks that have none."""
        assert self._engine is not None
        if self._engine.state.name == "env":
            return "; start an agent, then try again"
        queue = self._engine.state.describe_queue()
        return f"{queue and f': {queue}'}; wait longer with %distributed heal --timeout SECONDS"

    def _has_ended(self, host: int) -> bool:
        assert self._engine is not None
        return host in self._engine.state.ended

    def _describe_ended(self, host: int) -> str:
        assert self._engine is not None
        return self._engine.state.describe_end(host)

    def _perform(self, action: Action) -> None:
        """Perform an action of the engine's monitor, on its thread."""
        if self.stopped or self._hosts is None:
            return
        match action:
            case Show(text):
                self._show(text)
            case LoseHost(host, reason):
                self._hosts.lose_node(host, reason)
                if self._driver is not None:
                    self._driver.after(0.0, lambda: None)  # wakes the driver, which finds the reports of the exits
            case SaveAndStop(seconds):
                threading.Thread(target=self._save_and_stop, args=(seconds,), name="rankbook-save", daemon=True).start()

    def _save_and_stop(self, seconds: float) -> None:
        """Interrupt the cells and stop the ranks, so that they save before their hosts end in `seconds`."""
        if (driver := self._driver) is None:
            return
        deadline = time.monotonic() + seconds
        self._show(f"the hosts end in {seconds:.0f} s: cells are interrupted, and the ranks stop when they have saved")
        # Half of the time for what a cell does after KeyboardInterrupt, half for savings in the background.
        with driver.changed:
            for cell in driver.active_cells():
                driver.post(ev.InterruptCell(cell.cell))
            while any(rank.state is RankState.BUSY for rank in self.state.ranks.values()):
                if (remaining := deadline - seconds / 2 - time.monotonic()) <= 0:
                    break
                driver.changed.wait(min(remaining, 0.2))
        self.ended_because = "the time of their hosts has ended"
        self.stop(patience=max(1.0, deadline - time.monotonic() - _SAVE_MARGIN / 2))

    def _show(self, text: str) -> None:
        """Show a line in the cells that run, or keep it for the next one. Any thread."""
        if (driver := self._driver) is None:
            self._notes.append(text)
            return

        def note() -> None:
            # A cell whose task another thread is sending has started when that thread releases the lock.
            with driver.changed:
                pass
            self._note(text)

        driver.after(0.0, note)

    def _show_notes(self) -> None:
        """Print what was kept for the next cell: this one starts ranks."""
        for text in self.take_notes():
            _report(text)

    def _environment_on(self, hosts: Hosts, seat: RankSeat, variables: dict[str, str]) -> dict[str, str]:
        if seat.host != HOME:  # the agent completes it
            return {**inherited_variables(os.environ, self._host_options.env), **variables}
        interface = interface_addresses().get(hosts.hub.address, "")
        return rank_environment(os.environ, variables, threads=seat.threads, interface=interface)

    def _note(self, text: str) -> None:
        """Show a line about a host in the cells that run, or keep it for the next one. Driver thread."""
        cells = [] if self._driver is None else self._driver.active_cells()
        running = [cell for cell in cells if cell.started is not None]
        for cell in running:
            cell.note(f"{text}\n")
        if not running:
            self._notes.append(text)

    @property
    def _address(self) -> str:
        """Return the socket path at which a new owner claims a detached cluster."""
        return str(self._folders.sockets / "owner")

    def _wait_kept(self, driver: Driver, *, timeout: float) -> None:
        """Wait until the forkserver listens at `_address`: from then on the ranks survive this process."""
        # The path appears when the forkserver binds the socket, before which a crash of the notebook would still end
        # the ranks.
        deadline = time.monotonic() + timeout
        with driver.changed:
            while not Path(self._address).exists():
                if time.monotonic() > deadline or not self._launcher.alive:
                    raise StartError(
                        f"the forkserver cannot keep the ranks: it did not create {self._address};"
                        " check the free space in that folder"
                    )
                driver.changed.wait(0.005)

    def note_restored(self, ranks: tuple[int, ...], donor: int) -> None:
        """Note that `ranks` have the variables of `donor`."""
        self.driver.post(ev.StateRestored(ranks, donor))
        self._record()

    def _record(self) -> None:
        """Write the registry record of a kept cluster. Any thread."""
        # The start time identifies the forkserver: its PID may be given to another process later.
        start_time = process_start_time(self._launcher.pid)
        if self.keep is None or self._hub is None or self._driver is None or start_time is None:
            return
        with self._record_lock:
            rank_processes, ranks, devices = self._driver.rank_processes, self.state.ranks, self.assignment.devices
            record = ClusterRecord(
                key=self.key,
                token=self._token,
                seconds=self.keep,
                notebook=os.getpid(),
                forkserver=self._launcher.pid,
                started=start_time,
                address=self._address,
                uplink=self._hub.uplink,
                sockets=str(self._folders.sockets),
                segments=str(self._folders.segments),
                logs=str(self._folders.logs),
                master_port=self._port,
                backend=self.assignment.backend,
                threads=self.assignment.threads,
                device=self.device,
                cuda_devices=self._cuda_devices,
                session=session_id(),
                created=self._created,
                notebook_started=process_start_time(os.getpid()) or 0.0,
                interrupted=self._interrupted,
                ranks=tuple(
                    DetachedRank(
                        rank, entry.incarnation, rank_processes[rank].pid, devices[rank], entry.since, entry.empty
                    )
                    for rank, entry in ranks.items()
                ),
            )
            write_record(record)

    def _record_filled(self) -> None:
        """Write the record again because a rank is not empty any more. Driver thread."""
        try:
            self._record()
        except StartError as error:  # the former record stays, in which the rank is empty
            self._note(str(error))

    # End

    def detach(self) -> None:
        """Detach from a kept cluster, whose ranks continue for `keep` seconds. It counts as stopped here."""
        # The order of the steps: first the flag, so that other threads get `ClusterStopped` and not errors of closed
        # sockets; then the driver thread, which uses launcher and hub; then these two. `stop` does the same.
        with self._stop_lock, deferred_interrupts():
            if self._stopped.is_set():
                return
            self._stopped.set()
            self._interrupted = describe_interrupt()
            if self._interrupted:
                with contextlib.suppress(StartError):  # the ranks stay even if the record cannot be written
                    self._record()
            if self._driver is not None:
                self._driver.close()
            # The forkserver sees the end of the connection, and from then on waits for another owner.
            assert isinstance(self._launcher, local.LocalLauncher)  # ranks on other hosts are not kept
            self._launcher.disconnect()
            if self._hub is not None:
                self._hub.close()

    def stop(self, *, patience: float | None = None) -> dict[int, str]:
        """Stop all ranks and remove their files except the logs. A second call does nothing.

        Background saves of idle ranks may take `patience` seconds, by default the grace period `save`. Returns how the
        ranks have exited that have not saved everything.
        """
        with self._stop_lock, deferred_interrupts():
            if self._stopped.is_set():
                return {}
            self._stopped.set()
            # The keys first: a kernel that takes too long to exit is killed.
            if self._connection_file is not None:
                self._connection_file.unlink(missing_ok=True)
            if self._driver is not None:
                if patience is not None:
                    self._driver.shutdown_manager.patience = patience
                # Idle ranks are asked to exit and may save; busy ones are killed. `_wait_stopped` gives the former
                # their time.
                self._driver.failed_exits.clear()  # of ranks that were restarted
                self._driver.post(ev.Stop())
                self._wait_stopped(self._driver, timeout=_STOP_TIMEOUT)
                self._driver.close()
            # The forkserver kills what is left and removes the folders, see `forkserver._close`. `remove` below also
            # covers a forkserver that has crashed.
            self._launcher.close()
            # Behind the launcher, which tells the agents to end: most of them end by themselves.
            if self._engine is not None and (problem := self._engine.stop()):
                _report(problem)
            if self._hub is not None:
                self._hub.close()
            self._folders.remove()
        return {} if self._driver is None else self._driver.failed_exits

    def _wait_stopped(self, driver: Driver, *, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        stopped_states = (RankState.ABSENT, RankState.DEAD)
        with driver.changed:
            while any(rank.state not in stopped_states for rank in self.state.ranks.values()):
                if (
                    # A rank that saves has extended its deadline. One second more for the forkserver to report its end.
                    time.monotonic() > max(deadline, driver.shutdown_manager.deadline + 1.0)
                    or driver.failure is not None
                    or not self._launcher.alive
                ):
                    return
                driver.changed.wait(0.05)


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _encode_paths(entries: Iterable[object]) -> Iterator[bytes]:
    """Yield those of the entries of `sys.path` that are paths. User code may insert others; Python ignores them too."""
    for entry in entries:
        with contextlib.suppress(UnicodeEncodeError):
            if isinstance(entry, str):
                yield os.fsencode(entry)


# Weak references: a cluster that was stopped and dropped must not be kept alive until the exit.
_clusters: weakref.WeakSet[ClusterProcesses] = weakref.WeakSet()


def register_for_exit(processes: ClusterProcesses) -> None:
    """Stop `processes` when this process exits, or detach from it if it is kept."""
    _clusters.add(processes)


def stop_all_clusters() -> str:
    """Stop the clusters of this process that are not kept, with the grace periods of `ClusterProcesses.stop`.

    For a front end that lets this process end, and has more time than the exit functions. Returns how the ranks have
    exited that have not saved everything, such as "ranks 0-3 exited with code 1", or "".
    """
    exits = [processes.stop() for processes in tuple(_clusters) if processes.keep is None]
    failed = group_ranks(pair for of_cluster in exits for pair in of_cluster.items())
    return "; ".join(f"{name_ranks(ranks)} {reason}" for reason, ranks in failed.items())


def _stop_all() -> None:
    for processes in tuple(_clusters):
        if processes.keep is None:
            processes.stop(patience=processes.grace.last_save)
        else:
            processes.detach()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):  # not on Windows; see launch/local.py
    os.register_at_fork(after_in_child=_clusters.clear)  # a forked child must not stop its parent's ranks
