"""Puts outputs into the notebook.

Owns: the only use of IPython's display here. Refuses: to know what is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display


def has_front_end() -> bool:
    """Whether this is a Jupyter front end, and not a terminal."""
    return getattr(get_ipython(), "kernel", None) is not None


def show(
    bundle: Mapping[str, Any], display_id: str | None = None, *, update: bool = False, still: str | None = None
) -> None:
    """Show a mime bundle as an output, or as the new state of the one that has that id.

    `still`: the id of the output below, which says all of it where nothing is live; `rankbook run` shows that alone.
    """
    if display_id is None:
        display(dict(bundle), raw=True, metadata={"rankbook_still": still} if still else None)
    else:
        display(dict(bundle), raw=True, display_id=display_id, update=update)
