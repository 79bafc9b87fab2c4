"""The crew of a kept cluster, in the notebook that has attached to it.

Owns: taking such a cluster over, and which of those that are kept is meant. Refuses: to start ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankbook.coordinator.cluster_processes import Crew, remember
from rankbook.coordinator.deferred_interrupts import held_interrupts
from rankbook.coordinator.reattach.handshake import Account, wait_reunited
from rankbook.coordinator.reattach.replay import Adoption, take_stock
from rankbook.coordinator.reattach.state import AdoptedState, KeptDriver
from rankbook.coordinator.running_cell import Cell, Sink
from rankbook.errors import BadRequest, NoCluster
from rankbook.launch.environment import Placement
from rankbook.launch.paths import Folders
from rankbook.launch.reattached import KeptLauncher
from rankbook.launch.registry import Found, Record, this_session
from rankbook.output.cell_result import CellResult
from rankbook.output.merger import Stream
from rankbook.protocol.messages import FromRank
from rankbook.transport.link import Sender
from rankbook.transport.shared_memory import SegmentStore
from rankbook.transport.zmq_link import ZmqHub

_REUNION_TIMEOUT = 10.0


def choose(found: Found, key: str | None) -> Record:
    """Return the cluster that is meant: `key`'s, else this notebook's, else the only one whose notebook is unknown.

    Raises `NoCluster`, and `BadRequest` where none is or several are.
    """
    told = "".join(f"\n{note}" for note in found.notes)
    if not found.records:
        raise NoCluster(f"no ranks are kept here; %distributed start --keep makes such{told}")
    if key is None:
        session = this_session()
        candidates = [record for record in found.records if session and record.session == session]
        candidates = [record for record in candidates if not record.owned] or candidates
        if not candidates:
            candidates = [record for record in found.records if not (session and record.session)]
        if len(candidates) == 1:
            return candidates[0]
        lines = "".join(f"\n{record.describe()}, from kernel {record.notebook}" for record in found.records)
        several = f"{len(found.records)} sets of ranks are kept" if len(found.records) > 1 else "ranks are kept"
        whose = "" if candidates else ", but not by this notebook"
        raise BadRequest(f"{several}{whose}; %distributed attach KEY takes one:{lines}{told}")
    for record in found.records:
        if record.key == key:
            return record
    keys = ", ".join(record.key for record in found.records)
    raise BadRequest(f"no ranks are kept as {key!r}; there are: {keys}{told}")


class AdoptedCrew(Crew):
    """Takes over what `record` says is there. What nobody has seen is shown in `sink`.

    Raises `BadRequest` while another notebook owns it, `StartError` when it does not answer; then it is kept as before.
    """

    missed: list[CellResult]

    def __init__(self, record: Record, *, sink: Sink | None) -> None:
        self._name(record.key, record.seconds, record.token)
        self._folders = Folders(Path(record.sockets), Path(record.segments), Path(record.logs))
        self._port = record.master_port
        self.placement = Placement(record.devices, record.backend, record.threads)
        self.segments = SegmentStore(self._folders.segments)
        with held_interrupts():
            launcher = self._launcher = KeptLauncher(record)
            try:
                self._hub = ZmqHub(self._folders.sockets)
                self._take_over(launcher, record, self._hub, sink)
            except BaseException:
                self.leave()
                raise
            self._created = record.created or self._created
            remember(self)
            if record.interrupted and sink is not None:
                sink.emit([Stream("stderr", f"{record.interrupted}, perhaps by its restart\n")])

    def _take_over(self, launcher: KeptLauncher, record: Record, hub: ZmqHub, sink: Sink | None) -> None:
        incarnations = {rank: told.incarnation for rank, told in launcher.forked.items()}
        pids = {rank: told.pid for rank, told in launcher.forked.items()}
        for rank, incarnation in incarnations.items():
            hub.open_downlink(rank, incarnation)
        accounts = wait_reunited(
            hub, pids, incarnations, token=record.token, since=launcher.lost, timeout=_REUNION_TIMEOUT
        )
        self.state = state = AdoptedState(take_stock(len(record.ranks), incarnations, launcher.exited, accounts))
        adoption = Adoption(accounts, cluster_key=record.key, sink=sink, exits=launcher.exited)
        self.missed = adoption.tell()
        self._discard_answers([*adoption.cells, *adoption.ended])
        if not any(account.here.running for account in accounts.values()):
            self.segments.clear()  # who was to read them is gone, or has them mapped
        self._driver = driver = KeptDriver(state, hub, launcher, self._request)
        for rank, info in driver.infos.items():
            info.pid = pids.get(rank)
        driver.resume(state, adoption.cells, adoption.ended, _later(accounts, incarnations))
        driver.start()
        self._record()

    def _discard_answers(self, cells: Sequence[Cell]) -> None:
        """What calls and pulls have returned, to a notebook that is gone."""
        for cell in cells:
            for payload, _ in cell.values.values():
                for buffer in payload.buffers:
                    if buffer.segment is not None:
                        self.segments.discard(buffer.segment)
            cell.values.clear()


def _later(
    accounts: Mapping[int, Account], incarnations: Mapping[int, int]
) -> Iterator[tuple[Sender, FromRank, list[memoryview]]]:
    for rank, account in accounts.items():
        for message, frames in account.later:
            yield Sender(rank, incarnations[rank]), message, frames
