"""Optimizers over split parameters do what they do over whole ones, and their state is split likewise."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.split_training import (
    CPU,
    assert_equal,
    make_batches,
    make_net,
    torch_adamw,
    train_alone,
    train_split,
    trained,
    whole,
    whole_tensor,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright.errors import ConfigError
from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import step_unless
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon
from trainwright.optim.param_groups import classify_parameters, make_optimizer
from trainwright.optim.sharded import shard_like, sum_over_ranks
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters


def parameters_of(model):
    return [parameter for _, parameter in trained(model)]


OPTIMIZERS = {
    "adamw": lambda model: AdamW(parameters_of(model), lr=0.05, weight_decay=0.3, report=True),
    "adamw_foreach": lambda model: AdamW(parameters_of(model), lr=0.05, weight_decay=0.3, amsgrad=True, fused=False),
    "lion": lambda model: Lion(parameters_of(model), lr=0.01, weight_decay=0.3, report=True),
    "muon": lambda model: Muon(
        trained(model), lr=0.02, ns_dtype="fp64", kinds=classify_parameters(model), report=True, adamw_lr=0.01
    ),
    "torch_adamw": torch_adamw,
    "torch_sgd": lambda model: torch.optim.SGD(parameters_of(model), lr=0.1, momentum=0.9),
}
WITH_MASTERS = {
    "adamw": lambda model: AdamW(parameters_of(model), lr=0.05, master_weights=True),
    "lion": lambda model: Lion(parameters_of(model), lr=0.05, master_weights=True),
    "muon": lambda model: Muon(
        trained(model), lr=0.05, ns_dtype="fp64", kinds=classify_parameters(model), master_weights=True
    ),
}
LAYOUTS = {"fsdp": {"fsdp": 2}, "uneven": {"fsdp": 3}, "hybrid": {"replicate": 2, "fsdp": 2}}


def is_repeated(layout, name):
    """Is it enough that two ranks, or another optimizer, say the same? `make test-slow` alone runs it."""
    return layout != "fsdp" and name not in ("adamw", "muon")


def net():
    return make_net(num_blocks=1)


@pytest.fixture(scope="module")
def trained_on_ranks(request, tmp_path_factory):
    """In a layout, per rank: what each optimizer made of the model, what its steps returned, and its whole state."""
    here = (item for item in request.session.items if item.path == request.path)
    has_slow = any(item.get_closest_marker("slow") for item in here)

    def act(mesh, names):
        ended = {}
        for name in names:
            model = net()
            parameters, metrics, optimizer = train_split(model, mesh, OPTIMIZERS[name])
            laid_out = all(
                value.placements == parameter.placements
                for parameter, state in optimizer.state.items()
                for value in state.values()
                if isinstance(parameter, DTensor) and value.shape == parameter.shape
            )
            ended[name] = parameters, metrics, states_of(optimizer), laid_out
        return ended

    @functools.cache
    def of(layout):
        names = [name for name in OPTIMIZERS if has_slow or not is_repeated(layout, name)]
        ranks = on_ranks(tmp_path_factory.mktemp("ranks"), LAYOUTS[layout], lambda mesh: act(mesh, names))
        return len(ranks), ranks

    return of


def states_of(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{number}.{key}": whole_tensor(value)
        for number, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=[pytest.mark.slow] if is_repeated(layout, name) else [])
        for layout in LAYOUTS
        for name in OPTIMIZERS
    ],
)
def test_weights_state_and_metrics_are_those_of_one_process(trained_on_ranks, layout, name):
    num_ranks, ranks = trained_on_ranks(layout)
    alone, metrics, optimizer = train_alone(net(), OPTIMIZERS[name], num_ranks=num_ranks)
    for rank in ranks:
        parameters, rank_metrics, states, laid_out = rank[name]
        assert_equal(parameters, alone)
        assert_equal(states, states_of(optimizer))
        assert laid_out
        for ours, theirs in zip(rank_metrics, metrics, strict=True):
            if theirs:
                assert ours["update_norm"].item() == pytest.approx(theirs["update_norm"].item(), rel=1e-6)


class Fewer(torch.nn.Module):
    """One tensor split along the tensor axis too, as rules split it, with fsdp × tensor on the same dim or not."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False).double() for _ in range(4))
        if mesh is not None:
            for layer, dim in zip(self.layers, (0, 1, 0, 1), strict=True):
                split = distribute_tensor(layer.weight.detach(), mesh.along("tensor"), [Shard(dim)])
                layer.weight = torch.nn.Parameter(split)


def gradients_of(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(4)]


def give_gradients(model, step):
    for layer, gradient in zip(model.layers, gradients_of(step), strict=True):
        layer.weight.grad = shard_like(gradient, layer.weight)


SPLIT_TWICE = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.05, report=True, repair_nan=True),
    "lion": lambda model: Lion(model.parameters(), lr=0.01, report=True),
    "muon": lambda model: Muon(model.parameters(), lr=0.02, ns_dtype="fp64", report=True),
}


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"tensor": 2}], ids=["both", "tensor"])
def test_parameters_that_rules_and_fsdp_split_step_as_whole_ones_do(axes, tmp_path):
    def drive(make, mesh=None):
        model = Fewer(mesh)
        if mesh is not None:
            shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        optimizer = make(model)
        for step in range(3):
            give_gradients(model, step)
            metrics = optimizer.step()
        return whole(model), metrics

    def act(mesh):
        return {name: drive(make, mesh) for name, make in SPLIT_TWICE.items()}

    for ended in on_ranks(tmp_path, axes, act):
        for name, make in SPLIT_TWICE.items():
            alone, metrics = drive(make)
            assert_equal(ended[name][0], alone)
            assert {key: value.item() for key, value in ended[name][1].items()} == pytest.approx(
                {key: value.item() for key, value in metrics.items()}
            )


def drive_with_given_gradients(model, optimizer):
    """Three steps with gradients that have the same bits on every layout; returns whole weights and state."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter in parameters_of(model):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = shard_like(gradient, parameter)
        optimizer.step()
    return whole(model), states_of(optimizer)


def cases_of_three_ranks(mesh):
    """Loading, holding back, repairing and rounding: one start of three ranks for all."""
    found = {}
    own = make_batches(3)[0].chunk(3, dim=1)[mesh.rank("fsdp")]

    def begin(make, dtype=torch.float64):
        model = net().to(dtype)
        sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        optimizer = make(model)

        def step(hold=False):
            optimizer.zero_grad()
            model(*own).backward()
            sync.finish()
            return step_unless(optimizer, hold)

        return model, optimizer, step

    for name, make in OPTIMIZERS.items():
        if name.startswith("torch"):
            continue
        # The state as one process would give it, whole, and as ranks give it, in parts.
        model, optimizer, step = begin(make)
        step()
        saved, weights = optimizer.state_dict(), whole(model)
        in_parts = copy.deepcopy(saved)
        in_whole = copy.deepcopy(saved)
        for state in in_whole["state"].values():
            for key, value in state.items():
                state[key] = whole_tensor(value)
        step()
        expected = whole(model)
        for form, state in (("parts", in_parts), ("whole", in_whole)):
            model, optimizer, step = begin(make)
            for parameter_name, parameter in model.named_parameters():
                parameter.data.copy_(shard_like(weights[parameter_name], parameter))
            optimizer.load_state_dict(state)
            step()
            found[name, "resumed", form] = whole(model), expected
            found[name, "laid_out", form] = all(
                isinstance(value, DTensor) == isinstance(parameter, DTensor)
                for parameter, entry in optimizer.state.items()
                for value in entry.values()
                if value.shape == parameter.shape
            )

    for name, make in OPTIMIZERS.items():
        model, optimizer, step = begin(make)
        step()
        before = whole(model), states_of(optimizer)
        step(hold=torch.tensor(True))
        found[name, "held"] = before, (whole(model), states_of(optimizer))

    for dtype in ("fp32", "bf16"):
        model, optimizer, _ = begin(
            lambda model, dtype=dtype: AdamW(parameters_of(model), lr=0.05, state_dtype=dtype), torch.float32
        )
        found["rounded", dtype] = drive_with_given_gradients(model, optimizer)

    for name, make in WITH_MASTERS.items():
        model, optimizer, _ = begin(make, torch.bfloat16)
        found["masters", name] = drive_with_given_gradients(model, optimizer)

    model, optimizer, _ = begin(lambda model: AdamW(parameters_of(model), lr=0.05, repair_nan=True))
    for parameter in parameters_of(model):
        gradient = torch.zeros(parameter.shape, dtype=parameter.dtype)
        gradient.view(-1)[-1] = torch.nan  # on the last rank that has a part
        parameter.grad = shard_like(gradient, parameter)
    found["repaired"] = optimizer.step()["nan_gradients"].item(), len(parameters_of(model))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks(tmp_path_factory.mktemp("three"), {"fsdp": 3}, cases_of_three_ranks)


@pytest.mark.parametrize("form", ["parts", "whole"])
@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "lion", "muon"])
def test_loaded_state_goes_on_bit_for_bit_and_is_laid_out_as_parameters(found, name, form):
    for rank in found:
        resumed, expected = rank[name, "resumed", form]
        assert_equal(resumed, expected, tolerance=0.0)
        assert rank[name, "laid_out", form]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_held_back_changes_no_part(found, name):
    for rank in found:
        before, after = rank[name, "held"]
        for left, right in zip(before, after, strict=True):
            assert_equal(left, right, tolerance=0.0)


# Not bit for bit: torch's kernel treats the last few elements of a tensor in another way than the rest.
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_moments_in_another_precision_are_rounded_as_in_one_process(found, dtype, tolerance):
    model = net().float()
    alone = drive_with_given_gradients(model, AdamW(parameters_of(model), lr=0.05, state_dtype=dtype))
    for rank in found:
        for ours, theirs in zip(rank["rounded", dtype], alone, strict=True):
            assert_equal(ours, theirs, tolerance=tolerance)


@pytest.mark.parametrize("name", WITH_MASTERS)
def test_masters_of_parts_are_the_parts_of_masters(found, name):
    model = net().bfloat16()
    weights, states = drive_with_given_gradients(model, WITH_MASTERS[name](model))
    assert any(key.endswith("master") for key in states)
    for rank in found:
        own_weights, own_states = rank["masters", name]
        assert_equal(own_states, states, tolerance=1e-6)
        assert_equal(own_weights, weights, tolerance=2**-8)  # the last bit of masters may decide where one is rounded


def test_gradients_that_are_not_finite_are_counted_over_all_ranks(found):
    for rank in found:
        count, expected = rank["repaired"]
        assert count == expected


class Wide(torch.nn.Module):
    """Matrices whose moments are coded: rows that end within a block, fewer rows than blocks of a row, three dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.deep = torch.nn.Linear(300, 41), torch.nn.Conv1d(40, 20, 8, bias=False)
        self.short = torch.nn.Linear(2500, 2, bias=False)  # fewer rows than ranks


EIGHT_BIT = {
    "fp32": (torch.float32, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "stochastic": (torch.bfloat16, {"master_weights": "stochastic"}),
}


def wide_adamw(model, **settings):
    return AdamW(parameters_of(model), lr=0.05, state="8bit", **settings)


def test_codes_of_parts_are_the_parts_of_codes(tmp_path):
    def act(mesh):
        found = {}
        for name, (dtype, settings) in EIGHT_BIT.items():
            model = Wide().to(dtype)
            shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
            optimizer = wide_adamw(model, **settings)
            found[name] = drive_with_given_gradients(model, optimizer)
            scales = optimizer.state[model.narrow.weight]["exp_avg_scale"]
            found[name, "laid_out"] = scales.shape, scales.placements == model.narrow.weight.placements
            # Loaded in full, as from a checkpoint of one process.
            state = copy.deepcopy(optimizer.state_dict())
            for entry in state["state"].values():
                entry.update({key: whole_tensor(value) for key, value in entry.items()})
            other = wide_adamw(model, **settings)
            other.load_state_dict(state)
            before = whole(model)
            again = drive_with_given_gradients(model, other)
            for parameter_name, parameter in model.named_parameters():
                parameter.data.copy_(shard_like(before[parameter_name], parameter))
            found[name, "loaded"] = again, drive_with_given_gradients(model, optimizer)
        return found

    for rank in on_ranks(tmp_path, {"fsdp": 3}, act):
        for name, (dtype, settings) in EIGHT_BIT.items():
            model = Wide().to(dtype)
            weights, states = drive_with_given_gradients(model, wide_adamw(model, **settings))
            own_weights, own_states = rank[name]
            matrices = [key for key, value in weights.items() if value.ndim > 1]
            # The bias goes through torch's kernel, which treats the last elements of a tensor in another way.
            assert_equal(
                {key: own_weights[key] for key in matrices}, {key: weights[key] for key in matrices}, tolerance=0.0
            )
            coded = [key for key, value in states.items() if value.ndim > 1]
            assert_equal({key: own_states[key] for key in coded}, {key: states[key] for key in coded}, tolerance=0.0)
            assert any(states[key].dtype == torch.int8 for key in coded)
            assert rank[name, "laid_out"] == ((41, 2), True)
            for ours, theirs in zip(*rank[name, "loaded"], strict=True):
                assert_equal(ours, theirs, tolerance=0.0)


def test_codes_are_rejected_where_shards_would_cut_a_block(tmp_path):
    def act(mesh):
        found = []
        for width in (1024, 600):
            full = torch.ones(16, width)
            weight = torch.nn.Parameter(distribute_tensor(full, mesh.along("tensor"), [Shard(1)]))
            optimizer = AdamW([weight], lr=0.05, state="8bit")
            weight.grad = shard_like(torch.randn(16, width, generator=torch.Generator().manual_seed(0)), weight)
            try:
                optimizer.step()
                found.append(whole_tensor(weight))
            except ConfigError as error:
                found.append(str(error))
        return found

    for even, uneven in on_ranks(tmp_path, {"tensor": 2}, act):
        alone = torch.nn.Parameter(torch.ones(16, 1024))
        alone.grad = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
        AdamW([alone], lr=0.05, state="8bit").step()
        torch.testing.assert_close(even, alone.detach())
        assert "state: 8bit" in uneven
        assert "300 elements" in uneven


def test_sums_count_each_part_once_and_stages_add_up(tmp_path):
    def act(mesh):
        model = net()
        shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        parameters = [model.embed.weight, model.scale]
        ones = [torch.ones(()), torch.ones(())]
        once = sum_over_ranks(parameters, ones, stages=None).item()
        return once, sum_over_ranks(parameters, ones, stages=mesh.group("pipeline")).item()

    assert on_ranks(tmp_path, {"pipeline": 2, "fsdp": 2}, act) == [(3.0, 6.0)] * 4


def test_one_process_has_no_parts():
    model = net()
    for make in (OPTIMIZERS["adamw"], OPTIMIZERS["lion"], OPTIMIZERS["muon"]):
        assert make(model).is_sharded is False
    assert not dist.is_initialized()


def test_torchs_fused_steps_that_know_no_parts_are_rejected_by_name(tmp_path):
    def act(mesh):
        model = net()
        shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        said = []
        for kind in (torch.optim.SGD, torch.optim.Adagrad):
            try:
                make_optimizer(lambda groups, kind=kind: kind(groups, lr=0.1, fused=True), dict(trained(model)))
            except ConfigError as error:
                said.append(str(error))
        made = make_optimizer(lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True), dict(trained(model)))
        return [*said, type(made).__name__]

    for sgd, adagrad, other in on_ranks(tmp_path, {"fsdp": 2}, act):
        assert sgd.startswith("trainer.optimizer.fused: torch's fused SGD cannot step sharded parameters")
        assert "Adagrad" in adagrad
        assert other == "Adam"
