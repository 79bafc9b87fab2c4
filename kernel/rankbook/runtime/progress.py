"""tqdm on one process.

Owns: on which. Refuses: to require tqdm before it is used.
"""

from __future__ import annotations

from typing import Any

from rankbook.errors import BadRequest
from rankbook.runtime.process_state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:  # noqa: ANN401 - tqdm's
    """`tqdm.auto.tqdm`, shown on the first process of each host only; elsewhere it iterates silently.

    Raises `BadRequest` where tqdm is not installed, and for a bool in the iterable's place, which is an old signature.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise BadRequest("tqdm shows the progress and is not installed here: pip install tqdm") from None
    if args and isinstance(args[0], bool):
        raise BadRequest("the first argument of tqdm is what it iterates over; give main_process_only by its name")
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
