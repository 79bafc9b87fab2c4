"""Ranks on the stand-in for NCCL: a fault ends the waits for the device, tells why, and costs nothing else.

Not shown here, because a CPU has nothing like it: contexts on other devices, and the variables of the real watchdog.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import Notebook, Outcome, running_kernel, wait_until
from tests.faults.injection import raise_on_rank_1
from tests.nccl_stand_in.ranks import environment

pytestmark = pytest.mark.slow


REDUCE = "t = torch.full((2,), rank + 1.0)\ndist.all_reduce(t)\n"
DDP = """from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    ddp(torch.full((4, 4), rank + 1.0)).sum().backward()
    optimizer.step()
for _ in range(3):
    step()  # after the first one, DDP arranges its buckets anew, and waits on the host
"""


@pytest.fixture(scope="module")
def module_stand_in() -> Iterator[Notebook]:
    with running_kernel(env={**environment(), "RANKBOOK_ABORT_GRACE": "0.3"}) as notebook:
        notebook.ok("%distributed start -n 2 --backend stand_in")
        notebook.ok("%%distributed\nfrom tests.nccl_stand_in import current_device\nstand_in = current_device()")
        yield notebook


@pytest.fixture
def stand_in(module_stand_in: Notebook) -> Iterator[Notebook]:
    """Return the module's kernel, whose ranks must have a working group afterwards."""
    yield module_stand_in
    works(module_stand_in)


def works(notebook: Notebook) -> None:
    outcome = notebook.ok(f"%%distributed\n{REDUCE}print('sum', t.tolist())", timeout=20)
    assert re.findall(r"sum (.*)", outcome.stdout) in (["[3.0, 3.0]"], ["[3.0, 3.0]"] * 2)


def lines(outcome: Outcome) -> set[str]:
    return set(outcome.stdout.splitlines())


def run_and_interrupt(notebook: Notebook, code: str, *words: str, timeout: float = 30) -> Outcome:
    """Run a cell, and interrupt it when both ranks, or a message of the cell, have said each of `words` in turn."""
    waiting = list(words)

    def press(outcome: Outcome) -> None:
        word = waiting[0] if waiting else None
        by_both = {f"[0-1] {word}"} & lines(outcome) or {f"[0] {word}", f"[1] {word}"} <= lines(outcome)
        if word is not None and (by_both or word in outcome.stderr):
            waiting.pop(0)
            notebook.interrupt()

    outcome = notebook.finish(notebook.send(code), timeout=timeout, seen=press)
    assert not waiting, outcome.text
    return outcome


def test_ranks_launch_collectives_and_the_device_executes_them_later(stand_in):
    outcome = stand_in.ok(
        """%%distributed
from tests.nccl_stand_in import current_device
stand_in = current_device()
stand_in.held = True
tensor = torch.full((2,), rank + 1.0)
assert dist.all_reduce(tensor) is None
pending = stand_in.pending
stand_in.held = False
print(pending, tensor.tolist(), dist.get_backend())"""
    )
    assert "[0-1] ['all_reduce'] [3.0, 3.0] stand_in" in outcome.stdout


def test_a_ddp_step_trains_on_the_device_of_the_ranks(stand_in):
    outcome = stand_in.ok(
        """%%distributed
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((4, 4), float(rank))).sum().backward()
optimizer.step()
print(round(model.module.weight.sum().item(), 4))"""
    )
    assert "[0-1] " in outcome.stdout


def test_a_measured_cell_says_when_the_device_was_done(stand_in):
    outcome = stand_in.ok(
        """%%distributed --time
import threading
stand_in.held = True
stand_in.submit("a kernel", lambda: None)
threading.Timer(1.0, lambda: setattr(stand_in, "held", False)).start()""",
        timeout=30,
    )
    (display,) = [display for display in outcome.displays if "waited" in display["text/plain"]]
    rows = [re.split(r"  +", line) for line in display["text/plain"].splitlines()]
    assert rows[0][1:3] == ["wall", "device done"]
    for rank, row in enumerate(rows[1:3]):
        assert row[0] == str(rank) and 1.0 <= float(row[2].removesuffix(" s")) < 20
        assert row[1].endswith((" ms", " µs")), "the host was not held"


def test_an_interrupt_ends_the_wait_for_the_device_of_a_measured_cell(stand_in):
    code = "%%distributed --time\nstand_in.held = True\nstand_in.submit('a kernel', lambda: None)\nprint('queued')"
    try:
        outcome = run_and_interrupt(stand_in, code, "queued")
    finally:
        stand_in.ok("%%distributed\nstand_in.held = False")
    assert outcome.status == "error" and "KeyboardInterrupt" in outcome.traceback
    assert "device done" not in outcome.text


def test_groups_are_connected_when_they_are_formed(stand_in):
    """Check it: a rank that connects in its first collective is reached by neither an abort nor an interrupt."""
    outcome = stand_in.ok(
        """%%distributed
sub = dist.new_group([0, 1])
print([group._get_backend(torch.device('cpu')).is_connected for group in (dist.group.WORLD, sub)])"""
    )
    assert "[0-1] [True, True]" in outcome.stdout


def test_a_wait_in_the_first_collective_of_a_group_is_broken_off(stand_in):
    code = "group = dist.new_group([0])\nt = torch.ones(2)\ndist.all_reduce(t)\nt.tolist()"
    outcome = raise_on_rank_1(stand_in, code)
    assert "CollectiveAborted" in outcome.traceback
    assert "went on" not in outcome.stdout


def test_messages_of_a_batch_may_be_larger_than_the_buffers(stand_in):
    outcome = stand_in.ok(
        """%%distributed
from tests.nccl_stand_in import BUFFER_BYTES
sent, received = torch.full((BUFFER_BYTES,), float(rank)), torch.zeros(BUFFER_BYTES)
batch = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
for work in dist.batch_isend_irecv(batch):
    work.wait()
print(received.unique().tolist() == [1.0 - rank], len(batch))""",
        timeout=20,
    )
    assert "[0-1] True 2" in outcome.stdout


def test_a_batch_whose_peer_raised_is_broken_off(stand_in):
    batch = "t = torch.zeros(2)\nbatch = [dist.P2POp(dist.irecv, t, 1)]\n"
    code = f"{batch}for work in dist.batch_isend_irecv(batch):\n    work.wait()\nt.tolist()"
    outcome = raise_on_rank_1(stand_in, code)
    assert "rank 1 raised ValueError" in outcome.traceback
    assert re.search(
        r"CollectiveAborted.* while this rank waited in recv \(float32\[2\] from rank 1\)", outcome.traceback
    )


def test_collectives_are_launched_after_a_batch_that_failed(stand_in):
    """torch keeps the list of a batch in which an operation raises, and appends later collectives to it."""
    outcome = stand_in.ok(
        """%%distributed
from rankbook.rank.process_groups.recoverable_group import RecoverableProcessGroup
original = RecoverableProcessGroup._launch
def fail(self, *arguments):
    raise KeyboardInterrupt
for broken in (fail, original):
    RecoverableProcessGroup._launch = broken
    received = torch.zeros(2)
    batch = [dist.P2POp(dist.isend, torch.full((2,), rank + 1.0), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    try:
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    except KeyboardInterrupt:
        print('interrupted')
total = torch.ones(2)
dist.all_reduce(total)
print(total.tolist(), received.tolist() == [2.0 - rank] * 2)""",
        timeout=20,
    )
    assert outcome.stdout == "[0-1] interrupted\n[0-1] [2.0, 2.0] True\n"


WAITS = {
    "item": "t = torch.ones(2)\ndist.all_reduce(t)\nt.sum().item()",
    "work": "t = torch.ones(2)\nwork = dist.all_reduce(t, async_op=True)\nwork.wait()\nt.tolist()",
    "future": "t = torch.ones(2)\nwork = dist.all_reduce(t, async_op=True)\nwork.get_future().wait()\nt.tolist()",
    "barrier": "dist.barrier()",
    "objects": "dist.all_gather_object([None, None], 'an object')",
    "synchronize": "dist.all_reduce(torch.ones(2))\nstand_in.synchronize()",
    "a sub-group": "sub = SUB\nt = torch.ones(2)\ndist.all_reduce(t, group=sub)\nt.tolist()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_a_rank_that_raised_is_broken_off(stand_in, wait):
    """Check that a wait for the device ends with the reason, and nothing goes on with partial data."""
    stand_in.ok("%%distributed\nSUB = dist.new_group([0, 1])")
    outcome = raise_on_rank_1(stand_in, WAITS[wait])
    assert "CollectiveAborted: rank 1 raised ValueError at cell" in outcome.traceback
    assert "went on" not in outcome.stdout


def test_a_cell_does_not_end_before_its_collectives(stand_in):
    """The cell of a rank that only launches fails as well: what it has launched will never have a result."""
    outcome = raise_on_rank_1(stand_in, "dist.all_reduce(torch.ones(2))")
    assert "went on" in outcome.stdout
    assert "CollectiveAborted: rank 1 raised ValueError" in outcome.traceback


def test_a_cell_can_catch_the_error_of_an_abort(stand_in):
    code = """try:
    t = torch.ones(2)
    dist.all_reduce(t)
    t.tolist()
except rankbook.CollectiveAborted as error:
    print('caught', error)"""
    outcome = raise_on_rank_1(stand_in, f"import rankbook\n{code}")
    assert "caught rank 1 raised ValueError" in outcome.stdout
    assert "went on" in outcome.stdout


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ("dist.barrier()", r"rank 0 began all_reduce float32\[2\] sum at line 6, rank 1 barrier at line 4"),
        (
            "t = torch.ones(3)\ndist.all_reduce(t)\nt.tolist()",
            r"rank 0 gave float32\[2\] at line 8, rank 1 float32\[3\] at line 5",
        ),
    ],
    ids=["operations", "shapes"],
)
def test_mismatched_collectives_are_reported(stand_in, one, words):
    code = "\n    ".join(one.splitlines())
    outcome = stand_in.run(
        f"%%distributed\nt = torch.ones(2)\nif rank == 1:\n    {code}\nelse:\n    dist.all_reduce(t)\n    t.tolist()",
        timeout=20,
    )
    assert outcome.status == "error"
    assert re.search(words, outcome.traceback), outcome.traceback


def test_an_interrupt_ends_a_wait_for_the_device(stand_in):
    code = f"%%distributed\nprint('now')\nif rank == 1: dist.recv(t, 0)\nelse:\n    {WAITS['barrier']}"
    outcome = run_and_interrupt(stand_in, code, "now", timeout=20)
    assert outcome.ename in ("KeyboardInterrupt", "CollectiveAborted")


def test_a_rank_answers_while_its_device_does_not(stand_in):
    """The control thread asks no device."""
    stand_in.ok("%%distributed\nmodel = torch.nn.Linear(2, 2)\nstand_in.held = stand_in.queries_hang = True")
    message = stand_in.send(
        f"%%distributed --background\nimport time\n{REDUCE}while stand_in.held: time.sleep(0.05)\nprint(t.tolist())"
    )
    outcome = stand_in.finish(message)
    statistic = stand_in.run("import rankbook; rankbook.current().statistic('model', 'weight', 0, timeout=20)")
    assert "has not executed within 1.5 s what is queued on it" in statistic.traceback
    for _ in range(3):
        output = stand_in.ok("%distributed status").text
        assert len(re.findall("running|waiting", output)) == 2, output
        assert "unresponsive" not in output
    wait_until(
        lambda: "waiting in all_reduce" in stand_in.ok("%distributed stacks").text, timeout=20, what="the collective"
    )
    assert "[0-1] True" in stand_in.ok("%distributed peek stand_in.held").stdout
    stand_in.ok("%distributed peek (setattr(stand_in,'queries_hang',False),setattr(stand_in,'held',False))")
    stand_in.follow(message, outcome, lambda so_far: "[3.0, 3.0]" in so_far.stdout, timeout=30)


def test_a_step_on_a_broken_off_gradient_is_taken_back(stand_in):
    """The weights are those of a rank that has not taken the step, on all ranks."""
    stand_in.ok(f"%%distributed\n{DDP}\nbefore = [each.tolist() for each in ddp.parameters()]")
    outcome = raise_on_rank_1(stand_in, "step()\nddp.module.weight.sum().item()")
    assert "CollectiveAborted" in outcome.traceback
    outcome = stand_in.ok("%%distributed\nprint([each.tolist() for each in ddp.parameters()] == before)")
    assert "[0-1] True" in outcome.stdout
    outcome = stand_in.ok("%%distributed\nstep()\nprint(ddp.module.weight.tolist())")
    assert "[0-1] " in outcome.stdout


def test_a_step_on_a_broken_off_gradient_of_a_transposed_weight_is_taken_back(stand_in):
    """NCCL sends no tensor that is not contiguous."""
    stand_in.ok(
        f"""%%distributed
{DDP}
layer = torch.nn.Linear(4, 3)
layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
ddp = DistributedDataParallel(layer)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
step()
step()
before = [each.tolist() for each in ddp.parameters()]"""
    )
    outcome = raise_on_rank_1(stand_in, "step()\nddp.module.weight.sum().item()")
    assert "CollectiveAborted" in outcome.traceback
    outcome = stand_in.ok(
        "%%distributed\nprint(layer.weight.is_contiguous(), [each.tolist() for each in ddp.parameters()] == before)"
    )
    assert "[0-1] False True" in outcome.stdout
    assert "had not taken it" in outcome.stderr and "not to be trusted" not in outcome.stderr


@pytest.mark.parametrize("hook", ["register_state_dict_pre_hook", "register_load_state_dict_pre_hook"])
def test_weights_whose_optimizer_cannot_be_copied_are_named(stand_in, hook):
    """The one cannot be read on the source, or the other one not be written elsewhere."""
    refuse = "def refuse(*_):\n    raise RuntimeError('it has not been consolidated')"
    stand_in.ok(f"%%distributed\n{DDP}\n{refuse}\noptimizer.{hook}(refuse)")
    assert "CollectiveAborted" in raise_on_rank_1(stand_in, "step()\nddp.module.weight.sum().item()").traceback
    outcome = stand_in.ok("%%distributed\npass")
    assert "[0-1] SGD: its state was not copied from rank 1: RuntimeError: it has" in outcome.stderr
    assert re.search(r"ddp.*optimizer.* not to be trusted", outcome.stderr), outcome.text
    assert "all ranks continue" not in outcome.stderr


def test_weights_that_differ_between_ranks_are_named_and_not_copied(stand_in):
    stand_in.ok(
        """%%distributed
torch.manual_seed(rank)
shard = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(shard.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    shard(torch.ones(1, 4)).sum().backward()
    dist.all_reduce(shard.bias.grad)
    optimizer.step()
step()
seen = [each.tolist() for each in shard.parameters()]"""
    )
    outcome = raise_on_rank_1(stand_in, "step()\nshard.weight.sum().item()")
    assert "CollectiveAborted" in outcome.traceback
    outcome = stand_in.ok(
        """%%distributed
rows = [None, None]
dist.all_gather_object(rows, shard.weight.tolist())
print(rows[0] == rows[1], rank == 0 or [each.tolist() for each in shard.parameters()] == seen)"""
    )
    assert "[0-1] False True" in outcome.stdout
    assert re.search(r"shard.*optimizer.* not to be trusted", outcome.stderr), outcome.text
    assert "all ranks continue" not in outcome.stderr


def test_weights_that_no_rank_has_right_are_named(stand_in):
    stand_in.ok(f"%%distributed\n{DDP}")
    code = "%%distributed\nif rank == 1: stand_in.held = True\nstep()\nprint('now')\nddp.module.weight.sum().item()"
    # Once more when the cell says that the devices need time.
    outcome = run_and_interrupt(stand_in, code, "now", "a second interrupt")
    assert outcome.status == "error"
    stand_in.ok("%distributed peek setattr(stand_in,'held',False)")
    outcome = stand_in.ok("%%distributed\nstand_in.held = False")
    assert re.search(r"ddp.*optimizer.* not to be trusted", outcome.stderr), outcome.text
    assert "not to be trusted" not in stand_in.ok("%%distributed\npass").stderr


# torch's own SyncBatchNorm refuses the CPU, and DDP refuses a model with one there.
STATISTICS = f"""%%distributed
{DDP}
class Synchronized(torch.nn.SyncBatchNorm):
    def forward(self, x):
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        self.running_mean.copy_(mean)
        return x
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4)), broadcast_buffers=False)
net.module.append(Synchronized(4, affine=False))
before = net.module[1].running_mean.tolist()"""


@pytest.fixture
def with_statistics(stand_in: Notebook) -> Iterator[None]:
    """Give the ranks a model with running statistics."""
    stand_in.ok(STATISTICS)
    yield
    stand_in.ok("%%distributed\ndel net")  # `heal` would make it anew, which DDP refuses


@pytest.mark.usefixtures("with_statistics")
def test_running_statistics_of_a_broken_off_collective_are_taken_back(stand_in):
    """No optimizer has stepped, and yet the forward pass has written what the aborted collective has left."""
    outcome = raise_on_rank_1(stand_in, "net(torch.ones(2, 4)); stand_in.synchronize()")
    assert "CollectiveAborted" in outcome.traceback
    outcome = stand_in.ok("%%distributed\nstand_in.held = False\nprint(net.module[1].running_mean.tolist() == before)")
    assert "[0-1] True" in outcome.stdout
    assert "not to be trusted" not in outcome.stderr


@pytest.mark.usefixtures("with_statistics")
def test_running_statistics_that_no_rank_has_right_are_named(stand_in):
    code = (
        "%%distributed\nif rank == 1: stand_in.held = True\nnet(torch.ones(2, 4))\nprint('now')\nstand_in.synchronize()"
    )
    assert run_and_interrupt(stand_in, code, "now", "a second interrupt").status == "error"
    stand_in.ok("%distributed peek setattr(stand_in,'held',False)")
    outcome = stand_in.ok("%%distributed\nstand_in.held = False")
    assert re.search(r"net: .*SyncBatchNorm: its running statistics are not to be trusted", outcome.stderr), (
        outcome.text
    )
    assert "not to be trusted" not in stand_in.ok("%%distributed\npass").stderr


WEIGHTS = "print('weights', ddp.module.weight.tolist())"


def expect_three_steps(notebook: Notebook) -> set[str]:
    """Make the model, and return the lines with the weights that it has after three steps."""
    notebook.ok(f"%%distributed\n{DDP}")
    expected = lines(notebook.ok(f"%%distributed\nfor _ in range(3): step()\n{WEIGHTS}"))
    notebook.ok(f"%%distributed\n{DDP}")
    return expected


def check_weights(notebook: Notebook, expected: set[str]) -> None:
    """Check that the steps on the slow devices were executed, and that the weights count as right."""
    outcome = notebook.ok(f"%%distributed\nstand_in.delay = 0.0\n{WEIGHTS}", timeout=30)
    assert lines(outcome) == expected
    assert "not to be trusted" not in outcome.text


def test_an_error_on_all_ranks_costs_none_of_the_steps_that_their_devices_have_still_to_execute(stand_in):
    expected = expect_three_steps(stand_in)
    outcome = stand_in.run("%%distributed\nstand_in.delay = 0.02\nfor _ in range(3): step()\nundefined_name")
    assert "NameError" in outcome.traceback
    check_weights(stand_in, expected)


def test_an_interrupt_cuts_no_collective_short_that_is_only_slow(stand_in):
    expected = expect_three_steps(stand_in)
    steps = "stand_in.delay = 0.05\nfor _ in range(3): step()\nprint('now')\nddp.module.weight.sum().item()"
    outcome = run_and_interrupt(stand_in, f"%%distributed\n{steps}", "now")
    assert outcome.ename == "KeyboardInterrupt", outcome.text
    check_weights(stand_in, expected)


def test_a_killed_rank_is_healed_and_training_goes_on(stand_in):
    stand_in.ok(f"%%distributed\n{DDP}")
    pid = re.search(r"\[1\] pid (\d+)", stand_in.ok("%%distributed\nimport os\nprint('pid', os.getpid())").stdout)
    assert pid is not None
    message = stand_in.send(
        f"%%distributed\nimport time\nprint('now')\nif rank == 1: time.sleep(60)\n{REDUCE}t.tolist()"
    )
    killed: list[int] = []

    def kill(outcome: Outcome) -> None:
        if "[1] now" in outcome.stdout or "[0-1] now" in outcome.stdout:
            killed or psutil.Process(int(pid[1])).kill()
            killed.append(1)

    outcome = stand_in.finish(message, timeout=20, seen=kill)
    assert "rank 1 was killed by SIGKILL" in outcome.traceback
    stand_in.ok("%distributed heal")
    stand_in.ok("%%distributed\nfrom tests.nccl_stand_in import current_device\nstand_in = current_device()")
    outcome = stand_in.ok("%%distributed\nfor _ in range(3): step()\nprint(ddp.module.weight.tolist())", timeout=30)
    assert "[0-1] " in outcome.stdout


def test_lost_device_is_reported_and_its_rank_can_be_healed(stand_in):
    stand_in.ok(f"%%distributed\n{DDP}\nkept = rank + 5")
    outcome = stand_in.run(f"%%distributed\nif rank == 0: stand_in.poison()\n{REDUCE}t.tolist()", timeout=20)
    assert outcome.status == "error"
    assert "rank 0: DeviceError: CUDA error: device-side assert triggered" in outcome.traceback
    assert "has failed and executes nothing any more" in outcome.stderr
    assert "%distributed heal replaces rank 0" in outcome.stderr
    output = stand_in.ok("%distributed status").text
    assert re.search(r"0 .*device lost.*device-side assert.*heal", output), output
    stand_in.ok("%distributed pull kept --ranks 0")
    assert stand_in.ok("kept").displays[-1]["text/plain"] in ("5", "[5]")
    assert "[1] 6" in stand_in.ok("%%distributed --ranks 1\nprint(kept)").stdout
    output = stand_in.ok("%distributed heal").stdout
    assert "rank 0 was healed with the state of rank 1" in output
    stand_in.ok("%%distributed\nfrom tests.nccl_stand_in import current_device\nstand_in = current_device()")
    assert "[0-1] 6" in stand_in.ok("%%distributed\nprint(kept)").stdout


def test_a_restart_of_an_idle_rank_waits_for_nobody(stand_in):
    stand_in.ok("%distributed restart 1", timeout=20)
    stand_in.ok("%%distributed\nfrom tests.nccl_stand_in import current_device\nstand_in = current_device()")


NCCL_ERROR = (
    "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.3\\nncclInvalidUsage: This usually reflects "
    "invalid usage of NCCL library.\\nLast error:\\n"
)


@pytest.mark.parametrize("call", ["dist.all_reduce(torch.ones(2))", "dist.new_group([0, 1])"])
def test_nccl_error_text_is_shown_to_the_user(stand_in, call):
    outcome = stand_in.run(
        f"""%%distributed
stand_in.refusal = "{NCCL_ERROR}Duplicate GPU detected : rank 0 and rank 1"
try:
    {call}
finally:
    stand_in.refusal = ''""",
        timeout=20,
    )
    assert "DistBackendError: Duplicate GPU detected : rank 0 and rank 1" in outcome.traceback
    assert "CollectiveAborted" not in outcome.traceback


def test_a_wait_for_a_rank_whose_launch_has_failed_is_broken_off(stand_in):
    outcome = stand_in.run(
        """%%distributed
t = torch.ones(2)
if rank == 1:
    def refuse(*_):
        raise RuntimeError("NCCL error in: x\\nLast error:\\nFailed to CUDA calloc 4 bytes")
    dist.group.WORLD._get_backend(torch.device('cpu')).allreduce = refuse
dist.all_reduce(t)
t.tolist()
print("went on")""",
        timeout=20,
    )
    assert "RuntimeError: Failed to CUDA calloc 4 bytes" in outcome.traceback
    assert "CollectiveAborted: rank 1 raised RuntimeError" in outcome.traceback, outcome.traceback
    assert "went on" not in outcome.stdout


WORKS = {
    "synchronous": "dist.all_reduce(t, group=sub)",
    "asynchronous": "work = dist.all_reduce(t, group=sub, async_op=True)\n        work.wait()",
}


@pytest.mark.parametrize("kind", WORKS)
def test_a_collective_that_exceeds_the_timeout_of_its_group_is_broken_off(stand_in, tmp_path, kind):
    """The watchdog only notes it, and aborts the communicator a minute later without an error."""
    outcome = stand_in.run(
        f"""%%distributed
import pathlib, time
from datetime import timedelta
sub, ended = dist.new_group([0, 1], timeout=timedelta(seconds=0.5)), pathlib.Path({str(tmp_path / "ended")!r})
t = torch.ones(2)
if rank == 0:
    try:
        {WORKS[kind]}
        t.tolist()
        print("went on")
    finally:
        ended.touch()
while not ended.exists(): time.sleep(0.05)""",
        timeout=30,
    )
    assert re.search(
        r"CollectiveAborted: a collective has taken longer than the timeout of its process group while this rank "
        r"waited in all_reduce #1 \(float32\[2\]\) at line \d+",
        outcome.traceback,
    ), outcome.traceback
    assert "went on" not in outcome.stdout


def test_a_connection_that_nccl_has_lost_breaks_its_collectives_off(stand_in):
    outcome = stand_in.run(
        """%%distributed
t = torch.ones(2)
if rank == 0:
    dist.group.WORLD._get_backend(torch.device('cpu')).break_connection()
dist.all_reduce(t, async_op=True).wait()
t.tolist()
print("went on")""",
        timeout=20,
    )
    assert "CollectiveAborted: NCCL has reported an error (COMM_ERROR" in outcome.traceback, outcome.traceback
    assert "[0] went on" not in outcome.stdout


def test_a_graph_is_recorded_beside_collectives_that_the_device_has_not_finished(stand_in):
    outcome = stand_in.ok(
        """%%distributed
stand_in.held = True
before, t = torch.ones(2), torch.full((2,), rank + 1.0)
dist.all_reduce(before)  # `rankbook-device` asks for its end all the while
pending = dist.group.WORLD.log.report().pending
import time
with stand_in.capture() as graph:
    dist.all_reduce(t)
    time.sleep(0.2)  # which makes a recording invalid if that thread may not ask
counted = len(pending), len(dist.group.WORLD.log.report().pending)
stand_in.held = False
for _ in range(2):
    graph.replay()
print(before.tolist(), t.tolist(), counted)""",
        timeout=20,
    )
    assert "[0-1] [2.0, 2.0] [6.0, 6.0] (1, 1)" in outcome.stdout
