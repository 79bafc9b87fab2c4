"""Rank and world size from the environment variables of torchrun, PMI, Open MPI, MVAPICH and Slurm.

A launcher sets at least a rank and a world size. The first family in `LAUNCHERS` whose two variables are set is used;
torchrun comes first, because its variables are the ones that PyTorch itself reads. The environment is not changed, and
torch is not imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rankbook.errors import InvalidArgument

DEFAULT_PORT = 29500
"""torch's default of MASTER_PORT."""


@dataclass(frozen=True)
class LauncherVariables:
    """Names of the environment variables that one family of launchers sets."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


LAUNCHERS = (
    LauncherVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    LauncherVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    LauncherVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # The size of the step, not of the job: a script that sbatch runs without srun is a single process.
    LauncherVariables("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class LaunchSetup:
    """Position of this process in its launch.

    `master` is the address of rank 0's store, None for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str | None = None
    master: tuple[str, int] | None = None


def read_setup(environment: Mapping[str, str] | None = None) -> LaunchSetup:
    """Return the setup that the environment describes; a single process if it describes none.

    Raises `InvalidArgument` for a contradictory or incomplete description.
    """
    environment = os.environ if environment is None else environment
    for launcher in LAUNCHERS:
        # `srun --mpi=pmi2` sets these two of PMI alone. Slurm's own variables say which ranks share a host.
        of_slurm = launcher.launcher == "PMI" and (
            environment.get(launcher.world_size) == environment.get("SLURM_STEP_NUM_TASKS")
        )
        if of_slurm and launcher.local_rank not in environment:
            continue
        if launcher.rank in environment and launcher.world_size in environment:
            return _read_launcher(environment, launcher)
    # Only one of torchrun's two variables is set. A single process that silently ignored it would train alone while
    # others wait for it.
    torch = LAUNCHERS[0]
    if _number(environment, torch.world_size, 1) > 1:
        raise InvalidArgument(
            f"{torch.world_size}={environment[torch.world_size]} is set without {torch.rank}: set both or neither"
        )
    if _number(environment, torch.rank, 0) > 0:
        raise InvalidArgument(
            f"{torch.rank}={environment[torch.rank]} is set without {torch.world_size}: set both or neither"
        )
    return LaunchSetup()


def local_rank_of(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the local rank, that is the index on this host, or None if the environment does not define it."""
    environment = os.environ if environment is None else environment
    for launcher in LAUNCHERS:
        if launcher.local_rank in environment:
            return _number(environment, launcher.local_rank, 0)
    return None


def read_flag(*names: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return the boolean value of the first of these variables that is set; False if none is.

    Raises `InvalidArgument` for a value that is not a boolean.
    """
    environment = os.environ if environment is None else environment
    # Our name comes first in `names`, then Accelerate's, so that both can be set.
    name = next((name for name in names if name in environment), None)
    if name is None:
        return False
    value = environment[name]
    if value.lower() in {"1", "true", "yes", "on", "y", "t"}:
        return True
    if value.lower() in {"", "0", "false", "no", "off", "n", "f"}:
        return False
    raise InvalidArgument(f"invalid {name}={value!r}: expected 1 or 0")


def read_text(*names: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the value of the first of these variables that is set."""
    environment = os.environ if environment is None else environment
    return next((environment[name] for name in names if name in environment), None)


def _read_launcher(environment: Mapping[str, str], launcher: LauncherVariables) -> LaunchSetup:
    rank = _number(environment, launcher.rank, 0)
    world_size = _number(environment, launcher.world_size, 1)
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"invalid {launcher.rank}={rank} with {launcher.world_size}={world_size}: expected a rank from 0 to "
            f"{world_size - 1}"
        )
    local_world_size = _local_world_size(environment, launcher, world_size)
    # On a single host the local rank is the rank. On several hosts it cannot be derived.
    local_rank = _number(environment, launcher.local_rank, rank if local_world_size == world_size else -1)
    if local_rank < 0:
        raise InvalidArgument(
            f"rank {rank} of {world_size}: {launcher.local_rank} is not set; several hosts require it"
        )
    master = _master(environment, rank, world_size, local_world_size) if world_size > 1 else None
    return LaunchSetup(rank, world_size, local_rank, local_world_size, launcher.launcher, master)


def _local_world_size(environment: Mapping[str, str], launcher: LauncherVariables, world_size: int) -> int:
    if launcher.launcher != "Slurm":
        return _number(environment, launcher.local_world_size, world_size)
    sizes: list[int] = []
    for part in environment.get(launcher.local_world_size, str(world_size)).split(","):  # "4(x2),3"
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InvalidArgument(
                f"invalid {launcher.local_world_size}={environment[launcher.local_world_size]!r}: expected a list of "
                "sizes such as 4(x2),3"
            )
        sizes += [int(match[1])] * int(match[2] or 1)
    # The sizes are in the order of the nodes of the step; "4(x2),3" stands for 4, 4, 3.
    node = _number(environment, "SLURM_NODEID", 0)
    return sizes[node] if node < len(sizes) else sizes[-1]


def _master(environment: Mapping[str, str], rank: int, world_size: int, local_world_size: int) -> tuple[str, int]:
    port = _number(environment, "MASTER_PORT", DEFAULT_PORT)
    # Slurm starts rank 0 on the first node of the list. MPI launchers set no address at all.
    address = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if address is None and local_world_size == world_size:
        address = "127.0.0.1"
    if address is None:
        raise InvalidArgument(
            f"rank {rank}: MASTER_ADDR is not set, but only {local_world_size} of {world_size} ranks are on this host; "
            "set it to the name of rank 0's host on every rank"
        )
    return address, port


def _first_host(nodes: str) -> str | None:
    """Return the first host of a Slurm node list: `node[03-07,9],other` becomes `node03`."""
    # Only the first host is needed. A suffix after the brackets belongs to the name: `node[03-07]-ib` is `node03-ib`.
    match = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return f"{match[1]}{match[2] or ''}{match[3] or ''}" if match else None


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    # A variable that is set to an empty text is an error, too: a launcher's script has failed to fill it in.
    value = environment.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise InvalidArgument(f"invalid {name}={value!r}: expected an integer") from None
