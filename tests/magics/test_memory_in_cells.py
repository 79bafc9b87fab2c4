"""Test cells that run out of memory: the report, and the memory that is freed."""

from __future__ import annotations

import re

import pytest

from tests.magics.test_errors_in_cells import failed

pytestmark = pytest.mark.processes

SETUP = """%%distributed
import gc, weakref
alive = weakref.WeakSet()
def note(tensor):
    alive.add(tensor)
    return tensor
batches = [torch.zeros(2_000_000), torch.zeros(1_000_000 * (1 + rank))]
def step(error):
    activations = note(torch.zeros(3_000_000))
    raise error
"""
ERRORS = {
    "CUDA": "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')",
    "CPU": 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 4000 bytes.")',
    "Python": "MemoryError()",
}
COUNT_LEFT = "%%distributed\nprint(len(alive), 'left,', len(batches), 'batches')"


@pytest.fixture
def loaded(notebook):
    notebook.ok(SETUP)
    return notebook


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_the_error_says_what_holds_the_memory_and_the_cells_own_is_freed(loaded, error):
    _, text = failed(loaded, f"%%distributed --ranks 0\nstep({error})")
    assert text.count("rank 0, memory of cpu: this process uses ") == 1
    assert re.search(r"^ +12 MB  step\(\): activations +\(3000000,\) +float32  cpu$", text, re.MULTILINE)
    assert re.search(r"^ +8 MB  batches\[0\] ", text, re.MULTILINE)
    assert re.search(r"^ +4 MB  batches\[1\] ", text, re.MULTILINE)
    assert "by variable: step(): activations 12 MB, batches 12 MB" in text
    assert "Traceback" in text, "the error itself is told as ever"
    assert "[0-1] 0 left, 2 batches" in loaded.ok(COUNT_LEFT).stdout


def test_a_chain_of_errors_is_let_go_too(loaded):
    code = """%%distributed --ranks 0
def first():
    kept = note(torch.zeros(10))
    raise ValueError
def second():
    also = note(torch.zeros(10))
    try: first()
    except ValueError as error: raise MemoryError from error
try: second()
except MemoryError as error: raise RuntimeError('wrapped') from error"""
    outcome, text = failed(loaded, code)
    assert outcome.ename == "RuntimeError"
    assert "rank 0, memory of cpu" in text
    assert "[0-1] 0 left" in loaded.ok(COUNT_LEFT).stdout


@pytest.mark.parametrize(
    ("error", "reported"),
    [("MemoryError()", "rank 0 raised MemoryError"), (ERRORS["CPU"], "rank 0 raised RuntimeError (out of memory)")],
    ids=["Python", "CPU"],
)
def test_memory_of_ranks_that_waited_for_the_failed_one_is_freed(loaded, error, reported):
    code = f"""%%distributed
def wait():
    activations = note(torch.zeros(3_000_000))
    dist.all_reduce(torch.ones(1))
if rank == 0:
    step({error})
wait()"""
    _, text = failed(loaded, code)
    assert reported in text
    assert text.count("memory of cpu") == 1, "only of the rank that has none left"
    assert "[0-1] 0 left" in loaded.ok(COUNT_LEFT).stdout


def test_a_function_that_is_applied_is_treated_alike(loaded):
    code = """%%local
import rankbook
def call():
    import __main__
    big = __main__.note(__main__.torch.zeros(10))
    raise MemoryError
try:
    rankbook.current().apply(call, ranks=0)
except MemoryError as error:
    print('memory of cpu' in str(error), 'memory of cpu' in error.errors[0].memory)"""
    assert "True True" in loaded.ok(code).stdout
    assert "[0-1] 0 left" in loaded.ok(COUNT_LEFT).stdout


def test_equal_memory_reports_are_shown_once_and_others_per_rank(loaded):
    _, text = failed(loaded, "%%distributed\nraise MemoryError")
    assert text.count("ranks 0-1: MemoryError") == 1
    assert text.count("Traceback") <= 1, "the error is the same, only what holds the memory is not"
    assert len(re.findall(r"rank \d, memory of cpu", text)) == 2
    assert re.search(r"^ +8 MB  batches\[1\] ", text, re.MULTILINE), "of rank 1"


def test_an_ordinary_error_says_nothing_of_it_and_keeps_its_frames_for_a_debugger(loaded):
    _, text = failed(loaded, "%%distributed --ranks 0\nstep(ValueError('no'))")
    assert "memory of" not in text
    assert "[0] 1 left" in loaded.ok(COUNT_LEFT).stdout
    typed = loaded.run("%%distributed --ranks 0\n%debug", answers=["p activations.shape", "q"])
    assert "torch.Size([3000000])" in typed.text
    failed(loaded, f"%%distributed --ranks 0\nstep({ERRORS['CUDA']})")
    assert "[0-1] 0 left" in loaded.ok(COUNT_LEFT).stdout, "an earlier error is let go as well"
    loaded.ok("%%distributed --ranks 0\n%debug")  # says that there is nothing
    failed(loaded, "%%distributed --ranks 0\nstep(ValueError('no'))")
    typed = loaded.run("%%distributed --ranks 0\n%debug", answers=["p activations.shape", "q"])
    assert "torch.Size([3000000])" in typed.text, "the next one can be looked at again"


def test_a_real_error_of_torch_on_the_cpu(loaded):
    outcome, text = failed(loaded, "%%distributed\ntorch.empty(1 << 60, dtype=torch.uint8)")
    assert outcome.ename == "RuntimeError"
    assert "memory of cpu: this process uses" in text
    assert loaded.ok("%%distributed\nprint(torch.ones(2).sum().item())").stdout == "[0-1] 2.0\n"
