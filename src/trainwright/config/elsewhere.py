"""Options of other trainers and the settings of the same meaning: Hugging Face's, Lightning's, Accelerate's.

Errors about unknown settings use them, so that a migrated option is answered with the setting's name. Methods and
events of other frameworks are in user_code/methods.py.
"""

from __future__ import annotations

from collections.abc import Mapping

_EVALUATION_PERIOD = "evaluation.every_steps or evaluation.every_epochs"
_MESH = "runtime.mesh, such as {fsdp: -1}"
_SCHEDULE = "trainer.schedule, such as {type: cosine, warmup_steps: 100}"

TRAINER_KEYS_ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "trainer.optimizer.lr",
    "adam_beta1": "trainer.optimizer.betas",
    "adam_beta2": "trainer.optimizer.betas",
    "adam_epsilon": "trainer.optimizer.eps",
    "optim": "trainer.optimizer.type",
    "optim_args": "trainer.optimizer, next to its type",
    "optim_target_modules": "trainer.optimizers",
    "lr_scheduler_type": "trainer.schedule.type",
    "lr_scheduler_kwargs": "trainer.schedule",
    "lr_scheduler": _SCHEDULE,
    "num_train_epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
    "train_batch_size": "trainer.global_batch_size",
    "batch_size": "trainer.global_batch_size",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "auto_find_batch_size": "trainer.micro_batch_size: auto",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "eval_batch_size": "evaluation.batch_size",
    "accumulate_grad_batches": "trainer.gradient_accumulation_steps",
    "gradient_clip_val": "trainer.max_grad_norm",
    "gradient_clip_algorithm": "trainer.max_grad_norm, or max_grad_value to clip values",
    "label_smoothing_factor": "trainer.loss, such as {type: cross_entropy, label_smoothing: 0.1}",
    "logging_strategy": "log.every_steps or log.every_epochs",
    "logging_steps": "log.every_steps",
    "log_every_n_steps": "log.every_steps",
    "logging_dir": "writers, such as [console, json, tensorboard]",
    "save_strategy": "checkpoint.every_steps or checkpoint.every_epochs",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "save_only_model": "checkpoint.contents: weights",
    "enable_checkpointing": "checkpoint.every_steps",
    "load_best_model_at_end": "checkpoint.keep_best",
    "metric_for_best_model": "checkpoint.keep_best.metric",
    "greater_is_better": "checkpoint.keep_best.mode",
    "eval_strategy": _EVALUATION_PERIOD,
    "evaluation_strategy": _EVALUATION_PERIOD,
    "eval_steps": "evaluation.every_steps",
    "val_check_interval": "evaluation.every_steps",
    "check_val_every_n_epoch": "evaluation.every_epochs",
    "limit_train_batches": "trainer.max_steps",
    "limit_val_batches": "evaluation.max_batches",
    "limit_test_batches": "evaluation.max_batches",
    "data_seed": "seed",
    "dataloader_num_workers": "data.num_workers",
    "dataloader_pin_memory": "data.loader.pin_memory",
    "dataloader_prefetch_factor": "data.loader.prefetch_factor",
    "dataloader_multiprocessing_context": "data.loader.multiprocessing_context",
    "dataloader_drop_last": "data.last_batch: drop",
    "group_by_length": "data.group_by_length",
    "train_sampling_strategy": "data.shuffle, data.sampler or data.group_by_length",
    "remove_unused_columns": "data.collator.drop, or let the collator select the fields",
    "fp16": "runtime.precision: fp16",
    "bf16": "runtime.precision: bf16",
    "mixed_precision": "runtime.precision",
    "tf32": "runtime.tf32",
    "torch_compile": "runtime.mode: compile",
    "torch_compile_backend": "runtime.compile_backend",
    "torch_compile_mode": "runtime.compile_mode",
    "full_determinism": "runtime.deterministic",
    "use_cpu": "runtime.device: cpu",
    "no_cuda": "runtime.device: cpu",
    "fsdp": _MESH,
    "fsdp_config": _MESH,
    "deepspeed": _MESH,
    "parallelism_config": _MESH,
    "gradient_checkpointing": "model.activation_checkpointing",
    "gradient_checkpointing_kwargs": "model.activation_checkpointing",
    "activation_checkpointing": "model.activation_checkpointing",
    "use_liger_kernel": "model.kernels",
    "report_to": "writers",
    "run_name": "name",
    "output_dir": "output_dir, next to trainer",
    "default_root_dir": "output_dir, next to trainer",
}
"""As options of a custom trainer they are rejected too, because nothing would read them."""

OPTIONS_ELSEWHERE: Mapping[str, str] = {
    "lr": "trainer.optimizer.lr",
    "weight_decay": "trainer.optimizer.weight_decay",
    "warmup_steps": "trainer.schedule.warmup_steps",
    "warmup_ratio": "trainer.schedule.warmup_fraction",
    "momentum": "trainer.optimizer.momentum",
    "label_smoothing": "trainer.loss, such as {type: cross_entropy, label_smoothing: 0.1}",
    "seed": "seed, next to trainer",
    "precision": "runtime.precision",
    "accelerator": "runtime.device",
    "strategy": _MESH,
    "deterministic": "runtime.deterministic",
    "logger": "writers",
    "callbacks": "hooks",
    "profiler": "hooks, such as [{type: profiler}]",
}
"""Further options, which a custom trainer may define itself."""

KEYS_WITHOUT_SETTING: Mapping[str, str] = {
    **dict.fromkeys(
        ("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "The same command resumes the run, with its data position and the state of its hooks",
    ),
    **dict.fromkeys(("devices", "num_nodes", "num_processes"), "Start the processes with --nproc or torchrun"),
    "fast_dev_run": "Pass --fast-dev-run to trainwright train",
    "num_sanity_val_steps": "trainwright train --fast-dev-run tries the evaluation first",
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "trainwright export RUN --push owner/name uploads the model"),
    **dict.fromkeys(
        ("average_tokens_across_devices", "ddp_find_unused_parameters", "use_distributed_sampler", "even_batches"),
        "The run does this without a setting",
    ),
    "split_batches": "trainer.global_batch_size counts the samples of all ranks",
    "logging_first_step": "With log.every_steps: 1 every step has a line",
    "logging_nan_inf_filter": "A loss that is not finite is logged unchanged; anomalies.non_finite sets the response",
    "detect_anomaly": "A loss that is not finite is reported with its batch; anomalies.non_finite sets the response",
}
"""Options that no setting corresponds to, and what to do instead."""

_GENERAL_KEYS = ("devices", "num_nodes", "num_processes", "detect_anomaly")
"""Those of them that a user's trainer may have as its own options."""


def advice_elsewhere(key: str, *, is_own: bool = False) -> str | None:
    """Returns the sentence that answers an option of another trainer; None for other keys.

    With `is_own` the key is an option of a custom trainer, which may have names such as `devices` itself.
    """
    if key in KEYS_WITHOUT_SETTING and not (is_own and key in _GENERAL_KEYS):
        return f"{KEYS_WITHOUT_SETTING[key]}."
    setting = TRAINER_KEYS_ELSEWHERE.get(key) or (None if is_own else OPTIONS_ELSEWHERE.get(key))
    return None if setting is None else f"Set {setting}."
