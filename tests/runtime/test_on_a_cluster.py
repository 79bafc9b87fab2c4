"""Shared state and collectives in the ranks of a notebook: what one rank does wrong costs the others no wait.

The same functions are tested without a notebook in the modules' own tests; here it is the group that is recoverable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import rankbook
from rankbook import CellError, Cluster
from rankbook.launch import local

pytestmark = pytest.mark.processes

AFTER = """
assert (s.process_index, s.num_processes, s.local_process_index) == (rank, world_size, rank)
assert gather(torch.tensor(rank)).tolist() == [0, 1, 2]
with s.main_process_first():
    pass
s.wait_for_everyone()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = rankbook.start(3)
    try:
        started.run("from rankbook.runtime import *\ns = PartialState()\ngroup = dist.group.WORLD")
        yield started
    finally:
        started.stop()
        local.shutdown_prestarted()


TRAIN = """
@find_executable_batch_size(starting_batch_size=8)
def train(size):
    raise KeyError if rank == 2 else MemoryError
train()
"""
FAULTS = [
    (
        "with s.main_process_first():\n    if s.is_main_process:\n        raise FileNotFoundError('data.csv')",
        "FileNotFoundError",
        "ranks 1-2: PeerFailedError: rank 0 raised FileNotFoundError while this rank was waiting for it: data.csv",
    ),
    (
        "if rank == 0:\n    raise KeyError('zero')\nwith s.main_process_first():\n    pass",
        "KeyError",
        "ranks 1-2: Collect",
    ),
    ("if rank == 1:\n    raise KeyError('one')\ngather(torch.ones(3))", "KeyError", "rank 1: KeyError: 'one'"),
    ("gather(torch.ones(rank + 1))", "InvalidArgument", "rank 2: float32[3]"),
    ("gather([torch.ones(1), None][:1 + (rank == 2)])", "InvalidArgument", "rank 2: expected tensors"),
    ("reduce(torch.ones(1), 'median' if rank == 1 else 'sum')", "InvalidArgument", "unknown reduction 'median'"),
    ("gather_object([(lambda: 1) if rank else 0])", "TransferError", "rank 1: cannot be pickled"),
    (
        TRAIN,
        "KeyError",
        "rank 2 raised KeyError",
    ),
]


@pytest.mark.parametrize(("code", "kind", "words"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_fault_on_one_rank_ends_the_cell_on_all_and_the_state_goes_on(cluster, code, kind, words):
    start = time.monotonic()
    with pytest.raises(CellError) as caught:
        cluster.run(code)
    assert time.monotonic() - start < 20
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    cluster.run(f"assert dist.group.WORLD is group{AFTER}")


def test_precision_changes_live_from_cell_to_cell(cluster):
    cluster.run("state = AcceleratorState(mixed_precision='bf16')")
    changed = cluster.run("AcceleratorState(mixed_precision='no').mixed_precision")
    assert changed.text(1) == "'no'"
    assert "mixed_precision changed from 'bf16' to 'no'" in changed.stderr[0]
    assert not changed.stderr.get(1)
    assert cluster.run("state.mixed_precision").text(2) == "'no'"


def test_objects_of_classes_that_were_defined_in_a_cell_travel(cluster):
    cluster.run("class Mine:\n    def __init__(self, x):\n        self.x = x")
    assert cluster.run("[each.x for each in gather_object([Mine(rank)])]").text(1) == "[0, 1, 2]"
    assert cluster.run("broadcast_object_list([Mine(rank)], from_process=1)[0].x").text(2) == "1"


def test_the_cells_do_not_end_the_ranks_own_group(cluster):
    cluster.run(f"s.destroy_process_group(){AFTER}")


HOST_TENSORS = """
data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2))
net = torch.nn.Linear(2, 1)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.AdamW(net.parameters()), torch.utils.data.DataLoader(data, batch_size=2))
for (batch,) in loader:  # torch 2.10 makes the counters of AdamW on the default device
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
torch.set_default_device("meta")  # nothing can be read from a tensor there
try:
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather_for_metrics(batch)
    accelerator.save_state(FOLDER, async_=True).wait()
    accelerator.load_state(FOLDER)
    read = [batch[0] for batch in prepare_data_loader(
        torch.utils.data.DataLoader(data, batch_size=2), dispatch_batches=True)]
    accelerator.protect(1)
    accelerator.protect(False)
finally:
    torch.set_default_device("cpu")
assert read[0].device.type == "cpu"
"""


def test_rankbooks_own_tensors_are_not_made_on_the_default_device_of_the_cells(cluster, tmp_path):
    cluster.run(HOST_TENSORS.replace("FOLDER", repr(str(tmp_path / "state"))), timeout=60)


def test_a_timeout_that_a_cell_has_set_stays_when_the_groups_are_formed_again(cluster):
    timeout = "group._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    before = cluster.run(timeout).text(0)
    set_timeout = "from datetime import timedelta\ndist.distributed_c10d._set_pg_timeout(timedelta(seconds={}), group)"
    cluster.run(set_timeout.format(77))
    with pytest.raises(CellError, match="rank 1: KeyError: 'one'"):
        cluster.run("if rank == 1:\n    raise KeyError('one')\ngather(torch.ones(3))")
    assert cluster.run(timeout).text(0) == "77.0"
    cluster.run(set_timeout.format(before))


CLASSES = """
import dataclasses, enum, multiprocessing
fork = multiprocessing.get_context("fork")

@dataclasses.dataclass
class Batch:
    rows: list

class Kind(enum.Enum):
    A = 1

class BadSample(Exception):
    pass

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        if index:
            raise BadSample(index)
        return Kind.A
"""


def test_objects_from_forked_workers_are_of_the_classes_of_the_cells(cluster):
    cluster.run(CLASSES, ranks=[0])
    cluster.run(
        """
batches = iter(torch.utils.data.DataLoader(Samples(), collate_fn=Batch, num_workers=1, multiprocessing_context="fork"))
batch = next(batches)
assert isinstance(batch, Batch) and batch.rows[0] is Kind.A
try:
    next(batches)
except BadSample:
    pass
del batches  # and with it the worker
""",
        ranks=[0],
    )


def test_functions_of_cells_use_the_globals_of_forked_workers(cluster):
    cluster.run(
        """
import multiprocessing
fork = multiprocessing.get_context("fork")
lock = fork.Lock()
def load(rows):
    global table
    table = rows
def look_up(row):
    with lock:
        return table[row]
def version():
    return 1
with fork.Pool(1, initializer=load, initargs=([10, 20],)) as pool:
    assert pool.map(look_up, [0, 1]) == [10, 20]
    def version():
        return 2
    def later():
        return version()
    assert (pool.apply(version), pool.apply(later)) == (2, 2), "defined after the start of the worker"
""",
        ranks=[0],
    )


def test_a_function_of_notebook_launcher_shares_its_globals_with_forked_workers(cluster):
    definitions = """
def load(rows):
    global table
    table = rows
def look_up(row):
    return table[row]
def read():
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1, initializer=load, initargs=([10, 20],)) as pool:
        return pool.map(look_up, [0, 1])
"""
    notebook = {"__name__": "__main__"}
    exec(definitions, notebook)  # as in a cell of the notebook, whose functions are sent by value
    assert cluster.apply(notebook["read"], ranks=[0]) == [[10, 20]]


@pytest.mark.slow
def test_spawned_workers_get_functions_and_classes_of_cells_by_value(cluster):
    cluster.run(CLASSES, ranks=[0])
    with pytest.raises(CellError, match="Lock objects should only be shared between processes through inheritance"):
        cluster.run(
            """
def count(batches):
    return [len(batch.rows) for batch in batches]
lock = fork.Lock()
def locked():
    with lock:
        return True
with fork.Pool(1) as pool:  # the functions and classes have numbers now
    assert pool.apply(locked)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert pool.apply(count, ([Batch([5, 6])],)) == [2]
    pool.apply(locked)
""",
            ranks=[0],
        )


ACCUMULATION = """
from rankbook import Accelerator, AcceleratorState
AcceleratorState._reset_state()
accelerator = Accelerator(gradient_accumulation_steps=4)
net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(net.weight)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 1.0))

def batch():
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.sync_gradients
"""


@pytest.mark.parametrize("error", ["raise ValueError('bad data')", "rankbook_interrupt()"])
def test_a_failed_cell_without_collectives_begins_new_windows_on_all_ranks(cluster, error):
    cluster.run(ACCUMULATION)
    cluster.run("import signal\ndef rankbook_interrupt():\n    signal.raise_signal(signal.SIGINT)")
    with pytest.raises(CellError):
        cluster.run(f"for _ in range(3):\n    _ = batch()\n    if rank == 1:\n        {error}")
    cluster.run("synced = [batch() for _ in range(6)]", timeout=30)
    assert cluster.pull("synced") == [[False, False, False, True, False, False]] * 3


def test_a_caught_error_on_one_rank_leaves_its_window_in_step_with_the_others(cluster):
    cluster.run(ACCUMULATION)
    cluster.run(
        "loader = accelerator.prepare(torch.utils.data.DataLoader(range(27), batch_size=1))\n"
        "synced = []\n"
        "for number, _ in enumerate(loader):\n"
        "    try:\n"
        "        with accelerator.accumulate(model):\n"
        "            if rank == 1 and number == 1:\n"
        "                raise ValueError('a bad sample')\n"
        "            accelerator.backward(model(torch.ones(1, 1)).sum())\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n"
        "    except ValueError:\n"
        "        continue\n"
        "    if accelerator.sync_gradients:\n"
        "        synced.append((number, round(-net.weight.item(), 4)))",
        timeout=30,
    )
    first = round(11 / 12, 4)  # of twelve batches, one is left out
    assert cluster.pull("synced") == [[(3, first), (7, first + 1), (8, first + 2)]] * 3


def test_a_model_reduces_its_gradients_again_after_an_interrupt_at_the_beginning_of_a_batch(cluster):
    cluster.run(ACCUMULATION)
    cluster.run("_ = [batch(), batch()]")
    with pytest.raises(KeyboardInterrupt):
        # As if the interrupt had come between the two lines of `AccumulateContext.__enter__`.
        cluster.run("batch()\nmodel.require_backward_grad_sync = rank != 0\nraise KeyboardInterrupt")
    cluster.run("model(torch.full((1, 1), rank + 1.0)).sum().backward()\nreduced = net.weight.grad.item()", timeout=30)
    assert cluster.pull("reduced") == [2.0] * 3
