"""Metrics of torchmetrics by name: f1, precision, recall, auroc, perplexity, mse, mae, bleu and rouge.

The torchmetrics object is created for the first batch, whose shapes determine the task and the number of classes. How
the state of several ranks is merged is in metrics.py.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from trainwright.errors import ConfigError
from trainwright.loop.metrics import align_classes, never_distributed, shift_labels

logger = logging.getLogger(__name__)

Task = Literal["binary", "multiclass", "multilabel"]
Average = Literal["micro", "macro", "weighted", "none"]


def _import(module: str) -> Any:
    """Imports a module of torchmetrics."""
    try:
        return importlib.import_module(f"torchmetrics.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchmetrics":
            raise
        raise ConfigError('this metric needs torchmetrics. Install it: pip install "trainwright[metrics]".') from error


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


class TorchMetric:
    """A metric of torchmetrics. Subclasses read a batch and create the object for the first one."""

    higher_is_better: ClassVar[bool] = True

    def __init__(self) -> None:
        self.metric: Any = None
        """The object of torchmetrics; None before the first batch."""

    def read(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Returns the arguments of torchmetrics' `update`; raises for those that it cannot compare."""
        raise NotImplementedError

    def create(self, outputs: Any, labels: Any) -> Any:
        """Creates the object of torchmetrics for arguments that `read` returned."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets all samples."""
        if self.metric is not None:
            self.metric.reset()

    def update(self, outputs: Any, labels: Any) -> None:
        """Adds a batch."""
        outputs, labels = self.read(outputs, labels)
        if self.metric is None:
            self.metric = never_distributed(self.create(outputs, labels))
            if isinstance(outputs, torch.Tensor):
                self.metric.to(outputs.device)
        self.metric.update(outputs, labels)

    def check_inputs(self, outputs: Any, labels: Any) -> None:
        """Raises for outputs and labels that `update` would reject; changes nothing."""
        self.create(*self.read(outputs, labels))

    def compute(self) -> Any:
        """Returns the value over all samples: a number, a vector or a mapping; NaN without any sample."""
        return float("nan") if self.metric is None else self.metric.compute()


class _Classification(TorchMetric):
    """A classification metric: binary, multiclass or multilabel."""

    def __init__(
        self, name: str, *, task: Task | None, num_classes: int | None, num_labels: int | None, from_logits: bool,
        ignore_index: int, average: Average | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self._module = _import("classification")
        if task not in (None, "binary", "multiclass", "multilabel"):
            raise ConfigError(f"task: {task!r} is unknown. Use binary, multiclass or multilabel.")
        self._name, self._task, self._from_logits = name, task, from_logits
        if task is None and num_classes is not None:
            self._task = "multiclass"
        elif task is None and num_labels is not None:
            self._task = "multilabel"
        self._num_classes, self._num_labels = num_classes, num_labels
        self._ignore_index, self._average, self._options = ignore_index, average, options
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None
        self._has_warned = False

    def _task_of(self, outputs: torch.Tensor, labels: torch.Tensor) -> Task:
        if self._task is not None:
            return self._task
        if outputs.ndim == labels.ndim + 1 and outputs.shape != (*labels.shape, 1):
            return "multiclass"
        if not outputs.is_floating_point():
            raise ConfigError(
                f"the outputs are class indices ({_describe(outputs)}), which do not give the number of classes. Set "
                "num_classes, or task: binary; or name an output with one score per class."
            )
        return (
            "multilabel" if outputs.shape == labels.shape and outputs.ndim > 1 and outputs.shape[-1] > 1 else "binary"
        )

    def read(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Returns scores [n, classes] or [n] and labels [n]; [n, labels] both for multilabel."""
        if not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise ConfigError(f"compares tensors, but got {_describe(outputs)} and {_describe(labels)}.")
        outputs, labels = outputs.detach(), labels.long()
        task = self._task_of(outputs, labels)
        if task == "multiclass":
            outputs, labels = align_classes(outputs, labels)
        elif task == "binary":
            if outputs.shape == (*labels.shape, 2):  # the scores of both classes
                outputs = outputs.float()
                outputs = outputs[..., 1] - outputs[..., 0] if self._from_logits else outputs[..., 1]
            if outputs.numel() != labels.numel():
                raise ConfigError(
                    f"a binary metric needs one score per label, but the outputs are {_describe(outputs)} and the "
                    f"labels {_describe(labels)}."
                )
            outputs, labels = outputs.reshape(-1), labels.reshape(-1)
        elif outputs.shape != labels.shape or outputs.ndim < 2:
            raise ConfigError(
                f"a multilabel metric needs outputs and labels of one shape [n, labels], but the outputs are "
                f"{_describe(outputs)} and the labels {_describe(labels)}."
            )
        return outputs, labels

    def update(self, outputs: Any, labels: Any) -> None:
        """Adds a batch. torchmetrics would choose between logits and probabilities for each batch by its values."""
        outputs, labels = self.read(outputs, labels)
        if outputs.is_floating_point():
            outputs = outputs.float()
            if outputs.numel():
                low, high = outputs.aminmax()
                self._low = low if self._low is None else torch.minimum(self._low, low)
                self._high = high if self._high is None else torch.maximum(self._high, high)
            if self._from_logits:
                outputs = outputs.softmax(-1) if outputs.ndim > labels.ndim else outputs.sigmoid()
        if self.metric is None:
            self.metric = never_distributed(self.create(outputs, labels).to(outputs.device))
        self.metric.update(outputs, labels)

    def reset(self) -> None:
        """Forgets all samples."""
        super().reset()
        self._low = self._high = None

    def check_values(self) -> None:
        """Raises for probabilities outside of 0 to 1, and warns about logits that are all inside."""
        if self._low is not None and self._high is not None:
            low, high = float(self._low), float(self._high)
            are_probabilities = low >= 0 and high <= 1
            if not self._from_logits and not are_probabilities:
                raise ConfigError(
                    f"from_logits is false, but the outputs are from {low:.4g} to {high:.4g}, not "
                    "probabilities. Remove from_logits: false."
                )
            if self._from_logits and are_probabilities and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: all outputs are between 0 and 1. If they are probabilities, set from_logits: false.",
                    type(self).__name__,
                )

    def create(self, outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        """Creates the class of torchmetrics for the task."""
        task = self._task or (
            "multiclass" if outputs.ndim > labels.ndim else "binary" if labels.ndim == 1 else "multilabel"
        )
        options = {name: value for name, value in self._options.items() if value is not None}
        given: dict[str, Any] = {"ignore_index": self._ignore_index}
        if task == "multiclass":
            size = outputs.shape[-1] if outputs.ndim > labels.ndim else None
            given["num_classes"] = self._agree("num_classes", self._num_classes, size)
        elif task == "multilabel":
            given["num_labels"] = self._agree("num_labels", self._num_labels, labels.shape[-1])
        if self._average is not None:
            options["average"] = self._average
        only = {"threshold": ("binary", "multilabel"), "top_k": ("multiclass",), "max_fpr": ("binary",)}
        only |= {"average": ("multiclass", "multilabel")}
        for name in options:
            if task not in only.get(name, (task,)):
                raise ConfigError(f"{name}: has no effect, because the task is {task}. Remove it, or set task.")
        return getattr(self._module, f"{task.capitalize()}{self._name}")(**given, **options)

    def _agree(self, name: str, given: int | None, found: int | None) -> int:
        if given is None and found is None:
            raise ConfigError(f"{name}: is required, because the outputs are class indices.")
        if None not in (given, found) and given != found:
            raise ConfigError(f"{name}: is {given}, but the outputs have {found}. Remove it.")
        return given or found or 0


class F1(_Classification):
    """The F1 score of torchmetrics. The shapes of outputs and labels determine the task and the number of classes.

    Outputs [..., classes] with labels [...] are multiclass, outputs and labels of one shape [n, labels] multilabel, one
    score per sample binary; `task` overrides it, for example binary for the outputs of two classes. Outputs are logits
    unless `from_logits` is false. Labels of `ignore_index` do not count. `average` (macro by default) is for
    multiclass and multilabel; `none` gives one value per class, as `NAME/0`, `NAME/1`, ….
    """

    _class = "F1Score"

    def __init__(
        self,
        task: Task | None = None,
        num_classes: int | None = None,
        num_labels: int | None = None,
        average: Average | None = None,
        threshold: float | None = None,
        top_k: int | None = None,
        ignore_index: int = -100,
        from_logits: bool = True,
    ) -> None:
        super().__init__(
            self._class, task=task, num_classes=num_classes, num_labels=num_labels, from_logits=from_logits,
            ignore_index=ignore_index, average=average, options={"threshold": threshold, "top_k": top_k},
        )  # fmt: skip


class Precision(F1):
    """The precision of torchmetrics; arguments and shapes as for `f1`."""

    _class = "Precision"


class Recall(F1):
    """The recall of torchmetrics; arguments and shapes as for `f1`."""

    _class = "Recall"


class AUROC(_Classification):
    """The area under the ROC curve of torchmetrics; shapes, `task` and `from_logits` as for `f1`.

    Exact by default, which keeps all scores of the set in memory; `thresholds` (a number of bins) limits the memory.
    """

    def __init__(
        self,
        task: Task | None = None,
        num_classes: int | None = None,
        num_labels: int | None = None,
        average: Average | None = None,
        max_fpr: float | None = None,
        thresholds: int | list[float] | None = None,
        ignore_index: int = -100,
        from_logits: bool = True,
    ) -> None:
        super().__init__(
            "AUROC", task=task, num_classes=num_classes, num_labels=num_labels, from_logits=from_logits,
            ignore_index=ignore_index, average=average, options={"max_fpr": max_fpr, "thresholds": thresholds},
        )  # fmt: skip

    def check_inputs(self, outputs: Any, labels: Any) -> None:
        """Also raises for class indices, which have no ROC curve."""
        if isinstance(outputs, torch.Tensor) and not outputs.is_floating_point():
            raise ConfigError(f"needs scores, but the outputs are {_describe(outputs)}. Name an output with scores.")
        super().check_inputs(outputs, labels)

    def read(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Returns scores and labels."""
        if isinstance(outputs, torch.Tensor) and not outputs.is_floating_point():
            raise ConfigError(f"needs scores, but the outputs are {_describe(outputs)}. Name an output with scores.")
        return super().read(outputs, labels)


class Perplexity(TorchMetric):
    """The perplexity of torchmetrics, exp of the mean cross-entropy per token; labels of `ignore_index` do not count.

    Takes logits [n, length, classes] and labels [n, length]. `shift` is true for a causal language model, whose labels
    are the same tokens as its inputs: the logits of a position predict the next label. It is false where labels are at
    the positions that predict them (masked language models, encoder-decoder models).
    """

    higher_is_better = False

    def __init__(self, shift: bool, ignore_index: int = -100) -> None:
        super().__init__()
        self._module = _import("text")
        self._shift, self._ignore_index = shift, ignore_index

    def read(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Returns logits and the labels that they predict."""
        are_tensors = isinstance(outputs, torch.Tensor) and isinstance(labels, torch.Tensor)
        if not are_tensors or outputs.ndim != 3 or outputs.shape[:2] != labels.shape:
            raise ConfigError(
                "needs logits [n, length, classes] and labels [n, length], but the outputs are "
                f"{_describe(outputs)} and the labels {_describe(labels)}."
            )
        outputs = outputs.detach().float()
        return shift_labels(outputs, labels) if self._shift else (outputs, labels)

    def create(self, outputs: Any, labels: Any) -> Any:
        """Creates torchmetrics' Perplexity."""
        return self._module.Perplexity(ignore_index=self._ignore_index)


class MeanSquaredError(TorchMetric):
    """The mean squared error of torchmetrics; with `squared: false`, its square root. Outputs and labels have one
    shape."""

    _class = "MeanSquaredError"

    higher_is_better = False

    def __init__(self, squared: bool = True) -> None:
        super().__init__()
        self._module = _import("regression")
        self._options: dict[str, Any] = {"squared": squared}

    def read(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Returns outputs and labels of one shape; [n, 1] and [n] are the same."""
        if not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise ConfigError(f"compares tensors, but got {_describe(outputs)} and {_describe(labels)}.")
        if outputs.shape == (*labels.shape, 1):
            outputs = outputs.squeeze(-1)
        elif labels.shape == (*outputs.shape, 1):
            labels = labels.squeeze(-1)
        if outputs.shape != labels.shape:
            raise ConfigError(
                f"needs outputs and labels of one shape, but the outputs are {_describe(outputs)} and the labels "
                f"{_describe(labels)}."
            )
        return outputs.detach().float().contiguous(), labels.float().contiguous()

    def create(self, outputs: Any, labels: Any) -> Any:
        """Creates the class of torchmetrics."""
        return getattr(self._module, self._class)(**self._options)


class MeanAbsoluteError(MeanSquaredError):
    """The mean absolute error of torchmetrics. Outputs and labels have one shape."""

    _class = "MeanAbsoluteError"

    def __init__(self) -> None:
        super().__init__()
        self._options = {}


class _TextMetric(TorchMetric):
    """A text metric: one text per sample, and one reference or a list of references per sample."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self._name, self._options = name, options
        self._module = _import("text")
        self.create(None, None)  # rejects options before the training starts

    def read(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Returns the texts and their lists of references."""
        if not _are_texts(outputs):
            raise ConfigError(
                f"compares texts, but the outputs are {_describe(outputs)}. Let eval_step return a list with one text "
                "per sample, for example {'predictions': […], 'references': […]}, and name them: outputs: "
                "predictions, labels: references."
            )
        references = [[each] if isinstance(each, str) else each for each in labels] if _is_list(labels) else None
        if references is None or not all(_are_texts(each) for each in references):
            raise ConfigError(
                f"compares texts, but the labels are {_describe(labels)}. Name a list with one reference, or a list "
                "of references, per sample, in the batch or in what eval_step or next_eval_inputs returns."
            )
        if len(outputs) != len(references):
            raise ConfigError(f"got {len(outputs)} texts and {len(references)} references. There must be one for each.")
        return list(outputs), references

    def create(self, outputs: Any, labels: Any) -> Any:
        """Creates the class of torchmetrics."""
        return getattr(self._module, self._name)(**self._options)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return _is_list(value) and all(isinstance(each, str) for each in value)


class BLEU(_TextMetric):
    """The BLEU score of torchmetrics, for texts that are split at whitespace.

    `outputs` names a list with one text per sample in what `eval_step` returns; `labels` names the references, one or
    several per sample, in the batch or in what `eval_step` or `next_eval_inputs` returns.
    """

    def __init__(self, n_gram: int = 4, smooth: bool = False, weights: list[float] | None = None) -> None:
        super().__init__("BLEUScore", {"n_gram": n_gram, "smooth": smooth, "weights": weights})


class ROUGE(_TextMetric):
    """The ROUGE scores of torchmetrics, as `NAME/rouge1_fmeasure` and so on; texts are named as for `bleu`.

    `rouge_keys` selects the scores. `use_stemmer` and rougeLsum need nltk.
    """

    def __init__(
        self,
        rouge_keys: list[str] | str = ("rouge1", "rouge2", "rougeL"),  # type: ignore[assignment]  # not mutable
        use_stemmer: bool = False,
        accumulate: Literal["best", "avg"] = "best",
    ) -> None:
        keys = rouge_keys if isinstance(rouge_keys, str) else tuple(rouge_keys)
        super().__init__("ROUGEScore", {"rouge_keys": keys, "use_stemmer": use_stemmer, "accumulate": accumulate})
