"""What the flags mean for a run: from a Namespace to a RunConfig. The Namespace is read, never changed.

Flags that change the mathematics, and whatever else the user's own parser put into the Namespace, are kept in the
run's config.yaml: a run that goes on with other values is refused by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from trainwright.config import RunConfig
from trainwright.config.problems import nearest
from trainwright.doors.arguments import DECAY_STYLES, FACTS, MODES, ZERO_STAGES, flag_names, with_defaults
from trainwright.errors import ConfigError
from trainwright.parallel import processes
from trainwright.user_code import caller

TRAINER = "trainwright.doors.training_main:FunctionTrainer"

_KEPT_FLAGS = ("train_data", "train_data_weights", "split")
"""Flags that no section of the config holds, and that change what is learned."""

MAX_SKIPPED_UPDATES = 100


def config_of(args: argparse.Namespace) -> RunConfig:
    """Returns the config of the run that the flags describe."""
    flags = with_defaults(args)
    _refuse_misspelt(args)
    _refuse_contradictions(flags)
    max_batches = None if flags.strict_eval else flags.eval_iters
    eval_batch = None if flags.eval_batch_size is None else flags.eval_batch_size * processes.world_size()
    settings: dict[str, Any] = {
        "name": flags.experiment_name,
        "output_dir": flags.save,
        "seed": flags.seed,
        "data": {"workers": flags.num_workers},
        "trainer": _trainer(flags),
        "evaluation": {"every_steps": flags.eval_interval, "max_batches": max_batches, "batch_size": eval_batch},
        "checkpoint": {"every_steps": flags.save_interval, "keep_last": None},
        "log": {"every_steps": flags.log_interval},
        "runtime": _runtime(flags),
        # As there: an update with a loss or metric that is not finite is left out, on all ranks together.
        "incidents": {"non_finite": "skip", "max_incidents": MAX_SKIPPED_UPDATES},
    }
    return RunConfig.from_dict(settings)


def _trainer(flags: argparse.Namespace) -> dict[str, Any]:
    schedule: dict[str, Any] = {"type": flags.lr_decay_style, "warmup_fraction": flags.warmup}
    if flags.lr_decay_style != "constant":
        schedule["minimum"] = flags.lr_decay_ratio
    return {
        "type": TRAINER,
        "max_steps": flags.train_iters,
        "max_epochs": flags.epochs,
        "micro_batch_size": flags.batch_size,
        "accumulation": flags.gradient_accumulation_steps,
        "max_grad_norm": flags.clip_grad or None,
        "optimizer": {"type": "adamw", "lr": flags.lr, "weight_decay": flags.weight_decay},
        "schedule": schedule,
        "arguments": _kept_arguments(flags),
    }


def _runtime(flags: argparse.Namespace) -> dict[str, Any]:
    runtime: dict[str, Any] = {
        "device": str(flags.device).partition(":")[0],
        "precision": "fp16" if flags.fp16 else "bf16" if flags.bf16 else "fp32",
    }
    if flags.zero_stage:
        runtime["mesh"] = {"data": -1}
        # Of stages 1 and 2 the parameters stay whole between a forward and its backward.
        runtime["reshard_after_forward"] = flags.zero_stage == max(ZERO_STAGES)
    return runtime


def _kept_arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the user's own arguments, those that YAML can hold, and the flags that have no section."""
    left_out = {*flag_names(), *FACTS} - {*_KEPT_FLAGS}
    return {name: value for name, value in vars(flags).items() if name not in left_out and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _refuse_contradictions(flags: argparse.Namespace) -> None:
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


def _refuse_misspelt(args: argparse.Namespace) -> None:
    """Refuses what is almost a flag in a Namespace made by hand, which lacks that flag: it would have no effect."""
    given = vars(args)
    for name in given.keys() - {*flag_names(), *FACTS}:
        meant = nearest(name, [flag for flag in flag_names() if flag not in given], cutoff=0.8)
        if meant is not None:
            raise ConfigError(
                f"args.{name}: there is no such flag. Did you mean {meant}? An argument of your own may have this name "
                f"where args has {meant} too, as those of get_args() do.",
                where=caller(),
            )
