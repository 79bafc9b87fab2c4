"""Errors of a recoverable group: which are passed on, which become CollectiveAborted, and what the ledger counts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rankbook.errors import CollectiveAborted
from rankbook.rank.process_groups.collective_log import OPS, CollectiveLog
from rankbook.rank.process_groups.gloo import Opened
from rankbook.rank.process_groups.recoverable_group import BackendGroup, RecoverableProcessGroup

TENSORS = [torch.ones(2)]


class FakeGroup:
    """In place of torch's inner group: its collectives raise `error`, or return no work."""

    error: BaseException | None = None

    def allreduce(self, *_args: object) -> None:
        if self.error is not None:
            raise self.error


def group_that_raises(error: BaseException | None) -> RecoverableProcessGroup:
    inner = FakeGroup()
    inner.error = error
    return RecoverableProcessGroup(
        dist.HashStore(), 0, (0, 1), BackendGroup(inner, Opened(), []), CollectiveLog("0", (0, 1)), where=lambda: 7
    )


@pytest.mark.parametrize("error", [TypeError("no tensor"), KeyboardInterrupt(), RuntimeError("invalid tensor size")])
def test_a_collective_that_is_refused_raises_its_error_and_takes_no_number(error):
    group = group_that_raises(error)
    with pytest.raises(type(error)) as caught:
        group.allreduce(TENSORS, None)
    assert caught.value is error
    assert (group.ledger.count, group.ledger.total, [*group.ledger.pending()]) == (0, 0, [])


def test_a_collective_on_a_broken_link_raises_the_cause_and_keeps_its_number():
    group = group_that_raises(RuntimeError("Connection closed by peer"))
    group._told.set()  # the cause is not waited for
    with pytest.raises(CollectiveAborted, match=r"another rank broke off.* waited in all_reduce #1 .* at line 7"):
        group.allreduce(TENSORS, None)
    assert (group.ledger.count, group.ledger.total, [*group.ledger.pending()]) == (1, 1, [])
    assert group.ledger.broken


def test_a_collective_without_a_work_has_ended():
    group = group_that_raises(None)
    assert group.allreduce(TENSORS, None) is None
    assert (group.ledger.count, [*group.ledger.pending()]) == (1, [])


EMPTY = RuntimeError("tensor size (0) does not match the bucket")


def test_an_error_about_an_empty_tensor_is_the_users_own():
    group = group_that_raises(None)
    _, launched = group.ledger.launch(OPS["allreduce"], (TENSORS, None))
    assert group.error_for(EMPTY, launched) is EMPTY
    assert group.broken_for == 0


def test_an_error_about_an_empty_tensor_tells_the_cause_once_waits_were_ended_with_one():
    group = group_that_raises(None)
    _, launched = group.ledger.launch(OPS["allreduce"], (TENSORS, None))
    group._forsaken = True
    group.explain("rank 1 raised ValueError")
    error = group.error_for(EMPTY, launched)
    assert isinstance(error, CollectiveAborted)
    assert str(error).startswith("rank 1 raised ValueError while this rank waited in all_reduce #1")
    assert group.error_for(ValueError("something else"), launched).args == ("something else",)
