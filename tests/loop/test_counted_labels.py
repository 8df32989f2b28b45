"""A loss over labels: the same update for every split of a batch, and none without a label.

Two ranks are in tests/distributed.
"""

import logging

import pytest
import torch
from tests.distributed import token_cases
from tests.distributed.token_cases import MODELS, SIZES, Bigram, build, read_log, step_on_nothing, train
from tests.messages import raises

from trainwright import Mean, RunConfig, Trainer, build_trainer
from trainwright.errors import TrainwrightError
from trainwright.loop.outputs import count_targets
from trainwright.models.bert import Bert
from trainwright.models.llama import Llama
from trainwright.user_code.locations import location_of

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_step_is_the_same_for_every_micro_batch(kind, tmp_path):
    logs = [
        train(tmp_path, f"of-{size}", {"type": kind, **MODELS[kind]}, micro_batch_size=size)[0] for size in (8, 4, 2, 1)
    ]
    first = logs[0]
    assert first["loss"] > 1
    for each in logs[1:]:
        assert (each["loss"], each["grad_norm"]) == pytest.approx((first["loss"], first["grad_norm"]), rel=1e-5)


def test_an_evaluation_weights_labels_and_not_samples(tmp_path):
    losses = []
    for size in (8, 3):
        overrides = (f"evaluation.batch_size={size}", "data.eval={type: 'tests.distributed.token_cases:Rows'}")
        trainer = build(tmp_path, f"of-{size}", {"type": "bert", **SIZES}, *overrides)
        losses.append(trainer.evaluate()["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_modes_compile_and_graph_make_the_same_step(tmp_path):
    model = {"type": "llama", **SIZES}
    eager = train(tmp_path, "eager", model)[0]
    for mode in (
        "runtime={device: cpu, mode: graph}",
        "runtime={device: cpu, mode: compile, compile_backend: aot_eager}",
    ):
        one = train(tmp_path, f"{mode.count('compile')}", model, mode)[0]
        assert (one["loss"], one["grad_norm"]) == pytest.approx((eager["loss"], eager["grad_norm"]), rel=1e-5)


# an update without a label


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "adamw", "lr": 0.1, "weight_decay": 0.1},
        {"type": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        {"type": "muon", "lr": 0.1},
    ],
    ids=lambda each: each["type"],
)
def test_an_update_without_a_label_changes_neither_weights_nor_state(optimizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        is_unchanged, last = step_on_nothing(tmp_path, "empty", optimizer)
    assert is_unchanged
    assert last["step"] == 3
    assert last["empty_updates"] == 1
    assert "loss" not in last
    assert last["grad_norm"] == 0
    assert any("Step 3" in record.getMessage() for record in caplog.records)


def test_a_captured_update_without_a_label_changes_nothing(tmp_path):
    model = {"type": "llama", **SIZES}
    graph = "runtime={device: cpu, mode: graph}"
    trainer = build(tmp_path, "graph", model, graph, "trainer.max_steps=8", micro_batch_size=8)
    states = []

    inner = trainer.next_train_inputs

    def inputs(iterator):
        states.append(token_cases.state_of(trainer))
        batch = inner(iterator)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)} if len(states) == 7 else batch

    trainer.next_train_inputs = inputs
    trainer.train()
    assert states[5] != states[6] == states[7]
    assert read_log(tmp_path, "graph")[6]["empty_updates"] == 1


# what models count


def test_a_model_called_outside_a_trainer_returns_a_plain_mean():
    torch.manual_seed(0)
    model, rows = Llama(**SIZES), token_cases.Rows()
    loss = model(rows.ids, labels=rows.labels)["loss"]
    loss.backward()
    assert loss.ndim == 0
    assert int(model.count_targets(rows.labels)) == int((rows.labels[:, 1:] != -100).sum())


def test_a_sum_and_a_forward_of_the_user_s_own_have_no_count_and_class_weights_are_summed():
    class Mine(Bert):
        def forward(self, input_ids, labels):
            return {"loss": super().forward(input_ids, labels)["loss"] * 2}

    labels = token_cases.Rows().labels
    model = Bert(**SIZES)
    assert model.count_targets(labels) is not None
    model.criterion = torch.nn.CrossEntropyLoss(weight=torch.full((50,), 0.5))
    assert model.count_targets(labels) == 0.5 * (labels != -100).sum()
    model.criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    assert model.count_targets(labels) is None
    assert Mine(**SIZES).count_targets(labels) is None


def test_counts_of_transformers_classes_are_those_of_their_losses():
    labels = torch.tensor([[1, 2, -100, 4], [-100, 2, 3, -100]])
    sizes = {"vocab_size": 50, **token_cases.BERT}
    bert = transformers.BertConfig(**sizes, num_labels=3)
    classes = {
        transformers.BertForMaskedLM(bert): labels,
        transformers.BertForTokenClassification(bert): labels.clamp(max=2),
        transformers.BertForSequenceClassification(bert): torch.tensor([1, -100]),
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **token_cases.LLAMA)): labels,
    }
    for model, given in classes.items():
        batch = {"input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "labels": given}
        loss = model.eval()(**batch).loss
        batch_of_one = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(2)]
        parts = [(model(**each).loss, count_targets(model, each)) for each in batch_of_one]
        total = sum(part.nan_to_num() * count for part, count in parts)
        torch.testing.assert_close(total / sum(count for _, count in parts), loss)


def test_a_loss_of_transformers_that_is_not_certain_has_no_count():
    class Mine(transformers.BertForMaskedLM):
        def forward(self, **batch):
            return super().forward(**batch)

    config = transformers.BertConfig(vocab_size=50, **token_cases.BERT, num_labels=1)
    labels = token_cases.Rows().labels
    assert count_targets(Mine(config), {"labels": labels}) is None
    assert count_targets(transformers.BertForSequenceClassification(config), {"labels": labels[:, 0]}) is None
    assert count_targets(transformers.BertForMaskedLM(config), {"labels": labels, "shift_labels": labels}) is None


# a plain loss


def test_a_plain_loss_next_to_ignored_labels_is_rejected_where_batches_are_split(tmp_path):
    model = {"type": "tests.distributed.token_cases:Bigram"}
    with raises(TrainwrightError, "Mean(total, count)", "masked_language_model", at=location_of(Bigram.forward)):
        train(tmp_path, "split", model)
    assert train(tmp_path, "whole", model, micro_batch_size=8)[0]["loss"] > 1


def test_both_ways_to_count_are_accepted_and_give_the_same_step(tmp_path):
    class Counting(Trainer):
        def forward(self, **batch):
            count = (batch["labels"] != -100).sum()
            loss = super().forward(**batch)["loss"]
            return Mean(loss.nan_to_num() * count, count)

    model = {"type": "tests.distributed.token_cases:Bigram"}
    whole = train(tmp_path, "whole", model, micro_batch_size=8)[0]
    masked = train(tmp_path, "masked", model, type="masked_language_model")[0]
    config = RunConfig.load(tmp_path / "whole.yaml", ["name=mean", "trainer.micro_batch_size=4"])
    build_trainer(config, Counting).train()
    for each in (masked, read_log(tmp_path, "mean")[0]):
        assert (each["loss"], each["grad_norm"]) == pytest.approx((whole["loss"], whole["grad_norm"]), rel=1e-5)


# rows without a label


def test_rows_without_a_label_are_counted_in_the_log_and_change_nothing(tmp_path):
    model, size = {"type": "llama", **SIZES}, {"micro_batch_size": 6, "global_batch_size": 12, "max_steps": 2}
    overrides = ("log.every_steps=2", "data.num_workers=1")
    (line,) = train(tmp_path, "rows", model, *overrides, rows={"empty": 4}, **size)
    assert line["unlabelled_rows"] == 2 * 5  # of twelve rows, each seen twice
    shorter = train(tmp_path, "shorter", model, micro_batch_size=8, max_steps=2)
    assert line["grad_norm"] == pytest.approx(sum(each["grad_norm"] for each in shorter) / 2, rel=1e-4)
    assert [each["unlabelled_rows"] for each in shorter] == [1, 1]


def test_rows_with_labels_and_batches_without_labels_are_not_counted(tmp_path):
    line = train(tmp_path, "rows", {"type": "tests.distributed.token_cases:Unlabelled"}, rows={"labelled": False})[0]
    assert "unlabelled_rows" not in line
