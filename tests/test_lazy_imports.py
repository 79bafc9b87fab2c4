"""The public names of the package are imported when they are first used, and there are no others."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import types

import pytest

from rankbook.accelerate_names import _INSTEAD, explain_missing
from rankbook.lazy_imports import loaded_module

NAMES_OF_ACCELERATE = [f"rankbook.{name}" for name in ("utils", "state", "data_loader", "logging", "tracking")]
PACKAGES = ["rankbook", "rankbook.runtime", "rankbook.checkpoint", *NAMES_OF_ACCELERATE]


@pytest.mark.parametrize("package", PACKAGES)
def test_lazy_imports_are_exactly_the_public_names(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module)) <= vars(module).keys()
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_lists_the_public_names_and_no_other_module(package):
    module = importlib.import_module(package)
    assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_is_not_public_is_an_error_that_names_the_package(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Accelerater'"):
        importlib.import_module(package).Accelerater  # noqa: B018 - to ask is the test


def test_a_star_import_brings_the_runtime_too():
    namespace = {}
    exec("from rankbook import *", namespace)
    assert {"Accelerator", "notebook_launcher", "start"} <= namespace.keys()


@pytest.mark.parametrize("module", NAMES_OF_ACCELERATE)
def test_the_names_of_accelerate_are_those_of_the_runtime(module):
    runtime = importlib.import_module("rankbook.runtime")
    ours = importlib.import_module(module)
    assert all(getattr(ours, name) is getattr(runtime, name) for name in ours.__all__)


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("from rankbook.utils import DeepSpeedPlugin", r"use FullyShardedDataParallelPlugin\(\)"),
        ("from rankbook.utils import MegatronLMPlugin", r"use ParallelismConfig\(tp_size"),
        ("from rankbook.utils import is_rich_available", r"use importlib.util.find_spec\('rich'\)"),
        ("from rankbook.utils import wait_for_everyone", r"use PartialState\(\).wait_for_everyone\(\)"),
        ("from rankbook.utils import extract_model_from_parallel", r"use Accelerator.unwrap_model"),
        ("from rankbook.state import is_initialized", r"use PartialState\(\).initialized"),
        ("from rankbook.data_loader import DataLoaderAdapter", "use DataLoaderShard"),
        ("from rankbook.logging import MultiProcessAdapter", "use get_logger"),
        ("from rankbook.tracking import CometMLTracker", r"use GeneralTracker\(\)"),
        ("from rankbook import init_empty_weights", "use sharding over ranks"),
        ("from rankbook import LocalSGD", r"use Accelerator.no_sync\(model\), and Accelerator.reduce"),
        ("from rankbook.utils import DummyOptim, DummyScheduler", "use the optimizer and the scheduler themselves"),
        ("import rankbook; rankbook.dispatch_model", "use sharding over ranks"),
    ],
)
def test_unsupported_name_of_accelerate_names_the_replacement(statement, instead):
    with pytest.raises(ImportError, match=rf"^cannot import name .*: Rankbook does not have it; {instead}"):
        exec(statement)


def test_a_module_that_another_thread_is_importing_is_not_loaded_yet(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import builtins\nbuiltins._arrive()\ndone = True\n")
    arrived, go_on = threading.Event(), threading.Event()

    def arrive():
        arrived.set()
        assert go_on.wait(30)

    monkeypatch.setattr("builtins._arrive", arrive, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded_module("slow_to_import") is None
    thread = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    thread.start()
    try:
        assert arrived.wait(30)
        assert "slow_to_import" in sys.modules and loaded_module("slow_to_import") is None
    finally:
        go_on.set()
        thread.join(30)
    module = loaded_module("slow_to_import")
    del sys.modules["slow_to_import"]
    assert module is not None and module.done


def test_a_module_that_was_made_by_hand_is_loaded(monkeypatch):
    module = types.ModuleType("made_by_hand")
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert loaded_module("made_by_hand") is module and loaded_module("__main__") is sys.modules["__main__"]


def test_recommended_names_exist():
    runtime = importlib.import_module("rankbook.runtime")
    names = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*(?=[(.]| )", " ".join(_INSTEAD)))
    assert {"FullyShardedDataParallelPlugin", "ParallelismConfig", "PartialState"} <= names <= {*runtime.__all__}
    missing = {name for names in _INSTEAD.values() for name in names.split()}
    assert not missing & {*importlib.import_module("rankbook").__all__}


def test_names_of_accelerate_that_are_installed_are_known():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    public = {name for name in dir(importlib.import_module("accelerate.utils")) if not name.startswith("_")}
    ours = importlib.import_module("rankbook.utils")
    named = {name for name in public if name in ours.__all__ or explain_missing("rankbook.utils", name)}
    assert accelerate and len(named) > 150
