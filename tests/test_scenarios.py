"""End-to-end scenarios of `pytest -m fast` on two ranks of one real kernel."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.fast]

SUM = "%%distributed\ntotal = torch.tensor(rank + 1)\ndist.all_reduce(total)\nprint('sum', total.item())"

TRAIN = """%%distributed
from rankbook import Accelerator

torch.manual_seed(0)
accelerator = Accelerator()
inputs = torch.randn(32, 4)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=4)
)
losses = []
for epoch in range(4):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
assert sum(losses[-4:]) < sum(losses[:4]), losses
before = [each.detach().clone() for each in model.parameters()]
accelerator.save_state({folder!r})
for each in model.parameters():
    each.data.zero_()
accelerator.load_state({folder!r})
print('same', all(torch.equal(*each) for each in zip(before, model.parameters())))"""


def test_cell_runs_on_every_rank_and_variables_stay(notebook):
    assert "[0-1] sum 3" in notebook.ok(SUM).stdout
    assert "[0-1] 3" in notebook.ok("%%distributed\nprint(total.item())").stdout


def test_error_of_one_rank_ends_the_cell_on_all_and_the_next_one_works(notebook):
    failed = notebook.run("%%distributed\nif rank == 1:\n    raise ValueError('mine')\ndist.barrier()", timeout=30)
    assert failed.status == "error"
    assert "ValueError: mine" in failed.traceback + failed.evalue
    assert "[0-1] sum 3" in notebook.ok(SUM).stdout


def test_interrupt_ends_a_cell_that_waits(notebook):
    message = notebook.send("%%distributed\nimport time\nprint('begun')\ntime.sleep(600)")
    pressed = []

    def press(outcome):
        if "begun" in outcome.stdout and not pressed:
            pressed.append(notebook.interrupt())

    assert notebook.finish(message, timeout=30, seen=press).ename == "KeyboardInterrupt"
    assert "[0-1] sum 3" in notebook.ok(SUM).stdout


def test_rank_that_died_is_healed_with_the_variables_of_the_other(notebook):
    notebook.ok("%%distributed\nkept = 7")
    failed = notebook.run("%%distributed --ranks 1\nimport os\nos._exit(3)", timeout=30)
    assert "rank 1 exited with code 3" in failed.traceback + failed.evalue
    assert "rank 1 was healed with the state of rank 0" in notebook.ok("%distributed heal", timeout=30).stdout
    assert "[0-1] 7" in notebook.ok("%%distributed\nprint(kept)").stdout
    assert "[0-1] sum 3" in notebook.ok(SUM).stdout


def test_value_is_pushed_to_the_ranks_and_pulled_back(notebook):
    notebook.ok("scale = 0.5\n%distributed push scale")
    notebook.ok("%%distributed\nscaled = scale * (rank + 1)")
    assert "[0.5, 1.0]" in notebook.ok("%distributed pull scaled\nscaled").text


def test_model_trains_on_all_ranks_and_its_checkpoint_loads(notebook, tmp_path):
    assert "[0-1] same True" in notebook.ok(TRAIN.format(folder=str(tmp_path / "run")), timeout=60).stdout
