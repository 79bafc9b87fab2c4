"""Test the agent's handling of messages, without processes and sockets."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from rankbook import agent as agent_module
from rankbook.agent import Agent
from rankbook.protocol.forkserver import (
    ForkRank,
    FromRanks,
    HostFailed,
    HostNote,
    ModuleFiles,
    ProcessState,
    RankExited,
    decode_from_agent,
)
from rankbook.protocol.messages import Display, Done, FromRank, Text, decode_from_rank, encode, encode_from_rank
from rankbook.transport import Sender
from tests.coordinator.fork_requests import request


class Link:
    """A link whose peer acknowledges only on request."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.waiting = 0

    def pending(self, _stream: int) -> int:
        return self.waiting

    def send(self, _stream: int, frames: list[bytes]) -> None:
        self.sent.append([bytes(frame) for frame in frames])
        self.waiting += sum(map(len, frames))

    def acknowledge(self) -> None:
        self.waiting = 0

    def take(self) -> tuple[list[object], list[str]]:
        """Return the messages of ranks and the notes that were sent since the last call."""
        messages: list[object] = []
        notes: list[str] = []
        for first, *frames in self.sent:
            match decode_from_agent(first):
                case FromRanks():
                    messages += map(decode_from_rank, frames)
                case HostNote(text):
                    notes.append(text)
        self.sent.clear()
        return messages, notes


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def from_ranks() -> deque[tuple[Sender, memoryview, list[memoryview]]]:
    return deque()


@pytest.fixture
def agent(link, from_ranks) -> Agent:
    made = object.__new__(Agent)
    made._link = link  # type: ignore[assignment]
    made._hub = SimpleNamespace(receive_encoded=lambda: from_ranks.popleft() if from_ranks else None)  # type: ignore[assignment]
    made._asked = {}
    made._drops_displays = False
    return made


def test_displays_are_dropped_while_too_much_waits_for_the_coordinator_and_nothing_else_is(
    agent, link, from_ranks, monkeypatch
):
    monkeypatch.setattr(agent_module, "_MOST_WAITING", 10_000)

    def relay(*messages: FromRank) -> None:
        from_ranks.extend((Sender(3, 1), memoryview(encode_from_rank(message)), []) for message in messages)
        while not agent._relay_up():
            pass

    display = Display(1, "display", {"text/plain": "x" * 1000}, {})
    relay(*[display] * 1000)
    messages, notes = link.take()
    assert link.waiting <= 12_000
    assert messages == [display] * len(messages) and 8 <= len(messages) <= 9
    assert notes == ["displays of rank 3 and perhaps of others were dropped: 10 kB of output wait for the notebook"]
    relay(display, Text(1, "stdout", b"y" * 1000), Done(1, "ok", 0.1))
    messages, notes = link.take()
    assert [type(message) for message in messages] == [Text, Done] and not notes, "reported once"
    link.acknowledge()
    relay(*[display] * 5)
    assert link.take() == ([display] * 5, [])
    relay(*[display] * 100)
    assert len(link.take()[1]) == 1, "and again in the next flood"


@pytest.mark.parametrize("size", [1, 100_000])
def test_ranks_that_send_without_end_hold_up_neither_the_link_nor_the_exit_of_a_rank(agent, link, from_ranks, size):
    agent._segments = SimpleNamespace(clear=lambda *_, **__: None)
    agent._receiver = SimpleNamespace(names=set())
    agent._pids = {}
    exited = RankExited(rank=3, incarnation=1, pid=os.getpid(), code=-9, memory_kills=0, stdout=b"", stderr=b"")
    flood = (Sender(2, 1), memoryview(encode_from_rank(Text(1, "stdout", b"x" * size))), [])
    last = (Sender(3, 1), memoryview(encode_from_rank(Text(1, "stdout", b"last"))), [])

    def relayed() -> list[str]:
        first = [decode_from_agent(first) for first, *_ in link.sent]
        ranks = [sender.rank for message in first if isinstance(message, FromRanks) for sender in message.senders]
        link.sent.clear()
        assert len(ranks) <= 500 and len(ranks) * size <= 2_200_000
        return ["last"] * (3 in ranks) + ["exit"] * any(isinstance(message, RankExited) for message in first)

    from_ranks.extend([flood] * 600 + [last])
    agent._relay_up()
    assert relayed() == [] and from_ranks
    # It comes after the last messages of its rank.
    agent._exits = [(time.monotonic(), exited)]
    seen: list[str] = []
    while not seen:
        agent._send_exits()
        seen = relayed()
    assert seen == ["last", "exit"] and not from_ranks and not agent._exits
    # At last it does not wait for an end of the others.
    agent._exits = [(time.monotonic() - 2.0, exited)]
    from_ranks.extend([flood] * 600)
    agent._send_exits()
    assert relayed() == ["exit"] and from_ranks


@pytest.fixture
def ending(agent) -> Agent:
    """Return the agent as it is while its forkserver and its parent live and the notebook is reached."""
    agent._parent, agent._ended, agent._outlives_terminal = os.getppid(), "", False
    agent._unreachable_since, agent._was_accepted = None, True
    agent._connection = SimpleNamespace(address="10.0.0.1", port=7777, lost_after=60.0)
    agent._refusals = SimpleNamespace(reset=lambda: None, look=lambda _: 0.0)
    agent._launcher = SimpleNamespace(alive=True)
    agent._check_end()
    assert not agent._ended
    return agent


def test_the_cause_of_the_forkservers_end_is_told(ending, link):
    told = ["ImportError: libcudart.so.12"]
    ending._launcher = SimpleNamespace(alive=False, exit_message=told.pop)
    ending._check_end()
    ending._check_end()
    reason = "the forkserver has exited: ImportError: libcudart.so.12"
    assert ending._ended == reason
    assert [decode_from_agent(first) for first, *_ in link.sent] == [HostFailed(reason)]


@pytest.mark.parametrize("accepted", [True, False])
def test_an_agent_that_does_not_reach_the_notebook_names_its_address(ending, accepted):
    ending._was_accepted, ending._unreachable_since = accepted, time.monotonic() - 100.0
    ending._check_end()
    advice = "" if accepted else "; choose what hosts can reach with --address and --port"
    assert ending._ended == f"the notebook was not reached at 10.0.0.1:7777 for 100 s{advice}"


@pytest.fixture
def forked(agent) -> list[ForkRank]:
    """Let the agent fork ranks, and return the requests for its forkserver."""
    requests: list[ForkRank] = []
    agent._interface, agent._pids, agent._held = "eth0", {}, []
    agent._hub = SimpleNamespace(open_downlink=lambda *_: "down", uplink="up")
    agent._launcher = SimpleNamespace(fork=requests.append)
    agent._folders = SimpleNamespace(segments="/segments", logs="/logs")
    agent._requests = SimpleNamespace(address="/store", renew=lambda: None)
    agent._modules = SimpleNamespace(own_folder=None, address="/modules", renew=lambda: None)
    return requests


@pytest.mark.parametrize(
    ("of_notebook", "of_host", "threads"), [(None, None, 2), ("3", None, 3), (None, "5", 5), ("3", "5", 3)]
)
def test_the_threads_of_a_rank_are_those_of_its_environment(agent, forked, monkeypatch, of_notebook, of_host, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_host is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", of_host)
    given = {} if of_notebook is None else {b"OMP_NUM_THREADS": of_notebook.encode()}
    agent._fork(msgspec.structs.replace(request(1, 1, ""), threads=2, env=given))
    assert [(rank.threads, rank.env[b"OMP_NUM_THREADS"]) for rank in forked] == [(threads, str(threads).encode())]


@pytest.mark.parametrize("closed", [True, False])
def test_a_rank_starts_elsewhere_if_the_folder_cannot_be_entered(agent, forked, link, monkeypatch, tmp_path, closed):
    monkeypatch.chdir(tmp_path)
    closed_folder = tmp_path / "closed"
    closed_folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) != str(closed_folder))
    # For a name that is too long, as for one below a closed folder, `Path` raises an error.
    folder = closed_folder if closed else tmp_path / ("x" * 300)
    agent._fork(msgspec.structs.replace(request(1, 1, ""), cwd=os.fsencode(folder), path=(os.fsencode(folder),)))
    assert [rank.cwd for rank in forked] == [os.fsencode(tmp_path)]
    assert (os.fsencode(folder) in forked[0].path) == closed
    text = f"{folder} does not exist on this host or cannot be entered: rank 1 starts in {tmp_path}"
    assert link.take()[1] == [text]


@pytest.fixture
def sighup() -> Iterator[None]:
    """Restore the handler of SIGHUP."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("source", "handler", "outlives"),
    [
        ("/f", signal.SIG_IGN, True),
        ("/f", signal.SIG_DFL, False),
        ("-", signal.SIG_IGN, False),
        (None, signal.SIG_IGN, False),
    ],
)
def test_an_agent_that_was_started_with_nohup_outlives_its_terminal(ending, sighup, source, handler, outlives):
    signal.signal(signal.SIGHUP, handler)
    ending._outlives_terminal = agent_module._outlives_terminal(source)
    ending._signal_write = -1
    with ending._signals():
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == outlives
    assert signal.getsignal(signal.SIGHUP) is handler
    ending._parent = -1
    ending._check_end()
    assert ending._ended == ("" if outlives else "its parent process has ended")


def test_the_process_of_a_rank_that_has_ended_is_not_looked_at_any_more(agent, link):
    agent._segments = SimpleNamespace(clear=lambda *_, **__: None)
    agent._receiver = SimpleNamespace(names=set())
    agent._exits = []
    agent._pids = {2: (1, os.getpid()), 3: (1, os.getpid())}

    def sent_after_looking() -> list[tuple[type, int]]:
        agent._asked = dict.fromkeys((2, 3), 0.0)
        agent._send_exits()
        agent._look_at_ranks()
        messages = [decode_from_agent(first) for first, *_ in link.sent]
        link.sent.clear()
        return [(type(message), message.rank) for message in messages]

    assert sent_after_looking() == [(ProcessState, 2), (ProcessState, 3)]
    exited = RankExited(rank=3, incarnation=1, pid=os.getpid(), code=-9, memory_kills=0, stdout=b"", stderr=b"")
    agent._exits.append((0.0, exited))
    assert sent_after_looking() == [(RankExited, 3), (ProcessState, 2)]
    # A request that was on the way when the rank ended: no process is left that could be described.
    assert sent_after_looking() == [(ProcessState, 2)] and set(agent._asked) == {2}


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "4"}, "4"),
        ({"OMP_NUM_THREADS": "1"}, "1"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
    ],
)
def test_the_number_of_threads_that_torchrun_sets_is_not_taken_for_the_users(environment, kept):
    agent_module._forget_torchrun(environment, is_task=True)
    assert environment.get("OMP_NUM_THREADS") == kept


def test_what_torchrun_sets_for_its_workers_does_not_reach_the_ranks():
    given = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", "TORCH_NCCL_BLOCKING_WAIT": "0", "PATH": "/bin"}
    by_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    environment = given | by_torchrun | {"TORCHELASTIC_ERROR_FILE": "/tmp/error.json"}
    agent_module._forget_torchrun(environment, is_task=False)
    assert environment == given
    # Without torchrun, it is the user's choice.
    by_user = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    agent_module._forget_torchrun(by_user, is_task=True)
    assert by_user == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_a_module_that_cannot_be_written_costs_a_note_and_the_rank_is_answered(agent, link):
    refused: list[int] = []

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    agent._modules = SimpleNamespace(write=write, refuse=refused.append)
    agent._handle_message([encode(ModuleFiles(7, ("helper.py",))), b"x = 1"])
    assert refused == [7]
    assert link.take()[1] == [
        "modules of the notebook's folder could not be written: [Errno 28] No space left on device"
    ]
