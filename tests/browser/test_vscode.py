"""The views in a page like VS Code's for outputs: its theme's variables beside Jupyter's light ones, which its
ipywidgets bring along; white paper below every widget; no class of JupyterLab's; HTML that is replaced.
"""

from __future__ import annotations

import msgspec
import pytest

from rankbook.output.by_rank import OutputBlock
from rankbook.widgets.live_view import STATIC, to_json
from rankbook.widgets.output_panel import piece_html, skeleton
from rankbook.widgets.placement import PlacementView, dynamic_data
from tests.browser.test_looks import GRAVE
from tests.widgets import fakes

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(60)]

PAGE = """<!doctype html><html lang="en"><head><title>outputs</title><style>
:root { --jp-ui-font-color0: rgba(0,0,0,1); --jp-ui-font-color1: rgba(0,0,0,.8); --jp-layout-color0: white;
  --jp-layout-color2: #eee; --jp-border-color1: #9e9e9e; --jp-brand-color1: #2196f3; --jp-code-font-size: 13px; }
html { --vscode-editor-foreground: #cccccc; --vscode-editor-background: #1f1f1f; --vscode-panel-border: #2b2b2b;
  --vscode-descriptionForeground: #9d9d9d; --vscode-editorWidget-background: #202020; --vscode-focusBorder: #0078d4; }
body { background: #1f1f1f; color: #cccccc; }
.cell-output-ipywidget-background { background: white !important; }
.cell-output-ipywidget-background [tabindex="0"] { outline: none; }
%s</style></head><body class="vscode-dark"><main>
<div class="cell-output-ipywidget-background" id="live"></div><div id="html"></div><div id="panel">%s</div>
</main></body></html>"""
OPEN = """async ({source, state}) => {
  const module = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
  const heard = {};
  const on = (event, told) => (heard[event] ||= []).push(told);
  const model = {get: (name) => state[name], on, off() {}, send() {}};
  window.change = (name, value) => { state[name] = value; heard[`change:${name}`].forEach((told) => told()); };
  window.hear = (message) => heard["msg:custom"].forEach((told) => told(message));
  window.end = module.default.render({model, el: document.getElementById("live")});
}"""
COLOURS = "each => [getComputedStyle(each).color, getComputedStyle(each).backgroundColor]"
CAME = "html => { document.getElementById('html').innerHTML = html; }"


@pytest.fixture
def placement():
    feed = fakes.FakeFeed(4)
    placement_view = PlacementView(feed)
    placement_view._repr_mimebundle_()
    yield placement_view
    placement_view.close()
    feed.stop()


def test_view_reports_a_kernel_that_does_not_respond(browser, placement):
    page = browser.new_page()
    page.clock.install()
    page.set_content(PAGE % ("", ""))
    state = {name: getattr(placement, name) for name in ("placement_fixed", "placement_state", "still")}
    page.evaluate(OPEN, {"source": str(placement._esm), "state": state})
    status = page.locator(".rb-old")
    page.clock.run_for(12_000)
    expect(status).to_be_empty()
    page.clock.run_for(12_000)
    expect(status).to_contain_text("may be out of date: the kernel does not respond")
    page.evaluate("hear({seen: 'a look'})")
    expect(status).to_be_empty()
    page.close()


def test_the_memory_of_a_rank_that_has_died_is_nobodys(browser, placement):
    page = browser.new_page()
    page.set_content(PAGE % ("", ""))
    state = {name: getattr(placement, name) for name in ("placement_fixed", "placement_state", "still")}
    page.evaluate(OPEN, {"source": str(placement._esm), "state": state})
    row = page.locator("[data-rank='1']")
    expect(row).to_contain_text("of 140 GB")
    picture = fakes.placement(4)
    died = msgspec.structs.replace(
        picture,
        ranks=tuple(msgspec.structs.replace(rank, state="dead", memory=None, rate=None) for rank in picture.ranks),
    )
    page.evaluate("state => change('placement_state', state)", to_json(dynamic_data(died)))
    expect(row).to_contain_text("dead")
    expect(row.locator(".rb-bar")).to_have_count(0)
    expect(row).not_to_contain_text("of 140 GB")
    page.close()


def test_view_uses_the_dark_theme_of_vs_code(browser, placement, axe):
    page = browser.new_page()
    coloured = "".join(f"\x1b[{code}mcolour {code}\x1b[0m\n" for code in range(30, 38))
    panel = skeleton("p", "cell [3]", (0, 1), "merged", pieces=piece_html(OutputBlock(0, (0,), text=coloured), (0, 1)))
    page.set_content(PAGE % ((STATIC / "view.css").read_text(), panel))
    state = {name: getattr(placement, name) for name in ("placement_fixed", "placement_state", "still")}
    page.evaluate(CAME, placement.html())
    page.evaluate(OPEN, {"source": str(placement._esm), "state": state})
    view, still = page.locator(".rankbook-view"), page.locator(f".{placement.still}")
    expect(view).to_contain_text("4 ranks of main")
    for element in (view, page.locator(".rankbook-panel")):
        assert element.evaluate(COLOURS) == ["rgb(204, 204, 204)", "rgb(31, 31, 31)"]
    expect(still).to_be_hidden()
    page.evaluate(CAME, placement.html())
    expect(still).to_be_hidden()
    page.evaluate(axe)
    report = page.evaluate("axe.run('main')")
    assert not [violation for violation in report["violations"] if violation["impact"] in GRAVE]
    assert report["passes"]
    page.evaluate("end()")
    expect(still).to_be_visible()
    page.close()
