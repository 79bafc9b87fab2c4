"""Test the replies about a rank's objects, without a rank."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

from rankbook.coordinator.monitor import merge_shards
from rankbook.errors import InvalidArgument
from rankbook.protocol import telemetry
from rankbook.protocol.queries import GetStatistic, GetStatus, QueryFailed
from rankbook.rank.inspect import object_discovery, query_handlers, shard_map, tensor_introspection
from rankbook.rank.inspect.query_handlers import (
    GradientCounter,
    StatisticHandler,
    StatusHandler,
    Utilisation,
    compute_statistic,
)
from rankbook.rank.inspect.tensor_introspection import GilYield, list_variables
from rankbook.rank.process_groups.device_calls import DeviceWatcher
from rankbook.runtime import prepare, prepared
from tests.nccl_stand_in import Device, DeviceError
from tests.nccl_stand_in.ranks import StandInAccelerator


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the objects that earlier tests of this process have prepared, and that are still referenced."""
    monkeypatch.setattr(prepared, "_prepared_models", weakref.WeakKeyDictionary())
    monkeypatch.setattr(prepare, "_wrappers", weakref.WeakKeyDictionary())


def inventory(namespace):
    return object_discovery.measure_objects(object_discovery.discover_objects(namespace, GilYield()), "cpu", GilYield())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(70_001),
        torch.randn(300, 400).t(),
        torch.randn(3, 100_000)[:, ::2],
        torch.tensor(3.5),
        torch.randint(-5, 900, (100_000,)),
        torch.randn(50, 60).to(torch.bfloat16),
    ],
    ids=["long", "transposed", "strided", "scalar", "integers", "bfloat16"],
)
def test_statistics_equal_those_of_torch(tensor):
    statistic, double_tensor = compute_statistic(3, tensor), tensor.to(torch.float64)
    assert (statistic.rank, statistic.nans, statistic.infinities) == (3, 0, 0)
    assert (statistic.minimum, statistic.maximum) == (float(double_tensor.min()), float(double_tensor.max()))
    assert statistic.mean == pytest.approx(float(double_tensor.mean()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("dtype", "device_type", "expected"),
    [
        (torch.float16, "cpu", torch.float64),
        (torch.float32, "cuda", torch.float32),
        (torch.bfloat16, "cuda", torch.float32),
        (torch.int16, "cuda", torch.float32),
        (torch.bool, "cuda", torch.float32),
        (torch.float64, "cuda", torch.float64),
        (torch.int32, "cuda", torch.float64),
        (torch.int64, "cuda", torch.float64),
    ],
)
def test_statistics_of_a_device_are_computed_in_a_type_that_has_the_values(dtype, device_type, expected):
    assert query_handlers._wide_dtype(dtype, device_type) == expected


def test_statistic_counts_non_finite_values_separately():
    tensor = torch.arange(100_000, dtype=torch.float32)
    tensor[5], tensor[50_000], tensor[99_999] = float("nan"), float("inf"), float("-inf")
    statistic = compute_statistic(0, tensor)
    assert (statistic.nans, statistic.infinities, statistic.minimum, statistic.maximum) == (1, 2, 0.0, 99_998.0)
    empty = compute_statistic(0, torch.full((3,), float("nan")))
    assert (empty.minimum, empty.mean, empty.nans) == (None, None, 3)
    assert compute_statistic(0, torch.empty(0)).maximum is None


def test_a_tensor_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("rankbook.rank.inspect.query_handlers.STATISTIC_TIMEOUT", -1.0)
    with pytest.raises(InvalidArgument, match="too large for statistics"):
        compute_statistic(0, torch.ones(10))
    with pytest.raises(InvalidArgument, match="cannot compute the minimum"):
        compute_statistic(0, torch.ones(2, dtype=torch.complex64))


@pytest.fixture
def device() -> Iterator[Device]:
    """Provide a device that begins nothing."""
    device = Device()
    device.held = True
    yield device
    device.held = device.queries_hang = False
    device.end()


class Accelerator(StandInAccelerator):
    def __init__(self, device: Device) -> None:
        self._device = device


def test_a_statistic_waits_for_the_device_with_a_limit(monkeypatch, device):
    """Its read would wait forever for a device that waits in a collective."""
    watcher = DeviceWatcher(Accelerator(device), lambda _error: None)
    tensor = torch.zeros(3)
    monkeypatch.setattr(query_handlers, "STATISTIC_TIMEOUT", 0.01)
    event = device.submit("fill", lambda: tensor.fill_(2))
    with pytest.raises(InvalidArgument, match=r"cpu has not executed within 0\.01 s what is queued on it"):
        compute_statistic(0, tensor, watcher)
    monkeypatch.setattr(query_handlers, "STATISTIC_TIMEOUT", 20.0)
    device.held = False
    assert compute_statistic(0, tensor, watcher).mean == 2 and event.is_done
    device.poison()
    with pytest.raises(DeviceError, match="device-side assert"):
        compute_statistic(0, tensor, watcher)


def test_statistics_that_wait_for_a_device_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(query_handlers, "STATISTIC_TIMEOUT", 0.01)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 1.5)
    handler, question = StatisticHandler(_Work({"model": model}), 0), GetStatistic(1, "model", "weight")
    assert handler.answer(question).statistic.mean == 1.5
    with query_handlers._statistic_lock:
        refused = handler.answer(question)
    assert refused == QueryFailed(1, "an earlier statistic of this rank still waits for its device")
    assert handler.answer(question).statistic.mean == 1.5


def test_a_driver_that_hangs_keeps_no_status_waiting(monkeypatch):
    hanging, calls = threading.Event(), []

    def measure(*_):
        calls.append(threading.current_thread())
        hanging.wait(20)
        return telemetry.MemoryUse(8, 0, 0, 0, 0, 8, 0)

    monkeypatch.setattr(query_handlers, "measure_memory", measure)
    handler = StatusHandler(_Work({}), 0, torch.device("cuda", 0))
    ask = GetStatus(1, True, -1, True, False)
    start = time.monotonic()
    assert [handler.answer(ask).sample.memory for _ in range(2)] == [None, None]
    assert time.monotonic() - start < 5 and len(calls) == 1
    hanging.set()
    calls[0].join(20)
    assert handler.answer(ask).sample.memory.total == 8


def test_the_memory_of_a_shared_device_is_that_of_the_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (40, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 30)
    memory = query_handlers.measure_memory(torch.device("cuda", 0), 7, 7, 14)
    assert memory == telemetry.MemoryUse(80, 7, 7, 14, other=2, free=40, shared=0)


def test_shared_parameters_count_once_and_inner_modules_are_not_listed():
    tied = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(tied, torch.nn.ReLU(), tied, torch.nn.Linear(8, 3))
    model(torch.randn(2, 8)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    report = inventory({"layer": tied, "model": model, "again": model, "box": {"o": optimizer}, "n": 3})
    assert [(holding.kind, holding.name) for holding in report.holdings] == [
        ("model", "model"),
        ("optimizer", "box['o']"),
    ]
    assert report.parameters == sum(parameter.nbytes for parameter in model.parameters())
    assert [item() for item in report.trainable] == list(model.parameters())
    assert report.optimizer == sum(element.nbytes for state in optimizer.state.values() for element in state.values())
    assert tensor_introspection.steps_of_optimizer(optimizer) == 1


def test_a_model_below_an_object_and_a_loader_are_found_by_their_way():
    class Trainer:
        def __init__(self):
            self.model = torch.nn.Linear(2, 2)

        @property
        def trap(self):
            raise AssertionError("a property was asked")

    class Loud:
        def __repr__(self):
            raise AssertionError("a repr was asked")

        def __len__(self):
            raise AssertionError("a length was asked")

        @property
        def __class__(self):
            raise AssertionError("a class was asked")

    loader = DataLoader([1, 2, 3], batch_size=2)
    namespace = {"trainers": [Trainer()], "loud": Loud(), "loader": loader}
    report = inventory(namespace)
    assert [(holding.name, holding.detail) for holding in report.holdings] == [
        ("trainers[0].model", ""),
        ("loader", "batch size 2"),
    ]
    assert [(variable.name, variable.preview) for variable in list_variables(namespace, (), GilYield())] == [
        ("trainers", "1 item"),
        ("loud", ""),
        ("loader", ""),
    ]


def test_variables_report_what_metadata_says():
    namespace = {"_x": 1, "rank": 0, "x": torch.ones(2, 3), "s": "a" * 500, "big": 1 << 5000, "f": len}
    variables = {variable.name: variable for variable in list_variables(namespace, {"rank"}, GilYield())}
    assert list(variables) == ["x", "s", "big"]
    assert (variables["x"].shape, variables["x"].dtype, variables["x"].bytes, variables["x"].device) == (
        (2, 3),
        "float32",
        24,
        "cpu",
    )
    assert len(variables["s"].preview) <= 80
    assert variables["big"].preview == "5001 bits"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_variables_without_a_shape_are_listed_with_the_reason():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    variables = list_variables({"nested": nested, "x": torch.ones(2)}, set(), GilYield())
    assert [(variable.name, variable.shape, variable.bytes) for variable in variables] == [
        ("nested", None, None),
        ("x", (2,), 8),
    ]
    assert variables[0].preview.startswith("no shape")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_have_the_size_of_what_they_store():
    dense = torch.zeros(1000, 8)
    dense[3] = 1.0
    sizes = [tensor_introspection.nbytes(tensor) for tensor in (dense.to_sparse(1), dense.to_sparse_csr(), dense)]
    assert sizes == [8 + 8 * 4, 1001 * 8 + 8 * 8 + 8 * 4, 1000 * 8 * 4]


def test_a_wrapper_has_the_size_of_the_tensors_that_it_wraps():
    packed, scale = torch.zeros(16, 4, dtype=torch.uint8), torch.ones(16, 4, dtype=torch.float16)
    wrapper = torch.nn.Parameter(TwoTensor(packed.float(), scale.float()), requires_grad=False)
    wrapper.a, wrapper.b = packed, scale  # as of a quantized tensor, whose own shape and dtype are those of its values
    assert (tensor_introspection.dtype_of(wrapper), tensor_introspection.nbytes(wrapper)) == ("float32", 64 + 128)
    assert bytes_of_shards({"w": wrapper}, "w") == {"w": 64 + 128}


def test_memory_that_several_tensors_of_a_state_dict_share_counts_once():
    tied, flat = torch.ones(4, 4), torch.ones(10)
    state = {"a": tied, "b": tied.detach(), "c": tied.t(), "first": flat[:4], "second": flat[4:], "empty": flat[:0]}
    sizes = {"a": 64, "b": 0, "c": 0, "first": 16, "second": 24, "empty": 0}
    assert bytes_of_shards({"state": state}, "state") == sizes
    without_memory = {key: torch.ones(2, device="meta") for key in "ab"}
    assert bytes_of_shards({"state": without_memory}, "state") == {"a": 8, "b": 8}


def bytes_of_shards(namespace, name):
    """Return the bytes of rank 0's part by tensor."""
    reply = shard_map.shard_reply(1, namespace, name, 0, GilYield(), others=True)
    merged = merge_shards(name, {0: reply}, (0,), {0: "cpu"})
    return {tensor.key: sum(shard.bytes for shard in tensor.shards) for tensor in merged.tensors}


def test_tensors_whose_bytes_do_not_follow_from_a_shape_are_left_out_of_the_map():
    namespace = {"model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))}
    namespace["state"] = {"a": torch.ones(2), "b": torch.eye(3).to_sparse()}
    reply = shard_map.shard_reply(1, namespace, "model", 0, GilYield(), others=True)
    assert [tensor.key for tensor in reply.tensors] == ["0.weight", "0.bias"]
    assert reply.trouble.startswith("1.weight: no shape")
    reply = shard_map.shard_reply(1, namespace, "state", 0, GilYield(), others=True)
    assert [tensor.key for tensor in reply.tensors] == ["a"]
    assert reply.trouble.startswith("b: sparse")


def test_a_parameter_is_found_by_the_name_that_a_view_shows():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module = inner
    for name in ("m.0.weight", "m.module.0.weight"):
        assert shard_map.resolve_variable({"m": wrapper}, name, GilYield()) is inner[0].weight
    assert shard_map.resolve_variable({"m": wrapper}, "m.1.running_mean", GilYield()) is inner[1].running_mean
    with pytest.raises(InvalidArgument, match="no attribute or item 'nothing'"):
        shard_map.resolve_variable({"m": wrapper}, "m.nothing", GilYield())


def test_states_of_an_optimizer_of_two_models_have_names_of_their_own():
    namespace = {"encoder": torch.nn.Linear(2, 2, bias=False), "decoder": torch.nn.Linear(2, 2, bias=False)}
    optimizer = torch.optim.SGD([*namespace["encoder"].parameters(), *namespace["decoder"].parameters()], momentum=0.9)
    for model in (namespace["encoder"], namespace["decoder"]):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    _, tensors = shard_map.tensors_of({**namespace, "optimizer": optimizer}, "optimizer", GilYield())
    assert [tensor.key for tensor in tensors] == [
        "state.encoder.weight.momentum_buffer",
        "state.decoder.weight.momentum_buffer",
    ]


def test_an_untouched_wrapper_adds_nothing_to_names():
    inner = torch.nn.Linear(2, 2)
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module = inner
    kind, tensors = shard_map.tensors_of({"m": wrapper}, "m", GilYield())
    assert (kind, [item.key for item in tensors]) == ("model", ["weight", "bias"])
    assert shard_map.tensors_of({"m": wrapper}, "m.module", GilYield())[0] == "model"
    with pytest.raises(InvalidArgument, match="variable 'q' is not defined on this rank"):
        shard_map.tensors_of({"m": wrapper}, "q", GilYield())
    with pytest.raises(InvalidArgument, match="is a int"):
        shard_map.tensors_of({"m": 3}, "m", GilYield())


def test_a_state_dict_is_found_whole():
    state = {"model": {"w": torch.ones(2)}, "list": [torch.ones(3)], "step": 3}
    kind, tensors = shard_map.tensors_of({"s": state}, "s", GilYield())
    assert (kind, [item.key for item in tensors]) == ("state dict", ["model.w", "list.0"])


class _Work:
    running = None

    def __init__(self, variables):
        self.variables = variables

    def line(self):
        return None

    def frames(self):
        return ()

    def pending_collective(self):
        return "", 0.0

    def namespace(self):
        return dict(self.variables)

    def hidden(self):
        return ()

    def run_when_idle(self, function):
        function()

    def device_watcher(self):
        return None


def test_second_query_reports_only_changed_holdings():
    work = _Work({"model": torch.nn.Linear(2, 2)})
    handler = StatusHandler(work, 0, torch.device("cpu"))
    first = handler.answer(GetStatus(1, True, -1, True, False))
    assert [holding.name for holding in first.holdings] == ["model"]
    assert handler.answer(GetStatus(1, True, first.version, True, False)).holdings is None
    work.variables["other"] = torch.nn.Linear(2, 2)
    assert handler.answer(GetStatus(1, True, first.version, False, False)).holdings is None  # not yet due
    assert len(handler.answer(GetStatus(1, True, first.version, True, False)).holdings) == 2
    assert handler.answer(GetStatus(1, False, -1, False, False)).sample.memory is None
    assert isinstance(StatisticHandler(work, 0).answer(GetStatistic(1, "model", "nothing")), QueryFailed)


def test_counters_are_always_current_and_searches_become_rarer(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rankbook.rank.inspect.query_handlers.time.monotonic", lambda: now[0])
    monkeypatch.setattr("rankbook.rank.inspect.query_handlers.time.thread_time", lambda: 0.0)
    work = _Work({"model": torch.nn.Linear(2, 2)})
    handler, ask = StatusHandler(work, 0, torch.device("cpu")), GetStatus(1, True, -1, False, False)
    assert handler.cheap_answer(ask) is None, "nothing was searched for yet"
    assert handler.cheap_answer(GetStatus(1, True, -1, True, False)) is None, "a fresh one searches"
    work.running, searched = 7, []
    for tenth in range(160):
        now[0] = 100.0 + tenth / 10
        if (reported := handler.cheap_answer(ask)) is None:
            reported, before = handler.answer(ask), handler._last_search
            searched += [tenth] if before == now[0] else []
        assert [holding.name for holding in reported.holdings] == ["model"]
    assert searched == [0, 10, 30, 70, 110, 150]
    work.running = 8
    now[0] += 1.0
    handler.answer(ask)
    assert handler._last_search == now[0], "another cell may have made anything"


def test_a_checkpoint_that_is_saved_twice_is_reported_once_as_it_is_now(monkeypatch):
    monkeypatch.setattr(telemetry, "listener", None)
    monkeypatch.setattr(telemetry, "_sources", {})  # a save that a test of storage broke off may stand in there
    handler = StatusHandler(_Work({}), 0, torch.device("cpu"))

    def reported():
        return handler.answer(GetStatus(1, False, -1, False, True)).saves

    done = telemetry.CheckpointSave("run", "step-3", 3, "done", 8, 8, 0.5, None, False, "")
    other, again = (msgspec.structs.replace(done, **changed) for changed in ({"name": "step-4"}, {"phase": "writing"}))
    assert reported() == ()
    for save in (done, other):
        telemetry.report_value(save)
    assert reported() == (done, other)
    telemetry.offer_source("checkpoint again", lambda: again)
    assert reported() == (again, other)
    telemetry.withdraw_source("checkpoint again")
    telemetry.report_value(later := msgspec.structs.replace(done, seconds=0.7))
    assert reported() == (other, later)


def test_a_device_of_which_nvml_reports_nothing_is_not_asked_again_and_other_errors_are_reported(monkeypatch):
    not_supported = type("NVMLError_NotSupported", (Exception,), {"__module__": "pynvml"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for error in (not_supported(), ModuleNotFoundError("No module named 'pynvml'"), KeyError("a bug")):
        answers = iter([error])

        def utilization(_device, answers=answers):
            raise next(answers)

        monkeypatch.setattr(torch.cuda, "utilization", utilization)
        utilisation = Utilisation(torch.device("cuda"))
        if isinstance(error, KeyError):
            with pytest.raises(KeyError):
                utilisation.read()
        else:
            assert (utilisation.read(), utilisation.read()) == (None, None)


class Counting:
    """A counter of gradients; `idle` is what the main thread calls between two cells."""

    def __init__(self, *models):
        self.idle = []
        self.counter = GradientCounter(self.idle.append)
        self.parameters = [weakref.ref(parameter) for model in models for parameter in model.parameters()]
        self.request()

    def request(self):
        self.counter.request(self.parameters, timeout=0.0)

    def end_cell(self):
        while self.idle:
            self.idle.pop()()


def gradients_of(model):
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def backward(model):
    model(torch.ones(2, model.in_features)).sum().backward()


def test_gradients_are_counted_at_the_end_of_a_step_once_for_every_request(monkeypatch):
    model, never_stepped = torch.nn.Linear(8, 3), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    counting = Counting(model, never_stepped)
    backward(model)
    assert counting.counter.bytes == 0
    optimizer.step()
    assert counting.counter.bytes == gradients_of(model) > 0
    optimizer.zero_grad()
    monkeypatch.setattr(
        tensor_introspection, "parameters_of_optimizer", lambda _: pytest.fail("nobody has looked again")
    )
    optimizer.step()
    assert counting.counter.bytes > 0
    monkeypatch.undo()
    counting.request()
    optimizer.step()
    assert counting.counter.bytes == 0


def test_gradients_that_no_optimizer_steps_are_counted_between_two_cells():
    model, sharded = torch.nn.Linear(8, 3), torch.nn.Linear(4, 4)
    backward(model)
    counting = Counting(model, sharded)
    counting.request()
    assert len(counting.idle) == 1, "one count is enough, however often somebody looks meanwhile"
    counting.end_cell()
    assert counting.counter.bytes == gradients_of(model) > 0
    model.weight.grad = None
    counting.request()
    counting.end_cell()
    assert counting.counter.bytes == gradients_of(model) == model.bias.nbytes


def test_main_thread_does_not_count_steps_of_a_model_trained_by_another_thread():
    model, trained, ended = torch.nn.Linear(8, 3), threading.Event(), threading.Event()
    optimizer = torch.optim.SGD(model.parameters())
    counting = Counting(model)

    def train():
        backward(model)
        optimizer.step()
        trained.set()
        ended.wait(20)

    thread = threading.Thread(target=train)
    thread.start()
    assert trained.wait(20)
    assert counting.counter.bytes == gradients_of(model) > 0, "counted where it was stepped"
    optimizer.zero_grad()
    counting.request()
    counting.end_cell()
    assert counting.counter.bytes > 0
    ended.set()
    thread.join()
    counting.request()
    counting.end_cell()
    assert counting.counter.bytes == 0


def test_query_waits_for_the_step_count_and_keeps_no_object_alive():
    model = torch.nn.Linear(8, 3)
    backward(model)
    handler = StatusHandler(_Work({"model": model}), 0, torch.device("cpu"))
    reported = handler.answer(GetStatus(1, True, -1, True, False))
    assert reported.sample.memory.gradients == gradients_of(model)
    parameter = weakref.ref(model.weight)
    handler._main_thread.variables.clear()
    del model
    assert parameter() is None


class Meter:
    """A meter of gradients; `idle` is what the main thread calls between two cells."""

    def __init__(self, **models):
        self.idle = []
        self.cell = 0
        self.meter = object_discovery.GradientMeter(self.idle.append, lambda: self.cell)
        self.meter.set_models(
            {
                name: [(key, weakref.ref(value)) for key, value in model.named_parameters()]
                for name, model in models.items()
            }
        )

    def end_cell(self):
        self.cell += 1
        self.meter.request(1)
        while self.idle:
            self.idle.pop()()
        return {gradients.model for gradients in self.meter.latest}


def test_gradients_on_the_meta_device_have_no_norm(capsys):
    model, other = torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2)
    model(torch.ones(1, 2, device="meta")).sum().backward()
    backward(other)
    meter = Meter(model=model, other=other)
    assert meter.end_cell() == {"model", "other"}
    assert [entry.norm for entry in meter.meter.latest[0].gradients.entries] == [None]
    assert capsys.readouterr().err == ""


def test_gradients_that_cannot_be_measured_are_told_once_and_end_nothing(monkeypatch, capsys):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    backward(model)
    backward(other)
    norm, failing = object_discovery._norm, {id(model.weight.grad)}

    def fail_on_one(gradient):
        if id(gradient) in failing:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return norm(gradient)

    monkeypatch.setattr(object_discovery, "_norm", fail_on_one)
    meter = Meter(model=model, other=other)
    assert meter.end_cell() == meter.end_cell() == {"other"}
    told = capsys.readouterr().err
    assert told.count("cannot measure the gradients of `model`") == 1 and "device-side assert" in told


def test_memory_of_a_device_that_has_failed_is_unknown(monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(query_handlers, "measure_memory", fail)
    handler = StatusHandler(_Work({"model": torch.nn.Linear(8, 3)}), 0, torch.device("cpu"))
    for _ in range(2):
        assert handler.answer(GetStatus(1, True, -1, True, False)).sample.memory is None


def test_query_survives_concurrent_changes():
    model, ended, failures = torch.nn.Sequential(), threading.Event(), []
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    namespace = {"model": model, "optimizer": optimizer}

    def look():
        try:
            while not ended.is_set():
                inventory(dict(namespace))
                list_variables(dict(namespace), (), GilYield())
        except Exception as error:  # noqa: BLE001 - the test shows it
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for round_ in range(150):
        for number in range(20):
            model.add_module(str(number), torch.nn.Linear(2, 2))
            optimizer.state[torch.nn.Parameter(torch.ones(2))] = {"step": torch.tensor(1.0), "m": torch.ones(2)}
            namespace[f"x{number}"] = [round_] * number
        model._modules.clear()
        optimizer.state.clear()
        for number in range(20):
            del namespace[f"x{number}"]
    ended.set()
    thread.join()
    assert failures == []
