"""Debug adapter multiplexer: answer a front end's debugger from the notebook's own debugger, the ranks', or both.

A front end debugs one process, the kernel's, through the Debug Adapter Protocol (DAP), and sees every rank as a thread
of that process. The debuggers of the ranks all count their threads, frames and variables from 1, so these numbers are
translated: rank r is thread `THREADS` + r (`rank_of_thread`), and its frames and variables get numbers from
`REFERENCES` on (`ReferenceMap`). A request that names such a number goes to that rank; a request that names none goes
to the kernel's debugger, to the ranks, or to both, and their responses are merged. `StoppedThreads` tracks the ranks
that a debugger has stopped. Breakpoints are kept for ranks that start later.

JupyterLab has one call stack for all threads. It requests the frames after every `stopped` event and selects the first
one, unless it already shows the selected one; a `continued` event of any thread clears its call stack.

The module has no sockets and no threads: it uses a `KernelDebugger` and a `RankGateway`, and runs on one event loop.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

_SECONDS = 5.0
"""Timeout of a rank's debugger. C code that holds the GIL blocks the debugger too."""
_START_SECONDS = 20.0
_REFERENCES = ("frameId", "variablesReference", "srcFrameId")
"""Arguments that name a frame or a variable."""
_EMPTY_BODIES: dict[str, Message] = {
    # responses for a rank that has resumed: a front end fails without these fields
    "stackTrace": {"stackFrames": [], "totalFrames": 0},
    "scopes": {"scopes": []},
    "variables": {"variables": []},
}


class KernelDebugger(Protocol):
    """The notebook's own debugger."""

    async def process(self, request: Message) -> Message:
        """Return the response to a request."""

    @property
    def paused(self) -> bool:
        """Return True if the notebook is paused."""

    def accepts(self, name: str) -> bool:
        """Return True if a variable with this name is shown."""


class RankGateway(Protocol):
    """Connection to the ranks' debuggers and to the front end."""

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that can have a debugger."""

    def busy(self) -> tuple[int, ...]:
        """Return the ranks that are executing a cell."""

    def send(self, rank: int, content: str) -> bool:
        """Send a message to a rank's debugger; return False if the rank has exited."""

    def publish(self, event: Message) -> None:
        """Send an event to the front end."""

    def record_pause(self, rank: int, path: str, line: int) -> None:
        """Record that a rank is paused at `path` and `line`.

        Line -1 means that the position is not known yet, 0 that the rank is not paused.
        """

    def is_for_ranks(self, path: str) -> bool:
        """Return True if the file is a cell that runs on the ranks only."""

    async def variables(self, rank: int) -> list[Message] | None:
        """Return the variables of a rank that is not paused, or None if plain cells run in the notebook."""

    async def display_bundle(self, rank: int, name: str) -> Message | None:
        """Return a variable's mime bundle with its metadata, or None if plain cells run in the notebook."""


class _RankDebugConnection:
    """The connection to a rank's debugger.

    `pending` maps the sequence numbers of requests to the futures of their responses. `ready`: the debugger receives
    changes of breakpoints.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.pending: dict[int, asyncio.Future[Message]] = {}
        self.ready = False


class DebugMultiplexer:
    """The debugger of one front end.

    All methods run on one event loop, `message_received` and `rank_exited` too. The handler of the DAP command `x` is
    the method `_on_x`.
    """

    def __init__(self, stock: KernelDebugger, gateway: RankGateway) -> None:
        self.is_active = False
        self.stopped = StoppedThreads()
        self._stock = stock
        self._gateway = gateway
        self._connections: dict[int, _RankDebugConnection] = {}
        self._breakpoints: dict[str, list[Message]] = {}
        self._filters: Message | None = None
        self._starting = asyncio.Lock()
        self._location_queries: set[asyncio.Task[None]] = set()

    def adopt_breakpoints(self, breakpoints: dict[str, list[Message]]) -> None:
        """Take over the breakpoints of a front end that is already debugging the kernel."""
        self.is_active = self.stopped.one_view = True
        self._breakpoints.update(breakpoints)

    # The ranks

    def message_received(self, rank: int, content: str) -> None:
        """Handle a message of a rank's debugger; an empty one means that the debugger has ended."""
        connection = self._connections.get(rank)
        if connection is None:
            return
        if not content:
            self.rank_exited(rank)
            return
        message = json.loads(content)
        if message["type"] == "response":
            # Missing if the request has timed out.
            answer = connection.pending.get(message["request_seq"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif message["event"] == "stopped":
            # The event is published at once. Where the rank has stopped is asked for afterwards, in a task: this method
            # is called by the loop and must not wait for a response that arrives through it.
            self._publish(self.stopped.stop(rank, message["body"]))
            self._start_location_query(rank)
        elif message["event"] == "continued" and rank in self.stopped.threads:
            self._resume((rank,))

    def rank_exited(self, rank: int) -> None:
        """Handle the end of a rank's process or debugger."""
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._resume((rank,))
            for answer in connection.pending.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"the debugger of rank {rank} has exited"))

    def drop_ranks(self) -> None:
        """Drop all ranks, because other ranks replaced them."""
        for rank in tuple(self._connections):
            self.rank_exited(rank)
        self.stopped.selected_rank = None

    async def attach(self, ranks: Iterable[int]) -> dict[int, str]:
        """Start debuggers on the ranks that have none, and return the ranks that failed with the reason."""
        # One start at a time: a cell and the front end may attach at the same moment, and a debugger must not be
        # attached twice.
        async with self._starting:
            missing = [rank for rank in ranks if rank not in self._connections]
            troubles = await asyncio.gather(*(self._attach(rank) for rank in missing))
        return {rank: trouble for rank, trouble in zip(missing, troubles, strict=True) if trouble}

    async def close(self) -> None:
        """End the debuggers of all ranks, and give their breakpoints to the kernel's debugger.

        `adopt_breakpoints` of a later multiplexer takes them over from there.
        """
        await self._detach()
        for path, lines in self._breakpoints.items():
            await self._set_in_kernel(path, lines)

    async def _detach(self) -> None:
        async with self._starting:  # includes debuggers that are being attached
            await asyncio.gather(*(self._ask(rank, "disconnect", {}) for rank in self._connections))
            self._resume(tuple(self.stopped.threads))
            self._connections.clear()

    async def _attach(self, rank: int) -> str:
        # Registered before the first request, since responses are looked up by it.
        connection = self._connections[rank] = _RankDebugConnection()
        for command, arguments in self._start_requests(connection):
            answer = await self._ask(rank, command, arguments, timeout=_START_SECONDS)
            if not answer.get("success"):
                # The rank may have exited, and a new one have taken its number, while the request was under way.
                if self._connections.get(rank) is connection:
                    del self._connections[rank]
                return str(answer.get("message") or f"{command} failed")
        return ""

    def _start_requests(self, connection: _RankDebugConnection) -> Iterator[tuple[str, Message]]:
        """Yield the requests that start a rank's debugger.

        Their arguments are read when they are needed, since the user may set breakpoints meanwhile.
        """
        yield "initialize", {"clientID": "rankbook", "adapterID": "rankbook", "supportsVariableType": True}
        yield "attach", {}
        connection.ready = True  # from now on it receives changes like all others
        for path in tuple(self._breakpoints):
            yield "setBreakpoints", _breakpoints_at(path, self._breakpoints.get(path, []))
        if self._filters is not None:
            yield "setExceptionBreakpoints", self._filters
        yield "configurationDone", {}

    async def _ask(self, rank: int, command: str, arguments: Message, *, timeout: float = _SECONDS) -> Message:  # noqa: ASYNC109 - the timeout of a rank
        """Send a request to a rank and return its response, or an unsuccessful response on failure."""
        connection = self._connections.get(rank)
        if connection is None:
            return {"success": False, "message": f"rank {rank} has no debugger"}
        connection.seq += 1
        seq = connection.seq
        answer = connection.pending[seq] = asyncio.get_running_loop().create_future()
        request = {"type": "request", "seq": seq, "command": command, "arguments": arguments}
        try:
            if not self._gateway.send(rank, json.dumps(request)):
                return {"success": False, "message": f"rank {rank} has exited"}
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return {"success": False, "message": f"rank {rank} did not reply within {timeout:g} s"}
        except ConnectionError as error:
            return {"success": False, "message": str(error)}
        finally:
            connection.pending.pop(seq, None)

    async def move_breakpoints(self) -> None:
        """Move the breakpoints to where plain cells now run, after auto mode was turned on or off."""
        for path, lines in self._breakpoints.items():
            # `setBreakpoints` replaces all breakpoints of a file, so an empty list removes the kernel's.
            await self._set_in_kernel(path, [] if self._gateway.is_for_ranks(path) else lines)

    async def _set_in_kernel(self, path: str, lines: list[Message]) -> None:
        arguments = _breakpoints_at(path, lines)
        await self._stock.process({"type": "request", "seq": 0, "command": "setBreakpoints", "arguments": arguments})

    async def _ask_all(self, command: str, arguments: Message) -> dict[int, Message]:
        # Ranks that are being attached read the breakpoints themselves (`_start_requests`).
        ready = [rank for rank, connection in sorted(self._connections.items()) if connection.ready]
        answers = await asyncio.gather(*(self._ask(rank, command, arguments) for rank in ready))
        return dict(zip(ready, answers, strict=True))

    def _publish(self, events: Iterable[Message]) -> None:
        for event in events:
            self._gateway.publish(event)

    def _running(self) -> set[int]:
        return set(self._gateway.busy()) & self._connections.keys()

    def _resume(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._gateway.record_pause(rank, "", 0)
        self._publish(self.stopped.resume(ranks))

    def _start_location_query(self, rank: int) -> None:
        """Query in a task where a rank has stopped."""
        task = asyncio.get_running_loop().create_task(self._locate(rank))
        self._location_queries.add(task)
        task.add_done_callback(self._location_queries.discard)

    async def _locate(self, rank: int) -> None:
        thread = self.stopped.threads.get(rank)
        if thread is None:  # it has already resumed
            return
        # Recorded before the query, which may take `_SECONDS`: the status line shows the pause meanwhile.
        self._gateway.record_pause(rank, "", -1)
        answer = await self._ask(rank, "stackTrace", {"threadId": thread, "levels": 1})
        frames = (answer.get("body") or {}).get("stackFrames")
        # The rank may have resumed while the answer was under way.
        if frames and rank in self.stopped.threads:
            self._gateway.record_pause(rank, frames[0].get("source", {}).get("path", ""), frames[0]["line"])

    # The front end

    async def handle(self, request: Message) -> Message:
        """Return the response to a request of the front end."""
        command, arguments = request["command"], request.get("arguments") or {}
        # 1. A frame or variable of a rank: that rank's debugger.
        # 2. A command with a handler: the kernel's debugger and the ranks, as the command requires.
        # 3. Another command for the thread of a stopped rank: that rank's debugger.
        # 4. Everything else: the kernel's debugger.
        # Before `initialize` and after `disconnect`, all requests except for `initialize` and `debugInfo` take way 4.
        reference = next((arguments[key] for key in _REFERENCES if (arguments.get(key) or 0) >= REFERENCES), None)
        if self.is_active and reference is not None:
            return await self._on_rank(request, arguments, reference)
        handler = getattr(self, f"_on_{command.lower()}", None)
        if handler is not None and (self.is_active or command in {"initialize", "debugInfo"}):
            reply: Message = await handler(request, arguments)
            return reply
        rank = rank_of_thread(arguments.get("threadId"))
        if self.is_active and rank in self.stopped.threads:  # such as exceptionInfo
            answer = await self._ask(rank, command, {**arguments, "threadId": self.stopped.threads[rank]})
            return _response(request, answer.get("body") or {}, error=_error_of(answer))
        return await self._stock.process(request)

    async def _on_initialize(self, request: Message, arguments: Message) -> Message:
        reply = await self._stock.process(request)
        if reply.get("success"):
            self.is_active = True
            # A client names itself only in this request.
            self.stopped.one_view = arguments.get("clientID") == "jupyterlab"
            # `_move` handles `singleThread` itself, whatever the kernel's debugger supports.
            reply.setdefault("body", {})["supportsSingleThreadExecutionRequests"] = True
        return reply

    async def _on_attach(self, request: Message, _arguments: Message) -> Message:
        reply = await self._stock.process(request)
        # Ranks that fail here are tried again before the next cell (`Debugging.prepare`).
        await self.attach(self._gateway.ranks())
        return reply

    async def _on_disconnect(self, request: Message, _arguments: Message) -> Message:
        # First, so that no cell attaches another debugger while these disconnect.
        self.is_active = False
        await self._detach()
        self._breakpoints.clear()
        self._filters = None
        return await self._stock.process(request)

    async def _on_debuginfo(self, request: Message, _arguments: Message) -> Message:
        reply = await self._stock.process(request)
        body = reply.get("body") or {}
        # A page that was reloaded asks for the state. Breakpoints in a file may be known to both sides; they are listed
        # once.
        kernel_entries = [entry for entry in body.get("breakpoints", ()) if entry["source"] not in self._breakpoints]
        rank_entries = [
            {"source": path, "breakpoints": [{"line": line["line"]} for line in lines]}
            for path, lines in self._breakpoints.items()
            if lines
        ]
        threads = [*(THREADS + rank for rank in sorted(self.stopped.threads)), *body.get("stoppedThreads", ())]
        return {**reply, "body": {**body, "breakpoints": [*kernel_entries, *rank_entries], "stoppedThreads": threads}}

    async def _on_setbreakpoints(self, request: Message, arguments: Message) -> Message:
        path, lines = arguments["source"]["path"], arguments.get("breakpoints") or []
        # Also for ranks that start later, and for files that now run in the notebook.
        self._breakpoints[path] = lines
        answers = await self._ask_all("setBreakpoints", _breakpoints_at(path, lines))
        if not self._gateway.is_for_ranks(path):
            return await self._stock.process(request)
        # The ranks run the same code, so one successful answer says where the breakpoints are. Without one they are
        # placed as asked.
        breakpoints = next(
            (answer["body"]["breakpoints"] for answer in answers.values() if answer.get("success")), lines
        )
        placed = [
            {"verified": True, "line": after.get("line", before["line"]), "source": arguments["source"]}
            for before, after in zip(lines, breakpoints, strict=True)
        ]
        return _response(request, {"breakpoints": placed})

    async def _on_setexceptionbreakpoints(self, request: Message, arguments: Message) -> Message:
        self._filters = arguments
        await self._ask_all("setExceptionBreakpoints", arguments)
        return await self._stock.process(request)

    async def _on_inspectvariables(self, request: Message, _arguments: Message) -> Message:
        """Answer the request for variables that a front end sends while no thread is paused."""
        variables = None if self.stopped.threads else await self._gateway.variables(self.stopped.selected_rank or 0)
        return await self._stock.process(request) if variables is None else _response(request, {"variables": variables})

    async def _on_richinspectvariables(self, request: Message, arguments: Message) -> Message:
        """Answer with a variable's display formats while no thread is paused.

        A request for a variable of a frame names the frame, and is answered by `_rich_variable`.
        """
        name, rank = str(arguments["variableName"]), self.stopped.selected_rank or 0
        paused = self.stopped.threads or self._stock.paused
        formats = None if paused else await self._gateway.display_bundle(rank, name)
        return await self._stock.process(request) if formats is None else _response(request, formats)

    async def _on_threads(self, request: Message, _arguments: Message) -> Message:
        reply = await self._stock.process(request)
        ranks = [{"id": THREADS + rank, "name": f"rank {rank}"} for rank in sorted(self._connections)]
        body = reply.get("body") or {}
        return {**reply, "success": True, "body": {**body, "threads": [*ranks, *body.get("threads", ())]}}

    async def _on_stacktrace(self, request: Message, arguments: Message) -> Message:
        """Return the frames of one rank, or of all paused ranks if the front end has one view for all threads."""
        stopped, rank = self.stopped, rank_of_thread(arguments.get("threadId"))
        if not stopped.threads or (rank < 0 and not stopped.one_view):
            return await self._stock.process(request)
        # The call also marks the front end's call stack as filled.
        ranks = stopped.call_stack() if stopped.one_view else [rank]
        answers = await asyncio.gather(
            *(
                self._ask(frame_rank, "stackTrace", {**arguments, "threadId": stopped.threads.get(frame_rank)})
                for frame_rank in ranks
            )
        )
        frames, total = [], 0
        # A rank may have resumed while its answer was under way; its frames are then invalid.
        for frame_rank, answer in zip(ranks, answers, strict=True):
            body = (answer.get("body") or {}) if answer.get("success") and frame_rank in stopped.threads else {}
            frames += stopped.references.translate(frame_rank, "stackTrace", body).get("stackFrames", [])
            total += body.get("totalFrames", 0)  # the request may be for only some of them
        if rank < 0 and self._stock.paused:
            kernel_stack = (await self._stock.process(request)).get("body") or {}
            frames, total = [*kernel_stack.get("stackFrames", ()), *frames], total + kernel_stack.get("totalFrames", 0)
        return _response(request, {"stackFrames": frames, "totalFrames": max(total, len(frames))})

    async def _move(self, request: Message, arguments: Message) -> Message:
        thread = arguments.get("threadId")
        ranks = self.stopped.targets(thread, single=bool(arguments.get("singleThread")))
        targets = {rank: self.stopped.threads[rank] for rank in ranks}
        to_notebook = rank_of_thread(thread) < 0 and (self._stock.paused or not targets)
        # Publish `continued` first: a rank may stop again before the last one gets its request.
        self._resume(targets)
        # The notebook moves before the ranks: while it is paused, it may be what receives their messages.
        reply = await self._stock.process(request) if to_notebook else None
        answers = await asyncio.gather(
            *(
                self._ask(rank, request["command"], {**arguments, "threadId": rank_thread})
                for rank, rank_thread in targets.items()
            )
        )
        if reply is not None:
            return reply
        error = next(filter(None, map(_error_of, answers)), "")
        return _response(request, {"allThreadsContinued": not self.stopped.threads}, error=error)

    _on_continue = _on_next = _on_stepin = _on_stepout = _move

    async def _on_pause(self, request: Message, arguments: Message) -> Message:
        rank = rank_of_thread(arguments.get("threadId"))
        is_single = rank >= 0 and (self.stopped.single or not self.stopped.one_view)
        targets = [rank] if is_single else sorted(self._running())
        if not targets:
            return await self._stock.process(request)
        errors: dict[int, str] = {}
        for target in targets:
            answer = await self._ask(target, "threads", {})
            # Cells run on the rank's main thread, whose number only its debugger knows.
            threads = (answer.get("body") or {}).get("threads", ())
            main = next((thread["id"] for thread in threads if thread["name"] == "MainThread"), None)
            if main is not None:
                errors[target] = _error_of(await self._ask(target, "pause", {"threadId": main}))
        text = "; ".join(f"rank {target}: {error}" for target, error in errors.items())
        return _response(request, {}, error="" if "" in errors.values() else text)

    async def _on_rank(self, request: Message, arguments: Message, reference: int) -> Message:
        """Answer a request about a frame or a variable of a rank."""
        command, origin = request["command"], self.stopped.references.find(reference)
        if origin is None:
            return _response(request, _EMPTY_BODIES.get(command, {}), error="the rank has resumed since then")
        rank, number = origin
        self.stopped.selected_rank = rank
        if command == "richInspectVariables":
            return await self._rich_variable(request, rank, number)
        if command == "copyToGlobals":
            source, target = str(arguments["srcVariableName"]), str(arguments["dstVariableName"])
            if not (source.isidentifier() and target.isidentifier()):  # both are evaluated on the rank
                return _response(request, {}, error="only variables can be copied to globals")
            rank_command, rank_arguments = (
                "setExpression",
                {"expression": f"globals()['{target}']", "value": source, "frameId": number},
            )
        else:
            keys = {key for key in _REFERENCES if arguments.get(key) == reference}
            rank_command, rank_arguments = command, {**arguments, **dict.fromkeys(keys, number)}
        answer = await self._ask(rank, rank_command, rank_arguments)
        body = self.stopped.references.translate(rank, rank_command, answer.get("body") or {})
        if command == "variables":
            body["variables"] = [
                variable for variable in body.get("variables", ()) if self._stock.accepts(variable["name"])
            ]
        return _response(request, body or _EMPTY_BODIES.get(command, {}), error=_error_of(answer))

    async def _rich_variable(self, request: Message, rank: int, frame: int) -> Message:
        """Answer with a variable's display formats, as ipykernel's debugger does."""
        # The name becomes part of an expression. Other names, such as those of items, get an empty answer, as from
        # ipykernel.
        name = request["arguments"]["variableName"]
        if not name.isidentifier():
            return _response(request, {"data": {}, "metadata": {}})
        expression = f"get_ipython().display_formatter.format({name})"
        arguments = {"expression": expression, "frameId": frame, "context": "clipboard"}
        return _response(request, _parse_formats(await self._ask(rank, "evaluate", arguments)))


def _response(request: Message, body: Message, *, error: str = "") -> Message:
    """Return the response to `request`, an unsuccessful one if there is an `error`."""
    header = {"type": "response", "seq": request["seq"], "request_seq": request["seq"], "command": request["command"]}
    return {**header, "success": not error, **({"message": error} if error else {}), "body": body}


def _error_of(answer: Message) -> str:
    """Return why a rank's request failed; "" if it did not."""
    return "" if answer.get("success") else str(answer.get("message") or "the request failed")


def _breakpoints_at(path: str, lines: list[Message]) -> Message:
    """Return the arguments of `setBreakpoints`."""
    return {"source": {"path": path}, "breakpoints": lines}


def _parse_formats(answer: Message) -> Message:
    """Return the data and metadata that IPython's `format` returned on a rank; empty ones for anything else."""
    data: Message = {}
    metadata: Message = {}
    # The result is the `repr` of a tuple of two dicts. `literal_eval` runs none of it.
    with contextlib.suppress(ValueError, SyntaxError, KeyError):
        data, metadata = ast.literal_eval(answer["body"]["result"])
    return {"data": data, "metadata": {key: value for key, value in metadata.items() if key in data}}


Message = dict[str, Any]

THREADS = 1 << 20
"""Thread number of rank 0, far above those of the kernel's own threads."""
REFERENCES = 1 << 30
"""First number for a rank's frames and variables; the protocol allows numbers below 2**31."""

_REFERENCE_FIELDS = {
    # command: the list in its response's body that has references ("" for the body itself), and their field
    "stackTrace": ("stackFrames", "id"),
    "scopes": ("scopes", "variablesReference"),
    "variables": ("variables", "variablesReference"),
    "evaluate": ("", "variablesReference"),
    "setVariable": ("", "variablesReference"),
    "setExpression": ("", "variablesReference"),
}


class ReferenceMap:
    """Translate the ranks' references to frames and variables into unique ones for the front end."""

    def __init__(self) -> None:
        self._references: dict[tuple[int, int], int] = {}
        self._ranks: dict[int, tuple[int, int]] = {}
        self._next = REFERENCES

    def add(self, rank: int, reference: int) -> int:
        """Return our reference for a rank's; 0 means no reference and stays 0."""
        if not reference:
            return 0
        if (rank, reference) not in self._references:
            self._references[rank, reference] = self._next
            self._ranks[self._next] = (rank, reference)
            self._next += 1
        return self._references[rank, reference]

    def find(self, reference: int) -> tuple[int, int] | None:
        """Return the rank and the rank's reference for one of ours; None if the rank has resumed since."""
        return self._ranks.get(reference)

    def drop(self, rank: int) -> None:
        """Drop a rank's references, which become invalid when it resumes."""
        for key in [key for key in self._references if key[0] == rank]:
            del self._ranks[self._references.pop(key)]

    def translate(self, rank: int, command: str, body: Message) -> Message:
        """Replace the references in a rank's response, and name the rank in its frames."""
        key, field = _REFERENCE_FIELDS.get(command, ("", ""))
        for item in body.get(key, ()) if key else (body,):
            if field in item:
                item[field] = self.add(rank, item[field])
            if command == "stackTrace":
                item["name"] = f"rank {rank} · {item['name']}"
        return body


class StoppedThreads:
    """The stopped ranks with their debuggers' thread numbers, in the order in which they stopped.

    `one_view`: the front end has one call stack for all threads. `single`: continue and step move one rank.
    `selected_rank`: the rank whose frames or variables the front end requested last.
    """

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}
        self.references = ReferenceMap()
        self.one_view = False
        self.single = False
        self.selected_rank: int | None = None
        self._is_empty = True  # JupyterLab's call stack
        self._seq = 0

    def stop(self, rank: int, body: Message) -> list[Message]:
        """Handle a rank's `stopped` event; return the events for the front end."""
        self.references.drop(rank)
        # Removed first, so that the rank moves to the end: the dict has the order of the stops.
        self.threads.pop(rank, None)
        self.threads[rank] = body["threadId"]
        fields: Message = {key: body[key] for key in ("reason", "text", "preserveFocusHint") if key in body}
        stopped = self._stopped(rank, {"reason": "breakpoint", **fields})
        # If one rank moves alone, JupyterLab shows another one meanwhile; `continued` makes it return to this one.
        return [self._continued(rank), stopped] if self.one_view and self.single else [stopped]

    def resume(self, ranks: Iterable[int]) -> list[Message]:
        """Handle that these ranks run again, as far as they were stopped; return the events for the front end."""
        resumed = [rank for rank in ranks if self.threads.pop(rank, None) is not None]
        for rank in resumed:
            self.references.drop(rank)
        self._is_empty = self._is_empty or bool(resumed)
        events = [self._continued(rank) for rank in resumed]
        if resumed and self.threads and self.one_view:  # to fill its call stack, which `continued` has cleared
            events.append(self._stopped(min(self.threads), {"reason": "pause", "preserveFocusHint": True}))
        return events

    def call_stack(self) -> list[int]:
        """Return the ranks in the order in which one view lists their frames.

        The order is by rank, so that the rows keep their place while more ranks stop. An empty view selects the first
        frame: it gets the chosen rank first, or with `single` the rank that stopped last.
        """
        first = next(reversed(self.threads), None) if self.single else self.selected_rank if self._is_empty else None
        self._is_empty = False
        return sorted(self.threads, key=lambda rank: (rank != first, rank))

    def targets(self, thread: int | None, *, single: bool) -> list[int]:
        """Return the stopped ranks that a request to move `thread` applies to: all, or one if `single`.

        JupyterLab names the thread that stopped last, whatever frame is selected; there the chosen rank is moved.
        """
        ranks = sorted(self.threads)
        if not (single or self.single):
            return ranks
        rank = self.selected_rank if self.one_view else rank_of_thread(thread)
        return [rank] if rank in self.threads else ranks[:1]

    def _continued(self, rank: int) -> Message:
        return self._event("continued", {"threadId": THREADS + rank, "allThreadsContinued": False})

    def _stopped(self, rank: int, body: Message) -> Message:
        thread = {"threadId": THREADS + rank, "allThreadsStopped": False, "description": f"rank {rank}"}
        return self._event("stopped", {**body, **thread})

    def _event(self, name: str, body: Message) -> Message:
        self._seq += 1
        return {"type": "event", "seq": self._seq, "event": name, "body": body}


def rank_of_thread(thread: int | None) -> int:
    """Return the rank whose thread has this number in the front end; -1 for a thread of the kernel."""
    return thread - THREADS if thread is not None and thread >= THREADS else -1
