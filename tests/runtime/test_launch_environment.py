"""Test the setup that the environment of every launcher describes."""

from __future__ import annotations

import pytest

from rankbook.errors import InvalidArgument
from rankbook.runtime.launch_environment import LaunchSetup, local_rank_of, read_flag, read_setup, read_text

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [("torchrun", TORCHRUN), ("PMI", PMI), ("Open MPI", OPEN_MPI), ("MVAPICH", MVAPICH), ("Slurm", SLURM)],
)
def test_each_launchers_spelling_is_read(launcher, environment):
    assert read_setup(environment | MASTER) == LaunchSetup(5, 8, 1, 4, launcher, ("node7", 1234))
    assert local_rank_of(environment) == 1


def test_torchruns_spelling_goes_before_the_others():
    assert read_setup(SLURM | OPEN_MPI | {**TORCHRUN, "RANK": "6"} | MASTER).rank == 6


def test_empty_environment_describes_a_single_process():
    assert read_setup({}) == LaunchSetup()
    assert local_rank_of({}) is None


def test_ranks_of_one_host_meet_there_at_torchs_port():
    assert read_setup({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchSetup(1, 2, 1, 2, "torchrun", ("127.0.0.1", 29500))


def test_single_process_of_a_launcher_needs_no_rendezvous():
    assert read_setup({"RANK": "0", "WORLD_SIZE": "1"}).master is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[03-07,9],other", "node03"), ("gpu1", "gpu1"), ("a1,a2", "a1"), ("rack[1-2]n.cluster", "rack1n.cluster")],
)
def test_rendezvous_is_at_the_first_host_of_slurm(nodes, first):
    assert read_setup(SLURM | {"SLURM_STEP_NODELIST": nodes}).master == (first, 29500)


def test_slurms_uneven_nodes_have_their_own_sizes():
    environment = SLURM | MASTER | {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert [read_setup(environment | {"SLURM_NODEID": str(node)}).local_world_size for node in range(3)] == [4, 4, 3]


def test_pmi2_of_slurm_does_not_hide_which_ranks_share_a_host():
    both = SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"} | MASTER
    assert read_setup(both) == LaunchSetup(5, 8, 1, 4, "Slurm", ("node7", 1234))
    assert read_setup(SLURM | PMI | MASTER).launcher == "PMI", "of an mpirun within a step"
    assert read_setup({**both, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).world_size == 8, (
        "of a shell in a step"
    )


def test_script_in_sbatch_without_srun_is_a_single_process():
    assert read_setup({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) == LaunchSetup()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "set without RANK"),
        ({"RANK": "1"}, "set without WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "invalid RANK=2 with WORLD_SIZE=2: expected a rank from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "invalid RANK=-1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "invalid RANK='x': expected an integer"),
        (TORCHRUN, "MASTER_ADDR is not set"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        (SLURM | MASTER | {"SLURM_STEP_TASKS_PER_NODE": "four"}, "expected a list of sizes"),
    ],
)
def test_incomplete_environment_is_an_error_that_names_the_missing_variable(environment, words):
    with pytest.raises(InvalidArgument, match=words):
        read_setup(environment)


def test_the_first_variable_that_is_set_counts():
    assert read_text("A", "B", environment={"B": "2"}) == "2"
    assert read_flag("A", "B", environment={"A": "0", "B": "1"}) is False
    assert read_flag("A", environment={"A": "True"}) is True
    assert read_flag("A", environment={}) is False
    with pytest.raises(InvalidArgument, match=r"invalid \w+=.*: expected 1 or 0"):
        read_flag("A", environment={"A": "perhaps"})
