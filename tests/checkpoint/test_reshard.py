"""Test loads from any grid of ranks onto any other, bit for bit, with simulated ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.format.manifest import PIECE
from rankbook.checkpoint.load_plan import plan_read
from rankbook.checkpoint.loading import CheckpointRead, find_checkpoint
from rankbook.checkpoint.local_state import LocalTensor
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor, ShardedTensorFactory
from rankbook.errors import CheckpointError
from tests.checkpoint.boxes import cuts, shapes
from tests.checkpoint.simulated import InMemory, load_ranks, save_ranks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch says so at its first use

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.int64,
]


def numbered(shape, dtype, start=0):
    """Return a tensor whose elements all have different bytes, NaNs and infinities among them."""
    count = math.prod(shape)
    if dtype is torch.bool:
        return (torch.arange(count) * 7 % 3 == 1).reshape(shape)
    size = dtype.itemsize
    data = (torch.arange(count * size) * 37 + start * 11 + torch.arange(count * size) // 251) % 256
    return data.to(torch.uint8).view(dtype).reshape(shape)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


def part(tensor, box):
    return tensor[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]


def shard(key, data, tensor, offset, **more):
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(tensor.shape), tuple(offset), None, **more)


def spread(entries, ranks, kind=dict):
    """Distribute the entries over the ranks in turn."""
    states = [{} for _ in range(ranks)]
    for number, entry in enumerate(entries):
        states[number % ranks][f"{entry.key} {number}"] = entry
    return states


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_boxes_on_any_ranks_become_any_others(data):
    tensors = []
    storage = InMemory()
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(shapes())
        dtype = data.draw(st.sampled_from(DTYPES))
        tensors.append((f"t{number}", numbered(shape, dtype, number), data.draw(cuts(shape)), data.draw(cuts(shape))))
    saving, loading = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    strided = data.draw(st.booleans())

    def memory(values):
        """Return a copy of the values, in every other element of larger memory if `strided`."""
        if not strided or not values.ndim:
            return values.clone()
        larger = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
        larger[..., ::2] = values
        return larger[..., ::2]

    states = spread(
        [shard(key, memory(part(tensor, box)), tensor, box[0]) for key, tensor, boxes, _ in tensors for box in boxes],
        saving,
    )
    save_ranks(states, storage, fully_parallel=data.draw(st.booleans()))
    requests, expected = [], []
    for key, tensor, _, boxes in tensors:
        for box in boxes:
            goal = part(tensor, box)
            requests.append(shard(key, memory(torch.zeros_like(goal)), tensor, box[0]))
            expected.append(goal)
    verify = data.draw(st.booleans())
    load_ranks(spread(requests, loading), storage, verify=verify)
    for entry, goal in zip(requests, expected, strict=True):
        assert bits(entry.data) == bits(goal), entry


def grid(key, tensor, counts, data=True, **more):
    """The shards of a grid, rank by rank."""
    sizes = [size // count for size, count in zip(tensor.shape, counts, strict=True)]
    shards = []
    for coordinates in itertools.product(*map(range, counts)):
        box = [at * size for at, size in zip(coordinates, sizes, strict=True)], sizes
        offsets = [(axis, at, count) for axis, (at, count) in enumerate(zip(coordinates, counts, strict=True))]
        box_data = part(tensor, box)
        shards.append(
            ShardedTensor.from_rank_offsets(
                key, box_data.clone() if data else torch.zeros_like(box_data), *offsets, **more
            )
        )
    return shards


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("before", "after"), [((4, 1), (3, 1)), ((2, 2), (1, 3)), ((1, 1), (4, 1)), ((4, 3), (1, 1))])
def test_a_grid_becomes_another_grid(before, after, dtype):
    tensor, storage = numbered((12, 6), dtype), InMemory()
    save_ranks([{"w": item} for item in grid("w", tensor, before)], storage)
    requests = grid("w", tensor, after, data=False)
    loaded = load_ranks([{"w": element} for element in requests], storage)
    for state, goal in zip(loaded, grid("w", tensor, after), strict=True):
        assert state["w"].dtype == dtype
        assert bits(state["w"]) == bits(goal.data)


def test_scalars_empty_tensors_and_empty_chunks():
    storage, tensor = InMemory(), numbered((3, 4), torch.float32)
    empty = torch.zeros(0, 4)

    def state_of(fill, rank, cut):
        rows = tensor[cut[rank] : cut[rank + 1]]
        return {
            "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.5 if fill else 0.0), replica_id=rank),
            "empty": ShardedTensor.from_rank_offsets("empty", empty.clone(), replica_id=rank),
            "rows": shard("rows", rows.clone() if fill else torch.zeros_like(rows), tensor, (cut[rank], 0)),
        }

    save_ranks([state_of(True, rank, [0, 0, 2, 3, 3]) for rank in range(4)], storage)
    for state, cut in zip(
        load_ranks([state_of(False, rank, [0, 1, 1, 3]) for rank in range(3)], storage),
        [(0, 1), (1, 1), (1, 3)],
        strict=True,
    ):
        assert state["scalar"].item() == 2.5
        assert state["empty"].shape == (0, 4)
        assert torch.equal(state["rows"], tensor[slice(*cut)])


def test_prepended_axes_are_one_more_place_to_cut():
    """Save the layers of a pipeline, one on every rank, and load them as one tensor, and two on every rank."""
    tensor, storage = numbered((4, 3, 5), torch.bfloat16), InMemory()
    save_ranks(
        [
            {"w": ShardedTensor.from_rank_offsets("layers", tensor[rank].clone(), (0, rank, 4), prepend_axis_num=1)}
            for rank in range(4)
        ],
        storage,
    )
    (all_of_it,) = load_ranks([{"w": grid("layers", tensor, (1, 1, 1), data=False)[0]}], storage)
    assert bits(all_of_it["w"]) == bits(tensor)
    pairs = load_ranks([{"w": element} for element in grid("layers", tensor, (2, 1, 1), data=False)], storage)
    assert bits(torch.cat([pair["w"] for pair in pairs])) == bits(tensor)
    cut = [
        {
            "w": ShardedTensor.from_rank_offsets(
                "layers", torch.zeros(3, 1).bfloat16(), (0, layer, 4), (2, column, 5), prepend_axis_num=1
            )
        }
        for layer in range(4)
        for column in range(5)
    ]
    columns = [item["w"] for item in load_ranks(cut, storage)]
    assert bits(torch.stack([torch.cat(columns[at : at + 5], dim=1) for at in range(0, 20, 5)])) == bits(tensor)


def test_a_tensor_of_another_size_keeps_what_both_have():
    storage, tensor = InMemory(), numbered((10, 3), torch.float32)
    save_ranks([{"w": element} for element in grid("w", tensor, (2, 1))], storage)
    for rows in (6, 16):
        requests = [
            {"w": entry}
            for entry in grid("w", torch.full((rows, 3), 9.0), (2, 1), data=False, allow_shape_mismatch=True)
        ]
        for item in requests:
            item["w"].data.fill_(7.0)
        loaded = torch.cat([rank["w"] for rank in load_ranks(requests, storage)])
        assert bits(loaded[: min(rows, 10)]) == bits(tensor[:rows])
        assert not loaded[10:].any()
    with pytest.raises(CheckpointError, match=r"'w'.*\(10, 3\).*\(6, 3\)"):
        load_ranks([{"w": grid("w", torch.zeros(6, 3), (1, 1))[0]}], storage)


def test_another_dtype_is_an_error_or_is_cast():
    storage, tensor = InMemory(), torch.arange(12.0).reshape(4, 3)
    save_ranks([{"w": item} for item in grid("w", tensor, (2, 1))], storage)
    request = {"w": grid("w", torch.zeros(4, 3, dtype=torch.bfloat16), (1, 1))[0]}
    with pytest.raises(CheckpointError, match=r"'w'.*float32.*bfloat16.*\(rank 0\)"):
        load_ranks([request], storage)
    (loaded,) = load_ranks([request], storage, cast=True)
    assert loaded["w"].dtype == torch.bfloat16
    assert torch.equal(loaded["w"].float(), tensor)


def test_memory_that_holds_its_values_turned_is_filled_with_them():
    storage, tensor = InMemory(), torch.arange(8.0).reshape(2, 4) + 1j * torch.arange(8).reshape(2, 4)
    save_ranks([{"w": grid("w", tensor.conj(), (1, 1))[0], "i": grid("i", tensor.conj().imag, (1, 1))[0]}], storage)
    into, imaginary = (
        torch.zeros(2, 4, dtype=torch.complex64).conj(),
        torch.zeros(2, 4, dtype=torch.complex64).conj().imag,
    )
    assert into.is_conj()
    assert imaginary.is_neg()
    load_ranks([{"w": shard("w", into, tensor, (0, 0)), "i": shard("i", imaginary, tensor, (0, 0))}], storage)
    assert torch.equal(into, tensor.conj())
    assert torch.equal(imaginary, -tensor.imag)


def test_factory_merges_its_parts_on_another_grid():
    """Store a fused weight, gate over up, as two tensors, both of them sharded over the ranks."""
    storage, gate, up = InMemory(), numbered((6, 2), torch.float32), numbered((6, 2), torch.float32, 5)

    def fused(rank, ranks, fill):
        rows = slice(6 // ranks * rank, 6 // ranks * (rank + 1))
        data = torch.cat([gate[rows], up[rows]])

        def build(key, tensor, replica_id, _):
            return [
                ShardedTensor.from_rank_offsets(f"{key}.{name}", half_tensor, (0, rank, ranks), replica_id=replica_id)
                for name, half_tensor in zip(("gate", "up"), tensor.chunk(2), strict=True)
            ]

        return {"w": ShardedTensorFactory("w", data if fill else torch.zeros_like(data), build, torch.cat)}, data

    save_ranks([fused(rank, 3, True)[0] for rank in range(3)], storage)
    states = load_ranks([fused(rank, 2, False)[0] for rank in range(2)], storage)
    for rank, state in enumerate(states):
        assert bits(state["w"]) == bits(fused(rank, 2, True)[1])


def test_objects_stay_on_their_grid():
    storage = InMemory()
    save_ranks([{"rng": ShardedObject("rng", {"of": rank}, (3,), (rank,)), "step": 5} for rank in range(3)], storage)
    states = load_ranks([{"rng": ShardedObject("rng", None, (3,), (at,)), "step": 0} for at in (2, 0, 1)], storage)
    assert [item["rng"]["of"] for item in states] == [2, 0, 1]
    assert all(element["step"] == 5 for element in states)


@pytest.mark.parametrize("verify", [True, False])
def test_partial_load_of_a_large_chunk_reads_little_more_than_requested(verify):
    storage = InMemory()
    tensor = torch.arange(5_000_000, dtype=torch.int32).reshape(2500, 2000)  # 20 MB
    save_ranks([{"w": grid("w", tensor, (1, 1))[0]}], storage)
    rows = shard("w", torch.zeros(500, 2000, dtype=torch.int32), tensor, (1003, 0))  # 4 MB
    local_tensor, checkpoint = LocalTensor.of(rows), find_checkpoint(storage, "latest")
    before, fetch = storage.read_bytes, CheckpointRead(checkpoint, verify=verify)
    fetch.read_tensors(plan_read([local_tensor.read_request()], checkpoint.manifest), [local_tensor])
    fetch.raise_damage()
    assert torch.equal(rows.data, tensor[1003:1503])
    most = 2 * PIECE + 4096 if verify else 0
    assert rows.data.nbytes <= storage.read_bytes - before <= rows.data.nbytes + most


def test_bytes_between_columns_are_read_once():
    storage = InMemory()
    tensor = torch.arange(5_000_000, dtype=torch.int32).reshape(2500, 2000)
    save_ranks([{"w": element} for element in grid("w", tensor, (2, 1))], storage)
    requests = [{"w": item} for item in grid("w", tensor, (1, 4), data=False)]
    before = storage.read_bytes
    loaded = load_ranks(requests[1:2], storage)
    assert torch.equal(loaded[0]["w"], tensor[:, 500:1000])
    passes = 2  # the checksums of all, then the bytes
    assert storage.read_bytes - before < passes * (tensor.nbytes + 2 * PIECE) + 50_000
