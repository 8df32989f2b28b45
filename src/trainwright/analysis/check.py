"""`trainwright check`: the config, its components, then one update, evaluation and checkpoint on copies.

Every problem is reported at once, with its line and what to write instead (findings.py).
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Number
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple, cast

import torch

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
from trainwright.backends.private_torch import compile_counters, explain_graph
from trainwright.build.components import Build
from trainwright.build.data import describe_size
from trainwright.build.run import build_trainer, sets_of
from trainwright.compile.host_sync import HostSyncMode, Sighting, watching
from trainwright.config import BatchPlan, Component, Origin, RunConfig, known_data_ranks, resolve_batch
from trainwright.data.fetch import count_samples, fetch, is_stream
from trainwright.data.loader import EvalData, TrainData
from trainwright.data.stream_loader import EvalStream, StreamData
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.checkpointing import restore_checkpoint
from trainwright.loop.evaluation import evaluate_sets
from trainwright.loop.hook import Hooks
from trainwright.loop.outputs import CriterionError
from trainwright.loop.task import Task, overrides
from trainwright.loop.trainer import Trainer
from trainwright.models.model import Model
from trainwright.models.transformers_models import is_transformers_class
from trainwright.registry import resolve as registry
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import (
    SourceLocation,
    UserFiles,
    line_of_attribute,
    line_of_function,
    line_of_return,
    line_of_traceback,
    parameters_of,
)

_LOCATED = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<words>.*)")


class Named(NamedTuple):
    """A component of the config: its kind, where it stands, and what the builder adds to its arguments."""

    kind: str
    label: str
    type: str
    arguments: Mapping[str, Any]
    provided: tuple[str, ...] = ()


def load_config(path: str | os.PathLike[str], overrides: Sequence[str], findings: Findings) -> RunConfig | None:
    """Returns the config, or None where it cannot be read; then each of its problems is a finding."""
    try:
        return RunConfig.load(path, overrides)
    except ConfigError as error:
        first, *others = error.problem.split("\n")
        where = error.where if isinstance(error.where, Origin) else None
        findings.add(message_finding(first, line_of_setting(where, marked_words(first))))
        for line in others:
            origin, words = _split_origin(line, overrides)
            findings.add(message_finding(words, line_of_setting(origin, marked_words(words))))
        return None


def check_components(case: Case) -> int:
    """Finds the class of every component and compares its arguments; returns how many components there are."""
    config = case.config
    for number, module in enumerate(config.imports):
        try:
            registry.import_modules([module], project_dir=config.project_dir)
        except Exception as error:
            case.note(error, label=f"imports.{number}")
    components = list(_components(config))
    for each in components:
        where = config.origin(f"{each.label}.type")
        try:
            target = registry.find(
                each.kind,
                each.type,
                project_dir=config.project_dir,
                where=where,
                label=each.label.removesuffix(".type"),
            )
        except Exception as error:
            case.note(error, label=each.label)
            continue
        case.users.include(target)
        if each.kind != "trainer":  # its section is no list of arguments: its keys were checked with the config
            _check_arguments(target, each, case)
    if case.findings.count("error"):  # else the build finds it, and goes on with a batch that fits
        try:
            resolve_batch(config, 1)
        except ConfigError as error:
            case.note(error, label="trainer")
    return len(components)


def _check_arguments(target: Callable[..., Any], named: Named, case: Case) -> None:
    """Notes each argument that the class does not take at its own line, and all that it lacks at the component's."""
    signature = parameters_of(target)
    if signature is None:
        return  # building it will tell
    parameters = signature.values()
    if named.kind == "model" and isinstance(target, type) and is_transformers_class(target):
        return  # it takes a config, whose keywords stand in the run file: building it will tell
    provided = (*named.provided, "project_dir")
    if named.kind == "model" and ("preset" in named.arguments or _is_pretrained(case.config)):
        provided = (*provided, *(one.name for one in parameters))  # what the run file leaves out is known from there
    # Stand-ins for what is needed, so that each wrong argument is told of by itself, with all parameters.
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = {one.name: None for one in by_name if one.default is one.empty and one.name not in provided}
    known = {}
    elsewhere = _read_elsewhere(named.kind, target)
    for name, value in named.arguments.items():
        if name in elsewhere:
            continue
        where = case.config.origin(f"{named.label}.{name}")
        arguments = {**needed, name: value}
        try:
            registry.check_arguments(target, arguments, label=named.label, where=where, provided=provided)
            known[name] = value
        except ConfigError as error:
            case.note(error, label=named.label)
    try:
        where = case.config.origin(named.label)
        registry.check_arguments(target, known, label=named.label, where=where, provided=provided)
    except ConfigError as error:
        case.note(error, label=named.label)


def _is_pretrained(config: RunConfig) -> bool:
    return config.model is not None and "pretrained" in config.model.reserved


def _read_elsewhere(kind: str, target: Callable[..., Any]) -> tuple[str, ...]:
    """Returns arguments that the builder reads, and that no constructor takes."""
    if kind == "optimizer":
        return ("groups",)
    is_ours = isinstance(target, type) and issubclass(target, Model)
    return ("preset",) if kind == "model" and is_ours else ()


def _components(config: RunConfig) -> Iterator[Named]:
    trainer, data = config.trainer, config.data
    if config.task is not None:
        yield _named("task", "task", config.task)
    if config.model is not None:
        yield _named("model", "model", config.model)
    if data.train is not None:
        yield _named("dataset", "data.train", data.train)
    for name, dataset in data.eval.items():
        yield _named("dataset", f"data.eval.{name}", dataset)
    if data.test is not None:
        yield _named("dataset", "data.test", data.test)
    yield _named("collator", "data.collator", data.collator)
    yield Named("trainer", "trainer", trainer.type, {})
    if trainer.optimizer is not None:
        yield _named("optimizer", "trainer.optimizer", trainer.optimizer, "params")
    if trainer.schedule is not None:
        yield _named("schedule", "trainer.schedule", trainer.schedule)
    for name, entry in trainer.optimizers.items():
        yield _named("optimizer", f"trainer.optimizers.{name}.optimizer", entry.optimizer, "params")
        if entry.schedule is not None:
            yield _named("schedule", f"trainer.optimizers.{name}.schedule", entry.schedule)
    for name, metric in config.evaluation.metrics.items():
        arguments = {key: value for key, value in metric.arguments.items() if key not in ("outputs", "labels")}
        yield Named("metric", f"evaluation.metrics.{name}", metric.type, arguments)
    for number, hook in enumerate(config.hooks):
        yield _named("hook", f"hooks.{number}", hook)
    for number, writer in enumerate(config.writers):
        yield _named("writer", f"writers.{number}", writer, "folder")


def _named(kind: str, label: str, component: Component, *provided: str) -> Named:
    return Named(kind, label, component.type, component.arguments, provided)


def _split_origin(line: str, overrides: Sequence[str]) -> tuple[Origin | None, str]:
    """Takes apart one line of a ConfigError that tells of several problems: where, and what."""
    for override in overrides:
        if line.startswith(f"override {override}: "):
            return Origin(f"override {override}", 0), line.removeprefix(f"override {override}: ")
    found = _LOCATED.fullmatch(line)
    return (Origin(found["file"], int(found["line"])), found["words"]) if found else (None, line)


def check_batch(
    dataset: Any, collator: Callable[[list[Any]], Any], *, label: str, batch_size: int, is_cut: bool, case: Case
) -> bool:
    """Fetches and collates the first samples; returns whether that went well.

    `is_cut` says that a batch is cut into micro-batches, which a list cannot be.
    """
    if isinstance(dataset, (TrainData, EvalData, StreamData, EvalStream)):
        dataset = dataset.dataset
    source = _source_of(dataset)
    reads = "__iter__" if is_stream(source) else "__getitem__"
    at_sample = line_of_return(getattr(type(source), reads, type(source)), case.users)
    try:
        samples = _first_samples(dataset, batch_size, label)
    except Exception as error:
        case.note(error, label=label, location=at_sample)
        return False
    at_sample = at_sample or case.setting(label)
    try:
        batch = collator(samples)
    except Exception as error:
        difference = _first_difference(samples)
        if difference is None or line_of_traceback(error, case.users) is not None:
            case.note(error, label="data.collator", location=at_sample)
        if difference is not None:
            advice = "Make them equal, or write a collator that pads them (data.collator)."
            case.add("error", f"{label}: {difference}", advice, at_sample)
        return False
    return _check_lists(batch, collator, is_cut=is_cut, case=case)


def _first_samples(dataset: Any, number: int, label: str) -> list[Any]:
    if not is_stream(dataset):
        return fetch(dataset, list(range(min(number, count_samples(dataset, label)))))
    samples = list(islice(iter(dataset), number))
    if not samples:
        raise DataError(f"{label}: {type(dataset).__name__} is empty. Check the path or filter that makes it.")
    return samples


def _source_of(dataset: Any) -> Any:
    """The user's dataset below a split's part or a Subset."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def _first_difference(samples: list[Any]) -> str | None:
    """Says in which field two samples differ, or None where all have the same fields and shapes."""
    first = samples[0]
    for number, sample in enumerate(samples[1:], start=1):
        if isinstance(first, Mapping) and isinstance(sample, Mapping):
            if sample.keys() != first.keys():
                own, others = ", ".join(map(str, first)), ", ".join(map(str, sample))
                return f"the samples have unequal fields: sample 0 has {own}, sample {number} has {others}."
            pairs = [(f'field "{name}"', first[name], sample[name]) for name in first]
        elif isinstance(first, (tuple, list)) and isinstance(sample, (tuple, list)):
            if len(first) != len(sample):
                return f"the samples have unequal lengths: sample 0 has {len(first)}, sample {number} {len(sample)}."
            pairs = [(f"field {index}", *both) for index, both in enumerate(zip(first, sample, strict=True))]
        else:
            pairs = [("the value", first, sample)]
        for name, one, other in pairs:
            if _shape(one) != _shape(other):
                shapes = f"{_shape(one)} in sample 0 and {_shape(other)} in sample {number}"
                return f"the samples have unequal shapes: {name} is {shapes}."
    return None


def _shape(value: Any) -> str:
    if hasattr(value, "shape"):
        return str(tuple(value.shape))
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _check_lists(batch: Any, collator: Callable[[list[Any]], Any], *, is_cut: bool, case: Case) -> bool:
    """Notes lists where tensors should be. Texts stay lists; a list of tensors may be meant, unless it must be cut."""
    if not isinstance(batch, Mapping):
        return True
    numbers = [name for name, value in batch.items() if isinstance(value, (list, tuple)) and _is_of_numbers(value)]
    tensors = [
        name
        for name, value in batch.items()
        if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value)
    ]
    location = _location_of(collator, case)
    if numbers:
        problem = f"the collator returns lists of numbers instead of tensors for {_quoted(numbers)}."
        case.add("error", problem, f'Return torch.tensor(…): {{"{numbers[0]}": torch.tensor([…]), …}}.', location)
    if tensors:
        problem = (
            f"the collator returns lists of tensors for {_quoted(tensors)}, which are never cut into micro-batches."
        )
        advice = "Return one tensor, torch.stack([…]), or give the collator a `split(batch, n)`."
        is_handled = hasattr(collator, "split") or not is_cut
        case.add("remark" if is_handled else "error", problem, advice, location)
    return not numbers


def _is_of_numbers(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return bool(values) and all(_is_of_numbers(each) for each in values)
    return isinstance(values, Number)


def _location_of(collator: Callable[[list[Any]], Any], case: Case) -> SourceLocation | None:
    function: Any = collator if hasattr(collator, "__code__") else type(collator).__call__
    return line_of_return(function, case.users) or case.setting("data.collator", ["collator"])


def _quoted(names: list[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_MOST_NAMES = 6


def loss_function(trainer: Trainer, case: Case) -> Callable[..., Any]:
    """Returns the function whose return is the loss: the user's forward of trainer, task or model."""
    candidates: list[Callable[..., Any]] = [
        type(trainer).forward,
        type(trainer.task).forward,
        type(trainer.model).forward,
    ]
    return next((each for each in candidates if case.users.code_of(each)), candidates[-1])


def location_of_loss(trainer: Trainer, case: Case) -> SourceLocation | None:
    """Returns the line where the loss is returned, or that of the model in the config."""
    return line_of_return(loss_function(trainer, case), case.users) or case.setting("model.type", ["model"])


def check_signature(trainer: Trainer, batch: Any, case: Case) -> None:
    """Compares the batch's keys with the parameters of the forward that gets them."""
    if not isinstance(batch, Mapping):
        return
    keys = [str(key) for key in batch]
    if overrides(trainer, "forward", Trainer):
        _compare(trainer.forward, type(trainer).__name__, keys, case)
    passes_on = case.users.code_of(type(trainer).forward) is None
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
    location = line_of_function(forward, case.users, lacking) or case.setting("model.type", ["model"])
    case.add("error", f"{', and '.join(parts)}.", f"{both} {advice}", location)
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

    def __call__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], location: SourceLocation | None
    ) -> None:
        """Notes ids out of range and ends the stage; other calls pass."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if len(tensors) < 2:
            return
        location = location or self._case.setting("model.type", ["model"])
        if name == "embedding":
            # F.embedding takes (ids, weight), torch.embedding (weight, ids).
            ids, weight = sorted(tensors[:2], key=lambda each: each.is_floating_point())
            self._check_tokens(ids, weight, location)
        else:
            ignored = kwargs.get("ignore_index", IGNORED_LABEL)
            self._check_labels(tensors[0], tensors[1], ignored, location)

    @property
    def _set(self) -> str:
        name = self._trainer.eval_name
        return (
            "data.train" if name is None else f"data.eval.{name}" if name in self._trainer.eval_data else f"data.{name}"
        )

    def _check_tokens(self, ids: torch.Tensor, weight: torch.Tensor, location: SourceLocation | None) -> None:
        low, high = _range(ids)
        rows = weight.shape[0]
        if low >= 0 and high < rows:
            return
        name = self._names.get(id(weight), "its weight").removesuffix(".weight")
        has = f"the embedding {name} has num_embeddings = {rows}"
        problem = f"the token ids of {self._set} go from {low} to {high}, but {has}"
        advice = f"Use num_embeddings ≥ {high + 1} (the vocabulary's size), or another tokenizer."
        advice = advice if low >= 0 else "Ids must not be negative: -100 marks labels, not inputs."
        self._case.add("error", f"{problem}: ids must lie in 0 … {rows - 1}.", advice, location)
        raise AlreadyReported

    def _check_labels(
        self, logits: torch.Tensor, labels: torch.Tensor, ignored: int, location: SourceLocation | None
    ) -> None:
        if labels.is_floating_point() or logits.ndim == 0:
            return  # probabilities
        classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
        low, high = _range(labels[labels != ignored])
        if low >= 0 and high < classes:
            return
        shape = f"(shape {tuple(logits.shape)})"
        problem = f"the labels of {self._set} go from {low} to {high}, but the logits have {classes} classes {shape}"
        advice = f"Give the model {high + 1} outputs, or number the labels from 0; {ignored} marks those to ignore."
        self._case.add("error", f"{problem}: labels must lie in 0 … {classes - 1}.", advice, location)
        raise AlreadyReported


def _range(ids: torch.Tensor) -> tuple[int, int]:
    return (int(ids.min()), int(ids.max())) if ids.numel() else (0, -1)


def check_loss(loss: Any, location: SourceLocation | None, case: Case) -> None:
    """Notes a first loss that is not finite."""
    value = float(loss)
    if not math.isfinite(value):
        advice = (
            "Look for log(0), a division by zero, sqrt at 0, an empty mean, or values of the data that are not finite."
        )
        case.add("error", f"the first loss is {value}.", advice, location)


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
        location = line_of_function(users_class.build_optimizers, case.users) or case.setting("trainer.optimizer")
        advice = "Pass them to an optimizer, or freeze them (model.freeze, requires_grad_(False))."
        case.add("remark", f"no optimizer owns {_listed(left)}: these parameters are never updated.", advice, location)


def check_gradients(trainer: Trainer, without: list[str], case: Case) -> None:
    """Notes parameters that got no gradient in the step; `without` are their names."""
    if not without:
        return
    root = without[0].partition(".")[0]
    location = line_of_attribute(type(trainer.model), root, case.users) or case.setting("model.type", ["model"])
    problem = f"no gradient reached {_listed(without)} in the first step."
    advice = "Use them in forward, or freeze or remove them; parts that only some steps use may stay."
    case.add("remark", problem, advice, location)


def without_gradient(model: torch.nn.Module) -> list[str]:
    """Returns the trainable parameters that have no gradient; none where the step has cleared all of them."""
    trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
    missing = [name for name, one in trainable.items() if one.grad is None]
    return [] if len(missing) == len(trainable) else missing


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def check_trace(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    users: UserFiles,
    severity: Severity,
    noted: Iterable[str],
    fallback: SourceLocation | None,
    findings: Findings,
) -> None:
    """Notes each break of the graph of `forward` on a real batch; `noted` are the lines to leave out."""
    known = set(noted)
    try:
        # What the user prints was printed by the eager pass already.
        with _quiet_compiler(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            breaks = list(_breaks(forward, args, kwargs))
    except Exception as error:
        problem = f"torch.compile cannot trace this forward: {_first_line(str(error))}"
        findings.add(Finding("remark", problem, "The eager mode is not affected.", fallback))
        return
    finally:
        with contextlib.suppress(Exception):
            torch.compiler.reset()
    for reason, stack in breaks:
        location = _innermost(stack, users)
        if location is not None and str(location) in known:
            continue
        words = f"a compiled graph breaks here: {_title(reason)}"
        findings.add(
            Finding(severity if location is not None else "remark", words, _hint(reason), location or fallback)
        )


def _breaks(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Iterable[FrameSummary]]]:
    """Yields each break: what Dynamo says of it, and the stack that led there."""
    counters = compile_counters()
    torch.compiler.reset()
    counters.clear()
    explained = explain_graph(forward, args, kwargs)
    for each in explained.break_reasons:
        yield str(each.reason), each.user_stack
    # A break before any operation leaves no graph to explain; it is only counted, and found by asking for one graph.
    told = {_first_line(str(each.reason)) for each in explained.break_reasons}
    counted = [str(reason) for reason in counters["graph_break"] if _first_line(str(reason)) not in told]
    if not counted:
        return
    torch.compiler.reset()
    first = _first_break(torch.compile(forward, backend="eager", fullgraph=True), args, kwargs)
    for reason in counted:
        is_first = first is not None and _first_line(str(first)) == _first_line(reason)
        yield reason, getattr(first, "real_stack", ()) if is_first else ()


def _first_break(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _innermost(stack: Iterable[FrameSummary], users: UserFiles) -> SourceLocation | None:
    own = [each for each in stack if each.filename in users]
    if not own:
        return None
    frame = own[-1]
    line, columns = frame.lineno or 0, None
    if frame.colno is not None and frame.end_colno is not None and frame.end_lineno == line:
        columns = (frame.colno, frame.end_colno)
    return SourceLocation(
        shown_path(frame.filename), line, linecache.getline(frame.filename, line).rstrip("\n"), columns
    )


def _title(reason: str) -> str:
    if reason.startswith("generic_jump"):
        return "a tensor decides a Python branch."
    explained = re.search(r"Explanation: (.+?)(?:\.`? (?=[A-Z])|\.?$)", reason, re.MULTILINE)
    return f"{_first_line(reason).rstrip('.')}: {explained[1].replace('`', '')}." if explained else _first_line(reason)


def _hint(reason: str) -> str:
    """Returns Dynamo's first hint that a user can act on, or our own."""
    hints = [each for each in re.findall(r"Hint: (.+)", reason) if "issue" not in each and "fundamental" not in each]
    return hints[0] if hints else "Rewrite it with torch's own operations, or move it out of forward into a hook."


def _first_line(text: str) -> str:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "no reason given")
    return line if line[-1] in ".!?" else f"{line}."


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Keeps Dynamo's own log off the terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)


LABELS: Mapping[str, str] = {
    "task": "task",
    "model": "model",
    "collator": "data.collator",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "optimizers": "trainer.optimizer",
    "hooks": "hooks",
}
"""The parts that a Trainer's `build_*` methods make, in their order, and the setting that each comes from."""

_NEEDS: Mapping[str, str] = {"model": "task", "train_data": "task", "eval_data": "task", "optimizers": "model"}
_SAMPLES_WHERE_UNKNOWN = 4  # of a micro-batch whose size only the run's device can tell
_MOST_MICRO_BATCHES = 2  # enough to see that cutting works; a whole update of a large run would take hours on a CPU


@dataclass
class Assembly:
    """What could be built: all of it as a trainer, or those parts that could."""

    config: RunConfig
    """The trial's config."""
    plan: BatchPlan | None
    """The real run's batch arithmetic."""
    trainer: Trainer | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    build: Build | None = None
    building: str | None = None
    """The part that is being built, or at which building failed."""


def assemble(case: Case, folder: Path) -> Assembly:
    """Builds the trial and notes everything that fails."""
    plan = _plan(case)
    assembly = _attempt(Assembly(_trial_config(case.config, plan, folder), plan), case)
    data: Any = assembly.parts.get("train_data")
    if assembly.trainer is None and _is_too_small(data, assembly):
        # Noted; with a smaller batch the rest can still be tried.
        smaller = {"trainer.global_batch_size": len(data), "trainer.micro_batch_size": len(data)}
        assembly = _attempt(Assembly(assembly.config.derive(smaller), plan), case)
    return assembly


def _attempt(assembly: Assembly, case: Case) -> Assembly:
    try:
        trainer_class = Build(assembly.config).trainer_class()
        assembly.trainer = build_trainer(assembly.config, _recording(trainer_class, assembly))
    except Exception as error:
        failed = assembly.building
        case.note(error, label=LABELS[failed] if failed else "trainer.type")
        if assembly.build is not None:
            _build_rest(assembly, trainer_class, failed, case)
    return assembly


def _is_too_small(data: Any, assembly: Assembly) -> bool:
    return hasattr(data, "__len__") and 0 < len(data) < (assembly.config.trainer.global_batch_size or 0)


def is_found_by_the_run(config: RunConfig) -> bool:
    """Is the micro-batch what the run's device has memory for, so that only the run can tell?"""
    return config.trainer.micro_batch_size == "auto"


def num_steps(config: RunConfig, plan: BatchPlan, data: Any) -> int:
    """Returns how many updates the limits allow with the real run's batch (as build.py counts them)."""
    trainer = config.trainer
    samples = [math.inf if trainer.max_samples is None else trainer.max_samples]
    if trainer.max_epochs is not None and hasattr(data, "__len__"):
        samples.append(round(trainer.max_epochs * len(data)))
    per_sample = getattr(data.dataset, "tokens_per_sample", None)
    if trainer.max_tokens is not None and per_sample:
        samples.append(math.ceil(trainer.max_tokens / per_sample))
    steps = [math.ceil(each / plan.global_batch_size) for each in samples if each != math.inf]
    return min([*steps, *([trainer.max_steps] if trainer.max_steps is not None else [])])


def _plan(case: Case) -> BatchPlan | None:
    try:
        return resolve_batch(case.config, known_data_ranks(case.config))
    except Exception as error:
        case.note(error, label="trainer.global_batch_size")
        return None


def _trial_config(config: RunConfig, plan: BatchPlan | None, folder: Path) -> RunConfig:
    given = config.trainer.micro_batch_size
    micro, micro_batches = given if isinstance(given, int) else 1, 1
    if plan is not None:
        micro, micro_batches = plan.micro_batch_size, min(plan.gradient_accumulation_steps, _MOST_MICRO_BATCHES)
    if plan is not None and is_found_by_the_run(config):
        # The whole batch in one forward is for the run's device; here it has only to be cut.
        micro_batches = min(micro, _MOST_MICRO_BATCHES)
        micro = min(micro // micro_batches, _SAMPLES_WHERE_UNKNOWN)
    return config.derive(
        {
            "output_dir": str(folder),
            "runtime.device": "cpu",
            "runtime.mode": "eager",
            "runtime.mesh": {},
            "trainer.global_batch_size": micro * micro_batches,
            "trainer.micro_batch_size": micro,
            "trainer.gradient_accumulation_steps": None,
            "data.num_workers": 0,
            "data.loader": {},
            "evaluation.max_batches": 1,
            "writers": [],
        }
    )


def _recording(trainer_class: type[Trainer], assembly: Assembly) -> type[Trainer]:
    """Returns the trainer's class with `build_*` methods that remember what they made, and no writers."""

    def recorded(part: str) -> Any:
        def build_part(cls: type[Trainer], build: Any, *arguments: Any) -> Any:
            assembly.build, assembly.building = build, part
            inherited: Callable[..., Any] = getattr(super(trial, cls), f"build_{part}")
            assembly.parts[part] = inherited(build, *arguments)
            assembly.building = None
            return assembly.parts[part]

        return classmethod(build_part)

    def build_writers(cls: type[Trainer], build: Any) -> Any:
        return build.writers()  # of the trial's config: none

    methods = {f"build_{part}": recorded(part) for part in LABELS}
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, **methods, "build_writers": classmethod(build_writers)}
    trial = cast(type[Trainer], type(trainer_class.__name__, (trainer_class,), body))
    return trial


def _build_rest(assembly: Assembly, trainer_class: type[Trainer], failed: str | None, case: Case) -> None:
    """Builds the parts that were not reached and whose needs are met."""
    assert assembly.build is not None
    if "task" in assembly.parts:
        assembly.build.take_task(assembly.parts["task"])
    for part, label in LABELS.items():
        if part in assembly.parts or part == failed or _NEEDS.get(part, part) not in {part, *assembly.parts}:
            continue
        arguments = [assembly.parts["model"]] if part == "optimizers" else []
        try:
            assembly.parts[part] = getattr(trainer_class, f"build_{part}")(assembly.build, *arguments)
        except Exception as error:
            case.note(error, label=label)


_GRAPH_MODES = ("compile", "graph")


def try_out(case: Case, folder: Path, report: Report) -> None:
    """Builds the run in `folder` and tries every stage; findings and facts go into the case and the report."""
    assembly = assemble(case, folder)
    unusable = _check_data(assembly, case)
    trainer = assembly.trainer
    if trainer is None:
        report.skipped += ["a training step", "evaluation", "a checkpoint", "graph safety"]
        return
    _state_facts(trainer, assembly, case, report)
    check_ownership(trainer, case)
    trial = Trial(trainer, case, report)
    if "train" in unusable:
        report.skipped += ["a training step", "graph safety"]
    else:
        trial.train()
    trial.evaluate(without=unusable)
    trial.save_and_restore()
    trial.report_graph_safety()


def _check_data(assembly: Assembly, case: Case) -> set[str]:
    """Tries the first batch of every set; returns the names of those that cannot be used."""
    parts = assembly.parts
    plan, collator, train_data = assembly.plan, parts.get("collator"), parts.get("train_data")
    if collator is None or train_data is None:
        return {"train"}
    is_cut = plan is not None and (plan.gradient_accumulation_steps > 1 or is_found_by_the_run(case.config))
    check = partial(
        check_batch, collator=collator, batch_size=assembly.config.trainer.global_batch_size or 1, case=case
    )
    unusable = set() if check(train_data, label="data.train", is_cut=is_cut) else {"train"}
    for name, dataset in (parts.get("eval_data") or {}).items():
        if not check(dataset, label=f"data.eval.{name}", is_cut=False):
            unusable.add(name)
    return unusable


def _state_facts(trainer: Trainer, assembly: Assembly, case: Case, report: Report) -> None:
    """Writes what the run is into the report, and notes a batch that is larger than the data."""
    plan, data = assembly.plan, trainer.train_data
    assert data is not None
    parameters = list(trainer.model.parameters())
    total, trained = (sum(one.numel() for one in each) for each in (parameters, filter(_is_trained, parameters)))
    trains = "" if trained == total else f", {trained:,} of them trained"
    sets = [f"{name} {describe_size(each).removesuffix(' samples')}" for name, each in sets_of(trainer).items()]
    report.facts.append(f"{type(trainer.model).__name__} with {total:,} parameters{trains}")
    report.facts.append(", ".join([describe_size(data), *sets]))
    if plan is None:
        return
    ranks = known_data_ranks(case.config)
    micro, gradient_accumulation_steps = (
        f"{plan.micro_batch_size}",
        f" × gradient_accumulation_steps {plan.gradient_accumulation_steps}",
    )
    if is_found_by_the_run(case.config):
        micro, gradient_accumulation_steps = f"of at most {plan.micro_batch_size}, as the memory allows", ""
    product = (
        " × ".join([f"micro-batch {micro}", *([f"{ranks} ranks"] if ranks > 1 else [])]) + gradient_accumulation_steps
    )
    report.facts.append(f"{num_steps(case.config, plan, data):,} steps of {plan.global_batch_size} samples ({product})")
    if isinstance(data, TrainData) and plan.global_batch_size > len(data):  # the trial's own batch may be smaller
        case.note(_too_large(plan.global_batch_size, len(data)), label="trainer.global_batch_size")


def _too_large(batch_size: int, num_samples: int) -> DataError:
    """What the run's own TrainData would say."""
    return DataError(
        f"trainer.global_batch_size: {batch_size} is more than the {num_samples} samples of data.train, "
        f"so that one batch would hold samples twice. Use at most {num_samples}."
    )


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad


class Trial:
    """One trainer under observation: its methods are wrapped on the object, its classes stay as they are."""

    def __init__(self, trainer: Trainer, case: Case, report: Report) -> None:
        self.trainer = trainer
        self.case = case
        self.report = report
        self.doing = "step"
        """What the loop is at, to place an error that names no line."""
        self.first_batch: Any = None
        self.model_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.without_gradient: list[str] = []
        self.has_stepped = False
        self.can_save = True
        on_values = IdCheck(trainer, case)
        self.watch = HostSyncMode(case.users, on_values=on_values)
        self.eval_watch = HostSyncMode(case.users, in_forward_only=True, on_values=on_values)
        for name in ("next_train_inputs", "run_forward", "train_step", "eval_step", "save"):
            setattr(trainer, name, partial(getattr(self, f"_{name}"), getattr(trainer, name)))
        self._model_hook = trainer.model.register_forward_pre_hook(self._note_model_inputs, with_kwargs=True)

    # what the loop calls

    def _next_train_inputs(self, inner: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        self.doing = "data"
        return inner(iterator)

    def _run_forward(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.first_batch = batch if self.first_batch is None else self.first_batch
        check_signature(self.trainer, batch, self.case)
        return inner(batch)

    def _train_step(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.doing = "step"
        with watching(self.watch):
            result = inner(batch)
        self.doing, self.has_stepped = "after the step", True
        self.without_gradient = without_gradient(self.trainer.model)
        self.trainer.stop("the check needs one step")
        check_loss(result[0], location_of_loss(self.trainer, self.case), self.case)
        return result

    def _eval_step(self, inner: Callable[..., Any], batch: Any) -> Any:
        self.doing = "evaluation"
        with watching(self.eval_watch):
            return inner(batch)

    def _save(self, inner: Callable[..., Any]) -> Any:
        before, self.doing, self.can_save = self.doing, "checkpoint", False
        path = inner()
        self.doing, self.can_save = before, True
        return path

    def _note_model_inputs(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.model_inputs is None:
            self.model_inputs = args, dict(kwargs)

    # the stages

    def train(self) -> None:
        """Runs the loop for one update, with its evaluation, its hooks and its checkpoint."""
        try:
            self.trainer.train()
        except (Exception, SystemExit) as error:
            self._note(error)
        if self.has_stepped:
            self.report.checked.append("a training step")
            check_gradients(self.trainer, self.without_gradient, self.case)
        else:
            self.report.skipped += ["gradients", "the graph's trace"]

    def evaluate(self, *, without: set[str]) -> None:
        """Evaluates what the loop did not reach, set by set and without hooks, so that one failure hides no other."""
        trainer, sets = self.trainer, sets_of(self.trainer)
        done = {name.partition("/")[0] for name in trainer.eval_logs}
        callbacks, trainer.callbacks = trainer.callbacks, Hooks([])
        logs: dict[str, float] = {}
        for name, data in sets.items():
            if name in done | without:
                continue
            self.doing = "evaluation"
            try:
                with trainer.storage:
                    logs.update(evaluate_sets(trainer, {name: data}))
                done.add(name)
            except (Exception, SystemExit) as error:
                self._note(error, label=f"data.eval.{name}")
        trainer.callbacks = callbacks
        if logs and set(trainer.eval_data) <= done and not trainer.eval_logs:
            try:
                trainer.best.note(trainer.step, logs)
            except Exception as error:
                self._note(error)
        if done:
            self.report.checked.append(f"evaluation of {', '.join(name for name in sets if name in done)}")

    def save_and_restore(self) -> None:
        """Writes a checkpoint where the loop did not, reads it back, and compares bit for bit."""
        trainer = self.trainer
        if not self.can_save:
            return  # it failed, and is noted
        try:
            if not trainer.context.store.steps():
                trainer.checkpoints.save(metrics={})
                trainer.checkpoints.settle(must_succeed=True)
        except (Exception, SystemExit) as error:
            self.case.note(error, label="checkpoint")
            return
        advice = "Check state_dict and load_state_dict of the model and the optimizer: a resumed run would diverge."
        location = self.case.setting("trainer.optimizer")
        try:
            different = _differences(trainer)
        except TrainwrightError as error:
            self.case.note(error, label="trainer.optimizer")
        except Exception as error:
            found = line_of_traceback(error, self.case.users) or location
            problem = f"a checkpoint cannot be read back: {type(error).__name__}: {error}."
            self.case.add("error", problem, advice, found)
        else:
            if different:
                problem = f"a checkpoint reads back different: {', '.join(different[:6])}."
                self.case.add("error", problem, advice, location)
            else:
                self.report.checked.append("a checkpoint, read back bit-equal")

    def report_graph_safety(self) -> None:
        """Notes what would break a compiled graph: an error where the run's mode is one, else a remark."""
        mode = self.case.config.runtime.mode
        severity: Severity = "error" if mode in _GRAPH_MODES else "remark"
        seen = {**self.eval_watch.sightings, **self.watch.sightings}.values()
        sightings = sorted(seen, key=lambda each: (each.location.file, each.location.line, each.location.columns or ()))
        for sighting in sightings:
            self.case.findings.add(_finding_of(sighting, severity, mode))
        if not self.has_stepped or self.model_inputs is None:
            return
        self._model_hook.remove()
        args, kwargs = self.model_inputs
        forward: Callable[..., Any] = self.trainer.model
        is_trainers = loss_function(self.trainer, self.case) is type(self.trainer).forward
        if is_trainers and isinstance(self.first_batch, Mapping):
            forward, args, kwargs = self.trainer.forward, (), dict(self.first_batch)
        check_trace(
            forward,
            args,
            kwargs,
            users=self.case.users,
            severity=severity,
            noted=[str(each.location) for each in sightings if each.is_direct],
            fallback=self.case.setting("model.type", ["model"]),
            findings=self.case.findings,
        )
        self.report.checked.append("graph safety")

    def _note(self, error: BaseException, *, label: str | None = None) -> None:
        labels = {"data": "data.train", "evaluation": "evaluation", "checkpoint": "checkpoint"}
        label = label or labels.get(self.doing, "trainer.type")
        in_forward = self.doing in ("step", "evaluation") and not isinstance(error, AlreadyReported)
        location = location_of_loss(self.trainer, self.case) if in_forward else None
        if isinstance(error, CriterionError):
            location = line_of_attribute(type(self.trainer.model), "criterion", self.case.users) or location
        self.case.note(error, label=label, location=location)


def _finding_of(sighting: Sighting, severity: Severity, mode: str) -> Finding:
    use = sighting.use
    if not sighting.is_direct:
        # Library code may do otherwise when it is compiled: the trace has the last word.
        return Finding(
            "remark", f"library code called here breaks a compiled graph: {use.what}.", use.fix, sighting.location
        )
    effect = f"runtime.mode {mode} cannot capture this" if mode in _GRAPH_MODES else "this would break a compiled graph"
    return Finding(severity, f"{effect}: {use.what}.", use.fix, sighting.location)


def _differences(trainer: Trainer) -> list[str]:
    """Reads the newest checkpoint into the emptied trainer; returns what differs from before."""
    before = _snapshot(trainer)
    _forget(trainer)
    restore_checkpoint(trainer, trainer.context.store.steps()[-1])
    after = _snapshot(trainer)
    return [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]


def _snapshot(trainer: Trainer) -> dict[str, Any]:
    """Copies every value of the model and the optimizers, by name."""
    found: dict[str, Any] = {f"model {name}": value for name, value in trainer.model.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        found.update(_flat(f"optimizer {name}", optimizer.state_dict()))
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _flat(f"{name}.{number}", item)
    else:
        yield name, value


def _forget(trainer: Trainer) -> None:
    """Overwrites the weights and drops the optimizers' state: what is there afterwards was read."""
    with torch.no_grad():
        for value in trainer.model.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for optimizer in trainer.optimizers.values():
        optimizer.state.clear()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    return bool(one == other) and type(one) is type(other)


TRIALS = ("components", "building every part", "a training step", "evaluation", "a checkpoint", "graph safety")


def check_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Report:
    """Checks the run that a YAML file describes, without touching its run folder."""
    findings = Findings()
    report = Report(findings)
    config = load_config(path, overrides, findings)
    if config is None:
        report.skipped += TRIALS
        return report
    report.checked.append("config")
    case = Case(config, UserFiles(config.project_dir), findings)
    with _quiet():
        num_components = check_components(case)
        if findings.count("error"):
            report.skipped += TRIALS[1:]
            return report
        report.checked.append(f"{num_components} components")
        with tempfile.TemporaryDirectory(prefix="trainwright-check-") as folder:
            try_out(case, Path(folder), report)
    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the run's own log out of the report, and what the user's code prints beside it, on stderr."""
    package = logging.getLogger("trainwright")
    level = package.level
    package.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        package.setLevel(level)
