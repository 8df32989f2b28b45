"""The table of built-in component names. It contains import paths, so a class is imported only when it is used.

registry/resolve.py turns a name into a class.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_INS: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "trainer": "trainwright.loop.trainer:Trainer",
        "language_model": "trainwright.trainers.language_model:LanguageModelTrainer",
        "masked_language_model": "trainwright.trainers.sequence_to_sequence:MaskedLanguageModelTrainer",
        "classification": "trainwright.trainers.classification:ClassificationTrainer",
        "sequence_to_sequence": "trainwright.trainers.sequence_to_sequence:SequenceToSequenceTrainer",
        "sft": "trainwright.trainers.sft:SFTTrainer",
        "dpo": "trainwright.trainers.dpo:DPOTrainer",
        "reward": "trainwright.trainers.reward:RewardTrainer",
        "distill": "trainwright.trainers.distill:DistillTrainer",
        "grpo": "trainwright.trainers.grpo:GRPOTrainer",
    },
    "model": {
        "llama": "trainwright.models.llama:Llama",
        "gpt2": "trainwright.models.gpt2:GPT2",
        "bert": "trainwright.models.bert:Bert",
        "bert_classifier": "trainwright.models.bert:BertClassifier",
        "vit": "trainwright.models.vit:ViT",
        "t5": "trainwright.models.t5:T5",
        "cnn": "trainwright.models.cnn:CNN",
    },
    "optimizer": {
        "adamw": "trainwright.optim.adamw:AdamW",
        "muon": "trainwright.optim.muon:Muon",
        "lion": "trainwright.optim.lion:Lion",
        "sgd": "torch.optim:SGD",
        "adam": "torch.optim:Adam",
    },
    "schedule": {
        "constant": "trainwright.optim.schedules:Constant",
        "linear": "trainwright.optim.schedules:Linear",
        "cosine": "trainwright.optim.schedules:Cosine",
        "inverse_square_root": "trainwright.optim.schedules:InverseSquareRoot",
        "polynomial": "trainwright.optim.schedules:Polynomial",
        "step": "trainwright.optim.schedules:Step",
        "reduce_on_plateau": "trainwright.optim.torch_schedules:ReduceOnPlateau",
        "warmup_stable_decay": "trainwright.optim.schedules:WarmupStableDecay",
    },
    "dataset": {
        "stdlib_code": "trainwright.data.sources.stdlib_code:StdlibCode",
        "digits": "trainwright.data.sources.digits:Digits",
        "text": "trainwright.data.sources.files:text",
        "json_lines": "trainwright.data.sources.files:json_lines",
        "csv": "trainwright.data.sources.files:csv",
        "parquet": "trainwright.data.sources.parquet:parquet",
        "preferences": "trainwright.data.sources.preferences:preferences",
        "tokens": "trainwright.data.sources.tokens:Tokens",
        "huggingface": "trainwright.data.sources.huggingface:huggingface",
        "mix": "trainwright.data.mix:mix",
        "pack": "trainwright.data.pack:pack",
        "chat": "trainwright.data.sources.chat:chat",
    },
    "collator": {
        "stack": "trainwright.data.collators.stack:Stack",
        "equal_length": "trainwright.data.collators.equal_length:EqualLength",
        "padded": "trainwright.data.collators.padded:Padded",
        "sequence_to_sequence": "trainwright.data.collators.sequence_to_sequence:SequenceToSequence",
        "tokenize": "trainwright.data.collators.tokenize:Tokenize",
        "masked_language_model": "trainwright.data.collators.masked_language_model:MaskedLanguageModel",
        "preferences": "trainwright.data.collators.preferences:Preferences",
        "prompts": "trainwright.data.collators.prompts:Prompts",
        "classification": "trainwright.data.collators.classification:Classification",
        "image": "trainwright.data.collators.image:Image",
    },
    "sampler": {"weighted": "trainwright.data.samplers:WeightedSampler"},
    "hook": {
        "time_steps": "trainwright.hooks.throughput:TimeSteps",
        "ema": "trainwright.hooks.ema:EMA",
        "early_stopping": "trainwright.hooks.early_stopping:EarlyStopping",
        "every": "trainwright.hooks.callback:every_from_config",
        "callback": "trainwright.hooks.callback:callback_from_config",
        "count_progress": "trainwright.hooks.throughput:CountProgress",
        "profiler": "trainwright.hooks.profiler:Profiler",
    },
    "writer": {
        "console": "trainwright.writers.console:ConsoleWriter",
        "json": "trainwright.writers.json_lines:JsonLinesWriter",
        "csv": "trainwright.writers.csv:CsvWriter",
        "tensorboard": "trainwright.writers.tensorboard:TensorBoardWriter",
        "wandb": "trainwright.writers.wandb:WandbWriter",
        "mlflow": "trainwright.writers.mlflow:MlflowWriter",
        "trackio": "trainwright.writers.trackio:TrackioWriter",
    },
    "metric": {
        "accuracy": "trainwright.loop.metrics:Accuracy",
        "top_k_accuracy": "trainwright.loop.metrics:TopKAccuracy",
        "f1": "trainwright.loop.named_metrics:F1",
        "precision": "trainwright.loop.named_metrics:Precision",
        "recall": "trainwright.loop.named_metrics:Recall",
        "auroc": "trainwright.loop.named_metrics:AUROC",
        "perplexity": "trainwright.loop.named_metrics:Perplexity",
        "mse": "trainwright.loop.named_metrics:MeanSquaredError",
        "mae": "trainwright.loop.named_metrics:MeanAbsoluteError",
        "bleu": "trainwright.loop.named_metrics:BLEU",
        "rouge": "trainwright.loop.named_metrics:ROUGE",
    },
    "benchmark": {
        "multiple_choice": "trainwright.benchmarks.multiple_choice:MultipleChoice",
        "generate": "trainwright.benchmarks.generate:Generate",
    },
    "loss": {
        "cross_entropy": "torch.nn.modules.loss:CrossEntropyLoss",
        "bce_with_logits": "torch.nn.modules.loss:BCEWithLogitsLoss",
        "mse": "torch.nn.modules.loss:MSELoss",
        "l1": "torch.nn.modules.loss:L1Loss",
    },
    "reward": {
        "exact_match": "trainwright.trainers.rewards:ExactMatch",
        "pattern": "trainwright.trainers.rewards:Pattern",
        "overlong": "trainwright.trainers.rewards:Overlong",
    },
    "transform": {"timm": "trainwright.data.transforms:timm_transform"},
    "tokenizer": {"auto": "trainwright.data.tokenizer:auto_tokenizer"},
    "task": {"task": "trainwright.loop.task:Task"},
}

IN_CODE = ("in_code:", "in_code_with_model:")
"""Prefixes of the recorded type of a class that was passed in code and that no later process can build.

The name of the class follows. The second prefix means that the class builds the model.
"""

KIND_FOLDERS: Mapping[str, str] = {kind: "losses" if kind == "loss" else f"{kind}s" for kind in BUILT_INS}
"""Each kind of component, and the folder next to the YAML file with the project's components of that kind."""
