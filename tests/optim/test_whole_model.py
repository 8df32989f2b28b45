"""Optimizers of a pipeline's stages are made by the rules of the whole model, and report each weight once."""

import copy

import pytest
import torch
from tests.messages import raises
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.test_stages import MODELS

from trainwright import RunConfig
from trainwright.build.components import Build
from trainwright.build.parallelize import parallelize_model
from trainwright.errors import CheckpointError, ConfigError
from trainwright.hooks.ema import EMA
from trainwright.optim.adamw import AdamW
from trainwright.optim.param_groups import classify_parameters, describe_whole
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import ALONE, Mesh
from trainwright.parallel.pipeline import mark_shared, split_layers

CPU = torch.device("cpu")


def cut(model, mesh):
    """Cuts a model to this rank's stage, as placing does."""
    whole = describe_whole(model, mesh.size("pipeline"))
    split_layers(model, mesh)
    model.whole = whole
    mark_shared(model)
    return model


def stages_of(model, num_stages=3):
    """A copy of the model for each stage, cut to it."""
    meshes = [Mesh({**ALONE, "pipeline": num_stages}, place) for place in range(num_stages)]
    return [cut(copy.deepcopy(model), mesh) for mesh in meshes]


def build_of(trainer, model=None):
    return Build(RunConfig.from_dict({"trainer": trainer, **({"model": model} if model else {})}))


def groups_of(optimizer):
    """The names in each group, and what the group sets."""
    return [
        (group["param_names"], {key: value for key, value in group.items() if key not in ("params", "param_names")})
        for group in optimizer.param_groups
    ]


OPTIMIZERS = {
    "muon": {"type": "muon", "lr": 0.01, "exclude": ["*.0.*"]},
    "groups": {"type": "adamw", "lr": 0.01, "groups": [{"match": "model.layers.0.*", "weight_decay": 0.0}]},
    "embedding": {"type": "lion", "lr": 0.01, "groups": [{"match": "*embed*", "lr": 0.1}]},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_stages_together_have_the_groups_of_the_whole_model(name, kind):
    torch.manual_seed(0)
    model = MODELS[kind][0]()
    build = build_of({"optimizer": OPTIMIZERS[name]})
    expected = groups_of(build.optimizers(model)["main"])
    stages = stages_of(model)
    made = [groups_of(build.optimizers(stage)["main"]) for stage in stages]
    for number, (names, settings) in enumerate(expected):
        assert all(groups[number][1] == settings for groups in made)
        held = [[each for each in names if each in dict(stage.named_parameters())] for stage in stages]
        assert [groups[number][0] for groups in made] == held
        assert {each for some in held for each in some} == set(names)


@pytest.mark.parametrize("kind", ["untied", "gpt2", "bert", "vit"])
def test_a_stage_knows_the_kinds_of_the_whole_model(kind):
    model = MODELS[kind][0]()
    assert all(stage.whole.kinds == classify_parameters(model) for stage in stages_of(model))


def test_an_optimizer_may_own_nothing_on_a_stage_and_steps_there():
    entries = {
        "embedding": {"optimizer": {"type": "adamw"}, "match": ["*embed*"]},
        "rest": {"optimizer": {"type": "adamw"}, "match": ["*norm*", "*proj*", "lm_head*"]},
    }
    last = stages_of(MODELS["untied"][0]())[-1]
    optimizers = build_of({"optimizers": entries}).optimizers(last)
    assert [len(group["params"]) for group in optimizers["embedding"].param_groups] == [0]
    assert optimizers["embedding"].step() == {}
    owned = [each for group in optimizers["rest"].param_groups for each in group["params"]]
    assert {id(each) for each in owned} == {id(each) for each in last.parameters()}


def test_a_glob_that_matches_nothing_on_any_stage_is_rejected_on_every_stage():
    build = build_of({"optimizer": {"type": "adamw", "groups": [{"match": "model.layers.9.*", "lr": 0.1}]}})
    for stage in stages_of(MODELS["tied"][0]()):
        with raises(ConfigError, "layers.9"):
            build.optimizers(stage)


def test_a_stage_with_nothing_to_train_is_rejected_on_every_stage():
    model = MODELS["untied"][0]()
    model.get_submodule("model.layers.1").requires_grad_(False)
    build = build_of({"optimizer": {"type": "adamw"}})
    for stage in stages_of(model):
        with raises(ConfigError, "1", "pipeline"):
            build.optimizers(stage)


class Watched:
    """What a hook sees of a trainer."""

    def __init__(self, model):
        self.model, self.step = model, 1


def test_averages_of_all_stages_are_taken_up_by_each_that_has_the_weight():
    model = MODELS["tied"][0]()
    averages = {name: torch.randn_like(each) for name, each in reversed(list(model.named_parameters()))}
    for stage in stages_of(model):
        hook = EMA(decay=0.5)
        hook.trainer = Watched(stage)
        hook.load_state_dict({"averages": {name: each.clone() for name, each in averages.items()}})
        hook.after_step()  # a run that went back goes on without before_train
        for name, weight in stage.named_parameters():
            assert torch.equal(hook.averages[name], torch.lerp(averages[name], weight.detach(), 0.5))
        hook.load_state_dict({"averages": {**averages, "gone.weight": torch.zeros(1)}})
        with raises(CheckpointError, "gone.weight"):
            hook.before_train()


def report_norms(mesh):
    """Two updates of tied and untied weights, all reported or only the first block; and values that are repaired."""
    config = RunConfig.from_dict({"runtime": {"mesh": {"pipeline": mesh.size("pipeline")}}})
    ranks = Ranks() if mesh.size("pipeline") == 1 else Ranks(mesh.rank("pipeline"), mesh.size("pipeline"), mesh=mesh)
    reported = []
    for rules in ([], [{"match": "model.layers.0.*", "report": True}]):
        torch.manual_seed(0)
        model = MODELS["tied"][0]()
        model = parallelize_model(model, ranks, config, CPU).model
        arguments = {"report": True, "repair_nan": True} if not rules else {"groups": rules}
        optimizer = build_of({"optimizer": {"type": "adamw", "lr": 0.01, **arguments}}).optimizers(model)["main"]
        assert isinstance(optimizer, AdamW)
        optimizer.stages = mesh.group("pipeline") if mesh.size("pipeline") > 1 else None
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.grad.view(-1)[0] = float("nan") if not rules else 1.0
        reported.append({key: value.item() for key, value in optimizer.step().items()})
    return reported


def test_reports_count_tied_weights_once_and_need_no_parameter_on_every_stage(tmp_path):
    expected = report_norms(Mesh())
    assert expected[0]["nan_gradients"] > 0
    for reported in on_ranks(tmp_path, {"pipeline": 2}, report_norms):
        assert reported[0] == pytest.approx(expected[0], rel=1e-6)
        assert reported[1] == pytest.approx(expected[1], rel=1e-6)
