"""Arguments of `%%distributed` and `%distributed`: their parsers, help text, one-line errors and completion."""

from __future__ import annotations

import argparse
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rankbook.errors import BadRequest
from rankbook.widgets.output_panel import VIEWS

COMMANDS = (
    "start",
    "attach",
    "status",
    "interrupt",
    "heal",
    "restart",
    "stop",
    "stacks",
    "debug",
    "vars",
    "peek",
    "push",
    "pull",
    "auto",
    "view",
)

_HELP = ("-h", "--help")
_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")

# A peek expression may contain Python's quotes, which shlex would remove: it is taken from the line verbatim, and only
# the options before and after it are split into words.
_PEEK_OPTION = r"(?:--ranks|-r|--timeout)(?:=|\s+)(?:'[^']*'|\"[^\"]*\"|\S+)"
_PEEK = re.compile(
    rf"\s*peek\s*(?P<before>(?:{_PEEK_OPTION}(?:\s+|$))*)(?P<expression>.*?)(?P<after>(?:\s+{_PEEK_OPTION})*)\s*",
    re.DOTALL,
)


class _HelpFormatter(argparse.HelpFormatter):
    """Format help with a fixed width, and the longest command on one line with its description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)
        self._action_max_length = 14


class _HelpAction(argparse.Action):
    """Refuse `--help` with a pointer to `?`, which shows help in a notebook."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        parser.error(f"{parser.prog.split()[0]}? shows the help")


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises a one-line `BadRequest` instead of printing its usage and exiting."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(formatter_class=_HelpFormatter, add_help=False, allow_abbrev=False, **options)
        hidden = argparse.SUPPRESS
        self.add_argument(*_HELP, action=_HelpAction, nargs=0, dest=hidden, default=hidden, help=hidden)

    @property
    def actions(self) -> list[argparse.Action]:
        """Return the options and positional arguments that the help shows."""
        return [action for action in self._actions if action.help is not argparse.SUPPRESS]

    def error(self, message: str) -> NoReturn:
        names = [action.option_strings[0] if action.option_strings else str(action.metavar) for action in self.actions]
        raise BadRequest(f"{self.prog}: {message}; valid here: {', '.join(names) or 'nothing'}")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", "-r", metavar="RANKS", help="0,2-3 · 0:4:2 · main · all (default: all)")


def _make_cell_parser() -> _Parser:
    parser = _Parser(prog="%%distributed", description="Run this cell on the ranks.")
    _add_ranks(parser)
    parser.add_argument(
        "--background", "-b", action="store_true", help="return at once, with a handle: .wait() .interrupt() .result"
    )
    parser.add_argument("--out", metavar="NAME", help="keep the CellResult in the notebook under NAME")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="interrupt the cell after S seconds")
    parser.add_argument("--time", action="store_true", help="show each rank's wall and CPU time, and who waited")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="profile it with torch.profiler: a table of all ranks, and a Chrome trace in FILE (default: "
        "rankbook-profile-N.json)",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="show errors only")
    parser.add_argument(
        "--view",
        choices=VIEWS,
        help="show the output merged, or by rank in tabs or a grid (default: %%distributed view)",
    )
    parser.add_argument(
        "--auto", action="store_true", help=argparse.SUPPRESS
    )  # set by auto_mode.py, never written by a user
    return parser


def _make_line_parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="%distributed", description="Look after the ranks.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_text, prog=f"%distributed {name}")

    start = add("start", "start the ranks: one per CUDA device, or two on the CPU")
    start.add_argument("-n", "--ranks", dest="n", type=int, metavar="N", help="how many")
    start.add_argument("--backend", help="torch.distributed's: gloo, nccl, cpu:gloo,cuda:nccl")
    start.add_argument(
        "--keep",
        nargs="?",
        type=_seconds,
        const=600.0,
        metavar="S",
        help="let them outlive the kernel, for 600 s or S: attach finds them again",
    )
    attach = add("attach", "take over the ranks that a kernel before this one has left (start --keep)")
    attach.add_argument("key", nargs="?", metavar="KEY", help="which, where there are several")
    add("status", "what each rank is and does")
    for name, help_text in (("interrupt", "interrupt what the ranks run"), ("restart", "give ranks fresh processes")):
        add(name, help_text).add_argument(
            "ranks", nargs="?", metavar="RANKS", help="0,2-3 · 0:4:2 · main · all (default: all)"
        )
    heal = add("heal", "put new ranks in the place of dead ones, with the variables of a healthy one")
    heal.add_argument("ranks", nargs="?", metavar="RANKS", help="which (default: all that are dead)")
    heal.add_argument("--empty", action="store_true", help="without the variables")
    add("stop", "end the ranks")
    add("stacks", "where in the code each rank is, now")
    debug = add("debug", "whether a front end debugs the ranks, and whom continue and step are for")
    debug.add_argument(
        "moves", nargs="?", choices=("all", "chosen"), metavar="all|chosen",
        help="all paused ranks, or the one whose frame is chosen in the call stack",
    )  # fmt: skip
    variables = add("vars", "each rank's variables, and where the ranks differ")
    variables.add_argument("names", nargs="*", metavar="NAME", help="only these; loss* is all that begin so")
    _add_ranks(variables)
    peek = add("peek", "what an expression gives on each rank, now, while a cell runs; it may call, and never assigns")
    peek.add_argument("expression", metavar="EXPR", help="loss.item(), len(buffer), {k: v.norm() for …}")
    _add_ranks(peek)
    peek.add_argument("--timeout", type=_seconds, default=2.0, metavar="S", help="give up after S seconds (default: 2)")
    push = add("push", "copy variables of the notebook to the ranks")
    push.add_argument("names", nargs="+", metavar="NAME")
    _add_ranks(push)
    pull = add("pull", "copy a variable of the ranks into the notebook, as a list with one value per rank")
    pull.add_argument("name", metavar="NAME", help="a variable, or model.weight with --as")
    pull.add_argument("--as", dest="target", metavar="NAME", help="the name in the notebook (default: the same)")
    _add_ranks(pull)
    auto = add("auto", "on: plain cells run on the ranks, %%%%local opts one out")
    auto.add_argument("state", choices=("on", "off"), metavar="on|off")
    view = add("view", "how cells show their output from now on; the last one is shown so again")
    view.add_argument("view", choices=VIEWS, metavar="|".join(VIEWS))
    return parser, commands.choices


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return seconds


_cell_parser = _make_cell_parser()
_line_parser, _command_parsers = _make_line_parser()


def parse_cell_line(line: str) -> argparse.Namespace:
    """Return the options of a `%%distributed` line. Raises `BadRequest`."""
    return _cell_parser.parse_args(_split(_cell_parser.prog, line))


def parse_line(line: str) -> argparse.Namespace:
    """Return the command of a `%distributed` line and its arguments. Raises `BadRequest`."""
    if is_peek(line):
        options, expression = split_peek(line)
        words = ["peek", *_split("%distributed peek", options), *(["--", expression] if expression else [])]
    else:
        words = _split(_line_parser.prog, line)
    commands = ", ".join(COMMANDS)
    if not words:
        raise BadRequest(f"%distributed needs a command: {commands} (to run code on the ranks: %%distributed)")
    command, *rest = words
    if command not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ";"
        if command in {"help", *_HELP}:
            hint = "; %distributed? shows the help;"
        raise BadRequest(f"%distributed has no command {command!r}{hint} valid: {commands}")
    # Use the command's parser: the outer one would report a surplus word with its own name and options.
    return _command_parsers[command].parse_args(rest, argparse.Namespace(command=command))


def is_peek(line: str) -> bool:
    """Return True if a `%distributed` line is a peek."""
    return line.split(maxsplit=1)[:1] == ["peek"]


def split_peek(line: str) -> tuple[str, str]:
    """Return the options and the expression of a `peek` line."""
    parts = _PEEK.fullmatch(line)
    assert parts is not None
    return f"{parts['before']} {parts['after']}".strip(), parts["expression"]


def _split(prog: str, line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise BadRequest(f"{prog}: {error}") from error


def complete(
    command: str | None,
    words: Sequence[str],
    begun: str,
    *,
    world_size: int,
    notebook_names: Callable[[], Iterable[str]],
    rank_names: Callable[[], Iterable[str]],
) -> list[str]:
    """Return the words that begin with `begun` and are valid after `words`.

    `command` is None on a `%%distributed` line, and "" where a `%distributed` line has no command yet. `notebook_names`
    and `rank_names` return the names of variables.
    """
    if command == "":
        return sorted(name for name in COMMANDS if name.startswith(begun))
    parser = _cell_parser if command is None else _command_parsers.get(command)
    options = [] if parser is None else [action for action in parser.actions if action.option_strings]
    positional = [] if parser is None else [action for action in parser.actions if not action.option_strings]
    candidates: list[str] = []
    action = next(
        (argument for argument in options if words and words[-1] in argument.option_strings and argument.nargs != 0),
        None,
    )
    if action is None:
        unused = [option.option_strings for option in options if not {*option.option_strings} & {*words}]
        candidates = [name for names in unused for name in (names if begun else names[:1])]
        given = sum(not word.startswith("-") for word in words)
        if positional and (positional[0].nargs in {"+", "*"} or given < len(positional)):
            action = positional[min(given, len(positional) - 1)]
    if action is not None and action.dest in {"name", "names"}:
        candidates += notebook_names() if command == "push" else rank_names()
    elif action is not None:
        candidates += _values(action, begun, world_size)
    return sorted({word for word in candidates if word.startswith(begun)}, key=_sort_key)


def _values(action: argparse.Action, begun: str, world_size: int) -> Iterable[str]:
    if action.dest == "ranks":
        before, comma, _ = begun.rpartition(",")
        ranks = [f"{before}{comma}{rank}" for rank in range(world_size) if str(rank) not in before.split(",")]
        return ranks if comma else [*ranks, "all", "main"]
    return _BACKENDS if action.dest == "backend" else action.choices or ()


def _sort_key(word: str) -> tuple[bool, int, str]:
    """Sort ranks by number, and options last."""
    number = word.rsplit(",", 1)[-1]
    return word.startswith("-"), int(number) if number.isdecimal() else -1, word


def help_text() -> str:
    """Return the text of `%distributed?` and `%%distributed?`."""
    heading = ["Run cells on the ranks, and look after the ranks.", ""]
    texts = [_cell_parser.format_help(), _line_parser.format_help(), *map(_brief_help, _command_parsers.values())]
    return "\n".join(heading + texts)


def _brief_help(parser: _Parser) -> str:
    """Return the help of a command, without the lines that only repeat the name of an argument."""
    usage, *rest = parser.format_help().splitlines()
    bare = {str(action.metavar) for action in parser.actions if not action.help}
    return "\n".join([usage, *(line for line in rest if line.startswith(" ") and line.strip() not in bare)])
