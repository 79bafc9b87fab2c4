"""`python -m rankbook.jupyter`: the kernel's process, and `install`, which tells Jupyter about it.

Owns: which of the two. Refuses: either's work.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """The command line; Jupyter gives `-f FILE`."""
    if sys.argv[1:2] == ["install"]:
        from rankbook.jupyter.spec import main as install

        return install(sys.argv[2:])
    if sys.path and sys.path[0] == str(Path.cwd()):  # `-m` has put it there; a notebook's folder comes in as ""
        del sys.path[0]
    from ipykernel.kernelapp import IPKernelApp

    from rankbook.jupyter.kernel import RankbookKernel

    IPKernelApp.launch_instance(kernel_class=RankbookKernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
