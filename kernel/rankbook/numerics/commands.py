"""Public functions that the ranks run. The notebook process imports this module as well, so it imports no torch."""

from __future__ import annotations

from rankbook.numerics.watch_conditions import parse_conditions


def watch_numbers(*conditions: str) -> None:
    """End the cell at the first training step whose numbers are wrong, before the optimizer uses them.

    Args:
        conditions: `"nan"`, `"inf"`, `"norm > X"` in any combination, or `"off"`.

    - `"nan"`: a NaN in the output of a module, or a NaN or an infinity in the loss, a gradient or a parameter.
    - `"inf"`: also infinities in the outputs of modules, and all of the above.
    - `"norm > X"`: the norm of all gradients of an optimizer is larger than X.

    Call it on all ranks; a later call replaces the conditions. In a notebook, `%distributed watch nan` calls it.
    Modules and optimizers need not be prepared. At an alarm, all ranks raise `NumericalError` with the same
    message: the rank, the module, the phase and the step in which the value was born. The inputs of the module are
    then in the variable `nonfinite_inputs` of that rank.

    Raises `InvalidArgument` for an unknown condition.

    Example::

        rankbook.watch_numbers("nan", "norm > 100")
        train()
        rankbook.watch_numbers("off")
    """
    chosen = parse_conditions(*conditions)
    from rankbook.numerics import watch

    watch.set_conditions(chosen)
