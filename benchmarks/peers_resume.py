"""Kills a run with SIGKILL in the middle of an epoch, resumes it, and compares the final weights bit for bit.

    python benchmarks/peers_resume.py [--only NAME …] [--output benchmarks/results]

Every contender trains the same small classifier with dropout on shuffled data, for two epochs of 32 steps with a
checkpoint every 5 steps, and resumes with the call that its documentation gives. The process is killed after step 48,
in the second epoch. An undisturbed run of the same contender gives the weights to compare with. This is done without
and with two loader processes (`workers`), and with a dataset that adds random noise to each sample (`noise`). Then one
byte in the middle of a file of the newest checkpoint is inverted, for each of its files.

Each run is a forked process of its own. Contenders that are not installed are reported as such.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, STEPS_PER_EPOCH, NUM_EPOCHS, SAVE_EVERY, KILL_AT, SEED = 8, 32, 2, 5, 48, 42
NUM_STEPS = STEPS_PER_EPOCH * NUM_EPOCHS
KINDS = ("shuffled", "workers", "noise", "noise, workers")


class Points(Dataset):
    """256 points, with noise of torch's generator if the kind of data has some."""

    def __init__(self, kind):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(BATCH * STEPS_PER_EPOCH, 16, generator=generator)
        self.y = torch.randint(0, 1000, (len(self.x),), generator=generator)
        self.is_noisy = "noise" in kind

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return {"x": x + 0.1 * torch.randn(16) if self.is_noisy else x, "labels": self.y[index]}


class Net(nn.Module):
    """Two layers with dropout, and their loss. `labels_seen` has the labels of each batch."""

    def __init__(self):
        super().__init__()
        self.labels_seen = []
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1000))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        self.labels_seen.append(labels.tolist())
        logits = self.layers(x)
        return {"loss": self.criterion(logits, labels), "logits": logits}


class Progress:
    """Notes the first step that a process completes, and kills the process after step `kill_at`."""

    def __init__(self, folder, kill_at):
        self.path, self.kill_at = folder / "first_step", kill_at
        self.path.unlink(missing_ok=True)

    def step_done(self, step):
        if not self.path.exists():
            self.path.write_text(str(step))
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def num_workers(kind):
    return 2 if "workers" in kind else 0


def train_trainwright(folder, kind, progress):
    """The same call starts and resumes."""
    from trainwright import Hook, RunConfig, Trainer, build_trainer

    class Ours(Trainer):
        @classmethod
        def build_model(cls, build):
            return Net()

        @classmethod
        def build_train_data(cls, build):
            return Points(kind)

        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), StepDone()]

    class StepDone(Hook):
        def after_step(self):
            progress.step_done(self.trainer.step)

    config = RunConfig.from_dict(
        {
            "name": "run",
            "output_dir": str(folder),
            "seed": SEED,
            "data": {"num_workers": num_workers(kind)},
            "trainer": {
                "max_epochs": NUM_EPOCHS,
                "global_batch_size": BATCH,
                "optimizer": {"type": "adamw", "lr": 1e-2},
            },
            "checkpoint": {"every_steps": SAVE_EVERY},
            "runtime": {"device": "cpu"},
            "writers": ["json"],
        }
    )
    trainer = build_trainer(config, Ours)
    trainer.train()
    return trainer.model


def newest_of_trainwright(folder):
    return max((folder / "run" / "checkpoints").glob("step-*"))


def train_huggingface(folder, kind, progress):
    """`resume_from_checkpoint` with the newest folder, and `set_seed` before the model is made."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    class StepDone(TrainerCallback):
        """A process is killed in the next step, because checkpoints are written after this event."""

        def on_step_end(self, arguments, state, control, **rest):
            progress.step_done(state.global_step)

    set_seed(SEED)
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=SEED,
        num_train_epochs=NUM_EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=SAVE_EVERY,
        dataloader_num_workers=num_workers(kind),
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        Net(), arguments, data_collator=default_data_collator, train_dataset=Points(kind), callbacks=[StepDone()]
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return trainer.model


def newest_of_huggingface(folder):
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def train_lightning(folder, kind, progress, loader_class=DataLoader):
    """`ModelCheckpoint` every 5 steps with `save_last`, and `fit(ckpt_path="last")`."""
    try:
        import lightning.pytorch as lightning
    except ImportError:  # the older package of the same
        import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class StepDone(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            progress.step_done(trainer.global_step)

    lightning.seed_everything(SEED, workers=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            lightning.callbacks.ModelCheckpoint(
                folder / "checkpoints", every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True
            ),
            StepDone(),
        ],
    )
    module = Module()
    loader = loader_class(Points(kind), batch_size=BATCH, shuffle=True, num_workers=num_workers(kind))
    trainer.fit(module, loader, ckpt_path="last")
    return module.net


def train_lightning_stateful(folder, kind, progress):
    """The same with torchdata's `StatefulDataLoader`, as the warning at a resume recommends."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return train_lightning(folder, kind, progress, StatefulDataLoader)


def newest_of_lightning(folder):
    return folder / "checkpoints" / "last.ckpt"


def train_accelerate(folder, kind, progress, *, stateful=False):
    """`save_state`, `load_state`, and `skip_first_batches` for the rest of an epoch, as in Accelerate's examples."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful),
    )
    set_seed(SEED)
    model = Net()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(Points(kind), batch_size=BATCH, shuffle=True, num_workers=num_workers(kind)),
    )
    step, begins = 0, loader
    if list(folder.glob("step_*")):
        newest = newest_of_accelerate(folder)
        accelerator.load_state(str(newest))
        step = int(newest.name.partition("_")[2])
        if not stateful:
            begins = accelerator.skip_first_batches(loader, step % STEPS_PER_EPOCH)
    for epoch in range(step // STEPS_PER_EPOCH, NUM_EPOCHS):
        loader.set_epoch(epoch)
        begins.set_epoch(epoch)
        for batch in begins:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / f"step_{step}"))
            progress.step_done(step)
        begins = loader
    return accelerator.unwrap_model(model)


def train_accelerate_stateful(folder, kind, progress):
    """The same with `use_stateful_dataloader`, with which `load_state` restores the position."""
    return train_accelerate(folder, kind, progress, stateful=True)


def newest_of_accelerate(folder):
    return max(folder.glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))


CONTENDERS = {
    "trainwright": (train_trainwright, newest_of_trainwright),
    "Hugging Face Trainer": (train_huggingface, newest_of_huggingface),
    "Lightning": (train_lightning, newest_of_lightning),
    "Lightning, StatefulDataLoader": (train_lightning_stateful, newest_of_lightning),
    "Accelerate, skip_first_batches": (train_accelerate, newest_of_accelerate),
    "Accelerate, use_stateful_dataloader": (train_accelerate_stateful, newest_of_accelerate),
}
PACKAGES = ("torch", "transformers", "lightning", "pytorch-lightning", "accelerate", "torchdata")


def run(train, folder, kind, kill_at=None):
    """Trains in a forked process; returns its exit code, its last line of an error, and its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        with (folder.parent / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                model = train(folder, kind, Progress(folder.parent, kill_at))
                torch.save(model.state_dict(), folder.parent / "weights.pt")
                (folder.parent / "labels.json").write_text(json.dumps(model.labels_seen))
                code = 0
            except BaseException as error:
                traceback.print_exc()
                (folder.parent / "error.txt").write_text(f"{type(error).__name__}: {error}")
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def same_weights(left, right):
    """Compares all tensors bit for bit."""
    left, right = torch.load(left), torch.load(right)
    return all(torch.equal(value, right[name]) for name, value in left.items())


def invert_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.unlink()  # another name may link to the same file
    path.write_bytes(content)


def same_batches(resumed, whole):
    """True if the resumed run trained the samples that the undisturbed one trained last, in the same order."""
    labels, expected = json.loads(resumed.read_text()), json.loads(whole.read_text())
    return labels == expected[-len(labels) :]


def outcome_of(root, code, whole):
    """What a resumed run did: the first step that it trained, its error, and whether batches and weights are equal."""
    first = root / "first_step"
    error = root / "error.txt"
    return {
        "finished": code == 0,
        "resumed_from": int(first.read_text()) - 1 if first.exists() else None,
        "equal_batches": code == 0 and same_batches(root / "labels.json", whole / "labels.json"),
        "equal_bits": code == 0 and same_weights(root / "weights.pt", whole / "weights.pt"),
        "error": error.read_text().strip().splitlines()[0][:120] if error.exists() else None,
    }


def killed_and_resumed(train, root, kind, whole):
    killed = root / "killed" / "run"
    killed.mkdir(parents=True)
    assert run(train, killed, kind, kill_at=KILL_AT) == -signal.SIGKILL, (root / "killed/output.txt").read_text()
    shutil.copytree(root / "killed", root / "resumed", symlinks=True)
    return outcome_of(root / "resumed", run(train, root / "resumed" / "run", kind), whole)


def damaged(train, newest, root, whole):
    """For each file of the newest checkpoint: the outcome of a resume with one byte of that file inverted."""
    found = {}
    checkpoint = newest(root / "killed" / "run")
    files = [checkpoint] if checkpoint.is_file() else sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in files:
        copy = root / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root / "killed", copy, symlinks=True)
        invert_byte(copy / path.relative_to(root / "killed"))
        name = path.name if checkpoint.is_file() else path.relative_to(checkpoint).as_posix()
        outcome = outcome_of(copy, run(train, copy / "run", "shuffled"), whole)
        intact = root / "resumed" / "weights.pt"
        found[name] = {
            **outcome,
            "as_intact": outcome["finished"] and same_weights(copy / "weights.pt", intact),
            "fell_back": outcome["resumed_from"] != int((root / "resumed" / "first_step").read_text()) - 1,
        }
    return found


def measure(name):
    train, newest = CONTENDERS[name]
    results = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "whole" / "run").mkdir(parents=True)
            if run(train, root / "whole" / "run", kind):
                print((root / "whole" / "output.txt").read_text()[-2000:])
                return {"failed": (root / "whole" / "error.txt").read_text()}
            whole = root / "whole"
            results[kind] = killed_and_resumed(train, root, kind, whole)
            print(f"{name}: {kind}: {results[kind]}", flush=True)
            if kind == "shuffled":
                results["damaged"] = damaged(train, newest, root, whole)
                print(json.dumps(results["damaged"], indent=1), flush=True)
    return results


def words_of(outcome):
    """An outcome in a few words."""
    if not outcome["finished"]:
        return f"raises `{outcome['error']}`"
    if outcome["equal_bits"]:
        found = "equal bits"
    elif outcome["equal_batches"]:
        found = "same batches, other weights"
    else:
        found = "other batches, other weights"
    return f"{found} (resumed at step {outcome['resumed_from']})"


def words_of_damaged(outcome):
    """The outcome of a resume from a damaged checkpoint in a few words."""
    if not outcome["finished"]:
        return f"raises `{outcome['error']}`"
    weights = "the same final weights" if outcome["as_intact"] else "other final weights"
    how = "falls back to step" if outcome["fell_back"] else "no error: resumes at step"
    return f"{how} {outcome['resumed_from']}, {weights}"


INTRODUCTION = """
Each contender trains a classifier with dropout on shuffled data for 64 steps, two epochs, and saves every 5 steps as
its documentation describes. SIGKILL after step 48, in the middle of the second epoch. Then the same program starts
again, with the documented call to resume. The final weights are compared, bit for bit, with those of an undisturbed run
of the same contender. With `workers`, two loader processes read the data; with `noise`, the dataset adds random noise
to each sample. "Same batches" means the same samples in the same order.

trainwright writes checkpoints in the background. One that is not complete when the process is killed does not count, so
it may resume from an earlier step than the others. Set `checkpoint.asynchronous: false` to wait for each.
"""

DAMAGE = """
## One inverted byte in the newest checkpoint
The byte in the middle of a file is inverted before the resume of the run `shuffled`, one file at a time. The final
weights are compared with those of the resume from the intact checkpoint.
"""


def report(content):
    """The results as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = ["# Killed and resumed, and damaged checkpoints", "", "```", content["command"], "```"]
    lines += [f"One CPU, {versions}.", INTRODUCTION, f"| | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for name, results in content["results"].items():
        if "failed" not in results:
            lines.append(f"| {name} | {' | '.join(words_of(results[kind]) for kind in KINDS)} |")
    lines += [DAMAGE, "| | file | the resume |", "|---|---|---|"]
    for name, results in content["results"].items():
        for file, outcome in results.get("damaged", {}).items():
            lines.append(f"| {name} | `{file}` | {words_of_damaged(outcome)} |")
    for name, results in content["results"].items():
        if "failed" in results:
            lines += ["", f"{name} did not run: `{results['failed']}`"]
    return "\n".join(lines) + "\n"


def installed_versions():
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def preload():
    """Imports what the children need, once."""
    import trainwright.api.functions  # noqa: F401

    for name in (
        "transformers",
        "accelerate",
        "lightning.pytorch",
        "pytorch_lightning",
        "torchdata.stateful_dataloader",
    ):
        with contextlib.suppress(ImportError):
            __import__(name)
    with contextlib.suppress(ImportError):
        from transformers import Trainer  # noqa: F401


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--output", type=Path, help="the folder of peers_resume.md and peers_resume.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    preload()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # the key that signs run folders
        results = {name: measure(name) for name in options.only}
    content = {
        "command": "python benchmarks/peers_resume.py --output benchmarks/results",
        "versions": installed_versions(),
        "results": results,
    }
    print(report(content))
    if options.output:
        (options.output / "peers_resume.json").write_text(json.dumps(content, indent=1) + "\n")
        (options.output / "peers_resume.md").write_text(report(content))


if __name__ == "__main__":
    main()
