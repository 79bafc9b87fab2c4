"""Measure the cost of protection: `python tests/benchmarks/protect.py`.

Two ranks train a model with 100 MB of weights and optimizer state each. A block of steps is run unprotected, with a
snapshot after every step, with one after every tenth, and with the optimizer's code without the line that calls the
protection, in shuffled order. Also measured: the memory of the snapshots, one snapshot, and how long `heal` takes after
a rank was killed. On a machine that others use, `--cpu-time` compares CPU time, which does not include waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rankbook import CellError, Cluster, RankLostError

SETUP = """
import inspect, os, random, re, signal, textwrap, time
from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin, optimizer as optimizers, protection

torch.manual_seed(0)
accelerator = Accelerator({plugin})
width = {width}
net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range({layers})])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(net, optimizer)
inputs = torch.randn({batch}, width)

def step():
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()

kind = optimizers.AcceleratedOptimizer
hooked = kind.step
source = re.sub(r"\\n +if after_step is not None.*\\n.*", "", textwrap.dedent(inspect.getsource(hooked)))
assert "after_step" not in source
plain = {{}}
exec("from __future__ import annotations\\n" + source, vars(optimizers), plain)

clock = time.{clock}
for _ in range(3):
    step()
accelerator.protect()
active, call = protection._active, optimizers.after_step
for _ in range(4):
    step()

def block(name, count):
    kind.step = plain["step"] if name == "before" else hooked
    optimizers.after_step = call if name.startswith("every") else None
    active.every = 10 if name == "every 10" else 1
    dist.barrier()
    began = clock()
    for _ in range(count):
        step()
    dist.barrier()
    ended = clock()
    kind.step, optimizers.after_step = hooked, call
    return (ended - began) / count
"""
LIMITS = {"every 1": 1.10, "every 10": 1.02, "unprotected": 1.005}


def main() -> int:
    """Run the benchmark, and return 1 if a limit was not held."""
    options = _options()
    rng = random.Random(options.seed)
    good = True
    with Cluster(options.ranks) as cluster:
        plugin = "fsdp_plugin=FullyShardedDataParallelPlugin()" if options.fsdp else ""
        # 12 bytes for each parameter: weight and two moments.
        shards = options.ranks if options.fsdp else 1
        layers = round(options.mb * 1e6 * shards / 12 / options.width**2)
        clock = "process_time" if options.cpu_time else "perf_counter"
        cluster.run(SETUP.format(plugin=plugin, width=options.width, layers=layers, batch=options.batch, clock=clock))
        status = cluster.protection()
        assert status is not None
        print(f"{options.ranks} ranks, {layers} layers, {status}")
        names = ["before", "unprotected", "every 1", "every 10"]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in rng.sample(names, len(names)):
                cluster.run(f"seconds = block({name!r}, {options.steps})")
                seconds[name].append(max(cluster.pull("seconds")))
        for name, samples in seconds.items():
            print(f"{name}: median {1e3 * statistics.median(samples):.2f} ms a step")
        for name, limit in LIMITS.items():
            base = "before" if name == "unprotected" else "unprotected"
            ratios = [ours / bare for ours, bare in zip(seconds[name], seconds[base], strict=True)]
            ratio = statistics.median(ratios)
            low, _, high = statistics.quantiles(ratios, n=4)
            good = good and ratio <= limit
            word = "held  " if ratio <= limit else "BROKEN"
            print(f"{word} {name} / {base}: {ratio:.4f} <= {limit:g} (middle half {low:.4f} to {high:.4f})")
        cluster.run("began = time.perf_counter()\nfor _ in range(10):\n    active.number += 1\n    active.take()")
        cluster.run("seconds = (time.perf_counter() - began) / 10")
        print(f"one snapshot: {1e3 * max(cluster.pull('seconds')):.1f} ms")
        folder = cluster._segments.folder
        memory = sum(path.stat().st_size for path in folder.glob("snapshot-*")) / status.size
        good = good and memory <= 2.1
        print(f"{'held  ' if memory <= 2.1 else 'BROKEN'} memory / state: {memory:.4f} <= 2.1")
        heals = []
        for _ in range(options.kills):
            victim = rng.randrange(options.ranks)
            with contextlib.suppress(CellError, RankLostError):
                cluster.run(f"step()\nif rank == {victim}: os.kill(os.getpid(), signal.SIGKILL)\nstep()\nstep()")
            began = time.monotonic()
            healed = cluster.heal()
            heals.append(time.monotonic() - began)
            assert "back at step" in str(healed), healed
        if heals:
            print(f"heal: median {statistics.median(heals):.2f} s, at most {max(heals):.2f} s, limit 2 s")
        cluster.protect(0)
        print(f"after protection has ended: {len(list(folder.glob('snapshot-*')))} files")
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="2")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="of blocks of steps; 15")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="in a block; 10")
    parser.add_argument("--mb", type=float, default=100, metavar="N", help="of state on each rank; 100")
    parser.add_argument("--width", type=int, default=1024, metavar="N", help="of a layer; 1024")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="rows; 64")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="of one rank, each followed by heal; 5")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--cpu-time", action="store_true", help="compare the processor's time")
    parser.add_argument("--seed", type=int, default=0, help="of the order of blocks; 0")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
