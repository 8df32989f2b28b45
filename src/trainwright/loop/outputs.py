"""What a forward may return, and how it is read in training and evaluation.

`loss`, `(loss, metrics)`, a mapping with `loss`, or an object with `.loss`. If the loss is None, `trainer.loss` or the
model's `criterion` computes it from the outputs and the labels. `metrics` in a mapping are logged as those of a pair.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainwright.backends import waits_for_memory
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.memory.out_of_memory import is_out_of_memory
from trainwright.models.layers.losses import count_labels
from trainwright.tracebacks import user_location
from trainwright.user_code.locations import UserFiles, definition_of, is_user_file, line_of_traceback

Loss = torch.Tensor | Mean


_ELEMENTWISE = (torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss)
"""Losses that broadcast outputs and labels of different shapes, with only a warning."""


class CriterionError(TrainwrightError):
    """The loss cannot be computed from these outputs and labels; the cause says why."""


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    """`trainer.loss`: a function of the outputs and the labels, and the location of the setting."""

    function: Callable[[Any, Any], Any]
    where: object | None = None


@dataclass(slots=True)
class ForwardResult:
    """The result of a forward: the loss and its weight, the metrics and the other outputs."""

    loss: Loss
    num_samples: int
    """The weight of a plain loss or metric; 0 on a rank without samples."""
    metrics: dict[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] | None = None
    count: torch.Tensor | None = None
    """The weight of a plain loss, on the device: the number of labels that it is the mean of, if the model provides
    it."""

    @property
    def mean(self) -> Loss:
        """The loss with its count as a Mean in double precision; a plain loss without a count is returned unchanged."""
        if self.count is None or isinstance(self.loss, Mean):
            return self.loss
        # A mean over zero labels is NaN.
        return Mean(torch.where(self.count > 0, self.loss.double(), 0.0) * self.count, self.count)


_DTYPE_ERROR = re.compile(
    r"same dtype|should be the same|target dtype|scalar types?|[Ff]ound dtype|not implemented for '|can't be cast to"
)
"""Messages of torch about operands with incompatible dtypes."""
_INTEGER = re.compile(r"\b(long|int|short|char|byte|bool)\b|unsigned char")


_AUTOCAST_ERROR = re.compile(
    r"unsafe to autocast|BFloat16|\bHalf\b|self\.dtype to be equal|same scalar type", re.IGNORECASE
)
"""Messages of torch about operations that autocast does not cast, or that do not support the dtype of autocast."""


def explain_failure(
    error: AttributeError | LookupError | RuntimeError | TypeError, batch: Any, model: torch.nn.Module
) -> None:
    """Raises a clear error instead of some errors of Python and torch; ignores others.

    Missing keys of the batch, labels and ids out of range, dtypes, sharded parameters, operations without autocast,
    logits that a fused loss does not compute.
    """
    if isinstance(error, AttributeError | TypeError) and "NoneType" in str(error):
        _explain_no_logits(error, model)
    if isinstance(error, AttributeError):
        return
    if isinstance(error, KeyError):
        _reject_missing_key(error, batch)
    elif isinstance(error, IndexError):
        _reject_ids(error, batch, model)
    elif isinstance(error, LookupError):
        return
    elif isinstance(error, RuntimeError) and "DTensor" in str(error):
        from trainwright.parallel.fully_shard import reject_ungathered  # slow to import

        reject_ungathered(error, model)
    elif not is_out_of_memory(error):
        if _DTYPE_ERROR.search(str(error)) and isinstance(error, RuntimeError):
            _explain_dtypes(error, batch, model)
        if _AUTOCAST_ERROR.search(str(error)):
            _explain_autocast(error, model)


def _explain_no_logits(error: AttributeError | TypeError, model: torch.nn.Module) -> None:
    """Raises with the setting if the model fuses head and loss, which is the default on a GPU."""
    # The forward of a transformers model has the setting; its outputs contain None if they are a mapping.
    wanted = getattr(model, "fused_loss", getattr(model.forward, "wanted", False))
    if wanted is None:
        wanted = any(waits_for_memory(parameter.device) for parameter in model.parameters())
    if not (wanted and model.training and torch.is_grad_enabled()):
        return
    raise TrainwrightError(
        f"{error}. While training, this model computes head and loss together, and its logits are None. If this line "
        "uses them, set model.fused_loss: false.",
        where=user_location(error),
    ) from error


def _explain_autocast(error: RuntimeError | TypeError, model: torch.nn.Module) -> None:
    """Raises with the setting if autocast is active, which is the default on a GPU."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if not torch.is_autocast_enabled(device):
        return
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device), "this precision")
    reason = str(error).strip().splitlines()[0].rstrip(".")
    raise TrainwrightError(
        f"This operation does not work with the {dtype} tensors of this runtime.precision ({reason}). Convert "
        f'them with .float(), compute it within torch.autocast("{device}", enabled=False), or set runtime.precision: '
        "fp32.",
        where=user_location(error),
    ) from error


def _reject_missing_key(error: KeyError, batch: Any) -> None:
    """Raises if the key was looked up in the batch, that is, if the failing expression begins with a mapping of the
    same keys."""
    key = error.args[0] if error.args else None
    if not isinstance(batch, Mapping) or not isinstance(key, str) or key in batch:
        return
    users = UserFiles(Path.cwd())
    location = line_of_traceback(error, users)
    if location is None or location.columns is None:
        return
    name = re.match(r"\w*", location.text[slice(*location.columns)])
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename in users]
    searched = frames[-1].f_locals.get(name[0]) if name is not None else None
    if isinstance(searched, Mapping) and {*searched} == {*batch}:
        raise DataError(
            f"The batch has no {key!r}; its keys are {', '.join(map(str, batch))}. Rename the field in the dataset or "
            "the collator, or the key here.",
            where=user_location(error),
        ) from error


def _reject_ids(error: IndexError, batch: Any, model: torch.nn.Module) -> None:
    """Explains torch's "Target 10 is out of bounds." and "index out of range"; ignores other errors."""
    if str(error).startswith("index out of range") and isinstance(batch, Mapping):
        rows = {
            name: module.num_embeddings
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Embedding)
        }
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or not value.numel() or not rows:
                continue
            low, high, smallest = int(value.min()), int(value.max()), min(rows, key=rows.__getitem__)
            if name != "labels" and not 0 <= low <= high < rows[smallest]:
                raise DataError(
                    f"{name} has ids from {low} to {high}, but the embedding {smallest} has {rows[smallest]} rows. Set "
                    "the vocabulary size of the model to that of the tokenizer, or pad with one of its ids."
                ) from error
    if str(error).startswith("Target "):
        raise TrainwrightError(
            f"A label is out of range: {error} The outputs have fewer classes than the labels refer to. "
            "Labels start at 0, so the model needs one output more than the largest label."
        ) from error


def _explain_dtypes(error: RuntimeError, batch: Any, model: torch.nn.Module) -> None:
    """Raises if the dtype of a tensor of the batch is incompatible with the weights or the loss."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    fields = _tensors_of(batch)
    where = user_location(error)
    labels = fields.get("labels")
    is_about_labels = "target" in str(error) or "nll_loss" in str(error) or "scalar type Long" in str(error)
    if is_about_labels and (labels is None or labels.dtype != torch.long):
        given = fields if labels is None else {"labels": labels}
        raise DataError(
            f"The batch has {_dtypes(given)}, but this loss needs class indices of dtype int64 ({error}). "
            "Convert them in the dataset, with .long(), or use a loss of real numbers, such as mse_loss.",
            where=where,
        ) from error
    short = next((kind for kind in kinds if kind in (torch.bfloat16, torch.float16)), None)
    other = next((name for name, value in fields.items() if value.dtype == torch.float32), None)
    if short is not None and other is not None:
        word = "bf16" if short == torch.bfloat16 else "fp16"
        raise TrainwrightError(
            f"The weights are {word}, but the batch's {other} is float32 ({error}). Set runtime.precision: {word}, "
            "which casts where operations need it, or convert the data to that precision."
        ) from error
    named = str(error).lower()
    doubles = [name for name, value in fields.items() if value.dtype == torch.float64 and "double" in named]
    integers = [
        name
        for name, value in fields.items()
        if not value.is_floating_point() and name != "labels" and _INTEGER.search(named)
    ]
    wrong = doubles or integers
    if not wrong or len(kinds) != 1 or torch.float64 in kinds:
        return
    reason = " NumPy's and Python's numbers are float64 unless they are converted." if doubles else ""
    raise DataError(
        f"The batch has {_dtypes({name: fields[name] for name in wrong})}, but the weights are "
        f"{_name_of_dtype(kinds.pop())} ({error}).{reason} Convert in the dataset: .float() of a tensor, "
        ".astype(np.float32) of an array.",
        where=where,
    ) from error


def _tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a batch by key, or by index such as `batch[0]`."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, list | tuple):
        items = ((f"batch[{index}]", value) for index, value in enumerate(batch))
    elif isinstance(batch, torch.Tensor):
        items = [("batch", batch)]
    return {str(name): value for name, value in items if isinstance(value, torch.Tensor)}


def _dtypes(fields: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} of dtype {_name_of_dtype(value.dtype)}" for name, value in fields.items())


def _name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_forward(
    returned: Any, batch: Any, model: torch.nn.Module, num_samples: int, configured: ConfiguredLoss | None = None
) -> ForwardResult:
    """Reads the result of `forward`; raises for forms other than those above. `configured` is `trainer.loss`."""
    if isinstance(returned, Mean):
        if configured is not None:
            _reject_second_loss(configured)
        return ForwardResult(returned, num_samples)
    if isinstance(returned, torch.Tensor):
        if returned.ndim == 0 or (configured is None and getattr(model, "criterion", None) is None):
            if configured is not None:
                _reject_second_loss(configured)
            _reject_scores(returned, batch, model)
            return ForwardResult(_one_number(returned), num_samples)
        return _with_criterion({"output": returned}, batch, model, num_samples, configured)
    if isinstance(returned, tuple) and not hasattr(returned, "loss"):
        if configured is not None:
            _reject_second_loss(configured)
        return read_pair(returned, num_samples)
    if isinstance(returned, Mapping):
        outputs = {name: value for name, value in returned.items() if name != "loss"}
        loss = returned.get("loss")
    elif hasattr(returned, "loss"):
        outputs = {name: value for name, value in _attributes(returned).items() if name != "loss"}
        loss = returned.loss
    else:
        raise TrainwrightError(
            f"forward returned {_describe(returned)}. Return a loss, (loss, metrics), a mapping with `loss`, "
            "or an object with `.loss`."
        )
    # A transformers model may have an output with that name, which is not a mapping.
    metrics = dict(outputs.pop("metrics")) if isinstance(outputs.get("metrics"), Mapping) else {}
    if loss is None:
        result = _with_criterion(outputs, batch, model, num_samples, configured)
        result.metrics = metrics
        return result
    if configured is not None:
        _reject_second_loss(configured)
    if isinstance(loss, Mean):
        return ForwardResult(loss, num_samples, metrics, outputs)
    return ForwardResult(_one_number(loss), num_samples, metrics, outputs, count_targets(model, batch))


def logits_of(outputs: Any, model: torch.nn.Module) -> torch.Tensor:
    """Returns the logits of a model's outputs: of a mapping, of an object, or the outputs themselves."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(found, torch.Tensor):
        given = f"a mapping of {', '.join(outputs)}" if isinstance(outputs, Mapping) else type(outputs).__name__
        raise TrainwrightError(
            f"{type(model).__name__} returned {given}, but this trainer computes the loss from logits. Return a "
            "mapping with `logits`, or an object with `.logits`."
        )
    return found


def count_targets(model: torch.nn.Module, batch: Any) -> torch.Tensor | None:
    """Returns the number of labels of a batch that the model's loss is the mean of; None if it is not known.

    A model can define `count_targets(labels)`, as the shipped models do.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    kind = type(model)
    count: Callable[..., torch.Tensor | None] | None = getattr(kind, "count_targets", None)
    if count is not None:
        return count(model, labels)
    if not kind.forward.__module__.startswith("transformers.") or {"shift_labels", "num_items_in_batch"} & {*batch}:
        return None
    from trainwright.models import transformers_models  # imports much

    return transformers_models.count_targets(model, labels)


def full_loss(loss: Loss) -> Loss:
    """Returns a loss as a plain tensor, or as a Mean of plain tensors; a loss of sharded parameters alone is a DTensor.
    Collective."""
    from trainwright.parallel.mixed_tensors import full  # slow to import

    if isinstance(loss, torch.Tensor):
        return full(loss)
    total, count = (full(each) if isinstance(each, torch.Tensor) else each for each in (loss.total, loss.count))
    return Mean(total, count)


def read_pair(returned: tuple[Any, ...], num_samples: int) -> ForwardResult:
    """Reads (loss, metrics)."""
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise TrainwrightError(
            f"forward returned {_describe(returned)}. A tuple must be (loss, metrics), with the metrics in a mapping."
        )
    loss, metrics = returned
    return ForwardResult(loss if isinstance(loss, Mean) else _one_number(loss), num_samples, dict(metrics))


def _with_criterion(
    outputs: Mapping[str, Any],
    batch: Any,
    model: torch.nn.Module,
    num_samples: int,
    configured: ConfiguredLoss | None,
) -> ForwardResult:
    criterion = getattr(model, "criterion", None) if configured is None else configured.function
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    scores = outputs.get("logits")
    if scores is None and len(outputs) == 1:
        scores = next(iter(outputs.values()))
    if criterion is None or labels is None or scores is None:
        missing = [
            "`criterion` on the model" if criterion is None else "",
            "`labels` in the batch" if labels is None else "",
            f"`logits` among the outputs (got {', '.join(outputs) or 'none'})" if scores is None else "",
        ]
        raise TrainwrightError(
            "forward returned no loss, and none can be computed: there is no "
            f"{' and no '.join(filter(None, missing))}. "
            "Return a loss, or set trainer.loss, such as {type: cross_entropy}, and add labels to the batch."
        )
    if type(criterion) in _ELEMENTWISE and scores.shape != labels.shape:
        raise CriterionError(
            f"{_name_of(criterion, configured)} would compare every output with every label: outputs {_shown(scores)} "
            f"and labels {_shown(labels)} have different shapes, and torch broadcasts them. Let forward return outputs "
            "of the shape of the labels, such as outputs.squeeze(-1).",
            where=None if configured is None else configured.where,
        )
    try:
        loss = criterion(scores, labels)
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or is_out_of_memory(error):
            raise  # an error of the device, not of shapes
        pair = f"outputs {_shown(scores)} and labels {_shown(labels)}"
        name = _name_of(criterion, configured)
        if type(criterion).__module__.partition(".")[0] != "torch":
            # A custom criterion: the traceback shows its line, and this error its inputs.
            error.add_note(f"{name} got {pair}.")
            raise
        reason = str(error).rstrip(".")
        advice = "Let forward return outputs of the shape and the dtype that it accepts, or choose another criterion."
        if scores.ndim == labels.ndim + 1 and labels.dtype != torch.int64:
            advice = "Class indices are int64: convert the labels of the dataset with .long()."
        raise CriterionError(
            f"{name} cannot compare {pair}: {reason}. {advice}",
            where=None if configured is None else configured.where,
        ) from error
    count = count_labels(criterion, labels) if isinstance(labels, torch.Tensor) else None
    return ForwardResult(
        loss if isinstance(loss, Mean) else _one_number(loss), num_samples, outputs=outputs, count=count
    )


def _name_of(criterion: Any, configured: ConfiguredLoss | None) -> str:
    kind = getattr(criterion, "__name__", type(criterion).__name__)
    return f"The model's criterion, {kind}," if configured is None else f"trainer.loss: {kind}"


def _reject_second_loss(configured: ConfiguredLoss) -> NoReturn:
    raise ConfigError(
        "trainer.loss: has no effect, because forward returns a loss already. Remove it, or let forward return its "
        "outputs without a loss.",
        where=configured.where,
    )


def reject_ignored_labels(forwards: Iterable[Callable[..., Any]]) -> None:
    """Raises for ignored labels next to a plain loss, in a run that splits its batches.

    The mean of a micro-batch is over its own labels. Weighted by samples, the update would depend on how the batch was
    split. `forwards` are searched for the user's own.
    """
    definitions = [found for each in forwards if (found := definition_of(each)) is not None]
    raise TrainwrightError(
        f"Some labels are {IGNORED_LABEL}, which a loss ignores, but forward returned a plain loss, and batches "
        "are split into micro-batches or over ranks: the gradient would depend on the split. Return Mean(total, "
        "count) with the number of labels that count (for a loss per sample: of samples), or use a trainer that "
        "counts them: trainer.type language_model, masked_language_model or sequence_to_sequence.",
        where=next((f"{file}:{line}" for file, line in definitions if is_user_file(file)), None),
    )


def _reject_scores(returned: torch.Tensor, batch: Any, model: torch.nn.Module) -> None:
    """Raises for scores without a criterion: training on their mean would be a silent mistake."""
    if returned.numel() > 1 and isinstance(batch, Mapping) and "labels" in batch:
        raise TrainwrightError(
            f"forward returned {_describe(returned)}, and {type(model).__name__} has no criterion. If these are "
            "scores, set trainer.loss, such as {type: cross_entropy}, or give the model a criterion (self.criterion = "
            "nn.CrossEntropyLoss()), which receives them and the batch's labels. If they are the losses of single "
            "samples, reduce them with .mean(), or return Mean(total, count)."
        )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {_name_of_dtype(value.dtype)}"
    return _describe(value)


def _one_number(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss if loss.ndim == 0 else loss.reshape(())
    advice = "Reduce it with .mean(), or return Mean(total, count)."
    if isinstance(loss, Real):
        advice = "A number has no gradient: remove the .item() or float() on its way."
    raise TrainwrightError(
        f"The loss must be one number in a tensor, or a Mean; forward returned {_describe(loss)}. {advice}"
    )


def _attributes(value: Any) -> dict[str, Any]:
    # A dataclass with slots has no `__dict__`; its fields are its slots.
    slots = {name: getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
