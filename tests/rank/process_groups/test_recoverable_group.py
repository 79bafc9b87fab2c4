"""Errors of a recoverable group: which are passed on, which become CollectiveAborted, and what the log counts."""

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
    """Stand-in for torch's inner group: its collectives raise `error`, or return no work."""

    error: BaseException | None = None

    def allreduce(self, *_args: object) -> None:
        if self.error is not None:
            raise self.error


def group_that_raises(error: BaseException | None) -> RecoverableProcessGroup:
    inner = FakeGroup()
    inner.error = error
    return RecoverableProcessGroup(
        dist.HashStore(),
        0,
        (0, 1),
        BackendGroup(inner, Opened(), []),
        CollectiveLog("0", (0, 1)),
        current_line=lambda: 7,
    )


@pytest.mark.parametrize("error", [TypeError("no tensor"), KeyboardInterrupt(), RuntimeError("invalid tensor size")])
def test_a_collective_that_is_refused_raises_its_error_and_takes_no_number(error):
    group = group_that_raises(error)
    with pytest.raises(type(error)) as caught:
        group.allreduce(TENSORS, None)
    assert caught.value is error
    assert (group.log.count, group.log.total, [*group.log.pending()]) == (0, 0, [])


def test_a_collective_on_a_broken_link_raises_the_cause_and_keeps_its_number():
    group = group_that_raises(RuntimeError("Connection closed by peer"))
    group._cause_set.set()  # the cause is not waited for
    expected = r"another rank aborted the collective.* waited in all_reduce #1 .* at line 7"
    with pytest.raises(CollectiveAborted, match=expected):
        group.allreduce(TENSORS, None)
    assert (group.log.count, group.log.total, [*group.log.pending()]) == (1, 1, [])
    assert group.log.broken


def test_a_mismatch_is_told_as_it_is_since_it_names_the_collective_and_the_line():
    group = group_that_raises(RuntimeError("Connection closed by peer"))
    _, launched = group.log.launch(OPS["allreduce"], (TENSORS, None))
    cause = "all_reduce #1: rank 0 gave float32[2], rank 1 float32[3], at line 1"
    group.set_cause(cause, mismatch=True)
    group.set_cause("rank 1 raised CollectiveAborted")
    assert str(group.error_for(RuntimeError("Connection closed by peer"), launched)) == cause
    with pytest.raises(CollectiveAborted, match="at line 1, so this rank cannot begin all_reduce at line 7"):
        group.allreduce(TENSORS, None)


def test_broken_connection_of_unknown_cause_is_reported_once():
    group = group_that_raises(RuntimeError("Connection closed by peer"))
    reported = []

    def tell() -> None:
        reported.append(group.log.report().broken)
        group.set_cause("rank 1 died")

    group.on_break = tell
    for _ in range(2):
        with pytest.raises(CollectiveAborted, match="rank 1 died"):
            group.allreduce(TENSORS, None)
    assert reported == [True]


def test_a_failed_transport_without_a_better_reason_means_different_tensors(monkeypatch):
    monkeypatch.setattr("rankbook.rank.process_groups.recoverable_group._CAUSE_TIMEOUT", 0)
    group = group_that_raises(None)
    _, launched = group.log.launch(OPS["allreduce"], (TENSORS, None))
    group.fail_transport()
    error = group.error_for(RuntimeError("the transport has failed"), launched)
    assert "the tensors of a collective differ in size or type between ranks" in str(error)


def test_a_collective_without_a_work_has_ended():
    group = group_that_raises(None)
    assert group.allreduce(TENSORS, None) is None
    assert (group.log.count, [*group.log.pending()]) == (1, [])


EMPTY = RuntimeError("tensor size (0) does not match the bucket")


def test_an_error_about_an_empty_tensor_is_the_users_own():
    group = group_that_raises(None)
    _, launched = group.log.launch(OPS["allreduce"], (TENSORS, None))
    assert group.error_for(EMPTY, launched) is EMPTY
    assert group.seconds_since_abort == 0


def test_an_error_about_an_empty_tensor_tells_the_cause_once_waits_were_ended_with_one():
    group = group_that_raises(None)
    _, launched = group.log.launch(OPS["allreduce"], (TENSORS, None))
    group._futures_completed = True
    group.set_cause("rank 1 raised ValueError")
    error = group.error_for(EMPTY, launched)
    assert isinstance(error, CollectiveAborted)
    assert str(error).startswith("rank 1 raised ValueError while this rank waited in all_reduce #1")
    assert group.error_for(ValueError("something else"), launched).args == ("something else",)


NCCL_ERROR = (
    "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("last", "first"),
    [
        ("Duplicate GPU detected : rank 0 and rank 1", "Duplicate GPU detected : rank 0 and rank 1\nNCCL error in"),
        ("Error while creating shared memory segment /dev/shm/nccl-1", r"Error .*: /dev/shm is full: enlarge it"),
        ("Failed to CUDA calloc async 608 bytes", r"Failed .*: the device has no memory left for NCCL"),
        ("Call to bind failed on socket", "Call to bind failed on socket\n"),
    ],
)
def test_an_error_of_nccl_says_its_reason_first_and_is_no_abort(last, first):
    group = group_that_raises(dist.DistBackendError(NCCL_ERROR + last))
    with pytest.raises(dist.DistBackendError, match=first):
        group.allreduce(TENSORS, None)
    assert not group.log.broken
    assert (group.log.count, group.log.total, [*group.log.pending()]) == (0, 0, []), "the others would wait for it"


def test_lost_peer_is_reported_with_the_cause_or_the_nccl_error():
    error = dist.DistBackendError(NCCL_ERROR.replace("ncclInvalidUsage", "ncclRemoteError") + "a peer has exited")
    group = group_that_raises(error)
    group._cause_set.set()  # the cause is not waited for
    with pytest.raises(dist.DistBackendError, match=r"^a peer has exited"):
        group.allreduce(TENSORS, None)
    group = group_that_raises(error)
    group.on_break = lambda: group.set_cause("rank 1 was killed")
    with pytest.raises(CollectiveAborted, match="rank 1 was killed while this rank waited"):
        group.allreduce(TENSORS, None)


def test_a_group_whose_renewal_is_interrupted_is_connected_and_can_be_renewed_again(monkeypatch):
    group = group_that_raises(RuntimeError("Connection closed by peer"))
    group.set_cause("rank 1 has died")
    former, second, third = (
        group._inner,
        BackendGroup(FakeGroup(), Opened(), []),
        BackendGroup(FakeGroup(), Opened(), []),
    )

    def destroy() -> None:
        BackendGroup.destroy(former)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(former, "destroy", destroy)
    with pytest.raises(KeyboardInterrupt):
        group.renew(second, 2)
    group.allreduce(TENSORS, None)
    group.renew(third, 3)
    group.allreduce(TENSORS, None)
    assert (group.log.count, group.cause) == (1, None)
    assert not hasattr(former, "group") and not hasattr(second, "group")
