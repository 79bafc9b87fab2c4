"""Test what an agent reads from the environment of its launcher."""

from __future__ import annotations

import pytest

from rankbook.engines.engine import TaskIdentity, read_identity

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_SIZE": "2",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "1",
    "MV2_COMM_WORLD_SIZE": "2",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        (TORCHRUN, TaskIdentity(1, 3, 1, 2, 4)),
        (SLURM, TaskIdentity(2, 3, 0, 1, 4)),
        (OPEN_MPI, TaskIdentity(None, 1, 1, 2, 2)),
        (MVAPICH, TaskIdentity(None, 1, 0, 1, 2)),
        (PMI, TaskIdentity(None, 5, 1, 4, 8)),
        ({}, TaskIdentity()),
        # The step that torchrun itself runs in is not the agent's.
        ({**SLURM, **TORCHRUN}, TaskIdentity(1, 3, 1, 2, 4)),
        ({**SLURM, **OPEN_MPI}, TaskIdentity(None, 1, 1, 2, 2)),
        ({**SLURM, **MVAPICH}, TaskIdentity(None, 1, 0, 1, 2)),
        ({**SLURM, **PMI}, TaskIdentity(None, 5, 1, 4, 8)),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, TaskIdentity(2, 3, 0, 1, 4)),
    ],
    ids=[
        *("torchrun", "slurm", "open mpi", "mvapich", "pmi", "nothing"),
        *("torchrun within slurm", "open mpi within slurm", "mvapich within slurm", "mpich within slurm"),
        "srun with pmi",
    ],
)
def test_the_numbers_of_every_launcher_are_read(environment, identity):
    assert read_identity(environment) == identity


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(xmany)", "-1", "9(x99999999999)"])
def test_a_list_of_tasks_that_cannot_be_read_is_no_error(text):
    identity = read_identity({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text})
    assert identity.rank == 3 and identity.local_size in (None, 9)


def test_values_that_are_no_numbers_count_as_missing():
    assert read_identity({"RANK": "first"}) == TaskIdentity()
    assert read_identity({**TORCHRUN, "GROUP_RANK": ""}).node is None
