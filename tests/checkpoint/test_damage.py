"""Bits, ends and files of a checkpoint that ranks have written, changed on the disk: who loads hears where and whose.

All ranks load together, again and again, while the first one damages the files and mends them.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.checkpoint import generations
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.processes

ROWS = 2
STEPS = (30, 40)


def flip(chance, file):
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    position = chance.randrange(len(data))
    data[position] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return [file], position


def truncate(chance, file):
    """The end, or all of it."""
    data = file.read_bytes()
    length = chance.choice([0, len(data) - 1, chance.randrange(len(data))])
    file.write_bytes(data[:length])
    return [file], None


def lose(chance, file):
    """The file."""
    file.unlink()
    return [file], None


def swap(chance, file):
    """Swap the file with another rank's or step's file that differs; change the step that `latest` names."""
    if file.name == "latest":
        file.write_text("step-30 crc32=00000000\n")
        return [file], None
    other = chance.choice([item for item in other_files(file) if item.read_bytes() != file.read_bytes()])
    content, other_content = file.read_bytes(), other.read_bytes()
    file.write_bytes(other_content)
    other.write_bytes(content)
    return [element for element in (file, other) if element.parent == file.parent], None


def other_files(file):
    same_step = [path for path in file.parent.iterdir() if path.suffix == file.suffix == ".distcp"]
    candidates = [*same_step, file.parent.with_name("step-30") / file.name]
    if file.name in {".metadata", "metadata.json"}:
        candidates.append(file.with_name("common.pt"))
    return candidates


def at(manifest, file, position):
    """The key whose blob this byte belongs to, and the rank that wrote it."""
    names = [item.name for item in manifest.files]
    for stored in (manifest.tensors, manifest.objects):
        for key, element in stored.items():
            for blob in getattr(element, "chunks", [element]):
                if names[blob.file] == file.name and blob.start <= position < blob.start + blob.length:
                    return key, blob.rank
    return None


def complaint(state, root):
    from rankbook.checkpoint import CheckpointError, load

    try:
        load(state, root)
    except CheckpointError as error:
        return str(error)
    return None


def check(root, names, blob, reported, report, number):
    """The same words on all ranks; the file, and what is in it, by `load` and by `verify`."""
    assert all(reported), f"{number}: damage of {names} was not found by load: {reported}"
    assert len(set(reported)) == 1, f"{number}: the ranks say different things of {names}: {reported}"
    assert "removed or replaced" not in reported[0], f"{number}: {reported[0]}"
    assert not report.ok, f"{number}: damage of {names} was not found by verify"
    by_file = {name: [damage for damage in report.damages if damage.file.endswith(name)] for name in names}
    for name in names:
        assert name in reported[0], f"{number}: load does not name {name}: {reported[0]}"
        assert by_file[name], f"{number}: verify does not name {name}: {report}"
        if name.endswith(".distcp"):
            rank = int(name.split("_")[2])
            assert f"rank {rank}" in reported[0]
            assert any(rank in element.ranks for element in by_file[name]), f"{number}: {report}"
    if blob is not None:
        key, rank = blob
        assert key in reported[0], (number, key, reported)
        assert f"rank {rank}" in reported[0]
        assert [(item.key, item.ranks) for item in by_file[names[0]]] == [(key, (rank,))], f"{number}: {report}"


def damaged(root, counts, seed):
    """Save on these ranks, damage, load, mend, and so on. How often each file was struck."""
    import torch.distributed as dist

    from rankbook.checkpoint import load, load_metadata, save, verify
    from rankbook.checkpoint.local_state import request_everything

    rank, world, root = dist.get_rank(), dist.get_world_size(), Path(root)
    for generation, step in enumerate(STEPS):
        save(generations.state(rank, world, generation, ROWS), root, step=step, metadata={"of": step})
    state, manifest = generations.state(rank, world, 9, ROWS), load_metadata(root)
    folder = root / f"step-{STEPS[-1]}"
    files = [*sorted(folder.iterdir()), root / "latest"]
    chance, damage_counts = random.Random(seed), Counter()
    kinds = [kind for kind, count in zip((flip, truncate, lose, swap), counts, strict=True) for _ in range(count)]
    for number, kind in enumerate(kinds):
        file = files[number % len(files)]
        unnamed = kind is lose and file.name == "latest"  # then the highest step is the latest
        if rank == 0:
            shutil.copytree(root, f"{root}.kept")
            hit, position = kind(chance, file)
        dist.barrier()
        reported = [None] * world
        request = state if number // len(files) % 2 else request_everything(manifest)
        dist.all_gather_object(reported, complaint(request, root))
        if unnamed:
            assert reported == [None] * world
            reported = ["latest"] * world
        if rank == 0:
            blob = None if position is None else at(manifest, file, position)
            assert blob is not None or position is None or file.suffix != ".distcp"
            what = f"{number}, {kind.__name__}"
            check(root, [item.name for item in hit], blob, reported, verify(root), what)
            damage_counts[kind.__name__, file.name] += 1
            shutil.rmtree(root)
            shutil.move(f"{root}.kept", root)
        dist.barrier()
    if rank == 0:
        (folder / "__9_0.distcp").write_bytes(b"surplus")
        assert [damage.file for damage in verify(root).damages] == [f"{folder.name}/__9_0.distcp"]
    dist.barrier()
    assert generations.generation_of(rank, world, load(state, root), ROWS) == len(STEPS) - 1
    return damage_counts


def test_damage_is_reported_on_every_rank(tmp_path):
    damage_counts = run_ranks(damaged, 3, str(tmp_path / "run"), (16, 8, 8, 8), 3, timeout=100)[0]
    assert {name for _, name in damage_counts} >= {"latest", "manifest.json", ".metadata", "metadata.json", "common.pt"}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "seed"), [(2, 1), (3, 2)])
def test_every_kind_of_damage_is_reported_on_every_rank(tmp_path, world, seed):
    damage_counts = run_ranks(damaged, world, str(tmp_path / "run"), (300, 100, 25, 25), seed, timeout=550)[0]
    assert damage_counts.total() == 450
