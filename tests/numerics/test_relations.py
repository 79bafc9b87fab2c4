"""Relations of two tensors, each planted in one of them."""

import math

import pytest
import torch

from rankbook.numerics.relations import classify, relative_difference

GENERATOR = torch.Generator().manual_seed(3)
REFERENCE = torch.randn(12, 6, generator=GENERATOR)
NOISE = 1 + 1e-7 * torch.randn(12, 6, generator=GENERATOR)
PARTS = [torch.randn(12, 6, generator=GENERATOR) for _ in range(4)]
MEAN = torch.stack(PARTS).mean(0)


def kind(candidate, reference=REFERENCE, **options):
    return classify(reference, candidate * 1.0, **{"tolerance": 1e-6, "world_size": 4, **options}).kind


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (REFERENCE * 4 * NOISE, "×N"),
        (REFERENCE / 4 * NOISE, "÷N"),
        (REFERENCE * 2 * NOISE, "×√N"),
        (REFERENCE * 0.3, "factor"),
        (REFERENCE * -1, "factor"),
        (REFERENCE.roll(3, 0) * NOISE, "shifted"),
        (REFERENCE.bfloat16().float(), "precision"),
        (REFERENCE.half().float(), "precision"),
        (REFERENCE * (1 + 0.003 * (NOISE - 1) / 1e-7), "precision"),
        (torch.cat([REFERENCE[:6], REFERENCE[6:] * 2]), "shards scaled"),
        (torch.randn(12, 6, generator=GENERATOR), "other"),
        (torch.full((12, 6), float("nan")), "not finite"),
        (REFERENCE[:6], "shape"),
    ],
)
def test_relation_is_recognized(candidate, expected):
    assert kind(candidate) == expected


def test_a_tensor_that_is_close_to_the_reference_has_no_relation_to_it():
    assert kind(REFERENCE) == kind(REFERENCE * NOISE) == "other"


def test_complex_tensors_are_compared_with_their_imaginary_parts():
    reference = torch.complex(REFERENCE, REFERENCE.flip(0))
    assert kind(reference * 4, reference) == "×N"
    assert kind(reference.conj(), reference) == "other"
    assert kind(reference, reference + 1j, start=reference) == "unchanged"


def test_infinities_and_nan_of_both_are_no_difference():
    reference = REFERENCE.clone()
    reference[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    assert kind(reference * 4, reference) == "×N"
    assert kind(-reference, reference) == "not finite"


def test_mask_is_recognized_although_both_have_zeros():
    values = REFERENCE + 5
    first = torch.rand(12, 6, generator=GENERATOR) > 0.3
    second = torch.rand(12, 6, generator=GENERATOR) > 0.3
    assert kind(values * second, values * first) == "mask"


@pytest.mark.parametrize("rank", range(4))
def test_gradient_of_one_rank_is_recognized(rank):
    found = classify(MEAN, PARTS[rank], tolerance=1e-6, world_size=4, parts=PARTS)
    assert (found.kind, f"rank {rank} " in found.text) == ("not reduced", True)


@pytest.mark.parametrize("divisor", [3, 4])
def test_missing_rank_is_recognized(divisor):
    candidate = (torch.stack(PARTS).sum(0) - PARTS[2]) / divisor
    found = classify(MEAN, candidate, tolerance=1e-6, world_size=4, parts=PARTS)
    assert (found.kind, "rank 2" in found.text) == ("rank missing", True)


def test_equal_parts_do_not_look_like_one_rank():
    assert kind(MEAN * 4, MEAN, parts=[MEAN] * 4) == "×N"


def test_value_that_the_step_has_not_changed_is_recognized():
    assert kind(REFERENCE, REFERENCE + 0.1, start=REFERENCE) == "unchanged"


def test_difference_is_relative_to_the_reference():
    assert relative_difference(REFERENCE, REFERENCE * 1.5) == pytest.approx(0.5)
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_difference(torch.zeros(2), torch.ones(2)) == float("inf")
    assert relative_difference(torch.zeros(2), torch.ones(3)) == float("inf")
