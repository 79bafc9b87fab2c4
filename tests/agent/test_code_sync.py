"""Test modules of the notebook's folder on ranks of hosts that do not see it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from rankbook import CellError, Cluster
from rankbook.agent import ModuleCopies
from rankbook.launch import code_sync
from rankbook.launch.code_sync import MOST_FILE, ModuleFolder, SentModules, digest
from rankbook.launch.hosts import Hosts
from rankbook.output.merger import Emit, Stream
from rankbook.rank import main
from rankbook.transport.framed_socket import modules_folder
from tests.agent.agents import cluster_on_hosts
from tests.conftest import cluster_folders, wait_until


class Seen:
    """A sink that keeps what a cell shows."""

    def __init__(self) -> None:
        self.items: list[Emit] = []

    def emit(self, items: Sequence[Emit]) -> None:
        self.items += items

    def text(self) -> str:
        return "".join(item.text for item in tuple(self.items) if isinstance(item, Stream))


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path, lines: list[str]) -> ModuleFolder:
    (tmp_path / "book" / "model" / "parts").mkdir(parents=True)
    (tmp_path / "book" / "model" / "__init__.py").write_text("import model.layers")
    (tmp_path / "book" / "model" / "layers.py").write_text("size = 1")
    (tmp_path / "book" / "helper.py").write_text("x = 1")
    (tmp_path / "outside.py").write_text("secret = 1")
    (tmp_path / "book" / "linked.py").symlink_to(tmp_path / "outside.py")
    return ModuleFolder(tmp_path / "book", lines.append)


def test_a_module_is_sent_once_and_again_when_it_has_changed(folder, lines, tmp_path):
    sent = SentModules()
    assert folder.find("helper", sent, {}, host="node1") == {"helper.py": b"x = 1"}
    assert folder.find("helper", sent, {}) == {} and folder.changed(sent) == {}
    (tmp_path / "book" / "helper.py").write_text("x = 22")
    assert folder.changed(sent, host="node1") == {"helper.py": b"x = 22"}
    assert folder.changed(sent) == {}
    assert lines == [
        "sent helper.py (5 B) to node1 and other hosts that import it",
        "sent helper.py (6 B) to node1 and other hosts that import it",
    ]
    assert folder.find("helper", SentModules(), {}, host="node2") == {"helper.py": b"x = 22"}
    assert len(lines) == 2, "one line, however many hosts there are"


def test_a_package_is_sent_module_by_module(folder):
    sent = SentModules()
    assert list(folder.find("model", sent, {})) == ["model/__init__.py"]
    assert list(folder.find("model.layers", sent, {})) == ["model/layers.py"]
    assert folder.find("model.parts", sent, {}) == {"model/parts/": b""}, "a namespace package"
    assert folder.find("model.missing", sent, {}) == {}


def test_what_the_host_has_already_is_not_sent(folder, lines, tmp_path):
    sent = SentModules()
    assert folder.find("helper", sent, {"helper.py": digest(b"x = 1")}) == {}
    (tmp_path / "book" / "helper.py").write_text("x = 22")
    assert folder.changed(sent) == {"helper.py": b"x = 22"}, "the host decides whether it sees the same folder"
    assert lines == []
    assert folder.find("helper", SentModules(), {"helper.py": digest(b"x = 0")}) == {"helper.py": b"x = 22"}


def test_a_package_that_became_a_module_is_removed_from_the_hosts(folder, tmp_path):
    sent = SentModules()
    folder.find("model", sent, {})
    shutil.rmtree(tmp_path / "book" / "model")
    (tmp_path / "book" / "model.py").write_text("size = 2")
    assert folder.changed(sent) == {} == sent.sizes
    assert sent.removed == ["model/__init__.py"]
    assert folder.find("model", sent, {}) == {"model.py": b"size = 2"}
    sent.removed.clear()
    folder.changed(sent)
    assert sent.removed == []
    (tmp_path / "book" / "model").mkdir()
    (tmp_path / "book" / "model" / "__init__.py").write_text("size = 3")
    assert folder.changed(sent) == {"model/__init__.py": b"size = 3"}


@pytest.mark.parametrize("name", ["linked", "..outside", "../outside", "model/layers", "", ".", "helper\0", "a b"])
def test_nothing_outside_the_folder_is_sent(folder, name):
    assert folder.find(name, SentModules(), {}) == {}


def test_a_link_that_leads_to_itself_is_no_module(folder, tmp_path):
    sent = SentModules()
    assert list(folder.find("helper", sent, {})) == ["helper.py"]
    for name in ("loop", "loop.py", "helper.py"):
        (tmp_path / "book" / name).unlink(missing_ok=True)
        (tmp_path / "book" / name).symlink_to(tmp_path / "book" / name)
    assert folder.find("loop", sent, {}) == {} == folder.changed(sent)


def test_a_file_that_is_too_large_is_named_once_and_not_sent(folder, lines, tmp_path):
    (tmp_path / "book" / "large.py").write_bytes(b"#" * (MOST_FILE + 1))
    assert folder.find("large", SentModules(), {}, host="a") == {} == folder.find("large", SentModules(), {}, host="b")
    assert lines == ["large.py (1.05 MB) was not sent: 1.05 MB is the limit; install it on the hosts"]


@pytest.mark.parametrize("has_same", [True, False], ids=["same", "other"])
def test_a_large_file_that_the_host_has_already_is_not_reported(folder, lines, tmp_path, has_same):
    content = b"#" * (MOST_FILE + 1)
    (tmp_path / "book" / "large.py").write_bytes(content)
    known = {"large.py": code_sync.digest(content if has_same else b"# older")}
    assert folder.find("large", SentModules(), known, host="a") == {}
    assert bool(lines) != has_same


def test_the_limit_of_a_host_counts_the_files_that_it_has_and_not_how_often_they_were_sent(
    folder, lines, tmp_path, monkeypatch
):
    monkeypatch.setattr(code_sync, "MOST_HOST", 1000)
    sent = SentModules()
    folder.find("helper", sent, {}, host="node1")
    for size in range(300, 310):
        (tmp_path / "book" / "helper.py").write_bytes(b"#" * size)
        assert list(folder.changed(sent, host="node1")) == ["helper.py"]
    for name, is_sent in (("first", True), ("second", False)):
        (tmp_path / "book" / f"{name}.py").write_bytes(b"#" * 500)
        assert bool(folder.find(name, sent, {}, host="node1")) == is_sent
    assert lines[-1] == "second.py (500 B) was not sent: node1 has the most it may get; install it on the hosts"


def test_modules_are_removed_and_what_could_not_be_written_is_written_later(short_path, monkeypatch):
    monkeypatch.chdir(short_path)
    folder = short_path / "cluster"
    folder.mkdir(mode=0o700)
    copies = ModuleCopies(folder)
    copies.write(0, {"model/__init__.py": b"1", "names/": b"", "kept.py": b"2"})
    below = modules_folder(copies.address)
    copies.write(0, {"old/deep/part.py": b"1", "old/__init__.py": b"1", "old/other.py": b""})
    (below / "old" / "__pycache__").mkdir()
    copies.write(0, {}, ("old/__init__.py", "old/deep/part.py"))
    assert [file.name for file in (below / "old").iterdir() if file.suffix] == ["other.py"]
    assert not (below / "old" / "deep").exists()
    copies.write(0, {}, ("old/other.py",))
    assert not (below / "old").exists(), "it would be imported as an empty package"
    copies.write(0, {"model.py": b"3"}, ("model/__init__.py", "names/", "never.py"))
    assert {file.name for file in below.rglob("*.py")} == {"model.py", "kept.py"} and not (below / "names").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            copies.write(7, {"late.py": b"4"})
        copies.refuse(7)
    copies.write(0, {"other.py": b"5"})
    copies.close()
    assert (below / "late.py").read_bytes() == b"4"


def test_a_folder_that_was_removed_is_private_again_when_a_module_is_written(short_path, monkeypatch):
    monkeypatch.chdir(short_path)
    folder = short_path / "cluster"
    folder.mkdir(mode=0o700)
    copies = ModuleCopies(folder)
    copies.write(0, {"first.py": b"1", "names/": b""})
    shutil.rmtree(folder)
    copies.write(0, {"first.py": b"3", "second.py": b"2"})
    copies.close()
    below = modules_folder(copies.address)
    assert [oct(each.stat().st_mode & 0o777) for each in (folder, below)] == ["0o700", "0o700"]
    assert {file.name: file.read_bytes() for file in below.glob("*.py")} == {"first.py": b"3", "second.py": b"2"}
    assert (below / "names").is_dir() and Path(copies.address).exists()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """Return two ranks of another host, and the notebook's folder, which that host does not see."""
    folder, book, other = (tmp_path_factory.mktemp(name) for name in ("hosts", "book", "other"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(book)
        # On this machine the folder exists for the agent too.
        fork = Hosts.fork
        patch.setattr(Hosts, "fork", lambda self, request: fork(self, replace(request, cwd=b"/nonexistent")))
        with cluster_on_hosts(folder, patch, 2, [2], agents_in=other) as (cluster, _):
            yield cluster, book


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_import_modules_of_the_notebooks_folder_and_see_changes(shared, tmp_path):
    cluster, book = shared
    (book / "wares.py").write_text("def price(x):\n    return 2 * x\n")
    (book / "shop").mkdir()
    (book / "shop" / "__init__.py").write_text("from shop.till import total\n")
    (book / "shop" / "till.py").write_text("def total(values):\n    return sum(values)\n")
    cluster.run("%load_ext autoreload\n%autoreload 2")
    result = cluster.run("import os, wares, shop\n(wares.price(rank), shop.total([1, 2]), os.path.exists('wares.py'))")
    assert [result.text(rank) for rank in (0, 1)] == ["(0, 3, False)", "(2, 3, False)"]
    (book / "wares.py").write_text("def price(x):\n    return 100 + x\n")
    (book / "shop" / "till.py").write_text("def total(values):\n    return max(values)\n")
    seen = Seen()
    code = f"""import time
while not os.path.exists({str(tmp_path / "seen")!r}): time.sleep(0.01)
wares.price(rank), shop.till.total([1, 2])"""
    cell = cluster.submit_code(code, number=0, ranks=None, sink=seen)
    # The cell that caused it says so, not the one after it.
    wait_until(lambda: "sent wares.py" in seen.text(), timeout=20, what="the cell names the module")
    (tmp_path / "seen").touch()
    cluster.wait(cell, timeout=30)
    assert cell.result is not None
    assert [cell.result.text(rank) for rank in (0, 1)] == ["(100, 2)", "(101, 2)"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_module_that_the_notebook_does_not_have_either_is_the_usual_error(shared):
    cluster, book = shared
    with pytest.raises(CellError, match="No module named 'no_such_module'"):
        cluster.run("import no_such_module")
    (book / "no_such_module.py").write_text("value = 3\n")
    assert cluster.run("import no_such_module; no_such_module.value").text(1) == "3", "it was written meanwhile"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_is_sent_if_it_is_switched_off(shared, tmp_path, monkeypatch):
    _, book = shared
    (book / "unsent.py").write_text("value = 3\n")
    other = tmp_path / "other"
    other.mkdir()
    options = {"agents_in": other, "sync_code": False}
    with cluster_on_hosts(tmp_path, monkeypatch, 1, [1], **options) as (cluster, _):
        with pytest.raises(CellError, match="No module named 'unsent'"):
            cluster.run("import unsent")
        assert cluster.run("1 + 1").text(0) == "2"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_of_a_rank_import_what_it_has_imported(shared):
    cluster, book = shared
    (book / "rows.py").write_text(
        "import torch\nclass Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n    def __getitem__(self, i): return i\n"
    )
    code = (
        "import rows\nloader = torch.utils.data.DataLoader(rows.Rows(), num_workers=1, multiprocessing_context={!r})\n"
        "[int(row) for row in loader]"
    )
    for method in ("fork", "spawn"):
        assert cluster.run(code.format(method), ranks=[1], timeout=120).text(1) == "[0, 1, 2, 3]"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_healed_rank_imports_them_too(shared):
    cluster, book = shared
    (book / "late.py").write_text("value = 5\n")
    pid = cluster.status()[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert cluster.heal() is not None
    assert cluster.run("import late; late.value").text(1) == "5"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_modules_that_were_sent_are_there_again_after_a_removal_of_the_hosts_folder(shared):
    cluster, book = shared
    (book / "early.py").write_text("value = 6\n")
    assert cluster.run("import early; early.value").text(0) == "6"
    (host,) = cluster._processes.hosts._hosts.values()
    for folder in cluster_folders(int(host.description.pid)):
        shutil.rmtree(folder)
    pid = cluster.status()[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.status()[1].state == "dead", timeout=20, what="the rank has ended")
    assert cluster.heal() is not None
    (book / "later.py").write_text("value = 7\n")
    assert cluster.run("import early, later; (early.value, later.value)").text(1) == "(6, 7)"


def test_installed_packages_below_the_working_directory_are_not_asked_for(tmp_path, monkeypatch):
    asked: list[bytes] = []
    monkeypatch.setattr(main, "request", lambda _, name, **__: asked.append(name))
    monkeypatch.setattr(main, "INSTALLED", (tmp_path / ".venv" / "lib" / "site-packages",))
    finder = main.ModuleSync(tmp_path / "modules", "agent", tmp_path)
    finder.find_spec("package.part", [str(tmp_path / ".venv" / "lib" / "site-packages" / "package")])
    finder.find_spec("elsewhere.part", ["/elsewhere"])
    assert asked == []
    finder.find_spec("mine.part", [str(tmp_path / "mine")])
    assert asked == [b"mine.part"]
