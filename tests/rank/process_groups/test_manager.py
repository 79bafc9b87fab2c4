"""Messages about failed collectives: which groups of a rank they concern."""

from __future__ import annotations

import inspect
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rankbook.errors import CollectiveAborted
from rankbook.protocol.messages import Abort, RanksLost
from rankbook.rank.process_groups.collective_log import CollectiveLog
from rankbook.rank.process_groups.manager import GroupManager

PAIR, OTHERS, BACKGROUND, WORLD = "pair", "others", "background", "0"


class FakeGroup:
    """Records what is told to a group."""

    def __init__(self, name, ranks, background=False):
        self.log, self.background, self.told = CollectiveLog(name, ranks), background, []

    def set_cause(self, cause, *, mismatch=False):
        self.told.append(("cause", cause, mismatch))

    def abort_with_cause(self, cause, *, mismatch):
        self.told.append(("abort", cause, mismatch))


@pytest.fixture
def manager():
    """The manager of rank 0 of four, without torch's part."""
    manager = object.__new__(GroupManager)
    groups = [FakeGroup(WORLD, (0, 1, 2, 3)), FakeGroup(PAIR, (0, 1)), FakeGroup(BACKGROUND, (0, 1), background=True)]
    manager._members = {group.log.name: SimpleNamespace(group=group) for group in groups}
    manager._creation_log = CollectiveLog("", (0, 1, 2, 3))
    manager._cause, manager._creating, manager._cancel = None, None, threading.Event()
    manager.store, manager._backend = dist.HashStore(), "gloo"
    return manager


def create(manager):
    """Create a group as torch does, which answers with a group of its own."""

    def original(backend, global_ranks_in_group, group_name, device_id=None):
        assert manager._creating[0] == "new"
        return "group", "store"

    return manager.new_group(original, inspect.signature(original).bind("gloo", [0, 1], "new"))


def abort(manager, groups, ranks, **options):
    manager.abort(Abort(groups, "rank 2 failed", options.pop("shut", False), ranks, **options))
    return {name: [kind for kind, *_ in member.group.told] for name, member in manager._members.items()}


@pytest.mark.parametrize("groups", [(OTHERS,), (BACKGROUND,)])
def test_a_failure_in_a_group_of_other_ranks_does_not_keep_this_rank_from_creating_groups(manager, groups):
    assert abort(manager, groups, (1, 2, 3)) == {WORLD: [], PAIR: [], BACKGROUND: []}
    assert create(manager) == ("group", "store")


@pytest.mark.parametrize(
    ("groups", "ranks", "options", "reported"),
    [
        ((PAIR,), (0, 1), {"shut": True}, {WORLD: [], PAIR: ["abort"], BACKGROUND: []}),
        ((PAIR,), (1,), {"mismatch": True}, {WORLD: [], PAIR: ["cause"], BACKGROUND: []}),
        ((), (2,), {}, {WORLD: ["cause"], PAIR: [], BACKGROUND: []}),
        (("",), (2,), {}, {WORLD: [], PAIR: [], BACKGROUND: []}),
    ],
    ids=["own group", "own group, told only", "all groups", "creation"],
)
def test_a_failure_that_concerns_this_rank_keeps_it_from_creating_groups(manager, groups, ranks, options, reported):
    assert abort(manager, groups, ranks, **options) == reported
    with pytest.raises(CollectiveAborted, match="rank 2 failed, so this rank cannot begin new_group"):
        create(manager)


def test_the_exits_of_ranks_are_recorded_in_all_of_their_groups_each_with_its_own_reason(manager):
    manager.record_losses(RanksLost(((2, "rank 2 failed"), (1, "rank 1 was killed"))))
    told = {name: member.group.told for name, member in manager._members.items()}
    assert told == {
        WORLD: [("cause", "rank 2 failed", False)],
        PAIR: [("cause", "rank 1 was killed", False)],
        BACKGROUND: [("cause", "rank 1 was killed", False)],
    }
    with pytest.raises(CollectiveAborted, match="rank 2 failed, so this rank cannot begin new_group"):
        create(manager)


def test_only_a_message_about_the_creation_ends_the_wait_for_other_ranks(manager):
    manager._creating = ("new", {"cpu": "gloo"})
    abort(manager, (OTHERS,), (2, 3), shut=True)
    abort(manager, (PAIR,), (0, 1), shut=True)
    assert not manager._cancel.is_set()
    abort(manager, ("",), (2,), shut=True)
    assert manager._cancel.is_set()


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_process_whose_first_attempt_to_join_has_failed_begins_from_scratch(manager, monkeypatch, has_joined):
    class EndOfTest(Exception):
        pass

    def agree():
        raise EndOfTest

    left = []
    monkeypatch.setattr(dist, "is_initialized", lambda: not left)
    manager._members.clear()
    manager._has_joined, manager._agree_on_groups, manager.leave = has_joined, agree, lambda: left.append(True)
    with pytest.raises(EndOfTest):
        manager.join(2)
    assert left == ([] if has_joined else [True])


def test_the_connections_of_nccl_are_not_among_those_that_an_abort_shuts_down(manager, monkeypatch):
    """NCCL has an abort of its own, and would report an error first."""
    opened: dict[str, socket.socket] = {}

    def connect(name):
        listener = socket.create_server(("127.0.0.1", 0))
        opened[name] = socket.create_connection(listener.getsockname())
        listener.close()

    backend = SimpleNamespace(eager_connect_single_device=lambda _device: connect("nccl"))
    monkeypatch.setattr(manager, "_create_inner_group", lambda *_: connect("gloo"), raising=False)
    monkeypatch.setattr(manager, "_device_backends", lambda *_: [backend], raising=False)
    manager.device = None
    sockets = {}
    manager._create_connected_group(sockets, None, WORLD, (0, 1), None)
    assert opened["gloo"].fileno() in sockets
    assert opened["nccl"].fileno() not in sockets
    for connection in opened.values():
        connection.close()


def test_an_error_of_nccl_while_a_group_is_connected_says_its_reason_first(manager, monkeypatch):
    def fail(_device):
        raise dist.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.27.3\nLast error:\n"
            "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
        )

    monkeypatch.setattr(manager, "_create_inner_group", lambda *_: "group", raising=False)
    backend = SimpleNamespace(eager_connect_single_device=fail)
    monkeypatch.setattr(manager, "_device_backends", lambda *_: [backend], raising=False)
    manager.device = None
    with pytest.raises(dist.DistBackendError, match=r"^Error while creating shared memory.*/dev/shm is full"):
        manager._create_connected_group({}, None, WORLD, (0, 1), None)


def test_nccl_gets_the_options_with_which_the_user_has_created_the_group(manager, monkeypatch):
    class Options:
        def __init__(self):
            self.is_high_priority_stream, self.config = False, "default"

    class Created(Exception):
        pass

    class FakeNCCL:
        def __init__(self, _store, _rank, _size, options):
            raise Created(options)

    FakeNCCL.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    manager.device, manager._timeouts_suspended, store = torch.device("cpu"), False, dist.HashStore()
    create = manager._create_inner_group
    monkeypatch.setattr(manager, "_connect", lambda *arguments: create(store, *arguments[:3]), raising=False)

    def options_of(requested):
        manager._creating = ("new", {"cuda": "nccl"})
        arguments = SimpleNamespace(
            global_ranks_in_group=[0], group_size=1, group_rank=0, timeout=timedelta(seconds=5), store=store
        )
        with pytest.raises(Created) as caught:
            manager._create_group(arguments, requested)
        return caught.value.args[0]

    requested = Options()
    requested.is_high_priority_stream, requested.config = True, "few SMs"
    given = options_of(requested)
    assert given is not requested
    assert (given.is_high_priority_stream, given.config, given._timeout) == (True, "few SMs", timedelta(seconds=5))
    assert not options_of(None).is_high_priority_stream
