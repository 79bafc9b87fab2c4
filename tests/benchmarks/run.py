"""Measure Rankbook and its peers in the same run: `python tests/benchmarks/run.py --peers FOLDER`.

Every round measures all tools in shuffled order. The failure of one tool does not end the run. The measurements are in
measures.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import measures
import report
from adapters import PEERS, Adapter, Rankbook
from measures import Sample
from peers import python_of

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
CELLS = 200
"""Minimum number of cells of every kind, over all rounds."""

Measure = Callable[[Adapter], Iterable[Sample]]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the kernels are ended
    options = _options()
    tools = _tools(options)
    versions = {tool.name: _version(tool) for tool in tools}
    kinds: dict[str, Measure] = {
        "cells": partial(measures.cells, pairs=-(-CELLS // options.rounds)),
        "starts": partial(measures.starts, sizes=(2, 4, 8)),
        "lines": measures.lines,
        "memory": measures.memory,
        "transfer": measures.transfer,
        "faults": measures.faults,
    }
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    random.seed(seed)
    samples: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    failures = 0
    environment = _environment(options.rounds, seed)
    for number in range(options.rounds):
        for kind in options.only or kinds:
            for tool in random.sample(tools, len(tools)):
                failures += not _measure(f"round {number + 1}, {kind}, {tool.name}", kinds[kind], tool, samples)
    text = f"{report.table(samples, versions)}\n\n{environment}"
    _say(text)
    verdicts = report.verdicts(samples, Rankbook.name)
    for within_limit, words in verdicts:
        _say(f"{'held  ' if within_limit else 'BROKEN'} {words}")
    if options.json:
        content = {
            "environment": environment,
            "versions": versions,
            "samples": {m: {t: [asdict(s) for s in of] for t, of in tools.items()} for m, tools in samples.items()},
        }
        options.json.write_text(json.dumps(content, indent=1))
    if options.write_table:
        report.write_table(PAGE, text)
    return 1 if failures or not all(within_limit for within_limit, _ in verdicts) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "cells, starts, lines, memory, transfer, faults"
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where peers.py put them; none: Rankbook alone")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each is measured; 3")
    parser.add_argument("--only", type=_names(names), metavar="NAME,...", help=f"some of: {names}")
    tools = ", ".join([Rankbook.name, *(peer.name for peer in PEERS)])
    parser.add_argument("--tools", type=_names(tools), metavar="NAME,...", help=f"some of: {tools}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample goes there")
    parser.add_argument("--seed", type=int, help="of the order within the rounds; a random one, printed")
    parser.add_argument("--write-table", action="store_true", help="put the table into docs/comparison.md")
    return parser.parse_args()


def _names(valid: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in valid.split(", ")]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the names are {valid}")
        return names

    return parse


def _tools(options: argparse.Namespace) -> list[Adapter]:
    tools: list[Adapter] = [Rankbook(sys.executable)]
    for peer in PEERS if options.peers else ():
        python = python_of(options.peers.resolve(), peer.name)
        if python.exists():
            tools.append(peer(str(python)))
        else:
            _say(f"{peer.name}: no {python}; `python tests/benchmarks/peers.py {options.peers}` makes it")
    return [tool for tool in tools if not options.tools or tool.name in options.tools]


def _measure(title: str, measure: Measure, tool: Adapter, samples: dict[str, dict[str, list[Sample]]]) -> bool:
    """Run one measure of one tool and keep what it gave. A failure is told, and only Rankbook's counts."""
    start = time.perf_counter()
    collected: list[Sample] = []
    failure = ""
    try:
        collected.extend(measure(tool))  # what came before a failure stays
    except Exception as error:  # noqa: BLE001 - told below; the other tools are still measured
        failure = f"FAILED {type(error).__name__}: {error}"
    for sample in collected:
        samples[sample.metric][tool.name].append(sample)
    _say(f"{title}: {_brief(collected)} [{time.perf_counter() - start:.0f} s] {failure}", to=sys.stderr)
    return not failure or tool.name != Rankbook.name


def _brief(collected: list[Sample]) -> str:
    of: dict[str, list[Sample]] = defaultdict(list)
    for sample in collected:
        of[sample.metric].append(sample)
    texts = []
    for metric, metric_samples in of.items():
        values = sorted(sample.value for sample in metric_samples if sample.value is not None)
        notes = ", ".join(sample.note for sample in metric_samples if sample.note)
        middle = f"{values[len(values) // 2]:.3g}" if values else "-"
        texts.append(" ".join([metric, middle, *([f"({notes})"] if notes else [])]))
    return ", ".join(texts)


def _version(tool: Adapter) -> str:
    code = f"from importlib.metadata import version; print(version({tool.distribution!r}))"
    completed = subprocess.run([tool.python, "-c", code], capture_output=True, text=True, check=False)
    return completed.stdout.strip() or "?"


def _environment(rounds: int, seed: int) -> str:
    code = "import torch, ipykernel, IPython; print(torch.__version__, ipykernel.__version__, IPython.__version__)"
    torch, ipykernel, ipython = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    load = os.getloadavg()[0]
    return (
        f"Python {platform.python_version()}, torch {torch}, ipykernel {ipykernel}, IPython {ipython}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"load {load:.1f} before the run; medians of {rounds} rounds, "
        f"tools in shuffled order (seed {seed})."
    )


def _say(text: str, to: object = None) -> None:
    print(text, file=to or sys.stdout, flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
