"""Check a pickle's opcodes before unpickling, so that a small file cannot exhaust memory or CPU time.

Limits resources only; the restricted unpicklers decide which classes a pickle may name.

CPython's unpickler allocates memory for an announced length before it reads the bytes, and a memo entry for every index
up to the highest one used: a pickle of nine bytes can allocate gigabytes. A tuple's hash is computed from all of its
elements, again every time it is fetched from the memo and nested in another tuple, without a limit on depth. This
module detects both without creating objects: it simulates the unpickler's stack, and keeps for every value on the stack
the number of values that computing its hash would visit.
"""

from __future__ import annotations

import pickletools
from functools import cache

from rankbook.errors import CheckpointingException

MOST_NESTED = 10_000
"""Maximum number of values in one tuple, including those of nested tuples."""

_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
_TO_MARK = {"TUPLE", "LIST", "DICT", "FROZENSET", "INST", "OBJ"}  # pop everything above the mark, push one value
_NO_STACK = {"PROTO", "FRAME"}
_TAKES = {  # number of values popped, and whether one is pushed
    "APPEND": (1, False), "SETITEM": (2, False), "BUILD": (1, False), "REDUCE": (2, True), "NEWOBJ": (2, True),
    "NEWOBJ_EX": (3, True), "STACK_GLOBAL": (2, True), "BINPERSID": (1, True),
    "TUPLE1": (1, True), "TUPLE2": (2, True), "TUPLE3": (3, True),
}  # fmt: skip
_DROPS_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS", "POP_MARK"}
# Negative argument sizes in pickletools: -1 reads up to a newline; the others start with a length field of 1-8 bytes.
_LINE, _LENGTHS = -1, {-2: 1, -3: 4, -4: 4, -5: 8}


@cache
def _table() -> list[tuple[str, int, int] | None]:
    """Return, by opcode byte: the opcode's name, the size of its argument, and the number of its arguments."""
    table: list[tuple[str, int, int] | None] = [None] * 256
    for opcode in pickletools.opcodes:
        size = 0 if opcode.arg is None else opcode.arg.n
        table[ord(opcode.code)] = (opcode.name, size, 2 if opcode.name in {"GLOBAL", "INST"} else 1)
    return table


def check_opcodes(data: bytes) -> None:
    """Raise `CheckpointingException` if a pickle is truncated or would take far more memory than its length."""
    try:
        _follow(data)
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointingException(f"the pickle is damaged: {type(error).__name__}: {error}") from error


def _follow(data: bytes) -> None:  # noqa: C901, PLR0912 - one branch per kind of opcode
    table, end, at = _table(), len(data), 0
    # A stack element stands for one value of the unpickler's stack: the number of values that its hash visits. Marks
    # are kept apart, as positions in the stack; memo maps an index to the remembered element.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    while True:
        code = table[data[at]]
        if code is None or code[0] in _REFUSED:
            raise ValueError(f"instruction {data[at]} at byte {at}")
        name, size, count = code
        first = at + 1
        at = first + size if size >= 0 else _after(data, first, size, count)
        if at > end:
            raise ValueError(f"it ends within the argument of {name} at byte {first - 1}")
        if name == "STOP":
            return
        if name == "FRAME" and int.from_bytes(data[first:at], "little") > end - at:
            raise ValueError("it ends within a frame")
        if name in _PUTS:
            index = len(memo) if name == "MEMOIZE" else _index(data, first, at, name)
            if not 0 <= index <= end:
                raise ValueError(f"it remembers a value number {index}, and has {end} bytes")
            memo[index] = stack[-1]
        elif name in _GETS:
            stack.append(memo[_index(data, first, at, name)])
        elif name in _TAKES:
            takes, pushes = _TAKES[name]
            taken = stack[len(stack) - takes :]
            if len(stack) < takes:
                raise IndexError(f"{name} at byte {first - 1} on an empty stack")
            del stack[len(stack) - takes :]
            if pushes:
                stack.append(_nested(taken))
        elif name in _TO_MARK:
            mark = marks.pop()
            taken = stack[mark:]
            del stack[mark:]
            stack.append(_nested(taken) if name in {"TUPLE", "FROZENSET"} else 1)
        elif name in _DROPS_TO_MARK:
            del stack[marks.pop() :]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "POP":
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                stack.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in _NO_STACK:
            stack.append(1)


def _nested(taken: list[int]) -> int:
    count = 1 + sum(taken)
    if count > MOST_NESTED:
        raise ValueError(f"a tuple of more than {MOST_NESTED} values, those of tuples in it included")
    return count


def _after(data: bytes, first: int, size: int, count: int) -> int:
    """Return the end of an argument whose length is stored in the pickle."""
    if size == _LINE:
        for _ in range(count):
            first = data.index(b"\n", first) + 1
        return first
    width = _LENGTHS[size]
    return first + width + int.from_bytes(data[first : first + width], "little")


def _index(data: bytes, first: int, at: int, name: str) -> int:
    if name in {"PUT", "GET"}:
        return int(data[first : min(at, first + 20)])
    return int.from_bytes(data[first:at], "little")
