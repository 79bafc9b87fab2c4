"""Identity of an agent: the node and task numbers that a launcher has set in its environment.

Pure functions. The variables are those of torchrun, Slurm, Open MPI, MVAPICH and the PMI of other MPI implementations:

- https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
- https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
- https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
- https://mvapich.cse.ohio-state.edu/userguide/userguide_spawn/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskIdentity:
    """Numbers of the process that a launcher has started; None for those that it has not set.

    `rank` and `local_rank` are the number of the task and its number within its node; `local_size` is the number of
    tasks of the node.
    """

    node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    world_size: int | None = None


# torchrun and mpirun before Slurm: within a job their processes also have its variables, which are those of the step or
# the script that runs the launcher, and the same for several of them.
_VARIABLES = (
    # node, rank, local rank, tasks of the node, all tasks
    ("GROUP_RANK", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),  # torchrun
    (
        "",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_SIZE",
    ),
    ("", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"),
    # Before PMI, which `srun --mpi=pmi2` sets as well, without the numbers of the node.
    ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "", "SLURM_STEP_NUM_TASKS"),
    ("", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
)


def read_identity(environment: Mapping[str, str]) -> TaskIdentity:
    """Return the numbers of the first launcher of which `environment` has the rank's variable.

    Example::

        read_identity({"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}).node  # 1
    """
    for names in _VARIABLES:
        node, rank, local_rank, local_size, world_size = (_number(environment, name) for name in names)
        if rank is None:
            continue
        if local_size is None:
            local_size = _slurm_local_size(environment, node)
        return TaskIdentity(node, rank, local_rank, local_size, world_size)
    return TaskIdentity()


def _slurm_local_size(environment: Mapping[str, str], node: int | None) -> int | None:
    """Return the number of tasks of this node. `2(x3),1` means three nodes with two tasks and one with one."""
    sizes: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        size, _, times = part.partition("(x")
        if size.isdecimal():
            # A node's number is below the count of nodes, so a larger number of repetitions is an error.
            sizes += [int(size)] * min(int(times.rstrip(")")) if times.rstrip(")").isdecimal() else 1, 1 << 16)
    return sizes[node] if node is not None and node < len(sizes) else None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else None
