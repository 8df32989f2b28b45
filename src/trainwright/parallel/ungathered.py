"""What to say when a split parameter is used where it was not gathered: torch speaks of mixed tensors.

A block's parameters are whole only inside of its forward, all others only inside of the model's.
"""

from __future__ import annotations

import traceback

import torch

from trainwright.errors import TrainwrightError
from trainwright.parallel.local import is_split


def refuse_ungathered(error: RuntimeError, model: torch.nn.Module) -> None:
    """Raises what a user can act on if the error is of a split parameter that was used by itself; else nothing."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return
    if not any(is_split(parameter) for parameter in model.parameters()):
        return
    raise TrainwrightError(
        "A parameter that is split over ranks was used outside of the forward that gathers it: a layer or a method of "
        f"{_own_name(model)} was called by itself. Call the model (or a whole member of its ModuleList), or list the "
        'method in the model\'s class: forward_methods = ("encode",). replicate in place of data keeps it whole.'
        f"{_advice_on_outputs(model)}",
        where=_place(error),
    ) from error


def _advice_on_outputs(model: torch.nn.Module) -> str:
    """Says what else it may be where rules lay out what modules return: that meets only what is laid out as well."""
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if not any("tensor" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None):
        return ""
    return (
        " Or what a rule under outputs lays out was added to what none does: give what is added here (an embedding, "
        "the last layer of a block) a rule as well, as trainwright/configs/sharding/llama.yaml does."
    )


def _own_name(model: torch.nn.Module) -> str:
    """Returns the name of the user's class, of which torch makes one of its own when it splits it."""
    kinds = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed")]
    return next((kind.__name__ for kind in kinds if not kind.__name__.startswith("FSDP")), type(model).__name__)


def _place(error: RuntimeError) -> str | None:
    """Returns the last line of the error's way that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
