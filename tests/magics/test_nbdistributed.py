"""nbdistributed's magics, in a real kernel: which of ours they are, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Notebook, check_nothing_left, leftovers


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    before = leftovers()
    notebook = Notebook()
    try:
        notebook.ok("%load_ext rankbook.magics.nbdistributed")
        yield notebook
    finally:
        notebook.close()
    check_nothing_left(notebook.mark, before)


def test_what_cannot_be_honoured_is_refused_with_the_way_to_have_it(kernel):
    refused = {
        "%dist_init -n 2 --gpu-ids 3,4": "CUDA_VISIBLE_DEVICES=3,4",
        "%dist_init -n 2 -a 10.0.0.1": "this machine",
        "%dist_init --workers 2": "--num-processes",
        "%dist_mode -e -d": "not allowed with",
        "%%rank 0\n1": "in brackets",
        "%sync": "no ranks are running",
    }
    for code, words in refused.items():
        outcome = kernel.run(code)
        assert outcome.status == "error" and words in outcome.evalue + outcome.stderr, code
        assert len((outcome.traceback or outcome.stderr).splitlines()) <= 3, "one line, and no frames of ours"
    assert "no ranks are running" in kernel.ok("%dist_status").stdout, "nothing was started"


def test_each_is_one_of_ours_and_they_go_with_the_extension(kernel):
    told = kernel.ok('%dist_init -g "0,1" -t 60.0').stdout
    assert told.startswith("2 ranks are ready: ") and "--timeout is left out" in told
    assert kernel.ok("gpu_id is None").text == "[0-1] True\n"
    assert kernel.ok("%%rank [0-1]\nrank").text == kernel.ok("%%rank[0, 1]\nrank").text == "[0] 0\n[1] 1\n"
    assert kernel.ok("%%rank [1]\n%pwd").text.startswith("[1] ")
    assert "there is no rank 2" in kernel.run("%%rank [2]\n1").evalue
    failed = kernel.run("%%rank [1]\n1 / 0")
    assert (failed.status, failed.ename) == ("error", "ZeroDivisionError")
    assert "nbdistributed.py" not in failed.traceback
    assert kernel.ok("%sync").stdout == "all 2 ranks are at the same point\n"
    assert "in the notebook now" in kernel.ok("%dist_mode -d").stdout
    assert kernel.ok("%dist_mode").stdout == "plain cells run in the notebook\n"
    assert kernel.ok("'rank' in globals()").text == "False\n"
    kernel.ok("%dist_mode --enable")
    assert kernel.ok("%dist_mode").stdout == "plain cells run on the ranks\n"
    assert "idle" in kernel.ok("%dist_debug").text
    for code in ("%timeline_save", "%timeline_debug", "%timeline_clear"):
        assert "%%distributed --time" in kernel.ok(code).stdout
    assert "Tab" in kernel.ok("%dist_sync_ide").stdout
    kernel.ok("%dist_reset")
    assert kernel.ok("'gpu_id' in globals()").text == "False\n"
    kernel.ok("%unload_ext rankbook.magics.nbdistributed")
    assert kernel.run("%dist_status").status == kernel.run("%distributed status").status == "error"
    kernel.ok("%load_ext rankbook.magics.nbdistributed")
    assert "no ranks are running" in kernel.ok("%dist_status").stdout
