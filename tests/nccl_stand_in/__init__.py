"""A stand-in for NCCL and CUDA in tests on the CPU: a device that executes later, and a torch backend "stand_in" on it.

`device.py`   The device: a queue and the thread that executes it. Tests hold, slow and poison it, and let queries hang.
`tensors.py`  Lets tensor operations of a thread execute on the device, in order with the collectives.
`group.py`    The process group, registered as the backend "stand_in" by the import of this package.

What behaves as with NCCL
    A synchronous collective returns no work and goes on. `Work.wait()` orders and returns at once. Only a
    `synchronize`, `.item()`, `.cpu()`, `.tolist()` and the like wait, in one call that no exception interrupts.
    An aborted collective ends with partial data (the first half of its outputs is `group.PARTIAL`) and raises nothing;
    what is queued behind it is executed with this data. A communicator is built by the first collective, on the
    calling thread, where neither an abort nor an interrupt reaches it; `eager_connect_single_device` builds it earlier.
    A send before a recv on both ranks hangs if the message is larger than `group.BUFFER_BYTES` and not coalesced.
    Collectives that do not match hang. An error on the device is sticky: everything afterwards raises it.
    A watchdog finds what takes longer than the group's timeout, and lost connections: `get_error` says so, works count
    as completed with a result that is no success, while the device goes on, and much later the communicator is aborted.
    What is recorded in a graph is executed by its replays, and a query of another thread makes the recording invalid.

What differs
    There is one queue and no streams: compute that follows an asynchronous collective is executed after it, even before
    `wait()`. The data travels through the group's store, so that an abort leaves nothing behind in C++. Tensors whose
    memory is freed by `storage.resize_(0)` keep it. Operations with random numbers, those whose result has a shape that
    depends on data, and functional collectives wait for the queue before they begin.
"""

from tests.nccl_stand_in.device import Device, DeviceError, current_device
from tests.nccl_stand_in.group import BACKEND, BUFFER_BYTES, PARTIAL, StandInGroup, StandInWork
from tests.nccl_stand_in.tensors import on_device

__all__ = [
    "BACKEND",
    "BUFFER_BYTES",
    "PARTIAL",
    "Device",
    "DeviceError",
    "StandInGroup",
    "StandInWork",
    "current_device",
    "on_device",
]
