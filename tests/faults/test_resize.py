"""Test that the number of ranks changes in place: weights, optimizer, samples and variables go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from rankbook import Cluster, InvalidArgument, RankbookError, RankLostError
from rankbook.launch import local
from rankbook.protocol.messages import EnterWorld
from tests.conftest import cluster_folders, wait_until
from tests.faults.protected import LAYOUTS

pytestmark = pytest.mark.processes

SAMPLES = 360
SEED = 21
KILLS = int(os.environ.get("RANKBOOK_RESIZE_KILLS", "25"))
"""Kills of each layout in the full test."""

MODEL = """
import os, signal
from rankbook.runtime import (
    Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig,
    set_seed,
)
from torch.distributed.tensor import DTensor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 24)
        self.down = torch.nn.Linear(24, 8)
        self.last = torch.nn.Linear(8, 7)

    def forward(self, x):
        return self.last(torch.nn.functional.dropout(self.down(self.up(x).relu()), 0.1))

def train(count):
    for batch in loader:
        seen.extend(batch.tolist())
        x = torch.sin(batch[:, None] * torch.arange(1.0, 9.0, device=batch.device))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        count -= 1
        if count == 0:
            return

def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()

def local_state():
    parameters = list(net.parameters())
    return (
        [local(parameter) for parameter in parameters],
        [{name: local(value) for name, value in optimizer.state[parameter].items()} for parameter in parameters],
    )

def weights_of(net):
    return [getattr(parameter, "full_tensor", parameter.detach)().detach().clone() for parameter in net.parameters()]

def progress():
    return optimizer.steps, scheduler.get_last_lr(), loader.state_dict()

def is_equal(one, other):
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (one, other)), strict=True)
    return all(torch.equal(*pair) for pair in pairs)

AcceleratorState._reset_state()
set_seed(3)
accelerator = ACCELERATOR
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
loader = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_size=4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, loader)
seen, mine, same = [], rank * 10, "a"
identities = [id(item) for item in (model, net, optimizer, scheduler, loader)]
"""


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> Iterator[None]:
    # Once in the forkserver, instead of on every new rank.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKBOOK_PRELOAD", "start")
        local.shutdown_prestarted()
        yield
    assert not cluster_folders(os.getpid())


@pytest.fixture
def cluster(request) -> Iterator[Cluster]:
    with Cluster(request.param) as cluster:
        yield cluster


def prepare(cluster: Cluster, layout: str) -> None:
    cluster.run(MODEL.replace("ACCELERATOR", LAYOUTS[layout]).replace("SAMPLES", str(SAMPLES)))


class Epoch:
    """One epoch of training during which the number of ranks changes, with the samples that the ranks have seen."""

    def __init__(self, cluster: Cluster, layout: str, folder) -> None:
        self.cluster = cluster
        self.folder = folder
        self.seen: list[int] = []
        self.sharing = 2 if layout == "fsdp_tp" else 1
        prepare(cluster, layout)
        self.identities = cluster.pull("identities")

    def train(self, count: int) -> None:
        """Train `count` batches, or to the end of the epoch."""
        self.cluster.run(f"seen = []\ntrain({count})")
        # Ranks of one tensor-parallel group read the same batches.
        self.seen += [sample for seen in self.cluster.pull("seen")[:: self.sharing] for sample in seen]

    def resize(self, n: int, *, stays: int = 0) -> str:
        """Resize, and compare the state with that of a checkpoint that is loaded on the same ranks."""
        self.cluster.push({"folder": str(self.folder / f"before-{n}-{len(self.seen)}")})
        self.cluster.run("accelerator.save_state(folder)\nsteps = optimizer.steps")
        steps = self.cluster.pull("steps")[0]
        resized = self.cluster.resize(n)
        self.check(n, steps, stays)
        return str(resized)

    def check(self, n: int, steps: int, stays: int) -> None:
        """Check that the state on `n` ranks is that of the last checkpoint, and that rank `stays` has its objects."""
        cluster = self.cluster
        assert cluster.world_size == n
        cluster.run(
            "numbers = [world_size, dist.get_world_size(), accelerator.num_processes, int(os.environ['WORLD_SIZE'])]"
        )
        assert cluster.pull("numbers") == [[n] * 4] * n
        cluster.run("moved, at = local_state(), progress()\naccelerator.load_state(folder)")
        cluster.run("equal = is_equal(moved, local_state()) and str(at) == str(progress())")
        assert cluster.pull("equal") == [True] * n
        assert [at[0] for at in cluster.pull("at")] == [steps] * n
        cluster.run("identities = [id(item) for item in (model, net, optimizer, scheduler, loader)]")
        assert cluster.pull("identities")[stays] == self.identities[stays]


@pytest.mark.parametrize(
    ("cluster", "layout", "sizes"),
    [
        (2, "ddp", (3, 2)),
        pytest.param(3, "fsdp", (2, 3), marks=pytest.mark.slow),
        *(
            pytest.param(4, layout, sizes, marks=pytest.mark.full)
            for layout, sizes in {
                "ddp": (3, 4, 2, 4, 1, 2),
                "fsdp": (3, 4, 2, 4, 1, 3),
                "hsdp": (2, 4, 6),
                "fsdp_tp": (2, 4, 6),
            }.items()
        ),
    ],
    indirect=["cluster"],
)
def test_training_goes_on_with_another_number_of_ranks(cluster, layout, sizes, tmp_path):
    epoch = Epoch(cluster, layout, tmp_path)
    for n in sizes:
        epoch.train(4)
        report = epoch.resize(n)
        assert f" to {n} rank" in report
    epoch.train(1000)
    assert sorted(epoch.seen) == list(range(SAMPLES))


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_reset_after_a_resize_keeps_the_number_of_ranks(cluster):
    cluster.resize(3)
    cluster.run("%reset -f\nn = world_size, dist.get_world_size()")
    assert cluster.pull("n") == [(3, 3)] * 3
    assert [[variable.name for variable in variables] for variables in cluster.variables().values()] == [["n"]] * 3


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_variables_that_differ_by_rank_are_listed(cluster):
    cluster.run("import math\nmine, same, also = rank, 'a', torch.full((3,), rank)\ngroup = dist.new_group([0, 1])")
    cluster.run("def double(x):\n    return 2 * x * world_size")
    report = str(cluster.resize(3))
    assert "from 2 to 3 ranks" in report
    assert "rank 2 is new, with the state of rank 0: " in report
    assert "  mine: kept on ranks 0-1, as on rank 0 on rank 2" in report
    assert "  also: kept on ranks 0-1, as on rank 0 on rank 2" in report
    assert "same" not in report
    assert "of 2 ranks, to be made again: group" in report
    cluster.run("value = double(mine)\ntotal = torch.ones(1)\ndist.all_reduce(total)\ntotal = int(total)")
    assert cluster.pull("value") == [0, 6, 0]
    assert cluster.pull("total") == [3, 3, 3]
    cluster.run("only = object()", ranks="2")  # cannot be compared
    report = str(cluster.resize(1))
    assert "ranks 1-2 have left" in report
    assert "  only: gone with rank 2" in report
    assert "  mine: kept on rank 0, gone with ranks 1-2" in report
    cluster.run("value = double(mine + 1)")
    assert cluster.pull("value") == [2]


ACCUMULATE = """
def accumulate(count):
    batches = iter(loader)
    for _ in range(count):
        with accelerator.accumulate(model):
            batch = next(batches)
            accelerator.backward(model(torch.sin(batch[:, None] * torch.arange(1.0, 9.0))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.steps
"""


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_all_ranks_begin_their_first_batch_alike(cluster):
    """Check it with more ranks than before, and with an empty rank that prepares everything anew."""
    prepare(cluster, "ddp")
    cluster.run(ACCUMULATE + "steps = accumulate(2)")
    cluster.resize(3)
    cluster.run("steps = accumulate(2)", timeout=60)
    assert cluster.pull("steps") == [4, 4, 4]
    cluster.restart([1])
    prepare(cluster, "ddp")
    cluster.run(ACCUMULATE + "steps = accumulate(2)", timeout=60)
    assert cluster.pull("steps") == [2, 2, 2]
    cluster.restart([1])
    cluster.run("from rankbook.runtime.gradient_state import GradientState\nGradientState._reset_state()")
    cluster.restart([1])
    prepare(cluster, "ddp")
    cluster.run(ACCUMULATE + "steps = accumulate(2)", timeout=60)
    assert cluster.pull("steps") == [2, 2, 2]


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_restarted_rank_that_prepares_what_the_others_have_gets_the_optimizers_state(cluster):
    prepare(cluster, "ddp")
    cluster.run(ACCUMULATE + "steps = accumulate(3)")
    cluster.restart([1])
    making, prepares, _ = MODEL.partition("model, optimizer, scheduler, loader =")
    cluster.run(making.replace("ACCELERATOR", LAYOUTS["ddp"]).replace("SAMPLES", str(SAMPLES)), ranks=[1])
    cluster.run(f"{prepares} accelerator.prepare(net, optimizer, scheduler, loader)\n{ACCUMULATE}steps = accumulate(2)")
    assert cluster.pull("steps") == [5, 5]
    cluster.run("weights = weights_of(net) + [state['exp_avg'] for state in optimizer.state.values()]")
    one, other = cluster.pull("weights")
    assert all((mine == its).all() for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize("loader", ["plain", "parts['train']"])
def test_samplers_of_plain_loaders_divide_the_data_among_all_ranks(cluster, loader):
    cluster.run(
        "from torch.utils.data import DataLoader\nfrom torch.utils.data.distributed import DistributedSampler\n"
        f"parts = {{}}\n{loader} = DataLoader(range(12), batch_size=2, sampler=DistributedSampler(range(12), seed=3))\n"
        f"{loader}.sampler.set_epoch(2)"
    )
    collect = f"read, epoch = [int(item) for batch in {loader} for item in batch], {loader}.sampler.epoch"
    for n in (3, 2):
        cluster.resize(n)
        cluster.run(collect)
        assert sorted(item for of_rank in cluster.pull("read") for item in of_rank) == list(range(12))
        assert cluster.pull("epoch") == [2] * n
    kill(cluster, 0)
    wait_until(lambda: cluster.status()[0].state == "dead", timeout=20, what="the death of rank 0")
    cluster.heal()
    cluster.run(collect)
    assert sorted(item for of_rank in cluster.pull("read") for item in of_rank) == list(range(12))


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_model_that_is_sharded_outside_of_prepare_is_refused(cluster):
    cluster.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module\n"
        "wide = torch.nn.Sequential(torch.nn.Linear(4, 8))\n"
        "parallelize_module(wide, init_device_mesh('cpu', (2,)), {'0': ColwiseParallel()})"
    )
    with pytest.raises(InvalidArgument, match=r"wide is sharded outside of prepare\(\)"):
        cluster.resize(1)
    cluster.run(
        "from torch.distributed.fsdp import fully_shard\ndel wide\n"
        "class Holder: pass\nholder = Holder()\nholder.net = fully_shard(torch.nn.Linear(4, 8))"
    )
    with pytest.raises(InvalidArgument, match=r"is sharded by fully_shard outside of prepare\(\)"):
        cluster.resize(1)
    assert cluster.world_size == 2
    cluster.run("del holder")
    cluster.resize(1)
    assert cluster.world_size == 1


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_loader_that_cannot_continue_its_epoch_is_named(cluster):
    cluster.run(
        "from rankbook.runtime import Accelerator\n"
        "class Numbers(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(range(40))\n"
        "stream = Accelerator().prepare(torch.utils.data.DataLoader(Numbers(), batch_size=2))\n"
        "for batch in stream: break"
    )
    assert "the loader starts epoch 0 anew: it was saved with 2 ranks" in str(cluster.resize(3))


SPECIAL_MODEL = """
import threading
from torch.nn.utils.parametrizations import weight_norm

class Locked(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()

    def forward(self, x):
        with self.lock:
            return super().forward(x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.locked = torch.nn.LSTM(8, 12, batch_first=True), Locked(12, 6)
        self.normed = weight_norm(torch.nn.Linear(6, 7))

    def forward(self, x):
        return self.normed(self.locked(self.recurrent(x[:, None])[0][:, 0]))
"""


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_modules_that_cannot_be_pickled_as_they_are_come_along(cluster, layout):
    model, preparation = MODEL.split("AcceleratorState._reset_state()")
    made = model + SPECIAL_MODEL + "AcceleratorState._reset_state()" + preparation
    cluster.run(made.replace("ACCELERATOR", LAYOUTS[layout]).replace("SAMPLES", str(SAMPLES)))
    cluster.run("train(2)\nkept = weights_of(net)")
    assert "not copied" not in str(cluster.resize(3, timeout=60))
    cluster.run("equal = is_equal(kept, weights_of(net))\ntrain(2)\nsum = sum(map(torch.sum, weights_of(net))).item()")
    assert cluster.pull("equal") == [True] * 3
    assert len(set(cluster.pull("sum"))) == 1


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_sharded_model_that_new_ranks_cannot_get_is_refused_before_anything_changes(cluster):
    prepare(cluster, "fsdp")
    cluster.run("train(2)\nimport threading\nnet.lock = threading.Lock()\nkept = weights_of(net)")
    with pytest.raises(InvalidArgument, match=r"new ranks cannot get the sharded model .*lock.*nothing has changed"):
        cluster.resize(3)
    cluster.run("equal = is_equal(kept, weights_of(net))\ntrain(1)")
    assert cluster.pull("equal") == [True] * 2
    assert "from 2 to 1 rank" in str(cluster.resize(1))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_whole_model_beside_a_sharded_one_comes_along(cluster):
    """Check it for a resize and for a heal: a teacher, or a reference model, is prepared for evaluation only."""
    prepare(cluster, "fsdp")
    cluster.run("teacher = accelerator.prepare_model(Net(), evaluation_mode=True)\ntrain(2)")
    cluster.run("kept = [parameter.detach().clone() for parameter in teacher.parameters()]")
    kept = cluster.pull("kept")[0]
    assert "from 2 to 3 ranks" in str(cluster.resize(3, timeout=60))
    cluster.run("accelerator.protect()\ntrain(2)")
    kill(cluster, 1)
    wait_until(lambda: cluster.status()[1].state == "dead", timeout=20, what="the death of rank 1")
    assert "back at step 4" in str(cluster.heal())
    cluster.run("kept = [parameter.detach().clone() for parameter in teacher.parameters()]\ntrain(1)")
    for of_rank in cluster.pull("kept"):
        assert all((one == other).all() for one, other in zip(of_rank, kept, strict=True))


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_sharded_tensors_in_containers_are_named_and_in_registered_objects_refused(cluster):
    prepare(cluster, "fsdp")
    cluster.run(
        "average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}\n"
        "class Average:\n"
        "    def state_dict(self): return {'weights': average}\n"
        "    def load_state_dict(self, state): pass\n"
        "registered = Average()\naccelerator.register_for_checkpointing(registered)"
    )
    with pytest.raises(InvalidArgument, match=r"the registered Average has sharded tensors, .* start with 1 rank"):
        cluster.resize(1)
    assert cluster.world_size == 2
    cluster.run("accelerator._custom_objects.clear()\ndel registered\nimport gc; gc.collect()")
    assert "to be made again: average" in str(cluster.resize(1))


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_a_layout_that_does_not_fit_changes_nothing(cluster):
    prepare(cluster, "hsdp")
    pids = [status.pid for status in cluster.status()]
    with pytest.raises(InvalidArgument, match=r"dp_shard\(2\) \* tp\(1\) = 2, and 3 % 2 = 1, expected 0; nothing has"):
        cluster.resize(3)
    assert [status.pid for status in cluster.status()] == pids
    cluster.run("train(1)\nsteps = optimizer.steps")
    assert cluster.pull("steps") == [1] * 4
    cluster.run(
        "accelerator = Accelerator(split_batches=True)\n"
        "loader = accelerator.prepare(torch.utils.data.DataLoader(range(64), batch_size=8))"
    )
    with pytest.raises(InvalidArgument, match=r"batch size \(8\) % ranks \(6\) = 2, expected 0"):
        cluster.resize(6)
    with pytest.raises(InvalidArgument, match="expected 1 to"):
        cluster.resize(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "n", "victim"), [(3, 2, 0), pytest.param(2, 3, 1, marks=pytest.mark.full)], indirect=["cluster"]
)
def test_a_rank_that_dies_during_a_resize_is_replaced(cluster, n, victim, tmp_path):
    epoch = Epoch(cluster, "fsdp", tmp_path)
    epoch.train(4)
    # In the middle: the shards have been handed over, and the rank makes its new, empty ones.
    cluster.run(
        "from rankbook.runtime import resize\n"
        f"if rank == {victim}:\n"
        "    resize._shard_again = lambda: os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = cluster._segments.folder / "resize-1-1"  # by a notebook's process that has ended while the ranks handed over
    left.mkdir()
    report = epoch.resize(n, stays=1 - victim)
    assert f"rank {victim} died meanwhile and was replaced" in report
    assert not left.exists()
    epoch.train(1000)
    assert sorted(epoch.seen) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_rank_that_dies_before_its_first_snapshot_after_a_resize_is_replaced(cluster, tmp_path):
    epoch = Epoch(cluster, "fsdp", tmp_path)
    cluster.run("accelerator.protect()")
    epoch.train(4)
    cluster.run(
        "from rankbook.runtime import protection\n"
        "if rank == 1:\n"
        "    protection.RankSnapshots.begin = lambda _: os.kill(os.getpid(), signal.SIGKILL)"
    )
    report = epoch.resize(2, stays=0)
    assert "rank 1 died meanwhile and was replaced" in report
    status = cluster.protection()
    assert status is not None and status.step == 4
    epoch.train(1000)
    assert sorted(epoch.seen) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_rank_that_dies_while_others_leave_is_replaced(cluster, monkeypatch):
    prepare(cluster, "fsdp")
    cluster.run("accelerator.protect()\ntrain(2)\nweights = weights_of(net)")
    expected = cluster.pull("weights")[0]
    processes = cluster._processes
    change = processes.resize

    def kill_before(*args: object, **options: object) -> None:
        monkeypatch.undo()
        kill(cluster, 1)
        processes.wait_exits()
        change(*args, **options)

    monkeypatch.setattr(processes, "resize", kill_before)
    assert "rank 1 died meanwhile and was replaced" in str(cluster.resize(2))
    cluster.run("steps, weights = optimizer.steps, weights_of(net)")
    assert cluster.pull("steps") == [2, 2]
    for weights in cluster.pull("weights"):
        assert all((one == other).all() for one, other in zip(weights, expected, strict=True))


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_rank_that_was_restarted_before_heal_completes_a_resize_gets_the_variables(cluster, monkeypatch):
    cluster.run("x = 5")
    collect = cluster._collect

    def interrupt_the_entry(tasks, *args, **options):
        make, _ = next(iter(tasks.values()))
        if isinstance(make(0), EnterWorld):
            raise KeyboardInterrupt
        return collect(tasks, *args, **options)

    monkeypatch.setattr(cluster, "_collect", interrupt_the_entry)
    with pytest.raises(KeyboardInterrupt):
        cluster.resize(3)
    monkeypatch.undo()
    with contextlib.suppress(RankbookError):
        cluster.restart(1)
    assert "from 2 to 3 ranks" in str(cluster.heal())
    assert cluster.pull("x") == [5, 5, 5]


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_too_little_memory_for_the_snapshots_of_more_ranks_is_reported(cluster):
    prepare(cluster, "ddp")
    cluster.run(
        "accelerator.protect()\n"
        "from rankbook import snapshot_files\n"
        "snapshot_files.free_memory = lambda _: (1000, '/dev/shm')"
    )
    report = str(cluster.resize(3))
    assert "from 2 to 3 ranks" in report
    assert "the training state is not protected any more: protection needs 2 copies x" in report
    assert cluster.protection() is None
    cluster.run("train(1)")


def kill(cluster: Cluster, rank: int) -> None:
    os.kill(next(status.pid for status in cluster.status() if status.rank == rank) or 0, signal.SIGKILL)


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_heal_goes_on_without_a_dead_rank(cluster, layout):
    prepare(cluster, layout)
    cluster.run("seen = []\naccelerator.protect()\ntrain(4)")
    cluster.run("weights = weights_of(net)")
    weights = cluster.pull("weights")[1]
    kill(cluster, 0)
    report = str(cluster.heal(shrink=True))
    assert "from 3 to 2 ranks at step 4" in report
    assert ("rank 0 died" in report) == (layout == "ddp")
    assert ("back at step 4" in report) == (layout == "fsdp")
    assert cluster.world_size == 2
    cluster.run("weights = weights_of(net)")
    for of_rank in cluster.pull("weights"):
        assert all((one == other).all() for one, other in zip(of_rank, weights, strict=True))
    # The samples that were read before are not read again.
    cluster.run("seen = []\ntrain(1000)\nsteps = optimizer.steps")
    assert len([sample for of_rank in cluster.pull("seen") for sample in of_rank]) == SAMPLES - 3 * 4 * 4
    assert len(set(cluster.pull("steps"))) == 1
    assert cluster.protection() is not None
    assert cluster.heal(shrink=True) is None


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_heal_cannot_go_on_without_what_is_lost(cluster):
    prepare(cluster, "fsdp")
    cluster.run("train(1)")
    kill(cluster, 1)
    with pytest.raises(RankLostError, match=r"the shards of rank 1 are lost"):
        cluster.heal(shrink=True)


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a rank that has left
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_kills_at_random_moments_of_a_resize_leave_the_state_of_one_step(cluster, layout):
    rng = random.Random(SEED)
    prepare(cluster, layout)
    cluster.run("accelerator.protect()\ntrain(2)\nweights = weights_of(net)")
    for number in range(KILLS):
        expected = cluster.pull("weights")[0]
        n = rng.choice([size for size in (2, 3, 4) if size != cluster.world_size])
        began = time.monotonic()
        victim = rng.choice(cluster.status())
        timer = threading.Timer(rng.uniform(0.0, 2.0), kill_process, (victim.pid,))
        timer.start()
        try:
            outcome = str(cluster.resize(n))
        except RankbookError as error:  # before anything has changed
            outcome = f"{type(error).__name__}: {error}"
        timer.join()
        cluster.heal()
        seconds = time.monotonic() - began
        print(f"kill {number}, rank {victim.rank}, to {n}: {seconds:.1f} s, {cluster.world_size} ranks\n{outcome}")
        cluster.run("steps, weights = optimizer.steps, weights_of(net)")
        assert len(set(cluster.pull("steps"))) == 1
        for weights in cluster.pull("weights"):
            assert all((one == other).all() for one, other in zip(weights, expected, strict=True))
        assert seconds < 120
        cluster.run("loader.set_epoch(0)\ntrain(1)\nweights = weights_of(net)")
