"""`%distributed stacks`: the user's frames in full, and frames of libraries folded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy
import pytest

import rankbook
from rankbook.formatting import is_users, shorten_library_path
from rankbook.magics.reports import describe_stacks
from rankbook.protocol.messages import Frame, Stack

NUMPY = str(Path(numpy.__file__).with_name("core.py"))
STANDARD = str(Path(sysconfig.get_paths()["stdlib"], "threading.py"))


def stack(*frames: Frame, waits_for: str = "") -> Stack:
    return Stack(token=1, cell=2, frames=frames, waits_for=waits_for)


def test_frames_of_libraries_are_folded_and_the_innermost_is_named():
    user_frame = Frame("Cell In[2]", 7, "<module>", "train()")
    module = Frame("/home/me/train.py", 3, "forward", "return self.up(x)")
    text = describe_stacks(
        {
            0: stack(
                user_frame,
                Frame(NUMPY, 1, "a", "b()"),
                Frame(NUMPY, 2, "b"),
                module,
                Frame(STANDARD, 355, "wait", "go()"),
            )
        },
        {},
    )
    assert text.splitlines() == [
        "rank 0: running",
        "  Cell In[2]:7 in <module>",
        "    train()",
        "  … 2 frames of libraries",
        "  /home/me/train.py:3 in forward",
        "    return self.up(x)",
        "  … 1 frame of libraries, at threading.py:355 in wait",
    ]


def test_ranks_that_wait_in_the_same_line_are_one_entry():
    wait = stack(Frame("Cell In[2]", 7, "<module>", "dist.barrier()"), waits_for="barrier #1")
    text = describe_stacks({0: wait, 1: wait, 2: None}, {2: "dead"})
    assert text == (
        "ranks 0-1: running, waiting in barrier #1\n  Cell In[2]:7 in <module>\n    dist.barrier()\nrank 2: dead"
    )


@pytest.mark.parametrize(
    ("file", "users", "short"),
    [
        ("Cell In[5]", True, "Cell In[5]"),
        ("/home/me/train.py", True, "/home/me/train.py"),
        ("/opt/lib/site-packages/torch/nn/modules/module.py", False, "torch/nn/modules/module.py"),
        (STANDARD, False, "threading.py"),
        (str(Path(rankbook.__file__).with_name("errors.py")), False, "rankbook/errors.py"),
        ("<frozen importlib._bootstrap>", False, "<frozen importlib._bootstrap>"),
    ],
)
def test_a_file_is_the_user_s_or_is_shown_below_its_library(file, users, short):
    assert is_users(file) == users
    assert shorten_library_path(file) == short
