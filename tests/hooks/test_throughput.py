"""The speed of steps, and the totals of a run over all its starts."""

import json
import time
from pathlib import Path

import pytest
import torch
from tests.distributed.forked_launch import launch_well
from torch import nn

from trainwright import RunConfig, Task, Trainer, build_trainer
from trainwright.hooks import flops

PROJECT = Path(__file__).parents[1] / "project"


def load(folder, *overrides):
    settings = [f"output_dir={folder}", "log.every_steps=1", "data.eval={}", "evaluation={}"]
    return RunConfig.load(PROJECT / "run.yaml", [*settings, *overrides])


def lines(folder):
    return [json.loads(line) for line in (folder / "small" / "metrics.json").read_text().splitlines()]


def last_line(folder, trainer_class=None, *overrides):
    build_trainer(load(folder, *overrides), trainer_class).train()
    return lines(folder)[-1]


def per_step(line, rate):
    return line[rate] * line["seconds_per_step"]


class Slow(Trainer):
    """A step takes 20 ms; every second one takes 40 ms."""

    def train_step(self, batch):
        time.sleep(0.02 + 0.02 * (self.step % 2))
        return super().train_step(batch)


def test_a_window_has_the_mean_time_and_all_its_samples_over_all_its_seconds(tmp_path):
    line = last_line(tmp_path, Slow, "trainer.max_steps=2", "log.every_steps=2")
    assert 0.03 <= line["seconds_per_step"] < 0.2
    assert per_step(line, "samples_per_second") == pytest.approx(8)
    assert not line.keys() & {"tokens_per_second", "mfu", "slowest_rank_share"}


def test_saving_does_not_count(tmp_path):
    class SavingSlowly(Trainer):
        def save(self):
            time.sleep(0.1)
            return super().save()

    line = last_line(tmp_path, SavingSlowly, "trainer.max_steps=4", "checkpoint.every_steps=1", "log.every_steps=2")
    assert line["seconds_per_step"] < 0.1


def test_a_step_that_is_saved_before_the_first_one_of_a_process_does_not_count(tmp_path):
    class SavingSlowly(Trainer):
        def state_dict(self):
            time.sleep(0.6)
            return {}

        def load_state_dict(self, state):
            assert state == {}

    class Interrupted(SavingSlowly):
        def train_step(self, batch):
            if self.step == 3:
                self.interrupt("a test")
            return super().train_step(batch)

    settings = ["trainer.max_steps=8", "checkpoint.every_steps=4", "evaluation={every_steps: 4}"]
    settings.append("data.eval={valid: {type: parts.py:Points, size: 8}}")
    for trainer_class in (Interrupted, SavingSlowly):
        build_trainer(load(tmp_path, *settings), trainer_class).train()
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 9))
    assert all(0 < line["seconds_per_step"] < 0.5 and line["samples_per_second"] > 0 for line in found)


def test_a_step_that_uses_two_batches_counts_both(tmp_path):
    class Greedy(Trainer):
        def next_train_inputs(self, iterator):
            next(iterator)
            return next(iterator)

    assert per_step(last_line(tmp_path, Greedy, "trainer.max_steps=2"), "samples_per_second") == pytest.approx(16)


def test_a_smaller_last_batch_counts_its_own_samples(tmp_path):
    line = last_line(tmp_path, None, "trainer.max_steps=null", "trainer.max_samples=20")
    assert per_step(line, "samples_per_second") == pytest.approx(4)


LENGTHS = torch.arange(16) % 5 + 2


class Padded(torch.utils.data.Dataset):
    """Rows of six tokens, of which the last ones are padding."""

    def __init__(self, has_mask):
        self.has_mask = has_mask

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        sample = {"input_ids": torch.arange(6), "labels": torch.tensor(index % 2)}
        return {**sample, "attention_mask": torch.arange(6) < LENGTHS[index]} if self.has_mask else sample


class Embedding(nn.Module):
    """A model of 80 + 22 parameters."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 10), nn.Linear(10, 2)

    def forward(self, input_ids, labels, attention_mask=None):
        return nn.functional.cross_entropy(self.head(self.embed(input_ids).mean(1)), labels)


NUM_PARAMETERS = 102


class TokenTask(Task):
    """Trains on padded rows."""

    has_mask = True

    def build_model(self):
        return Embedding()

    def build_dataset(self, split):
        return Padded(self.has_mask) if split == "train" else None


class TokenTrainer(Trainer):
    """Trains on padded rows; on all ranks but the first a batch takes longer."""

    @classmethod
    def build_task(cls, build):
        return TokenTask()

    def next_train_inputs(self, iterator):
        if self.ranks.size > 1:
            time.sleep(0.5 if self.ranks.rank else 0.01)
        return super().next_train_inputs(iterator)


TOKEN_RUN = ("model=null", "data.train=null", "evaluation.metrics={}", "trainer.max_steps=1", "log.every_steps=1")
WHOLE_EPOCH = ("trainer.global_batch_size=16", "trainer.micro_batch_size=4")


@pytest.fixture
def peak(monkeypatch):
    """Makes the CPU a device with a known peak."""
    monkeypatch.setattr(flops, "KNOWN_PEAKS", {"cpu": flops.Peak(4.0, 2.0, 1e-3)})
    return 1e9


def test_padding_is_not_counted_as_tokens(tmp_path):
    line = last_line(tmp_path, TokenTrainer, *TOKEN_RUN, *WHOLE_EPOCH)
    assert per_step(line, "tokens_per_second") == pytest.approx(int(LENGTHS.sum()))
    assert "mfu" not in line


def test_without_a_mask_every_position_is_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr(TokenTask, "has_mask", False)
    line = last_line(tmp_path, TokenTrainer, *TOKEN_RUN)
    assert per_step(line, "tokens_per_second") == pytest.approx(8 * 6)


def test_mfu_is_the_share_of_a_known_peak(tmp_path, peak):
    line = last_line(tmp_path, TokenTrainer, *TOKEN_RUN)
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 6 * NUM_PARAMETERS / peak)


def test_a_dataset_with_tokens_per_sample_says_how_many_tokens_there_are(tmp_path, peak):
    class Fixed(Trainer):
        @classmethod
        def build_train_data(cls, build):
            data = build.train_data()
            data.tokens_per_sample = 5
            return data

    line = last_line(tmp_path, Fixed, "trainer.max_steps=2", "hooks=[{type: count_progress}]")
    assert per_step(line, "tokens_per_second") == pytest.approx(5 * 8)
    assert line["mfu"] > 0
    assert [line["tokens_seen"] for line in lines(tmp_path)] == [40, 80]


def test_two_ranks_count_the_tokens_of_both_and_how_long_the_faster_one_waits(tmp_path, peak):
    launch_well(tmp_path, 2, lambda folder: last_line(folder, TokenTrainer, *TOKEN_RUN, *WHOLE_EPOCH))
    (line,) = lines(tmp_path)
    assert per_step(line, "tokens_per_second") == pytest.approx(int(LENGTHS.sum()))
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 6 * NUM_PARAMETERS / (2 * peak))
    # The first rank waits for half a second, the average of both for half of it. On a busy machine it works longer.
    assert 0.05 < line["slowest_rank_share"] <= 0.5


PROGRESS = "hooks=[{type: count_progress}]"


def test_samples_and_hours_are_totals_over_all_starts(tmp_path):
    build_trainer(load(tmp_path, PROGRESS, "trainer.max_steps=2")).train()
    build_trainer(load(tmp_path, PROGRESS, "trainer.max_steps=4")).train()
    written = lines(tmp_path)
    assert [line["samples_seen"] for line in written] == [8, 16, 24, 32]
    hours = [line["hours"] for line in written]
    assert hours == sorted(hours)
    assert hours[0] > 0.0
    assert all("tokens_seen" not in line for line in written)


def nan_at(position):
    class NanTrainer(Trainer):
        def forward(self, **batch):
            loss = self.model(**batch)["loss"]
            return loss * torch.nan if self.train_data.order_position == position else loss

    return NanTrainer


def test_a_step_that_is_not_finite_is_counted_in_its_line_and_in_later_starts(tmp_path):
    skip = (PROGRESS, "anomalies.non_finite=skip")
    build_trainer(load(tmp_path, *skip, "trainer.max_steps=3"), nan_at(16)).train()
    build_trainer(load(tmp_path, *skip, "trainer.max_steps=4")).train()
    assert [line["anomalies"] for line in lines(tmp_path)] == [0, 1, 1, 1]


def test_a_rollback_keeps_the_count_of_its_anomaly(tmp_path):
    overrides = [PROGRESS, "anomalies.non_finite=rollback", "checkpoint.every_steps=1", "trainer.max_steps=4"]
    trainer = build_trainer(load(tmp_path, *overrides), nan_at(24))
    trainer.train()
    assert lines(tmp_path)[-1]["anomalies"] == 1
    assert trainer.step == 4
