"""The settings of training: shared, changed live, and never silently."""

from __future__ import annotations

import logging

import pytest
import torch

from rankbook.errors import InvalidArgument
from rankbook.runtime.config import DataLoaderConfiguration, GradScalerKwargs, ParallelismConfig, ProjectConfiguration
from rankbook.runtime.state import AcceleratorState, DistributedType, PartialState
from tests.rank_processes import run_ranks


def test_settings_are_shared_and_a_plain_instance_keeps_them(caplog):
    first = AcceleratorState(mixed_precision="bf16", cpu=True, dynamo_plugin="inductor")
    second = AcceleratorState()
    assert (second.mixed_precision, second.dynamo_plugin, second.fsdp_plugin) == ("bf16", "inductor", None)
    assert first.initialized
    assert not caplog.records


def test_another_precision_counts_from_now_on_and_says_so(caplog):
    first = AcceleratorState(cpu=True)
    assert first.mixed_precision == "no"
    with caplog.at_level(logging.WARNING, logger="rankbook"):
        AcceleratorState(mixed_precision="bf16")
        AcceleratorState(mixed_precision="bf16")
    assert first.mixed_precision == "bf16"
    assert [record.getMessage() for record in caplog.records] == [
        (
            "mixed_precision changed from 'no' to 'bf16'. Objects that are already prepared keep 'no' until they are "
            "prepared again."
        )
    ]


def test_unavailable_precision_is_refused_without_changes():
    for name in ("fp8", "half", ""):
        with pytest.raises(InvalidArgument, match=f"unknown mixed_precision '{name}'; choose from no, fp16, bf16"):
            AcceleratorState(mixed_precision=name, cpu=True)
    assert not AcceleratorState._shared_state
    state = AcceleratorState(mixed_precision="fp16", cpu=True)
    with pytest.raises(InvalidArgument):
        AcceleratorState(mixed_precision="fp8")
    assert state.mixed_precision == "fp16"


def test_the_first_default_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AcceleratorState(cpu=True).mixed_precision == "bf16"
    monkeypatch.setenv("RANKBOOK_MIXED_PRECISION", "fp16")
    assert AcceleratorState().mixed_precision == "bf16"
    AcceleratorState._reset_state()
    assert AcceleratorState().mixed_precision == "fp16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp16": True}, r"got an unexpected keyword argument 'fp16'; use mixed_precision=\"fp16\""),
        ({"mixedprecision": "bf16"}, "'mixedprecision'; did you mean: mixed_precision"),
        ({"time_out": 3}, "'time_out'; did you mean: timeout"),
        ({"nonsense": 3}, "'nonsense'$"),
    ],
    ids=str,
)
@pytest.mark.parametrize("initialized", [False, True])
def test_a_misspelt_keyword_is_an_error_that_names_the_right_one(options, words, initialized):
    if initialized:
        AcceleratorState(cpu=True)
    with pytest.raises(InvalidArgument, match=rf"^AcceleratorState\(\) .*{words}") as caught:
        AcceleratorState(**options)
    assert isinstance(caught.value, TypeError)
    assert bool(PartialState._shared_state) == initialized
    with pytest.raises(InvalidArgument, match=r"^PartialState\(\) got"):
        PartialState(**options)


@pytest.mark.parametrize(
    ("kind", "keyword", "meant"),
    [
        (DataLoaderConfiguration, "even_batch", "even_batches"),
        (ProjectConfiguration, "projectdir", "project_dir"),
        (ParallelismConfig, "tpsize", "tp_size"),
        (GradScalerKwargs, "init_scales", "init_scale"),
    ],
)
def test_a_misspelt_keyword_of_a_configuration_names_the_right_one(kind, keyword, meant):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got .* '{keyword}'; did you mean: {meant}\b") as caught:
        kind(**{keyword: 2})
    assert isinstance(caught.value, InvalidArgument)


def test_every_kind_of_setup_can_be_compared_with():
    state = AcceleratorState(cpu=True)
    for name in ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON"):
        assert state.distributed_type != DistributedType[name]
    assert state.distributed_type not in {DistributedType.DEEPSPEED, DistributedType.XLA, DistributedType.MEGATRON_LM}
    assert state.deepspeed_plugin is None and state.megatron_lm_plugin is None


def test_accelerator_state_exposes_the_process_state():
    state = AcceleratorState(cpu=True)
    assert (state.device, state.num_processes, state.is_main_process) == (torch.device("cpu"), 1, True)
    assert (state.distributed_type, state.is_fsdp2, state.use_distributed) == (DistributedType.NO, False, False)
    assert state.on_main_process(lambda: 3)() == 3
    with state.main_process_first(), state.split_between_processes([1]) as share:
        assert share == [1]
    assert repr(state).endswith("Device: cpu\nMixed precision type: no\n")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(state, "nonsense")  # noqa: B009 - it raises


def test_after_a_reset_an_attribute_says_to_build_it_first():
    state = AcceleratorState(cpu=True)
    AcceleratorState._reset_state()
    assert PartialState._shared_state
    for name in ("mixed_precision", "device", "distributed_type", "fsdp_plugin", "is_main_process"):
        with pytest.raises(AttributeError, match=r"the state was reset\. Create it again"):
            getattr(state, name)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state
    state = AcceleratorState(cpu=True)
    PartialState._reset_state()
    for name in ("device", "distributed_type", "is_main_process"):
        with pytest.raises(AttributeError, match=r"PartialState\..* is not available: .* Create it again"):
            getattr(state, name)
    with pytest.raises(AttributeError, match=r"the state was reset\. Create it again"):
        state.wait_for_everyone()
    assert not PartialState._shared_state


def test_single_process_switches_to_the_cpu_with_a_message(monkeypatch, caplog):
    monkeypatch.setenv("RANKBOOK_DEVICE", "meta")
    state = AcceleratorState()
    AcceleratorState(cpu=True)
    assert state.device == torch.device("cpu")
    assert "The device changed from meta to cpu." in caplog.text


def test_plugins_of_other_engines_are_refused():
    for name in ("deepspeed_plugin", "megatron_lm_plugin"):
        with pytest.raises(InvalidArgument, match=f"{name} is not supported: Rankbook uses"):
            AcceleratorState(cpu=True, **{name: object()})
    assert not AcceleratorState._shared_state


@pytest.mark.processes
def test_on_several_ranks():
    def on_rank():
        state = AcceleratorState(fsdp_plugin="plugin")
        kinds = [str(state.distributed_type), str(PartialState().distributed_type), state.is_fsdp2]
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("rankbook").addHandler(handler)
        AcceleratorState(mixed_precision="bf16")
        PartialState().device = torch.device("meta")
        with pytest.raises(InvalidArgument, match=f"rank {state.process_index} already uses meta"):
            AcceleratorState(cpu=True)
        return kinds, len(records)

    assert run_ranks(on_rank, 2) == [(["FSDP", "MULTI_CPU", True], 1), (["FSDP", "MULTI_CPU", True], 0)]
