"""Memory that ran out: what held it, and how the next cell gets it back.

Owns: which errors these are, the words about memory, and letting go of what the failed cell held. Refuses: to touch a
variable of the user's, and other errors: a debugger may still want their frames.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import traceback
from collections.abc import Iterator, Mapping

import psutil
import torch
from IPython.core.interactiveshell import InteractiveShell

from rankbook.errors import CollectiveAborted
from rankbook.formatting import format_bytes
from rankbook.protocol.messages import ErrorReport
from rankbook.rank.inspect.memory_report import Found, Holding, find_holdings
from rankbook.rank.tracebacks import cause_of, context_of, is_users, members_of, traceback_of, value_of

_ON_CPU = re.compile("DefaultCPUAllocator: (can't|not enough)")
_ON_CUDA = re.compile("CUDA error: out of memory|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED")
_OF_A_PEER = re.compile(r"rank \d+ raised (OutOfMemoryError\b|MemoryError\b|\w+ \(out of memory\))")
_DEVICE = re.compile(r"GPU (\d+)")
_MOST_ROWS = 8
_MOST_VARIABLES = 5
_SMALL = 1_000_000
"""Bytes below which a storage is not worth a row."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or the one that it says it came from, is that memory ran out."""
    for each in _causes(error):
        if issubclass(type(each), (torch.OutOfMemoryError, MemoryError)):
            return True
        if issubclass(type(each), RuntimeError):
            words = value_of(each)
            if _ON_CPU.search(words) or _ON_CUDA.search(words):
                return True
    return False


def is_of_a_peer(error: BaseException) -> bool:
    """Whether a collective was broken off because memory ran out on another rank: here there may be as little of it."""
    return issubclass(type(error), CollectiveAborted) and _OF_A_PEER.match(value_of(error)) is not None


def tell_and_free(shell: InteractiveShell, error: BaseException, report: ErrorReport) -> ErrorReport:
    """`report` with what holds the memory now; then what the failed cell held is given back."""
    try:
        memory = _describe(shell, error)
    except Exception as failure:  # noqa: BLE001 - told in its place; user objects and a device that fails may do anything
        memory = f"memory: what holds it could not be found ({type(failure).__name__}: {failure})"
    free(shell, error)
    return ErrorReport(
        name=report.name,
        value=report.value,
        traceback=report.traceback,
        plain=report.plain,
        line=report.line,
        memory=memory,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and the errors of a group."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if all(each is not other for other in seen):
            seen.append(each)
            yield each
            cause = cause_of(each)
            waiting += [] if cause is None else [cause]
            waiting += members_of(each)


# What held it


def _describe(shell: InteractiveShell, error: BaseException) -> str:
    device = _device_of(error)
    found = find_holdings(_names(shell, error), device=device)
    head = _describe_cpu() if device == "cpu" else _describe_cuda(torch.device(device), found)
    return "\n".join([head, *describe_holdings(found)])


def _device_of(error: BaseException) -> str:
    """The device that has no memory left; torch names the GPU in the message."""
    on_cuda = [
        each for each in _causes(error) if isinstance(each, torch.OutOfMemoryError) or _ON_CUDA.search(str(each))
    ]
    if not on_cuda or not torch.cuda.is_initialized():
        return "cpu"
    named = _DEVICE.search(str(on_cuda[0]))
    return f"cuda:{named[1] if named else torch.cuda.current_device()}"


def _names(shell: InteractiveShell, error: BaseException) -> Mapping[str, object]:
    """The user's variables, and behind them the variables of the functions that the error came through."""
    hidden = shell.user_ns_hidden
    names = {name: value for name, value in shell.user_ns.items() if hidden.get(name, hidden) is not value}
    for each in _causes(error):
        for frame, _ in traceback.walk_tb(traceback_of(each)):
            code = frame.f_code
            if frame.f_locals is not shell.user_ns and code.co_name != "<module>" and is_users(code.co_filename):
                names |= {f"{code.co_name}(): {name}": value for name, value in frame.f_locals.items()}
    return names


def _describe_cpu() -> str:
    machine = psutil.virtual_memory()
    own, free, total = map(format_bytes, (psutil.Process().memory_info().rss, machine.available, machine.total))
    return f"memory of cpu: this process has {own}; {free} of {total} are free"


def _describe_cuda(device: torch.device, found: Found) -> str:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    words = (
        f"memory of {device}: {format_bytes(free)} of {format_bytes(total)} are free; "
        f"this rank's tensors have {format_bytes(allocated)}, "
        f"{format_bytes(reserved - allocated)} are reserved and not used, "
        f"{format_bytes(max(0, total - free - reserved))} are others'"
    )
    nameless = allocated - found.size
    if nameless > max(_SMALL, allocated // 100):
        words += f"\n{format_bytes(nameless)} have no name: what autograd keeps for backward(), temporary results"
    return words


def describe_holdings(found: Found) -> list[str]:
    """The largest of what was found, as lines of a table, and how much each variable has."""
    large = [each for each in found.holdings if each.size >= _SMALL]
    rows = [_row(each) for each in large[:_MOST_ROWS]]
    if not rows:
        return ["  no variable leads to a tensor of 1 MB or more"]
    rest = found.holdings[_MOST_ROWS:]
    if rest:
        rows.append((format_bytes(sum(each.size for each in rest)), f"in {len(rest)} more", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  " + "  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]).rstrip() for row in rows]
    totals: dict[str, int] = {}
    for each in found.holdings:
        totals[each.variable] = totals.get(each.variable, 0) + each.size
    order = sorted(totals, key=lambda name: -totals[name])[:_MOST_VARIABLES]
    if len(found.holdings) > len(totals):
        lines.append(f"  by variable: {', '.join(f'{name} {format_bytes(totals[name])}' for name in order)}")
    if not found.complete:
        lines.append("  (not all that the variables lead to was looked at: it is too much, or too deep)")
    return lines


def _row(holding: Holding) -> tuple[str, str, str, str, str]:
    return format_bytes(holding.size), holding.name, str(holding.shape), holding.dtype, holding.device


# Letting go


def free(shell: InteractiveShell, error: BaseException) -> None:
    """Let go of the frames that failed, with all that they held. A debugger finds nothing afterwards."""
    for each in _all_of(error):
        traceback.clear_frames(traceback_of(each))
        BaseException.with_traceback(each, None)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    result = shell.last_execution_result
    if result is not None:
        result.error_in_exec = result.error_before_exec = None
    shell.InteractiveTB.tb = shell.InteractiveTB.pdb = None  # the debugger of an earlier error has its frames
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a device that failed for good; its next use says so
            torch.cuda.empty_cache()


def _all_of(error: BaseException) -> list[BaseException]:
    """The error with all that were raised before it and are kept for that, whether they caused it or not."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and all(each is not other for other in found):
            found.append(each)
            waiting += [cause_of(each), context_of(each), *members_of(each)]
    return found
