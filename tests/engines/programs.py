"""Servers of the engines' tests: ssh and MPI over two namespaces, Slurm with two nodes, Ray with two nodes.

Each is a context with its own configuration, keys and ports in a temporary folder, on the loopback interface or in
namespaces of its own. It skips the test with the reason where the program is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.agent.namespaces import Network, three_hosts
from tests.conftest import wait_until


def need(*programs: str) -> list[str]:
    """Return the paths of programs, or skip the test."""
    paths = [shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for program in programs]
    missing = [program for program, path in zip(programs, paths, strict=True) if path is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return [path for path in paths if path is not None]


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def running(log: Path, *command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and end it with all that it has started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **(env or {})}
        )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            for child in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
        process.wait(10)


# ssh ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[tuple[Network, list[str]]]:
    """Make hosts with an ssh server each. Returns the engine's arguments too; run it on host `a`."""
    sshd, keygen, _ = need("sshd", "ssh-keygen", "ssh")
    folder.chmod(0o700)
    with three_hosts() as network, contextlib.ExitStack() as stack:  # an ssh server needs root too
        for name in ("host", "user"):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=30)
        Path("/run/sshd").mkdir(exist_ok=True)  # compiled into Debian's sshd
        _bring_up_loopback(network)
        for name in "bc":
            config, log = folder / f"sshd-{name}", folder / f"sshd-{name}.log"
            settings = {
                "Port": 2222,
                "ListenAddress": network.addresses[name],
                "HostKey": folder / "host",
                "AuthorizedKeysFile": folder / "user.pub",
                "PidFile": folder / f"pid-{name}",
                "StrictModes": "no",  # pytest's folders belong to others in part
                "UsePAM": "no",
                "PasswordAuthentication": "no",
                "MaxStartups": "100",
            }
            config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
            inside = ("ip", "netns", "exec", network.namespace(name))
            server = stack.enter_context(running(log, *inside, sshd, "-D", "-e", "-f", str(config)))

            def listens(server: subprocess.Popen[bytes] = server, log: Path = log) -> bool:
                assert server.poll() is None, log.read_text()
                return "Server listening on" in log.read_text()

            wait_until(listens, timeout=30, what="the ssh server listens")
        options = [
            *("-F", "/dev/null", "-p", "2222", "-i", str(folder / "user"), "-o", "IdentitiesOnly=yes"),
            *("-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}", "-o", "LogLevel=ERROR"),
        ]
        machines = ",".join(network.addresses[name] for name in "bc")
        yield network, ["--hosts", machines, "--folder", str(Path(__file__).parents[2]), "--", *options]


def _bring_up_loopback(network: Network) -> None:
    for name in network.addresses:
        command = ["ip", "-n", network.namespace(name), "link", "set", "lo", "up"]
        subprocess.run(command, check=True, capture_output=True, timeout=30)


# Slurm --------------------------------------------------------------------------------------------------------------

_SLURM = """
ClusterName=rankbook
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
SlurmctldTimeout=10
SlurmdTimeout=10
MailProg=/bin/true
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d-%n.log
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# More cores and GPUs than this machine has: nothing binds processes to them.
_SLURM_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Gres=gpu:2 State=UNKNOWN\n"


@contextlib.contextmanager
def slurm_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, nodes: int = 2
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run Slurm with the nodes `node1`, `node2` and so on on this machine, for the commands of this process.

    Returns the daemons of the nodes.
    """
    munged, slurmctld, slurmd, _, sinfo = need("munged", "slurmctld", "slurmd", "srun", "sinfo")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    host = socket.gethostname().split(".")[0]
    names = [f"node{number}" for number in range(1, nodes + 1)]
    ports = [free_port() for _ in range(nodes + 1)]
    config = folder / "slurm.conf"
    lines = [_SLURM_NODE.format(name=name, host=host, port=port) for name, port in zip(names, ports[1:], strict=True)]
    head, partition = _SLURM.format(folder=folder, host=host, ports=ports).split("PartitionName")
    config.write_text(f"{head}{''.join(lines)}PartitionName{partition}")
    (folder / "state").mkdir()
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text("".join(f"NodeName={name} Name=gpu File={folder}/gpu[0-1]\n" for name in names))
    user = pwd.getpwnam("munge")
    (folder / "munge").mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for path in (folder / "munge", key):
        os.chown(path, user.pw_uid, user.pw_gid)
    os.chown(folder, user.pw_uid, user.pw_gid)
    folder.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", str(config))
    for name in [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]:
        monkeypatch.delenv(name)
    base = folder / "munge"
    authentication = [
        *("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"),
        *(munged, "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
        *(f"--pid-file={base}/pid", f"--log-file={base}/log", f"--seed-file={base}/seed"),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(folder / "munged.out", *authentication))
        wait_until((folder / "munge.socket").exists, timeout=30, what="munged listens")
        stack.enter_context(running(folder / "ctld.out", slurmctld, "-D"))
        daemons = {
            name: stack.enter_context(running(folder / f"{name}.out", slurmd, "-D", "-N", name)) for name in names
        }

        def idle() -> bool:
            done = subprocess.run([sinfo, "-h", "-o", "%T %D"], capture_output=True, text=True, check=False, timeout=30)
            return done.stdout.strip() == f"idle {nodes}"

        wait_until(idle, timeout=60, what="all nodes are idle")
        yield daemons


# Open MPI -----------------------------------------------------------------------------------------------------------

_REMOTE_SHELL = """#!/bin/bash
# The remote shell of mpirun: an address is a namespace. Open MPI names its files after the host, and all namespaces
# have one host name: in one folder, the daemons of two nodes would remove each other's files.
while [[ $1 == -* ]]; do shift; done
case $1 in {cases} esac
shift
export OMPI_MCA_orte_tmpdir_base=$(dirname "$0")/$name
mkdir -p "$OMPI_MCA_orte_tmpdir_base"
exec ip netns exec "$name" bash -c "$*"
"""


@contextlib.contextmanager
def mpi_hosts(folder: Path) -> Iterator[tuple[Network, list[str]]]:
    """Make hosts between which mpirun can start processes. Returns its options too; run it on host `a`."""
    need("mpirun")
    with three_hosts() as network:
        _bring_up_loopback(network)
        shell = folder / "rsh"
        cases = " ".join(f"{address}) name={network.namespace(name)} ;;" for name, address in network.addresses.items())
        shell.write_text(_REMOTE_SHELL.format(cases=cases))
        shell.chmod(0o755)
        net = f"{network.addresses['a'].rpartition('.')[0]}.0/24"
        (folder / "hosts").write_text("".join(f"{network.addresses[name]} slots=1\n" for name in "bc"))
        yield (
            network,
            [
                *(
                    "--hostfile",
                    str(folder / "hosts"),
                    "--",
                    "--allow-run-as-root",
                    "--mca",
                    "plm_rsh_agent",
                    str(shell),
                ),
                *("--mca", "oob_tcp_if_include", net, "--mca", "btl_tcp_if_include", net),
            ],
        )


# Ray ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ray_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Run Ray with two nodes of two CPUs on this machine, for the drivers of this process and its children.

    Returns a function that sends a line to `ray_nodes.py`.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("not installed: ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = (sys.executable, str(Path(__file__).with_name("ray_nodes.py")))
    with contextlib.ExitStack() as stack:
        # Ray's own start fails or hangs now and then: a node waits 15 s for an agent of its own, and gives up.
        for attempt in range(3):
            log = stack.enter_context((folder / f"ray-{attempt}.log").open("w"))
            server = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            )
            # First of all: a server that does not react to the end of its input would be waited for without an end.
            stack.callback(_end, server)
            assert server.stdin is not None and server.stdout is not None
            limit = threading.Timer(100.0, server.terminate)
            limit.start()
            address = next((line.split()[1] for line in server.stdout if line.startswith("address ")), "")
            limit.cancel()
            if address:
                break
        else:
            raise AssertionError((folder / "ray-2.log").read_text())
        monkeypatch.setenv("RAY_ADDRESS", address)
        requests = server.stdin

        def send(line: str) -> None:
            requests.write(f"{line}\n")
            requests.flush()

        try:
            yield send
        finally:
            requests.close()
            server.wait(60)


def _end(server: subprocess.Popen[str]) -> None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(10)
    server.kill()
