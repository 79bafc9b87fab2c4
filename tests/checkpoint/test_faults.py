"""Test saves to storages that fail: all ranks raise the same error, old checkpoints stay, the next save works."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass, field

import pytest

from tests.checkpoint import generations
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes

ROWS = 64


@dataclass
class Faulty:
    """A storage of which one rank's write of a file fails after some bytes, or that is gone from an operation on."""

    inner: object
    file: str = ""
    number: int = errno.ENOSPC
    after: int = 0
    gone_from: str = ""
    gone: bool = field(default=False, init=False)

    def __str__(self) -> str:
        return str(self.inner)

    def _now(self, operation: str, path: str) -> None:
        self.gone = self.gone or bool(self.gone_from and self.gone_from == f"{operation} {path.rpartition('/')[2]}")
        if self.gone:
            raise ConnectionError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED), path)

    def _some(self, path, parts):
        written = 0
        for part in parts:
            if self.file and path.endswith(self.file) and written + len(part) > self.after:
                raise OSError(self.number, os.strerror(self.number), path)
            written += len(part)
            yield part

    def write(self, path, parts):
        self._now("write", path)
        return self.inner.write(path, self._some(path, parts))

    def read(self, path, start, into):
        self._now("read", path)
        return self.inner.read(path, start, into)

    def list(self, path=""):
        self._now("list", path)
        return self.inner.list(path)

    def move(self, source, target):
        self._now("move", source)
        self.inner.move(source, target)

    def remove(self, path):
        self._now("remove", path)
        self.inner.remove(path)


FAULTS = {
    "disk full on rank 1": (1, {"file": "__1_0.distcp", "after": 70_000}, "No space left on device"),
    "disk full at the first byte": (0, {"file": "__0_0.distcp"}, "No space left on device"),
    "disk full in the common part": (0, {"file": "common.pt"}, "No space left on device"),
    "disk full in the manifest": (0, {"file": "manifest.json"}, "No space left on device"),
    "disk full in latest": (0, {"file": "step-2.latest"}, "No space left on device"),
    "an error of the disk": (1, {"file": "__1_0.distcp", "after": 1, "number": errno.EIO}, "Input/output error"),
    "a storage for reading only": (0, {"file": "owner", "number": errno.EROFS}, "Read-only file system"),
    "rank 1 may not write": (1, {"file": "__1_0.distcp", "number": errno.EACCES}, "Permission denied"),
    "gone at the data": (0, {"gone_from": "write __0_0.distcp"}, "Connection refused"),
    "gone at rank 1's data": (1, {"gone_from": "write __1_0.distcp"}, "Connection refused"),
    "gone at the manifest": (0, {"gone_from": "write manifest.json"}, "Connection refused"),
    "gone at the first look": (0, {"gone_from": "list "}, "Connection refused"),
    "gone at the commit": (0, {"gone_from": "move step-2.partial"}, "Connection refused"),
    "gone at latest": (0, {"gone_from": "move step-2.latest"}, "Connection refused"),
}


def attempt(state, folder, background, **options):
    """The words of the error that it ends with, and its type."""
    from rankbook.checkpoint import CheckpointError, save

    try:
        saved = save(state, folder, async_=background, **options)
        if background:
            with pytest.raises(CheckpointError) as caught:
                saved.wait(20)
            assert saved.done
            assert saved.error is caught.value
            saved.wait()
    except CheckpointError as error:
        return str(error)
    return None


def failed_saves(kind, folder, background):
    """Cause every fault in turn, in the same processes."""
    import fsspec
    import torch
    import torch.distributed as dist

    from rankbook.checkpoint import load, save, verify
    from rankbook.checkpoint.storage import steps
    from rankbook.checkpoint.storage.backends import RemoteStorage, storage_of

    rank, world = dist.get_rank(), dist.get_world_size()
    plain = storage_of(folder) if kind == "local" else RemoteStorage(f"file://{folder}", fsspec.filesystem("file"))
    save(generations.state(rank, world, 1, ROWS), plain, step=1)
    generation = 1
    for what, (victim, fault, words) in FAULTS.items():
        broken = Faulty(plain, **(fault if rank == victim else {}))
        error = attempt(generations.state(rank, world, 7, ROWS), broken, background, step=2)
        errors = [None] * world
        dist.all_gather_object(errors, error)
        assert error is not None, what
        assert errors == [error] * world, (what, errors)
        assert words in error, (what, error)
        assert what == "gone at latest" or f"rank {victim}" in error, (what, error)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == world
        loaded_generation = generations.generation_of(
            rank, world, load(generations.state(rank, world, 0, ROWS), plain), ROWS
        )
        assert loaded_generation == generation, what
        generation += 1
        save(generations.state(rank, world, generation, ROWS), plain, step=2 if generation % 2 else 1)
        assert (
            generations.generation_of(rank, world, load(generations.state(rank, world, 0, ROWS), plain), ROWS)
            == generation
        ), what
        if rank == 0:
            assert steps.list_partials(plain) == [], what
            assert verify(plain).ok
        dist.barrier()
    return True


@pytest.mark.parametrize(
    ("kind", "background"),
    [("local", False), ("local", True), pytest.param("fsspec", True, marks=pytest.mark.slow)],
    ids=["in the foreground", "in the background", "by fsspec, in the background"],
)
def test_storage_error_is_raised_on_every_rank_and_the_next_save_works(tmp_path, kind, background):
    assert run_ranks(failed_saves, 2, kind, str(tmp_path / "run"), background, timeout=100) == [True, True]


def full(folder, limit):
    """Save twice what fits, then what fits, on a full disk or with a limit of the file's size."""
    import signal

    import torch.distributed as dist

    from rankbook.checkpoint import load, save

    rank, world = dist.get_rank(), dist.get_world_size()
    save(generations.state(rank, world, 1, 64), folder, step=1)
    if limit and rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
    errors = []
    for background in (False, True):
        errors.append(attempt(generations.state(rank, world, 7, 1024), folder, background, step=2))
        assert generations.generation_of(rank, world, load(generations.state(rank, world, 0, 64), folder), 64) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(generations.state(rank, world, 2, 64), folder, step=2, keep=1)
    assert generations.generation_of(rank, world, load(generations.state(rank, world, 0, 64), folder), 64) == 2
    return errors


def test_save_fails_on_every_rank_at_the_file_size_limit(tmp_path):
    one, other = run_ranks(full, 2, str(tmp_path / "run"), True)
    assert one == other
    assert all("rank 1: OSError: [Errno 27] File too large" in item for item in one)


@pytest.fixture
def mounted(tmp_path):
    """Provide a function that mounts below the test's folder; skip where that is not allowed."""
    done = []

    def mount(*options):
        folder = tmp_path / f"mounted-{len(done)}"
        folder.mkdir(exist_ok=True)
        run = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
        if run.returncode:
            pytest.skip(f"this process may not mount: {run.stderr.strip()}")
        done.append(folder)
        return folder

    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("only root may mount, and make folders that it cannot write to")
    yield mount
    for folder in done:
        subprocess.run(["umount", str(folder)], check=True)


def test_save_fails_on_every_rank_when_the_disk_is_full(mounted):
    disk = mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    one, other = run_ranks(full, 2, str(disk / "run"), False)
    assert one == other
    assert all("No space left on device" in item for item in one)


def test_save_fails_on_every_rank_in_a_read_only_folder(tmp_path, mounted):
    disk = mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs")

    def first():
        import torch.distributed as dist

        from rankbook.checkpoint import save

        save(generations.state(dist.get_rank(), 2, 1, ROWS), disk, step=1)

    def then():
        import torch.distributed as dist

        from rankbook.checkpoint import load

        rank = dist.get_rank()
        errors = [
            attempt(generations.state(rank, 2, 7, ROWS), disk, background, step=2) for background in (False, True)
        ]
        return [*errors, generations.generation_of(rank, 2, load(generations.state(rank, 2, 0, ROWS), disk), ROWS)]

    run_ranks(first, 2)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    one, other = run_ranks(then, 2)
    assert one == other
    assert all("rank 0: OSError: [Errno 30] Read-only file system" in item for item in one[:2])
    assert one[2] == 1
