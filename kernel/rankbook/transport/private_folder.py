"""Makes a cluster's folder anew where somebody has removed it under the cluster.

Owns: that the folder is this user's and closed to others. Refuses: to choose where it lies (launch/paths.py).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def ensure_private_folder(folder: Path) -> None:
    """Make `folder` with mode 0700 if it is not there.

    Raises PermissionError where somebody else has put something of that name there, and OSError where it cannot be
    made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"expected {folder} to be a folder of this user with mode 0700") from None
