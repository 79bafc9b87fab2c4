"""The stand-in for NCCL behaves as NCCL does, with the ranks' groups and devices in one process."""

from __future__ import annotations

import _thread
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, WorkResult
from torch.distributed.distributed_c10d import AllgatherOptions

from tests.conftest import wait_until
from tests.nccl_stand_in import BUFFER_BYTES, PARTIAL, Device, DeviceError, StandInGroup, on_device
from tests.nccl_stand_in import group as group_module


def until(is_so: Callable[[], bool]) -> None:
    wait_until(is_so, timeout=30, what="the stand-in")


class Ranks:
    """Groups of one process, a device each. `connect` builds the communicators of all."""

    def __init__(self, size: int) -> None:
        self.store = dist.HashStore()
        self.groups = [StandInGroup(self.store, rank, size, device=Device()) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)

    def __getitem__(self, rank: int) -> StandInGroup:
        return self.groups[rank]

    def at_once(self, call: Callable[[StandInGroup], Any]) -> list[Any]:
        """Call it on all ranks, each on a thread of its own."""
        return list(self.threads.map(call, self.groups))

    def connect(self) -> Ranks:
        self.at_once(StandInGroup.eager_connect_single_device)
        return self

    def synchronize(self) -> None:
        for group in self.groups:
            group.device.synchronize()

    def end(self) -> None:
        for group in self.groups:
            group.abort()
            group.device.end()
        self.threads.shutdown(wait=False)


@pytest.fixture
def make_ranks() -> Iterator[Callable[[int], Ranks]]:
    started: list[Ranks] = []

    def make(size: int) -> Ranks:
        started.append(Ranks(size))
        return started[-1]

    yield make
    for ranks in started:
        ranks.end()


@pytest.fixture
def ranks(make_ranks: Callable[[int], Ranks]) -> Ranks:
    """Return two connected ranks."""
    return make_ranks(2).connect()


@pytest.fixture
def lonely(ranks: Ranks) -> StandInGroup:
    """Return rank 0 of two, whose peer begins nothing."""
    return ranks[0]


def options(kind: type, **values: Any) -> Any:
    collective_options = kind()
    collective_options.asyncOp = values.pop("asyncOp", False)
    for name, value in values.items():
        setattr(collective_options, name, value)
    return collective_options


def sync(kind: type = dist.AllreduceOptions, **values: Any) -> Any:
    return options(kind, **values)


def ASYNC() -> Any:
    return options(dist.AllreduceOptions, asyncOp=True)


# Launching and waiting


def test_a_synchronous_collective_returns_no_work_and_goes_on(lonely):
    tensor = torch.ones(2)
    assert lonely.allreduce([tensor], sync()) is None
    assert lonely.device.pending == ["all_reduce"]
    assert tensor.tolist() == [1, 1]


def test_the_wait_of_an_asynchronous_collective_returns_at_once(lonely):
    work = lonely.allreduce([torch.ones(2)], ASYNC())
    assert work.wait()
    assert work.wait(timedelta(seconds=1))
    assert not work.is_completed()
    assert lonely.device.pending == ["all_reduce"]


def test_the_future_of_a_collective_has_its_value_before_the_device_is_done(lonely):
    tensor = torch.ones(2)
    future = lonely.allreduce([tensor], ASYNC()).get_future()
    assert future.done()
    assert future.value() == [tensor]


def test_a_synchronize_waits_for_the_peers(ranks):
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    ranks[0].allreduce([tensors[0]], sync())
    waits = ranks.threads.submit(ranks[0].device.synchronize)
    assert not waits.done()
    work = ranks[1].allreduce([tensors[1]], ASYNC())
    waits.result(30)
    ranks.synchronize()
    assert work.is_completed()
    assert [tensor.item() for tensor in tensors] == [3, 3]


def test_an_interrupt_is_raised_once_a_synchronize_has_ended(lonely):
    lonely.device.held = True
    lonely.device.submit("kernel", lambda: None)
    interrupted = threading.Event()

    def interrupt() -> None:
        _thread.interrupt_main()
        interrupted.set()
        lonely.device.held = False

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
    thread = threading.Timer(0.01, interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        lonely.device.synchronize()
    thread.join()
    assert interrupted.is_set()
    assert not lonely.device.pending


def test_a_synchronous_barrier_waits_for_the_device_and_returns_after_an_abort(lonely, ranks):
    waits = ranks.threads.submit(lonely.barrier, sync(dist.BarrierOptions))
    until(lambda: lonely.device.pending == ["barrier"])
    assert not waits.done()
    lonely.abort()
    assert waits.result(30) is None


# The device


def test_a_held_device_begins_nothing(lonely):
    lonely.device.held = True
    done: list[int] = []
    event = lonely.device.submit("kernel", lambda: done.append(1))
    assert not event.query()
    lonely.device.held = False
    event.synchronize()
    assert done == [1]


def test_a_slow_device_pauses_before_every_operation(lonely):
    lonely.device.delay = 3600.0
    done: list[int] = []
    lonely.device.submit("kernel", lambda: done.append(1))
    assert lonely.device.pending == ["kernel"]
    assert not lonely.device.is_idle
    assert not done


def test_an_error_on_the_device_is_raised_by_everything_afterwards(lonely):
    def fail() -> None:
        raise IndexError("out of range")

    lonely.device.submit("index", fail)
    with pytest.raises(DeviceError, match="index failed: IndexError: out of range"):
        lonely.device.synchronize()
    for use in (
        lonely.device.synchronize,
        lambda: lonely.allreduce([torch.ones(2)], sync()),
        lonely.device.record().query,
        lambda: lonely.send([torch.ones(1)], 1),
    ):
        with pytest.raises(DeviceError, match="out of range"):
            use()


def test_a_poisoned_device_drops_what_is_queued_and_its_peer_waits_on(ranks):
    ranks[0].device.held = True
    done: list[int] = []
    ranks[0].device.submit("kernel", lambda: done.append(1))
    ranks[0].device.poison()
    ranks[1].allreduce([torch.ones(2)], sync())
    with pytest.raises(DeviceError, match="device-side assert"):
        ranks[0].device.synchronize()
    until(lambda: not ranks[0].device.pending)
    assert not done
    assert ranks[1].device.pending == ["all_reduce"]


def test_query_blocks_until_released(lonely, ranks):
    work = lonely.allreduce([torch.ones(2)], ASYNC())
    lonely.device.queries_hang = True
    query: Future[bool] = ranks.threads.submit(work.is_completed)
    assert not query.done()
    lonely.device.queries_hang = False
    assert query.result(30) is False


def test_abort_blocks_until_released(lonely, ranks):
    lonely.allreduce([torch.ones(2)], sync())
    lonely.device.aborts_hang = True
    abort = ranks.threads.submit(lonely.abort)
    assert lonely.device.pending
    lonely.device.aborts_hang = False
    abort.result(30)
    lonely.device.synchronize()


def test_a_watchdog_ends_the_process_when_a_collective_does_not_end(lonely):
    reasons: list[str] = []
    lonely.device.watch(0.01, reasons.append)
    lonely.allreduce([torch.ones(2)], sync())
    until(lambda: bool(reasons))
    assert reasons == ["watchdog: all_reduce ran longer than 0.01 s"]


# Abort


def test_the_watchdog_of_a_group_finds_what_takes_longer_than_its_timeout(lonely, monkeypatch):
    monkeypatch.setattr(group_module, "WATCHDOG_PATIENCE", 0.3)
    tensor = torch.ones(4)
    lonely.set_timeout(timedelta(seconds=0.1))
    assert lonely.get_error() == ErrorType.SUCCESS
    work = lonely.allreduce([tensor], ASYNC())
    assert not work.is_completed() and not work.get_future_result().done()
    until(lambda: lonely.get_error() == ErrorType.TIMEOUT)
    # The work says that it has ended, while the device still waits.
    assert work.is_completed() and work.get_future_result().value() == int(WorkResult.TIMEOUT)
    assert lonely.device.pending == ["all_reduce"]
    until(lambda: not lonely.device.pending)
    assert tensor.tolist() == [PARTIAL, PARTIAL, 1, 1], "the watchdog has aborted the communicator, without an error"


def test_a_work_that_the_device_has_executed_has_a_result(ranks):
    works = ranks.at_once(lambda group: group.allreduce([torch.ones(2)], ASYNC()))
    ranks.synchronize()
    assert [work.get_future_result().value() for work in works] == [int(WorkResult.SUCCESS)] * 2


def test_a_lost_connection_is_an_error_of_the_group_and_the_device_waits_on(ranks):
    ranks[0].break_connection()
    works = ranks.at_once(lambda group: group.allreduce([torch.ones(2)], ASYNC()))
    assert ranks[0].get_error() == ErrorType.COMM_ERROR
    assert works[0].is_completed() and works[0].get_future_result().value() == int(WorkResult.COMM_ERROR)
    until(lambda: not ranks[1].device.pending)
    assert ranks[0].device.pending == ["all_reduce"]
    ranks[0].abort()
    until(lambda: not ranks[0].device.pending)


def test_launches_and_connections_fail_with_the_error_that_a_test_sets(make_ranks):
    ranks = make_ranks(2)
    ranks[0].device.refusal = "NCCL error in: NCCLUtils.cpp:94"
    for refused in (ranks[0].eager_connect_single_device, lambda: ranks[0].allreduce([torch.ones(1)])):
        with pytest.raises(dist.DistBackendError, match="NCCL error in"):
            refused()


# Graphs


def test_a_graph_executes_what_it_has_recorded_as_often_as_it_is_replayed(ranks):
    totals = [torch.full((2,), rank + 1.0) for rank in range(2)]

    def record(group):
        with group.device.capture() as graph, on_device(group.device):
            assert group.allreduce([totals[group.rank()]], sync()) is None
            totals[group.rank()].mul_(2)
        return graph

    graphs = [record(group) for group in ranks.groups]
    assert [total.tolist() for total in totals] == [[1, 1], [2, 2]]
    for expected in (6, 24):  # 2 x (1 + 2), and 2 x (6 + 6)
        for graph in graphs:
            graph.replay()
        ranks.synchronize()
        assert [total.tolist() for total in totals] == [[expected] * 2] * 2


def test_a_query_of_a_thread_makes_a_recording_invalid_unless_the_thread_is_relaxed(lonely, ranks):
    event = lonely.device.record()
    not_permitted = functools.partial(pytest.raises, DeviceError, match="not permitted when stream is capturing")
    ask_from_thread = lambda: ranks.threads.submit(event.query).result()  # noqa: E731 - as the other two
    for ask in (ask_from_thread, event.query, lonely.device.synchronize):
        capture = lonely.device.capture()
        capture.__enter__()
        with not_permitted():
            ask()
        with pytest.raises(DeviceError, match="due to a previous error during capture"):
            capture.__exit__(None, None, None)

    def ask_relaxed():
        lonely.device.relax_thread()
        return event.query()

    with lonely.device.capture() as graph:
        assert ranks.threads.submit(ask_relaxed).result()
    assert not graph.error


def test_an_aborted_collective_ends_with_partial_data_and_raises_nothing(lonely):
    tensor = torch.ones(4)
    work = lonely.allreduce([tensor], ASYNC())
    lonely.abort()
    assert work.wait()
    lonely.device.synchronize()
    assert work.is_completed()
    assert work.exception() is None
    assert tensor.tolist() == [PARTIAL, PARTIAL, 1, 1]


def test_what_is_queued_behind_an_aborted_collective_is_executed_with_partial_data(lonely):
    with on_device(lonely.device):
        weight, gradient = torch.ones(2), torch.ones(2)
        lonely.allreduce([gradient], sync())
        weight.sub_(gradient)
        lonely.abort()
        assert weight.tolist() == [1 - PARTIAL, 0]


def test_a_collective_after_an_abort_is_refused(lonely):
    lonely.abort()
    with pytest.raises(dist.DistBackendError, match="communicator was aborted"):
        lonely.allreduce([torch.ones(2)], sync())


# Communicators


def test_the_first_collective_waits_for_all_members_and_no_abort_reaches_it(make_ranks):
    ranks = make_ranks(2)
    first = ranks.threads.submit(ranks[0].allreduce, [torch.ones(2)], sync())
    until(lambda: ranks.store.num_keys() == 2)  # the id, and that rank 0 has joined
    ranks[0].abort()
    assert not first.done()
    assert not ranks[0].device.pending
    ranks[1].eager_connect_single_device()
    assert first.result(30) is None
    ranks[0].abort()
    ranks[0].device.synchronize()


def test_a_rank_waits_for_the_id_of_a_communicator_as_long_as_the_store_allows(make_ranks):
    ranks = make_ranks(2)
    ranks.store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(dist.DistBackendError, match=r"retrieving ncclUniqueId.*wait timeout after 10ms"):
        ranks[1].allreduce([torch.ones(2)], sync())


def test_connected_members_begin_a_collective_without_one_another(make_ranks):
    ranks = make_ranks(2)
    assert not ranks[0].is_connected
    ranks.connect()
    assert ranks[0].is_connected
    assert ranks[0].allreduce([torch.ones(2)], sync()) is None


# Collectives

VALUES = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])]


def input_of(group: StandInGroup) -> torch.Tensor:
    return VALUES[group.rank()].clone()


def all_reduce(group: StandInGroup, operation: Any = dist.ReduceOp.SUM) -> list[torch.Tensor]:
    group.allreduce([tensor := input_of(group)], sync(reduceOp=operation))
    return [tensor]


def coalesced(group: StandInGroup) -> list[torch.Tensor]:
    tensors = [input_of(group), -input_of(group)]
    group.allreduce_coalesced(tensors, sync(dist.AllreduceCoalescedOptions))
    return tensors


def broadcast(group: StandInGroup) -> list[torch.Tensor]:
    group.broadcast([tensor := input_of(group)], sync(dist.BroadcastOptions, rootRank=1))
    return [tensor]


def reduce(group: StandInGroup) -> list[torch.Tensor]:
    group.reduce([tensor := input_of(group)], sync(dist.ReduceOptions, rootRank=1))
    return [tensor]


def all_gather(group: StandInGroup) -> list[torch.Tensor]:
    group.allgather([outputs := [torch.zeros(4), torch.zeros(4)]], [input_of(group)], sync(AllgatherOptions))
    return outputs


def all_gather_single(group: StandInGroup) -> list[torch.Tensor]:
    group._allgather_base(output := torch.zeros(2, 4), input_of(group), sync(AllgatherOptions))
    return [output.flatten()]


def all_gather_coalesced(group: StandInGroup) -> list[torch.Tensor]:
    group.allgather_into_tensor_coalesced([output := torch.zeros(8)], [input_of(group)], sync(AllgatherOptions))
    return [output]


def gather(group: StandInGroup) -> list[torch.Tensor]:
    outputs = [torch.zeros(4), torch.zeros(4)]
    group.gather([outputs] if group.rank() == 1 else [], [input_of(group)], sync(dist.GatherOptions, rootRank=1))
    return outputs


def scatter(group: StandInGroup) -> list[torch.Tensor]:
    inputs = [list(input_of(group).chunk(2))] if group.rank() == 1 else []
    group.scatter([output := torch.zeros(2)], inputs, sync(dist.ScatterOptions, rootRank=1))
    return [output]


def reduce_scatter(group: StandInGroup) -> list[torch.Tensor]:
    inputs = list(input_of(group).chunk(2))
    group.reduce_scatter([output := torch.zeros(2)], [inputs], sync(dist.ReduceScatterOptions))
    return [output]


def reduce_scatter_single(group: StandInGroup) -> list[torch.Tensor]:
    group._reduce_scatter_base(output := torch.zeros(2), input_of(group), sync(dist.ReduceScatterOptions))
    return [output]


def reduce_scatter_coalesced(group: StandInGroup) -> list[torch.Tensor]:
    group.reduce_scatter_tensor_coalesced(
        [output := torch.zeros(2)], [input_of(group)], sync(dist.ReduceScatterOptions)
    )
    return [output]


def all_to_all(group: StandInGroup) -> list[torch.Tensor]:
    outputs = [torch.zeros(2), torch.zeros(2)]
    group.alltoall(outputs, list(input_of(group).chunk(2)), sync(dist.AllToAllOptions))
    return outputs


def all_to_all_single(group: StandInGroup) -> list[torch.Tensor]:
    sizes = [[1, 3], [1, 3]][group.rank()], [[1, 1], [3, 3]][group.rank()]
    output = torch.zeros(sum(sizes[1]))
    group.alltoall_base(output, input_of(group), sizes[1], sizes[0], sync(dist.AllToAllOptions))
    return [output]


def send_and_receive(group: StandInGroup) -> list[torch.Tensor]:
    tensor = input_of(group)
    if group.rank() == 0:
        assert group.send([tensor], 1).wait()
    else:
        work = group.recv([tensor], 0)
        assert work.wait()
        assert work.source_rank() == 0
    return [tensor]


FIRST, SECOND = ([float(number) for number in value] for value in VALUES)
SUM = [11.0, 22.0, 33.0, 44.0]
BOTH = FIRST + SECOND


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (all_reduce, [SUM, SUM]),
        (lambda group: all_reduce(group, dist.ReduceOp.AVG), [[number / 2 for number in SUM]] * 2),
        (lambda group: all_reduce(group, dist.ReduceOp.MIN), [FIRST, FIRST]),
        (lambda group: all_reduce(group, dist.ReduceOp.MAX), [SECOND, SECOND]),
        (lambda group: all_reduce(group, dist.ReduceOp.PRODUCT), [[10.0, 40.0, 90.0, 160.0]] * 2),
        (coalesced, [SUM + [-number for number in SUM]] * 2),
        (broadcast, [SECOND, SECOND]),
        (reduce, [FIRST, SUM]),
        (all_gather, [BOTH, BOTH]),
        (all_gather_single, [BOTH, BOTH]),
        (all_gather_coalesced, [BOTH, BOTH]),
        (gather, [[0.0] * 8, BOTH]),
        (scatter, [[10.0, 20.0], [30.0, 40.0]]),
        (reduce_scatter, [[11.0, 22.0], [33.0, 44.0]]),
        (reduce_scatter_single, [[11.0, 22.0], [33.0, 44.0]]),
        (reduce_scatter_coalesced, [[11.0, 22.0], [33.0, 44.0]]),
        (all_to_all, [[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]]),
        (all_to_all_single, [[1.0, 10.0], [2.0, 3.0, 4.0, 20.0, 30.0, 40.0]]),
        (send_and_receive, [FIRST, FIRST]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_collectives_return_the_documented_results(ranks, collective, expected):
    outputs = ranks.at_once(collective)
    ranks.synchronize()
    assert [torch.hstack(output).tolist() for output in outputs] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_of_all_types_and_shapes_travel(ranks, dtype):
    for shape in ((), (0,), (2, 3)):
        tensors = [torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)]
        ranks.at_once(lambda group, tensors=tensors: group.broadcast([tensors[group.rank()]]))
        ranks.synchronize()
        assert torch.equal(*tensors)


def test_no_keys_pile_up_in_the_store(ranks):
    counts = []
    for _ in range(5):
        ranks.at_once(all_reduce)
        ranks.synchronize()
        counts.append(ranks.store.num_keys())
    assert counts[1:] == counts[1:2] * 4


@pytest.mark.parametrize(
    "other", [lambda group: group.barrier(ASYNC()), lambda group: group.allreduce([torch.ones(3)], ASYNC())]
)
def test_collectives_that_do_not_match_hang_until_an_abort(ranks, other):
    tensor = torch.ones(2)
    ranks[0].allreduce([tensor], sync())
    other(ranks[1])
    until(lambda: ranks.store.check(["communicator-all/1/0", "communicator-all/1/1"]))
    assert [len(group.device.pending) for group in ranks.groups] == [1, 1]
    for group in ranks.groups:
        group.abort()
    ranks.synchronize()
    assert tensor.tolist() == [PARTIAL, 1]


# Messages


def exchange(group: StandInGroup, *, coalesced: bool) -> torch.Tensor:
    """Send to the next rank, and receive from the one before; messages are larger than a buffer."""
    count = BUFFER_BYTES // 4 + 1
    sent, received = torch.full((count,), float(group.rank())), torch.zeros(count)
    if coalesced:
        group._start_coalescing(None)
    group.send([sent], (group.rank() + 1) % group.size())
    group.recv([received], (group.rank() - 1) % group.size())
    if coalesced:
        assert group._end_coalescing(None).wait()
    return received


def test_large_messages_to_one_another_hang(ranks):
    ranks.at_once(lambda group: exchange(group, coalesced=False))
    until(lambda: ranks.store.check(["communicator-all/message-0-1-1/0", "communicator-all/message-1-0-1/1"]))
    assert [group.device.pending for group in ranks.groups] == [["send", "recv"]] * 2
    for group in ranks.groups:
        group.abort()
    ranks.synchronize()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("connected", [False, True])
def test_coalesced_messages_make_a_ring(make_ranks, size, connected):
    ranks = make_ranks(size)
    if connected:
        ranks.connect()
    received = ranks.at_once(lambda group: exchange(group, coalesced=True))
    ranks.synchronize()
    assert [tensor.unique().tolist() for tensor in received] == [[(rank - 1) % size] for rank in range(size)]


def test_a_ring_of_three_that_is_not_connected_blocks_in_pairs(make_ranks):
    ranks = make_ranks(3)
    calls = [ranks.threads.submit(exchange, group, coalesced=False) for group in ranks.groups]
    # 0-1, 1-2 and 0-2: rank 2 waits for the id that rank 0 would set.
    until(lambda: ranks.store.check(["communicator-0:1/joined/0", "communicator-1:2/joined/1"]))
    assert not any(call.done() for call in calls)
    for name, members in {"0:1": (0, 1), "1:2": (1, 2), "0:2": (0, 2)}.items():  # lets the threads end
        ranks.store.set(f"communicator-{name}/id", "")
        for member in members:
            ranks.store.set(f"communicator-{name}/joined/{member}", "")
    for call in calls:
        call.result(30)


# Tensor operations


@pytest.fixture
def device() -> Iterator[Device]:
    """Return a held device, which executes the tensor operations of this thread."""
    device = Device()
    with on_device(device):
        device.held = True
        yield device
        device.held = False
    device.end()


def released(device: Device, read: Callable[[], Any]) -> Any:
    """Return what `read` gives, after a check that it waits for the device."""
    timer = threading.Timer(0.01, setattr, (device, "held", False))
    timer.start()
    value = read()
    assert not device.held
    timer.join()
    return value


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda tensor: tensor.sum().item(), 6.0),
        (lambda tensor: float(tensor[0, 1]), 2.0),
        (lambda tensor: tensor.tolist(), [[2.0, 2.0, 2.0]]),
        (lambda tensor: tensor.cpu().shape, (1, 3)),
        (lambda tensor: tensor.numpy().sum(), 6.0),
        (repr, "tensor([[2., 2., 2.]])"),
        (lambda tensor: bool((tensor == 2).all()), True),
        (lambda tensor: tensor.nonzero().shape, (3, 2)),
        (lambda tensor: torch.equal(tensor, tensor.clone()), True),
    ],
)
def test_reading_values_waits_for_the_device(device, read, expected):
    tensor = torch.ones(1, 3) + 1
    assert device.pending == ["aten::add.Tensor"]
    assert released(device, lambda: read(tensor)) == expected


def test_operations_are_queued_with_the_shapes_types_and_views_of_their_results(device):
    tensor = torch.ones(2, 3, dtype=torch.float32)
    results = [tensor * 2.0, tensor.t() @ tensor, tensor.sum(0), tensor > 0, tensor.bfloat16(), tensor.sum() * 2.0]
    view = results[0].view(3, 2)
    view[1].zero_()
    kinds = [(tuple(result.shape), result.dtype) for result in results]
    assert kinds[:3] == [((2, 3), torch.float32), ((3, 3), torch.float32), ((3,), torch.float32)]
    assert kinds[3:] == [((2, 3), torch.bool), ((2, 3), torch.bfloat16), ((), torch.float32)]
    assert len(device.pending) >= 7
    assert released(device, results[0].tolist) == [[2, 2, 0], [0, 2, 2]]
    assert results[5].item() == 12


def test_gradients_and_an_optimizer_step_are_queued(device):
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    (weight * torch.arange(3.0)).sum().backward()
    optimizer.step()
    assert "aten::add_.Tensor" in device.pending or "aten::_foreach_add_.List" in device.pending
    assert released(device, weight.tolist) == [1, 0.5, 0]


def test_wrong_arguments_are_refused_by_the_operation_itself(device):
    first, second = torch.ones(2), torch.ones(3)
    with pytest.raises(RuntimeError, match="must match the size"):
        released(device, lambda: first + second)


def test_collectives_are_in_order_with_the_operations_around_them(ranks):
    with on_device(ranks[0].device):
        ranks[0].device.held = True
        tensor = torch.ones(2) + 1
        ranks[0].allreduce([tensor], sync())
        tensor.add_(1)
        ranks[1].allreduce([torch.ones(2)], sync())
        ranks[0].device.held = False
        assert tensor.tolist() == [4, 4]


def test_freed_memory_stays_valid_for_queued_operations(device):
    tensor = torch.ones(3)
    doubled = tensor * 2
    tensor.untyped_storage().resize_(0)
    assert released(device, doubled.tolist) == [2, 2, 2]


def test_an_idle_device_executes_at_once():
    device = Device()
    with on_device(device):
        assert (torch.ones(2) + 1).tolist() == [2, 2]
        assert device._thread is None
