"""Test which optimizer steps are reverted after an aborted collective, and that a new reducer keeps its hooks."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rankbook.rank import model_reset
from rankbook.rank.model_reset import (
    StepReport,
    StepTracker,
    choose_source,
    choose_statistics_source,
    names_of,
    names_of_models,
)


@pytest.fixture(scope="module")
def tracker() -> StepTracker:
    return StepTracker()


def report(*suspect: int, optimizers: tuple[int, ...] = (1, 2)) -> StepReport:
    return StepReport(optimizers=list(optimizers), suspect=list(suspect), was_cut=bool(suspect), statistics=[])


def test_a_step_is_suspect_if_it_began_after_the_aborted_collective(tracker):
    tracker.forget()
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    first.step()
    since = time.monotonic()
    assert tracker.report(since)["suspect"] == []
    second.step()
    report = tracker.report(since)
    assert [tracker.optimizers()[index] for index in report["suspect"]] == [second]
    assert tracker.report(None)["suspect"] == []
    tracker.forget()
    assert tracker.report(since)["suspect"] == []


def test_the_first_rank_without_a_suspect_step_is_the_source():
    assert choose_source([report(0), report(), report()]) == 1
    assert choose_source([report(0), report(1)]) is None


def test_ranks_with_other_optimizers_and_new_processes_are_no_source():
    assert choose_source([report(0), report(optimizers=(1, 3))]) is None
    assert choose_source([report(0), None]) is None


def test_variables_that_hold_a_model_or_its_optimizer_are_named():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    namespace = {"net": model, "sgd": optimizer, "other": other, "_hidden": model, "number": 3}
    assert names_of([optimizer], namespace) == ["net", "sgd"]
    assert not model_reset.is_sharded(optimizer)


def count_and_reduce(calls, bucket):
    """Count the calls, and reduce the gradients as DDP does without a hook."""
    calls.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_model_with_a_new_reducer_keeps_its_communication_hook():
    model_reset.track_models()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model.register_comm_hook([], count_and_reduce)
        model_reset.restart_step()
        for hooked in (model, pickle.loads(pickle.dumps(model))):
            ((_, calls),) = hooked._comm_hooks
            hooked(torch.ones(1, 2)).sum().backward()
            assert calls == [0]
            calls.clear()
    finally:
        dist.destroy_process_group()


def test_an_unpickled_model_moves_its_inputs_to_the_device_of_its_parameters():
    """It has the number of the device that it was on when it was pickled."""
    device = torch.device("cuda", 3)
    model = SimpleNamespace(
        device_ids=[0],
        output_device=0,
        device=torch.device("cuda", 0),
        parameters=lambda: iter([SimpleNamespace(device=device)]),
    )
    states: list[dict[str, int]] = []
    model_reset._with_own_device(lambda _model, state: states.append(state))(model, {"a": 1})
    assert states == [{"a": 1}]
    assert (model.device_ids, model.output_device, model.device) == ([3], 3, device)
    on_cpu = SimpleNamespace(device_ids=None, output_device=None, device=torch.device("cpu"))
    model_reset._with_own_device(lambda _model: None)(on_cpu)
    assert on_cpu.output_device is None


def test_statistics_come_from_a_rank_without_a_cut_collective():
    def of(*statistics: int, was_cut: bool) -> StepReport:
        return StepReport(optimizers=[], suspect=[], was_cut=was_cut, statistics=list(statistics))

    assert choose_statistics_source([of(1, 2, was_cut=True), of(1, 2, was_cut=False)]) == 1
    assert choose_statistics_source([of(1, was_cut=True), of(1, was_cut=True)]) is None
    assert choose_statistics_source([of(1, was_cut=True), None]) is None, "a new process has no models"
    assert choose_statistics_source([of(1, was_cut=True), of(2, was_cut=False)]) is None, "different models"
    assert choose_statistics_source([of(1, 1, was_cut=True), of(1, 1, was_cut=False)]) is None, "two alike"


def test_models_are_named_by_the_variables_that_hold_them_or_their_parts():
    layer = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(layer)
    namespace = {"model": model, "part": layer, "_hidden": model, "other": torch.nn.Linear(1, 1), "x": 1}
    assert names_of_models([model], namespace) == ["model", "part"]
