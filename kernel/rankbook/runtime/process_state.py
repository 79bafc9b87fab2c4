"""`PartialState`: rank, device and process group of this process; splitting of inputs between processes.

An existing default process group is used, and never destroyed by this module. Otherwise the process group is created
from the environment variables of the launcher.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar, ParamSpec, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankbook import control_collectives
from rankbook.errors import CollectiveAborted, InvalidArgument
from rankbook.protocol import telemetry
from rankbook.runtime.config import unknown_keyword
from rankbook.runtime.launch_environment import LaunchSetup, local_rank_of, read_flag, read_setup, read_text


def split_bounds(length: int, index: int, count: int) -> tuple[int, int]:
    """Return start and end of share `index` of `count`; the first `length % count` shares are one longer."""
    size, extra = divmod(length, count)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def split_for_rank(inputs: _D, index: int, count: int, *, pad: bool = False) -> _D:
    """Return share `index` of `count` of `inputs`, which are not modified.

    The values of a mapping are split separately and must have the same length. Inputs without a length are returned
    whole. `pad` repeats the last element up to the length of the largest share. Raises `InvalidArgument` for lengths
    that differ.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items() if _is_split(value)}
        if len(set(lengths.values())) > 1:
            raise InvalidArgument(
                f"all values of a dict must have the same length to be split between processes: {lengths}"
            )
        return cast("_D", {key: split_for_rank(value, index, count, pad=pad) for key, value in inputs.items()})
    # Numbers, texts and other objects without rows go to every rank as a whole.
    if not _is_split(inputs):
        return inputs
    values: Any = inputs
    length = len(values)
    start, end = split_bounds(length, index, count)
    # With padding all shares have the size of the largest one, length / count rounded up.
    size = -(-length // count) if pad else end - start
    if hasattr(values, "select") and not isinstance(values, torch.Tensor):  # a table such as `datasets.Dataset`
        return values.select([min(start + offset, length - 1) for offset in range(size)])  # type: ignore[no-any-return]
    share: Any = values[start:end]
    if pad and isinstance(values, range):  # of one type on all ranks: a range has no repeated elements
        share = list(share)
    short = size - (end - start)
    if short <= 0 or not length:
        return share  # type: ignore[no-any-return]
    if isinstance(values, torch.Tensor):
        return torch.cat([share, values[-1:].expand(short, *values.shape[1:])])  # type: ignore[return-value]
    if not isinstance(values, list | tuple | range):
        import numpy as np

        return np.concatenate([share, np.repeat(values[-1:], short, axis=0)])  # type: ignore[return-value]
    return share + type(share)([values[-1]] * short)  # type: ignore[no-any-return]


def _is_split(value: object) -> bool:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        # A tensor or array of zero dimensions has no rows.
        return bool(getattr(value, "ndim", 0))
    return isinstance(value, list | tuple | range) or (hasattr(value, "select") and hasattr(value, "__len__"))


_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_D = TypeVar("_D")


class DistributedType(StrEnum):
    """Kind of distributed setup.

    Example::

        PartialState().distributed_type == DistributedType.NO  # False
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    # Accelerate's other members, which no setup has here
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PartialState:
    """Rank, device and process group of this process.

    All instances in a process share the state of the first one. If the environment describes several processes and
    there is no default process group, the constructor calls `torch.distributed.init_process_group`. Inside a Rankbook
    rank the group exists already.

    Args:
        cpu: use the CPU although an accelerator is available.
        options: keyword arguments of `init_process_group`: backend, timeout (a timedelta, or seconds), init_method,
            store, rank, world_size.

    The fields `debug` and `checks` are set by RANKBOOK_DEBUG: the ranks compare their arguments before a collective
    always (1), if that costs no wait for an accelerator (unset), or never (0).

    Raises `InvalidArgument` for a contradictory environment and for an unknown option, and torch's errors if the
    rendezvous fails. A failed constructor leaves no state, so it can be called again.

    Example::

        state = PartialState()
        with state.split_between_processes(prompts) as share:
            results = [generate(prompt) for prompt in share]
        state.print(f"rank 0 has {len(results)} results")
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
        check_group_options("PartialState", options, ("cpu",))
        # All instances share one dict. An instance that was created before a reset sees the new state as well.
        self.__dict__ = PartialState._shared_state
        if not self.initialized:
            PartialState._shared_state.update(_initial_state(cpu, options))
        elif options:
            _use_group_with(options)

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a missing attribute has no type
        # Called only for attributes that are not in the shared dict: after a reset, or for a wrong name.
        raise AttributeError(missing_attribute("PartialState", name, known=_is_attribute(name)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reference to the receiving process's state."""
        return PartialState, ()

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared state. The process group is kept."""
        PartialState._shared_state.clear()

    # Identity

    @property
    def initialized(self) -> bool:
        """Return True if an instance was created since the last reset."""
        return bool(PartialState._shared_state)

    @property
    def use_distributed(self) -> bool:
        """Return True if there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Return True on rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return True on the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Return True on the last rank."""
        return self.process_index == self.num_processes - 1

    @property
    def default_device(self) -> torch.device:
        """Return the device that a single process would use on this host."""
        return _device(LaunchSetup(), cpu=False)

    def set_device(self) -> None:
        """Make this process's device torch's current CUDA device."""
        _set_current_device(self.device)

    # Synchronization

    def wait_for_everyone(self) -> None:
        """Wait until every process has made this call: a barrier."""
        if not self.use_distributed:
            return
        if self.device.type == "cuda" and "nccl" in (self.backend or ""):
            # Without `device_ids` nccl guesses the device from the rank, and warns that a wrong guess may hang.
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0 first, then on the other ranks. A collective.

        If the block raises on rank 0, the other ranks do not run it and raise `PeerFailedError`.

        Example::

            with state.main_process_first():
                dataset = download_and_cache()
        """
        with self._run_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of every host, then on the others. A collective.

        Errors are handled as in `main_process_first`.
        """
        with self._run_first(self.is_local_main_process):
            yield

    @contextmanager
    def _run_first(self, first: bool) -> Iterator[None]:
        if not self.use_distributed:
            yield
            return
        # One small collective separates the two parts. The first ranks enter it after their block, the others before
        # theirs. A rank whose block has failed announces its error in the same collective, so that the others do not
        # wait for it.
        if not first:
            control_collectives.raise_if_any_failed(None)
            yield
            return
        try:
            yield
        except CollectiveAborted:
            raise  # not announced: the collectives of the other ranks were aborted too
        except Exception as error:
            control_collectives.announce_failure(error)
            raise
        # The collective that the other ranks are waiting in. On success it lets them begin.
        control_collectives.raise_if_any_failed(None)

    # Execution on selected processes

    @overload
    def on_main_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[_P, _T]], Callable[_P, _T | None]]: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run on rank 0 only; it returns None on other ranks."""
        return _run_only_if(lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Callable[_P, _T]], Callable[_P, _T | None]]: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run on the first process of every host only."""
        return _run_only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Decorate a function to run on the last rank only."""
        only: Callable[_P, _T | None] = _run_only_if(lambda: self.is_last_process, function)
        return only

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:  # noqa: ANN401 - the function, or its decorator
        """Decorate a function to run on rank `process_index` only.

        In a single process it always runs.
        """
        return _run_only_if(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:  # noqa: ANN401 - the function, or its decorator
        """Decorate a function to run on the process with `local_process_index` of every host only."""
        return _run_only_if(
            lambda: not self.use_distributed or self.local_process_index == local_process_index, function
        )

    def print(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as the builtin
        """Print on the first process of every host only."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201 - the purpose of this method

    # Splitting

    @contextmanager
    def split_between_processes(self, inputs: _D, apply_padding: bool = False) -> Iterator[_D]:
        """Return this process's share of `inputs` as a context manager.

        Args:
            inputs: a list, a tuple, a range, a tensor (split by rows), or a dict of these with equal lengths.
            apply_padding: repeat the last element, so that all shares have the same length; those of a range are lists.

        Shares are in rank order; their lengths differ by at most one, the first ones are longer. Raises
        `InvalidArgument` for a dict whose values have different lengths.

        Example::

            with state.split_between_processes(["a", "b", "c"]) as share:
                ...  # rank 0 of 2: ["a", "b"], rank 1: ["c"]
        """
        yield split_for_rank(inputs, self.process_index, self.num_processes, pad=apply_padding)

    # Shutdown

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy `group`, or the default group if this class has created it.

        A default group that was created elsewhere is kept.
        """
        if not dist.is_initialized():
            return
        if group is not None:
            dist.destroy_process_group(group)
        elif self._started_group:
            dist.destroy_process_group()
            self._started_group = False


def check_group_options(function: str, options: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise `UnknownKeyword` for an option that `init_process_group` does not have.

    `parameters` are the further parameters of `function`, which the message may suggest.
    """
    if options:
        parameters_of_torch = inspect.signature(dist.init_process_group).parameters
        for name in options:
            if name not in parameters_of_torch:
                raise unknown_keyword(function, name, [*parameters, *parameters_of_torch])


def _is_attribute(name: str) -> bool:
    return name in PartialState.__annotations__ or hasattr(PartialState, name)


def missing_attribute(owner: str, name: str, *, known: bool) -> str:
    """Return the message of the AttributeError for a missing attribute."""
    if not known:
        return f"{owner!r} object has no attribute {name!r}"
    return f"{owner}.{name} is not available: the state was reset. Create it again with {owner}() or Accelerator()"


def _run_only_if(condition: Callable[[], bool], function: Callable[..., Any] | None) -> Any:  # noqa: ANN401 - the function, or its decorator
    if function is None:
        return functools.partial(_run_only_if, condition)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        return function(*args, **kwargs) if condition() else None

    return run


def _initial_state(cpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return the initial shared state, creating the process group if necessary.

    A failed attempt leaves no state.
    """
    # Everything that may raise comes before the process group is created. The caller stores the state only if all of it
    # works.
    cpu = cpu or read_flag("ACCELERATE_USE_CPU")
    debug = read_flag("RANKBOOK_DEBUG", "ACCELERATE_DEBUG_MODE")
    started = False
    # A rank of a cluster has its default group before the first cell runs. Under torchrun the user may have created
    # one.
    if dist.is_available() and dist.is_initialized():
        setup = _group_setup()
        _use_group_with(options)
        device = _device(setup, cpu)
    else:
        setup = read_setup()
        device = _device(setup, cpu)
        started = setup.world_size > 1
    # Before the group: nccl communicators belong to the current device.
    _set_current_device(device)
    if started:
        _start_group(setup, device, options)
    several = setup.world_size > 1
    on_many = DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
    return {
        "_cpu": cpu,
        "_started_group": started,
        # `checks` is also True if the variable is not set. Then the arguments are compared where that is cheap.
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


def _use_group_with(options: Mapping[str, Any]) -> None:
    """Give the process group, which exists already, the timeout of `options`; warn of options that come too late."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if options.get("timeout") is not None:
        # torch has no public function for it. The group keeps it when its connections are made anew.
        c10d._set_pg_timeout(_timedelta(options["timeout"]))
    given = {name: value for name, value in options.items() if name != "timeout" and value is not None}
    if given.get("backend") == dist.get_backend():
        del given["backend"]
    if given and dist.get_rank() == 0:
        _log.warning("the process group exists already, so that %s has no effect", ", ".join(given))


def _timedelta(timeout: timedelta | float) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def _group_setup() -> LaunchSetup:
    """Return the setup of the default group, with the local rank from the environment."""
    # A process group knows nothing about hosts.
    rank, local_rank = dist.get_rank(), local_rank_of()
    return LaunchSetup(rank, dist.get_world_size(), rank if local_rank is None else local_rank)


def _device(setup: LaunchSetup, cpu: bool) -> torch.device:
    chosen = read_text("RANKBOOK_DEVICE", "ACCELERATE_TORCH_DEVICE")
    if chosen is not None and chosen != "cuda":  # "cuda" without an index selects by local rank
        return torch.device(chosen)
    if cpu and chosen is None:
        return torch.device("cpu")
    if torch.cuda.is_available():
        if telemetry.this_device:  # its process group is connected to it, whatever the local rank is now
            return torch.device(telemetry.this_device)
        # With more ranks than devices on a host, several ranks share a device. `_backend` avoids nccl in this case.
        return torch.device("cuda", setup.local_rank % torch.cuda.device_count())
    if chosen is not None:
        raise InvalidArgument(f"RANKBOOK_DEVICE={chosen} requires a CUDA device, but torch finds no CUDA device")
    if setup.world_size == 1 and torch.backends.mps.is_available():  # no backend supports MPS
        return torch.device("mps")
    return torch.device("cpu")


def _set_current_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _start_group(setup: LaunchSetup, device: torch.device, options: dict[str, Any]) -> None:
    """Call `init_process_group` with defaults for missing options; a failure is rolled back."""
    # The user's own options take precedence over those from the environment; a contradiction is found below.
    options = dict(options)
    if options.get("backend") is None:
        options["backend"] = _backend(setup, device)
    if options.get("timeout") is not None:
        options["timeout"] = _timedelta(options["timeout"])
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
        c10d._world.group_count = count  # torch derives group names from it, which must be equal on all ranks
        raise
    # The device was chosen from the environment, so a group with other ranks cannot be used.
    if dist.get_world_size() != setup.world_size or dist.get_rank() != setup.rank:
        actual = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        dist.destroy_process_group()
        raise InvalidArgument(
            f"the options of the process group set {actual}, but the environment sets rank {setup.rank} of "
            f"{setup.world_size}"
        )
    # Registered once per process, also if the group is created again after a reset.
    atexit.unregister(_destroy_group)
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    """Destroy a gloo group at exit, because its threads outlive the interpreter and occasionally end in SIGABRT.

    Models are collected first: a DDP model that is freed after its group joins these threads while it holds the GIL.
    """
    if dist.is_initialized() and "nccl" not in str(dist.get_backend()):
        gc.collect()  # free unreachable DDP models
        dist.destroy_process_group()


def _check_backend(requested: str) -> None:
    """Raise `InvalidArgument` for an unavailable backend.

    This happens before the rendezvous: the other processes would wait for one that cannot continue.
    """
    # Backends are "gloo", or one per device type: "cpu:gloo,cuda:nccl".
    for name in (entry.rpartition(":")[2] for entry in str(requested).lower().split(",")):
        if name not in dist.Backend.backend_list or not dist.is_backend_available(name):
            available = [backend for backend in dist.Backend.backend_list if dist.is_backend_available(backend)]
            raise InvalidArgument(f"backend {name!r} is not available; choose from {', '.join(available)}")


def _backend(setup: LaunchSetup, device: torch.device) -> str:
    """Return the default backend: nccl with gloo for CPU tensors, or only gloo.

    nccl requires a separate device for every process of the host.
    """
    if device.type == "cuda" and dist.is_nccl_available() and setup.local_world_size <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"
