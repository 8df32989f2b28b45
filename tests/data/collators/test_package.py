"""What holds for every collator of the package."""

import inspect

import pytest
import torch

from trainwright.config.builtin import BUILT_INS
from trainwright.config.component import Component
from trainwright.data import collators
from trainwright.data.loader import TrainData
from trainwright.registry import resolve as registry

OURS = {name: place for name, place in BUILT_INS["collator"].items() if place.startswith(collators.__name__)}


@pytest.mark.parametrize("name", OURS)
def test_each_takes_keywords_only_and_shows_an_example(name):
    found = registry.find("collator", name, project_dir=".")
    kinds = {one.kind for one in inspect.signature(found).parameters.values()}
    assert kinds <= {inspect.Parameter.KEYWORD_ONLY}
    assert ">>> " in found.__doc__


def test_a_run_file_s_arguments_build_one():
    component = Component("tokenize", tokenizer="bytes", buckets=[4, 8])
    collator = registry.instantiate("collator", component, project_dir=".", label="data.collator")
    assert collator([{"text": "abc"}])["input_ids"].tolist() == [[97, 98, 99, 256]]


def test_what_is_hidden_is_the_same_after_a_resume():
    dataset = [{"text": "to be or not to be " * (1 + number % 3)} for number in range(16)]
    collator = registry.find("collator", "masked_language_model", project_dir=".")(tokenizer="bytes")
    whole = TrainData(dataset, collator=collator, global_batch_size=4, seed=3)
    batches = whole.batches(iter)
    for _ in range(2):
        next(batches)
    resumed = TrainData(dataset, collator=collator, global_batch_size=4, seed=3)
    resumed.load_state_dict(whole.state_dict())
    torch.rand(5)  # what else was drawn in the process does not matter
    assert torch.equal(next(resumed.batches(iter))["input_ids"], next(batches)["input_ids"])
