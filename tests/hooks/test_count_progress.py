"""What a run has used up, over all of its starts."""

import json
from pathlib import Path

import torch

from trainwright import RunConfig, Trainer, build_trainer

PROJECT = Path(__file__).parents[1] / "project"
HOOK = "hooks=[{type: count_progress}]"


def load(tmp_path, *overrides):
    settings = [f"output_dir={tmp_path}", HOOK, "log.every_steps=1", "data.eval={}", "evaluation={}"]
    return RunConfig.load(PROJECT / "run.yaml", [*settings, *overrides])


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "small" / "metrics.json").read_text().splitlines()]


def test_samples_and_hours_are_summed_over_starts(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    build_trainer(load(tmp_path, "trainer.max_steps=4")).train()
    written = lines(tmp_path)
    assert [line["samples_seen"] for line in written] == [8, 16, 24, 32]
    hours = [line["hours"] for line in written]
    assert hours == sorted(hours)
    assert hours[0] > 0.0
    assert all("tokens_seen" not in line for line in written)


def test_tokens_are_counted_where_samples_have_a_fixed_length(tmp_path):
    class Fixed(Trainer):
        @classmethod
        def build_train_data(cls, build):
            data = build.train_data()
            data.tokens_per_sample = 5
            return data

    build_trainer(load(tmp_path, "trainer.max_steps=2"), Fixed).train()
    assert [line["tokens_seen"] for line in lines(tmp_path)] == [40, 80]


def nan_at(place):
    class Spoilt(Trainer):
        def forward(self, **batch):
            loss = self.model(**batch)["loss"]
            return loss * torch.nan if self.train_data.order_position == place else loss

    return Spoilt


def test_a_step_that_is_not_finite_shows_in_its_line_and_is_remembered(tmp_path):
    build_trainer(load(tmp_path, "anomalies.non_finite=skip", "trainer.max_steps=3"), nan_at(16)).train()
    build_trainer(load(tmp_path, "anomalies.non_finite=skip", "trainer.max_steps=4")).train()
    assert [line["anomalies"] for line in lines(tmp_path)] == [0, 1, 1, 1]


def test_a_run_that_goes_back_still_counts_what_made_it_go_back(tmp_path):
    overrides = ["anomalies.non_finite=rollback", "checkpoint.every_steps=1", "trainer.max_steps=4"]
    trainer = build_trainer(load(tmp_path, *overrides), nan_at(24))
    trainer.train()
    assert lines(tmp_path)[-1]["anomalies"] == 1
    assert trainer.step == 4
