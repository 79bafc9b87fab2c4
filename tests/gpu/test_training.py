"""The runtime, checkpoints and recovery on CUDA devices."""

from __future__ import annotations

import pytest

from tests.gpu.ranks import ON_CUDA, cuda_devices

pytestmark = ON_CUDA

PREPARED = """%%distributed
from rankbook import Accelerator, set_seed
from torch.utils.data import DataLoader, TensorDataset
set_seed(0)
accelerator = Accelerator(mixed_precision={precision!r})
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(256, 16)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def epoch():
    total = 0.0
    for row, target in loader:
        assert row.device == target.device == accelerator.device
        loss = torch.nn.functional.mse_loss(model(row).float(), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += accelerator.reduce(loss.detach(), "mean").item()
    return total
losses = [epoch() for _ in range(8)]
assert losses[-1] < losses[0] / 2, losses
print(accelerator.device.type, "learnt")"""


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prepared_loop_learns(preloaded, ranks, precision):
    preloaded.ok(f"%distributed start -n {ranks}")
    outcome = preloaded.ok(PREPARED.format(precision=precision), timeout=120)
    assert "cuda learnt" in outcome.stdout
    if precision == "fp16":
        reported = preloaded.ok("%%distributed --ranks 0\nprint(accelerator.scaler.get_scale() > 0)").stdout
        assert reported == "[0] True\n"


def test_save_during_training_is_loaded_bit_for_bit(preloaded, tmp_path):
    preloaded.ok("%distributed start -n 2")
    preloaded.ok(PREPARED.format(precision="fp16"), timeout=120)
    outcome = preloaded.ok(
        f"""%%distributed
folder = {str(tmp_path / "state")!r}
saving = accelerator.save_state(folder, async_=True)
before = {{name: value.clone() for name, value in accelerator.get_state_dict(model).items()}}
scale = accelerator.scaler.get_scale()
epoch()
saving.wait()
accelerator.load_state(folder)
after = accelerator.get_state_dict(model)
print(all(torch.equal(before[name], after[name]) for name in before), accelerator.scaler.get_scale() == scale)""",
        timeout=120,
    )
    assert "[0-1] True True" in outcome.stdout


@pytest.mark.parametrize("ranks", [2, pytest.param(0, id="nccl")])
def test_a_wait_on_the_device_is_aborted_and_training_goes_on(preloaded, ranks):
    ranks = ranks or cuda_devices()
    if ranks < 2:
        pytest.skip("nccl between ranks wants two devices")
    preloaded.ok(f"%distributed start -n {ranks}")
    preloaded.ok(PREPARED.format(precision="no"), timeout=120)
    failed = preloaded.run(
        "%%distributed\nif rank == 1: raise ValueError('not me')\nt = torch.ones(8, device=device)\n"
        "dist.all_reduce(t)\nprint(t.sum().item())",
        timeout=60,
    )
    assert failed.status == "error"
    assert "rank 1: ValueError: not me" in failed.traceback
    assert "CollectiveAborted" in failed.traceback
    outcome = preloaded.ok("%%distributed\nprint('on', epoch() < losses[0])", timeout=120)
    assert f"[0-{ranks - 1}] on True" in outcome.stdout


def test_a_launched_function_has_the_device_also_when_the_notebook_has_initialised_cuda(preloaded):
    preloaded.ok("import torch, rankbook; here = torch.ones(3, device='cuda')")
    outcome = preloaded.ok(
        "def where(x):\n    from rankbook import Accelerator\n"
        "    return str(Accelerator().device.type), x.sum().item()\n"
        "rankbook.notebook_launcher(where, (here,), num_processes=2)"
    )
    assert outcome.displays[-1]["text/plain"] == "[('cuda', 3.0), ('cuda', 3.0)]"


def test_memory_of_a_device_equals_that_of_torch(preloaded):
    preloaded.ok("%distributed start -n 1")
    preloaded.ok(PREPARED.format(precision="no"), timeout=120)
    preloaded.ok("%%distributed\ntold = torch.cuda.mem_get_info(device)[1]")
    preloaded.ok("%distributed pull told")
    outcome = preloaded.ok(
        "import rankbook\nmemory = rankbook.current().placement().ranks[0].memory\n"
        "print(memory.total == told[0], memory.parameters == 4 * (16 * 64 + 64 + 64 + 1), memory.other > 0)"
    )
    assert outcome.stdout == "True True True\n"
