"""Test the arguments of both magics and their completion, without a kernel."""

from __future__ import annotations

import argparse

import pytest

from rankbook.errors import InvalidArgument
from rankbook.magics import arguments
from rankbook.magics.arguments import COMMANDS, complete, help_text, is_peek, parse_cell_line, parse_line, split_peek

CELL_OPTIONS = ("--ranks", "--background", "--out", "--timeout", "--time", "--profile", "--quiet", "--view")

START = {
    "n": None,
    "backend": None,
    "device": None,
    "keep": None,
    "timeout": None,
    "launcher": None,
    "nodes": None,
    "launcher_args": (),
    "address": None,
    "port": 0,
    "home": 0,
    "lost_after": 60.0,
    "env": [],
    "sync_code": "on",
}
START_OPTIONS = (
    "-n, --backend, --device, --keep, --timeout, --launcher, --nodes, --address, --port, --home, --lost-after, "
    "--sync-code, --env"
)


def reported(parse, line: str) -> str:
    """The one line that `line` is answered with."""
    with pytest.raises(InvalidArgument) as caught:
        parse(line)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_cell_magic_without_options_uses_the_defaults():
    assert vars(parse_cell_line("")) == {
        "ranks": None,
        "background": False,
        "out": None,
        "timeout": None,
        "time": False,
        "profile": None,
        "quiet": False,
        "view": None,
        "auto": False,
    }


def test_every_line_is_parsed_into_a_new_namespace():
    parse_cell_line("").quiet = True
    assert not parse_cell_line("").quiet


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--ranks 0,2-3", "ranks", "0,2-3"),
        ("--ranks=0:4:2", "ranks", "0:4:2"),
        ("-r main", "ranks", "main"),
        ("-r -2: --quiet", "ranks", "-2:"),
        ("--ranks all", "ranks", "all"),
        ("--ranks '0, 2'", "ranks", "0, 2"),
        ("--ranks 0   # only the first", "ranks", "0"),
        ("--background", "background", True),
        ("-b", "background", True),
        ("--out res", "out", "res"),
        ("--timeout 1.5", "timeout", 1.5),
        ("--time", "time", True),
        ("--profile", "profile", ""),
        ("--profile=run.json --time", "profile", "run.json"),
        ("--profile run#2.json --timeout 60", "profile", "run#2.json"),
        ("--profile run#2.json --timeout 60", "timeout", 60.0),
        ("--profile '#2.json' --time #all", "profile", "#2.json"),
        ("# --quiet", "quiet", False),
        ("--quiet", "quiet", True),
        ("-q", "quiet", True),
    ],
)
def test_every_option_of_a_cell_is_understood(line, name, value):
    assert getattr(parse_cell_line(line), name) == value


def test_options_of_a_cell_go_together():
    chosen = parse_cell_line("--ranks 1 --background --out r --timeout 3 --quiet")
    assert (chosen.ranks, chosen.background, chosen.out, chosen.timeout, chosen.quiet) == ("1", True, "r", 3.0, True)


@pytest.mark.parametrize("line", ["--foo", "--rank 0", "0,1", "--ranks 0 1", "--ranks", "--out", "--help"])
def test_unknown_cell_option_is_one_line_with_the_valid_options(line):
    text = reported(parse_cell_line, line)
    assert text.startswith("%%distributed: ")
    assert all(option in text for option in CELL_OPTIONS)
    assert "--auto" not in text


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", "1e300"])
def test_invalid_timeout_is_reported(seconds):
    text = reported(parse_cell_line, f"--timeout {seconds}")
    assert f"expected a positive number of seconds, got '{seconds}'" in text
    assert "_seconds" not in text


def test_a_quote_that_is_not_closed_is_one_line():
    assert reported(parse_cell_line, "--out 'res").startswith("%%distributed: ")
    assert reported(parse_line, "push 'x").startswith("%distributed: ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("start", {**START, "n": None, "backend": None, "keep": None}),
        ("start -n 4", {**START, "n": 4, "backend": None, "keep": None}),
        ("start -n4 --backend cpu:gloo,cuda:nccl", {**START, "n": 4, "backend": "cpu:gloo,cuda:nccl", "keep": None}),
        ("start --device cpu", {**START, "device": "cpu"}),
        ("start --keep", {**START, "n": None, "backend": None, "keep": 600.0}),
        ("start --keep -n 2", {**START, "n": 2, "backend": None, "keep": 600.0}),
        ("start --keep 3.5", {**START, "n": None, "backend": None, "keep": 3.5}),
        ("attach", {"key": None}),
        ("attach 12-1", {"key": "12-1"}),
        ("start 4 --backend gloo", {**START, "n": 4, "backend": "gloo", "keep": None}),
        ("start --ranks 4", {**START, "n": 4, "backend": None, "keep": None}),
        ("status", {}),
        ("interrupt", {"ranks": None}),
        ("interrupt 0,2-3", {"ranks": "0,2-3"}),
        ("restart 2", {"ranks": "2"}),
        ("stop", {"key": None}),
        ("stop 12-1", {"key": "12-1"}),
        ("stacks", {}),
        ("peek loss", {"expression": "loss", "ranks": None, "timeout": 2.0}),
        ("peek -x --ranks 1", {"expression": "-x", "ranks": "1", "timeout": 2.0}),
        ("push x y", {"names": ["x", "y"], "ranks": None}),
        ("push x --ranks 0", {"names": ["x"], "ranks": "0"}),
        ("pull x", {"name": "x", "target": None, "ranks": None}),
        ("pull model.weight --as w -r main", {"name": "model.weight", "target": "w", "ranks": "main"}),
        ("auto on", {"state": "on"}),
        ("auto off  # back", {"state": "off"}),
    ],
)
def test_every_command_is_understood(line, expected):
    assert parse_line(line) == argparse.Namespace(command=line.split()[0], **expected)


@pytest.mark.parametrize("line", ["", "bogus", "--ranks 0", "help"])
def test_a_command_that_is_none_is_one_line_with_every_command(line):
    text = reported(parse_line, line)
    assert all(command in text for command in COMMANDS)


def test_a_command_that_is_nearly_one_is_guessed():
    assert "did you mean restart" in reported(parse_line, "restrat")
    assert "did you mean status" in reported(parse_line, "statsu")


@pytest.mark.parametrize(
    ("parse", "line", "close"),
    [
        (parse_cell_line, "--rank 0", "--ranks"),
        (parse_cell_line, "--rank=0", "--ranks"),
        (parse_cell_line, "--backgroud", "--background"),
        (parse_cell_line, "--tiem", "--time"),
        (parse_cell_line, "--view tab", "tabs"),
        (parse_line, "start --backed nccl", "--backend"),
        (parse_line, "start --device cuad", "cuda"),
        (parse_line, "push x --rank 1", "--ranks"),
        (parse_line, "restart --ranks 1", "%distributed restart RANKS"),
        (parse_line, "sync-check --name model", "%distributed sync-check NAME"),
        (parse_line, "auto onn", "on"),
        (parse_line, "view gird", "grid"),
    ],
)
def test_an_option_that_is_nearly_one_is_guessed(parse, line, close):
    assert f"; did you mean {close}?; valid arguments: " in reported(parse, line)


@pytest.mark.parametrize("line", ["--foo", "ranks 0", "--ranks", "--out 'x'  y"])
def test_option_without_a_near_match_gets_no_suggestion(line):
    text = reported(parse_cell_line, line)
    assert "did you mean" not in text and "wanted" not in text


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        ("start --foo", START_OPTIONS),
        ("start 4 5", START_OPTIONS),
        ("start -n many", START_OPTIONS),
        ("status now", "none"),
        ("restart 0 1", "RANKS"),
        ("peek", "EXPR, --ranks, --timeout"),
        ("peek x --timeout soon", "EXPR, --ranks, --timeout"),
        ("push", "NAME, --ranks"),
        ("push x --rank 1", "NAME, --ranks"),
        ("pull", "NAME, --as, --ranks"),
        ("pull x y", "NAME, --as, --ranks"),
        ("auto", "on|off"),
        ("auto maybe", "on|off"),
    ],
)
def test_wrong_number_of_arguments_is_reported_with_the_usage(line, valid):
    text = reported(parse_line, line)
    assert text.startswith(f"%distributed {line.split()[0]}: ")
    assert text.endswith(f"; valid arguments: {valid}")


def test_the_help_names_every_option_and_every_command():
    text = help_text()
    assert all(option in text for option in CELL_OPTIONS)
    assert all(f"usage: %distributed {command}" in text for command in COMMANDS)
    assert "%%local runs a cell in the notebook" in text
    assert "%%%%" not in text
    assert "--auto" not in text
    assert "--help" not in text
    words = " ".join(text.split())
    parsers = (arguments._cell_parser, *arguments._command_parsers.values())
    reported = [action.help for parser in parsers for action in parser.actions if action.help]
    assert [item for item in reported if item.replace("%%", "%") not in words] == []


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_option_names_the_question_mark(word):
    for parse, line in ((parse_cell_line, ""), (parse_line, ""), (parse_line, "help"), (parse_line, "pull ")):
        text = reported(parse, line if line == "help" else line + word)
        assert "distributed? shows the help; valid" in text
        assert "did you mean" not in text


@pytest.mark.parametrize(
    ("line", "options", "expression"),
    [
        ("peek loss", "", "loss"),
        ("peek  d['a  b'] ", "", "d['a  b']"),
        ("peek loss --ranks 0,2", "--ranks 0,2", "loss"),
        ("peek --ranks=0 loss -x", "--ranks=0", "loss -x"),
        ("peek -r '0, 2' f'{x:.2f}' --timeout 5", "-r '0, 2' --timeout 5", "f'{x:.2f}'"),
        ("peek x -r", "", "x -r"),
        ("peek '--ranks 0'", "", "'--ranks 0'"),
        ("peek x - r  # --ranks 1", "", "x - r"),
        ("peek x --ranks 0  # the first", "--ranks 0", "x"),
        ("peek d['a # b']", "", "d['a # b']"),
        ("peek d['a # b'] --ranks 0 # the first", "--ranks 0", "d['a # b']"),
        ("peek x  # the user's", "", "x  # the user's"),
        ("peek", "", ""),
        ("peek --ranks 0", "--ranks 0", ""),
    ],
)
def test_options_stand_before_or_behind_an_expression_that_is_left_as_it_is(line, options, expression):
    assert is_peek(line)
    parsed_options, rest = split_peek(line)
    assert (" ".join(parsed_options.split()), rest) == (options, expression)


def completions(line, ranks=4):
    """Complete the last word of a line."""
    magic, _, rest = line.partition(" ")
    words = rest.split(" ")
    command = None if magic == "%%distributed" else words.pop(0) if len(words) > 1 else ""
    return complete(
        command,
        words[:-1],
        words[-1],
        world_size=ranks,
        notebook_names=lambda: ["mine", "model"],
        rank_names=lambda: ["theirs", "model"],
    )


def test_commands_and_choices_are_completed():
    assert completions("%distributed st") == ["stacks", "start", "status", "stop"]
    assert completions("%distributed nonsense ") == []
    assert completions("%distributed auto ") == ["off", "on"]
    assert completions("%distributed view g") == completions("%%distributed --view g") == ["grid"]
    assert completions("%distributed start --backend g") == ["gloo"]
    assert completions("%distributed start --device c") == ["cpu", "cuda"]


def test_variables_are_those_of_the_notebook_to_push_and_else_those_of_the_ranks():
    assert completions("%distributed push ") == completions("%distributed push model ") == ["mine", "model", "--ranks"]
    assert completions("%distributed push m") == ["mine", "model"]
    assert completions("%distributed pull t") == completions("%distributed peek t") == ["theirs"]
    assert completions("%distributed vars model ") == ["model", "theirs", "--ranks"]
    assert completions("%distributed pull model --as ") == []


def test_options_are_completed_that_the_line_does_not_have_yet():
    assert completions("%distributed pull model -") == ["--as", "--ranks", "-r"]
    assert completions("%distributed pull model ") == ["--as", "--ranks"], "an option of two names once"
    assert completions("%distributed heal 1 --e") == ["--empty"]
    completed = completions("%%distributed --")
    assert {"--ranks", "--background", "--out", "--timeout", "--quiet"} <= set(completed) and "--auto" not in completed
    completed = completions("%%distributed --ranks 0 -")
    assert "--out" in completed and not {"--ranks", "-r"} & set(completed)


def test_rank_selections_are_completed_behind_the_last_comma():
    assert completions("%distributed interrupt ") == ["all", "main", "0", "1", "2", "3"]
    assert completions("%distributed heal ") == ["all", "main", "0", "1", "2", "3", "--empty", "--shrink", "--timeout"]
    assert completions("%%distributed --ranks ") == ["all", "main", "0", "1", "2", "3"]
    assert completions("%%distributed -r 0,2,", ranks=12)[:3] == ["0,2,1", "0,2,3", "0,2,4"]
    assert completions("%%distributed --ranks ", ranks=0) == ["all", "main"]


@pytest.mark.parametrize("line", ["protect --every 10", "protect off --every 10"])
def test_an_interval_of_snapshots_without_on_is_refused(line):
    from rankbook.magics.magics import DistributedMagics

    with pytest.raises(InvalidArgument, match=r"--every goes with on: %distributed protect on --every 10"):
        DistributedMagics._command_protect(None, parse_line(line))
