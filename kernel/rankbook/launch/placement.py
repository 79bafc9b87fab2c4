"""Placement of ranks on hosts: who runs where, on which device, and with which environment variables and threads.

Pure functions. A host offers slots; `place_ranks` fills them host by host, and `free_seat` finds a place for the
replacement of a lost rank.
"""

from __future__ import annotations

import math
import os
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankbook import control_groups
from rankbook.errors import InvalidArgument
from rankbook.runtime.launch_environment import read_flag, read_text

DEFAULT_CPU_RANKS = 2
_MAX_RANKS_PER_CORE = 8
_LOWEST_RANK_LIMIT = 64


@dataclass(frozen=True)
class DeviceAssignment:
    """Devices of one host's ranks (`devices[rank]`), with the backend and the threads per rank."""

    devices: tuple[str, ...]
    backend: str
    threads: int


def assign_devices(ranks: int | None, cuda_devices: int, *, backend: str | None, cores: int) -> DeviceAssignment:
    """Assign devices to `ranks` ranks; by default one rank per CUDA device, or two on the CPU.

    The backend is nccl if every rank has its own device (beside gloo for CPU tensors), and gloo if ranks share a
    device, which nccl does not support. Raises `InvalidArgument` for a number of ranks out of range.
    """
    count = default_ranks(cuda_devices) if ranks is None else ranks
    # More ranks than this are almost certainly a typing mistake, and would bring the machine to a halt.
    limit = max(_LOWEST_RANK_LIMIT, _MAX_RANKS_PER_CORE * cores)
    if not 1 <= count <= limit:
        source = "RANKBOOK_RANKS=" if ranks is None and os.environ.get("RANKBOOK_RANKS") else "number of ranks: "
        raise InvalidArgument(f"invalid {source}{count}; expected 1 to {limit} on {cores} cores")
    # In turn: four ranks on two devices get cuda:0, cuda:1, cuda:0, cuda:1.
    devices = tuple(f"cuda:{rank % cuda_devices}" if cuda_devices else "cpu" for rank in range(count))
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if cuda_devices and count <= cuda_devices else "gloo"
    elif "nccl" in backend and count > cuda_devices:
        raise InvalidArgument(f"nccl needs a CUDA device per rank: {count} ranks, {cuda_devices} devices; use gloo")
    # The cores are divided: torch would start as many threads per rank as there are cores.
    return DeviceAssignment(devices, backend, max(1, cores // count))


def default_ranks(cuda_devices: int) -> int:
    """Return the default number of ranks: RANKBOOK_RANKS, or one per CUDA device, or two.

    Raises `InvalidArgument` if RANKBOOK_RANKS is not a number.
    """
    setting = os.environ.get("RANKBOOK_RANKS")
    if setting:
        if not setting.isdecimal():
            raise InvalidArgument(f"invalid RANKBOOK_RANKS={setting!r}: expected a positive integer")
        return int(setting)
    return cuda_devices or DEFAULT_CPU_RANKS


DEVICES = ("cpu", "cuda")
"""Types of devices that a start may ask for."""


def choose_device(device: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the type of device that the ranks are to have: "cpu", "cuda", or None for CUDA devices if there are some.

    Without `device`, the variables decide that let an `Accelerator` use the CPU. Raises `InvalidArgument` for another
    value.
    """
    if device is not None and device not in DEVICES:
        raise InvalidArgument(
            f"invalid device={device!r}: expected 'cpu', 'cuda', or None for CUDA if there is a device"
        )
    if device is None:
        chosen = read_text("RANKBOOK_DEVICE", "ACCELERATE_TORCH_DEVICE", environment=environment)
        on_cpu = read_flag("ACCELERATE_USE_CPU", environment=environment) if chosen is None else chosen == "cpu"
        return "cpu" if on_cpu else None
    return device


def describe_no_device(problem: str, host: str = "") -> str:
    """Return the error for a start that asks for CUDA devices, none of which can be used because of `problem`."""
    where = f" on {host}" if host else ""
    return (
        f"no CUDA device can be used{where}: {problem or 'there is none'}; to start the ranks on the CPU, use "
        "%distributed start --device cpu, or rankbook.start(device='cpu')"
    )


def abort_grace() -> float:
    """Return the grace period for collectives: the value of RANKBOOK_ABORT_GRACE in seconds, 1 by default.

    After a rank has raised, the others may wait for it this long before their collectives are aborted. Raises
    `InvalidArgument` if the value is not a number of seconds.
    """
    setting = os.environ.get("RANKBOOK_ABORT_GRACE", "1")
    try:
        seconds = float(setting)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(f"invalid RANKBOOK_ABORT_GRACE={setting!r}: expected a number of seconds >= 0")
    return seconds


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Job schedulers restrict the affinity, and containers the time.
    cores = len(core_ids()) or os.cpu_count() or 1
    quota = control_groups.cpu_quota()
    return cores if quota is None else min(cores, math.ceil(quota))


def core_ids() -> tuple[int, ...]:
    """Return the numbers of the CPU cores that this process may use; empty on macOS, which has no such call."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def threads_per_rank(environment: Mapping[str, str], default: int) -> int:
    """Return the number of threads of a rank: the one that OMP_NUM_THREADS has in `environment`, or `default`.

    Of a list, which has a number for every level of nested parallel regions, the first number counts.

    Example::

        threads_per_rank({"OMP_NUM_THREADS": "4,2"}, 1)  # 4
    """
    number = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(number) if number.isdecimal() and int(number) else default


def rank_environment(
    base: Mapping[str, str], place: Mapping[str, str], *, threads: int, interface: str = ""
) -> dict[str, str]:
    """Return the environment of a rank: defaults, then `base` of the notebook or the agent, then `place`.

    `place` has the variables that torchrun sets, see `placement.place_variables`. Nothing listens on MASTER_PORT: rank
    0 may host a `TCPStore` there. `init_method="env://"` uses the cluster's own store, also on other hosts. `interface`
    is the name of the network interface that reaches the other hosts; without one, all ranks are on this host.
    """
    # Without other hosts: no listening on the network, no loss with a VPN.
    name = interface or ("lo0" if sys.platform == "darwin" else "lo")
    # The variables above those of `base` are defaults, which the user's own values replace. Those below belong to the
    # rank.
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": name,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONUNBUFFERED": "1",
        # Without =, NCCL takes the name for a prefix: eth1 would stand for eth10 too.
        "NCCL_SOCKET_IFNAME": f"={name}",
        # The watchdog of NCCL must end neither the process when a communicator is aborted, nor after an error of the
        # device, which the cell reports. Its dump sets a key in the store for good, on which the monitor of a process
        # that joins later ends that process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # All connections of a ring or tree when a group is formed. NCCL would make them in the first collective, inside
        # the call, where neither an abort nor an interrupt ends the wait for a rank that does not come.
        "NCCL_RUNTIME_CONNECT": "0",
        # Its service for diagnoses listens on a port that every user of the machine can reach.
        "NCCL_RAS_ENABLE": "0",
        # Not the notebook's MPLBACKEND: it may name a backend that needs the kernel or a window. A rank sends its
        # figures by the inline backend.
        **{name: value for name, value in base.items() if name not in ("MPLBACKEND", _OF_WANDB)},
        **place,
    }


_OF_WANDB = "WANDB_SERVICE"
"""The address of a process that `wandb.init` has started for this one, on this host. A rank starts its own."""
_OWN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *("MPLBACKEND", "CUDA_VISIBLE_DEVICES", _OF_WANDB),
    }
)
"""Variables that belong to a rank, or that its device was chosen by."""


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with another value than `before`; None for those that were removed.

    For a call on running ranks, whose own environment is that of their start. Variables that a rank has of its own are
    left out.
    """
    names = before.keys() | now.keys()
    return {name: now.get(name) for name in sorted(names - _OWN_VARIABLES) if before.get(name) != now.get(name)}


HOME = ""
"""Id of the notebook's host."""


@dataclass(frozen=True)
class HostSlots:
    """Slots, devices and cores of one host.

    `id` identifies the host's agent; `HOME` is the notebook's host. `slots` is the number of ranks that it takes,
    `devices` its number of CUDA devices, and `cores` its number of CPU cores. `node` is the node's number from the
    launcher, if it has given one. `rank` and `local_rank` are set for an agent that a launcher has started for one
    rank: several of them may run on one `machine`, and have a `name` each. `core_ids` tell whether they share their
    cores.
    """

    id: str
    name: str
    slots: int
    devices: int = 0
    cores: int = 1
    node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    machine: str = ""
    core_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankSeat:
    """The place of one rank: its host, its device there, and the numbers that torchrun calls by these names."""

    rank: int
    host: str
    device: str
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    threads: int


def place_ranks(count: int, hosts: Sequence[HostSlots]) -> tuple[RankSeat, ...]:
    """Return the seats of `count` ranks, which fill the slots of `hosts`.

    The notebook's host comes first, then the hosts by the number or the name of their node. The ranks of one host have
    successive numbers. An agent that a launcher has started for one rank keeps that rank's order.

    Raises `InvalidArgument` if there are too few slots.

    Example::

        seats = place_ranks(3, [HostSlots("a", "node1", slots=2), HostSlots("b", "node2", slots=2)])
        [seat.host for seat in seats]  # ['a', 'a', 'b']
    """
    offered = sum(host.slots for host in hosts)
    if offered < count:
        raise InvalidArgument(f"{count} ranks need {count} slots, but the hosts offer {offered}")
    chosen = [(host, number) for host in sorted(hosts, key=_order) for number in range(host.slots)][:count]
    # Agents that were started for one rank each share the node.
    keys = [_node_key(host) for host, _ in chosen]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    per_node = Counter(keys)
    agents: dict[tuple[object, ...], dict[str, HostSlots]] = {}
    for (host, _), key in zip(chosen, keys, strict=True):
        agents.setdefault(key, {})[host.id] = host
    threads = {key: max(1, _cores_of(of_node.values()) // per_node[key]) for key, of_node in agents.items()}
    return tuple(
        RankSeat(
            rank=rank,
            host=host.id,
            device=_device(host, number),
            local_rank=number if host.local_rank is None else host.local_rank,
            local_world_size=per_node[key],
            group_rank=numbers[key],
            group_world_size=len(numbers),
            threads=threads[key],
        )
        for rank, ((host, number), key) in enumerate(zip(chosen, keys, strict=True))
    )


def free_seat(seat: RankSeat, seats: Iterable[RankSeat], hosts: Sequence[HostSlots]) -> RankSeat | None:
    """Return where the replacement of the rank at `seat` runs: at the same place if its host is among `hosts`.

    Otherwise in the first free slot of another host; None if there is none. `seats` are those of all ranks. When all
    ranks have moved, `number_nodes` has the numbers that depend on the others.
    """
    if any(host.id == seat.host for host in hosts):
        return seat
    others = [other for other in seats if other.rank != seat.rank]
    for host in sorted(hosts, key=_order):
        taken = [other for other in others if other.host == host.id]
        if len(taken) < host.slots:
            numbers = {other.local_rank for other in taken}
            local_rank = next(number for number in range(host.slots) if number not in numbers)
            return replace(
                seat,
                host=host.id,
                device=_device(host, local_rank),
                local_rank=local_rank if host.local_rank is None else host.local_rank,
                # A host without ranks takes the number of the lost one.
                group_rank=taken[0].group_rank if taken else seat.group_rank,
                # The task of a launcher may have all cores of its node or some: what its predecessor had.
                threads=seat.threads if host.local_rank is not None else max(1, host.cores // host.slots),
            )
    return None


def number_nodes(seats: Sequence[RankSeat], hosts: Iterable[HostSlots]) -> tuple[RankSeat, ...]:
    """Return `seats` with the numbers of nodes and of ranks per node, which change when ranks move to other `hosts`.

    Nodes keep their order, and are numbered without gaps.
    """
    keys = {host.id: _node_key(host) for host in hosts}
    node_of = {seat.rank: keys.get(seat.host, (seat.host,)) for seat in seats}
    in_order = sorted(seats, key=lambda seat: (seat.group_rank, seat.rank))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_of[seat.rank] for seat in in_order))}
    counts = Counter(node_of.values())
    return tuple(
        replace(
            seat,
            local_world_size=counts[node_of[seat.rank]],
            group_rank=numbers[node_of[seat.rank]],
            group_world_size=len(numbers),
        )
        for seat in seats
    )


def home_seat(rank: int, devices: Sequence[str], threads: int) -> RankSeat:
    """Return the seat of a rank if all ranks run on the notebook's host; `devices` are those of all ranks."""
    return RankSeat(rank, HOME, devices[rank], rank, len(devices), 0, 1, threads)


def choose_backend(seats: Sequence[RankSeat], backend: str | None) -> str:
    """Return the backend for ranks at `seats`: NCCL beside gloo if every rank has a CUDA device of its own, else gloo.

    Raises `InvalidArgument` if `backend` names nccl and two ranks share a device.
    """
    places = [(seat.host, seat.device) for seat in seats]
    own_devices = len(set(places)) == len(places) and all(seat.device != "cpu" for seat in seats)
    if backend is None:
        return "cpu:gloo,cuda:nccl" if own_devices else "gloo"
    if "nccl" in backend and not own_devices:
        raise InvalidArgument("nccl needs a CUDA device per rank; use gloo, or start fewer ranks per host")
    return backend


def _order(host: HostSlots) -> tuple[bool, bool, int, str, str]:
    # A rank's number that a launcher has given goes first: `srun` numbers its tasks in the order of the nodes.
    number = host.node if host.rank is None else host.rank
    return host.id != HOME, number is None, number or 0, host.name, host.id


def _node_key(host: HostSlots) -> tuple[object, ...]:
    return (host.id,) if host.local_rank is None else (host.node, host.machine or host.name)


def _cores_of(agents: Iterable[HostSlots]) -> int:
    """Return the number of cores of one node, all of whose `agents` may use the same ones, or each its own."""
    agents = list(agents)
    own = frozenset[int]().union(*(agent.core_ids for agent in agents))
    return max([len(own), *(agent.cores for agent in agents)])


def _device(host: HostSlots, number: int) -> str:
    # A task of a launcher sees all devices of its node, unless they are bound to tasks.
    if host.local_rank is not None:
        number = host.local_rank
    return f"cuda:{number % host.devices}" if host.devices else "cpu"


# Environment --------------------------------------------------------------------------------------------------------

PLACE_OF_OTHERS = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank that change when other ranks move to another host."""

INHERITED_PREFIXES = ("RANKBOOK_", "ACCELERATE_", "OMP_", "NCCL_", "TORCH", "HF_", "WANDB_")
"""Prefixes of the environment variables that ranks on other hosts inherit from the notebook's process."""
_NOT_INHERITED = frozenset(
    {"RANKBOOK_CONNECT", "RANKBOOK_RUNTIME_DIR", "RANKBOOK_LOG_DIR", "NCCL_SOCKET_IFNAME", _OF_WANDB}
)
"""Variables with such a prefix that name something of the notebook's host, or hold its keys."""


def inherited_variables(environment: Mapping[str, str], names: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of `environment` that ranks on other hosts inherit: those with a known prefix, and `names`.

    Example::

        inherited_variables({"PATH": "/bin", "HF_HOME": "/data"}, ["PATH"])  # {'PATH': '/bin', 'HF_HOME': '/data'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name in names or (name.startswith(INHERITED_PREFIXES) and name not in _NOT_INHERITED)
    }


OWN_FOLDERS = b"\0"
"""Entry of the `sys.path` for another host that stands for the folders of the Python there. No path has this byte."""


def path_to_send(path: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return this process's `sys.path` for another host: with `OWN_FOLDERS` in place of the folders of its Python.

    The standard library and the installed packages are those of the Python on the host, which may be another one.
    """
    paths = sysconfig.get_paths()
    libraries = [Path(paths[name]) for name in ("stdlib", "platstdlib")]
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    own = {os.fsencode(name) for library in libraries for name in (library / "lib-dynload", library.with_name(archive))}
    installed = (paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages())
    own.update(map(os.fsencode, (*map(str, libraries), *installed)))
    return tuple(dict.fromkeys(OWN_FOLDERS if entry in own else entry for entry in path))


def path_on_host(sent: Sequence[bytes], own: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the `sys.path` of a rank: what was sent, with this host's `own` in place of `OWN_FOLDERS`, or behind it.

    Example::

        path_on_host((b"/mine", OWN_FOLDERS, b"/more"), [b"/lib"])  # (b'/mine', b'/lib', b'/more')
    """
    place = sent.index(OWN_FOLDERS) if OWN_FOLDERS in sent else len(sent)
    return tuple(dict.fromkeys((*sent[:place], *own, *sent[place + 1 :])))


def place_variables(
    seat: RankSeat, *, world_size: int, address: str, port: int, run: str, device: str | None = None
) -> dict[str, str]:
    """Return the variables that torchrun sets, for the rank at `seat` in the cluster `run`.

    `address` is that of rank 0's host. By the id of the run, libraries see that they are not to start processes.
    With the `device` "cpu", no CUDA device is visible to the rank, whatever the code on it or the notebook's
    RANKBOOK_DEVICE asks for. Without a CUDA device, Accelerate and Transformers would take the rank for the only one;
    ACCELERATE_USE_CPU tells them otherwise.
    """
    # A single rank on macOS may use its GPU.
    use_cpu = seat.device == "cpu" and (world_size > 1 or sys.platform != "darwin")
    return {
        **({"CUDA_VISIBLE_DEVICES": "", "RANKBOOK_DEVICE": "cpu"} if device == "cpu" else {}),
        **({"ACCELERATE_USE_CPU": "1"} if use_cpu else {}),
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GROUP_RANK": str(seat.group_rank),
        "GROUP_WORLD_SIZE": str(seat.group_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
