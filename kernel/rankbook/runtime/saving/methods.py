"""State written to files and read again, as methods of the `Accelerator`.

Owns: which folder it is, hooks, numbers of checkpoints, and that every rank learns when one of them failed. Refuses:
what lies in a checkpoint (`checkpoints.py`), and a model's own files (`model_files.py`); both are imported when they
are used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn
from torch.utils.hooks import RemovableHandle

from rankbook.errors import BadRequest
from rankbook.runtime.comm import consistency
from rankbook.runtime.comm.collectives import gather_object
from rankbook.runtime.gradient_state import window
from rankbook.runtime.prepare import unwrap
from rankbook.runtime.saving import training_state
from rankbook.runtime.settings import AcceleratorSettings

if TYPE_CHECKING:
    from rankbook.checkpoint.async_save import SaveHandle
    from rankbook.runtime.saving.state import TrainingParts

_log = logging.getLogger(__name__)


class SavingMethods(AcceleratorSettings):
    """See `Accelerator`."""

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The person's own model, of one that `prepare` returned."""
        return unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state with whole tensors, on every rank. A collective where the model is sharded."""
        return training_state.full_state(self.unwrap_model(model) if unwrap else model)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:  # noqa: ANN401
        """Write `obj` with `torch.save`, on rank 0 alone, or on one rank of each machine if the project asks so.

        With `safe_serialization` it is a dict of whole tensors, and the file is one of safetensors.
        """
        if not self._writes:
            return
        if safe_serialization:
            from rankbook.checkpoint.storage.local import storage_of
            from rankbook.runtime.saving import model_files

            model_files.write_file(storage_of(Path(f).parent), Path(f).name, obj)
        else:
            training_state.write_object(obj, Path(f))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's whole tensors, as Hugging Face's libraries read them. Every rank calls it; rank 0 writes.

        To `model.safetensors`, or where they take more than `max_shard_size` to `model-00001-of-00002.safetensors` and
        so on with `model.safetensors.index.json`. Tensors that are tied are written once, under the first of their
        names. Without `safe_serialization` torch writes the files, and they are called `pytorch_model.bin`. Raises on
        every rank when one cannot write; an earlier model in the folder is left as it was then.
        """
        from rankbook.checkpoint.storage.local import storage_of
        from rankbook.runtime.saving import model_files

        most = model_files.size_of(max_shard_size)
        storage = storage_of(save_directory)
        state = model_files.without_duplicates(self.unwrap_model(model))
        kind = model_files.SAFETENSORS if safe_serialization else model_files.PICKLED
        with self._told_to_all("save_model"):
            failure = model_files.write_model(storage, state, kind, most, writes=self._writes)
            if failure is not None:
                raise failure

    @property
    def _writes(self) -> bool:
        """Whether this rank writes what is not sharded."""
        each_node = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each_node else self.is_main_process

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
        return training_state.register_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before each `load_state`. Returns a handle with `remove`."""
        return training_state.register_hook(self._load_hooks, hook)

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = ...,
        safe_serialization: bool = ...,
        *,
        async_: Literal[False] = ...,
    ) -> str: ...
    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = ...,
        safe_serialization: bool = ...,
        *,
        async_: Literal[True],
    ) -> SaveHandle: ...
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: ARG002 - see below
        *,
        async_: bool = False,
    ) -> str | SaveHandle:
        """Store everything that was prepared or registered, and every rank's random state. Every rank calls it.

        The folder becomes a checkpoint of `rankbook.checkpoint`; each rank writes what it holds. Without `output_dir`
        the project's next numbered checkpoint. Objects that are not sharded are stored as rank 0 has them.
        `safe_serialization` is taken for the sake of other programs' calls: nothing of a checkpoint is executed as it
        is loaded.

        Returns the folder; with `async_` at once a `SaveHandle`, whose `wait()` gives what was saved or raises, while
        copies of everything are written in the background. Raises on every rank when one cannot write, and when an
        earlier save in the background has failed of which nobody was told; the folder is left as it was then.
        """
        from rankbook.checkpoint.saving import Saved
        from rankbook.runtime.saving import state as checkpoints

        with self._told_to_all("save_state"):
            folder = self._folder_to_write(output_dir)
        if self.use_distributed:  # each would be told that its folder has the checkpoint
            consistency.check_same("save_state", f"the folder {folder}")
        if not self.gradient_state.sync_gradients and self.is_main_process:
            _log.warning("save_state within a window of accumulation: gradients that gather up are not stored")
        found = self._parts(self._models)
        with self._told_to_all("save_state"):
            before = {name: each.state_dict() for name, each in found.models.items()}
            states: list[Any] = list(before.values())
            for hook in tuple(self._save_hooks.values()):
                hook(self._models, states, folder)
        # A hook may have taken states out, having saved them itself, or put others into their places.
        names = {id(each): name for name, each in before.items()}
        kept = {names.get(id(each), name): each for name, each in zip(before, states, strict=False)}
        limit = partial(training_state.keep_latest, self.project_configuration, Path(folder))
        done = checkpoints.write_state(found, kept, folder, told=self._told_to_all, async_=async_, after=limit)
        if output_dir is None:
            self.project_configuration.iteration += 1
        return folder if isinstance(done, Saved) else done

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        strict: bool = True,
        *,
        allow: Sequence[type | str] = (),
    ) -> None:
        """Read what `save_state` stored into what is prepared now, however it is spread. Every rank calls it.

        Without `input_dir` the latest of the project's numbered checkpoints, and the next one has the number after it.
        Without `strict` a model may have other parts than the stored one; what both have is read. A rank beyond the
        world that was saved keeps its random state. `allow` are classes and functions, or their names, that the states
        of registered objects may hold beside what torch takes for safe.

        Raises on every rank: `BadRequest` where the folder is no checkpoint, is one of something else, or a loader
        cannot go on there with this many ranks; `CheckpointingException` where a model does not fit or something is
        damaged. That is found before anything that was prepared changes, see `rankbook.checkpoint.load`.
        """
        from rankbook.checkpoint.async_save import wait_for_saves
        from rankbook.runtime.saving import state as checkpoints

        wait_for_saves()  # what is being saved in the background may be what is asked for
        project = self.project_configuration
        with self._told_to_all("load_state"):
            folder = os.fspath(input_dir) if input_dir is not None else str(training_state.latest_folder(project))
            checkpoints.existing_folder(folder)
            models = self._models
            for hook in tuple(self._load_hooks.values()):
                hook(models, folder)  # it may take models out, having read them itself
        checkpoints.read_state(self._parts(models), folder, told=self._told_to_all, strict=strict, allow=allow)
        if input_dir is None and (number := training_state.number_of(Path(folder))) is not None:
            project.iteration = max(project.iteration, number + 1)
        window.abandon(self.gradient_state)

    def _parts(self, models: list[Any]) -> TrainingParts:
        from rankbook.runtime.saving import state as checkpoints

        others = {
            "scheduler": self._schedulers,
            "loader": [each for each in self._dataloaders if hasattr(each, "state_dict")],
            "custom_checkpoint": self._custom_objects,
            "scaler": [self.scaler] if self.scaler is not None else [],
        }
        raw = [self.unwrap_model(each) for each in models]
        return checkpoints.training_parts(raw, self._optimizers, others, self.process_index, self.num_processes)

    def _folder_to_write(self, given: str | os.PathLike[str] | None) -> str:
        if given is not None:
            return os.fspath(given)
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            raise BadRequest(
                "save_state() needs a folder, or a ProjectConfiguration with automatic_checkpoint_naming=True and a "
                "project_dir"
            )
        folder = project.checkpoints / f"checkpoint_{project.iteration}"
        if self.is_main_process and training_state.is_complete(folder):
            raise BadRequest(
                f"there is a checkpoint {folder} already: load_state() goes on behind the latest, or give "
                "ProjectConfiguration another iteration or project_dir"
            )
        return str(folder)

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
