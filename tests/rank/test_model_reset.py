"""Test which optimizer steps are reverted after an aborted collective, and that a new reducer keeps its hooks."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from rankbook.rank import model_reset
from rankbook.rank.model_reset import (
    StepReport,
    StepTracker,
    choose_source,
    choose_statistics_source,
    compare_steps,
    names_of,
    names_of_models,
    replicated_on_all,
)


@pytest.fixture(scope="module")
def tracker() -> StepTracker:
    return StepTracker()


def report(*suspect: int, optimizers: tuple[int, ...] = (1, 2)) -> StepReport:
    return StepReport(
        optimizers=list(optimizers), suspect=list(suspect), was_cut=bool(suspect), replicated=[], mixed=[], sharded=[],
        statistics=[], steps=[0] * len(optimizers), unfinished=[], schedules=[(0, 0)] * len(optimizers),
    )  # fmt: skip


def steps_of(*steps: int, unfinished: tuple[int, ...] = (), optimizers: tuple[int, ...] = (1, 2)) -> StepReport:
    everything = list(range(len(optimizers)))
    return report(optimizers=optimizers) | StepReport(
        replicated=everything, steps=list(steps), unfinished=list(unfinished)
    )


def test_a_step_is_suspect_if_it_began_after_the_aborted_collective(tracker):
    tracker.forget()
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    first.step()
    since = time.monotonic()
    assert tracker.report(since, 1)["suspect"] == []
    second.step()
    report = tracker.report(since, 1)
    assert [tracker.optimizers()[index] for index in report["suspect"]] == [second]
    assert tracker.report(None, 1)["suspect"] == []
    tracker.forget()
    assert tracker.report(since, 1)["suspect"] == []


def test_the_first_rank_without_a_suspect_step_is_the_source():
    assert choose_source([report(0), report(), report()]) == 1
    assert choose_source([report(0), report(1)]) is None


def test_ranks_with_other_optimizers_and_new_processes_are_no_source():
    assert choose_source([report(0), report(optimizers=(1, 3))]) is None
    assert choose_source([report(0), None]) is None


def test_equal_steps_are_no_difference():
    assert compare_steps([steps_of(3, 4), steps_of(3, 4)]) == []
    assert compare_steps([steps_of(3, 4), None]) == []
    assert compare_steps([steps_of(1, optimizers=(1,)), steps_of(1, 0)]) == [], "one that has made no step in the cell"


def test_a_rank_whose_step_has_ended_is_the_source_of_the_others():
    (difference,) = compare_steps([steps_of(3, 4), steps_of(3, 5), steps_of(3, 4)])
    assert (difference.indices, difference.source) == ((1, 1, 1), 0)
    assert str(difference) == (
        "the ranks have made different numbers of steps in the last cell (4 on ranks 0,2, 5 on rank 1)"
    )
    (difference,) = compare_steps([steps_of(3, 4, unfinished=(0,)), steps_of(3, 4)])
    assert (difference.indices, difference.source) == ((0, 0), 1)
    assert str(difference) == "a step of the last cell has not ended on rank 0"
    assert difference.consequence == "all ranks continue with the weights and the optimizer state of rank 1"


def test_the_schedule_that_has_come_furthest_is_the_one_of_all():
    ranks = [steps_of(3, 4) | StepReport(schedules=[(0, 0), (epoch, epoch)]) for epoch in (7, 8)]
    (difference,) = compare_steps(ranks)
    assert (difference.indices, difference.source) == ((1, 1), 1)
    assert str(difference) == "its learning rate schedule or gradient scale differs between the ranks"
    assert difference.consequence == "all ranks continue with those of rank 1"
    own = [rank | StepReport(replicated=[]) for rank in ranks]
    assert compare_steps(own) == [], "weights of their own may have schedules of their own"


def test_a_first_step_counts_beside_another_difference():
    known, first = compare_steps([steps_of(3, 1), steps_of(2, optimizers=(1,))])
    assert (known.source, first.source, first.steps) == (0, None, {0: 1, 1: 0})


def test_a_new_process_takes_the_weights_of_the_source_too():
    (difference,) = compare_steps([None, steps_of(3, 4), steps_of(3, 5)])
    assert (difference.indices, difference.source) == ((None, 1, 1), 1)
    assert difference.consequence == "all ranks continue with the weights and the optimizer state of rank 1"


def test_without_a_source_the_user_is_told_what_to_do():
    (difference,) = compare_steps([steps_of(3, 4, unfinished=(0,)), steps_of(3, 4, unfinished=(0,))])
    assert difference.source is None
    assert difference.consequence.startswith("the weights are partly those of the step")
    (difference,) = compare_steps([steps_of(3, optimizers=(1,)), steps_of(3, 1)])
    assert (difference.indices, difference.source, difference.steps) == ((None, None), None, {0: 0, 1: 1})
    assert difference.consequence.startswith("the weights of the ranks differ")


def test_parts_of_a_replica_may_have_an_optimizer_on_one_rank_only():
    assert compare_steps([steps_of(3, 3), steps_of(3, 3, optimizers=(1, 3))]) == []
    (difference,) = compare_steps([steps_of(3, 3), steps_of(3, 2, optimizers=(1, 3))])
    assert (difference.source, difference.steps) == (None, {0: 3, 1: 2})


def test_ranks_may_make_different_steps_with_weights_of_their_own():
    own, other = (steps_of(count, 1) | StepReport(replicated=[1]) for count in (3, 4))
    (difference,) = compare_steps([own, other])
    assert (difference.source, difference.consequence) == (None, "")
    shards = [each | StepReport(sharded=[0]) for each in (own, other)]
    assert compare_steps(shards)[0].consequence == "the shards are from different steps now: load a checkpoint"


class Doubled(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if self.param_groups[0]["lr"] < 0:
            raise ValueError("in the middle")


def test_the_steps_of_a_cell_are_counted(tracker):
    optimizer = Doubled([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    tracker.begin_cell()
    optimizer.step()
    optimizer.step()
    index = tracker.optimizers().index(optimizer)
    report = tracker.report(None, 2)
    assert (report["steps"][index], report["unfinished"]) == (2, [])
    optimizer.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match="in the middle"):
        optimizer.step()
    report = tracker.report(None, 2)
    assert (report["steps"][index], report["unfinished"]) == (2, [index])
    tracker.begin_cell()
    report = tracker.report(None, 2)
    assert (report["steps"][index], report["unfinished"]) == (0, [])


@pytest.mark.usefixtures("tracker")
def test_optimizer_class_of_a_cell_can_be_sent_to_another_rank():
    own = type("Own", (Doubled,), {"__module__": "__main__", "step": lambda self: super(own, self).step()})
    own([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()  # torch has wrapped the method, with its hooks
    assert pickle.loads(cloudpickle.dumps(own)).__name__ == "Own"


def test_variables_that_hold_a_model_or_its_optimizer_are_named():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    namespace = {"net": model, "sgd": optimizer, "other": other, "_hidden": model, "number": 3}
    assert names_of([optimizer], namespace) == ["net", "sgd"]


@pytest.fixture
def group_of_one():
    model_reset.track_models()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_weights_of_ddp_over_all_ranks_count_as_replicated(tracker):
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("first", "second")})
    layers._ddp_params_and_buffers_to_ignore = ["second.weight"]
    model = torch.nn.parallel.DistributedDataParallel(layers)
    whole = torch.optim.SGD(layers["first"].parameters(), lr=0.1)
    part = torch.optim.SGD(layers["second"].parameters(), lr=0.1)  # one of its weights is not reduced
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for optimizer in (whole, part, plain):
        optimizer.step()

    def replicated(world_size):
        optimizers = tracker.optimizers()
        return [optimizers[index] for index in tracker.report(None, world_size)["replicated"]]

    assert replicated(1) == [whole]
    assert replicated(2) == [], "the model's group is a part of the ranks"
    del model


@pytest.mark.usefixtures("group_of_one")
def test_optimizers_with_other_parts_of_a_replica_are_told_apart(tracker):
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    for optimizer in optimizers:
        optimizer.step()
    checksums = dict(zip(tracker.optimizers(), tracker.report(None, 1)["optimizers"], strict=True))
    assert checksums[optimizers[0]] != checksums[optimizers[1]]
    del model


def test_only_what_is_replicated_on_all_ranks_is_copied():
    with_both, with_one = report(0), report()
    with_both["replicated"], with_one["replicated"] = [0, 1], [1]
    assert replicated_on_all([with_both, with_one]) == {1}
    assert replicated_on_all([with_both, None]) == set()


def count_and_reduce(calls, bucket):
    """Count the calls, and reduce the gradients as DDP does without a hook."""
    calls.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.usefixtures("group_of_one")
def test_a_model_with_a_new_reducer_keeps_its_communication_hook():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook([], count_and_reduce)
    model_reset.restart_step()
    for hooked in (model, pickle.loads(pickle.dumps(model))):
        ((_, calls),) = hooked._comm_hooks
        hooked(torch.ones(1, 2)).sum().backward()
        assert calls == [0]
        calls.clear()


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
        return report(optimizers=()) | StepReport(was_cut=was_cut, statistics=list(statistics))

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


def test_an_optimizer_that_cannot_be_pickled_is_reported_and_not_sent(monkeypatch):
    sent = []
    monkeypatch.setattr(model_reset.dist, "broadcast_object_list", lambda values, _: sent.append(pickle.dumps(values)))
    monkeypatch.setattr(model_reset.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(model_reset, "_copy_tensor", lambda *_: None)
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "rate": lambda step: step}
    reason, _ = model_reset._restore(torch.optim.SGD([group], lr=0.1), 0, torch.device("cpu"))
    assert "pickle" in reason and sent


def test_a_loaded_state_keeps_the_groups_that_an_outer_optimizer_and_its_schedulers_share():
    def build():
        inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9)
        outer = SimpleNamespace(inner=inner, param_groups=inner.param_groups)
        return inner, outer

    source, _ = build()
    source.param_groups[0]["lr"] = 0.25
    inner, outer = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    scheduler.optimizer = outer
    assert model_reset._plain_schedulers_of(inner) == [scheduler]
    model_reset._load_in_place(inner, source.state_dict())
    outer.param_groups[0]["lr"] = 0.125
    assert (inner.param_groups is outer.param_groups, inner.param_groups[0]["lr"]) == (True, 0.125)
    assert inner.param_groups[0]["params"][0].tolist() == [1.0]
