"""What a rank without weights is sent, and that its tensors stay the ones that others refer to."""

import torch
import torch.distributed as dist
from tests.messages import raises
from tests.parallel.forked_ranks import on_ranks
from torch import nn

from trainwright.checkpoint.encoding import fill
from trainwright.errors import TrainwrightError
from trainwright.models.pretrained import on_meta
from trainwright.parallel import replicate as sent_weights
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import is_split
from trainwright.parallel.replicate import SentWeights, give_memory


class Net(nn.Module):
    """All that a model may hold: tied weights, a scalar, several dtypes, buffers that are saved or not, marks."""

    def __init__(self, width=3):
        super().__init__()
        self.table = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.coarse = nn.Parameter(torch.randn(5, 2).to(torch.bfloat16), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.register_buffer("count", torch.randint(0, 9, (3,)))
        self.register_buffer("computed", torch.randn(4) > 0, persistent=False)
        self.scale.lr_scale = 0.5


def tensors_of(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def whole(tensor):
    return tensor.full_tensor() if is_split(tensor) else tensor


def ranks_of(mesh):
    return Ranks(dist.get_rank(), dist.get_world_size(), mesh=mesh)


def built_by_first(ranks, **settings):
    """The model with weights on the first rank, without memory on others."""
    torch.manual_seed(5)
    if ranks.is_first:
        return Net(**settings)
    with on_meta():
        return Net(**settings)


def test_tensors_that_get_memory_stay_the_same_objects_with_their_marks_and_hooks():
    with on_meta():
        model = Net()
    model.scale.register_hook(lambda grad: grad * 7)
    before = tensors_of(model)
    assert all(each.is_meta for each in before.values())
    give_memory(model, torch.device("cpu"))
    after = tensors_of(model)
    assert {name: id(each) for name, each in after.items()} == {name: id(each) for name, each in before.items()}
    assert not any(each.is_meta for each in after.values())
    assert model.head.weight is model.table.weight
    assert model.scale.lr_scale == 0.5
    assert [each.requires_grad for each in model.parameters()] == [each.requires_grad for each in Net().parameters()]
    assert model.coarse.dtype == torch.bfloat16
    model.scale.backward()
    assert model.scale.grad == 7


def test_what_has_memory_keeps_its_values():
    model = Net()
    before = {name: each.detach().clone() for name, each in tensors_of(model).items()}
    give_memory(model, torch.device("cpu"))
    assert all(torch.equal(each, before[name]) for name, each in tensors_of(model).items())


def test_every_tensor_is_sent_bit_for_bit_and_the_first_rank_lets_go(tmp_path, monkeypatch):
    monkeypatch.setattr(sent_weights, "CHUNK_BYTES", 10)  # several messages for one tensor, of uneven sizes
    torch.manual_seed(5)
    expected = tensors_of(Net())

    def act(mesh):
        ranks = ranks_of(mesh)
        model = built_by_first(ranks)
        sent = SentWeights(model, ranks)
        give_memory(model, torch.device("cpu"))
        sent.send_into(model, copy=fill)
        own = tensors_of(model)
        is_equal = all(torch.equal(own[name], value) for name, value in expected.items())
        return is_equal, model.head.weight is model.table.weight, len(sent._unsent)

    assert on_ranks(tmp_path, {"fsdp": 2}, act) == [(True, True, 0)] * 2


def test_split_parameters_get_their_parts_and_whole_ones_stay_known_to_the_reduction(tmp_path):
    torch.manual_seed(5)
    expected = tensors_of(Net())

    def act(mesh):
        ranks = ranks_of(mesh)
        model = built_by_first(ranks)
        sent = SentWeights(model, ranks)
        device = torch.device("cpu" if ranks.is_first else "meta")
        for name in ("empty", "turned"):  # which torch cannot split; the others know the names they were sent by
            delattr(model, name)
            del expected[name]
        sync = shard_parameters(model, mesh, settings=SplitSettings(), device=device)
        give_memory(model, torch.device("cpu"))
        model.to("cpu")
        sent.send_into(model, copy=fill)
        own = {name: whole(each) for name, each in tensors_of(model).items()}
        wholes = [any(each is one for one in model.parameters()) for each in sync._whole]
        marks = model.scale.lr_scale, model.coarse.requires_grad, model.head.weight is model.table.weight
        return [name for name in expected if not torch.equal(own[name], expected[name])], wholes, marks

    for differing, wholes, marks in on_ranks(tmp_path, {"fsdp": 3}, act):
        assert differing == []
        assert wholes == [True]  # the scalar
        assert marks == (0.5, False, True)


def test_another_model_than_the_first_ranks_is_rejected_before_anything_is_sent(tmp_path):
    def act(mesh):
        ranks = ranks_of(mesh)
        if ranks.is_first:
            SentWeights(built_by_first(ranks), ranks)
            return
        with raises(TrainwrightError, "1", "0", "7", "2", "3"):
            SentWeights(built_by_first(ranks, width=2), ranks)

    on_ranks(tmp_path, {"fsdp": 2}, act)
