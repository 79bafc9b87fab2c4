"""The form of what a front end's debugger is answered, in the Debug Adapter Protocol's words.

Owns: answers of ours, and what is read from a rank's. Refuses: to know who is asked.
"""

from __future__ import annotations

import ast
import contextlib

from rankbook.magics.pauses import Message

EMPTY: dict[str, Message] = {
    # what a front end finds where there is nothing any more; it would stumble over a body without it
    "stackTrace": {"stackFrames": [], "totalFrames": 0},
    "scopes": {"scopes": []},
    "variables": {"variables": []},
}


def respond(request: Message, body: Message, *, trouble: str = "") -> Message:
    """The answer to `request`; an unsuccessful one, where there is `trouble`."""
    told = {"type": "response", "seq": request["seq"], "request_seq": request["seq"], "command": request["command"]}
    return {**told, "success": not trouble, **({"message": trouble} if trouble else {}), "body": body}


def trouble_of(answer: Message) -> str:
    """Why an answer is no good one; "" for one that is."""
    return "" if answer.get("success") else str(answer.get("message") or "the request failed")


def placed_at(path: str, lines: list[Message]) -> Message:
    """The arguments that place breakpoints."""
    return {"source": {"path": path}, "breakpoints": lines}


def as_bundle(answer: Message) -> Message:
    """What IPython's `format` gave on a rank, as the body that shows it; an empty one for anything else."""
    data: Message = {}
    metadata: Message = {}
    with contextlib.suppress(ValueError, SyntaxError, KeyError):
        data, metadata = ast.literal_eval(answer["body"]["result"])
    return {"data": data, "metadata": {key: value for key, value in metadata.items() if key in data}}
