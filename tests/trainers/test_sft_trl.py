"""The losses of TRL's SFTTrainer on the same chats, which tests/references/trl_sft.py records."""

import json
from pathlib import Path

import pytest
import yaml
from tests.data.chats import PREFIX_TEMPLATE, make_tokenizer_folder
from tests.references import sft_case as case

from trainwright import RunConfig, build_trainer
from trainwright.data.sources.chat import chat

RECORDED = json.loads((Path(__file__).parents[1] / "references" / "trl_sft.json").read_text())
REFERENCE = RECORDED["losses"]

MODELS = {
    "shipped": {"type": "llama"},
    "transformers": {"type": "transformers:LlamaForCausalLM"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    case.make_folder(folder / "base")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.make_rows()))
    return folder


def losses_of(folder, name, **sections):
    run = {
        "name": name,
        "output_dir": str(folder),
        "writers": ["json"],
        "log": {"every_steps": 1},
        **sections,
    }
    run["model"] = {**run["model"], "pretrained": "base"}
    run["data"] = {"shuffle": False, **run["data"]}
    run["trainer"] = {
        "type": "sft",
        "optimizer": {"type": "adamw", "lr": case.LEARNING_RATE, "weight_decay": 0.0},
        "max_grad_norm": 1.0,
        **run["trainer"],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))
    build_trainer(RunConfig.load(folder / f"{name}.yaml")).train()
    lines = (folder / name / "metrics.json").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


CHATS = {"type": "chat", "path": "chats.jsonl", "tokenizer": "base"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "micro_batch_size"), [("unpacked", case.BATCH_SIZE), ("accumulated", 1)])
def test_padded_chats_have_the_losses_of_trl(model, kind, micro_batch_size, folder):
    losses = losses_of(
        folder,
        f"{kind}-{model}",
        model=MODELS[model],
        data={
            "train": {**CHATS, "max_length": case.MAX_LENGTH},
            "collator": {"type": "padded", "tokenizer": "base"},
        },
        trainer={
            "max_steps": case.NUM_STEPS,
            "global_batch_size": case.BATCH_SIZE,
            "micro_batch_size": micro_batch_size,
        },
    )
    assert losses == pytest.approx(REFERENCE[kind], rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [5, 1])
@pytest.mark.parametrize("model", MODELS)
def test_packed_chats_have_the_losses_of_trl(model, micro_batch_size, folder):
    losses = losses_of(
        folder,
        f"packed-{model}-{micro_batch_size}",
        model=MODELS[model],
        data={"train": {"type": "pack", "length": case.PACKED_LENGTH, "source": CHATS}},
        trainer={
            "max_steps": case.PACKED_STEPS,
            "global_batch_size": 5,  # all rows
            "micro_batch_size": micro_batch_size,
        },
    )
    assert losses == pytest.approx(REFERENCE["packed"], rel=1e-6)


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_prompts_with_completions_have_the_labels_of_trl(kind, tmp_path):
    make_tokenizer_folder(tmp_path / "base", PREFIX_TEMPLATE)
    dataset = chat(source=case.make_completions()[kind], tokenizer="base", project_dir=tmp_path)
    samples = [{name: values.tolist() for name, values in sample.items()} for sample in dataset]
    assert samples == RECORDED["completions"][kind]
