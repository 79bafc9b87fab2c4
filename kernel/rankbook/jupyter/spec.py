"""Kernel specs: make, install and find the specs of Rankbook's kernel, by name and number of ranks.

A kernel spec of another kernel is never overwritten.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import SYSTEM_JUPYTER_PATH, KernelSpec, KernelSpecManager, NoSuchKernel
from traitlets import TraitError

from rankbook.errors import InvalidArgument
from rankbook.formatting import plural

NAME = "rankbook"
DISPLAY_NAME = "Python 3 (Rankbook)"
RESOURCES = Path(__file__).parent / "spec"
UNREADABLE = (OSError, TypeError, ValueError, TraitError)
"""Errors of jupyter_client for a spec that cannot be read: no JSON, or JSON that is no spec."""
_MODULE = "rankbook.jupyter"


def make_spec(python: str, ranks: int | None, display_name: str | None) -> dict[str, Any]:
    """Return the contents of kernel.json: `python` runs the kernel, with `ranks` ranks (None: one per device)."""
    default = DISPLAY_NAME if ranks is None else f"{DISPLAY_NAME[:-1]}, {plural(ranks, 'rank')})"
    return {
        # Jupyter replaces {connection_file} by the path of a file with the kernel's ports and key.
        "argv": [python, "-m", _MODULE, "-f", "{connection_file}"],
        "display_name": display_name or default,
        "language": "python",
        # The version of Jupyter's messaging that ipykernel speaks. Front ends show the debugger's button only with the
        # metadata below.
        "kernel_protocol_version": "5.5",
        "metadata": {"debugger": True},
        "env": {} if ranks is None else {"RANKBOOK_RANKS": str(ranks)},
    }


def install(
    *,
    name: str | None = None,
    display_name: str | None = None,
    ranks: int | None = None,
    user: bool = False,
    prefix: str | None = None,
) -> Path:
    """Install a kernel spec where Jupyter finds it, and return its folder.

    `ranks` None means one rank per device. `name` None means "rankbook", or "rankbook-4" for 4 ranks. With neither
    `user` nor `prefix` the spec is installed for all users, which may need root. Raises `InvalidArgument` for a name
    that another kernel has, and OSError if the folder cannot be written.
    """
    if ranks is not None and ranks < 1:
        raise InvalidArgument(f"ranks must be a positive integer, got {ranks}")
    name = name or (NAME if ranks is None else f"{NAME}-{ranks}")
    # Checked before anything is written: `install_kernel_spec` replaces a spec of the same name.
    manager = KernelSpecManager()
    _refuse_others(manager, name, _destination(manager, name, user=user, prefix=prefix))
    # jupyter_client installs a folder, with logos and kernel.json in it.
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        shutil.copytree(RESOURCES, folder)
        # `sys.executable` is the Python that has Rankbook, whatever `python` is on the server's PATH.
        spec = make_spec(sys.executable, ranks, display_name)
        (folder / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        try:
            return Path(manager.install_kernel_spec(str(folder), kernel_name=name, user=user, prefix=prefix))
        except ValueError as error:
            raise InvalidArgument(str(error)) from error


def spec_for(name: str) -> KernelSpec | None:
    """Return a spec of this interpreter's kernel for a notebook whose metadata names the kernel `name`.

    Returns None if `name` is another kernel. The number of ranks of an installed spec is kept; a spec that is not
    installed is recognized by its name.
    """
    try:
        installed = KernelSpecManager().get_kernel_spec(name)
        # The interpreter of an installed spec may be another one; only the variables are taken from it.
        ours, env = _MODULE in installed.argv, dict(installed.env)
    except (NoSuchKernel, *UNREADABLE):
        # Not installed here, as when the notebook comes from another machine.
        ours, env = name == NAME or name.startswith(f"{NAME}-"), {}
    # Without `resource_dir` the spec has no logos, which only a launcher shows.
    spec = make_spec(sys.executable, None, None)
    return KernelSpec(resource_dir="", **{**spec, "env": env}) if ours else None


def _destination(manager: KernelSpecManager, name: str, *, user: bool, prefix: str | None) -> Path:
    """Return the folder that `install_kernel_spec` replaces."""
    if user:
        folder = Path(manager.user_kernel_dir)
    elif prefix:
        folder = Path(prefix) / "share" / "jupyter" / "kernels"
    else:
        folder = Path(SYSTEM_JUPYTER_PATH[0]) / "kernels"
    return folder / name.lower()


def _refuse_others(manager: KernelSpecManager, name: str, destination: Path) -> None:
    """Raise `InvalidArgument` if Jupyter finds another kernel by this name, or if one is at the destination."""
    installed: list[KernelSpec] = []
    with contextlib.suppress(NoSuchKernel, ValueError):  # the installation rejects an invalid name
        installed.append(manager.get_kernel_spec(name))
    # Jupyter finds the first spec of its search path only, and the destination need not be on that path.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        installed.append(KernelSpec.from_resource_dir(str(destination)))
    for spec in installed:
        if _MODULE not in spec.argv:
            raise InvalidArgument(
                f"the name {name!r} is used by another kernel ({spec.display_name}); choose another name with --name"
            )


def main(arguments: Sequence[str]) -> int:
    """Run `python -m rankbook.jupyter install` and return the exit code: 1 if the spec could not be installed."""
    parser = argparse.ArgumentParser(
        prog="python -m rankbook.jupyter install",
        description="Install the kernel spec of Rankbook's kernel for Jupyter.",
    )
    # The options of `ipykernel install`, with the same names and meanings.
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="install for the current user")
    where.add_argument(
        "--sys-prefix", action="store_true", help="install into the environment of this Python (sys.prefix)"
    )
    where.add_argument("--prefix", metavar="FOLDER", help="install into the environment FOLDER")
    parser.add_argument("-n", "--ranks", type=int, metavar="RANKS", help="number of ranks (default: one per device)")
    parser.add_argument("--name", help="name of the kernel spec (default: rankbook, or rankbook-N with -n N)")
    parser.add_argument("--display-name", metavar="TEXT", help="name that Jupyter's launcher shows")
    options = parser.parse_args(arguments)
    try:
        folder = install(
            name=options.name,
            display_name=options.display_name,
            ranks=options.ranks,
            user=options.user,
            prefix=sys.prefix if options.sys_prefix else options.prefix,
        )
    except InvalidArgument as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"cannot write the kernel spec: {error}; --user and --sys-prefix do not need root\n")
        return 1
    sys.stdout.write(f"installed in {folder}\n")
    return 0
