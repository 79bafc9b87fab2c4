"""Break one line of the package at a time, and report the changes that no test notices.

    python tests/mutants.py [--only TEXT] [--jobs N]

Each mutant replaces one fragment of source text in a copy of the package; then the tests named beside it run against
that copy: without those marked slow or full, or for a mutant with `slow`, without those marked full. The checkout
itself is never changed. The tests must first pass without any change. Exits with 1 when more than two mutants survive,
or when the table does not fit the sources.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("kernel", "magics", "widgets", "tests", "pyproject.toml")
MAY_SURVIVE = 2
TIMEOUT = 1800.0
"""Seconds that one run of pytest may take; a test that hangs fails sooner, by pytest-timeout."""
PASSED, INTERRUPTED = 0, 2  # pytest's exit codes: 1 is a failed test, 2 an error in a module as it is collected


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs exactly once in `file`, by `new`; `tests` are pytest's arguments below tests/.

    With `slow`, tests that are marked slow run too. Such mutants undo a fix that only several processes show.
    """

    file: str
    old: str
    new: str
    tests: str
    slow: bool = False

    def apply(self, root: Path) -> str:
        """Change the file below `root` and return its text before. Raise ValueError if the entry does not fit it."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: expected this fragment exactly once, found it {count} times:\n{self.old}")
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec", dont_inherit=True)
        path.write_text(changed)
        return text

    def __str__(self) -> str:
        text = (ROOT / self.file).read_text()
        line = text[: text.index(self.old)].count("\n") + 1
        return f"{self.file}:{line}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


MUTANTS = (
    # Those that survived when they were tried first.
    Mutant(
        "kernel/rankbook/coordinator/reattach.py",
        "for task in tasks if not task.running and not task.internal",
        "for task in tasks if not task.internal",
        "coordinator/test_reattach.py",
    ),
    Mutant(
        "kernel/rankbook/coordinator/reattach.py",
        "return None if report.start.seen and not report.start.running else report.start.cell",
        "return report.start.cell",
        "coordinator/test_reattach.py",
    ),
    Mutant(
        "kernel/rankbook/coordinator/state_machine.py",
        "unsure = cell.failed or cell.interrupted or",
        "unsure = cell.failed or",
        "coordinator/test_state_machine.py",
    ),
    Mutant(
        "kernel/rankbook/launch/registry.py",
        'if segments.name.startswith(f"rankbook-{os.getuid()}-"):',
        "if segments.name:",
        "launch/test_registry.py",
    ),
    Mutant(
        "kernel/rankbook/transport/serialization.py",
        " or (buffer.segment is None and end < len(memory)):",
        ":",
        "transport/test_serialization.py::test_a_payload_that_does_not_hold_together_is_a_protocol_error",
    ),
    Mutant(
        "kernel/rankbook/rank/process_groups/recoverable_group.py",
        "and not (self._futures_completed and _EMPTY.search(text)):",
        "and not _EMPTY.search(text):",
        "rank/process_groups/test_recoverable_group.py",
    ),
    Mutant(
        "kernel/rankbook/rank/process_groups/recoverable_group.py",
        "        self._note_cut()\n        self._inner.abort()\n",
        "        self._inner.abort()\n",
        "rank/process_groups/test_device_calls.py::test_an_abort_of_unfinished_calls_is_told_before_the_device_goes_on",
    ),
    Mutant(
        "kernel/rankbook/rank/process_groups/device_calls.py",
        "        if self._calls[count - 1].query():\n",
        "        if self._calls[0].query():\n",
        "rank/process_groups/test_device_calls.py::test_many_calls_end_in_order",
    ),
    Mutant(
        "kernel/rankbook/rank/process_groups/recoverable_group.py",
        "        except BaseException:\n            self.log.withdraw(key)\n",
        "        except BaseException:\n",
        "rank/process_groups/test_recoverable_group.py",
    ),
    Mutant(
        "kernel/rankbook/runtime/data/samplers.py",
        "rows = max([*lengths, *map(len, repeated)])",
        "rows = max(lengths)",
        "runtime/data/test_samplers.py",
    ),
    Mutant(
        "kernel/rankbook/runtime/gradient_state.py",
        "if self._rescale == 1.0:",
        "if self._rescale == 0.0:",
        "runtime/test_gradient_accumulation.py",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/inspection.py",
        "if joined and joined[-1][1] == start:",
        "if joined and joined[-1][1] > start:",
        "checkpoint/test_verify.py::test_adjacent_damaged_pieces_are_named_as_one_range",
    ),
    # The notebook's side.
    Mutant(
        "kernel/rankbook/coordinator/state_machine.py",
        "if event.incarnation != rank.incarnation or rank.cell != event.cell:",
        "if event.incarnation != rank.incarnation:",
        "coordinator/test_state_machine.py",
    ),
    Mutant(
        "kernel/rankbook/coordinator/deadlock.py",
        "if blocked_rank.seconds >= self._grace.finished and (cell.cell, *wait) not in self._reported:",
        "if blocked_rank.seconds >= self._grace.finished:",
        "coordinator/test_collective_monitor.py",
    ),
    Mutant(
        "kernel/rankbook/coordinator/deadlock.py",
        "if group.pending:\n                    waiting",
        "if group:\n                    waiting",
        "coordinator/test_state_machine.py",
    ),
    Mutant(
        "kernel/rankbook/coordinator/deadlock.py",
        "0 if view.broken else view.count",
        "view.count",
        "coordinator/test_deadlock.py",
    ),
    Mutant("kernel/rankbook/output/merger.py", "        self._open.discard(rank)\n", "", "output/test_merger.py"),
    Mutant(
        "kernel/rankbook/output/interleave.py",
        "if item.time + hold > now and not item.unshared:",
        "if item.time + hold > now:",
        "output/test_merger.py",
    ),
    Mutant(
        "kernel/rankbook/output/cell_result.py",
        '"replace", not self.truncated)',
        '"replace", True)',
        "output/test_cell_result.py",
    ),
    Mutant(
        "kernel/rankbook/launch/registry.py",
        "if is_abandoned(folder):",
        "if True:",
        "launch/test_paths.py",
    ),
    Mutant(
        "kernel/rankbook/launch/registry.py",
        "if stat.S_IMODE(status.st_mode) & 0o077:",
        "if stat.S_IMODE(status.st_mode) & 0o007:",
        "launch/test_registry.py",
    ),
    Mutant(
        "magics/arguments.py",
        "if not 0 < seconds < threading.TIMEOUT_MAX:",
        "if not 0 <= seconds < threading.TIMEOUT_MAX:",
        "magics/test_arguments.py",
    ),
    Mutant(
        "widgets/live_view.py",
        'if message["arrived"] >= self._last_messages.get(viewer, 0):',
        'if message["arrived"]:',
        "widgets/test_live_view.py",
    ),
    # Between notebook and ranks.
    Mutant(
        "kernel/rankbook/transport/serialization.py",
        "if not buffer or buffer.readonly or ctypes",
        "if not buffer or ctypes",
        "transport/test_serialization.py::test_frames_that_arrive_misaligned_or_read_only_become_usable",
    ),
    Mutant(
        "kernel/rankbook/transport/shared_memory.py",
        "if size > _free_bytes(self.folder) // 2:",
        "if size > _free_bytes(self.folder):",
        "transport/test_shared_memory.py",
    ),
    Mutant(
        "kernel/rankbook/transport/framed_socket.py",
        "if len(self._pending) < end:",
        "if len(self._pending) <= end:",
        "transport/test_framed_socket.py",
    ),
    # The ranks' side.
    Mutant(
        "kernel/rankbook/rank/process_groups/collective_log.py",
        "        self.count -= launched.number > 0\n",
        "",
        "rank/process_groups/test_collective_log.py",
    ),
    Mutant(
        "kernel/rankbook/rank/replay_buffer.py",
        "if not isinstance(entry.message, Done)), None)",
        "if entry.message), None)",
        "rank/test_replay_buffer.py",
    ),
    Mutant(
        "kernel/rankbook/rank/output_capture.py",
        "        self._room -= size\n",
        "",
        "rank/test_output_capture.py",
    ),
    Mutant(
        "kernel/rankbook/rank/recovery.py",
        'if name.startswith("_") or name in hidden or isinstance(value, types.ModuleType):',
        "if name in hidden or isinstance(value, types.ModuleType):",
        "rank/test_recovery.py",
    ),
    # Training.
    Mutant(
        "kernel/rankbook/runtime/data/samplers.py",
        "elif len(batch_list) == ranks and (self.drop_last or (",
        "elif (self.drop_last or (",
        "runtime/data/test_samplers.py",
    ),
    Mutant(
        "kernel/rankbook/runtime/data/loaders.py",
        "rank * mesh.size(axis) + mesh.get_local_rank(axis)",
        "rank + mesh.get_local_rank(axis)",
        "runtime/data/test_loaders.py",
    ),
    Mutant(
        "kernel/rankbook/runtime/gradient_state.py",
        "            self._stale = True\n        loader =",
        "        loader =",
        "runtime/test_accelerator.py",
    ),
    Mutant(
        "kernel/rankbook/runtime/settings.py",
        "if installed.replaced is not None:",
        "if installed.replaced is None:",
        "runtime/test_precision.py",
    ),
    Mutant(
        "kernel/rankbook/runtime/gradient_state.py",
        "        self._remove_dataloader(dataloader)\n        entry =",
        "        entry =",
        "runtime/test_gradient_state.py",
    ),
    # Checkpoints.
    Mutant(
        "kernel/rankbook/checkpoint/save_plan.py",
        "if same_common and inputs == self._signatures else",
        "if inputs == self._signatures else",
        "checkpoint/test_save_plan.py",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/storage/steps.py",
        "for step in finished_steps(storage) if step <= latest]",
        "for step in finished_steps(storage)]",
        "checkpoint/storage/test_steps.py::test_retention_keeps_steps_above_the_latest",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/inspection.py",
        "(size := self._names[file.name]) != file.size:",
        "(size := self._names[file.name]) < file.size:",
        "checkpoint/test_verify.py::test_bytes_appended_to_a_file_are_reported",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/format/manifest.py",
        "if len(chunk.pieces) == 1 else PIECE",
        "if chunk.pieces else PIECE",
        "checkpoint/format/test_manifest.py",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/load_plan.py",
        "starts[1:] > ends[:-1] + gap",
        "starts[1:] >= ends[:-1] + gap",
        "checkpoint/test_load_plan.py",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/local_plan.py",
        "same = (volume == chunk_volumes(extents)) & (measure == _measures(np.zeros_like(extents), extents))",
        "same = volume == chunk_volumes(extents)",
        "checkpoint/test_save_plan.py",
    ),
    Mutant(
        "kernel/rankbook/checkpoint/format/manifest.py",
        "length = min(remaining, piece)",
        "length = piece",
        "checkpoint/format/test_checksums.py",
    ),
    # Fixes of defects that users have found.
    Mutant(
        "kernel/rankbook/checkpoint/loading.py",
        "            self._ranks.run(self.verify)\n",
        "",
        "checkpoint/test_load_changes_nothing.py",
    ),
    Mutant(
        "kernel/rankbook/coordinator/wait.py",
        "            if wait_ending():\n                raise KeyboardInterrupt\n",
        "",
        "faults/test_keep.py::test_a_foreground_cell_goes_on_through_a_restart_of_the_kernel",
        slow=True,
    ),
    Mutant(
        "kernel/rankbook/checkpoint/async_save.py",
        "            if isinstance(error, CollectiveAborted):\n",
        "            if error is None:\n",
        "checkpoint/test_saves_beside_errors.py::test_loss_of_a_save_is_reported_once_by_heal_and_the_next_save_works",
        slow=True,
    ),
    Mutant(
        "kernel/rankbook/rank/executor.py",
        "return plain_module(name, value) if isinstance(value, torch.nn.Module) else value",
        "return value",
        "magics/test_commands.py::test_a_replicated_model_arrives_as_the_plain_module_with_its_weights",
    ),
    Mutant(
        "magics/magics.py",
        "missing = tuple(name for name in names if name not in self._shell.user_ns)",
        "missing = ()",
        "magics/test_commands.py::test_push_of_a_variable_that_the_ranks_have_succeeds_with_a_message",
    ),
    Mutant(
        "magics/output_panel.py",
        "if (key := repr(request)) not in self._shown:",
        "if (key := object()) not in self._shown:",
        "jupyter/test_kernel.py::test_a_view_is_shown_once_wherever_a_cell_calls_for_it",
    ),
    Mutant(
        "kernel/rankbook/rank/shell.py",
        "        if self.keeps_values:\n",
        "        if not self.keeps_values:\n",
        "jupyter/test_kernel.py::test_the_ranks_have_ipythons_session",
    ),
    Mutant(
        "kernel/rankbook/rank/process_groups/manager.py",
        'snapshot_files.next_serial = max(report["serial"] for report in reports)',
        "pass",
        "faults/test_protect.py::test_a_rank_that_was_restarted_alone_gets_the_state_of_its_own_snapshot",
        slow=True,
    ),
)


class Copy:
    """A copy of the package and its tests, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        package = folder / "kernel" / "rankbook"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(package.parent),  # ahead of the editable install
            "PYTHONDONTWRITEBYTECODE": "1",  # a file may change twice within the resolution of its time stamp
        }
        imported = self._run(["-c", "import rankbook; print(rankbook.__file__)"])[1].strip()
        if imported != str(package / "__init__.py"):
            raise RuntimeError(f"expected the tests to import {package}/__init__.py, but they import {imported}")

    def test(self, tests: str, *, slow: bool = False) -> tuple[int, str]:
        """Run the tests; return pytest's exit code and its output."""
        paths = [f"tests/{path}" for path in tests.split()]
        marks = ["-m", "not full"] if slow else []
        return self._run(
            ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *self._without_workers(), *marks, *paths]
        )

    def try_mutant(self, mutant: Mutant) -> bool:
        """Return whether the mutant's tests notice it. Raise RuntimeError if pytest cannot run them."""
        text = mutant.apply(self.root)
        try:
            code, output = self.test(mutant.tests, slow=mutant.slow)
        finally:
            (self.root / mutant.file).write_text(text)
        if code > INTERRUPTED:
            raise RuntimeError(f"pytest could not run for {mutant} (exit code {code}):\n{output}")
        return code != PASSED

    @staticmethod
    def _without_workers() -> list[str]:
        return ["-n0"] if importlib.util.find_spec("xdist") else []

    def _run(self, arguments: Sequence[str]) -> tuple[int, str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return process.returncode, output


class Copies:
    """Creates up to `number` copies that are in use at a time, below one temporary folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for index in range(number):
            copy = folder / str(index)
            copy.mkdir()
            self._free.put(Copy(copy))

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Copy]:
        """Wait for a copy that is not in use."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def test(self, tests: str, *, slow: bool) -> tuple[str, int, str]:
        """Run the tests without any change."""
        with self.borrow() as copy:
            return tests, *copy.test(tests, slow=slow)

    def try_mutant(self, mutant: Mutant) -> tuple[Mutant, bool, float]:
        """Return the mutant, whether its tests notice it, and how many seconds they took."""
        with self.borrow() as copy:
            start = time.monotonic()
            return mutant, copy.try_mutant(mutant), time.monotonic() - start


def check_table(mutants: Sequence[Mutant], folder: Path) -> None:
    """Raise ValueError with every entry that does not fit the sources, or whose change is no Python."""
    errors = []
    for mutant in mutants:
        path = folder / mutant.file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / mutant.file, path)
        try:
            mutant.apply(folder)
        except (ValueError, SyntaxError) as error:
            errors.append(str(error))
    if errors:
        raise ValueError("\n".join(errors))


def check_tests(mutants: Sequence[Mutant], copies: Copies, pool: ThreadPoolExecutor, *, jobs: int) -> None:
    """Run the tests of all mutants without any change. Raise RuntimeError if one fails."""
    shares = []
    for slow in (False, True):
        selections = list(dict.fromkeys(mutant.tests for mutant in mutants if mutant.slow is slow))
        shares += [(" ".join(selections[job::jobs]), slow) for job in range(min(jobs, len(selections)))]
    for tests, code, output in pool.map(lambda share: copies.test(share[0], slow=share[1]), shares):
        if code != PASSED:
            raise RuntimeError(f"expected these to pass unchanged (exit code {code}): {tests}\n{output}")


def run(mutants: Sequence[Mutant], *, jobs: int) -> int:
    """Try every mutant and print what became of it; return the exit code."""
    survived = 0
    with tempfile.TemporaryDirectory(prefix="rankbook-mutants-") as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        check_table(mutants, folder / "table")
        copies = Copies(folder, jobs)
        print(f"{len(mutants)} mutants; first their tests, without any change", flush=True)
        check_tests(mutants, copies, pool, jobs=jobs)
        try:
            for future in as_completed([pool.submit(copies.try_mutant, mutant) for mutant in mutants]):
                mutant, noticed, seconds = future.result()
                survived += not noticed
                print(f"{'noticed' if noticed else 'SURVIVED':8} {seconds:5.1f} s  {mutant}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(f"{len(mutants) - survived} of {len(mutants)} mutants are noticed")
    return 1 if survived > MAY_SURVIVE else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="try only the mutants whose description has TEXT")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="how many to try at a time (default: 2)")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.only in f"{mutant}"]
    if not mutants:
        parser.error(f"no mutant has {options.only!r} in its description")
    return run(mutants, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
