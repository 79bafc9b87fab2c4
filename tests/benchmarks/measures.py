"""Measurements. A function opens kernels of one tool, measures, and returns the samples of one round.

It also checks that the tool did what is timed. Statistics and tables are in report.py.
"""

from __future__ import annotations

import gc
import random
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import processes
import psutil
from adapters import UNTOLD, Adapter, Lines
from frontend import Cell, CellTimeoutError, Frontend

LINES = 100_000
TENSOR_MEGABYTES = 200
LIMIT = 180.0
"""Seconds after which one cell of a tool is given up."""
LINES_LIMIT = 60.0
"""The same, for the 100,000 lines."""


Strike = Callable[[Frontend, list[psutil.Process]], None]
"""Action on a session, given its front end and the processes of its ranks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of one metric; without a value, `note` gives the reason."""

    metric: str
    value: float | None
    note: str = ""


def cells(adapter: Adapter, pairs: int) -> Iterator[Sample]:
    """Measure the additional time of `x = 1` on 2 and on 4 ranks, compared with a plain cell in the same kernel."""
    for ranks in (2, 4):
        with adapter.open(ranks) as front, _plain(adapter, front) as plain:
            front.start(timeout=60)
            if plain is not front:
                plain.start(timeout=60)
            adapter.ready(front, ranks)
            distributed = adapter.cell("x = 1")
            for _ in range(20):
                front.check(distributed, timeout=LIMIT)
                plain.check("x = 1", timeout=LIMIT)
            order = [True] * pairs + [False] * pairs
            random.shuffle(order)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            with _steady_clock():
                for on_ranks in order:
                    cell = front.check(distributed, timeout=LIMIT) if on_ranks else plain.check("x = 1", timeout=LIMIT)
                    seconds[on_ranks].append(cell.seconds)
            base = statistics.median(seconds[False])
            yield from (Sample(f"cell-{ranks}", (value - base) * 1e3) for value in seconds[True])
            yield from (Sample(f"plain-{ranks}", value * 1e3) for value in seconds[False])


def starts(adapter: Adapter, sizes: tuple[int, ...]) -> Iterator[Sample]:
    """Measure the start, from nothing and from a loaded tool, to the first result of torch on every rank."""
    start = time.perf_counter()
    subprocess.run([adapter.python, "-c", "import torch, IPython"], check=True, stdin=subprocess.DEVNULL)
    yield Sample("import", time.perf_counter() - start)
    for ranks in sizes:
        # ranks that come with the kernel cannot be started in one that has loaded the tool: warm is cold
        for warm in (False,) if adapter.ranks_from_launch else (False, True):
            seconds = _start(adapter, ranks, warm=warm)
            yield Sample(f"{'warm' if warm else 'cold'}-{ranks}", seconds)
            if adapter.ranks_from_launch:
                yield Sample(f"warm-{ranks}", seconds)


def _start(adapter: Adapter, ranks: int, *, warm: bool) -> float:
    with adapter.open(ranks) as front:
        start = time.perf_counter()
        front.start(timeout=120)
        if not adapter.ranks_from_launch:
            if warm:
                adapter.loaded(front)
            front.wait_quiet()
            start = time.perf_counter()
            if not warm:
                adapter.loaded(front)
            adapter.started(front, ranks)
        front.check(adapter.cell(_touch(front.folder, "first", "import torch; torch.ones(1)")), timeout=LIMIT)
        seconds = time.perf_counter() - start
        _expect(_touched(front.folder, "first") == ranks, "the first cell ran on every rank")
        return seconds


FLOODS = {
    "equal": 'print(f"step {i:06d} of the loop, loss 0.693147")',
    "differ": 'print(f"rank {rank} step {i:06d} loss 0.693147")',
    "short": "print(rank, i)",
}


def lines(adapter: Adapter) -> Iterator[Sample]:
    """Print 100,000 lines on each of 2 ranks; measure the time and the bytes of iopub, and check every line."""
    for name, statement in FLOODS.items():
        with adapter.open(2) as front:
            front.start(timeout=60)
            adapter.ready(front, 2)
            front.wait_quiet()
            code = adapter.cell(f"for i in range({LINES}): {statement}")
            try:
                with _steady_clock():
                    cell = front.wait_cell(front.send(code), timeout=LINES_LIMIT, after=1)
            except CellTimeoutError as error:
                yield Sample(f"lines-{name}", None, f"not back in {LINES_LIMIT:.0f} s")
                yield Sample(f"bytes-{name}", None, f"{error.cell.size / 1e6:.0f} MB so far")
                continue
            expected = {rank: [_printed(statement, rank, i) for i in range(LINES)] for rank in (0, 1)}
            text = sum(len(line) + 1 for rank in expected.values() for line in rank)
            wrong = _missing(adapter.lines(cell), expected, cell)
            yield Sample(f"lines-{name}", max(cell.seconds, cell.last_output), wrong)
            yield Sample(f"bytes-{name}", cell.size / text)


def _printed(statement: str, rank: int, i: int) -> str:
    """Return the output of `statement` of `FLOODS`."""
    if statement == FLOODS["equal"]:
        return f"step {i:06d} of the loop, loss 0.693147"
    return f"{rank} {i}" if statement == FLOODS["short"] else f"rank {rank} step {i:06d} loss 0.693147"


def _missing(printed: Lines, expected: Lines, cell: Cell) -> str:
    """Return what is missing in the ranks' lines; empty if all are there and in order."""
    if cell.status != "ok":
        return f"cell ended with {cell.errors()}"
    if UNTOLD in printed:
        missing_count = (
            Counter(line for lines in expected.values() for line in lines) - Counter(printed[UNTOLD])
        ).total()
        return "; ".join(
            [
                "which rank wrote a line is not told",
                *([f"{missing_count:,} lines lost or torn"] if missing_count else []),
            ]
        )
    missing_count = sum((Counter(lines) - Counter(printed.get(rank, ()))).total() for rank, lines in expected.items())
    if missing_count:
        return f"{missing_count:,} lines lost or torn"
    strays = [rank for rank, lines in expected.items() if printed[rank] != lines]
    return f"not in order, or more than was printed, on ranks {strays}" if strays else ""


def memory(adapter: Adapter) -> Iterator[Sample]:
    """Measure the proportional memory of a rank: all of a kernel's processes with 8 idle ranks, less those with 2."""
    totals = {}
    for ranks in (2, 8):
        with adapter.open(ranks) as front:
            front.start(timeout=120)
            adapter.ready(front, ranks)
            front.check(adapter.cell(_touch(front.folder, "there", "import torch")), timeout=LIMIT)
            _expect(_touched(front.folder, "there") == ranks, "torch was imported on every rank")
            front.wait_quiet()
            totals[ranks] = processes.proportional_megabytes(front.processes())
    yield Sample("memory-2", totals[2])
    yield Sample("memory", (totals[8] - totals[2]) / 6)


def transfer(adapter: Adapter) -> Iterator[Sample]:
    """Send a tensor of 200 MB to both ranks and another back from rank 0; measure the kernel's memory."""
    count = TENSOR_MEGABYTES * 1_000_000 // 4
    for name, move in (("push", adapter.push("tensor")), ("pull", adapter.pull("tensor"))):
        if move is None:
            yield from (Sample(metric, None, "no call") for metric in (name, f"{name}-memory"))
            continue
        with adapter.open(2) as front:
            front.start(timeout=60)
            adapter.ready(front, 2)
            make = f"import torch; tensor = torch.arange({count}, dtype=torch.float32)"
            front.check("import torch", timeout=LIMIT)
            front.check(make if name == "push" else adapter.cell(make), timeout=LIMIT)
            front.wait_quiet()
            before, _ = processes.resident_megabytes(front.pid)
            processes.forget_peak(front.pid)
            with _steady_clock():
                moved = front.check(move, timeout=LIMIT)
            correct = f"assert (tensor == torch.arange({count}, dtype=torch.float32)).all()"
            correct = _touch(front.folder, "moved", f"import torch; {correct}")
            if name == "pull":  # memory that is only mapped counts when it has been read
                front.check("float(tensor.sum())", timeout=LIMIT)
            _, peak = processes.resident_megabytes(front.pid)
            front.check(adapter.cell(correct) if name == "push" else correct, timeout=LIMIT)
            _expect(_touched(front.folder, "moved") == (2 if name == "push" else 1), "the tensor arrived whole")
            yield Sample(name, moved.seconds)
            yield Sample(f"{name}-memory", peak - before)


def faults(adapter: Adapter) -> Iterator[Sample]:
    """Interrupt a sleep of both ranks, and kill one of them; measure the end of the cell and the variables kept."""
    yield from _fault(adapter, "interrupt", lambda front, _: front.interrupt(), adapter.cell, survivors=2)
    # the dead rank is rank 1, because rank 0 hosts what the others meet at
    yield from _fault(adapter, "death", lambda _, ranks: ranks[1].kill(), adapter.first_rank_cell, survivors=1)


def _fault(
    adapter: Adapter, metric: str, inject: Strike, next_cell: Callable[[str], str], survivors: int
) -> Iterator[Sample]:
    with adapter.open(2) as front:
        front.start(timeout=60)
        adapter.ready(front, 2)
        ranks = _processes_of_ranks(adapter, front)
        front.check(adapter.cell("kept = 41"), timeout=LIMIT)
        front.wait_quiet()
        sent = front.send(adapter.cell("import time\n" + _touch(front.folder, "asleep", "time.sleep(60)", first=True)))
        limit = time.monotonic() + 30
        while _touched(front.folder, "asleep") < 2:
            if time.monotonic() > limit:
                raise TimeoutError("the ranks did not begin the cell within 30 s")
            processes.pause(0.01)
        processes.pause(0.2)  # from the file to the sleep
        failure_time = time.perf_counter()
        inject(front, ranks)
        try:
            cell = front.wait_cell(sent, timeout=90)
        except CellTimeoutError as error:
            yield Sample(metric, None, str(error))
            return
        seconds = sent[1] + cell.seconds - failure_time
        yield Sample(metric, seconds, _after(front, cell, next_cell, survivors))


def _processes_of_ranks(adapter: Adapter, front: Frontend) -> list[psutil.Process]:
    name = f"{str(front.folder)!r} + f'/rank-{{rank}}-{{os.getpid()}}'"
    front.check(adapter.cell(f"import os; open({name}, 'w').close()"), timeout=LIMIT)
    numbers = sorted(path.name.split("-")[1:] for path in front.folder.glob("rank-*"))
    _expect([rank for rank, _ in numbers] == ["0", "1"], "both ranks know their numbers")
    return [psutil.Process(int(pid)) for _, pid in numbers]


def _after(front: Frontend, cell: Cell, next_cell: Callable[[str], str], survivors: int) -> str:
    """Return the effect of a fault on the session: does the next cell run, where, and are the variables still"""
    output = [] if cell.status == "error" else [f"cell ends as {cell.status!r}"]
    reached = 0
    for attempt in ("after", "later"):
        try:
            front.execute(next_cell(_touch(front.folder, attempt, "assert kept == 41")), timeout=40)
        except (CellTimeoutError, RuntimeError) as error:
            return "; ".join([*output, f"next cell: {error}"])
        reached = _touched(front.folder, attempt)
        if reached == survivors:
            return "; ".join(output)
        if attempt == "after":
            output.append("the next cell is lost")
    return "; ".join([*output[:-1], f"state left on {reached} of {survivors} ranks"])


def _touch(folder: Path, name: str, code: str, *, first: bool = False) -> str:
    """Return `code` that also writes a file `name-PID` into `folder`, which proves that a process has run it."""
    proof = f"import os; open({str(folder)!r} + '/{name}-' + str(os.getpid()), 'w').close()"
    return f"{proof}\n{code}" if first else f"{code}\n{proof}"


def _touched(folder: Path, name: str) -> int:
    return sum(1 for path in folder.iterdir() if re.fullmatch(rf"{name}-\d+", path.name))


def _expect(true: bool, what: str) -> None:
    if not true:
        raise RuntimeError(f"expected that {what}")


@contextmanager
def _plain(adapter: Adapter, front: Frontend) -> Iterator[Frontend]:
    """Yield the front end for plain cells: the same kernel, or a stock one if all cells of the tool are di"""
    if not adapter.ranks_from_launch:
        yield front
        return
    with adapter.open_plain() as plain:
        yield plain


@contextmanager
def _steady_clock() -> Iterator[None]:
    """Disable garbage collection in this process during the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
