"""`trainwright check`: the config, its components, then one update, evaluation and checkpoint on copies.

All problems are reported together, with their lines and advice (findings.py). The trial is the user's
trainer in eager mode on one CPU, in a temporary folder; `Trial` runs its stages.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any, cast

import torch

from trainwright.analysis.explain import components_of
from trainwright.analysis.findings import (
    AlreadyReported,
    Case,
    Finding,
    Findings,
    Report,
    Severity,
    line_of_setting,
    marked_words,
    message_finding,
)
from trainwright.analysis.unsaved_state import RepeatedStep, find_unsaved, outcome_of
from trainwright.backends import expected_precision
from trainwright.build.components import Build, is_called_later
from trainwright.build.data import describe_size, limits, may_make_batches
from trainwright.build.run import build_trainer, sets_of
from trainwright.compile.host_sync import HostSyncMode, Sighting, watching
from trainwright.compile.regions import EAGER, check_mode
from trainwright.compile.reports import Compilations, listening
from trainwright.config import BatchPlan, Origin, RunConfig, known_data_ranks, resolve_batch
from trainwright.config.sections import BENCHMARK_SETTINGS
from trainwright.config.trainer_options import REWARD_ARGUMENTS
from trainwright.data.collators import plain_mappings
from trainwright.data.collators.fields import NamedFields
from trainwright.data.fetch import count_samples, fetch, is_stream
from trainwright.data.loader import EvalData, MadeBatches, TrainData
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.hook import Hook
from trainwright.loop.outputs import CriterionError
from trainwright.loop.state import Batch, split_batch
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer, TrainIterator
from trainwright.models.model import Model
from trainwright.models.quantize import count_weights
from trainwright.models.transformers_models import is_transformers_class
from trainwright.optim.torch_schedules import accepts_optimizer, missing_lengths
from trainwright.registry import resolve as registry
from trainwright.registry.trust import reject_untrusted
from trainwright.user_code.locations import (
    SourceLocation,
    UserFiles,
    line_of_attribute,
    line_of_function,
    line_of_return,
    line_of_traceback,
    parameters_of,
    source_line,
)
from trainwright.user_code.signatures import accepts_argument

STAGES = ("components", "building every part", "a training step", "evaluation", "a checkpoint", "graph safety")
_GRAPH_MODES = ("compile", "graph")
_LOCATED = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<message>.*)")
_MAX_NAMES = 6


def check_run(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, trust: bool | None = None) -> Report:
    """Checks the run of a YAML file, without access to its run folder; `trust` is that of `RunConfig.load`."""
    findings = Findings()
    report = Report(findings)
    config = load_config(path, overrides, findings, trust=trust)
    if config is None:
        report.skipped += STAGES
        return report
    report.checked.append("config")
    case = Case(config, UserFiles(config.project_dir), findings)
    with _quiet():
        num_components = check_components(case)
        if findings.count("error"):
            report.skipped += STAGES[1:]
            return report
        report.checked.append(f"{num_components} components")
        with tempfile.TemporaryDirectory(prefix="trainwright-check-") as folder:
            run_stages(case, Path(folder), report)
    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the log of the trial, and sends what user code prints to stderr."""
    package = logging.getLogger("trainwright")
    level = package.level
    package.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        package.setLevel(level)


# the config and its components


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str], findings: Findings, *, trust: bool | None = None
) -> RunConfig | None:
    """Returns the config, or None if it cannot be read or trusted, in which case each of its problems is a finding."""
    try:
        config = RunConfig.load(path, overrides, trust=trust)
        reject_untrusted(config)
        return config
    except ConfigError as error:
        first, *others = error.problem.split("\n")
        where = error.where if isinstance(error.where, Origin) else None
        for origin, message in [(where, first), *(_split_origin(line, overrides) for line in others)]:
            findings.add(message_finding(message, line_of_setting(origin, marked_words(message))))
        return None


def _split_origin(line: str, overrides: Sequence[str]) -> tuple[Origin | None, str]:
    """Splits one line of a ConfigError with several problems into its origin and its message."""
    for override in overrides:
        if line.startswith(f"override {override}: "):
            return Origin(f"override {override}", 0), line.removeprefix(f"override {override}: ")
    found = _LOCATED.fullmatch(line)
    return (Origin(found["file"], int(found["line"])), found["message"]) if found else (None, line)


def check_components(case: Case) -> int:
    """Finds the class of every component and checks its arguments; returns the number of components."""
    config = case.config
    for number, module in enumerate(config.imports):
        try:
            registry.import_modules([module], project_dir=config.project_dir)
        except Exception as error:
            case.note(error, label=f"imports.{number}")
    try:
        registry.reject_ambiguous(config.groups, project_dir=config.project_dir)
    except Exception as error:
        case.note(error, label="configs")
    components = [(label, kind, each.type, each.arguments) for label, kind, each in components_of(config)]
    for label, kind, name, arguments in [*components, ("trainer", "trainer", config.trainer.type, None)]:
        where = config.origin(f"{label}.type")
        try:
            target = registry.find(kind, name, project_dir=config.project_dir, where=where, label=label)
        except Exception as error:
            case.note(error, label=label)
            continue
        case.users.include(target)
        if arguments is not None:  # the keys of the trainer section are checked with the config
            _check_arguments(target, kind, label, arguments, case)
    if case.findings.count("error"):  # otherwise the build reports it, and continues with a valid batch
        try:
            resolve_batch(config, 1)
        except ConfigError as error:
            case.note(error, label="trainer")
    return len(components) + 1


def _check_arguments(
    target: Callable[..., Any], kind: str, label: str, arguments: Mapping[str, Any], case: Case
) -> None:
    """Reports each argument that the class does not accept at its own line, and missing ones at the component's
    line."""
    signature = parameters_of(target)
    is_shipped = isinstance(target, type) and issubclass(target, Model)
    if signature is None or (kind == "model" and isinstance(target, type) and is_transformers_class(target)):
        return  # only the build can check it
    parameters = [one for one in signature.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    by_kind = {"optimizer": ["params"], "writer": ["folder"], "sampler": ["dataset", "data_source", "batch_size"]}
    provided = [*by_kind.get(kind, []), "project_dir"]
    if kind == "reward" and is_called_later(target, REWARD_ARGUMENTS):
        provided += [one.name for one in parameters]
    reserved = case.config.model.reserved if kind == "model" and case.config.model is not None else {}
    if kind == "model" and ("preset" in arguments or "pretrained" in reserved):
        provided += [one.name for one in parameters]  # the preset or the pretrained folder has the others
    by_build = {"optimizer": ["groups"], "metric": ["outputs", "labels"], "benchmark": [*BENCHMARK_SETTINGS]}
    read_by_builder = by_build.get(kind, [])
    if kind == "model" and is_shipped:
        read_by_builder = ["preset"]
    if kind == "schedule" and accepts_optimizer(target):
        provided += ["optimizer", *missing_lengths(target, arguments, length=0)]
        read_by_builder = [name for name in ("step_on", "metric") if name not in signature]
    # With a placeholder for each required argument, an error concerns only one wrong argument.
    required = {one.name: None for one in parameters if one.default is one.empty and one.name not in provided}
    accepted: dict[str, Any] = {}
    given = {name: value for name, value in arguments.items() if name not in read_by_builder}
    attempts = [({**required, name: value}, name, f"{label}.{name}") for name, value in given.items()]
    for checked, name, setting in [*attempts, (accepted, None, label)]:
        where = case.config.origin(setting)
        try:
            registry.check_arguments(target, checked, label=label, where=where, provided=provided)
        except ConfigError as error:
            case.note(error, label=label)
        else:
            accepted |= {} if name is None else {name: given[name]}


# the first batch


def check_batch(
    dataset: Any, collator: Callable[[list[Any]], Any], *, label: str, batch_size: int, is_split: bool, case: Case
) -> bool:
    """Fetches and collates the first samples; returns True on success.

    With `is_split`, the run splits a batch into micro-batches, which is not possible for a list.
    """
    if isinstance(dataset, (TrainData, EvalData, StreamData, EvalStream)):
        dataset = dataset.dataset
    source = dataset
    while hasattr(source, "dataset"):  # below a part of data.split or a Subset
        source = source.dataset
    reads = "__iter__" if is_stream(source) else "__getitem__"
    at_sample = line_of_return(getattr(type(source), reads, type(source)), case.users)
    try:
        samples = _first_samples(dataset, batch_size, label)
    except Exception as error:
        case.note(error, label=label, location=at_sample)
        return False
    at_sample = at_sample or case.setting(label)
    try:
        batch = plain_mappings(collator(samples))
    except Exception as error:
        difference = _first_difference(samples)
        if difference is None or line_of_traceback(error, case.users) is not None:
            case.note(error, label="data.collator", location=at_sample)
        if difference is not None:
            advice = "Make them equal, or write a collator that pads them (data.collator)."
            case.add("error", f"{label}: {difference}", advice, at_sample)
        return False
    return _check_lists(batch, collator, is_split=is_split, case=case)


def _first_samples(dataset: Any, number: int, label: str) -> list[Any]:
    if not is_stream(dataset):
        return fetch(dataset, list(range(min(number, count_samples(dataset, label)))))
    samples = list(islice(iter(dataset), number))
    if not samples:
        raise DataError(f"{label}: {type(dataset).__name__} is empty. Check its path or filter.")
    return samples


def _first_difference(samples: list[Any]) -> str | None:
    """Describes the first field in which two samples differ; None if all have the same fields and shapes."""
    first = _fields(samples[0])
    for number, sample in enumerate(map(_fields, samples[1:]), start=1):
        if sample.keys() != first.keys():
            both = f"sample 0 has {', '.join(first)}, sample {number} has {', '.join(sample)}"
            return f"the samples have unequal fields: {both}."
        for name, value in first.items():
            if _shape(value) != _shape(sample[name]):
                shapes = f"{_shape(value)} in sample 0 and {_shape(sample[name])} in sample {number}"
                return f'the samples have unequal shapes: field "{name}" is {shapes}.'
    return None


def _fields(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    values = sample if isinstance(sample, (tuple, list)) else [sample]
    return {str(number): value for number, value in enumerate(values)}


def _shape(value: Any) -> str:
    if hasattr(value, "shape"):
        return str(tuple(value.shape))
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _check_lists(batch: Any, collator: Callable[[list[Any]], Any], *, is_split: bool, case: Case) -> bool:
    """Reports lists of numbers, and lists of tensors that a run would have to split; lists of texts are allowed."""
    fields = batch.items() if isinstance(batch, Mapping) else ()
    lists = {name: value for name, value in fields if isinstance(value, (list, tuple))}
    numbers = [name for name, value in lists.items() if _has_only_numbers(value)]
    tensors = [name for name, value in lists.items() if any(isinstance(each, torch.Tensor) for each in value)]
    own = collator.collator if isinstance(collator, NamedFields) else collator
    function: Any = own if hasattr(own, "__code__") else type(own).__call__
    location = line_of_return(function, case.users) or case.setting("data.collator", ["collator"])
    if numbers:
        problem = f"the collator returns lists of numbers instead of tensors for {_quoted(numbers)}."
        case.add("error", problem, f'Return torch.tensor(…): {{"{numbers[0]}": torch.tensor([…]), …}}.', location)
    if tensors:
        problem = (
            f"the collator returns lists of tensors for {_quoted(tensors)}, which are not split into micro-batches."
        )
        advice = "Return one tensor, torch.stack([…]), or give the collator a method `split(batch, n)`."
        severity: Severity = "error" if is_split and not hasattr(collator, "split") else "remark"
        case.add(severity, problem, advice, location)
    return not numbers


def _has_only_numbers(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return bool(values) and all(map(_has_only_numbers, values))
    return isinstance(values, Number)


def _quoted(names: list[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# the forward and the loss


def loss_function(trainer: Trainer, case: Case) -> Callable[..., Any]:
    """Returns the function that returns the loss: the forward of the trainer, the task or the model in user code."""
    candidates: list[Callable[..., Any]] = [type(each).forward for each in (trainer, trainer.task, trainer.model)]
    return next((each for each in candidates if case.users.code_of(each)), candidates[-1])


def location_of_loss(trainer: Trainer, case: Case) -> SourceLocation | None:
    """Returns the line that returns the loss, or that of the model in the config."""
    return line_of_return(loss_function(trainer, case), case.users) or case.setting("model.type", ["model"])


def check_signature(trainer: Trainer, batch: Any, case: Case) -> None:
    """Compares the batch's keys with the parameters of the forward that receives them."""
    if not isinstance(batch, Mapping):
        return
    keys = [str(key) for key in batch]
    if overrides(trainer, "forward", Trainer):
        _compare(trainer.forward, type(trainer).__name__, keys, case)
    # Built-in trainers with options select the arguments of the model.
    passes_batch = case.users.code_of(type(trainer).forward) is None and type(trainer).options_section is None
    if passes_batch and not overrides(trainer.task, "forward", Task):
        # The default task passes labels only to a model that accepts them; otherwise its criterion receives them.
        accepts_labels = accepts_argument(type(trainer.model).forward, "labels")
        given = [key for key in keys if key != "labels" or accepts_labels]
        _compare(trainer.model.forward, type(trainer.model).__name__, given, case)


def _compare(forward: Callable[..., Any], owner: str, keys: list[str], case: Case) -> None:
    signature = parameters_of(forward)
    if signature is None:
        return
    parameters = signature.values()
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    names = [one.name for one in named]
    lacking = [one.name for one in named if one.default is one.empty and one.name not in keys]
    accepts_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    extra = [] if accepts_any else [key for key in keys if key not in names]
    if not lacking and not extra:
        return
    problems = [f"{owner}.forward requires {_quoted(lacking)}, which the batch lacks"] if lacking else []
    problems += [f"the batch has {_quoted(extra)}, which {owner}.forward does not accept"] if extra else []
    if lacking and extra:
        advice = "Use the same names in both: rename the parameter, or the field in the dataset or collator."
    elif lacking:
        advice = f"Return {_quoted(lacking)} from the dataset or collator, or give the parameter a default."
    else:
        advice = f"Add a parameter {_quoted(extra)} (or **rest) to forward, or drop it in the dataset or collator."
        advice += "" if "labels" in keys else " The target of trainer.loss is the field labels."
    both = f"The batch has {', '.join(keys) or 'nothing'}; forward accepts {', '.join(names) or 'nothing'}."
    location = line_of_function(forward, case.users, lacking) or case.setting("model.type", ["model"])
    case.add("error", f"{', and '.join(problems)}.", f"{both} {advice}", location)
    raise AlreadyReported


class IdCheck:
    """Checks labels and token ids before a loss or an embedding uses them; HostSyncMode calls it."""

    def __init__(self, trainer: Trainer, case: Case) -> None:
        self._names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        self._trainer = trainer
        self._case = case

    def __call__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], location: SourceLocation | None
    ) -> None:
        """Adds a finding for ids that are out of range and ends the stage; accepts other calls."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if len(tensors) < 2:
            return
        location = location or self._case.setting("model.type", ["model"])
        if name == "embedding":
            # The arguments of F.embedding are (ids, weight), those of torch.embedding (weight, ids).
            ids, weight = sorted(tensors[:2], key=lambda each: each.is_floating_point())
            self._check_tokens(ids, weight, location)
        elif not tensors[1].is_floating_point() and tensors[0].ndim:  # floats are probabilities
            self._check_labels(tensors[0], tensors[1], kwargs.get("ignore_index", IGNORED_LABEL), location)

    @property
    def _set(self) -> str:
        name = self._trainer.eval_name
        if name is None:
            return "data.train"
        return f"data.eval.{name}" if name in self._trainer.eval_data else f"data.{name}"

    def _check_tokens(self, ids: torch.Tensor, weight: torch.Tensor, location: SourceLocation | None) -> None:
        name = self._names.get(id(weight), "its weight").removesuffix(".weight")
        has = f"the embedding {name} has num_embeddings = {weight.shape[0]}"
        advice = "Use num_embeddings ≥ {} (the size of the vocabulary), or another tokenizer."
        if ids.numel() and int(ids.min()) < 0:
            advice = "Ids must not be negative: -100 is for labels, not for inputs."
        self._check_range("token ids", "ids", ids, weight.shape[0], has, advice, location)

    def _check_labels(
        self, logits: torch.Tensor, labels: torch.Tensor, ignored: int, location: SourceLocation | None
    ) -> None:
        classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
        has = f"the logits have {classes} classes (shape {tuple(logits.shape)})"
        advice = f"Give the model {{}} outputs, or number the labels from 0; {ignored} marks labels to ignore."
        self._check_range("labels", "labels", labels[labels != ignored], classes, has, advice, location)

    def _check_range(
        self,
        what: str,
        short: str,
        ids: torch.Tensor,
        size: int,
        has: str,
        advice: str,
        location: SourceLocation | None,
    ) -> None:
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, -1)
        if low < 0 or high >= size:
            problem = (
                f"the {what} of {self._set} range from {low} to {high}, but {has}: {short} must be in 0 … {size - 1}."
            )
            self._case.add("error", problem, advice.format(high + 1), location)
            raise AlreadyReported


def check_ownership(trainer: Trainer, case: Case) -> None:
    """Reports parameters that require a gradient and that no optimizer updates."""
    groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
    owned = {id(parameter) for group in groups for parameter in group["params"]}
    left = [name for name, one in trainer.model.named_parameters() if one.requires_grad and id(one) not in owned]
    if left:
        user_class: Any = type(trainer).__mro__[1]  # below the class of the trial
        location = line_of_function(user_class.build_optimizers, case.users) or case.setting("trainer.optimizer")
        advice = "Pass them to an optimizer, or freeze them (model.freeze, requires_grad_(False))."
        case.add("remark", f"no optimizer owns {_listed(left)}: these parameters are never updated.", advice, location)


def check_gradients(trainer: Trainer, missing: list[str], case: Case) -> None:
    """Reports the parameters that had no gradient after the step."""
    if missing:
        root = missing[0].partition(".")[0]
        location = line_of_attribute(type(trainer.model), root, case.users) or case.setting("model.type", ["model"])
        advice = "Use them in forward, or freeze or remove them; parameters that only some steps use are allowed."
        case.add("remark", f"no gradient reached {_listed(missing)} in the first step.", advice, location)


def without_gradient(model: torch.nn.Module) -> list[str]:
    """Returns the trainable parameters that have no gradient; none if the step has cleared all of them."""
    trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
    missing = [name for name, one in trainable.items() if one.grad is None]
    return [] if len(missing) == len(trainable) else missing


# one batch, whole and in two micro-batches


_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def check_split(trainer: Trainer, batch: Batch, case: Case) -> bool:
    """Reports a loss or gradient that changes when a batch is split in two; returns False if it cannot be compared.

    Dropout is disabled, and normalization over a batch is enabled, as in training. For a forward that draws random
    numbers, only a loss that is a sum over samples is reported; a custom step cannot be compared.
    """
    collator = trainer.train_data.collator if trainer.train_data is not None else None
    if batch.num_samples < 2 or collator is None or overrides(trainer, "train_step", Trainer):
        return False
    model = trainer.model
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        model.eval()
        normalizing = [each for each in modes if isinstance(each, _BATCH_NORMS)]
        for each in normalizing:
            each.train(modes[each])
        with torch.random.fork_rng(devices=[]), trainer.storage.isolated():
            whole, again = (_loss_and_gradient(trainer, [batch], seed=seed) for seed in range(2))
            split = _loss_and_gradient(trainer, list(split_batch(batch, 2, collator)), seed=2)
    except Exception:
        return False  # the previous stages have reported failures of the run itself
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for module, mode in modes.items():
            module.training = mode
    tolerance = 1e-3 if trainer.config.runtime.precision == "fp32" else 0.05
    is_random = _distance(whole, again) > tolerance
    is_sum = bool(abs(split[0] / whole[0] - 0.5) < 0.1 and abs(again[0] / whole[0] - 1) < 0.1)
    if is_random and not is_sum:
        return False
    difference = _distance(whole[:1], split[:1]) if is_random else _distance(whole, split)
    if difference > tolerance:
        if is_sum:
            reason = "It seems to be a sum over samples: divide it by their number, or return Mean(total, count)"
        elif normalizing:
            kind = type(normalizing[0]).__name__
            reason = f"{kind} normalizes over the samples of a micro-batch. GroupNorm and LayerNorm do not"
        else:
            reason = (
                "The loss may be a mean over another number of elements in each micro-batch (return Mean(total, "
                "count)), or compare the samples of a batch with each other, as with in-batch negatives"
            )
        problem = (
            f"the loss or its gradient changes by {difference:.2g} of its size when a batch is split into two "
            "micro-batches, so the run depends on the micro-batch size and the number of ranks."
        )
        case.add("remark", problem, f"{reason}.", location_of_loss(trainer, case))
    return not is_random


def _loss_and_gradient(trainer: Trainer, micro_batches: Sequence[Batch], *, seed: int) -> torch.Tensor:
    """Returns the loss of the batch, weighted as in an update, and its gradient, as one vector."""
    parameters = [each for each in trainer.model.parameters() if each.requires_grad]
    sums = [torch.zeros(1, dtype=torch.float64), *(torch.zeros_like(each, dtype=torch.float64) for each in parameters)]
    count = 0.0
    torch.manual_seed(seed)
    for micro_batch in micro_batches:
        trainer.set_batch(micro_batch.value, micro_batch.num_samples)
        mean = type(trainer).run_forward(trainer, micro_batch.value).mean
        mean = mean if isinstance(mean, Mean) else Mean(mean * micro_batch.num_samples, micro_batch.num_samples)
        total = torch.as_tensor(mean.total)
        for each, share in zip(sums[1:], torch.autograd.grad(total, parameters, allow_unused=True), strict=True):
            each += 0.0 if share is None else share
        sums[0] += total.detach()
        count += float(mean.count)
    return torch.cat([each.flatten() for each in sums]) / max(count, 1.0)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the larger of the relative differences of the loss, the first number, and of the gradient."""
    parts = ((one[:1], other[:1]), (one[1:], other[1:]))
    return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in parts if a.numel())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


# attention


class MaskCheck:
    """Finds attention masks that change nothing; HostSyncMode calls it for each call of attention.

    A mask of all pairs of tokens costs memory and time, and excludes the fastest kernels.
    """

    def __init__(self, trainer: Trainer, case: Case) -> None:
        self._trainer = trainer
        self._case = case
        self.num_unmasked = 0
        """The number of calls without a mask, or with `is_causal`."""
        self.num_masked = 0

    def __call__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], location: SourceLocation | None
    ) -> None:
        """Adds a finding for a mask that is only causal, or that masks nothing."""
        is_module = name == "multi_head_attention_forward"
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 and not is_module else None)
        if not isinstance(mask, torch.Tensor) or kwargs.get("is_causal"):
            self.num_unmasked += 1
            return
        self.num_masked += 1
        if location is None or is_transformers_class(type(self._trainer.model)):
            return  # trainwright's own attention, or that of transformers, whose masks are checked when compiled
        pattern = _pattern_of(mask)
        if pattern is None:
            return
        instead = "attention(queries, keys, values) of trainwright.models.layers.attention"
        if pattern == "all":
            problem = f"attention receives a mask {list(mask.shape)} that hides nothing: this batch has no padding."
            advice = f"Pass attn_mask only for batches with padding, or use {instead} with is_causal=False."
        else:
            problem = f"attention receives a causal mask {list(mask.shape)} of all pairs of tokens."
            advice = f"Pass is_causal=True instead of attn_mask, or use {instead}, which selects the fastest kernel."
            if is_module:
                advice = f"Pass is_causal=True and need_weights=False as well, or use {instead}."
        self._case.add("remark", problem, advice, location)

    def check_setting(self) -> None:
        """Adds a finding if the config selects the attention of transformers that computes all pairs of tokens."""
        section, model = self._case.config.model, self._trainer.model
        given = None if section is None else section.get("attn_implementation")
        if given == "eager" and is_transformers_class(type(model)):
            problem = "attn_implementation: eager holds a mask and the weights of all pairs of tokens in memory."
            advice = "Remove it, unless the attention weights are read: the default uses the fastest kernel."
            self._case.add("remark", problem, advice, self._case.setting("model.attn_implementation"))

    def check_graph(self, num_masked: int) -> None:
        """Adds a finding if compiled code has `num_masked` masks and eager code has none."""
        section = self._case.config.model
        if not num_masked or self.num_masked or not self.num_unmasked or section is None:
            return
        problem = "the compiled model creates a causal mask of all pairs of tokens for rows without padding."
        advice, label = "Pass is_causal=True to attention if a batch has no padding.", "model.type"
        if is_transformers_class(type(self._trainer.model)):
            found = next((name for name in ("kernels", "attn_implementation") if name in section), None)
            if found is not None:
                advice, label = f"Remove {found}: the default needs no mask for such rows.", f"model.{found}"
        self._case.add("remark", problem, advice, self._case.setting(label))


def _pattern_of(mask: torch.Tensor) -> str | None:
    """Returns "causal" or "all" for a redundant mask [..., queries, keys]; None for any other."""
    if mask.dim() < 2 or mask.shape[-1] < 2:
        return None
    if mask.dtype == torch.bool:
        visible = mask
    elif mask.is_floating_point() and not mask.requires_grad:
        visible = mask == 0
        if not (mask[~visible] <= -1e4).all():
            return None  # a bias that is added to the scores
    else:
        return None
    if visible.all():
        return "all"
    if visible.shape[-1] != visible.shape[-2]:
        return None
    return "causal" if torch.equal(visible, torch.ones_like(visible).tril()) else None


# graph safety


def check_trace(
    forward: Callable[[], Any], *, severity: Severity, reported: Sequence[str], masks: MaskCheck | None, case: Case
) -> None:
    """Reports each graph break of a call; `reported` are the lines that already have findings.

    `masks` also reports masks that only compiled code creates.
    """
    fallback = case.setting("model.type", ["model"])
    compilations = Compilations(case.users)
    num_masked = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_masked
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
                num_masked += mask is not None
        return graph.forward

    torch.compiler.reset()
    try:
        # The output of user code was already shown in the eager pass.
        with listening(compilations), contextlib.redirect_stdout(io.StringIO()):
            torch.compile(forward, backend=backend)()
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        problem = f"torch.compile cannot trace this forward: {first}."
        case.add("remark", problem, "The eager mode is not affected.", fallback)
        return
    finally:
        with contextlib.suppress(Exception):
            torch.compiler.reset()
    if masks is not None:
        masks.check_graph(num_masked)
    for each in compilations.breaks.values():
        problem = f"a compiled graph breaks here: {each.reason}"
        file, _, line = each.location.rpartition(":")
        if str(Path(file).absolute()) not in case.users:
            case.add("remark", problem, each.advice, fallback)
        elif each.location not in reported:
            location = SourceLocation(file, int(line), source_line(file, int(line)))
            case.add(severity, problem, each.advice, location)


def _sync_finding(sighting: Sighting, severity: Severity, mode: str) -> Finding:
    use = sighting.use
    if not sighting.is_direct:
        # Library code may behave differently when it is compiled: check_trace decides.
        problem = f"library code called here breaks a compiled graph: {use.what}."
        return Finding("remark", problem, use.fix, sighting.location)
    effect = f"runtime.mode {mode} cannot capture this" if mode in _GRAPH_MODES else "this would break a compiled graph"
    return Finding(severity, f"{effect}: {use.what}.", use.fix, sighting.location)


# the trial

LABELS: Mapping[str, str] = {
    "task": "task",
    "model": "model",
    "collator": "data.collator",
    "train_data": "data.train",
    "sampler": "data.sampler",
    "eval_data": "data.eval",
    "optimizers": "trainer.optimizer",
    "hooks": "hooks",
}
"""The parts that the `build_*` methods of a Trainer build, in their order, and the setting of each."""

_NEEDS: Mapping[str, str] = {
    "model": "task",
    "train_data": "task",
    "sampler": "train_data",
    "eval_data": "task",
    "optimizers": "model",
}
_MAX_SAMPLES = 4  # of a micro-batch whose size depends on the memory of the run's device
_MAX_MICRO_BATCHES = 2  # sufficient to check that a batch can be split; a whole update may take hours on a CPU


@dataclass
class Assembly:
    """The parts that could be built: the whole trainer, or some of its parts."""

    config: RunConfig
    """The trial's config."""
    plan: BatchPlan | None
    """The batch arithmetic of the real run."""
    trainer: Trainer | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    build: Build | None = None
    building: str | None = None
    """The part that is being built, or whose build has failed."""
    unreadable: DataError | None = None
    """Raised outside of the builds of parts, for example when samples are counted; the check of a first batch names the
    set."""


def assemble(case: Case, folder: Path) -> Assembly:
    """Builds the trial and reports all failures."""
    plan, makes_batches = None, False
    try:
        check_mode(case.config, {})
    except ConfigError as error:
        case.note(error, label="runtime.mode")
    try:
        makes_batches = may_make_batches(Build(case.config).trainer_class(), case.config)
        plan = resolve_batch(case.config, known_data_ranks(case.config), makes_batches=makes_batches)
    except Exception as error:
        case.note(error, label="trainer.global_batch_size")
    trial = _trial_config(case.config, plan, folder, makes_batches=makes_batches)
    assembly = _attempt(Assembly(trial, plan), case)
    num_samples, batch_size = _count(assembly.parts.get("train_data")), assembly.config.trainer.global_batch_size or 0
    if assembly.trainer is None and 0 < num_samples < batch_size:
        # With a smaller batch the other stages can run.
        if assembly.unreadable is not None:
            case.note(assembly.unreadable, label="trainer.global_batch_size")
        smaller = {"trainer.global_batch_size": num_samples, "trainer.micro_batch_size": num_samples}
        assembly = _attempt(Assembly(assembly.config.derive(smaller), plan), case)
    return assembly


def _count(data: Any) -> int:
    """Returns the number of samples; 0 if it is unknown or the files cannot be read."""
    try:
        return len(data) if hasattr(data, "__len__") else 0
    except Exception:  # also from a custom class; the check of the first batch reports it
        return 0


def _attempt(assembly: Assembly, case: Case) -> Assembly:
    try:
        trainer_class = Build(assembly.config).trainer_class()
        assembly.trainer = build_trainer(assembly.config, _recording(trainer_class, assembly))
    except Exception as error:
        failed = assembly.building
        if failed is None and isinstance(error, DataError):
            assembly.unreadable = error
        else:
            case.note(error, label=LABELS[failed] if failed else "trainer.type")
        if assembly.build is not None:
            _build_rest(assembly, assembly.build, trainer_class, case)
    return assembly


def _has_automatic_size(config: RunConfig) -> bool:
    return config.trainer.micro_batch_size == "auto"


def _trial_config(config: RunConfig, plan: BatchPlan | None, folder: Path, *, makes_batches: bool) -> RunConfig:
    given = config.trainer.micro_batch_size
    micro, micro_batches = given if isinstance(given, int) else 1, 1
    if plan is not None:
        micro, micro_batches = plan.micro_batch_size, min(plan.gradient_accumulation_steps, _MAX_MICRO_BATCHES)
    if plan is not None and _has_automatic_size(config):
        micro_batches = min(micro, _MAX_MICRO_BATCHES)
        micro = min(micro // micro_batches, _MAX_SAMPLES)
    if plan is not None and config.data.sampler is not None:  # a batch sampler makes batches of the run's size
        micro_batches = plan.global_batch_size // micro
    if plan is not None and makes_batches:  # the trainer decides how many samples a batch has
        micro, micro_batches = plan.micro_batch_size, plan.gradient_accumulation_steps
    sizes = {
        "trainer.global_batch_size": micro * micro_batches,
        "trainer.micro_batch_size": micro,
        "trainer.gradient_accumulation_steps": None,
    }
    is_automatic = config.runtime.precision == "auto"
    return config.derive(
        {
            "output_dir": str(folder),
            "runtime.device": "cpu",
            **EAGER,
            "runtime.mesh": {},
            **({"runtime.precision": expected_precision(config.runtime.device)} if is_automatic else {}),
            **({} if plan is not None and plan.varies else sizes),
            "data.num_workers": 0,
            "data.loader": {},
            "evaluation.max_batches": 1,
            "checkpoint.contents": "full",  # the trial resumes from its own
            "writers": [],
        }
    )


def _recording(trainer_class: type[Trainer], assembly: Assembly) -> type[Trainer]:
    """Returns a subclass of the trainer whose `build_*` methods record what they build, and that has no writers."""

    def recorded(part: str) -> Any:
        def build_part(cls: type[Trainer], build: Any, *arguments: Any) -> Any:
            assembly.build, assembly.building = build, part
            inherited: Callable[..., Any] = getattr(super(trial, cls), f"build_{part}")
            assembly.parts[part] = inherited(build, *arguments)
            assembly.building = None
            return assembly.parts[part]

        return classmethod(build_part)

    body: dict[str, Any] = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {f"build_{part}": recorded(part) for part in LABELS}
    body["build_writers"] = classmethod(lambda cls, build: build.writers())  # of the trial's config: none
    trial = cast(type[Trainer], type(trainer_class.__name__, (trainer_class,), body))
    return trial


def _build_rest(assembly: Assembly, build: Build, trainer_class: type[Trainer], case: Case) -> None:
    """Builds the remaining parts, except those that need a part that failed."""
    parts = assembly.parts
    if "task" in parts:
        build.take_task(parts["task"])
    for part, label in LABELS.items():
        if part in (*parts, assembly.building) or _NEEDS.get(part, part) not in (part, *parts):
            continue
        arguments = [parts[_NEEDS[part]]] if part in ("optimizers", "sampler") else []
        try:
            parts[part] = getattr(trainer_class, f"build_{part}")(build, *arguments)
        except Exception as error:
            case.note(error, label=label)


def run_stages(case: Case, folder: Path, report: Report) -> None:
    """Builds the run in `folder` and runs every stage that can run."""
    assembly = assemble(case, folder)
    unusable = _check_data(assembly, case)
    unreadable = assembly.unreadable
    if unreadable is not None and not any(unreadable.problem.startswith(each.problem) for each in case.findings):
        case.note(unreadable, label="data.train")
    trainer = assembly.trainer
    if trainer is None:
        report.skipped += STAGES[2:]
        return
    _add_facts(trainer, assembly, case, report)
    check_ownership(trainer, case)
    trial = Trial(trainer, case, report)
    if "train" in unusable:
        report.skipped += ["a training step", "graph safety"]
    else:
        trial.train()
    trial.split()
    trial.evaluate(without=unusable)
    trial.save_and_restore()
    trial.check_graph_safety()
    trial.resume()


def _check_data(assembly: Assembly, case: Case) -> set[str]:
    """Checks the first batch of every set; returns the names of those that cannot be used."""
    parts, plan = assembly.parts, assembly.plan
    makes_batches = assembly.trainer is not None and isinstance(assembly.trainer.train_data, MadeBatches)
    if parts.get("collator") is None or (parts.get("train_data") is None and not makes_batches):
        return {"train"}
    is_split = plan is not None and (plan.gradient_accumulation_steps > 1 or _has_automatic_size(case.config))
    batch_size = assembly.config.trainer.global_batch_size or 1
    collator = parts["collator"]
    if assembly.trainer is not None and assembly.trainer.train_data is not None:
        collator = assembly.trainer.train_data.collator  # with the names of data.fields
    check = partial(check_batch, collator=collator, batch_size=batch_size, case=case)
    is_usable = makes_batches or check(parts["train_data"], label="data.train", is_split=is_split)
    unusable = set() if is_usable else {"train"}
    sets = (parts.get("eval_data") or {}).items()
    return unusable | {name for name, each in sets if not check(each, label=f"data.eval.{name}", is_split=False)}


def _add_facts(trainer: Trainer, assembly: Assembly, case: Case, report: Report) -> None:
    """Adds the sizes of the run to the report, and reports a batch that is larger than the data."""
    plan, data = assembly.plan, trainer.train_data
    assert data is not None
    total = count_weights(trainer.model)
    trained = sum(each.numel() for each in trainer.model.parameters() if each.requires_grad)
    trains = "" if trained == total else f", {trained:,} of them trained"
    sets = [f"{name} {describe_size(each).removesuffix(' samples')}" for name, each in sets_of(trainer).items()]
    report.facts.append(f"{type(trainer.model).__name__} with {total:,} parameters{trains}")
    report.facts.append(", ".join([describe_size(data), *sets]))
    if plan is None:
        return
    if plan.varies:
        report.facts.append(f"{case.config.trainer.max_steps or 0:,} steps of as many samples as it returns")
        return
    batch_size, ranks = plan.global_batch_size, known_data_ranks(case.config)
    factors = [f"micro-batch {plan.micro_batch_size}", *([f"{ranks} ranks"] if ranks > 1 else [])]
    factors.append(f"gradient_accumulation_steps {plan.gradient_accumulation_steps}")
    if _has_automatic_size(case.config):
        factors[0] = f"micro-batch of at most {plan.micro_batch_size}, as the memory allows"
        factors.pop()
    _, samples = limits(case.config, data)
    by_samples = None if samples is None else math.ceil(samples / batch_size)
    if isinstance(data, TrainData) and samples is not None and data.global_batch_size == batch_size:
        by_samples = data.count_batches(samples)  # exact for epochs that end with a short batch
    steps = min(each for each in (case.config.trainer.max_steps, by_samples) if each is not None)
    report.facts.append(f"{steps:,} steps of {batch_size} samples ({' × '.join(factors)})")
    if isinstance(data, TrainData) and batch_size > len(data):  # the batch of the trial may be smaller
        problem = f"trainer.global_batch_size: {batch_size} is more than the {len(data)} samples of data.train, so"
        error = DataError(f"{problem} one batch would contain samples twice. Use at most {len(data)}.")
        case.note(error, label="trainer.global_batch_size")


class Trial:
    """Runs the stages on one trainer, whose methods are wrapped on the object.

    Not in a subclass, because the loop determines overridden methods by the class.
    """

    def __init__(self, trainer: Trainer, case: Case, report: Report) -> None:
        self.trainer = trainer
        self.case = case
        self.report = report
        self.phase = "step"
        """The phase of the loop, to find the setting of an error without a line."""
        self.first_batch: Any = None
        self.step_batch: Batch | None = None
        self.model_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.missing_gradients: list[str] = []
        self.has_stepped = False
        self.can_save = True
        self.is_restored = False
        """True if the checkpoint was read back bit-equal."""
        self.repeated_loss: float | None = None
        """The loss of the step that is being repeated after the checkpoint; None before that."""
        self.is_repeating = False
        ids, self.masks = IdCheck(trainer, case), MaskCheck(trainer, case)

        def on_values(name: str, *call: Any) -> None:
            (self.masks if "attention" in name else ids)(name, *call)

        self.watch = HostSyncMode(case.users, on_values=on_values)
        self.eval_watch = HostSyncMode(case.users, in_forward_only=True, on_values=ids)
        for name in ("next_train_inputs", "run_forward", "train_step", "eval_step", "save"):
            setattr(trainer, name, partial(getattr(self, f"_{name}"), getattr(trainer, name)))
        self._model_hook = trainer.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)

    # the wrapped methods

    def _next_train_inputs(self, inner: Callable[..., Any], iterator: TrainIterator) -> Any:
        self.phase = "data"
        batch = inner(iterator)
        if iterator.fetched.value is None and not isinstance(self.trainer.train_data, MadeBatches):
            location = line_of_function(type(self.trainer).next_train_inputs, self.case.users)
            problem = "next_train_inputs made the first batch without next(iterator), so data.train is not read."
            self.case.add("remark", problem, "If no step reads it, set data.train: null.", location)
        return batch

    def _run_forward(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.first_batch = batch if self.first_batch is None else self.first_batch
        check_signature(self.trainer, batch, self.case)
        return inner(batch)

    def _train_step(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.phase, self.step_batch = "step", self.trainer.batch
        with watching(self.watch):
            result = inner(batch)
        self.phase, self.has_stepped = "after the step", True
        self.missing_gradients = without_gradient(self.trainer.model)
        # An interruption ends a repeated step without `after_train`, which has been called.
        (self.trainer.interrupt if self.is_repeating else self.trainer.stop)("the check needs one step")
        loss = self.repeated_loss = float(result[0])
        if not math.isfinite(loss):
            advice = "Look for log(0), a division by zero, sqrt at 0, an empty mean, or data that is not finite."
            self.case.add("error", f"the first loss is {loss}.", advice, location_of_loss(self.trainer, self.case))
        return result

    def _eval_step(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.phase = "evaluation"
        with watching(self.eval_watch):
            return inner(batch)

    def _save(self, inner: Callable[..., Any]) -> Any:
        if self.is_repeating:
            return None
        before, self.phase, self.can_save = self.phase, "checkpoint", False
        path = inner()
        self.phase, self.can_save = before, True
        return path

    def _record_inputs(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.model_inputs is None and torch.is_grad_enabled():  # not those of a generation, with its cache
            self.model_inputs = args, dict(kwargs)

    # the stages

    def train(self) -> None:
        """Runs the loop for one update, with its evaluation, hooks and checkpoint."""
        try:
            self.trainer.train()
        except (Exception, SystemExit) as error:
            self._note(error)
        if self.has_stepped:
            self.report.checked.append("a training step")
            check_gradients(self.trainer, self.missing_gradients, self.case)
        else:
            self.report.skipped += ["gradients", "the graph's trace"]

    def split(self) -> None:
        """Compares the batch of the step, processed whole and in two micro-batches."""
        if self.has_stepped and self.step_batch is not None:
            self._model_hook.remove()
            if check_split(self.trainer, self.step_batch, self.case):
                self.report.checked.append("a batch in two micro-batches")

    def evaluate(self, *, without: set[str]) -> None:
        """Evaluates the sets that the loop did not reach, one by one, so that a failure does not hide another."""
        trainer, sets = self.trainer, sets_of(self.trainer)
        done = {name.partition("/")[0] for name in trainer.eval_logs}
        logs: dict[str, float] = {}
        for name in [name for name in sets if name not in done | without]:
            self.phase = "evaluation"
            try:
                logs.update(_evaluate_without_hooks(trainer, {name: sets[name]}))
                done.add(name)
            except (Exception, SystemExit) as error:
                self._note(error, label=f"data.eval.{name}")
        if logs and set(trainer.eval_data) <= done and not trainer.eval_logs:
            try:
                trainer.best.update(trainer.step, logs)
            except Exception as error:
                self._note(error)
        if done:
            self.report.checked.append(f"evaluation of {', '.join(name for name in sets if name in done)}")

    def save_and_restore(self) -> None:
        """Saves a checkpoint if the loop did not, reads it, and compares every bit."""
        if not self.can_save:
            return  # the finding exists
        try:
            _save_once(self.trainer)
        except (Exception, SystemExit) as error:
            self.case.note(error, label="checkpoint")
            return
        location, problem = self.case.setting("trainer.optimizer"), ""
        try:
            different = _differences(self.trainer)
        except TrainwrightError as error:
            self.case.note(error, label="trainer.optimizer")
            return
        except Exception as error:
            location = line_of_traceback(error, self.case.users) or location
            problem = f"a checkpoint cannot be read back: {type(error).__name__}: {error}."
        else:
            problem = f"a checkpoint reads back different: {', '.join(different[:6])}." if different else ""
        if problem:
            advice = "Check state_dict and load_state_dict of the model and the optimizer: a resumed run would diverge."
            self.case.add("error", problem, advice, location)
        else:
            self.is_restored = True
            self.report.checked.append("a checkpoint, read back bit-equal")

    def resume(self) -> None:
        """Repeats the step after the checkpoint, and reports state that a resumed run would lack."""
        trainer, case = self.trainer, self.case
        saved = trainer.context.store.steps()[-1:]
        if not self.has_stepped or not self.is_restored or not saved or trainer.max_steps <= saved[0]:
            return
        trainer.skip_evaluation()
        self.is_repeating = True

        def step() -> RepeatedStep | None:
            self.repeated_loss = None
            trainer.reopen()
            trainer.train()
            return None if self.repeated_loss is None else outcome_of(trainer, self.repeated_loss)

        try:
            found = find_unsaved(trainer, case.users, step=step, checkpoint=saved[0])
        except (Exception, SystemExit) as error:
            self._note_failed_resume(error)
            return
        if found is None:
            return
        self.report.checked.append("a step after the checkpoint")
        for name, keys, location in found.unrestored:
            problem = f"{name}.load_state_dict does not restore {_quoted(keys)} of a checkpoint."
            case.add("error", problem, "After it, state_dict() must return what was saved.", location)
        differs = f" The same step after loading a checkpoint differs: {found.difference}." if found.difference else ""
        for each in found.unsaved:
            problem = f"{each.name} changes in a step, but no checkpoint contains it."
            case.add("remark", problem, f"If a later step needs it, {each.remedy}{differs}", each.location)
        if differs and not found.unsaved and not found.unrestored:
            problem = f"the same step after loading a checkpoint differs: {found.difference}."
            advice = (
                "A resumed run would differ too. Look for state that no state_dict contains: a variable of a closure, "
                "an environment, a file, the time, or a generator of random numbers."
            )
            case.add("remark", problem, advice, location_of_loss(trainer, case))

    def _note_failed_resume(self, error: BaseException) -> None:
        """Reports that a step after loading a checkpoint fails; a hook may fail because it was already closed."""
        link = error.__traceback__
        while link is not None:
            if isinstance(link.tb_frame.f_locals.get("self"), Hook):
                return
            link = link.tb_next
        location = line_of_traceback(error, self.case.users)
        if location is not None:
            problem = f"a step after loading a checkpoint raises {type(error).__name__}: {error}"
            self.case.add("remark", problem, "Check state_dict and load_state_dict.", location)

    def check_graph_safety(self) -> None:
        """Reports code that would break a compiled graph: an error if the run's mode needs a graph, otherwise a
        remark."""
        mode = self.case.config.runtime.mode
        severity: Severity = "error" if mode in _GRAPH_MODES else "remark"
        seen = {**self.eval_watch.sightings, **self.watch.sightings}.values()
        sightings = sorted(seen, key=lambda each: (each.location.file, each.location.line, each.location.columns or ()))
        for sighting in sightings:
            self.case.findings.add(_sync_finding(sighting, severity, mode))
        if not self.has_stepped or self.model_inputs is None:
            return
        self._model_hook.remove()
        args, kwargs = self.model_inputs
        forward = partial(self.trainer.model, *args, **kwargs)
        is_trainers = loss_function(self.trainer, self.case) is type(self.trainer).forward
        if is_trainers and isinstance(self.first_batch, Mapping):
            forward = partial(self.trainer.forward, **self.first_batch)
        reported = [str(each.location) for each in sightings if each.is_direct]
        self.masks.check_setting()
        masks = self.masks if mode in _GRAPH_MODES else None
        check_trace(forward, severity=severity, reported=reported, masks=masks, case=self.case)
        self.report.checked.append("graph safety")

    def _note(self, error: BaseException, *, label: str | None = None) -> None:
        labels = {"data": "data.train", "evaluation": "evaluation", "checkpoint": "checkpoint"}
        label = label or labels.get(self.phase, "trainer.type")
        in_forward = self.phase in ("step", "evaluation") and not isinstance(error, AlreadyReported)
        location = location_of_loss(self.trainer, self.case) if in_forward else None
        if isinstance(error, CriterionError):
            location = line_of_attribute(type(self.trainer.model), "criterion", self.case.users) or location
        self.case.note(error, label=label, location=location)


def _evaluate_without_hooks(trainer: Trainer, sets: Mapping[str, Any]) -> dict[str, float]:
    with trainer.storage:
        return trainer.evaluate_sets(sets, with_hooks=False)


def _save_once(trainer: Trainer) -> None:
    if not trainer.context.store.steps():
        type(trainer).save(trainer)  # the method of the class, because the instance has the observed one


def _differences(trainer: Trainer) -> list[str]:
    """Overwrites the weights and the optimizers' state, reads the newest checkpoint, and returns the differences."""
    before = _snapshot(trainer)
    with torch.no_grad():
        for value in trainer.model.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for optimizer in trainer.optimizers.values():
        optimizer.state.clear()
    trainer.restore_checkpoint(trainer.context.store.steps()[-1])
    after = _snapshot(trainer)
    return [name for name in {**before, **after} if not _is_same(before.get(name), after.get(name))]


def _snapshot(trainer: Trainer) -> dict[str, Any]:
    """Copies every value of the model and the optimizers, by name."""
    found: dict[str, Any] = {f"model {name}": value for name, value in trainer.model.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        found.update(_flatten(f"optimizer {name}", optimizer.state_dict()))
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (Mapping, list, tuple)):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _flatten(f"{name}.{key}", item)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    return bool(one == other) and type(one) is type(other)
