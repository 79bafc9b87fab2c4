"""Test who answers the requests of a front end's debugger, with fake ranks and no process."""

from __future__ import annotations

import asyncio
import json

import pytest

from rankbook.magics import debug_multiplexer
from rankbook.magics.debug_multiplexer import REFERENCES, THREADS, DebugMultiplexer

CELL, MODULE = "/tmp/ipykernel_1/2.py", "/home/me/train.py"


class FakeStock:
    """The notebook's own debugger."""

    def __init__(self):
        self.asked, self.paused, self.placed = [], False, {}

    async def process(self, request):
        self.asked.append(request["command"])
        if request["command"] == "setBreakpoints":
            self.placed[request["arguments"]["source"]["path"]] = request["arguments"]["breakpoints"]
        body = {
            "debugInfo": {"breakpoints": [], "stoppedThreads": [], "hashSeed": 7},
            "threads": {"threads": [{"id": 1, "name": "MainThread"}]},
            "stackTrace": {"stackFrames": [{"id": 3, "name": "local", "line": 1}]},
        }.get(request["command"], {"own": True})
        return {"type": "response", "command": request["command"], "success": True, "body": body}

    def accepts(self, name):
        return not name.startswith("_i")


class FakeRanks:
    """Ranks whose debuggers answer at once, but for those in `mute`; the way to them and to the front end."""

    def __init__(self, count):
        self.count, self.mute, self.gone, self.running = count, set(), set(), ()
        self.requests, self.events, self.notes = [], [], {}
        self.multiplexer, self.auto, self.refused = None, True, {}

    def ranks(self):
        return tuple(range(self.count))

    def busy(self):
        return self.running

    def send(self, rank, content):
        request = json.loads(content)
        command, arguments = request["command"], request["arguments"]
        self.requests.append((rank, command, arguments))
        if rank in self.gone:
            return False
        if rank not in self.mute:
            body = {
                "setBreakpoints": {"breakpoints": [dict(argument) for argument in arguments.get("breakpoints", ())]},
                "stackTrace": {
                    "stackFrames": [{"id": 5, "name": "f", "line": 4, "source": {"path": CELL}}],
                    "totalFrames": 30,
                },
                "scopes": {"scopes": [{"name": "Locals", "variablesReference": 6}]},
                "variables": {"variables": [{"name": n, "variablesReference": 0} for n in ("a", "_i1")]},
                "threads": {"threads": [{"id": 8, "name": "other"}, {"id": 9, "name": "MainThread"}]},
                "evaluate": {
                    "result": "({'text/plain': '1', 'image/png': b'x'}, {'gone': {}})",
                    "variablesReference": 0,
                },
            }.get(command, {})
            answer = {"type": "response", "request_seq": request["seq"], "success": True, "body": body}
            if command in self.refused:
                answer |= {"success": False, "message": self.refused[command]}
            self.say(rank, answer)
        return True

    def say(self, rank, message):
        asyncio.get_running_loop().call_soon(
            self.multiplexer.message_received, rank, json.dumps(message) if message else ""
        )

    def stop(self, *ranks):
        for rank in ranks:
            body = {"threadId": rank + 40, "reason": "breakpoint"}
            self.say(rank, {"type": "event", "event": "stopped", "body": body})

    def publish(self, event):
        self.events.append((event["event"], event["body"]["threadId"] - THREADS))

    def record_pause(self, rank, path, line):
        self.notes[rank] = (path, line)

    def is_for_ranks(self, path):
        return path == CELL and self.auto

    async def variables(self, rank):
        return [{"name": f"of_{rank}"}] if self.auto else None

    async def display_bundle(self, rank, name):
        return {"data": {"text/plain": f"{name} of {rank}"}, "metadata": {}} if self.auto else None

    def commands(self, rank):
        return [command for recipient, command, _ in self.requests if recipient == rank]


def run_scenario(play, *, count=2, client="jupyterlab"):
    """Run `play(multiplexer, ranks, stock, ask)` with an initialized multiplexer."""

    async def run():
        stock, ranks = FakeStock(), FakeRanks(count)
        multiplexer = ranks.multiplexer = DebugMultiplexer(stock, ranks)

        async def ask(command, **arguments):
            request = {"type": "request", "seq": 99, "command": command, "arguments": arguments}
            reply = await multiplexer.handle(request)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return reply

        await ask("initialize", clientID=client)
        await ask("attach")
        ranks.requests.clear()
        await play(multiplexer, ranks, stock, ask)

    asyncio.run(run())


async def settle():
    for _ in range(12):
        await asyncio.sleep(0)


def test_debugger_of_the_notebook_answers_until_ranks_are_debugged():
    async def run():
        stock, ranks = FakeStock(), FakeRanks(2)
        multiplexer = ranks.multiplexer = DebugMultiplexer(stock, ranks)
        reply = await multiplexer.handle({"type": "request", "seq": 1, "command": "inspectVariables", "arguments": {}})
        assert reply["body"] == {"own": True} and not ranks.requests
        reply = await multiplexer.handle({"type": "request", "seq": 2, "command": "debugInfo"})
        assert reply["body"] == {"breakpoints": [], "stoppedThreads": [], "hashSeed": 7}

    asyncio.run(run())


def test_breakpoints_of_a_cell_for_the_ranks_are_theirs_alone_and_reach_those_that_come_later():
    async def play(multiplexer, ranks, stock, ask):
        stock.asked.clear()
        reply = await ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 3}])
        assert reply["body"]["breakpoints"] == [{"verified": True, "line": 3, "source": {"path": CELL}}]
        assert stock.asked == [], "in the notebook the cell is a single call, which nobody wants to stop at"
        await ask("setBreakpoints", source={"path": MODULE}, breakpoints=[{"line": 8}])
        await ask("setExceptionBreakpoints", filters=["raised"])
        assert stock.asked == ["setBreakpoints", "setExceptionBreakpoints"], "a module may be imported anywhere"
        assert ranks.commands(1) == ["setBreakpoints", "setBreakpoints", "setExceptionBreakpoints"]
        info = (await ask("debugInfo"))["body"]
        assert {"source": CELL, "breakpoints": [{"line": 3}]} in info["breakpoints"] and info["hashSeed"] == 7
        ranks.count = 3
        assert await multiplexer.attach((0, 1, 2)) == {}
        placed = [arguments for rank, command, arguments in ranks.requests if (rank, command) == (2, "setBreakpoints")]
        assert [item["source"]["path"] for item in placed] == [CELL, MODULE]
        assert [element["breakpoints"] for element in placed] == [[{"line": 3}], [{"line": 8}]]
        last = [
            "initialize",
            "attach",
            "setBreakpoints",
            "setBreakpoints",
            "setExceptionBreakpoints",
            "configurationDone",
        ]
        assert ranks.commands(2) == last

    run_scenario(play)


def test_a_breakpoint_that_is_set_while_a_rank_gets_its_debugger_reaches_it():
    async def play(multiplexer, ranks, stock, ask):
        await ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 3}])
        ranks.mute.add(2)
        attached = asyncio.ensure_future(multiplexer.attach((2,)))
        await settle()
        await ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 4}])
        await ask("setBreakpoints", source={"path": MODULE}, breakpoints=[{"line": 8}])
        ranks.mute.clear()
        ranks.say(2, {"type": "response", "request_seq": 1, "success": True})
        assert await attached == {}
        placed = {
            a["source"]["path"]: a["breakpoints"] for r, c, a in ranks.requests if (r, c) == (2, "setBreakpoints")
        }
        assert placed == {CELL: [{"line": 4}], MODULE: [{"line": 8}]}

    run_scenario(play)


def test_breakpoints_and_variables_follow_auto_mode():
    async def play(multiplexer, ranks, stock, ask):
        await ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 3}])
        assert stock.placed == {}
        assert (await ask("inspectVariables"))["body"] == {"variables": [{"name": "of_0"}]}
        assert (await ask("richInspectVariables", variableName="x"))["body"]["data"] == {"text/plain": "x of 0"}
        ranks.auto = False
        assert (await ask("richInspectVariables", variableName="x"))["body"] == {"own": True}
        await multiplexer.move_breakpoints()
        assert stock.placed == {CELL: [{"line": 3}]}
        assert (await ask("inspectVariables"))["body"] == {"own": True}
        ranks.auto = True
        await multiplexer.move_breakpoints()
        assert stock.placed == {CELL: []}
        ranks.stop(1)
        await settle()
        assert (await ask("inspectVariables"))["body"] == {"own": True}, "it would not say which frame's"

    run_scenario(play)


def test_one_view_shows_the_frames_of_all_paused_ranks_and_looking_at_one_chooses_it():
    async def play(multiplexer, ranks, stock, ask):
        ranks.stop(1, 0)
        await settle()
        assert ranks.events == [("stopped", 1), ("stopped", 0)]
        assert ranks.notes == {0: (CELL, 4), 1: (CELL, 4)}
        assert (await ask("debugInfo"))["body"]["stoppedThreads"] == [THREADS, THREADS + 1]
        frames = (await ask("stackTrace", threadId=1))["body"]["stackFrames"]
        assert [frame["name"] for frame in frames] == ["rank 0 · f", "rank 1 · f"]
        scopes = (await ask("scopes", frameId=frames[0]["id"]))["body"]["scopes"]
        assert ranks.requests[-1] == (0, "scopes", {"frameId": 5})
        response = await ask("variables", variablesReference=scopes[0]["variablesReference"])
        assert ranks.requests[-1] == (0, "variables", {"variablesReference": 6})
        assert [item["name"] for item in response["body"]["variables"]] == ["a"], "as in the notebook"
        frames = (await ask("stackTrace", threadId=THREADS + 1))["body"]["stackFrames"]
        assert [element["name"] for element in frames] == ["rank 0 · f", "rank 1 · f"]
        rich = await ask("richInspectVariables", variableName="a", frameId=frames[0]["id"])
        assert rich["body"] == {"data": {"text/plain": "1", "image/png": b"x"}, "metadata": {}}
        await ask("copyToGlobals", srcVariableName="a", dstVariableName="b", srcFrameId=frames[0]["id"])
        assert ranks.requests[-1] == (0, "setExpression", {"expression": "globals()['b']", "value": "a", "frameId": 5})
        refused = await ask("copyToGlobals", srcVariableName="a.b", dstVariableName="b", srcFrameId=frames[0]["id"])
        assert not refused["success"]
        await ask("scopes", frameId=frames[1]["id"])
        await ask("continue", threadId=THREADS)
        ranks.stop(0, 1)
        await settle()
        frames = (await ask("stackTrace", threadId=THREADS + 1))["body"]["stackFrames"]
        assert [entry["name"] for entry in frames] == ["rank 1 · f", "rank 0 · f"]

    run_scenario(play)


def test_a_client_that_knows_threads_has_one_for_every_rank():
    async def play(multiplexer, ranks, stock, ask):
        ranks.stop(0, 1)
        await settle()
        threads = (await ask("threads"))["body"]["threads"]
        assert [thread["name"] for thread in threads] == ["rank 0", "rank 1", "MainThread"]
        stack = (await ask("stackTrace", threadId=THREADS + 1, levels=1))["body"]
        assert [item["name"] for item in stack["stackFrames"]] == ["rank 1 · f"]
        assert stack["totalFrames"] == 30, "or nobody would ask for the others"
        assert (await ask("exceptionInfo", threadId=THREADS + 1))["success"]
        assert ranks.requests[-1] == (1, "exceptionInfo", {"threadId": 41})
        frames = (await ask("stackTrace", threadId=1))["body"]["stackFrames"]
        assert [frame["name"] for frame in frames] == ["local"]
        await ask("next", threadId=THREADS + 1, singleThread=True)
        assert ranks.requests[-1] == (1, "next", {"threadId": 41, "singleThread": True})
        assert list(multiplexer.stopped.threads) == [0]

    run_scenario(play, client="vscode")


def test_continued_event_for_all_ranks_precedes_their_next_stops():
    async def play(multiplexer, ranks, stock, ask):
        ranks.stop(0, 1)
        await settle()
        ranks.events.clear()
        reply = await ask("next", threadId=1)
        assert reply["success"] and ranks.events == [("continued", 0), ("continued", 1)]
        moved = [(rank, arguments) for rank, command, arguments in ranks.requests if command == "next"]
        assert moved == [(0, {"threadId": 40}), (1, {"threadId": 41})]
        assert ranks.notes == {0: ("", 0), 1: ("", 0)}
        ranks.say(0, {"type": "event", "event": "continued", "body": {"threadId": 40}})
        ranks.stop(0)
        ranks.say(1, {"type": "event", "event": "continued", "body": {"threadId": 41}})
        await settle()
        assert ranks.events[2:] == [("stopped", 0)], "or what is shown of rank 0 would be cleared"

    run_scenario(play)


def test_a_rank_that_stops_and_goes_on_at_once_is_looked_for_no_more():
    async def play(multiplexer, ranks, stock, ask):
        event = {"type": "event", "event": "stopped", "body": {"threadId": 40, "reason": "breakpoint"}}
        multiplexer.message_received(0, json.dumps(event))
        multiplexer.message_received(0, json.dumps({"type": "event", "event": "continued", "body": {"threadId": 40}}))
        await settle()
        assert ranks.commands(0) == [] and ranks.notes == {0: ("", 0)}

    run_scenario(play)


def test_moves_of_the_chosen_rank_leave_the_others_paused():
    async def play(multiplexer, ranks, stock, ask):
        multiplexer.stopped.single = True
        ranks.stop(0, 1)
        await settle()
        frames = (await ask("stackTrace", threadId=1))["body"]["stackFrames"]
        assert [frame["name"] for frame in frames] == ["rank 1 · f", "rank 0 · f"], "the last one that stopped first"
        await ask("scopes", frameId=frames[1]["id"])
        await ask("scopes", frameId=frames[0]["id"])
        ranks.events.clear()
        reply = await ask("continue", threadId=THREADS)
        assert ranks.requests[-1][:2] == (1, "continue"), "the one whose frame is selected"
        assert not reply["body"]["allThreadsContinued"]
        assert ranks.events == [("continued", 1), ("stopped", 0)]
        late = await ask("variables", variablesReference=frames[0]["id"])
        assert not late["success"] and late["body"] == {"variables": []}

    run_scenario(play)


def test_pause_is_for_the_ranks_that_run_and_else_for_the_notebook():
    async def play(multiplexer, ranks, stock, ask):
        stock.asked.clear()
        await ask("pause", threadId=1)
        assert stock.asked == ["pause"]
        ranks.running = (0, 1)
        await ask("pause", threadId=1)
        assert [item for item in ranks.requests if item[1] == "pause"] == [
            (0, "pause", {"threadId": 9}), (1, "pause", {"threadId": 9}),
        ]  # fmt: skip
        assert stock.asked == ["pause"]
        ranks.refused = {"pause": "the rank is idle"}
        reply = await ask("pause", threadId=1)
        assert reply["message"] == "rank 0: the rank is idle; rank 1: the rank is idle" and not reply["success"]

    run_scenario(play)


def test_the_notebook_may_be_paused_itself():
    async def play(multiplexer, ranks, stock, ask):
        stock.asked.clear()
        assert [item["name"] for item in (await ask("stackTrace", threadId=1))["body"]["stackFrames"]] == ["local"]
        await ask("continue", threadId=1)
        assert stock.asked == ["stackTrace", "continue"]
        stock.paused = True
        ranks.stop(1)
        await settle()
        frames = (await ask("stackTrace", threadId=1))["body"]["stackFrames"]
        assert [frame["name"] for frame in frames] == ["local", "rank 1 · f"]
        await ask("scopes", frameId=3)
        assert stock.asked[-1] == "scopes"
        await ask("next", threadId=1)
        assert stock.asked[-1] == "next" and (1, "next", {"threadId": 41}) in ranks.requests

    run_scenario(play)


def test_lost_rank_is_not_paused_and_gets_a_debugger_after_its_restart():
    async def play(multiplexer, ranks, stock, ask):
        ranks.stop(0, 1)
        await settle()
        ranks.events.clear()
        ranks.mute.add(1)
        request = asyncio.ensure_future(ask("stackTrace", threadId=1))
        await settle()
        multiplexer.rank_exited(1)
        frames = (await request)["body"]["stackFrames"]
        assert [frame["name"] for frame in frames] == ["rank 0 · f"], "and nobody waits for it"
        assert ranks.events == [("continued", 1), ("stopped", 0)] and ranks.notes[1] == ("", 0)
        ranks.mute.clear()
        ranks.requests.clear()
        assert await multiplexer.attach((0, 1)) == {}
        assert ranks.commands(0) == [] and "configurationDone" in ranks.commands(1)

    run_scenario(play)


def test_a_rank_without_a_debugger_is_reported_with_and_asked_for_nothing(monkeypatch):
    monkeypatch.setattr(debug_multiplexer, "_START_SECONDS", 0.05)

    async def play(multiplexer, ranks, stock, ask):
        ranks.count = 4
        ranks.gone, ranks.mute = {2}, {3}
        reported = await multiplexer.attach((0, 1, 2, 3))
        assert reported == {2: "rank 2 has exited", 3: "rank 3 did not reply within 0.05 s"}
        ranks.requests.clear()
        await ask("setBreakpoints", source={"path": CELL}, breakpoints=[])
        assert {rank for rank, _, _ in ranks.requests} == {0, 1}

    run_scenario(play)


def test_a_disconnect_lets_all_go_on_and_forgets_the_breakpoints():
    async def play(multiplexer, ranks, stock, ask):
        await ask("setBreakpoints", source={"path": CELL}, breakpoints=[{"line": 3}])
        ranks.stop(0)
        await settle()
        await ask("disconnect")
        assert not multiplexer.is_active and stock.asked[-1] == "disconnect"
        assert ranks.commands(0)[-1] == ranks.commands(1)[-1] == "disconnect"
        assert ranks.events[-1] == ("continued", 0)
        ranks.requests.clear()
        await ask("initialize", clientID="jupyterlab")
        await ask("attach")
        assert ranks.commands(0) == ["initialize", "attach", "configurationDone"]

    run_scenario(play)


@pytest.mark.parametrize("handle", [REFERENCES, REFERENCES + 1000])
def test_a_frame_of_long_ago_is_nobodys(handle):
    async def play(multiplexer, ranks, stock, ask):
        stock.asked.clear()
        reply = await ask("scopes", frameId=handle)
        assert reply["body"] == {"scopes": []} and not reply["success"] and not stock.asked

    run_scenario(play)
