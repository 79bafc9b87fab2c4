"""nbdistributed's magics, in a real kernel: which of ours they are, and what they refuse."""

from __future__ import annotations

import pytest

from tests.conftest import Kernel, Notebook

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def loaded(kernel: Kernel) -> Notebook:
    return kernel(load="rankbook.magics.nbdistributed")


def test_what_cannot_be_honoured_is_refused_with_the_way_to_have_it(loaded):
    refused = {
        "%dist_init -n 2 --gpu-ids 3,4": "CUDA_VISIBLE_DEVICES=3,4",
        "%dist_init -n 2 -a 10.0.0.1": "this machine",
        "%dist_init --workers 2": "--num-processes",
        "%dist_mode -e -d": "not allowed with",
        "%%rank 0\n1": "in brackets",
        "%sync": "no ranks are running",
    }
    for code, words in refused.items():
        outcome = loaded.run(code)
        assert outcome.status == "error" and words in outcome.evalue + outcome.stderr, code
        assert len((outcome.traceback or outcome.stderr).splitlines()) <= 3, "one line, and no frames of ours"
    assert "no ranks are running" in loaded.ok("%dist_status").stdout, "nothing was started"


@pytest.mark.full
def test_each_is_one_of_ours_and_they_go_with_the_extension(loaded):
    told = loaded.ok('%dist_init -g "0,1" -t 60.0').stdout
    assert told.startswith("2 ranks are ready: ") and "--timeout is left out" in told
    assert loaded.ok("gpu_id is None").text == "[0-1] True\n"
    assert loaded.ok("%%rank [0-1]\nrank").text == loaded.ok("%%rank[0, 1]\nrank").text == "[0] 0\n[1] 1\n"
    assert loaded.ok("%%rank [1]\n%pwd").text.startswith("[1] ")
    assert "there is no rank 2" in loaded.run("%%rank [2]\n1").evalue
    failed = loaded.run("%%rank [1]\n1 / 0")
    assert (failed.status, failed.ename) == ("error", "ZeroDivisionError")
    assert "nbdistributed.py" not in failed.traceback
    assert loaded.ok("%sync").stdout == "all 2 ranks are at the same point\n"
    assert "in the notebook now" in loaded.ok("%dist_mode -d").stdout
    assert loaded.ok("%dist_mode").stdout == "plain cells run in the notebook\n"
    assert loaded.ok("'rank' in globals()").text == "False\n"
    loaded.ok("%dist_mode --enable")
    assert loaded.ok("%dist_mode").stdout == "plain cells run on the ranks\n"
    assert "idle" in loaded.ok("%dist_debug").text
    for code in ("%timeline_save", "%timeline_debug", "%timeline_clear"):
        assert "%%distributed --time" in loaded.ok(code).stdout
    assert "Tab" in loaded.ok("%dist_sync_ide").stdout
    loaded.ok("%dist_reset")
    assert loaded.ok("'gpu_id' in globals()").text == "False\n"
    loaded.ok("%unload_ext rankbook.magics.nbdistributed")
    assert loaded.run("%dist_status").status == loaded.run("%distributed status").status == "error"
    loaded.ok("%load_ext rankbook.magics.nbdistributed")
    assert "no ranks are running" in loaded.ok("%dist_status").stdout
