"""Profiles of real runs on the CPU."""

import gzip
import json
from itertools import pairwise

import pytest
import torch
from tests.loop.small_runs import PLAIN, at, make, run
from tests.messages import mentions, raises

from trainwright import Trainer, load_checkpoint
from trainwright.errors import ConfigError
from trainwright.hooks.costs import LABELS
from trainwright.hooks.profiler import Profiler
from trainwright.loop.heartbeat import PhaseTrace

QUICK = (*PLAIN, "trainer.max_steps=8", "checkpoint.every_steps=null")


@pytest.fixture(autouse=True)
def _quick_rate(monkeypatch):
    monkeypatch.setattr("trainwright.hooks.flops._MEASURED_SECONDS", 0.01)
    monkeypatch.setattr("trainwright.hooks.flops._LARGEST", 256)


def ranges_of(path):
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [
        (event["ts"], event["dur"], event["name"].removeprefix(PhaseTrace.PREFIX))
        for event in events
        if _is_range(event)
    ]
    return sorted(found)


def _is_range(event):
    return event.get("cat") == "user_annotation" and event["name"].startswith(PhaseTrace.PREFIX)


def test_a_profile_has_its_steps_a_summary_and_shares_that_add_up(tmp_path, caplog):
    folder = tmp_path / "run"
    with caplog.at_level("INFO"):
        run(folder, *QUICK, hooks=[Profiler(first=4, steps=3)])
    trace = folder / "profile" / "steps-5-7-rank-0.json.gz"
    names = [name for _, _, name in ranges_of(trace)]
    assert names.count("data") == 3
    assert names.count("forward") == names.count("backward") == 3 * 2  # two micro-batches
    assert names.count("optimizer") == 3
    text = (folder / "profile" / "summary.txt").read_text("utf-8")
    assert text.startswith("Profile of steps 5 to 7: ")
    assert text.strip() in caplog.text
    figures = json.loads((folder / "profile" / "summary.json").read_text())
    assert sum(figures["percent"].values()) == pytest.approx(100)
    assert min(figures["percent"][row] for row in ("data", "host", "forward", "backward", "optimizer")) > 0
    assert figures["percent"]["idle"] == figures["percent"]["communication"] == 0
    assert len(figures["costs"]) == 3
    assert 100 / 3 < sum(each["percent"] for each in figures["costs"]) <= 100
    for number, each in enumerate(figures["costs"], 1):
        label = LABELS[each["name"]]
        assert mentions(text, f"{number}. {label}", f"{each['percent']:.1f}", each["setting"] or each["remark"])
    assert figures["flops_per_step"] == 2 * 2 * 8 * (4 * 8 + 8 * 2) + 2 * 8 * 8 * 2
    assert figures["share_of_known_peak"] is None
    assert 0 < figures["share_of_matrix_rate"] < 1


def test_a_user_s_own_step_is_counted_while_it_runs(tmp_path):
    class Twice(Trainer):
        def train_step(self, batch):
            update = self.begin_update()
            for micro_batch in (batch, batch):
                update.backward(self.run_forward(micro_batch))
            return update.apply()

    run(tmp_path / "run", *QUICK, hooks=[Profiler(first=2, steps=2)], trainer=Twice)
    figures = json.loads((tmp_path / "run" / "profile" / "summary.json").read_text())
    assert figures["is_counted"]
    assert figures["flops_per_step"] == 2 * (2 * 2 * 8 * (4 * 8 + 8 * 2) + 2 * 8 * 8 * 2)


def test_ranges_follow_each_other_and_are_never_nested(tmp_path):
    run(tmp_path / "run", *QUICK, hooks=[Profiler(first=1, steps=4)])
    ranges = ranges_of(tmp_path / "run" / "profile" / "steps-2-5-rank-0.json.gz")
    for (start, length, _), (following, _, _) in pairwise(ranges):
        assert start + length <= following + 0.5  # the trace rounds to parts of a microsecond


def test_a_profiled_run_is_bit_equal(tmp_path):
    settings = ("model.dropout=0.3", "data.train.noise=0.1")
    run(tmp_path / "plain", *QUICK, *settings)
    run(tmp_path / "profiled", *QUICK, *settings, hooks=[Profiler(first=3, steps=2)])
    plain, profiled = (load_checkpoint(tmp_path / name).state_dict() for name in ("plain", "profiled"))
    assert all(torch.equal(plain[name], profiled[name]) for name in plain)


def test_the_profiler_leaves_no_attributes(tmp_path):
    trainer = make(tmp_path / "run", *QUICK, hooks=[Profiler(first=2, steps=2)])
    owners = (trainer, trainer.heartbeat, trainer.context.updater)
    before = [set(vars(owner)) for owner in owners]
    trainer.train()
    after = [set(vars(owner)) for owner in owners]
    assert [new - old for new, old in zip(after, before, strict=True)] == [set()] * 3


@pytest.mark.parametrize(("left", "expected"), [(8, "steps-3-8"), (3, "steps-2-3"), (1, "steps-1-1")])
def test_a_short_run_is_profiled_until_its_end(tmp_path, left, expected):
    run(tmp_path / "run", *PLAIN, f"trainer.max_steps={left}", hooks=[Profiler(first=2, steps=6)])
    assert [path.name for path in (tmp_path / "run" / "profile").glob("*.gz")] == [f"{expected}-rank-0.json.gz"]


def test_a_stopped_run_has_a_summary(tmp_path):
    stop = at(5, lambda trainer: trainer.stop("enough"))
    run(tmp_path / "run", *QUICK, hooks=[Profiler(first=3, steps=5), stop])
    assert (tmp_path / "run" / "profile" / "summary.txt").read_text("utf-8").startswith("Profile of steps 4 to 5: ")


def test_a_resumed_run_counts_its_own_steps(tmp_path):
    run(tmp_path / "run", *PLAIN, "trainer.max_steps=4")
    run(tmp_path / "run", *PLAIN, "trainer.max_steps=8", hooks=[Profiler(first=1, steps=2)])
    assert (tmp_path / "run" / "profile" / "steps-6-7-rank-0.json.gz").exists()


def test_an_error_in_a_profiled_step_ends_the_profiler(tmp_path):
    class Failing(Trainer):
        def forward(self, **batch):
            if self.step == self.fails_at:
                raise OSError("lost")
            return super().forward(**batch)

    for fails_at in (0, 3):
        Failing.fails_at = fails_at
        trainer = make(tmp_path / f"run-{fails_at}", *QUICK, hooks=[Profiler(first=2, steps=4)], trainer=Failing)
        with pytest.raises(OSError, match="lost"):
            trainer.train()
        assert "run_forward" not in vars(trainer)
        assert torch._C._len_torch_dispatch_stack() == 0
    assert run(tmp_path / "next", *QUICK, hooks=[Profiler(first=2, steps=4)]).step == 8


def test_evaluating_within_a_profile_does_not_count(tmp_path):
    settings = ("evaluation.every_steps=1", "trainer.max_steps=6", "checkpoint.every_steps=2")
    run(tmp_path / "run", *settings, hooks=[Profiler(first=2, steps=3)])
    folder = tmp_path / "run" / "profile"
    ranges = ranges_of(folder / "steps-3-5-rank-0.json.gz")
    evaluating = sum(length for _, length, name in ranges if name == "evaluate") / 1e6
    whole = (ranges[-1][0] + ranges[-1][1] - ranges[0][0]) / 1e6
    counted = 3 * json.loads((folder / "summary.json").read_text())["seconds_per_profiled_step"]
    assert evaluating > 0
    assert counted <= whole - evaluating


@pytest.mark.parametrize("wrong", [{"first": -1}, {"steps": 0}, {"steps": 1.5}, {"first": True}])
def test_impossible_settings_are_rejected(wrong):
    with raises(ConfigError):
        Profiler(**wrong)
