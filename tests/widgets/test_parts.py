"""Test the view models: what they watch and for how long, what they send, what they answer."""

from __future__ import annotations

import json
import threading

import pytest
from msgspec import Struct

from rankbook.errors import InvalidArgument
from rankbook.protocol.telemetry import CheckpointFolder, Placement, Shard, ShardedTensorMap, ShardMap
from rankbook.widgets import shards
from rankbook.widgets.checkpoints import CheckpointsModel
from rankbook.widgets.placement import PlacementModel, html, static_data, svg, text
from rankbook.widgets.shards import MAX_DRAWN, ShardsModel, chunks_of, tensor_of
from tests.conftest import wait_until
from tests.widgets.fakes import (
    FakeCheckpoints,
    FakeFeed,
    placement,
    rank_placement,
    saves,
    shard_map,
    sharded_tensor,
)


def ignore_change() -> None:
    """Ignore a change."""


def names_of_threads() -> set[str]:
    """Return the names of the running threads."""
    return {item.name for item in threading.enumerate()}


def test_placement_is_watched_only_while_it_is_open():
    feed = FakeFeed()
    part = PlacementModel(feed)
    assert not part.ready() and part.dynamic_json() == "{}" and not feed.watchers["placement"]
    part.open(ignore_change)
    assert part.ready() and len(feed.watchers["placement"]) == 1
    part.close()
    part.close()
    assert not feed.watchers["placement"] and feed.ended == 1


def test_dynamic_and_static_state_are_sent_separately():
    feed = FakeFeed(64)
    part = PlacementModel(feed)
    part.open(ignore_change)
    fixed, states = part.static_json(), set()
    for tick in range(5):
        feed.push("placement", placement(64, tick=tick))
        assert part.static_json() == fixed
        states.add(part.dynamic_json())
    assert len(states) == 5
    assert max(map(len, states)) * 10 < 200_000  # bytes a second, at ten updates
    first = json.loads(part.dynamic_json())["ranks"][0]
    assert first[:3] == [0, "running", "running cell [3] line 14"] and len(first[7]) == 7


def test_clicks_on_a_rank_reach_the_feed():
    feed = FakeFeed()
    part = PlacementModel(feed)
    assert part.answer("act", {"kind": "interrupt", "rank": 2}) == "rank 2 was told to interrupt"
    assert feed.acts == [("interrupt", 2)]
    detail = part.answer("detail", {"rank": 1})
    assert detail["variables"][1] == ["x", "Tensor", "32 × 128", "float32", "cuda:1", "16.4 kB", "tensor([[0.1, …"]
    for op, message in (("act", {"kind": "explode"}), ("what", {}), ("detail", {"rank": "0"}), ("detail", {"rank": 9})):
        with pytest.raises(InvalidArgument):
            part.answer(op, message)


def test_shards_are_queried_once_and_on_demand():
    feed = FakeFeed(4, 10)
    part = ShardsModel(feed, "model")
    for _ in range(2):
        part.open(ignore_change)
        wait_until(part.ready, timeout=10, what="the shards are there")
        part.close()
    assert [kind for kind, _ in feed.asked] == ["shards"]
    assert len(json.loads(part.static_json())["tensors"]) == 10
    assert part.answer("name", {"name": "nothing"}) == "no rank has a variable `nothing`"
    assert json.loads(part.static_json())["trouble"] and "no rank has" in part.text()
    asked = len(feed.asked)
    part.open(ignore_change)
    wait_until(lambda: len(feed.asked) > asked, timeout=10, what="a variable that was missing is asked for again")
    part.close()
    with pytest.raises(InvalidArgument, match="no variable was given"):
        part.answer("name", {"name": " "})
    with pytest.raises(InvalidArgument, match="press Show again"):
        part.answer("tensor", {"key": "layers.0.weight"})


def test_last_of_two_requests_for_a_variable_wins():
    class Slow(FakeFeed):
        gate = threading.Event()

        def ask(self, kind: str, **options: object) -> Struct:
            answer = super().ask(kind, **options)
            if options["name"] == "slow":
                self.gate.wait(5)
            return answer

    feed = Slow()
    part = ShardsModel(feed, "slow")
    part.open(ignore_change)
    wait_until(lambda: bool(feed.asked), timeout=10, what="it is asked for")
    part.answer("name", {"name": "model"})
    feed.gate.set()
    wait_until(lambda: "rankbook-shard-query" not in names_of_threads(), timeout=10, what="it is answered")
    fixed = part.static_json()
    assert json.loads(fixed)["name"] == "model" and part.text().startswith("model")
    part.answer("name", {"name": "model"})
    assert part.static_json() != fixed  # whoever presses Show is shown what there is now


def test_a_statistic_is_fetched_on_demand_only():
    feed = FakeFeed()
    part = ShardsModel(feed, "")
    part.answer("name", {"name": "model"})
    assert part.answer("tensor", {"key": "layers.0.weight"})["shape"] == [256, 128]
    assert "statistic" not in [kind for kind, _ in feed.asked]
    output = part.answer("statistic", {"key": "layers.0.weight", "rank": 3})
    assert output == "min -0.5, mean 0.25, max 1.5, 2 NaN"
    assert feed.asked[-1] == ("statistic", {"name": "model", "key": "layers.0.weight", "rank": 3})
    assert "layers.0.weight" in part.svg()


def test_replicas_are_one_chunk_with_many_holders():
    drawn = tensor_of(sharded_tensor(2, ranks=4))
    assert len(drawn["chunks"]) == 1 and [holder[:2] for holder in drawn["chunks"][0][2]] == [[r, r] for r in range(4)]
    assert [len(chunk) for chunk in chunks_of(sharded_tensor(1, ranks=4).shards)] == [1, 1, 1, 1]


def test_a_tensor_in_very_many_parts_says_how_many_are_not_drawn():
    drawn = tensor_of(sharded_tensor(0, ranks=MAX_DRAWN + 10))
    assert (len(drawn["chunks"]), drawn["left"]) == (MAX_DRAWN, 10)


def test_two_thousand_parameters_on_64_ranks_make_a_small_first_message():
    part = ShardsModel(FakeFeed(64, 2000), "")
    part.answer("name", {"name": "model"})
    assert len(part.static_json()) < 150_000
    assert len(shard_map(parameters=2000, ranks=64).tensors[0].shards) == 64


def test_folder_is_read_after_a_save_and_never_while_the_view_is_hidden():
    feed, checkpoint_browser = FakeFeed(), FakeCheckpoints()
    part = CheckpointsModel(feed, checkpoint_browser)
    changed = threading.Event()
    part.open(changed.set)
    wait_until(part.ready, timeout=10, what="the folder is read")
    feed.push("saves", saves(0.5))
    checkpoint_browser.names.append("step-40")
    feed.push("saves", saves(1.0, phase="done"))
    wait_until(lambda: 'step-40"' in part.static_json(), timeout=2.5, what="the new step is listed")
    part.close()
    wait_until(lambda: "rankbook-checkpoints" not in names_of_threads(), timeout=10, what="nobody reads on")
    assert not feed.watchers["saves"]


def test_action_on_a_checkpoint_updates_the_list_at_once():
    checkpoint_browser = FakeCheckpoints()
    part = CheckpointsModel(FakeFeed(), checkpoint_browser)
    assert "every byte" in part.answer("verify", {"name": "step-30"})
    assert "✓ verified" in part.text()
    part.answer("delete", {"name": "step-20"})
    assert (
        checkpoint_browser.done == [("verify", "step-30"), ("delete", "step-20")]
        and "step-20" not in part.static_json()
    )
    with pytest.raises(InvalidArgument, match="unknown operation 'burn'"):
        part.answer("burn", {"name": "step-30"})
    with pytest.raises(InvalidArgument, match="no folder was given"):
        CheckpointsModel(FakeFeed(), None).answer("verify", {"name": "step-30"})


def test_a_checkpoint_is_not_deleted_while_it_is_read():
    class Slow(FakeCheckpoints):
        gate = threading.Event()

        def verify(self, name: str) -> str:
            self.gate.wait(5)
            return super().verify(name)

    checkpoint_browser = Slow()
    part = CheckpointsModel(FakeFeed(), checkpoint_browser)
    verifies = threading.Thread(target=part.answer, args=("verify", {"name": "step-30"}))
    verifies.start()
    wait_until(lambda: bool(part._running_operations), timeout=10, what="it is verified")
    for op in ("delete", "verify"):
        with pytest.raises(InvalidArgument, match="step-30 is being verified; wait until this has finished"):
            part.answer(op, {"name": "step-30"})
    part.answer("load", {"name": "step-30"})
    part.answer("delete", {"name": "step-20"})
    checkpoint_browser.gate.set()
    verifies.join(5)
    part.answer("delete", {"name": "step-30"})
    assert [op for op, _ in checkpoint_browser.done] == ["load", "delete", "verify", "delete"]


def test_unreadable_folder_is_reported_with_the_reason():
    class Broken(FakeCheckpoints):
        def list_checkpoints(self) -> CheckpointFolder:
            raise InvalidArgument("no such folder")

    part = CheckpointsModel(FakeFeed(), Broken())
    part.answer("look", {})
    assert "no such folder" in part.summary()


def test_a_host_appears_once_after_a_rank_has_moved_to_it():
    ranks = tuple(rank_placement(rank, host=host) for rank, host in enumerate(("node-0", "node-1", "node-0", "node-1")))
    shown = Placement(ranks, 1_790_000_000.0, "main")
    for rendered in (text(shown), html(shown), svg(shown)):
        assert rendered.count("node-0") == rendered.count("node-1") == 1
    order = [entry["rank"] for entry in static_data(shown)["ranks"]]
    assert order == [0, 2, 1, 3], "the browser draws a host wherever it changes"


def sharded_bias(key: str = "head.bias", ranks: int = 4) -> ShardedTensorMap:
    """Return a bias of one element that is sharded over `ranks`: all but the first hold nothing."""
    empty = [Shard(rank, (1,), (0,), rank - 1, "cpu", 0) for rank in range(1, ranks)]
    return ShardedTensorMap(key, "float32", (1,), (Shard(0, (0,), (1,), 0, "cpu", 4), *empty))


def test_ranks_without_elements_are_no_shards_and_no_replicas():
    shown = shards.text(ShardMap("model", "model", (sharded_bias(),), ""), "model")
    row = next(line for line in shown.splitlines() if line.startswith("head.bias"))
    assert row.split() == ["head.bias", "float32", "1", "1", "rank", "0"]
    assert tensor_of(sharded_bias())["chunks"] == [[[0], [1], [[0, 0, "cpu", 4]]]]


def test_static_tables_search_for_every_word_as_the_browser_does():
    shown = ShardMap("model", "model", (sharded_bias("layers.0.bias"), sharded_bias("layers.0.weight")), "")
    for rendered in (shards.text(shown, "model", "weight LAYERS"), shards.html(shown, "model", "weight LAYERS")):
        assert "layers.0.weight" in rendered and "layers.0.bias" not in rendered
