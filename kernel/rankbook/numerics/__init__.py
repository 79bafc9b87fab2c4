"""Checks of the numbers of a training run: `watch_numbers`, `compare`, and what they are made of.

    hashing.py           hashes of tensors and their differences between ranks
    norms.py             norms of gradients over all ranks, by parameter and module (pure code)
    gradients.py         norms of the gradients of this rank
    step_ends.py         ends of optimizer steps, for views and checks that must not read in the middle of a step
    watch.py             number watch of a rank: hooks on modules, gradients, collectives and optimizers
    attribution.py       on which rank, in which module and phase a non-finite value was born (pure code)
    comparison.py        `compare`: where a step in two layouts differs first; a training step made of a loss function
    settings.py          layouts of `compare` and conditions of `watch_numbers`, as the user writes them
    recording.py         copies of a model in a layout; record of a step there: summaries of its tensors, as whole ones
    relations.py         relation of two tensors: a factor, a missing rank, another mask, a precision (pure functions)
    naming.py            names of modules and parameters, lines of cells, tensors in containers

The modules that import torch are loaded by the ranks when a check is used. Nothing here imports `rank` or
`coordinator`, so that both can import it. The two public functions, which the ranks run, are in this file: the notebook
process imports it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankbook.errors import InvalidArgument
from rankbook.lazy_imports import loaded_module
from rankbook.numerics.settings import parse_conditions

if TYPE_CHECKING:
    from rankbook.numerics.comparison import Comparison
    from rankbook.numerics.settings import Layout


def watch_numbers(*conditions: str) -> None:
    """End the cell at the first training step whose numbers are wrong, before the optimizer uses them.

    Args:
        conditions: `"nan"`, `"inf"`, `"norm > X"` in any combination, or `"off"`.

    - `"nan"`: a NaN in the output of a module, or a NaN or an infinity in the loss, a gradient or a parameter.
    - `"inf"`: also infinities in the outputs of modules, and all of the above.
    - `"norm > X"`: the norm of all gradients of an optimizer is larger than X, or NaN.

    Call it on all ranks; a later call replaces the conditions. In a notebook, `%distributed watch nan` calls it.
    Modules and optimizers need not be prepared. At an alarm, all ranks raise `NumericalError` with the same
    message: the rank, the module, the phase and the step in which the value was born. The inputs of the module are
    then in the variable `nonfinite_inputs` of that rank.

    Raises `InvalidArgument` for an unknown condition.

    Example::

        watch_numbers("nan", "norm > 100")
        optimizer.step()  # raises NumericalError if a gradient is NaN
        watch_numbers("off")
    """
    chosen = parse_conditions(*conditions)
    from rankbook.numerics import watch

    watch.set_conditions(chosen)


def active_words() -> tuple[str, ...]:
    """Return the conditions of the watch of this process, as `watch_numbers` takes them; none if it is off."""
    watch = loaded_module("rankbook.numerics.watch")  # not imported where nothing was ever watched
    conditions = watch.active_conditions() if watch is not None else None
    return () if conditions is None else (str(conditions),)


def compare(
    step: Callable[[Any, Any, Any], object] | None = None,
    model: Any = None,  # noqa: ANN401 - an nn.Module, or DDP; torch is not imported here
    optimizer: Any = None,  # noqa: ANN401
    batch: Any = None,  # noqa: ANN401
    *,
    loader: Any = None,  # noqa: ANN401 - any iterable of batches
    loss: Callable[..., Any] | None = None,
    layouts: Sequence[str | Layout] = ("one rank", "current"),
    also: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run one training step in two layouts, and find the first tensor that differs.

    Args:
        step: the step, called as `step(model, optimizer, batch)`. It computes the loss and calls `backward()`, and
            may clip gradients and step the optimizer. Without it, the step is made of `loss`: forward pass, loss,
            backward pass, `optimizer.step()`.
        model: the model, prepared or not.
        optimizer: its optimizer, prepared or not; None for a step without one.
        batch: the batch of this rank: tensors, or containers of tensors.
        loader: the loader to take the batch from, prepared or not; its position stays where it is. In place of `batch`,
            but not inside of a loop over the loader.
        loss: the loss function, in place of `step`. With a batch of tensors `*inputs, target` it is called as
            `loss(model(*inputs), target)`, with a dict as `loss(model(**batch), batch)`, and with a single tensor as
            `loss(model(batch))`. Without it, the model returns its loss, or an object with the attribute `loss`.
        layouts: the reference and the layout to compare with it: `"one rank"`, `"current"` (the model as it is),
            `"ddp"`, `"fsdp2"` or `"tp"`, also with a precision as in `"ddp bf16"`, or `Layout` objects.
        also: further modules that the step changes, by name, such as an average of the weights.

    Returns a `Comparison`, the same one on all ranks. All ranks call it, in a cell.

    Both layouts start from the same weights (for other layouts than "current": those of rank 0), the same random
    numbers and the same global batch. What is compared, in this order: weights, buffers and optimizer state before the
    step; the outputs of all modules; the loss; gradients; gradients when the optimizer gets them; optimizer state,
    parameters and buffers after the step. Sharded tensors are compared as whole ones. "one rank" is computed on all
    ranks: each has its part of the batch, the whole model, and a process group of its own, and the gradients are
    averaged in float64. While it runs, the variables `rank` and `world_size` of the cell are 0 and 1.

    The step runs on copies; the user's own model and optimizer are restored after "current", and so are gradients and
    random states. Every rank needs memory for a second model.

    Raises `InvalidArgument` for an unknown layout, for arguments that do not belong together, for a batch that cannot
    be divided, and for an optimizer that cannot be copied.

    Example::

        def step(model, optimizer, batch):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


        batch = torch.randn(4, 8)
        compare(step, model, optimizer, batch, layouts=("one rank", "ddp")).equal  # True
        compare(step, model, optimizer, batch, layouts=("ddp", "fsdp2"))
        compare(model=model, optimizer=optimizer, batch=(batch, torch.zeros(4, 8)), loss=torch.nn.functional.mse_loss)
    """
    from torch.nn import Module

    from rankbook.numerics.comparison import compare_layouts, first_batch, step_with_loss

    if isinstance(step, Module):
        raise InvalidArgument("the first argument is a model: expected a step; pass a model as compare(model=…)")
    if model is None:
        raise InvalidArgument("expected a model: compare(step, model, optimizer, batch)")
    if step is not None and loss is not None:
        raise InvalidArgument("expected either a step, which computes its own loss, or a loss, got both")
    if (batch is None) == (loader is None):
        raise InvalidArgument(f"expected either a batch or a loader, got {'none' if batch is None else 'both'}")
    if loader is not None:
        batch = first_batch(loader)
    if step is None:
        step = step_with_loss(loss)
    return compare_layouts(step, model, optimizer, batch, layouts, also or {})
