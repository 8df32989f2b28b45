"""The report on the data of a run agrees with training, for every kind of data."""

import json
import sys
from itertools import islice

import pytest
import torch
from tests.analysis.projects import TRAINER, write_project
from tests.messages import raises

from trainwright import RunConfig, build_trainer
from trainwright.analysis.data import describe_data
from trainwright.errors import ConfigError, DataError

MIX = """
  train:
    type: trainwright.data.mix:mix
    sources:
      code: {type: json_lines, path: code.jsonl, weight: 1}
      prose: {type: json_lines, path: prose.jsonl, weight: 3}
  collator: {type: tokenize, tokenizer: bytes, drop: [url]}
"""
PACK = """
  train:
    type: trainwright.data.pack:pack
    length: 32
    tokenizer: bytes
    source: {type: json_lines, path: [code.jsonl, prose.jsonl]}
"""


def look(folder, data, *overrides, **arguments):
    write = {name: arguments.pop(name) for name in ("trainer", "model") if name in arguments}
    config = RunConfig.load(write_project(folder, data, **write), list(overrides))
    return describe_data(config, **arguments)


def by_name(fields):
    return {field.name: field for field in fields}


def test_the_first_batch_is_that_of_training(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Drawn}\n").sets[0]
    model = "model: {type: torch.nn:Linear, in_features: 4, out_features: 1}\n"
    run = write_project(in_tmp, "  train: {type: mine.Drawn}\n", model=model)
    trainer = build_trainer(RunConfig.load(run))
    [batch] = islice(trainer.train_data.batches(iter), 1)
    assert by_name(found.batch.fields)["x"].mean == pytest.approx(float(batch["x"].double().mean()), abs=0)
    assert [sample.row for sample in found.samples] == batch["index"][:3].tolist()
    shown = [by_name(sample.fields)["x"].minimum for sample in found.samples]
    assert shown == batch["x"][:3].amin(1).tolist()


def test_a_look_changes_no_generator(in_tmp):
    config = RunConfig.load(write_project(in_tmp, "  train: {type: mine.Drawn}\n"))
    describe_data(config)
    first = torch.rand(1)
    describe_data(config)
    assert torch.equal(first, torch.rand(1))


def test_tuples_have_fields_by_their_number(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Pairs}\n", "data.shuffle=false", show=2).sets[0]
    assert [sample.position for sample in found.samples] == [0, 1]
    assert [[field.name for field in sample.fields] for sample in found.samples] == [["0", "1"], ["0", "1"]]
    assert by_name(found.samples[1].fields)["1"].text == "1"
    assert by_name(found.batch.fields)["0"].shape == (8, 3)
    assert (found.nest.describe(), found.num_samples, found.tokens, found.lengths) == ("mine.Pairs", 30, None, None)


def test_a_split_shows_its_fraction_and_the_row_in_the_whole(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Pairs}\n  split: [8, 1, 1]\n")
    train, valid, test = found.sets
    assert [(one.name, one.split.samples, one.split.whole) for one in (train, valid, test)] == [
        ("train", 24, 30),
        ("valid", 3, 30),
        ("test", 3, 30),
    ]
    for sample in train.samples:
        assert by_name(sample.fields)["0"].mean == sample.row


def test_a_mixture_names_sources_rows_shares_and_epochs(in_tmp):
    found = look(in_tmp, MIX, show=8).sets[0]
    code, prose = found.mixture.sources
    assert (code.samples, code.weight, code.share) == (20, 1, 0.25)
    assert (prose.samples, prose.weight, prose.share) == (60, 3, 0.75)
    assert code.epochs * 20 + prose.epochs * 60 == pytest.approx(80)
    for sample in found.samples:
        assert by_name(sample.fields)["text"].text.startswith(f"{sample.source} {sample.row}")
    assert found.nest.describe() == "trainwright.data.mix:mix (Mix) ← code: json_lines, prose: json_lines"


def test_packed_rows_are_decoded_and_their_fill_is_shown(in_tmp):
    found = look(in_tmp, PACK).sets[0]
    tokens = by_name(found.samples[0].fields)["input_ids"]
    assert tokens.shape == (32,)
    assert any(word in tokens.text for word in ("code", "prose", "so"))
    assert 0.5 < found.fill <= 1
    assert found.tokens.per_epoch == 32 * found.num_samples
    assert found.batch.padding_by == "document_ids"
    assert (found.lengths.minimum, found.lengths.maximum, found.lengths.bars) == (32, 32, ())
    assert found.nest.describe().endswith("pack (PackedDocuments) ← json_lines (FileRows)")


def test_what_a_collator_makes_of_texts_is_decoded_and_what_is_learnt_of_it(in_tmp):
    data = (
        "  train: {type: json_lines, path: chat.jsonl}\n  shuffle: false\n"
        "  collator: {type: tokenize, tokenizer: bytes, prompt: ask, completion: say, add_eos: true}\n"
    )
    found = look(in_tmp, data).sets[0]
    row = by_name(found.batch.first_row)
    assert row["input_ids"].text == "0+1=1<eos>"
    assert (row["labels"].text, row["labels"].num_ignored, row["labels"].is_as_input_ids) == ("1<eos>", 4, True)
    assert found.batch.in_loss == pytest.approx(16 / 48)
    assert found.lengths.unit == "characters of ask, say"
    assert found.tokens.is_estimate


def test_a_dataset_s_own_decode_is_used(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Spelled}\n", "data.shuffle=false", show=2).sets[0]
    assert [by_name(sample.fields)["input_ids"].text for sample in found.samples] == ["Hi!a", "Hi!b"]
    assert (found.tokens.per_epoch, found.tokens.is_estimate) == (80, False)


def test_lengths_that_a_dataset_knows_are_not_counted_again(in_tmp):
    data = "  train: {type: mine.Counted}\n  collator: {type: padded, pad_token_id: 0, drop: [url]}\n"
    found = look(in_tmp, data, samples=5).sets[0]
    assert (found.lengths.samples, found.lengths.is_whole, found.tokens.per_epoch) == (40, True, 160)


def test_lengths_are_counted_over_so_many_samples_and_no_more_than_an_epoch(in_tmp):
    data = "  train: {type: mine.Tokens}\n  collator: {type: padded, pad_token_id: 0, drop: [url]}\n"
    found = look(in_tmp, data, samples=10).sets[0]
    assert (found.lengths.samples, found.lengths.is_whole, found.tokens.is_estimate) == (10, False, True)
    found = look(in_tmp, data).sets[0]
    assert (found.lengths.samples, found.lengths.is_whole, found.tokens.is_estimate) == (40, True, False)
    assert sum(bar.samples for bar in found.lengths.bars) == 40
    assert found.tokens.per_epoch == 160


def test_of_a_stream_no_more_is_read_than_needed(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Endless}\n  shuffle_buffer: 16\n", samples=20).sets[0]
    assert found.num_samples is None
    assert (found.tokens.per_epoch, found.tokens.per_sample) == (None, 2.0)
    [module] = [each for name, each in sys.modules.items() if name.endswith("mine") and hasattr(each, "Endless")][-1:]
    assert module.Endless.given <= 48
    assert [sample.row for sample in found.samples] == [None, None, None]


def test_a_stream_is_shown_in_the_order_of_training(in_tmp):
    data = (
        "  train: {type: json_lines, path: prose.jsonl, streaming: true}\n"
        "  collator: {type: tokenize, tokenizer: bytes, drop: [url]}\n"
    )
    found = look(in_tmp, data, show=8).sets[0]
    trainer = build_trainer(RunConfig.load(in_tmp / "run.yaml"))
    [batch] = islice(trainer.train_data.batches(iter), 1)
    decoded = [bytes(row[row < 256].tolist()).decode() for row in batch["input_ids"]]
    assert [by_name(sample.fields)["text"].text for sample in found.samples] == decoded


def test_rows_that_cannot_be_read_are_remarks_and_leave_rows_in_step(in_tmp):
    data = (
        "  train: {type: json_lines, path: prose.jsonl}\n  on_error: skip\n  shuffle: false\n"
        "  collator: {type: tokenize, tokenizer: bytes, drop: [url]}\n"
    )
    run = write_project(in_tmp, data)
    lines = (in_tmp / "prose.jsonl").read_text().splitlines()
    lines[1] = "{torn"
    (in_tmp / "prose.jsonl").write_text("\n".join(lines) + "\n")
    found = describe_data(RunConfig.load(run)).sets[0]
    assert [(sample.position, sample.row) for sample in found.samples] == [(0, 0), (2, 2), (3, 3)]
    assert by_name(found.samples[1].fields)["url"].text == "u2"
    assert found.batch.samples == 7
    assert any("Skipped: row 1 of FileRows" in remark and "line 2" in remark for remark in found.remarks)
    assert not (in_tmp / "runs").exists()
    with raises(DataError, "prose.jsonl", "2"):
        describe_data(RunConfig.load(run, ["data.on_error=raise"]))


def test_a_collator_that_fails_leaves_the_rest_to_see(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Tokens}\n")
    assert isinstance(found.failure, DataError)
    assert found.sets[0].batch is None
    assert len(found.sets[0].samples) == 3
    assert found.sets[0].lengths.samples == 40


def test_another_set_that_cannot_be_read_does_not_hide_the_first(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Pairs}\n  eval: {gone: {type: json_lines, path: no.jsonl}}\n")
    assert isinstance(found.failure, DataError)
    assert "no.jsonl" in found.sets[1].error
    assert found.sets[0].batch is not None


def test_a_set_by_its_name_is_shown_alone_in_its_own_order(in_tmp):
    data = "  train: {type: mine.Pairs}\n  eval: {valid: {type: mine.Pairs}}\n"
    [found] = look(in_tmp, data, "evaluation.batch_size=5", name="valid").sets
    assert (found.name, found.batch.samples, found.plan) == ("valid", 5, None)
    assert [sample.row for sample in found.samples] == [0, 1, 2]
    with raises(ConfigError, "vald"):
        look(in_tmp, data, name="vald")


def test_a_trainer_s_own_loader_is_read_as_it_is(in_tmp):
    trainer = TRAINER.replace("{max_steps", "{type: datasets/mine.py:Mine, max_steps")
    found = look(in_tmp, "  num_workers: 0\n", trainer=trainer).sets[0]
    assert (found.nest.type, found.batch.samples) == ("Pairs", 4)
    assert [sample.row for sample in found.samples] == [0, 1, 2]


def test_a_task_s_own_sets_are_looked_at(in_tmp):
    trainer = f"{TRAINER}task: {{type: datasets/mine.py:Learns}}\n"
    assert [one.name for one in look(in_tmp, "  num_workers: 0\n", trainer=trainer).sets] == ["train", "valid"]


def test_a_rank_s_batch_is_its_part_of_the_global_one(in_tmp):
    found = look(
        in_tmp, "  train: {type: mine.Pairs}\n", "runtime.mesh.replicate=2", "data.shuffle=false", show=6
    ).sets[0]
    assert (found.batch.samples, found.batch.num_ranks, found.batch.micro_batch_size) == (4, 2, 4)
    assert [sample.position for sample in found.samples] == [0, 1, 2, 3, 8, 9]


def test_a_run_without_a_limit_can_be_looked_at(in_tmp):
    found = look(in_tmp, "  train: {type: mine.Pairs}\n", "trainer.max_steps=null").sets[0]
    assert found.plan is None
    assert found.batch is not None


def test_everything_becomes_json(in_tmp):
    for data in (MIX, PACK, "  train: {type: mine.Drawn}\n"):
        told = json.loads(json.dumps(look(in_tmp, data).to_dict(), allow_nan=False))
        assert told["sets"][0]["batch"]["fields"]
