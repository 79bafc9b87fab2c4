"""Names of `accelerate.logging`: the logger that writes once per host or rank.

They are those of `rankbook.runtime`. The import of another name of Accelerate raises an ImportError that says what to
use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankbook.accelerate_names import reexport

if TYPE_CHECKING:
    from rankbook.runtime import get_logger

__all__ = ["get_logger"]

__getattr__, __dir__ = reexport(__name__, __all__)
