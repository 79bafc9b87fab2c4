"""Slurm's commands on this host, and what their version decides."""

from __future__ import annotations

import os
import re
import subprocess

_TIMEOUT = 10.0
"""Seconds for a command."""
_HAS_OVERLAP = (20, 11)
"""First version of Slurm with the option `--overlap`. Before it, steps of a job share CPUs without an option."""


def run(*command: str) -> str | None:
    """Return the output of a Slurm command; None if it fails, as when the controller does not answer."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},  # users may have set another one
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def version() -> tuple[int, int] | None:
    """Return the version of Slurm; None if it is not known."""
    found = re.search(r"(\d+)\.(\d+)", run("srun", "--version") or "")
    return None if found is None else (int(found[1]), int(found[2]))


def overlap() -> list[str]:
    """Return the option with which a step shares the CPUs of another one; nothing for a Slurm that does not have it."""
    known = version()
    return [] if known is not None and known < _HAS_OVERLAP else ["--overlap"]
