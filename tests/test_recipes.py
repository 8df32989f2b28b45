"""The packaged recipes on tiny models: resumed after kill -9 with accumulation, and sharded over two ranks."""

import json
import random
import shutil
import signal

import pytest
from tests.distributed.forked_launch import forget_groups, launch_well
from tests.references import sft_case
from tests.test_exact_resume import TIMED, assert_same, run_in_child, what_is_left

from trainwright import RunConfig, build_trainer
from trainwright.config.required import packaged_recipes

pytest.importorskip("transformers")

ROWS = "data.train.source={type: json_lines, path: texts.jsonl}"
OVERRIDES = {
    "classify": (
        *("model.pretrained=encoder", "model.num_labels=2", "data.train.path=labeled.jsonl"),
        "data.collator.classes=[a, b]",
    ),
    "continue-pretraining": ("model.pretrained=base", ROWS, "data.train.length=32", "data.split=[80, 20]"),
    "dpo": ("model.pretrained=base", "data.train.path=pairs.jsonl"),
    "grpo": (
        *(
            "model.pretrained=base",
            "data.train.path=questions.jsonl",
            "trainer.rewards=[{type: pattern, pattern: .*e.*}]",
        ),
        *("trainer.num_generations=4", "trainer.max_completion_length=8"),
    ),
    "pretrain": (
        *("model.preset=tiny", "model.vocab_size=320", "data.train.tokenizer=base", ROWS, "data.train.length=32"),
        "data.split=[80, 20]",
    ),
    "sft-lora": ("model.pretrained=base", "data.train.path=chats.jsonl", "model.lora.dropout=0.1"),
}
SMALL = (
    *("trainer.max_steps=4", "trainer.max_epochs=null", "trainer.global_batch_size=4", "trainer.optimizer.lr=1e-3"),
    *("evaluation.every_steps=2", "evaluation.every_epochs=null"),
    *("checkpoint.every_steps=2", "checkpoint.every_epochs=null", "log.every_steps=1", "writers=[json]"),
)
"""Of all recipes: four updates, with an evaluation and a checkpoint after two."""

WITHOUT_DROPOUT = {
    "classify": ("model.hidden_dropout_prob=0.0", "model.attention_probs_dropout_prob=0.0"),
    "sft-lora": ("model.lora.dropout=0.0",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models and the data that all recipes need."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("recipes")
    sft_case.make_folder(folder / "base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=320, **sizes)).save_pretrained(folder / "encoder")
    for file in (folder / "base").glob("*token*"):
        shutil.copy(file, folder / "encoder")
    chats = sft_case.make_rows(30)
    answers = [chat["messages"][-1]["content"] for chat in chats]
    draw = random.Random(1)
    rows = {
        "chats": chats,
        "pairs": [{"prompt": "the ", "chosen": each, "rejected": draw.choice(answers)} for each in answers],
        "questions": [{"prompt": "the ", "answer": each} for each in answers],
        "labeled": [{"text": each, "label": draw.choice("ab")} for each in answers],
        "texts": [{"text": " ".join(draw.choices(answers, k=4))} for _ in range(30)],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    for name in OVERRIDES:
        (folder / f"{name}.yaml").write_text(f"extends: recipes/{name}\n")
    return folder


def load(folder, recipe, name, *overrides):
    overrides = (*OVERRIDES[recipe], *SMALL, f"name={recipe}-{name}", f"output_dir={folder}", *overrides)
    return RunConfig.load(folder / f"{recipe}.yaml", overrides)


def train_sharded(folder):
    for recipe in OVERRIDES:
        overrides = ("runtime.mesh.fsdp=2", "trainer.micro_batch_size=1", *WITHOUT_DROPOUT.get(recipe, ()))
        build_trainer(load(folder, recipe, "sharded", *overrides)).train()
        forget_groups()


def lines_of(folder, name):
    """The numbers of each line of the log, without times."""
    lines = [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.endswith(TIMED) and not isinstance(value, str)}
        for line in lines
    ]


def test_every_recipe_is_tested():
    assert sorted(f"recipes/{name}" for name in OVERRIDES) == [recipe.name for recipe in packaged_recipes()]


@pytest.mark.parametrize("recipe", OVERRIDES)
def test_a_killed_recipe_ends_with_the_bits_of_an_undisturbed_one(folder, recipe):
    overrides = ("trainer.micro_batch_size=2",)
    assert run_in_child(load(folder, recipe, "undisturbed", *overrides)) == 0
    assert run_in_child(load(folder, recipe, "killed", *overrides), signal_at=3) == -signal.SIGKILL
    assert run_in_child(load(folder, recipe, "killed", *overrides)) == 0
    assert_same(what_is_left(folder / f"{recipe}-undisturbed"), what_is_left(folder / f"{recipe}-killed"))


def test_sharded_recipes_with_accumulation_have_the_losses_of_one_process(folder):
    launch_well(folder, 2, train_sharded)
    for recipe in OVERRIDES:
        overrides = ("trainer.micro_batch_size=4", *WITHOUT_DROPOUT.get(recipe, ()))
        build_trainer(load(folder, recipe, "one", *overrides)).train()
        expected, found = (lines_of(folder, f"{recipe}-{name}") for name in ("one", "sharded"))
        assert len(expected) == 4
        evaluated = "valid/reward" if recipe == "grpo" else "valid/loss"
        assert {name for line in expected for name in line} >= {"loss", evaluated}
        for line, one in zip(found, expected, strict=True):
            assert line == pytest.approx(one, rel=1e-4, abs=1e-5), recipe
