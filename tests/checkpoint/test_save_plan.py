from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.checkpoint.local_plan import LocalPlan, LocalShard, itemsize
from rankbook.checkpoint.save_plan import PlanCache, plan_save
from rankbook.errors import CheckpointError
from tests.checkpoint.boxes import cuts, replaced, shapes


def chunk(key, global_shape, offset, local, main=True, dtype="float32"):
    return LocalShard(key, global_shape, offset, local, dtype, main)


def declare(*ranks, objects=None, common=None):
    """Return the plans that declare the shards of every rank."""
    count = len(ranks)
    return [
        LocalPlan.of(shards, (objects or [[]] * count)[rank], (common or [""] * count)[rank])
        for rank, shards in enumerate(ranks)
    ]


def refusal(declared, **options):
    with pytest.raises(CheckpointError) as caught:
        plan_save(declared, **options)
    return str(caught.value)


def ranks_in(message):
    """Return the ranks that a message names after its first line, which names all ranks."""
    numbers = set()
    for runs in re.findall(r"ranks? ([0-9][0-9, and-]*)", message.partition("\n")[2]):
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", runs):
            numbers |= set(range(int(low), int(high or low) + 1))
    return numbers


@st.composite
def jobs(draw):
    """Draw tensors over ranks, every chunk with its replicas: the shards of every rank, and their source."""
    world = draw(st.integers(1, 5))
    ranks = [[] for _ in range(world)]
    truth = {}
    for number in range(draw(st.integers(1, 3))):
        global_shape, dtype = draw(shapes()), draw(st.sampled_from(["float32", "bfloat16", "complex64"]))
        truth[f"t/{number}"] = (dtype, global_shape, boxes := draw(cuts(global_shape)))
        for offset, local in boxes:
            holders = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True))
            for position, rank in enumerate(holders):
                ranks[rank].append(chunk(f"t/{number}", global_shape, offset, local, position == 0, dtype))
        if draw(st.booleans()):  # replicas that are cut otherwise than the main ones
            for offset, local in draw(cuts(global_shape)):
                ranks[draw(st.integers(0, world - 1))].append(
                    chunk(f"t/{number}", global_shape, offset, local, False, dtype)
                )
    if len(global_shape) and draw(st.booleans()):  # an empty chunk at the offset of a real one
        ranks[0].insert(0, chunk(f"t/{number}", global_shape, offset, (0, *local[1:]), True, dtype))
    return [draw(st.permutations(shards)) for shards in ranks], truth


@settings(max_examples=80, deadline=None)
@given(jobs(), st.booleans())
def test_every_chunk_is_stored_once_by_a_rank_that_holds_it(job, fully_parallel):
    ranks, truth = job
    plan = plan_save([LocalPlan.unpack(item.pack()) for item in declare(*ranks)], fully_parallel=fully_parallel)
    planned = plan.tensors()
    assert {
        key: (dtype, global_shape, [(offset, local) for offset, local, _ in chunks])
        for key, (dtype, global_shape, chunks) in planned.items()
    } == {key: (dtype, global_shape, sorted(boxes)) for key, (dtype, global_shape, boxes) in truth.items()}
    stored = []
    loads = [0] * len(ranks)
    for rank, shards in enumerate(ranks):
        for position in plan.of_rank(rank).tensors.tolist():
            shard = shards[position]
            assert fully_parallel or shard.is_main
            stored.append((shard.key, shard.global_offset, shard.local_shape, rank))
            elements = 1
            for extent in shard.local_shape:
                elements *= extent
            loads[rank] += elements * itemsize(shard.dtype_name)
    assert sorted(stored) == sorted((key, *element) for key, tensor in planned.items() for element in tensor.chunks)
    assert plan.bytes_per_rank == tuple(loads)


FAULTS = ["hole", "overlap", "second main", "no main", "shape", "axes", "dtype", "outside"]


@settings(max_examples=150, deadline=None)
@given(jobs(), st.sampled_from(FAULTS), st.data())
def test_a_single_fault_is_found_and_named(job, fault, data):
    ranks, truth = job
    mains = [(rank, at) for rank, shards in enumerate(ranks) for at, item in enumerate(shards) if item.is_main]
    rank, at = data.draw(st.sampled_from([(r, i) for r, i in mains if 0 not in ranks[r][i].local_shape]))
    bad = ranks[rank][at]
    key, global_shape, offset, local = bad.key, bad.global_shape, bad.global_offset, bad.local_shape
    words, named = [repr(key)], {rank}
    span = f"[{', '.join(f'{a}:{a + n}' for a, n in zip(offset, local, strict=True)) or '()'}]"
    if fault in {"hole", "overlap", "outside"} and not local:
        fault = "no main"
    if fault == "hole":
        ranks = [[element for element in shards if element[:4] != bad[:4]] for shards in ranks]
        if not any(entry.key == key for shards in ranks for entry in shards):
            return  # nobody holds any of it: then it is no tensor of this checkpoint
        words, named = [*words, "no main replica covers ["], set()
    elif fault == "no main":
        ranks[rank][at] = bad._replace(is_main=False)
        words += ["no main replica covers [", "other replicas are on"]
    elif fault == "second main":
        other = data.draw(st.integers(0, len(ranks) - 1))
        ranks[other].append(bad)
        words, named = [*words, "the main replica of " + span], {rank, other}
    elif fault in {"overlap", "outside"}:
        axis = data.draw(st.integers(0, len(global_shape) - 1))
        wider = bad._replace(local_shape=replaced(local, axis, local[axis] + 1))
        if offset[axis] + local[axis] == global_shape[axis]:
            words.append("is outside the global shape")
        else:
            words.append("overlaps")
        ranks[rank][at] = wider
    else:
        if sum(member.key == key for shards in ranks for member in shards) == 1:
            ranks[0].append(bad._replace(is_main=False))
        new = {
            "shape": {"global_shape": (*global_shape[:-1], global_shape[-1] + 1) if global_shape else (1,)},
            "axes": {"global_shape": (*global_shape, 1)},
            "dtype": {"dtype_name": "int8"},
        }[fault]
        if fault != "dtype" and len(new["global_shape"]) > len(global_shape):
            new |= {"global_offset": (*offset, 0), "local_shape": (*local, 1)}
        ranks[rank][at] = bad._replace(**new)
        words = [*words, "is not the same on all ranks", str(new.get("global_shape", "int8")), str(global_shape)]
    message = refusal(declare(*ranks))
    assert all(word in message for word in words), (words, message)
    assert named <= ranks_in(message), (named, message)
    assert message == refusal(declare(*ranks), fully_parallel=True)
    assert sum(repr(other) in message for other in truth) == 1


@st.composite
def replicated(draw):
    """Draw vectors of different lengths, whole or halved, on some of the ranks; return the shards of every rank."""
    world = draw(st.integers(1, 5))
    ranks = [[] for _ in range(world)]
    for length in draw(st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True)):
        for position, rank in enumerate(draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))):
            ranks[rank].append(chunk(f"t{length}", (length,), (0,), (length,), position == 0, "int8"))
        if length > 1 and draw(st.booleans()):
            ranks[draw(st.integers(0, world - 1))].append(chunk(f"t{length}", (length,), (0,), (1,), False, "int8"))
    return ranks


@settings(max_examples=100, deadline=None)
@given(replicated(), st.randoms())
def test_replicas_are_shared_out_by_bytes_the_largest_first(ranks, chance):
    for shards in ranks:
        chance.shuffle(shards)
    holders, pieces = {}, Counter(element.key for shards in ranks for element in shards)
    for rank, shards in enumerate(ranks):
        for item in shards:
            if item.local_shape == item.global_shape:
                holders.setdefault((item.local_shape[0], item.key), []).append(rank)
    loads, chosen = [0] * len(ranks), {}
    for (length, key), candidates in sorted(holders.items(), key=lambda entry: (pieces[entry[0][1]] > 1, -entry[0][0])):
        chosen[key] = min(candidates, key=lambda rank: (loads[rank], rank))
        loads[chosen[key]] += length
    plan = plan_save(declare(*ranks), fully_parallel=True)
    assert plan.bytes_per_rank == tuple(loads)
    assert {key: tensor.chunks[0].rank for key, tensor in plan.tensors().items()} == chosen


def test_replicas_on_all_ranks_are_spread_over_the_ranks():
    shards = [[chunk(f"t{n}", (4,), (0,), (4,), main=rank == 0) for n in range(8)] for rank in range(4)]
    assert plan_save(declare(*shards), fully_parallel=True).bytes_per_rank == (32,) * 4
    assert plan_save(declare(*shards)).bytes_per_rank == (128, 0, 0, 0)


def test_replica_with_another_chunk_layout_is_not_a_candidate():
    unshared = chunk("own", (400,), (0,), (400,))
    for mains, other in (([(0, 4)], (0, 2)), ([(0, 2), (2, 2)], (1, 2)), ([(0, 1), (1, 3)], (0, 3))):
        shards = [chunk("w", (4,), (at,), (size,)) for at, size in mains]
        replica = chunk("w", (4,), other[:1], other[1:], main=False)
        assert plan_save(declare([unshared, *shards], [replica]), fully_parallel=True).bytes_per_rank == (1616, 0)


def test_a_rank_that_holds_a_chunk_twice_stores_it_once():
    twice = [chunk("w", (4,), (0,), (4,)), chunk("w", (4,), (0,), (4,), main=False)]
    plan = plan_save(declare(twice, twice[1:]), fully_parallel=True)
    assert [plan.of_rank(rank).tensors.tolist() for rank in range(2)] == [[0], []]


def test_tensors_without_elements_are_listed_and_have_no_chunks():
    plan = plan_save(declare([chunk("none", (0, 5), (0, 0), (0, 5))], [chunk("none", (0, 5), (0, 0), (0, 5))]))
    assert plan.tensors() == {"none": ("float32", (0, 5), ())}
    assert plan.of_rank(0).tensors.tolist() == []


def test_ranks_may_hold_nothing():
    assert plan_save(declare([], [])).tensors() == {}
    plan = plan_save(declare([], [chunk("b", (), (), ())], []))
    assert plan.tensors() == {"b": ("float32", (), (((), (), 1),))}
    with pytest.raises(CheckpointError, match="nothing to save"):
        plan_save([])


def test_objects_are_stored_by_their_main_replicas():
    grid = [[LocalShard("rng", (2, 2), (rank // 2, rank % 2))] for rank in range(4)]
    plan = plan_save(declare([], [], [], [], objects=grid), fully_parallel=True)
    assert plan.objects() == {f"rng/shard_{r // 2}.{r % 2}_2.2": r for r in range(4)}
    assert [plan.of_rank(rank).objects.tolist() for rank in range(4)] == [[0]] * 4


def test_a_grid_of_objects_is_covered_exactly_once():
    grid = [[LocalShard("rng", (2, 2), (rank // 2, rank % 2))] for rank in range(4)]
    grid[3] = grid[2]
    message = refusal(declare([], [], [], [], objects=grid))
    assert "object 'rng' (global shape (2, 2))" in message
    assert "ranks 2-3 all hold the main replica of [1:2, 0:1]" in message
    assert "no main replica covers [1:2, 1:2]" in message


@pytest.mark.parametrize(
    ("common", "words"),
    [
        (["a", "a", "b"], "the common part differs between ranks (one value on ranks 0-1, another on rank 2)"),
        (
            [{"a": "1", "step": "7"}, {"a": "1", "step": "7"}, {"a": "1", "step": "8"}],
            "common value 'step' differs between ranks (one value on",
        ),
        ([{"state.w.prev_loss": "1"}, {"state.w.prev_loss": "2"}], "let its closure return the same loss on all ranks"),
        ([{"a": "1"}, {"a": "1"}, {"a": "1", "extra": "8"}], "'extra' exists on rank 2, but is missing on ranks 0-1"),
    ],
)
def test_common_parts_that_differ_are_named_with_their_ranks(common, words):
    assert words in refusal(declare(*([] for _ in common), common=common))


def test_error_message_lists_missing_duplicate_and_differing_chunks():
    common = {"key": "w", "global_shape": (4, 8)}
    ranks = [
        [chunk(**common, offset=(0, 0), local=(2, 8)), chunk("v", (2,), (0,), (2,))],
        [chunk(**common, offset=(0, 0), local=(2, 8)), chunk("v", (3,), (0,), (3,))],
        [chunk(**common, offset=(2, 0), local=(2, 8), main=False)] * 2,
        [chunk(**common, offset=(1, 4), local=(2, 4))],
    ]
    assert refusal(declare(*ranks, common=["a", "a", "b", "a"])).splitlines() == [
        "the shards of ranks 0-3 do not form a complete checkpoint; nothing was written:",
        (
            "  tensor 'v' is not the same on all ranks: float32, global shape (2,) on rank 0; "
            "float32, global shape (3,) on rank 1"
        ),
        (
            "  tensor 'w' (float32, global shape (4, 8)): "
            "ranks 0-1 all hold the main replica of [0:2, 0:8]: only one may have replica_id 0; "
            "rank 0's main chunk [0:2, 0:8] overlaps rank 3's [1:3, 4:8]; "
            "no main replica covers [2:4, 0:4]; other replicas are on rank 2; "
            "no main replica covers [3:4, 4:8]; other replicas are on rank 2"
        ),
        (
            "  the common part differs between ranks (one value on ranks 0-1,3, another on rank 2): "
            "make it equal, or wrap it in a ShardedObject"
        ),
    ]


def test_error_lists_all_faults_up_to_a_limit():
    message = refusal(declare([chunk(f"t{n}", (2,), (0,), (1,)) for n in range(20)]))
    assert message.count("no main replica covers [1:2]") == 8
    assert message.endswith("and 12 more keys")


def test_every_small_wrong_cut_of_a_square_is_found():
    """Try all sets of boxes in a 2 x 2 square. A set is accepted exactly if it covers each cell once."""
    boxes = [((y, x), (h, w)) for y in range(2) for x in range(2) for h in (1, 2) for w in (1, 2)]
    boxes = [(at, size) for at, size in boxes if at[0] + size[0] <= 2 and at[1] + size[1] <= 2]
    for chosen in range(1, 1 << len(boxes)):
        chosen_boxes = [item for bit, item in enumerate(boxes) if chosen >> bit & 1]
        cells = [
            (y, x)
            for at, size in chosen_boxes
            for y in range(at[0], at[0] + size[0])
            for x in range(at[1], at[1] + size[1])
        ]
        declared = declare([chunk("w", (2, 2), at, size) for at, size in chosen_boxes])
        if sorted(cells) == [(0, 0), (0, 1), (1, 0), (1, 1)]:
            plan_save(declared)
        else:
            assert ("covers [" in refusal(declared)) == (len(set(cells)) < 4)
            assert ("overlaps" in refusal(declared)) == (len(set(cells)) < len(cells))


def test_plan_of_the_previous_save_is_reused():
    ranks = [[chunk("w", (4,), (2 * rank,), (2,))] for rank in range(2)]
    first, cache = declare(*ranks, common=["1", "1"]), PlanCache()
    plan = plan_save(first)
    cache.put(plan, [item.signature() for item in first])

    def recalled(*ranks, common=("2", "2"), **options):
        return cache.get([item.signature() for item in declare(*ranks, common=common)], **options)

    assert recalled(*ranks) is plan  # a common part may change with each save
    assert recalled(*ranks, common=("2", "3")) is None
    assert recalled(*ranks, fully_parallel=True) is None
    assert recalled(*reversed(ranks)) is None
    for change in (
        {"key": "v"},
        {"dtype_name": "float16"},
        {"global_shape": (5,)},
        {"global_offset": (1,)},
        {"local_shape": (3,)},
        {"is_main": False},
    ):
        assert recalled(ranks[0], [ranks[1][0]._replace(**change)]) is None, change
    assert recalled(ranks[0], ranks[1] * 2) is None
    assert PlanCache().get([]) is None


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("complex64", 8), ("complex32", 4), ("bool", 1), ("uint8", 1), ("int64", 8),
     ("float8_e4m3fn", 1), ("float8_e8m0fnu", 1), ("float4_e2m1fn_x2", 1)],
)  # fmt: skip
def test_the_size_of_an_element(dtype, size):
    assert itemsize(dtype) == size
