"""Test the list of checkpoints in a folder and the actions on them."""

from __future__ import annotations

import shutil
import uuid

import pytest
from msgspec.structs import replace

from rankbook.checkpoint.format.manifest import encode
from rankbook.checkpoint.storage import steps
from rankbook.checkpoint.storage.backends import LocalStorage, storage_of
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.magics import views
from rankbook.magics.views import CheckpointBrowser
from tests.checkpoint.hand_made import write_checkpoint


@pytest.fixture
def run(tmp_path):
    write_checkpoint(tmp_path / "run", 30)
    write_checkpoint(tmp_path / "run", 40)
    return tmp_path / "run"


def states(checkpoint_browser: CheckpointBrowser) -> dict[str, tuple[str, str]]:
    return {
        checkpoint.name: (checkpoint.state, checkpoint.checked)
        for checkpoint in checkpoint_browser.list_checkpoints().checkpoints
    }


def test_list_has_size_world_size_and_latest_of_every_step(run):
    listing = CheckpointBrowser(run).list_checkpoints()
    assert [
        (checkpoint.name, checkpoint.step, checkpoint.latest, checkpoint.world_size)
        for checkpoint in listing.checkpoints
    ] == [
        ("step-30", 30, False, 2),
        ("step-40", 40, True, 2),
    ]
    files = sum(file.stat().st_size for file in (run / "step-40").iterdir() if file.name != "manifest.json")
    assert listing.checkpoints[1].bytes == files
    assert all(item.created for item in listing.checkpoints) and not listing.trouble


def test_verifying_is_known_from_then_on_until_the_files_change(run):
    checkpoint_browser = CheckpointBrowser(run)
    assert "intact" in checkpoint_browser.verify("step-30")
    assert states(checkpoint_browser) == {"step-30": ("finished", "verified"), "step-40": ("finished", "")}
    (run / "step-30/common.pt").write_bytes(b"x")
    assert states(checkpoint_browser)["step-30"] == ("finished", "")
    assert "common.pt" in checkpoint_browser.verify("step-30")
    assert states(checkpoint_browser)["step-30"] == ("finished", "damaged")


def test_a_step_that_is_saved_again_is_another_one_though_it_is_as_large(run):
    checkpoint_browser, manifest = CheckpointBrowser(run), write_checkpoint(run, 30)
    checkpoint_browser.verify("step-30")
    assert states(checkpoint_browser)["step-30"] == ("finished", "verified")
    storage_of(run).write("step-30/manifest.json", [encode(replace(manifest, created="2001-02-03T04:05:06+00:00"))])
    checkpoint = checkpoint_browser.list_checkpoints().checkpoints[0]
    assert (checkpoint.checked, checkpoint.created) == ("", 981173106.0)


def test_a_damaged_manifest_and_a_damaged_latest_are_reported(run):
    (run / "step-30/manifest.json").write_bytes(b"{}")
    (run / "latest").write_bytes(b"step-4")
    listing = CheckpointBrowser(run).list_checkpoints()
    assert listing.checkpoints[0].checked == "damaged" and "the last line" in listing.checkpoints[0].detail
    assert "the file is damaged" in listing.trouble


def test_only_checkpoints_that_are_not_being_saved_are_deleted(run):
    steps.begin_step(storage_of(run), 50)
    (run / "step-50.partial").mkdir()
    (run / "step-60.partial").mkdir()
    checkpoint_browser = CheckpointBrowser(run)
    assert states(checkpoint_browser)["step-50.partial"] == ("partial", "")
    with pytest.raises(InvalidArgument, match="is being saved by"):
        checkpoint_browser.delete("step-50.partial")
    assert checkpoint_browser.delete("step-60.partial") == "step-60.partial was deleted"
    assert checkpoint_browser.delete("step-40") == "step-40 was deleted"
    assert (
        set(states(checkpoint_browser)) == {"step-30", "step-50.partial"}
        and checkpoint_browser.list_checkpoints().checkpoints[0].latest
    )
    with pytest.raises(CheckpointError):
        checkpoint_browser.delete("step-40")
    for name in ("..", "latest", "", "../run"):
        with pytest.raises(InvalidArgument):
            checkpoint_browser.delete(name)
    steps.abandon_step(storage_of(run), 50)


@pytest.mark.parametrize("name", ["step-50", "step-50.partial"])
def test_a_step_that_gets_its_name_file_by_file_is_being_saved(monkeypatch, name):
    """Check the moment in which an object store has copied a part of the step, the manifest not yet."""
    url = f"memory://{uuid.uuid4().hex}/run"
    storage, checkpoint_browser, rows = storage_of(url), CheckpointBrowser(url), {}
    copy = storage._filesystem.cp_file

    def copy_and_look(source, target, **options):
        if not rows and target.endswith("/step-50/manifest.json"):
            rows.update({row.name: row for row in checkpoint_browser.list_checkpoints().checkpoints})
            with pytest.raises(InvalidArgument, match=f"^{name} is being saved by process"):
                checkpoint_browser.delete(name)
        copy(source, target, **options)

    monkeypatch.setattr(storage._filesystem, "cp_file", copy_and_look)
    partial = steps.begin_step(storage, 50)
    storage.write(f"{partial}/data", [b"x"])
    storage.write(f"{partial}/manifest.json", [b"{}"])
    steps.commit_step(storage, 50)
    assert rows[name].state == "partial"
    assert rows[name].detail.startswith("being saved by process")
    assert storage.list("step-50") == {"data": 1, "manifest.json": 2}


def test_what_a_killed_save_has_left_of_a_final_name_is_interrupted_and_deleted():
    url = f"memory://{uuid.uuid4().hex}/run"
    storage, checkpoint_browser = storage_of(url), CheckpointBrowser(url)
    storage.write("step-50/data", [b"x"])
    storage.write("step-50.latest", [b"x"])
    (row,) = checkpoint_browser.list_checkpoints().checkpoints
    assert (row.name, row.state, row.detail) == ("step-50", "partial", "the save was interrupted")
    assert checkpoint_browser.delete("step-50") == "step-50 was deleted"


def test_load_calls_its_loader_or_shows_the_code(run):
    assert f"load(sharded_state_dict(model, optimizer), {str(run)!r}, step=30)" in CheckpointBrowser(run).load(
        "step-30"
    )
    assert CheckpointBrowser(run, lambda _where, _manifest: None).load("step-30").startswith("run this in a cell")
    assert (
        CheckpointBrowser(run, lambda where, manifest: f"{where} {manifest.step}").load("step-30")
        == f"{run}/step-30 30"
    )


def test_a_relative_folder_means_that_of_the_call_whatever_the_working_directory_is_later(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint_browser = CheckpointBrowser("run", lambda where, _manifest: where)
    single, told = CheckpointBrowser("run/step-40", lambda where, _manifest: where), CheckpointBrowser("run")
    write_checkpoint(tmp_path / "elsewhere/run", 30)
    (tmp_path / "elsewhere/run/step-30/common.pt").unlink()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "intact" in checkpoint_browser.verify("step-30")
    assert checkpoint_browser.load("step-30") == f"{run}/step-30"
    assert "intact" in single.verify("step-40")
    assert single.load("step-40") == f"{run}/step-40"
    assert f"load(sharded_state_dict(model, optimizer), {str(run)!r}, step=30)" in told.load("step-30")
    assert checkpoint_browser.list_checkpoints().folder == "run"


def test_checkpoints_with_names_are_listed(run):
    (run / "step-40").rename(run / "checkpoint_7")
    checkpoint_browser = CheckpointBrowser(run)
    assert states(checkpoint_browser) == {"step-30": ("finished", ""), "checkpoint_7": ("finished", "")}
    assert "intact" in checkpoint_browser.verify("checkpoint_7")
    assert states(checkpoint_browser)["checkpoint_7"] == ("finished", "verified")
    assert f"{run}/checkpoint_7" in checkpoint_browser.load("checkpoint_7")
    assert checkpoint_browser.delete("checkpoint_7") == "checkpoint_7 was deleted"
    assert set(states(checkpoint_browser)) == {"step-30"}


def test_a_checkpoint_may_have_the_name_of_its_folder(run):
    (run / "step-40").rename(run / "run")
    checkpoint_browser = CheckpointBrowser(run, lambda where, manifest: f"{where} {manifest.step}")
    assert "intact" in checkpoint_browser.verify("run")
    assert states(checkpoint_browser)["run"] == ("finished", "verified")
    assert checkpoint_browser.load("run") == f"{run}/run 40"


def test_folders_of_another_program_are_listed_only_if_they_are_checkpoints(run):
    import torch
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="in a single process"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=run / "step-50", no_dist=True)
    (run / "step-60").mkdir()
    (run / "step-60/model.pt").write_bytes(b"x")
    checkpoint_browser = CheckpointBrowser(run)
    assert states(checkpoint_browser) == {f"step-{n}": ("foreign" if n == 50 else "finished", "") for n in (30, 40, 50)}
    checkpoint_browser.verify("step-50")
    assert states(checkpoint_browser)["step-50"] == ("foreign", "verified")
    assert f"{run}/step-50" in checkpoint_browser.load("step-50")
    assert checkpoint_browser.delete("step-50") == "step-50 was deleted"
    assert (run / "step-60/model.pt").exists()


def test_listing_takes_as_many_requests_as_there_are_steps(tmp_path, monkeypatch):
    for step in range(50):
        write_checkpoint(tmp_path / "run", step)
    checkpoint_browser = CheckpointBrowser(tmp_path / "run")
    assert len(states(checkpoint_browser)) == 50
    listed = []
    original = LocalStorage.list
    monkeypatch.setattr(LocalStorage, "list", lambda self, path="": listed.append(path) or original(self, path))
    assert len(states(checkpoint_browser)) == 50
    assert listed.count("") <= 2, "the list itself, and the one that finds the latest step"
    assert len(listed) <= 2 * 50 + 5


def test_nothing_is_remembered_of_checkpoints_that_were_removed(run):
    checkpoint_browser = CheckpointBrowser(run)
    checkpoint_browser.list_checkpoints()
    checkpoint_browser.verify("step-30")
    shutil.rmtree(run / "step-30")
    assert set(states(checkpoint_browser)) == {"step-40"}
    assert (set(checkpoint_browser._cache), set(checkpoint_browser._verified)) == ({"step-40"}, set())


def test_a_step_that_is_removed_while_it_is_read_is_not_listed_as_damaged(run, monkeypatch):
    original = views.read_manifest

    def read(storage, path):
        if path == "step-30":
            steps.remove(storage, 30)
        return original(storage, path)

    monkeypatch.setattr(views, "read_manifest", read)
    assert states(CheckpointBrowser(run)) == {"step-40": ("finished", "")}


def test_a_checkpoint_itself_and_an_empty_folder(run, tmp_path):
    checkpoint_browser = CheckpointBrowser(run / "step-30")
    assert states(checkpoint_browser) == {"step-30": ("finished", "")}
    assert CheckpointBrowser(tmp_path / "nothing").list_checkpoints().checkpoints == ()
