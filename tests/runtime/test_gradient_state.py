"""Accumulation's settings, and which loader is active, however its loop ends."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rankbook import snapshot_files
from rankbook.runtime.gradient_state import GradientState, settle_before_training, window


@dataclass
class Plugin:
    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True


class Loader:
    """Stand-in for a prepared loader: a generator in an `iterating` block."""

    def __init__(self, batches: int = 3, remainder: int = -1) -> None:
        self.batches, self.remainder, self.end_of_dataloader = batches, remainder, False

    def __iter__(self):
        with GradientState().iterating(self):
            for batch in range(self.batches):
                self.end_of_dataloader = batch == self.batches - 1
                yield batch


def test_the_first_one_has_torchs_own_ways():
    state = GradientState()
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, False, True)
    assert (state.sync_gradients, state.in_dataloader, state.end_of_dataloader, state.remainder) == (
        True,
        False,
        False,
        -1,
    )
    assert "Sync Gradients: True" in repr(state)


def test_a_plugin_changes_the_settings_and_a_plain_instance_keeps_them():
    first = GradientState()
    GradientState(Plugin(num_steps=4))
    assert (first.num_steps, GradientState().num_steps, first.adjust_scheduler) == (4, 4, True)
    GradientState(Plugin(num_steps=2, sync_with_dataloader=False))
    assert (first.num_steps, first.sync_with_dataloader) == (2, False)


def test_a_plugin_without_steps_means_one():
    assert GradientState(Plugin()).num_steps == 1


def test_after_a_reset_an_attribute_says_to_build_it_first():
    state = GradientState()
    GradientState._reset_state()
    assert not state.initialized
    for name in ("sync_gradients", "num_steps", "active_dataloader", "in_dataloader"):
        with pytest.raises(AttributeError, match="Create it again"):
            getattr(state, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(state, "nonsense")  # noqa: B009 - it raises


def test_the_innermost_loop_is_the_active_one():
    state, outer, inner = GradientState(), Loader(), Loader(2, remainder=5)
    states = []
    for _ in outer:
        assert state.active_dataloader is outer
        states += [(state.active_dataloader is inner, state.end_of_dataloader, state.remainder) for _ in inner]
        assert state.dataloader_references == [None, outer]
    assert states[:2] == [(True, False, 5), (True, True, 5)]
    assert state.active_dataloader is None


def test_loop_ended_by_break_is_inactive():
    state = GradientState()
    for _ in Loader():
        break
    assert not state.in_dataloader
    for _ in enumerate(zip(Loader(), range(9), strict=False)):
        break
    assert not state.in_dataloader


def test_loop_ended_by_an_exception_is_inactive_while_the_traceback_exists():
    state, loader = GradientState(), Loader()

    def cell() -> None:
        for _ in loader:
            raise KeyboardInterrupt

    try:
        cell()
    except KeyboardInterrupt as error:
        caught = error
    assert caught.__traceback__ is not None
    assert not state.in_dataloader


def test_restarted_loader_ends_its_earlier_loop():
    state, loader = GradientState(), Loader()
    abandoned = iter(loader)
    next(abandoned)
    for _ in loader:
        assert state.dataloader_references == [None, loader]
    assert not state.in_dataloader


def test_a_loader_with_an_iterator_of_its_own_is_over_with_it():
    class Iterator:
        pass

    state, loader, iteration = GradientState(), Loader(), Iterator()
    state._add_dataloader(loader, iteration)
    assert state.active_dataloader is loader
    del iteration
    assert not state.in_dataloader


def test_no_loader_is_kept_alive():
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    assert state.in_dataloader
    del loader
    gc.collect()
    assert not state.in_dataloader


def test_a_loop_that_outlives_a_reset_ends_quietly():
    for _ in Loader():
        GradientState._reset_state()
    assert not GradientState().in_dataloader


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_settles_the_window_once_in_a_loop_after_the_groups_were_formed_anew(monkeypatch, compiled):
    monkeypatch.setattr(snapshot_files, "replicas_may_differ", True)
    calls: list[str] = []
    monkeypatch.setattr(window, "synchronize_replicas", lambda: calls.append("settled"))
    monkeypatch.setattr(window, "drop_gradients", lambda: None)
    model, state, loader = nn.Linear(1, 1), GradientState(), Loader()
    if compiled:
        model._compiled_call_impl = lambda batch: calls.append("called") or batch
    else:
        model.register_forward_hook(lambda *_: calls.append("called"))
    settle_before_training(model)
    model(torch.ones(1, 1))  # outside of a loop, where it may be one rank alone
    with state.iterating(loader):
        model.eval()(torch.ones(1, 1))
        with torch.no_grad():
            model.train()(torch.ones(1, 1))
        with window.set_aside(state):
            model(torch.ones(1, 1))
        assert calls == ["called"] * 4
        for _ in range(2):
            model(torch.ones(1, 1))
    assert calls[4:] == ["settled", "called", "called"]
    assert not model._forward_pre_hooks and not snapshot_files.replicas_may_differ
    settle_before_training(model)
    assert not model._forward_pre_hooks, "nothing has happened since"


def test_an_old_loop_that_is_freed_late_leaves_the_newer_loop_over_its_loader_active():
    state, loader = GradientState(), Loader()
    old = iter(loader)
    next(old)
    for _ in loader:
        old = None  # as a variable or a traceback does
        assert state.active_dataloader is loader
    assert old is None and not state.in_dataloader
