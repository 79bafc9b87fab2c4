"""Test which errors count as out of memory, and the report about them."""

from __future__ import annotations

import pytest
import torch

from rankbook.errors import CollectiveAborted
from rankbook.rank.inspect import oom
from rankbook.rank.inspect.oom import MemoryHolding, MemoryReport, describe_holdings, find_holdings, is_out_of_memory


def from_(cause: BaseException) -> BaseException:
    error = ValueError("forward failed")
    error.__cause__ = cause
    return error


def after(first: BaseException) -> BaseException:
    error = ValueError("and then")
    error.__context__ = first
    return error


CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError(CPU), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (from_(MemoryError()), True),
        (ExceptionGroup("several", [ValueError(), MemoryError()]), True),
        (after(MemoryError()), False),
        (RuntimeError("shape mismatch"), False),
        (OSError(12, "Cannot allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_which_errors_are_that_memory_ran_out(error, is_one):
    assert is_out_of_memory(error) is is_one


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (
            CollectiveAborted("rank 1 raised OutOfMemoryError at cell [5] line 3 while this rank waited in barrier"),
            True,
        ),
        (CollectiveAborted("rank 12 raised MemoryError, so this rank cannot begin all_reduce"), True),
        (CollectiveAborted("rank 0 raised RuntimeError (out of memory) at cell [5] while this rank waited"), True),
        (CollectiveAborted("rank 1 raised ValueError at cell [5] while this rank waited in barrier"), False),
        (ValueError("rank 1 raised MemoryError"), False),
    ],
    ids=["in torch", "in Python", "on the CPU", "of another kind", "no abort"],
)
def test_which_errors_are_that_memory_ran_out_on_another_rank(error, is_one):
    assert oom.is_peer_oom(error) is is_one


def test_torchs_own_error_on_the_cpu_is_one():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_table_names_the_largest_and_adds_up_the_rest():
    namespace = {
        "batches": [torch.zeros(n, 1000, 1000, dtype=torch.uint8) for n in range(1, 11)],
        "weight": torch.zeros(500, 1000),
        "tiny": torch.zeros(1),
    }
    lines = describe_holdings(find_holdings(namespace))
    assert lines[0].split() == ["10", "MB", "batches[9]", "(10,", "1000,", "1000)", "uint8", "cpu"]
    assert lines[8].split() == ["5", "MB", "in", "4", "more"]
    assert lines[-1] == "  by variable: batches 55 MB, weight 2 MB, tiny 4 B"
    assert len({line.index("MB") for line in lines[:9]}) == 1, "the units stand below each other"


def test_report_without_holdings_says_so():
    assert describe_holdings(find_holdings({"n": 5})) == ["  no variable holds a tensor of 1 MB or more"]


@pytest.fixture
def cuda(monkeypatch):
    """Simulate a device of 80 GB, of which PyTorch uses 60 and reserves 70, and others use 5."""
    numbers = {
        "is_initialized": lambda: True,
        "current_device": lambda: 3,
        "mem_get_info": lambda _: (5_000_000_000, 80_000_000_000),
        "memory_allocated": lambda _: 60_000_000_000,
        "memory_reserved": lambda _: 70_000_000_000,
    }
    for name, function in numbers.items():
        monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 GiB"), "cuda:1"),
        (from_(torch.OutOfMemoryError("CUDA out of memory.")), "cuda:3"),
        (RuntimeError("CUDA error: out of memory"), "cuda:3"),
        (RuntimeError(CPU), "cpu"),
        (MemoryError(), "cpu"),
    ],
    ids=repr,
)
def test_the_device_is_the_one_that_the_error_names(cuda, error, device):
    assert oom._device_of(error) == device


def test_gpu_report_has_free_used_reserved_and_other_memory(cuda):
    report = MemoryReport([MemoryHolding("model.weight", 40_000_000_000, (10,), "float32", "cuda:1")])
    first, second = oom._describe_cuda(torch.device("cuda:1"), report).splitlines()
    assert first == (
        "memory of cuda:1: 5 GB of 80 GB are free; this rank's tensors use 60 GB, "
        "10 GB are reserved but unused, 5 GB are used by other processes or the CUDA context"
    )
    assert second.startswith("20 GB belong to no variable")
