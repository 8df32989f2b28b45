"""Split parameters train as whole ones do: on real ranks, with everything that a user's model may have."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.split_training import (
    CPU,
    Block,
    assert_equal,
    make_batches,
    make_net,
    train_alone,
    train_split,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from trainwright.errors import ConfigError
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import Mesh, local

LAYOUTS = {"fsdp": {"fsdp": 2}, "hybrid": {"replicate": 2, "fsdp": 2}, "uneven": {"fsdp": 3}}
WAYS = {
    "plain": {},
    "kept": {"settings": SplitSettings(reshard_after_forward=False)},
    "pieces": {"num_pieces": 2},
    "reduced_last": {"num_pieces": 2, "settings": SplitSettings(accumulate_unsharded=True)},
    "last_unknown": {"num_pieces": 2, "is_last_known": False},
    "last_unknown_and_whole": {
        "num_pieces": 2,
        "is_last_known": False,
        "settings": SplitSettings(accumulate_unsharded=True),
    },
    "spare_on_one_rank": {"spare": lambda rank: rank == 0},
    "spare_on_one_rank_in_pieces": {"spare": lambda rank: rank == 0, "num_pieces": 2},
    "spare_on_one_rank_reduced_last": {
        "spare": lambda rank: rank == 0,
        "num_pieces": 2,
        "settings": SplitSettings(accumulate_unsharded=True),
    },
}


SOME_WAYS = ("plain", "reduced_last", "last_unknown", "spare_on_one_rank_in_pieces")
"""Four ranks and three are slower than two: these ways are between the others."""
OTHER_WAYS = tuple(name for name in WAYS if name not in SOME_WAYS)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("fsdp", tuple(WAYS)),
        ("hybrid", SOME_WAYS),
        ("uneven", SOME_WAYS),
        pytest.param("hybrid", OTHER_WAYS, marks=pytest.mark.slow),
        pytest.param("uneven", OTHER_WAYS, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "hybrid", "uneven", "hybrid, other ways", "uneven, other ways"],
)
def test_split_models_train_as_whole_ones_do_in_every_way_of_reducing(layout, names, tmp_path):
    ways, axes = {name: WAYS[name] for name in names}, LAYOUTS[layout]

    def act(mesh):
        return {name: train_split(make_net(), mesh, **way)[0] for name, way in ways.items()}

    num_ranks = axes.get("replicate", 1) * axes["fsdp"]
    ranks = on_ranks(tmp_path, axes, act)
    for name, way in ways.items():
        alone, *_ = train_alone(make_net(), num_ranks=num_ranks, spare=way.get("spare", lambda rank: False))
        for ended in ranks:
            assert_equal(ended[name], alone)


def cases_of_two_ranks(mesh):
    """What the tests below look at, of one start of two ranks."""
    found = {}
    batch = make_batches(2)[0].chunk(2, dim=1)[mesh.rank("fsdp")]
    begun = whole(make_net())

    model = make_net()
    names = [name for name, _ in model.named_parameters()]
    sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
    found["names"] = [name for name, _ in model.named_parameters()] == names
    found["marks"] = model.one.no_weight_decay
    found["tied"] = model.head.weight is model.embed.weight
    found["averaging"] = sync.averaging
    found["values"] = all(torch.equal(value, begun[name]) for name, value in whole(model).items())
    found["whole"] = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    found["lengths"] = [local(parameter).shape[0] for parameter in (model.embed.weight, model.layers[0].up.weight)]
    loss = model(*batch)
    loss.backward()
    found["unused_before"] = model.unused.weight.grad is not None
    sync.finish()
    found["unused"] = (model.unused.weight.grad, model.layers[1].spare.weight.grad, model.frozen.weight.grad)
    found["laid_out"] = model.embed.weight.grad.placements == model.embed.weight.placements
    found["buffers"] = [int(layer.calls) for layer in model.layers]

    with torch.no_grad():
        model(*batch)
    found["split_after_evaluation"] = all(isinstance(p, DTensor) for n, p in model.named_parameters() if n != "scale")
    kept = make_net()
    shard_parameters(kept, mesh, settings=SplitSettings(reshard_after_forward=False), device=CPU)
    with torch.no_grad():
        kept(*batch)
    found["split_after_evaluation"] &= all(isinstance(p, DTensor) for n, p in kept.named_parameters() if n != "scale")
    model(*batch)  # and no backward
    found["gathered_after_forward"] = not isinstance(model.embed.weight, DTensor)
    sync.finish()
    found["split_after_finish"] = isinstance(model.embed.weight, DTensor)

    found["method"] = model.loss_of(*batch).item()
    sync.finish()
    with torch.no_grad():
        model.loss_of(*batch)
    found["split_after_method"] = isinstance(model.embed.weight, DTensor)
    with torch.no_grad():
        local(model.embed.weight).mul_(2.0)
    found["forward_after_change"] = model(*batch).item()

    model = make_net(width=8, hidden=6)
    dims = {"layers.0.down.weight": 1, "layers.1.down.weight": 1, "layers.2.down.weight": 1, "embed.weight": 1}
    found["dims"] = train_split(model, mesh, data_dim=dims.get)[0]
    found["placements"] = [p.placements for p in (model.embed.weight, model.layers[0].down.weight, model.mix.weight)]
    try:
        uneven = {"layers.0.up.weight": 1}
        shard_parameters(make_net(), mesh, settings=SplitSettings(), device=CPU, data_dim=uneven.get)
    except ConfigError as error:
        found["rejected"] = str(error)
    model = make_net()
    model.forward_methods = ("los_of",)
    try:
        shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
    except ConfigError as error:
        found["no_method"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks(tmp_path_factory.mktemp("two"), {"fsdp": 2}, cases_of_two_ranks)


def test_names_values_ties_and_attributes_of_parameters_stay(found):
    for rank in found:
        assert rank["names"]
        assert rank["values"]
        assert rank["tied"]
        assert rank["marks"] is True


def test_parts_may_be_uneven_and_scalars_stay_whole(found):
    assert [rank["lengths"] for rank in found] == [[6, 3], [5, 2]]
    assert found[0]["whole"] == ["scale"]
    assert found[0]["averaging"] == 2


def test_gradients_are_laid_out_as_parameters_and_none_where_no_rank_has_one(found):
    for rank in found:
        assert rank["laid_out"]
        assert rank["unused_before"]  # zeros were sent
        assert rank["unused"] == (None, None, None)


def test_buffers_of_blocks_are_each_ranks_own(found):
    assert found[0]["buffers"] == [1, 1, 1]


def test_parameters_are_in_parts_after_an_evaluation_and_before_an_update(found):
    for rank in found:
        assert rank["split_after_evaluation"]
        assert rank["gathered_after_forward"]
        assert rank["split_after_finish"]
        assert rank["split_after_method"]


def test_a_listed_method_gathers_as_forward_does_and_a_change_is_seen_by_the_next_forward(found):
    for rank, own in enumerate(make_batches(2)[0].chunk(2, dim=1)):
        model = make_net()
        assert found[rank]["method"] == pytest.approx(model.loss_of(*own).item(), rel=1e-12)
        with torch.no_grad():
            model.embed.weight.mul_(2.0)
        assert found[rank]["forward_after_change"] == pytest.approx(model(*own).item(), rel=1e-12)


def test_a_rule_may_name_the_dim_that_is_split(found):
    alone, *_ = train_alone(make_net(width=8, hidden=6))
    for rank in found:
        assert rank["placements"] == [(Shard(1),), (Shard(1),), (Shard(0),)]
        assert_equal(rank["dims"], alone)


def test_another_dim_than_the_first_must_be_even(found):
    assert found[0]["rejected"].startswith(
        "model.sharding: layers.0.up.weight of shape [5, 7] cannot be sharded over 2"
    )


def test_a_listed_method_that_is_none_is_rejected(found):
    assert "Net.forward_methods lists 'los_of'" in found[0]["no_method"]


def test_nothing_is_sharded_with_one_rank():
    model = make_net()
    sync = shard_parameters(model, Mesh(), settings=SplitSettings(), device=CPU)
    sync.begin_backward(is_last=True)
    sync.finish()
    assert sync.averaging == 1
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


class Mixed(nn.Module):
    """Norms in another dtype, a weight that two blocks share, and blocks that are frozen or trained in part."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.LayerNorm(6, dtype=torch.float32)) for _ in range(3)
        )
        self.layers = nn.ModuleList(Cast(pair) for pair in self.layers)
        self.layers[2].first.weight = self.layers[0].first.weight
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Cast(nn.Module):
    def __init__(self, pair):
        super().__init__()
        self.first, self.norm = pair
        self.second = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        return self.second(x) + self.norm(self.first(x).float()).double()


def test_shared_weights_and_other_dtypes_stay_whole_and_are_averaged(tmp_path):
    def make():
        torch.manual_seed(3)
        return Mixed()

    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def act(mesh):
        model = make()
        sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        model(x.chunk(2)[mesh.rank("fsdp")]).backward()
        sync.finish()
        split = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        named = model.named_parameters()
        return split, {name: whole_gradient(parameter) for name, parameter in named if parameter.grad is not None}

    alone = make()
    alone(x).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}
    for split, gradients in on_ranks(tmp_path, {"fsdp": 2}, act):
        assert {"layers.0.first.bias", "layers.0.second.weight"} <= set(split)
        assert "layers.0.first.weight" not in split  # shared by two blocks
        assert "layers.0.norm.weight" not in split  # the smaller part, of another dtype
        assert "layers.1.norm.weight" in split  # frozen: gathered, never reduced
        assert_equal(gradients, expected, tolerance=1e-6)


def test_several_updates_of_a_step_and_layers_that_are_used_now_and_then_keep_their_gradients(tmp_path):
    batch = make_batches(1)[0]

    def act(mesh):
        model = make_net()
        sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        found = []

        def note():
            sync.finish()
            weights = (model.embed.weight, model.layers[0].spare.weight, model.scale)
            found.append([None if weight.grad is None else whole_gradient(weight).clone() for weight in weights])

        model(*batch, True).backward()
        note()
        note()  # a second update of the same step, by another optimizer
        model(*batch).backward()
        note()  # added to what is there; the spare layer adds nothing
        for parameter in model.parameters():
            parameter.grad = None
        model(*batch).backward()
        note()  # the spare layer is used by nobody now
        return found

    for found in on_ranks(tmp_path, {"fsdp": 2}, act):
        first, again, more, other = found
        for left, right in zip(first, again, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(more[1], first[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(more[0], first[0] + other[0], rtol=1e-10, atol=1e-10)
        assert other[1] is None
        assert other[0] is not None


class Repeating(nn.Module):
    """One block that runs three times, once by a call of its own under recomputation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(7, 5)] * 3)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number == 1 else layer(x)
        return x.square().mean()


def test_a_block_that_runs_several_times_gets_all_of_its_gradient(tmp_path):
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradients(mesh):
        model = Repeating().double()
        sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        model(x.chunk(mesh.size("fsdp"))[mesh.rank("fsdp")]).backward()
        sync.finish()
        named = model.named_parameters()
        return {name: whole_gradient(parameter) for name, parameter in named if parameter.grad is not None}

    alone = gradients(Mesh())
    assert len(alone) == 5  # norm, up, down, not spare
    for found in on_ranks(tmp_path, {"fsdp": 2}, gradients):
        assert_equal(found, alone)


def whole_gradient(parameter):
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


class Normed(nn.Module):
    """A block with running statistics, whose weights must have their dtype."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.inside(x).float()).to(x.dtype)


class SomeNormed(nn.Module):
    """A block with running statistics, one without, and a layer around them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Normed(), Block(4, 5)])

    def forward(self, x):
        hidden = self.first(x)
        seen = [hidden.dtype, self.first.weight.dtype]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.float().square().mean(), seen


def test_running_statistics_keep_the_dtype_of_their_block(tmp_path):
    def act(mesh):
        model, seen = SomeNormed(), []
        sync = shard_parameters(model, mesh, settings=SplitSettings(gather_dtype=torch.bfloat16), device=CPU)
        for block, name in zip(model.layers, ("inside", "up"), strict=True):
            layer = getattr(block, name)
            layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss, dtypes = model(torch.randn(6, 4))
        loss.backward()
        sync.finish()
        return dtypes, seen, [local(each.grad).dtype for each in model.parameters() if each.grad is not None]

    for dtypes, seen, gradients in on_ranks(tmp_path, {"fsdp": 2}, act):
        assert dtypes == [torch.bfloat16, torch.bfloat16]
        assert seen == [torch.float32, torch.bfloat16]
        assert set(gradients) == {torch.float32}


def test_parameters_can_be_gathered_in_another_dtype_and_keep_their_own(tmp_path):
    def act(mesh):
        model = make_net().float()
        sync = shard_parameters(model, mesh, settings=SplitSettings(gather_dtype=torch.bfloat16), device=CPU)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(*make_batches(2)[0].chunk(2, dim=1)[mesh.rank("fsdp")])
        loss.backward()
        sync.finish()
        return loss.item(), model.embed.weight.dtype, model.embed.weight.grad.dtype

    for loss, dtype, gradient_dtype in on_ranks(tmp_path, {"fsdp": 2}, act):
        assert loss == pytest.approx(3.0, abs=1.5)
        assert dtype == gradient_dtype == torch.float32
