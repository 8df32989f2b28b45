"""`training_main`: SwissArmyTransformer's entry point, on one Trainer and one Task for the user's functions.

arguments.py has the flags of the Namespace.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from trainwright.api.arguments import (
    DECAY_STYLES,
    FACTS,
    MODES,
    SETS,
    UNSUPPORTED_FLAGS,
    ZERO_STAGES,
    as_list,
    attribute_of,
    flag_names,
    read_ratios,
    with_defaults,
)
from trainwright.api.run import evaluate_checkpoint, run_experiment, start_up
from trainwright.backends.private_torch import tree_leaves
from trainwright.build.run import build_evaluator, sets_of
from trainwright.checkpoint import contents
from trainwright.checkpoint.listing import CHECKPOINTS, checkpoints_location
from trainwright.checkpoint.manifest import MANIFEST
from trainwright.checkpoint.remote_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.checkpoint.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, find_run, read_config, run_folder
from trainwright.config import Node, Origin, RunConfig
from trainwright.config.interpolation import escape_plain
from trainwright.config.problems import nearest
from trainwright.config.yaml_text import absolute
from trainwright.data.fetch import has_index, is_stream
from trainwright.data.mix import mix
from trainwright.data.split import sizes_by_ratio, split
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError, shorten_tracebacks
from trainwright.events import Mean, get_event_storage
from trainwright.log import show_log_unless_configured
from trainwright.loop.evaluation import EvalLogs
from trainwright.loop.state import SCALARS
from trainwright.loop.task import Task
from trainwright.loop.trainer import Builder, Trainer
from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.models.from_config import disable_untrainable_params
from trainwright.models.model import Model
from trainwright.models.pretrained import INDEX_FILE, WEIGHTS_FILE, load_weights
from trainwright.parallel import processes
from trainwright.user_code.locations import caller, location_of, name_of, parameters_of
from trainwright.user_code.signatures import reject_wrong_call

logger = logging.getLogger(__name__)

_TIMER_PREFIX = "time/"


class Timer:
    """A timer of the host. `stop` does not wait for the device."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Starts the timer."""
        if self._started is not None:
            raise TrainwrightError(f"timers({self._name!r}) is already running. Stop it first.", where=caller())
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stops the timer and puts the seconds into the event storage."""
        if self._started is None:
            raise TrainwrightError(f"timers({self._name!r}) is not running. Start it first.", where=caller())
        seconds, self._started = time.perf_counter() - self._started, None
        self._seconds += seconds
        get_event_storage().put_scalar(f"{_TIMER_PREFIX}{self._name}", seconds)

    def reset(self) -> None:
        """Stops the timer and sets it to 0."""
        self._started, self._seconds = None, 0.0

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds since the last reset."""
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds


class Timers:
    """Timers by name: `timers("data loader").start()`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns the timer of that name, which is created on first use."""
        return self._timers.setdefault(name, Timer(name))


ForwardStep = Callable[[Iterator[Any], torch.nn.Module, argparse.Namespace, Timers], Any]


class OneBatch(Iterator[Any]):
    """The data_iterator of one forward step: it has one micro-batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.is_used = False

    def __next__(self) -> Any:
        if self.is_used:
            raise TrainwrightError(
                "A forward step has one batch, but next(data_iterator) is called again. Use a larger --batch-size or "
                "--gradient-accumulation-steps.",
                where=caller(),
            )
        self.is_used = True
        return self._batch


def run_step(
    function: ForwardStep,
    batch: Any,
    model: torch.nn.Module,
    args: argparse.Namespace,
    timers: Timers,
    *,
    num_samples: int,
    is_training: bool,
) -> Any:
    """Calls a forward step and returns a result that the loop accepts: (loss, metrics) or an object with a loss."""
    iterator = OneBatch(batch)
    returned = function(iterator, model, args, timers)
    if not iterator.is_used:
        raise TrainwrightError(
            f"{name_of(function)} did not use its batch. Call next(data_iterator) once.", where=location_of(function)
        )
    if isinstance(returned, Mapping) or (hasattr(returned, "loss") and not isinstance(returned, torch.Tensor)):
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned.loss
        has_labels = isinstance(batch, Mapping) and batch.get("labels") is not None
        has_criterion = has_labels and getattr(model, "criterion", None) is not None
        if not _is_loss(loss) and not (loss is None and has_criterion):
            raise _reject_result(function, f"{_describe(returned)} whose loss is {_describe(loss)}")
        return returned
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not _is_loss(loss) or not isinstance(metrics, Mapping):
        raise _reject_result(function, _describe(returned))
    metrics = {name: value for name, value in metrics.items() if name != "loss"}
    if is_training:
        loss = _skip_if_not_finite(loss, metrics)
        metrics = _averaged(function, metrics, num_samples)
    return loss, metrics


def _is_loss(loss: Any) -> bool:
    return isinstance(loss, Mean) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)


def _reject_result(function: ForwardStep, what: str) -> TrainwrightError:
    return TrainwrightError(
        f"{name_of(function)} returned {what}. Return a loss, a tensor with one element, or (loss, {{name: metric}}).",
        where=location_of(function),
    )


def _averaged(function: ForwardStep, metrics: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns the metrics of a training step, with per-sample metrics averaged, as in an evaluation.

    Metrics with several values per sample are for handle_metrics_function only. A wrong length raises here, so that
    it does not first raise in an evaluation.
    """
    averaged: dict[str, Any] = {}
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            averaged[name] = value
        elif not value.ndim or (num_samples and value.shape[0] != num_samples):
            raise _wrong_length(function, name, value, num_samples)
        elif value.numel() == num_samples:
            averaged[name] = Mean(value.detach().float().sum(), float(num_samples))
    return averaged


def _wrong_length(function: ForwardStep, name: str, value: Any, num_samples: int) -> TrainwrightError:
    return TrainwrightError(
        f"{name_of(function)}: the metric {name} is {_describe(value)}, but the batch has {num_samples} samples. "
        "Return one number, or a tensor with one row per sample.",
        where=location_of(function),
    )


def _skip_if_not_finite(loss: torch.Tensor | Mean, metrics: Mapping[str, Any]) -> torch.Tensor | Mean:
    """Returns the loss, or nan if a metric is not finite, so that all ranks skip the update; does not synchronize."""
    total = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(total, torch.Tensor):
        return loss
    finite: torch.Tensor | bool = True
    for value in metrics.values():
        number = value.total if isinstance(value, Mean) else value
        if isinstance(number, torch.Tensor) and number.is_floating_point():
            finite = torch.isfinite(number.detach()).all() & finite
        elif isinstance(number, Real) and not math.isfinite(number):
            finite = False
    if finite is True:
        return loss
    checked = torch.where(torch.as_tensor(finite, device=total.device), total, math.nan)
    return Mean(checked, loss.count) if isinstance(loss, Mean) else checked


def per_sample(logs: Mapping[str, Any], num_samples: int, function: ForwardStep) -> EvalLogs:
    """Returns the metrics with one entry per sample: a number is repeated, another length raises.

    A Mean has its own weight and is returned unchanged.
    """
    spread = EvalLogs()
    spread.outputs = getattr(logs, "outputs", None)
    for name, value in logs.items():
        if name != "loss" and not isinstance(value, Mean):
            if isinstance(value, Real):
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape[:1] != (num_samples,):
                value = value.reshape(()).expand(num_samples)
            if not isinstance(value, torch.Tensor | list) or len(value) != num_samples:
                raise _wrong_length(function, name, value, num_samples)
        spread[name] = value
    return spread


def final_metrics(function: Callable[..., Any], final: Any) -> dict[str, Any]:
    """Returns the result of handle_metrics_function, which must be one number per name."""
    if not isinstance(final, Mapping):
        problem = f"{name_of(function)} returned {_describe(final)}. Return the final metrics in a dict."
        raise TrainwrightError(problem, where=location_of(function))
    for name, value in final.items():
        is_number = isinstance(value, Real | Mean) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not isinstance(name, str) or not is_number:
            raise TrainwrightError(
                f"{name_of(function)}: the final metric {name!r} is {_describe(value)}. Return one number per name.",
                where=location_of(function),
            )
    return dict(final)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def check_can_split(collate: Callable[[list[Any]], Any], num_micro_batches: int, samples: list[Any]) -> Any:
    """Returns the batch of a collate_fn, and rejects an object in it that cannot be split into micro-batches."""
    batch = collate(samples)
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, (torch.Tensor, *SCALARS)):
            raise DataError(
                f"{name_of(collate)} returned a batch with a {type(leaf).__name__}, which cannot be split into the "
                f"{num_micro_batches} micro-batches of --gradient-accumulation-steps. Return tensors, text and numbers "
                "in dicts, lists or tuples, or give it a method `split(batch, n)`.",
                where=location_of(collate),
            )
    return batch


_FORWARD_STEP = ("data_iterator", "model", "args", "timers")

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "forward_step_function": _FORWARD_STEP,
    "create_dataset_function": ("path", "args"),
    "handle_metrics_function": ("metrics",),
    "init_function": ("args", "model"),
    "collate_fn": ("samples",),
    "forward_step_eval": _FORWARD_STEP,
}
"""The functions of training_main, and the arguments of each."""

TRAINER = "trainwright.api.training_main:FunctionTrainer"

_KEPT_FLAGS: Mapping[str, str] = {
    "train_data": "--train-data",
    "train_data_weights": "--train-data-weights",
    "split": "--split",
}
"""Flags that affect training and have no setting in the config."""

MAX_SKIPPED_UPDATES = 100


def config_of(args: argparse.Namespace) -> RunConfig:
    """Returns the config of a run with these flags."""
    flags = with_defaults(args)
    _reject_misspelt(args)
    _reject_contradictions(flags)
    max_batches = None if flags.strict_eval else flags.eval_iters
    eval_batch = None if flags.eval_batch_size is None else flags.eval_batch_size * processes.world_size()
    settings: dict[str, Any] = {
        "name": _given("--experiment-name", flags.experiment_name),
        "output_dir": _given("--save", flags.save),
        "seed": _given("--seed", flags.seed),
        "data": {
            "num_workers": _given("--num-workers", flags.num_workers),
            "loader": _loader(flags),
            # create_dataset_function builds the datasets; the origins are for errors.
            "train": _given("--train-data", None),
            "eval": _given("--valid-data", {}),
            "test": _given("--test-data", None),
        },
        "trainer": _trainer(flags),
        "evaluation": {
            "every_steps": _given("--eval-interval", flags.eval_interval),
            "max_batches": _given("--eval-iters", max_batches),
            "batch_size": _given("--eval-batch-size × ranks", eval_batch),
        },
        "checkpoint": {"every_steps": _given("--save-interval", flags.save_interval), "keep_last": None},
        "hooks": _hooks(flags),
        "writers": _writers(flags),
        "log": {"every_steps": _given("--log-interval", flags.log_interval)},
        "runtime": _runtime(flags),
        # As in SwissArmyTransformer, all ranks skip an update with a non-finite loss or metric.
        "anomalies": {"non_finite": "skip", "max_anomalies": MAX_SKIPPED_UPDATES},
    }
    return RunConfig.from_dict(settings, where=Origin.parse(caller()))


def _given(flag: str, value: Any) -> Node:
    """Returns a setting whose origin is a flag."""
    return Node(escape_plain(value), Origin.parse(caller(), flag))


def _trainer(flags: argparse.Namespace) -> dict[str, Any]:
    schedule: dict[str, Any] = {
        "type": _given("--lr-decay-style", flags.lr_decay_style),
        "warmup_fraction": _given("--warmup", flags.warmup),
    }
    if flags.lr_decay_style != "constant":
        schedule["minimum"] = _given("--lr-decay-ratio", flags.lr_decay_ratio)
    return {
        "type": TRAINER,
        "max_steps": _given("--train-iters", flags.train_iters),
        "max_epochs": _given("--epochs", flags.epochs),
        "micro_batch_size": _given("--batch-size", flags.batch_size),
        "gradient_accumulation_steps": _given("--gradient-accumulation-steps", flags.gradient_accumulation_steps),
        "global_batch_size": _given("--batch-size × --gradient-accumulation-steps × ranks", None),
        "max_grad_norm": _given("--clip-grad", flags.clip_grad or None),
        "optimizer": {
            "type": "adamw",
            "lr": _given("--lr", flags.lr),
            "weight_decay": _given("--weight-decay", flags.weight_decay),
        },
        "schedule": schedule,
        "arguments": _given("args", _kept_arguments(flags)),
    }


def _loader(flags: argparse.Namespace) -> dict[str, Any]:
    if flags.prefetch_factor is None:
        return {}
    return {"prefetch_factor": _given("--prefetch-factor", flags.prefetch_factor)}


def _hooks(flags: argparse.Namespace) -> list[Any]:
    return [_given("--profiling", {"type": "profiler", "first": flags.profiling})] if flags.profiling >= 0 else []


def _writers(flags: argparse.Namespace) -> list[Any]:
    writers: list[Any] = ["console", "json"]
    if flags.wandb:
        project = {} if flags.wandb_project_name is None else {"project": flags.wandb_project_name}
        writers.append(_given("--wandb", {"type": "wandb", **project}))
    return writers


def _runtime(flags: argparse.Namespace) -> dict[str, Any]:
    precision = "fp16" if flags.fp16 else "bf16" if flags.bf16 else "fp32"
    runtime: dict[str, Any] = {
        "device": _given("--device", str(flags.device).partition(":")[0]),
        "precision": _given("--fp16 and --bf16", precision),
    }
    if flags.zero_stage:
        runtime["mesh"] = _given("--zero-stage", {"fsdp": -1})
        # In stages 1 and 2 the parameters stay unsharded between a forward and its backward.
        runtime["reshard_after_forward"] = _given("--zero-stage", flags.zero_stage == max(ZERO_STAGES))
    return runtime


def _kept_arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the user's arguments that YAML can represent, and the flags without a setting."""
    left_out = {*flag_names(), *FACTS} - {*_KEPT_FLAGS}
    return {
        name: _given(_KEPT_FLAGS.get(name, f"args.{name}"), value)
        for name, value in vars(flags).items()
        if name not in left_out and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _reject_contradictions(flags: argparse.Namespace) -> None:
    problems = []
    for name, choices in (("mode", MODES), ("lr_decay_style", DECAY_STYLES), ("zero_stage", ZERO_STAGES)):
        if getattr(flags, name) not in choices:
            shown = ", ".join(map(str, choices))
            problems.append(f"--{name.replace('_', '-')}: {getattr(flags, name)!r} is not one of {shown}.")
    if flags.fp16 and flags.bf16:
        problems.append("--fp16 and --bf16 exclude each other. Keep one of them.")
    if flags.train_iters is None and flags.epochs is None and flags.mode != "inference":
        problems.append("--train-iters or --epochs is required.")
    if flags.checkpoint_num_layers > 1:
        problems.append(
            f"--checkpoint-num-layers: {flags.checkpoint_num_layers} is not supported: layers are recomputed one at a "
            "time, which needs the least memory. Remove it."
        )
    if flags.lr_decay_iters not in (None, flags.train_iters):
        problems.append(
            f"--lr-decay-iters: {flags.lr_decay_iters} is not supported: the schedule has the length of the run, "
            "--train-iters. Remove it."
        )
    if flags.checkpoint_skip_layers and not flags.checkpoint_activations:
        problems.append("--checkpoint-skip-layers has no effect without --checkpoint-activations. Remove it.")
    if flags.wandb_project_name is not None and not flags.wandb:
        problems.append("--wandb-project-name has no effect without --wandb. Add --wandb, or remove it.")
    if flags.prefetch_factor is not None and not flags.num_workers:
        problems.append("--prefetch-factor has no effect without --num-workers. Add it, or remove --prefetch-factor.")
    for flag, reason in UNSUPPORTED_FLAGS.items():
        if getattr(flags, attribute_of(flag), None) not in (None, False, "", 1):
            problems.append(f"args.{attribute_of(flag)}: {reason}")
    if flags.fresh and flags.load is not None and flags.mode == "pretrain":
        problems.append(
            "--fresh starts over, but --load in --mode pretrain resumes. Remove one of them, or load only the weights "
            "with --mode finetune."
        )
    if problems:
        raise ConfigError(" ".join(problems), where=caller())


def _reject_misspelt(args: argparse.Namespace) -> None:
    """Rejects an attribute that resembles a flag which the Namespace lacks: it would have no effect."""
    given = vars(args)
    for name in given.keys() - {*flag_names(), *FACTS}:
        meant = nearest(name, [flag for flag in flag_names() if flag not in given], cutoff=0.8)
        if meant is not None:
            raise ConfigError(
                f"args.{name}: there is no such flag. Did you mean {meant}? Your own argument may have this name if "
                f"args also has {meant}, as the Namespace of get_args() does.",
                where=caller(),
            )


NOTE = "begun_from.json"
"""A file in the run folder: the path of --load, and the step that was copied."""


def is_load_obsolete(load: Path, config: RunConfig) -> bool:
    """Returns True if the path of --load no longer exists and the run has a checkpoint to resume from."""
    if load.exists():
        return False
    return open_store(checkpoints_location(run_folder(config), config)).newest_intact(set_aside=False) is not None


@contextmanager
def copied_start(load: Path, config: RunConfig) -> Iterator[None]:
    """Copies the checkpoint and settings of another run into a run without a checkpoint.

    The copy is deleted if the body fails before the run has started.
    """
    folder = absolute(run_folder(config))
    _copy_start(load, folder)
    try:
        yield
    except BaseException:
        _discard_copy(folder)
        raise


def _copy_start(load: Path, folder: Path) -> None:
    _discard_copy(folder)
    note = _read_note(folder)
    own = open_store(folder / CHECKPOINTS).steps()
    if own and note is not None and note["load"] == str(absolute(load)):
        logger.info("--load %s: the run started from it and resumes from step %d.", load, own[-1])
        return
    store, step = find_checkpoint(load)
    source = Path(str(store.path(step)))
    if source.parent == folder / CHECKPOINTS:
        return  # a checkpoint of the run itself
    if own:
        start = "at step 0" if note is None else f"from {note['load']}"
        raise CheckpointError(
            f"{load} has no effect, because {folder} started {start} and is at step {own[-1]}. Remove it to resume the "
            "run, or use another --experiment-name.",
            where=Origin.parse(caller(), "--load"),
        )
    if not source.is_dir():
        problem = f"{source} is not on a local disk. Copy it to this machine, and pass the copy."
        raise CheckpointError(problem, where=Origin.parse(caller(), "--load"))
    _copy(load, source, folder, step)
    logger.info("Starting from a copy of %s", source)


def _copy(load: Path, source: Path, folder: Path, step: int) -> None:
    """Copies a checkpoint under a temporary name and renames it, so that a killed run leaves no partial one."""
    staging = folder / CHECKPOINTS / f".copying-{source.name}"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    # The note and the settings first, because without them the source of the checkpoint is unknown.
    note = {"load": str(absolute(load)), "step": step}
    (folder / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    (folder / ENVIRONMENT_FILE).unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    shutil.copy2(find_run(load)[0] / CONFIG_FILE, folder / CONFIG_FILE)
    staging.rename(folder / CHECKPOINTS / source.name)


def _discard_copy(folder: Path) -> None:
    """Deletes a copy from which no run has started; a started run has an environment.json."""
    note = _read_note(folder)
    if note is None or (folder / ENVIRONMENT_FILE).exists():
        return
    store = open_store(folder / CHECKPOINTS)
    if store.steps() == [note["step"]]:
        store.delete(note["step"])
        (folder / CONFIG_FILE).unlink(missing_ok=True)
    (folder / NOTE).unlink()
    with suppress(OSError):  # not empty
        (folder / CHECKPOINTS).rmdir()
        folder.rmdir()


def _read_note(folder: Path) -> dict[str, Any] | None:
    path = folder / NOTE
    if not path.is_file():
        return None
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return {name: note[name] for name in ("load", "step")}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged. Delete it to resume the run without it.") from error


CreateDataset = Callable[[Any, argparse.Namespace], Any]


class FunctionData:
    """Builds the sets train, valid and test on request; the function is called once per path."""

    def __init__(self, create: CreateDataset, args: argparse.Namespace, flags: argparse.Namespace) -> None:
        self._create = create
        self._args = args
        self._flags = flags
        self._ratios = read_ratios(flags.split)
        self._split: dict[str, dict[str, Any]] | None = None
        self._reject_contradictions()

    def dataset(self, name: str) -> Any:
        """Returns a set, or None if neither a path nor the split defines it."""
        if self._ratios is not None and (name == "train" or self._is_split_off(name)):
            sources = self._split_sources()[name]
        else:
            sources = self._sources(getattr(self._flags, f"{name}_data"))
        if not sources:
            return None
        if len(sources) == 1:
            return next(iter(sources.values()))
        weights = self._flags.train_data_weights if name == "train" else None
        shares = None if weights is None else dict(zip(sources, weights, strict=True))
        return mix(sources, shares, run_seed=self._flags.seed)

    def _is_split_off(self, name: str) -> bool:
        index = SETS.index(name)
        return self._ratios is not None and 0 < index < len(self._ratios) and self._ratios[index] > 0

    def _sources(self, paths: Any) -> dict[str, Any]:
        """Returns the dataset of each path by the path; a repeated path gets a suffix."""
        sources: dict[str, Any] = {}
        for path in as_list(paths):
            name = str(path)
            while name in sources:
                name += "#2"
            sources[name] = self._checked(self._create(path, self._args))
        return sources

    def _split_sources(self) -> dict[str, dict[str, Any]]:
        """Splits the dataset of each path separately, so that each is in every set."""
        if self._split is None:
            assert self._ratios is not None
            self._split = {part: {} for part in SETS}
            for name, whole in self._sources(self._flags.train_data).items():
                if is_stream(whole) or hasattr(type(whole), "make_order"):
                    raise ConfigError(
                        f"--split: {name} is a stream or a mixture, which cannot be split. Use --valid-data.",
                        where=location_of(self._create),
                    )
                sizes = sizes_by_ratio(len(whole), self._ratios)
                for part, subset in zip(SETS, split(whole, sizes, seed=self._flags.seed), strict=False):
                    if len(subset):
                        self._split[part][name] = subset
            for part in SETS[1:]:
                if not self._split[part] and self._is_split_off(part):
                    logger.warning("--split: too few samples for the set %s, which is omitted.", part)
        return self._split

    def _checked(self, dataset: Any) -> Any:
        is_dataset = is_stream(dataset) or (has_index(dataset) and hasattr(dataset, "__len__"))
        if is_dataset and not isinstance(dataset, list | tuple | DataLoader):
            return dataset
        what = "None" if dataset is None else f"a {type(dataset).__name__}"
        what += f" of {len(dataset)}" if isinstance(dataset, list | tuple) else ""
        raise DataError(
            f"{name_of(self._create)} returned {what}. Return a dataset: an object with `__len__` and `__getitem__`, "
            "such as a torch.utils.data.Dataset, or an iterable one.",
            where=location_of(self._create),
        )

    def _reject_contradictions(self) -> None:
        flags = self._flags
        paths, weights = as_list(flags.train_data), flags.train_data_weights
        if weights is not None and len(weights) != len(paths):
            raise ConfigError(
                f"--train-data-weights: {len(weights)} weights for {len(paths)} paths of --train-data. Set one each.",
                where=caller(),
            )
        for part in SETS[1:]:
            if self._is_split_off(part) and getattr(flags, f"{part}_data"):
                raise ConfigError(
                    f"--{part}-data and --split {flags.split} both define the set {part}. Remove one of them, or use "
                    "--split 1.",
                    where=caller(),
                )
        if not paths and flags.mode != "inference":
            problem = "--train-data is required: the paths for create_dataset_function."
            raise ConfigError(problem, where=caller())
        if flags.mode == "inference":
            for flag in (flag for flag in ("--fresh", "--accept-changes") if getattr(flags, attribute_of(flag))):
                problem = f"{flag}: has no effect, because --mode inference does not train. Remove it."
                raise ConfigError(problem, where=caller())
        else:
            self._warn_of_unused_flags()

    def _warn_of_unused_flags(self) -> None:
        """Logs the flags without effect; they do not raise, because scripts pass the same flags to many runs."""
        flags = self._flags
        sets = [part for part in SETS[1:] if self._is_split_off(part) or getattr(flags, f"{part}_data")]
        needed = {"--eval-interval": "valid" in sets, "--eval-iters": sets, "--eval-batch-size": sets}
        unused = {flag: "without an evaluation set. Use --valid-data or --split" for flag in needed if not needed[flag]}
        if getattr(self._args, "load", None) is None and flags.mode == "finetune":
            unused["--mode"] = "as finetune without --load"
        if len(as_list(flags.train_data)) == 1:
            unused["--train-data-weights"] = "on one path"
        for flag, why in unused.items():
            if getattr(flags, attribute_of(flag)) is not None:
                logger.warning("%s: has no effect %s.", flag, why)


InitFunction = Callable[[argparse.Namespace, torch.nn.Module], Any]


def make_model(
    model_cls: Any, args: argparse.Namespace, flags: argparse.Namespace, init_function: InitFunction | None
) -> torch.nn.Module:
    """Returns the model before training; a checkpoint of the run is loaded afterwards."""
    model = model_cls.train() if isinstance(model_cls, torch.nn.Module) else _construct(model_cls, args)
    if flags.load is not None and flags.mode == "finetune":
        load_into(model, Path(flags.load), strict=False)
    if init_function is not None:
        init_function(args, model)
    if flags.load is not None and flags.mode == "inference":
        load_into(model, Path(flags.load), strict=True)
    disable_untrainable_params(model)
    if flags.checkpoint_activations:
        names = list(_layers(model))
        if not names:
            raise ConfigError(
                f"--checkpoint-activations: {type(model).__name__} has no ModuleList of layers to recompute. Remove "
                "it, or put the layers into a ModuleList.",
                where=caller(),
            )
        if flags.checkpoint_skip_layers >= len(names):
            raise ConfigError(
                f"--checkpoint-skip-layers: {flags.checkpoint_skip_layers} leaves none of the {len(names)} layers to "
                "recompute. Use a smaller number, or remove --checkpoint-activations.",
                where=caller(),
            )
        recompute_layers(model, names[: len(names) - flags.checkpoint_skip_layers])
    return model


def _construct(model_cls: Any, args: argparse.Namespace) -> torch.nn.Module:
    if not callable(model_cls):
        problem = f"model_cls is {model_cls!r}. Pass a class, a function that returns a model, or a model."
        raise ConfigError(problem, where=caller())
    parameters = parameters_of(model_cls)
    first = next(iter((parameters or {}).values()), None)
    accepts_args = first is not None and first.name == "args" and first.kind is not first.VAR_POSITIONAL
    given = (args,) if accepts_args else ()
    try:
        if parameters is not None:
            inspect.signature(model_cls).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"{name_of(model_cls)} is called with {'args' if given else 'no arguments'}, which raises: {error}. "
            "Name its first parameter args, add defaults to the others, or pass a model instead.",
            where=location_of(model_cls),
        ) from error
    model = model_cls(*given)
    if not isinstance(model, torch.nn.Module):
        problem = f"{name_of(model_cls)} returned a {type(model).__name__}, which is not a torch.nn.Module."
        raise ConfigError(problem, where=location_of(model_cls))
    return model


def _layers(module: torch.nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the module paths of the members of the outermost ModuleLists."""
    for name, child in module.named_children():
        if isinstance(module, torch.nn.ModuleList) and type(child).forward is not torch.nn.Module.forward:
            yield f"{prefix}{name}"
        else:
            yield from _layers(child, f"{prefix}{name}.")


def load_into(model: torch.nn.Module, path: Path, *, strict: bool) -> None:
    """Loads the weights of a run, of one of its checkpoints, or of a folder of safetensors into a model.

    Without `strict` the model may differ, such as in a new head, and the differences are logged. A source without any
    weight of the model raises in both cases.
    """
    if _has_only_weights(path):
        key_map = type(model).key_map() if isinstance(model, Model) else None
        missing = load_weights(model, path, key_map=key_map, strict=strict).missing
    else:
        store, step = find_checkpoint(path)
        own, references = model.state_dict(), contents.read_references(store, step).get("hashes", {})
        missing = tuple(own.keys() - store.read_split(step, "model").keys() - references.keys())
        if len(missing) < len(own):
            contents.restore_model(store, step, model, strict=strict)
            averaged = contents.read_averaged(store, step, None)
            known = {name: each for name, each in averaged.items() if strict or name in own}
            contents.load_averaged(known, model, source=store.path(step))
        path = Path(str(store.path(step)))
    if len(missing) == len(model.state_dict()):
        problem = f"{path} has no weight of {type(model).__name__}. Use another path, or remove the flag."
        raise CheckpointError(problem, where=Origin.parse(caller(), "--load"))
    logger.info("Loaded the weights of %s", path)


def find_checkpoint(path: Path) -> tuple[AnyStore, int]:
    """Returns the store and step of the checkpoint of --load: the newest one of a run, or a given one."""
    if _has_only_weights(path):
        raise CheckpointError(
            f"{path} has only weights, but --mode pretrain resumes from a full state. Use --mode finetune.",
            where=Origin.parse(caller(), "--load"),
        )
    folder, step = find_run(path, where=Origin.parse(caller(), "--load"))
    config = read_config(folder)
    assert config is not None  # find_run has checked it
    store = open_store(checkpoints_location(folder, config))
    return store, pick_step(store, "latest" if step is None else step, best=None)


def _has_only_weights(path: Path) -> bool:
    has_weights = (path / WEIGHTS_FILE).is_file() or (path / INDEX_FILE).is_file()
    return has_weights and not (path / MANIFEST).exists()


HandleMetrics = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class UserFunctions:
    """The functions of training_main, and the Namespace that they receive."""

    args: argparse.Namespace
    flags: argparse.Namespace
    """A copy with a value for every flag."""
    model_cls: Any
    forward_step_function: ForwardStep
    create_dataset_function: CreateDataset
    handle_metrics_function: HandleMetrics | None
    init_function: InitFunction | None
    collate_fn: Callable[[list[Any]], Any] | None
    forward_step_eval: ForwardStep | None


def training_main(
    args: argparse.Namespace,
    model_cls: Any,
    forward_step_function: ForwardStep,
    create_dataset_function: CreateDataset,
    handle_metrics_function: HandleMetrics | None = None,
    init_function: InitFunction | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    forward_step_eval: ForwardStep | None = None,
) -> torch.nn.Module:
    """Trains a model with the flags of `get_args` and returns it. Calling it again resumes the run.

    The functions receive `args` unchanged. On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C the process saves its step and
    exits.

    Args:
        args: The Namespace of `get_args`, or of a parser with `add_training_args`.
        model_cls: A model, or a class, which is called with `args` if its first parameter has that name.
        forward_step_function: `f(data_iterator, model, args, timers)` returns a loss, or `(loss, {name: metric})`, and
            calls `next(data_iterator)` once, which returns one micro-batch on the device. A metric is one number, or
            one per sample; a metric called loss is ignored.
        create_dataset_function: `f(path, args)` returns the dataset of a path of `--train-data`, `--valid-data` or
            `--test-data`.
        handle_metrics_function: `f({name: tensor over all samples})` returns the final metrics of an evaluation. A
            metric that is one number per batch is repeated for each sample.
        init_function: `f(args, model)` changes the model once before training.
        collate_fn: `f(samples)` returns a batch; the default stacks samples that are dicts or tuples.
        forward_step_eval: Replaces the forward step in evaluations.
    """
    given = locals()
    for role, arguments in _ARGUMENTS.items():
        if given[role] is not None or role in ("forward_step_function", "create_dataset_function"):
            reject_wrong_call(given[role], arguments, role=role)
    shorten_tracebacks()
    show_log_unless_configured()
    config = config_of(args)
    flags = with_defaults(args)
    if (
        flags.mode == "finetune"
        and flags.load is not None
        and not flags.fresh
        and is_load_obsolete(Path(flags.load), config)
    ):
        flags.load = None

    class GivenFunctions(FunctionTrainer):
        functions = UserFunctions(flags=flags, **given)

    if flags.mode == "inference":
        return _infer(GivenFunctions, config, flags.load)
    copies = flags.mode == "pretrain" and flags.load is not None and processes.rank_and_size().rank == 0
    with copied_start(Path(flags.load), config) if copies else nullcontext():
        model, _ = run_experiment(
            config, trainer=GivenFunctions, fresh=flags.fresh, accept_changes=flags.accept_changes
        )
    return model


class FunctionTrainer(Trainer):
    """A trainer whose forward is the user's forward step; training_main creates a subclass with the functions."""

    functions: ClassVar[UserFunctions | None] = None

    @classmethod
    def build_task(cls, build: Builder) -> Task:
        """Returns the task that builds the model and the datasets with the user's functions."""
        functions = cls._given()
        return FunctionsTask(functions) if functions.handle_metrics_function is None else MeasuredTask(functions)

    @classmethod
    def build_collator(cls, build: Builder) -> Any:
        """Returns the user's collate_fn, or the default one."""
        collate = cls._given().collate_fn
        if collate is None:
            return build.collator()
        num_micro_batches = build.config.trainer.gradient_accumulation_steps or 1
        if num_micro_batches == 1 or hasattr(collate, "split"):
            return collate
        return partial(check_can_split, collate, num_micro_batches)

    @classmethod
    def _given(cls) -> UserFunctions:
        if cls.functions is None:
            raise ConfigError(
                "This run was created by training_main, whose functions are not in the config. Call training_main with "
                "the same arguments; --mode inference evaluates and returns the trained model."
            )
        return cls.functions

    def post_init(self) -> None:
        """Creates the timers of forward steps."""
        self.timers = Timers()

    def forward(self, **batch: Any) -> Any:
        """Returns the loss and metrics of the user's forward step."""
        return self.forward_batch(batch)

    def forward_batch(self, batch: Any) -> Any:
        """Returns the loss and metrics of the user's forward step, for a batch of any kind."""
        given, is_training = self._given(), self.eval_name is None
        function = (None if is_training else given.forward_step_eval) or given.forward_step_function
        call = (self.model, given.args, self.timers)
        return run_step(function, batch, *call, num_samples=self.batch.num_samples, is_training=is_training)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns a batch's loss and metrics; for handle_metrics_function, each metric has one value per sample."""
        logs = super().eval_step(batch)
        given = self._given()
        if given.handle_metrics_function is None or not self.batch.num_samples:
            return logs
        return per_sample(logs, self.batch.num_samples, given.forward_step_eval or given.forward_step_function)

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Returns the logs of a set without timers."""
        return {
            name: value for name, value in super().eval_end(aggregated).items() if not name.startswith(_TIMER_PREFIX)
        }


class FunctionsTask(Task):
    """Builds the model and the datasets with the user's functions."""

    def __init__(self, functions: UserFunctions) -> None:
        self._functions = functions
        self._data = FunctionData(functions.create_dataset_function, functions.args, functions.flags)

    def build_model(self) -> torch.nn.Module:
        """Returns the model, with weights of --load and the changes of init_function."""
        given = self._functions
        return make_model(given.model_cls, given.args, given.flags, given.init_function)

    def build_dataset(self, split: str) -> Any:
        """Returns the set train, valid or test, or None."""
        return self._data.dataset(split)


class MeasuredTask(FunctionsTask):
    """Collects the metrics of all samples and calls handle_metrics_function with them."""

    def aggregate_logs(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Adds a batch's values, which have one entry per sample."""
        state = {} if state is None else state
        for name, values in outputs.items():
            if isinstance(values, torch.Tensor | list):
                state.setdefault(name, []).append(values)
        return state

    def reduce_aggregated_logs(self, state: Any, step: int) -> dict[str, Any]:
        """Calls handle_metrics_function with the metrics over all samples."""
        handle = self._functions.handle_metrics_function
        assert handle is not None
        return final_metrics(handle, handle({name: self._concatenate(name, values) for name, values in state.items()}))

    def _concatenate(self, name: str, values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [item for each in values for item in each]
        shapes = {tuple(each.shape[1:]) for each in values}
        if len(shapes) > 1:
            raise TrainwrightError(
                f"The metric {name} has rows of shapes {' and '.join(map(str, sorted(shapes)))} in different batches, "
                "which cannot be concatenated. Pad them to one shape.",
                where=location_of(self._functions.forward_step_eval or self._functions.forward_step_function),
            )
        return torch.cat(values)


def _infer(trainer_class: type[FunctionTrainer], config: RunConfig, load: str | None) -> torch.nn.Module:
    """Evaluates the sets with loaded weights and returns the model; does not train or write."""
    with start_up():
        trainer = build_evaluator(config, trainer_class)
        # Without --load the weights are those of the run.
        logs = evaluate_checkpoint(trainer, sets_of(trainer), "latest" if load is None else None)
        if logs:
            logger.info("%s", ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))
        return trainer.model.eval()
