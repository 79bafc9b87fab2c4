"""Test that public names, their parameters and base classes, the command line, and the magics stay.

`public_surface.json` records it. `python -m tests.test_public_surface` writes the record anew; its diff shows what a
change adds, and it must take nothing away without a note in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rankbook.magics import arguments
from rankbook.magics.magics import DistributedMagics

RECORD = Path(__file__).with_name("public_surface.json")
PACKAGES = ("rankbook", "rankbook.runtime", "rankbook.checkpoint", "rankbook.engines", "rankbook.testing")


def parameters(function: Any) -> list[str]:
    """Return the parameters of a callable with their defaults and without annotations."""
    try:
        signature_parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a class of a C extension
        return ["?"]
    # A default that is an object shows its address or the module that it was made in.
    return [
        re.sub(r" at 0x\w+|<class '[\w.]*\.(\w+)'>", r"\1", str(item.replace(annotation=item.empty)))
        for item in signature_parameters
    ]


def describe(value: Any) -> Any:
    """Return what a user can rely on of a public object."""
    if inspect.isclass(value):
        members = {
            name: parameters(member) if callable(member) else type(member).__name__
            for name, member in inspect.getmembers(value)
            if not name.startswith("_") and _is_ours(value, name)
        }
        bases = [base.__name__ for base in value.__mro__[1:] if base.__module__.split(".")[0] != "rankbook"]
        return {"class": parameters(value), "bases": bases, "members": members}
    if callable(value):
        return {"function": parameters(value)}
    return {"value": type(value).__name__}


def _is_ours(cls: type, name: str) -> bool:
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    return owner.__module__.split(".")[0] == "rankbook"


def options_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options, positional arguments and commands of a parser."""
    surface_of_parser: dict[str, Any] = {"options": [], "arguments": [], "commands": {}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            surface_of_parser["commands"] = {name: options_of(below) for name, below in action.choices.items()}
        elif action.help != argparse.SUPPRESS or not action.option_strings:
            surface_of_parser["options" if action.option_strings else "arguments"].append(
                action.option_strings or action.dest
            )
    return surface_of_parser


def surface() -> dict[str, Any]:
    """Return the whole public surface."""
    recorded: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        recorded[package] = {name: describe(getattr(module, name)) for name in sorted(module.__all__)}
    recorded["magics"] = {kind: sorted(names) for kind, names in DistributedMagics.magics.items()}
    help_text = arguments.help_text()
    recorded["%distributed"] = sorted(
        set(re.findall(r"(?<![\w-])--?[a-z][\w-]*|^    [a-z]+(?=  )", help_text, re.MULTILINE))
    )
    recorded["command line"] = options_of(importlib.import_module("rankbook.cli.main")._parser())
    return recorded


@pytest.mark.processes  # the imports of some packages look for libraries with ldconfig
def test_public_surface_is_the_recorded_one():
    assert json.loads(json.dumps(surface())) == json.loads(RECORD.read_text())


if __name__ == "__main__":
    RECORD.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
