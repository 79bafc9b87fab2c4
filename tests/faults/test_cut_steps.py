"""A training without an `Accelerator` that is stopped on one rank before a step, or in it: replicas are equal again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import rankbook
from rankbook import CellError, Cluster, RankLostError
from rankbook.launch import local
from tests.conftest import Gate, wait_until

pytestmark = pytest.mark.processes

SETUP = """
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

class Slow(torch.optim.Adam):
    middle = staticmethod(lambda: None)
    def step(self, closure=None):
        parameters = self.param_groups[0]['params']
        parameters[0].data.add_(1)
        self.middle()
        parameters[1].data.add_(1)
        return super().step(closure)

def make(wrap):
    global net, model, optimizer
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = wrap(net)
    optimizer = Slow(model.parameters(), 0.1)

def backward():
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()

def step():
    backward()
    optimizer.step()

def fail():
    raise ValueError('stopped')

def state():
    moments = [value for entry in optimizer.state.values() for value in (entry['exp_avg'], entry['step'][None])]
    return torch.cat([value.detach().flatten() for value in (*net.parameters(), *moments)])

def are_equal():
    mine = state()
    found = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(found, mine)
    return all(torch.equal(mine, other) for other in found)
"""
CHECK = "step()\nprint(are_equal())"
ON_ALL = {0: "True\n", 1: "True\n"}


@pytest.fixture(scope="module")
def module_cluster() -> Iterator[Cluster]:
    started = rankbook.start(2)
    try:
        started.run(SETUP)
        yield started
    finally:
        started.stop()
        local.shutdown_prestarted()


@pytest.fixture
def cluster(module_cluster: Cluster) -> Cluster:
    """Return ranks with a new DDP model that has made a step."""
    module_cluster.run("make(DistributedDataParallel)\nstep()")
    return module_cluster


def test_replicas_are_equal_after_an_error_before_the_step_of_one_rank(cluster):
    with pytest.raises(CellError, match="stopped"):
        cluster.run(
            "step()\nbackward()\n"
            "if rank == 1:\n    dist.recv(torch.ones(1), 0)\n    fail()\n"
            "optimizer.step()\ndist.send(torch.ones(1), 1)",
            timeout=30,
        )
    outcome = cluster.run(CHECK, timeout=30)
    assert outcome.stdout == ON_ALL
    assert (
        "Slow: the ranks have made different numbers of steps in the last cell (2 on rank 0, 1 on rank 1): all ranks "
        "continue with the weights and the optimizer state of rank 0"
    ) in outcome.stderr[0]
    assert not any(cluster.run(CHECK).stderr.values())


def test_replicas_are_those_of_a_rank_whose_step_has_ended(cluster):
    with pytest.raises(CellError, match="stopped"):
        cluster.run("if rank == 0: optimizer.middle = fail\nstep()", timeout=30)
    outcome = cluster.run("weights = state()\noptimizer.middle = Slow.middle\n" + CHECK, timeout=30)
    assert outcome.stdout == ON_ALL
    text = "and a step has not ended on rank 0: all ranks continue with the weights and the optimizer state of rank 1"
    assert text in outcome.stderr[0]
    weights = cluster.pull("weights")
    assert weights[0].equal(weights[1])


@pytest.mark.parametrize("shrink", [False, True])
def test_survivors_of_different_steps_are_equal_after_heal(shrink):
    with Cluster(3) as cluster:
        cluster.run(SETUP + "\nmake(DistributedDataParallel)\nstep()")
        with pytest.raises(RankLostError):
            cluster.run(
                "import os\nbackward()\n"
                "if rank == 1:\n    optimizer.step()\n    dist.send(torch.ones(1), 2)\n"
                "if rank == 2:\n    dist.recv(torch.ones(1), 1)\n    os._exit(1)\n"
                "dist.barrier()",
                timeout=30,
            )
        cluster.run("state()", ranks=[0, 1])  # which hides no difference
        cluster.heal(shrink=shrink)
        outcome = cluster.run(CHECK, timeout=30)
    assert outcome.stdout == dict.fromkeys(range(2 if shrink else 3), "True\n")
    text = (
        "Slow: the ranks have made different numbers of steps in the last cell (0 on rank 0, 1 on rank 1): all ranks "
        "continue with the weights and the optimizer state of rank 0"
    )
    assert text in outcome.stderr[0] and text in outcome.stderr[1] and not outcome.stderr.get(2)


def test_a_step_that_has_ended_nowhere_is_named(cluster):
    with pytest.raises(CellError, match="stopped"):
        cluster.run("optimizer.middle = fail\nstep()", timeout=30)
    text = "Slow: a step of the last cell has not ended on ranks 0-1: the weights are partly those of the step"
    assert text in cluster.run("pass", timeout=30).stderr[0]


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_schedules_are_equal_after_an_error_between_the_step_and_its_scheduler(cluster, wrap):
    cluster.run(f"make({wrap})\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\nstep()")
    with pytest.raises(CellError, match="stopped"):
        cluster.run("step()\nif rank == 0: fail()\nscheduler.step()\ndist.barrier()", timeout=30)
    outcome = cluster.run("step()\nprint(scheduler.last_epoch, optimizer.param_groups[0]['lr'])", timeout=30)
    assert outcome.stdout == {0: "1 0.05\n", 1: "1 0.05\n"}
    text = "Slow: its learning rate schedule or gradient scale differs between the ranks: all ranks continue with those"
    assert f"{text} of rank 1" in outcome.stderr[0]


SCALED = """
from torch.amp import GradScaler
scaler = GradScaler('cpu', init_scale=1024.0)
def scaled_step():
    optimizer.zero_grad()
    scaler.scale(model(torch.full((2, 4), 1.0 + rank)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
scaled_step()
"""


def test_a_gradient_scaler_is_that_of_the_rank_whose_step_has_ended(cluster):
    cluster.run(SCALED)
    with pytest.raises(CellError, match="stopped"):
        cluster.run("if rank == 1: optimizer.middle = fail\nscaled_step()\ndist.barrier()", timeout=30)
    outcome = cluster.run(
        "optimizer.middle = Slow.middle\nscaled_step()\n"
        "print(are_equal(), scaler._get_growth_tracker(), bool((state().abs() < 10).all()))",
        timeout=30,
    )
    assert outcome.stdout == {0: "True 3 True\n", 1: "True 3 True\n"}


def test_an_interrupt_during_a_scaled_step_is_raised_after_the_update(cluster):
    cluster.run(SCALED)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(
            "import os, signal\n"
            "optimizer.middle = lambda: dist.barrier() or os.kill(os.getpid(), signal.SIGINT)\n"
            "while True: scaled_step()",
            timeout=5,
        )
    outcome = cluster.run(
        "optimizer.middle = Slow.middle\nprint(dict(scaler._per_optimizer_states))\nscaled_step()\nprint(are_equal())",
        timeout=30,
    )
    assert outcome.stdout == {0: "{}\nTrue\n", 1: "{}\nTrue\n"}


def test_shards_of_different_steps_are_named(cluster):
    cluster.run("make(fully_shard)\nstep()")
    with pytest.raises(CellError, match="stopped"):
        cluster.run("backward()\nif rank == 1: fail()\noptimizer.step()\ndist.barrier()", timeout=30)
    text = "(1 on rank 0, 0 on rank 1): the shards are from different steps now: load a checkpoint"
    assert text in cluster.run("step()", timeout=30).stderr[0]


STATIC = """
make(lambda net: DistributedDataParallel(net, static_graph=True))
def gradients_are_equal():
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
    mine = net[0].weight.grad.clone()
    other = mine.clone()
    dist.broadcast(other, 0)
    return torch.equal(mine, other)
"""


def test_a_static_graph_is_reduced_after_an_aborted_first_pass(cluster):
    cluster.run(STATIC)
    with pytest.raises(CellError, match="stopped"):
        cluster.run("if rank == 1: fail()\nbackward()", timeout=30)
    assert cluster.run("print([gradients_are_equal() for _ in range(3)])").stdout[1] == "[True, True, True]\n"


def test_a_static_graph_is_reduced_after_heal(cluster):
    cluster.run(STATIC + "gradients_are_equal()")
    cluster.restart(1)
    cluster.heal(1)
    assert cluster.run("print([gradients_are_equal() for _ in range(3)])").stdout[1] == "[True, True, True]\n"


def test_an_optimizer_with_other_parameters_beside_those_of_a_replica_is_named(cluster):
    cluster.run(
        "make(DistributedDataParallel)\nof_rank = torch.nn.Parameter(torch.zeros(1))\n"
        "optimizer.add_param_group({'params': [of_rank]})\nstep()"
    )
    with pytest.raises(CellError, match="stopped"):
        cluster.run("backward()\nif rank == 0: fail()\noptimizer.step()\ndist.barrier()", timeout=30)
    text = "(0 on rank 0, 1 on rank 1): the weights of the ranks differ: broadcast those of one rank"
    assert text in cluster.run("pass", timeout=30).stderr[0]


def test_an_optimizer_whose_state_is_divided_is_not_copied(cluster):
    cluster.run(
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "divided = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD)"
    )
    cluster.restart(1)
    assert "divided: every rank has the state of other parameters" in str(cluster.heal(1))
    cluster.run("divided = None")


def test_ranks_with_models_of_their_own_hear_nothing(cluster):
    cluster.run("make(lambda net: net)\nstep()")
    with pytest.raises(CellError, match="stopped"):
        cluster.run("if rank == 0: step()\ndist.barrier()\nfail()", timeout=30)
    assert not any(cluster.run("step()", timeout=30).stderr.values())


def test_a_step_that_the_number_watch_has_refused_is_none(cluster):
    cluster.run("from rankbook.numerics import watch_numbers\nwatch_numbers('nan')")
    try:
        with pytest.raises(CellError, match="NumericalError"):
            cluster.run("backward()\nnet[0].weight.grad.fill_(float('nan'))\noptimizer.step()", timeout=30)
        with pytest.raises(CellError, match="stopped"):
            cluster.run(
                "backward()\nnet[0].weight.grad.fill_(float('nan'))\n"
                "try: optimizer.step()\nexcept ArithmeticError: step()\nfail()",
                timeout=30,
            )
    finally:
        outcome = cluster.run("watch_numbers('off')\n" + CHECK, timeout=30)
    assert outcome.stdout == ON_ALL
    assert not any(outcome.stderr.values())


def test_the_number_watch_sees_the_same_steps_on_a_rank_that_never_had_an_object_of_the_base(cluster):
    cluster.run("torch.optim.Adam(net.parameters())")  # torch gives a class its hooks with the first object
    cluster.restart(1)
    cluster.heal(1)
    cluster.watch_numbers("nan")
    try:
        outcome = cluster.run(CHECK, timeout=30)
    finally:
        cluster.watch_numbers("off")
    assert outcome.stdout == ON_ALL


def test_an_interrupt_during_a_step_is_raised_after_it(cluster, tmp_path):
    gate = Gate(tmp_path / "gate")
    # A rank that waits for the file is not done with its step when the interrupt has reached it.
    cluster.run(
        "from pathlib import Path\n"
        "def wait():\n"
        f"    Path({str(tmp_path)!r}, f'in-{{rank}}').touch()\n"
        f"    {gate.wait}\n"
        "raised = False"
    )
    errors: list[BaseException] = []

    def train() -> None:
        try:
            cluster.run("optimizer.middle = wait\ntry: step()\nexcept KeyboardInterrupt:\n    raised = True\n    raise")
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    wait_until(lambda: all((tmp_path / f"in-{rank}").exists() for rank in range(2)), timeout=20, what="the step")
    cluster.interrupt()
    gate.open()
    thread.join(30)
    assert isinstance(errors[0], KeyboardInterrupt)
    assert cluster.pull("raised") == [True, True]
    outcome = cluster.run(
        "optimizer.middle = Slow.middle\nprint(are_equal(), int(optimizer.state[net[0].weight]['step']))"
    )
    assert outcome.stdout == {0: "True 2\n", 1: "True 2\n"}
    assert not any(outcome.stderr.values())
