"""Test the public views in a real kernel, and their static form."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until

pytestmark = pytest.mark.processes

MODEL = """%%distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
whole = nn.Linear(64, 64)
optimizer = torch.optim.Adam(whole.parameters())
whole(torch.ones(2, 64)).sum().backward()
optimizer.step()
shared = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))"""


@pytest.fixture(scope="module")
def holding(module_notebook):
    module_notebook.ok(MODEL)
    module_notebook.ok("import rankbook")
    return module_notebook


def displayed_text(notebook, code):
    """The still picture's text, and that it stands beside a widget in standard mime types."""
    displays = notebook.ok(code).displays
    assert any("application/vnd.jupyter.widget-view+json" in item for item in displays), displays
    still = [display for display in displays if "text/html" in display and "text/plain" in display]
    assert still, displays
    return still[-1]["text/plain"]


def test_placement_shows_what_every_rank_holds(holding, notebook):
    # The first picture is shown without ranks that have not answered within two seconds, as on a busy machine.
    expected = ["2 ranks", "whole: Linear", "shared: FSDP2 Sequential", "optimizer: Adam"]
    texts: list[str] = []

    def is_complete() -> bool:
        texts.append(displayed_text(notebook, "rankbook.placement()"))
        return all(words in texts[-1] for words in expected)

    wait_until(is_complete, timeout=20, what=f"{expected} in {texts}")


def test_shards_shows_where_every_parameter_lies(holding, notebook):
    text = displayed_text(notebook, "rankbook.shards('shared')")
    assert "4 tensors" in text
    assert "0.weight" in text
    shards_text = displayed_text(notebook, "rankbook.shards('shared', search='0.w')")
    assert "0.weight" in shards_text
    assert "1.weight" not in shards_text


def test_a_variable_that_is_not_there_is_reported_with_what_is(holding, notebook):
    assert "is not defined on this rank" in displayed_text(notebook, "rankbook.shards('nothing_of_that_name')")


def test_checkpoints_shows_a_folder_and_an_accelerators_is_loaded_by_it(holding, notebook, tmp_path):
    notebook.ok(
        "%%distributed\nfrom rankbook.checkpoint import save, sharded_state_dict\n"
        f"done = save(sharded_state_dict(shared), {str(tmp_path)!r}, step=40)"
    )
    notebook.ok(
        "%%distributed\nmodel, adam = accelerator.prepare(nn.Linear(2, 1), torch.optim.SGD(whole.parameters(), 0.1))\n"
        f"folder = accelerator.save_state({str(tmp_path / 'checkpoint_0')!r})\n"
        "with torch.no_grad():\n    kept = [each.clone() for each in model.parameters()]\n"
        "    [each.zero_() for each in model.parameters()]"
    )
    text = displayed_text(notebook, f"rankbook.checkpoints({str(tmp_path)!r})")
    assert "step-40" in text
    assert "checkpoint_0" in text
    output = notebook.ok(
        "from rankbook.magics.views import _checkpoint_source\n"
        f"print(_checkpoint_source({str(tmp_path)!r}).load('checkpoint_0'))\nprint(_checkpoint_source({str(tmp_path)!r}).load('step-40'))"
    ).stdout
    assert "into the objects that the ranks' accelerator has prepared" in output
    assert "step=40" in output
    notebook.ok("%%distributed\nassert all(torch.equal(one, two) for one, two in zip(model.parameters(), kept))")
    notebook.ok("%%distributed\ndel accelerator, model, adam\nfrom rankbook import AcceleratorState\n"
                "AcceleratorState._reset_state()")  # fmt: skip


def test_the_dashboard_has_all_three_and_moves(holding, notebook):
    text = displayed_text(notebook, "one = rankbook.dashboard(variable='shared')\none")
    assert "2 ranks" in text
    assert "0.weight" in text
    notebook.ok("two = rankbook.dashboard()\nassert one is not two")


def test_view_without_ranks_tells_how_to_start_them(fresh_notebook):
    failed = fresh_notebook.run("import rankbook\nrankbook.placement()")
    assert failed.ename == "NoClusterError"
    assert "%distributed start" in failed.evalue
