"""Jupyter's own tests of a kernel, with plain cells on the ranks and with plain cells in the notebook."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from jupyter_client.manager import KernelManager
from jupyter_kernel_test import KernelTests

from tests.conftest import IPYTHON_7, ipython_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_kernel_test"),
]


@pytest.fixture(scope="module", autouse=True)
def kernel(install: Callable[..., subprocess.CompletedProcess[str]]) -> Iterator[None]:
    """The kernel that they start by its name."""
    installed = install("-n", "2", "--name", "rankbook-suite")
    assert installed.returncode == 0, installed.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", ipython_folder())
        yield


class _Suite(KernelTests):
    """The samples that hold wherever a cell runs."""

    kernel_name = "rankbook-suite"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar[list[dict[str, Any]]] = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "%%distributed --ra", "matches": {"--ranks"}},
    ]
    complete_code_samples: ClassVar[list[str]] = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n", "%who"]
    incomplete_code_samples: ClassVar[list[str]] = ["print('''hello", "def f(x):\n  x*2", "for each in x:"]
    # IPython 7 itself says that code with a surplus bracket is incomplete.
    invalid_code_samples: ClassVar[list[str]] = ["import = 7q", "1 +* 2", *([] if IPYTHON_7 else ["1 +* 2)"])]
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_display_data: ClassVar[list[dict[str, str]]] = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "display({'text/html': '<i>test</i>', 'text/plain': 'test'}, raw=True)", "mime": "text/html"},
    ]
    supported_history_operations = ("tail", "search", "range")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    @classmethod
    def setUpClass(cls) -> None:
        """Start the kernel with sockets in a folder: another process may take a TCP port before the kernel opens it."""
        folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")
        cls.addClassCleanup(shutil.rmtree, folder)
        cls.km = KernelManager(kernel_name=cls.kernel_name, transport="ipc", ip=f"{folder}/socket")
        cls.km.start_kernel()
        cls.kc = cls.km.client()
        cls.kc.start_channels()
        cls.kc.wait_for_ready(timeout=60)


class TestOnTheRanks(_Suite):
    """Run the suite with the kernel in its initial state."""

    code_execute_result: ClassVar[list[dict[str, str]]] = [
        {"code": "1+2+3", "result": "[0-1] 6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[0-1] [1, 4, 9]"},
        {"code": "1+2*world_size", "result": "[0-1] 5"},
    ]
    code_history_pattern = "1+2?world*"


@pytest.mark.full
class TestInTheNotebook(_Suite):
    """After `%distributed auto off`."""

    code_execute_result: ClassVar[list[dict[str, str]]] = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
        {"code": "7*7", "result": "49"},
    ]
    code_history_pattern = "7?7"

    @classmethod
    def setUpClass(cls) -> None:
        """The kernel, told so."""
        super().setUpClass()
        reply = cls.kc.execute_interactive("%distributed auto off", timeout=60, output_hook=lambda _: None)
        assert reply["content"]["status"] == "ok"


del _Suite, KernelTests  # the samples alone are no tests
assert issubclass(TestOnTheRanks, unittest.TestCase)
