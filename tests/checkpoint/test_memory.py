"""Test that a load needs at most the largest local shard and 64 MB beside the tensors that it fills."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

import rankbook.checkpoint as rc
from tests.rank_processes import run_ranks

MB = 1_000_000
ROWS, COLUMNS = 4096, 8192  # of float32: 134 MB
MAX_BYTES = 64 * MB

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is reset through /proc"),
]


def memory(field):
    line = next(item for item in Path("/proc/self/status").read_text().splitlines() if item.startswith(field))
    return int(line.split()[1]) * 1024


def extra(call):
    """Return the most bytes by which the process grows while `call` runs."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not be taken again without being counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now (proc(5))
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def loads(folder):
    """The extra memory of loads of every kind, by name; each fills memory that is there and touched."""
    import torch

    import rankbook.checkpoint as rc

    def shard(key, rows, columns, **more):
        shape = rows[1] - rows[0], columns[1] - columns[0]
        data = torch.ones(shape, **more)
        offset = rows[0], columns[0]
        return rc.ShardedTensor(key, data, data.dtype, shape, (ROWS, COLUMNS), offset, None)

    def right(entry):
        rows, columns = (slice(a, a + n) for a, n in zip(entry.global_offset, entry.local_shape, strict=True))
        expected = torch.arange(ROWS).reshape(-1, 1)[rows] * 2.0 + torch.arange(COLUMNS)[columns] % 2
        return torch.equal(entry.data.float(), expected)

    rc.load({"small": torch.zeros(3)}, folder)  # what is imported at the first load is no part of the others
    kinds = {
        "whole": (lambda: shard("w", (0, ROWS), (0, COLUMNS)), {}),
        "rows across chunks": (lambda: shard("w", (1000, 3000), (0, COLUMNS)), {}),
        "a slice of columns": (lambda: shard("w", (0, ROWS), (5000, 5500)), {}),
        "half of the columns": (lambda: shard("w", (0, ROWS), (4096, 8192)), {}),
        "cast": (lambda: shard("w", (0, ROWS), (0, 4096), dtype=torch.float64), {"cast": True}),
    }
    peaks = {}
    for verify in (True, False):
        for name, (make, more) in kinds.items():
            entry = make()
            peaks[f"{name}, {verify=}"] = extra(lambda: rc.load({"w": entry}, folder, verify=verify, **more))  # noqa: B023
            assert right(entry), name
    return peaks


def test_a_load_needs_little_beside_what_it_fills(tmp_path):
    tensor = torch.arange(ROWS).reshape(-1, 1) * 2.0 + torch.arange(COLUMNS) % 2

    def shard(rows):
        size = ROWS // 2
        return rc.ShardedTensor.from_rank_offsets("w", tensor[rows * size :][:size], (0, rows, 2))

    rc.save({"w": {"top": shard(0), "bottom": shard(1)}, "small": torch.zeros(3)}, tmp_path)
    (measured,) = run_ranks(loads, 1, str(tmp_path), group=False)
    print("\n".join(f"{name}: {used / MB:.1f} MB" for name, used in measured.items()))
    assert len(measured) == 10
    assert max(measured.values()) <= MAX_BYTES, measured


def trainings(folder):
    """The extra memory of a training's save and of its load into the state that is there."""
    import torch

    from rankbook.runtime import Accelerator

    def model_and_optimizer(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 4096, bias=False) for _ in range(6)])  # of 17 MB each
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer

    accelerator = Accelerator(cpu=True)
    first = model_and_optimizer(1)
    accelerator.save_state(f"{folder}/state")  # what is imported at the first time is no part of the others
    accelerator.load_state(f"{folder}/state")
    peaks = {"save": extra(lambda: accelerator.save_state(f"{folder}/state"))}
    expected = [item.clone() for item in first[0].parameters()]
    accelerator.free_memory()
    model, optimizer = model_and_optimizer(2)
    peaks["load"] = extra(lambda: accelerator.load_state(f"{folder}/state"))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))
    return peaks, len(optimizer.state)


def test_a_training_s_state_is_saved_and_loaded_with_little_beside_it(tmp_path):
    ((measured, parameters),) = run_ranks(trainings, 1, str(tmp_path), group=False)
    print("\n".join(f"{name}: {used / MB:.1f} MB" for name, used in measured.items()))
    assert parameters == 6 and max(measured.values()) <= MAX_BYTES, measured
