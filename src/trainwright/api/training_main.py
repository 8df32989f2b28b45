"""`training_main`: SwissArmyTransformer's entry point. Functions and a Namespace become one Trainer and one Task."""

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
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from trainwright.api.arguments import (
    DECAY_STYLES,
    FACTS,
    MODES,
    PARTS,
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
from trainwright.checkpoint.folder import CONFIG_FILE, ENVIRONMENT_FILE, find_run, read_config, run_folder
from trainwright.checkpoint.listing import CHECKPOINTS, checkpoints_location
from trainwright.checkpoint.manifest import MANIFEST
from trainwright.checkpoint.remote_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.config import Node, Origin, RunConfig
from trainwright.config.problems import nearest
from trainwright.config.yaml_text import absolute
from trainwright.data.fetch import has_index, is_stream
from trainwright.data.mix import mix
from trainwright.data.split import sizes_by_ratio, split
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError, shorten_tracebacks
from trainwright.events import Mean, get_event_storage
from trainwright.log import show_log
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


class Timer:
    """One stopwatch. It measures the host: what a device still has to do when `stop` is called is not waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Begins a stretch."""
        if self._started is not None:
            raise TrainwrightError(f"timers({self._name!r}) runs already. Stop it first.", where=caller())
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Ends the stretch and puts its seconds among the step's events."""
        if self._started is None:
            raise TrainwrightError(f"timers({self._name!r}) does not run. Start it first.", where=caller())
        seconds, self._started = time.perf_counter() - self._started, None
        self._seconds += seconds
        get_event_storage().put_scalar(f"time/{self._name}", seconds)

    def reset(self) -> None:
        """Forgets all stretches, also one that has begun."""
        self._started, self._seconds = None, 0.0

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds of all stretches since the last reset."""
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds


class Timers:
    """The stopwatches by name: `timers("data loader").start()`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns the stopwatch of that name, a new one at first."""
        return self._timers.setdefault(name, Timer(name))


ForwardStep = Callable[[Iterator[Any], torch.nn.Module, argparse.Namespace, Timers], Any]


class OneBatch(Iterator[Any]):
    """The data_iterator of one call: it has one micro-batch. The next one is for the next call."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.is_taken = False

    def __next__(self) -> Any:
        if self.is_taken:
            raise TrainwrightError(
                "A forward step takes one batch, but next(data_iterator) is called again. For larger batches raise "
                "--batch-size or --gradient-accumulation-steps.",
                where=caller(),
            )
        self.is_taken = True
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
    """Calls a forward step and returns (loss, metrics), or an object with a loss, as the loop reads it."""
    iterator = OneBatch(batch)
    returned = function(iterator, model, args, timers)
    if not iterator.is_taken:
        raise TrainwrightError(
            f"{name_of(function)} took no batch, which would count as trained on. Call next(data_iterator) once.",
            where=location_of(function),
        )
    if isinstance(returned, Mapping) or (hasattr(returned, "loss") and not isinstance(returned, torch.Tensor)):
        _reject_without_loss(function, returned, batch, model)
        return returned
    loss, metrics = _read(function, returned)
    if is_training:
        loss = _spoiled(loss, metrics)
        metrics = _averaged(function, metrics, num_samples)
    return loss, metrics


def _read(function: ForwardStep, returned: Any) -> tuple[torch.Tensor | Mean, dict[str, Any]]:
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not _is_loss(loss) or not isinstance(metrics, Mapping):
        raise _no_loss(function, _describe(returned))
    return loss, {name: value for name, value in metrics.items() if name != "loss"}


def _reject_without_loss(function: ForwardStep, returned: Any, batch: Any, model: torch.nn.Module) -> None:
    """Rejects outputs of which the loop can take no loss: neither theirs nor one that the model's criterion makes."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned.loss
    if _is_loss(loss):
        return
    has_labels = isinstance(batch, Mapping) and batch.get("labels") is not None
    if loss is None and has_labels and getattr(model, "criterion", None) is not None:
        return
    shown = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else ""
    what = f"{_describe(returned)}{f' with {shown}' * bool(shown)}"
    raise _no_loss(function, f"{what}, but no loss" if loss is None else f"{what}, whose loss is {_describe(loss)}")


def _is_loss(loss: Any) -> bool:
    return isinstance(loss, Mean) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)


def _no_loss(function: ForwardStep, what: str) -> TrainwrightError:
    return TrainwrightError(
        f"{name_of(function)} returned {what}. Return a loss, which is one number in a tensor, or "
        "(loss, {name: metric}).",
        where=location_of(function),
    )


def _averaged(function: ForwardStep, metrics: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns the metrics of a training step: of one a sample the mean, as in an evaluation.

    Several values a sample are for handle_metrics_function alone; what has another length is rejected here already,
    and not first in an evaluation, hours later.
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
        f"{name_of(function)}: the metric {name} is {_describe(value)}, and the batch has {num_samples} samples. "
        "Return one number, or a tensor with one row for each sample.",
        where=location_of(function),
    )


def _spoiled(loss: torch.Tensor | Mean, metrics: Mapping[str, Any]) -> torch.Tensor | Mean:
    """Returns the loss, as nan where a metric is not finite: the update is then skipped, on all ranks together.

    Computed on the device, so that nothing waits for it.
    """
    finite: torch.Tensor | bool = True
    for value in metrics.values():
        number = value.total if isinstance(value, Mean) else value
        if isinstance(number, torch.Tensor) and number.is_floating_point():
            finite = torch.isfinite(number.detach()).all() & finite
        elif isinstance(number, Real) and not math.isfinite(number):
            finite = False
    if finite is True:
        return loss
    total = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(total, torch.Tensor):
        return loss
    spoiled = torch.where(torch.as_tensor(finite, device=total.device), total, math.nan)
    return Mean(spoiled, loss.count) if isinstance(loss, Mean) else spoiled


def per_sample(logs: Mapping[str, Any], num_samples: int, function: ForwardStep) -> EvalLogs:
    """Gives each metric one entry a sample: a number is repeated, and what has another length is rejected.

    A Mean knows its own weight and is averaged beside them.
    """
    spread = EvalLogs()
    spread.outputs = getattr(logs, "outputs", None)
    for name, value in logs.items():
        if name == "loss" or isinstance(value, Mean):
            spread[name] = value
        elif isinstance(value, Real):
            spread[name] = torch.full((num_samples,), float(value))
        elif isinstance(value, torch.Tensor) and value.ndim == 0:
            spread[name] = value.expand(num_samples)
        elif isinstance(value, torch.Tensor | list) and len(value) == num_samples:
            spread[name] = value
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            spread[name] = value.reshape(()).expand(num_samples)
        else:
            raise _wrong_length(function, name, value, num_samples)
    return spread


def final_metrics(function: Callable[..., Any], final: Any) -> dict[str, Any]:
    """Reads what handle_metrics_function returned: one number a name."""
    if not isinstance(final, Mapping):
        problem = f"{name_of(function)} returned {_describe(final)}. Return the final metrics by name."
        raise TrainwrightError(problem, where=location_of(function))
    for name, value in final.items():
        is_number = isinstance(value, Real | Mean) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not isinstance(name, str) or not is_number:
            raise TrainwrightError(
                f"{name_of(function)}: the final metric {name!r} is {_describe(value)}. Return one number for each.",
                where=location_of(function),
            )
    return dict(final)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


class CutBatches:
    """Calls a collate_fn and rejects a batch with an object in it that cannot be cut."""

    def __init__(self, collate: Callable[[list[Any]], Any], num_micro_batches: int) -> None:
        self._collate = collate
        self._num_micro_batches = num_micro_batches

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch of the samples."""
        batch = self._collate(samples)
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, (torch.Tensor, *SCALARS)):
                raise DataError(
                    f"{name_of(self._collate)} returned a batch with a {type(leaf).__name__}, which cannot be cut into "
                    f"the {self._num_micro_batches} micro-batches of --gradient-accumulation-steps: return tensors, "
                    f"texts and "
                    "numbers in dicts, lists or tuples, or give it a method `split(batch, n)`.",
                    where=location_of(self._collate),
                )
        return batch


def cut_batches(collate: Callable[[list[Any]], Any], num_micro_batches: int) -> Callable[[list[Any]], Any]:
    """Returns the collate_fn as it is where nothing is cut, or where it says itself how to."""
    return collate if num_micro_batches == 1 or hasattr(collate, "split") else CutBatches(collate, num_micro_batches)


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


def reject_wrong_functions(functions: Mapping[str, Any]) -> None:
    """Rejects a function that does not take what it is called with; `functions` are training_main's, by their names."""
    for role, arguments in CALLED_WITH.items():
        function = functions.get(role)
        if function is not None or role in _REQUIRED:
            reject_wrong_call(function, arguments, role=role)


TRAINER = "trainwright.api.training_main:FunctionTrainer"

_KEPT_FLAGS: Mapping[str, str] = {
    "train_data": "--train-data",
    "train_data_weights": "--train-data-weights",
    "split": "--split",
}
"""Flags that no section of the config holds, and that change what is learned."""

MAX_SKIPPED_UPDATES = 100


def config_of(args: argparse.Namespace) -> RunConfig:
    """Returns the config of the run that the flags describe."""
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
            # Made by create_dataset_function, not from the config.
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
        "log": {"every_steps": _given("--log-interval", flags.log_interval)},
        "runtime": _runtime(flags),
        # As there: an update with a loss or metric that is not finite is left out, on all ranks together.
        "anomalies": {"non_finite": "skip", "max_anomalies": MAX_SKIPPED_UPDATES},
    }
    return RunConfig.from_dict(settings, where=Origin.parse(caller()))


def _given(flag: str, value: Any) -> Node:
    """Returns a setting that remembers the flag which gave it, for errors."""
    return Node(value, Origin.parse(caller(), flag))


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


def _runtime(flags: argparse.Namespace) -> dict[str, Any]:
    precision = "fp16" if flags.fp16 else "bf16" if flags.bf16 else "fp32"
    runtime: dict[str, Any] = {
        "device": _given("--device", str(flags.device).partition(":")[0]),
        "precision": _given("--fp16 and --bf16", precision),
    }
    if flags.zero_stage:
        runtime["mesh"] = _given("--zero-stage", {"fsdp": -1})
        # Of stages 1 and 2 the parameters stay whole between a forward and its backward.
        runtime["reshard_after_forward"] = _given("--zero-stage", flags.zero_stage == max(ZERO_STAGES))
    return runtime


def _kept_arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the user's own arguments, those that YAML can hold, and the flags that have no section."""
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
    if flags.mode not in MODES:
        problems.append(f"--mode: {flags.mode!r} is none of {', '.join(MODES)}.")
    if flags.lr_decay_style not in DECAY_STYLES:
        problems.append(f"--lr-decay-style: {flags.lr_decay_style!r} is none of {', '.join(DECAY_STYLES)}.")
    if flags.zero_stage not in ZERO_STAGES:
        problems.append(f"--zero-stage: {flags.zero_stage!r} is none of 0, 1, 2 and 3.")
    if flags.fp16 and flags.bf16:
        problems.append("--fp16 and --bf16 are both given. Keep one of them.")
    if flags.train_iters is None and flags.epochs is None and flags.mode != "inference":
        problems.append("Neither --train-iters nor --epochs is given: nobody knows when the run ends. Give one.")
    if flags.checkpoint_num_layers > 1:
        problems.append(
            f"--checkpoint-num-layers: {flags.checkpoint_num_layers}, but layers are recomputed one at a time, which "
            "needs the least memory while one of them is. Leave it out."
        )
    if flags.fresh and flags.load is not None and flags.mode == "pretrain":
        problems.append(
            "--fresh starts over, but --load in --mode pretrain goes on from what it names. Leave one out, or take "
            "its weights alone with --mode finetune."
        )
    if problems:
        raise ConfigError(" ".join(problems), where=caller())


def _reject_misspelt(args: argparse.Namespace) -> None:
    """Rejects what is almost a flag in a Namespace made by hand, which lacks that flag: it would have no effect."""
    given = vars(args)
    for name in given.keys() - {*flag_names(), *FACTS}:
        meant = nearest(name, [flag for flag in flag_names() if flag not in given], cutoff=0.8)
        if meant is not None:
            raise ConfigError(
                f"args.{name}: there is no such flag. Did you mean {meant}? An argument of your own may have this name "
                f"where args has {meant} too, as those of get_args() do.",
                where=caller(),
            )


NOTE = "begun_from.json"
"""In the run folder: what --load named, and the step that was copied."""


def is_spent(load: Path, config: RunConfig) -> bool:
    """Is what --load names gone, and needed no more, because the run has a checkpoint of its own to go on from?"""
    if load.exists():
        return False
    return open_store(checkpoints_location(run_folder(config), config)).newest_intact(set_aside=False) is not None


@contextmanager
def begun_from(load: Path, config: RunConfig) -> Iterator[None]:
    """Lets a run without a checkpoint begin with a copy of another run's: all of its state, and its settings.

    If what is done within fails before the run has begun, the copy goes.
    """
    folder = absolute(run_folder(config))
    _begin(load, folder)
    try:
        yield
    except BaseException:
        _discard_copy(folder)
        raise


def _begin(load: Path, folder: Path) -> None:
    _discard_copy(folder)
    note = _read_note(folder)
    own = open_store(folder / CHECKPOINTS).steps()
    if own and note is not None and note["load"] == str(absolute(load)):
        logger.info("--load %s: the run has begun from it, and goes on from step %d.", load, own[-1])
        return
    store, step = find_checkpoint(load)
    source = Path(str(store.path(step)))
    if source.parent == folder / CHECKPOINTS:
        return  # the run's own: it goes on from there anyway
    if own:
        begun = "at step 0" if note is None else f"with {note['load']}"
        raise CheckpointError(
            f"{load} has no effect, for {folder} has begun {begun} and is at step {own[-1]}. Leave it out to go on "
            "from there, or give the run another --experiment-name.",
            where=Origin.parse(caller(), "--load"),
        )
    if not source.is_dir():
        problem = f"{source} lies on no disk of this machine. Copy it here, or name a copy of it."
        raise CheckpointError(problem, where=Origin.parse(caller(), "--load"))
    _copy(load, source, folder, step)
    logger.info("The run begins with a copy of %s", source)


def _copy(load: Path, source: Path, folder: Path, step: int) -> None:
    """Copies a checkpoint under another name and renames it, so that a run that dies meanwhile finds none."""
    staging = folder / CHECKPOINTS / f".copying-{source.name}"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    # The note and the settings come first: a checkpoint without them could be anybody's.
    note = {"load": str(absolute(load)), "step": step}
    (folder / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    (folder / ENVIRONMENT_FILE).unlink(missing_ok=True)  # of one that died before its first checkpoint
    shutil.copy2(find_run(load)[0] / CONFIG_FILE, folder / CONFIG_FILE)
    staging.rename(folder / CHECKPOINTS / source.name)


def _discard_copy(folder: Path) -> None:
    """Takes a copy away from which no run has begun: one that has says where, in environment.json."""
    note = _read_note(folder)
    if note is None or (folder / ENVIRONMENT_FILE).exists():
        return
    store = open_store(folder / CHECKPOINTS)
    if store.steps() == [note["step"]]:
        store.delete(note["step"])
        (folder / CONFIG_FILE).unlink(missing_ok=True)
    (folder / NOTE).unlink()
    with suppress(OSError):  # there may be more in them
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
        raise CheckpointError(f"{path} is damaged. Delete it to go on with the run as it is.") from error


CreateDataset = Callable[[Any, argparse.Namespace], Any]


class FunctionData:
    """Makes the sets train, valid and test when they are asked for; each path is given to the function once."""

    def __init__(self, create: CreateDataset, args: argparse.Namespace, flags: argparse.Namespace) -> None:
        self._create = create
        self._args = args
        self._flags = flags
        self._ratios = read_ratios(flags.split)
        self._cut: dict[str, dict[str, Any]] | None = None
        self._reject_contradictions()

    def dataset(self, part: str) -> Any:
        """Returns a set, or None where neither a path nor the split gives one."""
        if self._ratios is not None and (part == "train" or self._is_cut_off(part)):
            sources = self._cut_sources()[part]
        else:
            sources = self._sources(getattr(self._flags, f"{part}_data"))
        if not sources:
            return None
        if len(sources) == 1:
            return next(iter(sources.values()))
        weights = self._flags.train_data_weights if part == "train" else None
        shares = None if weights is None else dict(zip(sources, weights, strict=True))
        return mix(sources, shares, run_seed=self._flags.seed)

    def _is_cut_off(self, part: str) -> bool:
        number = PARTS.index(part)
        return self._ratios is not None and 0 < number < len(self._ratios) and self._ratios[number] > 0

    def _sources(self, paths: Any) -> dict[str, Any]:
        """Returns the dataset of each path, by the path; one that is given twice has a number the second time."""
        sources: dict[str, Any] = {}
        for path in as_list(paths):
            name = str(path)
            while name in sources:
                name += "#2"
            sources[name] = self._checked(self._create(path, self._args))
        return sources

    def _cut_sources(self) -> dict[str, dict[str, Any]]:
        """Cuts each path's dataset by itself, so that every one is in every part."""
        if self._cut is None:
            assert self._ratios is not None
            self._cut = {part: {} for part in PARTS}
            for name, whole in self._sources(self._flags.train_data).items():
                if is_stream(whole) or hasattr(type(whole), "make_order"):
                    raise ConfigError(
                        f"--split: {name} is a stream or a mixture, which is not cut. Give --valid-data.",
                        where=location_of(self._create),
                    )
                sizes = sizes_by_ratio(len(whole), self._ratios)
                for part, cut in zip(PARTS, split(whole, sizes, seed=self._flags.seed), strict=False):
                    if len(cut):
                        self._cut[part][name] = cut
            for part in PARTS[1 : len(self._ratios)]:
                if not self._cut[part] and self._is_cut_off(part):
                    logger.warning("--split: there are too few samples for a set %s: there is none.", part)
        return self._cut

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
                f"--train-data-weights: there are {len(weights)} weights for {len(paths)} paths of --train-data. "
                "Give one for each.",
                where=caller(),
            )
        for part in PARTS[1:]:
            if self._is_cut_off(part) and getattr(flags, f"{part}_data"):
                raise ConfigError(
                    f"--{part}-data and --split {flags.split} both give the set {part}. Leave one out, or cut off "
                    "no such part: --split 1.",
                    where=caller(),
                )
        if not paths and flags.mode != "inference":
            problem = "--train-data: there is none. Give the path that create_dataset_function reads."
            raise ConfigError(problem, where=caller())
        if flags.mode == "inference":
            for flag in (flag for flag in ("--fresh", "--accept-changes") if getattr(flags, attribute_of(flag))):
                problem = f"{flag}: has no effect, for --mode inference trains nothing. Leave it out."
                raise ConfigError(problem, where=caller())
        else:
            self._warn_of_idle_flags()

    def _warn_of_idle_flags(self) -> None:
        """Says which flags have no effect here. They are no mistake: scripts give one line of flags to many runs."""
        flags = self._flags
        sets = [part for part in PARTS[1:] if self._is_cut_off(part) or getattr(flags, f"{part}_data")]
        needed = {"--eval-interval": "valid" in sets, "--eval-iters": sets, "--eval-batch-size": sets}
        idle = {flag: "without a set to evaluate. Give --valid-data or --split" for flag in needed if not needed[flag]}
        if getattr(self._args, "load", None) is None and flags.mode == "finetune":
            idle["--mode"] = "as finetune without --load: the model begins as it was made"
        if len(as_list(flags.train_data)) == 1:
            idle["--train-data-weights"] = "on one path"
        for flag, why in idle.items():
            if getattr(flags, attribute_of(flag)) is not None:
                logger.warning("%s: has no effect %s.", flag, why)


InitFunction = Callable[[argparse.Namespace, torch.nn.Module], Any]


def make_model(
    model_cls: Any, args: argparse.Namespace, flags: argparse.Namespace, init_function: InitFunction | None
) -> torch.nn.Module:
    """Returns the model as it is just before training; a checkpoint of the run itself is restored after this."""
    model = model_cls.train() if isinstance(model_cls, torch.nn.Module) else _constructed(model_cls, args)
    if flags.load is not None and flags.mode == "finetune":
        load_into(model, Path(flags.load), strict=False)
    if init_function is not None:
        init_function(args, model)
    if flags.load is not None and flags.mode == "inference":
        load_into(model, Path(flags.load), strict=True)
    disable_untrainable_params(model)
    if flags.checkpoint_activations:
        _recompute(model)
    return model


def _constructed(model_cls: Any, args: argparse.Namespace) -> torch.nn.Module:
    if not callable(model_cls):
        problem = f"model_cls is {model_cls!r}. Give a class, a function that makes a model, or a model."
        raise ConfigError(problem, where=caller())
    given = (args,) if _takes_args(model_cls) else ()
    try:
        inspect.signature(model_cls).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"{name_of(model_cls)} is called with {'args' if given else 'nothing'}, and that does not fit: {error}. "
            "Call its first parameter args, give the others defaults, or pass a model that is made already.",
            where=location_of(model_cls),
        ) from error
    except ValueError:
        """Python knows no signature of it: it will say itself what it lacks."""
    model = model_cls(*given)
    if not isinstance(model, torch.nn.Module):
        problem = f"{name_of(model_cls)} made a {type(model).__name__}, which is no torch.nn.Module."
        raise ConfigError(problem, where=location_of(model_cls))
    return model


def _takes_args(model_cls: Any) -> bool:
    """Is the first parameter called args? `*args` is not: it stands for any."""
    first = next(iter((parameters_of(model_cls) or {}).values()), None)
    return first is not None and first.name == "args" and first.kind is not first.VAR_POSITIONAL


def _recompute(model: torch.nn.Module) -> None:
    names = list(_layers(model))
    if not names:
        raise ConfigError(
            f"--checkpoint-activations: {type(model).__name__} has no ModuleList of layers that could be recomputed. "
            "Leave it out, or keep the layers in one.",
            where=caller(),
        )
    recompute_layers(model, names)


def _layers(module: torch.nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the names of the members of the outermost ModuleLists."""
    for name, child in module.named_children():
        if isinstance(module, torch.nn.ModuleList) and type(child).forward is not torch.nn.Module.forward:
            yield f"{prefix}{name}"
        else:
            yield from _layers(child, f"{prefix}{name}.")


def load_into(model: torch.nn.Module, path: Path, *, strict: bool) -> None:
    """Gives a model the weights of a run, of one of its checkpoints, or of a folder of safetensors.

    Without `strict` a model may have other parts, such as a new head: what is missing or too much is said. A file
    that has nothing of the model is rejected all the same.
    """
    if _holds_weights_alone(path):
        key_map = type(model).key_map() if isinstance(model, Model) else None
        missing = load_weights(model, path, key_map=key_map, strict=strict).missing
    else:
        store, step = find_checkpoint(path)
        missing = tuple(model.state_dict().keys() - store.read_split(step, "model").keys())
        if len(missing) < len(model.state_dict()):
            contents.restore_model(store, step, model, strict=strict)
        path = Path(str(store.path(step)))
    if len(missing) == len(model.state_dict()):
        problem = f"{path} holds no weight of {type(model).__name__}. Name another, or leave it out."
        raise CheckpointError(problem, where=Origin.parse(caller(), "--load"))
    logger.info("Loaded the weights of %s", path)


def find_checkpoint(path: Path) -> tuple[AnyStore, int]:
    """Returns where the checkpoint lies that --load names: the newest of a run, or the one itself."""
    if _holds_weights_alone(path):
        raise CheckpointError(
            f"{path} holds weights alone, and --mode pretrain goes on from a whole state. Use --mode finetune.",
            where=Origin.parse(caller(), "--load"),
        )
    folder, step = find_run(path, where=Origin.parse(caller(), "--load"))
    config = read_config(folder)
    assert config is not None  # find_run saw it
    store = open_store(checkpoints_location(folder, config))
    return store, pick_step(store, "latest" if step is None else step, best=None)


def _holds_weights_alone(path: Path) -> bool:
    has_weights = (path / WEIGHTS_FILE).is_file() or (path / INDEX_FILE).is_file()
    return has_weights and not (path / MANIFEST).exists()


SECONDS = "time/"
"""What the names of stopwatches begin with (timers.py)."""

HandleMetrics = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class UserFunctions:
    """What a user hands to training_main, and the Namespace that all of it gets."""

    args: argparse.Namespace
    flags: argparse.Namespace
    """The same with a value for every flag."""
    model_cls: Any
    forward_step: ForwardStep
    forward_step_eval: ForwardStep
    create_dataset: CreateDataset
    handle_metrics: HandleMetrics | None
    init: InitFunction | None
    collate: Callable[[list[Any]], Any] | None


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
    """Trains a model as the flags of `get_args` say, and returns it. Calling it again continues the run.

    `model_cls`: a class, called with `args` if that is its first parameter's name, or a model that exists.
    `forward_step_function(data_iterator, model, args, timers)`: a loss, or (loss, {name: metric}); it calls
    `next(data_iterator)` once, which is one micro-batch on the device. A metric is one number, or one a sample; one
    called loss is left out, for the loss itself has that name.
    `create_dataset_function(path, args)`: the dataset of a path of --train-data, --valid-data or --test-data.
    `handle_metrics_function({name: tensor over all samples})`: the final metrics of an evaluation. A metric that is
    one number for its batch is repeated for each sample of it.
    `init_function(args, model)`: changes the model, once, just before training.
    `collate_fn(samples)`: a batch; without it samples that are dicts or tuples are stacked.
    `forward_step_eval`: what an evaluation calls in place of the forward step.

    `args` is passed on as it is and never changed. A process that is told to leave saves its step and exits.
    """
    reject_wrong_functions(locals())
    shorten_tracebacks()
    show_log()
    config = config_of(args)
    flags = with_defaults(args)
    if flags.mode == "finetune" and flags.load is not None and not flags.fresh and is_spent(Path(flags.load), config):
        flags.load = None

    class GivenFunctions(FunctionTrainer):
        functions = UserFunctions(
            args=args,
            flags=flags,
            model_cls=model_cls,
            forward_step=forward_step_function,
            forward_step_eval=forward_step_eval or forward_step_function,
            create_dataset=create_dataset_function,
            handle_metrics=handle_metrics_function,
            init=init_function,
            collate=collate_fn,
        )

    if flags.mode == "inference":
        return _infer(GivenFunctions, config, flags.load)
    copies = flags.mode == "pretrain" and flags.load is not None and processes.rank_and_size().rank == 0
    with begun_from(Path(flags.load), config) if copies else nullcontext():
        model, _ = run_experiment(
            config, trainer=GivenFunctions, fresh=flags.fresh, accept_changes=flags.accept_changes
        )
    return model


class FunctionTrainer(Trainer):
    """A trainer whose forward is the user's forward step; training_main makes a subclass that has the functions."""

    functions: ClassVar[UserFunctions | None] = None

    @classmethod
    def build_task(cls, build: Builder) -> Task:
        """Returns the task that makes the model and the datasets by the user's functions."""
        functions = cls._given()
        return FunctionsTask(functions) if functions.handle_metrics is None else MeasuredTask(functions)

    @classmethod
    def build_collator(cls, build: Builder) -> Any:
        """Returns the user's collate_fn, or the one that stacks."""
        collate = cls._given().collate
        return (
            build.collator()
            if collate is None
            else cut_batches(collate, build.config.trainer.gradient_accumulation_steps or 1)
        )

    @classmethod
    def _given(cls) -> UserFunctions:
        if cls.functions is None:
            raise ConfigError(
                "This run was made by training_main, whose functions no config holds. Call training_main with the "
                "same arguments; --mode inference evaluates and returns the trained model."
            )
        return cls.functions

    def post_init(self) -> None:
        """Makes the stopwatches that forward steps are given."""
        self.timers = Timers()

    def forward(self, **batch: Any) -> Any:
        """Returns the loss and metrics of the user's forward step."""
        return self.forward_batch(batch)

    def forward_batch(self, batch: Any) -> Any:
        """Returns the loss and metrics of the user's forward step, for a batch of any kind."""
        given, is_training = self._given(), self.eval_name is None
        function = given.forward_step if is_training else given.forward_step_eval
        call = (self.model, given.args, self.timers)
        return run_step(function, batch, *call, num_samples=self.batch.num_samples, is_training=is_training)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns a batch's loss and metrics; for handle_metrics_function, one value a sample of each metric."""
        logs = super().eval_step(batch)
        given = self._given()
        if given.handle_metrics is None or not self.batch.num_samples:
            return logs
        return per_sample(logs, self.batch.num_samples, given.forward_step_eval)

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Returns the logs of a set without the seconds of stopwatches, which measure no model."""
        return {name: value for name, value in super().eval_end(aggregated).items() if not name.startswith(SECONDS)}


class FunctionsTask(Task):
    """Makes the model and the datasets by the user's functions."""

    def __init__(self, functions: UserFunctions) -> None:
        self._functions = functions
        self._data = FunctionData(functions.create_dataset, functions.args, functions.flags)

    def build_model(self) -> torch.nn.Module:
        """Makes or takes the model, and changes it as the flags and the init_function say."""
        given = self._functions
        return make_model(given.model_cls, given.args, given.flags, given.init)

    def build_dataset(self, split: str) -> Any:
        """Returns the set train, valid or test; None where there is none."""
        return self._data.dataset(split)


class MeasuredTask(FunctionsTask):
    """Gathers the metrics of all samples, and lets the user's function make the final ones of them."""

    def aggregate_logs(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Adds a batch's values, which have one entry a sample."""
        state = {} if state is None else state
        for name, values in outputs.items():
            if isinstance(values, torch.Tensor | list):
                state.setdefault(name, []).append(values)
        return state

    def reduce_aggregated_logs(self, state: Any, step: int) -> dict[str, Any]:
        """Calls handle_metrics_function with the metrics over all samples."""
        handle = self._functions.handle_metrics
        assert handle is not None
        return final_metrics(handle, handle({name: self._joined(name, parts) for name, parts in state.items()}))

    def _joined(self, name: str, parts: list[Any]) -> Any:
        if isinstance(parts[0], list):
            return [item for part in parts for item in part]
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise TrainwrightError(
                f"The metric {name} has rows of shapes {' and '.join(map(str, sorted(shapes)))} in different batches, "
                "which make no tensor over all samples. Pad them to one shape.",
                where=location_of(self._functions.forward_step_eval),
            )
        return torch.cat(parts)


def _infer(trainer_class: type[FunctionTrainer], config: RunConfig, load: str | None) -> torch.nn.Module:
    """Evaluates the sets that are given with loaded weights, and returns the model; trains and writes nothing."""
    with start_up():
        trainer = build_evaluator(config, trainer_class)
        # Without --load the weights are the run's own.
        logs = evaluate_checkpoint(trainer, sets_of(trainer), "latest" if load is None else None)
        if logs:
            logger.info("%s", ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))
        return trainer.model.eval()
