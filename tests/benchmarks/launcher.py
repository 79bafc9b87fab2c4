"""Measure the time of a `notebook_launcher` call on warm ranks: `python tests/benchmarks/launcher.py`.

The calls of an empty function run in a real ipykernel; their median and the growth of memory are compared with limits.
Accelerate's launcher, where it is installed, is called in the same kernel, in shuffled order.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.conftest import Notebook

LIMIT_MS = 10.0
GROWN_MB = 5.0
"""Growth allowed for the kernel and a rank after the calls: the allocator's slack, and less than 5 kB per call."""

SETUP = """
import json, random, time, psutil, rankbook
def function(value): return value
def measured(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
ranks = [psutil.Process(each.pid) for each in rankbook.current().status()]
def memory(): return [each.memory_full_info().pss / 1e6 for each in (psutil.Process(), *ranks)]
calls = {'rankbook': lambda: rankbook.notebook_launcher(function, (1,))}
if PEER:
    import accelerate
    calls['accelerate'] = lambda: accelerate.debug_launcher(function, (1,), num_processes=2)
for _ in range(50): calls['rankbook']()
assert calls['rankbook']() == [1, 1]"""

MEASURE = """
order = ['rankbook'] * CALLS + ['accelerate'] * (5 if PEER else 0)
random.Random(SEED).shuffle(order)
before, seconds = memory(), {name: [] for name in calls}
for name in order: seconds[name].append(measured(calls[name]))
print('measured', json.dumps([seconds, before, memory()]))"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = parser.parse_args()
    values = {"CALLS": options.calls, "SEED": options.seed, "PEER": find_spec("accelerate") is not None}
    notebook = Notebook(patient=False)
    try:
        notebook.ok("%load_ext rankbook\n%distributed start -n 2")
        notebook.ok(_filled(SETUP, values))
        output = notebook.ok(_filled(MEASURE, values), timeout=600).stdout
    finally:
        notebook.close()
    match = re.search(r"measured (.*)", output)
    assert match is not None, output
    seconds, before, after = json.loads(match[1])
    medians = {name: 1e3 * statistics.median(item) for name, item in seconds.items()}
    p95 = 1e3 * statistics.quantiles(seconds["rankbook"], n=20)[-1]
    grown = max(late - early for early, late in zip(before, after, strict=True))
    for name, median in medians.items():
        print(f"{name}: median {median:.2f} ms, {len(seconds[name])} calls")
    passed = medians["rankbook"] <= LIMIT_MS, grown <= GROWN_MB
    print(
        f"{_word(passed[0])} a call on 2 warm ranks: {medians['rankbook']:.2f} ms <= {LIMIT_MS:g} ms (p95 {p95:.2f} ms)"
    )
    print(f"{_word(passed[1])} grown by at most {grown:.2f} MB in {options.calls} calls <= {GROWN_MB:g} MB")
    return 0 if all(passed) else 1


def _word(within_limit: bool) -> str:
    return "held  " if within_limit else "BROKEN"


def _filled(code: str, values: dict[str, object]) -> str:
    for name, value in values.items():
        code = code.replace(name, repr(value))
    return code


if __name__ == "__main__":
    sys.exit(main())
