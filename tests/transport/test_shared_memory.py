"""Test shared memory segments: complete or absent, private, and removed when unused."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest

from rankbook.errors import ProtocolError, TransferError
from rankbook.transport import shared_memory
from rankbook.transport.shared_memory import SegmentStore


@pytest.fixture
def store():
    """Provide a store, in shared memory if there is any. Nothing may be left in it."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="segments-", dir=shared if shared.is_dir() else None))
    yield SegmentStore(folder)
    remaining = list(folder.iterdir()) if folder.exists() else []
    shutil.rmtree(folder, ignore_errors=True)
    assert not remaining


def segment_of(store, *buffers):
    segment = store.write([[buffer] for buffer in buffers])
    assert segment is not None
    return segment


def a_name():
    return "segment-1-0123456789abcdef"


def refuse(code):
    def fail(*_args):
        raise OSError(code, os.strerror(code))

    return fail


def test_buffers_arrive_every_at_its_aligned_offset_and_pieces_end_to_end(store):
    pieces = [b"one", memoryview(b"two"), bytearray(b"three")]
    segment = store.write([[b"x" * 65], [], pieces])
    assert segment.offsets == (0, 128, 128)
    assert segment.size == 128 + 11
    mapped = store.read(segment.name, unlink=True)
    assert mapped[:65] == b"x" * 65
    assert mapped[128:] == b"onetwothree"


def test_only_the_owner_may_read_a_segment(store):
    segment = segment_of(store, b"secret")
    assert (store.folder / segment.name).stat().st_mode & 0o777 == 0o600
    store.discard(segment.name)


def test_reader_changes_only_its_own_copy(store):
    segment = segment_of(store, b"abc")
    one, other = store.read(segment.name), store.read(segment.name)
    one[0] = ord("z")
    assert (bytes(one), bytes(other), bytes(store.read(segment.name, unlink=True))) == (b"zbc", b"abc", b"abc")


def test_the_memory_outlives_its_file(store):
    segment = segment_of(store, b"abc" * 5000)
    mapped = store.read(segment.name, unlink=True)
    assert not list(store.folder.iterdir())
    part = mapped[3:6]
    del mapped
    part[0] = ord("z")
    assert part == b"zbc"


def test_read_segment_holds_no_file_descriptor(store):
    def open_files():
        return len(os.listdir("/dev/fd"))  # noqa: PTH208 - one of them is the listing itself, in both counts

    before = open_files()
    buffers = [store.read(segment_of(store, b"abc").name, unlink=True) for _ in range(50)]
    assert open_files() == before
    assert {bytes(item) for item in buffers} == {b"abc"}


def test_an_empty_segment_can_be_read(store):
    assert store.read(segment_of(store, b"").name, unlink=True) == b""


@pytest.fixture(params=["huge pages", "none", "some"])
def huge_pages(request, monkeypatch):
    """Run the test with the system's huge pages, without them, and while they run out."""
    allocate, calls = shared_memory._libc.madvise, []

    def refuse_some(*args):
        calls.append(args)
        return allocate(*args) if request.param == "some" and len(calls) == 1 else -1

    if request.param != "huge pages":
        monkeypatch.setattr(shared_memory, "_libc", mock.Mock(wraps=shared_memory._libc, madvise=refuse_some))


@pytest.mark.usefixtures("huge_pages")
def test_a_large_segment_arrives_with_or_without_huge_pages(store):
    step = shared_memory._COLLAPSE_AT_ONCE
    head, body, tail = b"h" * 100, os.urandom(step + 12_345), b"t" * 3_000_001
    segment = store.write([[head], [memoryview(body)[:5], body[5:step], body[step:]], [], [bytearray(tail)]])
    mapped = store.read(segment.name, unlink=True)
    assert len(mapped) == segment.size
    for offset, expected in zip(segment.offsets, (head, body, b"", tail), strict=True):
        assert mapped[offset : offset + len(expected)] == expected


@pytest.mark.processes
@pytest.mark.usefixtures("huge_pages")
def test_readers_of_a_large_segment_are_independent(store):
    size = 40 << 20
    segment = segment_of(store, bytes(size))
    one, other = store.read(segment.name), store.read(segment.name)
    for position in (0, 4096, size // 2, size - 1):
        one[position] = 1
    assert not any(other)
    child = os.fork()
    if not child:
        one[5] = 1
        os._exit(0 if sum(one[:10]) == 2 and not other[5] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sum(one) == 4
    assert not any(store.read(segment.name, unlink=True))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_a_file_that_does_not_fit_is_none_and_leaves_nothing(store, monkeypatch, code):
    real, calls = os.pwrite, []

    def fills_up(*args):
        calls.append(args)
        return real(*args) if len(calls) == 1 else refuse(code)()

    monkeypatch.setattr(os, "pwrite", fills_up)
    assert store.write([[b"abc"], [b"def"]]) is None
    assert len(calls) == 2


def test_a_file_takes_at_most_half_of_what_is_free(store, monkeypatch):
    real = os.statvfs(store.folder)

    class Status:
        f_bavail, f_frsize = 10, 1000

    monkeypatch.setattr(os, "statvfs", lambda _: Status)
    assert real.f_bavail * real.f_frsize > 5001
    assert store.write([[bytes(5001)]]) is None
    store.discard(segment_of(store, bytes(5000)).name)


def test_a_write_that_is_cut_short_goes_on(store, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: real(file, data[:2], position))
    assert store.read(segment_of(store, b"abcdefg").name, unlink=True) == b"abcdefg"


def test_an_interrupted_write_leaves_nothing(store, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.write([[b"abc"]])


def test_other_errors_are_reported_as_text(store, monkeypatch):
    with pytest.raises(TransferError, match=r"cannot write shared memory in .*: No such file"):
        SegmentStore(store.folder / "gone").write([[b"abc"]])
    monkeypatch.setattr(os, "pwrite", refuse(errno.EIO))
    with pytest.raises(TransferError, match="cannot write shared memory in"):
        store.write([[b"abc"]])


def test_missing_segment_is_reported_as_text(store):
    with pytest.raises(TransferError, match="removed before it was read"):
        store.read(a_name())


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", ".", "..", "", "up", "a/b", f"../{a_name()}", f"{a_name()}\n", f"{a_name()}\0"]
)
def test_a_name_that_we_did_not_make_is_refused(store, name):
    with pytest.raises(ProtocolError, match="not the name of a shared memory file"):
        store.read(name, unlink=True)
    with pytest.raises(ProtocolError, match="not the name of a shared memory file"):
        store.discard(name)


def test_special_files_are_refused_and_kept(store, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    evil = store.folder / a_name()
    listener = socket.socket(socket.AF_UNIX)
    makers = [
        lambda: evil.symlink_to(secret),
        lambda: evil.symlink_to(tmp_path / "nowhere"),
        evil.mkdir,
        lambda: os.mkfifo(evil),
        lambda: listener.bind(str(evil)),
    ]
    for make in makers:
        make()
        with pytest.raises(ProtocolError):
            store.read(a_name(), unlink=True)
        assert os.path.lexists(evil)
        evil.rmdir() if evil.is_dir() and not evil.is_symlink() else evil.unlink()
    listener.close()
    assert secret.read_text() == "secret"


def test_another_users_file_is_refused(store, monkeypatch):
    segment = segment_of(store, b"abc")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ProtocolError, match="not a regular file owned by this user"):
        store.read(segment.name)
    store.discard(segment.name)


def test_discard_is_idempotent_and_clear_removes_segments_only(store):
    segment = segment_of(store, b"abc")
    store.discard(segment.name)
    store.discard(segment.name)
    segment_of(store, b"abc")
    segment_of(store, b"def")
    neighbour = store.folder / "up"
    neighbour.touch()
    store.clear()
    assert list(store.folder.iterdir()) == [neighbour]
    neighbour.unlink()


def test_clear_accepts_a_missing_folder(store):
    shutil.rmtree(store.folder)
    store.clear()


@pytest.mark.processes
def test_segments_of_a_dead_process_are_cleared_by_pid(store):
    script = (
        "import os, sys, pathlib\n"
        "from rankbook.transport.shared_memory import SegmentStore\n"
        "print(os.getpid(), SegmentStore(pathlib.Path(sys.argv[1])).write([[b'theirs']]).name, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(store.folder)]
    pid, segment_name = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout.split()
    ours = segment_of(store, b"ours")
    assert bytes(store.read(segment_name)) == b"theirs"
    store.clear(int(pid))
    assert [path.name for path in store.folder.iterdir()] == [ours.name]
    store.clear()


@pytest.mark.processes
def test_what_a_dead_process_has_not_finished_is_cleared_and_its_values_stay(store):
    script = (
        "import os, sys, pathlib\n"
        "from rankbook.transport.shared_memory import DeferredBytes, SegmentStore\n"
        "store = SegmentStore(pathlib.Path(sys.argv[1]))\n"
        "print(os.getpid(), store.write([[b'sent']]).name, flush=True)\n"
        "store.write([[b'begun', DeferredBytes(5, lambda: os.kill(os.getpid(), 9))]])"
    )
    command = [sys.executable, "-c", script, str(store.folder)]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=60)
    pid, sent = ended.stdout.split()
    other = segment_of(store, b"of another process")
    assert len(list(store.folder.iterdir())) == 3
    store.clear_unfinished(int(pid) + 1)
    assert len(list(store.folder.iterdir())) == 3
    store.clear_unfinished(int(pid))
    assert {path.name for path in store.folder.iterdir()} == {sent, other.name}
    (store.folder / f"writing-{a_name()}").touch()
    store.clear()


def test_other_threads_run_while_a_large_value_is_copied():
    memory, data = memoryview(bytearray(64 << 20)), bytes(64 << 20)
    begun, ran = threading.Event(), threading.Event()

    def run() -> None:
        begun.wait()
        ran.set()

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    # Only who releases the GIL loses it.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        begun.set()
        for _ in range(100):
            shared_memory._copy(data, memory, 0)
            if ran.is_set():
                break
        ran_meanwhile = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        begun.set()
        thread.join()
    assert ran_meanwhile
