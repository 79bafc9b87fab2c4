"""Test that the documentation agrees with the code."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

import rankbook
from rankbook import errors
from rankbook.magics import arguments, auto_mode

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
MAGICS = (DOCS / "reference" / "magics.md").read_text()


def load_draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["wire.md", "states.md"])
def test_generated_pages_are_current(page):
    drawn = load_draw().PAGES[page]()
    assert (ROOT / "docs" / page).read_text() == drawn, "run `python docs/draw.py`"


def test_every_drawn_page_is_compared():
    assert set(load_draw().PAGES) == {"wire.md", "states.md"}


PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    if "_build" not in page.parts
)
FENCE = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^()<>\s]+)>?\)|\{doc\}`[^`<]*<([^>]+)>`")


def links(page: str) -> list[str]:
    """Return the targets of the links and pictures of a page."""
    text = FENCE.sub("", (ROOT / page).read_text())
    return [link or f"{document}.ipynb" for link, document in LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and myst-parser make them."""
    headings = re.findall(r"^#{1,3} (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, anchor: str) -> str:
    """Return the text below a heading of a page up to the next heading; without an anchor, below the title."""
    text = page.read_text()
    plain = FENCE.sub(lambda fence: fence[0].replace("#", "~"), text)  # a comment in a code block is no heading
    headings = [*re.finditer(r"^#{1,3} (.+)$", plain, flags=re.MULTILINE)]
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=True):
        if not anchor or re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-") == anchor:
            return text[heading.start() : end]
    raise LookupError(f"{page} has no heading #{anchor}")


def seconds_to_read(links: str) -> float:
    """Return the seconds to read the sections that a cell of docs/questions.md links to, at 200 words a minute."""
    sections = [section(DOCS / page, anchor) for page, anchor in re.findall(r"\]\(([\w/-]+\.md)#?([\w-]*)\)", links)]
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in sections) * 60 / 200


def test_every_question_is_answered_in_the_time_that_its_row_says():
    text = (DOCS / "questions.md").read_text()
    rows = re.findall(r"^\| ([^|]+\?) \| [^|]+ \| ([^|]+) \| (\d+) s \|$", text, flags=re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| .*\|$", text, flags=re.MULTILINE)) - text.count("| Question |") >= 10
    times = {question: (int(stated), seconds_to_read(links)) for question, links, stated in rows}
    wrong = {question: both for question, both in times.items() if abs(both[0] - both[1]) > 5 or both[1] > 60}
    assert wrong == {}, "write the new time into the row, or link to a shorter section"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_within_the_repository_leads_to_a_file_and_a_heading_of_it(page):
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


BARE_LINK = re.compile(r"(?:\]\(|(?<!`))<?(https?:[^\s<>`)]*)")
EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.ipynb"))


def malformed(text: str) -> list[str]:
    """Return the links to other sites that no browser would open, or that are not encrypted."""
    bad = []
    for link in BARE_LINK.findall(FENCE.sub("", text)):
        parts = urlsplit(link.rstrip(".,:"))
        if parts.scheme != "https" or not re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}(:\d+)?", parts.netloc):
            bad.append(link)
    return bad


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES, "CITATION.cff", "pyproject.toml"])
def test_links_to_other_sites_are_well_formed(page):
    assert malformed((ROOT / page).read_text()) == []


def test_malformed_links_are_found():
    assert malformed("<https://semver.org/>, see [torch](https://docs.pytorch.org/docs/stable/fsdp.html#x).") == []
    text = "[a](http://semver.org) [b](https://semver) https:/semver.org. [c](https://)"
    assert malformed(text) == ["http://semver.org", "https://semver", "https:/semver.org.", "https://"]


def test_examples_link_to_files_that_exist():
    for example in EXAMPLES:
        cells = json.loads((ROOT / example).read_text())["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        targets = [link for link, _ in LINK.findall(text) if "://" not in link]
        assert [target for target in targets if not (ROOT / "examples" / target.partition("#")[0]).exists()] == []


def test_links_and_anchors_are_found():
    assert len(PAGES) > 50
    assert "tutorials/index.md" in links("docs/index.md")
    assert "../examples/quickstart.ipynb" in links("docs/tutorials/index.md")
    assert "resume-on-a-different-number-of-ranks" in anchors(DOCS / "tutorials" / "checkpoints.md")


def test_the_pictures_are_small_and_every_one_is_on_a_page():
    files = [*(DOCS / "pictures").iterdir(), *DOCS.glob("*.gif"), *DOCS.glob("*.svg")]
    linked = {((ROOT / page).parent / link).resolve() for page in PAGES for link in links(page)}
    assert [file.name for file in files if file not in linked] == []
    assert sum(file.stat().st_size for file in files) < 1_500_000
    assert all(file.stat().st_size < 1_000_000 for file in DOCS.glob("*.gif"))


def test_every_page_of_the_documentation_can_be_reached_by_links():
    visited, new = set(), {"docs/index.md"}
    while new:
        page = new.pop()
        visited.add(page)
        for link in links(page):
            target = ((ROOT / page).parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_relative_to(DOCS) and str(target.relative_to(ROOT)) not in visited:
                new.add(str(target.relative_to(ROOT)))
    assert [page for page in PAGES if page.startswith("docs/") and page not in visited] == []


def test_the_magics_that_replace_those_of_nbdistributed_exist():
    page = (DOCS / "howto" / "from-nbdistributed.md").read_text()
    lines = re.findall(r"`(%{1,2})distributed ([^`]+)`", page)
    assert len(lines) >= 8
    for marks, line in lines:
        (arguments.parse_line if marks == "%" else arguments.parse_cell_line)(line)  # raises on an unknown one


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_files_named_on_pages_exist(page):
    names = re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|ipynb|md|toml))`", (ROOT / page).read_text())
    names += re.findall(
        r"(?:python|pytest|bash|run) ((?:tests|docs|examples|\.ci)/[\w./-]+)", (ROOT / page).read_text()
    )
    assert names
    assert [
        name for name in names if not (ROOT / name).exists() and not (ROOT / "kernel" / "rankbook" / name).exists()
    ] == []


FUNCTION_LINK = re.compile(r"\[`([\w.]+)`\]\((\.\./[\w/]+\.py)\)")


def functions_missing_from_their_files(text: str) -> list[str]:
    """Return the classes, functions and methods that a page of `docs` links to, and that the file does not define."""
    missing = []
    for name, link in FUNCTION_LINK.findall(text):
        if name.endswith(".py"):
            continue
        scope: ast.Module | ast.ClassDef | None = ast.parse((DOCS / link).read_text())
        for part in name.split("."):
            found = [node for node in getattr(scope, "body", ()) if getattr(node, "name", None) == part]
            scope = found[0] if found else None
        if scope is None:
            missing.append(f"{name} in {link}")
    return missing


def test_functions_on_the_way_of_a_cell_a_save_and_a_batch_exist():
    text = (DOCS / "architecture.md").read_text()
    assert functions_missing_from_their_files(text) == []
    made_up = "[`RankShell.walk`](../kernel/rankbook/rank/shell.py) [`RankShell`](../kernel/rankbook/rank/shell.py)"
    assert functions_missing_from_their_files(made_up) == ["RankShell.walk in ../kernel/rankbook/rank/shell.py"]
    most_files = {"One cell": 16, "One save": 12, "One batch": 8}
    for title, most in most_files.items():
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        steps = re.findall(r"^\d+\. .*$", section, flags=re.MULTILINE)
        assert 0 < len(steps) <= 16, title
        files = {link for step in steps for _, link in FUNCTION_LINK.findall(step)}
        assert 0 < len(files) <= most, f"{title}: {len(files)} files"


def test_the_readme_is_short_and_names_its_commands():
    assert len(README.splitlines()) <= 120
    assert 'pip install -c constraints.txt ".[notebook]" && jupyter lab examples/quickstart.ipynb\n' in README
    assert 'pip install -c constraints.txt ".[notebook]" && rankbook run examples/quickstart.ipynb\n' in README
    assert 'pip install -c constraints.txt -e ".[test]" && pytest\n' in README


def test_the_readme_says_what_is_trusted():
    sentence = next(line for line in " ".join(README.split()).split(". ") if "what-is-trusted.md" in line)
    assert "`pull` is unpickled in the notebook's process, so ranks are [trusted]" in sentence


def test_the_links_at_the_top_of_the_readme_lead_to_its_sections():
    sections = re.findall(r"^## (.+)$", README, flags=re.MULTILINE)
    assert re.findall(r"\[([^\]]+)\]\(#[\w-]+\)", README) == sections
    assert re.findall(r"\(#([\w-]+)\)", README) == [section.lower().replace(" ", "-") for section in sections]


def test_the_comparison_in_the_readme_has_the_numbers_of_the_full_table():
    full = (DOCS / "comparison.md").read_text()
    section = README.partition("## Comparison")[2].partition("\n##")[0]
    numbers = re.findall(r"[\d.]+ (?:ms|s|MB)\b", section.partition("|---|")[2])
    assert len(numbers) > 15
    assert [number for number in numbers if number.split()[0] not in full] == []


def test_the_reference_names_every_option_of_a_cell_and_no_other():
    parser = arguments._cell_parser
    options = {
        max(action.option_strings, key=len) for action in parser._actions if action.help is not argparse.SUPPRESS
    }
    section = MAGICS.partition("## %%distributed")[2].partition("## %%local")[0]
    assert set(re.findall(r"^\| `(--\w+)", section, flags=re.MULTILINE)) == options


def test_the_reference_names_every_command_and_no_other():
    section = MAGICS.partition("## %distributed\n")[2]
    named = re.findall(r"^\| `([\w-]+)", section, flags=re.MULTILINE)
    assert set(named) == set(arguments.COMMANDS)


@pytest.mark.parametrize("command", arguments.COMMANDS)
def test_the_reference_names_every_option_of_a_command(command):
    lines = MAGICS.partition("## %distributed\n")[2].splitlines()
    text = "\n".join(line for line in lines if re.match(rf"\| `{command}\b", line))
    if command == "start":
        text += "\n".join(line for line in lines if line.startswith("- `--"))
    options = [action.option_strings for action in arguments._command_parsers[command].actions if action.option_strings]
    assert [names for names in options if not any(re.search(rf"{name}(?![\w-])", text) for name in names)] == []


@pytest.mark.parametrize(
    ("engine", "page"), [("ssh", "ssh"), ("mpirun", "open-mpi"), ("slurm", "slurm"), ("ray", "ray")]
)
def test_the_reference_and_the_page_of_a_launcher_name_its_options(engine, page):
    options = {
        option.value
        for file in (ROOT / "kernel" / "rankbook" / "engines").glob("*.py")
        for cls in ast.parse(file.read_text()).body
        if isinstance(cls, ast.ClassDef) and re.search(rf"^    name\b.* = '{engine}'$", ast.unparse(cls), re.MULTILINE)
        for call in ast.walk(cls)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for option in call.args
        if isinstance(option, ast.Constant)
    }
    assert options, "the parser was not found"
    (row,) = [line for line in MAGICS.splitlines() if line.startswith(f"| [`{engine}`]")]
    texts = (row, (DOCS / "howto" / f"{page}.md").read_text())
    assert [option for option in options if not all(f"`{option} " in text for text in texts)] == []


def test_the_reference_names_the_environment_variables_that_the_code_reads():
    code = "".join(
        file.read_text() for folder in ("kernel", "magics", "widgets") for file in (ROOT / folder).rglob("*.py")
    )
    page = (DOCS / "reference" / "environment-variables.md").read_text()
    assert set(re.findall(r"\bRANKBOOK_[A-Z_]+", page)) == set(re.findall(r"\bRANKBOOK_[A-Z_]+", code))


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of its commands, each by its longest name."""
    names = {max(action.option_strings, key=len) for action in parser._actions if action.option_strings}
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return names.union(*(options_of(command) for group in groups for command in group.choices.values()))


@pytest.mark.parametrize("module", ["rankbook.cli.main", "rankbook.agent"])
def test_the_reference_names_every_option_of_a_command_line(module):
    page = (DOCS / "reference" / "command-line.md").read_text()
    options = options_of(importlib.import_module(module)._parser()) - {"--help"}
    assert len(options) >= 3
    assert sorted(option for option in options if not re.search(rf"{option}(?![\w-])", page)) == []


def test_the_reference_names_the_magics_that_run_on_the_ranks_in_auto_mode():
    section = MAGICS.partition("### auto, view")[2].partition("\n## ")[0]
    assert set(re.findall(r"`%(\w+)`", section)) == auto_mode.RANK_MAGICS
    assert set(re.findall(r"`%%([\w!]+)`", section)) - {"local"} == auto_mode.RANK_CELL_MAGICS


def variables_read_in(file: Path) -> set[str]:
    """Return the names of the environment variables that a file reads under their own names, or has in a table."""

    def reads(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=source)) | ast.Subscript(value=source):
                return "environ" in ast.unparse(source)
            case ast.Compare(comparators=[source]):
                return "environ" in ast.unparse(source)
            case ast.Call(func=ast.Name(id="read_flag" | "read_text" | "_number" | "LauncherVariables")):
                return True
            case ast.Assign(targets=[ast.Name(id="_VARIABLES")]):
                return True
        return False

    found = [node for node in ast.walk(ast.parse(file.read_text())) if reads(node)]
    texts = {part.value for node in found for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", text)}


def test_the_reference_names_the_environment_variables_of_other_programs_that_the_code_reads():
    files = [file for folder in ("kernel", "magics", "widgets") for file in (ROOT / folder).rglob("*.py")]
    names = set().union(*(variables_read_in(file) for file in files if "environ" in file.read_text()))
    assert {"RANK", "PMI_SIZE", "SLURM_NODEID", "NO_COLOR", "XDG_RUNTIME_DIR", "MLFLOW_TAGS"} <= names
    page = (DOCS / "reference" / "environment-variables.md").read_text()
    assert sorted(name for name in names if name not in page) == []


ERRORS = (DOCS / "reference" / "errors.md").read_text()


def test_the_page_of_errors_names_every_class():
    classes = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 15
    assert [name for name in classes if not re.search(rf"\b{name}\b", ERRORS)] == []


def test_the_messages_on_the_page_of_errors_are_those_of_the_code():
    code = "".join(file.read_text() for folder in ("kernel", "magics") for file in (ROOT / folder).rglob("*.py"))
    code = re.sub(r"""["']\s*\n\s*f?["']""", "", code)  # a message may be in several lines
    code = re.sub(r"\{[^{}\n]*\}", "…", code)
    rows = re.findall(r"^\| (`.+?) \| ", ERRORS, flags=re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 30
    assert [message for message in messages if not has_words_of(message, code)] == []
    assert not has_words_of("cannot resume the loader with 3 ranks: …", code)


def has_words_of(message: str, code: str) -> bool:
    """Return True if three successive words of the message are in the code, or all of a shorter one."""
    words = re.sub(r"\d+", "…", message).split()
    return any(" ".join(words[start : start + 3]) in code for start in range(max(1, len(words) - 2)))


@pytest.mark.processes
def test_the_example_in_the_package_s_docstring_returns_what_it_says():
    example = textwrap.dedent((rankbook.__doc__ or "").partition("in a script:\n\n")[2].partition("\n\nThe public")[0])
    call, _, promised = example.splitlines()[-1].partition("#")
    checked = example.replace(call, f"    assert {call.strip()} == {promised.strip()}  ")
    program = f"import rankbook\n{checked}"
    assert "assert cluster.pull" in program
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, ""), program


TRAINED = """
import rankbook, torch
with rankbook.start(2) as cluster:
    cluster.run(
        "torch.manual_seed(0)\\nx = torch.randn(64, 3)\\nmodel = torch.nn.Linear(3, 1)\\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\\n"
        "loader = torch.utils.data.DataLoader(list(zip(x, x.sum(1, keepdim=True))), batch_size=4)\\n"
        "before = model.weight.detach().clone()"
    )
    cluster.run(cell)
    cluster.run("after = accelerator.unwrap_model(model).weight.detach()\\nassert len(loader) == 8")
    before, after = cluster.pull("before"), cluster.pull("after")
    assert torch.equal(after[0], after[1])
    assert (after[0] - 1).norm() < 0.5 * (before[0] - 1).norm()
    assert cluster.pull("accelerator.mixed_precision") == ["bf16"] * 2
"""


@pytest.mark.slow
def test_the_example_of_the_accelerator_trains_on_ranks():
    (example,) = [
        match for match in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "Accelerator(" in match
    ]
    magic, _, cell = example.partition("\n")
    assert magic == "%%distributed"
    program = f"cell = {cell!r}\n{TRAINED}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, ""), program


def test_the_contributing_page_names_arguments_that_the_benchmarks_take():
    lines = re.findall(
        r"^python (tests/benchmarks/\w+\.py.*?)(?:  +#.*)?$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(lines) == 3
    for line in lines:
        script, *arguments = shlex.split(line)
        source = (ROOT / script).read_text()
        assert [argument for argument in arguments if argument.startswith("--") and f'"{argument}"' not in source] == []


@pytest.mark.parametrize("script", ["matrix", "pythons"])
def test_test_files_named_by_checks_exist(script):
    text = (ROOT / ".ci" / script).read_text()
    named = re.findall(r"\btests/[\w/{},.]+", text)
    assert len(named) > 4
    for name in named:
        before, _, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            assert (ROOT / f"{before}{choice}{after}").exists(), f".ci/{script} names {before}{choice}{after}"


def test_the_citation_names_the_version():
    assert f"\nversion: {rankbook.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_text_installs_a_package_of_this_name_from_an_index():
    # It is on none: another program could take the name there.
    pattern = re.compile(r"""pip install (-\S+ )*["']?rankbook(?!-\d)""")
    sources = [path for folder in ("kernel", "magics", "widgets") for path in (ROOT / folder).rglob("*.py")]
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *sources):
        assert not pattern.search(path.read_text()), path
