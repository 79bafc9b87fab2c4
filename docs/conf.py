"""Sphinx configuration. CONTRIBUTING.md has the command that builds the documentation."""

from __future__ import annotations

import importlib
import logging
import re
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from IPython.lib.lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.token import Keyword, Operator, Text
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging as sphinx_logging

project = "Rankbook"
version = release = installed_version("rankbook")
html_title = f"Rankbook {version}"

extensions = [
    "myst_nb",  # Markdown pages, through myst-parser, and the example notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",  # the diagrams of states.md
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
language = "en"
smartquotes = False  # quotation marks belong to code

# Markdown
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]

# Notebooks are shown with the outputs that their files have: docs/render.py executes them. A build starts no ranks.
nb_execution_mode = "off"
nb_render_error_lexer = "myst-ansi"  # the default reads no tracebacks of several ranks

# Docstrings. A name in single backticks becomes a link if the name is documented, and a literal otherwise.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Links to the documentation of other packages. Without a network, a build has no such links.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
intersphinx_timeout = 10
intersphinx_disabled_reftypes = ["*"]  # only `external` roles and names in signatures refer to other packages

# Code blocks
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# Pages
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "navbar_end": ["theme-switcher"],
    "footer_end": [],
}
html_show_sourcelink = False
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))

PACKAGES = ("rankbook", "rankbook.checkpoint", "rankbook.engines", "rankbook.testing")
"""Packages whose public names the reference must contain. `rankbook` has all names of `rankbook.runtime`."""


class CellLexer(IPython3Lexer):
    """Highlight cells for the ranks as Python. IPython's lexer leaves the code below an unknown cell magic plain."""

    tokens = {  # noqa: RUF012 - as in all lexers of Pygments
        **IPython3Lexer.tokens,
        "root": [
            (
                r"(?s)\A(%%)(distributed|local)([^\n]*\n)(.*)",
                bygroups(Operator, Keyword, Text, using(IPython3Lexer)),
            ),
            *IPython3Lexer.tokens["root"],
        ],
    }


def mark_code_blocks(*event: Any) -> None:  # noqa: ANN401 - the arguments of `autodoc-process-docstring`
    """Turn indented blocks after a paragraph into literal blocks, in the lines of a docstring."""
    lines: list[str] = event[-1]
    text = re.sub(r"(?m)^((?![.:])\S.*[^:]):\n\n(?=    \S)", r"\1::\n\n", "\n".join(lines))
    text = re.sub(r"(?m)^((?![.:])\S.*[^:])\n\n(?=    \S)", r"\1\n\n::\n\n", text)
    lines[:] = text.split("\n")


def check_reference(_app: Sphinx, env: BuildEnvironment) -> None:
    """Warn about public names that are missing from the reference."""
    documented = env.domains.python_domain.objects
    for package in PACKAGES:
        names = importlib.import_module(package).__all__
        missing = sorted(name for name in names if f"{package}.{name}" not in documented)
        if missing:
            sphinx_logging.getLogger(__name__).warning("not in docs/reference: %s: %s", package, ", ".join(missing))


def keep_files_in_build(app: Sphinx) -> None:
    """Write the images of notebooks into the build folder. The default is its parent, which is `docs`."""
    folder = str(Path(app.outdir) / "jupyter_execute")
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=folder)


class Unreachable(logging.Filter):
    """Report an inventory that cannot be downloaded as information: a build without a network must succeed."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lower the level of the record if it is about an inventory."""
        if "failed to reach any of the inventories" in str(record.msg):
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the functions of this file."""
    app.add_lexer("python", CellLexer)
    app.connect("builder-inited", keep_files_in_build, priority=900)  # after myst_nb's own function
    app.connect("autodoc-process-docstring", mark_code_blocks)
    app.connect("env-check-consistency", check_reference)
    logging.getLogger("sphinx.sphinx.ext.intersphinx").addFilter(Unreachable())
    return {"parallel_read_safe": True}
