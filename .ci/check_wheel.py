"""Compare a wheel and a source distribution with the sources that they were built from.

Usage:

    python .ci/check_wheel.py WHEEL SDIST       compare the files in both with the sources
    python .ci/check_wheel.py --import WHEEL    import all modules, with an interpreter that has the wheel installed
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {".pyc", ".ipynb", ".md"}  # files in a package folder that do not belong into the wheel

KERNELSPEC = {  # where Jupyter finds the kernel after a normal install
    f"share/jupyter/kernels/rankbook/{name}"
    for name in ("kernel.json", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg")
}

SDIST = {  # what the source distribution has beside the packages; tests and documentation stay in the repository
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml"),
    *("PKG-INFO", "setup.cfg"),  # written by setuptools
}


def expected_files() -> set[str]:
    """Return the files in the package's folders, by their names in the wheel."""
    folders = {"rankbook": "kernel/rankbook", "rankbook/magics": "magics", "rankbook/widgets": "widgets"}
    return {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for package, folder in folders.items()
        for file in (ROOT / folder).rglob("*")  # does not follow the symbolic links in kernel/rankbook
        if file.is_file() and file.suffix not in NOT_SHIPPED
    }


def problems_of(wheel: Path) -> list[str]:
    """Return the problems of the wheel, one line per problem."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    shipped = {name for name in names if not name.startswith(f"{info}/")}
    data = {name.split(".data/data/", 1)[1] for name in shipped if ".data/data/" in name}
    shipped = {name for name in shipped if ".data/data/" not in name}
    expected = expected_files()
    problems = [f"missing: {name}" for name in sorted(expected - shipped)]
    if data != KERNELSPEC:
        problems.append(f"kernelspec files: expected {sorted(KERNELSPEC)}, found {sorted(data)}")
    problems += [f"unexpected: {name}" for name in sorted(shipped - expected)]
    must = ["rankbook/__init__.py", "rankbook/py.typed", "rankbook/magics/__init__.py", "rankbook/widgets/__init__.py"]
    must += [f"rankbook/widgets/static/{name}" for name in ("common.js", "placement.js", "view.css")]
    problems += [f"missing: {name}" for name in must if name not in shipped]
    if f"{info}/licenses/LICENSE" not in names:
        problems.append(f"missing: {info}/licenses/LICENSE")
    if metadata["License-Expression"] != "Apache-2.0":
        problems.append(f"License-Expression: expected 'Apache-2.0', found {metadata['License-Expression']!r}")
    if "rankbook = rankbook.cli.main:main" not in scripts:
        problems.append("the entry points do not include the command `rankbook`")
    if "# Rankbook" not in metadata.get_payload():
        problems.append("the long description is not the README")
    return problems


def problems_of_sdist(sdist: Path) -> list[str]:
    """Return the problems of the source distribution, one line per problem."""
    with tarfile.open(sdist) as archive:
        links = [member.name for member in archive.getmembers() if member.islnk() or member.issym()]
        names = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    names = {name for name in names if not name.startswith("kernel/rankbook.egg-info/")}
    expected = SDIST | {f"kernel/{name}" for name in expected_files()}
    return [
        *(f"not a file: {name}" for name in sorted(links)),  # `magics` and `widgets` must not be links
        *(f"missing: {name}" for name in sorted(expected - names)),
        *(f"unexpected: {name}" for name in sorted(names - expected)),
    ]


def modules_of(wheel: Path) -> list[str]:
    """Return the names of the modules in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = [Path(name) for name in archive.namelist() if name.startswith("rankbook/") and name.endswith(".py")]
    return sorted(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)


def main() -> int:
    """Run the command line and return the exit code, which is 1 if there are problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--import", dest="imports", action="store_true", help="import all modules of the wheel")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("sdist", type=Path, nargs="?")
    args = parser.parse_args()
    modules = modules_of(args.wheel)
    if args.imports:
        where = {Path(str(importlib.import_module(name).__file__)).is_relative_to(sys.prefix) for name in modules}
        problems = [] if where == {True} else [f"some modules were not imported from {sys.prefix}"]
    else:
        problems = problems_of(args.wheel) + (problems_of_sdist(args.sdist) if args.sdist else [])
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{args.wheel.name}: {len(modules)} modules, {'all imported' if args.imports else 'files as expected'}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
