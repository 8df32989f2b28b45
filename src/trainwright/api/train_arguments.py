"""The arguments of `train` as settings of a config, and errors about these settings as errors about the arguments.

An argument is a component (a name, a mapping with `type`, a `Component`, a class, or a `functools.partial` of a class)
or an object. Components become settings, which the run's config.yaml records. For objects and functions, which exist
only in the program, it records a fingerprint, so that a run whose code was edited, or whose data in memory has other
rows, does not resume unnoticed.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from trainwright.config import Node, Origin, RunConfig
from trainwright.config.component import type_of
from trainwright.config.elsewhere import advice_elsewhere
from trainwright.config.interpolation import escape_plain
from trainwright.config.problems import did_you_mean
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.registry import resolve as registry
from trainwright.user_code.fingerprints import fingerprint, is_users, users_functions
from trainwright.user_code.locations import caller, location_of, name_of, parameters_of

DEFAULT_LR = 1e-3
"""The learning rate of an optimizer that requires one, if none is given."""

CODE = "code"
"""The option of the trainer section that has the fingerprints."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ARGUMENTS = {
    "trainer.global_batch_size": "batch_size",
    "trainer.max_steps": "max_steps",
    "trainer.max_epochs": "max_epochs",
    "trainer.optimizer": "optimizer",
    "trainer.schedule": "schedule",
    "evaluation.metrics": "metrics",
    "data.sampler": "sampler",
    "data.collator": "collator",
    "data.train": "data",
    "data.eval": "eval_data",
    "data.eval.eval": "eval_data",
    "runtime.device": "device",
    "runtime.precision": "precision",
}
"""The settings that are arguments of `train`."""
_MAX_ROWS, _MAX_ELEMENTS = 256, 1 << 20
"""The amount of rows of a dataset in memory that is hashed."""
_FLAGS = {"--accept-changes": "accept_changes=True", "--fresh": "fresh=True"}


def given(argument: str, value: Any, *, at: str | None = None) -> Node:
    """Returns a setting whose origin is an argument of `train`, in the caller's line or in the line `at`."""
    return Node(escape_plain(value), Origin.parse(at or caller(), f"train({argument}=…)"))


@contextmanager
def errors_name_arguments(overrides: Sequence[str], *, has_optimizer: bool) -> Iterator[None]:
    """Makes errors name Python arguments instead of settings and command-line flags.

    A setting that `overrides` sets keeps its name.
    """
    names = {**_ARGUMENTS, **({} if has_optimizer else {"trainer.optimizer.lr": "lr"})}
    names = {
        setting: name for setting, name in names.items() if not any(text.startswith(setting) for text in overrides)
    }
    settings = "|".join(re.escape(setting) for setting in sorted(names, key=len, reverse=True))
    patterns: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
        (re.compile("|".join(map(re.escape, _FLAGS))), lambda found: _FLAGS[found[0]]),
        (re.compile(rf"\btrainer\.{CODE}\."), lambda found: ""),
        (re.compile(r"\bruntime\.precision: (auto|fp32|bf16|fp16|fp8)"), lambda found: f'precision="{found[1]}"'),
        (re.compile(r"\btrainer: (?=max_steps)"), lambda found: ""),
        (re.compile(rf"(?<![\w./])(?:{settings})(?!\w)"), lambda found: names[found[0]]),
    ]
    try:
        yield
    except TrainwrightError as error:
        texts = [error.problem, str(error)]
        for pattern, replace in patterns:
            texts = [pattern.sub(replace, text) for text in texts]
        error.problem, error.args = texts[0], (texts[1],)
        raise


def reject_argument(name: str, *, known: Iterable[str]) -> NoReturn:
    """Raises for an argument that `train` does not have; names the argument or the setting of the same meaning."""
    advice = advice_elsewhere(name)
    if advice is not None and advice.startswith("Set ") and advice[4:-1] not in {*_ARGUMENTS, "trainer.optimizer.lr"}:
        advice = f"{advice[:-1]} in overrides."
    settings = list(_settings_named(name))
    argument = next((setting for setting in settings if setting in _ARGUMENTS), None)
    if argument is not None:
        advice = f"Set {argument}."
    elif settings:
        one_of = "one of " if len(settings) > 1 else ""
        passed = ", ".join(f'overrides=["{setting}=…"]' for setting in settings)
        advice = f"Pass {one_of}{passed}."
    advice = advice or did_you_mean(name, known, cutoff=0.75).strip() or "`help(train)` lists the arguments."
    raise ConfigError(f"train has no argument {name}. {advice}", where=caller())


def _settings_named(name: str) -> Iterator[str]:
    for key, field in RunConfig.model_fields.items():
        if key == name:
            yield key
        if isinstance(field.annotation, type) and name in getattr(field.annotation, "model_fields", ()):
            yield f"{key}.{name}"


def component(argument: str, value: Any, *, example: str) -> dict[str, Any]:
    """Returns the component of an argument as a mapping with `type`; raises for anything else."""
    if isinstance(value, str) and value:
        return {"type": value}
    if isinstance(value, Mapping):
        return dict(value)
    keywords: Mapping[str, Any] = {}
    if isinstance(value, partial) and not value.args:
        value, keywords = value.func, value.keywords
    if isinstance(value, type):
        return {"type": type_of(value), **keywords}
    raise ConfigError(f"{argument}: must be a component, such as {example}; got {value!r}.", where=caller())


def optimizer_component(value: Any, lr: float | None) -> dict[str, Any]:
    """Returns the component of an optimizer, with the learning rate `lr` unless it has its own."""
    found = component("optimizer", "adamw" if value is None else value, example='{"type": "adamw", "lr": 1e-3}')
    if "lr" in found and lr is not None:
        raise _two_rates(lr, found["lr"])
    if lr is not None:
        return {**found, "lr": given("lr", lr)}
    return {**found, "lr": DEFAULT_LR} if "lr" not in found and _requires_lr(found.get("type")) else found


def is_local(kind: type) -> bool:
    """Returns True for a class defined inside a function, which a config cannot name."""
    return "<" in kind.__qualname__


def local_optimizer(kind: Any, lr: float | None) -> partial[torch.optim.Optimizer]:
    """Returns a class defined inside a function, or a partial of one, with its learning rate."""
    keywords = kind.keywords if isinstance(kind, partial) else {}
    if "lr" in keywords and lr is not None:
        raise _two_rates(lr, keywords["lr"])
    if lr is None and "lr" not in keywords and _has_required_lr(kind):
        lr = DEFAULT_LR
    return partial(kind, **({} if lr is None else {"lr": lr}))


def _two_rates(lr: float, own: Any) -> ConfigError:
    return ConfigError(f"lr={lr:g}: optimizer has its own lr, {own!r}. Use one of the two.", where=caller())


def _requires_lr(type_name: Any) -> bool:
    try:
        return _has_required_lr(registry.find("optimizer", type_name, project_dir=Path.cwd()))
    except (ConfigError, TypeError):
        return False  # the build raises a clear error


def _has_required_lr(target: Any) -> bool:
    parameter = (parameters_of(target) or {}).get("lr")
    return parameter is not None and parameter.default is parameter.empty


def metric_arguments(metrics: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metrics of an evaluation by name: those that are components, and those that are objects."""
    if metrics is None:
        return {}, {}
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        metrics = [metrics]
    if isinstance(metrics, Sequence):
        names = [_metric_name(each) for each in metrics]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            problem = f'two of them would be named "{twice}". Pass a mapping from names to metrics.'
            raise ConfigError(f"metrics: {problem}", where=caller())
        metrics = dict(zip(names, metrics, strict=True))
    elif isinstance(metrics.get("type"), str):
        metrics = {metrics["type"]: metrics}  # one component
    objects = {name: each for name, each in metrics.items() if _is_metric(each)}
    example = '{"accuracy": {"type": "accuracy"}}'
    for name, each in metrics.items():
        if inspect.isroutine(each):  # such as a compute_metrics, which receives all predictions
            raise ConfigError(
                f"metrics[{name!r}]: a function is not a metric. Pass an object with update(outputs, labels), "
                f"compute() and reset(), or a component, such as {example}; a result of all predictions at once is "
                "Task.aggregate_logs.",
                where=caller(),
            )
    return {
        name: component(f"metrics[{name!r}]", each, example=example)
        for name, each in metrics.items()
        if name not in objects
    }, objects


def _metric_name(metric: Any) -> str:
    """Returns the name of a metric in a list: its type, or the name of its class in lower case."""
    kind = metric.get("type") if isinstance(metric, Mapping) else metric
    if isinstance(kind, str):
        return kind if kind.isidentifier() else kind.rpartition(":")[2].lower()
    return name_of(kind.func if isinstance(kind, partial) else kind).lower()


def _is_metric(value: Any) -> bool:
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("update", "compute"))


def precision_name(precision: str | torch.dtype) -> str:
    """Returns the setting of a precision, which may be given as a dtype of torch."""
    return _PRECISIONS.get(precision, str(precision)) if isinstance(precision, torch.dtype) else precision


def fingerprints(
    model: torch.nn.Module,
    data: Any,
    functions: Mapping[str, Any],
    optimizer: Any,
    hooks: Sequence[Any],
    objects: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a text for each argument that is not a setting: its name and a hash of its code, or of its rows.

    `functions` are forward and collator, None if not given; `objects` are others of which the class counts.
    """
    found: dict[str, Any] = {}
    for argument, function in functions.items():
        if function is not None:
            found[argument] = given(argument, _described(function), at=location_of(function))
    kinds = list(dict.fromkeys(type(each) for each in model.modules()))
    shown = hashlib.sha256(_ADDRESS.sub("", repr(model)).encode()).hexdigest()[:6]
    at = location_of(type(model)) if is_users(type(model)) else None
    found["model"] = given("model", f"{type(model).__name__} {fingerprint(*kinds)}{shown}", at=at)
    rows = _hash_rows(data)
    if rows is not None:
        found["data"] = given("data", f"{type(data).__name__} {rows}")
    kind = optimizer.func if isinstance(optimizer, partial) else optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        found["optimizer"] = given("optimizer", f"{_shown_optimizer(optimizer)} {fingerprint(optimizer)}")
    elif isinstance(kind, type) and (is_users(kind) or is_local(kind)):
        # The keywords of a class that a config can name are settings.
        keywords = optimizer.keywords if isinstance(optimizer, partial) and is_local(kind) else {}
        shown = f"({_joined(_shown_settings(keywords))})" if keywords else ""
        found["optimizer"] = given("optimizer", f"{kind.__name__}{shown} {fingerprint(kind)}", at=location_of(kind))
    for argument, each in objects.items():
        found[argument] = given(argument, f"{type(each).__name__} {fingerprint(each)}")
    of_hooks = {
        name: given("hooks", _described(code), at=location_of(code))
        for hook in hooks
        for name, code in _code_of_hook(hook)
    }
    return {**found, **({"hooks": of_hooks} if of_hooks else {})}


def _shown_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class of an optimizer with its defaults, and the settings of its groups that differ from them."""
    defaults = _shown_settings(optimizer.defaults)
    groups = [_shown_settings(group) for group in optimizer.param_groups]
    others = [
        {name: each[name] for name in defaults if each.get(name, defaults[name]) != defaults[name]} for each in groups
    ]
    own = " and ".join(dict.fromkeys(_joined(each) for each in others if each))
    return f"{type(optimizer).__name__}({_joined(defaults)}{'; groups with ' if own else ''}{own})"


def _joined(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in settings.items())


def _shown_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    numbers = {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in settings.items()
    }
    return {name: repr(value) for name, value in numbers.items() if isinstance(value, bool | int | float | tuple)}


def _hash_rows(data: Any) -> str | None:
    """Returns a hash of the rows of a dataset in memory, such as one fold of several; None for other datasets.

    Without it a loop over folds that gives each run the same name would train only the first of them.
    """
    digest = hashlib.sha256()
    return digest.hexdigest()[:12] if _add_rows(digest, data) else None


def _add_rows(digest: Any, data: Any) -> bool:
    """Adds the rows of a dataset, or their indices, to a hash; returns False if it has neither in memory."""
    if isinstance(data, Subset):
        _add_value(digest, list(data.indices))
        _add_rows(digest, data.dataset)
        return True
    if isinstance(data, ConcatDataset):
        has_rows = [_add_rows(digest, each) for each in data.datasets]
        return any(has_rows)
    if type(data).__module__.startswith("datasets.") and hasattr(data, "select"):
        sampled = list(range(0, len(data), max(1, len(data) // _MAX_ROWS)))
        # As stored, because decoded images would have an address in their text.
        _add_value(digest, [len(data), repr(data.with_format("arrow")[sampled].to_pydict())])
        return True
    rows = data.tensors if isinstance(data, TensorDataset) else data
    if not isinstance(rows, list | tuple | torch.Tensor | np.ndarray):
        return False
    _add_value(digest, rows)
    return True


def _add_value(digest: Any, value: Any) -> None:
    """Adds a value to a hash; for a long list or tensor, elements at regular intervals."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            return
        flat = value.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // _MAX_ELEMENTS)].cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        flat_array = value.reshape(-1)
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(flat_array[:: max(1, flat_array.size // _MAX_ELEMENTS)].tobytes())
    elif isinstance(value, Mapping):
        for name, each in value.items():
            digest.update(str(name).encode())
            _add_value(digest, each)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}".encode())
        if all(isinstance(each, int) for each in value):
            _add_value(digest, np.asarray(value))
            return
        for each in value[:: max(1, len(value) // _MAX_ROWS)]:
            _add_value(digest, each)
    elif isinstance(value, str | bytes | bool | int | float | None):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())  # an image, a path: only their number is hashed


def _code_of_hook(hook: Any) -> Iterator[tuple[str, Any]]:
    """Yields the class of a custom hook, or the functions that one of ours calls, such as `Every(10)(function)`."""
    kind = type(hook)
    if is_users(kind):
        yield kind.__name__, kind
        return
    for value in vars(hook).values():
        for function in users_functions(value):
            yield f"{kind.__name__} {function.__name__}", function


def _described(target: Any) -> str:
    return f"{name_of(target)} {fingerprint(target)}"
