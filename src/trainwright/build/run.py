"""From a RunConfig to a trainer that is ready to run: every part in order, then resume.

components.py builds single parts, data.py loaders, parallelize.py places the model on its ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainwright.anomaly.detection import AnomalyWatch
from trainwright.autotune.activation_checkpointing import settle_activation_checkpointing, wants_budget
from trainwright.autotune.micro_batch import settle_micro_batch
from trainwright.backends import Backend, pick_backend
from trainwright.build.components import Build, describe_dtypes
from trainwright.build.data import Loaders, describe_size, limits
from trainwright.build.parallelize import ParallelizedModel, parallelize_model, reject_own_steps
from trainwright.checkpoint import folder as run_folders
from trainwright.checkpoint.listing import checkpoints_location
from trainwright.checkpoint.remote_files import is_address
from trainwright.checkpoint.remote_store import open_store
from trainwright.checkpoint.resume import changed_settings, reject_changes, reject_unknown_origin
from trainwright.config import BatchPlan, Component, RunConfig, micro_batch_alone, resolve_batch, resolve_mesh
from trainwright.config.component import type_of
from trainwright.data.order import mix_seed
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.stream_loader import EvaluationData
from trainwright.errors import ConfigError
from trainwright.events import EventStorage
from trainwright.loop.checkpointing import restore_checkpoint
from trainwright.loop.compiled_forward import reject_modes
from trainwright.loop.graph_step import reject_unrecorded
from trainwright.loop.task import Task
from trainwright.loop.trainer import Builder, Trainer, TrainerContext
from trainwright.loop.update import LossScale, ScheduledOptimizer, Updater, persistent_buffers
from trainwright.models.pretrained_facts import PretrainedFacts, read_facts, write_facts
from trainwright.parallel import processes
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.processes import facts_of
from trainwright.registry import resolve as registry
from trainwright.registry.builtin import BUILT_INS
from trainwright.writers.json_lines import cut_back

logger = logging.getLogger(__name__)

IN_CODE = "in_code"
"""The trainer's option that holds the name of a class which nothing finds again."""
_FREE_METHODS = {"build_hooks", "build_writers"}
"""What may change between two starts of a run: it leaves the mathematics alone. A hook's state is asked for by name."""


class GivenTrainer(Trainer):
    """Stands in a config for a trainer that was given in code. The model is the config's, so that it can be loaded."""

    @classmethod
    def build_eval_data(cls, build: Builder) -> Mapping[str, Any]:
        """Rejects: the trainer's own methods would be missing in a training, and in an evaluation."""
        _reject_trainer(build)


class GivenTrainerWithModel(GivenTrainer):
    """Stands for one that makes the model as well."""

    @classmethod
    def build_model(cls, build: Builder) -> torch.nn.Module:
        """Rejects: nobody knows the model."""
        _reject_trainer(build)


class GivenTask(Task):
    """Stands in a config for a task that was given in code. The model is the config's, so that it can be loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def build_metrics(self) -> dict[str, Any]:
        """Rejects: the task's own methods would be missing in a training, and in an evaluation."""
        self._reject()

    def _reject(self) -> NoReturn:
        short = self._name.rpartition(".")[2]
        raise ConfigError(
            f"task: that of this run was given in code ({self._name}), and no config tells how it was made. Give it "
            f"again: run_experiment(config, task={short}(…)); or name it in the config, with its arguments: "
            f"task: {{type: file.py:{short}}}."
        )


class GivenTaskWithModel(GivenTask):
    """Stands for one that makes the model as well."""

    def build_model(self) -> torch.nn.Module:
        """Rejects: nobody knows the model."""
        self._reject()


def recorded(config: RunConfig, trainer_class: type[Trainer] | None, task: Task | None = None) -> RunConfig:
    """Returns the config with the class and the task that are used in place of its own; None: its own is used."""
    values: dict[str, Any] = {}
    if trainer_class is not None and not _is_the_config_s(config, trainer_class):
        words, name = _words_of(trainer_class, config), None
        if words is None:
            makes_model = trainer_class.build_model.__func__ is not Trainer.build_model.__func__  # type: ignore[attr-defined]  # of class methods
            words = _reference(GivenTrainerWithModel if makes_model else GivenTrainer)
            name = _reference(trainer_class).replace(":", ".")
        values["trainer.type"] = words
        if name is not None or IN_CODE in config.trainer.options:
            values[f"trainer.{IN_CODE}"] = name
    component = component_of(task, config)
    if component is not None and config.task is None:
        values["task"] = component
    return config.derive(values) if values else config


def unnamed_trainer(config: RunConfig, trainer_class: type[Trainer]) -> str | None:
    """Returns what a class is called that trains a run beside its config; None where the config names it."""
    name = trainer_named_in(recorded(config, trainer_class))
    return None if name == trainer_named_in(config) else name


def component_of(task: Task | None, config: RunConfig) -> Component | None:
    """Returns the section that stands for a task: its class where that has no constructor; else only its name."""
    if task is None or type(task) is Task:
        return None
    kind = type(task)
    words = _words_of(kind, config) if kind.__init__ is Task.__init__ else None
    if words is not None:
        return Component(words)
    stands_in = GivenTask if kind.build_model is Task.build_model else GivenTaskWithModel
    return Component(_reference(stands_in), name=_reference(kind).replace(":", "."))


def is_found_again(config: RunConfig) -> bool:
    """Does the config find the run's trainer and task?"""
    return config.trainer.options.get(IN_CODE) is None and (config.task is None or not _stands_in(config.task))


def trainer_named_in(config: RunConfig) -> str:
    """Returns what the config says of its trainer, for messages."""
    return str(config.trainer.options.get(IN_CODE) or config.trainer.type)


def task_named_in(config: RunConfig) -> str:
    """Returns what the config says of its task, for messages."""
    if config.task is None:
        return "the default"
    return str(config.task.arguments["name"]) if _stands_in(config.task) else config.task.type


def _stands_in(task: Component) -> bool:
    return task.type in (_reference(GivenTask), _reference(GivenTaskWithModel))


def _is_the_config_s(config: RunConfig, trainer_class: type[Trainer]) -> bool:
    """Does the config name this class already, one that has only other hooks and writers, or the API that made it?"""
    try:
        found = registry.find("trainer", config.trainer.type, project_dir=config.project_dir)
    except ConfigError:
        return False
    if not isinstance(found, type):
        return False
    if not issubclass(trainer_class, found):
        return False
    if _reference(trainer_class) == _reference(found):  # itself, or with a task that it was given (main.py)
        return True
    between = trainer_class.__mro__[: trainer_class.__mro__.index(found)]
    own = {name for each in between for name in vars(each) if not name.startswith("__")}
    return own <= _FREE_METHODS or found.__module__.startswith("trainwright.api.")


def _words_of(kind: type, config: RunConfig) -> str | None:
    """Returns the words by which a later process finds a class; None where none would."""
    reference = _reference(kind)
    for name, built_in in (*BUILT_INS["trainer"].items(), *BUILT_INS["task"].items()):
        if built_in == reference:
            return name
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        return None
    words = type_of(kind)
    file, _, name = words.rpartition(":")
    if kind.__module__ == "__main__" and not _may_be_imported(file):
        return None
    if file.endswith(".py") and Path(file).is_relative_to(config.project_dir):
        return f"{Path(file).relative_to(config.project_dir).as_posix()}:{name}"  # the folder may be moved
    return words


def _may_be_imported(file: str) -> bool:
    """Can this program's file be read for its classes, without running the program once more?"""
    try:
        return "__main__" in Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False  # a notebook, or text that came through a pipe


def _reference(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _reject_trainer(build: Builder) -> NoReturn:
    name = str(build.config.trainer.options.get(IN_CODE))
    short = name.rpartition(".")[2]
    raise ConfigError(
        f"trainer: that of this run was given in code ({name}), where nothing finds it again: inside of a function, in "
        'a notebook, or in a program without `if __name__ == "__main__":`. Give it again: '
        f"run_experiment(config, trainer={short}); or move it to the top level of a file of its own.",
        where=build.config.origin("trainer.type"),
    )


# Keep the randomness of the model, of the other parts and of steps apart.
_BUILD_STREAM, _PARTS_STREAM, _RANK_STREAM = 0xB17D, 0x9A47, 0x4A4C


def build_trainer(
    config: RunConfig,
    trainer_class: type[Trainer] | None = None,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    evaluates: bool = True,
) -> Trainer:
    """Builds a trainer that is ready to `train()`: at step 0, or where the run folder's newest checkpoint is.

    `fresh` sets an earlier run of that name aside; `accept_changes` goes on although settings that change
    the mathematics differ; without `evaluates` the evaluation sets are left alone.
    `trainer_class` is used instead of the config's, and config.yaml stays as it is: environment.json names the class.
    """
    config, backend, ranks = _join(config)
    folder = run_folders.run_folder(config)
    kept = None if fresh else _kept_facts(config, folder, ranks)

    def assemble_alone(trial: RunConfig, trial_folder: Path) -> Trainer:
        return assemble(trial, trainer_class, backend, Ranks(), trial_folder, kept=kept, evaluates=False)[0]

    going_on = None if fresh else folder
    if wants_budget(config):
        config = settle_activation_checkpointing(config, assemble_alone, backend=backend, ranks=ranks, folder=going_on)
    if config.trainer.micro_batch_size == "auto":
        _reject_auto(config, ranks)
        config = settle_micro_batch(config, assemble_alone, backend=backend, ranks=ranks, folder=going_on)
    trainer, build = assemble(config, trainer_class, backend, ranks, folder, kept=kept, evaluates=evaluates)
    # Only now is the folder touched: a config with a mistake in it sets nothing aside and leaves nothing behind.
    step, saved = _find_checkpoint(trainer, fresh=fresh, accept_changes=accept_changes)
    if step is None and kept is not None:
        # No checkpoint is intact: the run begins again, with the weights of the pretrained folder.
        trainer, build = assemble(config, trainer_class, backend, ranks, folder, evaluates=evaluates)
    if step is not None:
        restore_checkpoint(trainer, step, keep_settings=accept_changes)
        _realign(trainer, config, always=accept_changes)
        _go_on(trainer, saved)
    if ranks.is_first and not trainer.is_finished:
        if build.pretrained_facts is not None and build.pretrained_facts != kept:
            write_facts(folder, build.pretrained_facts)
        given = None if trainer_class is None else unnamed_trainer(trainer.config, trainer_class)
        run_folders.save_settings(folder, trainer.config, backend.describe(), trainer=given)
    ranks.barrier()
    _introduce(trainer)
    return trainer


def _reject_auto(config: RunConfig, ranks: Ranks) -> None:
    """Rejects to look for a micro-batch alone where a rank has only a part of the model."""
    if ranks.mesh.is_split:
        axes = ", ".join(f"{axis} {size}" for axis, size in ranks.mesh.sizes.items() if size > 1)
        raise ConfigError(
            f"trainer.micro_batch_size: auto is found on one rank alone, but the mesh ({axes}) splits the model. Give "
            "a number; `trainwright estimate` says what fits.",
            where=config.origin("trainer.micro_batch_size"),
        )


def _introduce(trainer: Trainer) -> None:
    """Says in a few lines what will run, and where."""
    assert trainer.train_data is not None
    batch, num_parameters = trainer.context.batch, sum(each.numel() for each in trainer.model.parameters())
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
    sets = {**trainer.eval_data, **({"test": trainer.context.test_data} if trainer.context.test_data else {})}
    if sets:
        logger.info("Evaluates %s", ", ".join(f"{name} ({describe_size(each)})" for name, each in sets.items()))
    logger.info(
        "%d steps of %d samples (%d × %d micro-batches); run folder %s",
        trainer.max_steps,
        batch.global_batch_size,
        batch.micro_batch_size,
        batch.gradient_accumulation_steps * trainer.ranks.mesh.num_data_ranks,
        trainer.folder,
    )


def sets_of(trainer: Trainer) -> dict[str, EvaluationData]:
    """Returns the evaluation sets of a run by name, the test set included."""
    test = trainer.context.test_data
    return dict(trainer.eval_data) if test is None else {**trainer.eval_data, test.name: test}


def build_evaluator(config: RunConfig, trainer_class: type[Trainer] | None = None) -> Trainer:
    """Builds a trainer without training data, which can `evaluate()`; loads no checkpoint and writes no file."""
    config, backend, ranks = _join(config)
    folder = run_folders.run_folder(config)
    kept = _kept_facts(config, folder, ranks)
    return assemble(config, trainer_class, backend, ranks, folder, kept=kept, for_training=False)[0]


def build_model(config: RunConfig, *, folder: Path | None = None) -> torch.nn.Module:
    """Builds the model alone, as the run's trainer and task would, in the run's randomness; loads no checkpoint.

    `folder` is the run folder, where it is not where the config says. The caller's generators are left as they were.
    """
    folder = folder or run_folders.run_folder(config)
    with preserve_generators():
        seed_generators(mix_seed(config.seed, _BUILD_STREAM))
        build = Build(config, folder=folder, kept=_kept_facts(config, folder, Ranks()))
        trainer_class = build.trainer_class()
        build.take_trainer(trainer_class)
        build.take_task(trainer_class.build_task(build))
        return trainer_class.build_model(build)


def _join(config: RunConfig) -> tuple[RunConfig, Backend, Ranks]:
    """Meets the other ranks, and takes the run's name from the first: each may have made one of its own clock."""
    where = config.origin("runtime.device")
    backend = pick_backend(config.runtime.device, local_rank=processes.local_rank(), where=where)
    if config.runtime.deterministic:
        backend.repeat_bits()
    backend.claim()
    axes = resolve_mesh(config, processes.world_size())
    reject_modes(config, axes)
    facts = facts_of(config) if processes.world_size() > 1 else None
    ranks = processes.join(axes, collectives=backend.collectives, device_type=backend.device.type, facts=facts)
    reject_unrecorded(config, ranks)
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
    for_training: bool = True,
    evaluates: bool = True,
) -> tuple[Trainer, Build]:
    """Builds every part in order: task, model, data, optimizers, hooks, trainer. The trainer's config is resolved."""
    _seed_everything(backend, mix_seed(config.seed, _BUILD_STREAM))
    build = Build(config, ranks=ranks, folder=folder, kept=kept)
    trainer_class = trainer_class or build.trainer_class()
    build.take_trainer(trainer_class)
    task = trainer_class.build_task(build)
    build.take_task(task)
    parallelized = _build_model(trainer_class, task, build, backend, ranks)
    batch = _batch_of(config, ranks.mesh.num_data_ranks, for_training=for_training)
    loaders = Loaders(config, batch, trainer_class.build_collator(build), ranks, folder)
    train_data, max_steps = None, 0
    if for_training:
        train_data, max_steps = loaders.for_training(trainer_class.build_train_data(build))
        config = build.config = _resolved(config, batch, max_steps)
    eval_sets = trainer_class.build_eval_data(build)
    eval_data = {name: loaders.for_evaluation(name, each) for name, each in eval_sets.items()}
    test = build.test_data()
    if not evaluates:
        eval_data, test = {}, None
    optimizers = _by_name(trainer_class.build_optimizers(build, parallelized.model), ranks.mesh) if for_training else {}
    context = TrainerContext(
        backend=backend,
        ranks=ranks,
        batch=batch,
        max_steps=max_steps,
        updater=_updater(config, parallelized, optimizers, build, batch, max_steps, backend, ranks),
        storage=EventStorage(max_steps=max_steps or None),
        hooks=trainer_class.build_hooks(build),
        writers=trainer_class.build_writers(build) if for_training else [],
        folder=folder,
        store=open_store(checkpoints_location(folder, config)),
        metrics=build.metrics(task, backend.device),
        test_data=None if test is None else loaders.for_evaluation("test", test),
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
        checkpoint_exporter=None,  # what it did is a setting, checkpoint.keep_best
        context=context,
    )
    # From here on ranks draw different numbers.
    _seed_everything(backend, mix_seed(config.seed, _RANK_STREAM, ranks.mesh.data_rank))
    return trainer, build


def _build_model(
    trainer_class: type[Trainer], task: Task, build: Build, backend: Backend, ranks: Ranks
) -> ParallelizedModel:
    """Builds the model, equal on all ranks or on the first for all, and places what each keeps of it on its device."""
    model = trainer_class.build_model(build)
    if ranks.mesh.size("pipeline") > 1:
        reject_own_steps(trainer_class, task, model, build.config, ranks.mesh)
    parallelized = parallelize_model(
        model, ranks, build.config, backend.device, first_has_weights=build.first_has_weights
    )
    # A start that loads weights draws fewer numbers than one that builds the model for a checkpoint, and a rank that
    # is sent them draws none; what is built next must not know.
    _seed_everything(backend, mix_seed(build.config.seed, _PARTS_STREAM))
    return parallelized


def _kept_facts(config: RunConfig, folder: Path, ranks: Ranks) -> PretrainedFacts | None:
    """What the pretrained folder told an earlier start, where a checkpoint has the weights by now; else None.

    The first rank looks, and all ranks get its answer.
    """
    if config.model is None or "pretrained" not in config.model.reserved:
        return None
    found: PretrainedFacts | None = None
    failure: Exception | None = None
    if ranks.is_first:
        try:
            if open_store(checkpoints_location(folder, config)).steps():
                found = read_facts(folder)
        except Exception as error:
            failure = error
    found, failure = ranks.broadcast((found, failure))
    if failure is not None:
        raise failure
    return found


def _resolved(config: RunConfig, batch: BatchPlan, max_steps: int) -> RunConfig:
    """The config with its derived values written in: what the run's config.yaml holds."""
    place = config.checkpoint.folder
    return config.derive(
        {
            # In full: the run is found from anywhere.
            "checkpoint.folder": place if place is None or is_address(place) else str(Path(place).absolute()),
            "trainer.max_steps": max_steps,
            "trainer.global_batch_size": batch.global_batch_size,
            "trainer.micro_batch_size": batch.micro_batch_size,
        }
    )


def _batch_of(config: RunConfig, num_data_ranks: int, *, for_training: bool) -> BatchPlan:
    """The batch sizes; an evaluation on another number of ranks than the training needs no arithmetic."""
    if for_training:
        return resolve_batch(config, num_data_ranks)
    micro = micro_batch_alone(config)
    return BatchPlan(micro * num_data_ranks, micro, 1)


def _by_name(optimizers: Any, mesh: Mesh) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name; those that report numbers of all parameters know the ranks with other layers."""
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
    backend: Backend,
    ranks: Ranks,
) -> Updater:
    schedules = build.schedules(optimizers)
    return Updater(
        {name: ScheduledOptimizer(optimizer, schedules[name]) for name, optimizer in optimizers.items()},
        global_batch_size=batch.global_batch_size,
        max_steps=max_steps,
        ranks=ranks,
        max_grad_norm=config.trainer.max_grad_norm,
        max_grad_value=config.trainer.max_grad_value,
        loss_scale=LossScale(backend.device) if config.runtime.precision == "fp16" else None,
        watch=AnomalyWatch(
            config.anomalies, device=backend.device, rank=ranks.rank, is_recorded=config.runtime.mode == "graph"
        ),
        buffers=persistent_buffers(parallelized.model),
        sync=parallelized.sync,
        pipeline=parallelized.pipeline(batch.gradient_accumulation_steps),
    )


def _find_checkpoint(trainer: Trainer, *, fresh: bool, accept_changes: bool) -> tuple[int | None, RunConfig | None]:
    """Prepares the run folder; returns the step to go on from and the config it was trained with.

    Rejects changed settings. The first rank looks, and all ranks get its answer.
    """
    step: int | None = None
    saved: RunConfig | None = None
    failure: Exception | None = None
    if trainer.ranks.is_first:
        try:
            run_folders.FolderLock(trainer.folder).reject_if_held()  # train() takes it
            aside = run_folders.set_aside(trainer.folder) if fresh else None
            if aside is not None:
                logger.info("The earlier run was set aside: %s", aside)
            run_folders.prepare(trainer.folder, where=trainer.config.origin("output_dir"))
            run_folders.claim_checkpoints(trainer.config, fresh=fresh)
            trainer.context.store.clean()
            step = trainer.context.store.newest_intact()
            saved = run_folders.read_config(trainer.folder)
            if step is not None and saved is None and trainer.config.checkpoint.folder and not accept_changes:
                reject_unknown_origin(trainer.context.store.path(step), trainer.folder)
            if step is not None and saved is not None:
                if not accept_changes:
                    reject_changes(saved, trainer.config, trainer.folder)
                for name, (then, now) in changed_settings(saved, trainer.config).items():
                    logger.info("Accepted from step %d on: %s: %r → %r", step, name, then, now)
            if step is None:
                cut_back(trainer.folder, 0)  # lines of a run that died before its first checkpoint
        except Exception as error:
            failure = error
    step, saved, failure = trainer.ranks.broadcast((step, saved, failure))
    if failure is not None:
        raise failure
    return step, saved


def _realign(trainer: Trainer, config: RunConfig, *, always: bool) -> None:
    """Counts the steps anew for a run that goes on after a ragged end, or (`always`) with another batch size."""
    data = trainer.train_data
    assert data is not None
    if always or data.places < trainer.step * data.global_batch_size:
        max_steps, _ = limits(config, data, steps_done=trainer.step)
        trainer.max_steps = trainer.storage.max_steps = trainer.context.updater.max_steps = max_steps
        trainer.config = trainer.config.derive({"trainer.max_steps": max_steps})


def _go_on(trainer: Trainer, saved: RunConfig | None) -> None:
    """Cuts the log back to the restored step, and says from where and with which rates the run goes on."""
    step = trainer.step
    renamed = {"name": trainer.config.name, "output_dir": trainer.config.output_dir}
    if saved is None or saved.derive(renamed) != trainer.config:
        trainer.ended_under = 0  # stopped then, but perhaps not with the settings of now
    if trainer.ranks.is_first:
        # A step that was saved before it was written is written again, so its lines go too.
        cut_back(trainer.folder, trainer.step - 1 if trainer.has_unfinished_step else trainer.step)
    logger.info("Resumed from %s, step %d of %d", trainer.context.store.path(step), step, trainer.max_steps)
    then = saved.trainer.max_steps if saved is not None else None
    if then is not None and then != trainer.max_steps:
        for name, entry in trainer.context.updater.optimizers.items():
            before, now = (entry.rate(step, limit) for limit in (then, trainer.max_steps))
            logger.info("max_steps %d → %d: the next rate of %s: %g → %g", then, trainer.max_steps, name, before, now)
