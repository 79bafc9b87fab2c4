"""Test sync-check and gradient norms on real ranks: clean layouts, and planted bugs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent

import pytest

import rankbook
from rankbook import Cluster, InvalidArgument
from rankbook.launch import local
from rankbook.widgets.placement import text as view_of
from tests.conftest import Gate, wait_until

pytestmark = pytest.mark.processes

SETUP = """
from rankbook import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig
from torch import nn

PLAN = TorchTensorParallelConfig(plan={"up": "colwise", "down": "rowwise"})
LAYOUTS = {
    "ddp": lambda: ParallelismConfig(dp_replicate_size=4),
    "fsdp": lambda: ParallelismConfig(dp_shard_size=4),
    "hybrid": lambda: ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    "tp": lambda: ParallelismConfig(tp_size=4, tp_handler=PLAN),
    "mesh": lambda: ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=PLAN),
}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.head(self.drop(self.down(torch.relu(self.up(self.norm(self.embed(x)))))))

torch.manual_seed(3)
DATA = torch.randint(0, 12, (16,))
LABELS = torch.randint(0, 12, (16,))

def fresh(dropout=0.0):
    torch.manual_seed(5)
    model = Model()
    model.drop.p = dropout
    return model

def build(layout, precision="no", steps=1, dropout=0.0):
    global accelerator, model, optimizer, scheduler
    accelerator = Accelerator(
        parallelism_config=LAYOUTS[layout](), mixed_precision=precision, gradient_accumulation_steps=steps
    )
    raw = fresh(dropout)
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))

def share(data):
    setup = accelerator.setup
    return data.chunk(setup.data_parallel_size)[setup.data_parallel_rank]

def backward(limit=None):
    loss = nn.functional.cross_entropy(model(share(DATA)), share(LABELS))
    accelerator.backward(loss)
    return accelerator.clip_grad_norm_(model.parameters(), limit) if limit else None

def train(batches=2, limit=1.0):
    for _ in range(batches):
        with accelerator.accumulate(model):
            backward(limit)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

single = fresh()
nn.functional.cross_entropy(single(DATA), LABELS).backward()
expected = {name: float(p.grad.norm()) for name, p in single.named_parameters()}
expected_total = float(nn.utils.clip_grad_norm_(single.parameters(), 0.05))
clipped = {name: float(p.grad.norm()) for name, p in single.named_parameters()}
"""


LAYOUT_NAMES = ("ddp", "fsdp", "hybrid", "tp", "mesh")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = rankbook.start(4)
    try:
        started.run(SETUP).raise_for_status()
        yield started
    finally:
        started.stop()
        local.shutdown_prestarted()


def run(cluster: Cluster, code: str, **options: object) -> None:
    cluster.run(code, **options).raise_for_status()


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_clean_layout_raises_no_alarm_and_has_the_norms_of_one_process(cluster, layout):
    run(cluster, f"build({layout!r}, dropout=0.1)\ntrain()")
    report = cluster.sync_check()
    assert report.ok and report.compared > 30 and not report.expected, report
    run(cluster, f"build({layout!r})\nbackward()")
    table = cluster.gradients("model")
    expected, total, clipped = (cluster.pull(name)[0] for name in ("expected", "expected_total", "clipped"))
    assert table.norm == pytest.approx(total, rel=1e-4)
    assert {name: gradient.norm for name, gradient in table.parameters.items()} == pytest.approx(expected, rel=1e-3)
    assert table["up"] == pytest.approx((expected["up.weight"] ** 2 + expected["up.bias"] ** 2) ** 0.5, rel=1e-3)
    assert {gradient.note for gradient in table.parameters.values()} == {""}
    run(cluster, "norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.05))")
    assert cluster.pull("norm") == pytest.approx([total] * 4, rel=1e-4)
    after = {name: gradient.norm for name, gradient in cluster.gradients("model").parameters.items()}
    assert after == pytest.approx(clipped, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_clean_training_raises_no_alarm(cluster, layout, precision, steps):
    run(cluster, f"build({layout!r}, {precision!r}, steps={steps}, dropout=0.1)\ntrain(batches=4)")
    report = cluster.sync_check()
    assert report.ok, report
    names = cluster.sync_check(["model", "optimizer", "scheduler"])
    assert names.ok and names.compared > 30, names


def test_gradients_inside_of_a_cell_are_those_of_all_ranks(cluster):
    run(cluster, "build('mesh')\nbackward()\nimport rankbook\ntable = rankbook.gradients(model)\nnorm = table.norm")
    assert cluster.pull("norm") == pytest.approx([cluster.pull("expected_total")[0]] * 4, rel=1e-4)
    run(cluster, "build('ddp', steps=2)\nwith accelerator.accumulate(model):\n    backward()")
    table = cluster.gradients("model")
    assert not table.reduced and "not reduced yet" in str(table) and "differs between replicas" in str(table)
    with pytest.raises(InvalidArgument, match="no module or parameter 'upp'; did you mean: up"):
        table["upp"]
    with pytest.raises(rankbook.CellError, match=r"'optimizer' is a .*: expected a model"):
        cluster.gradients("optimizer")


BUGS = {
    # bug: (code, name, kind, ranks, what the difference says)
    "parameter": ("if rank == 2: model.module.up.weight.data[0, 0] += 0.5", "model.up.weight", "parameter", (2,), ""),
    "buffer": (
        "model.forward_sync_buffers = model.broadcast_buffers = False\nmodel.module.scale += rank // 2",
        *("model.scale", "buffer", (2, 3), ""),
    ),
    "tie": (
        "if rank == 1: model.module.head.weight = nn.Parameter(model.module.embed.weight.detach().clone())",
        *("model.head.weight", "parameter", (1,), "tied to model.embed.weight on ranks 0,2-3; not tied on rank 1"),
    ),
    "optimizer state": (
        "if rank == 3: optimizer.optimizer.state[model.module.up.weight]['exp_avg'][1] = float('nan')",
        *("optimizer.state.up.weight.exp_avg", "optimizer state", (3,), "8 elements are NaN or infinite on one side"),
    ),
    "learning rate": (
        "if rank == 0: optimizer.param_groups[0]['lr'] = 0.5",
        *("optimizer.group 0.lr", "option", (0,), "0.5 on rank 0"),
    ),
    "scheduler": ("if rank == 1: scheduler.scheduler.last_epoch += 1", "scheduler.last_epoch", "scheduler", (1,), ""),
    "frozen": (
        "if rank == 1: model.module.up.bias.requires_grad_(False)",
        *("model.up.bias", "parameter", (1,), "requires_grad: True on ranks 0,2-3; False on rank 1"),
    ),
    "frozen parameter in the optimizer": (
        "if rank == 1: optimizer.optimizer.add_param_group({'params': [nn.Parameter(torch.zeros(2), False)]})",
        *("optimizer.params.7", "optimized", (1,), "is in the optimizer on rank 1 only"),
    ),
    "dtype": (
        "if rank == 1: model.module.norm.bfloat16()",
        *("model.norm.weight", "parameter", (1,), "bfloat16 on rank 1"),
    ),
    "shape": (
        "if rank == 2: model.module.scale = torch.ones(4)",
        *("model.scale", "buffer", (2,), "[3] on ranks 0-1,3; [4] on rank 2"),
    ),
    "missing": (
        "if rank == 2: del model.module.scale",
        *("model.scale", "buffer", (2,), "exists on ranks 0-1,3 only"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(cluster, bug):
    code, name, kind, ranks, difference = BUGS[bug]
    run(cluster, "build('ddp')\ntrain(1)")
    assert cluster.sync_check().ok
    run(cluster, code)
    report = cluster.sync_check()
    matches = [
        f for f in report.findings if (f.name, f.kind, f.ranks) == (name, kind, ranks) and difference in f.problem
    ]
    assert len(matches) == 1 and not report.ok, report
    assert name in str(report) and name in report.bundle()["text/html"]


def test_difference_is_measured_and_dated(cluster):
    run(cluster, "build('ddp')\ntrain(1)")
    assert cluster.sync_check().ok
    run(cluster, "train(1)\nwith torch.no_grad():\n    if rank == 1: model.module.up.weight[0, :4] += 0.25")
    report = cluster.sync_check()
    (finding,) = report.findings
    assert (finding.name, finding.ranks, finding.reference) == ("model.up.weight", (1,), (0, 2, 3))
    assert finding.largest == pytest.approx(0.25, rel=1e-3) and finding.share == 4 / 128
    assert "after step 1, equal" in finding.since
    assert cluster.sync_check("model.down").ok and cluster.sync_check("model.*.bias").ok
    assert [f.name for f in cluster.sync_check("model.up").findings] == ["model.up.weight"]


def test_shards_are_compared_with_their_replicas_only(cluster):
    run(cluster, "build('hybrid')\ntrain(1)")
    run(cluster, "if rank == 3: model.up.weight.detach().to_local().add_(1.0)")
    (finding,) = cluster.sync_check().findings
    # Ranks 1 and 3 hold the second half of the rows: 64 elements.
    assert (finding.name, finding.ranks, finding.reference) == ("model.up.weight", (3,), (1,))
    assert (finding.share, finding.elements) == (1.0, 64) and finding.largest == pytest.approx(1.0)


def test_buffers_that_the_next_forward_pass_makes_equal_are_no_alarm(cluster):
    run(cluster, "build('ddp')\ntrain(1)\nmodel.module.scale += rank")
    report = cluster.sync_check()
    assert report.ok and [f.name for f in report.expected] == ["model.scale"]
    assert "the next forward pass of DDP broadcasts the buffers of rank 0" in str(report)
    run(cluster, "train(1)")
    assert not cluster.sync_check().expected


def test_random_states_of_ranks_that_drop_the_same_activations_are_compared(cluster):
    run(cluster, "build('tp', dropout=0.5)\ntorch.manual_seed(rank)")
    assert [f.name for f in cluster.sync_check().findings] == ["rng.torch"]
    run(cluster, "torch.manual_seed(0)\nimport random\nrandom.seed(rank // 3)")
    assert cluster.sync_check().ok
    assert [(f.name, f.ranks) for f in cluster.sync_check("rng").findings if f.name == "rng.python"] == [
        ("rng.python", (3,))
    ]


def test_variables_are_compared_by_name(cluster):
    run(
        cluster,
        "torch.manual_seed(rank)\nother = nn.Sequential(nn.Linear(2, 2))\n"
        "values = {'a': [1, 2.5, 'x'], 'b': torch.full((3,), 1.0 + rank)}\n"
        "zeros = torch.zeros(3) * (-1 if rank else 1)\nif rank: only = 1",
    )
    report = cluster.sync_check(["other", "values", "zeros", "only"])
    assert {(f.name, f.ranks) for f in report.findings} == {
        *(("other.0.weight", (1, 2, 3)), ("other.0.bias", (1, 2, 3)), ("values.b", (1, 2, 3)), ("only", (0,))),
    }
    assert "other" in cluster.sync_check().skipped
    with pytest.raises(InvalidArgument, match="variable 'nothing' is not defined"):
        cluster.sync_check("nothing")


def test_an_optimizer_that_one_rank_has_for_itself_is_no_difference(cluster):
    code = """
        build('ddp')
        train(1)
        probe = nn.Linear(2, 2)
        adam = torch.optim.Adam(probe.parameters())
        for _ in range(3 if rank == 0 else 0):
            probe(torch.ones(1, 2)).sum().backward()
            adam.step()
        """
    run(cluster, dedent(code))
    report = cluster.sync_check()
    assert report.ok, report
    run(cluster, "del probe, adam")


def test_an_average_and_a_generator_of_one_rank_are_no_difference(cluster):
    code = """
        from torch.optim.swa_utils import AveragedModel
        from torch.utils.data import DataLoader
        from rankbook import DataLoaderConfiguration

        build('ddp')
        train(1)
        if rank == 0: average = AveragedModel(model.module)
        dispatching = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        generator = torch.Generator().manual_seed(5)
        loader = dispatching.prepare(DataLoader(range(16), batch_size=2, shuffle=True, generator=generator))
        read = [len(batch) for batch in loader]
        """
    run(cluster, dedent(code))
    report = cluster.sync_check()
    assert report.ok and [f.name for f in report.expected] == ["loader.generator"], report
    assert not cluster.sync_check("average").ok
    run(cluster, "del loader, generator, dispatching\nif rank == 0: del average")


LOOP = """
from os.path import exists
def is_open(path):
    flag = torch.tensor(exists(path))
    dist.broadcast(flag, 0)
    return bool(flag)
"""
BARE = """
net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
def train(batches):
    net(torch.ones(2, 4)).sum().backward()
    sgd.step()
    sgd.zero_grad()
"""


@contextmanager
def training(cluster: Cluster, gate: Gate) -> Iterator[None]:
    """Train in a cell until the end of the block, which fails if the cell has failed."""
    run(cluster, LOOP)
    cell = cluster.submit_code(f"while not is_open({str(gate.path)!r}): train(1)", number=8, ranks=None, sink=None)
    try:
        wait_until(lambda: cell.started is not None, timeout=20, what="the cell runs")
        yield
    finally:
        gate.open()
        cluster.wait(cell)
    cell.result.raise_for_status()


def test_a_training_loop_is_compared_at_the_end_of_one_step(cluster, tmp_path):
    run(cluster, "build('ddp')\ntrain()\nif rank == 2:\n    model.module.norm.bias.data += 0.5")
    with training(cluster, Gate(tmp_path / "gate")):
        for _ in range(3):
            report = cluster.sync_check(timeout=60)
            assert report.ranks == (0, 1, 2, 3) and not report.unanswered, report
            assert {finding.name for finding in report.findings} == {"model.norm.bias"}, report
            (finding,) = report.findings
            assert finding.ranks == (2,) and finding.largest == pytest.approx(0.5, rel=0.01)
            assert "at the end of optimizer step" in report.summary()
        table = cluster.gradients("model", timeout=60)
        assert table.norm > 0 and {gradient.note for gradient in table.parameters.values()} == {""}


def test_nothing_is_measured_while_a_rank_that_pauses_has_not_sent_its_hashes(cluster, tmp_path):
    code = """
        build('ddp')
        train()
        model.module.norm.bias.data += rank
        from rankbook.rank.inspect import state_inventory

        def refuse(*_):
            raise RuntimeError("no hashes today")

        hash_state = state_inventory.hash_state
        if rank == 3:
            state_inventory.hash_state = refuse
        """
    run(cluster, dedent(code))
    try:
        with training(cluster, Gate(tmp_path / "gate")):
            report = cluster.sync_check(timeout=60)
    finally:
        run(cluster, "state_inventory.hash_state = hash_state")
    assert report.ranks == (0, 1, 2) and report.unanswered == {3: "no hashes today"}, report
    assert report.note == "the differences were not measured: not all ranks have answered"
    assert report.findings and {finding.largest for finding in report.findings} == {None}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "hybrid", "tp", "mesh", "bare"])
def test_a_training_loop_of_any_layout_is_compared_at_one_step(cluster, tmp_path, layout):
    run(cluster, BARE if layout == "bare" else f"build({layout!r})")
    with training(cluster, Gate(tmp_path / "gate")):
        for _ in range(3):
            report = cluster.sync_check("net" if layout == "bare" else (), timeout=60)
            assert report.ok and "at the end of" in report.summary(), report
    run(cluster, SETUP)


def test_a_training_loop_that_ends_meanwhile_is_compared_after_it(cluster, tmp_path):
    run(cluster, "build('ddp')")
    gate = Gate(tmp_path / "gate")
    with training(cluster, gate):
        gate.open()
        report = cluster.sync_check(timeout=60)
    assert report.ok, report


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "mesh" else pytest.mark.full) for name in LAYOUT_NAMES]
)
def test_the_placement_shows_the_gradient_norms_of_one_process(cluster, layout):
    run(cluster, f"build({layout!r})\nbackward()")
    expected, total = (cluster.pull(name)[0] for name in ("expected", "expected_total"))
    placements = []

    def measured():
        placements[:] = [cluster.placement(timeout=30)]
        return any(norms.model == "model" for norms in placements[0].gradients)

    wait_until(measured, timeout=30, what="the norms of the model")
    (placement,) = placements
    (norms,) = (norms for norms in placement.gradients if norms.model == "model")
    assert norms.norm == pytest.approx(total, rel=1e-4) and norms.note == "" and norms.step is None
    up = (expected["up.weight"] ** 2 + expected["up.bias"] ** 2) ** 0.5
    assert dict(norms.modules)["up"] == pytest.approx(up, rel=1e-3)
    assert f"gradients of model: norm {total:.4g}"[:-1] in view_of(placement)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "fsdp" else pytest.mark.full) for name in LAYOUT_NAMES]
)
def test_the_view_shows_the_norms_of_one_step_while_a_loop_runs(cluster, tmp_path, layout):
    record = "norms = {}\ntotal = None\n"
    # The norms of a step are those after clipping, with which the optimizer has stepped.
    code = (
        "def train(batches):\n"
        "    global total\n"
        "    total = min(float(backward(0.05)), 0.05)\n"
        "    optimizer.step(); norms[optimizer.steps] = total; optimizer.zero_grad()\n"
    )
    run(cluster, f"build({layout!r})\n{record}{code}")
    # The norms of an earlier model of this name are forgotten when the rank looks at its variables again.
    wait_until(lambda: not any(norms.step for norms in cluster.placement().gradients), timeout=20, what="no old norms")
    seen: dict[int, float] = {}

    def arrived(placement):
        seen.update({norms.step: norms.norm for norms in placement.gradients if norms.model == "model" and norms.step})

    end = cluster.watch("placement", arrived)
    try:
        with training(cluster, Gate(tmp_path / "gate")):
            wait_until(lambda: len(seen) >= 2, timeout=60, what="the norms of two steps")
    finally:
        end()
    of_steps = cluster.pull("norms")[0]
    assert {step: of_steps[step] for step in seen} == pytest.approx(seen, rel=1e-3)
    run(cluster, SETUP)


def test_busy_rank_is_named_after_the_limit(cluster, tmp_path):
    gate = Gate(tmp_path / "gate")
    running = Gate(tmp_path / "running")
    code = f"open({str(running.path)!r}, 'w').close()\n{gate.wait}"
    cell = cluster.submit_code(code, number=7, ranks=[3], sink=None)
    try:
        wait_until(lambda: running.is_open, timeout=20, what="the cell runs")
        report = cluster.sync_check(timeout=2.0)
    finally:
        gate.open()
        cluster.wait(cell)
    assert report.ranks == (0, 1, 2) and not report.ok, report
    assert report.unanswered == {3: "it is running cell [7], and has reached no end of an optimizer step within 2 s"}
    assert "rank 3 did not answer: it is running cell [7]" in str(report)
    assert cluster.sync_check("DATA").ok


def test_tensors_without_readable_values_are_named_and_not_counted_as_equal(cluster):
    code = """
        class Evil:
            def state_dict(self):
                raise RuntimeError("no state today")

        odd = {
            "empty": torch.empty(0), "complex": torch.ones(2, dtype=torch.complex64).conj() * (1 + rank // 3),
            "meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse(), "plain": torch.ones(3),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        }
        lazy, evil = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), Evil()
        with torch.no_grad():
            lazy[0].weight.fill_(1), lazy[0].bias.fill_(1)
        """
    run(cluster, dedent(code))
    report = cluster.sync_check("odd")
    assert [(finding.name, finding.ranks) for finding in report.findings] == [("odd.complex", (3,))]
    assert set(report.unreadable) == {"odd.meta", "odd.sparse", "odd.nested", "odd.quantized"} and report.compared == 3
    assert "cannot be compared: odd.meta: it is on the meta device and has no values; odd.sparse" in str(report)
    assert "nothing to compare\ncannot be compared: odd" in str(cluster.sync_check("odd.meta"))
    report = cluster.sync_check("lazy")
    assert report.ok and set(report.unreadable) == {"lazy.1.weight", "lazy.1.bias"}
    run(cluster, "lazy[0](torch.ones(1, 2)).sum().backward()")
    assert set(cluster.gradients("lazy").parameters) == {"0.weight", "0.bias"}
    with pytest.raises(InvalidArgument, match="cannot read the state of 'evil': RuntimeError: no state today"):
        cluster.sync_check("evil")
