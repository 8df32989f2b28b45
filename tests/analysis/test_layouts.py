"""Layouts of parameters, read off models that were split over imaginary ranks."""

from tests.analysis.runs import LENGTH, small_run

from trainwright.analysis.shard import ParameterLayout, grouped, layouts_of, plan_shards


def test_each_dim_of_a_parameter_has_its_mesh_axes():
    found = plan_shards(small_run({"fsdp": 2, "tensor": 2}), world_size=4, sequence_length=LENGTH)
    layouts = {each.name: each for each in found.layouts}
    column = layouts["model.layers.0.mlp.gate_proj.weight"]
    row = layouts["model.layers.1.mlp.down_proj.weight"]
    assert (set(column.axes[0].split(" × ")), column.axes[1]) == ({"fsdp", "tensor"}, "-")
    assert row.axes == ("fsdp", "tensor")
    assert row.local_shape == (row.shape[0] // 2, row.shape[1] // 2)
    assert layouts["model.norm.weight"].axes == ("fsdp",)
    assert all(each.num_bytes * 4 >= 4 * each.local_shape[0] for each in found.layouts)


def test_copies_have_no_axes():
    found = plan_shards(small_run({"replicate": -1}), world_size=4, sequence_length=LENGTH)
    assert {each.axes for each in found.layouts} == {("-",), ("-", "-")}
    assert all(each.shape == each.local_shape for each in found.layouts)
    assert found.rank_bytes == found.num_bytes == 4 * found.num_parameters


def test_context_ranks_share_parameters_too():
    found = plan_shards(small_run({"fsdp": 2, "context": 2}), world_size=4, sequence_length=LENGTH)
    assert found.layouts[0].axes[0] == "fsdp × context"
    assert found.rank_bytes * 4 == found.num_bytes


def test_equal_layers_are_one_line():
    def layout(name, shape=(4, 4)):
        return ParameterLayout(name, shape, ("-",) * 2, shape, "float32", 64, is_trained=True)

    lines = grouped([layout("a.0.w"), layout("a.1.w"), layout("b.w"), layout("a.2.w", (4, 8)), layout("a.3.w")])
    assert [(each.name, each.count) for each in lines] == [("a.*.w", 3), ("b.w", 1), ("a.2.w", 1)]


def test_an_unsplit_model_is_laid_out_whole():
    import torch

    from trainwright.parallel.mesh import Mesh

    found = layouts_of(torch.nn.Linear(3, 2), Mesh())
    assert [(each.name, each.axes, each.num_bytes) for each in found] == [
        ("weight", ("-", "-"), 24),
        ("bias", ("-",), 8),
    ]
