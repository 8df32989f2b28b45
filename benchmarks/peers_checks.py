"""Three small checks of trainwright, Hugging Face Trainer, Lightning and Accelerate on a CPU.

    python benchmarks/peers_checks.py [--output benchmarks/results]

update      One update of 8 samples with different numbers of labels, as one micro-batch and as four. The loss is a mean
            over these labels. How much do the updated weights differ?
graph_break A compiled model prints in its forward, which breaks the graph. Is the line named in the output?
evaluation  Five samples are evaluated by two processes, two samples at a time. Is the mean that of the five?

Each check runs in processes of its own. A contender has the settings that its documentation gives.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

VALUES = (1.0, 2.0, 4.0, 8.0, 16.0)


class Rows(torch.utils.data.Dataset):
    """Samples as mappings."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


def labelled_rows():
    """8 samples of 6 positions, of which 1 to 6 have a label."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, 4, generator=generator)
    labels = torch.randint(0, 3, (8, 6), generator=generator)
    for row in range(8):
        labels[row, 1 + row % 6 :] = -100
    return Rows(x=x, labels=labels)


class Tagger(nn.Module):
    """A linear layer; `loss` is a mean over labels, a Mean of trainwright with `counted`, or absent."""

    def __init__(self, loss="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.loss = loss

    def forward(self, x, labels=None):
        logits = self.head(x)
        if self.loss == "counted":
            from trainwright import Mean

            total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return {"loss": Mean(total, (labels != -100).sum()), "logits": logits}
        if self.loss == "absent":
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Printing(nn.Module):
    """A model whose forward breaks a graph."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.tail = nn.Linear(3, 3)

    def forward(self, x, labels=None):
        hidden = self.head(x)
        print("hidden", hidden.shape[0])  # the line to name
        return {"loss": cross_entropy(self.tail(hidden).flatten(0, 1), labels.flatten())}


BREAKING_LINE = next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line to name" in line
)


class Value(nn.Module):
    """Its loss is the mean of the samples' values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value):
        values = value * self.weight
        return {"loss": values.mean(), "logits": values}


def trainwright_trainer(folder, model, train=None, valid=None, *, micro_batch_size=8, **sections):
    from trainwright import RunConfig, Trainer, build_trainer

    class Ours(Trainer):
        @classmethod
        def build_model(cls, build):
            return model

        @classmethod
        def build_train_data(cls, build):
            return train

        @classmethod
        def build_eval_data(cls, build):
            return {"valid": valid} if valid is not None else {}

    config = {
        "output_dir": folder,
        "data": {"shuffle": False},
        "trainer": {
            "max_steps": 1,
            "global_batch_size": 8,
            "micro_batch_size": micro_batch_size,
            "optimizer": {"type": "sgd", "lr": 1.0},
        },
        "checkpoint": {"every_steps": None},
        "writers": ["json"],
        **sections,
    }
    config["runtime"] = {"device": "cpu", **config.get("runtime", {})}
    return build_trainer(RunConfig.from_dict(config), Ours)


def huggingface_trainer(folder, model, train=None, valid=None, *, micro_batch_size=8, options=None, **settings):
    from transformers import Trainer, TrainingArguments, default_data_collator

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=8 // micro_batch_size,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    return Trainer(
        model,
        arguments,
        data_collator=default_data_collator,
        train_dataset=train,
        eval_dataset=valid,
        **(options or {}),
    )


def lightning_run(folder, model, *, compiled=False, accumulate=1, **settings):
    """A lightning Trainer and module for the model."""
    try:
        import lightning.pytorch as lightning
    except ImportError:  # the older package of the same
        import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, index):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss, on_epoch=True, sync_dist=True, batch_size=len(next(iter(batch.values()))))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=1,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    return trainer, torch.compile(Module()) if compiled else Module()


# One update, in one micro-batch or four


def update_trainwright(folder, micro_batch_size):
    """The model returns a Mean: a sum and the number of labels."""
    model = Tagger("counted")
    trainwright_trainer(folder, model, labelled_rows(), micro_batch_size=micro_batch_size).train()
    return model


def update_trainwright_mean(folder, micro_batch_size):
    """The model returns a mean over labels."""
    model = Tagger()
    trainwright_trainer(folder, model, labelled_rows(), micro_batch_size=micro_batch_size).train()
    return model


def update_huggingface(folder, micro_batch_size):
    """The model returns a mean over labels."""
    model = Tagger()
    huggingface_trainer(folder, model, labelled_rows(), micro_batch_size=micro_batch_size).train()
    return model


def update_huggingface_function(folder, micro_batch_size):
    """`compute_loss_func` divides by `num_items_in_batch`."""

    def loss_of(outputs, labels, num_items_in_batch=None):
        total = cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())

    model = Tagger("absent")
    options = {"compute_loss_func": loss_of}
    huggingface_trainer(folder, model, labelled_rows(), micro_batch_size=micro_batch_size, options=options).train()
    return model


def update_lightning(folder, micro_batch_size):
    """`training_step` returns a mean over labels."""
    model = Tagger()
    trainer, module = lightning_run(folder, model, accumulate=8 // micro_batch_size)
    trainer.fit(module, DataLoader(labelled_rows(), batch_size=micro_batch_size))
    return model


def update_accelerate(folder, micro_batch_size):
    """`accelerator.accumulate` with a mean over labels."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8 // micro_batch_size)
    model = Tagger()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(labelled_rows(), batch_size=micro_batch_size),
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


UPDATES = {
    "trainwright, a loss that is a `Mean`": update_trainwright,
    "trainwright, a loss that is a mean over labels": update_trainwright_mean,
    "Hugging Face Trainer, a loss of the model": update_huggingface,
    "Hugging Face Trainer, `compute_loss_func`": update_huggingface_function,
    "Lightning, a loss of `training_step`": update_lightning,
    "Accelerate, `accumulate`": update_accelerate,
}


def check_update(name):
    """The largest difference between the updated weights of one and of four micro-batches, relative to the update."""
    found = []
    for micro_batch_size in (8, 2):
        with tempfile.TemporaryDirectory() as folder:
            found.append(UPDATES[name](folder, micro_batch_size).head.weight.detach())
    start = Tagger().head.weight.detach()
    return {"difference": float((found[0] - found[1]).abs().max() / (found[0] - start).abs().max())}


# A graph break


def compiled_trainwright(folder):
    runtime = {"mode": "compile", "compile_backend": "aot_eager"}
    trainwright_trainer(folder, Printing(), labelled_rows(), runtime=runtime, writers=["console"]).train()


def compiled_huggingface(folder):
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    huggingface_trainer(folder, Printing(), labelled_rows(), **settings).train()


def compiled_lightning(folder):
    trainer, module = lightning_run(folder, torch.compile(Printing(), backend="aot_eager"))
    trainer.fit(module, DataLoader(labelled_rows(), batch_size=8))


def compiled_accelerate(folder):
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
    model = Printing()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(labelled_rows(), batch_size=8)
    )
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()


COMPILED = {
    "trainwright": compiled_trainwright,
    "Hugging Face Trainer": compiled_huggingface,
    "Lightning": compiled_lightning,
    "Accelerate": compiled_accelerate,
}


def check_graph_break(name):
    with tempfile.TemporaryDirectory() as folder:
        COMPILED[name](folder)
    return {}


# An evaluation by two processes


def evaluated_trainwright(folder, rows):
    trainer = trainwright_trainer(
        folder, Value(), Rows(value=torch.ones(8)), rows, micro_batch_size=4, evaluation={"batch_size": 4}
    )
    return trainer.evaluate()["valid/loss"]


def evaluated_huggingface(folder, rows):
    """`evaluate` with `compute_metrics`, which gets the gathered predictions."""
    trainer = huggingface_trainer(
        folder,
        Value(),
        valid=rows,
        per_device_eval_batch_size=2,
        label_names=[],
        options={"compute_metrics": lambda found: {"mean": float(found.predictions.mean())}},
    )
    trainer.can_return_loss = True
    logs = trainer.evaluate()
    return logs.get("eval_mean", logs.get("eval_loss"))


def evaluated_lightning(folder, rows):
    """`validate` with `self.log(…, sync_dist=True)`."""
    trainer, module = lightning_run(folder, Value(), strategy="ddp", devices=2)
    return trainer.validate(module, DataLoader(rows, batch_size=2), verbose=False)[0]["loss"]


def evaluated_accelerate(folder, rows):
    """`gather_for_metrics`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(Value(), DataLoader(rows, batch_size=2))
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(model(**batch)["logits"]) for batch in loader]
    return float(torch.cat(found).mean())


EVALUATED = {
    "trainwright": evaluated_trainwright,
    "Hugging Face Trainer": evaluated_huggingface,
    "Lightning": evaluated_lightning,
    "Accelerate": evaluated_accelerate,
}


def check_evaluation(name):
    folder = os.environ["CHECK_FOLDER"]
    return {"mean": float(EVALUATED[name](folder, Rows(value=torch.tensor(VALUES))))}


CHECKS = {
    "update": (check_update, UPDATES, 1),
    "graph_break": (check_graph_break, COMPILED, 1),
    "evaluation": (check_evaluation, EVALUATED, 2),
}
PACKAGES = ("torch", "transformers", "lightning", "accelerate")


def run_check(kind, name):
    """Runs a check in processes of its own; returns its result, or the error, and whether the line was named."""
    _, _, num_processes = CHECKS[kind]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if num_processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environment = {**os.environ, "CHECK_FOLDER": folder, "XDG_CONFIG_HOME": folder}
        command = [sys.executable, *launcher, __file__, "--child", kind, name, str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = json.loads(result.read_text()) if result.exists() else {"error": done.stderr[-300:]}
    if kind == "graph_break":
        output = (done.stdout + done.stderr).splitlines()
        where = f"{Path(__file__).name}:{BREAKING_LINE}"
        naming = [line for line in output if where in line or f"line {BREAKING_LINE}" in line]
        found["named"] = re.sub(r"^[A-Z]+:[\w.]+:", "", naming[0].strip())[:110] + " …" if naming else None
    return found


def child(kind, name, result):
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    try:
        found = CHECKS[kind][0](name)
    except Exception as error:
        text = str(error).replace(f"{Path(__file__).parents[1]}/", "").splitlines()[0]
        found = {"error": f"{type(error).__name__}: {text}"}
    if int(os.environ.get("RANK", "0")) == 0:
        Path(result).write_text(json.dumps(found))


def report(content):
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        "# Updates, graph breaks and evaluations",
        "",
        "```",
        content["command"],
        "```",
        f"One CPU, {versions}.",
        "",
    ]
    lines += [
        "## One update in one micro-batch and in four",
        "8 samples with 1 to 6 labels each; the loss is a mean over labels. The difference is that of the updated",
        "weights, relative to the largest change of a weight.",
        "",
        "| | difference |",
        "|---|---|",
    ]
    for name, found in content["update"].items():
        shown = f"raises `{found['error']}`" if "error" in found else format(found["difference"], ".1e")
        lines.append(f"| {name} | {shown} |")
    lines += [
        "",
        "## A graph break in a compiled model",
        f"The forward prints in line {BREAKING_LINE} of the script. The column has the output that names it.",
        "",
        "| | output |",
        "|---|---|",
    ]
    for name, found in content["graph_break"].items():
        named = f"`{found['named']}`" if found.get("named") else "–"
        lines.append(f"| {name} | {found.get('error') or named} |")
    mean = sum(VALUES) / len(VALUES)
    lines += [
        "",
        "## An evaluation by two processes",
        f"Five samples, two at a time, on two processes (gloo). The mean of the samples is {mean}.",
        "",
        "| | mean |",
        "|---|---|",
    ]
    for name, found in content["evaluation"].items():
        lines.append(f"| {name} | {found.get('error') or round(found['mean'], 4)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the folder of peers_checks.md and peers_checks.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=CHECKS, default=list(CHECKS))
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    content = {"command": "python benchmarks/peers_checks.py --output benchmarks/results"}
    content["versions"] = {"Python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            content["versions"][name] = importlib.metadata.version(name)
    for kind, (_, contenders, _) in CHECKS.items():
        content[kind] = {}
        for name in contenders if kind in options.only else ():
            content[kind][name] = run_check(kind, name)
            print(f"{kind}: {name}: {content[kind][name]}", flush=True)
    print(report(content))
    if options.output:
        (options.output / "peers_checks.json").write_text(json.dumps(content, indent=1) + "\n")
        (options.output / "peers_checks.md").write_text(report(content))


if __name__ == "__main__":
    main()
