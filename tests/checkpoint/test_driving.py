"""What is said of a failure: the same words for all ranks, and the interrupt for the rank that it hit."""

from __future__ import annotations

import traceback

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from rankbook.checkpoint.driving import raise_own, words
from rankbook.errors import CheckpointingException


def failure(**by_rank):
    summary = traceback.extract_stack(limit=1)
    return CheckpointException("failed", {int(rank[1:]): (error, summary) for rank, error in by_rank.items()})


def test_one_complaint_is_said_once_whoever_makes_it():
    own = CheckpointingException("tensor 'w' has a hole")
    assert words(failure(r0=own), "save") == "tensor 'w' has a hole"
    assert words(failure(r0=own, r3=own), "save") == "tensor 'w' has a hole"


def test_what_others_raise_is_said_with_its_ranks():
    disk, other = OSError(28, "No space left"), CheckpointingException("a damaged chunk")
    assert words(failure(r1=disk, r2=disk), "save") == (
        "the save failed, and nothing was changed: ranks 1, 2: OSError: [Errno 28] No space left"
    )
    assert words(failure(r0=other, r5=disk), "load") == (
        "the load failed: rank 0: a damaged chunk; rank 5: OSError: [Errno 28] No space left"
    )


def test_an_interrupt_is_raised_where_it_came():
    hit = failure(r1=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        raise_own(hit, 1, "words")
    with pytest.raises(CheckpointingException, match=r"^words$"):
        raise_own(hit, 0, "words")


def test_the_cause_is_kept_where_it_happened():
    disk = OSError(28, "No space left")
    with pytest.raises(CheckpointingException) as caught:
        raise_own(failure(r0=disk), 0, "words")
    assert caught.value.__cause__ is disk
    with pytest.raises(CheckpointingException) as caught:
        raise_own(failure(r1=disk), 0, "words")
    assert caught.value.__cause__ is None
