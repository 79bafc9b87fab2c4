"""What Rankbook's groups cost a training step in which nothing fails: `python tests/benchmarks/overhead.py`.

Owns: the two models, the shuffled order of their steps, the ratio and the verdict. In the same two ranks, the same
network is wrapped twice: by DDP over Rankbook's group, and by DDP over a group of torch's own gloo, on connections of
its own. Their steps alternate in an order that both ranks draw from the same seed, so that whatever else the machine
does hits both alike. Refuses: a step so large that no cost could be seen in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.conftest import check_nothing_left, leftovers
from tests.faults.scenes import stage

LIMIT = 1.01
"""The ratio of the median steps."""

SETUP = """%%distributed
import gc, json, os, random, statistics, time
from torch.nn.parallel import DistributedDataParallel
from rankbook.rank import recoverable

def plain_gloo():
    \"\"\"A process group that torch has made all by itself: no object of ours is between DDP and gloo.\"\"\"
    store = dist.PrefixStore('plain-gloo', dist.group.WORLD.get_group_store())
    backend = dist.ProcessGroupGloo(store, rank, world_size)
    group = dist.ProcessGroup(store, rank, world_size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device('cpu'), kind, backend)
    group._set_group_name(dist.distributed_c10d.GroupName('plain-gloo'))
    dist.distributed_c10d._world.pg_map[group] = ('gloo', store)
    dist.distributed_c10d._world.pg_names[group] = 'plain-gloo'
    dist.distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group

def model(group):
    torch.manual_seed(3)
    layers = [make() for _ in range(LAYERS) for make in (lambda: torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)

plain = plain_gloo()
assert not isinstance(plain, recoverable.RecoverableGroup)
assert isinstance(dist.group.WORLD, recoverable.RecoverableGroup)
models = {'plain': model(plain), 'rankbook': model(None)}
assert type(models['plain'].process_group) is dist.ProcessGroup
optimizers = {name: torch.optim.SGD(each.parameters(), 1e-3) for name, each in models.items()}
inputs = torch.randn(BATCH, WIDTH)

def step(name):
    began = time.perf_counter()
    optimizers[name].zero_grad()
    models[name](inputs).square().mean().backward()
    optimizers[name].step()
    return time.perf_counter() - began

for _ in range(10):
    for name in models:
        step(name)
print(sum(each.numel() for each in models['plain'].parameters()), 'parameters')"""

MEASURE = """%%distributed
order = [name for _ in range(PAIRS) for name in random.Random(SEED).sample([*models], 2)]
random.Random(SEED).shuffle(order)
seconds = {name: [] for name in models}
gc.collect(); gc.disable()
for name in order:
    seconds[name].append(step(name))
gc.enable()
print('measured', json.dumps(seconds))"""


def main() -> int:
    options = _options()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    seconds: dict[str, list[float]] = {"plain": [], "rankbook": []}
    ratios: list[float] = []
    before = leftovers()
    with stage(2) as scene:
        values = {"LAYERS": options.layers, "WIDTH": options.width, "BATCH": options.batch, "PAIRS": options.pairs}
        print(scene.notebook.ok(_filled(SETUP, values), timeout=300).stdout.strip())
        for number in range(options.rounds):
            said = scene.notebook.ok(_filled(MEASURE, {**values, "SEED": seed + number}), timeout=600).stdout
            found = next(line for line in said.splitlines() if line.startswith("[0] measured "))
            taken: dict[str, list[float]] = json.loads(found.removeprefix("[0] measured "))
            for name, own in taken.items():
                seconds[name] += own
            ratios.append(statistics.median(taken["rankbook"]) / statistics.median(taken["plain"]))
            print(f"round {number + 1}: {ratios[-1]:.4f}", file=sys.stderr, flush=True)
    check_nothing_left(scene.notebook.mark, before)
    for name, own in seconds.items():
        quartiles = statistics.quantiles(own, n=4)
        print(f"{name}: median {1e3 * quartiles[1]:.2f} ms, middle half {_range(quartiles)} ms, {len(own)} steps")
    ratio = statistics.median(ratios)
    held = ratio <= LIMIT
    spread = f"{min(ratios):.4f} to {max(ratios):.4f} in {len(ratios)} rounds, seed {seed}"
    print(f"{'held  ' if held else 'BROKEN'} a DDP step, rankbook / plain gloo: {ratio:.4f} <= {LIMIT:g} ({spread})")
    return 0 if held else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="medians whose median is the result; 7")
    parser.add_argument("--pairs", type=int, default=60, metavar="N", help="steps of each kind in a round; 60")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="of the network; 12")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="of each layer; 512")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="few, so that communication matters; 8")
    parser.add_argument("--seed", type=int, help="of the order of steps; a random one, printed")
    return parser.parse_args()


def _filled(code: str, values: dict[str, int]) -> str:
    for name, value in values.items():
        code = code.replace(name, str(value))
    return code


def _range(quartiles: list[float]) -> str:
    return f"{1e3 * quartiles[0]:.2f} to {1e3 * quartiles[2]:.2f}"


if __name__ == "__main__":
    sys.exit(main())
