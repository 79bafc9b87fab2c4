"""A cell's output by rank: live in the browser while the cell runs, then static HTML and text.

The grid has a column per rank; from five ranks on it breaks into rows of ranks, called bands. A block of several bands
is as wide as the grid, and separates what came before it from what comes after it (`grid_rows`).

The functions make the HTML; it needs neither JavaScript nor a kernel, since CSS selects the rank or view to show.
`CellPanel` is the live widget. It sends changes as numbered messages; a browser that misses one, or that opens the
panel later, requests the whole output (`op` "all"). In some front ends such a request arrives only after the cell has
ended, so the whole output is also sent repeatedly: at times after the opening that double, and when its size has
doubled. The total sent stays linear in the size of the output.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from html.parser import HTMLParser
from threading import RLock
from typing import Any

import traitlets

from rankbook.output.by_rank import BlockAdded, BlockRemoved, Change, OutputBlock, OutputHeader, TextAppended
from rankbook.protocol import WIDGET_VIEW
from rankbook.ranks import format_ranks, name_ranks
from rankbook.widgets.live_view import STATIC, EarlyMessageWidget
from rankbook.widgets.rendering import rank_color, to_html

VIEWS = ("merged", "tabs", "grid")
_MAX_COLUMNS = 4
"""Ranks side by side in the grid."""
_NO_ROW = "--rb-row:auto"
_SVG = "image/svg+xml"
_LIVE = (WIDGET_VIEW, "application/javascript")
_IMAGES = (_SVG, "image/png", "image/jpeg", "image/gif", "image/webp")
_RENDERED = ("text/markdown", "text/latex")
_COLOURS = {
    "black": "#5b616e", "red": "#c4302b", "green": "#00803a", "yellow": "#8a6100", "blue": "#0b6bcb",
    "magenta": "#a0409f", "cyan": "#00788a", "white": "#6b7280",
}  # fmt: skip
_COLOUR_PERCENT = 60
"""Percentage of the colour in the text; the rest is the theme's text colour, for contrast on dark backgrounds too."""

_STYLE = """
#ID{--rb-faint:var(--vscode-descriptionForeground,var(--jp-ui-font-color1,#57606a));
--rb-line:var(--vscode-panel-border,var(--jp-border-color1,#bdbdbd));
--rb-focus:var(--vscode-focusBorder,var(--jp-brand-color1,#0b6bcb));
color:var(--vscode-editor-foreground,var(--jp-ui-font-color0,inherit));
background:var(--vscode-editor-background,var(--jp-layout-color0,transparent));font-size:13px}
#ID fieldset{border:0;border-bottom:1px solid var(--rb-line);margin:0 0 4px;padding:0;
display:flex;flex-wrap:wrap;gap:2px}
#ID legend{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
#ID input{position:absolute;opacity:0;width:1px;height:1px;margin:0}
#ID label{cursor:pointer;padding:2px 10px;min-height:20px;border-bottom:3px solid transparent}
#ID input:checked+label{font-weight:600;border-bottom-color:var(--rb-focus)}
#ID input:focus-visible+label{outline:2px solid var(--rb-focus);outline-offset:-2px}
#ID .rb-pieces{max-height:36em;overflow:auto}
#ID .rb-piece{border-left:3px solid var(--rb-colour,var(--rb-line));padding-left:6px;margin:1px 0;min-width:0;
content-visibility:auto;contain-intrinsic-size:auto 1.4em}
#ID .rb-of{color:var(--rb-faint);font-size:11px;margin:0;font-weight:400}
#ID pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;background:none;color:inherit;
font:var(--vscode-editor-font-size,var(--jp-code-font-size,13px))/1.35
var(--vscode-editor-font-family,var(--jp-code-font-family,monospace))}
#ID .rb-stderr{background:color-mix(in srgb,#c4302b 12%,transparent)}
#ID img,#ID svg{max-width:100%}
#ID .rb-isolated{width:100%;height:20em;border:0;background:#fff;resize:vertical}
#ID .rb-bold{font-weight:700}#ID .rb-italic{font-style:italic}#ID .rb-under{text-decoration:underline}
#ID:has(.rb-to-grid:checked) .rb-pieces{display:grid;grid-template-columns:repeat(COUNT,minmax(14em,1fr));gap:0 8px;
grid-auto-flow:dense;align-items:start}
#ID:has(.rb-to-grid:checked) .rb-piece{grid-column:var(--rb-columns);grid-row:var(--rb-row,auto)}
#ID:has(.rb-to-grid:checked) .rb-forgotten{grid-column:1/-1;grid-row:var(--rb-row,auto)}
@media print{#ID .rb-pieces{max-height:none;overflow:visible}#ID .rb-piece{content-visibility:visible}}
"""


def skeleton(name: str, title: str, ranks: Sequence[int], view: str, *, pieces: str = "", header: str = "") -> str:
    """Return the HTML of the panel of a cell called `title` on `ranks`.

    `name` is the element's id, `view` the selected one of `choices`.
    """
    style = _STYLE.replace("ID", name).replace("COUNT", str(columns_per_row(len(ranks))))
    style += "".join(
        f"#{name} .rb-{ansi_name}{{color:{colour};color:color-mix(in srgb,{colour} {_COLOUR_PERCENT}%,currentColor)}}"
        for ansi_name, colour in _COLOURS.items()
    )
    style += "".join(
        f'#{name}:has(.rb-to-{rank}:checked) .rb-piece:not([data-ranks~="{rank}"]){{display:none}}'
        f"#{name}:has(.rb-to-{rank}:checked) .rb-of{{display:none}}"
        for rank in ranks
    )
    # JupyterLab uses the arrow keys to fold headings unless the focused element has this attribute
    radios = "".join(
        f'<input type="radio" name="{name}" id="{name}-{choice}" value="{choice}" class="rb-to-{choice}"'
        f'{" checked" if choice == view else ""} data-lm-suppress-shortcuts="true">'
        f'<label for="{name}-{choice}">{label}</label>'
        for choice, label in choices(ranks).items()
    )
    return (
        f'<div class="rankbook-panel" id="{name}"><style>{style}</style>'
        f"<fieldset><legend>{escape(title)}, by rank</legend>{radios}</fieldset>"
        f'<div class="rb-head">{header}</div>'
        f'<div class="rb-pieces" role="region" tabindex="0" aria-label="Output of {escape(title)}"'
        f"{' data-bands' if len(ranks) > _MAX_COLUMNS else ''}>{pieces}</div></div>"
    )


def columns_per_row(count: int) -> int:
    """Return how many of `count` ranks are side by side in the grid; the rows are equally long, if possible."""
    # Rounded up. 5 ranks are two rows of 3 and 2, not of 4 and 1.
    rows = -(-count // _MAX_COLUMNS)
    return -(-count // rows) if rows else 1


GridPlace = tuple[int, int, int] | None
"""The band, first column and end column of a block; None if it is as wide as the grid."""


def grid_place(of: Sequence[int], ranks: Sequence[int]) -> GridPlace:
    """Return the place of a block of the ranks `of` in the grid of a cell on `ranks`."""
    width = columns_per_row(len(ranks))
    columns = [ranks.index(rank) for rank in of]
    first, last = columns[0], columns[-1]
    # A block in one cell of the grid must have neighbouring columns of one band.
    if columns != list(range(first, last + 1)) or first // width != last // width:
        return None
    return first // width, first % width + 1, last % width + 2


def grid_rows(places: Iterable[GridPlace]) -> list[int]:
    """Return the grid rows of blocks, in order; static/panel.js does the same while the cell runs.

    A block lies below the earlier ones of its columns, and every band below the band before it.
    """
    rows: list[int] = []
    section: list[tuple[int, int]] = []  # band, and row in it, of the blocks since the last one that is as wide
    used: dict[int, dict[int, int]] = {}  # band: column: number of rows
    top = 1

    def end_section() -> None:
        nonlocal top
        # Bands begin below one another. Their heights are known only when the section ends.
        starts = {}
        for band in sorted(used):
            starts[band] = top
            top += max(used[band].values())
        rows.extend(starts[band] + row for band, row in section)
        section.clear()
        used.clear()

    for grid_position in places:
        if grid_position is None:
            end_section()
            rows.append(top)
            top += 1
            continue
        band, first, end = grid_position
        columns = used.setdefault(band, {})
        row = max(columns.get(column, 0) for column in range(first, end))
        columns.update(dict.fromkeys(range(first, end), row + 1))
        section.append((band, row))
    end_section()
    return rows


def with_rows(htmls: Sequence[str], of: Iterable[Sequence[int]], ranks: Sequence[int]) -> str:
    """Return the blocks' HTML, with the rows of the grid if it has bands. `of` are the blocks' ranks."""
    if len(ranks) <= _MAX_COLUMNS:
        return "".join(htmls)
    # The first place stands for the line "previous output is omitted".
    rows = grid_rows([None, *(grid_place(block_ranks, ranks) for block_ranks in of)])[1:]  # after a note on top
    return "".join(html.replace(_NO_ROW, f"--rb-row:{row}", 1) for html, row in zip(htmls, rows, strict=True))


def choices(ranks: Sequence[int]) -> dict[str, str]:
    """Return the values that a reader can select, with their labels."""
    return {"merged": "merged", "grid": "grid", **{str(rank): f"rank {rank}" for rank in ranks}}


def choice_of(view: str, ranks: Sequence[int]) -> str:
    """Return the initial selection for `view`, one of `VIEWS`."""
    return str(ranks[0]) if view == "tabs" else view


def piece_html(block: OutputBlock, ranks: Sequence[int]) -> str:
    """Return the HTML of one block of output; `ranks` are the ranks of the cell."""
    grid_position = grid_place(block.ranks, ranks)
    grid = "--rb-columns:1/-1" if grid_position is None else f"--rb-columns:{grid_position[1]}/{grid_position[2]}"
    data_place = ""
    # With one band, CSS places the blocks by their columns alone.
    if len(ranks) > _MAX_COLUMNS:
        grid += f";{_NO_ROW}"
        data_place = f' data-place="{" ".join(map(str, grid_position or ()))}"'
    colour = f"--rb-colour:{rank_color(block.ranks[0])};" if len(block.ranks) == 1 and len(ranks) > 1 else ""
    label = f'<p class="rb-of">[{format_ranks(block.ranks)}]</p>' if len(ranks) > 1 else ""
    if block.data is not None:
        inner = bundle_html(block.data, block.metadata)
    else:
        inner = f'<pre class="rb-{block.stream}">{to_html(block.text)}</pre>'
    return (
        f'<div class="rb-piece" data-key="{block.key}" data-ranks="{" ".join(map(str, block.ranks))}"'
        f'{data_place} style="{colour}{grid}">{label}{inner}</div>'
    )


def is_live(data: Mapping[str, Any]) -> bool:
    """Return True if only a front end can show the data, such as a widget or a chart that a script draws.

    Scripts in HTML do not run while the cell runs, and later they may depend on JavaScript that is no longer loaded.
    Plotly sends its chart in both formats. Markdown and formulas are rendered by the front end.
    """
    if not any(kind in data for kind in ("text/html", *_IMAGES)):
        return any(kind in _RENDERED or kind.startswith("application/") for kind in data)
    if not any(kind.startswith("application/") for kind in data):
        return False
    return any(kind in data for kind in _LIVE) or "<script" in str(data.get("text/html", ""))


def bundle_html(data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> str:
    """Return the richest format of a mime bundle as static HTML; an image has the width in its metadata."""
    # From the richest format to the simplest. Live formats are shown below the panel, and the panel has their text.
    live, metadata = is_live(data), metadata or {}
    # Objects of IPython.display have no readable plain text.
    has_text = not str(data.get("text/plain", "")).startswith("<IPython.core.display.")
    if not live and isinstance(text := data.get("text/html"), str):
        return _isolated_html(text) if _is_isolated(metadata) else balanced_html(text)
    for kind in _IMAGES:
        if isinstance(text := data.get(kind), str) and not (live and kind == _SVG):
            caption = escape(str(data.get("text/plain", "image"))) if has_text else "image"
            of_kind = metadata.get(kind)
            width = of_kind.get("width") if isinstance(of_kind, Mapping) else None
            size = f' width="{width:g}"' if isinstance(width, (int, float)) else ""
            content = _svg_base64(text) if kind == _SVG else escape(text.strip())
            return f'<img src="data:{kind};base64,{content}" alt="{caption}"{size}>'
    for kind in ("text/markdown", *(("text/plain", "text/latex") if has_text else ("text/latex", "text/plain"))):
        if isinstance(text := data.get(kind), str):
            return f"<pre>{to_html(text)}</pre>"
    return f"<p>({escape(', '.join(data) or 'empty')})</p>"


def _svg_base64(text: str) -> str:
    # An SVG in the page could run scripts, and all of a page share their ids. JupyterLab makes an <img> too, and adds
    # the namespace, without which an image is not drawn.
    if re.search("<svg[^>]+xmlns=", text) is None:
        text = text.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return base64.b64encode(text.encode(errors="replace")).decode()


def _is_isolated(metadata: Mapping[str, Any]) -> bool:
    # As in JupyterLab: what is said about the format precedes what is said about the whole bundle.
    of_html = metadata.get("text/html")
    if isinstance(of_html, Mapping) and "isolated" in of_html:
        return bool(of_html["isolated"])
    return bool(metadata.get("isolated"))


def _isolated_html(text: str) -> str:
    # Scripts may run, but in an origin of their own, so that they do not reach the notebook's page.
    return f'<iframe class="rb-isolated" title="output" sandbox="allow-scripts" srcdoc="{escape(text)}"></iframe>'


_VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
_DOCUMENT = {"html", "head", "body", "plaintext"}
_SCOPES = {"table", "caption", "td", "th", "template", "object"}
_CELLS = {"tr", "td", "th"}
_TABLE = _SCOPES | _CELLS | {"thead", "tbody", "tfoot"}
_LISTS = {"ul", "ol", "menu", "dl"}
_ENDED_BY = {
    "li": ("li",), "dd": ("dd", "dt"), "dt": ("dd", "dt"), "button": ("button",), "table": ("table",),
    "td": ("td", "th"), "th": ("td", "th"), "tr": ("tr",),
}  # fmt: skip
"""Elements that end by the start of another one, with everything in them."""


def balanced_html(html: str) -> str:
    """Return the HTML with all its elements closed, and without end tags of elements that it has not opened.

    Such HTML can stand between other HTML. The tags of a whole document, comments and declarations are left out, as
    they have no effect in the middle of a page.
    """
    parser = _Balancer()
    parser.feed(html)
    parser.close()
    parser.end_elements(0)
    return "".join(parser.parts)


class _Balancer(HTMLParser):
    """Collects balanced HTML in `parts`. A browser is less strict; the result is the same for HTML without errors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - with its attributes as written
        if tag in _DOCUMENT:
            return
        if tag in _ENDED_BY:
            self._end_last(_ENDED_BY[tag], {"table", "template"} if tag in _CELLS else _SCOPES | _LISTS)
        self.parts.append(self.get_starttag_text() or "")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Only in SVG and MathML does the slash close an element. The end tag closes it even if HTML has ended the SVG.
        if tag not in _VOID and not {"svg", "math"}.isdisjoint((*self._open, tag)):
            self.parts.append((self.get_starttag_text() or "").removesuffix("/>") + f"></{tag}>")
        else:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._end_last((tag,), set() if tag in _TABLE else _SCOPES) and tag == "p":
            self.parts.append("</p>")

    def handle_data(self, data: str) -> None:
        is_code = self._open[-1:] in (["script"], ["style"])
        self.parts.append(data if is_code else escape(data, quote=False))

    def end_elements(self, depth: int) -> None:
        """Close the open elements from the innermost one on, until `depth` are left."""
        while len(self._open) > depth:
            tag = self._open.pop()
            # Browsers end a paragraph by themselves, and `</p>` after that would be an empty paragraph.
            if tag != "p":
                self.parts.append(f"</{tag}>")

    def _end_last(self, tags: Sequence[str], barriers: set[str]) -> bool:
        """Close the last open element of `tags` with everything in it, and return whether there is one.

        An element inside a barrier, such as a cell of a table, does not end one outside of it.
        """
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth] in tags:
                self.end_elements(depth)
                return True
            if self._open[depth] in barriers:
                break
        return False


def text_of(blocks: Iterable[OutputBlock]) -> str:
    """Return the output as text, with the ranks before every line."""
    lines = []
    for block in blocks:
        text = block.text if block.data is None else str(block.data.get("text/plain", f"({', '.join(block.data)})"))
        label = f"[{format_ranks(block.ranks)}]"
        lines += [f"{label} {line}" if line else label for line in text.removesuffix("\n").split("\n")]
    return "\n".join(lines)


_FIRST_RESEND = 0.3
"""Seconds after the opening until the whole output is sent again.

The time doubles after every such update, up to `_LAST_RESEND`.
"""
_LAST_RESEND = 10.0
_END = "</pre></div>"
_OMITTED = '<p class="rb-of rb-forgotten">previous output is omitted</p>'


class CellPanel(EarlyMessageWidget):
    """Live panel with the output of a cell called `title` on `ranks`; `name` is the element's id in the page.

    `view` is one of `rankbook.widgets.output_panel.VIEWS`.
    """

    _esm = STATIC / "panel.js"
    name = traitlets.Unicode("").tag(sync=True)
    skeleton = traitlets.Unicode("").tag(sync=True)
    whole = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, name: str, title: str, ranks: Sequence[int], view: str) -> None:
        self._title, self._ranks = title, tuple(ranks)
        self._choice, self._choice_number = choice_of(view, self._ranks), 0
        self._lock = RLock()
        self._htmls: dict[int, list[str]] = {}
        self._ranks_of: dict[int, tuple[int, ...]] = {}
        self._header, self._blocks_omitted = "", False
        self._number = self._sent_number = 0
        self._size = self._sent_size = 0
        self._opened: float | None = None
        self._next_resend = _FIRST_RESEND
        super().__init__(name=name, skeleton=skeleton(name, title, self._ranks, self._choice))

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes of the output and send them to the browser."""
        with self._lock:
            sent = [self._apply_change(change) for change in changes]
            self._number += 1
            # Not displayed yet: `bundle` sends everything.
            if self._opened is None:
                return
            self.send({"number": self._number, "changes": sent})
            since = time.monotonic() - self._opened
            # Sizes are those of the HTML in characters.
            if self._size > 2 * self._sent_size + 1000 or (since > self._next_resend and since < _LAST_RESEND):
                self._next_resend = 2 * since
                self._send_whole()

    def bundle(self) -> dict[str, Any]:
        """Return the mime bundle that displays the panel; later changes are sent as messages."""
        with self._lock:
            self._opened = time.monotonic()
            self._send_whole()
        widget_bundle = super()._repr_mimebundle_()
        data = widget_bundle[0] if isinstance(widget_bundle, tuple) else {}
        return {**data, "text/plain": f"{self._title} on {name_ranks(self._ranks)}"}

    def end(self, blocks: Sequence[OutputBlock]) -> dict[str, str]:
        """Close the widget, and return the static mime bundle that replaces it."""
        with self._lock:
            html = skeleton(
                self.name, self._title, self._ranks, self._choice, pieces=self._all_pieces(), header=self._header
            )
        self.close()
        return {"text/html": html, "text/plain": text_of(blocks)}

    def _apply_change(self, change: Change) -> list[object]:
        match change:
            case BlockAdded(block):
                html = piece_html(block, self._ranks)
                text = block.data is None
                # In parts, so that appended text is inserted before the end without copying what came before it.
                self._htmls[block.key] = [html.removesuffix(_END), _END] if text else [html]
                self._ranks_of[block.key] = block.ranks
                self._size += len(html)
                return ["put", block.key, html]
            case TextAppended(key, text):
                html = to_html(text)
                self._htmls[key].insert(-1, html)
                self._size += len(html)
                return ["more", key, html]
            case BlockRemoved(key, forgotten):
                self._htmls.pop(key, None)
                self._ranks_of.pop(key, None)
                self._blocks_omitted |= forgotten
                return ["drop", key, _OMITTED if forgotten else ""]
            case OutputHeader(bundle):
                self._header = bundle["text/html"]
                return ["head", 0, self._header]

    def _all_pieces(self) -> str:
        htmls = ["".join(parts) for parts in self._htmls.values()]
        blocks = with_rows(htmls, [self._ranks_of[key] for key in self._htmls], self._ranks)
        return (_OMITTED if self._blocks_omitted else "") + blocks

    def _send_whole(self) -> None:
        # Nothing has changed since the last time.
        if self._number != self._sent_number or self.whole == "{}":
            self._sent_number, self._sent_size = self._number, self._size
            self.whole = json.dumps({"number": self._number, "head": self._header, "pieces": self._all_pieces()})

    def _handle(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message.get("op") == "all":
                self._send_whole()
            elif message.get("op") == "choose" and message.get("choice") in choices(self._ranks):
                arrived = message.get("arrived", 0)
                # Messages are handled in threads; an older choice must not replace a newer one.
                if arrived < self._choice_number:
                    return
                self._choice, self._choice_number = str(message["choice"]), arrived
                # for a reloaded page
                self.skeleton = skeleton(self.name, self._title, self._ranks, self._choice)
