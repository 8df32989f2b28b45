"""The loss per token of the target, exactly, whatever the batches are."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.messages import raises
from torch.utils.data import Dataset

from trainwright import RunConfig, Task, build_trainer
from trainwright.errors import TrainwrightError
from trainwright.models.t5 import T5
from trainwright.trainers.sequence_to_sequence import SequenceToSequenceTrainer


class Pairs(Dataset):
    """Inputs and targets of unequal length, padded; some have no target at all."""

    def __init__(self, size=16):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 17, (size, 6), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.labels = torch.randint(1, 17, (size, 5), generator=generator)
        for row in range(size):
            self.mask[row, 2 + row % 5 :] = 0
            self.labels[row, row % 6 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


class Translation(Task):
    """What is learned in these tests."""

    def build_model(self):
        return T5(vocab_size=17, hidden_size=16, num_layers=1, num_heads=2)

    def build_dataset(self, split):
        return None if split == "test" else Pairs()


class Mine(SequenceToSequenceTrainer):
    task_class = Translation

    @classmethod
    def build_task(cls, build):
        return cls.task_class()


def build(tmp_path, micro_batch_size, trainer_class=Mine, steps=3):
    (tmp_path / "run.yaml").write_text(
        "name: pairs\nseed: 1\nwriters: []\nlog: {every_steps: 1}\n"
        "trainer: {max_steps: 3, global_batch_size: 8, micro_batch_size: 8, optimizer: {type: sgd, lr: 0.1}}\n"
    )
    overrides = [f"output_dir={tmp_path}/{micro_batch_size}", f"trainer.micro_batch_size={micro_batch_size}"]
    return build_trainer(
        RunConfig.load(tmp_path / "run.yaml", [*overrides, f"trainer.max_steps={steps}"]), trainer_class
    )


def mean_over_tokens(model, batch):
    """The loss over all label tokens of a batch, first one included."""
    logits = model(**batch)["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_the_loss_and_its_gradient_are_those_of_all_tokens_together(tmp_path):
    class Watching(Mine):
        def train_step(self, batch):
            loss = mean_over_tokens(self.model, batch)
            gradients = torch.autograd.grad(loss, list(self.model.parameters()))
            before = [parameter.detach().clone() for parameter in self.model.parameters()]
            result = super().train_step(batch)
            torch.testing.assert_close(result.loss, loss.detach())
            for parameter, start, gradient in zip(self.model.parameters(), before, gradients, strict=True):
                torch.testing.assert_close(parameter.detach(), start - 0.1 * gradient)
            return result

    assert build(tmp_path, 2, Watching).train()["valid/loss"] > 0


@pytest.mark.parametrize("micro_batch_size", [4, 2, 1])
def test_unequal_micro_batches_train_like_the_whole_batch(tmp_path, micro_batch_size):
    whole, pieces = build(tmp_path, 8), build(tmp_path, micro_batch_size)
    whole_logs, logs = whole.train(), pieces.train()
    assert logs == pytest.approx(whole_logs, rel=1e-4)
    losses, expected = ([value for _, value in trainer.storage.history("loss")] for trainer in (pieces, whole))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_micro_batch_without_any_label_that_counts_adds_nothing(tmp_path):
    # With micro-batches of one, some rows have no target: their mean is NaN.
    trainer = build(tmp_path, 1)
    trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert all(math.isfinite(value) for _, value in trainer.storage.history("loss"))


def test_an_evaluation_is_the_mean_over_tokens_and_perplexity_its_exponential(tmp_path):
    trainer = build(tmp_path, 2, steps=1)
    logs = trainer.train()
    pairs = Pairs()
    everything = {"input_ids": pairs.ids, "attention_mask": pairs.mask, "labels": pairs.labels}
    loss = mean_over_tokens(trainer.model.eval(), everything).item()
    assert logs["valid/loss"] == pytest.approx(loss, rel=1e-5)
    assert logs["valid/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_it_is_found_by_its_name(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "name: pairs\nmodel: {type: t5, vocab_size: 17, hidden_size: 16, num_layers: 1, num_heads: 2}\n"
        "data: {train: {type: digits, part: train}}\n"
        "trainer: {type: sequence_to_sequence, max_steps: 1, global_batch_size: 2, optimizer: {type: sgd, lr: 0.1}}\n"
    )
    trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path}"]))
    assert type(trainer) is SequenceToSequenceTrainer
    assert isinstance(trainer.model, T5)


def test_a_model_that_gives_no_loss_is_rejected_in_words(tmp_path):
    class Silent(Translation):
        def forward(self, model, batch):
            return {"logits": model(**batch)["logits"]}

    class Rejected(Mine):
        task_class = Silent

    with raises(TrainwrightError, "loss"):
        build(tmp_path, 8, Rejected).train()
