"""`AcceleratorState`: the settings of training, together with the process information of `PartialState`.

`PartialState`, `GradientState` and `DistributedType` can be imported from here as well.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from rankbook.errors import InvalidArgument
from rankbook.runtime.gradient_state import GradientState
from rankbook.runtime.launch_environment import read_text
from rankbook.runtime.process_state import DistributedType, PartialState, check_group_options, missing_attribute

__all__ = ["PRECISIONS", "AcceleratorState", "DistributedType", "GradientState", "PartialState"]

PRECISIONS = ("no", "fp16", "bf16")
_UNSUPPORTED_PLUGINS = ("deepspeed_plugin", "megatron_lm_plugin")
_D = TypeVar("_D")
_log = logging.getLogger(__name__)


class AcceleratorState:
    """Settings of training. All instances in a process share the settings of the first one, and may change them.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; by default RANKBOOK_MIXED_PRECISION, otherwise "no". A later instance
            with another value changes it for objects that are prepared from then on, and logs a warning.
        cpu: use the CPU although an accelerator is available.
        dynamo_plugin: settings of `torch.compile`.
        deepspeed_plugin, megatron_lm_plugin: not supported; must be None.
        fsdp_plugin: settings of sharding.
        torch_tp_plugin: settings of tensor parallelism.
        parallelism_config: mesh of the ranks.
        options: keyword arguments of `init_process_group`, see `PartialState`.

    All attributes of `PartialState` are available too. Raises `InvalidArgument` for an unknown precision, for `cpu` if
    the processes already work on another device, for unsupported plugins, and for an unknown keyword.

    Example::

        AcceleratorState().num_processes  # 2
    """

    # The `__dict__` of all instances. It is cleared and filled again, and never replaced, because instances that exist
    # already would keep the old one.
    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    device_mesh: Any
    dynamo_plugin: Any
    fsdp_plugin: Any
    parallelism_config: Any
    torch_tp_plugin: Any
    _mixed_precision: str

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: object | None = None,
        deepspeed_plugin: object | None = None,
        fsdp_plugin: object | None = None,
        torch_tp_plugin: object | None = None,
        megatron_lm_plugin: object | None = None,
        parallelism_config: object | None = None,
        _from_accelerator: bool = False,
        **options: Any,  # noqa: ANN401 - torch's
    ) -> None:
        # Arguments are checked completely before the first shared state changes.
        arguments = {
            "dynamo_plugin": dynamo_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "parallelism_config": parallelism_config,
        }
        check_group_options("AcceleratorState", options, inspect.signature(AcceleratorState).parameters)
        for name, value in zip(_UNSUPPORTED_PLUGINS, (deepspeed_plugin, megatron_lm_plugin), strict=True):
            if value is not None:
                raise InvalidArgument(
                    f"{name} is not supported: Rankbook uses DDP, FSDP2 or tensor parallelism; omit it"
                )
        precision = None if mixed_precision is None else _precision(mixed_precision)
        # The environment variable is the default of the first instance only. A later instance without the argument
        # keeps the current precision.
        first = not AcceleratorState._shared_state
        default = (
            _precision(read_text("RANKBOOK_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION") or "no") if first else ""
        )
        process = PartialState(cpu, **options)
        self.__dict__ = AcceleratorState._shared_state
        if cpu and process.device.type != "cpu":
            _move_to_cpu(process)
        if first:
            AcceleratorState._shared_state.update(
                {"_mixed_precision": precision or default, "device_mesh": None, **arguments}
            )
        else:
            if precision is not None and precision != self._mixed_precision:
                # Not an error, unlike in Accelerate: a notebook's user would have to restart for another precision.
                self._change_precision(precision, process)
            # None means "not given" and keeps what an earlier instance has set.
            AcceleratorState._shared_state.update(
                {name: value for name, value in arguments.items() if value is not None}
            )

    def __repr__(self) -> str:
        return f"{PartialState()!r}Mixed precision type: {self.mixed_precision}\n"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - type of the attribute
        if not AcceleratorState._shared_state and not name.startswith("__"):
            is_attribute = any(
                name in state_class.__annotations__ or hasattr(state_class, name)
                for state_class in (AcceleratorState, PartialState)
            )
            raise AttributeError(missing_attribute("AcceleratorState", name, known=is_attribute))
        # Rank, device and so on are looked up in `PartialState` every time and never copied, so the two cannot differ.
        if name in PartialState.__annotations__ or hasattr(PartialState, name):
            return getattr(_process(name), name)
        raise AttributeError(missing_attribute("AcceleratorState", name, known=False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reference to the receiving process's state.

        A process without one takes over the settings.
        """
        shared = AcceleratorState._shared_state
        plugins = ("dynamo_plugin", "fsdp_plugin", "torch_tp_plugin", "parallelism_config")
        return _unpickle_state, (shared.get("_mixed_precision"), {name: shared.get(name) for name in plugins})

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the settings and, on request, the state of `PartialState`."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        """Return True if an instance was created since the last reset."""
        return bool(AcceleratorState._shared_state)

    @property
    def mixed_precision(self) -> str:
        """Return the precision of forward passes: "no", "fp16" or "bf16"."""
        return self._mixed_precision

    @property
    def distributed_type(self) -> DistributedType:
        """Return the kind of distributed setup.

        FSDP if there is a plugin for it and more than one process, otherwise that of `PartialState`.
        """
        process = _process("distributed_type")
        # With one process the plugin still shards (over one rank), but scripts expect the type of a single device.
        sharded = self.fsdp_plugin is not None and process.use_distributed
        return DistributedType.FSDP if sharded else process.distributed_type

    @property
    def deepspeed_plugin(self) -> None:
        """Return None: DeepSpeed is not supported."""

    @property
    def megatron_lm_plugin(self) -> None:
        """Return None: Megatron-LM is not supported."""

    @property
    def is_fsdp2(self) -> bool:
        """Return True if models are sharded with `fully_shard`."""
        return self.distributed_type == DistributedType.FSDP

    # Methods of PartialState that need type annotations; __getattr__ provides the others

    def wait_for_everyone(self) -> None:
        """Wait for all processes, see `PartialState.wait_for_everyone`."""
        _process("wait_for_everyone").wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on rank 0 first, see `PartialState.main_process_first`."""
        return _process("main_process_first").main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the first process of every host first.

        See `PartialState.local_main_process_first`.
        """
        return _process("local_main_process_first").local_main_process_first()

    def split_between_processes(self, inputs: _D, apply_padding: bool = False) -> AbstractContextManager[_D]:
        """Return this process's share of `inputs` as a context manager.

        See `PartialState.split_between_processes`.
        """
        return _process("split_between_processes").split_between_processes(inputs, apply_padding)

    def print(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as the builtin
        """Print on the first process of every host only."""
        _process("print").print(*values, **options)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy a process group, see `PartialState.destroy_process_group`."""
        _process("destroy_process_group").destroy_process_group(group)

    def _change_precision(self, precision: str, process: PartialState) -> None:
        before, self._mixed_precision = self._mixed_precision, precision
        if process.is_main_process:
            _log.warning(
                "mixed_precision changed from %r to %r. Objects that are already prepared keep %r until they are "
                "prepared again.",
                before,
                precision,
                before,
            )


def _unpickle_state(precision: str | None, plugins: dict[str, Any]) -> AcceleratorState:
    """Unpickle an `AcceleratorState`.

    `_arrived` marks settings that were created here, for `Accelerator.__setstate__`, which runs later in the same
    pickle.
    """
    # This process has settings of its own. They are not changed by an object that arrives.
    if AcceleratorState._shared_state:
        return AcceleratorState()
    state = AcceleratorState(precision, **plugins)
    AcceleratorState._shared_state["_arrived"] = True
    return state


def _process(name: str) -> PartialState:
    """Return the `PartialState`, which must exist already.

    It is not created here, because its options are unknown. Raises AttributeError about the attribute `name`.
    """
    if not PartialState._shared_state:
        raise AttributeError(missing_attribute("PartialState", name, known=True))
    return PartialState()


def _precision(name: str) -> str:
    lower = str(name).lower()
    if lower not in PRECISIONS:
        raise InvalidArgument(f"unknown mixed_precision {name!r}; choose from {', '.join(PRECISIONS)}")
    return lower


def _move_to_cpu(process: PartialState) -> None:
    """Change the device of a single process to the CPU.

    Raises `InvalidArgument` if there are several processes: their process group belongs to their current device.
    """
    # The other ranks would still use their devices, and the group may have no backend for tensors of the CPU.
    if process.use_distributed:
        raise InvalidArgument(
            f"rank {process.process_index} already uses {process.device} and has a process group for it; start the "
            "ranks on the CPU instead"
        )
    _log.warning("The device changed from %s to cpu. Objects that are already prepared are not moved.", process.device)
    process.device = torch.device("cpu")
    process._cpu = True
