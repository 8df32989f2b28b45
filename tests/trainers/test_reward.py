"""Bradley–Terry on pairs: equal to TRL's, with a classifier's score or that of a decoder's last token."""

import json
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from tests.references import preference_cases as cases
from tests.trainers import preference_runs as runs

from trainwright import build_trainer
from trainwright.errors import DataError

TRL = json.loads((Path(__file__).parents[1] / "references" / "preferences_trl.json").read_text())
CLASSIFIER = "transformers:AutoModelForSequenceClassification"


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    runs.prepare(folder, head="score")
    return folder


def settings(folder, tmp_path, **model):
    content = runs.settings(folder, model=CLASSIFIER)
    content["output_dir"] = str(tmp_path / "runs")
    content["model"] |= model
    content["data"]["train"]["max_length"] = 64
    del content["trainer"]["loss_type"]
    content["trainer"] |= {"type": "reward", "optimizer": {"type": "sgd", "lr": cases.REWARD_RATE}, **cases.REWARD}
    return content


@pytest.mark.parametrize("micro_batch_size", [4, 2])
def test_losses_and_metrics_are_those_of_trl(scored, tmp_path, micro_batch_size):
    config = runs.load(scored, settings(scored, tmp_path), f"trainer.micro_batch_size={micro_batch_size}")
    build_trainer(config).train()
    for line, expected in zip(runs.lines_of(tmp_path), TRL["reward"], strict=True):
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_decoder_with_a_head_of_one_output_scores_the_last_token(tmp_path):
    runs.prepare(tmp_path)
    head = {"type": "torch.nn:Linear", "in_features": 32, "out_features": 1, "bias": False}
    content = settings(tmp_path, tmp_path, replace={"lm_head": head})
    content["model"]["type"] = "llama"
    trainer = build_trainer(runs.load(tmp_path, content))
    batch = next(iter(trainer.train_data.batches(trainer.batches_to_device)))
    scores = []
    for ids, mask in zip(batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1), strict=True):
        scores.append(trainer.model(ids[mask.bool()][None])["logits"][0, -1, 0])
    chosen, rejected = torch.stack(scores).view(-1, 2).unbind(-1)
    expected = -torch.nn.functional.logsigmoid(chosen - rejected) + 0.1 * (chosen + rejected) ** 2
    loss, metrics = trainer.forward(**batch)
    torch.testing.assert_close(loss.value, expected.mean())
    assert metrics["accuracy"].value == (chosen > rejected).double().mean()


def test_a_head_with_several_outputs_is_rejected(tmp_path):
    runs.prepare(tmp_path)
    content = settings(tmp_path, tmp_path)
    content["model"]["type"] = "llama"
    with raises(DataError, "num_labels: 1", "lm_head"):
        build_trainer(runs.load(tmp_path, content)).train()
