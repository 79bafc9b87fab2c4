"""torch's functional collectives, which DTensor and torch.compile use, before and after a group is formed anew."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SETUP = """%%distributed
import warnings
import torch.distributed._functional_collectives as functional
warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for some of them
world, tensor = dist.group.WORLD, torch.arange(4.0) + rank
calls = {
    "all_reduce": lambda: functional.all_reduce(tensor, "sum", world),
    "all_gather": lambda: functional.all_gather_tensor(tensor, 0, world),
    "reduce_scatter": lambda: functional.reduce_scatter_tensor(tensor, "sum", 0, world),
    "all_to_all": lambda: functional.all_to_all_single(tensor, None, None, world),
    "broadcast": lambda: functional.broadcast(tensor, 0, world),
    "all_reduce_coalesced": lambda: functional.all_reduce_coalesced([tensor, tensor], "sum", world)[1],
    "all_gather_coalesced": lambda: functional.all_gather_into_tensor_coalesced([tensor, tensor], world)[1],
    "reduce_scatter_coalesced": lambda: functional.reduce_scatter_tensor_coalesced([tensor], "sum", [0], world)[0],
}
summed, gathered = [1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
halves = summed[2 * rank : 2 * rank + 2]
expected = {
    "all_reduce": summed,
    "all_gather": gathered,
    "reduce_scatter": halves,
    "all_to_all": [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 1, 2.0 * rank + 2],
    "broadcast": [0.0, 1.0, 2.0, 3.0],
    "all_reduce_coalesced": summed,
    "all_gather_coalesced": gathered,
    "reduce_scatter_coalesced": halves,
}"""
CHECK = """%%distributed
wrong = {name: call().tolist() for name, call in calls.items() if call().tolist() != expected[name]}
print("wrong:", wrong)"""


def test_functional_collectives_give_the_same_after_an_abort(notebook):
    notebook.ok(SETUP)
    for _ in range(2):
        assert notebook.ok(CHECK).stdout == "[0-1] wrong: {}\n"
        broken = notebook.run(
            "%%distributed\nif rank: raise ValueError('here')\nfunctional.all_reduce(tensor, 'sum', world).tolist()"
        )
        assert broken.ename == "ValueError"
    assert notebook.ok(CHECK).stdout == "[0-1] wrong: {}\n"
