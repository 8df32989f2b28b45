"""Split parameters train as whole ones do: on real ranks, with everything that a user's model may have."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainwright.parallel.fully_shard import SplitSettings, shard_parameters

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.spare = nn.Linear(width, 3)  # used by nobody, or by some samples
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, use_spare=False):
        self.calls += 1
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return x + self.spare(x).sum(-1, keepdim=True) if use_spare else x


class Net(nn.Module):
    """Uneven shapes, a scalar, a frozen layer, tied weights, layers that are not used."""

    def __init__(self, width=7, hidden=5, num_words=11, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(num_words, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))  # shorter than there are ranks
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.embed.weight
        self.one.no_weight_decay = True

    def forward(self, words, labels, spare=False):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, use_spare=spare)
        logits = self.head(self.frozen(x)) * self.scale * self.one
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_net(**sizes):
    torch.manual_seed(0)
    return Net(**sizes).double()


def batches(num_steps=3, num_samples=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 11, (2, num_samples, 4), generator=generator) for _ in range(num_steps)]


def train_alone(model, make_optimizer, *, spare=lambda rank: False, num_ranks=2):
    """The same updates in one process: the mean over the ranks' parts."""
    optimizer = make_optimizer(model)
    for words, labels in batches():
        optimizer.zero_grad()
        for rank in range(num_ranks):
            loss = model(words.chunk(num_ranks)[rank], labels.chunk(num_ranks)[rank], spare(rank))
            (loss / num_ranks).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, optimizer


def train_split(model, mesh, make_optimizer, *, settings=None, spare=lambda rank: False, num_pieces=1, says_last=True):
    sync = shard_parameters(model, mesh, settings=settings or SplitSettings(), device=CPU)
    optimizer = make_optimizer(model)
    rank, num_ranks = mesh.rank("replicate", "data", "context"), mesh.size("replicate", "data", "context")
    for words, labels in batches():
        optimizer.zero_grad()
        pieces = list(
            zip(words.chunk(num_ranks)[rank].chunk(num_pieces), labels.chunk(num_ranks)[rank].chunk(num_pieces))
        )
        for number, (some_words, some_labels) in enumerate(pieces):
            sync.begin_backward(is_last=not says_last or number == num_pieces - 1)
            (model(some_words, some_labels, spare(rank)) / num_pieces).backward()
        sync.finish()
        optimizer.step()
    return optimizer


def whole(model):
    return {
        name: parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


def assert_equal(left, right, *, tolerance=1e-10):
    assert list(left) == list(right)
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.3)


LAYOUTS = {"data": {"data": 2}, "hybrid": {"replicate": 2, "data": 2}, "uneven": {"data": 3}}
WAYS = {
    "plain": {},
    "kept": {"settings": SplitSettings(reshard_after_forward=False)},
    "pieces": {"num_pieces": 2},
    "reduced_last": {"num_pieces": 2, "settings": SplitSettings(accumulate_unsharded=True)},
    "last_unknown": {"num_pieces": 2, "says_last": False, "settings": SplitSettings(accumulate_unsharded=True)},
    "spare_on_the_first_rank": {"spare": lambda rank: rank == 0},
    "spare_on_the_first_rank_in_pieces": {"spare": lambda rank: rank == 0, "num_pieces": 2},
}


@pytest.mark.parametrize("axes", LAYOUTS.values(), ids=LAYOUTS)
def test_split_models_train_as_whole_ones_do_in_every_way_of_reducing(axes, tmp_path):
    num_ranks = axes.get("replicate", 1) * axes["data"]
    num_samples = 12 if num_ranks == 3 else 8
    globals()["batches"].__defaults__ = (3, num_samples)

    def act(mesh):
        ended = {}
        for name, way in WAYS.items():
            model = make_net()
            train_split(model, mesh, adamw, **way)
            ended[name] = whole(model)
        return ended

    ranks = on_ranks(tmp_path, axes, act)
    for name, way in WAYS.items():
        alone, _ = train_alone(make_net(), adamw, num_ranks=num_ranks, spare=way.get("spare", lambda rank: False))
        for ended in ranks:
            assert_equal(ended[name], alone)
