"""What ranks hold of a split model, what it returns, and what users' modules meet; parity is in tests/distributed."""

import copy
from collections import Counter

import pytest
import torch
from tests.messages import mentions
from tests.parallel.forked_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.errors import ConfigError, DataError
from trainwright.models.bert import Bert
from trainwright.models.llama import Llama
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.sharding import packaged_rules, parse_rules, plan_sharding
from trainwright.parallel.tensor import split_tensors

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
TOKENS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))


class Heads(nn.Module):
    """A user's attention-like block: a norm of each head between split layers, a copied scale after them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(2)
        self.down = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.table = nn.Embedding(3, 4)

    def forward(self, x):
        heads = self.norm(self.up(x).unflatten(-1, (-1, 2))).flatten(-2)
        return self.down(heads) * self.scale + self.table.weight[1], heads


class Twice(nn.Module):
    """Takes two outputs of a module, of which a rule splits the first by row."""

    def __init__(self):
        super().__init__()
        self.heads = Heads()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        first, _ = self.heads(x)
        self.kinds = (type(first), first.placements if isinstance(first, DTensor) else None)
        return {"loss": None, "logits": self.head(first)}


RULES = {
    "parameters": {
        "heads.up.weight": ["tensor", None],
        "heads.up.bias": ["tensor"],
        "heads.down.weight": [None, "tensor"],
        "heads.scale": [None],
        "heads.table.*": None,
    },
    "outputs": {"heads[0]": ["tensor", None]},
    "on_parts": ["heads.norm.*"],
}


def made(make, seed=0):
    torch.manual_seed(seed)
    return make()


def split(model, mesh, rules=None):
    rules = packaged_rules(model) if rules is None else parse_rules(rules)
    split_tensors(model, plan_sharding(model, rules, mesh.sizes), mesh)
    return model


def gradients_apart(whole, other):
    pairs = zip(whole.named_parameters(), other.named_parameters(), strict=True)
    return {
        name: float((one.grad - two.grad.full_tensor()).abs().max())
        for (name, one), (_, two) in pairs
        if one.grad is not None
    }


class Collectives(TorchDispatchMode):
    """Counts the collectives of what runs inside."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what a DTensor does comes by again, on plain tensors
        name = func.name().partition("::")[2]
        if func.namespace == "_c10d_functional" and name.startswith(("all_", "reduce_", "broadcast")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def users_model(mesh):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    whole, other = made(Twice), split(made(Twice), mesh, RULES)
    whole(x)["logits"].square().sum().backward()
    outputs = other(x)["logits"]
    outputs.square().sum().backward()
    return {
        "kinds": [str(each) for each in other.kinds],
        "is_plain": type(outputs) is torch.Tensor,
        "apart": gradients_apart(whole, other),
        "restored": all(isinstance(one, DTensor) for one in other.parameters()),
    }


def held(mesh):
    model = made(lambda: Llama(**SMALL))
    names = list(model.state_dict())
    model.model.norm.weight.mark = "kept"
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    split(model, mesh)
    up = model.model.layers[0].mlp.up_proj.weight
    return {
        "same_names": list(model.state_dict()) == names,
        "is_tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "mark": model.model.norm.weight.mark,
        "is_frozen": not up.requires_grad,
        "halves": [list(one.to_local().shape) for one in (up, model.lm_head.weight, model.model.norm.weight)],
        "own_rows": torch.equal(up.to_local(), before.chunk(2)[mesh.rank("tensor")]),
        "lets_go": up.to_local().untyped_storage().nbytes() == up.to_local().nbytes,
        "placements": up.placements == (Shard(0),) and model.model.norm.weight.placements == (Replicate(),),
    }


def returned(mesh):
    whole, model = made(lambda: Llama(**SMALL)), split(made(lambda: Llama(**SMALL)), mesh)
    beside_loss = model(TOKENS, labels=TOKENS)
    without = model(TOKENS)
    in_evaluation = model.eval()(TOKENS, labels=TOKENS)
    prompt = TOKENS[:, :3]
    texts = [each.eval().generate(prompt, max_new_tokens=5, temperature=0.0) for each in (whole, model)]
    return {
        "beside_loss": (type(beside_loss["loss"]).__name__, type(beside_loss["logits"]).__name__),
        "without": type(without["logits"]).__name__,
        "in_evaluation": [type(each).__name__ for each in in_evaluation.values()],
        "right": bool(torch.allclose(without["logits"], whole(TOKENS)["logits"], atol=1e-6)),
        "same_text": torch.equal(*map(torch.as_tensor, texts)),
    }


def collectives(mesh):
    model = split(made(lambda: Llama(**SMALL)), mesh)
    with Collectives() as forward:
        loss = model(TOKENS, labels=TOKENS)["loss"]
    with Collectives() as backward:
        loss.backward()
    return [dict(each.counts) for each in (forward, backward)]


def other_losses(mesh):
    apart = []
    for criterion in (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(weight=torch.rand(32) + 0.5)):
        models = [made(lambda: Llama(**SMALL)).double() for _ in range(2)]
        for model in models:
            model.criterion = copy.deepcopy(criterion).double()
        whole, other = models[0], split(models[1], mesh)
        losses = [each(TOKENS, labels=TOKENS)["loss"] for each in (whole, other)]
        for loss in losses:
            loss.backward()
        apart.append(max(float((losses[0] - losses[1]).abs()), *gradients_apart(whole, other).values()))
    return apart


def rejected_ids(mesh):
    messages = []
    for model in (Llama(**SMALL), Bert(**SMALL)):
        with pytest.raises(DataError) as caught:
            split(model, mesh)(TOKENS + 1 + 26)
        messages.append(str(caught.value))
    return messages


class OwnLoss(nn.Module):
    """A user's model whose head meets a loss that knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.head = nn.Linear(4, 6)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.down(self.up(x).relu())), labels)


HEAD_RULES = {
    "up.weight": ["tensor", None],
    "up.bias": ["tensor"],
    "down.weight": [None, "tensor"],
    "down.bias": [None],
    "head.weight": ["tensor", None],
    "head.bias": ["tensor"],
}


def split_heads(mesh):
    x, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    found = []
    for outputs in ({}, {"head": [None, None]}):
        whole, other = made(OwnLoss), split(made(OwnLoss), mesh, {"parameters": HEAD_RULES, "outputs": outputs})
        losses = [model(x, labels) for model in (whole, other)]
        for loss in losses:
            loss.backward()
        found.append((float(losses[0] - losses[1]), max(gradients_apart(whole, other).values())))
    return found


class SparseRows(nn.Module):
    """An embedding with sparse gradients before a model that is split."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(6, 4, sparse=True)
        self.inner = OwnLoss()

    def forward(self, labels):
        return self.inner(self.rows(labels), labels)


def sparse_gradients(mesh):
    rules = {f"inner.{name}": rule for name, rule in HEAD_RULES.items()}
    with pytest.raises(ConfigError) as caught:
        split(made(SparseRows), mesh, {"parameters": rules})
    return str(caught.value)


def everything(mesh):
    cases = (
        *(users_model, split_heads, held, returned, collectives, other_losses, rejected_ids),
        sparse_gradients,
    )
    return {case.__name__: case(mesh) for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks(tmp_path_factory.mktemp("ranks"), {"tensor": 2}, everything)


def test_names_ties_marks_and_frozen_parameters_stay_and_each_rank_holds_its_half(found):
    for each in found:
        assert each["held"] == {
            "same_names": True,
            "is_tied": True,
            "mark": "kept",
            "is_frozen": True,
            "halves": [[32, 16], [16, 16], [16]],
            "own_rows": True,
            "lets_go": True,
            "placements": True,
        }


def test_logits_are_full_except_next_to_a_loss_in_training(found):
    for each in found:
        assert each["returned"] == {
            "beside_loss": ("Tensor", "DTensor"),
            "without": "Tensor",
            "in_evaluation": ["Tensor", "Tensor"],
            "right": True,
            "same_text": True,
        }


def test_states_are_gathered_once_before_attention_and_once_before_the_mlp(found):
    # Two layers with two parts each, and the embeddings before and the head after them; two of the loss.
    forward, backward = found[0]["collectives"]
    assert forward == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 5, "all_reduce": 2}
    # The other way round; and the sums of the gradients of the five norms.
    assert backward == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 5, "all_reduce": 5}


def test_losses_that_cannot_be_split_are_taken_on_the_whole(found):
    assert all(max(each["other_losses"]) < 1e-10 for each in found), found


def test_ids_outside_of_the_vocabulary_are_named_as_in_one_process(found):
    for each in found:
        assert all("but the embedding has 32 rows" in message for message in each["rejected_ids"])


def test_a_layer_with_sparse_gradients_is_rejected_by_name(found):
    for each in found:
        assert mentions(each["sparse_gradients"], "runtime.mesh.tensor", "rows")


def test_a_users_modules_compute_on_parts_wholes_and_copies_as_rules_say(found):
    for each in found:
        model = each["users_model"]
        assert model["kinds"] == [str(DTensor), str((Shard(0),))]
        assert model["is_plain"]
        assert model["restored"]
        assert set(model["apart"]) == {name for name, _ in Twice().named_parameters()}
        assert max(model["apart"].values()) < 1e-4, model["apart"]


def test_a_split_head_of_a_users_model_is_gathered_for_its_loss(found):
    for each in found:
        for losses_apart, gradients in each["split_heads"]:
            assert abs(losses_apart) < 1e-6
            assert gradients < 1e-5


def test_one_tensor_rank_changes_nothing():
    model = made(lambda: Llama(**SMALL))
    before = dict(model.named_parameters())
    split_tensors(model, plan_sharding(model, packaged_rules(model), {"tensor": 1}), Mesh())
    assert all(one is before[name] for name, one in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert type(model(TOKENS, labels=TOKENS)["loss"]) is torch.Tensor
