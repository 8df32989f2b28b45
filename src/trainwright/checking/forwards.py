"""Looks at the forward and what comes of it: its parameters against the batch, its loss, ids out of range, gradients.

Each check notes a finding in better words than the exception that would follow; `AlreadyReported` then ends
the stage.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trainwright.checking import places
from trainwright.checking.explain import Case
from trainwright.checking.findings import AlreadyReported
from trainwright.labels import IGNORED_LABEL
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer
from trainwright.loop.user_lines import Place
from trainwright.user_code import parameters_of

_MOST_NAMES = 6


def loss_function(trainer: Trainer, case: Case) -> Callable[..., Any]:
    """Returns the function whose return is the loss: the user's forward of trainer, task or model."""
    candidates: list[Callable[..., Any]] = [
        type(trainer).forward,
        type(trainer.task).forward,
        type(trainer.model).forward,
    ]
    return next((each for each in candidates if _is_users(each, case)), candidates[-1])


def place_of_loss(trainer: Trainer, case: Case) -> Place | None:
    """Returns the line where the loss is returned, or that of the model in the config."""
    return places.of_return(loss_function(trainer, case), case.users) or case.setting("model.type", ["model"])


def check_signature(trainer: Trainer, batch: Any, case: Case) -> None:
    """Compares the batch's keys with the parameters of the forward that gets them."""
    if not isinstance(batch, Mapping):
        return
    keys = [str(key) for key in batch]
    if overrides(trainer, "forward", Trainer):
        _compare(trainer.forward, type(trainer).__name__, keys, case)
    passes_on = not _is_users(type(trainer).forward, case)
    if passes_on and not overrides(trainer.task, "forward", Task):
        # The default task keeps labels from a model that does not take them: its criterion gets them.
        parameters = _by_keyword(trainer.model.forward)
        takes_labels = parameters is None or "labels" in parameters
        given = [key for key in keys if key != "labels" or takes_labels]
        _compare(trainer.model.forward, type(trainer.model).__name__, given, case)


def _compare(forward: Callable[..., Any], owner: str, keys: list[str], case: Case) -> None:
    signature = parameters_of(forward)
    if signature is None:
        return
    parameters = list(signature.values())
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = [one.name for one in named]
    lacking = [one.name for one in named if one.default is one.empty and one.name not in keys]
    extra = [] if takes_any else [key for key in keys if key not in names]
    if not lacking and not extra:
        return
    parts = [f"{owner}.forward requires {_quoted(lacking)}, which the batch lacks"] if lacking else []
    parts += [f"the batch has {_quoted(extra)}, which {owner}.forward does not take"] if extra else []
    if lacking and extra:
        advice = "Use the same names in both: rename the parameter, or the field in the dataset or collator."
    elif lacking:
        advice = f"Let the dataset or collator give {_quoted(lacking)}, or give the parameter a default."
    else:
        advice = f"Add a parameter {_quoted(extra)} (or **rest) to forward, or leave it out in the dataset or collator."
    both = f"The batch has {', '.join(keys) or 'nothing'}; forward takes {', '.join(names) or 'nothing'}."
    place = places.of_function(forward, case.users, lacking) or case.setting("model.type", ["model"])
    case.add("error", f"{', and '.join(parts)}.", f"{both} {advice}", place)
    raise AlreadyReported


def _by_keyword(forward: Callable[..., Any]) -> list[str] | None:
    """The names that a forward takes; None where it takes any."""
    parameters = parameters_of(forward)
    if parameters is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return list(parameters)


class IdCheck:
    """Looks at labels and token ids before a loss or an embedding uses them; called by the watch."""

    def __init__(self, trainer: Trainer, case: Case) -> None:
        self._names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        self._trainer = trainer
        self._case = case

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place | None) -> None:
        """Notes ids out of range and ends the stage; other calls pass."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if len(tensors) < 2:
            return
        place = place or self._case.setting("model.type", ["model"])
        if name == "embedding":
            # F.embedding takes (ids, weight), torch.embedding (weight, ids).
            ids, weight = sorted(tensors[:2], key=lambda each: each.is_floating_point())
            self._check_tokens(ids, weight, place)
        else:
            ignored = kwargs.get("ignore_index", IGNORED_LABEL)
            self._check_labels(tensors[0], tensors[1], ignored, place)

    @property
    def _set(self) -> str:
        name = self._trainer.eval_name
        return (
            "data.train" if name is None else f"data.eval.{name}" if name in self._trainer.eval_data else f"data.{name}"
        )

    def _check_tokens(self, ids: torch.Tensor, weight: torch.Tensor, place: Place | None) -> None:
        low, high = _range(ids)
        rows = weight.shape[0]
        if low >= 0 and high < rows:
            return
        name = self._names.get(id(weight), "its weight").removesuffix(".weight")
        has = f"the embedding {name} has num_embeddings = {rows}"
        problem = f"the token ids of {self._set} go from {low} to {high}, but {has}"
        advice = f"Use num_embeddings ≥ {high + 1} (the vocabulary's size), or another tokenizer."
        advice = advice if low >= 0 else "Ids must not be negative: -100 marks labels, not inputs."
        self._case.add("error", f"{problem}: ids must lie in 0 … {rows - 1}.", advice, place)
        raise AlreadyReported

    def _check_labels(self, logits: torch.Tensor, labels: torch.Tensor, ignored: int, place: Place | None) -> None:
        if labels.is_floating_point() or logits.ndim == 0:
            return  # probabilities
        classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
        low, high = _range(labels[labels != ignored])
        if low >= 0 and high < classes:
            return
        shape = f"(shape {tuple(logits.shape)})"
        problem = f"the labels of {self._set} go from {low} to {high}, but the logits have {classes} classes {shape}"
        advice = f"Give the model {high + 1} outputs, or number the labels from 0; {ignored} marks those to ignore."
        self._case.add("error", f"{problem}: labels must lie in 0 … {classes - 1}.", advice, place)
        raise AlreadyReported


def _range(ids: torch.Tensor) -> tuple[int, int]:
    return (int(ids.min()), int(ids.max())) if ids.numel() else (0, -1)


def check_loss(loss: Any, place: Place | None, case: Case) -> None:
    """Notes a first loss that is not finite."""
    value = float(loss)
    if not math.isfinite(value):
        advice = (
            "Look for log(0), a division by zero, sqrt at 0, an empty mean, or values of the data that are not finite."
        )
        case.add("error", f"the first loss is {value}.", advice, place)


def check_ownership(trainer: Trainer, case: Case) -> None:
    """Notes parameters that require a gradient and that no optimizer updates."""
    owned = {
        id(parameter)
        for optimizer in trainer.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    left = [name for name, one in trainer.model.named_parameters() if one.requires_grad and id(one) not in owned]
    if left:
        users_class: Any = type(trainer).__mro__[1]  # below the trial's own, which only records
        place = places.of_function(users_class.build_optimizers, case.users) or case.setting("trainer.optimizer")
        advice = "Pass them to an optimizer, or freeze them (model.freeze, requires_grad_(False))."
        case.add("remark", f"no optimizer owns {_listed(left)}: these parameters are never updated.", advice, place)


def check_gradients(trainer: Trainer, without: list[str], case: Case) -> None:
    """Notes parameters that got no gradient in the step; `without` are their names."""
    if not without:
        return
    root = without[0].partition(".")[0]
    place = places.of_attribute(type(trainer.model), root, case.users) or case.setting("model.type", ["model"])
    problem = f"no gradient reached {_listed(without)} in the first step."
    advice = "Use them in forward, or freeze or remove them; parts that only some steps use may stay."
    case.add("remark", problem, advice, place)


def without_gradient(model: torch.nn.Module) -> list[str]:
    """Returns the trainable parameters that have no gradient; none where the step has cleared all of them."""
    trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
    missing = [name for name, one in trainable.items() if one.grad is None]
    return [] if len(missing) == len(trainable) else missing


def _is_users(function: Callable[..., Any], case: Case) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_filename in case.users


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(f'"{name}"' for name in names)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
