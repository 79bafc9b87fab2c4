"""A rank's life: from the fork to the end of its process.

Owns: the set-up of a rank and its main thread's loop. Refuses: to return.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from rankbook.protocol import telemetry
from rankbook.protocol.forkserver import ForkRank
from rankbook.protocol.messages import ErrorReport, RankReady, ShutdownDelayed, StartFailed
from rankbook.rank import originals, recovery, shutdown, tracebacks
from rankbook.rank.control_thread import FAILURES_APART, ControlThread, Interrupts
from rankbook.rank.executor import Executor
from rankbook.rank.io import comms
from rankbook.rank.io.output_capture import OutputCapture, RateLimit
from rankbook.rank.io.output_widget import OutputWidgetHook
from rankbook.rank.process_groups import gloo
from rankbook.rank.process_groups.manager import GroupManager
from rankbook.rank.replay_buffer import OFFER_SECONDS, DetachableLink
from rankbook.rank.shell import RankShell, make_shell
from rankbook.transport.link import RankLink, Sender
from rankbook.transport.output_journal import crash_path, journal_path
from rankbook.transport.zmq_link import ZmqRank

_shell: RankShell | None = None


def warm_up_shell() -> None:
    """Make, in the forkserver, what every rank has: IPython's shell, with all that a first traceback imports."""
    global _shell
    comms.prepare_comms()
    _shell = shell = make_shell()
    try:
        int("no number")
    except ValueError as error:
        tracebacks.error_report(shell, error, {})


def run_rank(
    request: ForkRank, *, outputs: tuple[int, int, int, int], liveness: int, owned: Callable[[], bool]
) -> None:
    """Be the rank. `owned()` tells whether there is a notebook. Never returns."""
    code = 1
    try:
        os.dup2(outputs[1], 1)  # whatever goes wrong from here on is heard
        os.dup2(outputs[3], 2)
        _tell_crashes(request)
        shutdown.clear_atexit()
        _be_like_the_notebook(request)
        link = _make_link(request, owned)
        try:
            _serve(request, link, outputs, liveness)
            code = 0
        except Exception as error:
            text = traceback.format_exc()
            report = ErrorReport(name=type(error).__name__, value=str(error), traceback=text, plain=text)
            link.send(StartFailed(rank=request.rank, report=report))
            raise
        finally:
            link.close()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        os._exit(code)


def _tell_crashes(request: ForkRank) -> None:
    """Have a segmentation fault leave the stacks of all threads: in a file, for a pipe may be full."""
    path = crash_path(journal_path(Path(request.segments), request.rank, request.incarnation))
    with contextlib.suppress(OSError):  # no room for it: then there is the signal's number
        faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))


def _make_link(request: ForkRank, owned: Callable[[], bool]) -> RankLink:
    sender = Sender(request.rank, request.incarnation)
    if not request.keep:
        return ZmqRank(sender, request.uplink, request.downlink)
    link = ZmqRank(sender, request.uplink, request.downlink, patience=OFFER_SECONDS)
    return DetachableLink(link, request.keep, owned)


def _be_like_the_notebook(request: ForkRank) -> None:
    os.environb.clear()
    os.environb.update(request.env)
    os.chdir(request.cwd)
    sys.path[:] = request.path
    sys.argv[:] = [""]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    random.seed()  # a fork would draw its peers' numbers
    numpy.random.seed()  # noqa: NPY002 - the global state that user code may use
    torch.set_num_threads(request.threads)


def _pace(world_size: int) -> RateLimit:
    """The ranks' shares of what the server lets through, less labels and JSON."""
    return RateLimit(rate=650_000 / world_size, burst=1_800_000 // world_size, window=2_400_000 // world_size)


def _serve(request: ForkRank, link: RankLink, outputs: tuple[int, int, int, int], liveness: int) -> None:
    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    telemetry.this_rank = request.rank
    interrupts = Interrupts()
    pace = _pace(request.world_size) if "JPY_SESSION_NAME" in os.environ else None  # a Jupyter server's kernel
    words = None if request.keep else journal_path(Path(request.segments), request.rank, request.incarnation)
    capture = OutputCapture(outputs, link.send, interrupts.shield, Path(request.logs), request.rank, pace, words)
    group = GroupManager(
        rank=request.rank,
        world_size=request.world_size,
        backend=request.backend,
        device=device,
        folder=Path(request.segments),
    )
    gloo.install_terminate_handler(group.rescue)
    shell = _shell
    assert shell is not None
    recovery.set_cell_namespace(shell.user_ns)
    executor = Executor(shell, link, capture, interrupts, group, Path(request.segments))
    comms.attach_comms(
        link, OutputWidgetHook(capture, interrupts.shield, executor.tell).teach if request.widgets else None
    )
    control = ControlThread(link, capture, interrupts, executor, liveness)
    executor.wait_reply, executor.run_when_idle = control.replies.get, control.tasks.put
    shell.give(
        {
            "rank": request.rank,
            "local_rank": request.rank,
            "world_size": request.world_size,
            "device": device,
            "torch": torch,
            "dist": dist,
        }
    )
    interrupts.guard()
    interrupts.arm(0)
    interrupts.disarm()
    control.start()
    link.send(
        RankReady(
            rank=request.rank,
            pid=os.getpid(),
            incarnation=request.incarnation,
            device=str(device),
            backend=request.backend,
            threads=request.threads,
        )
    )
    originals.remember_originals()
    _work(control, executor)
    _say_farewell(link, group, control.patience)
    capture.end()


def _work(control: ControlThread, executor: Executor) -> None:
    """Run tasks until it is time to leave. An error between two of them, as of a signal handler, is told."""
    failed = -FAILURES_APART
    while True:
        try:
            task = control.next_task()
        except Exception as error:
            originals.restore_originals()
            failed, before = time.monotonic(), failed
            if failed - before < FAILURES_APART:
                raise
            control.tell("Between two cells:", error)
            continue
        if task is None:
            return
        executor.execute(task)


def _say_farewell(link: RankLink, group: GroupManager, patience: float) -> None:
    def linger(seconds: float) -> None:
        link.send(ShutdownDelayed(seconds=seconds))

    trouble = shutdown.wait_for_saves(patience, linger)
    shutdown.run_atexit(patience, linger)
    if trouble:
        print(trouble, file=sys.__stderr__, flush=True)
    else:  # a save that still goes on would be in its collectives
        group.leave()
