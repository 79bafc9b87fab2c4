"""Test heal: the donor, the copied variables, and what remains when something fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

import rankbook
from rankbook import CellTimeout, Cluster, InvalidArgument, RankLostError, StartError, TransferError
from rankbook.coordinator.recovery import (
    ProtectionStatus,
    choose_random,
    copy_variables,
    describe_places,
    summarize_restore,
)
from rankbook.coordinator.states import RankEntry, RankState, choose_donor
from rankbook.launch import local
from rankbook.magics.views import ClusterViewSource
from rankbook.snapshot_files import SnapshotHeader, SnapshotVersion, TrainingPlace
from tests.conftest import wait_until

pytestmark = pytest.mark.processes


# Handing over, without ranks


class Rejecting:
    """An attempt that fails where `bad` variables are handed over, or `together` ones in one piece."""

    def __init__(self, bad: Sequence[str], together: Sequence[str] = ()) -> None:
        self.bad, self.together = set(bad), set(together)
        self.last: list[str] = []
        self.attempts = 0

    def __call__(self, names: Sequence[str]) -> str:
        self.attempts += 1
        self.last = list(names)
        if self.together and self.together <= set(names):
            return "they clash"
        return "".join(f"no {name}" for name in names if name in self.bad)


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ({0: b"a", 2: b"a"}, (b"a", False)),
        ({0: b"a", 2: b"b"}, (b"a", True)),
        ({0: b"a", 2: b""}, (b"a", True)),
        ({0: b"a"}, (b"a", False)),
        ({0: b"", 2: b"b"}, (b"", False)),
        ({0: b"", 2: b""}, (b"", False)),
    ],
)
def test_a_new_rank_continues_with_random_numbers_that_all_others_have_in_common(states, chosen):
    assert choose_random(states, 0) == chosen


class FailingProtect(Cluster):
    """A cluster without ranks whose first calls of `protect` fail."""

    stopped = True
    _all_ranks = (0, 1)

    def __init__(self, before: int, *, has_begun: bool, failures: int = 1) -> None:
        self.intervals: list[int | None] = []
        self._before, self._cell, self._failures = (
            before,
            SimpleNamespace(started=has_begun or None, ended=True),
            failures,
        )

    def protection(self) -> ProtectionStatus | None:
        return ProtectionStatus(self._before) if self._before else None

    def _collect(self, tasks, _timeout, _label, *, on_submit=lambda _: None):
        on_submit(self._cell)
        self.intervals.append(tasks[0][0](1).every)
        if len(self.intervals) <= self._failures:
            raise CellTimeout("protect was interrupted")


@pytest.mark.parametrize(
    ("before", "has_begun", "failures", "intervals"),
    [
        (5, False, 1, [10]),  # removed from the queue, behind a cell that still runs
        (5, True, 1, [10, 5]),
        (0, True, 1, [10, 0]),
        (5, True, 2, [10, 5, 0]),
    ],
)
def test_a_protection_stays_as_it_was_if_another_interval_fails(before, has_begun, failures, intervals):
    cluster = FailingProtect(before, has_begun=has_begun, failures=failures)
    with pytest.raises(CellTimeout):
        cluster.protect(10)
    assert cluster.intervals == intervals


def test_variables_are_transferred_together_if_none_fails():
    attempt = Rejecting([])
    assert copy_variables(["a", "b", "c"], attempt) == {}
    assert (attempt.attempts, attempt.last) == (1, ["a", "b", "c"])


@pytest.mark.parametrize("bad", [["a"], ["d"], ["c"], ["a", "d"], ["b", "c"], ["a", "b", "c", "d"]])
def test_only_variables_that_cannot_be_pickled_are_omitted(bad):
    attempt = Rejecting(bad)
    assert copy_variables(["a", "b", "c", "d"], attempt) == {name: f"no {name}" for name in bad}
    assert attempt.last == [name for name in "abcd" if name not in bad], "the rest is handed over in one piece"


def test_the_search_takes_few_attempts():
    names = [f"v{number}" for number in range(256)]
    attempt = Rejecting(["v100"])
    assert list(copy_variables(names, attempt)) == ["v100"]
    assert attempt.attempts <= 2 + 2 * 8


def test_variables_that_fail_only_together_are_an_error():
    with pytest.raises(TransferError, match="they clash"):
        copy_variables(["a", "b"], Rejecting([], together=["a", "b"]))


def test_the_donor_has_the_oldest_state_and_is_idle_if_possible():
    idle, busy, dead = RankState.IDLE, RankState.BUSY, RankState.DEAD
    assert choose_donor([RankEntry(0, dead), RankEntry(1, busy), RankEntry(2, idle)]) == 2
    assert choose_donor([RankEntry(0, dead), RankEntry(1, busy)]) == 1
    assert choose_donor([RankEntry(0, idle, since=4), RankEntry(1, busy)]) == 1
    assert choose_donor([RankEntry(0, idle, empty=True), RankEntry(1, dead)]) is None


def test_of_equal_donors_one_on_the_host_of_the_dead_rank_is_chosen():
    idle, busy = RankState.IDLE, RankState.BUSY
    ranks = [RankEntry(0, idle), RankEntry(1, idle), RankEntry(2, idle)]
    assert choose_donor(ranks) == 0
    assert choose_donor(ranks, nearby={2, 3}) == 2
    assert choose_donor([RankEntry(0, idle), RankEntry(2, busy)], nearby={2}) == 0, "nobody waits for a busy rank"


# With ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    local.prestart_forkserver()
    with rankbook.start(3) as cluster:
        yield cluster
    local.shutdown_prestarted()


@pytest.fixture
def cluster(three: Cluster) -> Cluster:
    if any(item.state == "dead" or item.empty for item in three.status()):
        three.restart()
    three.run("for _name in [n for n in globals() if n.startswith('v_')]: del globals()[_name]")
    return three


def kill(cluster: Cluster, rank: int) -> None:
    os.kill(pid_of(cluster, rank), signal.SIGKILL)
    wait_until(lambda: cluster.status()[rank].state == "dead", timeout=20, what=f"rank {rank} is dead")


def pid_of(cluster: Cluster, rank: int) -> int:
    pid = cluster.status()[rank].pid
    assert pid is not None
    return pid


def test_values_that_cannot_be_opened_are_listed_and_the_others_come_back(cluster):
    cluster.run(
        """from torch.nn.parallel import DistributedDataParallel
class TwoArguments(Exception):
    def __init__(self, one, other):
        super().__init__(one)
class Exits:
    def __reduce__(self):
        return __import__("sys").exit, (3,)
v_model = DistributedDataParallel(torch.nn.Linear(4, 4))
v_optimizer = torch.optim.SGD(v_model.parameters(), 0.1)
v_error = TwoArguments("a", "b")
v_p2p = dist.P2POp(dist.isend, torch.ones(1), (rank + 1) % 3)
v_exits = Exits()
v_held = [v_error]
v_number = 7"""
    )
    kill(cluster, 1)
    healed = cluster.heal()
    assert healed is not None
    assert set(healed.missing or {}) == {"v_error", "v_p2p", "v_held", "v_exits"}
    assert "TwoArguments" in healed.missing["v_error"]
    assert cluster.pull("v_number") == [7, 7, 7]
    reported = cluster.run("print(v_optimizer.param_groups[0]['params'][0] is next(v_model.parameters()))")
    assert reported.stdout == dict.fromkeys(range(3), "True\n")
    cluster.run("v_model(torch.ones(1, 4)).sum().backward(); v_optimizer.step()", timeout=60)
    assert [item.state for item in cluster.status()] == ["idle"] * 3


BROKEN = {
    "exits": ("__import__('os')._exit(3)", "ends the process with exit code 3"),
    "raises SystemExit": ("__import__('sys').exit(3)", "cannot be pickled: 3"),
    "kills": ("__import__('os').kill(__import__('os').getpid(), 9)", "kills the process with signal 9"),
    "kills its process group": ("__import__('os').killpg(0, 9)", "kills the process with signal 9"),
    "blocks": ("__import__('threading').Event().wait()", "takes longer than 1 s"),
    "forks": ("__import__('os').fork() or 1 / 0", ""),
}


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN)
def test_value_that_breaks_pickling_fails_neither_the_donor_nor_heal(cluster, code, reason):
    cluster.run(
        f"""from rankbook.rank import recovery
recovery.check_pickling.__kwdefaults__["seconds"] = 1.0
class Broken:
    def __reduce__(self):
        {code}
        return int, ()
v_before = 1
v_broken = Broken()
v_inside = [1, [v_broken]]
v_after = torch.ones(3)"""
    )
    pids = {rank: pid_of(cluster, rank) for rank in (0, 2)}
    kill(cluster, 1)
    healed = cluster.heal(timeout=60)
    assert healed is not None
    if reason:
        assert set(healed.missing or {}) == {"v_broken", "v_inside"}
        assert reason in healed.missing["v_broken"]
    assert cluster.pull("v_before") == [1, 1, 1]
    assert [item.tolist() for item in cluster.pull("v_after")] == [[1, 1, 1]] * 3
    assert {rank: pid_of(cluster, rank) for rank in (0, 2)} == pids


@pytest.mark.parametrize(
    ("code", "reason"),
    [("_exit(4)", "exited with code 4"), ("abort()", "was killed by SIGABRT")],
    ids=["exits", "crashes"],
)
def test_value_that_ends_the_rank_that_unpickles_it_is_listed_and_the_others_come_back(cluster, code, reason):
    cluster.run(
        f"""class Broken:
    def __reduce__(self):
        return exec, ("import os; os.{code}",)
v_model = torch.nn.Linear(2, 2)
v_optimizer = torch.optim.SGD(v_model.parameters(), 0.1)
v_broken = Broken()
v_number = 7"""
    )
    pids = {rank: pid_of(cluster, rank) for rank in (0, 2)}
    kill(cluster, 1)
    healed = cluster.heal(timeout=60)
    assert healed is not None
    assert healed.missing == {"v_broken": f"the rank that unpickled it {reason}"}
    assert cluster.pull("v_number") == [7, 7, 7]
    reported = cluster.run("print(v_optimizer.param_groups[0]['params'][0] is next(v_model.parameters()))")
    assert reported.stdout == dict.fromkeys(range(3), "True\n")
    assert {rank: pid_of(cluster, rank) for rank in (0, 2)} == pids
    kill(cluster, 1)
    cluster.run("del v_broken", ranks=[0, 2])
    assert cluster.heal().missing == {}


def test_rank_that_watches_numbers_since_its_restart_is_empty(cluster):
    cluster.watch_numbers("nan")
    cluster.restart(0)
    assert cluster.status()[0].empty
    cluster.watch_numbers("off")
    assert cluster.status()[0].empty
    cluster.heal()
    assert not cluster.status()[0].empty


def test_restarted_rank_is_empty_and_is_no_donor(cluster):
    cluster.run("v_state = rank")
    cluster.restart([0])
    assert [item.empty for item in cluster.status()] == [True, False, False]
    kill(cluster, 2)
    healed = cluster.heal()
    assert healed is not None
    assert healed.donor == 1
    assert cluster.pull("v_state", ranks=[1, 2]) == [1, 1]
    cluster.run("v_other = 1", ranks=[0])
    assert not cluster.status()[0].empty
    kill(cluster, 2)
    assert cluster.heal().donor == 1, "it has the older state"
    assert cluster.pull("v_state", ranks=[1, 2]) == [1, 1]


def test_an_empty_rank_can_be_healed_and_one_with_state_cannot(cluster):
    cluster.run("v_state = 5")
    with pytest.raises(InvalidArgument, match="rank 1 is not dead"):
        cluster.heal([1])
    kill(cluster, 1)
    assert cluster.heal(empty=True).donor is None
    assert [item.empty for item in cluster.status()] == [False, True, False]
    assert cluster.heal([1]).donor in (0, 2)
    assert cluster.pull("v_state") == [5, 5, 5]
    assert not any(element.empty for element in cluster.status())
    assert cluster.heal() is None


def test_one_of_several_dead_ranks_cannot_be_healed_alone(cluster):
    cluster.run("v_state = 5")
    kill(cluster, 1)
    kill(cluster, 2)
    with pytest.raises(InvalidArgument, match="rank 2 died as well"):
        cluster.heal([1])
    assert cluster.status()[1].state == "dead", "nothing was started"
    assert cluster.heal().donor == 0
    assert cluster.pull("v_state") == [5, 5, 5]


def test_a_live_rank_that_was_restarted_is_filled_by_heal_without_its_number(cluster):
    cluster.run("v_state = 5")
    assert "%distributed heal 1 copies" in ClusterViewSource(cluster).act("restart", 1)
    assert cluster.heal().donor in (0, 2)
    assert cluster.pull("v_state") == [5, 5, 5]


def test_a_live_rank_that_was_restarted_and_has_run_a_cell_is_filled_by_heal_with_its_number(cluster):
    cluster.run("v_state = 5")
    cluster.restart([1])
    cluster.run("v_later = 1")
    assert not cluster.status()[1].empty
    assert cluster.heal() is None, "its variables are not thrown away unasked"
    assert cluster.heal([1]).donor in (0, 2)
    assert (cluster.pull("v_state"), cluster.pull("v_later")) == ([5, 5, 5], [1, 1, 1])
    with pytest.raises(InvalidArgument, match="rank 1 is not dead"):
        cluster.heal([1])


def test_only_empty_ranks_left_is_an_error_and_the_rank_stays_dead(cluster):
    cluster.restart([0])
    cluster.restart([1])
    kill(cluster, 2)
    with pytest.raises(RankLostError, match="no rank with variables to copy is left"):
        cluster.heal()
    assert [item.state for item in cluster.status()] == ["idle", "idle", "dead"]


def test_a_new_rank_has_its_own_state_of_accelerate_and_an_accelerator_is_named(cluster):
    pytest.importorskip("accelerate")
    cluster.run(
        "from accelerate import Accelerator, PartialState\ntheirs = Accelerator(cpu=True)\n"
        "arguments = {'state': PartialState()}"
    )
    kill(cluster, 1)
    healed = cluster.heal()
    assert "AcceleratorState of Accelerate belongs to its process; run the cell again" in str(healed)
    cluster.run(
        "state = arguments['state']\nmade = state.process_index, state.num_processes, state.use_distributed\n"
        "has_accelerator = globals().pop('theirs', None) is not None\ndel arguments, state"
    )
    assert cluster.pull("made") == [(rank, 3, True) for rank in range(3)]
    assert cluster.pull("has_accelerator") == [True, False, True]


@pytest.mark.parametrize("victim", [0, 1], ids=["the donor", "the new rank"])
def test_kill_during_heal_leaves_a_dead_rank_and_not_an_empty_one(cluster, victim, tmp_path):
    at, go = tmp_path / "at", tmp_path / "go"
    cluster.run(
        f"""import os, pathlib, threading
def wait_for_gate(rank_now):
    if rank_now == {victim} and globals().get("wait_in", True):
        pathlib.Path({str(at)!r}).write_text(str(os.getpid()))
        while not os.path.exists({str(go)!r}):
            threading.Event().wait(0.01)
    return 1
class Slow:
    def __reduce__(self):
        import __main__
        pid = int(os.environ["RANKBOOK_TEST_RANK_PID"])
        if os.getpid() == pid: wait_for_gate(0)
        return wait_for_gate, ({victim},)
os.environ["RANKBOOK_TEST_RANK_PID"] = str(os.getpid())
v_slow, v_state = Slow(), 3""",
        ranks=[0, 2],
    )
    kill(cluster, 1)
    errors = []

    def heal():
        try:
            cluster.heal(timeout=60)
        except RankLostError as error:
            errors.append(error)

    thread = threading.Thread(target=heal)
    thread.start()
    wait_until(lambda: at.exists() and at.read_text() != "", timeout=20, what="heal is under way")
    os.kill(pid_of(cluster, victim), signal.SIGKILL)
    thread.join(30)
    go.touch()
    assert not thread.is_alive()
    assert len(errors) == 1
    assert [item.state for item in cluster.status()] == ["dead" if victim == 0 else "idle", "dead", "idle"]
    if victim == 0:
        assert "not restored" in (cluster.status()[1].loss or "")
    cluster.run("del v_slow, Slow, wait_for_gate", ranks=[2] if victim == 0 else [0, 2])
    assert cluster.heal().donor == (2 if victim == 0 else 0)
    assert cluster.pull("v_state") == [3, 3, 3]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        ("KeyboardInterrupt", "rank 0 was interrupted while"),
        ("RuntimeError('no descriptor')", "rank 0: .*no descriptor"),
    ],
)
def test_an_error_while_a_rank_renews_its_connections_leaves_ranks_that_heal_restores(cluster, error, reported):
    cluster.run("v_group = dist.new_group([0, 1, 2])")
    cluster.run(
        f"""from rankbook.rank.process_groups.recoverable_group import BackendGroup
original, v_state = BackendGroup.destroy, 6
def destroy(group):
    BackendGroup.destroy = original
    original(group)
    raise {error}
BackendGroup.destroy = destroy if rank == 0 else original""",
        ranks=[0, 1],
    )
    kill(cluster, 2)
    start = time.monotonic()
    with pytest.raises(StartError, match=f"(?s){reported}") as caught:
        cluster.heal(timeout=50)
    assert time.monotonic() - start < 40, "the other ranks have waited for rank 0 until their own timeout"
    assert "rank 1" not in str(caught.value)
    assert cluster.heal(timeout=60).donor == 0
    cluster.run("v_sum = torch.ones(1)\ndist.all_reduce(v_sum, group=v_group)\nv_sum = v_sum.item()", ranks=[0, 1, 2])
    assert (cluster.pull("v_state"), cluster.pull("v_sum")) == ([6, 6, 6], [3.0, 3.0, 3.0])


def test_an_optimizer_around_another_one_that_has_not_called_torchs_constructor_is_copied(cluster):
    cluster.run(
        """class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
    def step(self, closure=None):
        return self.inner.step(closure)
v_net = torch.nn.Linear(1, 1)
v_outer = Outer(torch.optim.SGD(v_net.parameters(), lr=0.1))"""
    )
    kill(cluster, 1)
    assert "not copied" not in str(cluster.heal())
    cluster.run(
        """from torch.optim.optimizer import register_optimizer_step_post_hook
v_calls = []
hook = register_optimizer_step_post_hook(lambda each, *_: v_calls.append(type(each).__name__))
v_net(torch.ones(1, 1)).sum().backward()
v_outer.step()
hook.remove()"""
    )
    assert cluster.pull("v_calls") == [["SGD"]] * 3


def test_a_rank_killed_a_moment_ago_is_healed(cluster):
    cluster.run("v_state = 4")
    for turn in range(3):
        os.kill(pid_of(cluster, 1), signal.SIGKILL)
        assert cluster.heal() is not None, f"nothing to heal in turn {turn}"
        assert cluster.pull("v_state", timeout=20) == [4, 4, 4]


def test_ranks_at_different_steps_are_named_with_the_snapshot_that_all_have():
    def place(step: int, *numbers: int, has_begun: bool = False, is_mixed: bool = False) -> TrainingPlace:
        headers = tuple(SnapshotHeader(SnapshotVersion(number, 0, number), 0.0, 8, 1) for number in numbers)
        return TrainingPlace(step, {0: step}, 0, has_begun, is_mixed, headers)

    together = {rank: place(4, 4, 3, has_begun=True) for rank in range(3)}
    assert describe_places(together) == ""
    assert describe_places({0: place(4, 4, 3), 1: place(3, 3, 2), 2: place(4, 4, 3, has_begun=True)}) == (
        "the ranks are at different places of the training: rank 0 is at step 4, rank 1 is at step 3, "
        "rank 2 is at step 4, and has begun step 5; %distributed heal brings all ranks back to the snapshot of step 3"
    )
    assert describe_places({0: place(4), 1: place(3, is_mixed=True), 2: place(4)}) == (
        "the ranks are at different places of the training: ranks 0,2 are at step 4, "
        "rank 1 is in the middle of the optimizer's step 4; no snapshot of one step is on all ranks: load a checkpoint"
    )


def test_variables_that_were_not_set_back_are_named_if_steps_are_repeated():
    answers = {0: {"refused": "", "step": 5, "lost": 0, "unprotected": ["losses"]}}
    assert summarize_restore(answers, [1]) == ("back at step 5: no step to repeat", False)
    answers[1] = {"refused": "", "step": 5, "lost": 1, "unprotected": ["losses", "number"]}
    assert summarize_restore(answers, [1]) == ("back at step 5: no step to repeat", False), "rank 1 is new"
    assert summarize_restore(answers, [0])[0].splitlines() == [
        "back at step 5: 1 step to repeat",
        "not part of the snapshot, and not set back: losses, number",
    ]
    answers = {0: {"refused": "", "step": 5, "lost": 2}}
    assert summarize_restore(answers, [1]) == ("back at step 5: 2 steps to repeat", False), "from replicas"
