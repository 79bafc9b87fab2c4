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

from rankbook.errors import CheckpointError

MAX_NESTED = 10_000
"""Maximum number of values in one tuple, including those of nested tuples."""

# Opcodes by what they do to the stack, named as in pickletools. Protocols up to 5 are covered; an opcode that is
# missing here pushes one value (`_simulate`, last branch).
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
# Neither torch.save nor DCP writes these: extension codes name classes by number, and the others refer to buffers
# outside of the pickle.
_REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
_TO_MARK = {"TUPLE", "LIST", "DICT", "FROZENSET", "INST", "OBJ"}  # pop everything above the mark, push one value
_NO_STACK = {"PROTO", "FRAME"}
_STACK_EFFECTS = {  # number of values popped, and whether one is pushed
    "APPEND": (1, False), "SETITEM": (2, False), "BUILD": (1, False), "REDUCE": (2, True), "NEWOBJ": (2, True),
    "NEWOBJ_EX": (3, True), "STACK_GLOBAL": (2, True), "BINPERSID": (1, True),
    "TUPLE1": (1, True), "TUPLE2": (2, True), "TUPLE3": (3, True),
}  # fmt: skip
_DROPS_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS", "POP_MARK"}
# Negative argument sizes in pickletools: -1 reads up to a newline; the others start with a length field of 1-8 bytes.
_LINE, _LENGTHS = -1, {-2: 1, -3: 4, -4: 4, -5: 8}


@cache
def _opcode_table() -> list[tuple[str, int, int] | None]:
    """Return, by opcode byte: the opcode's name, the size of its argument, and the number of its arguments."""
    table: list[tuple[str, int, int] | None] = [None] * 256
    for opcode in pickletools.opcodes:
        size = 0 if opcode.arg is None else opcode.arg.n
        table[ord(opcode.code)] = (opcode.name, size, 2 if opcode.name in {"GLOBAL", "INST"} else 1)
    return table


def check_opcodes(data: bytes) -> None:
    """Raise `CheckpointError` if a pickle is truncated or would take far more memory than its length."""
    try:
        _simulate(data)
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"the pickle is damaged: {type(error).__name__}: {error}") from error


def _simulate(data: bytes) -> None:  # noqa: C901, PLR0912 - one branch per kind of opcode
    # Example: the pickle of ((1, 2), 3) is simulated as follows, the stack to the right of every opcode
    # (PROTO and MEMOIZE are left out).
    #
    #     BININT1 1      [1]
    #     BININT1 2      [1, 1]
    #     TUPLE2         [3]           1 for the tuple itself, and 1 for each of its values
    #     BININT1 3      [3, 1]
    #     TUPLE2         [5]
    #     STOP
    table, end, at = _opcode_table(), len(data), 0
    # A stack element stands for one value of the unpickler's stack: the number of values that its hash visits. Marks
    # are kept apart, as positions in the stack; memo maps an index to the remembered element.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    while True:
        code = table[data[at]]
        if code is None or code[0] in _REFUSED:
            raise ValueError(f"unsupported opcode {data[at]} at byte {at}")
        name, size, count = code
        first = at + 1
        at = first + size if size >= 0 else _argument_end(data, first, size, count)
        if at > end:
            raise ValueError(f"truncated in the argument of {name} at byte {first - 1}")
        if name == "STOP":
            return
        if name == "FRAME" and int.from_bytes(data[first:at], "little") > end - at:
            raise ValueError("truncated in a frame")
        if name in _PUTS:
            index = len(memo) if name == "MEMOIZE" else _memo_index(data, first, at, name)
            # A memo needs at most one entry per byte of the pickle. The unpickler's memo is an array up to the highest
            # index.
            if not 0 <= index <= end:
                raise ValueError(f"memo index {index} is out of range for {end} bytes")
            memo[index] = stack[-1]
        elif name in _GETS:
            stack.append(memo[_memo_index(data, first, at, name)])
        elif name in _STACK_EFFECTS:
            pops, pushes = _STACK_EFFECTS[name]
            popped = stack[len(stack) - pops :]
            if len(stack) < pops:
                raise IndexError(f"{name} at byte {first - 1} on an empty stack")
            del stack[len(stack) - pops :]
            if pushes:
                stack.append(_nested_count(popped))
        elif name in _TO_MARK:
            mark = marks.pop()
            popped = stack[mark:]
            del stack[mark:]
            # A list or a dict has no hash, so whatever it holds is not visited.
            stack.append(_nested_count(popped) if name in {"TUPLE", "FROZENSET"} else 1)
        elif name in _DROPS_TO_MARK:
            del stack[marks.pop() :]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "POP":
            # As in CPython: POP with nothing above the mark removes the mark.
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                stack.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in _NO_STACK:
            stack.append(1)


def _nested_count(popped: list[int]) -> int:
    count = 1 + sum(popped)
    if count > MAX_NESTED:
        raise ValueError(f"a tuple has more than {MAX_NESTED} values, including those of nested tuples")
    return count


def _argument_end(data: bytes, first: int, size: int, count: int) -> int:
    """Return the end of an argument whose length is stored in the pickle."""
    if size == _LINE:
        for _ in range(count):
            first = data.index(b"\n", first) + 1
        return first
    width = _LENGTHS[size]
    return first + width + int.from_bytes(data[first : first + width], "little")


def _memo_index(data: bytes, first: int, at: int, name: str) -> int:
    if name in {"PUT", "GET"}:
        # A decimal number in text. 20 digits are enough for any index, and bound the time of `int`.
        return int(data[first : min(at, first + 20)])
    return int.from_bytes(data[first:at], "little")
