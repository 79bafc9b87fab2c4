"""Test the transfer of values: by file or frame, with shared storages, and errors for what cannot be pickled."""

from __future__ import annotations

import collections
import errno
import functools
import gc
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from rankbook.errors import ProtocolError, TransferError
from rankbook.protocol.messages import Buffer, Payload
from rankbook.transport import tensors
from rankbook.transport.serialization import pack, reduce_class, set_class_content, unpack
from rankbook.transport.shared_memory import SegmentStore
from tests.rank_processes import run_code

LARGE = 1 << 20


@pytest.fixture
def store():
    """Provide a store, in shared memory if there is any. Nothing may be left in it."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="payload-", dir=shared if shared.is_dir() else None))
    yield SegmentStore(folder)
    remaining = list(folder.iterdir())
    shutil.rmtree(folder)
    assert not remaining


def open_packed(packed, store, *, unlink=True):
    return unpack(packed.payload, [memoryview(frame) for frame in packed.frames], unlink=unlink, folder=store.folder)


def sent(value, store, *, by="segment"):
    """The value after its journey, and the bytes that travelled."""
    packed = pack(value, store=store if by == "segment" else None)
    return open_packed(packed, store), sum(buffer.size for buffer in packed.payload.buffers)


def same(original, received):
    """Return whether two tensors are equal bit by bit, in all their properties."""
    return (
        type(original) is type(received)
        and (original.dtype, original.size(), original.stride(), original.requires_grad)
        == (received.dtype, received.size(), received.stride(), received.requires_grad)
        and torch.equal(original, received)
    )


# How buffers travel


def test_small_values_are_one_frame_and_large_ones_one_file(store):
    small = pack({"a": 1, "b": np.arange(10), "c": torch.arange(10)}, store=store)
    assert (len(small.frames), small.segments, len(small.payload.buffers)) == (1, (), 1)
    large = pack([np.zeros(LARGE, np.uint8), torch.zeros(LARGE, dtype=torch.uint8)], store=store)
    assert [buffer.segment for buffer in large.payload.buffers] == [None, *large.segments * 2]
    assert all(buffer.offset % 64 == 0 for buffer in large.payload.buffers)
    assert [path.name for path in store.folder.iterdir()] == [*large.segments]
    store.discard(large.segments[0])


def test_many_middling_buffers_share_one_file(store):
    values = [np.full(10_000, index, np.uint8) for index in range(20)]
    packed = pack(values, store=store)
    assert len(packed.segments) == 1
    assert all(np.array_equal(*pair) for pair in zip(values, open_packed(packed, store), strict=True))


def test_a_pickle_that_is_large_itself_goes_into_the_file(store):
    value = [bytes(LARGE), bytearray(LARGE), "ä" * LARGE, list(range(100_000))]
    packed = pack(value, store=store)
    assert (packed.frames, len(packed.segments)) == ([], 1)
    assert open_packed(packed, store) == value


@pytest.mark.parametrize("by", ["segment", "frames"])
@pytest.mark.parametrize("size", [0, 1, 5_000, LARGE])
def test_arrays_and_tensors_arrive_writable_by_either_way(store, by, size):
    array, tensor = np.arange(size, dtype=np.float32), torch.arange(size).to(torch.complex128)
    (their_array, their_tensor), _ = sent((array, tensor), store, by=by)
    assert np.array_equal(array, their_array)
    assert same(tensor, their_tensor)
    their_array += 1
    their_tensor += 1
    assert np.array_equal(array + 1, their_array)
    assert their_tensor.data_ptr() % 16 == 0


def test_frames_that_arrive_misaligned_or_read_only_become_usable(store):
    packed = pack(torch.arange(LARGE).to(torch.complex128), store=None)
    shifted = memoryview(bytearray(1) + bytearray(packed.frames[1]))[1:]
    for frame in (shifted, memoryview(packed.frames[1]), packed.frames[1]):
        tensor = unpack(packed.payload, [packed.frames[0], frame], unlink=True, folder=store.folder)
        assert tensor.data_ptr() % 16 == 0
        assert tensor.add_(1)[-1] == LARGE


@pytest.mark.parametrize("by", ["segment", "frames"])
def test_the_value_may_be_changed_once_it_is_packed(store, by):
    tensor, array = torch.zeros(LARGE), np.zeros(LARGE)
    packed = pack((tensor, array), store=store if by == "segment" else None)
    tensor.fill_(1)
    array.fill(1)
    their_tensor, their_array = open_packed(packed, store)
    assert their_tensor.sum() == their_array.sum() == 0


def test_every_receiver_gets_a_copy_and_the_sender_removes_the_file(store):
    packed = pack(torch.zeros(LARGE), store=store)
    one, other = (open_packed(packed, store, unlink=False) for _ in range(2))
    store.discard(packed.segments[0])
    one.fill_(1)
    assert (one.sum(), other.sum()) == (LARGE, 0)


@pytest.mark.parametrize("failing", ["pwrite", "statvfs"])
def test_a_value_that_does_not_fit_shared_memory_goes_in_frames(store, monkeypatch, failing):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, failing, full if failing == "pwrite" else lambda _: Full)
    tensor = torch.arange(LARGE)
    packed = pack([tensor, b"x" * LARGE], store=store)
    assert (packed.segments, len(packed.frames)) == ((), 2)
    received, text = open_packed(packed, store)
    assert same(tensor, received)
    assert text == b"x" * LARGE


def test_packing_leaves_no_hold_on_the_value(store):
    class Array(np.ndarray):
        pass

    array, tensor = np.zeros(LARGE).view(Array), torch.zeros(LARGE)
    text = bytearray(LARGE)
    references = [weakref.ref(array), weakref.ref(tensor.untyped_storage())]
    gc.disable()
    try:
        store.discard(pack([array, tensor, text], store=store).segments[0])
        del array, tensor
        text.append(1)
        assert [ref() for ref in references] == [None, None]
    finally:
        gc.enable()


CHILD = """
import os, pickle, sys
from pathlib import Path
from rankbook.transport.serialization import pack, unpack
from rankbook.transport.shared_memory import SegmentStore
payload, frames, folder = pickle.load(sys.stdin.buffer)
value = unpack(payload, frames, unlink=False, folder=Path(folder))
value["tensor"].mul_(2)
value["array"] *= 2
value["model"].weight.data.zero_()
value["answer"] = value.pop("function")(20)
packed = pack(value, store=SegmentStore(Path(folder)))
pickle.dump((packed.payload, packed.frames), sys.stdout.buffer)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.processes
def test_value_survives_a_round_trip_through_another_process(store):
    extra = 22

    class Mine:
        def __init__(self, number):
            self.number = number

    model = torch.nn.Linear(300, 300)
    value = {
        "tensor": torch.arange(LARGE, dtype=torch.bfloat16),
        "array": np.arange(LARGE),
        "model": model,
        "tied": model.weight,
        "mine": Mine(7),
        "function": lambda number: number + extra,
    }
    Mine.__module__ = value["function"].__module__ = "__main__"  # as in a notebook
    packed = pack(value, store=store)
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((packed.payload, packed.frames, str(store.folder))),
        stdout=subprocess.PIPE,
        timeout=100,
        check=True,
    )
    store.discard(packed.segments[0])
    payload, frames = pickle.loads(done.stdout)
    back = unpack(payload, frames, unlink=True, folder=store.folder)
    assert same(back["tensor"], value["tensor"] * 2)
    assert np.array_equal(back["array"], value["array"] * 2)
    assert back["tied"] is back["model"].weight
    assert not back["model"].weight.any()
    assert model.weight.any()
    assert (back["answer"], back["mine"].number) == (42, 7)
    assert type(back["mine"]) is Mine


# Tensors


def dtypes():
    every = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    return sorted(every - quantized, key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch, of its first such tensor
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("by", ["segment", "frames"])
def test_every_dtype_crosses_bit_by_bit(store, dtype, by):
    for count in (3, 10_000):
        storage = torch.UntypedStorage(count * dtype.itemsize)
        torch.empty(0, dtype=torch.uint8).set_(storage).random_(0, 256)
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,))
        received, _ = sent(tensor, store, by=by)
        assert (received.dtype, received.size()) == (dtype, tensor.size())
        assert torch.equal(
            *(torch.empty(0, dtype=torch.uint8).set_(item) for item in (storage, received.untyped_storage()))
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0),
        lambda: torch.empty(3, 0, 2, dtype=torch.int8),
        lambda: torch.arange(10)[5:5],
        lambda: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(LARGE).reshape(2, -1).t(),
        lambda: torch.zeros(1).expand(1000, 1000),
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(LARGE)),
        lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False),
        lambda: torch.ones(3).share_memory_(),
    ],
)
def test_shape_strides_and_kind_are_kept(store, make):
    original = make()
    received, _ = sent(original, store)
    assert same(original, received)


def test_a_tensor_inside_a_graph_arrives_as_a_leaf_and_without_its_gradient(store):
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    received, of_graph = sent((leaf, leaf * 2), store)[0]
    assert received.grad is None
    assert of_graph.is_leaf
    assert of_graph.requires_grad
    assert leaf.grad is not None


def test_conjugated_and_negated_views_arrive_as_their_values(store):
    base = torch.randn(100, dtype=torch.complex64)
    conjugate, negative = base.conj(), base.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    received, again, their_negative = sent((conjugate, conjugate, negative), store)[0]
    assert torch.equal(received, conjugate)
    assert torch.equal(their_negative, negative)
    assert received is again


def test_attributes_of_a_tensor_are_kept_even_where_they_point_back(store):
    parameter, buffer = torch.nn.Parameter(torch.ones(3)), torch.nn.Buffer(torch.ones(3))
    parameter.axis, parameter.me = "tensor", parameter
    received, their_buffer = sent((parameter, buffer), store)[0]
    assert (received.axis, received.me) == ("tensor", received)
    assert isinstance(their_buffer, torch.nn.Buffer)


@pytest.mark.parametrize("by", ["segment", "frames"])
@pytest.mark.parametrize("rows", [10, 2000])
def test_views_of_one_storage_alias_again(store, by, rows):
    base = torch.arange(rows * 100, dtype=torch.float64).reshape(rows, 100)
    value = {"base": base, "row": base[1], "column": base.t()[2], "bits": base.view(torch.int64), "again": base}
    received, size = sent(value, store, by=by)
    assert all(same(value[name], received[name]) for name in value)
    assert size < base.nbytes + 2000
    assert received["again"] is received["base"]
    received["base"].zero_()
    assert not any(received[name].any() for name in received)


def test_only_the_used_part_of_a_storage_is_sent(store):
    data = torch.arange(4 * LARGE, dtype=torch.float32).reshape(-1, 1024)
    batch, size = sent(data[8:40], store)
    assert same(batch, data[8:40])
    assert size < 32 * 4096 + 1000
    parts = [data[8:40], data[30:50], data[50:60], data[-1], data[7:7], data[:, 3]]
    received, size = sent(parts[:-1], store)
    assert all(map(same, parts, received))
    assert size < 53 * 4096 + 2000
    received[0].zero_()
    assert not received[1][:10].any()
    assert received[1][10:].all()
    assert received[1].untyped_storage().data_ptr() == received[2].untyped_storage().data_ptr()


def test_a_sparse_view_is_gathered_and_keeps_its_identity(store):
    data = torch.arange(4 * LARGE, dtype=torch.float32).reshape(-1, 1024)
    column = data[:, 3]
    (received, alias, reshaped), size = sent((column, column.detach(), column), store)
    assert torch.equal(received, column)
    assert size < column.numel() * 4 + 1000
    assert reshaped is received
    received.zero_()
    assert not alias.any()


def test_many_scattered_views_of_one_storage_cross(store):
    data = torch.arange(4 * LARGE, dtype=torch.float32).reshape(-1, 1024)
    rows = list(data[::8])
    received, size = sent(rows, store)
    assert all(map(same, rows, received))
    assert size < data.nbytes / 4


def test_a_tensor_whose_memory_was_released_is_refused_in_words(store):
    released = torch.zeros(LARGE)
    released.untyped_storage().resize_(0)
    with pytest.raises(TransferError, match=r"Tensor at value\[0\] cannot be pickled: its storage was freed"):
        pack([released], store=store)


def test_everything_is_sent_when_everything_is_used(store):
    data = torch.zeros(4, LARGE)
    received, _ = sent([data[2:], data], store)
    received[1].fill_(1)
    assert received[0].all()


def test_storages_cross_and_alias_the_tensors_on_them(store):
    tensor = torch.arange(LARGE)
    typed = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    received, storage, their_typed = sent((tensor[:5], tensor.untyped_storage(), typed), store)[0]
    assert storage.nbytes() == tensor.nbytes
    assert storage.data_ptr() == received.data_ptr() == their_typed._untyped_storage.data_ptr()
    assert their_typed.dtype == tensor.dtype


class Tagged(torch.Tensor):
    """A subclass, which torch takes apart itself."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch, of its first such tensor
def test_other_kinds_of_tensor_are_pickled_by_torch(store):
    dense = torch.arange(60_000.0).reshape(200, 300)
    for original in (dense.to_sparse(), dense.to_sparse_csr()):
        received, size = sent(original, store)
        assert received.layout == original.layout
        assert torch.equal(received.to_dense(), dense)
        assert size > dense.nbytes
    meta, _ = sent(torch.empty(3, LARGE, device="meta"), store)
    assert (meta.device.type, meta.shape) == ("meta", (3, LARGE))
    tagged = dense.as_subclass(Tagged)
    tagged.note = "kept"
    received, plain = sent((tagged, dense), store)[0]
    assert (type(received), received.note) == (Tagged, "kept")
    assert received.data_ptr() == plain.data_ptr()


@pytest.mark.filterwarnings("ignore:.*deprecated")  # torch, of making one, and of its own way to rebuild one
def test_a_quantized_tensor_crosses(store):
    original = torch.quantize_per_tensor(torch.arange(100_000.0), 0.5, 3, torch.qint8)
    received, _ = sent(original, store)
    assert torch.equal(received.int_repr(), original.int_repr())
    assert received.q_scale() == 0.5


def test_the_senders_tensor_can_still_be_resized(store):
    tensor = torch.zeros(LARGE)
    sent(tensor, store)
    assert tensor.resize_(2 * LARGE).numel() == 2 * LARGE


def test_default_device_of_the_receiver_is_ignored(store):
    packed = pack(torch.ones(LARGE), store=store)
    with torch.device("meta"):
        received = open_packed(packed, store)
    assert received.sum() == LARGE


@pytest.mark.parametrize("by", ["segment", "frames"])
def test_memory_of_another_device_is_fetched_once_and_only_where_it_is_used(store, monkeypatch, by):
    monkeypatch.setattr(tensors, "_device_type", lambda _: "meta")  # as if this were that device
    base = torch.arange(LARGE)
    value = (base, base[5:], torch.empty(0), torch.tensor(3.5), base)
    received, size = sent(value, store, by=by)
    assert all(map(same, value, received))
    assert size < base.nbytes + 2000
    received[0].zero_()
    assert not received[1].any()
    part, size = sent(base[5:10], store, by=by)
    assert same(part, base[5:10])
    assert size < 2000


def test_memory_of_another_device_is_in_the_hosts_memory_in_parts(store, monkeypatch):
    monkeypatch.setattr(tensors, "_device_type", lambda _: "meta")
    monkeypatch.setattr(tensors, "_FETCHED_AT_ONCE", 1 << 20)
    fetch, held, sizes = tensors._SentSlice._fetch, [], []

    def fetch_and_count(sent, low, size):
        held.append(weakref.ref(view := fetch(sent, low, size)))
        sizes.append(size)
        assert sum(reference() is not None for reference in held) == 1, "the part before is freed"
        return view

    monkeypatch.setattr(tensors._SentSlice, "_fetch", fetch_and_count)
    value = [torch.arange(LARGE), torch.arange(LARGE + 5).flip(0)]  # 8 MiB each
    received, _ = sent(value, store)
    assert all(map(same, value, received))
    assert sizes == [1 << 20] * 16 + [40], "every byte is copied once"


def test_tensors_of_a_device_arrive_on_the_receivers_own_if_it_is_asked_for(store, monkeypatch):
    monkeypatch.setattr(tensors, "_device_type", lambda _: "meta")
    weight = torch.nn.Parameter(torch.arange(1.0 * LARGE).reshape(1024, -1))
    weight.group = "decay"
    value = (weight, weight.detach()[5:], weight.detach().t(), torch.empty(0), torch.tensor(3))
    packed = pack(value, store=store, for_new_rank=True)
    received = unpack(packed.payload, packed.frames, unlink=True, folder=store.folder)
    assert all(
        tensor.device.type == "meta" and tensor.shape == sent.shape
        for tensor, sent in zip(received, value, strict=True)
    )
    assert isinstance(received[0], torch.nn.Parameter) and received[0].requires_grad and received[0].group == "decay"
    assert received[2].stride() == value[2].stride() and received[1].storage_offset() == 5 * 1024
    storages = {tensor.untyped_storage()._cdata for tensor in received}
    assert len(storages) == 3, "the first three share one"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
def test_cuda_tensors_arrive_on_the_cpu_and_alias_again(store):
    base = torch.arange(LARGE, device="cuda")
    received, row, empty = sent((base, base[5:], torch.empty(0, device="cuda")), store)[0]
    assert torch.equal(received, base.cpu())
    assert empty.device.type == row.device.type == "cpu"
    received.zero_()
    assert not row.any()
    part, size = sent(base[5:10], store)
    assert torch.equal(part, base[5:10].cpu())
    assert size < 2000


# What people send


def test_a_model_and_its_optimizer_cross_and_go_on_training(store):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 200))
    model[2].weight = torch.nn.Parameter(model[0].weight.t())
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(8, 200)

    def step(model, optimizer):
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    step(model, optimizer)
    (their_model, their_optimizer, state), _ = sent((model, optimizer, optimizer.state_dict()), store)
    assert [step(model, optimizer) for _ in range(3)] == [step(their_model, their_optimizer) for _ in range(3)]
    assert their_model[0].weight.data_ptr() == their_model[2].weight.data_ptr()
    assert state["state"][0]["step"] == 4  # it is their optimizer's own, as it was ours


def test_frames_and_arrays_of_every_kind_cross(store):
    table = pd.DataFrame({"n": np.arange(LARGE), "x": np.arange(LARGE) / 2, "s": ["text"] * LARGE})
    arrays = {
        "objects": np.array([1, "two", None], dtype=object),
        "dates": np.array(["2024-01-01"], dtype="datetime64[D]"),
        "records": np.zeros(50_000, dtype=[("a", "i4"), ("b", "f8")]),
        "fortran": np.asfortranarray(np.arange(LARGE).reshape(1024, -1)),
        "strided": np.arange(LARGE)[::2],
    }
    their_table, received = sent((table, arrays), store)[0]
    pd.testing.assert_frame_equal(table, their_table)
    for name, array in arrays.items():
        assert received[name].dtype == array.dtype
        assert np.array_equal(received[name], array)
        assert received[name].flags.writeable
    their_table["n"] += 1
    their_table.loc[0, "x"] = 7.0


def test_functions_and_classes_from_cells_travel_by_value(store):
    module = types.ModuleType("cell_of_a_notebook")
    exec(
        "SCALE = 3\n"
        "class Point:\n    def __init__(self, x): self.x = x\n    def scaled(self): return self.x * SCALE\n"
        "def make(n):\n    def inner(): return Point(n).scaled()\n    return inner\n",
        module.__dict__,
    )
    received, point = sent((module.make(14), module.Point(1)), store)[0]
    assert received() == 42
    assert point.scaled() == 3
    assert sent(functools.partial(lambda a, b: a - b, 5), store)[0](3) == 2


class Counter:
    count = 0


def test_an_object_that_comes_back_leaves_its_class_as_it_is(store, monkeypatch):
    monkeypatch.setattr(Counter, "__module__", "__main__")  # sent by value, as a class of a cell
    payload = pack(Counter(), store=store)
    monkeypatch.setattr(Counter, "count", 5)
    assert isinstance(open_packed(payload, store), Counter)
    assert Counter.count == 5


def test_a_class_that_comes_back_is_not_entered_into_a_registry_again(store):
    registry = {}

    class Base:
        def __init_subclass__(cls):
            registry[cls.__name__] = cls

    class Entered(Base):
        pass

    assert type(open_packed(pack(Entered(), store=store), store)) is Entered
    assert registry == {"Entered": Entered}


def each_reduction(value):
    return type, (), value.count, None, None, lambda made, count: setattr(made, "count", count)


def test_a_class_of_another_process_is_brought_up_to_date():
    made = [type("Counter", (), {"count": count}) for count in (1, 2)]
    first, second = (reduce_class(each, each_reduction(each), for_new_rank=False) for each in made)
    arrived = type("Counter", (), {})
    assert set_class_content(arrived, first[2]).count == 1
    assert set_class_content(arrived, second[2]).count == 2
    # A rank that takes the place of another one: the classes of its cells are those of its peer.
    copied = type("Counter", (), {})
    assert set_class_content(copied, reduce_class(made[0], each_reduction(made[0]), for_new_rank=True)[2]).count == 1
    assert set_class_content(copied, second[2]).count == 1


# What cannot be sent


class Holder:
    def __init__(self, value):
        self.inner = value


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, value):
        self.inner = value


class Forgetful(Holder):
    """Drops its lock, but not what is in `other`."""

    def __init__(self, other):
        super().__init__(threading.Lock())
        self.other = other

    def __getstate__(self):
        return {"other": self.other}


class Refuser:
    def __reduce__(self):
        raise ValueError("not today.")


class Activation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hook = LOCK


def hidden_in_function():
    lock = threading.Lock()
    return lambda: lock


LOCK = threading.Lock()
UNSENDABLE = [
    (lambda: {"x": {"a": [1, 2, LOCK]}}, (), "'x': _thread.lock at x['a'][2] cannot be pickled: cannot pickle '_thr"),
    (lambda: {"x": LOCK}, (), "'x': _thread.lock cannot be pickled: cannot pickle '_thread.lock' object"),
    (lambda: {"good": 1, "bad": (i for i in ())}, (), "'bad': generator cannot be pickled"),
    (lambda: LOCK, (), "the value: _thread.lock cannot be pickled"),
    (lambda: [1, LOCK], (), "the value: _thread.lock at value[1] cannot"),
    (lambda: [1, LOCK], ("res",), "'res': _thread.lock at res[1] cannot"),
    (lambda: (print, (1, Holder(LOCK)), {}), ("function", "args", "kwargs"), "'args': _thread.lock at args[1].inner"),
    (lambda: {"x": Slotted({1: LOCK})}, (), "_thread.lock at x.inner[1] cannot"),
    (lambda: {"x": Forgetful([LOCK])}, (), "_thread.lock at x.other[0] cannot"),
    (lambda: {"x": collections.OrderedDict(a=LOCK)}, (), "_thread.lock at x['a'] cannot"),
    (lambda: {"x": collections.deque([1, LOCK])}, (), "_thread.lock at x[1] cannot"),
    (lambda: {"x": {(1, LOCK): 2}}, (), "_thread.lock at x's key (1, <unlocked _thread.lock"),
    (lambda: {"x": functools.partial(print, end=LOCK)}, (), "_thread.lock at x.keywords['end'] cannot"),
    (lambda: {"x": Holder(LOCK).__init__}, (), "_thread.lock at x.__self__.inner cannot"),
    (lambda: {"f": hidden_in_function()}, (), "'f': _thread.lock at f's variable lock cannot"),
    (lambda: {"f": eval("lambda a, b=lock: a", {"lock": LOCK})}, (), "'f': _thread.lock at f's variable b cannot"),
    (lambda: {"f": eval("lambda: [lock for _ in '']", {"lock": LOCK})}, (), "at f's variable lock cannot"),
    (lambda: {"m": torch.nn.Sequential(Activation())}, (), "_thread.lock at m._modules['0'].hook cannot"),
    (lambda: {"x": ValueError("no", LOCK)}, (), "_thread.lock at x's argument 2 cannot"),
    (lambda: {"x": [Refuser()]}, (), "Refuser at x[0] cannot be pickled: not today"),
    (lambda: {"x": {"k" * 500: LOCK}}, (), "_thread.lock at x['kkkkkkk"),
]


@pytest.mark.parametrize(("make", "names", "reported"), UNSENDABLE)
def test_unpicklable_part_is_named_with_its_path_and_reason(store, make, names, reported):
    value = make()
    with pytest.raises(TransferError) as caught:
        pack(value, store=store, names=names)
    message = str(caught.value)
    assert message.startswith("cannot send ")
    assert reported in message
    assert "\n" not in message
    assert len(message) < 300


def test_the_search_ends_in_nests_without_end_and_in_circles(store):
    nest = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(TransferError, match=r"cannot send 'x': something inside list at x\[0\]"):
        pack({"x": nest}, store=store)
    circle = [LOCK]
    circle.insert(0, circle)
    with pytest.raises(TransferError, match=r"_thread.lock at x\[1\] cannot"):
        pack({"x": circle}, store=store)
    wide = [*range(100_000), LOCK]
    with pytest.raises(TransferError, match=r"cannot send 'x': something inside list cannot be pickled: cannot pickle"):
        pack({"x": wide}, store=store)
    while nest:  # or its end would be the end of the C stack
        nest = nest.pop()


def test_an_interrupt_while_packing_stays_an_interrupt(store):
    class Slow:
        def __reduce__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack([torch.zeros(LARGE), Slow()], store=store)


# What cannot be opened


def test_error_for_a_missing_module_names_it(store, monkeypatch):
    module = types.ModuleType("only_over_there")
    exec("class Thing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_over_there", module)
    assert type(sent(module.Thing(), store)[0]) is module.Thing
    stream = b"\x80\x05\x8c\x0fonly_over_there\x8c\x05Thing\x93."  # by reference, as of a module that is a file
    payload = Payload((Buffer(len(stream)),))
    assert unpack(payload, [stream], unlink=True, folder=store.folder) is module.Thing
    del module.Thing
    with pytest.raises(TransferError, match=r"'Thing'.*different versions of that module"):
        unpack(payload, [stream], unlink=True, folder=store.folder)
    monkeypatch.delitem(sys.modules, "only_over_there")
    with pytest.raises(TransferError, match=r"needs the module 'only_over_there'.* install it here, or send plain"):
        unpack(payload, [stream], unlink=True, folder=store.folder)


class Grumpy:
    def __reduce__(self):
        return int, ("not a number",)


def test_an_error_while_opening_is_reported_and_the_file_is_gone(store):
    packed = pack([torch.zeros(LARGE), Grumpy()], store=store)
    with pytest.raises(TransferError, match="cannot unpickle the value: ValueError: invalid literal"):
        open_packed(packed, store)


@pytest.mark.parametrize(
    ("buffers", "frames", "message"),
    [
        ((), [], "invalid payload without buffers"),
        ((Buffer(3),), [], "invalid payload of 1 buffers: expected 1 frames, got 0"),
        ((Buffer(3),), [b"abc", b"def"], "invalid payload of 1 buffers: expected 1 frames, got 2"),
        ((Buffer(3),), [b"ab"], "invalid buffer: bytes 0 to 3 do not match a memory of 2 bytes"),
        ((Buffer(3),), [b"abcd"], "invalid buffer: bytes 0 to 3 do not match a memory of 4 bytes"),
        ((Buffer(-1),), [b""], "invalid buffer: bytes 0 to -1 do not match a memory of 0 bytes"),
        ((Buffer(3),), [b"abc"], "invalid payload of 3 bytes, expected a pickle"),
        ((Buffer(0),), [b""], "invalid payload of 0 bytes, expected a pickle"),
        ((Buffer(3, "../x"),), [], "'../x' is not the name of a shared memory file"),
        ((Buffer(3, "segment"),), [], "'segment' is not the name of a shared memory file"),
    ],
)
def test_a_payload_that_does_not_hold_together_is_a_protocol_error(store, buffers, frames, message):
    with pytest.raises(ProtocolError, match=re.escape(message)):
        unpack(Payload(buffers), frames, unlink=True, folder=store.folder)


@pytest.mark.parametrize(("size", "offset"), [(10, 0), (1, 9), (3, -3), (-1, 3), (1 << 40, 0)])
def test_a_buffer_outside_its_file_is_a_protocol_error(store, size, offset):
    segment = store.write([[b"123456789"]])
    with pytest.raises(ProtocolError, match="do not match a memory"):
        unpack(Payload((Buffer(size, segment.name, offset),)), [], unlink=True, folder=store.folder)


def test_a_pickle_that_lacks_its_buffers_is_a_protocol_error(store):
    packed = pack(np.zeros(LARGE), store=None)
    with pytest.raises(ProtocolError, match="expected a pickle"):
        unpack(Payload(packed.payload.buffers[:1]), packed.frames[:1], unlink=True, folder=store.folder)


@pytest.mark.processes
def test_the_notebook_pays_for_no_torch():
    script = (
        "import sys, tempfile, pathlib\n"
        "from rankbook.transport.serialization import pack, unpack\n"
        "packed = pack({'a': [1, lambda: 2]}, store=None)\n"
        "value = unpack(packed.payload, packed.frames, unlink=True, folder=pathlib.Path(tempfile.gettempdir()))\n"
        "assert value['a'][1]() == 2\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


IN_A_CYCLE = """
import gc, torch
from rankbook.runtime.data.loaders import _reduce_tensor
from rankbook.transport.tensors import _SentSlice
tensor = torch.zeros(1000)
sent = _SentSlice(tensor.untyped_storage(), 0, 4000, keep_device=False)
buffers = [_reduce_tensor(tensor)[1][0], sent.buffer]
del sent
while buffers:
    buffer = buffers.pop()
    view = buffer.raw()
    cycle = [buffer, view, view[10:]]
    cycle.append(cycle)
    del buffer, view, cycle
    gc.collect()
"""


@pytest.mark.processes
def test_buffers_in_the_traceback_of_an_interrupt_can_be_collected():
    done = run_code(IN_A_CYCLE)
    assert (done.returncode, done.stderr) == (0, "")
