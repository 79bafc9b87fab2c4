"""Draws the wire's messages and the coordinator's states from the code's own tables: `python docs/draw.py`.

Owns: docs/wire.md and docs/states.md. Refuses: to say anything that the code does not. tests/test_docs.py compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import get_args

import msgspec

from rankbook.coordinator import actions, events
from rankbook.coordinator import states as tables
from rankbook.protocol import messages

FOLDER = Path(__file__).resolve().parent
MADE = "<!-- Made by docs/draw.py from the code; change that, and run it again. -->"
WIRE_INTRODUCTION = """\
Every message is a frozen `msgspec` struct of `rankbook.protocol.messages` or a module that it imports, sent as
MessagePack and tagged with its name. An unknown name, an unknown field or a wrong type is a `ProtocolError`, never
ignored."""
STATES_INTRODUCTION = """\
`rankbook.coordinator.state_machine` decides what each rank and each cell may do next. Events go in, actions come
out; it knows no socket, process, thread or clock. The tables are the whole of it: `–` is an
`IllegalTransition`, which tells the last events and means a bug in Rankbook."""


def wire() -> str:
    """Every message, by direction, with its fields."""
    directions = [
        ("Notebook to rank", messages.ToRank),
        ("Rank to notebook", messages.FromRank),
        ("Notebook to forkserver", messages.ToForkserver),
        ("Forkserver to notebook", messages.FromForkserver),
    ]
    parts = [
        MADE,
        "# The wire's messages",
        WIRE_INTRODUCTION,
    ]
    for title, union in directions:
        parts.append(f"## {title}")
        parts += [_struct(struct) for struct in get_args(union)]
    parts.append("## What messages are made of")
    parts += [_struct(struct) for struct in _own_classes(messages, msgspec.Struct) if not _is_message(struct)]
    return "\n\n".join(parts) + "\n"


def states() -> str:
    """Both state machines as diagrams and as tables, with what goes in and what comes out."""
    parts = [
        MADE,
        "# The coordinator's states",
        STATES_INTRODUCTION,
    ]
    machines = [
        ("A rank", tables.RankEntry, tables.RankStep, tables.RANK_TABLE),
        ("A cell", tables.CellEntry, tables.CellStep, tables.CELL_TABLE),
    ]
    for title, holder, steps, rows in machines:
        start = next(each.default for each in dataclasses.fields(holder) if each.name == "state")
        parts += [f"## {title}", _docstring(type(start)), _diagram(start, rows), _transitions(list(steps), rows)]
    for title, module in (("Events: what goes in", events), ("Actions: what comes out", actions)):
        rows = [[f"`{_signature(each)}`", _docstring(each)] for each in _own_classes(module, object)]
        parts += [f"## {title}", _table(["", ""], rows)]
    return "\n\n".join(parts) + "\n"


def _is_message(struct: type) -> bool:
    return issubclass(struct, messages.Message)


def _own_classes(module: object, base: type) -> list[type]:
    classes = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, base)]
    return [each for each in classes if each.__module__ == module.__name__]


def _docstring(thing: type) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _struct(struct: type[msgspec.Struct]) -> str:
    heading = f"### {struct.__name__}\n\n{_docstring(struct)}"
    annotations = {
        name: each for base in reversed(struct.__mro__) for name, each in vars(base).get("__annotations__", {}).items()
    }
    rows = []
    for field in msgspec.structs.fields(struct):
        default = "" if field.required else f"`{field.default!r}`"
        rows.append([f"`{field.name}`", f"`{annotations[field.name]}`", default])
    return f"{heading}\n\n{_table(['field', 'type', 'default'], rows)}" if rows else f"{heading}\n\nNo fields."


def _signature(event: type) -> str:
    fields = (f"{each.name}: {each.type}" for each in dataclasses.fields(event))
    return f"{event.__name__}({', '.join(fields)})"


def _diagram(start: Enum, rows: Mapping[Enum, Mapping[Enum, Enum]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.name}"]
    for source, row in rows.items():
        steps: dict[Enum, list[str]] = {}
        for step, target in row.items():
            steps.setdefault(target, []).append(_words(step))
        lines += [f"    {source.name} --> {target.name}: {', '.join(names)}" for target, names in steps.items()]
        if not row:
            lines.append(f"    {source.name} --> [*]")
    return "\n".join([*lines, "```"])


def _transitions(steps: Sequence[Enum], rows: Mapping[Enum, Mapping[Enum, Enum]]) -> str:
    body = [
        [f"**{source.name}**", *(row[step].name if step in row else "–" for step in steps)]
        for source, row in rows.items()
    ]
    return _table(["", *map(_words, steps)], body)


def _words(step: Enum) -> str:
    return step.name.lower().replace("_", " ")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"\|", r"\|", cell) for cell in line) + " |" for line in lines)


PAGES: dict[str, Callable[[], str]] = {"wire.md": wire, "states.md": states}


def main() -> None:
    """Write the pages."""
    for name, draw in PAGES.items():
        (FOLDER / name).write_text(draw())
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
