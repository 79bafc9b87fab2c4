"""Entry point of a rank's process: set-up after the fork, the main thread's task loop, and graceful shutdown.

Before its process ends, a rank waits for background saves, calls the exit functions of cells, and flushes open files.
This imports nothing that the user's code has not imported.

On a host other than the notebook's, `ModuleSync` stands before Python's own search for files. It asks this host's agent
for every module that may lie in the notebook's folder, and the agent puts the file into a folder of this host that is
the first one of `sys.path`. Then Python's own search finds it. A file that was sent is replaced when it changes, before
the next cell, so that `%autoreload` sees the change.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import logging
import os
import platform
import random
import site
import stat
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import numpy
import torch
import torch.distributed as dist

from rankbook import snapshot_files, step_interrupts
from rankbook.lazy_imports import loaded_module
from rankbook.protocol import telemetry
from rankbook.protocol.forkserver import ForkRank
from rankbook.protocol.messages import ErrorReport, RankReady, ShutdownDelayed, StartFailed
from rankbook.rank import comms, os_utils, recovery, tracebacks
from rankbook.rank.comms import OutputWidgetHook
from rankbook.rank.control_thread import MIN_FAILURE_INTERVAL, ControlThread, Interrupts
from rankbook.rank.executor import Executor
from rankbook.rank.output_capture import OutputCapture, RateLimit
from rankbook.rank.process_groups import gloo
from rankbook.rank.process_groups.manager import GroupManager
from rankbook.rank.replay_buffer import OFFER_SECONDS, DetachableLink
from rankbook.rank.shell import RankShell, make_shell
from rankbook.snapshot_files import SnapshotPlace
from rankbook.transport import RankLink, Sender
from rankbook.transport.framed_socket import modules_folder, request
from rankbook.transport.output_journal import crash_path, journal_path
from rankbook.transport.shared_memory import MOST_IN_FRAMES, SegmentStore
from rankbook.transport.zmq_link import ZmqRank

_shell: RankShell | None = None


def warm_up_shell() -> None:
    """Create the IPython shell that all ranks share. Called in the forkserver.

    Also formats a traceback once, because the first one imports several modules.
    """
    global _shell
    # Before anything can import ipywidgets.
    comms.prepare_comms()
    _shell = shell = make_shell()
    try:
        int("no number")
    except ValueError as error:
        tracebacks.error_report(shell, error, {})


def run_rank(
    request: ForkRank, *, outputs: tuple[int, int, int, int], liveness: int, is_owned: Callable[[], bool]
) -> None:
    """Run the rank in the forked child, and exit. Never returns.

    `outputs` are the read and write ends of stdout's and stderr's pipes, `liveness` a descriptor that becomes readable
    when the forkserver is gone. `is_owned()` returns True while there is a notebook.
    """
    code = 1
    try:
        os.dup2(outputs[1], 1)  # errors from here on reach the pipes
        os.dup2(outputs[3], 2)
        # Before the rest of the set-up, so that a crash in it leaves its stacks too.
        _enable_faulthandler(request)
        _clear_atexit()
        _adopt_notebook_environment(request)
        link = _make_link(request, is_owned)
        try:
            code = _serve(request, link, outputs, liveness)
        # The link works already, so the notebook gets the whole error and not only an exit code.
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
    # `os._exit` on every way out: a return would continue the forkserver's main loop in the child, and a normal exit
    # would run its exit functions.
    finally:
        os._exit(code)


def _enable_faulthandler(request: ForkRank) -> None:
    """Write the stacks of all threads to a file after a fatal signal.

    A file, because a pipe may be full.
    """
    path = crash_path(journal_path(Path(request.segments), request.rank, request.incarnation))
    with contextlib.suppress(OSError):  # no space: only the signal's number is reported then
        faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        os.register_at_fork(after_in_child=_show_stacks_of_child)


def _show_stacks_of_child() -> None:
    """Write the stacks of a child that user code has forked to its stderr: the file is that of the rank."""
    if faulthandler.is_enabled():
        faulthandler.enable(file=2)


def _make_link(request: ForkRank, is_owned: Callable[[], bool]) -> RankLink:
    sender = Sender(request.rank, request.incarnation)
    # Without a token, the rank dies with its notebook, and needs neither timeouts nor a replay buffer.
    if not request.keep:
        return ZmqRank(sender, request.uplink, request.downlink)
    link = ZmqRank(sender, request.uplink, request.downlink, patience=OFFER_SECONDS)
    return DetachableLink(link, request.keep, is_owned)


def _adopt_notebook_environment(request: ForkRank) -> None:
    # The forkserver may have been started long before, or by an earlier notebook. The environment of the moment counts,
    # without leftovers of the forkserver's own.
    os.environb.clear()
    os.environb.update(request.env)
    os.chdir(request.cwd)
    sys.path[:] = map(os.fsdecode, request.path)
    sys.argv[:] = [""]
    # Nothing can be read from the notebook's terminal. `input()` is replaced by the shell.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # All forks share the forkserver's seeds, but a new Python process has seeds of its own.
    random.seed()
    numpy.random.seed()  # noqa: NPY002 - user code may use the global state
    # The generators of accelerators are made in the rank, with seeds of their own.
    recovery.first_seed = torch.default_generator.seed()
    recovery.first_environment = dict(os.environ)
    recovery.first_folder, recovery.own_host = str(Path.cwd()), request.store
    torch.set_num_threads(request.threads)


# The server drops output above 3 MB within 3 s (`iopub_data_rate_limit` is 1 MB/s). All ranks together may send 1.8 MB
# at once, 0.65 MB/s after that, and never more than 2.4 MB within 3.2 s. The rest is for labels, escapes and the
# envelopes of messages.
def _output_rate_limit(world_size: int) -> RateLimit:
    """Return this rank's share of the Jupyter server's limit on output, in bytes.

    Leaves room for labels and JSON.
    """
    return RateLimit(rate=650_000 / world_size, burst=1_800_000 // world_size, window=2_400_000 // world_size)


# Order of the set-up: the device before anything that may use CUDA, the interrupt hooks before the control thread, and
# that thread before RankReady, after which messages arrive. The originals are remembered last: what the set-up itself
# replaced, such as `input`, belongs to them.
def _serve(request: ForkRank, link: RankLink, outputs: tuple[int, int, int, int], liveness: int) -> int:
    """Set up the rank, run its tasks until shutdown, and return the exit code: 1 if a background save was lost."""
    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    telemetry.this_rank, telemetry.this_device = request.rank, request.device
    snapshot_files.this_place = SnapshotPlace(Path(request.segments), request.rank, request.world_size)
    interrupts = Interrupts()
    rate_limit = (
        _output_rate_limit(request.world_size) if "JPY_SESSION_NAME" in os.environ else None
    )  # a Jupyter server's kernel
    # A kept rank has the replay buffer instead, which holds displays and results as well.
    journal = None if request.keep else journal_path(Path(request.segments), request.rank, request.incarnation)
    capture = OutputCapture(
        outputs,
        link.send,
        interrupts.shield,
        Path(request.logs),
        request.rank,
        rate_limit,
        journal,
        platform.node() if request.store else "",  # the notebook's host needs no name
    )
    group = GroupManager(
        rank=request.rank,
        world_size=request.world_size,
        backend=request.backend,
        device=device,
        folder=Path(request.segments),
        agent=request.store,
    )
    # Before the first group is made, and with it the first thread of gloo.
    gloo.install_terminate_handler(group.rescue)
    shell = _shell
    assert shell is not None
    recovery.set_cell_namespace(shell.user_ns)
    store = SegmentStore(Path(request.segments), most_in_frames=MOST_IN_FRAMES if request.store else None)
    executor = Executor(shell, link, capture, interrupts, group, store)
    comms.attach_comms(
        link,
        interrupts.shield,
        OutputWidgetHook(capture, interrupts.shield, executor.error_report).patch_class if request.widgets else None,
    )
    control = ControlThread(link, capture, interrupts, executor, liveness)
    # The executor was made before the control thread, which needs it.
    executor.wait_reply, executor.return_reply = control.replies.get, control.replies.put
    executor.run_when_idle = control.tasks.put
    telemetry.output_barrier = executor.mark_output
    shell.define_names(
        {
            "rank": request.rank,
            "local_rank": request.local_rank,
            "world_size": request.world_size,
            "device": device,
            "torch": torch,
            "dist": dist,
        }
    )
    interrupts.install_hooks()
    step_interrupts.deferral = interrupts
    # Installs the handler of SIGINT: the forkserver has set the signal to be ignored.
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
    os_utils.record_originals()
    if request.modules:
        ModuleSync(modules_folder(request.modules), request.modules, Path.cwd()).install()
    recovery.first_path = list(sys.path)
    _run_tasks(control, executor)
    # After the control thread has ended: exit functions and saves are user code, whose output `capture.end` sends.
    saved = _shut_down(link, group, control.patience)
    capture.end()
    return 0 if saved else 1


def _run_tasks(control: ControlThread, executor: Executor) -> None:
    """Run tasks until shutdown.

    Errors between tasks, for example of a signal handler, are reported; errors in quick succession end the rank.
    """
    failed = -MIN_FAILURE_INTERVAL
    while True:
        try:
            task = control.next_task()
        except Exception as error:
            # See `ControlThread._serve`.
            os_utils.restore_originals()
            failed, before = time.monotonic(), failed
            if failed - before < MIN_FAILURE_INTERVAL:
                raise
            control.report_error("Between two cells:", error)
            continue
        if task is None:
            return
        executor.execute(task)


# Graceful shutdown ----------------------------------------------------------------------------------------------------


def _shut_down(link: RankLink, group: GroupManager, patience: float) -> bool:
    """Let a background save and exit functions finish. Return False if the save has failed or is lost."""

    def request_delay(seconds: float) -> None:
        link.send(ShutdownDelayed(seconds=seconds))

    # The order matters: a save needs the process groups, exit functions may still print, and the groups are destroyed
    # last.
    trouble = wait_for_saves(patience, request_delay)
    _run_atexit(patience, request_delay)
    if trouble:
        print(trouble, file=sys.__stderr__, flush=True)
    else:  # an unfinished save may still use the group's collectives
        group.leave()
    return not trouble


def wait_for_saves(patience: float, request_delay: Callable[[float], None]) -> str:
    """Wait at most `patience` seconds for a background save; return a message if it failed or did not finish.

    Returns an empty string otherwise. Calls `request_delay(seconds)` first if there is a save to wait for.
    """
    saving = loaded_module("rankbook.checkpoint.async_save")
    handle = None if saving is None else saving.current_save()
    if handle is None:
        return ""
    if not handle.done:
        request_delay(patience)
        saving.wait_for_saves(patience)  # type: ignore[union-attr]  # loaded: there is a handle
    # The save goes on until the process ends, but nobody may wait for it any longer.
    if not handle.done:
        return f"{handle!r} did not finish within {patience:g} s of the shutdown and is lost"
    if handle.error is None or handle.error_retrieved:
        return ""
    handle.error_retrieved = True
    return f"{handle!r} in the background"


def _run_atexit(patience: float, request_delay: Callable[[float], None]) -> None:
    """Call the exit functions that cells registered with `atexit`, and flush open files, as Python does at exit.

    Experiment trackers upload their last steps this way. Calls `request_delay(seconds)` first if there are functions to
    call, to ask the notebook for that time.
    """
    finalizers = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    if atexit._ncallbacks() > _OWN_EXIT_FUNCTIONS or any(finalizer.atexit for finalizer in finalizers):
        request_delay(patience)
    atexit._run_exitfuncs()  # prints exceptions and continues
    # The process ends by `os._exit`, which flushes no Python buffers.
    _write_files()


def _write_files() -> None:
    """Flush regular files that are still open."""
    # A text layer writes into the buffer below it, so it is flushed first.
    layers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # outer layers first
    files = [file for file in gc.get_objects() if type(file) in layers]
    for file in sorted(files, key=lambda file: layers.index(type(file))):
        with contextlib.suppress(OSError, ValueError):  # full disk, closed file, or no file descriptor
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # flushing a pipe could block
                file.flush()


_OWN_EXIT_FUNCTIONS = 2
"""Number of exit functions that `_clear_atexit` registers."""


def _clear_atexit() -> None:
    """Drop the exit functions that the forkserver registered for itself. Called when a rank starts."""
    # They were registered for the forkserver's own exit, and the child has inherited them.
    atexit._clear()
    # `weakref.finalize` has a registry of its own. Its entries would remove, for example, temporary folders that the
    # forkserver still uses.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # for example of temporary folders
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # weakref registers it only once
    atexit.register(logging.shutdown)  # as logging has: it flushes the handlers


# Modules of the notebook's folder -------------------------------------------------------------------------------------


TIMEOUT = 60.0
"""Seconds that an import waits for the notebook's host. After that, only what lies on this host can be imported."""


INSTALLED = tuple(
    {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | set(map(Path, (*site.getsitepackages(), site.getusersitepackages())))
)
"""Folders of Python's own modules and of installed packages, which are on every host."""


class ModuleSync(MetaPathFinder):
    """Ask the agent at the socket `agent` for modules, which it puts into `folder`.

    `working_directory` is the rank's. Packages there may lack a module, or have an old one.
    """

    def __init__(self, folder: Path, agent: str, working_directory: Path) -> None:
        self._folder = folder
        self._agent = agent
        self._working_directory = working_directory

    def install(self) -> None:
        """Put this finder before Python's search for files, and the folder first on `sys.path`."""
        position = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(position, self)
        sys.path.insert(0, str(self._folder))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:  # noqa: ARG002
        """See `importlib.abc.MetaPathFinder`. Finds nothing itself."""
        folder = str(self._folder)
        if path is None:
            # A cell may have replaced `sys.path`.
            if folder not in sys.path:
                sys.path.insert(0, folder)
            if name in sys.stdlib_module_names or name == "rankbook":
                return
        elif not any(map(self._may_be_the_users, path)):
            return
        # The threads of the rank itself must not wait for the network.
        if threading.current_thread().name.startswith("rankbook-"):
            return
        # Without an agent, in a process that has outlived it: what lies here can be imported.
        with contextlib.suppress(OSError):
            if request(self._agent, name.encode(), timeout=TIMEOUT):
                importlib.invalidate_caches()
        if isinstance(path, list) and name.count("."):
            package = str(self._folder / name.rpartition(".")[0].replace(".", "/"))
            if package not in path and Path(package).is_dir():
                path.insert(0, package)

    def _may_be_the_users(self, entry: str) -> bool:
        folder = Path(entry)
        if folder.is_relative_to(self._folder):
            return True
        # An environment may lie in the working directory, as that of uv does, or Miniconda in the home folder.
        return folder.is_relative_to(self._working_directory) and not any(map(folder.is_relative_to, INSTALLED))
