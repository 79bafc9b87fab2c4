"""Command line of `rankbook`.

Exit codes: 0; 1 when a cell failed or a checkpoint is damaged; 2 for invalid arguments; 128 + the number of the signal
that stopped the run. torch, IPython and nbclient are imported only by the commands that need them.
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

from rankbook.formatting import escape_unprintable, format_bytes

USAGE_ERROR = 2
_NOTEBOOK_PACKAGES = {"nbclient", "nbformat", "jupyter_client", "ipykernel"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: `sys.argv`) and return the exit code."""
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
        return _run(args) if args.command == "run" else _checkpoint(args)
    except KeyboardInterrupt:  # before the run installed its signal handlers
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
    run.add_argument(
        "-n", "--ranks", type=_positive_int, metavar="N", help="how many ranks a start without a number makes"
    )
    run.add_argument("--output", type=Path, metavar="FILE", help="write the executed notebook here, up to where it got")
    run.add_argument("--timeout", type=_positive_float, metavar="S", help="seconds that each cell may take")
    run.add_argument("--kernel", metavar="NAME", help="an installed kernel; default: this interpreter's own")
    _add_checkpoint(commands)
    return parser


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `rankbook checkpoint ls|show|verify|convert`."""
    checkpoint = commands.add_parser("checkpoint", help="look into checkpoints, verify and convert them")
    actions = checkpoint.add_subparsers(dest="action", metavar="ACTION", required=True)
    folder = "a folder of steps, a checkpoint, also of torch.distributed.checkpoint or Megatron, or a URL of one"
    listing = actions.add_parser("ls", help="list the steps of a folder", description="Lists the steps of a folder.")
    listing.add_argument("path", metavar="PATH", help=folder)
    show = actions.add_parser(
        "show", help="list what a checkpoint holds", description="Lists a checkpoint's tensors, objects and files."
    )
    show.add_argument("path", metavar="PATH", help=folder)
    show.add_argument("--step", type=int, metavar="N", help="default: the latest")
    verify = actions.add_parser(
        "verify",
        help="read every byte of a checkpoint and compare it with its checksum",
        description="Reads every byte of a checkpoint, compares it with its checksum, and names what is damaged: "
        "file, key, and the rank that wrote it. Exits with 1 if something is.",
    )
    verify.add_argument("path", metavar="PATH", help=folder)
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="default: the latest")
    which.add_argument("--all", action="store_true", help="every finished step")
    convert = actions.add_parser(
        "convert",
        help="to safetensors and back",
        description="Writes a checkpoint's tensors as safetensors files with an index, or safetensors files as a step "
        "of a checkpoint folder. One tensor at a time is in memory.",
    )
    convert.add_argument("path", metavar="SOURCE", help=f"{folder}; or a .safetensors file, or a folder of them")
    convert.add_argument("target", metavar="TARGET", help="the folder to write into")
    convert.add_argument("--step", type=int, metavar="N", help="which step to read (default: the latest) or write (0)")


def _run(args: argparse.Namespace) -> int:
    try:
        from rankbook.cli import notebook_runner
    except ModuleNotFoundError as error:
        if error.name not in _NOTEBOOK_PACKAGES:
            raise
        return _usage_error(f'running a notebook needs {error.name}; pip install "rankbook[notebook]"')
    from rankbook.cli.console import Console
    from rankbook.errors import BadRequest

    output: Path | None = args.output
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        return _usage_error(f"cannot write {output}: it is a folder, or its folder does not exist")
    console = Console(sys.stdout, sys.stderr, clock=time.monotonic)
    try:
        notebook = notebook_runner.read_notebook(args.notebook)
        runner = notebook_runner.NotebookRunner(
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
        asyncio.run(runner.run())
    except notebook_runner.RunError as error:
        console.note(str(error))
        return error.code
    finally:
        if output is not None:
            notebook_runner.write_notebook(notebook, output)
    return 0


def _checkpoint(args: argparse.Namespace) -> int:
    from rankbook.errors import RankbookError

    try:
        return _ACTIONS[args.action](args)
    except (RankbookError, OSError) as error:
        return _usage_error(str(error))
    except Exception as error:  # noqa: BLE001 - a corrupt file may raise any exception: report it in one line
        return _usage_error(f"{args.path} cannot be read: {type(error).__name__}: {escape_unprintable(str(error))}")


def _ls(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.tools.describe import describe_folder

    sys.stdout.write(describe_folder(args.path) + "\n")
    return 0


def _show(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.tools.describe import describe

    sys.stdout.write(describe(args.path, args.step) + "\n")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.storage import local, steps
    from rankbook.checkpoint.tools.verify import verify

    which = (steps.finished_steps(local.storage_of(args.path)) if args.all else []) or [args.step]
    whole = True
    for step in which:
        report = verify(args.path, step)
        sys.stdout.write(f"{report}\n")
        whole = whole and report.ok
    return 0 if whole else 1


def _convert(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.format import safetensors
    from rankbook.checkpoint.storage import local
    from rankbook.checkpoint.tools import convert

    into_checkpoint = args.path.endswith(safetensors.SUFFIX) or any(
        name.endswith(safetensors.SUFFIX) for name in local.storage_of(args.path).list()
    )
    if into_checkpoint:
        done = convert.from_safetensors(args.path, args.target, step=args.step or 0)
    else:
        done = convert.to_safetensors(args.path, args.target, step=args.step)
    size = format_bytes(done.nbytes)
    sys.stdout.write(f"{done.tensors} tensors, {size}: {', '.join(f'{args.target}/{name}' for name in done.files)}\n")
    if done.left_out:
        sys.stdout.write(f"left out, which safetensors cannot hold: {', '.join(done.left_out)}\n")
    return 0


_ACTIONS = {"ls": _ls, "show": _show, "verify": _verify, "convert": _convert}


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
