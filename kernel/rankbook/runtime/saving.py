"""Saving methods of the `Accelerator`: `save_state`, `load_state`, `save_model` and `save`.

The methods select the folder, call hooks, number the checkpoints, and report a failure of one rank to all. The content
of a checkpoint is defined in training_checkpoint.py, and a model's own files in model_files.py; both are imported on
first use.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rankbook import control_collectives
from rankbook.errors import InvalidArgument
from rankbook.formatting import plural
from rankbook.lazy_imports import loaded_module
from rankbook.runtime.collectives import gather_object
from rankbook.runtime.config import ProjectConfiguration
from rankbook.runtime.gradient_state import window
from rankbook.runtime.memory import collect_left_over
from rankbook.runtime.prepare import unwrap
from rankbook.runtime.prepared import note_registered
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.settings import AcceleratorSettings

if TYPE_CHECKING:
    from rankbook.checkpoint.async_save import SaveHandle
    from rankbook.runtime.training_checkpoint import TrainingParts

_log = logging.getLogger(__name__)


class SavingMethods(AcceleratorSettings):
    """See `Accelerator`."""

    _begun: str | None = None
    """Numbered folder of a save that has begun and has not returned."""

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model for one that `prepare` returned.

        Example::

            prepared = accelerator.prepare(model)
            accelerator.unwrap_model(prepared) is model  # True
        """
        return unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state dict with full tensors on every rank. A collective if the model is sharded.

        Sharded tensors are gathered one at a time into CPU memory, which every rank needs for the whole model. The
        others are those of the model, on its device.

        Example::

            model = accelerator.prepare(model)
            weights = accelerator.get_state_dict(model)
            list(weights)  # ['weight', 'bias']
        """
        return full_state(self.unwrap_model(model) if unwrap else model)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:  # noqa: ANN401
        """Write `obj` with `torch.save` on rank 0, or on one rank per machine if the project is configured so.

        With `safe_serialization`, `obj` is a dict of full tensors, and the file has the safetensors format. Raises
        `InvalidArgument` for another object then, and OSError, on the rank that writes. Raises `InvalidArgument` for a
        URL, on every rank.

        Example::

            accelerator.save({"epoch": 3, "accuracy": 0.98}, "results.pt")
            accelerator.wait_for_everyone()  # for rank 0, which writes the file
            torch.load("results.pt")["epoch"]  # 3
        """
        if "://" in str(f):
            raise InvalidArgument(
                f"save() writes a local file, got the URL {f}: pass a path, or the URL of a folder to save_state() or "
                "save_model()"
            )
        # No collective: the other ranks return at once and do not wait for the file.
        if not self.should_save_model:
            return
        file = Path(os.path.expanduser(f))  # noqa: PTH111 - unlike Path's, it leaves the name of an unknown user
        if safe_serialization:
            from rankbook.checkpoint.storage.backends import storage_of
            from rankbook.runtime import model_files

            model_files.write_file(storage_of(file.parent), file.name, obj)
        else:
            write_object(obj, file)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's full tensors in the format of Hugging Face's libraries. All ranks call it; rank 0 writes.

        The file is `model.safetensors`, or, above `max_shard_size`, `model-00001-of-00002.safetensors` and so on with
        `model.safetensors.index.json`. Tied tensors are written once, under their first name. Without
        `safe_serialization` the files are written with torch.save and named `pytorch_model.bin`. Raises on every rank
        if one cannot write; an earlier model in the folder is left unchanged then. Raises `InvalidArgument` for a size
        that is neither a number of bytes nor a text such as "200MB", and for a state dict with other values than
        tensors.

        Example::

            model = accelerator.prepare(model)
            accelerator.save_model(model, "checkpoints-model")  # writes checkpoints-model/model.safetensors
        """
        from rankbook.checkpoint.storage.backends import storage_of
        from rankbook.runtime import model_files

        most = model_files.parse_size(max_shard_size)
        storage = storage_of(save_directory)
        state = model_files.without_duplicates(self.unwrap_model(model))
        kind = model_files.SAFETENSORS if safe_serialization else model_files.PICKLED
        with self._raise_on_all("save_model"):
            failure = model_files.write_model(storage, state, kind, most, writes=self.should_save_model)
            if failure is not None:
                raise failure

    def register_for_checkpointing(self, *objects: Any) -> None:  # noqa: ANN401 - anything with the two methods
        """Include `objects` in `save_state` and `load_state`, by their `state_dict` and `load_state_dict` methods.

        An object is registered once, also if the cell is run again. If the cell makes a new one, that takes the place
        of an earlier one of the class that nothing refers to any more. Raises `InvalidArgument` for an object that
        lacks one of the methods.

        Example::

            average = torch.optim.swa_utils.AveragedModel(model)
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.register_for_checkpointing(average)
            accelerator.save_state("checkpoints-average")  # with the averaged weights
        """
        lacking = [item for item in objects if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))]
        if lacking:
            names = ", ".join(type(item).__name__ for item in lacking)
            raise InvalidArgument(f"objects to save must have the methods state_dict and load_state_dict, got {names}")
        new = [item for item in objects if not any(item is registered for registered in self._custom_objects)]
        # By name, as the cell may define the class as well.
        if {class_name(item) for item in new} & {class_name(item) for item in self._custom_objects}:
            new = self._replace_former(new)
        self._custom_objects += new
        for item in objects:
            note_registered("custom", item)

    def _replace_former(self, new: Iterable[Any]) -> list[Any]:
        """Put `new` objects in the places of those that nothing else refers to, and return the rest of them."""
        former = [(class_name(item), reference_to(item)) for item in self._custom_objects]
        kept, rest = list[Any](), list(new)
        self._custom_objects.clear()
        try:
            collect_left_over()
        finally:  # also if the user interrupts it
            for name, reference in former:
                item = reference()
                if item is None:
                    if self.is_main_process:
                        _log.warning("The former %s is not saved any more: no variable refers to it", name)
                    index = next((index for index, each in enumerate(rest) if class_name(each) == name), None)
                    kept += [] if index is None else [rest.pop(index)]
                else:
                    kept.append(item)
            self._custom_objects += kept
        return rest

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, states, folder)` before every `save_state`. Returns a handle with `remove`.

        A local `folder` is a new one, in which all hooks of this save write. Its files get into the checkpoint's folder
        when the save is complete, and replace files of the same names there.

        A function that a cell defines at its top level takes the place of its former definition.
        """
        return register_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before every `load_state`. Returns a handle with `remove`.

        A function that a cell defines at its top level takes the place of its former definition.
        """
        return register_hook(self._load_hooks, hook)

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
        """Save all prepared and registered objects, and the random state of every rank. All ranks call it.

        The folder becomes a checkpoint of `rankbook.checkpoint`; every rank writes what it holds. The default for
        `output_dir` is the project's next numbered checkpoint. Registered objects are saved as rank 0 has them, except
        for DTensors, of which every rank saves its part. Other files in the folder stay. `safe_serialization` is
        accepted for compatibility and has no effect: loading a checkpoint never executes code from it.

        Returns the folder. With `async_` it returns a `SaveHandle` at once, while copies of all data are written in the
        background; `wait()` returns what was saved, or raises. Raises on every rank if one cannot write, or if an
        earlier background save has failed and the error was not yet reported; the folder is left unchanged then.
        `CheckpointError` is raised too for a local folder that contains the working directory, that is or contains a
        mount point, or that has a file of yours with the name of one of a checkpoint.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.save_state("checkpoints-state/epoch-1")  # 'checkpoints-state/epoch-1'
            handle = accelerator.save_state("checkpoints-state/epoch-2", async_=True)
            ...
            saved = handle.wait()
        """
        from rankbook.checkpoint.saving import Saved
        from rankbook.runtime import training_checkpoint as checkpoints

        with self._raise_on_all("save_state"):
            folder = self._output_folder(output_dir)
            limit = self._limit_of(folder)
            self._free_former_objects()
            parts = self._training_parts(self._models)
            if self.is_main_process:  # before the hooks of any rank, since the end of this block is a collective
                checkpoints.remove_interrupted_hooks(folder)
        # The default folder depends on the project's iteration, which every rank counts for itself; ranks may also
        # compute different names from a clock. And one may have prepared more than the others, in a cell that has
        # failed or was interrupted there. A registered object may be on rank 0 only, which saves it.
        if self.use_distributed:  # otherwise ranks with different folders would all report success
            listed = ", ".join(name for name in parts.names if not name.startswith("custom_checkpoint"))
            control_collectives.check_same("save_state", f"the folder {folder}, with {listed or 'no prepared objects'}")
        # The last `accumulate` block did not end a window.
        if not self.gradient_state.sync_gradients and self.is_main_process:
            _log.warning("save_state() within a gradient accumulation window: the accumulated gradients are not saved")
        hook_files = checkpoints.hook_folder(folder) if "://" not in folder else None
        if output_dir is None:
            self._begun = folder
        try:
            remaining, are_hooked = self._call_save_hooks(parts, folder, hook_files)
            # With `async_` the state has been copied when this returns, and a background thread writes the files.
            done = checkpoints.write_state(
                parts,
                remaining,
                folder,
                raise_on_all=self._raise_on_all,
                async_=async_,
                on_commit=limit,
                hook_files=hook_files if are_hooked else None,
            )
        except BaseException:  # also if the user interrupts a hook
            if hook_files is not None and self.is_main_process:
                shutil.rmtree(hook_files, ignore_errors=True)
            raise
        # Every rank counts, so that the next default folder is the same on all.
        if output_dir is None:
            self.project_configuration.iteration += 1
            self._begun = None
        return folder if isinstance(done, Saved) else done

    def _call_save_hooks(
        self, parts: TrainingParts, folder: str, hook_files: Path | None
    ) -> tuple[dict[str, Any], bool]:
        """Call the hooks. Return the states that are left to save, and True if a rank has hooks. A collective."""
        hooks = tuple(self._save_hooks.values())
        with self._raise_on_all("save_state"):
            # The hooks get the list of states and may remove or replace entries, as in Accelerate. Which entry belongs
            # to which model is found by the identity of the dict afterwards; a replaced one is assigned by its
            # position.
            before = {name: model.state_dict() for name, model in parts.models.items()}
            states: list[Any] = list(before.values())
            # The files of the hooks are committed with the others: until then the checkpoint in `folder` stays whole.
            if hooks and hook_files is not None:
                hook_files.mkdir(parents=True, exist_ok=True)
                Path(folder).mkdir(parents=True, exist_ok=True)  # for hooks that do not use their argument
            for hook in hooks:
                hook(self._models, states, folder if hook_files is None else str(hook_files))
        # A hook may have removed states that it has saved itself, or replaced them.
        names = {id(state): name for name, state in before.items()}
        remaining = {names.get(id(state), name): state for name, state in zip(before, states, strict=False)}
        if not self.use_distributed:
            return remaining, bool(hooks)
        # Many hooks do so on the main process only. They may be registered on some ranks only, too.
        gathered = gather_object([(list(remaining), bool(hooks))])
        kept = gathered[0][0]
        return {name: remaining.get(name, before[name]) for name in kept}, any(hooked for _, hooked in gathered)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        strict: bool = True,
        *,
        allow: Sequence[type | str] = (),
    ) -> None:
        """Load what `save_state` has saved into the objects that are prepared now, for any sharding. All ranks call it.

        The default for `input_dir` is the one of the project's numbered checkpoints that was saved last. After a load
        of any of them, the next one gets a number above all others. If `input_dir` contains steps (`step-20`,
        `step-40`, ...), the latest is loaded, and its name is printed.

        With another number of ranks than it was saved with, a loader in the middle of an epoch continues with the
        samples that no rank has had, each once; the last batches of the epoch may be smaller. A loader that cannot find
        them, such as one of an iterable dataset without a state, starts the epoch anew and warns.

        Without `strict` a model may differ from the saved one, and so may the parameters in the groups of an optimizer;
        what both have is loaded. The options `foreach`, `fused` and `capturable` of optimizers stay as they are. A rank
        beyond the saved world size keeps its random state. `allow` are classes and functions, or their names, that the
        states of registered objects may contain besides those that torch considers safe.

        Raises on every rank: `InvalidArgument` if the folder is not a checkpoint or contains something else;
        `CheckpointError` if a model or the groups of an optimizer do not match, the data are damaged, or another save
        replaces the checkpoint meanwhile. These checks come before any prepared object changes, see
        `rankbook.checkpoint.load`.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.save_state("checkpoints-resume")
            accelerator.load_state("checkpoints-resume")  # also in a later run, after the same call of prepare
        """
        from rankbook.checkpoint.async_save import wait_for_saves
        from rankbook.runtime import training_checkpoint as checkpoints

        # The save of a rank ends only after rank 0 has committed the checkpoint, so every rank sees it afterwards.
        wait_for_saves()  # the requested checkpoint may still be written in the background
        project = self.project_configuration
        with self._raise_on_all("load_state"):
            # Every rank reads the folder for itself. On a shared file system all find the same step.
            # The path may be a URL.
            folder = str(latest_folder(project)) if input_dir is None else os.path.expanduser(input_dir)  # noqa: PTH111
            if input_dir is not None and (latest := checkpoints.latest_step(folder)) is not None:
                name, count = latest
                PartialState().print(f"load_state: {name} is the latest of {plural(count, 'checkpoint')} in {folder}")
                folder = f"{folder.rstrip('/')}/{name}"
            checkpoints.existing_folder(folder)
            self._free_former_objects()
            models = self._models
            # All models are named before the hooks, which may remove those that they have loaded themselves. The names
            # of the others stay, and the state of an optimizer is stored under the names of all models.
            parts = self._training_parts(models)
            names = {id(model): name for name, model in parts.models.items()}
            for hook in tuple(self._load_hooks.values()):
                hook(models, folder)
            # A replaced entry is assigned by its position, as in `save_state`.
            remaining = [
                names.get(id(self.unwrap_model(model)), name) for name, model in zip(parts.models, models, strict=False)
            ]
            number = number_after(project, folder)
        if self.use_distributed:  # on a network file system, a rank may see a new folder late
            number = max(gather_object([number]))
        checkpoints.read_state(parts, remaining, folder, raise_on_all=self._raise_on_all, strict=strict, allow=allow)
        project.iteration = max(project.iteration, number)
        # Gradients that were accumulated before the load belong to other weights.
        window.abort(self.gradient_state)
        if (protection := loaded_module("rankbook.runtime.protection")) is not None:
            protection.after_load()

    def _free_former_objects(self) -> None:
        """Free the objects of an earlier run of a cell that nothing refers to, which would get the name "model"."""
        if any(len(self._registered(kind)) > 1 for kind in self._references):
            collect_left_over()

    def _training_parts(self, models: list[Any]) -> TrainingParts:
        from rankbook.runtime import training_checkpoint as checkpoints

        objects_by_kind = {
            "scheduler": self._schedulers,
            # Plain loaders such as `SkipDataLoader` have no position to store.
            "loader": [loader for loader in self._dataloaders if hasattr(loader, "state_dict")],
            "custom_checkpoint": self._custom_objects,
            "scaler": [self.scaler] if self.scaler is not None else [],
        }
        # Names in the checkpoint are those of the user's own model, without DDP's prefix "module.".
        raw = [self.unwrap_model(model) for model in models]
        return checkpoints.training_parts(
            raw, self._optimizers, objects_by_kind, self.process_index, self.num_processes
        )

    def _output_folder(self, output_dir: str | os.PathLike[str] | None) -> str:
        if output_dir is not None:
            return os.path.expanduser(output_dir)  # noqa: PTH111 - it may be a URL
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            raise InvalidArgument(
                "save_state() requires a folder, or a ProjectConfiguration with automatic_checkpoint_naming=True and a "
                "project_dir"
            )
        folder = project.checkpoints / f"checkpoint_{project.iteration}"
        # The save into it has raised after its commit, for example when it was interrupted while it removed older
        # checkpoints. All ranks look now: an interrupt may have reached one before rank 0 made the commit.
        if str(folder) == self._begun and is_complete(folder):
            project.iteration += 1
            folder = project.checkpoints / f"checkpoint_{project.iteration}"
        # Only rank 0 looks: `_raise_on_all` of the caller makes its error known to the others.
        if self.is_main_process and is_complete(folder):
            raise InvalidArgument(
                f"checkpoint {folder} already exists: load_state() continues after the latest one, or set another "
                "iteration or project_dir in ProjectConfiguration"
            )
        return str(folder)

    def _limit_of(self, folder: str) -> Callable[[], None]:
        """Return the function that removes older checkpoints, on rank 0, when the one in `folder` is complete."""
        project = copy.copy(self.project_configuration)
        if not project.automatic_checkpoint_naming or "://" in str(project.project_dir):
            return lambda: None
        # Absolute: a save in the background may end after an `os.chdir`.
        project.project_dir = os.path.abspath(project.checkpoints.parent)  # noqa: PTH100 - keeps symbolic links
        return partial(keep_latest, project, Path(os.path.abspath(folder)))  # noqa: PTH100

    @contextmanager
    def _raise_on_all(self, what: str) -> Iterator[None]:
        """Run a block that may fail on some ranks; if it fails on one, all ranks raise. A collective.

        The rank that failed raises its own error, with its traceback. The others raise an `InvalidArgument` that names
        the rank and its error.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, after the other ranks know
            failure = error
        if not self.use_distributed:
            if failure is not None:
                raise failure
            return
        # Every rank reaches this collective, failed or not, so no rank waits for one that has raised.
        failures = gather_object([None if failure is None else f"{type(failure).__name__}: {failure}"])
        if failure is not None:
            raise failure
        first = next((rank for rank, message in enumerate(failures) if message is not None), None)
        if first is not None:
            raise InvalidArgument(f"{what} failed on rank {first}: {failures[first]}")


def full_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with full tensors on every rank, sharded ones in CPU memory. A collective then."""
    # All ranks gather the tensors in the same order, that of the state dict. A sharded model may be too large for one
    # device, so no more than one of its tensors is there.
    return {
        name: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def class_name(item: object) -> str:
    """Return the name of the class of `item`, with its module."""
    return f"{type(item).__module__}.{type(item).__qualname__}"


def reference_to(item: object) -> Callable[[], Any]:
    """Return a weak reference to `item`, or a strong one if its class has none."""
    try:
        return weakref.ref(item)
    except TypeError:
        return lambda: item


def write_object(value: object, file: Path) -> None:
    """Write a file atomically: to a temporary name first, then renamed."""
    # In the same folder, since a rename is atomic only within a file system.
    draft = file.with_name(f"{file.name}.writing")
    torch.save(value, draft)
    draft.replace(file)


def register_hook(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    """Add `hook` to `hooks`, and return a handle that removes it.

    It replaces the function of the same name that an earlier run of the cell has registered: two hooks that remove the
    state of the same model would fail.
    """
    if name := _name_of_cell(hook):
        for number in [number for number, each in hooks.items() if _name_of_cell(each) == name]:
            del hooks[number]
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _name_of_cell(hook: Callable[..., None]) -> str:
    """Return the name of a function that a cell has defined at its top level, "" for anything else."""
    # The names of lambdas and of functions within functions have "<", and do not tell them apart.
    is_from_cell = isinstance(hook, FunctionType) and hook.__module__ == "__main__" and "<" not in hook.__qualname__
    return hook.__qualname__ if is_from_cell else ""


# Numbered checkpoints -------------------------------------------------------------------------------------------------


def numbered_folders(project: ProjectConfiguration) -> list[Path]:
    """Return the project's complete numbered checkpoints, in any order."""
    folders = project.checkpoints.glob("checkpoint_*")
    return [folder for folder in folders if checkpoint_number(folder) is not None and is_complete(folder)]


def checkpoint_number(folder: Path) -> int | None:
    """Return the number of a numbered checkpoint's folder, None for other folders."""
    # `checkpoint_3` has the number 3. Drafts and folders that were set aside have a suffix, and no number.
    start, _, number = folder.name.rpartition("_")
    return int(number) if start == "checkpoint" and number.isdecimal() else None


def is_complete(folder: Path) -> bool:
    """Return True if the folder contains a complete checkpoint."""
    # A commit renames the complete draft to the folder's name, with the manifest in it.
    return (folder / "manifest.json").is_file()


class _Creation(msgspec.Struct):
    """The field of a manifest that has the time of the save."""

    created: str


_SAME_SAVE = 2.0
"""Seconds between the time in a manifest and that of its file, from which on the file is a copy."""


def saved_at(folder: Path) -> tuple[float, float, int]:
    """Return the time at which a numbered checkpoint was saved, and its number, to sort by.

    The number alone does not tell: a new run in the same folder begins with 0 again.
    """
    manifest, number = folder / "manifest.json", checkpoint_number(folder) or 0
    try:
        written = manifest.stat().st_mtime
    except OSError:  # another process is removing the checkpoint
        return 0.0, 0.0, number
    try:
        created = datetime.fromisoformat(msgspec.json.decode(manifest.read_bytes(), type=_Creation).created).timestamp()
    except (OSError, ValueError, msgspec.DecodeError):  # damaged: a load reports that
        return written, written, number
    # `created` has whole seconds. The time of the file orders the saves within a second, unless the file is a copy.
    return created, written if abs(written - created) < _SAME_SAVE else created, number


def number_after(project: ProjectConfiguration, folder: str) -> int:
    """Return the first number above all checkpoints of the project if `folder` is one of them, 0 otherwise."""
    number = checkpoint_number(Path(folder))
    if number is None or "://" in folder or "://" in str(project.project_dir):
        return 0
    if os.path.realpath(Path(folder).parent) != os.path.realpath(project.checkpoints):
        return 0
    # Not just after `folder`, which may be an earlier one: the next number would be in use.
    return 1 + max([number, *(checkpoint_number(path) or 0 for path in numbered_folders(project))])


def latest_folder(project: ProjectConfiguration) -> Path:
    """Return the project's numbered checkpoint that was saved last. Raises `InvalidArgument` if there is none."""
    folders = numbered_folders(project)
    if not folders:
        raise InvalidArgument(f"no checkpoint found in {project.checkpoints}: pass a folder to load_state()")
    return max(folders, key=saved_at)


def keep_latest(project: ProjectConfiguration, newest: Path) -> None:
    """Remove the oldest checkpoints beyond the project's limit, never the `newest`, and incomplete ones.

    A folder that cannot be removed is tried again after the next save. Incomplete checkpoints that another process is
    writing are kept.
    """
    folder = project.checkpoints
    if newest.parent != folder or not project.automatic_checkpoint_naming:
        return
    from rankbook.checkpoint.storage import steps
    from rankbook.checkpoint.storage.backends import LocalStorage

    storage = LocalStorage(folder)
    # Two traces of an incomplete save: its draft folder, and the file that names the process that writes there. A save
    # that was killed at the right moment leaves the second one without the first.
    drafts = [
        path for path in folder.glob("checkpoint_*.partial") if checkpoint_number(path.with_suffix("")) is not None
    ]
    claims = [path.with_suffix("") for path in folder.glob(f"checkpoint_*{steps.PARTIAL}{steps.OWNER}")]
    outdated = [
        folder / name
        for draft in dict.fromkeys([*drafts, *claims])
        if steps.writer_of(storage, draft.name) is None  # otherwise another process is saving there
        for name in (draft.name, draft.name + steps.OWNER)
    ]
    # `newest` is kept in any case, also if the clock was set back.
    if project.total_limit is not None:
        earlier = sorted((path for path in numbered_folders(project) if path != newest), key=saved_at)
        outdated += earlier[: max(0, len(earlier) + 1 - project.total_limit)]
    for path in outdated:
        with contextlib.suppress(OSError):
            storage.remove(path.name)
