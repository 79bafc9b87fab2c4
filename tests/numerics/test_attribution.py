"""Attribution of a non-finite value from the reports of the ranks."""

import pytest

from rankbook.errors import InvalidArgument
from rankbook.numerics.attribution import Event, Launch, RankReport, attribute
from rankbook.numerics.settings import Conditions, parse_conditions


def launches(
    *, bad_inputs: tuple[int, ...] = (), bad_outputs: tuple[int, ...] = (), good_outputs: tuple[int, ...] = ()
) -> tuple[Launch, ...]:
    outputs = {**dict.fromkeys(bad_outputs, False), **dict.fromkeys(good_outputs, True)}
    return tuple(
        Launch("default", number, f"all_reduce #{number}", "float32", number not in bad_inputs, outputs.get(number))
        for number in (117, 118, 119)
    )


def event(phase: str, module: str, launched: int = 117) -> Event:
    return Event(phase, module, "NaN", "line 14", positions={"default": launched})


def test_value_is_born_where_no_collective_has_brought_it():
    reports = [
        RankReport(
            rank, 731, gradients=("blocks.0.weight",), launches=launches(bad_inputs=(118, 119) if rank == 2 else ())
        )
        for rank in range(4)
    ]
    reports[2] = RankReport(2, 731, event("backward", "blocks.11.attn"), launches(bad_inputs=(118, 119)))
    assert str(attribute(reports)) == (
        "NaN born on rank 2, in `blocks.11.attn` backward, at step 731, line 14; "
        "ranks 0-1,3 received it in all_reduce #118"
    )


def test_rank_that_saw_it_after_a_bad_collective_has_received_it():
    reports = [
        RankReport(0, 5, event("forward", "head", launched=118), launches()),
        RankReport(1, 5, event("forward", "embed", launched=117), launches(bad_inputs=(118,))),
    ]
    finding = attribute(reports)
    assert (finding.ranks, finding.module, finding.received) == ((1,), "embed", (0,))


def test_all_ranks_with_the_same_event_are_named():
    reports = [RankReport(r, 2, event("forward", "head"), launches(bad_inputs=(118,))) for r in range(3)]
    finding = attribute(reports)
    assert (finding.ranks, finding.received) == ((0, 1, 2), ())


def test_weight_gradient_is_known_from_the_input_of_the_collective():
    names = ("head.weight",)
    reports = [
        RankReport(r, 2, None, launches(bad_inputs=(118,) if r == 1 else ()), names, "float32") for r in range(2)
    ]
    finding = attribute(reports)
    assert (finding.phase, finding.module, finding.ranks, finding.received) == ("backward", "head", (1,), (0,))


def test_collective_with_another_data_type_is_at_fault_itself():
    reports = [
        RankReport(r, 2, None, launches(bad_inputs=(118,)), ("head.weight",), "float64", "inf") for r in range(2)
    ]
    assert attribute(reports).phase == "collective"


def test_result_of_a_collective_with_finite_inputs_is_its_fault():
    reports = [RankReport(r, 2, None, launches(bad_outputs=(118,)), ("head.bias",), "float32", "inf") for r in range(2)]
    finding = attribute(reports)
    assert finding.phase == "collective"
    assert "all_reduce #118" in finding.detail


def test_gradient_that_every_collective_left_finite_was_changed_later():
    reports = [RankReport(r, 2, None, launches(), ("head.bias",), "float32") for r in range(2)]
    assert attribute(reports).phase == "gradient"


def test_norm_above_the_limit_is_reported_with_the_largest_module():
    text = str(attribute([RankReport(0, 9, norm=250.0, limit=100.0, norm_module="head", line="line 3")]))
    assert text == "the gradient norm 250 is above the limit of 100, at step 9, line 3; `head` has the largest gradient"


def test_norm_is_at_fault_also_after_a_collective_of_an_infinity():
    reports = [
        RankReport(r, 9, None, launches(bad_inputs=(117,)), norm=250.0, limit=100.0, norm_module="head")
        for r in range(2)
    ]
    assert attribute(reports).phase == "norm"


def test_collective_with_a_finite_result_spreads_nothing():
    reports = [  # a minimum, into which rank 1 has brought inf
        RankReport(0, 5, event("forward", "head"), launches(good_outputs=(117,))),
        RankReport(1, 5, None, launches(bad_inputs=(117,), good_outputs=(117,)), ("head.weight",)),
    ]
    finding = attribute(reports)
    assert (finding.phase, finding.module, finding.ranks, finding.received) == ("forward", "head", (0,), (1,))


def test_module_is_named_if_the_sender_has_no_bad_gradient_itself():
    reports = [  # each rank has the gradients of a part of the parameters
        RankReport(0, 5, None, launches(), ("head.weight",), "float32"),
        RankReport(1, 5, None, launches(bad_inputs=(118,))),
    ]
    finding = attribute(reports)
    assert (finding.module, finding.ranks, finding.received) == ("head", (1,), (0,))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nan"], Conditions(nan=True)),
        (["nan", "inf"], Conditions(nan=True, inf=True)),
        (["norm", ">", "100"], Conditions(norm=100.0)),
        (["nan", "norm>1e3"], Conditions(nan=True, norm=1000.0)),
        (["nan, norm > 5"], Conditions(nan=True, norm=5.0)),
        (["norm > 123456.789"], Conditions(norm=123456.789)),
        (["off"], Conditions()),
    ],
)
def test_conditions_are_read(words, expected):
    assert parse_conditions(*words) == expected
    assert parse_conditions(str(expected)) == expected


@pytest.mark.parametrize("words", [[], ["nam"], ["norm"], ["norm > -1"], ["norm > x"], ["off", "nan"], ["norm > nan"]])
def test_unknown_conditions_are_refused(words):
    with pytest.raises(InvalidArgument):
        parse_conditions(*words)
