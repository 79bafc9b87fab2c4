"""Take the pictures of the documentation from real ranks in JupyterLab: `python docs/pictures.py [views | quickstart]`.

`views` writes docs/pictures: every view in the light and the dark theme, and in a notebook that was exported to HTML.
`quickstart` writes docs/quickstart.gif. Both need playwright and Debian's Chromium, as tests/browser does, and take a
few minutes on two cores. `--folder` writes elsewhere.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image, ImageChops
from playwright.sync_api import Locator, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import jupyter  # noqa: E402
from tests.browser.jupyter import CELL, Notebook, Server, launch, open_page  # noqa: E402

COURSE = 20.0  # seconds of training before the pictures, so that the lines of the course are there
START = "%load_ext rankbook\n%distributed start -n 4"
MODEL = """\
%%distributed
from torch import nn
from rankbook import Accelerator, FullyShardedDataParallelPlugin
from rankbook.checkpoint import save, sharded_state_dict

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)]
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
model = nn.Sequential(*blocks)
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)"""
TRAIN = """\
%%distributed --background
import os, time

x = torch.randn(16, 512)
step = 0
while not any(accelerator.gather(torch.tensor([os.path.exists("stop")]))):
    loss = (model(x) - x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step in (5, 10, 15):
        save(sharded_state_dict(model, optimizer), "run", step=step)
    time.sleep(0.1)"""
PANEL = """\
%%distributed --view grid
import matplotlib.pyplot as plt

torch.manual_seed(rank)
losses = [1 / (1 + 0.3 * step) + 0.02 * torch.rand(()).item() for step in range(20)]
figure, axes = plt.subplots(figsize=(2.4, 1.3))
axes.plot(losses)
axes.set(title=f"rank {rank}")
plt.show()
print(f"last loss {losses[-1]:.3f}")"""
VIEWS = {
    # name: cell, a text that is there when the view is complete
    "placement": ("import rankbook\nrankbook.placement()", "4 ranks"),
    "shards": ("rankbook.shards('model')", "offset [0, 0]"),
    "checkpoints": ("rankbook.checkpoints('run')", "step-15"),
    "dashboard": ("rankbook.dashboard('run', variable='model')", "4 ranks"),
    "panel": (PANEL, "last loss"),
}
QUICKSTART = [
    START,
    """\
%%distributed
from torch import nn
from rankbook import Accelerator

torch.manual_seed(0)
accelerator = Accelerator()
x = torch.randn(256, 16)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.003))""",
    """\
%%distributed
import time

def train(steps):
    for step in range(1, steps + 1):
        loss = (model(x).squeeze() - x.sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3}   loss {loss.item():.3f}")
        time.sleep(0.03)""",
    "%%distributed --background\ntrain(1000)",
    """\
import os, rankbook, signal

os.kill(rankbook.current().status()[2].pid, signal.SIGKILL)""",
    "%distributed heal",
    "%%distributed\ntrain(50)",
]


@contextmanager
def opened(cells: list[str], theme: str, *, width: int = 1280, height: int = 1000) -> Iterator[Notebook]:
    """Open a notebook of these cells in JupyterLab."""
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        (folder / "ipython").mkdir()
        jupyter.ipython_folder = lambda: str(folder / "ipython")  # without the tests' longer timeouts
        server = Server(folder)
        browser = launch(playwright)
        try:
            server.theme(f"JupyterLab {theme}")
            notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
            notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(notebook, folder / "pictures.ipynb")
            with open_page(browser, folder) as page:
                page.set_viewport_size({"width": width, "height": height})
                opened_notebook = Notebook(page, server, "pictures.ipynb")
                page.keyboard.press("Control+b")  # without the list of files
                yield opened_notebook
                opened_notebook.shut_down()
        finally:
            browser.close()
            server.close()


# Pictures of the views ----------------------------------------------------------------------------------------------


def take_views(folder: Path) -> None:
    """Write a picture of every view in both themes, and in the exported notebook."""
    for theme in ("Light", "Dark"):
        cells = [START, MODEL, TRAIN, *(cell for cell, _ in VIEWS.values())]
        with opened(cells, theme) as notebook:
            for number in (0, 1, 2):
                notebook.run(number, timeout=120)
            places = {name: 3 + number for number, name in enumerate(VIEWS)}
            for name in ("placement", "shards", "checkpoints", "dashboard"):
                notebook.run(places[name], timeout=60)
            placement = notebook.cell(places["placement"]).locator(".rankbook-view")
            expect(placement).to_contain_text(VIEWS["placement"][1])
            expect(notebook.cell(places["checkpoints"])).to_contain_text("step-15", timeout=240_000)
            notebook.page.wait_for_timeout(1000 * COURSE)
            placement.locator("[data-rank='2']").click()
            expect(placement.locator(".rb-near")).to_contain_text("accelerator.backward")
            for name in ("placement", "shards", "checkpoints", "dashboard"):
                view = notebook.cell(places[name]).locator(".rankbook-view")
                expect(view).to_contain_text(VIEWS[name][1])
                write(picture(view), folder / f"{name}-{theme.lower()}.png")
            (notebook.server.folder / "stop").touch()
            notebook.run(places["panel"], timeout=120)
            panel = notebook.cell(places["panel"]).locator(".rankbook-panel")
            expect(panel).to_contain_text(VIEWS["panel"][1])
            write(picture(panel), folder / f"panel-{theme.lower()}.png")
            if theme == "Light":
                notebook.save()
                take_export(notebook, folder, places)


def take_export(notebook: Notebook, folder: Path, places: dict[str, int]) -> None:
    """Export the notebook to HTML, which has no kernel and no widgets, and write a picture of every view in it."""
    file = notebook.server.folder / notebook.name
    subprocess.run([sys.executable, "-m", "nbconvert", "--to", "html", str(file)], check=True, capture_output=True)
    page = notebook.page.context.new_page()
    page.goto(file.with_suffix(".html").as_uri())
    cells = page.locator(".jp-CodeCell")
    for name in VIEWS:
        index = places[name]
        write(picture(cells.nth(index).locator(".jp-Cell-outputWrapper")), folder / f"{name}-static.png")
    page.close()


def picture(output: Locator) -> bytes:
    """Return the picture of a part of a page, without the pointer, while the page stands still."""
    output.scroll_into_view_if_needed()
    output.page.mouse.move(2, 2)
    for _ in range(20):
        before = output.bounding_box()
        output.page.wait_for_timeout(300)
        png = output.screenshot()
        if output.bounding_box() == before:  # a view above may have grown, which moves this one
            return png
    raise TimeoutError("the page did not stand still")


def write(png: bytes, file: Path) -> None:
    """Write a picture with a palette, which is a third of the bytes."""
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


# The moving picture --------------------------------------------------------------------------------------------------


class Recorder:
    """Takes a frame whenever it is asked, and keeps how long each different one was seen."""

    def __init__(self, page: Page) -> None:
        self._place = page.locator(".jp-NotebookPanel-notebook")
        self.frames: list[Image.Image] = []
        self.milliseconds: list[int] = []
        self._read: dict[int, int] = {}
        self._last = time.monotonic()

    def read(self, seconds: float) -> None:
        """Add a frame that is seen for this long."""
        self.take()
        self._read[len(self.frames) - 1] = round(1000 * seconds)

    def take(self) -> None:
        """Add a frame if something has changed."""
        png = self._place.screenshot()
        frame = Image.open(io.BytesIO(png)).convert("RGB")
        now = time.monotonic()
        if self.frames:
            self.milliseconds[-1] += round(1000 * (now - self._last))
        self._last = now
        if not self.frames or ImageChops.difference(frame, self.frames[-1]).getbbox():
            self.frames.append(frame)
            self.milliseconds.append(0)

    def take_until(self, condition: Callable[[], bool], *, timeout: float = 120) -> None:
        """Take frames until the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the notebook did not show what the picture waits for")
            self.take()
            self._place.page.wait_for_timeout(150)
        self.take()

    def write(self, file: Path) -> None:
        """Write the frames as a GIF. Waiting is cut to 0.8 s, except for the frames that are to be read."""
        durations = [
            self._read.get(number, min(max(40, milliseconds), 800))
            for number, milliseconds in enumerate(self.milliseconds)
        ]
        palette = self.frames[len(self.frames) // 2].quantize(64)
        frames = [frame.quantize(64, palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        frames[0].save(file, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
        print(f"{file.name}: {len(frames)} frames, {sum(durations) / 1000:.1f} s, {file.stat().st_size / 1000:.0f} kB")


def take_quickstart(file: Path) -> None:
    """Record the run: four ranks train, one of them is killed and healed, and the training goes on."""
    with opened(QUICKSTART, "Light", width=900, height=720) as notebook:
        page = notebook.page
        recorder = Recorder(page)

        def text(number: int) -> str:
            return page.locator(CELL).nth(number).locator(".jp-OutputArea").first.inner_text()

        def run(number: int, shows: str) -> None:
            notebook.start(number)
            notebook.cell(number).scroll_into_view_if_needed()
            recorder.take_until(lambda: shows in text(number))

        for number in (0, 1, 2):
            notebook.run(number, timeout=120)
        notebook.cell(3).scroll_into_view_if_needed()
        recorder.read(1.5)
        run(3, "step  60")
        notebook.start(4)
        recorder.take_until(lambda: "killed" in text(3))
        notebook.cell(3).evaluate("cell => cell.scrollIntoView()")
        recorder.read(3)
        run(5, "healed")
        recorder.read(2)
        run(6, "step  50")
        recorder.read(3)
    recorder.write(file)


def main() -> None:
    """Take the pictures that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["all", "views", "quickstart"], default="all")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where the pictures are written")
    arguments = parser.parse_args()
    (arguments.folder / "pictures").mkdir(parents=True, exist_ok=True)
    if arguments.what != "quickstart":
        take_views(arguments.folder / "pictures")
    if arguments.what != "views":
        take_quickstart(arguments.folder / "quickstart.gif")


if __name__ == "__main__":
    main()
