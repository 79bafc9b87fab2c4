"""Import the public names of a package on first use, to keep `import rankbook` fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_imports(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`.

    `names` maps modules to the public names that they define.
    """
    module_of = {name: module for module, provided in names.items() for name in provided}

    def get_attribute(name: str) -> Any:  # noqa: ANN401 - any of the names
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get_attribute, list_names
