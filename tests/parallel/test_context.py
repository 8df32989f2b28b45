"""A sequence that is split over ranks: what each holds, what attention, loss and joining make of it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.messages import raises
from tests.parallel.forked_ranks import on_ranks
from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.layers.attention import WholeSequence
from trainwright.parallel.context import (
    SEQUENCE_METHODS,
    RingKernel,
    SplitSequence,
    draw_apart,
    own_random_numbers,
    ring_attention,
    ring_kernel,
    split_sequences,
    torch_ring,
)
from trainwright.parallel.mesh import Mesh

LENGTHS = (1, 2, 7, 16, 29)
CPU = torch.device("cpu")
# torch's ring is made for kernels of GPUs; the CPU's flash kernel has what it needs too.
CPU_KERNEL = RingKernel(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def part(rank, size):
    """The verbs that need no other rank."""
    return SplitSequence(rank=rank, size=size, group=None)


def two(size):
    return Mesh({"pipeline": 1, "replicate": 1, "fsdp": 1, "context": size, "tensor": 1})


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_position_is_on_one_rank(size, length):
    tokens = torch.arange(2 * length).view(2, length) + 1
    parts = [part(rank, size).take(tokens) for rank in range(size)]
    assert len({each.shape for each in parts}) == 1
    held = torch.cat(parts, dim=1)
    for row, kept in zip(tokens, held, strict=True):
        assert sorted(kept[kept > 0].tolist()) == row.tolist()


def test_a_rank_holds_a_chunk_and_the_one_as_far_from_the_end():
    held = [part(rank, 3).take(torch.arange(12), dim=0).tolist() for rank in range(3)]
    assert held == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_positions_added_at_the_end_are_filled():
    assert part(0, 2).take(torch.arange(1, 6)[None], fill=-100).tolist() == [[1, 2, -100, -100]]


def test_positions_are_those_of_the_tokens_and_never_beyond_the_last():
    for rank in range(4):
        sequence = part(rank, 4)
        tokens = sequence.take(torch.arange(13), dim=0, fill=12)
        assert sequence.positions(13, CPU).tolist() == tokens.tolist()


def test_bounds_hide_positions_that_were_added():
    assert part(0, 2).bounds(8, CPU) is None
    assert part(0, 2).bounds(7, CPU).tolist() == [[[[True] * 7]]]


def test_both_kinds_of_sequence_have_the_same_methods():
    for name in SEQUENCE_METHODS:
        assert callable(getattr(WholeSequence, name))
        assert callable(getattr(SplitSequence, name))
    public = {name for name in vars(WholeSequence) if not name.startswith("_")}
    assert public == {*SEQUENCE_METHODS, "is_whole"}


def test_a_model_without_a_sequence_is_rejected_by_name():
    with raises(ConfigError, "runtime.mesh.context", "2"):
        split_sequences(nn.Linear(2, 2), two(2))


def test_one_rank_leaves_the_model_alone():
    model = Toy()
    split_sequences(model, Mesh())
    assert isinstance(model.sequence, WholeSequence)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.CrossEntropyLoss(ignore_index=0),
    ],
)
def test_a_criterion_that_is_not_a_plain_mean_is_rejected(criterion):
    model = Toy()
    model.criterion = criterion
    with raises(ConfigError, "CrossEntropyLoss"):
        split_sequences(model, two(2))


def test_a_cache_of_keys_is_rejected():
    with raises(ConfigError, "2", "6"):
        part(0, 2).attend(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 6, 4), torch.ones(1, 1, 6, 4))


class Toy(nn.Module):
    """One layer of attention with a dropout before it, and the loss of the next token."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.sequence = WholeSequence()
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(dropout)
        self.project = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11)
        self.attention_dropout = dropout

    def states(self, tokens):
        return self.drop(self.embed(self.sequence.take(tokens)))

    def forward(self, tokens):
        states = self.states(tokens)
        heads = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.project(states).chunk(3, dim=-1))
        mixed = self.sequence.attend(*heads, is_causal=True, dropout=self.attention_dropout if self.training else 0.0)
        logits = self.head(mixed.transpose(1, 2).flatten(2))
        targets = self.sequence.take(F.pad(tokens[:, 1:], (0, 1), value=-100), fill=-100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return self.sequence.mean(loss, targets), logits


def toy(dropout=0.0):
    torch.manual_seed(5)
    return Toy(dropout).double()


def tokens_of(length):
    return torch.randint(11, (2, length), generator=torch.Generator().manual_seed(length))


def heads(length, *, num_kv_heads=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    sizes = (4, num_kv_heads, num_kv_heads)
    return [torch.randn(2, size, length, 8, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


MASKS = {
    "causal": lambda length: (None, True),
    "mask": lambda length: (torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(1)) > 0.4, False),
    "mask and causal": lambda length: (
        torch.rand(2, 1, 1, length, generator=torch.Generator().manual_seed(3)) > 0,
        True,
    ),
    "numbers": lambda length: (torch.randn(1, 4, length, length, dtype=torch.float64), False),
    "one row": lambda length: (torch.arange(length)[None, None, None] < max(1, length - 2), False),
}


def attention(sequence, length, kind, *, num_kv_heads):
    """What attention gives and the gradients of its inputs, all of the whole sequence."""
    torch.manual_seed(9)
    mask, is_causal = MASKS[kind](length)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask | torch.eye(length, dtype=torch.bool)[-mask.shape[-2] :]  # nobody sees nothing
    inputs = [each.requires_grad_() for each in heads(length, num_kv_heads=num_kv_heads)]
    if isinstance(sequence, WholeSequence) and mask is not None and is_causal:
        mask, is_causal = mask & torch.ones(length, length, dtype=torch.bool).tril(), False
    parts = [sequence.take(each, dim=2) for each in inputs]
    mixed = sequence.attend(*parts, mask=mask, is_causal=is_causal, enable_gqa=num_kv_heads != 4, scale=0.3)
    mixed = sequence.whole(mixed, dim=2)
    mixed.pow(2).sum().backward()
    return mixed.detach(), [each.grad for each in inputs]


def ring(mesh, length, num_kv_heads):
    """The same by torch's ring, in float32 as it merges in that."""
    sequence = SplitSequence(rank=mesh.rank("context"), size=mesh.size("context"), group=mesh.group("context"))
    inputs = [each.requires_grad_() for each in heads(length, num_kv_heads=num_kv_heads, dtype=torch.float32)]
    parts = [sequence.take(each, dim=2) for each in inputs]
    mixed = ring_attention(*parts, group=sequence.group, kernel=CPU_KERNEL, scale=0.3)
    mixed = sequence.whole(mixed, dim=2)
    mixed.pow(2).sum().backward()
    return mixed.detach(), [each.grad for each in inputs]


def split(model, mesh):
    split_sequences(model, mesh)
    return model


def drawn(mesh):
    """The patterns of dropout on a rank, and what its generator draws afterwards."""
    torch.manual_seed(3)
    model = split(toy(dropout=0.5), mesh)
    states = model.states(torch.zeros(2, 16, dtype=torch.long))
    model.zero_grad()
    loss, _ = model(tokens_of(13))
    loss.backward()
    ones = torch.ones(2, 4, 16 // mesh.size("context"), 8)
    attended = model.sequence.attend(ones, ones, ones, dropout=0.5)  # how many weights are kept: equal, but for luck
    shared = model.drop(torch.ones(64))
    return {
        "dropped": states == 0,
        "attended": attended,
        "shared": shared,
        "loss": loss.detach(),
        "next": torch.rand(2),
    }


def recomputed(mesh):
    """The gradients with and without recomputation in the backward pass."""
    grads = []
    for recompute in (False, True):
        model = split(toy(dropout=0.3), mesh)
        torch.manual_seed(7)
        if recompute:
            loss = torch.utils.checkpoint.checkpoint(lambda m=model: m(tokens_of(13))[0], use_reentrant=False)
        else:
            loss = model(tokens_of(13))[0]
        loss.backward()
        grads.append(model.project.weight.grad)
    return grads


def compiled(mesh):
    """The loss and a gradient, of the model as it is and compiled."""
    results = []
    for compile_it in (False, True):
        model = split(toy(), mesh)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
        loss, _ = run(tokens_of(13))
        loss.backward()
        results.append((loss.detach(), model.project.weight.grad))
    return results


def cases(mesh):
    """All that the tests below look at, of one start."""
    sequence = SplitSequence(rank=mesh.rank("context"), size=mesh.size("context"), group=mesh.group("context"))
    results = {"attention": {}, "ring": {}}
    for length in LENGTHS:
        for kind in MASKS:
            for num_kv_heads in (4, 2):
                key = f"{kind} {length} {num_kv_heads}"
                results["attention"][key] = attention(sequence, length, kind, num_kv_heads=num_kv_heads)
    for length in (16, 29):
        results["ring"][f"{length} 4"] = ring(mesh, length, 4)
        results["ring"][f"{length} 2"] = ring(mesh, length, 2)
    model = split(toy(), mesh)
    loss, _ = model(tokens_of(13))
    loss.backward()
    grad = model.project.weight.grad
    dist.all_reduce(grad, group=mesh.group("context"))
    results["toy"] = (loss.detach(), grad / mesh.num_gradient_copies)
    ignored = torch.tensor(float("nan"), dtype=torch.float64)
    results["ignored"] = sequence.mean(ignored, torch.full((2, 3), -100))
    results["drawn"] = drawn(mesh)
    results["recomputed"] = recomputed(mesh)
    if mesh.size("context") == 2:
        results["compiled"] = compiled(mesh)
    twin = copy.deepcopy(model)
    results["is_shared"] = twin.sequence is model.sequence
    return results


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    return on_ranks(tmp_path_factory.mktemp("ranks"), {"context": request.param}, cases)


@pytest.mark.parametrize("kind", list(MASKS))
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_and_its_gradients_are_those_of_the_whole(ranks, kind, length):
    for num_kv_heads in (4, 2):
        mixed, grads = attention(WholeSequence(), length, kind, num_kv_heads=num_kv_heads)
        of_ranks = [each["attention"][f"{kind} {length} {num_kv_heads}"] for each in ranks]
        summed = [sum(each[1][number] for each in of_ranks) / len(ranks) for number in range(3)]
        for each, _ in of_ranks:
            torch.testing.assert_close(each, mixed, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(summed, grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [16, 29])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_the_ring_gives_what_gathering_gives(ranks, length, num_kv_heads):
    mixed, grads = attention(WholeSequence(), length, "causal", num_kv_heads=num_kv_heads)
    of_ranks = [each["ring"][f"{length} {num_kv_heads}"] for each in ranks]
    summed = [sum(each[1][number] for each in of_ranks) / len(ranks) for number in range(3)]
    for each, _ in of_ranks:
        torch.testing.assert_close(each.double(), mixed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close([each.double() for each in summed], grads, rtol=1e-4, atol=1e-5)


def test_loss_and_gradient_are_those_of_one_process(ranks):
    model = toy()
    loss, _ = model(tokens_of(13))
    loss.backward()
    for each in ranks:
        torch.testing.assert_close(each["toy"], (loss.detach(), model.project.weight.grad), rtol=1e-12, atol=1e-12)


def test_a_batch_without_any_target_has_no_mean(ranks):
    assert all(each["ignored"].isnan() for each in ranks)


def test_every_rank_drops_other_features_and_all_end_alike(ranks):
    first, *others = (each["drawn"] for each in ranks)
    for other in others:
        assert not torch.equal(first["dropped"], other["dropped"])
        assert not torch.equal(first["attended"], other["attended"])
        assert torch.equal(first["shared"], other["shared"])
        assert torch.equal(first["next"], other["next"])
        assert torch.equal(first["loss"], other["loss"])
    assert 0.3 < first["dropped"].double().mean() < 0.7


def test_recomputation_drops_the_same_features(ranks):
    for each in ranks:
        assert torch.equal(*each["recomputed"])


def test_a_compiled_model_gives_the_same(ranks):
    for each in ranks:
        if "compiled" in each:
            torch.testing.assert_close(*each["compiled"], rtol=1e-12, atol=1e-12)


def test_a_copy_of_a_model_is_split_over_the_same_ranks(ranks):
    assert all(each["is_shared"] for each in ranks)


def test_own_random_numbers_leave_the_generator_where_one_draw_leaves_it():
    ends = []
    for rank in (0, 1):
        torch.manual_seed(1)
        with own_random_numbers(CPU, rank):
            torch.rand(rank + 5)
        ends.append(torch.rand(3))
    assert torch.equal(*ends)


def test_outside_of_training_nothing_is_drawn():
    dropout = nn.Dropout(0.5).eval()
    draw_apart(dropout, rank=1, size=2)
    before = torch.get_rng_state()
    assert torch.equal(dropout(torch.ones(1, 2, 3)), torch.ones(1, 2, 3))
    assert torch.equal(before, torch.get_rng_state())


def test_this_torch_has_a_ring_and_the_cpu_does_not_take_it():
    assert torch_ring() is not None
    queries, keys, _ = heads(64, dtype=torch.float32)
    assert ring_kernel(queries, keys) is None


def compiled_draws(mesh):
    """What compiled code drops on a rank, what attention gives with hardly any dropout, and what is drawn next."""
    torch.manual_seed(3)
    model = split(toy(dropout=0.5), mesh)
    drop = torch.compile(model.drop, backend="aot_eager", fullgraph=True)
    sequence = model.sequence
    length = 13
    own = [sequence.take(torch.rand(2, heads, length, 8), 2) for heads in (4, 2, 2)]

    def attend(dropout):
        return sequence.attend(*own, is_causal=True, dropout=dropout, enable_gqa=True)

    compiled_attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    return {
        "dropped": drop(torch.ones(2, 8, 64)),
        # Without padding, which may attend to anything.
        **{
            name: sequence.whole(run(p), 2)
            for name, run, p in (
                ("half", compiled_attend, 0.5),
                ("hardly", compiled_attend, 1e-9),
                ("none", attend, 0.0),
            )
        },
        "next": torch.rand(2),
    }


def test_compiled_dropout_differs_between_ranks_and_leaves_generators_equal(tmp_path):
    one, two = on_ranks(tmp_path, {"context": 2}, compiled_draws)
    for each in (one, two):
        assert set(each["dropped"].unique().tolist()) == {0.0, 2.0}
        assert 0.3 < (each["dropped"] == 0).float().mean() < 0.7
        torch.testing.assert_close(each["hardly"], each["none"])
        assert not torch.allclose(each["half"], each["none"])
    agree = (one["dropped"] == two["dropped"]).float().mean()
    assert 0.3 < agree < 0.7  # independent: they agree by chance
    assert torch.equal(one["next"], two["next"])
