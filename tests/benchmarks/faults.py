"""Compare the recovery times of all faults with their limits: `python tests/benchmarks/faults.py`.

The faults and their clocks are in tests/faults/injection.py. The limit holds for the slowest of all cases, and not for
their median: a user waits for every one of them. With
`--stand-in`, the ranks are on the stand-in for NCCL, and the clock ends with the cell.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.faults.injection import HOLDINGS, Case, Times, cases, open_injector, table

LIMITS = {"raise": 2.0, "mismatch": 1.5, "kill": 2.0, "interrupt": 1.5}
"""Seconds from the fault until control is back and a collective has worked in the next cell."""
CELL_LIMITS = {"raise": 2.0, "kill": 1.0, "interrupt": 0.6}
"""Seconds from the fault until the end of the cell, on the stand-in for NCCL."""


def main() -> int:
    options = _options()
    measured: list[Times] = []
    failures: list[str] = []
    for world in options.worlds:
        waiting = [
            case for case in cases([world]) if case.holdings[0] in options.holding for _ in range(options.rounds)
        ]
        while waiting:
            _measure(world, waiting, measured, failures, stand_in=options.stand_in)
    text = f"{table(measured)}\n\nPython {platform.python_version()}, {platform.system()} {platform.machine()}."
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    limits = CELL_LIMITS if options.stand_in else LIMITS
    results = [_verdict(kind, limit, measured, of_cell=options.stand_in) for kind, limit in limits.items()]
    for failure in failures:
        print(f"BROKEN {failure}")
    return 0 if all(results) and not failures else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], metavar="N", help="numbers of ranks; 2 3 4")
    parser.add_argument("--holding", nargs="+", default=[*HOLDINGS], choices=[*HOLDINGS], help="what they hold; all")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often each case is measured; 1")
    parser.add_argument("--stand-in", action="store_true", help="on the stand-in for NCCL, not on gloo")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table goes there too")
    return parser.parse_args()


def _measure(world: int, waiting: list[Case], measured: list[Times], failures: list[str], *, stand_in: bool) -> None:
    """Take cases off the list in one kernel, until it is empty or one of them fails."""
    with open_injector(world, stand_in=stand_in) as injector:
        while waiting:
            case = waiting.pop(0)
            start = time.perf_counter()
            try:
                measured.append(injector.inject(case))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failures.append(f"{case}: {type(error).__name__}: {str(error).strip()[:500]}")
                print(f"{case}: FAILED", file=sys.stderr, flush=True)
                return
            seconds = f"{measured[-1].control:.2f} {measured[-1].works:.2f} [{time.perf_counter() - start:.1f} s]"
            print(f"{case}: {seconds}", file=sys.stderr, flush=True)


def _verdict(kind: str, limit: float, measured: Iterable[Times], *, of_cell: bool) -> bool:
    of_kind = [item for item in measured if item.case.fault.kind == kind]
    if not of_kind:
        return True
    seconds = {item: item.control if of_cell else item.works for item in of_kind}
    slowest = max(of_kind, key=lambda item: seconds[item])
    within_limit = seconds[slowest] <= limit
    print(
        f"{'held  ' if within_limit else 'BROKEN'} {kind}: the slowest of {len(of_kind)} cases {seconds[slowest]:.2f} s"
        f" <= {limit:g} s ({slowest.case})"
    )
    return within_limit


if __name__ == "__main__":
    sys.exit(main())
