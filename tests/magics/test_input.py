"""Test `input()` on ranks through the front end's prompt."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytestmark = pytest.mark.processes

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def prompts_of(outcome) -> list[str]:
    """Return the prompts that the user was shown, in order."""
    return [prompt for output in outcome.outputs if output["type"] == "prompts" for prompt in output["prompts"]]


def wait_for_prompt(notebook, message: str) -> str:
    """The next prompt of the cell `message`."""
    while True:
        request = notebook.client.get_stdin_msg(timeout=10)
        if request["parent_header"].get("msg_id") == message:
            return str(request["content"]["prompt"])


class Debugger:
    """Types the next of `commands` at each rank's prompt, whichever rank asks."""

    def __init__(self, *commands: str) -> None:
        self._commands = commands
        self._turns: Counter[str] = Counter()

    def __call__(self, prompt: str) -> str:
        turn = self._turns[prompt]
        self._turns[prompt] += 1
        return self._commands[turn]


def test_input_asks_for_every_rank_with_its_label(notebook):
    outcome = notebook.run(
        "%%distributed\nname = input('name? ')\nprint('hello', name)", answers=lambda prompt: f"from {prompt[:3]}"
    )
    assert outcome.status == "ok"
    assert sorted(prompts_of(outcome)) == ["[0] name? ", "[1] name? "]
    assert sorted(outcome.stdout.splitlines()) == ["[0] hello from [0]", "[1] hello from [1]"]


def test_a_thread_that_still_asks_after_its_cell_leaves_the_answer_to_the_next_cell(notebook):
    message = notebook.send(
        "%%distributed --ranks 0\nimport threading\nasked, ended = threading.Event(), []\n"
        "def ask():\n"
        "    asked.set()\n"
        "    try:\n"
        "        input('Enter to stop ')\n"
        "    except EOFError as error:\n"
        "        ended.append(str(error))\n"
        "thread = threading.Thread(target=ask)\n"
        "thread.start()\n"
        "asked.wait()"
    )
    notebook.finish(message, timeout=20)
    outcome = notebook.run("%%distributed --ranks 0\nprint(input('name? '))", answers=["x"], timeout=20)
    assert (outcome.status, outcome.stdout) == ("ok", "[0] x\n")
    shown = notebook.ok("%%distributed --ranks 0\nthread.join(10)\nprint(ended)").stdout
    assert shown == "[0] ['the cell has ended, so input is not available']\n"


def test_input_of_one_rank_while_the_other_waits_in_a_collective(notebook):
    outcome = notebook.run(
        "%%distributed\nanswer = [input('rate? ')] if rank == 0 else [None]\n"
        "dist.broadcast_object_list(answer)\nprint(answer[0])",
        answers=["0.1"],
    )
    assert prompts_of(outcome) == ["[0] rate? "]
    assert outcome.stdout == "[0-1] 0.1\n"


def test_several_questions_in_a_row_stay_in_order(notebook):
    outcome = notebook.run(
        "%%distributed\nprint([input(f'{i}? ') for i in range(3)])",
        answers=lambda prompt: f"{prompt[1]}{prompt[4]}",
    )
    assert sorted(outcome.stdout.splitlines()) == ["[0] ['00', '01', '02']", "[1] ['10', '11', '12']"]
    for rank in ("0", "1"):
        assert [prompt for prompt in prompts_of(outcome) if prompt[1] == rank] == [f"[{rank}] {i}? " for i in range(3)]


def test_output_before_input_is_shown_before_the_prompt(notebook):
    message = notebook.send("%%distributed --ranks 1\nprint('think about it', end='')\ninput('well? ')\nprint('so')")
    early = []

    def answer(prompt):
        early.append(prompt)
        return "yes"

    outcome = notebook.finish(message, answers=answer)
    assert early == ["[1] well? "]
    assert outcome.text.startswith("[1] think about it\n")


def test_a_password_is_asked_for_without_echo(notebook):
    message = notebook.send("%%distributed --ranks 1\nfrom getpass import getpass\nprint(len(getpass('secret: ')))")
    request = notebook.client.get_stdin_msg(timeout=10)
    assert request["content"] == {"prompt": "[1] secret: ", "password": True}
    notebook.client.input("12345")
    assert notebook.finish(message).stdout == "[1] 5\n"


def test_input_without_support_of_the_front_end_is_an_error_of_the_cell(notebook):
    message = notebook.client.execute("%%distributed\ninput('anyone? ')", allow_stdin=False)
    outcome = notebook.finish(message, timeout=20)
    assert (outcome.status, outcome.ename) == ("error", "EOFError")
    assert "ranks 0-1: EOFError" in outcome.traceback


def test_end_of_file_at_the_prompt_is_one_on_the_rank(notebook):
    outcome = notebook.run("%%distributed --ranks 0\ninput('go on? ')", answers=["\x04"])
    assert (outcome.status, outcome.ename) == ("error", "EOFError")


def test_a_subprocess_of_a_rank_does_not_wait_for_the_keyboard(notebook):
    assert notebook.ok("%%distributed\n!cat; echo read nothing", timeout=20).stdout == "[0-1] read nothing\n"


# Debugger ------------------------------------------------------------------------------------------------------------


def test_breakpoint_opens_a_debugger_on_every_rank(notebook):
    outcome = notebook.run(
        "%%distributed\ndef work(x):\n    y = x * 10\n    breakpoint()\n    return y\nprint('result', work(rank + 1))",
        answers=Debugger("p y", "p rank", "c"),
    )
    assert outcome.status == "ok", outcome.traceback
    for rank in (0, 1):
        lines = [line[4:] for line in outcome.stdout.splitlines() if line.startswith((f"[{rank}] ", "[0-1]"))]
        assert f"{(rank + 1) * 10}" in lines and f"{rank}" in lines
        assert f"result {(rank + 1) * 10}" in lines
        assert sum(prompt == f"[{rank}] (Pdb) " for prompt in prompts_of(outcome)) == 3


@pytest.fixture
def late_ranks_come_first(notebook):
    """Let a rank be late for its next question, and still ask it before another one asks."""
    notebook.ok("from rankbook.coordinator import wait as _wait\n_before = _wait._SAME_RANK_FIRST")
    notebook.ok("_wait._SAME_RANK_FIRST = 2.0")
    yield
    notebook.ok("_wait._SAME_RANK_FIRST = _before")


def test_one_ranks_debugger_is_not_mixed_with_the_others(notebook, late_ranks_come_first):
    turns = []
    for _ in range(3):  # a machine that is busy elsewhere may make one of them late for its next question
        outcome = notebook.run(
            "%%distributed\nbreakpoint()\nx = 1", answers=Debugger("p rank", "p rank", "p rank", "c")
        )
        turns.append("".join(prompt[1] for prompt in prompts_of(outcome)))
        if turns[-1] in ("00001111", "11110000"):
            break
    assert {"00001111", "11110000"} & {*turns}, "a person steps through one rank, then through the next"


def test_the_debugger_can_change_a_variable(notebook):
    outcome = notebook.run("%%distributed --ranks 1\nx = 1\nbreakpoint()\nprint('x is', x)", answers=["x = 7", "c"])
    assert "[1] x is 7" in outcome.stdout


def test_quitting_the_debugger_ends_the_cell_in_one_line(notebook):
    outcome = notebook.run("%%distributed --ranks 1\nbreakpoint()\nprint('not reached')", answers=["q"])
    assert outcome.status == "error"
    assert ANSI.sub("", outcome.traceback) == "rank 1: BdbQuit"
    assert "not reached" not in outcome.stdout


def test_debug_inspects_the_last_error_on_every_rank(notebook):
    notebook.run("%%distributed\ndef inner(secret):\n    raise ValueError('stop')\ninner(rank + 41)")
    outcome = notebook.run("%%distributed\n%debug", answers=Debugger("p secret", "q"))
    assert sorted(prompts_of(outcome)) == ["[0] ipdb> ", "[0] ipdb> ", "[1] ipdb> ", "[1] ipdb> "]
    lines = ANSI.sub("", outcome.stdout).splitlines()
    assert "[0] 41" in lines and "[1] 42" in lines


def test_pdb_names_the_error_at_which_it_opens(notebook):
    notebook.run("%%distributed --ranks 0\nold = 1\nraise KeyError('an earlier one')")
    failing = "def inner(secret):\n    raise ValueError('stop')\ninner(41)"
    try:
        outcome = notebook.run(f"%%distributed --ranks 0\n%pdb on\n{failing}", answers=Debugger("p secret", "q"))
        assert "[0] ValueError: stop" in ANSI.sub("", outcome.stderr).splitlines()
        assert "[0] 41" in ANSI.sub("", outcome.stdout).splitlines()
        assert not prompts_of(notebook.run("%%distributed --ranks 0\nraise SystemExit(3)"))
    finally:
        notebook.ok("%%distributed\n%pdb off")


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asking", ["input('there? ')", "breakpoint()\nx = 1"])
def test_an_interrupt_at_the_prompt_interrupts_the_cell_on_all_ranks(notebook, asking):
    message = notebook.send(f"%%distributed\ndist.barrier()\n{asking}")
    wait_for_prompt(notebook, message)
    notebook.interrupt()
    outcome = notebook.finish(message, timeout=20)
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
    assert outcome.seconds < 4.5, "a rank that does not end is waited for for 5 s"
    assert notebook.ok("%%distributed\nprint('next')").stdout == "[0-1] next\n"


def test_user_code_may_catch_the_interrupt_and_ask_again(notebook):
    message = notebook.send(
        "%%distributed --ranks 0\ntry:\n    input('first? ')\nexcept KeyboardInterrupt:\n    print(input('really? '))"
    )
    assert wait_for_prompt(notebook, message) == "[0] first? "
    notebook.interrupt()
    assert wait_for_prompt(notebook, message) == "[0] really? "
    notebook.client.input("no")
    outcome = notebook.finish(message, timeout=20)
    assert (outcome.status, outcome.stdout) == ("ok", "[0] no\n")


def test_a_timeout_holds_at_the_prompt_too(notebook):
    message = notebook.send("%%distributed --timeout 0.4\ninput('there? ')")
    wait_for_prompt(notebook, message)
    outcome = notebook.finish(message, timeout=20)
    assert (outcome.status, outcome.ename) == ("error", "CellTimeout")
    assert outcome.seconds < 4.5, "a rank that does not end is waited for for 5 s"


def test_a_rank_that_dies_while_the_user_is_asked_ends_the_question(notebook):
    message = notebook.send(
        "%%distributed\nimport os, signal, threading\n"
        "if rank == 1: threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "input('there? ')"
    )
    wait_for_prompt(notebook, message)
    outcome = notebook.finish(message, timeout=20)
    assert (outcome.status, outcome.ename) == ("error", "RankLostError")
    assert "rank 1 was killed by SIGKILL" in outcome.traceback
    assert notebook.ok("%%distributed --ranks 0\nprint('next')").stdout == "[0] next\n"
    notebook.ok("%distributed restart 1")
