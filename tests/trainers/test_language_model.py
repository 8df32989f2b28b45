"""The loss per predicted token, exactly, whatever the batches are."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.messages import raises
from torch import nn
from torch.utils.data import Dataset

from trainwright import RunConfig, Task, build_trainer
from trainwright.errors import TrainwrightError
from trainwright.trainers.language_model import LanguageModelTrainer


class Sentences(Dataset):
    """Sentences of unequal length, padded; some have nothing to predict."""

    def __init__(self, size=16):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 17, (size, 8), generator=generator)
        self.labels = self.ids.clone()
        for row in range(size):
            self.labels[row, row % 9 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Tiny(nn.Module):
    """A bigram model with the loss as transformers gives it: a mean over the labels that count."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(17, 17)

    def forward(self, input_ids, labels):
        logits = self.table(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Sentence(Task):
    """What is learned in these tests."""

    def build_model(self):
        return Tiny()

    def build_dataset(self, split):
        return None if split == "test" else Sentences()


class Mine(LanguageModelTrainer):
    task_class = Sentence

    @classmethod
    def build_task(cls, build):
        return cls.task_class()


def build(tmp_path, micro_batch_size, trainer_class=Mine, steps=3):
    (tmp_path / "run.yaml").write_text(
        "name: lm\nseed: 1\nwriters: []\nlog: {every_steps: 1}\n"
        "trainer: {max_steps: 3, global_batch_size: 8, micro_batch_size: 8, optimizer: {type: sgd, lr: 0.5}}\n"
    )
    overrides = [f"output_dir={tmp_path}/{micro_batch_size}", f"trainer.micro_batch_size={micro_batch_size}"]
    return build_trainer(
        RunConfig.load(tmp_path / "run.yaml", [*overrides, f"trainer.max_steps={steps}"]), trainer_class
    )


def test_the_loss_and_its_gradient_are_those_of_all_tokens_together(tmp_path):
    class Watching(Mine):
        def train_step(self, batch):
            before = self.model.table.weight.detach().clone()
            result = super().train_step(batch)
            weight = before.clone().requires_grad_()
            logits = F.embedding(batch["input_ids"], weight)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach())
            torch.testing.assert_close(self.model.table.weight.detach(), before - 0.5 * weight.grad)
            torch.testing.assert_close(result.grad_norm, weight.grad.norm())
            return result

    assert build(tmp_path, 2, Watching).train()["valid/loss"] > 0


@pytest.mark.parametrize("micro_batch_size", [4, 2, 1])
def test_unequal_micro_batches_train_like_the_whole_batch(tmp_path, micro_batch_size):
    whole, pieces = build(tmp_path, 8), build(tmp_path, micro_batch_size)
    whole_logs, logs = whole.train(), pieces.train()
    assert logs == pytest.approx(whole_logs, rel=1e-5)
    torch.testing.assert_close(pieces.model.table.weight, whole.model.table.weight)
    losses, expected = ([value for _, value in trainer.storage.history("loss")] for trainer in (pieces, whole))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_micro_batch_without_any_label_that_counts_adds_nothing(tmp_path):
    # With micro-batches of one, some rows have nothing to predict: their mean is NaN.
    trainer = build(tmp_path, 1)
    trainer.train()
    assert torch.isfinite(trainer.model.table.weight).all()
    assert all(math.isfinite(value) for _, value in trainer.storage.history("loss"))


def test_an_evaluation_is_the_mean_over_tokens_and_perplexity_its_exponential(tmp_path):
    trainer = build(tmp_path, 2, steps=1)
    logs = trainer.train()
    everything = Sentences()
    loss = trainer.model(everything.ids, everything.labels)["loss"].item()
    assert logs["valid/loss"] == pytest.approx(loss, rel=1e-6)
    assert logs["valid/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)


@pytest.mark.parametrize(("loss", "perplexity"), [(1e9, math.exp(700)), (math.nan, math.nan)])
def test_the_perplexity_of_a_hopeless_model_is_still_a_number(tmp_path, loss, perplexity):
    trainer = build(tmp_path, 8)
    trainer._evaluator.averages = {"loss": loss}
    assert trainer.eval_end(None)["perplexity"] == pytest.approx(perplexity, nan_ok=True)


def test_an_evaluation_without_a_loss_has_no_perplexity(tmp_path):
    trainer = build(tmp_path, 8)
    trainer._evaluator.averages = {"reward": 1.0}
    assert trainer.eval_end(None) == {"reward": 1.0}


def test_a_model_that_gives_no_loss_is_rejected_in_words(tmp_path):
    class Silent(Sentence):
        def forward(self, model, batch):
            return {"logits": model.table(batch["input_ids"])}

    class Rejected(Mine):
        task_class = Silent

    with raises(TrainwrightError, "loss"):
        build(tmp_path, 8, Rejected).train()
