"""Real processes with a gloo group and no notebook, and the check that nothing is left of them.

`run_ranks` runs a function on several processes and returns the results. They are forked from a server that has
imported torch: the first call takes a second, later ones some hundredths. The function travels by value (cloudpickle),
so it may be a closure or stand in the test's module. `ForkedRanks` start within a moment, to be killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What a child executes; `exec` itself is the process's target, for it can be imported by every child.
_CHILD = "import sys; sys.path.append(root); import cloudpickle; cloudpickle.loads(payload)(connection)"
# The same for `run_code`. An exception ends it as one ends `python -c`: with its traceback and the code 1.
_RUN_CODE = """
import os, sys
code, args, outputs, environment = command
for descriptor, file in zip((1, 2), outputs):
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, descriptor)
    os.close(opened)
os.environ.clear()
os.environ.update(environment)
sys.argv = ["-c", *args]
exec(code, {"__name__": "__main__"})
"""
_ROOT = str(Path(__file__).parents[1])  # `pytest`, other than `python -m pytest`, has it in no path
_context = multiprocessing.get_context("forkserver")
# The first optimizer imports torch._dynamo, 1.3 s in each process; FSDP2 and DTensor another second. Most tests prepare
# objects, and many save.
_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "rankbook.runtime.state",
            "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
            "rankbook.runtime.accelerator", "rankbook.checkpoint.saving", "rankbook.checkpoint.loading"]  # fmt: skip


class RankFailed(AssertionError):
    """A function raised on a rank: its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60,
    patience: float = 5,
    group: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return the results of `function(*args)` on all ranks, with a process group and the variables of torchrun.

    `group` False: no process group is made; `MASTER_ADDR` and `MASTER_PORT` are set, for the function to make one.
    `environment`: more variables; "{rank}" in a value is the rank; with a `RANK` or "" in it torchrun's are not set.
    Raises `RankFailed` when one raises, or when they do not end within `timeout` seconds, with where each one stood;
    the others get `patience` seconds to fail as well.
    """
    for module in {sys.modules.get(function.__module__), sys.modules[__name__]} - {None}:
        cloudpickle.register_pickle_by_value(module)
    _context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = free_port()
        started = []
        for rank in range(world_size):
            ours, child_connection = _context.Pipe()
            variables = _variables(rank, world_size, port, dict(environment or {}))
            payload = cloudpickle.dumps(
                _Child(function, args, rank, world_size, variables, f"file://{folder}/store" if group else None, folder)
            )
            process = _context.Process(
                target=exec, args=(_CHILD, {"payload": payload, "connection": child_connection, "root": _ROOT})
            )
            process.start()
            child_connection.close()
            started.append((process, ours))
        try:
            return _collect(started, Path(folder), timeout, patience)
        finally:
            for process, ours in started:
                if process.is_alive():
                    process.kill()
                process.join(10)
                assert process.exitcode is not None, "a rank could not be killed"
                process.close()
                ours.close()


def run_code(code: str, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Return what `python -c CODE ARGS` does, in a process that has imported torch already."""
    _context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        # Files, so that what the process wrote before it was killed is not lost.
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        command = [code, list(args), [str(output) for output in outputs], dict(os.environ)]
        process = _context.Process(target=exec, args=(_RUN_CODE, {"command": command}))
        process.start()
        process.join(timeout)
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join(10)
        done = subprocess.CompletedProcess([code, *args], process.exitcode, *(item.read_text() for item in outputs))
        process.close()
        assert not hung, f"it did not end within {timeout:g} s: {done}"
        return done


def _collect(started: list[Any], folder: Path, timeout: float, patience: float) -> list[Any]:
    """Return the results of all ranks, or the failures of those that have ended."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {ours: rank for rank, (_, ours) in enumerate(started)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                failures[rank] = "it had not ended and was killed\n" + _stack(started[rank][0], folder, rank)
            break
        for item in ready:
            rank = waiting.pop(item)
            try:
                good, value = item.recv()
            except (EOFError, ConnectionError):
                started[rank][0].join(10)
                good, value = False, f"the process ended with {started[rank][0].exitcode} and said nothing"
            (results if good else failures)[rank] = value
        if failures:  # the others may be waiting for it: a little time for their own errors, then enough
            deadline = min(deadline, time.monotonic() + patience)
    if failures:
        raise RankFailed("".join(f"\n--- rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [pickle.loads(results[rank]) for rank in range(len(started))]


def _stack(process: Any, folder: Path, rank: int) -> str:
    """Return the stacks of the rank and of its child processes, which they write after a signal."""
    import psutil

    file = folder / f"stack-{rank}"
    text = _ask_for_stack(process, process.pid, file)
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            text += f"\nits child {child.pid}, {child.status()}:\n{_ask_for_stack(process, child.pid, file)}"
    return text


def _ask_for_stack(process: Any, pid: int, file: Path) -> str:
    """Return what `pid`, a rank's process or a child of it, adds to `file`; nothing if Python has not begun there."""
    before = file.stat().st_size if file.exists() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not (file.exists() and file.stat().st_size > before):
        process.join(0.05)
    return file.read_text()[before:] if file.exists() else ""


def _variables(rank: int, world_size: int, port: int, more: dict[str, str]) -> dict[str, str]:
    reported = {name: value.replace("{rank}", str(rank)) for name, value in more.items() if name}
    if "RANK" not in reported and "" not in more:
        variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        reported = {**{name: str(value) for name, value in variables.items()}, **reported}
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return inherited | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | reported


def free_port() -> int:
    """Return a TCP port of this host on which no process listens now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Child:
    """Runs the function in the process of a rank."""

    def __init__(self, function, args, rank, world_size, variables, store, folder) -> None:
        self.function, self.args, self.rank, self.world_size = function, args, rank, world_size
        self.variables, self.store, self.folder = variables, store, folder

    def __call__(self, connection: Any) -> None:
        import faulthandler

        import torch
        import torch.distributed as dist

        with Path(self.folder, f"stack-{self.rank}").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, stacks)
            os.environ.clear()  # the server has those of the test that was the first
            os.environ.update(self.variables)
            os.register_at_fork(before=_guard_fork)
            torch.set_num_threads(1)
            try:
                if self.store:
                    _form_group(self.store, self.rank, self.world_size)
                answer = (True, cloudpickle.dumps(self.function(*self.args)))
            except BaseException:  # noqa: BLE001 - the test fails with all of it
                answer = (False, traceback.format_exc())
            connection.send(answer)
            if dist.is_initialized() and answer[0]:
                dist.destroy_process_group()
            connection.close()
            os._exit(0)


def _guard_fork() -> None:
    """Do before a fork what ranks do: a worker of a loader may never start otherwise."""
    from rankbook.rank.process_groups.manager import wait_for_gloo_threads

    wait_for_gloo_threads()


def _form_group(store: str, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    dist.barrier()  # one that is done at once must not leave while others still connect to it


HUNG = 60.0
"""Seconds after which a rank that should have ended is taken for hung.

A rank whose peer dies while both connect waits for five timeouts of the group: gloo tries five times.
"""


class ForkedRanks:
    """`world` forks that run `work(rank, say)` in a process group of theirs; `say` sends what the test gets.

    They start within a moment, to be killed. The process that forks them must have no other threads: `run_ranks` starts
    such a one.
    """

    def __init__(self, world: int, folder: Path, work: Callable[[int, Callable[[Any], None]], Any]) -> None:
        self.messages: list[list[Any]] = [[] for _ in range(world)]
        self._pipes: dict[Any, int] = {}
        self.pids: list[int] = []
        store = folder / f"store-{time.monotonic_ns()}"
        for rank in range(world):
            ours, child_connection = Pipe()
            pid = os.fork()
            leader = self.pids[0] if self.pids else pid
            os.setpgid(pid, leader)  # a group of theirs, which one of them may kill; whoever comes first makes it
            if not pid:
                _run_fork(rank, world, store, work, child_connection)
            child_connection.close()
            self.pids.append(pid)
            self._pipes[ours] = rank

    def receive(self, until: Callable[[], bool], timeout: float = HUNG) -> bool:
        """Listen until something is so, all have ended, or `timeout` s have passed. Whether it is so."""
        deadline = time.monotonic() + timeout
        while not until() and self._pipes and (remaining := deadline - time.monotonic()) > 0:
            for item in multiprocessing.connection.wait(list(self._pipes), timeout=remaining):
                try:
                    self.messages[self._pipes[item]].append(item.recv())
                except (EOFError, ConnectionError):
                    del self._pipes[item]
        return until()

    def kill(self, ranks: list[int]) -> None:
        """Kill the process at once, with SIGKILL."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> list[int]:
        """Wait until all have ended, and reap them. Raises AssertionError where one hangs. The exit codes."""
        hung = not self.receive(lambda: not self._pipes)
        if hung:
            self.kill(list(set(self._pipes.values())))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        assert not hung, f"ranks {sorted(self._pipes.values())} hung; all have sent {self.messages}"
        return codes


def run_forked(world: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """Return what `work(rank)` gives on each of `world` fresh ranks; a text where it raised."""
    forked = ForkedRanks(world, folder, lambda rank, say: say(work(rank)))
    forked.end()
    return [messages[-1] if messages else "said nothing" for messages in forked.messages]


def _run_fork(rank: int, world: int, store: Path, work: Callable[..., Any], pipe: Any) -> None:
    import torch.distributed as dist

    code = 1
    try:
        _form_group(f"file://{store}", rank, world)
        work(rank, pipe.send)
        dist.barrier()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the test hears of it
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
        os._exit(code)
