from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rankbook.checkpoint.storage import steps
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.cli import main as cli
from tests.checkpoint.hand_made import write_checkpoint


@pytest.fixture
def run(tmp_path):
    write_checkpoint(tmp_path / "run", 30)
    write_checkpoint(tmp_path / "run", 40)
    return tmp_path / "run"


def test_ls_lists_the_steps_the_latest_and_what_was_aborted(run, capsys):
    steps.begin_step(storage_of(run), 50)
    (run / "step-60.partial").mkdir()
    assert cli.main(["checkpoint", "ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["STEP", "SIZE", "TENSORS", "RANKS", "SAVED"]
    assert lines[1].split()[0] == "30"
    assert lines[2].split()[:2] == ["*", "40"]
    assert lines[2].split()[4:6] == ["5", "2"]
    assert lines[3] == "not finished:"
    assert lines[4] == "  step-60.partial: interrupted save; the next save removes it"
    steps.abandon_step(storage_of(run), 50)


def test_ls_reports_a_damaged_latest_and_a_damaged_manifest(run, capsys):
    (run / "latest").write_bytes(b"step-4")
    (run / "step-30/manifest.json").write_bytes(b"{}")
    assert cli.main(["checkpoint", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    assert "latest: the file is damaged" in out
    assert "step-30/manifest.json: the last line" in out


def test_show_lists_tensors_objects_and_files(run, capsys):
    assert cli.main(["checkpoint", "show", str(run), "--step", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}/step-30"
    assert "loss: 0.5" in lines
    assert ["model.0.w", "float32", "16×6", "2", "384", "B", "0-1"] in [line.split() for line in lines]
    assert ["rng/shard_1_2", "1"] in [[*line.split()[:1], *line.split()[-1:]] for line in lines]
    assert any(line.startswith("__RANK_1.distcp") for line in lines)


@pytest.mark.processes
def test_a_reader_that_has_gone_away_is_no_error(run):
    read, write = os.pipe()
    os.close(read)
    code = "from rankbook.cli.main import main; raise SystemExit(main())"
    for action in ("ls", "show", "verify"):
        command = [sys.executable, "-c", code, "checkpoint", action, str(run)]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (1, "")
    os.close(write)


def test_verify_exits_with_1_where_something_is_damaged(run, capsys):
    assert cli.main(["checkpoint", "verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out.count(": intact (") == 2
    (run / "step-30/common.pt").write_bytes(b"x")
    assert cli.main(["checkpoint", "verify", str(run)]) == 0
    assert cli.main(["checkpoint", "verify", str(run), "--all"]) == 1
    assert "step-30/common.pt" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(run), "--step", "30"]) == 1


def test_convert_command_exports_and_imports_safetensors(run, tmp_path, capsys):
    assert cli.main(["checkpoint", "convert", str(run), str(tmp_path / "hf")]) == 0
    assert "not converted, because safetensors cannot store it: rng/shard_0_2" in capsys.readouterr().out
    assert cli.main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--step", "9"]) == 0
    assert "5 tensors" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(tmp_path / "back")]) == 0


def test_convert_command_does_not_choose_the_step_in_a_folder_of_steps(run, tmp_path, capsys):
    assert cli.main(["checkpoint", "convert", str(run), str(tmp_path / "hf")]) == 0
    storage = storage_of(run)
    assert cli.main(["checkpoint", "convert", str(tmp_path / "hf"), str(run)]) == 2
    assert f"{run} has the steps 30, 40: choose the step to write with --step" in capsys.readouterr().err
    assert (steps.finished_steps(storage), steps.read_latest(storage)) == ([30, 40], 40)
    assert cli.main(["checkpoint", "convert", str(tmp_path / "hf"), str(run), "--step", "0"]) == 0
    assert (steps.finished_steps(storage), steps.read_latest(storage)) == ([0, 30, 40], 0)
    assert cli.main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    assert steps.finished_steps(storage_of(tmp_path / "new")) == [0]


@pytest.mark.parametrize("source", ["run", "run/step-40"])
def test_convert_command_exports_a_checkpoint_that_has_a_model_beside_it(run, tmp_path, source):
    (tmp_path / source / "model.safetensors").write_bytes(b"of save_model")
    assert cli.main(["checkpoint", "convert", str(tmp_path / source), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 1000
    assert cli.main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    assert steps.finished_steps(storage_of(tmp_path / "back")) == [0]


def test_path_without_a_checkpoint_is_one_line_of_error(tmp_path, capsys):
    for action in (["ls"], ["show"], ["verify"], ["convert", str(tmp_path / "x")]):
        assert cli.main(["checkpoint", action[0], str(tmp_path / "nowhere"), *action[1:]]) == 2
        err = capsys.readouterr().err
        assert err.startswith("rankbook: ") and "no checkpoint found" in err and err.count("\n") == 1


@pytest.mark.processes
def test_checkpoint_commands_do_not_import_torch(run):
    code = (
        "import sys\nfrom rankbook.cli import main as cli\n"
        f"codes = [cli.main(['checkpoint', action, {str(run)!r}]) for action in ('ls', 'show', 'verify')]\n"
        "assert 'torch' not in sys.modules and codes == [0, 0, 0], codes\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
