"""What each fault takes, against what is required: `python tests/benchmarks/faults.py`.

Owns: the limits and the verdicts. Refuses: the faults themselves and their clocks, which tests/faults/scenes.py has.
The limit holds for the slowest of all cases, not for their median: a person waits for each of them.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.faults.scenes import HOLDINGS, Case, Times, cases, stage, table

LIMITS = {"raise": 2.0, "mismatch": 1.5, "kill": 2.0, "interrupt": 1.5}
"""Seconds from the fault until control is back and a collective has worked in the next cell."""


def main() -> int:
    options = _options()
    measured: list[Times] = []
    failures: list[str] = []
    for world in options.worlds:
        waiting = [
            case for case in cases([world]) if case.holdings[0] in options.holding for _ in range(options.rounds)
        ]
        while waiting:
            _measure(world, waiting, measured, failures)
    text = f"{table(measured)}\n\nPython {platform.python_version()}, {platform.system()} {platform.machine()}."
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    held = [_verdict(kind, measured) for kind in LIMITS]
    for each in failures:
        print(f"BROKEN {each}")
    return 0 if all(held) and not failures else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], metavar="N", help="numbers of ranks; 2 3 4")
    parser.add_argument("--holding", nargs="+", default=[*HOLDINGS], choices=[*HOLDINGS], help="what they hold; all")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often each case is measured; 1")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table goes there too")
    return parser.parse_args()


def _measure(world: int, waiting: list[Case], measured: list[Times], failures: list[str]) -> None:
    """Take cases off the list in one kernel, until it is empty or one of them fails."""
    with stage(world) as scene:
        while waiting:
            case = waiting.pop(0)
            began = time.perf_counter()
            try:
                measured.append(scene.strike(case))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failures.append(f"{case}: {type(error).__name__}: {str(error).strip()[:500]}")
                print(f"{case}: FAILED", file=sys.stderr, flush=True)
                return
            seconds = f"{measured[-1].control:.2f} {measured[-1].works:.2f} [{time.perf_counter() - began:.1f} s]"
            print(f"{case}: {seconds}", file=sys.stderr, flush=True)


def _verdict(kind: str, measured: Iterable[Times]) -> bool:
    own = [each for each in measured if each.case.fault.kind == kind]
    if not own:
        return True
    slowest = max(own, key=lambda each: each.works)
    held = slowest.works <= LIMITS[kind]
    print(
        f"{'held  ' if held else 'BROKEN'} {kind}: the slowest of {len(own)} cases {slowest.works:.2f} s"
        f" <= {LIMITS[kind]:g} s ({slowest.case})"
    )
    return held


if __name__ == "__main__":
    sys.exit(main())
