"""A split parameter that is used by itself: what a user is told, and what is left to torch."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.split_training import CPU, make_net
from torch.nn import functional

from trainwright.errors import TrainwrightError
from trainwright.parallel.fully_shard import SplitSettings, reject_ungathered, shard_parameters

WAYS = {
    "embedding": lambda model: model.embed(torch.zeros(2, 3, dtype=torch.int64)),
    "inside_a_block": lambda model: model.layers[0].norm(torch.ones(2, 7, dtype=torch.float64)),
    "functional": lambda model: functional.linear(torch.ones(2, 7, dtype=torch.float64), model.frozen.weight),
    "convolution": lambda model: model.mix(torch.ones(1, 7, 4, dtype=torch.float64)),
}


def test_a_direct_call_of_a_submodule_of_a_sharded_model_is_explained(tmp_path):
    def act(mesh):
        model = make_net()
        shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        said = {}
        for name, use in WAYS.items():
            try:
                use(model)
            except RuntimeError as error:
                with pytest.raises(TrainwrightError) as told:
                    reject_ungathered(error, model)
                said[name] = str(told.value)
        return said

    for said in on_ranks(tmp_path, {"fsdp": 2}, act):
        assert list(said) == list(WAYS)
        for text in said.values():
            assert f"{__file__}:" in text
            assert "a method of Net was called directly" in text


def test_other_errors_and_whole_models_are_left_to_torch():
    for words in ("shapes cannot be multiplied", "got mixed torch.Tensor and DTensor"):
        assert reject_ungathered(RuntimeError(words), make_net()) is None
