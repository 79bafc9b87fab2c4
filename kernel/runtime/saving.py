"""State written to files and read again, as methods of the `Accelerator`.

Owns: which files there are, their names, and that every rank learns when one of them failed. Refuses: sharded files: a
parameter is written whole, so that any other way to spread the model can read it.

A checkpoint is a folder: `model.pt`, `optimizer.pt`, `scheduler.pt`, `loader.pt` (each with a number from the second
on), `scaler.pt`, `custom_checkpoint_N.pt`, and `random_states_RANK.pt` of every rank. It is written beside its place
and moved there once all ranks are done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rankbook.errors import BadRequest
from rankbook.runtime import saved_state
from rankbook.runtime.accumulation import window
from rankbook.runtime.collectives import gather_object
from rankbook.runtime.core import Core
from rankbook.runtime.prepare.models import unwrap

_MODEL = "model.pt"


class Saving(Core):
    """See `Accelerator`."""

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The person's own model, of one that `prepare` returned."""
        return unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state with whole tensors, on every rank. A collective where the model is sharded."""
        return saved_state.whole_state(self.unwrap_model(model) if unwrap else model)

    def save(self, obj: object, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write `obj` with `torch.save`, on rank 0 alone, or on one rank of each machine if the project asks so."""
        _refuse_safetensors(safe_serialization)
        each_node = self.project_configuration.save_on_each_node
        if self.is_local_main_process if each_node else self.is_main_process:
            saved_state.write(obj, Path(f))

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], safe_serialization: bool = False
    ) -> None:
        """Write the model's whole state to `save_directory/model.pt`. Every rank calls it; rank 0 writes."""
        _refuse_safetensors(safe_serialization)
        state = self.get_state_dict(model)
        with self._told_to_all("save_model"):
            if self.is_main_process:
                Path(save_directory).mkdir(parents=True, exist_ok=True)
                saved_state.write(state, Path(save_directory) / _MODEL)

    def register_for_checkpointing(self, *objects: Any) -> None:  # noqa: ANN401 - anything with the two methods
        """Have `save_state` and `load_state` include `objects`, by their `state_dict` and `load_state_dict`."""
        lacking = [each for each in objects if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))]
        if lacking:
            names = ", ".join(type(each).__name__ for each in lacking)
            raise BadRequest(f"to be saved an object needs state_dict and load_state_dict, which {names} has not")
        # Once each: the cell that registers may be run again.
        self._custom_objects += [each for each in objects if not any(each is known for known in self._custom_objects)]

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, states, folder)` before each `save_state`. Returns a handle with `remove`."""
        return saved_state.register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before each `load_state`. Returns a handle with `remove`."""
        return saved_state.register(self._load_hooks, hook)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = False) -> str:
        """Write everything that was prepared or registered, and every rank's random state. Every rank calls it.

        Returns the folder. Without `output_dir` the project's numbered checkpoints are used. Raises on every rank when
        one cannot write; the folder is left as it was then.
        """
        _refuse_safetensors(safe_serialization)
        folder = self._folder_to_write(output_dir)
        models = self._models
        states = [self.get_state_dict(each) for each in models]
        optimizers = [saved_state.whole_optimizer_state(each) for each in self._optimizers]
        for hook in tuple(self._save_hooks.values()):
            hook(models, states, str(folder))
        draft = folder.with_name(f"{folder.name}.writing")
        with self._told_to_all("save_state"):
            if self.is_main_process:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
        with self._told_to_all("save_state"):
            if self.is_main_process:
                for name, state in self._named(states, optimizers):
                    saved_state.write(state, draft / name)
            saved_state.write(saved_state.random_state(), draft / f"random_states_{self.process_index}.pt")
        with self._told_to_all("save_state"):
            if self.is_main_process:
                saved_state.put_in_place(draft, folder)
                saved_state.keep_latest(self.project_configuration, folder)
        if output_dir is None:
            self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, strict: bool = True) -> None:
        """Read what `save_state` wrote, into what is prepared now, however it is spread. Every rank calls it.

        Without `input_dir` the latest of the project's numbered checkpoints. Raises `BadRequest` where the folder is no
        checkpoint, or one of something else.
        """
        folder = Path(input_dir) if input_dir is not None else saved_state.latest(self.project_configuration)
        with self._told_to_all("load_state"):
            if not folder.is_dir():
                raise BadRequest(f"there is no checkpoint {folder}")
            wanted = [name for name, _ in self._named(self._models, self._optimizers)]
            missing = [name for name in wanted if not (folder / name).is_file()]
            if missing:
                raise BadRequest(f"{folder} has no {', '.join(missing)}: prepare what was prepared when it was saved")
        for hook in tuple(self._load_hooks.values()):
            hook(self._models, str(folder))
        read = saved_state.read
        for number, model in enumerate(self._models):
            saved_state.load_model(self.unwrap_model(model), read(folder / _numbered(_MODEL, number)), strict=strict)
        for number, each in enumerate(self._optimizers):
            saved_state.load_optimizer(each, read(folder / _numbered("optimizer.pt", number)))
        for kind, things in self._plain().items():
            for number, each in enumerate(things):
                each.load_state_dict(read(folder / _numbered(kind, number)))
        for number, each in enumerate(self._custom_objects):
            each.load_state_dict(read(folder / f"custom_checkpoint_{number}.pt"))
        if self.scaler is not None and (folder / "scaler.pt").is_file():
            self.scaler.load_state_dict(read(folder / "scaler.pt"))
        own = folder / f"random_states_{self.process_index}.pt"
        if own.is_file():  # a larger world has ranks that the saved one had not
            saved_state.restore_random_state(read(own))
        window.abandon(self.gradient_state)

    def _plain(self) -> dict[str, list[Any]]:
        return {
            "scheduler.pt": self._schedulers,
            "loader.pt": [e for e in self._dataloaders if hasattr(e, "state_dict")],
        }

    def _named(self, models: list[Any], optimizers: list[Any]) -> Iterator[tuple[str, Any]]:
        """File names with what belongs into them."""
        for number, model in enumerate(models):
            yield _numbered(_MODEL, number), model
        for number, optimizer in enumerate(optimizers):
            yield _numbered("optimizer.pt", number), optimizer
        for kind, things in self._plain().items():
            for number, each in enumerate(things):
                yield _numbered(kind, number), each.state_dict()
        for number, each in enumerate(self._custom_objects):
            yield f"custom_checkpoint_{number}.pt", each.state_dict()
        if self.scaler is not None:
            yield "scaler.pt", self.scaler.state_dict()

    def _folder_to_write(self, given: str | os.PathLike[str] | None) -> Path:
        if given is not None:
            return Path(given)
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            raise BadRequest(
                "save_state() needs a folder, or a ProjectConfiguration with automatic_checkpoint_naming=True and a "
                "project_dir"
            )
        return project.checkpoints / f"checkpoint_{project.iteration}"

    @contextmanager
    def _told_to_all(self, what: str) -> Iterator[None]:
        """A block that may fail on some ranks: then it fails on all, and each one says where."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, once the others know
            failure = error
        if not self.use_distributed:
            if failure is not None:
                raise failure
            return
        told = gather_object([None if failure is None else f"{type(failure).__name__}: {failure}"])
        if failure is not None:
            raise failure
        first = next((rank for rank, each in enumerate(told) if each is not None), None)
        if first is not None:
            raise BadRequest(f"{what} failed on rank {first}: {told[first]}")


def _numbered(name: str, number: int) -> str:
    stem, dot, ending = name.partition(".")
    return f"{stem}_{number}{dot}{ending}" if number else name


def _refuse_safetensors(wanted: bool) -> None:
    if wanted:
        raise BadRequest("safe_serialization=True is not offered: files are torch.save's, read with weights_only=True")
