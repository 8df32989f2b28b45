"""`micro_batch_size: auto`, on devices that are small because a model says so."""

import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises
from torch import nn
from torch.utils.data import Dataset

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.api.functions import train
from trainwright.autotune.micro_batch import Growth, largest_that_fits, micro_batch_sizes
from trainwright.backends import Backend
from trainwright.data.loader import TrainData
from trainwright.errors import ConfigError, OutOfMemory

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides, name="small", micro="auto"):
    given = [f"output_dir={tmp_path}", f"name={name}", "trainer.max_steps=3", "trainer.global_batch_size=12"]
    given += ["evaluation={}", f"trainer.micro_batch_size={micro}"]
    return RunConfig.load(PROJECT / "run.yaml", [*given, *overrides])


class Fits(nn.Module):
    """A model with memory for so many samples of a forward, in a device that counts what it was asked for."""

    def __init__(self, limit, asked=None):
        super().__init__()
        self.limit = limit
        self.asked = [] if asked is None else asked
        self.layer = nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, labels):
        self.asked.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"Tried to allocate {len(x)} samples.")
        return nn.functional.cross_entropy(self.layer(self.dropout(x)), labels)


def trainer_with(limit, asked=None, **methods):
    """A trainer's class whose model fits `limit` samples."""

    class Small(Trainer):
        @classmethod
        def build_model(cls, build):
            return Fits(limit, asked)

    for name, method in methods.items():
        setattr(Small, name, method)
    return Small


NO_MODEL = "model=null"


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def saved_number(tmp_path, name="small"):
    return RunConfig.load(tmp_path / name / "config.yaml").trainer.micro_batch_size


@pytest.mark.parametrize(("limit", "found"), [(1, 1), (5, 4), (11, 6), (12, 12)])
def test_the_largest_divisor_that_fits_is_found_and_the_global_batch_stays(tmp_path, limit, found):
    trainer = build_trainer(load(tmp_path, NO_MODEL), trainer_with(limit))
    plan = trainer.context.batch_plan
    assert (plan.global_batch_size, plan.micro_batch_size, plan.gradient_accumulation_steps) == (12, found, 12 // found)
    assert saved_number(tmp_path) == trainer.config.trainer.micro_batch_size == found


def test_a_searched_run_is_bit_equal_to_a_run_with_that_number(tmp_path):
    searched = build_trainer(load(tmp_path, NO_MODEL, name="a"), trainer_with(5))
    generators = torch.get_rng_state(), random.getstate()
    told = build_trainer(load(tmp_path, NO_MODEL, name="b", micro=4), trainer_with(5))
    assert all(map(torch.equal, weights(searched), weights(told)))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert searched.train_data.samples_seen == 0
    assert not searched.optimizers["main"].state
    searched.train()
    told.train()
    assert all(map(torch.equal, weights(searched), weights(told)))
    lines = [(tmp_path / name / "metrics.json").read_text().splitlines() for name in "ab"]
    losses = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert losses[0] == losses[1]


def test_objects_of_a_user_are_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, labels):
            self.calls = self.calls + 1
            if len(x) > 6:
                raise torch.OutOfMemoryError("no memory")
            return nn.functional.cross_entropy(self.layers(x), labels)

    class Noisy(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"x": torch.randn(4), "labels": torch.tensor(index % 2)}

    data = Noisy()
    common = {"max_steps": 3, "batch_size": 12}
    found = train(Normed(), data, name="a", overrides=["trainer.micro_batch_size=auto"], **common)
    told = train(Normed(), data, name="b", overrides=["trainer.micro_batch_size=6"], **common)
    assert found.config.trainer.micro_batch_size == 6
    assert found.model.calls == told.model.calls == 6
    states = [each.model.state_dict() for each in (found, told)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_loader_and_an_optimizer_of_a_user_are_restored(tmp_path):
    model = Fits(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rows = [{"x": torch.full((4,), float(number)), "labels": torch.tensor(0)} for number in range(24)]
    data = TrainData(rows, global_batch_size=12, seed=0, collator=torch.utils.data.default_collate)

    class Given(Trainer):
        @classmethod
        def build_model(cls, build):
            return model

        @classmethod
        def build_optimizers(cls, build, model):
            return optimizer

        @classmethod
        def build_train_data(cls, build):
            return data

    config = load(tmp_path, NO_MODEL, "data.train=null", "data.collator=stack", "trainer.optimizer=null")
    trainer = build_trainer(config, Given)
    assert trainer.config.trainer.micro_batch_size == 6
    assert data.samples_seen == 0
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, weights(trainer)))


def test_a_resumed_run_does_not_search_again(tmp_path):
    asked = []
    small = trainer_with(5, asked)
    build_trainer(load(tmp_path, NO_MODEL), small).train()
    asked.clear()
    # Now more would fit, but another number would end in other last bits.
    trainer = build_trainer(load(tmp_path, NO_MODEL, "trainer.max_steps=5"), trainer_with(100, asked))
    assert (trainer.step, asked, trainer.config.trainer.micro_batch_size) == (3, [], 4)


def test_an_earlier_number_that_does_not_divide_or_of_another_device_is_not_used(tmp_path):
    build_trainer(load(tmp_path, NO_MODEL), trainer_with(5))
    trainer = build_trainer(load(tmp_path, NO_MODEL, "trainer.global_batch_size=15"), trainer_with(5))
    assert trainer.config.trainer.micro_batch_size == 5
    environment = tmp_path / "small" / "environment.json"
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "device": "another"}))
    trainer = build_trainer(load(tmp_path, NO_MODEL, "trainer.global_batch_size=15"), trainer_with(3))
    assert trainer.config.trainer.micro_batch_size == 3


def test_a_fresh_start_searches_again(tmp_path):
    build_trainer(load(tmp_path, NO_MODEL), trainer_with(5)).train()
    trainer = build_trainer(load(tmp_path, NO_MODEL), trainer_with(100), fresh=True)
    assert (trainer.step, trainer.config.trainer.micro_batch_size) == (0, 12)


def test_if_nothing_fits_the_error_says_what_could_change_and_leaves_no_folder(tmp_path):
    with raises(OutOfMemory, "runtime.precision", "bf16"):
        build_trainer(load(tmp_path, NO_MODEL), trainer_with(0))
    assert not (tmp_path / "small").exists()


def test_a_model_that_does_not_fit_raises_the_same_error(tmp_path):
    class TooLarge(Trainer):
        @classmethod
        def build_model(cls, build):
            raise torch.OutOfMemoryError("no memory for the model")

    with raises(OutOfMemory):
        build_trainer(load(tmp_path, NO_MODEL), TooLarge)


def test_memory_that_only_the_optimizer_state_exceeds_is_noticed(tmp_path):
    class Stateful(Trainer):
        @classmethod
        def build_model(cls, build):
            return Fits(12)

        def run_forward(self, batch):
            if self.optimizers["main"].state and len(batch["x"]) > 3:
                raise RuntimeError("CUDA out of memory beside the optimizer's state")
            return super().run_forward(batch)

    assert build_trainer(load(tmp_path, NO_MODEL), Stateful).config.trainer.micro_batch_size == 3


def test_memory_that_only_the_second_micro_batch_exceeds_is_noticed(tmp_path):
    class Accumulating(Trainer):
        @classmethod
        def build_model(cls, build):
            return Fits(12)

        def run_forward(self, batch):
            has_gradients = any(parameter.grad is not None for parameter in self.model.parameters())
            if len(batch["x"]) + 4 * has_gradients > 8:
                raise torch.OutOfMemoryError("no memory")
            return super().run_forward(batch)

    assert build_trainer(load(tmp_path, NO_MODEL), Accumulating).config.trainer.micro_batch_size == 4


def test_no_more_than_two_micro_batches_of_a_step_are_tried(tmp_path):
    asked = []
    build_trainer(load(tmp_path, NO_MODEL), trainer_with(5, asked))
    # Size 1 is tried first, to see whether it can be trained; its first step has no optimizer state.
    assert asked == [1, 1, 1, 1, 1, 1, 3, 3, 12, 4, 4, 6]


def test_a_model_that_needs_two_samples_is_tried_with_more(tmp_path):
    class Pairs(Trainer):
        @classmethod
        def build_model(cls, build):
            model = Fits(6)
            model.dropout = nn.BatchNorm1d(4)  # which raises ValueError for one sample
            return model

    assert build_trainer(load(tmp_path, NO_MODEL), Pairs).config.trainer.micro_batch_size == 6


@pytest.mark.parametrize("error", [ValueError("the forward is wrong"), KeyError("labels")])
def test_other_errors_are_raised_unchanged(tmp_path, error):
    def run_forward(self, batch):
        raise error

    with pytest.raises(type(error), match=str(error)):
        build_trainer(load(tmp_path, NO_MODEL), trainer_with(5, run_forward=run_forward))
    assert not (tmp_path / "small").exists()


def test_a_run_of_a_stream_starts_at_its_beginning_after_the_search(tmp_path):
    stream = "data.train={type: parts.py:ShardedPoints, size: 50, noise: 0.1}"
    found = build_trainer(load(tmp_path, NO_MODEL, stream, name="a"), trainer_with(5))
    told = build_trainer(load(tmp_path, NO_MODEL, stream, name="b", micro=4), trainer_with(5))
    found.train()
    told.train()
    assert found.config.trainer.micro_batch_size == 4
    assert all(map(torch.equal, weights(found), weights(told)))


def test_the_longest_samples_are_tried_if_lengths_are_known(tmp_path):
    class Sentences(Dataset):
        lengths = [1] * 30 + [10] * 12 + [1] * 30

        def __len__(self):
            return len(self.lengths)

        def __getitem__(self, index):
            return {"x": torch.ones(self.lengths[index]), "labels": torch.tensor(0)}

    def pad(samples):
        rows = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
        return {"x": rows, "labels": torch.stack([sample["labels"] for sample in samples])}

    class Tokens(Trainer):
        @classmethod
        def build_model(cls, build):
            return nn.Linear(1, 2)

        @classmethod
        def build_train_data(cls, build):
            return Sentences()

        @classmethod
        def build_collator(cls, build):
            return pad

        def forward(self, x, labels):
            if x.numel() > 40:
                raise torch.OutOfMemoryError("no memory")
            return nn.functional.cross_entropy(self.model(x.sum(1, keepdim=True)), labels)

    config = load(tmp_path, NO_MODEL, "data.train=null", "data.shuffle=false")
    assert build_trainer(config, Tokens).config.trainer.micro_batch_size == 4


def test_hooks_and_writers_of_the_trial_are_never_called(tmp_path):
    called = []

    class Telling(Hook):
        def __getattribute__(self, name):
            if name in ("before_train", "before_step", "after_step", "close"):
                called.append(name)
            return super().__getattribute__(name)

    def build_hooks(cls, build):
        return [Telling()]

    built = build_trainer(load(tmp_path, NO_MODEL), trainer_with(5, build_hooks=classmethod(build_hooks)))
    reads = len(called)
    build_trainer(load(tmp_path, NO_MODEL, name="b", micro=4), trainer_with(5, build_hooks=classmethod(build_hooks)))
    assert reads == 2 * (len(called) - reads)  # a trainer looks up the moments when it is made, and calls none
    assert not (tmp_path / "small" / "metrics.json").exists()
    assert built.step == 0


def test_a_number_of_accumulation_steps_is_rejected(tmp_path):
    with raises(ConfigError, "trainer.gradient_accumulation_steps", "3", "micro_batch_size"):
        build_trainer(load(tmp_path, NO_MODEL, "trainer.gradient_accumulation_steps=3"), trainer_with(5))


def test_the_number_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trainwright"):
        build_trainer(load(tmp_path, NO_MODEL), trainer_with(5))
        build_trainer(load(tmp_path, NO_MODEL), trainer_with(5))
    said = [each for each in caplog.messages if "auto" in each]
    assert said == [
        "trainer.micro_batch_size: auto: finding how many of 12 samples fit into memory at once",
        "trainer.micro_batch_size: auto: 4 of 12 samples at once",
        "trainer.micro_batch_size: auto: 4, as in the earlier start of this run",
    ]


@given(st.integers(1, 3000))
def test_the_sizes_are_the_divisors_in_ascending_order(number):
    assert micro_batch_sizes(number) == [size for size in range(1, number + 1) if number % size == 0]


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_the_largest_that_fits_is_found_in_few_trials(number, limit):
    sizes, tried = micro_batch_sizes(number), []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = largest_that_fits(sizes, fits)
    assert found == max((size for size in sizes if size <= limit), default=None)
    assert len(tried) == len(set(tried)) <= 2 * len(sizes).bit_length()


def test_there_is_no_largest_of_no_candidates():
    assert largest_that_fits([], lambda size: True) is None


def test_the_search_begins_with_the_smallest_and_tries_the_largest_of_a_power_of_two_fourth():
    tried = []
    assert largest_that_fits(micro_batch_sizes(512), lambda size: not tried.append(size)) == 512
    assert tried == [1, 4, 64, 512]


class SmallMachine(Backend):
    """A machine with `room` bytes, on which a step needs `takes` bytes."""

    def __init__(self, room, takes):
        super().__init__(torch.device("cpu"))
        self.room, self.takes = room, takes

    def memory_room(self):
        return self.room

    def memory(self):
        return replace(super().memory(), in_use=1000, peak=1000 + self.takes)


def test_a_size_that_would_kill_the_process_is_not_tried():
    growth = Growth(SmallMachine(room=10_000, takes=1000))
    assert growth.leaves_room(10**9)  # nothing is known yet
    with growth.measuring(1):
        pass
    assert growth.leaves_room(9)
    assert not growth.leaves_room(10)  # which would leave nothing free


def test_fixed_memory_is_not_counted_per_sample_and_ranks_share_the_room():
    growth = Growth(SmallMachine(room=10_000, takes=1000), num_fixed_bytes=900, num_sharing=2)
    with growth.measuring(2):
        pass
    assert growth.leaves_room(77)  # 900 + 77 × 50 bytes of 0.95 × 5000
    assert not growth.leaves_room(78)


def test_every_size_is_tried_if_the_room_is_unknown():
    growth = Growth(SmallMachine(room=None, takes=1000))
    with growth.measuring(1):
        pass
    assert growth.leaves_room(10**12)
