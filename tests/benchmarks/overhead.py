"""Measure what Rankbook's groups cost a training step without faults: `python tests/benchmarks/overhead.py`.

In the same two ranks, the same network is wrapped twice: by DDP over Rankbook's group, and by DDP over a group of
torch's own gloo, on connections of its own. With `--stand-in`, both are on the stand-in for NCCL, whose device executes
later. With `--nccl`, both are on NCCL, on one rank with a GPU, where nothing hides the cost of a call. Steps come in
pairs, one of each, in an order that both ranks draw from the same seed, so that whatever else the machine does affects
both alike. Small collectives of both groups are timed in the same way. A round has fresh ranks, and another model is
built first. The step is small enough that the cost can be seen in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.faults.injection import FaultInjector, open_injector

LIMIT = 1.01
"""The median of the ratios of all pairs."""
COLLECTIVE_LIMIT = 10.0
"""Microseconds that one small collective may take longer, in the median of all pairs."""

SETUP = """%%distributed
import gc, json, os, random, statistics, time
from torch.nn.parallel import DistributedDataParallel
from rankbook.rank.process_groups import recoverable_group

def plain_stand_in():
    \"\"\"A group of the stand-in for NCCL: no object of ours is between DDP and it.\"\"\"
    from tests.nccl_stand_in import StandInGroup
    store = dist.PrefixStore('plain', dist.group.WORLD.get_group_store())
    group = StandInGroup(store, rank, world_size)
    group.eager_connect_single_device()
    return known(group, 'stand_in', store)

def plain_nccl():
    return of_torch(dist.ProcessGroupNCCL, 'NCCL', device)

def plain_gloo():
    return of_torch(dist.ProcessGroupGloo, 'GLOO', torch.device('cpu'))

def of_torch(backend_class, kind_name, device):
    \"\"\"A process group that torch has made all by itself: no object of ours is between DDP and the backend.\"\"\"
    store = dist.PrefixStore('plain', dist.group.WORLD.get_group_store())
    backend = backend_class(store, rank, world_size)
    group = dist.ProcessGroup(store, rank, world_size)
    kind = getattr(dist.ProcessGroup.BackendType, kind_name)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    return known(group, kind_name.lower(), store)

def known(group, backend, store):
    group._set_group_name(dist.distributed_c10d.GroupName('plain'))
    dist.distributed_c10d._world.pg_map[group] = (backend, store)
    dist.distributed_c10d._world.pg_names[group] = 'plain'
    dist.distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group

def model(group):
    torch.manual_seed(3)
    layers = [make() for _ in range(LAYERS) for make in (lambda: torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU)]
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(device), process_group=group)

plain = plain_BACKEND()
assert not isinstance(plain, recoverable_group.RecoverableProcessGroup)
assert isinstance(dist.group.WORLD, recoverable_group.RecoverableProcessGroup)
names = ['plain', 'rankbook'] if FIRST else ['rankbook', 'plain']
models = {name: model(plain if name == 'plain' else None) for name in names}
assert models['plain'].process_group is plain
optimizers = {name: torch.optim.SGD(each.parameters(), 1e-3) for name, each in models.items()}
inputs = torch.randn(BATCH, WIDTH, device=device)

def step(name):
    began = time.perf_counter()
    optimizers[name].zero_grad()
    models[name](inputs).square().mean().backward()
    optimizers[name].step()
    if device.type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - began

for _ in range(10):
    for name in models:
        step(name)"""

MEASURE = """%%distributed
chance = random.Random(SEED)
order = [name for _ in range(PAIRS) for name in chance.sample(['plain', 'rankbook'], 2)]
seconds = {name: [] for name in models}
gc.collect(); gc.disable()
for name in order:
    seconds[name].append(step(name))
gc.enable()
print('measured', json.dumps(seconds))"""

COLLECTIVES = """%%distributed
small = torch.ones(4, device=device)
groups = {'plain': plain, 'rankbook': dist.group.WORLD}
def collective(name):
    began = time.perf_counter()
    dist.all_reduce(small, group=groups[name])
    return time.perf_counter() - began
def finish():
    small.tolist()  # what a device has queued; gloo is done
chance = random.Random(SEED)
order = [name for _ in range(2000) for name in chance.sample(['plain', 'rankbook'], 2)]
for name in order[:200]:
    collective(name)
finish()
dist.barrier()
finish()
seconds = {name: [] for name in groups}
gc.collect(); gc.disable()
for number, name in enumerate(order):
    seconds[name].append(collective(name))
    if number % 20 == 19:
        finish()
gc.enable()
small.fill_(0)
print('measured', json.dumps(seconds))"""


def main() -> int:
    options = _options()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    backend = "stand_in" if options.stand_in else "nccl" if options.nccl else "gloo"
    values = {"LAYERS": options.layers, "WIDTH": options.width, "BATCH": options.batch, "PAIRS": options.pairs}
    seconds: dict[str, list[float]] = {"plain": [], "rankbook": []}
    added: list[float] = []
    for number in range(options.rounds):
        with open_injector(1 if options.nccl else 2, stand_in=options.stand_in) as injector:
            injector.notebook.ok(_filled(SETUP, {**values, "FIRST": number % 2, "BACKEND": backend}), timeout=300)
            measured = _measured(injector, _filled(MEASURE, {**values, "SEED": seed + number}))
            calls = _measured(injector, _filled(COLLECTIVES, {"SEED": seed + number}))
        added += [1e6 * (ours - plain) for ours, plain in zip(calls["rankbook"], calls["plain"], strict=True)]
        for name, samples in measured.items():
            seconds[name] += samples
        print(f"round {number + 1}: {statistics.median(_ratios(measured)):.4f}", file=sys.stderr, flush=True)
    for name, samples in seconds.items():
        quartiles = statistics.quantiles(samples, n=4)
        print(f"{name}: median {1e3 * quartiles[1]:.2f} ms, middle half {_range(quartiles)} ms, {len(samples)} steps")
    ratios = _ratios(seconds)
    ratio = statistics.median(ratios)
    low, high = _interval(ratios, random.Random(seed))
    within_limit = ratio <= LIMIT
    spread = f"95 % interval {low:.4f} to {high:.4f}, {len(ratios)} pairs, seed {seed}"
    verdict = "held  " if within_limit else "BROKEN"
    print(f"{verdict} a DDP step, rankbook / plain {backend}: {ratio:.4f} <= {LIMIT:g} ({spread})")
    more = statistics.median(added)
    small = more <= COLLECTIVE_LIMIT
    verdict = "held  " if small else "BROKEN"
    print(f"{verdict} a small all_reduce, rankbook - plain {backend}: {more:+.1f} us <= {COLLECTIVE_LIMIT:g} us")
    return 0 if within_limit and small else 1


def _measured(injector: FaultInjector, cell: str) -> dict[str, list[float]]:
    """Run a cell that prints its measurements on all ranks, and return those of rank 0."""
    output = injector.notebook.ok(cell, timeout=600).stdout
    line_of_rank_0 = next(line for line in output.splitlines() if line.startswith("[0] measured "))
    seconds: dict[str, list[float]] = json.loads(line_of_rank_0.removeprefix("[0] measured "))
    return seconds


def _ratios(seconds: dict[str, list[float]]) -> list[float]:
    return [ours / plain for ours, plain in zip(seconds["rankbook"], seconds["plain"], strict=True)]


def _interval(ratios: list[float], chance: random.Random) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median (bootstrap)."""
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="with fresh ranks each; 4")
    parser.add_argument("--pairs", type=int, default=400, metavar="N", help="of steps, in a round; 400")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="of the network; 12")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="of each layer; 512")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="few, so that communication matters; 8")
    parser.add_argument("--stand-in", action="store_true", help="on the stand-in for NCCL, not on gloo")
    parser.add_argument("--nccl", action="store_true", help="on NCCL, on one rank with a GPU")
    parser.add_argument("--seed", type=int, help="of the order of steps; a random one, printed")
    return parser.parse_args()


def _filled(code: str, values: Mapping[str, int | str]) -> str:
    for name, value in values.items():
        code = code.replace(name, str(value))
    return code


def _range(quartiles: list[float]) -> str:
    return f"{1e3 * quartiles[0]:.2f} to {1e3 * quartiles[2]:.2f}"


if __name__ == "__main__":
    sys.exit(main())
