"""Test completion and inspection without a rank, and that they run no user code."""

from __future__ import annotations

import ast
import functools
import gc
import sys
import threading
import time
import types
import typing
import weakref

import numpy
import pandas
import pytest
import torch

from rankbook.protocol.queries import GetCompletions, GetInspection
from rankbook.rank.inspect.completion import MAX_COMPLETIONS, CodeBeforeCursor, CompletionHandler

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
    __slots__ = ("__dict__", "__weakref__", "slot")

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
        """Do nothing."""
        ran("method")


class Descriptor:
    def __get__(self, instance, owner):
        ran("descriptor")


class Trapped(dict):
    """Runs code at every other door."""

    descriptor = Descriptor()

    def __missing__(self, key):
        ran(f"missing {key}")

    def __iter__(self):
        ran("iter")

    def keys(self):
        ran("keys")

    def __getitem__(self, key):
        ran(f"getitem {key}")

    def __len__(self):  # noqa: PLE0303 - as above
        ran("len")

    @property
    def __class__(self):
        ran("__class__")

    @property
    def __doc__(self):
        ran("__doc__")

    @property
    def __signature__(self):
        ran("__signature__")


class TrappedList(list):
    def __getitem__(self, index):
        ran(f"getitem {index}")


class TrappedTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        ran(f"torch function {func} {types} {args} {kwargs}")


class TrappedKey(str):
    __slots__ = ()

    def __repr__(self):
        ran("repr of a key")

    def __hash__(self):
        return 1

    def __eq__(self, other):
        ran(f"a key == {other}")


class TrappedModule(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__all__ = ["promised", 3]

    def __getattr__(self, name):
        ran(f"module {name}")


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


class Defaults:
    def __repr__(self):
        ran("repr of a default")


class Annotation(metaclass=Meta):
    pass


def trapping(first=Defaults(), second=torch.ones(1), third=None, fourth=None, fifth=None):  # noqa: B008
    ran(f"trapping {first} {second} {third} {fourth} {fifth}")


@functools.wraps(make)
def wrapped(*args, **kwargs):
    ran(f"wrapped {args} {kwargs}")


def strange():
    instance = Strange.__new__(Strange)
    object.__setattr__(instance, "own", 1)
    object.__setattr__(instance, "slot", {"key": 1})
    return instance


trapping.__annotations__ = {
    "first": Annotation,
    "second": Defaults(),
    "third": typing.Annotated[int, Defaults()],
    "fourth": list[Annotation],
    "fifth": typing.Callable[..., torch.Tensor | None],
    "return": Annotation,
}
trapping.__signature__ = trapping.__wrapped__ = strange()
trapping.getdoc = lambda: ran("getdoc")


def looped(alpha):
    ran(f"looped {alpha}")


looped.__wrapped__ = looped

NAMESPACE = {
    "model": Net(),
    "Net": Net,
    "Trapped": Trapped,
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
    "trapped": Trapped(key=["value"]),
    "trapped_list": TrappedList([["value"]]),
    "trapped_tensor": torch.ones(2).as_subclass(TrappedTensor),
    "trapped_keys": {TrappedKey("first"): 1, "second": 2},
    "trapped_module": TrappedModule("trapped_module"),
    "trapping": trapping,
    "looped": looped,
    "table": {("encoder", "weight"): 1, ("encoder", "bias"): 2},
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
def nothing_is_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "trapped_module", NAMESPACE["trapped_module"])
    RUN.clear()
    yield
    assert RUN == []


def complete(text, **options):
    question = GetCompletions(7, text, options.get("cursor", len(text)), options.get("variables", False))
    answer = guide.answer(question)
    assert answer.token == 7
    return answer


def names(text, **options):
    return [completion.text for completion in complete(text, **options).completions]


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
        ("trapped.des", ["descriptor"]),
        ("trapped.descriptor.", []),
        ("trapped['ke", ["key"]),
        ("trapped['key'][0].upp", ["upper"]),
        ("trapped['absent'].upp", []),
        ("Trapped().cle", ["clear"]),
        ("trapped_list[0][0].upp", ["upper"]),
        ("trapped_tensor.requires_grad_", ["requires_grad_"]),
        ("trapped_tensor.grad.requires_grad_", ["requires_grad_"]),
        ("trapped_keys['", ["second"]),
        ("trapped_module.__na", ["__name__"]),
        ("trapped_module.absent.", []),
        ("from trapped_module import __na", ["__name__"]),
        ("trapped_module.prom", ["promised"]),
        ("from trapped_module import prom", ["promised"]),
        ("trapping(fir", ["first="]),
        ("trapped(", ["model"]),
        ("make(3).layers", []),
        ("make(3).forwa", ["forward"]),
        ("make(dep", ["depth="]),
        ("make(1, wid", ["width="]),
        ("Net(wid", ["width="]),
        ("wrapped(dep", ["depth="]),
        ("looped(alp", ["alpha="]),
        ("trap.method(gam", ["gamma="]),
        ("config['lea", ["learning_rate"]),
        ("config['layers']['fi", ["first"]),
        ('config["it', ["it\\'s"]),
        ("config['it", ["it\\'s"]),
        ("config['lea' * 10**10, 'lea", []),
        ("config[10**10**10, 'lea", []),
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
        ("make(1, depth=2, ", ["width=", "model"]),
        ("make(\n    1,  # (one\n    dep", ["depth="]),
        ("lambda: make(1)\n", ["model"]),
        ("[model][0].app", []),
        ("[model].app", ["append"]),
        ("(model\n    .layers[0]\n    .wei", ["weight"]),
        ("model.layers[len(words)].wei", []),
        ("x[rank + 1, :2].requires_grad_", ["requires_grad_"]),
        ("return make(1, depth={'(': 2}).forwa", ["forward"]),
        ("(10**10**10).bit_l", []),
        ("nowhere.at.all.", []),
        ("1.", []),
        (").", []),
        ("config[", ["config"]),
    ],
)
def test_completions_of_code(text, some):
    completions = names(text)
    assert [item for item in some if item not in completions] == []
    if not some:
        assert completions == []
    assert RUN == []


def test_completion_has_its_start_and_type():
    answer = complete("loss = model.layers[0].wei + 1", cursor=26)
    assert answer.start == 23
    assert [(item.text, item.type) for item in answer.completions] == [("weight", "instance")]
    kinds = {completion.text: completion.type for completion in complete("").completions}
    assert (kinds["torch"], kinds["make"], kinds["Trap"], kinds["x"], kinds["for"]) == (
        "module",
        "function",
        "class",
        "instance",
        "keyword",
    )


def test_private_names_come_when_they_are_asked_for():
    assert "_hidden" not in names("") and names("_hid") == ["_hidden"]
    assert not [name for name in names("model.") if name.startswith("_")]
    assert "_parameters" in names("model._par")


def test_variables_are_the_cells_own():
    assert names("mo", variables=True) == ["model"]
    assert "torch" not in names("", variables=True) and "print" not in names("", variables=True)


def test_a_large_answer_is_cut_and_a_long_cell_is_read_from_its_end():
    NAMESPACE["many"] = {f"key{number}": number for number in range(3 * MAX_COMPLETIONS)}
    try:
        assert len(names("many['")) == MAX_COMPLETIONS
    finally:
        del NAMESPACE["many"]
    start = time.thread_time()
    assert names("value = 'text' + (1, [2])  # more\n" * 20_000 + "model.lay") == ["layers"]
    assert time.thread_time() - start < 0.5


def test_a_namespace_that_changes_meanwhile_is_no_trouble():
    done = threading.Event()
    shared = NAMESPACE["shared"] = {"learning_rate": 1.0}

    def change():
        count = 0
        while not done.is_set():
            count += 1
            shared[f"new{count}"] = count
            if count % 50 == 0:
                for number in range(count - 49, count + 1):
                    del shared[f"new{number}"]

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


@pytest.mark.parametrize("code", ["", "held", "held.", "held(", "[held][0].", "held['", "from held import "])
def test_completion_keeps_no_object_alive(code):
    def function(value=strange()):  # noqa: B008
        ran(f"held {value}")

    alive = weakref.ref(function.__defaults__[0])
    NAMESPACE["held"] = function
    try:
        names(code)
        inspect(code)
    finally:
        del NAMESPACE["held"], function
    gc.collect()
    assert alive() is None


# Inspection ----------------------------------------------------------------------------------------------------------


def test_a_function_is_reported_with_its_signature_docstring_and_place():
    text = inspect("make")
    assert "Signature: make(width: int, *more, depth=<list>, **rest) -> Net" in text
    assert "With a second paragraph." in text and __file__ in text and "Rank:      1" in text
    assert "Signature: wrapped(width: int, *more, depth=<list>, **rest) -> Net" in inspect("wrapped")
    assert 'ran("make")' not in text and 'ran("make")' in inspect("make", source=True)


def test_values_are_reported_by_what_is_stored():
    text = inspect("model.layers[0].weight")
    assert "Parameter" in text and "[2, 4]" in text and "float32" in text and "cpu" in text and "32 bytes" in text
    assert inspect("array").count("ndarray(shape, dtype=") == 1, "and not once more as C code declares it"
    assert "4 items" in inspect("config") and "'a'" in inspect("words[0]")
    assert "A small one." in inspect("model") and "5 tensors" in inspect("model")
    assert "class Net" in inspect("model", source=True)


def test_a_trap_is_reported_without_stepping_into_it():
    of_trap = ["trap.method", "trap.computed", "trap.tensor", "trap.later", "trap.slot"]
    for name in [name for name in NAMESPACE if "trap" in name.lower()] + of_trap + ["Odd", "trapped['key']"]:
        assert inspect(name) or name == "trap.computed"
        inspect(name, source=True)
    assert "A trap in every door." in inspect("trap")
    assert "unknown until it is computed" in inspect("trap.tensor")
    assert "Signature: trap.method(alpha, beta=2, *, gamma: int = 3) -> dict" in inspect("trap.method")
    text = inspect("trapping")
    for parameter in (
        "first: Annotation = <Defaults>",
        "second: <Defaults> = <Tensor>",
        "third: <_AnnotatedAlias> = None",
        "fourth: <GenericAlias> = None",
        "fifth: Callable[..., torch.Tensor | None] = None",
        ") -> Annotation",
    ):
        assert parameter in text
    assert RUN == []


def test_inspection_concerns_the_name_under_the_cursor_or_the_call():
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
        ("a. b", "a.b"),
        ("print('it (', a.b", "a.b"),
        ("f(a)(b, c).d", "f(a)(b, c).d"),
        ("[a][0].b", "[a][0].b"),
        ("x[a", "a"),
        ("a +", None),
        ("]", None),
        ("", None),
    ],
)
def test_the_expression_that_a_text_ends_with(text, expression):
    node = CodeBeforeCursor(text).expression_before(len(text))
    assert (node and ast.unparse(node)) == expression


def test_strings_brackets_and_comments_are_known():
    assert CodeBeforeCursor("f('a(', [1, ").opened == [1, 8]
    assert CodeBeforeCursor("f('it\\'s").state == "string"
    assert CodeBeforeCursor("x = 'not closed\ny").state == "code"
    assert CodeBeforeCursor('"""a\n"b"').state == "string"
    assert CodeBeforeCursor('"""a\n"b\n"""').state == "code"
    assert CodeBeforeCursor("x = 1  # 'what").state == "comment"
    assert CodeBeforeCursor("# 'what\nx").state == "code"
