"""Peeks and profiles of ranks on CUDA devices."""

from __future__ import annotations

import json

from tests.gpu.ranks import ON_CUDA

pytestmark = ON_CUDA


def test_peek_that_waits_for_the_device_does_not_block_the_rank(preloaded):
    preloaded.ok("%distributed start -n 1")
    preloaded.ok("%%distributed\nx = torch.ones(8, device=device)")
    assert preloaded.ok("%distributed peek x.sum().item()").stdout == "[0] 8.0\n"
    cell = "for _ in range(20): torch.cuda._sleep(1_000_000_000)\ntorch.cuda.synchronize()\nprint('done')"
    message = preloaded.send(f"%%distributed --background\n{cell}")
    outcome = preloaded.finish(message)
    assert "(8,)" in preloaded.ok("%distributed peek tuple(x.shape)").stdout
    refused = preloaded.run("%distributed peek x.sum().item() --timeout 0.3")
    assert refused.status == "error" and "timed out after 0.3 s; reading a CUDA tensor" in refused.stderr
    assert "synchronize" in preloaded.ok("%distributed stacks").stdout
    preloaded.follow(message, outcome, lambda so_far: "done" in so_far.stdout, timeout=60)
    assert preloaded.ok("%distributed peek x.sum().item()").stdout == "[0] 8.0\n"


def test_a_profile_has_the_kernels_of_the_device(tmp_path, preloaded):
    preloaded.ok("%distributed start -n 1")
    file = tmp_path / "run.json"
    cell = "y = torch.ones(512, 512, device=device)\nfor _ in range(5): y = y @ y\ndist.all_reduce(y)"
    outcome = preloaded.ok(f"%%distributed --time --profile={file}\n{cell}\ntorch.cuda.synchronize()")
    (text,) = [display["text/plain"] for display in outcome.displays if display["text/plain"].startswith("op")]
    assert {line.split("  ")[1].strip() for line in text.splitlines()[1:]} >= {"cpu", "cuda"} or " cuda " in text
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any("stream" in name for name in names)
    assert {item["pid"] for item in events} == {0}
    assert any(element.get("cat") == "kernel" for element in events)


def test_statistics_have_the_values_of_large_integers_and_of_float64(preloaded):
    preloaded.ok("%distributed start -n 1")
    outcome = preloaded.ok(
        """%%distributed
from rankbook.rank.inspect.query_handlers import compute_statistic
for tensor in (torch.tensor([1, 16777217]), torch.tensor([1e-300, 1e300], dtype=torch.float64)):
    statistic = compute_statistic(0, tensor.to(device))
    print(device.type, statistic.minimum, statistic.maximum, statistic.infinities)"""
    )
    assert outcome.stdout == "[0] cuda 1.0 16777217.0 0\n[0] cuda 1e-300 1e+300 0\n"
