"""Hosts of the tests: namespaces of this machine, with a network of their own between them.

A host has its own network, processes, shared memory (/dev/shm), host name and System V IPC. Three of them are connected
by a bridge in a namespace of its own, so that nothing of the machine's network is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

INTERFACE = "eth7"
# The first arguments are the host's name and the lines of /etc/hosts: torchrun looks up the name of its own host.
_SETUP = """
set -e
hostname "$0"
mount -t tmpfs tmpfs /dev/shm
printf '127.0.0.1 localhost\\n%s' "$1" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
ip link set lo up
shift
exec "$@"
"""


class Network:
    """Hosts `a`, `b` and `c` with the addresses 10.77.0.1 to 10.77.0.3."""

    def __init__(self, names: Sequence[str] = "abc") -> None:
        self._prefix = f"rankbook-{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self._cables: list[subprocess.Popen[str]] = []
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}

    def open(self) -> None:
        """Make the namespaces. Raises `subprocess.CalledProcessError` where that is not allowed."""
        _run("ip", "netns", "add", self._switch)
        self._in_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._in_switch("ip", "link", "set", "bridge", "up")
        for name in self.addresses:
            host = self._prefix + name
            _run("ip", "netns", "add", host)
            self._in_switch(
                *("ip", "link", "add", f"port-{name}", "type", "veth", "peer", "name", INTERFACE, "netns", host)
            )
            self._in_switch("ip", "link", "set", f"port-{name}", "master", "bridge", "up")
            self._connect(name)

    def close(self) -> None:
        """Remove the namespaces."""
        for cable in self._cables:
            cable.kill()
            cable.communicate()
        for name in [*self.addresses, "switch"]:
            subprocess.run(["ip", "netns", "delete", self._prefix + name], check=False, capture_output=True)

    def command(self, host: str, *command: str) -> list[str]:
        """Return the command that runs `command` on a host. All processes of it end with the first one."""
        names = "".join(f"{address} host-{name}\n" for name, address in self.addresses.items())
        return [
            *("ip", "netns", "exec", self._prefix + host),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--mount-proc"),
            *("bash", "-c", _SETUP, f"host-{host}", names, *command),
        ]

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return self._prefix + host

    def cut(self, host: str) -> None:
        """Unplug a host."""
        self._in_switch("ip", "link", "set", f"port-{host}", "down")

    def mend(self, host: str) -> None:
        """Plug a host in again."""
        self._in_switch("ip", "link", "set", f"port-{host}", "up")

    def impair(self, host: str, *, delay: float, loss: float) -> None:
        """Delay the packets to a host by `delay` seconds, and lose the fraction `loss`. Call it before processes start.

        Uses netem, or a process of its own (`cable.py`) where the kernel lacks that.
        """
        netem = ("root", "netem", "delay", f"{1e3 * delay:.0f}ms", "loss", f"{100 * loss:g}%")
        try:
            self._in_switch("tc", "qdisc", "add", "dev", f"port-{host}", *netem)
        except subprocess.CalledProcessError:
            self._impair_by_cable(host, delay, loss)

    def _impair_by_cable(self, host: str, delay: float, loss: float) -> None:
        port, namespace = f"port-{host}", self._prefix + host
        self._in_switch("ip", "link", "delete", port)  # and with it the host's end
        command = ["ip", "netns", "exec", self._switch, sys.executable, str(Path(__file__).with_name("cable.py"))]
        cable = subprocess.Popen(
            [*command, port, namespace, INTERFACE, str(delay), str(loss)], stdout=subprocess.PIPE, text=True
        )
        self._cables.append(cable)
        assert cable.stdout is not None
        if cable.stdout.readline() != "ready\n":
            pytest.skip("this machine has neither netem nor TAP devices")
        self._in_switch("ip", "link", "set", port, "master", "bridge", "up")
        self._connect(host)

    def _connect(self, host: str) -> None:
        namespace = self._prefix + host
        _run("ip", "-n", namespace, "address", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
        _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")

    def _in_switch(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._switch, *command)


@contextmanager
def three_hosts() -> Iterator[Network]:
    """Make three hosts, or skip the test with the reason why this machine cannot."""
    if missing := [tool for tool in ("ip", "unshare", "tc") if shutil.which(tool) is None]:
        pytest.skip(f"hosts need {', '.join(missing)} (iproute2, util-linux)")
    if os.geteuid() != 0:
        pytest.skip("hosts need root, to make network namespaces")
    network = Network()
    try:
        try:
            network.open()
            subprocess.run(network.command("a", "true"), check=True, capture_output=True, timeout=30)
        except (subprocess.SubprocessError, OSError) as error:
            output = getattr(error, "stderr", b"") or b""
            pytest.skip(f"this machine makes no namespaces: {error}; {output.decode(errors='replace').strip()}")
        yield network
    finally:
        network.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
