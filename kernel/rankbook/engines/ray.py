"""Engine `ray`: one agent per bundle of a placement group of Ray.

An actor per host runs the agent as a subprocess and waits for its end. Ranks are children of the agent, never of an
actor: Ray may end an actor's process at any time, and starts user code in threads of it. If the actor ends, the agent
notices that its parent has, and ends with its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankbook.engines.engine import (
    OWN_KEY,
    AgentConnection,
    EngineEvent,
    HostEnded,
    HostOutput,
    HostQueued,
    HostStarted,
    Limits,
    slots_per_host,
    split_arguments,
)
from rankbook.engines.processes import OptionParser
from rankbook.engines.supervisor import describe_code
from rankbook.errors import InvalidArgument, StartError

_STRATEGIES = {"spread": "SPREAD", "pack": "PACK"}
_READ_SECONDS = 1.0
_SHUTDOWN_SECONDS = 5.0


def agent_environment(environment: Mapping[str, str], cpus: float) -> dict[str, str]:
    """Return the environment of an agent, from that of its actor, which has `cpus` CPUs.

    Ray sets OMP_NUM_THREADS to the CPUs of the actor, which are those of all ranks of the host.
    """
    is_default = environment.get("OMP_NUM_THREADS") == str(max(1, int(cpus)))
    return {name: value for name, value in environment.items() if name != "OMP_NUM_THREADS" or not is_default}


class AgentRunner:
    """The actor of one host. Its methods run in threads of the actor's process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], text: str, cpus: float) -> tuple[str, str, str]:
        """Start the agent with this host's Python, and let it make a key. `cpus` are those of this actor.

        Returns the name of the host, the id of its node, and the agent's public key, which is empty if the agent has
        ended.
        """
        import ray

        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=agent_environment(os.environ, cpus),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `wait` says how
            self._process.stdin.write(text.encode())
        key = ""
        while not key and (line := self._process.stdout.readline()):
            if line.startswith(OWN_KEY.encode()):
                key = line.decode(errors="replace").removeprefix(OWN_KEY).strip()
            else:
                self._output += line
        threading.Thread(target=self._read_all, daemon=True).start()
        return socket.gethostname(), ray.get_runtime_context().get_node_id(), key

    def connect(self) -> None:
        """Let the agent connect, whose key the notebook allows now."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait for the end of the agent. Return its exit code."""
        assert self._process is not None
        return self._process.wait()

    def read(self) -> str:
        """Return what the agent has written since the last call."""
        with self._lock:
            output, self._output = self._output, b""
        return output.decode(errors="replace")

    def end(self) -> None:
        """End the agent."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SHUTDOWN_SECONDS)

    def _read_all(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            with self._lock:
                self._output = (self._output + data)[-(1 << 16) :]
        self._process.stdout.close()


@dataclass
class _RayHost:
    """One host: its bundle and actor, and the calls of the actor that have not returned."""

    bundle: int
    actor: Any
    starting: Any
    waiting: Any
    reading: Any = None
    read_at: float = 0.0
    node: str = ""


class RayEngine:
    """`--launcher ray [--gpus-per-rank 1] [--cpus-per-rank 1] [--strategy spread|pack]`.

    Connects to the cluster of RAY_ADDRESS or of this machine, unless the notebook has called `ray.init`. The placement
    group and the actors belong to the notebook's driver: Ray removes them when its process ends, however it does.
    """

    name = "ray"

    def __init__(self, arguments: Sequence[str]) -> None:
        own, passed = split_arguments(arguments)
        parser = OptionParser(self.name)
        parser.add_argument("--gpus-per-rank", type=float, default=0.0)
        parser.add_argument("--cpus-per-rank", type=float, default=1.0)
        parser.add_argument("--strategy", choices=sorted(_STRATEGIES), default="spread")
        self._options = parser.parse_args(own)
        if passed:
            raise InvalidArgument(f"--launcher ray runs no program that could take {' '.join(passed)}")
        try:
            import ray
        except ImportError as error:
            raise StartError(
                "Ray is not installed: pip install 'ray>=2.40', in the notebook and on the hosts"
            ) from error
        self._ray: Any = ray
        self._was_initialized = True
        self._group: Any = None
        self._ready: Any = None
        self._hosts: dict[int, _RayHost] = {}
        self._ended: dict[int, _RayHost] = {}
        self._late: list[EngineEvent] = []
        self._next = 0
        self._slots = 0
        self._bundles = 0
        self._connection: AgentConnection | None = None
        self._queued = ""

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """See `Engine`."""
        self._connection = connection
        self._was_initialized = self._ray.is_initialized()
        if not self._was_initialized:
            try:
                self._ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                raise StartError(
                    f"no Ray cluster: run ray.init() in the notebook, or set RAY_ADDRESS ({error})"
                ) from error
            except RuntimeError as error:
                # Ray looks for a node on this host, also if it reaches the cluster of RAY_ADDRESS.
                raise StartError(
                    f"cannot connect to the Ray cluster: {error}; the notebook must run on one of its nodes (in "
                    "Kubernetes: in a pod of the Ray cluster), with the same version of Ray"
                ) from error
        self._bundles = hosts or 1
        self._slots = slots_per_host(slots, self._bundles)
        self._resources = {"CPU": self._options.cpus_per_rank * self._slots}
        if self._options.gpus_per_rank:
            self._resources["GPU"] = self._options.gpus_per_rank * self._slots
        self._group = self._ray.util.placement_group(
            [self._resources] * self._bundles, strategy=_STRATEGIES[self._options.strategy]
        )
        self._ready = self._group.ready()
        self._queued = f"Ray places {self._bundles} bundles of {self._resources}"

    def events(self) -> Iterable[EngineEvent]:
        """See `Engine`."""
        events, self._late = self._late, []
        if self._connection is not None and not self._ray.is_initialized():
            # Ray has ended the actors. Any further call of `ray` would start Ray anew.
            self._connection = self._ready = self._group = None
            self._hosts.clear()
            return [HostEnded(None, "ray: the notebook has called ray.shutdown()")]
        if self._ready is not None:
            if not self._is_done(self._ready):
                events.append(HostQueued(self._queued))
                return events
            self._ready = None
            for bundle in range(self._bundles):
                self._start_actor(bundle)
        for number, host in list(self._hosts.items()):
            events += self._events_of(number, host)
        return events

    def replace(self, host: int, *, wait: bool) -> int | None:
        """See `Engine`. The same bundle, as soon as Ray has placed it: at once, if its node lives."""
        if self._connection is None:
            return None
        if host in self._hosts:  # lost for the notebook, before Ray has noticed it
            self._late += self._end(host, self._hosts[host], "ray: it was lost")
        lost = self._ended.get(host)
        if lost is None:
            return None
        alive = any(node["NodeID"] == lost.node and node["Alive"] for node in self._ray.nodes())
        if not alive and not wait:
            return None
        # Ray may not have noticed yet that the node is gone. Then this actor ends too, and is asked for once more.
        starting = [number for number, other in self._hosts.items() if other.bundle == lost.bundle]
        return starting[0] if starting else self._start_actor(lost.bundle)

    def limits(self) -> Limits:
        """See `Engine`."""
        return Limits()

    def stop(self) -> None:
        """See `Engine`."""
        if self._connection is None or not self._ray.is_initialized():
            return
        self._connection = None
        hosts, self._hosts = list(self._hosts.values()), {}
        ends = [host.actor.end.remote() for host in hosts]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_SHUTDOWN_SECONDS)
        for host in hosts:
            self._ray.kill(host.actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._group = self._ready = None
        if not self._was_initialized:
            self._ray.shutdown()

    def _start_actor(self, bundle: int) -> int:
        assert self._connection is not None
        number, self._next = self._next, self._next + 1
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        actor = (
            self._ray.remote(AgentRunner)
            .options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                scheduling_strategy=strategy,
                max_concurrency=4,  # `wait` takes one thread until the end
            )
            .remote()
        )
        _, *arguments = self._connection.command(number, self._slots)
        # Ray does not encrypt the arguments of a call, and may store them.
        starting = actor.start.remote(arguments, self._connection.public_text, self._resources["CPU"])
        self._hosts[number] = _RayHost(bundle, actor, starting, None)
        return number

    def _events_of(self, number: int, host: _RayHost) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        try:
            if host.starting is not None:
                if not self._is_done(host.starting):
                    return events
                name, host.node, key = self._ray.get(host.starting)
                host.starting, host.waiting = None, host.actor.wait.remote()
                if key and self._connection is not None:
                    self._connection.allow(key)
                    host.actor.connect.remote()
                events.append(HostStarted(number, name))
            if host.reading is not None and self._is_done(host.reading):
                if text := self._ray.get(host.reading):
                    events.append(HostOutput(number, text))
                host.reading = None
            if host.reading is None and time.monotonic() >= host.read_at:
                host.read_at = time.monotonic() + _READ_SECONDS
                host.reading = host.actor.read.remote()
            if self._is_done(host.waiting):
                code = self._ray.get(host.waiting)
                events += self._end(number, host, f"ray: {describe_code(code)}")
        except self._ray.exceptions.RayError as error:
            # Often the traceback of a worker, whose last line has the cause.
            lines = str(error).strip().splitlines() or [""]
            reason = " / ".join(dict.fromkeys((lines[0].strip(), lines[-1].strip())))
            events += self._end(number, host, f"ray: the actor ended ({type(error).__name__}: {reason})")
        return events

    def _end(self, number: int, host: _RayHost, reason: str) -> list[EngineEvent]:
        self._ended[number] = self._hosts.pop(number)
        last = ""
        with contextlib.suppress(self._ray.exceptions.RayError):  # the actor has ended, or is too busy to answer
            last = self._ray.get(host.actor.read.remote(), timeout=1.0)
        # The bundle is free for the next actor only without this one. A ValueError: Ray does not know it any more.
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(host.actor)
        return [
            # The end of a host that was never reported as started would not end the wait for its slots.
            *([] if host.starting is None else [HostStarted(number)]),
            *([HostOutput(number, last)] if last else []),
            HostEnded(number, reason),
        ]

    def _is_done(self, reference: Any) -> bool:  # noqa: ANN401 - an ObjectRef
        done, _ = self._ray.wait([reference], timeout=0)
        return bool(done)
