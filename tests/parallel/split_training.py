"""A model with everything that makes splitting hard, and its training by one process and by ranks, step for step."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainwright.parallel.fully_shard import SplitSettings, shard_parameters

CPU = torch.device("cpu")
NUM_STEPS = 3


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.spare = nn.Linear(width, 3)  # used by nobody, or by some ranks
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, use_spare=False):
        self.calls += 1
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return x + self.spare(x).sum(-1, keepdim=True) if use_spare else x


class Net(nn.Module):
    """Uneven shapes, a scalar, a frozen layer, tied weights, a layer that is not used, a convolution."""

    forward_methods = ("loss_of",)

    def __init__(self, width=7, hidden=5, num_words=11, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(num_words, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))  # shorter than there are ranks
        self.one.no_weight_decay = True
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, labels, spare=False):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, use_spare=spare)
        x = self.mix(x.mT).mT
        logits = self.head(self.frozen(x)) * self.scale * self.one
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def loss_of(self, words, labels):
        """A way in beside forward, which uses parameters outside of blocks."""
        return functional.cross_entropy(self.head(self.embed(words)).flatten(0, 1), labels.flatten())


def make_net(**sizes):
    torch.manual_seed(0)
    return Net(**sizes).double()


def make_batches(num_ranks):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 11, (NUM_STEPS, 2, 4 * num_ranks, 4), generator=generator)


def trained(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def torch_adamw(model):
    return torch.optim.AdamW([parameter for _, parameter in trained(model)], lr=0.05, weight_decay=0.3)


def train_alone(model, make_optimizer=torch_adamw, *, num_ranks=2, spare=lambda rank: False):
    """Does in one process what the ranks do together: the mean over their parts of each batch."""
    optimizer = make_optimizer(model)
    metrics = []
    for batch in make_batches(num_ranks):
        optimizer.zero_grad()
        for rank, own in enumerate(batch.chunk(num_ranks, dim=1)):
            (model(*own, spare(rank)) / num_ranks).backward()
        metrics.append(optimizer.step())
    return whole(model), metrics, optimizer


def train_split(
    model,
    mesh,
    make_optimizer=torch_adamw,
    *,
    settings=None,
    spare=lambda rank: False,
    num_pieces=1,
    is_last_known=True,
    data_dim=lambda name: None,
):
    """Trains on the ranks of a mesh; returns whole parameters, the steps' metrics, and the optimizer."""
    sync = shard_parameters(model, mesh, settings=settings or SplitSettings(), device=CPU, data_dim=data_dim)
    optimizer = make_optimizer(model)
    axes = ("replicate", "fsdp", "context")
    rank, num_ranks = mesh.rank(*axes), mesh.size(*axes)
    metrics = []
    for batch in make_batches(num_ranks):
        optimizer.zero_grad()
        own = batch.chunk(num_ranks, dim=1)[rank]
        for number, piece in enumerate(own.chunk(num_pieces, dim=1)):
            sync.begin_backward(is_last=not is_last_known or number == num_pieces - 1)
            (model(*piece, spare(rank)) / num_pieces).backward()
        sync.finish()
        metrics.append(optimizer.step())
    return whole(model), metrics, optimizer


def whole(model):
    return {name: whole_tensor(parameter) for name, parameter in model.named_parameters()}


def whole_tensor(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_equal(left, right, *, tolerance=1e-10):
    assert list(left) == list(right)
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
