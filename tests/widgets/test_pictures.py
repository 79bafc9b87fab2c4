"""The still pictures: every view in HTML, text and SVG, from structs alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from rankbook.protocol.telemetry import CheckpointFolder, MemoryUse, Placement, ShardedTensorMap, ShardMap
from rankbook.widgets import checkpoints, output_panel
from rankbook.widgets import placement as placement_picture
from rankbook.widgets import rendering as drawing
from rankbook.widgets import shards as shards_picture
from tests.widgets.fakes import GB, FakeShelf, placement, rank_placement, saves, shard_map

FOLDER = FakeShelf().look()
STATIC = Path(__file__).resolve().parent.parent.parent / "widgets" / "static"
PICTURES = {
    "placement": [getattr(placement_picture, kind)(placement(4)) for kind in ("html", "text", "svg")],
    "no placement": [getattr(placement_picture, kind)(None) for kind in ("html", "text", "svg")],
    "shards": [
        shards_picture.html(shard_map(), "model"),
        shards_picture.text(shard_map(), "model"),
        shards_picture.svg(shard_map(), "model", None),
    ],
    "no shards": [shards_picture.html(None, "x"), shards_picture.text(None, "x"), shards_picture.svg(None, "x", None)],
    "checkpoints": [getattr(checkpoints, kind)(saves(), FOLDER) for kind in ("html", "text", "svg")],
    "no checkpoints": [getattr(checkpoints, kind)(None, None) for kind in ("html", "text", "svg")],
}


class Balanced(HTMLParser):
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, _attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", PICTURES)
def test_html_is_balanced_and_svg_is_xml(name):
    html, text, svg = PICTURES[name]
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.find("{*}title") is not None
    assert text.strip() and "<" not in text
    assert "nan" not in svg.lower().replace("background", "") and "script" not in html


def test_placement_says_who_waits_for_what_and_who_lags():
    text = placement_picture.text(placement(4))
    assert "4 ranks of main: 3 running, 1 waiting; rank 2 lags" in text
    assert "‖ waiting in all_reduce #41 (float32[4, 4]), cell [3] line 10" in text
    assert "parameters 20 GB, gradients 20 GB, optimizer 40 GB, activations and other 10 GB, free 50 GB" in text
    assert "model: FSDP2 Transformer (1.24 M parameters, 4.96 MB, float32, cuda:0, Shard(dim=0) ×24)" in text
    assert "node-0" in text and "4.13/s" in text


def test_what_people_name_is_no_html():
    evil = rank_placement(0, host="<script>", device_name="<b>", waits_for="<i>", state="waiting")
    made = placement_picture.html(Placement((evil,), 0.0, "<u>")) + placement_picture.svg(
        Placement((evil,), 0.0, "<u>")
    )
    shards = ShardMap("<u>", "<b>", (ShardedTensorMap("<i>", "float32", (1,), ()),), "")
    made += shards_picture.html(shards, "") + shards_picture.svg(shards, "", None)
    made += checkpoints.html(saves(error="<b>"), CheckpointFolder("<u>", (), ""))
    for tag in ("<script>", "<b>", "<i>", "<u>"):
        assert tag not in made


def test_a_device_without_memory_or_with_none_left_draws():
    empty = rank_placement(0, memory=MemoryUse(0, 0, 0, 0, 0, 0, 0), rate=None, utilisation=None)
    unknown = rank_placement(1, memory=None, holdings=())
    for kind in (placement_picture.html, placement_picture.text, placement_picture.svg):
        assert kind(Placement((empty, unknown), 0.0, "main"))


def test_imbalance_names_the_rank():
    assert shards_picture.imbalance({0: 100, 1: 100}) == "100 B on each rank"
    assert shards_picture.imbalance({0: 100, 1: 300}) == "rank 1 holds 300 B, 50 % above the mean of 200 B"
    assert shards_picture.imbalance({}) == ""


def test_totals_are_the_sum_of_the_parts():
    found = shard_map(parameters=10, ranks=4)
    totals = shards_picture.totals(found)
    assert sum(totals.values()) == sum(shard.bytes for tensor in found.tensors for shard in tensor.shards)
    assert set(totals) == {0, 1, 2, 3}


def test_a_save_is_as_far_as_its_last_rank():
    (whole,) = checkpoints.together(saves(0.25))
    assert (whole.phase, whole.written, whole.total, whole.rate) == ("writing", GB, 4 * GB, 0.4 * GB)
    assert whole.left() == pytest.approx(7.5)
    assert whole.words() == "writing, 1 GB of 4 GB, 400 MB/s, 7.5 s left, for 2.5 s"
    mixed = saves(1.0, ranks=2, phase="done").saves + saves(0.5, ranks=1, phase="failed", error="disk full").saves
    (whole,) = checkpoints.together(type(saves())(mixed, 0.0))
    assert whole.phase == "failed" and whole.error == "rank 0: disk full"


def test_one_is_one_and_many_are_many():
    (one,) = placement(1).ranks
    late = [msgspec.structs.replace(one, rank=rank, lags=True, rate=1234.5) for rank in range(3)]
    assert placement_picture.summary(Placement((one,), 0.0, "")).startswith("1 rank: ")
    assert placement_picture.summary(Placement(tuple(late[:2]), 0.0, "")).endswith("; ranks 0-1 lag")
    assert "1230/s" in placement_picture.text(Placement(tuple(late), 0.0, ""))
    (tensor, *_) = shard_map().tensors
    assert shards_picture.summary(ShardMap("w", "tensor", (tensor,)), "w").startswith("w (tensor): 1 tensor; ")


def test_the_browser_has_the_same_palette_and_marks():
    common, style = (STATIC / "common.js").read_text(), (STATIC / "view.css").read_text()
    assert re.findall(r'"(#\w{6})"', common.split("RANK_COLOURS")[1].split(";")[0]) == list(drawing.RANK_COLOURS)
    assert set(re.findall(r'"(#\w{6})"', common.split("DARK")[1].split(";")[0])) == drawing.DARK
    for name, mark in drawing.STATE_MARKS.items():
        assert f'{name}: "{mark}"' in common
    for part, colour in drawing.MEMORY_COLOURS.items():
        variable = re.search(rf"\.rb-{part} {{ background: var\((--rb-\w+)\)", style)
        assert variable and f"{variable[1]}: {colour}" in style


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_jupyters_theme_counts_only_where_vs_code_has_none():
    """VS Code's ipywidgets bring Jupyter's light variables along, whatever the theme."""
    for style in ((STATIC / "view.css").read_text(), output_panel.skeleton("p", "", (0,), "merged")):
        assert style.count("var(--jp-") == len(re.findall(r"var\(--vscode-[\w-]+,\s*var\(--jp-", style)) > 4


@pytest.mark.parametrize(("ink", "paper"), [("#000000", "#ffffff"), ("#ffffff", "#111111"), ("#cccccc", "#1f1f1f")])
def test_a_terminals_colours_can_be_read_in_dark_and_light(ink, paper):
    style = output_panel.skeleton("p", "", (0,), "merged")
    found = re.findall(r"\.rb-\w+{color:(#\w{6});color:color-mix\(in srgb,\1 (\d+)%,currentColor\)}", style)
    assert len(found) == 8
    for colour, share in found:
        part = int(share) / 100
        pairs = [(int(colour[at : at + 2], 16), int(ink[at : at + 2], 16)) for at in (1, 3, 5)]
        mixed = "#" + "".join(f"{round(part * own + (1 - part) * inks):02x}" for own, inks in pairs)
        assert contrast(mixed, paper) >= 4.5, colour


def test_text_on_a_ranks_colour_can_be_read():
    for colour in drawing.RANK_COLOURS:
        assert contrast(colour, drawing.contrast_color(colour)) >= 4.5, colour
