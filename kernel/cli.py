"""The command `rankbook`.

Owns: the command line and its exit codes: 0, 1 when a cell failed, 2 when the command cannot be carried out as typed,
128 + the signal's number when it was stopped. Refuses: to import torch, IPython or nbclient before they are needed.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

USAGE_ERROR = 2
_NOTEBOOK_PACKAGES = {"nbclient", "nbformat", "jupyter_client", "ipykernel"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own) and returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.version:
        sys.stdout.write(f"rankbook {metadata.version('rankbook')}\n")
        return 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a progress bar must not end the run in an ASCII terminal
    try:
        return _run(args)
    except KeyboardInterrupt:  # before the run took over the signals
        return 130
    except BrokenPipeError:  # `rankbook run … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankbook", description="Notebook cells that run on every accelerator at once."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="execute a notebook without a browser",
        description="Executes a notebook from top to bottom in a fresh kernel and prints each cell's output as it "
        "comes. Stops at the first cell that fails and exits with 1. Ctrl-C interrupts the running cell, a second one "
        "ends the run. Background cells that are not done when the last cell ends are stopped.",
    )
    run.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="the .ipynb file; it is not changed")
    run.add_argument("-n", "--ranks", type=_positive_int, metavar="N", help="how many ranks its first start uses")
    run.add_argument("--output", type=Path, metavar="FILE", help="write the executed notebook here, up to where it got")
    run.add_argument("--timeout", type=_positive_float, metavar="S", help="seconds that each cell may take")
    run.add_argument("--kernel", metavar="NAME", help="an installed kernel; default: this interpreter's own")
    return parser


def _run(args: argparse.Namespace) -> int:
    try:
        from rankbook import notebook_file, notebook_run
    except ModuleNotFoundError as error:
        if error.name not in _NOTEBOOK_PACKAGES:
            raise
        return _usage_error(f'running a notebook needs {error.name}; pip install "rankbook[notebook]"')
    from rankbook.console import Console
    from rankbook.errors import BadRequest

    output: Path | None = args.output
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        return _usage_error(f"cannot write {output}: it is a folder, or its folder does not exist")
    console = Console(sys.stdout, sys.stderr, clock=time.monotonic)
    try:
        notebook = notebook_file.read_notebook(args.notebook)
        run = notebook_run.NotebookRun(
            notebook,
            console,
            folder=args.notebook.absolute().parent,
            ranks=args.ranks,
            timeout=args.timeout,
            kernel=args.kernel,
        )
    except BadRequest as error:
        return _usage_error(str(error))
    try:
        outcome = asyncio.run(run.execute())
    finally:
        if output is not None:
            notebook_file.write_notebook(notebook, output)
    if outcome.message:
        console.note(outcome.message)
    return outcome.code


def _usage_error(message: str) -> int:
    sys.stderr.write(f"rankbook: {message}\n")
    return USAGE_ERROR


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
