"""Test the Python API in a plain process: real ranks, no kernel."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import rankbook
from rankbook import (
    CellError,
    CellTimeout,
    Cluster,
    ClusterStopped,
    InvalidArgument,
    NoClusterError,
    RankLostError,
    StartError,
    TransferError,
)
from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.states import GracePeriods
from rankbook.launch import local
from rankbook.process_identity import OWNER_FILE
from tests.conftest import Gate, cluster_folders, wait_until

pytestmark = pytest.mark.processes

WRITTEN_AT_EXIT = {"kept": "a record\n", "log": "the last step", "raw": "its bytes", "exit": "1"}
REDUCE = "total = torch.tensor(rank)\ndist.all_reduce(total)\nint(total)"


def own_folders() -> list[Path]:
    return cluster_folders(os.getpid())


def children() -> set[int]:
    pids = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            pids |= {child.pid} if child.status() != psutil.STATUS_ZOMBIE else set()
    return pids


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("rankbook")}


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no process, folder, thread or descriptor of this module's clusters is left at its end."""
    before = children()
    local.prestart_forkserver()
    yield
    rankbook.stop()
    wait_until(lambda: not own_folders(), timeout=10, what="the folders' end")
    wait_until(lambda: not threads(), timeout=10, what="the threads' end")
    wait_until(lambda: len(children() - before) <= 1, timeout=10, what="only the warm forkserver is left")
    local.shutdown_prestarted()
    wait_until(lambda: children() <= before, timeout=10, what="the forkserver's end")


@pytest.fixture(scope="module")
def module_two(nothing_left: None) -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def two(module_two: Cluster) -> Iterator[Cluster]:
    """Provide two ranks. A test leaves them idle, in one group, and without anything of its own in shared memory."""
    yield module_two
    dead = [item.rank for item in module_two.status() if item.state == "dead"]
    if dead:
        module_two.restart(dead)
    assert module_two.run(REDUCE, timeout=20).text(0) == "1"
    wait_until(lambda: not segments(module_two), timeout=10, what=f"no segments left: {segments(module_two)}")


def segments(cluster: Cluster) -> list[str]:
    """Return the values in the cluster's shared memory: all but sockets, the store, the owner and last words."""
    files = [file for file in cluster._segments.folder.iterdir() if not file.is_socket()]
    ranks = {f"output-{rank}.{item.incarnation}" for rank, item in cluster._state.ranks.items()}
    return [file.name for file in files if file.stem not in ranks and file.name not in ("store", OWNER_FILE)]


# run ----------------------------------------------------------------------------------------------------------------


def test_run_returns_what_every_rank_printed_and_its_last_expression(two):
    result = two.run("print('hello from', rank)\nrank + 10")
    assert result.ok
    assert result.stdout == {0: "hello from 0\n", 1: "hello from 1\n"}
    assert [result.text(rank) for rank in (0, 1)] == ["10", "11"]


def test_without_a_launcher_this_process_listens_at_no_port_and_has_no_thread_for_hosts():
    def listening() -> set[object]:
        sockets = psutil.net_connections("tcp")
        return {item.laddr for item in sockets if item.pid == os.getpid() and item.status == psutil.CONN_LISTEN}

    before = listening()
    with Cluster(2) as cluster:
        cluster.run(REDUCE)
        assert listening() <= before
        assert threads().isdisjoint({"rankbook-engine", "rankbook-save"}) and cluster.hosts() == []


def test_libraries_take_a_rank_for_a_process_that_torchrun_has_started(two):
    two.run("import sys, os\nfound = dist.is_torchelastic_launched(), hasattr(sys, 'ps1'), os.environ['LOCAL_RANK']")
    assert two.pull("found") == [(True, False, str(rank)) for rank in range(2)]


def test_variables_imports_and_functions_persist_between_cells(two):
    two.run("import math\nkept = [1]\ndef double(x):\n    return 2 * x * len(kept)")
    two.run("kept.append(2)")
    assert two.run("double(math.floor(3.5))").text(1) == "12"


def test_run_on_some_ranks_does_not_affect_the_others(two):
    for selection in (1, "1", [1], (1,), range(1, 2), "1:2"):
        result = two.run("print('here')", ranks=selection)
        assert result.ranks == (1,)


@pytest.mark.parametrize("selection", [2, "0-7", [], "everyone", -1, [0, 9]])
def test_error_for_an_invalid_rank_names_the_valid_ranks(two, selection):
    with pytest.raises(InvalidArgument, match="0-1") as caught:
        two.run("1", ranks=selection)
    assert "\n" not in str(caught.value)


def test_run_raises_the_error_of_the_rank_as_its_built_in_type_with_traceback(two):
    code = "def broken(n):\n    return [][n]\nif rank == 1:\n    broken(5)"
    with pytest.raises(IndexError) as caught:
        two.run(code)
    error = caught.value
    assert isinstance(error, CellError)
    assert set(error.errors) == {1}
    assert error.errors[1].name == "IndexError"
    text = str(error)
    assert "rank 1: IndexError: list index out of range" in text
    assert "return [][n]" in text
    assert "broken(5)" in text
    assert "rank 0 finished" in text
    assert "\x1b" not in text


def test_every_distinct_error_is_reported_once_with_its_ranks(two):
    with pytest.raises(ValueError, match=r"(?s)rank 0: ValueError: zero.*rank 1: KeyError: 'one'"):
        two.run("if rank == 0:\n    raise ValueError('zero')\n{}['one']")
    with pytest.raises(ZeroDivisionError) as caught:
        two.run("1 / 0")
    assert str(caught.value).count("ranks 0-1: ZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("x = = 1", SyntaxError),
        ("import no_such_module", ModuleNotFoundError),
        ("raise StopIteration('end')", CellError),
        ("raise UnicodeDecodeError('utf-8', b'', 0, 1, 'odd')", CellError),
        ("class Own(Exception): pass\nraise Own('mine')", CellError),
        ("raise SystemExit(3)", CellError),
        ("assert rank > 5, 'small'", AssertionError),
        ("open('/no/such/file')", FileNotFoundError),
    ],
)
def test_any_exception_of_a_cell_is_raised_and_the_ranks_survive(two, code, kind):
    with pytest.raises(kind) as caught:
        two.run(code)
    assert isinstance(caught.value, CellError)
    assert two.run("1").ok


def test_a_cell_that_takes_too_long_is_interrupted_and_the_next_one_runs(two):
    start = time.monotonic()
    with pytest.raises(CellTimeout, match=r"0\.3 s") as caught:
        two.run("import time\nif rank == 1:\n    time.sleep(600)", timeout=0.3)
    assert 0.3 <= time.monotonic() - start < 20
    assert isinstance(caught.value, TimeoutError)
    assert "rank 1: KeyboardInterrupt" in str(caught.value)
    assert two.run("1", timeout=10).ok


def test_a_timeout_that_is_not_reached_does_nothing(two):
    assert two.run("import time; time.sleep(0.05)", timeout=30).ok
    assert two.apply(lambda: 1, timeout=30) == [1, 1]


def press_ctrl_c_when(condition) -> threading.Thread:
    """Interrupt the main thread once the condition holds."""

    def press() -> None:
        wait_until(condition, timeout=10, what="the moment to interrupt")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def running(cluster: Cluster):
    return lambda: {item.state for item in cluster.status()} == {"running"}


@pytest.mark.parametrize("how", ["run", "apply"])
def test_interrupt_ends_the_cell_on_the_ranks_and_is_raised_in_the_caller(two, how):
    presser = press_ctrl_c_when(running(two))
    start = time.monotonic()
    work = two.run if how == "run" else two.apply
    with pytest.raises(KeyboardInterrupt):
        work("import time\ntime.sleep(600)" if how == "run" else lambda: time.sleep(600))
    assert time.monotonic() - start < 20
    presser.join()
    assert two.run("1", timeout=10).ok
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_is_delivered_at_any_moment(two):
    for turn in range(100):
        moment = threading.Timer(turn * 6e-5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come before the call
            moment.start()
            two.run("import time\ntime.sleep(600)")
        assert time.monotonic() - start < 20
        moment.join()
        assert two.run("'idle'", timeout=20).text(0) == "'idle'"


@pytest.fixture
def with_callback(two: Cluster) -> Iterator[Cluster]:
    """Provide two ranks, and remove the callbacks that rank 0 has in IPython at the end."""

    def remove_callbacks() -> None:
        from IPython import get_ipython

        get_ipython().events.callbacks["pre_run_cell"].clear()

    yield two
    two.apply(remove_callbacks, ranks=0)


def test_interrupt_during_a_callback_of_ipython_ends_the_cell(with_callback, tmp_path):
    two, reached = with_callback, tmp_path / "reached"
    two.run(
        f"import pathlib, time\ndef wait(info):\n    pathlib.Path({str(reached)!r}).touch()\n    time.sleep(600)\n"
        "get_ipython().events.register('pre_run_cell', wait)",
        ranks=0,
    )

    def interrupt() -> None:
        wait_until(reached.exists, timeout=20, what="the callback runs")
        two.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        two.run("later = 1", ranks=0, timeout=60)
    thread.join(20)
    assert two.apply(lambda: "later" in __import__("__main__").__dict__, ranks=0) == [False]


def test_error_in_a_callback_of_ipython_is_that_of_the_cell(with_callback):
    with_callback.run("def fail(info):\n    1 / 0\nget_ipython().events.register('pre_run_cell', fail)", ranks=0)
    with pytest.raises(ZeroDivisionError):
        with_callback.run("later = 1", ranks=0)
    assert with_callback.pull("later", ranks=0) == [1]


def test_cells_of_several_threads_take_turns(two):
    two.run("seen = []")
    workers = [threading.Thread(target=two.run, args=(f"seen.append({n})",)) for n in range(20)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    first, second = two.pull("seen")
    assert sorted(first) == sorted(second) == list(range(20))


def test_death_of_a_rank_raises_an_error_and_appears_in_status(two):
    two.run("state = 'kept'")
    with pytest.raises(RankLostError, match="rank 1 exited with code 4 while running a call") as caught:
        two.run("import os\nif rank == 1:\n    os._exit(4)")
    assert caught.value.ranks == (1,)
    alive, dead = two.status()
    assert (alive.state, alive.loss) == ("idle", None)
    assert (dead.state, dead.loss) == ("dead", "exited with code 4")
    assert "1: dead" in repr(two)
    for attempt in (
        lambda: two.run("1"),
        lambda: two.apply(int),
        lambda: two.pull("state"),
        lambda: two.push({"a": 1}),
    ):
        with pytest.raises(RankLostError, match="restart") as caught:
            attempt()
        assert caught.value.ranks == (1,)
        assert "\n" not in str(caught.value)
    assert two.pull("state", ranks=0) == ["kept"]
    assert two.restart(1) == (1,)
    assert two.run(REDUCE).text(0) == "1"


def test_status_names_device_process_and_cell(two, tmp_path):
    done, gate = threading.Event(), Gate(tmp_path / "gate")
    wait = f"import os, time\n{gate.wait}"
    worker = threading.Thread(target=lambda: (two.run(wait, ranks=0), done.set()))
    worker.start()
    wait_until(lambda: two.status()[0].state == "running", timeout=20, what="rank 0 runs")
    busy, idle = two.status()
    assert (busy.rank, busy.device, busy.cell) == (0, "cpu", "a call")
    assert (idle.state, idle.cell) == ("idle", None)
    assert psutil.Process(busy.pid).is_running()
    gate.open()
    worker.join(20)
    assert done.is_set()
    assert repr(two) == "<Cluster of 2 on cpu, gloo; 0: idle, 1: idle>"


# apply --------------------------------------------------------------------------------------------------------------


def test_apply_passes_arguments_and_returns_every_ranks_value_in_order(two):
    two.run("import os; os.environ['OWN'] = str(rank)")
    result = two.apply(lambda a, *, b: (a, b, __import__("os").environ["OWN"]), 1, b=[2])
    assert result == [(1, [2], "0"), (1, [2], "1")]
    assert two.apply(lambda: None, ranks=1) == [None]


def test_apply_takes_closures_local_functions_and_classes_by_value(two):
    factor = 7

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def scaled(self) -> Point:
            return Point(self.x * factor)

    def work(point: Point) -> Point:
        return point.scaled()

    results = two.apply(work, Point(6))
    assert [result.x for result in results] == [42, 42]
    assert all(type(result) is Point for result in results), "what comes back is of the class that was sent"


def test_apply_raises_what_the_function_raises_with_the_line_it_was(two):
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        two.apply(divide, 1, 0)
    assert "return a / b" in str(caught.value)
    assert isinstance(caught.value, CellError)


def test_unpicklable_argument_raises_in_the_notebook(two):
    lock = threading.Lock()
    with pytest.raises(TransferError, match="lock"):
        two.apply(lambda: lock)
    with pytest.raises(TransferError, match="lock"):
        two.apply(print, lock)
    with pytest.raises(TransferError, match="lock"):
        two.push({"fine": 1, "bad": lock})


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_call(two):
    with pytest.raises(TransferError, match="lock") as caught:
        two.apply(lambda: __import__("threading").Lock())
    assert isinstance(caught.value, CellError)
    two.run("lock = __import__('threading').Lock()")
    with pytest.raises(TransferError, match="lock"):
        two.pull("lock")


def test_failed_call_leaves_no_segments_of_other_answers(two):
    def answer() -> torch.Tensor:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise RuntimeError("not here")
        return torch.ones(1 << 21)

    with pytest.raises(RuntimeError, match="not here"):
        two.apply(answer)
    wait_until(lambda: not segments(two), timeout=10, what="no segment left")


# push, pull, scatter, gather ----------------------------------------------------------------------------------------


def test_a_value_that_cannot_be_opened_leaves_no_segments_of_the_others(two):
    two.run(
        "import sys, types, torch\nonly_there = types.ModuleType('only_there')\n"
        "exec('class Odd: pass', vars(only_there))\nsys.modules['only_there'] = only_there\n"
        "odd = [only_there.Odd(), torch.ones(1 << 21)]"
    )
    with pytest.raises(TransferError, match="only_there"):
        two.pull("odd")
    wait_until(lambda: not segments(two), timeout=10, what="no segment left")


def test_push_puts_variables_on_all_or_some_ranks(two):
    two.push({"a": 1, "b": {"deep": [1, (2, None)]}})
    assert two.pull("b") == [{"deep": [1, (2, None)]}] * 2
    two.push({"a": 2}, ranks=1)
    assert two.pull("a") == [1, 2]
    two.push({})


@pytest.mark.parametrize("name", ["not a name", "", "1st", "a.b", "class"])
def test_push_refuses_invalid_names(two, name):
    with pytest.raises(InvalidArgument, match="invalid variable name"):
        two.push({name: 1})


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_tensors_and_arrays_arrive_equal_and_writable(two, size):
    tensor = torch.arange(size, dtype=torch.float32)
    array = np.arange(size, dtype=np.int64).reshape(2, -1)
    two.push({"tensor": tensor, "array": array})
    two.run("tensor += rank; array += rank")
    for rank, (pulled_tensor, pulled_array) in enumerate(zip(two.pull("tensor"), two.pull("array"), strict=True)):
        assert torch.equal(pulled_tensor, tensor + rank)
        assert np.array_equal(pulled_array, array + rank)
        pulled_tensor[0] = -1
        pulled_array[0, 0] = -1
    assert tensor[0] == 0
    assert array[0, 0] == 0, "what was pushed is a copy"
    assert two.run("int(tensor[0])").text(1) == "1", "and so is what was pulled"
    two.run("del tensor, array")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_every_kind_of_tensor_arrives(two, dtype):
    tensor = torch.zeros(3, 4).to(dtype)
    two.push({"tensor": tensor})
    for pulled in two.pull("tensor"):
        assert pulled.dtype == dtype
        assert pulled.shape == (3, 4)


def test_views_gradients_parameters_and_modules_arrive(two):
    base = torch.arange(12.0).reshape(3, 4)
    two.push({"view": base.T, "leaf": torch.ones(2, requires_grad=True), "sparse": base.to_sparse(), "empty": base[:0]})
    assert torch.equal(two.pull("view")[1], base.T)
    assert two.pull("leaf")[0].requires_grad
    assert torch.equal(two.pull("sparse")[0].to_dense(), base)
    assert two.pull("empty")[0].shape == (0, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    two.push({"model": model})
    two.run("model(torch.ones(2, 4)).sum().backward()")
    assert torch.equal(two.pull("model")[1][0].weight, model[0].weight)
    assert two.pull("model")[0][0].weight.requires_grad


CLASSES = """
import dataclasses, enum, functools
from typing import NamedTuple

class Phase(enum.Enum):
    TRAIN = 1

@dataclasses.dataclass(slots=True)
class Metrics:
    loss: float

class Pair(NamedTuple):
    a: int

class Data(list):
    def __init__(self):
        super().__init__()
    @functools.cached_property
    def table(self):
        return 7
"""


def test_values_of_one_class_of_a_cell_are_equal_on_all_ranks_and_in_the_notebook(two):
    two.run(CLASSES + "values = (Phase.TRAIN, Metrics(0.5), Pair(3))")
    pulled = two.pull("values")
    assert pulled[0] == pulled[1]
    two.push({"best": pulled[0]})
    two.run("assert best == values and isinstance(best[1], Metrics)")
    two.run(CLASSES)  # other classes, because a cell that is run again defines them anew
    assert two.pull("values") == pulled
    two.run("assert best == values and not isinstance(best[1], Metrics)")


def test_objects_with_slots_and_cached_properties_come_and_go(two):
    namespace = {"__name__": "__main__"}
    exec(CLASSES, namespace)
    metrics, data = namespace["Metrics"](0.5), namespace["Data"]()
    two.push({"metrics": metrics, "data": data})
    two.run("assert data.table == 7 and not hasattr(metrics, '__dict__')\nmetrics.loss = 0.25")
    assert two.pull("metrics", ranks=0) == [namespace["Metrics"](0.25)]
    assert type(two.pull("data", ranks=1)[0]) is namespace["Data"]


def test_200_megabytes_are_pushed_and_pulled_and_leave_no_shared_memory(two):
    tensor = torch.arange(50 << 20, dtype=torch.float32)
    two.push({"large": tensor})
    first, second = two.pull("large")
    assert torch.equal(first, tensor)
    assert torch.equal(second, tensor)
    first[0] = 1
    two.run("del large")
    wait_until(lambda: not segments(two), timeout=10, what="no segment left")


def test_pull_follows_attributes(two):
    two.run("class Box: pass\nbox = Box(); box.inner = Box(); box.inner.value = rank * 2")
    assert two.pull("box.inner.value") == [0, 2]


def test_pull_of_an_unknown_name_suggests_similar_names(two):
    two.run("learning_rate = 1\nclass Box: pass\nbox = Box(); box.weight = 2")
    with pytest.raises(InvalidArgument, match=r"variable 'learing_rate' is not defined on this rank.*learning_rate"):
        two.pull("learing_rate")
    with pytest.raises(InvalidArgument, match=r"no attribute 'wieght'.*weight"):
        two.pull("box.wieght")
    two.run("if rank == 0:\n    only_here = 1")
    with pytest.raises(InvalidArgument, match=r"rank 1.*only_here"):
        two.pull("only_here")
    assert two.pull("only_here", ranks=0) == [1]


def test_pull_of_a_ranks_own_class_arrives_by_value(two):
    two.run("class Own:\n    def twice(self):\n        return 2 * self.x\nown = Own(); own.x = rank + 1")
    assert [instance.twice() for instance in two.pull("own")] == [2, 4]


@pytest.mark.parametrize(
    "ask",
    [lambda two: two.run("print('\udce9')"), lambda two: two.pull("caf\udce9"), lambda two: two.peek("'\udce9'")],
    ids=["run", "pull", "peek"],
)
def test_text_that_cannot_be_sent_is_refused_and_the_ranks_stay_idle(two, ask):
    with pytest.raises(InvalidArgument, match=r"'\\udce9'"):
        ask(two)
    assert [status.state for status in two.status()] == ["idle", "idle"]
    assert two.run("rank").text(1) == "1"


@pytest.mark.parametrize(
    "ask",
    [
        lambda two: two.pull(["a", "b"]),
        lambda two: two.run(None),
        lambda two: two.run(b"1"),
        lambda two: two.protect(2.5),
        lambda two: two.gradients(["model"]),
    ],
    ids=["pull", "run", "bytes", "protect", "gradients"],
)
def test_an_argument_of_another_type_is_refused_and_the_ranks_stay_idle(two, ask):
    with pytest.raises(InvalidArgument, match=r"got list|invalid argument: Expected `(str|int)"):
        ask(two)
    assert [status.state for status in two.status()] == ["idle", "idle"]
    assert two.run("rank").text(1) == "1"


def test_answer_that_cannot_be_sent_ends_the_question(two):
    with pytest.raises(EOFError, match=r"'\\udce9'"):
        two.call(lambda: input("name? "), sink=None, ask=lambda *_: "caf\udce9")  # of a terminal in Latin-1
    assert two.run("rank").text(1) == "1"


def test_ranks_start_in_a_folder_whose_name_is_not_utf_8(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path, str(folder), "not a path: \ud800", 3])
    with Cluster(1) as cluster:
        assert cluster.apply(lambda: (Path.cwd(), sys.path[-1])) == [(folder, str(folder))]
        cluster.restart(0)
        assert cluster.apply(Path.cwd) == [folder]


def test_scatter_gives_every_rank_its_own_and_gather_joins_them(two):
    two.scatter("part", [[1, 2], [3]])
    assert two.pull("part") == [[1, 2], [3]]
    assert two.gather("part") == [1, 2, 3]
    two.scatter("big", [torch.zeros(1 << 20), torch.ones(1 << 20)])
    assert [part.sum().item() for part in two.gather("big")] == [0.0, float(1 << 20)]
    two.scatter("solo", ["only"], ranks=1)
    assert two.gather("solo", ranks=1) == ["only"]
    two.run("del big")


def test_scatter_follows_the_order_of_the_ranks(two):
    two.scatter("part", ["for 1", "for 0"], ranks=[1, 0])
    assert two.pull("part") == ["for 0", "for 1"]
    with pytest.raises(InvalidArgument, match="every rank once, got 1, 1"):
        two.scatter("part", ["a", "b"], ranks=[1, 1])


def test_ranks_may_be_numbers_of_numpy(two):
    two.push({"a": 1}, ranks=np.arange(2))
    two.push({"a": 2}, ranks=np.int64(1))
    assert two.pull("a", ranks=np.array([1])) == [2] and two.pull("a") == [1, 2]
    for selection, text in (([], "is empty"), ([0.5], "expected numbers"), ([7], "rank 7 does not exist")):
        with pytest.raises(InvalidArgument, match=text):
            two.pull("a", ranks=selection)


def test_names_are_those_that_python_stores(two):
    two.push({"\u00b5": 0.5})  # of a keyboard; Python has the Greek letter
    assert two.run("\u00b5").text(0) == "0.5"
    two.run("\ufb01t = 7")
    assert two.pull("\ufb01t") == two.pull("fit") == [7, 7]
    two.scatter("\u00b5", [1, 2])
    assert two.pull("\u03bc") == [1, 2]


def test_autoreload_loads_modules_anew_for_calls_and_pushed_values(two, tmp_path, monkeypatch):
    path = tmp_path / "edited_module.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    def edit(text: str, seconds: int) -> None:
        path.write_text(f"class Net:\n    def text(self): return {text!r}\ndef text(): return {text!r}\n")
        os.utime(path, (seconds, seconds))

    edit("old", 1_000_000_000)
    edited = importlib.import_module("edited_module")
    two.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n%load_ext autoreload\n%autoreload 2")
    try:
        two.push({"net": edited.Net()})
        assert two.apply(edited.text) == ["old", "old"]
        edit("new", 1_000_000_100)
        assert two.apply(edited.text) == ["new", "new"]
        edit("newer", 1_000_000_200)
        two.push({"net": edited.Net()})
        assert two.run("print(net.text())").stdout == {0: "newer\n", 1: "newer\n"}
    finally:
        two.run("%autoreload 0\nsys.path.pop(0)\ndel sys.modules['edited_module'], net")
        del sys.modules["edited_module"]


def test_scatter_of_another_number_of_values_says_both_numbers(two):
    with pytest.raises(InvalidArgument, match=r"3 values for 2 ranks"):
        two.scatter("part", [1, 2, 3])
    with pytest.raises(InvalidArgument, match="invalid variable name 'no name'"):
        two.scatter("no name", [1, 2])


def test_a_scatter_that_cannot_be_pickled_leaves_nothing(two):
    with pytest.raises(TransferError):
        two.scatter("part", [torch.zeros(1 << 21), threading.Lock()])
    wait_until(lambda: not segments(two), timeout=10, what="no segment left")


# start and stop -----------------------------------------------------------------------------------------------------


def test_two_clusters_live_side_by_side(two):
    two.run("mine = 'first'")
    with Cluster(2) as other:
        other.run("mine = 'second'")
        assert other.run(REDUCE).text(1) == "1"
        assert two.pull("mine") == ["first"] * 2
        assert other.pull("mine") == ["second"] * 2
        assert not {item.pid for item in two.status()} & {element.pid for element in other.status()}
        with pytest.raises(RankLostError):
            other.run("import os; os._exit(1)", ranks=0)
        assert two.run(REDUCE).text(0) == "1"
    assert two.run(REDUCE).text(0) == "1"


def test_four_ranks_start_from_a_thread_and_serve_this_one(two):
    clusters: list[Cluster] = []
    starter = threading.Thread(target=lambda: clusters.append(Cluster(4)))
    starter.start()
    starter.join(60)
    (four,) = clusters
    with four:
        assert four.run(REDUCE).text(3) == "6"
        assert four.apply(lambda x: x + 1, 1, ranks="0:4:2") == [2, 2]
        with pytest.raises(RankLostError) as caught:
            four.run("import os\nif rank in (1, 2):\n    os._exit(rank)")
        assert caught.value.ranks == (1, 2)
        four.restart([1, 2])
        assert four.run(REDUCE).text(2) == "6"
    assert four.stopped


def test_stopped_cluster_raises_cluster_stopped_and_stop_is_idempotent(two):
    cluster = Cluster(1)
    folder = cluster._segments.folder
    cluster.stop()
    cluster.stop()
    assert cluster.stopped
    assert repr(cluster) == "<Cluster: stopped>"
    assert not folder.exists()
    for attempt in (
        lambda: cluster.run("1"),
        lambda: cluster.apply(int),
        lambda: cluster.push({"a": 1}),
        lambda: cluster.pull("a"),
        lambda: cluster.scatter("a", [1]),
        lambda: cluster.gather("a"),
        cluster.status,
        cluster.restart,
        cluster.interrupt,
        cluster.stacks,
    ):
        with pytest.raises(ClusterStopped, match="stopped"):
            attempt()


def test_ranks_that_are_stopped_call_their_exit_functions_and_write_their_open_files(two, tmp_path):
    with Cluster(2, grace=GracePeriods(leave=1.5)) as cluster:  # for a slow machine
        cluster.push({"folder": str(tmp_path)})
        cluster.run(
            """
            import atexit, io, logging.handlers, os, pathlib, subprocess, tempfile, time, weakref
            kept = logging.handlers.MemoryHandler(9, target=logging.FileHandler(f"{folder}/kept-{rank}"))
            kept.handle(logging.makeLogRecord({"msg": "a record", "levelno": 20}))
            log, raw = open(f"{folder}/log-{rank}", "w"), open(f"{folder}/raw-{rank}", "wb")
            log.write("the last step")
            raw.write(b"its bytes")
            stuck = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
            stuck.stdin.raw.write(bytes(1 << 16))  # full: nobody reads it
            stuck.stdin.write(b"what no one takes")
            cleared = tempfile.TemporaryDirectory(dir=folder)
            weakref.finalize(stuck, stuck.kill)

            @atexit.register
            def tells():
                time.sleep(1.8)  # longer than a rank may take that asks for no time
                total = torch.tensor(rank)
                dist.all_reduce(total)
                pathlib.Path(folder, f"exit-{rank}").write_text(str(int(total)))

            atexit.register(lambda: 1 / 0)
            """
        )
    files = {path.name: path.is_file() and path.read_text() for path in tmp_path.iterdir()}
    assert files == {f"{kind}-{rank}": text for kind, text in WRITTEN_AT_EXIT.items() for rank in (0, 1)}


def test_leaving_the_with_block_by_an_error_stops_the_ranks_and_keeps_the_error(two):
    with pytest.raises(ZeroDivisionError), Cluster(1) as cluster:
        cluster.run("1 / 0")
    assert cluster.stopped


def test_stop_ends_waiting_calls_with_cluster_stopped(two):
    cluster = Cluster(2)
    reported: list[BaseException] = []

    def wait() -> None:
        try:
            cluster.run("import time; time.sleep(600)")
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            reported.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    wait_until(lambda: len(cluster.cells()) == 2, timeout=20, what="both calls")
    wait_until(running(cluster), timeout=20, what="the first call runs")
    start = time.monotonic()
    cluster.stop()
    assert time.monotonic() - start < 20
    for waiter in waiters:
        waiter.join(20)
    assert [type(error) for error in reported] == [ClusterStopped, ClusterStopped]


def test_start_returns_the_running_cluster_and_stop_ends_it(two):
    with pytest.raises(NoClusterError, match=r"rankbook\.start"):
        rankbook.current()
    assert rankbook.stop() is False
    cluster = rankbook.start(2)
    assert rankbook.start() is cluster
    assert rankbook.start(2) is cluster
    assert rankbook.current() is cluster
    with pytest.raises(InvalidArgument, match="2 ranks"):
        rankbook.start(3)
    assert rankbook.stop() is True
    assert rankbook.stop() is False
    assert cluster.stopped


@pytest.mark.parametrize("start", [Cluster, rankbook.start], ids=["Cluster", "start"])
def test_an_interrupt_at_the_end_of_a_start_leaves_no_ranks(two, monkeypatch, start):
    before = own_folders(), threading.active_count()
    launch = ClusterProcesses.launch

    def interrupt_afterwards(self: ClusterProcesses, *args: Any, **options: Any) -> None:
        launch(self, *args, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ClusterProcesses, "launch", interrupt_afterwards)
    with pytest.raises(KeyboardInterrupt):
        start(2)
    with pytest.raises(NoClusterError):
        rankbook.current()
    assert (own_folders(), threading.active_count()) == before


@pytest.mark.parametrize("count", [0, -3, 10_000])
def test_invalid_number_of_ranks_is_refused_before_the_start(two, count):
    before = children(), own_folders()
    with pytest.raises(InvalidArgument, match=f"invalid number of ranks: {count}; expected 1 to"):
        Cluster(count)
    assert (children(), own_folders()) == before


@pytest.mark.slow
def test_start_that_exceeds_its_timeout_is_abandoned_and_leaves_no_processes(two):
    before = own_folders()
    with pytest.raises(StartError, match="not ready within"):
        Cluster(2, timeout=0.0)
    assert own_folders() == before
    with Cluster(1) as cluster:
        assert cluster.run("1").ok


def test_invalid_backend_is_an_error_and_leaves_no_processes(two):
    before = own_folders()
    with pytest.raises((StartError, InvalidArgument), match="no_such_backend"):
        Cluster(2, backend="no_such_backend")
    with pytest.raises(InvalidArgument, match="nccl needs"):
        Cluster(64, backend="nccl")
    assert own_folders() == before


def test_starts_and_stops_leave_no_descriptor_or_thread(two):
    def cycle() -> None:
        with Cluster(2) as cluster:
            cluster.run("1")

    cycle()
    process = psutil.Process()

    def resource_counts() -> tuple[int, int, int]:
        return process.num_fds(), process.num_threads(), len(children())

    before = resource_counts()  # what a moment later will have ended may be counted too
    for _ in range(3):
        cycle()
    after: list[tuple[int, int, int]] = []

    def settled() -> bool:
        after[:] = [resource_counts()]
        return all(now <= then for now, then in zip(after[0], before, strict=True))

    with contextlib.suppress(pytest.fail.Exception):
        wait_until(settled, timeout=10, what="no more than before")
    assert settled(), f"(descriptors, threads, processes): {before} before, {after[0]} after"
