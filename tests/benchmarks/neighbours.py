"""Measure how much another user of the machine delays ranks: `python tests/benchmarks/neighbours.py`, as root on Linux.

As in `tests/faults/test_neighbours.py`, three ranks start, run cells, form their process group anew after an error, and
are healed. In every round they do so in peace, while another user attacks their ports and folders, and beside a process
that uses a core without a connection, in shuffled order. Printed are the medians in peace and of the differences within
the rounds, in seconds. The exit status is 1 if the attack delays a step by more than 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults.test_neighbours import LOOPBACK_UP, RANKS, STRANGER, VICTIM, ask, can_isolate, read

LIMIT = 1.0
"""Seconds by which the attack may delay a step."""
CONDITIONS = ("in peace", "attacked", "busy")


def start(stack: ExitStack, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process that ends with `stack`."""
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=os.environ | environment)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def run_round(victim: subprocess.Popen[str], condition: str, folder: str) -> dict[str, float]:
    """Return the seconds of every step under `condition`; the median of the steps that come several times."""
    with ExitStack() as stack:
        if condition == "attacked":
            network = f"--net=/proc/{victim.pid}/ns/net"
            stranger = start(stack, "nsenter", network, sys.executable, str(STRANGER), str(os.getuid()), "", folder)
            assert read(stranger) == "ready"
            assert ask(stranger, "go") == "attacking"
        elif condition == "busy":
            start(stack, sys.executable, "-c", "while True: pass")
        seconds = ask(victim, f"{RANKS} 1")["seconds"]
        if condition == "attacked":
            report = ask(stranger, "stop")
            assert report["connected"] and not report["received"] and not report["readable"], report
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def main() -> int:
    """Print the delays; return 1 if one is above the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of all conditions; 7")
    rounds = parser.parse_args().rounds
    if not can_isolate():
        print("only root can create a network, and a process of another user in it", file=sys.stderr)
        return 2
    samples: dict[str, list[dict[str, float]]] = {condition: [] for condition in CONDITIONS}
    with tempfile.TemporaryDirectory(prefix="rb-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o1777)
        logs = Path(folder, "logs")
        logs.mkdir()
        places = {"RANKBOOK_RUNTIME_DIR": folder, "RANKBOOK_LOG_DIR": str(logs)}
        victim = start(stack, "unshare", "--net", sys.executable, "-c", LOOPBACK_UP + VICTIM, **places)
        assert read(victim) == "ready"
        for _ in range(rounds):
            for condition in random.sample(CONDITIONS, len(CONDITIONS)):
                samples[condition].append(run_round(victim, condition, folder))
    failed = False
    for step in samples["in peace"][0]:
        peace = [seconds[step] for seconds in samples["in peace"]]
        delays = {
            condition: statistics.median(
                seconds[step] - before for seconds, before in zip(samples[condition], peace, strict=True)
            )
            for condition in ("attacked", "busy")
        }
        failed = failed or delays["attacked"] > LIMIT
        report = {"in peace": statistics.median(peace), **delays}
        print(json.dumps({"step": step, **{name: round(value, 3) for name, value in report.items()}}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
