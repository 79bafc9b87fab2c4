"""Connection file of a cluster: where its agents connect to, and with which keys.

The file has mode 0600, in a folder of mode 0700, and is removed when the cluster stops, by the forkserver if the
notebook's process is killed. Its content must not appear anywhere else: not as an argument of a process, nor in an
environment that the ranks inherit.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import platformdirs
import psutil

from rankbook.errors import InvalidArgument, StartError
from rankbook.transport.agent_link import LinkKeys, SecretKey, make_agent_keys, source_address
from rankbook.transport.shared_memory import ensure_private_folder

CONNECT = "RANKBOOK_CONNECT"
"""Environment variable that may hold the text of the connection file."""


@dataclass(frozen=True)
class Connection:
    """Content of a connection file. `lost_after`: the seconds after which an agent gives the coordinator up.

    `has_own_key`: the text had no key, and this agent has made one, which the coordinator has to allow.
    """

    cluster: str
    address: str
    port: int
    lost_after: float
    keys: LinkKeys = field(repr=False)
    has_own_key: bool = False

    def encode(self, *, with_key: bool = True) -> str:
        """Return the text of the file, or with `with_key=False` one with which an agent makes its own key."""
        content = {
            "cluster": self.cluster,
            "address": self.address,
            "port": self.port,
            "lost_after": self.lost_after,
            "server_public": self.keys.server_public.decode(),
        }
        if with_key:
            content["client_public"] = self.keys.client_public.decode()
            content["client_secret"] = self.keys.client_secret.decode()
        return msgspec.json.encode(content).decode() + "\n"


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    cluster: str
    address: str
    port: int
    lost_after: float
    server_public: str
    client_public: str = ""
    client_secret: str = ""


def decode_connection(text: str, source: str) -> Connection:
    """Return the connection that `text` describes. Raises `InvalidArgument`, which names the `source`."""
    try:
        content = msgspec.json.decode(text, type=_Content)
    # The error's text may quote the content, so it is left out.
    except (msgspec.MsgspecError, ValueError):
        raise InvalidArgument(f"{source} is not a connection file of this version of Rankbook") from None
    server_public = content.server_public.encode()
    if content.client_secret:
        keys = LinkKeys(server_public, content.client_public.encode(), SecretKey(content.client_secret.encode()))
    else:
        keys = make_agent_keys(server_public)
    has_own_key = not content.client_secret
    return Connection(content.cluster, content.address, content.port, content.lost_after, keys, has_own_key)


def connection_path(cluster: str) -> Path:
    """Return the path of the connection file of a cluster."""
    given = os.environ.get("RANKBOOK_CONNECT_DIR")
    folder = Path(given).expanduser().absolute() if given else platformdirs.user_data_path("rankbook") / "connections"
    return folder / f"{socket.gethostname()}-{cluster}.json"


def write_connection(connection: Connection) -> Path:
    """Write the connection file and return its path. Raises `StartError`."""
    path = connection_path(connection.cluster)
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        ensure_private_folder(path.parent)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as stream:
            stream.write(connection.encode())
    except OSError as error:
        raise StartError(
            f"cannot write the connection file in {path.parent}: {error.strerror or error};"
            " set RANKBOOK_CONNECT_DIR to a folder that all hosts see"
        ) from error
    return path


def choose_address(wanted: str | None) -> str:
    """Return the address of this host to listen at: `wanted`, or that of the default route.

    Raises `StartError` if there is no address that other hosts can reach, with a list of the interfaces.
    """
    addresses = interface_addresses()
    if wanted is not None:
        if wanted in addresses:
            return wanted
        raise InvalidArgument(
            f"invalid address {wanted!r}: expected one of this host's addresses ({_listed(addresses)})"
        )
    route = _default_route()
    usable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if route is not None and route in usable:
        return route
    if len(usable) == 1:
        return usable[0]
    if usable:
        raise StartError(f"this host has several addresses: choose one with --address ({_listed(addresses)})")
    raise StartError(
        f"this host has no address that other hosts can reach ({_listed(addresses)});"
        " ranks on other hosts need a network that connects them to this host"
    )


def interface_addresses() -> Mapping[str, str]:
    """Return the IPv4 addresses of this host with the names of their interfaces, of those that are up."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and name.partition(":")[0] in up  # eth0:1 is a label of eth0
    }


def _default_route() -> str | None:
    try:
        return source_address("192.0.2.1", 9)  # an address for documentation, RFC 5737
    except StartError:
        return None


def _listed(addresses: Mapping[str, str]) -> str:
    listed = ", ".join(f"{name} {address}" for address, name in addresses.items())
    return listed or "no interface with an IPv4 address is up, and IPv6 alone is not supported"
