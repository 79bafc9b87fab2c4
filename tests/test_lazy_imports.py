"""The public names of the package are imported when they are first used, and there are no others."""

from __future__ import annotations

import importlib

import pytest

PACKAGES = ["rankbook", "rankbook.runtime", "rankbook.checkpoint"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_no_other_is_imported_lazily(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module)) <= vars(module).keys()
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_is_not_public_is_an_error_that_names_the_package(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Accelerater'"):
        importlib.import_module(package).Accelerater  # noqa: B018 - to ask is the test


def test_a_star_import_brings_the_runtime_too():
    namespace = {}
    exec("from rankbook import *", namespace)
    assert {"Accelerator", "notebook_launcher", "start"} <= namespace.keys()
