"""Test that all ranks raise the same error when they disagree or one fails, and that no rank waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankbook import control_collectives
from rankbook.control_collectives import Failure, RankGroup, RanksFailed
from rankbook.errors import CheckpointError, InvalidArgument
from tests.rank_processes import run_ranks


def error_text(call):
    """Return the error of `call` as text."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"
    return ""


def attempts(folder):
    """Try every disagreement of two ranks. Return the error text and the files in the folder, by name."""
    import torch
    import torch.distributed as dist

    import rankbook.checkpoint as rc
    from rankbook.checkpoint.storage.backends import storage_of

    rank = dist.get_rank()
    state = {"w": torch.arange(4.0), "lr": 0.5}
    other = f"{folder}/other-{rank}"
    errors, listed = {}, {}

    def attempt(name, call):
        errors[name] = error_text(call)
        dist.barrier()
        listed[name] = sorted(path.name for path in Path(folder).iterdir())
        dist.barrier()

    class Fails:
        """A storage whose `method` fails on rank 1."""

        def __init__(self, method, error, on=1):
            self.inner, self.method, self.error, self.on = storage_of(folder), method, error, on

        def __getattr__(self, name):
            if name == self.method and rank == self.on:
                raise self.error
            return getattr(self.inner, name)

    def broken(*_):
        if rank == 1:
            raise KeyboardInterrupt("in the listener")

    class Unpicklable:
        def __reduce__(self):
            raise TypeError("no pickle of this")

    class UnpicklableError(Unpicklable, Exception):
        pass

    rc.save(state, folder, step=1)
    attempt("step", lambda: rc.save(state, folder, step=5 + rank))
    attempt("folder", lambda: rc.save(state, other))
    attempt("one bad argument", lambda: rc.save(state, folder, keep=rank))
    attempt("all bad", lambda: rc.save(state, folder, keep=0))
    attempt("async", lambda: rc.save(state, folder, step=5, async_=rank == 1))
    attempt("metadata", lambda: rc.save(state, folder, step=5, metadata={"f": len} if rank else {}))
    attempt("common", lambda: rc.save({**state, "opt": {"lr": [0.1, rank]}}, folder, step=5))
    attempt("absent", lambda: rc.save({**state, **({"epoch": 1} if rank else {})}, folder, step=5))
    attempt("dtype", lambda: rc.save({"w": shard(rc, torch.zeros(2, dtype=[torch.int8, torch.half][rank]))}, folder))
    attempt("hole", lambda: rc.save({"w": rc.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))}, folder))
    attempt("unpicklable", lambda: rc.save({"x": Unpicklable() if rank else 1}, folder))
    attempt("no dict", lambda: rc.save([] if rank else {}, folder))
    attempt(
        "no data",
        lambda: rc.save({"w": shard(rc, torch.zeros(2)).without_data() if rank else shard(rc, torch.zeros(2))}, folder),
    )
    attempt("listener", lambda: rc.save(state, folder, step=5, on_progress=broken))
    attempt("disk", lambda: rc.save({"w": shard(rc, torch.zeros(2))}, Fails("write", OSError(28, "No space left"))))
    attempt("error", lambda: rc.save({"w": shard(rc, torch.zeros(2))}, Fails("write", UnpicklableError("odd"))))
    attempt("interrupt", lambda: rc.save({"w": shard(rc, torch.zeros(2))}, Fails("write", KeyboardInterrupt())))
    attempt("rank 0", lambda: rc.save({"w": shard(rc, torch.zeros(2))}, Fails("write", OSError(5, "I/O error"), on=0)))
    attempt("commit", lambda: rc.save(state, Fails("move", OSError(5, "I/O error"), on=0), step=5))
    attempt("load step", lambda: rc.load(state, folder, step=1 + rank))
    attempt("load strict", lambda: rc.load(state, folder, strict="nonsense" if rank else "log_all"))
    attempt("load allow", lambda: rc.load(state, folder, allow=["nope.Nope"] if rank else []))
    attempt("load missing", lambda: rc.load(state, folder, step=77))
    attempt("load shape", lambda: rc.load({"w": torch.zeros(4 + rank)}, folder))
    attempt("load key", lambda: rc.load({"w": torch.zeros(4), **({"v": torch.zeros(1)} if rank else {})}, folder))
    attempt("load list", lambda: rc.load(state, Fails("list", RuntimeError("a broken client"), on=0)))
    attempt("load read", lambda: rc.load(state, Fails("read", OSError(5, "I/O error"))))
    attempt("good", lambda: rc.save(state, folder, step=5))
    return errors, listed


def shard(rc, data):
    import torch.distributed as dist

    return rc.ShardedTensor.from_rank_offsets("w", data, (0, dist.get_rank(), 2))


ALIKE = {
    "step": r"InvalidArgument: .*step is 5 on rank 0, 6 on rank 1",
    "folder": r"InvalidArgument: .*folder is .*other-0' on rank 0, .*other-1' on rank 1",
    "one bad argument": (
        r"InvalidArgument: save\(\) did not start: rank 0: InvalidArgument: keep must be an integer >= 1 .*, got 0"
    ),
    "all bad": r"InvalidArgument: keep must be an integer >= 1 .*, got 0",
    "async": r"InvalidArgument: .*async_ is False on rank 0, True on rank 1",
    "metadata": r"InvalidArgument: .*rank 1: .*metadata must be JSON-serializable",
    "common": (
        r"CheckpointError: .*common value 'opt.lr\[1\]' differs between ranks "
        r"\(one value on rank 0, another on rank 1\)"
    ),
    "absent": r"CheckpointError: .*common value 'epoch' exists on rank 1, but is missing on rank 0",
    "dtype": r"CheckpointError: .*tensor 'w' is not the same on all ranks: int8, .*rank 0; float16, .*rank 1",
    "hole": r"CheckpointError: .*'w' \(float32, global shape \(4,\)\)",
    "unpicklable": r"CheckpointError: the save failed.*rank 1: TypeError: no pickle of this",
    "no dict": r"CheckpointError: .*rank 1: sharded_state_dict must be a dict, got list",
    "no data": (r"CheckpointError: .*'w': rank 1 must store the chunk at \(2,\), but its ShardedTensor has data=None"),
    "disk": (
        r"CheckpointError: the save failed \(existing checkpoints are unchanged\): "
        r"rank 1: OSError: .*No space left"
    ),
    "error": (
        r"CheckpointError: the save failed \(existing checkpoints are unchanged\): "
        r"rank 1: UnpicklableError: odd"
    ),
    "rank 0": r"CheckpointError: .*rank 0: OSError: .*I/O error",
    "commit": r"CheckpointError: .*rank 0: OSError: .*I/O error",
    "load step": r"InvalidArgument: load\(\): arguments differ between ranks: step is 1 on rank 0, 2 on rank 1",
    "load strict": r"InvalidArgument: .*rank 1: InvalidArgument: unknown strict 'nonsense'",
    "load allow": r"InvalidArgument: .*rank 1: InvalidArgument: invalid allow=\['nope.Nope'\]: expected",
    "load missing": r"CheckpointError: .*no finished step 77; finished steps: 1",
    "load shape": (
        r"CheckpointError: .*'w': global shape is \(4,\) in the checkpoint, "
        r"but \(5,\) was requested \(rank 1\)"
    ),
    "load key": r"CheckpointError: .*'v' \(rank 1\)",
    "load list": r"CheckpointError: .*RuntimeError: a broken client",
    "load read": r"CheckpointError: .*could not be loaded:.*I/O error",
    "good": r"",
}


@pytest.mark.processes
def test_every_rank_raises_the_same_and_the_last_checkpoint_stays(tmp_path):
    import re

    (first, folders), (second, _) = run_ranks(attempts, 2, str(tmp_path), timeout=90)
    for name, pattern in ALIKE.items():
        assert first[name] == second[name], name
        assert re.search(pattern, first[name], re.DOTALL), (name, first[name])
        assert bool(first[name]) == bool(pattern), (name, first[name])
        assert folders[name] == ["latest", "step-1", *(["step-5"] if name == "good" else [])], name
    for name, words in (("interrupt", "KeyboardInterrupt: "), ("listener", "KeyboardInterrupt: in the listener")):
        assert second[name] == words  # where it hit; the others hear of it
        assert f"rank 1: {words}".rstrip(": ") in first[name]
        assert folders[name] == ["latest", "step-1"]
    assert first.keys() == {*ALIKE, "interrupt", "listener"}


def test_invalid_argument_on_a_single_rank_is_raised_unchanged():
    with pytest.raises(InvalidArgument, match=r"^mine$"):
        control_collectives.check_same_arguments("save", lambda: (_ for _ in ()).throw(InvalidArgument("mine")), step=1)
    with pytest.raises(OSError, match="disk"):
        control_collectives.check_same_arguments("save", lambda: (_ for _ in ()).throw(OSError("disk")))
    assert control_collectives.check_same_arguments("save", lambda: 7, step=1) == 7


def failed(errors, rank=0):
    """Return the error that `rank` raises if the ranks fail with `errors`."""
    return RanksFailed({which: Failure.of(error) for which, error in errors.items()}, errors.get(rank))


def test_equal_errors_of_several_ranks_are_reported_once():
    error = CheckpointError("tensor 'w' has a hole")
    assert failed({0: error}).message("save") == "tensor 'w' has a hole"
    assert failed({0: error, 3: error}).message("save") == "tensor 'w' has a hole"


def test_errors_of_other_ranks_are_reported_with_their_ranks():
    disk, other = OSError(28, "No space left"), CheckpointError("a damaged chunk")
    assert failed({1: disk, 2: disk}).message("save") == (
        "the save failed (existing checkpoints are unchanged): ranks 1-2: OSError: [Errno 28] No space left"
    )
    assert failed({0: other, 5: disk}).message("load") == (
        "the load failed: rank 0: a damaged chunk; rank 5: OSError: [Errno 28] No space left"
    )


def test_interrupt_is_raised_on_its_rank_and_lists_failures_of_other_ranks():
    with pytest.raises(KeyboardInterrupt) as caught:
        failed({1: KeyboardInterrupt()}, rank=1).reraise("load")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(KeyboardInterrupt) as caught:
        failed({1: KeyboardInterrupt(), 2: OSError(5, "I/O error")}, rank=1).reraise("load")
    assert caught.value.__notes__ == [
        "the load failed: rank 1: KeyboardInterrupt: ; rank 2: OSError: [Errno 5] I/O error"
    ]
    with pytest.raises(CheckpointError, match=r"^the load failed: rank 1: KeyboardInterrupt: $"):
        failed({1: KeyboardInterrupt()}).reraise("load")


def test_error_is_chained_on_the_rank_that_failed():
    disk = OSError(28, "No space left")
    with pytest.raises(CheckpointError) as caught:
        failed({0: disk}).reraise("save")
    assert caught.value.__cause__ is disk
    with pytest.raises(CheckpointError) as caught:
        failed({1: disk}).reraise("save")
    assert caught.value.__cause__ is None


def exchange():
    """Return the results of every rank, and the errors that it raises after a failure of another rank."""
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = RankGroup(dist.new_group())
    results = [ranks.exchange(lambda: rank + 1, lambda errors: [10 * item for item in errors])]

    def fail(on):
        if rank == on:
            raise MemoryError(f"on {rank}")
        return rank

    for work, combine in (
        (lambda: fail(2), list),
        (lambda: rank, lambda errors: [fail(0) for _ in errors]),
        (lambda: fail(1), lambda _: fail(0)),  # rank 0 does not combine what is not all there
    ):
        try:
            ranks.exchange(work, combine)
        except RanksFailed as failure:
            results.append((failure.failures, repr(failure.local_error)))
    try:
        ranks.run(lambda: fail(1))
    except RanksFailed as failure:
        results.append((failure.failures, repr(failure.local_error)))
    ranks.run(lambda: None)
    return results


@pytest.mark.processes
def test_failure_of_one_rank_is_raised_on_all_ranks_and_the_group_stays_usable():
    def failure(rank):
        return {rank: Failure(f"MemoryError: on {rank}", expected=False)}

    for rank, (result, *failures) in enumerate(run_ranks(exchange, 3)):
        assert result == 10 * (rank + 1)
        assert failures == [
            (failure(which), f"MemoryError('on {which}')" if which == rank else "None") for which in (2, 0, 1, 1)
        ]
