"""Execute the example notebooks and store them with their outputs in docs/examples: `python docs/render.py [NAME...]`.

The documentation shows these copies. The notebooks in `examples` are stored without outputs. tests/test_examples.py
checks that both have the same cells.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
RENDERED = ROOT / "docs" / "examples"
WIDGET = "application/vnd.jupyter.widget-view+json"


def render(name: str) -> None:
    """Execute the example `name` with two ranks, and store it without data that only a live notebook can use."""
    target = RENDERED / f"{name}.ipynb"
    arguments = [str(EXAMPLES / target.name), "-n", "2", "--output", str(target)]
    subprocess.run([sys.executable, "-m", "rankbook.cli", "run", *arguments], check=True)
    notebook = nbformat.read(target, as_version=4)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:  # a live view is followed by its static HTML
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    text = nbformat.writes(notebook).replace(f"{ROOT}/kernel/", "")  # an editable install
    target.write_text(re.sub(r'/[^\s"\\]*?/site-packages/', "", text) + "\n")


def main() -> None:
    """Render the examples that the command line names, by default all."""
    RENDERED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or sorted(path.stem for path in EXAMPLES.glob("*.ipynb")):
        render(name)


if __name__ == "__main__":
    main()
