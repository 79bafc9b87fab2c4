"""Processes and resources of one cluster: folders, sockets, launcher and driver, from start to stop.

`ClusterProcesses` acquires the forkserver, makes the folders and the hub link, starts the driver thread and launches
the ranks; `stop` undoes all of it. A kept cluster (`keep`) survives this process: its forkserver listens at a socket
where a new owner can claim it, and a record on disk describes it. At interpreter exit, clusters are stopped, or
detached if they are kept.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import secrets
import sys
import threading
import time
import weakref
from pathlib import Path

from rankbook.coordinator import events as ev
from rankbook.coordinator.deferred_interrupts import deferred_interrupts, describe_interrupt
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.liveness import describe_unresponsive
from rankbook.coordinator.recovered_state import ReattachedDriver
from rankbook.coordinator.state_machine import ClusterState
from rankbook.coordinator.states import RankState
from rankbook.errors import ClusterStopped, RankbookError, StartError
from rankbook.launch import local
from rankbook.launch.environment import DeviceAssignment, abort_grace, assign_devices, rank_environment, usable_cores
from rankbook.launch.paths import ClusterPaths, make_folders
from rankbook.launch.registry import ClusterRecord, DetachedRank, process_start_time, session_id, write_record
from rankbook.protocol.forkserver import ForkRank
from rankbook.ranks import name_ranks
from rankbook.transport.shared_memory import SegmentStore
from rankbook.transport.zmq_link import ZmqHub

_STOP_TIMEOUT = 5.0
_ANSWER_TIMEOUT = 1.0
_numbers = itertools.count(1)


class ClusterProcesses:
    """Start `n` ranks (see `launch.environment.assign_devices`) and wait until they form one process group.

    `keep`: the seconds that the ranks survive this process, for another one to attach to them (reattach.py). Raises
    `StartError`, `BadRequest`; then all processes and files have been removed.
    """

    placement: DeviceAssignment
    state: ClusterState
    segments: SegmentStore
    _launcher: local.LocalLauncher
    _folders: ClusterPaths
    _port: int
    grace = GracePeriods()
    _driver: Driver | None
    _hub: ZmqHub | None

    def __init__(
        self,
        n: int | None,
        *,
        backend: str | None,
        timeout: float,
        keep: float | None = None,
        grace: GracePeriods | None = None,
    ) -> None:
        self.grace = grace or GracePeriods(raised=abort_grace())
        self._name(f"{os.getpid()}-{next(_numbers)}", keep, secrets.token_hex(32) if keep is not None else "")
        with deferred_interrupts() as interrupts:
            if n is not None:
                assign_devices(n, 0, backend=None, cores=usable_cores())  # reject invalid values early
            self._launcher = local.acquire_forkserver()
            try:
                self._folders = make_folders(None if keep is None else self._launcher.pid)
            except BaseException:
                self._launcher.close()
                raise
            register_for_exit(self)
            try:
                self._hub = ZmqHub(self._folders.sockets)
                opened = self._launcher.open(
                    (self._folders.sockets, self._folders.segments), timeout=timeout, interrupted=interrupts.take
                )
                self._port = opened.master_port
                self.placement = assign_devices(n, opened.devices, backend=backend, cores=usable_cores())
                self.state = ClusterState(len(self.placement.devices), grace=self.grace)
                self.segments = SegmentStore(self._folders.segments)
                make_driver = Driver if keep is None else ReattachedDriver
                self._driver = make_driver(self.state, self._hub, self._launcher, self._request)
                self._driver.start()
                self.launch(tuple(self.state.ranks), timeout=timeout)
                if keep is not None:
                    self._launcher.keep(self._address, token=self._token, seconds=keep)
                    self._wait_kept(self._driver, timeout=timeout)
            except BaseException:
                self.stop()
                raise

    def _name(self, key: str, keep: float | None, token: str) -> None:
        self.key = key
        self.keep = keep
        self._token = token
        self._created = time.time()
        self._stopped = threading.Event()
        self._stop_lock = threading.Lock()
        self._driver, self._hub = None, None

    @property
    def stopped(self) -> bool:
        """Return True if `stop` was called."""
        return self._stopped.is_set()

    @property
    def driver(self) -> Driver:
        """Return the driver. Raises `ClusterStopped`, and `RankbookError` if the driver itself has failed."""
        if self.stopped or self._driver is None:
            raise ClusterStopped("these ranks were stopped; rankbook.start() or %distributed start makes new ones")
        if self._driver.failure is not None:
            raise RankbookError(f"the coordinator failed ({self._driver.failure}); stop and start again")
        return self._driver

    def launch(self, ranks: tuple[int, ...], *, timeout: float) -> None:
        """Start new processes for `ranks`; wait until they are ready and the process group is formed.

        Raises `StartError`, and KeyboardInterrupt if SIGINT arrives meanwhile.
        """
        driver = self.driver
        if not self._launcher.alive:
            raise StartError("the forkserver has ended; %distributed stop, then start, makes a new one")
        try:
            Path.cwd()
        except OSError as error:
            raise StartError("the notebook's current folder is gone; os.chdir() to one that is there") from error
        driver.start_errors.clear()
        with deferred_interrupts() as interrupts:
            driver.post(ev.LaunchRanks(ranks))
            deadline = time.monotonic() + timeout
            with driver.changed:
                while not self._launched(driver, ranks):
                    if interrupts.take():
                        raise KeyboardInterrupt
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise StartError(
                            f"{name_ranks(ranks)} not ready within {timeout:.0f} s: {self._states(driver)}"
                        )
                    driver.changed.wait(min(remaining, 0.05))
        errors = driver.start_errors
        dead = [rank for rank in self._dead(tuple(self.state.ranks)) if rank in errors or rank in ranks]
        failures = [errors.get(rank, f"rank {rank} {self.state.ranks[rank].loss}") for rank in dead]
        if failures or errors:  # errors of live ranks are consequences of the deaths
            raise StartError("\n".join(failures or dict.fromkeys(errors.values())))
        self._record()

    def discard(self, ranks: tuple[int, ...], words: str) -> None:
        """Kill those of `ranks` that live, and treat them as dead at once. `words` say why."""
        driver = self.driver
        with driver.changed:
            for rank in (self.state.ranks[number] for number in ranks):
                if rank.state in (RankState.STARTING, RankState.IDLE, RankState.BUSY):
                    self._launcher.kill(rank.rank, rank.incarnation)
                    driver.post(ev.RankGone(rank.rank, rank.incarnation, words))

    def wait_exits(self, *, timeout: float = _ANSWER_TIMEOUT) -> None:
        """Wait until the state machine knows of every rank that has exited by now.

        The forkserver reports an exit some milliseconds later.
        """
        driver = self.driver
        deadline = time.monotonic() + timeout
        ended = driver.presence.wait_ended(driver.answering(), timeout=timeout)
        with driver.changed:
            while not ended.isdisjoint(driver.answering()) and time.monotonic() < deadline + _ANSWER_TIMEOUT:
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
        silent = driver.presence.wait_silent(driver.answering(), timeout=_ANSWER_TIMEOUT)
        states = {rank: entry.state.name.lower() for rank, entry in self.state.ranks.items()}
        states |= {rank: describe_unresponsive(silence) for rank, silence in silent.items()}
        return "; ".join(f"rank {rank} is {state}" for rank, state in states.items())

    def _request(self, rank: int, incarnation: int, downlink: str) -> ForkRank:
        assert self._hub is not None
        world_size, threads = len(self.placement.devices), self.placement.threads
        environment = rank_environment(os.environ, rank=rank, world_size=world_size, port=self._port, threads=threads)
        return ForkRank(
            rank=rank,
            incarnation=incarnation,
            world_size=world_size,
            backend=self.placement.backend,
            device=self.placement.devices[rank],
            threads=threads,
            env={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            cwd=str(Path.cwd()),
            path=tuple(filter(_is_text, sys.path)),  # user code may insert other objects, which Python ignores too
            uplink=self._hub.uplink,
            downlink=downlink,
            segments=str(self._folders.segments),
            logs=str(self._folders.logs),
            cluster=self.key,
            keep=self._token,
            widgets="ipykernel.kernelapp" in sys.modules,  # imported in the process of every kernel
        )

    @property
    def _address(self) -> str:
        """Return the socket path at which a new owner claims a detached cluster."""
        return str(self._folders.sockets / "owner")

    def _wait_kept(self, driver: Driver, *, timeout: float) -> None:
        """Wait until the forkserver listens at `_address`: from then on the ranks survive this process."""
        deadline = time.monotonic() + timeout
        with driver.changed:
            while not Path(self._address).exists():
                if time.monotonic() > deadline or not self._launcher.alive:
                    raise StartError("the forkserver cannot keep these ranks; is there room in their folder?")
                driver.changed.wait(0.005)

    def _record(self, *, interrupted: str = "") -> None:
        """Write the registry record of a kept cluster, with a note for its next owner."""
        began = process_start_time(self._launcher.pid)
        if self.keep is None or self._hub is None or self._driver is None or began is None:
            return
        infos, ranks, devices = self._driver.infos, self.state.ranks, self.placement.devices
        record = ClusterRecord(
            key=self.key,
            token=self._token,
            seconds=self.keep,
            notebook=os.getpid(),
            forkserver=self._launcher.pid,
            started=began,
            address=self._address,
            uplink=self._hub.uplink,
            sockets=str(self._folders.sockets),
            segments=str(self._folders.segments),
            logs=str(self._folders.logs),
            master_port=self._port,
            backend=self.placement.backend,
            threads=self.placement.threads,
            session=session_id(),
            created=self._created,
            notebook_started=process_start_time(os.getpid()) or 0.0,
            interrupted=interrupted,
            ranks=tuple(DetachedRank(rank, ranks[rank].incarnation, infos[rank].pid, devices[rank]) for rank in ranks),
        )
        write_record(record)

    def leave(self) -> None:
        """Detach from a kept cluster, whose ranks continue for `keep` seconds. It counts as stopped here."""
        with self._stop_lock, deferred_interrupts():
            if self._stopped.is_set():
                return
            self._stopped.set()
            if message := describe_interrupt():
                with contextlib.suppress(StartError):  # the ranks stay even if the record cannot be written
                    self._record(interrupted=message)
            if self._driver is not None:
                self._driver.close()
            self._launcher.leave()
            if self._hub is not None:
                self._hub.close()

    def stop(self, *, patience: float | None = None) -> None:
        """Stop all ranks and remove their files except the logs. A second call does nothing.

        Background saves of idle ranks may take `patience` seconds, by default the grace period `save`.
        """
        with self._stop_lock, deferred_interrupts():
            if self._stopped.is_set():
                return
            self._stopped.set()
            if self._driver is not None:
                if patience is not None:
                    self._driver.farewells.patience = patience
                self._driver.post(ev.Stop())
                self._wait_gone(self._driver, timeout=_STOP_TIMEOUT)
                self._driver.close()
            self._launcher.close()
            if self._hub is not None:
                self._hub.close()
            self._folders.remove()

    def _wait_gone(self, driver: Driver, *, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        gone = (RankState.ABSENT, RankState.DEAD)
        with driver.changed:
            while any(rank.state not in gone for rank in self.state.ranks.values()):
                if (
                    time.monotonic() > max(deadline, driver.farewells.deadline + 1.0)
                    or driver.failure is not None
                    or not self._launcher.alive
                ):
                    return
                driver.changed.wait(0.05)


def _is_text(entry: object) -> bool:
    return isinstance(entry, str)


_all: weakref.WeakSet[ClusterProcesses] = weakref.WeakSet()


def register_for_exit(crew: ClusterProcesses) -> None:
    """Stop `crew` when this process exits, or detach from it if it is kept."""
    _all.add(crew)


def _stop_all() -> None:
    for crew in tuple(_all):
        if crew.keep is None:
            crew.stop(patience=crew.grace.last_save)
        else:
            crew.leave()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):  # not on Windows; see launch/local.py
    os.register_at_fork(after_in_child=_all.clear)  # a forked child must not stop its parent's ranks
