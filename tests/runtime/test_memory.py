"""Test that all ranks agree on a batch size after one ran out of memory, and that other errors are raised."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from rankbook.errors import InvalidArgument, PeerFailedError
from rankbook.runtime.memory import find_executable_batch_size, release_memory, should_reduce_batch_size
from rankbook.runtime.process_state import PartialState
from tests.rank_processes import run_ranks


def fits_up_to(most: int, tried: list[int]):
    def train(batch_size, name="run"):
        tried.append(batch_size)
        if batch_size > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return batch_size, name

    return train


def test_the_size_shrinks_until_it_fits_and_the_next_call_starts_there():
    PartialState(cpu=True)
    tried: list[int] = []
    train = find_executable_batch_size(fits_up_to(80, tried), starting_batch_size=100)
    assert train(name="x") == (72, "x")
    assert tried == [100, 90, 81, 72]
    train()
    assert tried[4:] == [72]


def test_the_decorator_takes_both_forms_and_another_way_to_shrink():
    PartialState(cpu=True)
    sizes = iter([50, 10])
    train = find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))
    assert train(fits_up_to(20, []))() == (10, "run")
    stuck = find_executable_batch_size(fits_up_to(1, []), starting_batch_size=8, reduce_batch_size_fn=lambda: 8)
    with pytest.raises(InvalidArgument, match="smaller than 8, got 8"):
        stuck()


def test_error_is_raised_when_no_batch_size_fits():
    PartialState(cpu=True)
    with pytest.raises(RuntimeError, match="No executable batch size found: 4 and all smaller ones"):
        find_executable_batch_size(fits_up_to(0, []), starting_batch_size=4)()


def test_a_batch_size_in_the_call_is_an_error_that_says_to_leave_it_out():
    PartialState(cpu=True)
    with pytest.raises(TypeError, match=r"train is called with the batch size followed by .* omit the batch size"):
        find_executable_batch_size(fits_up_to(9, []))(128, "name")


def test_other_errors_are_raised_unchanged():
    PartialState(cpu=True)

    @find_executable_batch_size
    def train(batch_size):
        raise ValueError(f"not about memory: {batch_size}")

    with pytest.raises(ValueError, match="not about memory: 128"):
        train()


def test_out_of_memory_errors_are_recognized():
    messages = [
        "CUDA out of memory.",
        "CPU out of memory.",
        "XPU out of memory. Tried to allocate 2 GiB",
        "DefaultCPUAllocator: can't allocate memory: you tried",
        "MPS backend out of memory (M",
    ]
    assert all(should_reduce_batch_size(RuntimeError(message)) for message in messages)
    assert should_reduce_batch_size(MemoryError()) and should_reduce_batch_size(torch.OutOfMemoryError())
    assert not should_reduce_batch_size(ValueError("CUDA out of memory"))
    assert not should_reduce_batch_size(RuntimeError("shape mismatch"))


def test_failed_attempt_is_freed_before_the_next():
    PartialState(cpu=True)
    references: list[weakref.ref] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size):
        assert all(reference() is None for reference in references)
        model = torch.nn.Linear(2, 2)
        model.itself = [model]
        references.append(weakref.ref(model))
        if batch_size > 8:
            raise MemoryError
        return batch_size

    assert train() == 8


def test_release_memory_gives_nones_and_frees_cycles():
    model = torch.nn.Linear(1, 1)
    model.itself = [model]
    reference = weakref.ref(model)
    other = [1]
    gc.disable()
    try:
        variables = [model, other]
        del model
        assert reference() is not None
        variables[:] = release_memory(*variables)
        release_memory()
    finally:
        gc.enable()
    assert variables == [None, None]
    assert reference() is None


def _on_rank():
    state = PartialState()
    rank, tried = state.process_index, []
    train = find_executable_batch_size(fits_up_to((80, 50, 100)[rank], tried), starting_batch_size=100 + rank)
    result = train()

    @find_executable_batch_size(starting_batch_size=8)
    def fails(batch_size):
        if rank == 2:
            raise KeyError(batch_size)
        if rank == 0:
            raise MemoryError
        return batch_size

    with pytest.raises(KeyError if rank == 2 else PeerFailedError) as caught:
        fails()
    state.wait_for_everyone()
    return result, tried, str(caught.value)


@pytest.mark.slow
def test_all_ranks_agree_on_the_size_and_an_error_of_one_is_an_error_of_all():
    results = run_ranks(_on_rank, 3)
    sizes = [100, 90, 81, 72, 64, 57, 51, 45]
    assert [result[:2] for result in results] == [((45, "run"), sizes)] * 3
    message = "rank 2 raised KeyError while this rank was waiting for it: 8"
    assert [result[2] for result in results] == [message, message, "8"]
