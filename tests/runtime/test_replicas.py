"""Test the choice of the replica whose state all ranks take over."""

from __future__ import annotations

import pytest

from rankbook.runtime.strategies.transfer import choose_row


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({0: (7,), 1: (7,), 2: None, 3: (7,)}, [0, 1]),  # the shards of rank 2 are lost
        ({0: (7,), 1: (7,), 2: (8,), 3: (8,)}, [2, 3]),  # the replica that has made more steps
        ({0: (7,), 1: (8,), 2: (7,), 3: (7,)}, [2, 3]),  # the shards of the first one are of different steps
        ({0: (8, 7), 1: (7, 7), 2: (7, 7), 3: (7, 7)}, [2, 3]),  # so are they if one of two optimizers has stepped
        ({0: (0,), 1: (0,), 2: None, 3: None}, [0, 1]),
        ({0: (7,), 1: (8,), 2: None, 3: (8,)}, None),
        ({0: None, 1: (8,), 2: None, 3: (8,)}, None),
    ],
)
def test_a_whole_replica_of_one_step_is_chosen(steps, expected):
    assert choose_row([[0, 1], [2, 3]], steps) == expected


def test_without_replicas_there_is_none():
    assert choose_row([], {0: (1,), 1: (1,)}) is None
