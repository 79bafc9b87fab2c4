"""Samples that the ranks read: data that was split twice, and the report of who saw which sample.

`SampleLog` is filled while a pass makes its requests: 4 bytes per sample. `gather_seen` collects the logs of all ranks
and looks for samples that several ranks have read, and for samples that nobody has.

A dataset or sampler that was split by rank before `prepare` would be split again. `describe_split` looks at one rank's
loader when it is prepared. `fingerprint_dataset` and `fingerprint_sampler` are compared between the ranks when the
first pass begins. Both read attributes and a few samples in memory, and run none of the user's code except `__len__`.

Samples are never read by `dataset[0]`: it may decode a file, take long, or draw random numbers, so that a random
augmentation would make the samples of equal datasets differ, and the check would change the numbers that training
draws. What is read instead is the stored data below: tensors, arrays, lists of files, and rows of Arrow tables.
"""

from __future__ import annotations

import contextlib
import types
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler

from rankbook.control_collectives import gather_objects, this_rank
from rankbook.formatting import plural, truncate_list
from rankbook.ranks import format_ranks
from rankbook.runtime.data.samplers import WHOLE, RoundPadding, SeedableRandomSampler
from rankbook.widgets.rendering import TableResult

MAX_SAMPLES = 100_000_000
"""Samples of a pass that are recorded on one rank, which take 400 MB. Later ones are not."""
_NAMED = 8
"""Samples that the report names."""
_MAX_RANKS = 32
"""Ranks in the picture."""


class SampleLog:
    """Indices that one rank has requested in a pass.

    `indices` are those of all batches, and `ends[k]` is the number of them up to the end of batch k. `repeated` maps
    the batches that contain repeated samples, at their ends, to the numbers of these. `incomplete` is the reason why
    nothing more is recorded; empty in the usual case.
    """

    __slots__ = ("ends", "incomplete", "indices", "repeated")

    def __init__(self) -> None:
        self.indices = array("i")
        self.ends = array("q")
        self.repeated: dict[int, int] = {}
        self.incomplete = ""

    def add(self, items: Sequence[Any], share: RoundPadding | None, rank: int) -> None:
        """Record a batch. Called once per batch, so it does as little as possible."""
        if self.incomplete:
            return
        # `fromlist` takes 10 ns per sample, a third of `extend`, and leaves the array unchanged if it raises.
        if type(items) is not list:
            items = list(items)
        try:
            self.indices.fromlist(items)
        except OverflowError:
            self.indices = array("q", [*self.indices, *items])
        except TypeError:
            self.incomplete = "the sampler's indices are no integers"
            return
        if share is not None and (real := share.real[rank]) != WHOLE and real < len(items):
            self.repeated[len(self.ends)] = len(items) - real
        self.ends.append(len(self.indices))
        if len(self.indices) > MAX_SAMPLES:
            self.incomplete = f"only the first {MAX_SAMPLES:,} samples were recorded"


@dataclass
class RankSamples:
    """Samples of a pass in one part of the data, which a rank or a tensor-parallel group reads.

    `ids` are the samples' indices in the dataset below every `Subset`, without repetitions that only fill up a round.
    `repeated` is the number of these. `universe` are the ids that this part's rank is meant to deal out, None for all
    of `length`. `stream`: the ids are positions in a stream.
    """

    ids: Any
    batches: int
    repeated: int
    epoch: int
    finished: bool
    first_batch: int
    length: int
    exhaustive: bool
    drop_last: bool
    universe: Any = None
    fingerprint: int = 0
    stream: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class SeenSamples(TableResult):
    """Samples that the ranks have read in an epoch, which show themselves as a table.

    `counts` maps ranks, or the indices of data-parallel groups, to numbers of samples; `repeated` maps them to the
    numbers of samples that were repeated to fill up the last round. `duplicates` maps samples that were read more than
    once to the ranks that have read them. `lost` are samples that no rank has read, None while the epoch runs and where
    the sampler does not go over all samples. The indices are those of the dataset below every `Subset`.
    """

    HEADINGS = ("rank", "samples", "batches", "repeated to fill up", "also read by others", "first", "last")

    epoch: int
    finished: bool
    counts: dict[int, int]
    batches: dict[int, int]
    repeated: dict[int, int]
    duplicates: dict[int, tuple[int, ...]]
    lost: Sequence[int] | None
    size: int
    notes: tuple[str, ...] = ()
    parts: Mapping[int, Any] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        """Return True if no sample was read twice or lost."""
        return not self.duplicates and not self.lost and not any("differ" in note for note in self.notes)

    def summary(self) -> str:
        """Return the numbers of all ranks, and the duplicates and losses by name."""
        total = sum(self.counts.values())
        state = "" if self.finished else " so far"
        lines = [f"epoch {self.epoch}: {plural(total, 'sample')} of {self.size:,} read by {_ranks(self.counts)}{state}"]
        if self.duplicates:
            named = [f"{sample} on {_ranks(ranks)}" for sample, ranks in list(self.duplicates.items())[:_NAMED]]
            more = [f"and {len(self.duplicates) - _NAMED:,} more"] if len(self.duplicates) > _NAMED else []
            lines.append(f"{plural(len(self.duplicates), 'sample')} read more than once: {', '.join([*named, *more])}")
        if self.lost is not None and len(self.lost):
            named = truncate_list([str(sample) for sample in self.lost[: _NAMED + 1]], _NAMED)
            more = [f"and {len(self.lost) - _NAMED:,} more"] if len(self.lost) > _NAMED else []
            lines.append(f"{plural(len(self.lost), 'sample')} lost: {', '.join([*named[:_NAMED], *more])}")
        elif self.lost is not None and not self.duplicates:
            lines.append("every sample once")
        return "\n".join([*lines, *self.notes])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, one per rank."""
        several = [set(ranks) for ranks in self.duplicates.values()]
        shared = Counter(rank for ranks in several if len(ranks) > 1 for rank in ranks)
        return [
            (
                *(str(rank), f"{self.counts[rank]:,}", f"{self.batches[rank]:,}"),
                *(
                    f"{self.repeated[rank]:,}" if self.repeated[rank] else "",
                    f"{shared[rank]:,}" if rank in shared else "",
                ),
                *((str(ids[0]), str(ids[-1])) if len(ids := self.parts.get(rank, ())) else ("", "")),
            )
            for rank in self.counts
        ]

    def bundle(self) -> dict[str, str]:
        """See `TableResult`. The HTML also has a bar for every rank, and one for the samples that were lost."""
        bundle = super().bundle()
        bundle["text/html"] += self._picture()
        return bundle

    def _picture(self) -> str:
        """Return the numbers of samples by rank as bars in HTML; "" for a single rank and for many ranks."""
        from rankbook.widgets.rendering import CELL, GREY, ORANGE, SKY, VERMILLION, bar  # only where a result is shown

        if not 1 < len(self.counts) <= _MAX_RANKS:
            return ""
        again = Counter(rank for ranks in self.duplicates.values() for rank in ranks)
        bars: dict[str, list[tuple[str, int, str]]] = {
            f"rank {rank}": [
                ("read once", count - again[rank], SKY),
                ("read more than once", again[rank], ORANGE),
                ("repeated to fill up", self.repeated[rank], GREY),
            ]
            for rank, count in self.counts.items()
        }
        if self.lost:
            bars["no rank"] = [("lost", len(self.lost), VERMILLION)]
        longest = max(sum(amount for _, amount, _ in parts) for parts in bars.values())
        rows = "".join(
            f'<tr><th scope="row" style="{CELL}">{name}</th><td>{bar(parts, longest, width="16em")}</td>'
            f'<td style="{CELL}">{", ".join(f"{amount:,} {label}" for label, amount, _ in parts if amount)}</td></tr>'
            for name, parts in bars.items()
        )
        return f"<table><caption>samples by rank</caption><tbody>{rows}</tbody></table>"


def _ranks(ranks: Any) -> str:  # noqa: ANN401 - an iterable of ranks
    unique = sorted(set(ranks))
    text = format_ranks(unique)
    if len(tuple(ranks)) > len(unique):  # read twice by one rank
        return f"rank {text}, {len(tuple(ranks))} times" if len(unique) == 1 else f"ranks {text}"
    return f"rank{'' if len(unique) == 1 else 's'} {text}"


def gather_seen(own: Mapping[int, RankSamples]) -> SeenSamples:
    """Return the report of all ranks. A collective. `own` maps parts of the data to what this rank knows of them."""
    parts: dict[int, RankSamples] = {}
    for of_rank in gather_objects(dict(own)):
        for index, samples in of_rank.items():
            parts.setdefault(index, samples)
    return merge_seen(dict(sorted(parts.items())))


def merge_seen(parts: Mapping[int, RankSamples]) -> SeenSamples:
    """Return the report of all parts of the data."""
    first = next(iter(parts.values()))
    notes = list(dict.fromkeys(note for samples in parts.values() for note in samples.notes))
    differ = len({samples.fingerprint for samples in parts.values() if samples.fingerprint}) > 1
    subsets = any(samples.universe is not None for samples in parts.values())
    finished = all(samples.finished for samples in parts.values())
    counts = {index: len(samples.ids) for index, samples in parts.items()}
    duplicates: dict[int, tuple[int, ...]] = {}
    lost: Any = None
    size = first.length
    if first.stream:
        size = int(max((samples.ids.max() + 1 for samples in parts.values() if len(samples.ids)), default=0))
        notes.append("the numbers are positions in the stream of the dataset")
    elif differ and not subsets:
        # Index 3 is not the same sample on all ranks, so that only numbers can be compared.
        size = sum(samples.length for samples in parts.values())
        unread = size - sum(counts.values())
        notes.append(
            f"the datasets of the ranks differ, so that their indices cannot be compared; {plural(unread, 'sample')} "
            f"of {size:,} {'were' if finished else 'are'} not read: were the samples split by rank before prepare()?"
        )
    else:
        ids = numpy.concatenate([samples.ids for samples in parts.values()])
        readers = numpy.concatenate([numpy.full(len(samples.ids), index) for index, samples in parts.items()])
        duplicates = _duplicates(ids, readers)
        universe = _universe(parts)
        size = len(universe) if subsets else first.length
        if finished and all(samples.exhaustive and not samples.first_batch for samples in parts.values()):
            lost = numpy.setdiff1d(universe, ids, assume_unique=False).tolist()
            if lost and first.drop_last:
                notes.append("drop_last=True leaves out the samples of the last, incomplete batches")
        elif finished and not first.exhaustive:
            notes.append("the sampler does not go over all samples once, so that repetitions may be meant")
    if any(samples.first_batch for samples in parts.values()):
        notes.append(f"the pass began at batch {first.first_batch} of the epoch; what was read before is not recorded")
    return SeenSamples(
        epoch=first.epoch,
        finished=finished,
        counts=counts,
        batches={index: samples.batches for index, samples in parts.items()},
        repeated={index: samples.repeated for index, samples in parts.items()},
        duplicates=duplicates,
        lost=lost,
        size=size,
        notes=tuple(notes),
        parts={index: samples.ids for index, samples in parts.items()},
    )


def _duplicates(ids: Any, readers: Any) -> dict[int, tuple[int, ...]]:  # noqa: ANN401 - NumPy arrays
    order = numpy.argsort(ids, kind="stable")
    ids, readers = ids[order], readers[order]
    same = ids[1:] == ids[:-1]
    repeated = numpy.unique(ids[1:][same])
    starts, ends = numpy.searchsorted(ids, repeated, "left"), numpy.searchsorted(ids, repeated, "right")
    return {
        int(sample): tuple(readers[start:end].tolist())
        for sample, start, end in zip(repeated, starts, ends, strict=True)
    }


def _universe(parts: Mapping[int, RankSamples]) -> Any:  # noqa: ANN401 - a NumPy array
    known = [
        numpy.arange(samples.length) if samples.universe is None else samples.universe for samples in parts.values()
    ]
    return numpy.unique(numpy.concatenate(known))


def parts_of(loader: Any) -> dict[int, RankSamples]:  # noqa: ANN401 - a prepared loader
    """Return what this rank knows of the samples that the parts of the data have had, by part."""
    parts, tickets = loader.parts, loader.parts.tickets
    if isinstance(parts.source.dataset, IterableDataset):
        known = tickets.ranks if len(tickets.ranks) == 1 or parts.deal is None or not this_rank() else ()
        return {index: _stream_samples(loader, index) for index in known}
    fingerprint = fingerprint_dataset(parts.source.dataset)
    if len(tickets.ranks) > 1:  # the dispatcher: rank 0 reads for all
        logs = tickets.logs or dict.fromkeys(tickets.ranks if not this_rank() else (), SampleLog())
    else:
        logs = tickets.logs or {parts.process_index: SampleLog()}
    return {index: _map_samples(log, loader, fingerprint) for index, log in logs.items()}


def _stream_samples(loader: Any, index: int) -> RankSamples:  # noqa: ANN401 - a prepared loader
    """Return the positions in a stream that the part `index` has had, which follow from the number of batches."""
    position, tickets = loader.position, loader.parts.tickets
    rows, count, skip = tickets.shard.rows, tickets.shard.num_processes, tickets.current.skip
    rounds = numpy.arange(skip, max(skip, position.delivered))
    ids = ((rounds[:, None] * count + index) * rows + numpy.arange(rows)[None, :]).reshape(-1)
    repeated = 0
    share = loader.share if position.finished else None
    if share is not None and len(rounds) and share.real[index] != WHOLE:
        repeated = (share.rows if index in share.ranks else 0) - share.real[index]
        ids = ids[: len(ids) - rows + share.real[index]]
    return RankSamples(
        ids=ids,
        batches=len(rounds),
        repeated=max(0, repeated),
        epoch=position.epoch,
        finished=position.finished and tickets.current.run > 0,
        first_batch=skip + tickets.current.first_batch,
        length=0,
        exhaustive=False,
        drop_last=tickets.drop_last,
        stream=True,
    )


def _map_samples(log: SampleLog, loader: Any, fingerprint: int) -> RankSamples:  # noqa: ANN401 - a prepared loader
    """Return what a part of the data has had in the current pass of `loader`, according to its log."""
    source, position, current = loader.parts.source, loader.position, loader.parts.tickets.current
    # Workers run ahead: only batches that were delivered count.
    batches = min(max(0, position.delivered - current.skip), len(log.ends))
    end = log.ends[batches - 1] if batches else 0
    ids = numpy.array(log.indices[:end], dtype=numpy.int64)
    keep = numpy.ones(end, dtype=bool)
    repeated = 0
    for batch, count in log.repeated.items():
        if batch < batches:
            keep[log.ends[batch] - count : log.ends[batch]] = False
            repeated += count
    sampler = getattr(source.batch_sampler, "sampler", None) or source.sampler
    exhaustive, universe = _scope(sampler, len(source.dataset))
    ids = ids[keep]
    ids, universe, length = _below_subsets(source.dataset, ids, universe)
    notes = [log.incomplete] if log.incomplete else []
    if loader.parts.custom_iter:
        notes.append("the loader has an __iter__ of its own, which may leave out or repeat batches")
    return RankSamples(
        ids=ids,
        batches=batches,
        repeated=repeated,
        epoch=position.epoch,
        # A position without a log is that of no pass, or of a pass in another process.
        finished=position.finished and bool(loader.parts.tickets.logs),
        first_batch=current.skip + current.first_batch,
        length=length,
        exhaustive=exhaustive and not log.incomplete,
        drop_last=bool(getattr(source, "drop_last", False)) or bool(getattr(sampler, "drop_last", False)),
        universe=universe,
        fingerprint=fingerprint,
        notes=tuple(notes),
    )


def _scope(sampler: Any, length: int) -> tuple[bool, Any]:  # noqa: ANN401 - any sampler
    """Return whether a sampler goes over its samples once, and which these are, None for all."""
    if isinstance(sampler, SubsetRandomSampler):
        return True, numpy.asarray(list(sampler.indices), dtype=numpy.int64)
    is_random = isinstance(sampler, RandomSampler | SeedableRandomSampler)
    if is_random and (sampler.replacement or sampler.num_samples != length):
        return False, None
    return isinstance(sampler, SequentialSampler | RandomSampler | SeedableRandomSampler | DistributedSampler), None


def _below_subsets(dataset: Any, ids: Any, universe: Any) -> tuple[Any, Any, int]:  # noqa: ANN401 - NumPy arrays
    """Return the ids, the universe and the length of the dataset below every `Subset`."""
    while type(dataset) is Subset:
        indices = numpy.asarray(list(dataset.indices), dtype=numpy.int64)
        ids, universe = indices[ids], indices if universe is None else indices[universe]
        dataset = dataset.dataset
    return ids, universe, len(dataset)


# What a dataset that selects its own part of the samples must know, by the names of torch, Accelerate and torchrun. The
# names are searched for in bytecode, which runs nothing.
_RANK_NAMES = {"get_rank", "get_world_size", "process_index", "num_processes", "get_node_local_rank"}
_RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
# Attributes of samplers and datasets of common libraries for the number of parts, next to one for the own part.
_COUNTS = ("num_replicas", "world_size", "num_processes", "num_shards")
_MAX_DEPTH = 4
_PREFIX = 1024
"""Bytes of a row that a fingerprint reads."""
_MAX_CELL = 16 << 20
"""Bytes of a cell of an Arrow table up to which its value is read: reading a longer list takes more than 0.1 s."""


def describe_split(loader: Any, ranks: int, rank: int, *, dealt: bool = False) -> str:  # noqa: ANN401 - a DataLoader
    """Return how the dataset or the sampler of `loader` was split by rank; empty if it shows no sign of that.

    `ranks` and `rank` are the number of parts that `prepare` is going to make, and the part of this rank. `dealt`: the
    samples of a DistributedSampler are not split again.
    """
    for sampler in _chain(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler):
        # This sampler deals the samples itself, which is fine if it does so for these ranks.
        if dealt and isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (ranks, rank):
                return (
                    f"its DistributedSampler has rank {sampler.rank} of {sampler.num_replicas}, but this is rank "
                    f"{rank} of {ranks}"
                )
        elif (count := _parts_of(sampler)) > 1:
            return f"its {type(sampler).__name__} deals the samples to {count} ranks"
    dataset = loader.dataset
    for below in _datasets(dataset):
        # The usual way to split by hand: `Subset(dataset, range(rank, len(dataset), world_size))`.
        if isinstance(below, Subset) and ranks > 1 and _is_stride(below.indices, ranks, rank):
            return f"its Subset takes one of {ranks} samples, from sample {rank} on"
        distributed = getattr(below, "_distributed", None)  # of datasets.IterableDataset, by `split_dataset_by_node`
        if distributed is not None and getattr(distributed, "world_size", 1) > 1:
            return f"split_dataset_by_node() has split it for {distributed.world_size} ranks"
        if (count := _parts_of(below)) > 1:
            return f"its {type(below).__name__} has the attribute of a part: {count} ranks"
        # A stream has no indices. Whether it deals its samples can only be seen in its code.
        if isinstance(below, IterableDataset) and (name := _rank_name(type(below).__iter__)):
            return f"the __iter__ of its {type(below).__name__} uses {name}"
    return ""


def difference_warning(what: str, rank: int) -> str:
    """Return the warning for a rank whose dataset or sampler (`what`) is not that of rank 0."""
    return (
        f"the {what} of rank {rank} is not that of rank 0. prepare() deals the samples of one {what} to all ranks: if "
        "every rank has a part of the samples, they are split twice, and most are lost. Pass the whole dataset on "
        "every rank, or keep your own split with rankbook.DataLoaderShard(dataset, batch_size=...)"
    )


def split_warning(reason: str) -> str:
    """Return the warning for a loader that was split by rank before."""
    return (
        f"the loader seems to be split by rank already: {reason}. prepare() splits it again, so that most samples are "
        "lost. Pass the whole dataset with a plain sampler, or keep your own split with "
        "rankbook.DataLoaderShard(dataset, batch_size=...)"
    )


def _chain(sampler: Any) -> Iterator[Any]:  # noqa: ANN401 - any sampler
    """Yield a sampler and those that it wraps."""
    for _ in range(_MAX_DEPTH):
        if sampler is None:
            return
        yield sampler
        below = vars(sampler) if hasattr(sampler, "__dict__") else {}
        sampler = next((below[name] for name in ("batch_sampler", "sampler", "base_sampler") if name in below), None)


def _datasets(dataset: Any, depth: int = 0) -> Iterator[Any]:  # noqa: ANN401 - any dataset
    yield dataset
    if depth < _MAX_DEPTH:
        inner = getattr(dataset, "__dict__", {}).get("dataset")
        for below in [inner] if inner is not None else getattr(dataset, "datasets", ()):
            yield from _datasets(below, depth + 1)


def _parts_of(value: Any) -> int:  # noqa: ANN401 - a sampler or a dataset
    """Return the number of ranks that a sampler or dataset is split for, according to its attributes; 1 if for none."""
    attributes = getattr(value, "__dict__", {})
    # A number of replicas alone proves nothing: a dataset may know it for other reasons. With a rank beside it, it is a
    # part.
    if not any(name in attributes for name in ("rank", "process_index", "shard_id")):
        return 1
    return max((attributes[name] for name in _COUNTS if type(attributes.get(name)) is int), default=1)


def _is_stride(indices: Any, ranks: int, rank: int) -> bool:  # noqa: ANN401 - a sequence of indices
    # With so few indices, a stride may be an accident.
    if len(indices) < 2 * ranks:
        return False
    if isinstance(indices, range):
        return (indices.start, indices.step) == (rank, ranks)
    array = numpy.asarray(indices)
    return array.ndim == 1 and int(array[0]) == rank and bool((numpy.diff(array) == ranks).all())


def _rank_name(function: Any) -> str:  # noqa: ANN401 - a function
    """Return the name by which a function asks for its rank; empty if it does not."""
    code = getattr(function, "__code__", None)
    # Functions and comprehensions inside the function are among its constants.
    codes = [code] if code is not None else []
    while codes:
        code = codes.pop()
        if names := _RANK_NAMES.intersection(code.co_names):
            return min(names)
        if variables := _RANK_VARIABLES.intersection(item for item in code.co_consts if isinstance(item, str)):
            return f"the variable {min(variables)}"
        codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return ""


# Fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint_dataset(dataset: Any) -> int:  # noqa: ANN401 - any dataset
    """Return a positive number that is equal on all ranks for the same dataset, from its length and a few samples."""
    length = ""
    if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        # A dataset need not know its length if its sampler does.
        with contextlib.suppress(TypeError, NotImplementedError):
            length = str(len(dataset))
    return _number([length, *_describe(dataset, 0)])


def fingerprint_sampler(loader: Any) -> int:  # noqa: ANN401 - a DataLoader
    """Return a positive number that is equal on all ranks for the same samplers; 0 if a rank's own part is meant."""
    described: list[str] = []
    for sampler in _chain(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler):
        # It differs between the ranks on purpose.
        if isinstance(sampler, DistributedSampler):
            return 0
        described.append(type(sampler).__name__)
        for name, value in sorted(getattr(sampler, "__dict__", {}).items()):
            if name == "data_source":
                continue  # the dataset, which has a fingerprint of its own
            if type(value) in {int, float, bool, str}:
                described.append(f"{name}={value!r}")
            elif isinstance(value, list | tuple | range | numpy.ndarray | torch.Tensor):
                described += [name, *_describe(value, _MAX_DEPTH)]
    return _number(described)


def _number(described: list[str]) -> int:
    # Seven bytes, and at least 1: the number travels as a signed 64-bit integer, and 0 means that there is none.
    return int.from_bytes(blake2b("\n".join(described).encode(), digest_size=7).digest(), "little") | 1


def _describe(value: Any, depth: int) -> Iterator[str]:  # noqa: ANN401 - a dataset or a part of one
    yield type(value).__name__
    if isinstance(value, torch.Tensor):
        yield f"{list(value.shape)} {value.dtype}"
        # Only what lies in memory: a copy from a device would wait for it. The first and the last row differ between
        # parts of a dataset, and reading them costs the same for any length.
        if value.dim() and len(value) and value.device.type == "cpu" and value.layout is torch.strided:
            yield from (_bytes_of(value[index]) for index in (0, -1))
    elif isinstance(value, numpy.ndarray):
        yield f"{value.shape} {value.dtype}"
        if value.ndim and len(value) and value.dtype.kind in "biufcSU":
            yield from (_digest(numpy.ascontiguousarray(value[index]).tobytes()[:_PREFIX]) for index in (0, -1))
    elif isinstance(value, list | tuple | range):
        yield str(len(value))
        for item in (value[0], value[-1]) if len(value) else ():
            yield from _describe_item(item, depth)
    elif isinstance(value, TensorDataset):
        for tensor in value.tensors:
            yield from _describe(tensor, depth + 1)
    elif _is_arrow(value):
        yield from _describe_rows(value)
    elif (isinstance(value, Dataset) and depth <= _MAX_DEPTH) or depth == 0:
        if isinstance(value, Subset | ConcatDataset) and hasattr(value, "__len__"):
            yield str(len(value))
        # Not by `value[0]`, which is the user's code, may decode a file, and may draw random numbers.
        for name, item in sorted(getattr(value, "__dict__", {}).items()):
            if isinstance(item, list | tuple | range | numpy.ndarray | torch.Tensor | Dataset) or _is_arrow(item):
                yield name
                yield from _describe(item, depth + 1)


def _is_arrow(value: Any) -> bool:  # noqa: ANN401 - any dataset
    """Return True for a `datasets.Dataset`: an Arrow table, and the indices of its rows or None for all rows.

    The library is not imported. The names are those of its versions 2.21 to 5.2, in which `shard`, `select` and
    `split_dataset_by_node` take a slice of `_data` or set `_indices`.
    """
    attributes = getattr(value, "__dict__", {})
    return "_indices" in attributes and hasattr(attributes.get("_data"), "fast_slice")


def _describe_rows(dataset: Any) -> Iterator[str]:  # noqa: ANN401 - a datasets.Dataset
    """Yield a description of the first and the last row as they are stored, before any transform and any decoding.

    `_fingerprint` is not read: it is a random number if a function of `map` or `filter` cannot be hashed, and so
    differs between ranks with equal rows.
    """
    # A missing method of another version, or an error of Arrow, which are subclasses of these.
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, OSError, NotImplementedError):
        for index in (0, len(dataset) - 1):
            row = index
            if dataset._indices is not None:
                row = dataset._indices.fast_slice(index, 1).column(0)[0].as_py()
            cells = dataset._data.fast_slice(row, 1)
            for name in cells.column_names:
                cell = cells.column(name)
                yield name
                if cell.nbytes <= _MAX_CELL:
                    yield _digest(repr(_ends_of(cell[0].as_py(), _PREFIX)).encode())


def _ends_of(value: Any, count: int) -> Any:  # noqa: ANN401 - a value of Arrow, as Python's
    """Return the beginning and the end of a nested value, `count` items in all.

    Tokens and texts of different samples begin and end alike, with the same prompt or padding, so that one item at
    either end would not tell them apart.
    """
    if isinstance(value, dict):
        return {name: _ends_of(item, count) for name, item in value.items()}
    half = count // 2
    if isinstance(value, list):
        items = value if len(value) <= count else [*value[:half], *value[-half:]]
        return [_ends_of(item, max(4, count // 16)) for item in items]
    if isinstance(value, str | bytes) and len(value) > count:
        return value[:half], value[-half:]
    return value


def _describe_item(item: Any, depth: int) -> Iterator[str]:  # noqa: ANN401 - an item of a list
    if type(item) in {int, float, str, bytes, bool}:
        yield _digest(repr(item).encode()[:_PREFIX])
    elif depth <= _MAX_DEPTH and isinstance(item, torch.Tensor | numpy.ndarray | tuple | list):
        yield from _describe(item, depth + 1)


def _bytes_of(row: torch.Tensor) -> str:
    values = row.detach().reshape(-1)[: _PREFIX // max(1, row.element_size())].cpu().contiguous()
    return _digest(values.view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=7).hexdigest()
