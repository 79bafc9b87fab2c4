"""A cable between a host of `namespaces` and the switch that delays packets and loses some, for kernels without netem.

It runs in the switch's namespace: `cable.py PORT HOST INTERFACE DELAY LOSS`, with the delay in seconds and the loss as
a fraction. Frames go through two TAP devices, one of which is moved to the host. Only the direction to the host is
impaired, as by a queueing discipline of the switch's port.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST_FRAME = 1 << 16


def serve(port: str, host: str, interface: str, delay: float, loss: float) -> None:
    """Forward frames until the process is killed. Prints a line once the devices exist."""
    switch_end, host_end = _tap(port), _tap("cable")
    subprocess.run(["ip", "link", "set", "cable", "netns", host, "name", interface], check=True)
    print("ready", flush=True)
    chance = random.Random(5)
    waiting: deque[tuple[float, bytes]] = deque()  # in the order of the times, because the delay is constant
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([switch_end, host_end], [], [], timeout)
        if host_end in readable:
            _write(switch_end, os.read(host_end, _LARGEST_FRAME))
        if switch_end in readable:
            frame = os.read(switch_end, _LARGEST_FRAME)
            if chance.random() >= loss:
                waiting.append((time.monotonic() + delay, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _write(host_end, waiting.popleft()[1])


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def _write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:
        return  # the interface is not up yet: the frame is lost, as on an unplugged cable


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
