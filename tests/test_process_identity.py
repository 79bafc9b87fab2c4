"""Test what a process knows of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankbook.process_identity import package_version


def test_the_version_of_a_package_is_empty_if_it_is_not_installed():
    assert package_version("pytest") == pytest.__version__
    assert package_version("a-package-that-does-not-exist") == ""


@pytest.mark.slow
def test_a_checkpoint_is_saved_where_rankbook_is_not_installed_but_on_the_path(tmp_path):
    code = f"""
import importlib.metadata
def version(name, version=importlib.metadata.version):
    if name == "rankbook":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = version
import torch
from rankbook import checkpoint
checkpoint.save({{"weight": torch.ones(3)}}, {str(tmp_path / "saved")!r})
print(checkpoint.verify({str(tmp_path / "saved")!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "intact" in run.stdout
