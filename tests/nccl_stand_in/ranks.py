"""Let Rankbook's ranks use the stand-in: `running_kernel(env=environment())`, and `--backend stand_in` at the start.

torch imports what stands in the entry points "torch.backends", as it does for devices of other makers. The folder
`autoload` has such an entry point, and only processes with it on PYTHONPATH see it. `install` makes `GroupManager`
treat the stand-in as it treats NCCL. The main thread of a rank executes its tensor operations on the device; a cell
controls it as `tests.nccl_stand_in.current_device()`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.nccl_stand_in.device import current_device
from tests.nccl_stand_in.group import BACKEND, StandInGroup
from tests.nccl_stand_in.tensors import on_device

_FOLDER = Path(__file__).parent


def environment() -> dict[str, str]:
    """Return the variables with which the ranks of a kernel have the backend "stand_in"."""
    folders = [str(_FOLDER / "autoload"), str(_FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}


class StandInAccelerator:
    """The stand-in device of this process, as Rankbook asks it (`device_calls.DeviceInterface`)."""

    type = "cpu"

    def __init__(self, _device: torch.device | None = None) -> None:
        self._device = current_device()

    def bind_thread(self) -> None:
        """Let this thread ask for events while another one records a graph. There is one device per process."""
        self._device.relax_thread()

    def record(self) -> Any:
        """Return the query of an event behind everything that is queued now. Raises the sticky error."""
        self._device.raise_error()
        return self._device.record().query

    def is_capturing(self) -> bool:
        """Return True while what this thread submits is recorded in a graph."""
        return self._device.is_capturing


_entered: list[Any] = []


def install() -> None:
    """Make `GroupManager` take the stand-in for NCCL. Called by torch at the end of its import."""
    from rankbook.rank.process_groups import manager
    from rankbook.rank.process_groups.gloo import make_unconnected

    create, register = manager.GroupManager._create_inner_group, manager.RecoverableProcessGroup._register_backend
    initialize = manager.GroupManager.__init__

    def create_inner_group(self: Any, store: Any, name: str, ranks: tuple[int, ...], member: Any) -> Any:
        if set(member.backends.values()) != {BACKEND}:
            return create(self, store, name, ranks, member)
        return StandInGroup(store, member.rank, len(ranks), self._timeout_of(member))

    def register_backend(self: Any, device: Any, kind: Any, backend: Any) -> None:
        # torch's C++ part takes no group for a backend; it is asked nothing here.
        register(self, device, kind, make_unconnected() if isinstance(backend, StandInGroup) else backend)

    def initialize_and_enter(self: Any, *, backend: str, **options: Any) -> None:
        initialize(self, backend=backend, **options)
        if backend == BACKEND:
            _entered.append(on_device())  # for good: a rank creates its manager on the thread that executes cells
            _entered[-1].__enter__()

    manager._MANAGED.add(BACKEND)
    manager._ACCELERATORS[BACKEND] = StandInAccelerator
    manager.GroupManager._create_inner_group = create_inner_group
    manager.GroupManager.__init__ = initialize_and_enter
    manager.RecoverableProcessGroup._register_backend = register_backend
