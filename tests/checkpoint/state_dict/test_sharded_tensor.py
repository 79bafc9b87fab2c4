"""Test the sharding map: offsets and shapes, errors in their order, and round trips."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.state_dict import sharded_tensor
from rankbook.checkpoint.state_dict.sharded_tensor import (
    CheckpointError,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from rankbook.errors import RankbookError

F = ShardedTensor.from_rank_offsets
z = torch.zeros


def uneven(**more):
    return ShardedTensor("k", None, torch.float32, (3, 8), (10, 8), (3, 0), (4, 1), **more)


def test_two_axes_cut_by_rank_offsets():
    shard = F("k", z(4, 8), (0, 1, 4), (1, 0, 2))
    assert (shard.global_shape, shard.global_offset, shard.axis_fragmentations) == ((16, 16), (4, 0), (4, 2))
    assert shard.global_slice() == (slice(4, 8), slice(0, 8))
    assert shard.local_chunk_offset_in_global() == (1, 0)
    assert shard.max_allowed_chunks() == (4, 8)
    assert shard.has_regular_grid
    assert (shard.key, shard.dtype, shard.local_shape, shard.replica_id) == ("k", torch.float32, (4, 8), 0)


def test_a_prepended_axis():
    shard = F("k", z(3, 5), (0, 2, 6), (1, 1, 2), prepend_axis_num=1)
    assert (shard.global_shape, shard.global_offset) == ((6, 6, 5), (2, 3, 0))
    assert shard.global_slice() == (2, slice(3, 6), slice(0, 5))
    assert shard.local_chunk_offset_in_global() == (2, 1, 0)


def test_two_prepended_axes():
    shard = F("k", z(3, 5), (0, 1, 2), (1, 2, 3), (3, 0, 4), prepend_axis_num=2)
    assert (shard.global_shape, shard.global_offset) == ((2, 3, 3, 20), (1, 2, 0, 0))


def test_a_scalar_with_a_prepended_axis():
    shard = F("k", torch.tensor(1.0), (0, 5, 8), prepend_axis_num=1)
    assert (shard.global_shape, shard.global_offset, shard.global_slice()) == ((8,), (5,), (5,))


@pytest.mark.parametrize(
    ("dim", "start", "length", "local", "global_shape", "offset"),
    [(0, 1, 2, (2, 8), (8, 16), (2, 0)), (1, 0, 4, (4, 4), (16, 8), (4, 0)), (-1, 0, 4, (4, 4), (16, 8), (4, 0))],
)
def test_narrow_shrinks_the_global_tensor_too(dim, start, length, local, global_shape, offset):
    data = torch.arange(32.0).reshape(4, 8)
    [shard] = F("k", data, (0, 1, 4), (1, 0, 2)).narrow(dim, start, length)
    assert (shard.local_shape, shard.global_shape, shard.global_offset) == (local, global_shape, offset)
    assert shard.data.equal(data.narrow(dim, start, length))
    assert shard.data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()


def test_a_grid_that_does_not_divide_has_an_index_and_no_chunk_size():
    shard = uneven()
    assert shard.local_chunk_offset_in_global() == (1, 0)
    with pytest.raises(CheckpointError, match=r"'k': axis 0: 10 elements % 4 fragments = 2"):
        shard.max_allowed_chunks()
    assert uneven(allow_shape_mismatch=True).max_allowed_chunks() == (2, 8)


def test_an_objects_unique_key():
    assert ShardedObject("opt.rng", b"", (2, 4), (1, 3)).unique_key == "opt.rng/shard_1.3_2.4"


def test_a_shape_that_is_too_short_is_filled():
    shard = ShardedObject.empty_from_unique_key("k/shard_1.2.3_4.5")
    assert (shard.global_offset, shard.global_shape, shard.data) == ((1, 2, 3), (4, 5, -1), None)
    assert ShardedObject.empty_from_unique_key("k/shard_1.2.3_4").global_shape == (4, -1, -1)


ERRORS = [
    # what is wrong, from the first that is found to the last; each message is found while all later ones hold too
    ("data has dtype torch.float64, expected torch.float32", {"data": z(2, 4, dtype=torch.float64)}),
    (r"data has shape \(2, 4\), expected \(2, 3\)", {"local_shape": (2, 3)}),
    (r"2 axes in global_shape != 3 axes in global_offset", {"global_shape": (8, 8)}),
    (r"2 local axes \+ 2 prepended != 3 global axes", {"prepend_axis_num": 2}),
    (r"axis 1: offset 1 % local size 2 = 1", {"global_offset": (0, 1, 0)}),
    ("flattened_range is no longer supported", {"flattened_range": slice(0, 3)}),
    (r"outside the global tensor: axis 1: offset 4 \+ size 2 is not within 0..5", {"global_shape": (1, 5, 8)}),
    (r"axis 2: 8 elements in 4 fragments make chunks of 2, not 4", {"axis_fragmentations": (1, 4, 4)}),
]


@pytest.mark.parametrize("first", range(len(ERRORS)), ids=[output for output, _ in ERRORS])
def test_errors_come_in_their_order(first):
    good = {
        "data": z(2, 4),
        "local_shape": (2, 4),
        "global_shape": (1, 8, 8),
        "global_offset": (0, 4, 0),
        "axis_fragmentations": (1, 4, 2),
        "prepend_axis_num": 1,
    }
    ShardedTensor("k", dtype=torch.float32, **good)
    wrong = [change for _, change in ERRORS[first:]]
    with pytest.raises(CheckpointError, match=ERRORS[first][0]) as caught:
        ShardedTensor("k", dtype=torch.float32, **good | wrong[0])
    assert isinstance(caught.value, RankbookError)
    assert "'k'" in str(caught.value)
    together = dict(good)
    for change in reversed(wrong):
        together |= {name: value for name, value in change.items() if name not in {"global_shape", "global_offset"}}
    together |= wrong[0]
    if first != 1:  # with a flattened range, of whatever shape, that is what is told
        with pytest.raises(CheckpointError, match=ERRORS[first][0]):
            ShardedTensor("k", dtype=torch.float32, **together)


def test_shard_without_data_is_validated_by_its_fields():
    shard = ShardedTensor("k", None, torch.float32, (2, 4), (8, 4), (2, 0), None)
    assert not shard.has_regular_grid
    with pytest.raises(CheckpointError, match="irregular"):
        shard.max_allowed_chunks()


def test_an_irregular_chunk_has_a_slice_and_no_index():
    shard = ShardedTensor("k", None, torch.float32, (3,), (8,), (5,), None)
    assert shard.global_slice() == (slice(5, 8),)
    with pytest.raises(CheckpointError, match="axis 0: offset 5 % local size 3 = 2"):
        shard.local_chunk_offset_in_global()


def test_axes_of_size_zero_are_skipped():
    shard = ShardedTensor("k", z(0, 4), torch.float32, (0, 4), (0, 8), (0, 4), (3, 2))
    assert shard.local_chunk_offset_in_global() == (0, 1)
    assert F("k", z(0, 4), (0, 1, 3), (1, 1, 2)) is not shard
    assert ShardedTensor("k", None, torch.float32, (0, 4), (10, 4), (10, 0), None).global_slice()[0] == slice(10, 10)


def test_bounds_are_not_checked_with_allow_shape_mismatch():
    ShardedTensor("k", None, torch.float32, (4,), (6,), (4,), (2,), allow_shape_mismatch=True)
    with pytest.raises(CheckpointError, match="within"):
        ShardedTensor("k", None, torch.float32, (4,), (6,), (4,), (2,))


@pytest.mark.parametrize(
    "rank_offsets",
    [[(-1, 0, 2)], [(2, 0, 2)], [(0, -1, 2)], [(0, 2, 2)], [(0, 0, 0)], [(0, 0, 2), (0, 1, 2)]],
)
def test_wrong_rank_offsets_name_the_key(rank_offsets):
    with pytest.raises(CheckpointError, match=r"shard of 'net\.w'"):
        F("net.w", z(2, 4), *rank_offsets)


def test_rank_offsets_take_no_flattened_range():
    with pytest.raises(CheckpointError, match="flattened_range"):
        F("k", z(2, 4), flattened_range=slice(0, 2))


def test_more_fields_are_passed_on():
    shard = F("k", z(2, 4), replica_id=(1, 0), allow_shape_mismatch=True)
    assert (shard.replica_id, shard.allow_shape_mismatch) == ((1, 0), True)


def test_repr_omits_data_and_init_data_allocates_it():
    shard = F("k", torch.full((2, 2), 7.0), (0, 1, 2))
    assert "7." not in repr(shard)
    bare = shard.without_data()
    assert (bare.data, bare.global_shape, shard.data is None) == (None, (4, 2), False)
    bare.init_data("cpu", torch.ones)
    assert bare.data.equal(torch.ones(2, 2)) and bare.data.dtype == bare.dtype
    bare.init_data("cpu")
    assert bare.data.equal(torch.ones(2, 2))
    bare.validate_metadata_integrity()


@pytest.mark.parametrize("call", [(2, 0, 1), (-3, 0, 1), (0, -1, 1), (0, 3, 2), (0, 0, -1)])
def test_narrow_out_of_bounds_is_an_error(call):
    with pytest.raises(CheckpointError, match=r"narrow\(.*\) is out of range for"):
        F("k", z(4, 8)).narrow(*call)


def test_narrow_requires_complete_chunks():
    with pytest.raises(CheckpointError, match="multiples of its local size 3"):
        uneven().narrow(0, 0, 2)
    assert uneven().narrow(1, 2, 2)[0].global_shape == (10, 2)


@st.composite
def cut(draw):
    """Draw a global tensor and all its shards on a regular grid, with the first axes prepended."""
    axes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
    prepended = draw(st.integers(0, len(axes)))
    sizes = [1 if axis < prepended else size for axis, (size, _) in enumerate(axes)]
    counts = [count for _, count in axes]
    tensor = torch.arange(
        torch.Size([size * count for size, count in zip(sizes, counts, strict=True)]).numel(), dtype=torch.float32
    ).reshape([size * count for size, count in zip(sizes, counts, strict=True)])
    shards = []
    for index in torch.cartesian_prod(*(torch.arange(count) for count in counts)).reshape(-1, len(counts)).tolist():
        at = tuple(slice(i * n, i * n + n) for i, n in zip(index, sizes, strict=True))
        data = tensor[at].reshape(sizes[prepended:])
        offsets = list(zip(range(len(counts)), index, counts, strict=True))
        shards.append((tuple(index), F("w", data, *offsets, prepend_axis_num=prepended)))
    return tensor, prepended, shards


@given(cut())
@settings(max_examples=40, deadline=None)
def test_every_shard_is_its_slice_of_the_global_tensor(example):
    tensor, _, shards = example
    rebuilt = torch.full_like(tensor, -1)
    for index, shard in shards:
        assert shard.global_shape == tuple(tensor.shape)
        assert shard.local_chunk_offset_in_global() == index
        assert tensor[shard.global_slice()].equal(shard.data)
        rebuilt[shard.global_slice()] = shard.data
    assert rebuilt.equal(tensor)


@given(cut(), st.data())
@settings(max_examples=40, deadline=None)
def test_narrowed_shards_make_up_the_narrowed_global_tensor(example, data):
    tensor, prepended, shards = example
    local = shards[0][1].local_shape
    if not local:
        return
    dim = data.draw(st.integers(0, len(local) - 1))
    start = data.draw(st.integers(0, local[dim] - 1))
    length = data.draw(st.integers(1, local[dim] - start))
    narrowed = [shard.narrow(dim, start, length)[0] for _, shard in shards]
    chunks = tensor.split(local[dim], dim + prepended)
    expected = torch.cat([chunk.narrow(dim + prepended, start, length) for chunk in chunks], dim + prepended)
    for shard in narrowed:
        assert shard.global_shape == tuple(expected.shape)
        assert expected[shard.global_slice()].equal(shard.data)
    counts = shards[0][1].axis_fragmentations
    assert all(shard.axis_fragmentations == counts for shard in narrowed)


names = st.text(st.sampled_from("ab/_.0shard"), min_size=1, max_size=20)
grids = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=4)


@given(names, grids, st.sampled_from([0, (1, 0)]))
@settings(max_examples=100, deadline=None)
def test_a_unique_key_is_inverted(key, grid, replica_id):
    shape, offset = tuple(a for a, _ in grid), tuple(b for _, b in grid)
    shard = ShardedObject(key, None, shape, offset, replica_id)
    assert ShardedObject.empty_from_unique_key(shard.unique_key, replica_id) == shard


@pytest.mark.parametrize(
    "text",
    ["k", "k/shard_1", "k/shard_1_2_3", "k/piece_1_2", "k/shard_a_b", "shard_0_1", "k/shard_1_2.3", "k/shard_1._2"],
)
def test_invalid_unique_key_is_an_error(text):
    with pytest.raises(CheckpointError, match=re.escape(repr(text))):
        ShardedObject.empty_from_unique_key(text)


def test_an_objects_axes_agree():
    with pytest.raises(CheckpointError, match=r"'k'.*\(2,\).*\(0, 1\)"):
        ShardedObject("k", 1, (2,), (0, 1))
    shard = ShardedObject("k", [1], (2,), (0,), 3)
    assert shard.without_data() == ShardedObject("k", None, (2,), (0,), 3)
    assert (str(shard), shard.data) == ("ShardedObject(key='k')", [1])


@pytest.mark.parametrize(
    ("replica_id", "main"),
    [(0, True), (1, False), ((), True), ((0, 0), True), ((0, 1), False), ([0], True), (iter([0, 2]), False)],
)
def test_the_main_replica_has_zeros_only(replica_id, main):
    assert is_main_replica(replica_id) is main


def test_a_local_object_is_given_back():
    value = object()
    assert LocalNonpersistentObject(value).unwrap() is value


def test_abstract_base_class_cannot_be_instantiated():
    with pytest.raises(TypeError, match="abstract"):
        ShardedBase()


def upstream():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it would rather have
        sys.modules.pop("megatron.core.dist_checkpointing.mapping", None)
        return pytest.importorskip(
            "megatron.core.dist_checkpointing.mapping", reason="megatron-core is not installed", exc_type=ImportError
        )


@pytest.mark.slow
def test_names_fields_and_results_are_megatrons():
    megatron = upstream()
    public = [
        name for name in dir(megatron) if inspect.isclass(getattr(megatron, name)) and name.startswith(("Sh", "Lo"))
    ]
    assert set(public) <= set(dir(sharded_tensor))
    for name in ("ShardedTensor", "ShardedObject", "ShardedTensorFactory"):
        our, their = getattr(sharded_tensor, name), getattr(megatron, name)
        described = [
            [(field.name, field.default, field.repr, field.compare) for field in dataclasses.fields(kind)]
            for kind in (our, their)
        ]
        assert str(described[0]).replace("rankbook", "") == str(described[1]), name
        assert {var for var in vars(their) if not var.startswith("_")} <= set(dir(our)), name
    calls = [
        ((z(4, 8), (0, 1, 4), (1, 0, 2)), {}),
        ((z(3, 5), (0, 2, 6), (1, 1, 2)), {"prepend_axis_num": 1, "replica_id": (0, 2)}),
        ((z(3, 5), (0, 1, 2), (1, 2, 3), (3, 0, 4)), {"prepend_axis_num": 2}),
        ((torch.tensor(1.0), (0, 5, 8)), {"prepend_axis_num": 1, "allow_shape_mismatch": True}),
    ]
    for args, named in calls:
        our, their = F("k", *args, **named), megatron.ShardedTensor.from_rank_offsets("k", *args, **named)
        assert vars(our) == vars(their)
        assert repr(our) == repr(their)
        for method in ("global_slice", "local_chunk_offset_in_global", "max_allowed_chunks"):
            assert getattr(our, method)() == getattr(their, method)()
        if our.local_shape:
            ours, megatron_shard = our.narrow(0, 1, 2)[0].without_data(), their.narrow(0, 1, 2)[0].without_data()
            assert vars(ours) == vars(megatron_shard)
    shard = ShardedObject("k", None, (2, 4), (1, 3))
    assert vars(megatron.ShardedObject.empty_from_unique_key(shard.unique_key)) == vars(shard)
    assert list(inspect.signature(ShardedTensorFactory).parameters) == list(
        inspect.signature(megatron.ShardedTensorFactory).parameters
    )
    assert str(shard) == str(megatron.ShardedObject("k", None, (2, 4), (1, 3)))


def test_package_defines_its_public_names():
    import rankbook.checkpoint

    assert {name for name in rankbook.checkpoint.__all__ if getattr(rankbook.checkpoint, name, None) is None} == set()
    assert set(rankbook.checkpoint.__all__) <= set(dir(rankbook.checkpoint)) <= vars(rankbook.checkpoint).keys()
    assert rankbook.checkpoint.ShardedTensor is ShardedTensor
    with pytest.raises(AttributeError, match="no attribute 'ShardedTree'"):
        rankbook.checkpoint.ShardedTree  # noqa: B018 - to ask is the test
