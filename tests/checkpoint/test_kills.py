"""SIGKILL at any moment of a save, on real processes and files: what can be loaded is the step before, or the new one.

A kill comes after a random time, or before a random one of the file operations of the save.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from tests import rank_processes
from tests.checkpoint import generations
from tests.rank_processes import run_ranks

OLD, NEW = 1, 2
WORLD = 2


@dataclass
class Kill:
    """`ranks` die when `after` seconds of the save have passed, or one before its file operation number `operation`."""

    background: bool
    step: int
    ranks: list[int]
    operation: int = 0
    after: float | None = None


def saving(root, kill):
    """Return the function of a rank that is killed while it saves."""

    def work(rank, say):
        import torch.distributed as dist

        from rankbook.checkpoint import async_save, save

        async_save.GROUP_CREATION_TIMEOUT = timedelta(seconds=3)
        state = generations.state(rank, WORLD, NEW)
        dist.barrier()
        say("go")
        count = 0

        def operation(event, args):
            nonlocal count
            if rank in kill.ranks and args and str(args[0]).startswith(str(root)):
                count += 1
                if count == kill.operation:
                    os.kill(os.getpid() if len(kill.ranks) == 1 else 0, signal.SIGKILL)

        if kill.after is None:
            sys.addaudithook(operation)
        if len(kill.ranks) > 1 and kill.after is None and rank == kill.ranks[-1]:
            kill.operation = 0  # the other one takes it along
        start = time.monotonic()
        saved = save(state, root, step=kill.step, async_=kill.background)
        if kill.background:
            generations.train(state)
            saved.wait()
        say(("saved", time.monotonic() - start, count))

    return work


def strike(folder, template, kill):
    """Kill ranks during a save. Return the loaded generation, the leftovers, and the reports of the survivors."""
    root = folder / "run"
    shutil.copytree(template, root)
    ranks = rank_processes.ForkedRanks(WORLD, folder, saving(root, kill))
    if kill.after is not None:
        assert ranks.receive(lambda: all(ranks.messages))
        ranks.receive(lambda: False, timeout=kill.after)
        ranks.kill(kill.ranks)
    try:
        codes = ranks.end()
    except AssertionError as error:
        raise AssertionError(f"{kill}: {error}") from None
    ends = [messages[-1] for messages in ranks.messages if messages]
    survivors = [messages[-1] for rank, messages in enumerate(ranks.messages) if codes[rank] != -signal.SIGKILL]
    return root, survivors, any(end[0] == "saved" for end in ends)


def loaded(rank, root):
    from rankbook.checkpoint import load

    return generations.generation_of(rank, WORLD, load(generations.state(rank, WORLD, 0), root))


def check(folder, root, kill, saved):
    """Check that the old or the new step is complete, and that leftovers are reported and removed by the next save."""
    from rankbook.checkpoint import save, steps, verify
    from rankbook.checkpoint.storage import steps as folders
    from rankbook.checkpoint.storage.backends import storage_of
    from rankbook.cli import main as cli

    generations_loaded = rank_processes.run_forked(WORLD, folder, lambda rank: loaded(rank, root))
    assert generations_loaded in ([OLD, OLD], [NEW, NEW]), (kill, generations_loaded)
    assert not saved or generations_loaded == [NEW, NEW], (kill, "a rank was told that it is saved")
    storage = storage_of(root)
    for step in steps(root):
        assert verify(root, step).ok, (kill, str(verify(root, step)))
    rests = folders.list_partials(storage)
    with contextlib.redirect_stdout(io.StringIO()) as messages:
        assert cli.main(["checkpoint", "ls", str(root)]) == 0
    for rest in rests:
        assert f"{rest}: interrupted save" in messages.getvalue(), (kill, messages.getvalue())

    def again(rank):
        save(generations.state(rank, WORLD, 3), root, step=60)
        return loaded(rank, root)

    assert rank_processes.run_forked(WORLD, folder, again) == [3, 3]
    assert folders.list_partials(storage) == []
    leftover = set(storage.list()) - {"latest", "step-40", "step-50", "step-60"}
    assert not leftover, (kill, leftover)
    return generations_loaded[0], bool(rests)


def many(count, seed):
    """Kill `count` saves in one process. Return how often each outcome occurred."""
    import tempfile

    import torch.distributed.checkpoint  # noqa: F401 - once, for all forks

    import rankbook.checkpoint.loading
    import rankbook.checkpoint.saving  # noqa: F401
    from rankbook.checkpoint import save

    chance = random.Random(seed)
    counts = Counter()
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary_folder:
        base = Path(temporary_folder)
        template = base / "template"
        rank_processes.run_forked(
            WORLD, base, lambda rank: save(generations.state(rank, WORLD, OLD), template, step=40).step
        )
        timings = {}
        for background in (False, True):
            for step in (40, 50):
                for rank in range(WORLD):
                    folder = base / f"calm-{background}-{step}-{rank}"
                    folder.mkdir()
                    calm = Kill(background, step, [rank], operation=-1)
                    shutil.copytree(template, folder / "run")
                    ranks = rank_processes.ForkedRanks(WORLD, folder, saving(folder / "run", calm))
                    assert ranks.end() == [0] * WORLD, ranks.messages
                    timings[background, step, rank] = ranks.messages[rank][-1][1:]
                    shutil.rmtree(folder)
        for number in range(count):
            folder = base / str(number)
            folder.mkdir()
            background, step = bool(number % 2), (40, 50)[number // 2 % 2]
            victims = chance.choice([[0], [1], [0, 1]])
            seconds, operations = timings[background, step, victims[0]]
            kill = Kill(background, step, victims)
            if number // 4 % 2:
                kill.after = chance.uniform(0, seconds)
            else:
                kill.operation = chance.randint(chance.choice([1, max(1, operations - 15)]), operations)
            root, survivors, saved = strike(folder, template, kill)
            generation, rests = check(folder, root, kill, saved)
            kinds = Counter(
                survivor[0] if isinstance(survivor, tuple) else survivor.partition(":")[0] for survivor in survivors
            )
            counts.update({"old": generation == OLD, "new": generation == NEW, "left": rests, **kinds})
            shutil.rmtree(folder)
    return counts


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_kill_leaves_the_previous_step_or_the_new_one():
    (counts,) = run_ranks(many, 1, 12, 5, timeout=300, group=False)
    assert counts["old"] + counts["new"] == 12
    assert counts["old"] >= 2
    assert counts["left"] >= 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_hundred_kills_leave_the_previous_step_or_the_new_one():
    (counts,) = run_ranks(many, 1, 100, 11, timeout=850, group=False)
    assert counts["old"] + counts["new"] == 100
    print("100 kills:", dict(counts))
    assert min(counts["old"], counts["new"], counts["left"]) >= 10
