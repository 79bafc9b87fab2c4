"""Arguments of `%%distributed` and `%distributed`: their parsers, help text, one-line errors and completion."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rankbook.engines.engine import engine_names
from rankbook.errors import InvalidArgument
from rankbook.launch.placement import DEVICES
from rankbook.widgets.output_panel import VIEWS

_HELP = ("-h", "--help")
_NEGATIVE = re.compile(r"-\d")
# argparse passes only a text to `error`, so the rejected words are taken from that text.
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)'")
"""Errors of argparse that name what the user has written."""
_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")

# A peek expression may contain Python's quotes, which shlex would remove: it is taken from the line verbatim, and only
# the options before and after it are split into words.
_PEEK_OPTION = r"(?:--ranks|-r|--timeout)(?:=|\s+)(?:'[^']*'|\"[^\"]*\"|\S+)"
_PEEK = re.compile(
    rf"\s*peek\s*(?P<before>(?:{_PEEK_OPTION}(?:\s+|$))*)(?P<expression>.*?)(?P<after>(?:\s+{_PEEK_OPTION})*)"
    r"(?:\s+#[^'\"\n]*)?\s*",  # a comment without quotes, so that no string is cut
    re.DOTALL,
)


class _HelpFormatter(argparse.HelpFormatter):
    """Format help with a fixed width, and the longest command on one line with its description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)
        # A minimum for the width of the names, from which argparse computes the column of the descriptions.
        self._action_max_length = 14


class _HelpAction(argparse.Action):
    """Refuse `--help` with a pointer to `?`, which shows help in a notebook."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        parser.error(f"{parser.prog.split()[0]}? shows the help")


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises a one-line `InvalidArgument` instead of printing its usage and exiting."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        # `allow_abbrev=False`: an abbreviation would become ambiguous when a later version adds an option.
        super().__init__(formatter_class=_HelpFormatter, add_help=False, allow_abbrev=False, **options)
        # argparse's own `--help` would print the help and raise SystemExit.
        hidden = argparse.SUPPRESS
        self.add_argument(*_HELP, action=_HelpAction, nargs=0, dest=hidden, default=hidden, help=hidden)

    @property
    def actions(self) -> list[argparse.Action]:
        """Return the options and positional arguments that the help shows."""
        return [action for action in self._actions if action.help is not argparse.SUPPRESS]

    def error(self, message: str) -> NoReturn:
        names = [action.option_strings[0] if action.option_strings else str(action.metavar) for action in self.actions]
        raise InvalidArgument(
            f"{self.prog}: {message}{self._suggest(message)}; valid arguments: {', '.join(names) or 'none'}"
        )

    def _suggest(self, message: str) -> str:
        """Return a question with the options or values that resemble the ones that `message` rejects, or ""."""
        if (unknown := _UNRECOGNIZED.match(message)) is not None:
            options = [option for action in self.actions for option in action.option_strings]
            # `restart --ranks 1` in place of `restart 1`
            valid = {
                str(action.metavar).lower(): f"{self.prog} {action.metavar}"
                for action in self.actions
                if not action.option_strings
            }
            valid |= {option.lstrip("-"): option for option in options}
            # In `--rank=0` only the part before the `=` is compared.
            words = [word.partition("=")[0].lstrip("-") for word in unknown[1].split() if word.startswith("-")]
        elif (unknown := _INVALID_CHOICE.search(message)) is not None:
            valid = {str(choice): str(choice) for action in self.actions for choice in action.choices or ()}
            words = [unknown[1]]
        else:
            return ""
        close = dict.fromkeys(valid[match] for word in words for match in get_close_matches(word, valid, n=2))
        return f"; did you mean {' or '.join(close)}?" if close else ""


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", "-r", metavar="RANKS", help="0,2-3 · 0:4:2 · main · all (default: all)")


def _make_cell_parser() -> _Parser:
    # In the help of an argument argparse expands `%(name)s`, so a percent sign is doubled there. `prog` is taken as it
    # is.
    parser = _Parser(prog="%%distributed", description="Run this cell on the ranks.")
    _add_ranks(parser)
    parser.add_argument(
        "--background", "-b", action="store_true", help="return a handle at once: .wait() .interrupt() .result"
    )
    parser.add_argument("--out", metavar="NAME", help="store the CellResult in the notebook's variable NAME")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="interrupt the cell after S seconds")
    parser.add_argument("--time", action="store_true", help="show wall and CPU time per rank, and which ranks waited")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="profile the cell with torch.profiler: a table of all ranks, and a Chrome trace in FILE (default: "
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


def _add_host_options(start: argparse.ArgumentParser) -> None:
    start.add_argument(
        "--launcher",
        metavar="NAME",
        help="start ranks on other hosts with ssh, slurm, mpirun or ray; env prints the agents' command. Options of "
        "the launcher follow, and behind -- those of the program that it runs",
    )
    start.add_argument("--nodes", type=int, metavar="N", help="with --launcher: number of hosts")
    start.add_argument("--address", metavar="A", help="with --launcher: address of this host to listen at")
    start.add_argument("--port", type=int, default=0, metavar="P", help="with --launcher: port (default: a free one)")
    start.add_argument("--home", type=int, default=0, metavar="N", help="with --launcher: ranks on this host")
    start.add_argument(
        "--lost-after",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="with --launcher: seconds after which a host that cannot be reached is lost (default: 60)",
    )
    start.add_argument(
        "--sync-code",
        choices=("on", "off"),
        default="on",
        help="with --launcher: send modules of the notebook's folder to the hosts that import them (default: on)",
    )
    start.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="with --launcher: variable that the ranks inherit"
    )


def _make_line_parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="%distributed", description="Manage the ranks.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_text, prog=f"%distributed {name}")

    start = add("start", "start the ranks: one per CUDA device, or two on the CPU")
    start.add_argument("-n", "--ranks", dest="n", type=int, metavar="N", help="number of ranks; also start N")
    start.add_argument("--backend", help="torch.distributed backend: gloo, nccl, cpu:gloo,cuda:nccl")
    start.add_argument(
        "--device",
        choices=DEVICES,
        help="cpu: hide the CUDA devices from the ranks; cuda: fail if torch can use none (default: cuda if possible)",
    )
    start.add_argument(
        "--keep",
        nargs="?",
        type=_seconds,
        const=600.0,
        metavar="S",
        help="keep the ranks for S seconds (default: 600) after the kernel ends, for attach",
    )
    start.add_argument("--timeout", type=_seconds, metavar="S", help="seconds until the start is given up")
    _add_host_options(start)
    attach = add("attach", "attach to the ranks that an earlier kernel has left (start --keep)")
    attach.add_argument("key", nargs="?", metavar="KEY", help="key of the kept ranks, if there are several sets")
    add("status", "show the state of every rank and the cell that it runs")
    selection = "0,2-3 · 0:4:2 · main · all (default: all)"
    interrupt = add("interrupt", "interrupt the cells on the ranks")
    interrupt.add_argument("ranks", nargs="?", metavar="RANKS", help=selection)
    _add_recovery(add)
    restart = add("restart", "restart ranks with empty namespaces")
    restart.add_argument("ranks", nargs="?", metavar="RANKS", help=selection)
    stop = add("stop", "stop the ranks")
    stop.add_argument(
        "key", nargs="?", metavar="KEY", help="key of ranks that an earlier kernel has left, to end those"
    )
    add("stacks", "show the line of code that every rank is executing")
    debug = add("debug", "show the debugger's state, and which ranks continue and step apply to")
    debug.add_argument(
        "moves", nargs="?", choices=("all", "chosen"), metavar="all|chosen",
        help="all paused ranks, or the rank whose frame is selected in the call stack",
    )  # fmt: skip
    variables = add("vars", "list the variables of the ranks, and where the ranks differ")
    variables.add_argument(
        "names", nargs="*", metavar="NAME", help="only these variables; loss* matches all names that start with loss"
    )
    _add_ranks(variables)
    peek = add("peek", "evaluate an expression on every rank, also while a cell runs; assigns nothing")
    peek.add_argument("expression", metavar="EXPR", help="loss.item(), len(buffer), {k: v.norm() for …}")
    _add_ranks(peek)
    peek.add_argument("--timeout", type=_seconds, default=2.0, metavar="S", help="give up after S seconds (default: 2)")
    watch = add("watch", "end the cell at a step whose numbers are wrong, and say where they were born")
    watch.add_argument(
        "conditions", nargs="*", metavar="nan|inf|norm > X|off",
        help="nan · inf · norm > 100 · off (default: show what is watched)",
    )  # fmt: skip
    sync = add("sync-check", "compare tensors, optimizers and random states between ranks, by their hashes")
    sync.add_argument(
        "names", nargs="*", metavar="NAME",
        help="variables, parts of a model, patterns, rng (default: all that the layout keeps equal)",
    )  # fmt: skip
    _add_ranks(sync)
    sync.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="S", help="wait S seconds for busy ranks (default: 30)"
    )
    push = add("push", "copy variables of the notebook to the ranks")
    push.add_argument("names", nargs="+", metavar="NAME")
    _add_ranks(push)
    pull = add("pull", "copy a variable of the ranks into the notebook, as a list with one value per rank")
    pull.add_argument("name", metavar="NAME", help="a variable, or an attribute such as model.weight with --as")
    pull.add_argument(
        "--as", dest="target", metavar="NAME", help="name of the variable in the notebook (default: the same name)"
    )
    _add_ranks(pull)
    auto = add("auto", "on: plain cells run on the ranks; %%%%local runs a cell in the notebook")
    auto.add_argument("state", choices=("on", "off"), metavar="on|off")
    view = add("view", "set how cells show their output, and show the last output again")
    view.add_argument("view", choices=VIEWS, metavar="|".join(VIEWS))
    return parser, commands.choices


def _add_recovery(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    heal = add("heal", "replace dead ranks by new ones, with the variables of a healthy rank")
    heal.add_argument("ranks", nargs="?", metavar="RANKS", help="ranks to replace (default: all dead ranks)")
    heal.add_argument("--empty", action="store_true", help="do not copy variables")
    heal.add_argument("--shrink", action="store_true", help="go on without the dead ranks, where no device is left")
    heal.add_argument("--timeout", type=_seconds, metavar="S", help="seconds until the attempt is given up")
    resize = add("resize", "change the number of ranks; models, loaders and variables go on")
    resize.add_argument("n", type=int, metavar="N", help="number of ranks")
    resize.add_argument("--timeout", type=_seconds, metavar="S", help="seconds until the attempt is given up")
    protect = add("protect", "keep snapshots of the training state in memory, for heal; list what they leave out")
    protect.add_argument("state", nargs="?", choices=("on", "off"), metavar="on|off", help="(default: report)")
    protect.add_argument(
        "--every", type=int, metavar="N", help="with on: optimizer steps between two (default: as before, or 1)"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # Longer timeouts raise OverflowError in `wait`. The comparison is also False for NaN.
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return seconds


_cell_parser = _make_cell_parser()
_line_parser, _command_parsers = _make_line_parser()
# Every command has a method `_command_NAME` in magics.py. Errors and the help list the commands in this order.
COMMANDS = tuple(_command_parsers)


def parse_cell_line(line: str) -> argparse.Namespace:
    """Return the options of a `%%distributed` line. Raises `InvalidArgument`."""
    return _cell_parser.parse_args(_split(_cell_parser.prog, line))


def parse_line(line: str) -> argparse.Namespace:
    """Return the command of a `%distributed` line and its arguments. Raises `InvalidArgument`."""
    if is_peek(line):
        options, expression = split_peek(line)
        # The `--` keeps argparse from taking an expression such as `-x` for an option.
        words = ["peek", *_split("%distributed peek", options), *(["--", expression] if expression else [])]
    else:
        words = _split(_line_parser.prog, line)
    commands = ", ".join(COMMANDS)
    if not words:
        raise InvalidArgument(f"%distributed needs a command: {commands} (to run code on the ranks: %%distributed)")
    command, *rest = words
    if command not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ";"
        if command in {"help", *_HELP}:
            hint = "; %distributed? shows the help;"
        raise InvalidArgument(f"%distributed has no command {command!r}{hint} valid: {commands}")
    # Use the command's parser: the outer one would report a surplus word with its own name and options.
    parser, namespace = _command_parsers[command], argparse.Namespace(command=command)
    if command != "start":
        return parser.parse_args(rest, namespace)
    if rest and rest[0].isdecimal():  # `start 4`, as `resize 4`
        rest = ["-n", *rest]
    own_arguments, separator, passed = _partition(rest, "--")
    parsed, unknown = parser.parse_known_args(own_arguments, namespace)
    if parsed.launcher is None and (unknown or separator):
        parser.error(f"unrecognized arguments: {' '.join([*unknown, *separator, *passed])}")
    parsed.launcher_args = (*unknown, *separator, *passed)
    return parsed


def _partition(words: list[str], separator: str) -> tuple[list[str], list[str], list[str]]:
    position = words.index(separator) if separator in words else len(words)
    return words[:position], words[position : position + 1], words[position + 1 :]


def is_peek(line: str) -> bool:
    """Return True if a `%distributed` line is a peek."""
    return line.split(maxsplit=1)[:1] == ["peek"]


def split_peek(line: str) -> tuple[str, str]:
    """Return the options and the expression of a `peek` line."""
    parts = _PEEK.fullmatch(line)
    assert parts is not None
    return f"{parts['before']} {parts['after']}".strip(), parts["expression"]


def _split(prog: str, line: str) -> list[str]:
    source = io.StringIO(line)
    lexer = shlex.shlex(source, posix=True)
    # A comment may follow the options: `%distributed start -n 4  # all GPUs`. As in a shell, it begins with a word.
    # shlex also cuts `run#2.json`, so its own comments are off.
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        while not line[source.tell() :].lstrip().startswith("#") and (word := lexer.get_token()) is not None:
            words.append(word)
    except ValueError as error:
        raise InvalidArgument(f"{prog}: {error}") from error
    joined: list[str] = []
    for word in words:
        # The last ranks, as `-r -2:`, which argparse would take for an option.
        if _NEGATIVE.match(word) and joined and joined[-1] in {"--ranks", "-r"}:
            joined[-1] = f"--ranks={word}"
        else:
            joined.append(word)
    return joined


def complete(
    command: str | None,
    words: Sequence[str],
    prefix: str,
    *,
    world_size: int,
    notebook_names: Callable[[], Iterable[str]],
    rank_names: Callable[[], Iterable[str]],
) -> list[str]:
    """Return the words that begin with `prefix` and are valid after `words`.

    `command` is None on a `%%distributed` line, and "" where a `%distributed` line has no command yet. `notebook_names`
    and `rank_names` return the names of variables.
    """
    if command == "":
        return sorted(name for name in COMMANDS if name.startswith(prefix))
    parser = _cell_parser if command is None else _command_parsers.get(command)
    options = [] if parser is None else [action for action in parser.actions if action.option_strings]
    positional = [] if parser is None else [action for action in parser.actions if not action.option_strings]
    candidates: list[str] = []
    # An option that takes a value is directly before the cursor: complete its values. Otherwise complete options and
    # the next positional argument.
    action = next(
        (argument for argument in options if words and words[-1] in argument.option_strings and argument.nargs != 0),
        None,
    )
    if action is None:
        unused = [option.option_strings for option in options if not {*option.option_strings} & {*words}]
        # `--ranks` and `-r` are one option. Without a prefix only its first name is listed.
        candidates = [name for names in unused for name in (names if prefix else names[:1])]
        given_count = sum(not word.startswith("-") for word in words)
        if positional and (positional[0].nargs in {"+", "*"} or given_count < len(positional)):
            action = positional[min(given_count, len(positional) - 1)]
    if action is not None and action.dest in {"name", "names", "expression"}:
        candidates += notebook_names() if command == "push" else rank_names()
    elif action is not None:
        candidates += _values(action, prefix, world_size)
    return sorted({word for word in candidates if word.startswith(prefix)}, key=_sort_key)


def _values(action: argparse.Action, prefix: str, world_size: int) -> Iterable[str]:
    if action.dest == "ranks":
        # After `0,2,` the candidates are `0,2,1`, `0,2,3` and so on: the front end replaces the whole word. Ranks that
        # are listed already are left out, and `all` and `main` stand alone.
        before, comma, _ = prefix.rpartition(",")
        ranks = [f"{before}{comma}{rank}" for rank in range(world_size) if str(rank) not in before.split(",")]
        return ranks if comma else [*ranks, "all", "main"]
    if action.dest == "launcher":
        return engine_names()
    return _BACKENDS if action.dest == "backend" else action.choices or ()


def _sort_key(word: str) -> tuple[bool, int, str]:
    """Sort ranks by number, and options last."""
    number = word.rsplit(",", 1)[-1]
    return word.startswith("-"), int(number) if number.isdecimal() else -1, word


def help_text() -> str:
    """Return the text of `%distributed?` and `%%distributed?`."""
    heading = ["Run cells on the ranks, and manage the ranks.", ""]
    texts = [_cell_parser.format_help(), _line_parser.format_help(), *map(_brief_help, _command_parsers.values())]
    return "\n".join(heading + texts)


def _brief_help(parser: _Parser) -> str:
    """Return the help of a command, without the lines that only repeat the name of an argument."""
    usage, *rest = parser.format_help().splitlines()
    bare = {str(action.metavar) for action in parser.actions if not action.help}
    return "\n".join([usage, *(line for line in rest if line.startswith(" ") and line.strip() not in bare)])
