"""What may stand on a `%%distributed` or `%distributed` line.

Owns: the two grammars, their help texts, their one-line errors. Refuses: to act on them.
"""

from __future__ import annotations

import argparse
import shlex
import threading
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from rankbook.errors import BadRequest
from rankbook.magics.peek import is_peek, split_line
from rankbook.widgets.panel_picture import VIEWS

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


class _Help(argparse.HelpFormatter):
    """Equally wide everywhere, and without a break behind the longest command."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)
        self._action_max_length = 14


class _PointToHelp(argparse.Action):
    """`--help`, from a person who does not know that a notebook has `?` for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        parser.error(f"{parser.prog.split()[0]}? shows the help")


class OneLineParser(argparse.ArgumentParser):
    """argparse that raises one line instead of printing many and exiting."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(formatter_class=_Help, **options)
        unsaid = argparse.SUPPRESS
        self.add_argument(*_HELP, action=_PointToHelp, nargs=0, dest=unsaid, default=unsaid, help=unsaid)

    def error(self, message: str) -> NoReturn:
        """Raise `BadRequest`, with what is valid."""
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        names = [action.option_strings[0] if action.option_strings else str(action.metavar) for action in shown]
        raise BadRequest(f"{self.prog}: {message}; valid here: {', '.join(names) or 'nothing'}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002 - argparse's signature
        """Raise `BadRequest`."""
        raise BadRequest(f"{self.prog}: {message or 'see ' + self.prog + '?'}")


def _ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", "-r", metavar="RANKS", help="0,2-3 · 0:4:2 · main · all (default: all)")


def _make_cell_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="%%distributed", add_help=False, allow_abbrev=False, description="Run this cell on the ranks."
    )
    _ranks(parser)
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
    parser.add_argument("--auto", action="store_true", help=argparse.SUPPRESS)  # auto.py: there was no such line
    return parser


def _make_line_parser() -> tuple[OneLineParser, dict[str, OneLineParser]]:
    parser = OneLineParser(prog="%distributed", add_help=False, allow_abbrev=False, description="Look after the ranks.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help_text, prog=f"%distributed {name}", add_help=False, allow_abbrev=False
        )

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
    _ranks(variables)
    peek = add("peek", "what an expression gives on each rank, now, while a cell runs; it may call, and never assigns")
    peek.add_argument("expression", metavar="EXPR", help="loss.item(), len(buffer), {k: v.norm() for …}")
    _ranks(peek)
    peek.add_argument("--timeout", type=_seconds, default=2.0, metavar="S", help="give up after S seconds (default: 2)")
    push = add("push", "copy variables of the notebook to the ranks")
    push.add_argument("names", nargs="+", metavar="NAME")
    _ranks(push)
    pull = add("pull", "copy a variable of the ranks into the notebook, as a list with one value per rank")
    pull.add_argument("name", metavar="NAME", help="a variable, or model.weight with --as")
    pull.add_argument("--as", dest="target", metavar="NAME", help="the name in the notebook (default: the same)")
    _ranks(pull)
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
_no_options = vars(_cell_parser.parse_args([]))
"""What most cells have; argparse would take a tenth of such a cell's time to say so."""


def actions_of(command: str | None) -> list[argparse.Action]:
    """What may stand behind `%%distributed` (None), or behind a command of `%distributed`, if there is such a one."""
    parser = _cell_parser if command is None else _command_parsers.get(command)
    return [] if parser is None else [each for each in parser._actions if each.help is not argparse.SUPPRESS]


def parse_cell_line(line: str) -> argparse.Namespace:
    """The options behind `%%distributed`. Raises `BadRequest`."""
    if not line.strip():
        return argparse.Namespace(**_no_options)
    if line == "--auto":
        return argparse.Namespace(**{**_no_options, "auto": True})
    return _cell_parser.parse_args(_words("%%distributed", line))


def parse_line(line: str) -> argparse.Namespace:
    """The command behind `%distributed`. Raises `BadRequest`."""
    if is_peek(line):
        chosen, expression = split_line(line)
        expressions = ["--", expression] if expression else []
        words = [*_words("%distributed peek", chosen), *expressions]
        return _command_parsers["peek"].parse_args(words, argparse.Namespace(command="peek"))
    words = _words("%distributed", line)
    valid = ", ".join(COMMANDS)
    if not words:
        raise BadRequest(f"%distributed needs a command: {valid} (to run code on the ranks: %%distributed)")
    if words[0] not in COMMANDS:
        near = get_close_matches(words[0], COMMANDS, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ";"
        if words[0] in {"help", *_HELP}:
            hint = "; %distributed? shows the help;"
        raise BadRequest(f"%distributed has no command {words[0]!r}{hint} valid: {valid}")
    # The command's own parser: the outer one would blame itself, and name its own options, for a word too many.
    return _command_parsers[words[0]].parse_args(words[1:], argparse.Namespace(command=words[0]))


def _words(prog: str, line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise BadRequest(f"{prog}: {error}") from error


def near(name: str, names: Iterable[str]) -> str:
    """`; near: ...` where there are names that look like it."""
    found = get_close_matches(name, [each for each in names if not each.startswith("_")], n=3)
    return f"; near: {', '.join(found)}" if found else ""


def help_text() -> str:
    """What `%distributed?` and `%%distributed?` show."""
    lines = [
        "Run cells on the ranks, and look after the ranks.",
        "",
        _cell_parser.format_help(),
        _line_parser.format_help(),
    ]
    return "\n".join([*lines, *map(_told, _command_parsers.values())])


def _told(parser: OneLineParser) -> str:
    """A command's usage, and what is to be said of each thing that may stand there."""
    usage, *rest = parser.format_help().splitlines()
    bare = {str(action.metavar) for action in parser._actions if not action.help}
    return "\n".join([usage, *(line for line in rest if line.startswith(" ") and line.strip() not in bare)])
