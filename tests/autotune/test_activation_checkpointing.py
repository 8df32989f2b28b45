"""`model.activation_checkpointing` with `budget: auto`: few layers are recomputed, with equal results."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.messages import mentions, raises
from tests.parallel.forked_ranks import on_ranks

from trainwright import RunConfig, build_trainer
from trainwright.autotune.activation_checkpointing import settle_activation_checkpointing, wants_budget
from trainwright.backends import host_memory as main_memory
from trainwright.backends import pick_backend
from trainwright.backends.host_memory import MemoryFacts
from trainwright.build.run import assemble
from trainwright.errors import ConfigError, OutOfMemory
from trainwright.parallel.collectives import Ranks

PROJECT = Path(__file__).parents[1] / "project"
MODEL = Path(__file__).with_name("layered_model.py")
AUTO = {"layers": ["Layer"], "budget": "auto"}


def load(tmp_path, *overrides, name="small", limit=6, activation_checkpointing=AUTO):
    model = {"type": f"{MODEL}:Layered", "limit": limit, "activation_checkpointing": activation_checkpointing}
    given = [f"output_dir={tmp_path}", f"name={name}", "trainer.max_steps=3", "evaluation={}"]
    return RunConfig.load(PROJECT / "run.yaml", [*given, *overrides]).derive({"model": model})


def settle(config, ranks=None, folder=None, tries=True):
    backend = pick_backend("cpu")

    def alone(trial, trial_folder):
        assert tries, "nothing is to be tried"
        return assemble(trial, None, backend, Ranks(), trial_folder, evaluates=False)[0]

    return settle_activation_checkpointing(config, alone, backend=backend, ranks=ranks or Ranks(), folder=folder)


@pytest.fixture
def rejecting_device(monkeypatch):
    """A device of which nobody knows what it has left: it raises out-of-memory, as a GPU does."""
    monkeypatch.setattr(main_memory, "room", lambda: None)


def budget_of(config):
    return config.model.reserved["activation_checkpointing"]["budget"]


@pytest.mark.parametrize(("limit", "recomputed"), [(0, 6), (1, 5), (4, 2), (6, 0)])
def test_as_few_layers_are_recomputed_as_the_device_allows(tmp_path, rejecting_device, limit, recomputed):
    config = settle(load(tmp_path, limit=limit))
    trainer = build_trainer(config)
    chosen = [hasattr(layer, "_original_forward") for layer in trainer.model.layers]
    assert chosen == [True] * recomputed + [False] * (6 - recomputed)
    trainer.train()


@pytest.mark.parametrize(("num_layers_of_room", "budget"), [(0, 0.0), (1.5, 0.1667), (3.2, 0.5), (6, 1.0), (100, 1.0)])
def test_in_main_memory_the_bytes_of_layers_are_counted_and_nothing_too_large_is_tried(
    tmp_path, monkeypatch, num_layers_of_room, budget
):
    # Of each of 4 samples a layer holds 8 numbers behind tanh and dropout's mask of 4.
    num_bytes = 4 * (8 * 4 + 4 * 4)
    monkeypatch.setattr(main_memory, "facts", lambda: MemoryFacts(in_use=0, peak=0))
    monkeypatch.setattr(main_memory, "room", lambda: int(num_layers_of_room * num_bytes / 0.95) + 1)
    # A trial with a layer too many would meet the end of memory, and be no answer.
    config = settle(load(tmp_path, limit=0))
    assert budget_of(config) == budget


def test_no_layer_is_recomputed_if_main_memory_has_room(tmp_path):
    assert budget_of(settle(load(tmp_path))) == 1.0


def test_a_searched_run_is_bit_equal_to_a_run_with_that_share(tmp_path, rejecting_device):
    found = build_trainer(settle(load(tmp_path, limit=3, name="a")))
    generators = torch.get_rng_state()
    told = build_trainer(
        load(tmp_path, limit=3, name="b", activation_checkpointing={"layers": ["Layer"], "budget": 0.5})
    )
    assert torch.equal(generators, torch.get_rng_state())
    for trainer in (found, told):
        assert not trainer.optimizers["main"].state
        assert trainer.train_data.samples_seen == 0
        trainer.train()
    assert all(map(torch.equal, found.model.parameters(), told.model.parameters()))


def test_a_resumed_run_uses_its_share_again(tmp_path, rejecting_device):
    config = load(tmp_path, limit=3)
    build_trainer(settle(config))
    again = settle(config, folder=tmp_path / "small", tries=False)
    assert budget_of(again) == 0.5


def test_a_share_of_another_micro_batch_size_is_not_used(tmp_path, rejecting_device):
    build_trainer(settle(load(tmp_path, limit=3)))
    config = load(tmp_path, "trainer.micro_batch_size=2", limit=4)
    assert budget_of(settle(config, folder=tmp_path / "small")) == 0.6667


def test_only_budgets_that_are_auto_are_searched(tmp_path, rejecting_device):
    activation_checkpointing = {"layers.0": ["Layer"], "layers.5": {"layers": ["Layer"], "budget": "auto"}}
    config = settle(load(tmp_path, limit=4, activation_checkpointing=activation_checkpointing))
    found = config.model.reserved["activation_checkpointing"]
    assert (list(found["layers.0"]), found["layers.5"]["budget"]) == (["Layer"], 0.0)


def test_the_largest_need_of_all_ranks_decides(tmp_path, rejecting_device):
    def act(mesh):
        ranks = Ranks(torch.distributed.get_rank(), 2)
        return budget_of(settle(load(tmp_path, limit=2 + 2 * ranks.rank), ranks))

    assert on_ranks(tmp_path, {"replicate": 2}, act) == [0.3334, 0.3334]


def test_if_nothing_fits_the_error_says_what_could_change(tmp_path, rejecting_device):
    with raises(OutOfMemory, "runtime.precision"):
        settle(load(tmp_path, limit=-1))


def test_an_automatic_micro_batch_size_is_rejected(tmp_path):
    with raises(ConfigError, "model.activation_checkpointing.budget", "trainer.micro_batch_size"):
        settle(load(tmp_path, "trainer.micro_batch_size=auto"), tries=False)


@pytest.mark.parametrize(
    ("activation_checkpointing", "wants"), [(AUTO, True), (["Layer"], False), ({"layers.0": AUTO}, True), (None, False)]
)
def test_wants_budget_is_true_if_any_budget_is_auto(tmp_path, activation_checkpointing, wants):
    assert wants_budget(load(tmp_path, activation_checkpointing=activation_checkpointing)) is wants


def test_the_share_is_logged(tmp_path, rejecting_device, caplog):
    with caplog.at_level(logging.INFO, logger="trainwright"):
        settle(load(tmp_path, limit=3))
    assert [each for each in caplog.messages if "activation_checkpointing" in each] == [
        "model.activation_checkpointing.budget: auto: finding the minimum number of layers to recompute",
        "model.activation_checkpointing.budget: auto: 0.5",
    ]


def test_a_run_finds_its_budget_and_uses_it_again(tmp_path, rejecting_device, caplog):
    build_trainer(load(tmp_path, limit=3)).train()
    with caplog.at_level(logging.INFO, logger="trainwright"):
        trainer = build_trainer(load(tmp_path, "trainer.max_steps=5", limit=3))
    assert (trainer.step, budget_of(trainer.config)) == (3, 0.5)
    assert mentions(caplog.messages, "model.activation_checkpointing.budget", "0.5")
