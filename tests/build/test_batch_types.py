"""Batches of any Mapping class, from transformers' collators and a user's own, in whole runs."""

import textwrap
from collections import UserDict
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.messages import raises
from tests.vision import declare_operators

from trainwright import RunConfig, Trainer, build_component, build_trainer, train
from trainwright.data.collators.fields import plain_mappings
from trainwright.data.loader import TrainData
from trainwright.errors import ConfigError

declare_operators()
transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(40))]
BERT = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 16, "max_position_embeddings": 16}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    names = {f"{role}_token": word for role, word in special.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def rows(size=16):
    """Token rows of different lengths, with a class and target tokens."""
    return [
        {"input_ids": [5 + (number + each) % 40 for each in range(3 + number % 4)], "label": number % 2}
        for number in range(size)
    ]


@pytest.fixture
def project(in_tmp):
    make_tokenizer().save_pretrained(in_tmp / "tokenizer")
    (in_tmp / "datasets").mkdir()
    (in_tmp / "datasets" / "rows.py").write_text(
        textwrap.dedent("""
        class Rows:
            def __init__(self, fields, size=16):
                self.fields, self.size = fields, size

            def __len__(self):
                return self.size

            def __getitem__(self, index):
                ids = [5 + (index + each) % 40 for each in range(3 + index % 4)]
                whole = {"input_ids": ids, "label": index % 2, "labels": ids[::-1]}
                return {name: whole[name] for name in self.fields}
        """)
    )
    return in_tmp


def run_file(folder, *, model, collator, fields, trainer="trainer"):
    sizes = ", ".join(f"{name}: {value}" for name, value in BERT.items())
    text = f"""
    model: {{type: "transformers:{model}", {sizes}}}
    data:
      train: {{type: rows.Rows, fields: [{fields}]}}
      eval: {{type: rows.Rows, fields: [{fields}], size: 5}}
      collator: {collator}
    trainer:
      type: {trainer}
      max_steps: 4
      global_batch_size: 8
      micro_batch_size: 2
      optimizer: {{type: sgd, lr: 0.1}}
    log: {{every_steps: 1}}
    checkpoint: {{every_steps: 2}}
    """
    Path(folder, "run.yaml").write_text(textwrap.dedent(text))
    return folder / "run.yaml"


TOKENIZER = '{type: "transformers:AutoTokenizer.from_pretrained", pretrained_model_name_or_path: tokenizer}'
CASES = {
    "DataCollatorWithPadding": ("BertForSequenceClassification", "input_ids, label", "trainer"),
    "DataCollatorForLanguageModeling": ("BertForMaskedLM", "input_ids", "masked_language_model"),
    "DataCollatorForSeq2Seq": ("BertForMaskedLM", "input_ids, labels", "masked_language_model"),
}


MASKED = {"model": "BertForMaskedLM", "fields": "input_ids", "trainer": "masked_language_model"}


@pytest.mark.parametrize("collator", CASES)
def test_collators_of_transformers_train_from_yaml_with_a_nested_tokenizer(project, collator):
    model, fields, trainer = CASES[collator]
    made = f'{{type: "transformers:{collator}", tokenizer: {TOKENIZER}}}'
    path = run_file(project, model=model, collator=made, fields=fields, trainer=trainer)
    run = build_trainer(RunConfig.load(path))
    logs = run.train()
    assert run.step == 4
    assert logs["eval/loss"] > 0
    # The same samples in one micro-batch: a batch was split by its rows, padding included.
    whole = build_trainer(RunConfig.load(path, ["name=whole", "trainer.micro_batch_size=8"]))
    whole.train()
    for name, value in run.model.state_dict().items():
        assert torch.allclose(value, whole.model.state_dict()[name], atol=1e-5), name


@pytest.mark.parametrize("num_workers", [0, 2])
def test_masks_are_the_same_after_a_resume_and_with_workers(project, num_workers):
    made = '{type: "transformers:DataCollatorForLanguageModeling", tokenizer: {type: auto, path: tokenizer}}'
    path = run_file(
        project, model="BertForMaskedLM", collator=made, fields="input_ids", trainer="masked_language_model"
    )
    whole = build_trainer(RunConfig.load(path, ["name=whole"]))
    whole.train()
    first = build_trainer(RunConfig.load(path, ["trainer.max_steps=2", f"data.num_workers={num_workers}"]))
    first.train()
    resumed = build_trainer(RunConfig.load(path, [f"data.num_workers={num_workers}"]))
    assert resumed.step == 2
    resumed.train()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name


def test_a_mask_depends_on_the_seed_and_the_position_only():
    collator = transformers.DataCollatorForLanguageModeling(make_tokenizer())
    dataset = [{"input_ids": row["input_ids"]} for row in rows()]

    def batches(seed, number):
        data = TrainData(dataset, collator=collator, global_batch_size=4, seed=seed)
        taken = data.batches(iter)
        return [next(taken)["input_ids"].tolist() for _ in range(number)]

    first = batches(1, 4)
    torch.rand(3)
    assert batches(1, 4) == first
    assert batches(2, 4) != first


def test_a_collator_with_a_generator_of_its_own_is_rejected(project):
    made = '{type: "transformers:DataCollatorForLanguageModeling", seed: 3, tokenizer: {type: auto, path: tokenizer}}'
    path = run_file(
        project, model="BertForMaskedLM", collator=made, fields="input_ids", trainer="masked_language_model"
    )
    with raises(ConfigError, "data.collator.seed", "DataCollatorForLanguageModeling", at="run.yaml:6"):
        build_trainer(RunConfig.load(path))


def test_train_accepts_a_collator_of_transformers(in_tmp):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    collator = transformers.DataCollatorWithPadding(make_tokenizer())
    overrides = ["trainer.micro_batch_size=2"]
    run = train(model, rows(), eval_data=rows(6), collator=collator, max_steps=2, batch_size=4, overrides=overrides)
    assert run.step == 2


class Keyed(UserDict):
    """A mapping that torch does not see into."""


def keyed_pairs(samples):
    return Keyed(x=Keyed(values=torch.stack([one["x"] for one in samples])), labels=[one["name"] for one in samples])


class Spy(Trainer):
    seen: ClassVar[list[object]] = []

    def forward(self, x, labels):
        assert type(x) is dict
        self.seen.append((len(x["values"]), labels))
        return self.model(x["values"]).pow(2).mean()


def test_nested_mappings_and_lists_of_a_user_s_collator_are_split(in_tmp):
    class Given(Spy):
        @classmethod
        def build_model(cls, build):
            return torch.nn.Linear(2, 1)

        @classmethod
        def build_train_data(cls, build):
            return [{"x": torch.ones(2) * number, "name": str(number)} for number in range(4)]

        @classmethod
        def build_collator(cls, build):
            return keyed_pairs

    settings = {"max_steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "optimizer": {"type": "sgd", "lr": 0.1}}
    config = RunConfig.from_dict({"name": "keyed", "data": {"shuffle": False}, "trainer": settings})
    Spy.seen = []
    build_trainer(config, Given).train()
    assert Spy.seen == [(2, ["0", "1"]), (2, ["2", "3"])]


def test_a_made_batch_may_be_any_mapping(in_tmp):
    class Making(Trainer):
        sizes: ClassVar[list[int]] = []

        @classmethod
        def build_model(cls, build):
            return torch.nn.Linear(2, 1)

        def next_train_inputs(self, iterator):
            return Keyed(x=torch.ones(4, 2))

        def forward(self, x):
            self.sizes.append(len(x))
            return self.model(x).mean()

    settings = {"max_steps": 1, "micro_batch_size": 2, "optimizer": {"type": "sgd", "lr": 0.1}}
    build_trainer(RunConfig.from_dict({"name": "made", "trainer": settings}), Making).train()
    assert Making.sizes == [2, 2]


def test_classes_that_torch_sees_into_are_kept():
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.zeros(2, 3))
    assert plain_mappings(output) is output
    batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    assert plain_mappings(batch) is batch


def test_one_component_is_built_with_its_tokenizer(project):
    made = '{type: "transformers:DataCollatorWithPadding", tokenizer: {type: auto, path: tokenizer}}'
    path = run_file(project, model="BertForMaskedLM", collator=made, fields="input_ids")
    collator = build_component(path, "data.collator")
    assert collator([{"input_ids": [5]}, {"input_ids": [6, 7]}])["input_ids"].tolist() == [[5, 0], [6, 7]]


def test_the_tokenizer_auto_runs_no_code_of_its_folder(project):
    made = '{type: "transformers:DataCollatorWithPadding", tokenizer: {type: auto, path: x, trust_remote_code: true}}'
    path = run_file(project, model="BertForMaskedLM", collator=made, fields="input_ids")
    with raises(ConfigError, "data.collator.tokenizer", "trust_remote_code", at="run.yaml:6"):
        build_component(path, "data.collator")
