"""Test the static HTML, text and SVG of every view."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from msgspec.structs import replace

from rankbook.protocol.telemetry import (
    CheckpointFolder,
    GradientNorms,
    MemoryUse,
    Placement,
    ShardedTensorMap,
    ShardMap,
)
from rankbook.widgets import checkpoints, output_panel
from rankbook.widgets import placement as placement_picture
from rankbook.widgets import rendering as drawing
from rankbook.widgets import shards as shards_picture
from rankbook.widgets.live_view import to_json
from tests.widgets.fakes import GB, FakeCheckpoints, placement, rank_placement, saves, shard_map

FOLDER = FakeCheckpoints().list_checkpoints()
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


def test_user_names_are_escaped_in_html():
    evil = rank_placement(0, host="<script>", device_name="<b>", waits_for="<i>", state="waiting")
    picture = placement_picture.html(Placement((evil,), 0.0, "<u>")) + placement_picture.svg(
        Placement((evil,), 0.0, "<u>")
    )
    shards = ShardMap("<u>", "<b>", (ShardedTensorMap("<i>", "float32", (1,), ()),), "")
    picture += shards_picture.html(shards, "") + shards_picture.svg(shards, "", None)
    picture += checkpoints.html(saves(error="<b>"), CheckpointFolder("<u>", (), ""))
    for tag in ("<script>", "<b>", "<i>", "<u>"):
        assert tag not in picture


def test_a_device_without_memory_or_with_none_left_draws():
    empty = rank_placement(0, memory=MemoryUse(0, 0, 0, 0, 0, 0, 0), rate=None, utilisation=None)
    unknown = rank_placement(1, memory=None, holdings=())
    for kind in (placement_picture.html, placement_picture.text, placement_picture.svg):
        assert kind(Placement((empty, unknown), 0.0, "main"))


def on_cpu(ranks: int = 2) -> Placement:
    """Return ranks that use 300 and 400 MB of a machine with 20 GB."""
    used = [MemoryUse(20 * GB, 4_000_000, 0, 0, 296_000_000 + rank * 100_000_000, 0, 0) for rank in range(ranks)]
    rank_placements = [
        rank_placement(
            rank, device="cpu", memory=msgspec.structs.replace(use, free=20 * GB - use.parameters - use.other)
        )
        for rank, use in enumerate(used)
    ]
    return Placement(tuple(rank_placements), 100.0, "main")


def test_bars_of_cpu_ranks_are_scaled_to_the_largest_rank_with_the_machine_s_as_a_thin_one():
    current = on_cpu()
    assert placement_picture.bar_scales(current.ranks) == {0: 400_000_000, 1: 400_000_000}
    assert placement_picture.bar_scales(placement(2).ranks) == {0: 140 * GB, 1: 140 * GB}
    html, svg = placement_picture.html(current), placement_picture.svg(current)
    assert 'title="parameters" style="background:#0072B2;width:1.00%"' in html
    assert html.count("height:0.2em") == 2 and "width:1.50%" in html and "width:2.00%" in html
    assert "scaled to the largest rank" in html and "scaled to the largest rank" in svg
    for still in (placement_picture.html(placement(2)), placement_picture.svg(placement(2))):
        assert "height:0.2em" not in still and "scaled" not in still


def test_the_course_of_the_last_minutes_is_sampled_and_drawn():
    history = placement_picture.PlacementHistory()
    history.add(placement(2, tick=0, at=100.0))
    history.add(placement(2, tick=1, at=101.0))
    assert [len(samples) for samples in history.samples().values()] == [1, 1], "at most one in two seconds"
    for number in range(200):
        history.add(placement(2, tick=number, at=102.0 + 2 * number))
    samples = history.samples()
    assert [len(of) for of in samples.values()] == [placement_picture.MAX_SAMPLES] * 2
    assert samples[0][-1].at == 500.0 and samples[0][0].at == 322.0
    html, svg = (getattr(placement_picture, kind)(placement(2), samples) for kind in ("html", "svg"))
    assert len(re.findall(r"[▁▂▃▄▅▆▇█]{2,}", html)) == 4, "memory and speed of two ranks"
    assert svg.count("<polyline") == 4
    assert "<polyline" not in placement_picture.svg(placement(2)) and "▇" not in placement_picture.html(placement(2))
    history.add(placement(1, at=900.0))
    assert set(history.samples()) == {0}, "a rank that is gone is forgotten"
    common = (STATIC / "placement.js").read_text()
    assert (
        f"SAMPLE_INTERVAL = {placement_picture.SAMPLE_INTERVAL:g}, MAX_SAMPLES = {placement_picture.MAX_SAMPLES};"
        in common
    )
    assert f'CPU_SCALE = "{placement_picture.CPU_SCALE}"' in common


def test_the_course_goes_on_when_the_clock_is_set_back():
    history = placement_picture.PlacementHistory()
    for at in (100.0, 102.0, 3700.0, 101.0, 102.0, 103.0):
        history.add(placement(1, at=at))
    assert [sample.at for sample in history.samples()[0]] == [100.0, 101.0, 103.0]


def test_a_course_is_drawn_from_zero_to_its_largest_value():
    assert drawing.sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert drawing.sparkline([1, 1], most=2) == "▅▅"
    assert drawing.sparkline([0, 0]) == "▁▁" and drawing.sparkline([]) == ""
    assert "points='0.0,10.0 5.0,5.0 10.0,0.0'" in drawing.polyline([0, 1, 2], 0, 0, 10, 10, title="x")


def test_the_newest_checkpoint_is_on_top_and_unfinished_ones_above_it():
    names = [checkpoint.name for checkpoint in checkpoints.newest_first(FOLDER)]
    assert names == ["step-40.partial", "step-30", "step-20"]
    assert [row[0] for row in checkpoints.folder_data(FOLDER)["checkpoints"]] == names
    for still in (getattr(checkpoints, kind)(None, FOLDER) for kind in ("html", "text", "svg")):
        places = [still.rindex(name) for name in names]
        assert places == sorted(places), still
    named = [
        msgspec.structs.replace(FOLDER.checkpoints[0], name=name, step=None, created=created)
        for name, created in (("first", 1.0), ("last", 3.0), ("second", 2.0), ("unknown", None))
    ]
    ordered = checkpoints.newest_first(CheckpointFolder("/ckpt", tuple(named), ""))
    assert [checkpoint.name for checkpoint in ordered] == ["last", "second", "first", "unknown"]


def test_the_running_save_is_on_top_and_of_several_the_last_one():
    done, running = saves(1.0, ranks=1, phase="done").saves[0], saves(0.5, ranks=1).saves[0]
    rename = msgspec.structs.replace
    of = [
        rename(save, save=rename(save.save, name=name))
        for save, name in ((running, "a"), (done, "b"), (running, "c"), (done, "d"))
    ]
    combined = checkpoints.combine_saves(type(saves())(tuple(of), 0.0))
    assert [save.title.split()[0] for save in combined] == ["c", "a", "d", "b"]


@pytest.mark.parametrize("folder", [FOLDER, None])
def test_a_static_picture_says_what_a_save_does_once(folder):
    for kind in ("html", "svg"):
        still = getattr(checkpoints, kind)(saves(), folder)
        visible = re.sub(r"<title>.*?</title>", "", still)
        assert visible.count("step-40 in /ckpt") == 1, still


def test_the_cells_of_a_table_do_not_wrap():
    html = drawing.table(("size",), [["4 GB"]])["text/html"]
    assert "white-space:nowrap" in html.partition("<tbody>")[2]


@pytest.mark.parametrize("style", ["view.css", "panel"])
def test_printed_picture_is_complete_and_has_bars(style):
    text = (STATIC / style).read_text() if style == "view.css" else output_panel.skeleton("p", "", (0,), "merged")
    printed = text.partition("@media print")[2]
    assert "max-height: none" in printed.replace("max-height:none", "max-height: none")
    if style == "view.css":
        assert "print-color-adjust: exact" in text
    assert "print-color-adjust:exact" in drawing.bar([("a", 1, "#000000")], 2)


def test_imbalance_names_the_rank():
    assert shards_picture.imbalance({0: 100, 1: 100}) == "100 B per rank"
    assert shards_picture.imbalance({0: 100, 1: 300}) == "rank 1 holds 300 B, 50 % above the mean of 200 B"
    assert shards_picture.imbalance({}) == ""


def test_totals_are_the_sum_of_the_parts():
    merged = shard_map(parameters=10, ranks=4)
    totals = shards_picture.totals(merged)
    assert sum(totals.values()) == sum(shard.bytes for tensor in merged.tensors for shard in tensor.shards)
    assert set(totals) == {0, 1, 2, 3}


def test_a_save_is_as_far_as_its_last_rank():
    (combined,) = checkpoints.combine_saves(saves(0.25))
    assert (combined.phase, combined.written, combined.total, combined.rate) == ("writing", GB, 4 * GB, 0.4 * GB)
    assert combined.seconds_left() == pytest.approx(7.5)
    assert combined.progress_text() == "writing, 1 GB of 4 GB, 400 MB/s, 7.5 s left, for 2.5 s"
    mixed = saves(1.0, ranks=2, phase="done").saves + saves(0.5, ranks=1, phase="failed", error="disk full").saves
    (combined,) = checkpoints.combine_saves(type(saves())(mixed, 0.0))
    assert combined.phase == "failed" and combined.error == "rank 0: disk full"


def test_the_rate_of_a_save_is_that_of_the_ranks_that_write():
    def combined(*phases):
        of = [saves(0.5, ranks=1, phase=phase).saves[0] for phase in phases]
        (save,) = checkpoints.combine_saves(type(saves())(tuple(of), 0.0))
        return save.progress_text()

    assert "100 MB/s" in combined("committing", "writing")
    assert "/s" not in combined("committing", "committing")
    assert "/s" not in combined("failed", "failed")
    assert "200 MB/s" in combined("done", "done")


def test_counts_have_singular_and_plural():
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
    """Check it: VS Code's ipywidgets define Jupyter's light variables, whatever the theme."""
    for style in ((STATIC / "view.css").read_text(), output_panel.skeleton("p", "", (0,), "merged")):
        assert style.count("var(--jp-") == len(re.findall(r"var\(--vscode-[\w-]+,\s*var\(--jp-", style)) > 4


@pytest.mark.parametrize(("ink", "paper"), [("#000000", "#ffffff"), ("#ffffff", "#111111"), ("#cccccc", "#1f1f1f")])
def test_a_terminals_colours_can_be_read_in_dark_and_light(ink, paper):
    style = output_panel.skeleton("p", "", (0,), "merged")
    mixes = re.findall(r"\.rb-\w+{color:(#\w{6});color:color-mix\(in srgb,\1 (\d+)%,currentColor\)}", style)
    assert len(mixes) == 8
    for colour, share in mixes:
        part = int(share) / 100
        pairs = [(int(colour[at : at + 2], 16), int(ink[at : at + 2], 16)) for at in (1, 3, 5)]
        mixed = "#" + "".join(f"{round(part * colour_part + (1 - part) * inks):02x}" for colour_part, inks in pairs)
        assert contrast(mixed, paper) >= 4.5, colour


def test_text_on_a_ranks_colour_can_be_read():
    for colour in drawing.RANK_COLOURS:
        assert contrast(colour, drawing.contrast_color(colour)) >= 4.5, colour


def test_the_placement_says_how_the_training_is_protected():
    protection = "protected every step: snapshot of step 811, 2 s old"
    protected = Placement((), 0.0, "", protection)
    assert protection in placement_picture.text(protected)
    assert protection in placement_picture.html(protected)
    assert placement_picture.dynamic_data(protected)["protection"] == protection
    assert "<p></p>" not in placement_picture.html(Placement((), 0.0, ""))


GRADIENTS = GradientNorms("model", 120, 5.0, (("embed", 3.0), ("blocks.0", 4.0), ("", None)), "blocks.0: <differs>")


def test_the_placement_shows_the_gradient_norms_by_module():
    current = replace(placement(2), gradients=(GRADIENTS,))
    text = placement_picture.text(current)
    assert "gradients of model at step 120: norm 5; blocks.0: <differs>" in text
    assert "embed     3         36 %" in text and "blocks.0  4         64 %" in text and "(root)    none" in text
    html, svg = placement_picture.html(current), placement_picture.svg(current)
    assert "norm 5; blocks.0: &lt;differs&gt;" in html and "<td" in html.partition("64 %")[0]
    assert "norm 5; blocks.0: &lt;differs&gt;" in svg
    (gradients,) = placement_picture.dynamic_data(current)["gradients"]
    assert gradients[:5] == ["model", 120, "5", 5.0, "blocks.0: <differs>"]
    assert gradients[5] == [("embed", "3", "36 %"), ("blocks.0", "4", "64 %"), ("(root)", "none", "")]


def test_gradients_that_are_nan_and_many_modules_are_shown():
    modules = tuple((f"layers.{number}", float(number)) for number in range(40))
    norms = GradientNorms("model", None, float("nan"), (*modules, ("head", float("nan"))))
    current = replace(placement(1), gradients=(norms,))
    text = placement_picture.text(current)
    assert "gradients of model: norm nan" in text and "and 21 modules with smaller gradients" in text
    assert "head       nan" in text and "layers.39" in text and "layers.20" not in text
    assert json.loads(to_json(placement_picture.dynamic_data(current)))["gradients"][0][3] is None


def test_the_course_of_the_gradient_norm_is_drawn():
    history = placement_picture.PlacementHistory()
    for step, norm in ((1, 4.0), (2, 2.0), (2, 2.0), (3, 1.0)):
        history.add(replace(placement(1), gradients=(replace(GRADIENTS, step=step, norm=norm),)))
    assert history.norms() == {"model": ((1, 4.0), (2, 2.0), (3, 1.0))}
    current = replace(placement(1), gradients=(GRADIENTS,))
    assert "█▅▃" in placement_picture.html(current, None, history.norms())
    assert "gradient norm of model" in placement_picture.svg(current, None, history.norms())
    history.add(replace(placement(1), gradients=(replace(GRADIENTS, step=1, norm=9.0),)))
    assert history.norms() == {"model": ((1, 9.0),)}
