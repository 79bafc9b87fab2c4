"""Command line of `rankbook`.

Exit codes: 0; 1 when a cell failed, the executed notebook could not be written or a checkpoint is damaged; 2 for
invalid arguments; 128 + the number of the signal that stopped the run. torch, IPython and nbclient are imported only by
the commands that need them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rankbook.formatting import escape_unprintable, format_bytes

USAGE_ERROR = 2
# Packages of the extra "notebook", which `rankbook run` needs and the other commands do not.
_NOTEBOOK_PACKAGES = {"nbclient", "nbformat", "jupyter_client", "ipykernel"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: `sys.argv`) and return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    # Not argparse's own "version" action, which would read the version for every command.
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
        code = _run(args) if args.command == "run" else _checkpoint(args)
        sys.stdout.flush()  # here, because at the exit the interpreter would print an error
    except KeyboardInterrupt:  # before the run installed its signal handlers
        return 130
    except BrokenPipeError:  # `rankbook run … | head`
        # The interpreter flushes stdout at exit and would print the same error again. /dev/null takes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rankbook", description="Run notebook cells on all accelerators at once.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="execute a notebook without a browser",
        description="Executes a notebook from top to bottom in a fresh kernel and prints each cell's output as it "
        "comes. Stops at the first cell that fails and exits with 1. Ctrl-C interrupts the running cell, a second one "
        "ends the run. Background cells that still run when the last cell ends are stopped.",
    )
    run.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="the .ipynb file; it is not changed")
    run.add_argument(
        "-n", "--ranks", type=_positive_int, metavar="N", help="number of ranks, unless the notebook requests a number"
    )
    run.add_argument("--output", type=Path, metavar="FILE", help="write the executed notebook, also if the run fails")
    run.add_argument("--timeout", type=_positive_float, metavar="S", help="time limit per cell in seconds")
    run.add_argument("--kernel", metavar="NAME", help="an installed kernel (default: the kernel of this interpreter)")
    _add_checkpoint(commands)
    return parser


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `rankbook checkpoint ls|show|verify|convert`."""
    checkpoint = commands.add_parser("checkpoint", help="inspect, verify and convert checkpoints")
    actions = checkpoint.add_subparsers(dest="action", metavar="ACTION", required=True)
    folder = "a folder of steps, a checkpoint (also of torch.distributed.checkpoint or Megatron), or the URL of one"
    listing = actions.add_parser("ls", help="list the steps of a folder", description="Lists the steps of a folder.")
    listing.add_argument("path", metavar="PATH", help=folder)
    show = actions.add_parser(
        "show", help="list the contents of a checkpoint", description="Lists a checkpoint's tensors, objects and files."
    )
    show.add_argument("path", metavar="PATH", help=folder)
    show.add_argument("--step", type=int, metavar="N", help="step to show (default: the latest)")
    verify = actions.add_parser(
        "verify",
        help="read every byte of a checkpoint and compare it with its checksum",
        description="Reads every byte of a checkpoint, compares it with its checksum, and reports damage with "
        "the file, the key and the rank that wrote it. Exits with 1 if the checkpoint is damaged.",
    )
    verify.add_argument("path", metavar="PATH", help=folder)
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="step to verify (default: the latest)")
    which.add_argument("--all", action="store_true", help="verify all finished steps")
    convert = actions.add_parser(
        "convert",
        help="convert a checkpoint to safetensors, or safetensors to a checkpoint",
        description="Writes a checkpoint's tensors as safetensors files with an index, or safetensors files as a step "
        "of a checkpoint folder. Holds one tensor at a time in memory.",
    )
    convert.add_argument("path", metavar="SOURCE", help=f"{folder}; or a .safetensors file, or a folder of them")
    convert.add_argument("target", metavar="TARGET", help="the folder to write into")
    convert.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="step to read (default: the latest) or to write (default: 0, if the target has no steps)",
    )


def _run(args: argparse.Namespace) -> int:
    try:
        from rankbook.cli import notebook_runner
    except ModuleNotFoundError as error:
        if error.name not in _NOTEBOOK_PACKAGES:
            raise
        return _usage_error(
            f'running a notebook requires {error.name}; run pip install "jupyterlab>=4.2" "nbclient>=0.10"'
        )
    from rankbook.cli.console import Console
    from rankbook.errors import InvalidArgument

    output: Path | None = args.output
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
        if output is not None:
            notebook_runner.check_output(output)
    except InvalidArgument as error:
        return _usage_error(str(error))
    code = 0
    try:
        asyncio.run(runner.run())
    except notebook_runner.RunError as error:
        console.note(str(error))
        code = error.code
    finally:
        if output is not None:
            # Also after a failure: the outputs so far and the traceback are in it.
            fallbacks = (args.notebook.absolute().parent, Path(tempfile.gettempdir()))
            if trouble := notebook_runner.save_notebook(notebook, output, fallbacks):
                console.note(trouble)
                code = code or 1
    return code


def _checkpoint(args: argparse.Namespace) -> int:
    from rankbook.errors import RankbookError

    try:
        return _ACTIONS[args.action](args)
    except BrokenPipeError:  # see `main`
        raise
    except (RankbookError, OSError) as error:
        return _usage_error(str(error))
    except Exception as error:  # noqa: BLE001 - a corrupt file may raise any exception: report it in one line
        return _usage_error(f"{args.path} cannot be read: {type(error).__name__}: {escape_unprintable(str(error))}")


def _ls(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.inspection import describe_folder

    sys.stdout.write(describe_folder(args.path) + "\n")
    return 0


def _show(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.inspection import describe

    sys.stdout.write(describe(args.path, args.step) + "\n")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.inspection import verify
    from rankbook.checkpoint.storage import backends, steps

    # `--all` of a folder without steps, such as a single checkpoint, verifies that one.
    which = (steps.finished_steps(backends.storage_of(args.path)) if args.all else []) or [args.step]
    intact = True
    for step in which:
        report = verify(args.path, step)
        sys.stdout.write(f"{report}\n")
        sys.stdout.flush()  # the next one may take hours
        intact = intact and report.ok
    return 0 if intact else 1


def _convert(args: argparse.Namespace) -> int:
    from rankbook.checkpoint.conversion import from_safetensors, to_safetensors
    from rankbook.checkpoint.format import safetensors
    from rankbook.checkpoint.storage import backends, steps

    # The direction follows from the source: safetensors files are imported, anything else is exported.
    # A checkpoint may have such files beside it, as of `save_model`.
    storage = backends.storage_of(args.path)
    names = {} if args.path.endswith(safetensors.SUFFIX) else storage.list()
    into_checkpoint = args.path.endswith(safetensors.SUFFIX) or (
        any(name.endswith(safetensors.SUFFIX) for name in names)
        and not steps.is_checkpoint(names)
        and not steps.finished_folders(storage, names)
    )
    if into_checkpoint:
        done = from_safetensors(args.path, args.target, step=args.step)
    else:
        done = to_safetensors(args.path, args.target, step=args.step)
    size = format_bytes(done.nbytes)
    sys.stdout.write(f"{done.tensors} tensors, {size}: {', '.join(f'{args.target}/{name}' for name in done.files)}\n")
    if done.left_out:
        sys.stdout.write(f"not converted, because safetensors cannot store it: {', '.join(done.left_out)}\n")
    return 0


_ACTIONS = {"ls": _ls, "show": _show, "verify": _verify, "convert": _convert}


def _usage_error(message: str) -> int:
    sys.stderr.write(f"rankbook: {message}\n")
    return USAGE_ERROR


def _positive_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return number


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number
