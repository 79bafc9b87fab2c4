"""Command `python -m rankbook.agent --connect FILE`: offer the slots of this host to a notebook."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from rankbook.agent.agent import Agent, AgentRefused, HostLost
from rankbook.engines.engine import OWN_KEY, read_identity
from rankbook.errors import InvalidArgument, RankbookError
from rankbook.launch.connection import CONNECT, Connection, decode_connection
from rankbook.launch.local import LocalLauncher
from rankbook.protocol import PROTOCOL_VERSION
from rankbook.protocol.forkserver import HostDescription, encode_description
from rankbook.transport.agent_link import AgentLink, source_address


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent and return the exit code: 0 after a stop, 1 after any other end, 2 for invalid arguments."""
    options = _parser().parse_args(arguments)
    try:
        return _serve(_read_connection(options.connect), options)
    except AgentRefused as error:
        _report(f"the notebook refused this host: {error}")
        return 1
    except InvalidArgument as error:
        _report(str(error))
        return 2
    except RankbookError as error:
        _report(str(error))
        return 1


def _serve(connection: Connection, options: argparse.Namespace) -> int:
    """Offer this host until the end, also after the notebook has given it up. Return the exit code."""
    # First of all: the forkserver imports torch, which takes longer than everything below.
    launcher = LocalLauncher()
    try:
        if connection.has_own_key and options.connect == "-":
            _wait_allowed(connection)
        while True:
            try:
                reason = _make_agent(connection, launcher, options).run()
            except HostLost as error:
                _report(f"{error}; starting again")
                launcher = LocalLauncher()
                continue
            _report(f"ends because {reason}")
            return 0 if reason == "the cluster was stopped" else 1
    finally:
        launcher.terminate()


def _report(text: str) -> None:
    sys.stderr.write(f"rankbook.agent: {text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rankbook.agent",
        description="Offer this host to a notebook that waits with `%%distributed start --launcher env`.".replace(
            "%%", "%"
        ),
    )
    parser.add_argument(
        "--connect",
        metavar="FILE",
        help=f"connection file that the notebook has written; - reads it from standard input, and the variable"
        f" {CONNECT} may hold its text",
    )
    parser.add_argument("--slots", type=_positive, metavar="N", help="ranks that this host takes (one per CUDA device)")
    parser.add_argument("--node", type=int, metavar="N", help="number of this node, from 0, for the order of the ranks")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _read_connection(name: str | None) -> Connection:
    # Removed at once: the ranks inherit this process's environment.
    text = os.environ.pop(CONNECT, "")
    if name is None:
        if not text:
            raise InvalidArgument("no connection file: use --connect FILE, or --connect - for standard input")
        return decode_connection(text, CONNECT)
    if name == "-":
        return decode_connection(sys.stdin.readline(), "standard input")
    try:
        return decode_connection(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"cannot read {name} ({getattr(error, 'strerror', None) or error}): the notebook writes it when it starts"
            " and removes it when it stops; use --connect - if the hosts do not share a folder"
        ) from error


def _wait_allowed(connection: Connection) -> None:
    """Say the public key, and wait for a line that says that the notebook allows it."""
    sys.stdout.write(f"{OWN_KEY}{connection.keys.client_public.decode()}\n")
    sys.stdout.flush()
    # If who has started this process ends, so does the input.
    if not sys.stdin.readline():
        raise InvalidArgument("the launcher has ended before the notebook knew the key of this agent")


def _make_agent(connection: Connection, launcher: LocalLauncher, options: argparse.Namespace) -> Agent:
    identity = read_identity(os.environ)
    # A launcher that has started several tasks on this node has started one agent per rank.
    is_task = options.slots is None and (identity.local_size or 1) > 1
    node = options.node if options.node is not None else identity.node
    # Without a number of its own, the node of a single task has that of the task.
    if node is None and not is_task:
        node = identity.rank
    address = source_address(connection.address, connection.port)
    description = HostDescription(
        name=os.environ.get("SLURMD_NODENAME") or platform.node(),
        rankbook=_version("rankbook"),
        protocol=str(PROTOCOL_VERSION),
        torch=_version("torch"),
        python=".".join(platform.python_version_tuple()[:2]),
        pid=str(os.getpid()),
        address=address,
        node="" if node is None else str(node),
        rank=str(identity.rank) if is_task else "",
        local_rank=str(identity.local_rank) if is_task and identity.local_rank is not None else "",
    )
    link = AgentLink(
        connection.address, connection.port, connection.keys, secrets.token_hex(8), encode_description(description)
    )
    return Agent(connection, link, launcher, address=address, slots=1 if is_task else options.slots)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
