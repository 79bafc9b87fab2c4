"""This process among the others: its rank, its device, its turn.

Owns: `PartialState`, and the process group where there was none. Refuses: a process group that somebody else made; that
one is used, and never destroyed here.

One process's share of a list, a dict or a tensor.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar, ParamSpec, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankbook.errors import BadRequest, CollectiveAborted
from rankbook.runtime.comm import consistency
from rankbook.runtime.launch_environment import LaunchSetup, local_rank_of, read_flag, read_setup, read_text


def split_bounds(length: int, index: int, count: int) -> tuple[int, int]:
    """Start and end of the share `index` of `count`; the first `length % count` shares are one longer."""
    each, extra = divmod(length, count)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


def split_for_rank(inputs: _D, index: int, count: int, *, pad: bool = False) -> _D:
    """The share `index` of `count` of `inputs`. `pad` repeats the last element up to the largest share's length.

    A mapping's values are split one by one and must have one length. What cannot be sliced is given whole. The inputs
    are left as they are. Raises `BadRequest` for lengths that differ.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items() if _is_split(value)}
        if len(set(lengths.values())) > 1:
            raise BadRequest(f"all values of a dict must have the same length to be split between processes: {lengths}")
        return cast("_D", {key: split_for_rank(value, index, count, pad=pad) for key, value in inputs.items()})
    if not _is_split(inputs):
        return inputs
    values: Any = inputs
    length = len(values)
    start, end = split_bounds(length, index, count)
    wanted = -(-length // count) if pad else end - start
    if hasattr(values, "select") and not isinstance(values, torch.Tensor):  # a table of rows, as `datasets.Dataset`
        return values.select([min(start + each, length - 1) for each in range(wanted)])  # type: ignore[no-any-return]
    share = values[start:end]
    short = wanted - (end - start)
    if short <= 0 or not length:
        return share  # type: ignore[no-any-return]
    if isinstance(values, torch.Tensor):
        return torch.cat([share, values[-1:].expand(short, *values.shape[1:])])  # type: ignore[return-value]
    if not isinstance(values, list | tuple):
        import numpy as np

        return np.concatenate([share, np.repeat(values[-1:], short, axis=0)])  # type: ignore[return-value]
    return share + type(share)([values[-1]] * short)  # type: ignore[no-any-return]


def _is_split(value: object) -> bool:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return bool(getattr(value, "ndim", 0))
    return isinstance(value, list | tuple) or (hasattr(value, "select") and hasattr(value, "__len__"))


_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_D = TypeVar("_D")


class DistributedType(StrEnum):
    """How the processes of this setup work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"


class PartialState:
    """This process among the others. All instances in a process share what the first one found.

    `cpu`: use the CPU although there is an accelerator. `options` go to `torch.distributed.init_process_group`
    (backend, timeout, init_method, store, rank, world_size, ...), which is called where the environment describes
    several processes and none has made a group so far; inside a Rankbook rank the group is there.

    `debug` and `checks`, from RANKBOOK_DEBUG: whether the ranks compare what they bring to a collective always (1),
    where that costs no wait for an accelerator (unset), or never (0).

    Raises `BadRequest` for an environment that contradicts itself, and torch's errors when the processes do not meet.
    An instance that failed leaves nothing behind: the next attempt starts anew.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    backend: str | None
    checks: bool
    debug: bool
    device: torch.device
    distributed_type: DistributedType
    fork_launched: bool
    local_process_index: int
    num_processes: int
    process_index: int
    _cpu: bool
    _started_group: bool

    def __init__(self, cpu: bool = False, **options: Any) -> None:  # noqa: ANN401 - torch's
        self.__dict__ = PartialState._shared_state
        if not self.initialized:
            PartialState._shared_state.update(_find_out(cpu, options))

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what is not there has no type
        raise AttributeError(missing("PartialState", name, known=_is_known(name)))

    def __reduce__(self) -> tuple[Any, ...]:
        """On another rank it is that rank's own."""
        return PartialState, ()

    @staticmethod
    def _reset_state() -> None:
        """Forget what was found. The process group stays."""
        PartialState._shared_state.clear()

    # Who this is

    @property
    def initialized(self) -> bool:
        """Whether an instance was made since the last reset."""
        return bool(PartialState._shared_state)

    @property
    def use_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def default_device(self) -> torch.device:
        """The device that one process alone would take here."""
        return _device(LaunchSetup(), cpu=False)

    def set_device(self) -> None:
        """Make this process's device torch's current one."""
        _make_current(self.device)

    # Turns

    def wait_for_everyone(self) -> None:
        """Return once every process has come here."""
        if not self.use_distributed:
            return
        if self.device.type == "cuda" and "nccl" in (self.backend or ""):
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then the others do.

        Raises `PeerFailed` on the others when rank 0 raised in the block: what they would build on is not there.
        """
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """As `main_process_first`, with the first process of each host."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        if not self.use_distributed:
            yield
            return
        if not first:
            consistency.raise_if_any_failed(None)
            yield
            return
        try:
            yield
        except CollectiveAborted:
            raise  # the others know: their wait was broken off too
        except Exception as error:
            consistency.announce_failure(error)
            raise
        consistency.raise_if_any_failed(None)

    # Only some

    @overload
    def on_main_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[_P, _T]], Callable[_P, _T | None]]: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Have the decorated function run on rank 0 only; it gives None elsewhere."""
        return _only(lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Callable[_P, _T]], Callable[_P, _T | None]]: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Have the decorated function run on the first process of each host only."""
        return _only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Have the decorated function run on the highest rank only."""
        only: Callable[_P, _T | None] = _only(lambda: self.is_last_process, function)
        return only

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:  # noqa: ANN401 - the function, or its decorator
        """Have the decorated function run on the rank `process_index` only; in one process alone it always runs."""
        return _only(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:  # noqa: ANN401 - the function, or its decorator
        """Have the decorated function run on the process `local_process_index` of each host only."""
        return _only(lambda: not self.use_distributed or self.local_process_index == local_process_index, function)

    def print(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as the builtin
        """Print on the first process of each host only."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201 - it is what it is for

    # Shares

    @contextmanager
    def split_between_processes(self, inputs: _D, apply_padding: bool = False) -> Iterator[_D]:
        """This process's share of `inputs`: a list, a tuple, a tensor (rows), or a dict of these, of one length.

        Shares are in rank order and differ by one at most, the first ones are larger. `apply_padding` repeats the last
        element, so that all are as large as the first. Raises `BadRequest` for values of different lengths.
        """
        yield split_for_rank(inputs, self.process_index, self.num_processes, pad=apply_padding)

    # The end

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy `group`, or the default group if this class has made it; any other is its maker's to destroy."""
        if not dist.is_initialized():
            return
        if group is not None:
            dist.destroy_process_group(group)
        elif self._started_group:
            dist.destroy_process_group()
            self._started_group = False


def _is_known(name: str) -> bool:
    return name in PartialState.__annotations__ or hasattr(PartialState, name)


def missing(owner: str, name: str, *, known: bool) -> str:
    """The sentence for an attribute that is not there."""
    if not known:
        return f"{owner!r} object has no attribute {name!r}"
    return f"{owner} has no {name!r} now: its state was reset. Build it first, with {owner}() or Accelerator()"


def _only(chosen: Callable[[], bool], function: Callable[..., Any] | None) -> Any:  # noqa: ANN401 - the function, or its decorator
    if function is None:
        return functools.partial(_only, chosen)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        return function(*args, **kwargs) if chosen() else None

    return run


def _find_out(cpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """What the shared state holds. Nothing is kept of an attempt that fails."""
    cpu = cpu or read_flag("ACCELERATE_USE_CPU")
    debug = read_flag("RANKBOOK_DEBUG", "ACCELERATE_DEBUG_MODE")
    started = False
    if dist.is_available() and dist.is_initialized():
        setup = _setup_of_group()
        if options:
            _log.info("There is a process group already, so that %s is not used.", ", ".join(options))
        device = _device(setup, cpu)
    else:
        setup = read_setup()
        device = _device(setup, cpu)
        started = setup.world_size > 1
    _make_current(device)
    if started:
        _start_group(setup, device, options)
    several = setup.world_size > 1
    on_many = DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
    return {
        "_cpu": cpu,
        "_started_group": started,
        "checks": debug or read_text("RANKBOOK_DEBUG", "ACCELERATE_DEBUG_MODE") is None,
        "backend": str(dist.get_backend()) if several else None,
        "debug": debug,
        "device": device,
        "distributed_type": on_many if several else DistributedType.NO,
        "fork_launched": read_flag("FORK_LAUNCHED"),
        "local_process_index": setup.local_rank,
        "num_processes": setup.world_size,
        "process_index": setup.rank,
    }


def _setup_of_group() -> LaunchSetup:
    """As the default group has it; of the environment only the place on this host, which no group knows."""
    rank, local_rank = dist.get_rank(), local_rank_of()
    return LaunchSetup(rank, dist.get_world_size(), rank if local_rank is None else local_rank)


def _device(setup: LaunchSetup, cpu: bool) -> torch.device:
    chosen = read_text("RANKBOOK_DEVICE", "ACCELERATE_TORCH_DEVICE")
    if chosen is not None and chosen != "cuda":  # without a number it is this process's own
        return torch.device(chosen)
    if cpu and chosen is None:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", setup.local_rank % torch.cuda.device_count())
    if chosen is not None:
        raise BadRequest(f"RANKBOOK_DEVICE={chosen}, and torch finds no CUDA device here")
    if setup.world_size == 1 and torch.backends.mps.is_available():  # no backend talks between MPS processes
        return torch.device("mps")
    return torch.device("cpu")


def _make_current(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _start_group(setup: LaunchSetup, device: torch.device, options: dict[str, Any]) -> None:
    """`init_process_group`, which leaves nothing behind when it fails."""
    options = dict(options)
    if options.get("backend") is None:
        options["backend"] = _backend(setup, device)
    if isinstance(options.get("timeout"), int | float):
        options["timeout"] = timedelta(seconds=options["timeout"])
    if options.get("init_method") is None and options.get("store") is None:
        assert setup.master is not None
        options["init_method"] = "tcp://{}:{}".format(*setup.master)
    options.setdefault("rank", setup.rank)
    options.setdefault("world_size", setup.world_size)
    _check_backend(options["backend"])
    count = c10d._world.group_count
    try:
        dist.init_process_group(**options)
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        c10d._world.group_count = count  # torch names groups by it, and processes meet under that name
        raise
    if dist.get_world_size() != setup.world_size or dist.get_rank() != setup.rank:
        found = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        dist.destroy_process_group()
        raise BadRequest(
            f"the options of the process group say {found}, the environment rank {setup.rank} of {setup.world_size}"
        )
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    """Leave a group of gloo's at exit: its threads, which outlive the interpreter, now and then end in SIGABRT.

    Not before: a DDP model that goes after its group joins these threads with the interpreter's lock in hand.
    """
    if dist.is_initialized() and "nccl" not in str(dist.get_backend()):
        gc.collect()  # models that nobody has any more
        dist.destroy_process_group()


def _check_backend(wanted: str) -> None:
    """Raise `BadRequest` before the other processes are met: they would wait for one that cannot go on."""
    for name in (each.rpartition(":")[2] for each in str(wanted).lower().split(",")):
        if name not in dist.Backend.backend_list or not dist.is_backend_available(name):
            there = [each for each in dist.Backend.backend_list if dist.is_backend_available(each)]
            raise BadRequest(f"the backend {name!r} is not there; use one of {', '.join(there)}")


def _backend(setup: LaunchSetup, device: torch.device) -> str:
    """Nccl where each process has a device of its own, beside gloo for what is on the CPU; else gloo."""
    if device.type == "cuda" and dist.is_nccl_available() and setup.local_world_size <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"
