"""Run the kernel (`python -m rankbook.jupyter -f FILE`), or install its spec (`python -m rankbook.jupyter install`)."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the command line; Jupyter passes `-f FILE`."""
    if sys.argv[1:2] == ["install"]:
        from rankbook.jupyter.spec import main as install

        return install(sys.argv[2:])
    if sys.path and sys.path[0] == str(Path.cwd()):  # added by `-m`; ipykernel adds the notebook's folder as ""
        del sys.path[0]
    # Imported only here: installing a spec does not need ipykernel.
    from ipykernel.kernelapp import IPKernelApp

    from rankbook.jupyter.kernel import RankbookKernel

    # Returns when the kernel is shut down.
    IPKernelApp.launch_instance(kernel_class=RankbookKernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
