"""Make a virtual environment for each tool that Rankbook is compared with: `python tests/benchmarks/peers.py FOLDER`.

Every environment gets the versions that `constraints.txt` names, so that all tools run on the same torch, IPython and
ipykernel. An open range of torch could download gigabytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
VERSIONS = {"ipyparallel": "9.2.0", "jupyter-distributed": "0.1.1", "nbdistributed": "0.1.0"}


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment, there or not."""
    return folder / name / "bin" / "python"


def make(folder: Path, name: str) -> None:
    """Make one peer's environment, unless it is complete already."""
    python, done = python_of(folder, name), folder / name / "complete"
    if done.exists():
        return
    if not any(line.startswith("torch==") for line in CONSTRAINTS.read_text().splitlines()):
        raise SystemExit(f"{CONSTRAINTS} must name one version of torch")
    venv.create(folder / name, with_pip=True, clear=True)
    requirements = ["torch", "numpy", "ipykernel", f"{name}=={VERSIONS[name]}"]
    subprocess.run([python, "-m", "pip", "install", "-c", CONSTRAINTS, *requirements], check=True)
    done.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environments go; about 1.5 GB each")
    parser.add_argument("--only", choices=VERSIONS, action="append", help="this peer only; may be given again")
    options = parser.parse_args()
    for name in options.only or VERSIONS:
        make(options.folder.resolve(), name)
        sys.stdout.write(f"{name} {VERSIONS[name]}: {python_of(options.folder, name)}\n")


if __name__ == "__main__":
    main()
