"""Measure the start of ranks on two hosts with every engine: `python tests/benchmarks/start_engines.py`.

From the call of `start` to the end of the first cell on 2 hosts with 2 ranks each, less the time that the engine takes
to run two `sleep`s, and less the start of ranks on this host. Both hosts are this machine, whose cores they share:
that of their time which is work counts double.

A start is *cold* in a process that imports torch nowhere yet, and *loaded* in one whose forkserver has been up, as in a
notebook whose extension was loaded some seconds ago. Every sample is a process of its own; the samples of a round are
taken in shuffled order. The servers of an engine run while its samples are taken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the tests are no installed package

from tests.engines.test_programs import Place, place_of

ENGINES = ("fake", "ssh", "slurm", "mpirun", "ray")
LIMIT = 2.0
"""Seconds that a loaded start may take longer than two sleeps."""
START = """
import json, sys, time
from rankbook import Cluster
from rankbook.launch import local
from rankbook.launch.hosts import HostOptions
from rankbook.testing import FakeEngine
launcher, address, loaded, *own = sys.argv[1:]
if loaded == "loaded":
    local.prestart_forkserver()
    while local._prestarted.ready_message is None:
        time.sleep(0.01)
        [*local._prestarted.read()]
if launcher == "ray":
    import ray  # most of a second, which two sleeps need too
began = time.perf_counter()
options = None
if launcher != "local":
    nodes = None if {"--hosts", "--hostfile"} & {*own} else 2
    options = HostOptions(FakeEngine(2) if launcher == "fake" else launcher, address, nodes=nodes, arguments=tuple(own))
with Cluster(4, hosts=options) as cluster:
    cluster.run("pass")
    print(json.dumps(time.perf_counter() - began))
"""
SLEEPS = """
import json, subprocess, sys, time
commands = json.loads(sys.argv[1])
began = time.perf_counter()
processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) for command in commands]
assert not any(process.wait() for process in processes)
print(json.dumps(time.perf_counter() - began))
"""
RAY_SLEEPS = """
import json, subprocess, sys, time
import ray
class Sleeper:
    def run(self):
        subprocess.run(["sleep", "0"], check=True)
began = time.perf_counter()
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
group = ray.util.placement_group([{"CPU": 2}] * 2, strategy="SPREAD")
strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
sleeper = ray.remote(num_cpus=2)(Sleeper)
bundles = [strategy(group, placement_group_bundle_index=number) for number in range(2)]
actors = [sleeper.options(scheduling_strategy=bundle).remote() for bundle in bundles]
ray.get([actor.run.remote() for actor in actors])
print(json.dumps(time.perf_counter() - began))
"""


def sleeps(place: Place) -> list[str]:
    """Return the command that measures two `sleep`s."""
    own, _, passed = " ".join(place.arguments).partition(" -- ")
    hosts = place.arguments[1].split(",") if place.launcher == "ssh" else []
    words = {
        "fake": [["sleep", "0"]] * 2,
        "ssh": [["ssh", *shlex.split(passed), host, "sleep", "0"] for host in hosts],
        "slurm": [["srun", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mpi=none", "sleep", "0"]],
        "mpirun": [
            ["mpirun", "-np", "2", "--map-by", "ppr:1:node", *shlex.split(own), *shlex.split(passed), "sleep", "0"]
        ],
    }
    if place.launcher == "ray":
        return [sys.executable, "-c", RAY_SLEEPS]
    return [sys.executable, "-c", SLEEPS, json.dumps(words[place.launcher])]


def start(place: Place, how: str) -> list[str]:
    """Return the command that measures a start."""
    return [sys.executable, "-c", START, place.launcher, place.address, how, *place.arguments]


def measure(prefix: Sequence[str], command: Sequence[str]) -> float:
    """Run a process, and return the seconds that it prints last."""
    done = subprocess.run([*prefix, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)[-300:]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def measure_engine(launcher: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of all samples of an engine, by their names."""
    samples: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
        place_of(launcher, Path(folder), patch) as place,
    ):
        here = Place("local", prefix=place.prefix)
        commands = {"two sleeps": sleeps(place)}
        for how in ("cold", "loaded"):
            commands |= {f"{how} start": start(place, how), f"{how} here": start(here, how)}
        for _ in range(rounds):
            for name in random.sample(sorted(commands), len(commands)):
                samples.setdefault(name, []).append(measure(place.prefix, commands[name]))
    return samples


def main() -> int:
    """Print the medians of every engine, and return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), metavar="A,B", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="samples of each kind; 5")
    options = parser.parse_args()
    broken = False
    for launcher in options.engines.split(","):
        if launcher == "ray" and importlib.util.find_spec("ray") is None:
            print(f"{launcher:7} not installed")
            continue
        try:
            samples = measure_engine(launcher, options.rounds)
        except pytest.skip.Exception as skipped:
            print(f"{launcher:7} {skipped.msg}")
            continue
        median = {name: statistics.median(values) for name, values in samples.items()}
        for how in ("cold", "loaded"):
            excess = median[f"{how} start"] - median["two sleeps"]
            ok = how == "cold" or excess <= LIMIT
            broken |= not ok
            print(
                f"{launcher:7} {how:6} start {median[f'{how} start']:5.2f} s   two sleeps {median['two sleeps']:5.2f} s"
                f"   here {median[f'{how} here']:5.2f} s   start - sleeps {excess:5.2f} s"
                f"   start - sleeps - here {excess - median[f'{how} here']:5.2f} s   {'ok' if ok else 'BROKEN'}",
                flush=True,
            )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
