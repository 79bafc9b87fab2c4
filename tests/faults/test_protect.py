"""Test that a dead rank's training state comes back from the snapshots in memory, with the losses of a run without."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from rankbook import CellError, Cluster, InvalidArgument, RankbookError
from rankbook.launch import local
from rankbook.output.merger import Emit, Stream
from rankbook.snapshot_files import read_headers
from tests.conftest import cluster_folders
from tests.faults.protected import LAYOUTS, MODEL, MOMENTS, RANKS, SETUP, Training

pytestmark = pytest.mark.processes

SEED = 20
KILLS = int(os.environ.get("RANKBOOK_PROTECT_KILLS", "50"))
"""Kills of each layout in the full test."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Once in the forkserver, instead of on four ranks and on every new one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKBOOK_PRELOAD", "start")
        local.shutdown_prestarted()
        with Cluster(RANKS) as cluster:
            yield cluster
    assert not cluster_folders(os.getpid())


IDENTITIES = "identities = [id(item) for item in (model, net, optimizer, scheduler, loader, *net.parameters())]"


@pytest.mark.parametrize(
    ("layout", "moment", "rank"),
    [
        ("ddp", "backward", 0),
        pytest.param("fsdp", "commit", 3, marks=pytest.mark.full),
        pytest.param("hsdp", "forward", 2, marks=pytest.mark.full),
        pytest.param("fsdp_tp", "scheduler", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_comes_back_at_the_same_step_with_the_same_losses(cluster, layout, moment, rank):
    training = Training(cluster, layout, steps=20)
    survivors = [other for other in range(RANKS) if other != rank]
    cluster.run(IDENTITIES)
    before = cluster.pull("identities", ranks=survivors)
    training.kill(rank, moment, after=3)
    healed = training.heal()
    assert f"rank {rank} was healed with the state of rank" in str(healed)
    # A rank that dies before its own snapshot of step 4 is complete takes the others back to step 3.
    # They may have begun step 5.
    assert re.search(rf"back at step {training.at}: (1 step|2 steps) to repeat", str(healed))
    assert training.at == 3
    cluster.run(IDENTITIES)
    assert cluster.pull("identities", ranks=survivors) == before
    training.check(10)


def test_a_rank_that_dies_between_two_cells_costs_no_step(cluster):
    training = Training(cluster, "fsdp", steps=15)
    # The loop ends by `break`: its epoch has not ended, so the steps after it are of the next epoch.
    cluster.run("loader.set_epoch(0)")
    cluster.run("for batch in loader:\n    break")
    cluster.run("accelerator.protect(1)")
    training.kill(2, "between", after=2)
    assert "back at step 2: no step to repeat" in str(training.heal())


@pytest.mark.slow
def test_snapshots_of_every_third_step_cost_up_to_three_steps(cluster):
    training = Training(cluster, "fsdp", steps=20, every=3)
    training.kill(1, "forward", after=5)
    healed = str(training.heal())
    assert "back at step 3: 3 steps to repeat\nnot part of the snapshot, and not set back: " in healed, healed
    training.check(10)


def test_the_status_names_the_step_and_the_memory_is_given_back(cluster):
    cluster.run(SETUP)
    cluster.run(MODEL.format(accelerator=LAYOUTS["ddp"]))
    cluster.run("note = {}\nextra = torch.nn.Linear(2, 2)")
    report = cluster.protect(2)
    assert report.unprotected["note"] == "a variable (dict)"
    assert report.unprotected["extra"] == "a module outside prepare()"
    assert not {"net", "model", "optimizer", "scheduler", "loader", "accelerator"} & set(report.unprotected)
    cluster.run("losses = train(5)")
    status = cluster.protection()
    assert (status.every, status.step) == (2, 4)
    assert "protected every 2 steps: snapshot of step 4" in str(status)
    assert "snapshot of step 4" in cluster.placement().protection
    folder = cluster._segments.folder
    used = sum(path.stat().st_size for path in folder.glob("snapshot-*"))
    assert used < 2.1 * status.size + RANKS * 100_000  # what is pickled does not grow with the model
    assert cluster.protect(0).status is None
    assert list(folder.glob("snapshot-*")) == []
    assert cluster.protection() is None


def test_too_little_memory_is_refused_with_the_arithmetic_on_all_ranks(cluster):
    cluster.run(SETUP)
    cluster.run(MODEL.format(accelerator=LAYOUTS["ddp"]))
    cluster.protect(0)
    cluster.run("from rankbook import snapshot_files\nfree = snapshot_files.free_memory")
    cluster.run("snapshot_files.free_memory = lambda folder: (1000, '/dev/shm')")
    with pytest.raises(InvalidArgument, match=r"2 copies x .* x 4 ranks = .* but /dev/shm has 1.* free"):
        cluster.protect()
    with pytest.raises(InvalidArgument, match="2 copies x"):
        cluster.run("accelerator.protect()")
    assert read_headers(cluster._segments.folder, range(RANKS)) == {rank: [] for rank in range(RANKS)}
    cluster.run("snapshot_files.free_memory = free")


def test_a_lost_snapshot_is_named_and_the_rank_comes_back_without(cluster):
    training = Training(cluster, "fsdp", steps=5)
    training.kill(3, "forward", after=2)
    for path in cluster._segments.folder.glob("snapshot-3-*"):
        path.unlink()
    healed = str(cluster.heal())
    assert "not restored: there is no snapshot of one step that all ranks have" in healed
    assert "net: it is sharded over the ranks: the shard of the dead rank is lost" in healed
    assert cluster.protection() is not None
    cluster.restart()
    assert cluster.protection() is None


@pytest.mark.slow
def test_a_rank_that_dies_during_the_heal_costs_no_further_step(cluster):
    training = Training(cluster, "fsdp", steps=20)
    training.kill(3, "forward", after=3)
    cluster.run("def die(*_):\n    os.kill(os.getpid(), signal.SIGKILL)\nprotection.restore_state = die", ranks="1")
    with pytest.raises(Exception, match="rank 1 was killed"):
        cluster.heal()
    assert "back at step 3" in str(training.heal())
    training.check(10)


@pytest.mark.slow
def test_a_rank_that_dies_while_the_ranks_are_protected_again_costs_no_further_step(cluster):
    training = Training(cluster, "fsdp", steps=20)
    cluster.run("losses = train(3)")
    cluster.run("protection.RankSnapshots.take = lambda _: victim.die()", ranks="3")
    with pytest.raises(RankbookError, match="rank 3 was killed"):
        cluster.run("accelerator.protect()")
    assert "back at step 3" in str(training.heal())
    training.check(10)


@pytest.mark.parametrize(
    ("layout", "moment", "step"),
    [
        ("fsdp", "before", 3),
        pytest.param("fsdp_tp", "optimizer", 3, marks=pytest.mark.full),
        pytest.param("hsdp", "scheduler", 4, marks=pytest.mark.full),
    ],
)
def test_ranks_that_an_error_has_left_at_different_steps_go_back_together(cluster, layout, moment, step):
    training = Training(cluster, layout, steps=20)
    cluster.run(IDENTITIES)
    before = cluster.pull("identities")
    # Rank 1 fails before it makes step 4, in the middle of it, or before its scheduler's step; the others go on.
    cluster.run(FAIL.format(moment=moment, step=step), ranks="1")
    said = told_by(cluster, "losses = train(10)")
    assert "the ranks are at different places of the training: " in said
    assert said.endswith("%distributed heal brings all ranks back to the snapshot of step 3"), said
    healed = training.heal()
    assert re.match(r"back at step 3: (1 step|2 steps) to repeat\n", str(healed)), healed
    assert training.at == 3
    cluster.run(IDENTITIES)
    assert cluster.pull("identities") == before
    assert cluster.heal() is None, "all ranks are at one step"
    training.check(10)


def test_ranks_that_were_stopped_at_one_step_do_not_go_back(cluster):
    training = Training(cluster, "fsdp", steps=20, every=2)
    training.check(3)
    said = told_by(cluster, "raise RuntimeError('an error between two steps')")
    assert "places" not in said
    assert cluster.heal() is None
    training.check(10)


@pytest.mark.slow
def test_a_return_that_was_stopped_in_the_middle_is_repeated(cluster):
    training = Training(cluster, "fsdp", steps=20)
    cluster.run(FAIL.format(moment="before", step=3), ranks="1")
    told_by(cluster, "losses = train(10)")
    cluster.run("whole = protection._restore_optimizer\ndef stop(*_):\n    raise RuntimeError", ranks="2")
    cluster.run("protection._restore_optimizer = stop", ranks="2")
    with pytest.raises(RankbookError):
        cluster.heal()
    cluster.run("protection._restore_optimizer = whole", ranks="2")
    assert "back at step 3" in str(training.heal())
    training.check(10)


def told_by(cluster: Cluster, source: str) -> str:
    """Run a cell that fails, and return what is shown below it."""
    shown: list[str] = []

    class Screen:
        def emit(self, items: Sequence[Emit]) -> None:
            shown.extend(item.text for item in items if isinstance(item, Stream))

    with pytest.raises(CellError):
        cluster.run(source, sink=Screen())
    return "".join(shown).strip()


FAIL = """
class Stop(Exception):
    pass

def fail():
    victim.rank = -1
    raise Stop

victim.die, victim.rank, victim.moment, victim.step = fail, rank, {moment!r}, {step}
accelerator.backward = lambda loss, backward=accelerator.backward: (backward(loss), victim.is_due("before") and fail())
"""


@pytest.mark.slow
def test_a_rank_that_was_restarted_alone_gets_the_state_of_its_own_snapshot(cluster):
    Training(cluster, "ddp", steps=2)
    cluster.restart((2,))  # it has prepared nothing, unlike the others
    assert (status := cluster.protection()) is not None and status.step is not None
    training = Training(cluster, "ddp", steps=20)
    training.kill(2, "optimizer", after=3)
    assert "back at step 3" in str(training.heal())
    training.check(10)


NO_DROPOUT = "torch.nn.functional.dropout = lambda x, p: x"


@pytest.fixture
def cluster_without_dropout(cluster) -> Iterator[Cluster]:
    """Provide the module's ranks without dropout, because random states are not restored."""
    cluster.run(NO_DROPOUT)
    yield cluster
    cluster.restart()  # all of them: only the rank that is replaced has torch's own function again


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "rank"), [("forward", 3), ("optimizer", 0)])
def test_replicas_of_hybrid_sharding_restore_a_rank_without_protection(cluster_without_dropout, moment, rank):
    cluster = cluster_without_dropout
    training = Training(cluster, "hsdp", steps=20, protect=False)
    training.kill(rank, moment, after=3)
    healed = training.heal()
    assert re.search(rf"back at step {training.at}: (1 step|2 steps) to repeat", str(healed))
    assert training.at in (3, 4)
    # The position of the loader is not restored either.
    cluster.run(
        f"{NO_DROPOUT}\nloader.set_epoch(0)\nbatches = iter(loader)\nfor _ in range({training.at}):\n    next(batches)"
    )
    cluster.run("whole, loader = loader, batches\nlosses = train(10)\nloader = whole")
    assert cluster.pull("losses") == [losses[training.at : training.at + 10] for losses in training.expected]


@pytest.mark.slow
def test_a_rank_that_comes_back_from_a_replica_is_protected_again(cluster):
    training = Training(cluster, "hsdp", steps=5)
    training.kill(3, "forward", after=2)
    for path in cluster._segments.folder.glob("snapshot-3-*"):
        path.unlink()
    healed = training.heal()
    assert healed.restored_from == "replicas"
    status = cluster.protection()
    assert status is not None and status.step == training.at
    cluster.run("losses = train(1)")
    status = cluster.protection()
    assert status is not None and status.step == training.at + 1


def test_without_a_whole_replica_the_shards_are_lost(cluster):
    training = Training(cluster, "hsdp", steps=5, protect=False)
    cluster.run("train(1)")
    for rank in (1, 2):  # one of each replica
        os.kill(cluster.status()[rank].pid or 0, signal.SIGKILL)
    healed = str(cluster.heal())
    assert "net: it is sharded over the ranks: the shard of the dead rank is lost" in healed
    assert training.expected


@pytest.mark.slow
def test_a_layout_of_before_can_be_prepared_again_after_its_rank_was_replaced(cluster):
    Training(cluster, "hsdp", steps=3, protect=False)
    cluster.run("del model, net, optimizer, scheduler, loader, accelerator")
    os.kill(cluster.status()[1].pid or 0, signal.SIGKILL)
    assert "rank 1 was healed" in str(cluster.heal())
    # The mesh of this layout has not come with a model: the other ranks must not use theirs.
    training = Training(cluster, "hsdp", steps=3, protect=False)
    cluster.run("losses = train(3)")
    assert cluster.pull("losses") == training.expected
    cluster.restart("2")  # beside models of this layout on the other ranks
    training = Training(cluster, "hsdp", steps=3, protect=False)
    cluster.run("losses = train(3)")
    assert cluster.pull("losses") == training.expected


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_at_random_moments(cluster, layout):
    draw = random.Random(f"{SEED} {layout}")
    done, seconds = 0, []
    while done < KILLS:
        training = Training(cluster, layout, steps=100)
        while training.at < 80 and done < KILLS:
            rank, moment, after = draw.randrange(RANKS), draw.choice(MOMENTS), draw.randrange(1, 4)
            print(f"{layout}: step {training.at}, rank {rank}, {moment}, after {after}")  # shown if the test fails
            training.kill(rank, moment, after=after, delay=draw.uniform(0, 0.05))
            began = time.monotonic()
            assert "back at step" in str(training.heal())
            seconds.append(time.monotonic() - began)
            training.check(10)
            done += 1
    print(f"{layout}: {done} kills, heal took {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_during_heal(cluster, layout):
    draw = random.Random(f"{SEED} {layout} heal")
    done = 0
    while done < KILLS // 4:
        training = Training(cluster, layout, steps=100)
        while training.at < 80 and done < KILLS // 4:
            first, second = draw.sample(range(RANKS), 2)
            delay = draw.uniform(0, 0.6)
            print(f"{layout}: step {training.at}, rank {first}, and rank {second} after {delay:.3f} s")
            training.kill(first, "backward", after=draw.randrange(1, 4))
            pid = cluster.status()[second].pid
            assert pid is not None
            timer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
            timer.start()
            with contextlib.suppress(RankbookError):  # if the second one dies in the middle
                cluster.heal()
            timer.join()
            # It may also have died after the heal, or have been replaced by it.
            assert "back at step" in str(training.heal() or "back at step")
            training.check(10)
            done += 1
