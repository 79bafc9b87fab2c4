"""Test the notebook's default cluster."""

from __future__ import annotations

import threading

import pytest

from rankbook.coordinator import default_cluster
from rankbook.errors import InvalidArgument, NoClusterError
from rankbook.launch.registry import ClusterRecord, DetachedCluster
from rankbook.magics import launchers


class FakeCluster:
    """The part of `Cluster` that `default_cluster` uses; its construction takes some time."""

    instances: list[FakeCluster]

    def __init__(self, n, *, backend, device, timeout, keep, hosts=None):  # noqa: ARG002 - as the real one
        threading.Event().wait(0.05)
        self.world_size = n or 2
        self.backend = backend or "gloo"
        self.device = device or "cuda"
        self.keep = keep
        self.timeout = timeout
        self.stopped, self.ended_because = False, ""
        self.instances.append(self)

    def stop(self):
        self.stopped = True


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    FakeCluster.instances = []
    monkeypatch.setattr(default_cluster, "Cluster", FakeCluster)
    monkeypatch.setattr(default_cluster, "_current", None)
    return FakeCluster


def test_two_threads_that_start_at_once_get_one_cluster(fake):
    clusters = []
    threads = [threading.Thread(target=lambda: clusters.append(default_cluster.start())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.instances) == 1
    assert clusters == fake.instances * 4


def test_a_cluster_of_another_size_is_refused_until_the_first_is_stopped():
    first = default_cluster.start(2)
    assert default_cluster.start(2, backend="gloo") is first
    stop = "are already running; stop them first with %distributed stop"
    with pytest.raises(InvalidArgument, match=f"{stop}, or change their number with %distributed resize 4$"):
        default_cluster.start(4)
    with pytest.raises(InvalidArgument, match=f"{stop}$"):
        default_cluster.start(2, backend="nccl")
    assert default_cluster.stop()
    assert default_cluster.start(4) is not first


@pytest.mark.parametrize(
    ("options", "timeout"), [({}, 180), ({"launcher": "env"}, 600), ({"launcher": "env", "timeout": 5}, 5)]
)
def test_the_start_of_ranks_on_other_hosts_may_take_longer(options, timeout):
    assert default_cluster.start(2, **options).timeout == timeout


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"nodes": 2}, "nodes"),
        ({"address": "127.0.0.1", "port": 7777, "home": 1}, "address, port and home"),
        ({"lost_after": 5.0, "env": ["SECRET"]}, "lost_after and env"),
        ({"sync_code": False, "launcher_args": ["--hosts", "a"]}, "sync_code and launcher_args"),
    ],
)
def test_options_for_other_hosts_are_refused_without_a_launcher(fake, options, names):
    with pytest.raises(InvalidArgument, match=f"^{names} can be given only with a launcher"):
        default_cluster.start(2, **options)
    assert fake.instances == []


def test_a_cluster_on_other_devices_is_refused_until_the_first_is_stopped():
    first = default_cluster.start(2, device="cpu")
    assert default_cluster.start(device="cpu") is default_cluster.start() is first
    refusal = "2 ranks are already running on the CPU; stop them first with %distributed stop"
    with pytest.raises(InvalidArgument, match=f"^{refusal}$"):
        default_cluster.start(device="cuda")
    with pytest.raises(InvalidArgument, match="invalid device='gpu': expected 'cpu', 'cuda', or None"):
        default_cluster.start(device="gpu")


@pytest.mark.parametrize(("device", "stays"), [(None, True), ("cuda", True), ("cpu", False)])
def test_ranks_that_were_started_in_the_background_give_way_to_those_on_another_device(device, stays):
    default_cluster.prestart_ranks()
    started = default_cluster.start(device=device)
    unused = FakeCluster.instances[0]
    assert (started is unused) is stays and unused.stopped is not stays
    assert started.device == (device or "cuda")


def test_unused_ranks_are_started_again_if_other_packages_are_installed_and_others_are_left(monkeypatch):
    class Packages:
        changed = False

    forkservers: list[str] = []
    monkeypatch.setattr(default_cluster.local, "InstalledPackages", Packages)
    monkeypatch.setattr(default_cluster.local, "prestart_forkserver", lambda: forkservers.append("renewed"))
    default_cluster.prestart_ranks()
    assert default_cluster.renew_unused()
    (unused,) = FakeCluster.instances
    assert not unused.stopped, "nothing has changed"
    Packages.changed = True
    assert default_cluster.renew_unused()
    assert unused.stopped
    used = default_cluster.start()
    assert used is FakeCluster.instances[1]
    assert not default_cluster.renew_unused(), "the ranks keep what they have imported"
    assert not used.stopped and not forkservers
    default_cluster.stop()
    assert default_cluster.renew_unused() and forkservers == ["renewed"]


@pytest.mark.parametrize("go_on", [default_cluster.start, default_cluster.stop])
def test_ranks_that_stopped_by_themselves_are_not_replaced_without_being_asked(fake, go_on):
    default_cluster.check_not_ended()
    cluster = default_cluster.start(2)
    cluster.ended_because = "the time of their hosts has ended"
    default_cluster.check_not_ended()
    cluster.stop()
    for check in (
        default_cluster.check_not_ended,
        lambda: launchers._ranks_of_one_host(2),
        lambda: launchers._ranks_of_nodes(2, 1, "127.0.0.1", "29500"),
        default_cluster.check_not_ended,
    ):
        with pytest.raises(NoClusterError, match="have stopped, because the time of their hosts has ended; start"):
            check()
    assert fake.instances == [cluster]
    go_on()
    default_cluster.check_not_ended()


class Kept(ClusterRecord):
    """The record of kept ranks, whose notebook runs if `notebook` is 1."""

    def __init__(self, key, session, notebook=0):
        for name, value in {"key": key, "session": session, "notebook": notebook}.items():
            object.__setattr__(self, name, value)

    @property
    def owned(self):
        return self.notebook == 1

    def describe(self):
        return f"{self.key}: described"


def test_ranks_that_this_notebook_has_kept_are_named_before_others_are_kept(monkeypatch):
    kept = [Kept("1-1", "a.ipynb"), Kept("1-2", "b.ipynb"), Kept("1-3", "", 0), Kept("1-4", "a.ipynb", 1)]
    monkeypatch.setattr(default_cluster, "find_detached", lambda: DetachedCluster(tuple(kept)))
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")
    default_cluster.prestart_ranks()
    one = (
        "kept already; connect to them with %distributed attach 1-1, or end them with %distributed stop 1-1:\n1-1: desc"
    )
    with pytest.raises(InvalidArgument, match=one):
        default_cluster.start(2, keep=True)
    assert default_cluster._prestarted is not None, "`attach` may replace the ranks that start in the background"
    started = default_cluster.start(2)
    assert [started] == FakeCluster.instances and not started.stopped
    default_cluster.stop()
    kept[0] = Kept("1-5", "b.ipynb")
    started = default_cluster.start(2, keep=True)
    kept[0] = Kept("1-1", "a.ipynb")
    assert default_cluster.start(2, keep=True) is started, "it runs already"
    default_cluster.stop()
    monkeypatch.setenv("JPY_SESSION_NAME", "")
    default_cluster.start(2, keep=True)
    default_cluster.stop()
    kept += [Kept("1-6", "a.ipynb")]
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")
    with pytest.raises(InvalidArgument, match=r"%distributed stop KEY:\n1-1: described\n1-6: described$"):
        default_cluster.start(2, keep=60)
