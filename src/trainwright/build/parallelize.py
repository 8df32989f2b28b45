"""Shards a model along the mesh and moves each rank's shards to its device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.backends.backend import AUTOCAST_DTYPES
from trainwright.checkpoint.encoding import fill
from trainwright.compile.regions import compile_arguments
from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.models.transformers_models import find_crossings
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.replicate import SentWeights, give_memory, make_equal
from trainwright.user_code.locations import is_user_code

if TYPE_CHECKING:
    from trainwright.models.fp8 import Fp8Layers
    from trainwright.parallel.fully_shard import GradientSync
    from trainwright.parallel.pipeline import Pipeline
    from trainwright.parallel.sharding import ShardingPlan

logger = logging.getLogger(__name__)

_FSDP_SETTINGS = ("gather_precision", "reshard_after_forward", "accumulate_unsharded")
"""Settings that only a sharded run uses."""
MEMORY_KEYS = ("tile", "offload", "activation_checkpointing", "compile_repeated_blocks")
"""Settings of the model that change the memory of a step, but not its results."""


@dataclass(frozen=True)
class ParallelizedModel:
    """A model on its device, the sharding rules, and the object that reduces its gradients."""

    model: torch.nn.Module
    mesh: Mesh
    device: torch.device
    plan: ShardingPlan | None = None
    sync: GradientSync | None = None
    fp8: Fp8Layers | None = None

    def pipeline(self, num_micro_batches: int) -> Pipeline | None:
        """Returns the schedule of micro-batches over stages; None if every rank has all layers."""
        if self.mesh.size("pipeline") == 1:
            return None
        from trainwright.parallel.pipeline import Pipeline

        return Pipeline(self.model, self.mesh, num_micro_batches=num_micro_batches, device=self.device)


def parallelize_model(
    model: torch.nn.Module,
    ranks: Ranks,
    config: RunConfig,
    device: torch.device,
    *,
    first_has_weights: bool = False,
    for_training: bool = True,
) -> ParallelizedModel:
    """Shards a model in place along the mesh and moves its shards to the device; for training, uses fp8 if it is set.

    With `first_has_weights`, the model of every other rank is on the meta device and receives its weights after
    sharding.
    """
    sent = None
    if first_has_weights:
        sent = SentWeights(model, ranks)
    else:
        _reject_meta(model, config)
        make_equal(model, ranks)
    is_empty = first_has_weights and not ranks.is_first
    if for_training and ranks.is_first and ranks.mesh.size("fsdp", "context") == 1:
        _warn_of_fsdp_settings(config)
    fp8 = _use_fp8(model, config, ranks.mesh) if for_training and config.runtime.precision == "fp8" else None
    if ranks.mesh.is_split:
        find_crossings(model, is_on_meta=is_empty, broadcast=ranks.broadcast)
    plan, sync = _split(model, ranks, config, torch.device("meta") if is_empty else device)
    if is_empty:
        give_memory(model, device)
    _move(model, device)
    if sent is not None:
        sent.send_into(model, copy=fill)
    if ranks.mesh.size("pipeline") > 1:
        from trainwright.parallel.pipeline import mark_shared

        mark_shared(model)
    return ParallelizedModel(model, ranks.mesh, device, plan, sync, fp8)


def _reject_meta(model: torch.nn.Module, config: RunConfig) -> None:
    """Raises for a model that was built on the meta device and was not initialized."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, value in tensors if value.is_meta]
    if empty:
        number = f"{len(empty)} of its {len(tensors)} parameters and buffers are"
        raise ConfigError(
            f"{type(model).__name__} is on the meta device and has no values: {number}, among them {empty[0]}. Build "
            'it without torch.device("meta"), or call model.to_empty(device="cpu") and initialize or load its weights.',
            where=config.origin("model"),
        )


def _use_fp8(model: torch.nn.Module, config: RunConfig, mesh: Mesh) -> Fp8Layers:
    """Makes layers of the whole model train in fp8, before a pipeline removes blocks and forwards are wrapped."""
    from trainwright.models.fp8 import use_fp8

    if mesh.size("tensor") > 1:
        raise ConfigError(
            "runtime.precision: fp8 does not support runtime.mesh.tensor, because the scale of a tensor would need the "
            "shards of all ranks. Use fsdp, or precision: bf16.",
            where=config.origin("runtime.precision"),
        )
    settings = config.runtime.fp8
    options = {} if settings is None else settings.to_dict()
    return use_fp8(model, **options, origin=config.origin)


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Moves a model to the device; parameters keep their attributes (`lr_scale`, …), which torch drops for DTensors."""
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    model.to(device)
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes.get(name, {}))


def _split(
    model: torch.nn.Module, ranks: Ranks, config: RunConfig, device: torch.device
) -> tuple[ShardingPlan | None, GradientSync | None]:
    """Shards a model along all axes; returns the rules, and the object that reduces its gradients."""
    mesh = ranks.mesh
    plan = plan_of(model, config, mesh.sizes)
    if plan is not None and ranks.is_first:
        for remark in plan.remarks():
            logger.warning("model.sharding: %s", remark)
    memory = {key: value for key, value in _reserved(config).items() if key in MEMORY_KEYS}
    if mesh.size("pipeline") > 1:
        from trainwright.optim.param_groups import describe_whole
        from trainwright.parallel.pipeline import split_layers

        if memory:
            from trainwright.memory.rewrite import check_memory_settings

            check_memory_settings(model, memory, origin=config.origin)
        whole: Any = describe_whole(model, mesh.size("pipeline"))
        split_layers(model, mesh)
        model.whole = whole  # rules of optimizers and hooks apply to the whole model
    if mesh.size("tensor") > 1:
        from trainwright.parallel.tensor import split_tensors

        assert plan is not None
        split_tensors(model, plan, mesh)
    if mesh.size("context") > 1:
        from trainwright.parallel.context import split_sequences

        split_sequences(model, mesh, where=config.origin("runtime.mesh.context"))
    if memory:
        from trainwright.memory.rewrite import apply_memory_settings

        apply_memory_settings(
            model,
            memory,
            origin=config.origin,
            is_whole=mesh.size("pipeline") == 1,
            compile_arguments=compile_arguments(config),
        )
    sync = None
    if mesh.size("fsdp", "context") > 1:
        from trainwright.parallel.fully_shard import shard_parameters

        data_dim = plan.data_dim if plan is not None else lambda name: None
        sync = shard_parameters(model, mesh, settings=_fsdp_settings(config, mesh), device=device, data_dim=data_dim)
    return plan, sync


def reject_own_steps(
    trainer_class: type[Trainer], task: Task, model: torch.nn.Module, config: RunConfig, mesh: Mesh
) -> None:
    """Rejects a pipeline whose schedule would not call a custom step, or that cannot divide the model."""
    from trainwright.parallel.pipeline import reject_pipeline

    methods: list[tuple[type, str]] = [
        (trainer_class, name) for name in ("forward", "run_forward", "train_step", "eval_step")
    ]
    methods.append((type(task), "forward"))
    own = [
        f"{kind.__name__}.{name}"
        for kind, name in methods
        # Built-in trainers with options compute their losses in forward.
        if is_user_code(getattr(kind, name)) or (name == "forward" and getattr(kind, "options_section", None))
    ]
    where = config.origin("runtime.mesh.pipeline")
    reject_pipeline(model, mesh.size("pipeline"), own_parts=own, where=where)


def plan_of(model: torch.nn.Module, config: RunConfig, sizes: Mapping[str, int]) -> ShardingPlan | None:
    """Returns the sharding rule of each parameter; None if there are no rules and none are needed."""
    setting = _reserved(config).get("sharding")
    if setting is None and sizes["tensor"] == 1:
        return None
    from trainwright.parallel.sharding import packaged_rules, plan_sharding, read_rules

    if setting is None:
        rules = packaged_rules(model)
    else:
        rules = read_rules(setting, project_dir=Path(config.project_dir), origin=config.origin)
    try:
        return plan_sharding(model, rules, sizes)
    except ConfigError as error:
        if error.where is not None:
            raise
        where = config.origin("model.sharding" if setting is not None else "runtime.mesh.tensor")
        raise ConfigError(error.problem, where=where) from error


def _reserved(config: RunConfig) -> Mapping[str, Any]:
    return {} if config.model is None else config.model.reserved


def _fsdp_settings(config: RunConfig, mesh: Mesh) -> Any:
    from trainwright.parallel.fully_shard import SplitSettings

    runtime = config.runtime
    if runtime.accumulate_unsharded and mesh.size("pipeline") > 1:
        raise ConfigError(
            "runtime.accumulate_unsharded: a pipeline reduces gradients with every micro-batch. Remove the setting, or "
            "the pipeline.",
            where=config.origin("runtime.accumulate_unsharded"),
        )
    if runtime.gather_precision == "bf16" and gather_dtype(runtime.precision) is None:
        raise ConfigError(
            f"runtime.gather_precision: bf16 gathers parameters as bf16, but runtime.precision is {runtime.precision}: "
            "layers would get two dtypes. Set runtime.precision: bf16, or remove gather_precision.",
            where=config.origin("runtime.gather_precision"),
        )
    return SplitSettings(
        reshard_after_forward=runtime.reshard_after_forward,
        accumulate_unsharded=runtime.accumulate_unsharded,
        gather_dtype=torch.float32 if runtime.gather_precision == "fp32" else gather_dtype(runtime.precision),
    )


def _warn_of_fsdp_settings(config: RunConfig) -> None:
    """Logs settings of FSDP in a run without it; one file may run on one device and on many, so they do not raise."""
    for name in _FSDP_SETTINGS:
        if getattr(config.runtime, name) != type(config.runtime).model_fields[name].default:
            logger.warning(
                "runtime.%s has no effect, because parameters are not sharded: runtime.mesh.fsdp and "
                "runtime.mesh.context are 1.",
                name,
            )


def gather_dtype(precision: str) -> torch.dtype | None:
    """Returns the dtype in which FSDP gathers parameters in a run of this precision; None: their own.

    Under autocast, matrix products round weights to bf16 anyway. The range of fp16 is too small for some weights.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    return dtype if dtype == torch.bfloat16 else None
