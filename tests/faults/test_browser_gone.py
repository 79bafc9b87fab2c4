"""Test a browser that reloads during a cell: the new connection gets the cell's output."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

import pytest

from tests.conftest import Gate, Notebook

pytestmark = pytest.mark.slow

CELL = """%%distributed {options}
import os, select
print('first')
{gate.wait}
for i in range(3):
    print('line', i)
"""


def connect(notebook: Notebook) -> Any:
    """Return a client of the running kernel. Its control channel answers while a cell runs."""
    client = notebook.manager.client()
    client.start_channels()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        client.control_channel.send(client.session.msg("kernel_info_request"))
        with contextlib.suppress(queue.Empty):
            client.get_iopub_msg(timeout=0.2)
            return client
    pytest.fail("the kernel does not answer a second client")


def read_until(client: Any, words: str, *, timeout: float = 20) -> list[dict[str, Any]]:
    """The iopub messages up to the one whose text has `words`."""
    messages: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            messages.append(client.get_iopub_msg(timeout=remaining))
        except queue.Empty:
            break
        if words in messages[-1]["content"].get("text", ""):
            return messages
    pytest.fail(f"not within {timeout} s: {words}; so far {[message['content'] for message in messages]}")


@pytest.mark.parametrize("options", ["", "--background"])
def test_output_flows_on_into_the_right_cell_after_a_reload(module_notebook, tmp_path, options):
    notebook = module_notebook
    gate = Gate(tmp_path / "gate")
    message = notebook.send(CELL.format(options=options, gate=gate))
    read_until(notebook.client, "[0-1] first")
    notebook.client.stop_channels()  # the page is gone
    notebook.client = connect(notebook)
    gate.open()
    messages = read_until(notebook.client, "[0-1] line 2")
    texts = [item for item in messages if item["msg_type"] == "stream"]
    assert "".join(element["content"]["text"] for element in texts) == "".join(f"[0-1] line {i}\n" for i in range(3))
    assert {text["parent_header"]["msg_id"] for text in texts} == {message}
