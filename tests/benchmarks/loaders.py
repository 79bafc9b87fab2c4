"""Measure the time of a prepared loader, compared with a plain one: `python tests/benchmarks/loaders.py`.

Two ranks read the same data through each loader, an epoch at a time and without a training step: torch's DataLoader
with a DistributedSampler, Rankbook's loader and its dispatcher, and Accelerate's, where it is installed. In each round
every loader reads one epoch, in an order that both ranks draw from the same seed; a ratio compares two epochs of the
same round. The ratio of the rank's own CPU time is given too, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

from tests.rank_processes import run_ranks


def limit(contender: str, plain: float, workers: int) -> float | None:
    """Return the largest median ratio to the plain loader, which takes `plain` microseconds a batch."""
    if contender == "loader":  # seeding and putting back the generators: a fixed price for every batch
        return 1.05 + (40 if workers else 100) / plain
    if contender == "dispatcher":  # the time of a message, which reading a small batch cannot hide
        return 4.0 if plain >= 200 else 1 + 500 / plain
    return None


def cases():
    """Return every kind of data with its batch size, its samples and its workers."""
    import torch
    from torch.utils.data import Dataset, TensorDataset

    class Small(Dataset):
        def __init__(self, samples):
            self.x, self.y = torch.randn(samples, 16), torch.arange(samples)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index], self.y[index]

    class Nested(Small):
        def __getitem__(self, index):
            x, y = self.x[index], self.y[index]
            return {"inputs": {"x": x, "mask": x, "lengths": [y, y]}, "label": y, "name": "a name"}

    class Images(Dataset):
        def __init__(self, samples):
            self.images, self.samples = torch.randn(8, 3, 224, 224), samples

        def __len__(self):
            return self.samples

        def __getitem__(self, index):
            return self.images[index % 8], index

    return {
        "small, TensorDataset": (TensorDataset(torch.randn(12800, 16), torch.arange(12800)), 32, 0),
        "small, a class of one's own": (Small(12800), 32, 0),
        "small, batches of 8": (Small(3200), 8, 0),
        "nested": (Nested(3200), 32, 0),
        "nested, 1 worker that stays": (Nested(6400), 32, 1),
        "19 MB": (Images(32 * 2 * 8), 32, 0),
    }


def measure(name, rounds, seed):
    """Return the wall and CPU seconds of an epoch for every contender, round by round, and its batches."""
    import gc
    import time

    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    from rankbook.runtime import prepare_data_loader, set_seed

    dataset, size, workers = cases()[name]
    options = {"batch_size": size, "num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": "fork", "persistent_workers": True}
    set_seed(1)
    sampler = DistributedSampler(dataset)
    source = DataLoader(dataset, shuffle=True, **options)
    loaders = {
        "plain": DataLoader(dataset, sampler=sampler, **options),
        "loader": prepare_data_loader(source, put_on_device=True),
        "dispatcher": prepare_data_loader(source, put_on_device=True, dispatch_batches=True),
    }
    if find_spec("accelerate"):
        import accelerate
        import accelerate.data_loader

        state = accelerate.Accelerator(cpu=True).state
        for kind, dispatch in (("Accelerate's loader", False), ("Accelerate's dispatcher", True)):
            if "nested" in name and dispatch:
                continue  # it has strings in it, which that dispatcher cannot send
            loaders[kind] = accelerate.data_loader.prepare_data_loader(
                source, state.device, put_on_device=True, dispatch_batches=dispatch, rng_types=["generator"]
            )
    chance = random.Random(seed)
    seconds = {kind: [] for kind in loaders}
    count = len(loaders["plain"])
    for number in range(rounds + 1):  # the first one warms up
        for kind in chance.sample(sorted(loaders), len(loaders)):
            sampler.set_epoch(number)
            gc.collect()
            gc.disable()
            dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            read = sum(1 for _ in loaders[kind])
            dist.barrier()
            elapsed = time.perf_counter() - start, time.process_time() - worked
            gc.enable()
            assert read == count, (kind, read, count)
            if number:
                seconds[kind].append(elapsed)
    return seconds, count


def main() -> int:
    options = _options()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    names = [name for name in cases() if options.only in name]
    within_limits = True
    for name in names:
        seconds, count = run_ranks(measure, 2, name, options.rounds, seed, timeout=1200)[0]
        plain = seconds["plain"]
        took = 1e6 * statistics.median(wall for wall, _ in plain) / count
        print(f"{name}: plain {took:.0f} µs a batch, {options.rounds} epochs of {count} batches", flush=True)
        for kind in list(seconds)[1:]:
            pairs = list(zip(seconds[kind], plain, strict=True))
            low, middle, high = statistics.quantiles([one[0] / other[0] for one, other in pairs], n=4)
            cpu = statistics.median(one[1] / other[1] for one, other in pairs)
            most = limit(kind, took, cases()[name][2])
            verdict = "      " if most is None else "held  " if middle <= most else "BROKEN"
            within_limits = within_limits and (most is None or middle <= most)
            spread = f"middle half {low:.3f} to {high:.3f}"
            output = "" if most is None else f" <= {most:.3g}"
            print(f"  {verdict} {kind} / plain: {middle:.3f}{output} ({spread}; CPU {cpu:.3f})", flush=True)
    print(f"seed {seed}")
    return 0 if within_limits else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="epochs of each contender; 20")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases with this in their name")
    parser.add_argument("--seed", type=int, help="of the order; a random one, printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
