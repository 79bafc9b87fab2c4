"""Test a real forkserver over its own socket; the tests act as the notebook."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rankbook.control_groups import RecentKills
from rankbook.coordinator.liveness import describe_exit
from rankbook.protocol.forkserver import (
    CloseCluster,
    ClusterClosed,
    ClusterOpened,
    ForkRank,
    ForkserverUp,
    KillRank,
    OpenCluster,
    RankExited,
    RankForked,
)
from rankbook.protocol.messages import Done, RankReady, RunCell, Shutdown, Text, decode_from_forkserver
from rankbook.rank import forkserver, os_utils
from rankbook.rank.forkserver import Child, Forkserver
from rankbook.transport.framed_socket import MessageStream
from rankbook.transport.zmq_link import ZmqHub
from tests.conftest import wait_until
from tests.coordinator.fork_requests import request

pytestmark = pytest.mark.processes

SOON = 10.0

# A cell that prints and dies while it holds the interpreter lock, so that the rank's other thread reads nothing.
LAST_WORDS = """
import ctypes, sys
sys.setswitchinterval(1000)
libc = ctypes.PyDLL(None)
libc.write(1, b'to stdout', 9); libc.write(2, b'to stderr', 9); libc.abort()
"""


class Home:
    """The notebook's place: a forkserver of its own, and the links that its ranks dial."""

    def __init__(self, *, environment: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rb-", dir="/tmp"))  # pytest's are too long for a socket
        ours, forkserver_socket = socket.socketpair()
        with forkserver_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rankbook.rank.forkserver", str(forkserver_socket.fileno())],
                pass_fds=(forkserver_socket.fileno(),),
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.stream: MessageStream[Any] = MessageStream(ours, decode_from_forkserver)
        self.hub = ZmqHub(self.folder)
        self._forkserver_messages: list[Any] = []
        self._messages: list[tuple[int, Any]] = []

    def receive(self, kind: type, where: Callable[[Any], bool] = lambda _: True, *, timeout: float = SOON) -> Any:
        """The next message of that kind from the forkserver."""
        deadline = time.monotonic() + timeout
        while True:
            for message in self._forkserver_messages:
                if isinstance(message, kind) and where(message):
                    self._forkserver_messages.remove(message)
                    return message
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                pytest.fail(f"no {kind.__name__} within {timeout} s; there is {self._forkserver_messages}")
            select.select([self.stream], [], [], remaining)
            self._forkserver_messages += self.stream.read()

    def listen(self, kind: type, *, rank: int = 0, timeout: float = SOON) -> Any:
        """The next message of that kind from a rank."""
        deadline = time.monotonic() + timeout
        while True:
            for message in self._messages:
                if message[0] == rank and isinstance(message[1], kind):
                    self._messages.remove(message)
                    return message[1]
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                pytest.fail(f"no {kind.__name__} of rank {rank} within {timeout} s; there is {self._messages}")
            self.hub.wait(remaining, ())
            while (received_message := self.hub.receive()) is not None:
                self._messages.append((received_message[0].rank, received_message[1]))

    def open(self, *folders: Path) -> None:
        self.stream.send(OpenCluster(folders=tuple(str(folder) for folder in folders)))
        self.receive(ClusterOpened, timeout=60)

    def close(self) -> None:
        self.stream.send(CloseCluster())
        self.receive(ClusterClosed)
        self._forkserver_messages.clear()
        self._messages.clear()

    def request(self, rank: int, *, incarnation: int = 1, **changes: Any) -> ForkRank:
        fields = {
            "rank": rank,
            "incarnation": incarnation,
            "world_size": 1,
            "local_rank": rank,
            "backend": "gloo",
            "device": "cpu",
            "threads": 1,
            "env": dict(os.environb),
            "cwd": b"/",
            "path": tuple(map(os.fsencode, sys.path)),
            "uplink": self.hub.uplink,
            "downlink": self.hub.open_downlink(rank, incarnation),
            "segments": str(self.folder),
            "logs": str(self.folder / "logs"),
            "cluster": "test",
        }
        return ForkRank(**{**fields, **changes})

    def fork(self, rank: int = 0, *, incarnation: int = 1, **changes: Any) -> int:
        """Fork a rank and wait for its Hello; return its process id."""
        self.stream.send(self.request(rank, incarnation=incarnation, **changes))
        pid = self.receive(RankForked, lambda reported: reported.rank == rank, timeout=60).pid
        while self.listen(RankReady, rank=rank).pid != pid:
            pass  # a rank of the test before, which has said it since
        return int(pid)

    def cell(self, source: str, *, rank: int = 0, cell: int = 1) -> None:
        self.hub.send(rank, RunCell(cell=cell, source=source, number=1))

    def printed(self, source: str, *, rank: int = 0) -> str:
        """Run a cell and return its output."""
        self.cell(source, rank=rank)
        text = b""
        while b"\n" not in text:
            text += self.listen(Text, rank=rank).data
        assert self.listen(Done, rank=rank).status == "ok"
        return text.decode().strip()

    def end(self) -> None:
        self.stream.close()
        self.hub.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SOON)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            pytest.fail("the forkserver outlived its notebook")
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.folder.rmdir()


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def server():
    home = Home()
    home.up = home.receive(ForkserverUp, timeout=120)
    yield home
    home.end()


@pytest.fixture
def home(server):
    server.open()
    yield server
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.close()
    assert not [process for process in family if alive(process.pid)], "CloseCluster answers when nothing is left"


def test_forkserver_reports_its_versions(server):
    torch_version = server.up.torch.split(".")
    assert int(torch_version[0]) >= 2
    assert server.up.python == sys.version.split()[0]


@pytest.mark.parametrize("when", [pytest.param("start", marks=pytest.mark.slow), "idle"])
def test_optimizer_imports_are_preloaded_on_request(when):
    home = Home()
    try:
        home.receive(ForkserverUp, timeout=120)
        home.open()
        home.fork(env={**os.environb, b"RANKBOOK_PRELOAD": when.encode()})  # set after the forkserver was started
        imported = home.printed("import sys\nprint('torch._dynamo' in sys.modules)")
        home.close()
    finally:
        home.end()
    assert imported == str(when == "start")


@pytest.mark.slow
def test_nothing_is_preloaded_while_the_first_ranks_of_a_cluster_are_expected():
    home = Home()
    try:
        home.open()  # before torch is imported, as agents do
        assert not select.select([home.stream], [], [], 1.5)[0]
        home.fork()
        imported = home.printed("import sys\nprint('sympy' in sys.modules)")
        home.close()
    finally:
        home.end()
    assert imported == "False"


def test_no_port_is_open_before_the_group_is_formed(home):
    home.fork()
    processes = [psutil.Process(home.process.pid), *psutil.Process(home.process.pid).children()]
    listening = {
        connection.laddr
        for process in processes
        for connection in process.net_connections()
        if connection.status == "LISTEN"
    }
    assert listening == set()


def test_a_rank_is_a_child_that_leads_a_session_of_its_own(home):
    pid = home.fork()
    assert psutil.Process(pid).ppid() == home.process.pid
    assert os.getsid(pid) == pid
    assert os.getsid(home.process.pid) == home.process.pid != os.getsid(0)


def test_a_rank_is_given_the_notebooks_folder_environment_and_path(home):
    environment = {**os.environb, b"GIVEN": b"by the notebook", b"ODD": b"\xff"}
    environment.pop(b"HOME", None)
    home.fork(cwd=os.fsencode(home.folder), env=environment, path=(b"/somewhere", *map(os.fsencode, sys.path)))
    reported = home.printed(
        "import os, sys\n"
        "print(os.getcwd(), os.environ['GIVEN'], os.environb[b'ODD'], 'HOME' in os.environ, sys.path[0])"
    )
    assert reported == f"{home.folder} by the notebook b'\\xff' False /somewhere"


def test_ranks_do_not_draw_each_others_random_numbers(home):
    for rank in (0, 1):
        home.fork(rank)
    draw = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    first_draws, second_draws = (home.printed(draw, rank=rank).split() for rank in (0, 1))
    assert len(set(first_draws + second_draws)) == 6


def test_a_rank_collects_garbage_but_not_what_the_forkserver_has_imported(home):
    home.fork()
    collected = (
        "import gc, weakref\n"
        "class Cycle: pass\n"
        "cycle = Cycle(); cycle.itself = cycle; reference = weakref.ref(cycle); del cycle\n"
        "kept = [[] for _ in range(100_000)]  # of which every 700th starts a collection\n"
        "print(reference() is None, gc.get_freeze_count() > 100_000)"
    )
    assert home.printed(collected) == "True True"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import os; os._exit(0)", 0),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_end_of_a_rank_is_reported_with_its_code_or_signal(home, source, code):
    pid = home.fork()
    home.cell(source)
    reported = home.receive(RankExited)
    assert (reported.rank, reported.incarnation, reported.pid, reported.code) == (0, 1, pid, code)
    assert not alive(pid)


def test_leave_ends_a_rank_with_code_0(home):
    home.fork()
    home.hub.send(0, Shutdown())
    assert home.receive(RankExited).code == 0


def test_last_output_that_nobody_has_read_come_with_the_exit(home):
    home.fork()
    home.cell(LAST_WORDS)
    reported = home.receive(RankExited)
    assert reported.code == -signal.SIGABRT
    assert reported.stdout == b"to stdout"
    assert reported.stderr == b"to stderr"


def test_a_kill_takes_the_ranks_children_and_their_orphans_along(home):
    home.fork()
    reported = home.printed(
        """
import subprocess
child = subprocess.Popen(["sleep", "600"])
other_group = subprocess.Popen(["sleep", "600"], process_group=0)
command = "sleep 600 > /dev/null & echo $!"  # the shell, its parent, ends at once
orphan = subprocess.check_output(command, shell=True, text=True, process_group=0)
print(child.pid, other_group.pid, orphan)"""
    )
    pids = [int(pid) for pid in reported.split()]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    home.stream.send(KillRank(rank=0, incarnation=1))
    home.receive(RankExited)
    wait_until(lambda: not any(alive(pid) for pid in pids), timeout=10, what="the children's end")


def test_the_death_of_a_rank_takes_its_children_along(home):
    home.fork()
    pid = int(home.printed("import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid)"))
    home.cell("import os; os._exit(1)")
    home.receive(RankExited)
    wait_until(lambda: not alive(pid), timeout=10, what="the child's end")


def test_a_kill_of_an_earlier_process_leaves_the_new_one_alone(home):
    home.fork(incarnation=1)
    home.stream.send(KillRank(rank=0, incarnation=1))
    home.receive(RankExited)
    pid = home.fork(incarnation=2)
    home.stream.send(KillRank(rank=0, incarnation=1))
    assert home.printed("print('still here')") == "still here"
    assert alive(pid)


def test_a_kill_right_after_the_fork_is_not_too_early(home):
    for incarnation in range(1, 21):
        home.stream.send(home.request(0, incarnation=incarnation))
        home.stream.send(KillRank(rank=0, incarnation=incarnation))
        reported = home.receive(RankExited)
        assert (reported.incarnation, reported.code) == (incarnation, -signal.SIGKILL)


def test_a_rank_that_cannot_be_set_up_ends_and_says_why(home):
    home.stream.send(home.request(0, cwd=b"/no/such/folder"))
    reported = home.receive(RankExited)
    assert reported.code == 1
    assert b"/no/such/folder" in reported.stderr


def test_an_interrupt_from_outside_ends_neither_the_forkserver_nor_an_idle_rank(home):
    pid = home.fork()
    os.kill(home.process.pid, signal.SIGINT)
    os.kill(pid, signal.SIGINT)
    assert home.printed("print('still here')") == "still here"
    assert home.process.poll() is None


def test_ranks_share_the_forkservers_memory(home):
    for rank in range(3):
        home.fork(rank)
    ranks = psutil.Process(home.process.pid).children()
    assert len(ranks) == 3
    for rank in ranks:
        memory = rank.memory_full_info()
        assert memory.pss < memory.rss / 2


def test_descriptors_do_not_pile_up(home):
    def cycle(incarnation: int) -> None:
        home.fork(incarnation=incarnation)
        home.cell("import os; os._exit(0)")
        home.receive(RankExited)

    server = psutil.Process(home.process.pid)
    cycle(1)
    before = server.num_fds(), server.num_threads()
    for incarnation in range(2, 7):
        cycle(incarnation)
    wait_until(
        lambda: server.num_fds() <= before[0] and server.num_threads() <= before[1],
        timeout=SOON,
        what=f"(descriptors, threads) as before, {before}",
    )


def test_a_second_cluster_is_served_after_the_first(server):
    server.open()
    server.fork()
    server.close()
    server.open()
    assert server.printed("print('again')") == "again" if server.fork() else False
    server.close()


@pytest.mark.parametrize("when", ["busy", "just forked"])
def test_forkserver_and_ranks_end_after_the_notebook(when, tmp_path):
    home = Home()
    folder = tmp_path / "sockets"
    folder.mkdir()
    home.open(folder)
    if when == "just forked":
        home.stream.send(home.request(0))
        home.stream.send(home.request(1))
    else:
        home.fork()
    if when == "busy":
        home.cell("import subprocess, time; subprocess.Popen(['sleep', '600'])\nwhile True: time.sleep(600)")
        rank = psutil.Process(home.process.pid)
        wait_until(lambda: len(rank.children(recursive=True)) == 2, timeout=SOON, what="the sleep")
    family = psutil.Process(home.process.pid).children(recursive=True)
    home.stream.close()
    wait_until(lambda: home.process.poll() is not None, timeout=10, what="the forkserver's end")
    wait_until(lambda: not any(alive(item.pid) for item in family), timeout=10, what="the ranks' end")
    assert not folder.exists()
    home.end()


@pytest.mark.parametrize("module", ["torch", pytest.param("matplotlib_inline.backend_inline", marks=pytest.mark.full)])
@pytest.mark.slow
def test_when_the_notebook_is_gone_during_an_import_the_forkserver_does_not_end_it_first(tmp_path, module):
    *packages, name = module.split(".")
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    import_started = tmp_path / "begun"
    sleeper = f"import time\nopen({str(import_started)!r}, 'w').close()\ntime.sleep(600)"
    tmp_path.joinpath(*packages, f"{name}.py").write_text(sleeper)
    home = Home(environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])})
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    connection = tmp_path / "connection.json"
    connection.touch()
    home.stream.send(OpenCluster(folders=(str(sockets),), files=(str(connection),)))
    wait_until(import_started.exists, timeout=30, what="the import")
    home.stream.close()
    wait_until(lambda: home.process.poll() is not None, timeout=10, what="the forkserver's end")
    assert not sockets.exists() and not connection.exists()
    home.end()


class Owner:
    """The owner of a forkserver that only collects messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def is_owned(self) -> bool:
        return True


@pytest.mark.parametrize("is_rank", [True, False], ids=["a new rank", "a leftover"])
def test_the_exit_of_a_rank_kills_its_leftovers_and_no_new_rank(home, monkeypatch, is_rank):
    monkeypatch.setattr(os_utils, "kill_session", lambda _: None)
    pipes = [os_utils.output_pipe(), os_utils.output_pipe()]
    reads = (pipes[0][0], pipes[1][0])
    # A rank that was forked a moment ago holds the pipes of the others, until it has closed its copies.
    holder = subprocess.Popen(["sleep", "60"], pass_fds=reads)
    try:
        server = object.__new__(Forkserver)
        server._owner, server._oom_kills, server._exits = Owner(), RecentKills(None), {}
        server._children = {holder.pid: Child(home.request(1), holder.pid, reads, "1")} if is_rank else {}
        server._report_exit(Child(home.request(0), 0, reads, "0"), -9)
        assert [type(message) for message in server._owner.sent] == [RankExited]
        assert (holder.poll() is None) == is_rank
    finally:
        holder.kill()
        holder.wait()
        for _, write in pipes:
            os.close(write)


@pytest.mark.parametrize("missing", ["processes", "descriptors"])
def test_a_rank_that_cannot_be_forked_is_reported_and_the_forkserver_goes_on(monkeypatch, missing):
    number = {"processes": errno.EAGAIN, "descriptors": errno.EMFILE}[missing]
    pipes, make = [], os_utils.output_pipe

    def refuse() -> int:
        raise OSError(number, os.strerror(number))

    def make_pipe() -> tuple[int, int]:
        if missing == "descriptors" and pipes:
            refuse()
        pipes.append(make())
        return pipes[-1]

    monkeypatch.setattr(os_utils, "output_pipe", make_pipe)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(forkserver.gc, "freeze", lambda: None)
    server = object.__new__(Forkserver)
    server._owner, server._exits, server._children, server._token = Owner(), {}, {}, "token"
    before = psutil.Process().num_fds()
    server._fork(request(1, 2, "down"))
    (exited,) = server._owner.sent
    assert (exited.rank, exited.incarnation, exited.pid) == (1, 2, 0)
    assert describe_exit(exited) == f"could not be started: [Errno {number}] {os.strerror(number)}"
    assert server._exits == {1: exited}, "a later owner is told too"
    assert psutil.Process().num_fds() == before and not server._children


def test_messages_that_arrived_during_a_send_are_not_waited_for():
    server = object.__new__(Forkserver)
    server._owner = SimpleNamespace(files=list, stream=SimpleNamespace(has_unread=True))
    server._signal_read, write = os.pipe()
    start = time.monotonic()
    assert server._wait(60.0)
    assert time.monotonic() - start < SOON
    server._owner.stream.has_unread = False
    assert not server._wait(0.01)
    for end in (server._signal_read, write):
        os.close(end)


class FakeCuda:
    """CUDA of a torch build for GPUs, of which torch can use those for which it has kernels, or none."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], error: str = "", crashes: bool = False
    ) -> None:
        self.error = error
        self.is_initialized = False
        self.capabilities = capabilities or ((8, 0),) * 3
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", self.crash if crashes else self.visible)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: not error)
        monkeypatch.setattr(torch.cuda, "init", self.initialize)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: self.capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")

    def visible(self) -> int:
        everything = ",".join(map(str, range(len(self.capabilities))))
        return len(os.environ.get("CUDA_VISIBLE_DEVICES", everything).replace(",", ""))

    @staticmethod
    def crash() -> None:
        os._exit(1)

    def initialize(self) -> None:
        self.is_initialized = True
        if self.error or not self.visible():
            raise RuntimeError(self.error or "No CUDA GPUs are available")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, (3, "", False)),
        (b"1", (1, "", False)),
        (b"", (0, "No CUDA GPUs are available (with CUDA_VISIBLE_DEVICES='')", False)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_devices_are_counted_with_the_environment_of_the_notebook(monkeypatch, value, found):
    FakeCuda(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # at the start of the forkserver
    environment = {name: content for name, content in os.environb.items() if name != b"CUDA_VISIBLE_DEVICES"}
    environment |= {} if value is None else {b"CUDA_VISIBLE_DEVICES": value}
    assert forkserver.count_devices(environment) == found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_devices_that_torch_cannot_use_are_not_counted_and_the_reason_is_told(monkeypatch):
    FakeCuda(monkeypatch, error="The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")
    too_old = "The NVIDIA driver on your system is too old (found version 11040)."
    assert forkserver.count_devices({}) == (0, too_old, True)
    FakeCuda(monkeypatch, crashes=True)
    assert forkserver.count_devices({}) == (0, "the process that counts the CUDA devices has crashed", True)


@pytest.mark.parametrize(("capabilities", "usable"), [([(8, 6), (5, 0)], 1), ([(5, 0), (8, 6)], 0)])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_devices_from_the_first_on_for_which_torch_has_no_kernels_are_not_counted(monkeypatch, capabilities, usable):
    FakeCuda(monkeypatch, *capabilities)
    old = capabilities.index((5, 0))
    device = f"cuda:{old} (Card {old}, compute capability 5.0)"
    problem = f"torch {torch.__version__} has no kernels for {device}, only for sm_75 sm_80 sm_90a"
    advice = "install another build of torch, or choose other devices with CUDA_VISIBLE_DEVICES"
    assert forkserver.count_devices({}) == (usable, f"{problem}; {advice}", True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_one_device_is_counted_of_cards_that_are_divided(monkeypatch):
    """The management library counts all cards, of which a process may use one part."""
    cards = FakeCuda(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if cards.is_initialized else 2)
    assert forkserver.count_devices({}) == (1, "", False)


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 0), ["sm_80"], True),
        ((8, 9), ["sm_75", "sm_80"], True),
        ((7, 5), ["sm_80"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120f"], True),
        ((9, 4), ["gfx942"], True),
        ((5, 0), [], True),
    ],
)
def test_kernels_for_a_device_are_of_its_generation_or_compiled_by_the_driver(capability, architectures, runs):
    assert forkserver.has_kernels(capability, architectures) is runs


@pytest.mark.parametrize("has_device", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_machine_without_a_device_needs_no_explanation_unless_it_is_asked_for(monkeypatch, has_device):
    monkeypatch.setattr(forkserver, "_has_nvidia_device", lambda: has_device)
    without_cuda = f"torch {torch.__version__} is built without CUDA; install a build with CUDA to use a GPU"
    assert forkserver.count_devices({}) == (0, without_cuda, has_device)
    assert forkserver.count_devices({b"CUDA_VISIBLE_DEVICES": b""}) == (0, without_cuda, False)
    FakeCuda(monkeypatch, error="Found no NVIDIA driver on your system.")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert forkserver.count_devices({}) == (0, "Found no NVIDIA driver on your system.", has_device)


def test_a_module_that_fails_to_import_is_not_preloaded(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise ValueError")
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forkserver, "_exit_with_notebook", lambda *_: contextlib.nullcontext())
    server = object.__new__(forkserver.Forkserver)
    server._owner, server._notebook, server._opened = SimpleNamespace(stream=None), 0, []
    server._not_imported = deque(["broken_module", "broken_package.part", "missing_module", "missing.part", "this"])
    monkeypatch.delitem(sys.modules, "this", raising=False)
    while server._not_imported:
        server._preload_next()
    assert "this" in sys.modules
