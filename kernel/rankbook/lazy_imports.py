"""Import the public names of a package on first use, to keep `import rankbook` fast, and find what was imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def loaded_module(name: str) -> ModuleType | None:
    """Return the module `name` if its import has ended, otherwise None: then nothing in it has been used yet.

    `sys.modules` also has a module that another thread is importing, without most of its attributes.
    """
    module = sys.modules.get(name)
    # importlib sets this while it executes a module, and an `import` on another thread waits for as long.
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def lazy_imports(
    package: str,
    names: Mapping[str, Iterable[str]],
    explain_missing: Callable[[str, str], str | None] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`.

    `names` maps modules to the public names that they define. `dir` lists these names, and no other module.
    `explain_missing(package, name)` returns the text of the ImportError for a name that is missing, or None for a plain
    AttributeError. Python replaces the text of an AttributeError in `from package import name`, but not that of
    an ImportError.
    """
    # Example: {"rankbook.errors": ("StartError",)} becomes {"StartError": "rankbook.errors"}. The first access of
    # `rankbook.StartError` imports that module; `import rankbook` alone does not.
    module_of = {name: module for module, provided in names.items() for name in provided}

    def get_attribute(name: str) -> Any:  # noqa: ANN401 - any of the names
        if name not in module_of:
            text = None if explain_missing is None else explain_missing(package, name)
            if text is not None:
                raise ImportError(text, name=package)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The import lock of Python makes this safe when two threads use a name for the first time.
        value = getattr(import_module(module_of[name]), name)
        # From now on the name is an ordinary attribute, and Python does not call this function for it any more.
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*(name for name in vars(sys.modules[package]) if name.startswith("__")), *module_of})

    return get_attribute, list_names
