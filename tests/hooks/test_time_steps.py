"""The speed of steps."""

import json
import time
from pathlib import Path

import pytest

from trainwright import RunConfig, Trainer, build_trainer

PROJECT = Path(__file__).parents[1] / "project"


def lines(tmp_path, trainer_class=None, *overrides):
    settings = [f"output_dir={tmp_path}", "data.eval={}", "evaluation={}", "log.every_steps=2", *overrides]
    build_trainer(RunConfig.load(PROJECT / "run.yaml", settings), trainer_class).train()
    written = [json.loads(line) for line in (tmp_path / "small" / "metrics.json").read_text().splitlines()]
    return {line["step"]: line for line in written}


class Slow(Trainer):
    """Takes 20 ms a step, and twice as long for every second one."""

    def train_step(self, batch):
        time.sleep(0.02 + 0.02 * (self.step % 2))
        return super().train_step(batch)


def test_a_window_has_the_mean_time_and_all_its_samples_over_all_its_seconds(tmp_path):
    line = lines(tmp_path, Slow, "trainer.max_steps=2")[2]
    assert 0.03 <= line["seconds_per_step"] < 0.2
    assert line["samples_per_second"] * line["seconds_per_step"] == pytest.approx(8)
    assert "tokens_per_second" not in line


def test_writing_and_saving_do_not_count(tmp_path):
    class SavingSlowly(Trainer):
        def save(self):
            time.sleep(0.1)
            return super().save()

    written = lines(tmp_path, SavingSlowly, "trainer.max_steps=4", "checkpoint.every_steps=1")
    assert written[4]["seconds_per_step"] < 0.1


def test_a_step_that_takes_two_batches_counts_both(tmp_path):
    class Greedy(Trainer):
        def next_train_inputs(self, iterator):
            next(iterator)
            return next(iterator)

    line = lines(tmp_path, Greedy, "trainer.max_steps=2")[2]
    assert line["samples_per_second"] * line["seconds_per_step"] == pytest.approx(16)


def test_a_smaller_last_batch_counts_what_it_holds(tmp_path):
    line = lines(tmp_path, None, "trainer.max_steps=null", "trainer.max_samples=20", "log.every_steps=1")[3]
    assert line["samples_per_second"] * line["seconds_per_step"] == pytest.approx(4)


def test_tokens_are_counted_where_samples_have_a_fixed_length(tmp_path):
    (tmp_path / "tokens.py").write_text(
        "import sys, torch\n"
        "class Tokens(torch.utils.data.Dataset):\n"
        "    tokens_per_sample = 5\n"
        "    def __len__(self): return 20\n"
        "    def __getitem__(self, i): return {'x': torch.ones(4) * i, 'labels': i % 2}\n"
    )
    line = lines(tmp_path, None, f"data.train={{type: {tmp_path}/tokens.py:Tokens}}", "trainer.max_steps=2")[2]
    assert line["tokens_per_second"] == pytest.approx(5 * line["samples_per_second"])
