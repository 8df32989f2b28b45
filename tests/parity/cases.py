"""What the parity table compares: models, data and layouts, and one run of each on this process's rank.

    python -m tests.parity.cases FOLDER CASE …                                      one process
    torchrun --nproc-per-node 2 -m tests.parity.cases FOLDER CASE …                 two

A CASE is MODEL:DTYPE:LAYOUT. All cases of one world size share a launch, for starting torch costs seconds.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.parallel.mesh import is_split
from trainwright.trainers.language_model import LanguageModelTrainer

NUM_STEPS = 3
GLOBAL_BATCH = 8
LENGTH = 12


@dataclass(frozen=True)
class Model:
    """A shipped model, small, and which axes it can be split along beside replicate and data."""

    section: dict
    axes: tuple = ()
    trainer: str = "trainer"
    optimizer: dict = field(default_factory=lambda: {"type": "adamw", "lr": 1e-3})
    dtypes: tuple = ("float64", "float32")


TEXT = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64}
MODELS = {
    "llama": Model(
        {"type": "llama", **TEXT, "num_kv_heads": 2, "tie_embeddings": False},
        ("tensor", "context", "pipeline"),
        "language_model",
    ),
    "llama-tied": Model({"type": "llama", **TEXT}, ("tensor", "context", "pipeline"), "language_model"),
    "gpt2": Model({"type": "gpt2", **TEXT}, ("tensor", "context", "pipeline"), "language_model"),
    "bert": Model({"type": "bert", **TEXT}, ("tensor", "context", "pipeline")),
    "bert_classifier": Model({"type": "bert_classifier", **TEXT, "num_labels": 3}, ("tensor", "context", "pipeline")),
    "vit": Model(
        {
            "type": "vit",
            **{key: value for key, value in TEXT.items() if key != "vocab_size"},
            "num_labels": 3,
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 1,
        },
        ("tensor", "pipeline"),
    ),
    "t5": Model({"type": "t5", **TEXT, "feed_forward": "gated-gelu"}, ("tensor",)),
    "cnn": Model({"type": "cnn", "num_labels": 3, "num_channels": 1, "stage_channels": [8, 16], "num_groups": 4}),
    "llama-muon": Model(
        {"type": "llama", **TEXT},
        ("tensor", "context", "pipeline"),
        "language_model",
        {"type": "muon", "lr": 1e-3, "ns_dtype": "fp32"},
        ("float32",),  # what Muon iterates in
    ),
}

LAYOUTS = {
    "one": {},
    "replicate 2": {"replicate": 2},
    "fsdp 2": {"fsdp": 2},
    "tensor 2": {"tensor": 2},
    "context 2": {"context": 2},
    "pipeline 2": {"pipeline": 2},
    "replicate 2 × fsdp 2": {"replicate": 2, "fsdp": 2},
    "fsdp 2 × tensor 2": {"fsdp": 2, "tensor": 2},
    "replicate 2 × tensor 2": {"replicate": 2, "tensor": 2},
    "fsdp 2 × context 2": {"fsdp": 2, "context": 2},
    "fsdp 2 × pipeline 2": {"fsdp": 2, "pipeline": 2},
    "tensor 2 × pipeline 2": {"tensor": 2, "pipeline": 2},
    "replicate 2 × context 2": {"replicate": 2, "context": 2},
    "replicate 2 × pipeline 2": {"replicate": 2, "pipeline": 2},
    "context 2 × tensor 2": {"context": 2, "tensor": 2},
    "context 2 × pipeline 2": {"context": 2, "pipeline": 2},
    "activation_checkpointing": {},
    "compile_repeated_blocks": {},
    "compiled": {},
    "compiled compile_repeated_blocks": {},
    "compiled replicate 2": {"replicate": 2},
    "compiled fsdp 2": {"fsdp": 2},
    "compiled tensor 2": {"tensor": 2},
    "compiled context 2": {"context": 2},
}
COMPILED = {"mode": "compile", "compile_backend": "aot_eager"}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def world_of(layout):
    """Returns how many processes a layout needs."""
    size = 1
    for number in LAYOUTS[layout].values():
        size *= number
    return size


def supports(model, layout):
    """Can this model be laid out so?"""
    axes = {axis for axis, number in LAYOUTS[layout].items() if number > 1}
    if layout == "activation_checkpointing" or layout.endswith("compile_repeated_blocks"):
        return "pipeline" in MODELS[model].axes  # it has a stack of blocks
    return axes <= {"replicate", "fsdp", *MODELS[model].axes}


class Samples(torch.utils.data.Dataset):
    """Random samples by number; every third text is half padding, so that ranks have different counts."""

    def __init__(self, kind: str, dtype: str, size: int = 64) -> None:
        self.kind, self.dtype, self.size = kind, DTYPES[dtype], size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        if self.kind in ("vit", "cnn"):
            return {"pixel_values": torch.rand(1, 8, 8, generator=generator).to(self.dtype), "labels": index % 3}
        ids = torch.randint(3, 96, (LENGTH,), generator=generator)
        labels = ids.clone()
        if index % 3 == 0:
            labels[LENGTH // 2 :] = -100
        if self.kind == "bert_classifier":
            return {"input_ids": ids, "labels": index % 3}
        return {"input_ids": ids, "labels": labels}


def run_case(folder, model_name, dtype_name, layout):
    """Trains a few steps and, on the first rank, leaves what every step gave and the weights."""
    model, dtype = MODELS[model_name], DTYPES[dtype_name]
    name = case_name(model_name, dtype_name, layout)
    section = dict(model.section)
    kind = section["type"]
    if layout == "activation_checkpointing":
        section["activation_checkpointing"] = [f"{BLOCK_PATHS[kind]}.*"]
    if layout.endswith("compile_repeated_blocks"):
        section["compile_repeated_blocks"] = {"path": BLOCK_PATHS[kind], "backend": "aot_eager"}
    settings = {
        "name": name,
        "output_dir": str(folder),
        "seed": 7,
        "model": section,
        "data": {
            "train": {"type": f"{Path(__file__).resolve()}:Samples", "kind": kind, "dtype": dtype_name},
            "collator": {"type": "stack"},
        },
        "trainer": {
            "type": model.trainer,
            "max_steps": NUM_STEPS,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": 2,
            "max_grad_norm": 1.0,
            "optimizer": model.optimizer,
        },
        "writers": [],
        "log": {"every_steps": 1},
        "runtime": {
            "device": "cpu",
            "mesh": LAYOUTS[layout],
            **(COMPILED if layout.startswith("compiled") else {}),
        },
    }
    path = Path(folder) / f"{name}-{os.environ.get('RANK', 0)}.yaml"
    path.write_text(yaml.safe_dump(settings))
    base = LanguageModelTrainer if model.trainer == "language_model" else Trainer
    trainer = build_trainer(RunConfig.load(path), recording(base, dtype))
    trainer.train()
    weights = whole_weights(trainer)
    if trainer.ranks.is_first:
        save_file(weights, Path(folder) / f"{name}.safetensors")
        (Path(folder) / f"{name}.json").write_text(json.dumps(trainer.steps))


BLOCK_PATHS = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "bert_classifier": "bert.encoder.layer",
    "vit": "vit.layers",
}


def recording(base, dtype):
    """Returns a trainer that works in this dtype and keeps what each step gave."""

    class Recording(base):
        """Keeps loss and gradient norm of each step."""

        @classmethod
        def build_model(cls, build):
            return super().build_model(build).to(dtype)

        def post_init(self):
            super().post_init()
            self.steps = []
            put = self.storage.put_result

            def keep(result, **rest):
                self.steps.append((float(result.loss), float(result.grad_norm)))
                put(result, **rest)

            self.storage.put_result = keep

    Recording.__module__ = base.__module__  # a pipeline rejects a user's own forward, which this is not
    return Recording


def whole_weights(trainer):
    """Returns all weights on every rank, whatever holds them."""
    own = {}
    for name, parameter in trainer.model.named_parameters():
        value = parameter.detach()
        own[name] = value.full_tensor() if is_split(value) else value.clone()
    merged = {}
    for part in trainer.ranks.gather(own):
        merged |= part
    return merged


def case_name(model, dtype, layout):
    """Returns a name that can be a folder's."""
    return f"{model}-{dtype}-{layout}".replace(" × ", "-x-").replace(" ", "-")


def main(folder, *cases):
    """Runs the cases one after the other in this process group."""
    for case in cases:
        model, dtype, layout = case.split(":")
        failure = None
        try:
            run_case(folder, model, dtype, layout)
        except Exception as error:  # the next case must have its turn, and the table says what went wrong
            import traceback

            failure = "".join(traceback.format_exception(error))
        if failure is not None:
            path = Path(folder) / f"{case_name(model, dtype, layout)}-rank-{os.environ.get('RANK', 0)}.error"
            path.write_text(failure)
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise SystemExit(1)  # the other ranks may wait for this one: the launcher ends them all


if __name__ == "__main__":
    main(*sys.argv[1:])
    from trainwright.parallel.processes import leave

    leave()
