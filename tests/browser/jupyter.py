"""A real JupyterLab and Notebook 7, driven through Chromium: the server, its pages, and the actions of a user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Page, Playwright, expect

from tests.conftest import ipython_folder

ROOT = Path(__file__).resolve().parent.parent.parent
CELL = ".jp-Notebook .jp-CodeCell"
SETTLED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
PREAMBLE = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.widgets.fakes import *"


def chromium() -> str | None:
    """Return the path of Chromium, or of Chrome."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def launch(playwright: Playwright) -> Browser:
    """Launch Chromium without a window, and without its sandbox, which needs what a container does not have."""
    return playwright.chromium.launch(
        executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    )


class Server:
    """Runs a Jupyter server with Lab and Notebook, in a new folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = {"IdentityProvider.token": "t", "ServerApp.disable_check_xsrf": True, "ServerApp.port_retries": 0}
        options = [f"--{name}={value}" for name, value in settings.items()]
        self.log = (folder / "server.log").open("wb")
        environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(folder / "config"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["TZ"] = "UTC"  # the pictures show times
        environment["IPYTHONDIR"] = ipython_folder()
        environment["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
        environment["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
        root = ["--allow-root"] if os.geteuid() == 0 else []
        for attempt in range(5):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={self.port}", "--ip=127.0.0.1",
                 f"--ServerApp.root_dir={folder}", *root, *options],
                cwd=folder, env=environment, stdout=self.log, stderr=self.log, start_new_session=True,
            )  # fmt: skip
            try:
                self.wait_ready(timeout=120)
                break
            except RuntimeError as error:
                # Another process may have taken the port meanwhile.
                if attempt == 4 or "is not available" not in str(error):
                    raise

    def wait_ready(self, *, timeout: float) -> None:
        """Wait until it lists its kernels: a page that asks for them too early lets the person choose one."""
        kernels = f"http://127.0.0.1:{self.port}/api/kernelspecs?token=t"
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(kernels, timeout=timeout):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.1)
        raise RuntimeError((self.folder / "server.log").read_text()[-3000:])

    def write(self, name: str, *cells: str) -> str:
        """Write a notebook of these cells; return its name."""
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in (PREAMBLE, *cells)])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / f"{name}.ipynb")
        return f"{name}.ipynb"

    def read(self, name: str) -> Any:
        """The notebook as it is saved now."""
        return json.loads((self.folder / name).read_text())

    def url(self, name: str, front_end: str = "lab") -> str:
        """Return the URL of the notebook in JupyterLab ("lab") or Notebook 7 ("notebook")."""
        path = f"tree/{name}?reset" if front_end == "lab" else f"{name}?"
        return f"http://127.0.0.1:{self.port}/{'lab' if front_end == 'lab' else 'notebooks'}/{path}&token=t"

    def theme(self, name: str) -> None:
        """The theme of whoever opens a page from now on: "JupyterLab Light" or "JupyterLab Dark"."""
        folder = self.folder / "settings" / "@jupyterlab" / "apputils-extension"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "themes.jupyterlab-settings").write_text(json.dumps({"theme": name}))
        (folder / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
        completer = folder.parent / "completer-extension"
        completer.mkdir(exist_ok=True)  # who types waits for one second; the test may wait longer
        (completer / "manager.jupyterlab-settings").write_text(json.dumps({"providerTimeout": 10_000}))

    def close(self) -> None:
        """End it and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
        self.log.close()


class Notebook:
    """A notebook in a page, as a person sees it. `kernel` is the name to choose where the page asks for a kernel."""

    def __init__(self, page: Page, server: Server, name: str, front_end: str = "lab", *, kernel: str = "") -> None:
        self.page, self.server, self.name, self.kernel = page, server, name, kernel
        self.dialogs: list[str] = []
        page.goto(server.url(name, front_end))
        self.wait_open()

    def wait_open(self, *, timeout: float = 60) -> None:
        """Wait until the cells are there and the kernel is connected."""
        self.page.wait_for_selector(CELL, timeout=timeout * 1000)
        indicator = self.page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle'], .jp-NotebookKernelStatus")
        try:
            expect(indicator.first).to_be_attached(timeout=timeout * 1000)
        except AssertionError:  # the page may wait for ever for a kernel that was slow to start
            self.page.reload()
            expect(indicator.first).to_be_attached(timeout=timeout * 1000)

    def answer_dialog(self) -> None:
        """Press the default button of the dialog that is open, if one is, and keep what it said."""
        dialog = self.page.locator("dialog.jp-Dialog")
        while dialog.count():
            self.dialogs.append(dialog.first.inner_text())
            print("dialog:", self.dialogs[-1])
            # On a busy machine, JupyterLab may open the notebook before it knows the kernels, and asks then.
            if self.kernel and (choice := dialog.first.locator("select")).count():
                choice.first.select_option(label=self.kernel)
            dialog.first.locator("button.jp-mod-accept").last.click()
            self.page.wait_for_timeout(100)

    def cell(self, index: int) -> Any:
        """The cell of that number; the preamble is 0."""
        return self.page.locator(CELL).nth(index)

    def start(self, index: int) -> None:
        """Run a cell and do not wait; what is pressed before the kernel is connected is lost: press again.

        Not soon: on a busy machine the page shows a key's effect seconds later, and a second one would run it twice.
        """
        prompt = self.cell(index).locator(".jp-InputPrompt").first
        before = prompt.text_content() or ""
        for attempt in range(10):
            self.answer_dialog()
            self.cell(index).locator(".cm-content").first.click()
            if (prompt.text_content() or "") != before:
                return
            self.page.keyboard.press("Control+Enter")
            self.page.evaluate(SETTLED)  # a page that is slow has done by now what the key asks for
            with contextlib.suppress(AssertionError):
                expect(prompt).not_to_have_text(before, timeout=1000 * (attempt + 8))
                return
        raise AssertionError(f"cell {index} did not start")

    def run(self, index: int, *, timeout: float = 60) -> None:
        """Run a cell and wait until it has its number."""
        self.start(index)
        prompt = self.cell(index).locator(".jp-InputPrompt").first
        expect(prompt).to_have_text(re.compile(r"\[\d+\]:"), timeout=timeout * 1000)

    def running(self, index: int) -> bool:
        """Return True if the cell is running."""
        return "[*]" in (self.cell(index).locator(".jp-InputPrompt").first.text_content() or "")

    def shut_down(self) -> None:
        """End its kernel, which may still run a cell."""
        sessions = self.page.request.get(f"http://127.0.0.1:{self.server.port}/api/sessions?token=t").json()
        for session in sessions:
            if session["path"] == self.name:
                self.page.request.delete(f"http://127.0.0.1:{self.server.port}/api/sessions/{session['id']}?token=t")

    def save(self) -> None:
        """Press Ctrl+S and wait until the file has changed and is whole (the server writes it in place)."""
        path = self.server.folder / self.name
        before = path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        deadline = time.monotonic() + 60
        while path.stat().st_mtime_ns == before or not is_json(path.read_bytes()):
            if time.monotonic() > deadline:
                raise AssertionError("the notebook was not saved within 60 s")
            self.page.wait_for_timeout(50)


def is_json(text: bytes) -> bool:
    """Return True if the text is a complete JSON document."""
    try:
        json.loads(text)
    except ValueError:  # a character may be cut short, too
        return False
    return True


@contextlib.contextmanager
def open_page(browser: Browser, folder: Path | None = None, **options: Any) -> Iterator[Page]:
    """Open a page of its own; errors of its console go to a file in `folder`."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
    context.set_default_timeout(60_000)
    page = context.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    try:
        yield page
    finally:
        if folder is not None:
            (folder / "console.log").write_text("\n".join(messages))
        context.close()
