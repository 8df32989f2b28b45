"""What a user hands to training_main, looked at before anything is built: are these functions, and do they take what
they will be called with?

What they return is read where they are called (forward_steps.py, function_data.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.loop.calls import refuse_wrong_call

_FORWARD_STEP = ("data_iterator", "model", "args", "timers")

CALLED_WITH: Mapping[str, tuple[str, ...]] = {
    "forward_step_function": _FORWARD_STEP,
    "create_dataset_function": ("path", "args"),
    "handle_metrics_function": ("metrics",),
    "init_function": ("args", "model"),
    "collate_fn": ("samples",),
    "forward_step_eval": _FORWARD_STEP,
}
"""The parameters of training_main that are functions, and what each is called with."""

_REQUIRED = ("forward_step_function", "create_dataset_function")


def refuse_wrong_functions(functions: Mapping[str, Any]) -> None:
    """Refuses a function that does not take what it is called with; `functions` are training_main's, by their names."""
    for role, arguments in CALLED_WITH.items():
        function = functions.get(role)
        if function is not None or role in _REQUIRED:
            refuse_wrong_call(function, arguments, role=role)
