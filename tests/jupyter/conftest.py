"""Fixtures: the kernel, installed by its command and run as by a front end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run `python -m rankbook.jupyter install --prefix FOLDER`, a folder where this process finds kernels."""
    prefix = tmp_path_factory.mktemp("prefix")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rankbook.jupyter", "install", "--prefix", str(prefix), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(prefix / "share" / "jupyter"))
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield run


def spec_folder(name: str) -> Path:
    """Return the folder of the kernelspec that the fixture installed."""
    return Path(os.environ["JUPYTER_PATH"]) / "kernels" / name
