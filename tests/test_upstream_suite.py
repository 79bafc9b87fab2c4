"""Test which of Accelerate's tests count, and what an import of Accelerate returns while they run with Rankbook."""

from __future__ import annotations

import sys

import pytest

import rankbook
from tests import upstream_suite
from tests.upstream_suite import COMMAND, COUNTED, MISSING, PRIVATE, UNRELATED, MissingNameError, Replacement, Selection

SUITE = """
import unittest, accelerate, torch
from accelerate import Accelerator
from accelerate.test_utils import DEFAULT_LAUNCH_COMMAND, require_cpu, test_script
from accelerate.utils import listify, patch_environment, set_seed
from accelerate.hooks import ModelHook

COMMAND = DEFAULT_LAUNCH_COMMAND + ["script.py"]

def prepared():
    return Accelerator().prepare(torch.nn.Linear(1, 1))

def optimizers(accelerator):
    return accelerator._optimizers

@pytest.fixture
def state():
    yield accelerate.PartialState()
    accelerate.PartialState._reset_state()

def test_function():
    assert prepared()

def test_fixture(state):
    set_seed(1)

class Tests(unittest.TestCase):
    path = COMMAND

    def setUp(self):
        Accelerator()

    def _twice(self):
        return [prepared(), prepared()]

    @require_cpu
    def test_counts(self):
        with patch_environment(x=1):
            self._twice()

    def test_scaffold(self):
        with patch_environment(x=1):
            pass

    def test_private(self):
        optimizers(Accelerator())

    def test_private_attribute(self):
        assert getattr(prepared(), "_is_prepared", False)

    def test_missing(self):
        listify(Accelerator())

    def test_missing_class(self):
        class Hook(ModelHook): pass
        Accelerator()

    def test_local_import(self):
        from accelerate.utils import save
        save(Accelerator(), "x")

    def test_command(self):
        run(self.path, Accelerator())

    def test_patched(self):
        with patch("accelerate.utils.other.is_xpu_available"):
            Accelerator()

    def test_script(self):
        accelerate.debug_launcher(test_script.main)

class Derived(Tests):
    def test_inherited(self):
        self._twice()

class Hooked(Tests):
    def setUp(self):
        Accelerator()._models

    def test_set_up(self):
        self._twice()
"""
SCRIPT = """
from accelerate.state import GradientState

def reset():
    GradientState._reset_state()

def main():
    reset()
"""


@pytest.fixture
def source(tmp_path):
    scripts = tmp_path / "src" / "accelerate" / "test_utils" / "scripts"
    scripts.mkdir(parents=True)
    (tmp_path / "src" / "accelerate" / "utils").mkdir()
    (tmp_path / "src" / "accelerate" / "utils" / "operations.py").touch()
    (scripts / "test_script.py").write_text(SCRIPT)
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


def test_a_test_counts_if_it_uses_only_public_names_that_are_there(source):
    def classify(class_name, function, *fixtures):
        return Selection(source).classify(source / "test_suite.py", class_name, function, fixtures)

    assert classify(None, "test_function") == COUNTED
    assert classify(None, "test_fixture", "state") == PRIVATE
    assert classify("Derived", "test_inherited") == COUNTED
    assert classify("Hooked", "test_set_up") == PRIVATE
    verdicts = {name: classify("Tests", f"test_{name}") for name in ("counts", "scaffold")}
    assert verdicts == {"counts": COUNTED, "scaffold": UNRELATED}
    private = ("private", "private_attribute", "script")
    assert [classify("Tests", f"test_{name}") for name in private] == [PRIVATE] * 3
    assert [classify("Tests", f"test_{name}") for name in ("missing", "missing_class", "local_import")] == [MISSING] * 3
    assert [classify("Tests", f"test_{name}") for name in ("command", "patched")] == [COMMAND] * 2


def test_the_function_of_a_parameterized_test_has_the_longest_name_that_fits(source):
    file = upstream_suite.File.read(source / "test_suite.py")
    assert upstream_suite.function_of(file, "Derived", "test_missing_class_0_x") == "test_missing_class"
    assert upstream_suite.function_of(file, None, "test_function[1]") == "test_function"


def test_an_import_of_accelerate_gives_the_names_of_rankbook(source, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [upstream_suite.ReplacementFinder(source), *sys.meta_path])
    before = set(sys.modules)
    try:
        for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
            monkeypatch.delitem(sys.modules, name)
        import accelerate
        from accelerate.test_utils.scripts import test_script
        from accelerate.utils import operations
        from accelerate.utils.modeling import check_device_map

        assert isinstance(accelerate, Replacement)
        assert accelerate.Accelerator is rankbook.Accelerator
        assert operations.gather is rankbook.gather
        assert test_script.GradientState is rankbook.GradientState
        with pytest.raises(MissingNameError, match=r"Rankbook has no accelerate\.utils\.modeling\.check_device_map"):
            check_device_map({})
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in {"accelerate", "accelerate_scaffold"}:
                del sys.modules[name]
