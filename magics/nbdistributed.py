"""nbdistributed's magics, in terms of ours: `%load_ext rankbook.magics.nbdistributed` in the place of its own.

Owns: which of its names means which of ours. Refuses: work of its own: every magic becomes one of ours, or says what
there is in its place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from rankbook import magics
from rankbook.coordinator import current as clusters
from rankbook.errors import BadRequest
from rankbook.magics import auto
from rankbook.magics.frontend import sink_for
from rankbook.magics.magic import short_errors
from rankbook.magics.options import OneLineParser
from rankbook.output import Stream

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_BARRIER = "import torch.distributed\ntorch.distributed.barrier()"
_GPU_ID = "gpu_id = device.index"
_RANKS = re.compile(r"\[([^\[\]]*)\]")
_NO_TIMELINE = "no timeline is kept; %%distributed --time and --profile measure a cell"


def _make_init_parser() -> OneLineParser:
    parser = OneLineParser(prog="%dist_init", add_help=False, allow_abbrev=False)
    parser.add_argument("--num-processes", "-n", type=int, default=2, metavar="N")
    parser.add_argument("--master-addr", "-a", default="localhost", metavar="HOST")
    parser.add_argument("--gpu-ids", "-g", metavar="IDS")
    parser.add_argument("--timeout", "-t", type=float, metavar="S")
    return parser


def _make_mode_parser() -> OneLineParser:
    parser = OneLineParser(prog="%dist_mode", add_help=False, allow_abbrev=False)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--enable", "-e", action="store_true")
    either.add_argument("--disable", "-d", action="store_true")
    return parser


_init_parser = _make_init_parser()
_mode_parser = _make_mode_parser()


@magics_class
class NbdistributedMagics(Magics):
    """Registered by `%load_ext rankbook.magics.nbdistributed`."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell

    @line_magic
    def dist_init(self, line: str) -> None:
        """`%distributed start`, then `%distributed auto on`; `gpu_id` is there on every rank."""
        with short_errors():
            chosen = _init_parser.parse_args(line.split())
            _check_devices(chosen.gpu_ids, chosen.num_processes)
            if chosen.master_addr not in {"localhost", "127.0.0.1"}:
                raise BadRequest(
                    f"%dist_init: --master-addr {chosen.master_addr}: the ranks are on this machine so far"
                )
            self._distributed(f"start -n {chosen.num_processes}")
            clusters.current().run(_GPU_ID)
            if chosen.timeout is not None:
                self._say("--timeout is left out: a cell takes as long as it likes; %%distributed --timeout S ends one")
            self._distributed("auto on")

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """`%%distributed --ranks`: `%%rank [0,1]`, `%%rank [0-2]`."""
        found = _RANKS.fullmatch(line.strip())
        with short_errors():
            if found is None:
                raise BadRequest(f"%%rank {line}: the ranks stand in brackets, [0,1] or [0-2]")
        self._shell.run_cell_magic("distributed", f"--ranks {found[1].replace(' ', '')}", cell)

    @line_magic
    def sync(self, _line: str) -> None:
        """Wait until every rank has come to one barrier."""
        with short_errors():
            ranks = clusters.current().world_size
        self._shell.run_cell_magic("distributed", "--quiet", _BARRIER)
        self._say(f"all {ranks} ranks are at the same point")

    @line_magic
    def dist_status(self, _line: str) -> None:
        """`%distributed status`."""
        self._distributed("status")

    @line_magic
    def dist_debug(self, _line: str) -> None:
        """`%distributed status`."""
        self._distributed("status")

    @line_magic
    def dist_mode(self, line: str) -> None:
        """`%distributed auto on` with `--enable`, `auto off` with `--disable`; which it is, with neither."""
        with short_errors():
            chosen = _mode_parser.parse_args(line.split())
        if chosen.enable or chosen.disable:
            self._distributed("auto on" if chosen.enable else "auto off")
        else:
            self._say(f"plain cells run {'on the ranks' if auto.is_on(self._shell) else 'in the notebook'}")

    @line_magic
    def dist_shutdown(self, _line: str) -> None:
        """`%distributed stop`, then `%distributed auto off`; with whatever options."""
        self._stop()

    @line_magic
    def dist_reset(self, _line: str) -> None:
        """As `%dist_shutdown`."""
        self._stop()

    @line_magic
    def dist_sync_ide(self, _line: str) -> None:
        """Nothing: there are no copies to bring up to date."""
        self._say("Tab and Shift-Tab ask the ranks themselves")

    @line_magic
    def timeline_save(self, _line: str) -> None:
        """Nothing, in so many words."""
        self._say(_NO_TIMELINE)

    @line_magic
    def timeline_debug(self, _line: str) -> None:
        """Nothing, in so many words."""
        self._say(_NO_TIMELINE)

    @line_magic
    def timeline_clear(self, _line: str) -> None:
        """Nothing, in so many words."""
        self._say(_NO_TIMELINE)

    def _stop(self) -> None:
        self._distributed("stop")
        self._distributed("auto off")

    def _distributed(self, line: str) -> None:
        self._shell.run_line_magic("distributed", line)

    def _say(self, text: str) -> None:
        sink_for(self._shell).emit([Stream("stdout", text + "\n")])


def _check_devices(asked: str | None, ranks: int) -> None:
    """Rank i has device i: refuse other devices, with the way to have them."""
    if asked is None or asked.strip("'\"").replace(" ", "") == ",".join(map(str, range(ranks))):
        return
    raise BadRequest(
        f"%dist_init: --gpu-ids {asked}: rank i has device i; for others leave --gpu-ids out and set "
        f"CUDA_VISIBLE_DEVICES={asked} in the environment that Jupyter starts in"
    )


def part_name_and_ranks(lines: list[str]) -> list[str]:
    """IPython's input transformation: `%%rank[0,1]` is `%%rank [0,1]`."""
    if lines and lines[0].startswith("%%rank["):
        return [lines[0].replace("%%rank[", "%%rank [", 1), *lines[1:]]
    return lines


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register them, and ours. A second time changes nothing."""
    magics.load_ipython_extension(shell)
    shell.register_magics(NbdistributedMagics(shell))
    transformations = shell.input_transformer_manager.cleanup_transforms
    if part_name_and_ranks not in transformations:
        transformations.append(part_name_and_ranks)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take them away, and ours."""
    for kind, names in NbdistributedMagics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop("NbdistributedMagics", None)
    transformations = shell.input_transformer_manager.cleanup_transforms
    if part_name_and_ranks in transformations:
        transformations.remove(part_name_and_ranks)
    magics.unload_ipython_extension(shell)
