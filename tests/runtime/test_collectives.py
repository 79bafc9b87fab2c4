"""Test the results on every rank. Invalid data raises an error on every rank, and the group stays usable."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from rankbook import control_collectives
from rankbook.errors import InvalidArgument, TransferError
from rankbook.runtime import collectives
from rankbook.runtime.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from rankbook.runtime.process_state import PartialState
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes

ODD_TYPES = (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64)


def test_collectives_of_one_process_are_the_identity_with_the_same_shape_rules():
    PartialState(cpu=True)
    x = torch.ones(2, 3, requires_grad=True)
    data = {"x": x, "l": [torch.tensor(4)]}
    assert gather(data)["x"] is x
    assert gather(data)["l"][0].tolist() == [4]
    assert reduce(data)["l"][0].tolist() == 4.0
    assert reduce(x, "sum", scale=2.0).tolist() == [[2.0] * 3] * 2
    assert reduce(x, "max") is not x
    assert broadcast(data) is data
    assert pad_across_processes(data, dim=1) is data
    assert gather_object([1]) == [1]
    assert gather_object("whatever") == "whatever"
    names = ["a"]
    assert broadcast_object_list(names) is names


def test_collectives_of_one_process_check_arguments():
    PartialState(cpu=True)
    with pytest.raises(InvalidArgument, match=r"reduce\('median'\): unknown reduction 'median'; choose from mean"):
        reduce(torch.ones(1), "median")
    with pytest.raises(InvalidArgument, match=r"gather: expected tensors in .*, but \['x'\]\[1\] is a str"):
        gather({"x": [torch.ones(1), "text"]})
    with pytest.raises(InvalidArgument, match="from_process must be a rank from 0 to 0, got 1"):
        broadcast(torch.ones(1), from_process=1)
    with pytest.raises(InvalidArgument, match="broadcast_object_list: from_process must be a rank from 0 to 0, got -1"):
        broadcast_object_list([], from_process=-1)


def _gathers():
    rank = PartialState().process_index
    data = {
        "loss": torch.tensor(float(rank), requires_grad=True),
        "rows": (torch.full((2, 2), rank).t(), [torch.empty(0, 3)]),
        "odd": [torch.tensor([rank, 1]).to(kind) for kind in ODD_TYPES],
    }
    gathered = gather(data)
    kinds = [tensor.dtype for tensor in gathered["odd"]] == list(ODD_TYPES)
    odd = {tuple(tensor.to(torch.complex64).real.tolist()) for tensor in gathered["odd"] if tensor.dtype != torch.bool}
    return (
        gathered["loss"].tolist(),
        gathered["rows"][0].tolist(),
        gathered["rows"][1][0].shape,
        kinds,
        odd,
        gathered["odd"][0].tolist(),
    )


def test_gather_joins_all_ranks_rows_in_order():
    loss, rows, empty, kinds, odd, flags = run_ranks(_gathers, 3)[2]
    assert loss == [0, 1, 2]
    assert rows == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]
    assert (empty, kinds, odd) == ((0, 3), True, {(0, 1, 1, 1, 2, 1)})
    assert flags == [False, True, True, True, True, True]


def _reduces():
    rank = PartialState().process_index
    x = torch.tensor([[rank, 5.0 - rank]])
    results = {name: reduce({"x": x}, name)["x"].tolist()[0] for name in ("mean", "sum", "min", "max")}
    results["scaled"] = reduce(x, "sum", scale=0.5).tolist()[0]
    results["int"] = reduce(torch.tensor(rank)).item()
    large = [(torch.uint8, 200), (torch.int8, -100), (torch.int32, 2**31 - 1)]
    results["large"] = [reduce(torch.tensor(value - rank, dtype=kind)).item() for kind, value in large]
    results["complex"] = reduce(torch.tensor(complex(rank, 3.0))).item()
    results["bool"] = reduce(torch.tensor([rank > 0]), "sum").tolist()
    results["short"] = [reduce(torch.tensor([rank]).to(kind), "sum") for kind in (torch.int16, torch.float8_e4m3fn)]
    results["short"] = [(str(tensor.dtype), tensor.float().tolist()) for tensor in results["short"]]
    assert x.tolist() == [[rank, 5.0 - rank]]
    return results


def test_reduce_knows_four_reductions_and_leaves_its_input():
    assert (
        run_ranks(_reduces, 3)
        == [
            {
                "mean": [1.0, 4.0],
                "sum": [3.0, 12.0],
                "min": [0.0, 3.0],
                "max": [2.0, 5.0],
                "scaled": [1.5, 6.0],
                "int": 1.0,
                "large": [199.0, -101.0, 2.0**31],
                "complex": complex(1, 3),
                "bool": [2],
                "short": [("torch.int16", [3.0]), ("torch.float8_e4m3fn", [3.0])],
            }
        ]
        * 3
    )


class Named(dict):
    """A mapping whose text is another one on every rank, and cannot be made of numbers of dimensions."""

    def __repr__(self):
        return f"{PartialState().process_index}: {sum(tensor.numel() for tensor in self.values())}"


def _broadcasts_and_pads():
    rank = PartialState().process_index
    columns = torch.full((2, 2), rank).t()
    scalar, short = torch.tensor(rank, requires_grad=False), torch.tensor([rank], dtype=torch.int16)
    data = {"c": columns[:1], "s": [scalar, short]}
    same = broadcast(data, from_process=1) is data
    values = columns.tolist(), scalar.item(), short.item()

    ragged = [torch.full((rank + 1, 2), float(rank)), torch.tensor(7)]
    end, start = pad_across_processes(ragged, pad_index=-1), pad_across_processes(ragged, pad_index=-1, pad_first=True)
    wide = pad_across_processes(torch.ones(2, rank + 1, dtype=torch.int64), dim=-1)
    gathered = gather(pad_across_processes(torch.full((rank + 1,), rank), pad_index=9))
    named = pad_across_processes(Named(x=torch.ones(rank + 1)))["x"]
    assert named.tolist() == [1.0, 1.0 * rank]
    names = broadcast_object_list([f"{rank}-{number}" for number in range(rank + 1)], from_process=1)
    return same, values, [tensor.tolist() for tensor in (end[0], start[0], end[1], wide, gathered)], names


def test_broadcast_writes_into_what_it_is_given_and_pad_makes_sizes_equal():
    first, second = run_ranks(_broadcasts_and_pads, 2)
    assert first[:2] == (True, ([[1, 1], [0, 0]], 1, 1))
    assert second[:2] == (True, ([[1, 1], [1, 1]], 1, 1))
    assert first[2] == [[[0, 0], [-1, -1]], [[-1, -1], [0, 0]], 7, [[1, 0], [1, 0]], [0, 9, 1, 1]]
    assert second[2] == [[[1, 1], [1, 1]], [[1, 1], [1, 1]], 7, [[1, 1], [1, 1]], [0, 9, 1, 1]]
    assert first[3] == second[3] == ["1-0", "1-1"]


def _bad_data():
    """Return every error as text, as this rank sees it. The group must work after each error."""
    state = PartialState()
    rank, x = state.process_index, torch.ones(2)
    attempts = {
        "rows": lambda: gather({"x": torch.ones(2 + rank, 3)}),
        "types": lambda: reduce(x.to(torch.float64 if rank else torch.float32)),
        "leaf": lambda: gather([x, "text" if rank == 1 else x]),
        "leaf everywhere": lambda: broadcast(["a"]),
        "op": lambda: reduce(x, "median" if rank == 1 else "mean"),
        "calls": lambda: gather(x) if rank else reduce(x, "sum"),
        "sources": lambda: broadcast(x, from_process=rank),
        "dims": lambda: pad_across_processes(x if rank else x[None]),
        "keys": lambda: pad_across_processes({"xy"[rank]: [x]}),
        "object": lambda: gather_object([threading.Lock() if rank == 1 else rank]),
        "no list": lambda: gather_object(5 if rank == 1 else [5]),
        "text": lambda: gather_object("text" if rank == 1 else ["text"]),
        "bytes": lambda: gather_object(b"text" if rank == 1 else []),
        "dict": lambda: gather_object({"loss": 1}),
        "unsent": lambda: broadcast_object_list([threading.Lock() if rank == 1 else rank], from_process=1),
    }
    messages = {}
    for name, attempt in attempts.items():
        with pytest.raises((InvalidArgument, TransferError)) as caught:
            attempt()
        messages[name] = f"{type(caught.value).__name__}: {caught.value}"
        assert gather(torch.tensor(rank)).tolist() == [0, 1]
    return messages


def test_bad_data_is_the_same_error_on_every_rank_and_the_group_goes_on():
    first, second = run_ranks(_bad_data, 2)
    assert first == second
    assert first == {
        "rows": "InvalidArgument: gather: arguments differ between ranks:\n"
        "  rank 0: {'x': float32[2, 3]}\n  rank 1: {'x': float32[3, 3]}",
        "types": "InvalidArgument: reduce('mean'): arguments differ between ranks:\n"
        "  rank 0: float32[2]\n  rank 1: float64[2]",
        "leaf": "InvalidArgument: gather: rank 1: expected tensors in lists, tuples, mappings and dataclasses, "
        "but [1] is a str",
        "leaf everywhere": "InvalidArgument: broadcast(from 0): rank 0: expected tensors in lists, tuples, mappings "
        "and dataclasses, but [0] is a str; rank 1: expected tensors in lists, tuples, mappings and dataclasses, but "
        "[0] is a str",
        "op": "InvalidArgument: reduce('median'): rank 1: unknown reduction 'median'; choose from mean, sum, min, max",
        "calls": "InvalidArgument: the ranks call different operations: rank 0: reduce('sum'); rank 1: gather",
        "sources": "InvalidArgument: the ranks call different operations: rank 0: broadcast(from 0); "
        "rank 1: broadcast(from 1)",
        "dims": "InvalidArgument: pad_across_processes(dim=0): arguments differ between ranks:\n"
        "  rank 0: 2-d\n  rank 1: 1-d",
        "keys": "InvalidArgument: pad_across_processes(dim=0): arguments differ between ranks:\n"
        "  rank 0: ['x'][0]: 1-d\n  rank 1: ['y'][0]: 1-d",
        "object": "TransferError: gather_object: rank 1: cannot be pickled: TypeError: cannot pickle "
        "'_thread.lock' object",
        "no list": "InvalidArgument: gather_object: expected a list on every rank, got int on rank 1; pass [object]",
        "text": "InvalidArgument: gather_object: expected a list on every rank, got str on rank 1; pass [object]",
        "bytes": "InvalidArgument: gather_object: expected a list on every rank, got bytes on rank 1; pass [object]",
        "dict": "InvalidArgument: gather_object: expected a list on every rank, got dict on rank 0; pass [object]",
        "unsent": "TransferError: broadcast_object_list: rank 1: cannot be pickled: TypeError: cannot pickle "
        "'_thread.lock' object",
    }


def _where_agreeing_is_dear(debug):
    control_collectives.is_cheap = lambda: False
    state = PartialState()
    state.debug = debug
    if not debug:
        assert gather(torch.ones(1)).shape == (2,)
        with pytest.raises(InvalidArgument, match="median"):
            reduce(torch.ones(1), "median")
        return True
    with pytest.raises(InvalidArgument, match=r"rank 1: float32\[2\]"):
        gather(torch.ones(1 + state.process_index))
    return True


@pytest.mark.parametrize("debug", [False, True])
def test_where_agreeing_costs_a_wait_only_debug_compares_shapes(debug):
    assert run_ranks(_where_agreeing_is_dear, 2, debug) == [True, True]


def _count(calls, name, original, *args, **kwargs):
    calls.append(name)
    return original(*args, **kwargs)


def _counts_collectives():
    calls = []
    tensors = {"a": torch.ones(3), "b": [torch.ones(2, 2), torch.ones(1)], "n": torch.tensor(1)}
    # By its name since torch 2.13, whichever function it is.
    collectives._all_gather = functools.partial(_count, calls, "all_gather_single", collectives._all_gather)
    collectives.dist.all_reduce = functools.partial(_count, calls, "all_reduce", collectives.dist.all_reduce)
    gather(tensors)
    gathered, calls[:] = sorted(calls), []
    reduced = reduce(tensors, "sum")
    assert reduced["b"][0].tolist() == [[2, 2], [2, 2]]
    large = torch.full((1 << 19,), 2.0)
    assert gather([large, large])[1].sum() == 2 * large.sum()
    assert reduce([large, tensors["n"]], "sum")[0].sum() == 2 * large.sum()
    return gathered, calls[:3]


def test_a_containers_small_tensors_travel_together():
    agreed = "all_reduce"
    assert (
        run_ranks(_counts_collectives, 2)
        == [
            (["all_gather_single", agreed], [agreed, "all_reduce", "all_reduce"]),
        ]
        * 2
    )


def _unchecked():
    return gather(torch.ones(1)).tolist(), PartialState().checks, PartialState().debug


def test_checks_can_be_left_out():
    assert run_ranks(_unchecked, 2, environment={"RANKBOOK_DEBUG": "0"}) == [([1, 1], False, False)] * 2
