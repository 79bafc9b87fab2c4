"""Faults for a real notebook: what each one does, when it happens, what the ranks hold, and how long recovery takes.

`FaultInjector` prepares the ranks, injects a fault, measures the times until the user has control again and until the
ranks work again, and checks afterwards that they are complete. Times are not judged here: a test only tells "recovered"
from "hung", and `tests/benchmarks/faults.py` compares them with limits.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import psutil

from rankbook.ranks import parse_ranks
from tests.conftest import Notebook, Outcome, running_kernel, wait_until
from tests.nccl_stand_in.ranks import environment

HUNG = 30.0
"""Seconds after which a fault has not been recovered from. What hangs does so for at least 60.

What is required is less, and the benchmark's business.
"""

Kind = Literal["raise", "mismatch", "kill", "interrupt"]
Victim = Literal["the one", "another", "idle"]


@dataclass(frozen=True)
class Fault:
    """Fault of one rank, `CULPRIT` in the code: it runs `one`, the other ranks `others`. The fault starts at `now()`.

    `victim` is who is killed, if somebody is: the one, one of the others in the midst of theirs, or the one while idle.
    `needs` names what the ranks have to hold for it to make sense; `workers`: loaders' workers take part; `alone`: the
    cell ends by itself, without an interrupt.
    """

    name: str
    kind: Kind
    one: str = ""
    others: str = ""
    victim: Victim = "the one"
    needs: str = ""
    workers: bool = False
    alone: bool = False


RAISES = "now()\nraise ValueError('of the culprit')"
RAISES_INSIDE = """def stop(_):
    now()
    raise ValueError('in the midst of it')
layer = list(MODEL.modules())[-7]
hook = layer.register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
try:
    loss_of(MODEL).backward()
finally:
    hook.remove()"""
SLOW_LOADER = """class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        time.sleep(60)
NOW
for batch in DataLoader(Slow(), num_workers=2): pass"""


def raised(name: str, others: str, one: str = RAISES, *, needs: str = "", workers: bool = False) -> Fault:
    return Fault(f"raises, others in {name}", "raise", one, others, needs=needs, workers=workers)


def interrupted(name: str, code: str, *, workers: bool = False) -> Fault:
    return Fault(
        f"interrupt in {name}", "interrupt", code.replace("NOW", "now()"), code.replace("NOW\n", ""), workers=workers
    )


FAULTS = (
    raised("all_reduce", "dist.all_reduce(torch.ones(4))"),
    raised("barrier", "dist.barrier()"),
    raised("recv", "dist.recv(torch.ones(4), src=CULPRIT)"),
    raised("send", "dist.send(torch.ones(1 << 23), dst=CULPRIT)"),
    raised(
        "a loader's broadcast",
        "while True:\n    dist.broadcast(torch.empty(8, 4), src=CULPRIT)",
        "for (batch,) in make_loader():\n    dist.broadcast(batch, src=CULPRIT)\n    now()\n    raise ValueError('it')",
        workers=True,
    ),
    raised("a sub-group's all_reduce", "dist.all_reduce(torch.ones(4), group=sub if rank in ENDS else None)"),
    raised("new_group", "dist.new_group(list(range(world_size)))"),
    raised("the wait for async work", "work = dist.all_reduce(torch.ones(4), async_op=True)\nwork.wait()"),
    raised("DDP backward", "loss_of(ddp).backward()", "loss = loss_of(ddp)\n" + RAISES, needs="DDP"),
    raised("FSDP2 forward", "loss_of(fsdp)", needs="FSDP2"),
    raised("FSDP2 backward", "loss_of(fsdp).backward()", "loss = loss_of(fsdp)\n" + RAISES, needs="FSDP2"),
    raised("DDP backward, in its midst", "loss_of(ddp).backward()", RAISES_INSIDE.replace("MODEL", "ddp"), needs="DDP"),
    raised("FSDP2 backward, in its midst", "loss_of(fsdp).backward()", RAISES_INSIDE.replace("MODEL", "fsdp"),
           needs="FSDP2"),
    raised("a prepared step", "accelerator.backward(loss_of(prepared))", "loss = loss_of(prepared)\n" + RAISES,
           needs="Accelerator"),
    raised("a prepared loop", "prepared_epoch()",
           "for _ in prepared_loader:\n    break\nnow()\nraise ValueError('in the loop')", needs="Accelerator"),
    raised("a dispatcher", "dispatch('of rank CULPRIT')", "now()\ndispatch('of rank CULPRIT')", needs="Accelerator"),
    raised("gather", "accelerator.gather(torch.ones(4))", needs="Accelerator"),
    raised("main_process_first", "with accelerator.main_process_first():\n    pass",
           "now()\nwith accelerator.main_process_first():\n    raise ValueError('whose turn it is')",
           needs="Accelerator"),
    Fault("all_reduce against barrier", "mismatch", "now()\ndist.barrier()", "dist.all_reduce(torch.ones(4))",
          alone=True),
    Fault("recv against all_reduce", "mismatch", "now()\ndist.all_reduce(torch.ones(4))",
          "dist.recv(torch.ones(4), src=CULPRIT)"),
    Fault("broadcasts from two roots", "mismatch",
          "now()\ndist.broadcast(torch.ones(4), src=NEXT)\ndist.barrier()",
          "dist.broadcast(torch.ones(4), src=CULPRIT)", alone=True),
    Fault("SIGKILL in a cell", "kill", "now()\ntime.sleep(60)", "time.sleep(60)"),
    Fault("SIGKILL, others in all_reduce", "kill", "now()\ntime.sleep(60)", "dist.all_reduce(torch.ones(4))"),
    Fault("SIGKILL of one in all_reduce", "kill", "now()\ntime.sleep(60)", "dist.all_reduce(torch.ones(4))",
          victim="another"),
    Fault("SIGKILL while idle", "kill", victim="idle"),
    interrupted("a sleep", "NOW\ntime.sleep(60)"),
    interrupted("a Python loop", "NOW\nwhile True: rank + 1"),
    interrupted("a matrix product", "a = torch.rand(700, 700)\nNOW\nwhile True: a = (a @ a) / 700"),
    interrupted("a loader with workers", SLOW_LOADER, workers=True),
    interrupted("a subprocess", "NOW\nsubprocess.run(['sleep', '60'])"),
    Fault("interrupt in a prepared loop", "interrupt", "now()\nwhile True: prepared_epoch()",
          "while True: prepared_epoch()", needs="Accelerator"),
    Fault("interrupt in all_reduce", "interrupt", "now()\ntime.sleep(60)", "dist.all_reduce(torch.ones(4))"),
)  # fmt: skip

BASE = """
import os, subprocess, time
from torch.utils.data import DataLoader, TensorDataset
kept, tensor = rank * 10, torch.arange(1000.0) + rank
for _old in [sub] if 'sub' in globals() and sub is not dist.GroupMember.NON_GROUP_MEMBER else []:
    dist.destroy_process_group(_old)
sub = dist.new_group([0, world_size - 1])
holds, checks = {'kept': kept, 'tensor': tensor, 'sub': sub}, []

def now():
    time.sleep(0.15)
    print('now', time.time())

def make_loader():
    return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8, num_workers=2)

def loss_of(model):
    return model(inputs).square().sum()

def network():
    torch.manual_seed(7)
    ends = lambda: torch.nn.Linear(16, 16)
    return torch.nn.Sequential(*[torch.nn.Sequential(ends(), torch.nn.Tanh(), ends()) for _ in range(3)])

def train(model, optimizer, twin, twins):
    for each, its in ((model, optimizer), (twin, twins)):
        its.zero_grad()
        loss_of(each).backward()
        its.step()

def alike(weights, twin):
    for mine, its in zip(weights, twin.parameters()):
        all_of = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(all_of, mine)
        assert all(torch.equal(each, mine) for each in all_of), 'the ranks have different weights'
        assert torch.allclose(mine, its, atol=1e-5), 'a step was not what it is on one process'

def check():
    assert kept == rank * 10 and tensor[0] == rank
    for name, value in holds.items():
        assert globals()[name] is value, name
    total = torch.ones(1)
    if sub is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(total, group=sub)
        assert total == 2
    for each in checks:
        each()
    return 'whole'

inputs = torch.linspace(-1, 1, 64).reshape(4, 16)
"""

HOLDINGS = {
    "tensors": "",
    "DDP": """
ddp, ddp_twin = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001), network()
ddp_optimizer, ddp_twins = (torch.optim.SGD(each.parameters(), 1e-2, momentum=0.9) for each in (ddp, ddp_twin))
def check_ddp():
    train(ddp, ddp_optimizer, ddp_twin, ddp_twins)
    alike([each.detach() for each in ddp.parameters()], ddp_twin)
check_ddp()
holds.update(ddp=ddp, ddp_optimizer=ddp_optimizer)
checks.append(check_ddp)
""",
    "FSDP2": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh('cpu', (world_size,))
fsdp, fsdp_twin = network(), network()
for _block in fsdp:
    fully_shard(_block, mesh=mesh)
fully_shard(fsdp, mesh=mesh)
fsdp_optimizer, fsdp_twins = (torch.optim.SGD(each.parameters(), 1e-2, momentum=0.9) for each in (fsdp, fsdp_twin))
def check_fsdp():
    train(fsdp, fsdp_optimizer, fsdp_twin, fsdp_twins)
    alike([each.detach().full_tensor() for each in fsdp.parameters()], fsdp_twin)
check_fsdp()
holds.update(mesh=mesh, fsdp=fsdp, fsdp_optimizer=fsdp_optimizer)
checks.append(check_fsdp)
""",
    "Accelerator": """
from rankbook import Accelerator, prepare_data_loader
accelerator = Accelerator()
_prepared, prepared_twin = network(), network()
prepared, prepared_optimizer, prepared_loader = accelerator.prepare(
    _prepared, torch.optim.SGD(_prepared.parameters(), 1e-2, momentum=0.9),
    DataLoader(TensorDataset(torch.arange(8 * world_size + 1)), batch_size=2))
prepared_twins = torch.optim.SGD(prepared_twin.parameters(), 1e-2, momentum=0.9)
def prepared_epoch():
    for (batch,) in prepared_loader:
        accelerator.gather_for_metrics(batch)
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared) * 0)
class Unsendable:
    def __init__(self, words): self.words = words
    def __reduce__(self): raise ValueError(f"a record that cannot be sent, {self.words}")
def dispatch(words):
    records = [torch.ones(2)] * 2 * world_size + [Unsendable(words)] * world_size
    for _ in prepare_data_loader(DataLoader(records, batch_size=1, collate_fn=list), dispatch_batches=True): pass
def check_prepared():
    prepared_optimizer.zero_grad()
    train(prepared, prepared_optimizer, prepared_twin, prepared_twins)
    alike([each.detach() for each in prepared.parameters()], prepared_twin)
    found = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in prepared_loader])
    assert sorted(found.tolist()) == list(range(8 * world_size + 1)), found
check_prepared()
holds.update(prepared=prepared, prepared_optimizer=prepared_optimizer, prepared_loader=prepared_loader)
checks.append(check_prepared)
""",
    "a loader": """
loader = make_loader()
def make_loader():
    return loader
def check_loader():
    assert sum(batch.sum().item() for (batch,) in loader) == 256
check_loader()
holds.update(loader=loader)
checks.append(check_loader)
""",
}

REDUCE = """%%distributed
total = torch.tensor(rank)
dist.all_reduce(total)
print('sum', total.item())"""


@dataclass(frozen=True)
class Case:
    """A fault in a world, with what its ranks hold."""

    world: int
    fault: Fault
    holdings: tuple[str, ...]
    chosen: int | None = None

    def __str__(self) -> str:
        return f"{self.world} ranks-{'+'.join(self.holdings)}-{self.fault.name}"

    @property
    def culprit(self) -> int:
        """Another one in each fault, so that each rank has its turn, unless one was `chosen`."""
        if self.chosen is not None:
            return self.chosen
        return (FAULTS.index(self.fault) + list(HOLDINGS).index(self.holdings[0])) % self.world


def cases(worlds: Iterable[int] = (2, 3, 4)) -> Iterator[Case]:
    """The whole matrix. What a fault does is the same whatever else is held, but it may do something to that."""
    for world in worlds:
        for holding in HOLDINGS:
            for fault in FAULTS:
                if fault.needs in ("", holding):
                    yield Case(world, fault, (holding,))


@dataclass(frozen=True)
class Times:
    """Seconds from the fault until the cell's reply, and until a collective has worked in a next cell.

    After a kill the second one has `%distributed restart` in it.
    """

    case: Case
    control: float
    works: float


@dataclass
class FaultInjector:
    """Injects faults into a kernel. `holdings`: the objects of its ranks; `sound`: all ranks have recovered."""

    world: int
    notebook: Notebook
    pids: dict[int, int] = field(default_factory=dict)
    holdings: tuple[str, ...] = ()
    sound: bool = True

    def hold(self, holdings: tuple[str, ...]) -> None:
        """Create the holdings on all ranks, unless they exist."""
        if holdings == self.holdings:
            return
        code = "".join(HOLDINGS[holding] for holding in holdings)
        output = self.notebook.ok(f"%%distributed\n{BASE}{code}\nprint('pid', os.getpid())").stdout
        self.pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d+)\] pid (\d+)", output)}
        assert sorted(self.pids) == list(range(self.world)), output
        self.holdings = holdings

    def inject(self, case: Case, *, recovery: str = "restart") -> Times:
        """Inject the fault, check the state of all ranks afterwards, and return the times.

        `recovery`: what brings a killed rank back, "restart" or "heal".
        """
        self.sound = False
        self.hold(case.holdings)
        assert sorted(self.pids.values()) == sorted(set(self.pids.values()))
        earlier_pids = set(self.notebook.processes())
        times = self._kill(case, recovery) if case.fault.kind == "kill" else self._survive(case)
        self.check_processes(earlier_pids, workers=case.fault.workers)
        self.sound = True
        return times

    def _survive(self, case: Case) -> Times:
        failure_time, outcome = self._run(case, self.notebook.interrupt)
        control = time.time() - failure_time
        words = outcome.evalue + outcome.traceback
        assert outcome.status == "error", outcome.text
        if case.fault.kind == "raise":
            assert "ValueError" in words, words
            assert f"rank {case.culprit}" in words, words
        else:
            assert outcome.ename in ("KeyboardInterrupt", "CollectiveAborted"), words
            assert not case.fault.alone or re.search(r"#\d+: ranks? \d", words), words
        self.check_works()
        works = time.time() - failure_time
        self.check_whole()
        return Times(case, control, works)

    def _kill(self, case: Case, recovery: str) -> Times:
        victim = (case.culprit + 1) % self.world if case.fault.victim == "another" else case.culprit
        process = psutil.Process(self.pids[victim])
        if case.fault.victim == "idle":
            failure_time = time.time()
            process.send_signal(signal.SIGKILL)
            outcome = self.notebook.run(REDUCE, timeout=HUNG)
        else:
            failure_time, outcome = self._run(case, lambda: process.send_signal(signal.SIGKILL))
        control = time.time() - failure_time
        assert outcome.status == "error", outcome.text
        assert f"rank {victim} was killed by SIGKILL" in outcome.text + outcome.evalue + outcome.traceback
        survivors = ",".join(str(rank) for rank in self.pids if rank != victim)
        before = time.time()
        self.notebook.ok(f"%distributed {recovery} {victim}", timeout=HUNG - 1)  # a hang shows its stacks
        self.check_works()
        works = control + time.time() - before
        if survivors:
            code = "for name, value in holds.items(): assert globals()[name] is value, name\nprint(kept, os.getpid())"
            output = self.notebook.ok(f"%%distributed --ranks {survivors}\n{code}").stdout
            for rank, pid in self.pids.items():
                assert rank == victim or f"[{rank}] {rank * 10} {pid}" in output, output
        holdings, self.holdings = self.holdings, ()
        self.hold(holdings)  # what needed the lost rank's state is made again; the rest was there
        self.check_whole()
        return Times(case, control, works)

    def _run(self, case: Case, inject: object) -> tuple[float, Outcome]:
        """Run the cell of the fault. Return the time of the fault and the outcome of the cell."""
        failure_time: list[float] = []

        def look(outcome: Outcome) -> None:
            match = re.search(rf"\[{case.culprit}\] now ([\d.]+)", outcome.stdout)
            if match is None or failure_time:
                return
            if case.fault.kind == "raise" or case.fault.alone:
                failure_time.append(float(match[1]))
            else:
                failure_time.append(time.time())
                inject()  # type: ignore[operator]

        outcome = self.notebook.finish(self.notebook.send(self._cell(case)), timeout=2 * HUNG, seen=look)
        assert failure_time, outcome.text + outcome.traceback
        assert time.time() - failure_time[0] < HUNG
        return failure_time[0], outcome

    def _cell(self, case: Case) -> str:
        ends = {0, self.world - 1}
        code = "\n".join(
            [
                "%%distributed",
                f"if rank == {case.culprit}:",
                textwrap.indent(case.fault.one, "    "),
                "else:",
                textwrap.indent(case.fault.others, "    "),
            ]
        )
        following = (case.culprit + 1) % self.world
        return code.replace("CULPRIT", str(case.culprit)).replace("NEXT", str(following)).replace("ENDS", str(ends))

    def check_works(self) -> None:
        """Check that a collective of all ranks works in the next cell."""
        total = self.world * (self.world - 1) // 2
        output = self.notebook.ok(REDUCE, timeout=HUNG).stdout
        labels = re.findall(rf"^\[([\d,-]+)\] sum {total}$", output, re.MULTILINE)  # who is late has a line of its own
        assert sorted(rank for label in labels for rank in parse_ranks(label, self.world)) == [*range(self.world)], (
            output
        )

    def check_whole(self) -> None:
        """Check that all holdings work: models learn as in one process, groups and loaders continue."""
        outcome = self.notebook.run("%%distributed\nprint(check(), os.getpid())", timeout=2 * HUNG)
        assert outcome.status == "ok", outcome.text + outcome.traceback
        for rank, pid in self.pids.items():
            assert f"[{rank}] whole {pid}" in outcome.stdout, outcome.stdout

    def check_processes(self, earlier_pids: set[int], *, workers: bool) -> None:
        """Check that no worker or subprocess remains, except those that the traceback of the last error references."""
        rank_pids = set(self.pids.values())
        allowed = 2 * self.world if workers else 0

        def more() -> set[int]:
            return set(self.notebook.processes()) - earlier_pids - rank_pids

        wait_until(lambda: len(more()) <= allowed, timeout=10, what="workers and subprocesses gone")


@contextlib.contextmanager
def open_injector(world: int, *, stand_in: bool = False) -> Iterator[FaultInjector]:
    """Start a kernel with `world` ranks, on gloo or on the stand-in for NCCL. Check that it leaves nothing behind."""
    # Not patient: a fault comes once its culprit's line is seen, which the others have not.
    # Its ranks need not be waited for as long as a person's: what follows the grace period is the same.
    # Every healed rank would import torch._dynamo and FSDP2 anew.
    env = {"RANKBOOK_ABORT_GRACE": "0.3", "RANKBOOK_PRELOAD": "start"}
    if stand_in:
        env |= environment()
    with running_kernel(patient=False, timeout=5, env=env) as notebook:
        notebook.ok(f"%distributed start -n {world}{' --backend stand_in' if stand_in else ''}")
        yield FaultInjector(world, notebook)


@contextlib.contextmanager
def injector_pool(*, stand_in: bool = False) -> Iterator[Callable[[int], FaultInjector]]:
    """Yield a function that returns an injector with that many ranks.

    The one before it ends if it has another number of ranks, or if a fault has failed to be recovered from on it.
    """
    with contextlib.ExitStack() as stack:
        current: list[FaultInjector] = []

        def injector_for(world: int) -> FaultInjector:
            if not current or current[0].world != world or not current[0].sound:
                stack.close()
                current[:] = [stack.enter_context(open_injector(world, stand_in=stand_in))]
            return current[0]

        yield injector_for


def raise_on_rank_1(notebook: Notebook, others: str, *, timeout: float = 20) -> Outcome:
    """Let rank 1 raise, while rank 0 executes `others` and then prints "went on"."""
    code = "\n    ".join(others.splitlines())
    cell = f"%%distributed\nif rank == 1:\n    raise ValueError('of rank 1')\nelse:\n    {code}\n    print('went on')"
    outcome = notebook.run(cell, timeout=timeout)
    assert outcome.status == "error"
    assert "ValueError: of rank 1" in outcome.traceback
    return outcome


def table(measured: Iterable[Times]) -> str:
    """Return a Markdown table: the median and the longest time of every fault and number of ranks."""
    of: dict[str, dict[int, list[Times]]] = defaultdict(lambda: defaultdict(list))
    for item in measured:
        of[item.case.fault.name][item.case.world].append(item)
    worlds = sorted({world for row in of.values() for world in row})
    lines = [
        "| fault | " + " | ".join(f"{world} ranks: control back | next collective" for world in worlds) + " |",
        "|---" * (1 + 2 * len(worlds)) + "|",
    ]
    for name, row in of.items():
        cells = [
            _brief([getattr(element, column) for element in row[world]])
            for world in worlds
            for column in ("control", "works")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Seconds from the fault: median (longest) over what the ranks held. After SIGKILL the next collective ",
    ]
    lines[-1] += "has `%distributed restart` in it, and no waiting in between."
    return "\n".join(lines)


def _brief(seconds: list[float]) -> str:
    if not seconds:
        return "–"
    return f"{statistics.median(seconds):.2f}" + (f" ({max(seconds):.2f})" if len(seconds) > 1 else "")


def write_table(measured: list[Times]) -> None:
    """Write the table to the file that RANKBOOK_FAULTS_TABLE names, if it is set."""
    if measured and (path := os.environ.get("RANKBOOK_FAULTS_TABLE")):
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - as short as it gets
            file.write(table(measured) + "\n")
