"""Builds a trainer from a RunConfig: every object in order, then resumes from a checkpoint.

components.py builds single objects, data.py loaders; parallelize.py shards the model and moves it to its device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch

from trainwright.anomaly.detection import AnomalyDetector
from trainwright.autotune.activation_checkpointing import settle_activation_checkpointing, wants_budget
from trainwright.autotune.micro_batch import settle_micro_batch
from trainwright.backends import Backend, Capture, pick_backend
from trainwright.build.components import Build, describe_dtypes
from trainwright.build.data import Loaders, describe_size, limits, may_make_batches
from trainwright.build.parallelize import ParallelizedModel, parallelize_model, reject_own_steps
from trainwright.checkpoint import contents
from trainwright.checkpoint import run_folder as run_folders
from trainwright.checkpoint.base_weights import BaseWeights, hash_weights, weights_of
from trainwright.checkpoint.folder_lock import FolderLock, set_aside
from trainwright.checkpoint.listing import checkpoints_location
from trainwright.checkpoint.remote_files import is_address
from trainwright.checkpoint.remote_store import open_store
from trainwright.checkpoint.resume import changed_settings, reject_changes, reject_unknown_origin, reject_weights_only
from trainwright.compile.graph import reject_ungraphable
from trainwright.compile.regions import check_mode
from trainwright.config import BatchPlan, Component, RunConfig, micro_batch_alone, resolve_batch, resolve_mesh
from trainwright.config.builtin import BUILT_INS, IN_CODE
from trainwright.config.component import type_of
from trainwright.data.loader import MadeBatches
from trainwright.data.order import mix_seed
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.errors import CheckpointError, ConfigError
from trainwright.events import EventStorage
from trainwright.log import run_log
from trainwright.loop.evaluation import EvaluatedSet
from trainwright.loop.heartbeat import Heartbeat
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer, TrainerContext
from trainwright.loop.update import LossScale, ScheduledOptimizer, Updater, persistent_buffers
from trainwright.models.from_config import pretrained_source
from trainwright.models.pretrained_facts import PretrainedFacts, read_facts, write_facts
from trainwright.models.quantize import count_weights, describe_quantized
from trainwright.optim.device_step import requires_closure, steps_only_whole
from trainwright.parallel import processes
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.processes import facts_of
from trainwright.progress import progress
from trainwright.registry import resolve as registry
from trainwright.registry.trust import MODEL_SECTIONS, reject_untrusted
from trainwright.user_code.locations import caller, is_user_code
from trainwright.user_code.methods import check_model_methods
from trainwright.writers.json_lines import cut_back

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FREE_METHODS = {"build_hooks", "build_writers"}
"""Methods that may differ between two starts of a run, because they do not affect the math."""


def recorded(config: RunConfig, trainer_class: type[Trainer] | None, task: Task | None = None) -> RunConfig:
    """Returns the config with the class and the task that replace its own; None keeps its own."""
    values: dict[str, Any] = {}
    if trainer_class is not None and not _names_trainer(config, trainer_class):
        values["trainer.type"] = _importable_type(trainer_class, config) or _in_code_type(trainer_class)
    component = component_of(task, config)
    if component is not None and config.task is None:
        values["task"] = component
    return config.derive(values) if values else config


def unnamed_trainer(config: RunConfig, trainer_class: type[Trainer]) -> str | None:
    """Returns the name of a class that trains a run whose config names another class; None if the config names this
    one."""
    name = shown_type(recorded(config, trainer_class).trainer)
    return None if name == shown_type(config.trainer) else name


def component_of(task: Task | None, config: RunConfig) -> Component | None:
    """Returns the section for a task: its class if it has no constructor, otherwise only its name."""
    if task is None or type(task) is Task:
        return None
    kind = type(task)
    words = _importable_type(kind, config) if kind.__init__ is Task.__init__ else None
    return Component(words or _in_code_type(kind))


def is_found_again(config: RunConfig) -> bool:
    """Returns True if a later process can build the run's trainer and task from the config."""
    return not config.trainer.type.startswith(IN_CODE) and (
        config.task is None or not config.task.type.startswith(IN_CODE)
    )


def shown_type(section: Any) -> str:
    """Returns the name of a trainer or task section for messages."""
    if section is None:
        return "the default"
    return str(section.type.partition(":")[2] if section.type.startswith(IN_CODE) else section.type)


def _names_trainer(config: RunConfig, trainer_class: type[Trainer]) -> bool:
    """Returns True if the config names this class, a class that differs only in hooks and writers, or its API."""
    try:
        found = registry.find("trainer", config.trainer.type, project_dir=config.project_dir)
    except ConfigError:
        return False
    if not isinstance(found, type) or not issubclass(trainer_class, found):
        return False
    if _reference(trainer_class) == _reference(found):  # itself, or its copy with a task given in code
        return True
    between = trainer_class.__mro__[: trainer_class.__mro__.index(found)]
    own = {name for each in between for name in vars(each) if not name.startswith("__")}
    return own <= _FREE_METHODS or found.__module__.startswith("trainwright.api.")


def _importable_type(kind: type, config: RunConfig) -> str | None:
    """Returns the `type` with which a later process can find a class; None if there is none."""
    reference = _reference(kind)
    for name, built_in in (*BUILT_INS["trainer"].items(), *BUILT_INS["task"].items()):
        if built_in == reference:
            return name
    found: Any = sys.modules.get(kind.__module__)
    for attribute in kind.__qualname__.split("."):
        found = getattr(found, attribute, None)
    if found is not kind:
        return None
    words = type_of(kind)
    file, _, name = words.rpartition(":")
    if kind.__module__ == "__main__":
        try:
            has_guard = "__main__" in Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError):  # a notebook, or text from a pipe
            return None
        if not has_guard:  # importing the file would run the program again
            return None
    if file.endswith(".py") and Path(file).is_relative_to(config.project_dir):
        return f"{Path(file).relative_to(config.project_dir).as_posix()}:{name}"  # the folder may be moved
    return words


def _in_code_type(kind: type[Trainer] | type[Task]) -> str:
    return IN_CODE[is_user_code(kind.build_model)] + _reference(kind).replace(":", ".")


def _reference(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# Separate the randomness of the model, of the other objects and of steps.
_BUILD_STREAM, _PARTS_STREAM, _RANK_STREAM = 0xB17D, 0x9A47, 0x4A4C


def build_trainer(
    config: RunConfig,
    trainer_class: type[Trainer] | None = None,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    evaluates: bool = True,
) -> Trainer:
    """Builds a trainer that is ready to `train()`: at step 0, or at the newest checkpoint of the run folder.

    Args:
        config: The settings of the run.
        trainer_class: Replaces the config's class; config.yaml does not change, and environment.json names the class.
        fresh: Renames the folder of an earlier run of that name.
        accept_changes: Continues even if settings that affect the math differ.
        evaluates: If False, the evaluation sets are not used.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"build_trainer: the config is a {type(config).__name__}. Pass RunConfig.load(FILE), or "
            "RunConfig.from_dict(settings).",
            where=caller(),
        )
    with run_log() as open_logs:
        trainer = _build_trainer(config, trainer_class, fresh=fresh, accept_changes=accept_changes, evaluates=evaluates)
        if not trainer.is_finished:  # a finished run changes nothing, including its log
            open_logs(*trainer.log_files)
    return trainer


def _build_trainer(
    config: RunConfig,
    trainer_class: type[Trainer] | None,
    *,
    fresh: bool,
    accept_changes: bool,
    evaluates: bool,
) -> Trainer:
    run_folders.reject_reserved(config)
    config, backend, ranks = _join(config)
    folder = run_folders.run_folder(config)
    config = config if fresh else _keep_precision(config, folder, backend, ranks)
    _reject_missing_fp8(config, backend)
    kept = None if fresh else _kept_facts(config, folder, ranks)
    referenced = {} if fresh else _referenced_weights(config, folder, ranks)

    def assemble_alone(trial: RunConfig, trial_folder: Path) -> Trainer:
        return assemble(trial, trainer_class, backend, Ranks(), trial_folder, kept=kept, evaluates=False)[0]

    resumed = None if fresh else folder
    if wants_budget(config):
        config = settle_activation_checkpointing(config, assemble_alone, backend=backend, ranks=ranks, folder=resumed)
    if config.trainer.micro_batch_size == "auto":
        if config.trainer.optimizer_in_backward:
            raise ConfigError(
                "trainer.optimizer_in_backward does not work with trainer.micro_batch_size: auto, which may choose "
                "several micro-batches per update. Set micro_batch_size to the size of the batch, or remove "
                "optimizer_in_backward.",
                where=config.origin("trainer.optimizer_in_backward"),
            )
        config = settle_micro_batch(config, assemble_alone, backend=backend, ranks=ranks, folder=resumed)
    options: dict[str, Any] = {"evaluates": evaluates, "referenced": referenced}
    trainer, build = assemble(config, trainer_class, backend, ranks, folder, kept=kept, **options)
    # The folder is not touched before this, so a config with an error does not rename or write anything.
    step, saved = _find_checkpoint(trainer, fresh=fresh, accept_changes=accept_changes)
    if step is None and kept is not None:
        # No checkpoint is intact, so the run starts over with the weights of the pretrained folder.
        trainer, build = assemble(config, trainer_class, backend, ranks, folder, **options)
    if step is not None:
        _on_first_rank(ranks, partial(run_folders.check_frozen_models, folder, build.frozen_digests))
        trainer.restore_checkpoint(step, keep_settings=accept_changes)
        _resume(trainer, config, saved, counts_steps=accept_changes)
        if trainer.has_only_weights and not trainer.is_finished:
            reject_weights_only(trainer.context.store.path(step))
    if ranks.is_first and not trainer.is_finished:
        if build.pretrained_facts is not None and build.pretrained_facts != kept:
            write_facts(folder, build.pretrained_facts)
        if step is None:
            run_folders.write_frozen_models(folder, build.frozen_digests)
        given = None if trainer_class is None else unnamed_trainer(trainer.config, trainer_class)
        run_folders.save_settings(folder, trainer.config, backend.describe(), trainer=given)
    ranks.barrier()
    _log_start(trainer, build)
    return trainer


def build_alone(config: RunConfig, folder: Path) -> Trainer:
    """Builds a trainer for trial steps in this process; restores no state and does not write to `folder`."""
    config, backend, _ = _join(config)
    _reject_missing_fp8(config, backend)
    return assemble(config, None, backend, Ranks(), folder, evaluates=False)[0]


def _reject_missing_fp8(config: RunConfig, backend: Backend) -> None:
    """Raises for a device without fp8."""
    reason = backend.missing_fp8(config.runtime.device) if config.runtime.precision == "fp8" else None
    if reason is not None:
        raise ConfigError(
            "runtime.precision: fp8 needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell), "
            f"but {reason}. Use bf16 or fp32; for tests, runtime.device: cpu computes with the same rounding.",
            where=config.origin("runtime.precision"),
        )


def _log_start(trainer: Trainer, build: Build) -> None:
    """Logs the model, the data and the device of the run, and writes the summary of the model."""
    assert trainer.train_data is not None
    batch, num_parameters = trainer.context.batch_plan, _count_parameters(trainer)
    if trainer.ranks.is_first and not trainer.is_finished:
        run_folders.save_model_summary(trainer.folder, trainer.model, num_parameters)
    axes = " × ".join(f"{axis} {size}" for axis, size in trainer.ranks.mesh.sizes.items() if size > 1)
    processes = f"{trainer.ranks.size} processes ({axes}), " if trainer.ranks.size > 1 else ""
    logger.info(
        "%s: %s parameters%s, %s, %s%s, %s, %s",
        trainer.config.name,
        f"{num_parameters:,}",
        describe_dtypes(trainer.model),
        describe_size(trainer.train_data),
        processes,
        trainer.backend.describe(),
        trainer.config.runtime.precision,
        trainer.config.runtime.mode,
    )
    quantized = describe_quantized(trainer.model)
    if quantized is not None:
        logger.info("%s", quantized)
    if build.fp8_layers is not None:
        logger.info("%s", build.fp8_layers.describe())
    sets = sets_of(trainer)
    if sets:
        logger.info("Evaluates %s", ", ".join(f"{name} ({describe_size(each)})" for name, each in sets.items()))
    sizes = "as many samples as next_train_inputs returns"
    if not batch.varies:
        num_micro_batches = batch.gradient_accumulation_steps * trainer.ranks.mesh.num_data_ranks
        sizes = f"{batch.global_batch_size} samples ({batch.micro_batch_size} × {num_micro_batches} micro-batches)"
    logger.info("%d steps of %s; run folder %s", trainer.max_steps, sizes, trainer.folder)
    max_epochs = trainer.config.trainer.max_epochs
    for rule in trainer.context.freeze_rules:
        limits = {"until_step": (rule.until_step, trainer.max_steps), "until_epoch": (rule.until_epoch, max_epochs)}
        for name, (until, end) in limits.items():
            if until is not None and end is not None and until >= end:
                logger.warning(
                    "model.freeze: %s: %d is not reached, because the run ends at %g: %s stays frozen.",
                    name,
                    until,
                    end,
                    ", ".join(rule.globs),
                )


def _count_parameters(trainer: Trainer) -> int:
    """Returns the number of parameters of the whole model, also in a pipeline stage."""
    own = count_weights(trainer.model)
    pipeline, mesh = trainer.context.updater.pipeline, trainer.ranks.mesh
    if pipeline is None:
        return own
    shared = sum(each.numel() for each, _ in pipeline.tied)  # on two stages
    return sum(trainer.ranks.gather(2 * own - shared)) * mesh.size("pipeline") // trainer.ranks.size // 2


def sets_of(trainer: Trainer) -> dict[str, EvaluatedSet]:
    """Returns the evaluation sets and benchmarks of a run by name, including the test set."""
    test = trainer.test_data
    return trainer.evaluated_sets if test is None else {**trainer.evaluated_sets, test.name: test}


def build_evaluator(config: RunConfig, trainer_class: type[Trainer] | None = None) -> Trainer:
    """Builds a trainer without training data, for `evaluate()`; loads no checkpoint and writes no file."""
    config, backend, ranks = _join(config)
    folder = run_folders.run_folder(config)
    config = _keep_precision(config, folder, backend, ranks)
    kept, referenced = _kept_facts(config, folder, ranks), _referenced_weights(config, folder, ranks)
    return assemble(
        config, trainer_class, backend, ranks, folder, kept=kept, referenced=referenced, for_training=False
    )[0]


def build_model(
    config: RunConfig, *, folder: Path | None = None, trainer_class: type[Trainer] | None = None
) -> torch.nn.Module:
    """Builds only the model, as the run's trainer and task do, with the run's seed; loads no checkpoint.

    `folder` is the run folder if it differs from the config's. The caller's generators are not changed. A trainer or
    task that was passed in code is needed only if it builds the model; pass it as `trainer_class`.
    """
    folder = folder or run_folders.run_folder(config)
    with preserve_generators():
        seed_generators(mix_seed(config.seed, _BUILD_STREAM))
        kept, referenced = _kept_facts(config, folder, Ranks()), _referenced_weights(config, folder, Ranks())
        build = Build(config, folder=folder, kept=kept, referenced=referenced, sections=MODEL_SECTIONS)
        if trainer_class is None:
            trainer_class = Trainer if config.trainer.type.startswith(IN_CODE[0]) else build.trainer_class()
        build.take_trainer(trainer_class)
        is_given = config.task is not None and config.task.type.startswith(IN_CODE[0])
        build.take_task(Task() if is_given else trainer_class.build_task(build))
        return trainer_class.build_model(build)


def build_component(
    config: RunConfig | str | os.PathLike[str], section: str, *, model: torch.nn.Module | None = None
) -> Any:
    """Builds the object of one section without a trainer: `build_component(config, "data.train")`.

    Datasets are processed and split as in the run, and models have its initial weights; the caller's generators are not
    changed. Methods of a trainer or a task that replace a section are not called.

    Args:
        config: A config, or the path of its file.
        section: The dotted name of a component: `data.train`, `data.eval.valid`, `data.collator`, `model`, `task`,
            `trainer.optimizer`, `hooks.0`, …
        model: The model whose parameters an optimizer updates; other sections do not need it.

    >>> from trainwright import RunConfig
    >>> config = RunConfig.from_dict({"model": {"type": "llama", "preset": "tiny"}})
    >>> type(build_component(config, "model")).__name__
    'Llama'
    """
    if not isinstance(config, RunConfig):
        config = RunConfig.load(config)
    sections = ["imports", section]
    if section.startswith("data."):
        needs_train = bool(config.data.cut_off) or section == "data.sampler"
        sections += ["data.process", *(["data.train"] if needs_train else [])]
    with preserve_generators():
        seed_generators(mix_seed(config.seed, _BUILD_STREAM if section == "model" else _PARTS_STREAM))
        return Build(config, sections=sections).component(section, model)


def _join(config: RunConfig) -> tuple[RunConfig, Backend, Ranks]:
    """Joins the other ranks and uses the first rank's name of the run, because a name may contain the time."""
    reject_untrusted(config)
    where = config.origin("runtime.device")
    backend = pick_backend(config.runtime.device, local_rank=processes.local_rank(), where=where)
    if config.runtime.deterministic:
        backend.repeat_bits()
    backend.claim()
    axes = resolve_mesh(config, processes.world_size())
    check_mode(config, axes)
    facts = facts_of(config) if processes.world_size() > 1 else None
    ranks = processes.join(axes, collectives=backend.collectives, device_type=backend.device.type, facts=facts)
    reject_ungraphable(config, ranks)
    name = ranks.broadcast(config.name)
    return config if name == config.name else config.derive({"name": name}), backend, ranks


def _seed_everything(backend: Backend, seed: int) -> None:
    seed_generators(seed)
    backend.seed(seed)


def assemble(
    config: RunConfig,
    trainer_class: type[Trainer] | None,
    backend: Backend,
    ranks: Ranks,
    folder: Path,
    *,
    kept: PretrainedFacts | None = None,
    referenced: Mapping[str, str] = MappingProxyType({}),
    for_training: bool = True,
    evaluates: bool = True,
) -> tuple[Trainer, Build]:
    """Builds every object in order: task, model, data, optimizers, hooks, trainer. The trainer's config is resolved."""
    _seed_everything(backend, mix_seed(config.seed, _BUILD_STREAM))
    build = Build(config, ranks=ranks, folder=folder, kept=kept, referenced=referenced)
    trainer_class = trainer_class or build.trainer_class()
    build.take_trainer(trainer_class)
    task = trainer_class.build_task(build)
    build.take_task(task)
    options, parts = build.options(), dict(trainer_class.build_parts(build))
    makes_batches = may_make_batches(trainer_class, config)
    # Before the model, which may take minutes to read.
    batch = _batch_of(config, ranks.mesh.num_data_ranks, for_training=for_training, makes_batches=makes_batches)
    parallelized, frozen = _build_models(trainer_class, task, build, backend, ranks, for_training=for_training)
    build.fp8_layers = parallelized.fp8
    if for_training:
        inherits = [getattr(trainer_class, name) is getattr(Trainer, name) for name in ("forward", "train_step")]
        calls_model = all(inherits) and type(task).forward is Task.forward and config.trainer.loss is None
        check_model_methods(parallelized.model, calls_model=calls_model)
    config = build.config
    with progress("Building the data"):
        collator = build.name_fields(trainer_class.build_collator(build), trainer_class, parallelized.model)
        dataset = trainer_class.build_train_data(build) if for_training else None
        if makes_batches and dataset is not None:
            makes_batches, batch = False, resolve_batch(config, ranks.mesh.num_data_ranks)
        loaders = Loaders(config, batch, collator, ranks, folder)
        train_data, max_steps = None, 0
        if for_training:
            sampler = None if makes_batches else trainer_class.build_sampler(build, dataset)
            train_data, max_steps = loaders.for_training(dataset, sampler, makes_batches=makes_batches)
            config = build.config = _resolved(config, batch, max_steps)
        eval_sets = trainer_class.build_eval_data(build)
        eval_data = {name: loaders.for_evaluation(name, each) for name, each in eval_sets.items()}
        test = build.test_data()
        if not evaluates:
            eval_data, test = {}, None
        benchmarks = build.benchmarks(parallelized.model) if evaluates else []
    with progress("Building the trainer"):
        optimizers = (
            _by_name(trainer_class.build_optimizers(build, parallelized.model), ranks.mesh) if for_training else {}
        )
        heartbeat, capture = Heartbeat(), Capture()
        updater = _updater(config, parallelized, optimizers, build, batch, max_steps, heartbeat, capture)
        context = TrainerContext(
            backend=backend,
            ranks=ranks,
            batch_plan=batch,
            max_steps=max_steps,
            updater=updater,
            storage=EventStorage(max_steps=max_steps or None, keeps_media=ranks.mesh.is_first_of_stage),
            hooks=trainer_class.build_hooks(build),
            writers=trainer_class.build_writers(build) if for_training else [],
            folder=folder,
            store=open_store(checkpoints_location(folder, config)),
            heartbeat=heartbeat,
            capture=capture,
            metrics=build.metrics(task, backend.device),
            loss=build.loss(backend.device),
            test_data=None if test is None else loaders.for_evaluation("test", test),
            benchmarks={each.name: each for each in benchmarks},
            base=_base_weights(parallelized.model, build, trainer_class, folder),
            recipes=build.recipes,
            freeze_rules=build.freeze_rules(),
            options=options,
            parts=parts,
            frozen_models=frozen,
        )
        if for_training:
            build.reject_unused()
        trainer = trainer_class(
            config=config,
            task=task,
            model=parallelized.model,
            optimizer=optimizers,
            train_dataset=train_data,
            validation_dataset=eval_data,
            context=context,
        )
    # From here on, ranks draw different random numbers.
    _seed_everything(backend, mix_seed(config.seed, _RANK_STREAM, ranks.mesh.data_rank))
    return trainer, build


def _build_models(
    trainer_class: type[Trainer],
    task: Task,
    build: Build,
    backend: Backend,
    ranks: Ranks,
    *,
    for_training: bool = True,
) -> tuple[ParallelizedModel, dict[str, torch.nn.Module]]:
    """Builds the model on every rank, or on the first rank for all; shards it and moves it to the device.

    Also returns the trainer's frozen models by name, sharded in the same way.
    """
    with progress("Building the model"):
        model = trainer_class.build_model(build)
    build.take_model(model)
    build.config = _with_precision(build.config, model, backend, ranks)
    if ranks.mesh.size("pipeline") > 1:
        reject_own_steps(trainer_class, task, model, build.config, ranks.mesh)
    # A frozen copy of the model needs the same numbers.
    _seed_everything(backend, mix_seed(build.config.seed, _BUILD_STREAM))
    frozen = dict(trainer_class.build_frozen_models(build, model))
    build.frozen_digests = _digest_models(frozen, ranks)
    parallelized = parallelize_model(
        model,
        ranks,
        build.config,
        backend.device,
        first_has_weights=build.first_has_weights,
        for_training=for_training,
    )
    for each in frozen.values():
        each.requires_grad_(False).eval()
        is_empty = any(parameter.is_meta for parameter in each.parameters())
        parallelize_model(
            each,
            ranks,
            build.config_of(each),
            backend.device,
            first_has_weights=any(ranks.gather(is_empty)),
            for_training=False,
        )
    # A start that loads weights draws fewer random numbers than one that initializes the model, and a rank that
    # receives weights draws none. The objects that are built next must not depend on that.
    _seed_everything(backend, mix_seed(build.config.seed, _PARTS_STREAM))
    return parallelized, frozen


def _digest_models(models: Mapping[str, torch.nn.Module], ranks: Ranks) -> dict[str, str]:
    """Returns a digest of the weights of each model, which the first rank has in full; collective.

    It is empty for the fake tensors of an estimate.
    """
    found = dict.fromkeys(models, "")
    if ranks.is_first:
        for name, model in models.items():
            weights = weights_of(model)
            if any(type(each.data) is not torch.Tensor for each in weights.values()):
                continue
            hashes = hash_weights(weights)
            found[name] = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    return ranks.broadcast(found)


def _with_precision(config: RunConfig, model: torch.nn.Module, backend: Backend, ranks: Ranks) -> RunConfig:
    """Returns the config with the precision that `auto` selects, the same on every rank.

    A model whose weights are mostly fp64 or fp16 runs without autocast, as with fp32.
    """
    if config.runtime.precision != "auto":
        return config
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    may_autocast = not sizes or sizes.most_common(1)[0][0] in (torch.float32, torch.bfloat16)
    choices = set(ranks.gather(backend.choose_precision() if may_autocast else "fp32"))
    return config.derive({"runtime.precision": choices.pop() if len(choices) == 1 else "fp32"})


def _keep_precision(config: RunConfig, folder: Path, backend: Backend, ranks: Ranks) -> RunConfig:
    """Replaces `auto` by the precision of the run in this folder, if it has checkpoints.

    Raises if the device does not support that precision, because the results would change. fp8 is not kept, because it
    belongs to `runtime.fp8`: resuming without both is a change of settings, which raises.
    """
    if config.runtime.precision != "auto":
        return config

    def read() -> tuple[str, str] | None:
        saved = run_folders.read_config(folder)
        if saved is None or saved.runtime.precision == "fp8":
            return None
        if not open_store(checkpoints_location(folder, config)).steps():
            return None
        return saved.runtime.precision, run_folders.read_device(folder)

    found = _on_first_rank(ranks, read)
    if found is None:
        return config
    precision, device = found
    if not all(ranks.gather(backend.supports_precision(precision))):
        raise ConfigError(
            f"runtime.precision: auto keeps the precision of a run, which is {precision} in {folder} (on {device}), "
            f"but {backend.describe()} does not support it. Resume on another device, or set runtime.precision: "
            f"{backend.choose_precision()} and use --accept-changes.",
            where=config.origin("runtime.precision"),
        )
    if precision != backend.choose_precision():
        logger.info("runtime.precision: auto: %s, as in the earlier start of this run", precision)
    return config.derive({"runtime.precision": precision})


def _base_weights(
    model: torch.nn.Module, build: Build, trainer_class: type[Trainer], folder: Path
) -> BaseWeights | None:
    """Returns the weights that checkpoints may store by reference; None if there are none."""
    section = build.config.model
    if not build.base_hashes or section is None:
        return None
    source = pretrained_source(section, project_dir=Path(build.project_dir))
    rebuild = partial(build_model, build.config, folder=folder, trainer_class=trainer_class)
    return BaseWeights(model, source=source, hashes=build.base_hashes, rebuild=rebuild)


def _kept_facts(config: RunConfig, folder: Path, ranks: Ranks) -> PretrainedFacts | None:
    """Returns the facts of the pretrained folder from an earlier start if a checkpoint has the weights; None
    otherwise."""
    if config.model is None or "pretrained" not in config.model.reserved:
        return None

    def read() -> PretrainedFacts | None:
        return read_facts(folder) if open_store(checkpoints_location(folder, config)).steps() else None

    return _on_first_rank(ranks, read)


def _referenced_weights(config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, str]:
    """Returns the weights that some checkpoint stores by reference to `model.pretrained`, each with its source."""
    if config.model is None or "pretrained" not in config.model.reserved:
        return {}

    def read() -> dict[str, str]:
        store, found = open_store(checkpoints_location(folder, config)), dict[str, str]()
        for step in store.steps():
            with suppress(CheckpointError):  # a damaged one is reported when the run looks for an intact one
                recorded = contents.read_references(store, step)
                found |= dict.fromkeys(recorded.get("hashes", ()), recorded.get("source", ""))
        return found

    return _on_first_rank(ranks, read)


def _on_first_rank(ranks: Ranks, function: Callable[[], T]) -> T:
    """Calls a function on the first rank; returns its result, or raises its error, on every rank. Collective."""
    found: T | None = None
    failure: Exception | None = None
    if ranks.is_first:
        try:
            found = function()
        except Exception as error:
            failure = error
    found, failure = ranks.broadcast((found, failure))
    if failure is not None:
        raise failure
    return cast(T, found)


def _resolved(config: RunConfig, batch: BatchPlan, max_steps: int) -> RunConfig:
    """Returns the config with its derived values, as in the run's config.yaml."""
    folder = config.checkpoint.folder
    sizes = {
        "trainer.global_batch_size": batch.global_batch_size,
        "trainer.micro_batch_size": batch.micro_batch_size,
    }
    return config.derive(
        {
            # Absolute, so that the run is found from any working directory.
            "checkpoint.folder": folder if folder is None or is_address(folder) else str(Path(folder).absolute()),
            "trainer.max_steps": max_steps,
            **({} if batch.varies else sizes),
        }
    )


def _batch_of(config: RunConfig, num_data_ranks: int, *, for_training: bool, makes_batches: bool) -> BatchPlan:
    """Returns the batch sizes; an evaluation may use another number of ranks than the training."""
    if for_training:
        return resolve_batch(config, num_data_ranks, makes_batches=makes_batches)
    micro = micro_batch_alone(config)
    return BatchPlan(micro * num_data_ranks, micro, 1)


def _by_name(optimizers: Any, mesh: Mesh) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizers by name; those that report values over all parameters receive the process group of the
    stages."""
    named = dict(optimizers) if isinstance(optimizers, Mapping) else {"main": optimizers}
    for optimizer in named.values():
        if hasattr(optimizer, "stages"):
            optimizer.stages = mesh.group("pipeline")
    return named


def _updater(
    config: RunConfig,
    parallelized: ParallelizedModel,
    optimizers: Mapping[str, torch.optim.Optimizer],
    build: Build,
    batch: BatchPlan,
    max_steps: int,
    heartbeat: Heartbeat,
    capture: Capture,
) -> Updater:
    schedules, ranks, device = build.schedules(optimizers, max_steps), build.ranks, parallelized.device
    for name, schedule in schedules.items():
        warmup = getattr(schedule, "warmup_steps", 0)
        if isinstance(warmup, int) and warmup >= max_steps and ranks.is_first:
            logger.warning(
                "The schedule of the optimizer %s warms up for %d steps, but the run has %d, so the learning rate does "
                "not reach its full value. Lower warmup_steps.",
                name,
                warmup,
                max_steps,
            )
    for name, optimizer in optimizers.items():
        reject_closure(optimizer, config, ranks.mesh, label=name)
    if config.trainer.optimizer_in_backward and optimizers:
        reject_steps_in_backward(optimizers, config, ranks, batch)
    return Updater(
        {name: ScheduledOptimizer(optimizer, schedules[name]) for name, optimizer in optimizers.items()},
        global_batch_size=batch.global_batch_size,
        max_steps=max_steps,
        ranks=ranks,
        max_grad_norm=config.trainer.max_grad_norm,
        max_grad_value=config.trainer.max_grad_value,
        loss_scale=LossScale(device) if config.runtime.precision == "fp16" else None,
        detector=AnomalyDetector(
            config.anomalies,
            device=device,
            rank=ranks.rank,
            capture=capture if config.runtime.mode == "graph" else None,
        ),
        buffers=persistent_buffers(parallelized.model),
        sync=parallelized.sync,
        pipeline=parallelized.pipeline(batch.gradient_accumulation_steps),
        heartbeat=heartbeat,
        capture=capture,
        steps_in_backward=config.trainer.optimizer_in_backward,
    )


def _find_checkpoint(trainer: Trainer, *, fresh: bool, accept_changes: bool) -> tuple[int | None, RunConfig | None]:
    """Prepares the run folder; returns the step to resume from and the config of that run. Rejects changed settings."""
    config, folder, store = trainer.config, trainer.folder, trainer.context.store

    def find() -> tuple[int | None, RunConfig | None]:
        where = config.origin("output_dir")
        try:
            FolderLock(folder).reject_if_held()  # train() acquires it
            moved = set_aside(folder) if fresh else None
        except OSError as error:
            raise run_folders.unwritable(folder, error, where=where) from error
        if moved is not None:
            logger.info("Moved the earlier run to %s", moved)
        run_folders.prepare(folder, where=where)
        run_folders.claim_checkpoints(config, fresh=fresh)
        store.clean()
        step, saved = store.newest_intact(), run_folders.read_config(folder)
        if step is None:
            cut_back(folder, 0)  # lines of a run that ended before its first checkpoint
            if saved is not None and changed_settings(saved, config):
                run_folders.forget_run_id(folder)
        elif saved is not None:
            if not accept_changes:
                reject_changes(saved, config, folder)
            for name, (before, now) in changed_settings(saved, config).items():
                logger.info("Accepted from step %d: %s: %r → %r", step, name, before, now)
        elif config.checkpoint.folder and not accept_changes:
            reject_unknown_origin(store.path(step), folder)
        return step, saved

    return _on_first_rank(trainer.ranks, find)


def _resume(trainer: Trainer, config: RunConfig, saved: RunConfig | None, *, counts_steps: bool) -> None:
    """Applies changed limits to a restored trainer, and truncates the log to its step.

    The steps are counted again after a short last batch, or (`counts_steps`) with another batch size.
    """
    data, step = trainer.train_data, trainer.step
    assert data is not None
    has_position = not trainer.has_only_weights and not isinstance(data, MadeBatches)
    if has_position and (counts_steps or data.order_position < step * data.global_batch_size):
        trainer.set_max_steps(limits(config, data, steps_done=step)[0])
    renamed = {"name": trainer.config.name, "output_dir": trainer.config.output_dir}
    if saved is None or saved.derive(renamed).masked() != trainer.config.masked():
        trainer.reopen()  # it ended with other settings
    if trainer.ranks.is_first:
        # A step that was saved before it was written is written again, so its lines are removed too.
        cut_back(trainer.folder, step - 1 if trainer.state.has_unfinished_step else step)
    logger.info("Resumed from %s, step %d of %d", trainer.context.store.path(step), step, trainer.max_steps)
    limit = saved.trainer.max_steps if saved is not None else None
    if limit is not None and limit != trainer.max_steps:
        for name, entry in trainer.context.updater.optimizers.items():
            before, now = entry.rate(step, limit), entry.rate(step, trainer.max_steps)
            if before is None or now is None:
                continue
            logger.info("max_steps %d → %d: the next rate of %s: %g → %g", limit, trainer.max_steps, name, before, now)


def reject_closure(optimizer: torch.optim.Optimizer, config: RunConfig, mesh: Mesh, *, label: str) -> None:
    """Raises for an optimizer that recomputes the loss (LBFGS) if this is not supported."""
    if not requires_closure(optimizer):
        return
    problem = None
    if config.runtime.precision == "fp16":
        problem = "the loss scale of fp16 belongs to one backward. Use runtime.precision bf16 or fp32."
    elif config.runtime.mode == "graph":
        problem = "a graph makes one forward and one backward. Use runtime.mode eager or compile."
    elif mesh.is_split:
        problem = "it needs the full gradients, but the model is sharded. Use runtime.mesh.replicate."
    if problem is not None:
        name = type(optimizer).__name__
        where = config.origin("trainer.optimizer" if label == "main" else f"trainer.optimizers.{label}.optimizer")
        raise ConfigError(f"{name} computes the loss several times in a step: {problem}", where=where)


def reject_steps_in_backward(
    optimizers: Mapping[str, torch.optim.Optimizer], config: RunConfig, ranks: Ranks, batch: BatchPlan
) -> None:
    """Raises for `trainer.optimizer_in_backward` with a setting that needs all gradients before a weight changes."""
    trainer, anomalies, mode = config.trainer, config.anomalies, config.runtime.mode
    has_blocks = config.model is not None and "compile_repeated_blocks" in config.model.reserved
    cases = {
        "runtime.mode": (
            mode != "eager" and not has_blocks,
            f"in mode {mode} the forward is compiled as a whole, and all of its gradients are complete at the same "
            "time. Compile block by block with model.compile_repeated_blocks",
        ),
        "several micro-batches": (
            batch.gradient_accumulation_steps > 1,
            "their gradients are accumulated. Set trainer.micro_batch_size to the size of the batch",
        ),
        "trainer.max_grad_norm": (
            trainer.max_grad_norm is not None,
            "clipping needs the norm of all gradients. Remove max_grad_norm",
        ),
        "trainer.max_grad_value": (
            trainer.max_grad_value is not None,
            "gradients are not clamped there. Remove max_grad_value",
        ),
        "runtime.precision": (
            config.runtime.precision == "fp16",
            "fp16 needs to know whether any gradient overflows. Use precision bf16",
        ),
        "runtime.mesh": (
            ranks.size > 1,
            f"gradients are summed over {ranks.size} processes first. Use one process",
        ),
        "anomalies.non_finite": (
            anomalies.non_finite == "skip",
            "whether an update is skipped depends on all gradients. Use raise or rollback",
        ),
        "anomalies.spike": (
            anomalies.spike == "skip",
            "an update cannot be skipped. Use ignore, raise or rollback",
        ),
    }
    problems = [(setting, problem) for setting, (is_set, problem) in cases.items() if is_set]
    for name, optimizer in optimizers.items():
        problem = steps_only_whole(optimizer)
        if problem is not None:
            label = "trainer.optimizer" if name == "main" else f"trainer.optimizers.{name}.optimizer"
            problems.append((label, problem))
    if problems:
        setting, problem = problems[0]
        raise ConfigError(
            f"trainer.optimizer_in_backward does not work with {setting}: {problem}, or remove optimizer_in_backward.",
            where=config.origin("trainer.optimizer_in_backward"),
        )
