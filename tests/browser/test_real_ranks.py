"""The views of real ranks in a real JupyterLab, from the front door: what is shown is what the ranks do."""

from __future__ import annotations

import re

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]

START = "%load_ext rankbook\n%distributed start -n 2\nimport rankbook"
MODEL = """%%distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
net = nn.Linear(64, 32)
optimizer = torch.optim.Adam(net.parameters())
halves = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))"""
TRAINS = """%%distributed
import time
for step in range(100_000):
    optimizer.zero_grad()
    net(torch.ones(4, 64)).sum().backward()
    for each in net.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
    time.sleep(0.01)"""
SAVES = """%%distributed
from rankbook.checkpoint import save, sharded_state_dict
print(save(sharded_state_dict(net, optimizer), {folder!r}, step=7))"""


def test_placement_follows_a_cell_that_trains_and_ends_it(opened):
    notebook = opened(START, MODEL, "rankbook.placement()", TRAINS)
    page = notebook.page
    notebook.run(1, timeout=60)
    notebook.run(2)
    notebook.run(3)
    view = page.locator(".rankbook-part-placement")
    expect(view).to_contain_text("2 idle")
    expect(view.locator("[data-rank='1']")).to_contain_text("idle")
    notebook.start(4)
    expect(view).to_contain_text(re.compile(r"2 ranks.*[12] (running|waiting)"))  # for each other, now and then
    expect(view.locator("[data-rank='1']")).to_contain_text(re.compile(r"cell \[5\] line \d"))
    expect(view.locator("[data-rank='1']")).to_contain_text(re.compile(r"\d/s|steps"))
    view.locator("[data-rank='1']").click()
    detail = view.locator(".rb-near")
    expect(detail).to_contain_text("net")
    expect(detail).to_contain_text("Linear")
    assert notebook.running(4)
    detail.get_by_role("button", name="Interrupt").click()
    expect(notebook.cell(4)).to_contain_text("KeyboardInterrupt")
    expect(view).to_contain_text("2 idle")


@pytest.mark.full
def test_shards_and_checkpoints_show_what_the_ranks_have(opened, tmp_path):
    folder = tmp_path / "run"
    notebook = opened(
        START,
        MODEL,
        "rankbook.shards('halves')",
        f"rankbook.checkpoints({str(folder)!r})",
        SAVES.format(folder=str(folder)),
    )
    page = notebook.page
    for cell in (1, 2, 3):
        notebook.run(cell, timeout=60)
    shards = page.locator(".rankbook-part-shards")
    expect(shards).to_contain_text("4 tensors")
    shards.get_by_label("search").fill("0.weight")
    expect(shards).to_contain_text(re.compile(r"offset \[0, 0\], shape 4 × 8: rank 0 on cpu"))
    shards.get_by_role("button", name="Statistic").click()
    expect(shards).to_contain_text(re.compile(r"min -?0\.\d+, mean .*, 0 NaN"))
    notebook.run(4)
    checkpoints = page.locator(".rankbook-part-checkpoints")
    notebook.run(5)
    expect(checkpoints).to_contain_text("step-7")
    checkpoints.get_by_role("button", name=re.compile("[Vv]erify")).first.click()
    expect(checkpoints).to_contain_text("verified")


@pytest.mark.full
def test_the_dashboard_moves_to_where_it_is_opened_last(opened):
    notebook = opened(START, MODEL, "rankbook.dashboard(variable='net')", "rankbook.dashboard(variable='net')")
    page = notebook.page
    for cell in (1, 2, 3, 4):
        notebook.run(cell, timeout=60)
    expect(page.locator(".rankbook-dashboard")).to_have_count(1)
    expect(notebook.cell(3)).to_contain_text("opened again in another cell")
    tabs = notebook.cell(4).get_by_role("tab")
    tabs.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tabs.nth(1)).to_be_focused()
    expect(notebook.cell(4)).to_contain_text("net (model): 2 tensors")
