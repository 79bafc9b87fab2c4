"""A cluster's folders are removed while it runs, as a cleaner of temporary files may do."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


FOLDERS = "import rankbook, shutil\nc = rankbook.current()\nf = c._processes._folders"
REMOVE = "for each in {f.sockets, f.segments}: shutil.rmtree(each, ignore_errors=True)"


def test_a_removed_runtime_folder_is_made_again(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 2")
    fresh_notebook.ok(f"{FOLDERS}\n{REMOVE}")
    fresh_notebook.ok("%%distributed\nbig = torch.ones(1 << 20)\ndist.all_reduce(big)")
    assert "1048576 2.0" in fresh_notebook.ok("x = c.pull('big')[0]\nprint(len(x), float(x[0]))").stdout
    fresh_notebook.ok(f"c.push({{'y': x}})\n{REMOVE}")
    fresh_notebook.run("%%distributed\nimport os\nif rank == 1: os._exit(3)")
    fresh_notebook.ok("%distributed heal")
    assert "[0-1] 1048576" in fresh_notebook.ok("%%distributed\nprint(len(y))").stdout
    assert "[0o700, 0o700]" in fresh_notebook.ok(
        "print([oct(each.stat().st_mode & 0o777) for each in (f.sockets, f.segments)])"
    ).stdout.replace("'", "")


def test_a_folder_that_others_may_enter_is_refused_and_named(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 2")
    fresh_notebook.ok(f"{FOLDERS}\nshutil.rmtree(f.sockets)\nf.sockets.mkdir()\nf.sockets.chmod(0o755)")
    fresh_notebook.run("%%distributed\nimport os\nif rank == 1: os._exit(3)")
    outcome = fresh_notebook.run("%distributed heal")
    assert "expected" in outcome.traceback and "mode 0700" in outcome.traceback
    assert "[0] here" in fresh_notebook.ok("%%distributed -r 0\nprint('here')").stdout
    fresh_notebook.ok("f.sockets.chmod(0o700)\n%distributed heal")
    assert "[0-1] here" in fresh_notebook.ok("%%distributed\nprint('here')").stdout
