"""Test the state of a process that runs alone, under a launcher, or in an existing group; and its errors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rankbook.errors import InvalidArgument, PeerFailedError
from rankbook.protocol import telemetry
from rankbook.runtime.process_state import DistributedType, PartialState
from tests.rank_processes import free_port, run_ranks

# Alone


def test_a_plain_script_is_one_process_and_starts_no_group():
    state = PartialState(cpu=True)
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert (state.distributed_type, state.backend, state.device) == (DistributedType.NO, None, torch.device("cpu"))
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert not state.use_distributed and not state.debug and state.initialized
    assert not dist.is_initialized()
    assert repr(state).startswith("Distributed environment: NO\nNum processes: 1\n")
    state.wait_for_everyone()
    state.destroy_process_group()
    with state.main_process_first(), state.local_main_process_first(), state.split_between_processes([1, 2]) as share:
        assert share == [1, 2]


def test_all_instances_share_what_the_first_found(monkeypatch):
    first = PartialState(cpu=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert PartialState().num_processes == 1
    PartialState().device = torch.device("meta")
    assert first.device == torch.device("meta")


def test_after_a_reset_an_attribute_says_to_build_it_first():
    state = PartialState(cpu=True)
    PartialState._reset_state()
    for name in ("device", "num_processes", "is_main_process", "debug", "use_distributed"):
        with pytest.raises(
            AttributeError,
            match=f"PartialState.{name} is not available: the state was reset. Create it again with Partial",
        ):
            getattr(state, name)
    with pytest.raises(AttributeError, match="object has no attribute 'nonsense'"):
        getattr(state, "nonsense")  # noqa: B009 - it raises
    assert not state.initialized


def test_an_attempt_that_fails_leaves_nothing_and_the_next_one_succeeds(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="set without RANK"):
        PartialState(cpu=True)
    assert not PartialState._shared_state
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    before = dict(os.environ)
    with pytest.raises(RuntimeError):
        PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=0.2))  # nobody comes
    assert not PartialState._shared_state and not dist.is_initialized()
    assert dict(os.environ) == before
    with pytest.raises(RuntimeError, match="nonsense"):
        PartialState(cpu=True, init_method="nonsense://x")
    monkeypatch.delenv("WORLD_SIZE")
    assert PartialState(cpu=True).num_processes == 1


def test_flags_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("RANKBOOK_DEVICE", "meta")
    state = PartialState()
    assert (state.debug, state.device) == (True, torch.device("meta"))


def test_a_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("RANKBOOK_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        InvalidArgument, match="RANKBOOK_DEVICE=cuda requires a CUDA device, but torch finds no CUDA device"
    ):
        PartialState()
    assert not PartialState._shared_state


@pytest.mark.parametrize(("own", "expected"), [("cuda:3", "cuda:3"), ("", "cuda:1")])
def test_a_rank_keeps_its_device_when_its_local_rank_changes(monkeypatch, own, expected):
    monkeypatch.setattr(telemetry, "this_device", own)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert PartialState().device == torch.device(expected)
    finally:
        dist.destroy_process_group()
    assert current == [torch.device(expected)]


def test_decorators_take_both_forms_alone():
    state = PartialState(cpu=True)
    assert state.on_main_process(lambda: 1)() == 1
    assert state.on_main_process()(lambda: 1)() == 1
    assert state.on_local_main_process(lambda: 1)() == 1
    assert state.on_last_process(lambda: 1)() == 1
    assert state.on_process(process_index=3)(lambda: 1)() == 1
    assert state.on_local_process(lambda: 1, local_process_index=3)() == 1


# Together


@pytest.mark.processes
def test_existing_group_is_used_and_not_destroyed():
    def on_rank():
        group = dist.group.WORLD
        state = PartialState(timeout=timedelta(seconds=5))
        values = (state.process_index, state.local_process_index, state.num_processes, state.backend)
        state.destroy_process_group()
        assert dist.group.WORLD is group
        return (*values, str(state.distributed_type), state.is_main_process, state.is_last_process)

    assert run_ranks(on_rank, 3) == [(rank, rank, 3, "gloo", "MULTI_CPU", rank == 0, rank == 2) for rank in range(3)]


@pytest.mark.processes
def test_process_group_takes_precedence_over_the_environment():
    def on_rank():
        state = PartialState()
        return state.process_index, state.local_process_index, state.num_processes

    environment = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "0"}
    assert run_ranks(on_rank, 2, environment=environment) == [(0, 0, 2), (1, 0, 2)]
    assert run_ranks(on_rank, 2, environment={"": ""}) == [(0, 0, 2), (1, 1, 2)]


MPI = {
    "": "",
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.processes
@pytest.mark.parametrize("environment", [None, MPI], ids=["torchrun", "mpirun"])
def test_under_a_launcher_a_group_is_started_used_and_destroyed(environment):
    def on_rank():
        assert not dist.is_initialized()
        state = PartialState(timeout=timedelta(seconds=20))
        timeout = dist.distributed_c10d._get_default_timeout(dist.Backend("gloo"))
        total = torch.tensor([state.process_index + 1])
        dist.all_reduce(total)
        state.destroy_process_group()
        assert not dist.is_initialized()
        assert timeout
        return state.backend, state.num_processes, total.item()

    assert run_ranks(on_rank, 2, group=False, environment=environment) == [("gloo", 2, 3)] * 2


SCRIPT = """
import torch
from rankbook.runtime import PartialState, gather
state = PartialState()
told = (state.num_processes, gather(torch.tensor(state.process_index)).tolist())
state.print("told", told)
with state.main_process_first():
    if state.is_main_process and state.use_distributed:
        raise FileNotFoundError("no data.csv")
"""


@pytest.mark.full
def test_one_script_runs_alone_and_under_torchrun_and_its_error_ends_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert alone.stdout == "told (1, [0])\n"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    several = subprocess.run(torchrun, capture_output=True, text=True, check=False, timeout=60)
    assert several.stdout == "told (2, [0, 1])\n"
    assert several.returncode == 1
    assert "FileNotFoundError: no data.csv" in several.stderr


@pytest.mark.processes
def test_a_rank_that_failed_once_alone_still_meets_the_others():
    def on_rank():
        def fail(*_):
            raise OSError("no network")

        if os.environ["RANK"] == "1":
            with pytest.raises(InvalidArgument, match=r"backend 'nonsense' is not available; choose from .*gloo"):
                PartialState(backend="nonsense")
            dist.Backend.register_backend("broken", fail, devices=["cpu"])
            with pytest.raises(OSError, match="no network"):
                PartialState(backend="broken", timeout=timedelta(seconds=20))
            assert not PartialState._shared_state
        state = PartialState(timeout=timedelta(seconds=20))
        state.wait_for_everyone()
        return True

    assert run_ranks(on_rank, 2, group=False) == [True, True]


@pytest.mark.processes
def test_turns_shares_and_printing():
    def on_rank():
        state = PartialState()
        rank, order = state.process_index, []
        store = dist.distributed_c10d._get_default_store()
        for block in (state.main_process_first, state.local_main_process_first):
            with block():
                order.append(store.add("order", 1))
        with state.split_between_processes(["a", "b", "c", "d"], apply_padding=True) as share:
            pass
        with state.split_between_processes({"x": torch.arange(4)}) as rows:
            pass
        out = io.StringIO()
        with redirect_stdout(out):
            state.print("hello", end="!")
        ran = [
            state.on_main_process(lambda: "main")(),
            state.on_last_process(lambda: "last")(),
            state.on_process(lambda: "one", process_index=1)(),
            state.on_local_process(local_process_index=2)(lambda: "local")(),
        ]
        return order, share, rows["x"].tolist(), out.getvalue(), [call for call in ran if call], rank

    results = run_ranks(on_rank, 3)
    assert [result[1:] for result in results] == [
        (["a", "b"], [0, 1], "hello!", ["main"], 0),
        (["c", "d"], [2], "", ["one"], 1),
        (["d", "d"], [3], "", ["last", "local"], 2),
    ]
    assert results[0][0][0] == 1  # rank 0 went first; the second block's turns may overlap the first one's
    assert sorted(turn for result in results for turn in result[0]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.processes
def test_an_error_of_the_first_one_is_an_error_of_all_and_the_group_goes_on():
    def on_rank(block, first):
        state = PartialState()
        entered = False
        try:
            with getattr(state, block)():
                entered = True
                if state.process_index == first:
                    raise FileNotFoundError("no data.csv")  # noqa: TRY301 - as a person's block would
        except (PeerFailedError, FileNotFoundError) as error:
            caught = (type(error).__name__, str(error), getattr(error, "rank", None))
        state.wait_for_everyone()
        with state.main_process_first():
            pass
        return entered, caught

    message = "rank 0 raised FileNotFoundError while this rank was waiting for it: no data.csv"
    expected = [(True, ("FileNotFoundError", "no data.csv", None))] + [(False, ("PeerFailedError", message, 0))] * 2
    assert run_ranks(on_rank, 3, "main_process_first", 0) == expected
    assert run_ranks(on_rank, 3, "local_main_process_first", 0) == expected


@pytest.mark.processes
def test_error_of_a_rank_outside_main_process_first_is_raised_there_only():
    def on_rank():
        state = PartialState()
        try:
            with state.main_process_first():
                if state.process_index == 1:
                    raise KeyError("mine")  # noqa: TRY301 - as a person's block would
        except KeyError:
            pass
        state.wait_for_everyone()
        return True

    assert run_ranks(on_rank, 2) == [True, True]


@pytest.mark.processes
def test_when_the_others_cannot_be_told_the_first_error_is_still_the_one_that_is_raised():
    def on_rank():
        state = PartialState()
        if state.process_index == 1:
            return "gone"
        with pytest.raises(KeyError, match="mine") as caught, state.main_process_first():
            raise KeyError("mine")
        return caught.value.__notes__[0]

    notes = run_ranks(on_rank, 2)
    assert notes[1] == "gone"
    assert notes[0].startswith("Could not report this error to the other ranks: ")
