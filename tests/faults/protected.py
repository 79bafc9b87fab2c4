"""A training on four ranks that is killed at a given moment, and the losses that it has without."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from rankbook import CellError, Cluster, RankLostError

RANKS = 4
LAYOUTS = {
    "ddp": "Accelerator()",
    "fsdp": "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())",
    "hsdp": "Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))",
    "fsdp_tp": "Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2, "
    "tp_handler=TorchTensorParallelConfig(plan={'up': 'colwise', 'down': 'rowwise'})))",
}
MOMENTS = ("forward", "backward", "optimizer", "copy", "commit", "scheduler", "any", "between")
"""Moments at which the victim dies.

`copy` and `commit` are in the middle of the snapshot, `any` is some milliseconds after the forward pass has begun, and
`between` is between two cells.
"""

SETUP = """
import os, signal, threading
from rankbook.runtime import (
    Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig,
    optimizer as optimizers, protection, set_seed,
)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 48)
        self.down = torch.nn.Linear(48, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 16)

    def forward(self, x):
        if victim.is_due("any"):
            threading.Timer(victim.delay, victim.die).start()
        x = self.norm(self.down(self.up(x).relu()))
        if victim.is_due("forward"):
            victim.die()
        x = torch.nn.functional.dropout(self.last(x), 0.1)
        if victim.is_due("backward"):
            x.register_hook(lambda gradient: victim.die())
        return x

class Victim:
    rank, moment, step, delay = -1, "", 0, 0.0
    def is_due(self, moment):
        return (rank, moment, optimizer.steps) == (self.rank, self.moment, self.step)
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

victim = Victim()

def train(count):
    losses = []
    for batch in loader:
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        if victim.is_due("scheduler"):
            victim.die()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == count:
            break
    return losses

def arm():
    # Between the parts of a snapshot, which the cell's own code cannot reach.
    def before(original, moment):
        def wrapped(*args, **options):
            if victim.is_due(moment):
                victim.die()
            return original(*args, **options)
        return wrapped
    optimizer.optimizer.register_step_post_hook(lambda *_: victim.die() if victim.is_due("optimizer") else None)
    area, file = protection._Area, protection.SnapshotFile
    area.write, file.commit = before(area.write, "copy"), before(file.commit, "commit")
"""
MODEL = """
AcceleratorState._reset_state()  # otherwise a plain Accelerator() keeps the layout before
set_seed(3)
accelerator = {accelerator}
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
data = torch.randn(1600, 16, generator=torch.Generator().manual_seed(7))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, loader)
"""


class Training:
    """A training of one layout on the ranks of `cluster`, with the losses of all its steps."""

    def __init__(self, cluster: Cluster, layout: str, *, steps: int, every: int = 1, protect: bool = True) -> None:
        self.cluster = cluster
        self.steps = steps
        cluster.run(SETUP)
        cluster.run(MODEL.format(accelerator=LAYOUTS[layout]))
        cluster.run(f"losses = train({steps})")
        self.expected: list[list[float]] = cluster.pull("losses")
        cluster.run(MODEL.format(accelerator=LAYOUTS[layout]))
        cluster.run(f"accelerator.protect({every if protect else False})\narm()")
        self.at = 0

    def kill(self, rank: int, moment: str, *, after: int, delay: float = 0.0) -> None:
        """Train, and kill `rank` at this moment of the step after `after` more; "any" is after `delay` seconds."""
        if moment == "between":
            self.cluster.run(f"losses = train({after})")
            os.kill(next(status.pid for status in self.cluster.status() if status.rank == rank) or 0, signal.SIGKILL)
            return
        step = self.at + after + (moment in ("scheduler", "copy", "commit"))
        self.cluster.run(f"victim.rank, victim.moment, victim.step, victim.delay = {rank, moment, step, delay}")
        with contextlib.suppress(CellError, RankLostError):
            self.cluster.run("losses = train(1000)")

    def heal(self) -> Any:
        """Heal, and return the result."""
        healed = self.cluster.heal()
        print(healed)  # shown if the test fails
        self.cluster.run("victim.rank = -1\narm()\nsteps = optimizer.steps")
        steps = self.cluster.pull("steps")
        assert len(set(steps)) == 1, steps
        self.at = steps[0]
        return healed

    def check(self, count: int) -> None:
        """Train `count` steps and compare their losses with those of the undisturbed run, bit by bit.

        The next loop continues the epoch, which the loop of these steps leaves by `break`.
        """
        self.cluster.run(f"losses = train({count})")
        expected = [losses[self.at : self.at + count] for losses in self.expected]
        assert self.cluster.pull("losses") == expected
        self.at += count
        self.cluster.run("loader.load_state_dict(loader.state_dict())")
