"""Measure a change of the number of ranks: `python tests/benchmarks/resize.py`.

Ranks train a sharded model with 1 GB of weights and optimizer state in all. Their number changes as `--sizes` says.
After each change the shards are compared, bit by bit, with those that `load_state` reads from a checkpoint made just
before. At the end, the samples of the epoch are counted. A copy of as many bytes in this process's memory is measured
with each change, for comparison.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rankbook import Cluster

SETUP = """
from rankbook.runtime import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

torch.manual_seed(0)
accelerator = Accelerator({plugin})
net = torch.nn.Sequential(*[torch.nn.Linear({width}, {width}, bias=False) for _ in range({layers})])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(torch.arange({samples}), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
seen = []

def train(steps):
    for batch in loader:
        seen.extend(batch.tolist())
        accelerator.backward(model(batch[:, None].float().expand(-1, {width}) / {samples}).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        steps -= 1
        if steps == 0:
            return

def parts(tensors):
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in tensors]

def state():
    parameters = list(net.parameters())
    moments = [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]
    return parts(parameters) + parts(moments)
"""
SAMPLES = 160
LIMIT = 3.0


def main() -> int:
    """Run the benchmark, and return 1 if a limit was not held."""
    options = _options()
    first, *sizes = map(int, options.sizes.split(","))
    if not options.cold:
        os.environ["RANKBOOK_PRELOAD"] = "start"  # as a notebook's kernel does
    good = True
    with Cluster(first) as cluster, tempfile.TemporaryDirectory() as folder:
        # 12 bytes for each parameter: weight and two moments.
        layers = max(1, round(options.mb * 1e6 / 12 / options.width**2))
        plugin = "" if options.ddp else "fsdp_plugin=FullyShardedDataParallelPlugin()"
        cluster.run(SETUP.format(plugin=plugin, width=options.width, layers=layers, samples=SAMPLES))
        size, seen, before = 12 * layers * options.width**2, [], first
        for n in sizes:
            cluster.run(f"seen = []\ntrain(2)\naccelerator.save_state({str(folder)!r} + '/{before}-{n}')")
            seen += [sample for of_rank in cluster.pull("seen") for sample in of_rank]
            source = bytearray(size)
            began = time.monotonic()
            copy = bytes(source)
            copied = time.monotonic() - began
            del source, copy
            began = time.monotonic()
            cluster.resize(n)
            seconds = time.monotonic() - began
            cluster.run(f"moved = state()\naccelerator.load_state({str(folder)!r} + '/{before}-{n}')")
            cluster.run("equal = all(map(torch.equal, moved, state()))\ndel moved")
            equal = all(cluster.pull("equal"))
            good = good and equal and seconds <= LIMIT
            word = "held  " if seconds <= LIMIT else "BROKEN"
            print(
                f"{word} {before} to {n} ranks: {seconds:.2f} s <= {LIMIT:g} s, {seconds / copied:.1f} x a copy of "
                f"{size / 1e6:.0f} MB; {'equal' if equal else 'UNEQUAL'} to save and load",
                flush=True,
            )
            before = n
        cluster.run("seen = []\ntrain(1000)")
        seen += [sample for of_rank in cluster.pull("seen") for sample in of_rank]
        once = sorted(seen) == list(range(SAMPLES))
        print(f"{'held  ' if once else 'BROKEN'} each of {SAMPLES} samples of the epoch once")
    return 0 if good and once else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,3,4,2,4", metavar="N,N,…", help="numbers of ranks; 4,3,4,2,4")
    parser.add_argument("--mb", type=float, default=1000, metavar="N", help="of state on all ranks; 1000")
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="of a layer; 2048")
    parser.add_argument("--ddp", action="store_true", help="DDP in place of FSDP2: the state is on each rank")
    parser.add_argument("--cold", action="store_true", help="without the modules that a kernel imports in advance")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
