"""Losses, outputs, gradients and updates of a pipeline are those of one process, in float64 to 1e-10."""

import pytest
import torch
import torch.distributed as dist
from tests.messages import mentions, raises
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.test_stages import MODELS, SMALL
from torch import nn

from trainwright.errors import DataError, TrainwrightError
from trainwright.models.bert import BertClassifier
from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.parallel.context import split_sequences
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import ALONE, Mesh, own_gradient
from trainwright.parallel.pipeline import Hidden, Pipeline, _StageModule, split_layers
from trainwright.parallel.sharding import packaged_rules, plan_sharding
from trainwright.parallel.tensor import split_tensors, whole

RATE = 0.1
CPU = torch.device("cpu")


def tokens(num_rows, length, *, seed):
    """Some rows of tokens with labels, some of which are left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SMALL["vocab_size"], (num_rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels}


def with_mask(batch):
    """The batch with padding at the end of its first row."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -2:] = 0
    return {**batch, "attention_mask": mask}


def with_documents(batch):
    """The batch as two documents a row."""
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return {**batch, "position_ids": places % 4, "document_ids": places // 4}


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, 8, 8, generator=generator).double(),
        "labels": torch.tensor([seed % 3, 1]),
    }


PLAIN = [tokens(2, 9, seed=seed) for seed in range(4)]
TEXTS = [{**with_mask(batch), "labels": torch.tensor([0, 1])} for batch in PLAIN]
RAGGED = [tokens(2, 9, seed=1), tokens(2, 9, seed=2), tokens(1, 9, seed=3), tokens(2, 7, seed=4), tokens(2, 7, seed=5)]
CASES = {
    "tied": (MODELS["tied"][0], PLAIN),
    "untied": (MODELS["untied"][0], [with_mask(batch) for batch in PLAIN]),
    "grouped heads": (lambda: Llama(**SMALL, num_kv_heads=1, attention_bias="qkv"), [with_documents(b) for b in PLAIN]),
    "gpt2": (MODELS["gpt2"][0], [with_documents(batch) for batch in PLAIN]),
    "bert": (MODELS["bert"][0], [with_mask(batch) for batch in PLAIN]),
    "classifier": (lambda: BertClassifier(**SMALL), TEXTS),
    "vit": (MODELS["vit"][0], [images(seed) for seed in range(4)]),
    "ragged": (MODELS["tied"][0], RAGGED),  # shapes that change from micro-batch to micro-batch
    "one micro-batch": (MODELS["tied"][0], PLAIN[:1]),  # fewer than stages
    "fused loss": (lambda: Llama(**SMALL, fused_loss=True), PLAIN),
}


def made(name, seed=0):
    """The case's model in float64, equal wherever it is made, and its micro-batches."""
    torch.manual_seed(seed)
    make, micro_batches = CASES[name]
    return make().double(), micro_batches


def share(micro_batches, number):
    """What a micro-batch's loss weighs in the update: its part of all rows."""
    rows = [len(next(iter(micro_batch.values()))) for micro_batch in micro_batches]
    return rows[number] / sum(rows)


def step(parameters):
    with torch.no_grad():
        for parameter in {id(each): each for each in parameters}.values():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def in_one_process(name, num_steps=2):
    """The losses of all micro-batches over some updates, the weights after them, and an evaluation."""
    model, micro_batches = made(name)
    losses = []
    for _ in range(num_steps):
        for number, micro_batch in enumerate(micro_batches):
            loss = model(**micro_batch)["loss"]
            losses.append(loss.item())
            (loss * share(micro_batches, number)).backward()
        step(model.parameters())
    logits = model.eval()(**micro_batches[0])["logits"]
    return {"losses": losses, "weights": dict(model.state_dict()), "logits": logits.detach()}


def in_a_pipeline(name, mesh, num_steps=2):
    """The same, of what this rank has."""
    model, micro_batches = made(name)
    split_layers(model, mesh)
    pipeline = Pipeline(model, mesh, num_micro_batches=len(micro_batches), device=CPU)
    losses = []

    def scale(outputs, number):
        losses.append(outputs["loss"].item())
        return outputs["loss"] * share(micro_batches, number)

    for _ in range(num_steps):
        pipeline.run(micro_batches, scale)
        pipeline.sum_tied_gradients()
        step(model.parameters())
    model.eval()
    outputs = pipeline.evaluate(micro_batches[0])
    logits = None if outputs is None else outputs["logits"]
    return {"losses": losses, "weights": dict(model.state_dict()), "logits": logits}


def frozen_beginning(mesh):
    """Gradients where the first stage has nothing to learn."""
    model, micro_batches = made("untied")
    first = [model.model.embed_tokens, *model.model.layers[:2]]
    for module in first:
        module.requires_grad_(False)
    split_layers(model, mesh)
    pipeline = Pipeline(model, mesh, num_micro_batches=len(micro_batches), device=CPU)
    pipeline.run(micro_batches, lambda outputs, number: outputs["loss"] * share(micro_batches, number))
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def weighed(mesh):
    """Gradients where a micro-batch weighs nothing: what it gives to propagate has no gradient."""
    model, micro_batches = made("tied")
    split_layers(model, mesh)
    pipeline = Pipeline(model, mesh, num_micro_batches=len(micro_batches), device=CPU)
    pipeline.run(micro_batches, lambda outputs, number: outputs["loss"] if number != 1 else torch.zeros(()))
    pipeline.sum_tied_gradients()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def random_numbers(mesh):
    """Whether a pipeline that has run before draws what a fresh one does, dropout on."""
    torch.manual_seed(0)
    model = GPT2(**SMALL, dropout=0.2).double()
    split_layers(model, mesh)
    seen = []
    for _ in range(2):
        pipeline = Pipeline(model, mesh, num_micro_batches=4, device=CPU)
        for _ in range(2):
            torch.manual_seed(5)
            pipeline.run(PLAIN, lambda outputs, number: seen.append(outputs["loss"].item()) or outputs["loss"])
    return seen


def in_bf16(mesh):
    """The losses of a step and an evaluation under autocast."""
    torch.manual_seed(0)
    model = Llama(**SMALL)
    split_layers(model, mesh)
    pipeline = Pipeline(model, mesh, num_micro_batches=4, device=CPU)
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.run(PLAIN, lambda outputs, number: seen.append(outputs["loss"].item()) or outputs["loss"])
    return seen


class Complaining(nn.Module):
    """A criterion that rejects what it gets."""

    def forward(self, logits, labels):
        raise DataError("These labels are none.")


def mistakes(mesh):
    """What is said of batches that do not fit, on each rank, and of an error on the last."""
    model, micro_batches = made("tied")
    model.criterion = Complaining()
    split_layers(model, mesh)
    pipeline = Pipeline(model, mesh, num_micro_batches=1, device=CPU)
    said = []
    with pytest.raises(DataError) as caught:
        pipeline.evaluate({**micro_batches[0], "weights": torch.ones(2)})
    said.append(str(caught.value))
    if mesh.is_loss_rank:
        with pytest.raises(DataError) as caught:
            pipeline.evaluate(micro_batches[0])
        said.append(str(caught.value))
    else:
        pipeline.evaluate(micro_batches[0])
    return said


def all_cases(mesh):
    results = {name: in_a_pipeline(name, mesh) for name in CASES}
    acts = (frozen_beginning, weighed, random_numbers, in_bf16)
    return {**results, **{act.__name__: act(mesh) for act in acts}, "mistakes": mistakes(mesh)}


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory):
    """What two ranks return of all cases, in one start."""
    return on_ranks(tmp_path_factory.mktemp("two"), {"pipeline": 2}, all_cases)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_two_stages_learn_what_one_process_does(two_stages, name):
    alone, (first, last) = in_one_process(name), [each[name] for each in two_stages]
    assert first["losses"] == []  # only the last stage sees outputs
    assert last["losses"] == pytest.approx(alone["losses"], abs=1e-10)
    assert set(first["weights"]) | set(last["weights"]) == set(alone["weights"])
    for rank in (first, last):
        for key, weight in rank["weights"].items():
            assert_close(weight, alone["weights"][key])
    assert first["logits"] is None
    assert_close(last["logits"], alone["logits"])


def test_both_ends_hold_the_same_tied_weight_bit_for_bit(two_stages):
    first, last = (each["tied"]["weights"]["model.embed_tokens.weight"] for each in two_stages)
    assert torch.equal(first, last)
    assert torch.equal(last, two_stages[1]["tied"]["weights"]["lm_head.weight"])


def test_a_first_stage_may_be_frozen(two_stages):
    model, micro_batches = made("untied")
    for number, micro_batch in enumerate(micro_batches):
        (model(**micro_batch)["loss"] * share(micro_batches, number)).backward()
    first, last = (each["frozen_beginning"] for each in two_stages)
    assert first == {}
    for name, gradient in last.items():
        assert_close(gradient, model.get_parameter(name).grad)


def test_a_micro_batch_that_weighs_nothing_adds_nothing(two_stages):
    model, micro_batches = made("tied")
    for number in (0, 2, 3):
        model(**micro_batches[number])["loss"].backward()
    for rank in two_stages:
        for name, gradient in rank["weighed"].items():
            assert_close(gradient, model.get_parameter(name).grad)


def test_finding_out_shapes_draws_no_random_numbers(two_stages):
    seen = two_stages[1]["random_numbers"]
    assert seen[:4] == seen[4:8] == seen[8:12] == seen[12:]


def test_a_step_under_autocast_is_that_of_one_process(two_stages):
    torch.manual_seed(0)
    model = Llama(**SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = [model(**micro_batch)["loss"].item() for micro_batch in PLAIN]
    assert two_stages[1]["in_bf16"] == expected


def test_a_batch_with_a_key_that_forward_does_not_take_is_rejected_on_every_stage(two_stages):
    for rank in two_stages:
        assert mentions(rank["mistakes"][0], "Llama.forward", "input_ids")


def test_an_error_of_a_stage_is_raised_as_it_is(two_stages):
    assert two_stages[1]["mistakes"][1] == "These labels are none."


class Shrinking(nn.Module):
    """A block that keeps the shape, but not the dtype."""

    def forward(self, hidden, *beside):
        return hidden.half()


def test_blocks_that_do_not_keep_the_dtype_are_rejected():
    model, micro_batches = made("tied")
    model.model.layers[1] = Shrinking()
    split_layers(model, Mesh({**ALONE, "pipeline": 2}, 0))
    module = _StageModule(model, model.stage)
    module.micro_batches = micro_batches
    module.expected = [Hidden((2, 9, 16), torch.float64)] * len(micro_batches)
    with raises(TrainwrightError, "0", "torch.float16"):
        module(number=torch.tensor([0]))


def three_stages(mesh):
    return {name: in_a_pipeline(name, mesh) for name in ("tied", "ragged")}


@pytest.mark.parametrize("name", ["tied", "ragged"])
def test_three_stages_learn_what_one_process_does(tmp_path, name):
    alone = in_one_process(name)
    ranks = [each[name] for each in on_ranks(tmp_path, {"pipeline": 3}, three_stages)]
    assert ranks[2]["losses"] == pytest.approx(alone["losses"], abs=1e-10)
    for rank in ranks:
        for key, weight in rank["weights"].items():
            assert_close(weight, alone["weights"][key])


OTHERS = [tokens(2, 7, seed=10), tokens(2, 7, seed=11), tokens(1, 5, seed=12), tokens(2, 6, seed=13)]


def in_split_stages(mesh):
    """Gradients of stages whose parameters are split along fsdp, each data rank with micro-batches of its own."""
    results = {}
    for reshards in (True, False):
        model, micro_batches = made("tied")
        split_layers(model, mesh)
        settings = SplitSettings(reshard_after_forward=reshards)
        sync = shard_parameters(model, mesh, settings=settings, device=CPU)
        pipeline = Pipeline(model, mesh, num_micro_batches=4, device=CPU)
        # Data ranks have rows of different lengths: the order of their collectives must not depend on shapes.
        own = micro_batches if mesh.data_rank == 0 else OTHERS
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None
            sync.begin_backward(is_last=True)
            pipeline.run(own, lambda outputs, number: outputs["loss"])
            sync.finish()
            pipeline.sum_tied_gradients()
        gradients = {}
        for name, parameter in model.named_parameters():
            assert own_gradient(parameter) is not None
            gradients[name] = parameter.grad.full_tensor() * sync.averaging
        outputs = pipeline.evaluate(own[0])
        results[reshards] = gradients, None if outputs is None else outputs["loss"].item()
    dist.barrier()
    return results


def test_stages_may_split_their_parameters_along_data(tmp_path):
    model, micro_batches = made("tied")
    for micro_batch in (*micro_batches, *OTHERS):
        model(**micro_batch)["loss"].backward()
    ranks = on_ranks(tmp_path, {"pipeline": 2, "fsdp": 2}, in_split_stages)
    for rank in ranks:
        for gradients, _ in rank.values():
            for name, gradient in gradients.items():
                assert_close(gradient, model.get_parameter(name).grad)
    assert ranks[0][True][1] is None
    for rank, micro_batch in ((2, micro_batches[0]), (3, OTHERS[0])):
        assert ranks[rank][True][1] == pytest.approx(model(**micro_batch)["loss"].item(), abs=1e-10)


def in_split_matrices(mesh, names):
    """The same as in_a_pipeline, of stages whose matrices are split along tensor, with gathered weights."""
    results = {}
    for name in names:
        model, micro_batches = made(name)
        split_layers(model, mesh)
        split_tensors(model, plan_sharding(model, packaged_rules(model), mesh.sizes), mesh)
        pipeline = Pipeline(model, mesh, num_micro_batches=len(micro_batches), device=CPU)
        losses = []

        def scale(outputs, number, micro_batches=micro_batches, losses=losses):
            losses.append(outputs["loss"].item())
            return outputs["loss"] * share(micro_batches, number)

        for _ in range(2):
            pipeline.run(micro_batches, scale)
            pipeline.sum_tied_gradients()
            for parameter in model.parameters():
                own_gradient(parameter)
            step(model.parameters())
        weights = {key: whole(value) for key, value in model.state_dict().items()}
        model.eval()
        outputs = pipeline.evaluate(micro_batches[0])
        logits = None if outputs is None else outputs["logits"]
        results[name] = {"losses": losses, "weights": weights, "logits": logits}
    return results


@pytest.mark.parametrize("names", [("tied",), pytest.param(("gpt2", "bert"), marks=pytest.mark.slow)], ids="-".join)
def test_stages_may_split_their_matrices_along_tensor(names, tmp_path):
    ranks = on_ranks(tmp_path, {"pipeline": 2, "tensor": 2}, lambda mesh: in_split_matrices(mesh, names))
    for name in names:
        alone = in_one_process(name)
        for rank in ranks:
            for key, weight in rank[name]["weights"].items():
                assert_close(weight, alone["weights"][key])
        for rank in ranks[2:]:
            assert rank[name]["losses"] == pytest.approx(alone["losses"], abs=1e-10)
            assert_close(rank[name]["logits"], alone["logits"])


def in_split_sequences(mesh):
    """Gradients of stages that each have a part of the sequence, summed over the parts."""
    model, micro_batches = made("tied")
    split_layers(model, mesh)
    split_sequences(model, mesh)
    pipeline = Pipeline(model, mesh, num_micro_batches=len(micro_batches), device=CPU)
    losses = []

    def scale(outputs, number):
        losses.append(outputs["loss"].item())
        return outputs["loss"] * share(micro_batches, number)

    pipeline.run(micro_batches, scale)
    pipeline.sum_tied_gradients()
    gradients = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=mesh.group("context"))
        gradients[name] = parameter.grad / mesh.num_gradient_copies
    model.eval()
    outputs = pipeline.evaluate(micro_batches[0])
    return losses, gradients, None if outputs is None else outputs["logits"]


def test_stages_may_split_their_sequences(tmp_path):
    model, micro_batches = made("tied")
    losses = [model(**micro_batch)["loss"] for micro_batch in micro_batches]
    for number, loss in enumerate(losses):
        (loss * share(micro_batches, number)).backward()
    ranks = on_ranks(tmp_path, {"pipeline": 2, "context": 2}, in_split_sequences)
    for number, (seen, gradients, logits) in enumerate(ranks):
        for name, gradient in gradients.items():
            assert_close(gradient, model.get_parameter(name).grad)
        if number >= 2:
            assert seen == pytest.approx([loss.item() for loss in losses], abs=1e-10)
            assert_close(logits, model(**micro_batches[0])["logits"].detach())
