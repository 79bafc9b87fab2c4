"""What an editor is told of a namespace, without a rank; and that nothing in it is run for that."""

from __future__ import annotations

import functools
import threading
import time

import numpy
import pandas
import pytest
import torch

from rankbook.protocol.queries import GetCompletions, GetInspection
from rankbook.rank.inspect import completion
from rankbook.rank.inspect.completion import MOST, CompletionHandler

RUN: list[str] = []


def ran(what):
    RUN.append(what)
    raise AssertionError(f"user code was run: {what}")


class Meta(type):
    def __getattribute__(cls, name):
        ran(f"metaclass {name}")


class Strange:
    """A trap in every door."""

    limit = 3
    __slots__ = ("__dict__", "slot")

    def __getattr__(self, name):
        ran(name)

    def __getattribute__(self, name):
        ran(name)

    def __dir__(self):
        ran("dir")

    def __repr__(self):
        ran("repr")

    def __len__(self):  # noqa: PLE0303 - it has no length to tell
        ran("len")

    @property
    def computed(self):
        ran("property")

    @property
    def tensor(self) -> torch.Tensor:
        ran("property")

    @functools.cached_property
    def later(self) -> Strange:
        ran("cached property")

    def method(self, alpha, beta=2, *, gamma: int = 3) -> dict:  # noqa: ARG002 - what is told is their names
        """Says nothing."""
        ran("method")


class Net(torch.nn.Module):
    """A small one."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.ReLU())
        self.parts = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2)})
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):  # noqa: ARG002 - torch's signature
        ran("forward")


def make(width: int, *more, depth=[1], **rest) -> Net:  # noqa: B006
    """Make one.

    With a second paragraph.
    """
    ran("make")


@functools.wraps(make)
def wrapped(*args, **kwargs):
    ran(f"wrapped {args} {kwargs}")


def strange():
    made = Strange.__new__(Strange)
    object.__setattr__(made, "own", 1)
    object.__setattr__(made, "slot", {"key": 1})
    return made


NAMESPACE = {
    "model": Net(),
    "Net": Net,
    "trap": strange(),
    "Trap": Strange,
    "Odd": Meta("Odd", (), {"inside": 1}),
    "make": make,
    "wrapped": wrapped,
    "torch": torch,
    "x": torch.ones(2, 3),
    "array": numpy.ones((2, 2)),
    "config": {"learning_rate": 1.0, "layers": {"first": 1}, 3: 4, "it's": 5},
    "frame": pandas.DataFrame({"loss": [1.0], "two words": [2]}),
    "words": ["a", "b"],
    "_hidden": 1,
    "rank": 0,
}


class Work:
    def namespace(self):
        return dict(NAMESPACE)

    def hidden(self):
        return frozenset({"rank", "torch"})


guide = CompletionHandler(Work(), 1)


@pytest.fixture(autouse=True)
def nothing_is_run():
    RUN.clear()
    yield
    assert RUN == []


def complete(text, **options):
    question = GetCompletions(7, text, options.get("cursor", len(text)), options.get("variables", False))
    answer = guide.answer(question)
    assert answer.token == 7
    return answer


def names(text, **options):
    return [each.text for each in complete(text, **options).completions]


def inspect(text, *, source=False, cursor=None):
    return guide.answer(GetInspection(7, text, len(text) if cursor is None else cursor, source)).text


# Completion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("mod", ["model"]),
        ("y = fro", ["from", "frozenset"]),
        ("model.lay", ["layers"]),
        ("model.sc", ["scale"]),
        ("model.layers[0].wei", ["weight"]),
        ("model.layers[-1].inpl", ["inplace"]),
        ("model.layers[0].weight.requires_gr", ["requires_grad", "requires_grad_"]),
        ("model.parts['encoder'].bia", ["bias"]),
        ("model.parts['enc", ["encoder"]),
        ("print(model.layers, x.sha", ["shape"]),
        ("x.shape.cou", ["count"]),
        ("x.grad.requires_grad_", ["requires_grad_"]),
        ("x[0].requires_grad_", ["requires_grad_"]),
        ("array.T.shap", ["shape"]),
        ("torch.nn.functional.cross_entr", ["cross_entropy"]),
        ("torch.Tensor.requires_grad_", ["requires_grad_"]),
        ("trap.ow", ["own"]),
        ("trap.slot['ke", ["key"]),
        ("trap.lim", ["limit"]),
        ("trap.met", ["method"]),
        ("trap.method().upda", ["update"]),
        ("trap.tensor.requires_grad_", ["requires_grad_"]),
        ("trap.later.lim", ["limit"]),
        ("Trap().lim", ["limit"]),
        ("Trap.lim", ["limit"]),
        ("Odd.ins", ["inside"]),
        ("make(3).layers", []),
        ("make(3).forwa", ["forward"]),
        ("make(dep", ["depth="]),
        ("make(1, wid", ["width="]),
        ("Net(wid", ["width="]),
        ("wrapped(dep", ["depth="]),
        ("trap.method(gam", ["gamma="]),
        ("config['lea", ["learning_rate"]),
        ("config['layers']['fi", ["first"]),
        ('config["it', ["it's"]),
        ("config['it", []),
        ("frame['two", ["two words"]),
        ("frame.los", ["loss"]),
        ("words[0].upp", ["upper"]),
        ("for each in words:\n    each_one = 1\n    eac", ["each", "each_one"]),
        ("import torch.optim as op\no", ["op"]),
        ("from torch.nn import Linea", ["Linear"]),
        ("from torch.nn import Linear, ReLU6", ["ReLU6"]),
        ("import torc", ["torch"]),
        ("import torch.distribu", ["distributed", "distributions"]),
        ("from torch.dist", ["distributed", "distributions"]),
        ("# a comment: mod", []),
        ("'model.lay", []),
        ("x = '''\nmodel.lay", []),
        ("f'{1}' + mod", ["model"]),
        ("nowhere.at.all.", []),
        ("1.", []),
        (").", []),
        ("config[", ["config"]),
    ],
)
def test_what_may_follow(text, some):
    found = names(text)
    assert [each for each in some if each not in found] == []
    if not some:
        assert found == []
    assert RUN == []


def test_where_it_stands_and_what_it_is():
    answer = complete("loss = model.layers[0].wei + 1", cursor=26)
    assert answer.start == 23
    assert [(each.text, each.type) for each in answer.completions] == [("weight", "instance")]
    kinds = {each.text: each.type for each in complete("").completions}
    assert (kinds["torch"], kinds["make"], kinds["Trap"], kinds["x"], kinds["for"]) == (
        "module",
        "function",
        "class",
        "instance",
        "keyword",
    )


def test_private_names_come_when_they_are_asked_for():
    assert "_hidden" not in names("") and names("_hid") == ["_hidden"]
    assert not [each for each in names("model.") if each.startswith("_")]
    assert "_parameters" in names("model._par")


def test_variables_are_the_cells_own():
    assert names("mo", variables=True) == ["model"]
    assert "torch" not in names("", variables=True) and "print" not in names("", variables=True)


def test_a_large_answer_is_cut_and_a_long_cell_is_read_from_its_end():
    NAMESPACE["many"] = {f"key{each}": each for each in range(3 * MOST)}
    try:
        assert len(names("many['")) == MOST
    finally:
        del NAMESPACE["many"]
    began = time.thread_time()
    assert names("value = 'text' + (1, [2])  # more\n" * 20_000 + "model.lay") == ["layers"]
    assert time.thread_time() - began < 0.5


def test_a_namespace_that_changes_meanwhile_is_no_trouble():
    done = threading.Event()
    shared = NAMESPACE["shared"] = {"learning_rate": 1.0}

    def change():
        count = 0
        while not done.is_set():
            count += 1
            shared[f"new{count}"] = count
            if count % 50 == 0:
                for each in range(count - 49, count + 1):
                    del shared[f"new{each}"]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            names("shared['")
            inspect("shared")
        done.set()
        thread.join()
        assert names("shared['lea") == ["learning_rate"]
    finally:
        done.set()
        thread.join()
        del NAMESPACE["shared"]


# Inspection ----------------------------------------------------------------------------------------------------------


def test_a_function_is_told_with_its_signature_docstring_and_place():
    text = inspect("make")
    assert "Signature: make(width: int, *more, depth=<list>, **rest) -> Net" in text
    assert "With a second paragraph." in text and __file__ in text and "Rank:      1" in text
    assert "Signature: wrapped(width: int, *more, depth=<list>, **rest) -> Net" in inspect("wrapped")
    assert 'ran("make")' not in text and 'ran("make")' in inspect("make", source=True)


def test_values_are_told_by_what_is_stored():
    text = inspect("model.layers[0].weight")
    assert "Parameter" in text and "[2, 4]" in text and "float32" in text and "cpu" in text and "32 bytes" in text
    assert "4 items" in inspect("config") and "'a'" in inspect("words[0]")
    assert "A small one." in inspect("model") and "5 tensors" in inspect("model")
    assert "class Net" in inspect("model", source=True)


def test_a_trap_is_told_without_stepping_into_it():
    for name in ("trap", "Trap", "Odd", "trap.method", "trap.computed", "trap.tensor", "trap.later", "trap.slot"):
        inspect(name)
        inspect(name, source=True)
    assert "A trap in every door." in inspect("trap")
    assert "not known without computing it" in inspect("trap.tensor")
    assert "Signature: trap.method(alpha, beta=2, *, gamma: int = 3) -> dict" in inspect("trap.method")
    assert RUN == []


def test_it_is_asked_about_what_is_under_the_cursor_or_called_there():
    assert "Make one." in inspect("y = make(1, 2)", cursor=6)
    assert "Make one." in inspect("y = make(1, ", cursor=12)
    assert "builtin_function_or_method" in inspect("print(len(") and "number of items" in inspect("print(len(")
    assert inspect("nowhere") == inspect("") == inspect("# make") == inspect("'make") == ""


# The text before a cursor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("a.b", "a.b"),
        ("x = a.b[0].c", "a.b[0].c"),
        ("f(a, b.c(1)[2]", "b.c(1)[2]"),
        ("return a", "a"),
        ("a. b", "a. b"),
        ("a +", ""),
        ("]", ""),
        ("", ""),
    ],
)
def test_the_expression_that_a_text_ends_with(text, expression):
    assert completion.expression_before(text) == expression


def test_strings_brackets_and_comments_are_known():
    assert completion.cursor_context("f('a(', [1, ").brackets == (1, 8)
    assert completion.cursor_context("f('it\\'s").quote == 2
    assert completion.cursor_context("x = 'not closed\ny").quote is None
    assert completion.cursor_context('"""a\n"b"').quote == 0
    assert completion.cursor_context("x = 1  # 'what").comment
    assert not completion.cursor_context("# 'what\nx").comment
