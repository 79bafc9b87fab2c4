"""Test what status views show of real ranks, also while these are busy, and that it costs nothing unwatched."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch

import rankbook
from rankbook.errors import CellError, InvalidArgument, RankLostError
from rankbook.magics.views import ClusterViewSource
from rankbook.protocol.queries import GetStatus, Question
from rankbook.protocol.telemetry import Placement
from tests.conftest import stop_process, wait_until

pytestmark = pytest.mark.processes

MODELS = """
import copy, os, time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.ReLU(), torch.nn.Linear(10, 7))

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 12)).sum().backward()
    optimizer.step()
    return optimizer

mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
ddp = DistributedDataParallel(net())
sharded = net()
for layer in (sharded[0], sharded[2]):
    fully_shard(layer)
fully_shard(sharded)
both = parallelize_module(net(), mesh['tp'], {'0': ColwiseParallel(), '2': RowwiseParallel()})
fully_shard(both, mesh=mesh['dp'])
optimizers = [train(each) for each in (ddp, sharded, both)]
uneven = distribute_tensor(torch.arange(35.).reshape(5, 7), mesh, [Shard(0), Shard(1)])
copies = distribute_tensor(torch.arange(6.), mesh, [Replicate(), Shard(0)])
few = distribute_tensor(torch.arange(3.), init_device_mesh('cpu', (4,)), [Shard(0)])
print('ready on', rank)
"""

TRUTH = """
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

def box(tensor):
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)

def boxes(model):
    model = getattr(model, 'module', model)
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: (*box(each), tuple(each.shape), local(each).nbytes) for name, each in named}

import itertools
sizes = {
    'parameters': sum(local(p).nbytes for m in (ddp, sharded, both) for p in m.parameters()),
    'gradients': sum(local(p.grad).nbytes for m in (ddp, sharded, both) for p in m.parameters()),
    'optimizer': sum(local(t).nbytes for o in optimizers for s in o.state.values() for t in s.values()),
}
models = {name: boxes(globals()[name]) for name in ('ddp', 'sharded', 'both')}
tensors = {name: (*box(globals()[name]), local(globals()[name]).nbytes) for name in ('uneven', 'copies', 'few')}
"""


@pytest.fixture(scope="module")
def cluster():
    with rankbook.Cluster(4) as cluster:
        cluster.run(MODELS)
        cluster.run(TRUTH)
        yield cluster


@contextlib.contextmanager
def running(cluster, code):
    """Run `code` on all ranks during the block; interrupt it at the end."""
    thread = threading.Thread(target=_run, args=(cluster, code))
    thread.start()
    cells = [0] * cluster.world_size
    wait_until(lambda: [rank.cell for rank in cluster.placement().ranks] == cells, timeout=20, what="the cell's start")
    try:
        yield
    finally:
        cluster.interrupt()
        thread.join(20)
        assert not thread.is_alive()


def _run(cluster, code):
    with contextlib.suppress(KeyboardInterrupt, CellError, RankLostError):
        cluster.run(code)


@contextlib.contextmanager
def counted(cluster):
    """The messages that are sent to ranks meanwhile."""
    hub, sent = cluster._processes._hub, []
    send = hub.send

    def count(rank, message, frames=()):
        sent.append(message)
        return send(rank, message, frames)

    questions = cluster._processes.driver.liveness.queries
    hub.send = questions._send = count
    try:
        yield sent
    finally:
        hub.send = questions._send = send


def monitor_threads():
    return [item.name for item in threading.enumerate() if item.name.startswith(("rankbook-monitor", "rankbook-place"))]


@pytest.mark.slow
def test_memory_is_what_torch_says(cluster):
    truth = cluster.pull("sizes")

    def shown():
        return [
            {name: getattr(row.memory, name) for name in sizes}
            for row, sizes in zip(cluster.placement().ranks, truth, strict=True)
        ]

    # Gradients are counted on the main thread, for which a query waits only for a moment.
    wait_until(lambda: shown() == truth, timeout=20, what="the sizes of all tensors")
    for row in cluster.placement().ranks:
        memory = row.memory
        assert memory.total == memory.parameters + memory.gradients + memory.optimizer + memory.other + memory.free
        assert 0 < memory.shared < memory.total - memory.free
        assert (row.state, row.device, row.steps) == ("idle", "cpu", 1)


def test_models_and_optimizers_are_reported_with_their_wrappers(cluster):
    truth = cluster.pull("models")
    for row, models in zip(cluster.placement().ranks, truth, strict=True):
        reported = {holding.name: holding for holding in row.holdings}
        assert {name: reported[name].wrapper for name in models} == {"ddp": "DDP", "sharded": "FSDP2", "both": "FSDP2"}
        assert {reported[name].class_name for name in models} == {"Sequential"}
        for name, parameters in models.items():
            assert reported[name].bytes == sum(parameter[3] for parameter in parameters.values())
            assert reported[name].parameters == 12 * 10 + 10 + 10 * 7 + 7
        optimizers = [item for item in row.holdings if item.kind == "optimizer"]
        assert [(optimizer.name, optimizer.class_name) for optimizer in optimizers] == [
            (f"optimizers[{number}]", "AdamW") for number in range(3)
        ]
        assert reported["sharded"].detail == "Shard(dim=0): 4"


@pytest.mark.parametrize("name", ["ddp", "sharded", "both"])
def test_shards_of_a_model_are_where_torch_says(cluster, name):
    truth = cluster.pull("models")
    report = cluster.shards(name)
    assert (report.kind, report.trouble) == ("model", "")
    assert {item.key for item in report.tensors} == truth[0][name].keys()
    for tensor in report.tensors:
        assert [element.rank for element in tensor.shards] == [0, 1, 2, 3]
        for shard in tensor.shards:
            assert (shard.offset, shard.shape, tensor.shape, shard.bytes) == truth[shard.rank][name][tensor.key]


@pytest.mark.parametrize("name", ["uneven", "copies", "few"])
def test_shards_of_a_dtensor_are_where_torch_says(cluster, name):
    truth = cluster.pull("tensors")
    report = cluster.shards(name)
    (tensor,) = report.tensors
    assert report.kind == "DTensor"
    for shard in tensor.shards:
        offset, shape, nbytes = truth[shard.rank][name]
        assert (shard.shape, shard.bytes) == (shape, nbytes)
        assert shard.offset == offset or not nbytes
    replicas = {"uneven": [0, 0, 0, 0], "copies": [0, 0, 1, 1], "few": [0, 0, 0, 0]}
    assert [item.replica for item in tensor.shards] == replicas[name]


def test_regions_of_other_ranks_are_computed_identically(cluster):
    reported = cluster._monitor
    merged = cluster.shards("both")
    driver = cluster._processes.driver
    answering, driver.live_ranks = driver.live_ranks, lambda: (2,)
    try:
        alone = reported.shards("both")
    finally:
        driver.live_ranks = answering
    assert alone.tensors == merged.tensors
    assert "rank 0" in alone.trouble or "ranks 0" in alone.trouble


def test_an_optimizers_state_is_named_by_its_parameters(cluster):
    cluster.run("sgd = optimizers[1]")
    keys = {tensor.key for tensor in cluster.shards("sgd").tensors}
    assert {"state.0.weight.exp_avg", "state.2.bias.step"} <= keys
    shards = {item.key: item.shards for item in cluster.shards("sgd").tensors}
    weights = {element.key: element.shards for element in cluster.shards("sharded").tensors}
    assert shards["state.0.weight.exp_avg"] == weights["0.weight"]
    cluster.run("del sgd")


def test_a_statistic_is_of_the_ranks_own_part(cluster):
    cluster.run(
        "part = both[0].weight.to_local(); numbers = (float(part.min()), float(part.mean()), float(part.max()))"
    )
    for rank, numbers in enumerate(cluster.pull("numbers")):
        report = cluster.statistic("both", "0.weight", rank)
        assert (report.minimum, report.maximum) == (numbers[0], numbers[2])
        assert report.mean == pytest.approx(numbers[1], rel=1e-5)
    with pytest.raises(InvalidArgument, match=r"no tensor 'w' on this rank"):
        cluster.statistic("both", "w", 0)


def test_detail_has_stack_output_and_variables(cluster):
    code = "def wait():\n    print('\\x1b[31mbusy', rank)\n    time.sleep(600)\nwait()"
    places = ["Cell In[0], line 4", "Cell In[0], line 3, in wait"]
    with running(cluster, code):
        details = []

        def sleeps():
            details[:] = [cluster.detail(2)]
            return "busy 2" in details[0].output and [item.split(":")[0] for item in details[0].stack] == places

        wait_until(sleeps, timeout=20, what="the output, and the sleep behind it")
        (report,) = details
        reported = {variable.name: variable for variable in report.variables}
        assert (reported["uneven"].shape, reported["uneven"].type, reported["uneven"].dtype) == (
            (5, 7),
            "DTensor",
            "float32",
        )
        assert "rank" not in reported
        assert "torch" not in reported


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("time.sleep(600)", "running"),
        ("while True: pass", "running"),
        ("if rank: dist.barrier()\nelse: time.sleep(600)", "waiting"),
    ],
    ids=["sleep", "loop", "collective"],
)
def test_answers_come_while_a_cell_blocks(cluster, code, state):
    with running(cluster, code):
        states = ["running", *[state] * 3]
        wait_until(lambda: [rank.state for rank in cluster.placement().ranks] == states, timeout=20, what=f"{states}")
        # Four ranks compete for the cores; without an answer from the cell, these raise or give unresponsive ranks.
        cluster.detail(1, timeout=10)
        assert cluster.shards("both", timeout=10).tensors
        cluster.statistic("ddp", "0.weight", 1, timeout=10)
        rows = cluster.placement(timeout=10).ranks
        assert [row.cell for row in rows] == [0] * 4
        assert rows[1].line == 1
        assert [item.lags for item in rows] == [state == "waiting", False, False, False]
        assert ("barrier" in rows[1].waits_for) == (state == "waiting")


def test_watch_updates_at_most_ten_times_a_second_and_ends_with_the_last_state(cluster):
    updates, start = [], time.monotonic()
    end = cluster.watch("placement", lambda item: updates.append((time.monotonic(), item)))
    cluster.run("import math\nfor _ in range(150): x = torch.ones(100_000 * (_ % 7 + 1)); time.sleep(0.01)")
    wait_until(lambda: all(rank.state == "idle" for rank in updates[-1][1].ranks), timeout=10, what="the last state")
    end()
    assert any(element.ranks[0].state == "running" for _, element in updates)
    assert len(updates) <= 10 * (updates[-1][0] - start) + 2  # one that is late may come right before the next
    wait_until(lambda: not monitor_threads(), timeout=10, what="the threads' end")


def test_unwatched_cluster_sends_and_imports_nothing(cluster):
    def questions(sent):
        return [item for item in sent if isinstance(item, Question)]

    with counted(cluster) as sent:
        cluster.run("time.sleep(0.4)")
        assert questions(sent) == []
        end = cluster.watch("status", lambda _: None)
        wait_until(lambda: len(questions(sent)) >= 12, timeout=10, what="three rounds")
        assert {(type(look), look.holdings) for look in questions(sent)} == {(GetStatus, False)}
        end()
        wait_until(lambda: not monitor_threads(), timeout=10, what="the threads' end")
        sent.clear()
        cluster.run("time.sleep(0.4)")
        assert questions(sent) == []


def test_views_get_states_again_after_an_unexpected_error(cluster, monkeypatch):
    errors, updates = [], []
    monkeypatch.setattr(threading, "excepthook", lambda error: errors.append(error.exc_type))
    with monkeypatch.context() as patch:
        patch.setattr(cluster._monitor, "_query_ranks", lambda *_args, **_options: 1 / 0)
        first = cluster.watch("status", updates.append)
        wait_until(lambda: errors == [ZeroDivisionError], timeout=10, what="the error")
    wait_until(lambda: cluster._monitor._thread is None, timeout=10, what="the thread's end")
    assert updates == []
    second = cluster.watch("status", lambda _: None)
    wait_until(lambda: updates, timeout=10, what="a state for the first view")
    first()
    second()
    wait_until(lambda: not monitor_threads(), timeout=10, what="the threads' end")


def test_watcher_that_raises_or_blocks_does_not_affect_other_watchers(cluster, monkeypatch):
    raised, updates, blocked = [], [], threading.Event()
    monkeypatch.setattr(sys, "excepthook", lambda *error: raised.append(error[0]))
    ends = [
        cluster.watch("placement", lambda _: 1 / 0),
        cluster.watch("placement", lambda _: blocked.wait(20)),
        cluster.watch("placement", updates.append),
    ]
    cluster.run("time.sleep(0.5)")
    wait_until(lambda: len(updates) > 1 and raised, timeout=10, what="pictures, and the error")
    assert raised == [ZeroDivisionError]
    blocked.set()
    for end in ends:
        end()
    with pytest.raises(InvalidArgument, match=r"unknown kind .*; choose from"):
        cluster.watch("weather", updates.append)


def test_saves_are_reported_as_they_happen_and_when_they_have_ended(cluster, tmp_path):
    updates = []
    feed = ClusterViewSource(cluster)
    end = feed.watch("saves", updates.append)
    wait_until(lambda: updates, timeout=10, what="the first look")
    cluster.run(
        "from rankbook.checkpoint import save, sharded_state_dict\n"
        f"save({{'w': torch.ones(1000)}}, {str(tmp_path / 'run')!r}, step=3)"
    )

    def reported():
        return [(save.rank, save.save.phase, save.save.step) for save in updates[-1].saves]

    wait_until(lambda: reported() == [(rank, "done", 3) for rank in range(4)], timeout=10, what="the end of the save")
    end()


def test_feed_answers_queries_and_performs_actions_during_a_cell(cluster):
    feed = ClusterViewSource(cluster)
    assert isinstance(feed.ask("placement"), Placement)
    with running(cluster, "time.sleep(600)"):
        assert feed.ask("detail", rank=1).rank == 1
        assert feed.act("interrupt", 1) == "interrupted a call on ranks 0-3"
        wait_until(lambda: not cluster.cells(), timeout=20, what="the cell's end")
    assert feed.act("interrupt", None) == "no cell is running"
    for kind in ("ask", "act"):
        with pytest.raises(InvalidArgument, match="choose from"):
            getattr(feed, kind)("dance")
    with pytest.raises(InvalidArgument, match="rank 9 does not exist; valid ranks are"):
        feed.ask("statistic", name="ddp", key="x", rank=9)
    with pytest.raises(InvalidArgument, match="rank 9 does not exist; valid ranks are"):
        cluster.detail(9)


@pytest.mark.slow
def test_queries_during_training_neither_stop_it_nor_report_partial_state(cluster):
    """Query for 30 steps: a read of a gradient while a backward pass writes it would end the process by then."""
    cluster.run("deep = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(24)]))")
    cluster.run("adam = torch.optim.Adam(deep.parameters())")
    train = "for _ in range(200):\n    adam.zero_grad()\n    deep(torch.ones(8, 64)).sum().backward()\n    adam.step()"
    before = cluster.placement().ranks[0].memory.gradients
    thread, updates = threading.Thread(target=cluster.run, args=(train,)), []
    thread.start()
    while thread.is_alive():
        updates.append(cluster.placement().ranks[0])
    thread.join()
    assert len(updates) > 10
    assert cluster.placement().ranks[0].memory.gradients == before + sum(linear.nbytes for linear in _linears(24))
    assert max(item.steps for item in updates) > 10
    cluster.run("del deep, adam")


def _linears(count):
    return [parameter for _ in range(count) for parameter in torch.nn.Linear(64, 64).parameters()]


def test_a_rank_that_is_stopped_is_unresponsive_and_comes_back(cluster):
    updates = []
    end = cluster.watch("placement", updates.append)
    wait_until(lambda: updates, timeout=10, what="a picture")
    pid = updates[-1].ranks[1].pid
    stop_process(pid)
    try:
        wait_until(lambda: updates[-1].ranks[1].state == "unresponsive", timeout=10, what="its silence")
        assert updates[-1].ranks[0].state == "idle"
        with pytest.raises(RankLostError, match="rank 1 did not reply within"):
            cluster.detail(1, timeout=0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: updates[-1].ranks[1].state == "idle", timeout=10, what="its return")
    end()


def test_dead_healed_and_restarted_ranks_and_a_cluster_that_ends():
    updates = []
    with rankbook.Cluster(2) as cluster:
        cluster.run("model = torch.nn.Linear(3, 3)\nprint('last words', rank)")
        ours = ("rankbook.rank.inspect.query_handlers", "rankbook.checkpoint")
        cluster.run(f"import sys\nlooks = [each for each in {ours} if each in sys.modules]")
        assert cluster.pull("looks") == [[], []]
        end = cluster.watch("placement", updates.append)
        wait_until(lambda: updates and updates[-1].ranks[1].holdings, timeout=10, what="a picture")
        first = updates[-1].ranks[1].pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: updates[-1].ranks[1].state == "dead", timeout=10, what="the death")
        dead = updates[-1].ranks[1]
        assert (dead.memory, dead.holdings) == (None, ())
        assert {rank.host for rank in cluster.placement().ranks} == {socket.gethostname()}
        assert cluster.detail(1).output == ("last words 1",)
        assert [shard.rank for shard in cluster.shards("model").tensors[0].shards] == [0]
        cluster.heal()
        wait_until(lambda: updates[-1].ranks[1].holdings, timeout=20, what="the healed rank's model")
        assert updates[-1].ranks[1].pid != first
        assert ClusterViewSource(cluster).act("restart", 1) == (
            "rank 1 restarted with an empty namespace; %distributed heal 1 copies the variables of another rank"
        )
        wait_until(
            lambda: updates[-1].ranks[1].state == "idle" and not updates[-1].ranks[1].holdings,
            timeout=20,
            what="the restart",
        )
        assert [holding.name for holding in updates[-1].ranks[0].holdings] == ["model"]
    wait_until(lambda: {rank.state for rank in updates[-1].ranks} == {"stopped"}, timeout=10, what="the last picture")
    wait_until(lambda: not monitor_threads(), timeout=10, what="the threads' end")
    end()
