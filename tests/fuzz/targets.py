"""What is fuzzed: functions that read files which other people may have written.

A target changes one file of a folder that is whole, reads the folder as users do, and puts the file back.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import random
import shutil
from pathlib import Path

from tests.export.runs import train_run
from tests.fuzz import inputs

from trainwright import AutoModel, RunConfig, load_checkpoint
from trainwright.analysis.explain import explain
from trainwright.checkpoint.listing import list_checkpoints
from trainwright.checkpoint.manifest import read_manifest, render_manifest
from trainwright.checkpoint.remote_store import open_store
from trainwright.commands.runs import summarize
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import TrainwrightError
from trainwright.export.huggingface import export_run, find_tokenizer
from trainwright.registry.trust import reject_untrusted

MARK = "executed"
"""The folder that the trap creates if it is executed."""


class ExecutedError(Exception):
    """The code next to a file was executed."""


class Workshop:
    """A folder with a run, a model folder, tokenizers and a project, all intact."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = train_run(folder)[0]
        self.model = export_run(self.run, folder / "hf", max_shard_bytes=20_000)
        self.project = folder / "project"
        self.project.mkdir()
        trap = f"import pathlib\npathlib.Path({str(folder / MARK)!r}).mkdir(exist_ok=True)\ndef act(*a, **k): pass\n"
        for place in (self.run, self.project, self.model, folder):
            (place / "evil.py").write_text(trap)
        step = self.run / "checkpoints" / "step-00000004"
        self.step = step
        self.parts = {path.name: path.read_bytes() for path in step.iterdir()}
        self.manifest = read_manifest(step)
        self.configs = [
            (self.run / "config.yaml").read_bytes(),
            (folder / "run.yaml").read_bytes(),
            (Path(__file__).parents[1] / "project" / "run.yaml").read_bytes(),
            *(path.read_bytes() for path in sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))),
        ]
        self.configs.append(
            b"name: x-${seed}-${trainer.max_steps}\nextends: base.yaml\ntrainer: {extends: fast, ~max_grad_norm: }\n"
            b"model: {type: llama, a: '${model.b}', b: [1, '${name}'], c: '${model.b}'}\nlog: '${checkpoint}'\n"
        )
        (self.project / "base.yaml").write_text("trainer: fast\nseed: 3\n")
        self.group = self.project / "configs" / "trainer" / "fast.yaml"
        self.group.parent.mkdir(parents=True)
        self.group.write_text("max_steps: 3\nmax_grad_norm: 1.0\nglobal_batch_size: ${seed}\n")
        self.tokenizers = make_tokenizers(folder / "tokenizers")
        self.intact = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def restore(self) -> None:
        """Puts back the files that a process changed and did not live to put back."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.intact and path.suffix != ".pyc":
                path.unlink()
        for path, raw in self.intact.items():
            if not path.exists() or path.read_bytes() != raw:
                path.write_bytes(raw)

    def check_not_executed(self) -> None:
        if (self.folder / MARK).exists():
            (self.folder / MARK).rmdir()
            raise ExecutedError


def make_tokenizers(folder: Path) -> list[Path]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    kinds = {
        "bpe": (models.BPE(), trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<pad>"])),
        "wordpiece": (
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]"]),
        ),
        "unigram": (models.Unigram(), trainers.UnigramTrainer(vocab_size=60, unk_token="<u>", special_tokens=["<u>"])),
    }
    made = []
    for name, (model, trainer) in kinds.items():
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("q", "k")])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel() if name == "bpe" else pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.ByteLevel() if name == "bpe" else None
        tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", "grüße € x"] * 3, trainer)
        if name == "bpe":
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            )
        (folder / name).mkdir(parents=True)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": {"content": "<pad>"}}')
        (folder / name / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
        made.append(folder / name)
    return made


@contextlib.contextmanager
def replaced(files: dict[Path, bytes]):
    """Writes these contents, and the former ones afterwards."""
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        for path, raw in files.items():
            path.write_bytes(raw)
        yield
    finally:
        for path, raw in before.items():
            if raw is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(raw)


def fuzz_config(shop: Workshop, rng: random.Random) -> None:
    """A run file, with overrides."""
    raw = inputs.change_yaml(rng.choice(shop.configs), rng)
    overrides = []
    if rng.random() < 0.3:
        word = rng.choice(
            ("model.type", "trainer.max_steps", "hooks", "data.train", "writers.0", "name", "a.b", "seed")
        )
        overrides.append(f"{word}={json.dumps(rng.choice(inputs.VALUES))}")
        if rng.random() < 0.3:
            overrides.append(rng.choice(("~model", "~trainer.max_steps", "~hooks.0", "trainer=fast", "name=${seed}x")))
    path = shop.project / rng.choice(("run.yaml", "config.yaml"))
    files = {path: raw}
    if rng.random() < 0.2:
        files[shop.group] = inputs.change_yaml(shop.group.read_bytes(), rng)
    with replaced(files):
        config = RunConfig.load(path, overrides, trust=False)
        reject_untrusted(config)
        config.to_yaml()


def fuzz_run_folder(shop: Workshop, rng: random.Random) -> None:
    """The small files of a run folder, as commands and load_checkpoint read it."""
    run = shop.run
    name = rng.choice(("config.yaml",) * 6 + ("environment.json", "metrics.json", "log.txt", "pretrained.json"))
    path = run / name
    raw = path.read_bytes() if path.exists() else b'{"config": {}, "missing": [], "unexpected": [], "dtypes": {}}'
    change = (
        inputs.change_yaml if name.endswith("yaml") else inputs.change_json if name[0] in "ep" else inputs.change_bytes
    )
    with replaced({path: change(raw, rng)}):
        summarize(run, run.parent)
        act = rng.randrange(4)
        if act == 0:
            explain(RunConfig.load(run / "config.yaml", trust=False))
        elif act == 1:
            find_tokenizer(RunConfig.load(run / "config.yaml", trust=False))
        else:
            load_checkpoint(run)


def fuzz_checkpoint(shop: Workshop, rng: random.Random) -> None:
    """A checkpoint whose manifest fits what was changed, as somebody who wishes harm would do, or does not."""
    name = rng.choice(sorted(shop.parts))
    raw = shop.parts[name]
    files = {}
    if name == "MANIFEST.json":
        if rng.random() < 0.5:
            files[shop.step / name] = inputs.change_json(raw, rng)
        else:
            content = inputs.change_value(shop.manifest, rng)
            with contextlib.suppress(Exception):  # not all values are JSON
                files[shop.step / name] = render_manifest(content)
    else:
        changed = inputs.change_safetensors(raw, rng) if name.endswith("safetensors") else inputs.change_json(raw, rng)
        files[shop.step / name] = changed
        if rng.random() < 0.9:
            fact = {"size": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
            fitting = {**shop.manifest, "files": {**shop.manifest["files"], name: fact}}
            files[shop.step / "MANIFEST.json"] = render_manifest(fitting)
    with replaced(files):
        list_checkpoints(shop.run / "checkpoints")
        store = open_store(shop.run / "checkpoints")
        store.newest_intact(set_aside=False)
        if rng.random() < 0.3:
            load_checkpoint(shop.run, 4)
        else:
            for part in shop.manifest["parts"]:
                store.read(4, part)


def fuzz_model_folder(shop: Workshop, rng: random.Random) -> None:
    """A model folder: config.json, the index, the headers of the weights."""
    path = rng.choice(
        [shop.model / "config.json", *sorted(shop.model.glob("*index.json")) * 2, *shop.model.glob("*-00001-*")]
    )
    change = inputs.change_safetensors if path.suffix == ".safetensors" else inputs.change_json
    with replaced({path: change(path.read_bytes(), rng)}):
        AutoModel.from_pretrained(shop.model)


def fuzz_tokenizer(shop: Workshop, rng: random.Random) -> None:
    """A tokenizer's folder."""
    folder = rng.choice(shop.tokenizers)
    path = folder / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"))
    with replaced({path: inputs.change_json(path.read_bytes(), rng)}):
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("the quick grüße € fox </s> q")
        tokenizer.decode(ids)
        tokenizer.decode(range(min(tokenizer.vocab_size, 50)), skip_special_tokens=False)


TARGETS = {
    "config": fuzz_config,
    "run_folder": fuzz_run_folder,
    "checkpoint": fuzz_checkpoint,
    "model_folder": fuzz_model_folder,
    "tokenizer": fuzz_tokenizer,
}


def fuzz_one(shop: Workshop, target: str, seed: int, number: int) -> str:
    """Returns "read" or "rejected"; raises anything that is not a clean error."""
    rng = random.Random(f"{seed} {target} {number}")
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            TARGETS[target](shop, rng)
        return "read"
    except TrainwrightError as error:
        text = str(error)
        if "Traceback" in text or not text.strip():
            raise
        return "rejected"
    finally:
        logging.disable(logging.NOTSET)
        shop.check_not_executed()


def make_workshop(folder: Path) -> Workshop:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Workshop(folder)
