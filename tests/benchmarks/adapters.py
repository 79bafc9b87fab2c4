"""Operations of the measured tools, the same ones for all: load, start ranks, run a cell on all ranks, move a tensor.

An adapter uses a tool as a person who knows it would, and finds the rank of a line of its output. It measures nothing.
An operation that a tool does not offer is `None`, in the report "no call".
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import processes
import psutil
from frontend import STOCK, Cell, Frontend

Lines = dict[int, list[str]]
"""Lines of every rank, in the order in which they are shown; under `UNTOLD` the lines whose rank is unknown."""

UNTOLD = -1


class Adapter:
    """Cells of one tool. What differs between tools is overridden; what a tool lacks stays `None`."""

    name: str
    distribution: str
    load: tuple[str, ...] = ()
    rank_cells: tuple[str, ...] = ()
    """Code that gives every rank its number as `rank`, if the tool does not."""
    ranks_from_launch = False
    """The ranks belong to the kernel: their number is given as it is launched, and every cell runs on all of them."""

    def __init__(self, python: str) -> None:
        self.python = python

    def open(self, ranks: int) -> Frontend:
        """Return a front end whose kernel can have that many ranks; it is not started yet."""
        del ranks
        return Frontend(self.python)

    def open_plain(self) -> Frontend:
        """Return a front end with the stock kernel of the tool's environment."""
        return Frontend(self.python)

    def loaded(self, front: Frontend) -> None:
        """Load the tool."""
        for cell in self.load:
            front.check(cell, timeout=60)

    def started(self, front: Frontend, ranks: int) -> None:
        """Start ranks, in the quickest way that the tool has."""
        front.check(self.start(ranks), timeout=120)

    def ready(self, front: Frontend, ranks: int) -> None:
        """Load, start, and give the ranks their numbers: for measures in which the start does not count."""
        self.loaded(front)
        self.started(front, ranks)
        for cell in self.rank_cells:
            front.check(cell, timeout=60)

    def start(self, ranks: int) -> str:
        raise NotImplementedError

    def cell(self, code: str) -> str:
        """The cell that runs `code` on all ranks."""
        raise NotImplementedError

    def first_rank_cell(self, code: str) -> str:
        """The cell that runs `code` on rank 0 only."""
        raise NotImplementedError

    def push(self, name: str) -> str | None:
        """The cell that copies the notebook's variable to every rank."""
        del name
        return None

    def pull(self, name: str) -> str | None:
        """The cell that copies rank 0's variable into the notebook, under the same name."""
        del name
        return None

    def lines(self, cell: Cell) -> Lines:
        """Return the lines of every rank, from the output in the notebook."""
        raise NotImplementedError


class Rankbook(Adapter):
    name = "Rankbook"
    distribution = "rankbook"
    load = ("%load_ext rankbook",)

    def start(self, ranks: int) -> str:
        return f"%distributed start -n {ranks}"

    def cell(self, code: str) -> str:
        return f"%%distributed\n{code}"

    def first_rank_cell(self, code: str) -> str:
        return f"%%distributed --ranks 0\n{code}"

    def push(self, name: str) -> str:
        return f"%distributed push {name}"

    def pull(self, name: str) -> str:
        return f"%distributed pull {name} --ranks 0\n{name} = {name}[0]"

    def lines(self, cell: Cell) -> Lines:
        lines_by_rank: Lines = defaultdict(list)
        for line in "".join(shown_text(cell)).splitlines():
            if match := re.match(r"\[([\d,-]+)\] (.*)", line):
                for rank in _selection(match[1]):
                    lines_by_rank[rank].append(match[2])
        return lines_by_rank


class IPyParallel(Adapter):
    name = "ipyparallel"
    distribution = "ipyparallel"
    load = ("import ipyparallel",)
    rank_cells = ("for engine in client.ids: client[engine]['rank'] = engine",)

    def start(self, ranks: int) -> str:
        return (
            f"cluster = ipyparallel.Cluster(n={ranks}, log_level=40)\n"
            "client = cluster.start_and_connect_sync(activate=True)\n"
            "everywhere = client[:]"
        )

    def cell(self, code: str) -> str:
        return f"%%px\n{code}"

    def first_rank_cell(self, code: str) -> str:
        return f"%%px --targets 0\n{code}"

    def push(self, name: str) -> str:
        return f"everywhere.push(dict({name}={name}), block=True)"

    def pull(self, name: str) -> str:
        return f"{name} = client[0].pull({name!r}, block=True)"

    def lines(self, cell: Cell) -> Lines:
        lines_by_rank: Lines = defaultdict(list)
        for text in shown_text(cell):
            if match := re.match(r"\[stdout:(\d+)\] ", text):
                lines_by_rank[int(match[1])].extend(text[match.end() :].splitlines())
        return lines_by_rank


class JupyterDistributed(Adapter):
    name = "jupyter-distributed"
    distribution = "jupyter-distributed"
    ranks_from_launch = True
    rank_cells = ("import os; rank = int(os.environ['RANK'])",)
    _rank_type = "application/vnd.jupyter-distributed.rank+json"

    def open(self, ranks: int) -> Frontend:
        return Frontend(
            self.python,
            arguments=("-m", "jupyter_distributed.kernel", *STOCK[2:]),
            environment={"JUPYTER_DISTRIBUTED_WORLD_SIZE": str(ranks), "JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3"},
            interrupt_mode="message",
        )

    def started(self, front: Frontend, ranks: int) -> None:
        """Subscribe to live output, as its JupyterLab extension does."""
        del ranks
        front.open_comm("jupyter.distributed.rank_updates")

    def cell(self, code: str) -> str:
        return code

    def first_rank_cell(self, code: str) -> str:
        return f"%%rank 0\n{code}"

    def lines(self, cell: Cell) -> Lines:
        lines_by_rank: Lines = defaultdict(list)
        for content in _displays(cell):
            for rank in content["data"].get(self._rank_type, {}).get("ranks", ()):
                texts = (o["content"]["text"] for o in rank["outputs"] if o["type"] == "stream")
                lines_by_rank[rank["rank"]] = "".join(
                    t if isinstance(t, str) else "".join(t) for t in texts
                ).splitlines()
        return lines_by_rank


class NBDistributed(Adapter):
    name = "nbdistributed"
    distribution = "nbdistributed"
    load = ("%load_ext nbdistributed",)

    def start(self, ranks: int) -> str:
        return f"%dist_init -n {ranks}"

    def started(self, front: Frontend, ranks: int) -> None:
        """Start, wait until the ranks have dialled home (an earlier cell is lost), let plain cells stay plain."""
        front.check(self.start(ranks), timeout=120)
        limit = time.monotonic() + 60
        while (connected := sum(map(_has_dialled, front.processes()))) < ranks:
            if time.monotonic() > limit:
                raise TimeoutError(f"{connected} of {ranks} ranks dialled home within 60 s")
            processes.pause(0.05)
        front.check("%dist_mode --disable", timeout=60)

    def cell(self, code: str) -> str:
        return f"%%distributed\n{code}"

    def first_rank_cell(self, code: str) -> str:
        return f"%%rank [0]\n{code}"

    def lines(self, cell: Cell) -> Lines:
        """Return the lines of every rank. A heading names the rank once; the lines below it have no mark."""
        text = "".join(shown_text(cell)).splitlines()
        return {UNTOLD: [line.removeprefix("  ") for line in text if not re.fullmatch(r"🔹 Rank \d+:", line)]}


PEERS: tuple[type[Adapter], ...] = (IPyParallel, JupyterDistributed, NBDistributed)


def shown_text(cell: Cell) -> Iterator[str]:
    """The plain text of a cell's outputs, top to bottom, as they stand at the end."""
    blocks: dict[str, str] = {}
    for number, message in enumerate(cell.messages):
        if message.raw == b"{}":  # an update that a later one replaced
            continue
        content = message.content
        if message.kind == "stream":
            blocks[f"stream {number}"] = content["text"]
        elif message.kind in {"display_data", "update_display_data", "execute_result"}:
            key = content.get("transient", {}).get("display_id", f"display {number}")
            blocks[key] = content["data"].get("text/plain", "")
    yield from blocks.values()


def _displays(cell: Cell) -> Iterator[dict[str, dict[str, dict]]]:  # type: ignore[type-arg]
    for message in cell.messages:
        if message.kind in {"display_data", "update_display_data"} and message.raw != b"{}":
            yield message.content


def _selection(label: str) -> Iterator[int]:
    """Return the ranks of a selection: `0,2-3` is 0, 2, 3."""
    for part in label.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _has_dialled(process: psutil.Process) -> bool:
    """Return whether it is a connected worker of nbdistributed. The port is its last argument."""
    try:
        arguments = process.cmdline()
        if not any(Path(argument).name == "worker.py" for argument in arguments):
            return False
        port = int(arguments[6])
        links = (link for link in process.net_connections("tcp") if link.status == psutil.CONN_ESTABLISHED)
        return any(link.raddr.port == port for link in links)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
