"""A notebook's file: read before a run, written after it.

Owns: what counts as a notebook, and how stored output looks. Refuses: kernels, terminals.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning

from rankbook.cli.console import last_state
from rankbook.errors import BadRequest


def read_notebook(path: Path) -> NotebookNode:
    """The notebook in `path`, as version 4, with all old outputs gone. Raises `BadRequest`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # JSON and UTF-8
        raise BadRequest(f"{path} is not a notebook: {error}") from error
    if not (isinstance(content, dict) and "nbformat" in content and ("cells" in content or "worksheets" in content)):
        raise BadRequest(f"{path} is not a notebook: it has no cells")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MissingIDFieldWarning)  # nbformat mends both, and a run needs no ids
            warnings.simplefilter("ignore", DuplicateCellId)
            notebook: NotebookNode = nbformat.reads(text, as_version=4)
            nbformat.validate(notebook)
    except (nbformat.ValidationError, nbformat.NBFormatError) as error:
        raise BadRequest(f"{path} is not a valid notebook: {str(error).splitlines()[0]}") from error
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Writes the document as a front end would save it: whole or not at all, one stream output where many came."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merge_streams(cell.outputs)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        nbformat.write(notebook, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    merged: list[NotebookNode] = []
    pieces: list[list[str]] = []
    for output in outputs:
        same = merged and output.output_type == "stream" == merged[-1].output_type and output.name == merged[-1].name
        if not same:
            merged.append(output)
            pieces.append([])
        if output.output_type == "stream":
            pieces[-1].append(output.text)
    for output, texts in zip(merged, pieces, strict=True):
        if output.output_type == "stream":
            output.text = "\n".join(last_state(line) for line in "".join(texts).split("\n"))
    return merged
