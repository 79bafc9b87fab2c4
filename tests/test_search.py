"""The search of the built documentation finds the page that answers a question.

`.ci/run` builds the documentation and names its folder in `RANKBOOK_TEST_DOCS`. Without it, the test builds it, if
Sphinx is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = (ROOT / "docs" / "questions.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Index(NamedTuple):
    """The search index that Sphinx writes for the browser."""

    data: dict[str, Any]
    stopwords: set[str]

    def pages(self, query: str) -> list[str]:
        """Return the pages with all words of the query, best first. A title counts more than text."""
        import snowballstemmer  # part of Sphinx

        stem = snowballstemmer.stemmer("english").stemWord
        words = [stem(word) for word in re.findall(r"\w+", query.lower()) if word not in self.stopwords]
        scores = [self._score(word) for word in words]
        common = set.intersection(*map(set, scores))
        best = sorted(common, key=lambda page: (-sum(score[page] for score in scores), self.data["docnames"][page]))
        return [self.data["docnames"][page] for page in best]

    def _score(self, word: str) -> dict[int, int]:
        scores: dict[int, int] = {}
        for table, points in (("terms", 5), ("titleterms", 15)):
            pages = self.data[table].get(word, [])
            for page in pages if isinstance(pages, list) else [pages]:
                scores[page] = max(points, scores.get(page, 0))
        return scores


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Index:
    folder = os.environ.get("RANKBOOK_TEST_DOCS")
    if not folder:
        for package in ("sphinx", "myst_nb", "pydata_sphinx_theme"):
            pytest.importorskip(package)
        folder = str(tmp_path_factory.mktemp("docs"))
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), folder]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
    text = (Path(folder) / "searchindex.js").read_text()
    (stopwords,) = re.findall(
        r"stopwords = new Set\((\[.*?\])\)", (Path(folder) / "_static/language_data.js").read_text()
    )
    return Index(json.loads(text.removeprefix("Search.setIndex(").removesuffix(")")), set(json.loads(stopwords)))


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("FSDP2", "tutorials/fsdp2"),
        ("tensor parallel", "tutorials/tensor-parallel"),
        ("gradient checkpointing", "tutorials/fsdp2"),
        ("EMA", "howto/models-and-memory"),
        ("from_pretrained", "howto/models-and-memory"),
        ("out of memory", "tutorials/when-something-goes-wrong"),
        ("mesh", "tutorials/tensor-parallel"),
        ("save_state", "tutorials/checkpoints"),
        ("load_state", "reference/api-training"),
        ("CollectiveAborted", "explanation/how-a-collective-is-recovered"),
        ("CollectiveAborted", "reference/errors"),
        ("resume number of ranks", "tutorials/checkpoints"),
        ("save background", "tutorials/checkpoints"),
        ("which rank writes log", "howto/experiment-trackers"),
        ("wandb", "howto/experiment-trackers"),
        ("mlflow", "howto/experiment-trackers"),
        ("rank dies", "tutorials/dead-ranks"),
        ("heal", "explanation/what-heal-brings-back"),
        ("Kaggle", "howto/kaggle-and-colab"),
        ("Colab", "howto/kaggle-and-colab"),
        ("NCCL", "reference/devices"),
        ("torchrun", "howto/from-torchrun"),
        ("Accelerate", "howto/from-accelerate"),
        ("learning rate slider", "howto/live-slider"),
        ("autoreload", "howto/autoreload"),
        ("seed", "explanation/random-numbers"),
        ("pull variable", "tutorials/first-cell"),
        ("two T4", "howto/kaggle-and-colab"),
        ("breakpoint", "howto/debug-a-rank"),
        ("profile", "howto/profile-a-cell"),
        ("which rank holds parameter", "howto/live-views"),
        ("debug rank", "howto/debug-a-rank"),
        ("move accelerate script", "howto/from-accelerate"),
        ("RANKBOOK_RANKS", "reference/environment-variables"),
        ("where are logs", "explanation/how-output-is-merged"),
        ("hung", "tutorials/when-something-goes-wrong"),
        ("Slurm nodes", "howto/slurm"),
        ("multi-node", "howto/other-hosts"),
        ("custom launcher", "reference/api-engines"),
        ("first NaN", "howto/find-a-nan"),
        ("change number of ranks", "howto/resize"),
        ("accelerate launch", "howto/from-accelerate"),
        ("trusted", "explanation/what-is-trusted"),
        ("variables when rank dies", "tutorials/dead-ranks"),
        ("different loss DDP FSDP2", "howto/compare-layouts"),
        ("diverge", "howto/compare-layouts"),
        ("resume", "tutorials/checkpoints"),
        ("protect", "explanation/what-protection-guarantees"),
        ("rank died", "tutorials/dead-ranks"),
        ("install", "tutorials/first-cell"),
    ],
)
def test_the_search_finds_the_page(index, query, page):
    assert page in index.pages(query)[:12]


def test_the_search_finds_the_pages_of_frequent_questions(index):
    rows = re.findall(r"^\| ([^|]+\?) \| ([^|]+) \| (.+) \|$", QUESTIONS, flags=re.MULTILINE)
    assert len(rows) >= 10
    for question, _, links in rows:
        for page in re.findall(r"\]\(([\w/-]+)\.md", links):
            assert page in index.data["docnames"], question


def test_every_public_name_is_in_the_index(index):
    import rankbook
    import rankbook.checkpoint

    objects = {
        f"{prefix}.{entry[-1]}" if prefix else entry[-1]
        for prefix, entries in index.data["objects"].items()
        for entry in entries
    }
    names = [f"rankbook.{name}" for name in rankbook.__all__]
    names += [f"rankbook.checkpoint.{name}" for name in rankbook.checkpoint.__all__]
    assert [name for name in names if name not in objects] == []
